"""Every pipeline policy, whole: who makes which token, what crosses the WAN, what TTFT is made of,
and that the answer is the oracle's whatever happens.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.models import load
from pddrt.engine.tokens import ByteTokenizer
from pddrt.engine.torch import TorchEngine
from pddrt.env import Env
from pddrt.errors import BadInput, RunFailed
from pddrt.metrics import RequestRecord
from pddrt.netem.simnet import SimNet
from pddrt.pipelines import Plugged
from pddrt.policy.route import Alone, Facts, HitRate, Naive, Pdd, Policy, Prfaas, RelayOnly, Route
from pddrt.roles.solo import Solo
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.types import EIGHT_BIT, MS, SECOND, KVLayout
from pddrt.types import Run as Slots
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, many, one, oracle


@dataclass(frozen=True)
class Case:
    """A policy as a scenario would have it, and what it must come to. `sources`: of an answer, by
    pipeline.
    """

    policy: Policy
    sources: dict[str, str]
    wan_bytes_per_token: int = 0
    """Of KV that crosses to MD; 0: none does."""
    main_site: str = "b"
    eight_bit_wan: bool = False


BYTES = LAYOUT.bytes_per_token
PACKED = 2 * 4 * 2 * (4 + 32)
"""4 layers, 2 heads of 32 numbers: K and V, each head a scale and a byte a number."""
CASES = {
    "pdd": Case(Pdd(50 * MS), {"P-RLD-MD": "PR*M*", "P-MD": "PM*"}, BYTES),
    "pdd by hit rate": Case(Pdd(HitRate(0.5)), {"P-RLD-MD": "PR*M*", "P-MD": "PM*"}, BYTES),
    "naive": Case(Naive(), {"P-MD": "PM*"}, BYTES),
    "local": Case(Naive("local"), {"P-MD": "PM*"}, 0, main_site="a"),
    "colocated": Case(Alone("prefill"), {"P": "P+"}),
    "recompute": Case(Alone("main"), {"MD": "M+"}),
    "prfaas": Case(Prfaas(90), {"P-MD": "PM*", "MD": "M+"}, BYTES),
    "relay-only": Case(RelayOnly(50 * MS), {"P-RLD": "PR*", "P-MD": "PM*"}, BYTES),
    "compress": Case(Naive("compress"), {"P-MD": "PM*"}, PACKED, eight_bit_wan=True),
    "pdd, 8 bits": Case(Pdd(30 * MS), {"P-RLD-MD": "PR*M*", "P-MD": "PM*"}, PACKED, "b", True),
}


def cluster(case: Case, **more: Any) -> Cluster:
    about = {"main_site": case.main_site, "eight_bit_wan": case.eight_bit_wan, **more}
    return Cluster(policy=case.policy, rate=1_000_000, pages=about.pop("pages", 200), **about)


def conversations(seed: int, count: int = 6, turns: int = 3) -> list[Session]:
    """Some begin with little, some with much; each goes on by little."""
    rng = random.Random(seed)

    def turn(length: int) -> Turn:
        text = "".join(rng.choice("abcdefg") for _ in range(length))
        return Turn(text, rng.choice([1, 12, 25]), rng.choice([0, 80 * MS]))

    return [
        Session(
            i,
            i * rng.choice([5, 60]) * MS,
            (turn(rng.choice([20, 160])), *(turn(rng.randint(1, 40)) for _ in range(turns - 1))),
        )
        for i in range(count)
    ]


def answers_are_the_oracles(records: list[RequestRecord], asked: list[Session]) -> None:
    tokenizer = ByteTokenizer()
    histories: dict[int, list[int]] = {}
    for r in records:
        turn, before = asked[r.session].turns[r.turn], histories.get(r.session)
        prompt = (
            tokenizer.chat(turn.text)
            if before is None
            else before + tokenizer.follow_up(turn.text, after_eos=False)
        )
        histories[r.session] = prompt + r.ids
        assert (r.finish_reason, r.ids) == ("length", oracle(prompt, turn.max_tokens)), r.id


def kv_over_the_wan(played: Played) -> int:
    """Bytes of KV, without their frames' heads."""
    sites = played.deployment.topology.sites
    return sum(
        e.bytes
        for e in played.trace.events
        if isinstance(e, ev.KVSent) and sites[e.src] != sites[e.dst]
    )


@pytest.mark.parametrize("name", CASES)
def test_every_policy_answers_as_the_oracle_does(name: str) -> None:
    """Letters are those of the pipeline, MD is sent what it lacks and nothing else, and legs add up
    (the monitor says so); over ten seeds, in which each pipeline of the policy is taken.
    """
    case, taken, crossed = CASES[name], set(), 0
    for seed in range(10):
        asked = conversations(seed)
        played = cluster(case, seed=seed, prefills=1 + seed % 2, mains=1 + seed % 2).play(asked)
        played.assert_sound()
        answers_are_the_oracles(played.records, asked)
        for r in played.records:
            assert re.fullmatch(case.sources[r.pipeline or ""], r.sources), (r.id, r.sources)
            taken.add(r.pipeline)
        lacked = sum(
            r.prompt_tokens - r.cached["main"] for r in played.records if r.main in r.whole
        )
        crossing = kv_over_the_wan(played)
        assert crossing == lacked * case.wan_bytes_per_token
        wan = [e for e in played.trace.events if isinstance(e, ev.LinkTotal) and e.link == "wan"]
        assert bool(sum(e.kv_bytes for e in wan)) is bool(crossing)
        crossed += crossing
    assert bool(crossed) is bool(case.wan_bytes_per_token)
    assert taken == set(case.sources)


def test_whoever_serves_alone_has_no_transfer_in_its_ttft_and_hits_its_own_cache() -> None:
    pairs: list[Any] = [("prefill", "p0"), ("main", "md0")]
    for role, instance in pairs:
        played = cluster(Case(Alone(role), {})).play(conversations(3))
        for r in played.records:
            legs = r.legs
            assert legs is not None
            assert sum(legs.values()) == r.ttft
            assert legs["transfer"] == legs["decoder_queue"] == 0
            assert legs["prefill"] > 0
            others = {"prefill", "relay", "main"} - {role}
            assert all(r.cached[other] == 0 for other in others)
            assert list(r.admitted) == [instance]
        before = {(r.session, r.turn + 1): r for r in played.records}
        for r in played.records:
            if earlier := before.get((r.session, r.turn)):
                assert r.cached[role] == earlier.prompt_tokens + len(earlier.ids) - 1


def test_chunks_and_decodes_share_the_steps_of_one_who_does_both() -> None:
    played = cluster(CASES["colocated"]).play(many(6, 120, 30, every=10 * MS))
    mixed = [
        e
        for e in played.trace.events
        if isinstance(e, ev.Step) and e.prefill_tokens and e.decode_tokens
    ]
    assert mixed
    assert all(e.prefill_tokens <= 32 for e in mixed), "chunk_tokens bounds what prompts add"
    assert {r.sources for r in played.records} == {"P" * 30}


@pytest.mark.parametrize("role", ["prefill", "main"])
def test_one_who_serves_alone_is_preempted_and_rebuilt(role: Any) -> None:
    """Nobody is refused for what all need together: who came last gives way, and comes back."""
    asked = many(4, 60, 60)
    case = Case(Alone(role), {})
    played = cluster(case, pages=16).play(asked)
    played.assert_sound()
    answers_are_the_oracles(played.records, asked)
    preempted = [e for e in played.trace.events if isinstance(e, ev.Preempted)]
    assert preempted
    starts = [e.request for e in played.trace.events if isinstance(e, ev.PrefillStarted)]
    assert len(starts) == len(set(starts)) == 4, "no leg is stamped again"


class Both:
    """Half of the requests stay on P, half go on to MD."""

    def route(self, facts: Facts) -> Route:
        prefill = facts.pick("prefill")
        if facts.prompt_tokens % 2:
            return facts.route("odd", prefill=prefill)
        return facts.route("even", prefill=prefill, main=facts.pick("main"))


def test_a_prompt_that_is_being_sent_is_not_preempted_for_an_answer() -> None:
    """One P does both. What decoders are still sent of stays; answers give way to one another."""
    asked = [Session(i, i * 2 * MS, (Turn("abcdefgh"[i] * (60 + i % 2), 80, 0),)) for i in range(8)]
    played = Cluster(policy=Both(), pages=24, rate=200_000).play(asked)
    played.assert_sound()
    answers_are_the_oracles(played.records, asked)
    preempted = {e.request for e in played.trace.events if isinstance(e, ev.Preempted)}
    by_name = {r.id: r.pipeline for r in played.records}
    on_p = {r for r in preempted if by_name[r] == "P"}
    assert on_p
    assert {r.pipeline for r in played.records} == {"P", "P-MD"}


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["colocated", "recompute", "relay-only", "compress"])
@pytest.mark.parametrize("after", [0, 3 * MS, 12 * MS, 40 * MS, 90 * MS, 150 * MS])
def test_a_cancel_gives_everything_back(name: str, after: int) -> None:
    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(after)
        for request in list(deployment.gateway._streams)[:2]:
            deployment.client.post("gateway", "cancel", request=request)

    asked = many(3, 150, 40, every=MS)
    played = cluster(CASES[name]).play(asked, during=cancel)
    played.assert_sound()
    for r in played.records:
        wanted = oracle(ByteTokenizer().chat(asked[r.session].turns[0].text), 40)
        assert r.ids == wanted[: len(r.ids)]
        assert r.finish_reason in ("length", "aborted")


@pytest.mark.parametrize("name", ["colocated", "recompute"])
def test_a_lost_gateway_strands_nothing_on_one_who_serves_alone(name: str) -> None:
    served = {}

    async def cut(deployment: Deployment) -> None:
        await deployment.env.sleep(60 * MS)
        for instance in deployment.instances:
            assert isinstance(instance, Solo)
            served[instance.name] = bool(instance._alone)
            instance.peers["gateway"].abort()

    played = cluster(CASES[name]).play(many(3, 100, 40), during=cut)
    played.assert_sound()
    assert sum(served.values()) == 1
    assert {r.finish_reason for r in played.records} == {"length"}
    for r in played.records:
        [(then, why)] = played.went_on(r.id)
        assert then == "again"
        assert "lost" in why
        assert r.ids == oracle(r.prompt_ids, 40)


@pytest.mark.parametrize("name", ["colocated", "recompute"])
def test_the_lease_ends_what_nobody_closes(name: str) -> None:
    """F3: the gateway's word to close is lost."""

    async def forget(deployment: Deployment) -> None:
        await deployment.env.sleep(50 * MS)
        deployment.gateway._streams["s0.0"].deadline.cancel()
        for instance in deployment.instances:
            assert isinstance(instance, Solo)
            for entry in instance._alone.values():
                instance.sched.sequences[entry.request].active = False  # it stalls

    played = cluster(CASES[name], deadline=SECOND).play([one("x" * 90, 40)], during=forget)
    played.assert_sound()
    assert "lease expired on" in played.records[0].detail


def test_F20_without_a_main_decoder_requests_fail_at_once_by_name() -> None:
    for name in ("naive", "pdd", "prfaas", "recompute", "compress"):
        played = cluster(CASES[name], mains=0).play([one("x" * 90)])
        (r,) = played.records
        assert (r.finish_reason, r.detail) == ("rejected", "no main instance can be reached")
        assert r.finished is not None
        assert r.finished - r.sent < 5 * MS


def test_F20_without_a_main_decoder_requests_finish_where_a_policy_allows_it() -> None:
    for name, pipeline in (("relay-only", "P-RLD"), ("colocated", "P")):
        asked = [one("x" * 90)]
        played = cluster(CASES[name], mains=0).play(asked)
        answers_are_the_oracles(played.records, asked)
        assert [r.pipeline for r in played.records] == [pipeline]
    offloads = cluster(CASES["prfaas"], prefills=0).play([one("x" * 190)])
    assert [(r.pipeline, r.finish_reason) for r in offloads.records] == [("MD", "length")]


def test_what_fits_nowhere_is_refused_and_what_fits_elsewhere_goes_there() -> None:
    """Room counts where a policy needs it: P alone needs it for the answer, too."""
    asked = [one("x" * 100, 60)]
    for name, refused in (("colocated", True), ("naive", False)):
        tight = cluster(CASES[name], pages=200)
        specs = tight.specs()
        tight.specs = lambda specs=specs: [  # type: ignore[method-assign, misc]
            s if s.role != "prefill" else type(s)(s.name, s.role, 16, 8, 32, 16) for s in specs
        ]
        (r,) = tight.play(asked).records
        if refused:
            assert "can never fit into any prefill instance" in r.detail
        else:
            assert r.finish_reason == "length"


# -- 8 bits ----------------------------------------------------------------------------------------


def test_the_manifest_says_what_is_on_the_wire_and_who_cannot_take_it_refuses() -> None:
    """F24: by name; it is offered again, as it should be."""
    layouts: list[KVLayout] = []

    async def watch(deployment: Deployment) -> None:
        md = next(i for i in deployment.instances if i.name == "md0")
        on_offer = md.on_offer  # type: ignore[attr-defined]

        def noted(conn: Any, frame: Any) -> None:
            layouts.append(KVLayout(*frame["layout"]))
            if len(layouts) == 2:
                frame.fields["layout"] = ["modelled", 4, 2, 32, "int4"]
            on_offer(conn, frame)

        md.on_offer = noted  # type: ignore[attr-defined]

    played = cluster(CASES["compress"]).play(many(2, 90, 5, every=SECOND), during=watch)
    assert {(layout.dtype, layout.bytes_per_token) for layout in layouts} == {(EIGHT_BIT, PACKED)}
    assert [r.finish_reason for r in played.records] == ["length"] * 2
    assert not played.went_on("s0.0")
    [(then, why)] = played.went_on("s1.0")
    assert then == "again"
    assert "dtype int4 of the KV is none of float64, float32, float16, bfloat16, int8" in why


def test_nothing_is_packed_inside_a_site() -> None:
    case = CASES["pdd, 8 bits"]
    played = cluster(case).play([one("x" * 150)])
    (r,) = played.records
    assert r.kv_received["rld0"] == r.prompt_tokens * BYTES
    assert r.kv_received["md0"] == r.prompt_tokens * PACKED
    home = Cluster(policy=Naive(), main_site="a", eight_bit_wan=True).play([one("x" * 150)])
    assert home.records[0].kv_received["md0"] == home.records[0].prompt_tokens * BYTES


def test_the_estimate_counts_what_is_on_the_wire() -> None:
    """Half the bytes, half the time: requests that were relayed go straight."""
    whole = cluster(CASES["naive"]).play([one("x" * 150)])
    half = cluster(CASES["compress"]).play([one("x" * 150)])
    estimates = [
        next(e for e in p.trace.events if isinstance(e, ev.Routed)).wan_estimate_ns
        for p in (whole, half)
    ]
    assert None not in estimates
    seconds = [(e or 0) - 15 * MS for e in estimates]
    assert seconds[1] * BYTES == pytest.approx(seconds[0] * PACKED, rel=1e-6)


def test_an_outage_of_the_wan_does_not_touch_who_does_not_use_it() -> None:
    async def outage(deployment: Deployment) -> None:
        assert isinstance(deployment.net, SimNet)
        deployment.net.set_rate("wan", 0)
        await deployment.env.sleep(2 * SECOND)
        deployment.net.set_rate("wan", 1_000_000)

    asked = many(4, 100, 20, every=20 * MS)
    colocated = cluster(CASES["colocated"]).play(asked, during=outage)
    answers_are_the_oracles(colocated.records, asked)
    naive = cluster(CASES["naive"]).play(asked, during=outage)
    answers_are_the_oracles(naive.records, asked)
    assert max(r.ttft or 0 for r in colocated.records) < SECOND
    assert min(r.ttft or 0 for r in naive.records) > SECOND


# -- real models -----------------------------------------------------------------------------------

SCENARIO = """
name: pipelines
seed: 3
clock: {clock}
model: tiny
dtype: {dtype}
links:
  rdma: {{between: [a, a], rate: 10 Gbit/s, delay: 5 us}}
  wan:  {{between: [a, b], rate: 12 Mbit/s, delay: 3 ms}}
instances:
  p:   {{role: prefill, site: a, chunk_tokens: 100, kv_memory: 4 MiB, chip: &c {{flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}}}
  rld: {{role: relay,   site: a, kv_memory: 4 MiB, chip: *c}}
  md:  {{role: main,    site: b, kv_memory: 4 MiB, chip: *c}}
pipeline: {{policy: {policy}, relay_above: 40 ms, offload_above: 100}}
workload: {{kind: sessions, sessions: 4, turns: 3, rate: 12/s, think: 50 ms, output_tokens: 20,
           prompts: random, prompt_tokens: {{min: 60, max: 240}},
           short: {{fraction: 0.5, prompt_tokens: {{min: 5, max: 20}}}}}}
"""  # noqa: E501
REAL = {
    "pdd": {"P-RLD-MD", "P-MD"},
    "naive": {"P-MD"},
    "local": {"P-MD"},
    "colocated": {"P"},
    "prfaas": {"P-MD", "MD"},
    "relay-only": {"P-RLD", "P-MD"},
    "recompute": {"MD"},
    "compress": {"P-MD"},
}


def run(
    folder: Path, policy: str, clock: str = "virtual", dtype: str = "float64", heat: float = 0.0
) -> Run:
    text = SCENARIO.format(policy=policy, clock=clock, dtype=dtype)
    if clock == "wall":
        text = text.replace("kv_memory: 4 MiB, chip", "kv_memory: 4 MiB, step_time: real, chip")
    scenario = parse(text, str(folder / "pipelines.yaml"), [f"sampling.temperature={heat}"])
    the_run = Run(scenario, out=folder / "run", verify=True)
    the_run.prepare()
    return the_run


@pytest.mark.parametrize("heat", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", REAL)
def test_every_policy_answers_as_the_model_does(tmp_path: Path, policy: str, heat: float) -> None:
    """Exactly, in float64; but for KV that was cut to 8 bits, whose loss the oracle shows."""
    the_run = run(tmp_path, policy, heat=heat)
    result = the_run.execute()
    told = [json.loads(x) for x in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    parity, wan = result.summary["parity"], result.summary["links"]["wan"]
    assert any(r["wan_bytes"]["kv"] for r in told) is bool(wan["kv_bytes"])
    assert (result.summary["requests"]["finished"], parity["checked"]) == (12, 12)
    assert set(result.summary["pipelines"]) == REAL[policy]
    assert bool(wan["kv_bytes"]) is (policy not in ("local", "colocated", "recompute"))
    if policy != "compress":
        assert parity["equal"] == 12
        result.raise_for_status()
    assert result.summary["invariants"]["violations"] == []
    cached = {r.turn: r.cached for r in the_run.recorder.requests.values()}
    role = {"colocated": "prefill"}.get(policy, "main")
    assert cached[2][role] > 0 or policy == "relay-only"


@pytest.mark.parametrize("policy", ["colocated", "compress"])
def test_on_the_wall_clock_too(tmp_path: Path, policy: str) -> None:
    result = run(tmp_path, policy, clock="wall", dtype="float32").execute()
    assert result.summary["requests"]["finished"] == 12
    assert result.summary["invariants"]["violations"] == []
    assert set(result.summary["pipelines"]) == REAL[policy]
    parity, kv = result.summary["parity"], result.summary["links"]["wan"]["kv_bytes"]
    if policy == "colocated":
        assert (kv, parity["different"]) == (0, 0)
        return
    lacked = sum(
        r["prompt_tokens"] - r["cached_tokens"]["main"]
        for r in map(json.loads, (tmp_path / "run" / "requests.jsonl").read_text().splitlines())
    )
    layout = load("tiny", "float32").layout
    packed = replace(layout, dtype=EIGHT_BIT).bytes_per_token
    assert lacked * packed < kv < lacked * packed * 1.1, "and the frames' heads"


def test_packing_loses_half_a_scale_at_most() -> None:
    """Of each token and head for itself, whatever the others hold; zeros stay zeros."""
    model = load("tiny", "float32")
    engine = TorchEngine(
        model.module, model.layout, 64, cast(Env, SimpleNamespace(virtual=True)), max_context=64,
        step_cost=lambda _spans: 0,
    )  # fmt: skip
    layout, runs = model.layout, [Slots(3, 5), Slots(20, 4)]
    heads = torch.randn(layout.layers * 2 * 9 * layout.kv_heads, layout.head_dim)
    heads *= torch.logspace(-30, 30, len(heads))[:, None]
    heads[4] = 0
    engine.write_kv(runs, heads.numpy().tobytes())
    payload = engine.read_kv(runs)
    packed = engine.pack_kv(payload)
    assert len(packed) == 9 * replace(layout, dtype=EIGHT_BIT).bytes_per_token
    back = torch.frombuffer(bytearray(engine.convert_kv(packed, EIGHT_BIT)), dtype=torch.float32)
    back = back.view_as(heads)
    scales = heads.abs().amax(-1, keepdim=True) / 127
    assert ((back - heads).abs() <= scales * 0.5001).all()
    assert (back[4] == 0).all()
    assert (back != heads).any()


# -- the user's own --------------------------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs" / "pipelines.md"


def test_the_policy_in_the_docs_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n# mypolicy.py\n(.*?)```", DOCS.read_text(), re.S)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 30
    (tmp_path / "mypolicy.py").write_text(block)
    the_run = run(tmp_path, "mypolicy:Cautious")
    result = the_run.execute()
    result.raise_for_status()
    assert set(result.summary["pipelines"]) == {"P", "P-MD", "P-RLD-MD"}


BOTH = "prefill=facts.prefills[0], main=facts.mains[0]"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return facts.nothing", "mypolicy.py:5: Mine.route raised AttributeError"),
        ("return 'P-MD'", "what Mine.route returned is wrong: found 'P-MD'"),
        ("return facts.route('', relay=facts.relays[0])", "wrong: there is no pipeline RLD"),
        ("return facts.route('', main=facts.relays[0])", "rld is no main instance that can be"),
        (
            f"return facts.route(None, {BOTH})",
            "mypolicy.py:4: what Mine.route returned is wrong: found reason None; allowed: a text",
        ),
        (f"return facts.route('\\ud800', {BOTH})", "reason '\\ud800'; allowed: a text without"),
        (
            f"import dataclasses; return dataclasses.replace(facts.route('', {BOTH}), held=1)",
            "found held 1; allowed: True or False",
        ),
        (
            "return facts.route('', main=facts.mains[0])",
            "mypolicy.py:4: what Mine.route returned is "
            "wrong: found pipeline MD; allowed: what Mine.pipelines says: P-MD, P-RLD-MD",
        ),
        (
            "from pddrt.policy.route import NoRoute; raise NoRoute('\\ud800')",
            "mypolicy.py:5: Mine.route raised NoRoute('\\ud800'); allowed: a text without lone",
        ),
    ],
)
def test_a_mistake_of_the_users_names_its_class_and_line(
    tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "mypolicy.py").write_text(
        f"class Mine:\n    pipelines = ('P-MD', 'P-RLD-MD')\n\n"
        f"    def route(self, facts):\n        {body}\n"
    )
    result = run(tmp_path, "mypolicy:Mine").execute()
    with pytest.raises(RunFailed) as failed:
        result.raise_for_status()
    assert said in str(failed.value)


def test_a_policy_of_the_users_may_refuse_by_what_it_cannot_pick() -> None:
    """NoRoute is no mistake."""
    (r,) = cluster(Case(Plugged(Both()), {}), mains=0).play([one("x" * 90)]).records
    assert (r.finish_reason, r.detail) == ("rejected", "no main instance can be reached")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pipelines = ('P-XX',)", "mypolicy:Mine has pipelines ('P-XX',); allowed: some of P-RLD"),
        ("rout = 1", "Mine has no route; needed: def route(self, facts)"),
    ],
)
def test_a_class_that_is_no_policy_is_refused_in_the_scenario(
    tmp_path: Path, line: str, said: str
) -> None:
    body = "" if "rout " in line else "    def route(self, facts): ...\n"
    (tmp_path / "mypolicy.py").write_text(f"class Mine:\n    {line}\n{body}")
    text = SCENARIO.format(policy="mypolicy:Mine", clock="virtual", dtype="float64")
    with pytest.raises(BadInput) as refused:
        parse(text, str(tmp_path / "pipelines.yaml"))
    (problem,) = refused.value.problems
    assert "pipelines.yaml:14: pipeline.policy: " in problem
    assert said in problem
