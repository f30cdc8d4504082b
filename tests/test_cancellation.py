"""Cancel, disconnect and deadline, in every phase of a request, by pipeline and way to hand over.

Each row of the matrix is a phase that can be seen from outside (`Row.phase`). The victim is played
once to find the middle of that phase, and once for each way to end it there; that it really was
there is asserted where the gateway hears of it. Afterwards nothing is left on any node, and whoever
is behind the victim, of another client, begins as if it had never been: not later than in a run
without it, or than the word of its end takes to come there, plus what was under way and cannot be
taken back (`Row.grace`).

`python -m tests.test_cancellation` prints the matrix, with how long whoever was behind had to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.policy.handoff import Adaptive, CatchUp, OneShot, Overlap
from pddrt.policy.handoff import Policy as Handoff
from pddrt.policy.route import Alone, Naive, Pdd, RelayOnly
from pddrt.protocol import State
from pddrt.roles.attempts import Recovery
from pddrt.roles.client import Client
from pddrt.types import MS, SECOND, US, Ns, Sampling, Span
from pddrt.workload import Session, Turn

from .cluster import Cluster, Played, cost
from .test_faults import of, plan

VICTIM, BEHIND = "s0.0", "s1.0"
WAYS = {
    "cancel": "cancelled by the client",
    "disconnect": "lost the gateway",
    "deadline": "deadline exceeded",
}
PIPELINES: dict[str, dict[str, Any]] = {
    "P-RLD-MD": {"policy": Pdd(0, relay_full="wait")},
    "P-MD": {"policy": Naive()},
    "local": {"policy": Naive(), "main_site": "a", "fabric": 2_000_000},
    "P-RLD": {"policy": RelayOnly(0, relay_full="wait")},
    "MD": {"policy": Alone("main")},
}
LOOK: Ns = 400 * US
WORD = 256
"""Bytes of a control frame, at most."""
ONE_SHOT = OneShot()
Phase = Callable[[Deployment], bool]


def quick(spans: Sequence[Span]) -> Ns:
    """So that a main decoder gains on a relay."""
    return cost(spans) // 3


def tardy(spans: Sequence[Span]) -> Ns:
    """So that there is time while a step runs."""
    return 10 * cost(spans)


# -- phases ----------------------------------------------------------------------------------------


def entry(d: Deployment, name: str) -> Any:
    """The victim on an instance; None where it is not there."""
    instance: Any = d.instance(name)
    return instance._entries.get(VICTIM) or instance._alone.get(VICTIM)


def state(name: str, *wanted: State, **fields: Any) -> Phase:
    """A decoder's half of the protocol is in one of these states."""

    def phase(d: Deployment) -> bool:
        found = entry(d, name)
        return found is not None and found.side.state in wanted

    return phase


def crossing(name: str) -> Phase:
    """The path to it is what its KV waits for, and the client has no answer yet."""

    def phase(d: Deployment) -> bool:
        found = entry(d, "p0")
        if found is None or found.answered:
            return False
        return any(t.dst == name and t.since is not None and t.sent > 0 for t in found.transfers)

    return phase


def waiting(name: str) -> Phase:
    """It is in the queue for memory."""
    return lambda d: VICTIM in d.instance(name)._wanted


def computed(name: str, least: int, most: int | None = None) -> Phase:
    """So many positions have KV there; `most` None: all of the prompt but one, at most."""

    def phase(d: Deployment) -> bool:
        seq = d.instance(name).sched.sequences.get(VICTIM)
        if seq is None:
            return False
        end = seq.prompt_len - 1 if most is None else most
        return least <= seq.computed <= end

    return phase


def decoding(name: str) -> Phase:
    def phase(d: Deployment) -> bool:
        seq = d.instance(name).sched.sequences.get(VICTIM)
        return seq is not None and seq.active and len(seq.ids) > seq.prompt_len + 1

    return phase


def both(*phases: Phase) -> Phase:
    return lambda d: all(phase(d) for phase in phases)


def on_its_way_to_p(d: Deployment) -> bool:
    """The gateway has sent it, and nobody has got it."""
    nowhere = all(entry(d, instance.name) is None for instance in d.instances)
    return VICTIM in d.gateway._attempts and nowhere and not d.gateway._streams[VICTIM].answer.made


def pausing(d: Deployment) -> bool:
    """It waits for its next attempt."""
    stream = d.gateway._streams.get(VICTIM)
    return stream is not None and stream.attempt is None


def ids_on_their_way(d: Deployment) -> bool:
    """The relay has handed over and let go; the main decoder has not got the last ids."""
    main = entry(d, "md0")
    over = entry(d, "rld0") is None and VICTIM in d.gateway._attempts
    return over and main is not None and main.side.state in (State.READY, State.EXTENDING)


def answered(d: Deployment) -> bool:
    """The client has it all, and KV still crosses for the main decoder's cache."""
    prefill = entry(d, "p0")
    return prefill is not None and prefill.answered and VICTIM not in d.gateway._streams


# -- the matrix ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """`begins`: what shows that who is behind has got what the victim had, on `where`. `filler`:
    tokens of prompt and answer of a request that was there before both.
    """

    name: str
    pipelines: tuple[str, ...]
    phase: Phase
    where: str
    begins: type[ev.Event]
    fields: dict[str, Any] = field(default_factory=dict)
    handoff: Handoff = ONE_SHOT
    filler: tuple[int, int] | None = None
    prompt: int = 280
    tokens: int = 90
    ways: tuple[str, ...] = tuple(WAYS)
    blocks: bool = True
    """Left alone, the victim makes who is behind wait."""

    def cluster(self, pipeline: str) -> Cluster:
        fields: dict[str, Any] = {"max_transfers": 1, **PIPELINES[pipeline], **self.fields}
        return Cluster(handoff=self.handoff, **fields)

    def grace(self, end: Ended, cluster: Cluster) -> Ns:
        """What cannot be taken back: a step that runs there, a prompt that has left or begun to,
        and the first KV of whoever is behind, which takes its time.
        """
        steps = [e.t - e.start_ns for e in of(end.played, ev.Step, instance=self.where)]
        first, size = end.begins(self), 4 * self.prompt + 1024
        source = "gateway" if self.where == "p0" else "p0"
        if isinstance(first, ev.KVReceived):
            size += first.bytes
        elif not self.filler and self.phase is not on_its_way_to_p:
            return max(steps)
        link = cluster.topology().link_between(source, self.where)
        assert link is not None
        assert link.rate is not None
        return max(steps, default=0) + size * SECOND // link.rate + link.delay


DECODERS = ("P-RLD-MD", "P-RLD")
WITH_P = ("P-RLD-MD", "P-MD", "local", "P-RLD")
TO_MAIN = ("P-RLD-MD", "P-MD", "local")
ONE_AT_P = {"pages_of": {"p0": 24}}
ONE_AT_RLD = {"pages_of": {"rld0": 24}}
ONE_AT_MD = {"pages_of": {"md0": 24}}
"""Room for the victim, or for the filler, and not for who is behind."""
ROUNDS = {"threshold": 2, "max_ids_per_round": 4, "max_rounds": 20}
RAPID = {"main_cost": quick, **ONE_AT_RLD}

ROWS = [
    Row(
        "its prompt is on its way from the gateway",
        ("P-RLD-MD", "P-MD", "P-RLD"),
        on_its_way_to_p,
        "p0",
        ev.Admitted,
        {"gateway_site": "b", "rate": 20_000},
    ),
    Row(
        "it pauses before a further attempt",
        WITH_P,
        pausing,
        "p0",
        ev.PrefillStarted,
        {
            "recovery": Recovery(3, 400 * MS),
            "plan": plan(
                "- {do: step-fails, instance: p0, on: {event: StepBegan, instance: p0, nth: 1}}"
            ),
        },
        blocks=False,
    ),
    Row(
        "it waits for memory on P",
        ("P-MD", "local", "P-RLD-MD"),
        waiting("p0"),
        "p0",
        ev.Admitted,
        ONE_AT_P,
        filler=(280, 10),
    ),
    Row(
        "it waits for its turn to be prefilled",
        WITH_P,
        computed("p0", 0, 0),
        "p0",
        ev.PrefillStarted,
        filler=(320, 10),
    ),
    Row("it is prefilled", WITH_P, computed("p0", 1), "p0", ev.PrefillStarted),
    Row(
        "its KV crosses to RLD",
        DECODERS,
        crossing("rld0"),
        "rld0",
        ev.KVReceived,
        {"fabric": 400_000, "stream_while_computing": False},
    ),
    Row(
        "its KV crosses to MD",
        TO_MAIN,
        crossing("md0"),
        "md0",
        ev.KVReceived,
        {"stream_while_computing": False},
    ),
    Row("RLD decodes", DECODERS, decoding("rld0"), "rld0", ev.Admitted, ONE_AT_RLD),
    Row(
        "RLD stops, and a step still runs",
        ("P-RLD-MD",),
        state("rld0", State.FREEZING),
        "rld0",
        ev.Admitted,
        {"relay_cost": tardy, **ONE_AT_RLD},
    ),
    Row(
        "one-shot: the ids are on their way",
        ("P-RLD-MD",),
        ids_on_their_way,
        "md0",
        ev.Admitted,
        ONE_AT_MD,
    ),
    Row(
        "catch-up: a round",
        ("P-RLD-MD",),
        state("rld0", State.ROUND),
        "rld0",
        ev.Admitted,
        ONE_AT_RLD,
        CatchUp(**ROUNDS),
    ),
    Row(
        "adaptive: a round",
        ("P-RLD-MD",),
        state("rld0", State.ROUND),
        "rld0",
        ev.Admitted,
        {"pages_of": {"rld0": 48}},  # a relay that is full does not begin a round
        Adaptive(**ROUNDS),
        blocks=False,
    ),
    Row(
        "overlap: both decode",
        ("P-RLD-MD",),
        both(state("rld0", State.FOLLOWED), state("md0", State.FOLLOWING)),
        "rld0",
        ev.Admitted,
        RAPID,
        Overlap(threshold=2, max_ids_per_round=32),
    ),
    Row(
        "it waits for memory on MD",
        TO_MAIN,
        waiting("md0"),
        "md0",
        ev.Admitted,
        ONE_AT_MD,
        filler=(280, 90),
    ),
    Row("MD decodes", (*TO_MAIN, "MD"), decoding("md0"), "md0", ev.Admitted, ONE_AT_MD),
    Row(
        "MD waits for memory, alone",
        ("MD",),
        waiting("md0"),
        "md0",
        ev.Admitted,
        ONE_AT_MD,
        filler=(280, 90),
    ),
    Row("MD prefills", ("MD",), computed("md0", 1), "md0", ev.PrefillStarted),
    Row(
        "it has its answer, and KV still crosses",
        ("P-RLD-MD",),
        answered,
        "md0",
        ev.KVReceived,
        {"rate": 400_000},
        tokens=10,
        ways=("cancel", "disconnect"),
    ),
]
CELLS = [(row, pipeline) for row in ROWS for pipeline in row.pipelines]


# -- playing a cell --------------------------------------------------------------------------------


@dataclass
class Ended:
    """What came of a run. `seen`: when the victim was in the phase, a look every `LOOK`; `heard`:
    when the gateway ended it, and whether it was in the phase then.
    """

    played: Played
    seen: list[Ns]
    heard: list[tuple[Ns, bool]]

    def begins(self, row: Row) -> ev.Event:
        [first, *_] = of(self.played, row.begins, request=BEHIND, instance=row.where)
        return first  # type: ignore[no-any-return]


def play(row: Row, pipeline: str, way: str = "", at: Ns = 0, victim: bool = True) -> Ended:
    """`at`: when the way is gone, or the victim's deadline is; without one, somebody looks."""
    seen: list[Ns] = []
    heard: list[tuple[Ns, bool]] = []

    async def beside(d: Deployment) -> None:
        env, gateway, fail = d.env, d.gateway, d.gateway.fail
        lasting = gateway.deadline

        def hear(event: ev.Event) -> None:
            if way == "deadline" and getattr(event, "request", "") == VICTIM:
                enters = isinstance(event, ev.RequestSent)
                gateway.deadline = at - event.t if enters else lasting

        def act() -> None:
            if VICTIM not in gateway._streams:
                heard.append((env.now(), row.phase(d)))
            if way == "cancel":
                d.client.cancel(VICTIM)
            elif way == "disconnect":
                d.client.peers[gateway.name].abort()

        def failing(request: str, detail: str) -> None:
            if request == VICTIM and request in gateway._streams:
                heard.append((env.now(), row.phase(d)))
            fail(request, detail)

        async def look() -> None:
            there = True
            while there or d.client.under_way or env.now() < SECOND:
                await env.sleep(LOOK)
                if there := row.phase(d):
                    seen.append(env.now())

        gateway.fail = failing  # type: ignore[method-assign]
        env.trace.listen(hear)
        if at:
            env.call_at(at, act)
        if victim and not at:
            env.spawn(look(), "looks")
        other = Client(env, d.net, "stranger", gateway.name, Sampling(), 1000 * SECOND)
        await other.start()
        await other.dial([gateway.name])
        await other.play(others)
        await other.close()

    others = [Session(1, 65 * MS, (Turn("b" * 100, 10, 0),))]
    if row.filler:
        prompt, tokens = row.filler
        others.append(Session(2, 0, (Turn("f" * prompt, tokens, 0),)))
    asked = [Session(0, 60 * MS, (Turn("v" * row.prompt, row.tokens, 0),))] if victim else []
    played = row.cluster(pipeline).play(asked, during=beside)
    played.assert_sound()
    assert played.left == []
    for r in played.records:
        assert r.finish_reason == "length" or r.id == VICTIM, (r.id, r.detail)
    return Ended(played, seen, heard)


@cache
def alone(at: int) -> tuple[Ns, Ended]:
    """When whoever is behind begins without the victim; and a run in which it is left alone."""
    row, pipeline = CELLS[at]
    return play(row, pipeline, victim=False).begins(row).t, play(row, pipeline)


def ended(at: int, way: str) -> tuple[Ended, Ns, Ns]:
    """A cell, one way: what came of it, how long whoever is behind waited, and the bound."""
    (row, pipeline), (without, plain) = CELLS[at], alone(at)
    assert plain.seen, "the phase was never seen"
    middle = plain.seen[len(plain.seen) // 2]
    assert row.blocks == (plain.begins(row).t > max(without, middle))
    end = play(row, pipeline, way, at=middle)
    [(heard, there)] = end.heard[:1]
    assert there, "the phase was over"
    cluster = row.cluster(pipeline)
    link = cluster.topology().link_between("gateway", row.where)
    assert link is not None
    assert link.rate is not None
    told = heard + WORD * SECOND // link.rate + link.delay
    if row.phase is answered:  # that is none of its business any more
        without = max(without, plain.begins(row).t)
    waited = end.begins(row).t - max(without, told)
    return end, waited, row.grace(end, cluster)


EACH = [(at, way) for at, (row, _) in enumerate(CELLS) for way in row.ways]
NAMES = [f"{CELLS[at][1]}, {CELLS[at][0].name}, {way}" for at, way in EACH]


@pytest.mark.parametrize(("at", "way"), EACH, ids=NAMES)
def test_an_end_in_any_phase_leaves_nothing_and_holds_nobody_up(at: int, way: str) -> None:
    row, _ = CELLS[at]
    end, waited, grace = ended(at, way)
    assert waited <= grace, (waited / MS, grace / MS)
    victim = next(r for r in end.played.records if r.id == VICTIM)
    if row.phase is answered:
        assert victim.finish_reason == "length"
    else:
        assert victim.finish_reason == "aborted"
        assert (victim.detail or "").startswith(WAYS[way])
        assert len(end.heard) == 1


if __name__ == "__main__":
    print("| phase | pipeline | " + " | ".join(WAYS) + " | at most |")
    print("|---|---|" + "---|" * (len(WAYS) + 1))
    for number, (row, pipeline) in enumerate(CELLS):
        cells, most = [], 0
        for way in WAYS:
            if way not in row.ways:
                cells.append("")
                continue
            _, waited, grace = ended(number, way)
            cells.append(f"{max(0, waited) / MS:.1f}")
            most = max(most, grace)
        print(f"| {row.name} | {pipeline} | {' | '.join(cells)} | {most / MS:.1f} |")
