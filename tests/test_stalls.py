"""Work that is ready and is not done: planted stalls are found by name, and waits that have a
reason are no stalls.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.invariants import Violation
from pddrt.kv.memory import KVMemory
from pddrt.policy.handoff import CatchUp
from pddrt.policy.route import Alone, Naive, Pdd
from pddrt.roles.instance import Instance
from pddrt.sched import Admission, Batch, Scheduler
from pddrt.stalls import PATIENCE, could_enter
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


def test_what_gives_way_in_the_middle_of_a_step_lets_in_whoever_fits() -> None:
    """Its pages are there for all that wait, though no request has ended and others are stepped."""
    shoved: list[int] = []

    async def shove(deployment: Deployment) -> None:
        (md,) = (i for i in deployment.instances if i.name == "md0")
        while deployment.env.now() < 3 * SECOND:
            await deployment.env.sleep(7 * MS)
            idle = [s for s in md.sched.sequences.values() if not s.in_step]
            if idle and len(md.sched.sequences) > len(idle) and len(md.admission):
                md.preempt(idle[0].request)
                shoved.append(deployment.env.now())
                await deployment.env.sleep(1)
                assert could_enter(md) is None

    cluster = Cluster(policy=Naive(), pages_of={"md0": 40}, max_batch=1, deadline=60 * SECOND)
    played = cluster.play(many(8, 150, 60), shove)
    played.assert_sound()
    assert {e.t for e in of(played, ev.Admitted, instance="md0")} & set(shoved)


def test_what_gives_way_with_more_than_is_wanted_leaves_the_rest_to_others() -> None:
    """Who grows takes one page of the two; the next in the queue has the other, at once."""
    cluster = Cluster(
        policy=Alone("prefill"), pages_of={"p0": 9}, max_batch=1, deadline=60 * SECOND
    )
    played = cluster.play(many(6, 32, 60))
    played.assert_sound()
    gave_way = {e.t for e in of(played, ev.Preempted, instance="p0")}
    assert gave_way & {e.t for e in of(played, ev.Admitted, instance="p0")}


def test_a_lesson_gives_way_between_two_of_its_steps() -> None:
    """To a request that came while one was running; not only when all of it is learnt."""

    async def learn(deployment: Deployment) -> None:
        (p,) = (i for i in deployment.instances if i.name == "p0")
        p.learn("old", list(range(200)), 0)

    played = Cluster(pages_of={"p0": 15}, chunk_tokens=8).play(many(1, 150, 5), learn)
    played.assert_sound()
    (let_in,) = (e.t for e in of(played, ev.Admitted, instance="p0"))
    first = of(played, ev.Step, instance="p0")[0]
    assert first.start_ns < let_in == first.t
    assert not of(played, ev.Learnt, request="old")


def test_whatever_makes_room_is_told_and_nothing_else() -> None:
    """By the memory itself, whichever call it was: no caller has to know."""
    rng, told, made_room = Random(1), list[str](), set[str]()
    memory = KVMemory(24, 4, "", roomier=lambda: told.append("roomier"))
    ids_of: dict[str, list[int]] = {}
    over: set[str] = set()
    for number in range(4000):
        call = rng.choice(["reserve", "copied", "keep", "pin", "unpin", "release", "grow"])
        holders, used = memory.holders, memory.used
        request = rng.choice(holders) if holders else ""
        told.clear()
        if call == "reserve":
            ids = [rng.randrange(3)] * rng.randrange(1, 20)  # many begin alike
            if memory.reserve(f"r{number}", ids, len(ids) + 1):
                ids_of[f"r{number}"] = ids
        elif not request:
            continue
        elif call == "unpin" and memory.pool.pinned(request):
            memory.unpin(request)
        elif request in over:  # and lives on with its pin only
            continue
        elif call == "copied" and memory.tail(request):
            memory.copied(request)
        elif call == "keep" and not memory.tail(request):
            memory.keep(request, ids_of[request][: memory.whole(len(ids_of[request]))])
        elif call == "pin":
            memory.pin(request)
        elif call == "release":
            over.add(request)
            memory.release(request)
        elif call == "grow":
            memory.grow(request, len(ids_of[request]) + rng.randrange(9))
        assert bool(told) == (memory.used < used), call
        if told:
            made_room.add(call)
    assert made_room == {"copied", "keep", "unpin", "release"}
    memory.check()
