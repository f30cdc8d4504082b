"""Numbers for files: a request's line in requests.jsonl, a run's summary.json. Pure.

Percentiles are nearest-rank on exact nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pddrt.metrics import LEGS, Recorder, RequestRecord
from pddrt.trace import Seconds
from pddrt.types import LETTER, SECOND, Ns

SCHEMA = 1


def request_json(r: RequestRecord, slo_ttft: Ns | None, slo_tpot: Ns | None) -> dict[str, Any]:
    """One line of requests.jsonl. Times are seconds; `token_times_s` count from the request's
    sending.
    """
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
        "logprobs": _logprobs(r),
        "finish_reason": r.finish_reason,
        "ttft_s": _s(r.ttft),
        "ttft_legs": None if legs is None else {k: Seconds(v) for k, v in legs.items()},
        "ttst_s": _s(r.ttst),
        "tpot_s": _s(r.tpot),
        "itl_max_s": _s(max(r.itls, default=None)),
        "e2e_s": _s(r.e2e),
        "token_source": r.sources,
        "token_times_s": [Seconds(t - r.sent) for t in r.times],
        "handoff": _handoff(r),
        "wan_bytes": {"kv": r.wan_kv_bytes, "ids": r.seam.wire_bytes},
        "kv_bytes_skipped": r.hit_bytes.get(r.main or "", 0),
        "slo_met": slo_met(r, slo_ttft, slo_tpot),
        "attempts": 1 + r.attempt,
        "rerouted": r.rerouted,
        "parity": r.parity,
        "text": r.text,
        "detail": r.detail,
    }


def _logprobs(r: RequestRecord) -> list[dict[str, Any] | None] | None:
    """One object a token: the id's own, and [id, its] of the best; None where nothing was asked."""
    if r.sampling.logprobs is None:
        return None
    return [{"drawn": one.drawn, "best": one.best} if one else None for one in r.logprobs]


def _handoff(r: RequestRecord) -> dict[str, Any] | None:
    """None where no id crossed."""
    seam = r.seam
    if not seam.rounds:
        return None
    return {
        "mode": seam.mode,
        "policy": seam.policy,
        "ended": seam.ended or None,
        "rounds": seam.rounds,
        "ids": seam.ids,
        "ids_per_round": seam.ids_per_round,
        "lacking": seam.lacking,
        "lacking_expected": seam.expected,
        "extend_tokens": seam.extend_tokens,
        "gap_s": _s(r.gap),
        "gap_near_s": _s(r.gap_near),
        "relay_busy_s": _s(r.relay_busy),
        "wasted_tokens": r.wasted,
        "went_back": seam.went_back,
        "others_itl_max_s": _s(seam.others_itl_max),
    }


def _handoffs(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """By what really happened. `unfinished`: the answer ended before the relay was done."""
    seams = [r.seam for r in requests if r.seam.rounds]
    modes = [seam.mode for seam in seams]
    return {
        "count": len(seams),
        "one_shot": modes.count("one-shot"),
        "catch_up": modes.count("catch-up"),
        "overlap": modes.count("overlap"),
        "unfinished": sum(not seam.ended for seam in seams),
        "rounds": sum(seam.rounds for seam in seams),
        "ids": sum(seam.ids for seam in seams),
        "wire_bytes": sum(seam.wire_bytes for seam in seams),
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
        "handoffs": _handoffs(requests),
        "main_itl_s": {
            "quiet": spread(recorder.main_steps.quiet),
            "beside_extend": spread(recorder.main_steps.beside),
        },
        "recovery": {
            "further_attempts": sum(r.attempt for r in requests),
            "requests_tried_again": sum(r.attempt > 0 for r in requests),
            "rerouted": dict(sorted(Counter(t for r in requests for t in r.rerouted).items())),
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
        **recorder.foresight.summary(recorder.end),
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
