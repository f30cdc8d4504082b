"""Options that several commands take: the same words, the same meaning. Typer reads them at run
time.
"""

from __future__ import annotations

from typing import Annotated, Optional

import typer

ScenarioFile = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Override the scenario's seed.", show_default=False)
]
Clock = Annotated[
    str | None,
    typer.Option(metavar="wall|virtual", help="Override the clock.", show_default=False),
]
Set = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override a field, e.g. links.wan.rate='100 Mbit/s'. Repeatable.",
        show_default=False,
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="Pipeline policies, e.g. pdd,naive.", show_default=False),
]
Vary = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option(
        metavar="PATH=V1,V2,...",
        help="Values of any other field, also as FROM..TO:STEP UNIT or (1,2,4) UNIT. Repeatable: "
        "each with each.",
        show_default=False,
    ),
]
Repeat = Annotated[
    int, typer.Option(metavar="N", help="Run with N seeds, up to 1,000: its own and the next.")
]
