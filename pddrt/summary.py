"""Numbers for files: a request's line in requests.jsonl, a run's summary.json. Pure.

Percentiles are nearest-rank on exact nanoseconds; of more than 262,144 values they are at most
0.05 % off (see `distribution`). All else is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pddrt.distribution import Distribution
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
        "retry_after_s": _s(r.retry_after),
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


def slo_met(r: RequestRecord, ttft: Ns | None, tpot: Ns | None) -> bool:
    """Finished, with TTFT and TPOT inside what the scenario asks (an absent SLO is met)."""
    if r.finish_reason not in ("stop", "length") or r.ttft is None:
        return False
    return (ttft is None or r.ttft <= ttft) and (tpot is None or (r.tpot or 0) <= tpot)


def spread(values: Iterable[Ns | None] | Distribution) -> dict[str, Seconds | None]:
    """mean, p50, p90, p99 and max, as seconds; None throughout where there is nothing."""
    if not isinstance(values, Distribution):
        values = Distribution([v for v in values if v is not None])
    p50, p90, p99 = map(_s, values.percentiles(50, 90, 99))
    return {"mean": _s(values.mean), "p50": p50, "p90": p90, "p99": p99, "max": _s(values.most)}


class _Latencies:
    """How long requests took, taken together."""

    def __init__(self) -> None:
        self.requests = 0
        self.times = {
            name: Distribution() for name in ("ttft", "ttst", "tpot", "itl", "e2e", "handoff_gap")
        }
        self._legs = dict.fromkeys(LEGS, 0)
        self._with_legs = 0

    def add(self, r: RequestRecord) -> None:
        self.requests += 1
        self.times["itl"].extend(r.itls)
        e2e = r.e2e if r.finish_reason in ("stop", "length") else None
        values = {"ttft": r.ttft, "ttst": r.ttst, "tpot": r.tpot, "e2e": e2e, "handoff_gap": r.gap}
        for name, value in values.items():
            if value is not None:
                self.times[name].add(value)
        if r.legs is not None:
            self._with_legs += 1
            for leg in LEGS:
                self._legs[leg] += r.legs[leg]

    def to_json(self) -> dict[str, Any]:
        count = self._with_legs
        legs = {leg: Seconds(t // count) if count else None for leg, t in self._legs.items()}
        return {f"{k}_s": spread(v) for k, v in self.times.items()} | {"ttft_legs_s": legs}


class Tally:
    """What a summary says of requests, added up one by one: none of them is kept. Each is added
    when nothing can change it any more.
    """

    def __init__(self, slo_ttft: Ns | None, slo_tpot: Ns | None) -> None:
        self._slos = (slo_ttft, slo_tpot)
        self._latencies = _Latencies()
        self._pipelines: dict[str, _Latencies] = {}
        self._ends: Counter[str | None] = Counter()
        self._met = 0
        self._first_sent: Ns | None = None
        self._last_finished: Ns = 0
        self._tokens: Counter[str] = Counter()
        self._handoffs: Counter[str] = Counter()
        self._attempts = 0
        self._tried_again = 0
        self._rerouted: Counter[str] = Counter()
        self._refused = 0
        self._verdicts: Counter[str] = Counter()

    def add(self, r: RequestRecord) -> None:
        self._latencies.add(r)
        if r.pipeline:
            self._pipelines.setdefault(r.pipeline, _Latencies()).add(r)
        self._ends[r.finish_reason] += 1
        self._met += slo_met(r, *self._slos)
        self._first_sent = r.sent if self._first_sent is None else min(r.sent, self._first_sent)
        if r.finish_reason in ("stop", "length"):
            self._last_finished = max(r.finished or 0, self._last_finished)
        self._tokens.update({letter: r.sources.count(letter) for letter in LETTER.values()})
        self._tokens["prompt"] += r.prompt_tokens
        self._tokens["output"] += len(r.ids)
        for role, count in r.cached.items():
            self._tokens[f"cached_{role}"] += count
        if r.seam.rounds:
            self._add_handoff(r)
        self._attempts += r.attempt
        self._tried_again += r.attempt > 0
        self._rerouted.update(r.rerouted)
        self._refused += r.detail.startswith("overloaded: ")
        if r.parity is not None:
            self._verdicts[r.parity["verdict"]] += 1

    def _add_handoff(self, r: RequestRecord) -> None:
        """By what really happened."""
        seam, to = r.seam, self._handoffs
        to["count"] += 1
        to[seam.mode] += 1
        to["unfinished"] += not seam.ended
        to["rounds"] += seam.rounds
        to["ids"] += seam.ids
        to["wire_bytes"] += seam.wire_bytes

    @property
    def total(self) -> int:
        return self._latencies.requests

    @property
    def _finished(self) -> int:
        return self._ends["stop"] + self._ends["length"]

    def requests(self) -> dict[str, int]:
        ends = {reason: self._ends[reason] for reason in ("rejected", "aborted")}
        return {"total": self.total, "finished": self._finished, **ends}

    def performance(self) -> dict[str, Any]:
        """Latencies, of each pipeline too, and what was got done in the time from the first
        arrival to the last end of an answer.
        """
        span, tokens = self._last_finished - (self._first_sent or 0), self._tokens
        return {
            **self._latencies.to_json(),
            "pipelines": {
                name: {"requests": of.requests, **of.to_json()}
                for name, of in sorted(self._pipelines.items())
            },
            "goodput_rps": _per_second(self._met, span),
            "slo_attainment": self._met / self.total if self.total else None,
            "output_tps": _per_second(tokens["output"], span),
            "tokens": {
                "prompt": tokens["prompt"],
                "cached_prefill": tokens["cached_prefill"],
                "cached_main": tokens["cached_main"],
                "output": tokens["output"],
                "by_role": {role: tokens[letter] for role, letter in LETTER.items()},
            },
        }

    def handoffs(self) -> dict[str, int]:
        """`unfinished`: the answer ended before the relay was done."""
        names = {"one_shot": "one-shot", "catch_up": "catch-up"}
        keys = ("count", "one_shot", "catch_up", "overlap", "unfinished", "rounds", "ids")
        return {key: self._handoffs[names.get(key, key)] for key in (*keys, "wire_bytes")}

    def recovery(self) -> dict[str, Any]:
        return {
            "further_attempts": self._attempts,
            "requests_tried_again": self._tried_again,
            "rerouted": dict(sorted(self._rerouted.items())),
        }

    @property
    def refused(self) -> int:
        """For there was more than could be served."""
        return self._refused

    def parity(self) -> dict[str, int] | None:
        """How many requests were judged, and how; None where nothing was."""
        if not (checked := self._verdicts.total()):
            return None
        verdicts = {"equal": "equal", "near_ties": "near_tie", "different": "different"}
        return {"checked": checked} | {k: self._verdicts[v] for k, v in verdicts.items()}


def summary(
    recorder: Recorder,
    slo_ttft: Ns | None,
    slo_tpot: Ns | None,
    invariants: Mapping[str, Any],
    tally: Tally | None = None,
) -> dict[str, Any]:
    """The part of summary.json that follows from the trace, with what the monitor found
    (`invariants`); the run adds its name, clock, digest and provenance. `tally`: of all requests,
    where `recorder` has not kept them.
    """
    if tally is None:
        tally = Tally(slo_ttft, slo_tpot)
        for record in recorder.requests.values():
            tally.add(record)
    return {
        "requests": tally.requests(),
        **tally.performance(),
        "overload": {"refused": tally.refused},
        "handoffs": tally.handoffs(),
        "main_itl_s": {
            "quiet": spread(recorder.main_steps.quiet),
            "beside_extend": spread(recorder.main_steps.beside),
        },
        "recovery": tally.recovery(),
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
        "parity": tally.parity(),
        "invariants": dict(invariants),
        "cost": None,
    }


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
    for met in recorder.qualities:
        links[met.link]["directions"][f"{met.src_site}>{met.dst_site}"] |= {
            "delay_s": {
                "mean": Seconds(met.delay_mean_ns),
                "deviation": Seconds(met.delay_deviation_ns),
            },
            "segments": {"resent": met.resent, "dropped": met.dropped, "lost": met.lost},
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
