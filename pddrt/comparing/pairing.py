"""The same request in two columns: who was faster, by how much, and which part made the difference.

Pure: from request records to plain data. A request is known by its seed and its id; it is faster or
slower where the two times lie more than 5 % apart. What noise there is between runs is not judged
request by request but by the intervals over all of them (see `intervals`).

The time of a request falls into the parts of `slowness`, which add up: the legs of TTFT, then what
came after the first token. The part to which a difference is mostly due is the one that changed
most in its direction.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from pddrt.metrics import LEGS, RequestRecord
from pddrt.report.slowness import PARTS, parts
from pddrt.trace import Seconds
from pddrt.types import SECOND, Ns

Json = dict[str, Any]

NOTABLE = 20
"""A difference counts from one part in so many: 5 %."""
LARGEST = 3
"""So many of the largest wins and of the largest losses are told."""
PAIRED = {"ttft": LEGS, "e2e": PARTS}
"""What requests are paired by, and the parts that it is made of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is compared of one request. `prompt`, `answer`: digests of their ids, "" where there
    were none yet; `gaps`: between its tokens; `parts`: what its time was made of.
    """

    id: str
    session: int
    prompt: str
    prompt_tokens: int
    max_tokens: int
    answer: str
    tokens: int
    pipeline: str
    ttft: Ns | None
    e2e: Ns | None
    ttst: Ns | None
    tpot: Ns | None
    gap: Ns | None
    gaps: array[int]
    parts: Mapping[str, Ns]

    @classmethod
    def of(cls, r: RequestRecord) -> Outcome:
        ended = r.finish_reason in ("stop", "length")
        return cls(
            id=r.id, session=r.session, prompt=_digest(r.prompt_ids),
            prompt_tokens=len(r.prompt_ids), max_tokens=r.max_tokens, answer=_digest(r.ids),
            tokens=len(r.ids), pipeline=r.pipeline or "", ttft=r.ttft, e2e=r.e2e if ended else None,
            ttst=r.ttst, tpot=r.tpot, gap=r.gap, gaps=array("q", r.itls), parts=parts(_row(r)),
        )  # fmt: skip

    def time(self, measure: str) -> Ns | None:
        found: Ns | None = getattr(self, measure)
        return found


def _digest(ids: Sequence[int]) -> str:
    return xxhash.xxh3_128_hexdigest(array("q", ids).tobytes()) if ids else ""


def _row(r: RequestRecord) -> Json:
    """What `slowness` reads of a line of requests.jsonl. A double keeps nanoseconds of 26 days."""
    return {
        "ttft_legs": None if r.legs is None else {k: v / SECOND for k, v in r.legs.items()},
        "token_times_s": [(t - r.sent) / SECOND for t in r.times],
        "token_source": r.sources,
        "e2e_s": None if r.e2e is None else r.e2e / SECOND,
        "handoff": r.seam.rounds or None,
        "instances": {"relay": r.relay},
    }


@dataclass(frozen=True, slots=True)
class Pair:
    """One request in the baseline and here, by one measure."""

    seed: int
    base: Outcome
    here: Outcome
    measure: str

    @property
    def times(self) -> tuple[Ns, Ns]:
        base, here = self.base.time(self.measure), self.here.time(self.measure)
        assert base is not None
        assert here is not None
        return base, here

    @property
    def change(self) -> Ns:
        base, here = self.times
        return here - base

    @property
    def verdict(self) -> Literal["faster", "slower", "same"]:
        base, here = self.times
        if here * NOTABLE < base * (NOTABLE - 1):
            return "faster"
        return "slower" if here * NOTABLE > base * (NOTABLE + 1) else "same"

    @property
    def changes(self) -> dict[str, Ns]:
        """Of each part; empty where it is not known of both."""
        here, base = self.here.parts, self.base.parts
        return {p: here[p] - base[p] for p in PAIRED[self.measure]} if here and base else {}

    @property
    def mostly(self) -> str | None:
        """The part that explains most of the difference."""
        changes = self.changes
        return (min if self.change < 0 else max)(changes, key=lambda p: changes[p], default=None)

    def told(self) -> Json:
        base, here = self.times
        mostly, changes = self.mostly, self.changes
        return {
            "id": self.here.id,
            "seed": self.seed,
            "baseline_s": Seconds(base),
            "here_s": Seconds(here),
            "ratio": here / base if base else 1.0 if here == base else None,
            "mostly": mostly,
            "mostly_s": None if mostly is None else Seconds(changes[mostly]),
        }


Seeded = Mapping[int, Mapping[str, Outcome]]
"""The requests of each seed, by id."""


def other_prompt(base: Seeded, here: Seeded) -> str:
    """The first request that is not the same in both; "" if there is none."""
    for seed, outcomes in here.items():
        for name, outcome in outcomes.items():
            known = base.get(seed, {}).get(name)
            if known is None or not known.prompt or not outcome.prompt:
                continue
            if (known.prompt, known.max_tokens) != (outcome.prompt, outcome.max_tokens):
                tokens = (f"{o.prompt_tokens} + {o.max_tokens}" for o in (known, outcome))
                return f"{name} has other prompts (prompt + answer tokens: {', '.join(tokens)})"
    if base.keys() != here.keys():
        return f"seeds {_listed(here)}, where the baseline has {_listed(base)}"
    return ""


def _listed(seeded: Seeded) -> str:
    return ", ".join(map(str, list(seeded)[:4])) + (" ..." if len(seeded) > 4 else "")


def both(base: Seeded, here: Seeded) -> Iterator[tuple[int, Outcome, Outcome]]:
    """Requests that both columns have."""
    for seed, outcomes in base.items():
        others = here.get(seed, {})
        for name, outcome in outcomes.items():
            if name in others:
                yield seed, outcome, others[name]


def paired(base: Seeded, here: Seeded, measure: str) -> list[Pair]:
    """The pairs in which both have that time, the largest win first."""
    found = [
        Pair(seed, a, b, measure)
        for seed, a, b in both(base, here)
        if a.time(measure) is not None and b.time(measure) is not None
    ]
    return sorted(found, key=lambda pair: pair.change)


def pairs(base: Seeded, here: Seeded) -> Json:
    """Winners and losers among the requests that both columns have."""
    common = [(a, b) for _, a, b in both(base, here)]
    answers = [(a, b) for a, b in common if None not in (a.e2e, b.e2e)]
    alone = [sum(map(len, seeded.values())) - len(common) for seeded in (base, here)]
    return {
        "requests": len(common),
        "only_in_baseline": alone[0],
        "only_here": alone[1],
        "other_answers": sum(a.answer != b.answer for a, b in answers),
        "other_lengths": sum(a.tokens != b.tokens for a, b in answers),
        **{measure: _winners(paired(base, here, measure), measure) for measure in PAIRED},
    }


def largest(ordered: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The largest wins and the largest losses of pairs in order, the largest first."""
    wins = [p for p in ordered if p.verdict == "faster"][:LARGEST]
    return wins, [p for p in reversed(ordered) if p.verdict == "slower"][:LARGEST]


def _winners(ordered: Sequence[Pair], measure: str) -> Json:
    verdicts = Counter(pair.verdict for pair in ordered)
    wins, losses = largest(ordered)
    return {
        "compared": len(ordered),
        **{verdict: verdicts[verdict] for verdict in ("faster", "slower", "same")},
        "change_s": _mean([pair.change for pair in ordered]),
        "parts": by_part(ordered, measure),
        "largest_wins": [pair.told() for pair in wins],
        "largest_losses": [pair.told() for pair in losses],
    }


def by_part(ordered: Sequence[Pair], measure: str) -> Json:
    """For each part: its mean change, and in how many requests that won or lost it was the most of
    it. The mean changes add up to that of the whole, but for the rounding.
    """
    known = [(pair, changes) for pair in ordered if (changes := pair.changes)]
    mostly = Counter(pair.mostly for pair, _ in known if pair.verdict != "same")
    return {
        part: {"change_s": _mean([c[part] for _, c in known]), "mostly": mostly[part]}
        for part in PAIRED[measure]
    }


def _mean(values: Sequence[Ns]) -> Seconds | None:
    return Seconds(round(sum(values) / len(values))) if values else None


# -- request by request ----------------------------------------------------------------------------

DELTAS = ("column", "seed", "request", "ttft_verdict", "e2e_verdict",
          *(f"{m}_{w}_s" for m in PAIRED for w in ("baseline", "here", "change")),
          *(f"{part}_change_s" for part in PARTS))  # fmt: skip
"""The columns of deltas.csv. A cell is empty where a time or a part is not known of both."""


def deltas(column: str, base: Seeded, here: Seeded) -> Iterator[list[str]]:
    """A row for each request of both, as `DELTAS`."""
    for seed, a, b in both(base, here):
        verdicts, times = [], []
        for measure in PAIRED:
            then, now = a.time(measure), b.time(measure)
            known = then is not None and now is not None
            verdicts.append(Pair(seed, a, b, measure).verdict if known else "")
            change = now - then if then is not None and now is not None else None
            times += ["" if t is None else str(Seconds(t)) for t in (then, now, change)]
        changes = Pair(seed, a, b, "e2e").changes
        parts = [str(Seconds(changes[p])) if changes else "" for p in PARTS]
        yield [column, str(seed), b.id, *verdicts, *times, *parts]
