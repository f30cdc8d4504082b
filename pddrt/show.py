"""What a run looks like: who the makers are, an answer's head, bar and foot, and the final numbers.

Pure functions from records and summaries to rich renderables; `live` puts them on the screen. The
maker of a token has a letter and a colour, the same everywhere: P, R and M. Colours are of middle
brightness, so that they can be read on a dark terminal and on a light one; nothing is said by
colour alone.

What comes from a model, a prompt or a peer passes through `clean` before it is shown: it may hold
anything, escape sequences and rich's own markup too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pddrt import links
from pddrt.metrics import LEGS, Recorder, RequestRecord
from pddrt.pipelines import chosen_from
from pddrt.scenario import ResolvedInstance, Scenario
from pddrt.trace import Routed, Seconds
from pddrt.types import LETTER, Ns
from pddrt.units import format_duration, format_size
from pddrt.units import many as many

STYLE = {"P": "color(166)", "R": "color(32)", "M": "color(28)"}
MAX_BAR = 100
MAX_ROWS = 24
TOLD = 5
"""So many of those that did not finish are named, and so many violations."""
"""Up to so many requests the final numbers have a row for each."""

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but not tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufeff\ud800-\udfff\U000e0000-\U000e007f]"  # line ends, marks, halves, tags
)


def coloured(console: Console) -> bool:
    """Whether makers are told by colours, rather than by marks alone."""
    return console.color_system is not None and not console.no_color


def clean(text: str) -> str:
    """`text` without anything that a terminal would obey instead of showing it, but tabs and
    newlines. Controls become their pictures (ESC: U+241B), the rest its escape.
    """

    def picture(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code < 0x20 or code == 0x7F:
            return chr(0x2400 + code if code < 0x20 else 0x2421)
        return match[0].encode("unicode_escape").decode()

    return _COMMANDS.sub(picture, text.replace("\r\n", "\n"))


def one_line(text: str, width: int) -> Text:
    """The beginning of `text`, white space run together, in at most `width` cells."""
    line = Text(clean(" ".join(text[: 8 * width].split())), no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def duration(ns: Ns | Seconds | None) -> str:
    """For the eye: three digits."""
    if ns is None:
        return "-"
    value = ns.ns if isinstance(ns, Seconds) else ns
    return format_duration(value, 3) if value else "0"


def size(count: int) -> str:
    return format_size(count, 3)


# -- before: who is who ----------------------------------------------------------------------------


def intro(
    scenario: Scenario, instances: Sequence[ResolvedInstance], requests: int, colour: bool
) -> Iterator[Text | Table]:
    """What is about to run, which mark means whom, and what lies between the sites."""
    yield Text.assemble(
        (scenario.name, "bold"),
        f": {many(requests, 'request')} to {clean(scenario.model)} in {scenario.dtype}, "
        f"policy {scenario.pipeline.policy}, {scenario.clock} clock",
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    does = _duties(scenario, instances)
    for role, letter in LETTER.items():
        of = [i for i in instances if i.role == role]
        if of and role in does:
            names, sites = _joined(i.name for i in of), _joined(i.site for i in of)
            style = STYLE[letter]
            table.add_row(
                mark(letter, colour), Text(role, style), Text(names, style),
                Text(f"site {sites}", style), does[role],
            )  # fmt: skip
    for name, link in scenario.links.items():
        table.add_row("", "link", name, "-".join(link.between), ", ".join(links.facts(link)))
    yield table
    yield Text()


def _duties(scenario: Scenario, instances: Sequence[ResolvedInstance]) -> dict[str, str]:
    """What each role does under the scenario's policy; those that have no part are left out."""
    pipelines = chosen_from(scenario)
    main_sites = _joined(i.site for i in instances if i.role == "main")
    alone, duties = "computes the prompt and answers", {}
    if any(name.startswith("P-") for name in pipelines):
        duties["prefill"] = "computes the KV cache and the first token"
    if "P" in pipelines:
        duties["prefill"] = f"{duties.get('prefill', alone)}{', or answers' * (len(pipelines) > 1)}"
    if "P-RLD-MD" in pipelines:
        duties["relay"] = f"answers while the KV goes to site {main_sites}"
    elif "P-RLD" in pipelines:
        duties["relay"] = f"answers where the KV would take long to reach site {main_sites}"
    if any(name.endswith("-MD") for name in pipelines):
        duties["main"] = "makes the rest once it holds the KV"
    if "MD" in pipelines:
        duties["main"] = f"{duties.get('main', alone)}{', or all of it' * (len(pipelines) > 1)}"
    return duties


def _joined(names: Iterable[str]) -> str:
    """Distinct names, the middle ones left out where there are many."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique) if len(unique) <= 3 else f"{unique[0]} ... {unique[-1]}"


def mark(letter: str, colour: bool) -> Text:
    """What stands before the first token of a maker."""
    if colour:
        return Text(f" {letter} ", f"bold reverse {STYLE.get(letter, '')}")
    return Text(f"[{letter}]")


# -- an answer -------------------------------------------------------------------------------------


def head(record: RequestRecord, routed: Routed | None, width: int) -> Iterator[Text]:
    """Which request this is, the way it goes and why, and the beginning of its prompt."""
    if routed is None:
        yield Text.assemble((record.id, "bold"), "  not routed")
    else:
        path = " > ".join(n for n in (routed.prefill, routed.relay, routed.main) if n)
        prompt = many(routed.prompt_tokens, "prompt token")
        yield Text.assemble((f"{record.id}  {routed.pipeline}  {path}", "bold"), f"  {prompt}")
        yield Text(_why(routed))
    yield Text.assemble("> ", one_line(record.prompt, max(20, width - 2)), style="italic")


def _why(routed: Routed) -> str:
    wan, by = routed.wan_estimate_ns, routed.relay
    if wan is None:
        return routed.reason
    expected = f"its KV should take {duration(wan)} to reach {routed.main}"
    return f"{expected}, so {by} answers first" if by else expected


def bar(sources: str, width: int, colour: bool) -> Text:
    """The answer as a bar: a cell for each token or, beyond `width`, for an equal share of them.

    Where makers share a cell it shows the one with the fewest tokens, so that a single P is never
    lost. In colour, solid runs that carry their letter and count; else letters.
    """
    count = {s: sources.count(s) for s in dict.fromkeys(sources)}
    cells = min(len(sources), width, MAX_BAR)
    shares = (sources[c * len(sources) // cells : (c + 1) * len(sources) // cells]
              for c in range(cells))  # fmt: skip
    letters = "".join(min(dict.fromkeys(share), key=lambda s: count[s]) for share in shares)
    runs = ["".join(run) for _, run in groupby(letters)]
    text = Text(no_wrap=True)
    for run in runs:
        letter, shown = run[0], run
        if colour:
            once = sum(r[0] == letter for r in runs) == 1
            label = f" {letter} {count[letter]}" if once else f" {letter}"
            shown = (label if len(label) < len(run) else letter).ljust(len(run))
        style = f"{'bold reverse ' if colour else ''}{STYLE.get(letter, '')}"
        text.append(shown, style)
    return text


def foot(record: RequestRecord, width: int, colour: bool) -> Iterator[Text]:
    """How the answer came about: its makers, its latencies, its handoff."""
    if record.finish_reason in ("rejected", "aborted"):
        yield Text(f"{record.finish_reason}: {clean(record.detail)}", "bold red")
    elif record.finish_reason is None:
        yield Text("not ended", "bold red")
    if not record.sources:
        return
    yield bar(record.sources, width, colour)
    makers = " + ".join(
        f"{s} {record.sources.count(s):,}" for s in LETTER.values() if s in record.sources
    )
    facts = [f"{makers} tokens", f"TTFT {duration(record.ttft)}"]
    if record.tpot is not None:
        facts.append(f"TPOT {duration(record.tpot)}")
    yield Text(", ".join(facts))
    if handoff := _handoff(record):
        yield Text(handoff)


def _handoff(record: RequestRecord) -> str:
    """When the main decoder had the KV, and what the relay handed to it."""
    main = record.main or ""
    if main not in record.whole:
        unfinished = record.relay and main and record.finish_reason
        return f"ended before its KV was at {main}" if unfinished else ""
    kv = size(record.kv_received.get(main, 0))
    arrived = f"{kv} of KV were at {main} after {duration(record.whole[main] - record.sent)}"
    if record.gap is None:
        return arrived
    ids, seam = f"{many(record.handoff_ids, 'id')} handed over", record.seam
    if seam.mode != "one-shot":
        ids += f" by {seam.mode}" + (f" in {seam.rounds} rounds" if seam.pieces else "")
    return f"{arrived}; {ids}, gap {duration(record.gap)}"


# -- after: the numbers ----------------------------------------------------------------------------


def results(summary: Mapping[str, Any], recorder: Recorder, width: int) -> Iterator[Text | Table]:
    """Requests (when few), pipelines with the legs of TTFT, tokens, links, and what went wrong."""
    if recorder.requests and len(recorder.requests) <= MAX_ROWS:
        yield _request_table(recorder, width)
        yield Text()
    if recorder.requests:
        yield _pipeline_table(summary)
        yield Text()
    yield from _totals(summary)
    lost, broken = list(_lost(recorder)), summary["invariants"]["violations"]
    for record in lost[:TOLD]:
        yield Text(f"{record.finish_reason or 'not ended'}: {record.id}: {clean(record.detail)}",
                   "bold red")  # fmt: skip
    if len(lost) > TOLD:
        yield Text(f"and {len(lost) - TOLD:,} more that did not finish", "bold red")
    for line in broken[:TOLD]:
        yield Text(f"violated: {clean(line)}", "bold red")
    if len(broken) > TOLD:
        yield Text(f"and {len(broken) - TOLD:,} more violations", "bold red")
    if line := late(summary):
        yield Text(line, "bold")
    if strangers := summary["provenance"].get("strangers"):
        said = f"{many(strangers, 'connection')} to this run's ports did not speak its protocol"
        yield Text(f"{said}; dropped", "bold")


def _lost(recorder: Recorder) -> Iterator[RequestRecord]:
    return (r for r in recorder.requests.values() if r.finish_reason not in ("stop", "length"))


def _totals(summary: Mapping[str, Any]) -> Iterator[Table]:
    table = Table.grid(padding=(0, 2, 0, 0))
    requests, tokens = summary["requests"], summary["tokens"]
    ends = [f"{requests[k]:,} {k}" for k in ("finished", "rejected", "aborted") if requests[k]]
    table.add_row(
        "requests",
        f"{requests['total']:,}: {', '.join(ends) or 'none ended'}; "
        f"{many(tokens['prompt'], 'prompt token')}",
    )
    makers = [
        f"{LETTER[role]} {n:,} ({100 * n / tokens['output']:.1f} %)"
        for role, n in tokens["by_role"].items()
        if n
    ]
    table.add_row(
        "tokens", ": ".join([f"{tokens['output']:,}", *filter(None, [", ".join(makers)])])
    )
    if summary["slo_attainment"] is not None and summary["goodput_rps"] is not None:
        table.add_row(
            "SLO",
            f"met by {100 * summary['slo_attainment']:.0f} %; "
            f"goodput {summary['goodput_rps']:.3g} requests/s",
        )
    for name, link in summary["links"].items():
        ids = f", ids {size(link['ids_bytes'])}" if link["ids_bytes"] else ""
        table.add_row(
            f"link {name}",
            f"{size(link['bytes'])}: KV {size(link['kv_bytes'])}{ids}; "
            f"busy {100 * link['busy_fraction']:.0f} %, at most {many(link['peak_flows'], 'flow')}",
        )
    if (faults := summary.get("faults") or {}).get("planned"):  # each may strike often (`rate`)
        table.add_row(
            "faults",
            f"{faults['planned']:,} planned; {many(faults['injected'], 'strike')} took effect, "
            f"{faults['missed']:,} missed",
        )
    if parity := summary["parity"]:
        verdicts = ("equal", "near_ties", "different")
        facts = [f"{parity[k]:,} {k.replace('_', ' ')}" for k in verdicts if parity[k]]
        table.add_row("verified", f"{parity['checked']:,}: {', '.join(facts)}")
    yield table


def late(summary: Mapping[str, Any]) -> str:
    """One line where a wall-clock run could not keep its own times; else nothing."""
    fidelity = summary["provenance"]["fidelity"]
    if fidelity["verdict"] in ("ok", "exact"):
        return ""
    if why := fidelity.get("why"):
        more = f" (and {many(len(why) - 1, 'other thing')})" if len(why) > 1 else ""
        return f"{fidelity['verdict']}: {clean(why[0])}{more}, so trust the times less"
    ways = [
        (way["late_p99_s"].ns, way["late_max_s"].ns, f"link {name}, {ends.replace('>', ' to ')}")
        for name, link in summary["links"].items()
        for ends, way in link["directions"].items()
    ]
    p99, worst, where = max(ways)
    return (
        f"{fidelity['verdict']}: this machine was too busy; on {where}, data left "
        f"{duration(p99)} late (p99; worst {duration(worst)}; allowed "
        f"{duration(fidelity['limit_s'])}), so trust the times less"
    )


def _request_table(recorder: Recorder, width: int) -> Table:
    """The columns that fit into `width`; the first to go are those that can be spared."""
    columns: list[tuple[str, int, list[str]]] = [("request", 0, []), ("pipeline", 0, [])]
    columns += [(name, spare, []) for name, spare in (
        ("prompt", 2), ("P + R + M", 0), ("TTFT", 0), ("TPOT", 1), ("ids sent", 3), ("gap", 0),
        ("end", 4),
    )]  # fmt: skip
    for r in recorder.requests.values():
        row = [
            r.id, r.pipeline or "-", f"{r.prompt_tokens:,}",
            " + ".join(str(r.sources.count(s)) for s in LETTER.values()),
            duration(r.ttft), duration(r.tpot), str(r.handoff_ids or "-"), duration(r.gap),
            r.finish_reason or "-",
        ]  # fmt: skip
        for (_, _, cells), cell in zip(columns, row, strict=True):
            cells.append(cell)

    def total() -> int:
        return sum(2 + max(map(cell_len, [name, *cells])) for name, _, cells in columns) - 2

    while total() > width and any(spare for _, spare, _ in columns):
        columns.remove(max(columns, key=lambda column: column[1]))
    table = _table()
    for name, _, _ in columns:
        left = name in ("request", "pipeline", "end")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for cut in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*cut)
    return table


def _pipeline_table(summary: Mapping[str, Any]) -> Table:
    groups = dict(summary["pipelines"])
    if len(groups) != 1:
        groups = {"all": {**summary, "requests": summary["requests"]["total"]}, **groups}
    table = _table()
    table.add_column("mean")
    for name, group in groups.items():
        table.add_column(f"{name} ({group['requests']:,})", justify="right", no_wrap=True)

    def row(label: str, key: str, value: str) -> None:
        table.add_row(label, *(duration(group[key][value]) for group in groups.values()))

    row("TTFT", "ttft_s", "mean")
    for leg in LEGS:
        row(f"  {leg.replace('_', ' ')}", "ttft_legs_s", leg)
    row("TPOT", "tpot_s", "mean")
    row("ITL", "itl_s", "mean")
    row("gap at the switch", "handoff_gap_s", "mean")
    table.add_section()
    for label, key in (("TTFT p99", "ttft_s"), ("ITL p99", "itl_s"), ("gap p99", "handoff_gap_s")):
        row(label, key, "p99")
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
