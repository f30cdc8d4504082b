"""The torch engine against plain transformers, and the sampler against its definition.

Tiny models with seeded random weights, in float64: what differs from the plain forward by more than
rounding is a fault. Biases and norms are random too, since zeros hide what is left out.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from pddrt.engine.sampling import draw, gumbel_noise
from pddrt.engine.torch import TorchEngine
from pddrt.env import Env, VirtualEnv, WallEnv
from pddrt.errors import CannotRun
from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, KVLayout, Ns, Run, Sampling, Span

from .spans import GREEDY, span, tokens

VOCAB = 131
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
KINDS = ("rows", "block-diagonal", "padded")
CLOSE = {"rtol": 0, "atol": 1e-11}


def make_model(architecture: str, dtype: torch.dtype = torch.float64) -> Any:
    config = CONFIGS[architecture](
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else 1.0 + 0.5 * noise)
    return model.to(dtype).eval()


def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """What transformers itself makes of `ids`, [positions, vocabulary]."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")  # "eager" takes its softmax in float32
    with torch.no_grad():
        return plain(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


class Recording(TorchEngine):
    """Keeps the logits of the last step."""

    logits: torch.Tensor

    def _sample(self, spans: Sequence[Span], logits: torch.Tensor) -> list[int | None]:
        self.logits = logits.clone()
        return super()._sample(spans, logits)


def make_engine(model: Any, env: Env | None = None, **options: Any) -> Recording:
    layout = KVLayout("tiny", 2, 2, 8, str(model.dtype).removeprefix("torch."))
    env = env or WallEnv(0, Trace())
    return Recording(model, layout, 400, env, max_context=128, **options)


# -- the model, whatever the batch -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_mixed_batch_equals_the_plain_forward(architecture: str, kind: Any) -> None:
    model = make_model(architecture)
    a, b, c, d = (random_ids(40, seed) for seed in range(4))
    runs_a, runs_b = [Run(100, 40)], [Run(50, 9), Run(10, 31)]
    runs_c, runs_d = [Run(200, 40)], [Run(300, 7), Run(290, 3), Run(340, 30)]

    async def main() -> None:
        engine = make_engine(model, attention=kind)
        await engine.step([span(a, 0, 20, runs_a, None), span(b, 0, 30, runs_b, None)])
        await engine.step([span(d, 0, 12, runs_d), span(c, 0, 33, runs_c, None)])
        made = await engine.step(
            [
                span(a, 20, 40, runs_a),  # second chunk of a prompt
                span(b, 30, 31, runs_b),  # decode over two runs
                span(c, 33, 37, runs_c),  # extend
                span(d, 12, 13, runs_d),  # decode over three runs
                span((7,), 0, 1, [Run(0, 1)]),  # a prompt of one token
            ]
        )
        expected = torch.stack(
            [
                plain_logits(model, a)[39],
                plain_logits(model, b)[30],
                plain_logits(model, c)[36],
                plain_logits(model, d)[12],
                plain_logits(model, (7,))[0],
            ]
        )
        torch.testing.assert_close(engine.logits, expected, **CLOSE)
        assert tokens(made) == expected.argmax(-1).tolist()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_of_a_prompt_gives_the_same_logits(kind: Any) -> None:
    model = make_model("qwen2")
    ids = random_ids(24, 1)
    expected = plain_logits(model, ids)[-1:]

    async def main() -> None:
        engine = make_engine(model, attention=kind)
        for cut in range(1, 24):
            await engine.step([span(ids, 0, cut, [Run(9, 24)], None)])
            await engine.step([span(ids, cut, 24, [Run(9, 24)])])
            torch.testing.assert_close(engine.logits, expected, **CLOSE)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_kv_may_lie_in_any_runs_in_any_order(kind: Any) -> None:
    model = make_model("llama")
    ids = random_ids(24, 2)
    expected = plain_logits(model, ids)
    layouts = [[Run(200, cut), Run(50, 24 - cut)] for cut in range(1, 24)]
    layouts += [[Run(200, cut), Run(90, 1), Run(50, 23 - cut)] for cut in range(1, 23)]
    layouts += [[Run(3 * (24 - i), 1) for i in range(24)]]

    async def main() -> None:
        engine = make_engine(model, attention=kind)
        for runs in layouts:
            await engine.step([span(ids, 0, 15, runs)])
            torch.testing.assert_close(engine.logits, expected[14:15], **CLOSE)
            await engine.step([span(ids, 15, 23, runs)])
            torch.testing.assert_close(engine.logits, expected[22:23], **CLOSE)
            await engine.step([span(ids, 23, 24, runs)])
            torch.testing.assert_close(engine.logits, expected[23:24], **CLOSE)
        assert engine.gathers > 0
        await engine.close()

    asyncio.run(main())


def test_one_or_two_runs_are_never_gathered_and_neighbours_count_as_one() -> None:
    model = make_model("llama")
    ids = random_ids(24, 2)

    async def main() -> None:
        engine = make_engine(model)
        await engine.step([span(ids, 0, 24, [Run(80, 20), Run(0, 4)])])
        await engine.step([span(ids, 0, 24, [Run(20 + i, 1) for i in range(24)])])
        assert engine.gathers == 0
        await engine.close()

    asyncio.run(main())


def test_a_chunk_longer_than_a_block_is_causal_across_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pddrt.engine.attention.BLOCK", 7)
    model = make_model("qwen3")
    ids = random_ids(60, 3)
    expected = plain_logits(model, ids)[-1:]

    async def main() -> None:
        engine = make_engine(model, attention="rows")
        for runs in ([Run(5, 60)], [Run(100, 31), Run(5, 29)], [Run(2 * i, 1) for i in range(60)]):
            await engine.step([span(ids, 0, 13, runs, None)])
            await engine.step([span(ids, 13, 60, runs)])
            torch.testing.assert_close(engine.logits, expected, **CLOSE)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_stays_within_its_margin(dtype: torch.dtype, kind: Any) -> None:
    model = make_model("qwen2", dtype)
    ids = random_ids(40, 4)
    reference = plain_logits(model, ids).double()[36:]
    margin = 4 * torch.finfo(dtype).eps * reference.abs().max()

    async def main() -> None:
        engine = make_engine(model, attention=kind)
        runs = [Run(100, 17), Run(9, 23)]
        chosen = tokens(await engine.step([span(ids, 0, 37, runs)]))
        for at in range(37, 40):
            chosen += tokens(await engine.step([span(ids, at, at + 1, runs)]))
        for scores, token in zip(reference, chosen, strict=True):
            assert scores.max() - scores[token] <= margin
        await engine.close()

    asyncio.run(main())


# -- KV in and out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kv_read_here_and_written_there_decodes_alike(dtype: torch.dtype) -> None:
    model = make_model("qwen2", dtype)
    ids = random_ids(31, 6)
    here, there = [Run(100, 31)], [Run(7, 11), Run(300, 20)]

    async def main() -> None:
        sender, receiver = make_engine(model), make_engine(model)
        await sender.step([span(ids, 0, 30, here, None)])
        payload = sender.read_kv([Run(100, 30)])
        assert len(payload) == 30 * sender.layout.bytes_per_token
        unaligned = memoryview(b"?" + payload)[1:]
        receiver.write_kv([Run(7, 11), Run(300, 19)], unaligned)
        assert receiver.read_kv([Run(7, 11), Run(300, 19)]) == payload

        [mine] = await sender.step([span(ids, 30, 31, here)])
        wanted = sender.logits
        [theirs] = await receiver.step([span(ids, 30, 31, there)])
        if dtype == torch.float64:
            assert mine == theirs
            torch.testing.assert_close(receiver.logits, wanted, **CLOSE)
        else:
            assert (receiver.logits - wanted).abs().max() <= 0.02 * wanted.abs().max()
        await sender.close()
        await receiver.close()

    asyncio.run(main())


def test_nothing_is_a_valid_transfer_and_a_wrong_size_is_not() -> None:
    async def main() -> None:
        engine = make_engine(make_model("llama"))
        assert engine.read_kv([]) == b""
        engine.write_kv([], b"")
        with pytest.raises(AssertionError, match="size"):
            engine.write_kv([Run(0, 2)], bytes(engine.layout.bytes_per_token))
        await engine.close()

    asyncio.run(main())


def test_the_wire_order_is_layers_then_k_then_v_of_the_tokens_in_order() -> None:
    model = make_model("llama")
    ids = random_ids(5, 7)

    async def main() -> None:
        engine = make_engine(model)
        runs = [Run(3, 2), Run(50, 3)]
        await engine.step([span(ids, 0, 5, runs)])
        kv = np.frombuffer(engine.read_kv(runs)).reshape(
            2, 2, 5, 2, 8
        )  # layer, k/v, token, head, dim
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("sdpa")
        with torch.no_grad():
            cache = plain(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
        for layer in range(2):
            for half, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                np.testing.assert_allclose(kv[layer, half], tensor[0].transpose(0, 1), **CLOSE)
        await engine.close()

    asyncio.run(main())


def test_kv_moves_while_a_step_runs_on_other_slots() -> None:
    model = make_model("llama")
    ids, others = random_ids(60, 8), random_ids(60, 9)

    async def main() -> None:
        engine, source = make_engine(model), make_engine(model)
        await source.step([span(others, 0, 59, [Run(0, 60)], None)])
        payload = source.read_kv([Run(0, 59)])
        step = asyncio.ensure_future(engine.step([span(ids, 0, 60, [Run(0, 60)])]))
        while not step.done():
            engine.write_kv([Run(200, 59)], payload)
            assert engine.read_kv([Run(200, 59)]) == payload
            await asyncio.sleep(0)
        torch.testing.assert_close(engine.logits, plain_logits(model, ids)[-1:], **CLOSE)
        await engine.step([span(others, 59, 60, [Run(200, 60)])])
        torch.testing.assert_close(engine.logits, plain_logits(model, others)[-1:], **CLOSE)
        await engine.close()
        await source.close()

    asyncio.run(main())


# -- sampling --------------------------------------------------------------------------------------


def test_noise_is_pinned() -> None:
    """Other builds of pddrt must draw alike: these values never change."""
    noise = gumbel_noise(7, 100, np.array([0, 1, 49151]))
    np.testing.assert_allclose(noise, [1.055303750902, 0.666692767388, 0.186145520773], atol=1e-11)
    assert (
        len({float(gumbel_noise(s, p, np.array([0]))[0]) for s in range(9) for p in range(9)}) == 81
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 12.0])
def test_the_bounded_draw_is_the_argmax_over_all_ids(scale: float) -> None:
    logits = scale * np.random.default_rng(1).standard_normal(3000)
    ids = np.arange(3000)
    for position in range(300):
        expected = int(np.argmax(logits + gumbel_noise(3, position, ids)))
        assert draw(logits, Sampling(temperature=1.0, seed=3), position) == expected


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, seed=1), 8),
        (Sampling(temperature=0.5, seed=2), 8),
        (Sampling(temperature=1.0, top_k=3, seed=3), 3),
        (Sampling(temperature=1.0, top_p=0.8, seed=4), 4),
        (Sampling(temperature=2.0, top_k=5, top_p=0.7, seed=5), 3),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(sampling: Sampling, kept: int) -> None:
    logits = np.array([0.1, 2.0, -1.0, 1.4, 0.9, -0.2, 1.9, 0.0], dtype=np.float32)
    order = np.argsort(-logits)[:kept]
    weights = np.exp(logits[order].astype(float) / sampling.temperature)
    draws = 4000
    counts = np.bincount(
        [draw(logits, sampling, position) for position in range(draws)], minlength=8
    )
    assert counts[order].sum() == draws
    expected = draws * weights / weights.sum()
    chi_square = float(((counts[order] - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 0.1 % of samples exceed this at 7 degrees of freedom


def test_top_p_over_a_flat_distribution_keeps_its_share() -> None:
    logits = -1e-6 * np.arange(1000)
    drawn = {draw(logits, Sampling(temperature=1.0, top_p=0.25, seed=1), i) for i in range(3000)}
    assert max(drawn) in (249, 250)
    assert len(drawn) == max(drawn) + 1


def test_equal_scores_go_to_the_lowest_id() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0, 0.0])
    assert draw(logits, GREEDY, 5) == 1
    two = Sampling(temperature=1.0, top_k=2, seed=1)
    assert {draw(logits, two, position) for position in range(60)} == {1, 2}
    assert draw(logits, Sampling(temperature=1e-9, seed=1, top_k=1), 5) == 1


def test_a_draw_is_the_same_alone_in_a_batch_on_another_engine_and_after_a_handoff() -> None:
    model = make_model("qwen2")
    prompt, other = random_ids(20, 10), random_ids(30, 11)
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=99)

    async def generate(
        engine: Recording, ids: list[int], until: int, slot: int, crowd: bool
    ) -> None:
        start = 0 if len(ids) == len(prompt) else len(ids) - 1
        while len(ids) < until:
            spans = [span(ids, start, len(ids), [Run(slot, 64)], sampling)]
            if crowd:
                noisy = Sampling(temperature=1.0, seed=4)
                spans.insert(0, span(other, 0, 30, [Run(300, 30)], noisy))
            drawn = (await engine.step(spans))[-1]
            start = len(ids)
            ids += tokens([drawn])

    async def main() -> None:
        first, second = make_engine(model), make_engine(model)
        alone, crowded, moved = list(prompt), list(prompt), list(prompt)
        await generate(first, alone, 50, 0, crowd=False)
        await generate(second, crowded, 50, 100, crowd=True)
        await generate(first, moved, 33, 200, crowd=False)
        second.write_kv([Run(7, 32)], first.read_kv([Run(200, 32)]))
        await generate(second, moved, 50, 7, crowd=False)
        assert alone == crowded == moved
        assert len(set(alone[20:])) > 5
        await first.close()
        await second.close()

    asyncio.run(main())


# -- threads, clocks, failures ---------------------------------------------------------------------


def test_engines_that_share_a_model_do_not_disturb_each_other() -> None:
    model = make_model("qwen2")
    texts = [random_ids(60, 20), random_ids(60, 21)]

    async def run(engine: Recording, ids: Sequence[int]) -> list[torch.Tensor]:
        seen = []
        await engine.step([span(ids, 0, 20, [Run(30, 60)], None)])
        for at in range(20, 60):
            await engine.step([span(ids, at, at + 1, [Run(30, 60)])])
            seen.append(engine.logits)
        return seen

    async def main() -> None:
        engines = [make_engine(model, name=f"e{i}") for i in range(2)]
        alone = [await run(engine, ids) for engine, ids in zip(engines, texts, strict=True)]
        together = await asyncio.gather(*map(run, engines, texts))
        for one, both in zip(alone, together, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, both, strict=True))
        for engine in engines:
            await engine.close()

    asyncio.run(main())


def test_a_step_in_virtual_time_takes_its_charge_and_writes_at_its_end() -> None:
    model = make_model("llama")
    ids = random_ids(10, 12)

    async def main() -> None:
        env = VirtualEnv(0, Trace())
        engine = make_engine(model, env, step_cost=lambda spans: 3 * MS + len(spans))
        step = asyncio.ensure_future(engine.step([span(ids, 0, 10, [Run(0, 10)])]))
        await env.sleep_until(3 * MS)
        assert not any(engine.read_kv([Run(0, 10)]))
        assert not step.done()
        await step
        assert env.now() == 3 * MS + 1
        assert any(engine.read_kv([Run(9, 1)]))
        torch.testing.assert_close(engine.logits, plain_logits(model, ids)[-1:], **CLOSE)
        await engine.close()

    loop = SimLoop()
    loop.run_until_complete(main())


class Paced(WallEnv):
    """A wall clock that stands still and notes until when it was asked to sleep."""

    def __init__(self) -> None:
        super().__init__(0, Trace())
        self.slept_until: list[Ns] = []

    def now(self) -> Ns:
        return 17

    async def sleep_until(self, when: Ns) -> None:
        self.slept_until.append(when)


def test_a_step_cost_on_the_wall_clock_is_a_lower_bound() -> None:
    async def main() -> None:
        env = Paced()
        engine = make_engine(make_model("llama"), env, step_cost=lambda _: 5 * MS)
        await engine.step([span((1, 2), 0, 2, [Run(0, 2)])])
        assert env.slept_until == [17 + 5 * MS]
        await engine.close()

    asyncio.run(main())


def test_a_failed_step_reaches_its_caller_and_the_engine_goes_on() -> None:
    model = make_model("llama")
    ids = random_ids(10, 13)

    async def main() -> None:
        engine = make_engine(model)
        with pytest.raises(IndexError):
            await engine.step([span((VOCAB + 1,), 0, 1, [Run(0, 1)])])
        await engine.step([span(ids, 0, 10, [Run(0, 10)])])
        torch.testing.assert_close(engine.logits, plain_logits(model, ids)[-1:], **CLOSE)
        await engine.close()

    asyncio.run(main())


class Held(Recording):
    """A step that waits, on its thread, until it is let go."""

    def hold(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def _forward(self, spans: Sequence[Span]) -> list[int | None]:
        self.begun.set()
        assert self.go.wait(20)
        return super()._forward(spans)


def test_a_cancelled_step_ends_only_when_its_writes_have() -> None:
    async def main() -> None:
        layout = KVLayout("tiny", 2, 2, 8, "float64")
        engine = Held(make_model("llama"), layout, 40, WallEnv(0, Trace()), max_context=64)
        engine.hold()
        step = asyncio.ensure_future(engine.step([span((1, 2, 3), 0, 3, [Run(0, 3)])]))
        await asyncio.get_running_loop().run_in_executor(None, engine.begun.wait)
        for _ in range(3):
            step.cancel()
            await asyncio.sleep(0)
        assert not step.done()
        assert not any(engine.read_kv([Run(0, 3)]))
        engine.go.set()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert any(engine.read_kv([Run(2, 1)]))
        await engine.step([span((1, 2, 3), 0, 3, [Run(0, 3)])])
        await engine.close()

    asyncio.run(main())


def test_what_the_machine_cannot_do_is_said_by_name() -> None:
    model = make_model("llama")
    layout = KVLayout("tiny", 2, 2, 8, "float64")

    async def main() -> None:
        env = WallEnv(0, Trace())
        with pytest.raises(CannotRun, match="cuda:7"):
            TorchEngine(model, layout, 10, env, max_context=64, device="cuda:7")
        with pytest.raises(CannotRun, match="KV pool"):
            TorchEngine(model, layout, 10**13, env, max_context=64)

    asyncio.run(main())


def test_attention_that_would_be_wrong_is_refused() -> None:
    config = Qwen2Config(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)

    async def main() -> None:
        with pytest.raises(CannotRun, match="sliding"):
            make_engine(model)

    asyncio.run(main())


@pytest.mark.parametrize(
    "bad",
    [
        Span("r", (1, 2), 0, (Run(0, 1),), GREEDY),  # runs too short
        Span("r", (1,), 0, (Run(0, 2),), GREEDY),  # runs too long
        Span("r", (), 0, (), GREEDY),
        Span("r", (1,), 0, (Run(400, 1),), GREEDY),  # past the pool
        Span("r", (1,), 0, (Run(-1, 1),), GREEDY),
        Span("r", (1,), 128, (Run(0, 129),), GREEDY),  # past the context
    ],
)
def test_senseless_spans_are_our_own_bugs(bad: Span) -> None:
    async def main() -> None:
        engine = make_engine(make_model("llama"))
        with pytest.raises(AssertionError):
            await engine.step([bad])
        await engine.close()

    asyncio.run(main())
