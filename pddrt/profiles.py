"""Step profiles: how long an engine's steps took on some machine, as a formula that repeats them.

`pddrt calibrate` measures steps of many shapes and fits

    step = base(rows) + spans * s + narrow tokens read * r + wide pairs attended * p

where `rows` are the new tokens of the whole batch (matrix products; piecewise linear between KNOTS,
since a few rows cost as much as one), `spans` the sequences (bookkeeping of each), and attention is
told apart as the engine does it: a **narrow** span (up to NARROW new tokens) reads the KV of all
its positions once, a **wide** one pays for every pair of positions. The fit is least squares on
relative errors; the profile keeps every sample and says how far off the formula is.

Under the virtual clock a step takes exactly what the profile says (`step_time: measured:FILE`), in
integers, so that a run repeats to the byte on any machine. Pure: no clock, no engine.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pddrt.errors import BadInput
from pddrt.types import Ns, Span

SCHEMA = 1
NARROW = 16
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PS = 1000
"""Picoseconds in a nanosecond: the unit of what is multiplied with many tokens."""

Shape = Sequence[tuple[int, int]]
"""A step as (new tokens, position of the first) of each of its spans."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A step of that shape took `ns` (the median of `rounds`)."""

    shape: tuple[tuple[int, int], ...]
    ns: Ns
    rounds: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """`base_ns` at each of `knots` rows; the rest per span, per token read, per pair attended."""

    model: str
    fingerprint: str
    dtype: str
    device: str
    threads: int
    machine: str
    knots: tuple[int, ...]
    base_ns: tuple[Ns, ...]
    span_ns: Ns
    read_ps: int
    pair_ps: int
    samples: tuple[Sample, ...]

    def cost(self, spans: Sequence[Span]) -> Ns:
        """What a step is charged."""
        return self.of([(len(span.tokens), span.start) for span in spans])

    def of(self, shape: Shape) -> Ns:
        rows, spans, read, pairs = _features(shape)
        return (
            self._base(rows)
            + spans * self.span_ns
            + (read * self.read_ps + pairs * self.pair_ps) // PS
        )

    def _base(self, rows: int) -> Ns:
        """Linear between two knots, and beyond the last one as between the last two."""
        at = min(max(1, bisect_left(self.knots, rows)), len(self.knots) - 1)
        low, high = self.knots[at - 1], self.knots[at]
        first, second = self.base_ns[at - 1], self.base_ns[at]
        return first + (second - first) * (max(rows, low) - low) // (high - low)

    @property
    def errors(self) -> list[float]:
        """(fitted - measured) / measured of each sample."""
        return [(self.of(s.shape) - s.ns) / s.ns for s in self.samples]

    def dump(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


def _features(shape: Shape) -> tuple[int, int, int, int]:
    rows = sum(n for n, _ in shape)
    read = sum(start + n for n, start in shape if n <= NARROW)
    pairs = sum(n * start + n * (n + 1) // 2 for n, start in shape if n > NARROW)
    return rows, len(shape), read, pairs


def fit(samples: Sequence[Sample], **about: Any) -> StepProfile:
    """The profile that is nearest to `samples`, by relative error; `about`: its first six fields.

    Knots beyond the largest sample are left out. No part of the formula is negative.
    """
    largest = max(_features(s.shape)[0] for s in samples)
    knots = [k for k in KNOTS if k <= largest]
    matrix = np.array([_row(s.shape, knots) for s in samples])
    times = np.array([float(s.ns) for s in samples])
    columns = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, columns] / times[:, None], np.ones(len(times)))
        negative = [c for c, x in zip(columns, solution, strict=True) if x < 0]
        if not negative:
            break
        columns = [c for c in columns if c not in negative]
    whole = np.zeros(matrix.shape[1])
    whole[columns] = solution
    base, (span, read, pair) = whole[: len(knots)], whole[len(knots) :]
    return StepProfile(
        knots=tuple(knots),
        base_ns=tuple(np.maximum.accumulate(np.rint(base).astype(int)).tolist()),
        span_ns=round(float(span)),
        read_ps=round(float(read) * PS),
        pair_ps=round(float(pair) * PS),
        samples=tuple(samples),
        **about,
    )


def _row(shape: Shape, knots: Sequence[int]) -> list[float]:
    """How much of each unknown a step of that shape has."""
    rows, spans, read, pairs = _features(shape)
    hats = [0.0] * len(knots)
    at = min(max(1, bisect_left(knots, rows)), len(knots) - 1)
    share = (rows - knots[at - 1]) / (knots[at] - knots[at - 1])
    hats[at - 1], hats[at] = 1 - share, share
    return [*hats, spans, read, pairs]


def read(path: Path) -> StepProfile:
    """Raises BadInput where the file is no profile."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        samples = [
            Sample(tuple((n, start) for n, start in s["shape"]), s["ns"], s["rounds"])
            for s in values.pop("samples")
        ]
        for name in ("knots", "base_ns"):
            values[name] = tuple(int(v) for v in values[name])
        profile = StepProfile(samples=tuple(samples), **values)
        if len(profile.knots) != len(profile.base_ns) or len(profile.knots) < 2:
            raise ValueError("knots and base_ns do not match")
        profile.of([(1, 1)])
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not a step profile: {error}") from None
    return profile
