"""Fault plans: what a scenario may say, when faults strike, and that each kind does what its name
says, alone, on a modelled cluster. That frames and links suffer alike on both nets is in
test_net_faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pddrt import document, scenario
from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.env import LocalEnv, VirtualEnv
from pddrt.errors import BadInput
from pddrt.faults import KINDS, Fault, FaultPlan
from pddrt.frames import Frame
from pddrt.invariants import Monitor, Violation
from pddrt.policy.route import Naive
from pddrt.recording import opened
from pddrt.run import Run
from pddrt.simloop import SimLoop
from pddrt.trace import Event, Trace, to_line
from pddrt.types import MS, SECOND
from pddrt.workload import Session, Turn

from .answers import check_answers
from .cluster import Cluster, Played, many, one

SCENARIO = """\
name: small
clock: virtual
model: tiny
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan: {between: [a, b], rate: 80 Mbit/s, delay: 15 ms}
instances:
  p: {role: prefill, site: a, count: 2, engine: model, step_time: &t {prefill_tokens_per_s: 4000, decode_step: 9 ms}}
  rld0: {role: relay, site: a, engine: model, step_time: *t}
  md0: {role: main, site: b, engine: model, step_time: *t}
workload: {kind: closed, requests: 2, concurrency: 2, output_tokens: 30, prompts: random, prompt_tokens: 150}
faults:
"""  # noqa: E501
LINE = SCENARIO.count("\n") + 1


def plan(text: str) -> tuple[Fault, ...]:
    """Of a YAML list of faults."""
    listed = document.parse(f"faults:\n{text}", "plan").data["faults"]
    found: tuple[Fault, ...] = TypeAdapter(FaultPlan).validate_python(listed)
    return found


def of(played: Played, kind: type[Event], **wanted: object) -> list[Any]:
    found = [e for e in played.trace.events if isinstance(e, kind)]
    return [e for e in found if all(getattr(e, k) == v for k, v in wanted.items())]


def suffers(
    text: str, cluster: Cluster | None = None, sessions: list[Session] | None = None
) -> Played:
    """A cluster under a plan, with all that must hold whatever befell it. How requests go on is in
    test_recovery.py.
    """
    cluster, sessions = cluster or Cluster(), sessions or many(4, 200, 80, every=300 * MS)
    cluster.deadline = min(cluster.deadline, 20 * SECOND)
    cluster.plan = plan(text)
    played = cluster.play(sessions)
    played.assert_sound()
    assert not played.deployment.gateway._streams
    check_answers(played.records, sessions, cluster.eos_ids)
    return played


def ends(played: Played) -> list[str]:
    return [str(r.finish_reason) for r in played.records]


# -- what a scenario may say -----------------------------------------------------------------------

BAD = {
    "crash": "found 'crash'; allowed: a mapping with do, and at, rate or on",
    "{do: crsh, at: 0}": "do: found 'crsh', did you mean 'crash'?; allowed: link-down, link-slow,",
    "{at: 0}": "do: missing; needed: link-down or",
    "{do: crash, instance: md0}": "found no trigger; allowed: one of at, rate, on",
    "{do: disconnect, at: 0, rate: 1/s}": "found at and rate; allowed: one of at, rate, on",
    "{do: crash, at: 0}": "instance: missing; needed: a name",
    "{do: crash, instance: md1, at: 0}": "instance: found 'md1', did you mean 'md0'?; allowed: p-0",
    "{do: crash, instance: p, at: 0}": "instance: found 'p'; allowed: p-0, p-1, rld0, md0",
    "{do: crash, instance: md0, at: 5}": "at: found 5, a number without a unit; allowed: a time",
    "{do: crash, instance: md0, at: 0, for: 0 s}": "for: found '0 s'; allowed: a time",
    "{do: disconnect, at: 0, for: 1 s}": "for: found an unknown field",
    "{do: pause, instance: md0, at: 0, fro: 1 s}": "fro: found an unknown field, did you mean",
    "{do: disconnect, at: 0, count: 2}": "found count, though it fires once; allowed: with rate",
    "{do: cancel, on: {event: KVWole}}": "on.event: found 'KVWole', did you mean 'KVWhole'?",
    "{do: cancel, on: {event: FaultEnded}}": "on.event: found 'FaultEnded'",
    "{do: cancel, on: {event: KVWhole, who: x}}": "on: KVWhole has no such field: found 'who'; "
    "allowed: request, instance, prompt_tokens",
    "{do: cancel, on: {event: KVWhole, nth: 0}}": "on.nth: found 0; allowed: a whole number from 1",
    "{do: cancel, at: 0, request: 7}": "request: found 7; allowed: a request such as s0.1",
    "{do: cancel, at: 0, request: s0.0, session: 1}": "found request and session; allowed: one",
    "{do: link-down, link: lan, at: 0}": "link: found 'lan', did you mean 'wan'?",
    "{do: link-down, link: wan, direction: a>c, at: 0}": "direction: found 'a>c'; allowed: a>b",
    "{do: link-slow, link: wan, to: 90 Mbit/s, at: 0}": "to: found 90 Mbit/s; allowed: less than",
    "{do: link-long, link: wan, delay: 15 ms, at: 0}": "delay: found 15 ms; allowed: more than",
    "{do: reset, between: [p-0, nobody], at: 0}": "between.1: found 'nobody'; allowed: p-0, p-1",
    "{do: reset, purpose: control, at: 0}": "found purpose: control; allowed: with between",
    "{do: corrupt, kind: kvv, at: 0}": "kind: found 'kvv', did you mean 'kv'?",
    "{do: pages-taken, instance: md0, share: 2, at: 0}": "share: found 2; allowed: a number",
    "{do: skew, site: c}": "site: found 'c'; allowed: a, b",
    "{do: skew, site: a, drift: 3}": "drift: found 3; allowed: a drift in millionths",
    "{do: skew, site: a, at: 1 s}": "found at; allowed: no trigger",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_plan_is_refused_with_line_and_field(text: str) -> None:
    good = "  - {do: disconnect, at: 1 s}\n"
    with pytest.raises(BadInput) as refused:
        scenario.parse(f"{SCENARIO}{good}  - {text}\n", "small.yaml")
    assert refused.value.exit_code == 2
    [problem] = refused.value.problems
    place = f"small.yaml:{LINE + 1}: faults.1"
    assert problem.startswith((f"{place}: {BAD[text]}", f"{place}.{BAD[text]}")), problem


ONE_OF_EACH = """\
  - {do: link-down, link: wan, direction: a>b, at: 0, for: 2 s}
  - {do: link-slow, link: wan, to: 1 Mbit/s, rate: 0.5/s, count: 3}
  - {do: link-long, link: wan, delay: 1 s, at: 1 s}
  - {do: jitter-storm, link: wan, jitter: 5 ms, at: 1 s}
  - {do: reset, between: [p-0, md0], purpose: control, at: 1 s}
  - {do: corrupt, kind: kv, src: p-0, dst: md0, frames: 2, at: 1 s}
  - {do: truncate, at: 1 s}
  - {do: duplicate, dst: gateway, at: 1 s}
  - {do: delay, by: 1 s, at: 1 s}
  - {do: crash, instance: p-1, memory: kept, on: {event: KVWhole, request: s0.0, nth: 2}, for: 1 s}
  - {do: pause, instance: md0, at: 1 s}
  - {do: slow, instance: md0, factor: 2.5, at: 1 s}
  - {do: step-fails, instance: md0, at: 1 s, steps: 3}
  - {do: out-of-memory, instance: md0, on: {event: Step, every: true}, count: 2}
  - {do: pages-taken, instance: rld0, share: 0.5, at: 1 s}
  - {do: cancel, session: 1, at: 1 s}
  - {do: disconnect, at: 1 s}
  - {do: slow-reader, by: 3 ms, at: 1 s}
  - {do: skew, site: b, offset: -20 ms, drift: -50 ppm}
  - {do: stale-signals, by: 1 s, at: 1 s}
  - {do: wrong-signals, factor: 0.5, instance: md0, at: 1 s}
"""


def test_a_plan_of_every_kind_is_written_out_and_read_again() -> None:
    read = scenario.parse(SCENARIO + ONE_OF_EACH, "small.yaml")
    assert {fault.do for fault in read.faults} == set(KINDS)
    again = scenario.parse(read.dump(), "again.yaml")
    assert again.faults == read.faults


# -- when they strike ------------------------------------------------------------------------------


def test_a_fault_strikes_at_its_time_and_ends_at_its_end() -> None:
    played = suffers("- {do: pause, instance: md0, at: 310 ms, for: 70 ms}")
    begin = of(played, ev.RequestSent)[0].t
    [injected], [ended] = of(played, ev.FaultInjected), of(played, ev.FaultEnded)
    assert (injected.t - begin, ended.t - begin) == (310 * MS, 380 * MS)
    assert injected.what == ended.what == "md0 neither steps nor reads"


def test_faults_at_random_strike_by_the_seed_and_as_often_as_they_may() -> None:
    text = "- {do: step-fails, instance: p0, rate: 40/s, count: 5}"
    runs = [suffers(text, Cluster(seed=seed)) for seed in (1, 1, 2)]
    times = [[e.t for e in of(played, ev.FaultInjected)] for played in runs]
    assert times[0] == times[1] != times[2]
    assert [len(t) for t in times] == [5] * 3
    assert runs[0].trace.digest == runs[1].trace.digest != runs[2].trace.digest


@pytest.mark.parametrize(
    ("on", "struck"),
    [
        ("{event: KVWhole, instance: rld0}", ["s0.0"]),
        ("{event: KVWhole, instance: rld0, nth: 3}", ["s2.0"]),
        ("{event: KVWhole, instance: rld0, request: s1.0}", ["s1.0"]),
        ("{event: KVWhole, instance: rld0, nth: 2, every: true}", ["s1.0", "s2.0", "s3.0"]),
        ("{event: KVWhole, instance: rld0, request: s9.0}", []),
        ("{event: TokensReceived, request: s3.0, start: 4}", ["s3.0"]),
    ],
)
def test_a_fault_waits_for_its_event(on: str, struck: list[str]) -> None:
    played = suffers(f"- {{do: cancel, on: {on}}}")
    hit = [r.id for r in played.records if r.detail == "cancelled by the client"]
    assert hit == struck
    assert len(of(played, ev.FaultInjected)) == len(struck)
    if "start: 4" in on:  # right behind the event that it waited for
        [e] = of(played, ev.TokensReceived, request="s3.0", start=4)
        assert of(played, ev.FaultInjected)[0].t == e.t


def test_what_finds_nothing_to_act_on_is_told_as_missed() -> None:
    played = suffers(
        "- {do: crash, instance: md0, at: 100 ms, for: 2 s}\n"
        "- {do: pause, instance: md0, at: 200 ms}\n"
        "- {do: cancel, request: s3.0, at: 0}\n"
        "- {do: reset, between: [rld0, client], at: 0}\n"
    )
    why = {e.fault: e.why for e in of(played, ev.FaultMissed)}
    assert why == {
        1: "md0 is down",
        2: "s3.0 is not under way",
        3: "there is no stream between rld0 and client",
    }


def test_what_is_in_force_at_the_end_of_the_workload_ends_there() -> None:
    """Else nothing could be given back."""
    played = suffers(
        "- {do: link-down, link: wan, at: 100 ms}\n- {do: pause, instance: md0, at: 100 ms}"
    )
    last = max(e.t for e in of(played, ev.Finished))
    assert [e.t for e in of(played, ev.FaultEnded)] == [last, last]
    assert ends(played) == ["length"] * 4, "RLD carries on alone"


# -- links -----------------------------------------------------------------------------------------


def whole_on(played: Played, instance: str, request: str = "s1.0") -> int:
    [e] = of(played, ev.KVWhole, request=request, instance=instance)
    return int(e.t)


def sources(played: Played, at: int = 1) -> str:
    return "".join(dict.fromkeys(played.records[at].sources))


def naive() -> Cluster:
    return Cluster(policy=Naive())


def test_a_link_that_is_down_one_way_stands_still_that_way_only() -> None:
    """One way MD hears of no offer while it lasts; the other it does, and cannot answer it."""
    away, back = (
        suffers(f"- {{do: link-down, link: wan, direction: {way}, at: 290 ms, for: 2 s}}")
        for way in ("a>b", "b>a")
    )
    until = of(away, ev.FaultEnded)[0].t
    assert of(away, ev.Admitted, request="s1.0", instance="md0")[0].t > until
    assert of(back, ev.Admitted, request="s1.0", instance="md0")[0].t < until
    assert not [e for e in of(back, ev.KVSent, request="s1.0", dst="md0") if e.t < until]
    assert sources(away) == sources(back) == "PR", "MD is never heard to be ready"


@pytest.mark.parametrize(
    ("fault", "later"),
    [
        ("{do: link-slow, link: wan, to: 4 Mbit/s, at: 0}", 300 * MS),
        ("{do: link-long, link: wan, delay: 115 ms, at: 0}", 200 * MS),
        ("{do: delay, kind: kv, dst: md0, by: 70 ms, at: 0}", 69 * MS),
    ],
)
def test_a_worse_way_makes_kv_later_and_changes_no_answer(fault: str, later: int) -> None:
    plain = naive().play([one("x" * 200, 20)])
    worse = suffers(f"- {fault}", naive(), [one("x" * 200, 20)])
    assert whole_on(worse, "md0", "s0.0") - whole_on(plain, "md0", "s0.0") >= later
    assert worse.records[0].ids == plain.records[0].ids


def test_jitter_moves_arrivals_and_orders_them_as_before() -> None:
    text = "- {do: jitter-storm, link: wan, jitter: 12 ms, at: 0, for: 5 s}"
    plain, stormy = (
        naive().play(many(2, 200, 20)),
        suffers(
            text,
            naive(),
            many(2, 200, 20),
        ),
    )
    assert [r.times for r in plain.records] != [r.times for r in stormy.records]
    assert ends(stormy) == ["length"] * 2


# -- streams and frames ----------------------------------------------------------------------------


def hit(played: Played) -> dict[str, list[tuple[str, str]]]:
    """The requests that lost somebody, and how they went on."""
    found = {r.id: played.went_on(r.id) for r in played.records}
    return {request: how for request, how in found.items() if how}


def test_a_reset_loses_what_went_over_it_by_name_and_is_healed() -> None:
    played = suffers("- {do: reset, between: [p0, md0], at: 340 ms}")
    assert ends(played) == ["length"] * 4
    [(request, [(then, why)])] = hit(played).items()
    assert (request, then) == ("s1.0", "alone")
    assert "p0 lost md0: the connection to md0 was reset" in why
    assert sources(played, 2) == "PRM", "KV and ids cross again"


def test_a_reset_of_one_requests_kv_concerns_no_other() -> None:
    text = "- {do: reset, on: {event: KVSent, request: s1.0, dst: md0}}"
    played = suffers(text, sessions=many(3, 200, 80))
    assert ends(played) == ["length"] * 3
    assert list(hit(played)) == ["s1.0"]


def test_who_opens_another_control_stream_has_lost_the_one_before() -> None:
    """Even where its end has not been heard of yet: what was said on it may never have come."""

    async def open_another(deployment: Deployment) -> None:
        await deployment.env.sleep(50 * MS)
        conn = await deployment.net.connect("gateway", "rld0")
        conn.post(Frame("open", {"purpose": "control"}))
        await deployment.env.sleep(10 * MS)
        conn.abort()

    sessions = many(4, 200, 80, every=300 * MS)
    played = Cluster().play(sessions, during=open_another)
    played.assert_sound()
    assert ends(played) == ["length"] * 4
    [(then, why)] = hit(played).pop("s0.0")
    assert then == "takeover"
    assert "rld0 ended the connection" in why
    assert sources(played, 3) == "PRM"


def test_a_corrupt_frame_is_refused_and_concerns_one_request() -> None:
    text = "- {do: corrupt, kind: kv, dst: md0, on: {event: Routed, request: s1.0}}"
    played = suffers(text)
    assert ends(played) == ["length"] * 4
    [(request, [(then, why)])] = hit(played).items()
    assert (request, then) == ("s1.0", "alone")
    assert "md0" in why
    assert not of(played, ev.KVReceived, request="s1.0", instance="md0")
    assert of(played, ev.FaultEnded)[0].what == "corrupt: kv from p0 to md0"


def test_a_corrupt_control_frame_ends_the_stream_which_is_opened_again() -> None:
    text = "- {do: corrupt, kind: tokens, src: rld0, on: {event: KVWhole, request: s1.0}}"
    played = suffers(text)
    assert ends(played) == ["length"] * 4
    [(request, [(then, why)])] = hit(played).items()
    assert (request, then) == ("s1.0", "takeover")
    assert "rld0" in why
    assert sources(played, 3) == "PRM"


def test_a_truncated_frame_is_never_whole_and_is_asked_for_again() -> None:
    """What comes behind it is taken for its rest: not a byte more than that, and nobody sees it."""
    text = "- {do: truncate, kind: kv, dst: md0, on: {event: Routed, request: s1.0}}"
    played = suffers(text, naive())
    assert ends(played) == ["length"] * 4
    [(request, [(then, why)])] = hit(played).items()
    assert (request, then) == ("s1.0", "again")
    assert "never came, though p0 has sent it" in why


@pytest.mark.parametrize("kind", ["kv", "first"])
def test_kv_that_comes_twice_is_taken_once(kind: str) -> None:
    """F18: each position exactly once; whoever sends twice is refused, by name, and asked again."""
    text = f"- {{do: duplicate, kind: {kind}, src: p0, on: {{event: Routed, request: s1.0}}}}"
    played = suffers(text, naive())
    assert ends(played) == ["length"] * 4
    [(request, [(then, why)])] = hit(played).items()
    assert (request, then) == ("s1.0", "again")
    assert "md0" in why


@pytest.mark.parametrize("kind", ["tokens", "answer"])
def test_ids_that_come_twice_are_one_stream(kind: str) -> None:
    """F39: at the gateway and at the client."""
    played = suffers(f"- {{do: duplicate, kind: {kind}, frames: 20, at: 0}}")
    assert of(played, ev.FaultEnded)[0].t < of(played, ev.Finished)[0].t
    assert ends(played) == ["length"] * 4


# -- instances -------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", ["p0", "rld0", "md0"])
@pytest.mark.parametrize("memory", ["lost", "kept"])
@pytest.mark.parametrize("at", [320, 341, 390, 540])
def test_an_instance_that_crashes_serves_again_when_it_is_back(
    instance: str, memory: str, at: int
) -> None:
    fault = f"do: crash, instance: {instance}, memory: {memory}, at: {at} ms, for: 100 ms"
    played = suffers(f"- {{{fault}}}", sessions=many(6, 200, 80, every=300 * MS))
    assert set(ends(played)[3:]) == {"length"}
    for r in played.records:
        assert r.finish_reason == "length" or r.detail
    assert sources(played, 5) == "PRM"
    started = of(played, ev.InstanceStarted, instance=instance)
    back = of(played, ev.InstanceReturned, instance=instance)
    assert (len(started), len(back)) == ((2, 0) if memory == "lost" else (1, 1))
    assert played.deployment.instance(instance).spec.life == (memory == "lost")


def test_who_crashed_says_nothing_and_is_told_nothing() -> None:
    played = suffers("- {do: crash, instance: md0, at: 350 ms, for: 500 ms}")
    [crashed] = of(played, ev.InstanceCrashed)
    [again] = of(played, ev.InstanceStarted, instance="md0")[1:]
    silent = [e for e in played.trace.events if crashed.t < e.t < again.t]
    assert not [e for e in silent if getattr(e, "instance", "") == "md0"]


@pytest.mark.parametrize(("memory", "hits"), [("kept", True), ("lost", False)])
def test_a_prefix_cache_outlives_a_crash_only_where_memory_is_kept(memory: str, hits: bool) -> None:
    """And the gateway's guess at it does, too: the second session asks what the first did."""
    text = f"- {{do: crash, instance: p0, memory: {memory}, at: 600 ms, for: 100 ms}}"
    known: list[int] = []

    async def look(deployment: Deployment) -> None:
        await deployment.env.sleep(1500 * MS)
        ids = deployment.gateway.tokenizer.chat("x" * 200)
        known.append(deployment.gateway.instances["p0"].memory.peek(ids))

    cluster = Cluster(plan=plan(text), deadline=20 * SECOND)
    same = [Session(i, i * 2 * SECOND, (Turn("x" * 200, 20, 0),)) for i in range(2)]
    played = cluster.play(same, during=look)
    played.assert_sound()
    assert ends(played) == ["length"] * 2
    assert (played.records[1].hits["p0"] > 100) == hits
    assert (known[0] > 100) == hits


def test_while_nobody_can_serve_requests_fail_fast_by_name() -> None:
    """F20; it never comes back, and the run ends all the same."""
    played = suffers("- {do: crash, instance: md0, at: 100 ms}")
    assert ends(played) == ["length", *["rejected"] * 3], "RLD ends what it has begun"
    assert played.records[1].detail == "no main instance can be reached"
    played = suffers(
        "- {do: crash, instance: md0, at: 100 ms}\n- {do: crash, instance: p0, at: 100 ms}\n"
        "- {do: crash, instance: rld0, at: 100 ms}"
    )
    assert ends(played) == ["aborted", *["rejected"] * 3]
    assert "lost" in played.records[0].detail
    assert played.records[3].detail == "no instance is in reach"


def test_prefill_epochs_of_another_life_are_other_epochs() -> None:
    """F1, F42: what an earlier life offered cannot be taken for what this one does."""
    played = suffers("- {do: crash, instance: p0, at: 350 ms, for: 50 ms}")
    p0: Any = played.deployment.instance("p0")
    assert p0._epochs > 1 << 32


def test_a_paused_instance_neither_steps_nor_reads() -> None:
    played = suffers("- {do: pause, instance: rld0, on: {event: KVWhole, request: s1.0}, for: 1 s}")
    begin, end = of(played, ev.FaultInjected)[0].t, of(played, ev.FaultEnded)[0].t
    assert end - begin == SECOND
    assert not [e for e in of(played, ev.StepBegan, instance="rld0") if begin < e.t < end]
    assert not [e for e in of(played, ev.KVReceived, instance="rld0") if begin < e.t < end]
    assert ends(played) == ["length"] * 4


def test_steps_of_a_slow_instance_take_longer_by_its_factor() -> None:
    played = suffers("- {do: slow, instance: rld0, factor: 2.5, at: 300 ms, for: 200 ms}")
    begin, end = of(played, ev.FaultInjected)[0].t, of(played, ev.FaultEnded)[0].t
    decodes = of(played, ev.Step, instance="rld0", sequences=1, decode_tokens=1)
    took = {begin < e.start_ns < end: e.t - e.start_ns for e in decodes}
    assert took == {False: 2100 * 1000, True: 5250 * 1000}


@pytest.mark.parametrize("do", ["step-fails", "out-of-memory"])
@pytest.mark.parametrize("instance", ["p0", "rld0", "md0"])
def test_a_step_that_fails_concerns_what_was_in_it_and_nothing_else(do: str, instance: str) -> None:
    on = f"{{event: StepBegan, instance: {instance}, nth: 3}}"
    played = suffers(f"- {{do: {do}, instance: {instance}, on: {on}}}", Cluster(max_batch=1))
    [failed] = of(played, ev.StepFailed)
    reasons = [why for how in hit(played).values() for _, why in how]
    assert reasons in ([], [f"{instance}: {failed.detail}"])
    assert len(reasons) == 1 or instance == "p0", "nobody waits for a lesson"
    assert ends(played) == ["length"] * 4


def test_a_request_waits_while_a_stranger_has_the_pages() -> None:
    text = "- {do: pages-taken, instance: p0, share: 1, at: 290 ms, for: 400 ms}"
    played = suffers(text)
    end = of(played, ev.FaultEnded)[0].t
    assert of(played, ev.FaultInjected)[0].what == "a stranger takes 64 pages of p0"
    [admitted] = of(played, ev.Admitted, instance="p0", request="s1.0")
    assert admitted.t >= end
    assert ends(played) == ["length"] * 4


# -- the client, the router, the clocks ------------------------------------------------------------


def test_a_cancel_of_a_session_ends_it_and_no_other() -> None:
    played = suffers("- {do: cancel, session: 1, at: 150 ms}", sessions=many(3, 200, 80))
    assert ends(played) == ["length", "aborted", "length"]


def test_a_client_that_loses_its_connection_is_answered_when_it_is_back() -> None:
    played = suffers("- {do: disconnect, at: 350 ms}")
    assert ends(played) == ["length", "aborted", "length", "length"]
    assert played.records[1].detail.startswith("lost the gateway")


def test_a_slow_reader_slows_nobody_but_itself() -> None:
    played = suffers("- {do: slow-reader, by: 10 ms, at: 300 ms, for: 500 ms}")
    slowed = played.records[1]
    gaps = [b - a for a, b in zip(slowed.times[:20], slowed.times[1:20], strict=False)]
    assert min(gaps) >= 10 * MS
    made = [e.t for e in of(played, ev.TokensMade, request="s1.0", instance="rld0")]
    assert made[9] - made[0] < 9 * 5 * MS


def loads(played: Played) -> int:
    """How much the router's choices between two relays differ."""
    return abs(sum(1 if r.relay == "rld0" else -1 for r in played.records))


def test_wrong_signals_herd_and_change_no_answer() -> None:
    """F45: where one relay never seems to have anything to do, it gets everything."""
    crowd, text = (
        many(16, 60, 60, every=40 * MS),
        "- {do: wrong-signals, factor: 0, instance: rld1, at: 0}",
    )
    fair = suffers("- {do: disconnect, at: 60 s}", Cluster(relays=2), crowd)
    herd = suffers(text, Cluster(relays=2), crowd)
    assert loads(herd) > loads(fair)


def test_stale_signals_come_later_by_that_much() -> None:
    def known_at(text: str) -> int:
        """When the gateway knows that P has something to do."""
        found: list[int] = []

        async def look(deployment: Deployment) -> None:
            env, p0 = deployment.env, deployment.gateway.instances["p0"]
            begin = env.now()
            while not p0.said.tokens:
                await env.sleep(MS)
            found.append((env.now() - begin) // MS)

        Cluster(plan=plan(text)).play([one("x" * 900, 5)], during=look)
        return found[0]

    straight = known_at("- {do: disconnect, at: 60 s}")
    for whose, later in (("p0", 30), ("md0", 0)):
        stale = f"- {{do: stale-signals, by: 30 ms, instance: {whose}, at: 0}}"
        assert known_at(stale) - straight == later


@pytest.mark.parametrize("drift", [0, 300_000, -300_000])
def test_clocks_that_run_apart_change_no_answer_and_no_stamp(drift: int) -> None:
    """Nobody tells another what time it is, and events keep the true time."""
    crowd = many(4, 200, 40, every=100 * MS)
    text = "\n".join(
        f"- {{do: skew, site: {site}, offset: {offset}, drift: {drift} ppm}}"
        for site, offset in (("a", "-7 s"), ("b", "3 h"))
    )
    plain, skewed = Cluster().play(crowd), suffers(text, None, crowd)
    assert [r.ids for r in skewed.records] == [r.ids for r in plain.records]
    if not drift:
        lines = [to_line(e) for e in skewed.trace.events if not isinstance(e, ev.FaultInjected)]
        assert lines == [to_line(e) for e in plain.trace.events]


def test_a_local_clock_is_never_early() -> None:
    async def main() -> None:
        env = VirtualEnv(0, Trace())
        for drift in (-999_999, -20, 0, 7, 10**6):
            local = LocalEnv(env, offset=-12_345, drift_ppm=drift)
            for wanted in (1, 999, 10**9 + 1):
                begin = local.now()
                await local.sleep_until(begin + wanted)
                assert local.now() >= begin + wanted
                assert local.local(local.true_time(local.now()) - 1) < local.now()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())


# -- the monitor -----------------------------------------------------------------------------------

STARTED = ev.InstanceStarted(0, "md0", "main", "b", 8, 16)
TAKEN = ev.PagesTaken(1, "md0", "s0.0", ((0, 3),))
TABLE = ev.PageTable(1, "md0", "s0.0", ((0, 3),), 0)
KEPT = ev.PagesKept(2, "md0", "s0.0", ((0, 2),))
FREED = ev.PagesFreed(4, "md0", "s0.0", ((2, 1),), True)
LOST = ev.InstanceCrashed(3, "md0", kept=False)
AGAIN = ev.InstanceStarted(5, "md0", "main", "b", 8, 16)


def judged(*events: Event) -> list[str]:
    found: list[Violation] = []
    monitor = Monitor(found.append)
    for event in events:
        monitor(event)
    monitor.finish()
    return [violation.name for violation in found]


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ((STARTED, TAKEN, TABLE), ["pages never came back"]),
        ((STARTED, TAKEN, TABLE, LOST), []),
        ((STARTED, TAKEN, TABLE, LOST, AGAIN, ev.PagesTaken(6, "md0", "x", ((0, 1),))), None),
        ((STARTED, TAKEN, TABLE, KEPT, LOST, FREED), ["a page freed twice"]),
        ((STARTED, TAKEN, TABLE, KEPT, FREED, ev.PoolChecked(9, "md0", 8, 6, 2)), []),
        (
            (STARTED, TAKEN, TABLE, KEPT, LOST, AGAIN, ev.PoolChecked(9, "md0", 8, 6, 2)),
            ["pool and events disagree"],
        ),
        ((STARTED, TAKEN, TABLE, KEPT, LOST, AGAIN, ev.PoolChecked(9, "md0", 8, 8, 0)), []),
        (
            (STARTED, TAKEN, TABLE, ev.InstanceCrashed(3, "md0", kept=True)),
            ["pages never came back"],
        ),
    ],
)
def test_the_books_of_an_instance_begin_anew_where_its_memory_is_lost(
    events: tuple[Event, ...], wrong: list[str] | None
) -> None:
    assert judged(*events)[:1] == (["pages never came back"] if wrong is None else wrong)


def test_a_failed_step_has_written_nothing() -> None:
    began = ev.StepBegan(2, "md0", (("s0.0", 0, 9),))
    onward = ev.StepBegan(4, "md0", (("s0.0", 9, 10),))
    ended = ev.Step(3, "md0", 2, 1, 9, 0, 0, 3)
    failed = ev.StepFailed(3, "md0", "")
    free = ev.PagesFreed(5, "md0", "s0.0", ((0, 3),), True)
    end = ev.Step(5, "md0", 4, 1, 0, 0, 1, 3)
    assert judged(STARTED, TAKEN, TABLE, began, ended, onward, end, free) == []
    assert judged(STARTED, TAKEN, TABLE, began, failed, free) == []
    lacking = judged(STARTED, TAKEN, TABLE, began, failed, onward, end, free)
    assert lacking == ["a step on KV that is not there"]


# -- everything at once ----------------------------------------------------------------------------

STORM = """\
- {do: crash, instance: p0, rate: 1/s, for: 300 ms}
- {do: crash, instance: md0, rate: 1/s, for: 300 ms, memory: kept}
- {do: reset, between: [rld0, md1], rate: 2/s}
- {do: corrupt, rate: 2/s}
- {do: truncate, kind: kv, rate: 1/s}
- {do: link-down, link: wan, rate: 1/s, for: 200 ms}
- {do: step-fails, instance: rld0, rate: 1/s}
- {do: pages-taken, instance: md1, share: 0.8, rate: 1/s, for: 500 ms}
- {do: cancel, rate: 2/s}
- {do: disconnect, rate: 0.3/s}
- {do: skew, site: b, offset: 1 s, drift: 200 ppm}
"""


def storm(seed: int) -> Played:
    cluster = Cluster(seed=seed, prefills=2, mains=2, shuffle=seed, deadline=5 * SECOND)
    return suffers(STORM, cluster, many(30, 150, 40, every=100 * MS))


@pytest.mark.parametrize("seed", range(5))
def test_in_a_storm_of_faults_every_request_ends_once_and_nothing_is_left(seed: int) -> None:
    played = storm(seed)
    assert {e.do for e in of(played, ev.FaultInjected)} >= {"crash", "corrupt", "cancel"}
    assert "length" in ends(played)
    for r in played.records:
        assert r.finish_reason in ("length", "rejected", "aborted")
        assert r.finish_reason == "length" or r.detail


def test_the_example_runs_and_everything_in_it_strikes(tmp_path: Path) -> None:
    example = scenario.load("scenarios/faults.yaml", ["workload.turns=1", "workload.rate=10/s"])
    run = Run(example, out=tmp_path / "run", verify=True)
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    requests, struck = result.summary["requests"], result.summary["faults"]
    assert requests["aborted"] > 0
    assert requests["total"] == 80 == sum(requests[k] for k in ("finished", "rejected", "aborted"))
    assert struck["planned"] == len(example.faults)
    hit = {e.fault for e in opened(run.folder).events() if isinstance(e, ev.FaultInjected)}
    assert hit == set(range(len(example.faults)))


def test_a_storm_is_the_same_for_the_same_seed() -> None:
    digest: Callable[[int], str] = lambda seed: storm(seed).trace.digest  # noqa: E731
    assert digest(1) == digest(1) != digest(2)
