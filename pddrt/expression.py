"""A small language of conditions over named values: `inspect --where`, `compare --assert`. Pure.

    ttft_s > 2 s and pipeline = p-rld-md
    not (handoff.gap_s <= 50 ms) or finish_reason ~ 'abort|reject'
    pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90

**Numbers** may have a unit, of those in `units`, and count as the files do: seconds, bytes, bytes a
second; `90 %` is 0.9. **Names** hold letters, digits and `_`, and between them `.`, `-` or `:`, so
`p-rld-md` is one name, and a difference needs blanks: `a - b`. A part of a name with anything else
in it stands in backquotes. **Texts** stand in quotes. A bare word that is no field is a text, too,
but only where it is compared with a field by `=`, `!=`, `~` or `!~`; anywhere else it is a mistake,
and the error names what comes nearest. Texts are equal whatever their case; `~` searches for a
regular expression, whatever the case.

**Missing** values (null in a file, or `none` here) make every comparison false, `!=` as well, but
for those with `none` itself: `handoff.ids = none` asks whether it is missing. Arithmetic on what is
missing, or by zero, is missing. A condition is true or false; a number alone is none.

What is wrong is BadInput, with the column. `grammar` says what binds how strongly.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from pddrt.errors import BadInput
from pddrt.grammar import Node, tree, wrong
from pddrt.grammar import Value as Value
from pddrt.units import shown

Lookup = Callable[[str], Value]
"""The value of a name; raises KeyError where it is none."""

_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Expression:
    """What `parse` makes. `names`: every name in it, in order; some may turn out to be texts."""

    text: str
    names: tuple[str, ...]
    _root: Node

    def bound(self, known: Container[str]) -> Bound:
        """Ready to be asked, often. `known`: the fields there are, by what `in` says; where they
        can be listed, an error names the nearest. Raises BadInput for what is none of them.
        """
        return _Binding(self.text, known).bound(self._root)

    def value(self, lookup: Lookup) -> Value:
        """Of all of it, once. Raises BadInput where a name is not known."""
        return self.bound(_Asked(lookup)).value(lookup)


@dataclass(frozen=True, slots=True)
class Bound:
    """An expression whose names are known. `names`: the fields that it looks up."""

    text: str
    names: tuple[str, ...]
    value: Callable[[Lookup], Value]

    def holds(self, lookup: Lookup) -> bool:
        """Whether it is true. Raises BadInput where it is no condition."""
        found = self.value(lookup)
        if found is not None and not isinstance(found, bool):
            raise BadInput(
                f"{shown(self.text)} comes to {shown(found)}; allowed: a condition, such as "
                f"{self.text.strip()[:40]} > 0"
            )
        return bool(found)


class _Asked:
    """A lookup as a container: what it does not raise KeyError for is known."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def __contains__(self, name: object) -> bool:
        try:
            self._lookup(str(name))
        except KeyError:
            return False
        return True


def parse(text: str) -> Expression:
    """Raises BadInput, with the column, for what is no expression."""
    root, names = tree(text)
    return Expression(text, names, root)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most four of `known` that may have been meant by `name`, the likeliest first."""
    last = name.rpartition(".")[2].lower()
    names = list(known)
    ends = [k for k in names if k.lower().rpartition(".")[2] == last]
    begins = [k for k in names if k.lower().startswith(f"{name.lower()}.")]
    close = get_close_matches(name, names, 4, 0.5)
    return list(dict.fromkeys([*ends, *begins, *close]))[:4]


# -- a tree to a function --------------------------------------------------------------------------

_Ask = Callable[[Lookup], Value]


class _Binding:
    def __init__(self, text: str, known: Container[str]) -> None:
        self._text = text
        self._known = known
        self._names: dict[str, None] = {}

    def bound(self, root: Node) -> Bound:
        ask = self._ask(root)
        return Bound(self._text, tuple(self._names), ask)

    def _ask(self, node: Node) -> _Ask:
        match node.op:
            case "value" | "word":
                value = node.value
                return lambda _lookup: value
            case "name":
                return self._field(node)
            case "and" | "or":
                return self._joined(node)
            case "not":
                inner = self._condition(node.parts[0])
                return lambda lookup: not inner(lookup)
            case "sign":
                return self._signed(node)
            case "+" | "-" | "*" | "/":
                return self._arithmetic(node)
            case "=" | "==" | "!=":
                return self._equal(node)
            case "~" | "!~":
                return self._search(node)
            case _:
                return self._ordered(node)

    def _field(self, node: Node) -> _Ask:
        name = str(node.value)
        if name not in self._known:
            self._unknown(node)
        self._names[name] = None
        return lambda lookup: lookup(name)

    def _unknown(self, node: Node) -> NoReturn:
        name = str(node.value)
        listed = list(self._known) if isinstance(self._known, Iterable) else []
        first, dash, second = name.partition("-")
        if dash and first in self._known and second in self._known:
            hint = f"for a difference write '{first} - {second}'"
        elif near := nearest(name, listed):
            hint = f"nearest: {', '.join(near)}"
        else:
            hint = f"allowed: {', '.join(listed)}" if listed else "it has no such name"
        wrong(self._text, node.column, f"found {shown(name)}, which is no field; {hint}")

    def _condition(self, node: Node) -> Callable[[Lookup], bool]:
        ask = self._ask(node)

        def holds(lookup: Lookup) -> bool:
            found = ask(lookup)
            if found is None or isinstance(found, bool):
                return bool(found)
            wrong(self._text, node.column, f"found {shown(found)}; expected a condition")

        return holds

    def _joined(self, node: Node) -> _Ask:
        left, right = map(self._condition, node.parts)
        if node.op == "and":
            return lambda lookup: left(lookup) and right(lookup)
        return lambda lookup: left(lookup) or right(lookup)

    def _number(self, node: Node) -> Callable[[Lookup], float | None]:
        ask = self._ask(node)

        def number(lookup: Lookup) -> float | None:
            found = ask(lookup)
            if isinstance(found, str):
                wrong(self._text, node.column, f"found the text {shown(found)}; expected a number")
            return found

        return number

    def _signed(self, node: Node) -> _Ask:
        inner = self._number(node.parts[0])
        return lambda lookup: None if (found := inner(lookup)) is None else -found

    def _arithmetic(self, node: Node) -> _Ask:
        left, right = map(self._number, node.parts)
        apply = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
        operate: Callable[[float, float], float] = apply[node.op]

        def compute(lookup: Lookup) -> Value:
            a, b = left(lookup), right(lookup)
            if a is None or b is None:
                return None
            try:
                return operate(a, b)
            except (ZeroDivisionError, OverflowError):
                return None

        return compute

    def _ordered(self, node: Node) -> _Ask:
        left, right = map(self._number, node.parts)
        compare = _ORDER[node.op]

        def ordered(lookup: Lookup) -> bool:
            a, b = left(lookup), right(lookup)
            return a is not None and b is not None and compare(a, b)

        return ordered

    def _sides(self, node: Node) -> tuple[Node, Node]:
        """With a bare word that is no field, beside something that is one, as a text."""
        left, right = node.parts
        strange = [self._strange(side) for side in (left, right)]
        if strange == [False, True]:
            return left, Node("word", right.column, right.value)
        if strange == [True, False] and right.op != "value":
            return Node("word", left.column, left.value), right
        return left, right

    def _strange(self, node: Node) -> bool:
        return node.op == "name" and node.value not in self._known

    def _equal(self, node: Node) -> _Ask:
        sides = self._sides(node)
        if any(side.op == "value" and side.value is None for side in sides):
            return self._missing(sides, node.op != "!=")
        left, right = map(self._ask, sides)
        wanted = node.op != "!="

        def equal(lookup: Lookup) -> bool:
            a, b = left(lookup), right(lookup)
            if a is None or b is None:
                return False
            if isinstance(a, str) and isinstance(b, str):
                return (a.casefold() == b.casefold()) is wanted
            if isinstance(a, str) or isinstance(b, str):
                self._unlike(sides, a, b)
            return (a == b) is wanted

        return equal

    def _missing(self, sides: tuple[Node, Node], wanted: bool) -> _Ask:
        left, right = map(self._ask, sides)
        return lambda lookup: (left(lookup) is None and right(lookup) is None) is wanted

    def _unlike(self, sides: tuple[Node, Node], *values: Value) -> NoReturn:
        """A number against a text: a word that was meant to be a field, or a plain mistake."""
        for side in sides:
            if side.op == "word":
                self._unknown(side)
        told = " with ".join(
            f"the text {shown(v)}" if isinstance(v, str) else f"the number {shown(v)}"
            for v in values
        )
        wrong(self._text, sides[1].column, f"compares {told}")

    def _search(self, node: Node) -> _Ask:
        left, right = self._sides(node)
        if self._strange(left):
            self._unknown(left)
        if right.op not in ("value", "word") or not isinstance(right.value, str):
            wrong(self._text, right.column, "expected a text to search for")
        try:
            pattern = re.compile(right.value, re.IGNORECASE)
        except (re.error, OverflowError, RecursionError) as error:
            why = f"found {shown(right.value)}, which is no regular expression: {error}"
            wrong(self._text, right.column, why)
        ask, wanted = self._ask(left), node.op == "~"

        def search(lookup: Lookup) -> bool:
            found = ask(lookup)
            if found is None:
                return False
            if not isinstance(found, str):
                wrong(self._text, left.column, f"found {shown(found)}; expected a text")
            return (pattern.search(found) is not None) is wanted

        return search
