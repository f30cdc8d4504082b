"""Steps of the torch engine against transformers' own forward pass with its own cache: the same
weights, one thread each, wall time of a step.

  decode 1, decode 8   the next token of so many sequences with `--context` tokens before it
  prefill 512          a prompt of 512 tokens, and its first token

Both choose the likeliest token. Transformers runs with its default attention (sdpa), its dynamic
cache and logits of the last position only. Ours keeps KV in a pool of slots, packs sequences of any
lengths, and runs on a thread of its own; what that costs is in the figure.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.rounds import against, by_turns, options, show, table
from pddrt.engine.base import Engine
from pddrt.env import WallEnv
from pddrt.trace import Trace
from pddrt.types import Run, Sampling, Span

PREFILL = 512


class Ours:
    """The engine, filled with sequences of `context` tokens."""

    def __init__(self, runner: asyncio.Runner, model: Any, context: int, steps: int) -> None:
        self.runner, self.context, self.steps = runner, context, steps
        self.length = max(context + steps, PREFILL)
        self.engine = self._run(self._made, model)

    def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        return self.runner.run(work(*args))

    async def _made(self, model: Any) -> Engine:
        from pddrt.engine.torch import TorchEngine

        env = WallEnv(0, Trace())
        engine = TorchEngine(
            model.module, model.layout, 8 * self.length, env, max_context=model.max_context
        )
        await engine.start()
        return engine

    def _spans(self, count: int, tokens: int, start: int) -> list[Span]:
        return [
            Span(str(i), (7,) * tokens, start, (Run(i * self.length, start + tokens),), Sampling())
            for i in range(count)
        ]

    def decode(self, count: int) -> float:
        async def work() -> float:
            await self.engine.step(self._spans(count, self.context, 0))
            begun = perf_counter()
            for at in range(self.steps):
                await self.engine.step(self._spans(count, 1, self.context + at))
            return (perf_counter() - begun) / self.steps

        return float(self._run(work))

    def prefill(self) -> float:
        async def work() -> float:
            begun = perf_counter()
            await self.engine.step(self._spans(1, PREFILL, 0))
            return perf_counter() - begun

        return float(self._run(work))

    def close(self) -> None:
        self._run(self.engine.close)


class Plain:
    """The model as transformers runs it."""

    def __init__(self, model: Any, context: int, steps: int) -> None:
        import torch

        self.torch, self.module = torch, model.module
        self.module.set_attn_implementation("sdpa")
        self.context, self.steps = context, steps

    def _forward(self, count: int, tokens: int, cache: Any) -> None:
        ids = self.torch.full((count, tokens), 7)
        with self.torch.inference_mode():
            out = self.module(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            out.logits[:, -1].argmax(-1).tolist()

    def decode(self, count: int) -> float:
        from transformers import DynamicCache

        cache = DynamicCache()
        self._forward(count, self.context, cache)
        begun = perf_counter()
        for _ in range(self.steps):
            self._forward(count, 1, cache)
        return (perf_counter() - begun) / self.steps

    def prefill(self) -> float:
        from transformers import DynamicCache

        begun = perf_counter()
        self._forward(1, PREFILL, DynamicCache())
        return perf_counter() - begun


def main() -> None:
    parser = options("engine", __doc__, rounds=5)
    parser.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--steps", type=int, default=16, metavar="N",
                        help="of a decode in one round; default: 16")  # fmt: skip
    given = parser.parse_args()

    import torch

    from pddrt.engine.models import load

    warnings.simplefilter("ignore", FutureWarning)  # of how transformers is called
    torch.set_num_threads(1)
    sizes = (given.context, given.steps)
    plain = Plain(load(given.model, given.dtype), *sizes)
    with asyncio.Runner() as runner:
        ours = Ours(runner, load(given.model, given.dtype), *sizes)
        ways: dict[str, Callable[[], float]] = {}
        for side, name in ((ours, "ours"), (plain, "plain")):
            for count in (1, 8):
                ways[f"decode {count} {name}"] = partial(side.decode, count)
            ways[f"prefill {PREFILL} {name}"] = side.prefill
        found = by_turns(ways, given.rounds)
        ours.close()
    shapes = [name.removesuffix(" ours") for name in ways if name.endswith(" ours")]
    rows = {name: against(found[f"{name} ours"], found[f"{name} plain"]) for name in shapes}
    about = {"model": given.model, "dtype": given.dtype, "context": given.context}
    show(table("engine", "s", rows, rounds=given.rounds, **about), given.json)


if __name__ == "__main__":
    main()
