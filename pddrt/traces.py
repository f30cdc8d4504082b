"""Public traces of requests: read row by row, and turned into prompts as ids.

What a row says of its prompt is a length and the hashes of its blocks: equal hashes mean equal
tokens, and nothing else is known of them. So ids are made up, block by block, from (seed, hash):
whoever shares blocks shares ids, and a prefix cache hits where it would have hit.

    mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks,
              known to the whole trace; the last block may be partial. Each row is a conversation of
              its own.
    weka      a JSON file for each coding session, or a folder of such: block_size, hash_id_scope,
              requests of t (s), in, out, hash_ids of whole blocks, api_time, think_time. What is
              left of a prompt behind its blocks is taken to be shared with nobody. A row of type
              `subagent` nests requests, whose t counts from its own; they are a conversation beside
              the session's.

`length_scale` moves every boundary between blocks, and every end, from x to x * scale: common
prefixes stay common, and rates stay what they were, up to rounding.

A broken row is named by file and line; `MAX_PROBLEMS` of them are listed. Nothing is read past the
`limit`. Leaves out: when requests are sent (see `workload`), and other formats.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pddrt.errors import BadInput
from pddrt.types import MS, SECOND, Ns
from pddrt.units import shown

MAX_PROBLEMS = 10
MAX_TOKENS = 100_000_000
MAX_LINE_BYTES = 64 << 20
MAX_FILE_BYTES = 512 << 20
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One request as recorded, `at` from the first row (weka: from the start of the session).

    `scope`: within which equal hashes mean equal tokens. `stream`: its conversation. `api_ns`: how
    long the answer took; `think_ns`: from the end of the last answer on. Both where known.
    """

    name: str
    file: str
    scope: str
    stream: str
    at: Ns
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int
    api_ns: Ns | None = None
    think_ns: Ns | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """`hit_tokens`: what an unbounded cache holds of it that has seen the rows before."""

    ids: tuple[int, ...]
    hit_tokens: int


def resolve(path: str) -> Path:
    """A path as users write it, with ~ and $VARIABLES. BadInput for a variable that is not set."""
    full = os.path.expanduser(os.path.expandvars(path))
    if missing := re.search(r"\$\{?(\w+)\}?", full):
        raise BadInput(f"{path}: the environment variable {missing[1]} is not set")
    return Path(full)


def rows(path: Path, format_name: str, limit: int | None = None) -> Iterator[Row]:
    """The first `limit` rows, in order of time within a file, read as they are asked for.

    Raises BadInput after the last one if any was broken, and if there are none.
    """
    problems: list[str] = []
    count = 0
    for row in FORMATS[format_name](path, limit, problems):
        count += 1
        if row is not None:
            yield row
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise BadInput(problems)
    if not count:
        raise BadInput(f"{path}: found no requests")


class Blocks:
    """Makes prompts of rows. Ids are drawn from `vocabulary`; `length_scale` as said above.

    Raises BadInput (from `prompt`) where a block would come to less than one token.
    """

    def __init__(self, seed: int, vocabulary: Sequence[int], length_scale: float = 1.0) -> None:
        assert len(vocabulary) > 1
        self._seed = seed
        self._vocabulary = vocabulary
        self._scale = length_scale
        self._ids: dict[tuple[str, int], tuple[int, ...]] = {}
        self._children: dict[tuple[int | str, int], int] = {}

    def tokens(self, length: int) -> int:
        """A length as scaled; one token at least."""
        return max(1, self._scaled(length))

    def prompt(self, row: Row) -> Prompt:
        if row.block_tokens * self._scale < 1:
            raise BadInput(
                f"workload.length_scale: found {self._scale:g}, at which a block of "
                f"{row.block_tokens} tokens has less than one; "
                f"allowed: {1 / row.block_tokens:g} and more"
            )
        length = self.tokens(row.input_tokens)
        ids: list[int] = []
        for place, block in enumerate(row.hash_ids):
            end = min(self._scaled((place + 1) * row.block_tokens), length)
            ids += self._block(row, block)[: end - len(ids)]
        if len(ids) < length:
            ids += self._draw(f"{row.scope}/tail of {row.name}", length - len(ids))
        known = self._scaled(self._remember(row) * row.block_tokens)
        return Prompt(tuple(ids), min(known, length - 1))

    def _scaled(self, length: int) -> int:
        return math.floor(length * self._scale + 0.5)

    def _block(self, row: Row, block: int) -> tuple[int, ...]:
        """As many ids as the block can have at any place: rounding may give it one more or less."""
        ids = self._ids.get((row.scope, block))
        if ids is None:
            ids = self._draw(f"{row.scope}/{block}", math.ceil(row.block_tokens * self._scale) + 1)
            self._ids[row.scope, block] = ids
        return ids

    def _draw(self, name: str, length: int) -> tuple[int, ...]:
        rng = random.Random(f"{self._seed}/trace/{name}")
        return tuple(rng.choices(self._vocabulary, k=length))

    def _remember(self, row: Row) -> int:
        """How many leading blocks were there in this order before; from now on all of them are."""
        node: int | str = row.scope
        known, new = 0, False
        for block in row.hash_ids:
            child = self._children.get((node, block))
            if child is None:
                new = True
                child = self._children[node, block] = len(self._children)
            known += not new
            node = child
        return known


# -- mooncake --------------------------------------------------------------------------------------


def _mooncake(path: Path, limit: int | None, problems: list[str]) -> Iterator[Row | None]:
    """Rows, and None for each broken one, as all readers."""
    checker = _Checker(problems)
    before: float = 0
    first: float | None = None
    found = 0
    try:
        with path.open("rb") as file:
            number = 0
            while found != limit and (line := file.readline(MAX_LINE_BYTES + 1)):
                number += 1
                if not line.strip():
                    continue
                found += 1
                checker.at(f"{path}:{number}")
                if len(line) > MAX_LINE_BYTES:
                    checker.wrong("", f"found a line of more than {MAX_LINE_BYTES >> 20} MiB")
                    yield None
                    return
                data = checker.mapping(_parsed(line))
                at = checker.number(data, "timestamp", least=before)
                length = checker.whole(data, "input_length", least=1)
                output = checker.whole(data, "output_length", least=0)
                hashes = checker.hashes(data, "hash_ids")
                blocks = -(-length // MOONCAKE_BLOCK)
                if checker.fine and len(hashes) != blocks:
                    checker.wrong("hash_ids", f"found {len(hashes)} of them; allowed: {blocks}, "
                                              f"one for each {MOONCAKE_BLOCK} tokens")  # fmt: skip
                if not checker.fine:
                    yield None
                    continue
                before, first = at, at if first is None else first
                name, since = f"row {number}", round((at - first) * MS)
                yield Row(name, path.stem, "mooncake", name, since, length, output, hashes,
                          MOONCAKE_BLOCK)  # fmt: skip
    except OSError as error:
        raise BadInput(f"{path}: {_why(error)}") from None


# -- weka ------------------------------------------------------------------------------------------


def _weka(path: Path, limit: int | None, problems: list[str]) -> Iterator[Row | None]:
    left = math.inf if limit is None else limit
    try:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            if left <= 0:
                return
            session = _weka_session(file, problems)
            if session is None:
                yield None
                left -= 1
                continue
            taken = list(itertools.islice(session.rows(), None if limit is None else int(left)))
            left -= len(taken)
            yield from sorted(taken, key=lambda row: row.at if row else 0)
    except OSError as error:
        raise BadInput(f"{error.filename or path}: {_why(error)}") from None


def _weka_session(path: Path, problems: list[str]) -> _WekaSession | None:
    """A file, once what stands around its requests is right; None if it is not."""
    checker = _Checker(problems)
    checker.at(f"{path}:1")
    if path.stat().st_size > MAX_FILE_BYTES:
        checker.wrong("", f"found a file of more than {MAX_FILE_BYTES >> 20} MiB")
        return None
    text = path.read_bytes()
    parsed = _parsed(text)
    if isinstance(parsed, _Broken):
        checker.at(f"{path}:{parsed.line}")
    data = checker.mapping(parsed)
    block = checker.whole(data, "block_size", least=1)
    scope = data.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        checker.wrong("hash_id_scope", f"found {shown(scope)}; allowed: local | global")
    requests = checker.list_of(data, "requests")
    if not checker.fine:
        return None
    scope = path.stem if scope == "local" else "weka"
    return _WekaSession(path, text, block, scope, requests, checker)


@dataclass(slots=True)
class _WekaSession:
    """One file on its way to rows."""

    path: Path
    text: bytes
    block: int
    scope: str
    requests: Sequence[Any]
    checker: _Checker
    _lines: list[int] = field(default_factory=list)

    def rows(self) -> Iterator[Row | None]:
        """In the file's order; None for each broken one."""
        for number, data in enumerate(self.requests):
            self.checker.at(self.path, f"requests[{number}]", partial(self._line, number))
            yield from self._stream(data, f"requests[{number}]", self.path.stem, 0.0)

    def _stream(self, data: Any, here: str, name: str, begin: float) -> Iterator[Row | None]:
        """A request of the conversation `name`, which began at `begin`; or those of a subagent."""
        self.checker.inside(here)
        data = self.checker.mapping(data)
        at = begin + self.checker.number(data, "t")
        if data.get("type") != "subagent":
            yield self._row(data, here, name, at)
            return
        inner = self.checker.list_of(data, "requests")
        if not self.checker.fine:
            yield None
        for number, nested in enumerate(inner):
            yield from self._stream(nested, f"{here}.requests[{number}]", f"{name}/{here}", at)

    def _row(self, data: Mapping[str, Any], here: str, name: str, at: float) -> Row | None:
        checker = self.checker
        length = checker.whole(data, "in", least=1)
        output = checker.whole(data, "out", least=0)
        hashes = checker.hashes(data, "hash_ids")
        api = checker.number(data, "api_time") if "api_time" in data else None
        think = checker.number(data, "think_time") if "think_time" in data else None
        blocks = length // self.block
        if checker.fine and len(hashes) > blocks:
            checker.wrong("hash_ids", f"found {len(hashes)} of them; allowed: {blocks} at most, "
                                      f"one for each whole {self.block} tokens")  # fmt: skip
        if not checker.fine:
            return None
        return Row(
            f"{name} {here}", self.path.stem, self.scope, name, round(at * SECOND),
            length, output, hashes, self.block,
            api_ns=None if api is None else round(api * SECOND),
            think_ns=None if think is None else round(think * SECOND),
        )  # fmt: skip

    def _line(self, number: int) -> int:
        """The line that request `number` of the file begins in. Only messages need it."""
        self._lines = self._lines or _lines_of_items(self.text.decode(), "requests")
        return self._lines[number] if number < len(self._lines) else 1


def _lines_of_items(text: str, key: str) -> list[int]:
    """Lines of the items of the first list called `key`."""
    found = re.search(rf'"{key}"\s*:\s*\[\s*', text)
    decoder = json.JSONDecoder()
    lines: list[int] = []
    place, line, counted = found.end() if found else len(text), 1, 0
    while place < len(text) and text[place] != "]":
        line, counted = line + text.count("\n", counted, place), place
        lines.append(line)
        _, place = decoder.raw_decode(text, place)
        between = re.compile(r"\s*,?\s*").match(text, place)
        place = between.end() if between else len(text)
    return lines


FORMATS = {"mooncake": _mooncake, "weka": _weka}


# -- checking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Broken:
    """In place of what could not be parsed."""

    text: str
    line: int


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return _Broken(f"found no JSON: {error.msg} (column {error.colno})", error.lineno)
    except (ValueError, RecursionError) as error:
        return _Broken(f"found no JSON: {str(error)[:80]}", 1)


class _Checker:
    """Reads fields of one row after the other, and notes what is wrong with them.

    What it returns for a broken field is a stand-in; `fine` says whether the row has none.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.fine = True
        self._where: object = ""
        self._inside = ""
        self._line: Callable[[], int] | None = None

    def at(self, where: object, inside: str = "", line: Callable[[], int] | None = None) -> None:
        """The next row. `inside`: its path within the file; `line` finds its line when needed."""
        self.fine = True
        self._where, self._inside, self._line = where, inside, line

    def inside(self, path: str) -> None:
        """The next row, on the line of the one before."""
        self.fine, self._inside = True, path

    def wrong(self, name: str, text: str) -> None:
        self.fine = False
        if len(self.problems) < MAX_PROBLEMS:
            where = f"{self._where}:{self._line()}" if self._line else f"{self._where}"
            path = ".".join(part for part in (self._inside, name) if part)
            self.problems.append(f"{where}: {path + ': ' if path else ''}{text}")

    def mapping(self, value: Any) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        self.wrong("", value.text if isinstance(value, _Broken)
                   else f"found {shown(value)}; allowed: an object")  # fmt: skip
        return {}

    def list_of(self, data: Mapping[str, Any], name: str) -> list[Any]:
        value = self._field(data, name, "a list")
        if value is not None and not isinstance(value, list):
            self.wrong(name, f"found {shown(value)}; allowed: a list")
        return value if isinstance(value, list) else []

    def number(self, data: Mapping[str, Any], name: str, least: float = 0) -> float:
        value = self._field(data, name, "a number")
        if value is None:
            return least
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.wrong(name, f"found {shown(value)}; allowed: a number")
        elif not 0 <= value <= 1e15:
            self.wrong(name, f"found {shown(value)}; allowed: a number from 0")
        elif value < least:
            self.wrong(name, f"found {shown(value)} after {shown(least)}; allowed: no earlier time")
        else:
            return value
        return least

    def whole(self, data: Mapping[str, Any], name: str, least: int) -> int:
        value = self._field(data, name, "a whole number")
        if value is None:
            return least
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            allowed = f"a whole number from {least} to {MAX_TOKENS:,}"
            self.wrong(name, f"found {shown(value)}; allowed: {allowed}")
            return least
        return value

    def hashes(self, data: Mapping[str, Any], name: str) -> tuple[int, ...]:
        found = self.list_of(data, name)
        for place, value in enumerate(found):
            if type(value) is not int or value < 0:
                allowed = "a whole number from 0"
                self.wrong(f"{name}[{place}]", f"found {shown(value)}; allowed: {allowed}")
                return ()
        return tuple(found)

    def _field(self, data: Mapping[str, Any], name: str, allowed: str) -> Any:
        """The value of a field; None if it is missing, which is noted unless the row is no row."""
        value = data.get(name)
        if value is None and data:
            found = "found nothing" if name in data else "missing"
            self.wrong(name, f"{found}; needed: {allowed}")
        elif value is None and self.fine:
            self.wrong("", f"found an empty object; needed: {name} and others")
        return value


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
