"""Which pipeline a request takes, and on which instances.

A policy is a class with `route(facts) -> Route`; it sees `Facts` and nothing else, so that it can
be tried on paper. All signals may be stale, and the length of the answer is unknown: only its bound
is. Where what it needs cannot be had, `Facts.pick` raises NoRoute, and the request is refused.

Pipelines are called after who takes part; each of them decodes on the last:

    P-RLD-MD   P computes the prompt, RLD begins the answer, MD goes on when it has the KV
    P-MD       MD begins when it has the KV
    P-RLD      RLD answers to the end; nothing is sent to MD
    P, MD      one instance computes the prompt and answers

    policy                 pipelines
    Pdd                    P-RLD-MD where the KV is slow to cross (`slow`), else P-MD
    Naive                  P-MD
    Alone("prefill")       P: colocated
    Alone("main")          MD: recomputes the prompt from ids, where it is needed
    Prfaas                 P-MD for long uncached prompts, MD for the others
    RelayOnly              as Pdd, but whom RLD begins it ends: MD's cache falls behind

`pipelines` of a policy says which it may choose; the scenario is checked for what they need. Policy
`local` is Naive with MD's instances in P's site, `compress` is Naive with KV in 8 bits on the WAN.

Expected transfer time: what fair sharing of the path from P to MD leaves for the KV that MD lacks,
and the delay. It is what the transfer alone would take, whatever part of it the prefill hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from pddrt.types import SECOND, Ns, Role

PIPELINES: Mapping[str, tuple[Role, ...]] = {
    "P-RLD-MD": ("prefill", "relay", "main"),
    "P-MD": ("prefill", "main"),
    "P-RLD": ("prefill", "relay"),
    "P": ("prefill",),
    "MD": ("main",),
}
"""Every pipeline, and who takes part in it."""


class NoRoute(Exception):
    """No instance can serve this request; the text says why."""


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What the gateway knows of an instance in its reach: requests it has sent there that are not
    over, `tokens` that this one would have before it (as the instance said, and what was sent
    since; see `roles.load`), and how many tokens of its prompt are probably cached there. `room`:
    tokens of KV that fit there at all (None: any number). `full`: it would have to wait there.
    """

    name: str
    requests: int
    tokens: int
    hit: int = 0
    room: int | None = None
    full: bool = False


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A path that KV would take. `rate` in bytes/s, None: unlimited; `under_way`: for each transfer
    to a main decoder that shares it, the bytes that have probably not crossed yet.
    """

    rate: int | None
    delay: Ns
    under_way: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. Without `relay` the main decoder starts (P-MD); without `main` it ends
    on the relay (P-RLD); an instance alone prefills and decodes (P, MD).

    `wan_estimate`: expected time for the KV that `main` lacks. `held`: KV for `main` waits until
    the gateway says otherwise (see `policy.anomaly`). `reason` is for people. `Facts.route` makes
    one.
    """

    prefill: str | None
    relay: str | None
    main: str | None
    reason: str
    wan_estimate: Ns | None = None
    held: bool = False

    @property
    def pipeline(self) -> str:
        """One of PIPELINES, if it is any."""
        parts = {"P": self.prefill, "RLD": self.relay, "MD": self.main}
        return "-".join(part for part, name in parts.items() if name)

    @property
    def members(self) -> tuple[str, ...]:
        """The instances that take part, each once."""
        return tuple(name for name in (self.prefill, self.relay, self.main) if name)

    @property
    def alone(self) -> bool:
        """One instance does it all, and no KV is sent."""
        return len(self.members) == 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy sees of a request and of the instances in reach.

    `bytes_per_token`: of KV on its way to a main decoder. `paths`: from a prefill instance to a
    main decoder, by their names, where there is one. `max_tokens`: the bound of the answer.
    """

    prompt_tokens: int
    bytes_per_token: int
    prefills: Sequence[InstanceFacts]
    relays: Sequence[InstanceFacts]
    mains: Sequence[InstanceFacts]
    paths: Mapping[tuple[str, str], PathFacts] = field(default_factory=dict)
    max_tokens: int = 1

    def able(self, role: Role, *, answers: bool = True) -> list[InstanceFacts]:
        """Those of `role` whose memory could hold the request; `answers`: with its answer, which a
        prefill instance needs only where it decodes, too.
        """
        tokens = self._tokens(answers)
        return [i for i in self._all(role) if i.room is None or i.room >= tokens]

    def pick(self, role: Role, *, answers: bool = True) -> InstanceFacts:
        """The best of `able`, see `cheapest`; a relay that is not full, if there is one: it only
        masks latency, and holds no prefix that is worth a wait. Raises NoRoute where there is none.
        """
        if able := self.able(role, answers=answers):
            return cheapest([i for i in able if role == "relay" and not i.full] or able)
        if not self._all(role):
            raise NoRoute(f"no {role} instance can be reached")
        tokens = self._tokens(answers)
        raise NoRoute(f"{tokens} tokens of KV can never fit into any {role} instance in reach")

    def _all(self, role: Role) -> Sequence[InstanceFacts]:
        return {"prefill": self.prefills, "relay": self.relays, "main": self.mains}[role]

    def _tokens(self, answers: bool) -> int:
        """KV slots that the request may need; its last token's KV is never computed."""
        return self.prompt_tokens + (self.max_tokens - 1 if answers else 0)

    def pick_pair(self) -> tuple[InstanceFacts, InstanceFacts]:
        """P and MD of a request that P prefills and MD ends. Raises NoRoute."""
        return self.pick("prefill", answers=False), self.pick("main")

    def lacking(self, main: InstanceFacts) -> int:
        """Bytes of the prompt's KV that are probably not cached at `main`."""
        return (self.prompt_tokens - main.hit) * self.bytes_per_token

    def transfer(self, prefill: InstanceFacts, main: InstanceFacts) -> Ns | None:
        """Expected time for the KV that `main` lacks, and for nothing that it has; None where
        nothing moves.
        """
        path = self.paths.get((prefill.name, main.name))
        return None if path is None else transfer_time(self.lacking(main), path)

    def route(
        self,
        reason: str,
        *,
        prefill: InstanceFacts | None = None,
        relay: InstanceFacts | None = None,
        main: InstanceFacts | None = None,
    ) -> Route:
        """The route by way of these instances."""
        return Route(
            prefill.name if prefill else None,
            relay.name if relay else None,
            main.name if main else None,
            reason,
            self.transfer(prefill, main) if prefill and main else None,
        )

    def objection(self, route: Route) -> str | None:
        """Why `route` is none; None if it is one. For policies that are not ours."""
        if wrong := no_text(route.reason):
            return f"found reason {wrong}"
        estimate = route.wan_estimate
        if estimate is not None and (type(estimate) is not int or estimate < 0):
            return f"found wan_estimate {estimate!r}; allowed: nanoseconds, a whole number, or None"
        held: object = route.held
        if type(held) is not bool:
            return f"found held {held!r}; allowed: True or False"
        if route.pipeline not in PIPELINES:
            return f"there is no pipeline {route.pipeline or 'of nobody'}"
        names: dict[Role, object] = {
            "prefill": route.prefill,
            "relay": route.relay,
            "main": route.main,
        }
        for role, name in names.items():
            if name is not None and type(name) is not str:
                return f"found {role} {name!r}; allowed: the name of an instance, or None"
            if name is not None and all(i.name != name for i in self._all(role)):
                return f"{name} is no {role} instance that can be reached"
        if route.prefill and route.main and (route.prefill, route.main) not in self.paths:
            return f"there is no path from {route.prefill} to {route.main}"
        return None


def no_text(reason: object) -> str:
    """Why `reason` is no text that a file can hold; "" if it is one."""
    if type(reason) is not str:
        return f"{reason!r}; allowed: a text"
    try:
        reason.encode()
    except UnicodeEncodeError:
        return f"{reason!a}; allowed: a text without lone surrogates"
    return ""


class Policy(Protocol):
    """Those that can be named in a scenario also say which `pipelines` they may choose."""

    def route(self, facts: Facts) -> Route: ...


# -- what policies go by ---------------------------------------------------------------------------


def transfer_time(kv_bytes: int, path: PathFacts) -> Ns | None:
    """Expected time for `kv_bytes` over `path`; None where nothing moves (rate 0).

    Under fair sharing each transfer under way carries as much as this one does, until it has ended.
    """
    if path.rate is None:
        return path.delay
    if path.rate == 0:
        return None
    shared = kv_bytes + sum(min(kv_bytes, other) for other in path.under_way)
    return shared * SECOND // path.rate + path.delay


def cheapest(instances: Sequence[InstanceFacts]) -> InstanceFacts:
    """Affinity and load in one score: tokens before it, less those of its prompt that are cached.

    A busy instance thus loses a conversation once its queue outweighs the prefix it holds, and no
    instance draws all traffic because it holds what all prompts begin with. Among equals the first
    in the scenario's order.
    """
    return min(instances, key=lambda i: (i.tokens - i.hit, i.requests))


@dataclass(frozen=True, slots=True)
class HitRate:
    """Cached tokens of a prompt over all of it, 0 to 1."""

    share: float


def slow(
    facts: Facts, prefill: InstanceFacts, main: InstanceFacts, relay_above: Ns | HitRate
) -> tuple[bool, str]:
    """Whether the KV that `main` lacks is slow to cross, and why so: it is expected to take longer
    than `relay_above`; or, where that is a hit rate, less than that share of the prompt is cached
    at `main`. The prompt's whole length plays no part: most of it may be there.
    """
    if isinstance(relay_above, HitRate):
        few = main.hit < relay_above.share * facts.prompt_tokens
        return few, f"{main.hit} of {facts.prompt_tokens} tokens are cached at {main.name}"
    estimate = facts.transfer(prefill, main)
    if estimate is None or estimate > relay_above:
        return True, "the transfer is expected to take longer than relay_above"
    return False, "the transfer is expected to fit within relay_above"


# -- the policies ----------------------------------------------------------------------------------

NO_RELAY = "no relay can take it"
RELAY_FULL = "every relay is full"


@dataclass(frozen=True, slots=True)
class Pdd:
    """`relay_full`: where no relay has room, go without one, or wait for one."""

    relay_above: Ns | HitRate
    relay_full: Literal["p-md", "wait"] = "p-md"
    pipelines: ClassVar[tuple[str, ...]] = ("P-RLD-MD", "P-MD")

    def route(self, facts: Facts) -> Route:
        prefill, main = facts.pick_pair()
        relay = None
        relayed, why = slow(facts, prefill, main, self.relay_above)
        if relayed and facts.able("relay"):
            relay = facts.pick("relay")
            if relay.full and self.relay_full == "p-md":
                relay, why = None, RELAY_FULL
        elif relayed:
            why = NO_RELAY
        return facts.route(why, prefill=prefill, relay=relay, main=main)


@dataclass(frozen=True, slots=True)
class Naive:
    name: str = "naive"
    pipelines: ClassVar[tuple[str, ...]] = ("P-MD",)

    def route(self, facts: Facts) -> Route:
        prefill, main = facts.pick_pair()
        return facts.route(f"policy {self.name}: always P-MD", prefill=prefill, main=main)


@dataclass(frozen=True, slots=True)
class Alone:
    """One instance computes the prompt, as far as it has not got it, and answers."""

    role: Literal["prefill", "main"]

    @property
    def pipelines(self) -> tuple[str, ...]:
        return ("P",) if self.role == "prefill" else ("MD",)

    def route(self, facts: Facts) -> Route:
        instance, why = facts.pick(self.role), f"policy: always {self.pipelines[0]}"
        return facts.route(why, **{self.role: instance})


@dataclass(frozen=True, slots=True)
class Prfaas:
    """Routing by uncached length, as in prefill-as-a-service: a remote P pays for long prompts.

    `offload_above`: tokens that MD lacks and would still compute by itself.
    """

    offload_above: int
    pipelines: ClassVar[tuple[str, ...]] = ("P-MD", "MD")

    def route(self, facts: Facts) -> Route:
        main = facts.pick("main")
        lacking = facts.prompt_tokens - main.hit
        if lacking <= self.offload_above:
            return facts.route(f"{main.name} lacks {lacking} tokens: few enough", main=main)
        if not facts.able("prefill", answers=False):
            return facts.route("no prefill instance can take it", main=main)
        prefill = facts.pick("prefill", answers=False)
        why = f"{main.name} lacks {lacking} tokens: more than offload_above"
        return facts.route(why, prefill=prefill, main=main)


@dataclass(frozen=True, slots=True)
class RelayOnly:
    """What PDD leaves out, to show why: requests that RLD begins end there, and MD learns nothing.

    Where no main decoder can take a request, it ends on a relay, too. `relay_full`: as with Pdd.
    """

    relay_above: Ns | HitRate
    relay_full: Literal["p-md", "wait"] = "p-md"
    pipelines: ClassVar[tuple[str, ...]] = ("P-RLD", "P-MD")

    def route(self, facts: Facts) -> Route:
        prefill = facts.pick("prefill", answers=False)
        if not facts.able("main"):
            relay = facts.pick("relay")
            return facts.route("no main decoder can take it", prefill=prefill, relay=relay)
        main = facts.pick("main")
        relayed, why = slow(facts, prefill, main, self.relay_above)
        if relayed:
            relay = facts.pick("relay")
            if not relay.full or self.relay_full == "wait":
                return facts.route(why, prefill=prefill, relay=relay)
            why = RELAY_FULL
        return facts.route(why, prefill=prefill, main=main)
