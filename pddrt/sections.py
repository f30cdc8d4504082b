"""Sections: the models that a document is checked against, and everything wrong with it at once.

A scenario is `Section`s in `Section`s (pydantic: frozen, strict, no unknown fields). `check`
validates a `Document` and turns what pydantic finds into one line each, in our words:

    field.path: what was found; what is allowed

What is allowed comes from the models themselves: a `Literal` lists its values, a quantity its
units, any other field may carry `Allowed("...")`. `Later("...")` marks values that a coming version
will have. The members of a union carry a `Tag` in angle brackets, `<Name>`, which keeps pydantic's
own path and the user's apart.

`check` also says which parts it could not use (`Checked.usable`), so that checks across fields can
go on with the rest and do not complain of what is only missing because it was wrong.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from pddrt.document import Document, Keys, Problem
from pddrt.units import Quantity, shown

NOT_YET = "not available yet in this version"
MAX_PROBLEMS = 100
"""More than this many are not listed: such a file is no scenario."""


class Section(BaseModel):
    """A mapping of the document with known fields. `refused`: fields that it does not know, and why
    not.
    """

    refused: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Marker of a field: what its values may be, in words."""

    text: str

    @property
    def allowed(self) -> str:
        return self.text


class Later:
    """Marker of a `Literal` field: values that the contract names and this version does not have.

    To make one available, move it into the Literal.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        available = " | ".join(str(a) for a in typing.get_args(source))

        def refuse(value: object) -> object:
            if isinstance(value, str) and any(re.fullmatch(name, value) for name in self.names):
                raise ValueError(f"found {shown(value)}, {NOT_YET}; available: {available}")
            return value

        return core_schema.no_info_before_validator_function(refuse, handler(source))


Model = TypeVar("Model", bound=Section)


@dataclass(frozen=True, slots=True)
class Checked(Generic[Model]):
    """`model` is made of what was usable (None: not enough for one), without the `lost` parts."""

    model: Model | None
    problems: list[Problem]
    lost: frozenset[Keys]

    def usable(self, *keys: str) -> bool:
        """Whether nothing at `keys` ('*': any) was left out, by itself or with its parent."""
        return not any(
            len(lost) <= len(keys)
            and all(key in ("*", part) for key, part in zip(keys, lost, strict=False))
            for lost in self.lost
        )


@dataclass(frozen=True, slots=True)
class ByKey:
    """Marker of a union of sections: the one of `kinds` that `key` names is what a value is checked
    against; `unknown`, of which none is valid, complains of any other name, and of that alone.
    """

    key: str
    kinds: Mapping[str, type[Section]]
    unknown: type[Section]

    def _tag(self, value: Any) -> str:
        name = value.get(self.key) if isinstance(value, dict) else getattr(value, self.key, None)
        kind = self.kinds.get(name, self.unknown) if isinstance(name, str) else self.unknown
        return f"<{kind.__name__}>"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        unknown: Any = Annotated[self.unknown, Tag(f"<{self.unknown.__name__}>")]
        return handler.generate_schema(Annotated[source | unknown, Discriminator(self._tag)])


def check(
    document: Document, model: type[Model], *, later: Iterable[str] = (),
    stand_ins: Mapping[str, Any] | None = None,
) -> Checked[Model]:  # fmt: skip
    """Validates the document.

    `later`: paths of unknown fields which a later version will know. `stand_ins` replace required
    fields at the root which are wrong or missing, so that the rest can be checked.
    """
    data = deepcopy(document.data)
    problems: list[Problem] = []
    lost: set[Keys] = set()
    for keys in list(_nulls(data, ())):  # an optional field would take it, but nobody means it
        allowed = " or ".join(dict.fromkeys(map(describe, annotations_at(model, keys))))
        problems.append(Problem(keys, f"found nothing; allowed: {allowed or 'a value'}"))
        lost.add(_drop(data, keys, missing=False))
    told = {problem.keys for problem in problems}
    for attempt in range(8):
        try:
            return Checked(model.model_validate(data), problems, frozenset(lost))
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail, keys in [(detail, _keys(detail, data)) for detail in details]:
            if not attempt and len(problems) < MAX_PROBLEMS:
                # a list with a bad item is also called too short: once is enough
                if not any(reported[: len(keys)] == keys for reported in told):
                    problems.append(Problem(keys, _explain(detail, keys, model, later)))
                told.add(keys)
            dropped = _drop(data, keys, missing=detail["type"] == "missing")
            if detail["type"] != "extra_forbidden":
                lost.add(dropped)
        if not attempt and len(details) > MAX_PROBLEMS:
            problems.append(Problem((), f"{len(details)} problems; not all are listed"))
        for name, value in (stand_ins or {}).items():
            if (name,) in lost:
                data.setdefault(name, deepcopy(value))
    return Checked(None, problems, frozenset(lost))


def _keys(detail: ErrorDetails, data: Any) -> Keys:
    """pydantic's location without its own marks: <Tag> of a union's member, [key] of a bad key."""
    keys: list[str | int] = []
    for key in detail["loc"]:
        if _has(data, key) or str(key)[:1] + str(key)[-1:] not in ("<>", "[]"):
            keys.append(key)
            data = data[key] if _has(data, key) else None
    return tuple(keys)


def _drop(data: dict[str, Any], keys: Keys, *, missing: bool) -> Keys:
    """Takes a value out of the data, or its parent if it is missing or in a list; says which."""
    for end in range(len(keys) - missing, 0, -1):
        parent: Any = data
        for key in keys[: end - 1]:
            parent = parent[key] if _has(parent, key) else None
        if isinstance(parent, dict):
            parent.pop(keys[end - 1], None)
            return keys[:end]
    return keys


def _nulls(value: Any, keys: Keys) -> Iterator[Keys]:
    if value is None:
        yield keys
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from _nulls(inner, (*keys, key))


def _has(container: Any, key: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(key, int) and key < len(container)
    return isinstance(container, dict) and key in container


def _explain(detail: ErrorDetails, keys: Keys, model: type[Section], later: Iterable[str]) -> str:
    """What is wrong, in our words."""
    kind, found = detail["type"], detail["input"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        fields = [
            name for a in annotations_at(model, detail["loc"][:-1]) for name in _field_names(a)
        ]
        for section in annotations_at(model, detail["loc"][:-1]):
            if why := getattr(section, "refused", {}).get(keys[-1]):
                return f"found a field that cannot be had: {why}; allowed: {', '.join(fields)}"
        if ".".join(map(str, keys)) in later:
            return f"{NOT_YET}; allowed here: {', '.join(fields)}"
        return f"found an unknown field{_meant(keys[-1], fields)}; allowed: {', '.join(fields)}"
    annotations = annotations_at(model, detail["loc"])
    allowed = " or ".join(dict.fromkeys(map(describe, annotations))) or detail["msg"]
    if kind == "missing":
        return f"missing; needed: {allowed}"
    choices = [str(c) for a in annotations for c in _choices(a)]
    return f"found {shown(found)}{_meant(found, choices)}; allowed: {allowed}"


def _meant(found: object, choices: Iterable[str]) -> str:
    close = (
        difflib.get_close_matches(found, list(choices), 1)
        if isinstance(found, str) and len(found) < 64
        else []
    )
    return f", did you mean '{close[0]}'?" if close else ""


def unknown_name(found: str, known: Iterable[str]) -> str:
    """The text of a problem: `found` is none of `known`."""
    known = list(known)
    return f"found {shown(found)}{_meant(found, known)}; allowed: {', '.join(known)}"


# -- what the models say about themselves ----------------------------------------------------------


def annotations_at(model: type[Section], loc: Iterable[str | int]) -> list[Any]:
    """The annotations of what stands at a location (as pydantic gives it) in a model."""
    found: list[Any] = [model]
    for key in loc:
        found = [inner for annotation in found for inner in _step(annotation, key)]
    return found


def _step(annotation: Any, key: str | int) -> Iterator[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _step(args[0], key)
    elif origin in (Union, types.UnionType):
        tagged = [a for a in args if Tag(str(key)) in getattr(a, "__metadata__", ())]
        if tagged or str(key).startswith("<"):
            yield from tagged or [annotation]  # a mark of no declared member: any of them
        else:
            for member in args:
                yield from _step(member, key)
    elif origin is dict:
        yield args[0 if key == "[key]" else 1]
    elif origin in (tuple, list):
        yield args[0]
    elif _is_section(annotation) and key in (names := _written(annotation)):
        yield _hints(annotation)[names[str(key)]]


def describe(annotation: Any) -> str:
    """What a field's values may be, in words: a marker's `allowed` where there is one."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for mark in annotation.__metadata__:
            if isinstance(mark, (Allowed, Quantity)):
                return mark.allowed
        return describe(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(a) for a in args if a is not type(None)))
    if _is_section(annotation):
        return f"a mapping of {', '.join(_written(annotation))}"
    if origin is dict:
        return f"a mapping of names to {describe(args[1])}"
    if origin in (tuple, list):
        return "a list"
    return {int: "a whole number", float: "a number", str: "text"}.get(annotation, "a value")


def _choices(annotation: Any) -> tuple[Any, ...]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _choices(args[0])
    return args if origin is Literal else ()


def _field_names(annotation: Any) -> list[str]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _field_names(args[0])
    if origin in (Union, types.UnionType):
        return [name for member in args for name in _field_names(member)]
    return list(_written(annotation)) if _is_section(annotation) else []


def _written(section: type[Section]) -> dict[str, str]:
    """Its fields, by their names in the document: some of these cannot be names in Python."""
    return {field.alias or name: name for name, field in section.model_fields.items()}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


@functools.cache
def _hints(section: type[Section]) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)
