"""What an instance says of its load: when it has changed, and no oftener than it was asked to.

A watcher (the gateway) says how old what it knows may be. The first change after a report starts a
clock of that age; when it rings, the load as it then is goes out. Where nothing changes nothing is
sent. So a change is known one age and one delay after it happened, and never later.

A report names the requests that have come since the one before it: whoever sent them there can tell
what the report does not know of yet, and add it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from pddrt.env import Env, Timer
from pddrt.types import Ns


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance has to do.

    `tokens`: that a new request would share its steps with: of prompts still to be computed or
    waiting for memory, and of KV that is decoded on. `pages`: that could not be had now. `waiting`
    and `holding`: requests that wait for memory, and that have it. `step_ns`: of a step of decodes.
    """

    tokens: int = 0
    pages: int = 0
    waiting: int = 0
    holding: int = 0
    step_ns: Ns = 0


@dataclass(slots=True)
class _Watcher:
    age: Ns
    arrived: list[str] = field(default_factory=list)
    said: Load | None = None
    clock: Timer | None = None


class Reports:
    def __init__(self, env: Env, read: Callable[[], Load], post: Callable[..., None]) -> None:
        """`read` gives the load of now; `post(peer, kind, **fields)` sends it."""
        self._env = env
        self._read = read
        self._post = post
        self._watchers: dict[str, _Watcher] = {}

    def watch(self, peer: str, age: Ns) -> None:
        """From now on `peer` is told."""
        self.forget(peer)
        self._watchers[peer] = _Watcher(age)
        self.changed()

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        watcher = self._watchers.pop(peer, None)
        if watcher is not None and watcher.clock is not None:
            watcher.clock.cancel()

    def arrived(self, request: str) -> None:
        for watcher in self._watchers.values():
            watcher.arrived.append(request)
        self.changed()

    def changed(self) -> None:
        """The load may be another one than it was."""
        for peer, watcher in self._watchers.items():
            if watcher.clock is None:
                due = self._env.now() + watcher.age
                watcher.clock = self._env.call_at(due, self._report, peer, watcher)

    def _report(self, peer: str, watcher: _Watcher) -> None:
        watcher.clock = None
        load = self._read()
        if load != watcher.said or watcher.arrived:
            watcher.said, arrived = load, watcher.arrived
            watcher.arrived = []
            self._post(peer, "load", **asdict(load), arrived=arrived)

    def close(self) -> None:
        for peer in list(self._watchers):
            self.forget(peer)
