"""Overload control at the gateway's door: who is refused when more comes than can be served.

Refused at once and clearly, rather than queued without end or served when nobody waits any more.

**Bounds**: requests under way, and tokens of KV that they may need together. By default
`FACTOR` times what the pools in reach hold: enough that no pool ever runs dry for lack of requests.

**Shedding** (`shed_after`, a wait for the first token that would be too long; None: never): a
request is refused when those that wait for their first token before it would take longer than
that. By Little's law that wait is waiting / rate; the rate is that at which first tokens came while
anybody waited, over the last `WINDOW` of them. Under light load it is the service rate of what was
there, and too low; so nobody is shed while fewer than `FEW` wait.

Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pddrt.types import SECOND, Ns

FACTOR = 8
WINDOW = 64
FEW = 4


@dataclass(frozen=True, slots=True)
class Admission:
    """`max_tokens` None: by the pools; `max_requests` None: no bound but that."""

    max_requests: int | None = None
    max_tokens: int | None = None
    shed_after: Ns | None = None


class Door:
    """Counts who is inside. `waiting`: those without a first token."""

    def __init__(self, rule: Admission) -> None:
        self.rule = rule
        self.tokens: dict[str, int] = {}
        """By request: KV tokens that it may need."""
        self.waiting: set[str] = set()
        self._served: deque[Ns] = deque(maxlen=WINDOW)
        """How long it took from one first token to the next, while anybody waited."""
        self._busy_since: Ns = 0

    def refusal(self, tokens: int, pools: int) -> str | None:
        """Why a request that may need so many tokens of KV is not let in; None: it may come.
        `pools`: tokens of KV that fit into the instances in reach.
        """
        most = self.rule.max_requests
        if most is not None and len(self.tokens) >= most:
            return f"overloaded: {most} requests are under way, as many as may be"
        room = FACTOR * pools if self.rule.max_tokens is None else self.rule.max_tokens
        inside = sum(self.tokens.values())
        if inside and inside + tokens > room:
            return f"overloaded: {inside} tokens are under way, and {tokens} more than {room} allow"
        wait, limit = self.expected_wait, self.rule.shed_after
        if limit is not None and wait is not None and wait > limit:
            return f"overloaded: the first token would take {wait / SECOND:.3f} s"
        return None

    @property
    def expected_wait(self) -> Ns | None:
        """Of who came now; None where nobody can tell."""
        if len(self.waiting) < FEW or not self._served:
            return None
        return (len(self.waiting) + 1) * sum(self._served) // len(self._served)

    def entered(self, now: Ns, request: str, tokens: int) -> None:
        if not self.waiting:
            self._busy_since = now
        self.tokens[request] = tokens
        self.waiting.add(request)

    def first_token(self, now: Ns, request: str) -> None:
        """It waits no more, being served."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._served.append(now - self._busy_since)
            self._busy_since = now

    def left(self, request: str) -> None:
        self.tokens.pop(request, None)
        self.waiting.discard(request)
