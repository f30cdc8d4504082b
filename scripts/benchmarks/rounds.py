"""Ways to do a thing, measured by turns, and what is made of it.

A machine's speed drifts, and others use it. So ways are measured in rounds, each way once a round,
in an order that turns; figures are medians over rounds, and a ratio is that of two medians. Beside
it stands the range of the ratios round by round, which shows how far the machine can be trusted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from time import process_time
from typing import Any

Json = dict[str, Any]
Way = Callable[[], float]
"""Does it once, and says what it took."""


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process, all its threads."""
    gc.collect()
    begun = process_time()
    work()
    return process_time() - begun


def by_turns(ways: Mapping[str, Way], rounds: int, warm_up: bool = True) -> dict[str, list[float]]:
    """What each way took, round by round. `warm_up`: one round before is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-1 if warm_up else 0, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = ways[name]()
            if number >= 0:
                found[name].append(value)
        print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    print(" " * 30, end="\r", file=sys.stderr, flush=True)
    return found


def against(measured: Sequence[float], reference: Sequence[float]) -> Json:
    """Both medians and their ratio; `ratios`: least and most of a round's own."""
    each = [a / b for a, b in zip(measured, reference, strict=True)]
    ours, theirs = statistics.median(measured), statistics.median(reference)
    return {
        "measured": round(ours, 6),
        "reference": round(theirs, 6),
        "ratio": round(ours / theirs, 4),
        "ratios": [round(min(each), 4), round(max(each), 4)],
    }


def table(name: str, unit: str, rows: Mapping[str, Json], **more: Any) -> Json:
    """What `--json` prints: `measured`, `reference` and `ratio` by row, and all else."""
    keys = ("measured", "reference", "ratio", "ratios", "limit")
    columns = {key: {row: of[key] for row, of in rows.items() if key in of} for key in keys}
    return {"bench": name, "unit": unit, **columns, **more, "machine": machine()}


def machine() -> Json:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def options(name: str, about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Of every bench."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"scripts/bench {name}", description=about, formatter_class=form
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"default: {rounds}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser


def show(result: Json, as_json: bool) -> None:
    """On stdout: the object, or lines for people."""
    if as_json:
        print(json.dumps(result))
        return
    unit = result["unit"]
    for row, ratio in result["ratio"].items():
        low, high = result["ratios"][row]
        ours, theirs = (f"{result[key][row]:.4f} {unit}" for key in ("measured", "reference"))
        line = f"{row:16} {ours:>14} against {theirs:>14}: {ratio:.3f} ({low:.3f} to {high:.3f})"
        if (limit := result["limit"].get(row)) is not None:
            line += f"; at most {limit:g}: {'met' if ratio <= limit else 'MISSED'}"
        print(line)
    shown = {"bench", "unit", "measured", "reference", "ratio", "ratios", "limit"}
    for key in (key for key in result if key not in shown):
        print(f"{key:16} {result[key]}")
