"""`pddrt sweep`: a grid of settings, resumable.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from pddrt.commands.options import Clock, Policies, Repeat, ScenarioFile, Seed, Set, Terminal, Vary

SHORT_HELP = "One scenario over a grid of values; goes on where it was."


def sweep(
    context: typer.Context,
    scenario: ScenarioFile,
    vary: Vary = None,
    policies: Policies = None,
    repeat: Repeat = 1,
    metric: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this at run time
        typer.Option(
            metavar="PATH",
            help="A number of summary.json to look at, e.g. links.wan.busy_fraction. Repeatable. "
            "Default: TTFT, TPOT, E2E, handoff gap, goodput.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="J", help="Cells at once, each in a process (virtual clock).")
    ] = 1,
    max_runs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Run N new cells at most this time.", show_default=False),
    ] = None,
    set_: Set = None,
    seed: Seed = None,
    clock: Clock = None,
    keep: Annotated[
        Literal["summary", "requests", "all"],
        typer.Option(help="What stays of each run's folder."),
    ] = "summary",
    fresh: Annotated[bool, typer.Option("--fresh", help="Run also what is there.")] = False,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Leave out settings that make no sound scenario."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder; default runs/sweep-NAME.", show_default=False),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print sweep.json to stdout, and nothing else.")
    ] = False,
) -> None:
    """Runs each value with each of the others. Saves a folder with sweep.csv, sweep.json and
    sweep.html. The same command again goes on where it was: cells that are there are kept, unless
    the scenario, a file it names, a policy of yours or pddrt itself has changed. A cell that fails
    does not stop the others. Answers in the prompts are scripted, as in compare.
    """
    from pddrt import live
    from pddrt.sweeping import page as sweep_page
    from pddrt.sweeping import show as sweep_show
    from pddrt.sweeping.table import Sweep, settings

    terminal: Terminal = context.obj
    with terminal.outlet() as outlet:
        console, errors = terminal.console(outlet), terminal.console(sys.stderr)
        with terminal.signals_end_it(), live.Bars(errors) as bars:
            axes, sound, left_out = settings(
                scenario, list(set_ or []), policies=policies, vary=list(vary or []), seed=seed,
                clock=clock, skip_invalid=skip_invalid,
            )  # fmt: skip
            swept = Sweep(
                axes,
                sound,
                out=None if out is None else Path(out),
                repeat=repeat,
                jobs=jobs,
                max_runs=max_runs,
                metrics=list(metric or []),
                keep=keep,
                fresh=fresh,
                left_out=left_out,
            ).execute(bars)
            page = sweep_page.write(swept)
        if json:
            outlet.write((swept.folder / "sweep.json").read_text(encoding="utf-8"))
        else:
            width = console.width if console.is_terminal else None
            console.width = width or 10_000
            for line in sweep_show.results(swept.table, width):
                wraps = console.is_terminal or hasattr(line, "columns")
                console.print(line, soft_wrap=not wraps)
            console.print(f"saved in {swept.folder}; to look at: {page}", soft_wrap=True)
        swept.raise_for_status()
