"""Attempts: how a request goes on when an instance that has a part in it is lost.

Pure decisions, and one clock. The gateway executes them; see docs/recovery.md for the table.

An **attempt** is a request on its way through the instances of one route. It is known to them by a
name of its own (`trace.attempt_name`), so that nothing late of an earlier one can be taken for it.
Its prompt is the request's and all ids that were passed on before it; what it may still make, and
what must not end it yet, counts from there. Noise is keyed by absolute position, so that it draws
what the one before would have drawn.

Where the attempt can go on without the one that was lost, it does (`Attempt.verdict`). Else there
is a further one (`Retries`), after a pause that doubles each time, jittered. So that an outage does
not become a storm, only few requests may be in their first steps of a further attempt at once: at
most the share `SHARE` of those under way, at least `LEAST`; the others wait for one of these to
show its first id, or to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pddrt.env import Env, Timer
from pddrt.messages import Limits
from pddrt.policy.route import Route
from pddrt.types import MS, Ns, Sampling

SHARE = 0.2
LEAST = 2

Verdict = Literal["on", "takeover", "alone", "again"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """At most `retries` further attempts at a request; `backoff` before the first of them."""

    retries: int = 3
    backoff: Ns = 50 * MS


@dataclass(slots=True)
class Attempt:
    """`prefill`, `relay` and `main`: who has a part in it now; `route` says who had at first.

    `whole`: decoders that hold the KV of its whole prompt. `parted`: relay and main decoder cannot
    reach each other. `taking`: the main decoder goes on in place of the relay, and has been `told`
    from where. `handed`: it goes on after the relay, which is not needed any more.
    """

    name: str
    route: Route
    limits: Limits
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    lost: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    parted: bool = False
    taking: bool = False
    told: bool = False
    handed: bool = False

    def __post_init__(self) -> None:
        self.prefill, self.relay, self.main = self.route.prefill, self.route.relay, self.route.main

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefill, self.relay, self.main) if name)

    @property
    def now(self) -> Route:
        """The route as it is with those who are left."""
        return replace(self.route, prefill=self.prefill, relay=self.relay, main=self.main)

    @property
    def knows(self) -> tuple[str, ...]:
        """Who has, or had, a part in it."""
        return (*self.members, *self.lost, *self.route.members)

    def drop(self, name: str) -> None:
        """It has no part in it any more."""
        self.lost.add(name)
        self.prefill = None if self.prefill == name else self.prefill
        self.relay = None if self.relay == name else self.relay
        self.main = None if self.main == name else self.main

    def verdict(self, made: bool) -> Verdict:
        """What becomes of it with those that are `lost`. `made`: an id of it has been passed on.

        on        whoever is left goes on as if nothing had happened
        takeover  the main decoder goes on from what was passed on
        alone     the relay goes on without its main decoder, until there is another
        again     nobody here can go on
        """
        if self.route.alone:
            return "again" if self.lost.intersection(self.route.members) else "on"
        computes = self.prefill is not None and self.prefill not in self.lost
        relay, main = self._able(self.relay, computes), self._able(self.main, computes)
        first = made or computes
        if self.handed or self.relay is None:
            return "on" if main and (first or not self.taking) else "again"
        if relay and self.main not in self.lost:  # who cannot get the rest says so
            parted = self.parted and made and self.main in self.whole
            return "takeover" if parted else "on"
        if relay:
            return "alone"
        return "takeover" if main and first else "again"

    def _able(self, decoder: str | None, computes: bool) -> bool:
        """Whether it has, or will have, all KV that it needs."""
        if decoder is None or decoder in self.lost:
            return False
        return computes or decoder in self.whole


def rest_of(limits: Limits, sampling: Sampling, made: int) -> tuple[Limits, Sampling]:
    """What an attempt may make, and asks, behind `made` ids of the answer, which are prompt to
    it. The same ids end it at the same positions as would have without.
    """
    least = max(0, limits.min_tokens - made)
    left = replace(
        limits,
        prompt_len=limits.prompt_len + made,
        max_tokens=limits.max_tokens - made,
        min_tokens=least,
    )
    return left, replace(sampling, min_tokens=least)


class Retries:
    """When further attempts begin. `begin(request)` is called for each."""

    def __init__(
        self, env: Env, rule: Recovery, under_way: Callable[[], int], begin: Callable[[str], None]
    ) -> None:
        self._env = env
        self._rule = rule
        self._rng = env.rng("further attempts")
        self._under_way = under_way
        self._begin = begin
        self._pauses: dict[str, Timer] = {}
        self._waiting: deque[str] = deque()
        self._unproven: set[str] = set()

    def again(self, request: str, tries: int) -> bool:
        """There shall be a further attempt, after so many `tries`; whether there may be."""
        self.over(request)
        if tries >= self._rule.retries:
            return False
        pause = round(self._rule.backoff * 2**tries * self._rng.uniform(0.5, 1))
        due = self._env.now() + pause
        self._pauses[request] = self._env.call_at(due, self._rested, request)
        return True

    def proven(self, request: str) -> None:
        """Its attempt has shown an id: it is as good as any other request."""
        if request in self._unproven:
            self._unproven.remove(request)
            self._let_in()

    def over(self, request: str) -> None:
        """It needs no further attempt, or not this one."""
        if pause := self._pauses.pop(request, None):
            pause.cancel()
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self.proven(request)

    def _rested(self, request: str) -> None:
        del self._pauses[request]
        self._waiting.append(request)
        self._let_in()

    def _let_in(self) -> None:
        """Soon: whoever calls may be in the middle of something."""
        if self._waiting:
            self._env.call_at(self._env.now(), self._next)

    def _next(self) -> None:
        while self._waiting and len(self._unproven) < max(LEAST, int(SHARE * self._under_way())):
            request = self._waiting.popleft()
            self._unproven.add(request)
            self._begin(request)
