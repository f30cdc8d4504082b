"""Alarms on absolute deadlines of the monotonic clock, as fine as the kernel's own timers.

An event loop's timers are coarse: uvloop counts in whole milliseconds of a clock that it reads once
a turn, asyncio's epoll waits in whole milliseconds too. A timerfd is a file that becomes readable
at a given nanosecond of CLOCK_MONOTONIC; the loop watches it like any socket. One such file serves
all alarms of a clock: it is always set to the earliest of them, and whatever is due when the loop
gets to it runs at once, in the order of the deadlines.

Linux only: `open_timer` returns None elsewhere, and the caller falls back on the loop's timers.
`attentive` makes the calling thread wake as promptly as this process is allowed to ask for.

Owns: the timerfd, the queue of alarms. Leaves out: what time it is (the caller's clock says).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from pddrt.types import SECOND, Ns

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
TURN = 0.0005
"""Seconds after which a thread that runs Python lets another one in. With the usual 5 ms a loop
that shares its interpreter with an engine is late by as much, whatever its priority."""
_ITIMERSPEC = struct.Struct("@qqqq")  # interval (none), then the deadline: seconds, ns of each


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timerfd_create") else None


class Timerfd:
    """A file that becomes readable at a deadline. Closed when nobody refers to this any more."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        """Raises OSError where the kernel gives none."""
        self.fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._settime = libc.timerfd_settime
        self._spec = ctypes.create_string_buffer(_ITIMERSPEC.size)
        self._close = weakref.finalize(self, os.close, self.fd)

    def set(self, when: Ns) -> None:
        """Readable from `when` on, by the monotonic clock; at once if that is past."""
        seconds, ns = divmod(max(when, 1), SECOND)  # all zero would disarm it
        _ITIMERSPEC.pack_into(self._spec, 0, 0, 0, seconds, ns)
        if self._settime(self.fd, _TFD_TIMER_ABSTIME, self._spec, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """Not readable any more, until the next deadline."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        self._close()


def open_timer() -> Timerfd | None:
    """None where this system has no timerfd."""
    libc = _libc()
    try:
        return None if libc is None else Timerfd(libc)
    except OSError:
        return None


class Alarm:
    """One call to come. Cancelling one that has run does nothing."""

    __slots__ = ("_alarms", "args", "callback")

    def __init__(self, alarms: Alarms, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._alarms = alarms
        self.callback: Callable[..., Any] | None = callback
        self.args = args

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback, self.args = None, ()
            self._alarms.cancelled()


class Alarms:
    """All alarms of one clock on one loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timer: Timerfd, clock: Callable[[], Ns]
    ) -> None:
        """`clock` reads CLOCK_MONOTONIC. The loop refers to this until it is closed."""
        self._loop = loop
        self._timer = timer
        self._clock = clock
        self._heap: list[tuple[Ns, int, Alarm]] = []
        self._numbers = itertools.count()
        self._set_to: Ns | None = None
        self._void = 0  # cancelled, and still in the heap
        self._watched = False

    def at(self, when: Ns, callback: Callable[..., Any], args: tuple[Any, ...]) -> Alarm:
        """Calls `callback(*args)` at `when` by the clock, never before."""
        alarm = Alarm(self, callback, args)
        heapq.heappush(self._heap, (when, next(self._numbers), alarm))
        if self._set_to is None or when < self._set_to:
            if not self._watched:
                self._loop.add_reader(self._timer.fd, self._ring)
                self._watched = True
            self._set(when)
        return alarm

    def cancelled(self) -> None:
        """Deadlines that are hardly ever reached must not pile up until they are."""
        self._void += 1
        if self._void > 64 and 2 * self._void > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._void = 0

    def _set(self, when: Ns) -> None:
        self._timer.set(when)
        self._set_to = when

    def _ring(self) -> None:
        self._timer.clear()
        self._set_to = None
        limit = self._clock()
        while self._heap and self._heap[0][0] <= limit:  # `cancelled` may exchange the heap
            _, _, alarm = heapq.heappop(self._heap)
            if alarm.callback is None:
                self._void -= 1
                continue
            callback, args = alarm.callback, alarm.args
            alarm.callback, alarm.args = None, ()
            try:
                callback(*args)
            except Exception as error:
                what = {"message": f"alarm {callback!r} failed", "exception": error}
                self._loop.call_exception_handler(what)
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self._void -= 1
        self._set_to_head()

    def _set_to_head(self) -> None:
        """A call that was made may have set it already."""
        if self._heap and (self._set_to is None or self._heap[0][0] < self._set_to):
            self._set(self._heap[0][0])


@contextlib.contextmanager
def attentive(realtime: bool = True) -> Iterator[str]:
    """Inside, this thread wakes as promptly as the process may ask for: timer slack of 1 ns, the
    interpreter's lock after TURN at most, and real-time priority where that is allowed. Says which:
    `real-time` or `normal`.

    Threads and processes that are started inside do not inherit the priority, so that a thread that
    computes never holds up the loop; and the kernel leaves others a twentieth of each second even
    if the loop never rests. All settings are as before afterwards.
    """
    libc, got, before = _libc(), "normal", None
    turn = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    slack = -1 if libc is None else libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    if libc is not None:
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        if realtime:
            with contextlib.suppress(OSError):
                policy = os.sched_getscheduler(0), os.sched_getparam(0)
                fifo = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
                os.sched_setscheduler(0, fifo, os.sched_param(1))
                got, before = "real-time", policy
    try:
        yield got
    finally:
        sys.setswitchinterval(turn)
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, *before)
        if libc is not None and slack > 0:
            libc.prctl(_PR_SET_TIMERSLACK, slack, 0, 0, 0)
