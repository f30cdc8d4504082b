"""A trace that keeps its events, for tests that look back; a run's own trace forgets them."""

from __future__ import annotations

from typing import TextIO

from pddrt.trace import Event, Trace


class KeptTrace(Trace):
    """`events`: all so far."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file)
        self.events: list[Event] = []
        self.listen(self.events.append)
