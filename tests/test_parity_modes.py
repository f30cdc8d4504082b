"""Parity as a table: every pipeline, every way to hand over, greedy and sampled, at every offset in
a page, wherever the answer ends. Each case is reached, and each answer is the plain model's.

A case is (way, pipeline, sampling, pages, offset, end):

- the **way**: a routing policy, and what the handoff policy comes to where there is one; see WAYS.
- the **pages** of P, RLD and MD: all of 1, 16 or 64 tokens, or each its own.
- the **offset** in a page of the last decoder: where the first id that MD makes after a relay
  stands, or would have stood, had the answer not ended on RLD. In the other pipelines, where the
  prompt ends and the answer begins.
- the **end**: with the first id, on P, on RLD, at the switch (the first id that MD makes is the
  last), on MD.

What cannot be: an answer of one id ends on P before anything is handed over, whatever the mode, so
it stands with P-MD and P-RLD; without MD nothing ends at a switch or on MD, and who serves alone
hands nothing over. In pages of one token there is one offset.

In a run all steps of an instance take the same time and links have no rate, so that MD is first at
the same index of every answer; a request that is played beforehand says at which. So prompts and
answers are cut to fall where they are wanted. Where time is irregular, `test_parity` looks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product

import numpy as np
import pytest

from pddrt import trace as ev
from pddrt.engine.base import Engine
from pddrt.engine.reference import Reference
from pddrt.env import Env
from pddrt.metrics import RequestRecord
from pddrt.policy.handoff import Adaptive, CatchUp, Decision, Facts, Follow, OneShot, Overlap
from pddrt.policy.handoff import Policy as HandoffPolicy
from pddrt.policy.route import Alone, Naive, Pdd, Policy, Prfaas, RelayOnly
from pddrt.roles.instance import InstanceSpec
from pddrt.types import MS, Ns, Role, Run, Sampling
from pddrt.verify import EPS, judge
from pddrt.workload import Session

from .cluster import Played
from .paritylab import (
    ROUNDING,
    SAMPLINGS,
    Prompts,
    TorchCluster,
    check,
    load_tiny,
    session,
    told_wrong,
    where_it_ended,
)

PAGES = {"1": (1, 1, 1), "16": (16, 16, 16), "64": (64, 64, 64), "64, 1 and 16": (64, 1, 16)}
ROLES: tuple[Role, ...] = ("prefill", "relay", "main")
LETTERS: dict[Role, str] = {"prefill": "P", "relay": "RLD", "main": "MD"}
KINDS = ("greedy", "sampled")
RELAYED = "P-RLD-MD"
TAU: Ns = 10 * MS
START: Ns = 200 * MS
APART: Ns = 29 * MS
SHORTEST = 20


@dataclass(frozen=True)
class Way:
    """`ends`: by pipeline. `lengths`: of answers that reach them, where a relay hands over counted
    from the index at which MD is first; the first `fresh` of them are to prompts of which nothing
    is cached. `seam`: its mode, and the reason for which the relay stops.
    """

    policy: Policy
    ends: dict[str, tuple[str, ...]]
    lengths: tuple[int, ...]
    handoff: HandoffPolicy = field(default_factory=OneShot)
    seam: tuple[str, str] = ("", "")
    main_step: Ns = TAU // 2
    fresh: int = 1
    main_site: str = "b"

    @property
    def relayed(self) -> bool:
        return RELAYED in self.ends

    def cluster(self, pages: str, kind: type[TorchCluster] = TorchCluster) -> TorchCluster:
        prefill, relay, main = PAGES[pages]
        return kind(
            page_tokens=prefill,
            pages=(1 << 16) // prefill,
            page_sizes={"rld0": relay, "md0": main},
            chunk_tokens=1 << 14,
            max_batch=1 << 10,
            fabric=None,
            rate=None,
            delay=11 * MS,
            main_site=self.main_site,
            policy=self.policy,
            handoff=self.handoff,
            prefill_cost=lambda _spans: TAU,
            relay_cost=lambda _spans: TAU,
            main_cost=lambda _spans: self.main_step,
        )

    def cases(self, pages: str) -> set[tuple[str, str, int, str]]:
        """All (pipeline, sampling, offset, end) that there can be."""
        return {
            (pipeline, kind, offset, end)
            for pipeline, ends in self.ends.items()
            for kind, offset, end in product(KINDS, range(last_page(pipeline, pages)), ends)
        }


def last_page(pipeline: str, pages: str) -> int:
    return PAGES[pages][list(LETTERS.values()).index(pipeline.split("-")[-1])]


class Bounded:
    """Both decode, but the relay stops before the main decoder can be first."""

    def decide(self, facts: Facts) -> Decision:
        return Follow(2)


def relayed(
    handoff: HandoffPolicy,
    mode: str,
    reason: str,
    *,
    back: int = 0,
    main_step: Ns = TAU // 2,
    fresh: int = 1,
) -> Way:
    """`back`: answers also end on RLD so many ids before they would be handed over."""
    return Way(
        Pdd(5 * MS),
        {RELAYED: ("RLD", "switch", "MD")},
        (*range(-back, 0), 0, 1, 3),
        handoff,
        (mode, reason),
        main_step,
        fresh,
    )


TWICE = ("first id", "MD")
THRICE = ("first id", "switch", "MD")
WAYS = {
    "one-shot": relayed(OneShot(), "one-shot", "one-shot"),
    "catch-up to its bound": relayed(CatchUp(1, 2, 2), "catch-up", "the last round", back=1),
    "catch-up to the threshold": relayed(CatchUp(4, 8, 9), "catch-up", "within the threshold"),
    "adaptive, little is lacking": relayed(
        Adaptive(8, 2, 2), "one-shot", "within the threshold at the relay's load"
    ),
    "adaptive, much is lacking": relayed(Adaptive(1, 3, 1), "catch-up", "the last round"),
    "overlap, MD is first": relayed(
        Overlap(1, 8, 4), "overlap", "the main decoder is first", back=1
    ),
    "overlap to its bound": relayed(Bounded(), "overlap", "the bound"),
    "overlap, MD is slower": relayed(
        Overlap(1, 3, 1), "catch-up", "the last round", back=1, main_step=2 * TAU
    ),
    "P-MD": Way(Naive(), {"P-MD": THRICE}, (1, 2, 4)),
    "P-MD inside a site": Way(Naive("local"), {"P-MD": THRICE}, (1, 2, 4), main_site="a"),
    "P-RLD": Way(RelayOnly(5 * MS), {"P-RLD": ("first id", "RLD")}, (1, 3)),
    "P": Way(Alone("prefill"), {"P": ("first id", "P")}, (1, 3)),
    "MD": Way(Alone("main"), {"MD": TWICE}, (1, 3)),
    "P-MD or MD": Way(Prfaas(15), {"P-MD": THRICE, "MD": TWICE}, (1, 2, 4, 1, 3), fresh=3),
}


def base() -> Session:
    """Its prompt is what others share, in whole pages; it decodes on while they come."""
    return session(0, 0, Prompts(1).fresh(130), 90, Sampling(logprobs=0))


def asked_for(way: Way, lengths: Sequence[int], span: int) -> list[Session]:
    """Of each length `span` answers greedy and as many sampled, to prompts each a token longer."""
    first, prompts = base(), Prompts(3)
    asked, shared = [first], first.turns[0].ids
    assert shared is not None
    for n, length in enumerate(lengths):
        for more, (k, kind) in product(range(span), enumerate(KINDS)):
            tokens = SHORTEST + more
            cached = 0 if n < way.fresh else tokens - 1 - 3 * n + k
            prompt = prompts.sharing(shared, cached, tokens)
            sampling = replace(SAMPLINGS[kind], seed=len(asked), logprobs=0)
            asked.append(session(len(asked), START + n * APART, prompt, length, sampling))
    return asked


@functools.cache
def lengths(name: str) -> tuple[int, ...]:
    """Of the answers that end as `Way.ends` says."""
    way = WAYS[name]
    if not way.relayed:
        return way.lengths
    asked = asked_for(way, [40] * len(way.lengths), 1)
    records = check(way.cluster("16").play(asked), asked)
    first = [r.sources.index("M") for r in records[1 :: len(KINDS)]]
    return tuple(at + more for at, more in zip(first, way.lengths, strict=True))


def case_of(r: RequestRecord, pages: str) -> tuple[str, str, int, str]:
    """(pipeline, sampling, offset, end)"""
    assert r.pipeline is not None
    kind = "sampled" if r.sampling.temperature else "greedy"
    end = "first id" if len(r.ids) == 1 else where_it_ended(r)
    answered = 0
    if r.pipeline == RELAYED:
        answered = len(r.ids) if end == "RLD" else r.sources.index("M")
    offset = (r.prompt_tokens + answered) % last_page(r.pipeline, pages)
    return r.pipeline, kind, offset, end


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("name", WAYS)
def test_every_case_is_reached_and_is_the_models(name: str, pages: str) -> None:
    way = WAYS[name]
    span = max(last_page(pipeline, pages) for pipeline in way.ends)
    asked = asked_for(way, lengths(name), span)
    played = way.cluster(pages).play(asked)
    records = check(played, asked)[1:]

    reached = Counter(case_of(r, pages) for r in records)
    print(f"{name}, pages of {pages}: {len(records)} requests, {len(reached)} cases")
    print(dict(Counter(r.sources for r in records)))
    assert set(reached) == way.cases(pages)
    sharing = records[way.fresh * span * len(KINDS) :]
    for role, page in zip(ROLES, PAGES[pages], strict=True):
        takes_part = [LETTERS[role] in (r.pipeline or "").split("-") for r in sharing]
        if page <= span and all(takes_part):
            hits = {r.cached[role] % page for r in sharing}
            assert hits == set(range(page)), f"prefix hits end at every offset on {role}"
    if way.relayed:
        handed_over_as_said(way, played, records)


def handed_over_as_said(way: Way, played: Played, records: list[RequestRecord]) -> None:
    mode, reason = way.seam
    for r in records:
        assert r.seam.policy, "the handoff had begun"
        assert r.seam.mode == mode
        assert r.seam.ended == reason or where_it_ended(r) != "MD"
    page = played.deployment.instance("md0").spec.page_tokens
    sent = [e for e in played.events(ev.HandoffSent) if isinstance(e, ev.HandoffSent)]
    edges = {e.end % page for e in sent if not e.last}
    assert edges == set(range(page)) or mode == "one-shot", "pieces end at every offset"


def test_the_table_holds_what_it_says() -> None:
    """The sums of the table above, each of whose rows is complete or its test fails."""
    rows = {(name, pages): len(way.cases(pages)) for name, way in WAYS.items() for pages in PAGES}
    for name in WAYS:
        print(f"{name:30}", *(f"{rows[name, pages]:5}" for pages in PAGES))
    print(f"{sum(rows.values())} cases")
    relayed = {name for name, way in WAYS.items() if way.relayed}
    assert sum(cases for (name, _), cases in rows.items() if name in relayed) >= 1000
    for name, way in WAYS.items():
        ends = sum(len(set(ends)) for ends in way.ends.values())
        assert sum(rows[name, pages] for pages in ("1", "16", "64")) == (1 + 16 + 64) * 2 * ends


# -- what the table's verdicts are worth -----------------------------------------------------------


class Garbled(TorchCluster):
    """MD takes the KV of one token of each transfer for that of the token before it."""

    def engine(self, env: Env, spec: InstanceSpec) -> Engine:
        engine = super().engine(env, spec)
        write, layout, turn = engine.write_kv, engine.layout, count(1)

        def garble(runs: Sequence[Run], payload: bytes | memoryview) -> None:
            kv = (
                np.frombuffer(payload, np.float64)
                .reshape(layout.layers, 2, -1, layout.kv_heads, layout.head_dim)
                .copy()
            )
            at = next(turn) % kv.shape[2]
            kv[:, :, at] = kv[:, :, at - 1]
            write(runs, kv.tobytes())

        if spec.role == "main":
            engine.write_kv = garble  # type: ignore[method-assign]
        return engine


def test_kv_that_is_wrong_in_one_token_is_noticed() -> None:
    way = WAYS["P-MD"]
    asked = asked_for(way, (4,), 64)
    played = way.cluster("16", Garbled).play(asked)
    with pytest.raises(AssertionError):
        check(played, asked)
    wrong = [max(off) for off in told_wrong(played.records)]
    print(f"{len(wrong)} answers; the least is off by {min(wrong):.1e}")
    assert min(wrong) > 1e6 * ROUNDING


@pytest.mark.parametrize("name", ["one-shot", "catch-up to its bound", "overlap, MD is first"])
def test_eight_bits_are_a_loss_on_md_only_and_the_oracle_says_so(name: str) -> None:
    """RLD got the whole KV. Nothing breaks, where both decode and differ neither."""
    way = WAYS[name]
    cluster = way.cluster("16")
    cluster.eight_bit_wan = True
    played = cluster.play(asked_for(way, [at + 8 for at in lengths(name)[-2:]], 32))
    played.assert_sound()
    reference, verdicts = Reference(load_tiny().module), Counter[str]()
    for r, wrong in zip(played.records, told_wrong(played.records), strict=True):
        assert (r.finish_reason, len(r.ids)) == ("length", r.max_tokens)
        before = r.sources.index("M")
        assert max(wrong[:before]) < ROUNDING
        assert ROUNDING < max(wrong[before:]) < 0.5
        said = judge(reference, r.prompt_ids, r.ids, r.sampling, EPS["float64"])
        verdicts[said.verdict] += 1
        assert said.differences <= len(r.ids) - before
        assert said.first_divergence is None or said.first_divergence >= before
    print(name, dict(verdicts))
    assert set(verdicts) == {"equal", "different"}
