"""What the dashboard looks like: a snapshot in, the lines of a screen out. Pure.

From top to bottom: what runs and how far it is; latencies and goodput of the run so far; instances
and links (beside the requests where the window is wide); a bar for each request on a common time
axis; the answer of the request that is followed; the last thing that went wrong; the keys. What
does not fit is left out from the bottom up, bars last. No line is wider than the window, and there
are never more of them than it has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pddrt import show
from pddrt.dashboard.bars import (
    BAD,
    DIM,
    FACTS,
    LABEL,
    axis_of,
    lanes,
    request_lines,
)
from pddrt.dashboard.facts import (
    DEFAULT_CHOICE,
    Choice,
    RequestView,
    Snapshot,
)
from pddrt.dashboard.tables import KEYS, help_page, legend, surroundings
from pddrt.dashboard.text import Answer, Line, beside, cut, fit, line, right, width_of
from pddrt.types import MS, SECOND, Ns

MIN_WIDTH, MIN_HEIGHT = 80, 16
"""Of a window in which it is worth drawing."""
SIDE_FROM = 120
"""From this width on instances and links stand beside the requests."""
SIDE = 40
MAX_THIN = 12
"""Of requests that have two lines each in what is printed at the end."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the user has made of the screen, and what the run is about. `stage`: what follows the
    run, if it is there already; `expected`: requests in all; `pace`: virtual seconds a second.
    """

    choice: Choice = DEFAULT_CHOICE
    expected: int = 0
    paused: bool = False
    ending: bool = False
    stage: str = ""
    pace: float | None = None
    detail: bool = False
    help: bool = False
    keys: bool = True


def room(look: Look, width: int, height: int, instances: int, links: int) -> int:
    """How many requests can be shown: what a snapshot is to be asked for."""
    return max(1, _Plan.of(look, width, height, instances, links).requests)


def text_width(width: int) -> int:
    """Of the lines of an answer in a window so wide."""
    return max(20, width - _side(width) - (2 if _side(width) else 0))


def _side(width: int) -> int:
    return min(SIDE + (width - SIDE_FROM) // 8, 56) if width >= SIDE_FROM else 0


def frame(seen: Snapshot, look: Look, answer: Answer | None, width: int, height: int) -> list[Line]:
    """The screen, at most `height` lines of at most `width` cells."""
    if look.help:
        page = [*header(seen, look, width), (), *help_page(width)]
        return [fit(one, width) for one in page[:height]] + [()] * (height - len(page))
    plan = _Plan.of(look, width, height, len(seen.instances), len(seen.links))
    head = [*header(seen, look, width)]
    around = surroundings(seen, plan.around, plan.side or width)
    middle = _middle(seen, look, answer, plan, width - plan.side - (2 if plan.side else 0))
    if plan.side:
        around = [line((" ", DIM), *one) for one in around]
        middle = beside(middle, around, width - plan.side - 1)
    else:
        head += around
    foot = _notice(seen, width) if plan.notice else []
    foot += [keys(look, width)] if plan.keys else []
    body = [*head, *middle[: max(0, height - len(head) - len(foot))]]
    body += [()] * (height - len(body) - len(foot))
    return [fit(one, width) for one in (body + foot)[:height]]


def last(seen: Snapshot, look: Look, width: int) -> list[Line]:
    """How things stood at the end, to be printed once."""
    seen = replace(seen, followed=None)
    lines = header(seen, look, width, over=True)
    if seen.rows:
        lines += bars(seen, look, width, thin=len(seen.rows) <= MAX_THIN)
        lines.append(legend(width))
    return [fit(one, width) for one in lines]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who gets which rows of the window."""

    side: int
    around: int
    requests: int
    thin: bool
    legend: int
    text: int
    middle: int
    notice: bool
    keys: bool

    @classmethod
    def of(cls, look: Look, width: int, height: int, instances: int, links: int) -> _Plan:
        side = _side(width)
        rows = height - 2
        keys = look.keys and height >= 4
        notice = height >= 20
        rows -= keys + notice
        if side:
            around = rows
        else:
            around = min(1 + max(instances, links), max(0, height // 4))
            around = around if width >= MIN_WIDTH else 0
            rows -= around
        middle = max(0, rows)
        legend = 1 if middle >= 10 else 0
        text = 0 if middle < 9 else min(10, middle // 3)
        for_rows = max(0, middle - 1 - legend - text)
        thin = for_rows >= 6
        requests = for_rows // 2 if thin else for_rows
        return cls(side, around, requests, thin, legend, text, middle, notice, keys)


# -- top -------------------------------------------------------------------------------------------


def header(seen: Snapshot, look: Look, width: int, *, over: bool = False) -> list[Line]:
    """What runs, how far it is, and the figures of the run so far; `over`: no more of now."""
    totals = seen.totals
    expected = f"/{look.expected}" if look.expected else ""
    parts = [f"{totals.finished + totals.lost}{expected} done", f"{totals.under_way} under way"]
    if totals.lost:
        parts.append(f"{totals.lost} lost")
    state = ""
    if look.ending:
        state = "ending, what was measured is being saved"
    elif look.stage:
        state = look.stage
    elif look.paused:
        state = "PAUSED"
    elif look.pace is not None:
        state = f"pace {look.pace:g}\N{MULTIPLICATION SIGN}"
    first = line(
        (show.clean(seen.name) or "starting the instances", "bold"),
        f"  {clock(seen.now, fine=seen.clock == 'virtual')}",
        " virtual" if seen.clock == "virtual" else "",
        f"  {', '.join(parts)}",
        (f"  {state}" if state else "", "bold reverse" if look.paused else "bold"),
    )
    figures = []
    for name, pair in (("TTFT", totals.ttft), ("ITL", totals.itl)):
        if pair is not None:
            p50, p90 = map(show.duration, pair)
            figures.append(line((name, "bold"), f" p50 {p50} p90 {p90}"))
        else:
            figures.append(line((name, "bold"), (" -", DIM)))
    if totals.goodput is not None and totals.met is not None:
        met = "SLO met by " if width >= 100 else ""
        goodput = f" {totals.goodput:.2g}/s, {met}{100 * totals.met:.0f} %"
        figures.append(line(("goodput", "bold"), goodput))
    if not over:
        figures.append(line(f"{totals.tokens_rate:.3g} tokens/s"))
    return [fit(first, width), _joined(figures, width, "   " if width >= 100 else "  ")]


def _joined(parts: Sequence[Line], width: int, between: str = "   ") -> Line:
    """As many of them as fit."""
    joined: Line = ()
    for part in parts:
        longer = (*joined, *line(between if joined else ""), *part)
        if sum(len(text) for text, _ in longer) > width:
            break
        joined = longer
    return joined


def clock(t: Ns, *, fine: bool = False) -> str:
    """To a tenth of a second; `fine`: at first to a hundredth of it."""
    if fine and t < 10 * SECOND:
        return f"{t // (10 * MS) / 100:.2f} s"
    minutes, seconds = divmod(t // (100 * MS) / 10, 60)
    return f"{int(minutes)}:{seconds:04.1f}" if minutes else f"{seconds:.1f} s"


# -- requests --------------------------------------------------------------------------------------


def _middle(
    seen: Snapshot, look: Look, answer: Answer | None, plan: _Plan, width: int
) -> list[Line]:
    """What the largest part of the window shows."""
    if look.detail and seen.followed is not None:
        lines = detail(seen.followed, seen.now, width)
        return lines + _answer(seen.followed, answer, width, plan.middle - len(lines))
    lines = bars(seen, look, width, thin=plan.thin)
    if plan.text:
        lines = lines[: plan.middle - plan.text - plan.legend]
        if plan.legend:
            spare = plan.middle - plan.text - plan.legend - len(lines)
            lines += [(), legend(width)] if spare else [legend(width)]
        lines += _answer(seen.followed, answer, width, plan.middle - len(lines))
    return lines


def bars(seen: Snapshot, look: Look, width: int, *, thin: bool) -> list[Line]:
    """The time axis, and the requests below it."""
    cells = width - LABEL - FACTS
    if cells < 10:
        return [_in_words(row) for row in seen.rows]
    axis = axis_of(seen.rows, seen.now, cells)
    more = f"+{seen.hidden} more" if seen.hidden else "request"
    title = line(
        (cut(more, LABEL - 1).ljust(LABEL), DIM),
        *axis.line(),
        (f"{right('tokens', 10)}{right('TTFT', 11)}", DIM),
    )
    lines = [title]
    for row in seen.rows:
        followed = seen.followed is not None and row.id == seen.followed.id
        lines += request_lines(row, seen.now, axis, followed=followed, thin=thin)
    if not seen.rows:
        nothing = "all requests have ended" if seen.totals.sent else "no request yet"
        lines.append(line((nothing, DIM)))
    return lines


def _in_words(row: RequestView) -> Line:
    """Where there is no room for bars."""
    return line((f"{row.id} ", "bold"), f"{row.phase} {row.got}/{row.max_tokens}")


def detail(row: RequestView, now: Ns, width: int) -> list[Line]:
    """One request, taken apart."""
    path = " > ".join(name for name in row.path if name)
    state = row.reason or "under way"
    if row.attempts > 1:
        state += f", attempt {row.attempts}"
    first = f"TTFT {show.duration(row.ttft)}, TPOT {show.duration(row.tpot)}"
    return [
        fit(line((f"{row.id}  {row.pipeline}  {path}", "bold"), f"  {state}  {first}"), width),
        fit(line((show.clean(row.why), DIM)), width),
        *lanes(row, now, width),
        (),
    ]


def _answer(row: RequestView | None, answer: Answer | None, width: int, rows: int) -> list[Line]:
    """A title, and the newest lines of an answer."""
    if row is None or rows < 2:
        return []
    limit = f"/{row.max_tokens}" if row.max_tokens and row.ended is None else ""
    made = " ".join(f"{source} {count}" for source, count in row.made)
    title = f" {row.id}  {row.got}{limit} tokens{f': {made}' if made else ''} "
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
    prompt = show.one_line(row.prompt, max(0, width - len(title) - 8)).plain
    said = f"{rule * 2} {prompt} " if prompt else ""
    head = line((rule * 2, DIM), (title, "bold"), (said, DIM))
    head = (*head, (rule * (width - width_of(head)), DIM))
    lines = answer.lines(rows - 1) if answer is not None else []
    return [fit(head, width), *lines] + [()] * (rows - 1 - len(lines))


# -- bottom ----------------------------------------------------------------------------------------


def _notice(seen: Snapshot, width: int) -> list[Line]:
    """The newest of what went wrong, or ended."""
    if not seen.notices:
        return [()]
    newest = seen.notices[-1]
    text = f"{clock(newest.t)}  {show.clean(newest.what)}"
    return [line((cut(text, width), BAD if newest.bad else ""))]


def keys(look: Look, width: int) -> Line:
    parts = []
    for key, what, _ in KEYS:
        if what == "pace":
            continue
        state = ""
        if what == "pause" and look.paused:
            what = "go on"
        elif what == "sort":
            state = f": {look.choice.order}"
        elif what == "filter":
            what = "hide ended" if look.choice.ended else "show ended"
        parts.append(line((key, "bold"), f" {what}{state}"))
    return _joined(parts, width, "  ")
