"""Looks at what every instance has cached of a request's prompt, when that is known.

An observer of a deployment, and no part of it: roles know nothing of it, it changes nothing (a look
counts as no use), and what it sees goes into the trace (`CacheSampled`, see `foresight`). Only the
composition layer can do this, since it alone holds all roles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pddrt.env import Env
from pddrt.roles.instance import Instance
from pddrt.trace import Accepted, CacheSampled, Event
from pddrt.types import Role


class DriftObserver:
    def __init__(self, env: Env, instances: Callable[[], Sequence[Instance]]) -> None:
        """`instances`: those there are at that moment."""
        self._env = env
        self._instances = instances

    def __call__(self, event: Event) -> None:
        if isinstance(event, Accepted):
            held = {role: self._held(role, event.prompt_ids) for role in _ROLES}
            now, length = self._env.now(), len(event.prompt_ids)
            self._env.trace.emit(CacheSampled(now, event.request, length, *held.values()))

    def _held(self, role: Role, ids: Sequence[int]) -> int:
        """Tokens of `ids` that the best of a role holds, from the first on."""
        of = (i for i in self._instances() if i.spec.role == role)
        return max((instance.memory.peek(ids) for instance in of), default=0)


_ROLES: tuple[Role, ...] = ("prefill", "relay", "main")
