"""Plans: lengths, arrivals, shares and hit rates as asked for, and the same in every process."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from pddrt import prompts
from pddrt.errors import BadInput, CannotRun
from pddrt.hitrate import AGENTS, EDGES, INTERVALS, Deck, apportion, interval, prompt_range
from pddrt.types import MS, SECOND
from pddrt.workload import Expected, Framing, Session, Turn, Workload, plan, plan_one, summary
from tests.prefixes import TOKENIZER, Played, play

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
    assert all(length == pytest.approx(100 * prompts.CHARS_PER_TOKEN, abs=4) for length in lengths)


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
        lead, _, rest = first.partition("\n\n")
        code, _, question = rest.rpartition("\n\n")
        name = re.search(r"module (\w+)", lead)
        assert name is not None
        assert question in [q.format(name=name[1]) for q in prompts.QUESTIONS]
        assert "def " in code or "class " in code or "import" in code
        source = prompts._source(name[1])
        assert source is not None
        assert code.splitlines()[0] in source
        assert code.splitlines()[-1] in source
        assert 250 <= prompts.estimate(first) <= 900
        assert session.turns[1].text in prompts.FOLLOW_UPS


def test_stdlib_prompts_can_be_longer_than_a_module() -> None:
    longest = max(len("\n".join(prompts._source(name) or ())) for name in prompts.MODULES)
    target = round(2 * longest / prompts.CHARS_PER_TOKEN)
    text = plan(sessions(sessions=1, prompts="stdlib", prompt_tokens=target), 1)[0].turns[0].text
    assert target * 0.99 <= prompts.estimate(text) <= target


def test_every_listed_module_is_here() -> None:
    assert [name for name in prompts.MODULES if prompts._source(name) is None] == []
    assert len(set(prompts.MODULES)) == len(prompts.MODULES)


def test_no_standard_library_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_source", lambda name: None)
    with pytest.raises(CannotRun, match="prompts: random"):
        plan(sessions(prompts="stdlib"), 1)
    with pytest.raises(CannotRun, match="prompts: random"):
        plan(sessions(prompts="stdlib", system={"tokens": 50}), 1)


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


# -- conversations ---------------------------------------------------------------------------------


def test_the_number_of_turns_can_be_drawn() -> None:
    found = plan(sessions(sessions=300, turns={"min": 8, "max": 30}), 1)
    assert {len(s.turns) for s in found} == set(range(8, 31))


def test_all_sessions_share_a_system_prompt_of_the_length_asked_for() -> None:
    for source in ("random", "stdlib"):
        found = plan(sessions(prompts=source, system={"tokens": 333}), 1, as_bytes)
        assert {as_bytes(s.system) for s in found} == {333}
        assert len({s.system for s in found}) == 1
    assert {s.system for s in plan(sessions(system="Be kind."), 1)} == {"Be kind."}
    assert {s.system for s in plan(sessions(), 1)} == {""}


def test_a_system_prompt_changes_no_other_text() -> None:
    with_system, without = (
        plan(sessions(turns=3, system={"tokens": 50}), 1),
        plan(sessions(turns=3), 1),
    )
    assert [[t.text for t in s.turns] for s in with_system] == [
        [t.text for t in s.turns] for s in without
    ]


def test_scripted_answers_stand_where_something_follows() -> None:
    found = plan(sessions(turns=3, answers="scripted", output_tokens=40), 1, as_bytes)
    for session in found:
        first, second, last = session.turns
        assert as_bytes(first.answer or "") == as_bytes(second.answer or "") == 40
        assert first.answer != second.answer
        assert last.answer is None
    texts = [[t.text for t in s.turns] for s in found]
    assert texts == [[t.text for t in s.turns] for s in plan(sessions(turns=3), 1, as_bytes)]


def test_live_answers_are_nobodys_but_the_models() -> None:
    assert {t.answer for s in plan(sessions(turns=3), 1) for t in s.turns} == {None}


@pytest.mark.parametrize("fraction", [0, 0.04, 1])
def test_the_share_of_long_in_short_out_requests_is_exact(fraction: float) -> None:
    long_in = {"fraction": fraction, "prompt_tokens": {"min": 300, "max": 400}, "output_tokens": 3}
    found = plan(sessions(sessions=25, turns=4, long_in=long_in), 2, as_bytes)
    turns = [t for s in found for t in s.turns]
    long = [t for t in turns if t.context == "aside"]
    assert len(long) == 100 * fraction
    assert all(300 <= as_bytes(t.text) <= 400 and t.max_tokens == 3 for t in long)
    assert all(as_bytes(t.text) <= 90 and t.max_tokens == 8 for t in turns if t not in long)


def test_a_conversation_that_grows_too_long_starts_over() -> None:
    wanted = sessions(turns=20, prompt_tokens=50, output_tokens=8, max_prompt_tokens=200)
    played = play(plan(wanted, 1, as_bytes, framing=BYTES))
    assert 180 < max(len(p.ids) for p in played) <= 200
    fresh = [p for p in played if p.turn.context == "fresh"]
    assert len(fresh) == 20 * 2
    assert all(bytes(p.ids).decode() == p.turn.text for p in fresh)
    unlimited = play(plan(sessions(turns=20, prompt_tokens=50), 1, as_bytes))
    assert max(len(p.ids) for p in unlimited) > 500


# -- hit rates -------------------------------------------------------------------------------------

BYTES = Framing.of(
    TOKENIZER.chat, lambda text: TOKENIZER.follow_up(text, after_eos=False), as_bytes, system=False
)
BYTES_SYSTEM = Framing.of(
    TOKENIZER.chat, lambda text: TOKENIZER.follow_up(text, after_eos=False), as_bytes, system=True
)
AGENT = {
    "sessions": 60, "turns": {"min": 8, "max": 30}, "output_tokens": 16, "hit_rates": "agents",
    "prompt_tokens": {"min": 200, "max": 400}, "system": {"tokens": 600},
}  # fmt: skip


def agents(seed: int = 1, **fields: Any) -> list[Played]:
    wanted = sessions(**{**AGENT, **fields})
    framing = BYTES_SYSTEM if wanted.system else BYTES
    return play(plan(wanted, seed, as_bytes, framing=framing))


def shares(played: Sequence[Played]) -> dict[str, float]:
    """By the edges themselves, in fractions: 0.9, 0.95, 0.96 and so on."""
    places = Counter(sum(p.rate >= edge / 100 for edge in EDGES[1:-1]) for p in played)
    return {name: places[n] / len(played) for n, name in enumerate(INTERVALS)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"answers": "scripted"},
        {"prompts": "stdlib"},
        {"prompts": "stdlib", "answers": "scripted", "output_tokens": 200},
        {"max_prompt_tokens": 1200},
        {"system": None, "think": "1 s"},
        {"turns": 1, "sessions": 1200, "system": {"tokens": 2000}},
        {"long_in": {"fraction": 0.04, "prompt_tokens": 2000, "output_tokens": 4}},
        {"prompt_tokens": 50, "system": {"tokens": 50}},
        {"short": {"fraction": 0.3, "prompt_tokens": 9}},
        {"hit_rates": {"0-90": 1.0}, "max_prompt_tokens": 4000},
        {"hit_rates": {"0-90": 0.1, "90-95": 0.9}, "max_prompt_tokens": 4000},
        {"hit_rates": {"0-90": 0.06, "97-98": 0.4, "99-100": 0.54}},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_requests_hit_as_often_as_asked_for(fields: dict[str, Any]) -> None:
    played = agents(**fields)
    assert len(played) >= 1000
    asked: Any = fields.get("hit_rates", AGENTS)
    found = shares(played)
    assert all(abs(found[name] - asked.get(name, 0)) <= 0.02 for name in INTERVALS), found
    limit = fields.get("max_prompt_tokens", 1 << 30)
    assert max(len(p.ids) for p in played) <= limit


def test_the_named_shares_are_those_of_agents() -> None:
    assert sum(AGENTS.values()) == pytest.approx(1)
    assert 0.7 <= sum(AGENTS[name] for name in INTERVALS[2:]) <= 0.8
    assert list(AGENTS) == list(INTERVALS)


@pytest.mark.parametrize("answers", ["live", "scripted"])
@pytest.mark.parametrize("hit_rates", [None, "agents"])
def test_a_plan_says_what_hits(answers: str, hit_rates: str | None) -> None:
    long_in = {"fraction": 0.04, "prompt_tokens": 2000, "output_tokens": 4}
    for played in agents(answers=answers, long_in=long_in, sessions=10, hit_rates=hit_rates):
        expected = played.turn.expected
        assert expected is not None
        assert expected.prompt_tokens == len(played.ids)
        # where a conversation opens, texts may have a letter or two in common
        assert 0 <= played.hit - expected.hit_tokens <= 4
        if played.turn.context == "follow" and expected.hit_tokens > 602:
            assert played.hit - expected.hit_tokens <= 1


def test_a_template_is_counted_where_the_plan_knows_of_it() -> None:
    def chat(messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return list(f"^{text}<assistant>".encode())

    def follow_up(text: str) -> list[int]:
        return list(f"</><user>{text}</><assistant>".encode())

    plain = Framing.of(chat, follow_up, as_bytes, system=False)
    assert plain == Framing(shared=len("^<user>"), first=len("</><assistant>"), later=23)
    with_system = Framing.of(chat, follow_up, as_bytes, system=True)
    assert with_system == Framing(shared=len("^<system></><user>"), first=14, later=23)
    first, second = plan(sessions(turns=2, system="12345"), 1, as_bytes, framing=with_system)[
        1
    ].turns
    length = 18 + 5 + as_bytes(first.text) + 14
    assert first.expected == Expected(length, 18 + 5)
    assert second.expected == Expected(length + 8 + 23 + as_bytes(second.text), length + 8 - 1)


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({"system": None, "turns": 5}, "0-90"),
        ({"prompt_tokens": 20, "system": {"tokens": 20}}, "99-100"),
    ],
)
def test_shares_that_lengths_do_not_allow_are_refused(
    fields: dict[str, Any], interval: str
) -> None:
    wanted = sessions(**{**AGENT, "turns": 4, **fields})
    with pytest.raises(BadInput, match=rf"workload\.hit_rates: found .* in {interval}, where"):
        plan(wanted, 1, as_bytes, framing=BYTES_SYSTEM)


def test_a_limit_below_the_system_prompt_is_refused() -> None:
    wanted = sessions(system={"tokens": 60}, max_prompt_tokens=60)
    with pytest.raises(BadInput, match=r"max_prompt_tokens: found 60; .* more than the 60 tokens"):
        plan(wanted, 1, as_bytes)


def test_a_handful_of_requests_need_not_have_the_shares_of_a_thousand() -> None:
    assert len(agents(sessions=1, turns=1)) == 1
    assert len(agents(sessions=2, turns=2)) == 4


def test_intervals_hold_their_lower_edges_exactly() -> None:
    for thousandths in range(1001):
        expected = next(n for n in reversed(range(7)) if thousandths >= 10 * EDGES[n])
        assert interval(thousandths, 1000) == expected
    assert Expected(100, 95).interval == "95-96"
    assert Expected(100, 100).interval == "99-100"


def test_prompt_ranges_are_those_whose_rates_are_in_the_interval() -> None:
    for index in range(7):
        for cached in (0, 1, 7, 99, 100, 101, 1000, 12345):
            lengths = prompt_range(index, cached, 0, 1 << 30)
            within = [p for p in range(cached + 1, 2 * cached + 2) if interval(cached, p) == index]
            assert list(lengths) == [p for p in within if index or 100 * cached >= 70 * p]
    assert list(prompt_range(6, 200, 202, 300)) == [202]
    assert not prompt_range(6, 200, 203, 300)


def test_a_deck_is_apportioned_whole() -> None:
    for total in range(300):
        counts = apportion(AGENTS, total)
        assert sum(counts) == total
        assert all(
            abs(n - total * share) < 1 for n, share in zip(counts, AGENTS.values(), strict=True)
        )


def test_a_deck_keeps_the_lowest_rates_for_what_can_have_no_better() -> None:
    deck = Deck({"0-90": 0.5, "99-100": 0.5}, 40, 20, random.Random(1))
    for _ in range(20):
        length = deck.following(1000, 1002, 1 << 30)
        assert length is not None
        deck.settle(1000, length, opening=False)
    assert deck.left == [20, 0, 0, 0, 0, 0, 0]
    assert deck.following(1000, 2000, 1500) is None


# -- figures ---------------------------------------------------------------------------------------


def test_a_summary_tells_lengths_arrivals_and_hits() -> None:
    turns = (
        Turn("a", 4, expected=Expected(100, 0)),
        Turn("b", 8, 3 * SECOND, expected=Expected(200, 190)),
        Turn("c", 6, SECOND, expected=Expected(200, 198)),
    )
    found = summary([Session(0, SECOND, turns), Session(1, 3 * SECOND, (Turn("d", 2),))])
    assert found["sessions"] == 2
    assert found["requests"] == 4
    assert found["turns"] == {"mean": 2, "p50": 1, "p90": 3, "p99": 3, "max": 3}
    assert found["prompt_tokens"]["p50"] == 200
    assert found["new_tokens"] == {"mean": 112 / 3, "p50": 10, "p90": 100, "p99": 100, "max": 100}
    assert found["output_tokens"]["mean"] == 5
    assert found["arrivals"] == {"span_s": 2.0, "sessions_per_s": 0.5}
    assert found["think_s"]["max"] == 3.0
    hits = found["prefix_hits"]
    assert hits["of_tokens"] == 388 / 500
    assert hits["intervals"]["95-96"] == hits["intervals"]["99-100"] == 1 / 3
    assert hits["above_95"] == 2 / 3


def test_a_summary_of_one_prompt_does_not_guess() -> None:
    found = summary(plan_one("Hello?", 5))
    assert found["prompt_tokens"] == {}
    assert found["prefix_hits"] == {"of_tokens": None, "intervals": None, "above_95": None}
    assert found["arrivals"]["sessions_per_s"] is None


PRINT_PLAN = """
import hashlib
from pddrt.scenario import load
from pddrt.workload import plan
for name in ("quickstart", "tiny", "agents"):
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
    assert len(outputs.pop().split()) == 3
