"""What a link does on this machine, measured on the whole way: frames through `TcpNet`, bytes
through the proxy, over loopback sockets and on this clock; or, of the same programs, in virtual
time.

Each measurement is a coroutine that opens what it needs and closes it again. Sender and receiver
share one thread, as in a run; what a receiver adds (waking up, checksums) is part of what is
measured. Nothing is judged here (see `check`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pddrt.env import Env, VirtualEnv, WallEnv
from pddrt.frames import Frame
from pddrt.netem.fidelity import judge
from pddrt.netem.net import Connection, LinkSpec, Topology
from pddrt.netem.proxy import Proxies, ProxySpec, Shape, link_of, parse_address
from pddrt.netem.simnet import SimNet
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.tcpnet import TcpNet
from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, SECOND, Ns


@asynccontextmanager
async def _world(
    env: Env, spec: LinkSpec, pairs: int
) -> AsyncIterator[tuple[Any, list[list[Connection]]]]:
    """A net of one link on either clock, and so many open connections over it, both ends of
    each."""
    topology = Topology({"p": "a", "m": "b"}, [spec])
    net: Any = SimNet(env, topology) if env.virtual else TcpNet(env, topology)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    try:
        await net.listen("m", accepted.put)
        yield net, [[await net.connect("p", "m"), await accepted.get()] for _ in range(pairs)]
    finally:
        await net.close()


def link(rate: int | None, delay: Ns = MS, jitter: Ns = 0, tcp: Tcp | None = None) -> LinkSpec:
    return LinkSpec("wan", ("a", "b"), rate, delay, jitter, tcp=tcp)


async def _send(conn: Connection, total: int, piece: int) -> None:
    payload = bytes(piece)
    for _ in range(-(-total // piece)):
        await conn.send(Frame("kv", {}, payload))


async def _arrivals(env: Env, conn: Connection, total: int) -> list[tuple[Ns, int]]:
    """When how many bytes had come, frame by frame."""
    found: list[tuple[Ns, int]] = []
    size = 0
    while size < total:
        frame = await conn.recv()
        size += frame.size
        found.append((env.now(), size))
    return found


def _slope(arrivals: Sequence[tuple[Ns, int]]) -> float:
    """Bytes a second to the last arrival, from when the first fiftieth was there: how late a stream
    begins is no matter of its rate."""
    ended, after = arrivals[-1]
    begun, before = next(a for a in arrivals if 50 * a[1] >= after)
    return (after - before) * SECOND / (ended - begun)


async def rate(spec: LinkSpec, seconds: float) -> float:
    """Bytes a second that one stream gets, headers and all."""
    env = WallEnv(1, Trace())
    assert spec.rate
    total = round(spec.rate * seconds)
    piece = min(max(total // 64, 4096), 1 << 20)
    async with _world(env, spec, 1) as (_, [[near, far]]):
        sending = asyncio.ensure_future(_send(near, total, piece))
        arrivals = await _arrivals(env, far, total)
        await sending
    return _slope(arrivals)


async def latencies(spec: LinkSpec, count: int, every: Ns) -> list[tuple[Ns, Ns]]:
    """Of small frames, each so long after the one before: when it was sent, how long it took."""
    env = WallEnv(1, Trace())
    async with _world(env, spec, 1) as (_, [[near, far]]):

        async def send() -> None:
            begun = env.now() + 5 * MS
            for k in range(count):
                await env.sleep_until(begun + k * every)
                near.post(Frame("token", {"t": env.now()}))

        sending = asyncio.ensure_future(send())
        found = []
        for _ in range(count):
            frame = await far.recv()
            found.append((frame["t"], env.now() - frame["t"]))
        await sending
    return found


async def shares(flows: int, spec: LinkSpec, seconds: float) -> list[int]:
    """Bytes that each of so many streams got while all of them had something to send: after a while
    in which they fill their buffers."""
    env = WallEnv(1, Trace())
    piece = 8192
    async with _world(env, spec, flows) as (_, pairs):
        got = [0] * flows
        begun = env.now() + SECOND // 2 + flows * 10 * MS
        end = begun + round(seconds * SECOND)

        async def flood(conn: Connection) -> None:
            while env.now() < end:
                await conn.send(Frame("kv", {}, bytes(piece)))

        async def take(i: int, conn: Connection) -> None:
            while env.now() < end:
                size = (await conn.recv()).size
                got[i] += size if begun <= env.now() < end else 0

        both = [flood(near) for near, _ in pairs]
        both += [take(i, far) for i, (_, far) in enumerate(pairs)]
        tasks = [asyncio.ensure_future(work) for work in both]
        await env.sleep_until(end)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return got


async def completions(env: Env, spec: LinkSpec, plan: Sequence[tuple[Ns, int]]) -> list[Ns]:
    """How long each transfer of `plan` (start, bytes) takes, on either clock."""
    found: list[Ns] = []
    async with _world(env, spec, len(plan)) as (_, pairs):
        begun = env.now() + 20 * MS

        async def one(pair: list[Connection], start: Ns, nbytes: int) -> Ns:
            await env.sleep_until(begun + start)
            first = env.now()
            sending = asyncio.ensure_future(_send(pair[0], nbytes, min(nbytes, 256 << 10)))
            arrivals = await _arrivals(env, pair[1], nbytes)
            await sending
            return arrivals[-1][0] - first

        asked = zip(pairs, plan, strict=True)
        found += await asyncio.gather(*(one(pair, *what) for pair, what in asked))
    return found


def predicted(spec: LinkSpec, plan: Sequence[tuple[Ns, int]]) -> list[Ns]:
    """The same in virtual time."""

    async def main() -> list[Ns]:
        return await completions(VirtualEnv(1, Trace()), spec, plan)

    made: Any = SimLoop
    with asyncio.Runner(loop_factory=made) as runner:
        return runner.run(main())


@asynccontextmanager
async def _proxy(shape: Shape) -> AsyncIterator[tuple[tuple[str, int], socket.socket, WallEnv]]:
    """Where a proxy listens, and the socket that listens as its upstream."""
    env = WallEnv(1, Trace())
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    proxies = Proxies(env, lambda _text: None)
    try:
        upstream = f"127.0.0.1:{server.getsockname()[1]}"
        spec = ProxySpec("check", "127.0.0.1:0", upstream, link_of(shape, shape))
        proxy = await proxies.add(spec)
        yield parse_address(proxy.listen), server, env
    finally:
        server.close()
        await proxies.close()


@asynccontextmanager
async def _proxied(shape: Shape) -> AsyncIterator[tuple[socket.socket, socket.socket, Env]]:
    """A client's socket, and what the upstream sees of it."""
    loop = asyncio.get_running_loop()
    async with _proxy(shape) as (address, server, env):
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(client, address)
            far, _ = await loop.sock_accept(server)
            with far:
                far.setblocking(False)
                yield client, far, env


async def proxy_rate(bytes_per_s: int, seconds: float) -> float:
    total = round(bytes_per_s * seconds)
    async with _proxied(Shape(bytes_per_s, MS)) as (client, far, env):
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(loop.sock_sendall(client, bytes(total)))
        arrivals, size = [], 0
        buffer = bytearray(256 << 10)
        while size < total:
            size += await loop.sock_recv_into(far, buffer)
            arrivals.append((env.now(), size))
        await sending
    return _slope(arrivals)


async def proxy_latency(delay: Ns, count: int) -> list[Ns]:
    """By how much each of so many bytes came late, one way."""
    async with _proxied(Shape(None, delay)) as (client, far, env):
        loop, found = asyncio.get_running_loop(), []
        for _ in range(count):
            sent = env.now()
            await loop.sock_sendall(client, b"x")
            await loop.sock_recv(far, 1)
            found.append(env.now() - sent - delay)
    return found[1:]  # the first one waited for the handshake


async def handshakes(delay: Ns, count: int) -> tuple[list[Ns], list[Ns]]:
    """How long connecting takes over a `TcpNet`, a round trip; and until the upstream of a proxy
    hears of a client, one way."""
    env, loop = WallEnv(1, Trace()), asyncio.get_running_loop()
    nets, proxied = [], []
    async with _world(env, link(None, delay), 0) as (net, _):
        for _ in range(count):
            begun = env.now()
            await net.connect("p", "m")
            nets.append(env.now() - begun)
    async with _proxy(Shape(None, delay)) as (address, server, env):
        for _ in range(count):
            with socket.socket() as client:
                client.setblocking(False)
                begun = env.now()
                await loop.sock_connect(client, address)
                far, _ = await loop.sock_accept(server)
                proxied.append(env.now() - begun)
                far.close()
    return nets, proxied


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Threads that compute without end, as an engine's do: at a lower priority, mostly without the
    interpreter's lock."""
    import numpy as np

    stop = threading.Event()

    def compute() -> None:
        os.nice(10)  # of this thread, on Linux
        a = np.ones((384, 384), np.float32)
        while not stop.is_set():
            a = np.tanh(a @ a)

    made = [threading.Thread(target=compute, daemon=True) for _ in range(threads)]
    for thread in made:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in made:
            thread.join()


async def rate_and_verdict(env: Env, spec: LinkSpec, seconds: float) -> tuple[float, str]:
    assert spec.rate
    total = round(spec.rate * seconds)
    async with _world(env, spec, 1) as (net, [[near, far]]):
        sending = asyncio.ensure_future(_send(near, total, min(max(total // 64, 4096), 1 << 20)))
        arrivals = await _arrivals(env, far, total)
        await sending
        return _slope(arrivals), judge(net.kept())["verdict"]
