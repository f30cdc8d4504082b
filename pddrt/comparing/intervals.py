"""How far a number may be off: intervals over seeds and over sessions. Pure and deterministic.

A run is one draw: other seeds ask other questions at other times. Two kinds of interval tell how
much of a number, or of a ratio of two, is that draw. Both are of 95 %.

- **by seeds**: runs with different seeds are independent, whatever happens inside them, so this is
  the one to believe. Whole runs are drawn again, with replacement.
- **by sessions**: inside each run its sessions are drawn again. Requests of one session share a
  cache and are drawn together. The load that sessions make for one another is taken as given, so
  this says how much hangs on a few of them, and is too narrow for other seeds.

Both are **paired**: what is drawn is drawn for both columns at once, so that what is hard for both
(a long prompt, a burst) does not count as a difference.

From few draws the usual percentiles are too narrow. They are taken further out: at
Phi(-sqrt(n / (n - 1)) * t), with t the quantile of Student's distribution for n - 1 (T. Hesterberg,
"What Teachers Should Know about the Bootstrap", The American Statistician 69, 2015: the expanded
percentile interval). Below `LEAST_SEEDS` that lies beyond what n values can show: the range of n
values holds a symmetric mean in 1 - 2^(1 - n) of all cases, 94 % of them for five.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
LEAST_SEEDS = 5
MAX_SEEDS = 1_000
"""Of `--repeat`, everywhere."""
RESAMPLES = 2000
MAX_WORK = 50_000_000
"""Values weighed in one bootstrap; more are drawn fewer times, but `LEAST_RESAMPLES`."""
LEAST_RESAMPLES = 200
MAX_VALUES = 2_000_000
"""With more values of one measure there is no interval over sessions: it would take minutes."""
BLOCK = 10_000
"""Values that are weighed at once, in as many resamples as that makes."""

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

SHARES = {"p50": 50, "p90": 90, "p99": 99}
WHATS = ("mean", *SHARES)
"""The numbers that a distribution is told by."""


# -- Student's distribution ------------------------------------------------------------------------


def t_quantile(share: float, freedom: int) -> float:
    """Of Student's distribution with so many degrees of freedom, for shares above a half."""
    assert share > 0.5
    assert freedom > 0
    low, high = 0.0, 1.0
    while _t_within(high, freedom) < 2 * share - 1:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < 2 * share - 1 else (low, middle)
    return high


def _t_within(t: float, freedom: int) -> float:
    """The probability of [-t, t]: finite sums (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student(values: Sequence[float]) -> Interval | None:
    """Of the mean of independent values: mean -+ t * s / sqrt(n); None for fewer than two."""
    if len(values) < 2:
        return None
    middle = statistics.fmean(values)
    reach = t_quantile((1 + LEVEL) / 2, len(values) - 1)
    reach *= statistics.stdev(values, middle) / math.sqrt(len(values))
    return middle - reach, middle + reach


def over_seeds(values: Sequence[Any]) -> dict[str, Any]:
    """The mean of what is a number, its interval, and the smallest and largest."""
    known = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if not known:
        return {"n": 0, "mean": None, "low": None, "high": None, "min": None, "max": None}
    interval = student(known) or (None, None)
    return {
        "n": len(known), "mean": sum(known) / len(known), "low": interval[0], "high": interval[1],
        "min": min(known), "max": max(known),
    }  # fmt: skip


# -- drawing again ---------------------------------------------------------------------------------


def expanded(draws: Floats, n: int) -> Interval | None:
    """The interval of what n things, drawn again, came to; nan is what could not be said."""
    known = np.sort(draws[~np.isnan(draws)])
    if n < 2 or len(known) < LEAST_RESAMPLES // 2:
        return None
    t = t_quantile((1 + LEVEL) / 2, n - 1)
    share = statistics.NormalDist().cdf(-math.sqrt(n / (n - 1)) * t)
    rank = min(int(share * len(known)), (len(known) - 1) // 2)
    return float(known[rank]), float(known[-1 - rank])


def by_seeds(base: Sequence[float], here: Sequence[float], name: str) -> tuple[Interval, Interval]:
    """Of the mean of `here`, and of its ratio to that of `base`; one value a seed, in the same
    order, at least `LEAST_SEEDS`. `name` keys the random numbers.
    """
    n = len(here)
    assert n == len(base) >= LEAST_SEEDS
    draw = Random(f"bootstrap/{name}")
    drawn = np.array([draw.choices(range(n), k=n) for _ in range(RESAMPLES)])
    means = np.array(here, dtype=np.float64)[drawn].mean(axis=1)
    others = np.array(base, dtype=np.float64)[drawn].mean(axis=1)
    own, ratio = expanded(means, n), expanded(_over(means, others), n)
    return own or (math.nan, math.nan), ratio or (math.nan, math.nan)


def _over(a: Floats, b: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(b != 0, a / b, np.where(a == 0, 1.0, np.nan))
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's values of one measure, and of which session each is."""

    values: Floats
    session: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[float], session: Sequence[int]) -> Sample:
        """In order of the values: percentiles are then a search."""
        found = np.array(values, dtype=np.float64)
        order = np.argsort(found, kind="stable")
        return cls(found[order], np.array(session, dtype=np.int64)[order])


def by_sessions(
    base: Sequence[Sample], here: Sequence[Sample], sessions: Sequence[int], name: str
) -> Iterator[tuple[str, Interval | None, Interval | None]]:
    """For each of `WHATS`: the interval of `here`, and of its ratio to `base`. Both have a sample
    for each seed, whose sessions are numbered from 0 to `sessions` of it; a number is the mean over
    seeds.
    """
    work = sum(len(s.values) for s in (*base, *here)) or 1
    if work > MAX_VALUES:
        yield from ((what, None, None) for what in WHATS)
        return
    times = max(LEAST_RESAMPLES, min(RESAMPLES, MAX_WORK // work))
    counts = _counts(tuple(sessions), times, name)
    own = _means_over_seeds(here, counts)
    other = own if base is here else _means_over_seeds(base, counts)
    n = sum(sessions)
    for what in WHATS:
        yield what, expanded(own[what], n), expanded(_over(own[what], other[what]), n)


@lru_cache(maxsize=8)
def _counts(sessions: tuple[int, ...], times: int, name: str) -> tuple[npt.NDArray[np.int64], ...]:
    """How often each session of each seed was drawn, [times, sessions]: the same for every measure
    and for every column of a comparison.
    """
    draw = Random(f"bootstrap/{name}")

    def of_seed(n: int) -> npt.NDArray[np.int64]:
        drawn = [draw.choices(range(n), k=n) if n else [] for _ in range(times)]
        rows = [np.bincount(np.array(row, dtype=np.int64), minlength=n) for row in drawn]
        return np.array(rows, dtype=np.int64).reshape(times, n)

    return tuple(map(of_seed, sessions))


def _means_over_seeds(
    samples: Sequence[Sample], counts: Sequence[npt.NDArray[np.int64]]
) -> Mapping[str, Floats]:
    each = [_weighed(sample, count) for sample, count in zip(samples, counts, strict=True)]
    return {what: np.mean([of[what] for of in each], axis=0) for what in WHATS}


def _weighed(sample: Sample, counts: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """The numbers of a sample in which session s counts so often, for each row of counts."""
    times, size = len(counts), len(sample.values)
    found = {what: np.full(times, np.nan) for what in WHATS}
    if not size:
        return found
    rows = max(1, BLOCK // size)  # many rows at once where they are short, else one by one
    for start in range(0, times, rows):
        weights = counts[start : start + rows][:, sample.session]
        upto = np.cumsum(weights, axis=1)
        total = upto[:, -1]
        some = total > 0
        of = slice(start, start + len(upto))
        sums = weights @ sample.values
        found["mean"][of] = np.divide(sums, total, out=np.full(len(upto), np.nan), where=some)
        for what, share in SHARES.items():  # nearest rank, as in `summary.spread`
            rank = -(-total * share // 100)
            if rows > 1:
                at = (upto >= rank[:, None]).argmax(axis=1)
            else:
                at = np.minimum(np.searchsorted(upto[0], rank), size - 1)
            found[what][of] = np.where(some, sample.values[at], np.nan)
    return found
