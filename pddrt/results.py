"""What `pddrt.run`, `pddrt.comparing.columns`, `pddrt.sweeping.table` and `pddrt.open` return.

Numbers are plain floats, times in seconds, as in the files of the folder that each result has.
Tables come as data frames where pandas or polars is installed, and as lists of dicts anywhere.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pddrt.comparing.columns as compare_module
import pddrt.sweeping.table as sweep_module
from pddrt import arguments, recording
from pddrt import trace as ev
from pddrt.comparing.assertions import Assertion
from pddrt.errors import BadInput, CannotRun
from pddrt.sections import unknown_name
from pddrt.trace import dumps
from pddrt.units import shown

Backend = Literal["pandas", "polars", "rows"]
FRAMES: tuple[Backend, ...] = ("pandas", "polars")
EVENTS = [
    kind.__name__
    for kind in vars(ev).values()
    if isinstance(kind, type) and issubclass(kind, ev.Event) and kind is not ev.Event
]
"""Every kind of event."""


class Tree(dict[str, Any]):
    """A mapping whose keys are attributes as well: `summary.ttft_s.p90`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(unknown_name(name, map(str, self))) from None

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(key for key in self if str(key).isidentifier())]


def tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Tree((key, tree(inner)) for key, inner in value.items())
    return [tree(inner) for inner in value] if isinstance(value, list) else value


class Run:
    """A run that was recorded, in its folder.

    `failure`: why it did not end as it must, "" where it did. `missing`: what the folder lacks, a
    sentence each; empty after `pddrt.run`.
    """

    def __init__(self, folder: Path, failure: str = "", interrupted: bool = False) -> None:
        self.folder = folder
        self.failure = failure
        self.interrupted = interrupted
        read = recording.opened(folder)
        self._rows = read.rows
        self.missing: Sequence[str] = read.missing
        self.scenario: Tree = tree(read.scenario)
        self.summary: Tree = tree(read.summary)

    def __repr__(self) -> str:
        s = self.summary
        ended = s.get("requests") or {}
        return (
            f"<pddrt.Run {s.get('name', self.folder.name)}: seed {s.get('seed', '?')}, "
            f"{ended.get('finished', '?')} of {ended.get('total', '?')} requests finished, "
            f"{self.folder}>"
        )

    @property
    def requests(self) -> Any:
        """A row for each request: a data frame of pandas or polars, whichever is installed, else a
        list of dicts.
        """
        return self.requests_table()

    @property
    def events(self) -> Any:
        """A row for each event, as `requests`. A column is empty where an event has no such field;
        `events_table` takes one kind at a time.
        """
        return self.events_table()

    def requests_table(self, backend: Backend | None = None) -> Any:
        """`rows`: dicts as in requests.jsonl. A data frame has them flat: `ttft_legs.transfer`."""
        return _framed(list(self._rows.values()), backend)

    def events_table(self, kind: str | None = None, backend: Backend | None = None) -> Any:
        """Events as in events.jsonl; of one `kind` only ("KVSent"), where it is given."""
        if kind is not None:
            arguments.check("kind", kind)
        found = list(self._events(kind))
        if kind is not None and not found:  # a later version's kinds may be there
            arguments.known("kind", kind, EVENTS)
        return _framed(found, backend)

    def _events(self, kind: str | None) -> Iterator[dict[str, Any]]:
        """Raises BadInput where the file is not there. A last line that is cut off is left out."""
        path = self.folder / "events.jsonl"
        start = None if kind is None else f'{{"event":"{kind}",'
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if (start is None or line.startswith(start)) and line.endswith("\n"):
                        yield json.loads(line)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from None

    def request(self, id: str) -> Tree:
        """One request, as in requests.jsonl. Raises BadInput for one that is not there."""
        arguments.check("id", id)
        if id not in self._rows:
            raise BadInput(f"no request {shown(id)} in {self.folder}: "
                           f"{unknown_name(id, list(self._rows)[:20])}")  # fmt: skip
        found: Tree = tree(self._rows[id])
        return found

    def report(self) -> Path:
        """Writes report.html and trace.json into the folder; the path of the page."""
        from pddrt.report.page import make

        return make(self.folder).html

    def save(self, folder: str | Path) -> Path:
        """Copies the run's folder, so that it stays. Raises BadInput where something is there."""
        arguments.check("folder", folder)
        to = Path(folder)
        if to.exists():
            raise BadInput(f"{to}: is there already; allowed: a new folder")
        shutil.copytree(self.folder, to)
        return to


class Compared:
    """A comparison: columns by name or label, the table of compare.json, its folder."""

    def __init__(self, result: compare_module.Compared, names: Sequence[str]) -> None:
        self.folder = result.folder
        self.table: Tree = tree(json.loads(dumps(result.table)))
        self._result = result
        self._columns = {name: column for column in self.table.columns
                         for name in (column.name, column.label)}  # fmt: skip
        self.names = tuple(names)

    def __repr__(self) -> str:
        return f"<pddrt.Compared {', '.join(self.names)}: {self.folder}>"

    def __getitem__(self, name: str) -> Tree:
        """A column: `compared["naive"].ratios.ttft_s.p90`. Raises BadInput for none."""
        arguments.check("name", name)
        if name not in self._columns:
            raise BadInput(f"column: {unknown_name(name, self.names)}")
        found: Tree = self._columns[name]
        return found

    def holds(self, condition: str) -> bool:
        """As `--assert`: "pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90". Raises BadInput."""
        arguments.check("condition", condition)
        known = [name for names in self._result.names for name in names]
        (verdict,) = self._result.judge([Assertion(condition, known, "condition")])
        return verdict.holds

    def deltas_table(self, backend: Backend | None = None) -> Any:
        """Request by request, as deltas.csv: what each part changed by, in seconds."""
        return _framed(_read_csv(self.folder / compare_module.DELTAS_FILE), backend)

    def report(self) -> Path:
        """Writes compare.html into the folder; its path."""
        from pddrt.comparing import page as compare_page

        return compare_page.write(self._result)


class Swept:
    """A sweep: the table of sweep.json, its folder."""

    def __init__(self, result: sweep_module.Swept) -> None:
        self.folder = result.folder
        self.table: Tree = tree(result.table)
        self._result = result

    def __repr__(self) -> str:
        return f"<pddrt.Swept {len(self.table.cells)} cells: {self.folder}>"

    @property
    def cells(self) -> Any:
        """A row for each run: fields, seed, state and numbers; a data frame as `Run.requests`."""
        return self.cells_table()

    def cells_table(self, backend: Backend | None = None) -> Any:
        rows = [
            {**cell["changes"], "seed": cell["seed"], "state": cell["state"], **cell["metrics"]}
            for cell in self.table.cells
        ]
        return _framed(rows, backend)

    def points_table(self, backend: Backend | None = None) -> Any:
        """A row for each setting: its numbers over the seeds (mean, low, high, min, max)."""
        rows = [{**p["changes"], "seeds": p["seeds"], **p["metrics"]} for p in self.table.points]
        return _framed(rows, backend)

    def report(self) -> Path:
        """Writes sweep.html into the folder; its path."""
        from pddrt.sweeping import page as sweep_page

        return sweep_page.write(self._result)


# -- tables ----------------------------------------------------------------------------------------


def _framed(rows: list[dict[str, Any]], backend: Backend | None) -> Any:
    """Rows as what is asked for; else as what is installed. Raises CannotRun where that is not."""
    if backend is None:
        installed = [known for known in FRAMES if find_spec(known)]
        backend = installed[0] if installed else "rows"
    if backend == "rows":
        return rows
    if backend not in FRAMES:
        raise BadInput(f"backend: {unknown_name(str(backend), (*FRAMES, 'rows'))}")
    try:
        library = importlib.import_module(backend)
    except ImportError:
        raise CannotRun(f"{backend} is not installed; backend='rows' needs nothing") from None
    flat = [_flat(row) for row in rows]
    columns = dict.fromkeys(key for row in flat for key in row)
    # Where a row has nothing (no handoff), that is no column beside those of the rows that do.
    groups = {key[: dot.start()] for key in columns for dot in re.finditer(r"\.", key)}
    columns = dict.fromkeys(key for key in columns if key not in groups)
    values = {key: [row.get(key) for row in flat] for key in columns}
    if backend == "pandas":
        return library.DataFrame(values)
    return library.DataFrame(values, strict=False)


def _flat(row: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Objects in a row as columns of their own: `handoff.ids`."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            found |= _flat(value, name)
        else:
            found[name] = value
    return found


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: _cell(key, value) for key, value in row.items()} for row in csv.DictReader(file)
        ]


def _cell(key: str, text: str) -> Any:
    if key.endswith("_s"):
        return float(text) if text else None
    return int(text) if key == "seed" else text
