"""What the gateway knows, how old that is, and what it makes of it: load, full relays, rates of
paths, lanes; and instances that come and go under traffic.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Change, Deployment
from pddrt.errors import BadInput
from pddrt.foresight import Foresight
from pddrt.netem.simnet import SimNet
from pddrt.policy.estimate import HISTORY, PathRate
from pddrt.policy.route import Naive, Pdd
from pddrt.roles.gateway import Gateway
from pddrt.roles.load import Load
from pddrt.roles.outlook import Capacity
from pddrt.roles.transfer import Lane, Transfer
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.types import MS, SECOND, Ns
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, many, one, oracle

MB = 1_000_000


def of(played: Played, kind: type[Any]) -> list[Any]:
    return [e for e in played.trace.events if isinstance(e, kind)]


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ns, str, Load, list[str]]]:
    """Every report that the gateway gets: when, of whom, what."""
    heard: list[tuple[Ns, str, Load, list[str]]] = []
    original = Gateway.on_load

    def on_load(self: Gateway, conn: Any, frame: Any) -> None:
        original(self, conn, frame)
        said = self.instances[conn.peer].said
        heard.append((self.env.now(), conn.peer, said, frame["arrived"]))

    monkeypatch.setattr(Gateway, "on_load", on_load)
    return heard


@pytest.mark.parametrize("age", [20 * MS, 50 * MS, 400 * MS])
def test_a_signal_comes_when_something_changed_and_no_oftener_than_its_age(
    age: Ns, reports: list[tuple[Ns, str, Load, list[str]]]
) -> None:
    played = Cluster(signal_age=age).play(many(4, 200, 60, every=30 * MS))
    played.assert_sound()
    by: dict[str, list[tuple[Ns, Load]]] = defaultdict(list)
    for t, name, load, _ in reports:
        by[name].append((t, load))
    assert set(by) == {"p0", "rld0", "md0"}
    for told in by.values():
        times = [t for t, _ in told]
        assert all(b - a >= age for a, b in pairwise(times))
        assert told[-1][1].tokens == told[-1][1].holding == 0, "the last says that it is over"
    over = max(e.t for e in played.trace.events if isinstance(e, (ev.Freed, ev.Learnt)))
    last = max(t for t, *_ in reports)
    assert last <= over + age + 20 * MS, "and then there is silence, for 30 s"


def test_a_report_is_of_one_age_and_one_delay_ago(
    reports: list[tuple[Ns, str, Load, list[str]]],
) -> None:
    """MD has admitted at t; the gateway knows at t + 80 ms + 15 ms, on the WAN."""
    played = Cluster(policy=Naive(), signal_age=80 * MS).play([one("x" * 200, 60, start=SECOND)])
    (r,) = played.records
    (t, _, load, arrived) = next(x for x in reports if x[1] == "md0" and x[3])
    assert arrived == ["s0.0"]
    assert load.holding == 1
    assert 0 <= t - (r.admitted["md0"] + 95 * MS) < MS


def test_what_was_sent_since_the_last_report_counts_until_it_is_in_one() -> None:
    capacity = Capacity.of(_hello())
    capacity.unseen["a"] = 100
    assert capacity.tokens == 100
    capacity.said = Load(tokens=300, pages=20, waiting=0, holding=2)
    assert capacity.tokens == 400
    del capacity.unseen["a"]
    assert capacity.tokens == 300


def _hello() -> Any:
    return {
        "role": "relay",
        "kv_tokens": 640,
        "page_tokens": 16,
        "caching": True,
        "max_context": 4096,
        "bytes_per_token": 1024,
        "max_batch": 4,
        "life": 0,
    }


def test_full_is_who_would_have_to_wait_for_pages_or_for_its_turn() -> None:
    capacity = Capacity.of(_hello())
    assert not capacity.full(640)
    assert capacity.full(641)
    capacity.said = Load(tokens=0, pages=30, waiting=0, holding=1)
    assert not capacity.full(160)
    capacity.unseen["a"] = 17
    assert capacity.full(160), "what was sent there will need two pages"
    capacity.said = Load(tokens=0, pages=0, waiting=1, holding=0)
    assert capacity.full(1), "somebody waits already"
    capacity.said, capacity.unseen = Load(holding=4), {}
    assert capacity.full(1), "the batch is full"


def test_requests_within_one_signals_age_spread_out() -> None:
    """No herd, though nobody has been heard of for 10 s: what was just sent counts."""
    cluster = Cluster(prefills=2, mains=4, policy=Naive(), signal_age=10 * SECOND)
    played = cluster.play(many(16, 100, 40))
    played.assert_sound()
    assert set(Counter(r.main for r in played.records).values()) == {4}
    assert set(Counter(r.prefill for r in played.records).values()) == {8}


def jain(values: Sequence[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def busy(played: Played, stem: str) -> list[int]:
    return [f["busy"] for n, f in played.recorder.instances.items() if n.startswith(stem)]


PREFIX, OWN, COUNT = 300, 100, 60


def herd(seed: int, age: Ns) -> Played:
    """All prompts begin alike. The first one, long before the others, leaves that on one P and MD;
    then more than the Ps can compute at once.
    """
    rng = random.Random(seed)
    prefix = "".join(rng.choice("abcdef") for _ in range(PREFIX))
    sessions = [Session(0, 0, (Turn(prefix, 5, 0),))]
    at = 2 * SECOND
    for i in range(1, COUNT + 1):
        own = f"{i:03d}" + "".join(rng.choice("xyz") for _ in range(OWN - 3))
        sessions.append(Session(i, at, (Turn(prefix + own, rng.randint(20, 60), 0),)))
        at += round(rng.expovariate(1 / (5 * MS)))
    cluster = Cluster(
        prefills=3, mains=3, policy=Naive(), rate=100 * MB, pages=400, signal_age=age, seed=seed
    )
    return cluster.play(sessions)


@pytest.mark.parametrize("age", [0, 50 * MS, 200 * MS])
@pytest.mark.parametrize("seed", range(4))
def test_F45_a_common_prefix_does_not_draw_all_traffic(seed: int, age: Ns) -> None:
    """Two instances differ in what they were given by no more than the prefix, one request, and
    what one computes while a signal ages: at 0.1 ms a token and 2 ms a step of 32 that is
    age / 0.1625 ms tokens. With d the difference over the mean, Jain's index is 1 / (1 + d^2) at
    least.
    """
    played = herd(seed, age)
    played.assert_sound()
    given: Counter[str] = Counter()
    for r in played.records[1:]:
        given[r.prefill or ""] += r.prompt_tokens - r.hits[r.prefill or ""]
    most = PREFIX + (PREFIX + OWN) + (age + 20 * MS) // 162_500
    mean = sum(given.values()) / 3
    assert max(given.values()) - min(given[f"p{i}"] for i in range(3)) <= most
    assert jain([given[f"p{i}"] for i in range(3)]) >= 1 / (1 + (most / mean) ** 2)
    assert jain(busy(played, "p")) >= 0.9
    assert jain(busy(played, "md")) >= 0.9


# -- relays that are full --------------------------------------------------------------------------


def test_a_full_relay_is_passed_by_or_waited_for() -> None:
    """RLD has room for two requests; five come at once."""
    sessions = many(5, 200, 200)
    by_rule = {}
    for rule in ("p-md", "wait"):
        played = Cluster(
            prefills=2,
            policy=Pdd(0, rule),
            rate=500_000,
            pages_of={"rld0": 27},
        ).play(sessions)
        played.assert_sound()
        by_rule[rule] = Counter(r.pipeline for r in played.records)
        for r in played.records:
            assert r.ids == oracle(r.prompt_ids, 200)
    assert by_rule == {"p-md": {"P-RLD-MD": 2, "P-MD": 3}, "wait": {"P-RLD-MD": 5}}


def test_another_relay_is_taken_before_none() -> None:
    played = Cluster(
        prefills=2, relays=2, policy=Pdd(0), rate=500_000, pages_of={"rld0": 14, "rld1": 27}
    ).play(many(4, 200, 20))
    played.assert_sound()
    assert Counter(r.relay for r in played.records) == {"rld0": 1, "rld1": 2, None: 1}


# -- what paths carry ------------------------------------------------------------------------------


def test_the_rate_is_the_paths_however_many_share_it() -> None:
    """1,000 bytes/ms. `a` is alone for 10 ms, shares 20 ms with `b`, is alone for 5 again."""
    path = PathRate(7)
    assert path.rate == 7
    path.busy(0, "a", 25_000)
    path.busy(10 * MS, "b", 20_000)
    assert path.rest(20 * MS, "a") == 25_000 - 7 * 15 // 1000, "by what is known so far"
    path.idle(30 * MS, "b", 10_000)
    path.idle(35 * MS, "a", 25_000)
    path.over(40 * MS, "b", whole=True)
    assert path.rate == 1_000_000
    path.over(50 * MS, "a", whole=True)
    assert path.rate == 1_000_000


def test_a_new_rate_is_all_that_counts_after_a_few_transfers() -> None:
    path, now = PathRate(None), 0
    for rate, count in ((1000, 9), (250, HISTORY)):
        for n in range(count):
            path.busy(now, n, 50 * rate)
            now += 50 * MS
            path.idle(now, n, 50 * rate)
            path.over(now, n, whole=True)
    assert path.rate == 250_000


def test_what_was_cut_or_too_short_to_measure_says_nothing() -> None:
    path = PathRate(1000)
    path.busy(0, "a", 10)
    path.over(SECOND, "a", whole=False)
    path.busy(SECOND, "b", 10)
    path.idle(SECOND + MS, "b", 10)
    path.over(2 * SECOND, "b", whole=True)
    assert path.rate == 1000
    path.busy(3 * SECOND, "c", 1_000_000)
    path.idle(4 * SECOND, "c", 1_000_000)
    path.over(4 * SECOND, "c", whole=True)
    assert path.rate == 1_000_000, "nobody that has ended counts as sharing"


@pytest.mark.parametrize("every", [400 * MS, 130 * MS, 60 * MS])
@pytest.mark.parametrize("prefills", [1, 3])
def test_a_wan_that_changes_is_learnt_within_a_few_transfers(every: Ns, prefills: int) -> None:
    """2 MB/s, then 0.5 after 2 s, alone or shared by up to eight and several Ps."""

    async def change(deployment: Deployment) -> None:
        await deployment.env.sleep(2 * SECOND)
        assert isinstance(deployment.net, SimNet)
        deployment.net.set_rate("wan", 500_000)

    cluster = Cluster(prefills=prefills, policy=Naive(), pages=400)
    played = cluster.play(many(40, 200, 10, every=every), during=change)
    played.assert_sound()
    took = of(played, ev.TransferTook)
    began = {e.request: e.t for e in reversed(of(played, ev.KVSent))}
    before = [t for t in took if t.t < 2 * SECOND][HISTORY:]
    after = [t for t in took if began[t.request] >= 2 * SECOND][HISTORY:]
    assert before
    assert after
    assert all(abs(t.rate - 2 * MB) < 0.03 * 2 * MB for t in before)
    assert all(abs(t.rate - 0.5 * MB) < 0.03 * 0.5 * MB for t in after)


def test_the_estimates_error_is_in_the_summary() -> None:
    """Alone on the path, the whole KV computed before it goes: exactly what was expected."""
    cluster = Cluster(policy=Naive(), stream_while_computing=False)
    played = cluster.play(many(3, 200, 10, every=SECOND))
    told = Foresight()
    for event in played.trace.events:
        told(event)
    router = told.summary(played.recorder.end)["router"]
    assert (router["transfers"], router["estimates"]) == (3, 3)
    assert max(map(abs, told.errors)) < MS
    assert router["error_s"]["mean_abs"].ns < MS
    assert list(router["rate_bytes_per_s"]) == ["p0>md0"]


# -- lanes -----------------------------------------------------------------------------------------


def test_a_lane_has_so_many_places_and_is_left_in_order() -> None:
    lane, (a, b, c, d) = Lane(2), [Transfer("md0", n, carries_first=True) for n in range(4)]
    assert lane.enter(a)
    assert lane.enter(b)
    assert not lane.enter(c)
    assert not lane.enter(d)
    lane.leave(c)
    assert not lane.enter(c), "to the end of the queue"
    lane.leave(a)
    assert d.wake.is_set()
    assert not c.wake.is_set()
    assert lane.enter(d)
    lane.leave(b)
    assert lane.enter(c)


def transfers(played: Played, dst: str) -> dict[str, tuple[Ns, Ns]]:
    """First KV handed over, last KV received, of each request."""
    sent = {e.request: e.t for e in reversed(of(played, ev.KVSent)) if e.dst == dst}
    got = {e.request: e.t for e in of(played, ev.KVReceived) if e.instance == dst}
    return {request: (t, got[request]) for request, t in sent.items() if request in got}


@pytest.mark.parametrize("most", [1, 3, 8])
def test_F46_so_many_transfers_at_once_and_the_last_gets_its_share(most: int) -> None:
    """Twelve of 0.1 s each at once: none takes longer than all of them together."""
    cluster = Cluster(
        policy=Naive(), pages=400, delay=0, max_transfers=most, stream_while_computing=False
    )
    played = cluster.play(many(12, 200, 10))
    played.assert_sound()
    spans = transfers(played, "md0").values()
    assert len(spans) == 12
    at_once = max(sum(a <= t < b for a, b in spans) for t, _ in spans)
    assert at_once == most
    size = 200 * LAYOUT.bytes_per_token
    total = next(e for e in of(played, ev.LinkTotal) if (e.src_site, e.dst_site) == ("a", "b"))
    assert sum(e.bytes for e in of(played, ev.KVSent)) == 12 * size
    assert sum(e.bytes for e in of(played, ev.KVReceived)) == 12 * size
    assert total.bytes <= total.busy_ns * 2 * MB // SECOND + 1, "no more than the link's rate"
    begin, end = min(a for a, _ in spans), max(b for _, b in spans)
    fair = 12 * size * SECOND // (2 * MB)
    assert end - begin <= 1.05 * fair
    waits = [b - r.admitted["md0"] for r, (_, b) in zip(played.records, spans, strict=True)]
    assert max(waits) <= 1.25 * fair, "nobody takes 10x its share, or even twice"


def test_a_transfer_that_waits_for_its_prefill_keeps_no_place() -> None:
    """One place. A long prompt is being computed, 32 tokens at a time; what P has of another one
    slips through between two chunks.
    """

    async def forget(deployment: Deployment) -> None:
        await deployment.env.sleep(900 * MS)
        memory = next(i for i in deployment.instances if i.name == "md0").memory
        memory.cache.evict(memory.cached)

    cluster = Cluster(policy=Naive(), max_transfers=1, rate=100 * MB, pages=200)
    cached, behind = "s" * 200, Session(2, 1050 * MS, (Turn("s" * 200 + "t" * 20, 10, 0),))
    sessions = [one(cached, 10), Session(1, SECOND, (Turn("l" * 1500, 10, 0),)), behind]
    played = cluster.play(sessions, during=forget)
    played.assert_sound()
    long_one = next(r for r in played.records if r.id == "s1.0")
    slipped = [e for e in of(played, ev.KVSent) if e.request == "s2.0"]
    assert slipped[0].end == 200
    assert slipped[0].t < (long_one.prefill_ended or 0) - 100 * MS


# -- instances that come and go --------------------------------------------------------------------

STEMS = {"prefill": "p", "relay": "rld", "main": "md"}


def conversations(rng: random.Random, count: int) -> list[Session]:
    return [
        Session(
            i,
            i * rng.choice([20, 60]) * MS,
            tuple(
                Turn(f"{i}{turn}" * rng.randint(10, 40), rng.choice([5, 40, 80]), 50 * MS)
                for turn in range(3)
            ),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("role", STEMS)
@pytest.mark.parametrize("seed", range(5))
def test_instances_join_and_leave_under_traffic_and_nothing_is_lost(role: str, seed: int) -> None:
    """One joins, one that was there leaves, comes back and leaves again."""
    rng = random.Random(f"{role}/{seed}")
    stem = STEMS[role]
    at = [rng.randint(low, high) for low, high in ((0, 99), (500, 700), (750, 900), (950, 1200))]
    changes = [
        Change(at[0] * MS, f"{stem}1", joins=True),
        Change(at[1] * MS, f"{stem}0", joins=False),
        Change(at[2] * MS, f"{stem}0", joins=True),
        Change(at[3] * MS, f"{stem}0", joins=False),
    ]
    cluster = Cluster(
        **{f"{role}s": 2},  # type: ignore[arg-type]
        rate=rng.choice([400_000, 2 * MB]),
        delay=rng.choice([MS, 40 * MS]),
        policy=Pdd(rng.choice([0, 50 * MS])),
        pages=rng.choice([64, 128]),
        changes=changes,
        seed=seed,
        shuffle=seed,
    )
    sessions = conversations(rng, 8)
    played = cluster.play(sessions)
    played.assert_sound()
    assert len(played.records) == 24
    for r in played.records:
        assert r.finish_reason == "length", r.detail
        assert r.ids == oracle(r.prompt_ids, sessions[r.session].turns[r.turn].max_tokens)
    started = [e.t for e in of(played, ev.InstanceStarted) if e.instance == f"{stem}1"]
    assert len(started) == 1
    used = {(r.prefill, r.relay, r.main) for r in played.records}
    assert any(f"{stem}1" in names for names in used), "who joins gets requests"
    left = [e.t for e in of(played, ev.InstanceLeft) if e.instance == f"{stem}0"]
    assert len(left) >= 1
    for r in played.records:
        if f"{stem}0" in (r.prefill, r.relay, r.main) and (r.routed or 0) < left[0]:
            assert (r.finished or 0) <= left[0], "what runs there ends first"
    names = [i.name for i in played.deployment.instances]
    assert names.count(f"{stem}1") == 1


def test_who_leaves_gets_nothing_new_and_is_forgotten() -> None:
    changes = [Change(100 * MS, "md0", joins=False)]
    played = Cluster(mains=2, policy=Naive(), changes=changes).play(many(8, 100, 20, every=60 * MS))
    played.assert_sound()
    (left,) = of(played, ev.InstanceLeft)
    later = [r for r in played.records if (r.routed or 0) > 100 * MS + played.records[0].sent]
    assert {r.main for r in later} == {"md1"}
    assert "md0" in {r.main for r in played.records}
    assert "md0" not in played.deployment.gateway.instances
    assert left.t < max(r.finished or 0 for r in played.records)
    for node in (played.deployment.gateway, *played.deployment.instances):
        assert "md0" not in node.peers
        assert "md0" not in node._dialled, "it said good-bye"


def test_who_is_to_leave_waits_for_what_was_sent_there_and_has_not_come_yet() -> None:
    """The gateway is 15 ms away from P."""
    changes = [Change(5 * MS, "p0", joins=False)]
    cluster = Cluster(prefills=2, gateway_site="b", policy=Naive(), changes=changes)
    played = cluster.play(many(2, 100, 20))
    played.assert_sound()
    assert {r.prefill for r in played.records} == {"p0", "p1"}
    assert {r.finish_reason for r in played.records} == {"length"}


@pytest.mark.parametrize("role", STEMS)
@pytest.mark.parametrize("jitter", [0, 5 * MS])
def test_who_is_called_back_while_it_leaves_comes_back_as_new(role: str, jitter: Ns) -> None:
    """It joins at the instant at which it has left, of which nobody may have heard yet."""
    stem = STEMS[role]
    changes = [
        Change(100 * MS, f"{stem}0", joins=False),
        Change(101 * MS, f"{stem}0", joins=True),
    ]
    cluster = Cluster(
        **{f"{role}s": 2},  # type: ignore[arg-type]
        policy=Pdd(0),
        jitter=jitter,
        changes=changes,
    )
    played = cluster.play(many(40, 100, 40, every=30 * MS))
    played.assert_sound()
    assert {r.finish_reason for r in played.records} == {"length"}
    (left,) = of(played, ev.InstanceLeft)
    back = [e.t for e in of(played, ev.InstanceStarted) if e.instance == f"{stem}0"]
    assert back[1] == left.t
    later = {getattr(r, role) for r in played.records if (r.routed or 0) > left.t + SECOND // 2}
    assert f"{stem}0" in later


def test_a_group_that_is_left_by_all_of_a_role_refuses_by_name() -> None:
    changes = [Change(100 * MS, "md0", joins=False)]
    played = Cluster(policy=Naive(), changes=changes).play(many(4, 100, 20, every=200 * MS))
    played.assert_sound()
    assert [r.finish_reason for r in played.records] == ["length"] + ["rejected"] * 3
    assert played.records[-1].detail == "no main instance can be reached"


SCENARIO = """
name: scaled
seed: 3
model: tiny
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 40 Mbit/s, delay: 5 ms}
instances:
  p:   {role: prefill, site: a, kv_memory: 8 MiB, engine: model, step_time: &s {prefill_tokens_per_s: 5000, decode_step: 2 ms}}
  rld: {role: relay,   site: a, kv_memory: 8 MiB, engine: model, step_time: *s, count: 0}
  md:  {role: main,    site: b, kv_memory: 8 MiB, engine: model, step_time: *s}
pipeline: {policy: pdd, relay_above: 20 ms}
anomaly: {input_above: 6000, output_below: 500, share: 7 %, guess: session}
router: {signal_age: 20 ms, max_transfers: 4, handshake: 3 s}
scale:
  - {at: 30 ms, instances: rld, count: 2}
  - {at: 30 ms, instances: md, count: 2}
  - {at: 350 ms, instances: md, count: 1}
  - {at: 400 ms, instances: rld, count: 1}
workload: {kind: poisson, requests: 16, rate: 40/s, output_tokens: 30, prompts: random,
           prompt_tokens: {min: 100, max: 300}}
"""  # noqa: E501


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_group_scales_under_either_clock(tmp_path: Path, clock: str) -> None:
    run = Run(parse(SCENARIO, "scaled.yaml", clock=clock), out=tmp_path / "run", verify=True)
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    events = [json.loads(line) for line in (result.folder / "events.jsonl").open()]
    started = [e["instance"] for e in events if e["event"] == "InstanceStarted"]
    left = [e["instance"] for e in events if e["event"] == "InstanceLeft"]
    assert sorted(started) == ["md-0", "md-1", "p", "rld-0", "rld-1"]
    assert started[:2] == ["p", "md-0"]
    assert sorted(left) == ["md-1", "rld-1"]
    assert result.summary["router"]["transfers"] >= 15, "the last may end with the run"
    again = parse((result.folder / "scenario.yaml").read_text(), "again.yaml")
    assert again.changes() == run.scenario.changes()
    assert [i.name for i in again.resolved()] == [i.name for i in run.instances]


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        ("[{at: 1 s, instances: rl, count: 3}]", "scale.0.instances: found 'rl', did you mean"),
        ("[{at: 1 s, instances: md, count: 0}]", "scale.0.count: no instance of role main is"),
        ("[{at: 1 s, instances: p, count: 2}]", "instances.rld.count: found 0, and scale has no"),
        ("[{at: 1, instances: rld, count: 3}]", "scale.0.at: found 1, a number without a unit"),
        ("[{at: 1 s, instances: rld, count: 1.5}]", "scale.0.count: found 1.5; allowed: a whole"),
    ],
)
def test_what_cannot_be_scaled_is_said_before_anything_starts(scale: str, problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(SCENARIO, "scaled.yaml", ["scale=" + scale])
    assert problem in str(refused.value)
