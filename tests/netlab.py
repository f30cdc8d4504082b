"""A net under test, on either clock: two sites, one WAN link, a queue of accepted connections
each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from pddrt.env import Env, VirtualEnv, WallEnv
from pddrt.frames import Frame
from pddrt.netem.link import Link, Through
from pddrt.netem.net import Connection, LinkSpec, Topology
from pddrt.netem.simnet import SimNet
from pddrt.netem.tcpnet import TcpNet
from pddrt.simloop import SimLoop
from pddrt.types import Ns

from .kept import KeptTrace

MB = 1_000_000
Main = Callable[..., Coroutine[Any, Any, None]]


def world(rate: int | None = None, delay: int = 0, jitter: int = 0) -> Topology:
    """Two sites, a (p, q, gw) and b (m, n), one WAN link between them; the fabric of a is
    declared."""
    sites = {"p": "a", "q": "a", "gw": "a", "m": "b", "n": "b"}
    links = [
        LinkSpec("wan", ("a", "b"), rate, delay, jitter),
        LinkSpec("rdma", ("a", "a"), None, 0),
    ]
    return Topology(sites, links)


@dataclass
class Lab:
    """A net, and for each instance the queue of connections it accepted."""

    env: Env
    net: Any
    accepted: dict[str, asyncio.Queue[Connection]]

    async def pair(self, src: str = "p", dst: str = "m") -> tuple[Connection, Connection]:
        near = await self.net.connect(src, dst)
        return near, await self.accepted[dst].get()


@asynccontextmanager
async def lab(kind: str, topology: Topology, seed: int = 7) -> AsyncIterator[Lab]:
    if kind == "sim":
        env: Env = VirtualEnv(seed, KeptTrace())
        net: Any = SimNet(env, topology)
    else:
        env = WallEnv(seed, KeptTrace())
        net = TcpNet(env, topology)
    accepted: dict[str, asyncio.Queue[Connection]] = {}
    for name in topology.sites:
        if name != "gw":  # a client: it only calls
            accepted[name] = asyncio.Queue()
            await net.listen(name, accepted[name].put)
    try:
        yield Lab(env, net, accepted)
    finally:
        await net.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"the net left tasks behind: {left}"
        loop = asyncio.get_running_loop()
        if isinstance(loop, SimLoop):
            assert all(handle.cancelled() for _, _, handle in loop._timers)
        else:
            assert net._sockets == {}


def on(kind: str, main: Main, *args: Any) -> None:
    factory = SimLoop if kind == "sim" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(*args))


both = pytest.mark.parametrize("kind", ["sim", "tcp"])


def payload(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def wire_size(frame: Frame) -> int:
    return len(frame.head()) + memoryview(frame.payload).nbytes


def drain(link: Link) -> list[Through]:
    """Everything that still comes through, event by event."""
    out: list[Through] = []
    while (when := link.next_event()) is not None:
        out += link.advance(when)
    return out


def finishes(link: Link) -> dict[Any, Ns]:
    return {item.tag: item.finish for item in drain(link)}
