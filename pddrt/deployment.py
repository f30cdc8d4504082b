"""A deployment: every role, its engine, its connections, and how they are started, watched and
taken down.

The composition root's inner half. It holds the roles because somebody must start and stop them; the
roles do not know each other. Works under either clock and with any engine: `run` gives it real
models, tests give it modelled ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.engine.tokens import Tokenizer
from pddrt.env import Env
from pddrt.errors import CannotRun, RunFailed
from pddrt.netem.net import Net, Topology
from pddrt.policy.route import Policy
from pddrt.roles.client import Client
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import LEASE_GRACE, Gateway
from pddrt.roles.node import Instance, InstanceSpec, Node
from pddrt.roles.prefill import Prefill
from pddrt.scenario import CLIENT, GATEWAY
from pddrt.trace import InstanceStarted, LinkTotal
from pddrt.types import SECOND, Ns, Sampling
from pddrt.workload import Session

START_TIME: Ns = 30 * SECOND
"""How long the control streams of one role may take to open."""
DRAIN_TIME: Ns = 30 * SECOND
"""How long instances may take to give everything back after the last answer: a step and a few link
delays.
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What all roles of a deployment agree on."""

    policy: Policy
    eos_ids: frozenset[int]
    deadline: Ns
    sampling: Sampling
    stream_while_computing: bool = True
    early_first_token: bool = False


class Deployment:
    def __init__(
        self,
        env: Env,
        net: Net,
        topology: Topology,
        rules: Rules,
        tokenizer: Tokenizer,
        specs: Sequence[InstanceSpec],
        engines: Mapping[str, Engine],
    ) -> None:
        self.env = env
        self.net = net
        self.topology = topology
        self.instances: list[Instance] = [
            self._instance(spec, engines[spec.name], rules) for spec in specs
        ]
        self.gateway = Gateway(
            env,
            net,
            GATEWAY,
            topology=topology,
            policy=rules.policy,
            tokenizer=tokenizer,
            eos_ids=rules.eos_ids,
            deadline=rules.deadline,
        )
        self.client = Client(env, net, CLIENT, GATEWAY, rules.sampling)

    def _instance(self, spec: InstanceSpec, engine: Engine, rules: Rules) -> Instance:
        if spec.role == "prefill":
            return Prefill(
                self.env,
                self.net,
                engine,
                spec,
                eos_ids=rules.eos_ids,
                stream_while_computing=rules.stream_while_computing,
                early_first_token=rules.early_first_token,
            )
        lease = rules.deadline + LEASE_GRACE
        return Decoder(self.env, self.net, engine, spec, eos_ids=rules.eos_ids, lease=lease)

    def _named(self, *roles: str) -> list[str]:
        return [i.name for i in self.instances if i.spec.role in roles]

    async def start(self) -> None:
        """Brings every role up and every control stream with it."""
        for instance in self.instances:
            await instance.engine.start()
            spec, site = instance.spec, self.topology.sites[instance.name]
            about = (spec.name, spec.role, site, spec.num_pages, spec.page_tokens)
            self.env.trace.emit(InstanceStarted(self.env.now(), *about))
        nodes: list[Node] = [*self.instances, self.gateway, self.client]
        for node in nodes:
            await node.start()
        dials: list[tuple[Node, list[str]]] = [(self.gateway, [i.name for i in self.instances])]
        for instance in self.instances:
            if instance.spec.role == "prefill":
                dials.append((instance, self._named("relay", "main")))
            elif instance.spec.role == "relay":
                dials.append((instance, self._named("main")))
        dials.append((self.client, [GATEWAY]))
        for node, peers in dials:
            await self._dial(node, peers)

    async def _dial(self, node: Node, peers: list[str]) -> None:
        dialling = asyncio.ensure_future(node.dial(peers))
        until = self.env.now() + START_TIME
        timer = self.env.call_at(until, dialling.cancel)
        try:
            await dialling
        except asyncio.CancelledError:
            if self.env.now() < until:
                raise
            met = self.gateway.instances if node is self.gateway else node.peers
            missing = ", ".join(p for p in peers if p not in met)
            raise CannotRun(
                f"{node.name} cannot reach {missing} within {START_TIME // SECOND} s"
            ) from None
        finally:
            timer.cancel()

    async def play(self, sessions: Sequence[Session], concurrency: int | None = None) -> None:
        """Plays the workload to its end and waits until everything has been given back.

        Raises RunFailed, naming who holds what, where that does not happen in DRAIN_TIME.
        """
        await self.client.play(sessions, concurrency)
        await self.drain()

    async def drain(self) -> None:
        until = self.env.now() + DRAIN_TIME
        draining = asyncio.ensure_future(self._all_empty())
        timer = self.env.call_at(until, draining.cancel)
        try:
            await draining
        except asyncio.CancelledError:
            if self.env.now() < until:
                raise
            held = "; ".join(
                f"{i.name}: {', '.join(i.memory.holders)}" for i in self.instances if not i.empty
            )
            raise RunFailed(f"pages were not given back: {held}") from None
        finally:
            timer.cancel()

    async def _all_empty(self) -> None:
        """Returns when all instances are empty at once: one that was may have been offered more."""
        while not all(i.empty for i in self.instances):
            for instance in self.instances:
                await instance.drained()

    async def close(self) -> None:
        """Takes everything down; what was under way is lost. Nothing is left running."""
        nodes: list[Node] = [self.client, self.gateway, *self.instances]
        for node in nodes:
            await node.close()
        await self.net.close()

    def account(self) -> None:
        """Records what the pools and links say after the run."""
        for instance in self.instances:
            instance.check_memory()
        for s in self.net.stats():
            kinds = s.by_kind
            self.env.trace.emit(
                LinkTotal(
                    self.env.now(),
                    s.link,
                    s.src_site,
                    s.dst_site,
                    s.bytes,
                    kinds.get("kv", 0),
                    kinds.get("ids", 0),
                    s.busy,
                    s.peak_flows,
                    s.late_p99,
                    s.late_max,
                )
            )
