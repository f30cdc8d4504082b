"""The law of one direction of a link: flows share its rate, then every byte waits out the delay.
Sans-IO.

**Shared.** Flows with backlog share rate(t) by a discipline of `queues`: evenly (fluid, weighted),
or first in, first out. Items of rank 0 come before any of rank 1 where there are `ranks`. A join, a
leave or a new rate costs O(log n), however much is queued.

**Exact.** Work is an integer in units of 2^-32 nanobytes, time inside is in ticks of 2^-32 ns: with
one flow rate * time is exact, with n flows each change of the share loses less than one tick. A
backlogged flow chains its items without looking at the clock, so nothing drifts, at 1 B/s or at
1e12 B/s. What comes out is rounded up to whole ns; a tolerance of 2^-16 ns keeps the lost ticks
from showing as a whole one.

**In time.** A `traces.Trace` gives rate and delay by segments of time; `set_rate` and `set_delay`
change them at any moment, also for what is half served. Where both speak, the lower rate and the
longer delay hold.

**Then propagation.** due = max(previous due of the flow, finish + delay(finish)). The delay varies
in time (see `jitter`), never from item to item, and never lets an item overtake another of its
flow.

The caller's clock may run behind: after `advance(t)` a call with an earlier time takes effect at
the last item that came through by t, and never at a time already spent. So a net may look ahead a
little and the rate still holds.

Owns: flows' queues, the share, the bytes carried. Leaves out: packets, loss, congestion control
(`tcp_link` puts those on top), bounds on what is queued (the flow's owner keeps those, see `flow`),
and who carries the bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from pddrt.netem.jitter import LOG_NORMAL, Delay, Shape
from pddrt.netem.queues import Fair, Fifo, Flow, Item
from pddrt.netem.segments import MSS
from pddrt.netem.traces import Trace
from pddrt.types import SECOND, Ns

__all__ = ["Delay", "Flow", "Item", "Link", "Through"]

_BITS = 32
_BYTE = SECOND << _BITS
"""One byte in units of work: bytes/s times ticks gives exactly these."""
_SLACK = 1 << 16
"""Ticks (2^-16 ns) by which rounding may have delayed a finish."""

Qdisc = Literal["fair", "fifo"]
AtHead = Callable[[Ns, Flow, Item], Item]


class Through(NamedTuple):
    """An item that has left the bottleneck at `finish` and reaches the far end at `due`."""

    tag: Any
    nbytes: int
    finish: Ns
    due: Ns


class Link:
    """One direction. Every method's `now` is in ns; see the module for what an earlier `now` means.

    `rate` in bytes/s: None is unlimited (an item is through the moment it is pushed), 0 an outage
    (nothing moves, and nothing is lost). `seed` names the stream of random numbers behind the
    jitter. `overhead`: bytes that each 1,448 of an item, or part of that, take beside it.
    `ranks`: by account, which of two lines its items stand in; what is not named has rank 0.
    `weights`: by account, its items' share against that of others, of 1.
    """

    def __init__(
        self,
        rate: int | None,
        delay: Ns,
        jitter: Ns = 0,
        seed: str = "",
        *,
        shape: Shape = LOG_NORMAL,
        correlation: Ns | None = None,
        qdisc: Qdisc = "fair",
        overhead: int = 0,
        ranks: Mapping[str, int] | None = None,
        weights: Mapping[str, int] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._seed = seed
        self._check_rate(rate)
        self.cap = rate
        """The rate that was set; a trace may be below it."""
        self.rate = rate
        """The rate that holds where the clock stands."""
        self.delay = Delay(delay, jitter, seed, shape, correlation)
        self.trace = trace
        self.carried: dict[str, int] = {}
        """Bytes that went through the bottleneck, by account; with them what a cancelled item had
        got."""
        self.dropped = 0
        """Bytes cancelled before they were served."""
        self.peak_flows = 0
        """Most flows with backlog at one time."""
        self.at_head: AtHead | None = None
        """Asked of each item that comes to the head of its queue from behind another: gives the
        item itself, or a smaller one in its place, which may be of no work at all."""
        kinds: dict[str, type[Fair] | type[Fifo]] = {"fair": Fair, "fifo": Fifo}
        kind, entries = kinds[qdisc], itertools.count()
        self.is_fifo = qdisc == "fifo"
        self._ranks = dict(ranks or {})
        assert all(0 <= rank <= 1 for rank in self._ranks.values())
        self._weights = dict(weights or {})
        assert all(weight >= 1 for weight in self._weights.values())
        lanes = 1 + max(self._ranks.values(), default=0)
        self._lanes = [kind(entries) for _ in range(lanes)]
        self._overhead = overhead
        self._active = 0
        self._tick = 0  # the time, in ticks, up to which work is done
        self._known = False  # whether _when is what _next_tick would find
        self._when: int | None = None
        self._turn: int | None = None  # the tick at which the trace has another segment
        self._unserved = 0  # sum over flows of what is queued and not served
        self._busy = 0  # ticks
        self._out: list[Through] = []
        self._gone: list[Through] = []
        self._delays = (0, 0, 0)  # items, and the sums of their delays and of the squares
        if trace is not None:
            self._follow(0)

    # -- what happens to the link -----------------------------------------------------------------

    def push(
        self, now: Ns, flow: Flow, nbytes: int, account: str = "control", tag: Any = None
    ) -> None:
        """Queues an item of `nbytes` >= 0 on `flow`; `tag` comes back with it from `advance`."""
        assert nbytes >= 0
        self._to(now)
        wire = nbytes
        if self._overhead:
            wire += -(-nbytes // MSS) * self._overhead
        rank = self._ranks.get(account, 0)
        queue = flow.queue
        if queue and self.is_fifo:  # it must not stand before what its flow has already in line
            rank = max(rank, queue[-1].rank)
        item = Item(nbytes, account, tag, wire * _BYTE, self._weights.get(account, 1), rank, now)
        self._unserved += item.work
        if not queue:
            self._active += 1
            self._known = False
        queue.append(item)
        self._lanes[rank if self.is_fifo else queue[0].rank].pushed(flow)
        if self.rate is None:
            self._settle(self._tick)

    def cancel(self, now: Ns, flow: Flow) -> int:
        """Drops what `flow` has queued; the others have its share at once. Returns the bytes
        dropped.

        Of an item that is being served, the whole bytes served so far count as carried, the rest as
        dropped. What came through before stays on its way.
        """
        self._to(now)
        if not flow.queue:
            return 0
        head = flow.queue[0]
        left = self._lanes[head.rank].cancel(flow)
        head_dropped = _to_bytes(left)
        if self._overhead and head.work:
            head_dropped = -(-head.nbytes * left // head.work)
        self._count(head.account, head.nbytes - head_dropped)
        behind = sum(item.nbytes for item in flow.queue) - head.nbytes
        self._unserved -= left + sum(item.work for item in flow.queue) - head.work
        self.dropped += head_dropped + behind
        flow.queue.clear()
        flow.epoch += 1
        self._known = False
        self._idle()
        return head_dropped + behind

    def set_rate(self, now: Ns, rate: int | None) -> None:
        """The new rate holds from `now` on, also for what is half served. Raises ValueError below
        0."""
        self._check_rate(rate)
        self._to(now)
        self.cap = rate
        self._known = False
        if self.trace is None:
            self.rate = rate
        else:
            self._follow(max(self._tick, now << _BITS))
        self._settle(self._tick)

    def set_delay(self, now: Ns, delay: Ns, jitter: Ns = 0) -> None:
        """The new delay holds for what leaves the bottleneck from `now` on. Raises ValueError as
        `Delay`."""
        fresh = Delay(delay, jitter, self._seed, self.delay.shape, self.delay.correlation)
        self._to(now)
        self.delay = fresh

    def advance(self, now: Ns) -> list[Through]:
        """What has come through up to `now` and was not returned before, in the order of finish."""
        self._settle((now << _BITS) + _SLACK)
        out, self._out = self._out, []
        self._gone = out
        return out

    def left(self) -> list[Any]:
        """Tags of what `advance` has just returned: it stands in no queue any more."""
        gone, self._gone = self._gone, []
        return [through.tag for through in gone]

    # -- what is known about it -------------------------------------------------------------------

    def next_event(self) -> Ns | None:
        """When `advance` will have something to return, or another rate begins to hold for what is
        queued, if nothing else happens; None: never."""
        if self._out:
            return self._out[0].finish
        tick = self._when if self._known else self._next_tick()
        if self._turn is not None and self._active:
            tick = self._turn if tick is None else min(tick, self._turn)
        return None if tick is None else _to_ns(tick)

    def backlog(self, now: Ns) -> int:
        """Bytes queued and not yet served, all flows together, rounded up."""
        self._to(now)
        return max(0, _to_bytes(self._unserved))

    def busy(self, now: Ns) -> Ns:
        """Time so far in which at least one flow was being served."""
        self._to(now)
        return (self._busy + _SLACK) >> _BITS

    def delay_at(self, t: Ns) -> Ns:
        """Of what leaves the bottleneck at `t`."""
        delay = self.delay.at(t)
        if self.trace is not None and self.trace.delays:
            delay = max(delay, self.trace.at(t)[0].delay or 0)
        return delay

    def opens_at(self, t: Ns) -> Ns | None:
        """The first time from `t` on at which this is no outage, as things stand; None: never."""
        if self.cap == 0:
            return None
        return t if self.trace is None else self.trace.opens_at(t)

    def measured_delay(self) -> tuple[Ns, Ns]:
        """Mean and standard deviation over the items so far, from leaving the bottleneck to their
        due time: the effective delay, order kept. What was set where it never varies."""
        count, total, squares = self._delays
        if not count:
            return self.delay.mean, 0
        return total // count, math.isqrt(max(0, squares * count - total * total)) // count

    @property
    def active_flows(self) -> int:
        """Flows with backlog, as of the last call."""
        return self._active

    def queued_at(self, now: Ns) -> int:
        """As `backlog`, for a `now` before which nothing more comes through: nothing happens."""
        passed = (now << _BITS) - self._tick
        served = self.rate * passed if self.rate and passed > 0 and self._active else 0
        return max(0, _to_bytes(self._unserved - served))

    @property
    def peak_rate(self) -> int | None:
        """The highest rate that can hold, as things stand."""
        if self.trace is None or self.trace.peak is None:
            return self.cap
        return self.trace.peak if self.cap is None else min(self.cap, self.trace.peak)

    # -- the law ----------------------------------------------------------------------------------

    def _to(self, now: Ns) -> None:
        """Lets everything happen that happens until `now`."""
        self._settle((now << _BITS) + _SLACK)
        self._pass(now << _BITS)

    def _settle(self, limit: int) -> None:
        """Takes out, in order, every item that is through at tick `limit`; work is done up to the
        last of them."""
        while True:
            tick = self._when if self._known else self._next_tick()
            turn = self._turn
            if turn is not None and turn <= limit and (tick is None or turn < tick):
                if self._active:
                    self._pass(turn)
                    self._follow(turn)
                else:  # nobody feels the segments between
                    self._follow(limit)
                continue
            if tick is None or tick > limit:
                return
            self._pass(tick)
            self._finish(_to_ns(tick))

    def _finish(self, finish: Ns) -> None:
        """The item whose turn it was is through."""
        self._known = False
        lane = self._lane()
        assert lane is not None
        flow, item = lane.take()
        self._count(item.account, item.nbytes)
        delay = self.delay.at(finish) if self.trace is None else self.delay_at(finish)
        flow.due = due = max(flow.due, finish + delay)
        if self.delay.jitter or self.trace is not None:
            count, total, squares = self._delays
            seen = due - finish
            self._delays = (count + 1, total + seen, squares + seen * seen)
        self._out.append(Through(item.tag, item.nbytes, finish, due))
        if self.at_head is not None:
            self._look_at_head(finish, lane.head_after(flow), lane)
        if not flow.queue:
            lane.leave(flow)
            self._idle()
        elif (next_lane := self._lanes[flow.queue[0].rank]) is lane:
            lane.go_on(flow)
        else:
            lane.leave(flow)
            next_lane.begin(flow)

    def _look_at_head(self, now: Ns, head: Flow | None, lane: Fair | Fifo) -> None:
        if head is None or self._lanes[head.queue[0].rank] is not lane:
            return
        assert self.at_head is not None
        was = head.queue[0]
        head.queue[0] = kept = self.at_head(now, head, was)
        self._unserved -= was.work - kept.work

    def _lane(self) -> Fair | Fifo | None:
        """The line that is served."""
        for lane in self._lanes:
            if lane.need() is not None:
                return lane
        return None

    def _next_tick(self) -> int | None:
        """The tick at which the next item is through, as things stand."""
        rate, when = self.rate, None
        if rate != 0:
            for lane in self._lanes:
                need = lane.need()
                if need is not None:
                    when = self._tick if rate is None or need <= 0 else self._tick - (-need // rate)
                    break
        self._known, self._when = True, when
        return when

    def _pass(self, tick: int) -> None:
        """Moves the clock to `tick`, with no item coming through on the way. The past stays as it
        is."""
        passed = tick - self._tick
        if passed <= 0:
            return
        self._tick = tick
        if (
            not self.is_fifo or self.rate is None
        ):  # the share is rounded down: what is left may take a tick longer
            self._known = False
        if self._active:
            if self._active > self.peak_flows:
                self.peak_flows = self._active
            if self.rate:
                work = self.rate * passed
                lane = self._lane()
                assert lane is not None
                lane.serve(work)
                self._unserved -= work
                self._busy += passed

    def _follow(self, tick: int) -> None:
        """The trace's segment at `tick` holds."""
        assert self.trace is not None
        segment, until = self.trace.at(tick >> _BITS)
        self._turn = None if until is None else until << _BITS
        self._known = False
        rates = [rate for rate in (self.cap, segment.rate) if rate is not None]
        self.rate = min(rates, default=None)

    def _idle(self) -> None:
        """A flow has no backlog any more."""
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
