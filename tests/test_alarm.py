"""Alarms: exact order, never early, and nothing left behind. How late they are is what `netem
check` measures."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from pddrt import env as env_module
from pddrt.alarm import Alarms, attentive, open_timer
from pddrt.env import WallEnv, machine_time
from pddrt.trace import Trace
from pddrt.types import MS, SECOND

pytestmark = pytest.mark.skipif(open_timer() is None, reason="no timerfd on this system")
loops = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
Main = Callable[[WallEnv], Coroutine[Any, Any, None]]


def run(loop: Any, main: Main) -> None:
    async def start() -> None:
        await main(WallEnv(1, Trace()))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(start())


@loops
def test_alarms_ring_in_the_order_of_their_deadlines_and_never_early(loop: Any) -> None:
    async def main(env: WallEnv) -> None:
        begun, rung = env.now(), []
        deadlines = [3 * MS, MS, 2 * MS, MS, 0, MS // 10, 3 * MS]
        for k, after in enumerate(deadlines):
            env.call_at(begun + after, lambda k=k: rung.append((k, env.now())))
        await env.sleep_until(begun + 4 * MS)
        assert [k for k, _ in rung] == [4, 5, 1, 3, 2, 0, 6]
        assert all(at >= begun + deadlines[k] for k, at in rung)

    run(loop, main)


@loops
def test_a_deadline_that_is_past_is_soon_but_not_at_once(loop: Any) -> None:
    async def main(env: WallEnv) -> None:
        rung: list[int] = []
        for when in (env.now(), 0, -SECOND):
            env.call_at(when, rung.append, when)
        assert rung == []
        await env.sleep(MS)
        assert len(rung) == 3

    run(loop, main)


def test_a_call_may_cancel_others_and_set_new_ones() -> None:
    async def main(env: WallEnv) -> None:
        rung: list[str] = []
        now = env.now()

        def first() -> None:
            rung.append("first")
            second.cancel()
            env.call_at(now + MS, rung.append, "same time")
            env.call_at(now + 2 * MS, rung.append, "later")

        env.call_at(now + MS, first)
        second = env.call_at(now + MS, rung.append, "second")
        await env.sleep_until(now + 3 * MS)
        assert rung == ["first", "same time", "later"]
        second.cancel()

    run(uvloop.new_event_loop, main)


def test_a_call_that_fails_is_reported_and_the_others_ring() -> None:
    async def main(env: WallEnv) -> None:
        said: list[Any] = []
        env.loop.set_exception_handler(lambda _loop, context: said.append(context["exception"]))
        rung: list[int] = []
        now = env.now()
        env.call_at(now + MS, lambda: 1 / 0)
        env.call_at(now + MS, rung.append, 1)
        await env.sleep_until(now + 2 * MS)
        assert rung == [1]
        assert isinstance(said[0], ZeroDivisionError)

    run(uvloop.new_event_loop, main)


def test_cancelled_deadlines_do_not_pile_up() -> None:
    async def main(env: WallEnv) -> None:
        alarms = env._alarms
        assert isinstance(alarms, Alarms)
        keep = [env.call_at(env.now() + 3600 * SECOND, print) for _ in range(10)]
        for _ in range(10_000):
            env.call_at(env.now() + 60 * SECOND, print).cancel()
        assert len(alarms._heap) < 200
        for timer in keep:
            timer.cancel()

    run(uvloop.new_event_loop, main)


def test_a_clock_leaves_no_file_open() -> None:
    def clocks() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.islink(f) and "timerfd" in os.readlink(f) for f in links)

    async def main(env: WallEnv) -> None:
        await env.sleep(MS)
        env.call_at(env.now() + 3600 * SECOND, print)
        assert clocks() > before

    gc.collect()
    before = clocks()
    run(uvloop.new_event_loop, main)
    gc.collect()
    assert clocks() == before


def test_without_a_timerfd_the_loop_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_module, "open_timer", lambda: None)

    async def main(env: WallEnv) -> None:
        assert env._alarms is None
        due = env.now() + 2 * MS
        await env.sleep_until(due)
        assert env.now() >= due

    run(uvloop.new_event_loop, main)


def test_attention_ends_where_it_began_and_is_not_inherited() -> None:
    before, turn = (os.sched_getscheduler(0), os.sched_getparam(0)), sys.getswitchinterval()
    with attentive() as got:
        inside = os.sched_getscheduler(0)
        assert sys.getswitchinterval() < turn
        if got == "real-time":
            assert inside & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
            child = os.fork()
            if not child:
                os._exit(os.sched_getscheduler(0) != os.SCHED_OTHER)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        else:
            assert inside == before[0]
    assert (os.sched_getscheduler(0), os.sched_getparam(0)) == before
    assert sys.getswitchinterval() == turn
    with attentive(realtime=False) as got:
        assert got == "normal"
        assert os.sched_getscheduler(0) == before[0]


def test_processes_of_a_machine_share_a_clock() -> None:
    read, write = os.pipe()
    before = machine_time()
    child = os.fork()
    if not child:
        os.write(write, str(machine_time()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert before <= int(os.read(read, 64)) <= machine_time()
    os.close(read)
    os.close(write)
