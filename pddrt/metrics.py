"""From events to records: what the trace says of each request, and of the run. Pure; reads the
trace and nothing else. `summary` makes files of it.

TTFT is what the client felt, request sent to first token id received, and is the sum of six legs,
exact in nanoseconds:

    leg            until
    gateway        the gateway has routed the request
    prefill_queue  P starts its first chunk
    prefill        P has sampled the first token
    decoder_queue  the first decoder has reserved pages (0 where that was done during prefill)
    transfer       the gateway knows that the first decoder holds the KV: the part that prefill did
                   not hide, and the notice's own way
    delivery       the client has the first token

A stamp that lies before its predecessor counts as equal to it, so no leg is negative and none is
counted twice. Where P itself released the token (`first_token: early`, or an answer of one token),
decoder_queue and transfer are zero. Where there was a further attempt before the first token, the
legs are those of the last one; what came before it is prefill_queue.

TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pddrt import trace as ev
from pddrt.foresight import HEARS, Foresight
from pddrt.seam import MainSteps, Seam
from pddrt.trace import Event
from pddrt.types import SECOND, Logprobs, Ns, Sampling

LEGS = ("gateway", "prefill_queue", "prefill", "decoder_queue", "transfer", "delivery")
NEAR_TOKENS = 8
SETTLE_TIME: Ns = 10 * SECOND
"""After its end a request is still heard of: instances free it, what was under way arrives."""
LAST_TIME: Ns = 600 * SECOND
"""An instance that has not freed it by then is not waited for."""


@dataclass(slots=True)
class RequestRecord:
    """What the trace says of one request. Times are absolute ns; None where it never got there."""

    id: str
    session: int
    turn: int
    sent: Ns
    prompt: str = ""
    number: int = 0
    """How many were sent before it."""
    pipeline: str | None = None
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    attempt: int = 0
    """How many further ones there were."""
    rerouted: list[str] = field(default_factory=list)
    """How attempts went on without an instance that was lost: see `trace.Rerouted`."""
    routed: Ns | None = None
    prefill_started: Ns | None = None
    prefill_ended: Ns | None = None
    admitted: dict[str, Ns] = field(default_factory=dict)
    whole: dict[str, Ns] = field(default_factory=dict)
    freed: dict[str, Ns] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    hit_bytes: dict[str, int] = field(default_factory=dict)
    notice: Ns | None = None
    ids: list[int] = field(default_factory=list)
    sources: str = ""
    times: list[Ns] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs | None] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    parity: dict[str, Any] | None = None
    """The token oracle's verdict (`pddrt.verify`); None where it was not asked."""
    made: dict[str, int] = field(default_factory=dict)
    ttft_legs: dict[str, Ns] | None = None
    """What TTFT was made of, from the first token on."""
    seam: Seam = field(default_factory=Seam)
    """Its handoff, that of its last attempt that had one; `rounds` 0 where there was none."""
    seam_of: int = 0
    """Which attempt's that is."""
    kv_received: dict[str, int] = field(default_factory=dict)
    wan_kv_bytes: int = 0
    """Of KV that came to the main decoder from another site."""
    holders: set[tuple[str, str]] = field(default_factory=set)
    """(attempt, instance) that have reserved memory and not given it back."""
    finish_reason: str | None = None
    finished: Ns | None = None
    detail: str = ""
    retry_after: Ns | None = None
    """Of one that was rejected: when it might have been taken."""

    @property
    def first_decoder(self) -> str | None:
        return self.relay or self.main

    @property
    def ttft(self) -> Ns | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def ttst(self) -> Ns | None:
        return self.times[1] - self.times[0] if len(self.times) > 1 else None

    @property
    def itls(self) -> list[Ns]:
        return [b - a for a, b in pairwise(self.times)]

    @property
    def tpot(self) -> Ns | None:
        gaps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) // gaps if gaps > 0 else None

    @property
    def e2e(self) -> Ns | None:
        return self.finished - self.sent if self.finished is not None else None

    @property
    def legs(self) -> dict[str, Ns] | None:
        """TTFT taken apart; None before the first token."""
        return self.ttft_legs

    def take_apart(self) -> dict[str, Ns] | None:
        """At the first token: later nothing may change it."""
        if not self.times or self.routed is None or self.notice is None:
            return None
        started, ended = self.prefill_started or self.routed, self.prefill_ended or self.routed
        by_decoder = self.whole.get(self.first_decoder or "", self.notice + 1) <= self.notice
        admitted = self.admitted.get(self.first_decoder or "", ended) if by_decoder else ended
        held = self.notice if by_decoder else ended
        stamps = [self.sent, self.routed, started, ended, max(ended, admitted), held, self.times[0]]
        for i in range(1, len(stamps)):
            stamps[i] = min(max(stamps[i], stamps[i - 1]), self.times[0])
        return {leg: b - a for leg, (a, b) in zip(LEGS, pairwise(stamps), strict=True)}

    @property
    def cached(self) -> dict[str, int]:
        """Prefix hits in tokens, by role: what P did not compute, what was not sent to R and M."""
        by_role = {"prefill": self.prefill, "relay": self.relay, "main": self.main}
        return {role: self.hits.get(name or "", 0) for role, name in by_role.items()}

    @property
    def switch(self) -> int | None:
        """Index of the first token made by the main decoder after a relay handed over."""
        at = self.sources.find("M")
        return at if self.relay and self.seam.rounds and at > 0 else None

    @property
    def gap(self) -> Ns | None:
        """The inter-token gap at the switch."""
        return (
            None if self.switch is None else self.times[self.switch] - self.times[self.switch - 1]
        )

    @property
    def gap_near(self) -> Ns | None:
        """The largest gap within NEAR_TOKENS tokens of the switch."""
        if self.switch is None:
            return None
        gaps = self.itls
        return max(gaps[max(0, self.switch - 1 - NEAR_TOKENS) : self.switch + NEAR_TOKENS])

    @property
    def handoff_ids(self) -> int:
        """Ids that crossed to the main decoder."""
        return self.seam.ids

    @property
    def extend_tokens(self) -> int:
        return self.seam.extend_tokens

    @property
    def relay_busy(self) -> Ns | None:
        """How long the relay decoder held this request after it could decode."""
        if not self.relay or self.relay not in self.whole or self.relay not in self.freed:
            return None
        return self.freed[self.relay] - self.whole[self.relay]

    @property
    def wasted(self) -> int:
        """Ids made that the client never got."""
        return max(0, sum(self.made.values()) - len(self.ids))


class Recorder:
    """Listens to a trace and keeps the records. `role_of` maps instance names to roles.

    Where somebody is told of records that are `done`, they need not all be kept: a record is done
    when its request has ended and nothing is heard of it any more.
    """

    def __init__(
        self,
        role_of: dict[str, str],
        done: Callable[[RequestRecord], None] | None = None,
        keep: int | None = None,
    ) -> None:
        """`done`: called once with each record, in the order in which they are. `keep`: how many
        stay in `requests` when they are, the first that were sent; and as many of those that did
        not get their answer. None: all.
        """
        self.role_of = role_of
        self.sites: dict[str, str] = {}
        self.requests: dict[str, RequestRecord] = {}
        self.total = 0
        self._done = done
        self._keep = keep
        self._lost = 0
        self._open: dict[str, RequestRecord] = {}
        self._settling: deque[tuple[Ns, RequestRecord]] = deque()
        self._prompt_lens: dict[str, int] = {}
        """By attempt."""
        self.main_steps = MainSteps(self._prompt_len)
        self.links: list[ev.LinkTotal] = []
        self.qualities: list[ev.LinkQuality] = []
        self.pools: list[ev.PoolChecked] = []
        self.instances: dict[str, dict[str, Ns]] = {
            name: {"steps": 0, "busy": 0, "pages": 0, "pages_peak": 0} for name in role_of
        }
        self.end: Ns = 0
        self.foresight = Foresight()
        self._hears: dict[type[Event], Callable[[Any], None]] = {
            ev.RequestSent: self._sent,
            ev.StepBegan: self._step_began,
            ev.Step: self._step,
            ev.PagesTaken: self._count_pages,
            ev.PagesKept: self._count_pages,
            ev.PagesFreed: self._count_pages,
            ev.PageTable: lambda _: None,
            ev.PagesEvicted: lambda _: None,
            ev.InstanceStarted: self._started,
            ev.InstanceCrashed: self._crashed,
            ev.LinkTotal: self.links.append,
            ev.LinkQuality: self.qualities.append,
            ev.PoolChecked: self.pools.append,
        }

    def __call__(self, event: Event) -> None:
        self.end = max(self.end, event.t)
        kind = type(event)
        if kind in HEARS:
            self.foresight(event)
        if hear := self._hears.get(kind):
            hear(event)
        elif record := self._open.get(ev.request_of(getattr(event, "request", ""))):
            self._update(record, event)
            self._beside(record, event)
        if self._settling and event.t >= self._settling[0][0]:
            self._settle(event.t)

    def _sent(self, event: ev.RequestSent) -> None:
        self._open[event.request] = self.requests[event.request] = RequestRecord(
            event.request,
            event.session,
            event.turn,
            event.t,
            event.prompt,
            self.total,
            sampling=Sampling.of(event.sampling),
        )
        self.total += 1

    def _started(self, event: ev.InstanceStarted) -> None:
        self.sites[event.instance] = event.site

    def _step_began(self, event: ev.StepBegan) -> None:
        if self.role_of[event.instance] == "main":
            self.main_steps.began(event)

    def _step(self, event: ev.Step) -> None:
        instance = self.instances[event.instance]
        instance["steps"] += 1
        instance["busy"] += event.t - event.start_ns
        instance["pages_peak"] = max(instance["pages_peak"], event.pages_used)
        if self.role_of[event.instance] == "main":
            self.main_steps.ended(event)

    def _crashed(self, event: ev.InstanceCrashed) -> None:
        if not event.kept:
            self.instances[event.instance]["pages"] = 0
        for record in self._open.values():
            record.holders = {held for held in record.holders if held[1] != event.instance}

    def _settle(self, now: Ns) -> None:
        """Lets go of those of whom nothing more is expected."""
        while self._settling and now >= self._settling[0][0]:
            _, record = self._settling.popleft()
            assert record.finished is not None
            if record.holders and now < record.finished + LAST_TIME:
                self._settling.append((now + SETTLE_TIME, record))
            else:
                self._let_go(record)

    def _let_go(self, record: RequestRecord) -> None:
        del self._open[record.id]
        names = [ev.attempt_name(record.id, number) for number in range(record.attempt + 1)]
        for name in names:
            self._prompt_lens.pop(name, None)
            self.main_steps.forget(name)
            self.foresight.forget(name)
        lost = record.finish_reason not in ("stop", "length")
        if self._keep is not None and record.number >= self._keep:
            if not lost or self._lost >= self._keep:
                del self.requests[record.id]
            self._lost += lost
        if self._done is not None:
            self._done(record)

    def close(self) -> None:
        """Nothing more will be heard: all that there are are done, in the order of sending."""
        self._settling.clear()
        for record in list(self._open.values()):
            self._let_go(record)

    def legs(self, request: str) -> dict[str, Ns] | None:
        """What the TTFT of `request` is made of; None before its first token."""
        record = self._open.get(request)
        return None if record is None else record.legs

    def _prompt_len(self, request: str) -> int | None:
        return self._prompt_lens.get(request)

    def _beside(self, record: RequestRecord, event: Event) -> None:
        """What steps of a main decoder are between the tokens made there."""
        steps = self.main_steps
        match event:
            case ev.Admitted():
                record.holders.add((event.request, event.instance))
                return
            case ev.Freed():
                record.holders.discard((event.request, event.instance))
        match event:
            case ev.TokensMade() if event.instance == record.main:
                steps.made(event)
            case ev.Preempted() | ev.Freed() if event.instance == record.main:
                steps.stopped(event.request)
            case ev.Finished():
                steps.stopped(ev.attempt_name(record.id, record.attempt))
                record.seam.others_itl_max = steps.worst.pop(record.id, None)
                if self._done is not None:
                    self._settling.append((event.t + SETTLE_TIME, record))

    def _count_pages(self, event: ev.PagesTaken | ev.PagesKept | ev.PagesFreed) -> None:
        """Pages that requests own; those that the cache has got may be evicted."""
        instance = self.instances[event.instance]
        count = sum(n for _, n in event.pages)
        instance["pages"] += count if isinstance(event, ev.PagesTaken) else -count
        instance["pages_peak"] = max(instance["pages_peak"], instance["pages"])

    def _update(self, record: RequestRecord, event: Event) -> None:
        match event:
            case ev.Accepted():
                record.prompt_ids = event.prompt_ids
            case ev.Routed():
                self._prompt_lens[event.request] = event.prompt_tokens
                record.pipeline = event.pipeline
                record.prefill, record.relay, record.main = event.prefill, event.relay, event.main
                if event.request == record.id:
                    record.routed = event.t
                    record.prompt_tokens, record.max_tokens = event.prompt_tokens, event.max_tokens
                else:
                    for stamps in (record.admitted, record.whole, record.hits, record.hit_bytes):
                        stamps.clear()
            case ev.Retried():
                record.attempt = event.attempt
            case ev.Rerouted():
                record.rerouted.append(event.then)
                record.main = event.main or record.main
            case _ if _late(record, event):
                pass
            case ev.Admitted():
                # A request that was preempted is admitted again; what counts is the first time.
                record.admitted.setdefault(event.instance, event.t)
                record.hits.setdefault(event.instance, event.hit)
                record.hit_bytes.setdefault(event.instance, event.hit_bytes)
            case ev.Freed():
                record.freed[event.instance] = event.t
            case ev.PrefillStarted():
                record.prefill_started = event.t
            case ev.PrefillEnded():
                record.prefill_ended = event.t
            case ev.KVReceived():
                got = record.kv_received
                got[event.instance] = got.get(event.instance, 0) + event.bytes
                source = self.sites.get(record.prefill or "")
                if event.instance == record.main and source != self.sites.get(event.instance):
                    record.wan_kv_bytes += event.bytes
            case ev.KVWhole():
                record.whole[event.instance] = event.t
            case ev.TokensMade():
                record.made[event.source] = (
                    record.made.get(event.source, 0) + event.end - event.start
                )
            case ev.HandoffBegan() if record.attempt > record.seam_of:
                record.seam, record.seam_of = Seam(), record.attempt
                record.seam.update(event)
            case (
                ev.HandoffBegan()
                | ev.HandoffSent()
                | ev.HandoffCaughtUp()
                | ev.HandoffEnded()
                | ev.HandoffTaken()
            ):
                record.seam.update(event)
            case ev.Released():
                record.notice = event.notice_ns
            case ev.TokensReceived():
                record.ids.extend(event.ids)
                record.sources += event.source * (event.end - event.start)
                record.times.extend([event.t] * (event.end - event.start))
                if event.start == 0:
                    record.ttft_legs = record.take_apart()
                record.text += event.text
                record.logprobs.extend(event.logprobs)
            case ev.Finished():
                record.finish_reason, record.finished = event.reason, event.t
                record.detail, record.retry_after = event.detail, event.retry_ns


def _late(record: RequestRecord, event: Any) -> bool:
    """Of an attempt that was given up, and what it took is not what the request takes."""
    stamps = (ev.Admitted, ev.Freed, ev.PrefillStarted, ev.PrefillEnded, ev.KVWhole)
    current = ev.attempt_name(record.id, record.attempt)
    return isinstance(event, stamps) and event.request != current
