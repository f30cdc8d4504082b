"""Series over a run's time, scales, and the letters and colours of charts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pddrt.report import slowness, svg
from pddrt.report.figures import percent
from pddrt.report.timeline import PARTS, Levels, Sums, covered, runs, within
from pddrt.report.words import MEANS
from pddrt.types import MS, SECOND


def test_sums_keep_every_amount_however_long_the_run() -> None:
    sums = Sums()
    sums.add(0, 3 * MS, 3.0)
    sums.add(MS // 2, MS // 2, 1.0)
    assert [round(rate * MS, 6) for _, _, rate in sums.rates(4 * MS)] == [2, 1, 1, 0]
    sums.add(900 * SECOND, 901 * SECOND, 5.0)
    parts = list(sums.rates(1000 * SECOND))
    assert len(parts) <= PARTS
    assert sum((end - start) * rate for start, end, rate in parts) == pytest.approx(9.0)


def test_levels_hold_until_they_change_and_keep_their_peaks() -> None:
    levels = Levels()
    levels.set(0, 2)
    levels.set(5 * MS, 9)
    levels.set(5 * MS + 1, 3)
    assert [level for _, _, level in levels.levels(8 * MS)] == [2, 2, 2, 2, 2, 9, 3, 3]
    levels.set(600 * SECOND, 4)
    assert max(level for _, _, level in levels.levels(600 * SECOND)) == 9


def test_spans() -> None:
    assert covered([(0, 5), (3, 8), (10, 12), (11, 11)]) == 10
    assert within([(0, 5), (6, 9)], 4, 7) == [(4, 5), (6, 7)]
    assert runs([(0, 2), (2, 3), (5, 6)]) == [(0, 3), (5, 6)]
    assert runs([(i * 10, i * 10 + 1) for i in range(20)], most=3) == [(0, 1), (10, 11), (20, 191)]


def test_a_cdf_ends_at_one_and_is_thinned_out_evenly() -> None:
    assert svg.cdf([1.0, 2.0]) == [(1.0, 0.0), (1.0, 0.5), (2.0, 0.5), (2.0, 1.0)]
    points = svg.cdf([float(i) for i in range(10_000)], most=100)
    assert len(points) <= 200
    assert points[-1] == (9999.0, 1.0)
    assert all(abs(share - (value + 1) / 10_000) < 1e-9 for value, share in points[1::2])


@pytest.mark.parametrize(("low", "high", "log"), [(0, 1, False), (0, 7e10, False), (3, 4e8, True)])
def test_ticks_are_few_and_inside(low: float, high: float, log: bool) -> None:
    scale = svg.Scale(low, high, 0, 100, log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(low <= t <= high * (1 + 1e-9) for t in ticks)
    assert [scale(t) for t in ticks] == sorted(scale(t) for t in ticks)


def test_all_legs_have_a_letter_and_a_colour() -> None:
    style = (Path(svg.__file__).parents[1] / "assets" / "report.css").read_text()
    for part in slowness.ALL_PARTS:
        assert re.search(rf"\.c-{part}\b", style), part
        assert part in MEANS, "the glossary has it"
    assert len(set(slowness.LETTERS.values())) == len(slowness.ALL_PARTS), "one letter, one meaning"


def test_a_share_is_neither_nothing_nor_all_where_it_is_only_nearly_so() -> None:
    shares = {0.0: "0 %", 0.0001: "<1 %", 0.012: "1 %", 0.98: "98 %", 0.9951: ">99 %", 1.0: "100 %"}
    assert {share: percent(share) for share in shares} == shares
