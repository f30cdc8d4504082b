"""What a handoff costs, and whom: the laws of each mode, measured in exact virtual time.

The gateway is in site a, so MD's ids cross the WAN to it: a gap at the switch holds two delays. Ids
and answers take a little of the link's rate too (`Bench.wire`); the laws speak of delays, extends
and steps only.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.metrics import RequestRecord
from pddrt.policy.handoff import Adaptive, CatchUp, OneShot, Overlap, Policy
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.seam import MainSteps, Seam
from pddrt.summary import request_json, summary
from pddrt.trace import Seconds
from pddrt.types import MS, US, Ns

from .cluster import Played
from .seamlab import DELAY, TAU, A, B, Bench, ids_bytes, relayed

THRESHOLD = 32
MODES: dict[str, Policy] = {
    "one-shot": OneShot(),
    "catch-up": CatchUp(THRESHOLD, 32, 8),
    "overlap": Overlap(THRESHOLD, 32, 8),
}


@cache
def measured(mode: str) -> tuple[Bench, Played, RequestRecord]:
    bench = Bench(MODES[mode])
    played = bench.play()
    r = relayed(played)
    assert r.seam.mode == mode
    return bench, played, r


def extend(ids: int) -> Ns:
    return A + B * ids


# -- gaps ------------------------------------------------------------------------------------------


def test_one_shot_shows_two_delays_the_extend_over_all_ids_and_at_most_one_running_step() -> None:
    bench, _, r = measured("one-shot")
    assert r.gap is not None
    law = 2 * DELAY + extend(r.seam.ids)
    assert law <= r.gap <= law + A + bench.wire(r)
    assert r.seam.ids > 130
    assert r.gap_near == r.gap


def test_catch_up_shows_two_delays_the_extend_over_the_threshold_and_at_most_one_step() -> None:
    bench, _, r = measured("catch-up")
    assert r.gap is not None
    last = r.seam.ids_per_round[-1]
    assert 0 < last <= THRESHOLD
    assert 2 * DELAY + A <= r.gap <= 2 * DELAY + extend(THRESHOLD) + A + bench.wire(r)
    assert r.seam.extend_tokens == r.seam.ids == 1 + r.sources.count("R"), "each id once"


@pytest.mark.parametrize("share", [0.8, 0.6, 0.3])
@pytest.mark.parametrize("delay", [2 * MS, 15 * MS, 40 * MS])
def test_overlap_shows_no_gap_where_the_main_is_the_faster_stepper(share: float, delay: Ns) -> None:
    """Most ids are the relay's here, so the median is its step time."""
    bench = Bench(MODES["overlap"], a=int(share * TAU), delay=delay, max_tokens=250)
    r = relayed(bench.play())
    assert r.seam.mode == "overlap"
    assert r.seam.ended == "the main decoder is first"
    assert r.sources.count("M") > 10
    middle = median(r.itls)
    assert abs(middle - TAU) <= US
    assert max(r.itls) <= 1.2 * middle


def test_overlap_falls_back_to_catch_up_where_the_main_steps_slower() -> None:
    bench = Bench(MODES["overlap"], a=TAU * 12 // 10, others=1)
    r = relayed(bench.play())
    assert (r.seam.policy, r.seam.mode) == ("overlap", "catch-up")
    assert r.seam.ended == "within the threshold"


def test_overlap_ends_at_its_bound_where_nobody_knew_that_the_main_steps_slower() -> None:
    bench = Bench(Overlap(THRESHOLD, 10, 3), a=TAU * 12 // 10, others=0)
    r = relayed(bench.play())
    assert (r.seam.mode, r.seam.ended) == ("overlap", "the bound")
    assert r.sources.count("R") + 1 == r.seam.lacking[0] - 1 + 30, "of the 30 it may make"
    assert r.gap is not None
    assert r.gap > 2 * DELAY


def test_the_relay_is_busy_least_with_one_shot_and_longest_with_overlap() -> None:
    busy = [measured(mode)[2].relay_busy or 0 for mode in MODES]
    assert 0 < busy[0] < busy[1] < busy[2]


# -- the others ------------------------------------------------------------------------------------


def test_others_feel_one_large_extend_and_hardly_feel_bounded_ones() -> None:
    for mode, at_most in (("catch-up", 1.5), ("overlap", 1.5)):
        _, played, r = measured(mode)
        steps = played.recorder.main_steps
        assert set(steps.quiet) == {A}
        assert max(steps.beside) == r.seam.others_itl_max
        assert A < max(steps.beside) <= at_most * A
    _, played, r = measured("one-shot")
    assert r.seam.others_itl_max == max(played.recorder.main_steps.beside) == extend(r.seam.ids)
    assert extend(r.seam.ids) > 1.5 * A


def test_gaps_of_others_are_told_apart_by_whose_extend_lay_in_them() -> None:
    steps = MainSteps({"x": 100, "y": 10}.get)

    def step(t: int, *spans: tuple[str, int, int]) -> None:
        steps.began(ev.StepBegan((t - 5) * MS, "md0", spans))
        steps.ended(ev.Step(t * MS, "md0", (t - 5) * MS, len(spans), 0, 0, 0, 0))

    def made(t: int, request: str, at: int) -> None:
        steps.made(ev.TokensMade(t * MS, request, "md0", "M", at, at + 1, (1,)))

    step(5, ("y", 10, 11))
    made(5, "y", 11)
    step(10, ("y", 11, 12), ("x", 0, 100))  # a prompt is no extend
    made(10, "y", 12)
    step(20, ("y", 12, 13), ("x", 100, 140))
    made(20, "y", 13)
    made(20, "x", 140)
    step(27, ("y", 13, 14), ("x", 140, 145))  # it follows, and y waits beside it
    made(27, "y", 14)
    made(27, "x", 145)
    step(30, ("y", 14, 15))
    steps.stopped("y")
    step(40, ("y", 14, 15))
    made(40, "y", 15)
    assert (list(steps.quiet), list(steps.beside)) == ([5 * MS], [10 * MS, 7 * MS])
    assert steps.worst == {"x": 10 * MS}


# -- convergence -----------------------------------------------------------------------------------


def catching_up(threshold: int, delay: Ns, a: Ns, b: Ns, tau: Ns, lacking: int) -> Seam:
    handoff = CatchUp(threshold, 10_000, 6)
    bench = Bench(
        handoff, lacking, others=0, tau=tau, a=a, b=b, delay=delay, max_tokens=lacking + 400
    )
    return relayed(bench.play()).seam


def fixed_point(delay: Ns, a: Ns, b: Ns, tau: Ns) -> float:
    """k* = (2 d + a) / (tau - b)"""
    return (2 * delay + a) / (tau - b)


GRID = [
    (delay, a, b, tau)
    for delay, a, tau in product((5 * MS, 30 * MS), (6 * MS, 21 * MS), (10 * MS, 17 * MS))
    for b in (tau // 20, tau // 4, tau // 2)
]


@pytest.mark.parametrize(("delay", "a", "b", "tau"), GRID)
def test_catch_up_converges_within_four_rounds_and_ends_by_its_bound_below_it(
    delay: Ns, a: Ns, b: Ns, tau: Ns
) -> None:
    """A round leaves b / tau of the distance: from some 10 ids away for b = tau / 2, 40 else."""
    expected = fixed_point(delay, a, b, tau)
    start = round(expected) + (4 if b == tau // 2 else 34)
    seam = catching_up(0, delay, a, b, tau, start)
    assert seam.lacking[0] > expected + 5
    assert abs(seam.lacking[4] - expected) <= 2, seam.lacking
    assert min(seam.lacking) >= expected - 2
    assert seam.ended in ("does not converge", "the last round")
    seam = catching_up(round(expected) + 2, delay, a, b, tau, start)
    assert seam.ended == "within the threshold"
    assert seam.rounds - 1 <= 4, "the last one freezes the relay"


@pytest.mark.parametrize("b", [TAU, 2 * TAU])
def test_where_an_id_costs_the_main_more_than_the_relay_it_ends_by_its_bound(b: Ns) -> None:
    seam = catching_up(8, DELAY, A, b, TAU, 20)
    assert seam.ended == "does not converge"
    assert seam.lacking == sorted(seam.lacking)
    assert len(seam.lacking) == 3


def test_the_prediction_is_made_from_what_the_relay_was_told() -> None:
    """The second of two: by then the main decoder has been seen to extend."""
    r = measured("catch-up")[2]
    assert r.seam.expected == 4, "(30 + 8 - 0.1) / (10 - 0.1), before anything was extended over"
    assert r.seam.lacking[0] > 64


# -- what is reported ------------------------------------------------------------------------------


def test_only_ids_cross_at_a_handoff_and_a_hundred_of_them_cost_less_than_1500_bytes() -> None:
    _, played, r = measured("one-shot")
    assert r.seam.ids > 100
    assert 4 * r.seam.ids < r.seam.wire_bytes <= 1500
    assert r.seam.wire_bytes == ids_bytes(played)
    for mode in ("catch-up", "overlap"):
        _, played, r = measured(mode)
        assert r.seam.wire_bytes == ids_bytes(played)


def test_a_request_and_a_summary_tell_the_handoff() -> None:
    _, played, r = measured("catch-up")
    told = request_json(r, None, None)
    handoff = told["handoff"]
    assert handoff["mode"] == handoff["policy"] == "catch-up"
    assert handoff["rounds"] == len(handoff["ids_per_round"]) == len(handoff["lacking"])
    assert handoff["ids"] == sum(handoff["ids_per_round"])
    assert told["wan_bytes"]["ids"] == r.seam.wire_bytes
    numbers = summary(played.recorder, None, None, {})
    assert numbers["handoffs"] == {
        "count": 1,
        "one_shot": 0,
        "catch_up": 1,
        "overlap": 0,
        "unfinished": 0,
        "rounds": r.seam.rounds,
        "ids": r.seam.ids,
        "wire_bytes": r.seam.wire_bytes,
    }
    quiet = numbers["main_itl_s"]["quiet"]["max"]
    assert isinstance(quiet, Seconds)
    assert quiet.ns == A


def test_adaptive_counts_as_what_it_did() -> None:
    for lacking, mode in ((40, "one-shot"), (150, "catch-up")):
        r = relayed(Bench(Adaptive(64, 32, 8), lacking).play())
        assert (r.seam.policy, r.seam.mode) == ("adaptive", mode)
        assert r.seam.ended == "within the threshold at the relay's load"


# -- the page --------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "handoff.md").read_text()


def shipped(mode: str, out: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and handoffs of scenarios/handoff.yaml."""
    text = (ROOT / "scenarios" / "handoff.yaml").read_text()
    run = Run(
        parse(text, str(out.parent / "x.yaml"), (f"handoff.mode={mode}", *overrides)), out=out
    )
    run.prepare()
    run.execute().raise_for_status()
    lines = (out / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    handoffs = [{**r["handoff"], "wire": r["wan_bytes"]["ids"]} for r in requests if r["handoff"]]
    return json.loads((out / "summary.json").read_text()), handoffs


@pytest.mark.parametrize("mode", ["one-shot", "catch-up", "adaptive", "overlap"])
def test_the_table_on_the_page_is_what_the_scenario_gives(mode: str, tmp_path: Path) -> None:
    summary, handoffs = shipped(mode, tmp_path / "run")

    def mean(name: str) -> float:
        return float(sum(h[name] for h in handoffs) / len(handoffs))

    row = [
        mode,
        f"{1000 * summary['handoff_gap_s']['mean']:.1f}",
        f"{1000 * summary['handoff_gap_s']['max']:.1f}",
        f"{1000 * summary['main_itl_s']['beside_extend']['max']:.1f}",
        f"{1000 * mean('relay_busy_s'):.1f}",
        f"{mean('rounds'):.1f}",
        f"{mean('ids'):.1f}",
        f"{mean('wasted_tokens'):.1f}",
        f"{mean('wire'):.0f}",
    ]
    assert f"| {' | '.join(row)} |" in PAGE


def test_the_policy_on_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PAGE.split("```python\n")[1].split("```")[0])
    _, handoffs = shipped("mine:Nearly", tmp_path / "run", "workload.requests=6")
    assert handoffs
    assert {h["policy"] for h in handoffs} == {"mine:Nearly"}
    assert {h["mode"] for h in handoffs} == {"overlap"}
    assert all(h["ids_per_round"][0] == 16 for h in handoffs)
