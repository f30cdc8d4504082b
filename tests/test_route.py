"""Pipeline policies on paper: by expected transfer time or hit rate, load spread over instances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pddrt.policy.route import (
    PIPELINES,
    Alone,
    Facts,
    HitRate,
    InstanceFacts,
    Naive,
    NoRoute,
    PathFacts,
    Pdd,
    Policy,
    Prfaas,
    RelayOnly,
    Route,
    cheapest,
    transfer_time,
)
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
    assert (route.pipeline, route.relay, route.reason) == ("P-MD", None, "no relay can take it")


def test_naive_never_relays() -> None:
    assert Naive().route(facts(10**9)).relay is None


def test_the_least_loaded_instance_is_taken_and_ties_go_by_order() -> None:
    f = facts(1)
    mains = [InstanceFacts("md0", 1, 50), InstanceFacts("md1", 1, 40), InstanceFacts("md2", 1, 40)]
    paths = {("p0", m.name): PathFacts(None, 0) for m in mains}
    assert Naive().route(Facts(100, 1, f.prefills, f.relays, mains, paths)).main == "md1"


F47: dict[str, tuple[Policy, str, str]] = {
    "pdd": (Pdd(200 * MS), "P-RLD-MD", "P-MD"),
    "pdd by hit rate": (Pdd(HitRate(0.9)), "P-RLD-MD", "P-MD"),
    "relay-only": (RelayOnly(200 * MS), "P-RLD", "P-MD"),
    "prfaas": (Prfaas(5000), "P-MD", "MD"),
}


@pytest.mark.parametrize("name", F47)
def test_F47_what_counts_is_what_main_lacks_and_never_the_whole_prompt(name: str) -> None:
    policy, uncached, cached = F47[name]
    f = replace(facts(1), prompt_tokens=1_000_000)
    mostly_cached = replace(f, mains=[InstanceFacts("md0", 0, 0, hit=999_000)])
    short = replace(f, prompt_tokens=1_000)
    assert policy.route(f).pipeline == uncached
    assert policy.route(mostly_cached).pipeline == cached
    if name != "pdd by hit rate":
        assert policy.route(short).pipeline == cached, "as much is lacking"


def test_a_hit_rate_decides_whatever_the_link() -> None:
    """P-MD at that rate or above; of MD's cache, not of P's."""
    f = replace(facts(10**9), prompt_tokens=1000, prefills=[InstanceFacts("p0", 0, 0, hit=999)])
    for hit, pipeline in ((0, "P-RLD-MD"), (899, "P-RLD-MD"), (900, "P-MD"), (1000, "P-MD")):
        held = replace(f, mains=[InstanceFacts("md0", 0, 0, hit=hit)])
        assert Pdd(HitRate(0.9)).route(held).pipeline == pipeline
    assert Pdd(HitRate(0)).route(f).pipeline == "P-MD"


def test_relay_only_ends_on_the_relay_what_pdd_would_relay() -> None:
    for kv_bytes in (190_000, 190_001):
        f = facts(kv_bytes)
        relayed = Pdd(200 * MS).route(f).relay
        route = RelayOnly(200 * MS).route(f)
        assert (route.relay, route.main) == (relayed, None if relayed else "md0")
    assert RelayOnly(0).route(facts(1)).pipeline == "P-RLD", "all of it, at 0"


def test_a_full_relay_is_gone_round_or_waited_for() -> None:
    f = replace(facts(10**9), relays=[InstanceFacts("rld0", 9, 900, full=True)])
    assert Pdd(0).route(f).pipeline == RelayOnly(0).route(f).pipeline == "P-MD"
    assert Pdd(0, "wait").route(f).pipeline == "P-RLD-MD"
    assert RelayOnly(0, "wait").route(f).pipeline == "P-RLD"


def test_prfaas_computes_at_main_what_is_short() -> None:
    policy = Prfaas(500)
    for lacking, pipeline in ((500, "MD"), (501, "P-MD")):
        held = [InstanceFacts("md0", 0, 0, hit=2000 - lacking)]
        route = policy.route(replace(facts(1), prompt_tokens=2000, mains=held))
        assert route.pipeline == pipeline
        assert (route.wan_estimate is None) is (pipeline == "MD")


NEEDS: list[tuple[Policy, str]] = [
    (Pdd(0), "main"), (Pdd(0), "prefill"), (Naive(), "main"), (Naive(), "prefill"),
    (Alone("prefill"), "prefill"), (Alone("main"), "main"), (Prfaas(0), "main"),
    (RelayOnly(0), "prefill"), (RelayOnly(0), "relay"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "role"), NEEDS)
def test_F20_who_cannot_be_done_without_is_named(policy: Policy, role: str) -> None:
    """And one that can never hold the request is as good as none."""
    f = replace(facts(10**6), prompt_tokens=100, max_tokens=50)
    nobody: Any = {f"{role}s": []}
    tight: Any = {f"{role}s": [InstanceFacts("x", 0, 0, room=99)]}
    with pytest.raises(NoRoute, match=f"no {role} instance can be reached"):
        policy.route(replace(f, **nobody))
    with pytest.raises(NoRoute, match=f"can never fit into any {role} instance"):
        policy.route(replace(f, **tight))


def test_F20_other_ways_are_taken_where_a_policy_has_them() -> None:
    f = facts(10**6)
    assert RelayOnly(SECOND * 10**6).route(replace(f, mains=[])).pipeline == "P-RLD"
    assert Prfaas(0).route(replace(f, prefills=[])).pipeline == "MD"
    assert Pdd(0).route(replace(f, relays=[])).pipeline == "P-MD"


def test_p_needs_room_for_the_answer_only_where_it_gives_it() -> None:
    tight = [InstanceFacts("p0", 0, 0, room=100)]
    f = replace(facts(1), prompt_tokens=100, max_tokens=2, prefills=tight)
    assert Naive().route(f).pipeline == "P-MD"
    with pytest.raises(NoRoute, match="101 tokens"):
        Alone("prefill").route(f)
    assert Alone("prefill").route(replace(f, max_tokens=1)).pipeline == "P"


def test_a_route_is_called_after_who_takes_part() -> None:
    f = facts(1)
    p, r, m = f.prefills[0], f.relays[0], f.mains[0]
    routes = [
        f.route("", prefill=p, relay=r, main=m),
        f.route("", prefill=p, main=m),
        f.route("", prefill=p, relay=r),
        f.route("", prefill=p),
        f.route("", main=m),
    ]
    assert [route.pipeline for route in routes] == list(PIPELINES)
    assert [route.alone for route in routes] == [False, False, False, True, True]
    assert all(f.objection(route) is None for route in routes)
    assert "no pipeline RLD-MD" in str(f.objection(f.route("", relay=r, main=m)))
    assert "no pipeline of nobody" in str(f.objection(Route(None, None, None, "")))
    assert "rld0 is no main" in str(f.objection(Route("p0", None, "rld0", "")))
    apart = replace(f, paths={})
    assert "no path from p0 to md0" in str(apart.objection(routes[1]))


def test_a_prefix_draws_a_request_until_the_queue_outweighs_it() -> None:
    """F45: affinity and load are one score."""
    holder, other = InstanceFacts("md0", 3, 500, hit=800), InstanceFacts("md1", 0, 0)
    assert cheapest([other, holder]) is holder
    assert cheapest([other, InstanceFacts("md0", 3, 900, hit=800)]) is other
