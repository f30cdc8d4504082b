"""How well this machine kept a link's times, and what its figures are therefore worth. Sans-IO.

The law of a link is exact; what may be off is when bytes are handed to the kernel. A `Ledger`
writes down, for one direction, by how much:

    late        when each load was sent less when it was due: a histogram in steps of 10 us
    rate_error  of stretches in which data was due without a pause: how much longer (or shorter)
                they took than the law says, as a share
    blocked     time in which the kernel took no more because the receiving program lagged behind

`judge` turns ledgers into a verdict, per link and for the whole run:

    ok         figures over this link are the link's
    degraded   they contain this machine's slowness to an extent that may matter
    invalid    they say more about this machine than about the link
    exact      virtual clock: nothing is ever late

A rate above 60 % of what this machine can move at all makes a link `degraded` whatever was
measured: short transfers over it end before lateness shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pddrt.trace import Seconds
from pddrt.types import MS, SECOND, US, Ns

STEP: Ns = 10 * US
LATE_LIMIT: Ns = 5 * MS
"""Above this p99 of (sent - due) on any link, a wall-clock run is `degraded`."""
LATE_INVALID: Ns = 50 * MS
RATE_LIMIT, RATE_INVALID = 0.01, 0.1
BLOCKED_LIMIT, BLOCKED_INVALID = 0.05, 0.5
"""As shares of the time in which the link was busy."""
PEAK_SHARE = 0.6
PAUSE: Ns = 20 * MS
"""Between loads due so far apart a new stretch begins."""
STRETCH: Ns = 500 * MS
"""Shorter stretches say nothing about the rate: lateness at their ends is all there is to them.
(Lateness of LATE_LIMIT at one end of this one makes RATE_LIMIT.)"""

VERDICTS = ("exact", "ok", "degraded", "invalid")


@dataclass(slots=True)
class Ledger:
    """Of one direction of a link."""

    histogram: Counter[int] = field(default_factory=Counter)
    """Loads by lateness, in whole steps, rounded up."""
    late_max: Ns = 0
    blocked: Ns = 0
    _first: tuple[Ns, Ns] | None = None  # of this stretch: due, sent
    _last: tuple[Ns, Ns] = (0, 0)
    _lawful: Ns = 0  # time that finished stretches should have taken
    _excess: Ns = 0  # and by how much they took longer
    _blocked_since: dict[int, Ns] = field(default_factory=dict)

    def sent(self, due: Ns, now: Ns) -> None:
        """A load that was due at `due` (in order) is sent at `now`."""
        late = max(0, now - due)
        self.histogram[-(-late // STEP)] += 1
        self.late_max = max(self.late_max, late)
        if self._first is None:
            self._first = (due, now)
        elif due - self._last[0] > PAUSE:
            self._end_stretch()
            self._first = (due, now)
        self._last = (due, now)

    def block(self, key: int, now: Ns) -> None:
        """The kernel takes no more of the connection `key`."""
        self._blocked_since.setdefault(key, now)

    def unblock(self, key: int, now: Ns) -> None:
        """It does again, or the connection is gone."""
        since = self._blocked_since.pop(key, None)
        if since is not None:
            self.blocked += now - since

    def late_quantile(self, q: float) -> Ns:
        """Upper edge of the step that holds the quantile, or the maximum if that is less."""
        rank = q * self.histogram.total()
        for step in sorted(self.histogram):
            rank -= self.histogram[step]
            if rank <= 0:
                return min(step * STEP, self.late_max)
        return 0

    @property
    def rate_error(self) -> float | None:
        """Positive: slower than the law. None where nothing lasted long enough to say."""
        lawful, excess = self._stretch()
        lawful, excess = lawful + self._lawful, excess + self._excess
        return -excess / (lawful + excess) if lawful and lawful + excess else None

    def _stretch(self) -> tuple[Ns, Ns]:
        """The present stretch, if it is long enough: what it should have taken, and the excess."""
        if self._first is None:
            return 0, 0
        lawful = self._last[0] - self._first[0]
        excess = self._last[1] - self._first[1] - lawful
        return (lawful, excess) if lawful >= STRETCH else (0, 0)

    def _end_stretch(self) -> None:
        lawful, excess = self._stretch()
        self._lawful += lawful
        self._excess += excess


@dataclass(frozen=True, slots=True)
class Kept:
    """What one direction of a link kept: `ledger`, against a `rate` (bytes/s, None unlimited), with
    `busy` time of it and `nbytes` carried."""

    link: str
    way: str
    rate: int | None
    nbytes: int
    busy: Ns
    ledger: Ledger


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict)


def _of_direction(kept: Kept) -> list[tuple[str, str]]:
    """Verdicts on what was measured, with what they are for; none where all is well."""
    found: list[tuple[str, str]] = []
    if not kept.nbytes:
        return found
    ledger, where = kept.ledger, f"link {kept.link}, {kept.way}"
    p99 = ledger.late_quantile(0.99)
    if p99 > LATE_LIMIT:
        grade = "invalid" if p99 > LATE_INVALID else "degraded"
        worst = f"worst {_ms(ledger.late_max)}; allowed {_ms(LATE_LIMIT)}"
        found.append((grade, f"{where}: data left {_ms(p99)} late (p99; {worst})"))
    error = ledger.rate_error
    if error is not None and abs(error) > RATE_LIMIT:
        grade = "invalid" if abs(error) > RATE_INVALID else "degraded"
        found.append((grade, f"{where}: its rate was off by {error:+.1%}"))
    share = ledger.blocked / kept.busy if kept.busy >= STRETCH else 0.0
    if share > BLOCKED_LIMIT:
        grade = "invalid" if share > BLOCKED_INVALID else "degraded"
        found.append((grade, f"{where}: held up by the receiving program {share:.0%} of the time"))
    return found


def _of_rate(kept: Kept, peak: int | None) -> list[tuple[str, str]]:
    if kept.rate is None or not kept.nbytes or not (why := too_fast(kept.rate, peak)):
        return []
    return [("degraded", f"link {kept.link}, {kept.way}: {why}")]


def too_fast(rate: int, peak: int | None) -> str:
    """Why a link of so many bytes/s cannot be kept; empty where it can, or nobody knows."""
    if peak is None or rate <= PEAK_SHARE * peak:
        return ""
    return f"{_rate(rate)} is more than {PEAK_SHARE:.0%} of the {_rate(peak)} this machine moves"


def judge(kept: Iterable[Kept], peak: int | None = None) -> dict[str, Any]:
    """The verdict on all, on each link, and why. `peak`: bytes/s that this machine moves over a
    socket, where it was measured."""
    links: dict[str, dict[str, Any]] = {}
    why: list[tuple[str, str]] = []
    for one in kept:
        reasons = _of_direction(one) + _of_rate(one, peak)
        why += reasons
        link = links.setdefault(one.link, {"verdict": "ok", "directions": {}})
        link["verdict"] = max([link["verdict"], *(grade for grade, _ in reasons)], key=_rank)
        link["directions"][one.way] = figures(one)
    return {
        "verdict": max(["ok", *(link["verdict"] for link in links.values())], key=_rank),
        "why": [text for _, text in sorted(why, key=lambda reason: -_rank(reason[0]))],
        "peak_bytes_per_s": peak,
        "links": links,
    }


def figures(kept: Kept) -> dict[str, Any]:
    """A ledger for a file."""
    ledger = kept.ledger
    histogram: Mapping[int, int] = ledger.histogram
    return {
        "late_s": {
            "p50": Seconds(ledger.late_quantile(0.5)),
            "p99": Seconds(ledger.late_quantile(0.99)),
            "max": Seconds(ledger.late_max),
        },
        "late_histogram": _coarse(histogram),
        "blocked_s": Seconds(ledger.blocked),
        "rate_error": None if ledger.rate_error is None else round(ledger.rate_error, 6),
    }


def _coarse(histogram: Mapping[int, int]) -> list[list[Any]]:
    """[upper edge in seconds, loads], edges at 0, then 10 us and doubling."""
    bins: Counter[int] = Counter()
    for step, count in histogram.items():
        edge = 0 if step == 0 else 1 << (step - 1).bit_length()
        bins[edge] += count
    return [[Seconds(edge * STEP), bins[edge]] for edge in sorted(bins)]


def _ms(time: Ns) -> str:
    return f"{time / MS:.3g} ms"


def _rate(rate: int) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= SECOND else f"{rate / 1e6:.3g} MB/s"
