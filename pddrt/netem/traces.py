"""A link that is not always the same: rate, delay and loss by segments of time. Sans-IO.

A trace is a list of segments from time 0 on, each until the next; after the last one's end it
begins again (`repeats`), or the last segment holds for ever. A segment that says nothing of the
rate (None) leaves it as the link has it, and so for the delay and the loss.

Owns: the lookup. `trace_files` reads and writes the formats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pddrt.types import SECOND, Ns

MAX_SEGMENTS = 4_000_000


class Segment(NamedTuple):
    """From `start` on: `rate` in bytes/s (0: an outage), one-way `delay`, `loss` as a share."""

    start: Ns
    rate: int | None = None
    delay: Ns | None = None
    loss: float | None = None


class Span(NamedTuple):
    """Least, mean over time, and most."""

    least: float
    mean: float
    most: float


class Trace:
    """`segments` in order, the first from 0 on; `end` closes the last one."""

    def __init__(self, segments: Sequence[Segment], end: Ns, repeats: bool) -> None:
        """Raises ValueError where a segment has no length, or where the link never opens."""
        if not segments or segments[0].start:
            raise ValueError("a trace begins at 0")
        if len(segments) > MAX_SEGMENTS:
            raise ValueError(f"found {len(segments):,} segments; allowed: {MAX_SEGMENTS:,}")
        starts = [segment.start for segment in segments]
        if any(b <= a for a, b in zip(starts, [*starts[1:], end], strict=True)):
            raise ValueError("a segment of no length")
        self.segments = tuple(segments)
        self.end = end
        self.repeats = repeats
        self.delays = any(segment.delay is not None for segment in segments)
        self.losses = any(segment.loss for segment in segments)
        self._starts = starts
        if repeats and all(segment.rate == 0 for segment in segments):
            raise ValueError("the rate is 0 all the time")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and (self.segments, self.end, self.repeats) == (
            other.segments, other.end, other.repeats,
        )  # fmt: skip

    __hash__ = None  # type: ignore[assignment]

    def at(self, t: Ns) -> tuple[Segment, Ns | None]:
        """The segment that holds at `t` >= 0, and until when; None: for ever."""
        if self.repeats:
            round_, within = divmod(t, self.end)
        elif t >= self._starts[-1]:
            return self.segments[-1], None
        else:
            round_, within = 0, t
        i = bisect_right(self._starts, within) - 1
        until = self._starts[i + 1] if i + 1 < len(self._starts) else self.end
        return self.segments[i], round_ * self.end + until

    def opens_at(self, t: Ns) -> Ns | None:
        """The first time from `t` on at which the rate is not 0; None: never."""
        while True:
            segment, until = self.at(t)
            if segment.rate != 0:
                return t
            if until is None:
                return None
            t = until

    @property
    def peak(self) -> int | None:
        """The highest rate; None if some segment leaves it open."""
        rates = [segment.rate for segment in self.segments]
        return None if None in rates else max(rate for rate in rates if rate is not None)

    def carries(self, start: Ns, end: Ns) -> float:
        """Bytes that it lets through between two times; rates must be given throughout."""
        total, t = 0, start
        while t < end:
            segment, until = self.at(t)
            assert segment.rate is not None
            stop = end if until is None else min(until, end)
            total += segment.rate * (stop - t)
            t = stop
        return total / SECOND

    def span(self, name: str) -> Span | None:
        """Of rate (bytes/s), delay (ns) or loss, where it is given; None if it never is."""
        ends = [*self._starts[1:], self.end]
        known = [
            (value, end - segment.start)
            for segment, end in zip(self.segments, ends, strict=True)
            if (value := getattr(segment, name)) is not None
        ]
        if not known:
            return None
        mean = sum(value * length for value, length in known) / sum(length for _, length in known)
        values = [value for value, _ in known]
        return Span(min(values), mean, max(values))
