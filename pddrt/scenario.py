"""The scenario: one YAML file, validated, frozen, with every default resolved.

`load` and `parse` give a `Scenario` or raise `BadInput` with every problem at once, one line each:

    FILE:LINE: field.path: what was found; what is allowed

What each field may hold is said in `fields`; `_across` checks what no field can see by itself:
roles that a policy needs, sites, paths (see `pipelines`), clocks.

`Scenario.resolved` expands `count` and fills defaults; `as_run` is the same as a scenario; `dump`
is that in YAML, and loads again to an equal one. `topology` is what the nets need to know of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr

from pddrt import document, faults, handoffs, links, pipelines, profiles, sections
from pddrt.chips import CHIPS, Chip, ModelShape, chip_cost, figures_cost
from pddrt.document import Document, Keys, Problem
from pddrt.errors import BadInput
from pddrt.faults import FaultPlan
from pddrt.fields import (
    MAX_INSTANCES,
    MEASURED,
    AdmissionFields,
    AnomalyFields,
    Dtype,
    Figures,
    Gateway,
    Handoff,
    Instance,
    Pipeline,
    RecoveryFields,
    Router,
    SamplingFields,
    Scale,
    Slo,
    Tokens,
)  # fmt: skip
from pddrt.link_fields import Link, Name
from pddrt.netem.net import Topology
from pddrt.sections import Allowed, Checked, Section
from pddrt.types import SECOND, Ns, Role, Sampling, StepCost
from pddrt.units import PositiveDuration, shown
from pddrt.workload import Workload

CLIENT, GATEWAY = "client", "gateway"


@dataclass(frozen=True, slots=True)
class ResolvedInstance:
    """One instance with nothing left open. `group`: the entry of the scenario that it came from."""

    name: str
    group: str
    role: Role
    site: str
    device: str
    threads: int
    dtype: str
    page_tokens: int
    chunk_tokens: int
    max_batch: int
    kv_memory: int
    engine: Literal["torch", "model"]
    chip: Chip | None
    step_time: str | Figures
    profile: Path | None
    """Where the step profile of `measured:` lies."""

    @property
    def profile_copy(self) -> str:
        """What the profile is called in a run folder."""
        return f"{self.name}.profile.json"

    def step_cost(self, shape: ModelShape) -> StepCost | None:
        """What a step is charged; None for `real`."""
        if isinstance(self.step_time, Figures):
            return figures_cost(self.step_time.prefill_tokens_per_s, self.step_time.decode_step)
        if self.profile is not None:
            return profiles.read(self.profile).cost
        if self.step_time == "real":
            return None
        assert self.chip is not None
        return chip_cost(self.chip, shape)


class _Origin:
    """Where a scenario's parts were written. No part of what it says, so all of them are equal."""

    def __init__(self, written: Document | None = None) -> None:
        self.written = written

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Origin)

    __hash__ = None  # type: ignore[assignment]


class Scenario(Section):
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        Allowed("letters, digits, . _ and -"),
    ]
    """Names the run, and its folder."""
    seed: Annotated[
        int, Field(ge=0, lt=1 << 63), Allowed("a whole number from 0 to 9,223,372,036,854,775,807")
    ] = 0
    """Root of all randomness: workload, sampling, jitter, faults."""
    clock: Literal["wall", "virtual"] = "wall"
    """`wall`: real sockets, real time. `virtual`: the same roles on a simulated clock, the same to
    the byte each time, as fast as the machine can."""
    model: Annotated[
        str, Field(min_length=1, max_length=4096), Allowed("a model's name, hub id or folder")
    ] = "smollm2-135m"
    """What is served: `smollm2-135m`, `tiny`, `tiny-qwen2`, any hub id or a local folder."""
    dtype: Dtype = "bfloat16"
    """Of weights and KV, where an instance does not say otherwise. float32 or float64 for exact
    comparison."""
    page_tokens: Tokens = 16
    """Token slots of a KV page, where an instance does not say otherwise."""
    links: dict[Name, Link] = Field(default_factory=dict)
    """The network: links by name. Two sites that no link joins cannot talk."""
    instances: dict[Name, Instance]
    """Who there is: groups of equal instances by name."""
    pipeline: Pipeline = Pipeline()
    """How a request gets from prefill to decode."""
    handoff: Handoff = Handoff()
    """How a relay decoder hands an answer over."""
    anomaly: AnomalyFields | None = None
    """Requests whose transfer is not worth it, and which therefore end on the relay. Absent:
    none."""
    workload: Workload
    """What is asked, and when."""
    router: Router = Router()
    """What the gateway knows of instances, and how old that is."""
    admission: AdmissionFields = AdmissionFields()
    """Who is refused under overload."""
    recovery: RecoveryFields = RecoveryFields()
    """What is tried again when an instance is lost."""
    gateway: Gateway = Gateway()
    """Where users connect."""
    sampling: SamplingFields = SamplingFields()
    """How ids are drawn, and what ends an answer."""
    slo: Slo = Slo()
    """What counts as served in time, for `slo_attainment` and `goodput_rps`."""
    scale: Annotated[
        tuple[Scale, ...], Field(strict=False), Allowed("a list of {at, instances, count}")
    ] = ()
    """Instances that join or leave in mid-run."""
    deadline: PositiveDuration = 600 * SECOND
    """A request that is not finished so long after it was sent is aborted."""
    faults: FaultPlan = ()
    """What goes wrong, and when."""

    _origin: _Origin = PrivateAttr(default_factory=_Origin)

    @property
    def gateway_site(self) -> str:
        entries = list(self.instances.values())
        entries.sort(key=lambda entry: entry.role != "prefill")
        return self.gateway.site or pipelines.home(self, entries[0])

    @property
    def folder(self) -> Path | None:
        """Where the scenario was written; None if it was not."""
        written = self._origin.written
        return Path(written.file).parent if written else None

    @property
    def shed_after(self) -> Ns | None:
        """A time to first token that would be too long to let a request in; None: nobody is
        refused for that."""
        rule: Ns | str = self.admission.shed_after
        if isinstance(rule, str):
            return self.slo.ttft if rule == "slo" else None
        return rule

    def where(self, path: str) -> str:
        """FILE:LINE of a field (`instances.p0.kv_memory`), or the option that set it."""
        written = self._origin.written
        return written.where(tuple(path.split("."))) if written else self.name

    def sampling_with(self, seed: int) -> Sampling:
        return Sampling(**self.sampling.model_dump(), seed=seed)

    def resolved(self, cores: int = 1) -> tuple[ResolvedInstance, ...]:
        """All instances that there ever are, in the file's order; where there may be more than one
        of a group they are name-0 ... name-(N-1).

        `cores` are shared out to those whose threads are not given, at least one each, prefill
        first (it is compute-bound). Under the virtual clock steps are computed one at a time, and
        rounding should not depend on the machine: one thread each.
        """
        entries = list(_expanded(self.instances, self.scale))
        threads = _share(cores if self.clock == "wall" else 1, [entry for _, _, entry in entries])
        return tuple(
            ResolvedInstance(
                name=name, group=group, role=entry.role, site=pipelines.home(self, entry),
                device=entry.device,
                threads=count, dtype=entry.dtype or self.dtype,
                page_tokens=entry.page_tokens or self.page_tokens, chunk_tokens=entry.chunk_tokens,
                max_batch=entry.max_batch, kv_memory=entry.kv_memory, engine=entry.engine,
                chip=CHIPS[entry.chip] if isinstance(entry.chip, str) else entry.chip,
                step_time=entry.step_time or ("chip" if self._charged(entry) else "real"),
                profile=_profile(entry, self._origin.written),
            )
            for (name, group, entry), count in zip(entries, threads, strict=True)
        )  # fmt: skip

    def link_files(self) -> list[tuple[Path, str]]:
        """Files that links name, and what they are called in a run folder."""
        return [
            (path, copy)
            for name, link in self.links.items()
            for path, copy, _ in links.files(name, link, self.folder)
        ]

    def changes(self) -> list[tuple[Ns, str, bool]]:
        """When which instance joins (True) or leaves, in order; who has the highest number goes
        first.
        """
        names: dict[str, list[str]] = {}
        for name, group, _ in _expanded(self.instances, self.scale):
            names.setdefault(group, []).append(name)
        there = {group: entry.count for group, entry in self.instances.items()}
        found: list[tuple[Ns, str, bool]] = []
        for event in sorted(self.scale, key=lambda e: e.at):
            before, after = there[event.instances], event.count
            of = names.get(event.instances, [])
            found += [(event.at, name, True) for name in of[before:after]]
            found += [(event.at, name, False) for name in reversed(of[after:before])]
            there[event.instances] = after
        return found

    def _charged(self, entry: Instance) -> bool:
        """Whether its steps have no time but what they are charged."""
        return self.clock == "virtual" or entry.engine == "model"

    def as_run(self, cores: int = 1) -> Scenario:
        """This scenario with nothing left open: resolving it again, anywhere, changes nothing."""
        changes = self.changes()
        first = {name: joins for _, name, joins in reversed(changes)}
        instances = {
            r.name: self.instances[r.group].model_copy(
                update={
                    "count": int(not first.get(r.name, False)), "threads": r.threads,
                    "dtype": r.dtype, "page_tokens": r.page_tokens,
                    "step_time": f"{MEASURED}{r.profile_copy}" if r.profile else r.step_time,
                }
            )
            for r in self.resolved(cores)
        }  # fmt: skip
        gateway = self.gateway.model_copy(update={"site": self.gateway_site})
        made = Scale.model_construct
        scale = tuple(made(at=at, instances=n, count=int(joins)) for at, n, joins in changes)
        copies = {n: links.with_copies(n, link, self.folder) for n, link in self.links.items()}
        return self.model_copy(
            update={"instances": instances, "gateway": gateway, "scale": scale, "links": copies}
        )

    def dump(self, cores: int = 1) -> str:
        """YAML of the scenario as it is run; loads again to one equal to `as_run(cores)`."""
        data = self.as_run(cores).model_dump(mode="python", exclude_none=True)
        return yaml.safe_dump(_plain(data), sort_keys=False, allow_unicode=True, width=120)

    def topology(self, clients: Sequence[str] = (CLIENT,)) -> Topology:
        """Sites of all instances, of the gateway and of the clients beside it, and the links."""
        sites = {instance.name: instance.site for instance in self.resolved()}
        sites |= dict.fromkeys((GATEWAY, *clients), self.gateway_site)
        specs = [links.spec(name, link, self.folder) for name, link in self.links.items()]
        return Topology(sites, specs)


def kv_slots(memory_bytes: int, bytes_per_token: int, page_tokens: int) -> int:
    """Token slots that fit into `memory_bytes`: whole pages only, 0 if not even one fits."""
    return memory_bytes // (bytes_per_token * page_tokens) * page_tokens


def load(
    path: str | Path, overrides: Sequence[str] = (), *, seed: int | None = None,
    clock: str | None = None,
) -> Scenario:  # fmt: skip
    """The scenario in a file. `overrides` as in `--set a.b=value`. Raises BadInput."""
    return validated(document.read(path), overrides, seed, clock)


def parse(
    text: str, file_name: str, overrides: Sequence[str] = (), *, seed: int | None = None,
    clock: str | None = None,
) -> Scenario:  # fmt: skip
    """As `load`, of a text. `file_name` is for messages; the default name is made from it."""
    return validated(document.parse(text, file_name), overrides, seed, clock)


_STAND_IN = {"workload": {"kind": "closed", "requests": 1, "concurrency": 1, "output_tokens": 1}}


def validated(
    written: Document, overrides: Sequence[str], seed: int | None, clock: str | None
) -> Scenario:
    """As `load`, of a document, which keeps what is laid over it."""
    refused: list[str] = []
    if "name" not in written.data:
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(written.file).stem).strip("-_")
        written.data["name"] = stem[:64] or "run"
    for spec in overrides:
        try:
            written.override(spec)
        except BadInput as error:
            refused += error.problems
    for option, value in (("seed", seed), ("clock", clock)):
        if value is not None:
            written.put((option,), value, f"--{option}")
    checked = sections.check(written, Scenario, stand_ins=_STAND_IN)
    problems = written.problems + checked.problems
    if checked.model is not None:
        checked.model._origin = _Origin(written)
        problems += _across(checked.model, checked)
        problems += _profile_problems(checked.model, written)
    if problems or refused:
        raise BadInput(written.lines(problems) + refused)
    assert checked.model is not None
    return checked.model


# -- across fields ---------------------------------------------------------------------------------


def _scale_problems(scenario: Scenario) -> Iterator[Problem]:
    """Groups that are not, or are never there; a time without any P or without any MD."""
    there = {group: entry.count for group, entry in scenario.instances.items()}
    never = {group for group, n in there.items() if not n} - {e.instances for e in scenario.scale}
    for group in there:
        if group in never:
            text = "found 0, and scale has no more of them; allowed: a whole number from 1"
            yield Problem(("instances", group, "count"), text)
    needed = ("prefill", "main")
    used = {e.role for group, e in scenario.instances.items() if group not in never}
    events = sorted(enumerate(scenario.scale), key=lambda pair: pair[1].at)
    for at, event in [(-1, None), *events]:
        if event is not None and event.instances not in there:
            text = sections.unknown_name(event.instances, there)
            yield Problem(("scale", at, "instances"), text)
            continue
        if event is not None:
            there[event.instances] = event.count
        for role in needed:
            of = [n for group, n in there.items() if scenario.instances[group].role == role]
            if role in used and not sum(of):
                where: Keys = ("instances",) if event is None else ("scale", at, "count")
                yield Problem(where, f"no instance of role {role} is there then; needed: one")


def _across(scenario: Scenario, checked: Checked[Scenario]) -> Iterator[Problem]:
    yield from _clock_problems(scenario)
    if checked.usable("links", "*", "*"):
        yield from links.problems(scenario.links, scenario.folder)
    if checked.usable("instances", "*", "engine"):
        yield from _engine_problems(scenario)
    yield from _name_problems(scenario)
    if checked.usable("instances", "*") and checked.usable("scale", "*", "*"):
        yield from _scale_problems(scenario)
    if checked.usable("instances", "*", "role") and checked.usable("pipeline", "policy"):
        yield from pipelines.policy_problems(scenario)
    if checked.usable("handoff", "mode"):
        yield from handoffs.policy_problems(scenario)
    if checked.usable("links", "*", "between") and checked.usable("gateway", "site"):
        yield from pipelines.site_problems(scenario)
    if checked.usable("faults") and checked.usable("instances", "*"):
        yield from faults.problems(scenario.faults, _place(scenario))


def _place(scenario: Scenario) -> faults.Place:
    """What its faults may speak of."""
    places = {name: links.place(link) for name, link in scenario.links.items()}
    sites = [pipelines.home(scenario, entry) for entry in scenario.instances.values()]
    sites += [site for between, _, _ in places.values() for site in between]
    names = [name for name, _, _ in _expanded(scenario.instances, scenario.scale)]
    return faults.Place(names, (GATEWAY, CLIENT), list(dict.fromkeys(sites)), places)


def _profile(entry: Instance, written: Document | None) -> Path | None:
    """The file that `step_time: measured:FILE` names: beside the scenario, or where we stand."""
    if not isinstance(entry.step_time, str) or not entry.step_time.startswith(MEASURED):
        return None
    name = Path(entry.step_time.removeprefix(MEASURED)).expanduser()
    beside = Path(written.file if written else "").parent / name
    return beside if beside.exists() else name


def _profile_problems(scenario: Scenario, written: Document) -> Iterator[Problem]:
    """Step profiles that are not there, or are not profiles, or are of another model."""
    for name, entry in scenario.instances.items():
        if (path := _profile(entry, written)) is None:
            continue
        keys = ("instances", name, "step_time")
        try:
            profile = profiles.read(path)
        except BadInput as error:
            yield Problem(keys, f"{error}; `pddrt calibrate` writes one")
            continue
        dtype = entry.dtype or scenario.dtype
        if (profile.model, profile.dtype) != (scenario.model, dtype):
            yield Problem(keys, f"{path} is of {profile.model} in {profile.dtype}; "
                                f"needed: {scenario.model} in {dtype}")  # fmt: skip


def _clock_problems(scenario: Scenario) -> Iterator[Problem]:
    """Step times that the clock cannot have."""
    for name, entry in scenario.instances.items():
        keys = ("instances", name, "step_time")
        where = "under the virtual clock" if scenario.clock == "virtual" else "with engine: model"
        charged = scenario._charged(entry)
        if charged and entry.step_time == "real":
            yield Problem(keys, f"found 'real' {where}; allowed there: "
                                "chip | {prefill_tokens_per_s, decode_step}")  # fmt: skip
        elif charged and entry.step_time is None and entry.chip is None:
            yield Problem(keys, f"missing: {where} each instance needs a chip, or "
                                "step_time: {prefill_tokens_per_s, decode_step}")  # fmt: skip
        elif entry.step_time == "chip" and entry.chip is None:
            yield Problem(keys, f"found 'chip', but no chip is given; allowed with chip: "
                                f"{' | '.join(CHIPS)} | {{flops, memory, bandwidth}}")  # fmt: skip


def _engine_problems(scenario: Scenario) -> Iterator[Problem]:
    """KV of a model and modelled KV cannot be handed over to one another."""
    first: tuple[str, str] | None = None
    for name, entry in scenario.instances.items():
        first = first or (name, entry.engine)
        if entry.engine != first[1]:
            yield Problem(("instances", name, "engine"),
                          f"found '{entry.engine}', where {first[0]} has '{first[1]}'; "
                          "allowed: one engine for all, their KV is not each other's")  # fmt: skip


def _name_problems(scenario: Scenario) -> Iterator[Problem]:
    if sum(1 for _ in _expanded(scenario.instances, scenario.scale)) > MAX_INSTANCES:
        yield Problem(("instances",), f"found more than {MAX_INSTANCES} instances in all")
        return
    taken = {CLIENT: "the client", GATEWAY: "the gateway"}
    for name, group, _ in _expanded(scenario.instances, scenario.scale):
        if name in taken:
            yield Problem(
                ("instances", group), f"found the name {shown(name)}, taken by {taken[name]}"
            )
        taken[name] = f"instances.{group}"


# -- resolving -------------------------------------------------------------------------------------


def _expanded(
    instances: Mapping[str, Instance], scale: Sequence[Scale]
) -> Iterator[tuple[str, str, Instance]]:
    """(name, entry's name, entry) of each single instance that there ever is."""
    for group, entry in instances.items():
        most = max([entry.count, *(e.count for e in scale if e.instances == group)])
        if most == 1:
            yield group, group, entry
        else:
            yield from ((f"{group}-{n}", group, entry) for n in range(most))


def _share(cores: int, entries: Sequence[Instance]) -> list[int]:
    """Threads of each instance: as given, else an even share of the cores that are left."""
    threads = [entry.threads or 0 for entry in entries]
    order: dict[Role, int] = {"prefill": 0, "main": 1, "relay": 2}
    waiting = [n for n, entry in enumerate(entries) if entry.threads is None]
    waiting.sort(key=lambda n: order[entries[n].role])
    left = max(0, cores - sum(threads))
    for place, n in enumerate(waiting):
        share, rest = divmod(left, len(waiting))
        threads[n] = max(1, share + (place < rest))
    return threads


def _plain(value: Any) -> Any:
    """Dicts and lists only, for YAML."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
