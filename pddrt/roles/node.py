"""What every role is made of: a named node with control streams to its peers, and, for instances, a
step loop.

`Node` listens under its name, dials its peers, and calls `on_<kind>` for each frame. Handlers are
plain functions: they decide and post, they never wait. Only four things wait: a reader of a
connection, the step loop, a KV transfer, the sending of a prompt (`post_when_room`).

Between two nodes runs one **control** stream; KV goes over **kv** streams of its own, so that
tokens and commands never queue behind it. The dialling side says which it is in the first frame,
`open`.

`Instance` adds the pool, the scheduler and the engine. It owns the pages; the engine owns the
tensors. A step pins the pages of its sequences until it has returned.

A frame that is not as `messages.MESSAGES` says, or a `PeerError` raised by a handler, ends the
request that the frame speaks of (`fail`), else the connection. Late frames for requests that are
gone are ignored by the handlers. Anything else that escapes is a bug and ends the run.

A peer that does not take its control frames is as good as lost: its connection is ended, and its
reader does what there is to do then.

A control stream that was lost is opened again by whoever opened it, as soon as the peer listens.
What was under way with that peer is over by then: each side ended it when it learnt of the loss.

`crash` is for experiments: a node that stops without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env, LocalEnv
from pddrt.errors import BadFrame, ConnectionLost, EngineFailed, PeerError
from pddrt.frames import Frame, unpack_ids
from pddrt.kv.memory import KVMemory
from pddrt.kv.pages import Change, ranges
from pddrt.kv.radix import CACHE
from pddrt.messages import MESSAGES, check_fields
from pddrt.netem.net import Connection, Net
from pddrt.roles.load import Load, Reports
from pddrt.sched import Admission, Batch, Outcome, Pace, Scheduler, SequenceState
from pddrt.trace import (
    Admitted,
    Freed,
    InstanceCrashed,
    Kept,
    Learnt,
    PagesEvicted,
    PagesFreed,
    PagesKept,
    PagesTaken,
    PageTable,
    PoolChecked,
    Preempted,
    Step,
    StepBegan,
    StepFailed,
)
from pddrt.types import LETTER, MS, SECOND, Ns, Role

Handler = Callable[[Connection, Frame], None]

REDIAL_FIRST: Ns = 50 * MS
REDIAL_LONGEST: Ns = SECOND
"""Between two attempts to reach a lost peer: from the one to the other, doubled each time, less up
to half of it at random, so that not all come at once when it is back."""
REDIALS = 10_000
"""Attempts; then it is given up (some two hours)."""


class Node:
    """A name on the net. Subclasses define `on_<kind>(conn, frame)`."""

    def __init__(self, env: Env, net: Net, name: str) -> None:
        self.env = env
        self.net = net
        self.name = name
        self.peers: dict[str, Connection] = {}
        self.hold: Callable[[], Awaitable[None]] | None = None
        """Awaited before each frame is handled, where somebody slows this node down."""
        self._connections: list[Connection] = []
        self._overrun: dict[str, PeerError] = {}
        self._dialled: list[str] = []
        self._redials: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    # -- starting and ending -----------------------------------------------------------------------

    async def start(self) -> None:
        """From here on others can connect. Also after a crash."""
        self._closing = False
        await self.net.listen(self.name, self._accept)

    async def dial(self, peers: Sequence[str]) -> None:
        """Opens a control stream to each of `peers`, which must be listening."""
        for peer in peers:
            await self._call(peer)

    async def _call(self, peer: str) -> None:
        conn = await self.open(peer, "control")
        self.peers[peer] = conn
        if peer not in self._dialled:
            self._dialled.append(peer)
        self.env.spawn(self._read(conn), f"{self.name} reads {peer}")
        self.peer_opened(peer)

    def redial(self, peers: Sequence[str]) -> None:
        """As `dial`, for peers that may not be listening: tries again until they are."""
        for peer in peers:
            if peer not in self._redials:
                redialling = self._redial(peer)
                self._redials[peer] = self.env.spawn(redialling, f"{self.name} redials {peer}")

    async def _redial(self, peer: str) -> None:
        rng, wait = self.env.rng(f"{self.name} redials {peer}"), REDIAL_FIRST
        for _ in range(REDIALS):
            await self.env.sleep(round(wait * rng.uniform(0.5, 1)))
            try:
                await self._call(peer)
                break
            except ConnectionLost:
                wait = min(2 * wait, REDIAL_LONGEST)
        del self._redials[peer]

    async def open(self, peer: str, purpose: str) -> Connection:
        conn = await self.net.connect(self.name, peer)
        if self._closing:
            conn.abort()
            raise ConnectionLost(f"{self.name} is closing")
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
        self._stop_redialling()

    def hang_up(self) -> None:
        """Ends every stream of this node, and does not listen. Nobody here hears of it."""
        self._closing = True
        self.net.unlisten(self.name)
        self._stop_redialling()
        self.peers.clear()
        for conn in self._connections:
            conn.abort()
        self._connections.clear()

    def _stop_redialling(self) -> None:
        for redialling in self._redials.values():
            redialling.cancel()
        self._redials.clear()

    def streams(self, peer: str) -> dict[Connection, str]:
        """The open streams to `peer`: control or kv."""
        control = self.peers.get(peer)
        open_now = [conn for conn in self._connections if conn.peer == peer]
        return {conn: "control" if conn is control else "kv" for conn in open_now}

    # -- frames ------------------------------------------------------------------------------------

    def post(self, peer: str, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Sends a control frame; nothing happens if the peer is gone (its reader has seen to
        that).
        """
        conn = self.peers.get(peer)
        if conn is None:
            return
        try:
            conn.post(Frame(kind, fields, payload))
        except PeerError as error:
            self._overrun[peer] = error
            conn.abort()

    def post_when_room(
        self, peer: str, wanted: Callable[[], bool], kind: str, payload: bytes, **fields: object
    ) -> None:
        """As `post`, for what carries a prompt: many of those would overrun what may be posted.

        Goes out as soon as the stream takes it, unless `wanted()` is over before it was begun. What
        is posted to `peer` afterwards stays behind it.
        """

        async def send() -> None:
            conn = self.peers.get(peer)
            if conn is not None and wanted():
                with contextlib.suppress(ConnectionLost):  # its reader has seen to that
                    await conn.send(Frame(kind, fields, payload))

        self.env.spawn(send(), f"{self.name} sends {kind} to {peer}")

    async def _accept(self, conn: Connection) -> None:
        if self._closing:
            conn.abort()
            return
        self._connections.append(conn)
        try:
            first = await conn.recv()
            if first.kind != "open":
                raise BadFrame(f"{conn.peer} began with {first.kind!r}")
            check_fields(first)
        except PeerError:
            self.drop(conn)
            return
        if self.hold is not None:
            await self.hold()
        if conn not in self._connections:
            return
        if first["purpose"] == "control":
            if before := self.peers.get(conn.peer):  # its end has not come here yet
                self._lost(before, ConnectionLost(f"{conn.peer} has opened another"))
            self.peers[conn.peer] = conn
            self.peer_opened(conn.peer)
        await self._read(conn)

    async def _read(self, conn: Connection) -> None:
        try:
            while True:
                frame = await conn.recv()
                if self.hold is not None:
                    await self.hold()
                    if conn not in self._connections:
                        continue  # it has ended meanwhile
                self._dispatch(conn, frame)
        except PeerError as error:
            self._lost(conn, error)

    def _lost(self, conn: Connection, error: PeerError) -> None:
        self.drop(conn)
        control = self.peers.get(conn.peer) is conn
        if control:
            del self.peers[conn.peer]
            error = self._overrun.pop(conn.peer, error)
        if not self._closing:
            (self.peer_lost if control else self.stream_lost)(conn, error)
            if control and conn.peer in self._dialled:
                self.redial([conn.peer])

    def _dispatch(self, conn: Connection, frame: Frame) -> None:
        handler: Handler | None = getattr(self, f"on_{frame.kind}", None)
        if handler is None or frame.kind not in MESSAGES:
            raise BadFrame(f"{conn.peer} sent a frame of unknown kind {frame.kind!r}")
        try:
            check_fields(frame)
            handler(conn, frame)
        except PeerError as error:
            request = frame.fields.get("request")
            if not isinstance(request, str):
                raise
            self.blame(conn, frame, request, f"{self.name}: {error}")

    def on_bye(self, conn: Connection, frame: Frame) -> None:
        """A peer leaves; nobody looks for it when its stream has ended."""
        if self.peers.get(conn.peer) is conn and conn.peer in self._dialled:
            self._dialled.remove(conn.peer)

    # -- for subclasses ----------------------------------------------------------------------------

    def peer_opened(self, peer: str) -> None:
        """A control stream to `peer` is open."""

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        """The control stream to `conn.peer` has ended, not by our will."""

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """A kv stream from `conn.peer` has ended; cancels end that way too."""

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        """`frame`, which speaks of `request`, is wrong. Whoever asked for something is answered."""
        self.fail(request, detail)

    def fail(self, request: str, detail: str) -> None:
        """This request cannot go on here."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is, as the scenario resolved it. `num_pages` follows from its KV memory.

    `life`: how often it has been started before, with another memory.
    """

    name: str
    role: Role
    page_tokens: int
    num_pages: int
    chunk_tokens: int
    max_batch: int
    caching: bool = True
    main_caching: bool = True
    """Whether main decoders keep prefixes, so that KV may be worth sending after the answer."""
    life: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a queued request waits for: room for `tokens`, and what is cached of `ids` to
    `limit`.
    """

    ids: Sequence[int]
    tokens: int
    limit: int | None


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
        self.memory = KVMemory(
            spec.num_pages,
            spec.page_tokens,
            engine.layout.fingerprint,
            caching=spec.caching,
            journal=self._book,
        )
        self.sched = Scheduler(
            spec.chunk_tokens,
            spec.max_batch,
            lambda request, end: self.memory.runs(request, 0, end),
            self._room,
        )
        self.admission = Admission(self._reserve)
        self.pace = Pace()
        self.reports = Reports(env, self.load, self.post)
        self._wanted: dict[str, Wanted] = {}
        self._preempted: dict[str, SequenceState] = {}
        self._lessons: dict[str, str] = {}
        """Answers being learnt: the owner of their pages, and the request they are of."""
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._stepping = self.env.spawn(self._step_loop(), f"{self.name} steps")

    async def close(self) -> None:
        """Ends what is under way here, then the streams, the steps and the engine."""
        self._closing = True
        self.end_all()
        self.reports.close()
        await super().close()
        self._wake.set()
        if self._stepping is not None:
            await asyncio.wait([self._stepping])
        await self.engine.close()

    async def leave(self) -> None:
        """Says good-bye, and hangs up when that is on its way. Nothing must be under way here; the
        engine stays.
        """
        self._closing = True
        self.reports.close()
        for peer in self.peers:
            self.post(peer, "bye")
        for conn in list(self._connections):
            with contextlib.suppress(ConnectionLost):  # it has hung up itself
                await conn.drain()
        self.hang_up()
        self.end_all()
        self._wake.set()
        if self._stepping is not None:
            await asyncio.wait([self._stepping])

    def crash(self, *, keep: bool) -> None:
        """Stops at once, without a word to anybody. With `keep` this instance can `start` again,
        with its prefix cache; else another can, on the same engine, once this one has `stopped`.
        """
        self.env.trace.emit(InstanceCrashed(self.env.now(), self.name, keep))
        if not keep:
            self.env = LocalEnv(self.env, silent=True)
        self.hang_up()
        self.end_all()
        self.reports.close()
        self._wake.set()

    async def stopped(self) -> None:
        """After a crash: returns when the engine has ended its last step."""
        if self._stepping is not None:
            await asyncio.wait([self._stepping])

    @property
    def running(self) -> bool:
        return not self._closing

    def peer_opened(self, peer: str) -> None:
        self.post(
            peer,
            "hello",
            role=self.spec.role,
            kv_tokens=self.spec.kv_tokens,
            page_tokens=self.spec.page_tokens,
            caching=self.spec.caching,
            max_context=self.engine.max_context,
            bytes_per_token=self.wire_bytes_per_token,
            max_batch=self.spec.max_batch,
            life=self.spec.life,
        )

    @property
    def wire_bytes_per_token(self) -> int:
        """Of KV that leaves here for a main decoder."""
        return self.engine.layout.bytes_per_token

    def on_hello(self, conn: Connection, frame: Frame) -> None:
        """An instance needs nothing from another's introduction; the gateway does."""

    def on_watch(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: it wants to know the load."""
        if self.peers.get(conn.peer) is conn:
            self.reports.watch(conn.peer, frame["age_ns"])

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        self.reports.forget(conn.peer)

    def load(self) -> Load:
        """What there is to do here now."""
        sequences = [s for s in self.sched.sequences.values() if not s.background]
        tokens = sum(wanted.tokens for wanted in self._wanted.values())
        tokens += sum(s.pending for s in sequences if s.computed < s.prompt_len)
        if self.spec.role == "prefill":  # its pages also hold what has only to be sent
            tokens += sum(len(s.ids) for s in sequences if s.computed >= s.prompt_len)
        else:
            tokens += self.memory.used * self.spec.page_tokens
        holding = len(self.memory.holders) - len(self._lessons)
        return Load(tokens, self.memory.used, len(self.admission), holding, self.pace.step)

    # -- KV memory ---------------------------------------------------------------------------------

    def wait_for_memory(
        self, request: str, ids: Sequence[int], tokens: int, limit: int | None = None
    ) -> None:
        """Queues `request` for `tokens` positions of KV, as much as is cached of `ids` among them
        (of `limit` tokens at most); `admitted` is called when it has them.
        """
        self._wanted[request] = Wanted(ids, tokens, limit)
        self.admission.add(request)
        self.reports.arrived(request)
        self._admit()

    def _reserve(self, request: str) -> bool:
        """A request that lacks room takes it from the lessons, the latest first."""
        wanted = self._wanted[request]
        if seq := self._preempted.get(request):  # it may have learnt ids since, or given some up
            wanted = Wanted(seq.ids, len(seq.ids), len(seq.ids) - 1)
        while not self.memory.reserve(request, wanted.ids, wanted.tokens, wanted.limit):
            idle = [x for x in self._lessons if not self.sched.sequences[x].in_step]
            if not idle:
                return False
            self._end_lesson(idle[-1])
        return True

    def _admit(self) -> bool:
        """Lets in whom there is room for; whether there was anybody."""
        if self._closing:
            return False
        admitted = self.admission.admit()
        for request in admitted:
            del self._wanted[request]
            self._copy_tail(request)
            holding = self.memory.holding(request)
            hit_bytes = holding.hit * self.engine.layout.bytes_per_token
            self.env.trace.emit(
                Admitted(self.env.now(), request, self.name, holding.own, holding.hit, hit_bytes)
            )
            if seq := self._preempted.pop(request, None):
                self._resume(seq, holding.hit)
            else:
                self.admitted(request, holding.hit)
        return bool(admitted)

    def _room(self, request: str, end: int) -> bool:
        """Room for `request` up to `end`, before it is stepped. Who came last gives way: lessons,
        then requests, `request` itself in the end. What a running step holds stays.
        """
        while not self.memory.grow(request, end):
            victim = next(
                (
                    s
                    for s in reversed(self.sched.sequences.values())
                    if not s.in_step and self.may_preempt(s.request)
                ),
                None,
            )
            if victim is None:
                return False
            if victim.request in self._lessons:
                self._end_lesson(victim.request)
            else:
                self.preempt(victim.request)
            if victim.request == request:
                return False
        return True

    def preempt(self, request: str) -> None:
        """Takes back the memory of a request that has begun; it waits at the head of the queue for
        its turn, and is then rebuilt by extending over its ids. What the cache still has of them by
        then need not be.
        """
        seq = self.sched.sequences[request]
        self.keep(request, seq.ids[: seq.computed])
        self.env.trace.emit(Preempted(self.env.now(), request, self.name, seq.computed))
        self.sched.drop(request)
        pages = self.memory.release(request)
        assert pages is not None
        self.env.trace.emit(Freed(self.env.now(), request, self.name, pages))
        self._wanted[request] = Wanted(seq.ids, len(seq.ids), len(seq.ids) - 1)
        self._preempted[request] = seq
        self.admission.add(request, first=True)

    def _resume(self, seq: SequenceState, hit: int) -> None:
        seq.computed = hit
        self.sched.add(seq)
        self.wake()

    def _copy_tail(self, request: str) -> None:
        """The last tokens of a hit that ends within a page go into the request's own page."""
        if copy := self.memory.tail(request):
            source, target = copy
            self.engine.write_kv(target, self.engine.read_kv(source))
            self.memory.copied(request)

    def keep(self, request: str, ids: Sequence[int]) -> None:
        """The KV of `ids`, which `request` has here, stays for others. See `KVMemory.keep`."""
        if not self.memory.holds(request):
            return  # it was preempted, and kept then
        if pages := self.memory.keep(request, ids):
            self.env.trace.emit(Kept(self.env.now(), request, self.name, pages, len(ids)))

    def give_back(self, request: str) -> None:
        """Takes `request` out of the queue, the scheduler and (when no step holds it) the
        memory.
        """
        self.sched.drop(request)
        if self.admission.drop(request):
            del self._wanted[request]
            self._preempted.pop(request, None)
            self.reports.changed()
            self._changed.set()
            self._admit()  # it may have held up others that fit
        else:
            self._freed(request, self.memory.release(request))

    def _freed(self, request: str, pages: int | None) -> None:
        if pages is not None:
            self.env.trace.emit(Freed(self.env.now(), request, self.name, pages))
            self.reports.changed()
            self._changed.set()
            self._admit()
            self.wake()  # some sequence may have lacked room

    def _book(self, change: Change, owner: str, pages: Collection[int]) -> None:
        """The memory's journal goes into the trace, page by page."""
        now, name, which = self.env.now(), self.name, tuple(ranges(pages))
        match change:
            case "taken":
                self.env.trace.emit(PagesTaken(now, name, owner, which))
            case "table":
                hit = self.memory.holding(owner).hit
                self.env.trace.emit(PageTable(now, name, owner, which, hit))
            case "kept":
                self.env.trace.emit(PagesKept(now, name, owner, which))
            case _ if owner == CACHE:
                self.env.trace.emit(PagesEvicted(now, name, which))
            case _:
                self.env.trace.emit(PagesFreed(now, name, owner, which, change == "over"))

    def occupy(self, owner: str, pages: int) -> int:
        """A stranger takes `pages` pages, or as many as nobody needs now; how many."""
        pages = min(pages, self.memory.num_pages - self.memory.used)
        room = pages * self.spec.page_tokens
        if not pages or not self.memory.reserve(owner, (), room, limit=0):
            return 0
        self.reports.changed()
        return pages

    def vacate(self, owner: str) -> None:
        """The stranger's pages can be had again."""
        if not self.memory.holds(owner):
            return
        self.memory.release(owner)
        self.reports.changed()
        self._changed.set()
        self._admit()
        self.wake()

    def check_memory(self) -> None:
        """After the run: records where every page is. Raises PoolCorrupt or CacheCorrupt if the
        books are wrong.
        """
        memory = self.memory
        self.env.trace.emit(
            PoolChecked(
                self.env.now(),
                self.name,
                memory.num_pages,
                memory.pool.free,
                memory.cached,
                memory.cached - memory.cache.evictable,
            )
        )
        memory.check()

    @property
    def empty(self) -> bool:
        """No request waits here or holds anything."""
        return not self.memory.holders and not len(self.admission)

    async def drained(self) -> None:
        """Returns when this instance is empty."""
        while not self.empty:
            self._changed.clear()
            await self._changed.wait()

    # -- lessons -----------------------------------------------------------------------------------

    def on_learn(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: a request has ended, and these are its ids but for the last."""
        self.learn(frame["request"], unpack_ids(frame.payload), frame["prompt_tokens"])

    def learn(self, request: str, ids: Sequence[int], prompt_tokens: int) -> None:
        """Computes what is lacking of the KV of `ids` when nothing else is to be done, and keeps
        it: the next turn then hits as much here as where the answer was made. Only the answer is
        learnt, over a prompt that is here. A lesson that does not fit, or is in the way, is
        dropped.
        """
        lesson = f"{request} (answer)"
        if not self.spec.caching or lesson in self._lessons or len(self.admission):
            return
        if self.memory.peek(ids) < self.memory.whole(prompt_tokens):
            return
        if not self.memory.reserve(lesson, ids, len(ids)):
            return
        self._copy_tail(lesson)
        hit = self.memory.holding(lesson).hit
        self._lessons[lesson] = request
        if hit == len(ids):
            self._end_lesson(lesson)
        else:
            seq = SequenceState(lesson, list(ids), hit, len(ids), sampling=None, background=True)
            self.sched.add(seq)
            self.wake()

    def _learnt(self, lesson: str) -> None:
        """A step of it has ended, perhaps the last."""
        seq = self.sched.sequences[lesson]
        if not seq.pending:
            self.memory.keep(lesson, seq.ids)
            self.env.trace.emit(
                Learnt(self.env.now(), self._lessons[lesson], self.name, len(seq.ids))
            )
            self._end_lesson(lesson)
            self._admit()

    def _end_lesson(self, lesson: str) -> None:
        del self._lessons[lesson]
        self.sched.drop(lesson)
        self.memory.release(lesson)
        self._changed.set()

    # -- steps -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to step."""
        self._wake.set()

    async def _step_loop(self) -> None:
        while not self._closing:
            if self.hold is not None:
                await self.hold()
                if not self.running:  # meanwhile: nobody will wake this loop again
                    return
            batch = self.sched.plan()
            if batch is None:
                if self._preempted and self._admit():
                    continue
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._step(batch)

    async def _step(self, batch: Batch) -> None:
        start = self.env.now()
        for span in batch.spans:
            self.memory.pin(span.request)
        spans = tuple((s.request, s.start, s.end) for s in batch.spans)
        self.env.trace.emit(StepBegan(start, self.name, spans))
        self.step_began(batch)
        try:
            next_ids = await self.engine.step(batch.spans)
        except EngineFailed as error:
            self._step_failed(batch, error)
            return
        if self.hold is not None:
            await self.hold()
        now = self.env.now()
        self.pace.note(batch, now - start)
        self.env.trace.emit(
            Step(
                now,
                self.name,
                start,
                len(batch.spans),
                batch.prefill_tokens,
                batch.extend_tokens,
                batch.decode_tokens,
                self.memory.used,
            )
        )
        self.reports.changed()
        outcomes = self.sched.apply(batch, next_ids)
        for span in batch.spans:
            self._freed(span.request, self.memory.unpin(span.request))
        for outcome in outcomes:
            if outcome.request in self._lessons:
                self._learnt(outcome.request)
            elif outcome.request in self.sched.sequences:  # else a lesson that just gave way
                self.stepped(outcome)

    def _step_failed(self, batch: Batch, error: EngineFailed) -> None:
        """Whatever was in the step ends, by name; the instance goes on with the others."""
        self.env.trace.emit(StepFailed(self.env.now(), self.name, str(error)))
        lost = self.sched.abandon(batch)
        for span in batch.spans:
            self._freed(span.request, self.memory.unpin(span.request))
        for request in lost:
            if request in self._lessons:
                self._end_lesson(request)
            else:
                self.fail(request, f"{self.name}: {error}")

    async def changed(self) -> None:
        """Returns when some request has ended here."""
        self._changed.clear()
        await self._changed.wait()

    # -- for subclasses ----------------------------------------------------------------------------

    def involves(self, peer: str) -> bool:
        """Whether a request that is here needs `peer`, or may be needed by it."""
        return False

    def end_all(self) -> None:
        """Every request here is over."""
        for lesson in list(self._lessons):
            self._end_lesson(lesson)

    def may_preempt(self, request: str) -> bool:
        """Whether the memory of `request`, or of a lesson, may be taken back for another's."""
        return True

    def admitted(self, request: str, hit: int) -> None:
        """`request` has its memory; the KV of its first `hit` tokens is there already."""
        raise NotImplementedError

    def step_began(self, batch: Batch) -> None:
        """A step with these spans is about to run."""

    def stepped(self, outcome: Outcome) -> None:
        """A step has ended for a request that is still here."""
        raise NotImplementedError
