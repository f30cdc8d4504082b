"""One column against another: their numbers, ratios and intervals.

Pure: from the summaries of runs and the outcomes of their requests to plain data. `compare` makes
the runs, `pairing` looks at single requests.

- A `Round` is one run, with a seed of its own. Several rounds of a column count as one: every
  number is the **mean over its seeds** of what each run's summary says. A percentile is the mean of
  the runs' percentiles, not one over all their requests: a run is what repeats.
- **Ratios** are value over the baseline's value, from exact nanoseconds: 1 where they are equal.
- **Intervals** are over seeds where there are enough, else over sessions: see `intervals`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pddrt.comparing.intervals import (
    LEAST_SEEDS,
    LEVEL,
    WHATS,
    Interval,
    Sample,
    by_seeds,
    by_sessions,
)
from pddrt.comparing.pairing import Outcome, Seeded
from pddrt.trace import Seconds

Json = dict[str, Any]

LATENCIES = ("ttft_s", "ttst_s", "tpot_s", "itl_s", "e2e_s", "handoff_gap_s")
RATES = ("goodput_rps", "slo_attainment", "output_tps")
COMPARED = (*LATENCIES, "ttft_legs_s", *RATES, "wan_bytes", "tokens", "instances", "cost")
"""The numbers that ratios are made of."""
OVER_SEEDS = (*((key, what) for key in LATENCIES for what in WHATS), *((key,) for key in RATES),
              ("wan_bytes", "kv"), ("wan_bytes", "all"))  # fmt: skip
"""The numbers that have an interval over seeds."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a column. `failure`: why it did not end as it must, "" where it did; `wan`: the
    links between sites.
    """

    folder: str
    seed: int
    summary: Mapping[str, Any]
    outcomes: Mapping[str, Outcome]
    wan: Sequence[str] = ()
    failure: str = ""
    interrupted: bool = False
    numbers: Json = field(init=False)
    """The part of its summary that is compared."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", numbers(self.summary, self.wan))


def seeded(rounds: Sequence[Round]) -> Seeded:
    return {r.seed: r.outcomes for r in rounds}


def numbers(summary: Mapping[str, Any], wan: Sequence[str]) -> Json:
    """The part of a summary that is compared. `wan`: the links between sites."""
    crossed = [summary["links"][name] for name in wan if name in summary["links"]]
    return {
        "requests": summary["requests"],
        "pipelines": {name: of["requests"] for name, of in summary["pipelines"].items()},
        **{key: summary[key] for key in (*LATENCIES, "ttft_legs_s", *RATES)},
        "wan_bytes": {
            "kv": sum(link["kv_bytes"] for link in crossed),
            "ids": sum(link["ids_bytes"] for link in crossed),
            "all": sum(link["bytes"] for link in crossed),
        },
        "handoffs": summary["handoffs"],
        "main_itl_s": summary["main_itl_s"],
        "tokens": summary["tokens"],
        "instances": _used(summary["instances"]),
        "cost": summary["cost"],
        "parity": summary["parity"],
        "violations": len(summary["invariants"]["violations"]),
        "fidelity": summary["provenance"]["fidelity"]["verdict"],
    }


def _used(instances: Mapping[str, Json]) -> Json:
    """Those that stepped, of how many, and the mean of their busy fractions; so for each role."""

    def count(of: Sequence[Json]) -> Json:
        busy = [instance["busy_fraction"] for instance in of if instance["steps"]]
        mean = round(sum(busy) / len(busy), 6) if busy else None
        return {"used": len(busy), "of": len(of), "busy_fraction": mean}

    roles = dict.fromkeys(instance["role"] for instance in instances.values())
    by_role = {role: count([i for i in instances.values() if i["role"] == role]) for role in roles}
    return {**count(list(instances.values())), "by_role": by_role}


def mean(trees: Sequence[Any]) -> Any:
    """Several runs' numbers as one: means of what is a number in any, else the first's. What is
    None in a run is left out; counts that are equal stay whole.
    """
    known = [tree for tree in trees if tree is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        keys = dict.fromkeys(key for tree in known for key in tree)
        return {key: mean([tree.get(key) for tree in known]) for key in keys}
    if any(isinstance(v, bool) or not isinstance(v, (int, float, Seconds)) for v in known):
        return known[0]
    if isinstance(known[0], Seconds):
        return Seconds(round(sum(v.ns for v in known) / len(known)))
    return known[0] if len(set(known)) == 1 else statistics.fmean(known)


def ratios(here: Any, base: Any) -> Any:
    """Value over value, throughout: 1 where they are equal, None where there is no ratio."""
    if isinstance(here, dict):
        return {key: ratios(value, (base or {}).get(key)) for key, value in here.items()}
    here, base = plain(here), plain(base)
    if here is None or base is None:
        return None
    if here == base:
        return 1.0
    return here / base if base else None


def plain(value: Any) -> Any:
    """A number; times in nanoseconds."""
    return value.ns if isinstance(value, Seconds) else value


def at(tree: Any, path: Sequence[str]) -> Any:
    """What stands there; None where nothing does."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


# -- intervals -------------------------------------------------------------------------------------


def intervals(base: Sequence[Round], here: Sequence[Round]) -> Json | None:
    """Of the numbers of `here` (`own`) and of their ratios to `base` (`ratio`), low and high;
    None where nothing can be said. Both have the same seeds and the same requests.
    """
    if len(here) >= LEAST_SEEDS:
        by, of, found = "seeds", len(here), _over_seeds(base, here)
    else:
        sessions = [len({o.session for o in r.outcomes.values()}) for r in here]
        by, of, found = "sessions", sum(sessions), _over_sessions(base, here)
    tree: Json = {"level": LEVEL, "by": by, "of": of, "own": {}, "ratio": {}}
    for path, (own, ratio) in found.items():
        timed = path[0] in LATENCIES
        for kind, interval in (("own", own), ("ratio", ratio)):
            if interval is None or any(value != value for value in interval):
                continue
            as_time = kind == "own" and timed
            low, high = (Seconds(round(v)) if as_time else v for v in interval)
            into = tree[kind]
            for key in path[:-1]:
                into = into.setdefault(key, {})
            into[path[-1]] = {"low": low, "high": high}
    return tree if tree["own"] else None


Intervals = dict[tuple[str, ...], tuple[Interval | None, Interval | None]]


def _over_seeds(base: Sequence[Round], here: Sequence[Round]) -> Intervals:
    found: Intervals = {}
    for path in OVER_SEEDS:
        then, now = ([plain(at(r.numbers, path)) for r in rounds] for rounds in (base, here))
        if None not in then and None not in now:
            found[path] = by_seeds(then, now, ".".join(path))
    return found


def _over_sessions(base: Sequence[Round], here: Sequence[Round]) -> Intervals:
    found: Intervals = {}
    numbered = [
        {s: i for i, s in enumerate(sorted({o.session for r in pair for o in r.outcomes.values()}))}
        for pair in zip(base, here, strict=True)
    ]
    sessions = [len(of) for of in numbered]
    for key, values in MEASURES.items():
        then, now = (
            [_sample(r, number, values) for r, number in zip(rounds, numbered, strict=True)]
            for rounds in (base, here)
        )
        if not all(len(sample.values) for sample in (*then, *now)):
            continue
        # One name for all: what is drawn is the sessions, whatever is then measured of them.
        for what, own, ratio in by_sessions(then, now, sessions, "sessions"):
            found[key, what] = (own, ratio)
    return found


def _one(measure: str) -> Callable[[Outcome], Sequence[int]]:
    def values(outcome: Outcome) -> Sequence[int]:
        time = outcome.time(measure)
        return () if time is None else (time,)

    return values


MEASURES: dict[str, Callable[[Outcome], Sequence[int]]] = {
    "ttft_s": _one("ttft"),
    "ttst_s": _one("ttst"),
    "tpot_s": _one("tpot"),
    "itl_s": lambda outcome: outcome.gaps,
    "e2e_s": _one("e2e"),
    "handoff_gap_s": _one("gap"),
}
"""The times that a request adds to each distribution, in nanoseconds."""


def _sample(
    round: Round, number: Mapping[int, int], values: Callable[[Outcome], Sequence[int]]
) -> Sample:
    times: list[float] = []
    session: list[int] = []
    for outcome in round.outcomes.values():
        found = values(outcome)
        times += found
        session += [number[outcome.session]] * len(found)
    return Sample.of(times, session)
