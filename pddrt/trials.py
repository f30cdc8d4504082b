"""Trials: what was measured of each handover, and what the measurements come to.

See `bench` for the two ways and their parts. Pure statistics: both ways stand as they are, and the
comparison is by ratios, whoever wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pddrt.summary import spread
from pddrt.trace import Seconds
from pddrt.types import Ns

Way = Literal["kv", "ids"]
WAYS: tuple[Way, ...] = ("kv", "ids")
PARTS: dict[Way, tuple[str, ...]] = {
    "kv": ("copy_out", "wire", "copy_in"),
    "ids": ("wire", "extend"),
}
RATIOS = ("mean", "p50", "p90", "p99", "max", "sigma")


@dataclass(frozen=True, slots=True)
class Repetition:
    """One handover: when it began, its parts (ns), bytes of its frames on the wire.

    `same`: the main decoder has the relay's next id and, with kv, its KV to the byte.
    """

    way: Way
    start: Ns
    copy_out: Ns
    wire: Ns
    copy_in: Ns
    extend: Ns
    bytes: int
    same: bool

    @property
    def total(self) -> Ns:
        return self.copy_out + self.wire + self.copy_in + self.extend


def statistics_of(times: Sequence[Ns]) -> dict[str, Seconds | None]:
    """mean, p50, p90, p99 and max as everywhere, and sigma: the standard deviation of the sample
    (over n - 1).
    """
    return {**spread(times), "sigma": Seconds(round(statistics.stdev(times)))}


def compared(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    """Both ways by themselves (`ways`), and held against each other.

    `measured` has the medians of ids, `reference` those of kv, `ratio` the former over the latter.
    `smaller` names the way with the smaller mean, p50, max and sigma; None where they are equal.
    """
    ways = {way: _of_way([r for r in repetitions if r.way == way]) for way in WAYS}
    totals = {way: ways[way]["total_s"] for way in WAYS}
    medians = {
        way: {"total_s": ways[way]["total_s"]["p50"], "bytes": ways[way]["bytes"]} for way in WAYS
    }
    return {
        "ways": ways,
        "measured": medians["ids"],
        "reference": medians["kv"],
        "ratio": {
            "total_s": _over(totals["ids"]["p50"].ns, totals["kv"]["p50"].ns),
            "bytes": _over(medians["ids"]["bytes"], medians["kv"]["bytes"]),
        },
        "kv_over_ids": {
            **{key: _over(totals["kv"][key].ns, totals["ids"][key].ns) for key in RATIOS},
            "bytes": _over(medians["kv"]["bytes"], medians["ids"]["bytes"]),
        },
        "smaller": {key: _smaller(*(totals[way][key].ns for way in WAYS)) for key in RATIOS},
    }


def _of_way(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    """`bytes`: the most of any repetition; they differ by nothing but a request's name."""
    parts = PARTS[repetitions[0].way]
    return {
        "count": len(repetitions),
        "total_s": statistics_of([r.total for r in repetitions]),
        "parts_s": {part: statistics_of([getattr(r, part) for r in repetitions]) for part in parts},
        "bytes": max(r.bytes for r in repetitions),
        "same": sum(r.same for r in repetitions),
    }


def _over(a: int, b: int) -> float | None:
    return round(a / b, 9) if b else None


def _smaller(kv: Ns, ids: Ns) -> Way | None:
    return None if kv == ids else "kv" if kv < ids else "ids"
