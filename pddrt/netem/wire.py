"""A connected socket of a relay: read when somebody wants to, written to as the kernel takes it.

Plain non-blocking calls in place of a transport: a half-close, a reset and what is still to be
written then are each other's business here, and no transport leaves them to its user.

Owns: the socket, what waits for room in it. Leaves out: what is read, and when (see `relay.Pipe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from itertools import islice

from pddrt.netem.toxics import Data

DEAD = OSError
"""Whatever else a socket says than that it has nothing, or no room, for now."""
_PIECES = 64
"""Buffers of one call."""
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """A connected socket: read by one pipe, written to by the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = loop
        self._fd = sock.fileno()
        self._pending: deque[Data] = deque()
        self._then: Callable[[], None] | None = None  # to do once nothing is pending
        self._writing = False
        self._dead = False
        self.reading = False
        self.pending = 0
        self.is_open = True
        self.on_readable: Callable[[], None] = lambda: None
        self.on_written: Callable[[int], None] = lambda _nbytes: None
        self.on_dead: Callable[[], None] = lambda: None

    # -- reading ----------------------------------------------------------------------------------

    def watch(self, wanted: bool) -> None:
        """Whether `on_readable` shall be called when there is something to read."""
        if wanted != self.reading and self.is_open:
            self.reading = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        self.on_readable()

    # -- writing ----------------------------------------------------------------------------------

    def write(self, data: Data, lasting: bool = True) -> None:
        """Sends `data`, now or as soon as the kernel takes it. `lasting`: it will not change."""
        if self._dead or not self.is_open:
            self.on_written(len(data))
            return
        sent = 0
        if not self._pending:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except DEAD:
                self._died(len(data))
                return
        if sent < len(data):
            rest = memoryview(data)[sent:]
            self._pending.append(rest if lasting else bytes(rest))
            self.pending += len(rest)
            self._watch_room(True)
        if sent:
            self.on_written(sent)

    def when_written(self, then: Callable[[], None]) -> None:
        """Calls `then` as soon as nothing is pending: at once, maybe."""
        if self._pending:
            self._then = then
        else:
            then()

    def shut(self) -> None:
        """Half-closes: nothing more is written."""
        if self._dead or not self.is_open:
            return
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except DEAD:
            self._died(0)

    def _watch_room(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)

    def _flush(self) -> None:
        try:
            sent = self.sock.sendmsg(list(islice(self._pending, _PIECES)))
        except (BlockingIOError, InterruptedError):
            return
        except DEAD:
            self._died(0)
            return
        self.pending -= sent
        left = sent
        while left:
            head = self._pending.popleft()
            if len(head) > left:
                self._pending.appendleft(memoryview(head)[left:])
                break
            left -= len(head)
        if not self._pending:
            self._watch_room(False)
            if self._then is not None:
                self._then()
        self.on_written(sent)

    def _died(self, nbytes: int) -> None:
        """The other side takes nothing any more: `nbytes` that were to be sent are lost too."""
        self._dead = True
        lost = nbytes + self._discard()
        if lost:
            self.on_written(lost)
        self.on_dead()

    # -- ending -----------------------------------------------------------------------------------

    def _discard(self) -> int:
        lost, self.pending = self.pending, 0
        self._pending.clear()
        if self._writing:
            self._watch_room(False)
        return lost

    def close(self, reset: bool = False) -> None:
        """Ends both ways. What is pending is lost; with `reset` the other side is told so."""
        if not self.is_open:
            return
        self.watch(False)
        self._discard()
        self.is_open = False
        if reset:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()
