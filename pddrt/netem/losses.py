"""Which segments a path loses: each by itself, or in rows. Sans-IO.

Losses act on TCP's segments and on nothing else: a stream loses no bytes, it is slowed down by what
it has to send again. Each process is drawn from a stream of random numbers of its own, and counts
segments, so that with one seed the same ones are lost, whatever the packets they travel in.

Sources: E. N. Gilbert, "Capacity of a burst-noise channel" (1960), E. O. Elliott (1963).
"""

from __future__ import annotations

import math
import random
from typing import Protocol


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


def losses_of(share: float, burst: float | None, seed: str) -> Loss | None:
    """None where nothing is lost. Raises ValueError as `BurstLoss`."""
    if not share:
        return None
    return IndependentLoss(share, seed) if burst is None else BurstLoss(share, burst, seed)


class VaryingLoss:
    """As `IndependentLoss`, with another probability at any time: a trace's."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._share = -1.0
        self._of: IndependentLoss | None = None

    def lost(self, segments: int, share: float) -> int:
        if share != self._share or self._of is None:  # the wait for the next loss has no memory
            self._share = share
            self._of = IndependentLoss(share, str(self._random.random()))
        return self._of.lost(segments)
