"""Row 6 of MISSION.md, measured: how does what RLD has made get to MD?

Two nodes with a link between them. Both hold the KV of `context` tokens; the relay also that of
`tokens` more, and knows the id that follows. Either

    kv     the KV of those tokens crosses the link, with the id, and is copied into the main
           decoder's pool
    ids    the ids of those tokens cross, and the main decoder extends over them in one step, which
           also yields the id that follows

**Both end alike**: the main decoder holds the KV of [0, context + tokens), knows the id at that
position, and could begin its next decode step. Both begin when the relay turns to it. Their parts
add up:

    copy out   the KV is read from the relay's pool                                     kv
    wire       from there until the last byte has reached the main decoder              kv, ids
    copy in    the KV is written into the main decoder's pool                           kv
    extend     the step over the ids                                                    ids

The id that goes with the KV has cost the relay a decode step before; that is not counted, in favour
of kv. The main decoder has nothing else to do, in favour of both.

Repetitions alternate, each after a random pause, so that both ways meet the same link and the same
machine; the first of each is a warm-up and not counted. Before each the slots in question are
overwritten at the main decoder, and after each the id there, with kv also the KV, is compared with
the relay's. Connections are open and stay open.

**Cross traffic** is flows of other senders that share the link fairly with what is measured: they
begin at random (Poisson), their sizes are exponential. A transfer of x bytes that begins at a
random time then takes x / (rate * (1 - share)) on average, whatever the distribution of sizes
(processor sharing: Kleinrock, Queueing Systems II, 1976, section 4.4), plus the delay. Pauses that
are short against the flows find the link still crowded by the repetition before.

Under the virtual clock engines are modelled, copies take what `copy_rate` charges, and the same
setting gives the same numbers to the byte. On the wall clock the model, its copies and the sockets
are real, unless a step time or chip is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pddrt import profiles, sections
from pddrt.chips import CHIPS, ModelShape, chip_cost, figures_cost
from pddrt.document import Document
from pddrt.engine.base import Engine
from pddrt.engine.models import LoadedModel, Progress, load
from pddrt.engine.outline import Outline, outline
from pddrt.env import Env, LagMeter, VirtualEnv, WallEnv
from pddrt.errors import BadInput, Interrupted, RunFailed
from pddrt.fields import MEASURED, ChipField, Dtype, Figures, StepTime, Tokens
from pddrt.frames import MAX_PAYLOAD
from pddrt.hosting import engine_for, net_for, new_loop, provenance, signals_to
from pddrt.netem.net import LinkSpec, LinkStats, Net, Topology
from pddrt.roles.bench import AWAY, CROSS, MAIN, RELAY, CrossEnd, Held, MainEnd, RelayEnd, step
from pddrt.sections import Allowed, Section
from pddrt.summary import spread
from pddrt.trace import Seconds, Trace
from pddrt.trials import PARTS, WAYS, Repetition, compared
from pddrt.types import MS, SECOND, Ns, Run, Sampling, StepCost
from pddrt.units import Duration, PositiveRate, PositiveSize

CHUNK = 512
"""Tokens of a step that computes the context."""
SETTLE = 5
"""Mean cross flows that the link is given to fill up before anything is measured."""


class Setting(Section):
    """What is measured; `of` makes one of options. Rates in bytes/s, times in ns."""

    tokens: Tokens = 100
    context: Annotated[
        int, Field(ge=0, le=1 << 20), Allowed("a whole number from 0 to 1,048,576")
    ] = 512
    model: Annotated[
        str, Field(min_length=1, max_length=4096), Allowed("a model's name, hub id or folder")
    ] = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    rate: PositiveRate = 25_000_000
    delay: Duration = 15 * MS
    jitter: Duration = 2 * MS
    cross_traffic: Annotated[
        float, Field(ge=0, le=0.95), Allowed("a share of the rate, from 0 to 0.95")
    ] = 0.5
    cross_flow: PositiveSize = 1_000_000
    """Mean size of a cross flow."""
    pause: Duration = 250 * MS
    """Mean time between the end of one repetition and the begin of the next."""
    repeat: Annotated[
        int, Field(ge=2, le=100_000), Allowed("a whole number from 2 to 100,000")
    ] = 50  # fmt: skip
    seed: Annotated[int, Field(ge=0, lt=1 << 63), Allowed("a whole number from 0")] = 1
    clock: Literal["wall", "virtual"] = "wall"
    device: Annotated[
        str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$"), Allowed("cpu | cuda | cuda:N")
    ] = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024), Allowed("a whole number from 1")] = 1
    chip: ChipField | None = None
    step_time: StepTime | None = None
    copy_rate: PositiveRate | None = None
    """Of copies out of and into a modelled engine's pool; None: they take no time."""

    @property
    def modelled(self) -> bool:
        """Whether steps are charged, not computed."""
        return self.step_time not in (None, "real") or self.chip is not None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Setting:
        """From options as they were typed, by field; None is one that was not given.

        Raises BadInput with all that is wrong, by option.
        """
        written = Document("", {}, {})
        for name, value in options.items():
            if value is None:
                continue
            if name in ("chip", "step_time"):  # as in a scenario
                written.override(f"{name}={value}", _flag(name))
            else:
                written.put((name,), value, _flag(name))
        checked = sections.check(written, cls)
        problems = [
            ": ".join([_flag(str(p.keys[0])), *map(str, p.keys[1:]), p.text])
            for p in [*written.problems, *checked.problems]
        ]
        assert checked.model is not None, "every field has a default"
        if problems := problems or list(_across(checked.model)):
            raise BadInput(problems)
        return checked.model

    def step_cost(self, shape: ModelShape) -> StepCost:
        """What a modelled step is charged. Raises BadInput where the profile is none, or another
        model's.
        """
        if isinstance(self.step_time, Figures):
            return figures_cost(self.step_time.prefill_tokens_per_s, self.step_time.decode_step)
        if isinstance(self.step_time, str) and self.step_time.startswith(MEASURED):
            path = Path(self.step_time.removeprefix(MEASURED))
            try:
                profile = profiles.read(path)
            except BadInput as error:
                raise BadInput(f"--step-time: {error}; `pddrt calibrate` writes one") from None
            if (profile.model, profile.dtype) != (self.model, self.dtype):
                raise BadInput(
                    f"--step-time: {path} is of {profile.model} in {profile.dtype}; "
                    f"needed: {self.model} in {self.dtype}"
                )
            return profile.cost
        assert self.chip is not None
        return chip_cost(CHIPS[self.chip] if isinstance(self.chip, str) else self.chip, shape)

    def echo(self) -> dict[str, Any]:
        """As JSON: quantities as text, what does not apply left out."""
        idle = {"device", "threads"} if self.modelled else set()
        return self.model_dump(mode="python", exclude_none=True, exclude=idle)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _across(setting: Setting) -> Iterator[str]:
    """What no field can see by itself."""
    given = setting.model_fields_set
    if setting.jitter and not setting.delay:
        yield "--jitter: found one without a delay, which has no room for it; allowed: 0"
    if setting.step_time == "chip" and setting.chip is None:
        yield "--step-time: found chip, and no --chip; needed: a chip's name, or its figures"
    if setting.step_time == "real" and setting.chip is not None:
        yield "--chip: found one beside --step-time real; allowed: one of the two"
    if setting.clock == "virtual" and not setting.modelled:
        yield (
            "--clock: under the virtual clock a step takes what it is charged; needed: --chip NAME "
            "or --step-time measured:FILE | {prefill_tokens_per_s, decode_step}"
        )
    for name in ("device", "threads"):
        if setting.modelled and name in given:
            yield f"{_flag(name)}: is for real steps, and these are modelled; leave it out"
    if setting.copy_rate is not None and not setting.modelled:
        yield "--copy-rate: is for modelled steps; with a real model copies are measured"


# -- the experiment --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """`table` is what `pddrt bench handoff --json` prints; None where too little was measured."""

    table: dict[str, Any] | None
    interrupted: bool

    def raise_for_status(self) -> None:
        """Raises Interrupted or RunFailed. Real steps may round differently on either side, so that
        another id after ids is no failure by itself; `same` says how often.
        """
        ways = self.table["ways"] if self.table else {}
        if self.interrupted:
            count = ways["ids"]["count"] if ways else 0
            raise Interrupted(f"interrupted after {count} repetitions of each way")
        for way in ways if self.table and self.table["modelled"] else ("kv",):
            if wrong := ways[way]["count"] - ways[way]["same"]:
                raise RunFailed(f"{wrong} times {way} left something else than the relay has")


class Bench:
    """`prepare`, then `execute`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.repetitions: list[Repetition] = []
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._working: asyncio.Future[None] | None = None

    def prepare(self, progress: Progress | None = None) -> None:
        """Loads the model. Raises CannotRun (model, device), BadInput (more than it can take)."""
        s = self.setting
        self._model: LoadedModel | Outline
        self._cost: StepCost | None = None
        if s.modelled:
            self._model = outline(s.model, s.dtype, progress)
            self._cost = s.step_cost(self._model.shape)
        else:
            self._model = load(s.model, s.dtype, s.device, progress)
        if s.context + s.tokens >= self._model.max_context:
            raise BadInput(
                f"--tokens: found {s.tokens} tokens after --context {s.context}; "
                f"allowed: {self._model.max_context - 1} together, by the model's context"
            )
        if self.kv_bytes > MAX_PAYLOAD:
            most = MAX_PAYLOAD // self._model.layout.bytes_per_token
            raise BadInput(f"--tokens: found {s.tokens}; allowed: {most}, whose KV fills a frame")

    @property
    def kv_bytes(self) -> int:
        return self.setting.tokens * self._model.layout.bytes_per_token

    def execute(self, progress: Progress | None = None) -> Result:
        """Measures. A first SIGINT ends it with what there is."""
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        with (
            signals_to(self._interrupt),
            asyncio.Runner(loop_factory=lambda: new_loop(self.setting.clock)) as runner,
        ):
            runner.run(self._main(progress))
        whole = len(self.repetitions) // len(WAYS) * len(WAYS)
        self.repetitions = self.repetitions[:whole]
        if whole < 2 * len(WAYS):
            return Result(None, self._interrupted)
        return Result(self._table(), self._interrupted)

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._loop is not None and self._working is not None:
            self._loop.call_soon_threadsafe(self._working.cancel)

    async def _main(self, progress: Progress | None) -> None:
        s = self.setting
        env: Env = (VirtualEnv if s.clock == "virtual" else WallEnv)(s.seed, Trace())
        link = LinkSpec("wan", ("a", "b"), s.rate, s.delay, s.jitter)
        net = net_for(env, Topology({RELAY: "a", MAIN: "b", CROSS: "a", AWAY: "b"}, [link]))
        lag = LagMeter(env) if isinstance(env, WallEnv) else None
        metering = asyncio.ensure_future(lag.run()) if lag else None
        self._loop = asyncio.get_running_loop()
        self._working = asyncio.ensure_future(self._measure(env, net, progress))
        if self._interrupted:
            self._interrupt()
        try:
            await env.run_or_fail(self._working)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        finally:
            self._link = next(way for way in net.stats() if way.src_site == "a")
            self._elapsed = env.now()
            self._lags = lag.lags if lag else []
            if metering is not None:
                metering.cancel()
            await net.close()

    async def _measure(self, env: Env, net: Net, progress: Progress | None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            engines = []
            for name in (RELAY, MAIN):
                engines.append(self._engine(env, name))
                stack.push_async_callback(engines[-1].close)
                await engines[-1].start()
            held = await self._compute(env, *engines)
            copy_time = self._copy_time()
            relay = RelayEnd(env, net, engines[0], held, copy_time)
            main = MainEnd(env, net, engines[1], copy_time)
            cross, away = CrossEnd(env, net, CROSS), CrossEnd(env, net, AWAY)
            for node in (relay, main, cross, away):
                await node.start()
                stack.push_async_callback(node.close)
            await relay.connect()
            await self._crowd(env, cross, stack)
            await self._repeat(env, relay, main, held, progress)

    async def _compute(self, env: Env, source: Engine, target: Engine) -> Held:
        """Fills both pools. Ids are drawn at random: a step's time does not depend on them."""
        s, vocab = self.setting, self._vocab()
        rng = env.rng("bench/ids")
        context, ids = (
            tuple(rng.randrange(vocab) for _ in range(n)) for n in (s.context, s.tokens)
        )
        for start in range(0, s.context, CHUNK):
            await step(source, context[start : start + CHUNK], start, None)
        following = await step(source, ids, s.context, Sampling())
        assert following is not None
        if context:
            there = (Run(0, s.context),)
            target.write_kv(there, source.read_kv(there))
        return Held(s.context, ids, following)

    async def _crowd(self, env: Env, cross: CrossEnd, stack: contextlib.AsyncExitStack) -> None:
        """Lets cross traffic begin, and waits until it is as it will be."""
        s = self.setting
        if s.cross_traffic:
            crowd = cross.crowd(s.rate * s.cross_traffic, s.cross_flow)
            task = env.spawn(crowd, "cross traffic")
            stack.callback(task.cancel)
            alone = s.cross_flow * SECOND / s.rate
            await env.sleep(round(SETTLE * alone / (1 - s.cross_traffic)))

    async def _repeat(
        self, env: Env, relay: RelayEnd, main: MainEnd, held: Held, progress: Progress | None
    ) -> None:
        rng = env.rng("bench/pause")
        for number in range(len(WAYS) * (self.setting.repeat + 1)):
            way = WAYS[number % len(WAYS)]
            main.forget(held)
            await env.sleep(round(self.setting.pause * rng.expovariate(1)))
            start, copied, nbytes = await relay.hand_over(way, f"h{number:06d}")
            if number < len(WAYS):
                continue
            after = main.able - main.arrived
            self.repetitions.append(
                Repetition(
                    way=way,
                    start=start,
                    copy_out=copied - start,
                    wire=main.arrived - copied,
                    copy_in=after if way == "kv" else 0,
                    extend=after if way == "ids" else 0,
                    bytes=nbytes,
                    same=main.following == held.following
                    and (way == "ids" or main.kv(held) == relay.kv()),
                )
            )
            if progress is not None:
                progress("handing over", len(self.repetitions) / len(WAYS) / self.setting.repeat)

    def _copy_time(self) -> Ns:
        rate = self.setting.copy_rate
        return 0 if rate is None else -(-self.kv_bytes * SECOND // rate)

    def _vocab(self) -> int:
        if isinstance(self._model, Outline):
            return self._model.vocab_size
        config: Any = self._model.module.config
        return int(config.vocab_size)

    def _engine(self, env: Env, name: str) -> Engine:
        s, slots = self.setting, self.setting.context + self.setting.tokens
        return engine_for(
            env,
            self._model,
            slots,
            name=name,
            device=s.device,
            threads=s.threads,
            cost=self._cost,
        )

    # -- what came of it ---------------------------------------------------------------------------

    def _table(self) -> dict[str, Any]:
        s, link = self.setting, self._link
        about = provenance(self._model, {MAIN: s.threads}, s.clock == "virtual", link.late_p99)
        if s.clock == "virtual":  # the same on any machine
            about = {name: about[name] for name in ("model", "fidelity")}
        else:  # lateness is of the net alone; a step that lacks a core shows here
            about["machine"]["load_before"] = self._load
        return {
            "bench": "handoff",
            "setting": s.echo(),
            "modelled": s.modelled,
            "kv_bytes_per_token": self._model.layout.bytes_per_token,
            **compared(self.repetitions),
            "link": _link(link, self._elapsed),
            "loop_lag_s": {
                k: v for k, v in spread(self._lags).items() if k in ("p50", "p99", "max")
            },
            "provenance": about,
            "repetitions": [
                {
                    "way": r.way,
                    "start_s": Seconds(r.start),
                    "total_s": Seconds(r.total),
                    **{f"{part}_s": Seconds(getattr(r, part)) for part in PARTS[r.way]},
                    "bytes": r.bytes,
                    "same": r.same,
                }
                for r in self.repetitions
            ],
        }


def _link(link: LinkStats, elapsed: Ns) -> dict[str, Any]:
    """The direction that was measured: what it carried, and how late data left it."""
    return {
        "bytes": link.bytes,
        "ids_bytes": link.by_kind.get("ids", 0),
        "busy_fraction": round(link.busy / elapsed, 6) if elapsed else 0.0,
        "peak_flows": link.peak_flows,
        "late_p99_s": Seconds(link.late_p99),
        "late_max_s": Seconds(link.late_max),
    }
