"""What watching costs: CPU time of a run with it against the same run without.

  event log    scenarios/modelled.yaml with events.jsonl and its digest, against one without
  invariants   the same with the monitor, against without
  dashboard    scenarios/quickstart.yaml on the wall clock with the live dashboard on a terminal,
               against the same without; whole processes, with what they import (--dashboard)

A run without the event log has its events all the same, and tells them to whoever listens: it is
what writing them down costs that is measured.
"""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

from benchmarks.rounds import Json, against, by_turns, cpu_seconds, options, show, table
from pddrt.run import Run
from pddrt.scenario import load

ROOT = Path(__file__).parent.parent.parent
LIMITS = {"event log": 1.15, "invariants": 1.25, "dashboard": 1.03}
SIZE = (200, 50)
"""Columns and rows of the dashboard's terminal."""


def modelled(requests: int, *without: str) -> float:
    """CPU seconds of one run, from its first event to its files."""
    changes = [f"workload.sessions={max(1, requests // 4)}"]
    scenario = load(ROOT / "scenarios" / "modelled.yaml", changes)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(scenario, out=Path(folder) / "run", keep=0, without=without)
        run.prepare()
        return cpu_seconds(lambda: run.execute().raise_for_status())


def watched(dashboard: str, changes: list[str]) -> float:
    """CPU seconds of `pddrt run` on a terminal of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pddrt.cli",
            "run",
            str(ROOT / "scenarios/quickstart.yaml"),
        ]
        command += [f"--dashboard={dashboard}", f"--out={folder}/run"]
        command += [f"--set={change}" for change in changes]
        screen, terminal = pty.openpty()
        drain = threading.Thread(target=_read_all, args=(screen,))
        drain.start()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        columns, lines = map(str, SIZE)
        env = os.environ | {"TERM": "xterm-256color", "COLUMNS": columns, "LINES": lines}
        done = subprocess.run(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.close(terminal)
        drain.join()
        os.close(screen)
        if done.returncode:
            raise SystemExit(f"overhead: {' '.join(command)} ended with {done.returncode}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _read_all(screen: int) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        while os.read(screen, 65536):
            pass


def measure(rounds: int, requests: int) -> dict[str, Json]:
    ways = {
        "all": partial(modelled, requests),
        "event log": partial(modelled, requests, "events"),
        "invariants": partial(modelled, requests, "invariants"),
    }
    found = by_turns(ways, rounds)
    return {name: against(found["all"], found[name]) for name in ("event log", "invariants")}


def measure_dashboard(rounds: int, changes: list[str]) -> Json:
    ways = {mode: partial(watched, mode, changes) for mode in ("on", "off")}
    found = by_turns(ways, rounds, warm_up=False)
    return against(found["on"], found["off"])


def main() -> None:
    parser = options("overhead", __doc__, rounds=7)
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument(
        "--dashboard", type=int, default=0, metavar="N", help="its rounds, two minutes each; none"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="of quickstart.yaml"
    )
    given = parser.parse_args()
    rows = measure(given.rounds, given.requests) if given.rounds else {}
    if given.dashboard:
        rows["dashboard"] = measure_dashboard(given.dashboard, given.set)
    for name, row in rows.items():
        row["limit"] = LIMITS[name]
    show(table("overhead", "s", rows, rounds=given.rounds, requests=given.requests), given.json)


if __name__ == "__main__":
    main()
