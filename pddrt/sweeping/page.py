"""`sweep.html`: a sweep on one page that needs nothing but itself, and no JavaScript.

For each number: lines over the first axis, one for each policy (or value of the next axis), a
chart for each choice of the others; where two fields are varied, also a map of both. Then a table
of every setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pddrt.comparing.axes import POLICY, numeric
from pddrt.hosting import writing
from pddrt.report import svg
from pddrt.report.figures import figure, line_of
from pddrt.report.markup import page, table, text
from pddrt.report.svg import WIDTH, Chart, Series, dot, label
from pddrt.sweeping.show import number, value
from pddrt.sweeping.table import Swept

Json = Mapping[str, Any]

FILE = "sweep.html"
MAX_SERIES = 10
MAX_CHARTS = 24
"""So many charts of a number are drawn, of each kind; the table has all."""
MAX_MAP = 40
"""A map has so many values a side at most."""
LOG_FROM = 20
"""An axis whose largest value is so many times the smallest is logarithmic."""


def write(swept: Swept) -> Path:
    """Writes the page into the sweep's folder. Raises CannotRun where it cannot be written."""
    path = swept.folder / FILE
    with writing(swept.folder):
        title = f"{text(swept.table['name'])} - pddrt sweep"
        path.write_text(page(title, sections(swept.table)), encoding="utf-8", errors="replace")
    return path


def sections(swept: Json) -> Iterator[str]:
    plan = Plan.of(swept["axes"])
    yield _head(swept)
    yield _notices(swept)
    yield _spread(swept)
    for metric in swept["metrics"]:
        yield _metric(swept, plan, metric)
    yield _table(swept)


def _head(swept: Json) -> str:
    points, cells = swept["points"], swept["cells"]
    axes = ", ".join(f"{text(a['path'])} ({len(a['values'])})" for a in swept["axes"])
    nav = "".join(f'<a href="#m{i}">{text(m)}</a>' for i, m in enumerate(swept["metrics"]))
    return (
        f"<header><h1>{text(swept['name'])}: a sweep of {len(points):,} settings</h1>"
        f'<p class="dim">{axes} &middot; {len(cells):,} cells</p><div class="nav">{nav}'
        '<a href="#table">all settings</a></div></header>'
    )


def _notices(swept: Json) -> str:
    found = ""
    waiting = sum(cell["state"] == "waiting" for cell in swept["cells"])
    if waiting:
        why = "It was interrupted" if swept["interrupted"] else "Not all of it was run"
        found += (
            f'<div class="notice"><b>{why}:</b> {waiting:,} cells are missing; the same command '
            "goes on from here.</div>"
        )
    failed = [c for c in swept["cells"] if c["state"] == "failed"]
    wrong = [f"{text(c['name'])}: {text(c['failure'])}" for c in failed[:10]]
    wrong += [f"{len(failed) - 10:,} more: see sweep.csv"] if failed[10:] else []
    wrong += [f"left out: {text(name)}: {text('; '.join(problems))}"
              for name, problems in swept["left_out"].items()]  # fmt: skip
    if wrong:
        items = "".join(f"<li>{one}</li>" for one in wrong)
        found += f'<div class="notice broken"><b>Not all ended well.</b><ul>{items}</ul></div>'
    return found


# -- which axis is which ---------------------------------------------------------------------------

Axis = Json
Choice = tuple[tuple[str, str], ...]
"""Fields and their values."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`across`: the x axis; `series`: a line for each value, None where there is but one; `rest`: a
    chart for each choice of these; `down`: the other side of the map, None where there is none.
    """

    across: Axis
    series: Axis | None
    rest: Sequence[Axis]
    down: Axis | None

    @classmethod
    def of(cls, axes: Sequence[Axis]) -> Plan:
        fields = [axis for axis in axes if axis["path"] != POLICY]
        across = fields[0] if fields else axes[0]
        others = [axis for axis in axes if axis is not across]
        others.sort(key=lambda axis: axis["path"] != POLICY)
        series = others[0] if others else None
        return cls(across, series, others[1:], fields[1] if len(fields) > 1 else None)

    def maps(self, axes: Sequence[Axis]) -> list[Axis]:
        """The axes that a map is one choice of."""
        return [axis for axis in axes if axis is not self.across and axis is not self.down]


def _choices(axes: Sequence[Axis]) -> list[Choice]:
    values = [[(axis["path"], v) for v in axis["values"]] for axis in axes]
    return [tuple(choice) for choice in product(*values)]


def _words(choice: Choice) -> str:
    return ", ".join(v if path == POLICY else f"{_last(path)}={v}" for path, v in choice)


def _last(path: str) -> str:
    return path if path.count(".") < 2 else path.split(".", 1)[1]


def _points(swept: Json, choice: Choice) -> list[Json]:
    return [p for p in swept["points"] if all(p["changes"][path] == v for path, v in choice)]


# -- one number ------------------------------------------------------------------------------------


def _metric(swept: Json, plan: Plan, metric: str) -> str:
    means = [p["metrics"][metric]["mean"] for p in swept["points"]]
    if all(mean is None for mean in means):
        return ""
    charts, over = "", f"over {_last(plan.across['path'])}"
    for choice in _choices(plan.rest)[:MAX_CHARTS]:
        if drawn := _lines(swept, plan, metric, choice):
            charts += figure(_words(choice) or over, drawn)
    maps = ""
    if plan.down is not None:
        for choice in _choices(plan.maps(swept["axes"]))[:MAX_CHARTS]:
            if drawn := _map(swept, plan, metric, choice):
                maps += figure(f"{_words(choice) or 'map'}: {metric}", drawn)
    at = swept["metrics"].index(metric)
    return (
        f'<h2 id="m{at}">{text(metric)}</h2>{_legend(plan)}<div class="grid2">{charts}{maps}</div>'
    )


def _legend(plan: Plan) -> str:
    if plan.series is None:
        return ""
    path = plan.series["path"]
    items = "".join(
        f'<span><svg viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f"{svg.swatch(1, 10, *line_of(i))}</svg>{text(_words(((path, v),)))}</span>"
        for i, v in enumerate(plan.series["values"][:MAX_SERIES])
    )
    rest = len(plan.series["values"]) - MAX_SERIES
    more = f"<span>{rest} more are only in the table</span>" if rest > 0 else ""
    return f'<div class="legend">{items}{more}</div>'


def _spread(swept: Json) -> str:
    if all(point["seeds"] < 2 for point in swept["points"]):
        return ""
    return "<p>Points are means over the seeds, bars from the smallest seed to the largest.</p>"


def _places(axis: Axis) -> tuple[list[float], bool]:
    """Where its values stand on the x axis, and whether that is logarithmic."""
    found = numeric(axis["values"])
    if found is None or len(set(found)) < len(found):
        return [float(i) for i in range(len(axis["values"]))], False
    return found, min(found) > 0 and max(found) >= LOG_FROM * min(found)


def _lines(swept: Json, plan: Plan, metric: str, choice: Choice) -> str:
    places, log = _places(plan.across)
    where = dict(zip(plan.across["values"], places, strict=True))
    series = _choices([plan.series])[:MAX_SERIES] if plan.series else [()]
    lines = []
    for i, one in enumerate(series):
        of = [
            p for p in _points(swept, (*choice, *one)) if p["metrics"][metric]["mean"] is not None
        ]
        of.sort(key=lambda p: where[p["changes"][plan.across["path"]]])
        lines.append((i, _words(one), of))
    if not any(of for *_, of in lines):
        return ""
    # The same for all charts of a number, so that they can be held against one another.
    known = [p["metrics"][metric] for p in swept["points"] if p["metrics"][metric]["n"]]
    low = min(0.0, *(of["min"] for of in known))
    high = max(0.0, *(of["max"] for of in known))
    spread = (min(places), max(places))
    wide = 0.02 * (spread[1] - spread[0])
    marks = sorted(zip(places, plan.across["values"], strict=True))
    chart = Chart(
        f"{metric}{f', {_words(choice)}' if choice else ''}", _says(lines, metric, plan),
        spread if log else (spread[0] - wide, spread[1] + wide),
        (low, (high or 1.0) * 1.06), lambda v: f"{v:g}", lambda v: value(metric, v), height=220,
        x_log=log, x_label=_last(plan.across["path"]) + (", logarithmic" if log else ""),
        x_marks=marks,
    )  # fmt: skip
    for i, name, of in lines:
        colour, dash = line_of(i)
        at = [(where[p["changes"][plan.across["path"]]], p) for p in of]
        chart.add(Series(name, colour, [(x, p["metrics"][metric]["mean"]) for x, p in at], dash))
        for x, p in at:
            chart.marks += _mark(chart, x, p, metric, colour, name)
    return chart.text()


def _says(lines: Sequence[tuple[int, str, Sequence[Json]]], metric: str, plan: Plan) -> str:
    return "; ".join(
        f"{name or metric}: "
        + ", ".join(f"{p['changes'][plan.across['path']]}: {number(metric, p['metrics'][metric])}"
                    for p in of)
        for _, name, of in lines
    )  # fmt: skip


def _mark(
    chart: Chart, x: float, point: Json, metric: str, colour: str, name: str
) -> Iterator[str]:
    """A point, from its smallest to its largest seed, and what it is; hollow where a cell of it has
    failed.
    """
    of = point["metrics"][metric]
    px, py = chart.across(x), chart.up(of["mean"])
    if of["max"] > of["min"]:
        top, bottom = chart.up(of["max"]), chart.up(of["min"])
        yield f'<path class="line {colour}" d="M{px:.1f} {top:.1f}V{bottom:.1f}"/>'
    tip = f"{point['name']}: {number(metric, of)}"
    if of["n"] > 1:
        tip += f", {of['n']} seeds, {value(metric, of['min'])} to {value(metric, of['max'])}"
    if point["failed"]:
        tip += f", {point['failed']} failed"
    yield dot(px, py, colour, tip, hollow=bool(point["failed"]))


def _map(swept: Json, plan: Plan, metric: str, choice: Choice) -> str:
    """A field across, another down; the darker, the more. Every cell says its number."""
    assert plan.down is not None
    across, down = plan.across["values"][:MAX_MAP], plan.down["values"][:MAX_MAP]
    values = {
        (p["changes"][plan.across["path"]], p["changes"][plan.down["path"]]): p
        for p in _points(swept, choice)
    }
    if all(p["metrics"][metric]["mean"] is None for p in values.values()):
        return ""
    means = [p["metrics"][metric]["mean"] for p in swept["points"]]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)  # of all maps of this number
    left = 24 + 6.5 * max(map(len, down))
    width, row = (WIDTH - 8 - left) / len(across), 26
    drawn = [label(0, 12, _last(plan.down["path"]))]
    for j, second in enumerate(down):
        y = 20 + row * j
        drawn.append(label(left - 6, y + 17, second, "end"))
        for i, first in enumerate(across):
            point = values.get((first, second))
            mean = point["metrics"][metric]["mean"] if point else None
            if mean is None or point is None:
                continue
            share = 0.5 if high == low else (mean - low) / (high - low)
            x = left + width * i
            tip = f"{point['name']}: {number(metric, point['metrics'][metric])}"
            drawn.append(
                f'<rect class="box c-relay_decode" x="{x:.1f}" y="{y}" width="{width - 1:.1f}" '
                f'height="{row - 1}" style="opacity:{0.06 + 0.74 * share:.2f}">'
                f"<title>{text(tip)}</title></rect>"
            )
            said = value(metric, mean)
            if width >= 6.6 * len(said):
                drawn.append(label(x + width / 2, y + 17, said, "middle", "halo"))
    floor = 20 + row * len(down)
    every = 1 + int(max(6.5 * len(v) + 8 for v in across) // width)
    for i, first in list(enumerate(across))[::every]:
        drawn.append(label(left + width * (i + 0.5), floor + 14, first, "middle"))
    middle = left + width * len(across) / 2
    drawn.append(label(middle, floor + 30, _last(plan.across["path"]), "middle"))
    says = f"from {value(metric, low)} to {value(metric, high)}"
    return svg.svg(f"{metric}: map", says, floor + 36, drawn)


# -- every setting ---------------------------------------------------------------------------------


def _table(swept: Json) -> str:
    paths = [axis["path"] for axis in swept["axes"]]
    body = [
        [
            *(text(point["changes"][path]) for path in paths),
            f"{point['seeds']}" + (f", {point['failed']} failed" if point["failed"] else ""),
            *(text(number(m, point["metrics"][m])) for m in swept["metrics"]),
        ]
        for point in swept["points"]
    ]
    several = any(point["seeds"] > 1 for point in swept["points"])
    note = " Means over seeds; from three on with half the interval of 95 % (Student's)."
    note = note if several else ""
    head = [*map(text, paths), "seeds", *map(text, swept["metrics"])]
    return (
        f'<h2 id="table">All settings</h2><p>Every cell is a row of sweep.csv.{note}</p>'
        + table(head, body, left=range(len(paths)), tall=True)
    )
