"""What a path carries, learnt from the streams that took it. Pure; the gateway feeds it.

A stream is **busy** while the path is what it waits for: there is KV that could be sent, or that
was handed over and has not left yet. While n(t) streams are busy each of them gets C / n(t) of the
path's C bytes/s, so that one which moved B bytes in the time it was busy says

    C = B / (integral of dt / n(t) over that time)

whatever came and went meanwhile, and however many instances sent it. The estimate is the sum of
bytes over the sum of integrals of the last `HISTORY` transfers: after so many of them an older rate
is forgotten. Before the first it is what the operator said.

Transfers that were over in less than `LEAST` say nothing: there a clock's granularity and the hand
of the sender weigh more than the path.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pddrt.types import MS, SECOND, Ns

HISTORY = 4
LEAST: Ns = 5 * MS
_FINE = 16
"""Bits that integrals have below one ns."""


@dataclass(slots=True)
class _Stream:
    """`rest`: bytes still to be sent when it was last asked; `moved` and `share`: so far, in all;
    `since`: the path's integral when it became busy, None while it is not.
    """

    rest: int = 0
    moved: int = 0
    share: int = 0
    since: int | None = None


class PathRate:
    """One path; `prior` in bytes/s, None: unlimited. Streams go by any key."""

    def __init__(self, prior: int | None) -> None:
        self.prior = prior
        self._known: deque[tuple[int, int]] = deque(maxlen=HISTORY)
        self._streams: dict[object, _Stream] = {}
        self._busy = 0
        self._integral = 0
        self._then: Ns = 0

    @property
    def rate(self) -> int | None:
        """Bytes/s that the path is thought to carry in all."""
        share = sum(s for _, s in self._known)
        if not share:
            return self.prior
        return (sum(b for b, _ in self._known) * SECOND << _FINE) // share

    def busy(self, now: Ns, key: object, rest: int) -> None:
        """The path is what this stream waits for, with `rest` bytes to go."""
        self._advance(now)
        stream = self._streams.setdefault(key, _Stream())
        stream.rest = rest
        if stream.since is None:
            stream.since = self._integral
            self._busy += 1

    def idle(self, now: Ns, key: object, moved: int) -> None:
        """It is not any more; `moved` bytes have left since it was."""
        self._advance(now)
        stream = self._streams.get(key)
        if stream is not None and stream.since is not None:
            stream.share += self._integral - stream.since
            stream.moved += moved
            stream.rest = max(0, stream.rest - moved)
            stream.since = None
            self._busy -= 1

    def over(self, now: Ns, key: object, *, whole: bool) -> None:
        """This transfer has ended; one that is not `whole` says nothing."""
        self.idle(now, key, 0)
        stream = self._streams.pop(key, None)
        if whole and stream is not None and stream.share >= LEAST << _FINE:
            self._known.append((stream.moved, stream.share))

    def rest(self, now: Ns, key: object) -> int | None:
        """Bytes that this stream has probably still to move; None before it was busy."""
        self._advance(now)
        stream = self._streams.get(key)
        if stream is None:
            return None
        share = 0 if stream.since is None else self._integral - stream.since
        return max(0, stream.rest - (self.rate or 0) * (share >> _FINE) // SECOND)

    def _advance(self, now: Ns) -> None:
        if self._busy:
            self._integral += ((now - self._then) << _FINE) // self._busy
        self._then = now
