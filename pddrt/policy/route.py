"""Which pipeline a request takes, and on which instances.

A policy is a class with `route(facts) -> Route`; it sees `Facts` and nothing else, so that it can
be tried on paper. All signals may be stale, and the length of the answer is unknown: only its bound
is.

- `Pdd`: P-RLD-MD where the KV would take longer than `relay_above` to cross the WAN, P-MD below
  (and where no relay can be reached).
- `Naive`: always P-MD, which is what cross-datacenter disaggregation without a relay does.

Expected transfer time: what fair sharing of the path from P to MD leaves for the KV that MD lacks,
and the delay. It is what the transfer alone would take, whatever part of it the prefill hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pddrt.types import SECOND, Ns


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What the gateway knows of an instance in its reach: requests and tokens it has sent there
    that are not over, and how many tokens of this prompt are probably cached there.
    """

    name: str
    requests: int
    tokens: int
    hit: int = 0


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A path that KV would take. `rate` in bytes/s, None: unlimited; `under_way`: for each transfer
    to a main decoder that shares it, the bytes that have probably not crossed yet.
    """

    rate: int | None
    delay: Ns
    under_way: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    prompt_tokens: int
    bytes_per_token: int
    prefills: Sequence[InstanceFacts]
    relays: Sequence[InstanceFacts]
    mains: Sequence[InstanceFacts]
    paths: dict[tuple[str, str], PathFacts]

    def lacking(self, main: InstanceFacts) -> int:
        """Bytes of the prompt's KV that are probably not cached at `main`."""
        return (self.prompt_tokens - main.hit) * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Route:
    pipeline: str
    prefill: str
    relay: str | None
    main: str
    wan_estimate: Ns | None
    reason: str


class Policy(Protocol):
    def route(self, facts: Facts) -> Route: ...


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
    """Affinity and load in one score: tokens under way, less those of this prompt that are cached.

    A busy instance thus loses a conversation once its queue outweighs the prefix it holds, and no
    instance draws all traffic because it holds what all prompts begin with. Among equals the first
    in the scenario's order.
    """
    return min(instances, key=lambda i: (i.tokens - i.hit, i.requests))


def expected_transfer(facts: Facts, prefill: InstanceFacts, main: InstanceFacts) -> Ns | None:
    """Time for the KV that `main` lacks, and for nothing that it has."""
    return transfer_time(facts.lacking(main), facts.paths[prefill.name, main.name])


NO_RELAY = "no relay can be reached"


@dataclass(frozen=True, slots=True)
class Pdd:
    relay_above: Ns

    def route(self, facts: Facts) -> Route:
        prefill, main = cheapest(facts.prefills), cheapest(facts.mains)
        estimate = expected_transfer(facts, prefill, main)
        slow = estimate is None or estimate > self.relay_above
        if slow and facts.relays:
            return Route(
                "P-RLD-MD",
                prefill.name,
                cheapest(facts.relays).name,
                main.name,
                estimate,
                "the transfer is expected to take longer than relay_above",
            )
        return Route(
            "P-MD",
            prefill.name,
            None,
            main.name,
            estimate,
            NO_RELAY if slow else "the transfer is expected to fit within relay_above",
        )


@dataclass(frozen=True, slots=True)
class Naive:
    def route(self, facts: Facts) -> Route:
        prefill, main = cheapest(facts.prefills), cheapest(facts.mains)
        estimate = expected_transfer(facts, prefill, main)
        return Route("P-MD", prefill.name, None, main.name, estimate, "policy naive: always P-MD")
