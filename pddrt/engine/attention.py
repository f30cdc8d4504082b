"""Attention over slot runs: how an unmodified transformers model reads and writes our KV pool.

The model is called with a whole packed batch as one row, `input_ids` and `position_ids` [1, T],
without a cache and with one extra keyword, `pddrt_step`. Transformers hands that on to the
attention function, so nothing about a step is kept in the model, and engines in several threads may
share one. Each layer writes the new tokens' K and V into their slots, then attends sequence by
sequence on views of the pool.

Pool: one tensor [layer, k/v, slot, kv_head, head_dim]. A run is one contiguous block per layer and
half, which is also what goes over the wire.

The sum, everywhere: scores per run, put side by side (they are small), one softmax, the runs'
products added. Query heads that share a KV head are folded into the rows of one product; K and V
are not copied.

- **rows** (any device and dtype): a product per KV head, over blocks of at most `BLOCK` tokens, so
  that scores stay in the cache and what lies in a block's future is not computed; only the block's
  own triangle is masked.
- **block-diagonal** (16 bits on a CPU, spans of at most `NARROW` tokens): K is read once, as the
  [tokens, kv_heads * head_dim] matrix that it is, against queries with zeros in the other heads'
  places. More arithmetic, but fewer and better shaped products.
- **padded** (single tokens on CUDA, where launches per sequence would cost more than a copy): one
  gather to the longest context, one fused attention.

A sequence in many short runs is gathered first, and counted (`gathers`).

Measured (one core of an EPYC 9005 with AVX512-BF16, torch 2.13, 9 query and 3 KV heads of 64; best
of 8; per layer and sequence, `fused` is torch's scaled_dot_product_attention on the same views):

    decode at 1,000, bfloat16               block-diagonal 97 us, rows 208 us, fused 850 us
    decode at 1,000, float32                rows 176 us, fused 170 us
    512 tokens after 1,024, bfloat16        rows 7.4 ms, in one block 19.6 ms, fused 21.2 ms
    512 tokens after 1,024, float32         rows 20.2 ms, in one block 45.9 ms, fused 21.0 ms

With heads before slots in the pool, a decode would take 93 us (bfloat16) and 113 us (float32), and
every transfer a transposition.

Left out: sliding windows, soft caps, sinks. `pddrt.engine.torch` refuses models that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from pddrt.types import Run, Span

ATTENTION = "pddrt"
"""The `attn_implementation` under which `paged_attention` is registered."""

Kind = Literal["rows", "block-diagonal", "padded"]

BLOCK = 128
NARROW = 8
RUN_TOKENS = 400
"""A further run costs a decode about as much as gathering this many tokens."""


def clip(runs: Sequence[Run], end: int) -> list[Run]:
    """The slots of positions [0, end), as few runs as there can be (neighbours joined)."""
    kept: list[Run] = []
    for run in runs:
        length = min(run.length, end)
        if length > 0:
            if kept and kept[-1].slot + kept[-1].length == run.slot:
                kept[-1] = Run(kept[-1].slot, kept[-1].length + length)
            else:
                kept.append(Run(run.slot, length))
        end -= length
    assert end == 0, "runs do not cover the span"
    return kept


def slots_of(runs: Sequence[Run], start: int = 0) -> Tensor:
    """The slot of every position from `start` on, int64."""
    indices: list[int] = []
    for run in runs:
        skip = min(start, run.length)
        indices.extend(range(run.slot + skip, run.slot + run.length))
        start -= skip
    return torch.tensor(indices, dtype=torch.int64)


class _Part:
    """One block of one span: rows [first, first + n) of the batch, over the KV of [0, end)."""

    __slots__ = ("end", "first", "gather", "n", "out", "queries", "runs")

    def __init__(
        self, first: int, n: int, end: int, runs: Sequence[Run], device: torch.device
    ) -> None:
        self.first, self.n, self.end = first, n, end
        kept = clip(runs, end)
        self.gather: Tensor | None = None
        if len(kept) - 2 > end // RUN_TOKENS:
            self.gather = slots_of(kept).to(device)
            kept = [Run(0, end)]
        self.runs = [(run.slot, run.slot + run.length) for run in kept]
        self.queries: Tensor = torch.empty(0)
        self.out: Tensor = torch.empty(0)

    def views(self, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V of each run, [tokens, ...]."""
        if self.gather is not None:
            return [(keys.index_select(0, self.gather), values.index_select(0, self.gather))]
        return [(keys[a:b], values[a:b]) for a, b in self.runs]


class StepContext:
    """What the layers of one step share: where to write, what to read, buffers and masks made once.

    `pool` is [layer, k/v, slot, kv_head, head_dim]. Rows of the batch are the spans' tokens, in
    order. A context serves one forward pass, on one thread.
    """

    def __init__(self, pool: Tensor, spans: Sequence[Span], heads: int, kind: Kind) -> None:
        self.layers = [(keys, values) for keys, values in pool]
        self.heads, self.kv_heads, self.head_dim = heads, pool.shape[3], pool.shape[4]
        self.group = heads // self.kv_heads
        self.dtype, self.device = pool.dtype, pool.device
        self.rows = sum(len(span.tokens) for span in spans)
        narrow = NARROW if kind == "block-diagonal" else 1 if kind == "padded" else 0

        self.narrow: list[_Part] = []
        self.wide: list[_Part] = []
        written: list[Tensor] = []
        first = 0
        for span in spans:
            n = len(span.tokens)
            written.append(slots_of(clip(span.runs, span.end), span.start))
            if n <= narrow:
                self.narrow.append(_Part(first, n, span.end, span.runs, self.device))
            else:
                for at in range(0, n, BLOCK):
                    size = min(BLOCK, n - at)
                    end = span.start + at + size
                    self.wide.append(_Part(first + at, size, end, span.runs, self.device))
            first += n
        self.written = torch.cat(written).to(self.device)
        self.gathers = sum(part.gather is not None for part in self.narrow + self.wide)

        size = max((part.n for part in self.narrow + self.wide), default=1)
        future = torch.ones(size, size, dtype=torch.bool, device=self.device).triu(1)
        self.triangle = torch.zeros(size, size, dtype=self.dtype, device=self.device)
        self.triangle.masked_fill_(future, float("-inf"))

        if self.narrow and kind == "padded":
            self._plan_padded(spans)
        elif self.narrow:
            self._plan_block_diagonal()
        self._attend_narrow = self._padded if kind == "padded" else self._block_diagonal

    # -- one layer ---------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Stores k, v [1, Hk, T, D] and returns the attention of q [1, H, T, D] as [1, T, H, D]."""
        keys, values = self.layers[layer]
        keys.index_copy_(0, self.written, k[0].transpose(0, 1))
        values.index_copy_(0, self.written, v[0].transpose(0, 1))
        out = torch.empty(
            self.rows, self.heads, self.head_dim, dtype=self.dtype, device=self.device
        )
        if self.narrow:
            self._attend_narrow(keys, values, q[0], scaling, out)
        if self.wide:
            self._rows(keys, values, q[0] * scaling, out)
        return out.unsqueeze(0)

    def _rows(self, keys: Tensor, values: Tensor, q: Tensor, out: Tensor) -> None:
        """q [H, T, D] is scaled. Rows of a product are tokens of the block * heads of the group."""
        kv_heads, group, dim = self.kv_heads, self.group, self.head_dim
        q = q.view(kv_heads, group, self.rows, dim)
        out = out.view(self.rows, kv_heads, group, dim)
        for part in self.wide:
            n, block = part.n, slice(part.first, part.first + part.n)
            queries = q[:, :, block].reshape(kv_heads, group * n, dim)
            views = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in part.views(keys, values)]
            scores = [torch.bmm(queries, k.transpose(1, 2)) for k, _ in views]
            both = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
            if n > 1:
                by_token = both.view(kv_heads, group, n, part.end)
                by_token[..., part.end - n :] += self.triangle[:n, :n]
            weights = torch.softmax(both, -1)
            if len(views) == 1:
                summed = torch.bmm(weights, views[0][1])
            else:
                summed = torch.zeros_like(queries)
                shares = weights.split([b - a for a, b in part.runs], -1)
                for (_, v), share in zip(views, shares, strict=True):
                    summed.baddbmm_(share, v)
            out[block] = summed.view(kv_heads, group, n, dim).permute(2, 0, 1, 3)

    # -- block diagonal ----------------------------------------------------------------------------

    def _plan_block_diagonal(self) -> None:
        """Buffers [rows, kv_head, group, kv_head, dim]; off the diagonal, queries stay zero."""
        indices = [part.first + i for part in self.narrow for i in range(part.n)]
        self.narrow_rows = torch.tensor(indices, device=self.device)
        rows, width = len(self.narrow_rows), self.kv_heads * self.head_dim
        shape = (rows, self.kv_heads, self.group, self.kv_heads, self.head_dim)
        spread = torch.zeros(shape, dtype=self.dtype, device=self.device)
        summed = torch.empty(shape, dtype=self.dtype, device=self.device)
        # The diagonals, as [kv_head, group, rows, dim] and [rows, kv_head, group, dim].
        self.spread = spread.diagonal(dim1=1, dim2=3).permute(3, 1, 0, 2)
        self.summed = summed.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        at = 0
        for part in self.narrow:
            part.queries = spread[at : at + part.n].view(part.n * self.heads, width)
            part.out = summed[at : at + part.n].view(part.n * self.heads, width)
            at += part.n

    def _block_diagonal(
        self, keys: Tensor, values: Tensor, q: Tensor, scaling: float, out: Tensor
    ) -> None:
        kv_heads, group, dim = self.kv_heads, self.group, self.head_dim
        everything = len(self.narrow_rows) == self.rows
        chosen = q if everything else q[:, self.narrow_rows]
        torch.mul(chosen.view(kv_heads, group, -1, dim), scaling, out=self.spread)
        keys, values = keys.flatten(1), values.flatten(1)
        # Products this small lose more by waking a second thread than they win by it: with 2
        # threads a step of 8 decodes took 83 ms instead of 61. Every step sets its own number anew.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for part in self.narrow:
            views = part.views(keys, values)
            scores = [torch.mm(part.queries, k.t()) for k, _ in views]
            both = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
            if part.n > 1:
                by_token = both.view(part.n, self.heads, part.end)
                by_token[..., part.end - part.n :] += self.triangle[: part.n, None, : part.n]
            weights = torch.softmax(both, -1)
            if len(views) == 1:
                torch.mm(weights, views[0][1], out=part.out)
            else:
                part.out.zero_()
                shares = weights.split([b - a for a, b in part.runs], -1)
                for (_, v), share in zip(views, shares, strict=True):
                    part.out.addmm_(share, v)
        torch.set_num_threads(threads)
        result = self.summed.reshape(-1, self.heads, dim)
        if everything:
            out.copy_(result)
        else:
            out[self.narrow_rows] = result

    # -- padded ------------------------------------------------------------------------------------

    def _plan_padded(self, spans: Sequence[Span]) -> None:
        """Slots [sequences, longest context], short rows padded with their own first slot."""
        self.narrow_rows = torch.tensor([part.first for part in self.narrow], device=self.device)
        singles = [span for span in spans if len(span.tokens) == 1]
        longest = max(span.end for span in singles)
        slots = torch.zeros(len(singles), longest, dtype=torch.int64)
        for row, span in zip(slots, singles, strict=True):
            own = slots_of(clip(span.runs, span.end))
            row.fill_(int(own[0]))
            row[: len(own)] = own
        ends = torch.tensor([span.end for span in singles])
        self.padded_slots = slots.to(self.device)
        self.padded_mask = (torch.arange(longest) < ends[:, None])[:, None, None].to(self.device)

    def _padded(self, keys: Tensor, values: Tensor, q: Tensor, scaling: float, out: Tensor) -> None:
        queries = q[:, self.narrow_rows].transpose(0, 1).unsqueeze(2)
        k = keys[self.padded_slots].transpose(1, 2)
        v = values[self.padded_slots].transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=self.padded_mask, scale=scaling, enable_gqa=self.group > 1
        )
        out[self.narrow_rows] = attended.squeeze(2)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    *,
    pddrt_step: StepContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in every layer (see the module's docstring).

    Without a step the model is meant as it stands: one text from its beginning, causal, by
    transformers' own sdpa attention (`pddrt.engine.reference`).
    """
    assert mask is None
    if pddrt_step is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, None, scaling=scaling, **options
        )
        return plain
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return pddrt_step.attend(module.layer_idx, query, key, value, scale), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is the attention function's affair; transformers need not build a mask."""


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
