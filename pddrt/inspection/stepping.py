"""Walking through a run, event by event.

A place in a run is a number of an event (a line of events.jsonl, from 1). `place` finds it: by
number, by time (after all that happened until then), or by what happened: `s1.0:HandoffBegan`,
`s1.0:TokensMade#5` (the fifth), `InstanceCrashed` (the first of all).

`moment_at` rebuilds the state there. In a long run it begins with the oldest request that was under
way then; what came before has left nothing but the caches.

`Walk` goes on from there by commands, one a line, from a terminal or a pipe: over a recording, or
with the same run made again (`replay`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from rich.table import Table
from rich.text import Text

from pddrt import trace as ev
from pddrt.errors import BadInput
from pddrt.expression import nearest
from pddrt.inspection import moment_show
from pddrt.inspection.moment import Moment
from pddrt.inspection.rebuild import Rebuild
from pddrt.inspection.recorded import Recorded
from pddrt.inspection.telling import tell
from pddrt.show import clean
from pddrt.trace import Event, request_of, to_line
from pddrt.types import SECOND
from pddrt.units import parse_duration

Shown = Text | Table
KINDS = {
    kind.__name__: kind
    for kind in vars(ev).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
PLACES = "a number, a time such as 1.5 s, or REQUEST:EVENT such as s0.0:HandoffBegan"
_WHAT = re.compile(r"(?:(?P<request>[^:#]+):)?(?P<kind>[A-Za-z]\w*)(?:#(?P<nth>\d+))?")

HELP = """n [COUNT]       the next event, or so many on
s [REQUEST]     the next event of this request
c [PLACE]       on to an event number, a time, or REQUEST:EVENT; without it, to the end
p [NAME]        show a request, an instance or a link as it is now; without it, everything
e               this event, as its line has it
q               leave"""


# -- places ----------------------------------------------------------------------------------------


def place(run: Recorded, text: str) -> int:
    """The number of the event that `text` means. Raises BadInput."""
    total, text = run.index.num_events, text.strip()
    if text.isdecimal():
        number = int(text)
        if not 1 <= number <= total:
            raise BadInput(f"found event {number:,}; allowed: 1 to {total:,}")
        return number
    if re.match(r"[\d.]", text):
        try:
            return max(1, run.number_at(parse_duration(text)))
        except ValueError as error:
            raise BadInput(f"{error}; or {PLACES}") from None
    match = _WHAT.fullmatch(text)
    if match is None:
        raise BadInput(f"found {text!r}; allowed: {PLACES}")
    kind = _kind(match["kind"])
    nth = int(match["nth"] or 1)
    found = _of_kind(run, match["request"], kind)
    for at, number in enumerate(found, 1):
        if at == nth:
            return number
    whose = f" of {match['request']}" if match["request"] else ""
    raise BadInput(f"found {text!r}: there is no {kind}{whose}" + (f" #{nth}" if nth > 1 else ""))


def _kind(name: str) -> str:
    found = next((kind for kind in KINDS if kind.lower() == name.lower()), None)
    if found is None:
        near = nearest(name, KINDS)
        told = f"nearest: {', '.join(near)}" if near else f"allowed: {', '.join(sorted(KINDS))}"
        raise BadInput(f"found {name!r}, which is no kind of event; {told}")
    return found


def _of_kind(run: Recorded, request: str | None, kind: str) -> Iterator[int]:
    if request is None:
        events: Iterable[tuple[int, Event]] = run.walk()
    else:
        run.row(request)  # says which there are
        events = run.events_of(request)
    return (number for number, event in events if type(event).__name__ == kind)


def moment_at(run: Recorded, number: int) -> Rebuild:
    """The state after that event."""
    state, start = Rebuild(), 1
    if number > PARTIAL_FROM:
        start = min(
            (first for first, last in _lives(run) if first <= number <= last), default=number
        )
        state.partial = start > 1
        for event in (*run.head(), *run.changes(start)) if state.partial else ():
            state(event)
    for at, event in run.walk(start, number + 1):
        state(event)
        state.number = at
    return state


PARTIAL_FROM = 50_000
"""Up to so many events are all read."""


def _lives(run: Recorded) -> Iterator[tuple[int, int]]:
    """First and last event of each request."""
    for name in (*map(str, run.index.ids), *run.index.unfinished):
        numbers = run.index.numbers_of(name)
        if len(numbers):
            yield int(numbers[0]) + 1, int(numbers[-1]) + 1


# -- the walk --------------------------------------------------------------------------------------


class Left(KeyboardInterrupt):
    """The user has seen enough. Passes through a loop as an interrupt does."""


class Walk:
    """Called with each event; stops where it was told to, and then asks for commands."""

    def __init__(
        self,
        run: Recorded,
        state: Moment,
        commands: Iterator[str],
        show: Callable[[Shown], None],
        until: int,
    ) -> None:
        """`until`: the event that it stops at first. `commands` are asked for one at a time."""
        self._run = run
        self._state = state
        self._commands = commands
        self._show = show
        self._until: int | None = until
        self._request: str | None = None
        """Stop at the next event of this request."""
        self._event: Event | None = None
        self._over = False
        """There are neither commands nor events any more."""
        self.live: Callable[[str | None], Iterator[str]] = lambda _name: iter(())
        """What the roles themselves say, where they are alive."""
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around the user's being asked."""

    def at(self, number: int, event: Event) -> None:
        """The state has been brought up to `event`. Raises Left. The last event of all is always
        asked at: who went too far is not to lose the commands that follow.
        """
        if self._over:
            return
        self._event = event
        wanted = self._request is not None and _about(event, self._request)
        reached = self._until is not None and number >= self._until
        if wanted or reached or number >= self._run.index.num_events:
            self._until = self._request = None
            with self.guard():
                self.ask(number)

    def ask(self, number: int) -> None:
        """Until a command says to go on."""
        assert self._event is not None
        self._show(headline(number, self._event, self._run.index.num_events))
        for line in self._commands:
            try:
                if self._obey(number, line):
                    return
            except BadInput as error:
                self._show(Text(clean(str(error)), "bold red"))
        if number < self._run.index.num_events:
            raise Left
        self._over = True

    def stop(self, number: int) -> None:
        """Ask at the next event, whatever was wanted."""
        self._until = number

    def _obey(self, number: int, line: str) -> bool:
        """Whether the walk goes on."""
        try:
            command, *rest = shlex.split(line) or ["n"]
        except ValueError as error:
            raise BadInput(f"found {line!r}: {error}; h tells what there is") from None
        text = " ".join(rest)
        if command in ("n", "s") or (command == "c" and not text):
            self._is_ahead(command, number)
        match command:
            case "n":
                if text and not text.isdecimal():
                    raise BadInput(f"n: found {text!r}; allowed: a number")
                self._until = number + max(1, int(text or 1))
            case "s":
                about = text or request_of(_name(self._event))
                if not about:
                    raise BadInput("s: this event is of no request; name one: s s0.0")
                self._run.row(about)
                self._request = about
            case "c":
                self._until = place(self._run, text) if text else None
                if self._until is not None and self._until <= number:
                    raise BadInput(f"c: event {self._until:,} is not ahead of {number:,}")
            case "p":
                self._print(text or None)
                return False
            case "e":
                assert self._event is not None
                self._show(Text(clean(to_line(self._event))))
                return False
            case "q":
                raise Left
            case "h" | "?" | "help":
                self._show(Text(HELP))
                return False
            case _:
                raise BadInput(f"found {command!r}; h tells what there is")
        return True

    def _is_ahead(self, command: str, number: int) -> None:
        if number >= self._run.index.num_events:
            raise BadInput(f"{command}: this is the last event; q leaves")

    def _print(self, name: str | None) -> None:
        shown = moment_show.moment(self._state) if name is None else None
        if name is not None:
            found = moment_show.about(self._state, name)
            if found is None:
                known = (*self._state.requests, *self._state.instances,
                         *(d.link for d in self._state.links.values()))  # fmt: skip
                near = nearest(name, dict.fromkeys(known))
                told = ", ".join(dict.fromkeys(known))
                hint = f"nearest: {', '.join(near)}" if near else f"there are {told}"
                raise BadInput(f"p: there is no {name!r} now; {hint}")
            shown = iter(found)
        for line in shown or ():
            self._show(line)
        for told in self.live(name):
            self._show(Text(clean(told)))


def headline(number: int, event: Event, total: int) -> Text:
    """An event in one line: its number, its time, whom it is about, what happened."""
    where, what = tell(event)
    about = _name(event)
    told = f"{about}: {what}" if about else what
    return Text.assemble(
        (f"event {number:,} of {total:,}", "bold"),
        f"  {event.t / SECOND:.9f} s  {type(event).__name__}  ",
        clean(f"{where}  {told}"),
    )


def _name(event: Event | None) -> str:
    return str(getattr(event, "request", "") or getattr(event, "owner", ""))


def _about(event: Event, request: str) -> bool:
    if isinstance(event, ev.StepBegan):
        return any(request_of(owner) == request for owner, _, _ in event.spans)
    return request_of(_name(event)) == request


def over_recording(
    run: Recorded, until: int, commands: Iterator[str], show: Callable[[Shown], None]
) -> None:
    """Walks the recorded events from `until` on. Raises Left."""
    state = moment_at(run, until - 1) if until > 1 else Rebuild()
    walk = Walk(run, state, commands, show, until)
    for number, event in run.walk(until):
        state(event)
        state.number = number
        walk.at(number, event)
    show(Text(f"that was the last event, {run.index.num_events:,}", "bold"))
