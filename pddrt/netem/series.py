"""Several links in a row, from one site over others: what a stream puts in passes each of them.

    stream -> direction a>x -> (due at x) -> direction x>b -> (due at b) -> the far end

Each hop is the direction that other streams use, too, so what shares a hop shares its rate. A load
goes on when its last byte is due; loads are short, so that it costs next to nothing that they do
not go on byte by byte. The send buffer counts what has not left the last bottleneck: a narrow link
far away holds the sender back as a near one does.

Without TCP only: a connection's segments would have to pass all hops (see `links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pddrt.netem.flow import Direction, Load
from pddrt.netem.link import Flow
from pddrt.netem.segments import MSS
from pddrt.types import SECOND, US, Ns

LOAD_TIME: Ns = 100 * US
"""A load's length in time on the narrowest hop."""
MOST = 64 << 10


class Route:
    """Two directions or more, as one. See `flow.Direction` for what the calls mean."""

    def __init__(self, hops: Sequence[Direction]) -> None:
        assert len(hops) > 1
        self._hops = hops
        self.waiting = 0
        self.ledger = hops[0].ledger
        """Of the first hop: it is there that a sender waits."""

    @property
    def delay_mean(self) -> Ns:
        return sum(hop.delay_mean for hop in self._hops)

    @property
    def send_buffer(self) -> int:
        return min(hop.send_buffer for hop in self._hops)

    @property
    def load_bytes(self) -> int:
        rates = [hop.link.rate for hop in self._hops if hop.link.rate is not None]
        wanted = min(rates) * LOAD_TIME // SECOND if rates else MOST
        return min(max(wanted, MSS), MOST, *(hop.load_bytes for hop in self._hops))

    @property
    def backlog(self) -> int:
        return self.waiting + sum(hop.backlog for hop in self._hops)

    def push(self, flow: Flow, account: str, load: Load) -> None:
        if flow.transport is None:
            flow.transport = [flow, *(Flow() for _ in self._hops[1:])]
        self._pass(0, flow.transport, account, load)

    def cancel(self, flow: Flow) -> None:
        """Drops what has not left the first hop; what is further on arrives."""
        self._hops[0].cancel(flow)

    def _pass(self, hop: int, flows: Sequence[Flow], account: str, load: Load) -> None:
        direction = self._hops[hop]
        if hop == len(self._hops) - 1:
            direction.push(flows[hop], account, load)
            return
        deliver = partial(self._pass, hop + 1, flows, account, load)
        direction.push(flows[hop], account, Load(load.nbytes, load.posted, _nothing, deliver))


def _nothing(_load: Load) -> None:
    """It has left a hop, but not the last one."""
