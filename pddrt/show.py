"""What a run shows on the terminal: texts as they come, then one table. Reads events and the
summary; measures nothing.

Requests run side by side, but a text is read one at a time: one request is in the spotlight and
streams token by token; what the others get meanwhile is kept and shown when their turn comes. Who
made a token is its colour (P yellow, R cyan, M green) on a terminal, and a mark where the maker
changes (`[P]`, `[R]`, `[M]`) anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from pddrt import trace as ev
from pddrt.metrics import LEGS, Recorder, RequestRecord
from pddrt.trace import Event, Seconds
from pddrt.types import SECOND, Ns

STYLE = {"P": "yellow", "R": "cyan", "M": "green"}
WHERE = {"P": "prefill, site {}", "R": "relay decode, site {}", "M": "main decode, site {}"}
BAR = 64
MAX_TEXTS = 12
"""Beyond that many requests only the first texts are shown; all are in requests.jsonl."""
SHOWN_OF_MANY = 3


def seconds(ns: Ns | Seconds | None) -> str:
    """A time for the eye: three significant digits, in s or ms."""
    if ns is None:
        return "-"
    value = (ns.ns if isinstance(ns, Seconds) else ns) / SECOND
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{value * 1000:.3g} ms"


def amount(count: int) -> str:
    """Bytes for the eye."""
    power = 0
    while count >= 1000 ** (power + 1) and power < 4:
        power += 1
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


class LiveText:
    """Shows the answers as the client gets them. Listens to the trace, after the recorder."""

    def __init__(self, console: Console, recorder: Recorder, expected: int) -> None:
        self._console = console
        self._recorder = recorder
        self._limit = expected if expected <= MAX_TEXTS else SHOWN_OF_MANY
        self._colour = console.color_system is not None
        self._waiting: dict[str, list[ev.TokensReceived]] = {}
        self._ended: set[str] = set()
        self._spotlight: str | None = None
        self._source = ""
        self._shown = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, ev.TokensReceived):
            if event.request == self._spotlight:
                self._write(event)
            else:
                self._waiting.setdefault(event.request, []).append(event)
                self._next()
        elif isinstance(event, ev.Finished):
            if event.request == self._spotlight:
                self._end()
            else:
                self._waiting.setdefault(event.request, [])
                self._ended.add(event.request)
            self._next()

    def _next(self) -> None:
        """While the spotlight is free, gives it to the next request that has something to show."""
        while self._spotlight is None and self._waiting and self._shown < self._limit:
            request = next(iter(self._waiting))
            self._shown += 1
            self._spotlight, self._source = request, ""
            self._header(self._recorder.requests[request])
            for event in self._waiting.pop(request):
                self._write(event)
            if request in self._ended:
                self._end()

    def _end(self) -> None:
        assert self._spotlight is not None
        self._footer(self._recorder.requests[self._spotlight])
        self._spotlight = None

    def _header(self, record: RequestRecord) -> None:
        path = " > ".join(n for n in (record.prefill, record.relay, record.main) if n)
        title = f"{record.id}  {record.pipeline or 'not routed'}  {path}"
        title += f"  {record.prompt_tokens:,} prompt tokens"
        self._console.print(Text(title, style="bold"), soft_wrap=True)
        prompt = " ".join(record.prompt.split())
        width = max(40, min(self._console.width, 120)) - 4
        self._console.print(
            Text("> " + (prompt[:width] + " ..." if len(prompt) > width else prompt), "dim"),
            soft_wrap=True,
        )

    def _write(self, event: ev.TokensReceived) -> None:
        if not self._colour and event.source != self._source:
            self._console.out(f"[{event.source}]", end="")
        self._source = event.source
        if event.text:
            self._console.print(
                Text(event.text, STYLE.get(event.source, "")), end="", soft_wrap=True
            )

    def _footer(self, record: RequestRecord) -> None:
        self._console.print()
        if record.finish_reason in ("rejected", "aborted"):
            self._console.print(
                Text(f"{record.finish_reason}: {record.detail}", "red"), soft_wrap=True
            )
        counts = "  ".join(f"{s} {record.sources.count(s)}" for s in "PRM" if s in record.sources)
        line = Text.assemble(bar(record.sources), f"  {counts}  TTFT {seconds(record.ttft)}")
        if record.gap is not None:
            line.append(f"  gap at the switch {seconds(record.gap)}")
        self._console.print(line, soft_wrap=True)
        self._console.print()

    def close(self) -> None:
        """After the run: what was still in the spotlight ends its line; what was not shown is
        named.
        """
        if self._spotlight is not None:
            self._end()
        hidden = len(self._recorder.requests) - self._shown
        if hidden > 0 and self._shown:
            self._console.print(f"(and {hidden} more requests, in requests.jsonl)")
            self._console.print()


def bar(sources: str) -> Text:
    """The answer as a bar of letters, one for each token or, beyond BAR tokens, for each equal
    share of them.

    A maker with any token at all keeps at least one letter, so that a single P is never lost.
    """
    if len(sources) <= BAR:
        letters = sources
    else:
        groups = [(s, sources.count(s)) for s in dict.fromkeys(sources)]
        sizes = [max(1, n * BAR // len(sources)) for _, n in groups]
        sizes[sizes.index(max(sizes))] += BAR - sum(sizes)
        letters = "".join(s * n for (s, _), n in zip(groups, sizes, strict=True))
    text = Text()
    for letter in letters:
        text.append(letter, STYLE.get(letter, ""))
    return text


def legend(console: Console, sites: Mapping[str, str]) -> None:
    """Which colour or mark means which datacenter; `sites` by letter."""
    line = Text("tokens by maker: ")
    for letter, site in sites.items():
        line.append(f"{letter} ", "bold " + STYLE[letter])
        line.append(f"= {WHERE[letter].format(site)}   ", STYLE[letter])
    console.print(line, soft_wrap=True)
    console.print()


def results(console: Console, summary: Mapping[str, Any], recorder: Recorder) -> None:
    """The final tables: requests (when few), pipelines, legs of TTFT, tokens, links."""
    if len(recorder.requests) <= 24:
        _print(console, _request_table(recorder))
    _print(console, _pipeline_table(summary))
    tokens, roles = summary["tokens"], summary["tokens"]["by_role"]
    total = max(1, tokens["output"])
    shares = ", ".join(f"{r} {n:,} ({100 * n / total:.1f} %)" for r, n in roles.items())
    console.print(
        f"tokens     {tokens['prompt']:,} prompt, {tokens['output']:,} output: {shares}",
        soft_wrap=True,
    )
    for name, link in summary["links"].items():
        console.print(
            f"link {name:<6}{amount(link['bytes'])}: KV {amount(link['kv_bytes'])}, "
            f"ids {amount(link['ids_bytes'])}; busy {100 * link['busy_fraction']:.0f} %, "
            f"at most {link['peak_flows']} flows",
            soft_wrap=True,
        )
    r = summary["requests"]
    console.print(
        f"requests   {r['total']}: {r['finished']} finished, {r['rejected']} rejected, "
        f"{r['aborted']} aborted",
        soft_wrap=True,
    )
    for line in summary["invariants"]["violations"]:
        console.print(Text(f"violated: {line}", "bold red"), soft_wrap=True)


def _print(console: Console, table: Table) -> None:
    console.print(table)
    console.print()


def _request_table(recorder: Recorder) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    table.add_column("pipeline", no_wrap=True)
    for name in ("prompt", "P+R+M tokens", "TTFT", "TPOT", "gap", "ids"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for r in recorder.requests.values():
        table.add_row(
            r.id,
            r.pipeline or "-",
            f"{r.prompt_tokens:,}",
            " + ".join(str(r.sources.count(s)) for s in "PRM"),
            seconds(r.ttft),
            seconds(r.tpot),
            seconds(r.gap),
            str(r.handoff_ids or "-"),
            r.finish_reason or "-",
        )
    return table


def _pipeline_table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mean of")
    groups = {"all": {**summary, "requests": summary["requests"]["total"]}, **summary["pipelines"]}
    for name, group in groups.items():
        table.add_column(f"{name} ({group['requests']})", justify="right")

    def row(label: str, *path: str) -> None:
        cells = []
        for group in groups.values():
            value: Any = group
            for key in path:
                value = value[key]
            cells.append(seconds(value))
        table.add_row(label, *cells)

    row("TTFT", "ttft_s", "mean")
    for leg in LEGS:
        row(f"  {leg.replace('_', ' ')}", "ttft_legs_s", leg)
    row("TTFT p99", "ttft_s", "p99")
    row("TPOT", "tpot_s", "mean")
    row("ITL", "itl_s", "mean")
    row("ITL p99", "itl_s", "p99")
    row("gap at the switch", "handoff_gap_s", "mean")
    row("gap p99", "handoff_gap_s", "p99")
    return table


class Bars:
    """Progress of set-up work on stderr: a bar on a terminal, a line a stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: Any = None
        self._stage = ""

    def __call__(self, stage: str, done: float | None) -> None:
        """`done` from 0 to 1; None where nobody knows."""
        if not self._console.is_terminal:
            if stage != self._stage:
                self._console.print(stage, soft_wrap=True)
            self._stage = stage
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if stage != self._stage:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=None if done is None else 1.0)
            self._stage = stage
        if done is not None:
            self._progress.update(self._task, completed=done, total=1.0)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
