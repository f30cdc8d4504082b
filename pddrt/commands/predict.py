"""`pddrt netem predict`: how long transfers take over a link, in virtual time.

Parses, calls, prints. `options.Terminal` says how it gets at the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pddrt.commands.options import Terminal
from pddrt.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from pddrt.link_fields import Bdp
    from pddrt.netem.jitter import Shape
    from pddrt.netem.predict import Path, Predicted, Transfer, WindowCap
    from pddrt.netem.profiles import Profile

MOST_FLOWS = 64
MOST_OVERHEAD = 1448
"""Headers as long as what they head."""
TCPS = ("none", "reno", "cubic", "bbr")


def _option(metavar: str, text: str, default: str | None = None) -> Any:
    shown = f"{text} Default: {default}." if default else text
    return typer.Option(metavar=metavar, help=shown, show_default=False)


def predict(
    context: typer.Context,
    bytes_: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Payload of each flow.")],
    rate: Annotated[
        str | None, _option("RATE", "Of the link, for packets with their headers.", "the profile's")
    ] = None,
    delay: Annotated[
        str | None, _option("TIME", "One way.", "the profile's, 0 s without one")
    ] = None,
    profile: Annotated[
        str | None,
        _option(
            "NAME|FILE",
            "A named WAN, or a profile or trace from a file: see pddrt netem profile. Options "
            "beside it come first; beside a trace the lower rate and the longer delay hold.",
        ),
    ] = None,
    jitter: Annotated[
        str | None, _option("TIME", "Standard deviation of the delay.", "the profile's, 0 s")
    ] = None,
    shape: Annotated[
        str | None,
        _option(
            "NAME|FILE", "Of the jitter: log-normal, normal, uniform, pareto, or a .dist file."
        ),
    ] = None,
    correlation: Annotated[
        str | None,
        _option("TIME", "Over it the delay forgets itself.", "10 standard deviations"),
    ] = None,
    queue: Annotated[
        str | None,
        _option(
            "SIZE",
            "Bytes the bottleneck holds before it drops, or '0.5 BDP' or 'unlimited'.",
            "1 BDP, 64 KiB at least",
        ),
    ] = None,
    qdisc: Annotated[
        str | None,
        _option("fifo|fair", "Who is served next.", "fifo; without TCP fair"),
    ] = None,
    aqm: Annotated[str, _option("drop-tail|codel", "What the queue drops.", "drop-tail")] = (
        "drop-tail"
    ),
    loss: Annotated[
        str | None, _option("SHARE", "Of segments, e.g. 0.1%.", "the profile's, 0")
    ] = None,
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
    the flows share the rate evenly. Jitter never reorders a flow; the delay that came of it is
    reported.
    """
    from pddrt.commands.profile import told
    from pddrt.netem.predict import TooLong
    from pddrt.netem.predict import predict as virtual
    from pddrt.netem.profiles import load
    from pddrt.trace import dumps

    terminal: Terminal = context.obj
    path, transfers = _read({k.rstrip("_"): v for k, v in context.params.items()})
    with terminal.outlet() as outlet:
        with terminal.signals_end_it():
            try:
                predicted = virtual(path, transfers, seed=seed)
            except TooLong as error:
                blamed = f"--bytes: found {bytes_}"
                if (cap := path.window_cap(transfers)) is not None:
                    blamed = _capped(cap, context.params)
                raise BadInput(f"{blamed}: {error}") from None
        if json:
            outlet.write(dumps(_json(transfers, predicted)) + "\n")
            return
        console = terminal.console(outlet)
        if profile is not None:
            console.print(told(profile, load(profile)))
            console.print()
        bars = console.is_terminal and not console.is_dumb_terminal
        for line in _results(transfers, predicted, bars, console.width):
            console.print(line, soft_wrap=not hasattr(line, "columns"))
        if (cap := path.window_cap(transfers)) is not None and _reached(transfers, predicted, cap):
            console.print(_capped(cap, context.params), soft_wrap=True)


# -- what was asked --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Options:
    """Reads options by name and notes what is wrong with them."""

    given: Mapping[str, Any]
    problems: list[str]

    def among(self, name: str, parse: Callable[[Any], Any], other: Any, least: int = 0) -> Any:
        """The option, or where it is absent the `other` figure."""
        return other if self.given[name] is None else self.read(name, parse, least)

    def choice(self, name: str, allowed: Sequence[str]) -> None:
        if (found := self.given[name]) is not None and found not in allowed:
            self.problems.append(f"--{name}: found '{found}'; allowed: {' | '.join(allowed)}")

    def read(self, name: str, parse: Callable[[Any], Any], least: int | None = 0) -> Any:
        """`least` None: any value will do."""
        flag = f"--{name.replace('_', '-')}"
        try:
            value = parse(self.given[name])
        except ValueError as error:
            self.problems.append(f"{flag}: {error}")
            return least
        if least is not None and value < least:
            allowed = "above zero" if least == 1 else f"{least} or more"
            self.problems.append(f"{flag}: found {self.given[name]}; allowed: {allowed}")
            return least
        return value


def _read(given: Mapping[str, Any]) -> tuple[Path, list[Transfer]]:
    """Raises BadInput with all that is wrong, by option."""
    from pddrt.link_fields import parse_share
    from pddrt.netem.losses import BurstLoss
    from pddrt.netem.predict import Path, Transfer
    from pddrt.units import format_duration, parse_duration, parse_size

    options = _Options(given, [])
    base = _profile(options)
    rate = options.among("rate", parse_rate_of_link, base.rate, 1)
    if rate is None and (base.trace is None or base.trace.peak is None):
        if not options.problems:  # else the profile that may have one could not be read
            options.problems.append("--rate: missing; needed without a profile that has one")
        rate = 1
    delay = options.among("delay", parse_duration, base.delay)
    jitter = options.among("jitter", parse_duration, base.jitter)
    correlation = options.among("correlation", parse_duration, base.correlation, 1)
    if jitter and not delay:
        if given["delay"] is None and base.trace is not None and (span := base.trace.span("delay")):
            delay = round(span.least)  # beside a trace the longer delay holds
        elif given["jitter"] is None:
            options.problems.append(
                f"--delay: found {given['delay']} beside the profile's jitter of "
                f"{format_duration(jitter)}, which has no room in it; allowed: above zero"
            )
        else:
            options.problems.append(
                "--jitter: found it with a delay of 0, which has no room for it"
            )
    size = options.read("bytes", parse_size, 1)
    loss = options.among("loss", parse_share, base.loss)
    burst = given["loss_burst"] or (base.burst if given["loss"] is None else None)
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
    if overhead > MOST_OVERHEAD:
        found = given["overhead"]
        options.problems.append(f"--overhead: found {found}; allowed: up to {MOST_OVERHEAD} B")
    counts = given["flows"], given["streams"]
    for name, count in zip(("flows", "streams"), counts, strict=True):
        if not 1 <= count <= MOST_FLOWS:
            options.problems.append(
                f"--{name}: found {count}; allowed: a whole number from 1 to {MOST_FLOWS}"
            )
    options.choice("tcp", TCPS)
    options.choice("qdisc", ("fifo", "fair"))
    options.choice("aqm", ("drop-tail", "codel"))
    if given["tcp"] == "none":
        options.problems += _needs_tcp(given, base)
    path = Path(
        rate,
        delay,
        loss=loss,
        burst=burst if loss else None,
        overhead=overhead,
        jitter=jitter,
        shape=_shape(options, base),
        correlation=correlation,
        qdisc=given["qdisc"],
        codel=given["aqm"] == "codel",
        trace=base.trace,
    )
    queue = base.queue
    if given["queue"] is not None:
        queue = options.read("queue", parse_queue_of_link, None)
    if options.problems:
        raise BadInput(options.problems)
    path = replace(path, queue=_queue(queue, path))
    flows, streams = counts
    transfers = [
        Transfer(size, i * every, given["tcp"], streams, given["warm"], **buffers)
        for i in range(flows)
    ]
    return path, transfers


def _needs_tcp(given: Mapping[str, Any], base: Profile) -> Iterator[str]:
    """What would do nothing without TCP, as a scenario has it."""
    from pddrt.links import NEEDS_TCP

    needed = "with --tcp none; needed: --tcp reno | cubic | bbr"
    unused = {
        "streams": 1, "send_buffer": "4 MiB", "receive_buffer": "4 MiB", "queue": None,
        "aqm": "drop-tail", "loss": None,
    }  # fmt: skip
    for name, default in unused.items():
        if given[name] not in (default, "0"):
            yield f"--{name.replace('_', '-')}: found {NEEDS_TCP[name]} {needed}"
    if given["warm"]:
        yield f"--warm: found {NEEDS_TCP['connections']} {needed}"
    if (base.loss and given["loss"] is None) or (base.trace is not None and base.trace.losses):
        yield f"--profile: found one that loses segments {needed}"


def _reached(transfers: Sequence[Transfer], predicted: Predicted, cap: WindowCap) -> bool:
    """Whether a flow came near it: a short one is over before its window is open."""
    from pddrt.types import SECOND

    ends = zip(transfers, predicted.ends, strict=True)
    return any(2 * t.nbytes * SECOND > cap.rate * (end - t.start) for t, end in ends)


def _capped(cap: WindowCap, given: Mapping[str, Any]) -> str:
    from pddrt.show import duration, size
    from pddrt.units import format_rate

    flag = f"--{cap.buffer.replace('_', '-')}"
    return (
        f"{flag}: found {given[cap.buffer]}, which limits a flow to {format_rate(cap.rate, 3)}: "
        f"{size(cap.window)} in each round trip of {duration(cap.round_trip)}"
    )


def parse_rate_of_link(value: object) -> int:
    from pddrt.units import parse_rate

    return parse_rate(value)


def parse_queue_of_link(value: object) -> Any:
    from pddrt.link_fields import parse_queue

    return parse_queue(value)


def _profile(options: _Options) -> Profile:
    from pddrt.netem.profiles import Profile, load

    name = options.given["profile"]
    if name is not None:
        try:
            return load(name)
        except BadInput as error:
            options.problems += [f"--profile: {text}" for text in error.problems]
    return Profile("")


def _shape(options: _Options, base: Profile) -> Shape:
    from pddrt.netem.profiles import load_shape

    name = options.given["shape"]
    if name is not None:
        try:
            return load_shape(name)
        except BadInput as error:
            options.problems += [f"--shape: {text}" for text in error.problems]
    return base.shape


def _queue(queue: int | Bdp | str | None, path: Path) -> int | None:
    """Bytes of a size, of so many bandwidth-delay products, or more than any."""
    from pddrt.link_fields import Bdp
    from pddrt.units import LARGEST

    if isinstance(queue, str):
        return LARGEST
    if isinstance(queue, Bdp):
        return max(1, queue.nbytes(path.peak, 2 * path.delay))
    return queue


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
        "delay_s": None
        if predicted.delay is None
        else {"mean": Seconds(predicted.delay[0]), "deviation": Seconds(predicted.delay[1])},
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
    if predicted.delay is not None:
        mean, deviation = (duration(one) for one in predicted.delay)
        yield f"effective delay, order kept: mean {mean}, standard deviation {deviation}"
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
