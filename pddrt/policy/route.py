"""Which pipeline a request takes, and on which instances.

A policy is a class with `route(facts) -> Route`; it sees `Facts` and nothing else, so that it can
be tried on paper. All signals may be stale, and the length of the answer is unknown: only its bound
is.

- `Pdd`: P-RLD-MD where the KV would take longer than `relay_above` to cross the WAN, P-MD below.
- `Naive`: always P-MD, which is what cross-datacenter disaggregation without a relay does.

Expected transfer time: bytes * (1 + transfers under way) / rate + delay, the law of fair sharing on
the path from P to MD. It is what the transfer alone would take, whatever part of it the prefill
hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pddrt.types import SECOND, Ns


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What the gateway knows of one instance: requests and tokens it has sent there that are not
    over.
    """

    name: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A path that KV would take. `rate` in bytes/s, None: unlimited."""

    rate: int | None
    delay: Ns
    transfers: int


@dataclass(frozen=True, slots=True)
class Facts:
    prompt_tokens: int
    kv_bytes: int
    prefills: Sequence[InstanceFacts]
    relays: Sequence[InstanceFacts]
    mains: Sequence[InstanceFacts]
    paths: dict[tuple[str, str], PathFacts]


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
    """Expected time for `kv_bytes` over `path`; None where nothing moves (rate 0)."""
    if path.rate is None:
        return path.delay
    if path.rate == 0:
        return None
    return kv_bytes * (1 + path.transfers) * SECOND // path.rate + path.delay


def least_loaded(instances: Sequence[InstanceFacts]) -> str:
    """The instance with the fewest tokens under way; the first in the scenario's order among
    equals.
    """
    return min(instances, key=lambda i: (i.tokens, i.requests)).name


@dataclass(frozen=True, slots=True)
class Pdd:
    relay_above: Ns

    def route(self, facts: Facts) -> Route:
        prefill, main = least_loaded(facts.prefills), least_loaded(facts.mains)
        estimate = transfer_time(facts.kv_bytes, facts.paths[prefill, main])
        if estimate is None or estimate > self.relay_above:
            return Route(
                "P-RLD-MD",
                prefill,
                least_loaded(facts.relays),
                main,
                estimate,
                "the transfer is expected to take longer than relay_above",
            )
        return Route(
            "P-MD",
            prefill,
            None,
            main,
            estimate,
            "the transfer is expected to fit within relay_above",
        )


@dataclass(frozen=True, slots=True)
class Naive:
    def route(self, facts: Facts) -> Route:
        prefill, main = least_loaded(facts.prefills), least_loaded(facts.mains)
        estimate = transfer_time(facts.kv_bytes, facts.paths[prefill, main])
        return Route("P-MD", prefill, None, main, estimate, "policy naive: always P-MD")
