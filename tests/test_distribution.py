"""Many integers in bounded memory: exact while they are few, within the stated bound beyond."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt import distribution
from pddrt.distribution import STEPS, Distribution

SHARES = (1, 10, 50, 90, 99, 100)


def nearest_rank(values: Sequence[int], share: int) -> int:
    known = sorted(values)
    return known[-(-len(known) * share // 100) - 1]


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=60))
def test_few_values_are_exact(values: list[int]) -> None:
    of = Distribution(values)
    assert of.exact
    assert sorted(of) == sorted(values)
    assert of.percentiles(*SHARES) == [nearest_rank(values, share) for share in SHARES]
    assert (len(of), of.mean) == (len(values), sum(values) // len(values))
    assert of.mean_abs == sum(map(abs, values)) // len(values)
    assert (of.least, of.most) == (min(values), max(values))


def test_of_nothing_nothing_is_known() -> None:
    of = Distribution()
    assert (of.mean, of.mean_abs, of.most, of.percentiles(50)) == (None, None, None, [None])


@pytest.mark.parametrize("seed", range(4))
def test_many_values_are_counted_within_the_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated bound holds for every percentile; count, mean and extremes are exact."""
    monkeypatch.setattr(distribution, "EXACT", 500)
    draw = random.Random(seed)
    values = [round(draw.lognormvariate(16, 4)) * draw.choice((1, 1, 1, -1)) for _ in range(5_000)]
    of = Distribution()
    for at in range(0, len(values), 7):
        of.extend(values[at : at + 7])
    assert not of.exact
    shares = range(1, 101)
    for found, share in zip(of.percentiles(*shares), shares, strict=True):
        wanted = nearest_rank(values, share)
        assert found is not None
        assert abs(found - wanted) <= abs(wanted) / (2 * STEPS)
    assert (len(of), of.mean) == (len(values), sum(values) // len(values))
    assert (of.least, of.most) == (min(values), max(values))


def test_small_values_and_equal_ones_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "EXACT", 10)
    of = Distribution([*range(-2 * STEPS, 2 * STEPS)])
    assert of.percentiles(*SHARES) == [
        nearest_rank(range(-2 * STEPS, 2 * STEPS), share) for share in SHARES
    ]
    same = Distribution([123_456_789_012] * 20)
    assert same.percentiles(50) == [123_456_789_012], "no percentile lies outside of the values"


def test_memory_does_not_grow_with_the_values() -> None:
    """At most one bucket for each 1/1,024 of a doubling, whatever comes."""
    of, draw = Distribution(), random.Random(1)
    of.extend([1] * distribution.EXACT)
    assert of.exact
    buckets = []
    for _ in range(3):
        of.extend([draw.randrange(1 << 20, 1 << 24) for _ in range(20_000)])
        buckets.append(len(of._buckets))
    assert buckets[-1] <= 4 * STEPS + 1
    assert len(of._values) == 0
