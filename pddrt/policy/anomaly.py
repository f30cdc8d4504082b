"""The anomaly filter: long input that MD lacks, short answer. RLD ends such a request before the
WAN could have brought its KV to MD, which would then have been for nothing.

**Held**: when it is routed already, MD is offered nothing. **Cut**: when RLD holds the KV and is
expected to finish before the rest of the transfer would, however long the input was (the path may
be busy), the transfer is stopped; MD keeps what it got, as a prefix that may be evicted.

Both bet on a length that nobody knows: it is guessed, from `max_tokens`, or from what this session
answered before (its 3/4-quantile, so that a session whose answers vary is not taken for a short
one; `max_tokens` where that is less, or at its first turn). RLD having made `output_below` ids and
going on, the bet is lost: the transfer is resumed.

It is a small dose of P-RLD: MD's cache falls behind P's by every prompt that is spared. So of all
requests routed so far at most the share `share` may be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from pddrt.types import Ns

REMEMBERED = 16
"""Answers of one session that its quantile is of."""
MAX_SESSIONS = 10_000
"""Sessions that are remembered; who has not answered for longest is forgotten."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """`input_above`: tokens of the prompt that MD lacks. `output_below`: tokens of the answer.
    `share`: of all requests, 0 to 1.
    """

    input_above: int
    output_below: int
    share: float = 0.05
    guess: Literal["max_tokens", "session"] = "max_tokens"


class Filter:
    """A rule at work: counts what it spares, and learns from answers."""

    def __init__(self, rule: Anomaly) -> None:
        self.rule = rule
        self.routed = 0
        self.spared = 0
        self._answers: dict[str, deque[int]] = {}

    def expected(self, session: str | None, max_tokens: int) -> int:
        """The answer's length, as far as one can guess before it is made."""
        before = self._answers.get(session or "") if self.rule.guess == "session" else None
        if not before:
            return max_tokens
        rank = -(-3 * len(before) // 4)
        return min(max_tokens, sorted(before)[rank - 1])

    def answered(self, session: str | None, tokens: int) -> None:
        """An answer of this session has ended by itself."""
        if session is None:
            return
        lengths = self._answers.pop(session, None) or deque(maxlen=REMEMBERED)
        lengths.append(tokens)
        self._answers[session] = lengths
        while len(self._answers) > MAX_SESSIONS:
            del self._answers[next(iter(self._answers))]

    def holds(self, lacking: int, expected: int) -> bool:
        """Whether MD is offered nothing of a request that is routed now; counts it if so."""
        return lacking > self.rule.input_above and self._spare(expected)

    def cuts(self, expected: int, step: Ns, rest: Ns | None) -> bool:
        """Whether a transfer that has begun is stopped, since RLD, with steps of `step` (0: not
        known), will have answered before it ends in `rest` (None: never). Counts it if so.
        """
        sooner = step > 0 and (rest is None or expected * step < rest)
        return sooner and self._spare(expected)

    def _spare(self, expected: int) -> bool:
        rule = self.rule
        if expected >= rule.output_below or self.spared + 1 > rule.share * self.routed + 1e-9:
            return False
        self.spared += 1
        return True
