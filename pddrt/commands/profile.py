"""`pddrt netem profile`: what a named WAN or a file is like; one from measurements; another format.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import BadInput, CannotRun

if TYPE_CHECKING:
    from rich.console import Group

    from pddrt.netem.profiles import Profile

_FORMATS = (".yaml", ".yml", ".csv")


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


def profile(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="Absent: all named WANs.", show_default=False),
    ] = None,
    iperf3: Annotated[
        Path | None, _option("FILE", "Make one: rates from the output of iperf3 --json.")
    ] = None,
    ping: Annotated[
        Path | None, _option("FILE", "Make one: delay and jitter from the output of ping.")
    ] = None,
    out: Annotated[
        Path | None,
        _option("FILE", "Write it: .yaml or .csv, any other ending as a mahimahi trace."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Shows what a link's profile is: a named WAN, a profile (.yaml), a trace in CSV (.csv) or as
    mahimahi has it (any other ending). With --out it is written, in the format of the ending.
    """
    from pddrt.netem.profiles import NAMED, load
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    measured = iperf3 is not None or ping is not None
    if measured and name is not None:
        raise BadInput(f"found '{name}' beside --iperf3 or --ping; allowed: one of the two")
    if out is not None and not measured and name is None:
        raise BadInput("--out: found it without anything to write; needed: a NAME or FILE")
    shown: dict[str, Profile] = NAMED
    if measured:
        shown = {"measured": _measured(iperf3, ping)}
    elif name is not None:
        shown = {name: load(name)}
    if out is not None:
        _write(out, *shown.values())
    with terminal.outlet() as outlet:
        if json:
            table = {n: p.figures() for n, p in shown.items()}
            outlet.write(dumps(table) + "\n")
            return
        console = terminal.console(outlet)
        for number, (one, what) in enumerate(shown.items()):
            if number:
                console.print()
            console.print(told(one, what))


def told(name: str, profile: Profile) -> Group:
    """A profile as a line and a small table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in profile.facts():
        table.add_row(Text(f"  {key}"), Text(value))
    about = "" if profile.about == Path(name).name else f"  {profile.about}"
    return Group(Text.assemble((name, "bold"), about), table)


def _measured(iperf3: Path | None, ping: Path | None) -> Profile:
    from dataclasses import replace

    from pddrt.netem.profiles import Profile
    from pddrt.netem.trace_files import parse_iperf3, parse_ping

    made = Profile("measured")
    if iperf3 is not None:
        made = replace(made, trace=_parsed("--iperf3", iperf3, parse_iperf3))
    if ping is not None:
        delay, jitter = _parsed("--ping", ping, parse_ping)
        made = replace(made, delay=delay, jitter=jitter if delay else 0)
    return made


def _parsed(option: str, path: Path, parse: Any) -> Any:
    from pddrt.document import shown_path

    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise BadInput(f"{option}: {shown_path(path)}: this is no text in UTF-8") from None
    except OSError as error:
        raise BadInput(f"{option}: {shown_path(path)}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{option}: {shown_path(path)}: {error}") from None


def _write(out: Path, profile: Profile) -> None:
    from pddrt.document import shown_path
    from pddrt.netem.profiles import dump
    from pddrt.netem.trace_files import format_csv, format_mahimahi

    suffix = out.suffix.lower()
    if suffix in (".yaml", ".yml"):
        text = dump(profile)
    elif profile.trace is None:
        raise BadInput(f"--out: found {shown_path(out)} for a link that never changes; "
                       "allowed: a .yaml file")  # fmt: skip
    else:
        try:
            text = (format_csv if suffix == ".csv" else format_mahimahi)(profile.trace)
        except ValueError as error:
            raise BadInput(f"--out: {shown_path(out)}: {error}") from None
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotRun(f"{shown_path(out)}: cannot be written: {error.strerror}") from None
    lost = profile.lost_in(suffix)
    without = f", without {', '.join(lost)}; .yaml keeps it" if lost else ""
    typer.echo(f"written to {shown_path(out)}{without}", err=True)
