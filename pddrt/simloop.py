"""SimLoop: an asyncio event loop whose time jumps to the next deadline.

Runs the same coroutines as a real loop, alone in one thread, with no I/O. Two properties are the
reason it exists:

- **Deterministic.** Ready callbacks run first in, first out; timers with equal deadlines run in the
  order they were set; tasks hash by creation number, so that sets of tasks iterate alike in every
  process.
- **Exact.** Time is an integer of nanoseconds and is set to the head timer's own deadline: nothing
  is added up.

When nothing is ready and no timer is left while the main task still waits, nobody can ever wake it:
the loop raises `Deadlock` and names the tasks and what each waits for. Sockets, executors, signals
and subprocesses raise NotImplementedError: under the virtual clock there is no outside.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple

from pddrt.errors import RunFailed
from pddrt.types import SECOND, Ns

_Ts = TypeVarTuple("_Ts")

MANY = 100
"""Cancelled timers that may wait until they are due."""


class Deadlock(RunFailed):
    """No task can run and no timer is pending, but the run is not over."""


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its creation number on its loop, not its address."""

    def __init__(self, coro: Any, *, loop: SimLoop, **kwargs: Any) -> None:
        self._number = next(loop.task_numbers)
        kwargs.setdefault("name", None)
        if kwargs["name"] is None:
            kwargs["name"] = f"task-{self._number}"
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimTimer(asyncio.TimerHandle):
    """A timer that knows whether it is still in its loop's heap."""

    __slots__ = ("waits",)
    waits: bool


class SimLoop(asyncio.AbstractEventLoop):
    """A virtual-time loop. `shuffle` (a seed) permutes callbacks that are due at the same
    instant."""

    def __init__(self, shuffle: int | None = None) -> None:
        self._now: Ns = 0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[Ns, int, SimTimer]] = []
        self._cancelled = 0
        """Timers among them that will not fire."""
        self._numbers = itertools.count()
        self.task_numbers = itertools.count()
        self._shuffle = None if shuffle is None else random.Random(shuffle)
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._running = False
        self._stopping = False
        self._closed = False
        self._failure: BaseException | None = None
        self._exception_handler: Callable[[Any, dict[str, Any]], Any] | None = None

    # -- time -------------------------------------------------------------------------------------

    def time_ns(self) -> Ns:
        return self._now

    def time(self) -> float:
        return self._now / SECOND

    # -- scheduling -------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there is only one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at_ns(
        self,
        when: Ns,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run `callback` when the clock stands at `when` (at once, in order, if that is past)."""
        handle = SimTimer(when / SECOND, callback, args, self, context)
        heapq.heappush(self._timers, (max(when, self._now), next(self._numbers), handle))
        handle.waits = True
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_ns(self._now + round(delay * SECOND), callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_ns(round(when * SECOND), callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: SimTimer) -> None:
        """Cancelled timers are dropped when they reach the head of the heap, or are most of it:
        of deadlines nearly all are cancelled, long before they are due.
        """
        self._cancelled += handle.waits

    # -- futures and tasks ------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        kwargs.pop("eager_start", None)
        task = SimTask(coro, loop=self, **kwargs)
        number = hash(task)
        self._tasks[number] = task
        task.add_done_callback(lambda _t: self._tasks.pop(number, None) and None)
        return task

    # -- running ----------------------------------------------------------------------------------

    def run_until_complete(self, future: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:  # type: ignore[override]
        main = asyncio.ensure_future(future, loop=self)
        self._run(until=main)
        return main.result()

    def run_forever(self) -> None:
        self._run(until=None)

    def _run(self, until: asyncio.Future[Any] | None) -> None:
        assert not self._running
        assert not self._closed
        events._set_running_loop(self)
        self._running, self._stopping = True, False
        try:
            while not self._stopping and not (until is not None and until.done()):
                if not self._ready and not self._jump():
                    if until is None:
                        return
                    raise Deadlock(self._deadlock_report())
                self._run_ready()
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
        finally:
            self._running = False
            events._set_running_loop(None)

    def _run_ready(self) -> None:
        """Runs what is ready now; what it makes ready runs in the next round."""
        batch = [h for h in self._ready if not h.cancelled()]
        self._ready.clear()
        if self._shuffle is not None:
            self._shuffle.shuffle(batch)
        for position, handle in enumerate(batch):
            if not handle.cancelled():
                try:
                    handle._run()
                except BaseException:
                    self._ready.extendleft(reversed(batch[position + 1 :]))
                    raise

    def _jump(self) -> bool:
        """Moves the clock to the next deadline and makes its timers ready; False when there is
        none."""
        timers = self._timers
        if self._cancelled > max(MANY, len(timers) // 2):
            timers[:] = [timer for timer in timers if not timer[2].cancelled()]
            heapq.heapify(timers)
            self._cancelled = 0
        while timers and timers[0][2].cancelled():
            self._pop()
        if not timers:
            return False
        self._now = timers[0][0]
        while timers and timers[0][0] == self._now:
            handle = self._pop()
            if not handle.cancelled():
                self._ready.append(handle)
        return True

    def _pop(self) -> SimTimer:
        handle = heapq.heappop(self._timers)[2]
        handle.waits = False
        self._cancelled -= handle.cancelled()
        return handle

    def _deadlock_report(self) -> str:
        lines = [f"deadlock at {self._now / SECOND:.9f} s: nothing can run and no timer is set"]
        for number in sorted(self._tasks):
            task = self._tasks[number]
            if not task.done():
                lines.append(f"  {task.get_name()} waits at {_where(task)}")
        return "\n".join(lines)

    # -- the rest of the loop interface -----------------------------------------------------------

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        assert not self._running
        self._ready.clear()
        self._timers.clear()
        self._closed = True

    async def shutdown_asyncgens(self) -> None:
        """Async generators are closed by those who open them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is no executor."""

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Debug mode would time callbacks by the wall clock; it is ignored."""

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> Callable[[Any, dict[str, Any]], Any] | None:
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or RunFailed(str(context.get("message")))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception nobody awaits ends the run: a simulation has no log to be lost in."""
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)


def _where(task: asyncio.Task[Any]) -> str:
    """File and line of the innermost coroutine that `task` is suspended in."""
    coro: Any = task.get_coro()
    while (inner := getattr(coro, "cr_await", None)) is not None and hasattr(inner, "cr_frame"):
        coro = inner
    frame = getattr(coro, "cr_frame", None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"
