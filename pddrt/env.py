"""Env: the clock seam. The only place that reads the wall clock.

A role sees `now`, `sleep_until`, `call_at`, `rng`, `spawn` and `trace`, and cannot tell which clock
is behind them. `WallEnv` runs on uvloop with `perf_counter_ns`; `VirtualEnv` runs on `SimLoop`.

Wall timers are alarms on absolute deadlines (see `alarm`): never early, and late by as long as the
loop takes to get to them, tens of microseconds where nothing else runs. Where the system has no
such alarms, they are the loop's: uvloop counts in whole milliseconds from a clock of its own, so
that a timer may fire up to 1 ms before it was asked for whenever something else turns the loop.
There it is rounded up and checked when it fires: late by up to 2 ms and never early. What needs
exact pacing keeps absolute deadlines and catches up either way (see netem).
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import fields, replace
from functools import cache
from typing import Any, Protocol, cast

from pddrt.alarm import Alarms, open_timer
from pddrt.simloop import SimLoop
from pddrt.trace import Event, Trace
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
        """Returns at `when` or, on the wall clock, a little later, never before."""
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
    """One call on the wall clock, set again as long as the loop's timer comes early: where there
    are no alarms."""

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
        timer = open_timer()
        self._alarms = None if timer is None else Alarms(self.loop, timer, time.perf_counter_ns)

    def now(self) -> Ns:
        return time.perf_counter_ns() - self._start

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        if self._alarms is None:
            return _WallTimer(self, when, callback, args)
        return self._alarms.at(self._start + when, callback, args)


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


class LocalEnv(Env):
    """Another's env, as one role sees it: with a clock that runs apart from the true one, or with
    events that nobody hears.

    Local time is the true one, and `drift_ppm` millionths of it, and `offset`. Events that are told
    keep the true time: whoever reads them stands outside.
    """

    def __init__(
        self, env: Env, *, offset: Ns = 0, drift_ppm: int = 0, silent: bool = False
    ) -> None:
        assert drift_ppm > -1_000_000, "time would stand still, or run backwards"
        self.virtual = env.virtual
        self.seed = env.seed
        self.failure = env.failure
        self.trace = Trace() if silent else _TrueTimes(self)
        self.true = env
        self._offset = offset
        self._rate = 1_000_000 + drift_ppm

    def now(self) -> Ns:
        return self.local(self.true.now())

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        return self.true.call_at(self.true_time(when), callback, *args)

    def local(self, true: Ns) -> Ns:
        return true * self._rate // 1_000_000 + self._offset

    def true_time(self, local: Ns) -> Ns:
        """The first moment at which it is `local` time here."""
        return -(-(local - self._offset) * 1_000_000 // self._rate)


STAMPS = frozenset({"start_ns", "notice_ns"})
"""Fields of events, beside `t`, that are times by the clock of the role that it speaks of."""


class _TrueTimes(Trace):
    """The run's trace, for a role whose clock is wrong."""

    def __init__(self, env: LocalEnv) -> None:
        super().__init__()
        self._env = env

    def emit(self, event: Event) -> None:
        env, kind = self._env, cast(Any, type(event))
        stamps: Any = {name: env.true_time(getattr(event, name)) for name in _stamps(kind)}
        env.true.trace.emit(replace(event, t=env.true.now(), **stamps))


@cache
def _stamps(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.name in STAMPS)


def wall_stamp() -> str:
    """Date and time of day, for the names of run folders."""
    return time.strftime("%Y%m%d-%H%M%S")


def machine_time() -> Ns:
    """One clock for all processes of this machine; for measuring between them, never for
    decisions."""
    return time.perf_counter_ns()


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
        self.lags = array("q")

    async def run(self) -> None:
        while True:
            due = self._env.now() + self.PERIOD
            await self._env.sleep_until(due)
            self.lags.append(max(0, self._env.now() - due))
