"""Charts as SVG text: what a report draws without a line of JavaScript.

Every chart has a title and a sentence that says what is on it, for those who do not see it. Colours
come from classes (`c-NAME` sets the colour, see assets/report.css), so that light and dark are the
page's business; whatever a colour tells, a letter, a dash or a word tells as well. Coordinates have
one decimal: a pixel's tenth is more than anybody sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

Point = tuple[float, float]
Format = Callable[[float], str]

WIDTH = 600
LEFT, RIGHT, TOP = 58, 12, 10
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3")


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels. `log`: of 10; values at or below `low` then count as `low`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        if self.log:
            return self._decades(about)
        step = nice((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _decades(self, about: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for marks in ((1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**d for d in range(first, last + 1) for m in marks]
            found = [v for v in found if self.low <= v <= self.high]
            if len(found) <= about + 2:
                break
        return found if len(found) > 1 else [self.low, self.high]


def nice(step: float) -> float:
    """The next of 1, 2, 5, 10, ... that is at least `step`."""
    decade = 10.0 ** math.floor(math.log10(step))
    return next(m * decade for m in (1, 2, 5, 10) if m * decade >= step * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Series:
    """`colour`: a class; `dash`: index into `DASHES`; `area`: filled down to zero."""

    name: str
    colour: str
    points: Sequence[Point]
    dash: int = 0
    area: bool = False


@dataclass(slots=True)
class Chart:
    """One pair of axes. `add` what is drawn, in order; `text()` is the whole. `x_marks`: places and
    words on the x axis, instead of round numbers. `below`: room under the axes, for a legend.
    """

    title: str
    says: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_format: Format
    y_format: Format
    height: int = 190
    x_log: bool = False
    x_label: str = ""
    y_ticks: int = 4
    x_marks: Sequence[tuple[float, str]] | None = None
    below: int = 0
    marks: list[str] = field(default_factory=list)

    @property
    def floor(self) -> int:
        """Where the x axis is: above its ticks' numbers, and its label."""
        return self.height - self.below - (34 if self.x_label else 20)

    @property
    def across(self) -> Scale:
        low, high = self.x
        return Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT, self.x_log)

    @property
    def up(self) -> Scale:
        low, high = self.y
        return Scale(low, high if high > low else low + 1, self.floor, TOP)

    def add(self, series: Series) -> None:
        if not series.points:
            return
        x, y = self.across, self.up
        path = _path((x(a), y(b)) for a, b in series.points)
        if series.area:
            floor = f"{y(0):.1f}"
            shut = f"{path}V{floor}H{x(series.points[0][0]):.1f}Z"
            self.marks.append(f'<path class="area {series.colour}" d="{shut}"/>')
        dash = f' stroke-dasharray="{DASHES[series.dash]}"' if series.dash else ""
        self.marks.append(f'<path class="line {series.colour}" d="{path}"{dash}/>')

    def band(self, start: float, end: float, colour: str, word: str) -> None:
        """A stretch of the x axis, with a word on it."""
        x = self.across
        left, right = x(start), x(end)
        self.marks.append(
            f'<rect class="band {colour}" x="{left:.1f}" y="{TOP}" '
            f'width="{max(1, right - left):.1f}" height="{self.floor - TOP}">'
            f"<title>{escape(word)}</title></rect>"
        )

    def words(self, x: float, y: float, text: str, colour: str = "", anchor: str = "start") -> None:
        self.marks.append(
            f'<text class="{colour}" x="{self.across(x):.1f}" y="{self.up(y):.1f}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def text(self) -> str:
        return svg(self.title, self.says, self.height, [*self._axes(), *self.marks])

    def _axes(self) -> Iterable[str]:
        x, y, floor = self.across, self.up, self.floor
        for value in y.ticks(self.y_ticks):
            at = f"{y(value):.1f}"
            yield f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>'
            yield label(LEFT - 6, y(value) + 4, self.y_format(value), "end")
        last = -1e9
        marks = self.x_marks or [(value, self.x_format(value)) for value in x.ticks(6)]
        for value, word in marks:
            if x(value) - last < max(62, 6.5 * len(word) + 14):
                continue
            last = x(value)
            yield f'<path class="grid" d="M{x(value):.1f} {TOP}V{floor + 4}"/>'
            near_end = x(value) > WIDTH - 34
            anchor = "end" if near_end else "middle"
            yield label(WIDTH - 2 if near_end else x(value), floor + 16, word, anchor)
        yield f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>'
        if self.x_label:
            bottom = self.height - self.below - 4
            yield label((LEFT + WIDTH - RIGHT) / 2, bottom, self.x_label, "middle")


def steps(parts: Iterable[tuple[float, float, float]]) -> list[Point]:
    """(start, end, value) as the corners of a line; equal neighbours are one."""
    points: list[Point] = []
    for start, end, value in parts:
        if points and points[-1][1] == value:
            points[-1] = (end, value)
        else:
            points += [(start, value), (end, value)]
    return points


def cdf(values: Sequence[float], most: int = 160) -> list[Point]:
    """Corners of the share of `values` that are at most so large; `values` in order. More than
    `most` are thinned out, evenly by rank; the ends stay.
    """
    count = len(values)
    if count > most:
        ranks = sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
    else:
        ranks = list(range(count))
    points: list[Point] = []
    for rank in ranks:
        before = points[-1][1] if points else 0.0
        points += [(values[rank], before), (values[rank], (rank + 1) / count)]
    return points


def svg(title: str, says: str, height: float, inner: Iterable[str], width: float = WIDTH) -> str:
    body = "".join(inner)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(says)}</desc>{body}</svg>"
    )


def label(x: float, y: float, text: str, anchor: str = "start", colour: str = "") -> str:
    kind = f' class="{colour}"' if colour else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def box(
    x: float, y: float, width: float, height: float, colour: str, letter: str = "", tip: str = ""
) -> str:
    """A bar. The letter is on it where there is room."""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    drawn = (
        f'<rect class="box {colour}" x="{x:.1f}" y="{y:.1f}" width="{max(0.6, width):.1f}" '
        f'height="{height:g}">{inner}</rect>'
    )
    if letter and width >= 7 * len(letter) + 2 and height >= 11:
        middle = y + height / 2 + 4
        drawn += (
            f'<text class="on" x="{x + width / 2:.1f}" y="{middle:.1f}" text-anchor="middle">'
            f"{escape(letter)}</text>"
        )
    return drawn


def dot(x: float, y: float, colour: str, tip: str, hollow: bool = False) -> str:
    kind = "line" if hollow else "box"
    return (
        f'<circle class="{kind} {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
        f"<title>{escape(tip)}</title></circle>"
    )


def swatch(x: float, y: float, colour: str, dash: int = 0) -> str:
    """A piece of a line, for a legend whose text stands at `y`."""
    dashes = f' stroke-dasharray="{DASHES[dash]}"' if dash else ""
    return f'<path class="line {colour}" d="M{x:.1f} {y - 4:.1f}h26"{dashes}/>'


def _path(points: Iterable[Point]) -> str:
    """As short as SVG allows: corners are mostly right angles."""
    shown = [(f"{x:.1f}", f"{y:.1f}") for x, y in points]
    text = f"M{shown[0][0]} {shown[0][1]}"
    for (x0, y0), (x1, y1) in pairwise(shown):
        if (x0, y0) == (x1, y1):
            continue
        text += f"V{y1}" if x0 == x1 else f"H{x1}" if y0 == y1 else f"L{x1} {y1}"
    return text
