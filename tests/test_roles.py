"""The roles together, on modelled engines in virtual time: what a deployment must do, message by
message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, replace

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.tokens import ByteTokenizer
from pddrt.errors import BadInput, CannotRun
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Manifest, prompt_digest
from pddrt.metrics import LEGS
from pddrt.netem.simnet import SimNet
from pddrt.policy.route import Naive, Pdd, Policy
from pddrt.sched import MAX_OVERTAKEN
from pddrt.types import MS, SECOND, KVLayout, Ns, Sampling
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, many, one, oracle

TEXT = "p" * 200  # 200 KB of KV: 0.1 s over the WAN


def prompt_ids(text: str) -> list[int]:
    return ByteTokenizer().chat(text)


def test_a_relayed_request_is_made_by_p_then_r_then_m() -> None:
    played = Cluster().play([one(TEXT, 120)])
    played.assert_sound()
    (r,) = played.records
    assert r.pipeline == "P-RLD-MD"
    assert r.finish_reason == "length"
    assert r.sources == "P" + "R" * r.sources.count("R") + "M" * r.sources.count("M")
    assert r.sources.count("R") > 5
    assert r.sources.count("M") > 5
    assert r.ids == oracle(prompt_ids(TEXT), 120)


def test_main_extends_over_exactly_the_ids_it_was_sent() -> None:
    played = Cluster().play([one(TEXT, 120)])
    (r,) = played.records
    (sent,) = played.events(ev.HandoffSent)
    assert isinstance(sent, ev.HandoffSent)
    assert sent.last
    assert r.extend_tokens == r.handoff_ids == sent.end - sent.start == 1 + r.sources.count("R")
    extends = [e for e in played.events(ev.Step) if isinstance(e, ev.Step) and e.extend_tokens]
    assert [(e.instance, e.extend_tokens) for e in extends] == [("md0", r.extend_tokens)]


def test_a_short_request_goes_without_a_relay() -> None:
    played = Cluster().play([one("p" * 20, 10)])
    played.assert_sound()
    (r,) = played.records
    assert (r.pipeline, r.sources, r.relay) == ("P-MD", "P" + "M" * 9, None)
    assert r.ids == oracle(prompt_ids("p" * 20), 10)


def test_naive_waits_for_the_wan_and_pdd_does_not() -> None:
    relayed = Cluster().play([one(TEXT, 30)]).records[0]
    naive = Cluster(policy=Naive()).play([one(TEXT, 30)]).records[0]
    assert naive.sources == "P" + "M" * 29
    assert naive.ids == relayed.ids
    assert relayed.ttft is not None
    assert naive.ttft is not None
    assert naive.ttft > relayed.ttft + 60 * MS


def test_kv_streams_while_the_prompt_is_computed() -> None:
    late = Cluster(stream_while_computing=False).play([one(TEXT, 120)])
    early = Cluster().play([one(TEXT, 120)])
    late.assert_sound()
    assert late.records[0].ids == early.records[0].ids
    assert early.records[0].whole["md0"] < late.records[0].whole["md0"]
    (ended,) = early.events(ev.PrefillEnded)
    assert any(e.t < ended.t for e in early.events(ev.KVSent))


def test_every_byte_of_kv_crosses_once_on_each_path() -> None:
    played = Cluster().play([one(TEXT, 120)])
    (r,) = played.records
    assert r.kv_received == {
        "rld0": 200 * LAYOUT.bytes_per_token,
        "md0": 200 * LAYOUT.bytes_per_token,
    }
    wan = [
        e for e in played.events(ev.LinkTotal) if isinstance(e, ev.LinkTotal) and e.link == "wan"
    ]
    assert sum(e.kv_bytes for e in wan) >= r.kv_received["md0"]
    assert 0 < sum(e.ids_bytes for e in wan) < 4 * r.handoff_ids + 200


@pytest.mark.parametrize("early", [False, True])
def test_the_legs_of_ttft_add_up(early: bool) -> None:
    played = Cluster(early_first_token=early).play(many(6, 150, 40, every=30 * MS))
    played.assert_sound()
    for r in played.records:
        assert r.legs is not None
        assert list(r.legs) == list(LEGS)
        assert sum(r.legs.values()) == r.ttft
        assert all(v >= 0 for v in r.legs.values())


def test_an_early_first_token_hides_the_transfer_and_the_second_token_shows_it() -> None:
    decoder = Cluster(policy=Naive()).play([one(TEXT, 20)]).records[0]
    early = Cluster(policy=Naive(), early_first_token=True).play([one(TEXT, 20)]).records[0]
    assert early.ids == decoder.ids
    assert early.ttft < decoder.ttft
    assert early.ttst > decoder.ttst
    assert early.times[1] == decoder.times[1]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_very_short_answers_end_where_they_end(max_tokens: int) -> None:
    """F32: the budget is counted by position. With one token P ends the answer itself."""
    played = Cluster().play([one(TEXT, max_tokens)])
    played.assert_sound()
    (r,) = played.records
    assert (len(r.ids), r.finish_reason) == (max_tokens, "length")
    assert r.ids == oracle(prompt_ids(TEXT), max_tokens)


def test_an_answer_that_ends_on_the_relay_cancels_a_transfer_that_no_cache_wants() -> None:
    played = Cluster(rate=100_000, caching=False).play([one(TEXT, 8)])
    played.assert_sound()
    (r,) = played.records
    assert r.sources == "P" + "R" * 7
    assert [
        e.dst for e in played.events(ev.TransferCancelled) if isinstance(e, ev.TransferCancelled)
    ] == ["md0"]
    assert r.kv_received.get("md0", 0) < 200 * LAYOUT.bytes_per_token, "the rest never crossed"


def test_after_an_answer_that_ended_on_the_relay_mains_cache_still_catches_up() -> None:
    later = Session(1, 4 * SECOND, (Turn(TEXT + "and more", 8),))
    played = Cluster(rate=100_000).play([one(TEXT, 8), later])
    played.assert_sound()
    first, second = played.records
    assert first.sources == "P" + "R" * 7
    assert first.kv_received["md0"] == 200 * LAYOUT.bytes_per_token
    assert second.cached["main"] == second.cached["prefill"] == 200


@pytest.mark.parametrize("position", range(0, 110, 6))
def test_end_of_sequence_ends_the_answer_wherever_it_falls(position: int) -> None:
    """F33: on P, on RLD, at the switch, on MD: one finish function."""
    answer = oracle(prompt_ids(TEXT), 120)
    eos = answer[position]
    cut = answer.index(eos) + 1
    played = Cluster(eos_ids=frozenset({eos})).play([one(TEXT, 120)])
    played.assert_sound()
    (r,) = played.records
    assert (r.ids, r.finish_reason) == (answer[:cut], "stop")


def test_many_requests_at_once_all_get_the_oracles_answer() -> None:
    cluster = Cluster(prefills=2, relays=2, mains=2, pages=200)
    played = cluster.play(many(40, 120, 50, every=5 * MS))
    played.assert_sound()
    for r in played.records:
        assert r.ids == oracle(prompt_ids(r.prompt), 50)
    assert {r.main for r in played.records} == {"md0", "md1"}, "load is spread"
    assert {r.prefill for r in played.records} == {"p0", "p1"}


@pytest.mark.parametrize("page_tokens", [1, 7, 64])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 100])
def test_any_page_size_and_prompt_length(page_tokens: int, prompt_len: int) -> None:
    cluster = Cluster(
        page_tokens=page_tokens, pages=-(-200 // page_tokens), policy=Cluster().policy, rate=20_000
    )
    played = cluster.play([one("q" * prompt_len, 40)])
    played.assert_sound()
    assert played.records[0].ids == oracle(prompt_ids("q" * prompt_len), 40)


def test_sampled_answers_do_not_depend_on_who_draws() -> None:
    hot = Sampling(temperature=1.0)
    pdd = Cluster(sampling=hot).play([one(TEXT, 40)]).records[0]
    naive = Cluster(sampling=hot, policy=Naive()).play([one(TEXT, 40)]).records[0]
    assert pdd.ids == naive.ids != Cluster().play([one(TEXT, 40)]).records[0].ids


def test_a_follow_up_turn_contains_the_former_answer_as_ids() -> None:
    session = Session(0, 0, (Turn("first" * 20, 12, 0), Turn("second", 12, 50 * MS)))
    played = Cluster().play([session])
    played.assert_sound()
    first, second = played.records
    history = prompt_ids("first" * 20) + first.ids
    ids = history + ByteTokenizer().follow_up("second", after_eos=False)
    assert second.prompt_tokens == len(ids)
    assert second.ids == oracle(ids, 12)
    assert second.sent - first.finished == 50 * MS  # type: ignore[operator]


def test_requests_queue_for_pages_and_none_is_lost() -> None:
    played = Cluster(pages=12, page_tokens=16).play(many(12, 100, 60))
    played.assert_sound()
    assert all(r.finish_reason == "length" for r in played.records)
    assert max(e.pages_used for e in played.events(ev.Step) if isinstance(e, ev.Step)) <= 12


def test_the_queue_for_decoder_pages_shows_as_a_leg() -> None:
    played = Cluster(pages=12, page_tokens=16, prefills=3).play(many(9, 100, 60))
    played.assert_sound()
    assert any(r.legs and r.legs["decoder_queue"] > 0 for r in played.records)


@pytest.mark.parametrize(
    ("max_tokens", "text", "why"),
    [(5, "", "empty"), (4000, "x" * 200, "context"), (900, "x" * 200, "never fit")],
)
def test_what_can_never_be_served_is_refused_at_once(max_tokens: int, text: str, why: str) -> None:
    played = Cluster().play([one(text, max_tokens), one("y" * 50, 5)][:1])
    (r,) = played.records
    assert r.finish_reason == "rejected"
    assert why in r.detail
    assert r.finished is not None
    assert r.finished < r.sent + MS
    assert not played.events(ev.Admitted)


def test_one_page_short_is_refused_and_one_more_is_served() -> None:
    needs = 200 + 120 - 1
    pages = -(-needs // 16)
    assert Cluster(pages=pages - 1).play([one(TEXT, 120)]).records[0].finish_reason == "rejected"
    played = Cluster(pages=pages).play([one(TEXT, 120)])
    played.assert_sound()
    assert played.records[0].finish_reason == "length"


def test_an_outage_ends_in_an_abort_that_gives_everything_back() -> None:
    async def cut(deployment: Deployment) -> None:
        assert isinstance(deployment.net, SimNet)
        deployment.net.set_rate("wan", 0)
        await deployment.env.sleep(3 * SECOND)
        deployment.net.set_rate("wan", 2_000_000)

    played = Cluster(deadline=2 * SECOND, pages=200).play([one(TEXT, 2000)], during=cut)
    played.assert_sound()
    (r,) = played.records
    assert (r.finish_reason, r.detail) == ("aborted", "deadline exceeded")
    assert r.finished is not None
    assert r.routed is not None
    assert r.routed + 2 * SECOND <= r.finished < r.routed + 2 * SECOND + MS
    assert r.sources.startswith("PR")
    assert "M" not in r.sources


def test_a_deployment_that_cannot_be_connected_says_who_cannot_reach_whom() -> None:
    with pytest.raises(CannotRun, match="gateway cannot reach md0"):
        Cluster(rate=0).play([one(TEXT, 20)])


@pytest.mark.parametrize("after", [0, 1, 5, 12, 20, 40, 60, 120, 200, 260, 300, 400])
def test_a_cancel_at_any_time_gives_everything_back(after: int) -> None:
    """F4, F9: whatever was under way, every role lets go, and what comes late is ignored."""

    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(after * MS)
        deployment.client.stop()

    played = Cluster(rate=400_000, pages=80).play(many(4, 150, 60, every=15 * MS), during=cancel)
    played.assert_sound()
    assert len(played.records) <= 4
    for r in played.records:
        assert r.ids == oracle(prompt_ids(r.prompt), 60)[: len(r.ids)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (KVLayout("other weights", 4, 2, 32, "bfloat16"), "fingerprint"),
        (KVLayout("modelled", 5, 2, 32, "bfloat16"), "layers"),
    ],
)
def test_a_main_that_cannot_take_the_kv_refuses_by_name(wrong: KVLayout, why: str) -> None:
    """F24: nothing is decoded on foreign KV. The relay ends it; where there is none, nobody does,
    however often that is tried.
    """
    for policy in (Pdd(50 * MS), Naive()):
        played = Cluster(policy=policy, layouts={"md0": wrong}).play([one(TEXT, 30)])
        played.assert_sound()
        (r,) = played.records
        refusals = [why for _, why in played.went_on("s0.0")]
        assert refusals
        for text in refusals if isinstance(policy, Pdd) else [*refusals, r.detail]:
            assert f"md0 refuses: {why}" in text
        assert "M" not in r.sources
        assert r.finish_reason == ("length" if isinstance(policy, Pdd) else "aborted")


def test_a_gateway_at_the_main_site_sees_tokens_in_order_too() -> None:
    played = Cluster(gateway_site="b").play(many(6, 150, 50, every=20 * MS))
    played.assert_sound()
    for r in played.records:
        assert r.ids == oracle(prompt_ids(r.prompt), 50)


def test_p_holds_its_pages_until_the_wan_has_them() -> None:
    played = Cluster().play([one(TEXT, 120)])
    (r,) = played.records
    assert r.freed["p0"] >= r.whole["md0"]


def test_the_relay_is_free_one_delay_after_main_is_ready() -> None:
    cluster = Cluster()
    played = cluster.play([one(TEXT, 120)])
    (r,) = played.records
    (sent,) = played.events(ev.HandoffSent)
    step = 2 * MS + 100_000
    assert r.whole["md0"] + cluster.delay < sent.t <= r.whole["md0"] + cluster.delay + step + MS
    assert r.freed["rld0"] == sent.t


def test_nothing_is_sent_before_its_step_has_ended() -> None:
    """F21. The modelled engine writes KV when the charged time has passed; a premature read spoils
    the answer.
    """
    played = Cluster(chunk_tokens=8, rate=None).play([one(TEXT, 30)])
    played.assert_sound()
    ends = [e.t for e in played.events(ev.Step) if isinstance(e, ev.Step) and e.prefill_tokens]
    for sent in played.events(ev.KVSent):
        assert isinstance(sent, ev.KVSent)
        assert sent.end <= 8 * sum(t <= sent.t for t in ends)
    assert played.records[0].ids == oracle(prompt_ids(TEXT), 30)


@pytest.mark.parametrize("seed", range(8))
def test_the_trace_is_a_function_of_scenario_and_seed(seed: int) -> None:
    def digest(seed: int) -> str:
        cluster = Cluster(prefills=2, mains=2, jitter=2 * MS, seed=seed, pages=100)
        return cluster.play(many(10, 120, 30, every=7 * MS)).trace.digest

    assert digest(seed) == digest(seed) != digest(seed + 1)


@pytest.mark.parametrize("shuffle", range(8))
def test_the_order_of_callbacks_of_one_instant_changes_no_token(shuffle: int) -> None:
    plain = Cluster(prefills=2, mains=2).play(many(8, 120, 30))
    shuffled = Cluster(prefills=2, mains=2, shuffle=shuffle).play(many(8, 120, 30))
    shuffled.assert_sound()
    assert {r.id: r.ids for r in shuffled.records} == {r.id: r.ids for r in plain.records}


@pytest.mark.parametrize("gateway_site", ["a", "b"])
@pytest.mark.parametrize("policy", [Naive(), Pdd(0)])
def test_one_token_after_a_prompt_that_fills_its_pages(gateway_site: str, policy: Policy) -> None:
    """F32: no decoder steps past the end; it has no page for that."""
    cluster = Cluster(policy=policy, gateway_site=gateway_site, rate=None)
    played = cluster.play([one("p" * 192, 1)])
    played.assert_sound()
    (r,) = played.records
    assert (r.ids, r.finish_reason) == (oracle(prompt_ids("p" * 192), 1), "length")
    assert not [e for e in played.events(ev.TokensMade) if e.source != "P"]  # type: ignore[attr-defined]


def test_a_cancel_ends_no_transfer_but_its_own() -> None:
    """F8: what is handed to a stream may still wait there for the link. Nobody else gets the stream
    before it is through, so that nobody's abort can drop it.
    """

    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(80 * MS)
        deployment.client.post("gateway", "cancel", request="s1.0")

    sessions = many(2, 200, 20, every=60 * MS)
    played = Cluster(rate=500_000, policy=Naive()).play(sessions, during=cancel)
    played.assert_sound()
    first, second = played.records
    assert (first.finish_reason, first.ids) == ("length", oracle(prompt_ids(first.prompt), 20))
    assert (second.finish_reason, second.detail) == ("aborted", "cancelled by the client")


def test_a_burst_of_long_prompts_does_not_overrun_the_control_streams() -> None:
    """1.5 MB of ids at once, where 1 MiB may be posted: they wait for room, nobody is lost."""
    cluster = Cluster(page_tokens=64, pages=64 * 90, chunk_tokens=4000, fabric=20_000_000)
    played = cluster.play(many(90, 4000, 2), during=_stop_after(120 * MS))
    played.assert_sound()
    assert {r.detail for r in played.records} == {"cancelled by the client"}


def _stop_after(time: Ns) -> Callable[[Deployment], Awaitable[None]]:
    async def stop(deployment: Deployment) -> None:
        await deployment.env.sleep(time)
        deployment.client.stop()

    return stop


def test_a_peer_that_takes_no_control_frames_is_lost_by_name() -> None:
    """A bound of the net is met by the loss of that peer, not by the end of the run; what needed it
    goes on without it.
    """

    async def flood(deployment: Deployment) -> None:
        await deployment.env.sleep(20 * MS)
        assert isinstance(deployment.net, SimNet)
        deployment.net.set_rate("wan", 0)
        for _ in range(60):
            deployment.gateway.post("md0", "close", request="x" * 50_000)
        deployment.net.set_rate("wan", 2_000_000)

    played = Cluster(mains=2).play(many(2, 200, 20), during=flood)
    played.assert_sound()
    routed = {e.main: e.request for e in played.events(ev.Routed)}  # type: ignore[attr-defined]
    [(then, why)] = played.went_on(routed["md0"])
    assert then == "another main"
    assert "md0 does not take its control frames" in why
    assert not played.went_on(routed["md1"])
    assert [r.finish_reason for r in played.records] == ["length"] * 2


def _cut(node: str, peer: str, at: Ns) -> Callable[[Deployment], Awaitable[None]]:
    """Ends the control stream that `node` dialled to `peer`."""

    async def cut(deployment: Deployment) -> None:
        await deployment.env.sleep(at)
        nodes = [*deployment.instances, deployment.gateway, deployment.client]
        next(n for n in nodes if n.name == node).peers[peer].abort()

    return cut


def test_while_the_gateway_is_lost_requests_end_and_then_they_are_answered_again() -> None:
    sessions = [Session(i, i * 40 * MS, (Turn("x" * 100, 20, 0),) * 2) for i in range(4)]
    played = Cluster().play(sessions, during=_cut("client", "gateway", 20 * MS))
    played.assert_sound()
    lost, answered = played.records[:2], played.records[2:]
    assert all(r.finish_reason == "aborted" and "lost the gateway" in r.detail for r in lost)
    assert [r.id for r in answered] == ["s2.0", "s3.0", "s2.1", "s3.1"]
    assert all(r.finish_reason == "length" for r in answered)


def _crash(name: str, at: Ns) -> Callable[[Deployment], Awaitable[None]]:
    async def crash(deployment: Deployment) -> None:
        await deployment.env.sleep(at)
        deployment.crash(name, keep=False)

    return crash


def test_an_instance_that_was_lost_gets_no_more_requests() -> None:
    """F20: those that have another go there, and where there is none they fail at once, by name.
    What was under way goes on.
    """
    sessions = many(8, 100, 20, every=50 * MS)
    spread = Cluster(mains=2).play(sessions, during=_crash("md0", 20 * MS))
    spread.assert_sound()
    assert [r.finish_reason for r in spread.records] == ["length"] * 8
    assert [then for then, _ in spread.went_on("s0.0")] == ["another main"]
    alone = Cluster().play(sessions, during=_crash("md0", 20 * MS))
    assert [r.finish_reason for r in alone.records] == ["length", *["rejected"] * 7]
    assert [then for then, _ in alone.went_on("s0.0")] == ["alone"]
    assert alone.records[1].detail == "no main instance can be reached"
    relayless = Cluster().play(sessions, during=_crash("rld0", 20 * MS))
    relayless.assert_sound()
    assert [r.finish_reason for r in relayless.records] == ["length"] * 8
    assert [then for then, _ in relayless.went_on("s0.0")] == ["takeover"]


def test_an_instance_is_looked_for_until_it_is_found_again() -> None:
    """F8: one broken stream takes nobody out of service for good."""
    sessions = many(8, 100, 20, every=50 * MS)
    played = Cluster().play(sessions, during=_cut("gateway", "md0", 20 * MS))
    played.assert_sound()
    assert played.went_on("s0.0")
    reasons = [r.finish_reason for r in played.records]
    assert reasons[0] == "length"
    assert reasons[-4:] == ["length"] * 4


def test_a_decoder_that_has_lost_the_gateway_takes_no_offer() -> None:
    """It would hold what nobody can end."""

    async def offer_after_a_cut(deployment: Deployment) -> None:
        rld = next(i for i in deployment.instances if i.name == "rld0")
        rld.peers["gateway"].abort()
        await offer(deployment, ghost())

    played = Cluster().play([one("short", 5)], during=offer_after_a_cut)
    played.assert_sound()
    assert not [e for e in played.events(ev.Admitted) if e.request == "ghost"]  # type: ignore[attr-defined]


def test_a_kv_stream_that_ended_while_idle_fails_nobody() -> None:
    """F8: a failure belongs to the request it hit."""

    async def cut(deployment: Deployment) -> None:
        await deployment.env.sleep(SECOND)
        main = next(i for i in deployment.instances if i.name == "md0")
        for conn in list(main._connections):
            if conn not in main.peers.values():
                conn.abort()

    played = Cluster(policy=Naive()).play(many(2, 100, 20, every=2 * SECOND), during=cut)
    played.assert_sound()
    assert [r.finish_reason for r in played.records] == ["length", "length"]


def test_a_waiting_request_that_is_cancelled_lets_those_behind_it_pass() -> None:
    """F9: the head, overtaken often enough, holds up the queue; once gone it must not."""

    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(1500 * MS)
        deployment.client.post("gateway", "cancel", request="s1.0")

    holder, head = one("a" * 1200, 500), one("b" * 600, 600)
    sessions = [holder, replace(head, index=1, start_ns=100 * MS)]
    sessions += [replace(s, index=s.index + 2) for s in many(MAX_OVERTAKEN + 4, 20, 5)]
    sessions[2:] = [replace(s, start_ns=300 * MS) for s in sessions[2:]]
    played = Cluster(policy=Naive(), prefills=2, pages=110).play(sessions, during=cancel)
    played.assert_sound()
    records = {r.id: r for r in played.records}
    assert records["s1.0"].detail == "cancelled by the client"
    gone = records["s1.0"].finished or 0
    late = [r.admitted["md0"] - gone for r in records.values() if r.admitted.get("md0", 0) > gone]
    assert len(late) == 4, "as many as may not overtake"
    assert max(late) < 20 * MS
    assert records["s0.0"].finished > gone + 100 * MS  # type: ignore[operator]


def test_main_is_offered_what_the_relay_has_admitted() -> None:
    """P, RLD, MD: nothing on MD waits for pages of RLD."""
    played = Cluster(pages=14, policy=Pdd(0, "wait"), prefills=4, mains=4).play(many(8, 100, 60))
    played.assert_sound()
    for r in played.records:
        assert r.admitted["rld0"] <= r.admitted[r.main or ""]


def test_a_main_that_is_ready_long_before_the_relay_takes_over_all_the_same() -> None:
    cluster = Cluster(policy=Pdd(0), fabric=10_000, rate=50_000_000, delay=0)
    played = cluster.play([one(TEXT, 40)])
    played.assert_sound()
    (r,) = played.records
    assert r.whole["md0"] < r.whole["rld0"]
    assert (r.sources, r.extend_tokens) == ("P" + "M" * 39, 1)


def ghost() -> Manifest:
    """An offer of p0 to rld0 of a request that the gateway does not know."""
    ids = tuple(range(40))
    digest = prompt_digest(LAYOUT.fingerprint, ids)
    return Manifest("ghost", 99, LAYOUT, ids, digest, 200, Sampling(), "gateway", "rld0", "md0")


async def offer(deployment: Deployment, manifest: Manifest) -> None:
    await deployment.env.sleep(5 * MS)
    prefill = deployment.instances[0]
    prefill.post("rld0", "offer", pack_ids(manifest.prompt), **manifest.fields())
    await deployment.env.sleep(5 * MS)


def test_a_decoder_whose_close_came_before_the_offer_is_told_again() -> None:
    """It holds KV that nobody will withdraw; its own notice brings the close."""

    async def haunt(deployment: Deployment) -> None:
        manifest, prefill = ghost(), deployment.instances[0]
        await offer(deployment, manifest)
        kv = bytes(40 * LAYOUT.bytes_per_token)
        prefill.post("rld0", "kv", kv, request="ghost", epoch=99, start=0, end=40)
        first = {"position": 40, "id": 5, "logprobs": None}
        prefill.post("rld0", "first", request="ghost", epoch=99, **first)

    played = Cluster().play([one(TEXT, 20)], during=haunt)
    played.assert_sound()
    (came,) = [e.t for e in played.events(ev.Admitted) if e.request == "ghost"]  # type: ignore[attr-defined]
    (went,) = [e.t for e in played.events(ev.Freed) if e.request == "ghost"]  # type: ignore[attr-defined]
    assert went - came < 10 * MS


@pytest.mark.parametrize(
    ("kind", "payload", "fields"),
    [
        ("kv", b"short", {"start": 0, "end": 40}),
        ("kv", b"", {"start": 10**6, "end": 10**6}),
        ("kv", b"", {"start": None, "end": 40}),
        ("first", b"", {"position": 41, "id": 5, "logprobs": None}),
        ("first", b"", {"position": 40, "id": -5, "logprobs": None}),
        ("ready", b"", {}),
    ],
)
def test_a_frame_that_cannot_be_ends_its_request_and_nothing_else(
    kind: str, payload: bytes, fields: dict[str, object]
) -> None:
    async def garble(deployment: Deployment) -> None:
        await offer(deployment, ghost())
        prefill = deployment.instances[0]
        prefill.post("rld0", kind, payload, request="ghost", epoch=99, **fields)

    played = Cluster().play([one(TEXT, 120)], during=garble)
    played.assert_sound()
    assert played.records[0].ids == oracle(prompt_ids(TEXT), 120)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(range(20), "here already"), ([], "empty"), (range(5000), "never fit")],
)
def test_prefill_refuses_what_it_cannot_take(tokens: Sequence[int], why: str) -> None:
    heard: list[str] = []

    async def ask(deployment: Deployment) -> None:
        await deployment.env.sleep(5 * MS)
        gateway, name = deployment.gateway, "s0.0" if tokens == range(20) else "other"
        gateway.on_failed = lambda _conn, frame: heard.append(frame["detail"])  # type: ignore[method-assign]
        gateway.post(
            "p0",
            "prefill",
            pack_ids(tokens),
            request=name,
            relay=None,
            main="md0",
            max_tokens=5,
            sampling=astuple(Sampling()),
            lease_ns=SECOND,
            begin_ns=None,
            held=False,
        )

    played = Cluster().play([one(TEXT, 40)], during=ask)
    played.assert_sound()
    assert played.records[0].ids == oracle(prompt_ids(TEXT), 40)
    assert [why in detail for detail in heard if detail.startswith("p0:")] == [True]


def test_a_turn_that_the_chat_template_refuses_is_rejected() -> None:
    class OneTurn(ByteTokenizer):
        def follow_up(self, text: str, *, after_eos: bool) -> list[int]:
            raise BadInput("no second turn")

    async def exchange(deployment: Deployment) -> None:
        deployment.gateway.tokenizer = OneTurn()

    turns = (Turn("first", 5, 0), Turn("second", 5, 0), Turn("third", 5, 0))
    played = Cluster().play([Session(0, 0, turns)], during=exchange)
    played.assert_sound()
    assert [(r.finish_reason, r.detail) for r in played.records] == [
        ("length", ""),
        ("rejected", "no second turn"),
    ]


def test_a_submission_that_makes_no_sense_is_answered() -> None:
    async def garble(deployment: Deployment) -> None:
        await deployment.env.sleep(5 * MS)
        client = deployment.client
        client.post("gateway", "submit", b"xyz", request="s0.0", text="x", max_tokens=0)

    played = Cluster().play([one(TEXT, 40)], during=garble)
    (r,) = played.records
    assert (r.finish_reason, "frame 'submit'" in r.detail) == ("rejected", True)


def test_a_stranger_is_no_instance() -> None:
    async def intrude(deployment: Deployment) -> None:
        conn = await deployment.net.connect("rld0", "gateway")
        conn.post(Frame("open", {"purpose": "kv"}))
        about = {"role": "main", "kv_tokens": 1, "max_context": 1, "bytes_per_token": 1}
        conn.post(Frame("hello", about))

    played = Cluster().play([one(TEXT, 40, start=50 * MS)], during=intrude)
    played.assert_sound()
    assert played.records[0].finish_reason == "length"


@pytest.mark.parametrize("sizes", [{"p0": 1}, {"md0": 64, "rld0": 5}, {"p0": 64, "md0": 1}])
def test_instances_may_differ_in_page_size(sizes: dict[str, int]) -> None:
    """F24: the wire speaks positions."""
    cluster = Cluster(page_sizes=sizes)
    later = Session(1, 2 * SECOND, (Turn(TEXT + "and more", 60),))
    played = cluster.play([one(TEXT, 120), later])
    played.assert_sound()
    first, second = played.records
    assert first.ids == oracle(prompt_ids(TEXT), 120)
    assert second.ids == oracle(prompt_ids(TEXT + "and more"), 60)
    assert second.cached["prefill"] == second.cached["main"] == 200


@pytest.mark.parametrize(
    ("p", "md"), [("bfloat16", "float32"), ("float64", "bfloat16"), ("float32", "float16")]
)
def test_kv_of_another_dtype_is_converted_on_arrival(p: str, md: str) -> None:
    layouts = {"p0": replace(LAYOUT, dtype=p), "rld0": replace(LAYOUT, dtype=md)}
    layouts["md0"] = layouts["rld0"]
    played = Cluster(layouts=layouts).play([one(TEXT, 160)])
    played.assert_sound()
    (r,) = played.records
    assert r.ids == oracle(prompt_ids(TEXT), 160)
    assert r.kv_received["md0"] == 200 * layouts["p0"].bytes_per_token, "it crosses as P has it"


def decoder_pages(pages: int) -> Played:
    """Two requests of 100 tokens and 40 more, the second 20 ms after the first, on `pages` at
    MD.
    """
    return Cluster(policy=Naive(), prefills=2, page_sizes={}, pages=pages).play(
        many(2, 100, 40, every=20 * MS)
    )


def test_one_page_short_queues_and_one_more_does_not() -> None:
    """A decoder admits with room for the prompt and one token: 7 pages of 16 for 101."""
    for pages, queues in ((14, False), (13, True)):
        played = decoder_pages(pages)
        played.assert_sound()
        first, second = played.records
        waits = second.admitted["md0"] > (first.finished or 0)
        assert waits == queues, pages


def test_the_last_to_come_is_preempted_and_rebuilt_from_its_ids() -> None:
    """F41: P is not asked again; nothing of the answer is lost or made twice."""
    played = decoder_pages(15)
    played.assert_sound()
    preempted = [e for e in played.events(ev.Preempted) if isinstance(e, ev.Preempted)]
    assert {e.request for e in preempted} == {"s1.0"}
    assert {e.instance for e in preempted} == {"md0"}
    for r in played.records:
        assert r.ids == oracle(prompt_ids(r.prompt), 40)
        assert r.kv_received["md0"] == 100 * LAYOUT.bytes_per_token, "sent once"
        assert r.made == {"P": 1, "M": 39}


@pytest.mark.parametrize("pages", [12, 14, 17, 22])
@pytest.mark.parametrize("page_tokens", [5, 16])
def test_under_preemption_every_answer_is_still_the_oracles(pages: int, page_tokens: int) -> None:
    cluster = Cluster(prefills=2, page_tokens=page_tokens, pages=pages * 16 // page_tokens)
    played = cluster.play(many(10, 90, 80, every=15 * MS))
    played.assert_sound()
    assert played.events(ev.Preempted)
    for r in played.records:
        assert r.ids == oracle(prompt_ids(r.prompt), 80)


def test_kv_that_crosses_long_after_the_answer_is_no_leak() -> None:
    """200 tokens of KV take 100 s; RLD has answered after one, and the run waits for MD's cache."""
    played = Cluster(rate=2_000, policy=Pdd(0)).play([one("p" * 200, 8)])
    played.assert_sound()
    (record,) = played.records
    assert record.sources == "P" + "R" * 7
    assert record.finished is not None
    assert record.whole["md0"] > record.finished + 60 * SECOND
