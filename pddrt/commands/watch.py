"""`pddrt watch`: a recorded run on the dashboard, at any pace.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal. What is on the screen
is what was on it while the run was under way: both hear the same events.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from pddrt.recording import Recording

SHORT_HELP = "A recorded run on the dashboard again, at any pace."


def watch(
    context: typer.Context,
    run_folder: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
    ],
    pace: Annotated[
        float, typer.Option(metavar="X", help="So many seconds of the run in one of yours.")
    ] = 1.0,
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Where to begin, e.g. '20 s'.")
    ] = "0",
) -> None:
    """Plays a recorded run on the dashboard: p pauses, + and - change the pace, q leaves, ?
    explains the rest. It stays at the end until you leave.
    """
    from pddrt.dashboard.display import refusal
    from pddrt.recording import opened
    from pddrt.show import clean
    from pddrt.types import SECOND
    from pddrt.units import parse_duration

    if not 0 < pace < float("inf"):
        raise BadInput(f"--pace: found {pace:g}; allowed: a number above 0")
    try:
        start = parse_duration(since)
    except ValueError as error:
        raise BadInput(f"--from: {error}") from None
    terminal: Terminal = context.obj
    with terminal.outlet() as outlet, terminal.signals_end_it():
        recording = opened(Path(run_folder))
        end = recording.end()
        if end is not None and start > end:
            raise BadInput(
                f"--from: found {since}; allowed: up to {end / SECOND:g} s, the last event"
            )
        console = terminal.console(outlet)
        if reason := refusal(console):
            raise BadInput(f"watch: {reason}; see `pddrt inspect` and `pddrt report`")
        _play(recording, console, pace, start)
        errors = terminal.console(sys.stderr)
        for what in recording.missing:
            errors.print(f"missing: {clean(what)}", soft_wrap=True)


def _play(recording: Recording, console: Console, pace: float, start: int) -> None:
    from pddrt.dashboard.display import Dashboard
    from pddrt.dashboard.pacing import Pacer

    left = threading.Event()
    pacer = Pacer(pace, left.is_set, start)
    board = Dashboard(
        console,
        requests=len(recording.rows),
        slo=(recording.slo("ttft"), recording.slo("tpot")),
        pacer=pacer,
        leave=left.set,
    )
    with board:
        for event in recording.events():
            if left.is_set():
                break
            if event.t >= start:
                pacer(event)
            board(event)
        else:
            board.progress("the end; q leaves", None)
            left.wait()
