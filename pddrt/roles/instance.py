"""What instances are made of: a node with an engine, the memory of its KV, and a step loop.

`Instance` owns the pages; the engine owns the tensors. A step pins the pages of its sequences until
it has returned. Requests queue for memory, in order; where it runs out in mid-answer, who came last
gives way and is rebuilt later. Of whatever makes room, the memory tells `_roomier`: that sees to
those that wait, so that nobody else has to. What the cache should know of an answer made elsewhere
is learnt when there is nothing else to do (lessons).

`crash` is for experiments: an instance that stops without a word.

What a request is, subclasses say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env, LocalEnv, Timer
from pddrt.errors import ConnectionLost, EngineFailed, PeerError
from pddrt.frames import Frame, unpack_ids
from pddrt.kv.memory import KVMemory
from pddrt.kv.pages import Change, ranges
from pddrt.kv.radix import CACHE
from pddrt.netem.net import Connection, Net
from pddrt.roles.load import Load, Reports
from pddrt.roles.node import Node
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
from pddrt.types import LETTER, Role


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
            roomier=self._roomier,
        )
        self.sched = Scheduler(
            spec.chunk_tokens,
            spec.max_batch,
            lambda request, end: self.memory.runs(request, 0, end),
            self._room,
        )
        self.admission = Admission(self._reserve)
        self._admitting: Timer | None = None
        """Those that wait for memory are looked at in this very instant."""
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

    def wanted_tokens(self, request: str) -> int:
        """Positions of KV for which `request`, which waits for memory, needs room."""
        seq = self._preempted.get(request)
        return self._wanted[request].tokens if seq is None else len(seq.ids)

    def _admit(self) -> None:
        """Lets in whom there is room for."""
        if self._admitting is not None:
            self._admitting.cancel()
            self._admitting = None
        if self._closing:
            return
        admitted = self.admission.admit()
        for request in admitted:
            del self._wanted[request]
            try:
                self._copy_tail(request)
            except EngineFailed as error:
                self._preempted.pop(request, None)
                self.fail(request, f"{self.name}: {error}")
                continue
            holding = self.memory.holding(request)
            hit_bytes = holding.hit * self.engine.layout.bytes_per_token
            self.env.trace.emit(
                Admitted(self.env.now(), request, self.name, holding.own, holding.hit, hit_bytes)
            )
            if seq := self._preempted.pop(request, None):
                self._resume(seq, holding.hit)
            else:
                self.admitted(request, holding.hit)

    def _roomier(self) -> None:
        """There is room in the memory that was not there, for those that wait or for a sequence
        that lacked it.
        """
        self._admit_soon()
        self.wake()

    def _admit_soon(self) -> None:
        """Somebody who waits may fit: there is more room, or less is wanted. Whoever saw to that is
        in the middle of something; the next step is planned after it.
        """
        if self._admitting is None and len(self.admission):
            self._admitting = self.env.call_at(self.env.now(), self._admit)

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
        self._admit_soon()  # it may have given way with more than was wanted of it

    def _resume(self, seq: SequenceState, hit: int) -> None:
        seq.computed = hit
        self.sched.add(seq)
        self.wake()

    def _copy_tail(self, request: str) -> None:
        """The last tokens of a hit that ends within a page go into the request's own page. Raises
        EngineFailed.
        """
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
            self._admit_soon()  # it may have held up others that fit
        else:
            self._freed(request, self.memory.release(request))

    def _freed(self, request: str, pages: int | None) -> None:
        if pages is not None:
            self.env.trace.emit(Freed(self.env.now(), request, self.name, pages))
            self.reports.changed()
            self._changed.set()

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
        try:
            self._copy_tail(lesson)
        except EngineFailed:  # nobody waits for it
            self.memory.release(lesson)
            return
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
        else:
            self._admit_soon()  # between two steps it gives way

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
            if self._admitting is not None:
                self._admit()
            batch = self.sched.plan()
            if batch is None:
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
