"""Intervals that hold what they say they hold, and the ranges and words of what is varied."""

from __future__ import annotations

import math
import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt.comparing.axes import axes, labels, names, numeric, values
from pddrt.comparing.intervals import (
    LEAST_SEEDS,
    WHATS,
    Sample,
    by_seeds,
    by_sessions,
    expanded,
    over_seeds,
    student,
    t_quantile,
)
from pddrt.errors import BadInput
from pddrt.summary import spread

# -- Student's distribution ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # Tables of the distribution; 1 is Cauchy's, where it is tan(pi * 0.475).
    [(1, math.tan(math.pi * 0.475)), (2, 4.302653), (3, 3.182446), (4, 2.776445), (5, 2.570582),
     (9, 2.262157), (10, 2.228139), (30, 2.042272), (99, 1.984217)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-6)


def test_with_much_freedom_it_is_the_normal_distribution() -> None:
    normal = statistics.NormalDist().inv_cdf(0.975)
    assert t_quantile(0.975, 5000) == pytest.approx(normal, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert student([3.0]) is None
    assert over_seeds([3.0])["low"] is None
    assert over_seeds([None, "text", True]) == {
        "n": 0, "mean": None, "low": None, "high": None, "min": None, "max": None,
    }  # fmt: skip
    low, high = student([1.0, 2.0, 3.0]) or (0, 0)
    reach = 4.302653 * 1 / math.sqrt(3)
    assert (low, high) == (pytest.approx(2 - reach), pytest.approx(2 + reach))


# -- they hold what they say -----------------------------------------------------------------------


def share_held(n: int, draw: str, trials: int = 200) -> float:
    """How often the interval over n seeds holds the true mean, which is 1."""
    random, held = Random(f"{n}/{draw}"), 0
    for trial in range(trials):
        found = [
            random.gauss(1, 0.3) if draw == "normal" else random.expovariate(1) for _ in range(n)
        ]
        (low, high), _ = by_seeds(found, found, f"{draw}/{trial}")
        held += low <= 1 <= high
    return held / trials


@pytest.mark.parametrize(("n", "least"), [(LEAST_SEEDS, 0.9), (12, 0.92)])
def test_intervals_over_few_seeds_hold_the_mean_nearly_as_often_as_they_say(
    n: int, least: float
) -> None:
    assert least <= share_held(n, "normal") <= 0.99


def test_a_skewed_number_is_held_less_often_but_not_by_much() -> None:
    assert share_held(10, "exponential") >= 0.86


def test_plain_percentiles_would_be_too_narrow() -> None:
    """What expanding them is for: the same draws, without it."""
    random, held = Random("plain"), 0
    for _ in range(200):
        found = [random.gauss(1, 0.3) for _ in range(LEAST_SEEDS)]
        draws = np.array([statistics.fmean(random.choices(found, k=5)) for _ in range(400)])
        low, high = np.percentile(draws, [2.5, 97.5])
        held += low <= 1 <= high
    assert held / 200 < 0.88


def test_what_is_hard_for_both_is_no_difference() -> None:
    """Seeds differ by far more than the columns, which are always 10 % apart."""
    random = Random("paired")
    base = [random.uniform(1, 100) for _ in range(8)]
    here = [1.1 * value * random.uniform(0.99, 1.01) for value in base]
    (low, high), (least, most) = by_seeds(base, here, "paired")
    assert high > 2 * low
    assert 1.08 < least < most < 1.12


def test_the_same_draws_give_the_same_interval() -> None:
    found = [by_seeds([1, 2, 3, 4, 9], [2, 3, 4, 5, 9], "x") for _ in range(2)]
    assert found[0] == found[1]
    assert expanded(np.full(200, np.nan), 9) is None
    assert expanded(np.arange(500.0), 1) is None


# -- over sessions ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=40))
def test_where_every_session_counts_once_the_numbers_are_those_of_the_summary(
    times: list[int],
) -> None:
    """Drawing from one session draws all of it, always: no interval, but the number itself."""
    sample = Sample.of([float(t) for t in times], [0] * len(times))
    for _, own, ratio in by_sessions([sample], [sample], [1], "one"):
        assert own is None
        assert ratio is None
    twins = Sample.of([float(t) for t in (*times, *times)], [0] * len(times) + [1] * len(times))
    told = {what: seconds.ns for what, seconds in spread(times).items() if seconds}
    for what, own, ratio in by_sessions([twins], [twins], [2], "twins"):
        assert own is not None
        assert own[0] == own[1] == pytest.approx(told[what], rel=1e-9, abs=1)
        assert ratio == (1.0, 1.0)


def test_a_session_is_drawn_as_a_whole() -> None:
    """Ten sessions of a hundred equal requests are ten values, not a thousand."""
    random = Random("sessions")
    level = [random.uniform(1, 2) for _ in range(10)]
    values = [level[s] for s in range(10) for _ in range(100)]
    whole = Sample.of(values, [s for s in range(10) for _ in range(100)])
    single = Sample.of(values, list(range(1000)))
    found = {}
    for name, sample, count in (("whole", whole, 10), ("single", single, 1000)):
        (_, own, _), *_ = by_sessions([sample], [sample], [count], name)
        assert own is not None
        found[name] = own[1] - own[0]
    assert found["whole"] > 5 * found["single"]


def test_sessions_of_several_seeds_stay_in_their_seed() -> None:
    """The number is the mean of both seeds' numbers, whichever sessions are drawn."""
    low, high = Sample.of([1.0, 1.0], [0, 1]), Sample.of([3.0, 3.0], [0, 1])
    for what, own, ratio in by_sessions([low, low], [low, high], [2, 2], "seeds"):
        assert what in WHATS
        assert own == (2.0, 2.0)
        assert ratio == (2.0, 2.0)


# -- what is varied --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a, b", ["a", "b"]),
        ("50..200:50 Mbit/s", ["50 Mbit/s", "100 Mbit/s", "150 Mbit/s", "200 Mbit/s"]),
        ("1..8:x2/s", ["1/s", "2/s", "4/s", "8/s"]),
        ("0.1..0.5:0.2", ["0.1", "0.3", "0.5"]),
        ("1..2:0.4 ms", ["1 ms", "1.4 ms", "1.8 ms"]),
        ("(5, 20,80) ms", ["5 ms", "20 ms", "80 ms"]),
        ("1 ms, (5,20) ms, 1..2:1 s", ["1 ms", "5 ms", "20 ms", "1 s", "2 s"]),
        ("{min: 9, max: 10}, 20", ["{min: 9, max: 10}", "20"]),
        ("'a, b',it's", ["'a, b'", "it's"]),
        ("what (then, or now), b", ["what (then", "or now)", "b"]),
        ("7..7:1", ["7"]),
    ],
)
def test_values(text: str, found: list[str]) -> None:
    assert values(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,,b", "found no value where a comma calls for one"),
        ("(1,,2) ms", "found no value where"),
        ("5..1:1", "found a range that does not grow"),
        ("1..5:0", "found a range that does not grow"),
        ("1..5:x1", "found a range that does not grow"),
        ("0..5:x2", "found a range that does not grow"),
        ("0..1:0.0001", "found a range of more than 1000 values"),
        (",".join("1" * 1001), "found 1001 values; allowed: 1000 at most"),
    ],
)
def test_ranges_that_are_none(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        values(text)


def test_names_and_labels_tell_settings_apart() -> None:
    found = axes("pdd,naive", ["links.wan.rate=1 Gbit/s", "links.rdma.rate=(1,2) Gbit/s"])
    made = names(found, [("pdd", "1 Gbit/s", "1 Gbit/s"), ("pdd", "1 Gbit/s", "2 Gbit/s")])
    assert made[0] == "pdd links.wan.rate=1 Gbit/s links.rdma.rate=1 Gbit/s"
    assert labels(made)[1] == "pdd_links_wan_rate_1_Gbit_s_links_rdma_rate_2_Gbit_s"
    assert labels(["a b", "a-b", "9", "-"]) == ["a_b", "a_b_2", "_9", "_"]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["8 Mbit/s", "1 Gbit/s"], [1e6, 125e6]),
        (["1", "2.5"], [1, 2.5]),
        (["5 ms", "1 s"], [5e6, 1e9]),
        (["1/s", "30/min"], [1, 0.5]),
        (["5 ms", "1 Gbit/s"], None),
        (["one-shot", "catch-up"], None),
        (["nan", "1"], None),
    ],
)
def test_values_as_numbers(texts: list[str], found: list[float] | None) -> None:
    assert numeric(texts) == found
