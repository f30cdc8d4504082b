"""The gateway: where a request enters, gets its route, and becomes one contiguous stream of text.

It is the one accountant. It tokenises once, asks the policy for pipeline and instances (`outlook`
says what that may know), refuses what can never fit, puts ids in order by position whoever made
them (`answer`), and closes the request on every instance when it is over. It holds the deadline of
the whole request; each role holds a lease somewhat longer, so that a lost gateway strands nothing.

When an instance that has a part in a request is lost, or gives it up, the request goes on: on those
that are left where that is possible, else in a further attempt (see `rescue`). What was passed on
is never made again. Where nothing is possible, the client gets one error.

Where both decoders of a request decode, it is the arbiter: it passes on whichever id of a position
comes first, sends the main decoder what it passed on of the relay's, and tells the relay when the
main decoder was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

from pddrt.engine.tokens import Tokenizer
from pddrt.env import Env
from pddrt.errors import BadFrame, BadInput, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.messages import Limits, pack_logprobs, unpack_logprobs
from pddrt.netem.net import Connection, Net, Topology
from pddrt.policy.admission import Admission, Door
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.route import Facts, NoRoute, Policy, Route
from pddrt.roles.answer import Answer, Passed
from pddrt.roles.attempts import Attempt, Recovery, rest_of
from pddrt.roles.rescue import Rescue, Stream
from pddrt.trace import (
    AGAIN,
    HandoffSent,
    Released,
    Routed,
    attempt_name,
)
from pddrt.types import SECOND, Drawn, Ns, Sampling

LEASE_GRACE: Ns = 5 * SECOND
"""By how much a role's lease outlasts the request's deadline at the gateway."""


class Gateway(Rescue):
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
        recovery: Recovery | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`admission`: who is refused where more comes than can be served. `recovery`: further
        attempts at requests that have lost an instance.
        """
        super().__init__(
            env,
            net,
            name,
            topology=topology,
            policy=policy,
            signal_age=signal_age,
            anomaly=anomaly,
            recovery=recovery or Recovery(),
        )
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.deadline = deadline
        self.door = Door(admission or Admission())

    async def released(self, peer: str) -> None:
        """Returns when no request has a part there."""
        while any(peer in s.attempt.members for s in self._streams.values() if s.attempt):
            self._ended.clear()
            await self._ended.wait()

    # -- entering ----------------------------------------------------------------------------------

    def on_submit(self, conn: Connection, frame: Frame) -> None:
        """From a client: a text to answer, after the ids of the conversation so far (payload); or,
        `raw`, ids that are the whole prompt.
        """
        request = frame["request"]
        if stream := self._streams.get(request):
            if stream.client != conn.peer:  # else it has come twice
                self._tell_end(conn.peer, request, "rejected", "a request of that id is under way")
            return
        try:
            self._enter(conn.peer, frame)
        except (BadInput, NoRoute) as refusal:
            self._tell_end(conn.peer, request, "rejected", str(refusal))

    def _enter(self, client: str, frame: Frame) -> None:
        """Raises BadInput or NoRoute, whose text is for the client, where it cannot; where it will
        not now, it says so.
        """
        request, session = frame["request"], frame["session"]
        if AGAIN in request:
            raise BadInput(f"a request's id may not have {AGAIN!r} in it")
        ids, sampling = self._prompt(frame), Sampling.of(frame["sampling"])
        limits = Limits.of(len(ids), frame["max_tokens"], self.eos_ids, sampling)
        if refusal := self.outlook.refusal(limits):
            raise NoRoute(refusal)
        facts = self.outlook.facts(self.env.now(), ids, limits.max_tokens, self.reachable)
        computing = facts.prefills or facts.mains
        work = limits.prompt_len - max((i.hit for i in computing), default=0)
        pools = sum(i.kv_tokens for i in self.instances.values())
        if overload := self.door.refusal(limits.kv_tokens, pools, work, len(computing)):
            retry = overload.retry_after
            self._tell_end(client, request, "rejected", overload.detail, retry)
            return
        route = self.policy.route(facts)
        route = self.sparing.routed(request, session, route, facts, ids)
        due = self.env.now() + self.deadline
        deadline = self.env.call_at(due, self.fail, request, "deadline exceeded")
        answer = Answer(limits, ids, self.tokenizer, sampling.stop)
        stream = Stream(request, session, client, sampling, answer, due, deadline)
        self._streams[request] = stream
        self.door.entered(self.env.now(), request, limits.kv_tokens, work)
        self.begin(stream, route, facts)

    def heeds(self, peer: str, request: str) -> bool:
        stream = self._streams.get(request)
        if stream is None:
            stream = self._attempts.get(request)
        if stream is None or peer == stream.client:
            return True
        return stream.attempt is not None and peer in stream.attempt.knows

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        stream = self._attempts.get(request)
        if frame.kind == "submit":
            self._tell_end(conn.peer, request, "rejected", detail)
        elif stream is not None and stream.attempt and conn.peer in stream.attempt.knows:
            self._member_lost(stream, conn.peer, detail)
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

    def begin(self, stream: Stream, route: Route, facts: Facts) -> None:
        """An attempt begins: behind what has been passed on, by this route."""
        now, answer, ids = self.env.now(), stream.answer, list(stream.answer.ids)
        made = len(ids) - stream.limits.prompt_len
        limits, sampling = rest_of(stream.limits, stream.sampling, made)
        name = attempt_name(stream.request, stream.begun)
        attempt = stream.attempt = Attempt(name, route, limits)
        self._attempts[name] = stream
        stream.begun += 1
        self.outlook.opened(name, route, facts)
        estimate, size = route.wan_estimate, (limits.prompt_len, limits.max_tokens)
        members = (route.pipeline, route.prefill, route.relay, route.main)
        self.env.trace.emit(Routed(now, name, *members, *size, estimate, route.reason))
        packed = pack_ids(ids)
        if stream.begun == 1:
            accepted = {"request": stream.request}
            self.post_when_room(stream.client, lambda: True, "accepted", packed, **accepted)
        else:
            answer.begin_again()
        about: dict[str, object] = {
            "request": name,
            "max_tokens": limits.max_tokens,
            "sampling": astuple(replace(sampling, stop=())),  # instances speak ids only
            "lease_ns": stream.due - now + LEASE_GRACE,
            "begin_ns": self._begin_within(stream.request, route),
        }
        if not route.alone:
            about |= {"relay": route.relay, "main": route.main, "held": route.held}
        self.post_when_room(
            route.members[0],
            lambda: stream.attempt is attempt,
            "generate" if route.alone else "prefill",
            packed,
            **about,
        )

    def _begin_within(self, request: str, route: Route) -> Ns | None:
        """Until when somebody must have computed the prompt, for the first token to be in time:
        from it comes here by way of the first decoder.
        """
        within = self.door.begin_within(self.env.now(), request)
        if within is None:
            return None
        way = [self.name, *route.members[:2], self.name]
        return max(0, within - sum(map(self.outlook.delay, way, way[1:])))

    def on_late(self, conn: Connection, frame: Frame) -> None:
        """From who should compute a prompt: it has not begun, and that would be too late now. Where
        nobody is in its way it may go on all the same.
        """
        stream = self._attempts.get(frame["request"])
        if stream is None or stream.attempt is None or conn.peer not in stream.attempt.members:
            return
        if stream.request in self.door.waiting and self.door.crowded:
            waited = frame["waited_ns"] / SECOND
            detail = f"overloaded: {conn.peer} had not begun it after {waited:.3f} s"
            self._close(stream, "rejected", detail, self.door.forecast(0))

    # -- the answer --------------------------------------------------------------------------------

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV of this request. If that is over, our `close` may have come
        there before P's offer did, and P may have nothing left to withdraw: say it again.
        """
        name = frame["request"]
        stream = self._attempts.get(name)
        if stream is None or stream.attempt is None:
            self.outlook.late(name, conn.peer)
            self.post(conn.peer, "close", request=name, answered=True)
            return
        attempt = stream.attempt
        if conn.peer not in attempt.members:
            return
        attempt.whole.add(conn.peer)
        self.outlook.whole(name, conn.peer, stream.answer.ids[: attempt.limits.prompt_len])
        if conn.peer == attempt.relay:
            self.sparing.relay_holds(name)
        elif conn.peer == attempt.main:
            self.sparing.main_holds(name)
            self._go_on(stream, attempt)

    def on_tokens(self, conn: Connection, frame: Frame) -> None:
        """Ids from whoever made or delivers them, by absolute position."""
        stream = self._attempts.get(frame["request"])
        if stream is None or stream.attempt is None:
            return
        if conn.peer not in stream.attempt.members:
            if conn.peer in stream.attempt.knows:
                return
            raise PeerError(f"{conn.peer} has no part in {stream.request}")
        ids = unpack_ids(frame.payload)
        told = unpack_logprobs(frame["logprobs"], len(ids))
        drawn = list(map(Drawn, ids, told))
        for passed in stream.answer.take(frame["start"], drawn, frame["source"], frame["after"]):
            self._pass_on(stream, passed)

    def _pass_on(self, stream: Stream, passed: Passed) -> None:
        limits, attempt = stream.limits, stream.attempt
        assert attempt is not None
        if passed.position == limits.prompt_len:
            now = self.env.now()
            self.env.trace.emit(Released(now, stream.request, now))
            self.door.first_token(now, stream.request)
        if passed.position == attempt.limits.prompt_len:
            prompt = stream.answer.ids[: attempt.limits.prompt_len]
            if computed := self.instances.get(attempt.route.members[0]):
                computed.remember(prompt)
            self.retries.proven(stream.request)
        attempt.handed |= passed.source == "M"
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
        self.sparing.made(attempt.name, passed.position + 1 - limits.prompt_len)
        if stream.answer.both_decode and not stream.answer.sole:
            self._arbitrate(stream, attempt, passed)
        self._go_on(stream, attempt)

    # -- both decode -------------------------------------------------------------------------------

    def on_overlap(self, conn: Connection, frame: Frame) -> None:
        """From the relay: let the main decoder decode along, unless that is another by now."""
        stream = self._attempts.get(frame["request"])
        if stream is None or stream.attempt is None or conn.peer in stream.attempt.lost:
            return
        attempt = stream.attempt
        if conn.peer != attempt.relay or stream.answer.both_decode:
            raise BadFrame(f"{conn.peer} may not let anybody follow {stream.request}")
        if frame["main"] != attempt.main:  # the relay does not know yet that this one is lost
            return
        stream.answer.both_decode = True
        self._let_follow(attempt, attempt.limits.prompt_len, stream.answer.made)

    def _arbitrate(self, stream: Stream, attempt: Attempt, passed: Passed) -> None:
        if passed.source != "M":
            self._let_follow(attempt, passed.position, [passed.token])
            return
        stream.answer.sole = "M"
        assert attempt.relay is not None
        about = {"request": attempt.name, "position": passed.position}
        self.post(attempt.relay, "switched", b"", **about)

    def _let_follow(self, attempt: Attempt, start: int, ids: Sequence[int]) -> None:
        if not ids:
            return
        assert attempt.main is not None
        packed = pack_ids(ids)
        about = {"request": attempt.name, "start": start}
        self.post(attempt.main, "follow", packed, **about)
        size = Frame("follow", about, packed).size
        event = (attempt.name, self.name, attempt.main, start, start + len(ids), False, size)
        self.env.trace.emit(HandoffSent(self.env.now(), *event, follows=True))

    # -- ends --------------------------------------------------------------------------------------

    def on_cancel(self, conn: Connection, frame: Frame) -> None:
        stream = self._streams.get(frame["request"])
        if stream is not None and conn.peer == stream.client:
            self.fail(stream.request, "cancelled by the client")

    def fail(self, request: str, detail: str) -> None:
        if stream := self._streams.get(request):
            self._close(stream, "aborted", detail)

    def _close(self, stream: Stream, reason: str, detail: str, retry: Ns | None = None) -> None:
        del self._streams[stream.request]
        self.door.left(stream.request)
        stream.deadline.cancel()
        self.retries.over(stream.request)
        self._tell_end(stream.client, stream.request, reason, detail, retry)
        if stream.attempt is not None:
            self._give_up(stream, stream.attempt, answered=reason in ("stop", "length"))

    def teach(self, stream: Stream, attempt: Attempt) -> None:
        """P and MD learn the answer where it was made elsewhere: hits stay equal."""
        ids = stream.answer.ids[:-1]  # nobody has KV of the last
        makers = {"P": attempt.prefill, "R": attempt.relay, "M": attempt.main}
        made_at = makers[stream.answer.last_maker]
        spared = self.sparing.spares(attempt.name)
        for name in (attempt.prefill, None if spared else attempt.main):
            if name is not None and name != made_at and name not in self._retired:
                self.post_when_room(
                    name,
                    lambda: True,
                    "learn",
                    pack_ids(ids),
                    request=attempt.name,
                    prompt_tokens=attempt.limits.prompt_len,
                )
        self.outlook.answered(attempt.name, attempt.now, ids, spared)

    def _tell_end(
        self, client: str, request: str, reason: str, detail: str, retry: Ns | None = None
    ) -> None:
        """`retry`: after how long a request that is refused now might be taken."""
        about = {"request": request, "reason": reason, "detail": detail, "retry_ns": retry}
        self.post(client, "end", b"", **about)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        why = f"{self.name} lost {conn.peer}: {error}"
        for stream in list(self._streams.values()):
            if conn.peer == stream.client:
                self.fail(stream.request, why)
            else:
                self._member_lost(stream, conn.peer, why)
        self.outlook.gone(self.env.now(), conn.peer)
        self._introduced.set()
