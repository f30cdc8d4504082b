"""The net seam: named instances, connections over links, frames.

A role sees `listen`, `connect` and a `Connection`. `simnet.SimNet` carries frames in memory under
the virtual clock, `tcpnet.TcpNet` over real sockets; both shape every byte by the same law
(`link.Link`). Connections are full duplex and keep order. Opening one costs a round trip, as a
handshake would.

Each direction of a connection is one flow on the link between the two sites. Instances of one site
with no link declared talk over an ideal path (no delay, unlimited rate).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pddrt.frames import Frame
from pddrt.types import Ns

Accept = Callable[["Connection"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link as the scenario declares it; full duplex, each direction by itself.

    `rate` in bytes/s of goodput (None: unlimited, 0: outage), `delay` one way, `jitter` the
    standard deviation of the delay. A link between a site and itself is the fabric inside it: one
    shared direction.
    """

    name: str
    between: tuple[str, str]
    rate: int | None
    delay: Ns
    jitter: Ns = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Where everyone is: site of each instance (clients and gateway included), links between
    sites.
    """

    sites: Mapping[str, str]
    links: Sequence[LinkSpec]

    def link_between(self, src: str, dst: str) -> LinkSpec | None:
        """The link that joins the sites of two instances; None inside one site where none is
        declared.

        Raises KeyError for an unknown instance, LookupError where no path exists.
        """
        a, b = self.sites[src], self.sites[dst]
        for link in self.links:
            if link.between in ((a, b), (b, a)):
                return link
        if a == b:
            return None
        raise LookupError(f"no link between site {a} ({src}) and site {b} ({dst})")

    def joined(self, src: str, dst: str) -> bool:
        """Whether there is a path between two instances. Raises KeyError for an unknown one."""
        a, b = self.sites[src], self.sites[dst]
        return a == b or any(link.between in ((a, b), (b, a)) for link in self.links)


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
