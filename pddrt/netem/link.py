"""The law of one direction of a link: flows share its rate, then every byte waits out the delay.
Sans-IO.

**Fluid, fair.** A flow is active while it has backlog. The n active flows each get rate(t) / n. The
*virtual service* V(t), in bytes, is what a flow that was always active would have got so far: dV/dt
= rate(t) / n. An item of b bytes at the head of a flow that began to be served at V is through when
V reaches its target V + b; the item behind it starts there. Targets do not move when the share
changes, so one heap of head-of-line targets is all the state there is, and a join, a leave or a new
rate costs O(log n), however much is queued.

**Exact.** V is an integer in units of 2^-32 nanobytes, time inside is in ticks of 2^-32 ns: with
one flow rate * time is exact, with n flows each change of the share loses less than one tick. A
backlogged flow chains its targets without looking at the clock, so nothing drifts, at 1 B/s or at
1e12 B/s. What comes out is rounded up to whole ns; a tolerance of 2^-16 ns keeps the lost ticks
from showing as a whole one.

**Then propagation.** due = max(previous due of the flow, finish + delay(finish)). The delay varies
in time (see `Delay`), never from item to item, and never lets an item overtake another of its flow.

The caller's clock may run behind: after `advance(t)` a call with an earlier time takes effect at
the last item that came through by t, and never at a time already spent. So a net may look ahead a
little and the rate still holds.

Owns: flows' queues, the share, the bytes carried. Leaves out: packets, loss, congestion control,
bounds on what is queued (the flow's owner keeps those, see `flow`), and who carries the bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pddrt.types import MS, SECOND, Ns

_BITS = 32
_BYTE = SECOND << _BITS
"""One byte in units of V: bytes/s times ticks gives exactly these."""
_SLACK = 1 << 16
"""Ticks (2^-16 ns) by which rounding may have delayed a finish."""


class Item(NamedTuple):
    nbytes: int
    account: str
    tag: Any


class Through(NamedTuple):
    """An item that has left the bottleneck at `finish` and reaches the far end at `due`."""

    tag: Any
    nbytes: int
    finish: Ns
    due: Ns


@dataclass(slots=True, eq=False)
class Flow:
    """One stream's queue at the bottleneck. `target` is the V at which the head item is through."""

    queue: deque[Item] = field(default_factory=deque)
    target: int = 0
    entry: int | None = None
    """Number of this flow's live entry in the link's heap; None while it has no backlog."""
    due: Ns = 0
    """When the last item that left the bottleneck reaches the far end."""


class Delay:
    """One-way delay as a function of time: mean `mean`, standard deviation `jitter`, correlated in
    time.

    A stationary Gaussian process z(t) - iid normal knots, joined along the circle, z = cos(a) x_k +
    sin(a) x_{k+1}, so that its variance is 1 between the knots too - bent to a log-normal delay
    with exactly this mean and deviation. A normal delay would have to be cut off at zero, which
    raises its mean and narrows it (50 +- 40 ms: 2 ms too long); a log-normal one is positive by
    itself, and for jitter << mean it is the normal one.

    Knots are 10 jitters apart: the delay then falls faster than time passes (which would be
    reordering, and is held back) only beyond six standard deviations while jitter << mean.
    """

    def __init__(self, mean: Ns, jitter: Ns, seed: str) -> None:
        """Raises ValueError for a negative figure, and for jitter on a delay of 0, which has no
        room for it."""
        if mean < 0 or jitter < 0 or (jitter > 0 and mean == 0):
            raise ValueError(f"impossible delay: {mean} ns with a jitter of {jitter} ns")
        self.mean = mean
        self.jitter = jitter
        self._seed = seed
        self._spacing = max(10 * jitter, MS)
        self._sigma = math.sqrt(math.log1p((jitter / mean) ** 2)) if jitter else 0.0
        self._knots: dict[int, float] = {}

    def at(self, t: Ns) -> Ns:
        """The delay of what leaves the bottleneck at `t`."""
        if not self.jitter:
            return self.mean
        k, offset = divmod(t, self._spacing)
        angle = math.pi / 2 * offset / self._spacing
        z = math.cos(angle) * self._knot(k) + math.sin(angle) * self._knot(k + 1)
        return round(self.mean * math.exp(self._sigma * (z - self._sigma / 2)))

    def _knot(self, k: int) -> float:
        value = self._knots.get(k)
        if value is None:
            if (
                len(self._knots) >= 4
            ):  # time moves on: at most the present pair and the next is of use
                self._knots.clear()
            value = self._knots[k] = random.Random(f"{self._seed}/{k}").gauss(0.0, 1.0)
        return value


class Link:
    """One direction. Every method's `now` is in ns; see the module for what an earlier `now` means.

    `rate` in bytes/s: None is unlimited (an item is through the moment it is pushed), 0 an outage
    (nothing moves, and nothing is lost). `seed` names the stream of random numbers behind the
    jitter.
    """

    def __init__(self, rate: int | None, delay: Ns, jitter: Ns = 0, seed: str = "") -> None:
        self._seed = seed
        self._check_rate(rate)
        self.rate = rate
        self.delay = Delay(delay, jitter, seed)
        self.carried: dict[str, int] = {}
        """Bytes that went through the bottleneck, by account; with them what a cancelled item had
        got."""
        self.dropped = 0
        """Bytes cancelled before they were served."""
        self.peak_flows = 0
        """Most flows with backlog at one time."""
        self._heap: list[tuple[int, int, Flow]] = []
        self._entries = itertools.count()
        self._active = 0
        self._tick = 0  # the time, in ticks, for which _v is V
        self._v = 0
        self._unserved = 0  # sum over flows of what is queued and not served, in units of V
        self._busy = 0  # ticks
        self._out: list[Through] = []

    # -- what happens to the link -----------------------------------------------------------------

    def push(
        self, now: Ns, flow: Flow, nbytes: int, account: str = "control", tag: Any = None
    ) -> None:
        """Queues an item of `nbytes` >= 0 on `flow`; `tag` comes back with it from `advance`."""
        assert nbytes >= 0
        self._to(now)
        flow.queue.append(Item(nbytes, account, tag))
        self._unserved += nbytes * _BYTE
        if flow.entry is None:
            flow.target = self._v
            self._active += 1
            self._enter(flow)
        if self.rate is None:
            self._settle(self._tick)

    def cancel(self, now: Ns, flow: Flow) -> int:
        """Drops what `flow` has queued; the others have its share at once. Returns the bytes
        dropped.

        Of an item that is being served, the whole bytes served so far count as carried, the rest as
        dropped. What came through before stays on its way.
        """
        self._to(now)
        if flow.entry is None:
            return 0
        left = min(max(0, flow.target - self._v), flow.queue[0].nbytes * _BYTE)
        head = flow.queue[0]
        head_dropped = _to_bytes(left)
        self._count(head.account, head.nbytes - head_dropped)
        behind = sum(item.nbytes for item in flow.queue) - head.nbytes
        self._unserved -= left + behind * _BYTE
        self.dropped += head_dropped + behind
        flow.queue.clear()
        self._leave(flow)
        if len(self._heap) > 2 * self._active + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)
        return head_dropped + behind

    def set_rate(self, now: Ns, rate: int | None) -> None:
        """The new rate holds from `now` on, also for what is half served. Raises ValueError below
        0."""
        self._check_rate(rate)
        self._to(now)
        self.rate = rate
        self._settle(self._tick)

    def set_delay(self, now: Ns, delay: Ns, jitter: Ns = 0) -> None:
        """The new delay holds for what leaves the bottleneck from `now` on. Raises ValueError as
        `Delay`."""
        fresh = Delay(delay, jitter, self._seed)
        self._to(now)
        self.delay = fresh

    def advance(self, now: Ns) -> list[Through]:
        """What has come through up to `now` and was not returned before, in the order of finish."""
        self._settle((now << _BITS) + _SLACK)
        out, self._out = self._out, []
        return out

    # -- what is known about it -------------------------------------------------------------------

    def next_event(self) -> Ns | None:
        """When `advance` will have something to return, if nothing else happens; None: never."""
        if self._out:
            return self._out[0].finish
        tick = self._next_tick()
        return None if tick is None else _to_ns(tick)

    def backlog(self, now: Ns) -> int:
        """Bytes queued and not yet served, all flows together, rounded up."""
        self._to(now)
        return max(0, _to_bytes(self._unserved))

    def busy(self, now: Ns) -> Ns:
        """Time so far in which at least one flow was being served."""
        self._to(now)
        return (self._busy + _SLACK) >> _BITS

    # -- the law ----------------------------------------------------------------------------------

    def _to(self, now: Ns) -> None:
        """Lets everything happen that happens until `now`."""
        self._settle((now << _BITS) + _SLACK)
        self._pass(now << _BITS)

    def _settle(self, limit: int) -> None:
        """Takes out, in order, every item that is through at tick `limit`; V stands at the last of
        them."""
        while (tick := self._next_tick()) is not None and tick <= limit:
            self._pass(tick)
            flow = self._heap[0][2]
            item = flow.queue.popleft()
            self._count(item.account, item.nbytes)
            finish = _to_ns(tick)
            flow.due = max(flow.due, finish + self.delay.at(finish))
            self._out.append(Through(item.tag, item.nbytes, finish, flow.due))
            heapq.heappop(self._heap)
            if flow.queue:
                self._enter(flow)
            else:
                self._leave(flow)

    def _next_tick(self) -> int | None:
        """The tick at which the next item is through, as things stand."""
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:  # cancelled since
            heapq.heappop(heap)
        if not heap or self.rate == 0:
            return None
        if self.rate is None:
            return self._tick
        return self._tick + max(0, -((self._v - heap[0][0]) * self._active // self.rate))

    def _pass(self, tick: int) -> None:
        """Moves the clock to `tick`, with no item coming through on the way. The past stays as it
        is."""
        passed = tick - self._tick
        if passed <= 0:
            return
        self._tick = tick
        if self._active:
            self.peak_flows = max(self.peak_flows, self._active)
            if self.rate:
                self._v += self.rate * passed // self._active
                self._unserved -= self.rate * passed
                self._busy += passed

    def _enter(self, flow: Flow) -> None:
        flow.target += flow.queue[0].nbytes * _BYTE
        flow.entry = next(self._entries)
        heapq.heappush(self._heap, (flow.target, flow.entry, flow))

    def _leave(self, flow: Flow) -> None:
        flow.entry = None
        self._active -= 1
        if not self._active:
            self._unserved = 0

    def _count(self, account: str, nbytes: int) -> None:
        if nbytes:
            self.carried[account] = self.carried.get(account, 0) + nbytes

    @staticmethod
    def _check_rate(rate: int | None) -> None:
        if rate is not None and rate < 0:
            raise ValueError(f"impossible rate: {rate} bytes/s")


def _to_ns(tick: int) -> Ns:
    """The first whole ns at which what happened at `tick` has happened."""
    return -((_SLACK - tick) >> _BITS)


def _to_bytes(work: int) -> int:
    """Work in units of V as whole bytes, rounded up; what lost ticks amount to at 1e12 B/s is
    forgiven."""
    return -(((_BYTE >> 8) - work) // _BYTE)
