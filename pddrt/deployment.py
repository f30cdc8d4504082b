"""A deployment: every role, its engine, its connections, and how they are started, watched and
taken down.

The composition root's inner half. It holds the roles because somebody must start and stop them; the
roles do not know each other. Works under either clock and with any engine: `run` gives it real
models, tests give it modelled ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pddrt.drift import DriftObserver
from pddrt.engine.base import Engine
from pddrt.engine.tokens import Tokenizer
from pddrt.env import Env
from pddrt.errors import CannotRun, ConnectionLost, RunFailed
from pddrt.netem.net import Net, Topology, route
from pddrt.policy.admission import Admission
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.handoff import OneShot
from pddrt.policy.handoff import Policy as HandoffPolicy
from pddrt.policy.route import Policy
from pddrt.roles.attempts import Recovery
from pddrt.roles.client import Client
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import LEASE_GRACE, Gateway
from pddrt.roles.instance import Instance, InstanceSpec
from pddrt.roles.node import Node
from pddrt.roles.prefill import Prefill
from pddrt.scenario import CLIENT, GATEWAY
from pddrt.stalls import StallObserver
from pddrt.trace import InstanceLeft, InstanceReturned, InstanceStarted, LinkQuality, LinkTotal
from pddrt.types import MS, SECOND, Ns, Sampling
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
    eight_bit_wan: bool = False
    """Whether KV goes to other sites in 8 bits."""
    handoff: HandoffPolicy = field(default_factory=OneShot)
    piece: int | None = None
    """Ids that a main decoder extends over in one step while a relay decodes too."""
    signal_age: Ns = 50 * MS
    """How old what the router knows of an instance's load may be."""
    max_transfers: int = 8
    """Of one P over one path at a time."""
    handshake: Ns = 10 * SECOND
    """How long a decoder may take to answer an offer at all, and KV that has left P to arrive."""
    anomaly: Anomaly | None = None
    """Requests whose KV is not sent to main decoders."""
    admission: Admission = field(default_factory=Admission)
    """Who is refused where more comes than can be served."""
    recovery: Recovery = field(default_factory=Recovery)
    """Further attempts at requests that lost an instance."""


@dataclass(frozen=True, slots=True)
class Change:
    """An instance joins, or leaves, `at` so long after the workload has begun."""

    at: Ns
    name: str
    joins: bool


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
        clocks: Mapping[str, Env] | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        """`specs`: of all instances that there ever are. `clocks`: by site, the env of the roles
        there, where it is not the common one. `changes`: an instance whose first one is that it
        joins is not there at the beginning.
        """
        self.env = env
        self.net = net
        self.topology = topology
        self.specs = specs
        self.rules = rules
        self._clocks = clocks or {}
        self._changes: dict[str, list[Change]] = {}
        for change in sorted(changes, key=lambda c: c.at):
            self._changes.setdefault(change.name, []).append(change)
        self._leaving: set[str] = set()
        later = {name for name, of in self._changes.items() if of[0].joins}
        self._absent = {s.name: (s, engines[s.name]) for s in specs if s.name in later}
        self.instances: list[Instance] = [
            self._instance(spec, engines[spec.name], rules)
            for spec in specs
            if spec.name not in later
        ]
        self.gateway = Gateway(
            self._env_at(GATEWAY),
            net,
            GATEWAY,
            topology=topology,
            policy=rules.policy,
            tokenizer=tokenizer,
            eos_ids=rules.eos_ids,
            deadline=rules.deadline,
            signal_age=rules.signal_age,
            anomaly=rules.anomaly,
            recovery=rules.recovery,
            admission=rules.admission,
        )
        env.trace.listen(DriftObserver(env, lambda: self.instances))
        self._stalls = StallObserver(env, lambda: self.instances)
        env.trace.listen(self._stalls)
        patience = rules.deadline + 2 * LEASE_GRACE  # longer than any lease
        self.client = Client(self._env_at(CLIENT), net, CLIENT, GATEWAY, rules.sampling, patience)

    def _env_at(self, name: str) -> Env:
        return self._clocks.get(self.topology.sites[name], self.env)

    def _instance(self, spec: InstanceSpec, engine: Engine, rules: Rules) -> Instance:
        if spec.role == "prefill":
            return Prefill(
                self._env_at(spec.name),
                self.net,
                engine,
                spec,
                eos_ids=rules.eos_ids,
                stream_while_computing=rules.stream_while_computing,
                early_first_token=rules.early_first_token,
                compressed=frozenset(self._abroad(spec.name) if rules.eight_bit_wan else ()),
                paths=self._paths(spec.name),
                max_transfers=rules.max_transfers,
                handshake=rules.handshake,
            )
        return Decoder(
            self._env_at(spec.name),
            self.net,
            engine,
            spec,
            eos_ids=rules.eos_ids,
            lease=rules.deadline + LEASE_GRACE,
            silence=rules.handshake,
            handoff=rules.handoff,
            round_trips=self._round_trips(spec.name),
            piece=rules.piece,
        )

    def _round_trips(self, name: str) -> dict[str, Ns]:
        """From `name` to each main decoder, as an operator knows it: twice the link's delay."""
        mains = [s.name for s in self.specs if s.role == "main"]
        joined = [main for main in mains if self.topology.joined(name, main)]
        links = {main: self.topology.link_between(name, main) for main in joined}
        return {main: 2 * link.delay if link else 0 for main, link in links.items()}

    def _paths(self, name: str) -> dict[str, str]:
        """From `name` to each decoder: the link that leads there."""
        decoders = [s.name for s in self.specs if s.role != "prefill"]
        joined = [other for other in decoders if self.topology.joined(name, other)]
        links = {other: self.topology.link_between(name, other) for other in joined}
        return {other: link.name if link else "" for other, link in links.items()}

    def _abroad(self, name: str) -> list[str]:
        """Instances of other sites than that of `name`."""
        sites = self.topology.sites
        return [s.name for s in self.specs if sites[s.name] != sites[name]]

    def _within_reach(self, name: str, *roles: str) -> list[str]:
        """Instances that `name` can be sent KV or ids of; those without a path it never is."""
        of = [i.name for i in self.instances if i.spec.role in roles]
        return [other for other in of if self.topology.joined(name, other)]

    async def start(self) -> None:
        """Brings every role up and every control stream with it."""
        for instance in self.instances:
            await instance.engine.start()
            self._announce(instance)
        nodes: list[Node] = [*self.instances, self.gateway, self.client]
        for node in nodes:
            await node.start()
        dials: list[tuple[Node, list[str]]] = [(self.gateway, [i.name for i in self.instances])]
        dials += [(instance, self._dials(instance)) for instance in self.instances]
        dials.append((self.client, [GATEWAY]))
        for node, peers in dials:
            await self._dial(node, peers)

    def _announce(self, instance: Instance) -> None:
        spec, site = instance.spec, self.topology.sites[instance.name]
        about = (spec.name, spec.role, site, spec.num_pages, spec.page_tokens)
        self.env.trace.emit(InstanceStarted(self.env.now(), *about))

    def _dials(self, instance: Instance) -> list[str]:
        """Whom it opens control streams to; the gateway opens one to every instance."""
        downstream = {"prefill": ("relay", "main"), "relay": ("main",), "main": ()}
        return self._within_reach(instance.name, *downstream[instance.spec.role])

    # -- instances that come and go ----------------------------------------------------------------

    def instance(self, name: str) -> Instance:
        """As it is now: after a restart it is another. Raises KeyError."""
        return {instance.name: instance for instance in self.instances}[name]

    def crash(self, name: str, *, keep: bool) -> None:
        """It stops without a word; with `keep` its memory outlives that. It must be running."""
        instance = self.instance(name)
        assert instance.running
        instance.crash(keep=keep)

    async def restart(self, name: str, *, kept: bool) -> None:
        """It listens again and calls its peers, which look for it too. `kept` as it crashed.

        Returns once it listens, which is when its engine has ended what it was at; or when it has
        left for good meanwhile.
        """
        before = self.instance(name)
        assert not before.running
        await before.stopped()
        if before not in self.instances or name in self._leaving:
            return  # it was scaled away meanwhile
        if kept:
            instance = before
            self.env.trace.emit(InstanceReturned(self.env.now(), name))
        else:
            spec = replace(before.spec, life=before.spec.life + 1)
            instance = self._instance(spec, before.engine, self.rules)
            self.instances[self.instances.index(before)] = instance
            self._announce(instance)
        await instance.start()
        instance.redial(self._dials(instance))

    async def join(self, name: str) -> None:
        """One that is not there comes. Who may need it reaches it first, then it gets requests."""
        spec, engine = self._absent.pop(name)
        if not spec.life:
            await engine.start()
        instance = self._instance(spec, engine, self.rules)
        self.instances.append(instance)
        self._announce(instance)
        await instance.start()
        for other in list(self.instances):
            mine = self._dials(other)
            for peer in mine if other is instance else [name] if name in mine else []:
                try:
                    await other.dial([peer])
                except ConnectionLost:
                    if other.running:
                        other.redial([peer])
        await self.gateway.meet(name)

    async def leave(self, name: str) -> None:
        """It gets no requests any more; when what runs there has ended, it says good-bye. One that
        has crashed meanwhile goes without; it may also have begun another life.
        """
        self.gateway.retire(name)
        await self.gateway.released(name)
        while busy := self._still_busy(name):
            await busy.changed()
        instance = self.instance(name)
        self._leaving.add(name)
        await instance.leave()
        self._leaving.discard(name)
        instance.check_memory()
        self.env.trace.emit(InstanceLeft(self.env.now(), name))
        self.instances.remove(instance)
        self._absent[name] = replace(instance.spec, life=instance.spec.life + 1), instance.engine

    def _still_busy(self, name: str) -> Instance | None:
        """Somebody for whom a request is under way that `name` has a part in."""
        for instance in self.instances:
            if instance.involves(name) or (instance.name == name and not instance.empty):
                return instance
        return None

    # -- a run -------------------------------------------------------------------------------------

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
            missing = [p for p in peers if p not in met]
            dead = dict.fromkeys(link for p in missing for link in self._dead(node.name, p))
            why = f": link {', '.join(dead)} carries nothing (rate 0)" if dead else ""
            who = f"{node.name} cannot reach {', '.join(missing)}"
            raise CannotRun(f"{who} within {START_TIME // SECOND} s{why}") from None
        finally:
            timer.cancel()

    def _dead(self, one: str, other: str) -> Iterator[str]:
        """The links between two that carry nothing, one way or the other."""
        a, b = (self.topology.sites[name] for name in (one, other))
        for hop in (*route(self.topology.links, a, b), *route(self.topology.links, b, a)):
            if hop.rate == 0:
                yield hop.name

    async def play(
        self,
        sessions: Sequence[Session],
        concurrency: int | None = None,
        answered: Callable[[], Awaitable[None]] | None = None,
        drain_time: Ns = DRAIN_TIME,
    ) -> None:
        """Plays the workload to its end and waits until everything has been given back. `answered`
        is awaited between the two.

        Raises RunFailed, naming who holds what, where that does not happen in `drain_time`.
        """
        begin, under_way = self.env.now(), set[str]()

        async def scale(name: str, changes: Sequence[Change]) -> None:
            for change in changes:
                await self.env.sleep_until(begin + change.at)
                under_way.add(name)
                await (self.join(name) if change.joins else self.leave(name))
                under_way.discard(name)

        scaling = {
            name: self.env.spawn(scale(name, of), f"scales {name}")
            for name, of in self._changes.items()
        }
        await self.client.play(sessions, concurrency)
        if answered is not None:
            await answered()
        await self.drain(drain_time)
        for name, task in scaling.items():
            if name not in under_way:
                task.cancel()
        if scaling:
            await asyncio.wait(scaling.values())

    async def drain(self, drain_time: Ns = DRAIN_TIME) -> None:
        """Returns when all is given back. KV may still be crossing, and answers be learnt: that may
        take as long as leases allow. Raises RunFailed where nothing moves for `drain_time`.
        """
        last = self.env.now() + self.rules.deadline + 2 * LEASE_GRACE + drain_time
        draining = asyncio.ensure_future(self._all_empty())
        try:
            while not draining.done():
                seen = self.env.trace.count
                waiting = asyncio.ensure_future(self.env.sleep(drain_time))
                await asyncio.wait([draining, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                moved = self.env.trace.count > seen or self.net.moving()
                if not draining.done() and (not moved or self.env.now() > last):
                    held = (i for i in self.instances if not i.empty)
                    names = "; ".join(f"{i.name}: {', '.join(i.memory.holders)}" for i in held)
                    raise RunFailed(f"pages were not given back: {names}")
        finally:
            draining.cancel()

    async def _all_empty(self) -> None:
        """Returns when all instances are empty at once: one that was may have been offered more."""
        while not all(i.empty for i in self.instances):
            for instance in list(self.instances):
                await instance.drained()

    async def close(self) -> None:
        """Takes everything down; what was under way is lost. Nothing is left running."""
        self._stalls.close()
        nodes: list[Node] = [self.client, self.gateway, *self.instances]
        for node in nodes:
            await node.close()
        for _, engine in self._absent.values():
            await engine.close()
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
            if s.told:
                self.env.trace.emit(
                    LinkQuality(
                        self.env.now(),
                        s.link,
                        s.src_site,
                        s.dst_site,
                        s.delay_mean,
                        s.delay_deviation,
                        s.resent,
                        s.dropped,
                        s.lost,
                    )
                )
