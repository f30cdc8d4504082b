"""When KV would have crossed a link, among what crossed it in a run. Pure.

A `Road` is one direction of a link as a run's events show it: its rate over time, and the pieces of
KV that others had on it. `arrival` plays the link's law again with one flow more: while n flows
have something to send each gets 1 / n of the rate, so the new one slows the others down, and they
stay longer beside it. What the others hand over, and when, is taken to be what it was: a sender
that would have waited for room in its stream hands over later in fact than here.

No event tells when a link carried which byte. A piece counts as on its way from when it was handed
over, or from when the piece before it on that flow had left, until one delay before it arrived.

Left out: TCP (the fluid law only), frames of control, jitter, weights, and how many transfers a
sender lets go at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from pddrt.types import SECOND, Ns

FIRST_PIECES = 256
LEAST = 0.5
"""Bytes that are none any more."""

Chunks = Sequence[tuple[Ns, int]]
"""What one flow is to carry: (when it can be sent, bytes), in order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`ready`: when it was handed over; it had the link from `start` to `end`."""

    flow: str
    ready: Ns
    start: Ns
    end: Ns
    bytes: int


@dataclass(slots=True)
class _Flow:
    """(when it can be sent, bytes left) of each piece, in order."""

    pieces: deque[tuple[Ns, float]]


@dataclass(slots=True)
class Road:
    """`delay` one way. `caps`: (from when, bytes/s; None: no limit), the first from the start."""

    delay: Ns
    caps: list[tuple[Ns, int | None]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """In the order of their arrival."""
    _ends: list[Ns] = field(default_factory=list)
    """The latest end so far, of each piece and those before it."""

    def note(self, piece: Piece) -> None:
        """A piece has arrived; those that did before were noted before."""
        self.pieces.append(piece)
        self._ends.append(max(piece.end, self._ends[-1] if self._ends else 0))

    def rate_at(self, t: Ns) -> int | None:
        rate = None
        for since, cap in self.caps:
            if since > t:
                break
            rate = cap
        return rate

    def arrival(self, chunks: Chunks, begin: Ns, but: str = "") -> Ns | None:
        """When the last of `chunks` would have arrived, none sent before `begin`; None where the
        link is down for ever. `but`: a flow that is not there, since it is the one in question.
        """
        queue = [(max(ready, begin), size) for ready, size in chunks if size]
        if not queue:
            return max([begin, *(ready for ready, _ in chunks)]) + self.delay
        first = bisect_right(self._ends, queue[0][0])
        count = FIRST_PIECES
        while True:  # as many of the others' pieces as come into it, and not all of a long run's
            beside = self.pieces[first : first + count]
            left = self._cross(_Flow(deque(queue)), _others(beside, queue[0][0], but))
            if first + count >= len(self.pieces):
                break
            if left is not None and left < min(beside[-1].end, self.pieces[first + count].ready):
                break
            count *= 4
        return None if left is None else left + self.delay

    def _cross(self, mine: _Flow, others: list[_Flow]) -> Ns | None:
        """The link's law, from event to event, until `mine` has nothing left."""
        now = mine.pieces[0][0]
        while mine.pieces:
            others = [flow for flow in others if flow.pieces]
            flows = (mine, *others)
            busy = [flow for flow in flows if flow.pieces[0][0] <= now]
            rate = self.rate_at(now)
            until = [flow.pieces[0][0] for flow in flows if flow.pieces[0][0] > now]
            until += [since for since, _ in self.caps if since > now][:1]
            if busy and rate is None:
                for flow in busy:
                    flow.pieces.popleft()
            elif busy and rate:
                least = min(flow.pieces[0][1] for flow in busy)
                ends = now + ceil(least * len(busy) * SECOND / rate)
                then = min([ends, *until])
                moved = rate * (then - now) / SECOND / len(busy)
                for flow in busy:
                    ready, rest = flow.pieces.popleft()
                    if rest - moved > LEAST:
                        flow.pieces.appendleft((ready, rest - moved))
                now = then
            elif until:
                now = min(until)
            else:
                return None
        return now


def _others(pieces: Sequence[Piece], now: Ns, but: str) -> list[_Flow]:
    """What others had to send from `now` on."""
    flows: dict[str, _Flow] = {}
    for piece in pieces:
        if piece.flow == but or piece.end <= now:
            continue
        share = 1.0
        if piece.start < now:
            share = (piece.end - now) / (piece.end - piece.start)
        flow = flows.setdefault(piece.flow, _Flow(deque()))
        flow.pieces.append((piece.ready, piece.bytes * share))
    return list(flows.values())
