"""Pipeline policies: by expected transfer time, load spread over instances."""

from __future__ import annotations

from pddrt.policy.route import Facts, InstanceFacts, Naive, PathFacts, Pdd, cheapest, transfer_time
from pddrt.types import MS, SECOND


def facts(kv_bytes: int, rate: int | None = 1_000_000, under_way: tuple[int, ...] = ()) -> Facts:
    one = [InstanceFacts("md0", 0, 0)]
    return Facts(
        1,
        kv_bytes,
        [InstanceFacts("p0", 0, 0)],
        [InstanceFacts("rld0", 0, 0)],
        one,
        {("p0", "md0"): PathFacts(rate, 10 * MS, under_way)},
    )


def test_the_estimate_is_fair_sharing_plus_delay() -> None:
    assert transfer_time(1_000_000, PathFacts(1_000_000, 10 * MS)) == SECOND + 10 * MS
    busy = PathFacts(1_000_000, 10 * MS, (250_000, 9_000_000))
    assert transfer_time(1_000_000, busy) == 2_250 * MS + 10 * MS
    small = transfer_time(100_000, busy)
    assert small == 300 * MS + 10 * MS, "two others carry as much, while this one does"
    assert transfer_time(1_000_000, PathFacts(None, 10 * MS, (5,))) == 10 * MS
    assert transfer_time(1, PathFacts(0, 10 * MS)) is None


def test_long_transfers_are_relayed_and_short_ones_are_not() -> None:
    policy = Pdd(relay_above=200 * MS)
    assert policy.route(facts(190_000)).pipeline == "P-MD"
    relayed = policy.route(facts(190_001))
    assert (relayed.pipeline, relayed.relay) == ("P-RLD-MD", "rld0")
    assert policy.route(facts(150_000, under_way=(60_000,))).pipeline == "P-RLD-MD", "busy link"
    assert policy.route(facts(1, rate=0)).pipeline == "P-RLD-MD", "outage"


def test_without_a_relay_in_reach_a_long_transfer_goes_straight() -> None:
    f = facts(10**9)
    alone = Facts(f.prompt_tokens, f.bytes_per_token, f.prefills, [], f.mains, f.paths)
    route = Pdd(relay_above=200 * MS).route(alone)
    assert (route.pipeline, route.relay, route.reason) == ("P-MD", None, "no relay can be reached")


def test_naive_never_relays() -> None:
    assert Naive().route(facts(10**9)).relay is None


def test_the_least_loaded_instance_is_taken_and_ties_go_by_order() -> None:
    f = facts(1)
    mains = [InstanceFacts("md0", 1, 50), InstanceFacts("md1", 1, 40), InstanceFacts("md2", 1, 40)]
    paths = {("p0", m.name): PathFacts(None, 0) for m in mains}
    assert Naive().route(Facts(100, 1, f.prefills, f.relays, mains, paths)).main == "md1"


def test_only_what_main_lacks_is_expected_to_cross() -> None:
    """F47: the threshold is on what is not cached."""
    f = facts(1)
    held = [InstanceFacts("md0", 0, 0, hit=999_000)]
    long = Facts(1_000_000, 1, f.prefills, f.relays, f.mains, f.paths)
    mostly_cached = Facts(1_000_000, 1, f.prefills, f.relays, held, f.paths)
    assert Pdd(relay_above=200 * MS).route(long).pipeline == "P-RLD-MD"
    assert Pdd(relay_above=200 * MS).route(mostly_cached).pipeline == "P-MD"


def test_a_prefix_draws_a_request_until_the_queue_outweighs_it() -> None:
    """F45: affinity and load are one score."""
    holder, other = InstanceFacts("md0", 3, 500, hit=800), InstanceFacts("md1", 0, 0)
    assert cheapest([other, holder]) is holder
    assert cheapest([other, InstanceFacts("md0", 3, 900, hit=800)]) is other
