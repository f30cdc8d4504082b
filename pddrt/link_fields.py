"""The sections of a link, in a scenario and in a profile file: what they may hold.

A figure that may differ between the two directions is written once, or as a mapping of both:

    rate: 50 Mbit/s
    rate: {a>b: 50 Mbit/s, b>a: 10 Mbit/s}

`links` makes specs of them, says what does not fit together, and reads profiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_serializer

from pddrt.netem.jitter import SHAPES
from pddrt.netem.segments import RECEIVE_BUFFER
from pddrt.netem.tcp import SEND_BUFFER
from pddrt.sections import Allowed, Section
from pddrt.types import SECOND, Ns
from pddrt.units import (
    DURATIONS,
    RATES,
    SIZES,
    Duration,
    PositiveDuration,
    PositiveSize,
    Quantity,
    Rate,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
    shown,
)  # fmt: skip

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"),
    Allowed("a name of letters, digits, - and _, that begins with a letter"),
]
MAX_STREAMS = 64
MAX_CHANGES = 10_000


@dataclass(frozen=True, slots=True)
class Ways:
    """A figure by direction, each written a>b."""

    of: tuple[tuple[str, Any], ...]

    def toward(self, src: str, dst: str) -> Any:
        return dict(self.of).get(f"{src}>{dst}")


def toward(value: Any, src: str, dst: str) -> Any:
    """A figure, or that of one direction."""
    return value.toward(src, dst) if isinstance(value, Ways) else value


def each(value: Any) -> list[Any]:
    """The figure, or those of both directions."""
    return [one for _, one in value.of] if isinstance(value, Ways) else [value]


def _by_way(parse: Callable[[object], Any], form: Callable[[Any], Any], allowed: str) -> Quantity:
    allowed = f"{allowed}; or one for each way: {{a>b: ..., b>a: ...}}"

    def read(value: object) -> Any:
        if isinstance(value, Ways):
            return value
        if not isinstance(value, Mapping):
            return parse(value)
        keys = list(value)
        if len(keys) != 2 or not all(
            isinstance(k, str) and k.count(">") == 1 and all(k.split(">")) for k in keys
        ):
            raise ValueError(
                f"found {', '.join(map(shown, keys)) or 'nothing'}; allowed: {allowed}"
            )
        return Ways(tuple((key, parse(value[key])) for key in sorted(keys)))

    def write(value: Any) -> Any:
        if isinstance(value, Ways):
            return {key: form(one) for key, one in value.of}
        return form(value)

    return Quantity(read, write, allowed)


# -- quantities ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bdp:
    """So many bandwidth-delay products: rate times round trip."""

    times: float

    def nbytes(self, rate: int, round_trip: Ns) -> int:
        return round(Fraction(self.times) * rate * round_trip / SECOND)


def _plain_number(text: str) -> float | None:
    """A plain decimal; None for anything else. An exponent might come to nothing, or to no end."""
    text = text.strip()
    if len(text) <= 32 and re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII):
        return float(text)
    return None


UNLIMITED = "unlimited"
QUEUES = f"{SIZES}; or '0.5 BDP', or {UNLIMITED}"


def parse_queue(value: object) -> int | Bdp | str:
    if isinstance(value, Bdp):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text == UNLIMITED:
            return UNLIMITED
        if text.upper().endswith("BDP") and (times := _plain_number(text[:-3])) is not None:
            if 0 < times < 1e6:
                return Bdp(times)
            raise ValueError(f"found {shown(value)}; allowed: {QUEUES}, above zero")
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(str(error).replace(SIZES, QUEUES)) from None
    if not size:
        raise ValueError(f"found {shown(value)}; allowed: {QUEUES}, above zero")
    return size


def _format_queue(value: int | Bdp | str) -> str:
    if isinstance(value, Bdp):
        return f"{value.times:.12g} BDP"
    return value if isinstance(value, str) else format_size(value)


SHARES = "a share below 90 % such as 0.1 %, or 0"


def parse_share(value: object) -> float:
    """`0.1 %` as 0.001: below 0.9, which no TCP survives. ValueError for anything else."""
    share: object = value
    if isinstance(value, str):
        text = value.strip()
        number = _plain_number(text.removesuffix("%"))
        share = number / 100 if number is not None and (text.endswith("%") or not number) else None
    if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share < 0.9:
        return round(float(share), 12)
    raise ValueError(f"found {shown(value)}; allowed: {SHARES}")


def format_share(share: float) -> str:
    return f"{share * 100:.12g} %"


Share = Annotated[float, Quantity(parse_share, format_share, SHARES)]
Queue = Annotated[Any, Quantity(parse_queue, _format_queue, QUEUES)]
RateByWay = Annotated[Any, _by_way(parse_rate, format_rate, RATES)]
DelayByWay = Annotated[Any, _by_way(parse_duration, format_duration, DURATIONS)]

PROFILES = "a named WAN (see `pddrt netem profile`), or a file"


def _profile_name(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= 4096 and value.isprintable():
        return value
    raise ValueError(f"found {shown(value)}; allowed: {PROFILES}")


ProfileByWay = Annotated[Any, _by_way(_profile_name, str, PROFILES)]


# -- parts -----------------------------------------------------------------------------------------


class Jitter(Section):
    """How the delay varies in time: see `netem.jitter`. In YAML also the deviation alone."""

    deviation: Duration
    """Standard deviation of the one-way delay."""
    shape: Annotated[
        str,
        Field(min_length=1, max_length=4096),
        Allowed(f"{' | '.join(SHAPES)} | FILE.dist, a table of netem's"),
    ] = "log-normal"
    """The delay's distribution."""
    correlation: PositiveDuration | None = None
    """Over this time the correlation falls to a third. Absent: 10 deviations, which keeps delays
    from falling faster than time passes."""

    @model_serializer
    def _plain(self) -> str | dict[str, str]:
        deviation = format_duration(self.deviation)
        if self.shape == "log-normal" and self.correlation is None:
            return deviation
        whole = {"deviation": deviation, "shape": self.shape}
        if self.correlation is not None:
            whole["correlation"] = format_duration(self.correlation)
        return whole


class Loss(Section):
    """Segments that the path loses. In YAML also the share alone."""

    share: Share
    """Of all segments."""
    burst: Annotated[float, Field(ge=1, lt=1e9), Allowed("a number of segments, from 1")] | None = (
        None
    )
    """Mean length of a row of lost segments (Gilbert and Elliott). Absent: each by itself."""

    @model_serializer
    def _plain(self) -> str | dict[str, Any]:
        share = format_share(self.share)
        return share if self.burst is None else {"share": share, "burst": self.burst}


def _part(key: str, parse: Callable[[object], Any]) -> BeforeValidator:
    """A part may be written as its first figure alone."""

    def read(value: Any) -> Any:
        if isinstance(value, (Mapping, Section)):
            return value
        parse(value)
        return {key: value}

    return BeforeValidator(read)


JITTERS = f"{DURATIONS}; or {{deviation, shape, correlation}}"
JitterField = Annotated[Jitter, _part("deviation", parse_duration), Allowed(JITTERS)]
LossField = Annotated[Loss, _part("share", parse_share), Allowed(f"{SHARES}; or {{share, burst}}")]


class Weights(Section):
    """Shares of what is carried against one another, under fair queueing."""

    kv: Annotated[int, Field(ge=1, le=1000), Allowed("a whole number from 1 to 1,000")] = 1
    """KV."""
    ids: Annotated[int, Field(ge=1, le=1000), Allowed("a whole number from 1 to 1,000")] = 1
    """Token ids."""
    control: Annotated[int, Field(ge=1, le=1000), Allowed("a whole number from 1 to 1,000")] = 1
    """Everything else."""


class Change(Section):
    """From `at` on, until another change says otherwise."""

    at: Duration
    """When, counted from the beginning of the run."""
    rate: Rate | None = None
    """0 is an outage."""
    delay: Duration | None = None
    """One way."""
    loss: Share | None = None
    """Of segments."""


class Outage(Section):
    """Nothing moves, and nothing is lost, from `at` on, `for` so long."""

    model_config = ConfigDict(serialize_by_alias=True)

    at: Duration
    """When, counted from the beginning of the run."""
    duration: Annotated[PositiveDuration, Field(alias="for")]
    """How long."""


class SegmentFields(Section):
    """A piece of a profile. What it does not say is as the profile has it."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: Annotated[PositiveDuration, Field(alias="for")]
    """How long it lasts."""
    rate: Rate | None = None
    """0 is an outage."""
    delay: Duration | None = None
    """One way."""
    loss: Share | None = None
    """Of segments."""


class ProfileFields(Section):
    """A profile file: what a link is like, and perhaps how that changes."""

    about: Annotated[str, Field(max_length=4096), Allowed("text")] = ""
    """What was measured, or whom it is like."""
    rate: Rate | None = None
    """Absent: no limit."""
    delay: Duration = 0
    """One way."""
    jitter: JitterField | None = None
    """How the delay varies."""
    loss: LossField | None = None
    """What the path loses."""
    queue: Queue | None = None
    """What the bottleneck holds."""
    repeat: Annotated[bool, Allowed("true | false")] = True
    """Whether the segments begin again after the last one, which otherwise holds for ever."""
    segments: Annotated[
        tuple[SegmentFields, ...],
        Field(strict=False, max_length=1_000_000),
        Allowed("a list of {for, rate, delay, loss}"),
    ] = ()
    """One after the other, from the beginning of the run."""


class Link(Section):
    """A link between two sites, or the fabric inside one (`between: [a, a]`). Full duplex."""

    between: Annotated[
        tuple[Name, ...],
        Field(min_length=2, max_length=2, strict=False),
        Allowed("two sites: [a, b]"),
    ]
    """The sites that it joins."""
    profile: ProfileByWay | None = None
    """A named WAN, or a trace or profile from a file. What is written beside it comes first; beside
    a trace the lower rate and the longer delay hold."""
    rate: RateByWay | None = None
    """Of each direction. Absent: no limit. 0: an outage."""
    delay: DelayByWay | None = None
    """One way. Absent: the profile's, or none."""
    jitter: JitterField | None = None
    """How the delay varies in time."""
    tcp: Literal["none", "reno", "cubic", "bbr"] = "none"
    """Congestion control of every stream. `none`: streams share the rate evenly at once, nothing is
    lost and nothing has headers."""
    streams: Annotated[
        int, Field(ge=1, le=MAX_STREAMS), Allowed(f"a whole number from 1 to {MAX_STREAMS}")
    ] = 1
    """TCP connections of each stream, which take from one supply."""
    connections: Literal["cold", "warm"] = "cold"
    """Whether TCP's window must open first, or is what the path holds, as after earlier
    traffic."""
    send_buffer: PositiveSize = SEND_BUFFER
    """Of each TCP connection. Bounds its window."""
    receive_buffer: PositiveSize = RECEIVE_BUFFER
    """Of each TCP connection. Bounds its window, by two thirds of it."""
    loss: LossField | None = None
    """Segments that the path loses. They slow TCP down; no stream ever lacks a byte."""
    queue: Queue | None = None
    """What the bottleneck holds before it drops. Absent: one bandwidth-delay product, 64 KiB at
    least."""
    aqm: Literal["drop-tail", "codel"] = "drop-tail"
    """What a queue drops: what finds it full, or (CoDel) also what has waited for too long."""
    qdisc: Literal["fair", "fifo"] | None = None
    """Who is served next: all streams at once, or the first that came. Absent: fair without TCP,
    fifo with it."""
    priority: Literal["none", "control"] = "none"
    """`control`: tokens and commands go before KV."""
    weights: Weights = Weights()
    """Shares under fair queueing."""
    overhead: Annotated[int, Quantity(parse_size, format_size, SIZES)] = 0
    """Headers of each 1,448 bytes. 0: the rate is goodput. TCP over Ethernet: 52 B, 90 B with
    frames."""
    changes: Annotated[
        tuple[Change, ...],
        Field(strict=False, max_length=MAX_CHANGES),
        Allowed("a list of {at, rate, delay, loss}"),
    ] = ()
    """What becomes of it, when."""
    outages: Annotated[
        tuple[Outage, ...],
        Field(strict=False, max_length=MAX_CHANGES),
        Allowed("a list of {at, for}"),
    ] = ()
    """When nothing moves."""
