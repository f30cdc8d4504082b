"""`pddrt compare`: settings side by side, on the terminal and as a page.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from pddrt.commands.options import Clock, Policies, Repeat, ScenarioFile, Seed, Set, Terminal, Vary

SHORT_HELP = "One scenario under several policies or settings, side by side."


def compare(
    context: typer.Context,
    scenario: ScenarioFile,
    policies: Policies = None,
    vary: Vary = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The column that others are held against; default: the first.",
            show_default=False,
        ),
    ] = None,
    repeat: Repeat = 1,
    assert_: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this at run time
        typer.Option(
            "--assert",
            metavar="CONDITION",
            help="Exit 1 unless it holds, e.g. 'pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90'. "
            "Repeatable.",
            show_default=False,
        ),
    ] = None,
    set_: Set = None,
    seed: Seed = None,
    clock: Clock = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Judge every token by a plain pass of the model.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder; default runs/compare-NAME-TIME.", show_default=False
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print compare.json to stdout, and nothing else.")
    ] = False,
) -> None:
    """The same requests under each policy, or each value of other fields: what differs, by how
    much and how surely, and which requests win or lose by what. Answers in the prompts are
    scripted, so that all have the same prompts. Saves a folder with a run folder for each column,
    compare.json, deltas.csv (request by request) and compare.html.
    """
    from pddrt import live
    from pddrt.comparing import page as compare_page
    from pddrt.comparing import show as compare_show
    from pddrt.comparing.columns import Comparison, columns
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    with terminal.outlet() as outlet:
        console, errors = terminal.console(outlet), terminal.console(sys.stderr)
        with terminal.signals_end_it(), live.Bars(errors) as bars:
            comparison = Comparison(
                columns(
                    scenario, list(set_ or []), policies=policies, vary=list(vary or []), seed=seed,
                    clock=clock,
                ),
                out=None if out is None else Path(out),
                baseline=baseline,
                repeat=repeat,
                verify=verify,
                assertions=list(assert_ or []),
            )  # fmt: skip
            comparison.prepare(bars)
            compared = comparison.execute(bars)
            page = compare_page.write(compared)
        if json:
            outlet.write(dumps(compared.table) + "\n")
        else:
            width = console.width if console.is_terminal else None
            console.width = width or 10_000
            for line in compare_show.results(compared.table, width):
                wraps = console.is_terminal or hasattr(line, "columns")
                console.print(line, soft_wrap=not wraps)
            console.print(f"saved in {compared.folder}; to look at: {page}", soft_wrap=True)
        compared.raise_for_status()
