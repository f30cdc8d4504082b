"""Whole clusters by seed: whatever the sizes, rates, sites and accidents, every answer is the
oracle's or the beginning of it, every request ends once, and everything is given back.

A seed draws the deployment (how many P, RLD and MD, pages and pools from too small to ample,
chunks, batches, links, gateway's site, policy, who releases the first token), the sessions, and
what befalls them: cancels, rates that change under traffic, streams that break, frames from a
stranger. To look into a failure, call `play` with its seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple

import pytest

from pddrt.deployment import Deployment
from pddrt.engine.tokens import ByteTokenizer
from pddrt.frames import Frame, pack_ids
from pddrt.messages import MESSAGES
from pddrt.metrics import RequestRecord
from pddrt.netem.net import Connection
from pddrt.netem.simnet import SimNet
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.handoff import Adaptive, CatchUp, OneShot, Overlap
from pddrt.policy.handoff import Policy as Handoff
from pddrt.policy.route import Alone, Naive, Pdd, Policy, Prfaas, RelayOnly
from pddrt.trace import Resumed
from pddrt.types import MS, SECOND, Sampling
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, VOCAB, Cluster, Played, oracle

Accident = Callable[[Deployment, random.Random], None]

HANDOFFS: list[Handoff] = [
    OneShot(),
    CatchUp(threshold=4, max_ids_per_round=6),
    Adaptive(threshold=8, max_ids_per_round=64, max_rounds=3),
    Overlap(threshold=2, max_ids_per_round=16),
]
LONGEST = 160
ANSWER = 90


def cluster(rng: random.Random, seed: int) -> Cluster:
    page_tokens = rng.choice([1, 7, 16, 64])
    three_turns = 3 * (LONGEST + ANSWER + 1)
    delay = rng.choice([0, 1 * MS, 15 * MS, 60 * MS])
    router = random.Random(f"router of {seed}")
    filters = [Anomaly(0, 10, share=1.0, guess=guess) for guess in ("max_tokens", "session")]
    return Cluster(
        signal_age=router.choice([0, 50 * MS, SECOND]),
        max_transfers=router.choice([1, 2, 8]),
        anomaly=router.choice([None, None, *filters]),
        prefills=rng.choice([1, 1, 2]),
        relays=rng.choice([1, 1, 2]),
        mains=rng.choice([1, 1, 3]),
        page_tokens=page_tokens,
        pages=-(-three_turns // page_tokens) * rng.choice([1, 1, 4]),
        chunk_tokens=rng.choice([8, 32, 512]),
        max_batch=rng.choice([1, 2, 16]),
        fabric=rng.choice([1_000_000_000, 1_000_000]),
        rate=rng.choice([400_000, 1_000_000, 4_000_000, None]),
        delay=delay,
        jitter=delay // rng.choice([3, 1000]),
        policy=rng.choice([Pdd(0), Pdd(20 * MS), Pdd(100 * MS), Naive()]),
        eos_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
        stream_while_computing=rng.random() < 0.7,
        early_first_token=rng.random() < 0.3,
        seed=seed,
        shuffle=rng.choice([None, seed]),
        gateway_site=rng.choice("aab"),
        handoff=HANDOFFS[seed % len(HANDOFFS)],
        piece=rng.choice([None, 1, 8]),
    )


def sessions(rng: random.Random, page_tokens: int) -> list[Session]:
    def turn() -> Turn:
        length = min(rng.choice([page_tokens, rng.randint(1, LONGEST), LONGEST]), LONGEST)
        text = "".join(rng.choice("abcdefg") for _ in range(length))
        return Turn(text, rng.choice([1, rng.randint(1, ANSWER), ANSWER]), rng.choice([0, 50 * MS]))

    every = rng.choice([0, 5 * MS, 40 * MS])
    return [
        Session(i, i * every, tuple(turn() for _ in range(rng.choice([1, 1, 3]))))
        for i in range(rng.choice([1, 4, 9]))
    ]


# -- accidents -------------------------------------------------------------------------------------


def cancel(deployment: Deployment, rng: random.Random) -> None:
    under_way = list(deployment.gateway._streams)
    if under_way:
        deployment.client.post("gateway", "cancel", request=rng.choice(under_way))


def change_rate(deployment: Deployment, rng: random.Random) -> None:
    assert isinstance(deployment.net, SimNet)
    deployment.net.set_rate("wan", rng.choice([0, 50_000, 1_000_000, None]))


def cut(deployment: Deployment, rng: random.Random) -> None:
    node = rng.choice([*deployment.instances, deployment.gateway])
    if node._connections:
        rng.choice(node._connections).abort()


def garbage(rng: random.Random, requests: Sequence[str]) -> Frame:
    """A frame of a known kind whose fields are partly right and partly anything."""
    anything = [None, True, -1, 0, 1 << 40, 1.5, float("nan"), "", "P", b"x", [], [1], {}]
    likely = {
        "request": rng.choice(requests),
        "epoch": rng.randint(1, 6),
        "start": rng.choice([0, rng.randint(0, 200)]),
        "end": rng.randint(0, 200),
        "position": rng.randint(0, 200),
        "sampling": astuple(Sampling()),
        "logprobs": rng.choice([None, [], [[-1.0, [[5, -0.5]]]]]),
        "layout": [LAYOUT.fingerprint, 4, 2, 32, "bfloat16"],
        "relay": rng.choice([None, "rld0"]),
        "main": "md0",
        "last": True,
        "source": "M",
    }
    kind = rng.choice([k for k in MESSAGES if k != "submit"])  # a stranger's ids are its own
    about = {
        name: likely.get(name, rng.choice(["x", 1])) if rng.random() < 0.8 else rng.choice(anything)
        for name in MESSAGES[kind]
        if rng.random() < 0.97
    }
    payload = rng.choice([b"", b"x", pack_ids(range(rng.randint(1, 20))), bytes(1024 * 8)])
    return Frame(kind, about, payload)


async def intrude(deployment: Deployment, rng: random.Random) -> None:
    """A stranger talks to everyone."""
    conns: dict[str, Connection] = {}
    for _ in range(40):
        await deployment.env.sleep(rng.choice([0, 1 * MS, 10 * MS]))
        name = rng.choice([*deployment.instances, deployment.gateway]).name
        if name not in conns or rng.random() < 0.3:  # the last one may have been ended
            conns[name] = await deployment.net.connect("stranger", name)
            purpose = rng.choice(["control", "kv", "nothing"])
            conns[name].post(Frame("open", {"purpose": purpose}))
        conns[name].post(garbage(rng, ["s0.0", "s1.0", *deployment.gateway._streams]))


# -- the swarm -------------------------------------------------------------------------------------


def play(
    seed: int,
    accidents: Sequence[Accident] = (),
    stranger: bool = False,
    policy: Policy | None = None,
) -> Played:
    """One seed to its end, with everything checked that must hold whatever befell it. `policy`: in
    place of the one drawn.
    """
    rng = random.Random(seed)
    deployed = cluster(rng, seed)
    deployed.policy = policy or deployed.policy
    asked = sessions(rng, deployed.page_tokens)

    async def befall(deployment: Deployment) -> None:
        for _ in range(rng.randint(1, 6) if accidents else 0):
            await deployment.env.sleep(rng.randint(0, 80 * MS))
            rng.choice(accidents)(deployment, rng)
        if stranger:
            await intrude(deployment, rng)
        assert isinstance(deployment.net, SimNet)
        deployment.net.set_rate("wan", deployed.rate)

    played = deployed.play(asked, during=befall)
    played.assert_sound()
    gateway = played.deployment.gateway
    assert not gateway._streams
    assert all(not c.requests and not c.unseen for c in gateway.instances.values())
    check_answers(played.records, asked, deployed.eos_ids)
    return played


def check_answers(
    records: Sequence[RequestRecord], asked: Sequence[Session], eos_ids: frozenset[int]
) -> None:
    """P, then R, then M, or all P's, once in each attempt; each answer that of the oracle, or its
    beginning where it was aborted.
    """
    tokenizer = ByteTokenizer()
    conversations: dict[int, list[int]] = {}
    for r in records:
        turn, history = asked[r.session].turns[r.turn], conversations.get(r.session, [])
        if history:
            ended = history[-1] in eos_ids
            ids = history + tokenizer.follow_up(turn.text, after_eos=ended)
        else:
            ids = tokenizer.chat(turn.text)
        conversations[r.session] = ids + r.ids
        wanted = oracle(ids, turn.max_tokens)
        ends = [at for at, token in enumerate(wanted, 1) if token in eos_ids]
        wanted = wanted[: ends[0]] if ends else wanted
        assert re.fullmatch(f"(P+|P?R*M*){{{1 + r.attempt}}}", r.sources)
        if r.finish_reason in ("length", "stop"):
            assert (r.ids, r.finish_reason) == (wanted, "stop" if ends else "length"), r.id
        else:
            assert r.ids == wanted[: len(r.ids)], r.id


@pytest.mark.parametrize("seed", range(30))
def test_without_accidents_every_request_finishes(seed: int) -> None:
    for r in play(seed).records:
        assert r.finish_reason in ("length", "stop"), (r.id, r.detail)


@pytest.mark.parametrize("seed", range(100, 140))
def test_cancels_and_rate_changes_abort_only_what_was_cancelled(seed: int) -> None:
    for r in play(seed, [cancel, cancel, change_rate]).records:
        assert r.finish_reason in ("length", "stop") or r.detail == "cancelled by the client"


@pytest.mark.parametrize("seed", range(200, 220))
def test_streams_that_break_end_requests_and_strand_nothing(seed: int) -> None:
    """F3, F8: what needs the stream ends, by name; it is opened again."""
    for r in play(seed, [cut, cut, cancel]).records:
        assert r.finish_reason in ("length", "stop") or r.detail


@pytest.mark.parametrize("seed", range(300, 320))
def test_a_stranger_spoils_no_answer_and_ends_no_instance(seed: int) -> None:
    for r in play(seed, stranger=True).records:
        assert r.finish_reason in ("length", "stop") or r.detail


POLICIES: list[Policy] = [Alone("prefill"), Alone("main"), Prfaas(60), RelayOnly(20 * MS)]


@pytest.mark.parametrize("seed", range(400, 440))
def test_whatever_the_pipeline_accidents_end_requests_and_strand_nothing(seed: int) -> None:
    accidents = [cancel, cancel, change_rate, *([cut] if seed % 2 else [])]
    for r in play(seed, accidents, policy=POLICIES[seed % 4]).records:
        assert r.finish_reason in ("length", "stop") or r.detail


def test_the_swarm_covers_every_way_to_hand_over() -> None:
    """Else the seeds above say little."""
    modes = {r.seam.mode for seed in (13, 25, 103) for r in play(seed).records if r.switch}
    assert modes == {"one-shot", "catch-up", "overlap"}


def test_the_swarm_covers_transfers_that_are_held_and_resumed() -> None:
    assert all(play(seed).events(Resumed) for seed in (13, 20))
