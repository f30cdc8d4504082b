"""What moves on the screen while a run is under way: the answers as they come, and progress.

Requests run side by side, but a text is read one at a time: one request is in the spotlight and
streams token by token; what the others get meanwhile is kept and shown when their turn comes, in
the order in which they were sent.

`LiveText` listens to the trace and only notes what it hears. A thread of its own does the writing,
so that a slow or halted terminal never holds up what is being measured. On a terminal it keeps,
below the text, two lines on what is under way; anywhere else it writes plain text, once, forwards.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from pddrt import show
from pddrt import trace as ev
from pddrt.env import Stopwatch
from pddrt.metrics import Recorder
from pddrt.trace import Event
from pddrt.types import MS, SECOND, Ns

TICK_S = 0.08
MAX_TEXTS = 12
"""Beyond that many requests only the first texts are shown; all are in requests.jsonl."""
SHOWN_OF_MANY = 3
MIN_LIVE_WIDTH = 50


def can_move(console: Console) -> bool:
    """Whether lines on this console may be drawn over: a terminal, wide enough, with colours."""
    return (
        console.is_interactive
        and not console.is_dumb_terminal
        and show.coloured(console)
        and console.file.isatty()
        and console.width >= MIN_LIVE_WIDTH
    )


@dataclass(slots=True)
class Flight:
    """A request under way, as far as the two lines need it. Counts are tokens."""

    id: str
    routed: ev.Routed | None = None
    computed: int = 0
    at_main: int = 0
    first_made: bool = False
    handed_over: bool = False
    followed: bool = False
    got: int = 0
    source: str = ""
    text: list[ev.TokensReceived] = field(default_factory=list)
    end: ev.Finished | None = None

    def take(self, event: Event) -> None:
        match event:
            case ev.Routed():
                if self.routed is not None:  # a further attempt; the answer counts as a whole
                    event = replace(event, max_tokens=self.routed.max_tokens)
                self.routed = event
                self.at_main, self.handed_over, self.followed = 0, False, False
            case ev.KVSent():
                self.computed = max(self.computed, event.end)
            case ev.KVReceived() if self.routed and event.instance == self.routed.main:
                self.at_main += event.end - event.start
            case ev.PrefillEnded():
                self.first_made = True
            case ev.HandoffSent() if event.follows:
                self.followed = True
            case ev.HandoffSent() if event.last:
                self.handed_over = True
            case ev.HandoffEnded():
                self.handed_over = True
            case ev.TokensReceived():
                self.got, self.source = event.end, event.source
                self.text.append(event)
            case ev.Finished():
                self.end = event

    @property
    def doing(self) -> Text:
        """What happens to it now, in some words."""
        what, letter = self._doing()
        return Text.assemble((self.id, "bold"), " ", (what, show.STYLE.get(letter, "")))

    def _doing(self) -> tuple[str, str]:
        """And whose colour it has."""
        r = self.routed
        if r is None:
            return "at the gateway", ""
        if not self.first_made:
            part = f" {self.computed:,}/{r.prompt_tokens:,}" if self.computed else ""
            return f"P computes the prompt{part}", "P"
        if not self.got or self.source == "P":
            return f"its KV is on its way to {r.relay or r.main}", ""
        count = f"{self.got}/{r.max_tokens}"
        if self.handed_over and self.source == "R":
            return f"R hands over to M {count}", "M"
        if self.followed and not self.handed_over and self.source == "R":
            return f"R answers, M follows {count}", "R"
        return f"{self.source} answers {count}", self.source

    def kv(self, width: int) -> Text:
        """How much of its KV the main decoder holds, as a bar of `width` cells and a number."""
        r = self.routed
        if r is None or not r.prompt_tokens or self.at_main >= r.prompt_tokens:
            return Text()
        cells = width * self.at_main // r.prompt_tokens
        text = Text(f"  KV at {r.main} ")
        text.append("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * cells, show.STYLE["M"])
        text.append("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (width - cells), "dim")
        return text.append(f" {100 * self.at_main // r.prompt_tokens} %")


class LiveText:
    """Shows the answers as the client gets them. Register it as a listener inside its `with`.

    `recorder` must hear each event before this does. `limit`: how many texts; 0 for none. Nothing
    is left over after the `with`, whatever ended it.
    """

    def __init__(
        self, console: Console, recorder: Recorder, *, requests: int, virtual: bool,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._console = console
        self._recorder = recorder
        self._expected = requests
        self._virtual = virtual
        few = requests if requests <= MAX_TEXTS else SHOWN_OF_MANY
        self._limit = few if limit is None else limit
        self._colour = show.coloured(console)
        self._live = (
            Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False,
                 redirect_stderr=False)
            if can_move(console)
            else None
        )  # fmt: skip
        self._heard: deque[Event] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="display", daemon=True)
        self._failure: BaseException | None = None
        self._watch = Stopwatch()
        self._now: Ns = 0
        self._flights: dict[str, Flight] = {}
        self._turns: deque[str] = deque()
        self._spotlight: Flight | None = None
        self._source = ""
        self._line = Text()
        self._stage = ""
        self._sent = self._shown = self._done = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        """Shows what is still to be shown; what did not end is said to be so."""
        self._over.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()
        if self._failure is not None and error is None:
            raise self._failure

    def __call__(self, event: Event) -> None:
        """Hears one event of the trace. Does not block."""
        if not isinstance(event, ev.Step):
            self._heard.append(event)

    def progress(self, stage: str, done: float | None) -> None:
        """Hears of what follows the run: `done` from 0 to 1, None where nobody knows."""
        self._stage = show.clean(stage) + (f" {100 * done:.0f} %" if done is not None else "")

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._over.wait(TICK_S):
                self._catch_up()
            self._catch_up()
            self._finish()
        except Exception as error:  # where the thread ends; `__exit__` raises it
            self._failure = error

    def _catch_up(self) -> None:
        while self._heard:
            self._take(self._heard.popleft())
        if self._live is not None:
            self._live.update(self._region(), refresh=True)

    def _take(self, event: Event) -> None:
        self._now = event.t
        name = ev.request_of(getattr(event, "request", ""))
        if isinstance(event, ev.RequestSent):
            self._flights[name] = Flight(name)
            if self._sent < self._limit:
                self._turns.append(name)
            self._sent += 1
        flight = self._flights.get(name)
        if flight is None:
            return
        flight.take(event)
        if isinstance(event, ev.Finished):
            self._done += 1
        if flight is self._spotlight:
            self._show(flight)
        else:
            if name not in self._turns:
                flight.text.clear()
                if flight.end:
                    del self._flights[name]
            self._next()

    def _next(self) -> None:
        """While the spotlight is free, gives it to the next request, once that is routed."""
        while self._spotlight is None and self._turns:
            flight = self._flights[self._turns[0]]
            if flight.routed is None and flight.end is None:
                return
            self._turns.popleft()
            self._shown += 1
            self._spotlight, self._source = flight, ""
            record = self._recorder.requests[flight.id]
            self._print(*show.head(record, flight.routed, self._console.width))
            self._show(flight)

    def _show(self, flight: Flight) -> None:
        """Writes what the spotlight's request has got and not shown yet."""
        for event in flight.text:
            self._write(event)
        flight.text.clear()
        if flight.end is not None:
            self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        if self._live is None and self._source:
            self._print(Text())
        elif self._line:
            self._print(self._line)
        self._line = Text()
        record = self._recorder.requests[flight.id]
        self._print(*show.foot(record, self._console.width, self._colour), Text())
        self._flights.pop(flight.id, None)
        self._spotlight = None
        self._next()

    def _finish(self) -> None:
        """After the run: an answer cut short ends its line; texts not shown are counted."""
        if self._spotlight is not None:
            self._leave(self._spotlight)
        hidden = self._sent - self._shown
        if hidden > 0 and self._shown:
            more = show.many(hidden, "more request")
            self._print(Text(f"({more}; their texts are in requests.jsonl)"), Text())

    # -- writing -----------------------------------------------------------------------------------

    def _print(self, *lines: Text) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=self._live is None)

    def _write(self, event: ev.TokensReceived) -> None:
        piece = Text()
        if event.source != self._source:
            self._source = event.source
            piece.append(show.mark(event.source, self._colour))
        style = show.STYLE.get(event.source, "") if self._colour else ""
        piece.append(show.clean(event.text), style)
        if self._live is None:
            self._console.print(piece, end="", soft_wrap=True)
            return
        self._line.append(piece)
        self._line.expand_tabs(4)
        *whole, self._line = self._line.split("\n", allow_blank=True)
        self._print(*whole)
        # Only the last row of a paragraph may still change; the others can go up for good.
        *rows, last = self._line.wrap(self._console, self._console.width) or [Text()]
        if rows:
            self._print(*rows)
            self._line = last

    # -- the lines below ---------------------------------------------------------------------------

    def _region(self) -> RenderableType:
        rows = [self._line] if self._line else []
        flights = [f for f in self._flights.values() if f.end is None]
        first = self._spotlight if self._spotlight in flights else next(iter(flights), None)
        kv = 24 if self._console.width >= 80 else 12
        rows.append(
            Text.assemble(first.doing, first.kv(kv)) if first else Text(self._idle(), "dim")
        )
        totals = Text(f"{self._clock()}  {self._done}/{self._expected} done")
        others = [f for f in flights if f is not first]
        for flight in others[:3]:
            totals.append("  \N{MIDDLE DOT}  ").append(flight.doing)
        if others[3:]:
            totals.append(f"  and {len(others) - 3} more")
        rows.append(totals)
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return Group(*rows)

    def _idle(self) -> str:
        if self._stage:
            return self._stage
        if not self._sent:
            return "starting the instances"
        return "giving everything back" if self._done == self._expected else "no request under way"

    def _clock(self) -> str:
        if self._virtual:
            return f"{self._now // (100 * MS) / 10:.1f} s virtual"
        seconds = self._watch.elapsed() // SECOND
        return f"{seconds // 60}:{seconds % 60:02}"


class Bars:
    """Progress of set-up work: a bar on a terminal, a line a stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @property
    def moving(self) -> bool:
        return can_move(self._console)

    def __call__(self, stage: str, done: float | None) -> None:
        """`done` from 0 to 1; None where nobody knows."""
        new, self._stage = stage != self._stage, stage
        if not self.moving:
            if new:
                self._console.print(Text(show.clean(stage)), soft_wrap=True)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(24),
                TextColumn("{task.fields[share]}"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if new:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(show.clean(stage), total=None, share="")
        if done is not None and self._task is not None:
            share = f"{100 * done:.0f} %"
            self._progress.update(self._task, completed=done, total=1.0, share=share)
