"""A run that passes before one's eyes as fast as one wants to see it.

Virtual time costs nothing: a run of an hour may be over in seconds. `Pacer` holds it between two of
its events. It is also what a recorded run is played with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pddrt.env import Stopwatch
from pddrt.trace import Event
from pddrt.types import SECOND, Ns


class Pacer:
    """Makes a run under the virtual clock wait, so that one can watch it: `pace` seconds of its
    time pass in one of ours, as many as can where that is None. Register it as a listener; those
    after it hear an event when that is due.

    The run cannot notice: no virtual time passes meanwhile. `interrupted`: whether the run has been
    asked to end; then it waits no more.
    """

    PACES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
    LOOK_S = 0.05
    """So often a wait looks whether something has changed."""

    def __init__(
        self,
        pace: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        start: Ns = 0,
    ) -> None:
        """`start`: the time of the run when it begins to be paced."""
        self.pace = pace
        self._interrupted = interrupted
        self._paused = False
        self._watch = Stopwatch()
        self._changed = threading.Event()
        self._anchor: tuple[Ns, Ns, float] | None = None
        """Since when (our time, the run's) it has gone at which pace."""
        self._due: Ns = start
        """The time of the event that waits, or waited last."""

    @property
    def now(self) -> Ns:
        """The run's time; while an event waits, on the way to it."""
        anchor = self._anchor
        return self._due if anchor is None else min(self._due, self._reached(anchor))

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._change(self.pace)

    def faster(self) -> None:
        """To the next pace; after the fastest, as fast as can be."""
        pace = self.pace
        self._change(
            None if pace is None else min((p for p in self.PACES if p > pace), default=None)
        )

    def slower(self) -> None:
        pace = self.pace
        slower = [p for p in self.PACES if pace is None or p < pace]
        self._change(max(slower, default=pace))

    def let_go(self) -> None:
        """Nobody is there any more who could end a pause."""
        self._paused = False
        self._change(None)

    def __call__(self, event: Event) -> None:
        if self._paused or self.pace is not None:
            self._wait(event.t)
        self._due = event.t

    def _wait(self, t: Ns) -> None:
        while not self._interrupted():
            self._changed.clear()
            left, pace = self.LOOK_S, self.pace
            if not self._paused:
                if pace is None:
                    return
                anchor = self._anchor
                if anchor is None:
                    anchor = self._anchor = (self._watch.elapsed(), self._due, pace)
                self._due = max(self._due, t)
                left = (t - self._reached(anchor)) / pace / SECOND
                if left <= 0:
                    return
            self._changed.wait(min(left, self.LOOK_S))

    def _change(self, pace: float | None) -> None:
        """From now on, from where it is."""
        self._due, self._anchor = self.now, None
        self.pace = pace
        self._changed.set()

    def _reached(self, anchor: tuple[Ns, Ns, float]) -> Ns:
        ours, of_run, pace = anchor
        return of_run + round((self._watch.elapsed() - ours) * pace)
