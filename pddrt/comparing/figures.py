"""The charts of a comparison: what of it is drawn, and how. Returns SVG text; see `svg`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pddrt.comparing.contrast import at, plain
from pddrt.comparing.pairing import PAIRED, Pair
from pddrt.report import svg
from pddrt.report.figures import LETTERS, duration, time_grid
from pddrt.report.slowness import TITLES
from pddrt.report.svg import WIDTH, Scale, box, label
from pddrt.trace import Seconds

Json = Mapping[str, Any]

TITLED = {
    "ttft_s": "TTFT", "ttst_s": "TTST", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E",
    "handoff_gap_s": "handoff gap",
}  # fmt: skip
SHOWN = [(key, what) for key in ("ttft_s", "itl_s", "e2e_s", "handoff_gap_s")
         for what in ("mean", "p50", "p90", "p99")]  # fmt: skip


ROOM = 22
"""Characters of a column's name in a chart."""
SMALL = 500
"""A part that changed by less than one in so many of the largest is left out."""


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:,.0f}x"


def briefs(columns: Sequence[Json]) -> list[str]:
    """What columns are called in charts, where there is little room: by name, by their values
    alone, or by their places.
    """
    values = [" ".join(column["changes"].values()) for column in columns]
    for called in ([column["name"] for column in columns], values):
        if max(map(len, called)) <= ROOM and len(set(called)) == len(called):
            return called
    return [f"c{n}" for n in range(1, len(columns) + 1)]


def signed(change: Seconds | None) -> str:
    if change is None:
        return "-"
    sign = "+" if change.ns > 0 else "\N{MINUS SIGN}" if change.ns < 0 else ""
    return f"{sign}{duration(abs(change.ns))}"


# -- how sure --------------------------------------------------------------------------------------


def ratio_chart(column: Json, base: str) -> str:
    """A row for each number: its ratio as a mark, its interval as a bar, on a logarithmic axis."""
    rows = [
        (f"{TITLED[key]} {what}", ratio, at(column, ("intervals", "ratio", key, what)))
        for key, what in SHOWN
        if (ratio := at(column, ("ratios", key, what))) is not None and ratio > 0
    ]
    if not rows:
        return ""
    ends = [r for _, r, i in rows] + [v for *_, i in rows if i for v in (i["low"], i["high"]) if v]
    low, high = min(0.8, *ends) / 1.05, max(1.25, *ends) * 1.05
    x, high_row = Scale(low, high, 118, WIDTH - 64, log=True), 19
    floor = 4 + high_row * len(rows)
    drawn, last = [], -1e9
    for tick in sorted({*x.ticks(5), 1.0}):
        if x(tick) - last > 40 or tick == 1:
            last, kind = x(tick), "axis" if tick == 1 else "grid"
            drawn.append(f'<path class="{kind}" d="M{last:.1f} 0V{floor}"/>')
            drawn.append(label(last, floor + 15, f"{tick:.2g}x", "middle"))
    for i, (name, ratio, interval) in enumerate(rows):
        y = 4 + high_row * i + high_row / 2
        drawn.append(label(112, y + 4, name, "end"))
        colour = "c-main_decode" if ratio < 1 else "c-fault" if ratio > 1 else "c-cap"
        if interval:
            a, b = x(interval["low"] or low), x(interval["high"])
            tip = f"95 %: {times(interval['low'])} to {times(interval['high'])}"
            drawn.append(box(a, y - 3, b - a, 6, f"hidden {colour}", "", tip))
        drawn.append(box(x(ratio) - 1.5, y - 6, 3, 12, colour, "", times(ratio)))
        drawn.append(label(WIDTH - 56, y + 4, times(ratio), "start", "strong"))
    says = "; ".join(f"{name} {times(ratio)}" for name, ratio, _ in rows)
    return svg.svg(f"Ratios of {column['name']} to {base}", says, floor + 22, drawn)


# -- what made the difference ----------------------------------------------------------------------


def mean_requests(means: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each column: its mean request, part by part."""
    left, row = 150, 26
    x = Scale(0, max(sum(m.values()) for m in means.values()) or 1, left, WIDTH - 70)
    drawn = list(time_grid(x, row * len(means) + 4))
    for i, (name, mean) in enumerate(means.items()):
        y, at_ = 4 + row * i, 0.0
        drawn.append(label(left - 6, y + 13, name, "end", "strong"))
        for part, length in mean.items():
            if length:
                tip = f"{TITLES[part]}: {duration(length)}"
                width = x(at_ + length) - x(at_)
                drawn.append(box(x(at_), y, width, 17, f"c-{part}", LETTERS[part], tip))
                at_ += length
        drawn.append(label(x(at_) + 5, y + 13, duration(at_)))
    says = "; ".join(f"{name}: {duration(sum(m.values()))}" for name, m in means.items())
    height = row * len(means) + 26
    return svg.svg("The mean request, part by part", says, height, drawn)


def part_changes(parts: Mapping[str, Json]) -> str:
    """The mean change of each part, to the left (faster) and right (slower) of nothing; "" where
    there is none.
    """
    known = {p: (plain(of["change_s"]), of["mostly"]) for p, of in parts.items() if of["change_s"]}
    reach = max((abs(change) for change, _ in known.values()), default=0)
    known = {p: of for p, of in known.items() if of[1] or abs(of[0]) * SMALL >= reach}
    if not reach:
        return ""
    left, row = 118, 20
    x = Scale(-reach, reach, left, WIDTH - 190)
    floor = 4 + row * len(known)
    drawn = [f'<path class="axis" d="M{x(0):.1f} 0V{floor}"/>']
    for i, (part, (change, mostly)) in enumerate(known.items()):
        y = 4 + row * i
        drawn.append(label(left - 6, y + 12, f"{LETTERS[part]}  {TITLES[part]}", "end"))
        if change:
            start, end = sorted((x(0), x(change)))
            drawn.append(box(start, y, end - start, 14, f"c-{part}"))
        share = f", most of it in {mostly:,}" if mostly else ""
        drawn.append(label(WIDTH - 182, y + 12, f"{signed(Seconds(change))}{share}"))
    says = "; ".join(f"{TITLES[p]} {signed(Seconds(change))}" for p, (change, _) in known.items())
    return svg.svg("Mean change of each part", says, floor + 6, drawn)


def paired_bars(pairs: Sequence[Pair], names: tuple[str, str], measure: str, title: str) -> str:
    """Each request twice, from its sending: in the baseline, and below it here."""
    called = names if max(map(len, names)) <= 11 else ("baseline", "here")
    left, row = 150, 46
    longest = max(t for p in pairs for t in p.times)
    x = Scale(0, longest or 1, left, WIDTH - 74)
    many = len({p.seed for p in pairs}) > 1
    drawn = list(time_grid(x, len(pairs) * row + 4))
    for i, pair in enumerate(pairs):
        y = 6 + i * row
        drawn.append(label(4, y + 12, pair.here.id, "start", "strong"))
        if many:
            drawn.append(label(4, y + 30, f"seed {pair.seed}"))
        for n, (outcome, total) in enumerate(zip((pair.base, pair.here), pair.times, strict=True)):
            top, at_ = y + 18 * n, 0
            drawn.append(label(left - 6, top + 12, called[n], "end"))
            for part in PAIRED[measure]:
                if length := outcome.parts[part]:
                    tip = f"{TITLES[part]}: {duration(length)}"
                    width = x(at_ + length) - x(at_)
                    drawn.append(box(x(at_), top, width, 15, f"c-{part}", LETTERS[part], tip))
                    at_ += length
            drawn.append(label(x(total) + 5, top + 12, duration(total)))
    says = "; ".join(
        f"{p.here.id}: {duration(p.times[0])}, here {duration(p.times[1])}, mostly by "
        f"{TITLES.get(p.mostly or '', 'nothing known')}"
        for p in pairs
    )
    return svg.svg(title, says, len(pairs) * row + 26, drawn)
