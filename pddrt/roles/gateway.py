"""The gateway: where a request enters, gets its route, and becomes one contiguous stream of text.

It is the one accountant. It tokenises once, asks the policy for pipeline and instances (`outlook`
says what that may know), refuses what can never fit, puts ids in order by position whoever made
them (`answer`), and closes the request on every instance when it is over. It holds the deadline of
the whole request; each role holds a lease somewhat longer, so that a lost gateway strands nothing.

Where both decoders of a request decode, it is the arbiter: it passes on whichever id of a position
comes first, sends the main decoder what it passed on of the relay's, and tells the relay when the
main decoder was first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace

from pddrt.engine.tokens import Tokenizer
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, BadInput, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.messages import Limits, pack_logprobs, unpack_logprobs
from pddrt.netem.net import Connection, Net, Topology
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.route import Facts, NoRoute, Policy, Route
from pddrt.roles.answer import Answer, Passed
from pddrt.roles.load import Load
from pddrt.roles.node import Node
from pddrt.roles.outlook import Capacity, Outlook
from pddrt.roles.sparing import Sparing
from pddrt.trace import HandoffSent, Released, Routed, TransferTook
from pddrt.types import SECOND, Drawn, Ns, Sampling

LOAD = tuple(field.name for field in fields(Load))
LEASE_GRACE: Ns = 5 * SECOND
"""By how much a role's lease outlasts the request's deadline at the gateway."""


@dataclass(slots=True)
class Stream:
    """One request under way."""

    request: str
    session: str | None
    client: str
    route: Route
    answer: Answer
    deadline: Timer

    @property
    def limits(self) -> Limits:
        return self.answer.limits


class Gateway(Node):
    def __init__(
        self,
        env: Env,
        net: Net,
        name: str,
        *,
        topology: Topology,
        policy: Policy,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        deadline: Ns,
        signal_age: Ns,
        anomaly: Anomaly | None = None,
    ) -> None:
        """`signal_age`: how old what instances say of their load may be. `anomaly`: what need not
        be sent to main decoders.
        """
        super().__init__(env, net, name)
        self.signal_age = signal_age
        self.policy = policy
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.deadline = deadline
        self.outlook = Outlook(topology)
        self.hears: Callable[[str, Load, Sequence[str]], None] = self.outlook.reported
        """Where what instances say of their load goes."""
        self.sparing = Sparing(env, self.outlook, anomaly, self.post)
        self._expected: tuple[str, ...] = ()
        self._introduced = asyncio.Event()
        self._retired: set[str] = set()
        self._ended = asyncio.Event()
        self._streams: dict[str, Stream] = {}

    @property
    def instances(self) -> dict[str, Capacity]:
        """Those that have said what they are."""
        return self.outlook.instances

    async def dial(self, peers: Sequence[str]) -> None:
        """Connects to the instances and waits until each has said what it is."""
        self._expected = tuple(peers)
        await super().dial(peers)
        while len(self.instances) < len(peers):
            self._introduced.clear()
            await self._introduced.wait()

    # -- instances that come and go ----------------------------------------------------------------

    async def meet(self, peer: str) -> None:
        """From now on `peer`, which listens, may get requests. That it left may be news yet."""
        while peer in self.instances:
            self._introduced.clear()
            await self._introduced.wait()
        if peer not in self._expected:
            self._expected = (*self._expected, peer)
        await super().dial([peer])
        while peer not in self.instances:
            self._introduced.clear()
            await self._introduced.wait()
        self._retired.discard(peer)

    def retire(self, peer: str) -> None:
        """It gets no requests any more."""
        self._retired.add(peer)

    async def released(self, peer: str) -> None:
        """Returns when no request has a part there."""
        while any(peer in stream.route.members for stream in self._streams.values()):
            self._ended.clear()
            await self._ended.wait()

    def on_hello(self, conn: Connection, frame: Frame) -> None:
        if conn.peer not in self._expected or conn.peer in self.instances:
            raise BadFrame(f"nobody asked {conn.peer} who it is")
        self.outlook.introduced(conn.peer, frame, self._expected)
        self.post(conn.peer, "watch", age_ns=self.signal_age)
        self._introduced.set()

    # -- what instances say ------------------------------------------------------------------------

    def on_load(self, conn: Connection, frame: Frame) -> None:
        """What it has to do now, and which requests that takes into account."""
        load = Load(**{name: frame[name] for name in LOAD})
        self.hears(self._known(conn), load, frame["arrived"])

    def on_streaming(self, conn: Connection, frame: Frame) -> None:
        """P: the path is what a transfer to a main decoder waits for now, or it is not any more."""
        self._known(conn, frame["to"])
        self.outlook.streaming(self.env.now(), conn.peer, frame)

    def on_crossed(self, conn: Connection, frame: Frame) -> None:
        """P: a transfer to a main decoder has ended."""
        now, src, dst = self.env.now(), self._known(conn, frame["to"]), frame["to"]
        crossing, rate = self.outlook.crossed(now, src, frame)
        if frame["whole"] and crossing is not None:
            took = frame["busy_ns"] + self.outlook.delay(src, dst)
            about = (frame["request"], src, dst, frame["bytes"], took)
            self.env.trace.emit(TransferTook(now, *about, crossing.expected, rate))

    def _known(self, conn: Connection, other: str | None = None) -> str:
        """The sender. Raises BadFrame unless it is an instance, and there ever was the other."""
        if conn.peer not in self.instances or self.peers.get(conn.peer) is not conn:
            raise BadFrame(f"{conn.peer} is no instance here")
        if other is not None and other not in self._expected:
            raise BadFrame(f"{other} never was an instance here")
        return conn.peer

    # -- entering ----------------------------------------------------------------------------------

    def on_submit(self, conn: Connection, frame: Frame) -> None:
        """From a client: a text to answer, after the ids of the conversation so far (payload); or,
        `raw`, ids that are the whole prompt.
        """
        request = frame["request"]
        if request in self._streams:
            self._tell_end(conn.peer, request, "rejected", "a request of that id is under way")
            return
        try:
            ids = self._prompt(frame)
        except BadInput as error:
            self._tell_end(conn.peer, request, "rejected", str(error))
            return
        sampling = Sampling.of(frame["sampling"])
        limits = Limits.of(len(ids), frame["max_tokens"], self.eos_ids, sampling)
        if refusal := self.outlook.refusal(limits):
            self._tell_end(conn.peer, request, "rejected", refusal)
            return
        facts = self.outlook.facts(self.env.now(), ids, limits.max_tokens, self._reachable)
        try:
            route = self.policy.route(facts)
        except NoRoute as refusal:
            self._tell_end(conn.peer, request, "rejected", str(refusal))
            return
        session = frame["session"]
        route = self.sparing.routed(request, session, route, facts, ids)
        self._open(conn.peer, request, session, route, limits, ids, sampling, facts)

    @property
    def _reachable(self) -> list[str]:
        return [n for n in self.instances if n in self.peers and n not in self._retired]

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        if frame.kind == "submit":
            self._tell_end(conn.peer, request, "rejected", detail)
        else:
            super().blame(conn, frame, request, detail)

    def _prompt(self, frame: Frame) -> list[int]:
        """The ids of the whole prompt. Ids of earlier turns are taken as they are; `answer` is the
        workload's own answer to the last of them, where it stands in for the model's.
        """
        history = unpack_ids(frame.payload)
        if frame["raw"]:
            return history
        if not history:
            system = [{"role": "system", "content": frame["system"]}] if frame["system"] else []
            return self.tokenizer.chat([*system, {"role": "user", "content": frame["text"]}])
        if frame["answer"] is not None:
            history += self.tokenizer.encode_within(frame["answer"])
        ended = history[-1] in self.eos_ids
        return history + self.tokenizer.follow_up(frame["text"], after_eos=ended)

    def _open(
        self,
        client: str,
        request: str,
        session: str | None,
        route: Route,
        limits: Limits,
        ids: list[int],
        sampling: Sampling,
        facts: Facts,
    ) -> None:
        now = self.env.now()
        deadline = self.env.call_at(now + self.deadline, self.fail, request, "deadline exceeded")
        answer = Answer(limits, ids, self.tokenizer, sampling.stop)
        stream = Stream(request, session, client, route, answer, deadline)
        self._streams[request] = stream
        self.outlook.opened(request, route, facts)
        self.env.trace.emit(
            Routed(
                now,
                request,
                route.pipeline,
                route.prefill,
                route.relay,
                route.main,
                limits.prompt_len,
                limits.max_tokens,
                route.wan_estimate,
                route.reason,
            )
        )
        packed = pack_ids(ids)
        self.post_when_room(client, lambda: True, "accepted", packed, request=request)
        about: dict[str, object] = {
            "request": request,
            "max_tokens": limits.max_tokens,
            "sampling": astuple(replace(sampling, stop=())),  # instances speak ids only
            "lease_ns": self.deadline + LEASE_GRACE,
        }
        if not route.alone:
            about |= {"relay": route.relay, "main": route.main, "held": route.held}
        self.post_when_room(
            route.members[0],
            lambda: self._streams.get(request) is stream,
            "generate" if route.alone else "prefill",
            packed,
            **about,
        )

    # -- the answer --------------------------------------------------------------------------------

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV of this request. If that is over, our `close` may have come
        there before P's offer did, and P may have nothing left to withdraw: say it again.
        """
        request = frame["request"]
        stream = self._streams.get(request)
        if stream is None:
            self.outlook.late(request, conn.peer)
            self.post(conn.peer, "close", request=request, answered=True)
        elif conn.peer in stream.route.members:
            prompt = stream.answer.ids[: stream.limits.prompt_len]
            self.outlook.whole(request, conn.peer, prompt)
            if conn.peer == stream.route.relay:
                self.sparing.relay_holds(request)
            elif conn.peer == stream.route.main:
                self.sparing.main_holds(request)

    def on_tokens(self, conn: Connection, frame: Frame) -> None:
        """Ids from whoever made or delivers them, by absolute position."""
        stream = self._streams.get(frame["request"])
        if stream is None:
            return
        if conn.peer not in stream.route.members:
            raise PeerError(f"{conn.peer} has no part in {stream.request}")
        ids = unpack_ids(frame.payload)
        told = unpack_logprobs(frame["logprobs"], len(ids))
        drawn = list(map(Drawn, ids, told))
        for passed in stream.answer.take(frame["start"], drawn, frame["source"], frame["after"]):
            self._pass_on(stream, passed)

    def _pass_on(self, stream: Stream, passed: Passed) -> None:
        limits = stream.limits
        if passed.position == limits.prompt_len:
            now = self.env.now()
            self.env.trace.emit(Released(now, stream.request, now))
            prompt = stream.answer.ids[: limits.prompt_len]
            self.instances[stream.route.members[0]].remember(prompt)
        self.post(
            stream.client,
            "answer",
            pack_ids([passed.token]),
            request=stream.request,
            start=passed.position - limits.prompt_len,
            source=passed.source,
            text=passed.text,
            logprobs=pack_logprobs([passed.logprobs]),
        )
        if passed.reason:
            self._close(stream, passed.reason, "")
            return
        self.sparing.made(stream.request, passed.position + 1 - limits.prompt_len)
        if stream.answer.both_decode and not stream.answer.sole:
            self._arbitrate(stream, passed)

    # -- both decode -------------------------------------------------------------------------------

    def on_overlap(self, conn: Connection, frame: Frame) -> None:
        """From the relay: let the main decoder decode along."""
        stream = self._streams.get(frame["request"])
        if stream is None:
            return
        if conn.peer != stream.route.relay or stream.answer.both_decode:
            raise BadFrame(f"{conn.peer} may not let anybody follow {stream.request}")
        stream.answer.both_decode = True
        self._let_follow(stream, stream.limits.prompt_len, stream.answer.made)

    def _arbitrate(self, stream: Stream, passed: Passed) -> None:
        if passed.source != "M":
            self._let_follow(stream, passed.position, [passed.token])
            return
        stream.answer.sole = "M"
        assert stream.route.relay is not None
        request, position = stream.request, passed.position
        self.post(stream.route.relay, "switched", request=request, position=position)

    def _let_follow(self, stream: Stream, start: int, ids: Sequence[int]) -> None:
        if not ids:
            return
        assert stream.route.main is not None
        packed = pack_ids(ids)
        about = {"request": stream.request, "start": start}
        self.post(stream.route.main, "follow", packed, **about)
        size = Frame("follow", about, packed).size
        event = (stream.request, self.name, stream.route.main, start, start + len(ids), False, size)
        self.env.trace.emit(HandoffSent(self.env.now(), *event, follows=True))

    # -- ends --------------------------------------------------------------------------------------

    def on_failed(self, conn: Connection, frame: Frame) -> None:
        """From an instance: it cannot go on with this request."""
        stream = self._streams.get(frame["request"])
        if stream is not None and conn.peer in stream.route.members:
            self.fail(stream.request, frame["detail"])

    def on_cancel(self, conn: Connection, frame: Frame) -> None:
        stream = self._streams.get(frame["request"])
        if stream is not None and conn.peer == stream.client:
            self.fail(stream.request, "cancelled by the client")

    def fail(self, request: str, detail: str) -> None:
        if stream := self._streams.get(request):
            self._close(stream, "aborted", detail)

    def _close(self, stream: Stream, reason: str, detail: str) -> None:
        del self._streams[stream.request]
        stream.deadline.cancel()
        request, route = stream.request, stream.route
        self._tell_end(stream.client, stream.request, reason, detail)
        answered = reason in ("stop", "length")
        for name in stream.route.members:
            self.post(name, "close", request=stream.request, answered=answered)
        if answered:
            self._teach(stream)
        made = stream.answer.next - stream.limits.prompt_len
        self.sparing.ended(request, stream.session, made, answered)
        self.outlook.closed(request, route)
        self._ended.set()

    def _teach(self, stream: Stream) -> None:
        """P and MD learn the answer where it was made elsewhere: hits stay equal."""
        ids, route = stream.answer.ids[:-1], stream.route  # nobody has KV of the last
        makers = {"P": route.prefill, "R": route.relay, "M": route.main}
        made_at = makers[stream.answer.last_maker]
        spared = self.sparing.spares(stream.request)
        for name in (route.prefill, None if spared else route.main):
            if name is not None and name != made_at and name not in self._retired:
                self.post_when_room(
                    name,
                    lambda: True,
                    "learn",
                    pack_ids(ids),
                    request=stream.request,
                    prompt_tokens=stream.limits.prompt_len,
                )
        self.outlook.answered(stream.request, route, ids, spared)

    def _tell_end(self, client: str, request: str, reason: str, detail: str) -> None:
        self.post(client, "end", request=request, reason=reason, detail=detail)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for stream in list(self._streams.values()):
            if conn.peer in (*stream.route.members, stream.client):
                self.fail(stream.request, f"{self.name} lost {conn.peer}: {error}")
        self.outlook.gone(self.env.now(), conn.peer)
        self._introduced.set()
