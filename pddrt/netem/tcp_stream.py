"""What a live link knows of TCP's flows: what was pushed, what was given to which connection, what
is sent, what has arrived in order. Sans-IO bookkeeping for `tcp_link`.

Segments are counted twice: a stream numbers everything that was pushed on it, a connection what it
was given. With several connections a stream's parts go to whoever has room, and its order is made
again where they arrive (`Connection.arrive`, `Stream.arrived`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pddrt.netem.queues import CoDel, Flow
from pddrt.netem.segments import Held, Packet, Receiver
from pddrt.netem.tcp import Sender
from pddrt.types import Ns

NEVER: Ns = 1 << 62


class Prefix:
    """What has arrived of a sequence: everything below `next`, and ranges beyond it."""

    __slots__ = ("_beyond", "next")

    def __init__(self) -> None:
        self.next = 0
        self._beyond: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> bool:
        """[start, end) has arrived, some of it perhaps before; whether `next` has grown."""
        if end <= self.next:
            return False
        beyond = self._beyond
        if not beyond:
            if start <= self.next:
                self.next = end
                return True
            beyond.append((start, end))
            return False
        start = max(start, self.next)
        i = bisect_left(beyond, (start, start))
        if i and beyond[i - 1][1] >= start:
            i -= 1
        j = i
        while j < len(beyond) and beyond[j][0] <= end:
            start, end = min(start, beyond[j][0]), max(end, beyond[j][1])
            j += 1
        beyond[i:j] = [(start, end)]
        if start > self.next:
            return False
        self.next = end
        del beyond[0]
        return True


@dataclass(slots=True, eq=False)
class Flight:
    """A packet in the link's queue, or beyond. `kept` of its segments will arrive."""

    connection: Connection
    packet: Packet
    kept: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Handed:
    """Something that was pushed: segments [start, end) of its stream."""

    nbytes: int
    account: str
    tag: Any
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Connection:
    """`chunks`: (its own number behind the chunk, what to add for the stream's number), of those
    that are not all `passed` on to the stream. `short`: segments that are not full, and how many
    bytes they `lack`."""

    stream: Stream
    sender: Sender
    receiver: Receiver
    codel: CoDel | None
    path: Flow = field(default_factory=Flow)
    received: Prefix = field(default_factory=Prefix)
    passed: int = 0
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    mapped: int = 0
    short: list[int] = field(default_factory=list)
    lacks: list[int] = field(default_factory=list)
    sent: int = 0
    queued: int = 0
    armed: Ns = NEVER
    answered: Ns = 0
    held: Held | None = None

    def wire(self, seq: int, n: int, full: int) -> int:
        """Bytes of `n` segments from `seq` on, where a full one takes `full`."""
        nbytes = n * full
        if self.short:
            i, j = bisect_left(self.short, seq), bisect_left(self.short, seq + n)
            nbytes -= sum(self.lacks[i:j])
        return nbytes

    def forget(self, below: int) -> None:
        if len(self.short) > 1024:
            i = bisect_left(self.short, below)
            del self.short[:i], self.lacks[:i]

    def give(self, now: Ns, most: int) -> None:
        """Up to `most` segments of the stream's next thing become this connection's."""
        stream, sender = self.stream, self.sender
        first = stream.supply[0]
        part = min(first[0], most)
        first[0] -= part
        sender.offer(now, part)
        self.mapped += part
        self.chunks.append((self.mapped, stream.given + part - self.mapped))
        stream.given += part
        if not first[0]:
            if first[1]:
                self.short.append(self.mapped - 1)
                self.lacks.append(first[1])
            stream.supply.popleft()

    def withdraw(self) -> None:
        """What it has and did not send is no part of the stream any more."""
        stream, sender = self.stream, self.sender
        sender.withdraw()
        high, start = sender.high, 0
        kept: deque[tuple[int, int]] = deque()
        for end, offset in self.chunks:
            if end > high:
                stream.arrived.add(max(start, high) + offset, end + offset)
            if start < high:
                kept.append((min(end, high), offset))
            start = end
        self.chunks = kept
        self.mapped = high
        i = bisect_left(self.short, high)
        del self.short[i:], self.lacks[i:]

    def arrive(self, start: int, end: int) -> bool:
        """Its segments [start, end) are there; whether more of the stream is, without a gap."""
        if not self.received.add(start, end):
            return False
        upto, grown = self.received.next, False
        while self.chunks:
            end, offset = self.chunks[0]
            reached = min(end, upto)
            grown |= self.stream.arrived.add(self.passed + offset, reached + offset)
            self.passed = reached
            if reached < end:
                break
            self.chunks.popleft()
        return grown


@dataclass(slots=True, eq=False)
class Stream:
    """A flow of the link: what was pushed on it, and how far that is."""

    flow: Flow
    connections: list[Connection] = field(default_factory=list)
    mark: Handed | None = None
    supply: deque[list[int]] = field(default_factory=deque)  # segments, bytes the last one lacks
    segments: int = 0
    """In all; those below `given` were given to a connection, and `sent` of them sent."""
    given: int = 0
    sent: int = 0
    unsent: deque[Handed] = field(default_factory=deque)
    undue: deque[Handed] = field(default_factory=deque)
    arrived: Prefix = field(default_factory=Prefix)
    due: Ns = 0
