"""What a comparison or a sweep varies: fields and their values, as they are written in an option.

    v1,v2,v3                 a list; commas inside brackets or quotes do not part values
    (50,100,200) Mbit/s      what follows the brackets goes to each
    50..400:50 Mbit/s        from 50 to 400 in steps of 50
    1..64:x2 /s              from 1 to 64, each twice the one before

Any item of a list may be a range. Values stay text: the scenario reads them, units and all. Steps
are exact decimals, so that the same range is the same text everywhere. Pure.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pddrt import units
from pddrt.errors import BadInput
from pddrt.units import shown

POLICY = "pipeline.policy"
MAX_VALUES = 1000
"""Of one axis."""
MAX_DIGITS = 1000
"""After the point, of a value in a range: a factor adds its own with every step."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_RANGE = re.compile(rf"{_NUMBER}\s*\.\.\s*{_NUMBER}\s*:\s*(x?){_NUMBER}\s*(.*)", re.DOTALL)
_NUMBERISH = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf(?:inity)?|nan)"
_LIKE_A_RANGE = re.compile(
    rf"(?P<start>{_NUMBERISH}(?P<unit>\s*[^\W\d][^.]*)?)?\s*\.\.\s*(?P<stop>{_NUMBERISH})?(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_LISTED = re.compile(r"\((.*)\)\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Axis:
    """`option`: where it was written, for messages; `path`: the field; `values`: as text."""

    option: str
    path: str
    values: tuple[str, ...]

    @property
    def is_policy(self) -> bool:
        return self.path == POLICY


def axes(policies: str | None, vary: Sequence[str]) -> list[Axis]:
    """`policies`: `a,b`, the first axis. `vary`: `path=values` each. Raises BadInput."""
    given = [("--policies", POLICY, policies)] if policies is not None else []
    for spec in vary:
        path, equals, text = spec.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--vary {shown(spec)}: write it as a.b=v1,v2")
        given.append(("--vary", path.strip(), text))
    found: dict[str, Axis] = {}
    for option, path, text in given:
        if path in found:
            raise BadInput(f"{option}: found {path} a second time; allowed: once")
        found[path] = Axis(option, path, tuple(values(text, option)))
    return list(found.values())


def values(text: str, option: str = "--vary") -> list[str]:
    """The values that a list stands for. Raises BadInput for a hole, or a range that is none."""
    items = [v for item in _split(text, option) for v in _expanded(item, option)]
    if not all(items):
        raise BadInput(f"{option} {shown(text)}: found no value where a comma calls for one")
    if len(items) > MAX_VALUES:
        raise BadInput(
            f"{option} {shown(text)}: found {len(items)} values; allowed: {MAX_VALUES} at most"
        )
    return items


def _split(text: str, option: str) -> Iterator[str]:
    """What stands between commas, but not between those inside brackets or quotes. Raises BadInput
    where one of those is not closed.
    """
    depth, quote, value = 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not value.strip():
            quote = char
        elif char == "(":  # in the middle of a text it parts nothing
            depth += bool(depth) or not value.strip()
        else:
            depth += (char in "[{") - (char in "]})" and depth > 0)
        if char == "," and depth <= 0 and not quote:
            yield value.strip()
            value = ""
        else:
            value += char
    if quote or depth > 0:
        what = f"a quote {quote}" if quote else "a bracket"
        raise BadInput(f"{option} {shown(text)}: found {what} that is not closed")
    yield value.strip()


def _expanded(item: str, option: str) -> Iterator[str]:
    """The values of one item: a range, a list with a unit, or itself."""
    if listed := _LISTED.fullmatch(item):
        for value in _split(listed[1], option):
            yield _with_unit(value, listed[2]) if value else ""
    elif ranged := _RANGE.fullmatch(item):
        start, stop, factor, step, unit = ranged.groups()
        where = f"{option} {shown(item)}"
        for number in _steps(Fraction(start), Fraction(stop), bool(factor), Fraction(step), where):
            yield _with_unit(_decimal(number, where), unit.strip())
    elif wrong := _no_range(item):
        raise BadInput(f"{option} {shown(item)}: found {wrong}; {_ALLOWED}")
    else:
        yield item


_ALLOWED = (
    "allowed: FROM..TO:STEP as in 50..400:50 Mbit/s, or FROM..TO:xFACTOR as in 1..64:x2 /s, "
    "with plain numbers and the unit once, at the end"
)


def _no_range(item: str) -> str:
    """What keeps an item that looks like a range from being one; "" for any other text."""
    like = _LIKE_A_RANGE.fullmatch(item)
    if like is None or not (like["start"] or like["stop"]):
        return ""
    ends = [text for text in (like["start"], like["stop"]) if text]
    if any(re.match(r"[+-]?(inf|nan)", text, re.IGNORECASE) for text in ends):
        return "a range without an end: FROM and TO are finite"
    if any(text[0] in "+-" for text in ends):
        return "a range with a sign"
    if not like["start"]:
        return "a range with nothing before its dots"
    if like["unit"]:
        return "a range with a unit before its dots"
    if not like["stop"]:
        return "a range with no number after its dots"
    if any("e" in text.lower() for text in ends):
        return "a range with an exponent"
    step = re.match(r"[^:]*:\s*x?\s*(.*)", like["rest"], re.DOTALL)
    if step is None:
        return "a range without a step"
    if not re.match(r"\d", step[1]):
        return "a range whose step is no positive number"
    return "a range that cannot be read"


def _steps(
    start: Fraction, stop: Fraction, multiplies: bool, step: Fraction, where: str
) -> Iterator[Fraction]:
    grows = start > 0 and step > 1 if multiplies else step > 0
    if stop < start or not grows:
        raise BadInput(f"{where}: found a range that does not grow; {_ALLOWED}")
    if multiplies:  # counted before any is made: exact powers are long
        many = _log(stop / start) > MAX_VALUES * _log(step)
    else:
        many = (stop - start) / step >= MAX_VALUES
    if many:
        raise BadInput(f"{where}: found a range of more than {MAX_VALUES} values")
    at = start
    while at <= stop:
        yield at
        at = at * step if multiplies else at + step


def _log(number: Fraction) -> float:
    """Of a number from 1, also of one just above it, and of one that no double holds."""
    if number < 2:
        return math.log1p(float(number - 1))
    return math.log(number.numerator) - math.log(number.denominator)


def _decimal(number: Fraction, where: str) -> str:
    """Exact: sums and products of decimals end. Raises BadInput where that takes too long."""
    digits, denominator = 0, number.denominator
    for prime in (2, 5):
        times = 0
        while denominator % prime == 0 and times <= MAX_DIGITS:
            denominator //= prime
            times += 1
        digits = max(digits, times)
    if digits > MAX_DIGITS:
        raise BadInput(
            f"{where}: found values of more than {MAX_DIGITS} digits; allowed: a rounder factor"
        )
    whole = f"{int(number * 10**digits):0{digits + 1}d}"
    return f"{whole[:-digits]}.{whole[-digits:]}" if digits else whole


def _with_unit(number: str, unit: str) -> str:
    return f"{number}{'' if not unit or unit[0] in '/%' else ' '}{unit}"


# -- what settings are called ----------------------------------------------------------------------


def names(axes: Sequence[Axis], settings: Iterable[Sequence[str]]) -> list[str]:
    """A policy is called by its name, any other value by its field and itself; all distinct."""
    shorts = [axis.path.rpartition(".")[2] for axis in axes]
    often = Counter(shorts)
    marks = [
        "" if axis.is_policy else f"{short if often[short] == 1 else axis.path}="
        for axis, short in zip(axes, shorts, strict=True)
    ]
    return distinct(
        " ".join(mark + value for mark, value in zip(marks, values, strict=True))
        for values in settings
    )


def labels(names: Iterable[str]) -> list[str]:
    """The names as single words that an expression can hold: `mode=catch-up` is mode_catch_up."""
    words = (re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") for name in names)
    return distinct((f"_{w}" if w[:1].isdigit() or not w else w for w in words), "_")


def folders(names: Iterable[str]) -> list[str]:
    """The names as names of folders."""
    return distinct(re.sub(r"[^A-Za-z0-9._=-]+", "-", n).strip("-.")[:100] for n in names)


def distinct(names: Iterable[str], mark: str = "-") -> list[str]:
    """Namesakes get numbers."""
    taken: dict[str, None] = {}
    for name in names:
        number, free = 2, name
        while free in taken:
            number, free = number + 1, f"{name}{mark}{number}"
        taken[free] = None
    return list(taken)


# -- values as numbers -----------------------------------------------------------------------------

_READERS: tuple[Callable[[str], float], ...] = (
    float,
    units.parse_rate,
    units.parse_duration,
    units.parse_size,
    units.parse_frequency,
    units.parse_compute,
)


def numeric(values: Sequence[str]) -> list[float] | None:
    """The values in one base unit, to place them on an axis; None where they are not all of one
    kind.
    """
    for read in _READERS:
        try:
            found = [float(read(value)) for value in values]
        except (ValueError, BadInput):
            continue
        if all(abs(number) < 1e30 for number in found):
            return found
    return None
