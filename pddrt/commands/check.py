"""`pddrt netem check`: what the emulated link is worth on this machine, as a table.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import RunFailed

if TYPE_CHECKING:
    from rich.table import Table

    from pddrt.netem.check import Check


def check(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the time.")] = False,
    kernel: Annotated[
        bool,
        typer.Option(
            "--kernel/--no-kernel",
            help="Compare with this kernel's TCP, in network namespaces of its own; needs root.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Measure rates, delays, jitter, fairness and completion times of the emulated link on real
    sockets, and compare each with what is predicted. Exit 1 where a limit is broken: then this
    machine, as busy as it is now, does not keep the link. Takes about a minute.
    """
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    with terminal.outlet() as outlet:
        console = terminal.console(outlet)
        errors = terminal.console(sys.stderr)
        from pddrt import show as _  # noqa: F401 - loaded now, not while something is measured

        with terminal.signals_end_it(), errors.status("") as status:

            def progress(text: str) -> None:
                if errors.is_terminal:
                    status.update(text)

            priority, found = _measure(quick, kernel, progress)
        broken = [one for one in found if one.verdict == "off"]
        if json:
            about = {
                "verdict": "off" if broken else "ok",
                "priority": priority,
                "machine": _machine(),
                "checks": [one.as_json() for one in found],
            }
            outlet.write(dumps(about) + "\n")
        else:
            if console.is_terminal and console.width >= 120:
                console.print(_table(found))
            else:
                for one in found:
                    console.print(_line(one), soft_wrap=True)
            console.print(f"priority: {priority}; {_summary(found)}", soft_wrap=True)
    if broken:
        names = ", ".join(one.name for one in broken)
        raise RunFailed(f"this machine does not keep the link now: {names}")


def _measure(quick: bool, kernel: bool, progress: Any) -> tuple[str, list[Check]]:
    from pddrt.alarm import attentive
    from pddrt.hosting import new_loop
    from pddrt.netem import check as measuring
    from pddrt.netem import kernel as kernels

    effort = measuring.QUICK if quick else measuring.FULL

    async def main() -> list[Check]:
        return [one async for one in measuring.checks(effort, progress)]

    with attentive() as priority:
        with asyncio.Runner(loop_factory=lambda: new_loop("wall")) as runner:
            found = runner.run(main())
        if kernel:
            found += kernels.checks(quick, progress)
    return priority, found


def _machine() -> dict[str, Any]:
    import os

    from pddrt.hosting import cores, cpu_name

    return {"cores": cores(), "cpu": cpu_name(), "load": [round(x, 2) for x in os.getloadavg()]}


MARKS = {"ok": "green", "off": "bold red", "skipped": "yellow"}


def _table(found: Sequence[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("check", "predicted", "measured", "error", "limit", "verdict", ""):
        right = name in ("predicted", "measured", "error", "limit")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in found:
        error = "" if one.error is None or not one.unit else f"{one.error:g} {one.unit}"
        limit = "" if one.limit is None else f"{one.limit:g}"
        verdict = Text(one.verdict, MARKS[one.verdict])
        table.add_row(one.name, one.predicted, one.measured, error, limit, verdict, one.note)
    return table


def _line(one: Check) -> str:
    """For a program, a file or a narrow window."""
    if one.error is None:
        return f"{one.verdict:8} {one.name}: {one.note}"
    facts = [f"predicted {one.predicted}"] if one.predicted else []
    if one.unit:
        limit = "" if one.limit is None else f" of at most {one.limit:g}"
        facts.append(f"error {one.error:g}{limit} {one.unit}")
    facts += [one.note] if one.note else []
    return f"{one.verdict:8} {one.name}: {one.measured}" + (
        f" ({'; '.join(facts)})" if facts else ""
    )


def _summary(found: Sequence[Check]) -> str:
    counts = {v: sum(one.verdict == v for one in found) for v in MARKS}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
