"""What a sweep looks like on the terminal: a row for each setting, a column for each number.

Pure functions from the table of `sweep` to rich renderables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from pddrt.show import clean, duration, many
from pddrt.types import SECOND

Json = Mapping[str, Any]

MAX_ROWS = 60
"""So many settings are shown; sweep.csv has all."""


def results(table: Json, width: int | None) -> Iterator[Text | Table]:
    """All of it. `width` in cells; None: as wide as it gets, for a program or a file."""
    states = [cell["state"] for cell in table["cells"]]
    counts = {state: states.count(state) for state in ("finished", "kept", "failed", "waiting")}
    words = {"finished": "run", "kept": "here already", "failed": "failed", "waiting": "not run"}
    told = ", ".join(f"{n:,} {words[state]}" for state, n in counts.items() if n)
    yield Text.assemble((clean(table["name"]), "bold"), f": {many(len(states), 'cell')}: {told}")
    yield Text()
    for block in _tables(table, width):
        yield block
        yield Text()
    if len(table["points"]) > MAX_ROWS:
        yield Text(f"{len(table['points']) - MAX_ROWS:,} more settings are in sweep.csv")
    if (most := max(point["seeds"] for point in table["points"])) > 1:
        sure = ", +- half of the interval of 95 % (Student's)" if most > 2 else ""
        yield Text(f"means over {most} seeds{sure}")
    for name, problems in table["left_out"].items():
        yield Text(f"left out: {clean(name)}: {clean('; '.join(problems))}", "bold red")
    for cell in table["cells"]:
        if cell["state"] == "failed":
            yield Text(f"failed: {clean(cell['name'])}: {clean(cell['failure'])}", "bold red")


def _tables(table: Json, width: int | None) -> Iterator[Table]:
    """One table, or as many below one another as it takes: the fields in each, then as many numbers
    as fit, at least one.
    """
    paths, metrics, points = [a["path"] for a in table["axes"]], table["metrics"], table["points"]
    points = points[:MAX_ROWS]
    fields = [[_head(path, paths), *(clean(p["changes"][path]) for p in points)] for path in paths]
    numbers = [[clean(m), *(number(m, p["metrics"][m]) for p in points)] for m in metrics]
    room = (width or 1 << 30) - sum(map(_width, fields))
    block: list[list[str]] = []
    for column in numbers:
        if block and sum(map(_width, block)) + _width(column) > room:
            yield _block(fields, block)
            block = []
        block.append(column)
    yield _block(fields, block)


def _head(path: str, paths: Sequence[str]) -> str:
    """The end of a field's name, where that is no other's."""
    last = path.rpartition(".")[2]
    alone = [p.rpartition(".")[2] for p in paths].count(last) == 1
    return clean(last if alone else path)


def _width(column: Sequence[str]) -> int:
    """With the space between columns."""
    return max(map(cell_len, column)) + 2


def _block(fields: Sequence[Sequence[str]], numbers: Sequence[Sequence[str]]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head, *_ in fields:
        shown.add_column(head, overflow="fold")
    for head, *_ in numbers:
        shown.add_column(head, justify="right", overflow="fold")
    for row in zip(*(column[1:] for column in (*fields, *numbers)), strict=True):
        shown.add_row(*row)
    return shown


def number(metric: str, of: Json) -> str:
    """A mean, and how sure it is: of two seeds an interval says nothing."""
    if of["mean"] is None:
        return "-"
    if of["n"] < 3 or of["low"] == of["high"]:
        return value(metric, of["mean"])
    return f"{value(metric, of['mean'])} +-{value(metric, of['mean'] - of['low'])}"


def value(metric: str, number: float) -> str:
    """Times by the end of their names, shares in percent, else four digits."""
    if is_time(metric):
        sign = "-" if number < 0 else ""
        return sign + duration(round(abs(number) * SECOND))
    if metric.endswith(("_fraction", "_attainment")):
        return f"{100 * number:.1f} %"
    if metric.endswith("_rps") or metric.endswith("_tps"):
        return f"{number:.4g}/s"
    return f"{number:,.4g}" if abs(number) < 1e6 else f"{number:.4g}"


def is_time(metric: str) -> bool:
    """In seconds: `ttft_s.p90`, `wall_s`, but not `output_tps`."""
    return any(part.endswith("_s") for part in _parts(metric))


def _parts(metric: str) -> Sequence[str]:
    return metric.split(".")
