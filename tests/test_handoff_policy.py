"""Handoff policies: those that are here, on paper; those of one's own, in a scenario."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pddrt.errors import RunFailed
from pddrt.policy.handoff import (
    MODES,
    Adaptive,
    CatchUp,
    Decision,
    Facts,
    Finish,
    Follow,
    OneShot,
    Overlap,
    Piece,
    equilibrium,
    name_of,
    patience,
)
from pddrt.run import Result, Run
from pddrt.scenario import parse
from pddrt.types import MS, SECOND, US

from .cluster import oracle
from .test_handoff import handed_over

FACTS = Facts(
    lacking=100,
    before=(),
    left=500,
    step=10 * MS,
    main_step=8 * MS,
    main_token=100 * US,
    round_trip=30 * MS,
    pressure=0.2,
)


# -- policies on paper -----------------------------------------------------------------------------


def test_the_fixed_point_is_two_delays_and_a_step_over_what_the_relay_gains() -> None:
    assert equilibrium(FACTS) == 4, "(30 + 8 - 0.1) / (10 - 0.1), rounded up"
    assert equilibrium(replace(FACTS, main_token=10 * MS, main_step=11 * MS)) is None, "b >= tau"
    assert equilibrium(replace(FACTS, step=0)) is None, "nobody knows"
    assert equilibrium(replace(FACTS, main_step=0)) is None, "nobody knows"


def test_an_answer_is_overdue_after_four_rounds_but_not_within_a_second() -> None:
    assert patience(FACTS, 32) == SECOND
    slow = replace(FACTS, main_step=300 * MS, main_token=10 * MS)
    assert patience(slow, 32) == 4 * (30 + 290 + 320) * MS


def test_one_shot_finishes_whatever_is_lacking() -> None:
    assert OneShot().decide(FACTS) == Finish("one-shot")


@pytest.mark.parametrize(
    ("lacking", "before", "decision"),
    [
        (65, (), Piece(32)),
        (64, (), Finish("within the threshold")),
        (64, (100, 80), Finish("within the threshold")),
        (80, (100, 90), Piece(32)),
        (90, (100, 90), Piece(32)),  # once is no sign: an extend of another's may have lain in it
        (90, (90, 90), Finish("does not converge")),
        (91, (80, 90), Finish("does not converge")),
        (91, (90,), Piece(32)),
        (65, (100,) * 2 + (90, 80, 70, 69, 68, 67), Finish("the last round")),
    ],
)
def test_catch_up_sends_pieces_until_the_rest_is_small_or_does_not_shrink(
    lacking: int, before: tuple[int, ...], decision: Decision
) -> None:
    facts = replace(FACTS, lacking=lacking, before=before)
    assert CatchUp(64, 32, 8).decide(facts) == decision


@pytest.mark.parametrize(
    ("lacking", "pressure", "finishes"),
    [(64, 0.0, True), (65, 0.0, False), (128, 0.5, True), (129, 0.5, False), (10_000, 1.0, True)],
)
def test_adaptive_raises_the_threshold_with_the_relays_load(
    lacking: int, pressure: float, finishes: bool
) -> None:
    decision = Adaptive(64).decide(replace(FACTS, lacking=lacking, pressure=pressure))
    assert isinstance(decision, Finish if finishes else Piece)


@pytest.mark.parametrize(
    ("main_step", "follows"), [(8, True), (0, True), (95, False), (10, False), (12, False)]
)
def test_overlap_follows_only_a_main_that_can_pass_within_the_bound(
    main_step: float, follows: bool
) -> None:
    """At 9.5 ms it gains 0.5 ms a step: the 49.4 ms of the first round are 99 of 96 steps."""
    facts = replace(FACTS, main_step=int((9.5 if main_step == 95 else main_step) * MS))
    decision = Overlap(64, 12, 8).decide(facts)
    assert decision == (Follow(96) if follows else Piece(12))
    assert isinstance(Overlap(64, 32, 8).decide(replace(facts, before=(120,))), Piece)


def test_a_mode_has_the_name_that_a_scenario_knows_and_a_policy_of_ones_own_its_class() -> None:
    assert [name_of(kind()) for kind in MODES.values()] == list(MODES)
    assert name_of(Patient(3)) == "tests.test_handoff_policy:Patient"


# -- policies of one's own -------------------------------------------------------------------------


@dataclass(frozen=True)
class Patient:
    """Pieces first, then both."""

    pieces: int = 2

    def decide(self, facts: Facts) -> Decision:
        return Piece(4) if facts.rounds < self.pieces else Follow(60)


class Stingy:
    def decide(self, facts: Facts) -> Decision:
        return Piece(0)


class Silent:
    def decide(self, facts: Facts) -> Decision:
        return None  # type: ignore[return-value]


def test_a_policy_may_send_pieces_first_and_then_let_the_main_follow() -> None:
    played = handed_over(Patient(2))
    (r,) = played.records
    assert r.ids == oracle(r.prompt_ids, 160)
    assert r.seam.mode == "overlap"
    assert r.seam.pieces == 2
    assert r.seam.ids_per_round[:2] == [4, 4]
    assert r.seam.extend_tokens < r.seam.ids, "what was sent ahead is not extended over again"


SCENARIO = """
name: own
clock: virtual
model: tiny
links:
  rdma: {between: [a, a]}
  wan:  {between: [a, b], rate: 200 KB/s, delay: 15 ms}
instances:
  p0:   {role: prefill, site: a, engine: model, step_time: &slow
         {prefill_tokens_per_s: 10000, decode_step: 10 ms}}
  rld0: {role: relay, site: a, engine: model, step_time: *slow}
  md0:  {role: main, site: b, engine: model, step_time:
         {prefill_tokens_per_s: 10000, decode_step: 6 ms}}
pipeline: {relay_above: 1 ms}
handoff: {mode: MODE, threshold: 6, max_ids_per_round: 8, max_rounds: 9}
workload: {kind: poisson, requests: 1, rate: 1/s, output_tokens: 90, prompts: random,
           prompt_tokens: 300}
"""


def run(mode: str, folder: Path) -> Result:
    prepared = Run(parse(SCENARIO.replace("MODE", mode), "x.yaml", ()), out=folder)
    prepared.prepare()
    return prepared.execute()


@pytest.mark.parametrize(
    "mode", ["one-shot", "catch-up", "adaptive", "overlap", "tests.test_handoff_policy:Patient"]
)
def test_a_scenario_names_its_policy_and_bounds(mode: str, tmp_path: Path) -> None:
    result = run(mode, tmp_path / "run")
    result.raise_for_status()
    (line,) = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    handoff = json.loads(line)["handoff"]
    assert handoff["policy"] == mode
    assert handoff["mode"] == {
        "adaptive": "catch-up", "tests.test_handoff_policy:Patient": "overlap",
    }.get(mode, mode)  # fmt: skip
    if handoff["mode"] == "catch-up":
        assert max(handoff["ids_per_round"]) == 8
        assert handoff["ids_per_round"][-1] <= 6


def test_what_is_no_decision_ends_the_run_by_the_users_class_and_line(tmp_path: Path) -> None:
    for mode, why in (("Silent", "Silent.decide"), ("Stingy", "found Piece(0)")):
        with pytest.raises(RunFailed, match=r"test_handoff_policy\.py:\d+") as caught:
            run(f"tests.test_handoff_policy:{mode}", tmp_path / mode).raise_for_status()
        assert why in str(caught.value)
