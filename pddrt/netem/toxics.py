"""Toxics: what a proxy may do to one direction of a connection, beside its link. Sans-IO.

The names, attributes and units are those of Toxiproxy's HTTP interface, so that its clients drive
them; each acts on one connection by itself, and on a share of connections (its toxicity):

    latency      {latency, jitter}  ms: everything arrives so much later, +- jitter (uniform)
    bandwidth    {rate}             KB/s (thousands of bytes) of this connection; 0: no limit
    slow_close   {delay}            ms by which the end of the stream comes later
    timeout      {timeout}          ms after which the connection ends; nothing passes meanwhile.
                                    0: nothing passes until the toxic is removed
    reset_peer   {timeout}          ms after which the connection is reset; nothing passes meanwhile
    slicer       {average_size, size_variation, delay}  bytes, bytes, us between two slices
    limit_data   {bytes}            the connection ends when so many bytes have passed

What differs from there: a stalled stream loses nothing (`timeout` 0 holds its data back, and the
sender with it), latency is a property of time and not of each chunk (jitter keeps its mean however
a program writes), and a change holds at once, also for what is under way.

A `Stage` is one toxic at work on one direction of one connection. Stages form a chain, the last of
which passes on to the link: `feed` and `end` come in from before, and go on to `next`, in order.
A stage that is taken out passes on all it holds first, so nothing is lost or overtaken.

Owns: data held back by toxics. Leaves out: sockets, and how much may be held (see `relay`): what a
stage holds back counts as `waiting` on its pipe, except for what latency delays.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from pddrt.env import Env, Timer
from pddrt.netem.link import Delay
from pddrt.types import MS, SECOND, US, Ns

Data = bytes | memoryview
End = Literal["fin", "close", "reset"]
"""How a direction ends: half-closed; or the whole connection, in order; or by a reset."""
Way = Literal["upstream", "downstream"]
ToxicType = Literal[
    "latency", "bandwidth", "slow_close", "timeout", "reset_peer", "slicer", "limit_data"
]

LARGEST = 2**53
"""Of any attribute: beyond it JSON numbers are not exact."""


class Next(Protocol):
    def feed(self, data: Data) -> None: ...

    def end(self, how: End) -> None: ...


class Pipe(Protocol):
    """What a stage may ask of the direction that it is part of."""

    env: Env

    def hold_back(self, nbytes: int) -> None:
        """So many bytes more (or fewer) wait here because of a toxic that limits the rate."""
        ...

    def kill(self, reset: bool) -> None:
        """Ends the whole connection now, on both sides."""
        ...


@dataclass(frozen=True, slots=True)
class Toxic:
    """As the interface shows it. `attributes` are complete and checked."""

    name: str
    type: ToxicType
    stream: Way
    toxicity: float
    attributes: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "attributes": dict(self.attributes),
            "name": self.name,
            "type": self.type,
            "stream": self.stream,
            "toxicity": self.toxicity,
        }


class Stage:
    """Passes everything on. Subclasses hold some of it back."""

    attributes: ClassVar[Mapping[str, int]] = {}
    """Their names and what they are when not given."""

    def __init__(self, pipe: Pipe, toxic: Toxic, seed: str) -> None:
        self.pipe = pipe
        self.toxic = toxic
        self.next: Next
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """The toxic starts to act, or has got other attributes."""

    def change(self, toxic: Toxic) -> None:
        self.toxic = toxic
        self.begin()

    def feed(self, data: Data) -> None:
        self.next.feed(data)

    def end(self, how: End) -> None:
        self.next.end(how)

    def release(self) -> None:
        """The toxic is gone: what is held goes on at once. Nothing more comes in."""

    def drop(self) -> None:
        """The connection is over."""

    def __getitem__(self, name: str) -> int:
        return self.toxic.attributes[name]


class _Line(Stage):
    """Holds items until their time, in order."""

    counted = True
    """What is held counts as waiting, so that the source is slowed down."""

    def __init__(self, pipe: Pipe, toxic: Toxic, seed: str) -> None:
        self._line: deque[tuple[Ns, Data | None, End]] = deque()
        self._last: Ns = 0
        self._timer: Timer | None = None
        super().__init__(pipe, toxic, seed)

    def put(self, due: Ns, data: Data | None, how: End = "fin") -> None:
        """`data`, or the end where it is None, goes on at `due`, and behind what was put before."""
        self._last = due = max(self._last, due)
        if not self._line and due <= self.pipe.env.now():
            self.next.end(how) if data is None else self.next.feed(data)
            return
        self._count(data, 1)
        self._line.append((due, data, how))
        if self._timer is None:
            self._timer = self.pipe.env.call_at(due, self._on_timer)

    def _count(self, data: Data | None, sign: int) -> None:
        if self.counted and data is not None:
            self.pipe.hold_back(sign * len(data))

    def _on_timer(self) -> None:
        self._timer = None
        self._pass(self.pipe.env.now())
        if self._line and self._timer is None:
            self._timer = self.pipe.env.call_at(self._line[0][0], self._on_timer)

    def _pass(self, limit: Ns | None) -> None:
        while self._line and (limit is None or self._line[0][0] <= limit):
            _, data, how = self._line.popleft()
            if data is None:
                self.next.end(how)
            else:
                self._count(data, -1)
                self.next.feed(data)

    def release(self) -> None:
        self._stop()
        self._pass(None)

    def drop(self) -> None:
        self._stop()
        for _, data, _ in self._line:
            self._count(data, -1)
        self._line.clear()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def latency(mean_ms: int, jitter_ms: int) -> tuple[float, float]:
    """Mean and deviation, in ms, of max(0, mean + uniform(-jitter, jitter)): a delay cannot be
    negative."""
    low, high = mean_ms - jitter_ms, mean_ms + jitter_ms
    if low >= 0 or not jitter_ms:
        return float(mean_ms), jitter_ms / math.sqrt(3)
    if high <= 0:
        return 0.0, 0.0
    width = 2 * jitter_ms
    first, second = high**2 / (2 * width), high**3 / (3 * width)
    return first, math.sqrt(max(0.0, second - first**2))


class Latency(_Line):
    attributes: ClassVar[Mapping[str, int]] = {"latency": 0, "jitter": 0}
    counted = False

    def begin(self) -> None:
        mean, deviation = latency(self["latency"], self["jitter"])
        jitter = round(deviation * MS) if mean else 0
        self._delay = Delay(round(mean * MS), jitter, self._seed)

    def feed(self, data: Data) -> None:
        self.put(self._due(), data)

    def end(self, how: End) -> None:
        self.put(self._due(), None, how)

    def _due(self) -> Ns:
        now = self.pipe.env.now()
        return now + self._delay.at(now)


class Bandwidth(_Line):
    """Absolute deadlines: a late loop sends all that is due and does not move the rate."""

    attributes: ClassVar[Mapping[str, int]] = {"rate": 0}

    def begin(self) -> None:
        self._bytes_per_s = self["rate"] * 1000
        if self._line:  # what waits is paced anew, from now on
            line, self._line = self._line, deque()
            self._stop()
            self._last = self.pipe.env.now()
            for _, data, how in line:
                self._count(data, -1)
                self.end(how) if data is None else self.feed(data)

    def feed(self, data: Data) -> None:
        rate = self._bytes_per_s
        if not rate:
            self.put(0, data)
            return
        step = min(max(rate * MS // SECOND, 1024), 64 << 10)
        start = max(self._last, self.pipe.env.now())
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            start += -(-len(piece) * SECOND // rate)
            self.put(start, piece)

    def end(self, how: End) -> None:
        self.put(0, None, how)


class SlowClose(_Line):
    attributes: ClassVar[Mapping[str, int]] = {"delay": 0}

    def feed(self, data: Data) -> None:
        self.put(0, data)

    def end(self, how: End) -> None:
        wait = self["delay"] * MS if how != "reset" else 0
        self.put(self.pipe.env.now() + wait, None, how)


class Slicer(_Line):
    attributes: ClassVar[Mapping[str, int]] = {"average_size": 0, "size_variation": 0, "delay": 0}

    def begin(self) -> None:
        self._rng = random.Random(self._seed)

    def feed(self, data: Data) -> None:
        due = max(self._last, self.pipe.env.now())
        at = 0
        while at < len(data):
            size = self._size()
            self.put(due, data[at : at + size])
            due += self["delay"] * US
            at += size
        self._last = due  # the next slice keeps its distance too

    def _size(self) -> int:
        average, variation = self["average_size"], self["size_variation"]
        if average <= 0:
            return 1 << 30
        return max(1, average + (self._rng.randint(-variation, variation) if variation else 0))

    def end(self, how: End) -> None:
        self.put(0, None, how)


class _Stall(Stage):
    """Nothing passes; after a while the connection is over."""

    attributes: ClassVar[Mapping[str, int]] = {"timeout": 0}
    reset = False
    immediate = False
    """Whether a timeout of 0 ends the connection at once, not never."""

    def __init__(self, pipe: Pipe, toxic: Toxic, seed: str) -> None:
        self._held: list[Data | End] = []
        self._timer: Timer | None = None
        self._since = pipe.env.now()
        super().__init__(pipe, toxic, seed)

    def begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self["timeout"] or self.immediate:
            due = self._since + self["timeout"] * MS
            self._timer = self.pipe.env.call_at(due, self.pipe.kill, self.reset)

    def feed(self, data: Data) -> None:
        self.pipe.hold_back(len(data))
        self._held.append(data)

    def end(self, how: End) -> None:
        self._held.append(how)

    def release(self) -> None:
        held = self._held
        self.drop(keep=True)
        for item in held:
            if isinstance(item, str):
                self.next.end(item)
            else:
                self.pipe.hold_back(-len(item))
                self.next.feed(item)

    def drop(self, keep: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if not keep:
            self.pipe.hold_back(-sum(len(d) for d in held if not isinstance(d, str)))


class Timeout(_Stall):
    pass


class ResetPeer(_Stall):
    reset = True
    immediate = True


class LimitData(Stage):
    attributes: ClassVar[Mapping[str, int]] = {"bytes": 0}

    def __init__(self, pipe: Pipe, toxic: Toxic, seed: str) -> None:
        self._passed = 0
        self._over = False
        super().__init__(pipe, toxic, seed)

    def feed(self, data: Data) -> None:
        if self._over:
            return
        left = max(0, self["bytes"] - self._passed)
        data = data[:left]
        self._passed += len(data)
        if len(data):
            self.next.feed(data)
        if self._passed >= self["bytes"]:
            self._over = True
            self.next.end("close")

    def end(self, how: End) -> None:
        if not self._over:
            self.next.end(how)


STAGES: Mapping[ToxicType, type[Stage]] = {
    "latency": Latency,
    "bandwidth": Bandwidth,
    "slow_close": SlowClose,
    "timeout": Timeout,
    "reset_peer": ResetPeer,
    "slicer": Slicer,
    "limit_data": LimitData,
}


def checked(
    type_: ToxicType, given: Mapping[str, Any], before: Mapping[str, int]
) -> dict[str, int]:
    """All attributes of a toxic of this type: those `given`, else those `before`. Unknown ones are
    ignored, as there. Raises ValueError for what is no whole number from 0."""
    found = {}
    for name, default in STAGES[type_].attributes.items():
        value = given.get(name, before.get(name, default))
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not 0 <= value <= LARGEST:
            raise ValueError(f"{name} must be a whole number from 0")
        found[name] = int(value)
    return found
