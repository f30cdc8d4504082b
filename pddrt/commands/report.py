"""`pddrt report`: two files about a recorded run, for a browser.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pddrt.commands.options import Terminal

SHORT_HELP = "A recorded run as a web page and a Perfetto trace."


def report(
    context: typer.Context,
    run_folder: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
) -> None:
    """Writes report.html (opens in any browser, needs no network) and trace.json (for
    ui.perfetto.dev) into the run folder. A folder that is not complete is shown as far as it goes;
    what is missing is said here and on the page.
    """
    from pddrt.report.page import make
    from pddrt.show import clean, size

    terminal: Terminal = context.obj
    with terminal.outlet() as outlet:
        with terminal.signals_end_it():
            made = make(Path(run_folder))
        errors = terminal.console(sys.stderr)
        for what in made.missing:
            errors.print(f"missing: {clean(what)}", soft_wrap=True)
        for what, count in made.left_out.items():
            errors.print(f"trace.json: {count:,} {what} left out", soft_wrap=True)
        console = terminal.console(outlet)
        for path in (made.html, made.trace):
            console.print(f"{clean(str(path))}  {size(path.stat().st_size)}", soft_wrap=True)
