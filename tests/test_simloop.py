"""The virtual event loop: order, exact time, and that the rest of asyncio works on it. And the two
clocks of Env."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pddrt.env import Env, VirtualEnv, WallEnv
from pddrt.simloop import Deadlock, SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, SECOND


def run(coro: Coroutine[Any, Any, Any], shuffle: int | None = None) -> Any:
    with asyncio.Runner(loop_factory=lambda: SimLoop(shuffle)) as runner:
        return runner.run(coro)


def loop_now() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


# -- time and order ------------------------------------------------------------------------------


def test_time_starts_at_zero_and_jumps_to_the_deadline_exactly() -> None:
    async def main() -> None:
        loop = loop_now()
        seen = []
        for when in (10**18 + 1, 3, 7 * SECOND + 1, 10**18):
            loop.call_at_ns(when, lambda: seen.append(loop.time_ns()))
        assert loop.time_ns() == 0
        done = loop.create_future()
        loop.call_at_ns(10**18 + 2, done.set_result, None)
        await done
        assert seen == [3, 7 * SECOND + 1, 10**18, 10**18 + 1]

    run(main())


def test_timers_with_equal_deadlines_fire_in_the_order_they_were_set() -> None:
    async def main() -> None:
        loop = loop_now()
        seen: list[int] = []
        for k in range(500):
            # half of them through floats, half exact: the deadline is the same
            if k % 2:
                loop.call_at_ns(5 * MS, seen.append, k)
            else:
                loop.call_later(0.005, seen.append, k)
        await asyncio.sleep(0.006)
        assert seen == list(range(500))

    run(main())


def test_a_deadline_in_the_past_runs_soon_and_time_never_goes_back() -> None:
    async def main() -> None:
        loop = loop_now()
        await asyncio.sleep(1)
        seen = []
        loop.call_at_ns(0, lambda: seen.append(loop.time_ns()))
        await asyncio.sleep(1)
        assert seen == [SECOND]
        assert loop.time_ns() == 2 * SECOND

    run(main())


def test_ready_callbacks_run_first_in_first_out() -> None:
    async def main() -> None:
        loop = loop_now()
        seen: list[Any] = []
        loop.call_soon(lambda: (seen.append(1), loop.call_soon(seen.append, 3)))
        loop.call_soon_threadsafe(seen.append, 2)
        loop.call_soon(seen.append, "cancelled").cancel()
        await asyncio.sleep(0.001)
        assert seen == [1, 2, 3]

    run(main())


def test_a_cancelled_timer_does_not_run_and_moves_no_clock() -> None:
    async def main() -> None:
        loop = loop_now()
        seen: list[int] = []
        loop.call_later(5, seen.append, 1).cancel()
        loop.call_later(1, seen.append, 2)
        await asyncio.sleep(1.5)
        assert seen == [2]
        assert loop.time_ns() == SECOND * 3 // 2

    run(main())


def test_a_callback_may_cancel_another_that_is_due_at_the_same_instant() -> None:
    async def main() -> None:
        loop = loop_now()
        seen: list[str] = []
        loop.call_at_ns(5, lambda: second.cancel())
        second = loop.call_at_ns(5, seen.append, "second")
        await asyncio.sleep(1)
        assert seen == []

    run(main())


def order(shuffle: int | None) -> list[int]:
    async def main() -> list[int]:
        seen: list[int] = []
        for k in range(30):
            loop_now().call_at_ns(MS, seen.append, k)
        await asyncio.sleep(1)
        return seen

    result: list[int] = run(main(), shuffle)
    return result


def test_shuffle_permutes_what_is_due_at_one_instant_by_its_seed() -> None:
    assert order(None) == list(range(30))
    assert order(1) != list(range(30))
    assert sorted(order(1)) == list(range(30))
    assert order(1) == order(1)
    assert order(1) != order(2)


# -- asyncio on top ------------------------------------------------------------------------------


def test_timeouts_fire_at_their_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        assert loop_now().time_ns() == SECOND * 5 // 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 1)
        assert loop_now().time_ns() == SECOND * 7 // 2

    run(main())


def test_queues_events_conditions_and_semaphores_work() -> None:
    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        event, got = asyncio.Event(), []
        gate = asyncio.Semaphore(1)

        async def produce() -> None:
            for k in range(5):
                await queue.put(k)
            event.set()

        async def consume() -> None:
            for _ in range(5):
                async with gate:
                    await asyncio.sleep(0.1)
                    got.append(await queue.get())

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            await event.wait()
        assert got == [0, 1, 2, 3, 4]
        assert loop_now().time_ns() == 500 * MS

    run(main())


def test_a_task_group_cancels_the_others_when_one_fails() -> None:
    async def main() -> None:
        ended = []

        async def wait(k: int) -> None:
            try:
                await asyncio.sleep(10)
            finally:
                ended.append((k, loop_now().time_ns()))

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError("no")

        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                for k in range(5):
                    group.create_task(wait(k))
                group.create_task(fail())
        assert caught.group_contains(ValueError, match="no")
        assert ended == [(k, SECOND) for k in range(5)]

    run(main())


PROGRAM = """
import asyncio, sys
from pddrt.simloop import SimLoop
junk = [object() for _ in range(int(sys.argv[1]))]  # other addresses in every process
order = []
async def wait(k):
    try:
        await asyncio.sleep(10)
    finally:
        order.append(k)
async def main():
    try:
        async with asyncio.TaskGroup() as group:
            for k in range(40):
                group.create_task(wait(k), name=str(k))
                junk.append(bytearray(k * 100))
            await asyncio.sleep(1)
            raise ValueError
    except* ValueError:
        pass
    for k in range(40):
        asyncio.create_task(wait(100 + k))
    more = [asyncio.create_task(wait(k)) for k in range(200, 220)]
    done, pending = await asyncio.wait(more, timeout=1)
    for task in pending:
        task.cancel()
with asyncio.Runner(loop_factory=SimLoop) as runner:
    runner.run(main())  # its close cancels all that is left
print(order)
"""


def test_cancellation_order_is_the_same_in_every_process() -> None:
    def once(hash_seed: str, junk: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        root = Path(__file__).parent.parent
        argv = [sys.executable, "-c", PROGRAM, junk]
        done = subprocess.run(argv, cwd=root, env=env, text=True, capture_output=True, check=True)
        return done.stdout

    first = once("0", "0")
    assert len(first.split(",")) == 100
    assert {once("1", "777"), once("random", "12345")} == {first}


def test_tasks_are_named_and_hashed_by_number() -> None:
    async def main() -> None:
        async def nothing() -> None: ...

        tasks = [asyncio.create_task(nothing()) for _ in range(3)]
        first = hash(tasks[0])
        assert [hash(task) for task in tasks] == [first, first + 1, first + 2]
        assert tasks[1].get_name() == f"task-{first + 1}"
        assert asyncio.create_task(nothing(), name="mine").get_name() == "mine"
        await asyncio.gather(*tasks)

    run(main())


# -- failures ------------------------------------------------------------------------------------


def test_a_deadlock_names_the_tasks_and_where_each_waits() -> None:
    async def waits_for_ever(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        await asyncio.sleep(1.25)
        task = asyncio.create_task(waits_for_ever(asyncio.Event()), name="md0 admits r7")
        await task

    with pytest.raises(Deadlock) as caught:
        run(main())
    lines = str(caught.value).splitlines()
    assert lines[0] == "deadlock at 1.250000000 s: nothing can run and no timer is set"
    assert lines[1].startswith("  task-0 waits at ")
    assert lines[1].split(":")[0].endswith("test_simloop.py")
    assert lines[2].startswith("  md0 admits r7 waits at ")
    assert lines[2].split(":")[0].endswith("locks.py")
    assert len(lines) == 3


def test_a_cancelled_timer_alone_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        loop_now().call_later(5, print).cancel()
        await loop_now().create_future()

    with pytest.raises(Deadlock, match=r"deadlock at 0\.0"):
        run(main())


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        loop_now().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run(main())


def test_an_exception_nobody_awaited_ends_the_run() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task
        gc.collect()
        await asyncio.sleep(1)
        raise AssertionError("unreachable")

    with pytest.raises(ValueError, match="lost"):
        run(main())


def test_a_handler_may_take_such_exceptions_instead() -> None:
    async def main() -> None:
        seen = []
        loop_now().set_exception_handler(lambda _loop, context: seen.append(context["exception"]))
        loop_now().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        assert isinstance(seen[0], ZeroDivisionError)

    run(main())


def test_there_is_no_outside() -> None:
    async def main() -> None:
        for attempt in (
            asyncio.to_thread(print),
            asyncio.open_connection("127.0.0.1", 1),
            asyncio.create_subprocess_exec("true"),
        ):
            with pytest.raises(NotImplementedError):
                await attempt

    run(main())


def test_the_loop_can_run_again_and_keeps_its_time() -> None:
    async def main() -> int:
        await asyncio.sleep(1)
        return loop_now().time_ns()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        assert [runner.run(main()), runner.run(main())] == [SECOND, 2 * SECOND]


# -- Env -----------------------------------------------------------------------------------------


def both_clocks(main: Any) -> None:
    async def virtual() -> None:
        await main(VirtualEnv(7, Trace()))

    async def wall() -> None:
        await main(WallEnv(7, Trace()))

    run(virtual())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wall())


def test_sleeps_and_timers_never_end_early() -> None:
    async def main(env: Env) -> None:
        async def turn_the_loop() -> None:  # uvloop then fires timers up to a millisecond early
            while True:
                await asyncio.sleep(0) if not env.virtual else await env.sleep(MS // 7)

        turning = asyncio.create_task(turn_the_loop())
        for k in range(30):
            when = env.now() + MS + k * 10_007
            fired: list[int] = []
            env.call_at(when, lambda fired=fired: fired.append(env.now()))
            await env.sleep_until(when)
            assert env.now() >= when
            await env.sleep_until(when)  # past: returns
            await env.sleep(3 * MS)
            assert fired[0] >= when
        turning.cancel()

    both_clocks(main)


def test_a_cancelled_timer_of_env_does_not_run() -> None:
    async def main(env: Env) -> None:
        seen: list[int] = []
        early = env.call_at(env.now() + MS, seen.append, 1)
        env.call_at(env.now() + 2 * MS, seen.append, 2)
        early.cancel()
        await env.sleep(5 * MS)
        early.cancel()
        assert seen == [2]

    both_clocks(main)


def test_timers_that_were_cancelled_do_not_pile_up_until_they_are_due() -> None:
    """Every request sets deadlines far ahead and cancels them; what stands keeps its order."""

    async def main() -> list[int]:
        loop, fired, most = loop_now(), list[int](), 0
        for number in range(5_000):
            far = loop.call_at_ns((1_000 + number) * SECOND, fired.append, -1)
            if number % 1_000 == 0:
                loop.call_at_ns((2_000 - number // 1_000) * SECOND, fired.append, number)
            await asyncio.sleep(0.001)
            far.cancel()
            far.cancel()
            most = max(most, len(loop._timers))
        assert most < 300
        await asyncio.sleep(3_000)
        return fired

    assert run(main()) == [4_000, 3_000, 2_000, 1_000, 0]


def test_virtual_sleeps_are_exact() -> None:
    async def main() -> None:
        env = VirtualEnv(7, Trace())
        for k in range(1000):
            await env.sleep(333_333_333)
            assert env.now() == (k + 1) * 333_333_333

    run(main())


def test_random_streams_are_a_function_of_seed_and_name() -> None:
    async def main(env: Env) -> None:
        draws = [env.rng(name).random() for name in ("a", "b", "a")]
        assert draws[0] == draws[2] != draws[1]
        assert draws[0] == type(env)(7, Trace()).rng("a").random()
        assert draws[0] != type(env)(8, Trace()).rng("a").random()

    both_clocks(main)


def test_the_failure_of_a_spawned_task_ends_the_run() -> None:
    async def main(env: Env) -> None:
        ended = []

        async def fail() -> None:
            await env.sleep(MS)
            raise ValueError("a bug")

        async def work() -> None:
            env.spawn(fail(), "role")
            try:
                await env.sleep(60 * SECOND)
            finally:
                ended.append(True)

        with pytest.raises(ValueError, match="a bug"):
            await env.run_or_fail(work())
        assert ended == [True]

    both_clocks(main)


def test_run_or_fail_passes_on_success_failure_and_cancellation() -> None:
    async def main(env: Env) -> None:
        async def succeed() -> None:
            await env.sleep(MS)

        async def fail() -> None:
            raise KeyError("k")

        ended = []

        async def wait() -> None:
            try:
                await env.sleep(60 * SECOND)
            finally:
                ended.append(True)

        await env.run_or_fail(succeed())
        with pytest.raises(KeyError):
            await env.run_or_fail(fail())
        outer = asyncio.create_task(env.run_or_fail(wait()))
        await env.sleep(MS)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert ended == [True], "the work must not go on without its owner"

    both_clocks(main)


def test_a_virtual_env_needs_the_virtual_loop() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError, match="SimLoop"):
            VirtualEnv(7, Trace())

    asyncio.run(main())
