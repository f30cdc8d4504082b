"""What roles may rely on, of every engine: one suite for the real one and for its double.

`TorchEngine` runs `tiny` in float64, where no id depends on rounding; `ModelEngine` has the same
layout. Slots are given in every order, since the caller decides where KV lies.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from pddrt.engine.base import Engine
from pddrt.engine.model import ModelEngine
from pddrt.engine.models import load
from pddrt.engine.outline import outline
from pddrt.engine.torch import TorchEngine
from pddrt.env import Env, VirtualEnv, WallEnv
from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, Ns, Run, Sampling, Span

from .spans import GREEDY, head, span, tokens

SLOTS = 600
STEP: Ns = 3 * MS
SAMPLINGS = [GREEDY, Sampling(temperature=0.9, seed=5), Sampling(0.9, top_k=20, top_p=0.9, seed=6)]
Make = Callable[[Env], Engine]


def torch_engine(env: Env) -> Engine:
    model = load("tiny", "float64")
    return TorchEngine(
        model.module,
        model.layout,
        SLOTS,
        env,
        max_context=model.max_context,
        step_cost=lambda _spans: STEP,
    )


def model_engine(env: Env) -> Engine:
    model = outline("tiny", "float64")
    return ModelEngine(
        env,
        model.layout,
        SLOTS,
        vocab=model.vocab_size,
        max_context=model.max_context,
        step_cost=lambda _spans: STEP,
        eos_ids=frozenset(model.eos_ids),
    )


@pytest.fixture(params=[torch_engine, model_engine], ids=["torch", "model"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def virtually(main: Callable[[Env], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        return await main(VirtualEnv(0, Trace()))

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(run())


def text(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(32, 127) for _ in range(length))


async def answer(
    engine: Engine,
    ids: Sequence[int],
    runs: Sequence[Run],
    count: int = 8,
    sampling: Sampling = GREEDY,
    have: int = 0,
) -> list[int]:
    """Prefill of ids[have:] at once, then one id after the other."""
    known, start = list(ids), have
    while len(known) < len(ids) + count:
        [token] = tokens(await engine.step([span(known, start, len(known), runs, sampling)]))
        start = len(known)
        known.append(token)
    return known[len(ids) :]


def pages(tokens: int, size: int, seed: int) -> list[Run]:
    """Slots for `tokens`, in pages of `size` in a random order."""
    order = list(range(SLOTS // size))
    random.Random(seed).shuffle(order)
    return list(head([Run(page * size, size) for page in order], tokens))


# -- ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "cut"])
def test_ids_do_not_depend_on_chunks(make: Make, sampling: Sampling) -> None:
    ids, runs = text(40, 1), [Run(7, 60)]

    async def main(env: Env) -> None:
        engine = make(env)
        wanted = await answer(engine, ids, runs, sampling=sampling)
        assert len(set(wanted)) > 2, "an answer that says something"
        for cuts in ([1], [39], [16, 32], [13, 14, 15, 16, 17], list(range(1, 40))):
            for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
                assert await engine.step([span(ids, start, end, runs, None)]) == [None]
            assert await answer(engine, ids, runs, sampling=sampling, have=cuts[-1]) == wanted
        await engine.close()

    virtually(main)


@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_ids_do_not_depend_on_where_kv_lies(make: Make, size: int) -> None:
    ids = text(50, 2)

    async def main(env: Env) -> None:
        engine = make(env)
        wanted = await answer(engine, ids, [Run(0, 58)])
        for seed in range(3):
            assert await answer(engine, ids, pages(58, size, seed)) == wanted
        await engine.close()

    virtually(main)


def test_ids_do_not_depend_on_who_is_in_the_batch(make: Make) -> None:
    texts = [text(length, length) for length in (1, 2, 30, 31, 64)]
    places = [[Run(100 * n, 90)] for n in range(len(texts))]

    async def main(env: Env) -> None:
        engine = make(env)
        alone = [await answer(engine, i, r) for i, r in zip(texts, places, strict=True)]
        known = [list(ids) for ids in texts]
        starts = [0] * len(texts)
        for _ in range(8):  # prompts of all lengths at first, then decodes
            batch = [span(k, s, len(k), r) for k, s, r in zip(known, starts, places, strict=True)]
            for n, token in enumerate(tokens(await engine.step(batch))):
                starts[n] = len(known[n])
                known[n].append(token)
        assert [k[len(i) :] for k, i in zip(known, texts, strict=True)] == alone
        await engine.close()

    virtually(main)


def test_an_extend_gives_what_decoding_one_by_one_gave(make: Make) -> None:
    ids, runs = text(20, 3), [Run(0, 60)]

    async def main(env: Env) -> None:
        engine = make(env)
        whole = [*ids, *await answer(engine, ids, runs, count=16)]
        await engine.step([span(ids, 0, 20, [Run(300, 60)], None)])
        for end in range(21, 36):  # a handoff at every position
            made = await engine.step([span(whole, 20, end, [Run(300, 60)])])
            assert tokens(made) == [whole[end]]
        await engine.close()

    virtually(main)


def test_two_engines_agree_and_the_seed_decides(make: Make) -> None:
    ids, runs = text(20, 4), [Run(0, 40)]

    async def main(env: Env) -> None:
        one, other = make(env), make(env)
        hot = [Sampling(temperature=0.9, seed=seed) for seed in (1, 2)]
        first = [await answer(one, ids, runs, 12, sampling) for sampling in hot]
        assert first == [await answer(other, ids, runs, 12, sampling) for sampling in hot]
        assert first[0] != first[1]
        assert await answer(one, ids, runs, 12, Sampling(seed=1)) == await answer(
            other, ids, runs, 12, Sampling(seed=2)
        ), "a greedy answer knows no seed"
        await one.close()
        await other.close()

    virtually(main)


def test_no_sampling_no_id(make: Make) -> None:
    ids = text(20, 5)

    async def main(env: Env) -> None:
        engine = make(env)
        batch = [
            span(ids, 0, 10, [Run(0, 20)], None),
            span(ids, 0, 20, [Run(50, 20)]),
            span(ids, 0, 5, [Run(100, 20)], None),
        ]
        first, second, third = await engine.step(batch)
        assert (first, third) == (None, None)
        assert tokens([second]) == await answer(engine, ids, [Run(200, 40)], 1)
        assert await engine.step(batch[:1]) == [None]
        await engine.close()

    virtually(main)


# -- KV --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [(1, 16), (16, 1), (5, 64), (16, 16)])
def test_kv_of_one_engine_serves_another(make: Make, left: int, right: int) -> None:
    """By positions, whatever the page sizes; in pieces that end anywhere."""
    ids = text(45, 6)

    async def main(env: Env) -> None:
        one, other = make(env), make(env)
        here, there = pages(60, left, 1), pages(60, right, 2)
        wanted = await answer(one, ids, here)
        for start, end in ((0, 1), (1, 17), (17, 44)):
            payload = one.read_kv(between(here, start, end))
            assert len(payload) == (end - start) * one.layout.bytes_per_token
            other.write_kv(between(there, start, end), memoryview(b"?" + payload)[1:])
            assert other.read_kv(between(there, start, end)) == payload
        assert await answer(other, ids, there, have=44) == wanted
        await one.close()
        await other.close()

    virtually(main)


def between(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """The slots of positions [start, end)."""
    skipped = sum(run.length for run in head(runs, start))
    found = []
    for run in head(runs, end):
        step = min(skipped, run.length)
        skipped -= step
        if step < run.length:
            found.append(Run(run.slot + step, run.length - step))
    return found


def shifted(kv: bytes, token: int) -> bytes:
    return kv[token:] + kv[:token]


@pytest.mark.parametrize("wrong", ["missing", "stale", "shifted", "another's", "one token"])
def test_wrong_kv_changes_the_answer(make: Make, wrong: str) -> None:
    ids, others = text(40, 7), text(40, 8)

    async def main(env: Env) -> None:
        one, other = make(env), make(env)
        wanted = await answer(one, ids, [Run(0, 60)], 16)
        await one.step([span(others, 0, 40, [Run(100, 40)], None)])
        if wrong == "stale":  # what another text left there
            await other.step([span(others, 0, 39, [Run(0, 60)], None)])
        elif wrong == "another's":
            other.write_kv([Run(0, 39)], one.read_kv([Run(100, 39)]))
        elif wrong == "shifted":
            other.write_kv([Run(1, 38)], one.read_kv([Run(0, 38)]))
        elif wrong == "one token":
            other.write_kv([Run(0, 39)], one.read_kv([Run(0, 39)]))
            other.write_kv([Run(20, 1)], one.read_kv([Run(120, 1)]))
        assert await answer(other, ids, [Run(0, 60)], 16, have=39) != wanted
        await one.close()
        await other.close()

    virtually(main)


def test_nothing_is_a_valid_transfer_and_a_wrong_size_is_not(make: Make) -> None:
    async def main(env: Env) -> None:
        engine = make(env)
        assert engine.read_kv([]) == b""
        engine.write_kv([], b"")
        token = engine.layout.bytes_per_token
        for runs, size in (([Run(0, 2)], token), ([Run(0, 1)], token - 1), ([Run(0, 1)], 0)):
            with pytest.raises(AssertionError):
                engine.write_kv(runs, bytes(size))
        await engine.close()

    virtually(main)


@pytest.mark.parametrize("run", [Run(-1, 2), Run(SLOTS - 1, 2), Run(0, 0), Run(SLOTS, 1)])
def test_slots_that_are_not_there_are_refused(make: Make, run: Run) -> None:
    async def main(env: Env) -> None:
        engine = make(env)
        with pytest.raises(AssertionError):
            engine.read_kv([run])
        with pytest.raises(AssertionError):
            engine.write_kv([run], bytes(max(0, run.length) * engine.layout.bytes_per_token))
        await engine.close()

    virtually(main)


def test_writing_touches_no_other_slot(make: Make) -> None:
    ids = text(30, 9)

    async def main(env: Env) -> None:
        engine = make(env)
        wanted = await answer(engine, ids, [Run(100, 40)])
        before = engine.read_kv([Run(100, 30)])
        await engine.step([span(ids[::-1], 0, 30, [Run(130 + 8, 10), Run(80, 20)])])
        engine.write_kv([Run(99, 1), Run(138, 1)], bytes(2 * engine.layout.bytes_per_token))
        assert engine.read_kv([Run(100, 30)]) == before
        assert await answer(engine, ids, [Run(100, 40)], have=29) == wanted
        await engine.close()

    virtually(main)


# -- time and ends ---------------------------------------------------------------------------------


def test_a_step_takes_its_charge_and_its_kv_is_there_at_the_end_of_it(make: Make) -> None:
    """F30: what is read before a step has returned is not what the step writes."""
    ids = text(20, 10)

    async def main(env: Env) -> None:
        engine = make(env)
        untouched = engine.read_kv([Run(0, 20)])
        stepping = asyncio.ensure_future(engine.step([span(ids, 0, 20, [Run(0, 20)])]))
        await env.sleep_until(STEP - 1)
        assert engine.read_kv([Run(0, 20)]) == untouched
        assert not stepping.done()
        await stepping
        assert env.now() == STEP
        assert engine.read_kv([Run(0, 20)]) != untouched
        await engine.close()

    virtually(main)


def test_on_the_wall_clock_a_step_takes_its_charge_at_least(make: Make) -> None:
    ids = text(20, 11)

    async def main() -> tuple[Ns, list[int]]:
        env = WallEnv(0, Trace())
        engine = make(env)
        await engine.start()
        start = env.now()
        made = await engine.step([span(ids, 0, 20, [Run(0, 20)])])
        took = env.now() - start
        await engine.close()
        return took, tokens(made)

    async def virtual(env: Env) -> list[int]:
        return tokens(await make(env).step([span(ids, 0, 20, [Run(0, 20)])]))

    took, made = asyncio.run(main())
    assert took >= STEP
    assert made == virtually(virtual)


def test_one_step_at_a_time(make: Make) -> None:
    ids = text(20, 12)

    async def main(env: Env) -> None:
        engine = make(env)
        first = asyncio.ensure_future(engine.step([span(ids, 0, 20, [Run(0, 20)])]))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="one step at a time"):
            await engine.step([span(ids, 0, 20, [Run(50, 20)])])
        await first
        await engine.step([span(ids, 0, 20, [Run(50, 20)])])
        await engine.close()

    virtually(main)


@pytest.mark.parametrize(
    "senseless",
    [
        [],
        [Span("r", (), 0, (), GREEDY)],
        [Span("r", (1, 2), 0, (Run(0, 1),), GREEDY)],
        [Span("r", (1,), 0, (Run(0, 2),), GREEDY)],
        [Span("r", (1,), 4096, (Run(0, 512),) * 8 + (Run(0, 1),), GREEDY)],
    ],
    ids=["no spans", "no tokens", "too few slots", "too many slots", "past the context"],
)
def test_senseless_spans_are_refused_and_the_engine_goes_on(
    make: Make, senseless: list[Span]
) -> None:
    async def main(env: Env) -> None:
        engine = make(env)
        with pytest.raises(AssertionError):
            await engine.step(senseless)
        assert len(await answer(engine, text(5, 13), [Run(0, 20)], 3)) == 3
        await engine.close()

    virtually(main)


def test_a_closed_engine_is_closed(make: Make) -> None:
    async def main(env: Env) -> None:
        engine = make(env)
        await engine.step([span(text(5, 14), 0, 5, [Run(0, 5)])])
        await engine.close()
        await engine.close()
        with pytest.raises(AssertionError, match="closed"):
            await engine.step([span(text(5, 14), 0, 5, [Run(0, 5)])])

    virtually(main)
