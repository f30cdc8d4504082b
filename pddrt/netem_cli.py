"""`pddrt netem`: the emulated link by itself.

Parses, calls, prints. `bench_cli.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.bench_cli import Terminal
from pddrt.errors import BadInput

if TYPE_CHECKING:
    from fractions import Fraction

    from rich.table import Table

    from pddrt.netem.predict import Path, Predicted, Transfer

app = typer.Typer(help="The emulated link by itself.", no_args_is_help=True, rich_markup_mode=None)

MOST_FLOWS = 64
TCPS = ("none", "reno", "cubic", "bbr")


@app.callback()
def netem() -> None:
    pass


def _option(metavar: str, text: str, default: str | None = None) -> Any:
    shown = f"{text} Default: {default}." if default else text
    return typer.Option(metavar=metavar, help=shown, show_default=False)


@app.command(short_help="Virtual transfers over a link: when is each done?")
def predict(
    context: typer.Context,
    rate: Annotated[str, _option("RATE", "Of the link, for packets with their headers.")],
    bytes_: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Payload of each flow.")],
    delay: Annotated[str, _option("TIME", "One way.", "0 s")] = "0 s",
    queue: Annotated[
        str | None,
        _option(
            "SIZE",
            "Bytes the bottleneck holds before it drops, or '0.5 BDP' or 'unlimited'.",
            "1 BDP, 64 KiB at least",
        ),
    ] = None,
    loss: Annotated[str, _option("SHARE", "Of segments, e.g. 0.1%.", "0")] = "0",
    loss_burst: Annotated[
        float | None, _option("N", "Mean length of a row of lost segments.", "each by itself")
    ] = None,
    tcp: Annotated[str, _option("|".join(TCPS), "Congestion control.", "cubic")] = "cubic",
    flows: Annotated[int, _option("N", "Transfers at once.", "1")] = 1,
    every: Annotated[
        str,
        _option(
            "TIME",
            "Each flow starts so long after the one before: programs are never in step.",
            "1 ms",
        ),
    ] = "1 ms",
    streams: Annotated[int, _option("N", "Connections of each flow.", "1")] = 1,
    warm: Annotated[
        bool, typer.Option("--warm", help="Connections are open, and their windows as well.")
    ] = False,
    send_buffer: Annotated[str, _option("SIZE", "Of a sender's socket.", "4 MiB")] = "4 MiB",
    receive_buffer: Annotated[str, _option("SIZE", "Of a receiver's socket.", "4 MiB")] = "4 MiB",
    overhead: Annotated[
        str,
        _option("SIZE", "Headers of a segment of 1,448 bytes. 0 makes the rate goodput.", "52 B"),
    ] = "52 B",
    seed: Annotated[int, _option("N", "Of losses and of BBR's first phase.", "0")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON with a point every 10 ms, and nothing else.")
    ] = False,
) -> None:
    """How long transfers take over a link, by a packet-level model of TCP in virtual time.

    Times run from the first SYN to the arrival of the last byte (with --warm, and with --tcp none,
    from the first byte handed over); the handshake is among them. Bytes are payload that has
    arrived in order. Everything goes one way. Without TCP nothing is lost and nothing has headers:
    the flows share the rate evenly.
    """
    from pddrt.netem.predict import TooLong
    from pddrt.netem.predict import predict as virtual
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    path, transfers = _read({k.rstrip("_"): v for k, v in context.params.items()})
    with terminal.outlet() as outlet:
        with terminal.signals_end_it():
            try:
                predicted = virtual(path, transfers, seed=seed)
            except TooLong as error:
                raise BadInput(f"--bytes: found {bytes_}: {error}") from None
        if json:
            outlet.write(dumps(_json(transfers, predicted)) + "\n")
            return
        console = terminal.console(outlet)
        for line in _results(transfers, predicted, console.is_terminal, console.width):
            console.print(line, soft_wrap=not hasattr(line, "columns"))


# -- what was asked --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Options:
    """Reads options by name and notes what is wrong with them."""

    given: Mapping[str, Any]
    problems: list[str]

    def read(self, name: str, parse: Callable[[Any], Any], least: int = 0) -> Any:
        flag = f"--{name.replace('_', '-')}"
        try:
            value = parse(self.given[name])
        except ValueError as error:
            self.problems.append(f"{flag}: {error}")
            return least
        if value < least:
            allowed = "above zero" if least == 1 else f"{least} or more"
            self.problems.append(f"{flag}: found {self.given[name]}; allowed: {allowed}")
            return least
        return value


def _number(text: str) -> Fraction:
    """A plain decimal. ValueError for anything else: an exponent might take for ever."""
    from fractions import Fraction

    text = text.strip()
    if len(text) > 32 or not re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII):
        raise ValueError
    return Fraction(text)


def _share(value: str) -> float:
    """`0.1%` as 0.001. ValueError for what is none, or 90 % and more, which no TCP survives."""
    from pddrt.units import shown

    text = value.strip()
    with contextlib.suppress(ValueError):
        number = _number(text.removesuffix("%"))
        if number < 90 and (text.endswith("%") or not number):
            return float(number / 100)
    raise ValueError(f"found {shown(value)}; allowed: a share below 90% such as 0.1%, or 0")


def _read(given: Mapping[str, Any]) -> tuple[Path, list[Transfer]]:
    """Raises BadInput with all that is wrong, by option."""
    from pddrt.netem.bottleneck import BurstLoss
    from pddrt.netem.predict import Path, Transfer
    from pddrt.units import parse_duration, parse_rate, parse_size

    options = _Options(given, [])
    rate = options.read("rate", parse_rate, 1)
    delay = options.read("delay", parse_duration)
    size = options.read("bytes", parse_size, 1)
    queue = None
    if given["queue"] is not None:
        queue = options.read("queue", lambda value: _queue(value, rate, delay), 1)
    loss = options.read("loss", _share)
    burst = given["loss_burst"]
    if burst is not None and loss:
        try:
            BurstLoss(loss, burst, "")
        except ValueError:
            most = "so short that losses remain the given share"
            options.problems.append(f"--loss-burst: found {burst:g}; allowed: 1 or more, {most}")
    every = options.read("every", parse_duration)
    buffers = {
        name: options.read(name, parse_size, 4096) for name in ("send_buffer", "receive_buffer")
    }
    overhead = options.read("overhead", parse_size)
    counts = given["flows"], given["streams"]
    for name, count in zip(("flows", "streams"), counts, strict=True):
        if not 1 <= count <= MOST_FLOWS:
            options.problems.append(
                f"--{name}: found {count}; allowed: a whole number from 1 to {MOST_FLOWS}"
            )
    if given["tcp"] not in TCPS:
        options.problems.append(f"--tcp: found '{given['tcp']}'; allowed: {' | '.join(TCPS)}")
    if options.problems:
        raise BadInput(options.problems)
    flows, streams = counts
    transfers = [
        Transfer(size, i * every, given["tcp"], streams, given["warm"], **buffers)
        for i in range(flows)
    ]
    return Path(rate, delay, queue, loss, burst if loss else None, overhead), transfers


def _queue(value: str, rate: int, delay: int) -> int:
    """Bytes of a size, of so many bandwidth-delay products, or more than any."""
    from pddrt.types import SECOND
    from pddrt.units import LARGEST, SIZES, parse_size

    text = value.strip()
    if text == "unlimited":
        return LARGEST
    if text.upper().endswith("BDP"):
        with contextlib.suppress(ValueError):
            return round(_number(text[:-3]) * rate * 2 * delay / SECOND)
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(str(error).replace(SIZES, f"{SIZES}, '0.5 BDP', 'unlimited'")) from None


# -- what came out ---------------------------------------------------------------------------------


def _json(transfers: Sequence[Transfer], predicted: Predicted) -> dict[str, Any]:
    from pddrt.netem.predict import STEP
    from pddrt.trace import Seconds

    return {
        "flows": [
            {"start_s": Seconds(t.start), "fct_s": Seconds(end - t.start), "bytes": t.nbytes}
            for t, end in zip(transfers, predicted.ends, strict=True)
        ],
        "curve": [
            {"t_s": Seconds(i * STEP), "bytes": point} for i, point in enumerate(predicted.curve)
        ],
        "retransmits": predicted.retransmits,
        "dropped": predicted.dropped,
        "lost": predicted.lost,
    }


def _results(
    transfers: Sequence[Transfer], predicted: Predicted, terminal: bool, width: int
) -> Iterator[str | Table]:
    from rich.table import Table

    from pddrt.netem.predict import jain
    from pddrt.show import duration, many, size
    from pddrt.types import SECOND
    from pddrt.units import format_rate

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("flow", "start", "time", "bytes", "goodput"):
        table.add_column(name, justify="right", no_wrap=True)
    goodputs = []
    for i, (transfer, end) in enumerate(zip(transfers, predicted.ends, strict=True)):
        time = max(end - transfer.start, 1)
        goodputs.append(transfer.nbytes * SECOND // time)
        cells = duration(transfer.start), duration(time), size(transfer.nbytes)
        table.add_row(str(i), *cells, format_rate(max(goodputs[-1], 1), 3))
    yield table
    yield ""
    yield from _plot(predicted, width) if terminal else _progress(predicted)
    yield ""
    fairness = f"; Jain's index {jain(goodputs):.3f}" if len(goodputs) > 1 else ""
    yield (
        f"{many(predicted.retransmits, 'segment')} sent again: {predicted.dropped:,} found the "
        f"queue full, the path lost {predicted.lost:,}{fairness}"
    )


_BLOCKS = " ▁▂▃▄▅▆▇█"


def _plot(predicted: Predicted, width: int) -> Iterator[str]:
    """A line a flow: its goodput over time, against the highest of any."""
    from pddrt.netem.predict import STEP
    from pddrt.show import duration
    from pddrt.types import SECOND
    from pddrt.units import format_rate

    curve = predicted.curve
    columns = max(1, min(72, width - 6, len(curve) - 1))
    marks = [round(i * (len(curve) - 1) / columns) for i in range(columns + 1)]
    rates = [
        [(curve[b][i] - curve[a][i]) * SECOND // (max(b - a, 1) * STEP) for a, b in pairwise(marks)]
        for i in range(len(curve[0]))
    ]
    top = max(1, *(max(row) for row in rates))
    for i, row in enumerate(rates):
        yield f"{i:4d}  " + "".join(_BLOCKS[-(-8 * rate // top)] for rate in row)
    end = duration((len(curve) - 1) * STEP)
    yield f"      0 to {end}; a full block is {format_rate(top, 3)}"


def _progress(predicted: Predicted) -> Iterator[str]:
    """For a program or a file: bytes that each flow has by every tenth of the time."""
    from pddrt.netem.predict import STEP
    from pddrt.trace import Seconds

    curve = predicted.curve
    yield "t_s bytes"
    for i in sorted({round(tenth * (len(curve) - 1) / 10) for tenth in range(11)}):
        yield f"{float(str(Seconds(i * STEP))):g} {' '.join(map(str, curve[i]))}"
