"""What happened when: KV on its way, handoffs, links, instances, faults. From events; pure.

Listens to a trace beside `metrics.Recorder`, which has each request's stamps, and keeps what has a
length in time: for each request its transfers and the rounds of its handoff, for each instance and
link what it did in each part of the run. Series have a bounded number of parts, which double in
length as the run goes on, so that memory does not grow with its length.

**On the wire.** No event tells when a link carried which byte. A piece of KV counts as on the wire
from when it was handed to its stream, or from when the piece before it on that stream arrived, to
when it has arrived, at an even rate. That is right but for the delay of the link (`Wire` ends one
delay after the last byte has left) and for how unevenly a link is shared within one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pddrt import trace as ev
from pddrt.report.attempts import Attempt, Attempts
from pddrt.trace import Event
from pddrt.types import MS, Ns

PARTS = 240
"""At most so many parts of a series."""

Span = tuple[Ns, Ns]


class Sums:
    """What came together in each part of the run: amounts, spread evenly over their time."""

    def __init__(self) -> None:
        self.width: Ns = MS
        self.values: list[float] = [0.0] * PARTS

    def add(self, start: Ns, end: Ns, amount: float) -> None:
        while end >= self.width * PARTS:
            halves = self.values
            self.values = [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)]
            self.values += [0.0] * (PARTS - len(self.values))
            self.width *= 2
        first, last = start // self.width, end // self.width
        if first == last:
            self.values[first] += amount
            return
        for part in range(first, last + 1):
            inside = min(end, (part + 1) * self.width) - max(start, part * self.width)
            self.values[part] += amount * inside / (end - start)

    def rates(self, end: Ns) -> Iterator[tuple[Ns, Ns, float]]:
        """(start, end, amount per ns) of each part up to the end of the run."""
        for part, value in enumerate(self.values):
            start = part * self.width
            if start >= end:
                return
            until = min(start + self.width, end)
            yield start, until, value / (until - start)


class Levels:
    """The highest of a level in each part of the run; it holds until it changes."""

    def __init__(self) -> None:
        self.width: Ns = MS
        self._parts: dict[int, tuple[int, int]] = {}
        """(highest, last) in parts in which it changed."""

    def set(self, t: Ns, level: int) -> None:
        while t >= self.width * PARTS:
            halves: dict[int, tuple[int, int]] = {}
            for part, (highest, last) in self._parts.items():
                before, _ = halves.get(part // 2, (highest, last))
                halves[part // 2] = (max(before, highest), last)
            self._parts, self.width = halves, self.width * 2
        highest, _ = self._parts.get(t // self.width, (level, level))
        self._parts[t // self.width] = (max(highest, level), level)

    def levels(self, end: Ns) -> Iterator[tuple[Ns, Ns, int]]:
        held = 0
        for part in range(PARTS):
            start = part * self.width
            if start >= end:
                return
            highest, last = self._parts.get(part, (held, held))
            yield start, min(start + self.width, end), max(highest, held)
            held = last


@dataclass(slots=True)
class Wire:
    """The KV of one request on its way to one decoder. `pieces`: (start, end, bytes) of each."""

    request: str
    src: str
    dst: str
    began: Ns
    pieces: list[tuple[Ns, Ns, int]] = field(default_factory=list)
    whole: Ns | None = None
    cancelled: bool = False
    sent: deque[tuple[int, Ns]] = field(default_factory=deque)
    """(end of range, when) of what was handed to the stream and has not arrived."""

    @property
    def ended(self) -> Ns:
        """The last that is known of it."""
        return max([self.began, *(end for _, end, _ in self.pieces[-1:])])

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.pieces)

    def hand_over(self, e: ev.KVSent) -> None:
        if self.sent and e.start < self.sent[-1][0]:
            self.sent.clear()  # it starts over: what was on its way is lost
        self.sent.append((e.end, e.t))

    def receive(self, e: ev.KVReceived) -> tuple[Ns, Ns]:
        """The time that this piece was on the wire."""
        while self.sent and self.sent[0][0] <= e.start:
            self.sent.popleft()
        handed = self.sent[0][1] if self.sent else self.began
        start = min(max(handed, self.pieces[-1][1] if self.pieces else handed), e.t)
        self.pieces.append((start, e.t, e.bytes))
        return start, e.t


@dataclass(slots=True)
class Rounds:
    """One request's handoff: when the policy was first asked, and what went over.

    `sent`: (t, ids, whether it was the last); `taken`: (t, ids extended over, whether the main
    decoder went on by itself).
    """

    began: Ns
    sent: list[tuple[Ns, int, bool]] = field(default_factory=list)
    taken: list[tuple[Ns, int, bool]] = field(default_factory=list)
    why: str = ""


@dataclass(slots=True)
class Instance:
    """`busy`: time in steps, by what the step was mainly for; `down`: when it had crashed."""

    name: str
    role: str
    site: str
    pages: int
    busy: dict[str, Sums] = field(
        default_factory=lambda: {kind: Sums() for kind in ("prefill", "extend", "decode")}
    )
    kv: Levels = field(default_factory=Levels)
    down: list[tuple[Ns, Ns | None]] = field(default_factory=list)


@dataclass(slots=True)
class Direction:
    """One direction of a link. `caps`: (from when, bytes/s or None for no limit)."""

    link: str
    src: str
    dst: str
    caps: list[tuple[Ns, int | None]] = field(default_factory=list)
    kv: Sums = field(default_factory=Sums)
    flows: Sums = field(default_factory=Sums)
    wires: list[Wire] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.link if self.src == self.dst else f"{self.link} {self.src}>{self.dst}"

    def down(self, end: Ns) -> list[Span]:
        """When it carried nothing at all, to `end` at most."""
        ends = [since for since, _ in self.caps[1:]] + [end]
        spans = ((since, until) for (since, cap), until in zip(self.caps, ends, strict=True)
                 if cap == 0)  # fmt: skip
        return runs([(since, until) for since, until in spans if since < until], len(self.caps))


@dataclass(slots=True)
class Fault:
    began: Ns
    do: str
    what: str
    ended: Ns | None = None
    missed: bool = False


class Timeline:
    """Listens to a trace."""

    def __init__(self) -> None:
        self.end: Ns = 0
        self.instances: dict[str, Instance] = {}
        self.directions: dict[tuple[str, str], Direction] = {}
        self.wires: dict[tuple[str, str], Wire] = {}
        """By request and decoder."""
        self.handoffs: dict[str, Rounds] = {}
        self.preempted: dict[str, list[Ns]] = {}
        self.faults: dict[tuple[int, int], Fault] = {}
        self.reasons: dict[str, str] = {}
        """Why a request was routed as it was."""
        self.home: str | None = None
        """The gateway's site, which no event tells. None: where each request's P is."""
        self.outages = False
        """Whether any link was ever down."""
        self._attempts = Attempts()
        self._down: dict[tuple[tuple[str, str], int, Ns], list[Span]] = {}

    def __call__(self, event: Event) -> None:
        self.end = max(self.end, event.t)
        self._attempts(event)
        match event:
            case ev.Step():
                self._step(event)
            case ev.KVSent() | ev.KVReceived() | ev.KVWhole() | ev.TransferCancelled():
                self._wire(event)
            case ev.HandoffBegan() | ev.HandoffSent() | ev.HandoffTaken():
                self._handoff(event)
            case ev.InstanceStarted() | ev.InstanceCrashed() | ev.InstanceReturned():
                self._instance(event)
            case ev.LinkRate():
                self._rate(event)
            case ev.FaultInjected() | ev.FaultEnded() | ev.FaultMissed():
                self._fault(event)
            case ev.Preempted():
                self.preempted.setdefault(event.request, []).append(event.t)
            case ev.Routed():
                self.reasons[event.request] = event.reason

    def attempts(self, request: str) -> Sequence[Attempt]:
        """Those made at a request, in order; none where it was not routed."""
        return self._attempts.of.get(request, ())

    def site(self, instance: str | None) -> str | None:
        found = self.instances.get(instance or "")
        return None if found is None else found.site

    def wires_of(self, request: str, *decoders: str | None) -> list[Wire]:
        found = (self.wires.get((request, d)) for d in decoders if d)
        return [wire for wire in found if wire is not None]

    def direction(self, src: str, dst: str) -> Direction | None:
        """The link that KV from instance `src` to `dst` takes."""
        ends = [self.instances.get(name) for name in (src, dst)]
        if None in ends:
            return None
        a, b = (one.site for one in ends if one is not None)
        return self.directions.get((a, b))

    def down(self, way: tuple[str, str]) -> list[Span]:
        """When the link from one site to another carried nothing, as far as is known by now."""
        direction = self.directions.get(way)
        if direction is None:
            return []
        key = (way, len(direction.caps), self.end)
        if key not in self._down:
            self._down[key] = direction.down(self.end)
        return self._down[key]

    # -- by kind -----------------------------------------------------------------------------------

    def _step(self, e: ev.Step) -> None:
        instance = self.instances.get(e.instance)
        if instance is not None:
            kind = "prefill" if e.prefill_tokens else "extend" if e.extend_tokens else "decode"
            instance.busy[kind].add(min(e.start_ns, e.t), e.t, e.t - e.start_ns)
            instance.kv.set(e.t, e.pages_used)

    def _wire(self, e: ev.KVSent | ev.KVReceived | ev.KVWhole | ev.TransferCancelled) -> None:
        dst = e.dst if isinstance(e, ev.KVSent | ev.TransferCancelled) else e.instance
        wire = self.wires.get((e.request, dst))
        if isinstance(e, ev.KVSent):
            if wire is None:
                wire = self.wires[e.request, dst] = Wire(e.request, e.src, dst, e.t)
                if (direction := self.direction(e.src, dst)) is not None:
                    direction.wires.append(wire)
            wire.hand_over(e)
        elif wire is None:
            return
        elif isinstance(e, ev.KVReceived):
            start, end = wire.receive(e)
            if (direction := self.direction(wire.src, dst)) is not None:
                direction.kv.add(start, end, e.bytes)
                direction.flows.add(start, end, end - start)
        elif isinstance(e, ev.KVWhole):
            wire.whole = e.t
        else:
            wire.cancelled = True

    def _handoff(self, e: ev.HandoffBegan | ev.HandoffSent | ev.HandoffTaken) -> None:
        rounds = self.handoffs.setdefault(e.request, Rounds(e.t))
        if isinstance(e, ev.HandoffSent):
            rounds.sent.append((e.t, e.end - e.start, e.last))
            rounds.why = e.reason or rounds.why
        elif isinstance(e, ev.HandoffTaken):
            rounds.taken.append((e.t, e.extend_tokens, e.decodes))

    def _instance(self, e: ev.InstanceStarted | ev.InstanceCrashed | ev.InstanceReturned) -> None:
        instance = self.instances.get(e.instance)
        if isinstance(e, ev.InstanceStarted) and instance is None:
            self.instances[e.instance] = Instance(e.instance, e.role, e.site, e.pages)
        elif isinstance(e, ev.InstanceCrashed) and instance is not None:
            instance.down.append((e.t, None))
            if not e.kept:
                instance.kv.set(e.t, 0)
        elif instance is not None and instance.down and instance.down[-1][1] is None:
            instance.down[-1] = (instance.down[-1][0], e.t)

    def _rate(self, e: ev.LinkRate) -> None:
        self.outages |= e.rate == 0
        a, b = e.between
        for ends in dict.fromkeys([(a, b)] if e.one_way else [(a, b), (b, a)]):
            direction = self.directions.setdefault(ends, Direction(e.link, *ends))
            direction.caps.append((e.t, e.rate))

    def _fault(self, e: ev.FaultInjected | ev.FaultEnded | ev.FaultMissed) -> None:
        key = (e.fault, e.firing)
        if isinstance(e, ev.FaultMissed):
            self.faults[key] = Fault(e.t, e.do, e.why, missed=True)
        elif isinstance(e, ev.FaultInjected):
            self.faults[key] = Fault(e.t, e.do, e.what)
        else:
            fault = self.faults.setdefault(key, Fault(e.t, e.do, e.what))
            fault.what, fault.ended = e.what, e.t


def covered(spans: Iterable[Span]) -> Ns:
    """How long at least one of them lasts."""
    total, reached = 0, None
    for start, end in sorted(spans):
        since = start if reached is None else max(start, reached)
        total += max(0, end - since)
        reached = max(since, end)
    return total


def within(spans: Iterable[Span], start: Ns, end: Ns) -> list[Span]:
    """What of them lies in [start, end)."""
    cut = ((max(a, start), min(b, end)) for a, b in spans)
    return [(a, b) for a, b in cut if a < b]


def runs(spans: Sequence[Span], most: int = 12) -> list[Span]:
    """The stretches that `spans`, which are in order, cover. Beyond `most` the rest is one."""
    found: list[Span] = []
    for start, end in spans:
        if found and (start <= found[-1][1] or len(found) == most):
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
