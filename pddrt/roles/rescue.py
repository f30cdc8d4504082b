"""How the gateway goes on with requests that have lost an instance.

`attempts` decides; here is what is done: who is told what, what the books say, which attempt comes
next. See docs/recovery.md. `gateway` begins attempts and ends requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pddrt.env import Env, Timer
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Limits
from pddrt.netem.net import Connection, Net, Topology
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.route import Facts, NoRoute, Policy, Route, cheapest
from pddrt.roles.answer import Answer
from pddrt.roles.attempts import Attempt, Recovery, Retries
from pddrt.roles.roster import Roster
from pddrt.roles.sparing import Sparing
from pddrt.trace import Rerouted, Retried
from pddrt.types import Ns, Sampling


@dataclass(slots=True)
class Stream:
    """One request under way. `attempt` None: it pauses before a further one. `begun`: attempts so
    far; `tries`: how often a further one was asked for. `avoid`: who failed it.
    """

    request: str
    session: str | None
    client: str
    sampling: Sampling
    answer: Answer
    due: Ns
    deadline: Timer
    attempt: Attempt | None = None
    begun: int = 0
    tries: int = 0
    avoid: set[str] = field(default_factory=set)
    why: str = ""
    """Why the last attempt was given up."""

    @property
    def limits(self) -> Limits:
        return self.answer.limits


class Rescue(Roster):
    """The requests under way, and what becomes of them when somebody is lost."""

    def __init__(
        self,
        env: Env,
        net: Net,
        name: str,
        *,
        topology: Topology,
        policy: Policy,
        signal_age: Ns,
        anomaly: Anomaly | None,
        recovery: Recovery,
    ) -> None:
        """`anomaly`: what need not be sent to main decoders."""
        super().__init__(env, net, name, topology=topology, signal_age=signal_age)
        self.policy = policy
        self.sparing = Sparing(env, self.outlook, anomaly, self.post)
        self.retries = Retries(env, recovery, lambda: len(self._streams), self._begin_soon)
        self._ended = asyncio.Event()
        self._streams: dict[str, Stream] = {}
        self._attempts: dict[str, Stream] = {}
        """By the name of its attempt."""

    # -- for subclasses ----------------------------------------------------------------------------

    def begin(self, stream: Stream, route: Route, facts: Facts) -> None:
        """An attempt begins: behind what has been passed on, by this route."""
        raise NotImplementedError

    def _close(self, stream: Stream, reason: str, detail: str) -> None:
        """The request is over."""
        raise NotImplementedError

    def teach(self, stream: Stream, attempt: Attempt) -> None:
        """It was answered: who shall know the answer learns it."""
        raise NotImplementedError

    # -- who is lost -------------------------------------------------------------------------------

    def on_failed(self, conn: Connection, frame: Frame) -> None:
        """From an instance: it cannot go on with this request, and has ended it there."""
        stream = self._attempts.get(frame["request"])
        if stream is not None and stream.attempt and conn.peer in stream.attempt.members:
            self._member_lost(stream, conn.peer, frame["detail"], frame["by"])

    def on_lost(self, conn: Connection, frame: Frame) -> None:
        """From an instance: it goes on with this request, and has lost somebody who is in it."""
        stream, peer, why = self._attempts.get(frame["request"]), frame["whom"], frame["detail"]
        if stream is None or stream.attempt is None:
            self.post(conn.peer, "close", request=frame["request"], answered=False)
            return
        attempt = stream.attempt
        if conn.peer not in attempt.members or peer not in attempt.members:
            return
        if conn.peer == attempt.prefill:
            self._member_lost(stream, peer, why)
        elif conn.peer != peer:  # both may be there, and not reach each other
            attempt.parted, stream.why = True, why
            self._go_on(stream, attempt)

    def _member_lost(self, stream: Stream, who: str, why: str, by: str = "") -> None:
        """`who` can do nothing more for its present attempt; `by`: whose fault that is."""
        attempt = stream.attempt
        if attempt is None or who not in attempt.members:
            return
        attempt.lost.add(who)
        stream.avoid.add(by or who)
        stream.why = why
        match attempt.verdict(bool(stream.answer.made)):
            case "takeover":
                self._take_over(stream, attempt)
            case "alone":
                self._relay_alone(stream, attempt, who)
            case "again":
                self._give_up(stream, attempt)
                self._try_again(stream, why)
                return
        for name in attempt.members:
            if name in attempt.lost:
                self._drop(stream, attempt, name, "on")

    def _go_on(self, stream: Stream, attempt: Attempt) -> None:
        """Something is known now that a main decoder may wait for to take over."""
        made = stream.answer.made
        if attempt.parted and attempt.verdict(bool(made)) == "takeover":
            self._take_over(stream, attempt)
        if attempt.taking and not attempt.told and made and attempt.main in attempt.whole:
            attempt.told = True
            about = {"request": attempt.name, "start": attempt.limits.prompt_len}
            self.post(attempt.main or "", "takeover", pack_ids(made), **about)

    def _take_over(self, stream: Stream, attempt: Attempt) -> None:
        """The main decoder goes on in place of the relay."""
        answer, main = stream.answer, attempt.main
        assert attempt.relay is not None
        self._drop(stream, attempt, attempt.relay, "takeover")
        attempt.taking, attempt.parted = True, False
        answer.forget("R")
        if answer.both_decode:  # it goes on by itself
            answer.sole, attempt.told = "M", True
        made = len(answer.ids) - stream.limits.prompt_len
        self.sparing.needed(attempt.name, made)
        if attempt.prefill and not (main in attempt.whole and answer.made):
            self.post(attempt.prefill, "unrelay", request=attempt.name)
        self._go_on(stream, attempt)

    def _relay_alone(self, stream: Stream, attempt: Attempt, who: str) -> None:
        """The relay goes on without its main decoder: to another one, if P can feed that."""
        main, other = attempt.main, None
        assert main is not None
        assert attempt.relay is not None
        if attempt.prefill not in (None, who) and main not in attempt.whole:
            other = self._other_main(stream, attempt, but=main)
        self.outlook.cut(attempt.name)
        self.sparing.forget(attempt.name)
        stream.answer.forget("M")
        stream.answer.both_decode, stream.answer.sole, attempt.parted = False, "", False
        attempt.main = other  # so that what follows names it
        self._drop(stream, attempt, main, "another main" if other else "alone")
        for name in (attempt.relay, attempt.prefill):
            if name is not None and name not in attempt.lost:
                self.post(name, "rejoin", request=attempt.name, main=other)

    def _other_main(self, stream: Stream, attempt: Attempt, but: str) -> str | None:
        """A main decoder that P, which has the KV, can feed. It is entered in the books."""
        prompt, left = stream.answer.ids[: attempt.limits.prompt_len], attempt.limits.max_tokens
        shunned = stream.avoid | attempt.lost | {but}
        names = [name for name in self.reachable if name not in shunned]
        facts = self.outlook.facts(self.env.now(), prompt, left, names)
        able = [m for m in facts.able("main") if (attempt.prefill, m.name) in facts.paths]
        if not able:
            return None
        main = cheapest(able)
        self.outlook.joined(attempt.name, main.name, len(prompt) + 1 - main.hit)
        return main.name

    def _drop(self, stream: Stream, attempt: Attempt, name: str, then: str) -> None:
        """It has no part in this attempt any more."""
        attempt.drop(name)
        self.outlook.left(attempt.name, name)
        self.post(name, "close", request=attempt.name, answered=False)
        about = (attempt.name, name, then, attempt.main, stream.why)
        self.env.trace.emit(Rerouted(self.env.now(), *about))
        self._ended.set()

    def _give_up(self, stream: Stream, attempt: Attempt, answered: bool = False) -> None:
        """This attempt is over, whatever it was doing."""
        stream.attempt = None
        del self._attempts[attempt.name]
        for name in attempt.members:
            self.post(name, "close", request=attempt.name, answered=answered)
        if answered:
            self.teach(stream, attempt)
        made = stream.answer.next - stream.limits.prompt_len
        self.sparing.ended(attempt.name, stream.session, made, answered)
        self.outlook.closed(attempt.name, attempt.members)
        self._ended.set()

    # -- further attempts --------------------------------------------------------------------------

    def _try_again(self, stream: Stream, why: str) -> None:
        tries, stream.tries = stream.tries, stream.tries + 1
        late = self.env.now() >= stream.due
        if late or not self.retries.again(stream.request, tries):
            self._close(stream, "aborted", why)

    def _begin_soon(self, request: str) -> None:
        self.env.spawn(self._begin_again(request), f"{self.name} tries {request} again")

    async def _begin_again(self, request: str) -> None:
        """Elsewhere, if there is any; else wherever there is anybody."""
        stream = self._streams.get(request)
        if stream is None or stream.attempt is not None:
            return
        now, answer, refusal = self.env.now(), stream.answer, ""
        left = answer.longest - answer.next
        for names in ([n for n in self.reachable if n not in stream.avoid], self.reachable):
            facts = self.outlook.facts(now, answer.ids, left, names)
            try:
                route = self.policy.route(facts)
            except NoRoute as no_route:
                refusal = str(no_route)
                continue
            made = answer.next - stream.limits.prompt_len
            self.env.trace.emit(Retried(now, request, stream.begun, stream.why, made))
            self.begin(stream, route, facts)
            return
        self._try_again(stream, f"{stream.why}; {refusal}")
