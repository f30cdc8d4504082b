"""How fast virtual time goes: scenarios/modelled.yaml, requests, events and virtual seconds in one
second of CPU time; against the same without event log and monitor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.overhead import ROOT
from benchmarks.rounds import against, by_turns, cpu_seconds, options, show, table
from pddrt.run import Run
from pddrt.scenario import load


class Sim:
    """Runs of one size. `events` and `virtual_s` are those of the last one."""

    def __init__(self, requests: int) -> None:
        changes = [f"workload.sessions={max(1, requests // 4)}"]
        self.scenario = load(ROOT / "scenarios" / "modelled.yaml", changes)
        self.requests = 0
        self.events = 0
        self.virtual_s = 0.0

    def way(self, *without: str) -> Callable[[], float]:
        def once() -> float:
            with tempfile.TemporaryDirectory() as folder:
                run = Run(self.scenario, out=Path(folder) / "run", keep=0, without=without)
                run.prepare()
                took = cpu_seconds(lambda: run.execute().raise_for_status())
            self.requests, self.events = run.expected_requests, run.trace.count
            self.virtual_s = run.recorder.end / 1e9
            return took

        return once


def main() -> None:
    parser = options("sim", __doc__, rounds=5)
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="default: 400")
    given = parser.parse_args()
    sim = Sim(given.requests)
    found = by_turns({"all": sim.way(), "bare": sim.way("events", "invariants")}, given.rounds)
    amounts = {"requests": sim.requests, "events": sim.events, "virtual seconds": sim.virtual_s}
    rows = {
        name: against(*([amount / took for took in found[way]] for way in ("all", "bare")))
        for name, amount in amounts.items()
    }
    show(table("sim", "1/s", rows, rounds=given.rounds, amounts=amounts), given.json)


if __name__ == "__main__":
    main()
