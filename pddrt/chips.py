"""Chips and how long a step takes on one: the four axes, named chips, the roofline.

A chip is peak compute, memory capacity, memory bandwidth, interconnect bandwidth, and a price. A
model is a `ModelShape`. Together they give a `StepCost`: what a step is charged under the virtual
clock, and a lower bound of it on the wall clock.

**Roofline** (Williams, Waterman, Patterson, CACM 52(4), 2009): a step takes the longer of its
arithmetic at peak compute and its memory traffic at peak bandwidth, plus a fixed overhead. For a
step over spans of n new tokens each, on top of s that have KV already:

    FLOPs = sum of 2 N n + 4 L h (n s + n (n + 1) / 2)
            2 FLOPs a parameter and token; attention takes 2 h for q.k and 2 h for the weighted sum,
            per layer and attended token (Kaplan et al., arXiv:2001.08361, table 1); token i of the
            span attends to s + i
    bytes = N w + sum of (s + n) kv
            weights once a step whatever the batch, KV of each sequence once (s read, n written)
    step  = max(FLOPs / compute, bytes / bandwidth) + overhead

What it leaves out: achieved fractions of the peaks (scale `flops` and `bandwidth` for that),
activations, tensor parallelism, sparse experts. All arithmetic is in integers, rounded up once: the
same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from pddrt.sections import Allowed, Section
from pddrt.types import DTYPE_BYTES, SECOND, US, Ns, Span, StepCost
from pddrt.units import Compute, PositiveRate, PositiveSize

STEP_OVERHEAD: Ns = 200 * US
"""Launching and scheduling a step, whatever is in it (ours: a round figure)."""


class Chip(Section):
    """Peak figures of one chip. `flops`: for the dtype that is run, and dense, not sparse.

    `interconnect` is in each direction. `price` is relative, per chip and hour.
    """

    flops: Compute
    """Peak compute, dense, for the dtype that is run."""
    memory: PositiveSize
    """Memory capacity."""
    bandwidth: PositiveRate
    """Memory bandwidth."""
    interconnect: PositiveRate | None = None
    """Bandwidth to other chips, in each direction."""
    price: Annotated[float, Field(gt=0, le=1e9), Allowed("a number above 0")] | None = None
    """Relative, per chip and hour."""


def _chip(tflops: float, memory_gb: int, bandwidth_gb: int, interconnect_gb: int) -> Chip:
    return Chip.model_validate(
        {
            "flops": f"{tflops} TFLOPS",
            "memory": f"{memory_gb} GB",
            "bandwidth": f"{bandwidth_gb} GB/s",
            "interconnect": f"{interconnect_gb} GB/s",
        }
    )


# TFLOPS (bf16, dense), GB, GB/s of memory, GB/s of interconnect in one direction (data sheets give
# the sum of both). Prices differ by buyer and month, so none is here: a scenario says its own.
CHIPS: dict[str, Chip] = {
    "a100-80g": _chip(312, 80, 2039, 300),  # NVIDIA A100 80GB SXM data sheet; NVLink 600 GB/s
    "h100-sxm": _chip(989.4, 80, 3350, 450),  # NVIDIA H100 SXM data sheet; NVLink 900 GB/s
    "h200": _chip(989.4, 141, 4800, 450),  # NVIDIA H200 SXM data sheet; NVLink 900 GB/s
    "h20": _chip(148, 96, 4000, 450),  # no public data sheet; as widely reported; NVLink 900 GB/s
    "l40s": _chip(362.05, 48, 864, 32),  # NVIDIA L40S data sheet; PCIe 4.0 x16, 64 GB/s
    "ascend-910c": _chip(
        752, 128, 3200, 392
    ),  # Zuo et al., arXiv:2506.12708: both dies, UB 392 GB/s
    # Not here: Ascend 910B, since public figures of its bandwidth contradict each other.
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a step's cost depends on. `parameters` are those a token is multiplied with.

    `attention_width`: query heads * head dim, mostly the hidden size. `weight_bytes`: each.
    """

    parameters: int
    layers: int
    attention_width: int
    kv_bytes_per_token: int
    weight_bytes: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str) -> ModelShape:
        """Of a dense Llama-like model, from the fields of its config.json.

        Counts the projections of attention and gated MLP (2 h (q + kv) + 3 h m a layer) and the
        output head (v h), not the embedding table (a look-up), norms and biases.
        """
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        per_layer = (
            2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        )
        return cls(
            parameters=layers * per_layer + config["vocab_size"] * hidden,
            layers=layers,
            attention_width=heads * head_dim,
            kv_bytes_per_token=2 * layers * kv_heads * head_dim * DTYPE_BYTES[dtype],
            weight_bytes=DTYPE_BYTES[dtype],
        )


def chip_cost(chip: Chip, shape: ModelShape, overhead: Ns = STEP_OVERHEAD) -> StepCost:
    """Step times by the roofline in this module's docstring."""

    def cost(spans: Sequence[Span]) -> Ns:
        flops, traffic = 0, shape.parameters * shape.weight_bytes
        for span in spans:
            n = len(span.tokens)
            attended = n * span.start + n * (n + 1) // 2
            flops += 2 * shape.parameters * n + 4 * shape.layers * shape.attention_width * attended
            traffic += span.end * shape.kv_bytes_per_token
        return overhead + max(
            _ceil(flops * SECOND, chip.flops), _ceil(traffic * SECOND, chip.bandwidth)
        )

    return cost


def figures_cost(prefill_tokens_per_s: float, decode_step: Ns) -> StepCost:
    """Step times from two figures that anyone can measure: the roofline with its two corners given.

    A step takes `decode_step` (what reading the weights costs), or longer if its tokens at
    `prefill_tokens_per_s` do: so a small extend is free beside a decode step, as on real chips.
    """
    rate = Fraction(prefill_tokens_per_s)

    def cost(spans: Sequence[Span]) -> Ns:
        tokens = sum(len(span.tokens) for span in spans)
        return max(decode_step, _ceil(tokens * SECOND * rate.denominator, rate.numerator))

    return cost


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
