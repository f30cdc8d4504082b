"""`pddrt run --repeat N`: the same scenario with several seeds, and what they come to.

Calls and prints; `cli` has the options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pddrt import live
from pddrt.commands.options import Terminal
from pddrt.comparing.contrast import at
from pddrt.comparing.repeats import Repeats
from pddrt.show import clean
from pddrt.sweeping.show import value
from pddrt.trace import dumps

Json = Mapping[str, Any]

TOLD = {
    "requests finished": "requests.finished",
    **{
        f"{title} {what}": f"{key}.{what}"
        for title, key in (
            ("TTFT", "ttft_s"), ("TTST", "ttst_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"),
            ("E2E", "e2e_s"), ("handoff gap", "handoff_gap_s"),
        )
        for what in ("mean", "p50", "p90", "p99")
    },
    "goodput": "goodput_rps",
    "SLO met": "slo_attainment",
    "output tokens": "output_tps",
}  # fmt: skip
"""What is shown of the numbers, and where it stands."""


def repeated(
    terminal: Terminal, scenario: str, overrides: list[str], *, repeat: int, seed: int | None,
    clock: str | None, out: str | None, prompt: str | None, verify: bool, json: bool,
) -> None:  # fmt: skip
    with terminal.outlet() as outlet:
        console, errors = terminal.console(outlet), terminal.console(sys.stderr)
        with terminal.signals_end_it(), live.Bars(errors) as bars:
            repeats = Repeats(
                scenario, overrides, repeat=repeat, seed=seed, clock=clock,
                out=None if out is None else Path(out), prompt=prompt, verify=verify,
            )  # fmt: skip
            repeats.prepare(bars)
            result = repeats.execute(bars)
        if json:
            outlet.write(dumps(result.table) + "\n")
        else:
            if not console.is_terminal:
                console.width = 10_000
            for line in results(result.table):
                console.print(line)
            console.print(f"saved in {clean(str(result.folder))}", soft_wrap=True)
        result.raise_for_status()


def results(table: Json) -> Iterator[Text | Table]:
    seeds = table["seeds"]
    shown = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
    if seeds:
        shown += f", {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f", {seeds[0]}"
    yield Text.assemble((clean(table["name"]), "bold"), f": {shown}, {table['clock']} clock")
    yield Text()
    rows = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    rows.add_column("")
    for name in ("mean", "95 % from", "to", "smallest", "largest"):
        rows.add_column(name, justify="right")
    for title, path in TOLD.items():
        of = at(table["numbers"], path.split("."))
        if of is not None and of["n"]:
            cells = (of[key] for key in ("mean", "low", "high", "min", "max"))
            rows.add_row(title, *("-" if c is None else value(path, c) for c in cells))
    yield rows
    yield Text()
