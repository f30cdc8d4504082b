"""The state of a deployment, rebuilt from its events, one by one. Pure.

`Rebuild` is a `Moment` that is called with each event in order: a fold, so that a recorded run can
be stopped anywhere, on any machine, and walked on from there. It is not the checker (`ledger`,
`invariants`): what does not add up is taken as it comes, so that a broken run can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pddrt import trace as ev
from pddrt.inspection.moment import (
    DECODES,
    EXTENDS,
    GOES_ON,
    HAS_KV,
    LEARNS,
    LOST,
    PREFILLS,
    READY,
    RECEIVES,
    SENDS,
    STOPPED,
    WAITS,
    Direction,
    Handoff,
    Instance,
    Moment,
    Part,
    Request,
    Transfer,
)
from pddrt.trace import Event, request_of
from pddrt.types import LETTER, Ns

TEXT_SHOWN = 200
"""Characters of the newest text that are kept."""
MOMENTARY = frozenset(("reset", "step-fails", "out-of-memory", "cancel", "disconnect"))
"""Faults that are over when they have struck."""


class Rebuild(Moment):
    def __init__(self) -> None:
        super().__init__()
        self._folds: dict[type[Event], Callable[[Any], None]] = {
            ev.InstanceStarted: self._instance_started,
            ev.InstanceCrashed: self._instance_crashed,
            ev.InstanceReturned: self._instance_returned,
            ev.InstanceLeft: self._instance_left,
            ev.LinkRate: self._link_rate,
            ev.FaultInjected: self._fault_injected,
            ev.FaultEnded: self._fault_ended,
            ev.RequestSent: self._request_sent,
            ev.Routed: self._routed,
            ev.Retried: self._retried,
            ev.Rerouted: self._rerouted,
            ev.Spared: self._spared,
            ev.Resumed: self._resumed,
            ev.Admitted: self._admitted,
            ev.Preempted: self._preempted,
            ev.Freed: self._freed,
            ev.PagesTaken: self._pages_taken,
            ev.PagesKept: self._pages_kept,
            ev.PagesFreed: self._pages_freed,
            ev.PagesEvicted: self._pages_evicted,
            ev.PrefillStarted: self._prefill_started,
            ev.PrefillEnded: self._prefill_ended,
            ev.StepBegan: self._step_began,
            ev.Step: self._step_ended,
            ev.StepFailed: self._step_ended,
            ev.KVSent: self._kv_sent,
            ev.KVReceived: self._kv_received,
            ev.KVWhole: self._kv_whole,
            ev.TransferCancelled: self._transfer_cancelled,
            ev.TokensMade: self._tokens_made,
            ev.MainReady: self._main_ready,
            ev.HandoffBegan: self._handoff_began,
            ev.HandoffSent: self._handoff_sent,
            ev.HandoffCaughtUp: self._handoff_caught_up,
            ev.HandoffTaken: self._handoff_taken,
            ev.HandoffEnded: self._handoff_ended,
            ev.TakenOver: self._taken_over,
            ev.Released: self._released,
            ev.TokensReceived: self._tokens_received,
            ev.Finished: self._finished,
        }

    def __call__(self, event: Event) -> None:
        self.number += 1
        self.now = event.t
        if fold := self._folds.get(type(event)):
            fold(event)

    # -- the deployment ----------------------------------------------------------------------------

    def _instance_started(self, e: ev.InstanceStarted) -> None:
        about = (e.instance, e.role, e.site, e.pages, e.page_tokens)
        self.instances[e.instance] = Instance(*about)

    def _instance_crashed(self, e: ev.InstanceCrashed) -> None:
        instance = self.instances.get(e.instance)
        if instance is None:
            return
        instance.down, instance.step, instance.spans = True, None, ()
        instance.owned.clear()
        if not e.kept:
            instance.cached = 0
        for key in [k for k, part in self.parts.items() if part.instance == e.instance]:
            del self.parts[key]
        for key, transfer in list(self.transfers.items()):
            if e.instance in (transfer.src, transfer.dst):
                del self.transfers[key]

    def _instance_returned(self, e: ev.InstanceReturned) -> None:
        if instance := self.instances.get(e.instance):
            instance.down = False

    def _instance_left(self, e: ev.InstanceLeft) -> None:
        self.instances.pop(e.instance, None)

    def _link_rate(self, e: ev.LinkRate) -> None:
        a, b = e.between
        for ends in dict.fromkeys([(a, b)] if e.one_way else [(a, b), (b, a)]):
            if ends in self.links:
                self.links[ends].rate = e.rate
            else:
                self.links[ends] = Direction(e.link, *ends, e.rate)

    def _fault_injected(self, e: ev.FaultInjected) -> None:
        if e.do not in MOMENTARY:
            self.faults[e.fault, e.firing] = f"{e.do}: {e.what}"

    def _fault_ended(self, e: ev.FaultEnded) -> None:
        self.faults.pop((e.fault, e.firing), None)

    # -- requests ----------------------------------------------------------------------------------

    def _request_sent(self, e: ev.RequestSent) -> None:
        self.requests[e.request] = Request(e.request, e.t, e.session, e.turn)

    def _of(self, attempt: str) -> Request | None:
        """The request that this is the current attempt at."""
        request = self.requests.get(request_of(attempt))
        return request if request is not None and request.name == attempt else None

    def _routed(self, e: ev.Routed) -> None:
        request = self._of(e.request)
        if request is None:
            return
        request.pipeline, request.reason = e.pipeline, e.reason
        request.prefill, request.relay, request.main = e.prefill, e.relay, e.main
        request.prompt_tokens, request.expected = e.prompt_tokens, e.wan_estimate_ns
        request.max_tokens = e.max_tokens
        request.handoff = Handoff() if e.relay and e.main else None
        first = e.prefill or e.relay or e.main
        if first is not None:
            self._offered(e.request, first, e.t)

    def _offered(self, attempt: str, instance: str | None, now: Ns) -> None:
        """It waits for memory there."""
        request = self._of(attempt)
        if instance is None or request is None or (attempt, instance) in self.parts:
            return
        role = self.instances[instance].role if instance in self.instances else ""
        part = Part(attempt, instance, role, WAITS, now, request.prompt_tokens)
        self.parts[attempt, instance] = part

    def _retried(self, e: ev.Retried) -> None:
        if request := self.requests.get(e.request):
            request.attempt = e.attempt

    def _rerouted(self, e: ev.Rerouted) -> None:
        if request := self._of(e.request):
            request.main = e.main or request.main
            if e.then == "takeover":
                request.relay, request.handoff = None, None
            elif request.handoff is not None:
                request.handoff = Handoff(phase=f"goes on without {e.lost}")

    def _spared(self, e: ev.Spared) -> None:
        if request := self._of(e.request):
            request.held = True

    def _resumed(self, e: ev.Resumed) -> None:
        if request := self._of(e.request):
            request.held = False

    def _released(self, e: ev.Released) -> None:
        if request := self.requests.get(request_of(e.request)):
            request.released = True

    def _tokens_received(self, e: ev.TokensReceived) -> None:
        if request := self.requests.get(request_of(e.request)):
            request.first = e.t if request.first is None else request.first
            request.last = e.t
            request.client[e.source] = request.client.get(e.source, 0) + e.end - e.start
            request.text = (request.text + e.text)[-TEXT_SHOWN:]

    def _finished(self, e: ev.Finished) -> None:
        if request := self.requests.get(request_of(e.request)):
            request.finish, request.detail = e.reason, e.detail
            self._forget_if_over(request.id)

    def _forget_if_over(self, request: str) -> None:
        known = self.requests.get(request)
        if known is None or known.finish is None or self.parts_of(request):
            return
        for key in [k for k in self.transfers if request_of(k[0]) == request]:
            del self.transfers[key]
        del self.requests[request]
        self.ended += 1

    # -- memory ------------------------------------------------------------------------------------

    def _part(self, attempt: str, instance: str) -> Part | None:
        return self.parts.get((attempt, instance))

    def _admitted(self, e: ev.Admitted) -> None:
        self._offered(e.request, e.instance, e.t)
        part, request = self._part(e.request, e.instance), self._of(e.request)
        if part is None or request is None:
            return
        part.hit = part.computed = e.hit
        alone = request.pipeline in ("P", "MD")
        part.enter(READY if alone or part.role == "prefill" else RECEIVES, e.t)
        if e.instance == request.prefill and not alone:
            first = request.relay or (None if request.held else request.main)
            self._offered(e.request, first, e.t)
        elif e.instance == request.relay and not request.held:
            self._offered(e.request, request.main, e.t)

    def _preempted(self, e: ev.Preempted) -> None:
        if part := self._part(e.request, e.instance):
            part.enter(LOST, e.t)
            part.step = None

    def _freed(self, e: ev.Freed) -> None:
        self.parts.pop((e.request, e.instance), None)
        self._forget_if_over(request_of(e.request))

    def _own(self, instance: str, owner: str, change: int) -> None:
        found = self.instances.get(instance)
        if found is not None and (change > 0 or owner in found.owned):  # else it came before
            left = found.owned.get(owner, 0) + change
            if left:
                found.owned[owner] = left
            else:
                found.owned.pop(owner, None)
        if part := self._part(owner, instance):
            part.pages += change

    def _pages_taken(self, e: ev.PagesTaken) -> None:
        if (e.owner, e.instance) not in self.parts:
            role = self.instances[e.instance].role if e.instance in self.instances else ""
            request = self.requests.get(request_of(e.owner))
            length = request.prompt_tokens if request else 0
            phase = WAITS if request else LEARNS
            self.parts[e.owner, e.instance] = Part(e.owner, e.instance, role, phase, e.t, length)
        self._own(e.instance, e.owner, _count(e.pages))

    def _pages_kept(self, e: ev.PagesKept) -> None:
        self._own(e.instance, e.owner, -_count(e.pages))
        if found := self.instances.get(e.instance):
            found.cached += _count(e.pages)

    def _pages_freed(self, e: ev.PagesFreed) -> None:
        self._own(e.instance, e.owner, -_count(e.pages))
        part, found = self._part(e.owner, e.instance), self.instances.get(e.instance)
        if e.over and found is not None:
            found.owned.pop(e.owner, None)
        if e.over and part is not None and part.phase == LEARNS:
            del self.parts[e.owner, e.instance]

    def _pages_evicted(self, e: ev.PagesEvicted) -> None:
        if found := self.instances.get(e.instance):
            found.cached -= _count(e.pages)

    # -- steps and tokens --------------------------------------------------------------------------

    def _prefill_started(self, e: ev.PrefillStarted) -> None:
        if part := self._part(e.request, e.instance):
            part.enter(PREFILLS, e.t)

    def _prefill_ended(self, e: ev.PrefillEnded) -> None:
        request, part = self._of(e.request), self._part(e.request, e.instance)
        if part is not None:
            alone = request is not None and request.pipeline in ("P", "MD")
            part.enter(DECODES if alone else SENDS, e.t)

    def _step_began(self, e: ev.StepBegan) -> None:
        if instance := self.instances.get(e.instance):
            instance.step, instance.spans = e.t, e.spans
        for owner, start, end in e.spans:
            if part := self._part(owner, e.instance):
                part.step = (start, end)

    def _step_ended(self, e: ev.Step | ev.StepFailed) -> None:
        instance = self.instances.get(e.instance)
        if instance is None:
            return
        for owner, _, end in instance.spans:
            if part := self._part(owner, e.instance):
                part.step = None
                if isinstance(e, ev.Step):
                    part.computed = max(part.computed, end)
                    if part.phase == EXTENDS:
                        part.enter(HAS_KV, e.t)
        instance.step, instance.spans = None, ()
        instance.steps += 1

    def _tokens_made(self, e: ev.TokensMade) -> None:
        if part := self._part(e.request, e.instance):
            part.made, part.tokens = e.end, part.tokens + e.end - e.start
            if part.phase == GOES_ON:
                part.enter(DECODES, e.t)
        request = self._of(e.request)
        if request is not None and request.handoff is not None and e.source != LETTER["main"]:
            request.handoff.relay_last = e.end

    # -- transfers ---------------------------------------------------------------------------------

    def _kv_sent(self, e: ev.KVSent) -> None:
        key = (e.request, e.dst)
        transfer = self.transfers.get(key)
        if transfer is None:
            transfer = self.transfers[key] = Transfer(e.request, e.src, e.dst)
        if transfer.way and e.start < transfer.way[-1][1]:
            transfer.way.clear()  # it starts over
        transfer.way.append((e.start, e.end, e.bytes, e.t))

    def _kv_received(self, e: ev.KVReceived) -> None:
        if part := self._part(e.request, e.instance):
            part.receive(e.start, e.end)
        transfer = self.transfers.get((e.request, e.instance))
        if transfer is None:
            return
        while transfer.way and transfer.way[0][1] <= e.end:
            transfer.way.popleft()
        transfer.arrived += e.bytes
        if (ends := self.ends(transfer)) in self.links and ends is not None:
            self.links[ends].arrived += e.bytes

    def _kv_whole(self, e: ev.KVWhole) -> None:
        self.transfers.pop((e.request, e.instance), None)
        request, part = self._of(e.request), self._part(e.request, e.instance)
        if part is None:
            return
        part.computed = max(part.computed, e.prompt_tokens)
        relayed = request is not None and request.relay is not None
        part.enter(HAS_KV if relayed and part.role == "main" else DECODES, e.t)

    def _transfer_cancelled(self, e: ev.TransferCancelled) -> None:
        self.transfers.pop((e.request, e.dst), None)
        if part := self._part(e.request, e.dst):
            part.enter(STOPPED, e.t)

    # -- the handoff -------------------------------------------------------------------------------

    def _handoff_of(self, attempt: str) -> Handoff | None:
        request = self._of(attempt)
        return None if request is None else request.handoff

    def _main_ready(self, e: ev.MainReady) -> None:
        if handoff := self._handoff_of(e.request):
            handoff.phase, handoff.main_ready = "main is ready, and the relay knows", e.t

    def _handoff_began(self, e: ev.HandoffBegan) -> None:
        if (handoff := self._handoff_of(e.request)) is None:
            return
        request, relay = self._of(e.request), self.instances.get(e.relay)
        assert request is not None
        handoff.policy, handoff.decision, handoff.expected = e.policy, e.decision, e.expected
        handoff.lacking.append(e.lacking)
        handoff.caught = handoff.sent = handoff.taken = request.prompt_tokens
        handoff.phase = f"the policy said {e.decision}"
        if relay is not None and relay.pages:
            handoff.occupancy = relay.used / relay.pages
            handoff.batch = sum(p.phase == DECODES for p in self.parts_on(e.relay))

    def _handoff_sent(self, e: ev.HandoffSent) -> None:
        if handoff := self._handoff_of(e.request):
            handoff.sent, handoff.rounds = e.end, handoff.rounds + 1
            if e.follows:
                handoff.phase = "both decode"
            elif e.last:
                handoff.phase, handoff.ended = "the last ids are on their way", e.reason
            else:
                handoff.phase = f"piece {handoff.rounds} is on its way"

    def _handoff_caught_up(self, e: ev.HandoffCaughtUp) -> None:
        if handoff := self._handoff_of(e.request):
            handoff.caught = e.end
            handoff.lacking.append(e.made - e.end)
            handoff.phase = f"main has computed piece {handoff.rounds}, and the relay knows"

    def _handoff_taken(self, e: ev.HandoffTaken) -> None:
        if part := self._part(e.request, e.main):
            part.enter(GOES_ON if e.decodes else EXTENDS, e.t)
        if handoff := self._handoff_of(e.request):
            handoff.taken = e.end
            if handoff.phase != "both decode":
                handoff.phase = "main has taken over" if e.decodes else "main computes a piece"

    def _handoff_ended(self, e: ev.HandoffEnded) -> None:
        if handoff := self._handoff_of(e.request):
            handoff.phase, handoff.ended = "main has taken over", e.reason

    def _taken_over(self, e: ev.TakenOver) -> None:
        if part := self._part(e.request, e.main):
            part.enter(GOES_ON, e.t)


def _count(pages: ev.PageRanges) -> int:
    return sum(count for _, count in pages)
