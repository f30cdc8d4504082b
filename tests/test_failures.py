"""Kinds of failure seen in other systems, each with the tests here that fail without its guard.

F1   stale or foreign KV is never served          test_failures.test_F1_kv_of_another_epoch_is_never_served
                                                  test_protocol.test_a_prompt_that_is_not_the_digests_is_refused
F3   a peer that never answers                    test_failures.test_F3_a_sender_that_falls_silent_strands_no_pages
                                                  test_failures.test_F3_a_receiver_that_never_answers_strands_no_pages
F4   the client drops after prefill               test_roles.test_a_cancel_at_any_time_gives_everything_back
F7   pages leak behind a prefix that was there    test_radix.test_f7_a_prefix_that_was_there_already_leaks_no_page
                                                  test_caching.test_a_cancelled_request_leaves_what_was_cached_sound
F11  prefill aborts                               test_failures.test_F11_a_prefill_that_aborts_tells_its_decoders
F18  any partition, each position once            test_protocol.test_kv_is_taken_in_any_partition_and_order
                                                  test_protocol.test_a_range_that_comes_twice_or_lies_outside_is_refused
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
F38  sampler state at the handoff                 test_failures.test_F38_every_maker_draws_with_the_requests_own_seed
                                                  test_engine.test_a_draw_is_the_same_alone_in_a_batch_on_another_engine_and_after_a_handoff
F39  a token doubled or lost at the seam          test_failures.test_F39_ids_that_come_twice_or_out_of_order_are_one_stream
F41  a preempted decoder                          test_roles.test_the_last_to_come_is_preempted_and_rebuilt_from_its_ids
F42  bound to its prefill instance and epoch      test_failures.test_F42_nobody_but_its_own_prefill_instance_speaks_for_a_request
F43  TTFT stamped once, legs add up               test_failures.test_F43_preemption_stamps_no_leg_again
                                                  test_roles.test_the_legs_of_ttft_add_up
"""  # noqa: E501

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.model import NEVER, ModelEngine
from pddrt.engine.model import oracle as judge
from pddrt.engine.tokens import ByteTokenizer
from pddrt.frames import pack_ids
from pddrt.policy.route import Naive
from pddrt.protocol import Manifest, prompt_digest
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import LEASE_GRACE
from pddrt.types import MS, SECOND, Sampling

from .cluster import LAYOUT, VOCAB, Cluster, Played, many, one, oracle

TEXT = "p" * 200
IDS = ByteTokenizer().chat(TEXT)

TABLE = re.findall(r"(test_\w+)\.(test_\w+)", __doc__ or "")
WANTED = (1, 3, 4, 7, 11, 18, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 38, 39, 41, 42, 43)


def test_the_table_names_tests_that_exist() -> None:
    kinds = [int(n) for n in re.findall(r"^F(\d+) ", __doc__ or "", re.M)]
    assert tuple(kinds) == WANTED
    for module, test in TABLE:
        assert callable(getattr(import_module(f"tests.{module}"), test, None)), f"{module}.{test}"


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
        p0.post("rld0", "first", request="ghost", epoch=98, position=40, id=5)
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
        fields |= {"sampling": [0.0, 0, 1.0, 0], "lease_ns": 3 * SECOND}
        deployment.gateway.post("p0", "prefill", pack_ids(range(40)), **fields)

    played = Cluster(deadline=2 * SECOND).play([one(TEXT, 20)], during=ask)
    played.assert_sound()
    (came,), (went,) = events(played, ev.Admitted, "ghost"), events(played, ev.Freed, "ghost")
    assert 0 <= went.t - came.t - 3 * SECOND < 10 * MS
    assert played.records[0].detail == "deadline exceeded"


@pytest.mark.parametrize("after", [30, 60, 100])
def test_F11_a_prefill_that_aborts_tells_its_decoders(after: int) -> None:
    """While it computes, while it sends: nothing is decoded, nobody waits for a lease."""

    async def abort(deployment: Deployment) -> None:
        deployment.gateway.fail = lambda request, detail: None  # type: ignore[method-assign]
        await deployment.env.sleep(after * MS)
        instance(deployment, "p0").fail("s0.0", "its memory is broken")
        await deployment.env.sleep(100 * MS)
        del deployment.gateway.fail
        deployment.gateway.fail("s0.0", "given up")

    played = Cluster(rate=500_000, policy=Naive()).play([one(TEXT, 60)], during=abort)
    played.assert_sound()
    assert played.records[0].finish_reason == "aborted"
    admitted = [e for e in events(played, ev.Admitted, "s0.0") if e.instance == "md0"]
    freed = [e for e in events(played, ev.Freed, "s0.0") if e.instance == "md0"]
    assert len(admitted) == len(freed)
    failed = next(e.t for e in events(played, ev.TransferCancelled, "s0.0"))
    assert all(e.t - max(failed, a.t) <= 40 * MS for e, a in zip(freed, admitted, strict=True))
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
            made = len(deployment.gateway._streams["s0.0"].ids) - len(IDS)
            for at in reversed(range(made)):
                ids = pack_ids(answer[at : at + 3] if at + 3 <= made else answer[at:made])
                about = {"request": "s0.0", "start": len(IDS) + at, "source": "R"}
                rld.post("gateway", "tokens", ids, **about)

    played = Cluster().play([one(TEXT, 120)], during=repeat)
    played.assert_sound()
    (r,) = played.records
    assert r.ids == answer
    assert r.sources == "P" + "R" * r.sources.count("R") + "M" * r.sources.count("M")


@pytest.mark.parametrize("kind", ["kv", "first", "withdraw"])
def test_F42_nobody_but_its_own_prefill_instance_speaks_for_a_request(kind: str) -> None:
    """KV that another one has, of the right epoch even, is none of this request's."""
    about: dict[str, Any] = {"kv": {"start": 199, "end": 200}, "withdraw": {}}.get(
        kind, {"position": 200, "id": 5}
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
