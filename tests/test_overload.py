"""Overload: what cannot be served in time is refused, early and by name; what is served is in time;
queues are bounded; and a little later all is well again.

`python -m tests.test_overload RUN` tells of a recorded run what came and what was served in each
interval: of scenarios/overload.yaml, an hour of three times what it can serve (docs/recovery.md).
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.policy.admission import FACTOR, FEW, MARGIN, WINDOW, Admission, Door
from pddrt.policy.route import Alone, Naive, Pdd
from pddrt.scenario import load
from pddrt.types import MS, SECOND, Ns
from pddrt.workload import Session, Turn, plan

from .cluster import Cluster, Played, many

TTFT: Ns = SECOND
SHEDS = Admission(shed_after=TTFT)


@dataclass(frozen=True)
class Shape:
    """A deployment and its requests: characters of each prompt in turn, tokens of an answer."""

    capacity: float
    """Requests a second that it can about serve."""
    prompts: Sequence[int] = (150,)
    answer: int = 10
    about: dict[str, Any] = field(default_factory=dict)

    def play(self, rule: Admission, starts: Sequence[Ns], then: int = 0) -> Played:
        """Requests at these moments, and then so many at leisure."""
        last = max(starts) + 2 * SECOND
        times = [*starts, *(last + i * 300 * MS for i in range(then))]
        asked = [
            Session(
                i, t, (Turn(f"{i:05d}" + "x" * self.prompts[i % len(self.prompts)], self.answer),)
            )
            for i, t in enumerate(times)
        ]
        about = {"policy": Pdd(50 * MS), "rate": None, **self.about}
        played = Cluster(admission=rule, deadline=20 * SECOND, **about).play(asked)
        played.assert_sound()
        door = played.deployment.gateway.door
        assert not door.tokens
        assert not door.waiting
        return played

    def at(self, times: float, lasts: Ns) -> list[Ns]:
        """Arrivals at random, at so many times the capacity."""
        rng, now, starts = random.Random("arrivals"), 0, list[Ns]()
        while now < lasts:
            starts.append(now)
            now += round(rng.expovariate(self.capacity * times) * SECOND)
        return starts


SHAPES = {
    "one-of-each": Shape(48),
    "relayed": Shape(
        24, about={"policy": Pdd(0), "prefills": 2, "mains": 2, "pages": 256, "rate": 3_000_000}
    ),
    "naive": Shape(13, about={"policy": Naive(), "rate": 2_000_000}),
    "alone": Shape(42, about={"policy": Alone("main")}),
    "short of memory": Shape(18, answer=60, about={"pages_of": {"md0": 40}}),
    "long and short": Shape(40, (100,) * 9 + (900,), about={"pages": 256}),
}
"""What each is short of: P's compute, the WAN and P's memory, the WAN, compute that also decodes,
memory for answers, compute for prompts of any length."""


def in_time(played: Played) -> int:
    answered = [r for r in played.records if r.finish_reason == "length"]
    return sum((r.ttft or 0) <= TTFT for r in answered)


def refused(played: Played) -> list[Any]:
    return [r for r in played.records if r.finish_reason == "rejected"]


@pytest.mark.parametrize("name", SHAPES)
def test_goodput_at_three_times_the_capacity_is_nearly_its_peak_and_then_all_is_well(
    name: str,
) -> None:
    shape = SHAPES[name]
    lasts = round(max(2, 40 / shape.capacity) * SECOND)
    peak = in_time(shape.play(SHEDS, shape.at(1, lasts)))
    played = shape.play(SHEDS, shape.at(3, lasts), then=5)
    crowd, after = played.records[:-5], played.records[-5:]
    assert in_time(played) - 5 >= 0.8 * peak
    assert all(r.finish_reason == "length" and (r.ttft or TTFT) < TTFT / 2 for r in after)
    served = [r for r in crowd if r.finish_reason == "length" and r.sent >= lasts / 2]
    late = [r for r in served if (r.ttft or 0) > TTFT]
    assert len(late) <= 0.15 * len(served), "once it is known how fast it can be"
    assert refused(played)
    for r in refused(played):
        assert r.detail.startswith("overloaded: "), r.detail
        assert (r.finished or 0) - r.sent <= TTFT, "while it could still go elsewhere"
        assert "had not begun" not in r.detail or r.prefill_started is None


def test_without_shedding_hardly_anybody_is_served_in_time() -> None:
    """Else the test above says little."""
    shape = SHAPES["one-of-each"]
    starts = shape.at(3, 3 * SECOND)
    assert in_time(shape.play(Admission(), starts)) < in_time(shape.play(SHEDS, starts)) / 2


def test_a_burst_that_can_be_served_is_and_of_one_that_cannot_what_can() -> None:
    """After a time at leisure, in which nothing told how fast it can be."""
    shape = SHAPES["one-of-each"]
    slowly = [i * 250 * MS for i in range(8)]
    small = shape.play(SHEDS, [*slowly, *(2 * SECOND + i * MS for i in range(36))])
    assert not refused(small)
    assert in_time(small) == len(small.records)
    large = shape.play(SHEDS, [*slowly, *(2 * SECOND + i * MS for i in range(150))], then=3)
    assert in_time(large) >= 8 + 3 + 36
    assert all((r.ttft or TTFT) < 100 * MS for r in large.records[-3:])


def test_queues_are_bounded_while_three_times_as_much_comes() -> None:
    """Read from the events: who waits for a first token, for memory, or sends; and they do not
    grow.
    """
    shape = SHAPES["relayed"]
    starts = shape.at(3, 4 * SECOND)
    played = shape.play(SHEDS, starts)
    queues = Queues(played.trace.events)
    most = shape.capacity * TTFT / SECOND + FEW * 2
    for name in ("first token", "memory of p0", "memory of p1", "memory of rld0"):
        assert 0 < queues.most(name) <= most, name
        early, late = queues.most(name, until=2 * SECOND), queues.most(name, since=2 * SECOND)
        assert late <= 1.5 * early + 2, name
    for path in ("p0>md0", "p0>md1", "p1>md0", "p1>md1"):
        assert queues.most(path) <= Cluster.max_transfers, path


class Queues:
    """How many were in each queue, from the events of a run: who waits for a first token at all,
    for memory of an instance, and who is sending from one to another.
    """

    def __init__(self, events: Sequence[ev.Event]) -> None:
        self.lengths: dict[str, list[tuple[Ns, int]]] = defaultdict(list)
        self._inside: dict[str, set[str]] = defaultdict(set)
        members: dict[str, tuple[str, ...]] = {}
        for event in events:
            match event:
                case ev.Routed():
                    parts = (event.prefill, event.relay, event.main)
                    members[event.request] = tuple(name for name in parts if name)
                    self._enters("first token", event)
                    self._enters(f"memory of {members[event.request][0]}", event)
                case ev.Admitted():
                    self._leaves(f"memory of {event.instance}", event)
                    way = members[event.request]
                    for name in way[way.index(event.instance) + 1 :][:1]:
                        self._enters(f"memory of {name}", event)
                case ev.Released():
                    self._leaves("first token", event)
                case ev.KVSent():
                    self._enters(f"{event.src}>{event.dst}", event)
                case ev.KVWhole():
                    for name in list(self._inside):
                        if name.endswith(f">{event.instance}"):
                            self._leaves(name, event)
                case ev.Finished():
                    for name in list(self._inside):
                        self._leaves(name, event)

    def _enters(self, name: str, event: Any) -> None:
        self._inside[name].add(event.request)
        self.lengths[name].append((event.t, len(self._inside[name])))

    def _leaves(self, name: str, event: Any) -> None:
        if event.request in self._inside[name]:
            self._inside[name].remove(event.request)
            self.lengths[name].append((event.t, len(self._inside[name])))

    def most(self, name: str, since: Ns = 0, until: Ns = 1 << 62) -> int:
        return max((n for t, n in self.lengths[name] if since <= t < until), default=0)


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
    assert len(refused(played)) == 12 - most
    assert all(r.detail.startswith("overloaded: ") and why in r.detail for r in refused(played))
    assert [r.finish_reason for r in played.records].count("length") == most


def test_what_has_not_begun_in_time_is_refused_before_p_has_computed_any_of_it() -> None:
    """All at once, so that nobody could tell at the door."""
    shape = SHAPES["one-of-each"]
    played = shape.play(SHEDS, [0] * 200)
    late = [r for r in refused(played) if "had not begun it after" in r.detail]
    assert late
    for r in late:
        assert r.prefill_started is None
        assert r.detail.startswith("overloaded: p0 had not begun it after 0.9")
        assert (r.retry_after or 0) > 0
    assert in_time(played) >= 0.8 * shape.capacity


# -- the door --------------------------------------------------------------------------------------


def served(door: Door, count: int, every: Ns, work: int = 100) -> Ns:
    """So many first tokens at this pace, while a crowd waits; when the last came."""
    for i in range(FEW + count):
        door.entered(0, f"crowd {i}", 1, work)
    for i in range(count):
        door.first_token(every * (i + 1), f"crowd {i}")
    return every * count


def test_by_default_the_pools_bound_what_is_under_way() -> None:
    door = Door(Admission())
    door.entered(0, "a", FACTOR * 1000 - 100, 1)
    assert door.refusal(100, 1000, 1) is None
    assert door.refusal(101, 1000, 1) is not None
    door.left("a")
    assert door.refusal(10**9, 1000, 1) is None, "alone it is the policy that says what fits"


def test_a_wait_is_the_work_that_waits_and_ones_own_at_the_pace_of_first_tokens() -> None:
    door = Door(Admission(shed_after=50 * MS))
    for i in range(FEW + 4):
        door.entered(0, str(i), 1, 100)
    assert door.forecast(100) is None, "nothing has been served"
    for i in range(4):
        door.first_token(10 * MS * (i + 1), str(i))
    assert door.forecast(100) == (FEW + 1) * 10 * MS
    assert door.forecast(700) == (FEW + 7) * 10 * MS, "a longer prompt takes longer"
    told = door.refusal(1, 1000, 100)
    assert told is not None
    assert told.detail == (
        "overloaded: the first token would take 0.050 s, more than 0.04 s (80 % of 0.05 s)"
    )
    assert told.retry_after == 50 * MS - int(MARGIN * 50 * MS)
    door.left("7")
    assert door.refusal(1, 1000, 100) is None, "few wait"


def test_the_pace_is_measured_only_where_it_is_service_that_is_waited_for() -> None:
    door = Door(Admission(shed_after=SECOND))
    for i in range(20):  # at leisure: one a second, each served at once
        door.entered(i * SECOND, str(i), 1, 100)
        door.first_token(i * SECOND + 10 * MS, str(i))
    assert door.forecast(100) is None
    for i in range(2 * FEW):  # many at once, who are all as fast as that one
        door.entered(30 * SECOND, f"at once {i}", 1, 100)
    for i in range(2 * FEW):
        door.first_token(30 * SECOND + 10 * MS, f"at once {i}")
    assert door.forecast(100) is None


def test_a_pace_that_changes_is_forgotten() -> None:
    door = Door(Admission(shed_after=SECOND))
    now = served(door, WINDOW, 10 * MS)
    before, names = door.forecast(100), [f"crowd {WINDOW + i}" for i in range(FEW)]
    for i in range(2 * WINDOW):
        names.append(f"later {i}")
        door.entered(now, names[-1], 1, 100)
        door.first_token(now := now + 30 * MS, names.pop(0))
    assert door.forecast(100) == 3 * (before or 0)


def test_where_nobody_was_ever_in_time_nobody_is_refused_for_it() -> None:
    """That is slow, and would be without the others; refusing some makes no other faster."""
    for fastest, refuses in ((400 * MS, True), (700 * MS, False)):
        door = Door(Admission(shed_after=500 * MS))
        for i in range(3 * FEW):
            door.entered(0, str(i), 1, 100)
        for i in range(2 * FEW):
            door.first_token(fastest + i * 800 * MS, str(i))
        assert (door.refusal(1, 1000, 100) is not None) == refuses


def test_several_instances_that_compute_are_not_crowded_by_what_crowds_one() -> None:
    door = Door(Admission(shed_after=MS))
    served(door, 2, 500_000)
    assert door.refusal(1, 1000, 100, computing=1) is not None
    assert door.refusal(1, 1000, 100, computing=4) is None


# -- the scenario ----------------------------------------------------------------------------------

FILE = Path(__file__).parent.parent / "scenarios" / "overload.yaml"


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 6 * SECOND),
        ({"admission.shed_after": "off"}, None),
        ({"admission": "{max_requests: 9}"}, None),
        ({"admission.shed_after": "2 s"}, 2 * SECOND),
        ({"slo": "{tpot: 30 ms}"}, None),
    ],
)
def test_shedding_goes_by_the_slo_where_the_scenario_asks_for_it(
    options: dict[str, str], limit: Ns | None
) -> None:
    scenario = load(FILE, [f"{k}={v}" for k, v in options.items()])
    assert scenario.shed_after == limit


def test_a_surge_changes_the_rate_and_nothing_before_it() -> None:
    calm = load(FILE, ["workload.surges=[]", "workload.requests=300"])
    surge = load(
        FILE, ["workload.surges=[{at: 100 s, for: 20 s, rate: 10/s}]", "workload.requests=400"]
    )
    before, during = plan(calm.workload, 1), plan(surge.workload, 1)
    starts = [s.start_ns for s in during]
    early = [t for t in starts if t < 100 * SECOND]
    assert early == [s.start_ns for s in before if s.start_ns < 100 * SECOND]
    counts = [
        sum(a * SECOND <= t < b * SECOND for t in starts) for a, b in ((100, 120), (120, 180))
    ]
    assert abs(counts[0] - 200) < 3 * 200**0.5
    assert abs(counts[1] - 72) < 3 * 72**0.5


# -- a recorded run --------------------------------------------------------------------------------


def intervals(folder: Path, length_s: float) -> list[dict[str, Any]]:
    """What came in each interval of a run, by when it was sent."""
    scenario = load(folder / "scenario.yaml")
    limit = scenario.slo.ttft
    found: dict[int, dict[str, Any]] = {}
    sent: dict[str, int] = {}
    with open(folder / "events.jsonl", encoding="utf-8") as file:
        for line in file:
            if not line.startswith(
                ('{"event":"RequestSent"', '{"event":"TokensReceived"', '{"event":"Finished"')
            ):
                continue
            event = json.loads(line)
            t, request = event["t_s"], event["request"]
            if event["event"] == "RequestSent":
                sent[request] = t
                one = found.setdefault(int(t // length_s), defaultdict(int, ttft=[]))
                one["sent"] += 1
                continue
            one = found[int(sent[request] // length_s)]
            if event["event"] == "Finished":
                one["refused"] += event["reason"] == "rejected"
            elif event["start"] == 0:
                one["ttft"].append(t - sent[request])
                one["in time"] += limit is None or (t - sent[request]) * SECOND <= limit
    return [found.get(n, defaultdict(int, ttft=[])) for n in range(max(found) + 1)]


def main(folder: str, length_s: str = "300") -> int:
    """A table: intervals of so many seconds."""
    print("from s   sent/s  refused/s  in time/s  late/s  TTFT p50 s  p99 s")
    for n, one in enumerate(intervals(Path(folder), float(length_s))):
        per = {k: one[k] / float(length_s) for k in ("sent", "refused", "in time")}
        ttft = sorted(one["ttft"]) or [0.0]
        late = (len(one["ttft"]) - one["in time"]) / float(length_s)
        at = [ttft[min(len(ttft) - 1, int(share * len(ttft)))] for share in (0.5, 0.99)]
        print(
            f"{n * float(length_s):6.0f}   {per['sent']:6.2f}  {per['refused']:9.2f}  "
            f"{per['in time']:9.2f}  {late:6.2f}  {at[0]:10.2f}  {at[1]:5.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
