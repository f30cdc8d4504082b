"""How requests go on when an instance that has a part in them is lost: each row of the table in
docs/recovery.md, and the bounds. Any one instance killed behind any event: test_kills.py.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.model import oracle as judge
from pddrt.errors import BadFrame
from pddrt.messages import Limits, banned, finish
from pddrt.policy.handoff import CatchUp, Overlap
from pddrt.policy.route import Naive, Pdd, Policy, RelayOnly, Route
from pddrt.protocol import MainSide, RelaySide, State
from pddrt.roles.attempts import LEAST, SHARE, Attempt, Recovery, rest_of
from pddrt.types import MS, SECOND, Sampling

from .cluster import VOCAB, Cluster, Played, many, one
from .test_faults import of, plan, suffers

TEXT = "x" * 200
SLOW: Policy = Pdd(0)
"""Every request is relayed."""


def lose(fault: str, cluster: Cluster | None = None, tokens: int = 160) -> Played:
    """One request under a fault; its answer is checked against the oracle."""
    return suffers(f"- {{{fault}}}", cluster or Cluster(policy=SLOW), [one(TEXT, tokens)])


def how(played: Played, request: str = "s0.0") -> list[str]:
    return [then for then, _ in played.went_on(request)]


def makers(played: Played, at: int = 0) -> str:
    return "".join(dict.fromkeys(played.records[at].sources))


def crash(who: str, event: str, **fields: object) -> str:
    about = "".join(f", {name}: {value}" for name, value in fields.items())
    return f"do: crash, instance: {who}, on: {{event: {event}, request: s0.0{about}}}"


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["KVWhole, instance: rld0", "TokensReceived, start: 9"])
def test_where_the_relay_is_lost_the_main_decoder_takes_over(event: str) -> None:
    """It gets the KV, and goes on from the ids that the client has."""
    played = lose(f"do: crash, instance: rld0, on: {{event: {event}, request: s0.0}}")
    (r,) = played.records
    assert (how(played), r.finish_reason) == (["takeover"], "length")
    [taken] = of(played, ev.TakenOver)
    made = taken.end - r.prompt_tokens
    assert r.sources == "P" + "R" * (made - 1) + "M" * (160 - made)
    assert r.kv_received["md0"] == r.prompt_tokens * 1024, "once"


def test_a_main_decoder_that_holds_a_piece_takes_over_from_there() -> None:
    """It has computed what it was sent, and nothing newer has come: that is enough to go on."""
    cluster = Cluster(policy=SLOW, handoff=CatchUp(threshold=2, max_ids_per_round=4, max_rounds=99))
    played = lose(crash("rld0", "HandoffSent", nth=2), cluster)
    assert (how(played), makers(played)) == (["takeover"], "PRM")


def test_a_relay_that_is_lost_where_both_decode_leaves_the_other() -> None:
    cluster = Cluster(policy=SLOW, handoff=Overlap(threshold=2, max_ids_per_round=16))
    played = lose(crash("rld0", "HandoffTaken"), cluster)
    assert (how(played), makers(played)) == (["takeover"], "PRM")
    assert not of(played, ev.TakenOver), "it decodes already"


def test_ids_that_were_on_their_way_when_the_relay_was_lost_are_not() -> None:
    """All were handed over, some had not reached the gateway: the main decoder tells them."""
    cluster = Cluster(policy=SLOW, delay=5 * MS, gateway_site="b")
    played = lose(crash("rld0", "HandoffSent"), cluster)
    assert played.records[0].finish_reason == "length"
    assert how(played) in (["takeover"], ["on"])
    assert makers(played) == "PRM"


@pytest.mark.parametrize("relays", [1, 2])
def test_without_a_main_decoder_a_lost_relay_means_another_attempt(relays: int) -> None:
    cluster = Cluster(policy=RelayOnly(0), relays=relays)
    played = lose(crash("rld0", "TokensReceived", start=5), cluster)
    (r,) = played.records
    if relays == 1:
        assert (how(played), r.finish_reason) == ([], "aborted")
        assert r.detail.endswith("; no relay instance can be reached")
        return
    assert (how(played), r.finish_reason) == (["again"], "length")
    [again] = of(played, ev.Retried)
    [_, routed] = of(played, ev.Routed)
    assert again.after >= 6
    assert (routed.prompt_tokens, routed.max_tokens) == (
        r.prompt_tokens + again.after,
        160 - again.after,
    )
    assert routed.relay == "rld1"


def test_a_main_decoder_lost_before_the_handoff_is_replaced_from_the_pages_of_p() -> None:
    played = lose(crash("md0", "KVReceived", instance="md0"), Cluster(policy=SLOW, mains=2))
    (r,) = played.records
    assert (how(played), makers(played), r.main) == (["another main"], "PRM", "md1")
    assert [e.instance for e in of(played, ev.PrefillStarted)] == ["p0"], "computed once"


@pytest.mark.parametrize("event", ["KVReceived", "KVWhole"])
def test_without_another_main_decoder_the_relay_ends_it(event: str) -> None:
    played = lose(crash("md0", event, instance="md0"))
    assert (how(played), makers(played)) == (["alone"], "PR")
    assert of(played, ev.Rerouted)[0].why.endswith("md0 ended the connection")


def test_a_main_decoder_lost_after_the_handoff_means_another_attempt() -> None:
    """P's cache makes the most of it cheap."""
    played = lose(crash("md0", "TokensReceived", source="M"), Cluster(policy=SLOW, mains=2))
    (r,) = played.records
    assert (how(played), r.main, r.attempt) == (["again"], "md1", 1)
    assert r.hits["p0"] >= r.prompt_tokens - 16
    assert makers(played) == "PRM"


@pytest.mark.parametrize("event", ["PrefillStarted", "Admitted"])
def test_p_lost_while_it_computes_means_another_attempt(event: str) -> None:
    played = lose(crash("p0", event, instance="p0"), Cluster(policy=SLOW, prefills=2))
    (r,) = played.records
    assert (how(played), r.prefill, r.finish_reason) == (["again"], "p1", "length")
    assert r.ttft is not None
    assert sum((r.legs or {}).values()) == r.ttft


def test_p_lost_while_kv_crosses_leaves_the_relay_to_end_it() -> None:
    played = lose(crash("p0", "TokensReceived", start=3))
    assert (how(played), makers(played)) == (["on", "alone"], "PR")
    assert not of(played, ev.Retried)


def test_p_lost_when_everybody_has_everything_is_not_missed() -> None:
    played = lose(crash("p0", "KVWhole", instance="md0"))
    assert (how(played), makers(played)) == (["on"], "PRM")


def test_while_the_wan_is_down_nothing_fails_and_the_handoff_comes_later() -> None:
    played = lose("do: link-down, link: wan, at: 60 ms, for: 700 ms", tokens=400)
    assert (how(played), makers(played)) == ([], "PRM")
    [switch] = [e.t for e in of(played, ev.HandoffSent) if e.last]
    assert switch > of(played, ev.FaultEnded)[0].t


@pytest.mark.parametrize("do", ["step-fails", "out-of-memory"])
@pytest.mark.parametrize("instance", ["p0", "rld0", "md0"])
def test_a_failed_step_is_as_good_as_a_lost_instance_for_those_in_it(
    do: str, instance: str
) -> None:
    on = f"on: {{event: StepBegan, instance: {instance}, nth: 2}}"
    played = lose(f"do: {do}, instance: {instance}, {on}")
    wanted = {"p0": ["again"], "rld0": ["takeover"], "md0": ["again"]}
    assert (how(played), played.records[0].finish_reason) == (wanted[instance], "length")


@pytest.mark.parametrize("at", [340, 380, 450])
def test_decoders_that_only_lose_each_other_need_no_other_attempt(at: int) -> None:
    """The main decoder takes over as soon as it holds the KV, whoever had the ids."""
    sessions = many(2, 200, 160, every=300 * MS)
    played = suffers(f"- {{do: reset, between: [rld0, md0], at: {at} ms}}", None, sessions)
    assert not of(played, ev.Retried)
    assert makers(played, 1) == "PRM"


def test_where_nothing_is_possible_there_is_one_error_to_that_client_only() -> None:
    """The other request needs nobody who is lost."""
    sessions = many(2, 100, 60, every=5 * MS)
    cluster = Cluster(prefills=2, mains=2, policy=Naive())
    text = f"- {{{crash('md0', 'TokensReceived')}}}\n- {{{crash('md1', 'Retried')}}}"
    played = suffers(text, cluster, sessions[:1])
    (r,) = played.records
    assert (r.finish_reason, len(of(played, ev.Finished))) == ("aborted", 1)
    assert "lost md" in r.detail
    assert "no main instance can be reached" in r.detail
    assert (r.finished or 0) - r.sent < 5 * SECOND
    alone = suffers(f"- {{{crash('md0', 'TokensReceived')}}}", cluster, sessions)
    other = next(r for r in alone.records if r.main == "md1" and not r.attempt)
    assert not alone.went_on(other.id)


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_there_are_so_many_attempts_each_after_a_longer_pause(retries: int) -> None:
    cluster = Cluster(policy=Naive(), recovery=Recovery(retries, 40 * MS), mains=2)
    text = "- {do: step-fails, instance: %s, on: {event: StepBegan, every: true}}"
    played = suffers("\n".join(text % name for name in ("md0", "md1")), cluster, [one(TEXT, 30)])
    (r,) = played.records
    assert (r.attempt, r.finish_reason) == (retries, "aborted")
    assert "the step failed" in r.detail
    failed, again = of(played, ev.StepFailed), of(played, ev.Retried)
    for tries, (before, e) in enumerate(zip(failed, again, strict=False)):
        pause = 40 * MS * 2**tries
        assert pause // 2 <= e.t - before.t <= pause + 40 * MS


def test_no_attempt_outlives_the_deadline() -> None:
    cluster = Cluster(policy=Naive(), recovery=Recovery(100, SECOND), deadline=2 * SECOND)
    played = suffers(f"- {{{crash('md0', 'TokensReceived')}}}", cluster, [one(TEXT, 60)])
    (r,) = played.records
    assert (r.finish_reason, r.detail) == ("aborted", "deadline exceeded")
    assert (r.finished or 0) - (r.routed or 0) <= 2 * SECOND + MS


def test_an_outage_does_not_become_a_storm() -> None:
    """Twenty lose their main decoder at once: so many are tried again that have shown no id."""
    count = 20
    cluster = Cluster(policy=Naive(), mains=2, pages=1000, max_batch=32)
    text = "- {do: crash, instance: md0, at: 900 ms}\n- {do: pause, instance: md0, at: 0}"
    played = suffers(text, cluster, many(count, 60, 40))
    most = unproven = 0
    open_: set[str] = set()
    for e in played.trace.events:
        if isinstance(e, ev.Retried):
            open_.add(e.request)
        elif isinstance(e, ev.TokensReceived | ev.Finished):
            open_.discard(e.request)
        unproven = len(open_)
        most = max(most, unproven)
    retried = {e.request for e in of(played, ev.Retried)}
    assert len(retried) > 2 * SHARE * count
    assert LEAST <= most <= SHARE * count + 1, "one may have been answered and not heard of"
    assert {r.finish_reason for r in played.records} == {"length"}


def test_what_failed_is_avoided_until_nothing_else_is_left() -> None:
    text = "- {do: step-fails, instance: md0, on: {event: StepBegan, instance: md0}}"
    for mains, wanted in ((2, ["md0", "md1"]), (1, ["md0", "md0"])):
        played = suffers(text, Cluster(policy=Naive(), mains=mains), [one(TEXT, 30)])
        assert [e.main for e in of(played, ev.Routed)] == wanted
        assert played.records[0].finish_reason == "length"


def test_a_request_may_not_be_called_as_an_attempt_is() -> None:
    async def ask(deployment: Deployment) -> None:
        sampling = list(ev.astuple(Sampling()))
        about = {"text": "x", "system": "", "answer": None, "raw": False, "max_tokens": 5}
        about |= {"request": "s0.0~1", "session": None, "sampling": sampling}
        refused: list[Any] = []
        deployment.client.on_end = lambda conn, frame: refused.append(frame)  # type: ignore[method-assign]
        deployment.client.post("gateway", "submit", **about)
        await deployment.env.sleep(10 * MS)
        del deployment.client.on_end
        assert [(f["request"], f["reason"]) for f in refused] == [("s0.0~1", "rejected")]

    Cluster().play([one("later", 5, start=SECOND)], during=ask)


# -- an attempt's answer is the request's ----------------------------------------------------------


@pytest.mark.parametrize("made", range(8))
def test_what_ends_an_answer_does_not_depend_on_the_attempt(made: int) -> None:
    sampling = Sampling(min_tokens=4, stop_ids=(7,))
    whole = Limits.of(10, 8, frozenset({3}), sampling)
    rest, asked = rest_of(whole, sampling, made)
    assert Limits.of(10 + made, 8 - made, frozenset({3}), asked) == rest
    for position in range(10 + made, 18):
        assert banned(rest, position) == banned(whole, position)
        for token in (1, 3, 7):
            assert finish(rest, position, token) == finish(whole, position, token)


@pytest.mark.parametrize("at", [0, 4, 30])
def test_a_further_attempt_draws_what_the_first_would_have_drawn(at: int) -> None:
    cluster = Cluster(policy=Naive(), mains=2, deadline=20 * SECOND)
    cluster.sampling = Sampling(temperature=1.0, min_tokens=20, logprobs=2)
    cluster.plan = plan(f"- {{{crash('md0', 'TokensReceived', start=at)}}}")
    played = cluster.play([one(TEXT, 60)])
    played.assert_sound()
    (r,) = played.records
    assert r.attempt == 1
    assert judge(r.prompt_ids, r.ids, r.sampling, vocab=VOCAB) == r.ids
    assert len(r.logprobs) == 60
    assert None not in r.logprobs


# -- decisions, on paper ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "whole", "made", "verdict"),
    [
        ("", "", False, "on"),
        ("r", "", False, "takeover"),
        ("r", "m", True, "takeover"),
        ("r", "m", False, "takeover"),
        ("rp", "m", True, "takeover"),
        ("rp", "m", False, "again"),
        ("rp", "", True, "again"),
        ("m", "", False, "alone"),
        ("mp", "r", True, "alone"),
        ("mp", "", False, "again"),
        ("p", "r", True, "on"),
        ("p", "rm", True, "on"),
        ("p", "m", False, "again"),
        ("p", "", False, "again"),
        ("rm", "rm", True, "again"),
    ],
)
def test_who_is_lost_decides_who_goes_on(lost: str, whole: str, made: bool, verdict: str) -> None:
    limits = Limits(10, 5, frozenset())
    attempt = Attempt("x", Route("p", "r", "m", ""), limits, lost=set(lost), whole=set(whole))
    assert attempt.verdict(made) == verdict
    if "m" not in lost and "m" in whole and made:
        attempt.handed = True
        assert attempt.verdict(made) == "on", "nobody else is needed after the handoff"
    straight = Attempt("x", Route("p", None, "m", ""), limits, lost=set(lost), whole=set(whole))
    needs = {"m"} if "m" in whole else {"m", "p"}
    assert straight.verdict(made) == ("again" if needs & set(lost) else "on")


LIMITS = Limits(4, 50, frozenset())


def main_side(ids: list[int], *, last: bool = False) -> MainSide:
    """A main decoder that holds the KV and has been sent `ids`."""
    side = MainSide(LIMITS)
    side.on_kv(0, 4)
    if ids:
        side.on_ids(4, ids, last)
        if not last:
            side.on_computed(0)
    return side


def test_a_takeover_goes_on_from_whichever_ids_are_more() -> None:
    for there, told in (([], [1, 2]), ([1], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2], [1, 2])):
        side = main_side(there)
        [go_on] = side.on_takeover(4, told, in_step=False)
        longest = max(there, told, key=len)
        assert go_on.ids == tuple(longest)  # type: ignore[union-attr]
        assert go_on.kept == len(longest) - 1  # type: ignore[union-attr]
        assert side.on_ids(4 + len(longest), [9], last=True) == [], "the relay is not asked"
    assert main_side([1, 2], last=True).on_takeover(4, [1], in_step=False) == []


def test_a_takeover_during_the_step_over_a_piece_waits_for_its_end() -> None:
    side = MainSide(LIMITS)
    side.on_kv(0, 4)
    side.on_ids(4, [1, 2], last=False)
    assert side.on_takeover(4, [1], in_step=True) == []
    [go_on] = side.on_computed(0)
    assert (side.state, go_on.kept) == (State.DECODING, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(("start", "ids"), [(5, [1]), (4, []), (4, [2])])
def test_a_takeover_that_does_not_join_is_refused(start: int, ids: list[int]) -> None:
    with pytest.raises(BadFrame):
        main_side([1]).on_takeover(start, ids, in_step=False)


@pytest.mark.parametrize("state", [State.DECODING, State.ROUND, State.FOLLOWED, State.FREEZING])
def test_a_relay_without_its_main_decoder_decodes_on(state: State) -> None:
    side = RelaySide(LIMITS, ask=lambda *_: pytest.fail("nobody is there"), main_is_ready=False)
    side.on_kv(0, 4)
    side.on_first(1)
    side.state, side.sent, side.bound = state, 1, 2
    side.on_main_lost()
    for token in range(2, 50):
        assert side.on_token(token) == ([], None)
    assert side.on_token(50) == ([], "length")


# -- KV that has left P and never comes ------------------------------------------------------------

QUIET = 400 * MS
"""How long KV that has left P may take, here."""


@pytest.mark.parametrize("kind", ["kv", "first"])
@pytest.mark.parametrize("whose", ["rld0", "md0"])
def test_the_end_of_a_stream_that_is_lost_in_silence_is_missed_soon(kind: str, whose: str) -> None:
    """The last frame loses its tail, the stream stays open: the decoder waits, P waits."""
    policy = SLOW if whose == "rld0" else Naive()
    cluster = Cluster(policy=policy, handshake=QUIET, chunk_tokens=256)
    played = lose(f"do: truncate, kind: {kind}, dst: {whose}, at: 0", cluster)
    [lost] = [e for e in played.trace.events if isinstance(e, ev.Rerouted | ev.Retried)][:1]
    left = max(e.t for e in of(played, ev.KVSent, dst=whose) if e.t < lost.t)
    lacks = "the first id" if kind == "first" else "KV from 0 on"
    assert f"{whose}: {lacks} never came, though p0 has sent it" in lost.why
    assert QUIET <= lost.t - left < 2 * QUIET
    assert played.records[0].finish_reason == "length"


def test_kv_for_a_cache_alone_that_is_lost_in_silence_is_not_waited_for() -> None:
    """The answer is there, on the relay; what still crossed was for the next turn."""
    cluster = Cluster(policy=SLOW, handshake=QUIET, chunk_tokens=256)
    played = lose("do: truncate, kind: kv, dst: md0, at: 0", cluster, tokens=20)
    [end] = of(played, ev.Finished)
    [freed] = of(played, ev.Freed, instance="md0")
    assert (end.reason, how(played)) == ("length", [])
    assert end.t < freed.t < end.t + 2 * QUIET


@pytest.mark.parametrize(
    "fault",
    [
        "do: delay, kind: kv, dst: md0, by: 3 s, at: 0",
        "do: link-down, link: wan, on: {event: KVSent, dst: md0}, for: 3 s",
        "do: link-slow, link: wan, to: 1 Mbit/s, at: 0",
        "do: pause, instance: md0, on: {event: KVSent, dst: md0, nth: 2}, for: 3 s",
        "do: pause, instance: p0, on: {event: KVSent, dst: md0}, for: 3 s",
        "do: slow, instance: p0, factor: 200, at: 0",
    ],
)
def test_queueing_is_no_silence(fault: str) -> None:
    """F16: KV that is held up, in P or on the way, for many times as long is waited for."""
    cluster = Cluster(policy=Naive(), handshake=QUIET)
    played = lose(fault, cluster)
    assert (how(played), played.records[0].finish_reason) == ([], "length")
    kv = [of(played, ev.KVSent)[0].t, *(e.t for e in of(played, ev.KVReceived))]
    assert max(b - a for a, b in itertools.pairwise(kv)) > 2 * QUIET


def test_who_does_not_read_does_not_say_that_nothing_comes() -> None:
    """It takes its time over each frame, P's word among them, which overtakes KV."""

    async def dawdle(deployment: Deployment) -> None:
        env, md0 = deployment.env, deployment.instance("md0")

        def begin(event: ev.Event) -> None:
            if isinstance(event, ev.KVReceived):
                md0.hold = partial(env.sleep, 2 * QUIET)

        env.trace.listen(begin)

    played = Cluster(policy=Naive(), handshake=QUIET).play([one(TEXT, 20)], during=dawdle)
    played.assert_sound()
    kv = [e.t for e in of(played, ev.KVReceived)]
    assert kv[-1] - kv[-2] >= 2 * QUIET
    assert how(played) == []
