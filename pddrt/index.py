"""An index of a run folder, for folders too large to be read whole each time they are opened.

Of `requests.jsonl` it holds every scalar field as a column, and where each line is; of
`events.jsonl`, which events are of which request, and where every `BLOCK`th line is. So a question
about all requests is answered from columns, and the story of one request costs a few reads; token
arrays, which are most of `requests.jsonl`, are parsed for the rows that are looked at.

`RunIndex.open` takes `index.npz` from the folder if it belongs to the files as they are now, and
else reads them once (5 million events and 100,000 requests: 6 s), and leaves the index there if
they are large enough to be worth it and the folder may be written to. A file that was cut off
counts up to its last whole line; `missing` says what is not there.

Where an index belongs to a file is judged by size, and by time of change or else by samples of the
contents: a folder that was copied keeps its index.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import re
import zipfile
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pddrt.document import shown_path
from pddrt.errors import BadInput
from pddrt.trace import request_of

Json = dict[str, Any]
Array = NDArray[Any]

NAME = "index.npz"
FORM = 1
"""Of the index file; another number is another form."""
BLOCK = 64
"""Lines of events.jsonl between two of which it is known where they are."""
CHUNK = 1 << 23
"""Bytes of events.jsonl that are read at once."""
WORTH = 8 << 20
"""From so many bytes in the folder on the index is kept there."""
LONGEST = 200
"""Longer strings are cut in columns; a row has them whole."""

REQUESTS, EVENTS = "requests.jsonl", "events.jsonl"
UNINDEXED = frozenset({"text", "token_source"})


@dataclass(frozen=True, slots=True)
class RunIndex:
    """`ids` are those of requests.jsonl, in its order, as are the `columns`: one a scalar field,
    those of nested objects dotted (`ttft_legs.prefill`, `handoff.gap_s`). Numbers are int64, or
    float64 with NaN for null where that occurs; truth is bool, or float64 likewise; strings are
    objects, None for null. There are three more columns: `tokens.P`, `.R` and `.M` count
    `token_source`; `sent_s` is when the client sent it, NaN where the events do not tell.

    `unfinished` are the ids that only events.jsonl tells of. `num_events`: its whole lines.
    `missing`: what the folder lacks, a sentence each.
    """

    folder: Path
    ids: Array
    columns: Mapping[str, Array]
    unfinished: tuple[str, ...]
    num_events: int
    missing: tuple[str, ...]
    _rows: Array
    """Where the line of each row begins and ends, [requests, 2]."""
    _blocks: Array
    """Where every `BLOCK`th line of events.jsonl begins, and then its end."""
    _firsts: Array
    """Where in `_postings` the events of each request begin; those of `unfinished` come last."""
    _postings: Array
    """Numbers of events, request by request, in order."""
    _places: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> RunIndex:
        """Raises BadInput where there is neither file of a run."""
        if not any((folder / name).is_file() for name in (REQUESTS, EVENTS)):
            raise BadInput(
                f"{shown_path(folder)}: not a run folder; expected {REQUESTS} or {EVENTS} in it"
            )
        return _kept(folder) or cls.build(folder)

    @classmethod
    def build(cls, folder: Path) -> RunIndex:
        """Reads the files anew, and keeps the index in the folder if it is worth it and can be."""
        stamps = _stamps(folder)
        table, missing = _Table(), list[str]()
        table.read(folder / REQUESTS, missing)
        scan = _Scan({name.encode(): i for i, name in enumerate(table.ids)})
        scan.read(folder / EVENTS, missing)
        contents = table.arrays() | scan.arrays(len(table.ids))
        if sum(stamp[1] for stamp in stamps) >= WORTH:
            _keep(folder, contents, stamps, missing)
        return _made(folder, contents, missing)

    def __len__(self) -> int:
        return len(self.ids)

    # -- requests ----------------------------------------------------------------------------------

    def find(self, request: str) -> int:
        """The row of a request. Raises KeyError where requests.jsonl has none of it."""
        place = self._places[request]
        if place >= len(self.ids):
            raise KeyError(request)
        return place

    def row(self, at: int) -> Json:
        """The whole line, read from the file. Raises BadInput where that has changed meanwhile."""
        start, end = map(int, self._rows[at])
        with (self.folder / REQUESTS).open("rb") as file:
            file.seek(start)
            found = _object(file.read(end - start))
        if found is None or found.get("id") != self.ids[at]:
            raise BadInput(f"{shown_path(self.folder / REQUESTS)} has changed since it was opened")
        return found

    # -- events ------------------------------------------------------------------------------------

    def numbers_of(self, request: str) -> Array:
        """Numbers (from 0) of the events of all attempts at a request. Raises KeyError where
        nothing is known of it.
        """
        place = self._places[request]
        return self._postings[self._firsts[place] : self._firsts[place + 1]]

    def events_of(self, request: str) -> Iterator[Json]:
        """The events of all attempts at a request, in order. Raises KeyError as above."""
        return self._events(map(int, self.numbers_of(request)))

    def event_at(self, number: int) -> Json:
        """Raises IndexError beyond the whole lines, BadInput where the line is no event."""
        return next(self._events([range(self.num_events)[number]]))

    def events(self, start: int = 0, end: int | None = None) -> Iterator[Json]:
        """Those with numbers [start, end), of all that is there by default."""
        return self._events(range(self.num_events)[start:end])

    def _events(self, numbers: Any) -> Iterator[Json]:
        held, lines = -1, list[bytes]()
        with (self.folder / EVENTS).open("rb") as file:
            for number in numbers:
                block, line = divmod(number, BLOCK)
                if block != held:
                    start, end = map(int, self._blocks[block : block + 2])
                    file.seek(start)
                    held, lines = block, file.read(end - start).split(b"\n")
                event = _object(lines[line]) if line < len(lines) else None
                if event is None:
                    where = f"{shown_path(self.folder / EVENTS)}:{number + 1}"
                    raise BadInput(f"{where}: not an event of this format")
                yield event


def _object(line: bytes) -> Json | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# -- requests.jsonl --------------------------------------------------------------------------------

_TOKEN_ARRAYS = re.compile(rb'"(?:output_ids|token_times_s)":\[[^\]]*\],')
"""What no column holds, and takes most of the time to parse. A quote within a string has a
backslash before it, so that this can be found in none."""


class _Column:
    """Values of one field, row by row; what is left out is null."""

    def __init__(self) -> None:
        self._numbers = array("d")
        self._codes = array("i")
        self._strings: dict[str, int] = {}
        self._kinds: set[type] = set()

    def put(self, at: int, value: Any) -> None:
        self._fill(at)
        self._kinds.add(type(value))
        text = isinstance(value, str)
        short = value[:LONGEST] if text else ""
        self._codes.append(self._strings.setdefault(short, len(self._strings)) if text else -1)
        self._numbers.append(np.nan if text or value is None else value)

    def _fill(self, rows: int) -> None:
        if (lacking := rows - len(self._codes)) > 0:
            self._kinds.add(type(None))
            self._codes.extend([-1] * lacking)
            self._numbers.extend([np.nan] * lacking)

    def arrays(self, name: str, rows: int) -> dict[str, Array]:
        """As they are kept: numbers, or codes of strings and the strings."""
        self._fill(rows)
        if str in self._kinds:
            codes = np.frombuffer(self._codes, np.int32)
            return {f"codes/{name}": codes, f"strings/{name}": np.array(list(self._strings))}
        numbers = np.frombuffer(self._numbers, np.float64)
        kinds = {bool: np.bool_, int: np.int64}
        whole = kinds.get(*self._kinds) if len(self._kinds) == 1 else None
        return {f"column/{name}": numbers if whole is None else numbers.astype(whole)}


class _Table:
    """The rows of requests.jsonl; of two of one request the first."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._columns: dict[str, _Column] = {}
        self._rows = array("q")

    def read(self, path: Path, missing: list[str]) -> None:
        if not path.is_file():
            missing.append(f"{REQUESTS} is not there")
            return
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start, end = end, end + len(line)
                row = _object(_TOKEN_ARRAYS.sub(b"", line))
                if row is None or not isinstance(row.get("id"), str):
                    cut = "is broken in" if line.endswith(b"\n") else "is cut off in"
                    missing.append(f"{REQUESTS} {cut} line {number:,}")
                elif row["id"] not in self.ids:
                    self._take(row, start, end)

    def _take(self, row: Json, start: int, end: int) -> None:
        at = self.ids[row["id"]] = len(self.ids)
        self._rows.extend((start, end))
        source = str(row.get("token_source") or "")
        row["tokens"] = {letter: source.count(letter) for letter in "PRM"}
        for name, value in _scalars(row, ""):
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.put(at, value)

    def arrays(self) -> dict[str, Array]:
        rows = np.frombuffer(self._rows, np.int64).reshape(-1, 2)
        found = {"ids": np.array(list(self.ids), np.str_), "rows": rows}
        objects = {name.rpartition(".")[0] for name in self._columns}
        for name, column in self._columns.items():
            if name not in objects:  # of an object that some rows have, others null
                found |= column.arrays(name, len(self.ids))
        return found


def _scalars(row: Json, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}.")
        elif not isinstance(value, list) and prefix + key not in UNINDEXED:
            yield prefix + key, value


# -- events.jsonl ----------------------------------------------------------------------------------

_OF_REQUEST = re.compile(
    rb'\{"event":"(RequestSent)?\w*","t_s":([-0-9.]+),"request":"([^"\\]*(?:\\.[^"\\]*)*)"'
)
"""Every event that has a request has it first (a test says so)."""


class _Scan:
    """Which lines of events.jsonl are of which request; requests are numbered, `known` first."""

    def __init__(self, known: dict[bytes, int]) -> None:
        self._numbers = dict(known)
        """By name of an attempt, as it stands in the file."""
        self._requests = dict(known)
        self._known = len(known)
        self._sent: dict[int, float] = {}
        self._blocks = array("q")
        self._owners = array("I")
        self._lines = array("I")
        self.num_events = 0
        self._end = 0

    def read(self, path: Path, missing: list[str]) -> None:
        if not path.is_file():
            missing.append(f"{EVENTS} is not there")
            return
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                if not data.endswith(b"\n"):
                    data += file.readline()
                self._take(data)
                if not data.endswith(b"\n"):
                    missing.append(f"{EVENTS} is cut off in line {self.num_events + 1:,}")
                    break

    def _take(self, data: bytes) -> None:
        """Whole lines, and perhaps the beginning of the last."""
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        starts: list[int] = []
        for found in _OF_REQUEST.finditer(data):
            sent, when, name = found.groups()
            number = self._numbers.get(name)
            if number is None:
                number = self._number(name)
            starts.append(found.start())
            self._owners.append(number)
            if sent:
                self._sent[number] = float(when)
        lines = np.searchsorted(ends, starts)
        whole = bisect.bisect_left(lines, len(ends))
        del self._owners[len(self._owners) - len(starts) + whole :]
        self._lines.extend((lines[:whole] + self.num_events).tolist())
        if len(ends):
            begins = np.concatenate(([0], ends[:-1] + 1))
            self._blocks.extend((begins[-self.num_events % BLOCK :: BLOCK] + self._end).tolist())
            self.num_events += len(ends)
            self._end += int(ends[-1]) + 1

    def _number(self, name: bytes) -> int:
        request = request_of(json.loads(b'"%b"' % name)).encode()
        self._numbers[name] = self._requests.setdefault(request, len(self._requests))
        return self._numbers[name]

    def arrays(self, rows: int) -> dict[str, Array]:
        owners = np.frombuffer(self._owners, np.uint32)
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=len(self._requests))
        unfinished = [name.decode() for name in list(self._requests)[rows:]]
        sent = [self._sent.get(number, np.nan) for number in range(rows)]
        return {
            "blocks": np.array([*self._blocks, self._end], np.int64),
            "firsts": np.concatenate(([0], np.cumsum(counts))),
            "postings": np.frombuffer(self._lines, np.uint32)[order],
            "unfinished": np.array(unfinished, np.str_),
            "num_events": np.array(self.num_events),
            "column/sent_s": np.array(sent, np.float64),
        }


# -- the index file --------------------------------------------------------------------------------

Stamp = tuple[str, int, int, str]
"""A file: name, size, time of change in ns, digest of samples."""


def _stamps(folder: Path) -> list[Stamp]:
    return [_stamp(folder / name) for name in (REQUESTS, EVENTS)]


def _stamp(path: Path, samples: int = 64, length: int = 1024) -> Stamp:
    if not path.is_file():
        return path.name, 0, 0, ""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        size, changed = about.st_size, about.st_mtime_ns
        for at in range(samples + 1):
            file.seek(max(0, size - length) * at // samples)
            digest.update(file.read(length))
    return path.name, size, changed, digest.hexdigest()


def _keep(folder: Path, contents: Mapping[str, Array], stamps: list[Stamp], missing: Any) -> None:
    """A folder that may not be written to stays as it is."""
    about = json.dumps({"form": FORM, "files": stamps, "missing": missing})
    half = folder / f".{NAME}.{os.getpid()}"
    try:
        with half.open("wb") as file:
            np.savez(file, allow_pickle=False, about=np.array(about), **contents)
        half.replace(folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink()


def _kept(folder: Path) -> RunIndex | None:
    """The index in the folder, if it is whole and belongs to the files as they are."""
    try:
        with np.load(folder / NAME, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["form"] != FORM or not _belongs(about["files"], folder):
                return None
            contents = {name: file[name] for name in file.files if name != "about"}
        return _made(folder, contents, about["missing"])
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _belongs(files: list[list[Any]], folder: Path) -> bool:
    now = _stamps(folder)
    same = [was[:2] == list(stamp[:2]) for was, stamp in zip(files, now, strict=True)]
    return all(same) and all(w[2] == s[2] or w[3] == s[3] for w, s in zip(files, now, strict=True))


def _made(folder: Path, contents: Mapping[str, Array], missing: list[str]) -> RunIndex:
    columns: dict[str, Array] = {}
    for key, value in contents.items():
        part, _, name = key.partition("/")
        if part == "column":
            columns[name] = value
        elif part == "codes":
            strings = np.array([*contents[f"strings/{name}"].tolist(), None], object)
            columns[name] = strings[value]
    ids, unfinished = contents["ids"].tolist(), contents["unfinished"].tolist()
    return RunIndex(
        folder,
        np.array(ids, object),
        columns,
        tuple(unfinished),
        int(contents["num_events"]),
        tuple(missing),
        contents["rows"],
        contents["blocks"],
        contents["firsts"],
        contents["postings"],
        {name: at for at, name in enumerate(ids + unfinished)},
    )
