"""Pipeline policies: by expected transfer time, load spread over instances."""

from __future__ import annotations

from pddrt.policy.route import Facts, InstanceFacts, Naive, PathFacts, Pdd, transfer_time
from pddrt.types import MS, SECOND


def facts(kv_bytes: int, rate: int | None = 1_000_000, transfers: int = 0) -> Facts:
    one = [InstanceFacts("md0", 0, 0)]
    return Facts(
        100,
        kv_bytes,
        [InstanceFacts("p0", 0, 0)],
        [InstanceFacts("rld0", 0, 0)],
        one,
        {("p0", "md0"): PathFacts(rate, 10 * MS, transfers)},
    )


def test_the_estimate_is_fair_sharing_plus_delay() -> None:
    assert transfer_time(1_000_000, PathFacts(1_000_000, 10 * MS, 0)) == SECOND + 10 * MS
    assert transfer_time(1_000_000, PathFacts(1_000_000, 10 * MS, 2)) == 3 * SECOND + 10 * MS
    assert transfer_time(1_000_000, PathFacts(None, 10 * MS, 2)) == 10 * MS
    assert transfer_time(1, PathFacts(0, 10 * MS, 0)) is None


def test_long_transfers_are_relayed_and_short_ones_are_not() -> None:
    policy = Pdd(relay_above=200 * MS)
    assert policy.route(facts(190_000)).pipeline == "P-MD"
    relayed = policy.route(facts(190_001))
    assert (relayed.pipeline, relayed.relay) == ("P-RLD-MD", "rld0")
    assert policy.route(facts(150_000, transfers=1)).pipeline == "P-RLD-MD", "busy link"
    assert policy.route(facts(1, rate=0)).pipeline == "P-RLD-MD", "outage"


def test_naive_never_relays() -> None:
    assert Naive().route(facts(10**9)).relay is None


def test_the_least_loaded_instance_is_taken_and_ties_go_by_order() -> None:
    f = facts(1)
    mains = [InstanceFacts("md0", 1, 50), InstanceFacts("md1", 1, 40), InstanceFacts("md2", 1, 40)]
    paths = {("p0", m.name): PathFacts(None, 0, 0) for m in mains}
    assert Naive().route(Facts(100, 1, f.prefills, f.relays, mains, paths)).main == "md1"
