"""What a comparison must come to: `--assert 'pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90'`. Pure.

The language is that of `expression`. A name is a column, a dot, and where a number stands: in the
column's summary (as in summary.json, means over its seeds), else in its entry in compare.json
(`naive.ratios.ttft_s.p90`, `naive.intervals.ratio.ttft_s.p90.low`, `naive.pairs.ttft.faster`). A
column is called by its name, in backquotes where that is no plain word (`mode=catch-up`), or by its
label (mode_catch_up), or by its place (c1 is the baseline).

Columns are checked before anything runs, paths when there are summaries. A number that is missing
makes a condition false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pddrt.errors import BadInput
from pddrt.expression import Value, nearest, parse
from pddrt.trace import Seconds
from pddrt.types import SECOND
from pddrt.units import shown

Trees = Mapping[str, Mapping[str, Any]]
"""What is known of each column, by every name that it has."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`said`: the condition with the values that were found."""

    text: str
    holds: bool
    said: str


class Assertion:
    def __init__(self, text: str, columns: Sequence[str], option: str = "--assert") -> None:
        """`columns`: every name of every column; `option`: where it comes from, for messages.
        Raises BadInput for what is no expression, and for columns that are not there.
        """
        self.text = text
        self._option = option
        try:
            self._expression = parse(text)
        except BadInput as error:
            raise BadInput([f"{option} {problem}" for problem in error.problems]) from None
        self._columns = tuple(dict.fromkeys(columns))
        for name in self._expression.names:
            if self._split(name) is None:
                raise BadInput(
                    f"{option} {shown(text, 200)}: {shown(name)} is of no column; allowed: "
                    f"COLUMN.PATH, with a column of {', '.join(self._columns)}"
                )

    def _split(self, name: str) -> tuple[str, str] | None:
        """Column and path; the longest name of a column that fits."""
        fitting = [c for c in self._columns if name.startswith(f"{c}.")]
        if not fitting:
            return None
        column = max(fitting, key=len)
        return column, name[len(column) + 1 :]

    def judge(self, trees: Trees) -> Verdict:
        """Raises BadInput for a path that leads nowhere, and for what is no condition."""

        def lookup(name: str) -> Value:
            place = self._split(name)
            if place is None or place[0] not in trees:
                raise KeyError(name)
            return value_at(trees[place[0]], place[1])

        for name in self._expression.names:
            try:
                lookup(name)
            except KeyError:
                column, path = self._split(name) or ("", "")
                near = ", ".join(nearest(path, paths_in(trees.get(column, {}))))
                text = shown(self.text, 200)
                raise BadInput(
                    f"{self._option} {text}: {shown(name)} is no number of a column"
                    + (f"; nearest: {near}" if near else "")
                ) from None
        try:
            holds = self._expression.bound(_Known(lookup)).holds(lookup)
        except BadInput as error:
            raise BadInput([f"{self._option} {problem}" for problem in error.problems]) from None
        values = {name: lookup(name) for name in self._expression.names}
        return Verdict(self.text, holds, self._said(values, lookup))

    def _said(self, values: Mapping[str, Value], lookup: Any) -> str:
        parts = [f"{name} = {_shown(value)}" for name, value in values.items()]
        for side in _sides(self.text):
            try:
                expression = parse(side)
                value = expression.value(lookup)
            except BadInput:
                continue
            if expression.names and side.replace("`", "") not in values:
                parts.append(f"{side} = {_shown(value)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Known:
    lookup: Any

    def __contains__(self, name: object) -> bool:
        try:
            self.lookup(name)
        except KeyError:
            return False
        return True


def _sides(text: str) -> list[str]:
    """Both sides of a plain comparison; none where it is more than one."""
    sides = re.split(r"(?<![<>=!])(?:<=|>=|==|!=|<|>|=)(?!=)", text)
    return [side.strip() for side in sides] if len(sides) == 2 else []


def value_at(tree: Any, path: str) -> Value:
    """Raises KeyError where nothing stands there, or something that is no single value. A key may
    hold dots itself (a link's name): the longest that fits is taken.
    """
    if not path:
        if isinstance(tree, Seconds):
            return tree.ns / SECOND
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        raise KeyError(path)
    if not isinstance(tree, Mapping):
        raise KeyError(path)
    fitting = [key for key in tree if path == key or path.startswith(f"{key}.")]
    if not fitting:
        raise KeyError(path)
    key = max(fitting, key=len)
    return value_at(tree[key], path[len(key) + 1 :])


def paths_in(tree: Any, above: str = "") -> Iterator[str]:
    """Every path that leads to a single value."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        here = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from paths_in(value, here)
        elif value is None or isinstance(value, (bool, int, float, str, Seconds)):
            yield here


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "missing" if value is None else str(value)
