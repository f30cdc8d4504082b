"""Whole deployments of `tiny` in float64, where no choice depends on how sums are rounded, against
the plain model.

The reference is transformers' own forward over prompt and answer, without cache, pages, chunks or
steps: where it agrees at every position, given what came before, a free re-run would have made the
same answer. Sampled ids are drawn from its logits with the request's keyed noise. What was told of
an id's probability must be the reference's, too: it notices KV that is wrong long before another id
is chosen.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pddrt.deployment import Deployment
from pddrt.engine.base import Engine
from pddrt.engine.models import load
from pddrt.engine.sampling import draw
from pddrt.engine.torch import TorchEngine
from pddrt.env import Env
from pddrt.metrics import RequestRecord
from pddrt.roles.instance import InstanceSpec
from pddrt.types import Ns, Sampling, Span
from pddrt.workload import Session, Turn

from .cluster import Cluster, Played, cost

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8),
    "cut": Sampling(temperature=1.1, top_k=30, top_p=0.9),
}
POOL = 1 << 15
"""KV slots of an instance: room for everything at once."""
ROUNDING = 1e-12
"""Log-probabilities that differ by less are equal. They differ by 2e-15, and by 1e-4 or more where
the KV of a single token is that of another, which changes an id in one answer of ten."""
ROWS = 64


@dataclass
class TorchCluster(Cluster):
    prefill_cost: Callable[[Sequence[Span]], Ns] = cost

    def engine(self, env: Env, spec: InstanceSpec) -> Engine:
        model = load_tiny()
        costs = {"prefill": self.prefill_cost, "relay": self.relay_cost, "main": self.main_cost}
        return TorchEngine(
            model.module,
            model.layout,
            spec.kv_tokens,
            env,
            max_context=model.max_context,
            step_cost=costs[spec.role],
        )

    def play(
        self,
        sessions: Sequence[Session],
        during: Callable[[Deployment], Awaitable[None]] | None = None,
    ) -> Played:
        """A run keeps nearly all that it makes until it ends; to look for garbage would take a
        third of its time.
        """
        gc.disable()
        try:
            return super().play(sessions, during)
        finally:
            gc.enable()


@functools.cache
def load_tiny() -> Any:
    return load("tiny", "float64")


@functools.cache
def plain() -> Any:
    """The same weights under transformers' own attention ("eager" takes its softmax in float32)."""
    module: Any = copy.deepcopy(load_tiny().module)
    module.set_attn_implementation("sdpa")
    return module


def logits_of(texts: Sequence[tuple[tuple[int, ...], Sequence[int]]]) -> list[torch.Tensor]:
    """For each (prompt, answer) the plain model's logits at the answer's positions, [answer,
    vocabulary]. Many texts in one pass: what is filled up behind a text, nothing in it can see.
    """
    torch.set_num_threads(1)
    ids = [torch.tensor([*prompt, *output[:-1]]) for prompt, output in texts]
    by_length = sorted(range(len(ids)), key=lambda n: len(ids[n]))
    found: dict[int, torch.Tensor] = {}
    for at in range(0, len(ids), ROWS):
        rows = by_length[at : at + ROWS]
        batch = torch.nn.utils.rnn.pad_sequence([ids[n] for n in rows], batch_first=True)
        with torch.inference_mode():
            logits = plain()(batch, use_cache=False).logits
        for row, n in enumerate(rows):
            found[n] = logits[row, len(texts[n][0]) - 1 : len(ids[n])]
    return [found[n] for n in range(len(ids))]


def off_by(r: RequestRecord, logits: torch.Tensor) -> list[float]:
    """By how much each id's log-probability, which was asked for, is not that of `logits`."""
    wanted = logits.log_softmax(-1)[range(len(r.ids)), r.ids].tolist()
    told = [one.drawn for one in r.logprobs if one is not None]
    return [abs(a - b) for a, b in zip(told, wanted, strict=True)]


def told_wrong(records: Sequence[RequestRecord]) -> list[list[float]]:
    """`off_by` the plain model's logits."""
    texts = [(r.prompt_ids, r.ids) for r in records]
    return [off_by(r, logits) for r, logits in zip(records, logits_of(texts), strict=True)]


class Prompts:
    """Random ids; no two prompts begin alike unless they are made to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def fresh(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(256) for _ in range(length))

    def sharing(self, base: tuple[int, ...], shared: int, length: int) -> tuple[int, ...]:
        """`length` ids, the first `shared` of them those of `base`, the next one not."""
        other = (base[shared] + 1 + self.rng.randrange(255)) % 256
        return (*base[:shared], other, *self.fresh(length))[:length]


def session(
    index: int,
    start: Ns,
    prompt: tuple[int, ...],
    max_tokens: int,
    sampling: Sampling | None = None,
) -> Session:
    return Session(index, start, (Turn("", max_tokens, ids=prompt, sampling=sampling),))


def check(played: Played, asked: list[Session]) -> list[RequestRecord]:
    """Everything sound, and every answer the model's, of the right length. The records, in the
    order of `asked`.
    """
    played.assert_sound()
    ends = played.deployment.gateway.eos_ids
    by_session = {r.session: r for r in played.records}
    records = [by_session[s.index] for s in asked]
    for r in records:
        assert r.ids, (r.id, r.detail)
    prompts = [s.turns[0].ids or () for s in asked]
    texts = [(prompt, r.ids) for prompt, r in zip(prompts, records, strict=True)]
    for s, r, logits in zip(asked, records, logits_of(texts), strict=True):
        (turn,), about = s.turns, (r.id, r.pipeline, r.prompt_tokens, r.sources)
        rows = enumerate(logits.numpy(), r.prompt_tokens)
        assert r.ids == [draw(row, r.sampling, at) for at, row in rows], about
        if r.sampling.logprobs is not None:
            assert max(off_by(r, logits)) < ROUNDING, about
        assert not ends & set(r.ids[:-1]), about
        ended = "stop" if r.ids[-1] in ends else "length"
        assert r.finish_reason == ended, about
        assert ended == "stop" or len(r.ids) == turn.max_tokens, about
    return records


def where_it_ended(r: RequestRecord) -> str:
    """On P, on RLD, at the switch (the first id that MD makes is the last), or on MD."""
    if len(r.ids) > 1 and r.sources.count("M") == 1:
        return "switch"
    return {"P": "P", "R": "RLD", "M": "MD"}[r.sources[-1]]
