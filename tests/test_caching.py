"""Prefix caches at work: what is cached is neither computed nor sent, and changes no answer."""

from __future__ import annotations

from collections import Counter

import pytest

from pddrt import trace as ev
from pddrt.engine.tokens import ByteTokenizer
from pddrt.metrics import RequestRecord
from pddrt.policy.route import Naive
from pddrt.types import MS
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, oracle

BYTES = LAYOUT.bytes_per_token


def talk(
    turns: int, first: int = 100, later: int = 20, answer: int = 12, index: int = 0
) -> Session:
    """A session of `turns` turns that thinks long enough for P to learn each answer."""
    texts = [f"{index}" + "a" * (first - 1)] + [
        f"{n:02d}" + "b" * (later - 2) for n in range(1, turns)
    ]
    return Session(index, 0, tuple(Turn(text, answer, 500 * MS) for text in texts))


def prompts(session: Session, records: list[RequestRecord]) -> list[list[int]]:
    """The ids of each turn's whole prompt, built from texts and answers alone."""
    tokenizer, ids, built = ByteTokenizer(), [], []
    for number, (turn, record) in enumerate(zip(session.turns, records, strict=True)):
        ids = ids + (tokenizer.follow_up(turn.text, after_eos=False) if number
                     else tokenizer.chat(turn.text))  # fmt: skip
        built.append(ids)
        ids = ids + record.ids
    return built


def assert_answers(played: Played, session: Session) -> None:
    played.assert_sound()
    records = [r for r in played.records if r.session == session.index]
    for r, ids in zip(records, prompts(session, records), strict=True):
        assert r.ids == oracle(ids, session.turns[r.turn].max_tokens), r.id


def test_over_thirty_turns_only_new_tokens_are_computed_and_cross_the_wan() -> None:
    session = talk(30)
    played = Cluster(pages=100).play([session])
    assert_answers(played, session)
    before = 0
    for r, ids in zip(played.records, prompts(session, played.records), strict=True):
        assert r.prompt_tokens == len(ids)
        assert r.cached == {"prefill": before, "relay": r.cached["relay"], "main": before}
        assert r.kv_received.get("md0", 0) == (len(ids) - before) * BYTES
        assert r.hit_bytes["md0"] == before * BYTES
        computed = sum(
            e.prefill_tokens
            for e in played.events(ev.Step)
            if isinstance(e, ev.Step) and e.instance == "p0" and r.sent < e.t <= r.prefill_ended  # type: ignore[operator]
        )
        assert computed == len(ids) - before
        before = len(ids) + len(r.ids) - 1  # nobody has KV of the last token


def test_without_drc_everything_crosses_every_time() -> None:
    session = talk(4)
    played = Cluster(pages=100, caching=False, policy=Naive()).play([session])
    assert_answers(played, session)
    for r in played.records:
        assert r.cached == {"prefill": 0, "relay": 0, "main": 0}
        assert r.kv_received["md0"] == r.prompt_tokens * BYTES


@pytest.mark.parametrize("page_tokens", [1, 5, 16])
@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33, 79])
def test_a_hit_may_end_anywhere_in_a_page(page_tokens: int, shared: int) -> None:
    """F28: the request goes on in a page of its own that begins with a copy."""
    first = Session(0, 0, (Turn("x" * 80, 10, 0),))
    second = Session(1, 500 * MS, (Turn("x" * shared + "y" * (80 - shared), 10, 0),))
    played = Cluster(page_tokens=page_tokens, pages=-(-900 // page_tokens)).play([first, second])
    played.assert_sound()
    one, two = played.records
    assert two.cached["prefill"] == two.cached["main"] == shared
    assert two.kv_received["md0"] == (80 - shared) * BYTES
    assert [one.ids, two.ids] == [
        oracle(ByteTokenizer().chat(s.turns[0].text), 10) for s in (first, second)
    ]


def test_a_prompt_that_is_all_cached_is_an_empty_transfer() -> None:
    again = [Session(i, i * 500 * MS, (Turn("same" * 30, 10, 0),)) for i in range(3)]
    played = Cluster(pages=100).play(again)
    played.assert_sound()
    first, *later = played.records
    for r in later:
        assert r.ids == first.ids
        assert r.cached == {"prefill": 119, "relay": 0, "main": 120}, "P computes one, for logits"
        assert "md0" not in r.kv_received
        assert r.pipeline == "P-MD", "nothing needs to cross, so nothing needs to be masked"


def test_a_wrong_guess_of_what_is_cached_costs_time_and_nothing_else() -> None:
    """F26, F47: the gateway only guesses; what MD locks when it admits is what is skipped."""
    sessions = [talk(6, index=i) for i in range(6)]
    played = Cluster(pages=26, prefills=2, mains=2).play(sessions)
    for session in sessions:
        assert_answers(played, session)
    assert any(0 < r.cached["main"] < r.prompt_tokens - 33 for r in played.records), "evictions"


def test_many_prompts_share_what_they_begin_with() -> None:
    system = "You are a terse assistant. " * 4
    sessions = [
        Session(i, i * 3 * MS, (Turn(f"question {i}" * 3, 10, 0),), system=system)
        for i in range(12)
    ]
    played = Cluster(pages=64, policy=Naive()).play(sessions)
    played.assert_sound()
    shared = len(system) - len(system) % 16
    late = played.records[-1]
    assert late.cached["prefill"] >= shared
    assert late.cached["main"] >= shared
    for s, r in zip(sessions, played.records, strict=True):
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": s.turns[0].text},
        ]
        assert r.ids == oracle(ByteTokenizer().chat(messages), 10)


def test_scripted_answers_stand_in_the_history_and_are_never_hits() -> None:
    turns = (Turn("a" * 60, 10, 0, answer="A scripted answer."), Turn("b" * 30, 10, 500 * MS))
    played = Cluster(pages=100).play([Session(0, 0, turns)])
    played.assert_sound()
    tokenizer = ByteTokenizer()
    ids = tokenizer.chat("a" * 60) + tokenizer.encode_within("A scripted answer.")
    ids += tokenizer.follow_up("b" * 30, after_eos=False)
    assert played.records[1].prompt_tokens == len(ids)
    assert played.records[1].ids == oracle(ids, 10)
    assert played.records[1].cached["main"] in (60, 61), "the prompt, and by chance a letter more"


def test_a_turn_aside_and_a_fresh_start_leave_the_history_out() -> None:
    turns = (
        Turn("a" * 40, 8, 0),
        Turn("c" * 70, 8, 500 * MS, context="aside"),
        Turn("b" * 30, 8, 500 * MS),
        Turn("d" * 25, 8, 500 * MS, context="fresh"),
    )
    played = Cluster(pages=100).play([Session(0, 0, turns)])
    played.assert_sound()
    _, c, b, d = played.records
    assert (c.prompt_tokens, d.prompt_tokens) == (70, 25)
    assert b.prompt_tokens == 40 + 8 + 1 + 30
    assert (c.cached["main"], d.cached["main"], b.cached["main"]) == (0, 0, 47)


def test_ids_given_by_the_workload_are_the_prompt() -> None:
    ids = tuple(range(1, 90))
    played = Cluster().play([Session(0, 0, (Turn("", 10, ids=ids),))])
    played.assert_sound()
    assert played.records[0].prompt_tokens == 89
    assert played.records[0].ids == oracle(ids, 10)


def test_p_learns_answers_only_when_nobody_waits_and_drops_them_where_they_are_in_the_way() -> None:
    sessions = [talk(3, index=i, answer=40) for i in range(8)]
    played = Cluster(pages=24).play(sessions)
    for session in sessions:
        assert_answers(played, session)
    learnt = [
        e for e in played.events(ev.Learnt) if isinstance(e, ev.Learnt) and e.instance == "p0"
    ]
    assert len(learnt) < len(played.records), "some lessons gave way to requests"


def test_a_cancelled_request_leaves_what_was_cached_sound() -> None:
    """F7: what is freed is what was allocated, though part of the prefix was shared."""

    async def cancel(deployment: object) -> None:
        await deployment.env.sleep(700 * MS)  # type: ignore[attr-defined]
        deployment.client.stop()  # type: ignore[attr-defined]

    played = Cluster(pages=60, rate=200_000).play([talk(4, index=i) for i in range(3)], cancel)
    played.assert_sound()
    for instance in played.deployment.instances:
        instance.memory.check()
        assert instance.memory.pool.free + instance.memory.cached == instance.memory.num_pages
    owned: Counter[tuple[str, str]] = Counter()
    for e in played.trace.events:
        match e:
            case ev.PagesTaken():
                owned[e.instance, e.owner] += sum(n for _, n in e.pages)
            case ev.PagesKept():
                owned[e.instance, e.owner] -= sum(n for _, n in e.pages)
            case ev.PagesFreed() if not e.over:
                owned[e.instance, e.owner] -= sum(n for _, n in e.pages)
            case ev.Freed():
                assert owned.pop((e.instance, e.request), 0) == e.pages, e
            case ev.PagesFreed():  # the same, page by page, just before
                assert owned[e.instance, e.owner] == sum(n for _, n in e.pages), e
