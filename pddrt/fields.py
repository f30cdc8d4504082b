"""The sections of a scenario: which fields there are, what they may hold, what they default to.

These models are the contract's YAML and nothing else. To add a field, add it here. What the
contract names and this version lacks is refused as such: values stand in `Later(...)` of their
field (to make one available, move it into the `Literal`), whole fields in `LATER_FIELDS`.

A field that is None is filled by `Scenario.resolved`, from the scenario's own or the machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pddrt import sections
from pddrt.chips import CHIPS, Chip
from pddrt.sections import NOT_YET, Allowed, Later, Section
from pddrt.types import MS, Ns, Role
from pddrt.units import (
    DURATIONS,
    Duration,
    PositiveDuration,
    PositiveSize,
    Quantity,
    Rate,
    format_duration,
    parse_duration,
    shown,
)  # fmt: skip

MAX_INSTANCES = 1000

LATER_FIELDS = (
    "anomaly", "handoff.threshold", "handoff.max_ids_per_round", "handoff.max_rounds",
)  # fmt: skip
CUSTOM = r"[\w.]+:\w+"
"""A policy of the user's, package.module:Class."""

Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"),
    Allowed("a name of letters, digits, - and _, that begins with a letter"),
]
Tokens = Annotated[int, Field(ge=1, le=1 << 20), Allowed("a whole number from 1 to 1,048,576")]


class Link(Section):
    between: Annotated[
        tuple[Name, ...],
        Field(min_length=2, max_length=2, strict=False),
        Allowed("two sites: [a, b]"),
    ]
    rate: Rate | None = None
    delay: Duration = 0
    jitter: Duration = 0
    tcp: Annotated[Literal["none"], Later("reno", "cubic", "bbr")] = "none"


MEASURED = "measured:"
"""Before the name of a step profile; relative names are looked for beside the scenario."""


class Figures(Section):
    """Step times as two figures (see `chips.figures_cost`)."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=1e12), Allowed("a number above 0")]
    decode_step: PositiveDuration


def _known_chip(name: str) -> str:
    if name not in CHIPS:
        raise ValueError(sections.unknown_name(name, CHIPS) + ", or {flops, memory, bandwidth}")
    return name


def _chip_tag(value: Any) -> str:
    return "<Chip>" if isinstance(value, (dict, Chip)) else "<name>"


def _step_time_tag(value: Any) -> str:
    if isinstance(value, str) and value.startswith(MEASURED):
        return "<measured>"
    return "<Figures>" if isinstance(value, (dict, Figures)) else "<name>"


_ChipName = Annotated[str, AfterValidator(_known_chip), Allowed("a chip's name, or its figures")]
ChipField = Annotated[
    Annotated[_ChipName, Tag("<name>")] | Annotated[Chip, Tag("<Chip>")], Discriminator(_chip_tag)
]
StepTime = Annotated[
    Annotated[
        Literal["real", "chip"],
        Allowed("real | chip | measured:FILE | {prefill_tokens_per_s, decode_step}"),
        Tag("<name>"),
    ]
    | Annotated[
        str,
        Field(pattern=rf"^{MEASURED}\S.*$"),
        Allowed("measured:FILE, a profile of `pddrt calibrate`"),
        Tag("<measured>"),
    ]
    | Annotated[Figures, Tag("<Figures>")],
    Discriminator(_step_time_tag),
]


class Instance(Section):
    """One entry of `instances`; what is None is filled by `Scenario.resolved`."""

    role: Role
    site: Name
    count: Annotated[
        int, Field(ge=1, le=MAX_INSTANCES), Allowed("a whole number from 1 to 1,000")
    ] = 1
    device: Annotated[
        str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$"), Allowed("cpu | cuda | cuda:N")
    ] = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024), Allowed("a whole number from 1")] | None = None
    dtype: Dtype | None = None
    page_tokens: Tokens | None = None
    chunk_tokens: Tokens = 512
    max_batch: Annotated[int, Field(ge=1, le=65536), Allowed("a whole number from 1 to 65,536")] = (
        32
    )
    kv_memory: PositiveSize = 1 << 30
    engine: Literal["torch", "model"] = "torch"
    chip: ChipField | None = None
    step_time: StepTime | None = None


def _relay_above(value: object) -> Ns:
    """A time; a hit rate is for later."""
    is_share = isinstance(value, float) and 0 < value <= 1
    if is_share or (isinstance(value, str) and value.rstrip().endswith("%")):
        raise ValueError(f"found {shown(value)}: a hit rate is {NOT_YET}; available: {DURATIONS}")
    return parse_duration(value)


class Pipeline(Section):
    policy: Annotated[
        Literal["pdd", "naive"],
        Later("local", "colocated", "prfaas", "relay-only", "recompute", "compress", CUSTOM),
    ] = "pdd"
    relay_above: Annotated[int, Quantity(_relay_above, format_duration, DURATIONS)] = 200 * MS
    stream_kv: Literal["while-computing", "after-prefill"] = "while-computing"
    drc: Literal["on", "off"] = "on"


class Handoff(Section):
    mode: Annotated[Literal["one-shot"], Later("catch-up", "adaptive", "overlap", CUSTOM)] = (
        "one-shot"
    )


class Gateway(Section):
    """`site` None: that of the first prefill instance."""

    site: Name | None = None
    first_token: Literal["decoder", "early"] = "decoder"


class SamplingFields(Section):
    temperature: Annotated[
        float, Field(ge=0, le=100), Allowed("a number from 0 (greedy) to 100")
    ] = 0.0
    top_k: Annotated[int, Field(ge=0, le=10_000_000), Allowed("a whole number, 0 for all")] = 0
    top_p: Annotated[float, Field(gt=0, le=1), Allowed("a number above 0, to 1")] = 1.0


class Slo(Section):
    ttft: PositiveDuration | None = None
    tpot: PositiveDuration | None = None


def _no_faults(value: Any) -> Any:
    if isinstance(value, list) and value:
        raise ValueError(f"found {len(value)}: faults are {NOT_YET}; available: []")
    return tuple(value) if isinstance(value, list) else value


Faults = Annotated[tuple[Any, ...], BeforeValidator(_no_faults), Allowed("an empty list")]
