"""What several commands share: options, with the same words and the same meaning, and how they get
at the terminal. Typer reads the options at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Terminal:
    """`outlet`: stdout for one command. `console`: of a file. `signals_end_it`: see `cli`."""

    outlet: Callable[[], AbstractContextManager[Any]]
    console: Callable[[Any], Console]
    signals_end_it: Callable[[], AbstractContextManager[None]]


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
