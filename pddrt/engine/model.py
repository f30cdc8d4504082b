"""ModelEngine: a modelled engine. Steps cost what a formula says, KV has its real size, tokens come
from an oracle.

Instead of tensors each slot holds one 64-bit **tag**, and the "model" is

    tag[p]  = H(tag[0] + ... + tag[p - 1], p, id[p])        next id at p = H'(tag[0] + ... + tag[p -
    1], p) mod vocab

so that, as in attention, the next id depends on the KV of every earlier position, and a slot that
is missing, stale, shifted or someone else's changes the answer. The answer is a function of the
prompt alone: a token oracle without a model.

On the wire a token's tag stands at the head of its share of the payload, the rest is zeros: bytes
in equals bytes out, at the layout's real size. Sampling parameters other than the seed do not
matter here; the seed enters H'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from pddrt.engine.base import StepCost
from pddrt.env import Env
from pddrt.types import KVLayout, Run, Span

Tags = npt.NDArray[np.uint64]

NEVER = np.uint64(0xDEADBEEFDEADBEEF)
"""What a slot holds that nobody has written: it spoils any answer it enters."""


class ModelEngine:
    def __init__(
        self,
        env: Env,
        layout: KVLayout,
        num_slots: int,
        *,
        vocab: int,
        max_context: int,
        step_cost: StepCost,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`eos_ids` are never drawn: a modelled answer has the length that the workload says."""
        assert layout.bytes_per_token >= 8, "a token's KV must hold its tag"
        self.env = env
        self.layout = layout
        self.num_slots = num_slots
        self.max_context = max_context
        self._vocab = vocab
        self._cost = step_cost
        self._eos = eos_ids
        self._tags: Tags = np.full(num_slots, NEVER, dtype=np.uint64)

    async def start(self) -> None:
        """Nothing to get ready."""

    async def step(self, spans: Sequence[Span]) -> list[int | None]:
        """The tags of the new tokens are written when the charged time has passed, not before."""
        await self.env.sleep_until(self.env.now() + self._cost(spans))
        return [self._span(span) for span in spans]

    def _span(self, span: Span) -> int | None:
        slots = _slots(span.runs)
        assert len(slots) == span.end
        assert span.tokens
        total = int(self._tags[slots[: span.start]].sum())
        for position, token in enumerate(span.tokens, span.start):
            tag = _hash(total, position, token)
            self._tags[slots[position]] = tag
            total = (total + tag) & 0xFFFFFFFFFFFFFFFF
        if span.sampling is None:
            return None
        return self._draw(total, span.end, span.sampling.seed if span.sampling.temperature else 0)

    def _draw(self, total: int, position: int, seed: int) -> int:
        for attempt in range(1, 1000):
            token = _hash(total, position, seed + attempt * 0x9E3779B97F4A7C15) % self._vocab
            if token not in self._eos:
                return token
        raise AssertionError("every id is an end of sequence")

    def read_kv(self, runs: Sequence[Run]) -> bytes:
        tags = self._tags[_slots(runs)]
        payload = np.zeros((len(tags), self.layout.bytes_per_token), dtype=np.uint8)
        payload[:, :8] = tags.view(np.uint8).reshape(-1, 8)
        return payload.tobytes()

    def write_kv(self, runs: Sequence[Run], payload: bytes | memoryview) -> None:
        slots = _slots(runs)
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(slots), -1)
        assert rows.shape[1] == self.layout.bytes_per_token
        self._tags[slots] = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()

    async def close(self) -> None:
        self._tags = np.zeros(0, dtype=np.uint64)


def _slots(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    if len(runs) == 1:
        return np.arange(runs[0].slot, runs[0].slot + runs[0].length)
    parts = [np.arange(r.slot, r.slot + r.length) for r in runs]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _hash(*values: int) -> int:
    digest = xxhash.xxh3_64()
    for value in values:
        digest.update((value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little"))
    return digest.intdigest()
