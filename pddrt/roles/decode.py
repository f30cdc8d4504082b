"""RLD and MD: the same worker with other duties.

Both take an offer from P, reserve pages, receive KV by token ranges, and decode; what each may do
when is decided by its half of `protocol` (`RelaySide`, `MainSide`). This shell executes: it writes
KV into pages, steps sequences, and carries messages.

Whoever first holds the whole KV and the first id (RLD, or MD in P-MD) delivers that id to the
gateway, marked P: until then the gateway has nothing to show. Ids go to the gateway as they are
made, by absolute position.

A request is admitted with room for its prompt and one token more; it grows as it decodes. Where
memory runs out, who came last is preempted and later rebuilt from its ids, here: P may have
forgotten its KV by then. What could not end even if it were alone is refused at the door.
"""

from __future__ import annotations

from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.netem.net import Connection, Net
from pddrt.protocol import (
    Action,
    Decode,
    Limits,
    MainSide,
    Manifest,
    Ready,
    RelaySide,
    SendIds,
    State,
)
from pddrt.roles.node import Instance, InstanceSpec
from pddrt.sched import Outcome, SequenceState
from pddrt.trace import (
    HandoffSent,
    HandoffTaken,
    KVReceived,
    KVWhole,
    MainReady,
    TokensMade,
)
from pddrt.types import Letter, Ns


@dataclass(slots=True)
class Decoding:
    """A request on a decoder."""

    manifest: Manifest
    prefill: str
    side: RelaySide | MainSide
    lease: Timer
    admitted: bool = False
    stream: Connection | None = None
    """Where its KV comes in."""
    answered: bool = False
    """The client has the whole answer; what still arrives is for the cache."""
    lesson: list[int] | None = None
    """Prompt and answer, to be learnt when the KV of the prompt is here."""
    seq: SequenceState | None = None

    @property
    def request(self) -> str:
        return self.manifest.request


class Decoder(Instance):
    """An RLD or an MD, as `spec.role` says."""

    def __init__(
        self,
        env: Env,
        net: Net,
        engine: Engine,
        spec: InstanceSpec,
        *,
        eos_ids: frozenset[int],
        lease: Ns,
    ) -> None:
        super().__init__(env, net, engine, spec)
        self.eos_ids = eos_ids
        self.lease = lease
        self._entries: dict[str, Decoding] = {}

    # -- admission ---------------------------------------------------------------------------------

    def on_offer(self, conn: Connection, frame: Frame) -> None:
        """From P: KV of this request will come, if we take it."""
        manifest = Manifest.parse(frame.fields, unpack_ids(frame.payload))
        limits = Limits(len(manifest.prompt), manifest.max_tokens, self.eos_ids)
        refusal = manifest.objection(self.engine.layout)
        if manifest.request in self._entries or self.memory.holds(manifest.request):
            refusal = "a request of that id is here already"
        elif self.name not in (manifest.relay, manifest.main):
            refusal = f"{self.name} has no part in it"
        elif not manifest.prompt:
            refusal = "the prompt is empty"
        elif manifest.gateway not in self.peers:
            refusal = f"{manifest.gateway} is out of reach: nobody could end it here"
        elif limits.kv_tokens > self.spec.kv_tokens:
            refusal = f"{limits.kv_tokens} tokens of KV can never fit into {self.spec.kv_tokens}"
        if refusal:
            self.post(
                conn.peer, "refuse", request=manifest.request, epoch=manifest.epoch, reason=refusal
            )
            return
        side = (
            RelaySide(limits)
            if manifest.relay == self.name
            else MainSide(limits, relayed=manifest.relay is not None)
        )
        lease = self.env.call_at(
            self.env.now() + self.lease,
            self.fail,
            manifest.request,
            f"lease expired on {self.name}",
        )
        self._entries[manifest.request] = Decoding(manifest, conn.peer, side, lease)
        tokens = min(limits.kv_tokens, limits.prompt_len + 1)
        self.wait_for_memory(manifest.request, manifest.prompt, tokens)

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        if frame.kind == "offer":
            epoch = frame.fields.get("epoch")
            self.post(conn.peer, "refuse", request=request, epoch=epoch, reason=detail)
        else:
            super().blame(conn, frame, request, detail)

    def admitted(self, request: str, hit: int) -> None:
        """Only what is not cached here will be sent; an empty transfer is a transfer, and whole."""
        entry = self._entries[request]
        entry.admitted = True
        self.post(entry.prefill, "admit", request=request, epoch=entry.manifest.epoch, have=hit)
        self._kv_arrived(entry, entry.side.on_kv(0, hit))

    # -- KV ----------------------------------------------------------------------------------------

    def _find(self, conn: Connection, frame: Frame) -> Decoding | None:
        """The request that P speaks of; None when it is gone, of another epoch or of another P."""
        entry = self._entries.get(frame["request"])
        if entry is None or (entry.prefill, entry.manifest.epoch) != (conn.peer, frame["epoch"]):
            return None
        return entry

    def on_kv(self, conn: Connection, frame: Frame) -> None:
        if entry := self._find(conn, frame):
            entry.stream = conn
            start, end, size = frame["start"], frame["end"], len(frame.payload)
            theirs = entry.manifest.layout
            if not entry.admitted or size != (end - start) * theirs.bytes_per_token:
                raise BadFrame(
                    f"{size} bytes are not the KV of [{start}, {end}) that was asked for"
                )
            # A range that is wrong is refused before it is written.
            actions = entry.side.on_kv(start, end)
            runs = self.memory.runs(entry.request, start, end)
            payload: bytes | memoryview = memoryview(frame.payload)
            if theirs.dtype != self.engine.layout.dtype:
                payload = self.engine.convert_kv(payload, theirs.dtype)
            self.engine.write_kv(runs, payload)
            self.env.trace.emit(
                KVReceived(self.env.now(), entry.request, self.name, start, end, len(frame.payload))
            )
            self._kv_arrived(entry, actions)

    def on_first(self, conn: Connection, frame: Frame) -> None:
        """From P, behind the KV: the id at position m."""
        if entry := self._find(conn, frame):
            if frame["position"] != entry.side.limits.prompt_len:
                raise BadFrame(f"a first id at {frame['position']}")
            self._kv_arrived(entry, entry.side.on_first(frame["id"]))

    def _kv_arrived(self, entry: Decoding, actions: list[Action]) -> None:
        side, manifest = entry.side, entry.manifest
        relayed_main = isinstance(side, MainSide) and side.relayed
        if side.kv.whole and (relayed_main or side.ids or entry.answered):
            self.env.trace.emit(
                KVWhole(self.env.now(), entry.request, self.name, side.limits.prompt_len)
            )
            self.keep(entry.request, manifest.prompt[: self.memory.whole(side.limits.prompt_len)])
            self.post(entry.prefill, "whole", request=entry.request, epoch=manifest.epoch)
            self.post(manifest.gateway, "whole", request=entry.request)
            if entry.answered:
                self._end(entry)
                return
            if not relayed_main:
                self._deliver(entry, side.limits.prompt_len, side.ids[0], "P")
        self._execute(entry, actions)

    # -- the handoff -------------------------------------------------------------------------------

    def on_ready(self, conn: Connection, frame: Frame) -> None:
        """RLD, from MD: it holds the whole KV."""
        entry = self._entries.get(frame["request"])
        if entry is None or not isinstance(entry.side, RelaySide):
            return
        if conn.peer != entry.manifest.main:
            raise BadFrame(f"{conn.peer} is not its main decoder")
        self.env.trace.emit(MainReady(self.env.now(), entry.request, self.name, conn.peer))
        in_step = entry.seq is not None and entry.seq.in_step
        self._execute(entry, entry.side.on_main_ready(in_step))

    def on_ids(self, conn: Connection, frame: Frame) -> None:
        """MD, from RLD: what it made meanwhile."""
        entry = self._entries.get(frame["request"])
        if entry is None or not isinstance(entry.side, MainSide):
            return
        if conn.peer != entry.manifest.relay:
            raise BadFrame(f"{conn.peer} is not its relay decoder")
        ids = unpack_ids(frame.payload)
        actions = entry.side.on_ids(frame["start"], ids, frame["last"])
        if frame["last"]:
            self.env.trace.emit(
                HandoffTaken(self.env.now(), entry.request, self.name, len(entry.side.ids))
            )
        self._execute(entry, actions)

    def _execute(self, entry: Decoding, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Decode(ids):
                    prompt = list(entry.manifest.prompt)
                    entry.seq = SequenceState(
                        entry.request,
                        prompt + list(ids),
                        len(prompt),
                        len(prompt),
                        entry.manifest.sampling,
                    )
                    self.sched.add(entry.seq)
                    self.wake()
                case Ready():
                    assert entry.manifest.relay is not None
                    self.post(entry.manifest.relay, "ready", request=entry.request)
                case SendIds(start, ids, last):
                    self.post(
                        entry.manifest.main,
                        "ids",
                        pack_ids(ids),
                        request=entry.request,
                        start=start,
                        last=last,
                    )
                    self.env.trace.emit(
                        HandoffSent(
                            self.env.now(),
                            entry.request,
                            self.name,
                            entry.manifest.main,
                            start,
                            start + len(ids),
                            last,
                        )
                    )
        if entry.side.state is State.HANDED:
            self._end(entry)

    # -- tokens ------------------------------------------------------------------------------------

    def stepped(self, outcome: Outcome) -> None:
        if outcome.next_id is None:
            return
        entry = self._entries[outcome.request]
        position, token, side = outcome.end, outcome.next_id, entry.side
        self.env.trace.emit(
            TokensMade(
                self.env.now(),
                entry.request,
                self.name,
                self.letter,
                position,
                position + 1,
                (token,),
            )
        )
        self._deliver(entry, position, token, self.letter)
        if isinstance(side, MainSide):
            if side.on_token(token):
                self.sched.drop(
                    entry.request
                )  # the pages stay until the gateway closes the request
            return
        actions, reason = side.on_token(token)
        if reason:
            self.sched.drop(entry.request)
        self._execute(entry, actions)

    def _deliver(self, entry: Decoding, position: int, token: int, source: Letter) -> None:
        self.post(
            entry.manifest.gateway,
            "tokens",
            pack_ids([token]),
            request=entry.request,
            start=position,
            source=source,
        )

    # -- ends --------------------------------------------------------------------------------------

    def on_close(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the request is over, whatever is left of it here. KV that is on its way
        to a main decoder's cache still arrives (see `Prefill.on_close`).
        """
        entry = self._entries.get(frame["request"])
        if entry is None or conn.peer != entry.manifest.gateway:
            return
        main, receiving = isinstance(entry.side, MainSide), entry.side.state is State.RECEIVING
        if frame["answered"] and main and receiving and self.spec.caching:
            entry.answered = True
        else:
            self._end(entry)

    def on_learn(self, conn: Connection, frame: Frame) -> None:
        entry = self._entries.get(frame["request"])
        if entry is not None and entry.answered:
            entry.lesson = unpack_ids(frame.payload)
        else:
            super().on_learn(conn, frame)

    def fail(self, request: str, detail: str) -> None:
        """P is told too, while it sends: the gateway may have forgotten a request that was
        answered.
        """
        if entry := self._entries.get(request):
            self.post(entry.manifest.gateway, "failed", request=request, detail=detail)
            if entry.side.state is State.RECEIVING:
                epoch = entry.manifest.epoch
                self.post(entry.prefill, "refuse", request=request, epoch=epoch, reason=detail)
            self._end(entry)

    def on_withdraw(self, conn: Connection, frame: Frame) -> None:
        """From P: its offer no longer stands. Whoever has the whole KV does not need P any more."""
        entry = self._find(conn, frame)
        if entry and entry.side.state is State.RECEIVING:
            self._end(entry)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for entry in list(self._entries.values()):
            needed = {entry.manifest.gateway}
            if entry.side.state is State.RECEIVING:
                needed.add(entry.prefill)
            if isinstance(entry.side, MainSide) and entry.side.state in (
                State.RECEIVING,
                State.READY,
            ):
                needed.add(entry.manifest.relay or entry.manifest.gateway)
            if conn.peer in needed:
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        for entry in list(self._entries.values()):
            if entry.stream is conn and entry.side.state is State.RECEIVING:
                self.fail(entry.request, f"{self.name} lost KV from {conn.peer}: {error}")

    def _end(self, entry: Decoding) -> None:
        del self._entries[entry.request]
        entry.lease.cancel()
        whole = entry.side.kv.whole
        entry.side.close()
        if entry.seq is not None:
            self.keep(entry.request, entry.seq.ids[: entry.seq.computed])
        elif whole:
            self.keep(entry.request, entry.manifest.prompt)
        self.give_back(entry.request)
        if entry.lesson is not None:
            self.learn(entry.request, entry.lesson, len(entry.manifest.prompt))

    def end_all(self) -> None:
        for entry in list(self._entries.values()):
            entry.lesson = None
            self._end(entry)
        super().end_all()
