"""The TCP model against the real kernel, run by run: `python -m tests.tcp_table [SETTING]`.

The measured runs are no part of this checkout: they are in the file that PDDRT_KERNEL_TCP names,
else in `shared/netem/kernel_tcp.json.gz` of a folder above this one.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as File
from statistics import median
from typing import Any

from pddrt.netem.predict import STEP, Path, Predicted, Transfer, jain, predict
from pddrt.types import MS, SECOND

NAME = File("shared", "netem", "kernel_tcp.json.gz")
_FOUND = [f for folder in File(__file__).resolve().parents if (f := folder / NAME).is_file()]
FILE = File(os.environ.get("PDDRT_KERNEL_TCP", _FOUND[0] if _FOUND else NAME))


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured run and the model of it. Completion times in s, the earliest first; `fair` is
    Jain's index of the bytes that flows have when the first of them is done."""

    setting: Mapping[str, Any]
    run: str
    kernel: list[float]
    model: list[float]
    kernel_fair: float
    model_fair: float
    kernel_resent: int
    model_resent: int
    curve: float
    """The largest distance of the curves, every 50 ms, as a share of what is allowed."""


def load() -> dict[str, Any]:
    with gzip.open(FILE, "rt") as file:
        return json.load(file)  # type: ignore[no-any-return]


def settings() -> dict[str, Any]:
    return load()["settings"] if FILE.is_file() else {}


def modelled(setting: Mapping[str, Any], run: Mapping[str, Any]) -> Predicted:
    """A queue of 0 was one without end. A flow starts when it would have to for its handshake to
    end when the run first saw it at work: some of the processes slept some ms after theirs, and
    which flows meet in the queue decides who leaves slow start first."""
    path = Path(
        rate=setting["rate_mbit"] * 125_000,
        delay=setting["one_way_delay_ms"] * MS,
        queue=setting["queue_bytes"] or 1 << 40,
        loss=setting["loss"],
    )
    handshake = 2 * path.delay + MS // 2  # the half: what the run's emulation took for it
    if setting["loss"]:
        starts = [round(start * SECOND) for start in run["start"]]
    else:
        starts = [max(0, round(samples[0][0] * SECOND) - handshake) for samples in run["cwnd"]]
    return predict(path, [Transfer(setting["bytes_each"], s, setting["cc"]) for s in starts])


def compare(setting: Mapping[str, Any], name: str, run: Mapping[str, Any]) -> Compared:
    predicted = modelled(setting, run)
    assert run["dt"] * SECOND == STEP
    measured = list(zip(*_padded(run["flows"]), strict=True))
    rate = setting["rate_mbit"] * 125_000
    starts = [round(start * SECOND) for start in run["start"]]
    ends = [start + fct for start, fct in zip(run["start"], run["fct"], strict=True)]
    return Compared(
        setting,
        name,
        sorted(run["fct"]),
        sorted((e - s) / SECOND for e, s in zip(predicted.ends, starts, strict=True)),
        jain(_at(measured, min(ends))),
        jain(_at(predicted.curve, min(predicted.ends) / SECOND)),
        sum(run["retrans"]),
        predicted.retransmits,
        _distance(measured, predicted.curve, rate),
    )


def _padded(flows: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, flows))
    return [flow + [flow[-1]] * (longest - len(flow)) for flow in flows]


def _at(curve: Any, seconds: float) -> Any:
    return curve[min(round(seconds * SECOND / STEP), len(curve) - 1)]


def _distance(measured: Any, predicted: Any, rate: int) -> float:
    """Allowed: 5 % of the bytes so far or 20 ms of the link, whichever is more."""
    worst = 0.0
    for i in range(0, max(len(measured), len(predicted)), 5):
        pairs = zip(measured[min(i, len(measured) - 1)], predicted[min(i, len(predicted) - 1)],
                    strict=True)  # fmt: skip
        worst = max(worst, *(abs(k - m) / max(0.05 * k, 0.02 * rate) for k, m in pairs))
    return worst


def compared(setting_name: str) -> list[Compared]:
    """All runs of a setting."""
    data = load()
    setting = data["settings"][setting_name]
    return [
        compare(setting, name, run)
        for name, run in data["runs"].items()
        if name.rpartition("_r")[0] == setting_name
    ]


def medians(runs: list[list[float]]) -> list[float]:
    """Of the first to finish, the second, and so on."""
    return [median(times) for times in zip(*runs, strict=True)]


def table(wanted: str) -> Iterator[str]:
    yield (
        f"{'run':18} {'completion, kernel':27} {'model':27} {'off':>6}  {'Jain':11}  "
        f"{'sent again':>11}  curve"
    )
    for name in settings():
        if wanted not in name:
            continue
        rows = compared(name)
        for row in rows:
            yield _row(row.run, row.kernel, row.model) + (
                f"  {row.kernel_fair:.3f} {row.model_fair:.3f}  "
                f"{row.kernel_resent:5d} {row.model_resent:5d}  {row.curve:5.2f}"
            )
        kernel, model = medians([r.kernel for r in rows]), medians([r.model for r in rows])
        yield _row("  median", kernel, model) + (
            f"  {median(r.kernel_fair for r in rows):.3f} {median(r.model_fair for r in rows):.3f}"
        )


def _row(name: str, kernel: list[float], model: list[float]) -> str:
    off = max((abs(m / k - 1), m / k - 1) for k, m in zip(kernel, model, strict=True))[1]
    texts = (" ".join(f"{t:.3f}" for t in times) for times in (kernel, model))
    return f"{name:18} {next(texts):27} {next(texts):27} {100 * off:+5.1f}%"


if __name__ == "__main__":
    if not FILE.is_file():
        sys.exit(f"no {FILE}; PDDRT_KERNEL_TCP names the file of measured runs")
    for line in table(sys.argv[1] if len(sys.argv) > 1 else ""):
        print(line)
