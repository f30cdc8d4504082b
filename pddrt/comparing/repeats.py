"""One scenario with several seeds: a run folder for each, and what they come to together.

    repeat.json     every number of summary.json as mean, interval, smallest and largest over seeds
    seed-N/         the run with seed N

A seed is what a run draws from: when requests come, how long they are, what jitter and faults do.
Under the wall clock this machine's noise comes on top. Intervals are Student's, of 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pddrt.comparing.contrast import plain
from pddrt.comparing.grid import grid, refuse
from pddrt.comparing.intervals import MAX_SEEDS, over_seeds
from pddrt.document import Document
from pddrt.errors import BadInput, Interrupted, PddrtError, RunFailed
from pddrt.hosting import claim, free_folder, signals_to, writing
from pddrt.run import Result, Run
from pddrt.trace import Event, Finished, Seconds, dumps
from pddrt.types import SECOND

Json = dict[str, Any]
Progress = Callable[[str, float | None], None]

SCHEMA = 1
FILE = "repeat.json"
NO_NUMBERS = ("schema", "seed", "provenance", "cache_drift", "faults", "invariants")
"""Parts of a summary that repeating says nothing about."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The table, as in repeat.json, and the folder it lies in."""

    folder: Path
    table: Json

    def raise_for_status(self) -> None:
        """Raises Interrupted, or RunFailed with what went wrong with which seed."""
        if self.table["interrupted"]:
            raise Interrupted(f"interrupted; what was measured is saved in {self.folder}")
        wrong = [f"seed {run['seed']}: {run['failure']}"
                 for run in self.table["runs"] if run["failure"]]  # fmt: skip
        if wrong:
            raise RunFailed("\n".join(wrong))


class Repeats:
    """`prepare`, then `execute`, as a `Run`."""

    def __init__(
        self, base: str | Path | Document, overrides: Sequence[str] = (), *, repeat: int,
        seed: int | None = None, clock: str | None = None, out: Path | None = None,
        prompt: str | None = None, verify: bool = False,
    ) -> None:  # fmt: skip
        """`repeat`: so many seeds, from the scenario's own on. Raises BadInput."""
        if not 1 <= repeat <= MAX_SEEDS:
            raise BadInput(f"--repeat: found {repeat}; allowed: 1 to {MAX_SEEDS:,} seeds")
        found, problems = grid(base, (), overrides, seed=seed, clock=clock, scripted=False)
        refuse(problems, 1)
        (setting,) = found
        self.scenario = setting.scenario
        self.folder = free_folder(out, self.scenario.name, FILE, "set of repeated runs")
        first = self.scenario.seed
        self._runs = [
            Run(setting.seeded(n), out=self.folder / f"seed-{n}", prompt=prompt, verify=verify)
            for n in range(first, first + repeat)
        ]
        self._interrupted = False
        self._running: Run | None = None

    def prepare(self, progress: Progress | None = None) -> None:
        """Raises BadInput, CannotRun."""
        ready: list[Run] = []
        for run in self._runs:
            run.prepare(progress, ready)
            ready.append(run)

    def execute(self, progress: Progress | None = None) -> Repeated:
        """Runs seed after seed and writes the folder, also when it is interrupted. Raises CannotRun
        where a run cannot start or the folder cannot be written; what was measured is saved.
        """
        results: list[Result] = []
        error: PddrtError | None = None
        with signals_to(self.interrupt):
            claim(self.folder, FILE)
            try:
                for number in range(len(self._runs)):
                    if self._interrupted:
                        break
                    results.append(self._executed(number, progress))
            except PddrtError as stopped:
                error = stopped
            table = self._table(results)
            with writing(self.folder):
                (self.folder / FILE).write_text(dumps(table) + "\n", encoding="utf-8")
        if error is not None:
            raise error
        return Repeated(self.folder, table)

    def interrupt(self) -> None:
        """The run under way ends gently, and no other begins; from any thread."""
        self._interrupted = True
        if self._running is not None:
            self._running.interrupt()

    def _executed(self, number: int, progress: Progress | None) -> Result:
        run, total = self._runs[number], len(self._runs)
        tell = progress or (lambda stage, share: None)
        stage, virtual = f"{number + 1}/{total} seed {run.scenario.seed}", _virtual(run)
        done = 0

        def hear(event: Event) -> None:
            nonlocal done
            if isinstance(event, Finished):
                done += 1
                tell(stage, done / run.expected_requests)

        if virtual:  # under the wall clock a slow terminal would cost the time that is measured
            run.listen(hear)
        tell(stage, 0.0 if virtual else None)
        self._running = run
        result = run.execute(lambda what, share: tell(f"{stage}: {what}", share))
        self._interrupted |= result.interrupted
        return result

    def _table(self, results: Sequence[Result]) -> Json:
        scenario = self.scenario
        return {
            "schema": SCHEMA,
            "name": scenario.name,
            "clock": scenario.clock,
            "interrupted": self._interrupted,
            "seeds": [result.summary["seed"] for result in results],
            "runs": [
                {
                    "seed": result.summary["seed"],
                    "folder": result.folder.name,
                    "digest": result.summary["digest"],
                    "failure": _failure(result),
                }
                for result in results
            ],
            "numbers": together([result.summary for result in results]),
        }


def _virtual(run: Run) -> bool:
    return run.scenario.clock == "virtual"


def _failure(result: Result) -> str:
    try:
        result.raise_for_status()
    except Interrupted:
        return "interrupted"
    except RunFailed as error:
        return str(error)
    return ""


def together(summaries: Sequence[Mapping[str, Any]]) -> Json:
    """Every number of the summaries, told over them; times in seconds."""
    keys = dict.fromkeys(key for s in summaries for key in s if key not in NO_NUMBERS)
    found = {key: _together([s.get(key) for s in summaries]) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def _together(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], Mapping):
        keys = dict.fromkeys(key for value in known for key in value)
        found = {key: _together([value.get(key) for value in known]) for key in keys}
        return {key: value for key, value in found.items() if value is not None} or None
    numbers = [
        plain(v) / SECOND if isinstance(v, Seconds) else v
        for v in known
        if isinstance(v, (int, float, Seconds)) and not isinstance(v, bool)
    ]
    return over_seeds(numbers) if numbers else None
