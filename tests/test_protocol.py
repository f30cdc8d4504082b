"""The handoff protocol on paper: any order of events, any partition of KV, answers that end
anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any

import pytest

from pddrt.errors import BadFrame
from pddrt.frames import Frame
from pddrt.messages import (
    MESSAGES,
    KVAssembly,
    Limits,
    Manifest,
    chain,
    check_fields,
    finish,
    prompt_digest,
)
from pddrt.policy.handoff import Decision, Finish, Follow, Piece
from pddrt.protocol import (
    Ask,
    CaughtUp,
    Decode,
    Extend,
    LetFollow,
    MainSide,
    Ready,
    RelaySide,
    SendIds,
    State,
)
from pddrt.types import KVLayout, Sampling

EOS = 99
LIMITS = Limits(prompt_len=10, max_tokens=4, eos_ids=frozenset({EOS}))


Asked = list[tuple[int, tuple[int, ...], int]]


def says(*decisions: Decision, asked: Asked | None = None) -> Ask:
    """A policy that says these, one after the other; `asked` collects what it was asked."""
    left = list(decisions)

    def ask(lacking: int, before: tuple[int, ...], budget: int) -> Decision:
        if asked is not None:
            asked.append((lacking, before, budget))
        return left.pop(0)

    return ask


DONE = Finish("enough")


def relay(limits: Limits = LIMITS, ask: Ask | None = None) -> RelaySide:
    """An RLD that has begun to decode."""
    side = RelaySide(limits, ask=ask or says(DONE))
    side.on_kv(0, limits.prompt_len)
    side.on_first(1)
    return side


def sent(start: int, *ids: int) -> SendIds:
    """The last ids."""
    return SendIds(start, ids, last=True, reason="enough")


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
            assert side.on_kv(6, 10) == [Decode((7,), 1)]
        else:
            assert side.on_kv(6, 10) == []
            assert side.on_first(7) == [Decode((7,), 1)]


# -- the relay side --------------------------------------------------------------------------------


def test_a_ready_main_gets_all_ids_when_none_is_coming() -> None:
    side = relay()
    side.on_token(2)
    assert side.on_main_ready(coming=False) == [sent(10, 1, 2)]
    assert side.state is State.HANDED


def test_a_step_that_will_yield_an_id_ends_before_the_handoff_and_its_id_goes_too() -> None:
    side = relay()
    assert side.on_main_ready(coming=True) == []
    assert side.on_token(2) == ([sent(10, 1, 2)], None)


def test_an_answer_that_ends_in_the_last_step_is_not_handed_over() -> None:
    for token, why in ((EOS, "stop"), (5, "length")):
        side = relay(Limits(10, 2, frozenset({EOS})))
        side.on_main_ready(coming=True)
        assert side.on_token(token) == ([], why)
        assert side.state is State.FINISHED


def test_a_main_that_is_ready_before_the_relay_gets_the_first_id_alone() -> None:
    side = RelaySide(LIMITS, ask=says(DONE))
    assert side.on_main_ready(coming=False) == []
    side.on_kv(0, 10)
    assert side.on_first(1) == [sent(10, 1)]


def test_a_main_that_is_ready_before_the_relay_may_follow_from_the_first_id_on() -> None:
    side = RelaySide(LIMITS, ask=says(Follow(8)))
    side.on_main_ready(coming=False)
    side.on_kv(0, 10)
    assert side.on_first(1) == [Decode((1,), 1), LetFollow()]


def test_ready_after_the_end_changes_nothing() -> None:
    side = relay(Limits(10, 2, frozenset()))
    side.on_token(2)
    assert side.state is State.FINISHED
    assert side.on_main_ready(coming=False) == []


def test_pieces_go_ahead_one_id_stays_and_the_policy_knows_what_was_lacking() -> None:
    asked: Asked = []
    side = relay(
        Limits(10, 40, frozenset()), says(Piece(3), Piece(3), Piece(3), Piece(3), DONE, asked=asked)
    )
    for token in range(2, 7):
        side.on_token(token)
    assert side.on_main_ready(coming=True) == [SendIds(10, (1, 2, 3), last=False)]
    assert side.on_token(7) == ([], None)
    assert side.on_caught_up(13, coming=True) == [SendIds(13, (4, 5, 6), last=False)]
    side.on_token(8)
    assert side.on_caught_up(16, coming=False) == [SendIds(16, (7,), last=False)], "8 stays"
    side.on_token(9)
    assert side.on_caught_up(17, coming=True) == [SendIds(17, (8, 9), last=False)], "10 will"
    assert side.on_caught_up(19, coming=True) == []
    assert side.on_token(10) == ([sent(19, 10)], None)
    assert asked == [
        (7, (), 34),
        (5, (7,), 33),
        (2, (7, 5), 32),
        (3, (7, 5, 2), 31),
        (1, (7, 5, 2, 3), 31),
    ]


@pytest.mark.parametrize("most", [5, 0, -1])
def test_a_piece_that_would_be_empty_finishes(most: int) -> None:
    side = relay(ask=says(Piece(most)))
    (action,) = side.on_main_ready(coming=False)
    assert action == SendIds(10, (1,), last=True, reason="nothing to send ahead")


def test_an_answer_that_is_overdue_finishes_and_comes_late_to_no_effect() -> None:
    for coming in (False, True):
        side = relay(Limits(10, 40, frozenset()), says(Piece(1)))
        side.on_token(2)
        side.on_main_ready(coming=False)
        actions = side.on_overdue(coming)
        if coming:
            assert (actions, side.state) == ([], State.FREEZING)
            assert side.on_caught_up(11, coming) == []
            actions, _ = side.on_token(3)
        assert [(a.last, a.reason) for a in actions] == [(True, "no answer")]  # type: ignore[union-attr]
        assert side.on_caught_up(11, coming=False) == []
        assert side.on_overdue(coming=False) == []


def followed(most: int, limits: Limits = LIMITS) -> RelaySide:
    side = relay(limits, says(Follow(most)))
    assert side.on_main_ready(coming=False) == [LetFollow()]
    return side


def test_a_relay_that_is_followed_stops_when_the_main_is_first_or_at_the_bound() -> None:
    side = followed(8)
    side.on_token(2)
    side.on_switched()
    assert (side.state, side.reason) == (State.HANDED, "the main decoder is first")
    side = followed(2, Limits(10, 40, frozenset()))
    side.on_token(2)
    assert side.state is State.FOLLOWED
    assert side.on_token(3) == ([], None)
    assert (side.state, side.reason) == (State.HANDED, "the bound")
    side.on_switched()
    assert side.reason == "the bound", "it is late"


def test_an_end_made_by_a_relay_that_the_main_has_passed_is_not_the_answers() -> None:
    side = followed(8)
    assert side.on_token(EOS) == ([], "stop")
    side.on_switched()
    assert side.state is State.HANDED, "it frees the request; the main decoder goes on"


@pytest.mark.parametrize("state", ["DECODING", "ROUND", "FREEZING", "FOLLOWED"])
@pytest.mark.parametrize(("token", "why"), [(EOS, "stop"), (5, "length")])
def test_an_answer_may_end_on_the_relay_in_any_phase(state: str, token: int, why: str) -> None:
    decision = {"ROUND": Piece(1), "FOLLOWED": Follow(9)}.get(state, DONE)
    side = relay(Limits(10, 3, frozenset({EOS})), says(decision))
    side.on_token(2)
    if state != "DECODING":
        side.on_main_ready(coming=state == "FREEZING")
    assert side.state is State[state]
    assert side.on_token(token) == ([], why)
    assert side.state is State.FINISHED
    assert side.on_overdue(coming=False) == []
    assert side.on_caught_up(11, coming=False) == [], "too late to matter"


def mistakes_to_the_relay() -> dict[str, Callable[[], object]]:
    def caught(end: int, ask: Ask, ready: bool = True) -> object:
        side = relay(Limits(10, 40, frozenset()), ask)
        side.on_token(2)
        if ready:
            side.on_main_ready(coming=False)
        return side.on_caught_up(end, coming=False)

    def ready_twice() -> object:
        side = relay(ask=says(Follow(9)))
        side.on_main_ready(coming=False)
        return side.on_main_ready(coming=False)

    return {
        "caught up with nothing": lambda: caught(10, says(), ready=False),
        "caught up with less": lambda: caught(10, says(Piece(1))),
        "caught up with more": lambda: caught(12, says(Piece(1))),
        "caught up where it follows": lambda: caught(11, says(Follow(9))),
        "ready twice": ready_twice,
        "ready where nobody is asked for": lambda: RelaySide(LIMITS).on_main_ready(False),
        "switched where nobody follows": lambda: relay().on_switched(),
        "a second first id": lambda: relay().on_first(3),
        "KV while it decodes": lambda: relay().on_kv(0, 1),
    }


@pytest.mark.parametrize("mistake", mistakes_to_the_relay())
def test_what_cannot_be_is_refused_by_the_relay(mistake: str) -> None:
    with pytest.raises(BadFrame):
        mistakes_to_the_relay()[mistake]()


# -- the main side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(10, 1, frozenset()), Limits(10, 9, frozenset({7}))])
def test_a_first_id_that_is_the_whole_answer_is_not_decoded_from(limits: Limits) -> None:
    """F33: P has ended it; a decoder has no pages for more. Not even for a main that is ready."""
    for main_is_ready in (False, True):
        side = RelaySide(limits, ask=says(DONE))
        if main_is_ready:
            side.on_main_ready(coming=False)
        side.on_kv(0, 10)
        assert side.on_first(7) == []
        assert side.state is State.FINISHED
    main = MainSide(limits, relayed=False)
    main.on_first(7)
    assert main.on_kv(0, 10) == []
    assert main.state is State.FINISHED


def main(max_tokens: int = 40) -> MainSide:
    """A relayed MD that is ready."""
    side = MainSide(Limits(10, max_tokens, frozenset({EOS})))
    assert side.on_kv(0, 10) == [Ready()]
    return side


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, EOS]])
def test_ids_that_go_past_the_end_of_the_answer_are_refused(ids: list[int]) -> None:
    """There are no pages for them; a relay that reached the end does not hand over."""
    with pytest.raises(BadFrame, match="past the end"):
        main(4).on_ids(10, ids, last=True)
    with pytest.raises(BadFrame, match="past the end"):
        main(4).on_follow(10, ids, in_step=False)


def test_a_relayed_main_says_ready_and_waits_for_ids() -> None:
    side = main(4)
    assert side.on_ids(10, [1, 2], last=True) == [Decode((1, 2), 2)]
    assert side.on_token(3) == ([], None)
    assert side.on_token(4) == ([], "length")


def test_a_piece_is_extended_over_and_what_is_there_of_it_is_kept() -> None:
    side = main()
    assert side.on_ids(10, [1, 2], last=False) == [Extend((1, 2))]
    assert side.on_computed(pending=1) == []
    assert side.on_computed(pending=0) == [CaughtUp(12)]
    assert side.on_computed(pending=0) == [], "once; it may be rebuilt"
    assert side.on_ids(12, [3], last=True) == [Decode((1, 2, 3), 3)]
    assert side.on_computed(pending=1) == []


def test_the_last_ids_may_come_before_a_piece_is_done() -> None:
    side = main()
    side.on_ids(10, [1, 2], last=False)
    assert side.on_ids(12, [3], last=True) == [Decode((1, 2, 3), 3)]
    assert side.on_computed(pending=3) == [], "nobody waits for an answer to the piece"


def test_an_unrelayed_main_starts_from_the_first_id() -> None:
    side = MainSide(LIMITS, relayed=False)
    assert side.on_kv(0, 10) == []
    assert side.on_first(1) == [Decode((1,), 1)]


def test_what_it_follows_in_agreement_changes_nothing_and_what_is_new_is_extended_over() -> None:
    side = main()
    assert side.on_follow(10, [1, 2], in_step=False) == [Decode((1, 2), 0)]
    side.on_token(3)
    assert side.on_follow(12, [3], in_step=False) == [], "it has made that itself"
    assert side.on_follow(13, [4, 5], in_step=False) == [Decode((1, 2, 3, 4, 5), 3)]
    assert side.chain == chain([1, 2, 3, 4, 5])


def test_where_its_own_ids_are_not_the_answers_it_goes_back() -> None:
    side = main()
    side.on_follow(10, [1, 2], in_step=False)
    for token in (7, 8, 9):
        side.on_token(token)
    assert side.on_follow(12, [3], in_step=False) == [Decode((1, 2, 3), 2)]
    assert (side.ids, side.chain) == ([1, 2, 3], chain([1, 2, 3]))
    side.on_token(4)
    assert side.on_follow(13, [4], in_step=False) == []


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    side = main()
    side.on_follow(10, [1], in_step=False)
    assert side.on_follow(11, [2, 3], in_step=True) == []
    assert side.on_token(2) == ([Decode((1, 2, 3), 2)], None), "the step's id is one of them"
    assert side.on_follow(13, [4], in_step=True) == []
    assert side.on_token(7) == ([Decode((1, 2, 3, 4), 3)], None)
    assert side.on_follow(14, [5], in_step=True) == []
    assert side.on_computed(pending=2) == [Decode((1, 2, 3, 4, 5), 4)], "a step of a long extend"


def test_an_end_holds_while_following_only_until_the_gateway_says_otherwise() -> None:
    side = main()
    side.on_follow(10, [1], in_step=False)
    assert side.on_token(EOS) == ([], "stop")
    assert side.state is State.FOLLOWING
    assert side.on_follow(11, [2], in_step=False) == [Decode((1, 2), 1)]


def test_it_may_follow_after_pieces() -> None:
    side = main()
    side.on_ids(10, [1, 2], last=False)
    side.on_computed(pending=0)
    assert side.on_follow(10, [1, 2, 3], in_step=False) == [Decode((1, 2, 3), 2)]


def mistakes_to_the_main() -> dict[str, Callable[[], object]]:
    def after(state: str) -> MainSide:
        side = main()
        if state == "EXTENDING":
            side.on_ids(10, [1, 2], last=False)
        elif state == "FOLLOWING":
            side.on_follow(10, [1, 2], in_step=False)
        elif state == "DECODING":
            side.on_ids(10, [1, 2], last=True)
        assert side.state is State[state]
        return side

    def before_the_kv() -> MainSide:
        side = MainSide(LIMITS)
        side.on_kv(0, 9)
        return side

    def follow_others() -> object:
        side = after("EXTENDING")
        side.on_computed(pending=0)
        return side.on_follow(10, [1, 3], in_step=False)

    return {
        "ids before the KV": lambda: before_the_kv().on_ids(10, [1], last=True),
        "ids to follow before the KV": lambda: before_the_kv().on_follow(10, [1], False),
        "ids that leave a gap": lambda: main().on_ids(11, [1], last=True),
        "ids that came before": lambda: after("EXTENDING").on_ids(10, [1], last=True),
        "no ids": lambda: main().on_ids(10, [], last=True),
        "a piece before the answer to one": lambda: after("EXTENDING").on_ids(12, [3], last=False),
        "ids to one that follows": lambda: after("FOLLOWING").on_ids(12, [3], last=True),
        "ids to one that decodes": lambda: after("DECODING").on_ids(12, [3], last=True),
        "ids to follow in a piece": lambda: after("EXTENDING").on_follow(10, [1, 2, 3], False),
        "ids to follow that leave a gap": lambda: after("FOLLOWING").on_follow(13, [3], False),
        "ids to follow twice": lambda: after("FOLLOWING").on_follow(10, [1, 2], False),
        "ids to follow that decodes": lambda: after("DECODING").on_follow(10, [1, 2, 3], False),
        "ids to follow unlike the pieces": follow_others,
        "a first id": lambda: main().on_first(1),
        "KV again": lambda: main().on_kv(0, 1),
    }


@pytest.mark.parametrize("mistake", mistakes_to_the_main())
def test_what_cannot_be_is_refused_by_the_main(mistake: str) -> None:
    with pytest.raises(BadFrame):
        mistakes_to_the_main()[mistake]()


def test_close_ends_a_side_in_any_state_and_keeps_a_final_one() -> None:
    ready = relay()
    ready.on_main_ready(coming=True)
    for side in (relay(), ready, followed(9), main(), RelaySide(LIMITS), MainSide(LIMITS)):
        side.close()
        assert side.state is State.CLOSED
    handed = relay()
    handed.on_main_ready(coming=False)
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


GOOD: dict[str, Any] = {
    "layout": ["weights-1", 2, 2, 16, "float64"],
    "sampling": [0.5, 3, 0.9, 11, 0, False, [7], ["END"], 2],
    "logprobs": [[-0.5, [[7, -0.25], [9, -3]]]],
    "last": True,
    "answered": True,
    "held": False,
    "busy": True,
    "whole": True,
    "arrived": ["x"],
    "raw": False,
    "caching": True,
    "relay": None,
    "answer": None,
    "source": "R",
    "reason": "stop",
    **dict.fromkeys(("request", "purpose", "role", "text", "system", "detail"), "x"),
    **dict.fromkeys(("gateway", "main", "digest", "session", "to", "by", "whom"), "x"),
    **dict.fromkeys(("age_ns", "busy_ns", "bytes", "tokens", "pages", "waiting", "holding"), 1),
    **dict.fromkeys(
        ("page_tokens", "kv_tokens", "max_context", "bytes_per_token", "max_tokens", "max_batch"), 1
    ),
    **dict.fromkeys(
        ("lease_ns", "epoch", "have", "start", "end", "position", "id", "prompt_tokens"), 1
    ),
    **dict.fromkeys(("begin_ns", "retry_ns", "waited_ns"), 1),
    **dict.fromkeys(("after", "step_ns", "token_ns", "life"), 1),
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
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"min_tokens": -1},
        {"ignore_eos": 1},
        {"stop_ids": [-1]},
        {"stop_ids": list(range(65))},
        {"stop": [""]},
        {"stop": "END"},
        {"stop": ["END"] * 17},
        {"logprobs": True},
        {"logprobs": 21},
    ],
)
def test_sampling_that_nobody_can_draw_by_makes_a_bad_frame(bad: dict[str, Any]) -> None:
    good = {name: GOOD[name] for name in MESSAGES["submit"]}
    asked = Sampling.of(good["sampling"])
    check_fields(Frame("submit", {**good, "sampling": [*astuple(asked)[:-3], [], [], None]}))
    wrong = {**asdict(asked), "stop_ids": [7], "stop": ["END"], **bad}
    for values in ([*wrong.values()], [*astuple(Sampling())][:-1]):
        with pytest.raises(BadFrame, match="sampling"):
            check_fields(Frame("submit", {**good, "sampling": values}))


@pytest.mark.parametrize(
    "bad", [[[float("nan"), []]], [[-1.0, [[7]]]], [[-1.0]], [[0.0, [[1, 0]] * 21]]]
)
def test_log_probabilities_that_are_none_make_a_bad_frame(bad: list[Any]) -> None:
    good = {name: GOOD[name] for name in MESSAGES["tokens"]}
    with pytest.raises(BadFrame, match="logprobs"):
        check_fields(Frame("tokens", {**good, "logprobs": bad}))
