"""What was believed against what came to pass: transfer estimates, bets on short answers, and how
far the main decoders' caches fell behind. From events to numbers, as `metrics`; a part of its
summary.

**Router**: of each transfer to a main decoder, took - expected, in time; what the gateway expected
when it routed the request stands against how long the path was in fact what the transfer waited
for. Left out are those that were expected not to move at all.

**Anomalies**: requests whose transfer was held or cut. Right are those that their relay ended;
wrong those that were resumed (`anomaly.share` of a scenario bounds both together).
`bytes_saved` is what the gateway thought was lacking, of the right ones.

**Cache drift**: when a request's prompt is known, how many of its tokens P, RLD and MD hold, the
best of each role. Behind is what P holds and MD does not, 0 at least. The series cuts the run into
`BINS` parts of equal length and gives the mean of each part's samples, and the largest behind;
parts without samples are left out. `sessions` is of each session's last sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pddrt import trace as ev
from pddrt.trace import Event, Seconds
from pddrt.types import Ns

BINS = 48


@dataclass(slots=True)
class Foresight:
    """Listens to a trace; `summary` is what it comes to."""

    took: list[ev.TransferTook] = field(default_factory=list)
    spared: list[ev.Spared] = field(default_factory=list)
    resumed: dict[str, ev.Resumed] = field(default_factory=dict)
    samples: list[ev.CacheSampled] = field(default_factory=list)
    routed: int = 0

    def __call__(self, event: Event) -> None:
        match event:
            case ev.TransferTook():
                self.took.append(event)
            case ev.Spared():
                self.spared.append(event)
            case ev.Resumed():
                self.resumed[event.request] = event
            case ev.CacheSampled():
                self.samples.append(event)
            case ev.Routed() if event.request == ev.request_of(event.request):
                self.routed += 1

    def summary(self, end: Ns) -> dict[str, Any]:
        """`end`: of the run."""
        return {
            "router": self._router(),
            "anomaly": self._anomaly(),
            "cache_drift": self._drift(end),
        }

    def _router(self) -> dict[str, Any]:
        errors = sorted(t.took_ns - t.expected_ns for t in self.took if t.expected_ns is not None)
        rates: dict[str, int | None] = {}
        for t in self.took:
            rates[f"{t.src}>{t.dst}"] = t.rate
        return {
            "transfers": len(self.took),
            "estimates": len(errors),
            "error_s": _signed(errors),
            "rate_bytes_per_s": rates,
        }

    def _anomaly(self) -> dict[str, Any]:
        right = [s for s in self.spared if s.request not in self.resumed]
        return {
            "held": sum(s.how == "held" for s in self.spared),
            "cut": sum(s.how == "cut" for s in self.spared),
            "share": round(len(self.spared) / self.routed, 6) if self.routed else 0.0,
            "right": len(right),
            "wrong": len(self.spared) - len(right),
            "bytes_saved": sum(s.bytes for s in right),
            "tokens_unsent": sum(s.lacking for s in right),
        }

    def _drift(self, end: Ns) -> dict[str, Any]:
        parts: dict[int, list[ev.CacheSampled]] = {}
        last: dict[str, ev.CacheSampled] = {}
        for sample in self.samples:
            parts.setdefault(min(BINS - 1, sample.t * BINS // max(1, end)), []).append(sample)
            last[sample.request.rpartition(".")[0]] = sample
        behind = [_behind(s) for s in last.values()]
        return {
            "samples": len(self.samples),
            "sessions": {
                "count": len(last),
                "behind_max_tokens": max(behind, default=0),
                "behind_mean_tokens": _mean(behind),
            },
            "series": [_point(end * part // BINS, of) for part, of in sorted(parts.items())],
        }


def _point(start: Ns, samples: Sequence[ev.CacheSampled]) -> dict[str, Any]:
    behind = [_behind(s) for s in samples]
    return {
        "t_s": Seconds(start),
        "samples": len(samples),
        "prompt_tokens": _mean([s.prompt_tokens for s in samples]),
        "held_tokens": {
            role: _mean([getattr(s, role) for s in samples])
            for role in ("prefill", "relay", "main")
        },
        "behind_tokens": _mean(behind),
        "behind_max_tokens": max(behind),
    }


def _behind(sample: ev.CacheSampled) -> int:
    return max(0, sample.prefill - sample.main)


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 3) if values else 0.0


def _signed(errors: Sequence[Ns]) -> dict[str, Seconds | None]:
    """Mean, mean of the absolute values, nearest-rank percentiles; `errors` in order."""
    if not errors:
        return dict.fromkeys(("mean", "mean_abs", "p10", "p50", "p90"))
    count = len(errors)
    return {
        "mean": Seconds(sum(errors) // count),
        "mean_abs": Seconds(sum(map(abs, errors)) // count),
        **{f"p{p}": Seconds(errors[-(-count * p // 100) - 1]) for p in (10, 50, 90)},
    }
