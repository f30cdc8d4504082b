"""Overload: what cannot be served in time is refused at the door, and what was let in is served."""

from __future__ import annotations

import pytest

from pddrt.policy.admission import FACTOR, FEW, Admission, Door
from pddrt.policy.route import Pdd
from pddrt.types import MS, SECOND, Ns
from pddrt.workload import Session, Turn

from .cluster import Cluster, Played, many

TTFT: Ns = SECOND


def load(rule: Admission, every: Ns, lasts: Ns, then: int = 0) -> Played:
    """Requests at one rate, and then so many at leisure. The cluster serves some 42 a second."""
    count = lasts // every
    starts = [i * every for i in range(count)]
    starts += [lasts + 2 * SECOND + i * 200 * MS for i in range(then)]
    text = "x" * 145
    sessions = [Session(i, t, (Turn(f"{i:05d}{text}", 30, 0),)) for i, t in enumerate(starts)]
    cluster = Cluster(policy=Pdd(50 * MS), rate=None, admission=rule, deadline=20 * SECOND)
    played = cluster.play(sessions)
    played.assert_sound()
    door = played.deployment.gateway.door
    assert not door.tokens
    assert not door.waiting
    return played


def in_time(played: Played) -> int:
    answered = [r for r in played.records if r.finish_reason == "length"]
    return sum((r.ttft or 0) <= TTFT for r in answered)


def test_goodput_at_three_times_the_capacity_is_nearly_its_peak_and_then_all_is_well() -> None:
    rule, lasts = Admission(shed_after=800 * MS), 6 * SECOND
    peak = in_time(load(rule, 24 * MS, lasts))
    assert peak == lasts // (24 * MS), "as many as come"
    played = load(rule, 8 * MS, lasts, then=10)
    crowd, after = played.records[:-10], played.records[-10:]
    assert in_time(played) - 10 >= 0.8 * peak
    for r in crowd:
        if r.finish_reason == "rejected":
            assert r.detail.startswith("overloaded: the first token would take")
            assert (r.finished or 0) - r.sent < 5 * MS, "at once"
        else:
            assert (r.finish_reason, (r.ttft or 0) <= TTFT) == ("length", True), "served in time"
    assert all((r.ttft or TTFT) < 100 * MS for r in after)


def test_without_shedding_nobody_is_served_in_time() -> None:
    """Else the test above says little."""
    assert in_time(load(Admission(), 8 * MS, 6 * SECOND)) < 100


@pytest.mark.parametrize(
    ("rule", "why", "most"),
    [
        (Admission(max_requests=3), "3 requests are under way, as many as may be", 3),
        (Admission(max_tokens=600), "tokens are under way, and", 5),
    ],
)
def test_what_is_under_way_is_bounded_and_refused_by_name(
    rule: Admission, why: str, most: int
) -> None:
    played = Cluster(admission=rule).play(many(12, 100, 20))
    played.assert_sound()
    refused = [r for r in played.records if r.finish_reason == "rejected"]
    assert len(refused) == 12 - most
    assert all(r.detail.startswith("overloaded: ") and why in r.detail for r in refused)
    assert [r.finish_reason for r in played.records].count("length") == most


def test_by_default_the_pools_bound_what_is_under_way() -> None:
    door = Door(Admission())
    door.entered(0, "a", FACTOR * 1000 - 100)
    assert door.refusal(100, 1000) is None
    assert door.refusal(101, 1000) is not None
    door.left("a")
    assert door.refusal(10**9, 1000) is None, "alone it is the policy that says what fits"


def test_a_wait_is_those_who_wait_times_the_pace_of_first_tokens() -> None:
    door = Door(Admission(shed_after=50 * MS))
    for i in range(FEW + 4):
        door.entered(0, str(i), 1)
    assert door.expected_wait is None, "nothing has been served"
    for i in range(4):
        door.first_token(10 * MS * (i + 1), str(i))
    assert door.expected_wait == (FEW + 1) * 10 * MS
    assert door.refusal(1, 1000) is None
    door.entered(40 * MS, "more", 1)
    assert door.refusal(1, 1000) == "overloaded: the first token would take 0.060 s"
    door.left("more")
    door.left("7")
    assert door.expected_wait is None, "few wait"
    for i in (4, 5, 6):
        door.first_token(80 * MS, str(i))
    door.entered(10 * SECOND, "late", 1)
    door.first_token(10 * SECOND + 10 * MS, "late")
    assert max(door._served) == 40 * MS, "idle time is nobody's wait"
