"""One direction of a link at work: its law, what is on its way, and the one timer that drives both.

Streams put loads in, with what to call when a load has left the bottleneck and when it is due at
the far end. Both nets are built on this and on `stream`; they differ in the clock (exact, or seldom
on time) and in what carries the bytes that are due.

Owns: loads in propagation, the timer, the record of how late things were. Leaves out: what a load
is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pddrt.env import Env, Timer
from pddrt.netem.fidelity import Ledger
from pddrt.netem.jitter import LOG_NORMAL
from pddrt.netem.link import Flow, Link, Qdisc
from pddrt.netem.losses import losses_of
from pddrt.netem.net import LinkSpec, LinkStats
from pddrt.netem.segments import MSS
from pddrt.netem.tcp_link import TcpLink
from pddrt.types import MS, SECOND, Ns

SEND_BUFFER = 1 << 20
SEND_BUFFER_MAX = 16 << 20
SEND_BUFFER_TIME: Ns = 4 * MS
"""Send buffer of a flow: SEND_BUFFER_TIME of the whole link, so that it never runs dry between two
turns of a wall-clock loop, but no less than SEND_BUFFER and no more than SEND_BUFFER_MAX. It bounds
what a cancel drops, and what a control frame on the same stream waits behind."""
TCP_LOAD = 64 * MSS
"""A load under TCP: whole segments, so that no packet of a long stream is short, and so few that
the first bytes do not wait for many others."""


class Load(NamedTuple):
    """What a link carries for a stream: `left(load)` is called when it is through the bottleneck,
    `deliver()` when it is due at the far end. Of its bytes, `posted` complete a frame nobody waits
    for."""

    nbytes: int
    posted: int
    left: Callable[[Load], None]
    deliver: Callable[[], None]


Law = Link | TcpLink


def law_of(spec: LinkSpec, seed: str) -> Law:
    """The law of one direction as its spec has it."""
    qdisc: Qdisc = spec.qdisc or ("fair" if spec.tcp is None else "fifo")
    link = Link(
        spec.rate,
        spec.delay,
        spec.jitter,
        seed,
        shape=spec.shape,
        correlation=spec.correlation,
        qdisc=qdisc,
        overhead=0 if spec.tcp else spec.overhead,
        ranks=spec.ranks,
        weights=spec.weights,
        trace=spec.trace,
    )
    if spec.tcp is None:
        return link
    losses = losses_of(spec.loss, spec.burst, f"{seed}/loss")
    return TcpLink(link, replace(spec.tcp, overhead=spec.overhead), seed, losses)


def join(there: Direction, back: Direction) -> None:
    """Two directions of one link: TCP's answers take the other one."""
    for one, other in ((there, back), (back, there)):
        if isinstance(one.link, TcpLink):
            one.link.back = other.link.link if isinstance(other.link, TcpLink) else other.link
            other.back = one


class Direction:
    """One direction of a link at work: its law, the loads in propagation, the one timer that drives
    both.

    `look_ahead` 0 is exact, for the virtual clock. On the wall clock what is through, or due,
    within `look_ahead` is taken as if it were now: a timer is seldom on time, and a fast link must
    not wait for one. The law is not moved by it.
    """

    def __init__(
        self, env: Env, link: Law, total: LinkStats, look_ahead: Ns, quantum: Ns | None
    ) -> None:
        """`quantum`: a load's length in time at the full rate; None: a whole send buffer at
        once."""
        self.link = link
        self.back: Direction | None = None
        """The other direction, if something of this one waits for it."""
        self.waiting = 0
        """Bytes handed over that wait for room in their stream's send buffer."""
        self._env = env
        self._total = total
        self._look_ahead = look_ahead
        self._quantum = quantum
        self._in_flight: list[tuple[Ns, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._timer: Timer | None = None
        self._timer_at: Ns = 0
        self._running = False
        self.ledger = Ledger()

    @property
    def peak_rate(self) -> int | None:
        """The highest rate that it can have, as things stand."""
        return self.link.peak_rate

    @property
    def delay_mean(self) -> Ns:
        """Of the delay, one way, as it is now set."""
        return self.link.delay.mean

    @property
    def send_buffer(self) -> int:
        """Bytes a stream may have in the link's queue."""
        if isinstance(self.link, TcpLink):
            return self.link.send_ahead
        if self.link.rate is None:
            return SEND_BUFFER
        wanted = self.link.rate * SEND_BUFFER_TIME // SECOND
        return min(max(wanted, SEND_BUFFER), SEND_BUFFER_MAX)

    @property
    def load_bytes(self) -> int:
        """Most bytes of one load: short enough in time to share the link smoothly, 4-256 KiB."""
        if isinstance(self.link, TcpLink):
            return TCP_LOAD
        if self._quantum is None or self.link.rate is None:
            return self.send_buffer
        return min(max(self.link.rate * self._quantum // SECOND, 4 << 10), 256 << 10)

    @property
    def backlog(self) -> int:
        """Bytes handed over that have not left, all streams together."""
        return self.waiting + self.link.backlog(self._env.now())

    def push(self, flow: Flow, account: str, load: Load) -> None:
        self.link.push(self._env.now(), flow, load.nbytes, account, load)
        self.run()

    def cancel(self, flow: Flow) -> None:
        self.link.cancel(self._env.now(), flow)
        self.run()

    def set_rate(self, rate: int | None) -> None:
        self.link.set_rate(self._env.now(), rate)
        self.run()
        if self.back is not None:
            self.back.way_back_opens()

    def way_back_opens(self) -> None:
        """The other direction has another rate: what waits for it may come."""
        if isinstance(self.link, TcpLink):
            self.link.way_back_opens(self._env.now())
            self.run()

    def set_delay(self, delay: Ns, jitter: Ns) -> None:
        self.link.set_delay(self._env.now(), delay, jitter)
        self.run()

    def run(self) -> None:
        """Brings everything up to now: loads through make room for more, loads due are
        delivered."""
        if self._running:  # a stream that got room, or a mark that was answered, pushes from within
            return
        self._running = True
        try:
            limit = self._env.now() + self._look_ahead
            while True:
                through = self.link.advance(limit)
                for load, _, _, due in through:
                    heapq.heappush(self._in_flight, (due, next(self._numbers), load.deliver))
                delivered = self._deliver(limit)
                left = self.link.left()
                for load in left:
                    load.left(load)
                if not through and not delivered and not left:
                    break
        finally:
            self._running = False
        self._arm()

    def _deliver(self, limit: Ns) -> bool:
        flight = self._in_flight
        delivered = bool(flight) and flight[0][0] <= limit
        while flight and flight[0][0] <= limit:
            due, _, deliver = heapq.heappop(flight)
            deliver()
            self.ledger.sent(due, self._env.now())
        return delivered

    def _arm(self) -> None:
        """One timer, for the next load that is through or due, whichever comes first."""
        nearest = self.link.next_event()
        if self._in_flight and (nearest is None or self._in_flight[0][0] < nearest):
            nearest = self._in_flight[0][0]
        if nearest is not None:
            nearest -= self._look_ahead // 2  # waking up takes about as long
        if self._timer is not None:
            if nearest == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if nearest is not None:
            self._timer_at = nearest
            self._timer = self._env.call_at(nearest, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.run()

    def stats(self) -> LinkStats:
        self.run()
        total, link = self._total, self.link
        total.by_kind = dict(sorted(link.carried.items()))
        total.bytes = sum(link.carried.values())
        total.busy = link.busy(self._env.now())
        total.peak_flows = link.peak_flows
        wire = link.link if isinstance(link, TcpLink) else link
        plain = wire.delay.shape == LOG_NORMAL and wire.delay.correlation is None
        total.told = wire is not link or wire.trace is not None or not plain
        total.delay_mean, total.delay_deviation = wire.measured_delay()
        if isinstance(link, TcpLink):
            total.resent, total.lost = link.resent, link.lost
            total.dropped = link.overflowed + link.delayed_drops
        total.late_max = self.ledger.late_max
        total.late_p99 = self.ledger.late_quantile(0.99)
        return total

    def close(self) -> None:
        """Drops what is in propagation; the timer is gone."""
        self._in_flight.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
