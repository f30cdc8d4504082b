"""What must not be left when all is over: of requests, of transfers, of timers and of tasks.

The monitor judges pages by events. This looks into the roles themselves, once everything has had
time to settle: nobody remembers a request, no stream carries one, no clock is set for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pddrt.deployment import Deployment
from pddrt.roles.gateway import Gateway
from pddrt.roles.instance import Instance
from pddrt.roles.receive import Receiver
from pddrt.roles.send import Sender
from pddrt.roles.solo import Solo
from pddrt.simloop import SimLoop

LASTING = ("reads", "serves", "watches", "steps")
"""What tasks do, by the second word of their names, for as long as a node or a stream is there."""


def left_behind(deployment: Deployment) -> list[str]:
    """Everything that should be gone, for people; called on the deployment's own loop, at rest."""
    found = [*_of_gateway(deployment.gateway), *_of_loop(deployment)]
    if calls := deployment.client._calls:
        found.append(f"client: calls {list(calls)}")
    for instance in deployment.instances:
        found += _of_instance(instance)
    return found


def _of_gateway(gateway: Gateway) -> Iterator[str]:
    retries, door = gateway.retries, gateway.door
    kept: dict[str, Any] = {
        "streams": gateway._streams,
        "attempts": gateway._attempts,
        "pauses": retries._pauses,
        "waiting for a further attempt": retries._waiting,
        "unproven": retries._unproven,
        "inside": door.tokens,
        "waiting for a first token": door.waiting,
        "spared": gateway.sparing._cases,
        "crossing": gateway.outlook._crossing,
    }
    for what, named in kept.items():
        if named:
            yield f"gateway: {what} {list(named)}"
    for name, capacity in gateway.instances.items():
        if capacity.requests or capacity.unseen:
            yield f"gateway: {name} is thought to have {capacity.requests}, {capacity.unseen}"


def _of_instance(instance: Instance) -> Iterator[str]:
    kept: dict[str, Any] = {
        "pages": instance.memory.holders,
        "sequences": instance.sched.sequences,
        "waiting for memory": [w.request for w in instance.admission._queue],
        "wanted": instance._wanted,
        "preempted": instance._preempted,
        "lessons": instance._lessons,
    }
    if isinstance(instance, Solo):
        kept["alone"] = instance._alone
    if isinstance(instance, Sender | Receiver):
        kept["entries"] = instance._entries
    if isinstance(instance, Sender):
        lanes = instance._lanes.values()
        kept["places on a path"] = [t.dst for lane in lanes for t in lane._inside]
        kept["waiting for a place"] = [t.dst for lane in lanes for t in lane._waiting]
    for what, named in kept.items():
        if named:
            yield f"{instance.name}: {what} {list(named)}"


def _of_loop(deployment: Deployment) -> Iterator[str]:
    """Who looks for a peer that is down for good may do so for ever."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    seeking = sum(len(node._redials) for node in (deployment.gateway, *deployment.instances))
    timers = [handle for _, _, handle in loop._timers if not handle.cancelled()]
    if len(timers) > seeking:
        yield f"timers {[str(handle._callback) for handle in timers]}, {seeking} of them redials"
    here = asyncio.current_task()
    for task in loop._tasks.values():
        words = task.get_name().split()
        if task is here or task.done() or (len(words) > 1 and words[1] in (*LASTING, "redials")):
            continue
        yield f"task {task.get_name()}"
