"""A worker of a sweep: a process that runs one cell after another.

`python -m pddrt.sweeping.worker` reads a line of JSON for each cell from stdin, runs it and answers
with a line on stdout; it ends with its input. A process of its own for each worker, rather than a
pool of Python's: nothing of the caller's program is imported again, a cell that dies takes nobody
with it, and ending the worker ends its cell. It is in a session of its own, so that Ctrl-C reaches
the sweep alone, which then decides.

    in   {"file", "data", "seed", "folder", "keep"}     a scenario, and where its run belongs
    out  {"share"} ..., then {"state", "failure", "wall_s"}

A cell is whole or not there: it runs in FOLDER.part, which takes its name when all is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from pddrt.document import Document
from pddrt.env import Stopwatch
from pddrt.errors import Interrupted, PddrtError, RunFailed
from pddrt.run import Run
from pddrt.scenario import validated
from pddrt.trace import Event, Finished
from pddrt.types import SECOND

Json = dict[str, Any]
Keep = Literal["summary", "requests", "all"]

KEPT: dict[str, tuple[str, ...]] = {
    "summary": ("scenario.yaml", "summary.json"),
    "requests": ("scenario.yaml", "summary.json", "requests.jsonl"),
}
"""The files of a cell that are kept; all where it is not said."""
CELL = "cell.json"
"""Written last: how the cell ended."""
REPORTS = 50
"""So many times at most a cell tells how far it is."""


class Worker:
    """Keeps the last run, whose model and workload the next may share."""

    def __init__(self) -> None:
        self._last: list[Run] = []

    def run(self, job: Json, answer: TextIO) -> Json:
        """One cell. What is wrong with it is its answer."""
        folder = Path(job["folder"])
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        watch = Stopwatch()
        try:
            failure = self._executed(job, part, answer)
            state = "failed" if failure else "finished"
        except Interrupted:
            raise
        except PddrtError as error:
            failure, state = str(error), "failed"
        failure = failure.replace("\n", "; ")  # a row of a table each
        told = {"state": state, "failure": failure, "wall_s": watch.elapsed() / SECOND}
        if part.is_dir():
            _settle(part, folder, job["keep"], told)
        return told

    def _executed(self, job: Json, part: Path, answer: TextIO) -> str:
        """Runs it; what it failed by, "" where it did not."""
        scenario = validated(Document(job["file"], job["data"], {}), (), job["seed"], None)
        run = Run(scenario, out=part)
        run.prepare(None, self._last)
        self._last = [run]
        run.listen(_Progress(run.expected_requests, answer))
        result = run.execute()
        try:
            result.raise_for_status()
        except RunFailed as error:
            return str(error)
        return ""


class _Progress:
    """Tells how many requests have ended, now and then."""

    def __init__(self, expected: int, answer: TextIO) -> None:
        self._expected = expected
        self._answer = answer
        self._done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._done += 1
            if (
                self._done * REPORTS // self._expected
                > (self._done - 1) * REPORTS // self._expected
            ):
                _tell(self._answer, {"share": self._done / self._expected})


def _settle(part: Path, folder: Path, keep: str, told: Json) -> None:
    """What is to be kept gets its name."""
    if keep in KEPT:
        for file in part.iterdir():
            if file.name not in KEPT[keep]:
                file.unlink()
    (part / CELL).write_text(json.dumps(told) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _tell(answer: TextIO, value: Json) -> None:
    answer.write(json.dumps(value) + "\n")
    answer.flush()


@contextlib.contextmanager
def _answers() -> Iterator[TextIO]:
    """The real stdout. What anything prints meanwhile (a user's policy) goes to stderr instead."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        yield answer


def main() -> None:
    worker = Worker()
    with _answers() as answer, contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in sys.stdin:
            _tell(answer, worker.run(json.loads(line), answer))


if __name__ == "__main__":
    main()
