"""Looks whether any instance has work that it could do, and does nothing.

An observer of a deployment, and no part of it (as `drift`): it sees what is ready, not what the
scheduler makes of it, so that a step that is never planned, and a wake-up that gets lost, show. It
says so in the trace (`Stalled`), and the monitor makes that a violation.

An instance may be idle with work at hand where it is held (a pause, a slow reader), where it runs
no more, and where the work lacks memory. Here work counts as ready only where memory for all of it
is free, or cached and read by nobody; what would have to be taken from others is their business. A
stall is the same work, ready at two looks, and no step begun between them; or the same request, at
two looks first in the queue for memory that is there.

It looks `PATIENCE` after an event, and again as long as there is anything it wonders about: at the
sequences of instances without a running step, and at who is first in each queue for memory. That is
a handful at a time, and no timer at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pddrt.env import Env, Timer
from pddrt.roles.instance import Instance
from pddrt.trace import (
    Event,
    InstanceCrashed,
    InstanceStarted,
    Stalled,
    Step,
    StepBegan,
    StepFailed,
)
from pddrt.types import MS, SECOND, Ns

PATIENCE: Ns = 10 * MS + 1
"""Under the virtual clock, where what is ready is stepped in the same instant. Not a round time: a
look shall not be among what is due together, and shuffled."""
WALL_PATIENCE: Ns = 5 * SECOND
"""On a machine that is busy with other things, too."""

Waits = Literal["a step", "memory"]


class StallObserver:
    def __init__(self, env: Env, instances: Callable[[], Sequence[Instance]]) -> None:
        """`instances`: those there are at that moment."""
        self._env = env
        self._instances = instances
        self._patience = PATIENCE if env.virtual else WALL_PATIENCE
        self._timer: Timer | None = None
        self._stepping: set[str] = set()
        self._seen: dict[tuple[str, Waits], tuple[str, Ns]] = {}
        """By instance, the request that waits for nothing that is not there, and since when that
        has been seen.
        """

    def __call__(self, event: Event) -> None:
        match event:
            case StepBegan(instance=name):
                self._stepping.add(name)
                self._seen.pop((name, "a step"), None)
            case Step(instance=name) | StepFailed(instance=name):
                self._stepping.discard(name)
            case InstanceStarted(instance=name) | InstanceCrashed(instance=name):
                self._stepping.discard(name)
                self._seen.pop((name, "a step"), None)
                self._seen.pop((name, "memory"), None)
        if self._timer is None:
            self._look_later()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._env.call_at(self._env.now() + self._patience, self._look)

    def _look(self) -> None:
        self._timer, now = None, self._env.now()
        for instance in self._instances():
            held = instance.hold is not None or not instance.running
            idle = not held and instance.name not in self._stepping
            self._wonder(now, instance.name, "a step", could_step(instance) if idle else None)
            self._wonder(now, instance.name, "memory", None if held else could_enter(instance))
        if self._seen and self._timer is None:
            self._look_later()

    def _wonder(self, now: Ns, name: str, waits: Waits, request: str | None) -> None:
        key = name, waits
        if request is None:
            self._seen.pop(key, None)
            return
        seen, since = self._seen.setdefault(key, (request, now))
        if seen != request:
            self._seen[key] = request, now
        elif since < now:
            del self._seen[key]
            self._env.trace.emit(Stalled(now, request, waits, name, since))


def could_step(instance: Instance) -> str | None:
    """A request of which something is to be computed, with memory for all of that."""
    for s in instance.sched.sequences.values():
        if s.active and s.pending > 0 and not s.in_step:
            has = len(instance.memory.holding(s.request).table)
            if instance.memory.pool.pages_for(len(s.ids)) - has <= _spare(instance):
                return s.request
    return None


def could_enter(instance: Instance) -> str | None:
    """The request whose turn it is to get memory, where that is there."""
    first = instance.admission.first
    if first is None:
        return None
    wanted = instance.memory.pool.pages_for(instance.wanted_tokens(first))
    return first if wanted <= _spare(instance) else None


def _spare(instance: Instance) -> int:
    """Pages that are free, or cached and read by nobody."""
    return instance.memory.num_pages - instance.memory.used
