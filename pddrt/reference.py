"""The fields of a scenario, told from the models themselves: as tables, and as a JSON schema.

    markdown(examples)   docs/scenario.md: meaning, what is allowed, default, an example
    json_schema()        docs/scenario.schema.json, for editors

What a field means is the docstring below it in `fields`, `workload_fields`, `faults` or `scenario`;
what it may hold is what its annotation says. A schema cannot say everything that `scenario` checks
(names that must be there, parts that must fit each other): what it refuses is wrong, and what it
takes may still be.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pddrt.scenario import Scenario
from pddrt.sections import Section, describe
from pddrt.units import Quantity

Schema = dict[str, Any]
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Entry:
    """A field. `default` is None where it must be given, '' where it may be absent."""

    name: str
    annotation: Any
    meaning: str
    default: Any
    needed: bool

    @property
    def allowed(self) -> str:
        return describe(self.annotation)


def entries(section: type[Section]) -> Iterator[Entry]:
    """The fields of a section, in order, by the names that they have in a file."""
    hints = typing.get_type_hints(section, include_extras=True)
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        needed = field.is_required()
        default = None if needed else field.get_default(call_default_factory=True)
        yield Entry(field.alias or name, hints[name], meanings.get(name, ""), default, needed)


@functools.cache
def _meanings(section: type[Section]) -> dict[str, str]:
    """The docstrings below its fields, with those that it inherits."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section) and base is not Section:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, below in zip(body.body, body.body[1:], strict=False):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        found[name] = " ".join(text.split())
    return found


def told(section: type[Section]) -> str:
    """What its own docstring says, on one line."""
    return " ".join((vars(section).get("__doc__") or "").split())


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """One section. `path`: where it stands in a file, NAME for any name, [] for any entry; `kind`:
    the name by which it is chosen among others that may stand there."""

    path: str
    kind: str
    text: str
    rows: Sequence[tuple[str, Entry]]


def tables() -> Iterator[Table]:
    """All sections of a scenario, depth first."""
    yield from _tables(Scenario, "", "", set())


def _tables(
    section: type[Section], path: str, kind: str, seen: set[Any], shared: Collection[str] = ()
) -> Iterator[Table]:
    """`shared`: fields that a table before has told, for all that may stand at `path`."""
    rows = [
        (f"{path}.{entry.name}".lstrip("."), entry)
        for entry in entries(section)
        if entry.name not in shared
    ]
    yield Table(path, kind, told(section), rows)
    yield from _below(rows, seen)


def _below(rows: Sequence[tuple[str, Entry]], seen: set[Any]) -> Iterator[Table]:
    for at, entry in rows:
        inner = [(at + suffix, part) for suffix, part in _inner(entry.annotation)]
        shared = _shared([part for _, part in inner])
        if shared and (inner[0][0], None) not in seen:
            seen.add((inner[0][0], None))
            common = [(f"{inner[0][0]}.{entry.name}", entry) for entry in shared]
            yield Table(inner[0][0], "", "Whichever it is:", common)
            yield from _below(common, seen)
        for place, part in inner:
            if part not in seen:  # a range is a range wherever it stands
                seen.add(part)
                names = {entry.name for entry in shared}
                yield from _tables(part, place, _chosen_by(part), seen, names)


def _shared(sections: Sequence[type[Section]]) -> list[Entry]:
    """The fields that mean the same in all of several."""
    if len(sections) < 2:
        return []
    others = [{e.name: e.annotation for e in entries(section)} for section in sections[1:]]
    return [
        entry
        for entry in entries(sections[0])
        if all(other.get(entry.name) == entry.annotation for other in others)
    ]


def _inner(annotation: Any) -> Iterator[tuple[str, type[Section]]]:
    """The sections that may stand in a field, each with what its path has in addition."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _inner(args[0])
    elif origin in (Union, types.UnionType):
        for member in args:
            yield from _inner(member)
    elif origin is dict:
        yield from ((f".NAME{suffix}", inner) for suffix, inner in _inner(args[1]))
    elif origin in (tuple, list):
        yield from ((f"[]{suffix}", inner) for suffix, inner in _inner(args[0]))
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield "", annotation


def _chosen_by(section: type[Section]) -> str:
    """`kind: sessions`, where a section is told from others by a field of one value."""
    for entry in entries(section):
        if typing.get_origin(entry.annotation) is Literal:
            values = typing.get_args(entry.annotation)
            if len(values) == 1 and entry.needed:
                return f"{entry.name}: {values[0]}"
    return ""


def shown_default(entry: Entry) -> str:
    if entry.needed:
        return "needed"
    value = entry.default
    if isinstance(value, BaseModel) or value in ({}, (), None):
        return ""
    for mark in _marks(entry.annotation):
        if isinstance(mark, Quantity):
            return mark.format(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _marks(annotation: Any) -> Iterator[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from annotation.__metadata__
        yield from _marks(args[0])
    elif origin in (Union, types.UnionType):
        for member in args:
            yield from _marks(member)


def examples(documents: Sequence[Any]) -> dict[tuple[str, str], str]:
    """The first value that these scenarios have of each path and kind of section, as it stands
    there."""
    found: dict[tuple[str, str], str] = {}
    for document in documents:
        for at, value in _leaves(document, "", Scenario):
            found.setdefault(at, value)
            found.setdefault((at[0], ""), value)
    return found


def _leaves(value: Any, path: str, annotation: Any) -> Iterator[tuple[tuple[str, str], str]]:
    """What stands in a section's fields."""
    bare = _bare(annotation)
    if typing.get_origin(bare) is dict:
        for item in value.values():
            yield from _leaves(item, f"{path}.NAME", typing.get_args(bare)[1])
    elif typing.get_origin(bare) in (tuple, list) and isinstance(value, list):
        for item in value:
            yield from _leaves(item, f"{path}[]", typing.get_args(bare)[0])
    elif isinstance(value, dict) and (section := _the_one(annotation, value)):
        for entry in entries(section):
            if entry.name in value:
                at, inner = f"{path}.{entry.name}".lstrip("."), value[entry.name]
                if list(_inner(entry.annotation)) and isinstance(inner, (dict, list)):
                    yield from _leaves(inner, at, entry.annotation)
                else:
                    text = str(inner).lower() if isinstance(inner, bool) else str(inner)
                    yield (at, _chosen_by(section)), text


def _the_one(annotation: Any, value: Mapping[str, Any]) -> type[Section] | None:
    """Which of the sections that may stand here this is."""
    for _, section in _inner(annotation):
        kind = _chosen_by(section)
        name, _, wanted = kind.partition(": ")
        if not kind or value.get(name) == wanted:
            return section
    return None


def _bare(annotation: Any) -> Any:
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _allowed(entry: Entry) -> str:
    """Sections have a table of their own."""
    inner = list(_inner(entry.annotation))
    words = entry.allowed.split(" or a mapping of ")[0]
    if words.startswith("a mapping of"):
        words = "sections by name" if inner[0][0] == ".NAME" else "a section"
    return words + (", below" if inner else "")


def markdown(shown: Mapping[tuple[str, str], str]) -> str:
    """docs/scenario.md. `shown`: of `examples`."""
    lines = [_INTRODUCTION]
    for table in tables():
        title = f"`{table.path}`" if table.path else "The whole"
        if table.kind:
            title += f" with `{table.kind}`"
        lines += ["", f"## {title}", ""]
        if table.text and table.path:
            lines += [table.text.replace("|", "\\|"), ""]
        if not table.rows:
            continue
        lines += ["| field | means | may be | default | example |", "|---|---|---|---|---|"]
        for path, entry in table.rows:
            default, example = shown_default(entry), shown.get((path, table.kind), "")
            if f"{entry.name}: {entry.allowed}" == table.kind:
                example = ""
            cells = [
                f"`{entry.name}`",
                entry.meaning,
                _allowed(entry),
                f"`{default}`" if default and default != "needed" else default,
                f"`{example}`" if example else "",
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# The fields of a scenario

Made by `scripts/reference` from the models that a scenario is checked against; the examples are
what the files in `scenarios/` have. `scenario.schema.json` says the same to editors; a scenario in
`scenarios/` begins with

```yaml
# yaml-language-server: $schema=../docs/scenario.schema.json
```

Quantities carry units; a bare number is refused where one is needed. Unknown fields are errors. Any
field can be set from the command line by its path, `--set links.wan.rate='200 Mbit/s'`. All that is
wrong with a file is told at once, each with its line, and what would be allowed."""


# -- JSON schema -----------------------------------------------------------------------------------


def json_schema() -> Schema:
    """JSON schema of a scenario, draft 2020-12."""
    parts: dict[str, Schema] = {}
    whole = _object(Scenario, parts)
    return {"$schema": SCHEMA, "title": "A pddrt scenario", **whole, "$defs": parts}


def _object(section: type[Section], parts: dict[str, Schema]) -> Schema:
    properties: dict[str, Schema] = {}
    for entry in entries(section):
        schema = _schema(entry.annotation, parts)
        default = shown_default(entry)
        if entry.meaning or (default and default != "needed"):
            text = entry.meaning + (f" Default: {default}." if default and not entry.needed else "")
            schema = {"description": text.strip(), **schema}
        properties[entry.name] = schema
    schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": section.model_config.get("extra") == "allow",
    }
    if needed := [entry.name for entry in entries(section) if entry.needed]:
        schema["required"] = needed
    return {"description": text, **schema} if (text := told(section)) else schema


def _schema(annotation: Any, parts: dict[str, Schema]) -> Schema:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _annotated(annotation, args[0], parts)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        members = [_schema(member, parts) for member in args if member is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is dict:
        return {
            "type": "object",
            "propertyNames": _schema(args[0], parts),
            "additionalProperties": _schema(args[1], parts),
        }
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(args[0], parts)}
    if isinstance(annotation, type) and issubclass(annotation, Section):
        name = annotation.__name__.removesuffix("Fields")
        if name not in parts:
            parts[name] = {}  # a section may hold itself
            parts[name] = _object(annotation, parts)
        return {"$ref": f"#/$defs/{name}"}
    plain = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": plain[annotation]} if annotation in plain else {}


_SHORT = ("x", "1 ms", "1 %", "1 Mbit/s")
"""What may stand for a whole section, or for one direction of a link."""


def _ways(value: str) -> dict[str, str]:
    """A figure of a link by direction."""
    return {"a>b": value, "b>a": value}


def _annotated(annotation: Any, bare: Any, parts: dict[str, Schema]) -> Schema:
    marks = annotation.__metadata__
    for mark in marks:
        if isinstance(mark, Quantity):
            numbers = {"type": "number"} if _reads(mark, 0.5) else {"const": 0}
            ways = [{"type": "object"}] if any(_reads(mark, _ways(v)) for v in _SHORT) else []
            return {"anyOf": [{"type": "string"}, numbers, *ways], "description": mark.allowed}
    schema = _schema(bare, parts)
    for mark in marks:
        if isinstance(mark, FieldInfo):
            schema = {**schema, **_limits(mark, schema)}
    if any(isinstance(mark, BeforeValidator) for mark in marks):
        kinds = {type(value): None for value in (1, *_SHORT) if _takes(annotation, value)}
        others = [_schema(kind, {}) for kind in kinds]
        schema = {"anyOf": [schema, *others]} if others else schema
    return schema


def _reads(quantity: Quantity, value: object) -> bool:
    try:
        quantity.parse(value)
    except ValueError:
        return False
    return True


def _takes(annotation: Any, value: object) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _limits(info: FieldInfo, schema: Schema) -> Schema:
    """What a `Field(...)` asks of a value, in the words of a schema."""
    found: Schema = {}
    array = schema.get("type") == "array"
    for limit in info.metadata:
        match limit:
            case Ge():
                found["minimum"] = limit.ge
            case Gt():
                found["exclusiveMinimum"] = limit.gt
            case Le():
                found["maximum"] = limit.le
            case Lt():
                found["exclusiveMaximum"] = limit.lt
            case MinLen():
                found["minItems" if array else "minLength"] = limit.min_length
            case MaxLen():
                found["maxItems" if array else "maxLength"] = limit.max_length
            case _ if pattern := getattr(limit, "pattern", None):
                found["pattern"] = pattern
    return found
