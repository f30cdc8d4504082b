"""What a TCP sender knows of its segments: sent, arrived, missing, lost. Sans-IO.

A path is FIFO, so packets are acknowledged in the order of sending: what was sent before the one
acknowledged, and is not acknowledged itself, is a *hole*. A hole is given up for lost once enough
was delivered after it (RACK, RFC 8985, without the time that a path which reorders would need);
lost segments are sent again as packets of their own, so that a loss of those is seen the same way.

After a time-out all that is out counts as lost. If an answer to one of those packets comes all the
same, the time-out was none, and what was given up with it is in flight as before.

Owns: numbers, ranges and counts. Leaves out: when to send, and what follows from a loss (`tcp`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from pddrt.netem.segments import Packet


class Scoreboard:
    """`pipe` is always the sum of what is in flight and of holes that are not given up."""

    __slots__ = (  # noqa: RUF023 - what others may see comes first
        "delivered", "high", "lost", "pipe", "una",
        "_covered", "_first_number", "_flight", "_given_up", "_holes", "_lost_before",
        "_lost_ranges",
    )  # fmt: skip

    def __init__(self) -> None:
        self.high = 0
        """Segments sent at least once, from the first on."""
        self.una = 0
        """Segments that the receiver holds without a gap."""
        self.pipe = 0
        """Segments in flight, as far as the sender knows."""
        self.delivered = 0
        self.lost = 0
        """Segments given up, however often."""
        self._flight: deque[Packet] = deque()
        self._holes: deque[tuple[int, int, int]] = deque()  # seq, n, delivered when it was found
        self._lost_ranges: deque[tuple[int, int]] = deque()  # seq, n
        self._covered: list[tuple[int, int]] = []  # arrived beyond `una`: [from, to), in order
        self._given_up: list[Packet] = []
        self._first_number = 0
        """Packets below it were given up by a time-out."""
        self._lost_before: list[tuple[int, int]] = []
        """Lost without the time-out's doing."""

    def _arrived(self, packet: Packet, kept: int) -> None:
        """The first `kept` segments of a packet in flight have arrived."""
        flight, holes = self._flight, self._holes
        while (head := flight.popleft()) is not packet:
            holes.append((head.seq, head.n, self.delivered))
        seq, n = packet.seq, packet.n
        self.pipe -= kept
        if seq == self.una and not self._covered:
            self.una = seq + kept
            self.delivered += kept
        else:
            self.delivered += self._cover(seq, seq + kept)
        if kept < n:
            holes.append((seq + kept, n - kept, self.delivered))

    def _cover(self, start: int, end: int) -> int:
        """Notes that [start, end) arrived; returns how many of it are new."""
        ranges = self._covered
        start = max(start, self.una)
        if start >= end:
            return 0
        i = bisect_left(ranges, (start, start))
        if i and ranges[i - 1][1] >= start:
            i -= 1
        new, j = end - start, i
        low, high = start, end
        while j < len(ranges) and ranges[j][0] <= end:
            a, b = ranges[j]
            new -= max(0, min(b, end) - max(a, start))
            low, high = min(low, a), max(high, b)
            j += 1
        ranges[i:j] = [(low, high)]
        if ranges[0][0] <= self.una:
            self.una = ranges.pop(0)[1]
        return new

    def _give_up_holes(self, delivered_since: int) -> int:
        """Gives up holes after which so many segments were delivered; returns how many are lost."""
        lost = 0
        holes = self._holes
        while holes and self.delivered - holes[0][2] >= delivered_since:
            seq, n, _ = holes.popleft()
            lost += self._give_up(seq, n)
        return lost

    def _give_up(self, seq: int, n: int) -> int:
        self.pipe -= n
        if seq + n <= self.una:  # a probe's twin came through
            return 0
        self._lost_ranges.append((seq, n))
        self.lost += n
        return n

    def _again(self, most: int) -> tuple[int, int] | None:
        """Number and count of up to `most` segments that have to be sent again."""
        while self._lost_ranges:
            seq, n = self._lost_ranges.popleft()
            if seq + n <= self.una:
                continue
            if n > most:
                self._lost_ranges.appendleft((seq + most, n - most))
                n = most
            return seq, n
        return None

    def _give_up_all(self, number: int, first: bool) -> None:
        """A time-out; `number` is that of the next packet. `first`: the one before is over."""
        self._give_up_holes(0)
        if first:
            self._given_up.clear()
            self._lost_before = list(self._lost_ranges)
        for packet in self._flight:
            self._give_up(packet.seq, packet.n)
        self._given_up += self._flight
        self._flight.clear()
        self._first_number = number
        self._lost_ranges = deque(sorted(set(self._lost_ranges)))

    def _take_back(self, packet: Packet) -> bool:
        """Undoes time-outs because `packet`, given up by one of them, has arrived; False if none
        did."""
        if not any(other is packet for other in self._given_up):
            return False
        back, self._given_up = self._given_up, []
        self._flight.extendleft(reversed(back))
        self._first_number = back[0].number
        self.pipe += sum(other.n for other in back)
        self._lost_ranges = deque(self._lost_before)
        return True
