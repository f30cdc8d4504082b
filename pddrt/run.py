"""The composition root: a scenario becomes a deployment, a deployment a run, a run a folder.

`prepare` does everything that can fail for the user's sake (model, prompts, memory) before anything
starts; `execute` plays the workload under the scenario's clock and writes the run folder, also when
it is interrupted:

    scenario.yaml   the scenario as it was run, everything resolved
    events.jsonl    every event, in order
    requests.jsonl  one object a request
    summary.json    the numbers

SIGINT (and SIGTERM) ends a run gently: nothing more is sent, what is under way is cancelled and
given back, what was measured is saved. A second one ends it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pddrt import handoffs
from pddrt.alarm import attentive
from pddrt.chips import ModelShape
from pddrt.deployment import Change, Deployment, Rules
from pddrt.engine.base import Engine
from pddrt.engine.model import oracle
from pddrt.engine.models import LoadedModel, Progress, load, load_tokenizer
from pddrt.engine.outline import Outline, outline, outline_tokenizer
from pddrt.engine.tokens import Tokenizer
from pddrt.env import Env, LagMeter, Stopwatch, VirtualEnv, WallEnv
from pddrt.errors import BadInput, CannotRun, Interrupted, RunFailed
from pddrt.hosting import (
    cores,
    engine_for,
    free_folder,
    net_for,
    new_loop,
    peak_for,
    provenance,
    signals_to,
    writing,
)
from pddrt.injector import Injector, faulty_engines, local_clocks
from pddrt.invariants import Monitor, Violation
from pddrt.kv.pages import PoolCorrupt
from pddrt.metrics import Recorder
from pddrt.netem.fidelity import Kept
from pddrt.netem.net import Net, Topology
from pddrt.pipelines import chosen_from, kv_tokens, policy_of
from pddrt.policy.admission import Admission
from pddrt.policy.anomaly import Anomaly
from pddrt.prompts import Framing
from pddrt.records import RunFiles
from pddrt.roles.attempts import Recovery
from pddrt.roles.instance import InstanceSpec
from pddrt.scenario import CLIENT, ResolvedInstance, Scenario, kv_slots
from pddrt.simloop import Deadlock
from pddrt.summary import SCHEMA, spread, summary
from pddrt.trace import FLUSH_TIME, Event, RunStarted, Seconds, dumps
from pddrt.types import SECOND, Ns
from pddrt.workload import Session, Turn, plan, plan_one
from pddrt.workload_fields import Trace as TraceWorkload

INTERRUPT_TIME: Ns = 5 * SECOND
"""How long a gentle end may take after the first SIGINT."""
KEPT = 1_000
"""Records that a command keeps, of the first requests: more than a screen shows."""


@dataclass(frozen=True, slots=True)
class Result:
    folder: Path
    summary: dict[str, Any]
    interrupted: bool
    failure: str

    def raise_for_status(self) -> None:
        """Raises Interrupted or RunFailed where the run did not end as the scenario allows."""
        if self.interrupted:
            raise Interrupted(f"interrupted; what was measured is saved in {self.folder}")
        requests, invariants = self.summary["requests"], self.summary["invariants"]
        broken = invariants["violations"]
        refused = self.summary["overload"]["refused"]
        if self.summary["faults"]["planned"]:  # then a request may end with an error, but must end
            refused = requests["rejected"] + requests["aborted"]
        lost = requests["total"] - requests["finished"] - refused
        if self.failure or lost or broken:
            why = [self.failure] if self.failure else []
            why += [f"{lost} of {requests['total']} requests did not finish"] if lost else []
            if broken:
                why.append("\n    ".join([f"violated: {broken[0]}", *invariants["led_to"]]))
            raise RunFailed("; ".join(why))


class Run:
    """One run of one scenario: `prepare`, perhaps `listen`, then `execute`."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        out: Path | None = None,
        prompt: str | None = None,
        verify: bool = False,
        shuffle: int | None = None,
        keep: int | None = None,
        without: Collection[str] = (),
        strict: bool = False,
    ) -> None:
        """`verify`: after the run, every answer is judged by the token oracle (`pddrt.verify`).
        `shuffle`: see `hosting.new_loop`; no token may depend on it. `keep`: of so many requests,
        the first ones, `recorder` keeps the records when they are over; None: of all. The files
        have all of them. To verify, all are kept. `without`: "events" (no events.jsonl) or
        "invariants", to measure what they cost. `strict`: a link that this machine cannot keep is
        refused (see `hosting.peak_for`).
        """
        self.scenario = scenario
        self._verifies = verify
        self._shuffle = shuffle
        self.instances = scenario.resolved(cores())
        self._prompt = prompt
        self.folder = free_folder(out, scenario.name)
        self._without = frozenset(without)
        slo, roles = scenario.slo, {i.name: str(i.role) for i in self.instances}
        self._files = RunFiles(self.folder, slo.ttft, slo.tpot, events="events" not in without)
        self.recorder = Recorder(roles) if verify else Recorder(roles, self._files.add, keep)
        self._listeners: list[Callable[[Event], None]] = [self.recorder]
        self._models: dict[tuple[str, str], LoadedModel | Outline] = {}
        self._sessions: list[Session] = []
        self._interrupted = False
        self._stops: list[Callable[[], object]] = []
        self._failure = ""
        self._env: Env | None = None
        self._lags: Sequence[Ns] = ()
        self._strict = strict
        self._kept: Sequence[Kept] = ()
        self._strangers = 0
        self._peak: int | None = None
        self._priority = "normal"

    # -- before ------------------------------------------------------------------------------------

    @property
    def _modelled(self) -> bool:
        """Whether engines are modelled (all or none). Such a run never imports torch."""
        return self.instances[0].engine == "model"

    @property
    def expected_requests(self) -> int:
        return sum(len(s.turns) for s in self._sessions)

    @property
    def interrupted(self) -> bool:
        """Whether it has been asked to end early."""
        return self._interrupted

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def prepare(self, progress: Progress | None = None, others: Sequence[Run] = ()) -> None:
        """Loads models, plans the workload, checks that every first prompt can be served. What is
        the same in one of `others`, prepared before, is shared with it.

        Raises CannotRun (model, device), BadInput (prompt longer than the context, KV memory too
        small).
        """
        name = self.scenario.model
        kin = [o for o in others if (o.scenario.model, o._modelled) == (name, self._modelled)]
        tokenizer_of = outline_tokenizer if self._modelled else load_tokenizer
        self.tokenizer: Tokenizer = kin[0].tokenizer if kin else tokenizer_of(name, progress)
        for instance in self.instances:
            key = (instance.dtype, instance.device)
            if key in self._models:
                continue
            there = next((other._models[key] for other in kin if key in other._models), None)
            if there is not None:
                self._models[key] = there
            elif self._modelled:
                self._models[key] = outline(name, instance.dtype, progress)
            else:
                self._models[key] = load(name, *key, progress=progress)
        asks = (self.scenario.workload, self.scenario.seed, self._prompt)
        twin = (o for o in kin if (o.scenario.workload, o.scenario.seed, o._prompt) == asks)
        other = next(twin, None)
        self._sessions = self._plan() if other is None else other._sessions
        self._specs = [self._spec(i) for i in self.instances]
        self._check_prompts()

    def _plan(self) -> list[Session]:
        workload = self.scenario.workload
        if self._prompt is not None:
            return plan_one(self._prompt, workload.output_tokens)
        tokenizer, seed = self.tokenizer, self.scenario.seed
        if isinstance(workload, TraceWorkload):
            special = frozenset(tokenizer.special_ids)
            vocabulary = [i for i in range(tokenizer.vocab_size) if i not in special]
            return plan(workload, seed, vocabulary=vocabulary)

        def count(text: str) -> int:
            return len(tokenizer.encode_within(text))

        def follow_up(text: str) -> list[int]:
            return tokenizer.follow_up(text, after_eos=False)

        system = workload.system is not None
        framing = Framing.of(tokenizer.chat, follow_up, count, system)
        return plan(workload, seed, count, framing=framing)

    def _model(self, instance: ResolvedInstance) -> LoadedModel | Outline:
        return self._models[instance.dtype, instance.device]

    def _spec(self, instance: ResolvedInstance) -> InstanceSpec:
        token_bytes = self._model(instance).layout.bytes_per_token
        slots = kv_slots(instance.kv_memory, token_bytes, instance.page_tokens)
        return InstanceSpec(
            name=instance.name,
            role=instance.role,
            page_tokens=instance.page_tokens,
            num_pages=slots // instance.page_tokens,
            chunk_tokens=instance.chunk_tokens,
            max_batch=instance.max_batch,
            caching=instance.role != "main" or self.scenario.pipeline.drc == "on",
            main_caching=self.scenario.pipeline.drc == "on",
        )

    def _prompt_tokens(self, session: Session, turn: Turn) -> int:
        """Exact for what is known before the run, else what the plan expects (answers in full)."""
        if turn.ids is not None:
            return len(turn.ids)
        if turn is not session.turns[0] and turn.expected is not None:
            return turn.expected.prompt_tokens
        system = [{"role": "system", "content": session.system}] if session.system else []
        user = {"role": "user", "content": turn.text}
        return len(self.tokenizer.chat([*system, user])) if turn.text else 0

    def _check_prompts(self) -> None:
        """Refuses what could never be served, judged by the longest request of the workload."""
        sizes = [
            (self._prompt_tokens(s, turn), turn.max_tokens)
            for s in self._sessions
            for turn in s.turns
        ]
        prompt, answer = max(sizes, key=sum)
        where = self.scenario.where("workload") + ": workload"
        if self._prompt is not None:
            where = "--prompt"
        if not prompt:
            raise BadInput(f"{where}: found an empty prompt; allowed: at least one token")
        problems = []
        context = min(m.max_context for m in self._models.values())
        if prompt + answer > context:
            problems.append(
                f"{where}: found a request of {prompt} prompt + {answer} answer tokens; "
                f"allowed: the model's context of {context} at most"
            )
        pipelines = chosen_from(self.scenario)
        for instance, spec in zip(self.instances, self._specs, strict=True):
            need = kv_tokens(pipelines, spec.role, prompt, answer)
            if spec.kv_tokens < need:
                field = f"instances.{instance.group}.kv_memory"
                pages = -(-need // spec.page_tokens) * spec.page_tokens
                least = pages * self._model(instance).layout.bytes_per_token
                problems.append(
                    f"{self.scenario.where(field)}: {field}: found room for {spec.kv_tokens} "
                    f"tokens of KV, the longest request needs {need}; "
                    f"allowed: {-(-least // 2**20)} MiB and more"
                )
        if problems:
            raise BadInput(list(dict.fromkeys(problems)))

    # -- the run -----------------------------------------------------------------------------------

    def execute(self, progress: Progress | None = None) -> Result:
        """Runs to the end (or to Ctrl-C) and writes the folder. `progress` hears of what follows
        the run (verifying). Raises CannotRun where it cannot start, or the folder cannot be
        written.
        """
        topology = self.scenario.topology((CLIENT,))
        self._peak = peak_for(self.scenario.clock, topology, self._strict)
        with signals_to(self.interrupt):
            with writing(self.folder):
                self.trace = self._files.open(self.scenario, self.instances)
            watch = Stopwatch()
            self.monitor = Monitor(self._violated, self.trace.recent, self.recorder.legs)
            listeners = [*self._listeners, self._stop_if_unsaved]
            if "invariants" not in self._without:
                listeners.insert(-1, self.monitor)
            for listener in listeners:
                self.trace.listen(listener)
            loop = partial(new_loop, self.scenario.clock, self._shuffle)
            try:
                wall_clock = self.scenario.clock == "wall"
                with attentive(wall_clock) as got, asyncio.Runner(loop_factory=loop) as runner:
                    self._priority = got
                    runner.run(self._main())
            except (Deadlock, PoolCorrupt) as error:
                self._fail(error)
            finally:
                with writing(self.folder):
                    self._files.close_events()
            wall = watch.elapsed()
        if self._verifies and not self._interrupted:
            self._verify(progress)
        with signals_to(self.interrupt), writing(self.folder):
            result = self._save(wall)
            self._files.index(progress)
            return result

    def _violated(self, violation: Violation) -> None:
        """What is not right any more is not worth going on with, either."""
        self.trace.flush()
        if self._env is not None:
            self._env.fail(violation)

    def _stop_if_unsaved(self, event: Event) -> None:
        """A run whose events cannot be kept is not worth going on with."""
        if self._files.error is not None and not self._interrupted:
            self.interrupt()

    async def _main(self) -> None:
        virtual = self.scenario.clock == "virtual"
        env: Env = (VirtualEnv if virtual else WallEnv)(self.scenario.seed, self.trace)
        self._env = env
        env.trace.emit(
            RunStarted(env.now(), self.scenario.name, self.scenario.seed, self.scenario.clock)
        )
        topology = self.scenario.topology((CLIENT,))
        net = net_for(env, topology)
        deployment = self._deploy(env, net, topology)
        lag = LagMeter(env) if isinstance(env, WallEnv) else None
        beside = [lag.run(), self._flush(env)] if lag else []
        tasks = [asyncio.ensure_future(work) for work in beside]
        try:
            await self._play(env, deployment)
        except Violation:
            pass  # the monitor has it
        except (RunFailed, PoolCorrupt) as error:
            self._fail(error)
        finally:
            await deployment.close()
            try:
                deployment.account()
            except PoolCorrupt as error:
                self._fail(error)
            self._kept, self._strangers = net.kept(), net.strangers
            self.monitor.finish()
            for task in tasks:
                task.cancel()
            self._lags = lag.lags if lag else ()

    async def _flush(self, env: Env) -> None:
        """On the wall clock events may be few and far between."""
        while True:
            await env.sleep(FLUSH_TIME)
            self._files.flush()

    def _fail(self, error: Exception) -> None:
        self._failure = "; ".join(filter(None, (self._failure, str(error))))

    async def _play(self, env: Env, deployment: Deployment) -> None:
        async def work() -> None:
            await deployment.start()
            plan, limit = self.scenario.faults, self.scenario.workload.concurrency_limit
            play = Injector(deployment, plan).play if plan else deployment.play
            await play(self._sessions, limit)

        def stop() -> None:
            deployment.client.stop()
            env.call_at(env.now() + INTERRUPT_TIME, working.cancel)

        self._loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(work())
        self._stops = [working.cancel, stop]
        if self._interrupted:
            self.interrupt()
        try:
            await env.run_or_fail(working)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise

    def interrupt(self) -> None:
        """A signal: the first ends the run gently, the second at once. May come at any moment:
        before the loop runs, between any two instructions of it, after it.
        """
        self._interrupted = True
        if self._stops:
            self._loop.call_soon_threadsafe(self._stops.pop())

    def _deploy(self, env: Env, net: Net, topology: Topology) -> Deployment:
        scenario = self.scenario
        models = list(self._models.values())
        rules = Rules(
            policy=policy_of(scenario),
            eos_ids=frozenset(i for m in models for i in m.eos_ids),
            deadline=scenario.deadline,
            sampling=scenario.sampling_with(seed=0),
            stream_while_computing=scenario.pipeline.stream_kv == "while-computing",
            early_first_token=scenario.gateway.first_token == "early",
            eight_bit_wan=scenario.pipeline.eight_bit_wan,
            handoff=handoffs.policy_of(scenario),
            piece=scenario.handoff.max_ids_per_round,
            signal_age=scenario.router.signal_age,
            max_transfers=scenario.router.max_transfers,
            handshake=scenario.router.handshake,
            anomaly=_anomaly(scenario),
            admission=Admission(
                scenario.admission.max_requests,
                scenario.admission.max_tokens,
                scenario.shed_after,
            ),
            recovery=Recovery(scenario.recovery.retries, scenario.recovery.backoff),
        )
        engines = {
            spec.name: self._engine(env, instance, spec)
            for instance, spec in zip(self.instances, self._specs, strict=True)
        }
        engines = faulty_engines(env, scenario.faults, engines)
        clocks = local_clocks(env, scenario.faults)
        changes = [Change(*change) for change in scenario.changes()]
        everything = (rules, self.tokenizer, self._specs, engines, clocks, changes)
        return Deployment(env, net, topology, *everything)

    def _engine(self, env: Env, instance: ResolvedInstance, spec: InstanceSpec) -> Engine:
        model = self._model(instance)
        vocab = None
        if isinstance(model, Outline):
            shape, vocab = model.shape, self._vocab(model)
        else:
            shape = ModelShape.from_config(model.module.config.to_dict(), instance.dtype)
        return engine_for(
            env,
            model,
            spec.kv_tokens,
            name=spec.name,
            device=instance.device,
            threads=instance.threads,
            cost=instance.step_cost(shape),
            vocab=vocab,
            eos_ids=model.eos_ids,
        )

    def _vocab(self, model: Outline) -> int:
        """Ids that a modelled answer may hold: those that can be shown."""
        return min(model.vocab_size, self.tokenizer.vocab_size)

    # -- after -------------------------------------------------------------------------------------

    def _verify(self, progress: Progress | None) -> None:
        """Judges every answer, now that nothing is timed any more. A signal leaves out the rest."""
        found = ""

        def stop() -> None:
            raise KeyboardInterrupt

        try:
            with signals_to(stop):
                found = self._judge(progress)
        except CannotRun as error:
            found = f"not every request could be verified: {error}"
        except KeyboardInterrupt:
            self._interrupted = True
        self._failure = "; ".join(filter(None, (self._failure, found)))

    def _judge(self, progress: Progress | None) -> str:
        from pddrt.verify import verify, verify_modelled

        requests = self.recorder.requests.values()
        model = next(iter(self._models.values()))
        if isinstance(model, Outline):
            vocab, eos_ids = self._vocab(model), frozenset(model.eos_ids)
            judge = partial(oracle, vocab=vocab, eos_ids=eos_ids, ends=eos_ids)
            return verify_modelled(requests, judge, progress)
        from pddrt.engine.reference import Reference

        passes = {
            dtype: Reference(model.module, threads=cores())
            for (dtype, _), model in self._models.items()
            if isinstance(model, LoadedModel)
        }
        dtypes = {instance.name: instance.dtype for instance in self.instances}
        ends = frozenset(i for m in self._models.values() for i in m.eos_ids)
        return verify(requests, dtypes, passes.__getitem__, progress, ends)

    def _save(self, wall: Ns) -> Result:
        if self._verifies:
            for record in self.recorder.requests.values():
                self._files.add(record)
        self.recorder.close()
        self._files.close_requests()
        slo = self.scenario.slo
        numbers = {
            "schema": SCHEMA,
            "name": self.scenario.name,
            "seed": self.scenario.seed,
            "clock": self.scenario.clock,
            "wall_s": Seconds(wall),
            "virtual_s": Seconds(self.recorder.end) if self.scenario.clock == "virtual" else None,
            "digest": self.trace.digest,
            "interrupted": self._interrupted,
            **summary(self.recorder, slo.ttft, slo.tpot, self.monitor.report(), self._files.tally),
            "faults": {"planned": len(self.scenario.faults), **self._files.faults},
            "loop_lag_s": {
                k: v for k, v in spread(self._lags).items() if k in ("p50", "p99", "max")
            },
            "provenance": self._provenance(),
        }
        (self.folder / "summary.json").write_text(dumps(numbers) + "\n", encoding="utf-8")
        return Result(self.folder, numbers, self._interrupted, self._failure)

    def _provenance(self) -> dict[str, Any]:
        late = max((link.late_p99_ns for link in self.recorder.links), default=0)
        model = next(iter(self._models.values()))
        threads = {i.name: i.threads for i in self.instances}
        virtual, measured = self.scenario.clock == "virtual", (self._kept, self._peak)
        about = provenance(model, threads, virtual, late, *measured, self._priority)
        return {**about, "strangers": self._strangers}


def _anomaly(scenario: Scenario) -> Anomaly | None:
    rule = scenario.anomaly
    if rule is None:
        return None
    return Anomaly(rule.input_above, rule.output_below, rule.share, rule.guess)
