"""The path of TCP's segments in one direction: random loss, a drop-tail queue, a rate. Sans-IO.

The queue is first in, first out, so a packet's fate is known when it is sent: how many of its
segments are lost, and when the last of the others is through. That is one call and no event.

A packet of several segments stands for segments that come one after the other, as fast as the link
takes them; it finds the queue full only for those that go beyond. So the queue loses as much, and
about where it would, whatever the size of the packets. Random loss counts segments, too: with one
seed the same ones are lost.

Time inside is exact: it is counted in ns times bytes/s, of which one byte is 10^9.
"""

from __future__ import annotations

from pddrt.netem.losses import Loss
from pddrt.types import SECOND, Ns


class Bottleneck:
    """`rate` > 0 in bytes/s, `queue` in bytes. `sent`, `lost` and `dropped` count segments."""

    __slots__ = ("_busy_until", "_loss", "_queue", "dropped", "lost", "rate")

    def __init__(self, rate: int, queue: int, loss: Loss | None = None) -> None:
        assert rate > 0
        self.rate = rate
        self.lost = 0
        """Segments the path lost, and those that found the queue full."""
        self.dropped = 0
        self._queue = queue * SECOND
        self._loss = loss
        self._busy_until = 0  # in ns * rate

    def backlog(self, now: Ns) -> int:
        """Bytes in the queue, that in service among them."""
        return max(0, self._busy_until - now * self.rate) // SECOND

    def send(self, now: Ns, segments: int, nbytes: int) -> tuple[int, Ns]:
        """Of `segments` with `nbytes` in all: how many get through, and when the last of them has
        left. The first ones do."""
        kept = segments
        if self._loss is not None:
            kept -= self._loss.lost(segments)
            self.lost += segments - kept
        if not kept:
            return 0, now
        size = nbytes * SECOND // segments
        at = now * self.rate
        start = self._busy_until
        if start > at:
            over = start - at + size - self._queue
            if over > 0:
                dropped = -(-over // size)
                if dropped >= kept:
                    self.dropped += kept
                    return 0, now
                self.dropped += dropped
                kept -= dropped
        else:
            start = at
        self._busy_until = end = start + kept * size
        return kept, -(-end // self.rate)
