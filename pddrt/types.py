"""Words shared by every layer: time, roles, sampling, KV layout, slot runs.

Owns nothing. Everything here is a plain immutable value, so that it can cross a seam or a process
boundary without being shared.

Time is `Ns`, integer nanoseconds since the run began. Seconds exist only in files and on screens.
Positions count tokens from the start of the prompt: a range is always half open, [i, j).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Ns = int

US: Ns = 1_000
MS: Ns = 1_000_000
SECOND: Ns = 1_000_000_000

Role = Literal["prefill", "relay", "main"]
Letter = Literal["P", "R", "M"]
FinishReason = Literal["stop", "length", "rejected", "aborted"]

LETTER: dict[str, Letter] = {"prefill": "P", "relay": "R", "main": "M"}

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


EIGHT_BIT = "int8"
"""KV on the wire in 8 bits a number: of each token and head a float32 scale, then its numbers as
int8, number = scale * int8. No instance holds KV in this form.
"""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks of its answer: how ids are drawn, what ends it, what is told of them.

    `temperature` 0 is greedy. Otherwise Gumbel-max over logits / temperature, after top-k (0: off)
    and top-p (1: off), with noise keyed by (`seed`, position, token id): the same draw on every
    instance, whatever else is in the batch.

    `min_tokens`, `ignore_eos` and `stop_ids` are explained at `messages.Limits`. `stop` are strings
    that end the answer's text; only the gateway knows text. `logprobs`: with each id its
    log-probability and the so many most probable ids; None: neither.

    Everything here holds for a position by itself, whoever computes it: that is why it survives a
    handoff. What needs a memory of its own (penalties, grammars) has no place here.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> Sampling:
        """Inverse of `dataclasses.astuple`, also where tuples have become lists on the way."""
        plain: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
        return cls(*plain)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's KV is, as both ends of a transfer must agree on it.

    `fingerprint` names the weights (not only the architecture): equal fingerprints mean that KV
    made by one instance may be read by the other.
    """

    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers, in bytes."""
        if self.dtype == EIGHT_BIT:
            head = SCALE_BYTES + self.head_dim
        else:
            head = self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.layers * self.kv_heads * head


@dataclass(frozen=True, slots=True)
class Run:
    """`length` consecutive KV slots from `slot` on. A sequence's KV is a list of runs, in token
    order.
    """

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: `tokens` at positions [start, start + len(tokens)).

    `runs` are the slots of positions [0, start + len(tokens)): KV of [0, start) is there already,
    the step writes the rest. `sampling` is None where no next id is wanted (a chunk that does not
    end the prompt); otherwise the step yields the id at position `end`, none of the `banned`.
    """

    request: str
    tokens: tuple[int, ...]
    start: int
    runs: tuple[Run, ...]
    sampling: Sampling | None
    banned: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model made of one position: natural logarithms of probabilities.

    By the softmax of the raw logits: before temperature, cuts and bans, as vLLM reports them unless
    told otherwise. `drawn` is that of the id that was drawn, `best` are the most probable ids with
    theirs, best first; the lower id first among equals.
    """

    drawn: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The id that a step yields for a span, and what was asked to be told of it."""

    token: int
    logprobs: Logprobs | None = None


StepCost = Callable[[Sequence[Span]], Ns]
"""How long a step takes by formula or profile: exactly that, or at least that on the wall clock."""
