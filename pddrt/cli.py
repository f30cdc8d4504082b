"""The command line. Parses, calls, prints; decides nothing.

Everything heavy is imported inside the command that needs it, so that `--help` costs what typer and
rich cost. Results go to stdout, all else to stderr. Every error of the tree in `errors` ends as one
message and its exit code, never a traceback.

A terminal or a pipe may go away while a run is under way. Then nothing more is shown, and the run
goes on: what counts is its folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from pddrt import __version__
from pddrt.commands import bench as bench_cli
from pddrt.commands import compare as compare_cli
from pddrt.commands import inspect as inspect_cli
from pddrt.commands import netem as netem_cli
from pddrt.commands import report as report_cli
from pddrt.commands import sweep as sweep_cli
from pddrt.commands import watch as watch_cli
from pddrt.commands.options import Clock, Repeat, ScenarioFile, Seed, Set, Terminal
from pddrt.errors import BadInput, CannotRun, Interrupted, PddrtError

if TYPE_CHECKING:
    from rich.console import Console

# Help and usage errors without rich: they answer in half the time.
_TYPER = {"no_args_is_help": True, "add_completion": False, "rich_markup_mode": None}
app = typer.Typer(
    name="pddrt",
    help="A research runtime for cross-datacenter prefill-decode disaggregation of LLM inference.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_TYPER,  # type: ignore[arg-type]
)
models_app = typer.Typer(help="Models: which there are, get one.", **_TYPER)  # type: ignore[arg-type]
app.add_typer(models_app, name="model")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pddrt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# -- run -------------------------------------------------------------------------------------------


@app.command(short_help="Run a scenario: texts as they come, then numbers.")
def run(
    scenario: ScenarioFile,
    set_: Set = None,
    seed: Seed = None,
    clock: Clock = None,
    repeat: Repeat = 1,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run folder; default runs/NAME-TIME.", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="One request with this text instead of the workload.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Judge every token by a plain pass of the model afterwards."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse a link faster than this machine can keep, on the wall clock."
        ),
    ] = False,
    dashboard: Annotated[
        str,
        typer.Option(
            metavar="auto|on|off",
            help="Draw the run while it is under way; auto: where stdout is a terminal.",
        ),
    ] = "auto",
    pace: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Under the virtual clock: X of its seconds in one of yours, to watch it.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print summary.json to stdout, and nothing else.")
    ] = False,
) -> None:
    """Run a scenario: texts as they come, each token marked by who made it (P prefill, R relay
    decode, M main decode), then the numbers. All of it is saved in the run folder. Ctrl-C ends a
    run early and saves what there is.
    """
    if repeat != 1:
        from pddrt.commands.repeat import repeated

        if dashboard == "on" or pace is not None:
            raise BadInput("--repeat: is not for watching; allowed: without --dashboard on, --pace")
        repeated(
            Terminal(_outlet, _console, _signals_end_it), scenario, list(set_ or []),
            repeat=repeat, seed=seed, clock=clock, out=out, prompt=_text("--prompt", prompt),
            verify=verify, json=json,
        )  # fmt: skip
        return
    with _signals_end_it():
        _run(
            scenario,
            list(set_ or []),
            seed,
            clock,
            out,
            prompt,
            verify,
            dashboard,
            pace,
            json,
            strict,
        )


def _run(
    scenario: str,
    overrides: list[str],
    seed: int | None,
    clock: str | None,
    out: str | None,
    prompt: str | None,
    verify: bool,
    mode: str,
    pace: float | None,
    json: bool,
    strict: bool,
) -> None:
    from pddrt import live, show
    from pddrt.dashboard import display as dashboard
    from pddrt.run import KEPT, Run
    from pddrt.scenario import load
    from pddrt.trace import dumps

    if mode not in dashboard.MODES:
        raise BadInput(f"--dashboard: found '{mode}'; allowed: {', '.join(dashboard.MODES)}")
    if pace is not None and not 0 < pace < float("inf"):
        raise BadInput(f"--pace: found {pace:g}; allowed: a number above 0")
    # What a policy of the user's prints must not get into what a program reads.
    aside = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with _outlet() as outlet, aside:
        console, errors = _console(outlet), _console(sys.stderr)
        the_run = Run(
            load(scenario, overrides, seed=seed, clock=clock),
            out=None if out is None else Path(out),
            prompt=_text("--prompt", prompt),
            verify=verify,
            keep=KEPT,
            strict=strict,
        )
        if pace is not None and the_run.scenario.clock != "virtual":
            raise BadInput("--pace: the scenario's clock is wall; allowed: --clock virtual with it")
        with _signals_end_it(), live.Bars(errors) as bars:
            if bars.moving:
                bars(f"loading {the_run.scenario.model}", None)
            the_run.prepare(bars)
        requests = the_run.expected_requests
        if not json:
            colour = show.coloured(console)
            _print(console, show.intro(the_run.scenario, the_run.instances, requests, colour))
        with dashboard.watching(
            the_run, console, errors, mode=mode, pace=pace, json=json
        ) as progress:
            result = the_run.execute(progress)
        if json:
            outlet.write(dumps(result.summary) + "\n")
        else:
            _print(console, show.results(result.summary, the_run.recorder, console.width))
            _print(console, [f"saved in {show.clean(str(result.folder))}"])
        result.raise_for_status()


@app.command(short_help="Measure step times here, for the virtual clock.")
def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A model's name, hub id or folder.")
    ] = "smollm2-135m",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Default: MODEL-DTYPE-DEVICE.profile.json.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model, as in a scenario.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Of a step.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Medians of so many.")] = 5,
) -> None:
    """Measures how long steps of many shapes take on this machine, alone, and writes a step
    profile: a scenario uses it as `step_time: measured:FILE`. Takes a minute or so.
    """
    from pddrt import live
    from pddrt.calibrate import calibrate as measure

    path = Path(out or f"{Path(model).name}-{dtype}-{device.replace(':', '')}.profile.json")
    with _outlet() as outlet:
        console = _console(outlet)
        with _signals_end_it(), live.Bars(_console(sys.stderr)) as bars:
            profile = measure(
                model, dtype, device=device, threads=threads, rounds=rounds, progress=bars
            )
        try:
            path.write_text(profile.dump(), encoding="utf-8")
        except OSError as error:
            raise CannotRun(f"cannot write {path}: {error.strerror}") from None
        errors = sorted(map(abs, profile.errors))
        middle, worst = errors[len(errors) // 2], errors[-1]
        console.print(
            f"{len(errors)} shapes measured; the formula is off by {100 * middle:.0f} % in the "
            f"middle, {100 * worst:.0f} % at worst",
            soft_wrap=True,
        )
        console.print(f"saved in {path}", soft_wrap=True)


def _print(console: Console, lines: Any) -> None:
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal and not hasattr(line, "columns"))


def _text(option: str, value: str | None) -> str | None:
    """An argument that must be text: the system hands over any bytes."""
    if value is not None:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{option}: is not text in UTF-8") from None
    return value


# -- models ----------------------------------------------------------------------------------------


@models_app.command("list")
def model_list() -> None:
    """The models that are here, and those that can be had by name."""
    from rich.table import Table

    from pddrt import show
    from pddrt.engine.models import known_models

    with _signals_end_it(), _outlet() as outlet:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("model", "size", "state"):
            table.add_column(name, justify="right" if name == "size" else "left")
        table.add_column("where", overflow="fold")
        for model in known_models():
            size = show.size(model.bytes) if model.bytes else "-"
            state = "here" if model.cached else "to be fetched"
            table.add_row(model.name, size, state, show.clean(model.where))
        console = _console(outlet)
        if not console.is_terminal:
            console.width = 10_000  # for a program: a line a model
        console.print(table)


@models_app.command("pull")
def model_pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A model's name, hub id or local folder.", show_default=False
        ),
    ],
) -> None:
    """Fetch a model now, so that the first run need not."""
    from pddrt import live
    from pddrt.engine.models import pull

    with _signals_end_it(), _outlet() as outlet:
        errors = _console(sys.stderr)
        with live.Bars(errors) as bars:
            where = pull(name, bars)
        if where is None:
            _say(f"{name} is made on the spot: there is nothing to fetch")
        else:
            outlet.write(f"{where}\n")


# -- the world outside -----------------------------------------------------------------------------


class _Outlet:
    """stdout, which may go away. Writes to it do not fail: the first failure is kept and said, and
    from then on nothing is written.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.error: OSError | None = None
        self.encoding = self._file.encoding
        if hasattr(self._file, "reconfigure"):
            self._file.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        self._try(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def _try(self, call: Any, *args: str) -> None:
        if self.error is None:
            try:
                call(*args)
            except OSError as error:
                self.error = error
                _say(f"stdout: {error.strerror}; nothing more is shown, but the command goes on")
                with contextlib.suppress(OSError, ValueError):  # else Python complains at its end
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


@contextlib.contextmanager
def _outlet() -> Iterator[_Outlet]:
    """stdout for one command. A reader that had enough is no error; a full disk is one."""
    outlet = _Outlet(sys.stdout or io.StringIO())  # None where it was closed from the start
    yield outlet
    outlet.flush()
    if outlet.error is not None and not isinstance(outlet.error, BrokenPipeError):
        raise CannotRun(f"stdout cannot be written: {outlet.error.strerror}")


def _console(file: Any) -> Console:
    """Shows text as it is: no markup, no emoji names, no guesses at what is a number."""
    from rich.console import Console

    return Console(file=file, markup=False, emoji=False, highlight=False)


class _Stop(KeyboardInterrupt):
    """The plain one, raised inside an `exec`, would make Python end as if killed by the signal."""


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise Interrupted, also where a library would not let it pass.

    A run has its own, gentler way (see `run`) while it is under way.
    """
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        raise _Stop

    def lost(what: Any) -> None:  # raised where nothing can be, as in a callback: once more, then
        if issubclass(what.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.01)
        else:
            sys.__unraisablehook__(what)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGVTALRM)
    previous = {s: signal.signal(s, ask) for s in signals}
    sys.unraisablehook = lost
    try:
        yield
        if asked:
            raise _Stop
    except Interrupted:
        raise
    except BaseException as error:
        if asked or isinstance(error, KeyboardInterrupt):
            raise Interrupted("interrupted") from None
        raise
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(message: str) -> None:
    """One message on stderr, whatever is in it. Imports nothing: an import may have failed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            for line in message.split("\n"):
                safe = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
                print(f"pddrt: {''.join(safe)}", file=sys.stderr, flush=True)


_terminal = {"obj": Terminal(_outlet, _console, _signals_end_it)}
for _name, _app in (("bench", bench_cli.app), ("netem", netem_cli.app)):
    app.add_typer(_app, name=_name, context_settings=_terminal)
app.command(short_help=compare_cli.SHORT_HELP, context_settings=_terminal)(compare_cli.compare)
app.command(short_help=sweep_cli.SHORT_HELP, context_settings=_terminal)(sweep_cli.sweep)
app.command(short_help=inspect_cli.SHORT_HELP, context_settings=_terminal)(inspect_cli.inspect)
app.command(short_help=report_cli.SHORT_HELP, context_settings=_terminal)(report_cli.report)
app.command(short_help=watch_cli.SHORT_HELP, context_settings=_terminal)(watch_cli.watch)


def main() -> None:
    """Entry point of the `pddrt` command."""
    try:
        app(prog_name="pddrt")
    except PddrtError as error:
        _say(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
