"""The sections of a scenario: which fields there are, what they may hold, what they default to.

These models are the contract's YAML and nothing else. To add a field, add it here. What the
contract names and this version lacks is refused as such: values stand in `Later(...)` of their
field (to make one available, move it into the `Literal`).

A field that is None is filled by `Scenario.resolved`, from the scenario's own or the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pddrt import sections
from pddrt.chips import CHIPS, Chip
from pddrt.link_fields import Name
from pddrt.messages import MAX_LOGPROBS, MAX_STOP_IDS, MAX_STOP_LENGTH, MAX_STOPS
from pddrt.policy.route import HitRate
from pddrt.sections import Allowed, Section
from pddrt.types import MS, SECOND, Ns, Role
from pddrt.units import (
    DURATIONS,
    Duration,
    PositiveDuration,
    PositiveSize,
    Quantity,
    format_duration,
    parse_duration,
    shown,
)  # fmt: skip

MAX_INSTANCES = 1000

CUSTOM = r"[\w.]+:\w+"
"""A policy of the user's, package.module:Class."""

Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Tokens = Annotated[int, Field(ge=1, le=1 << 20), Allowed("a whole number from 1 to 1,048,576")]


MEASURED = "measured:"
"""Before the name of a step profile; relative names are looked for beside the scenario."""


class Figures(Section):
    """Step times as two figures (see `chips.figures_cost`)."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=1e12), Allowed("a number above 0")]
    """Tokens prefilled in a second."""
    decode_step: PositiveDuration
    """Length of a step that decodes."""


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


Count = Annotated[int, Field(ge=0, le=MAX_INSTANCES), Allowed("a whole number from 0 to 1,000")]


class Scale(Section):
    """From `at` on, counted from the workload's beginning, there are `count` of a group."""

    at: Duration
    """When, from the beginning of the workload."""
    instances: Name
    """Which group."""
    count: Count
    """How many there are from then on. Who leaves first finishes what it has."""


class Instance(Section):
    """One entry of `instances`; what is None is filled by `Scenario.resolved`. `count` may be 0
    where `scale` says that there will be more.
    """

    role: Role
    """P, RLD or MD."""
    site: Name
    """The datacenter that it stands in."""
    count: Count = 1
    """How many such instances. 0 where `scale` says that there will be some."""
    device: Annotated[
        str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$"), Allowed("cpu | cuda | cuda:N")
    ] = "cpu"
    """Where a torch engine runs."""
    threads: Annotated[int, Field(ge=1, le=1024), Allowed("a whole number from 1")] | None = None
    """Compute threads of a torch engine. Absent: a share of the cores, P first; 1 under the virtual
    clock."""
    dtype: Dtype | None = None
    """Absent: that of the scenario. KV that comes in another one is converted on arrival."""
    page_tokens: Tokens | None = None
    """Absent: that of the scenario. May differ between instances."""
    chunk_tokens: Tokens = 512
    """Most tokens of prompts that are prefilled in one step."""
    max_batch: Annotated[int, Field(ge=1, le=65536), Allowed("a whole number from 1 to 65,536")] = (
        32
    )
    """Most sequences in a step."""
    kv_memory: PositiveSize = 1 << 30
    """Memory for KV, cached prefixes included."""
    engine: Literal["torch", "model"] = "torch"
    """`torch` runs the model. `model` runs none: steps cost time only, and ids are a function of
    the KV that the engine holds."""
    chip: ChipField | None = None
    """A chip by name, or its figures: with a `step_time` of `chip`, the roofline says how long a
    step takes."""
    step_time: StepTime | None = None
    """How long a step takes. `real`: as long as it takes, on the wall clock only; there any other
    value is a lower bound. Absent: `chip` where one is given, else `real`."""


RELAY_ABOVE = f"{DURATIONS}; or a hit rate: 90 %, or a share such as 0.9"


def _relay_above(value: object) -> Ns | HitRate:
    """A time, or a hit rate as a percentage or share. Shares are kept to twelve digits, so that
    they are the same however they are written.
    """
    share: float | None = None
    if isinstance(value, str) and value.rstrip().endswith("%"):
        try:
            share = float(value.rstrip()[:-1]) / 100
        except ValueError:
            share = -1
    elif isinstance(value, float):
        share = value
    if share is None:
        return parse_duration(value)
    if not 0 <= share <= 1:
        raise ValueError(f"found {shown(value)}; allowed: {RELAY_ABOVE}")
    return HitRate(round(share, 12))


def _format_relay_above(value: Ns | HitRate) -> str:
    if isinstance(value, HitRate):
        return f"{value.share * 100:.12g} %"
    return format_duration(value)


def _policy_tag(value: Any) -> str:
    return "<class>" if isinstance(value, str) and ":" in value else "<name>"


PolicyName = Literal[
    "pdd", "naive", "local", "colocated", "prfaas", "relay-only", "recompute", "compress"
]
PolicyField = Annotated[
    Annotated[
        PolicyName,
        Allowed(f"{' | '.join(get_args(PolicyName))} | package.module:Class"),
        Tag("<name>"),
    ]
    | Annotated[
        str,
        Field(pattern=rf"^{CUSTOM}$"),
        Allowed("package.module:Class, a policy of yours"),
        Tag("<class>"),
    ],
    Discriminator(_policy_tag),
]


class Pipeline(Section):
    """`relay_above`: of pdd and relay-only. `offload_above`: of prfaas, in tokens. `wan_kv` None:
    8-bit with policy compress, else as-is.
    """

    policy: PolicyField = "pdd"
    """Which pipelines there are and who takes which: docs/pipelines.md."""
    relay_above: Annotated[Any, Quantity(_relay_above, _format_relay_above, RELAY_ABOVE)] = 200 * MS
    """Of pdd and relay-only. A time: a request is relayed where the transfer to MD would take
    longer. A hit rate: where less of its prompt is cached on MD."""
    offload_above: Annotated[
        int, Field(ge=0, le=1 << 30), Allowed("a whole number of tokens, from 0")
    ] = 1000
    """Of prfaas: prompts of which more tokens than this are cached nowhere go to P."""
    relay_full: Literal["p-md", "wait"] = "p-md"
    """Where no RLD has room: go without (P-MD), or wait for one."""
    stream_kv: Literal["while-computing", "after-prefill"] = "while-computing"
    """Send each chunk of KV when it is computed, or all when the prompt is done."""
    wan_kv: Literal["as-is", "8-bit"] | None = None
    """KV over the WAN as it is, or in 8 bits a value with scales. Absent: `8-bit` with policy
    compress, else `as-is`."""
    drc: Literal["on", "off"] = "on"
    """MD's prefix cache. Off: the whole prompt's KV crosses, each time."""

    @property
    def eight_bit_wan(self) -> bool:
        return (self.wan_kv or ("8-bit" if self.policy == "compress" else "as-is")) == "8-bit"


HandoffName = Literal["one-shot", "catch-up", "adaptive", "overlap"]
HandoffField = Annotated[
    Annotated[
        HandoffName,
        Allowed(f"{' | '.join(get_args(HandoffName))} | package.module:Class"),
        Tag("<name>"),
    ]
    | Annotated[
        str,
        Field(pattern=rf"^{CUSTOM}$"),
        Allowed("package.module:Class, a policy of yours"),
        Tag("<class>"),
    ],
    Discriminator(_policy_tag),
]


class Handoff(Section):
    """See `policy.handoff`. `max_ids_per_round` also bounds what a main decoder that decodes along
    with a relay extends over in one step.
    """

    mode: HandoffField = "adaptive"
    """How ids get from RLD to MD: docs/handoff.md."""
    threshold: Annotated[
        int, Field(ge=0, le=65536), Allowed("a whole number of ids, from 0 to 65,536")
    ] = 64
    """Ids. Catch-up and adaptive finish as soon as MD lacks no more than so many."""
    max_ids_per_round: Annotated[
        int, Field(ge=1, le=65536), Allowed("a whole number of ids, from 1 to 65,536")
    ] = 32
    """Most ids of a round, and most that a main decoder which decodes along extends over in one
    step."""
    max_rounds: Annotated[int, Field(ge=1, le=1024), Allowed("a whole number from 1 to 1,024")] = 8
    """Rounds after which RLD freezes and hands over what is left."""


class Router(Section):
    """`signal_age`: how old what is known of an instance's load may be. `max_transfers`: of one P,
    over one path, at a time. `handshake`: how long a decoder may take to answer an offer at all.
    """

    signal_age: Duration = 50 * MS
    """How old what is known of an instance's load may be."""
    max_transfers: Annotated[
        int, Field(ge=1, le=65536), Allowed("a whole number from 1 to 65,536")
    ] = 8
    """Transfers of one P over one path at a time."""
    handshake: PositiveDuration = 10 * SECOND
    """How long a decoder may take to answer an offer at all."""


def _share(value: object) -> float:
    """A share of all requests: `5 %`, or a number above 0, to 1."""
    share: object = value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        with contextlib.suppress(ValueError):
            share = float(value.rstrip()[:-1]) / 100
    if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1:
        return round(float(share), 12)
    raise ValueError(f"found {shown(value)}; allowed: {SHARES}")


SHARES = "a share such as 5 %, above 0 and up to 100 %"
Share = Annotated[float, Quantity(_share, lambda share: f"{share * 100:.12g} %", SHARES)]


class AnomalyFields(Section):
    """`input_above` in tokens that the main decoder lacks, `output_below` in tokens of the answer.
    `share` bounds how many of all requests may be spared. See `policy.anomaly`.
    """

    input_above: Annotated[int, Field(ge=0, le=1 << 30), Allowed("a whole number, from 0")]
    """Tokens that MD lacks: only requests with more are spared."""
    output_below: Annotated[int, Field(ge=1, le=1 << 30), Allowed("a whole number, from 1")]
    """Tokens of the answer, as guessed: only requests with fewer are spared."""
    share: Share = 0.05
    """How many of all requests may be spared at most."""
    guess: Literal["max_tokens", "session"] = "max_tokens"
    """What the answer's length is guessed from: the request's budget, or what this session's
    answers were."""


SHED_AFTER = f"slo (slo.ttft, if there is one), off, or {DURATIONS}, above 0"


def _shed_after(value: object) -> Ns | Literal["slo", "off"]:
    if value in ("slo", "off"):
        return value
    try:
        duration = parse_duration(value)
    except ValueError:
        duration = 0
    if not duration:
        raise ValueError(f"found {shown(value)}; allowed: {SHED_AFTER}")
    return duration


def _format_shed_after(value: Ns | str) -> str:
    return value if isinstance(value, str) else format_duration(value)


class AdmissionFields(Section):
    """Bounds on what is under way; `shed_after`: refuse a request whose first token would come
    later than that, or than the SLO asks for. See `policy.admission`.
    """

    max_requests: (
        Annotated[int, Field(ge=1, le=1 << 30), Allowed("a whole number of requests, from 1")]
        | None
    ) = None
    """Requests under way at most. Absent: 8 times what the pools hold."""
    max_tokens: (
        Annotated[int, Field(ge=1, le=1 << 50), Allowed("a whole number of tokens, from 1")] | None
    ) = None
    """Tokens under way at most, prompts and budgets. Absent: 8 times what the pools hold."""
    shed_after: Annotated[Any, Quantity(_shed_after, _format_shed_after, SHED_AFTER)] = "off"
    """Refuse a request whose first token would probably come later than this."""


class RecoveryFields(Section):
    """Further attempts at a request that lost an instance: how many at most, and how long a pause
    before the first. See `roles.attempts`.
    """

    retries: Annotated[int, Field(ge=0, le=100), Allowed("a whole number from 0 to 100")] = 3
    """Further attempts at most."""
    backoff: Duration = 50 * MS
    """Pause before the first of them; each is twice the one before, less up to half of it."""


class Gateway(Section):
    """`site` None: that of the first prefill instance."""

    site: Name | None = None
    """Absent: that of the first prefill instance."""
    first_token: Literal["decoder", "early"] = "decoder"
    """When the first token is released: once the first decoder holds the KV, or at once."""


NOT_CARRIED = "is not carried over a handoff (docs/sampling.md)"
_COUNTS = f"it needs counts of all ids so far, the sampler's memory, which {NOT_CARRIED}"
_GRAMMAR = f"it needs the state of a grammar, which {NOT_CARRIED}"
_SEVERAL = "an answer is one stream with one id a position; send the request several times"


_A_STOP = f"a text of 1 to {MAX_STOP_LENGTH:,} characters"


def _strings(value: Any) -> Any:
    """One stop string may stand for a list of one."""
    return (value,) if isinstance(value, str) else value


class SamplingFields(Section):
    """What all requests ask of their answers: see `types.Sampling`. Each draws a seed from the
    scenario's.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "presence_penalty": _COUNTS, "frequency_penalty": _COUNTS, "repetition_penalty": _COUNTS,
        "grammar": _GRAMMAR, "guided_decoding": _GRAMMAR, "structured_outputs": _GRAMMAR,
        "response_format": _GRAMMAR, "regex": _GRAMMAR, "json_schema": _GRAMMAR,
        "n": _SEVERAL, "best_of": _SEVERAL, "use_beam_search": _SEVERAL,
        "logits_processors": f"code of yours may keep a memory, which {NOT_CARRIED}",
        "max_tokens": "the workload says how long answers are: workload.output_tokens",
        "seed": "each request draws its own from the scenario's: set `seed` there",
    }  # fmt: skip

    temperature: Annotated[
        float, Field(ge=0, le=100), Allowed("a number from 0 (greedy) to 100")
    ] = 0.0
    """0 takes the best id."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000), Allowed("a whole number, 0 for all")] = 0
    """Draw among so many of the best. 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1), Allowed("a number above 0, to 1")] = 1.0
    """Draw among the best that together have this probability."""
    min_tokens: Annotated[
        int, Field(ge=0, le=1 << 20), Allowed("a whole number from 0 to 1,048,576")
    ] = 0
    """No end of sequence, stop id or stop string before so many tokens."""
    ignore_eos: Annotated[bool, Allowed("true | false")] = False
    """The model may say that it is done; the answer goes on."""
    stop_ids: Annotated[
        tuple[
            Annotated[int, Field(ge=0, lt=1 << 32), Allowed("a token id, a whole number from 0")],
            ...,
        ],
        Field(max_length=MAX_STOP_IDS, strict=False),
        Allowed(f"a list of up to {MAX_STOP_IDS} token ids"),
    ] = ()
    """Ids that end an answer."""
    stop: Annotated[
        tuple[
            Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), Allowed(_A_STOP)], ...
        ],
        BeforeValidator(_strings),
        Field(max_length=MAX_STOPS, strict=False),
        Allowed(f"{_A_STOP}, or a list of up to {MAX_STOPS}"),
    ] = ()
    """Texts that end an answer, and are not part of it."""
    logprobs: (
        Annotated[
            int,
            Field(ge=0, le=MAX_LOGPROBS),
            Allowed(f"a whole number from 0 (the id's own) to {MAX_LOGPROBS}"),
        ]
        | None
    ) = None
    """Report the log-probability of each id, and of so many of the best."""


class Slo(Section):
    ttft: PositiveDuration | None = None
    """Time to first token."""
    tpot: PositiveDuration | None = None
    """Time per output token after it."""
