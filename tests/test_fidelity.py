"""The ledger of how late things were, and what it makes of a link."""

from __future__ import annotations

from typing import Any

import pytest

from pddrt.errors import CannotRun
from pddrt.hosting import FAST, peak_for
from pddrt.netem.fidelity import LATE_LIMIT, PAUSE, STRETCH, Kept, Ledger, judge
from pddrt.netem.net import LinkSpec, Topology
from pddrt.show import late
from pddrt.types import MS, SECOND, US


def ledger(*sent: tuple[int, int]) -> Ledger:
    """Of loads (due, by how much late)."""
    made = Ledger()
    for due, behind in sent:
        made.sent(due, due + behind)
    return made


def kept(made: Ledger, rate: int | None = 10**7, busy: int = SECOND) -> Kept:
    return Kept("wan", "a>b", rate, 10**6, busy, made)


def test_lateness_is_a_histogram_whose_quantiles_are_at_most_a_step_too_high() -> None:
    made = ledger(*((k * MS, k * US) for k in range(1, 1001)))
    assert 500 * US <= made.late_quantile(0.5) <= 510 * US
    assert 990 * US <= made.late_quantile(0.99) <= 1000 * US
    assert made.late_max == 1000 * US
    assert Ledger().late_quantile(0.99) == 0


def test_early_is_not_late() -> None:
    assert ledger((0, -50 * US), (MS, -1)).late_max == 0


def test_the_rate_error_is_of_whole_stretches() -> None:
    """A second of data that took 10 ms longer than they should: 1 % slow."""
    made = ledger((0, 0), *((k * 5 * MS, k * 50 * US) for k in range(1, 201)))
    assert made.rate_error == pytest.approx(-10 / 1010)
    fast = ledger(*((k * 5 * MS, (200 - k) * 50 * US) for k in range(201)))
    assert fast.rate_error == pytest.approx(10 / 990)


def test_short_stretches_say_nothing_and_pauses_are_not_part_of_one() -> None:
    assert ledger((0, 0), (STRETCH - 1, 5 * MS)).rate_error is None
    made = Ledger()
    for burst in range(3):
        for k in range(151):
            due = burst * 2 * SECOND + k * 4 * MS
            made.sent(due, due + (burst == 1) * k * 40 * US)
    assert made.rate_error == pytest.approx(-6 / 1806, rel=1e-3)
    assert PAUSE < SECOND


def test_a_constant_lateness_is_no_error_of_the_rate() -> None:
    assert ledger(*((k * MS, 3 * MS) for k in range(600))).rate_error == 0


def test_blocked_time_is_of_each_connection() -> None:
    made = Ledger()
    made.block(1, 10)
    made.block(1, 20)  # it was already
    made.block(2, 30)
    made.unblock(1, 50)
    made.unblock(1, 60)
    made.unblock(2, 130)
    assert made.blocked == 40 + 100


GOOD = ledger(*((k * MS, 30 * US) for k in range(300)))
LATE = ledger(*((k * MS, 6 * MS if k % 20 == 10 else 0) for k in range(300)))
VERY_LATE = ledger(*((k * MS, 60 * MS) for k in range(300)))
SLOW = ledger(*((k * MS, 0) for k in range(600)), (600 * MS, 8 * MS))


@pytest.mark.parametrize(
    ("made", "rate", "peak", "verdict", "why"),
    [
        (GOOD, 10**7, None, "ok", None),
        (GOOD, 10**7, 10**9, "ok", None),
        (GOOD, 10**9, 10**9, "degraded", "1 GB/s is more than 60% of the 1 GB/s"),
        (GOOD, None, 10**9, "ok", None),
        (LATE, 10**7, None, "degraded", "left 6 ms late"),
        (VERY_LATE, 10**7, None, "invalid", "left 60 ms late"),
        (SLOW, 10**7, None, "degraded", "off by -1.3%"),
    ],
)
def test_verdicts(made: Ledger, rate: int | None, peak: Any, verdict: str, why: Any) -> None:
    found = judge([kept(made, rate)], peak)
    assert found["verdict"] == found["links"]["wan"]["verdict"] == verdict
    assert [why in text for text in found["why"]] == ([True] if why else [])


def test_a_receiver_that_lags_is_named() -> None:
    made = ledger((0, 0))
    made.block(1, 0)
    made.unblock(1, SECOND // 2)
    assert "receiving program 50%" in judge([kept(made)])["why"][0]
    assert judge([kept(made)])["verdict"] == "degraded"
    made.blocked = SECOND
    assert judge([kept(made)])["verdict"] == "invalid"


def test_the_worst_link_gives_the_verdict_and_the_worst_reason_comes_first() -> None:
    all_of = [kept(GOOD), Kept("x", "a>a", 1, 5, SECOND, VERY_LATE), kept(LATE)]
    found = judge(all_of)
    assert found["verdict"] == "invalid"
    assert "link x" in found["why"][0]
    assert len(found["why"]) == 2
    assert {name: link["verdict"] for name, link in found["links"].items()} == {
        "wan": "degraded",
        "x": "invalid",
    }


def test_a_link_that_carried_nothing_is_not_judged() -> None:
    idle = Kept("fast", "a>a", 10**12, 0, 0, VERY_LATE)
    assert judge([idle], peak=10**9)["verdict"] == "ok"


def test_the_histogram_in_a_file_has_every_load_once() -> None:
    way = judge([kept(LATE)])["links"]["wan"]["directions"]["a>b"]
    assert sum(count for _, count in way["late_histogram"]) == 300
    edges = [edge.ns for edge, _ in way["late_histogram"]]
    assert edges == sorted(edges)
    assert LATE_LIMIT < edges[-1] < 2 * 6 * MS + 1


# -- before and after a run ------------------------------------------------------------------------


def topology(rate: int | None, back: int | None = None) -> Topology:
    link = LinkSpec("wan", ("a", "b"), rate, MS)
    if back is not None:
        link = LinkSpec("wan", ("a", "b"), rate, MS, back=LinkSpec("wan", ("b", "a"), back, MS))
    return Topology({"p": "a", "m": "b"}, [link])


def test_what_the_machine_moves_is_measured_only_where_it_matters() -> None:
    assert peak_for("wall", topology(FAST), strict=True) is None
    assert peak_for("wall", topology(None), strict=True) is None
    assert peak_for("virtual", topology(10**15), strict=True) is None
    moved = peak_for("wall", topology(10**15), strict=False)
    assert moved is not None
    assert moved > 0


@pytest.mark.parametrize("rates", [(10**15,), (1000, 10**15)])
def test_strict_refuses_by_name_what_no_machine_keeps(rates: tuple[int, ...]) -> None:
    with pytest.raises(CannotRun, match=r"links\.wan\.rate: 1e\+06 GB/s is more than 60% of the"):
        peak_for("wall", topology(*rates), strict=True)


def test_a_run_says_why_its_times_are_not_trusted() -> None:
    found = judge([kept(LATE), Kept("x", "a>a", 1, 5, SECOND, VERY_LATE)])
    said = late({"provenance": {"fidelity": found}})
    assert said.startswith("invalid: link x, a>a: data left 60 ms late")
    assert said.endswith("(and 1 other thing), so trust the times less")
    assert late({"provenance": {"fidelity": judge([kept(GOOD)])}}) == ""
