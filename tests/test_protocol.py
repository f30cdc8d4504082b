"""The handoff protocol on paper: any order of events, any partition of KV, answers that end
anywhere.
"""

from __future__ import annotations

import random

import pytest

from pddrt.errors import BadFrame
from pddrt.frames import Frame
from pddrt.protocol import (
    MESSAGES,
    Decode,
    KVAssembly,
    Limits,
    MainSide,
    Manifest,
    Ready,
    RelaySide,
    SendIds,
    State,
    check_fields,
    finish,
    prompt_digest,
)
from pddrt.types import KVLayout, Sampling

EOS = 99
LIMITS = Limits(prompt_len=10, max_tokens=4, eos_ids=frozenset({EOS}))


def relay(limits: Limits = LIMITS) -> RelaySide:
    """An RLD that has begun to decode."""
    side = RelaySide(limits)
    side.on_kv(0, limits.prompt_len)
    side.on_first(1)
    return side


def test_the_budget_is_counted_by_position() -> None:
    assert [finish(LIMITS, p, 5) for p in (10, 11, 12, 13)] == [None, None, None, "length"]
    assert finish(Limits(10, 1, frozenset()), 10, 5) == "length", "max_tokens 1 is one token (F32)"
    assert finish(LIMITS, 10, EOS) == "stop", "end of sequence counts as the first token too (F33)"


def test_the_last_token_needs_no_kv() -> None:
    assert LIMITS.kv_tokens == 13


@pytest.mark.parametrize("seed", range(30))
def test_kv_is_taken_in_any_partition_and_order(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 200)
    cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, 12))))
    ranges = list(zip([0, *cuts], [*cuts, length], strict=True))
    rng.shuffle(ranges)
    kv = KVAssembly(length)
    for start, end in ranges:
        assert not kv.whole
        kv.claim(start, end)
    assert kv.whole


@pytest.mark.parametrize("again", [(0, 4), (2, 3), (3, 6), (-1, 2), (8, 11), (5, 3)])
def test_a_range_that_comes_twice_or_lies_outside_is_refused(again: tuple[int, int]) -> None:
    kv = KVAssembly(10)
    kv.claim(0, 4)
    with pytest.raises(BadFrame):
        kv.claim(*again)


@pytest.mark.parametrize("at", [-1, 11, 10**9])
def test_nothing_at_a_position_outside_is_refused_too(at: int) -> None:
    kv = KVAssembly(10)
    kv.claim(10, 10)
    with pytest.raises(BadFrame):
        kv.claim(at, at)


def test_an_empty_transfer_completes() -> None:
    assert KVAssembly(0).whole
    kv = KVAssembly(3)
    kv.claim(1, 1)
    assert not kv.whole


def test_nothing_is_decoded_before_kv_is_whole_and_the_first_id_is_known() -> None:
    for first_before_kv in (True, False):
        side = RelaySide(LIMITS)
        side.on_kv(0, 6)
        if first_before_kv:
            assert side.on_first(7) == []
            assert side.on_kv(6, 10) == [Decode((7,))]
        else:
            assert side.on_kv(6, 10) == []
            assert side.on_first(7) == [Decode((7,))]


def test_a_ready_main_gets_all_ids_when_no_step_runs() -> None:
    side = relay()
    side.on_token(2)
    assert side.on_main_ready(in_step=False) == [SendIds(10, (1, 2), last=True)]
    assert side.state is State.HANDED


def test_a_step_in_flight_ends_before_the_handoff_and_its_id_goes_too() -> None:
    side = relay()
    assert side.on_main_ready(in_step=True) == []
    actions, reason = side.on_token(2)
    assert (actions, reason) == ([SendIds(10, (1, 2), last=True)], None)


def test_an_answer_that_ends_in_the_last_step_is_not_handed_over() -> None:
    for token, why in ((EOS, "stop"), (5, "length")):
        side = relay(Limits(10, 2, frozenset({EOS})))
        side.on_main_ready(in_step=True)
        assert side.on_token(token) == ([], why)
        assert side.state is State.FINISHED


def test_a_main_that_is_ready_before_the_relay_gets_the_first_id_alone() -> None:
    side = RelaySide(LIMITS)
    assert side.on_main_ready(in_step=False) == []
    side.on_kv(0, 10)
    assert side.on_first(1) == [SendIds(10, (1,), last=True)]


def test_ready_after_the_end_changes_nothing() -> None:
    side = relay(Limits(10, 2, frozenset()))
    side.on_token(2)
    assert side.state is State.FINISHED
    assert side.on_main_ready(in_step=False) == []


@pytest.mark.parametrize("limits", [Limits(10, 1, frozenset()), Limits(10, 9, frozenset({7}))])
def test_a_first_id_that_is_the_whole_answer_is_not_decoded_from(limits: Limits) -> None:
    """F33: P has ended it; a decoder has no pages for more. Not even for a main that is ready."""
    for main_is_ready in (False, True):
        side = RelaySide(limits)
        if main_is_ready:
            side.on_main_ready(in_step=False)
        side.on_kv(0, 10)
        assert side.on_first(7) == []
        assert side.state is State.FINISHED
    main = MainSide(limits, relayed=False)
    main.on_first(7)
    assert main.on_kv(0, 10) == []
    assert main.state is State.FINISHED


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, EOS]])
def test_ids_that_go_past_the_end_of_the_answer_are_refused(ids: list[int]) -> None:
    """There are no pages for them; a relay that reached the end does not hand over."""
    side = MainSide(LIMITS)
    side.on_kv(0, 10)
    with pytest.raises(BadFrame, match="past the end"):
        side.on_ids(10, ids, last=True)


def test_a_relayed_main_says_ready_and_waits_for_ids() -> None:
    side = MainSide(LIMITS)
    assert side.on_kv(0, 10) == [Ready()]
    assert side.on_ids(10, [1, 2], last=True) == [Decode((1, 2))]
    assert side.on_token(3) is None
    assert side.on_token(4) == "length"


def test_ids_may_come_in_pieces_that_join() -> None:
    side = MainSide(LIMITS)
    side.on_kv(0, 10)
    assert side.on_ids(10, [1], last=False) == []
    with pytest.raises(BadFrame):
        side.on_ids(12, [3], last=True)
    assert side.on_ids(11, [2], last=True) == [Decode((1, 2))]


def test_ids_before_the_kv_are_refused() -> None:
    side = MainSide(LIMITS)
    side.on_kv(0, 9)
    with pytest.raises(BadFrame):
        side.on_ids(10, [1], last=True)


def test_an_unrelayed_main_starts_from_the_first_id() -> None:
    side = MainSide(LIMITS, relayed=False)
    assert side.on_kv(0, 10) == []
    assert side.on_first(1) == [Decode((1,))]


def test_kv_for_a_request_that_decodes_is_refused() -> None:
    side = relay()
    with pytest.raises(BadFrame):
        side.on_kv(0, 1)


def test_close_ends_a_side_in_any_state_and_keeps_a_final_one() -> None:
    side = relay()
    side.close()
    assert side.state is State.CLOSED
    handed = relay()
    handed.on_main_ready(in_step=False)
    handed.close()
    assert handed.state is State.HANDED


LAYOUT = KVLayout("weights-1", 2, 2, 16, "float64")


def manifest(layout: KVLayout = LAYOUT, prompt: tuple[int, ...] = (1, 2, 3)) -> Manifest:
    return Manifest(
        "s0.0",
        4,
        layout,
        prompt,
        prompt_digest(layout.fingerprint, prompt),
        8,
        Sampling(0.5, 3, 0.9, 11),
        "gateway",
        "rld0",
        "md0",
    )


def test_a_manifest_survives_the_wire() -> None:
    m = manifest()
    assert Manifest.parse(m.fields(), m.prompt) == m
    with pytest.raises(BadFrame):
        Manifest.parse({"request": "x"}, [])


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        (KVLayout("weights-2", 2, 2, 16, "float64"), "fingerprint"),
        (KVLayout("weights-1", 3, 2, 16, "float64"), "layers"),
        (KVLayout("weights-1", 2, 1, 16, "float64"), "kv_heads"),
        (KVLayout("weights-1", 2, 2, 8, "float64"), "head_dim"),
    ],
)
def test_foreign_kv_is_refused_by_name(mine: KVLayout, why: str) -> None:
    assert manifest().objection(LAYOUT) is None
    objection = manifest().objection(mine)
    assert objection is not None
    assert why in objection


def test_kv_of_another_known_dtype_is_taken_and_of_an_unknown_one_is_not() -> None:
    assert manifest().objection(KVLayout("weights-1", 2, 2, 16, "float32")) is None
    objection = manifest(KVLayout("weights-1", 2, 2, 16, "int7")).objection(LAYOUT)
    assert objection is not None
    assert "dtype int7" in objection


def test_a_prompt_that_is_not_the_digests_is_refused() -> None:
    m = manifest()
    other = Manifest.parse(m.fields(), (1, 2, 4))
    assert other.objection(LAYOUT) == "the digest does not match the prompt"


GOOD = {
    "layout": ["weights-1", 2, 2, 16, "float64"],
    "sampling": [0.5, 3, 0.9, 11],
    "last": True,
    "answered": True,
    "raw": False,
    "caching": True,
    "relay": None,
    "answer": None,
    "source": "R",
    "reason": "stop",
    **dict.fromkeys(("request", "purpose", "role", "text", "system", "detail"), "x"),
    **dict.fromkeys(("gateway", "main", "digest"), "x"),
    **dict.fromkeys(
        ("page_tokens", "kv_tokens", "max_context", "bytes_per_token", "max_tokens"), 1
    ),
    **dict.fromkeys(
        ("lease_ns", "epoch", "have", "start", "end", "position", "id", "prompt_tokens"), 1
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_field_that_is_missing_or_of_a_wrong_type_makes_a_bad_frame(kind: str) -> None:
    """What comes over the wire ends a request, never an instance."""
    good = {name: GOOD[name] for name in MESSAGES[kind]}
    check_fields(Frame(kind, good))
    for name in good:
        with pytest.raises(BadFrame, match=name):
            check_fields(Frame(kind, {n: v for n, v in good.items() if n != name}))
        for bad in (-1, 2.5, b"x", {}, [[]], [None] * 4):
            with pytest.raises(BadFrame, match=name):
                check_fields(Frame(kind, {**good, name: bad}))


@pytest.mark.parametrize(
    "bad",
    [[-1.0, 0, 1.0, 0], [float("nan"), 0, 1.0, 0], [0, -1, 1.0, 0], [0, 0, 0, 0], [0, 0, 1.0]],
)
def test_sampling_that_nobody_can_draw_by_makes_a_bad_frame(bad: list[float]) -> None:
    good = {name: GOOD[name] for name in MESSAGES["submit"]}
    with pytest.raises(BadFrame, match="sampling"):
        check_fields(Frame("submit", {**good, "sampling": bad}))
