"""The swarm: a seed draws a cluster, its sessions and what befalls it; `play` runs that case in
virtual time and checks what must hold whatever befell it.

A `Case` is plain data, so that it can be printed, read back, and made smaller. Where faults strike
is in `misfortunes`; what they hit is counted in `coverage`; how a failing case is shrunk, in
`shrink`; `scripts/swarm` is `swarm_cli`.

**Safety**, faults on: no invariant is violated (`pddrt.invariants` listens to all of it); every
answer is the oracle's, or the beginning of it where the request did not finish; every request has
one end; an end that is no answer has a fault that explains it; what nobody could have meant (KV of
another epoch, stale manifests: see `misfortunes.haunt`) changes nothing.

**Liveness**, faults off: what is down is started again; everything is given back, without a lease
that had to end where no silent offer was planted; requests that are sent then finish, all of them,
within LIVE_TIME; nothing is left.

What may be different with recovery (a request goes on elsewhere) is left open: a request finishes
with the exact ids, or ends once, with a reason.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml
from pydantic import TypeAdapter

from pddrt import trace as ev
from pddrt.deployment import DRAIN_TIME, Change, Deployment
from pddrt.engine import model
from pddrt.engine.model import ModelEngine
from pddrt.engine.tokens import ByteTokenizer
from pddrt.errors import RunFailed
from pddrt.faults import Fault, FaultPlan
from pddrt.injector import Injector
from pddrt.metrics import RequestRecord
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.traces import Segment, Trace
from pddrt.policy.admission import Admission
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.handoff import (
    Adaptive,
    CatchUp,
    Decision,
    Finish,
    Follow,
    OneShot,
    Overlap,
    Piece,
)  # fmt: skip
from pddrt.policy.handoff import Facts as HandoffFacts
from pddrt.policy.handoff import Policy as Handoff
from pddrt.policy.route import PIPELINES, Alone, Naive, Pdd, Policy, Prfaas, RelayOnly, Route
from pddrt.policy.route import Facts as RouteFacts
from pddrt.roles.gateway import LEASE_GRACE
from pddrt.types import MS, SECOND, Drawn, Ns, Sampling, Span
from pddrt.workload import Session, Turn

from . import misfortunes
from .cluster import VOCAB, Cluster, Played, cost
from .kept import KeptTrace

LONGEST = 160
"""Characters of a turn."""
ANSWER = 90
"""Tokens of an answer."""
TORCH_EVERY = 50
"""One seed in so many runs the tiny torch model."""
RECONNECT: Ns = 5 * SECOND
"""From when all runs again until everybody has found everybody: redials are a second apart."""
LIVE_TIME: Ns = 60 * SECOND
"""In which requests that nothing befalls have ended. They take some two seconds, on the slowest
link; what had begun before may still be in their way."""
LONGEST_RUN: Ns = 3600 * SECOND
"""No case lasts so long: then it hangs."""


class Erratic:
    """A policy of somebody's own, who does at a handoff whatever is allowed."""

    def decide(self, facts: HandoffFacts) -> Decision:
        rng = random.Random(f"{facts.lacking} {facts.before} {facts.left}")
        some = rng.choice([1, 3, 10])
        return rng.choice([Finish("on a whim"), Piece(some), Piece(some), Follow(some)])


class AnyRoute:
    """A policy of somebody's own, who sends each request by whatever pipeline there is."""

    pipelines = tuple(PIPELINES)

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"routes {seed}")

    def route(self, facts: RouteFacts) -> Route:
        pipeline = self._rng.choice(self.pipelines)
        parts = {role: facts.able(role, answers=role != "prefill") for role in PIPELINES[pipeline]}
        if pipeline == "P":
            parts["prefill"] = facts.able("prefill")
        if not all(parts.values()):
            return Naive().route(facts)
        return facts.route(
            f"{pipeline}, on a whim", **{r: self._rng.choice(of) for r, of in parts.items()}
        )


LINKS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "fifo": {"qdisc": "fifo", "overhead": 66},
    "ranked": {"ranks": {"kv": 1}},
    "weighted": {"weights": {"ids": 8, "control": 8}},
    "correlated": {"correlation": 100 * MS},
    "varying": {
        "trace": Trace(
            [Segment(0, 2_000_000), Segment(300 * MS, 0), Segment(400 * MS, 500_000, 40 * MS)],
            SECOND,
            repeats=True,
        )
    },
    "reno": {"tcp": Tcp("reno")},
    "lossy": {"tcp": Tcp("cubic"), "loss": 0.01},
    "bursty": {"tcp": Tcp("bbr", warm=True), "loss": 0.005, "burst": 2.0},
}
"""The WAN: how it queues, varies, loses. Bursts are short: a handshake that loses five packets in a
row takes more than 30 s, and a deployment that is not together by then does not start."""

HANDOFFS: Mapping[str, Handoff] = {
    "one-shot": OneShot(),
    "catch-up": CatchUp(threshold=4, max_ids_per_round=6),
    "adaptive": Adaptive(threshold=8, max_ids_per_round=64, max_rounds=3),
    "overlap": Overlap(threshold=2, max_ids_per_round=16),
    "erratic": Erratic(),
}
POLICIES = (
    *("pdd", "pdd", "pdd", "pdd", "pdd", "pdd"),
    *("naive", "local", "compress", "colocated", "recompute", "prfaas", "relay-only", "any"),
)
"""Those with a handoff more often than the others."""


@dataclass(frozen=True)
class Case:
    """What a seed stands for. The defaults are the simplest there is. Times in ns, rates in
    bytes/s; of a session: when it begins, and of each turn text, tokens and think time.
    """

    seed: int = 0
    engine: str = "model"
    sessions: tuple[tuple[Ns, tuple[tuple[str, int, Ns], ...]], ...] = ()
    faults: tuple[dict[str, Any], ...] = ()
    changes: tuple[tuple[Ns, str, bool], ...] = ()
    ghosts: int = 0
    """Frames that somebody sends in the name of an instance."""
    silent: bool = False
    """Among them an offer that nothing ever follows."""
    stranger: int = 0
    """Frames that nobody sends whom anybody knows."""
    policy: str = "pdd"
    relay_above: Ns = 0
    handoff: str = "one-shot"
    prefills: int = 1
    relays: int = 1
    mains: int = 1
    page_tokens: int = 16
    pages: int = 256
    chunk_tokens: int = 512
    max_batch: int = 16
    fabric: int | None = 1_000_000_000
    rate: int | None = 1_000_000
    delay: Ns = 15 * MS
    jitter: Ns = 0
    link: str = ""
    gateway_site: str = "a"
    deadline: Ns = 60 * SECOND
    eos_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stream_while_computing: bool = True
    early_first_token: bool = False
    caching: bool = True
    piece: int | None = None
    relay_slow: int = 1
    """A step of a relay takes so many times as long as another's."""
    signal_age: Ns = 50 * MS
    max_transfers: int = 8
    anomaly: str = ""
    shed_after: Ns | None = None
    max_requests: int | None = None
    """See `policy.admission`."""
    wavers: bool = False
    """Main decoders draw now and then another id than others would, as near ties do."""
    shuffle: int | None = None

    @property
    def plan(self) -> tuple[Fault, ...]:
        found: tuple[Fault, ...] = TypeAdapter(FaultPlan).validate_python(list(self.faults))
        return found

    def to_text(self) -> str:
        """YAML of whatever is not as by default; `parse` reads it."""
        plain = Case()
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        told = {name: v for name, v in own.items() if v != getattr(plain, name) or name == "seed"}
        flow: str = yaml.safe_dump(_listed(told), default_flow_style=None, sort_keys=False)
        return flow

    @classmethod
    def parse(cls, text: str) -> Case:
        return cls(**{name: _tupled(value) for name, value in yaml.safe_load(text).items()})


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _listed(v) for k, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, (tuple, list)) else value


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


# -- drawing ---------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    """The case that `seed` stands for."""
    rng = random.Random(f"swarm {seed}")
    torch = seed % TORCH_EVERY == TORCH_EVERY - 1
    page_tokens = rng.choice([1, 7, 16, 64])
    three_turns = 3 * (LONGEST + ANSWER + 1)
    delay = rng.choice([0, MS, 15 * MS, 60 * MS])
    sampled = rng.random() < 0.3
    min_tokens = rng.choice([0] * 11 + [5])  # which counts only where many ids could end it
    eos = rng.sample(range(VOCAB), 40 if min_tokens else rng.choice([0, 0, 2]))
    case = Case(
        seed=seed,
        engine="torch" if torch else "model",
        sessions=_sessions(rng, page_tokens, 3 if torch else 9),
        policy=rng.choice(POLICIES),
        relay_above=rng.choice([0, 0, 20 * MS, 100 * MS]),
        handoff=list(HANDOFFS)[seed % len(HANDOFFS)],
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
        gateway_site=rng.choice("aab"),
        deadline=rng.choice([5 * SECOND, 20 * SECOND, 60 * SECOND]),
        eos_ids=tuple(eos),
        temperature=0.8 if sampled else 0.0,
        min_tokens=min_tokens,
        stop=("a",) if rng.random() < 0.1 else (),
        stream_while_computing=rng.random() < 0.7,
        early_first_token=rng.random() < 0.3,
        caching=rng.random() < 0.9,
        piece=rng.choice([None, 1, 8]),
        signal_age=rng.choice([0, 50 * MS, SECOND]),
        max_transfers=rng.choice([1, 2, 8]),
        anomaly=rng.choice(["", "", "max_tokens", "session"]),
        wavers=not torch and not min_tokens and rng.random() < 0.25,
        shuffle=rng.choice([None, seed]),
        ghosts=rng.choice([0, 0, 0, 30]),
        silent=rng.random() < 0.15,
        stranger=rng.choice([0] * 9 + [40]),
        shed_after=rng.choice([None] * 9 + [50 * MS]),
        max_requests=rng.choice([None] * 9 + [3]),
    )
    if rng.random() < 0.4:
        case = _hands_over(rng, case)
    case = replace(case, changes=_changes(rng, case) if rng.random() < 0.2 else ())
    link = rng.choice(["", "", *LINKS])
    if "tcp" in LINKS[link]:
        case = replace(case, rate=case.rate or 4_000_000)
    case = replace(case, link=link)
    if rng.random() < 0.25:
        return misfortunes.aim(rng, case)
    return replace(case, faults=misfortunes.draw(rng, case))


def _hands_over(rng: random.Random, case: Case) -> Case:
    """The same, but most of its requests are relayed, and handed over long before their end."""
    relay_slow = rng.choice([1, 4, 16])
    longer = tuple(
        (start, tuple((text[:80], ANSWER, think) for text, _, think in turns))
        for start, turns in case.sessions
    )
    case = replace(
        case,
        sessions=longer,
        policy="pdd",
        relay_above=0,
        anomaly="",
        rate=rng.choice([4_000_000, 10_000_000]) // relay_slow,  # so that it makes some ids first
        delay=min(case.delay, 15 * MS),
        jitter=min(case.jitter, 5 * MS),
        relay_slow=relay_slow,
    )
    plain = case.engine == "model" and not case.min_tokens
    if case.handoff != "overlap" or not plain or rng.random() < 0.3:
        return case
    # Main decoders that run ahead on ids which are not the answer's, and learn of it late.
    far = {"delay": 15 * MS, "gateway_site": "a", "relay_slow": 4, "rate": 2_500_000}
    return replace(case, wavers=True, jitter=0, **far)  # type: ignore[arg-type]


def _sessions(rng: random.Random, page_tokens: int, most: int) -> tuple[Any, ...]:
    def turn() -> tuple[str, int, Ns]:
        length = min(rng.choice([page_tokens, rng.randint(1, LONGEST), LONGEST]), LONGEST)
        text = "".join(rng.choice("abcdefg") for _ in range(length))
        return text, rng.choice([1, rng.randint(1, ANSWER), ANSWER]), rng.choice([0, 50 * MS])

    every = rng.choice([0, 5 * MS, 40 * MS, 200 * MS])
    count = min(most, rng.choice([1, 4, 9]))
    return tuple(
        (i * every, tuple(turn() for _ in range(rng.choice([1, 1, 3])))) for i in range(count)
    )


def _changes(rng: random.Random, case: Case) -> tuple[tuple[Ns, str, bool], ...]:
    """Instances that come and go; the first of each role stays."""
    counts = {"p": case.prefills, "rld": case.relays, "md": case.mains}
    spare = [f"{stem}{i}" for stem, n in counts.items() for i in range(1, n)]
    changes = []
    for name in spare:
        joins, at = rng.random() < 0.5, 0
        for _ in range(rng.choice([1, 2])):
            at += rng.randint(0, 600 * MS)
            changes.append((at, name, joins))
            joins = not joins
    return tuple(changes)


# -- a case as a cluster ---------------------------------------------------------------------------


class Wavering(ModelEngine):
    """Its ids differ now and then from others'."""

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        made = await super().step(spans)
        both = zip(made, spans, strict=True)
        return [d and Drawn(wavered(d.token, span.end), d.logprobs) for d, span in both]


def wavered(token: int, position: int) -> int:
    return (token + 1) % VOCAB if (token + position) % 5 == 0 else token


def cluster(case: Case) -> Cluster:
    kind: type[Cluster] = Cluster
    if case.engine == "torch":
        from .paritylab import TorchCluster as kind  # torch is loaded where it is used
    policies: dict[str, Policy] = {
        "pdd": Pdd(case.relay_above),
        "naive": Naive(),
        "local": Naive("local"),
        "compress": Naive("compress"),
        "colocated": Alone("prefill"),
        "recompute": Alone("main"),
        "prfaas": Prfaas(60),
        "relay-only": RelayOnly(case.relay_above),
        "any": AnyRoute(case.seed),
    }
    guess: Any = case.anomaly
    same = ("prefills", "relays", "mains", "page_tokens", "pages", "chunk_tokens", "max_batch",
            "fabric", "rate", "delay", "jitter", "gateway_site", "deadline", "caching", "piece",
            "stream_while_computing", "early_first_token", "signal_age", "max_transfers",
            "seed", "shuffle", "plan")  # fmt: skip
    return kind(
        **{name: getattr(case, name) for name in same},
        policy=policies[case.policy],
        handoff=HANDOFFS[case.handoff],
        wan=LINKS[case.link],
        eight_bit_wan=case.policy == "compress" and case.engine == "model",
        main_site="a" if case.policy == "local" else "b",
        eos_ids=frozenset(case.eos_ids),
        sampling=Sampling(case.temperature, min_tokens=case.min_tokens, stop=case.stop),
        admission=Admission(case.max_requests, None, case.shed_after),
        anomaly=Anomaly(0, 10, share=1.0, guess=guess) if guess else None,
        relay_cost=lambda spans: case.relay_slow * cost(spans),
        main_engine=Wavering if case.wavers else ModelEngine,
        changes=[Change(*change) for change in case.changes],
    )


def sessions(case: Case) -> list[Session]:
    return [
        Session(i, start, tuple(Turn(*turn) for turn in turns))
        for i, (start, turns) in enumerate(case.sessions)
    ]


def calm(case: Case) -> list[Session]:
    """What is asked when all is over; small, and nothing of it is cached."""
    first = len(case.sessions)
    return [Session(first + i, i * 10 * MS, (Turn("hij"[i] * 60, 20),)) for i in range(3)]


# -- playing ---------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """Something that must hold of a case does not: `name`, and the detail."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        super().__init__(f"{name}: {detail}")


def must(holds: object, name: str, detail: str) -> None:
    if not holds:
        raise Wrong(name, detail)


def play(case: Case, trace: KeptTrace | None = None) -> Played:
    """The case to its end, with everything checked. Raises what was found first."""
    asked, later = sessions(case), calm(case)
    plan, deployed = case.plan, cluster(case)
    drain_time = DRAIN_TIME + (deployed.deadline + LEASE_GRACE if case.silent else 0)

    async def drive(deployment: Deployment) -> None:
        env, injector = deployment.env, Injector(deployment, plan)
        hangs = RunFailed(f"the case hangs: it is not over after {LONGEST_RUN // SECOND} s")
        limit = env.call_at(env.now() + LONGEST_RUN, env.fail, hangs)
        haunting = env.spawn(misfortunes.haunt(deployment, case), "ghosts")
        intruding = env.spawn(misfortunes.intrude(deployment, case), "a stranger")
        injector.begin()

        async def afterwards() -> None:
            await injector.end()
            await haunting
            await intruding
            for name, kept in _down(deployment).items():
                await deployment.restart(name, kept=kept)
            if any(fault["do"] == "truncate" for fault in case.faults):
                misfortunes.reset_all(deployment)
            await deployment.drain(drain_time)
            await env.sleep(RECONNECT)
            overdue = RunFailed(f"calm requests have not ended within {LIVE_TIME // SECOND} s")
            bound = env.call_at(env.now() + LIVE_TIME, env.fail, overdue)
            await deployment.client.play(later)
            bound.cancel()

        await deployment.play(asked, answered=afterwards, drain_time=drain_time)
        limit.cancel()

    played = Cluster.play(deployed, asked, drive=drive, trace=trace)  # of any subclass
    check(case, played)
    return played


def _down(deployment: Deployment) -> dict[str, bool]:
    """Who crashed and was not started again, and whether its memory was kept."""
    down: dict[str, bool] = {}
    for event in deployment.env.trace.events:
        match event:
            case ev.InstanceCrashed():
                down[event.instance] = event.kept
            case ev.InstanceStarted() | ev.InstanceReturned() | ev.InstanceLeft():
                down.pop(event.instance, None)
    return down


# -- what must hold --------------------------------------------------------------------------------

ROUGH = frozenset({
    "reset", "corrupt", "truncate", "duplicate", "crash", "step-fails", "out-of-memory", "cancel",
    "disconnect",
})  # fmt: skip
"""Kinds that may end a request by themselves. The others make it late at most."""

HANDSHAKE: Ns = Cluster.handshake
LATE = re.compile(r"deadline exceeded|has not answered an offer|no end came")
DAMAGED = re.compile(r"frame header is|lacks the field|of unknown kind|frame '\w+' has ")
"""What is said of a frame that got past its checksum."""
EXPLAINED = re.compile(
    r"cancelled by the client|lost |deadline exceeded|planned fault|out of reach"
    r"|instance can be reached|has not answered an offer|overloaded|has let it go"
)
"""What an end that is no answer may say, where something rough happened."""


def check(case: Case, played: Played) -> None:
    """Of a run that has ended, and of which the monitor had nothing to say."""
    played.assert_sound()
    gateway = played.deployment.gateway
    must(not gateway._streams, "streams left at the gateway", ", ".join(gateway._streams))
    inside = {*gateway.door.tokens, *gateway.door.waiting}
    must(not inside, "requests left inside the door", ", ".join(sorted(inside)))
    for name, capacity in gateway.instances.items():
        must(not capacity.requests and not capacity.unseen, "requests left in the books", name)
    must(not played.deployment.client.under_way, "requests left at the client", "")
    _check_ends(case, played)
    _check_conversations(case, played)
    _check_answers(case, played.records)
    _check_ghosts(played)


def _punctual(case: Case) -> bool:
    """Whether nothing that befalls it lasts long enough to let a deadline pass."""
    lasts = [(f.lasts or LONGEST_RUN) * min(f.firings, 4) for f in case.plan if f.do != "skew"]
    return case.deadline >= 20 * SECOND and sum(lasts) < HANDSHAKE


def _may_lose_the_word(case: Case) -> bool:
    """Whether something may keep the gateway's last word from the client."""
    near = {"rdma"} if case.gateway_site == "a" else set()  # the link between the two
    words = {None, "answer", "end"}
    return any(
        f["do"] == "slow-reader"
        or f.get("link") in near
        or (f["do"] in ("delay", "truncate") and f.get("kind") in words)
        for f in case.faults
    )


def _check_ends(case: Case, played: Played) -> None:
    """Nothing ends without a reason, and calm requests end well."""
    rough = [e.t for e in played.trace.events if isinstance(e, ev.FaultInjected) and e.do in ROUGH]
    planned = {fault["do"] for fault in case.faults}
    twice = bool(planned & {"duplicate", "truncate"})
    calm_from, punctual = len(case.sessions), _punctual(case)
    for event in played.trace.events:
        if isinstance(event, ev.Retried | ev.Rerouted):
            what = f"{event.request} goes on elsewhere: {event.why}"
            harmed = "truncate" not in planned and DAMAGED.search(event.why)
            must(not harmed, "a damaged frame got past its checksum", what)
            must("lease expired" not in event.why, "a lease ended before the deadline", what)
            late = not punctual and LATE.search(event.why)
            before = any(t <= event.t for t in rough)
            fair = late or (before and (twice or EXPLAINED.search(event.why)))
            must(fair, "a further attempt that no fault explains", what)
    for r in played.records:
        must(r.finish_reason is not None, "a request without an end", r.id)
        if r.finish_reason in ("length", "stop"):
            continue
        what = f"{r.id} {r.finish_reason}: {r.detail}"
        must(r.detail, "an end without a reason", what)
        if r.detail.startswith("overloaded") and (case.shed_after or case.max_requests):
            must(r.finish_reason == "rejected" and not r.ids, "shed in mid-answer", what)
            must(_had_not_begun(r), "shed though it had begun", what)
            continue
        must(r.session < calm_from, "a calm request did not finish", what)
        harmed = "truncate" not in planned and DAMAGED.search(r.detail)
        must(not harmed, "a damaged frame got past its checksum", what)
        must("lease expired" not in r.detail, "a lease ended before the deadline", what)
        silent = "no end came" in r.detail and not _may_lose_the_word(case)
        must(not silent, "the gateway had no end for it", what)
        late = r.e2e is not None and r.e2e >= min(case.deadline, HANDSHAKE) * 0.99  # clocks drift
        if late and not punctual and LATE.search(r.detail):
            continue
        assert r.finished is not None
        before = any(t <= r.finished for t in rough)
        must(before, "an end that no fault explains", what)
        must(twice or EXPLAINED.search(r.detail), "an end that no fault explains", what)


def _had_not_begun(r: RequestRecord) -> bool:
    """Of one that was shed because of that. It may begin while the gateway is still to be told."""
    waited = re.search(r"had not begun it after ([\d.]+) s", r.detail)
    if waited is None or r.attempt or r.prefill_started is None or r.routed is None:
        return True
    return r.prefill_started - r.routed >= float(waited[1]) * SECOND * 0.999  # clocks drift


def _check_conversations(case: Case, played: Played) -> None:
    """Prompts are what was said so far, id by id."""
    tokenizer = ByteTokenizer()
    said: dict[int, list[int]] = {}
    asked = [*sessions(case), *calm(case)]
    for r in played.records:
        text, history = asked[r.session].turns[r.turn].text, said.get(r.session, [])
        ended = bool(history) and history[-1] in case.eos_ids
        ids = history + tokenizer.follow_up(text, after_eos=ended) if history else None
        ids = tokenizer.chat(text) if ids is None else ids
        told = list(r.prompt_ids)
        must(told in (ids, []) and (told or not r.ids), "another prompt than was said", r.id)
        said[r.session] = ids + r.ids


def _check_answers(case: Case, records: Iterable[RequestRecord]) -> None:
    answered = [r for r in records if r.ids]
    for r, wanted in zip(answered, _truth(case, answered), strict=True):
        wrong = [at for at, (a, b) in enumerate(zip(r.ids, wanted, strict=True)) if a != b]
        must(not wrong, "not the oracle's id", f"{r.id} at {wrong[:1]}, made by {r.sources}")
        if not case.handoff or "~" in r.id:
            continue
        ends = [_ends(case, r, n) for n in range(1, len(r.ids) + 1)]
        must(not any(ends[:-1]), "it went on behind its end", f"{r.id}: {ends}")
        if r.finish_reason in ("length", "stop"):
            must(ends[-1] == r.finish_reason, "it ended too early", f"{r.id}: {ends[-1:]}")
            must(r.text == _text(case, r), "not the text of its ids", r.id)


def _ends(case: Case, r: RequestRecord, made: int) -> str:
    """Why an answer ends with its first `made` ids; nothing where it goes on."""
    ends = r.ids[made - 1] in case.eos_ids
    text = "" if ends else ByteTokenizer().decode(r.ids[:made])
    if made > case.min_tokens and (ends or any(text.endswith(s) for s in case.stop)):
        return "stop"
    return "length" if made >= r.max_tokens else ""


def _text(case: Case, r: RequestRecord) -> str:
    """What is shown of a whole answer."""
    ended = r.finish_reason == "stop" and r.ids[-1] in case.eos_ids
    text = ByteTokenizer().decode(r.ids[:-1] if ended else r.ids)
    found = [s for s in case.stop if text.endswith(s) and r.finish_reason == "stop" and not ended]
    return text[: -len(found[0])] if found else text


def _truth(case: Case, records: Sequence[RequestRecord]) -> list[list[int]]:
    """The ids that belong at each position, given all that came before."""
    ends = frozenset(case.eos_ids)
    if case.engine == "torch":
        return _torch_truth(records, ends)
    found = []
    for r in records:
        ids = model.oracle(r.prompt_ids, r.ids, r.sampling, vocab=VOCAB, ends=ends)
        drawn = enumerate(zip(ids, r.sources, strict=True), len(r.prompt_ids))
        wavers = "M" if case.wavers else ""
        found.append([wavered(i, at) if by == wavers else i for at, (i, by) in drawn])
    return found


def _torch_truth(records: Sequence[RequestRecord], ends: frozenset[int]) -> list[list[int]]:
    from pddrt.engine.sampling import draw as drawn
    from pddrt.messages import Limits, banned

    from .paritylab import logits_of

    found = []
    for r, logits in zip(records, logits_of([(r.prompt_ids, r.ids) for r in records]), strict=True):
        limits = Limits.of(len(r.prompt_ids), r.max_tokens, ends, r.sampling)
        rows = enumerate(logits.numpy(), len(r.prompt_ids))
        found.append([drawn(row, r.sampling, at, banned(limits, at)) for at, row in rows])
    return found


def _check_ghosts(played: Played) -> None:
    for event in played.trace.events:
        request = getattr(event, "request", "")
        if request.startswith(misfortunes.STALE):
            raise Wrong("a stale manifest was accepted", ev.to_line(event))


# -- how a case fails ------------------------------------------------------------------------------


def failure(case: Case, trace: KeptTrace | None = None) -> str:
    """What is wrong with a case, in one line; nothing, if all is well."""
    try:
        play(case, trace)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # a case may fail in any way, and that is the finding
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


def manner(failed: str) -> str:
    """Failures of the same manner are one bug, as far as one can tell: whom it befell is left
    out.
    """
    name = failed.split(": ")[1] if failed.startswith(("Wrong", "Violation")) else failed
    return re.sub(r"\b(s|p|md|rld)?\d+(\.\d+)?\b|ghost\S*", "#", name)
