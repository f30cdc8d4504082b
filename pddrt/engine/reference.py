"""The reference pass: what a plain forward says about a text, for `pddrt.verify`.

One whole forward over prompt and answer, by transformers' own sdpa attention, without a cache,
pages, batches or chunks. It shares the weights with the engines and nothing else: a module whose
attention is ours falls back to transformers' where it is called without a step
(`pddrt.engine.attention`).

Memory stays bounded: logits are made for the answer's positions only, and at most `LOGITS_BYTES` of
them at a time. An answer that needs more is passed over again, up to the end of each part.

Measured: SmolLM2-135M, an EPYC 9005, torch 2.13: a pass over 1,500 tokens takes 2.1 s of one core
in bfloat16 and 4.4 s in float32, half as long on two, and hardly more if most of them are answer.
Judging a position takes 0.01 ms (greedy) to 0.3 ms (sampled), and 5 ms where top-k or top-p are on
and the id is not the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from pddrt.engine.attention import ATTENTION
from pddrt.engine.torch import out_of_memory
from pddrt.errors import CannotRun

LOGITS_BYTES = 256 << 20
ROWS = 64
"""So many rows of logits are handed over at a time; as float64 they are four times what they were
in bfloat16."""


class Reference:
    """The plain forward of `module`, a causal LM of transformers, with `threads` threads.

    `reference(ids, start)` yields blocks of logits [rows, vocabulary], float64 where the module is
    and float32 otherwise (which holds the shorter ones exactly). Row by row they are the scores for
    the ids at positions [start, len(ids)), `start` at least 1, each given all ids before it.
    """

    def __init__(self, module: Any, *, threads: int = 1) -> None:
        if module.config._attn_implementation != ATTENTION:
            module.set_attn_implementation(ATTENTION)
        self._module = module
        self._threads = threads
        self._vocab: int = module.config.vocab_size

    def __call__(self, ids: Sequence[int], start: int) -> Iterator[NDArray[Any]]:
        assert start >= 1, "nothing is said about the first id of a text"
        # An id that is none of the model's cannot be fed. It is wrong where it stands; what follows
        # it is judged as if it were another.
        fed = torch.tensor(ids, dtype=torch.int64).clamp(0, self._vocab - 1)
        wide = torch.float64 if self._module.dtype == torch.float64 else torch.float32
        most = max(1, LOGITS_BYTES // (self._vocab * self._module.dtype.itemsize))
        for first in range(start, len(ids), most):
            logits = self._forward(fed, first, min(first + most, len(ids)))
            for block in logits.split(ROWS):
                yield block.to("cpu", wide).numpy()

    def _forward(self, ids: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Logits for the ids at positions [first, end). Raises CannotRun if memory runs out."""
        device = self._module.device
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                output = self._module(
                    input_ids=ids[None, : end - 1].to(device),
                    use_cache=False,
                    logits_to_keep=torch.arange(first - 1, end - 1, device=device),
                )
            logits: torch.Tensor = output.logits[0]
            return logits
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise CannotRun(f"a reference pass of {end} tokens does not fit into memory") from error
        finally:
            torch.set_num_threads(threads)
