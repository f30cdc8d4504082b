"""Whom the gateway can send requests to: instances that come and go, and what they say.

The half of the gateway that speaks with instances about themselves: it reaches them, hears what
they are, what they have to do and how transfers went, and keeps what it believes of them
(`outlook`). `gateway` has the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields

from pddrt.env import Env
from pddrt.errors import BadFrame, ConnectionLost
from pddrt.frames import Frame
from pddrt.netem.net import Connection, Net, Topology
from pddrt.roles.load import Load
from pddrt.roles.node import Node
from pddrt.roles.outlook import Capacity, Outlook
from pddrt.trace import TransferTook
from pddrt.types import Ns

LOAD = tuple(field.name for field in fields(Load))


class Roster(Node):
    def __init__(
        self, env: Env, net: Net, name: str, *, topology: Topology, signal_age: Ns
    ) -> None:
        """`signal_age`: how old what instances say of their load may be."""
        super().__init__(env, net, name)
        self.signal_age = signal_age
        self.outlook = Outlook(topology)
        self.hears: Callable[[str, Load, Sequence[str]], None] = self.outlook.reported
        """Where what instances say of their load goes."""
        self._expected: tuple[str, ...] = ()
        self._introduced = asyncio.Event()
        self._retired: set[str] = set()

    @property
    def instances(self) -> dict[str, Capacity]:
        """Those that have said what they are."""
        return self.outlook.instances

    async def dial(self, peers: Sequence[str]) -> None:
        """Connects to the instances and waits until each has said what it is."""
        self._expected = tuple(peers)
        await super().dial(peers)
        await self._until(lambda: len(self.instances) >= len(peers))

    async def _until(self, so: Callable[[], bool]) -> None:
        """Returns when it is `so`; looks whenever an instance is introduced or gone."""
        while not so():
            self._introduced.clear()
            await self._introduced.wait()

    # -- instances that come and go ----------------------------------------------------------------

    async def meet(self, peer: str) -> None:
        """From now on `peer`, which listens, gets requests as soon as it has said what it is. That
        it left may be news yet. Where it is lost before that, it is looked for, as any other.
        """
        await self._until(lambda: peer not in self.instances)
        if peer not in self._expected:
            self._expected = (*self._expected, peer)
        self._retired.discard(peer)
        try:
            await super().dial([peer])
        except ConnectionLost:  # it has stopped already; perhaps it starts again
            self.redial([peer])

    def retire(self, peer: str) -> None:
        """It gets no requests any more, and is not looked for: its good-bye may get lost."""
        self._retired.add(peer)
        if peer in self._dialled:
            self._dialled.remove(peer)
        if redialling := self._redials.pop(peer, None):
            redialling.cancel()

    def on_hello(self, conn: Connection, frame: Frame) -> None:
        if conn.peer not in self._expected or conn.peer in self.instances:
            raise BadFrame(f"nobody asked {conn.peer} who it is")
        self.outlook.introduced(conn.peer, frame, self._expected)
        self.post(conn.peer, "watch", age_ns=self.signal_age)
        self._introduced.set()

    # -- what instances say ------------------------------------------------------------------------

    def on_load(self, conn: Connection, frame: Frame) -> None:
        """What it has to do now, and which requests that takes into account."""
        load = Load(**{name: frame[name] for name in LOAD})
        self.hears(self._known(conn), load, frame["arrived"])

    def on_streaming(self, conn: Connection, frame: Frame) -> None:
        """P: the path is what a transfer to a main decoder waits for now, or it is not any more."""
        self._known(conn, frame["to"])
        self.outlook.streaming(self.env.now(), conn.peer, frame)

    def on_crossed(self, conn: Connection, frame: Frame) -> None:
        """P: a transfer to a main decoder has ended."""
        now, src, dst = self.env.now(), self._known(conn, frame["to"]), frame["to"]
        crossing, rate = self.outlook.crossed(now, src, frame)
        if frame["whole"] and crossing is not None:
            took = frame["busy_ns"] + self.outlook.delay(src, dst)
            about = (frame["request"], src, dst, frame["bytes"], took)
            self.env.trace.emit(TransferTook(now, *about, crossing.expected, rate))

    def _known(self, conn: Connection, other: str | None = None) -> str:
        """The sender. Raises BadFrame unless it is an instance, and there ever was the other."""
        if conn.peer not in self.instances or self.peers.get(conn.peer) is not conn:
            raise BadFrame(f"{conn.peer} is no instance here")
        if other is not None and other not in self._expected:
            raise BadFrame(f"{other} never was an instance here")
        return conn.peer

    @property
    def reachable(self) -> list[str]:
        """Those that may get requests."""
        return [n for n in self.instances if n in self.peers and n not in self._retired]
