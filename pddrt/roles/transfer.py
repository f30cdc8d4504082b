"""KV of one request on its way from P to one decoder, and the lanes that transfers go through.

A transfer that could send KV takes a place in the **lane** of its path; it gives it back when what
it has handed over has left and there is nothing more to send just now (the next chunk is still
being computed), and at its end. So at most so many transfers of one P share a path, first come
first served, whoever waits holds the memory that it needs on both sides, and nobody keeps a place
that it cannot use. That many at once, and not one: a short transfer need not wait for a long one.

While it has a place a transfer is **busy**: the path is what it waits for. What P says of that is
what the gateway learns the path's rate from (`policy.estimate`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from pddrt.env import Timer
from pddrt.netem.net import Connection
from pddrt.types import Ns


@dataclass(slots=True, eq=False)
class Transfer:
    """`sent`: the position up to which KV was handed over; it had a place since `since`, when that
    was `begun`. `busy` and `moved`: time with a place, tokens handed over in it, so far.
    """

    dst: str
    epoch: int
    carries_first: bool
    sent: int = 0
    sent_first: bool = False
    admitted: bool = False
    over: bool = False
    whole: bool = False
    """The decoder has everything."""
    conn: Connection | None = None
    unanswered: Timer | None = None
    """Ends the wait for any answer to the offer."""
    since: Ns | None = None
    begun: int = 0
    busy: Ns = 0
    moved: int = 0
    drained: bool = False
    """All that was handed over has left."""
    draining: bool = False
    """Somebody waits for that."""
    told_sent: bool = False
    """The decoder knows that nothing more will come."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Something above has changed, or a step has ended."""

    def answered(self) -> None:
        """The decoder lives."""
        if self.unanswered is not None:
            self.unanswered.cancel()
            self.unanswered = None

    def begin(self, now: Ns) -> None:
        """It has a place."""
        self.since, self.begun, self.drained = now, self.sent, False

    def rest(self, now: Ns) -> int:
        """It has none any more. Tokens handed over since it had."""
        assert self.since is not None
        moved = self.sent - self.begun
        self.busy += now - self.since
        self.moved += moved
        self.since = None
        return moved

    def end(self) -> None:
        self.over = True
        self.answered()
        self.wake.set()

    async def drain(self, conn: Connection) -> None:
        """Returns when what was handed over has left, and `drained` says so unless more was.

        Raises ConnectionLost.
        """
        before = self.sent, self.sent_first
        self.draining = True
        try:
            await conn.drain()
            self.drained = (self.sent, self.sent_first) == before
        finally:
            self.draining = False
            self.wake.set()


class Lane:
    """The transfers of one P over one path: at most `most` with a place, the others in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: list[Transfer] = []
        self._waiting: deque[Transfer] = deque()

    def enter(self, transfer: Transfer) -> bool:
        """Whether it has a place; where it has not, it is woken when it does."""
        if transfer in self._inside:
            return True
        if len(self._inside) < self._most and not self._waiting:
            self._inside.append(transfer)
            return True
        if transfer not in self._waiting:
            self._waiting.append(transfer)
        return False

    def leave(self, transfer: Transfer) -> None:
        """It needs no place, whether it had one or not."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        elif transfer in self._inside:
            self._inside.remove(transfer)
            if self._waiting:
                following = self._waiting.popleft()
                self._inside.append(following)
                following.wake.set()
