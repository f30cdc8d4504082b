"""The sections of a workload: what `workload:` in a scenario may hold.

One section a kind; `workload` makes plans of them and says what the kinds are. Every share is from
0 to 1, every length in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_serializer,
    model_validator,
)  # fmt: skip

from pddrt.hitrate import AGENTS, INTERVALS
from pddrt.sections import Allowed, ByKey, Later, Section, unknown_name
from pddrt.types import Ns
from pddrt.units import Duration, Frequency, PositiveDuration, format_duration

PROMPT_OUTPUT_TOKENS = 128
"""Longest answer to a single prompt that is asked in place of a trace."""

Count = Annotated[int, Field(ge=1, le=1_000_000), Allowed("a whole number from 1 to 1,000,000")]


class Range(Section):
    """A length drawn evenly from [min, max]. In YAML also a single number."""

    min: Count
    """Tokens, at least."""
    max: Count
    """Tokens, at most."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min > self.max:
            raise ValueError(f"found min {self.min} above max {self.max}; allowed: min <= max")
        return self

    @model_serializer
    def _plain(self) -> int | dict[str, int]:
        return self.min if self.min == self.max else {"min": self.min, "max": self.max}


def _range(value: Any) -> Any:
    return {"min": value, "max": value} if type(value) is int else value


Lengths = Annotated[
    Range, BeforeValidator(_range), Allowed("a number of tokens, or {min: 500, max: 1500}")
]


def _few_enough(turns: Range) -> Range:
    if turns.max > 1000:
        raise ValueError(f"found {turns.max}; allowed: 1,000 turns at most")
    return turns


Turns = Annotated[
    Range,
    BeforeValidator(_range),
    AfterValidator(_few_enough),
    Allowed("a number of turns from 1 to 1,000, or {min: 8, max: 30}"),
]
Share = Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")]


class Short(Section):
    """An exact `fraction` of the first turns, at random places, has these lengths instead."""

    fraction: Share
    """Which share of the sessions."""
    prompt_tokens: Lengths
    """Length of such a first turn."""


class LongIn(Section):
    """An exact `fraction` of the requests, at random places: long questions with short answers.

    They are asked beside their conversation, as by a subagent: no history, and none is made.
    """

    fraction: Share
    """Which share of the requests."""
    prompt_tokens: Lengths
    """Length of such a question."""
    output_tokens: Lengths
    """Length of the answer to it."""


class SystemTokens(Section):
    """A system prompt with tool descriptions of that length, from the source of `prompts`."""

    tokens: Count
    """Length of the system prompt."""


System = Annotated[
    Annotated[str, Field(min_length=1), Allowed("a text"), Tag("<text>")]
    | Annotated[SystemTokens, Tag("<tokens>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<tokens>"),
    Allowed("a text, or {tokens: 400}"),
]


def _whole(shares: dict[str, float]) -> dict[str, float]:
    for name in shares:
        if name not in INTERVALS:
            raise ValueError(unknown_name(name, INTERVALS))
    total = sum(shares.values())
    if abs(total - 1) > 1e-6:
        raise ValueError(f"found shares that add up to {total:g}; allowed: shares of 1")
    return shares


HIT_RATES: dict[str, Mapping[str, float]] = {"agents": AGENTS}
HitRates = Annotated[
    Annotated[Literal["agents"], Tag("<name>")]
    | Annotated[dict[str, Share], AfterValidator(_whole), Tag("<shares>")],
    Discriminator(lambda value: "<name>" if isinstance(value, str) else "<shares>"),
    Allowed(f"agents, or shares of {', '.join(INTERVALS)} that add up to 1"),
]


Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1), Allowed("a text")], ...],
    Field(min_length=1, strict=False),
    Allowed("a list of texts, at least one"),
]


def _prompts_tag(value: Any) -> str:
    return "<texts>" if isinstance(value, (list, tuple)) else "<source>"


Prompts = Annotated[
    Annotated[
        Literal["stdlib", "random"], Tag("<source>"), Allowed("stdlib | random | a list of texts")
    ]
    | Annotated[Texts, Tag("<texts>")],
    Discriminator(_prompts_tag),
]


class _Workload(Section):
    """What all kinds but traces share.

    `prompts`: questions on Python's source, random words, given texts. `system`: before every
    conversation, the same. `answers`: which go into the next turn's prompt, the model's or ours.
    """

    kind: str
    """What the workload is like."""
    output_tokens: Count
    """Longest answer, in tokens."""
    prompts: Prompts = "stdlib"
    """What prompts are made of: questions on Python's own source, random words, or your texts in
    turn."""
    prompt_tokens: Lengths = Range(min=500, max=1500)
    """Length of a user turn, drawn evenly."""
    short: Short | None = None
    """Some conversations begin with a shorter turn."""
    long_in: LongIn | None = None
    """Some requests are long questions with short answers, beside their conversation."""
    system: System | None = None
    """A system prompt before every conversation, the same for all."""
    answers: Literal["live", "scripted"] = "live"
    """What goes into the next turn's prompt: the model's own answer, or the workload's, so that
    every policy sees the same prompts."""

    @property
    def concurrency_limit(self) -> int | None:
        """How many sessions may be under way at a time; None: as many as arrive."""
        return None


class Surge(Section):
    """For a time, arrivals come at another rate."""

    model_config = ConfigDict(serialize_by_alias=True)
    at: Duration
    """When it begins."""
    duration: Annotated[PositiveDuration, Field(alias="for")]
    """How long it lasts."""
    rate: Frequency
    """How often something begins meanwhile, in the mean."""

    @property
    def end(self) -> Ns:
        return self.at + self.duration


def _in_order(surges: tuple[Surge, ...]) -> tuple[Surge, ...]:
    for before, after in pairwise(surges):
        if after.at < before.end:
            raise ValueError(
                f"found one at {format_duration(after.at)}, before the one at "
                f"{format_duration(before.at)} ends; allowed: one after the other"
            )
    return surges


Surges = Annotated[
    tuple[Surge, ...],
    Field(strict=False),
    AfterValidator(_in_order),
    Allowed("a list of {at, for, rate}"),
]


class Sessions(_Workload):
    kind: Literal["sessions"]
    """Conversations of several turns that begin at random (Poisson)."""
    sessions: Count
    """How many conversations."""
    turns: Turns = Range(min=1, max=1)
    """Turns of one, drawn evenly."""
    rate: Frequency
    """How often one begins, in the mean."""
    surges: Surges = ()
    """Times in which they begin at another rate."""
    think: Duration = 0
    """Mean of the exponential pause between an answer's end and the next turn."""
    hit_rates: HitRates | None = None
    """Shares of the requests by the prefix-hit rate that an unbounded cache would give them."""
    max_prompt_tokens: Count | None = None
    """A turn whose prompt would be longer starts its conversation over."""

    @model_validator(mode="after")
    def _can_be_made(self) -> Sessions:
        if self.hit_rates is not None and not isinstance(self.prompts, str):
            raise ValueError("found hit_rates with texts that have the length they have; "
                             "allowed: prompts: stdlib | random")  # fmt: skip
        return self


class Poisson(_Workload):
    kind: Literal["poisson"]
    """Single requests that come at random."""
    requests: Count
    """How many."""
    rate: Frequency
    """How often, in the mean."""
    surges: Surges = ()
    """Times in which they come at another rate."""


class Closed(_Workload):
    kind: Literal["closed"]
    """Single requests, the next as soon as one is done."""
    requests: Count
    """How many in all."""
    concurrency: Count
    """How many at a time."""

    @property
    def concurrency_limit(self) -> int | None:
        return self.concurrency


class Trace(Section):
    """`path`: a file, for weka also a folder of them; ~ and $VARIABLES are filled in.

    `limit`: the first so many requests. `time_scale` 2 is half as fast. `rate`: at which the files
    of a folder begin; without it they all begin at once.
    """

    kind: Literal["trace"]
    """Requests as a public trace has them."""
    path: Annotated[str, Field(min_length=1, max_length=4096), Allowed("a file")]
    """The file; for weka also a folder of them. ~ and $VARIABLES are filled in."""
    format: Annotated[
        Literal["mooncake", "weka"], Later("tracelab", "azure", "lmcache", "burstgpt", "bailian")
    ]
    """Whose trace it is."""
    limit: Count | None = None
    """The first so many requests. Absent: all."""
    time_scale: Annotated[float, Field(ge=0, le=1e6), Allowed("a number from 0")] = 1.0
    """2 is half as fast, 0 all at once."""
    length_scale: Annotated[float, Field(gt=0, le=1e3), Allowed("a number above 0")] = 1.0
    """Prompts and answers are this much longer."""
    rate: Frequency | None = None
    """At which the files of a folder begin. Absent: all at once."""

    @model_validator(mode="after")
    def _has_files(self) -> Trace:
        if self.rate is not None and self.format != "weka":
            raise ValueError("found a rate, though the rows say when they came; "
                             "allowed: with format: weka")  # fmt: skip
        return self

    @property
    def output_tokens(self) -> int:
        """Of a single prompt that is asked instead."""
        return PROMPT_OUTPUT_TOKENS

    @property
    def concurrency_limit(self) -> int | None:
        return None


class UnknownKind(Section):
    """A workload whose kind is none of these: never valid, and only its kind is complained of."""

    model_config = ConfigDict(extra="ignore")
    kind: Literal["sessions", "poisson", "closed", "trace"]


_KINDS: dict[str, type[Section]] = {
    "sessions": Sessions, "poisson": Poisson, "closed": Closed, "trace": Trace,
}  # fmt: skip


Workload = Annotated[
    Annotated[Sessions, Tag("<Sessions>")]
    | Annotated[Poisson, Tag("<Poisson>")]
    | Annotated[Closed, Tag("<Closed>")]
    | Annotated[Trace, Tag("<Trace>")],
    ByKey("kind", _KINDS, UnknownKind),
    Allowed("a mapping with kind: sessions | poisson | closed | trace"),
]
