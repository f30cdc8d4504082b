"""A whole deployment on modelled engines under the virtual clock, for tests of the roles.

The modelled engine's answer depends on the KV of every position (see engine/model.py), so `oracle`
- one engine, one sequence, no handoff - says what any correct deployment must answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pddrt.deployment import Change, Deployment, Rules
from pddrt.engine.base import Engine
from pddrt.engine.model import ModelEngine
from pddrt.engine.tokens import ByteTokenizer
from pddrt.env import Env, VirtualEnv
from pddrt.errors import RunFailed
from pddrt.faults import Fault
from pddrt.injector import Injector, faulty_engines, local_clocks
from pddrt.invariants import Monitor, Violation
from pddrt.metrics import Recorder, RequestRecord
from pddrt.netem.net import LinkSpec, Topology
from pddrt.netem.simnet import SimNet
from pddrt.policy.admission import Admission
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.handoff import OneShot
from pddrt.policy.handoff import Policy as HandoffPolicy
from pddrt.policy.route import Pdd, Policy
from pddrt.roles.attempts import Recovery
from pddrt.roles.instance import InstanceSpec
from pddrt.simloop import SimLoop
from pddrt.trace import Event, Rerouted, Retried, Trace, request_of
from pddrt.types import MS, SECOND, US, KVLayout, Ns, Run, Sampling, Span
from pddrt.workload import Session, Turn

from .kept import KeptTrace
from .residue import left_behind

LAYOUT = KVLayout(
    "modelled", layers=4, kv_heads=2, head_dim=32, dtype="bfloat16"
)  # 1,024 B a token
VOCAB = 257
SETTLE_TIME = 30 * SECOND
"""Between the last answer and the account: what was under way has arrived, no lease has expired."""


def cost(spans: Sequence[Span]) -> Ns:
    """2 ms a step and 0.1 ms a token."""
    return 2 * MS + sum(len(s.tokens) for s in spans) * 100 * US


@dataclass
class Cluster:
    """What to deploy. Defaults: one P, one RLD, one MD, and a WAN over which 200 tokens take 0.1
    s.
    """

    prefills: int = 1
    relays: int = 1
    mains: int = 1
    page_tokens: int = 16
    page_sizes: dict[str, int] = field(default_factory=dict)
    """Of instances that differ from the others; their memory is as large."""
    pages: int = 64
    pages_of: dict[str, int] = field(default_factory=dict)
    """Of instances that have more or fewer."""
    chunk_tokens: int = 32
    max_batch: int = 16
    fabric: int | None = 1_000_000_000
    """Rate inside site a."""
    rate: int | None = 2_000_000
    delay: Ns = 15 * MS
    jitter: Ns = 0
    wan: Mapping[str, Any] = field(default_factory=dict)
    """What else is said of the WAN, as to `LinkSpec`."""
    policy: Policy = field(default_factory=lambda: Pdd(relay_above=50 * MS))
    eos_ids: frozenset[int] = frozenset()
    deadline: Ns = 600_000 * MS
    sampling: Sampling = field(default_factory=Sampling)
    stream_while_computing: bool = True
    early_first_token: bool = False
    eight_bit_wan: bool = False
    handoff: HandoffPolicy = field(default_factory=OneShot)
    piece: int | None = 32
    main_site: str = "b"
    seed: int = 1
    shuffle: int | None = None
    layouts: dict[str, KVLayout] = field(default_factory=dict)
    gateway_site: str = "a"
    caching: bool = True
    relay_cost: Callable[[Sequence[Span]], Ns] = cost
    main_cost: Callable[[Sequence[Span]], Ns] = cost
    main_engine: type[ModelEngine] = ModelEngine

    signal_age: Ns = 50 * MS
    max_transfers: int = 8
    handshake: Ns = 10 * SECOND
    anomaly: Anomaly | None = None
    recovery: Recovery = field(default_factory=Recovery)
    admission: Admission = field(default_factory=Admission)
    changes: Sequence[Change] = ()
    plan: Sequence[Fault] = ()

    def specs(self) -> list[InstanceSpec]:
        counts = {
            "prefill": ("p", self.prefills),
            "relay": ("rld", self.relays),
            "main": ("md", self.mains),
        }
        return [
            InstanceSpec(
                f"{stem}{i}",
                role,  # type: ignore[arg-type]
                size := self.page_sizes.get(f"{stem}{i}", self.page_tokens),
                self.pages_of.get(f"{stem}{i}", self.pages) * self.page_tokens // size,
                self.chunk_tokens,
                self.max_batch,
                self.caching,
                self.caching,
            )
            for role, (stem, n) in counts.items()
            for i in range(n)
        ]

    def engine(self, env: Env, spec: InstanceSpec) -> Engine:
        kind = self.main_engine if spec.role == "main" else ModelEngine
        return kind(
            env,
            self.layouts.get(spec.name, LAYOUT),
            spec.kv_tokens,
            vocab=VOCAB,
            max_context=4096,
            step_cost={"relay": self.relay_cost, "main": self.main_cost}.get(spec.role, cost),
        )

    def topology(self) -> Topology:
        sites = {s.name: self.main_site if s.role == "main" else "a" for s in self.specs()}
        sites |= {"gateway": self.gateway_site, "client": self.gateway_site, "stranger": "a"}
        return Topology(
            sites,
            [
                LinkSpec("rdma", ("a", "a"), self.fabric, 5 * US),
                LinkSpec("wan", ("a", "b"), self.rate, self.delay, self.jitter, **self.wan),
            ],
        )

    def play(
        self,
        sessions: Sequence[Session],
        during: Callable[[Deployment], Awaitable[None]] | None = None,
        drive: Callable[[Deployment], Awaitable[None]] | None = None,
        trace: KeptTrace | None = None,
    ) -> Played:
        """Runs the sessions to their end; `during` runs beside them. `drive`: what is to be done
        with the deployment in place of playing the sessions (and the plan).
        """
        with asyncio.Runner(loop_factory=lambda: SimLoop(self.shuffle)) as runner:
            return runner.run(self._play(sessions, during, drive, trace or KeptTrace()))

    async def _play(
        self,
        sessions: Sequence[Session],
        during: Callable[[Deployment], Awaitable[None]] | None,
        drive: Callable[[Deployment], Awaitable[None]] | None,
        trace: KeptTrace,
    ) -> Played:
        env = VirtualEnv(self.seed, trace)
        specs = self.specs()
        recorder = Recorder({s.name: s.role for s in specs})
        trace.listen(recorder)
        monitor = Monitor(_raise, trace.recent, recorder.legs)
        trace.listen(monitor)
        topology = self.topology()
        engines = {s.name: self.engine(env, s) for s in specs}
        engines = faulty_engines(env, self.plan, engines)
        clocks = local_clocks(env, self.plan)
        rules = Rules(
            self.policy,
            self.eos_ids,
            self.deadline,
            self.sampling,
            self.stream_while_computing,
            self.early_first_token,
            self.eight_bit_wan,
            handoff=self.handoff,
            piece=self.piece,
            signal_age=self.signal_age,
            max_transfers=self.max_transfers,
            handshake=self.handshake,
            anomaly=self.anomaly,
            recovery=self.recovery,
            admission=self.admission,
        )
        net = SimNet(env, topology)
        tokenizer, changes = ByteTokenizer(), self.changes
        deployment = Deployment(
            env, net, topology, rules, tokenizer, specs, engines, clocks, changes
        )
        play = Injector(deployment, self.plan).play if self.plan else deployment.play

        async def work() -> None:
            await deployment.start()
            if drive is not None:
                await drive(deployment)
            elif during is not None:
                beside = env.spawn(_none(during(deployment)), "beside")
                await play(sessions)
                await beside
            else:
                await play(sessions)

        try:
            await env.run_or_fail(work())
            await env.sleep(SETTLE_TIME)
            left = left_behind(deployment)
            deployment.account()
        except RunFailed:
            monitor.finish()  # says more than that pages are missing
            raise
        monitor.finish()
        await deployment.close()
        return Played(trace, recorder, monitor, deployment, left)


def _raise(violation: Violation) -> None:
    raise violation


async def _none(awaitable: Awaitable[None]) -> None:
    await awaitable


@dataclass
class Played:
    trace: KeptTrace
    recorder: Recorder
    monitor: Monitor
    deployment: Deployment
    left: list[str]
    """What was not gone when all was over; see `residue`."""

    @property
    def records(self) -> list[RequestRecord]:
        return list(self.recorder.requests.values())

    def events(self, kind: type[Event]) -> list[Event]:
        return [e for e in self.trace.events if isinstance(e, kind)]

    def went_on(self, request: str) -> list[tuple[str, str]]:
        """How `request` went on each time it lost somebody, and why: as `trace.Rerouted` says, or
        "again" for a further attempt.
        """
        found = []
        for e in self.trace.events:
            if isinstance(e, Rerouted) and request_of(e.request) == request:
                found.append((e.then, e.why))
            elif isinstance(e, Retried) and e.request == request:
                found.append(("again", e.why))
        return found

    def assert_sound(self) -> None:
        """Every page is back; nothing was lost or doubled, or the monitor would have raised."""
        assert self.monitor.violations == []
        for instance in self.deployment.instances:
            assert instance.empty, instance.name
            assert not instance.sched.sequences, instance.name


def one(text: str, max_tokens: int = 20, start: Ns = 0) -> Session:
    return Session(0, start, (Turn(text, max_tokens, 0),))


def many(count: int, prompt_len: int, max_tokens: int, every: Ns = 0) -> list[Session]:
    return [
        Session(i, i * every, (Turn(f"{i:03d}" + "x" * (prompt_len - 3), max_tokens, 0),))
        for i in range(count)
    ]


def oracle(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The modelled answer, from one engine that prefills at once and decodes one by one."""

    async def answer() -> list[int]:
        env = VirtualEnv(0, Trace())
        engine = ModelEngine(
            env,
            LAYOUT,
            len(prompt) + max_tokens,
            vocab=VOCAB,
            max_context=1 << 20,
            step_cost=lambda _spans: 0,
        )
        ids = list(prompt)
        start = 0
        while len(ids) < len(prompt) + max_tokens:
            span = Span("x", tuple(ids[start:]), start, (Run(0, len(ids)),), Sampling())
            start = len(ids)
            ids.extend(one.token for one in await engine.step([span]) if one is not None)
        return ids[len(prompt) :]

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(answer())
