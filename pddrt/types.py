"""Words shared by every layer: time, roles, sampling, KV layout, slot runs.

Owns nothing. Everything here is a plain immutable value, so that it can cross a seam or a process
boundary without being shared.

Time is `Ns`, integer nanoseconds since the run began. Seconds exist only in files and on screens.
Positions count tokens from the start of the prompt: a range is always half open, [i, j).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Ns = int

US: Ns = 1_000
MS: Ns = 1_000_000
SECOND: Ns = 1_000_000_000

Role = Literal["prefill", "relay", "main"]
Letter = Literal["P", "R", "M"]
FinishReason = Literal["stop", "length", "rejected", "aborted"]

LETTER: dict[str, Letter] = {"prefill": "P", "relay": "R", "main": "M"}

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next id is chosen.

    `temperature` 0 is greedy. Otherwise Gumbel-max over logits / temperature, after top-k (0: off)
    and top-p (1: off), with noise keyed by (`seed`, position, token id): the same draw on every
    instance, whatever else is in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


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
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


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
    end the prompt); otherwise the step yields the id at position `end`.
    """

    request: str
    tokens: tuple[int, ...]
    start: int
    runs: tuple[Run, ...]
    sampling: Sampling | None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


StepCost = Callable[[Sequence[Span]], Ns]
"""How long a step takes by formula or profile: exactly that, or at least that on the wall clock."""
