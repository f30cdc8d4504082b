"""What is served next, at the head of a link: fair shares or first in, first out. Sans-IO.

A discipline knows flows, items and *work*, not time: `need` is the work until an item is through,
`serve` does some, `take` says whose item is through. Work is a whole number in units of the link's
(see `link`), so nothing is lost between two calls.

**Fair** is fluid: every flow with backlog is served at once, in proportion to the weight of the
item at its head. V is what a flow of weight 1 would have got so far, had it always been active. An
item of work w and weight p that begins to be served at V is through at V + w / p, the item behind
it starts there. Targets do not move when shares change, so one heap of the heads is all the state
there is: a join, a leave or a new weight costs O(log n), however much is queued.

**First in, first out** serves one item at a time at the full rate, in the order in which they came.

A cancelled flow leaves its entries where they are; they are known by their number, or epoch.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pddrt.types import MS, Ns


class Item(NamedTuple):
    """`work`: what it takes to serve it. `since`: when it came."""

    nbytes: int
    account: str
    tag: Any
    work: int
    weight: int = 1
    rank: int = 0
    since: Ns = 0


@dataclass(slots=True, eq=False)
class Flow:
    """One stream's queue at the bottleneck. `target` is the V at which the head item is through."""

    queue: deque[Item] = field(default_factory=deque)
    target: int = 0
    entry: int | None = None
    """Number of this flow's live entry in a heap of heads; None while it has none."""
    due: Ns = 0
    """When the last item that left the bottleneck reaches the far end."""
    epoch: int = 0
    """How often it was cancelled."""
    transport: Any = None
    """What a TCP model keeps of it (see `tcp_link`)."""


class Fair:
    """`entries` numbers the entries of all heaps that a flow may stand in."""

    def __init__(self, entries: Iterator[int]) -> None:
        self._heap: list[tuple[int, int, Flow]] = []
        self._entries = entries
        self._v = 0
        self._weight = 0
        self._flows = 0

    def pushed(self, flow: Flow) -> None:
        """An item came to `flow`, which stands here if it was its first."""
        if flow.entry is None:
            self.begin(flow)

    def begin(self, flow: Flow) -> None:
        """`flow` comes from elsewhere, or from idling, with its head item."""
        flow.target = self._v
        self._flows += 1
        self.go_on(flow)

    def go_on(self, flow: Flow) -> None:
        """The next item of a flow that `take` gave begins where the last one ended."""
        head = flow.queue[0]
        flow.target += head.work if head.weight == 1 else -(-head.work // head.weight)
        self._weight += head.weight
        flow.entry = next(self._entries)
        heapq.heappush(self._heap, (flow.target, flow.entry, flow))

    def need(self) -> int | None:
        """Work of the whole link until the next item is through; None: there is none."""
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:  # cancelled since
            heapq.heappop(heap)
        if not heap:
            return None
        return (heap[0][0] - self._v) * self._weight

    def serve(self, work: int) -> None:
        self._v += work // self._weight

    def take(self) -> tuple[Flow, Item]:
        """The item that is through, which its flow has no more."""
        flow = heapq.heappop(self._heap)[2]
        item = flow.queue.popleft()
        self._weight -= item.weight
        return flow, item

    def head_after(self, flow: Flow) -> Flow | None:
        """Whose item comes to the head of its queue, now that `take` gave one of `flow`."""
        return flow if flow.queue else None

    def leave(self, flow: Flow) -> None:
        """A flow that `take` gave has no more items here."""
        flow.entry = None
        self._flows -= 1

    def cancel(self, flow: Flow) -> int:
        """The flow's items go; returns the work that its head item had left."""
        head = flow.queue[0]
        left = min(max(0, (flow.target - self._v) * head.weight), head.work)
        self._weight -= head.weight
        self.leave(flow)
        if len(self._heap) > 2 * self._flows + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)
        return left


class Fifo:
    """As `Fair`; a flow may have items in both of two lines, but those in the first came first."""

    def __init__(self, entries: Iterator[int]) -> None:
        self._line: deque[tuple[Flow, int]] = deque()
        self._left: int | None = None
        self._over = 0  # work done beyond the last item's end, for the next

    def pushed(self, flow: Flow) -> None:
        self._line.append((flow, flow.epoch))

    def begin(self, flow: Flow) -> None:
        """Every item stood in line when it came."""

    def go_on(self, flow: Flow) -> None:
        pass

    def head_after(self, flow: Flow) -> Flow | None:
        line = self._line
        while line and line[0][0].epoch != line[0][1]:  # cancelled since
            line.popleft()
        return line[0][0] if line else None

    def need(self) -> int | None:
        line = self._line
        if not line or line[0][0].epoch != line[0][1]:
            while line and line[0][0].epoch != line[0][1]:
                line.popleft()
            if not line:
                self._over = 0
                return None
        if self._left is None:
            self._left = line[0][0].queue[0].work - self._over
            self._over = 0
        return self._left

    def serve(self, work: int) -> None:
        assert self._left is not None
        self._left -= work

    def take(self) -> tuple[Flow, Item]:
        assert self._left is not None
        flow = self._line.popleft()[0]
        self._over = max(0, -self._left)
        self._left = None
        return flow, flow.queue.popleft()

    def leave(self, flow: Flow) -> None:
        pass

    def cancel(self, flow: Flow) -> int:
        left = flow.queue[0].work
        # only what has begun has a rest; the head of the other line may be of a flow whose own head
        # stands in this one
        if self._left is not None and self.head_after(flow) is flow:
            left = min(max(0, self._left), left)
            self._left = None
        return left


class CoDel:
    """Controlled delay (RFC 8289): drops at the head when everything has waited longer than
    `target` for an `interval`, and then ever sooner, until something has not.

    One state a queue; `drops` is asked of each item that comes to its head.
    """

    TARGET: Ns = 5 * MS
    INTERVAL: Ns = 100 * MS

    __slots__ = ("_above", "_before", "_count", "_dropping", "_next")

    def __init__(self) -> None:
        self._above: Ns | None = None
        self._next: Ns = 0
        self._count = self._before = 0
        self._dropping = False

    def drops(self, now: Ns, waited: Ns, backlog: int, largest: int) -> bool:
        """Whether what has `waited` is dropped at `now`. `backlog`: bytes behind it; no more than
        one packet of `largest` bytes is no queue."""
        if waited < self.TARGET or backlog <= largest:
            self._above = None
            self._dropping = False
            return False
        if self._above is None:
            self._above = now + self.INTERVAL
            return False
        if self._dropping:
            if now < self._next:
                return False
            self._count += 1
            self._next += self._gap()
            return True
        if now < self._above:
            return False
        self._dropping = True
        # a queue that was dropping a short time ago goes on about where it left off
        recent = self._count - self._before
        self._count = recent if recent > 1 and now - self._next < 16 * self.INTERVAL else 1
        self._before = self._count
        self._next = now + self._gap()
        return True

    def _gap(self) -> Ns:
        return int(self.INTERVAL / self._count**0.5)
