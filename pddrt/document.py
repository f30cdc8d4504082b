"""YAML documents that know their lines.

A `Document` is the plain data of one YAML file, with the line of every key and item, so that
whatever is found wrong later can say where. Overrides (`--set a.b=value`) are laid over it before
validation; what they put there is named by its option instead of a line. What is wrong with the
text itself but leaves the rest usable (a duplicate key) is kept as a `Problem`, to be reported
together with what validation finds (see `sections`).

Stricter than PyYAML: duplicate keys are problems (PyYAML silently keeps the last), only true and
false are booleans (so a site may be called `no`, and `drc: on` is a word), dates and sexagesimal
numbers stay text. Size, depth, length and the expansion of aliases are bounded: no input hangs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pddrt.errors import BadInput
from pddrt.units import shown

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 50_000

Keys = tuple[str | int, ...]
"""Where a value stands: keys and list indexes from the root."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Problem:
    """`place` is set where it is not that of `keys`."""

    keys: Keys
    text: str
    place: int | str | None = None


@dataclass(slots=True)
class Document:
    """`data` is dicts, lists, str, int, float, bool and None.

    `places` has the line of each value, or the option that set it.
    """

    file: str
    data: dict[str, Any]
    places: dict[Keys, int | str]
    problems: list[Problem] = field(default_factory=list)

    def place(self, keys: Keys) -> int | str:
        """Of a value, or of the nearest part around it where it is absent."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.places:
                return self.places[keys[:end]]
        return 1

    def where(self, keys: Keys) -> str:
        """FILE:LINE of a value, or the option that set it."""
        place = self.place(keys)
        return f"{self.file}:{place}" if isinstance(place, int) else place

    def lines(self, problems: Iterable[Problem]) -> list[str]:
        """The problems as they are shown: by line, then those of options."""

        def order(problem: Problem) -> tuple[bool, int, str]:
            place = problem.place or self.place(problem.keys)
            return (True, 0, place) if isinstance(place, str) else (False, place, "")

        return list(dict.fromkeys(map(self._line, sorted(problems, key=order))))

    def _line(self, problem: Problem) -> str:
        place = problem.place or self.place(problem.keys)
        where = place if isinstance(place, str) else f"{self.file}:{place}"
        keys = (str(key) for key in problem.keys)
        path = ".".join(key if re.fullmatch(r"[\w-]{1,64}", key) else shown(key) for key in keys)
        return f"{where}: {path + ': ' if path else ''}{problem.text}"

    def override(self, spec: str, flag: str = "--set") -> None:
        """Lays `a.b=value` (value in YAML) over the data, said to come from the option `flag`.

        Raises BadInput where it does not fit.
        """
        path, equals, text = spec.partition("=")
        path = path.strip()
        keys: Keys = tuple(
            int(k) if k.isascii() and k.isdigit() and len(k) < 6 else k for k in path.split(".")
        )
        if not equals or not all(re.fullmatch(r"[\w-]+", str(k)) for k in keys):
            raise BadInput(
                f"{flag} {shown(spec)}: write it as a.b=value, as in {flag} links.wan.delay='30 ms'"
            )
        option = f"{flag} {path}"
        value, _, problems = _parse(text, option, numbered=False)
        self.problems += (Problem(keys, problem.text, option) for problem in problems)
        self.put(keys, value, option)

    def put(self, keys: Keys, value: Any, option: str) -> None:
        """Sets one value, said to come from `option`; makes the sections on the way.

        Raises BadInput where the way leads through a plain value or past the end of a list.
        """
        target: Any = self.data
        for depth, key in enumerate(keys):
            inside = ".".join(map(str, keys[:depth]))
            if isinstance(target, dict):
                key = str(key)
                known = key in target and target[key] is not None
            elif isinstance(target, list):
                if not isinstance(key, int) or key >= len(target):
                    raise BadInput(
                        f"{option}: {inside} is a list of {len(target)}; found no item {shown(key)}"
                    )
                known = True
            else:
                raise BadInput(
                    f"{option}: {inside} is {shown(target)}, with nothing inside it to set"
                )
            here = (*keys[:depth], key)
            if depth == len(keys) - 1:
                target[key] = value
                for old in [k for k in self.places if k[: len(here)] == here]:
                    del self.places[old]
                self.places[here] = option
                return
            if not known:
                target[key] = {}
                self.places[here] = option
            target = target[key]


def read(path: str | Path) -> Document:
    """The document in a file. Raises BadInput if it cannot be read or is no YAML mapping."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{shown_path(path)}: cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise BadInput(f"{shown_path(path)}: is larger than the {MAX_BYTES >> 20} MiB allowed")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown_path(path)}: is not text in UTF-8 (byte {error.start})") from None
    return parse(text, shown_path(path))


def shown_path(path: str | Path) -> str:
    return shown(str(path), limit=4096)[1:-1]


def parse(text: str, file: str) -> Document:
    """The document in `text`. Raises BadInput if it is no YAML mapping."""
    data, places, problems = _parse(text, file)
    if data is None:
        raise BadInput(f"{file}: is empty; allowed: a YAML mapping of fields to values")
    if not isinstance(data, dict):
        raise BadInput(
            f"{file}:1: found {shown(data)}; allowed: a YAML mapping of fields to values"
        )
    return Document(file, data, places, problems)


def _parse(
    text: str, file: str, *, numbered: bool = True
) -> tuple[Any, dict[Keys, int | str], list[Problem]]:
    """Data, places and problems of one YAML text; `numbered`: say the line in errors."""

    def at(mark: Any) -> str:
        return f"{file}:{mark.line + 1}" if mark is not None and numbered else file

    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or count > MAX_VALUES:
                place = at(event.start_mark)
                raise BadInput(f"{place}: is nested too deeply or too long to be a scenario")
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        place = at(error.problem_mark or error.context_mark)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"{place}: is not YAML: {shown(what, 120)[1:-1]}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise BadInput(f"{file}: is not YAML: {shown(str(error), 120)[1:-1]}") from None
    walk = _Walk(at)
    data = None if node is None else walk.value(node, ())
    return data, walk.places, walk.problems


class _Walk:
    """From YAML nodes to plain data, with places."""

    def __init__(self, at: Callable[[Any], str]) -> None:
        self.places: dict[Keys, int | str] = {}
        self.problems: list[Problem] = []
        self._at = at
        self._values = 0
        self._construct = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or len(keys) > MAX_DEPTH:
            place = self._at(node.start_mark)
            raise BadInput(f"{place}: its aliases (*name) expand to far too much")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, keys)
        if isinstance(node, yaml.SequenceNode):
            return [self._put(item, (*keys, i), item) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, keys)

    def _put(self, key: yaml.Node, keys: Keys, value: yaml.Node) -> Any:
        self.places[keys] = _line(key)
        return self.value(value, keys)

    def _complain(self, node: yaml.Node, keys: Keys, text: str) -> None:
        self.problems.append(Problem(keys, text, _line(node)))

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif not isinstance(key, yaml.ScalarNode):
                self._complain(key, keys, "found a list or mapping as a key; allowed: a word")
            elif key.value in data:
                first = self.places[*keys, key.value]
                text = f"found a second time (first in line {first}); allowed: once"
                self._complain(key, (*keys, key.value), text)
            else:
                data[key.value] = self._put(key, (*keys, key.value), value)
        for source in merged:  # what is written out wins, then the earlier source
            if not isinstance(source, yaml.MappingNode):
                self._complain(source, keys, "found << of no mapping; allowed: << : *name of one")
                continue
            for key, value in source.value:
                if isinstance(key, yaml.ScalarNode) and key.value not in data:
                    data[key.value] = self._put(key, (*keys, key.value), value)
        return data

    def _scalar(self, node: yaml.ScalarNode, keys: Keys) -> Any:
        text, tag = str(node.value), str(node.tag).removeprefix(_TAG)
        if tag == "null":
            return None
        if tag == "bool":
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            if tag == "int":
                return text if ":" in text else self._construct.construct_yaml_int(node)
            if tag == "float":
                return text if ":" in text else self._construct.construct_yaml_float(node)
        except ValueError:  # out of all proportion: whoever wants a number will refuse it
            return text
        if tag not in ("str", "timestamp"):
            self._complain(node, keys, f"found the YAML tag {shown(tag)}; allowed: plain values")
        return text


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
