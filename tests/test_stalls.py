"""Work that is ready and is not done: planted stalls are found by name, and waits that have a
reason are no stalls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.invariants import Violation
from pddrt.policy.handoff import CatchUp
from pddrt.policy.route import Naive, Pdd
from pddrt.roles.instance import Instance
from pddrt.sched import Admission, Batch, Scheduler
from pddrt.stalls import PATIENCE
from pddrt.types import MS, SECOND
from pddrt.workload import Session, Turn

from .cluster import Cluster, many
from .test_faults import of, suffers

Patch = pytest.MonkeyPatch
NAME = "work is ready and nothing steps"


def planned_by_nobody(patch: Patch) -> None:
    """Where three have work, the scheduler finds none."""
    plan = Scheduler.plan

    def planted(sched: Scheduler) -> Batch | None:
        ready = [s for s in sched.sequences.values() if s.active and s.pending]
        return plan(sched) if len(ready) < 3 else None

    patch.setattr(Scheduler, "plan", planted)


def wake_up_lost(patch: Patch) -> None:
    """Whoever is handed over to is not stepped before something else is."""
    wake = Instance.wake
    patch.setattr(Instance, "wake", lambda i: None if i.spec.role == "main" else wake(i))


def freed_for_nobody(patch: Patch) -> None:
    """Pages are free again, and those that wait for some are not let in."""
    admit = Admission.admit
    patch.setattr(Admission, "admit", lambda a: admit(a) if len(a._queue) < 2 else [])


def forgotten_when_it_gave_way(patch: Patch) -> None:
    """A request that was preempted is in the queue, and its turn never comes."""
    admit = Admission.admit

    def planted(self: Admission) -> list[str]:
        return [] if any(w.overtaken < 0 for w in self._queue) else admit(self)

    add = Admission.add

    def marked(self: Admission, request: str, *, first: bool = False) -> None:
        add(self, request, first=first)
        if first:
            self._queue[0].overtaken = -1

    patch.setattr(Admission, "admit", planted)
    patch.setattr(Admission, "add", marked)


CROWDED: dict[str, Any] = {"policy": Naive(), "pages_of": {"md0": 30}, "deadline": 20 * SECOND}


@pytest.mark.parametrize(
    ("plant", "fields", "waits_for"),
    [
        (planned_by_nobody, {"policy": Pdd(0)}, "a step"),
        (wake_up_lost, {"policy": Pdd(0)}, "a step"),
        (freed_for_nobody, CROWDED, "memory"),
        (forgotten_when_it_gave_way, CROWDED, "memory"),
    ],
)
def test_a_planted_stall_is_found_by_name(
    plant: Callable[[Patch], None], fields: dict[str, Any], waits_for: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    cluster = Cluster(**{"deadline": 20 * SECOND, **fields})
    with pytest.raises(Violation) as found:
        cluster.play(many(8, 150, 120))
    assert found.value.name == NAME
    shown = found.value.events[-1]
    assert isinstance(shown, ev.Stalled)
    assert shown.waits_for == waits_for
    assert PATIENCE <= shown.t - shown.since_ns < SECOND


@pytest.mark.parametrize(
    "fault",
    [
        "do: pages-taken, instance: md0, share: 1, at: 300 ms, for: 1 s",
        "do: pause, instance: rld0, at: 340 ms, for: 1 s",
        "do: slow, instance: md0, factor: 300, at: 300 ms, for: 2 s",
        "do: crash, instance: md0, memory: kept, at: 350 ms, for: 1 s",
        "do: link-down, link: wan, at: 330 ms, for: 1 s",
        "do: out-of-memory, instance: md0, on: {event: StepBegan, instance: md0}, steps: 3",
    ],
)
def test_who_waits_with_a_reason_does_not_stall(fault: str) -> None:
    cluster = Cluster(policy=Pdd(0), pages_of={"md0": 40}, handoff=CatchUp(2, 4, 9))
    played = suffers(f"- {{{fault}}}", cluster, many(6, 200, 120, every=60 * MS))
    assert of(played, ev.FaultInjected)
    assert not of(played, ev.Stalled)


def test_memory_that_runs_out_is_no_stall() -> None:
    """Whoever lacks it waits, gives way and comes back; nobody could have done more."""
    cluster = Cluster(policy=Naive(), pages=200, pages_of={"md0": 30}, deadline=60 * SECOND)
    played = cluster.play(many(10, 150, 150, every=5 * MS))
    played.assert_sound()
    assert of(played, ev.Preempted)
    let_in = [e.t for e in of(played, ev.Admitted, instance="md0")]
    assert let_in[-1] - let_in[0] > SECOND, "some waited long"
    assert not of(played, ev.Stalled)


def test_copies_that_are_given_back_let_in_who_waits_for_pages() -> None:
    """Two compute the same beginning side by side; when the second sees that it is cached, its own
    copies are free, in the middle of its life.
    """
    system = "You are a terse assistant. " * 4
    sessions = [
        Session(i, i * 3 * MS, (Turn(f"question {i}" * 3, 10, 0),), system=system)
        for i in range(12)
    ]
    played = Cluster(pages=64, policy=Naive()).play(sessions)
    played.assert_sound()
    let_in = {e.t for e in of(played, ev.Admitted, instance="p0")}
    copies = {e.t for e in of(played, ev.PagesFreed, instance="p0", over=False)}
    assert let_in & copies
