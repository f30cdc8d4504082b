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

import math
import random
from typing import Protocol

from pddrt.types import SECOND, Ns

DEFAULT_QUEUE = 64 << 10


def default_queue(rate: int, round_trip: Ns) -> int:
    """Bytes: one bandwidth-delay product (`rate` in bytes/s), but 64 KiB at least."""
    return max(rate * round_trip // SECOND, DEFAULT_QUEUE)


class Loss(Protocol):
    def lost(self, segments: int) -> int:
        """How many of the next so many segments are lost."""


class IndependentLoss:
    """Each segment with probability `p` in [0, 1), whatever became of the others."""

    def __init__(self, p: float, seed: str) -> None:
        assert 0 <= p < 1
        self._random = random.Random(seed)
        self._scale = math.log1p(-p) if p else 0.0
        self._good = self._gap()

    def _gap(self) -> int:
        """Segments before the next loss: geometric, by inversion."""
        if not self._scale:
            return 1 << 62
        return int(math.log(1.0 - self._random.random()) / self._scale)

    def lost(self, segments: int) -> int:
        lost = 0
        while self._good < segments:
            segments -= self._good + 1
            lost += 1
            self._good = self._gap()
        self._good -= segments
        return lost


class BurstLoss:
    """Gilbert and Elliott's two states: in the good one nothing is lost, in the bad one everything.

    Both last a geometric number of segments: the bad one `burst` >= 1 in the mean, the good one so
    many that the share `p` in (0, 1) of all segments is lost. Begins in the good state.
    """

    def __init__(self, p: float, burst: float, seed: str) -> None:
        """ValueError where a state would have to be shorter than one segment, or without end."""
        good = burst * (1 - p) / p
        if not (1 <= burst < 1e9 and good >= 1):
            raise ValueError(f"impossible loss: {p:.3g} in bursts of {burst:.3g}")
        self._random = random.Random(seed)
        self._means = (good, burst)
        self._bad = False
        self._left = self._stay()

    def _stay(self) -> int:
        mean = self._means[self._bad]
        if mean == 1:
            return 1
        return 1 + int(math.log(1.0 - self._random.random()) / math.log1p(-1 / mean))

    def lost(self, segments: int) -> int:
        lost = 0
        while segments:
            part = min(segments, self._left)
            lost += part * self._bad
            segments -= part
            self._left -= part
            if not self._left:
                self._bad = not self._bad
                self._left = self._stay()
        return lost


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
