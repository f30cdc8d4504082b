"""Toxics under the virtual clock: what each does to a stream, to the nanosecond."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddrt.env import Env, VirtualEnv
from pddrt.netem.toxics import STAGES, Stage, checked, latency
from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, SECOND, US, Ns
from tests.proxylab import toxic


class Pipe:
    """What a chain of stages is part of, and its end: remembers what comes out, and when."""

    def __init__(self, env: Env, *toxics: Any) -> None:
        self.env = env
        self.waiting = 0
        self.out: list[tuple[Ns, bytes | str]] = []
        self.killed: list[tuple[Ns, bool]] = []
        self.stages: list[Stage] = [STAGES[t.type](self, t, f"seed/{t.name}") for t in toxics]
        for stage, after in zip(self.stages, [*self.stages[1:], self], strict=True):
            stage.next = after

    def hold_back(self, nbytes: int) -> None:
        self.waiting += nbytes
        assert self.waiting >= 0

    def kill(self, reset: bool) -> None:
        self.killed.append((self.env.now(), reset))

    def feed(self, data: bytes) -> None:
        self.out.append((self.env.now(), bytes(data)))

    def end(self, how: str) -> None:
        self.out.append((self.env.now(), how))

    @property
    def text(self) -> bytes:
        return b"".join(data for _, data in self.out if isinstance(data, bytes))


def after(script: Callable[[Env], Any], time: Ns = 60 * SECOND) -> Any:
    """What `script(env)` returned, once `time` has passed."""

    async def main() -> Any:
        env = VirtualEnv(7, Trace())
        found = script(env)
        await env.sleep(time)
        return found

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main())


def test_latency_delays_everything_once_and_the_end_too() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("latency", latency=30))
        for k in range(5):
            env.call_at(k * MS, pipe.stages[0].feed, bytes([k]))
        env.call_at(5 * MS, pipe.stages[0].end, "fin")
        return pipe

    pipe = after(script)
    assert pipe.out == [((30 + k) * MS, bytes([k])) for k in range(5)] + [(35 * MS, "fin")]
    assert pipe.waiting == 0, "what is only delayed slows nobody down"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.integers(0, 150))
def test_the_jitter_of_latency_has_the_mean_and_deviation_of_what_is_asked(
    mean: int, jitter: int
) -> None:
    """max(0, mean + uniform(-jitter, jitter)), by its integral."""
    steps = 20_000
    draws = [max(0.0, mean + jitter * (2 * (k + 0.5) / steps - 1)) for k in range(steps)]
    expected = math.fsum(draws) / steps
    deviation = math.sqrt(math.fsum((d - expected) ** 2 for d in draws) / steps)
    found = latency(mean, jitter)
    assert found[0] == pytest.approx(expected, abs=1e-3)
    assert found[1] == pytest.approx(deviation, abs=1e-2)


def test_jitter_keeps_its_mean_however_a_program_writes_and_never_reorders() -> None:
    """50 +- 40 ms drawn for each of many writes, and kept in order, would give 90: the latest so
    far rules."""

    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("latency", latency=50, jitter=40))
        for k in range(20_000):
            env.call_at(k * 2 * MS, pipe.stages[0].feed, k.to_bytes(4, "big"))
        return pipe

    pipe = after(script)
    assert pipe.text == b"".join(k.to_bytes(4, "big") for k in range(20_000))
    delays = [time / MS - 2 * k for k, (time, _) in enumerate(pipe.out)]
    assert sum(delays) / len(delays) == pytest.approx(50, rel=0.08)


def test_bandwidth_is_exact_however_it_is_written() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("bandwidth", rate=1000))  # 1 MB/s
        rng = random.Random(1)
        sizes = [rng.randrange(1, 9000) for _ in range(200)]
        pipe.size = sum(sizes)  # type: ignore[attr-defined]
        for size in sizes:
            pipe.stages[0].feed(bytes(size))
        pipe.stages[0].end("fin")
        return pipe

    pipe = after(script)
    end, how = pipe.out[-1]
    assert how == "fin"
    assert len(pipe.text) == pipe.size
    assert 0 <= end - pipe.size * SECOND // 1_000_000 <= 2000, "rounded up a piece"
    assert pipe.waiting == 0


def test_a_small_message_after_a_pause_is_not_for_free_and_not_for_later() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("bandwidth", rate=100))
        env.call_at(SECOND, pipe.stages[0].feed, bytes(100))
        return pipe

    assert after(script).out[-1][0] == SECOND + MS


def test_a_new_bandwidth_holds_for_what_waits() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("bandwidth", rate=1))
        pipe.stages[0].feed(bytes(10_000))  # 10 s
        pipe.stages[0].end("fin")
        env.call_at(SECOND, pipe.stages[0].change, toxic("bandwidth", rate=1000))
        return pipe

    pipe = after(script)
    assert len(pipe.text) == 10_000
    assert SECOND + 7 * MS <= pipe.out[-1][0] <= SECOND + 11 * MS


def test_slow_close_delays_the_end_and_nothing_else() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("slow_close", delay=200))
        pipe.stages[0].feed(b"x")
        pipe.stages[0].end("fin")
        return pipe

    assert after(script).out == [(0, b"x"), (200 * MS, "fin")]


def test_slices_are_small_apart_and_complete() -> None:
    data = random.Random(3).randbytes(10_000)

    def script(env: Env) -> Pipe:
        asked = {"average_size": 100, "size_variation": 40, "delay": 50}
        pipe = Pipe(env, toxic("slicer", **asked))
        pipe.stages[0].feed(data)
        pipe.stages[0].end("fin")
        return pipe

    pipe = after(script)
    slices = [(time, piece) for time, piece in pipe.out if isinstance(piece, bytes)]
    assert pipe.text == data
    assert all(60 <= len(piece) <= 140 for _, piece in slices[:-1])
    assert [time for time, _ in slices] == [50 * US * k for k in range(len(slices))]
    assert pipe.out[-1][1] == "fin"


@pytest.mark.parametrize(("kind", "reset"), [("timeout", False), ("reset_peer", True)])
def test_a_stall_ends_in_time(kind: str, reset: bool) -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic(kind, timeout=300))
        pipe.stages[0].feed(b"never")
        return pipe

    pipe = after(script)
    assert pipe.out == []
    assert pipe.killed == [(300 * MS, reset)]
    assert pipe.waiting == 5


def test_a_timeout_of_nothing_stalls_for_ever_and_a_reset_in_no_time_is_one() -> None:
    assert after(lambda env: Pipe(env, toxic("timeout"))).killed == []
    assert after(lambda env: Pipe(env, toxic("reset_peer"))).killed == [(0, True)]


def test_limit_data_ends_the_connection_behind_the_last_byte() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("limit_data", bytes=10))
        for data in (b"1234", b"56789012345", b"more"):
            pipe.stages[0].feed(data)
        pipe.stages[0].end("fin")
        return pipe

    assert after(script).out == [(0, b"1234"), (0, b"567890"), (0, "close")]


@pytest.mark.parametrize("kind", ["latency", "bandwidth", "slicer", "timeout", "slow_close"])
def test_taking_a_toxic_out_passes_on_all_it_holds_in_order(kind: str) -> None:
    asked = {
        "latency": {"latency": 10_000}, "bandwidth": {"rate": 1}, "timeout": {},
        "slicer": {"average_size": 7, "delay": 10**6}, "slow_close": {"delay": 10_000},
    }  # fmt: skip

    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic(kind, **asked[kind]))
        pipe.stages[0].feed(bytes(range(250)))
        pipe.stages[0].feed(b"tail")
        pipe.stages[0].end("fin")
        env.call_at(2 * MS, pipe.stages[0].release)
        return pipe

    pipe = after(script)
    assert pipe.text == bytes(range(250)) + b"tail"
    assert pipe.out[-1] == (2 * MS, "fin")
    assert pipe.waiting == 0


def test_toxics_in_a_row_add_up() -> None:
    def script(env: Env) -> Pipe:
        pipe = Pipe(env, toxic("bandwidth", rate=1000), toxic("latency", latency=20))
        pipe.stages[0].feed(bytes(5000))
        pipe.stages[0].end("fin")
        return pipe

    assert after(script).out[-1] == (25 * MS, "fin")


def test_dropping_a_stage_gives_back_what_it_held() -> None:
    for kind, asked in (("bandwidth", {"rate": 1}), ("timeout", {}), ("slicer", {"delay": 99})):

        def script(env: Env, kind: str = kind, asked: dict[str, int] = asked) -> Pipe:
            pipe = Pipe(env, toxic(kind, **asked))
            pipe.stages[0].feed(bytes(100_000))
            pipe.stages[0].feed(bytes(100_000))
            pipe.stages[0].drop()
            assert pipe.waiting == 0
            return pipe

        assert len(after(script).text) <= 100_000


@pytest.mark.parametrize("value", [-1, 1.5, True, "5", None, 2**60, float("nan"), float("inf")])
def test_attributes_are_whole_numbers_from_nought(value: Any) -> None:
    with pytest.raises(ValueError, match="rate must be a whole number from 0"):
        checked("bandwidth", {"rate": value}, {})


def test_attributes_that_are_not_given_stay_as_they_were() -> None:
    assert checked("latency", {"jitter": 2.0}, {"latency": 7, "jitter": 1}) == {
        "latency": 7, "jitter": 2,
    }  # fmt: skip
    assert checked("latency", {"unknown": 5}, {}) == {"latency": 0, "jitter": 0}
