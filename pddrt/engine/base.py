"""The engine seam: what a role may ask of whatever computes its steps and holds its KV.

An engine owns a pool of `num_slots` token slots and nothing else: which slot belongs to whom is the
instance's page accounting (`pddrt.kv`). An engine runs one step at a time; the caller never starts
a second one before the first has returned.

Memory that runs out, in a step or while KV is read, written or converted, is EngineFailed: whoever
asked for it fails the requests that it was for, and the instance goes on.

`torch.TorchEngine` computes with a real model; `model.ModelEngine` charges time and keeps tags in
place of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pddrt.types import Drawn, KVLayout, Run, Span, StepCost

__all__ = ["Engine", "StepCost"]


class Engine(Protocol):
    layout: KVLayout
    num_slots: int
    max_context: int
    """Longest sequence the model can take, in tokens."""

    async def start(self) -> None:
        """Gets ready, once, before the first step: from then on a step costs what a step costs."""
        ...

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        """One forward pass over all spans together; the next id of each span, None where none was
        asked. It is none of the span's `banned`, and comes with the log-probabilities that its
        `sampling` asks for.

        Raises EngineFailed where this step could not be done; the next one may be.

        Writes the KV of every span's tokens into the slots its runs name. Spans are disjoint: no
        slot is written by one and touched by another. KV is complete, and may be read or sent, once
        this returns.
        """
        ...

    def read_kv(self, runs: Sequence[Run]) -> bytes:
        """A copy of the KV in `runs`, in wire order: for each layer K then V, each [tokens,
        kv_heads, head_dim].

        Length: tokens * layout.bytes_per_token.
        """
        ...

    def write_kv(self, runs: Sequence[Run], payload: bytes | memoryview) -> None:
        """Stores `payload` (wire order, this engine's layout) into `runs`."""
        ...

    def convert_kv(self, payload: bytes | memoryview, dtype: str) -> bytes:
        """`payload`, KV in wire order whose numbers are of `dtype`, as `write_kv` takes it here.

        Rounded to nearest where this engine's dtype is the narrower one. `types.EIGHT_BIT` is such
        a dtype.
        """
        ...

    def pack_kv(self, payload: bytes) -> bytes:
        """`payload`, as `read_kv` gives it here, in `types.EIGHT_BIT`: in wire order, each [tokens,
        kv_heads] a scale and its numbers. The scale is the largest absolute value over 127, so
        that a number is off by half a scale at most.
        """
        ...

    async def close(self) -> None:
        """Ends worker threads and frees the pool."""
        ...
