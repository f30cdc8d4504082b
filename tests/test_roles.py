"""The roles together, on modelled engines in virtual time: what a deployment must do, message by
message.
"""

from __future__ import annotations

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.tokens import ByteTokenizer
from pddrt.errors import CannotRun
from pddrt.metrics import LEGS
from pddrt.netem.simnet import SimNet
from pddrt.policy.route import Naive
from pddrt.types import MS, SECOND, KVLayout, Sampling
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, many, one, oracle

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


def test_an_answer_that_ends_on_the_relay_cancels_the_transfer() -> None:
    played = Cluster(rate=100_000).play([one(TEXT, 8)])
    played.assert_sound()
    (r,) = played.records
    assert r.sources == "P" + "R" * 7
    assert [
        e.dst for e in played.events(ev.TransferCancelled) if isinstance(e, ev.TransferCancelled)
    ] == ["md0"]
    assert r.kv_received.get("md0", 0) < 200 * LAYOUT.bytes_per_token, "the rest never crossed"


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
        (KVLayout("modelled", 4, 2, 32, "float32"), "dtype"),
        (KVLayout("modelled", 5, 2, 32, "bfloat16"), "layers"),
    ],
)
def test_a_main_that_cannot_take_the_kv_refuses_by_name(wrong: KVLayout, why: str) -> None:
    """F24: nothing is decoded on foreign KV."""
    played = Cluster(layouts={"md0": wrong}).play([one(TEXT, 30)])
    played.assert_sound()
    (r,) = played.records
    assert r.finish_reason == "aborted"
    assert "md0 refuses" in r.detail
    assert why in r.detail
    assert "M" not in r.sources


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
