"""Fault plans: what the `faults:` of a scenario may say. Each entry has a trigger and an effect.

Trigger (one of):

    at: 5 s          once, so long after the workload began
    rate: 0.1/s      at random moments (Poisson), by the run's seed
    on: {event: KVWhole, request: s0.1, instance: rld0, nth: 1}
                     when an event of that class (see `pddrt.trace`) with these fields happens for
                     the nth time; with `every: true` each time from then on

`count` bounds how often (of `rate` and `every`). `for` says how long the effect lasts, where it has
an end; without it, to the end of the workload. The effect is what `do` says, and each has fields of
its own: the sections below. Names are checked against the scenario by `problems`.

What a fault does is in `pddrt.injector`, and in docs/faults.md as a table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Tag,
    model_validator,
)

from pddrt import trace
from pddrt.document import Problem
from pddrt.messages import MESSAGES
from pddrt.sections import Allowed, ByKey, Section, unknown_name
from pddrt.trace import Event
from pddrt.types import Ns
from pddrt.units import (
    DURATIONS,
    Duration,
    Frequency,
    PositiveDuration,
    Quantity,
    Rate,
    format_duration,
    format_rate,
    parse_duration,
    shown,
)

MAX_FIRINGS = 100_000
"""Of one fault in one run: a run that hangs must not go on for ever because of its faults."""

EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in Event.__subclasses__()
    if kind.__module__ == trace.__name__ and not kind.__name__.startswith("Fault")
}
"""That a fault may wait for: all but what faults do themselves."""


# -- triggers --------------------------------------------------------------------------------------


def _known_event(name: str) -> str:
    if name not in EVENTS:
        raise ValueError(unknown_name(name, EVENTS))
    return name


Times = Annotated[int, Field(ge=1, le=MAX_FIRINGS), Allowed("a whole number from 1 to 100,000")]


class On(Section):
    """Beside these: fields of the event, and what they must be."""

    model_config = ConfigDict(extra="allow")
    event: Annotated[str, AfterValidator(_known_event), Allowed("the name of an event")]
    """The class of the event (docs/faults.md)."""
    nth: Times = 1
    """The how manieth such event."""
    every: Annotated[bool, Allowed("true | false")] = False
    """Each time from then on."""

    @model_validator(mode="after")
    def _has_such_fields(self) -> On:
        known = [f.name for f in fields(EVENTS[self.event]) if f.name != "t"]
        for name, value in self.wanted.items():
            if name not in known:
                raise ValueError(f"{self.event} has no such field: {unknown_name(name, known)}")
            if not isinstance(value, (str, int, bool)):
                raise ValueError(f"{name}: found {shown(value)}; allowed: text or a whole number")
        return self

    @property
    def wanted(self) -> dict[str, Any]:
        return self.model_extra or {}

    def matches(self, event: Event) -> bool:
        if type(event) is not EVENTS[self.event]:
            return False
        return all(getattr(event, name) == value for name, value in self.wanted.items())


class Fault(Section):
    """What all faults have."""

    model_config = ConfigDict(serialize_by_alias=True)
    do: str
    """What goes wrong."""
    at: Duration | None = None
    """When, from the beginning of the workload."""
    rate: Frequency | None = None
    """How often, at random moments."""
    on: On | None = None
    """At an event: its class, and any of its fields with what they must be."""
    count: Times | None = None
    """How often at most, with `rate`, or with `on` and `every`."""

    @model_validator(mode="after")
    def _has_one_trigger(self) -> Fault:
        found = [name for name in ("at", "rate", "on") if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(f"found {' and '.join(found) or 'no trigger'}; "
                             "allowed: one of at, rate, on")  # fmt: skip
        if self.count is not None and not (self.rate or (self.on and self.on.every)):
            raise ValueError("found count, though it fires once; "
                             "allowed: with rate, or with on and every: true")  # fmt: skip
        return self

    @property
    def firings(self) -> int:
        """At most so many."""
        often = self.rate is not None or (self.on is not None and self.on.every)
        return self.count or (MAX_FIRINGS if often else 1)

    @property
    def lasts(self) -> Ns | None:
        """None: to the end, or it has no duration."""
        return None


class Lasting(Fault):
    """A fault whose effect ends."""

    duration: Annotated[PositiveDuration | None, Field(alias="for")] = None
    """How long it lasts. Absent: to the end."""

    @property
    def lasts(self) -> Ns | None:
        return self.duration


# -- effects ---------------------------------------------------------------------------------------

_Name = Annotated[str, Field(min_length=1, max_length=80), Allowed("a name")]
_Kind = Annotated[str, Allowed("a kind of frame")]
_REQUEST = r"s\d+\.\d+"
_Request = Annotated[str, Field(pattern=rf"^{_REQUEST}$"), Allowed("a request such as s0.1")]
_Factor = Annotated[float, Field(ge=1, le=1e6), Allowed("a number from 1")]
_Scale = Annotated[float, Field(ge=0, le=1e6), Allowed("a number from 0")]


class OfLink(Lasting):
    link: _Name
    """Which link."""
    direction: (
        Annotated[str, Field(pattern=r"^[\w-]+>[\w-]+$"), Allowed("one way between two sites: a>b")]
        | None
    ) = None
    """One way of it only."""

    @property
    def way(self) -> tuple[str, str] | None:
        if self.direction is None:
            return None
        src, _, dst = self.direction.partition(">")
        return src, dst


class LinkDown(OfLink):
    """Nothing passes; what is sent waits."""

    do: Literal["link-down"]


class LinkSlow(OfLink):
    """The rate is `to`, or the link's own if that is less."""

    do: Literal["link-slow"]
    to: Rate
    """The rate that is left."""


class LinkLong(OfLink):
    """The one-way delay is at least `delay`."""

    do: Literal["link-long"]
    delay: PositiveDuration
    """The one-way delay, at least."""


class JitterStorm(OfLink):
    """The delay's standard deviation is at least `jitter`."""

    do: Literal["jitter-storm"]
    jitter: PositiveDuration
    """The delay's standard deviation, at least."""


class Reset(Fault):
    """Streams are cut: those between two instances, or those that carry KV of a request."""

    do: Literal["reset"]
    between: (
        Annotated[
            tuple[_Name, ...],
            Field(min_length=2, max_length=2, strict=False),
            Allowed("two of the deployment's members: [p0, md0]"),
        ]
        | None
    ) = None
    """All streams between two members."""
    request: _Request | None = None
    """The streams that carry KV of this request."""
    purpose: Literal["kv", "control"] | None = None
    """Of the streams between two: those of KV, or of control."""

    @model_validator(mode="after")
    def _is_of_one(self) -> Reset:
        if self.between is not None and self.request is not None:
            raise ValueError("found between and request; allowed: one of them")
        if self.between is None and self.purpose == "control":
            raise ValueError("found purpose: control; allowed: with between")
        return self


def _known_kind(name: str) -> str:
    if name not in MESSAGES:
        raise ValueError(unknown_name(name, MESSAGES))
    return name


class OfFrames(Lasting):
    """Befalls the next `frames` frames of `kind` from `src` to `dst`; what is not said is any."""

    kind: Annotated[_Kind, AfterValidator(_known_kind)] | None = None
    """The kind of frame. Absent: any."""
    src: _Name | None = None
    """Who sends it. Absent: anybody."""
    dst: _Name | None = None
    """Who gets it. Absent: anybody."""
    frames: Times = 1
    """How many frames."""


class Corrupt(OfFrames):
    do: Literal["corrupt"]


class Truncate(OfFrames):
    do: Literal["truncate"]


class Duplicate(OfFrames):
    do: Literal["duplicate"]


class Delay(OfFrames):
    """Held back for so long, and all that is behind it on the stream."""

    do: Literal["delay"]
    by: PositiveDuration
    """For how long."""


class Crash(Lasting):
    """It stops without a word; with `for` it starts again then, else never."""

    do: Literal["crash"]
    instance: _Name
    """Who."""
    memory: Literal["lost", "kept"] = "lost"
    """Whether its cache survives."""


class Pause(Lasting):
    """It neither steps nor reads. What it has begun to send goes on, and so do its timers."""

    do: Literal["pause"]
    instance: _Name
    """Who."""


class Slow(Lasting):
    """Its steps take `factor` times as long."""

    do: Literal["slow"]
    instance: _Name
    """Who."""
    factor: _Factor
    """How many times as long its steps take."""


class StepFails(Fault):
    """Its next `steps` steps fail, when they are over."""

    do: Literal["step-fails"]
    instance: _Name
    """Who."""
    steps: Times = 1
    """How many steps."""


class OutOfMemory(Fault):
    """Its next `steps` steps fail, before they begin."""

    do: Literal["out-of-memory"]
    instance: _Name
    """Who."""
    steps: Times = 1
    """How many steps."""


class PagesTaken(Lasting):
    """A stranger holds this share of its pages, or what is free of it at that moment."""

    do: Literal["pages-taken"]
    instance: _Name
    """Whose."""
    share: Annotated[float, Field(gt=0, le=1), Allowed("a number above 0, to 1")]
    """How many of its pages."""


class Cancel(Fault):
    """The user cancels a request, or what is under way of a session. Without either: the request
    of the event that was waited for, or any one that is under way.
    """

    do: Literal["cancel"]
    request: _Request | None = None
    """Which request."""
    session: Annotated[int, Field(ge=0), Allowed("a session's number, from 0")] | None = None
    """What is under way of this session."""

    @model_validator(mode="after")
    def _is_of_one(self) -> Cancel:
        if self.request is not None and self.session is not None:
            raise ValueError("found request and session; allowed: one of them")
        return self


class Disconnect(Fault):
    """The client's connection breaks: whatever it waits for is lost to it."""

    do: Literal["disconnect"]


class SlowReader(Lasting):
    """The client takes `by` over each frame."""

    do: Literal["slow-reader"]
    by: PositiveDuration
    """How long it takes over a frame."""


PPM = "a drift in millionths such as 100 ppm or -20 ppm"
SIGNED_DURATIONS = f"{DURATIONS}; or -15 ms"


def _parse_ppm(value: object) -> int:
    match = re.fullmatch(r"\s*([+-]?\d{1,6})\s*ppm\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"found {shown(value)}; allowed: {PPM}")
    return int(match[1])


def _parse_signed(value: object) -> Ns:
    if isinstance(value, str) and value.lstrip().startswith("-"):
        return -parse_duration(value.lstrip()[1:])
    return parse_duration(value)


def _format_signed(ns: Ns) -> str:
    return f"-{format_duration(-ns)}" if ns < 0 else format_duration(ns)


class Skew(Fault):
    """The clocks of all roles at `site` are `offset` ahead of the true time and gain `drift`. From
    the beginning to the end: a clock that jumped would be another fault.
    """

    do: Literal["skew"]
    site: _Name
    """Which site."""
    offset: Annotated[int, Quantity(_parse_signed, _format_signed, SIGNED_DURATIONS)] = 0
    """How far ahead its clocks are."""
    drift: Annotated[int, Quantity(_parse_ppm, "{} ppm".format, PPM)] = 0
    """How much they gain."""

    @model_validator(mode="after")
    def _has_one_trigger(self) -> Skew:
        given = [name for name in ("at", "rate", "on", "count") if getattr(self, name) is not None]
        if given:
            raise ValueError(f"found {given[0]}; allowed: no trigger, a skew is there from the "
                             "beginning")  # fmt: skip
        return self


class StaleSignals(Lasting):
    """What the router is told of an instance's load (of every one's) comes `by` later."""

    do: Literal["stale-signals"]
    by: PositiveDuration
    """How much later."""
    instance: _Name | None = None
    """Whose. Absent: everybody's."""


class WrongSignals(Lasting):
    """What the router is told of an instance's load is `factor` times what it is."""

    do: Literal["wrong-signals"]
    factor: _Scale
    """By how much."""
    instance: _Name | None = None
    """Whose. Absent: everybody's."""


KINDS: dict[str, type[Fault]] = {
    get_args(kind.model_fields["do"].annotation)[0]: kind
    for kind in (
        LinkDown, LinkSlow, LinkLong, JitterStorm, Reset, Corrupt, Truncate, Duplicate, Delay,
        Crash, Pause, Slow, StepFails, OutOfMemory, PagesTaken, Cancel, Disconnect, SlowReader,
        Skew, StaleSignals, WrongSignals,
    )
}  # fmt: skip


def _known_effect(name: str) -> str:
    if name not in KINDS:
        raise ValueError(unknown_name(name, KINDS))
    return name


class UnknownFault(Section):
    """A fault that does none of these: never valid, and only its `do` is complained of."""

    model_config = ConfigDict(extra="ignore")
    do: Annotated[str, AfterValidator(_known_effect), Allowed(" | ".join(KINDS))]


def _a_mapping(value: Any) -> Any:
    if not isinstance(value, (dict, Fault)):
        raise ValueError(f"found {shown(value)}; allowed: {_ENTRY}")
    return value


_ENTRY = "a mapping with do, and at, rate or on"
_BY_DO = ByKey("do", KINDS, UnknownFault)

if TYPE_CHECKING:
    _OneOf = Fault
else:
    _OneOf = Union[tuple(Annotated[k, Tag(f"<{k.__name__}>")] for k in KINDS.values())]  # noqa: UP007

FaultPlan = Annotated[
    tuple[
        Annotated[_OneOf, _BY_DO, BeforeValidator(_a_mapping), Allowed(_ENTRY)],
        ...,
    ],
    Field(strict=False, max_length=1000),
    Allowed("a list of faults"),
]


# -- against the scenario --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """What a scenario has that its faults may speak of. `links`: the sites that each joins, its
    rate (None: unlimited) and its delay. `others`: members that are no instances.
    """

    instances: Collection[str]
    others: Collection[str]
    sites: Collection[str]
    links: Mapping[str, tuple[tuple[str, str], int | None, Ns]]


def problems(plan: Sequence[Fault], place: Place) -> Iterator[Problem]:
    """What of the plan does not fit the scenario, at `faults.N.field`."""
    members = [*place.instances, *place.others]
    known = {"instance": place.instances, "src": members, "dst": members,
             "site": place.sites, "link": place.links}  # fmt: skip
    for number, fault in enumerate(plan):
        for field, names in known.items():
            name = getattr(fault, field, None)
            if name is not None and name not in names:
                yield Problem(("faults", number, field), unknown_name(name, names))
        between = fault.between if isinstance(fault, Reset) and fault.between else ()
        for at, name in enumerate(between):
            if name not in members:
                yield Problem(("faults", number, "between", at), unknown_name(name, members))
        if isinstance(fault, OfLink) and fault.link in place.links:
            yield from _link_problems(number, fault, *place.links[fault.link])


def _link_problems(
    number: int, fault: OfLink, between: tuple[str, str], rate: int | None, delay: Ns
) -> Iterator[Problem]:
    """A fault that would change nothing is a mistake."""

    def problem(field: str, found: str, allowed: str) -> Problem:
        return Problem(("faults", number, field), f"found {found}; allowed: {allowed}")

    ways = [f"{a}>{b}" for a, b in dict.fromkeys((between, between[::-1]))]
    if fault.direction is not None and fault.direction not in ways:
        yield problem("direction", f"'{fault.direction}'", " | ".join(ways))
    if isinstance(fault, LinkSlow) and rate is not None and fault.to >= rate:
        yield problem("to", format_rate(fault.to), f"less than the link's {format_rate(rate)}")
    if isinstance(fault, LinkLong) and fault.delay <= delay:
        least = format_duration(delay)
        yield problem("delay", format_duration(fault.delay), f"more than the link's {least}")
    if isinstance(fault, JitterStorm) and not delay:
        yield problem("jitter", "jitter on a link without delay", "a link with a delay")
