"""From events to numbers: one record a request, one summary a run. Pure; reads the trace and
nothing else.

TTFT is what the client felt, request sent to first token id received, and is the sum of six legs,
exact in nanoseconds:

    gateway        sent > the gateway has routed it prefill_queue  > P starts its first chunk
    prefill        > P has sampled the first token decoder_queue  > the first decoder has reserved
    pages (zero where that was done during prefill) transfer       > the gateway knows that the
    first decoder holds the KV: the part that prefill did not hide, and the
                     notice's own way
    delivery       > the client has the first token

A stamp that lies before its predecessor counts as equal to it, so no leg is negative and none is
counted twice. Where P itself released the token (`first_token: early`, or an answer of one token),
decoder_queue and transfer are zero.

Percentiles are nearest-rank on exact nanoseconds. TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pddrt import trace as ev
from pddrt.trace import Event, Seconds
from pddrt.types import LETTER, SECOND, Ns, Sampling

LEGS = ("gateway", "prefill_queue", "prefill", "decoder_queue", "transfer", "delivery")
NEAR_TOKENS = 8
SCHEMA = 1


@dataclass(slots=True)
class RequestRecord:
    """What the trace says of one request. Times are absolute ns; None where it never got there."""

    id: str
    session: int
    turn: int
    sent: Ns
    prompt: str = ""
    pipeline: str | None = None
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
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
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    parity: dict[str, Any] | None = None
    """The token oracle's verdict (`pddrt.verify`); None where it was not asked."""
    made: dict[str, int] = field(default_factory=dict)
    handoff_ids: int = 0
    handoff_rounds: int = 0
    extend_tokens: int = 0
    kv_received: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    finished: Ns | None = None
    detail: str = ""

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
        return at if self.relay and self.handoff_rounds and at > 0 else None

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
    """Listens to a trace and keeps the records. `role_of` maps instance names to roles."""

    def __init__(self, role_of: dict[str, str]) -> None:
        self.role_of = role_of
        self.requests: dict[str, RequestRecord] = {}
        self.links: list[ev.LinkTotal] = []
        self.pools: list[ev.PoolChecked] = []
        self.instances: dict[str, dict[str, Ns]] = {
            name: {"steps": 0, "busy": 0, "pages": 0, "pages_peak": 0} for name in role_of
        }
        self.end: Ns = 0

    def __call__(self, event: Event) -> None:
        self.end = max(self.end, event.t)
        if isinstance(event, ev.Admitted | ev.Freed):
            self._count_pages(event)
        if isinstance(event, ev.RequestSent):
            self.requests[event.request] = RequestRecord(
                event.request,
                event.session,
                event.turn,
                event.t,
                event.prompt,
                sampling=Sampling(*event.sampling),
            )
        elif isinstance(event, ev.LinkTotal):
            self.links.append(event)
        elif isinstance(event, ev.PoolChecked):
            self.pools.append(event)
        elif isinstance(event, ev.Step):
            instance = self.instances[event.instance]
            instance["steps"] += 1
            instance["busy"] += event.t - event.start_ns
        elif record := self.requests.get(getattr(event, "request", "")):
            self._update(record, event)

    def legs(self, request: str) -> dict[str, Ns] | None:
        """What the TTFT of `request` is made of; None before its first token."""
        record = self.requests.get(request)
        return None if record is None else record.legs

    def _count_pages(self, event: ev.Admitted | ev.Freed) -> None:
        instance = self.instances[event.instance]
        instance["pages"] += event.pages if isinstance(event, ev.Admitted) else -event.pages
        instance["pages_peak"] = max(instance["pages_peak"], instance["pages"])

    def _update(self, record: RequestRecord, event: Event) -> None:
        match event:
            case ev.Accepted():
                record.prompt_ids = event.prompt_ids
            case ev.Routed():
                record.routed, record.pipeline = event.t, event.pipeline
                record.prefill, record.relay, record.main = event.prefill, event.relay, event.main
                record.prompt_tokens, record.max_tokens = event.prompt_tokens, event.max_tokens
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
            case ev.KVWhole():
                record.whole[event.instance] = event.t
            case ev.TokensMade():
                record.made[event.source] = (
                    record.made.get(event.source, 0) + event.end - event.start
                )
            case ev.HandoffSent():
                record.handoff_ids += event.end - event.start
                record.handoff_rounds += 1
            case ev.HandoffTaken():
                record.extend_tokens += event.extend_tokens
            case ev.Released():
                record.notice = event.notice_ns
            case ev.TokensReceived():
                record.ids.extend(event.ids)
                record.sources += event.source * (event.end - event.start)
                record.times.extend([event.t] * (event.end - event.start))
                record.text += event.text
            case ev.Finished():
                record.finish_reason, record.finished, record.detail = (
                    event.reason,
                    event.t,
                    event.detail,
                )


def request_json(r: RequestRecord, slo_ttft: Ns | None, slo_tpot: Ns | None) -> dict[str, Any]:
    """One line of requests.jsonl. Times are seconds; `token_times_s` count from the request's
    sending.
    """
    handoff = None
    if r.handoff_rounds:
        handoff = {
            "mode": "one-shot",
            "rounds": r.handoff_rounds,
            "ids": r.handoff_ids,
            "extend_tokens": r.extend_tokens,
            "gap_s": _s(r.gap),
            "gap_near_s": _s(r.gap_near),
            "relay_busy_s": _s(r.relay_busy),
            "wasted_tokens": r.wasted,
        }
    legs = r.legs
    return {
        "id": r.id,
        "session": r.session,
        "turn": r.turn,
        "pipeline": r.pipeline,
        "instances": {"prefill": r.prefill, "relay": r.relay, "main": r.main},
        "prompt_tokens": r.prompt_tokens,
        "cached_tokens": r.cached,
        "output_tokens": len(r.ids),
        "output_ids": r.ids,
        "finish_reason": r.finish_reason,
        "ttft_s": _s(r.ttft),
        "ttft_legs": None if legs is None else {k: Seconds(v) for k, v in legs.items()},
        "ttst_s": _s(r.ttst),
        "tpot_s": _s(r.tpot),
        "itl_max_s": _s(max(r.itls, default=None)),
        "e2e_s": _s(r.e2e),
        "token_source": r.sources,
        "token_times_s": [Seconds(t - r.sent) for t in r.times],
        "handoff": handoff,
        "wan_bytes": {"kv": r.kv_received.get(r.main or "", 0), "ids": 4 * r.handoff_ids},
        "kv_bytes_skipped": r.hit_bytes.get(r.main or "", 0),
        "slo_met": slo_met(r, slo_ttft, slo_tpot),
        "parity": r.parity,
        "text": r.text,
        "detail": r.detail,
    }


def slo_met(r: RequestRecord, ttft: Ns | None, tpot: Ns | None) -> bool:
    """Finished, with TTFT and TPOT inside what the scenario asks (an absent SLO is met)."""
    if r.finish_reason not in ("stop", "length") or r.ttft is None:
        return False
    return (ttft is None or r.ttft <= ttft) and (tpot is None or (r.tpot or 0) <= tpot)


def spread(values: Iterable[Ns | None]) -> dict[str, Seconds | None]:
    """mean, p50, p90, p99 and max, as seconds; None throughout where there is nothing."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    return {
        "mean": Seconds(sum(known) // len(known)),
        **{f"p{p}": Seconds(known[-(-len(known) * p // 100) - 1]) for p in (50, 90, 99)},
        "max": Seconds(known[-1]),
    }


def summary(
    recorder: Recorder,
    slo_ttft: Ns | None,
    slo_tpot: Ns | None,
    invariants: Mapping[str, Any],
) -> dict[str, Any]:
    """The part of summary.json that follows from the trace, with what the monitor found
    (`invariants`); the run adds its name, clock, digest and provenance.
    """
    requests = list(recorder.requests.values())
    done = [r for r in requests if r.finish_reason in ("stop", "length")]
    met = [r for r in done if slo_met(r, slo_ttft, slo_tpot)]
    span = max((r.finished or 0 for r in done), default=0) - min(
        (r.sent for r in requests), default=0
    )
    sources = "".join(r.sources for r in requests)
    output = sum(len(r.ids) for r in requests)
    return {
        "requests": {
            "total": len(requests),
            "finished": len(done),
            "rejected": sum(r.finish_reason == "rejected" for r in requests),
            "aborted": sum(r.finish_reason == "aborted" for r in requests),
        },
        **_latencies(requests),
        "pipelines": {
            name: {"requests": len(of), **_latencies(of)}
            for name, of in _by_pipeline(requests).items()
        },
        "goodput_rps": _per_second(len(met), span),
        "slo_attainment": len(met) / len(requests) if requests else None,
        "output_tps": _per_second(output, span),
        "tokens": {
            "prompt": sum(r.prompt_tokens for r in requests),
            "cached_prefill": sum(r.cached["prefill"] for r in requests),
            "cached_main": sum(r.cached["main"] for r in requests),
            "output": output,
            "by_role": {role: sources.count(letter) for role, letter in LETTER.items()},
        },
        "handoffs": {
            "count": sum(r.handoff_rounds > 0 for r in requests),
            "one_shot": sum(r.handoff_rounds > 0 for r in requests),
            "catch_up": 0,
            "overlap": 0,
            "rounds": sum(r.handoff_rounds for r in requests),
            "ids": sum(r.handoff_ids for r in requests),
        },
        "links": _links(recorder),
        "instances": {
            name: {
                "role": recorder.role_of[name],
                "steps": facts["steps"],
                "busy_fraction": _share(facts["busy"], recorder.end),
                "kv_peak_fraction": _share(facts["pages_peak"], _pages(recorder, name)),
            }
            for name, facts in recorder.instances.items()
        },
        "parity": _parity(requests),
        "invariants": dict(invariants),
        "cost": None,
    }


def _parity(requests: Sequence[RequestRecord]) -> dict[str, int] | None:
    """How many requests were judged, and how; None where nothing was."""
    verdicts = [r.parity["verdict"] for r in requests if r.parity is not None]
    if not verdicts:
        return None
    return {
        "checked": len(verdicts),
        "equal": verdicts.count("equal"),
        "near_ties": verdicts.count("near_tie"),
        "different": verdicts.count("different"),
    }


def _latencies(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    legs = [r.legs for r in requests if r.legs is not None]
    return {
        "ttft_s": spread(r.ttft for r in requests),
        "ttst_s": spread(r.ttst for r in requests),
        "tpot_s": spread(r.tpot for r in requests),
        "itl_s": spread(gap for r in requests for gap in r.itls),
        "e2e_s": spread(r.e2e for r in requests if r.finish_reason in ("stop", "length")),
        "handoff_gap_s": spread(r.gap for r in requests),
        "ttft_legs_s": {
            leg: Seconds(sum(x[leg] for x in legs) // len(legs)) if legs else None for leg in LEGS
        },
    }


def _by_pipeline(requests: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = {}
    for r in requests:
        if r.pipeline:
            groups.setdefault(r.pipeline, []).append(r)
    return dict(sorted(groups.items()))


def _links(recorder: Recorder) -> dict[str, dict[str, Any]]:
    """Both directions of a link together; `directions` has each."""
    links: dict[str, dict[str, Any]] = {}
    for total in recorder.links:
        one = {
            "bytes": total.bytes,
            "kv_bytes": total.kv_bytes,
            "ids_bytes": total.ids_bytes,
            "busy_fraction": _share(total.busy_ns, recorder.end),
            "peak_flows": total.peak_flows,
        }
        link = links.setdefault(total.link, {**one, "directions": {}})
        if link["directions"]:
            for key in ("bytes", "kv_bytes", "ids_bytes"):
                link[key] += one[key]
            for key in ("busy_fraction", "peak_flows"):
                link[key] = max(link[key], one[key])
        link["directions"][f"{total.src_site}>{total.dst_site}"] = {
            **one,
            "late_p99_s": Seconds(total.late_p99_ns),
            "late_max_s": Seconds(total.late_max_ns),
        }
    return links


def _pages(recorder: Recorder, name: str) -> int:
    return next((p.pages for p in recorder.pools if p.instance == name), 0)


def _s(value: Ns | None) -> Seconds | None:
    return None if value is None else Seconds(value)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _per_second(count: int, span: Ns) -> float | None:
    return round(count * SECOND / span, 6) if span > 0 else None
