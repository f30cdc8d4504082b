"""Env: the clock seam. The only place that reads the wall clock.

A role sees `now`, `sleep_until`, `call_at`, `rng`, `spawn` and `trace`, and cannot tell which clock
is behind them. `WallEnv` runs on uvloop with `perf_counter_ns`; `VirtualEnv` runs on `SimLoop`.

uvloop timers count from its own clock of whole milliseconds, so that one may fire up to 1 ms before
it was asked for whenever something else turns the loop. A wall timer is therefore rounded up and
checked when it fires: it is late by up to 2 ms and never early. What needs finer pacing keeps
absolute deadlines and catches up (see netem).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from pddrt.simloop import SimLoop
from pddrt.trace import Trace
from pddrt.types import MS, SECOND, Ns


class Timer(Protocol):
    """A pending call. Cancelling one that has run, or was cancelled, does nothing."""

    def cancel(self) -> None: ...


class Env:
    """One run's clock, randomness, tasks and trace. Subclasses say what time it is."""

    virtual: bool

    def __init__(self, seed: int, trace: Trace) -> None:
        self.seed = seed
        self.trace = trace
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now(self) -> Ns:
        raise NotImplementedError

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        """Calls `callback(*args)` at `when`, never before; soon if that is past."""
        raise NotImplementedError

    async def sleep_until(self, when: Ns) -> None:
        """Returns at `when` or, on the wall clock, up to a millisecond later."""
        if when <= self.now():
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        timer = self.call_at(when, _release, done)
        try:
            await done
        finally:
            timer.cancel()

    async def sleep(self, duration: Ns) -> None:
        await self.sleep_until(self.now() + duration)

    def rng(self, name: str) -> random.Random:
        """The random stream called `name`: a function of the run's seed and the name alone."""
        return random.Random(f"{self.seed}/{name}")

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task of a role. Its failure is a bug of ours and ends the run (see
        `run_or_fail`).
        """
        task = asyncio.get_running_loop().create_task(coro, name=name)
        task.add_done_callback(self._watch)
        return task

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the run (see `run_or_fail`), unless it has failed before."""
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # it may come too late for anybody to ask

    async def run_or_fail(self, main: Awaitable[None]) -> None:
        """Awaits `main`, but raises at once if any spawned task fails."""
        task = asyncio.ensure_future(main)
        try:
            await asyncio.wait([task, self.failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():  # a spawned task failed, or we were cancelled ourselves
                task.cancel()
                await asyncio.wait([task])
        if self.failure.done():
            task.cancelled() or task.exception()  # one failure is reported, the first
            self.failure.result()
        task.result()


def _release(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class _WallTimer:
    """One call on the wall clock, set again as long as the loop's timer comes early."""

    __slots__ = ("_args", "_callback", "_env", "_handle", "_when")

    def __init__(self, env: WallEnv, when: Ns, callback: Callable[..., Any], args: Any) -> None:
        self._env = env
        self._when = when
        self._callback = callback
        self._args = args
        self._set()

    def cancel(self) -> None:
        self._handle.cancel()

    def _set(self) -> None:
        wait_ms = max(0, -(-(self._when - self._env.now()) // MS))
        self._handle = self._env.loop.call_later(wait_ms * MS / SECOND, self._fire)

    def _fire(self) -> None:
        if self._env.now() < self._when:
            self._set()
        else:
            self._callback(*self._args)


class WallEnv(Env):
    virtual = False

    def __init__(self, seed: int, trace: Trace) -> None:
        super().__init__(seed, trace)
        self._start = time.perf_counter_ns()
        self.loop = asyncio.get_running_loop()

    def now(self) -> Ns:
        return time.perf_counter_ns() - self._start

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        return _WallTimer(self, when, callback, args)


class VirtualEnv(Env):
    virtual = True

    def __init__(self, seed: int, trace: Trace) -> None:
        super().__init__(seed, trace)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop), "the virtual clock needs a SimLoop"
        self._loop = loop

    def now(self) -> Ns:
        return self._loop.time_ns()

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._loop.call_at_ns(when, callback, *args)


def wall_stamp() -> str:
    """Date and time of day, for the names of run folders."""
    return time.strftime("%Y%m%d-%H%M%S")


class Stopwatch:
    """Real time since it was made, whatever the run's clock; for provenance, never for
    decisions.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()

    def elapsed(self) -> Ns:
        return time.perf_counter_ns() - self._start


class LagMeter:
    """How late the event loop runs what is due: wakes every 10 ms of wall time and keeps the
    lateness.
    """

    PERIOD: Ns = 10 * MS

    def __init__(self, env: WallEnv) -> None:
        self._env = env
        self.lags: list[Ns] = []

    async def run(self) -> None:
        while True:
            due = self._env.now() + self.PERIOD
            await self._env.sleep_until(due)
            self.lags.append(max(0, self._env.now() - due))
