"""The injector: makes a deployment suffer what its scenario's faults say (see `pddrt.faults`).

It listens to the trace and to the clock. When the moment of a fault has come it aims (whom would
this hit, now?), says so in the trace, acts, and undoes it when its time is over. What finds nothing
to act on is told too, as missed. A fault that waits for an event acts right behind what the event
happened in, never within it.

Times count from the beginning of the workload. What is still in force when the last answer has come
ends then, so that everything can be given back; an instance that crashed for good stays down.

Everything is drawn from streams of the run's seed, one a fault: the same plan and seed give the
same run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pddrt import faults
from pddrt.deployment import DRAIN_TIME, Deployment
from pddrt.engine.base import Engine
from pddrt.engine.faulty import FaultyEngine
from pddrt.env import Env, LocalEnv, Timer
from pddrt.faults import Fault
from pddrt.netem.faults import Impairment, NetFaults, Snare
from pddrt.netem.net import Connection
from pddrt.netem.stream import EmulatedNet, Outgoing, Stream
from pddrt.roles.gateway import LEASE_GRACE
from pddrt.roles.instance import Instance
from pddrt.roles.load import Load
from pddrt.roles.node import Node
from pddrt.roles.send import Sender
from pddrt.trace import Event, FaultEnded, FaultInjected, FaultMissed, request_of
from pddrt.types import SECOND
from pddrt.units import format_duration, format_rate
from pddrt.workload import Session

End = Callable[[], Awaitable[None] | None]


class Missed(Exception):
    """There is nothing for a fault to act on, and why."""


@dataclass(slots=True)
class Effect:
    """What a fault will do to whom; in the end, what it did. `end` undoes it, where it has an
    end.
    """

    what: str
    begin: Callable[[], None]
    end: End | None = None


@dataclass(slots=True, eq=False)
class _InForce:
    number: int
    firing: int
    fault: Fault
    effect: Effect
    timer: Timer | None = None


# -- before a deployment is made -------------------------------------------------------------------


def faulty_engines(
    env: Env, plan: Sequence[Fault], engines: Mapping[str, Engine]
) -> dict[str, Engine]:
    """The engines, those wrapped that the plan has faults for."""
    of_engines = (faults.Slow, faults.StepFails, faults.OutOfMemory)
    hit = {fault.instance for fault in plan if isinstance(fault, of_engines)}
    return {
        name: FaultyEngine(env, engine) if name in hit else engine
        for name, engine in engines.items()
    }


def local_clocks(env: Env, plan: Sequence[Fault]) -> dict[str, Env]:
    """By site, the env of the roles there, where their clocks run apart."""
    skews = [fault for fault in plan if isinstance(fault, faults.Skew)]
    return {s.site: LocalEnv(env, offset=s.offset, drift_ppm=s.drift) for s in skews}


# -- a run -----------------------------------------------------------------------------------------


class Injector:
    def __init__(self, deployment: Deployment, plan: Sequence[Fault]) -> None:
        """The deployment's engines and clocks are made for the plan: see above."""
        net = deployment.net
        assert isinstance(net, EmulatedNet)
        self._deployment = deployment
        self._env = deployment.env
        self._plan = plan
        self._net = NetFaults(net)
        self._rngs = [self._env.rng(f"fault {number}") for number in range(len(plan))]
        self._fired = [0] * len(plan)
        self._matched = [0] * len(plan)
        self._timers: dict[int, Timer] = {}
        """Of faults whose moment is known."""
        self._waiting: dict[type[Event], list[int]] = defaultdict(list)
        self._in_force: list[_InForce] = []
        self._ending: list[asyncio.Task[None]] = []
        self._running = False
        self._signals = _Signals(deployment)
        self._aims: dict[type[Fault], Callable[[int, Fault, Event | None], Effect]] = {
            faults.LinkDown: self._link,
            faults.LinkSlow: self._link,
            faults.LinkLong: self._link,
            faults.JitterStorm: self._link,
            faults.Reset: self._reset,
            faults.Corrupt: self._frames,
            faults.Truncate: self._frames,
            faults.Duplicate: self._frames,
            faults.Delay: self._frames,
            faults.Crash: self._crash,
            faults.Pause: self._pause,
            faults.Slow: self._slow,
            faults.StepFails: self._failing_steps,
            faults.OutOfMemory: self._failing_steps,
            faults.PagesTaken: self._pages_taken,
            faults.Cancel: self._cancel,
            faults.Disconnect: self._disconnect,
            faults.SlowReader: self._slow_reader,
            faults.StaleSignals: self._distort,
            faults.WrongSignals: self._distort,
        }

    async def play(self, sessions: Sequence[Session], concurrency: int | None = None) -> None:
        """As `Deployment.play`, under the plan. What a fault left behind may come back only when a
        lease ends.
        """
        self.begin()
        lease = self._deployment.rules.deadline + LEASE_GRACE
        try:
            await self._deployment.play(sessions, concurrency, self.end, DRAIN_TIME + lease)
        finally:
            self._stop()

    def begin(self) -> None:
        """The workload begins now."""
        self._running = True
        now = self._env.now()
        for number, fault in enumerate(self._plan):
            if isinstance(fault, faults.Skew):
                what = f"clocks at {fault.site} run apart"
                self._env.trace.emit(FaultInjected(now, number, 1, fault.do, what))
            elif fault.at is not None:
                self._timers[number] = self._env.call_at(now + fault.at, self._fire, number, None)
            elif fault.rate is not None:
                self._next_at_random(number)
            elif fault.on is not None:
                self._waiting[faults.EVENTS[fault.on.event]].append(number)
        if self._waiting:
            self._env.trace.listen(self._hear)

    async def end(self) -> None:
        """Nothing happens from now on, and what is in force ends. Returns when it has."""
        self._running = False
        for in_force in list(self._in_force):
            if isinstance(in_force.fault, faults.Crash) and in_force.fault.lasts is None:
                continue  # for good
            self._over(in_force)
        for instance in self._deployment.instances:
            if isinstance(instance.engine, FaultyEngine):
                instance.engine.recover()
        if self._ending:
            await asyncio.wait(self._ending)
        self._stop()

    def _stop(self) -> None:
        """Nothing is set any more, and the net is as it was."""
        self._running = False
        timers = [*self._timers.values(), *(i.timer for i in self._in_force if i.timer)]
        for timer in timers:
            timer.cancel()
        self._net.close()

    # -- triggers ----------------------------------------------------------------------------------

    def _next_at_random(self, number: int) -> None:
        rate = self._plan[number].rate
        assert rate is not None
        wait = round(self._rngs[number].expovariate(rate) * SECOND)
        self._timers[number] = self._env.call_at(
            self._env.now() + wait, self._fire_at_random, number
        )

    def _fire_at_random(self, number: int) -> None:
        self._fire(number, None)
        if self._fired[number] < self._plan[number].firings:
            self._next_at_random(number)

    def _hear(self, event: Event) -> None:
        for number in self._waiting.get(type(event), ()) if self._running else ():
            on = self._plan[number].on
            if on is not None and on.matches(event):
                self._matched[number] += 1
                if self._matched[number] >= on.nth:
                    asyncio.get_running_loop().call_soon(self._fire, number, event)

    def _fire(self, number: int, event: Event | None) -> None:
        """The moment of a fault has come."""
        fault = self._plan[number]
        if not self._running or self._fired[number] >= fault.firings:
            return
        self._fired[number] += 1
        about = (number, self._fired[number], fault.do)
        try:
            effect = self._aims[type(fault)](number, fault, event)
        except Missed as missed:
            self._env.trace.emit(FaultMissed(self._env.now(), *about, str(missed)))
            return
        self._env.trace.emit(FaultInjected(self._env.now(), *about, effect.what))
        effect.begin()
        if effect.end is not None:
            in_force = _InForce(number, self._fired[number], fault, effect)
            self._in_force.append(in_force)
            if fault.lasts is not None:
                until = self._env.now() + fault.lasts
                in_force.timer = self._env.call_at(until, self._over, in_force)

    def _over(self, in_force: _InForce) -> None:
        """The time of a fault is over."""
        if in_force.timer is not None:
            in_force.timer.cancel()
        self._in_force.remove(in_force)
        assert in_force.effect.end is not None
        ending = in_force.effect.end()
        if ending is None:
            self._told_over(in_force)
        else:
            name = f"fault {in_force.number} ends"
            self._ending = [task for task in self._ending if not task.done()]
            self._ending.append(self._env.spawn(self._await_end(in_force, ending), name))

    def _spent(self, number: int, firing: int) -> None:
        """It has nothing more to do, before its time is over."""
        for in_force in self._in_force:
            if (in_force.number, in_force.firing) == (number, firing):
                self._over(in_force)
                return

    async def _await_end(self, in_force: _InForce, ending: Awaitable[None]) -> None:
        await ending
        self._told_over(in_force)

    def _told_over(self, i: _InForce) -> None:
        about = (i.number, i.firing, i.fault.do, i.effect.what)
        self._env.trace.emit(FaultEnded(self._env.now(), *about))

    # -- whom they hit -----------------------------------------------------------------------------

    def _instance(self, name: str) -> Instance:
        """Raises Missed unless it runs."""
        try:
            instance = self._deployment.instance(name)
        except KeyError:
            raise Missed(f"{name} is not there") from None
        if not instance.running:
            raise Missed(f"{name} is down")
        return instance

    def _engine(self, name: str) -> FaultyEngine:
        engine = self._instance(name).engine
        assert isinstance(engine, FaultyEngine)
        return engine

    def _member(self, name: str) -> Node:
        deployment = self._deployment
        others = {node.name: node for node in (deployment.gateway, deployment.client)}
        return others[name] if name in others else self._instance(name)

    def _request(self, number: int, named: str | None, event: Event | None) -> str:
        """The request named, or that of the event, or any that is under way."""
        under_way = self._deployment.client.under_way
        named = named or getattr(event, "request", None)
        if named is not None:
            named = request_of(named)
            if named not in under_way:
                raise Missed(f"{named} is not under way")
            return named
        if not under_way:
            raise Missed("no request is under way")
        return self._rngs[number].choice(under_way)

    # -- links, streams, frames --------------------------------------------------------------------

    def _link(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.OfLink)
        where = fault.link if fault.direction is None else f"{fault.link} {fault.direction}"
        match fault:
            case faults.LinkDown():
                what, worse = f"{where} is down", {"rate": 0}
            case faults.LinkSlow():
                what, worse = f"{where} carries {format_rate(fault.to)}", {"rate": fault.to}
            case faults.LinkLong():
                what = f"{where} has a delay of {format_duration(fault.delay)}"
                worse = {"delay": fault.delay}
            case faults.JitterStorm():
                what = f"{where} has a jitter of {format_duration(fault.jitter)}"
                worse = {"jitter": fault.jitter}
            case _:
                raise AssertionError(fault.do)
        impairment = Impairment(fault.link, fault.way, **worse)
        return Effect(
            what, partial(self._net.impair, impairment), partial(self._net.relieve, impairment)
        )

    def _reset(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Reset)
        if fault.between is not None:
            a, b = fault.between
            streams = self._member(a).streams(b)
            found = [c for c, kind in streams.items() if fault.purpose in (None, kind)]
            what = f"between {a} and {b}"
        else:
            # Its KV may still cross when it has its answer.
            request = fault.request or getattr(event, "request", None)
            request = request or self._request(number, None, None)
            found = self._carrying(request_of(request))
            what = f"with KV of {request}"
        if not found:
            raise Missed(f"there is no stream {what}")

        def begin() -> None:
            for conn in found:
                self._net.reset(conn)

        ends = ", ".join(dict.fromkeys(conn.peer for conn in found))
        return Effect(f"{len(found)} streams {what} are cut (to {ends})", begin)

    def _carrying(self, request: str) -> list[Connection]:
        senders = [i for i in self._deployment.instances if isinstance(i, Sender)]
        return [conn for sender in senders for conn in sender.carrying(request)]

    def _frames(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Corrupt | faults.Truncate | faults.Duplicate | faults.Delay)
        by = fault.by if isinstance(fault, faults.Delay) else 0
        about = (fault.kind, fault.src, fault.dst, fault.frames, by)
        snare = Snare(fault.do, self._rngs[number], *about)
        what = f"{fault.do} {fault.frames} of {fault.kind or 'any kind'}"
        what += f" from {fault.src or 'anybody'} to {fault.dst or 'anybody'}"
        effect = Effect(what, partial(self._net.lay, snare), partial(self._net.lift, snare))
        firing = self._fired[number]

        def caught(stream: Stream, out: Outgoing) -> None:
            effect.what = f"{fault.do}: {out.kind} from {stream.name} to {stream.peer}"
            if not snare.frames:
                asyncio.get_running_loop().call_soon(self._spent, number, firing)

        snare.caught = caught
        return effect

    # -- instances ---------------------------------------------------------------------------------

    def _crash(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Crash)
        name, keep = fault.instance, fault.memory == "kept"
        instance, deployment = self._instance(name), self._deployment

        async def end() -> None:
            if instance in deployment.instances:  # it may have been scaled away meanwhile
                await deployment.restart(name, kept=keep)

        what = f"{name} stops, memory {fault.memory}"
        return Effect(what, partial(deployment.crash, name, keep=keep), end)

    def _pause(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Pause)
        instance, resumed = self._instance(fault.instance), asyncio.Event()
        if instance.hold is not None:
            raise Missed(f"{fault.instance} is paused")

        async def hold() -> None:
            await resumed.wait()

        def begin() -> None:
            instance.hold = hold

        def end() -> None:
            instance.hold = None
            resumed.set()

        return Effect(f"{fault.instance} neither steps nor reads", begin, end)

    def _slow(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Slow)
        engine = self._engine(fault.instance)
        if engine.factor != 1:
            raise Missed(f"{fault.instance} is slow")
        return Effect(
            f"steps of {fault.instance} take {fault.factor:g} times as long",
            partial(setattr, engine, "factor", fault.factor),
            partial(setattr, engine, "factor", 1.0),
        )

    def _failing_steps(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.StepFails | faults.OutOfMemory)
        engine, out_of_memory = self._engine(fault.instance), fault.do == "out-of-memory"
        return Effect(
            f"the next {fault.steps} steps of {fault.instance}: {fault.do}",
            partial(engine.fail, fault.steps, out_of_memory=out_of_memory),
        )

    def _pages_taken(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.PagesTaken)
        instance = self._instance(fault.instance)
        pages = round(fault.share * instance.memory.num_pages)
        free = instance.memory.num_pages - instance.memory.used
        pages, owner = min(pages, free), f"stranger {number}.{self._fired[number]}"
        if not pages:
            raise Missed(f"{fault.instance} has no free page")

        def begin() -> None:
            instance.occupy(owner, pages)

        what = f"a stranger takes {pages} pages of {fault.instance}"
        return Effect(what, begin, partial(instance.vacate, owner))

    # -- the client --------------------------------------------------------------------------------

    def _cancel(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.Cancel)
        client = self._deployment.client
        if fault.session is not None:
            found = [r for r in client.under_way if r.startswith(f"s{fault.session}.")]
            if not found:
                raise Missed(f"nothing of session {fault.session} is under way")
        else:
            found = [self._request(number, fault.request, event)]

        def begin() -> None:
            for request in found:
                client.cancel(request)

        return Effect(f"the user cancels {', '.join(found)}", begin)

    def _disconnect(self, number: int, fault: Fault, event: Event | None) -> Effect:
        client = self._deployment.client
        conn = client.peers.get(client.gateway)
        if conn is None:
            raise Missed("the client is not connected")
        return Effect("the client's connection breaks", conn.abort)

    def _slow_reader(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.SlowReader)
        client = self._deployment.client
        if client.hold is not None:
            raise Missed("the client is slow")
        dawdle = partial(client.env.sleep, fault.by)
        return Effect(
            f"the client takes {format_duration(fault.by)} over each frame",
            partial(setattr, client, "hold", dawdle),
            partial(setattr, client, "hold", None),
        )

    # -- the router's signals ----------------------------------------------------------------------

    def _distort(self, number: int, fault: Fault, event: Event | None) -> Effect:
        assert isinstance(fault, faults.StaleSignals | faults.WrongSignals)
        whose = fault.instance or "all instances"
        if isinstance(fault, faults.StaleSignals):
            what = f"the load of {whose} is known {format_duration(fault.by)} late"
        else:
            what = f"the load of {whose} seems {fault.factor:g} times what it is"
        return Effect(what, partial(self._signals.add, fault), partial(self._signals.remove, fault))


class _Signals:
    """Between what instances say of their load and what the gateway hears."""

    def __init__(self, deployment: Deployment) -> None:
        self._env = deployment.env
        self._gateway = deployment.gateway
        self._straight = deployment.gateway.hears
        self._distortions: list[faults.StaleSignals | faults.WrongSignals] = []

    def add(self, fault: faults.StaleSignals | faults.WrongSignals) -> None:
        self._distortions.append(fault)
        self._gateway.hears = self._hear

    def remove(self, fault: faults.StaleSignals | faults.WrongSignals) -> None:
        """What is late comes in its time."""
        self._distortions.remove(fault)
        if not self._distortions:
            self._gateway.hears = self._straight

    def _hear(self, name: str, load: Load, arrived: Sequence[str]) -> None:
        late = 0
        for fault in self._distortions:
            if fault.instance not in (None, name):
                continue
            if isinstance(fault, faults.StaleSignals):
                late += fault.by
            else:
                load = _times(load, fault.factor)
        if late:
            self._env.call_at(self._env.now() + late, self._tell, name, load, arrived)
        else:
            self._tell(name, load, arrived)

    def _tell(self, name: str, load: Load, arrived: Sequence[str]) -> None:
        if name in self._gateway.instances:  # it may have gone meanwhile
            self._straight(name, load, arrived)


def _times(load: Load, factor: float) -> Load:
    return Load(
        round(load.tokens * factor),
        round(load.pages * factor),
        round(load.waiting * factor),
        round(load.holding * factor),
        round(load.step_ns * factor),
    )
