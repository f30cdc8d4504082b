"""What a run's router lost: the counterfactuals of all requests of a recorded run, and their sum.

Reads a run folder once, from the first event to the last, and asks `counterfactual` about each
request. What no event tells comes from the run's scenario: delays, and what the steps of its chips,
profiles or figures take. Where that is cut off, or asks for real steps, the events have to do.

**Regret** of a request is what it took less what the best other pipeline would have taken, where
that is less by more than SAME; of two kinds, TTFT and the end of the answer. It is judged among the
pipelines that the run's policy could choose, and among all that the instances can serve. Since it
picks the best of several estimates it errs upwards; `errors` say by how much estimates are off, on
the pipelines that really ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pddrt import recording, scenario
from pddrt.engine.outline import outline
from pddrt.errors import BadInput, CannotRun
from pddrt.inspection.counterfactual import Cost, Regret, costs, regret, replayed
from pddrt.inspection.hindsight import Hindsight, Seen, Setting
from pddrt.link_fields import toward
from pddrt.pipelines import chosen_from
from pddrt.recording import Recording
from pddrt.trace import Event, Seconds
from pddrt.types import Ns, StepCost
from pddrt.units import parse_duration

KINDS = ("ttft", "e2e")
WORST = 10
SAME = 0.01
"""What would have been sooner by less than this share of the time it took is as good."""


def setting_of(of: scenario.Scenario) -> Setting:
    """What a scenario says that no event does."""
    shapes: dict[str, Any] = {}
    charged: dict[str, StepCost] = {}
    for instance in of.resolved():
        if of.clock != "virtual" and instance.engine != "model":
            continue  # there a step takes as long as it takes
        try:
            if instance.dtype not in shapes:
                shapes[instance.dtype] = outline(of.model, instance.dtype).shape
            cost = instance.step_cost(shapes[instance.dtype])
        except (BadInput, CannotRun):
            continue
        if cost is not None:
            charged[instance.name] = cost
    delays: dict[tuple[str, str], Ns] = {}
    for link in of.links.values():
        a, b = link.between[0], link.between[1]
        for way in ((a, b), (b, a)):
            delays[way] = toward(link.delay, *way) or 0
    return Setting(
        gateway_site=of.gateway_site,
        delays=delays,
        costs=charged,
        chunk_tokens={i.name: i.chunk_tokens for i in of.resolved()},
        pipelines=chosen_from(of),
        early=of.gateway.first_token == "early",
        while_computing=of.pipeline.stream_kv == "while-computing",
    )


def setting_in(folder: Recording) -> Setting:
    """Of a recorded run; as much as is left of it."""
    try:
        return setting_of(scenario.load(folder.folder / "scenario.yaml"))
    except (BadInput, OSError):
        pass
    delays: dict[tuple[str, str], Ns] = {}
    links = folder.scenario.get("links")
    for link in links.values() if isinstance(links, dict) else ():
        try:
            a, b = link["between"]
            delays[a, b] = delays[b, a] = parse_duration(link["delay"])
        except (KeyError, TypeError, ValueError):
            continue
    gateway = folder.scenario.get("gateway")
    site = gateway.get("site") if isinstance(gateway, dict) else None
    return Setting(gateway_site=str(site or ""), delays=delays)


def hindsight(events: Iterable[Event], setting: Setting) -> Hindsight:
    known = Hindsight(setting)
    for event in events:
        known(event)
    return known


@dataclass(slots=True)
class Verdict:
    """`tables`: the costs of each request that something can be said of; `silent`: of how many
    nothing, by why. `lost`: regrets above zero, by kind, among the policy's pipelines and among
    all; `judged`: how many had a choice. `errors`: estimated - measured TTFT of what ran.
    """

    policy_pipelines: tuple[str, ...]
    tables: dict[str, list[Cost]] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    judged: dict[tuple[str, str], int] = field(default_factory=dict)
    lost: dict[tuple[str, str], list[Regret]] = field(default_factory=dict)
    errors: list[Ns] = field(default_factory=list)

    def worst(self, kind: str, among: str) -> list[Regret]:
        return sorted(self.lost.get((kind, among), ()), key=lambda r: -r.lost)[:WORST]

    def total(self, kind: str, among: str) -> Ns:
        return sum(r.lost for r in self.lost.get((kind, among), ()))

    def price(self, kind: str, among: str) -> tuple[Ns, int]:
        """What the best would have taken more than what ran, in sum: time on RLD, bytes over the
        WAN.
        """
        lost = self.lost.get((kind, among), ())
        relay = sum((r.best.relay or 0) - (r.ran.relay or 0) for r in lost)
        return relay, sum((r.best.wan_bytes or 0) - (r.ran.wan_bytes or 0) for r in lost)


def verdict(known: Hindsight) -> Verdict:
    """Of the whole run."""
    found = Verdict(known.setting.pipelines)
    scopes: dict[str, Sequence[str]] = {"all": ()}
    if len(known.setting.pipelines) > 1:
        scopes = {"policy": known.setting.pipelines, **scopes}
    for seen in known.requests.values():
        table = costs(known, seen)
        if not table:
            why = _silence(seen)
            found.silent[why] = found.silent.get(why, 0) + 1
            continue
        found.tables[seen.id] = table
        for scope, among in scopes.items():
            for kind in KINDS:
                if (one := regret(seen.id, table, kind, among)) is not None:
                    found.judged[kind, scope] = found.judged.get((kind, scope), 0) + 1
                    took: Ns = getattr(one.ran, kind)
                    if one.lost > SAME * took:
                        found.lost.setdefault((kind, scope), []).append(one)
        again = replayed(known, seen)
        if again is not None and again.ttft is not None and seen.ttft is not None:
            found.errors.append(again.ttft - seen.ttft)
    return found


def _silence(seen: Seen) -> str:
    return seen.trouble or ("no token came" if seen.ttft is None else "it was never routed")


def of_folder(folder: Path) -> tuple[Verdict, Recording]:
    """Of a recorded run. Raises BadInput where it is none."""
    rec = recording.opened(folder, rows=False)
    known = hindsight(rec.events({"Accepted", "PageTable", "PagesEvicted"}), setting_in(rec))
    return verdict(known), rec


def as_json(found: Verdict) -> dict[str, Any]:
    """For summary-like output; times are seconds."""
    errors = sorted(map(abs, found.errors))
    return {
        "requests": len(found.tables),
        "without_an_answer": found.silent,
        "regret": {
            scope: {
                kind: {
                    "judged": found.judged.get((kind, scope), 0),
                    "not_best": len(found.lost.get((kind, scope), ())),
                    "sum_s": Seconds(found.total(kind, scope)),
                    "relay_s": Seconds(found.price(kind, scope)[0]),
                    "wan_bytes": found.price(kind, scope)[1],
                    "worst": [_regret_json(r) for r in found.worst(kind, scope)],
                }
                for kind in KINDS
            }
            for scope in ("policy", "all")
            if any((kind, scope) in found.judged for kind in KINDS)
        },
        "error_ttft_s": {
            "replayed": len(errors),
            **{
                f"p{p}": Seconds(errors[-(-len(errors) * p // 100) - 1]) if errors else None
                for p in (50, 90, 99)
            },
        },
    }


def _regret_json(r: Regret) -> dict[str, Any]:
    return {
        "request": r.request,
        "ran": r.ran.pipeline,
        "best": r.best.pipeline,
        "lost_s": Seconds(r.lost),
        "how": r.best.how,
    }


def cost_json(cost: Cost) -> dict[str, Any]:
    def seconds(value: Ns | None) -> Seconds | None:
        return None if value is None else Seconds(value)

    return {
        "pipeline": cost.pipeline,
        "ran": cost.ran,
        "ttft_s": seconds(cost.ttft),
        "e2e_s": seconds(cost.e2e),
        "relay_s": seconds(cost.relay),
        "wan_bytes": cost.wan_bytes,
        "how": cost.how,
    }
