"""FaultyEngine: an engine that can be told to be slow, or to let steps fail.

Wraps any other engine; its KV, its ids and its sizes are those of the one inside. Only instances
that a scenario plans such faults for have one (see `pddrt.injector`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import EngineFailed
from pddrt.types import Drawn, KVLayout, Run, Span


class FaultyEngine:
    """`factor`: how many times as long a step takes."""

    def __init__(self, env: Env, inner: Engine) -> None:
        self.inner = inner
        self.layout: KVLayout = inner.layout
        self.num_slots = inner.num_slots
        self.max_context = inner.max_context
        self.factor = 1.0
        self._env = env
        self._failing = 0
        self._out_of_memory = 0

    def fail(self, steps: int, *, out_of_memory: bool = False) -> None:
        """The next `steps` steps fail: after they have run, or, with `out_of_memory`, at once."""
        if out_of_memory:
            self._out_of_memory += steps
        else:
            self._failing += steps

    def recover(self) -> None:
        """Steps that were yet to fail do not."""
        self._failing = self._out_of_memory = 0

    # -- Engine ------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.inner.start()

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        """See `Engine.step`. A step that fails has written what it would have; nobody may rely on
        it.
        """
        if self._out_of_memory:
            self._out_of_memory -= 1
            tokens = sum(len(span.tokens) for span in spans)
            raise EngineFailed(f"out of memory in a step of {tokens} tokens (a planned fault)")
        begun, factor = self._env.now(), self.factor
        drawn = await self.inner.step(spans)
        if factor != 1:
            took = self._env.now() - begun
            await self._env.sleep_until(begun + round(took * factor))
        if self._failing:
            self._failing -= 1
            raise EngineFailed("the step failed (a planned fault)")
        return drawn

    def read_kv(self, runs: Sequence[Run]) -> bytes:
        return self.inner.read_kv(runs)

    def write_kv(self, runs: Sequence[Run], payload: bytes | memoryview) -> None:
        self.inner.write_kv(runs, payload)

    def convert_kv(self, payload: bytes | memoryview, dtype: str) -> bytes:
        return self.inner.convert_kv(payload, dtype)

    def pack_kv(self, payload: bytes) -> bytes:
        return self.inner.pack_kv(payload)

    async def close(self) -> None:
        await self.inner.close()
