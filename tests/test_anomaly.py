"""The anomaly filter: what it spares, how often, what is left there, what a wrong guess costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.tokens import ByteTokenizer
from pddrt.policy.anomaly import Anomaly, Filter
from pddrt.policy.handoff import CatchUp
from pddrt.policy.route import Pdd
from pddrt.types import MS, SECOND
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, one, oracle

TEXT = "p" * 200
IDS = ByteTokenizer().chat(TEXT)
ALWAYS = Anomaly(input_above=100, output_below=60, share=1.0)
"""Any relayed request with a bound below 60."""
SLOW = 100_000
"""bytes/s: 200 tokens take 2 s."""


def of(played: Played, kind: type[Any], request: str = "s0.0") -> list[Any]:
    return [e for e in played.trace.events if isinstance(e, kind) and e.request == request]


# -- on paper --------------------------------------------------------------------------------------


def test_the_share_bounds_what_is_spared_at_any_time() -> None:
    tried = Filter(Anomaly(10, 10, share=0.05))
    for n in range(1, 401):
        tried.routed += 1
        tried.holds(lacking=11, expected=9)
        assert tried.spared <= 0.05 * n
    assert tried.spared == 20


@pytest.mark.parametrize(("lacking", "expected"), [(10, 9), (11, 10), (0, 0)])
def test_a_short_input_or_a_long_answer_is_none(lacking: int, expected: int) -> None:
    tried = Filter(Anomaly(10, 10, share=1.0))
    tried.routed = 1
    assert not tried.holds(lacking, expected)
    assert tried.holds(11, 9)


def test_a_sessions_guess_is_the_upper_quartile_of_its_answers() -> None:
    tried = Filter(Anomaly(10, 10, guess="session"))
    assert tried.expected("s", 300) == 300, "first turn"
    for tokens in (20, 100, 40, 60):
        tried.answered("s", tokens)
    assert tried.expected("s", 300) == 60
    assert tried.expected("s", 50) == 50, "never above its bound"
    assert tried.expected("t", 300) == 300, "of its own answers"
    for _ in range(16):
        tried.answered("s", 5)
    assert tried.expected("s", 300) == 5, "what was long ago counts no more"
    plain = Filter(Anomaly(10, 10, guess="max_tokens"))
    plain.answered("s", 5)
    assert plain.expected("s", 300) == 300


def test_a_transfer_is_cut_only_where_rld_will_be_first() -> None:
    tried = Filter(Anomaly(10, 100, share=1.0))
    tried.routed = 10
    assert not tried.cuts(50, step=0, rest=SECOND), "nobody knows its pace"
    assert not tried.cuts(50, step=20 * MS, rest=SECOND)
    assert tried.cuts(50, step=20 * MS, rest=SECOND + 1)
    assert tried.cuts(50, step=20 * MS, rest=None), "nothing moves"


# -- at work ---------------------------------------------------------------------------------------


def test_a_held_request_ends_on_rld_and_nothing_crosses() -> None:
    played = Cluster(rate=SLOW, anomaly=ALWAYS, policy=Pdd(0)).play([one(TEXT, 50)])
    played.assert_sound()
    (r,) = played.records
    assert r.ids == oracle(IDS, 50)
    assert r.sources == "P" + "R" * 49
    assert "md0" not in r.admitted
    (spared,) = of(played, ev.Spared)
    assert (spared.how, spared.expected, spared.bytes) == ("held", 50, 200 * LAYOUT.bytes_per_token)
    assert not of(played, ev.Resumed)


def test_a_wrong_guess_is_resumed_and_handed_over_as_any_other() -> None:
    """The session answered shortly before; RLD goes on beyond `output_below`, and MD takes over."""
    rule = Anomaly(100, 30, share=1.0, guess="session")
    session = Session(0, 0, (Turn("short", 10, 0), Turn("x" * 200, 300, 0)))
    played = Cluster(rate=500_000, anomaly=rule, policy=Pdd(0)).play([session])
    played.assert_sound()
    _, r = played.records
    (spared,), (resumed,) = of(played, ev.Spared, "s0.1"), of(played, ev.Resumed, "s0.1")
    assert (spared.how, spared.expected, resumed.made) == ("held", 10, 30)
    assert r.ids == oracle(r.prompt_ids, 300)
    assert "M" in r.sources
    assert r.admitted["md0"] > resumed.t


class LateGuess(Filter):
    """Knows of an anomaly only when RLD has the KV."""

    def holds(self, lacking: int, expected: int) -> bool:
        return False


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pddrt.roles.sparing.Filter", LateGuess)
    monkeypatch.setattr("pddrt.roles.feed.PIECE_BYTES", 8 * LAYOUT.bytes_per_token)


def slow_fabric(**more: Any) -> Cluster:
    """RLD has the KV after 0.4 s, when two fifths of it have reached MD."""
    rule = Anomaly(100, 60, share=1.0, guess="max_tokens")
    return Cluster(rate=2 * SLOW, fabric=500_000, anomaly=rule, policy=Pdd(0), **more)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("page_tokens", [1, 7, 16])
def test_a_cut_leaves_what_came_as_a_prefix_that_may_be_evicted(page_tokens: int) -> None:
    cluster = slow_fabric(page_tokens=page_tokens, pages=1024 // page_tokens)
    warm = Session(0, 0, (Turn("warm up", 20, 0),))
    again = Session(2, 20 * SECOND, (Turn(TEXT, 100, 0),))
    played = cluster.play([warm, Session(1, SECOND, (Turn(TEXT, 50, 0),)), again])
    played.assert_sound()
    _, cut, later = played.records
    (spared,) = of(played, ev.Spared, "s1.0")
    assert spared.how == "cut"
    assert cut.sources == "P" + "R" * 49
    came = cut.kv_received["md0"] // LAYOUT.bytes_per_token
    assert 0 < came < 200
    assert later.hits["md0"] == came, "contiguous, from the first token on"
    assert later.ids == oracle(IDS, 100)
    assert later.kv_received["md0"] == (200 - came) * LAYOUT.bytes_per_token
    saved = (200 - came) * LAYOUT.bytes_per_token
    assert abs(spared.bytes - saved) < 70_000, "but for what was on its way"


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("delay", [0, 15 * MS, 100 * MS])
def test_a_cut_that_was_wrong_resumes_from_what_is_left(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateGuess, "expected", lambda self, session, most: 10)
    cluster = slow_fabric(delay=delay)
    cluster.anomaly = Anomaly(100, 15, share=1.0)
    played = cluster.play([one("warm up", 20), Session(1, SECOND, (Turn(TEXT, 700, 0),))])
    played.assert_sound()
    r = played.records[1]
    assert [e.how for e in of(played, ev.Spared, "s1.0")] == ["cut"]
    assert len(of(played, ev.Resumed, "s1.0")) == 1
    assert r.ids == oracle(IDS, 700)
    assert "M" in r.sources
    admitted = [e for e in of(played, ev.Admitted, "s1.0") if e.instance == "md0"]
    assert len(admitted) == 2
    assert 0 < admitted[1].hit < 200


@pytest.mark.usefixtures("late")
def test_a_prefix_that_was_evicted_meanwhile_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LateGuess, "expected", lambda self, session, most: 10)
    cluster = slow_fabric()
    cluster.anomaly = Anomaly(100, 40, share=1.0)

    async def evict(deployment: Deployment) -> None:
        md: Any = deployment.instance("md0")
        while not any(isinstance(e, ev.Spared) for e in deployment.env.trace.events):
            await deployment.env.sleep(MS)
        while "s1.0" in md._entries:
            await deployment.env.sleep(MS)
        md.memory.cache.evict(md.memory.cached)

    played = cluster.play(
        [one("warm up", 20), Session(1, SECOND, (Turn(TEXT, 700, 0),))], during=evict
    )
    played.assert_sound()
    r = played.records[1]
    hits = [e.hit for e in of(played, ev.Admitted, "s1.0") if e.instance == "md0"]
    assert hits == [0, 0]
    assert r.ids == oracle(IDS, 700)
    assert "M" in r.sources


SPARES = {"held": range(12), "cut": (0, 2, 3, 4, 5)}
"""Seeds that spare something."""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("how", ["held", "cut"])
def test_whatever_is_guessed_every_answer_is_the_oracles(
    seed: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random guesses, small pools, turns that go on after a spared one, cancels among them."""
    rng = random.Random(seed)
    if how == "cut":
        monkeypatch.setattr("pddrt.roles.sparing.Filter", LateGuess)
        monkeypatch.setattr("pddrt.roles.feed.PIECE_BYTES", 8 * LAYOUT.bytes_per_token)
    monkeypatch.setattr(Filter, "expected", lambda self, session, most: rng.choice([1, 5, 500]))
    cluster = Cluster(
        prefills=rng.choice([1, 2]),
        pages=rng.choice([40, 80]),
        rate=rng.choice([200_000, 1_000_000]),
        fabric=rng.choice([500_000, 10_000_000]),
        delay=rng.choice([1 * MS, 80 * MS]),
        anomaly=Anomaly(rng.choice([0, 50]), rng.choice([6, 20]), share=1.0),
        policy=Pdd(rng.choice([0, 50 * MS])),
        handoff=CatchUp(8, 8, 4),
        seed=seed,
        shuffle=seed,
    )
    sessions = [
        Session(
            i,
            i * 40 * MS,
            tuple(Turn(f"{i}" * rng.randint(30, 150), rng.choice([4, 30, 60]), 0) for _ in "12"),
        )
        for i in range(5)
    ]

    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(rng.randint(50, 900) * MS)
        deployment.client.post("gateway", "cancel", request="s2.0")

    played = cluster.play(sessions, during=cancel)
    played.assert_sound()
    assert of_any(played, ev.Spared) or seed not in SPARES[how], "else this says nothing"
    for r in played.records:
        wanted = oracle(r.prompt_ids, sessions[r.session].turns[r.turn].max_tokens)
        assert r.ids == wanted[: len(r.ids)]
        assert r.finish_reason == "length" or r.detail == "cancelled by the client", r.detail


def of_any(played: Played, kind: type[Any]) -> list[Any]:
    return [e for e in played.trace.events if isinstance(e, kind)]
