"""Requests as bars on a common time axis. Pure: views in, lines out.

A request has a bar of its phases and, where there is room, a thin one below with the KV on its way,
since both may go on at once. Every phase has a letter as well as a colour:

    q queue   P prefill   w wait for KV   R relay decodes   H handoff   M main decodes   ! trouble

and the thin one, by strokes: single to RLD, heavy to MD, double where both are under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, groupby

from pddrt import show
from pddrt.dashboard.facts import Phase, RequestView, Span, WireView
from pddrt.dashboard.text import Line, cut, fit, line, right
from pddrt.types import MS, SECOND, Ns
from pddrt.units import format_rate

HANDOFF = "color(133)"
DIM = "dim"
BAD = "bold red"
ON = "bold color(231) on "
"""White on a colour of middle brightness can be read whatever the terminal's own colours are."""
PHASES: dict[Phase, tuple[str, str]] = {
    "queue": ("q", DIM),
    "prefill": ("P", f"{ON}{show.STYLE['P']}"),
    "wait": ("w", show.STYLE["P"]),
    "relay": ("R", f"{ON}{show.STYLE['R']}"),
    "handoff": ("H", f"{ON}{HANDOFF}"),
    "main": ("M", f"{ON}{show.STYLE['M']}"),
    "alone": ("P", f"{ON}{show.STYLE['P']}"),
}
"""Letter and style."""
FILL = {
    "queue": "\N{MIDDLE DOT}",
    "wait": "\N{BOX DRAWINGS LIGHT TRIPLE DASH HORIZONTAL}",
}
"""What follows the letter of those phases in which nobody works for the request."""
SINGLE, HEAVY, DOUBLE = (
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}",
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
    "\N{BOX DRAWINGS DOUBLE HORIZONTAL}",
)
STEPS = (2, 3, 4, 6, 10, 15)
"""Of the axis, times a power of ten, in half milliseconds."""
TICK = 10
"""Cells between two times on the axis."""
LABEL, FACTS = 10, 23
"""Cells left and right of a bar."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`cells` cells, each of `step` ns, from `start` on."""

    start: Ns
    step: Ns
    cells: int

    @classmethod
    def over(cls, start: Ns, end: Ns, cells: int) -> Axis:
        """The finest of some round steps that has room for all, and a little more: it has to change
        only now and then.
        """
        for n in count():
            step = MS // 2 * STEPS[n % len(STEPS)] * 10 ** (n // len(STEPS))
            first = start // step * step
            if end - first <= step * max(1, cells - 2):
                break
        return cls(first, step, cells)

    def span(self, start: Ns, end: Ns) -> tuple[int, int]:
        """The cells that a stretch of time takes, one at least."""
        first = (start - self.start) // self.step
        last = max(first + 1, -(-(end - self.start) // self.step))
        return max(0, min(first, self.cells)), max(0, min(last, self.cells))

    def inside(self, cell: int, start: Ns, end: Ns) -> Ns:
        """How much of a stretch of time lies in a cell."""
        left = self.start + cell * self.step
        return max(0, min(end, left + self.step) - max(start, left))

    def line(self) -> Line:
        text, at = "", -(self.start // self.step) % TICK
        decimals = 0
        while self.step * TICK % (SECOND // 10**decimals) and decimals < 3:
            decimals += 1
        for cell in range(at, self.cells, TICK):
            t = self.start + cell * self.step
            label = f"\N{BOX DRAWINGS LIGHT VERTICAL}{t / SECOND:.{decimals}f} s"
            if len(label) <= min(TICK, self.cells - cell):
                text = text.ljust(cell) + label
        return line((text.ljust(self.cells), DIM))


def axis_of(rows: Sequence[RequestView], now: Ns, cells: int) -> Axis:
    """Over those under way and what was so beside them or, where none is, over all."""
    since = min((row.sent for row in rows if row.ended is None), default=0)
    shown = [row for row in rows if row.ended is None or row.ended >= since]
    start = min((row.sent for row in shown), default=0)
    end = max((now if row.ended is None else row.ended for row in shown), default=now)
    return Axis.over(start, max(end, start), cells)


def bar(spans: Iterable[Span], row: RequestView, now: Ns, axis: Axis) -> Line:
    """Phases as solid runs, each with its letter and, where it fits, how many tokens. Those that
    share a cell: it shows the longest, but a handoff always.
    """
    cells: list[Phase | None] = [None] * axis.cells
    shares: dict[int, Ns] = {}
    for phase, start, end in spans:
        until = now if end is None else end
        first, last = axis.span(start, until)
        for n in range(first, last):
            if first < n < last - 1:
                cells[n] = phase
                continue
            share = axis.inside(n, start, until)
            if phase == "handoff" or share >= shares.get(n, 0):
                cells[n] = phase
                shares[n] = axis.step if phase == "handoff" else share
    if row.ended is not None and row.ended < axis.start:
        return line(("<".ljust(axis.cells), DIM))  # before all that is shown
    runs = [(cell, len(list(run))) for cell, run in groupby(cells)]
    made = dict(row.made)
    shown: list[tuple[str, str]] = []
    for cell, length in runs:
        if cell is None:
            shown.append((" " * length, ""))
            continue
        label, style = PHASES[cell]
        if cell in ("relay", "main", "alone") and [c for c, _ in runs].count(cell) == 1:
            counted = f"{label} {made.get(label, 0)}"
            label = counted if length > len(counted) else label
        shown.append((label.ljust(length, FILL.get(cell, " ")), style))
    return _marked(tuple(shown), row.marks, axis)


def _marked(one: Line, marks: Sequence[Ns], axis: Axis) -> Line:
    """With `!` where something went wrong."""
    at = {axis.span(t, t)[0] for t in marks}
    if not at:
        return one
    cells = [(char, style) for text, style in one for char in text]
    for cell in at:
        if cell < len(cells):
            cells[cell] = ("!", BAD)
    return tuple(
        ("".join(char for char, _ in run), style)
        for style, run in groupby(cells, key=lambda c: c[1])
    )


def strokes(wires: Sequence[WireView], now: Ns, axis: Axis) -> Line:
    """KV on its way, to any decoder."""
    cells = [0] * axis.cells
    for wire in wires:
        first, last = axis.span(wire.began, now if wire.ended is None else wire.ended)
        for cell in range(first, last):
            cells[cell] |= 2 if wire.to_main else 1
    glyphs = (
        (" ", ""),
        (SINGLE, show.STYLE["R"]),
        (HEAVY, show.STYLE["M"]),
        (DOUBLE, show.STYLE["M"]),
    )
    return tuple(
        (glyphs[kind][0] * len(list(run)), glyphs[kind][1]) for kind, run in groupby(cells)
    )


def request_lines(
    row: RequestView, now: Ns, axis: Axis, *, followed: bool, thin: bool
) -> list[Line]:
    """One line of a request, with `thin` two, LABEL + axis.cells + FACTS wide."""
    over = row.ended is not None
    name = cut(row.id, LABEL - 2)
    times = f" \N{MULTIPLICATION SIGN}{row.attempts}" if row.attempts > 1 else ""
    label = f"{'>' if followed else ' '}{name}{times if len(name + times) < LABEL - 1 else ''}"
    style = "bold" if followed or not over else ""
    lines = [
        (
            (label.ljust(LABEL), style),
            *bar(row.spans, row, now, axis),
            *facts(row, now, alone=not thin),
        )
    ]
    if thin:
        lines.append(
            (
                (f" {cut(row.pipeline or '-', LABEL - 2)}".ljust(LABEL), DIM),
                *strokes(row.wires, now, axis),
                *fit(line("  ", *transfer(row)), FACTS),
            )
        )
    return lines


def facts(row: RequestView, now: Ns, *, alone: bool = False) -> Line:
    """Tokens so far and TTFT, or how long the first token has been waited for. `alone`: there is no
    other line for the KV on its way.
    """
    if row.reason in ("rejected", "aborted"):
        return line(("  " + right(row.reason, FACTS - 2), BAD))
    if alone and row.phase == "wait" and (kv := transfer(row)):
        return fit(line("  ", *kv), FACTS)
    limit = f"/{row.max_tokens}" if row.max_tokens and row.ended is None else ""
    style = "" if row.ttft is not None else DIM
    ttft = row.ttft if row.ttft is not None else now - row.sent
    return line(right(f"{row.got}{limit}", 10), (right(show.duration(ttft), 11), style), "  ")


def transfer(row: RequestView) -> Line:
    """How far the KV to the main decoder is or, where there is none, that to the first."""
    wire = next((w for w in row.wires if w.to_main), next(iter(row.wires), None))
    if wire is None:
        crosses = len({name for name in row.path if name}) > 1
        soon = crosses and row.ended is None and row.phase != "queue"
        return line(("no KV yet" if soon else "", DIM))
    letter = "M" if wire.to_main else "R"
    if wire.ended is None:
        rate = f" {format_rate(round(wire.rate), 2)}" if wire.rate else ""
        return line((f"KV>{letter} {100 * wire.share:.0f} %{rate}", show.STYLE[letter]))
    if wire.cancelled:
        return line((f"KV>{letter} cut at {100 * wire.share:.0f} %", DIM))
    handed = f", {row.handed} ids" if row.handed else ""
    sends = f" in {row.sends}" if row.sends > 1 else ""
    return line((f"{show.size(wire.bytes)}{handed}{sends}", DIM))


# -- one request, taken apart ----------------------------------------------------------------------


def lanes(row: RequestView, now: Ns, width: int) -> list[Line]:
    """All that one request has done, each kind in a line of its own, on an axis of its own."""
    end = now if row.ended is None else row.ended
    axis = Axis.over(row.sent, end, max(10, width - LABEL - FACTS - 4))
    lines = [line("".ljust(LABEL), *axis.line())]
    made = dict(row.made)

    def lane(label: str, one: Line, *what: tuple[str, str] | str) -> None:
        lines.append((*line(label.ljust(LABEL)), *one, *line("  ", *what)))

    def phase_lane(label: str, phase: Phase, *what: tuple[str, str] | str) -> None:
        spans = [span for span in row.spans if span[0] == phase]
        if spans:
            lane(label, bar(spans, row, now, axis), *what)

    total = sum((now if e is None else e) - s for p, s, e in row.spans if p == "queue")
    phase_lane("queue", "queue", show.duration(total))
    hit = dict(row.hits).get(row.path[0] or "", 0)
    phase_lane("prefill", "prefill", f"{row.prompt_tokens:,} tokens, {hit:,} hit")
    for wire in row.wires:
        letter = "M" if wire.to_main else "R"
        state = f"{100 * wire.share:.0f} % {show.size(wire.bytes)}"
        if wire.ended is None and wire.rate:
            state += f" {format_rate(round(wire.rate), 2)}"
        if wire.cancelled:
            state += " cut"
        lane(cut(f"KV>{wire.dst}", LABEL - 1), strokes([wire], now, axis),
             (state, show.STYLE[letter]))  # fmt: skip
    total = sum((now if e is None else e) - s for p, s, e in row.spans if p == "wait")
    phase_lane("wait", "wait", show.duration(total))
    phase_lane("relay", "relay", show.many(made.get("R", 0), "token"))
    if row.sends:
        spans = [span for span in row.spans if span[0] == "handoff"]
        rounds = _marked_rounds(bar(spans, row, now, axis), row.rounds, axis)
        lane("handoff", rounds, f"{show.many(row.sends, 'round')}, {show.many(row.handed, 'id')}")
    phase_lane("main", "main", show.many(made.get("M", 0), "token"))
    phase_lane("alone", "alone", show.many(made.get("P", 0), "token"))
    return [fit(one, width) for one in lines]


def _marked_rounds(one: Line, rounds: Sequence[Ns], axis: Axis) -> Line:
    """With a stroke where ids went to the main decoder, unless the cell has a letter."""
    cells = [(char, style) for text, style in one for char in text]
    for t in rounds:
        cell = axis.span(t, t)[0]
        if cell < len(cells) and cells[cell][0] == " ":
            cells[cell] = ("\N{BOX DRAWINGS LIGHT VERTICAL}", cells[cell][1] or HANDOFF)
    return tuple(
        ("".join(char for char, _ in run), style)
        for style, run in groupby(cells, key=lambda c: c[1])
    )
