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
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from pddrt.env import Env, Timer
from pddrt.netem.link import Flow, Link
from pddrt.netem.net import LinkStats
from pddrt.types import MS, SECOND, US, Ns

SEND_BUFFER = 1 << 20
SEND_BUFFER_MAX = 16 << 20
SEND_BUFFER_TIME: Ns = 4 * MS
"""Send buffer of a flow: SEND_BUFFER_TIME of the whole link, so that it never runs dry between two
turns of a wall-clock loop, but no less than SEND_BUFFER and no more than SEND_BUFFER_MAX. It bounds
what a cancel drops, and what a control frame on the same stream waits behind."""
_LATE_STEP = 10 * US


class Load(NamedTuple):
    """What a link carries for a stream: `left(load)` is called when it is through the bottleneck,
    `deliver()` when it is due at the far end. Of its bytes, `posted` complete a frame nobody waits
    for."""

    nbytes: int
    posted: int
    left: Callable[[Load], None]
    deliver: Callable[[], None]


class Direction:
    """One direction of a link at work: its law, the loads in propagation, the one timer that drives
    both.

    `look_ahead` 0 is exact, for the virtual clock. On the wall clock what is through, or due,
    within `look_ahead` is taken as if it were now: a timer is seldom on time, and a fast link must
    not wait for one. The law is not moved by it.
    """

    def __init__(
        self, env: Env, link: Link, total: LinkStats, look_ahead: Ns, quantum: Ns | None
    ) -> None:
        """`quantum`: a load's length in time at the full rate; None: a whole send buffer at
        once."""
        self.link = link
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
        self._late: Counter[int] = Counter()
        self._late_max: Ns = 0

    @property
    def send_buffer(self) -> int:
        """Bytes a stream may have in the link's queue."""
        if self.link.rate is None:
            return SEND_BUFFER
        wanted = self.link.rate * SEND_BUFFER_TIME // SECOND
        return min(max(wanted, SEND_BUFFER), SEND_BUFFER_MAX)

    @property
    def load_bytes(self) -> int:
        """Most bytes of one load: short enough in time to share the link smoothly, 4-256 KiB."""
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
                for load, _, _, _ in through:
                    load.left(load)
                if not through and not delivered:
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
            late = max(0, self._env.now() - due)
            self._late[-(-late // _LATE_STEP)] += 1
            self._late_max = max(self._late_max, late)
        return delivered

    def _arm(self) -> None:
        """One timer, for the next load that is through or due, whichever comes first."""
        nearest = self.link.next_event()
        if self._in_flight and (nearest is None or self._in_flight[0][0] < nearest):
            nearest = self._in_flight[0][0]
        if nearest is not None:
            nearest -= self._look_ahead
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
        total.late_max = self._late_max
        total.late_p99 = self._late_quantile(0.99)
        return total

    def _late_quantile(self, q: float) -> Ns:
        """Upper edge of the 10 us step that holds the quantile, or the maximum if that is less."""
        rank = q * self._late.total()
        for step in sorted(self._late):
            rank -= self._late[step]
            if rank <= 0:
                return min(step * _LATE_STEP, self._late_max)
        return 0

    def close(self) -> None:
        """Drops what is in propagation; the timer is gone."""
        self._in_flight.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
