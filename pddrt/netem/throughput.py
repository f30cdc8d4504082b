"""How many bytes a second this machine moves over loopback, by each of the ways that KV may take.

    plain     blocking sockets, `sendall` and `recv_into`: the reference
    frames    frames over a socket, checksum and all, without a link
    link      the same through `TcpNet`, over a link without rate and delay
    streams   as `link`, by 64 connections at once
    relay     plain sockets with a proxy of `netem proxy` in between

Source and sink are two processes (`relay`: three). A round is so many bytes from one buffer into
another, both as large as the round, so that no cache holds them; it ends when the sink says that it
has all. Congestion control is the same for all, and does not pace (see `tcpnet`). Rounds of the
ways alternate, so that what else the machine does meets all of them alike.

`peak` is a short form for one process: what a `TcpNet` carries, to itself. A link faster than
60 % of that cannot be kept (see `fidelity`).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, cast

from pddrt.env import Stopwatch, WallEnv
from pddrt.errors import CannotRun
from pddrt.frames import Buffers, Frame, FrameReader
from pddrt.netem.net import Connection, LinkSpec, Topology
from pddrt.netem.proxy import Proxies, ProxySpec
from pddrt.netem.tcpnet import TcpNet, loopback_socket
from pddrt.trace import Trace
from pddrt.types import SECOND

ROUND = 64 << 20
FRAME = 1 << 20
STREAMS = 64
WAYS = ("plain", "frames", "link", "streams", "relay")
_SITES = {"p": "a", "m": "b"}
_TOPOLOGY = Topology(_SITES, [LinkSpec("wan", ("a", "b"), None, 0)])
_DONE = b"k"


# -- the other processes ---------------------------------------------------------------------------


@contextmanager
def _other(*words: str) -> Iterator[tuple[str, int]]:
    """A process of ours that listens; it ends when we do."""
    command = [sys.executable, "-m", "pddrt.netem.throughput", *words]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        line = other.stdout.readline()
        if not line.strip().isdigit():
            raise CannotRun(f"a second process for {words[0]} could not be started")
        yield "127.0.0.1", int(line)
    finally:
        other.communicate()  # closes its stdin: it ends


def _until_told(server: socket.socket | None = None) -> None:
    """Says where it listens, then waits until whoever asked is gone."""
    if server is not None:
        print(server.getsockname()[1], flush=True)
    sys.stdin.buffer.read()


def _plain_sink(total: int) -> None:
    import threading

    server = loopback_socket()
    server.setblocking(True)
    server.bind(("127.0.0.1", 0))
    server.listen()
    buffer = memoryview(bytearray(total))

    def serve(sock: socket.socket) -> None:
        with sock:
            while _fill(sock, buffer):
                sock.sendall(_DONE)

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    _until_told(server)


def _fill(sock: socket.socket, buffer: memoryview) -> bool:
    filled = 0
    while filled < len(buffer):
        n = sock.recv_into(buffer[filled:])
        if not n:
            return False
        filled += n
    return True


class _FrameEnd(asyncio.BufferedProtocol):
    """Frames on a socket, and nothing else: as `tcpnet` does it, without a link."""

    def __init__(self, on_frame: Callable[[_FrameEnd, Frame, int], None]) -> None:
        self.room: asyncio.Event = asyncio.Event()
        self.room.set()
        self.transport: asyncio.Transport | None = None
        self._reader = FrameReader(partial(on_frame, self), 64 << 10, Buffers(ROUND))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=1 << 20)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.updated(nbytes)

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    async def send(self, frame: Frame) -> None:
        assert self.transport is not None
        await self.room.wait()
        self.transport.writelines([frame.head(), frame.payload])


async def _frame_sink(total: int) -> None:
    kept: list[Frame] = []
    size = 0

    def on_frame(end: _FrameEnd, frame: Frame, _size: int) -> None:
        nonlocal size
        kept.append(frame)
        size += len(frame.payload)
        if size >= total:
            kept.clear()
            size = 0
            assert end.transport is not None
            end.transport.write(Frame("done").head())

    sock = loopback_socket()
    sock.bind(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _FrameEnd(on_frame), sock=sock)
    print(sock.getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


async def _link_sink(total: int) -> None:
    """What arrives on any connection of a round counts; the last one tells all of them."""
    net = TcpNet(WallEnv(0, Trace()), _TOPOLOGY)
    kept: list[Frame] = []
    open_now: list[Connection] = []
    size = 0

    async def serve(conn: Connection) -> None:
        nonlocal size
        open_now.append(conn)
        try:
            while True:
                frame = await conn.recv()
                kept.append(frame)
                size += len(frame.payload)
                del frame  # else its memory is in use until this connection's next one
                if size >= total:
                    kept.clear()
                    size = 0
                    open_now[0].post(Frame("done"))
        finally:
            open_now.remove(conn)

    await net.listen("m", serve)
    print(net.addresses["m"][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await net.close()


async def _relay(upstream: str) -> None:
    proxies = Proxies(WallEnv(0, Trace()), lambda text: print(text, file=sys.stderr))
    proxy = await proxies.add(ProxySpec("relay", "127.0.0.1:0", upstream))
    print(proxy.listen.rpartition(":")[2], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await proxies.close()


# -- this process: the source ----------------------------------------------------------------------


def _plain_rounds(address: tuple[str, int], source: Sequence[bytes]) -> Iterator[float]:
    sock = loopback_socket()
    sock.setblocking(True)
    with sock:
        sock.connect(address)
        while True:
            watch = Stopwatch()
            for piece in source:
                sock.sendall(piece)
            if sock.recv(1) != _DONE:
                raise CannotRun("the other process went away")
            yield _size(source) * SECOND / watch.elapsed()


def _size(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


class _Asyncio:
    """A loop that is run for a round at a time."""

    def __init__(self) -> None:
        import uvloop

        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def frames(self, address: tuple[str, int], source: Sequence[bytes]) -> Iterator[float]:
        done: list[asyncio.Event] = []

        async def dial() -> _FrameEnd:
            done.append(asyncio.Event())
            loop = asyncio.get_running_loop()
            sock = loopback_socket()
            await loop.sock_connect(sock, address)
            made = lambda: _FrameEnd(lambda _end, _frame, _size: done[0].set())  # noqa: E731
            return (await loop.create_connection(made, sock=sock))[1]

        async def one(end: _FrameEnd) -> float:
            done[0].clear()
            watch = Stopwatch()
            for piece in source:
                await end.send(Frame("kv", {}, piece))
            await done[0].wait()
            return _size(source) * SECOND / watch.elapsed()

        end = self.runner.run(dial())
        while True:
            yield self.runner.run(one(end))

    def link(
        self, address: tuple[str, int], source: Sequence[bytes], streams: int
    ) -> Iterator[float]:
        async def dial() -> list[Connection]:
            net = TcpNet(WallEnv(0, Trace()), _TOPOLOGY, {"m": address})
            return [await net.connect("p", "m") for _ in range(streams)]

        async def send(conn: Connection, pieces: Sequence[bytes]) -> None:
            for piece in pieces:
                await conn.send(Frame("kv", {}, piece))

        async def one(conns: list[Connection]) -> float:
            watch = Stopwatch()
            sending = [
                asyncio.ensure_future(send(conn, source[i::streams]))
                for i, conn in enumerate(conns)
            ]
            await conns[0].recv()
            await asyncio.gather(*sending)
            return _size(source) * SECOND / watch.elapsed()

        conns = self.runner.run(dial())
        while True:
            yield self.runner.run(one(conns))


def measure(
    rounds: int,
    ways: tuple[str, ...] = WAYS,
    round_bytes: int = ROUND,
    frame_bytes: int = FRAME,
    heard: Callable[[int], None] = lambda _round: None,
) -> dict[str, list[float]]:
    """Bytes a second by way, of each of so many rounds (one more before them does not count).
    `heard` is told of each. Raises CannotRun."""
    from contextlib import ExitStack

    size = str(round_bytes)
    source = [b"k" * frame_bytes for _ in range(round_bytes // frame_bytes)]
    with ExitStack() as stack:
        made: dict[str, Iterator[float]] = {}
        at = _Asyncio()
        stack.enter_context(at.runner)
        plain = stack.enter_context(_other("plain", size))
        for way in ways:
            if way == "plain":
                made[way] = _plain_rounds(plain, source)
            elif way == "frames":
                address = stack.enter_context(_other("frames", size))
                made[way] = at.frames(address, source)
            elif way == "relay":
                address = stack.enter_context(_other("relay", f"127.0.0.1:{plain[1]}"))
                made[way] = _plain_rounds(address, source)
            else:
                address = stack.enter_context(_other("link", size))
                streams = STREAMS if way == "streams" else 1
                made[way] = at.link(address, source, streams)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for i in range(rounds + 1):
            for way in ways:
                rate = next(made[way])
                if i:
                    found[way].append(rate)
            heard(i)
        return found


async def peak(nbytes: int = 32 << 20) -> int:
    """Bytes a second that a `TcpNet` carries from itself to itself, over no link to speak of; the
    median of three. Some tens of milliseconds."""
    net = TcpNet(WallEnv(0, Trace()), _TOPOLOGY)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    payload = bytes(FRAME)
    found = []
    try:
        await net.listen("m", accepted.put)
        near = await net.connect("p", "m")
        far = await accepted.get()

        async def send() -> None:
            for _ in range(nbytes // FRAME):
                await near.send(Frame("kv", {}, payload))

        for _ in range(3):
            watch = Stopwatch()
            sending = asyncio.ensure_future(send())
            for _ in range(nbytes // FRAME):
                await far.recv()
            await sending
            found.append(nbytes * SECOND / watch.elapsed())
    finally:
        await net.close()
    return round(median(found))


def _main(kind: str, argument: str) -> None:
    import uvloop

    if kind == "plain":
        _plain_sink(int(argument))
        return
    made: dict[str, Callable[[], Any]] = {
        "frames": lambda: _frame_sink(int(argument)),
        "link": lambda: _link_sink(int(argument)),
        "relay": lambda: _relay(argument),
    }
    uvloop.run(made[kind]())


if __name__ == "__main__":
    _main(*sys.argv[1:])
