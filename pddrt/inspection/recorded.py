"""A run folder as `inspect` reads it: the index, the small files, no more of the rest than needed.

What is asked of one request costs a few reads, however long the run was. What is asked of its
neighbours (who shared its link, how full its relay was) comes from a **window** of events: those
around its own, so many at most. Numbers of events are those of the lines of events.jsonl, from 1.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pddrt import recording
from pddrt import trace as ev
from pddrt.errors import BadInput
from pddrt.index import RunIndex
from pddrt.metrics import Recorder, RequestRecord
from pddrt.recording import Recording, typed
from pddrt.summary import request_json
from pddrt.trace import Event, dumps
from pddrt.types import SECOND, Ns

Json = dict[str, Any]

WINDOW = 40_000
"""Events of a window at most, but for those of the request itself."""
BEFORE = 15_000
"""Of them at most so many from before the request was sent."""
UNFINISHED = 2_000
"""Requests without a line in requests.jsonl of which one is made, at most."""
DULL = frozenset({"Accepted", "PageTable", "PagesEvicted"})
"""Kinds that no window needs."""


@dataclass(slots=True)
class Window:
    """Typed events [start, end) in order, by number, and what held before them: instances and rates
    of links. `whole`: that is all of the run.
    """

    start: int
    end: int
    whole: bool
    head: list[Event] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Event]:
        yield from self.head
        for _, event in self.events:
            yield event


@dataclass(slots=True)
class Recorded:
    index: RunIndex
    recording: Recording
    _made: dict[str, Json] | None = None

    @property
    def folder(self) -> Path:
        return self.index.folder

    @property
    def summary(self) -> Json:
        return self.recording.summary

    @property
    def missing(self) -> list[str]:
        """What the folder lacks, a sentence each."""
        return list(dict.fromkeys([*self.recording.missing, *self.index.missing]))

    @property
    def num_requests(self) -> int:
        return len(self.index) + len(self.index.unfinished)

    # -- requests ----------------------------------------------------------------------------------

    @property
    def unfinished(self) -> dict[str, Json]:
        """Lines of requests that only the events tell of, made from these: the first UNFINISHED."""
        if self._made is None:
            names = self.index.unfinished[:UNFINISHED]
            self._made = {name: self._make_row(name) for name in names}
        return self._made

    def _make_row(self, request: str) -> Json:
        recorder = self.recorder()
        for event in self.head():
            recorder(event)
        for _, event in self.events_of(request):
            recorder(event)
        slos = (self.recording.slo("ttft"), self.recording.slo("tpot"))
        record = recorder.requests.get(request)
        if record is None:
            record = RequestRecord(request, 0, 0, 0)
        row: Json = json.loads(dumps(request_json(record, *slos)))
        return row

    def row(self, request: str) -> Json:
        """Raises BadInput for an id that is not there, with those that look like it."""
        try:
            row = self.index.row(self.index.find(request))
        except KeyError:
            row = None
        if row is not None and row.keys() >= recording.ROW:
            return row
        if row is not None:
            self.recording.missing.append(f"requests.jsonl: the line of {request} lacks fields")
            return self._make_row(request)
        if request in self.index.unfinished:
            return self.unfinished.get(request) or self._make_row(request)
        ids = [*map(str, self.index.ids[:8]), *self.index.unfinished[:8]][:8]
        more = ", ..." if self.num_requests > len(ids) else ""
        raise BadInput(
            f"{self.folder}: no request {request!r}; there are {', '.join(ids) or 'none'}{more}"
        )

    def recorder(self) -> Recorder:
        """One that knows this run's instances."""
        roles = {e.instance: e.role for e in self.head() if isinstance(e, ev.InstanceStarted)}
        return Recorder(roles)

    # -- events ------------------------------------------------------------------------------------

    def event(self, number: int) -> Json | None:
        """A line as it stands, None where it is broken. Raises BadInput where there is none."""
        if not 1 <= number <= self.index.num_events:
            raise BadInput(f"found event {number:,}; allowed: 1 to {self.index.num_events:,}")
        return self._raw(number - 1)

    def events_of(self, request: str) -> list[tuple[int, Event]]:
        """Of all attempts at it; what is no event of this version is left out."""
        try:
            numbers = self.index.numbers_of(request).tolist()
        except KeyError:
            return []
        try:
            raws: list[Json | None] = list(self.index.events_of(request)) if numbers else []
        except BadInput:  # one of its lines is broken
            raws = [self._raw(number) for number in numbers]
        pairs = zip(numbers, raws, strict=True)
        return [(n + 1, e) for n, raw in pairs if raw and isinstance(e := typed(raw), Event)]

    def walk(
        self, start: int = 1, end: int | None = None, left_out: Collection[str] = ()
    ) -> Iterator[tuple[int, Event]]:
        """Typed events [start, end), with their numbers; those of kinds unknown here, and lines
        that are broken, are left out.
        """
        last = self.index.num_events if end is None else min(end - 1, self.index.num_events)
        at = start - 1
        while at < last:
            try:
                for raw in self.index.events(at, last):
                    at += 1
                    kind = raw.get("event")
                    if kind not in left_out and isinstance(event := typed(raw), Event):
                        yield at, event
            except BadInput:
                self._raw(at)
                at += 1

    def _raw(self, number: int) -> Json | None:
        """One line, from 0; None, and it is said, where it is broken."""
        try:
            return self.index.event_at(number)
        except BadInput:
            what = f"events.jsonl: line {number + 1:,} is no event of this format"
            if what not in self.recording.missing:
                self.recording.missing.append(what)
            return None

    def number_at(self, t: Ns) -> int:
        """The number of the last event at or before `t`; 0 where there is none."""
        low, high = 0, self.index.num_events
        while low < high:
            middle = (low + high) // 2
            if self._time(middle) <= t:
                low = middle + 1
            else:
                high = middle
        return low

    def _time(self, number: int) -> Ns:
        """Of a line, from 0, or of the one before it that tells."""
        for at in range(number, -1, -1):
            raw = self._raw(at)
            if raw is not None and isinstance(t := raw.get("t_s"), float | int):
                return round(t * SECOND)
        return 0

    def head(self) -> list[Event]:
        """What was there from the start: instances and rates of links."""
        found: list[Event] = []
        for _, event in self.walk(1, min(2_000, self.index.num_events) + 1, DULL):
            if isinstance(event, ev.RequestSent):
                break
            found.append(event)
        return found

    def window(self, request: str) -> Window:
        """Around one request. All of a short run."""
        total = self.index.num_events
        if total <= WINDOW:
            return Window(1, total + 1, True, [], list(self.walk(left_out=DULL)))
        numbers = self.index.numbers_of(request)
        first, last = int(numbers[0]) + 1, int(numbers[-1]) + 1
        start = max(1, first - BEFORE)
        end = min(total, last, start + WINDOW - 1) + 1
        window = Window(start, end, False, [*self.head(), *self.changes(start)])
        window.events = list(self.walk(start, end, DULL))
        if last >= end:
            window.events += [(n, e) for n, e in self.events_of(request) if n >= end]
        return window

    def changes(self, before: int) -> Iterator[Event]:
        """Rates of links that faults have changed before that event, and instances that joined."""
        if not self.recording.scenario.get("faults") and not self.recording.scenario.get("scale"):
            return
        path = self.folder / "events.jsonl"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            limit = self._time(before - 1)
            kinds = (b'{"event":"LinkRate"', b'{"event":"InstanceStarted"')
            for at in sorted(place for kind in kinds for place in _places(data, kind)):
                event = recording.decoded(data[at : data.find(b"\n", at) + 1])
                if isinstance(event, Event) and 0 < event.t <= limit:
                    yield event


def _places(data: mmap.mmap, what: bytes) -> Iterator[int]:
    at = data.find(what)
    while at >= 0:
        yield at
        at = data.find(what, at + 1)


def opened(folder: Path) -> Recorded:
    """Raises BadInput where the folder is no run."""
    rec = recording.opened(folder, rows=False)
    return Recorded(RunIndex.open(folder), rec)


def flat(row: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The scalar fields of a line, by dotted names, as the index has them."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value
    if not prefix:
        source = str(row.get("token_source") or "")
        yield from ((f"tokens.{letter}", source.count(letter)) for letter in "PRM")


def column(values: np.ndarray[Any, Any]) -> list[Any]:
    """As Python's own values, None for what is not there."""
    found: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        found = [None if v != v else int(v) if v.is_integer() and abs(v) < 2**53 else v
                 for v in found]  # fmt: skip
    return found
