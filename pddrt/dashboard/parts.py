"""What the dashboard keeps of each request, wire, instance and link: as much as can be shown. Pure.

Rates are means over the last RECENT of the run's own time. A piece of KV counts as evenly on the
wire since the one before it on its stream, as in `timeline`: no event tells of single bytes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from pddrt import trace as ev
from pddrt.dashboard.facts import (
    DECODES,
    InstanceView,
    LinkView,
    Phase,
    RequestView,
    Span,
    WireView,
)
from pddrt.types import MS, SECOND, Ns

MAX_SPANS = 40
"""Of one request; beyond it the oldest are forgotten (it was preempted again and again)."""
MAX_PIECES = 4_096
"""The newest texts of a request that can be shown, a token or so each."""
PARTS, PART = 20, 100 * MS
RECENT: Ns = PARTS * PART
IDLE_AFTER: Ns = 250 * MS
"""Without a step an instance counts as idle: between two steps there may be some time."""


class Recent:
    """An amount per time over the last RECENT, in parts that are forgotten one by one."""

    __slots__ = ("_amounts", "_last")

    def __init__(self) -> None:
        self._amounts = [0.0] * PARTS
        self._last = 0

    def add(self, start: Ns, end: Ns, amount: float) -> None:
        """`amount` came evenly between `start` and `end`; what is too old by now is left out."""
        last = end // PART
        self._forget(last)
        first = max(start // PART, self._last - PARTS + 1)
        if last <= first:
            if first > self._last - PARTS:
                self._amounts[first % PARTS] += amount
            return
        length = end - start
        for part in range(first, last + 1):
            inside = min(end, (part + 1) * PART) - max(start, part * PART)
            self._amounts[part % PARTS] += amount * inside / length

    def rate(self, now: Ns, began: Ns = 0) -> float:
        """Per second. `began`: when the run, or whatever it is of, began, if that is not long."""
        self._forget(now // PART)
        since = max(began, (self._last - PARTS + 1) * PART)
        return sum(self._amounts) * SECOND / max(now - since, PART)

    def _forget(self, part: int) -> None:
        for gone in range(self._last + 1, min(part, self._last + PARTS) + 1):
            self._amounts[gone % PARTS] = 0.0
        self._last = max(self._last, part)


class Spread:
    """Percentiles of any number of times in bounded memory: of up to EXACT of them exact, of more
    to within 0.4 %, from counts of those that agree in their eight leading bits.
    """

    EXACT = 500
    __slots__ = ("_counts", "_values", "count")

    def __init__(self) -> None:
        self._values: list[Ns] = []
        self._counts: dict[int, int] = {}
        self.count = 0

    def add(self, value: Ns, times: int = 1) -> None:
        self.count += times
        if self.count <= self.EXACT:
            for _ in range(times):
                insort(self._values, value)
            return
        for kept in self._values:
            self._tally(kept, 1)
        self._values.clear()
        self._tally(value, times)

    def at(self, percent: int) -> Ns | None:
        """Nearest rank, as in the summary."""
        rank = -(-self.count * percent // 100)
        if self._values:
            return self._values[max(0, rank - 1)]
        for key in sorted(self._counts):
            rank -= self._counts[key]
            if rank <= 0:
                shift = key >> 8
                return ((key & 0xFF) << shift) + ((1 << shift) >> 1)
        return None

    def _tally(self, value: Ns, times: int) -> None:
        shift = max(0, value.bit_length() - 8)
        key = shift << 8 | value >> shift
        self._counts[key] = self._counts.get(key, 0) + times


@dataclass(slots=True)
class Direction:
    link: str
    src: str
    dst: str
    cap: int | None
    recent: Recent = field(default_factory=Recent)
    flows: int = 0
    in_flight: int = 0
    carried: int = 0

    def view(self, now: Ns) -> LinkView:
        return LinkView(
            self.link, self.src, self.dst, self.cap, self.recent.rate(now), self.flows,
            self.in_flight, self.carried,
        )  # fmt: skip


@dataclass(slots=True)
class Wire:
    """KV of one request on its way to one decoder: positions from `start` up to `end`, those before
    `sent` handed to the stream, those before `reached` arrived.
    """

    dst: str
    to_main: bool
    began: Ns
    direction: Direction | None
    start: int
    end: int
    sent: int = 0
    reached: int = 0
    bytes: int = 0
    in_flight: int = 0
    ended: Ns | None = None
    cancelled: bool = False
    pieces: deque[tuple[Ns, int]] = field(default_factory=lambda: deque(maxlen=16))

    def hand_over(self, e: ev.KVSent) -> None:
        if e.start < self.sent:
            self._settle(self.in_flight)  # it starts over: what was on its way is lost
        self.sent = e.end
        if self.direction is not None:
            self.direction.flows += not self.in_flight
            self.direction.in_flight += e.bytes
        self.in_flight += e.bytes

    def receive(self, e: ev.KVReceived) -> None:
        since = max(self.began, self.pieces[-1][0] if self.pieces else self.began)
        self.pieces.append((e.t, e.bytes))
        self.reached = max(self.reached, e.end)
        self.bytes += e.bytes
        self._settle(e.bytes)
        if self.direction is not None:
            self.direction.recent.add(since, e.t, e.bytes)
            self.direction.carried += e.bytes

    def stop(self, t: Ns, cancelled: bool) -> None:
        if self.ended is None:
            self.ended, self.cancelled = t, cancelled
        self._settle(self.in_flight)

    def _settle(self, size: int) -> None:
        """So many bytes are on their way no more."""
        size = min(size, self.in_flight)
        self.in_flight -= size
        if self.direction is not None and size:
            self.direction.in_flight -= size
            self.direction.flows -= not self.in_flight

    def view(self) -> WireView:
        whole = self.ended is not None and not self.cancelled
        lacked = self.end - self.start
        share = (self.reached - self.start) / lacked if lacked > 0 and self.reached else 0.0
        return WireView(
            self.dst, self.to_main, self.began, self.ended, 1.0 if whole else min(1.0, share),
            self._rate(), self.bytes, self.in_flight, self.cancelled,
        )  # fmt: skip

    def _rate(self) -> float | None:
        """Over its latest pieces."""
        if len(self.pieces) < 2 or self.pieces[-1][0] <= self.pieces[0][0]:
            return None
        size = sum(size for _, size in self.pieces) - self.pieces[0][1]
        return size * SECOND / (self.pieces[-1][0] - self.pieces[0][0])


@dataclass(slots=True)
class Request:
    """`attempt`: the name of the latest. `main`: its main decoder now. `received`: how many pieces
    of text there have been. `view_kept`: what it looks like, once it has ended.
    """

    id: str
    sent: Ns
    prompt: str
    attempt: str
    spans: list[Span]
    routed: ev.Routed | None = None
    main: str | None = None
    max_tokens: int = 0
    attempts: int = 1
    ended: Ns | None = None
    reason: str = ""
    wires: dict[str, Wire] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    marks: deque[Ns] = field(default_factory=lambda: deque(maxlen=8))
    rounds: deque[Ns] = field(default_factory=lambda: deque(maxlen=64))
    sends: int = 0
    handed: int = 0
    made: dict[str, int] = field(default_factory=dict)
    first: Ns | None = None
    last: Ns = 0
    pieces: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MAX_PIECES))
    received: int = 0
    view_kept: RequestView | None = None

    @property
    def ttft(self) -> Ns | None:
        return self.first - self.sent if self.first is not None else None

    @property
    def tpot(self) -> Ns | None:
        gaps = sum(self.made.values()) - 1
        return (self.last - self.first) // gaps if self.first is not None and gaps > 0 else None

    def enter(self, phase: Phase, t: Ns) -> None:
        was, since, end = self.spans[-1]
        if phase == was or end is not None:
            return
        self.spans[-1] = (was, since, t)
        self.spans.append((phase, t, None))
        if len(self.spans) > MAX_SPANS:
            del self.spans[0]

    def decode(self, source: str, t: Ns) -> None:
        """The client got tokens of `source`: what is it doing now?"""
        phase = self.spans[-1][0]
        r = self.routed
        decoder = (r.relay or self.main) if r is not None else None
        if source == "P" and self.first is None and decoder is not None:
            # The first token: the next one is the decoder's, unless it lacks the KV (`early`).
            if decoder in self.whole:
                self.enter("main" if decoder == self.main else "relay", t)
        elif not (source == "R" and phase in ("handoff", "main")):
            self.enter(DECODES[source], t)

    def view(self) -> RequestView:
        if self.view_kept is not None:
            return self.view_kept
        r = self.routed
        seen = RequestView(
            id=self.id,
            prompt=self.prompt,
            pipeline=r.pipeline if r else "",
            path=(r.prefill, r.relay, self.main) if r else (None, None, None),
            sent=self.sent,
            ended=self.ended,
            reason=self.reason,
            spans=tuple(self.spans),
            wires=tuple(wire.view() for wire in self.wires.values()),
            marks=tuple(self.marks),
            rounds=tuple(self.rounds),
            sends=self.sends,
            handed=self.handed,
            prompt_tokens=r.prompt_tokens if r else 0,
            hits=tuple(self.hits.items()),
            max_tokens=self.max_tokens,
            made=tuple(self.made.items()),
            ttft=self.ttft,
            tpot=self.tpot,
            attempts=self.attempts,
            why=r.reason if r else "",
        )
        if self.ended is not None:
            self.view_kept = seen
        return seen


@dataclass(slots=True)
class Instance:
    name: str
    role: str
    site: str
    pages: int
    down: bool = False
    waiting: set[str] = field(default_factory=set)
    holding: set[str] = field(default_factory=set)
    batch: int = 0
    stepping: bool = False
    stepped: Ns = 0
    used: int = 0
    prompt: int = 0
    hit: int = 0
    busy: Recent = field(default_factory=Recent)

    def leave(self, attempt: str) -> None:
        self.waiting.discard(attempt)
        self.holding.discard(attempt)
        if not self.holding:
            self.used = 0

    def view(self, now: Ns) -> InstanceView:
        idle = not self.stepping and now > self.stepped + IDLE_AFTER
        return InstanceView(
            self.name, self.role, self.site, self.down, len(self.waiting), len(self.holding),
            0 if idle else self.batch, min(1.0, self.busy.rate(now)),
            min(1.0, self.used / self.pages) if self.pages and self.holding else 0.0,
            self.hit / self.prompt if self.prompt else None,
        )  # fmt: skip
