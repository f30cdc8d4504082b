"""What both decoders do with a request but for the handoff: take it, receive its KV, let it go.

An offer from P is admitted when there are pages for the prompt and one token more; what could not
end even if it were alone is refused at the door. KV comes by token ranges, as much as is not cached
here. Whoever first holds all of it and the first id (RLD, or MD in P-MD) delivers that id to the
gateway, marked P: until then the gateway has nothing to show.

Who loses its peer decoder does not end the request: a relay decodes on by itself, a main decoder
waits for the gateway to say how the answer goes on (`takeover`); both say that they have lost it.

How long KV queues, in P or on the way, is no sign of anything. But once P has said that all of it
has left (`sent`), what is missing is in propagation, or lost: where nothing more has come for as
long as a living peer may be silent, the request fails here, by P's fault.

A request ends here by the gateway's close, by what befell it, or when it has been handed over; its
pages are then kept for the cache or given back. `decode` has what happens in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, EngineFailed, PeerError
from pddrt.frames import Frame, unpack_ids
from pddrt.messages import Limits, Manifest, unpack_logprobs
from pddrt.netem.net import Connection, Net
from pddrt.policy.handoff import Facts
from pddrt.protocol import HANDS_OVER, Action, MainSide, RelaySide, State
from pddrt.roles.instance import InstanceSpec
from pddrt.roles.solo import Solo
from pddrt.sched import SequenceState
from pddrt.trace import KVReceived, KVWhole
from pddrt.types import SECOND, Drawn, Letter, Logprobs, Ns

WORD_TIME: Ns = SECOND
"""How long after the end of a KV stream P may take to say why."""


@dataclass(slots=True)
class Decoding:
    """A request on a decoder."""

    manifest: Manifest
    prefill: str
    side: RelaySide | MainSide
    lease: Timer | None = None
    """From when it has memory on; before that P's own is what ends it."""
    admitted: bool = False
    stream: Connection | None = None
    """Where its KV comes in."""
    silence: Timer | None = None
    """Ends the wait for KV that has left P."""
    answered: bool = False
    """The client has the whole answer; what still arrives is for the cache."""
    told_of_first: Logprobs | None = None
    """What P said of the first id, which is delivered here."""
    lesson: list[int] | None = None
    """Prompt and answer, to be learnt when the KV of the prompt is here."""
    seq: SequenceState | None = None
    main_step: Ns = 0
    main_token: Ns = 0
    """The main decoder's pace, as it last said."""
    asked: Facts | None = None
    """What the handoff policy saw last."""
    overdue: Timer | None = None
    """Ends the wait for an answer to a piece."""
    parted: bool = False
    """A relay: its main decoder is out of reach, and what that says is not asked for."""
    early: dict[str, Frame] = field(default_factory=dict)
    """A relay: who is ready though the gateway has not said that it is the main decoder."""

    @property
    def request(self) -> str:
        return self.manifest.request

    @property
    def in_step(self) -> bool:
        return self.seq is not None and self.seq.in_step

    @property
    def coming(self) -> bool:
        """A running step will yield an id."""
        return self.seq is not None and self.seq.coming


class Receiver(Solo):
    """A decoder as far as P and the gateway see it."""

    def __init__(
        self,
        env: Env,
        net: Net,
        engine: Engine,
        spec: InstanceSpec,
        *,
        eos_ids: frozenset[int],
        lease: Ns,
        silence: Ns,
    ) -> None:
        """`silence`: how long KV that has left P may take to arrive, after what came before it."""
        super().__init__(env, net, engine, spec, eos_ids=eos_ids)
        self.lease = lease
        self._silence = silence
        self._entries: dict[str, Decoding] = {}

    # -- for subclasses ----------------------------------------------------------------------------

    def side(self, manifest: Manifest, limits: Limits) -> RelaySide | MainSide:
        """This decoder's half of the protocol for a request."""
        raise NotImplementedError

    def execute(self, entry: Decoding, actions: list[Action]) -> None:
        """Does what the request's side asks for."""
        raise NotImplementedError

    # -- admission ---------------------------------------------------------------------------------

    def on_offer(self, conn: Connection, frame: Frame) -> None:
        """From P: KV of this request will come, if we take it."""
        manifest = Manifest.parse(frame.fields, unpack_ids(frame.payload))
        asked = (manifest.max_tokens, self.eos_ids, manifest.sampling)
        limits = Limits.of(len(manifest.prompt), *asked)
        refusal = manifest.objection(self.engine.layout)
        if self.here(manifest.request):
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
        side = self.side(manifest, limits)
        self._entries[manifest.request] = Decoding(manifest, conn.peer, side)
        tokens = min(limits.kv_tokens, limits.prompt_len + 1)
        self.wait_for_memory(manifest.request, manifest.prompt, tokens)
        if manifest.request in self._wanted:
            self.post(conn.peer, "noted", request=manifest.request, epoch=manifest.epoch)

    def heeds(self, peer: str, request: str) -> bool:
        if entry := self._entries.get(request):
            about = entry.manifest
            return peer in (entry.prefill, about.gateway, about.relay, about.main)
        return super().heeds(peer, request)

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        if frame.kind == "offer":
            epoch = frame.fields.get("epoch")
            self.post(conn.peer, "refuse", request=request, epoch=epoch, reason=detail)
        else:
            super().blame(conn, frame, request, detail)

    def admitted(self, request: str, hit: int) -> None:
        """Only what is not cached here will be sent; an empty transfer is a transfer, and whole."""
        if request in self._alone:
            super().admitted(request, hit)
            return
        entry = self._entries[request]
        entry.admitted = True
        expires, why = self.env.now() + self.lease, f"lease expired on {self.name}"
        entry.lease = self.env.call_at(expires, self.fail, request, why)
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
            try:
                self._store(entry, start, end, memoryview(frame.payload))
            except EngineFailed as error:
                self.fail(entry.request, f"{self.name}: {error}")
                return
            self.env.trace.emit(
                KVReceived(self.env.now(), entry.request, self.name, start, end, len(frame.payload))
            )
            if entry.silence is not None:
                self._expect_more(entry)
            self._kv_arrived(entry, actions)

    def _store(self, entry: Decoding, start: int, end: int, payload: bytes | memoryview) -> None:
        """Raises EngineFailed."""
        theirs = entry.manifest.layout.dtype
        if theirs != self.engine.layout.dtype:
            payload = self.engine.convert_kv(payload, theirs)
        self.engine.write_kv(self.memory.runs(entry.request, start, end), payload)

    def on_first(self, conn: Connection, frame: Frame) -> None:
        """From P, behind the KV: the id at position m."""
        if entry := self._find(conn, frame):
            if frame["position"] != entry.side.limits.prompt_len:
                raise BadFrame(f"a first id at {frame['position']}")
            [entry.told_of_first] = unpack_logprobs(frame["logprobs"], 1)
            self._kv_arrived(entry, entry.side.on_first(frame["id"]))

    def on_sent(self, conn: Connection, frame: Frame) -> None:
        """From P, by the control stream: all has left. It need not be here yet."""
        entry = self._find(conn, frame)
        if entry is None or entry.side.state is not State.RECEIVING:
            return
        if frame["end"] != entry.side.limits.prompt_len or not entry.admitted:
            raise BadFrame(f"all is said to be sent at {frame['end']}")
        self._expect_more(entry)

    def _expect_more(self, entry: Decoding) -> None:
        """What is still missing may take so long from now on."""
        if entry.silence is not None:
            entry.silence.cancel()
        due = self.env.now() + self._silence
        entry.silence = self.env.call_at(due, self._nothing_came, entry)

    def _nothing_came(self, entry: Decoding) -> None:
        if entry.side.state is not State.RECEIVING:
            return
        if self.hold is not None:  # it may be here, and this node does not read
            self._expect_more(entry)
            return
        lacks = "the first id" if entry.side.kv.whole else f"KV from {entry.side.kv.prefix} on"
        lost = f"{self.name}: {lacks} never came, though {entry.prefill} has sent it"
        self.fail(entry.request, lost, by=entry.prefill)

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
                first = Drawn(side.ids[0], entry.told_of_first)
                self._deliver(entry, side.limits.prompt_len, first, "P", after=0)
        self.execute(entry, actions)

    def _deliver(
        self, entry: Decoding, position: int, drawn: Drawn, source: Letter, after: int
    ) -> None:
        about = (entry.manifest.gateway, entry.request, position)
        self.tell_token(*about, drawn, source, after)

    # -- ends --------------------------------------------------------------------------------------

    def on_close(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the request is over, whatever is left of it here. KV that is on its way
        to a main decoder's cache still arrives (see `Prefill.on_close`).
        """
        super().on_close(conn, frame)
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

    def fail(self, request: str, detail: str, by: str = "") -> None:
        """P is told too, while it sends: the gateway may have forgotten a request that was
        answered. `by`: whose fault it is, where it is not our own.
        """
        if entry := self._entries.get(request):
            self.tell_failed(entry.manifest.gateway, request, detail, by)
            if entry.side.state is State.RECEIVING:
                epoch = entry.manifest.epoch
                self.post(entry.prefill, "refuse", request=request, epoch=epoch, reason=detail)
            self._end(entry)
        else:
            super().fail(request, detail)

    def on_curtail(self, conn: Connection, frame: Frame) -> None:
        """From P: no more will come. What did come stays in the cache."""
        entry = self._find(conn, frame)
        if entry and entry.side.state is State.RECEIVING:
            self.keep(entry.request, entry.manifest.prompt[: entry.side.kv.prefix])
            self._end(entry)

    def on_withdraw(self, conn: Connection, frame: Frame) -> None:
        """From P: its offer no longer stands. Whoever has the whole KV does not need P any more."""
        entry = self._find(conn, frame)
        if entry and entry.side.state is State.RECEIVING:
            self._end(entry)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        super().peer_lost(conn, error)
        why = f"{self.name} lost {conn.peer}: {error}"
        for entry in list(self._entries.values()):
            manifest, side, state = entry.manifest, entry.side, entry.side.state
            if conn.peer == manifest.gateway:
                self.fail(entry.request, why)
            elif conn.peer == entry.prefill and state is State.RECEIVING:
                self.fail(entry.request, why, by=conn.peer)
            elif isinstance(side, RelaySide):
                if conn.peer == manifest.main:
                    self.part(entry, side)
                    self._tell_lost(entry, conn.peer, why)
            elif conn.peer == manifest.relay and state in (State.RECEIVING, *HANDS_OVER):
                self._tell_lost(entry, conn.peer, why)

    def part(self, entry: Decoding, side: RelaySide) -> None:
        """Relay: nobody is there to hand over to."""
        entry.parted, entry.asked = True, None
        side.on_main_lost()
        self.execute(entry, [])

    def _tell_lost(self, entry: Decoding, peer: str, why: str) -> None:
        if not entry.answered:
            about = {"request": entry.request, "whom": peer, "detail": why}
            self.post(entry.manifest.gateway, "lost", b"", **about)

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """P knows of it too, or has ended it itself: its word on it comes on the control stream."""
        for entry in list(self._entries.values()):
            if entry.stream is conn and entry.side.state is State.RECEIVING:
                why = f"{self.name} lost KV from {conn.peer}: {error}"
                self.env.call_at(self.env.now() + WORD_TIME, self._no_word, entry, why)

    def _no_word(self, entry: Decoding, why: str) -> None:
        here = self._entries.get(entry.request) is entry
        if here and entry.side.state is State.RECEIVING:
            self.fail(entry.request, why, by=entry.prefill)

    def _end(self, entry: Decoding) -> None:
        del self._entries[entry.request]
        if entry.lease is not None:
            entry.lease.cancel()
        for timer in (entry.overdue, entry.silence):
            if timer is not None:
                timer.cancel()
        whole = entry.side.kv.whole
        entry.side.close()
        if entry.seq is not None:
            self.keep(entry.request, entry.seq.ids[: entry.seq.computed])
        elif whole:
            self.keep(entry.request, entry.manifest.prompt)
        self.give_back(entry.request)
        if entry.lesson is not None:
            self.learn(entry.request, entry.lesson, len(entry.manifest.prompt))

    def involves(self, peer: str) -> bool:
        entries = self._entries.values()
        return any(peer in (e.prefill, e.manifest.relay, e.manifest.main) for e in entries)

    def end_all(self) -> None:
        for entry in list(self._entries.values()):
            entry.lesson = None
            self._end(entry)
        super().end_all()
