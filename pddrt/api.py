"""pddrt from Python: `pddrt.run`, `pddrt.comparing.columns`, `pddrt.sweeping.table`, `pddrt.open`.

    import pddrt

    run = pddrt.run("scenarios/tiny.yaml", wan__rate="20 Mbit/s", seed=3)
    run.summary.ttft_s.p90          # or run.summary["ttft_s"]["p90"]
    run.requests                    # a data frame, where pandas or polars is installed
    run.report()                    # report.html and trace.json

What is wrong raises an exception of `pddrt.errors`; nothing is printed, nothing exits. All of it
works in a notebook, where an event loop is running already: there the run gets a thread of its own,
and the call returns when it has ended.

Everything heavy is imported when it is first needed: `import pddrt` costs next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Self, TypeVar

import pddrt.comparing.columns as compare_module
import pddrt.sweeping.table as sweep_module
from pddrt import arguments, document
from pddrt.arguments import checked
from pddrt.comparing.columns import columns
from pddrt.document import Document, Keys
from pddrt.errors import BadInput, PddrtError
from pddrt.results import Compared, Run, Swept
from pddrt.run import Result
from pddrt.run import Run as Execution
from pddrt.scenario import Scenario, validated
from pddrt.sweeping.table import settings
from pddrt.sweeping.worker import Keep
from pddrt.trace import Event, Finished
from pddrt.units import shown

T = TypeVar("T")
Progress = Callable[[str, float | None], None]
Source = str | Path | Mapping[str, Any] | Scenario
"""A file, YAML as text, plain data, or a scenario that was loaded before."""


# -- running ---------------------------------------------------------------------------------------


@checked
def run(
    scenario: Source, overrides: Mapping[str, Any] | None = None, *, seed: int | None = None,
    clock: str | None = None, out: str | Path | None = None, prompt: str | None = None,
    verify: bool = False, quiet: bool = True, listen: Callable[[Event], None] | None = None,
    check: bool = True, **fields: Any,
) -> Run:  # fmt: skip
    """Runs a scenario and returns what it came to.

    `overrides`: {"links.wan.rate": "20 Mbit/s"}; `fields`: the same with two underscores for each
    dot, `links__wan__rate="20 Mbit/s"`; the name of a link or of an instance may stand for its
    whole path: `wan__rate`. `out`: the run's folder; without it, a temporary one that goes away
    with the result (see `Run.save`). `quiet=False` shows on stderr how far it is. `listen` hears
    every event as it happens, in the run's thread. `check=False` returns also runs that did not end
    as they must (`Run.failure`), instead of raising RunFailed.

    Raises the exceptions of `pddrt.errors`; Interrupted and RunFailed have the result in `run`.
    """
    made = validated(_written(scenario, overrides, fields), (), seed, clock)
    with _Place(out) as place, _progress(quiet) as progress:
        execution = Execution(made, out=place.folder, prompt=prompt, verify=verify)
        if listen is not None:
            execution.listen(listen)

        def work() -> Result:
            execution.prepare(progress)
            if progress is not None:
                execution.listen(_Share(execution, progress))
            return execution.execute(progress)

        result = _in_peace(work, execution.interrupt)
        failed = _failure(result)
        found = Run(result.folder, str(failed or ""), result.interrupted)
        place.goes_with(found)
    if failed is not None and check:
        failed.run = found  # type: ignore[attr-defined]
        raise failed
    return found


@checked
def open(folder: str | Path) -> Run:
    """A run that was recorded before, however much of it there is. Raises BadInput for a folder
    that is none.
    """
    return Run(Path(folder))


@checked
def compare(
    scenario: Source, overrides: Mapping[str, Any] | None = None, *,
    policies: str | Sequence[str] | None = None, vary: Mapping[str, Any] | None = None,
    baseline: str | None = None, repeat: int = 1, seed: int | None = None, clock: str | None = None,
    out: str | Path | None = None, verify: bool = False, quiet: bool = True, check: bool = True,
    **fields: Any,
) -> Compared:  # fmt: skip
    """The same requests under each policy and each value of `vary`: {"links.wan.rate": ["20
    Mbit/s", "1 Gbit/s"]}, or as text, as in `--vary`. The rest as for `run`.
    """
    written = _written(scenario, overrides, fields)
    made = columns(
        written, policies=_listed(policies), vary=_varied(vary, written), seed=seed, clock=clock
    )
    with _Place(out) as place, _progress(quiet) as progress:
        comparison = compare_module.Comparison(
            made, out=place.folder, baseline=baseline, repeat=repeat, verify=verify
        )

        def work() -> compare_module.Compared:
            comparison.prepare(progress)
            return comparison.execute(progress)

        result = _in_peace(work, comparison.interrupt)
        found = Compared(result, [column.name for column in made])
        place.goes_with(found)
    if check:
        result.raise_for_status()
    return found


@checked
def sweep(
    scenario: Source, overrides: Mapping[str, Any] | None = None, *,
    vary: Mapping[str, Any] | None = None, policies: str | Sequence[str] | None = None,
    repeat: int = 1, metrics: Sequence[str] = (), jobs: int = 1, max_runs: int | None = None,
    keep: Keep = "summary", fresh: bool = False, seed: int | None = None, clock: str | None = None,
    out: str | Path | None = None, quiet: bool = True, check: bool = True, **fields: Any,
) -> Swept:  # fmt: skip
    """A grid of settings, cell by cell in processes of their own; see `pddrt sweep`. With `out` it
    is resumable: the same call goes on where it was. The rest as for `compare`.
    """
    written = _written(scenario, overrides, fields)
    axes, sound, _ = settings(
        written, policies=_listed(policies), vary=_varied(vary, written), seed=seed, clock=clock
    )
    with _Place(out) as place, _progress(quiet) as progress:
        result = sweep_module.Sweep(
            axes, sound, out=place.folder, repeat=repeat, jobs=jobs, max_runs=max_runs,
            metrics=[metrics] if isinstance(metrics, str) else metrics, keep=keep, fresh=fresh,
        ).execute(progress)  # fmt: skip
        found = Swept(result)
        place.goes_with(found)
    if check:
        result.raise_for_status()
    return found


def _failure(result: Result) -> PddrtError | None:
    try:
        result.raise_for_status()
    except PddrtError as error:
        return error
    return None


def _in_peace(work: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """What `work` returns or raises. A thread in which an event loop is running (a notebook's)
    cannot have a second one: there `work` gets a thread of its own, and Ctrl-C ends it gently, a
    second one at once.
    """
    if not _loop_is_running():
        return work()
    found: list[T] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def caught() -> None:
        try:
            found.append(work())
        except BaseException as error:  # it is raised again where it belongs
            failed.append(error)
        finally:
            over.set()

    threading.Thread(target=caught, name="pddrt", daemon=True).start()
    while not over.is_set():  # not join: when Ctrl-C ends that, Python takes the thread for over
        try:
            over.wait()
        except KeyboardInterrupt:
            interrupt()
    if failed:
        raise failed[0]
    return found[0]


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- what is given ---------------------------------------------------------------------------------


def _written(
    scenario: Source, overrides: Mapping[str, Any] | None, fields: Mapping[str, Any]
) -> Document:
    """The scenario as a document of our own, with the overrides laid over it. Raises BadInput."""
    written = _document(scenario)
    given = [(path, value, path) for path, value in (overrides or {}).items()]
    given += [(name.replace("__", "."), value, name) for name, value in fields.items()]
    problems: list[str] = []
    for path, value, option in given:
        try:
            written.put(_keys(path, written), _plain(value, option), option)
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(problems)
    return written


def _document(scenario: Source) -> Document:
    if isinstance(scenario, Scenario):
        written = scenario._origin.written
        if written is None:
            return document.parse(scenario.dump(), scenario.name)
        return deepcopy(written)
    if isinstance(scenario, Mapping):
        data = _plain(scenario, "scenario")
        return Document("scenario", data, {(key,): "scenario" for key in data})
    if isinstance(scenario, str) and ("\n" in scenario or scenario.lstrip().startswith("{")):
        return document.parse(scenario, "scenario")
    given: object = scenario
    if not isinstance(given, (str, os.PathLike)):  # a number would be an open file of ours
        arguments.refuse("scenario", given, "a path, YAML as text, a mapping or a Scenario")
    return document.read(scenario)


def _keys(path: str, written: Document) -> Keys:
    """Where a dotted path leads. A first word that is no section may be a link or an instance."""
    keys = path.split(".")
    if not all(re.fullmatch(r"[\w-]+", key) for key in keys):
        raise BadInput(f"{shown(path)}: write it as links.wan.rate or links__wan__rate")
    if keys[0] not in Scenario.model_fields:
        of = {key: written.data.get(key) for key in ("links", "instances")}
        inside = [key for key, names in of.items()
                  if isinstance(names, Mapping) and keys[0] in names]  # fmt: skip
        if len(inside) > 1:
            raise BadInput(f"{shown(path)}: {keys[0]} is a link and an instance; allowed: "
                           f"links.{path} or instances.{path}")  # fmt: skip
        keys = [*inside, *keys]
    return tuple(int(key) if key.isascii() and key.isdigit() else key for key in keys)


def _plain(value: Any, option: str) -> Any:
    """As YAML has it: dicts, lists, texts, numbers. Raises BadInput for anything else."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, option) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, option) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):  # a number of numpy
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise BadInput(f"{option}: found {type(value).__name__}; allowed: what YAML can hold")


def _listed(values: str | Sequence[str] | None) -> str | None:
    return values if values is None or isinstance(values, str) else ",".join(values)


def _varied(vary: Mapping[str, Any] | None, written: Document) -> list[str]:
    """As `--vary` takes them. What is no text is written in YAML's flow style, which JSON is."""

    def one(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(_plain(value, "vary"))

    return [
        ".".join(map(str, _keys(path.replace("__", "."), written)))
        + f"={values if isinstance(values, str) else ','.join(map(one, values))}"
        for path, values in (vary or {}).items()
    ]


class _Place:
    """The folder that results go to: the caller's, or one that goes away with them."""

    def __init__(self, out: str | Path | None) -> None:
        self._temporary = None if out is not None else Path(tempfile.mkdtemp(prefix="pddrt-"))
        self.folder = self._temporary or Path(out or "")
        self._kept = False

    def goes_with(self, result: object) -> None:
        self._kept = True
        if self._temporary is not None:
            weakref.finalize(result, shutil.rmtree, self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None and not self._kept:
            shutil.rmtree(self._temporary, ignore_errors=True)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """Nothing, or a bar on stderr (a line a stage where that is no terminal)."""
    if quiet:
        yield None
        return
    from rich.console import Console

    from pddrt.live import Bars

    with Bars(Console(file=sys.stderr, markup=False, emoji=False, highlight=False)) as bars:
        yield bars


class _Share:
    """Listens to a run and tells what share of its requests has ended."""

    def __init__(self, execution: Execution, progress: Progress) -> None:
        self._expected = execution.expected_requests
        self._stage = f"running {execution.scenario.name}"
        self._progress = progress
        self._done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._done += 1
            self._progress(self._stage, self._done / self._expected)
