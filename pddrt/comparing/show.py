"""What a comparison looks like: a column for each setting, then how sure the differences are, what
made them, and who won and lost most.

Pure functions from the table of `compare` to rich renderables. Beside each value stands its ratio
to the baseline's, `=` where both are the same (times: to the nanosecond). Where not all columns
fit, they are shown in blocks below one another, each with the baseline.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from pddrt.comparing.contrast import at
from pddrt.show import clean, duration, many, size
from pddrt.types import LETTER

Json = Mapping[str, Any]
Path = tuple[str, ...]

TIMES = {
    "TTFT": "ttft_s", "TTST": "ttst_s", "TPOT": "tpot_s", "ITL": "itl_s", "E2E": "e2e_s",
    "handoff gap": "handoff_gap_s",
}  # fmt: skip
PAIRED = {"TTFT": "ttft", "E2E": "e2e"}
NAME_WIDTH = 14
"""Names of columns have this room at least, or that of their cells, before they take two lines."""


def results(table: Json, width: int | None) -> Iterator[Text | Table]:
    """All of it. `width` in cells; None: as wide as it gets, for a program or a file."""
    columns = table["columns"]
    same = [f"{what} {value.pop()}" for what in ("seed", "clock")
            if len(value := {column[what] for column in columns}) == 1]  # fmt: skip
    yield Text.assemble((clean(table["name"]), "bold"), ": " * bool(same), ", ".join(same))
    if table["interrupted"]:
        yield Text(clean(interruption(columns)), "bold red")
    yield Text()
    rows = list(_rows(columns))
    heads = [_head(rows, n, column["name"]) for n, column in enumerate(columns)]
    for block in _blocks(rows, heads, width):
        yield _table(rows, heads, block)
        yield Text()
    yield Text(f"beside each value: its ratio to {clean(columns[0]['name'])}; =: no difference")
    for note in table["notes"]:
        yield Text(f"note: {clean(note)}")
    for column in columns[1:]:
        yield from _against(column, columns[0])
    for one in table["assertions"]:
        verdict = "holds" if one["holds"] else "does not hold"
        told = f"{clean(one['text'])}: {verdict}: {clean(one['values'])}"
        yield Text(told, "" if one["holds"] else "bold red")
    for column in columns:
        for what in column["failures"] or ([""] if column["state"] != "finished" else []):
            text = f"{column['name']}: {column['state']}{': ' * bool(what)}{what}"
            yield Text(clean(text), "bold red")


def interruption(columns: Sequence[Json]) -> str:
    """What an interrupted comparison lacks."""
    told = [
        f"{c['name']} stopped" + (f" ({_finished(c['requests'])})" if "requests" in c else "")
        for c in columns
        if c["state"] == "interrupted"
    ]
    told += [f"{c['name']} did not run" for c in columns if c["state"] == "not run"]
    alone = [c["name"] for c in columns if c["ratios"] is None]
    text = f"interrupted: {', '.join(told) or 'some seeds are missing'}"
    if alone:
        text += f"; no ratios and no intervals for {', '.join(alone)}: they had not all requests"
    return text


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A label, and for each column a value and its ratio. `new`: something else begins here."""

    label: str
    cells: list[tuple[str, str]]
    new: bool


def _rows(columns: Sequence[Json]) -> Iterator[_Row]:
    """Rows that nothing is in are left out, and counts of nothing at all."""
    for group in _groups(columns):
        new = True
        for label, path, form, ratio in group:
            values = [at(column, path) for column in columns]
            known = [v for v in values if v is not None and (v or form is not _count)]
            if known or label == "cost":
                ratios = [at(column["ratios"], ratio) if ratio else None for column in columns]
                cells = [
                    ("" if not column["rounds"] else "-" if value is None else form(value), _x(x))
                    for column, value, x in zip(columns, values, ratios, strict=True)
                ]
                yield _Row(label, cells, new)
                new = False


Line = tuple[str, Path, Callable[[Any], str], Path | None]
"""Label, where the value stands, how it is shown, where its ratio stands."""


def _groups(columns: Sequence[Json]) -> Iterator[list[Line]]:
    pipelines = dict.fromkeys(name for c in columns for name in c.get("pipelines", ()))
    yield [
        ("requests finished", ("requests",), _finished, None),
        ("rejected", ("requests", "rejected"), _count, None),
        ("aborted", ("requests", "aborted"), _count, None),
        ("violations", ("violations",), _count, None),
        *((f"by {name}", ("pipelines", name), _count, None) for name in pipelines),
    ]
    for label, key in TIMES.items():
        paths = [(what, (key, what)) for what in ("mean", "p50", "p90", "p99")]
        yield [(f"{label} {what}", path, duration, path) for what, path in paths]
    tokens = [(letter, ("tokens", "by_role", role)) for role, letter in LETTER.items()]
    yield [
        ("goodput", ("goodput_rps",), lambda rate: f"{rate:.3g}/s", ("goodput_rps",)),
        ("SLO met", ("slo_attainment",), _percent, ("slo_attainment",)),
        ("KV over the WAN", ("wan_bytes", "kv"), _size, ("wan_bytes", "kv")),
        ("ids handed over it", ("wan_bytes", "ids"), _size, ("wan_bytes", "ids")),
        ("all over the WAN", ("wan_bytes", "all"), _size, ("wan_bytes", "all")),
        *((f"tokens by {letter}", path, _count, path) for letter, path in tokens),
    ]
    others = ("main_itl_s", "beside_extend")
    yield [
        ("handoffs", ("handoffs", "count"), _count, None),
        ("  rounds", ("handoffs", "rounds"), _count, None),
        ("  ids", ("handoffs", "ids"), _count, None),
        ("ITL max on MD", ("main_itl_s", "quiet", "max"), duration, None),
        ("  beside extends", (*others, "max"), duration, None),
    ]
    busy = [(letter, ("instances", "by_role", role, "busy_fraction"))
            for role, letter in LETTER.items()]  # fmt: skip
    yield [
        ("instances used", ("instances",), _used, ("instances", "used")),
        *((f"busy {letter}", path, _percent, path) for letter, path in busy),
        ("cost", ("cost", "per_hour"), lambda price: f"{price:.4g}/h", ("cost", "per_hour")),
        ("BCR", ("cost", "bcr"), lambda bcr: f"{bcr:.4g}", ("cost", "bcr")),
    ]
    yield [
        (f"verified: {verdict.replace('_', ' ')}", ("parity", verdict), _count, None)
        for verdict in ("equal", "near_ties", "different")
    ]
    yield [
        *((f"{verdict} in {label}", ("pairs", key, verdict), _count, None)
          for label, key in PAIRED.items() for verdict in ("faster", "slower")),
        ("other answers", ("pairs", "other_answers"), _count, None),
        ("  of other length", ("pairs", "other_lengths"), _count, None),
    ]  # fmt: skip


def _finished(requests: Json) -> str:
    return f"{_count(requests['finished'])} of {_count(requests['total'])}"


def _used(instances: Json) -> str:
    return f"{_count(instances['used'])} of {_count(instances['of'])}"


def _count(number: float) -> str:
    """Means over seeds need not be whole."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def _size(count: float) -> str:
    return size(round(count))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _x(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return "=" if ratio == 1 else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:,.0f}x"


def _head(rows: Sequence[_Row], column: int, name: str) -> list[str]:
    """A column's name, in as many lines as it takes above its cells."""
    width = max(sum(_widths(rows, column)) + 1, NAME_WIDTH)
    return textwrap.wrap(clean(name), width, break_on_hyphens=False)


def _blocks(
    rows: Sequence[_Row], heads: Sequence[list[str]], width: int | None
) -> Iterator[list[int]]:
    """Which columns stand side by side: all, or as many as fit beside the baseline, or one."""
    labels = max(cell_len(row.label) for row in rows)
    wide = [
        2 + max(sum(_widths(rows, column)) + 1, *map(cell_len, head))
        for column, head in enumerate(heads)
    ]
    room = (width or 1 << 30) - labels
    if wide[0] + max(wide[1:]) > room:
        yield from ([column] for column in range(len(heads)))
        return
    block, left = [0], room - wide[0]
    for column in range(1, len(heads)):
        if wide[column] > left:
            yield block
            block, left = [0], room - wide[0]
        block.append(column)
        left -= wide[column]
    yield block


def _widths(rows: Sequence[_Row], column: int) -> tuple[int, int]:
    """Of a column's values and of its ratios."""
    values, ratios = zip(*(row.cells[column] for row in rows), strict=True)
    return max(map(cell_len, values)), max(map(cell_len, ratios))


def _table(rows: Sequence[_Row], heads: Sequence[list[str]], block: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in block:
        name = "\n".join(heads[column])
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    widths = [_widths(rows, column) for column in block]
    for row in rows:
        if row.new and row is not rows[0]:
            table.add_row()
        cells = [
            f"{row.cells[column][0]} {row.cells[column][1]:>{ratio}}" if ratio else value
            for column, (_, ratio) in zip(block, widths, strict=True)
            for value in [row.cells[column][0]]
        ]
        table.add_row(row.label, *cells)
    return table


# -- request by request ----------------------------------------------------------------------------


def _against(column: Json, base: Json) -> Iterator[Text]:
    """How sure a column's ratios are; what made the difference; its largest wins and losses, each
    with the part of it that did most.
    """
    names = f"{clean(column['name'])} against {clean(base['name'])}"
    if column["not_paired"] and column["state"] != "failed":
        yield Text(f"{names}: not the same requests, so not paired: {column['not_paired']}")
    if column["pairs"] is None:
        return
    alone = [(column["pairs"]["only_here"], column), (column["pairs"]["only_in_baseline"], base)]
    for count, only in alone:
        if count:
            yield Text(f"{names}: {many(count, 'request')} only in {clean(only['name'])}")
    yield from _sure(column, names)
    several = len(column["seeds"]) > 1
    for label, key in PAIRED.items():
        told = column["pairs"][key]
        if told["faster"] or told["slower"]:
            yield Text()
            yield Text(
                f"{names}, {label}: {told['faster']:,} of {many(told['compared'], 'request')} "
                f"faster and {told['slower']:,} slower by more than 5 %",
                "bold",
            )
            yield from _by_part(told["parts"])
            yield Text("  the largest:")
        for one in (*told["largest_wins"], *told["largest_losses"]):
            yield Text(_told(one, several))


def _sure(column: Json, names: str) -> Iterator[Text]:
    """The intervals of the ratios that are looked at first."""
    found = column["intervals"]
    told = [
        f"{label} {what} {_x(ratio)} ({_x(interval['low'])} to {_x(interval['high'])})"
        for label, key in TIMES.items()
        for what in ("p50", "p90")
        if (ratio := at(column, ("ratios", key, what))) is not None and ratio != 1
        if (interval := at(found, ("ratio", key, what))) is not None
    ]
    if told:
        yield Text()
        yield Text(f"{names}, 95 % over {found['of']} {found['by']}:", "bold")
        for start in range(0, len(told), 2):
            yield Text(f"  {'; '.join(told[start : start + 2])}")


def _by_part(parts: Json) -> Iterator[Text]:
    """Parts by their mean change, the largest first, and for how many requests each did most."""
    known = [(part, of) for part, of in parts.items() if of["change_s"] and of["change_s"].ns]
    known.sort(key=lambda pair: -abs(pair[1]["change_s"].ns))
    told = [
        f"{part.replace('_', ' ')} {_signed(of['change_s'])}"
        + (f" (most of it in {of['mostly']:,})" if of["mostly"] else "")
        for part, of in known[:3]
    ]
    if told:
        yield Text(f"  on average: {', '.join(told)}")


def _told(one: Json, several: bool) -> str:
    ratio = _x(one["ratio"])
    name = f"{one['id']} of seed {one['seed']}" if several else one["id"]
    text = f"  {name}  {duration(one['baseline_s'])} > {duration(one['here_s'])}  {ratio}"
    if one["mostly"] is None:
        return text
    return f"{text}  {one['mostly'].replace('_', ' ')} {_signed(one['mostly_s'])}"


def _signed(change: Any) -> str:
    return f"{'-' if change.ns < 0 else '+'}{duration(abs(change.ns))}"
