"""A sweep: one scenario over a grid of values, run cell by cell, resumable.

A cell is one setting with one seed (see `grid`). Cells run in worker processes (see
`worker`), and what a cell is decides where it lies:

    FOLDER/sweep.json        axes, cells and points (means over seeds), with the chosen numbers
    FOLDER/sweep.csv         a row a cell
    FOLDER/cells/KEY/        that cell's run, as much of it as is kept

KEY is a digest of all that a cell's numbers follow from (see `cells`). The same sweep again
goes on where it was; another grid in the same folder finds the cells that both have. A cell that
failed or was cut off runs again.

Cells fail alone: the others run, and the table says who failed by what. `page` draws
sweep.html from the table.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pddrt.comparing import axes
from pddrt.comparing.assertions import paths_in, value_at
from pddrt.comparing.axes import Axis
from pddrt.comparing.grid import Problems, Setting, grid, refuse
from pddrt.comparing.intervals import MAX_SEEDS, over_seeds
from pddrt.document import Document
from pddrt.env import Stopwatch
from pddrt.errors import BadInput, Interrupted, RunFailed
from pddrt.expression import nearest
from pddrt.hosting import free_folder, signals_to, writing
from pddrt.metrics import Recorder
from pddrt.summary import summary
from pddrt.sweeping.cells import Cell, code, keys
from pddrt.sweeping.crew import Crew, Messages
from pddrt.sweeping.worker import CELL, KEPT, Keep
from pddrt.types import SECOND

Json = dict[str, Any]
Progress = Callable[[str, float | None], None]

SCHEMA = 1
FILE = "sweep.json"
TABLE = "sweep.csv"
MAX_CELLS = 10_000
MAX_JOBS = 256
METRICS = (
    "ttft_s.p50",
    "ttft_s.p90",
    "tpot_s.p50",
    "e2e_s.p90",
    "handoff_gap_s.p90",
    "goodput_rps",
    "slo_attainment",
)
"""What is looked at where nothing is asked for; those that no cell has are left out."""


def settings(
    base: str | Path | Document, overrides: Sequence[str] = (), *, policies: str | None = None,
    vary: Sequence[str] = (), seed: int | None = None, clock: str | None = None,
    skip_invalid: bool = False,
) -> tuple[list[Axis], list[Setting], Problems]:  # fmt: skip
    """Axes, sound settings, and what is wrong with the others where `skip_invalid` leaves them out.

    Raises BadInput with all problems of all settings.
    """
    varied = axes.axes(policies, vary)
    count = 1
    for axis in varied:
        count *= len(axis.values)
    if not varied:
        raise BadInput("found nothing to sweep; allowed: at least one --vary PATH=V1,V2 or "
                       "--policies A,B")  # fmt: skip
    if count > MAX_CELLS:
        raise BadInput(f"found {count:,} settings in all; allowed: {MAX_CELLS:,} at most")
    found, problems = grid(base, varied, overrides, seed=seed, clock=clock)
    if problems and not (skip_invalid and found):
        refuse(problems, count)
    return varied, found, problems


# -- running them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swept:
    """The table, as in sweep.json, and the folder it lies in."""

    folder: Path
    table: Json

    def raise_for_status(self) -> None:
        """Raises Interrupted, or RunFailed with the failures of all cells."""
        if self.table["interrupted"]:
            raise Interrupted(
                f"interrupted; what was measured is saved in {self.folder}, and the same command "
                "goes on from there"
            )
        failed = [c for c in self.table["cells"] if c["state"] == "failed"]
        if failed:
            more = [f"and {len(failed) - 10} more"] if len(failed) > 10 else []
            raise RunFailed(
                "\n".join([*(f"{c['name']}: {c['failure']}" for c in failed[:10]), *more])
            )


class Sweep:
    def __init__(
        self, axes: Sequence[Axis], settings: Sequence[Setting], *, out: Path | None = None,
        repeat: int = 1, jobs: int = 1, max_runs: int | None = None,
        metrics: Sequence[str] = (), keep: Keep = "summary", fresh: bool = False,
        left_out: Problems | None = None,
    ) -> None:  # fmt: skip
        """`repeat`: seeds of each setting, from its own on. `max_runs`: so many new cells now.
        `metrics`: paths in summary.json. `fresh`: runs also what is there. `left_out`: settings
        that are not sound, for the table.

        Raises BadInput.
        """
        for option, value, most in (("--repeat", repeat, MAX_SEEDS), ("--jobs", jobs, MAX_JOBS)):
            if not 1 <= value <= most:
                raise BadInput(f"{option}: found {value}; allowed: 1 to {most:,}")
        if max_runs is not None and max_runs < 0:
            raise BadInput(f"--max-runs: found {max_runs}; allowed: 0 and more")
        if keep not in (*KEPT, "all"):
            raise BadInput(f"--keep: found {keep}; allowed: {', '.join((*KEPT, 'all'))}")
        if len(settings) * repeat > MAX_CELLS:
            many = f"{len(settings) * repeat:,}"
            raise BadInput(f"found {many} cells in all; allowed: {MAX_CELLS:,} at most")
        if jobs > 1 and any(s.scenario.clock == "wall" for s in settings):
            raise BadInput("--jobs: found more than 1 under the wall clock, where runs side by "
                           "side would disturb one another; allowed there: 1")  # fmt: skip
        if wrong := [text for path in metrics if (text := _no_metric(path, settings))]:
            raise BadInput(wrong)
        name = settings[0].scenario.name
        # Not by the time of day: the same command again is to find what there is.
        self.folder = free_folder(out or Path("runs") / f"sweep-{name}", name, FILE, "sweep")
        self._axes = axes
        self._name = name
        self._jobs = jobs
        self._metrics = tuple(metrics) or METRICS
        self._asked = bool(metrics)
        self._keep = keep
        self._fresh = fresh
        self._max_runs = max_runs
        self._left_out = left_out or {}
        self._interrupted = False
        self._cells = [
            Cell(setting, seed, key)
            for setting in settings
            for seeds in [range(setting.scenario.seed, setting.scenario.seed + repeat)]
            for seed, key in zip(seeds, keys(setting, seeds), strict=True)
        ]

    @property
    def cells(self) -> Sequence[Cell]:
        return self._cells

    def execute(self, progress: Progress | None = None) -> Swept:
        """Runs what is not there yet, and writes the folder, also when it is interrupted: then the
        cells under way are cut off and will run again. Raises CannotRun where the folder cannot be
        written, BadInput for metrics that no summary has.
        """
        messages: Messages = SimpleQueue()

        def stop() -> None:
            self._interrupted = True
            messages.put(("stop", None, None))

        error: BadInput | None = None
        with signals_to(stop):
            with writing(self.folder):
                (self.folder / "cells").mkdir(parents=True, exist_ok=True)
                if not (self.folder / FILE).exists():  # says whose folder this is
                    (self.folder / FILE).write_text("{}\n", encoding="utf-8")
                self._find()
            waiting = [c for c in self._cells if c.state == "waiting"][: self._max_runs]
            try:
                Crew(self.folder, self._jobs, self._keep, messages).work(
                    waiting, self._heard, self._tell(progress, len(waiting))
                )
            except BadInput as wrong:
                error = wrong
            with writing(self.folder):
                error = self._check_metrics() or error
                table = self._table()
                text = json.dumps(table, ensure_ascii=False, indent=1)
                (self.folder / FILE).write_text(text + "\n", encoding="utf-8")
                (self.folder / TABLE).write_text(self._rows(), encoding="utf-8")
        if error is not None:
            raise error
        return Swept(self.folder, table)

    def _find(self) -> None:
        """What an earlier sweep has left."""
        for cell in self._cells:
            folder = self.folder / "cells" / cell.key
            whole = self._keep == "summary" or (folder / "requests.jsonl").exists()
            whole = whole and (self._keep != "all" or (folder / "events.jsonl").exists())
            if whole and not self._fresh and _told(folder).get("state") == "finished":
                cell.state = "kept"
                self._read(cell)

    def _heard(self, cell: Cell, told: Json) -> None:
        """A cell has ended. Raises BadInput where a metric is of no summary."""
        cell.state, cell.failure = told["state"], told["failure"]
        self._read(cell)
        if cell.metrics and self._asked:
            wrong = [path for path in self._metrics if cell.metrics[path] is _ABSENT]
            tops = [path for path in wrong if path.split(".")[0] not in self._summary(cell)]
            if tops:
                raise BadInput(self._unknown(tops, cell))

    def _summary(self, cell: Cell) -> Json:
        try:
            text = (self.folder / "cells" / cell.key / "summary.json").read_text(encoding="utf-8")
            found: Json = json.loads(text)
        except (OSError, ValueError):
            return {}
        return found

    def _read(self, cell: Cell) -> None:
        if summary := self._summary(cell):
            for path in self._metrics:
                try:
                    cell.metrics[path] = value_at(summary, path)
                except KeyError:
                    cell.metrics[path] = _ABSENT

    def _unknown(self, wrong: Sequence[str], cell: Cell) -> list[str]:
        known = list(paths_in(self._summary(cell)))
        return [f"--metric {path}: no summary has it; nearest: "
                f"{', '.join(nearest(path, known)) or 'none'}" for path in wrong]  # fmt: skip

    def _check_metrics(self) -> BadInput | None:
        """A metric that not one cell has is a mistake; one that some lack is empty there."""
        known = [cell for cell in self._cells if cell.metrics]
        wrong = [path for path in self._metrics
                 if known and all(cell.metrics[path] is _ABSENT for cell in known)]  # fmt: skip
        found = BadInput(self._unknown(wrong, known[0])) if wrong and self._asked else None
        for cell in known:
            cell.metrics = {p: None if v is _ABSENT else v for p, v in cell.metrics.items()}
        if not self._asked and known:
            self._metrics = tuple(
                path
                for path in self._metrics
                if any(cell.metrics[path] is not None for cell in known)
            )
        return found

    def _tell(self, progress: Progress | None, count: int) -> Callable[[float, int, str], None]:
        """How far it is, with an estimate of the time left from what the cells so far took."""
        watch, kept = Stopwatch(), sum(cell.state == "kept" for cell in self._cells)
        here = f", {kept:,} were here" if kept else ""
        known, stage = -1, ""

        def tell(done: float, ended: int, name: str) -> None:
            nonlocal known, stage
            if progress is None:
                return
            if ended > known:  # elsewhere than on a terminal, every stage is a line
                left = ""
                if 0 < ended < count:
                    left = f", {_roughly(watch.elapsed() * (count - done) / done)} left"
                known = ended
                stage = f"{ended:,}/{count:,} cells{here}{left}{f': {name}' if name else ''}"
            progress(stage, done / max(1, count))

        return tell

    # -- the table ---------------------------------------------------------------------------------

    def _table(self) -> Json:
        return {
            "schema": SCHEMA,
            "name": self._name,
            "axes": [{"path": axis.path, "values": list(axis.values)} for axis in self._axes],
            "metrics": list(self._metrics),
            "code": code(),
            "interrupted": self._interrupted,
            "left_out": {name: list(texts) for name, texts in self._left_out.items()},
            "points": [self._point(of) for of in self._by_setting()],
            "cells": [
                {
                    "name": cell.name,
                    "changes": dict(cell.setting.changes),
                    "seed": cell.seed,
                    "state": cell.state,
                    "failure": cell.failure,
                    "folder": f"cells/{cell.key}",
                    "metrics": {path: cell.metrics.get(path) for path in self._metrics},
                }
                for cell in self._cells
            ],
        }

    def _by_setting(self) -> Iterator[list[Cell]]:
        groups: dict[str, list[Cell]] = {}
        for cell in self._cells:
            groups.setdefault(cell.setting.name, []).append(cell)
        yield from groups.values()

    def _point(self, cells: Sequence[Cell]) -> Json:
        """A setting: means over its seeds, with intervals of 95 % (Student's) where there are two
        and more; texts as the first has them.
        """
        return {
            "name": cells[0].setting.name,
            "changes": dict(cells[0].setting.changes),
            "seeds": sum(bool(cell.metrics) for cell in cells),
            "failed": sum(cell.state == "failed" for cell in cells),
            "metrics": {
                path: over_seeds([c.metrics[path] for c in cells if c.metrics])
                for path in self._metrics
            },
        }

    def _rows(self) -> str:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*(axis.path for axis in self._axes), "seed", "state", *self._metrics,
                       "folder", "failure"])  # fmt: skip
        for cell in self._cells:
            rows.writerow(
                [
                    *(cell.setting.changes[axis.path] for axis in self._axes),
                    cell.seed,
                    cell.state,
                    *(cell.metrics.get(path) for path in self._metrics),
                    f"cells/{cell.key}",
                    cell.failure,
                ]
            )
        return text.getvalue()


BY_RUNS = ("schema", "name", "seed", "clock", "wall_s", "virtual_s", "digest", "interrupted",
           "faults", "loop_lag_s", "provenance")  # fmt: skip
"""Keys of summary.json that do not follow from a trace."""
BY_NAMES = ("links", "instances")
"""Those with a key for each name in the scenario."""
OPEN = ("pipelines", "router", "anomaly", "cache_drift", "invariants", "recovery", "cost", "parity")
"""Those of which a run shows what stands in them."""


def _no_metric(path: str, settings: Sequence[Setting]) -> str:
    """Why no summary of these settings can have such a number; "" where one may. Known before
    anything runs: names of all that a summary holds, and that a distribution is no number.
    """
    empty = summary(Recorder({}), None, None, {})
    top, _, rest = path.partition(".")
    known = [p for p in paths_in(empty) if p.split(".")[0] not in (*OPEN, *BY_NAMES)]
    if top in BY_NAMES:
        names = list(dict.fromkeys(n for s in settings for n in getattr(s.scenario, top)))
        if any(rest.startswith(f"{name}.") for name in names):
            return ""
        known = [f"{top}.{name}" for name in names]
        return f"--metric {path}: no summary has it; known: {', '.join(known)}, each with its own"
    if top in (*BY_RUNS, *OPEN) or path in known:
        return ""
    inside = [p for p in known if p.startswith(f"{path}.")]
    if inside:
        return f"--metric {path}: is no single number; allowed: {', '.join(inside)}"
    if top in empty and not isinstance(empty[top], dict):
        return f"--metric {path}: no summary has it; nearest: {top}"
    near = ", ".join(nearest(path, known)) or f"none of {', '.join(empty)}"
    return f"--metric {path}: no summary has it; nearest: {near}"


_ABSENT: Any = object()
"""A path that a summary does not have."""


def _roughly(time: float) -> str:
    seconds = max(1, round(time / SECOND))
    if seconds < 100:
        return f"{seconds} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _told(folder: Path) -> Json:
    try:
        found = json.loads((folder / CELL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
