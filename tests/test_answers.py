"""Answers of whole deployments against one engine that answers alone: the same ids, text, end and
log-probabilities, whatever a request asks, in every pipeline and handoff mode, with ends before, at
and after the switch. Then a real model's log-probabilities against the plain forward's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pddrt import trace as ev
from pddrt.engine.model import ModelEngine
from pddrt.engine.sampling import draw
from pddrt.engine.tokens import Detokenizer
from pddrt.env import VirtualEnv
from pddrt.metrics import RequestRecord
from pddrt.policy.handoff import Adaptive, CatchUp, OneShot, Overlap
from pddrt.policy.handoff import Policy as HandoffPolicy
from pddrt.policy.route import Alone, Naive, Pdd, Policy, RelayOnly
from pddrt.run import Run as WholeRun
from pddrt.scenario import parse
from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, Drawn, Ns, Run, Sampling, Span
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, VOCAB, Cluster, Played
from .paritylab import Prompts, plain
from .test_finish import EOS, ROOT, TOKENIZER, cut
from .test_parity import ENDS, deployed

# -- deployments: against one engine that answers alone --------------------------------------------

PROMPT = 120
MODES: dict[str, HandoffPolicy] = {
    "one-shot": OneShot(),
    "catch-up": CatchUp(threshold=3, max_ids_per_round=4),
    "adaptive": Adaptive(threshold=5, max_ids_per_round=6),
    "overlap": Overlap(threshold=3, max_ids_per_round=8),
}
PIPELINES: dict[str, Policy] = {
    "P-RLD-MD": Pdd(1 * MS),
    "P-MD": Naive(),
    "P-RLD": RelayOnly(1 * MS),
    "P": Alone("prefill"),
    "MD": Alone("main"),
}


def quick(spans: Sequence[Span]) -> Ns:
    """A main decoder that passes a relay soon."""
    return 1 * MS + sum(len(s.tokens) for s in spans) * MS // 50


def cluster(mode: str = "one-shot", pipeline: str = "P-RLD-MD", seed: int = 1) -> Cluster:
    return Cluster(
        seed=seed,
        pages=256,
        policy=PIPELINES[pipeline],
        handoff=MODES[mode],
        main_cost=quick,
        rate=1_000_000,
        eos_ids=frozenset({EOS}),
    )


@dataclass(frozen=True)
class Asked:
    """A request, and what one engine alone says to it: the reference, which knows no handoff."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling

    @property
    def turn(self) -> Turn:
        return Turn("", self.max_tokens, ids=self.prompt, sampling=self.sampling)

    def check(self, r: RequestRecord) -> None:
        drawn, text, reason = alone(self)
        assert r.ids == [d.token for d in drawn], (r.id, r.sources, self.sampling)
        assert (r.text, r.finish_reason) == (text, reason), (r.id, r.sources, self.sampling)
        assert r.logprobs == [d.logprobs for d in drawn], (r.id, r.sources)
        assert r.wasted >= 0


@cache
def alone(asked: Asked) -> tuple[tuple[Drawn, ...], str, str]:
    """Prefill at once, then id by id; each rule read off the sampling, not asked of `messages`."""
    s, m = asked.sampling, len(asked.prompt)
    detokenizer, made = Detokenizer(TOKENIZER), list[Drawn]()

    async def answer() -> tuple[tuple[Drawn, ...], str, str]:
        env, size = VirtualEnv(0, Trace()), m + asked.max_tokens
        engine = ModelEngine(
            env, LAYOUT, size, vocab=VOCAB, max_context=size, step_cost=lambda _spans: 0
        )
        ids, start, text = list(asked.prompt), 0, ""
        while True:
            early = len(made) < s.min_tokens
            never = frozenset({EOS, *s.stop_ids}) if early else frozenset()
            span = Span("x", tuple(ids[start:]), start, (Run(0, len(ids)),), s, never)
            start = len(ids)
            (drawn,) = await engine.step([span])
            assert drawn is not None
            made.append(drawn)
            ids.append(drawn.token)
            ends = {*s.stop_ids} if s.ignore_eos else {EOS, *s.stop_ids}
            if drawn.token in ends and not early:
                return tuple(made), *rest(text, "stop")
            before, text = text, text + detokenizer.push(drawn.token)
            free = len(text) if len(made) <= s.min_tokens else len(before)
            if (shown := cut(text, s.stop, free)) is not None:
                return tuple(made), shown, "stop"
            if len(made) == asked.max_tokens:
                return tuple(made), *rest(text, "length")

    def rest(text: str, reason: str) -> tuple[str, str]:
        """With characters that will not be finished any more; no stop string is ever shown."""
        whole = text + detokenizer.finish()
        shown = cut(whole, s.stop, len(text)) if len(made) > s.min_tokens else None
        return (whole, reason) if shown is None else (shown, "stop")

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(answer())


def play(deployment: Cluster, asked: Sequence[Asked], every: Ns = 7 * MS) -> Played:
    """All of them, checked, one after the other or some at a time."""
    sessions = [Session(n, n * every, (a.turn,)) for n, a in enumerate(asked)]
    played = deployment.play(sessions)
    played.assert_sound()
    records = {r.session: r for r in played.records}
    for n, a in enumerate(asked):
        a.check(records[n])
    return played


def anything(rng: random.Random) -> Asked:
    """A request with settings of its own; what ends it is taken from what it would say."""
    prompt = tuple(rng.randrange(256) for _ in range(rng.choice([2, 40, PROMPT, 300])))
    hot = {"temperature": rng.choice([0.0, 0.8]), "seed": rng.getrandbits(48)}
    told = rng.choice([None, 0, 1, 5])
    free = Asked(prompt, 70, Sampling(**hot, logprobs=told, ignore_eos=True))  # type: ignore[arg-type]
    drawn, text, _ = alone(free)
    stop_ids = tuple(d.token for d in rng.choices(drawn, k=rng.randrange(3)))
    stop = []
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text))
        stop.append(text[at : at + rng.randint(1, 8)])
    return Asked(
        prompt,
        rng.choice([1, 20, 70, 70, 70]),
        replace(
            free.sampling,
            min_tokens=rng.choice([0, 0, 1, 10, 30, 80]),
            ignore_eos=rng.random() < 0.3,
            stop_ids=stop_ids if rng.random() < 0.6 else (),
            stop=tuple(stop),
        ),
    )


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_any_settings_get_the_answers_of_one_engine_alone(mode: str) -> None:
    ends: Counter[str] = Counter()
    parts = 0
    for seed in range(10):
        rng = random.Random(f"{mode}/{seed}")
        faster = replace(cluster(mode, seed=seed), rate=6_000_000)
        played = play(faster, [anything(rng) for _ in range(8)])
        for r in played.records:
            ends[r.sources[-1] + str(r.finish_reason)] += 1
        parts += sum(isinstance(e, ev.HandoffSent) and not e.last for e in played.trace.events)
    assert min(ends[maker + reason] for maker in "RM" for reason in ("stop", "length")) > 1, ends
    assert ends["Plength"] > 1
    assert (parts > 5) == (mode != "one-shot")


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_gives_the_answers_of_one_engine_alone(pipeline: str) -> None:
    rng = random.Random(pipeline)
    played = play(cluster(pipeline=pipeline), [anything(rng) for _ in range(16)])
    assert {r.pipeline for r in played.records} <= {pipeline, "P-MD"}


FREE = Asked(
    tuple(random.Random(11).randrange(256) for _ in range(PROMPT)),
    150,
    Sampling(0.9, seed=5, logprobs=2, ignore_eos=True),
)


@cache
def switch(mode: str) -> int:
    """Index of the first token that the main decoder made of FREE, alone in its deployment."""
    (r,) = play(cluster(mode), [FREE]).records
    assert r.sources.count("R") > 4
    assert r.sources.count("M") > 4
    return r.sources.index("M")


def ending(asked: Asked, at: int, tokens: int) -> Asked:
    """The same, but with a stop string of the text of `tokens` tokens, up to that of token `at`."""
    drawn, _, _ = alone(asked)
    detokenizer = Detokenizer(TOKENIZER)
    texts = [detokenizer.push(d.token) for d in drawn]
    while not texts[at]:
        at += 1
    stop = "".join(texts[at + 1 - tokens : at + 1])
    return replace(asked, sampling=replace(asked.sampling, stop=(stop,)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [-9, -3, -2, -1, 0, 1, 2, 3, 9])
def test_F34_a_stop_string_across_the_switch_ends_the_answer(mode: str, offset: int) -> None:
    """Its text made by both decoders, or complete just before the switch, or just after it."""
    asked = ending(FREE, switch(mode) + offset, 6)
    played = play(cluster(mode), [asked])
    (r,) = played.records
    assert r.finish_reason == "stop"
    assert asked.sampling.stop[0] not in r.text
    made = [e for e in played.trace.events if isinstance(e, ev.TokensMade)]
    assert r.wasted == sum(e.end - e.start for e in made) - len(r.ids)
    closed = max(e.t for e in played.trace.events if isinstance(e, ev.Freed))
    assert r.finished is not None
    assert made[-1].t - r.finished < 40 * MS, "the close ends them: a link and a step at most"
    assert closed - r.finished < 200 * MS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
def test_min_tokens_move_an_end_from_one_decoder_to_the_other(mode: str, offset: int) -> None:
    """A stop id that comes again and again, and may not before the switch, or so."""
    common = Counter(d.token for d in alone(FREE)[0]).most_common(3)
    asked = replace(FREE.sampling, stop_ids=tuple(token for token, _ in common))
    early = replace(FREE, sampling=asked)
    late = replace(early, sampling=replace(asked, min_tokens=switch(mode) + offset))
    (first,) = play(cluster(mode), [early]).records
    (second,) = play(cluster(mode), [late]).records
    assert len(first.ids) < switch(mode) + offset < len(second.ids)
    assert not set(asked.stop_ids) & set(second.ids[: switch(mode) + offset])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("pipeline", ["P-RLD-MD", "P-MD"])
@pytest.mark.parametrize("count", [1, 2])
def test_F36_the_first_token_comes_with_its_log_probabilities(
    pipeline: str, early: bool, count: int
) -> None:
    """P makes it, and whoever holds the KV first delivers it; or P itself."""
    deployment = replace(cluster(pipeline=pipeline), early_first_token=early)
    (r,) = play(deployment, [replace(FREE, max_tokens=count)]).records
    assert r.sources[0] == "P"
    assert all(told is not None and len(told.best) == 2 for told in r.logprobs)
    assert len(r.logprobs) == count


def test_the_first_token_may_complete_a_stop_string_or_be_banned() -> None:
    first = alone(FREE)[0][0].token
    for sampling in (
        replace(FREE.sampling, stop_ids=(first,)),
        replace(FREE.sampling, stop_ids=(first,), min_tokens=1),
    ):
        (r,) = play(cluster(), [replace(FREE, sampling=sampling)]).records
        assert (r.ids == [first]) == (not sampling.min_tokens)
        assert r.sources[0] == "P"


def test_without_being_asked_nothing_is_told() -> None:
    asked = replace(FREE, sampling=replace(FREE.sampling, logprobs=None))
    (r,) = play(cluster(), [asked]).records
    assert set(r.logprobs) == {None}


# -- a real model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "sampled", "cut"])
def test_log_probabilities_of_a_real_model_are_those_of_its_plain_forward(kind: str) -> None:
    """P's, RLD's and MD's, float64, to 1e-9; early ends are banned and count in the softmax."""
    few, prompts = 25, Prompts(len(kind))
    made = deployed(16, kind, ENDS)
    made.sampling = replace(made.sampling, logprobs=4, min_tokens=few)
    sessions = [
        Session(n, n * 10 * MS, (Turn("", 60, ids=prompts.fresh(300 + n)),)) for n in range(4)
    ]
    played = made.play(sessions)
    played.assert_sound()
    assert {"P", "R", "M"} == set("".join(r.sources for r in played.records))
    wanted_end = 0
    for r in played.records:
        with torch.inference_mode():
            ids = torch.tensor([[*r.prompt_ids, *r.ids[:-1]]])
            logits = plain()(ids, use_cache=False).logits[0, len(r.prompt_ids) - 1 :]
        scores = torch.log_softmax(logits, -1)
        for at, (token, told) in enumerate(zip(r.ids, r.logprobs, strict=True)):
            never = ENDS if at < few else frozenset()
            row, position = logits[at].numpy(), len(r.prompt_ids) + at
            assert token == draw(row, r.sampling, position, never), (r.id, at)
            assert told is not None
            assert told.drawn == pytest.approx(float(scores[at, token]), abs=1e-9)
            best = scores[at].topk(4)
            assert [i for i, _ in told.best] == best.indices.tolist()
            assert [p for _, p in told.best] == pytest.approx(best.values.tolist(), abs=1e-9)
            wanted_end += at < few and draw(row, r.sampling, position) in ENDS
        assert len(r.ids) > few
    assert wanted_end, "nobody wanted to end early"


TINY = ("clock=virtual", "workload.sessions=4", "workload.turns=1", "workload.output_tokens=40")


def test_a_scenario_asks_and_its_files_and_its_oracle_answer(tmp_path: Path) -> None:
    asked = ['sampling.stop=["e", "\\n\\n"]', "sampling.stop_ids=[40, 41]", "sampling.logprobs=2"]
    asked += ["sampling.min_tokens=6", "sampling.temperature=0.7"]
    text = (ROOT / "scenarios/tiny.yaml").read_text()
    run = WholeRun(parse(text, "tiny.yaml", [*TINY, *asked]), out=tmp_path / "run", verify=True)
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    assert result.summary["parity"]["different"] == 0
    lines = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    for r in map(json.loads, lines):
        assert [len(told["best"]) for told in r["logprobs"]] == [2] * r["output_tokens"]
        assert all(told["drawn"] <= told["best"][0][1] <= 0 for told in r["logprobs"])
        assert r["output_tokens"] > 6
        assert not {40, 41} & set(r["output_ids"][:6])
        assert r["finish_reason"] in ("stop", "length")
    assert '"logprobs"' not in (tmp_path / "run" / "events.jsonl").read_text()
