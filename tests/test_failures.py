"""Kinds of failure seen in other systems, each with the tests here that fail without its guard.

F1   stale or foreign KV is never served          test_failures.test_F1_kv_of_another_epoch_is_never_served
                                                  test_protocol.test_a_prompt_that_is_not_the_digests_is_refused
F3   a peer that never answers                    test_failures.test_F3_a_sender_that_falls_silent_strands_no_pages
                                                  test_failures.test_F3_a_receiver_that_never_answers_strands_no_pages
F4   the client drops after prefill               test_roles.test_a_cancel_at_any_time_gives_everything_back
F6   a deadline in one state only                 test_failures.test_F6_a_deadline_ends_a_request_wherever_it_is_stuck
F7   pages leak behind a prefix that was there    test_radix.test_f7_a_prefix_that_was_there_already_leaks_no_page
                                                  test_caching.test_a_cancelled_request_leaves_what_was_cached_sound
F8   one broken stream is no dead peer            test_roles.test_an_instance_is_looked_for_until_it_is_found_again
                                                  test_faults.test_an_instance_that_crashes_serves_again_when_it_is_back
F9   cancel reaches everybody                     test_failures.test_F9_a_cancel_reaches_every_role_and_stream_and_what_is_behind_goes_on
                                                  test_roles.test_a_waiting_request_that_is_cancelled_lets_those_behind_it_pass
F11  prefill aborts                               test_failures.test_F11_a_prefill_that_aborts_tells_its_decoders
F13  a peer that dies during the handshake        test_failures.test_F13_who_does_not_answer_an_offer_is_given_up_by_name
F14  no hold-and-wait over the three pools        test_failures.test_F14_pools_that_fit_one_request_each_serve_all
                                                  test_roles.test_main_is_offered_what_the_relay_has_admitted
F16  queueing is no silence                       test_failures.test_F16_a_long_queue_times_nobody_out
F18  any partition, each position once            test_protocol.test_kv_is_taken_in_any_partition_and_order
                                                  test_protocol.test_a_range_that_comes_twice_or_lies_outside_is_refused
F20  nobody to decode                             test_pipelines.test_F20_without_a_main_decoder_requests_fail_at_once_by_name
                                                  test_pipelines.test_F20_without_a_main_decoder_requests_finish_where_a_policy_allows_it
                                                  test_router.test_a_group_that_is_left_by_all_of_a_role_refuses_by_name
F21  sent before it was computed                  test_roles.test_nothing_is_sent_before_its_step_has_ended
F22  initialised after KV had come                test_failures.test_F22_an_engine_that_starts_late_wipes_no_kv
F24  another dtype, page size or layout           test_roles.test_a_main_that_cannot_take_the_kv_refuses_by_name
                                                  test_roles.test_instances_may_differ_in_page_size
                                                  test_roles.test_kv_of_another_dtype_is_converted_on_arrival
F25  digests that differ or collide               test_radix.test_f25_digests_are_the_same_in_every_process
                                                  test_radix.test_f25_equal_pages_behind_different_prefixes_have_different_digests_and_kv
F26  a prefix evicted before its use              test_radix.test_f26_a_matched_prefix_cannot_be_evicted_before_it_is_used
                                                  test_radix.test_f26_a_hit_that_was_not_locked_in_time_is_refused
F28  the join within a page                       test_caching.test_a_hit_may_end_anywhere_in_a_page
                                                  test_radix.test_f28_two_sequences_append_behind_a_shared_partial_page_at_every_offset
F29  who computes the KV of the last token        test_roles.test_main_extends_over_exactly_the_ids_it_was_sent
                                                  test_protocol.test_the_last_token_needs_no_kv
F30  near ties                                    test_verify.test_whatever_rounding_can_draw_is_within_its_error
F32  max_tokens 1                                 test_roles.test_very_short_answers_end_where_they_end
                                                  test_roles.test_one_token_after_a_prompt_that_fills_its_pages
F33  end of sequence as the first token           test_roles.test_end_of_sequence_ends_the_answer_wherever_it_falls
F34  a stop string across the handoff             test_answers.test_F34_a_stop_string_across_the_switch_ends_the_answer
                                                  test_finish.test_F34_any_frames_in_any_order_give_the_text_and_end_of_the_whole
F36  log-probabilities of the first token         test_answers.test_F36_the_first_token_comes_with_its_log_probabilities
F38  sampler state at the handoff                 test_failures.test_F38_every_maker_draws_with_the_requests_own_seed
                                                  test_engine.test_a_draw_is_the_same_alone_in_a_batch_on_another_engine_and_after_a_handoff
F39  a token doubled or lost at the seam          test_failures.test_F39_ids_that_come_twice_or_out_of_order_are_one_stream
F41  a preempted decoder                          test_roles.test_the_last_to_come_is_preempted_and_rebuilt_from_its_ids
F42  bound to its prefill instance and epoch      test_failures.test_F42_nobody_but_its_own_prefill_instance_speaks_for_a_request
F43  TTFT stamped once, legs add up               test_failures.test_F43_preemption_stamps_no_leg_again
                                                  test_roles.test_the_legs_of_ttft_add_up
F45  affinity herds all traffic                   test_router.test_F45_a_common_prefix_does_not_draw_all_traffic
                                                  test_router.test_requests_within_one_signals_age_spread_out
F46  many transfers at once                       test_router.test_F46_so_many_transfers_at_once_and_the_last_gets_its_share
F47  what is cached does not count                test_route.test_F47_what_counts_is_what_main_lacks_and_never_the_whole_prompt

And of network emulators:

E1   bandwidth off by a factor with small writes  test_link.test_a_million_items_pushed_one_by_one_do_not_drift
                                                  test_link.test_random_programs_agree_with_exact_arithmetic
E2   delay added per write                        test_link.test_the_delay_is_paid_once_per_byte_not_once_per_item
E3   no bound, no back-pressure                   test_simnet.test_the_send_buffer_is_bounded_to_the_byte
                                                  test_net.test_a_reader_that_lags_stops_the_sender
E4   bytes stay queued after a cancel             test_link.test_cancel_frees_the_share_at_once_and_keeps_what_has_left
                                                  test_net.test_abort_drops_the_queue_and_the_peer_learns_of_it
E5   jitter reorders a stream                     test_link.test_jitter_never_reorders_a_flow_and_is_not_biased_by_that
                                                  test_simnet.test_jitter_keeps_order_and_shows_in_the_arrivals
E6   two flows get one cap each                   test_link.test_two_flows_get_half_each
                                                  test_simnet.test_flows_share_the_bottleneck_equally_whatever_their_frames
E7   a new rate waits for the old queue           test_link.test_a_new_rate_holds_for_what_is_half_served
                                                  test_simnet.test_a_rate_change_and_an_outage_act_at_once
E8   timers rounded to a millisecond              test_failures.test_E8_timers_of_whole_milliseconds_slow_no_link_down
E9   delays drift                                 test_link.test_a_backlogged_flow_does_not_drift

`guards` takes the guard of each row out and looks whether these tests notice.
"""  # noqa: E501

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple
from importlib import import_module
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.model import NEVER, ModelEngine
from pddrt.engine.model import oracle as judge
from pddrt.engine.tokens import ByteTokenizer
from pddrt.env import Timer, VirtualEnv
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Manifest, chain, prompt_digest
from pddrt.netem.net import Connection
from pddrt.netem.simnet import SimNet
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.route import Alone, Naive, Pdd, RelayOnly
from pddrt.roles.attempts import Recovery
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import LEASE_GRACE
from pddrt.types import MS, SECOND, Ns, Sampling
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, VOCAB, Cluster, Played, many, one, oracle
from .kept import KeptTrace
from .netlab import on, wire_size, world
from .test_faults import suffers

TEXT = "p" * 200
IDS = ByteTokenizer().chat(TEXT)

WANTED = (
    *(
        1,
        3,
        4,
        6,
        7,
        8,
        9,
        11,
        13,
        14,
        16,
        18,
        20,
        21,
        22,
        24,
        25,
        26,
        28,
        29,
        30,
        32,
        33,
        34,
        36,
        38,
    ),
    *(39, 41, 42, 43, 45, 46, 47),
)


def test_the_table_names_tests_that_exist() -> None:
    from .guards import rows  # it reads this table

    assert list(rows()) == [*(f"F{n}" for n in WANTED), *(f"E{n}" for n in range(1, 10))]
    for path in (path for row in rows().values() for path in row):
        module, _, test = path.removeprefix("tests/").partition(".py::")
        assert callable(getattr(import_module(f"tests.{module}"), test, None)), path


def events(played: Played, kind: type[Any], request: str) -> list[Any]:
    return [e for e in played.trace.events if isinstance(e, kind) and e.request == request]


def instance(deployment: Deployment, name: str) -> Any:
    return next(i for i in deployment.instances if i.name == name)


def manifest(request: str = "ghost", epoch: int = 99) -> Manifest:
    """An offer of p0 to rld0, of a request that the gateway does not know."""
    ids = tuple(range(40))
    digest = prompt_digest(LAYOUT.fingerprint, ids)
    return Manifest(request, epoch, LAYOUT, ids, digest, 20, Sampling(), "gateway", "rld0", "md0")


def offer(deployment: Deployment, what: Manifest) -> None:
    instance(deployment, "p0").post("rld0", "offer", pack_ids(what.prompt), **what.fields())


KV = bytes(40 * LAYOUT.bytes_per_token)


def test_F1_kv_of_another_epoch_is_never_served() -> None:
    """Of an earlier attempt of the same request, say: it is dropped, whatever it says it is."""

    async def haunt(deployment: Deployment) -> None:
        offer(deployment, manifest(epoch=99))
        await deployment.env.sleep(5 * MS)
        p0 = instance(deployment, "p0")
        p0.post("rld0", "kv", KV, request="ghost", epoch=98, start=0, end=40)
        first = {"position": 40, "id": 5, "logprobs": None}
        p0.post("rld0", "first", request="ghost", epoch=98, **first)
        await deployment.env.sleep(5 * MS)
        p0.post("rld0", "withdraw", request="ghost", epoch=99)

    played = Cluster().play([one(TEXT, 20)], during=haunt)
    played.assert_sound()
    assert events(played, ev.Admitted, "ghost")
    assert not events(played, ev.KVReceived, "ghost")
    assert not events(played, ev.KVWhole, "ghost")


def test_F3_a_sender_that_falls_silent_strands_no_pages() -> None:
    """It offered, and then nothing: the decoder's own lease ends it, not the gateway, which never
    heard of it.
    """

    async def haunt(deployment: Deployment) -> None:
        offer(deployment, manifest())

    played = Cluster(deadline=2 * SECOND).play([one(TEXT, 20)], during=haunt)
    played.assert_sound()
    (came,), (went,) = events(played, ev.Admitted, "ghost"), events(played, ev.Freed, "ghost")
    assert 0 <= went.t - came.t - (2 * SECOND + LEASE_GRACE) < 10 * MS


def test_F3_a_receiver_that_never_answers_strands_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "on_offer", lambda self, conn, frame: None)

    async def ask(deployment: Deployment) -> None:
        fields = {"request": "ghost", "relay": None, "main": "md0", "max_tokens": 5}
        fields |= {
            "sampling": astuple(Sampling()),
            "lease_ns": 3 * SECOND,
            "held": False,
            "begin_ns": None,
        }
        deployment.gateway.post("p0", "prefill", pack_ids(range(40)), **fields)

    played = Cluster(deadline=2 * SECOND).play([one(TEXT, 20)], during=ask)
    played.assert_sound()
    (came,), (went,) = events(played, ev.Admitted, "ghost"), events(played, ev.Freed, "ghost")
    assert 0 <= went.t - came.t - 3 * SECOND < 10 * MS
    assert played.records[0].detail == "deadline exceeded"


STUCK: dict[str, tuple[str, dict[str, Any]]] = {
    "queued": ("do: pause, instance: p0, at: 0 s", {}),
    "waiting for memory of P": ("do: pages-taken, instance: p0, share: 1.0, at: 0 s", {}),
    "computed": ("do: pause, instance: p0, on: {event: PrefillStarted}", {}),
    "offered": ("do: pages-taken, instance: md0, share: 1.0, at: 0 s", {"policy": Naive()}),
    "KV crossing": ("do: link-down, link: wan, on: {event: PrefillStarted}", {"policy": Naive()}),
    "relayed": ("do: pause, instance: rld0, on: {event: TokensReceived, nth: 4}", {}),
    "handed over": ("do: pause, instance: md0, on: {event: HandoffTaken}", {}),
    "ended by MD": ("do: pause, instance: md0, on: {event: TokensReceived, source: M, nth: 4}", {}),
    "served alone": (
        "do: pause, instance: md0, on: {event: PrefillStarted}",
        {"policy": Alone("main")},
    ),
}


@pytest.mark.parametrize("where", STUCK)
def test_F6_a_deadline_ends_a_request_wherever_it_is_stuck(where: str) -> None:
    """At the same moment in every state, and nothing is kept by anybody."""
    fault, about = STUCK[where]
    deadline, grace = 2 * SECOND, 4 * 15 * MS
    cluster = Cluster(deadline=deadline, **{"policy": Pdd(0), "rate": 500_000, **about})
    played = suffers(f"- {{{fault}}}", cluster, [one(TEXT, 300)])
    (r,) = played.records
    assert (r.finish_reason, r.detail) == ("aborted", "deadline exceeded")
    assert 0 <= (r.finished or 0) - r.sent - deadline <= grace


STEP: int = 6 * MS
"""No step of these tests takes longer."""


@pytest.mark.parametrize("after", [5, 25, 60, 200, 800])
def test_F9_a_cancel_reaches_every_role_and_stream_and_what_is_behind_goes_on(after: int) -> None:
    """While it computes, sends to both, decodes on RLD. Behind it waits a request for P's pages,
    which the first held for a second; once that is cancelled it is as fast as if it were alone.
    """
    when: list[int] = []

    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(after * MS)
        when.append(deployment.env.now())
        deployment.client.post("gateway", "cancel", request="s0.0")

    cluster = Cluster(policy=Pdd(0), rate=200_000, max_transfers=1, pages_of={"p0": 14})
    first, second = one(TEXT, 700), Session(1, 2 * MS, (Turn("q" * 200, 40, 0),))
    (alone,) = cluster.play([second]).records
    played = cluster.play([first, second], during=cancel)
    played.assert_sound()
    cancelled, behind = played.records
    assert cancelled.detail == "cancelled by the client"
    freed = events(played, ev.Freed, "s0.0")
    assert {e.instance for e in freed} == set(cancelled.admitted)
    assert all(when[0] < e.t <= when[0] + STEP + cluster.delay for e in freed)
    sent = {e.dst for e in events(played, ev.KVSent, "s0.0")}
    late = [e for e in events(played, ev.KVReceived, "s0.0") if e.t > when[0] + cluster.delay]
    assert not late, "what had not left was dropped"
    assert sent <= {"rld0", "md0"}
    assert behind.ids == oracle(behind.prompt_ids, 40)
    assert behind.admitted["p0"] <= when[0] + STEP
    for instance, least in (("rld0", STEP), ("md0", STEP)):
        takes = behind.whole[instance] - behind.admitted["p0"]
        assert takes <= alone.whole[instance] - alone.admitted["p0"] + least


@pytest.mark.parametrize("silent", ["rld0", "md0"])
@pytest.mark.parametrize("relayed", [True, False])
def test_F13_who_does_not_answer_an_offer_is_given_up_by_name(silent: str, relayed: bool) -> None:
    """Its stream is open, and it says nothing. The deadline of the request is ten minutes. Whoever
    is left of the two decoders goes on; one who is alone is asked as often as may be.
    """

    async def hush(deployment: Deployment) -> None:
        deployment.instance(silent).on_offer = lambda conn, frame: None  # type: ignore[attr-defined]

    policy: Any = Pdd(0) if relayed else RelayOnly(0) if silent == "rld0" else Naive()
    played = Cluster(policy=policy, handshake=SECOND).play([one(TEXT, 700)], during=hush)
    played.assert_sound()
    (r,) = played.records
    why = f"{silent} has not answered an offer in 1 s"
    if relayed:
        assert played.went_on("s0.0") == [("takeover" if silent == "rld0" else "alone", why)]
        assert r.ids == oracle(IDS, 700)
        return
    assert played.went_on("s0.0") == [("again", why)] * Recovery().retries
    assert (r.finish_reason, r.detail) == ("aborted", why)
    assert 4 * SECOND <= (r.finished or 0) - (r.routed or 0) < 5 * SECOND


def test_F16_a_long_queue_times_nobody_out() -> None:
    """Twenty requests wait for MD's memory, which one fills: longer than the handshake and than
    MD's lease, which are for who is silent, and for who holds memory.
    """

    async def shorten(deployment: Deployment) -> None:
        decoder = deployment.instance("md0")
        assert isinstance(decoder, Decoder)
        decoder.lease = SECOND

    cluster = Cluster(policy=Naive(), pages=400, pages_of={"md0": 15}, handshake=200 * MS)
    played = cluster.play(many(20, 200, 30), during=shorten)
    played.assert_sound()
    waits = [r.admitted["md0"] - r.admitted["p0"] for r in played.records]
    assert max(waits) > 2 * SECOND
    assert all(r.finish_reason == "length" for r in played.records)


@pytest.mark.parametrize("roomy", [(), ("p0", "p1"), ("rld0",), ("md0",), ("p0", "p1", "rld0")])
@pytest.mark.parametrize("kind", ["relayed", "mixed", "resumed"])
def test_F14_pools_that_fit_one_request_each_serve_all(roomy: tuple[str, ...], kind: str) -> None:
    """Two P, one RLD, one MD, one transfer at a time; some fit three, so that the others are
    short of what those wait for. Whoever waits for a pool holds none further down.
    """
    names = ("p0", "p1", "rld0", "md0")
    cluster = Cluster(
        prefills=2,
        max_transfers=1,
        policy=Pdd(0, "wait") if kind != "mixed" else Pdd(0, "p-md"),
        pages_of={name: 14 * (3 if name in roomy else 1) for name in names},
        anomaly=Anomaly(0, 5, share=1.0, guess="session") if kind == "resumed" else None,
    )
    turns = Turn("a" * 20, 3, 0), Turn("b" * 150, 25, 0)
    sessions = [Session(i, i * 15 * MS, turns) for i in range(10)]
    played = cluster.play(sessions if kind == "resumed" else many(10, 190, 20, every=15 * MS))
    played.assert_sound()
    assert any(isinstance(e, ev.Resumed) for e in played.trace.events) == (kind == "resumed")
    for r in played.records:
        assert r.finish_reason == "length", r.detail
        way = [r.admitted[name] for name in (r.prefill, r.relay, r.main) if name in r.admitted]
        assert way == sorted(way)


@pytest.mark.parametrize("after", [30, 60, 100])
def test_F11_a_prefill_that_aborts_tells_its_decoders(after: int) -> None:
    """While it computes, while it sends: nothing is decoded, nobody waits for a lease. Its word to
    the gateway, which would end it there as well, gets lost.
    """
    told: list[str] = []

    async def abort(deployment: Deployment) -> None:
        await deployment.env.sleep(after * MS)
        p0 = instance(deployment, "p0")
        p0.tell_failed = lambda _gateway, request, *_: told.append(request)
        p0.fail("s0.0", "its memory is broken")
        await deployment.env.sleep(100 * MS)
        deployment.gateway.fail("s0.0", "given up")

    played = Cluster(rate=500_000, policy=Naive()).play([one(TEXT, 60)], during=abort)
    played.assert_sound()
    assert (told, played.records[0].detail) == (["s0.0"], "given up")
    (admitted,) = [e for e in events(played, ev.Admitted, "s0.0") if e.instance == "md0"]
    (freed,) = [e for e in events(played, ev.Freed, "s0.0") if e.instance == "md0"]
    (gave_up,) = events(played, ev.TransferCancelled, "s0.0")
    assert 0 <= freed.t - max(gave_up.t, admitted.t) <= 40 * MS
    assert not [e for e in events(played, ev.TokensMade, "s0.0") if e.source != "P"]


def test_F22_an_engine_that_starts_late_wipes_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting takes 0.2 s here and leaves every slot as new: nothing may come in before."""

    async def start(engine: ModelEngine) -> None:
        await engine.env.sleep(200 * MS)
        engine._tags[:] = NEVER

    monkeypatch.setattr(ModelEngine, "start", start)
    played = Cluster().play([one(TEXT, 120)])
    played.assert_sound()
    assert played.records[0].ids == oracle(IDS, 120)


@pytest.mark.parametrize("prompt_len", [20, 200])
def test_F38_every_maker_draws_with_the_requests_own_seed(prompt_len: int) -> None:
    """P, RLD and MD; judged id by id."""
    played = Cluster(sampling=Sampling(temperature=1.0)).play(many(2, prompt_len, 160))
    played.assert_sound()
    assert "M" in played.records[0].sources
    assert ("R" in played.records[0].sources) == (prompt_len == 200)
    for r in played.records:
        assert r.sampling.seed
        assert judge(r.prompt_ids, r.ids, r.sampling, vocab=VOCAB) == r.ids
    first, second = (r.sampling.seed for r in played.records)
    assert first != second


def test_F39_ids_that_come_twice_or_out_of_order_are_one_stream() -> None:
    """The relay says everything again, in pieces and backwards, while the answer goes on."""

    answer = oracle(IDS, 120)

    async def repeat(deployment: Deployment) -> None:
        rld = instance(deployment, "rld0")
        for _ in range(20):
            await deployment.env.sleep(15 * MS)
            made = len(deployment.gateway._streams["s0.0"].answer.made)
            for at in reversed(range(made)):
                ids = pack_ids(answer[at : at + 3] if at + 3 <= made else answer[at:made])
                about = {"request": "s0.0", "start": len(IDS) + at, "source": "R"}
                follows = {"after": chain(answer[:at]), "logprobs": None}
                rld.post("gateway", "tokens", ids, **about, **follows)

    played = Cluster().play([one(TEXT, 120)], during=repeat)
    played.assert_sound()
    (r,) = played.records
    assert r.ids == answer
    assert r.sources == "P" + "R" * r.sources.count("R") + "M" * r.sources.count("M")


@pytest.mark.parametrize("kind", ["kv", "first", "withdraw"])
def test_F42_nobody_but_its_own_prefill_instance_speaks_for_a_request(kind: str) -> None:
    """KV that another one has, of the right epoch even, is none of this request's."""
    about: dict[str, Any] = {"kv": {"start": 199, "end": 200}, "withdraw": {}}.get(
        kind, {"position": 200, "id": 5, "logprobs": None}
    )

    async def intrude(deployment: Deployment) -> None:
        md, p1 = instance(deployment, "md0"), instance(deployment, "p1")
        while "s0.0" not in md._entries or not md._entries["s0.0"].admitted:
            await deployment.env.sleep(MS)
        entry = md._entries["s0.0"]
        assert entry.prefill == "p0"
        payload = bytes(LAYOUT.bytes_per_token) if kind == "kv" else b""
        p1.post("md0", kind, payload, request="s0.0", epoch=entry.manifest.epoch, **about)

    cluster = Cluster(prefills=2, policy=Naive(), rate=500_000)
    played = cluster.play([one(TEXT, 30)], during=intrude)
    played.assert_sound()
    assert played.records[0].ids == oracle(IDS, 30)


def test_F43_preemption_stamps_no_leg_again() -> None:
    """A request that is admitted a second time keeps the TTFT that its user had."""
    cluster = Cluster(policy=Naive(), prefills=2, pages=15)
    played = cluster.play(many(2, 100, 40, every=20 * MS))
    played.assert_sound()
    (again,) = {e.request for e in played.trace.events if isinstance(e, ev.Preempted)}
    r = next(r for r in played.records if r.id == again)
    admitted = [e for e in events(played, ev.Admitted, again) if e.instance == "md0"]
    assert len(admitted) > 1
    assert (r.admitted["md0"], r.hits["md0"]) == (admitted[0].t, admitted[0].hit)
    (first,) = [e.t for e in events(played, ev.TokensReceived, again) if e.start == 0]
    assert r.legs is not None
    assert sum(r.legs.values()) == r.ttft == first - r.sent


class Coarse(VirtualEnv):
    """A clock whose timers ring in whole milliseconds, as those of some loops do."""

    def call_at(self, when: Ns, callback: Callable[..., Any], *args: Any) -> Timer:
        return super().call_at(-(-when // MS) * MS, callback, *args)


def test_E8_timers_of_whole_milliseconds_slow_no_link_down() -> None:
    """1 GB/s: 64 KB go out in a fifteenth of a tick."""
    rate, frame, count = 1_000_000_000, Frame("kv", {}, bytes(64_000)), 1000

    async def main() -> None:
        env = Coarse(1, KeptTrace())
        net, accepted = SimNet(env, world(rate)), asyncio.Queue[Connection]()
        await net.listen("m", accepted.put)
        near, far = await net.connect("p", "m"), await accepted.get()
        begun = env.now()

        async def send() -> None:
            for _ in range(count):
                await near.send(frame)

        sending = asyncio.create_task(send())
        for _ in range(count):
            await far.recv()
        await sending
        takes = count * wire_size(frame) * SECOND // rate
        assert takes <= env.now() - begun <= takes + 2 * MS
        await net.close()

    on("sim", main)
