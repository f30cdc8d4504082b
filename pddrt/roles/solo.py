"""An instance that serves requests alone: it computes the prompt and decodes to the end (pipelines
P and MD).

A request here: queued for memory > computing > answering > ended, and gone when the gateway closes
it. It is a sequence like any other: prompts in chunks and single decodes share a step, it grows as
it decodes, and who came last is preempted and rebuilt from its ids. No KV is sent and no KV comes.

Prefill instances and decoders are such instances that can do more; requests that are served alone
are known to this class only, and those of its subclasses only to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.messages import Limits, chain, finish, pack_logprobs
from pddrt.netem.net import Connection, Net
from pddrt.roles.instance import Instance, InstanceSpec
from pddrt.sched import Batch, Outcome, SequenceState
from pddrt.trace import PrefillEnded, PrefillStarted, TokensMade
from pddrt.types import Drawn, Letter, Ns, Sampling


@dataclass(slots=True)
class Serving:
    """A request that is served alone. `chain`: the digest of the answer so far."""

    request: str
    gateway: str
    ids: list[int]
    limits: Limits
    sampling: Sampling
    lease: Timer
    seq: SequenceState | None = None
    started: bool = False
    chain: int = 0


class Solo(Instance):
    def __init__(
        self, env: Env, net: Net, engine: Engine, spec: InstanceSpec, *, eos_ids: frozenset[int]
    ) -> None:
        super().__init__(env, net, engine, spec)
        self.eos_ids = eos_ids
        self._alone: dict[str, Serving] = {}
        self._unbegun: dict[str, Timer] = {}
        """Requests that must begin in time, and when that would be too late."""

    def here(self, request: str) -> bool:
        """Whether a request of that id waits here or holds anything."""
        return request in self._wanted or self.memory.holds(request)

    def on_generate(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: answer this prompt."""
        request, ids = frame["request"], unpack_ids(frame.payload)
        sampling = Sampling.of(frame["sampling"])
        limits = Limits.of(len(ids), frame["max_tokens"], self.eos_ids, sampling)
        if refusal := self.refusal(request, ids, limits.kv_tokens):
            self.tell_failed(conn.peer, request, f"{self.name}: {refusal}")
            return
        self._alone[request] = Serving(
            request=request,
            gateway=conn.peer,
            ids=ids,
            limits=limits,
            sampling=sampling,
            lease=self.env.call_at(
                self.env.now() + frame["lease_ns"],
                self.fail,
                request,
                f"lease expired on {self.name}",
            ),
        )
        tokens = min(limits.kv_tokens, limits.prompt_len + 1)
        self.must_begin(request, conn.peer, ids, frame["begin_ns"])
        self.wait_for_memory(request, ids, tokens, limit=len(ids) - 1)

    def heeds(self, peer: str, request: str) -> bool:
        entry = self._alone.get(request)
        return entry is None or peer == entry.gateway

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        if frame.kind in ("prefill", "generate"):
            self.tell_failed(conn.peer, request, detail)
        else:
            super().blame(conn, frame, request, detail)

    # -- what every request of an instance needs ---------------------------------------------------

    def refusal(self, request: str, ids: Sequence[int], kv_tokens: int) -> str | None:
        """Why a prompt that needs so many tokens of KV here is not taken; None if it is."""
        if self.here(request):
            return "a request of that id is here already"
        if not ids:
            return "the prompt is empty"
        if kv_tokens > self.spec.kv_tokens:
            return f"{kv_tokens} tokens of KV can never fit into {self.spec.kv_tokens}"
        return None

    def must_begin(self, request: str, gateway: str, ids: Sequence[int], within: Ns | None) -> None:
        """Its prompt should be computed `within` that time (None: whenever). So it must begin
        earlier by what that takes; where it alone takes longer, it may begin all the same.
        """
        if within is None:
            return
        lasts = self.pace.prompt * (len(ids) - self.memory.peek(ids))
        within = within - lasts if lasts < within else within
        due = self.env.now() + within
        self._unbegun[request] = self.env.call_at(due, self._too_late, request, gateway, within)

    def _too_late(self, request: str, gateway: str, waited: Ns) -> None:
        """The gateway refuses it, and closes it here."""
        del self._unbegun[request]
        self.post(gateway, "late", request=request, waited_ns=waited)

    def begun(self, request: str) -> None:
        """It is computed now, or never will be."""
        if timer := self._unbegun.pop(request, None):
            timer.cancel()

    def give_back(self, request: str) -> None:
        self.begun(request)
        super().give_back(request)

    def tell_failed(self, gateway: str, request: str, detail: str, by: str = "") -> None:
        """This request cannot go on here. `by`: whose fault it is, where it is not our own."""
        about = {"request": request, "detail": detail, "by": by or self.name}
        self.post(gateway, "failed", b"", **about)

    def tell_token(
        self, gateway: str, request: str, position: int, drawn: Drawn, source: Letter, after: int
    ) -> None:
        """The id at `position`, made by `source` behind ids with the digest `after`."""
        self.post(
            gateway,
            "tokens",
            pack_ids([drawn.token]),
            request=request,
            start=position,
            source=source,
            after=after,
            logprobs=pack_logprobs([drawn.logprobs]),
        )

    # -- steps; subclasses ask here for the requests that they do not know -------------------------

    def admitted(self, request: str, hit: int) -> None:
        entry = self._alone[request]
        entry.seq = SequenceState(
            request, list(entry.ids), hit, len(entry.ids), entry.sampling, limits=entry.limits
        )
        self.sched.add(entry.seq)
        self.wake()

    def step_began(self, batch: Batch) -> None:
        for span in batch.spans:
            entry = self._alone.get(span.request)
            if entry is not None and not entry.started:
                entry.started = True
                self.begun(entry.request)
                self.env.trace.emit(PrefillStarted(self.env.now(), entry.request, self.name))

    def stepped(self, outcome: Outcome) -> None:
        entry, position, drawn = self._alone[outcome.request], outcome.end, outcome.drawn
        if drawn is None:
            return
        token = drawn.token
        now, start = self.env.now(), entry.limits.prompt_len
        if position == start:
            self.env.trace.emit(PrefillEnded(now, entry.request, self.name))
        made = (entry.request, self.name, self.letter, position, position + 1, (token,))
        self.env.trace.emit(TokensMade(now, *made))
        about = (entry.gateway, entry.request, position)
        self.tell_token(*about, drawn, self.letter, entry.chain)
        if position == start:
            self.keep(entry.request, entry.ids[: self.memory.whole(start)])
        entry.chain = chain([token], entry.chain)
        if finish(entry.limits, position, token):
            self.sched.drop(entry.request)  # pages stay until the gateway closes the request

    # -- ends --------------------------------------------------------------------------------------

    def on_close(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the request is over."""
        entry = self._alone.get(frame["request"])
        if entry is not None and conn.peer == entry.gateway:
            self._end_alone(entry)

    def fail(self, request: str, detail: str) -> None:
        if entry := self._alone.get(request):
            self.tell_failed(entry.gateway, request, detail)
            self._end_alone(entry)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        super().peer_lost(conn, error)
        for entry in list(self._alone.values()):
            if conn.peer == entry.gateway:
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

    def _end_alone(self, entry: Serving) -> None:
        del self._alone[entry.request]
        entry.lease.cancel()
        if entry.seq is not None:
            self.keep(entry.request, entry.seq.ids[: entry.seq.computed])
        self.give_back(entry.request)

    def end_all(self) -> None:
        for entry in list(self._alone.values()):
            self._end_alone(entry)
        super().end_all()
