"""The command line. Parses, calls, prints; decides nothing.

Everything heavy is imported inside the command that needs it, so that `--help` costs what typer and
rich cost. Results go to stdout, all else to stderr. Every error of the tree in `errors` ends as one
message and its exit code, never a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from pddrt import __version__
from pddrt.errors import PddrtError

app = typer.Typer(
    name="pddrt",
    help="A research runtime for cross-datacenter prefill-decode disaggregation of LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Models at hand, and how to get more.", no_args_is_help=True)
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


@app.command()
def run(
    scenario: Annotated[str, typer.Argument(help="Scenario file (YAML).", show_default=False)],
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this at run time
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Override a field, e.g. links.wan.rate='100 Mbit/s'. Repeatable.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Override the scenario's seed.", show_default=False)
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(metavar="wall|virtual", help="Override the clock.", show_default=False),
    ] = None,
    out: Annotated[
        Optional[Path], typer.Option(help="Run folder; default runs/NAME-TIME.", show_default=False)  # noqa: UP045
    ] = None,
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="TEXT",
            help="One request with this text instead of the workload.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print summary.json to stdout, and nothing else.")
    ] = False,
) -> None:
    """Run a scenario: texts as they come, each token marked by who made it, then the numbers."""
    _run(scenario, list(set_ or []), seed, clock, out, prompt, json)


def _run(
    scenario: str,
    overrides: list[str],
    seed: int | None,
    clock: str | None,
    out: Path | None,
    prompt: str | None,
    json: bool,
) -> None:
    from rich.console import Console

    from pddrt import show
    from pddrt.run import Run
    from pddrt.scenario import load
    from pddrt.trace import dumps

    errors = Console(stderr=True, highlight=False)
    console = Console(highlight=False)
    bars = show.Bars(errors)
    the_run = Run(load(scenario, overrides, seed=seed, clock=clock), out=out, prompt=prompt)
    try:
        the_run.prepare(bars)
    finally:
        bars.close()
    live = None
    if not json:
        live = show.LiveText(console, the_run.recorder, the_run.expected_requests)
        the_run.listen(live)
        show.legend(console, the_run.sites_by_letter)
    try:
        result = the_run.execute()
    finally:
        if live is not None:
            live.close()
    if json:
        print(dumps(result.summary))
    else:
        show.results(console, result.summary, the_run.recorder)
        console.print(f"saved in   {result.folder}", soft_wrap=True)
    result.raise_for_status()


@models_app.command("list")
def model_list() -> None:
    """Models that are cached, built in, or known by name."""
    from rich.console import Console
    from rich.table import Table

    from pddrt.engine.models import known_models

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "state", "size", "what it is"):
        table.add_column(name)
    for model in known_models():
        table.add_row(*(str(cell) for cell in _model_row(model)))
    Console(highlight=False).print(table)


def _model_row(model: Any) -> tuple[str, str, str, str]:
    return model.name, model.state, model.size, model.what


@models_app.command("pull")
def model_pull(
    name: Annotated[
        str, typer.Argument(help="Default model, hub id or local folder.", show_default=False)
    ],
) -> None:
    """Fetch a model now, so that the first run does not have to."""
    from rich.console import Console

    from pddrt import show
    from pddrt.engine.models import pull

    bars = show.Bars(Console(stderr=True, highlight=False))
    try:
        where = pull(name, bars)
    finally:
        bars.close()
    print(where)


def main() -> None:
    """Entry point of the `pddrt` command."""
    try:
        app(standalone_mode=True)
    except PddrtError as error:
        sys.stdout.flush()
        for line in str(error).splitlines():
            print(f"pddrt: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("pddrt: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
