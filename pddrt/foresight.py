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
parts without samples are left out. `sessions` is of each session's last sample. Beyond `EXACT`
samples they are summed up in finer parts as they come, and a sample may count to a neighbour of its
part of the series, off by 1/64 of a part at most.

Memory is bounded but for 4 bytes a session.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pddrt import trace as ev
from pddrt.distribution import Distribution
from pddrt.trace import Event, Seconds
from pddrt.types import Ns

BINS = 48
FINE = 64
"""Finer parts to each part of the series, and up to twice as many."""
EXACT = 20_000
HEARS = frozenset({ev.TransferTook, ev.Spared, ev.Resumed, ev.CacheSampled, ev.Routed})


class Foresight:
    """Listens to a trace, of which it `HEARS` some events; `summary` is what it comes to."""

    def __init__(self) -> None:
        self.errors = Distribution()
        self._took = 0
        self._rates: dict[str, int | None] = {}
        self._how = {"held": 0, "cut": 0}
        self._bets: dict[str, list[ev.Spared]] = {}
        """By request, while they may be taken back."""
        self._resumed: set[str] = set()
        self._right = _Right()
        self._drift = _Drift()
        self._routed = 0

    def __call__(self, event: Event) -> None:
        match event:
            case ev.TransferTook():
                self._took += 1
                self._rates[f"{event.src}>{event.dst}"] = event.rate
                if event.expected_ns is not None:
                    self.errors.add(event.took_ns - event.expected_ns)
            case ev.Spared():
                self._how[event.how] += 1
                self._bets.setdefault(event.request, []).append(event)
            case ev.Resumed():
                self._resumed.add(event.request)
            case ev.CacheSampled():
                self._drift.add(event)
            case ev.Routed() if event.request == ev.request_of(event.request):
                self._routed += 1

    def forget(self, request: str) -> None:
        """Nothing more will be heard of it."""
        self._right.add(self._bets.pop(request, []), request in self._resumed)
        self._resumed.discard(request)

    def summary(self, end: Ns) -> dict[str, Any]:
        """`end`: of the run."""
        return {
            "router": {
                "transfers": self._took,
                "estimates": len(self.errors),
                "error_s": _signed(self.errors),
                "rate_bytes_per_s": dict(self._rates),
            },
            "anomaly": self._anomaly(),
            "cache_drift": self._drift.summary(end),
        }

    def _anomaly(self) -> dict[str, Any]:
        right, bets = _Right(**vars(self._right)), sum(self._how.values())
        for request, of in self._bets.items():
            right.add(of, request in self._resumed)
        return {
            **self._how,
            "share": round(bets / self._routed, 6) if self._routed else 0.0,
            "right": right.count,
            "wrong": bets - right.count,
            "bytes_saved": right.bytes,
            "tokens_unsent": right.tokens,
        }


@dataclass
class _Right:
    """Bets that were not taken back, and what need not cross for them."""

    count: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, bets: list[ev.Spared], resumed: bool) -> None:
        if not resumed:
            self.count += len(bets)
            self.bytes += sum(bet.bytes for bet in bets)
            self.tokens += sum(bet.lacking for bet in bets)


# -- cache drift -----------------------------------------------------------------------------------

FIELDS = ("prompt_tokens", "prefill", "relay", "main")


@dataclass(slots=True)
class _Part:
    """What the samples of one part of a run come to: sums of `FIELDS`, and how far behind."""

    samples: int = 0
    sums: list[int] = field(default_factory=lambda: [0] * len(FIELDS))
    behind: int = 0
    behind_max: int = 0

    def add(self, values: tuple[int, ...]) -> None:
        behind = _behind(values)
        self.samples += 1
        self.sums = [a + b for a, b in zip(self.sums, values, strict=True)]
        self.behind += behind
        self.behind_max = max(self.behind_max, behind)

    def merge(self, other: _Part) -> None:
        self.samples += other.samples
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        self.behind += other.behind
        self.behind_max = max(self.behind_max, other.behind_max)

    def point(self, start: Ns) -> dict[str, Any]:
        prompt, *held = (_mean(total, self.samples) for total in self.sums)
        return {
            "t_s": Seconds(start),
            "samples": self.samples,
            "prompt_tokens": prompt,
            "held_tokens": dict(zip(FIELDS[1:], held, strict=True)),
            "behind_tokens": _mean(self.behind, self.samples),
            "behind_max_tokens": self.behind_max,
        }


class _Drift:
    """Samples as they are up to `EXACT`, then in parts of `_width` ns, which doubles as they get
    too many.
    """

    def __init__(self) -> None:
        self._count = 0
        self._kept = array("q")
        """Time and `FIELDS` of one after the other."""
        self._parts: dict[int, _Part] = {}
        self._width: Ns = 0
        self._last = array("i")
        """By session number: how far behind its last sample is; -1 where there is none."""
        self._unnumbered: dict[str, int] = {}

    def add(self, event: ev.CacheSampled) -> None:
        values = tuple(getattr(event, name) for name in FIELDS)
        self._count += 1
        self._session(event.request.rpartition(".")[0], _behind(values))
        if self._width:
            self._put(event.t, values)
            return
        self._kept.extend((event.t, *values))
        if self._count > EXACT:
            self._width = max(1, event.t // (BINS * FINE))
            for t, of in self._samples():
                self._put(t, of)
            self._kept = array("q")

    def _samples(self) -> Iterator[tuple[Ns, tuple[int, ...]]]:
        for at in range(0, len(self._kept), 1 + len(FIELDS)):
            t, *values = self._kept[at : at + 1 + len(FIELDS)]
            yield t, tuple(values)

    def _put(self, t: Ns, values: tuple[int, ...]) -> None:
        self._parts.setdefault(t // self._width, _Part()).add(values)
        while t // self._width >= 2 * BINS * FINE:
            parts, self._parts = self._parts, {}
            self._width *= 2
            for at, part in parts.items():
                self._parts.setdefault(at // 2, _Part()).merge(part)

    def _session(self, name: str, behind: int) -> None:
        number = name[1:]
        if not (name[:1] == "s" and number.isdecimal() and len(number) < 8):
            self._unnumbered[name] = behind
            return
        at = int(number)
        if at >= len(self._last):
            self._last.extend([-1] * (at + 1 - len(self._last)))
        self._last[at] = behind

    def summary(self, end: Ns) -> dict[str, Any]:
        parts: dict[int, _Part] = {}
        for t, values in self._samples():
            parts.setdefault(_bin(t, end), _Part()).add(values)
        for at, part in self._parts.items():
            parts.setdefault(_bin(at * self._width, end), _Part()).merge(part)
        behind = [b for b in (*self._last, *self._unnumbered.values()) if b >= 0]
        return {
            "samples": self._count,
            "sessions": {
                "count": len(behind),
                "behind_max_tokens": max(behind, default=0),
                "behind_mean_tokens": _mean(sum(behind), len(behind)),
            },
            "series": [part.point(end * at // BINS) for at, part in sorted(parts.items())],
        }


def _bin(t: Ns, end: Ns) -> int:
    return min(BINS - 1, t * BINS // max(1, end))


def _behind(values: tuple[int, ...]) -> int:
    _, prefill, _, main = values
    return max(0, prefill - main)


def _mean(total: int, count: int) -> float:
    return round(total / count, 3) if count else 0.0


def _signed(errors: Distribution) -> dict[str, Seconds | None]:
    """Mean, mean of the absolute values, nearest-rank percentiles."""
    shown = {"mean": errors.mean, "mean_abs": errors.mean_abs}
    shown |= dict(zip(("p10", "p50", "p90"), errors.percentiles(10, 50, 90), strict=True))
    return {name: None if value is None else Seconds(value) for name, value in shown.items()}
