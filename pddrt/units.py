"""Quantities with units: text in, exact integers out, and back.

    rate       300 Mbit/s   300mbit   50 MB/s   1 GiB/s    -> int bytes per second
    duration   15 ms   5 us   2 min                        -> int nanoseconds
    size       50 KB   93 MB   1 GiB                       -> int bytes
    frequency  0.5/s   30/min                              -> float per second
    compute    989 TFLOPS   2 GFLOP/s                      -> int FLOP per second

Bits and kB, MB, GB count in thousands, KiB, MiB, GiB in 1,024s. A bare number is refused, because
it has no one meaning; 0 alone is taken, because it has the same in every unit. Arithmetic is
decimal and exact, rounded once (half to even); what would round to nothing is refused, since 0
means something else (an outage, no delay).

`Rate`, `Duration`, `PositiveSize` and so on are the pydantic field types of these. A parser raises
ValueError with what was found and what is allowed. A formatter gives text that parses back to the
same value or, with `digits`, a shorter one for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pddrt.types import MS, SECOND, US, Ns

LARGEST = 2**63 - 1
"""Largest value of any quantity, in its base unit: 63 bits (292 years, 8 EiB)."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)", re.ASCII | re.DOTALL)

_SCALE = {
    **{"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15},
    **{"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40},
}
# A lone b is bits and a lone B is bytes; prefixes and whole words may be written either way.
_SIZE_UNIT = re.compile(r"([kKmMgGtT]i?)?(?:B|(?i:bytes?))")
_RATE_UNIT = re.compile(r"([kKmMgGtT]i?)?(b|B|(?i:bits?|bytes?))(/s|ps)?")

_DURATIONS: dict[str, int] = {
    **{"ns": 1, "us": US, "µs": US, "μs": US, "ms": MS, "s": SECOND, "sec": SECOND},
    **{"min": 60 * SECOND, "h": 3600 * SECOND},
}
_PER = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}

RATES = "a rate such as 300 Mbit/s, 10 Gbit/s or 50 MB/s"
DURATIONS = "a time such as 15 ms, 5 us, 3 s or 2 min"
SIZES = "a size such as 50 KB, 93 MB or 1 GiB"
FREQUENCIES = "a frequency such as 0.5/s or 30/min"
COMPUTES = "a speed such as 989 TFLOPS or 50 GFLOPS"


def shown(value: object, limit: int = 48) -> str:
    """A value from a file as one short printable piece of text, for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, Mapping)):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = str(value)
    printable = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )
    if len(text) > limit:
        printable += "..."
    return f"'{printable}'" if isinstance(value, str) else printable


def _split(value: object, allowed: str) -> tuple[Fraction, str]:
    """Number and unit of a quantity. ValueError if it is none, negative or absurd."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == 0:
            return Fraction(0), ""
        raise ValueError(f"found {shown(value)}, a number without a unit; allowed: {allowed}")
    text = value.strip() if isinstance(value, str) and len(value) <= 64 else ""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"found {shown(value)}; allowed: {allowed}")
    mantissa, _, exponent = match[1].lower().partition("e")
    if exponent and abs(int(exponent)) > 30:
        raise ValueError(
            f"found {shown(value)}, which is out of all proportion; allowed: {allowed}"
        )
    number = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    if number < 0:
        raise ValueError(f"found {shown(value)}, which is negative; allowed: {allowed}")
    if not match[2] and number:
        raise ValueError(f"found {shown(value)}, a number without a unit; allowed: {allowed}")
    return number, match[2]


def _exact(value: object, number: Fraction, allowed: str) -> int:
    result = round(number)
    if number and not result:
        raise ValueError(
            f"found {shown(value)}, which is below the smallest step; allowed: {allowed}"
        )
    if result > LARGEST:
        raise ValueError(
            f"found {shown(value)}, which is out of all proportion; allowed: {allowed}"
        )
    return result


def parse_size(value: object) -> int:
    """Bytes in `1 GiB`, `50 KB`, ..."""
    number, unit = _split(value, SIZES)
    match = _SIZE_UNIT.fullmatch(unit)
    if unit and match is None:
        raise ValueError(f"found {shown(value)}, unit {shown(unit)} is unknown; allowed: {SIZES}")
    return _exact(value, number * _SCALE[(match[1] or "").lower()] if match else number, SIZES)


def parse_rate(value: object) -> int:
    """Bytes per second in `300 Mbit/s`, `300mbit`, `50 MB/s`, ..."""
    number, unit = _split(value, RATES)
    match = _RATE_UNIT.fullmatch(unit)
    if unit and (match is None or not (match[3] or match[2].lower().startswith("bit"))):
        raise ValueError(f"found {shown(value)}, unit {shown(unit)} is unknown; allowed: {RATES}")
    if match is None:
        return 0
    is_bit = match[2] == "b" or match[2].lower().startswith("bit")
    return _exact(value, number * _SCALE[(match[1] or "").lower()] / (8 if is_bit else 1), RATES)


def parse_duration(value: object) -> Ns:
    """Nanoseconds in `15 ms`, `2 min`, ..."""
    number, unit = _split(value, DURATIONS)
    factor = _DURATIONS.get(unit) if unit else 1
    if factor is None:
        raise ValueError(
            f"found {shown(value)}, unit {shown(unit)} is unknown; allowed: {DURATIONS}"
        )
    return _exact(value, number * factor, DURATIONS)


def parse_frequency(value: object) -> float:
    """Events per second in `0.5/s`, `30/min`, ...; above zero."""
    number, unit = _split(value, FREQUENCIES)
    period = _PER.get(unit.removeprefix("/").strip()) if unit.startswith("/") else None
    if number and period is None:
        raise ValueError(
            f"found {shown(value)}, unit {shown(unit)} is unknown; allowed: {FREQUENCIES}"
        )
    if not 1e-9 <= float(number) <= 1e9:
        raise ValueError(
            f"found {shown(value)}, which is no usable frequency; allowed: {FREQUENCIES}"
        )
    return float(number / (period or 1))


def parse_compute(value: object) -> int:
    """FLOP per second in `989 TFLOPS`, `2 GFLOP/s`, ..."""
    number, unit = _split(value, COMPUTES)
    match = re.fullmatch(r"([kmgtp]?)flop(?:s|/s)", unit.lower())
    if unit and match is None:
        raise ValueError(
            f"found {shown(value)}, unit {shown(unit)} is unknown; allowed: {COMPUTES}"
        )
    return _exact(value, number * (_SCALE[match[1]] if match else 1), COMPUTES)


def _decimal(numerator: int, denominator: int, digits: int | None) -> str:
    """numerator / denominator as a decimal: exact (those used here end), or to `digits` digits."""
    whole, rest = divmod(numerator, denominator)
    if digits is not None:
        places = max(0, digits - len(str(whole)))
        scaled = round(Fraction(numerator, denominator) * 10**places)
        whole, rest, denominator = scaled // 10**places, scaled % 10**places, 10**places
    text = ""
    while rest:
        digit, rest = divmod(rest * 10, denominator)
        text += str(digit)
    return f"{whole}.{text}" if text else str(whole)


def _largest(value: int, units: Mapping[str, Fraction | int], digits: int | None) -> str:
    """`value` in the largest unit that it reaches; `units` from large to small."""
    for unit, factor in units.items():
        if value >= factor:
            quotient = Fraction(value) / factor
            return f"{_decimal(quotient.numerator, quotient.denominator, digits)} {unit}"
    unit, factor = list(units.items())[-1]
    quotient = Fraction(value) / factor
    return f"{_decimal(quotient.numerator, quotient.denominator, digits)} {unit}"


def format_rate(bytes_per_s: int, digits: int | None = None) -> str:
    units = {"Tbit/s": 12, "Gbit/s": 9, "Mbit/s": 6, "kbit/s": 3, "bit/s": 0}
    return _largest(
        bytes_per_s, {unit: Fraction(10**power, 8) for unit, power in units.items()}, digits
    )


def format_duration(ns: Ns, digits: int | None = None) -> str:
    if not ns:
        return "0 s"
    if digits is None and ns and ns % (60 * SECOND) == 0:
        return f"{ns // (60 * SECOND)} min"
    return _largest(ns, {"s": SECOND, "ms": MS, "us": US, "ns": 1}, digits)


def format_size(size: int, digits: int | None = None) -> str:
    """Binary or decimal unit, whichever divides it; with `digits`, decimal."""
    if digits is not None:
        return _largest(size, {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}, digits)
    for power, binary, decimal in (
        (4, "TiB", "TB"),
        (3, "GiB", "GB"),
        (2, "MiB", "MB"),
        (1, "KiB", "kB"),
    ):
        for factor, unit in ((1024**power, binary), (1000**power, decimal)):
            if size and size % factor == 0:
                return f"{size // factor} {unit}"
    return f"{size} B"


def format_frequency(per_s: float) -> str:
    return f"{per_s!r}/s"


def format_compute(flops: int, digits: int | None = None) -> str:
    names = {"PFLOPS": 15, "TFLOPS": 12, "GFLOPS": 9, "MFLOPS": 6, "kFLOPS": 3, "FLOPS": 0}
    return _largest(flops, {unit: 10**power for unit, power in names.items()}, digits)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Pydantic marker of a field that is read by `parse` and written (to YAML) by `format`."""

    parse: Callable[[object], Any]
    format: Callable[[Any], str]
    allowed: str
    positive: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._check, serialization=core_schema.plain_serializer_function_ser_schema(self.format)
        )

    def _check(self, value: object) -> Any:
        result = self.parse(value)
        if self.positive and not result:
            raise ValueError(f"found {shown(value)}; allowed: {self.allowed}, above zero")
        return result


Rate = Annotated[int, Quantity(parse_rate, format_rate, RATES)]
PositiveRate = Annotated[int, Quantity(parse_rate, format_rate, RATES, positive=True)]
Duration = Annotated[int, Quantity(parse_duration, format_duration, DURATIONS)]
PositiveDuration = Annotated[
    int, Quantity(parse_duration, format_duration, DURATIONS, positive=True)
]
PositiveSize = Annotated[int, Quantity(parse_size, format_size, SIZES, positive=True)]
Frequency = Annotated[float, Quantity(parse_frequency, format_frequency, FREQUENCIES)]
Compute = Annotated[int, Quantity(parse_compute, format_compute, COMPUTES, positive=True)]


def many(count: int, what: str) -> str:
    """A number and what there are so many of."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
