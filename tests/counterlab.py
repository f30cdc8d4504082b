"""Counterfactuals held against what really happens: one request of a run takes another pipeline.

A scenario is run as it is, in virtual time, and asked what some of its requests would have cost by
way of other pipelines. Then it is run again, once for each of them, under a policy that decides as
the scenario's does but for that one request. Up to there both runs are the same to the byte.

    python -m tests.counterlab [SCENARIO ...] [--requests N] [--json]

prints how far the estimates were off, by pipeline taken and pipeline asked about.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pddrt.inspection.counterfactual import costs
from pddrt.inspection.hindsight import Hindsight
from pddrt.inspection.regret import setting_of
from pddrt.pipelines import policy_of
from pddrt.policy.route import PIPELINES, Facts, Policy, Route
from pddrt.run import Run
from pddrt.scenario import Scenario, parse
from pddrt.trace import Event, Finished, Routed
from pddrt.types import Ns

ROOT = Path(__file__).parent.parent


@dataclass
class Forced:
    """As `base`, but for the `at`th request that it is asked about (from 0)."""

    base: Policy
    at: int
    pipeline: str
    asked: int = 0

    def route(self, facts: Facts) -> Route:
        route = self.base.route(facts)
        self.asked += 1
        return route if self.asked - 1 != self.at else self._other(facts, route)

    def _other(self, facts: Facts, route: Route) -> Route:
        """Over the same instances, where it has them."""
        names = {"prefill": route.prefill, "relay": route.relay, "main": route.main}
        chosen: dict[str, Any] = {}
        for role in PIPELINES[self.pipeline]:
            able = facts.able(role)
            same = [i for i in able if i.name == names[role]]
            chosen[role] = same[0] if same else facts.pick(role)
        return facts.route("forced", **chosen)


@dataclass
class Played:
    known: Hindsight
    order: list[str] = field(default_factory=list)
    """Requests, as they were routed."""


def play(
    scenario: Scenario, forced: tuple[int, str] | None = None, until: str | None = None
) -> Played:
    """Runs it; with `forced` that request takes that pipeline; not further than `until`'s end."""
    played = Played(Hindsight(setting_of(scenario)))

    def policy(of: Scenario) -> Policy:
        base = policy_of(of)
        return base if forced is None else Forced(base, *forced)

    with tempfile.TemporaryDirectory() as folder, mock.patch("pddrt.run.policy_of", policy):
        run = Run(scenario, out=Path(folder) / "run")

        def listen(event: Event) -> None:
            played.known(event)
            if isinstance(event, Routed) and "~" not in event.request:
                played.order.append(event.request)
            if isinstance(event, Finished) and event.request == until:
                run.interrupt()

        run.listen(listen)
        run.prepare()
        run.execute()
    return played


@dataclass(frozen=True)
class Compared:
    """Of one request by way of another pipeline: estimated and real TTFT and end."""

    request: str
    ran: str
    asked: str
    ttft: tuple[Ns, Ns]
    e2e: tuple[Ns, Ns] | None
    how: str

    @property
    def ttft_error(self) -> float:
        """Relative to what really happened."""
        return (self.ttft[0] - self.ttft[1]) / self.ttft[1]

    @property
    def e2e_error(self) -> float | None:
        return None if self.e2e is None else (self.e2e[0] - self.e2e[1]) / self.e2e[1]


def compared(
    scenario: Scenario, most: int, asked: Sequence[str] = tuple(PIPELINES)
) -> list[Compared]:
    """For up to `most` requests, evenly spread over the run."""
    base = play(scenario)
    names = [name for name in base.order if costs(base.known, base.known.requests[name])]
    step = max(1, len(names) // most)
    found = []
    for name in names[step // 2 :: step][:most]:
        for cost in costs(base.known, base.known.requests[name])[1:]:
            if cost.ttft is None or cost.pipeline not in asked:
                continue
            really = play(scenario, (base.order.index(name), cost.pipeline), until=name)
            seen = really.known.requests[name]
            if seen.ttft is None or seen.e2e is None or seen.trouble:
                continue
            e2e = None if cost.e2e is None else (cost.e2e, seen.e2e)
            ran = base.known.requests[name].pipeline
            about = (name, ran, cost.pipeline, (cost.ttft, seen.ttft), e2e, cost.how)
            found.append(Compared(*about))
    return found


def scenario_of(file: str, *overrides: str) -> Scenario:
    return parse((ROOT / "scenarios" / file).read_text(encoding="utf-8"), file, overrides)


CASES: dict[str, tuple[str, ...]] = {
    "handoff.yaml": ("workload.requests=16", "workload.output_tokens=120", "workload.rate=2/s"),
    "tiny.yaml": ("workload.sessions=24", "instances.p.engine=model", "instances.rld.engine=model",
                  "instances.md.engine=model", "dtype=bfloat16"),
    "modelled.yaml": ("workload.sessions=40", "workload.turns=2"),
    "oscillation.yaml": ("workload.sessions=8", "workload.turns=6", "pipeline.policy=pdd"),
}  # fmt: skip
"""Small enough to be run some hundred times."""


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("scenarios", nargs="*", default=list(CASES))
    arguments.add_argument("--requests", type=int, default=12)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--each", action="store_true")
    asked = arguments.parse_args()
    table: dict[str, Any] = {}
    for file in asked.scenarios:
        found = compared(scenario_of(file, *CASES.get(file, ())), asked.requests)
        if asked.each:
            for c in found:
                print(f"{c.request:8} {c.ran:9} {c.asked:9} {c.ttft[0] / 1e6:9.2f} "
                      f"{c.ttft[1] / 1e6:9.2f} {100 * c.ttft_error:+7.1f} % "
                      f"{100 * (c.e2e_error or 0):+7.1f} %  {c.how}")  # fmt: skip
        for pair in sorted({(c.ran, c.asked) for c in found}):
            of = [c for c in found if (c.ran, c.asked) == pair]
            first = [abs(c.ttft_error) for c in of]
            ends = [abs(e) for c in of if (e := c.e2e_error) is not None]
            table[f"{file} {pair[0]} > {pair[1]}"] = {
                "requests": len(of),
                "ttft_error": [round(quantile(first, q), 4) for q in (0.5, 0.9, 1)],
                "e2e_error": [round(quantile(ends, q), 4) for q in (0.5, 0.9, 1)] if ends else None,
            }
    if asked.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{'':46} n   TTFT p50   p90   max    E2E p50   p90   max  (of what happened)")
    for name, row in table.items():
        shown = [f"{100 * v:6.1f} %" for v in (*row["ttft_error"], *(row["e2e_error"] or ()))]
        print(f"{name:44} {row['requests']:3} {' '.join(shown)}")


if __name__ == "__main__":
    main()
