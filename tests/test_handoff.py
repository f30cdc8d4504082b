"""Every handoff mode in whole clusters: whatever befalls it, the answer is one, and everything is
given back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine import model
from pddrt.engine.model import ModelEngine
from pddrt.metrics import RequestRecord
from pddrt.netem.simnet import SimNet
from pddrt.policy.handoff import (
    CatchUp,
    OneShot,
    Overlap,
    Policy,
    name_of,
)
from pddrt.protocol import MainSide
from pddrt.roles.decode import Decoder
from pddrt.roles.receive import Decoding
from pddrt.stalls import could_enter
from pddrt.types import MS, SECOND, US, Drawn, Ns, Sampling, Span
from pddrt.workload import Session, Turn

from .cluster import VOCAB, Cluster, Played, many, one, oracle
from .seamlab import steady

TEXT = "p" * 200


def paced(handoff: Policy, main_step: Ns = 6 * MS, **changes: Any) -> Cluster:
    """The relay makes an id in 10 ms; some 38 are made before MD is ready."""
    return Cluster(
        handoff=handoff,
        rate=600_000,
        relay_cost=lambda _: 10 * MS,
        main_cost=steady(main_step, 100 * US),
        **changes,
    )


def handed_over(handoff: Policy, max_tokens: int = 160) -> Played:
    played = paced(handoff).play([one(TEXT, max_tokens)])
    played.assert_sound()
    return played


# -- one request in every mode ---------------------------------------------------------------------

MODE = [OneShot(), CatchUp(6, 8, 9), Overlap(6, 8, 9)]


@pytest.mark.parametrize("handoff", MODE, ids=name_of)
def test_every_mode_gives_the_oracles_answer(handoff: Policy) -> None:
    (r,) = handed_over(handoff).records
    assert (r.ids, r.finish_reason) == (oracle(r.prompt_ids, 160), "length")
    assert re.fullmatch("PR+M+", r.sources)
    assert r.seam.mode == name_of(handoff)


def test_a_round_that_stalls_is_ended_after_a_second_and_the_answer_goes_on() -> None:
    """An outage of the WAN swallows the answer to a piece for two seconds."""

    async def outage(deployment: Deployment) -> None:
        assert isinstance(deployment.net, SimNet)
        rounds: list[ev.Event] = []
        await deployment.env.sleep(300 * MS)  # it is under way
        deployment.env.trace.listen(
            lambda e: rounds.append(e) if isinstance(e, ev.HandoffSent) else None
        )
        while not rounds and deployment.gateway._streams:
            await deployment.env.sleep(MS)
        deployment.net.set_rate("wan", 0)
        await deployment.env.sleep(2 * SECOND)
        deployment.net.set_rate("wan", 600_000)

    played = paced(CatchUp(2, 4, 50)).play([one(TEXT, 500)], outage)
    played.assert_sound()
    (r,) = played.records
    assert r.ids == oracle(r.prompt_ids, 500)
    assert r.seam.ended == "no answer"
    first, *_, last = (e for e in played.events(ev.HandoffSent))
    assert SECOND <= last.t - first.t <= SECOND + 20 * MS


# -- ends in any phase -----------------------------------------------------------------------------


def phases(patch: pytest.MonkeyPatch, name: str) -> set[tuple[str, str]]:
    """Which decoder's side was in what state when Decoder.`name` was called for its request."""
    seen: set[tuple[str, str]] = set()
    original = getattr(Decoder, name)

    def watched(decoder: Decoder, request: Any, *rest: Any) -> Any:
        entry = decoder._entries.get(request) if isinstance(request, str) else request
        if entry is not None:
            seen.add((decoder.letter, entry.side.state.name))
        return original(decoder, request, *rest)

    patch.setattr(Decoder, name, watched)
    return seen


RELAY = {("R", "DECODING"), ("R", "ROUND"), ("R", "FREEZING"), ("R", "FOLLOWED")}
MAIN = {("M", "READY"), ("M", "EXTENDING"), ("M", "FOLLOWING"), ("M", "DECODING")}


@cache
def answer() -> RequestRecord:
    (r,) = Cluster().play([one(TEXT, 160)]).records
    return r


@pytest.mark.parametrize("handoff", MODE, ids=name_of)
@pytest.mark.parametrize("end", ["stop id", "budget"])
def test_an_answer_may_end_at_any_position_whoever_is_about_to_make_it(
    end: str, handoff: Policy
) -> None:
    sources = set()
    for at in range(34, 76):
        wanted = answer().ids[:at]
        sampling, max_tokens = Sampling(), at
        if end == "stop id":
            if wanted[-1] in wanted[:-1]:
                continue
            sampling, max_tokens = Sampling(stop_ids=(wanted[-1],)), 160
        played = paced(handoff, sampling=sampling).play([one(TEXT, max_tokens)])
        played.assert_sound()
        (r,) = played.records
        assert (r.ids, r.finish_reason) == (wanted, "length" if end == "budget" else "stop")
        sources.add(r.sources[-1])
    assert sources == {"R", "M"}


@pytest.mark.parametrize(("letter", "state"), sorted(RELAY | MAIN))
def test_a_cancel_may_come_in_any_phase(letter: str, state: str) -> None:
    handoff = {"ROUND": MODE[1], "EXTENDING": MODE[1], "FOLLOWED": MODE[2], "FOLLOWING": MODE[2]}
    ended = False

    async def befall(deployment: Deployment) -> None:
        """As soon as it is in that state, to a millisecond; what ends then is in it."""
        nonlocal ended
        (decoder,) = (i for i in deployment.instances if i.letter == letter)
        assert isinstance(decoder, Decoder)
        while True:
            entry = decoder._entries.get("s0.0")
            if entry is not None and entry.side.state.name == state:
                break
            await deployment.env.sleep(MS)
        deployment.client.post("gateway", "cancel", request="s0.0")
        original = decoder._end

        def end(entry: Decoding) -> None:
            nonlocal ended
            ended |= entry.side.state.name == state
            original(entry)

        decoder._end = end  # type: ignore[method-assign]

    for gateway_site in "ab":
        cluster = paced(handoff.get(state, MODE[0]), gateway_site=gateway_site)
        played = cluster.play([one(TEXT, 160)], befall)
        played.assert_sound()
        (r,) = played.records
        assert r.finish_reason == "aborted"
        assert r.ids == answer().ids[: len(r.ids)]
    assert ended


def test_a_stop_string_may_end_the_answer_in_any_mode_whoever_made_it() -> None:
    """Only the gateway knows: both decoders are in the middle of something."""
    text, ended = answer().text, set()
    for handoff in MODE:
        for at in range(30, len(text) - 20, 3):
            stop = text[at - 3 : at]
            played = paced(handoff, sampling=Sampling(stop=(stop,))).play([one(TEXT, 160)])
            played.assert_sound()
            (r,) = played.records
            assert (r.text, r.finish_reason) == (text[: text.index(stop)], "stop")
            ended.add((name_of(handoff), r.sources[-1]))
    assert ended == {(name_of(handoff), letter) for handoff in MODE for letter in "RM"}


# -- memory that runs out, and ids that differ -----------------------------------------------------


class Wavering(ModelEngine):
    """Its ids differ now and then from the relay's, as near ties do where rounding differs."""

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        made = await super().step(spans)
        both = zip(made, spans, strict=True)
        return [drawn and Drawn(wavered(drawn.token, span.end)) for drawn, span in both]


def wavered(token: int, position: int) -> int:
    return (token + 1) % VOCAB if (token + position) % 5 == 0 else token


def consistent(r: RequestRecord) -> bool:
    """Every id is what its maker draws behind all that were passed on before it."""
    truth = model.oracle(r.prompt_ids, r.ids, r.sampling, vocab=VOCAB)
    drawn = enumerate(zip(truth, r.sources, strict=True), len(r.prompt_ids))
    return r.ids == [wavered(token, at) if by == "M" else token for at, (token, by) in drawn]


@pytest.mark.parametrize("handoff", MODE, ids=name_of)
def test_where_the_makers_differ_the_answer_is_one_chain(handoff: Policy) -> None:
    went_back = 0
    for gateway_site in "ab":
        cluster = paced(handoff, main_engine=Wavering, gateway_site=gateway_site)
        played = cluster.play(many(3, 200, 160, every=20 * MS))
        played.assert_sound()
        for r in played.records:
            assert r.finish_reason == "length"
            assert re.fullmatch("PR+M+", r.sources)
            assert consistent(r)
            went_back += r.seam.went_back
    assert (went_back > 0) == (handoff == MODE[2]), "it has something to go back from"


def crowded(seed: int, handoff: Policy, engine: type[ModelEngine]) -> Played:
    """Five answers where memory is for about two, on both decoders."""
    rng = random.Random(seed)
    page_tokens = rng.choice([1, 7, 16])
    cluster = paced(
        handoff,
        rng.choice([6 * MS, 9 * MS]),
        page_tokens=page_tokens,
        pages=rng.choice([400, 480, 560]) // page_tokens,
        piece=rng.choice([None, 1, 8]),
        eos_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 1]))),
        max_batch=rng.choice([2, 16]),
        gateway_site=rng.choice("aab"),
        main_engine=engine,
        seed=seed,
    )
    turns = [(rng.randint(40, 120), rng.randint(60, 200)) for _ in range(5)]
    return cluster.play(
        [
            Session(i, i * rng.choice([0, 30 * MS]), (Turn(f"{i}" * length, tokens),))
            for i, (length, tokens) in enumerate(turns)
        ]
    )


@pytest.mark.parametrize("engine", [ModelEngine, Wavering])
def test_whoever_loses_its_memory_in_whatever_phase_comes_back(
    engine: type[ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = phases(monkeypatch, "preempt")
    modes = set()
    for seed in range(21):
        played = crowded(seed, MODE[seed % len(MODE)], engine)
        played.assert_sound()
        for r in played.records:
            assert r.finish_reason in ("length", "stop"), (seed, r.detail)
            assert re.fullmatch("P?R*M*", r.sources)
            if engine is ModelEngine:
                assert r.ids == oracle(r.prompt_ids, len(r.ids)), (seed, r.id)
            else:
                assert consistent(r), (seed, r.id)
            modes.add(r.seam.mode)
    assert modes == {"one-shot", "catch-up", "overlap"}
    assert seen >= {("R", "DECODING"), ("R", "ROUND"), ("R", "FOLLOWED")} | MAIN, seen


def test_what_was_rebuilt_from_the_cache_is_rebuilt_again_where_it_is_not_the_answers() -> None:
    """Pages that hold ids which are given up are the cache's then, and must not be written."""
    rebuilt: set[tuple[int, str]] = set()

    async def shove(deployment: Deployment) -> None:
        """Takes MD's memory away whenever it has gone ahead of what it was told."""
        (md,) = (i for i in deployment.instances if isinstance(i, Decoder) and i.letter == "M")
        while deployment.env.now() < 3 * SECOND:
            await deployment.env.sleep(MS)
            for entry in list(md._entries.values()):
                side, seq = entry.side, md.sched.sequences.get(entry.request)
                told = len(side.told) if isinstance(side, MainSide) else 0
                if told and seq and not seq.in_step and len(side.ids) > told:
                    md.preempt(entry.request)
                    md.wake()

    for seed in range(3):
        cluster = paced(
            Overlap(1, 32, 9),
            main_engine=Wavering,
            page_tokens=1,
            pages=2000,
            max_batch=1,
            delay=20 * MS,
        )
        played = cluster.play(many(2, 100, 120, every=seed * 10 * MS), shove)
        played.assert_sound()
        assert all(consistent(r) for r in played.records)
        back = [e for e in played.events(ev.HandoffTaken) if isinstance(e, ev.HandoffTaken)]
        lost = [e for e in played.events(ev.Preempted) if isinstance(e, ev.Preempted)]
        rebuilt |= {(e.t, e.request) for e in back if e.back} & {(e.t, e.request) for e in lost}
    assert rebuilt


def test_who_waits_for_memory_and_then_wants_less_is_let_in() -> None:
    """MD gives up an id of its own while it lacks memory for just one."""
    lacked: dict[str, Ns] = {}

    async def shove(deployment: Deployment) -> None:
        """Takes MD's memory away when it has gone ahead of what it was told, and all but one page
        of what it would need for that.
        """
        (md,) = (i for i in deployment.instances if isinstance(i, Decoder) and i.letter == "M")
        env = deployment.env
        while env.now() < 3 * SECOND:
            await env.sleep(MS)
            assert could_enter(md) is None
            for entry in list(md._entries.values()):
                side, seq = entry.side, md.sched.sequences.get(entry.request)
                told = len(side.told) if isinstance(side, MainSide) else 0
                if told and seq and not seq.in_step and len(side.ids) > told:
                    md.preempt(entry.request)
                    spare = md.memory.num_pages - md.memory.used
                    stranger = f"stranger {env.now()}"
                    md.occupy(stranger, spare - len(seq.ids) + 1)
                    env.call_at(env.now() + 80 * MS, md.vacate, stranger)
                    lacked.setdefault(entry.request, env.now())

    cluster = paced(
        Overlap(1, 32, 9),
        main_engine=Wavering,
        page_tokens=1,
        pages=2000,
        max_batch=1,
        delay=20 * MS,
    )
    played = cluster.play(many(2, 100, 120), shove)
    played.assert_sound()
    let_in = {(e.t, e.request) for e in played.events(ev.Admitted) if isinstance(e, ev.Admitted)}
    back = [e for e in played.events(ev.HandoffTaken) if isinstance(e, ev.HandoffTaken) and e.back]
    assert any((e.t, e.request) in let_in and e.t > lacked.get(e.request, e.t) for e in back)
