"""Relaying one TCP connection of somebody else's program over an emulated link.

    client --> socket | pipe: toxics, then the link's direction | socket --> upstream
           <--        |                                         |        <--

A `Pipe` is one direction of one connection. It reads what the link has room for, puts it on the
link as one load and writes it to the other socket when it is due. Ends travel the same way: a
half-close or a reset reaches the other side behind the data before it, one link delay later.

**The handshake** is delayed too: the request reaches the upstream one delay after the client was
accepted, and the client is not read before the answer is back. (The kernel has accepted the client
by then: its `connect` returns early, its first byte does not leave early.)

**What is held is bounded.** Of each pipe, in bytes: what waits for the link's rate (`Direction.
send_buffer`); what is on its way (`in_flight_bound`: twice what fits into the link, so that latency
does not throttle the rate); and of all pipes together `Hold.limit`. Beyond it the source is not
read, so that the kernel slows its sender down. A sink that does not take its data stops its source
as well.

A link without rate, delay and toxics is no reason to copy: bytes go from one socket to the other
through one buffer.

Owns: two sockets (each a `wire.Wire`), what is held between them. Leaves out: listening, and which
toxics there are (see `proxy`).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Literal

from pddrt.env import Env
from pddrt.netem.flow import Direction, Load
from pddrt.netem.link import Flow, Link
from pddrt.netem.toxics import Data, End, Stage, Toxic
from pddrt.netem.wire import DEAD, Wire
from pddrt.types import SECOND, Ns

SINK_BOUND = 1 << 20
"""Bytes that wait for a socket beyond which its source is not read."""
IN_FLIGHT_LEAST, IN_FLIGHT_UNLIMITED = 4 << 20, 64 << 20
MOST_READ = 256 << 10
TURNS = 8
"""Reads of one socket before others have their turn."""


class Hold:
    """Bytes held by all pipes of a process together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._starved: deque[Pipe] = deque()

    def add(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        while nbytes < 0 and self._starved and self.held < self.limit:
            self._starved.popleft().wanted()

    def wait(self, pipe: Pipe) -> None:
        if pipe not in self._starved:
            self._starved.append(pipe)

    def forget(self, pipe: Pipe) -> None:
        if pipe in self._starved:
            self._starved.remove(pipe)


class Pipe:
    """One direction of a connection. A `toxics.Pipe`, and the end of its own chain of stages."""

    def __init__(
        self, relayed: Relayed, direction: Direction, hold: Hold, scratch: memoryview
    ) -> None:
        self.env: Env = relayed.env
        self.stages: list[Stage] = []
        self.read = 0
        self.written = 0
        self.passed = 0
        """Bytes that were handed to the sink: read ones may be held, or lost at the end."""
        self.started = False
        """Whether the source may be read: after the handshake."""
        self.finished = False
        """Whether the sink was told of the end."""
        self._relayed = relayed
        self._direction = direction
        self._hold = hold
        self._scratch = scratch
        self._flow = Flow()
        self._source: Wire | None = None
        self._sink: Wire | None = None
        self._waiting = 0  # for the rate of the link, or of a toxic
        self._on_link = 0  # loads and marks that are not due yet
        self._parcels: deque[Data] = deque()  # on the link, in order
        self._ended = False  # the source has nothing more
        self._failed = False  # and was reset
        self._over = False
        self._blocked = False
        self._pumping = False
        self._pump_soon = False

    def join(self, source: Wire, sink: Wire) -> None:
        self._source, self._sink = source, sink
        source.on_readable = self._pump
        sink.on_written = self._on_written
        sink.on_dead = self._relayed.sink_died(self)

    def start(self) -> None:
        self.started = True
        self._pump()

    @property
    def held(self) -> int:
        return self.read - self.written

    # -- reading ----------------------------------------------------------------------------------

    def wanted(self) -> None:
        """There may be room again. Where there are stages this may come from within one of them,
        and what is read now would overtake what that one has in hand: later, then."""
        if self._over:
            return
        if not self.stages:
            self._pump()
        elif not self._pump_soon:
            self._pump_soon = True
            asyncio.get_running_loop().call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._pump_soon = False
        self._pump()

    def _pump(self) -> None:
        """Reads while there is something to read and room to keep it."""
        if self._pumping or not self.started or self._ended or self._over:
            return
        assert self._source is not None
        self._pumping = True
        try:
            wanted = self._read_some(self._source.sock)
        finally:
            self._pumping = False
        if not self._over:
            self._source.watch(wanted and not self._ended)

    def _read_some(self, sock: socket.socket) -> bool:
        """Whether to go on when there is more."""
        for _ in range(TURNS):
            room, plain = self._room(), self._plain
            if room <= 0:
                return False
            try:
                if plain:
                    data: Data = self._scratch[: sock.recv_into(self._scratch)]
                else:
                    data = sock.recv(min(room, self._direction.load_bytes, MOST_READ))
            except (BlockingIOError, InterruptedError):
                return True
            except DEAD:
                self._finish("reset")
                return False
            if not len(data):
                self._finish("fin")
                return False
            self.read += len(data)
            self._hold.add(len(data))
            if plain:
                assert self._sink is not None
                self._sink.write(data, lasting=False)
            else:
                self._first.feed(data)
            if self._over:
                return False
        return True

    def _room(self) -> int:
        assert self._sink is not None
        if self._sink.pending > (0 if self._plain else SINK_BOUND):
            self._block(True)
            return 0
        if self._hold.held >= self._hold.limit:
            self._hold.wait(self)
            return 0
        room = self._direction.send_buffer - self._waiting
        return min(room, in_flight_bound(self._direction) - self.held)

    def _block(self, blocked: bool) -> None:
        if blocked != self._blocked:
            self._blocked = blocked
            ledger, now = self._direction.ledger, self.env.now()
            (ledger.block if blocked else ledger.unblock)(id(self), now)

    @property
    def _plain(self) -> bool:
        """Nothing is to be done with what comes in, and nothing is ahead of it."""
        return not self.stages and not self._on_link and is_nothing(self._direction)

    @property
    def _first(self) -> Stage | Pipe:
        return self.stages[0] if self.stages else self

    def _finish(self, how: End) -> None:
        """The source has ended."""
        self._ended = True
        self._failed = how == "reset"
        if self._source is not None:
            self._source.watch(False)
        self._first.end(how)

    def fail(self) -> None:
        """The source is known to be gone, though nothing was read that says so."""
        if not self._failed:
            self._finish("reset")

    # -- through the link: as the last of the stages ----------------------------------------------

    def feed(self, data: Data) -> None:
        self._waiting += len(data)
        self._on_link += 1
        self._parcels.append(data)
        load = Load(len(data), 0, self._left, self._deliver)
        self._direction.push(self._flow, "data", load)

    def end(self, how: End) -> None:
        self.mark(lambda: self._deliver_end(how))

    def mark(self, deliver: Callable[[], None]) -> None:
        """Calls `deliver` when all that was put on the link before is through, one delay later."""
        self._on_link += 1

        def due() -> None:
            self._on_link -= 1
            deliver()

        self._direction.push(self._flow, "data", Load(0, 0, self._left, due))

    def _left(self, load: Load) -> None:
        self._waiting -= load.nbytes
        if load.nbytes:
            self.wanted()

    def _deliver(self) -> None:
        self._on_link -= 1
        if not self._over:
            assert self._sink is not None
            self._sink.write(self._parcels.popleft())

    def _on_written(self, nbytes: int) -> None:
        if self._over:
            return
        self.written += nbytes
        self.passed += nbytes
        self._hold.add(-nbytes)
        assert self._sink is not None
        assert self._source is not None
        if self._blocked and self._sink.pending <= SINK_BOUND:
            self._block(False)
        if not self._source.reading:
            self.wanted()

    def _deliver_end(self, how: End) -> None:
        if self._over:
            return
        if how == "reset":
            self._relayed.kill(reset=True)
        else:
            assert self._sink is not None
            self._sink.when_written(self._end_sink if how == "fin" else self._relayed.finish)

    def _end_sink(self) -> None:
        assert self._sink is not None
        self._sink.shut()
        self.finished = True
        self._relayed.end_if_done()

    # -- for stages -------------------------------------------------------------------------------

    def hold_back(self, nbytes: int) -> None:
        self._waiting += nbytes
        if nbytes < 0:
            self.wanted()

    def kill(self, reset: bool) -> None:
        self._relayed.kill(reset)

    def add(self, stage: Stage) -> None:
        if self.stages:
            self.stages[-1].next = stage
        stage.next = self
        self.stages.append(stage)

    def remove(self, name: str) -> None:
        for i, stage in enumerate(self.stages):
            if stage.toxic.name == name:
                stage.release()  # while it is one of the stages: see `wanted`
                self.stages.remove(stage)
                if i:
                    self.stages[i - 1].next = stage.next
                self.wanted()
                return

    def change(self, toxic: Toxic) -> None:
        for stage in self.stages:
            if stage.toxic.name == toxic.name:
                stage.change(toxic)

    def drop(self) -> None:
        """The connection is over: nothing is held any more."""
        if self._over:
            return
        self._over = True
        self._block(False)
        self._direction.cancel(self._flow)
        for stage in self.stages:
            stage.drop()
        self._parcels.clear()
        self._hold.add(-self.held)
        self.written = self.read
        self._hold.forget(self)


def is_nothing(direction: Direction) -> bool:
    """Whether the link neither limits nor delays."""
    link = direction.link
    return (
        isinstance(link, Link) and link.cap is None and link.trace is None and not link.delay.mean
    )


def in_flight_bound(direction: Direction) -> int:
    """Bytes of one pipe that may be held: what fits into the link twice over, and its queue."""
    rate = direction.peak_rate
    if rate is None:
        return IN_FLIGHT_UNLIMITED
    delay = direction.delay_mean + 4 * direction.link.delay.jitter
    return max(2 * rate * delay // SECOND, IN_FLIGHT_LEAST) + direction.send_buffer


State = Literal["opening", "open", "over"]


class Relayed:
    """One connection: two sockets, two pipes."""

    def __init__(
        self,
        env: Env,
        client: socket.socket,
        up: Direction,
        down: Direction,
        hold: Hold,
        scratch: memoryview,
        on_over: Callable[[Relayed], None],
    ) -> None:
        self.env = env
        self.state: State = "opening"
        self.since: Ns = env.now()
        self.up = Pipe(self, up, hold, scratch)
        self.down = Pipe(self, down, hold, scratch)
        self._loop = asyncio.get_running_loop()
        self._client = Wire(self._loop, client)
        self._upstream: Wire | None = None
        self._on_over = on_over

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        return self.up, self.down

    def begin(self, dial: Callable[[], None]) -> None:
        """The request to connect travels; `dial` is called when it is at the upstream."""

        def there() -> None:
            if self.state == "opening":
                dial()

        self.up.mark(there)

    def opened(self, upstream: socket.socket) -> None:
        """The upstream has accepted: it may speak, and its answer travels."""
        if self.state == "over":
            upstream.close()
            return
        self.state = "open"
        self._upstream = Wire(self._loop, upstream)
        self.up.join(self._client, self._upstream)
        self.down.join(self._upstream, self._client)

        def back() -> None:
            if self.state == "open":
                self.up.start()

        self.down.mark(back)
        self.down.start()

    def refused(self) -> None:
        """The upstream cannot be reached: the answer travels."""
        self.down.mark(lambda: self.kill(reset=True))

    def sink_died(self, pipe: Pipe) -> Callable[[], None]:
        """What happens when the sink of `pipe` takes nothing any more: the news travels the other
        way."""
        other = self.down if pipe is self.up else self.up
        return other.fail

    def end_if_done(self) -> None:
        if self.up.finished and self.down.finished:
            self.kill(reset=False)

    def finish(self) -> None:
        """One direction says that all of it is over, in its place."""
        self.kill(reset=False)

    def kill(self, reset: bool) -> None:
        """Ends both sides now."""
        if self.state == "over":
            return
        self.state = "over"
        for pipe in self.pipes:
            pipe.drop()
        for wire in (self._client, self._upstream):
            if wire is not None:
                wire.close(reset)
        self._on_over(self)
