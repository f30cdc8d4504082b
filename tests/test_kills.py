"""Any one instance of each role killed behind any event of a run: for good, for a moment, and with
its memory kept.

Every request has its answer, id by id, or one error within its deadline; with another instance of
the victim's role, its answer. Nothing is left of anything.

`python -m tests.test_kills [STRIDE] [OFFSET] [MODE...]` kills behind every so manieth event of runs
of 50 requests and says what became of them. Such a run is played once for each configuration: where
somebody is to be killed it forks, and the child plays on without the victim.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Change, Deployment
from pddrt.policy.handoff import Adaptive, CatchUp, OneShot, Overlap
from pddrt.policy.handoff import Policy as Handoff
from pddrt.policy.route import Facts, Naive, NoRoute, Pdd, Policy, RelayOnly, Route
from pddrt.roles.instance import Instance
from pddrt.types import MS, SECOND, US, Ns, Span
from pddrt.workload import Session, Turn

from . import answers
from .answers import check_answers
from .cluster import Cluster, Played, cost

MODES: dict[str, Handoff] = {
    "one-shot": OneShot(),
    "catch-up": CatchUp(threshold=2, max_ids_per_round=4, max_rounds=9),
    "adaptive": Adaptive(threshold=4, max_ids_per_round=6),
    "overlap": Overlap(threshold=2, max_ids_per_round=16),
}
DEADLINE = 5 * SECOND
FIRST = ("p0", "rld0", "md0")
AFTER = {
    "for good": None,
    "back": (False, 100 * MS),
    "back with its memory": (True, 100 * MS),
    "back at once": (False, 0),
}
"""What becomes of a victim: it stays down, or is back after so long, with its memory or without."""


@dataclass(frozen=True)
class Mixed:
    """Most requests are relayed; some go to their main decoder at once, some end on their relay."""

    def route(self, facts: Facts) -> Route:
        turn: list[Policy] = [Pdd(0)] * 5 + [Naive()] * 2 + [RelayOnly(0)]
        try:
            return turn[facts.prompt_tokens % len(turn)].route(facts)
        except NoRoute:
            return Pdd(0).route(facts)


def quick(spans: list[Span]) -> Ns:
    """A main decoder that steps faster than a relay: only then does overlap let it pass."""
    return cost(spans) // 3 + 10 * US


@dataclass(frozen=True)
class Case:
    """A deployment with so many instances of each role, and what is asked of it."""

    mode: str
    of_each: int
    requests: int = 50
    changes: tuple[Change, ...] = ()

    def sessions(self) -> list[Session]:
        """Several at a time; the last third are second turns, behind an answer that is cached."""
        first = self.requests - self.requests // 3
        return [
            Session(
                i,
                i * 35 * MS,
                tuple(
                    Turn(f"{i:03d}" + "x" * (40 + i * 37 % 150), 12 + (i + turn) * 23 % 90, 30 * MS)
                    for turn in range(1 + (i < self.requests - first))
                ),
            )
            for i in range(first)
        ]

    def cluster(self) -> Cluster:
        n = self.of_each
        return Cluster(
            n,
            n,
            n,
            policy=Mixed(),
            handoff=MODES[self.mode],
            deadline=DEADLINE,
            pages=400 // n,
            rate=6_000_000,
            changes=self.changes,
            main_cost=quick if self.mode == "overlap" else cost,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Kill:
    victim: str
    after: str


Oracle = Callable[[Sequence[int], int], list[int]]
When = Callable[[int, ev.Event], Kill | None]
"""Who is killed behind the n-th event, if anybody is."""


def play(case: Case, when: When) -> Played:
    """The run, with at most one killed. Checked: what must hold, every answer against the oracle,
    every end within the deadline, and that nothing is left.
    """

    async def watch(deployment: Deployment) -> None:
        count, struck = 0, False

        def hear(event: ev.Event) -> None:
            nonlocal count, struck
            count += 1
            if not struck and (kill := when(count, event)) is not None:
                struck = True
                asyncio.get_running_loop().call_soon(strike, kill)

        def strike(kill: Kill) -> None:
            after = AFTER[kill.after]
            victim = next((i for i in deployment.instances if i.name == kill.victim), None)
            if victim is None or not victim.running:
                return  # it has left
            deployment.crash(kill.victim, keep=after is not None and after[0])
            if after is not None:
                deployment.env.spawn(back(victim, *after), "back")

        async def back(victim: Instance, kept: bool, wait: Ns) -> None:
            await deployment.env.sleep(wait)
            if victim in deployment.instances:  # it may have been scaled away meanwhile
                await deployment.restart(victim.name, kept=kept)

        deployment.env.trace.listen(hear)

    sessions = case.sessions()
    played = case.cluster().play(sessions, during=watch)
    played.assert_sound()
    assert played.left == []
    check_answers(played.records, sessions, frozenset())
    for r in played.records:
        assert r.finished is not None
        assert r.finished - r.sent <= DEADLINE + 50 * MS
        alone = case.of_each == 1 or case.changes  # the victim may have been the last of its role
        assert r.finish_reason == "length" or (alone and r.detail), (r.id, r.detail)
    return played


def killed(case: Case, victim: str, at: int, after: str = "for good") -> Played:
    """The run with `victim` killed right behind its event number `at`."""
    return play(case, lambda count, _: Kill(victim, after) if count == at else None)


@cache
def length_of(case: Case) -> int:
    """Events up to the last answer."""
    played = play(case, lambda *_: None)
    return max(i for i, e in enumerate(played.trace.events) if isinstance(e, ev.Finished))


def everything(played: Played) -> Counter[str]:
    """What became of a run with a kill."""
    sums = Counter[str]({"kills": 1})
    sums.update(r.finish_reason or "" for r in played.records)
    sums.update(e.then for e in played.events(ev.Rerouted))  # type: ignore[attr-defined]
    sums["again"] += len(played.events(ev.Retried))
    return sums


# -- all of it -------------------------------------------------------------------------------------


def everywhere(case: Case, stride: int, offset: int) -> tuple[int, Counter[str], list[str]]:
    """Kills each role's first instance behind every `stride`-th event, the ways in turn. Events,
    what became of it, and failures.
    """
    sums, failures, kills = Counter[str](), [], 0
    last = length_of(case)

    def when(count: int, event: ev.Event) -> Kill | None:
        nonlocal kills
        if count % stride != offset % stride or count > last:
            return None
        for victim in FIRST:
            kill = Kill(victim, list(AFTER)[kills % len(AFTER)])
            kills += 1
            loop, (read, write) = asyncio.get_running_loop(), os.pipe()
            if not (child := os.fork()):
                asyncio.events._set_running_loop(loop)  # it was another process's
                os.close(read)
                tell[:] = [write, count, kill]
                return kill
            os.close(write)
            with os.fdopen(read) as told:
                became = json.loads(told.read() or '"it died"')
            os.waitpid(child, 0)
            if isinstance(became, str):
                failures.append(f"{case} {kill} behind {count}: {became}")
            else:
                sums.update(became)
        return None

    tell: list[Any] = []
    became: Any
    try:
        became = everything(play(case, when))
    except BaseException:
        became = traceback.format_exc()
        if not tell:
            raise
    if tell:
        with os.fdopen(tell[0], "w") as out:
            json.dump(became, out)
        os._exit(0)
    return last, sums, failures


def _remembering(oracle: Oracle) -> Oracle:
    """The same prompts are asked in every run."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
        key = (tuple(prompt), max_tokens)
        if key not in known:
            known[key] = oracle(prompt, max_tokens)
        return known[key]

    return answer


def main(stride: int = 100, offset: int = 0, *modes: str) -> int:
    """Each configuration begins elsewhere, so that together they hit more kinds of moments."""
    answers.oracle = _remembering(answers.oracle)
    gc.disable()  # each child ends soon, and pages that nobody touches are shared with it
    wrong = 0
    cases = [Case(mode, n) for mode in modes or MODES for n in (1, 2)]
    for number, case in enumerate(cases):
        events, sums, failures = everywhere(case, stride, offset + number * stride // len(cases))
        print(case.mode, case.of_each, events, "events", json.dumps(sums), flush=True)
        print(*failures, sep="\n", flush=True)
        wrong += len(failures)
    return min(wrong, 1)


# -- a sample of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of_each", [1, 2])
def test_the_runs_have_in_them_what_is_to_be_broken_off(mode: str, of_each: int) -> None:
    """Handoffs of the mode, main decoders that begin, relays that end, cached turns."""
    case = Case(mode, of_each, requests=24)
    played = play(case, lambda *_: None)
    makers = Counter("".join(dict.fromkeys(r.sources)) for r in played.records)
    assert min(makers["PRM"], makers["PM"], makers["PR"]) >= 2, makers
    rounds = [e for e in played.events(ev.HandoffSent) if not e.last]  # type: ignore[attr-defined]
    assert bool(rounds) == (mode != "one-shot")
    follows = [e for e in rounds if e.follows]  # type: ignore[attr-defined]
    assert bool(follows) == (mode == "overlap")
    assert any(r.hits.get("p0") for r in played.records if r.turn)


@pytest.mark.parametrize("victim", FIRST)
@pytest.mark.parametrize("of_each", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_whoever_is_killed_every_request_has_its_answer_or_its_error(
    mode: str, of_each: int, victim: str
) -> None:
    """With another one of its role: its answer. Each case at another event, in another way."""
    case = Case(mode, of_each, requests=10)
    number = FIRST.index(victim) + 3 * (of_each - 1) + 6 * list(MODES).index(mode)
    at = length_of(case) * (1 + number * 7 % 24) // 25
    killed(case, victim, at, list(AFTER)[number % len(AFTER)])


def test_a_run_in_which_somebody_is_killed_is_the_same_for_the_same_seed() -> None:
    case = Case("catch-up", 2, requests=10)
    first, second = (killed(case, "md0", 500, "back").trace.digest for _ in range(2))
    assert first == second


VICTIMS = ("p1", "rld1", "md1", "p0", "rld0", "md0")
LEAVES: Ns = 180 * MS
"""After the workload has begun."""
EVENTS = (0, 1, 2, 4, 7, 12, 20, 33)
"""Behind so many events of a join, or of the way out."""


def _when(
    victim: str,
    joins: bool,
    behind: int,
    kill: Kill,
    begin: list[int],
    workload: list[Ns],
    count: int,
    event: ev.Event,
) -> Kill | None:
    """`begin` is where it joins, or is to leave."""
    if isinstance(event, ev.RequestSent):
        workload.append(event.t)
    if joins:
        begins = isinstance(event, ev.InstanceStarted) and event.instance == victim
    else:
        begins = bool(workload) and event.t >= workload[0] + LEAVES
    if begins:
        begin.append(count)
    return kill if begin and count == begin[0] + behind else None


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("after", AFTER)
def test_who_is_killed_while_it_joins_or_leaves_holds_nothing_up(victim: str, after: str) -> None:
    """One joins, then one of its role leaves. Each case at other events of the join, or the way
    out; the run ends, and whoever is there at the end serves.
    """
    stem, joins = victim[:-1], victim.endswith("1")
    changes = (Change(50 * MS, f"{stem}1", joins=True), Change(LEAVES, f"{stem}0", joins=False))
    case = Case("catch-up", 2, requests=9, changes=changes)
    number = list(AFTER).index(after) + 3 * VICTIMS.index(victim)
    for behind in (EVENTS[number % 4], EVENTS[4 + number % 4]):
        begin: list[int] = []
        workload: list[Ns] = []
        when = partial(_when, victim, joins, behind, Kill(victim, after), begin, workload)
        played = play(case, when)
        crashed = [e for e in played.trace.events if isinstance(e, ev.InstanceCrashed)]
        assert joins <= len(crashed) <= 1
        names = [i.name for i in played.deployment.instances]
        assert (f"{stem}0" in names, f"{stem}1" in names) == (False, True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    sys.exit(main(*numbers, *(word for word in sys.argv[1:] if not word.isdigit())))
