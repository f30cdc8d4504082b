"""The net seam: named instances, connections over links, frames.

A role sees `listen`, `connect` and a `Connection`. `simnet.SimNet` carries frames in memory under
the virtual clock, `tcpnet.TcpNet` over real sockets; both shape every byte by the same law
(`link.Link`). Connections are full duplex and keep order. Opening one costs a round trip, as a
handshake would.

Each direction of a connection is one flow on the link between the two sites, or on each of several
links in a row. Instances of one site with no link declared talk over an ideal path (no delay,
unlimited rate).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pddrt.frames import Frame
from pddrt.netem.jitter import LOG_NORMAL, Shape
from pddrt.netem.link import Qdisc
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.traces import Trace
from pddrt.types import Ns

Accept = Callable[["Connection"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link as the scenario declares it; full duplex, each direction by itself.

    `rate` in bytes/s of goodput (None: unlimited, 0: outage), `delay` one way, `jitter` the
    standard deviation of the delay (see `jitter` for its shape and correlation). A link between a
    site and itself is the fabric inside it: one shared direction.

    `qdisc` None: fair without TCP, first in, first out with it. `ranks` and `weights` by account of
    what is carried (see `link.Link`). `tcp` None: flows are fluid, nothing is lost; else `loss` is
    the share of segments, in rows of `burst` in the mean (None: each by itself). `back` is the same
    link from the other end, where that is not the same.
    """

    name: str
    between: tuple[str, str]
    rate: int | None
    delay: Ns
    jitter: Ns = 0
    shape: Shape = LOG_NORMAL
    correlation: Ns | None = None
    qdisc: Qdisc | None = None
    overhead: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    trace: Trace | None = None
    tcp: Tcp | None = None
    loss: float = 0.0
    burst: float | None = None
    back: LinkSpec | None = None

    def toward(self, src: str, dst: str) -> LinkSpec:
        """As it is from one of its sites to the other."""
        return self if self.back is None or self.between == (src, dst) else self.back


@dataclass(frozen=True, slots=True)
class Topology:
    """Where everyone is: site of each instance (clients and gateway included), links between
    sites.
    """

    sites: Mapping[str, str]
    links: Sequence[LinkSpec]
    _known: dict[tuple[str, str], LinkSpec | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def link_between(self, src: str, dst: str) -> LinkSpec | None:
        """The link that joins the sites of two instances, or what several in a row come to: the
        delays add up, the lowest rate holds. None inside one site where none is declared.

        Raises KeyError for an unknown instance, LookupError where no path exists.
        """
        a, b = self.sites[src], self.sites[dst]
        if (a, b) not in self._known:
            hops = route(self.links, a, b)
            self._known[a, b] = _in_a_row(hops, a, b) if hops else None
        found = self._known[a, b]
        if found is None and a != b:
            raise LookupError(f"no link between site {a} ({src}) and site {b} ({dst})")
        return found

    def joined(self, src: str, dst: str) -> bool:
        """Whether there is a path between two instances. Raises KeyError for an unknown one."""
        a, b = self.sites[src], self.sites[dst]
        return a == b or bool(route(self.links, a, b))


def route(links: Sequence[LinkSpec], a: str, b: str) -> list[LinkSpec]:
    """The links from one site to another, each as it is on the way: the fewest, and of those the
    ones that were declared first. Inside a site: its own link, if it has one. Empty: none."""
    if a == b:
        return [link for link in links if link.between == (a, a)][:1]
    before: dict[str, LinkSpec] = {}
    sites = [a]
    for site in sites:  # grows as sites are found
        for link in links:
            if site in link.between and len(set(link.between)) == 2:
                other = link.between[link.between[0] == site]
                if other != a and other not in before:
                    before[other] = link.toward(site, other)
                    sites.append(other)
    hops: list[LinkSpec] = []
    while b != a and b in before:
        hops.append(before[b])
        ends = before[b].between
        b = ends[ends[0] == b]
    return hops[::-1] if b == a else []


def _in_a_row(hops: Sequence[LinkSpec], a: str, b: str) -> LinkSpec:
    if len(hops) == 1:
        return hops[0]
    rates = [hop.rate for hop in hops if hop.rate is not None]
    name = "+".join(hop.name for hop in hops)
    return LinkSpec(name, (a, b), min(rates, default=None), sum(hop.delay for hop in hops))


@dataclass(slots=True)
class LinkStats:
    """What one direction of a link carried. `late` is how much later than due the bytes left (wall
    only).
    """

    link: str
    src_site: str
    dst_site: str
    bytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    busy: Ns = 0
    peak_flows: int = 0
    late_p99: Ns = 0
    late_max: Ns = 0
    told: bool = False
    """Whether what follows says more of the link than was set."""
    delay_mean: Ns = 0
    """With `delay_deviation`: of what was carried, from the bottleneck to its due time."""
    delay_deviation: Ns = 0
    resent: int = 0
    """Segments under TCP: sent again, dropped by a queue, lost on the way."""
    dropped: int = 0
    lost: int = 0


class Connection(Protocol):
    """One ordered, full-duplex stream between two instances, seen from one end."""

    peer: str

    async def send(self, frame: Frame) -> None:
        """Hands the frame to the stream; waits while the flow's send buffer is full
        (back-pressure).

        The frame's payload may be reused once this returns. Raises ConnectionLost.
        """
        ...

    def post(self, frame: Frame) -> None:
        """As `send`, without waiting: for small control frames. Silently dropped if the stream has
        ended.

        Raises PeerError if the bound on queued control bytes is exceeded.
        """
        ...

    async def recv(self) -> Frame:
        """The next frame. Raises ConnectionLost at the end of the stream, BadFrame on garbage."""
        ...

    async def drain(self) -> None:
        """Returns when everything handed over has left this side's send buffer. Raises
        ConnectionLost.
        """
        ...

    def abort(self) -> None:
        """Ends the stream now, both ways: what has not left the send buffer is dropped."""
        ...

    async def close(self) -> None:
        """Ends the stream after what was handed over has left."""
        ...


class Net(Protocol):
    async def listen(self, name: str, accept: Accept) -> None:
        """Lets others connect to `name`; `accept(connection)` runs as a task for each that does."""
        ...

    def unlisten(self, name: str) -> None:
        """Nobody can connect to `name` any more, until it listens again. What is open stays."""
        ...

    async def connect(self, src: str, dst: str) -> Connection:
        """A new connection from `src` to `dst`; returns after one round trip. Raises
        ConnectionLost.
        """
        ...

    def moving(self) -> bool:
        """Whether anything is on its way over a link that carries it."""
        ...

    def stats(self) -> list[LinkStats]:
        """One entry for each direction of each link."""
        ...

    async def close(self) -> None:
        """Ends every connection, listener and timer. Nothing is left running."""
        ...
