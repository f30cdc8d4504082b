"""Plans: lengths, arrivals and shares as asked for, and the same in every process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from pddrt import workload
from pddrt.errors import CannotRun
from pddrt.types import MS, SECOND
from pddrt.workload import Session, Turn, Workload, plan, plan_one

ADAPTER: TypeAdapter[Any] = TypeAdapter(Workload)
RANDOM = {"output_tokens": 8, "prompts": "random", "prompt_tokens": {"min": 50, "max": 90}}


def described(**fields: Any) -> Workload:
    return ADAPTER.validate_python({**RANDOM, **fields})  # type: ignore[no-any-return]


def sessions(**fields: Any) -> Workload:
    return described(**{"kind": "sessions", "sessions": 20, "rate": "2/s", **fields})


def as_bytes(text: str) -> int:
    return len(text.encode())


def test_sessions_have_turns_with_think_times_between() -> None:
    found = plan(sessions(turns=3, think="100 ms"), 1)
    assert [s.index for s in found] == list(range(20))
    assert all(len(s.turns) == 3 for s in found)
    assert all(s.turns[0].think_ns == 0 for s in found)
    assert all(t.max_tokens == 8 and t.text for s in found for t in s.turns)
    thinking = [t.think_ns for s in found for t in s.turns[1:]]
    assert 50 * MS < sum(thinking) / len(thinking) < 200 * MS
    assert len(set(thinking)) == len(thinking)


def test_arrivals_are_poisson_at_the_rate_and_begin_at_once() -> None:
    found = plan(described(kind="poisson", requests=4000, rate="50/s", prompt_tokens=5), 3)
    starts = [s.start_ns for s in found]
    gaps = [b - a for a, b in pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert starts[0] == 0
    assert min(gaps) >= 0
    assert mean == pytest.approx(SECOND / 50, rel=0.06)
    assert spread == pytest.approx(mean, rel=0.1)  # exponential: deviation = mean


def test_closed_is_limited_by_its_users_and_open_kinds_are_not() -> None:
    closed = described(kind="closed", requests=7, concurrency=3)
    assert closed.concurrency_limit == 3
    assert [s.start_ns for s in plan(closed, 1)] == [0] * 7
    assert sessions().concurrency_limit is None


def test_random_prompts_have_the_very_length_asked_for() -> None:
    lengths = [as_bytes(s.turns[0].text) for s in plan(sessions(sessions=200), 5, as_bytes)]
    assert min(lengths) >= 50
    assert max(lengths) <= 90
    assert len(set(lengths)) > 30


def test_without_a_tokenizer_lengths_are_estimated() -> None:
    lengths = [len(s.turns[0].text) for s in plan(sessions(prompt_tokens=100), 5)]
    assert all(length == pytest.approx(100 * workload.CHARS_PER_TOKEN, abs=4) for length in lengths)


@pytest.mark.parametrize("fraction", [0, 0.25, 0.5, 1])
def test_the_share_of_short_prompts_is_exact(fraction: float) -> None:
    short = {"fraction": fraction, "prompt_tokens": {"min": 5, "max": 9}}
    found = plan(sessions(sessions=40, short=short), 2, as_bytes)
    is_short = [as_bytes(s.turns[0].text) < 10 for s in found]
    assert sum(is_short) == 40 * fraction
    if 0 < fraction < 1:
        assert is_short != sorted(is_short, reverse=True)


def test_stdlib_prompts_ask_about_whole_lines_of_a_module() -> None:
    wanted = sessions(prompts="stdlib", prompt_tokens={"min": 300, "max": 900}, turns=2)
    for session in plan(wanted, 11):
        first = session.turns[0].text
        question, _, code = first.partition("\n\n")
        name = re.search(r"module (\w+)", question)
        assert name is not None
        assert "def " in code or "class " in code or "import" in code
        source = workload._source(name[1])
        assert source is not None
        assert code.splitlines()[0] in source
        assert code.splitlines()[-1] in source
        assert 250 <= workload._estimate(first) <= 900
        assert session.turns[1].text in workload.FOLLOW_UPS


def test_stdlib_prompts_can_be_longer_than_a_module() -> None:
    longest = max(len("\n".join(workload._source(name) or ())) for name in workload.MODULES)
    target = round(2 * longest / workload.CHARS_PER_TOKEN)
    text = plan(sessions(sessions=1, prompts="stdlib", prompt_tokens=target), 1)[0].turns[0].text
    assert target * 0.99 <= workload._estimate(text) <= target


def test_every_listed_module_is_here() -> None:
    assert [name for name in workload.MODULES if workload._source(name) is None] == []
    assert len(set(workload.MODULES)) == len(workload.MODULES)


def test_no_standard_library_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_source", lambda name: None)
    with pytest.raises(CannotRun, match="prompts: random"):
        plan(sessions(prompts="stdlib"), 1)


def test_given_texts_are_taken_in_turn() -> None:
    found = plan(sessions(sessions=3, turns=2, prompts=["one", "two", "three"]), 1)
    assert [[t.text for t in s.turns] for s in found] == [
        ["one", "two"], ["three", "one"], ["two", "three"],
    ]  # fmt: skip


def test_the_seed_decides_and_sessions_do_not_depend_on_how_many_follow() -> None:
    assert plan(sessions(), 1) == plan(sessions(), 1)
    assert plan(sessions(), 1) != plan(sessions(), 2)
    assert plan(sessions(sessions=30), 1)[:20] == plan(sessions(sessions=20), 1)


def test_one_prompt_in_place_of_a_workload() -> None:
    assert plan_one("Hello?", 5) == [Session(0, 0, (Turn("Hello?", 5, 0),))]


PRINT_PLAN = """
import hashlib
from pddrt.scenario import load
from pddrt.workload import plan
for name in ("quickstart", "tiny"):
    scenario = load(f"scenarios/{name}.yaml")
    print(hashlib.sha256(repr(plan(scenario.workload, scenario.seed)).encode()).hexdigest())
"""


def test_a_plan_is_the_same_in_every_process(pytestconfig: pytest.Config) -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_PLAN], check=True, capture_output=True, text=True,
            cwd=pytestconfig.rootpath, env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }  # fmt: skip
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2
