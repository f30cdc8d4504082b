"""The swarm under faults, by seed (`scripts/swarm` plays thousands); cases that failed once; and
that the swarm itself works: planted bugs are found, cases are read back, failing ones made small.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pddrt.faults import KINDS
from pddrt.trace import Rerouted, Retried
from pddrt.types import SECOND

from . import fleet
from .coverage import HANDOFF, PHASES, Coverage
from .kept import KeptTrace
from .misfortunes import GENTLE
from .mutants import MUTANTS
from .shrink import shrink
from .swarm import ROUGH, Case, draw, failure, manner, play
from .swarm_cli import hunt, main

SEEDS = range(50)
REGRESSIONS = yaml.safe_load((Path(__file__).parent / "regressions.yaml").read_text())


@cache
def covered(seed: int) -> Coverage:
    """What a seed's faults hit; everything that must hold is checked by the way."""
    case, trace, coverage = draw(seed), KeptTrace(), Coverage()
    play(case, trace)
    coverage.add(case, trace.events)
    return coverage


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_befalls_a_cluster_nothing_is_lost(seed: int) -> None:
    assert covered(seed).ends


CALM: dict[str, Any] = {
    **dict.fromkeys(("faults", "changes"), ()),
    **dict.fromkeys(("ghosts", "stranger"), 0),
    **dict.fromkeys(("shed_after", "max_requests")),
    **{"silent": False, "deadline": 60 * SECOND},
}


@pytest.mark.parametrize("seed", range(100, 115))
def test_where_nothing_befalls_it_every_request_has_its_whole_answer(seed: int) -> None:
    played = play(replace(draw(seed), **CALM))
    assert {r.finish_reason for r in played.records} <= {"length", "stop"}
    assert not played.events(Retried)
    assert not played.events(Rerouted)


@pytest.mark.parametrize("seed", range(200, 208))
def test_a_stranger_spoils_no_answer_and_ends_no_request(seed: int) -> None:
    """Whatever it says of whichever request: it has no part in any."""
    played = play(replace(draw(seed), **{**CALM, "stranger": 60}))
    assert {r.finish_reason for r in played.records} <= {"length", "stop"}
    assert not played.events(Retried)
    assert not played.events(Rerouted)


@pytest.mark.parametrize("old", REGRESSIONS, ids=lambda old: str(old["was"])[:60])
def test_what_failed_once_does_not_fail_again(old: dict[str, Any]) -> None:
    play(Case.parse(yaml.safe_dump(old["case"])))


def test_the_seeds_cover_kinds_phases_and_handoffs() -> None:
    """Else they say little."""
    total = Coverage()
    for seed in SEEDS:
        total.merge(covered(seed))
    assert total.seeds == len(SEEDS)
    assert sum(bool(total.faults[kind]) for kind in KINDS) >= len(KINDS) - 2
    missed = [phase for phase in PHASES if not total.handoffs_hit[phase]]
    assert len(missed) <= 3, missed
    assert any(total.handoffs_hit[phase] for phase in HANDOFF)
    assert {"one-shot", "catch-up", "adaptive", "overlap"} <= total.handoffs.keys()
    assert total.ends["length"] > sum(total.ends.values()) / 2
    assert len(total.table().splitlines()) > len(KINDS)


def test_every_kind_of_fault_is_drawn_and_judged() -> None:
    assert set(KINDS) == {*GENTLE, *ROUGH}
    drawn = {fault["do"] for seed in range(300) for fault in draw(seed).faults}
    assert drawn == set(KINDS)


# -- the swarm itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(0, 200, 9))
def test_a_case_is_read_back_as_it_was_printed(seed: int) -> None:
    case = draw(seed)
    assert Case.parse(case.to_text()) == case


def test_the_same_seed_is_the_same_run() -> None:
    digests = []
    for _ in range(2):
        trace = KeptTrace()
        play(draw(3), trace)
        digests.append(trace.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["sent-before-its-step", "forgotten-release", "tail-not-copied"])
def test_planted_bugs_are_found(name: str) -> None:
    """`scripts/mutants` looks for all of them."""
    assert failure(draw(hunt(name, 0, 20)[1])) == "", "not found, or it is gone without the bug"


def test_there_are_many_planted_bugs_and_each_is_taken_out_again() -> None:
    assert len(MUTANTS) >= 15
    for mutant in MUTANTS.values():
        before = [getattr(owner, name) for owner, name, _ in mutant.patches]
        with mutant.planted():
            planted = [getattr(owner, name) for owner, name, _ in mutant.patches]
        after = [getattr(owner, name) for owner, name, _ in mutant.patches]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert all(a is not b for a, b in zip(before, planted, strict=True))


def test_a_failing_case_is_made_as_small_as_it_fails() -> None:
    """Here: with a crash, two sessions and two main decoders."""
    big = next(
        c
        for c in map(draw, range(1000))
        if c.mains > 1 and len(c.sessions) > 3 and len(c.faults) > 2 and _crashes(c)
    )

    def fails(case: Case) -> str:
        fails = _crashes(case) and len(case.sessions) > 1 and case.mains > 1
        return f"Wrong: a bug: seed {len(case.sessions)}" if fails else ""

    small, failed = shrink(big, fails(big), 1000, fails)
    assert (len(small.sessions), len(small.faults), small.mains) == (2, 1, big.mains)
    assert failed == "Wrong: a bug: seed 2"
    plain = Case()
    assert (small.page_tokens, small.policy, small.shuffle) == (
        plain.page_tokens,
        plain.policy,
        plain.shuffle,
    )


def _crashes(case: Case) -> bool:
    return any(fault["do"] == "crash" for fault in case.faults)


def test_a_failure_is_told_by_its_manner_and_not_by_whom_it_befell() -> None:
    one = "Violation: a page freed twice: md0: page 3 by s1.0"
    other = "Violation: a page freed twice: rld1: page 17 by s2.2"
    assert manner(one) == manner(other) != manner("Violation: ended twice: s1.0")
    assert manner("KeyError: 's3.1'") == manner("KeyError: 's0.0'") != manner("IndexError: 's3.1'")


def _work(task: str) -> str:
    if task == "hang":
        while True:
            signal.pause()
    if task == "die":
        os._exit(3)
    return f"{task} done"


def test_who_hangs_or_dies_is_told_of_and_the_others_go_on() -> None:
    def tasks() -> Iterator[str]:
        yield from ("a", "hang", "die", "b", "c")

    found = {task: (result, wrong) for task, result, wrong in fleet.each(_work, tasks(), 2, 1.0)}
    assert found["hang"] == (None, fleet.HUNG)
    assert found["die"] == (None, "its process died")
    assert [found[t] for t in "abc"] == [(f"{t} done", "") for t in "abc"]


def test_no_process_is_left_when_it_is_interrupted() -> None:
    run = fleet.each(_work, iter(["a", "hang", "hang"]), 3, 60.0)
    next(run)
    workers = list(run.gi_frame.f_locals["workers"])
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt)
    assert workers
    assert not any(worker.process.is_alive() for worker in workers)


def test_the_result_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--start", "4", "--seeds", "2", "--jobs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seeds"], found["failures"]) == (2, [])
    assert found["requests"] == sum(found["ends"].values()) > 0
    assert set(found["faults"]) == set(KINDS)


def test_one_seed_is_played_again_with_its_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, printed = tmp_path / "events.jsonl", tmp_path / "case.yaml"
    assert main(["swarm", "--start", "5", "--seeds", "1", "--trace", str(events), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    printed.write_text(told["case"])
    assert main(["swarm", "--case", str(printed), "--trace", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == events.read_bytes() != b""


def test_a_seed_that_fails_is_told_with_the_command_that_plays_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, seed, _ = hunt("sent-before-its-step", 0, 20)
    with MUTANTS["sent-before-its-step"].planted():
        assert main(["swarm", "--start", str(seed), "--seeds", "1", "--json"]) == 1
    [told] = json.loads(capsys.readouterr().out)["failures"]
    assert told["seed"] == seed
    assert told["failure"].startswith("Violation: KV sent before it was computed")
    again = f"scripts/swarm --start {seed} --seeds 1 --trace events-{seed}.jsonl"
    assert told["again"] == again
    small = Case.parse(told["case"])
    assert len(small.sessions) == 1
    with MUTANTS["sent-before-its-step"].planted():
        assert manner(failure(small)) == manner(told["failure"])


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("a: [1]", "found no case"), ("a: [1", "found no case"),
     ("hello", "found no case")],
)  # fmt: skip
def test_a_case_that_is_none_is_refused_in_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "case.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["swarm", "--case", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("swarm: ")
    assert said in line
    assert main(["swarm", "--trace", str(tmp_path / "nowhere" / "x")]) == 2


def test_unknown_bugs_and_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "nonsense"]) == 2
    assert "allowed: freed-under-a-step" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["swarm", "--seeds", "0"])
