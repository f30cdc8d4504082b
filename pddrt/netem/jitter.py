"""One-way delay as a process in time: mean, deviation, shape, correlation. Sans-IO.

A stationary Gaussian process z(t) - iid normal knots, joined along the circle, z = cos(a) x_k +
sin(a) x_{k+1}, so that its variance is 1 between the knots too - is bent to the delay's own
distribution, quantile by quantile. So any shape has the same way of moving in time, and a delay is
a function of (seed, time): it never varies from item to item.

    log-normal   the default: positive by itself, with exactly this mean and deviation, and for a
                 jitter much below the mean the normal one
    normal       cut off at a delay of 0, which raises its mean where that is not far away
    uniform      mean +- sqrt(3) jitter, cut off at 0
    pareto       a long tail upwards: shape 3, moved and scaled to this mean and deviation
    a table      netem's `.dist`: 8,192ths of a deviation, any number of them, all as likely

**Correlation.** Knots are `correlation` apart: over that time the correlation of z falls to 1/pi
(0.32), over twice that to 0. By default they are 10 jitters apart: the delay then falls faster than
time passes (which would be reordering, and is held back by the link) only beyond six standard
deviations while the jitter is much below the mean. With less correlation the held-back flow sees a
longer and steadier delay than was set: `effective` says what.

Sources: netem's table format is that of tc-netem(8) and iproute2's maketable.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from pddrt.types import MS, Ns

SHAPES = ("log-normal", "normal", "uniform", "pareto")
TABLE_SCALE = 8192
"""A deviation, in the units of netem's tables."""
MAX_TABLE = 1 << 16
_PARETO = 3.0
_PARETO_MEAN = _PARETO / (_PARETO - 1)
_PARETO_DEVIATION = math.sqrt(_PARETO / (_PARETO - 2)) / (_PARETO - 1)
_SPACINGS = 1024
"""How many correlation times `effective` looks at, each in so many steps."""
_STEPS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """One of SHAPES, or a table under a name of its own: deviations from the mean, sorted."""

    name: str = "log-normal"
    table: tuple[float, ...] = ()

    def at(self, z: float) -> float:
        """Deviations from the mean at the quantile where a normal one is at `z`."""
        if self.table:
            quantile = 0.5 * math.erfc(-z / math.sqrt(2))
            return self.table[min(int(quantile * len(self.table)), len(self.table) - 1)]
        match self.name:
            case "normal":
                return z
            case "uniform":
                return math.sqrt(3) * math.erf(z / math.sqrt(2))
            case "pareto":
                above = max(0.5 * math.erfc(z / math.sqrt(2)), 1e-300)
                return float((above ** (-1 / _PARETO) - _PARETO_MEAN) / _PARETO_DEVIATION)
        raise AssertionError(self.name)


LOG_NORMAL = Shape()


class Effective(NamedTuple):
    """Mean and standard deviation of a delay, as what keeps its order meets it."""

    mean: Ns
    deviation: Ns


class Delay:
    """One-way delay as a function of time. See the module."""

    def __init__(
        self,
        mean: Ns,
        jitter: Ns,
        seed: str,
        shape: Shape = LOG_NORMAL,
        correlation: Ns | None = None,
    ) -> None:
        """Raises ValueError for a negative figure, for a correlation of 0, and for jitter on a
        delay of 0, which has no room for it."""
        if mean < 0 or jitter < 0 or (jitter > 0 and mean == 0):
            raise ValueError(f"impossible delay: {mean} ns with a jitter of {jitter} ns")
        if correlation is not None and correlation < 1:
            raise ValueError(f"impossible correlation: {correlation} ns")
        self.mean = mean
        self.jitter = jitter
        self.shape = shape
        self.correlation = correlation
        self._seed = seed
        self._spacing = correlation or max(10 * jitter, MS)
        log_normal = shape.name == "log-normal" and not shape.table
        self._sigma = math.sqrt(math.log1p((jitter / mean) ** 2)) if jitter and log_normal else None
        self._knots: dict[int, float] = {}

    def at(self, t: Ns) -> Ns:
        """The delay of what leaves the bottleneck at `t`."""
        if not self.jitter:
            return self.mean
        k, offset = divmod(t, self._spacing)
        angle = math.pi / 2 * offset / self._spacing
        z = math.cos(angle) * self._knot(k) + math.sin(angle) * self._knot(k + 1)
        if self._sigma is not None:
            return round(self.mean * math.exp(self._sigma * (z - self._sigma / 2)))
        return max(0, round(self.mean + self.jitter * self.shape.at(z)))

    def effective(self) -> Effective:
        """What a flow that always has something on the way meets, whose order is kept: due times
        only grow. Computed from this very process over its first 1,024 correlation times."""
        if not self.jitter:
            return Effective(self.mean, 0)
        step = max(1, self._spacing // _STEPS)
        last: Ns = 0
        total = squares = 0
        count = _SPACINGS * _STEPS
        for i in range(count):
            t = i * step
            last = max(last, t + self.at(t))
            delay = last - t
            total += delay
            squares += delay * delay
        variance = squares * count - total * total
        return Effective(total // count, math.isqrt(max(0, variance)) // count)

    def _knot(self, k: int) -> float:
        value = self._knots.get(k)
        if value is None:
            if (
                len(self._knots) >= 4
            ):  # time moves on: at most the present pair and the next is of use
                self._knots.clear()
            value = self._knots[k] = random.Random(f"{self._seed}/{k}").gauss(0.0, 1.0)
        return value


def autocorrelation(lag: float) -> float:
    """Of z, over `lag` correlation times, averaged over where in a spacing one begins: 1, 1/pi at
    1, and 0 from 2 on.

    Within a spacing the correlation of two points is the cosine of the angle between them; where
    the second lies in the next one, they share one knot: sin(a) cos(b).
    """
    lag = abs(lag)
    if lag >= 2:
        return 0.0
    half = math.pi / 2
    if lag <= 1:
        same = (1 - lag) * math.cos(half * lag)
        low, high = 1 - lag, 1.0
    else:
        same = 0.0
        low, high = 0.0, 2 - lag
    # integral over u from low to high of sin(half u) cos(half (u + lag - 1))
    shift = half * (lag - 1)
    swing = (math.cos(2 * half * low + shift) - math.cos(2 * half * high + shift)) / (2 * half)
    shared = 0.5 * (swing - (high - low) * math.sin(shift))
    return same + shared


def parse_table(text: str, name: str) -> Shape:
    """A `.dist` file's text: whole numbers between white space, `#` begins a comment. Raises
    ValueError with the line."""
    values: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.partition("#")[0].split():
            try:
                value = int(word)
            except ValueError:
                raise ValueError(f"line {number}: found '{word[:40]}'; allowed: whole numbers, "
                                 "8,192 to a deviation") from None  # fmt: skip
            if abs(value) > 1 << 20:
                raise ValueError(f"line {number}: found {value}; allowed: up to {1 << 20}")
            values.append(value)
        if len(values) > MAX_TABLE:
            raise ValueError(f"line {number}: more than {MAX_TABLE:,} values")
    if len(values) < 2:
        raise ValueError(f"found {len(values)} values; needed: at least 2")
    return Shape(name, tuple(value / TABLE_SCALE for value in sorted(values)))


def format_table(shape: Shape) -> str:
    """A `.dist` file of the table, or of 4,096 quantiles of a named shape."""
    table = shape.table or tuple(shape.at(_normal_quantile((i + 0.5) / 4096)) for i in range(4096))
    whole = [max(-32768, min(32767, round(value * TABLE_SCALE))) for value in table]
    rows = [" ".join(map(str, whole[i : i + 8])) for i in range(0, len(whole), 8)]
    return f"# {shape.name}\n" + "\n".join(rows) + "\n"


def _normal_quantile(quantile: float) -> float:
    """By bisection on the distribution function: exact enough for a table of 16 bits."""
    low, high = -9.0, 9.0
    for _ in range(50):
        middle = (low + high) / 2
        if 0.5 * math.erfc(-middle / math.sqrt(2)) < quantile:
            low = middle
        else:
            high = middle
    return low
