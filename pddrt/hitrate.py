"""Prefix-hit rates: the seven intervals, and how to choose prompt lengths that fall into them.

The hit rate of a request is the share of its prompt that an unbounded prefix cache holds. Such a
cache holds what earlier requests computed: their prompts, and their answers but for the last token,
whose KV no step has written. The last position of a prompt is always computed.

So a rate is a length: a request that finds r tokens cached has rate r / P with a prompt of P. The
`Deck` holds one card for each request of a workload, naming its interval; it is dealt to turns
whose lengths allow it, until it is empty. What was dealt is counted by the interval that the turn
really came to, so that a text a token too short is made up for later.

Agents of production systems have such rates: 70-80 % of the requests above 95 % (MISSION.md).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

INTERVALS = ("0-90", "90-95", "95-96", "96-97", "97-98", "98-99", "99-100")
EDGES = (0, 90, 95, 96, 97, 98, 99, 100)
"""In percent. Each interval has its lower edge, the last one both."""

AGENTS: Mapping[str, float] = {
    "0-90": 0.12, "90-95": 0.13,
    "95-96": 0.05, "96-97": 0.08, "97-98": 0.14, "98-99": 0.22, "99-100": 0.26,
}  # fmt: skip
"""Ours: 75 % of the requests above 95 %, more the higher the rate."""

LEAST_RATE = 70
"""In percent: the least rate of the lowest interval that a turn which follows others is given.

Less would make prompts grow out of all proportion: by half at 70 %.
"""


def interval(hit_tokens: int, prompt_tokens: int) -> int:
    """Index of the interval of a request's hit rate. Exact, in integers."""
    return sum(100 * hit_tokens >= edge * prompt_tokens for edge in EDGES[1:-1])


def prompt_range(index: int, cached: int, least: int, most: int) -> range:
    """Prompt lengths within [least, most] whose rate is in the interval, `cached` tokens being hit.

    In the lowest interval not below `LEAST_RATE`.
    """
    low, high = EDGES[index] or LEAST_RATE, EDGES[index + 1]
    first = 100 * cached // high + 1  # rate < high; and in the last one a token is always new
    last = 100 * cached // low
    return range(max(first, least), min(last, most) + 1)


def apportion(shares: Mapping[str, float], total: int) -> list[int]:
    """`total` requests over the intervals, by largest remainder."""
    exact = [shares.get(name, 0.0) * total for name in INTERVALS]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


class Deck:
    """The intervals still to be dealt. `openings`: requests to come that hit no conversation.

    Those hit no more than the system prompt, so the lowest interval is kept for them.
    """

    def __init__(
        self, shares: Mapping[str, float], total: int, openings: int, rng: random.Random
    ) -> None:
        self.wanted = apportion(shares, total)
        self.left = list(self.wanted)
        self.openings = openings
        self._rng = rng

    def opening(self, cached: int, wanted: int, least: int, most: int) -> int:
        """Prompt length of a request that opens a conversation; `wanted`: what it would have.

        In the lowest interval while there are cards of it, else in any that can be had.
        """
        if self.left[0] > 0 or not cached:
            return max(least, min(max(wanted, 100 * cached // EDGES[1] + 1), most))
        ranges = self._ranges(cached, least, most)
        return self._draw(ranges, self._weights(ranges)) or max(least, min(wanted, most))

    def following(self, cached: int, least: int, most: int) -> int | None:
        """Prompt length of a request that goes on with a conversation; None: let it start over.

        It starts over where no prompt is short enough, and where a card of the lowest interval
        would make it too long.
        """
        ranges = self._ranges(cached, least, most)
        weights = self._weights(ranges)
        weights[0] = max(0, self.left[0] - self.openings)
        if not any(weights):  # no card fits: as close as can be, and counted as such
            possible = [n for n, r in enumerate(ranges) if r]
            if not possible:
                return None
            weights[max(possible, key=lambda n: (self.left[n], -n))] = 1.0
        return self._draw(ranges, weights)

    def settle(self, hit_tokens: int, prompt_tokens: int, *, opening: bool) -> None:
        """A request came to this rate."""
        self.left[interval(hit_tokens, prompt_tokens)] -= 1
        self.openings -= opening

    def _ranges(self, cached: int, least: int, most: int) -> list[range]:
        return [prompt_range(i, cached, least, most) for i in range(len(INTERVALS))]

    def _weights(self, ranges: Sequence[range]) -> list[float]:
        """Of the intervals that can be had: by what is left of them, and the more if that is much.

        Short prompts cannot have high rates, so these lag behind until prompts are long.
        """
        return [
            wanted * (left / wanted) ** 3 if lengths and left > 0 else 0.0
            for wanted, left, lengths in zip(self.wanted, self.left, ranges, strict=True)
        ]

    def _draw(self, ranges: Sequence[range], weights: Sequence[float]) -> int | None:
        """A length of an interval drawn by weight, not at its very edges; None if it has none."""
        if not any(weights):
            return None
        lengths = ranges[self._rng.choices(range(len(ranges)), weights)[0]]
        if not lengths:
            return None
        margin = len(lengths) // 10
        return self._rng.randint(lengths[margin], lengths[-1 - margin])
