"""`pddrt netem proxy`: the emulated link as a TCP proxy for any program.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import BadInput, Interrupted

if TYPE_CHECKING:
    from rich.table import Table

    from pddrt.netem.proxy import Proxies, Proxy
    from pddrt.netem.proxy_file import Plan
    from pddrt.types import Ns


def _option(metavar: str, text: str, default: str | None = None) -> Any:
    shown = f"{text} Default: {default}." if default else text
    return typer.Option(metavar=metavar, help=shown, show_default=False)


def proxy(
    context: typer.Context,
    listen: Annotated[
        str | None,
        _option(
            "HOST:PORT",
            "Where clients connect. :PORT is this machine alone, 0.0.0.0:PORT lets all in; port "
            "0 takes a free one.",
        ),
    ] = None,
    upstream: Annotated[str | None, _option("HOST:PORT", "Where the program really is.")] = None,
    rate: Annotated[
        str | None, _option("RATE", "Of each direction, all connections together.", "unlimited")
    ] = None,
    delay: Annotated[str | None, _option("TIME", "One way.", "0 s")] = None,
    jitter: Annotated[
        str | None, _option("TIME", "Standard deviation of the delay.", "0 s")
    ] = None,
    rate_down: Annotated[
        str | None, _option("RATE", "Towards the client, where it differs.")
    ] = None,
    delay_down: Annotated[
        str | None, _option("TIME", "Towards the client, where it differs.")
    ] = None,
    profile: Annotated[
        str | None,
        _option("NAME|FILE", "A named network, a trace or a profile: docs/links.md."),
    ] = None,
    tcp: Annotated[
        str | None, _option("none|reno|cubic|bbr", "TCP that the link is to seem to carry.", "none")
    ] = None,
    loss: Annotated[str | None, _option("SHARE", "Of segments, with --tcp.", "0")] = None,
    queue: Annotated[
        str | None, _option("SIZE", "What the bottleneck holds, with --tcp.", "1 BDP")
    ] = None,
    file: Annotated[
        str | None, _option("FILE", "Proxies from a file (YAML), several at once.")
    ] = None,
    api: Annotated[
        str | None,
        _option("HOST:PORT", "Control by HTTP, as Toxiproxy's clients do (its port is 8474)."),
    ] = None,
    seed: Annotated[int | None, _option("N", "Of jitter and toxicity.", "0")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="End after so long.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print an object a second and proxy, one a line.")
    ] = False,
) -> None:
    """Relay TCP connections over an emulated link until Ctrl-C.

    Ends travel with the data: a half-close or a reset arrives one delay later, and so does the
    request to connect. Once a second a line a proxy says what went through. The address in use
    is said first, as `NAME listens on HOST:PORT`.
    """
    from pddrt.netem.proxy_file import Plan, of_options, read

    terminal: Terminal = context.obj
    options = {
        "listen": listen, "upstream": upstream, "rate": rate, "delay": delay, "jitter": jitter,
        "rate_down": rate_down, "delay_down": delay_down, "profile": profile, "tcp": tcp,
        "loss": loss, "queue": queue,
    }  # fmt: skip
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if file is not None and given:
        raise BadInput(f"--file and {', '.join(given)}: what the link is, the file says")
    if file is None and api is None and not given:
        raise BadInput("--listen and --upstream, or --file, or --api: one of them is needed")
    plan = Plan(()) if file is None and not given else (read(file) if file else of_options(options))
    plan = plan.with_options(api, seed)
    if not plan.proxies and plan.api is None:
        raise BadInput(f"{file}: found no proxies and no api; needed: one of them, or --api")
    lasting = _lasting(for_)
    with terminal.outlet() as outlet:
        console = terminal.console(outlet)
        shows = _json_shows(outlet.write) if json else _shows(console)
        _serve(plan, lasting, shows)


def _lasting(text: str | None) -> Ns | None:
    from pddrt.units import parse_duration

    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise BadInput(f"--for: {error}") from None


def _serve(plan: Plan, lasting: Ns | None, show: Callable[[Proxies, Ns, bool], None]) -> None:
    """Until the time is up, or somebody has had enough (Interrupted)."""
    from pddrt.alarm import attentive
    from pddrt.hosting import new_loop

    with attentive(), asyncio.Runner(loop_factory=lambda: new_loop("wall")) as runner:
        asked = runner.run(_main(plan, lasting, show))
    if asked:
        raise Interrupted("interrupted")


async def _main(plan: Plan, lasting: Ns | None, show: Callable[[Proxies, Ns, bool], None]) -> bool:
    from pddrt.env import WallEnv
    from pddrt.netem.proxy import Proxies, parse_address
    from pddrt.netem.proxy_api import Serving
    from pddrt.trace import Trace
    from pddrt.types import SECOND

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    env = WallEnv(plan.seed, Trace())
    proxies, serving = Proxies(env, say), None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        for spec in plan.proxies:
            made = await proxies.add(spec)
            state = f"listens on {made.listen}" if made.enabled else "is disabled"
            say(f"{made.name} {state}, for {made.upstream}")
        if plan.api is not None:
            serving = Serving(proxies)
            host, port = await serving.start(*parse_address(plan.api))
            say(f"control by HTTP on {host}:{port}")
        begun = env.now()
        end = None if lasting is None else begun + lasting
        tick = begun + SECOND
        while not stop.is_set() and (end is None or env.now() < end):
            due = tick if end is None else min(tick, end)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0, due - env.now()) / SECOND)
            if env.now() >= tick:
                show(proxies, env.now() - begun, False)
                tick += SECOND
        show(proxies, env.now() - begun, True)
        return stop.is_set()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if serving is not None:
            await serving.close()
        await proxies.close()


# -- what is shown ---------------------------------------------------------------------------------


LEAST_WIDTH = 80
"""Columns that the live table needs."""


class _Rates:
    """Bytes a second since the last look, both ways."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Ns, int, int]] = {}

    def of(self, proxy: Proxy, now: Ns) -> tuple[float, float]:
        from pddrt.types import SECOND

        up, down = proxy.transferred
        then, up_then, down_then = self._before.get(proxy.name, (0, 0, 0))
        self._before[proxy.name] = (now, up, down)
        span = max(now - then, 1) / SECOND
        return (up - up_then) / span, (down - down_then) / span


def _shows(console: Any) -> Callable[[Proxies, Ns, bool], None]:
    """A table in place on a terminal that can have one, else a line a proxy and second."""
    from rich.live import Live

    from pddrt import show as _  # noqa: F401 - loaded now, not while data is due

    rates = _Rates()
    roomy = console.is_terminal and not console.is_dumb_terminal and console.width >= LEAST_WIDTH
    live = Live(console=console, auto_refresh=False) if roomy else None
    quiet: dict[str, bool] = {}

    def show(proxies: Proxies, now: Ns, last: bool) -> None:
        rows = [_row(p, now, rates) for p in proxies.by_name.values()]
        if live is not None:
            if not live.is_started:
                live.start()
            live.update(_table(rows), refresh=True)
            if last:
                live.stop()
        elif not last:
            for row in rows:
                idle = row[4] == row[5] == "0 B/s" and row[1] == "0"
                if not (idle and quiet.get(row[0])):  # once is enough
                    console.print(_line(now, row), soft_wrap=True)
                quiet[row[0]] = idle
        if last:
            for text in _totals(proxies):
                console.print(text, soft_wrap=True)

    return show


COLUMNS = ("proxy", "open", "accepted", "refused", "up", "down", "held", "late p99")


def _row(proxy: Proxy, now: Ns, rates: _Rates) -> tuple[str, ...]:
    from pddrt.show import duration, size
    from pddrt.units import format_rate

    up, down = (format_rate(round(r), 3) if r >= 1 else "0 B/s" for r in rates.of(proxy, now))
    late = max(kept.ledger.late_quantile(0.99) for kept in proxy.kept())
    counts = len(proxy.connections), proxy.accepted, proxy.refused
    return (proxy.name, *map(str, counts), up, down, size(proxy.held), duration(late))


def _line(now: Ns, row: Sequence[str]) -> str:
    from pddrt.types import SECOND

    name, opened, accepted, refused, up, down, held, late = row
    return (
        f"{now / SECOND:6.1f} s  {name}: {opened} open of {accepted}, {refused} refused; "
        f"up {up}, down {down}; held {held}; late p99 {late}"
    )


def _table(rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _totals(proxies: Proxies) -> list[str]:
    from pddrt.netem.fidelity import judge
    from pddrt.show import many, size

    lines = []
    for proxy in proxies.by_name.values():
        up, down = proxy.transferred
        verdict = judge(proxy.kept())
        why = f": {'; '.join(verdict['why'])}" if verdict["why"] else ""
        lines.append(
            f"{proxy.name}: {many(proxy.accepted, 'connection')}, {size(up)} up, {size(down)} "
            f"down; times {verdict['verdict']}{why}"
        )
    said = [f"{what} ({n} times)" for what, n in proxies.notices.counts.items() if n > 1]
    return lines + said


def _json_shows(write: Callable[[str], Any]) -> Callable[[Proxies, Ns, bool], None]:
    from pddrt.netem.fidelity import judge
    from pddrt.trace import Seconds, dumps

    rates = _Rates()

    def show(proxies: Proxies, now: Ns, last: bool) -> None:
        for proxy in proxies.by_name.values():
            up, down = proxy.transferred
            up_rate, down_rate = rates.of(proxy, now)
            about = {
                "t_s": Seconds(now),
                "proxy": proxy.name,
                "open": len(proxy.connections),
                "accepted": proxy.accepted,
                "refused": proxy.refused,
                "up_bytes": up,
                "down_bytes": down,
                "up_bytes_per_s": round(up_rate),
                "down_bytes_per_s": round(down_rate),
                "held_bytes": proxy.held,
            }
            if last:
                about["fidelity"] = judge(proxy.kept())
            write(dumps(about) + "\n")

    return show
