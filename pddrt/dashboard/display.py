"""The dashboard: a run on the screen while it is under way, and what keys do to it.

It listens to the trace and only notes what it hears; a thread of its own does the rest - the state
(`state`), the picture (`view`), the terminal (`screen`). So neither a
slow terminal nor a key holds up what is measured, and a run is the same to the byte with and
without it: under the virtual clock this thread's time is none of the run's. The one exception is
asked for: `pacing.Pacer` makes a virtual run wait, which it cannot notice.

How often it draws follows from what a frame costs: at most BUDGET of one core, unless that would be
less than once a second.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.text import Text

from pddrt import live, show
from pddrt.dashboard.facts import ORDERS
from pddrt.dashboard.pacing import Pacer
from pddrt.dashboard.screen import Keyboard, Screen
from pddrt.dashboard.state import Board
from pddrt.dashboard.text import Answer, as_group, as_text, encodable, speaks_boxes
from pddrt.dashboard.view import MIN_HEIGHT, MIN_WIDTH, Look, frame, last, room, text_width
from pddrt.env import Stopwatch
from pddrt.metrics import Recorder, RequestRecord
from pddrt.trace import Event
from pddrt.types import Ns

if TYPE_CHECKING:
    from pddrt.engine.models import Progress
    from pddrt.run import Run

MODES = ("auto", "on", "off")
BUDGET = 0.02
"""Of one core, for drawing."""
FASTEST_S, SLOWEST_S = 0.1, 1.0
"""Between two frames."""
BACKLOG = 100_000
"""Events noted and not looked at yet: beyond that the run itself looks at them."""
SHORT = 3
"""Up to so many answers are printed as a whole at the end."""


def refusal(console: Console, name: str = "stdout") -> str:
    """Why there can be no dashboard on `console`; nothing where there can."""
    width, height = console.size
    if not console.file.isatty():
        return f"{name} is not a terminal"
    if console.no_color:
        return "NO_COLOR is set"
    if not live.can_move(console) and width >= live.MIN_LIVE_WIDTH:
        return "this terminal cannot be drawn on"
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return f"{width} x {height} is too small a window; it takes {MIN_WIDTH} x {MIN_HEIGHT}"
    return "" if Keyboard().ours else "this process is in the background"


@contextlib.contextmanager
def watching(
    run: Run, console: Console, errors: Console, *, mode: str, pace: float | None, json: bool
) -> Iterator[Progress]:
    """Inside, `run` is shown while it is executed, on a dashboard or as plain text; the value hears
    of what follows the run. `console` is stdout, `errors` stderr. `mode`: auto, on or off; with
    `json` nothing goes to stdout.

    Where stdout is no terminal but stderr is, `on` draws there, and stdout has its lines as ever.
    """
    virtual = run.scenario.clock == "virtual"
    pacer = Pacer(pace, lambda: run.interrupted) if virtual else None
    if pacer is not None:
        run.listen(pacer)
    stream = (errors, "stderr") if json else (console, "stdout")
    reason = "" if mode == "off" else refusal(*stream)
    where = errors if json else console
    if mode == "on" and reason and not json and not refusal(errors, "stderr"):
        where, reason = errors, ""
    drawn = mode != "off" and not reason and not (json and mode == "auto")
    if mode == "on" and reason:
        instead = "no dashboard" if json else "plain lines instead"
        errors.print(f"--dashboard on: {reason}; {instead}", soft_wrap=True)
    requests, slo = run.expected_requests, run.scenario.slo
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None
        if not drawn or (where is errors and not json):
            text = live.LiveText(
                errors if json else console, run.recorder, requests=requests, virtual=virtual,
                limit=0 if json else None,
            )  # fmt: skip
            run.listen(stack.enter_context(text))
            progress = text.progress
        if drawn:
            board = Dashboard(
                where, run.recorder if where is console else None, requests=requests,
                slo=(slo.ttft, slo.tpot), interrupted=lambda: run.interrupted, pacer=pacer,
            )  # fmt: skip
            run.listen(stack.enter_context(board))
            progress = board.progress
        assert progress is not None
        yield progress


def interrupt() -> None:
    """As Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


class Dashboard:
    """Shows a run. Register it as a listener inside its `with`, which gives the terminal back as it
    was, whatever ends it, and prints how things stood.

    `recorder` must hear each event before this does; without it no answers are printed at the end.
    `slo`: (TTFT, TPOT) that the scenario asks. `interrupted`: whether the run has been asked to
    end. `pacer`: what a virtual run waits for. `leave`: what q does.
    """

    def __init__(
        self, console: Console, recorder: Recorder | None = None, *, requests: int,
        slo: tuple[Ns | None, Ns | None] = (None, None),
        interrupted: Callable[[], bool] = lambda: False, pacer: Pacer | None = None,
        leave: Callable[[], None] = interrupt,
    ) -> None:  # fmt: skip
        self._console = console
        self._recorder = recorder
        self._board = Board(slo)
        self._hears = self._board.hears
        self._screen, self._keyboard = Screen(console), Keyboard()
        self._interrupted = interrupted
        self._pacer = pacer
        self._leave = leave
        self._look = Look(expected=requests, keys=self._keyboard.there)
        self._heard: deque[Event] = deque()
        self._board_lock, self._terminal_lock = threading.Lock(), threading.Lock()
        self._answer: tuple[str, Answer] | None = None
        self._over = threading.Event()
        self._waker = os.pipe()
        self._thread = threading.Thread(target=self._work, name="dashboard", daemon=True)
        self._failure: BaseException | None = None
        self._watch = Stopwatch()
        self._began: Ns | None = None
        self._stage = ""
        self._behind = False
        """Whether the run had to look at events itself, after a long pause."""
        self._now: Ns = 0
        self._wait_s = FASTEST_S
        self._cost_s = 0.0
        self._stop_handler: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._stop_handler = signal.signal(signal.SIGTSTP, self._suspend)
        self._resume()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._over.set()
        os.write(self._waker[1], b"x")
        try:
            self._thread.join()
        finally:
            self._give_back()
            if self._stop_handler is not None:
                signal.signal(signal.SIGTSTP, self._stop_handler)
            for fd in self._waker:
                os.close(fd)
        if self._failure is not None and error is None:
            raise self._failure
        if error is None:
            self._print_last()

    def __call__(self, event: Event) -> None:
        """Hears one event of the trace. Does not block."""
        if self._began is None:
            self._began = self._watch.elapsed() - event.t
        if type(event) in self._hears:
            self._heard.append(event)
            if len(self._heard) > BACKLOG:
                self._behind = True
                self._catch_up()

    def progress(self, stage: str, done: float | None) -> None:
        """Hears of what follows the run: `done` from 0 to 1, None where nobody knows."""
        share = f" {100 * done:.0f} %" if done is not None else ""
        self._stage = show.clean(stage) + share

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                if self._keyboard.ours:
                    self._resume()
                    self._draw()
                for key in self._keyboard.wait(self._wait_s, self._waker[0]):
                    self._press(key)
            self._catch_up()
        except Exception as error:  # where the thread ends; `__exit__` raises it
            self._failure = error
            if self._pacer is not None:
                self._pacer.let_go()

    def _catch_up(self) -> None:
        with self._board_lock:
            while self._heard:
                self._board(self._heard.popleft())

    def _draw(self) -> None:
        before = time.thread_time()
        if self._behind and self._pacer is None:  # it has gone on
            self._look, self._behind = replace(self._look, paused=False), False
        if not self._look.paused or self._pacer is not None:
            self._catch_up()
            self._now = self._time()
        look = replace(
            self._look,
            stage=self._stage,
            ending=self._interrupted(),
            pace=self._pacer.pace if self._pacer else None,
        )
        size = width, height = self._screen.size
        with self._board_lock:
            counts = self._board.instances, self._board.directions
            rows = room(look, width, height, *counts)
            seen = self._board.snapshot(self._now, look.choice, rows)
            answer = self._text_of(seen.followed.id, width) if seen.followed else None
        lines = frame(seen, look, answer, width, height)
        with self._terminal_lock:
            if self._screen.entered:
                self._screen.draw(lines, size)
        self._cost_s += (time.thread_time() - before - self._cost_s) / 4
        self._wait_s = min(max(self._cost_s / BUDGET, FASTEST_S), SLOWEST_S)

    def _time(self) -> Ns:
        """Of the run, now: on the wall clock it goes on between events."""
        if self._pacer is not None:
            return self._pacer.now
        if self._stage or self._began is None:
            return self._board.now
        return self._watch.elapsed() - self._began

    def _text_of(self, request: str, width: int) -> Answer:
        """Its answer so far, wrapped; what is new of it is added to what there is."""
        wide = text_width(width)
        if self._answer is None or (self._answer[0], self._answer[1].width) != (request, wide):
            self._answer = (request, Answer(wide))
        answer = self._answer[1]
        first, pieces = self._board.text(request, answer.pieces)
        answer.pieces = first
        for source, text in pieces:
            answer.feed(source, text)
        return answer

    # -- keys --------------------------------------------------------------------------------------

    def _press(self, key: str) -> None:
        look = self._look
        choice = look.choice
        match key:
            case "q":
                self._leave()
            case "p":
                self._look = replace(look, paused=not look.paused)
                if self._pacer is not None:
                    self._pacer.pause(self._look.paused)
            case "+" if self._pacer is not None:
                self._pacer.faster()
            case "-" if self._pacer is not None:
                self._pacer.slower()
            case "up" | "down" | "page up" | "page down":
                step = (-1 if "up" in key else 1) * (10 if "page" in key else 1)
                self._look = replace(look, choice=replace(choice, follow=self._next(step)))
            case "enter":
                self._look = replace(look, detail=not look.detail, help=False)
            case "esc":
                if look.detail or look.help:
                    self._look = replace(look, detail=False, help=False)
                else:
                    self._look = replace(look, choice=replace(choice, follow=None))
            case "s":
                order = ORDERS[(ORDERS.index(choice.order) + 1) % len(ORDERS)]
                self._look = replace(look, choice=replace(choice, order=order))
            case "f":
                self._look = replace(look, choice=replace(choice, ended=not choice.ended))
            case "?":
                self._look = replace(look, help=not look.help)
            case "redraw":
                self._screen.forget()

    def _next(self, step: int) -> str | None:
        """The request so many rows below the followed one."""
        with self._board_lock:
            names = self._board.order(self._look.choice)
            followed = self._board.snapshot(self._now, self._look.choice, 1).followed
        if not names:
            return None
        at = names.index(followed.id) + step if followed and followed.id in names else 0
        return names[max(0, min(at, len(names) - 1))]

    # -- the terminal ------------------------------------------------------------------------------

    def _resume(self) -> None:
        with self._terminal_lock:
            if not self._screen.entered:
                self._keyboard.enter()
                self._screen.enter()

    def _give_back(self) -> None:
        """A thread that draws has the lock for moments, unless the terminal is halted."""
        got = self._terminal_lock.acquire(timeout=1)
        try:
            self._screen.leave()
            self._keyboard.leave()
        finally:
            if got:
                self._terminal_lock.release()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal as it was. After `fg` the thread takes it again."""
        self._give_back()
        if self._pacer is not None:
            self._pacer.pause(True)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        if self._pacer is not None:
            self._pacer.pause(self._look.paused)

    # -- afterwards --------------------------------------------------------------------------------

    def _print_last(self) -> None:
        """How things stood, and the answers if they are few."""
        width = self._console.width
        look = replace(self._look, paused=False, keys=False)
        look = replace(look, choice=replace(look.choice, ended=True, follow=None))
        seen = self._board.snapshot(choice=look.choice, rows=show.MAX_ROWS)
        encoding = getattr(self._console.file, "encoding", None) or "utf-8"
        plain = not speaks_boxes(encoding)
        for one in last(seen, look, width):
            self._console.print(as_text(encodable(one, encoding) if plain else one))
        self._console.print()
        records = self._recorder.requests if self._recorder is not None else {}
        if len(records) <= SHORT:
            for name, record in records.items():
                self._print_answer(name, record)

    def _print_answer(self, name: str, record: RequestRecord) -> None:
        routed = self._board.routed(name)
        _, pieces = self._board.text(name)
        for head in show.head(record, routed, self._console.width):
            self._console.print(head)
        text, maker = Text(), ""
        for source, piece in pieces:
            if source != maker:
                maker = source
                text.append(show.mark(source, True))
            text.append(show.clean(piece), show.STYLE.get(source, ""))
        self._console.print(text)
        for foot in show.foot(record, self._console.width, True):
            self._console.print(foot)
        self._console.print()


# -- a picture -------------------------------------------------------------------------------------


def picture(
    events: Iterable[Event], at: Ns, look: Look, width: int = 120, height: int = 30,
    slo: tuple[Ns | None, Ns | None] = (None, None),
) -> str:  # fmt: skip
    """The dashboard of a recorded run as it was at a moment, as an SVG."""
    board = Board(slo)
    for event in events:
        if event.t > at:
            break
        board(event)
    rows = room(look, width, height, board.instances, board.directions)
    seen = board.snapshot(at, look.choice, rows)
    answer = Answer(text_width(width))
    for source, text in board.text(seen.followed.id)[1] if seen.followed else ():
        answer.feed(source, text)
    paper = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor",
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    paper.print(as_group(frame(seen, look, answer, width, height)))
    drawn = paper.export_svg(title="pddrt run", unique_id="dashboard")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they are on the network
