"""TcpNet: the net over real sockets, for the wall clock.

The sender holds the bytes and writes them when the law says they are due: in pieces of a
millisecond of link time, on absolute deadlines, at most LOOK_AHEAD early. A late loop sends all
that is due at once and never moves the law, so the rate stays exact; how late it was is in
`LinkStats`. The kernel's buffers and its congestion control do not shape: buffers are large, and
bbr, which paces, is replaced where the system lets us.

A connection begins with two frames that no link charges for, but whose delay is real: the caller's
hello names both instances, the listener's welcome answers it. Whatever else connects is dropped and
counted in `strangers`.

Every direction is shaped in the process of its sender. Several processes agree as long as all
senders of one direction live in one of them; a common law over processes needs more than this file.

Leaves out: encryption, authentication. Listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import MutableMapping
from functools import partial
from typing import cast

from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, CannotRun, ConnectionLost
from pddrt.frames import Buffers, Frame, FrameReader
from pddrt.netem.net import Accept, Connection, Topology
from pddrt.netem.stream import Buffer, EmulatedNet, Stream
from pddrt.types import MS, SECOND, US, Ns

LOOK_AHEAD: Ns = 100 * US
QUANTUM: Ns = MS
MAX_UNKNOWN = 256
"""Connections that have not said hello yet."""
HELLO_DEADLINE: Ns = 5 * SECOND
"""A caller writes its hello as it connects. (The emulated delay is before that.)"""
_SOCKET_BUFFER = 4 << 20
_SCRATCH = 64 << 10
_PAYLOADS = 64 << 20
"""Memory for what arrives that is kept for what arrives later."""
_HIGH_WATER = 1 << 20
"""Bytes in the transport beyond which the receiver counts as lagging: its kernel buffer and ours
are full."""


class _Socket(asyncio.BufferedProtocol):
    """One end of a TCP connection, and the carrier of its stream."""

    def __init__(self, net: TcpNet, listener: str | None) -> None:
        """`listener`: who accepts here, at the end that was called; None at the end that calls."""
        self.stream: Stream | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._net = net
        self._number = net.register(self)
        self._listener = listener
        self._deadline: Timer | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(self._first_frame, _SCRATCH, net.buffers)
        self._reader.only_small = True
        self._sink: bytearray | None = None  # takes what arrives once nobody reads it

    def abort(self) -> None:
        """Ends the connection, or the attempt at one."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self.connection_lost(None)

    # -- Carrier ----------------------------------------------------------------------------------

    def write(self, pieces: list[Buffer]) -> None:
        if self._transport is not None and not self._transport.is_closing() and self._sink is None:
            self._transport.writelines(pieces)

    def end(self) -> None:
        """Ends our half and drains the other's into a sink.

        Closing at once with bytes unread would make the kernel throw away what we have sent.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._start_sink()
            self._transport.write_eof()

    def pause(self) -> None:
        if self._transport is not None and self._sink is None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- what the socket says ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        if self._listener is not None:
            env = self._net.env
            self._deadline = env.call_at(env.now() + HELLO_DEADLINE, self.abort)
            self._net.unknown(self._number, self)

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        return self._reader.get_buffer() if self._sink is None else self._sink

    def buffer_updated(self, nbytes: int) -> None:
        if self._sink is not None:
            return
        try:
            self._reader.updated(nbytes)
        except BadFrame as error:
            self._start_sink()
            if self.stream is not None and self.opened.done():
                self.stream.broken(error)
            else:
                self.abort()

    def eof_received(self) -> None:
        """The other end ends the stream; the transport closes when this returns."""
        if self.stream is not None:
            where = " inside a frame" if self._reader.inside_frame and self._sink is None else ""
            self.stream.lost(ConnectionLost(f"{self.stream.peer} ended the connection{where}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._net.known(self._number)
        if self.stream is None:
            self._net.strangers += 1
        else:
            why = "was lost" if error is None else f"was lost: {error}"
            self.stream.lost(ConnectionLost(f"the connection to {self.stream.peer} {why}"))
        if self._deadline is not None:
            self._deadline.cancel()
        for waiting in (self.opened, self.closed):
            if not waiting.done():
                waiting.set_result(None)
        self._net.forget(self._number)

    def pause_writing(self) -> None:
        if self.stream is not None:
            self.stream.pause()

    def resume_writing(self) -> None:
        if self.stream is not None:
            self.stream.resume()

    # -- opening and ending -----------------------------------------------------------------------

    def greet(self, src: str, dst: str) -> None:
        """The caller's first frame."""
        self.write([Frame("hello", {"src": src, "dst": dst}).head()])

    def _first_frame(self, frame: Frame, _size: int) -> None:
        """The caller's hello, or the listener's welcome. Raises BadFrame for anything else."""
        if self._listener is None:
            if frame.kind != "welcome":
                raise BadFrame(f"{frame.kind!r} in place of a welcome")
        elif frame.kind != "hello" or frame["dst"] != self._listener:
            raise BadFrame(f"{frame.kind!r} in place of a hello to {self._listener}")
        else:
            self.stream = self._net.welcome(self, self._listener, frame["src"])
            self._net.known(self._number)
        if self._deadline is not None:
            self._deadline.cancel()
        assert self.stream is not None
        self._reader.only_small = False
        self._reader.on_frame = self.stream.take
        if not self.opened.done():
            self.opened.set_result(None)

    def _start_sink(self) -> None:
        if self._sink is None:
            self._sink = bytearray(_SCRATCH)
            self.resume()


class TcpNet(EmulatedNet):
    """`net.Net` over TCP. `addresses` (instance -> host, port) may be shared: `listen` adds to it,
    `connect` reads it.

    `host` is where this process listens. `strangers` counts connections that did not say hello.
    """

    def __init__(
        self,
        env: Env,
        topology: Topology,
        addresses: MutableMapping[str, tuple[str, int]] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(env, topology, look_ahead=LOOK_AHEAD, quantum=QUANTUM)
        self.addresses: MutableMapping[str, tuple[str, int]] = (
            {} if addresses is None else addresses
        )
        self._unknown: dict[int, _Socket] = {}
        self.buffers = Buffers(_PAYLOADS)
        self._host = host
        self._servers: dict[str, tuple[asyncio.Server, Accept]] = {}
        self._sockets: dict[int, _Socket] = {}
        self._numbers = itertools.count()

    async def listen(self, name: str, accept: Accept) -> None:
        """Raises CannotRun when the address cannot be had."""
        assert name in self.topology.sites
        assert name not in self._servers
        sock = loopback_socket()
        try:
            sock.bind((self._host, 0))
            server = await asyncio.get_running_loop().create_server(
                partial(_Socket, self, name), sock=sock, backlog=1024
            )
        except OSError as error:
            sock.close()
            raise CannotRun(f"{name} cannot listen on {self._host}: {error}") from None
        self._servers[name] = (server, accept)
        self.addresses[name] = (self._host, sock.getsockname()[1])

    def unlisten(self, name: str) -> None:
        if name in self._servers:
            self._servers.pop(name)[0].close()
            del self.addresses[name]

    async def connect(self, src: str, dst: str) -> Connection:
        """Raises LookupError for an instance the topology lacks, ConnectionLost if `dst` cannot be
        reached."""
        near = _Socket(self, None)
        near.stream = stream = Stream(self, src, dst, near)
        is_open = False
        try:
            if self.closed:
                raise ConnectionLost("the net was closed")
            await self._one_way(near, stream)
            if dst not in self.addresses:
                await self.env.sleep(self.direction(dst, src).delay_mean)
                raise ConnectionLost(f"{dst} does not listen")
            await self._dial(near, dst)
            near.greet(src, dst)
            await near.opened
            stream.check_open()
            is_open = True
        finally:
            if not is_open:
                near.abort()
        return stream

    async def _one_way(self, near: _Socket, stream: Stream) -> None:
        """The request to connect travels to the listener."""
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream.signal(partial(there.set_result, None))
        await asyncio.wait([there, near.closed], return_when=asyncio.FIRST_COMPLETED)
        stream.check_open()

    async def _dial(self, near: _Socket, dst: str) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.addresses[dst]
        sock = loopback_socket()
        taken = False
        try:
            await loop.sock_connect(sock, (host, port))
            await loop.create_connection(lambda: near, sock=sock)
            taken = True
        except OSError as error:
            raise ConnectionLost(f"{dst} cannot be reached at {host}:{port}: {error}") from None
        finally:
            if not taken:
                sock.close()
        assert near.stream is not None
        near.stream.check_open()  # the net may have been closed meanwhile

    # -- for the sockets --------------------------------------------------------------------------

    def register(self, end: _Socket) -> int:
        number = next(self._numbers)
        self._sockets[number] = end
        return number

    def forget(self, number: int) -> None:
        self._sockets.pop(number, None)

    def unknown(self, number: int, end: _Socket) -> None:
        """Somebody connected who has yet to say hello. Of too many the first must go: a caller of
        ours says it at once."""
        self._unknown[number] = end
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.pop(next(iter(self._unknown))).abort()

    def known(self, number: int) -> None:
        """It said hello, or is gone."""
        self._unknown.pop(number, None)

    def welcome(self, end: _Socket, name: str, src: object) -> Stream:
        """The stream of a caller that said hello to `name`; its welcome is on the way. Raises
        BadFrame."""
        if not isinstance(src, str) or src not in self.topology.sites:
            raise BadFrame(f"a hello from {src!r}, who is not in the topology")
        if name not in self._servers:
            raise BadFrame(f"{name} does not listen any more")
        stream = Stream(self, name, src, end)
        stream.signal(partial(end.write, [Frame("welcome").head()]))
        accept = self._servers[name][1]
        self.serve(accept, stream, f"{name} serves {src} #{next(self._numbers)}")
        return stream

    async def close(self) -> None:
        ends = list(self._sockets.values())
        await self.close_all([end.stream for end in ends if end.stream is not None])
        for end in ends:
            end.abort()
        servers = [server for server, _ in self._servers.values()]
        for server in servers:
            server.close()
        for name in self._servers:
            self.addresses.pop(name, None)
        self._servers.clear()
        for server in servers:
            await server.wait_closed()
        for end in ends:
            await end.closed


def loopback_socket() -> socket.socket:
    """A TCP socket with large buffers and, where the system has it, a congestion control that does
    not pace."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    for name in (b"cubic", b"reno"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break
        except (OSError, AttributeError):  # not allowed, or not Linux: the default will do
            continue
    return sock
