"""Comparing settings: the same requests under each of them, side by side.

A column is one setting: a pipeline policy, values of other fields, or both. `columns` makes them
and refuses everything that is wrong with any of them at once; a `Comparison` runs them one after
the other and writes a folder of its own, with a run folder for each:

    compare.json    the table: numbers, ratios and pairs (see `contrast`)
    COLUMN/         that column's run (COLUMN.1, COLUMN.2 ... where it was run more than once)

**The same requests**: answers are scripted, so that no prompt holds what a column has made; a trace
brings whole prompts anyway. That is checked afterwards, id by id: a prompt that differs though
workload, seed and model are the same is a failure, not a comparison. What is generated is a
column's own, and so is its length: where rounding or lossy KV changes an answer, the pairs say so.

Under the virtual clock a run repeats to the nanosecond, so each column is run once, and a policy
compared with itself shows no difference. Under the wall clock there is noise: see `repeat`.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from pddrt import document
from pddrt.contrast import (
    COMPARED,
    Json,
    Outcome,
    Round,
    median,
    numbers,
    other_prompt,
    pairs,
    ratios,
)
from pddrt.document import Document
from pddrt.errors import BadInput, Interrupted, PddrtError, RunFailed
from pddrt.hosting import free_folder, signals_to, writing
from pddrt.run import Run
from pddrt.scenario import Scenario, validated
from pddrt.sections import unknown_name
from pddrt.trace import Event, Finished, dumps
from pddrt.units import shown

Progress = Callable[[str, float | None], None]

SCHEMA = 1
FILE = "compare.json"
MAX_COLUMNS = 64
MAX_ROUNDS = 100
POLICY = "pipeline.policy"
ANSWERS = "workload.answers"


# -- which columns there are -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """One setting. `changes`: the fields that make it, as they were given; `folder`: of its run."""

    name: str
    folder: str
    changes: Mapping[str, str]
    scenario: Scenario
    was_live: bool
    """Whether the scenario puts live answers into its prompts; here they are scripted."""

    @property
    def asks(self) -> tuple[Any, ...]:
        """What its requests follow from."""
        return (self.scenario.workload, self.scenario.seed, self.scenario.model)


def columns(
    path: str | Path, overrides: Sequence[str] = (), *, policies: str | None = None,
    vary: Sequence[str] = (), seed: int | None = None, clock: str | None = None,
) -> list[Column]:  # fmt: skip
    """A column for each policy (`pdd,naive`) with each value of each `path=v1,v2` in `vary`.

    Raises BadInput with all problems of all columns.
    """
    axes = list(_axes(policies, vary))
    settings = list(product(*(values for _, _, values in axes)))
    if len(settings) < 2:
        raise BadInput(
            "found one setting, and nothing to compare it with; allowed: at least two, as in "
            "--policies pdd,naive or --vary links.wan.rate='50 Mbit/s,1 Gbit/s'"
        )
    if len(settings) > MAX_COLUMNS:
        raise BadInput(f"found {len(settings)} settings in all; allowed: {MAX_COLUMNS} at most")
    names = _distinct(_names([path for _, path, _ in axes], settings))
    folders = _distinct(re.sub(r"[^A-Za-z0-9._=-]+", "-", n).strip("-.")[:100] for n in names)
    base, problems, found = document.read(path), dict[str, list[str]](), list[Column]()
    for name, folder, values in zip(names, folders, settings, strict=True):
        written, changes = deepcopy(base), {}
        try:
            wrong = list(_laid_over(written, overrides, "--set"))
            for (flag, path, _), value in zip(axes, values, strict=True):
                changes[path] = value
                wrong += _laid_over(written, [f"{path}={value}"], flag)
            was_live = _script_answers(written)
            scenario = validated(
                written, (), None if "seed" in changes else seed,
                None if "clock" in changes else clock,
            )  # fmt: skip
        except BadInput as error:
            problems[name] = [*wrong, *error.problems]
            continue
        problems[name] = wrong
        found.append(Column(name, folder, changes, scenario, was_live))
    _refuse(problems)
    return found


def _refuse(problems: Mapping[str, Sequence[str]]) -> None:
    """Raises BadInput where a column has problems; those that not all have say who does."""
    who: dict[str, list[str]] = {}
    for name, texts in problems.items():
        for text in dict.fromkeys(texts):
            who.setdefault(text, []).append(name)

    def said(text: str, names: list[str]) -> str:
        if len(names) == len(problems):
            return text
        more = [f"{len(names) - 3} more"] if len(names) > 4 else names[3:]
        return f"{text} (for {', '.join([*names[:3], *more])})"

    if who:
        raise BadInput([said(text, names) for text, names in who.items()])


def _laid_over(written: Document, specs: Iterable[str], flag: str) -> Iterator[str]:
    """Overrides a document; gives what cannot be."""
    for spec in specs:
        try:
            written.override(spec, flag)
        except BadInput as error:
            yield from error.problems


def _script_answers(written: Document) -> bool:
    """Whether live answers would have come into prompts. What is wrong there is left as it is."""
    workload = written.data.get("workload")
    if not isinstance(workload, dict) or workload.get("answers", "live") != "live":
        return False
    if workload.get("kind") in ("sessions", "poisson", "closed"):
        written.put(("workload", "answers"), "scripted", "compare")
    return workload.get("kind") == "sessions" and workload.get("turns", 1) != 1


def _axes(policies: str | None, vary: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(option, field, its values). Raises BadInput."""
    given = [("--policies", POLICY, policies)] if policies is not None else []
    for spec in vary:
        path, equals, text = spec.partition("=")
        if not equals:
            raise BadInput(f"--vary {shown(spec)}: write it as a.b=v1,v2")
        given.append(("--vary", path.strip(), text))
    seen: set[str] = set()
    for flag, path, text in given:
        values = list(_split(text))
        if not all(values):
            raise BadInput(f"{flag} {shown(text)}: found no value where a comma calls for one")
        if path in seen:
            raise BadInput(f"{flag}: found {path} a second time; allowed: once")
        if path == ANSWERS:
            raise BadInput(f"{flag} {path}: answers are always scripted here, so that all columns "
                           "have the same prompts; allowed: any other field")  # fmt: skip
        seen.add(path)
        yield flag, path, values


def _split(text: str) -> Iterator[str]:
    """The values between commas, but not between those inside brackets or quotes."""
    depth, quote, value = 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not value.strip():
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and depth <= 0 and not quote:
            yield value.strip()
            value = ""
        else:
            value += char
    yield value.strip()


def _names(paths: Sequence[str], settings: Iterable[Sequence[str]]) -> Iterator[str]:
    """A policy is called by its name, any other value by its field and itself."""
    shorts = [path.rpartition(".")[2] for path in paths]
    often = Counter(shorts)
    labels = [
        "" if path == POLICY else f"{short if often[short] == 1 else path}="
        for path, short in zip(paths, shorts, strict=True)
    ]
    for values in settings:
        yield " ".join(label + value for label, value in zip(labels, values, strict=True))


def _distinct(names: Iterable[str]) -> list[str]:
    """Namesakes get numbers."""
    taken: dict[str, None] = {}
    for name in names:
        number, free = 2, name
        while free in taken:
            number, free = number + 1, f"{name}-{number}"
        taken[free] = None
    return list(taken)


# -- running them ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """A column, the runs of it that are to come, and what the others have left."""

    column: Column
    waiting: list[Run]
    rounds: list[Round] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return list(dict.fromkeys(r.failure for r in self.rounds if r.failure))

    @property
    def state(self) -> str:
        if self.failures:
            return "failed"
        if not self.rounds:
            return "not run"
        return "interrupted" if self.waiting or self.rounds[-1].interrupted else "finished"


@dataclass(frozen=True, slots=True)
class Compared:
    """The table, as in compare.json, and the folder it lies in."""

    folder: Path
    table: Json

    def raise_for_status(self) -> None:
        """Raises Interrupted, or RunFailed with the failures of all columns."""
        if self.table["interrupted"]:
            raise Interrupted(f"interrupted; what was measured is saved in {self.folder}")
        wrong = [f"{c['name']}: {text}" for c in self.table["columns"] for text in c["failures"]]
        if wrong:
            raise RunFailed("\n".join(wrong))


class Comparison:
    """Columns, the baseline first: `prepare`, then `execute`."""

    def __init__(
        self, columns: Sequence[Column], *, out: Path | None = None, baseline: str | None = None,
        repeat: int = 1, verify: bool = False,
    ) -> None:  # fmt: skip
        """`baseline`: a column's name, None for the first. `repeat`: rounds of each column under
        the wall clock. `verify`: as for a `Run`.

        Raises BadInput for an unknown baseline, and for a folder that is not ours.
        """
        names = [column.name for column in columns]
        if baseline is not None and baseline not in names:
            raise BadInput(f"--baseline: {unknown_name(baseline, names)}")
        if not 1 <= repeat <= MAX_ROUNDS:
            raise BadInput(f"--repeat: found {repeat}; allowed: 1 to {MAX_ROUNDS} rounds")
        first = names.index(baseline) if baseline is not None else 0
        name = f"compare-{columns[0].scenario.name}"
        self.folder = free_folder(out, name, FILE, "comparison")
        self._interrupted = False
        self._places: list[_Place] = []
        for column in (columns[first], *columns[:first], *columns[first + 1 :]):
            rounds = repeat if column.scenario.clock == "wall" else 1
            parts = [f".{n}" for n in range(1, rounds + 1)] if rounds > 1 else [""]
            outs = [self.folder / (column.folder + part) for part in parts]
            runs = [Run(column.scenario, out=out, verify=verify) for out in outs]
            self._places.append(_Place(column, runs))

    def prepare(self, progress: Progress | None = None) -> None:
        """Prepares every run of every column; models and workloads are shared where they are the
        same. Raises BadInput with the problems of all columns, or CannotRun.
        """
        problems: dict[str, Sequence[str]] = {}
        ready: list[Run] = []
        for place in self._places:
            problems[place.column.name] = ()
            for run in place.waiting:
                try:
                    run.prepare(progress, ready)
                    ready.append(run)
                except BadInput as error:
                    problems[place.column.name] = error.problems
        _refuse(problems)

    def execute(self, progress: Progress | None = None) -> Compared:
        """Runs all columns and writes the folder, also when it is interrupted: then the run under
        way ends gently, and no other begins. Raises CannotRun where a run cannot start or the
        folder cannot be written; what was measured before is saved.
        """
        error: PddrtError | None = None
        with signals_to(self._interrupt):
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                # at once: it replaces that of an older comparison, and says whose folder this is
                (self.folder / FILE).write_text("{}\n", encoding="utf-8")
            try:
                self._run_all(progress or (lambda stage, done: None))
            except PddrtError as stopped:
                error = stopped
            table = self._table()
            with writing(self.folder):
                (self.folder / FILE).write_text(dumps(table) + "\n", encoding="utf-8")
        if error is not None:
            raise error
        return Compared(self.folder, table)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _run_all(self, progress: Progress) -> None:
        """In rounds over all columns: what changes on this machine meanwhile meets all of them."""
        total, number = sum(len(place.waiting) for place in self._places), 0
        while any(place.waiting for place in self._places):
            for place in (place for place in self._places if place.waiting):
                if self._interrupted:
                    return
                number += 1
                stage = f"{number}/{total} {place.column.name}"
                place.rounds.append(_executed(place.waiting.pop(0), stage, progress))
                self._interrupted |= place.rounds[-1].interrupted
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
        }

    def _entry(self, place: _Place, base: _Place) -> Json:
        """One column, with its ratios to the baseline and their pairs."""
        column = place.column
        entry: Json = {
            "name": column.name,
            "changes": column.changes,
            "seed": column.scenario.seed,
            "clock": column.scenario.clock,
            "rounds": len(place.rounds),
            "folders": [r.folder for r in place.rounds],
            "state": place.state,
            "failures": place.failures,
            "ratios": None,
            "pairs": None,
            "not_paired": None,
        }
        if not place.rounds:
            return entry
        entry |= (mine := median([r.numbers for r in place.rounds]))
        its = median([r.numbers for r in base.rounds])
        entry["ratios"] = {key: ratios(mine[key], its[key]) for key in COMPARED}
        if other := other_prompt(base.rounds, place.rounds):
            entry["not_paired"] = other
            if column.asks == base.column.asks:
                entry["state"] = "failed"
                entry["failures"].append(f"not the requests of {base.column.name}: {other}")
        elif place is not base:
            entry["pairs"] = pairs(base.rounds, place.rounds)
        return entry

    def _notes(self) -> Iterator[str]:
        """What a reader has to know of the numbers."""
        if any(place.column.was_live for place in self._places):
            yield "answers in the prompts are scripted, where the scenario has the model's own"
        wall = [len(p.rounds) for p in self._places if p.column.scenario.clock == "wall"]
        if wall and max(wall) <= 1:
            yield "wall clock, 1 round of each: noise is no difference; --repeat N tells them apart"
        elif wall:
            yield (f"wall clock, {max(wall)} rounds of each: numbers are medians; a request is "
                   "faster or slower only where no round of it says otherwise")  # fmt: skip
        for place in self._places:
            if any(r.numbers["fidelity"] not in ("ok", "exact") for r in place.rounds):
                yield (f"{place.column.name}: this machine was too busy to keep the network's "
                       "times (degraded)")  # fmt: skip


def _executed(run: Run, stage: str, progress: Progress) -> Round:
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
    wan = [name for name, link in run.scenario.links.items() if len(set(link.between)) > 1]
    return Round(
        folder=result.folder.name,
        numbers=numbers(result.summary, wan),
        outcomes={r.id: Outcome.of(r) for r in run.recorder.requests.values()},
        failure=failure,
        interrupted=result.interrupted,
    )
