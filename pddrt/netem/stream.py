"""Streams: the connections of both nets, and what the nets do alike.

    send/post -> pending -> [ link: queue, share of the rate ] -> in propagation -> Carrier.write
    recv <- frames <- FrameReader <- bytes from the carrier

`EmulatedNet` holds the `Direction`s of a topology, `Stream` is the `Connection` a role sees. A net
supplies the `Carrier`: what happens to bytes that are due (memory: into the other end; sockets:
into the transport), and how an end learns of the other. All shaping is done by the sender, which
owns the bytes; the receiver shapes nothing.

**The window of a flow**, in bytes: a send buffer (see `flow`) handed over and not yet out of the
bottleneck, plus what is in propagation (unbounded by design: a bound there would make latency
throttle the rate), plus RECV_BUFFER arrived and not yet taken by `recv` (and, with sockets, what
the kernel holds). Once the receive buffer is over its bound the sender puts nothing more on the
link until it is not. `post` may queue POST_BUFFER beyond that.

**Ends.** `close` sends an end mark behind all that was handed over. `abort` drops what is pending
or queued, then sends the mark: what had left the bottleneck is on its way and still arrives, the
mark comes after it, one delay after the abort. The other end reads what arrived whole, then
ConnectionLost; from the moment the mark arrives its own sends fail and what it has queued is
dropped. An end that was closed or aborted receives nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pddrt.env import Env
from pddrt.errors import ConnectionLost, PeerError
from pddrt.frames import Frame
from pddrt.netem.fidelity import Kept
from pddrt.netem.flow import Direction, Load, join, law_of
from pddrt.netem.link import Flow
from pddrt.netem.net import Accept, LinkSpec, LinkStats, Topology, route
from pddrt.netem.series import Route
from pddrt.trace import LinkRate
from pddrt.types import Ns

RECV_BUFFER = 4 << 20
"""As the kernel's own default bound on a socket."""
POST_BUFFER = 1 << 20
"""Control frames are hundreds of bytes: this much queued means the peer has stopped reading."""

Buffer = bytes | memoryview


class Carrier(Protocol):
    """How bytes that are due reach the other end. None of these may call into the stream that calls
    them."""

    def write(self, pieces: list[Buffer]) -> None:
        """Bytes that are due now. The buffers never change."""
        ...

    def end(self) -> None:
        """The end mark is due. May come twice."""
        ...

    def pause(self) -> None:
        """The receive buffer is over its bound."""
        ...

    def resume(self) -> None: ...


class Outgoing:
    """A frame on its way into the link; `done` is set when the last piece is in (nobody waits for a
    post). While `held` neither it nor what is behind it goes on."""

    __slots__ = ("account", "done", "held", "kind", "left", "nbytes", "parts", "posted")

    def __init__(self, frame: Frame, done: asyncio.Future[None] | None) -> None:
        body = memoryview(frame.payload)
        head = frame.head()
        payload: Buffer = b""
        if isinstance(frame.payload, bytes):
            payload = frame.payload
        elif body.nbytes:
            payload = body.cast("B")
        self.parts: deque[memoryview] = deque(memoryview(p) for p in (head, payload) if len(p))
        self.nbytes = self.left = len(head) + len(payload)
        self.kind = frame.kind
        self.account = frame.account
        self.held = False
        self.done = done
        self.posted = 0 if done else self.nbytes
        if done is None:
            self.own()

    @property
    def begun(self) -> bool:
        return self.left < self.nbytes

    def own(self) -> None:
        """Copies what the sender may still change."""
        self.parts = deque(memoryview(_frozen(part)) for part in self.parts)

    def whole(self) -> bytes:
        """All of it, as long as it has not begun."""
        return b"".join(self.parts)

    def replace(self, whole: bytes) -> None:
        """Other bytes in its place, as long as it has not begun."""
        self.parts = deque([memoryview(whole)])
        self.nbytes = self.left = len(whole)

    def copy(self) -> Outgoing:
        """Another of the same bytes, which nobody waits for, and which no bound counts."""
        other = copy(self)
        other.parts, other.done, other.posted = deque(self.parts), None, 0
        other.own()
        return other

    def take(self, nbytes: int) -> list[Buffer]:
        """The next `nbytes`, as buffers that will not change."""
        taken: list[Buffer] = []
        self.left -= nbytes
        while nbytes:
            part = self.parts.popleft()
            if part.nbytes > nbytes:
                self.parts.appendleft(part[nbytes:])
                part = part[:nbytes]
            nbytes -= part.nbytes
            taken.append(_frozen(part))
        return taken


def _frozen(part: memoryview) -> Buffer:
    return part if isinstance(part.obj, bytes) else bytes(part)


@dataclass(slots=True)
class StreamStats:
    """What one end of a connection has done so far. Bytes are on the wire, headers and all."""

    opened: Ns
    sent_frames: int = 0
    sent_bytes: int = 0
    """Through the bottleneck: they arrive, unless this side's machine dies."""
    dropped_bytes: int = 0
    """Handed over, and lost when the stream ended: at most what was pending or queued."""
    received_frames: int = 0
    received_bytes: int = 0
    waited: Ns = 0
    """Of `send`s, for room in the send buffer."""
    blocked: Ns = 0
    """In which the other side took no more."""


class Stream:
    """One end of a connection: `net.Connection`, over a carrier. See the module for its window and
    its ends."""

    def __init__(self, net: EmulatedNet, name: str, peer: str, carrier: Carrier) -> None:
        """The end of `name`; the other is that of `peer`."""
        self.name = name
        self.peer = peer
        self._net = net
        self._direction = net.direction(name, peer)
        self.stats = StreamStats(net.env.now())
        self._carrier = carrier
        self._flow = Flow()
        self._pending: deque[Outgoing] = deque()
        self._queued = 0  # bytes in the link's queue
        self._posted = 0  # bytes of posts, pending or queued
        self._paused_since: Ns | None = None  # the other side takes no more for now
        self._closing = False
        self._marked = False
        self._lost: ConnectionLost | None = None  # set once nothing more can be sent
        self._drains: list[asyncio.Future[None]] = []
        self._frames: deque[tuple[Frame, int]] = deque()
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._end: PeerError | None = None  # what `recv` raises after the last frame

    # -- Connection -------------------------------------------------------------------------------

    async def send(self, frame: Frame) -> None:
        self.check_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        out = Outgoing(frame, done)
        self._put(out)
        if done.done():
            done.result()
            return
        since = self._net.env.now()
        try:
            await done
        except asyncio.CancelledError:
            self._desert(out)
            raise
        finally:
            self.stats.waited += self._net.env.now() - since

    def post(self, frame: Frame) -> None:
        if self._lost or self._closing:
            return
        out = Outgoing(frame, None)
        if self._posted + out.nbytes > POST_BUFFER:
            raise PeerError(
                f"{self.peer} does not take its control frames: {self._posted} bytes are queued, "
                f"{out.nbytes} more would exceed {POST_BUFFER}"
            )
        self._posted += out.nbytes
        self._put(out)

    async def recv(self) -> Frame:
        assert self._reader is None, "one reader at a time"
        while not self._frames:
            if self._end is not None:
                raise type(self._end)(*self._end.args)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame, size = self._frames.popleft()
        was_full = self._unread > RECV_BUFFER
        self._unread -= size
        if was_full and self._unread <= RECV_BUFFER:
            self._carrier.resume()
        return frame

    async def drain(self) -> None:
        if self._lost:
            raise ConnectionLost(*self._lost.args)
        if self._pending or self._queued:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drains.append(done)
            await done

    def abort(self) -> None:
        if self._lost is None:
            self._shut(ConnectionLost(f"the connection to {self.peer} was aborted on this side"))
            self.signal(self._carrier.end)
        self._stop_reading()

    async def close(self) -> None:
        if self._lost is None and not self._closing:
            self._closing = True
            self._mark_end()
            self._stop_reading()
        try:
            await self.drain()
        except ConnectionLost:
            return  # the peer ended it first: there is nobody left to send to
        if self._lost is None:
            self._lost = ConnectionLost(f"the connection to {self.peer} was closed on this side")

    # -- for the nets -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises ConnectionLost if nothing can be sent any more."""
        if self._lost is not None:
            raise ConnectionLost(*self._lost.args)
        if self._closing:
            raise ConnectionLost(f"the connection to {self.peer} was closed on this side")

    def signal(self, deliver: Callable[[], None]) -> None:
        """Calls `deliver` at the other end's side of the link, behind what is queued: a mark of no
        bytes."""
        self._direction.push(self._flow, "control", Load(0, 0, self._left, deliver))

    def take(self, frame: Frame, size: int) -> None:
        """A whole frame has arrived. After the end of this side it is dropped."""
        if self._end is not None:
            return
        was_full = self._unread > RECV_BUFFER
        self._frames.append((frame, size))
        self.stats.received_frames += 1
        self.stats.received_bytes += size
        self._unread += size
        if not was_full and self._unread > RECV_BUFFER:
            self._carrier.pause()
        self._wake_reader()

    def pause(self) -> None:
        """The carrier takes no more: nothing new goes on the link until `resume`."""
        if self._paused_since is None and self._lost is None:
            self._paused_since = now = self._net.env.now()
            self._direction.ledger.block(id(self), now)

    def resume(self) -> None:
        self._unblock()
        self._pump()

    def _unblock(self) -> None:
        if self._paused_since is not None:
            now = self._net.env.now()
            self.stats.blocked += now - self._paused_since
            self._paused_since = None
            self._direction.ledger.unblock(id(self), now)

    def lost(self, error: PeerError) -> None:
        """The other end is gone: `recv` raises `error` after what has arrived, sends fail from now
        on."""
        if self._end is None:
            self._end = error
            self._wake_reader()
        if self._lost is None:
            self._shut(ConnectionLost(*error.args))

    def broken(self, error: PeerError) -> None:
        """Nothing more can be read here: bytes arrived that are no frame, say. Ends the stream both
        ways."""
        mark = self._lost is None
        self.lost(error)
        if mark:
            self.signal(self._carrier.end)

    def let_go(self, out: Outgoing) -> None:
        """`out` is held no longer."""
        out.held = False
        self._pump()

    # -- the sending half -------------------------------------------------------------------------

    def _put(self, out: Outgoing) -> None:
        if self._net.tamper is None:
            self._queue(out)
        else:
            for one in self._net.tamper(self, out):
                self._queue(one)
        self._pump()

    def _queue(self, out: Outgoing) -> None:
        self._pending.append(out)
        self._direction.waiting += out.left

    def _pump(self) -> None:
        """Moves pending bytes into the link while there is room."""
        while self._pending and self._paused_since is None:
            out = self._pending[0]
            if out.held:
                return
            size = min(self._direction.load_bytes, out.left)
            if self._queued + size > self._direction.send_buffer:
                return
            pieces = out.take(size)
            whole = out.left == 0
            if whole:
                self._pending.popleft()
                self.stats.sent_frames += 1
                if out.done is not None and not out.done.done():
                    out.done.set_result(None)
            self._queued += size
            self._direction.waiting -= size
            deliver = partial(self._carrier.write, pieces)
            load = Load(size, out.posted if whole else 0, self._left, deliver)
            self._direction.push(self._flow, out.account, load)
        self._mark_end()

    def _mark_end(self) -> None:
        """Once closing, the end mark follows the last of what was handed over."""
        if self._closing and not self._marked and not self._pending:
            self._marked = True
            self.signal(self._carrier.end)

    def _left(self, load: Load) -> None:
        """A load of this stream is through the bottleneck."""
        self.stats.sent_bytes += load.nbytes
        if self._lost is not None:
            return
        self._queued -= load.nbytes
        self._posted -= load.posted
        self._pump()
        if not self._pending and not self._queued:
            self._settle_drains(None)

    def _desert(self, out: Outgoing) -> None:
        """The task that sends `out` was cancelled. What has begun must be sent whole, or the stream
        is lost."""
        if out in self._pending:
            if out.begun:
                out.own()
            else:
                self._pending.remove(out)
                self._direction.waiting -= out.left
                self._pump()

    def _shut(self, error: ConnectionLost) -> None:
        """Nothing more is sent; what has not left the bottleneck is dropped."""
        self._lost = error
        self._unblock()
        unsent = sum(out.left for out in self._pending)
        self.stats.dropped_bytes += unsent + self._queued
        self._direction.waiting -= unsent
        for out in self._pending:
            if out.done is not None and not out.done.done():
                out.done.set_exception(ConnectionLost(*error.args))
        self._pending.clear()
        self._direction.cancel(self._flow)
        self._settle_drains(error)

    def _settle_drains(self, error: ConnectionLost | None) -> None:
        drains, self._drains = self._drains, []
        for done in drains:
            if not done.done():
                done.set_exception(ConnectionLost(*error.args)) if error else done.set_result(None)

    # -- the receiving half -----------------------------------------------------------------------

    def _stop_reading(self) -> None:
        """This side has ended: what arrived is dropped, what arrives drains away."""
        if self._end is None or self._frames:
            self._end = ConnectionLost(f"the connection to {self.peer} was ended on this side")
            self._frames.clear()
            was_full, self._unread = self._unread > RECV_BUFFER, 0
            if was_full:
                self._carrier.resume()
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


Tamper = Callable[[Stream, Outgoing], Iterable[Outgoing]]
"""What becomes of a frame that a stream was given to send."""


class EmulatedNet:
    """A topology's directions, and what both nets do alike: `net.Net` but for listening and
    connecting."""

    def __init__(self, env: Env, topology: Topology, look_ahead: Ns, quantum: Ns | None) -> None:
        self.env = env
        self.topology = topology
        self.closed = False
        self.strangers = 0
        """Connections that were none of ours, and were dropped."""
        self.tamper: Tamper | None = None
        """What every frame goes through between its sender and the link (see `faults`)."""
        self._look_ahead = look_ahead
        self._quantum = quantum
        self._directions: dict[tuple[str, str, str], Direction] = {}
        for spec in topology.links:
            self._join(spec)
        self._ideal: dict[str, Direction] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def _join(self, spec: LinkSpec) -> None:
        """Both directions of a link, and what is known of their rates from the start."""
        ways = list(dict.fromkeys((spec.between, spec.between[::-1])))
        made = [self._make(spec.toward(*way), *way) for way in ways]
        for way, direction in zip(ways, made, strict=True):
            self._directions[spec.name, *way] = direction
        join(made[0], made[-1])
        peaks = [direction.peak_rate for direction in made]
        if len(set(peaks)) == 1:
            self.env.trace.emit(LinkRate(self.env.now(), spec.name, spec.between, peaks[0]))
        else:
            for way, peak in zip(ways, peaks, strict=True):
                self.env.trace.emit(LinkRate(self.env.now(), spec.name, way, peak, one_way=True))

    def _make(self, spec: LinkSpec, src: str, dst: str) -> Direction:
        law = law_of(spec, f"{self.env.seed}/netem/{spec.name}/{src}>{dst}")
        total = LinkStats(spec.name, src, dst)
        return Direction(self.env, law, total, self._look_ahead, self._quantum)

    # -- net.Net ----------------------------------------------------------------------------------

    def path_rate(self, src: str, dst: str) -> tuple[int | None, Ns]:
        spec = self.topology.link_between(src, dst)
        return (None, 0) if spec is None else (spec.rate, spec.delay)

    def path_backlog(self, src: str, dst: str) -> int:
        return self.direction(src, dst).backlog

    def moving(self) -> bool:
        return any(d.backlog and d.link.rate != 0 for d in self._directions.values())

    def stats(self) -> list[LinkStats]:
        return [direction.stats() for direction in self._directions.values()]

    def kept(self) -> list[Kept]:
        """How well this machine kept the times of each direction."""
        return [
            Kept(s.link, f"{s.src_site}>{s.dst_site}", d.peak_rate, s.bytes, s.busy, d.ledger)
            for d in self._directions.values()
            for s in (d.stats(),)
        ]

    # -- faults -----------------------------------------------------------------------------------

    def set_rate(self, link: str, rate: int | None, way: tuple[str, str] | None = None) -> None:
        """A new rate (bytes/s) for both directions of `link`, or that `way` between two sites, from
        now on. Raises LookupError."""
        directions = self._of_link(link, way)
        between = way or next(s.between for s in self.topology.links if s.name == link)
        self.env.trace.emit(LinkRate(self.env.now(), link, between, rate, way is not None))
        for direction in directions:
            direction.set_rate(rate)

    def set_delay(
        self, link: str, delay: Ns, jitter: Ns = 0, way: tuple[str, str] | None = None
    ) -> None:
        """A new delay for both directions of `link`, or that `way`, from now on. Raises
        LookupError, ValueError."""
        for direction in self._of_link(link, way):
            direction.set_delay(delay, jitter)

    def _of_link(self, link: str, way: tuple[str, str] | None) -> list[Direction]:
        found = [
            direction
            for (name, src, dst), direction in self._directions.items()
            if name == link and way in (None, (src, dst))
        ]
        if not found:
            raise LookupError(f"no link is called {link!r}" if way is None else f"{link}: {way}")
        return found

    # -- for the nets -----------------------------------------------------------------------------

    def direction(self, src: str, dst: str) -> Direction | Route:
        """What carries bytes from instance `src` to `dst`. Raises LookupError as the topology
        does."""
        spec = self.topology.link_between(src, dst)
        a, b = self.topology.sites[src], self.topology.sites[dst]
        if spec is None:
            if a not in self._ideal:
                self._ideal[a] = self._make(LinkSpec(f"inside {a}", (a, a), None, 0), a, a)
            return self._ideal[a]
        if (spec.name, a, b) in self._directions:
            return self._directions[spec.name, a, b]
        if (a, b) not in self._routes:
            hops, here = [], a
            for hop in route(self.topology.links, a, b):
                there = hop.between[hop.between[0] == here]
                hops.append(self._directions[hop.name, here, there])
                here = there
            self._routes[a, b] = Route(hops)
        return self._routes[a, b]

    def serve(self, accept: Accept, stream: Stream, name: str) -> None:
        """Runs the listener's coroutine for a new connection, as a task called `name`."""
        task = self.env.spawn(_serve(accept, stream), name)
        self._tasks[name] = task
        task.add_done_callback(lambda _task: self._tasks.pop(name, None) and None)

    async def close_all(self, streams: Iterable[Stream]) -> None:
        """Ends the streams, then the tasks that still serve one, then the directions."""
        self.closed = True
        for stream in streams:
            stream.lost(ConnectionLost("the net was closed"))
        tasks = [task for task in self._tasks.values() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for direction in (*self._directions.values(), *self._ideal.values()):
            direction.close()


async def _serve(accept: Accept, stream: Stream) -> None:
    """A failure of the peer ends its connection and nothing else."""
    try:
        await accept(stream)
    except PeerError:
        stream.abort()
