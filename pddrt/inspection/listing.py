"""The table of a run's requests: which of them, in which order, with which columns.

Fields are those of requests.jsonl, nested ones dotted (`ttft_legs.prefill`, `handoff.gap_s`), and
`tokens.P`, `.R`, `.M` and `sent_s`. They come from the index, so that a hundred thousand requests
are sorted and filtered without their lines being read. Requests that never ended have no line; they
come last, with what the events tell of them.

A table for people keeps to the width of the terminal: columns that can be spared go first. Where
stdout is none it has them all, a line each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.cells import cell_len

from pddrt.errors import BadInput
from pddrt.expression import Value, nearest, parse
from pddrt.inspection.recorded import Recorded, column, flat
from pddrt.report.slowness import ns
from pddrt.show import clean, duration, size
from pddrt.types import LETTER

Json = dict[str, Any]

SHOWN = 100
"""Requests on a terminal, unless more are asked for."""


@dataclass(frozen=True, slots=True)
class Column:
    """`spare`: the first to go where it is narrow; 0 stays. `cell`: of the row at an index."""

    title: str
    spare: int
    left: bool
    cell: Callable[[int], str]


@dataclass(slots=True)
class Requests:
    """All requests of a run, in the order of their lines; those that did not end behind them."""

    run: Recorded
    _cache: dict[str, list[Any]] = field(default_factory=dict)
    _extra: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._extra = [dict(flat(row)) for row in self.run.unfinished.values()]

    def __len__(self) -> int:
        return len(self.run.index) + len(self._extra)

    @property
    def fields(self) -> list[str]:
        """Names of all there are; a run without a line of one has those of a line of none."""
        known = dict.fromkeys(self.run.index.columns)
        for row in self._extra:
            known |= dict.fromkeys(row)
        return sorted(known)

    def values(self, name: str) -> list[Any]:
        """Of every request, None where it has none."""
        if name not in self._cache:
            of = self.run.index.columns.get(name)
            held = [None] * len(self.run.index) if of is None else column(of)
            self._cache[name] = held + [row.get(name) for row in self._extra]
        return self._cache[name]

    def check(self, name: str, option: str) -> str:
        if name in self.run.index.columns or any(name in row for row in self._extra):
            return name
        near = nearest(name, self.fields)
        told = f"nearest: {', '.join(near)}" if near else f"allowed: {', '.join(self.fields)}"
        raise BadInput(f"{option}: found {name!r}, which is no field; {told}")

    # -- which, and in which order -----------------------------------------------------------------

    def where(self, text: str | None) -> list[int]:
        """Those for which the expression is true. Raises BadInput."""
        if text is None:
            return list(range(len(self)))
        try:
            bound = parse(text).bound(dict.fromkeys(self.fields))
            held = {name: self.values(name) for name in bound.names}
            at = 0

            def lookup(name: str) -> Value:
                value: Value = held[name][at]
                return value

            found = []
            for at in range(len(self)):
                if bound.holds(lookup):
                    found.append(at)
            return found
        except BadInput as error:
            raise BadInput(f"--where: {error}") from None

    def ordered(self, which: list[int], sort: str | None) -> list[int]:
        """`sort`: FIELD, FIELD:asc or FIELD:desc; what is missing comes last either way."""
        if sort is None:
            return which
        name, _, way = sort.partition(":")
        if way not in ("", "asc", "desc"):
            raise BadInput(f"--sort: found {way!r} behind the colon; allowed: asc, desc")
        values = self.values(self.check(name.strip(), "--sort"))
        there = [at for at in which if values[at] is not None]
        there.sort(key=lambda at: values[at], reverse=way == "desc")
        return there + [at for at in which if values[at] is None]

    # -- columns -----------------------------------------------------------------------------------

    def chosen(self, names: Sequence[str]) -> list[Column]:
        """Fields as they are called, the request's id first."""
        found = [self._plain("id", "request")]
        return found + [self._plain(self.check(n, "--columns"), n) for n in names if n != "id"]

    def usual(self) -> list[Column]:
        """What a first look needs."""

        def spread(*names: str) -> Callable[[int], str]:
            columns = [self.values(name) for name in names]
            mark = "/" if len(names) == 2 else "+"
            return lambda at: mark.join(f"{c[at] or 0:,}" for c in columns)

        made = spread(*(f"tokens.{letter}" for letter in LETTER.values()))
        hits = spread("cached_tokens.prefill", "cached_tokens.main")
        return [
            self._plain("id", "request"),
            self._plain("pipeline", "pipeline"),
            self._plain("prompt_tokens", "prompt", spare=2),
            Column("hit P/M", 4, False, hits),
            Column("P+R+M", 0, False, made),
            self._plain("ttft_s", "TTFT"),
            self._plain("tpot_s", "TPOT", spare=1),
            self._plain("handoff.gap_s", "gap"),
            self._plain("handoff.ids", "ids", spare=3),
            self._plain("e2e_s", "all", spare=5),
            self._plain("finish_reason", "end"),
        ]

    def _plain(self, name: str, title: str, spare: int = 0) -> Column:
        values = self.values(name)
        show = cell_of(name)
        left = any(isinstance(v, str) for v in islice(values, 50))
        return Column(title, spare, left, lambda at: show(values[at]))

    def raw(self, at: int) -> Json:
        """Its whole line."""
        if at < len(self.run.index):
            return self.run.index.row(at)
        return list(self.run.unfinished.values())[at - len(self.run.index)]


def cell_of(name: str) -> Callable[[Any], str]:
    """How values of a field are shown to people."""
    last = name.rpartition(".")[2]
    if last.endswith("_s") or name.startswith("ttft_legs."):
        return lambda value: "-" if value is None else duration(ns(value))
    if "bytes" in name:
        return lambda value: "-" if value is None else size(int(value))
    return _plain_cell


def _plain_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return clean(" ".join(str(value).split()))[:60]


# -- for people ------------------------------------------------------------------------------------


def lines(columns: Sequence[Column], rows: Sequence[int], width: int | None) -> Iterator[str]:
    """A head and a line each; `width` None: all columns, however wide."""
    cells = [[column.title, *map(column.cell, rows)] for column in columns]
    widths = [max(map(cell_len, of)) for of in cells]
    kept = list(range(len(columns)))
    while width is not None and sum(widths[i] + 2 for i in kept) - 2 > width:
        spare = max(kept, key=lambda i: columns[i].spare)
        if not columns[spare].spare:
            break
        kept.remove(spare)
    for cut in zip(*(cells[i] for i in kept), strict=True):
        padded = [
            cell + " " * (widths[i] - cell_len(cell))
            if columns[i].left
            else " " * (widths[i] - cell_len(cell)) + cell
            for i, cell in zip(kept, cut, strict=True)
        ]
        yield "  ".join(padded).rstrip()


def title(run: Recorded) -> str:
    s: Mapping[str, Any] = run.summary
    name = s.get("name") or run.recording.scenario.get("name") or run.folder.name
    return clean(
        f"{name}  seed {s.get('seed', '?')}  clock {s.get('clock', '?')}  "
        f"{run.num_requests:,} requests  {run.index.num_events:,} events{doubt(run)}"
    )


def doubt(run: Recorded) -> str:
    """Where the machine did not keep the network's times; else nothing."""
    fidelity = (run.summary.get("provenance") or {}).get("fidelity") or {}
    verdict = fidelity.get("verdict", "exact")
    return "" if verdict in ("exact", "ok") else f"  network {verdict}: trust its times less"
