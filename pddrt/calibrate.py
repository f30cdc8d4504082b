"""Calibration: measures this machine's engine, step by step, and fits a step profile (`profiles`).

Every shape is run once to warm up, then `rounds` times; the median counts. One engine at a time,
alone: what several instances take from each other on shared cores is not in a profile, and under
the virtual clock does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from statistics import median

from pddrt.engine.models import LoadedModel, Progress, load
from pddrt.env import Stopwatch, WallEnv
from pddrt.errors import CannotRun, EngineFailed
from pddrt.hosting import cpu_name
from pddrt.profiles import Sample, Shape, StepProfile, fit
from pddrt.trace import Trace
from pddrt.types import Run, Sampling, Span

CONTEXT = 2048
"""Longest context that is measured, tokens; the formula is linear beyond."""


def shapes(context: int) -> Iterator[Shape]:
    """Decodes, extends, prompts and mixtures, with up to `context` tokens before them."""
    for before in (16, context // 4, context - 16):
        for count in (1, 2, 4, 8, 16):
            yield [(1, before)] * count
    for tokens in (2, 4, 8, 16, 24, 32, 64, 128):
        yield [(tokens, context // 4)]
    for tokens in (8, 32, 64, 128, 256, 512):
        yield [(tokens, 0)]
    for tokens in (64, 128, 256, 512):
        yield [(tokens, context - 512)]
    for decodes, tokens in ((1, 64), (4, 128), (4, 256), (8, 64)):
        yield [(1, context // 2)] * decodes + [(tokens, 0)]


def calibrate(
    name: str,
    dtype: str,
    *,
    device: str = "cpu",
    threads: int = 1,
    rounds: int = 5,
    progress: Progress | None = None,
) -> StepProfile:
    """Measures model `name`; a minute or so for the default one on a CPU. Raises as `load` does."""
    model = load(name, dtype, device, progress)
    context = min(CONTEXT, model.max_context - 16)
    wanted = [tuple(s) for s in shapes(context)]
    with asyncio.Runner() as runner:
        samples = runner.run(_measure(model, wanted, device, threads, rounds, progress))
    return fit(
        samples,
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=dtype,
        device=device,
        threads=threads,
        machine=cpu_name() if device == "cpu" else device,
    )


async def _measure(
    model: LoadedModel,
    wanted: Sequence[tuple[tuple[int, int], ...]],
    device: str,
    threads: int,
    rounds: int,
    progress: Progress | None,
) -> list[Sample]:
    from pddrt.engine.torch import TorchEngine

    slots = max(sum(n + start for n, start in shape) for shape in wanted)
    engine = TorchEngine(
        model.module,
        model.layout,
        slots,
        WallEnv(0, Trace()),
        max_context=model.max_context,
        device=device,
        threads=threads,
        name="calibrate",
    )
    samples = []
    try:
        await engine.start()
        for number, shape in enumerate(wanted):
            spans = _spans(shape)
            try:
                await engine.step(spans)
                times = []
                for _ in range(rounds):
                    watch = Stopwatch()
                    await engine.step(spans)
                    times.append(watch.elapsed())
            except EngineFailed as error:
                raise CannotRun(f"a step of {shape}: {error}") from None
            samples.append(Sample(shape, round(median(times)), rounds))
            if progress is not None:
                progress(f"measuring {model.name}", (number + 1) / len(wanted))
    finally:
        await engine.close()
    return samples


def _spans(shape: Shape) -> list[Span]:
    """Each sequence in slots of its own, one run each; any token is as good as another."""
    spans, slot = [], 0
    for number, (tokens, start) in enumerate(shape):
        run = Run(slot, start + tokens)
        spans.append(Span(str(number), (1,) * tokens, start, (run,), Sampling()))
        slot += run.length
    return spans
