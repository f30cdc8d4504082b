"""What every role is made of: a named node with control streams to its peers, and, for instances, a
step loop.

`Node` listens under its name, dials its peers, and calls `on_<kind>` for each frame. Handlers are
plain functions: they decide and post, they never wait. Only three things wait: a reader of a
connection, the step loop, a KV transfer.

Between two nodes runs one **control** stream; KV goes over **kv** streams of its own, so that
tokens and commands never queue behind it. The dialling side says which it is in the first frame,
`open`.

`Instance` adds the pool, the scheduler and the engine. It owns the pages; the engine owns the
tensors. A step pins the pages of its sequences until it has returned.

A `PeerError` raised by a handler ends the request that the frame speaks of (`fail`), else the
connection. Late frames for requests that are gone are ignored by the handlers. Anything else that
escapes is a bug and ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import BadFrame, PeerError
from pddrt.frames import Frame
from pddrt.kv.pages import PagePool
from pddrt.netem.net import Connection, Net
from pddrt.sched import Admission, Batch, Outcome, Scheduler
from pddrt.trace import Admitted, Freed, PoolChecked, Step
from pddrt.types import LETTER, Ns, Role

Handler = Callable[[Connection, Frame], None]


class Node:
    """A name on the net. Subclasses define `on_<kind>(conn, frame)`."""

    def __init__(self, env: Env, net: Net, name: str) -> None:
        self.env = env
        self.net = net
        self.name = name
        self.peers: dict[str, Connection] = {}
        self._connections: list[Connection] = []
        self._closing = False

    # -- starting and ending -----------------------------------------------------------------------

    async def start(self) -> None:
        """From here on others can connect."""
        await self.net.listen(self.name, self._accept)

    async def dial(self, peers: Sequence[str]) -> None:
        """Opens a control stream to each of `peers`, which must be listening."""
        for peer in peers:
            conn = await self.open(peer, "control")
            self.peers[peer] = conn
            self.env.spawn(self._read(conn), f"{self.name} reads {peer}")
            self.peer_opened(peer)

    async def open(self, peer: str, purpose: str) -> Connection:
        conn = await self.net.connect(self.name, peer)
        self._connections.append(conn)
        conn.post(Frame("open", {"purpose": purpose}))
        return conn

    def drop(self, conn: Connection) -> None:
        """Ends one stream now; what has not left is lost."""
        conn.abort()
        if conn in self._connections:
            self._connections.remove(conn)

    async def close(self) -> None:
        """Ends every stream of this node. What was not over is lost."""
        self._closing = True
        for conn in self._connections:
            conn.abort()

    # -- frames ------------------------------------------------------------------------------------

    def post(self, peer: str, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Sends a control frame; nothing happens if the peer is gone (its reader has seen to
        that).
        """
        conn = self.peers.get(peer)
        if conn is not None:
            conn.post(Frame(kind, fields, payload))

    async def _accept(self, conn: Connection) -> None:
        self._connections.append(conn)
        try:
            first = await conn.recv()
            if first.kind != "open":
                raise BadFrame(f"{conn.peer} began with {first.kind!r}")
        except PeerError:
            self.drop(conn)
            return
        if first["purpose"] == "control":
            self.peers[conn.peer] = conn
            self.peer_opened(conn.peer)
        await self._read(conn)

    async def _read(self, conn: Connection) -> None:
        try:
            while True:
                self._dispatch(conn, await conn.recv())
        except PeerError as error:
            self.drop(conn)
            control = self.peers.get(conn.peer) is conn
            if control:
                del self.peers[conn.peer]
            if not self._closing:
                (self.peer_lost if control else self.stream_lost)(conn, error)

    def _dispatch(self, conn: Connection, frame: Frame) -> None:
        handler: Handler | None = getattr(self, f"on_{frame.kind}", None)
        if handler is None:
            raise BadFrame(f"{conn.peer} sent a frame of unknown kind {frame.kind!r}")
        try:
            handler(conn, frame)
        except PeerError as error:
            request = frame.fields.get("request")
            if not isinstance(request, str):
                raise
            self.fail(request, f"{self.name}: {error}")

    # -- for subclasses ----------------------------------------------------------------------------

    def peer_opened(self, peer: str) -> None:
        """A control stream to `peer` is open."""

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        """The control stream to `conn.peer` has ended, not by our will."""

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """A kv stream from `conn.peer` has ended; cancels end that way too."""

    def fail(self, request: str, detail: str) -> None:
        """This request cannot go on here."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is, as the scenario resolved it. `num_pages` follows from its KV memory."""

    name: str
    role: Role
    page_tokens: int
    num_pages: int
    chunk_tokens: int
    max_batch: int

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_tokens


class Instance(Node):
    """A node with an engine. Subclasses say what a request is (`_entries`) and what a step
    means.
    """

    def __init__(self, env: Env, net: Net, engine: Engine, spec: InstanceSpec) -> None:
        super().__init__(env, net, spec.name)
        assert spec.kv_tokens <= engine.num_slots
        self.spec = spec
        self.engine = engine
        self.letter = LETTER[spec.role]
        self.pool = PagePool(spec.num_pages, spec.page_tokens)
        self.sched = Scheduler(
            spec.chunk_tokens, spec.max_batch, lambda request, end: self.pool.runs(request, 0, end)
        )
        self.admission = Admission(self.pool.allocate)
        self.steps = 0
        self.busy: Ns = 0
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._stepping = self.env.spawn(self._step_loop(), f"{self.name} steps")

    async def close(self) -> None:
        await super().close()
        self._wake.set()
        if self._stepping is not None:
            await asyncio.wait([self._stepping])
        await self.engine.close()

    def peer_opened(self, peer: str) -> None:
        layout = self.engine.layout
        self.post(
            peer,
            "hello",
            role=self.spec.role,
            kv_tokens=self.spec.kv_tokens,
            max_context=self.engine.max_context,
            bytes_per_token=layout.bytes_per_token,
        )

    def on_hello(self, conn: Connection, frame: Frame) -> None:
        """An instance needs nothing from another's introduction; the gateway does."""

    # -- pages -------------------------------------------------------------------------------------

    def wait_for_pages(self, request: str, tokens: int) -> None:
        """Queues `request` for the pages of `tokens` slots; `admitted` is called when it has
        them.
        """
        self.admission.add(request, self.pool.pages_for(tokens))
        self._admit()

    def _admit(self) -> None:
        for request in self.admission.admit():
            pages = len(self.pool.pages_of(request))
            self.env.trace.emit(Admitted(self.env.now(), request, self.name, pages))
            self.admitted(request)

    def give_back_pages(self, request: str) -> None:
        """Takes `request` out of the queue, the scheduler and (when no step holds it) the pool."""
        self.sched.drop(request)
        if self.admission.drop(request):
            return
        pages = len(self.pool.pages_of(request))
        if self.pool.release(request):
            self._freed(request, pages)

    def _unpin(self, request: str) -> None:
        pages = self.pool.unpin(request)
        if pages:
            self._freed(request, pages)

    def _freed(self, request: str, pages: int) -> None:
        self.env.trace.emit(Freed(self.env.now(), request, self.name, pages))
        self._changed.set()
        self._admit()

    def check_pool(self) -> None:
        """After the run: records whether every page came back. Raises PoolCorrupt if the books are
        wrong.
        """
        self.pool.check()
        self.env.trace.emit(
            PoolChecked(self.env.now(), self.name, self.pool.num_pages, self.pool.free)
        )

    async def drained(self) -> None:
        """Returns when this instance holds no request and no page."""
        while self.pool.used or len(self.admission):
            self._changed.clear()
            await self._changed.wait()

    # -- steps -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to step."""
        self._wake.set()

    async def _step_loop(self) -> None:
        while not self._closing:
            batch = self.sched.plan()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._step(batch)

    async def _step(self, batch: Batch) -> None:
        start = self.env.now()
        for span in batch.spans:
            self.pool.pin(span.request)
        self.step_began(batch)
        next_ids = await self.engine.step(batch.spans)
        now = self.env.now()
        self.steps += 1
        self.busy += now - start
        self.env.trace.emit(
            Step(
                now,
                self.name,
                start,
                len(batch.spans),
                batch.prefill_tokens,
                batch.extend_tokens,
                batch.decode_tokens,
                self.pool.used,
            )
        )
        outcomes = self.sched.apply(batch, next_ids)
        for outcome in outcomes:
            self.stepped(outcome)
        for span in batch.spans:
            self._unpin(span.request)

    # -- for subclasses ----------------------------------------------------------------------------

    def admitted(self, request: str) -> None:
        """`request` has its pages."""
        raise NotImplementedError

    def step_began(self, batch: Batch) -> None:
        """A step with these spans is about to run."""

    def stepped(self, outcome: Outcome) -> None:
        """A step has ended for a request that is still here."""
        raise NotImplementedError
