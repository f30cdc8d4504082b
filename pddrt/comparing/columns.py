"""Comparing settings: the same requests under each of them, side by side.

A column is one setting: a pipeline policy, values of other fields, or both (see `grid`). `columns`
makes them and refuses everything that is wrong with any of them at once; a `Comparison` runs them
one after the other and writes a folder of its own, with a run folder for each:

    compare.json    the table: numbers, ratios, intervals and pairs (see `contrast`)
    deltas.csv      request by request: both times, and what each part of them changed by
    COLUMN/         that column's run (COLUMN.SEED where there is one for each of several seeds)

`comparing.page` draws compare.html from the same.

**The same requests**: answers are scripted, so that no prompt holds what a column has made. That is
checked afterwards, id by id: a prompt that differs though workload, seed and model are the same is
a failure, not a comparison. What is generated is a column's own, and so is its length: where
rounding or lossy KV changes an answer, the pairs say so.

With `repeat` every column runs with seeds s, s + 1, ...: the same for all. Under the virtual clock
a run repeats to the nanosecond, so a policy compared with itself shows no difference.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pddrt.comparing import axes
from pddrt.comparing.assertions import Assertion, Verdict
from pddrt.comparing.contrast import COMPARED, Json, Round, intervals, mean, ratios, seeded
from pddrt.comparing.grid import ANSWERS, Setting, grid, refuse
from pddrt.comparing.intervals import LEAST_SEEDS, MAX_SEEDS
from pddrt.comparing.pairing import DELTAS, Outcome, deltas, other_prompt, pairs
from pddrt.document import Document
from pddrt.errors import BadInput, Interrupted, PddrtError, RunFailed
from pddrt.hosting import claim, free_folder, signals_to, writing
from pddrt.run import Run
from pddrt.sections import unknown_name
from pddrt.trace import Event, Finished, dumps

Progress = Callable[[str, float | None], None]

SCHEMA = 2
FILE = "compare.json"
DELTAS_FILE = "deltas.csv"
MAX_COLUMNS = 64
MAX_RUNS = 10_000
"""Of all columns."""


def columns(
    base: str | Path | Document, overrides: Sequence[str] = (), *, policies: str | None = None,
    vary: Sequence[str] = (), seed: int | None = None, clock: str | None = None,
) -> list[Setting]:  # fmt: skip
    """A column for each policy (`pdd,naive`) with each value of each `path=v1,v2` in `vary`.

    Raises BadInput with all problems of all columns.
    """
    varied = axes.axes(policies, vary)
    if any(axis.path == ANSWERS for axis in varied):
        raise BadInput(f"--vary {ANSWERS}: answers are always scripted here, so that all columns "
                       "have the same prompts; allowed: any other field")  # fmt: skip
    count = 1
    for axis in varied:
        count *= len(axis.values)
    if count < 2:
        raise BadInput(
            "found one setting, and nothing to compare it with; allowed: at least two, as in "
            "--policies pdd,naive or --vary links.wan.rate='50 Mbit/s,1 Gbit/s'"
        )
    if count > MAX_COLUMNS:
        raise BadInput(f"found {count} settings in all; allowed: {MAX_COLUMNS} at most")
    found, problems = grid(base, varied, overrides, seed=seed, clock=clock)
    refuse(problems, count)
    return found


@dataclass(slots=True)
class Place:
    """A column, the runs of it that are to come, and what the others have left."""

    column: Setting
    waiting: list[Run]
    rounds: list[Round] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        many = len(self.rounds) > 1
        said = [(f"seed {r.seed}: " if many else "") + r.failure for r in self.rounds if r.failure]
        return list(dict.fromkeys(said))

    @property
    def ended(self) -> list[Round]:
        """Its rounds that were not interrupted."""
        return [r for r in self.rounds if not r.interrupted]

    @property
    def state(self) -> str:
        if self.failures:
            return "failed"
        if not self.rounds:
            return "not run"
        return "interrupted" if self.waiting or self.rounds[-1].interrupted else "finished"


@dataclass(frozen=True, slots=True)
class Compared:
    """The table, as in compare.json, the folder it lies in, and the runs it is made of, column by
    column.
    """

    folder: Path
    table: Json
    rounds: Sequence[Sequence[Round]]
    verdicts: Sequence[Verdict] = ()

    def judge(self, conditions: Sequence[Assertion]) -> list[Verdict]:
        """Raises BadInput for a condition about what no summary has."""
        trees: dict[str, Mapping[str, Any]] = {}
        for place, (names, of) in enumerate(zip(self.names, self.rounds, strict=True)):
            tree = {**self.table["columns"][place], **mean([r.summary for r in of])}
            trees |= dict.fromkeys(names, tree)
        return [condition.judge(trees) for condition in conditions]

    @property
    def names(self) -> list[tuple[str, str, str]]:
        """What each column may be called: by its name, its label, its place."""
        entries = enumerate(self.table["columns"], 1)
        return [(entry["name"], entry["label"], f"c{n}") for n, entry in entries]

    def raise_for_status(self) -> None:
        """Raises Interrupted, or RunFailed with the failures of all columns and the assertions that
        do not hold.
        """
        if self.table["interrupted"]:
            raise Interrupted(f"interrupted; what was measured is saved in {self.folder}")
        wrong = [f"{c['name']}: {text}" for c in self.table["columns"] for text in c["failures"]]
        wrong += [f"--assert {v.text}: false: {v.said}" for v in self.verdicts if not v.holds]
        if wrong:
            raise RunFailed("\n".join(wrong))


class Comparison:
    """Columns, the baseline first: `prepare`, then `execute`."""

    def __init__(
        self, columns: Sequence[Setting], *, out: Path | None = None, baseline: str | None = None,
        repeat: int = 1, verify: bool = False, assertions: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`baseline`: a column's name or label, None for the first. `repeat`: rounds of each
        column, with seeds from its own on. `verify`: as for a `Run`. `assertions`: see
        `pddrt.comparing.assertions`.

        Raises BadInput for an unknown baseline, for assertions that are none, and for a folder
        that is not ours.
        """
        names = [name for column in columns for name in dict.fromkeys((column.name, column.label))]
        if baseline is not None and baseline not in names:
            known = [column.name for column in columns]
            raise BadInput(f"--baseline: {unknown_name(baseline, known)}")
        if not 1 <= repeat <= MAX_SEEDS:
            raise BadInput(f"--repeat: found {repeat}; allowed: 1 to {MAX_SEEDS:,} seeds")
        if (total := len(columns) * repeat) > MAX_RUNS:
            raise BadInput(f"found {total:,} runs in all; allowed: {MAX_RUNS:,} at most")
        called = [baseline in (column.name, column.label) for column in columns]
        first = called.index(True) if baseline is not None else 0
        ordered = (columns[first], *columns[:first], *columns[first + 1 :])
        places = [f"c{n}" for n in range(1, len(ordered) + 1)]
        self._assertions = _parsed(assertions, [*names, *places])
        name = f"compare-{columns[0].scenario.name}"
        self.folder = free_folder(out, name, FILE, "comparison")
        self._interrupted = False
        self._running: Run | None = None
        self._places: list[Place] = []
        for column in ordered:
            seeds = range(column.scenario.seed, column.scenario.seed + repeat)
            runs = [
                Run(
                    column.seeded(seed),
                    out=self.folder / (column.folder + (f".{seed}" if repeat > 1 else "")),
                    verify=verify,
                )
                for seed in seeds
            ]
            self._places.append(Place(column, runs))

    def prepare(self, progress: Progress | None = None) -> None:
        """Prepares every run of every column; models and workloads are shared where they are the
        same. Raises BadInput with the problems of all columns, or CannotRun.
        """
        problems: dict[str, Sequence[str]] = {}
        ready: list[Run] = []
        for place in self._places:
            for run in place.waiting:
                try:
                    run.prepare(progress, ready)
                    ready.append(run)
                except BadInput as error:
                    problems[place.column.name] = error.problems
        refuse(problems, len(self._places))

    def execute(self, progress: Progress | None = None) -> Compared:
        """Runs all columns and writes the folder, also when it is interrupted: then the run under
        way ends gently, and no other begins. Raises CannotRun where a run cannot start or the
        folder cannot be written, BadInput for an assertion about what no summary has; what was
        measured before is saved.
        """
        error: PddrtError | None = None
        with signals_to(self.interrupt):
            claim(self.folder, FILE)
            try:
                self._run_all(progress or (lambda stage, done: None))
            except PddrtError as stopped:
                error = stopped
            table = self._table()
            rounds = [place.rounds for place in self._places]
            compared = Compared(self.folder, table, rounds)
            if error is None and not self._interrupted:
                try:
                    compared = replace(compared, verdicts=compared.judge(self._assertions))
                except BadInput as wrong:
                    error = wrong
            table["assertions"] = [
                {"text": v.text, "holds": v.holds, "values": v.said} for v in compared.verdicts
            ]
            with writing(self.folder):
                (self.folder / FILE).write_text(dumps(table) + "\n", encoding="utf-8")
                self._write_deltas(table)
        if error is not None:
            raise error
        return compared

    def interrupt(self) -> None:
        """The run under way ends gently, and no other begins; from any thread."""
        self._interrupted = True
        if self._running is not None:
            self._running.interrupt()

    def _run_all(self, progress: Progress) -> None:
        """In rounds over all columns: what changes on this machine meanwhile meets all of them."""
        total, number = sum(len(place.waiting) for place in self._places), 0
        while any(place.waiting for place in self._places):
            for place in (place for place in self._places if place.waiting):
                if self._interrupted:
                    return
                number += 1
                stage = f"{number}/{total} {place.column.name}"
                self._running = place.waiting.pop(0)
                place.rounds.append(executed(self._running, stage, progress))
                self._interrupted |= place.rounds[-1].interrupted
                self._running = None
                gc.collect()  # roles and their pools are circles, and the pools are large

    # -- the table ---------------------------------------------------------------------------------

    def _table(self) -> Json:
        base = self._places[0]
        return {
            "schema": SCHEMA,
            "name": base.column.scenario.name,
            "baseline": base.column.name,
            "interrupted": self._interrupted,
            "notes": list(self._notes()),
            "columns": [self._entry(place, base) for place in self._places],
            "assertions": [],
        }

    def _entry(self, place: Place, base: Place) -> Json:
        """One column, with its ratios to the baseline and their pairs."""
        column = place.column
        entry: Json = {
            "name": column.name,
            "label": column.label,
            "changes": column.changes,
            "seed": column.scenario.seed,
            "seeds": [r.seed for r in place.rounds],
            "clock": column.scenario.clock,
            "rounds": len(place.rounds),
            "folders": [r.folder for r in place.rounds],
            "state": place.state,
            "failures": place.failures,
            "ratios": None,
            "intervals": None,
            "pairs": None,
            "not_paired": None,
        }
        if not place.rounds or not base.rounds:
            return entry
        # A run that was interrupted has other requests than one that was not: its numbers are told,
        # but never held against another's. With several seeds those that ended speak for it.
        ended, theirs = place.ended, base.ended
        entry |= (mine := mean([r.numbers for r in ended or place.rounds]))
        # Where a comparison was interrupted, some have more seeds than others.
        its, here = shared(theirs, ended)
        if ended and theirs:
            other = other_prompt(seeded(its or theirs), seeded(here or ended))
            if its:
                mine = mean([r.numbers for r in here])
            reference = mean([r.numbers for r in its or theirs])
            entry["ratios"] = {key: ratios(mine[key], reference[key]) for key in COMPARED}
        else:
            its, here = shared(base.rounds, place.rounds)
            other = other_prompt(seeded(its), seeded(here))
        if other:
            entry["not_paired"] = other
            if its and column.asks == base.column.asks:
                entry["state"] = "failed"
                entry["failures"].append(f"not the requests of {base.column.name}: {other}")
            return entry
        if ended and theirs:
            entry["intervals"] = intervals(its, its if place is base else here)
        if place is not base:
            entry["pairs"] = pairs(seeded(its), seeded(here))
        return entry

    def _write_deltas(self, table: Json) -> None:
        base = seeded(self._places[0].rounds)
        with (self.folder / DELTAS_FILE).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(DELTAS)
            for place, entry in zip(self._places, table["columns"], strict=True):
                if entry["pairs"] is not None:
                    rows.writerows(deltas(place.column.name, base, seeded(place.rounds)))

    def _notes(self) -> Iterator[str]:
        """What a reader has to know of the numbers."""
        if any(place.column.was_live for place in self._places):
            yield "answers in the prompts are scripted, where the scenario has the model's own"
        most = max(len(place.rounds) for place in self._places)
        if most > 1:
            yield f"{most} seeds of each: numbers are means over them"
        wall = any(place.column.scenario.clock == "wall" for place in self._places)
        if wall and most < LEAST_SEEDS:
            yield (f"wall clock, runs of each: {most}; this machine's noise is in all differences, "
                   f"and --repeat {LEAST_SEEDS} or more tells them apart")  # fmt: skip
        for place in self._places:
            if any(r.numbers["fidelity"] not in ("ok", "exact") for r in place.rounds):
                yield (f"{place.column.name}: this machine was too busy to keep the network's "
                       "times (degraded)")  # fmt: skip


def shared(base: Sequence[Round], here: Sequence[Round]) -> tuple[list[Round], list[Round]]:
    """The rounds of both that have a seed in common."""
    seeds = {r.seed for r in base} & {r.seed for r in here}
    return [r for r in base if r.seed in seeds], [r for r in here if r.seed in seeds]


def _parsed(texts: Sequence[str], names: Sequence[str]) -> list[Assertion]:
    found, problems = [], list[str]()
    for text in texts:
        try:
            found.append(Assertion(text, names))
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(problems)
    return found


def executed(run: Run, stage: str, progress: Progress) -> Round:
    """Runs it. Nothing is shown meanwhile under the wall clock, where a slow terminal would cost
    the time that is measured.
    """
    done, virtual = 0, run.scenario.clock == "virtual"

    def hear(event: Event) -> None:
        nonlocal done
        if isinstance(event, Finished):
            done += 1
            progress(stage, done / run.expected_requests)

    if virtual:
        run.listen(hear)
    progress(stage, 0.0 if virtual else None)
    result = run.execute(lambda what, share: progress(f"{stage}: {what}", share))
    failure = ""
    try:
        result.raise_for_status()
    except Interrupted:
        pass
    except RunFailed as error:
        failure = str(error)
    return Round(
        folder=result.folder.name,
        seed=run.scenario.seed,
        summary=result.summary,
        outcomes={r.id: Outcome.of(r) for r in run.recorder.requests.values()},
        wan=[name for name, link in run.scenario.links.items() if len(set(link.between)) > 1],
        failure=failure,
        interrupted=result.interrupted,
    )
