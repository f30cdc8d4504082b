"""How ids are drawn and where an answer ends, on paper: bans, ends, what is told of an id, stop
strings; and what a scenario may ask. Whole deployments are in test_answers.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pddrt import trace as ev
from pddrt.engine.sampling import allowed, draw, log_probabilities
from pddrt.engine.tokens import ByteTokenizer
from pddrt.errors import BadFrame, BadInput
from pddrt.messages import Limits, banned, chain, finish, pack_logprobs, unpack_logprobs
from pddrt.roles.answer import Answer, Passed, StopText
from pddrt.scenario import parse
from pddrt.trace import to_line
from pddrt.types import Drawn, Logprobs, Sampling
from pddrt.verify import EPS, diverges

ROOT = Path(__file__).parent.parent
EOS = 256
TOKENIZER = ByteTokenizer()

# -- limits ----------------------------------------------------------------------------------------


def ends_of(limits: Limits, token: int) -> list[str | None]:
    """How the answer would end with `token`, for each place of it."""
    return [finish(limits, 10 + at, token) for at in range(limits.max_tokens)]


def test_no_id_ends_an_answer_before_min_tokens() -> None:
    limits = Limits(10, 5, frozenset({2}), stop_ids=frozenset({7}), min_tokens=2)
    for end in (2, 7):
        assert ends_of(limits, end) == [None, None, "stop", "stop", "stop"]
    assert ends_of(limits, 3) == [None] * 4 + ["length"]
    assert [banned(limits, 10 + at) for at in range(4)] == [{2, 7}, {2, 7}, set(), set()]


def test_ignore_eos_lets_it_be_drawn_and_go_by() -> None:
    limits = Limits(10, 3, frozenset({2}), frozenset({7}), ignore_eos=True)
    assert ends_of(limits, 2) == [None, None, "length"]
    assert ends_of(limits, 7) == ["stop"] * 3
    assert not banned(limits, 10)
    assert banned(replace(limits, min_tokens=1), 10) == {2, 7}, "as with vLLM"


def test_max_tokens_comes_before_min_tokens() -> None:
    limits = Limits(10, 2, frozenset({2}), min_tokens=9)
    assert ends_of(limits, 2) == [None, "length"]


def test_what_may_not_be_drawn_is_not_and_the_rest_as_if_it_were_not_there() -> None:
    rng = np.random.default_rng(5)
    for seed in range(200):
        logits = rng.normal(size=30) * 3
        never = frozenset(rng.choice(30, size=seed % 20, replace=False).tolist()) | {999}
        left = np.array([i for i in range(30) if i not in never])
        top_k, top_p = int(rng.integers(0, 12)), float(rng.uniform(0.2, 1))
        for asked in (Sampling(), Sampling(0.9, seed=seed), Sampling(0.7, top_k, top_p, seed)):
            token = draw(logits, asked, 4, never)
            # The noise goes with the id: a vocabulary in which only those left are likely at all.
            assert token == draw(np.where(np.isin(range(30), left), logits, -1e30), asked, 4)
            assert token in left
    assert draw(logits, Sampling(), 4) == int(logits.argmax()), "the logits are as they were"


def test_a_banned_id_reads_different_and_the_next_best_equal() -> None:
    logits = np.array([1.0, 5.0, 3.0, 2.9, -4.0])
    for asked in (Sampling(), Sampling(0.5, top_k=2, seed=3), Sampling(0.8, top_p=0.6, seed=3)):
        assert diverges(logits, 1, asked, 7, EPS["float32"], {1}) == (float("inf"), 0.0)
        own = draw(logits, asked, 7, {1})
        assert diverges(logits, own, asked, 7, EPS["float32"], {1}) is None
    deficit, bound = diverges(logits, 3, Sampling(), 7, EPS["bfloat16"], {1}) or (0, 0)
    assert deficit == pytest.approx(0.1)
    assert bound == pytest.approx(4 * 2.0**-7 * 5.0), "of all logits, whatever may be drawn"


# -- what is told of an id -------------------------------------------------------------------------


def test_log_probabilities_are_the_softmax_of_raw_logits() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.2, 0.5])) + 7
    told = log_probabilities(logits, 0, 3)
    assert told.drawn == pytest.approx(np.log(0.1), abs=1e-12)
    assert [i for i, _ in told.best] == [3, 1, 2], "the lower id first among equals"
    assert [p for _, p in told.best] == pytest.approx(np.log([0.5, 0.2, 0.2]), abs=1e-12)
    assert log_probabilities(logits, 3, 0) == Logprobs(told.best[0][1], ())
    assert len(log_probabilities(logits, 3, 20).best) == 4, "there are no more"
    assert log_probabilities(allowed(logits, {0}), 1, 1).best[0][1] > told.best[0][1]


def test_log_probabilities_cross_a_frame_unchanged() -> None:
    told = [Logprobs(-0.1, ((5, -0.1), (9, -2.5e-300))), Logprobs(-40.0, ())]
    packed = pack_logprobs(told)
    assert unpack_logprobs(json.loads(json.dumps(packed)), 2) == told
    assert pack_logprobs([None, None]) is None
    assert unpack_logprobs(None, 2) == [None, None]
    with pytest.raises(BadFrame, match="of 2 ids for 3"):
        unpack_logprobs(packed, 3)


def test_what_a_model_thinks_is_in_no_line_of_the_trace() -> None:
    bare = ev.TokensReceived(5, "s0.0", 0, 1, "P", (7,), "x")
    told = replace(bare, logprobs=(Logprobs(-0.25, ((7, -0.25),)),))
    assert told != bare
    assert to_line(told) == to_line(bare)
    assert "0.25" not in to_line(told)


# -- stop strings ----------------------------------------------------------------------------------


def cut(text: str, stop: Sequence[str], free: int = 0) -> str | None:
    """`text` up to the first stop string that ends behind the first `free` characters."""
    for end in range(free + 1, len(text) + 1):
        if found := [len(s) for s in stop if text[:end].endswith(s)]:
            return text[: end - max(found)]
    return None


def pieces(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """A partition of [0, length)."""
    cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(5)))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def test_any_cut_of_a_text_shows_the_same_and_holds_back_only_what_may_be_a_beginning() -> None:
    stopped = 0
    for seed in range(2000):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab€\n", k=rng.randrange(30)))
        stop = [
            "".join(rng.choices("ab€\n", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))
        ]
        free = rng.choice([0, rng.randint(0, len(text))])
        parts = [(0, free), *((free + i, free + j) for i, j in pieces(rng, len(text) - free))]
        shown, out = StopText(stop), ""
        for start, end in parts:
            out += shown.push(text[start:end], counts=start >= free)
            if shown.stopped:
                break
            assert text.startswith(out)
            begun = text[:end]
            may = [n for s in stop for n in range(len(s)) if begun.endswith(s[:n])]
            assert len(out) == end - max(may), (text, stop)
        wanted = cut(text, stop, free)
        stopped += wanted is not None
        assert shown.stopped == (wanted is not None), (text, stop)
        assert out + shown.finish() == (text if wanted is None else wanted), (text, stop)
    assert 500 < stopped < 1500


def test_without_stop_strings_nothing_is_held_back() -> None:
    shown = StopText(())
    assert [shown.push(t) for t in ("a", "", "\n\n")] == ["a", "", "\n\n"]
    assert shown.finish() == ""


def heard(answer: Answer, ids: Sequence[int], frames: Sequence[tuple[int, int]]) -> list[Passed]:
    """What an answer passes on of `ids` that come in these frames."""
    passed: list[Passed] = []
    for begin, end in frames:
        if not (passed and passed[-1].reason):
            drawn = [Drawn(i) for i in ids[begin:end]]
            at = answer.limits.prompt_len + begin
            passed += answer.take(at, drawn, "R", chain(ids[:begin]))
    return passed


def test_F34_any_frames_in_any_order_give_the_text_and_end_of_the_whole() -> None:
    """Characters of up to four bytes, each byte a token, and stop strings that begin and end
    anywhere in them.
    """
    reasons: Counter[str] = Counter()
    for seed in range(1500):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab€é𝄞\n", k=rng.randint(1, 20)))
        ids = list(text.encode())
        stop = [
            "".join(rng.choices("ab€é𝄞\n", k=rng.randint(1, 3))) for _ in range(rng.randrange(4))
        ]
        limits = Limits(3, rng.randint(1, len(ids)), frozenset({EOS}), min_tokens=rng.randrange(6))
        if rng.random() < 0.4:
            ids.insert(rng.randrange(len(ids)), EOS)

        frames = pieces(rng, len(ids))
        frames += [frames[rng.randrange(len(frames))]]  # once more
        rng.shuffle(frames)
        passed = heard(Answer(limits, [1, 2, 3], TOKENIZER, stop), ids, frames)

        want_ids, want_text, reason = whole(ids, limits, stop)
        assert [p.token for p in passed] == want_ids, (text, stop, limits)
        assert "".join(p.text for p in passed) == want_text, (text, stop, limits)
        assert passed[-1].reason == reason
        assert not any(p.reason for p in passed[:-1])
        reasons["string" if reason == "stop" and want_ids[-1] != EOS else str(reason)] += 1
    assert min(reasons.values()) > 150, reasons


def whole(ids: Sequence[int], limits: Limits, stop: Sequence[str]) -> tuple[list[int], str, str]:
    """The answer that `ids` make, read byte by byte: as far as it goes, its text, why it ends."""
    before = ""
    for made, token in enumerate(ids, 1):
        said = bytes(i for i in ids[:made] if i < 256)
        text = said.decode(errors="ignore")  # whole characters
        if token == EOS and made > limits.min_tokens:
            return list(ids[:made]), said.decode(errors="replace"), "stop"
        free = len(text) if made <= limits.min_tokens else len(before)
        if (shown := cut(text, stop, free)) is not None:
            return list(ids[:made]), shown, "stop"
        if made == limits.max_tokens:
            return list(ids[:made]), said.decode(errors="replace"), "length"
        before = text
    raise AssertionError("the answer goes on")


# -- what a scenario may ask -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("presence_penalty=0.5", "counts of all ids so far, the sampler's memory, which is not"),
        ("json_schema={}", "the state of a grammar, which is not carried over a handoff"),
        ("n=2", "one stream with one id a position"),
        ("stop_ids=[-1]", "found -1; allowed: a token id"),
        ('stop=[""]', "found ''; allowed: a text of 1 to 1,024 characters"),
        ("logprobs=21", "found 21; allowed: a whole number from 0 (the id's own) to 20"),
        ("nonsense=1", "found an unknown field; allowed: temperature, top_k"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name_and_says_why(setting: str, why: str) -> None:
    text = (ROOT / "scenarios/tiny.yaml").read_text()
    with pytest.raises(BadInput) as refused:
        parse(text, "tiny.yaml", [f"sampling.{setting}"])
    assert why in str(refused.value)


def test_one_stop_string_may_stand_alone() -> None:
    text = (ROOT / "scenarios/tiny.yaml").read_text()
    scenario = parse(text, "tiny.yaml", ["sampling.stop=END"])
    assert scenario.sampling_with(3) == Sampling(seed=3, stop=("END",))
    assert parse(scenario.dump(), "tiny.yaml").sampling == scenario.sampling
