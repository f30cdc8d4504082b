"""Metrics: numbers that follow from events."""

from __future__ import annotations

import json

import pytest

from pddrt import trace as ev
from pddrt.metrics import LEGS, Recorder, RequestRecord
from pddrt.summary import request_json, spread, summary
from pddrt.trace import Event, Seconds, Trace, dumps, to_line
from pddrt.types import MS

ROLES = {"p0": "prefill", "rld0": "relay", "md0": "main"}


def received(t: int, at: int, source: str) -> Event:
    return ev.TokensReceived(t * MS, "s0.0", at, at + 1, source, (at + 7,), "x")


def story() -> list[Event]:
    """A relayed request of five tokens: P, R, R, M, M. Times in ms."""
    return [
        ev.RequestSent(10 * MS, "s0.0", 0, 0, "hi"),
        ev.Routed(11 * MS, "s0.0", "P-RLD-MD", "p0", "rld0", "md0", 100, 5, 900 * MS, "why"),
        ev.Admitted(12 * MS, "s0.0", "p0", 7, 0, 0),
        ev.PrefillStarted(13 * MS, "s0.0", "p0"),
        ev.Admitted(20 * MS, "s0.0", "rld0", 7, 0, 0),
        ev.PrefillEnded(40 * MS, "s0.0", "p0"),
        ev.TokensMade(40 * MS, "s0.0", "p0", "P", 100, 101, (7,)),
        ev.KVWhole(45 * MS, "s0.0", "rld0", 100),
        ev.Released(46 * MS, "s0.0", 46 * MS),
        received(47, 0, "P"),
        received(57, 1, "R"),
        received(67, 2, "R"),
        ev.HandoffSent(70 * MS, "s0.0", "rld0", "md0", 100, 103, True, 80),
        ev.Freed(71 * MS, "s0.0", "rld0", 7),
        ev.HandoffTaken(85 * MS, "s0.0", "md0", 3, 103, True),
        received(107, 3, "M"),
        received(119, 4, "M"),
        ev.Finished(119 * MS, "s0.0", "length", 5, ""),
    ]


def record(events: list[Event]) -> tuple[Recorder, RequestRecord]:
    recorder = Recorder(ROLES)
    for event in events:
        recorder(event)
    return recorder, recorder.requests["s0.0"]


def test_ttft_is_the_sum_of_its_legs() -> None:
    _, r = record(story())
    assert r.legs == dict(zip(LEGS, (1 * MS, 2 * MS, 27 * MS, 0, 6 * MS, 1 * MS), strict=True))
    assert r.ttft == 37 * MS


def test_waiting_for_a_decoders_pages_is_a_leg_of_its_own() -> None:
    events = [e for e in story() if not (isinstance(e, ev.Admitted) and e.instance == "rld0")]
    events.insert(6, ev.Admitted(43 * MS, "s0.0", "rld0", 7, 0, 0))
    _, r = record(events)
    assert r.legs is not None
    assert (r.legs["decoder_queue"], r.legs["transfer"]) == (3 * MS, 3 * MS)


def test_a_token_that_p_released_itself_has_no_transfer() -> None:
    events = [e for e in story() if not isinstance(e, ev.KVWhole)]
    events.append(ev.KVWhole(150 * MS, "s0.0", "rld0", 100))
    _, r = record(events)
    assert r.legs is not None
    assert (r.legs["decoder_queue"], r.legs["transfer"], r.legs["delivery"]) == (0, 0, 7 * MS)


def test_the_switch_is_measured_where_the_first_m_follows() -> None:
    _, r = record(story())
    assert (r.switch, r.gap, r.gap_near) == (3, 40 * MS, 40 * MS)
    assert r.relay_busy == 26 * MS
    assert (r.handoff_ids, r.extend_tokens, r.seam.rounds) == (3, 3, 1)
    assert (r.ttst, r.tpot) == (10 * MS, 18 * MS)


def test_gap_near_sees_a_larger_gap_beside_the_switch() -> None:
    events = [received(300, 4, "M") if e == received(119, 4, "M") else e for e in story()]
    assert record(events)[1].gap_near == 193 * MS


def test_percentiles_are_nearest_rank_on_exact_times() -> None:
    s = {k: str(v) for k, v in spread(range(1, 101)).items()}
    assert s == {
        "mean": "0.000000050", "p50": "0.000000050", "p90": "0.000000090",
        "p99": "0.000000099", "max": "0.000000100",
    }  # fmt: skip
    assert spread([]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    assert str(spread([5, None])["p99"]) == "0.000000005"


def test_files_show_seconds_with_nine_decimals() -> None:
    assert str(Seconds(12_000_000_345)) == "12.000000345"
    assert str(Seconds(-5)) == "-0.000000005"
    assert dumps({"a": [Seconds(1), None, True, 'é"']}) == '{"a":[0.000000001,null,true,"é\\""]}'
    line = json.loads(to_line(story()[1]))
    assert (line["event"], line["t_s"], line["wan_estimate_s"]) == ("Routed", 0.011, 0.9)
    assert (
        json.loads(to_line(ev.Routed(0, "x", "P-MD", "p0", None, "md0", 1, 1, None, "")))[
            "wan_estimate_s"
        ]
        is None
    )


def test_the_digest_is_of_the_lines_as_written() -> None:
    one, two = Trace(), Trace()
    for event in story():
        one.emit(event)
        two.emit(event)
    assert one.digest == two.digest
    two.emit(story()[0])
    assert one.digest != two.digest


def test_a_request_line_and_a_summary_have_what_the_contract_names() -> None:
    recorder, r = record(story())
    line = json.loads(dumps(request_json(r, slo_ttft=50 * MS, slo_tpot=18 * MS)))
    assert line["token_source"] == "PRRMM"
    assert line["output_ids"] == [7, 8, 9, 10, 11]
    assert line["slo_met"] is True
    assert request_json(r, slo_ttft=36 * MS, slo_tpot=None)["slo_met"] is False
    assert line["handoff"]["gap_s"] == 0.04
    assert sum(round(v * 1e9) for v in line["ttft_legs"].values()) == round(line["ttft_s"] * 1e9)
    numbers = json.loads(dumps(summary(recorder, None, None, {})))
    assert numbers["tokens"]["by_role"] == {"prefill": 1, "relay": 2, "main": 2}
    assert numbers["handoffs"]["ids"] == 3
    assert numbers["pipelines"]["P-RLD-MD"]["requests"] == 1
    assert numbers["goodput_rps"] == pytest.approx(1 / 0.109, abs=1e-6)


def test_the_peak_of_pages_is_of_what_could_not_be_had() -> None:
    """Pages that the cache was given are nobody's; those that it has locked show in a step."""
    recorder, _ = record([e for e in story() if not isinstance(e, ev.Step)])
    recorder(ev.PagesTaken(130 * MS, "rld0", "s1.0", ((0, 4), (6, 3))))
    recorder(ev.PagesKept(131 * MS, "rld0", "s1.0", ((0, 4),)))
    recorder(ev.PagesTaken(132 * MS, "rld0", "s2.0", ((7, 2),)))
    recorder(ev.PagesFreed(133 * MS, "rld0", "s1.0", ((6, 3),), True))
    recorder(ev.PoolChecked(140 * MS, "rld0", 14, 14, 0))
    numbers = summary(recorder, None, None, {})["instances"]
    assert numbers["rld0"]["kv_peak_fraction"] == 0.5, "7 of 14, then 5"
    recorder(ev.Step(141 * MS, "rld0", 140 * MS, 1, 0, 0, 1, 9))
    numbers = summary(recorder, None, None, {})["instances"]
    assert numbers["rld0"]["kv_peak_fraction"] == round(9 / 14, 6)
