"""Traces as files: mahimahi's, CSV, and what iperf3 and ping say. Text in, text out.

Everything is strict: a line that is not what it should be is named, and nothing is guessed.

**mahimahi**: a line an opportunity, whole ms since the beginning, never falling; each lets 1,504
bytes through, and what does not use it loses it. After the last line's time the trace begins again.
Here that is a rate: the opportunities of one ms are spread over the ms that ends then. `format` is
the other way: opportunities where so many bytes have passed.

**CSV**: a header, then rows. Columns `time`, `rate`, `delay`, `loss`, at least `time` and another;
a unit may stand in the header, `rate (Mbit/s)`, else in each cell. The first row is at 0, each
holds until the next, and the last one for as long as the one before it; then the trace begins
again. An empty cell says nothing: as the link is.

**iperf3** (`--json`) gives the rate by interval, as goodput; **ping** round trips, whose half is
the delay; the deviation is shared out to two ways that are alike and independent.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from pddrt.netem.traces import MAX_SEGMENTS, Segment, Trace
from pddrt.types import MS, SECOND, Ns
from pddrt.units import parse_duration, parse_rate, shown

OPPORTUNITY = 1504
"""Bytes that one line of a mahimahi trace lets through."""
MAX_LINES = 20_000_000
MAX_TIME: Ns = 366 * 86_400 * SECOND
_COLUMNS = ("time", "rate", "delay", "loss")


def _bad(line: int, found: object, allowed: str) -> ValueError:
    return ValueError(f"line {line}: found {shown(found)}; allowed: {allowed}")


# -- mahimahi --------------------------------------------------------------------------------------


def parse_mahimahi(text: str) -> Trace:
    """Raises ValueError with the line."""
    counts: dict[int, int] = {}
    last, number = 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not re.fullmatch(r"\d{1,13}", word, re.ASCII):
            raise _bad(number, word, "a time in whole ms, one a line, and no empty lines")
        at = int(word)
        if at < last:
            raise _bad(number, word, f"a time that is not before the line above, {last}")
        if at * MS > MAX_TIME or number > MAX_LINES:
            raise ValueError(f"line {number}: the trace is too long")
        counts[at] = counts.get(at, 0) + 1
        last = at
    if not number:
        raise ValueError("line 1: the file is empty")
    if not last:
        raise ValueError(f"line {number}: the trace ends at 0 ms; needed: a later time")
    # what is due at 0 is due at the end as well: it begins again there
    counts[last] = counts.get(last, 0) + counts.pop(0, 0)
    segments: list[Segment] = []
    at = 0
    for ms in sorted(counts):
        if ms - 1 > at:
            _add(segments, at * MS, 0)
        _add(segments, (ms - 1) * MS, counts[ms] * OPPORTUNITY * 1000)
        at = ms
    return Trace(segments, last * MS, repeats=True)


def _add(segments: list[Segment], start: Ns, rate: int) -> None:
    """A further segment, unless it is as the one before."""
    if not segments or segments[-1].rate != rate:
        if len(segments) >= MAX_SEGMENTS:
            raise ValueError("the trace changes too often")
        segments.append(Segment(start, rate))


def format_mahimahi(trace: Trace) -> str:
    """One round of it, to whole ms; the rounds that follow carry the same. ValueError where a rate
    is open, or where not one packet passes."""
    if trace.peak is None:
        raise ValueError("the trace leaves the rate open")
    whole = -(-trace.end // MS)
    if trace.peak * trace.end // SECOND // OPPORTUNITY > MAX_LINES:
        raise ValueError(f"more than {MAX_LINES:,} packets of {OPPORTUNITY} bytes in one round")
    lines: list[str] = []
    passed, sent = 0.0, 0
    for ms in range(1, whole + 1):
        passed += trace.carries((ms - 1) * MS, min(ms * MS, trace.end))
        due = int((passed + 1e-6) // OPPORTUNITY)
        lines += [str(ms)] * (due - sent)
        sent = due
    if not lines:
        raise ValueError(f"less than one packet of {OPPORTUNITY} bytes passes")
    if lines[-1] != str(whole):  # its length is that of the trace
        lines.append(str(whole))
    return "\n".join(lines) + "\n"


# -- CSV -------------------------------------------------------------------------------------------


def parse_csv(text: str) -> Trace:
    """Raises ValueError with the line."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            raise ValueError("line 1: the file is empty")
        columns = _header(header)
        segments: list[Segment] = []
        for row in rows:
            segments.append(_row(row, columns, rows.line_num, segments))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from None
    if not segments:
        raise ValueError(f"line {rows.line_num}: there are no rows below the header")
    if len(segments) == 1:
        return Trace(segments, SECOND, repeats=True)
    last, before = segments[-1].start, segments[-2].start
    return Trace(segments, 2 * last - before, repeats=True)


def _header(cells: Sequence[str]) -> list[tuple[str, str]]:
    """Name and unit of each column."""
    columns: list[tuple[str, str]] = []
    for cell in cells:
        match = re.fullmatch(r"(\w+)\s*(?:\(([^()]*)\))?", cell.strip())
        if match is None or match[1] not in _COLUMNS:
            raise _bad(1, cell, f"columns {', '.join(_COLUMNS)}, with a unit in brackets")
        if match[1] in dict(columns):
            raise _bad(1, cell, "each column once")
        columns.append((match[1], (match[2] or "").strip()))
    if "time" not in dict(columns) or len(columns) < 2:
        raise _bad(1, ",".join(cells), "time and at least one of rate, delay, loss")
    return columns


def _row(
    cells: Sequence[str], columns: Sequence[tuple[str, str]], line: int, before: Sequence[Segment]
) -> Segment:
    if len(cells) != len(columns):
        raise _bad(line, ",".join(cells), f"{len(columns)} cells")
    values: dict[str, Any] = {}
    for cell, (name, unit) in zip(cells, columns, strict=True):
        text = cell.strip()
        if not text:
            if name == "time":
                raise _bad(line, cell, "a time")
            continue
        if unit and not re.fullmatch(r"[\d.]+(?:[eE][+-]?\d+)?", text, re.ASCII):
            raise _bad(line, cell, f"a number, in {unit} as the header says")
        try:
            values[name] = _CELLS[name](f"{text} {unit}".strip())
        except ValueError as error:
            raise ValueError(f"line {line}: {name}: {error}") from None
    start = values.pop("time")
    if (not before and start) or (before and start <= before[-1].start) or start > MAX_TIME:
        raise _bad(line, cells[[name for name, _ in columns].index("time")],
                   "0 in the first row, and later in each one")  # fmt: skip
    return Segment(start, **values)


def _share(text: str) -> float:
    match = re.fullmatch(r"([\d.]+(?:[eE][+-]?\d+)?)\s*(%?)", text, re.ASCII)
    try:
        share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share < 0.9:
        raise ValueError(f"found {shown(text)}; allowed: a share below 90 %")
    return share


_CELLS: dict[str, Callable[[str], Any]] = {
    "time": parse_duration, "rate": parse_rate, "delay": parse_duration, "loss": _share,
}  # fmt: skip


def format_csv(trace: Trace) -> str:
    """Exact, but for a last segment that is not as long as the one before: that is split."""
    lines = ["time (ns),rate (bit/s),delay (ns),loss"]
    segments = list(trace.segments)
    last = segments[-1]
    rest = trace.end - last.start
    if len(segments) > 1 and rest != last.start - segments[-2].start:
        if rest % 2:
            raise ValueError("the last segment cannot be split into two of whole ns")
        segments.append(last._replace(start=last.start + rest // 2))
    elif len(segments) == 1 and rest != SECOND:
        segments.append(last._replace(start=rest // 2))
    for s in segments:
        rate = "" if s.rate is None else str(s.rate * 8)
        delay = "" if s.delay is None else str(s.delay)
        loss = "" if s.loss is None else repr(s.loss)
        lines.append(f"{s.start},{rate},{delay},{loss}")
    return "\n".join(lines) + "\n"


# -- measured --------------------------------------------------------------------------------------


def parse_iperf3(text: str) -> Trace:
    """Rate by interval, of what `iperf3 --json` says of a TCP transfer. Raises ValueError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("this is no JSON; needed: the output of iperf3 --json") from None
    if isinstance(data, dict) and data.get("error"):
        raise ValueError(f"iperf3 reports: {shown(data['error'])}")
    intervals = data.get("intervals") if isinstance(data, dict) else None
    if not isinstance(intervals, list) or not intervals:
        raise ValueError("there are no intervals; needed: the output of iperf3 --json")
    segments: list[Segment] = []
    end: Ns = 0
    for number, interval in enumerate(intervals):
        try:
            total = interval["sum"]
            seconds, nbytes = float(total["seconds"]), int(total["bytes"])
            skip = bool(total.get("omitted"))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ValueError(f"intervals[{number}] has no sum of seconds and bytes") from None
        if not (0 < seconds < 1e7 and 0 <= nbytes < 1 << 62):
            raise ValueError(f"intervals[{number}]: {nbytes} bytes in {seconds} s")
        if not skip:
            segments.append(Segment(end, round(nbytes / seconds)))
            end += max(1, round(seconds * SECOND))
    if not segments:
        raise ValueError("every interval is marked as omitted")
    return Trace(segments, end, repeats=True)


def parse_ping(text: str) -> tuple[Ns, Ns]:
    """Mean and deviation of the one-way delay, half of the round trips that `ping` lists. Raises
    ValueError."""
    found = [float(m) for m in re.findall(r"time[=<]([\d.]{1,16}) ?ms", text)]
    if not found or not all(0 <= one < 1e7 for one in found):
        raise ValueError("no line has a 'time=... ms'; needed: the output of ping")
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in found) / len(found))
    # the two ways are taken as alike and independent: their variances add up
    return round(mean / 2 * MS), round(deviation / math.sqrt(2) * MS)
