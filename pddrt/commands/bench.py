"""`pddrt bench`: experiments as commands, and what their results look like.

Parses, calls, prints. This module cannot import `cli`, which takes its `app` in: what it needs of
the terminal comes with the context (`Terminal`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

app = typer.Typer(
    help="Experiments, each on one question.", no_args_is_help=True, rich_markup_mode=None
)


def _option(metavar: str, default: str, text: str) -> Any:
    """An option that the setting has a default for: `default`, in words."""
    return typer.Option(metavar=metavar, help=f"{text} Default: {default}.", show_default=False)


def _rare(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


@app.callback()
def bench() -> None:
    pass


@app.command(short_help="KV over the link and copied in, or ids and an extend?")
def handoff(
    context: typer.Context,
    tokens: Annotated[int | None, _option("N", "100", "Tokens that are handed over.")] = None,
    context_: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Tokens whose KV the main decoder has already. Default: 512.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, _option("NAME", "smollm2-135m", "As in a scenario.")] = None,
    dtype: Annotated[str | None, _option("NAME", "bfloat16", "As in a scenario.")] = None,
    rate: Annotated[str | None, _option("RATE", "200 Mbit/s", "Of the link.")] = None,
    delay: Annotated[str | None, _option("TIME", "15 ms", "Of the link, one way.")] = None,
    jitter: Annotated[
        str | None, _option("TIME", "2 ms", "Standard deviation of the delay.")
    ] = None,
    cross_traffic: Annotated[
        float | None, _option("SHARE", "0.5", "Share of the rate that others' flows ask for.")
    ] = None,
    cross_flow: Annotated[
        str | None, _option("SIZE", "1 MB", "Mean size of such a flow; exponential.")
    ] = None,
    pause: Annotated[
        str | None, _option("TIME", "250 ms", "Mean time between two repetitions; exponential.")
    ] = None,
    repeat: Annotated[int | None, _option("N", "50", "Repetitions of each way.")] = None,
    seed: Annotated[
        int | None, _option("N", "1", "Of jitter, cross traffic, pauses and ids.")
    ] = None,
    clock: Annotated[str | None, _option("wall|virtual", "wall", "As in a scenario.")] = None,
    device: Annotated[str | None, _option("NAME", "cpu", "Of real steps: cpu or cuda:N.")] = None,
    threads: Annotated[int | None, _option("N", "1", "Of real steps.")] = None,
    chip: Annotated[
        str | None, _rare("NAME", "Model the steps by a chip, as in a scenario.")
    ] = None,
    step_time: Annotated[
        str | None,
        _rare("VALUE", "Model the steps: measured:FILE or {prefill_tokens_per_s, decode_step}."),
    ] = None,
    copy_rate: Annotated[
        str | None, _rare("RATE", "Of modelled copies from and to a device; they are free else.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every repetition, and nothing else.")
    ] = False,
) -> None:
    """What RLD has made must get to MD: as KV that crosses the link and is copied in, or as ids
    over which MD extends. By turns, many times, over a link that others use too. Both end when MD
    could begin its next decode step. On the wall clock with the real model over real sockets; with
    a chip or a step time, modelled.
    """
    from pddrt import live
    from pddrt.bench import Bench, Setting
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    given = {name.rstrip("_"): v for name, v in context.params.items() if name != "json"}
    with terminal.outlet() as outlet:
        with live.Bars(terminal.console(sys.stderr)) as bars:
            with terminal.signals_end_it():
                measured = Bench(Setting.of(given))
                measured.prepare(bars)
            result = measured.execute(bars if bars.moving else None)
        if result.table is not None and json:
            outlet.write(dumps(result.table) + "\n")
        elif result.table is not None:
            console = terminal.console(outlet)
            for line in results(result.table):
                console.print(line, soft_wrap=not hasattr(line, "columns"))
        result.raise_for_status()


# -- what a result looks like ----------------------------------------------------------------------

NAMES = {"kv": "KV over the link", "ids": "ids + extend"}
JUDGED = ("mean", "max", "sigma")


def results(table: Mapping[str, Any]) -> Iterator[str | Text | Table]:
    """What was measured, both ways side by side, and how far the times can be trusted."""
    from rich.text import Text

    yield from _intro(table)
    yield ""
    yield _side_by_side(table)
    yield ""
    smaller = [f"{key}: {NAMES.get(table['smaller'][key], 'equal')}" for key in JUDGED]
    yield f"smaller is - {', '.join(smaller)}"
    for way, name in NAMES.items():
        if wrong := table["ways"][way]["count"] - table["ways"][way]["same"]:
            yield Text(f"{name}: {wrong} times not what the relay has", "bold red")
    trust, sound = _trust(table)
    yield Text(trust, "" if sound else "bold")


def _intro(table: Mapping[str, Any]) -> Iterator[str]:
    from pddrt import show

    s = table["setting"]
    steps = "modelled steps" if table["modelled"] else "real steps"
    yield (
        f"{s['tokens']:,} tokens after {s['context']:,}: {show.clean(s['model'])} in {s['dtype']}, "
        f"{table['kv_bytes_per_token']:,} B of KV a token; {steps}, {s['clock']} clock"
    )
    others = (
        f"others ask for {100 * s['cross_traffic']:.3g} % of it, in flows of {s['cross_flow']}"
        if s["cross_traffic"]
        else "all of it"
    )
    yield f"link: {s['rate']}; {s['delay']} one way, jitter {s['jitter']}; {others}"


def _side_by_side(table: Mapping[str, Any]) -> Table:
    from rich.table import Table

    from pddrt.show import duration, size

    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    ways = table["ways"]
    shown.add_column(f"{ways['ids']['count']:,} times each", no_wrap=True)
    for name in (*NAMES.values(), "KV : ids"):
        shown.add_column(name, justify="right", no_wrap=True)

    def factor(key: str) -> str:
        value = table["kv_over_ids"][key]
        return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    for key in ("mean", "p50", "p99", "max", "sigma"):
        times = [duration(ways[way]["total_s"][key]) for way in NAMES]
        shown.add_row(key, *times, factor(key))
    shown.add_row("bytes", *(size(ways[way]["bytes"]) for way in NAMES), factor("bytes"))
    for part in ("copy_out", "wire", "copy_in", "extend"):
        parts = [ways[way]["parts_s"].get(part) for way in NAMES]
        means = ["" if p is None else duration(p["mean"]) for p in parts]
        shown.add_row(f"  {part.replace('_', ' ')}, mean", *means, "")
    return shown


def _trust(table: Mapping[str, Any]) -> tuple[str, bool]:
    """How well this machine kept the times, and whether well enough."""
    from pddrt.show import duration

    about, link = table["provenance"], table["link"]
    fidelity = about["fidelity"]
    busy = f"the link was busy {100 * link['busy_fraction']:.0f} % of the time"
    if fidelity["verdict"] == "exact":
        return f"{busy}; times are exact", True
    late = (
        f"{busy}; {fidelity['verdict']}: data left {duration(link['late_p99_s'])} late (p99; worst "
        f"{duration(link['late_max_s'])}; allowed {duration(fidelity['limit_s'])})"
    )
    cores, load = about["machine"]["cores"], about["machine"]["load_before"]
    crowded = load is not None and load > cores / 2
    if crowded:
        late += f"; {load:.1f} processes wanted the {cores} cores already, which slows steps"
    sound = fidelity["verdict"] == "ok" and not crowded
    return late if sound else f"{late}: trust the times less", sound
