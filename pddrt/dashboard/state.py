"""What is going on in a run: a `Board` hears its events and gives snapshots. Pure.

It keeps no more than can be shown: requests under way, the last few that ended, instances,
directions of links, and running figures of bounded size. It reads no clock: whoever asks for a
`Snapshot` says what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from pddrt import trace as ev
from pddrt.dashboard.facts import DEFAULT_CHOICE, ORDERS, Choice, Notice, Snapshot, Totals
from pddrt.dashboard.parts import Direction, Instance, Recent, Request, Spread, Wire
from pddrt.trace import Event
from pddrt.types import SECOND, Ns

MAX_PROMPT = 400
"""Characters of a prompt that are kept."""
KEPT = 64
"""Requests that have ended and can still be shown."""


class Board:
    """Hears a trace. `slo`: (TTFT, TPOT) that the scenario asks, None where it does not."""

    def __init__(self, slo: tuple[Ns | None, Ns | None] = (None, None)) -> None:
        self.name, self.seed, self.clock = "", 0, ""
        self.now: Ns = 0
        self._slo = slo
        self._requests: dict[str, Request] = {}
        self._ended: deque[str] = deque()
        self._instances: dict[str, Instance] = {}
        self._directions: dict[tuple[str, str], Direction] = {}
        self._notices: deque[Notice] = deque(maxlen=8)
        self._ttft, self._itl = Spread(), Spread()
        self._sent = self._finished = self._lost = self._met = self._tokens = 0
        self._first_sent: Ns = 0
        self._last_finish: Ns = 0
        self._recent_tokens = Recent()
        self._spotlight = ""
        self._takes: Mapping[type, Callable[[Any], None]] = {
            ev.RunStarted: self._run_started,
            ev.InstanceStarted: self._instance_started,
            ev.InstanceCrashed: self._instance_gone,
            ev.InstanceReturned: self._instance_returned,
            ev.InstanceLeft: self._instance_gone,
            ev.LinkRate: self._link_rate,
            ev.FaultInjected: self._fault,
            ev.FaultEnded: self._fault,
            ev.FaultMissed: self._fault,
            ev.RequestSent: self._request_sent,
            ev.Routed: self._routed,
            ev.Retried: self._retried,
            ev.Rerouted: self._rerouted,
            ev.TakenOver: self._taken_over,
            ev.Admitted: self._admitted,
            ev.Preempted: self._preempted,
            ev.Freed: self._freed,
            ev.PrefillStarted: self._prefill_started,
            ev.PrefillEnded: self._prefill_ended,
            ev.StepBegan: self._step_began,
            ev.Step: self._step,
            ev.StepFailed: self._step_failed,
            ev.KVSent: self._kv_sent,
            ev.KVReceived: self._kv_received,
            ev.KVWhole: self._kv_whole,
            ev.TransferCancelled: self._transfer_cancelled,
            ev.HandoffSent: self._handoff_sent,
            ev.TokensReceived: self._tokens_received,
            ev.Finished: self._request_over,
        }
        self.hears = frozenset(self._takes)
        """Kinds of events; others need not be brought here."""

    def __call__(self, event: Event) -> None:
        self.now = max(self.now, event.t)
        take = self._takes.get(type(event))
        if take is not None:
            take(event)

    # -- asking ------------------------------------------------------------------------------------

    def snapshot(
        self, now: Ns | None = None, choice: Choice = DEFAULT_CHOICE, rows: int = 40
    ) -> Snapshot:
        """At most `rows` requests, the followed one among them. Where not all fit: by arrival those
        under way go first, and then the newer ones; in any other order its first ones.
        """
        now = max(self.now, now or 0)
        among = self._among(choice)
        followed = self._followed(choice)
        shown = among
        if len(among) > rows:
            if choice.order == ORDERS[0]:
                last = [r for r in among if r.ended is not None]
                last += [r for r in among if r.ended is None]
                names = {r.id for r in last[len(last) - rows :]}
                shown = [r for r in among if r.id in names]
            else:
                shown = among[:rows]
            if shown and followed in among and followed not in shown:
                shown = sorted([followed, *shown[1:]], key=among.index)
        return Snapshot(
            name=self.name,
            seed=self.seed,
            clock=self.clock,
            now=now,
            totals=self._totals(now),
            rows=tuple(request.view() for request in shown),
            hidden=len(among) - len(shown),
            followed=followed.view() if followed else None,
            instances=tuple(instance.view(now) for instance in self._instances.values()),
            links=tuple(direction.view(now) for direction in self._directions.values()),
            notices=tuple(self._notices),
        )

    @property
    def instances(self) -> int:
        return len(self._instances)

    @property
    def directions(self) -> int:
        return len(self._directions)

    def routed(self, request: str) -> ev.Routed | None:
        """How a request was routed last; None where it was not, or is forgotten."""
        one = self._requests.get(request)
        return one.routed if one is not None else None

    def order(self, choice: Choice) -> list[str]:
        """The names of all that could be shown, in the order of the rows."""
        return [request.id for request in self._among(choice)]

    def text(self, request: str, since: int = 0) -> tuple[int, list[tuple[str, str]]]:
        """What the client got of an answer from its piece `since` on, (maker, text) each, and the
        number of the first of them: older ones may be gone.
        """
        one = self._requests.get(request)
        if one is None:
            return 0, []
        gone = one.received - len(one.pieces)
        first = max(since, gone)
        return first, list(islice(one.pieces, first - gone, None))

    def _among(self, choice: Choice) -> list[Request]:
        among = [r for r in self._requests.values() if choice.ended or r.ended is None]
        if choice.order == "TTFT":
            among.sort(key=lambda r: r.sent - (self.now if r.first is None else r.first))
        elif choice.order == "duration":
            among.sort(key=lambda r: r.sent - (self.now if r.ended is None else r.ended))
        return among

    def _followed(self, choice: Choice) -> Request | None:
        """Unless one was chosen: one that decodes, and the same until it has ended."""
        if choice.follow in self._requests:
            return self._requests[choice.follow]
        current = self._requests.get(self._spotlight)
        if current is None or current.ended is not None:
            under_way = [r for r in self._requests.values() if r.ended is None]
            decodes = next((r for r in under_way if r.made), None)
            newest = next(reversed(self._requests.values()), None)
            current = decodes or current or next(iter(under_way), newest)
            self._spotlight = current.id if current else ""
        return current

    def _totals(self, now: Ns) -> Totals:
        span = self._last_finish - self._first_sent
        over = self._finished + self._lost
        return Totals(
            sent=self._sent,
            under_way=self._sent - over,
            finished=self._finished,
            lost=self._lost,
            ttft=_pair(self._ttft),
            itl=_pair(self._itl),
            goodput=self._met * SECOND / span if span > 0 else None,
            met=self._met / over if over else None,
            tokens=self._tokens,
            tokens_rate=self._recent_tokens.rate(now, self._first_sent),
        )

    # -- the deployment ----------------------------------------------------------------------------

    def _run_started(self, e: ev.RunStarted) -> None:
        self.name, self.seed, self.clock = e.name, e.seed, e.clock

    def _instance_started(self, e: ev.InstanceStarted) -> None:
        self._instances[e.instance] = Instance(e.instance, e.role, e.site, e.pages)

    def _instance_gone(self, e: ev.InstanceCrashed | ev.InstanceLeft) -> None:
        crashed = isinstance(e, ev.InstanceCrashed)
        if (instance := self._instances.get(e.instance)) is not None:
            instance.down, instance.stepping, instance.batch = True, False, 0
            instance.holding.clear()
            instance.used = 0
        self._note(e.t, f"{e.instance} {'crashed' if crashed else 'left'}", bad=crashed)

    def _instance_returned(self, e: ev.InstanceReturned) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.down = False
        self._note(e.t, f"{e.instance} is back")

    def _link_rate(self, e: ev.LinkRate) -> None:
        a, b = e.between
        for ends in dict.fromkeys([(a, b)] if e.one_way else [(a, b), (b, a)]):
            direction = self._directions.get(ends)
            if direction is None:
                self._directions[ends] = Direction(e.link, *ends, e.rate)
            else:
                direction.cap = e.rate

    def _fault(self, e: ev.FaultInjected | ev.FaultEnded | ev.FaultMissed) -> None:
        if isinstance(e, ev.FaultMissed):
            self._note(e.t, f"fault {e.do} missed: {e.why}")
        else:
            over = isinstance(e, ev.FaultEnded)
            self._note(e.t, f"fault {e.do}{' is over' if over else ''}: {e.what}", bad=not over)

    def _note(self, t: Ns, what: str, *, bad: bool = False) -> None:
        self._notices.append(Notice(t, what, bad))

    # -- steps and memory --------------------------------------------------------------------------

    def _step_began(self, e: ev.StepBegan) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.stepping, instance.batch = True, len(e.spans)

    def _step(self, e: ev.Step) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.stepping, instance.stepped, instance.batch = False, e.t, e.sequences
            instance.used = e.pages_used
            instance.busy.add(e.start_ns, e.t, (e.t - e.start_ns) / SECOND)

    def _step_failed(self, e: ev.StepFailed) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.stepping = False
        self._note(e.t, f"a step of {e.instance} failed: {e.detail}", bad=True)

    def _admitted(self, e: ev.Admitted) -> None:
        instance, request = self._instances.get(e.instance), self._of(e)
        if instance is None:
            return
        if instance.role != "prefill":
            instance.waiting.discard(e.request)
        instance.holding.add(e.request)
        if request is not None and request.routed is not None and e.instance not in request.hits:
            request.hits[e.instance] = e.hit
            instance.prompt += request.routed.prompt_tokens
            instance.hit += e.hit

    def _preempted(self, e: ev.Preempted) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.leave(e.request)
            instance.waiting.add(e.request)
        if (request := self._of(e)) is not None:
            request.marks.append(e.t)
            request.enter("wait", e.t)

    def _freed(self, e: ev.Freed) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.leave(e.request)

    # -- a request ---------------------------------------------------------------------------------

    def _of(self, e: Any) -> Request | None:
        """The request that an event is of; None for one of an attempt that was given up."""
        request = self._requests.get(ev.request_of(e.request))
        return request if request is not None and request.attempt == e.request else None

    def _request_sent(self, e: ev.RequestSent) -> None:
        if not self._sent:
            self._first_sent = e.t
        self._sent += 1
        self._requests[e.request] = Request(
            e.request, e.t, e.prompt[:MAX_PROMPT], e.request, [("queue", e.t, None)]
        )

    def _routed(self, e: ev.Routed) -> None:
        request = self._requests.get(ev.request_of(e.request))
        if request is None:
            return
        request.max_tokens = request.max_tokens or e.max_tokens
        request.routed, request.main, request.attempt = e, e.main, e.request
        for name in (e.prefill, e.relay, e.main):
            if name in self._instances:
                self._instances[name].waiting.add(e.request)

    def _retried(self, e: ev.Retried) -> None:
        request = self._requests.get(ev.request_of(e.request))
        if request is None:
            return
        self._wait_no_more(request)
        for wire in request.wires.values():
            wire.stop(e.t, cancelled=True)
        request.wires, request.hits, request.whole = {}, {}, set()
        request.attempt = ev.attempt_name(request.id, e.attempt)
        request.attempts = e.attempt + 1
        request.marks.append(e.t)
        request.enter("queue", e.t)
        self._note(e.t, f"{request.id} is tried again: {e.why}", bad=True)

    def _rerouted(self, e: ev.Rerouted) -> None:
        if (request := self._requests.get(ev.request_of(e.request))) is None:
            return
        if e.main is not None and e.main != request.main:
            request.main = e.main
            if e.main in self._instances and e.main not in request.hits:
                self._instances[e.main].waiting.add(request.attempt)
        request.marks.append(e.t)
        self._note(e.t, f"{request.id} goes on without {e.lost}: {e.then}", bad=True)

    def _taken_over(self, e: ev.TakenOver) -> None:
        if (request := self._of(e)) is not None:
            request.enter("handoff", e.t)

    def _prefill_started(self, e: ev.PrefillStarted) -> None:
        if (instance := self._instances.get(e.instance)) is not None:
            instance.waiting.discard(e.request)
        if (request := self._of(e)) is not None:
            request.enter("prefill", e.t)

    def _prefill_ended(self, e: ev.PrefillEnded) -> None:
        request = self._of(e)
        if request is not None and request.spans[-1][0] == "prefill":
            request.enter("wait", e.t)

    def _kv_sent(self, e: ev.KVSent) -> None:
        request = self._of(e)
        if request is None:
            return
        wire = request.wires.get(e.dst)
        if wire is None:
            ends = [self._instances.get(name) for name in (e.src, e.dst)]
            sites = tuple(end.site for end in ends if end is not None)
            direction = self._directions.get(sites) if len(sites) == 2 else None
            prompt = request.routed.prompt_tokens if request.routed else e.end
            wire = Wire(e.dst, e.dst == request.main, e.t, direction, e.start, prompt)
            request.wires[e.dst] = wire
        wire.hand_over(e)

    def _kv_received(self, e: ev.KVReceived) -> None:
        request = self._of(e)
        if request is not None and (wire := request.wires.get(e.instance)) is not None:
            wire.receive(e)

    def _kv_whole(self, e: ev.KVWhole) -> None:
        if (request := self._of(e)) is not None:
            request.whole.add(e.instance)
            if (wire := request.wires.get(e.instance)) is not None:
                wire.stop(e.t, cancelled=False)

    def _transfer_cancelled(self, e: ev.TransferCancelled) -> None:
        request = self._of(e)
        if request is not None and (wire := request.wires.get(e.dst)) is not None:
            wire.stop(e.t, cancelled=True)

    def _handoff_sent(self, e: ev.HandoffSent) -> None:
        if (request := self._of(e)) is None:
            return
        request.rounds.append(e.t)
        request.sends += 1
        request.handed += e.end - e.start
        if e.last and not e.follows and request.spans[-1][0] in ("relay", "wait"):
            request.enter("handoff", e.t)

    def _tokens_received(self, e: ev.TokensReceived) -> None:
        request = self._requests.get(e.request)
        if request is None:
            return
        count = e.end - e.start
        request.decode(e.source, e.t)
        if request.first is None:
            request.first = e.t
            self._ttft.add(e.t - request.sent)
            self._itl.add(0, count - 1)
        else:
            self._itl.add(e.t - request.last)
            self._itl.add(0, count - 1)
        request.last = e.t
        request.made[e.source] = request.made.get(e.source, 0) + count
        request.pieces.append((e.source, e.text))
        request.received += 1
        self._tokens += count
        self._recent_tokens.add(e.t, e.t, count)

    def _request_over(self, e: ev.Finished) -> None:
        request = self._requests.get(e.request)
        if request is None:
            return
        phase, since, _ = request.spans[-1]
        request.spans[-1] = (phase, since, e.t)
        request.ended, request.reason = e.t, e.reason
        self._wait_no_more(request)
        for wire in request.wires.values():
            wire.stop(e.t, cancelled=True)
        if e.reason in ("stop", "length"):
            self._finished += 1
            self._last_finish = e.t
            self._met += self._in_slo(request)
        else:
            self._lost += 1
            request.marks.append(e.t)
            self._note(e.t, f"{request.id} was {e.reason}: {e.detail}", bad=True)
        self._ended.append(request.id)
        if len(self._ended) > KEPT:
            del self._requests[self._ended.popleft()]

    def _in_slo(self, request: Request) -> bool:
        """As the summary judges it."""
        ttft, tpot = self._slo
        if request.ttft is None:
            return False
        in_time = ttft is None or request.ttft <= ttft
        return in_time and (tpot is None or (request.tpot or 0) <= tpot)

    def _wait_no_more(self, request: Request) -> None:
        r = request.routed
        for name in (r.prefill, r.relay, r.main, request.main) if r is not None else ():
            if name in self._instances:
                self._instances[name].waiting.discard(request.attempt)


def _pair(spread: Spread) -> tuple[Ns, Ns] | None:
    p50, p90 = spread.at(50), spread.at(90)
    return None if p50 is None or p90 is None else (p50, p90)
