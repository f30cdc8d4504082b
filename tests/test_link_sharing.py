"""What is served next, and at what rate: disciplines, weights, ranks, overhead and traces, against
exact arithmetic on random programs; what a link costs in steps."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from pddrt.netem.link import Flow, Link, Qdisc, Through
from pddrt.netem.traces import Segment, Trace
from pddrt.types import MS, SECOND, Ns

from .netlab import drain, finishes

MB = 1_000_000
WEIGHTS = {"kv": 1, "ids": 4, "control": 3}
RANKS = {"kv": 1}


# -- the law once more, by brute force -------------------------------------------------------------


@dataclass
class Waiting:
    left: Fraction
    tag: int
    weight: int
    rank: int
    place: int


@dataclass
class Exact:
    """Every item is served bit by bit between events, in rationals; nothing is kept but the
    queues."""

    qdisc: Qdisc
    rate: Callable[[Fraction], tuple[int, Fraction | None]]
    flows: dict[int, list[Waiting]] = field(default_factory=dict)
    now: Fraction = Fraction(0)
    done: dict[int, Fraction] = field(default_factory=dict)
    served: Fraction = Fraction(0)
    place: int = 0

    def push(self, flow: int, nbytes: int, tag: int, weight: int, rank: int) -> None:
        queue = self.flows.setdefault(flow, [])
        if queue and self.qdisc == "fifo":
            rank = max(rank, queue[-1].rank)
        self.place += 1
        queue.append(Waiting(Fraction(nbytes), tag, weight, rank, self.place))

    def shares(self) -> list[tuple[list[Waiting], Fraction]]:
        heads = [queue for queue in self.flows.values() if queue]
        first = min(queue[0].rank for queue in heads)
        heads = [queue for queue in heads if queue[0].rank == first]
        if self.qdisc == "fifo":
            return [(min(heads, key=lambda queue: queue[0].place), Fraction(1))]
        total = sum(queue[0].weight for queue in heads)
        return [(queue, Fraction(queue[0].weight, total)) for queue in heads]

    def until(self, when: Fraction | int) -> None:
        while self.now < when:
            rate, turn = self.rate(self.now)
            stop = Fraction(when) if turn is None else min(Fraction(when), turn)
            if rate and any(self.flows.values()):
                speeds = [(q, share * rate / SECOND) for q, share in self.shares()]
                stop = min(stop, self.now + min(q[0].left / v for q, v in speeds))
                for queue, speed in speeds:
                    queue[0].left -= speed * (stop - self.now)
                    self.served += speed * (stop - self.now)
                for queue, _ in speeds:
                    while queue and queue[0].left == 0:
                        self.done[queue.pop(0).tag] = stop
            self.now = stop


TOLERANCE = Fraction(1, 128)


@pytest.mark.parametrize("qdisc", ["fair", "fifo"])
@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_agree_with_exact_arithmetic(qdisc: Qdisc, ranked: bool, seed: int) -> None:
    """Pushes of three accounts, cancels and rate changes; weights where they mean something."""
    rng = random.Random(f"{qdisc}/{ranked}/{seed}")
    rate = rng.randrange(1, 10) * 10 ** rng.randrange(3, 10)
    weights = WEIGHTS if qdisc == "fair" else {}
    link = Link(rate, 0, qdisc=qdisc, weights=weights, ranks=RANKS if ranked else {})
    exact = Exact(qdisc, lambda _t: (link.rate or 0, None))
    flows = [Flow() for _ in range(rng.randrange(2, 9))]
    got: dict[int, Through] = {}
    pushed = cancelled = now = 0
    for number in range(120):
        now += rng.choice([0, 1, rng.randrange(SECOND // 20)])
        exact.until(now)
        for item in link.advance(now):
            got[item.tag] = item
        which, what = rng.randrange(len(flows)), rng.random()
        if what < 0.85:
            nbytes, account = rng.randrange(1, rate // 10 + 2), rng.choice(list(WEIGHTS))
            pushed += nbytes
            link.push(now, flows[which], nbytes, account, number)
            rank = RANKS.get(account, 0) if ranked else 0
            exact.push(which, nbytes, number, weights.get(account, 1), rank)
        elif what < 0.93:
            dropped = link.cancel(now, flows[which])
            left = sum((w.left for w in exact.flows.get(which, [])), Fraction(0))
            assert math.ceil(left - TOLERANCE) <= dropped <= math.ceil(left)
            cancelled += dropped
            exact.flows[which] = []
        else:
            link.set_rate(now, rng.choice([0, rate, rate * 2, max(1, rate // 3)]))
        waiting = sum((w.left for q in exact.flows.values() for w in q), Fraction(0))
        assert math.ceil(waiting - TOLERANCE) <= link.backlog(now) <= math.ceil(waiting)
    link.set_rate(now, rate)
    got.update((item.tag, item) for item in drain(link))
    exact.until(10**13)
    assert got.keys() == exact.done.keys()
    for tag, at in exact.done.items():
        assert math.ceil(at - TOLERANCE) <= got[tag].finish <= math.ceil(at)
    assert pushed == sum(link.carried.values()) + cancelled  # every byte once


# -- shares ----------------------------------------------------------------------------------------


def test_weights_are_shares_of_the_rate() -> None:
    link, flows = Link(8 * MB, 0, weights=WEIGHTS), {name: Flow() for name in WEIGHTS}
    for name, flow in flows.items():
        for k in range(50):
            link.push(0, flow, WEIGHTS[name] * 1000, name, (name, k))
    done = finishes(link)
    assert {done[name, 49] for name in WEIGHTS} == {50 * MS}


def test_what_has_rank_goes_first_and_is_not_held_up_by_what_is_half_served() -> None:
    link, kv, control = Link(MB, 0, ranks=RANKS), Flow(), Flow()
    link.push(0, kv, 10_000, "kv", "kv")
    link.push(4 * MS, control, 1_000, "control", "command")
    assert finishes(link) == {"command": 5 * MS, "kv": 11 * MS}


def test_a_flow_keeps_its_own_order_whatever_its_ranks() -> None:
    for qdisc in ("fair", "fifo"):
        link, flow = Link(MB, 0, ranks=RANKS, qdisc=qdisc), Flow()
        for k, account in enumerate(["control", "kv", "control", "kv", "ids"]):
            link.push(0, flow, 1000, account, k)
        assert [item.tag for item in drain(link)] == [0, 1, 2, 3, 4]


def test_first_in_first_out_serves_one_at_a_time_at_the_full_rate() -> None:
    link, a, b = Link(MB, 0, qdisc="fifo"), Flow(), Flow()
    link.push(0, a, 3000, tag="a")
    link.push(1, b, 1000, tag="b")
    link.push(2, a, 1000, tag="c")
    assert finishes(link) == {"a": 3 * MS, "b": 4 * MS, "c": 5 * MS}


def test_overhead_takes_rate_and_counts_for_nothing_else() -> None:
    link, flow = Link(1500 * 1000, 0, overhead=52), Flow()
    link.push(0, flow, 1448 * 10, "kv", "full")
    link.push(0, flow, 1, "kv", "short")
    done = finishes(link)
    assert done["full"] == 10 * MS
    assert done["short"] == 10 * MS + math.ceil(53 * SECOND / 1_500_000)
    assert link.carried == {"kv": 14_481}


@pytest.mark.parametrize("seed", range(5))
def test_a_link_with_something_to_send_never_idles(seed: int) -> None:
    """Whatever the discipline: while there is backlog the rate is used, to the byte."""
    rng = random.Random(seed)
    for qdisc in ("fair", "fifo"):
        link, flows = Link(MB, 0, qdisc=qdisc, weights=WEIGHTS if qdisc == "fair" else {}), []
        total = 0
        for _ in range(60):
            flows.append(Flow())
            nbytes = rng.randrange(1, 20_000)
            link.push(0, flows[-1], nbytes, rng.choice(list(WEIGHTS)))
            total += nbytes
        items = drain(link)
        assert items[-1].finish == pytest.approx(total * SECOND / MB, abs=2)
        assert link.busy(items[-1].finish) == pytest.approx(items[-1].finish, abs=2)


# -- in time ---------------------------------------------------------------------------------------


def trace_of(
    *parts: tuple[int, int | None], repeats: bool = True, delay: Ns | None = None
) -> Trace:
    """(length, rate) one after the other."""
    at, segments = 0, []
    for length, rate in parts:
        segments.append(Segment(at, rate, delay))
        at += length
    return Trace(segments, at, repeats)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_backlogged_link_carries_is_the_integral_of_its_trace(seed: int) -> None:
    rng = random.Random(seed)
    trace = trace_of(
        *(
            (rng.randrange(1, 20 * MS), rng.choice([0, rng.randrange(1, 50 * MB)]))
            for _ in range(9)
        ),
        (5 * MS, 10 * MB),
        repeats=rng.random() < 0.5,
    )
    cap = rng.choice([None, 20 * MB])
    link, flow = Link(cap, 0, trace=trace), Flow()
    exact = Exact("fair", lambda t: held(trace, cap, t))
    start = rng.randrange(60 * MS)
    exact.until(start)
    for k in range(400):
        nbytes = rng.randrange(1, 20_000)
        link.push(start, flow, nbytes, tag=k)
        exact.push(0, nbytes, k, 1, 0)
    done = finishes(link)
    assert len(done) == 400
    exact.until(max(done.values()))
    assert len(exact.done) == 400
    for tag, at in exact.done.items():
        assert math.ceil(at - TOLERANCE) <= done[tag] <= math.ceil(at)
    if cap is None:
        assert trace.carries(start, done[399]) == pytest.approx(float(exact.served), abs=50)


def held(trace: Trace, cap: int | None, t: Fraction) -> tuple[int, Fraction | None]:
    """The segment that holds at `t`, found by going through them."""
    at, ends = Fraction(0), [*(s.start for s in trace.segments[1:]), trace.end]
    while True:
        for segment, end in zip(trace.segments, ends, strict=True):
            if t < at + end:
                assert segment.rate is not None
                return segment.rate if cap is None else min(cap, segment.rate), at + end
        if not trace.repeats:
            rate = trace.segments[-1].rate
            assert rate is not None
            return rate if cap is None else min(cap, rate), None
        at += trace.end


def test_a_trace_acts_however_seldom_one_looks() -> None:
    trace = trace_of((MS, MB), (MS, 0), (2 * MS, 5 * MB))
    often, seldom = Link(None, MS, trace=trace), Link(None, MS, trace=trace)
    for link in (often, seldom):
        flow = Flow()
        for k in range(50):
            link.push(0, flow, 700, tag=k)
    a = drain(often)
    assert a == seldom.advance(SECOND)
    assert len(a) == 50


def test_an_idle_link_follows_its_trace() -> None:
    link = Link(None, 0, trace=trace_of((SECOND, MB), (SECOND, 2 * MB), repeats=False))
    link.push(1500 * MS, Flow(), 2000, tag="x")
    assert finishes(link) == {"x": 1501 * MS}


def test_an_outage_in_a_trace_ends_by_itself_and_is_waited_for() -> None:
    link = Link(MB, 0, trace=trace_of((MS, None), (9 * MS, 0), (SECOND, None)))
    link.push(0, Flow(), 2000, tag="x")
    assert link.next_event() == MS  # another rate holds then, and nothing is through
    assert link.advance(MS) == []
    assert finishes(link) == {"x": 11 * MS}


def test_where_two_speak_the_lower_rate_and_the_longer_delay_hold() -> None:
    link = Link(4 * MB, 5 * MS, trace=trace_of((SECOND, 2 * MB), delay=8 * MS))
    link.push(0, Flow(), 2000, tag="x")
    (item,) = drain(link)
    assert (item.finish, item.due) == (MS, 9 * MS)
    link.set_rate(10 * MS, MB)
    link.set_delay(10 * MS, 20 * MS)
    link.push(10 * MS, Flow(), 2000, tag="y")
    (item,) = drain(link)
    assert (item.finish, item.due) == (12 * MS, 32 * MS)
    link.set_rate(SECOND // 2, None)
    assert link.rate == 2 * MB


# -- what it costs ---------------------------------------------------------------------------------


def steps(of: Callable[[], object]) -> int:
    """Lines that run: the work, whatever the machine."""
    count = 0

    def tracer(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        of()
    finally:
        sys.settrace(before)
    return count


def join_and_leave(n: int, qdisc: Qdisc) -> None:
    """So many flows join, are served or cancelled, and leave."""
    link, flows = Link(MB, 0, qdisc=qdisc), [Flow() for _ in range(n)]
    for k, flow in enumerate(flows):
        link.push(k, flow, 1000 + k)
    for flow in flows[::3]:
        link.cancel(n, flow)
    drain(link)


@pytest.mark.parametrize("qdisc", ["fair", "fifo"])
def test_a_thousand_flows_that_join_and_leave_cost_no_more_each_than_a_hundred(
    qdisc: Qdisc,
) -> None:
    few, many = (steps(lambda n=n: join_and_leave(n, qdisc)) for n in (100, 1000))
    assert many < 10 * few * math.log2(1000) / math.log2(100) * 1.05
