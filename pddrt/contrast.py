"""One setting against another: ratios of their numbers, and who won and lost, request by request.

Pure: from the summaries and request records of runs to plain data. `compare` makes the runs.

- A `Round` is one run. Several rounds of a column count as one: every number is the median of its
  own (the lower of the middle two).
- **Ratios** are value over the baseline's value, from exact nanoseconds: 1 where they are equal.
- **Pairs** are by request id. One is faster or slower where the medians of its rounds lie more than
  5 % apart and no round of one column lies inside those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from pddrt.metrics import LEGS, RequestRecord
from pddrt.trace import Seconds
from pddrt.types import Ns

Json = dict[str, Any]

NOTABLE = 20
"""A difference counts from one part in so many: 5 %."""
LARGEST = 3
"""So many of the largest wins and of the largest losses are told."""
LATENCIES = ("ttft_s", "ttst_s", "tpot_s", "itl_s", "e2e_s", "handoff_gap_s")
RATES = ("goodput_rps", "slo_attainment", "output_tps")
COMPARED = (*LATENCIES, "ttft_legs_s", *RATES, "wan_bytes", "tokens", "instances", "cost")
"""The numbers that ratios are made of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is compared of one request. `prompt`: a digest of its ids, "" where it had none yet."""

    id: str
    prompt: str
    prompt_tokens: int
    max_tokens: int
    ids: tuple[int, ...]
    ttft: Ns | None
    e2e: Ns | None
    legs: Mapping[str, Ns]

    @classmethod
    def of(cls, r: RequestRecord) -> Outcome:
        prompt = xxhash.xxh3_128_hexdigest(repr(r.prompt_ids).encode()) if r.prompt_ids else ""
        return cls(
            id=r.id, prompt=prompt, prompt_tokens=len(r.prompt_ids), max_tokens=r.max_tokens,
            ids=tuple(r.ids), ttft=r.ttft, legs=r.legs or {},
            e2e=r.e2e if r.finish_reason in ("stop", "length") else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a column. `failure`: why it did not end as it must, "" where it did."""

    folder: str
    numbers: Json
    outcomes: Mapping[str, Outcome]
    failure: str = ""
    interrupted: bool = False


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


def median(trees: Sequence[Any]) -> Any:
    """Several runs' numbers as one: medians of what can be ordered, else the first's."""
    known = [tree for tree in trees if tree is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        keys = dict.fromkeys(key for tree in known for key in tree)
        return {key: median([tree.get(key) for tree in known]) for key in keys}
    if all(isinstance(value, (int, float, Seconds)) for value in known):
        return sorted(known, key=_plain)[(len(known) - 1) // 2]
    return known[0]


def ratios(here: Any, base: Any) -> Any:
    """Value over value, throughout: 1 where they are equal, None where there is no ratio."""
    if isinstance(here, dict):
        return {key: ratios(value, (base or {}).get(key)) for key, value in here.items()}
    here, base = _plain(here), _plain(base)
    if here is None or base is None:
        return None
    if here == base:
        return 1.0
    return here / base if base else None


def _plain(value: Any) -> Any:
    return value.ns if isinstance(value, Seconds) else value


# -- request by request ----------------------------------------------------------------------------


def other_prompt(base: Sequence[Round], here: Sequence[Round]) -> str:
    """The first request that is not the same in all rounds of both; "" if there is none."""
    first: dict[str, Outcome] = {}
    for outcome in (o for r in (*base, *here) for o in r.outcomes.values() if o.prompt):
        known = first.setdefault(outcome.id, outcome)
        if (known.prompt, known.max_tokens) != (outcome.prompt, outcome.max_tokens):
            tokens = (f"{o.prompt_tokens} + {o.max_tokens}" for o in (known, outcome))
            return f"{outcome.id} has other prompts (prompt + answer tokens: {', '.join(tokens)})"
    return ""


def pairs(base: Sequence[Round], here: Sequence[Round]) -> Json:
    """Winners and losers among the requests that both columns have."""
    ids = [name for name in base[0].outcomes if name in here[0].outcomes]
    both = [(base[0].outcomes[name], here[0].outcomes[name]) for name in ids]
    answers = [(a.ids, b.ids) for a, b in both if None not in (a.e2e, b.e2e)]
    return {
        "requests": len(ids),
        "only_in_baseline": len(base[0].outcomes) - len(ids),
        "only_here": len(here[0].outcomes) - len(ids),
        "other_answers": sum(a != b for a, b in answers),
        "other_lengths": sum(len(a) != len(b) for a, b in answers),
        "ttft": _winners(base, here, ids, lambda outcome: outcome.ttft),
        "e2e": _winners(base, here, ids, lambda outcome: outcome.e2e),
    }


Times = list[tuple[Ns, Outcome]]


def _winners(
    base: Sequence[Round], here: Sequence[Round], ids: Sequence[str],
    measure: Callable[[Outcome], Ns | None],
) -> Json:  # fmt: skip
    def times(rounds: Sequence[Round], name: str) -> Times:
        found = [r.outcomes[name] for r in rounds if name in r.outcomes]
        known = [(time, o) for o in found if (time := measure(o)) is not None]
        return sorted(known, key=lambda pair: pair[0])

    measured = [(times(base, name), times(here, name)) for name in ids]
    found = [_Pair(b, h) for b, h in measured if b and h]
    verdicts = [pair.verdict for pair in found]
    ordered = sorted(found, key=lambda pair: pair.change)
    wins = [p for p in ordered if p.verdict == "faster"][:LARGEST]
    losses = [p for p in reversed(ordered) if p.verdict == "slower"][:LARGEST]
    return {
        "compared": len(found),
        **{verdict: verdicts.count(verdict) for verdict in ("faster", "slower", "same")},
        "largest_wins": [pair.told() for pair in wins],
        "largest_losses": [pair.told() for pair in losses],
    }


@dataclass(frozen=True, slots=True)
class _Pair:
    """One request's times in one measure, in all rounds of two columns, each in order."""

    base: Times
    here: Times

    @property
    def change(self) -> Ns:
        return _middle(self.here)[0] - _middle(self.base)[0]

    @property
    def verdict(self) -> Literal["faster", "slower", "same"]:
        here, base = _middle(self.here)[0], _middle(self.base)[0]
        if here * NOTABLE < base * (NOTABLE - 1) and self.here[-1][0] < self.base[0][0]:
            return "faster"
        if here * NOTABLE > base * (NOTABLE + 1) and self.here[0][0] > self.base[-1][0]:
            return "slower"
        return "same"

    def told(self) -> Json:
        """Both values, and the part of the time that explains most of the difference."""
        here, base = _middle(self.here), _middle(self.base)
        now, then = _parts(*here), _parts(*base)
        changes = {part: now[part] - then[part] for part in now if part in then}
        most = (min if self.change < 0 else max)(changes, key=lambda p: changes[p], default=None)
        return {
            "id": here[1].id,
            "baseline_s": Seconds(base[0]),
            "here_s": Seconds(here[0]),
            "ratio": ratios(here[0], base[0]),
            "mostly": most,
            "mostly_s": None if most is None else Seconds(changes[most]),
        }


def _middle(times: Times) -> tuple[Ns, Outcome]:
    return times[(len(times) - 1) // 2]


def _parts(time: Ns, outcome: Outcome) -> dict[str, Ns]:
    """The legs of TTFT, and the rest of `time`: they add up to it. Nothing where none is known."""
    if not outcome.legs:
        return {}
    parts = {leg: outcome.legs[leg] for leg in LEGS}
    return {**parts, "after_first_token": time - sum(parts.values())}
