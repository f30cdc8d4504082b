"""Overload control at the gateway's door: who is refused when more comes than can be served.

Refused at once and clearly, with a hint when to come again, rather than queued without end or
served when nobody waits any more.

**Bounds**: requests under way, and tokens of KV that they may need together. By default
`FACTOR` times what the pools in reach hold: enough that no pool ever runs dry for lack of requests.

**Shedding** (`shed_after`, a time to first token that would be too long; None: never): a request is
refused when its own first token would come later than that. By Little's law it comes after

    (work that waits for its first token + its own work) * time per unit of work

Work is the tokens of a prompt that must be computed, so that a short request is not thought to be
as long as a long one. The time per unit is measured between first tokens, whatever they were short
of (P's compute, the WAN, memory of a decoder): over the last `WINDOW` of them, where `FEW` at least
waited for each instance that computes prompts, and where the one that was served had waited twice
as long as the fastest ever did. Else it is not what can be served that is measured, but what came.
Such a forecast is off by some; so a share of `MARGIN` of `shed_after` is what it may come to.

Nobody is shed while so few wait, nor before there is a measure, nor where nobody ever was as fast
as `shed_after`: that is slow, not overloaded, and refusing one would make no other faster.

Who was let in and has still not begun when it cannot be in time any more is refused then, if many
still wait; the instance that it waits for says so (`begin_within`, see `roles.solo`). What comes
too late is not computed while others wait who can be in time.

Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pddrt.types import SECOND, Ns

FACTOR = 8
WINDOW = 64
FEW = 4
MARGIN = 0.8


@dataclass(frozen=True, slots=True)
class Admission:
    """`max_tokens` None: by the pools; `max_requests` None: no bound but that."""

    max_requests: int | None = None
    max_tokens: int | None = None
    shed_after: Ns | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, and after how long it might be (None: nobody can tell)."""

    detail: str
    retry_after: Ns | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    since: Ns
    work: int


class Door:
    """Counts who is inside, and measures how fast they are served."""

    def __init__(self, rule: Admission) -> None:
        self.rule = rule
        self.tokens: dict[str, int] = {}
        """By request: KV tokens that it may need."""
        self.waiting: dict[str, _Waiting] = {}
        """Those without a first token."""
        self._tokens = self._work = 0
        self._served: deque[tuple[Ns, int]] = deque(maxlen=WINDOW)
        """How long it took from one first token to the next, and the latter's work."""
        self._since: Ns | None = None
        """The last first token, if many have waited since."""
        self._fastest: Ns | None = None
        self._few = FEW

    def refusal(self, tokens: int, pools: int, work: int, computing: int = 1) -> Refusal | None:
        """Why a request that may need so many tokens of KV is not let in; None: it may come.
        `pools`: tokens of KV that fit into the instances in reach, of which `computing` compute
        prompts; `work`: tokens of its prompt that these must compute.
        """
        self._few, most = FEW * max(1, computing), self.rule.max_requests
        if most is not None and len(self.tokens) >= most:
            under_way = "1 request is" if most == 1 else f"{most} requests are"
            return self._full(f"{under_way} under way, as many as may be")
        room = FACTOR * pools if self.rule.max_tokens is None else self.rule.max_tokens
        if self._tokens and self._tokens + tokens > room:
            under_way = f"{self._tokens} tokens are under way"
            return self._full(f"{under_way}, and {tokens} more than {room} allow")
        wait, limit = self.forecast(work), self.rule.shed_after
        if limit is None or wait is None or wait <= MARGIN * limit or not self.crowded:
            return None
        bound = f"{MARGIN * limit / SECOND:g} s ({100 * MARGIN:g} % of {limit / SECOND:g} s)"
        detail = f"the first token would take {wait / SECOND:.3f} s, more than {bound}"
        return Refusal(f"overloaded: {detail}", wait - int(MARGIN * limit))

    def _full(self, why: str) -> Refusal:
        return Refusal(f"overloaded: {why}", self.forecast(0))

    @property
    def crowded(self) -> bool:
        """Many wait, and they would be in time if fewer did."""
        limit, fastest = self.rule.shed_after, self._fastest
        slow = limit is not None and fastest is not None and fastest > limit
        return len(self.waiting) >= self._few and not slow

    def forecast(self, work: int) -> Ns | None:
        """When the first token of who comes now would come; None where nobody can tell."""
        served = sum(work for _, work in self._served)
        if not served:
            return None
        return (self._work + work) * sum(took for took, _ in self._served) // served

    def begin_within(self, now: Ns, request: str) -> Ns | None:
        """From now on: then its first token can hardly be in time any more. None: it need not."""
        waiting, limit = self.waiting.get(request), self.rule.shed_after
        if waiting is None or limit is None:
            return None
        return max(0, waiting.since + limit - now)

    def entered(self, now: Ns, request: str, tokens: int, work: int) -> None:
        self.tokens[request] = tokens
        self.waiting[request] = waiting = _Waiting(now, max(1, work))
        self._tokens += tokens
        self._work += waiting.work

    def first_token(self, now: Ns, request: str) -> None:
        """It waits no more, being served."""
        if request not in self.waiting:
            return
        waiting, crowded = self.waiting[request], len(self.waiting) >= self._few
        took = now - waiting.since
        if crowded and self._since is not None and took >= 2 * (self._fastest or 0):
            self._served.append((now - self._since, waiting.work))
        self._since = now if crowded else None
        self._fastest = took if self._fastest is None else min(took, self._fastest)
        self._waits_no_more(request)

    def left(self, request: str) -> None:
        self._tokens -= self.tokens.pop(request, 0)
        self._waits_no_more(request)

    def _waits_no_more(self, request: str) -> None:
        if waiting := self.waiting.pop(request, None):
            self._work -= waiting.work
