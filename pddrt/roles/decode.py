"""RLD and MD: the same worker with other duties.

What each may do when is decided by its half of `protocol` (`RelaySide`, `MainSide`); when an RLD
sends what, by the handoff policy. This shell executes: it steps sequences and carries messages.
Ids go to the gateway as they are made, by absolute position.

A sequence grows as it decodes. Where memory runs out, who came last is preempted and later rebuilt
from its ids, here: P may have forgotten its KV by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import BadFrame
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.messages import Limits, Manifest, chain
from pddrt.netem.net import Connection, Net
from pddrt.policy.handoff import Decision, Facts, Policy, equilibrium, name_of, patience
from pddrt.protocol import (
    Action,
    CaughtUp,
    Decode,
    Extend,
    LetFollow,
    MainSide,
    Ready,
    RelaySide,
    SendIds,
    State,
)
from pddrt.roles.instance import InstanceSpec
from pddrt.roles.receive import Decoding, Receiver
from pddrt.sched import Outcome, SequenceState
from pddrt.trace import (
    HandoffBegan,
    HandoffCaughtUp,
    HandoffEnded,
    HandoffSent,
    HandoffTaken,
    MainReady,
    TakenOver,
    TokensMade,
)
from pddrt.types import Drawn, Ns


class Decoder(Receiver):
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
        silence: Ns,
        handoff: Policy,
        round_trips: Mapping[str, Ns],
        piece: int | None = None,
    ) -> None:
        """`handoff`: of a relay decoder. `round_trips`: to each main decoder, twice the path's
        delay. `piece`: of a main decoder that decodes along with a relay, ids that one step may
        extend over.
        """
        super().__init__(env, net, engine, spec, eos_ids=eos_ids, lease=lease, silence=silence)
        self.handoff = handoff
        self.round_trips = round_trips
        self.piece = piece

    def side(self, manifest: Manifest, limits: Limits) -> RelaySide | MainSide:
        if manifest.relay != self.name:
            return MainSide(limits, relayed=manifest.relay is not None)
        if manifest.main is None:
            return RelaySide(limits)
        return RelaySide(limits, ask=partial(self._ask, manifest.request))

    # -- the handoff -------------------------------------------------------------------------------

    def on_ready(self, conn: Connection, frame: Frame) -> None:
        """RLD, from MD: it holds the whole KV."""
        entry = self._entries.get(frame["request"])
        relayed = entry is not None and isinstance(entry.side, RelaySide)
        if entry is not None and relayed and conn.peer != entry.manifest.main:
            entry.early[conn.peer] = frame
            return
        if (found := self._relayed(conn, frame)) is None:
            return
        entry, side = found
        self.env.trace.emit(MainReady(self.env.now(), entry.request, self.name, conn.peer))
        self.execute(entry, side.on_main_ready(entry.coming))

    def on_caught(self, conn: Connection, frame: Frame) -> None:
        """RLD, from MD: it has the KV of the last piece."""
        if (found := self._relayed(conn, frame)) is None:
            return
        entry, side = found
        if side.state is State.ROUND:
            about = (entry.request, self.name, frame["end"], side.next + entry.coming)
            self.env.trace.emit(HandoffCaughtUp(self.env.now(), *about))
        self.execute(entry, side.on_caught_up(frame["end"], entry.coming))

    def _overdue(self, request: str) -> None:
        """RLD: the answer to a piece is. No request fails for it: MD may be busy, and the last ids
        are all that it needs.
        """
        if (entry := self._entries.get(request)) and isinstance(entry.side, RelaySide):
            self.execute(entry, entry.side.on_overdue(entry.coming))

    def _relayed(self, conn: Connection, frame: Frame) -> tuple[Decoding, RelaySide] | None:
        """The request that its main decoder speaks of; None when it is gone."""
        entry = self._entries.get(frame["request"])
        if entry is None or not isinstance(entry.side, RelaySide) or entry.parted:
            return None
        if conn.peer != entry.manifest.main:
            return None  # it is so no more
        entry.main_step, entry.main_token = frame["step_ns"], frame["token_ns"]
        return entry, entry.side

    def on_rejoin(self, conn: Connection, frame: Frame) -> None:
        """RLD, from the gateway: another main decoder, or none any more. It is told where there is
        nothing here that could go on.
        """
        request, main = frame["request"], frame["main"]
        entry = self._entries.get(request)
        if entry is None or not isinstance(entry.side, RelaySide):
            self.tell_failed(conn.peer, request, f"{self.name} has let it go")
            return
        if conn.peer != entry.manifest.gateway:
            raise BadFrame(f"{conn.peer} is not its gateway")
        self.part(entry, entry.side)
        entry.manifest = replace(entry.manifest, main=main)
        if main is not None:
            entry.parted = False
            entry.side.ask = partial(self._ask, request)
            ready, conn_to_main = entry.early.pop(main, None), self.peers.get(main)
            if ready is not None and conn_to_main is not None:
                self.on_ready(conn_to_main, ready)

    def on_switched(self, conn: Connection, frame: Frame) -> None:
        """RLD, from the gateway: it has had an id of MD's first."""
        entry = self._entries.get(frame["request"])
        if entry is None or not isinstance(entry.side, RelaySide):
            return
        if conn.peer != entry.manifest.gateway:
            raise BadFrame(f"{conn.peer} is not its gateway")
        if entry.parted:  # MD goes on beside it all the same
            self._end(entry)
            return
        entry.side.on_switched()
        self.execute(entry, [])

    def on_ids(self, conn: Connection, frame: Frame) -> None:
        """MD, from RLD: what it made meanwhile."""
        if (found := self._main(conn, frame, "relay")) is None:
            return
        entry, side = found
        ids = unpack_ids(frame.payload)
        self.execute(entry, side.on_ids(frame["start"], ids, frame["last"]))

    def on_follow(self, conn: Connection, frame: Frame) -> None:
        """MD, from the gateway: what it passed on of RLD's."""
        if (found := self._main(conn, frame, "gateway")) is None:
            return
        entry, side = found
        ids = unpack_ids(frame.payload)
        self.execute(entry, side.on_follow(frame["start"], ids, entry.in_step))

    def on_takeover(self, conn: Connection, frame: Frame) -> None:
        """MD, from the gateway: RLD is lost; this is what it passed on. What RLD said here and not
        there is passed on now.
        """
        if (found := self._main(conn, frame, "gateway")) is None:
            return
        entry, side = found
        start, ids = frame["start"], unpack_ids(frame.payload)
        actions = side.on_takeover(start, ids, entry.in_step)
        missing = range(len(ids), 0 if side.told else side.given)
        if missing and entry.manifest.sampling.logprobs is not None:
            self.fail(entry.request, f"{self.name}: what the relay told of its ids is lost with it")
            return
        for at in missing:
            drawn, after = Drawn(side.ids[at]), chain(side.ids[:at])
            self._deliver(entry, start + at, drawn, "R" if at else "P", after)
        self.execute(entry, actions)

    def _main(self, conn: Connection, frame: Frame, role: str) -> tuple[Decoding, MainSide] | None:
        """The request whose relay or gateway sends ids; None when it is gone."""
        entry = self._entries.get(frame["request"])
        if entry is None or not isinstance(entry.side, MainSide):
            return None
        if conn.peer != getattr(entry.manifest, role):
            raise BadFrame(f"{conn.peer} is not its {role}")
        return entry, entry.side

    def _ask(self, request: str, lacking: int, before: tuple[int, ...], left: int) -> Decision:
        """RLD: what the handoff policy says now."""
        entry, memory, batch = self._entries[request], self.memory, len(self.sched.sequences)
        busy = max(memory.used / memory.num_pages, min(1.0, batch / self.spec.max_batch))
        main = entry.manifest.main
        assert main is not None
        facts = Facts(
            lacking=lacking,
            before=before,
            left=left,
            step=self.pace.step,
            main_step=entry.main_step,
            main_token=entry.main_token,
            round_trip=self.round_trips.get(main, 0),
            pressure=1.0 if len(self.admission) else busy,
        )
        decision = self.handoff.decide(facts)
        if entry.asked is None:
            about = (request, self.name, main, name_of(self.handoff), lacking)
            kind = type(decision).__name__.lower()
            self.env.trace.emit(HandoffBegan(self.env.now(), *about, kind, equilibrium(facts)))
        entry.asked = facts
        return decision

    def execute(self, entry: Decoding, actions: list[Action]) -> None:
        if entry.overdue is not None and entry.side.state is not State.ROUND:
            entry.overdue.cancel()
        for action in actions:
            match action:
                case Decode(ids, kept):
                    self._go_on(entry, ids, kept)
                case Extend(ids):
                    self._go_on(entry, ids, kept=len(ids), draws=False)
                case Ready() | CaughtUp():
                    self._answer_relay(entry, action)
                case SendIds():
                    self._send_ids(entry, action)
                case LetFollow():
                    gateway, main = entry.manifest.gateway, entry.manifest.main
                    self.post(gateway, "overlap", request=entry.request, main=main)
        if entry.side.state is State.HANDED:
            if isinstance(entry.side, RelaySide) and entry.side.bound:
                about = (entry.request, self.name, entry.side.next, entry.side.reason)
                self.env.trace.emit(HandoffEnded(self.env.now(), *about))
            self._end(entry)

    def _go_on(self, entry: Decoding, ids: Sequence[int], kept: int, draws: bool = True) -> None:
        """Prompt and answer `ids` are to be computed; where there was a sequence, its KV holds for
        the prompt and `kept` of the answer.
        """
        request, prompt, seq = entry.request, entry.manifest.prompt, entry.seq
        pending = known = 0
        if seq is None:
            limits = entry.side.limits
            seq = entry.seq = SequenceState(
                request, [*prompt, *ids], len(prompt), len(prompt), None, limits=limits
            )
            self.sched.add(seq)
        else:
            pending, known = seq.pending, len(seq.ids) - len(prompt)
            waits = request not in self.sched.sequences
            if not waits and len(prompt) + kept < self.memory.holding(request).hit:
                # It was rebuilt from the cache, with what it now gives up: not its pages to write.
                self.preempt(request)
            seq.ids[len(prompt) :] = ids
            seq.computed = min(seq.computed, len(prompt) + kept)
            self._admit_soon()  # where it waits, perhaps for less now
        seq.sampling = entry.manifest.sampling if draws else None
        seq.active = True
        seq.piece = self.piece if entry.side.state is State.FOLLOWING else None
        if isinstance(entry.side, MainSide) and entry.side.relayed:
            about = (request, self.name, seq.pending - pending, len(seq.ids))
            back = max(0, known - kept)
            if entry.side.taken:
                self.env.trace.emit(TakenOver(self.env.now(), *about))
            else:
                self.env.trace.emit(HandoffTaken(self.env.now(), *about, draws, back))
        self.wake()

    def _answer_relay(self, entry: Decoding, action: Ready | CaughtUp) -> None:
        relay = entry.manifest.relay
        assert relay is not None
        about: dict[str, object] = {"request": entry.request}
        about |= {"step_ns": self.pace.step, "token_ns": self.pace.token}
        if isinstance(action, CaughtUp):
            self.post(relay, "caught", b"", **about, end=action.end)
        else:
            self.post(relay, "ready", b"", **about)

    def _send_ids(self, entry: Decoding, action: SendIds) -> None:
        main, request = entry.manifest.main, entry.request
        assert main is not None
        about = {"request": request, "start": action.start, "last": action.last}
        packed, end = pack_ids(action.ids), action.start + len(action.ids)
        self.post(main, "ids", packed, **about)
        size = Frame("ids", about, packed).size
        event = (request, self.name, main, action.start, end, action.last, size, action.reason)
        self.env.trace.emit(HandoffSent(self.env.now(), *event))
        if not action.last:
            assert entry.asked is not None
            if entry.overdue is not None:
                entry.overdue.cancel()
            until = self.env.now() + patience(entry.asked, len(action.ids))
            entry.overdue = self.env.call_at(until, self._overdue, request)

    # -- tokens ------------------------------------------------------------------------------------

    def stepped(self, outcome: Outcome) -> None:
        if outcome.request in self._alone:
            super().stepped(outcome)
            return
        entry = self._entries[outcome.request]
        side, position, drawn = entry.side, outcome.end, outcome.drawn
        if drawn is None:
            if isinstance(side, MainSide):
                assert entry.seq is not None
                self.execute(entry, side.on_computed(entry.seq.pending))
            return
        assert position == side.next
        token = drawn.token
        made = (self.env.now(), entry.request, self.name, self.letter)
        self.env.trace.emit(TokensMade(*made, position, position + 1, (token,)))
        if not isinstance(side, MainSide) or position >= side.limits.prompt_len + len(side.told):
            self._deliver(entry, position, drawn, self.letter, after=side.chain)
        actions, reason = side.on_token(token)
        if reason and side.state is State.FOLLOWING:
            assert entry.seq is not None
            entry.seq.active = False
        elif reason:
            self.sched.drop(entry.request)  # pages stay until the gateway closes the request
        self.execute(entry, actions)
