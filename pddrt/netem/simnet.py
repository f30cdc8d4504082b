"""SimNet: the net in memory, for the virtual clock.

Frames are really encoded, cross as bytes, and are decoded by the same reader that sockets use:
nothing but immutable bytes is shared between two ends, and a frame's size on the link is its size
on the wire. A frame arrives at the instant its last byte is due. Opening a connection is a mark of
no bytes each way: the acceptor starts one delay after `connect`, which returns after two.

Deterministic: what happens at one instant happens in the order it was caused, and nothing is kept
in a set.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from pddrt.env import Env
from pddrt.errors import BadFrame, ConnectionLost
from pddrt.frames import FrameReader
from pddrt.netem.net import Accept, Connection, Topology
from pddrt.netem.stream import Buffer, EmulatedNet, Stream

_SCRATCH = 4 << 10


class _End:
    """One end of a connection, and the carrier of its stream: what is due goes straight into the
    far end."""

    def __init__(self, net: SimNet, name: str, peer: str, number: int) -> None:
        self.far: _End | None = None
        self.stream = Stream(net, name, peer, self)
        self._net = net
        self._number = number
        self._reader = FrameReader(self.stream.take, _SCRATCH)
        self._ended = False

    def write(self, pieces: list[Buffer]) -> None:
        if self.far is not None:
            self.far._receive(pieces)

    def end(self) -> None:
        if self.far is not None:
            self.far._receive_end()

    def pause(self) -> None:
        if self.far is not None:
            self.far.stream.pause()

    def resume(self) -> None:
        if self.far is not None:
            self.far.stream.resume()

    def _receive(self, pieces: list[Buffer]) -> None:
        if self._ended:
            return
        try:
            for piece in pieces:
                self._reader.feed(piece)
        except BadFrame as error:
            self._ended = True
            self.stream.broken(error)

    def _receive_end(self) -> None:
        where = " inside a frame" if self._reader.inside_frame and not self._ended else ""
        self._ended = True
        self.stream.lost(ConnectionLost(f"{self.stream.peer} ended the connection{where}"))
        self._net.forget(self._number)


class SimNet(EmulatedNet):
    """`net.Net` in memory. All instances of the topology live in this process."""

    def __init__(self, env: Env, topology: Topology) -> None:
        super().__init__(env, topology, look_ahead=0, quantum=None)
        self._listeners: dict[str, Accept] = {}
        self._numbers = itertools.count()
        self._streams: dict[int, list[Stream]] = {}
        self._opening: dict[int, asyncio.Future[None]] = {}

    async def listen(self, name: str, accept: Accept) -> None:
        assert name in self.topology.sites
        assert name not in self._listeners
        self._listeners[name] = accept

    def unlisten(self, name: str) -> None:
        self._listeners.pop(name, None)

    async def connect(self, src: str, dst: str) -> Connection:
        """Raises LookupError for an instance the topology lacks, ConnectionLost if `dst` does not
        listen."""
        number = next(self._numbers)
        near = _End(self, src, dst, number)
        if self.closed:
            raise ConnectionLost("the net was closed")
        self._streams[number] = [near.stream]
        opened = self._opening[number] = asyncio.get_running_loop().create_future()
        near.stream.signal(partial(self._arrive, near, src, dst, number))
        try:
            await opened
        except asyncio.CancelledError:
            near.stream.abort()
            raise
        finally:
            del self._opening[number]
        return near.stream

    def _arrive(self, near: _End, src: str, dst: str, number: int) -> None:
        """The request to connect is at `dst`, which answers."""
        far = _End(self, dst, src, number)
        accept = self._listeners.get(dst)
        far.stream.signal(partial(self._answered, number, dst, accept is not None))
        if accept is not None:
            near.far, far.far = far, near
            self._streams[number].append(far.stream)
            self.serve(accept, far.stream, f"{dst} serves {src} #{number}")

    def _answered(self, number: int, dst: str, accepted: bool) -> None:
        """The answer is back."""
        if not accepted:
            self.forget(number, f"{dst} does not listen")
        elif (opened := self._opening.get(number)) is not None and not opened.done():
            opened.set_result(None)

    def forget(self, number: int, why: str = "it was ended before it was open") -> None:
        """A connection has ended, on both sides. Who still waits for it to open is told `why`: the
        answer may have been dropped with all else that the other end had to send."""
        self._streams.pop(number, None)
        opened = self._opening.get(number)
        if opened is not None and not opened.done():
            opened.set_exception(ConnectionLost(why))

    async def close(self) -> None:
        for opened in self._opening.values():
            if not opened.done():
                opened.set_exception(ConnectionLost("the net was closed"))
        await self.close_all([stream for ends in self._streams.values() for stream in ends])
        self._listeners.clear()
        self._streams.clear()
