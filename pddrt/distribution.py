"""Many integers, of which count, mean, extremes and percentiles are asked: in bounded memory.

Up to `EXACT` values all are kept, and percentiles are nearest-rank on them, exact. From then on
they are counted in buckets, 1,024 to each doubling, and a percentile is the middle of the bucket
that the rank falls into: at most 1/2,048 (0.05 %) of the value off. Count, mean, least and most are
exact always. (A sketch with a bound on the rank, as t-digest or KLL, can be far off in value where
a tail is long, and tails are what is asked here.)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

EXACT = 1 << 18
"""2 MiB of values."""
STEPS = 1024
_BITS = STEPS.bit_length()


class Distribution:
    """Values between -2**63 and 2**63 - 1."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.count = 0
        self.total = 0
        self.total_abs = 0
        self.least: int | None = None
        self.most: int | None = None
        self._values = array("q")
        self._buckets: Counter[int] = Counter()
        self.extend(values)

    def __len__(self) -> int:
        return self.count

    @property
    def exact(self) -> bool:
        """Whether percentiles are."""
        return not self._buckets

    def add(self, value: int) -> None:
        self.extend((value,))

    def extend(self, values: Sequence[int]) -> None:
        if not values:
            return
        self.count += len(values)
        self.total += sum(values)
        self.total_abs += sum(map(abs, values))
        low, high = min(values), max(values)
        self.least = low if self.least is None else min(low, self.least)
        self.most = high if self.most is None else max(high, self.most)
        if self._buckets:
            self._buckets.update(map(_bucket, values))
            return
        self._values.extend(values)
        if len(self._values) > EXACT:
            self._buckets.update(map(_bucket, self._values))
            self._values = array("q")

    @property
    def mean(self) -> int | None:
        """Rounded down."""
        return self.total // self.count if self.count else None

    @property
    def mean_abs(self) -> int | None:
        return self.total_abs // self.count if self.count else None

    def percentiles(self, *shares: int) -> list[int | None]:
        """The nearest-rank percentile for each of `shares`, from 1 to 100; None of nothing."""
        if self.least is None or self.most is None:
            return [None] * len(shares)
        ranks = [-(-self.count * share // 100) for share in shares]
        if not self._buckets:
            known = sorted(self._values)
            return [known[rank - 1] for rank in ranks]
        found, passed = dict[int, int](), 0
        waiting = sorted(set(ranks), reverse=True)
        for bucket, count in sorted(self._buckets.items()):
            passed += count
            while waiting and waiting[-1] <= passed:
                found[waiting.pop()] = min(max(_middle(bucket), self.least), self.most)
        return [found[rank] for rank in ranks]

    def __iter__(self) -> Iterator[int]:
        """The values, while all are kept."""
        assert not self._buckets, "values are counted, not kept"
        return iter(self._values)


def _bucket(value: int) -> int:
    """In the order of values; 1,024 to each doubling, one a value where those are smaller."""
    if value < 0:
        return -1 - _bucket(-1 - value)
    shift = max(0, value.bit_length() - _BITS)
    return shift * STEPS + (value >> shift)


def _middle(bucket: int) -> int:
    if bucket < 0:
        return -1 - _middle(-1 - bucket)
    shift = max(0, bucket // STEPS - 1)
    return ((bucket - shift * STEPS) << shift) + (1 << shift) // 2
