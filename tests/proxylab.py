"""A proxy under test: real sockets on loopback, an upstream that does as it is told."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from pddrt.env import WallEnv
from pddrt.netem.proxy import Proxies, Proxy, ProxySpec, Shape, link_of, parse_address
from pddrt.netem.toxics import STAGES, Toxic
from pddrt.trace import Trace

NOTHING = Shape()


def run(main: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):  # an idle loop hears no alarm of pytest's
            await main(*args)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def toxic(type_: str, stream: str = "downstream", toxicity: float = 1.0, **given: int) -> Toxic:
    attributes = {**STAGES[type_].attributes, **given}
    return Toxic(f"{type_}_{stream}", type_, stream, toxicity, attributes)  # type: ignore[arg-type]


@dataclass
class End:
    """One end of a connection through the proxy: plain calls on a non-blocking socket."""

    sock: socket.socket
    loop: Any = field(default_factory=asyncio.get_running_loop)

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def recv(self, nbytes: int = 1 << 20) -> bytes:
        found: bytes = await self.loop.sock_recv(self.sock, nbytes)
        return found

    async def exactly(self, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            data = await self.recv(min(nbytes - len(found), 1 << 20))
            assert data, f"the stream ended after {len(found)} of {nbytes} bytes"
            found += data
        return bytes(found)

    async def all(self) -> bytes:
        found = bytearray()
        while data := await self.recv():
            found += data
        return bytes(found)

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


@dataclass
class ProxyLab:
    env: WallEnv
    proxies: Proxies
    proxy: Proxy
    upstream: socket.socket
    said: list[str]
    ends: list[End] = field(default_factory=list)

    async def dial(self, receive_buffer: int | None = None) -> End:
        """A client that has connected to the proxy; the upstream may not know of it yet."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, parse_address(self.proxy.listen))
        self.ends.append(End(sock))
        return self.ends[-1]

    async def accept(self) -> End:
        sock, _ = await asyncio.get_running_loop().sock_accept(self.upstream)
        sock.setblocking(False)
        self.ends.append(End(sock))
        return self.ends[-1]

    async def pair(self, receive_buffer: int | None = None) -> tuple[End, End]:
        """A client and what the upstream sees of it."""
        return await self.dial(receive_buffer), await self.accept()

    async def over(self) -> None:
        """Returns when the proxy has let go of every connection."""
        while self.proxy.connections:
            await self.env.sleep(1_000_000)
        assert self.proxies.hold.held == 0


@asynccontextmanager
async def proxy_lab(
    up: Shape = NOTHING, down: Shape = NOTHING, *, toxics: tuple[Toxic, ...] = (),
    seed: int = 7, hold: int = 1 << 30, refusing: bool = False,
) -> AsyncIterator[ProxyLab]:  # fmt: skip
    env = WallEnv(seed, Trace())
    upstream = socket.create_server(("127.0.0.1", 0))
    upstream.setblocking(False)
    where = f"127.0.0.1:{upstream.getsockname()[1]}"
    if refusing:
        upstream.close()
    said: list[str] = []
    proxies = Proxies(env, said.append, hold)
    spec = ProxySpec("db", "127.0.0.1:0", where, link_of(up, down), toxics=toxics)
    lab = ProxyLab(env, proxies, await proxies.add(spec), upstream, said)
    try:
        yield lab
    finally:
        await proxies.close()
        for end in lab.ends:
            end.close()
        upstream.close()
        assert proxies.hold.held == 0
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"the proxy left tasks behind: {left}"
