"""ModelEngine: a modelled engine. Steps cost what a formula says, KV has its real size, tokens come
from an oracle.

Instead of tensors each slot holds one 64-bit **tag**, and the "model" is

    tag[p]       = H(tag[0] + ... + tag[p - 1], p, id[p])
    next id at p = H'(tag[0] + ... + tag[p - 1], p) mod vocab

so that, as in attention, the next id depends on the KV of every earlier position, and a slot that
is missing, stale, shifted or someone else's changes the answer. The answer is a function of the
prompt alone: a token oracle without a model.

Log-probabilities are a stand-in, so that a modelled cluster can show how they are carried: numbers
made from the same sum, the position and the id, in place of a model's opinion. `oracle` says what
belongs at each position of a text without an engine.

On the wire a token's tag stands at the head of its share of the payload, the rest is zeros: bytes
in equals bytes out, at the layout's real size. Of what shapes a draw only the seed matters here,
and only where the temperature is not 0: it enters H'. What may not be drawn is not.

Under either clock a step takes what the formula charges, and its KV is there at the end of it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash

from pddrt.engine.base import StepCost
from pddrt.env import Env
from pddrt.messages import Limits, banned
from pddrt.types import EIGHT_BIT, Drawn, KVLayout, Logprobs, Run, Sampling, Span

Tags = npt.NDArray[np.uint64]

NEVER = np.uint64(0xDEADBEEFDEADBEEF)
"""What a slot holds that nobody has written: it spoils any answer it enters."""

_MASK = 0xFFFFFFFFFFFFFFFF
_WORDS = struct.Struct("<3Q")


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
        self._stepping = False
        self._closed = False

    async def start(self) -> None:
        """Nothing to get ready."""

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        """See `Engine.step`. Tags are written when the charged time has passed, not before."""
        assert not self._stepping, "an engine runs one step at a time"
        assert not self._closed, "the engine is closed"
        assert spans, "a step without spans"
        self._stepping = True
        try:
            await self.env.sleep_until(self.env.now() + self._cost(spans))
            return [self._span(span) for span in spans]
        finally:
            self._stepping = False

    def _span(self, span: Span) -> Drawn | None:
        slots = self._slots(span.runs)
        assert len(slots) == span.end <= self.max_context, f"{span.request}: runs"
        assert span.tokens, f"{span.request}: no tokens"
        total = int(self._tags[slots[: span.start]].sum())
        made = []
        for position, token in enumerate(span.tokens, span.start):
            made.append(_hash(total, position, token))
            total = (total + made[-1]) & _MASK
        self._tags[slots[span.start :]] = np.array(made, dtype=np.uint64)
        if span.sampling is None:
            return None
        never = self._eos | span.banned
        token = _draw(total, span.end, span.sampling, self._vocab, never)
        most = span.sampling.logprobs
        told = None if most is None else _stand_in(total, span.end, token, most, self._vocab)
        return Drawn(token, told)

    def read_kv(self, runs: Sequence[Run]) -> bytes:
        tags = self._tags[self._slots(runs)]
        payload = np.zeros((len(tags), self.layout.bytes_per_token), dtype=np.uint8)
        payload[:, :8] = tags.view(np.uint8).reshape(-1, 8)
        return payload.tobytes()

    def write_kv(self, runs: Sequence[Run], payload: bytes | memoryview) -> None:
        slots = self._slots(runs)
        assert memoryview(payload).nbytes == len(slots) * self.layout.bytes_per_token, (
            "payload and runs differ in size"
        )
        if not runs:
            return
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(slots), -1)
        self._tags[slots] = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()

    def convert_kv(self, payload: bytes | memoryview, dtype: str) -> bytes:
        """Only the size of a token's share changes; tags are not numbers."""
        return self._resized(payload, replace(self.layout, dtype=dtype), self.layout)

    def pack_kv(self, payload: bytes) -> bytes:
        """As `convert_kv`: a tag is not rounded."""
        return self._resized(payload, self.layout, replace(self.layout, dtype=EIGHT_BIT))

    def _resized(self, payload: bytes | memoryview, old: KVLayout, new: KVLayout) -> bytes:
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(-1, old.bytes_per_token)
        resized = np.zeros((len(rows), new.bytes_per_token), dtype=np.uint8)
        resized[:, :8] = rows[:, :8]
        return resized.tobytes()

    async def close(self) -> None:
        self._closed = True
        self._tags = np.zeros(0, dtype=np.uint64)

    def _slots(self, runs: Sequence[Run]) -> npt.NDArray[np.int64]:
        for run in runs:
            assert run.slot >= 0, f"{run} is out of range"
            assert 0 < run.length <= len(self._tags) - run.slot, f"{run} is out of range"
        if len(runs) == 1:
            return np.arange(runs[0].slot, runs[0].slot + runs[0].length)
        parts = [np.arange(r.slot, r.slot + r.length) for r in runs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def oracle(
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    *,
    vocab: int,
    eos_ids: frozenset[int] = frozenset(),
    ends: frozenset[int] = frozenset(),
) -> list[int]:
    """The ids that belong at the positions of `output`, each given all that really came before.

    `eos_ids` as the engine has them, `ends`: those that the roles know, and the engine may draw.
    """
    limits = Limits.of(len(prompt), len(output), ends, sampling)
    wanted, total = [], 0
    for position, token in enumerate([*prompt, *output]):
        if position >= len(prompt):
            never = eos_ids | banned(limits, position)
            wanted.append(_draw(total, position, sampling, vocab, never))
        total = (total + _hash(total, position, token)) & _MASK
    return wanted


def _draw(total: int, position: int, sampling: Sampling, vocab: int, never: Collection[int]) -> int:
    seed = sampling.seed if sampling.temperature else 0
    for attempt in range(1, 1000):
        token = _hash(total, position, seed + attempt * 0x9E3779B97F4A7C15) % vocab
        if token not in never:
            return token
    raise AssertionError("there is nothing left to draw")


def _stand_in(total: int, position: int, token: int, most: int, vocab: int) -> Logprobs:
    """Numbers in (-16, 0], multiples of 2^-16, by the hash of (sum, position, id)."""

    def of(candidate: int) -> float:
        return -(_hash(total, position, ~candidate) >> 44) / 2**16

    others = {_hash(total, position, n) % vocab for n in range(most)}
    best = sorted(((i, of(i)) for i in others), key=lambda pair: (-pair[1], pair[0]))
    return Logprobs(of(token), tuple(best))


def _hash(a: int, b: int, c: int) -> int:
    return xxhash.xxh3_64_intdigest(_WORDS.pack(a, b, c & _MASK))
