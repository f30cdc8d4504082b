"""Step times: the roofline by hand-made numbers, its corners, and that it is exact and monotone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt.chips import CHIPS, Chip, ModelShape, chip_cost, figures_cost
from pddrt.types import MS, SECOND, US, Run, Span

SMOL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
SHAPE = ModelShape(
    parameters=1000, layers=2, attention_width=10, kv_bytes_per_token=100, weight_bytes=2
)


def span(tokens: int, start: int = 0) -> Span:
    return Span("r", (1,) * tokens, start, (Run(0, start + tokens),), None)


def chip(flops: str, bandwidth: str) -> Chip:
    return Chip.model_validate({"flops": flops, "memory": "1 GB", "bandwidth": bandwidth})


def test_shape_of_smollm2_from_its_config() -> None:
    """134,515,008 parameters by the model card's files, less 61 norms of 576."""
    shape = ModelShape.from_config(SMOL, "bfloat16")
    assert shape.parameters == 134_515_008 - 61 * 576
    assert shape.kv_bytes_per_token == 23_040
    assert shape.attention_width == 576


def test_compute_bound_step_by_hand() -> None:
    """4 tokens on 6: 2*1000*4 + 4*2*10*(4*6 + 10) = 8000 + 2720 FLOPs at 1 MFLOPS."""
    cost = chip_cost(chip("1 MFLOPS", "1 TB/s"), SHAPE, overhead=5 * US)
    assert cost([span(4, start=6)]) == 10_720 * US + 5 * US


def test_memory_bound_step_by_hand() -> None:
    """Weights 2000 B once, KV of 7 and 11 tokens at 100 B each, at 1 MB/s."""
    cost = chip_cost(chip("1 PFLOPS", "1 MB/s"), SHAPE, overhead=0)
    assert cost([span(1, start=6), span(1, start=10)]) == (2000 + 700 + 1100) * US


def test_weights_are_read_once_for_the_whole_batch() -> None:
    cost = chip_cost(chip("1 PFLOPS", "1 MB/s"), SHAPE, overhead=0)
    alone = cost([span(1, start=6)])
    assert cost([span(1, start=6)] * 10) == alone + 9 * 700 * US


def test_prefill_in_chunks_does_the_same_arithmetic() -> None:
    """Rounded up once a step: at most a nanosecond for each chunk."""
    cost = chip_cost(chip("7 MFLOPS", "1 TB/s"), SHAPE, overhead=0)
    chunks = [cost([span(100, start=s)]) for s in range(0, 1000, 100)]
    whole = cost([span(1000)])
    assert whole <= sum(chunks) <= whole + len(chunks)


def test_no_float_enters() -> None:
    """The same to the nanosecond where floats would have lost the last digits."""
    shape = ModelShape(10**12 + 1, 100, 10**5, 10**5, 2)
    cost = chip_cost(chip("7 MFLOPS", "900 TB/s"), shape, overhead=0)
    flops = 2 * (10**12 + 1) * 3 + 4 * 100 * 10**5 * (3 * 10**6 + 6)
    assert cost([span(3, start=10**6)]) == -(-flops * SECOND // (7 * 10**6))


def test_figures_are_the_two_corners() -> None:
    cost = figures_cost(prefill_tokens_per_s=1000, decode_step=20 * MS)
    assert cost([span(1, start=50)]) == 20 * MS
    assert cost([span(1, start=50), span(19, start=50)]) == 20 * MS
    assert cost([span(500)]) == 500 * MS
    assert figures_cost(0.3, MS)([span(1)]) == pytest.approx(SECOND / 0.3, abs=1)


@given(
    spans=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 500)), min_size=1, max_size=8),
    extra=st.tuples(st.integers(1, 64), st.integers(0, 500)),
    name=st.sampled_from(sorted(CHIPS)),
)
def test_more_work_never_takes_less_time(
    spans: list[tuple[int, int]], extra: tuple[int, int], name: str
) -> None:
    for cost in (
        chip_cost(CHIPS[name], ModelShape.from_config(SMOL, "bfloat16")),
        figures_cost(900.5, MS),
    ):
        batch = [span(n, start) for n, start in spans]
        assert 0 < cost(batch) <= cost([*batch, span(*extra)])


def test_named_chips_split_prefill_from_decode_as_the_mission_says() -> None:
    """H20: 15 % of H100's arithmetic, more memory bandwidth. Slower prefill, faster decode."""
    shape = ModelShape.from_config(SMOL, "bfloat16")
    h100, h20 = (chip_cost(CHIPS[name], shape, overhead=0) for name in ("h100-sxm", "h20"))
    assert h20([span(8192)]) > 5 * h100([span(8192)])
    assert h20([span(1, start=8192)]) < h100([span(1, start=8192)])
