"""`pddrt inspect`: a recorded run, one request of it, a moment of it; walking through it.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from pddrt.inspection.recorded import Recorded

PIPED = 10_000
"""Columns of a table that goes to no terminal."""
WIDEST = 160
"""Of bars."""
SHORT_HELP = "Look into a recorded run: its requests, one of them, any moment of it."


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


def inspect(
    context: typer.Context,
    run_folder: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    request: Annotated[
        str | None,
        typer.Argument(metavar="[REQUEST]", help="A request's id, e.g. s0.0.", show_default=False),
    ] = None,
    where: Annotated[
        str | None,
        _option("EXPR", "Only requests for which this is true: 'ttft_s>2 and pipeline=p-rld-md'."),
    ] = None,
    sort: Annotated[
        str | None, _option("FIELD[:desc]", "In the order of a field; what is missing last.")
    ] = None,
    columns: Annotated[
        str | None, _option("A,B,...", "These fields, e.g. ttft_s,handoff.gap_s; ? lists them.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            show_default=False,
            help="At most so many requests; 0: all. Default: 100 on a terminal, else all.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        _option(
            "EVENT",
            "What both sides had after an event: its number, a time (1.5 s), or s0.0:HandoffBegan.",
        ),
    ] = None,
    step: Annotated[
        bool,
        typer.Option("--step", help="Walk on from there by commands on stdin; h tells which."),
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="With --until or --step: run it again under the virtual clock, holding each event "
            "against the recording.",
        ),
    ] = False,
    regret: Annotated[
        bool,
        typer.Option("--regret", help="What the router lost: every request by each pipeline."),
    ] = False,
    violations: Annotated[
        bool,
        typer.Option("--violations", help="Invariants that were violated, and what led to it."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="The same as JSON on stdout, and nothing else.")
    ] = False,
) -> None:
    """A recorded run: a table of its requests. With a request: where its time went, its handoff
    turn by turn, what it would have cost by way of other pipelines, and its events in order.
    """
    from pddrt.inspection import recorded

    asked = _Asked(where, sort, columns, limit)
    _check(asked, request, until, step, replay, regret, violations, json)
    terminal: Terminal = context.obj
    with terminal.outlet() as outlet:
        console = terminal.console(outlet)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = PIPED  # for a program: a line each
        with terminal.signals_end_it():
            run = recorded.opened(Path(run_folder))
            shower = _Shower(console, terminal.console(sys.stderr), outlet, json)
            if step or until is not None:
                shower.moment(run, until, step, replay)
            elif regret:
                shower.regret(run)
            elif violations:
                shower.violations(run)
            elif request is not None:
                shower.request(run, request)
            else:
                shower.table(run, asked)


class _Asked:
    """How the table is to be."""

    def __init__(
        self, where: str | None, sort: str | None, columns: str | None, limit: int | None
    ) -> None:
        self.where, self.sort, self.columns, self.limit = where, sort, columns, limit

    @property
    def any(self) -> bool:
        return any(v is not None for v in (self.where, self.sort, self.columns, self.limit))


def _check(
    asked: _Asked,
    request: str | None,
    until: str | None,
    step: bool,
    replay: bool,
    regret: bool,
    violations: bool,
    json: bool,
) -> None:
    """Options that say nothing together are a mistake, not to be passed over."""
    walks = step or until is not None
    if sum((walks, regret, violations)) > 1:
        raise BadInput("found two of --until or --step, --regret, --violations; allowed: one")
    if request is not None and (walks or regret or violations):
        raise BadInput("found a request with --until, --step, --regret or --violations; allowed: "
                       "without it")  # fmt: skip
    if asked.any and (request is not None or walks or regret or violations):
        raise BadInput("found --where, --sort, --columns or --limit; allowed: with the table")
    if replay and not walks:
        raise BadInput("found --replay; allowed: with --until or --step")
    if json and step:
        raise BadInput("found --json with --step; allowed: with --until")


class _Shower:
    def __init__(self, console: Console, errors: Console, outlet: Any, json: bool) -> None:
        self._console = console
        self._errors = errors
        self._outlet = outlet
        self._json = json
        self._folds = console.is_terminal
        self._said: list[str] = []

    def _print(self, line: Any) -> None:
        """Text is wrapped on a terminal only; tables always keep to its width."""
        self._console.print(line, soft_wrap=not self._folds and not hasattr(line, "columns"))

    def _print_all(self, lines: Iterator[Any]) -> None:
        for line in lines:
            self._print(line)

    def _write(self, value: Any) -> None:
        from pddrt.trace import dumps

        self._outlet.write(dumps(value) + "\n")

    def _say_missing(self, run: Recorded) -> None:
        from pddrt.show import clean

        for what in run.missing:
            if what not in self._said:
                self._errors.print(f"missing: {clean(what)}", soft_wrap=True)
                self._said.append(what)

    # -- requests ----------------------------------------------------------------------------------

    def table(self, run: Recorded, asked: _Asked) -> None:
        from pddrt.inspection import listing
        from pddrt.inspection.postmortem import violations

        requests = listing.Requests(run)
        if asked.columns is not None and asked.columns.strip() == "?":
            if self._json:
                self._write(requests.fields)
            else:
                self._print_all(iter(requests.fields))
            return
        rows = requests.ordered(requests.where(asked.where), asked.sort)
        found, most = len(rows), asked.limit
        if most is None:
            most = listing.SHOWN if self._console.is_terminal and not self._json else 0
        rows = rows[: most or None]
        names = None if asked.columns is None else _names(asked.columns)
        if self._json:
            self._rows_json(requests, rows, names)
            self._say_missing(run)
            return
        columns = requests.usual() if names is None else requests.chosen(names)
        self._print(listing.title(run))
        width = self._console.width if self._folds else None
        for number, line in enumerate(listing.lines(columns, rows, width)):
            if self._folds:
                style = "" if number else "bold"
                self._console.print(line, style=style, no_wrap=True, overflow="ellipsis")
            else:  # there may be a hundred thousand
                self._outlet.write(line + "\n")
        self._say_missing(run)
        if len(rows) < len(requests):
            of = f"{found:,} found of {len(requests):,}" if asked.where else f"{found:,}"
            more = "; --limit 0 shows all" if len(rows) < found else ""
            self._errors.print(f"{len(rows):,} of {of} requests{more}", soft_wrap=True)
        if broken := violations(run):
            self._print("")
            self._print(f"{len(broken)} violated invariant(s): --violations tells what led to it")

    def _rows_json(self, requests: Any, rows: list[int], names: list[str] | None) -> None:
        """An array, an object a line: whole lines of requests.jsonl, or the fields asked for."""
        import json

        for name in names or ():
            requests.check(name, "--columns")
        held = {name: requests.values(name) for name in ("id", *(names or ()))}
        self._outlet.write("[")
        for i, at in enumerate(rows):
            row = requests.raw(at) if names is None else {n: v[at] for n, v in held.items()}
            text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
            self._outlet.write(("\n" if i == 0 else ",\n") + text)
        self._outlet.write("\n]\n")

    def request(self, run: Recorded, request: str) -> None:
        from pddrt.inspection import postmortem
        from pddrt.show import coloured

        scene = postmortem.scene_of(run, request)
        if self._json:
            self._write(postmortem.as_json(scene))
        else:
            width = min(self._console.width, WIDEST)
            self._print_all(postmortem.story(scene, width, coloured(self._console)))
        self._say_missing(run)

    def violations(self, run: Recorded) -> None:
        from pddrt.inspection import postmortem

        broken = postmortem.violations(run)
        if self._json:
            self._write([postmortem.broken_json(one) for one in broken])
        elif not broken and not run.summary:
            self._print("no verdict is recorded: the run has no summary.json")
        elif not broken:
            checked = (run.summary.get("invariants") or {}).get("checked", 0)
            self._print(f"none in {checked:,} events checked")
        else:
            for one in broken:
                self._print_all(postmortem.told(one))
        self._say_missing(run)

    def regret(self, run: Recorded) -> None:
        from pddrt.inspection import listing, regret, regret_show

        found, recording = regret.of_folder(run.folder)
        if self._json:
            self._write(regret.as_json(found))
        else:
            self._print(listing.title(run))
            self._print_all(regret_show.lines(found))
        run.recording.missing += recording.missing
        self._say_missing(run)

    # -- moments -----------------------------------------------------------------------------------

    def moment(self, run: Recorded, until: str | None, step: bool, replay: bool) -> None:
        self._say_missing(run)
        try:
            self._moment(run, until, step, replay)
        finally:
            self._say_missing(run)

    def _moment(self, run: Recorded, until: str | None, step: bool, replay: bool) -> None:
        from pddrt.inspection import moment, moment_show, stepping

        try:
            number = 1 if until is None else stepping.place(run, until)
        except BadInput as error:
            raise BadInput([f"--until: {text}" for text in error.problems]) from None
        if step or replay:
            commands = self._commands() if step else iter(["p", "q"])
            try:
                self._walk(replay)(run, number, commands, self._print)
            except stepping.Left:
                return
            return
        state = stepping.moment_at(run, number)
        if self._json:
            self._write(moment.as_json(state))
            return
        for _, event in run.walk(number, number + 1):
            self._print(stepping.headline(number, event, run.index.num_events))
        self._print_all(moment_show.moment(state))

    def _walk(self, replay: bool) -> Callable[..., None]:
        from pddrt.inspection import stepping

        if not replay:
            return stepping.over_recording
        from pddrt.inspection import replay as again

        return again.replay

    def _commands(self) -> Iterator[str]:
        """From a terminal after a prompt; from a pipe line by line, each told as it is taken."""
        talks = sys.stdin is not None and sys.stdin.isatty() and self._console.is_terminal
        if talks:
            with contextlib.suppress(ImportError):  # lines can be edited, where it is there
                import readline  # noqa: F401
        while True:
            if talks:
                try:
                    yield input("> ")
                except EOFError:
                    self._print("")
                    return
                continue
            line = sys.stdin.readline() if sys.stdin is not None else ""
            if not line:
                return
            self._print(f"> {line.strip()}")
            yield line


def _names(columns: str) -> list[str]:
    found = [name.strip() for name in columns.split(",") if name.strip()]
    if not found:
        raise BadInput("--columns: found nothing; allowed: fields with commas between, or ?")
    return found
