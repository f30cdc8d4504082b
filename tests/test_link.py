"""The law of a link, against closed forms and against exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from fractions import Fraction
from typing import Any

import pytest

from pddrt.netem.link import Delay, Flow, Link, Through
from pddrt.types import MS, SECOND, US, Ns

from .netlab import drain, finishes

MB = 1_000_000


# -- one flow ------------------------------------------------------------------------------------


def test_one_item_takes_its_bytes_over_the_rate_and_then_the_delay() -> None:
    link = Link(rate=50 * MB, delay=15 * MS)
    link.push(3 * MS, Flow(), 10 * MB, "kv", "x")
    assert link.next_event() == 203 * MS
    assert link.advance(203 * MS - 1) == []
    assert link.advance(203 * MS) == [Through("x", 10 * MB, 203 * MS, 218 * MS)]
    assert link.next_event() is None


def test_the_delay_is_paid_once_per_byte_not_once_per_item() -> None:
    link, flow = Link(rate=MB, delay=100 * MS), Flow()
    for k in range(1000):
        link.push(0, flow, 1000, tag=k)
    dues = [item.due for item in drain(link)]
    assert dues == [(k + 1) * MS + 100 * MS for k in range(1000)]


@pytest.mark.parametrize("rate", [1, 999_983, 6_250_000, 12_500_000_000, 10**12])
@pytest.mark.parametrize("nbytes", [1, 1_447, 2**40])
def test_a_backlogged_flow_does_not_drift(rate: int, nbytes: int) -> None:
    link, flow = Link(rate, delay=0), Flow()
    for k in range(2000):
        link.push(0, flow, nbytes, tag=k)
    for k, item in enumerate(drain(link)):
        assert item.finish == -(-(k + 1) * nbytes * SECOND // rate)


@pytest.mark.parametrize(("rate", "total"), [(999_983, 100_000), (10**12, 1_000_000)])
def test_a_million_items_pushed_one_by_one_do_not_drift(rate: int, total: int) -> None:
    """Two flows are kept backlogged in turn, so that every item is a join and a leave."""
    link, flows = Link(rate, delay=0), (Flow(), Flow())
    done = 0
    for k in range(2):
        link.push(0, flows[k], 1500, tag=k)
    finish = 0
    while (when := link.next_event()) is not None:
        for item in link.advance(when):
            done += 1
            finish = item.finish
            if done + 1 < total:
                # the item joins at the exact end of the last one: nothing was idle in between
                link.push(0, flows[item.tag], 1500, tag=item.tag)
    assert done == total
    assert abs(finish - total * 1500 * SECOND / rate) <= 2


def test_unlimited_rate_is_through_at_once_and_still_waits_the_delay() -> None:
    link, flow = Link(None, delay=5 * US), Flow()
    link.push(7, flow, 10**12, tag="a")
    link.push(9, flow, 1, tag="b")
    assert link.next_event() == 7
    assert [(i.tag, i.finish, i.due) for i in link.advance(9)] == [
        ("a", 7, 7 + 5 * US),
        ("b", 9, 9 + 5 * US),
    ]
    assert link.busy(10) == 0


def test_an_item_of_no_bytes_waits_for_those_before_it_in_its_flow_only() -> None:
    link, a, b = Link(MB, delay=0), Flow(), Flow()
    link.push(0, a, 1000, tag="data")
    link.push(0, a, 0, tag="mark")
    link.push(0, b, 0, tag="other")
    assert finishes(link) == {"other": 0, "data": MS, "mark": MS}


# -- sharing -------------------------------------------------------------------------------------


def test_two_flows_get_half_each() -> None:
    link, a, b = Link(2 * MB, delay=0), Flow(), Flow()
    for k in range(100):
        link.push(0, a, 1000, tag=("a", k))
        link.push(0, b, 1000, tag=("b", k))
    done = finishes(link)
    assert all(done[name, k] == (k + 1) * MS for name in "ab" for k in range(100))


def test_processor_sharing_matches_its_closed_form() -> None:
    """Flows of sizes s1 <= s2 <= ...: the k-th ends at sum over i <= k of (s_i - s_i-1)(N - i + 1)
    / rate."""
    rng, rate = random.Random(1), 7_919_333
    sizes = sorted(rng.randrange(1, 10**7) for _ in range(64))
    link = Link(rate, delay=0)
    for k, size in enumerate(sizes):
        link.push(0, Flow(), size, tag=k)
    done = finishes(link)
    at = Fraction(0)
    for k, (size, before) in enumerate(zip(sizes, [0, *sizes], strict=False)):
        at += Fraction((size - before) * (len(sizes) - k) * SECOND, rate)
        assert done[k] == math.ceil(at)


def test_a_late_flow_gets_its_share_from_the_moment_it_joins() -> None:
    link, a, b = Link(MB, delay=0), Flow(), Flow()
    link.push(0, a, 10_000, tag="a")
    link.push(4 * MS, b, 3_000, tag="b")  # a has 6000 left; both get 0.5 MB/s
    assert finishes(link) == {"b": 10 * MS, "a": 13 * MS}


def test_a_mouse_is_not_held_up_by_elephants() -> None:
    link = Link(10 * MB, delay=0)
    for k in range(9):
        link.push(0, Flow(), 10**9, tag=k)
    link.push(SECOND, Flow(), 1000, tag="mouse")
    assert drain_until(link, "mouse") == SECOND + MS


def drain_until(link: Link, tag: Any) -> Ns:
    while (when := link.next_event()) is not None:
        for item in link.advance(when):
            if item.tag == tag:
                return item.finish
    raise AssertionError(f"{tag} never came through")


# -- changes under traffic -----------------------------------------------------------------------


def test_a_new_rate_holds_for_what_is_half_served() -> None:
    link = Link(MB, delay=0)
    link.push(0, Flow(), 10_000, tag="x")
    link.set_rate(4 * MS, 6 * MB)  # 6000 left
    assert finishes(link) == {"x": 5 * MS}


def test_an_outage_stops_everything_and_loses_nothing() -> None:
    link, flow = Link(MB, delay=MS), Flow()
    link.push(0, flow, 10_000, tag="x")
    link.set_rate(4 * MS, 0)
    link.push(5 * MS, flow, 0, tag="mark")
    assert link.next_event() is None
    assert link.advance(SECOND) == []
    assert link.backlog(SECOND) == 6_000
    link.set_rate(SECOND, MB)
    assert [(i.tag, i.finish, i.due) for i in drain(link)] == [
        ("x", SECOND + 6 * MS, SECOND + 7 * MS),
        ("mark", SECOND + 6 * MS, SECOND + 7 * MS),
    ]
    assert link.busy(2 * SECOND) == 10 * MS


def test_a_link_that_starts_with_an_outage_works_when_it_ends() -> None:
    link = Link(0, delay=0)
    link.push(0, Flow(), 1000, tag="x")
    link.set_rate(SECOND, None)
    assert finishes(link) == {"x": SECOND}


def test_cancel_frees_the_share_at_once_and_keeps_what_has_left() -> None:
    link, a, b = Link(2 * MB, delay=50 * MS), Flow(), Flow()
    link.push(0, a, 1_000, "kv", tag="left")
    link.push(0, a, 100_000, "kv", tag="cancelled")
    link.push(0, b, 5_000, "ids", tag="b")
    assert (
        link.cancel(3 * MS, a) == 98_000
    )  # a was served 3000 bytes at 1 MB/s, 2000 of them of the second item
    assert [(i.tag, i.finish, i.due) for i in link.advance(10 * MS)] == [
        ("left", MS, 51 * MS),
        ("b", 4 * MS, 54 * MS),
    ]
    assert link.next_event() is None
    assert link.carried == {"kv": 3_000, "ids": 5_000}
    assert link.dropped == 98_000
    assert link.backlog(10 * MS) == 0
    link.push(10 * MS, a, 2_000, tag="again")
    assert finishes(link) == {"again": 11 * MS}


def test_cancelling_an_idle_flow_does_nothing() -> None:
    link, flow = Link(MB, delay=0), Flow()
    assert link.cancel(5, flow) == 0
    link.push(5, flow, 1000)
    assert [i.finish for i in drain(link)] == [MS + 5]
    assert link.cancel(2 * MS, flow) == 0


def test_cancelled_flows_leave_nothing_behind() -> None:
    link = Link(MB, delay=0)
    for _ in range(10_000):
        flow = Flow()
        link.push(0, flow, 10**12)
        link.cancel(0, flow)
    assert len(link._lanes[0]._heap) < 200


def test_those_that_stay_are_served_in_order_after_many_cancels() -> None:
    rng, rate = random.Random(5), 1_000_003
    sizes = {k: rng.randrange(1, 10**6) for k in range(500)}
    link, flows = Link(rate, delay=0), {k: Flow() for k in sizes}
    for k, size in sizes.items():
        link.push(0, flows[k], size, tag=k)
    for k in rng.sample(sorted(sizes), 450):
        assert link.cancel(0, flows[k]) == sizes.pop(k)
    assert [item.tag for item in drain(link)] == sorted(sizes, key=lambda k: (sizes[k], k))


def test_a_new_delay_holds_for_what_has_not_left_and_never_reorders() -> None:
    link, flow = Link(MB, delay=100 * MS), Flow()
    for k in range(4):
        link.push(0, flow, 1000, tag=k)
    link.set_delay(2 * MS, 10 * MS)
    assert [i.due for i in drain(link)] == [101 * MS, 102 * MS, 102 * MS, 102 * MS]


# -- looking ahead -------------------------------------------------------------------------------


def test_a_caller_that_looks_ahead_neither_gains_nor_loses_rate() -> None:
    """As a net does on the wall clock: take what is through within 500 us, refill at the (earlier)
    present."""
    link, flow = Link(1_000 * MB, delay=0), Flow()
    now, sent, last = 0, 0, 0
    link.push(now, flow, 64_000)
    while sent < 10_000:
        while through := link.advance(now + 500 * US):
            for item in through:
                sent += 1
                last = item.finish
                link.push(now, flow, 64_000)
        now += 300 * US
    assert last == sent * 64 * US


def test_the_past_cannot_be_changed() -> None:
    link, a, b = Link(MB, delay=0), Flow(), Flow()
    link.push(0, a, 1000, tag="a")
    link.advance(5 * MS)
    link.push(0, b, 1000, tag="b")  # takes effect at the last item through, 1 ms
    assert finishes(link) == {"b": 2 * MS}


# -- random programs against exact arithmetic ----------------------------------------------------


TOLERANCE = Fraction(1, 128)
"""Of a ns, or a byte: what the link may round down where it should round up."""


class Fluid:
    """The same law by brute force, in rationals: every flow's head is served bit by bit between
    events."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.now = Fraction(0)
        self.flows: dict[int, list[list[Any]]] = {}
        self.done: dict[int, Fraction] = {}
        self.busy = Fraction(0)

    def until(self, when: Fraction | int) -> None:
        while self.now < when:
            active = [items for items in self.flows.values() if items]
            if not active or not self.rate:
                break
            share = Fraction(self.rate, len(active) * SECOND)
            step = min(min(items[0][0] for items in active) / share, when - self.now)
            self.now += step
            self.busy += step
            for items in active:
                items[0][0] -= share * step
            for items in active:
                while items and items[0][0] == 0:
                    self.done[items.pop(0)[1]] = self.now
        self.now = Fraction(when)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_agree_with_exact_arithmetic(seed: int) -> None:
    rng = random.Random(seed)
    scale = 10 ** rng.randrange(0, 13)
    rate = rng.randrange(1, 10) * scale
    link, fluid = Link(rate, delay=0), Fluid(rate)
    flows = [Flow() for _ in range(rng.randrange(1, 12))]
    accounts = ("kv", "ids", "control")
    got: dict[int, Through] = {}
    pushed = cancelled = now = 0
    for number in range(150):
        now += rng.choice([0, 1, rng.randrange(SECOND // 4)])
        fluid.until(now)
        for item in link.advance(now):
            got[item.tag] = item
        what, which = rng.random(), rng.randrange(len(flows))
        if what < 0.8:
            nbytes = rng.choice([1, rng.randrange(1, 2 + scale // 4), rng.randrange(1, 1 + scale)])
            pushed += nbytes
            link.push(now, flows[which], nbytes, rng.choice(accounts), number)
            fluid.flows.setdefault(which, []).append([Fraction(nbytes), number])
        elif what < 0.9:
            left = sum((item[0] for item in fluid.flows.get(which, [])), Fraction(0))
            dropped = link.cancel(now, flows[which])
            assert math.ceil(left - TOLERANCE) <= dropped <= math.ceil(left)
            cancelled += dropped
            fluid.flows[which] = []
        else:
            link.set_rate(now, rng.choice([0, rate, rate * 3, max(1, rate // 3)]))
            fluid.rate = link.rate or 0
        left_now = sum((item[0] for items in fluid.flows.values() for item in items), Fraction(0))
        assert math.ceil(left_now - TOLERANCE) <= link.backlog(now) <= math.ceil(left_now)
    link.set_rate(now, rate)
    fluid.rate = rate
    got.update((item.tag, item) for item in drain(link))
    fluid.until(10**15)
    assert got.keys() == fluid.done.keys()
    for tag, at in fluid.done.items():
        assert math.ceil(at - TOLERANCE) <= got[tag].finish <= math.ceil(at)
    assert pushed == sum(link.carried.values()) + cancelled
    assert link.dropped == cancelled
    assert abs(link.busy(10**15) - fluid.busy) < 2


@pytest.mark.parametrize("seed", range(10))
def test_no_window_carries_more_than_the_rate(seed: int) -> None:
    rng, rate = random.Random(seed), 3_333_333
    link = Link(rate, delay=0)
    flows = [Flow() for _ in range(5)]
    now = 0
    for _ in range(300):
        now += rng.randrange(3 * MS)
        link.push(now, rng.choice(flows), rng.randrange(1, 20_000))
    items = drain(link)
    largest = max(item.nbytes for item in items)
    total = list(itertools.accumulate((item.nbytes for item in items), initial=0))
    for i in range(0, len(items), 7):
        for j in range(i, len(items), 5):
            window = items[j].finish - items[i].finish
            within = total[j + 1] - total[i]
            assert within <= rate * window / SECOND + largest * len(flows)


def test_no_window_of_one_flow_carries_more_than_the_rate_and_one_item() -> None:
    rng, rate = random.Random(3), 3_333_333
    link, flow = Link(rate, delay=0), Flow()
    now = 0
    for _ in range(300):
        now += rng.randrange(6 * MS)  # idles now and then: no credit is saved up
        link.push(now, flow, rng.randrange(1, 20_000))
    items = drain(link)
    for i in range(len(items)):
        for j in range(i, len(items)):
            within = sum(item.nbytes for item in items[i + 1 : j + 1])
            assert within <= rate * (items[j].finish - items[i].finish + 1) / SECOND


# -- statistics ----------------------------------------------------------------------------------


def test_statistics_count_bytes_time_and_flows() -> None:
    link, a, b = Link(MB, delay=0), Flow(), Flow()
    link.push(0, a, 1000, "kv")
    link.push(0, b, 1000, "ids")
    assert link.backlog(MS) == 1000
    link.push(10 * MS, a, 500, "kv")
    drain(link)
    assert link.carried == {"kv": 1500, "ids": 1000}
    assert link.busy(SECOND) == 2 * MS + MS // 2
    assert link.peak_flows == 2


# -- delay and jitter ----------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "jitter"), [(15 * MS, MS), (50 * MS, 40 * MS), (5 * US, 2 * US)])
def test_jitter_has_the_mean_and_the_deviation_that_were_set(mean: Ns, jitter: Ns) -> None:
    delay = Delay(mean, jitter, "seed")
    spacing = max(10 * jitter, MS)
    for phase in (0.0, 0.3, 0.5):  # on the knots and between them
        sample = [delay.at(round((3 * k + phase) * spacing)) for k in range(20_000)]
        assert statistics.fmean(sample) == pytest.approx(mean, abs=0.04 * jitter)
        assert statistics.pstdev(sample) == pytest.approx(jitter, rel=0.06)
        assert min(sample) > 0


def test_jitter_never_reorders_a_flow_and_is_not_biased_by_that() -> None:
    """The classic fault: 50 +- 40 ms, drawn for each packet of a stream that keeps its order, gives
    69 ms."""
    link, flow = Link(12_500_000, delay=50 * MS, jitter=40 * MS, seed="s"), Flow()
    for _ in range(200_000):
        link.push(0, flow, 125_000)
    items = drain(link)
    dues = [item.due for item in items]
    assert dues == sorted(dues)
    real = [item.due - item.finish for item in items]
    assert statistics.fmean(real) == pytest.approx(50 * MS, rel=0.03)
    assert statistics.pstdev(real) == pytest.approx(40 * MS, rel=0.06)


def test_small_jitter_is_never_held_back_by_order() -> None:
    link, flow = Link(6_250_000, delay=15 * MS, jitter=MS, seed="s"), Flow()
    for _ in range(100_000):
        link.push(0, flow, 1_500)
    held = [i for i in drain(link) if i.due != i.finish + link.delay.at(i.finish)]
    assert held == []


def test_jitter_is_a_function_of_seed_and_time_alone() -> None:
    times = [k * 7_777_777 for k in range(200)]
    forward = [Delay(15 * MS, MS, "7/wan").at(t) for t in times]
    delay = Delay(15 * MS, MS, "7/wan")
    backward = [delay.at(t) for t in reversed(times)][::-1]
    assert forward == backward
    assert forward != [Delay(15 * MS, MS, "8/wan").at(t) for t in times]
    assert {Delay(15 * MS, 0, "7/wan").at(t) for t in times} == {15 * MS}


@pytest.mark.parametrize(("mean", "jitter"), [(-1, 0), (MS, -1), (0, MS)])
def test_impossible_delays_are_refused(mean: Ns, jitter: Ns) -> None:
    with pytest.raises(ValueError, match="impossible delay"):
        Link(MB, mean, jitter)


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="impossible rate"):
        Link(-1, 0)
    link = Link(1, 0)
    with pytest.raises(ValueError, match="impossible rate"):
        link.set_rate(0, -1)
