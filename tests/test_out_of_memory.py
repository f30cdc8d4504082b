"""Device memory that runs out under way: in a step, in reading or writing KV. It fails the requests
that were concerned, by name; the engine, the instance and the run go on.

There is no GPU here: the allocators' errors are planted.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pddrt import scenario
from pddrt import trace as ev
from pddrt.engine.base import Engine
from pddrt.engine.model import ModelEngine
from pddrt.engine.torch import TorchEngine
from pddrt.env import Env, WallEnv
from pddrt.errors import CannotRun, EngineFailed
from pddrt.policy.route import Naive, Pdd
from pddrt.recording import opened
from pddrt.roles.instance import InstanceSpec
from pddrt.run import Run
from pddrt.trace import Trace
from pddrt.types import EIGHT_BIT, MS, SECOND, Drawn, Span
from pddrt.types import Run as Slots
from pddrt.workload import Session, Turn

from .cluster import Cluster, Played, many
from .spans import span, tokens
from .test_engine import make_engine, make_model

FULL: dict[str, Callable[[], BaseException]] = {
    "python": MemoryError,
    "torch's CUDA allocator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"),
    "torch's CPU allocator": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "the driver": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"),
}


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", FULL)
def test_a_step_that_does_not_fit_fails_and_the_next_one_does_not(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the failed one had allocated is free at once, for the next to have."""
    whole, kept = TorchEngine._forward, []

    def forward(engine: TorchEngine, spans: Sequence[Span]) -> list[Drawn | None]:
        if not kept:
            activations = torch.zeros(1000)
            kept.append(weakref.ref(activations))
            raise FULL[whose]()
        return whole(engine, spans)

    async def main() -> None:
        engine = make_engine(make_model("llama"))
        step = [span((1, 2, 3), 0, 3, [Slots(0, 3)])]
        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "_forward", forward)
            gc.disable()
            try:
                with pytest.raises(EngineFailed, match=r"out of memory on cpu \([^\n]+\)$"):
                    await engine.step(step)
                assert kept[0]() is None
            finally:
                gc.enable()
            again = tokens(await engine.step(step))
        await engine.close()
        other = make_engine(make_model("llama"))
        assert again == tokens(await other.step(step))
        await other.close()

    asyncio.run(main())


def test_what_is_no_lack_of_memory_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = make_engine(make_model("llama"))
        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "_forward", _raise(RuntimeError("shapes do not match")))
            with pytest.raises(RuntimeError, match="shapes"):
                await engine.step([span((1,), 0, 1, [Slots(0, 1)])])
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_cannot_even_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = make_engine(make_model("llama"), WallEnv(0, Trace()))
        monkeypatch.setattr(TorchEngine, "_forward", _raise(MemoryError()))
        with pytest.raises(CannotRun, match="not even one token"):
            await engine.start()
        await engine.close()

    asyncio.run(main())


def _raise(error: BaseException) -> Callable[..., Any]:
    def planted(*_args: Any, **_more: Any) -> Any:
        raise error

    return planted


@pytest.mark.parametrize("what", ["read", "write", "convert", "unpack", "pack"])
def test_moving_kv_that_does_not_fit_fails_and_the_next_does_not(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = make_engine(make_model("llama"))
        runs, kv = [Slots(0, 2)], bytes(2 * engine.layout.bytes_per_token)
        call = {
            "read": lambda: engine.read_kv(runs),
            "write": lambda: engine.write_kv(runs, kv),
            "convert": lambda: engine.convert_kv(kv, "float32"),
            "unpack": lambda: engine.convert_kv(bytes(2 * 2 * 2 * 2 * 12), EIGHT_BIT),
            "pack": lambda: engine.pack_kv(kv),
        }[what]
        with monkeypatch.context() as patch:
            patch.setattr(np, "frombuffer", _raise(MemoryError()))
            patch.setattr(torch, "frombuffer", _raise(torch.OutOfMemoryError("CUDA out of memory")))
            if what == "read":
                patch.setattr(engine, "_bytes", Bursting())
            with pytest.raises(EngineFailed, match="out of memory"):
                call()
        call()
        await engine.close()

    asyncio.run(main())


class Bursting:
    """In place of a pool."""

    def __iter__(self) -> Any:
        raise MemoryError


# -- the deployment --------------------------------------------------------------------------------


class Short(ModelEngine):
    """Its n-th read or write of KV does not fit; `fails` says which."""

    fails: tuple[str, int] = ("", 0)
    calls = 0

    def _count(self, what: str) -> None:
        if what == self.fails[0]:
            self.calls += 1
            if self.calls == self.fails[1]:
                raise EngineFailed(f"out of memory ({what})")

    def read_kv(self, runs: Sequence[Slots]) -> bytes:
        self._count("read")
        return super().read_kv(runs)

    def write_kv(self, runs: Sequence[Slots], payload: bytes | memoryview) -> None:
        self._count("write")
        super().write_kv(runs, payload)


def starved(name: str, what: str, nth: int, cluster: Cluster, sessions: list[Session]) -> Played:
    """A run in which `name` lacks memory once; every answer and every page is looked at."""

    class Lacking(Cluster):
        def engine(self, env: Env, spec: InstanceSpec) -> Engine:
            made = super().engine(env, spec)
            if spec.name == name:
                assert isinstance(made, ModelEngine)
                made.__class__ = Short
                made.fails = (what, nth)  # type: ignore[attr-defined]
            return made

    played = Lacking(**vars(cluster)).play(sessions)
    played.assert_sound()
    assert played.left == []
    assert [r.finish_reason for r in played.records] == ["length"] * len(played.records)
    return played


@pytest.mark.parametrize(
    ("name", "what", "then"),
    [
        ("p0", "read", "again"),
        ("rld0", "write", "takeover"),
        ("md0", "write", "another main"),
    ],
)
def test_kv_that_cannot_be_moved_fails_its_request_alone(name: str, what: str, then: str) -> None:
    cluster = Cluster(prefills=2, mains=2, policy=Pdd(0), deadline=20 * SECOND)
    played = starved(name, what, 2, cluster, many(4, 200, 160, every=400 * MS))
    hit = {r.id: played.went_on(r.id) for r in played.records if played.went_on(r.id)}
    [[(how, why)]] = hit.values()
    assert (how, f"{name}: out of memory ({what})" in why) == (then, True)


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_hit_whose_tail_cannot_be_copied_fails_its_request_or_lesson_alone(nth: int) -> None:
    """The prompt ends within a page that another's begins with. Nothing else is written to P: in
    turn what a lesson copies, and a request.
    """
    text = "x" * 100
    sessions = [Session(i, i * 300 * MS, (Turn(text, 30, 0),)) for i in range(4)]
    cluster = Cluster(policy=Naive(), deadline=20 * SECOND, chunk_tokens=256)
    plain = cluster.play(sessions)
    played = starved("p0", "write", nth, cluster, sessions)
    short: Any = played.deployment.instance("p0").engine
    assert short.calls >= nth
    assert [r.ids for r in played.records] == [r.ids for r in plain.records]
    told = [why for r in played.records for _, why in played.went_on(r.id)]
    assert told == ([] if nth % 2 else ["p0: out of memory (write)"])


def test_a_real_model_that_runs_out_in_some_steps_answers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, steps = TorchEngine._forward, [0]

    def forward(engine: TorchEngine, spans: Sequence[Span]) -> list[Drawn | None]:
        steps[0] += 1
        if steps[0] % 40 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(engine, spans)

    monkeypatch.setattr(TorchEngine, "_forward", forward)
    changes = ["workload.sessions=6", "workload.turns=2", "recovery.retries=20"]
    run = Run(scenario.load("scenarios/tiny.yaml", changes), out=tmp_path / "run", verify=True)
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    assert result.summary["requests"]["finished"] == 12
    assert result.summary["parity"]["different"] == 0
    failed = [e for e in opened(run.folder).events() if isinstance(e, ev.StepFailed)]
    assert len(failed) == steps[0] // 40 > 2
    assert "out of memory on cpu (CUDA out of memory" in failed[0].detail
