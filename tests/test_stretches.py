"""Where the time of a request went when things went wrong on its way, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pddrt import recording
from pddrt import trace as ev
from pddrt.metrics import Recorder
from pddrt.report import slowness
from pddrt.report.reasons import Reasons, story
from pddrt.report.slowness import Judge
from pddrt.report.stretches import stretches
from pddrt.report.suffering import Hit, Suffering
from pddrt.report.timeline import Timeline
from pddrt.trace import Event
from pddrt.types import MS, Ns

from .recordings import paced, stormy

ROLES = {"p0": "prefill", "p1": "prefill", "r0": "relay", "r1": "relay", "m0": "main", "m1": "main"}


def at(milliseconds: float) -> Ns:
    return round(milliseconds * MS)


def told(events: Iterable[Event]) -> tuple[Recorder, Timeline]:
    """Two datacenters, a (P, RLD and the gateway) and b (MD), and what happened there."""
    recorder, timeline = Recorder(dict(ROLES)), Timeline()
    timeline.home = "a"
    first: list[Event] = [
        ev.InstanceStarted(0, name, role, "b" if role == "main" else "a", 100, 16)
        for name, role in ROLES.items()
    ]
    first += [ev.LinkRate(0, "rdma", ("a", "a"), 10**9), ev.LinkRate(0, "wan", ("a", "b"), 10**7)]
    for event in (*first, *sorted(events, key=lambda e: e.t)):
        recorder(event)
        timeline(event)
    return recorder, timeline


def sent(t: float = 0) -> Event:
    return ev.RequestSent(at(t), "s0.0", 0, 0, "a prompt")


def routed(t: float, attempt: str = "s0.0", way: Sequence[str] = ("p0", "r0", "m0")) -> Event:
    return ev.Routed(at(t), attempt, "P-RLD-MD", *way, 30, 8, None, "")


def prefilled(start: float, end: float, p: str = "p0", attempt: str = "s0.0") -> list[Event]:
    return [ev.PrefillStarted(at(start), attempt, p), ev.PrefillEnded(at(end), attempt, p)]


def got(makers: str, *times: float, start: int = 0) -> list[Event]:
    found: list[Event] = []
    for i, (maker, t) in enumerate(zip(makers, times, strict=True), start):
        if not i:
            found.append(ev.Released(at(t) - 1, "s0.0", at(t) - 1))
        found.append(ev.TokensReceived(at(t), "s0.0", i, i + 1, maker, (7,), "x"))
    return found


def ended(t: float) -> Event:
    return ev.Finished(at(t), "s0.0", "length", 8, "")


def down(start: float, end: float, way: tuple[str, str], fault: int = 0) -> list[Event]:
    what = f"wan {'>'.join(way)} is down"
    return [
        ev.LinkRate(at(start), "wan", way, 0, one_way=True),
        ev.LinkRate(at(end), "wan", way, 10**7, one_way=True),
        ev.FaultInjected(at(start), fault, 1, "link-down", what),
        ev.FaultEnded(at(end), fault, 1, "link-down", what),
    ]


def laid(recorder: Recorder, timeline: Timeline) -> list[tuple[str, float, float]]:
    """In milliseconds; what is a nanosecond long is left out."""
    found = stretches(recorder.requests["s0.0"], timeline)
    assert [b for _, _, b in found[:-1]] == [a for _, a, _ in found[1:]], "no gap, no overlap"
    return [(part, a / MS, b / MS) for part, a, b in found if b - a > 1]


def cut_before_the_first_token() -> list[Event]:
    why = "p0 lost r0: the connection to r0 was reset on the way"
    return [
        sent(), routed(1), *prefilled(3, 30),
        ev.Rerouted(at(32), "s0.0", "r0", "takeover", "m0", why),
        ev.Retried(at(60), "s0.0", 1, "p0 lost m0: the connection to m0 was reset on the way", 0),
        routed(60, "s0.0~1", ("p1", "r1", "m0")), *prefilled(64, 90, "p1", "s0.0~1"),
        ev.KVWhole(at(95), "s0.0~1", "r1", 30), *got("PR", 100, 102), ended(102),
    ]  # fmt: skip


def cut_after_three_tokens() -> list[Event]:
    return [
        sent(), routed(1), *prefilled(1, 10), *got("PRR", 12, 14, 16),
        ev.Rerouted(at(70), "s0.0", "m0", "alone", None, "gateway lost m0: it ended"),
        ev.Retried(at(90), "s0.0", 1, "r0 has let it go", 3),
        routed(90, "s0.0~1", ("p1", "r1", "m1")), *prefilled(92, 120, "p1", "s0.0~1"),
        *got("PR", 124, 126, start=3), ended(127),
    ]  # fmt: skip


# -- where the time went ---------------------------------------------------------------------------


def test_a_lost_attempt_is_no_queue() -> None:
    recorder, timeline = told(cut_before_the_first_token())
    legs = recorder.requests["s0.0"].legs
    assert legs is not None
    assert legs["prefill_queue"] == at(63), "so requests.jsonl has it"
    assert laid(recorder, timeline) == [
        ("gateway", 0, 1),
        ("lost", 1, 60),
        ("prefill_queue", 60, 64),
        ("prefill", 64, 90),
        ("transfer", 90, pytest.approx(100, abs=1e-5)),
        ("relay_decode", 100, 102),
    ]


def test_waiting_for_another_attempt_is_no_decoding() -> None:
    recorder, timeline = told(cut_after_three_tokens())
    parts = laid(recorder, timeline)
    assert parts[parts.index(("relay_decode", 12, 16)) :] == [
        ("relay_decode", 12, 16),
        ("lost", 16, 90),
        ("prefill_queue", 90, 92),
        ("prefill", 92, 120),
        ("transfer", 120, 124),
        ("relay_decode", 124, 126),
        ("ending", 126, 127),
    ]


def test_until_a_main_decoder_has_taken_over_from_a_lost_relay_nobody_decodes() -> None:
    recorder, timeline = told(
        [
            sent(), routed(0), *prefilled(1, 10),
            ev.Rerouted(at(11), "s0.0", "r0", "takeover", "m0", "p0 lost r0"),
            *got("P", 12), ev.TakenOver(at(50), "s0.0", "m0", 1, 31), *got("M", 60, start=1),
        ]
    )  # fmt: skip
    assert laid(recorder, timeline)[-2:] == [("lost", 12, 50), ("main_decode", 50, 60)]


@pytest.mark.parametrize("way", [("b", "a"), ("a", "b")])
def test_tokens_that_wait_for_a_link_are_not_being_decoded(way: tuple[str, str]) -> None:
    recorder, timeline = told(
        [sent(), routed(0), *prefilled(1, 10), *got("PMM", 12, 20, 90), *down(22, 70, way)]
    )
    parts = laid(recorder, timeline)[-3:]
    if way == ("b", "a"):
        assert parts == [("main_decode", 12, 22), ("outage", 22, 70), ("main_decode", 70, 90)]
    else:
        assert parts[-1] == ("main_decode", 12, 90), "nothing of it went that way"


def test_a_token_that_came_during_an_outage_had_not_waited_for_it() -> None:
    recorder, timeline = told(
        [sent(), routed(0), *prefilled(1, 10), *got("PMM", 12, 30, 34), *down(22, 70, ("b", "a"))]
    )
    assert laid(recorder, timeline)[-1] == ("main_decode", 12, 34)


def test_each_of_many_outages_is_one() -> None:
    many = [e for i in range(30) for e in down(100 + 20 * i, 105 + 20 * i, ("b", "a"))]
    _, timeline = told(many)
    assert timeline.down(("b", "a")) == [(at(100 + 20 * i), at(105 + 20 * i)) for i in range(30)]
    assert timeline.down(("a", "b")) == []


def test_one_that_got_no_token_is_told_as_far_as_it_came() -> None:
    recorder, timeline = told([sent(), routed(1), *prefilled(3, 9), ended(20)])
    assert laid(recorder, timeline) == [
        ("gateway", 0, 1),
        ("prefill_queue", 1, 3),
        ("prefill", 3, 9),
        ("no_token", 9, 20),
    ]


@pytest.mark.parametrize("run", [stormy, paced])
def test_without_trouble_the_parts_are_those_of_requests_jsonl(run: object, tmp_path: Path) -> None:
    assert callable(run)
    read = recording.opened(run(tmp_path / "run"))
    recorder, timeline = Recorder(read.roles()), Timeline()
    for event in read.events():
        recorder(event)
        timeline(event)
    timeline.home = read.home
    judge = Judge(list(read.rows.values()), recorder.requests, timeline)
    plain = 0
    for name, row in read.rows.items():
        of, by_row = judge.parts[name], slowness.parts(row)
        assert sum(of.values()) == sum(by_row.values()), name
        if not of["lost"] and not of["outage"]:
            assert {k: v for k, v in of.items() if v} == {k: v for k, v in by_row.items() if v}
            plain += 1
    assert plain > 3


# -- what is said of it ----------------------------------------------------------------------------


def why(events: Iterable[Event], part: str) -> tuple[str, str]:
    recorder, timeline = told(events)
    record = recorder.requests["s0.0"]
    said = Reasons(recorder.requests, timeline).of(record, part, stretches(record, timeline))
    return said.because, said.also


def test_an_attempt_that_was_cut_is_told_with_its_way_and_its_successor() -> None:
    because, _ = why(cut_before_the_first_token(), "lost")
    assert because == (
        "attempt 1, by way of p0 > r0 > m0, was cut at 0.032 s (p0 lost r0: the connection to r0 "
        "was reset on the way); attempt 2, by way of p1 > r1 > m0, began at 0.060 s: the prompt "
        "went through prefill again"
    )
    because, _ = why([*cut_after_three_tokens(), *down(20, 60, ("b", "a"))], "lost")
    assert "wan b>a was down for 40 ms of that" in because
    assert "the prompt and the 3 tokens that there were went through prefill again" in because
    assert "fault: wan b>a is down" in because
    _, timeline = told(cut_after_three_tokens())
    assert story(timeline.attempts("s0.0")).startswith("attempt 1, by way of p0 > r0 > m0, was cut")


FAULTS = {
    "m1 stops, memory lost": "crash",
    "m0 stops, memory kept": "crash",
    "the user cancels s7.0": "cancel",
    "corrupt: kv from p0 to m0": "corrupt",
    "clocks at b run apart": "skew",
    "steps of r0 take 4 times as long": "slow",
    "wan a>b carries 1 Mbit/s": "link-slow",
    "wan has a delay of 90 ms": "link-long",
}


@pytest.mark.parametrize(
    ("part", "touching"),
    [
        ("main_decode", {"m0 stops, memory kept", "wan has a delay of 90 ms"}),
        ("relay_decode", {"steps of r0 take 4 times as long"}),
        ("prefill", set()),
    ],
)
def test_only_faults_that_touch_a_part_are_its_reason(part: str, touching: set[str]) -> None:
    """All are in effect all the time."""
    events = [sent(1), routed(1), *prefilled(2, 10), *got("PRRMM", 12, 14, 16, 18, 20), ended(20)]
    events += [
        ev.FaultInjected(0, i, 1, do, what) for i, (what, do) in enumerate(FAULTS.items())
    ] + [ev.FaultEnded(at(50), i, 1, do, what) for i, (what, do) in enumerate(FAULTS.items())]
    because, also = why(events, part)
    for what in FAULTS:
        assert (what in because) == (what in touching), what
        assert (what in also) == (what not in touching), what


def hits(events: Sequence[Event], do: str) -> list[Hit]:
    recorder, timeline = told(events)
    home = recorder.requests["s0.0"]
    of = {"s0.0": [(p, a - home.sent, b - home.sent) for p, a, b in stretches(home, timeline)]}
    (fault,) = [f for f in timeline.faults.values() if f.do == do]
    return Suffering(recorder.requests, of, timeline).of(fault)


def test_whom_a_fault_hit() -> None:
    def crash(name: str) -> list[Event]:
        return [ev.FaultInjected(at(60), 3, 1, "crash", f"{name} stops, memory lost")]

    events = cut_after_three_tokens()
    assert hits([*events, *crash("m0")], "crash") == [Hit("s0.0", "tried again")]
    assert hits([*events, *crash("m1")], "crash") == []
    assert hits([*events, *down(20, 60, ("b", "a"))], "link-down") == [Hit("s0.0", "tried again")]
    calm = [sent(), routed(0), *prefilled(1, 10), *got("PMM", 12, 20, 90)]
    assert hits([*calm, *down(22, 70, ("b", "a"))], "link-down") == [Hit("s0.0", "waited")]
    assert hits([*calm, *down(22, 70, ("a", "b"))], "link-down") == []
    user = [ev.FaultInjected(at(30), 0, 1, "cancel", "the user cancels s0.0")]
    assert hits([*calm, *user], "cancel") == [Hit("s0.0", "cancelled")]
    slow = "steps of m0 take 4 times as long"
    slowed = [
        ev.FaultInjected(at(30), 0, 1, "slow", slow),
        ev.FaultEnded(at(50), 0, 1, "slow", slow),
    ]
    assert hits([*calm, *slowed], "slow") == [Hit("s0.0", "slowed")]
    frame = "corrupt: kv from p0 to m0"
    corrupt = [ev.FaultInjected(at(60), 0, 1, "corrupt", frame),
               ev.FaultEnded(at(69), 0, 1, "corrupt", frame)]  # fmt: skip
    assert hits([*events, *corrupt], "corrupt") == [], "the reason does not name both"
    assert hits([*cut_before_the_first_token(), ev.FaultInjected(at(31), 0, 1, "reset",
                "1 streams with KV of s0.0 are cut (to r0)")], "reset") == [
        Hit("s0.0", "tried again")]  # fmt: skip
