"""`scenarios/oscillation.yaml`: what becomes of a deployment where requests end on the relay.

Requests are put in order of their sending and into three parts of equal time. Of a part,

    level    is the mean TTFT of its requests;
    swing    the mean absolute change of the mean TTFT from one window of a second to the next;
    load     how many requests RLD has or is waited for by, on average over time;
    behind   the share of the prompts' tokens cached at P that are not cached at MD.

TTFT oscillates upward where level and swing of the last part are several times those of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from pddrt.metrics import RequestRecord
from pddrt.recording import opened
from pddrt.run import Run
from pddrt.scenario import load
from pddrt.trace import CacheSampled
from pddrt.types import SECOND, Ns

SCENARIO = Path(__file__).parent.parent / "scenarios" / "oscillation.yaml"


@dataclass(frozen=True)
class Part:
    level: float
    """s"""
    swing: float
    load: float
    behind: float


def parts(run: Run) -> tuple[Part, Part, Part]:
    records = sorted(run.recorder.requests.values(), key=lambda r: r.sent)
    samples = {e.request: e for e in opened(run.folder).events() if isinstance(e, CacheSampled)}
    begin, end = records[0].sent, records[-1].sent + 1

    def part(k: int) -> Part:
        low, high = (begin + (end - begin) * n // 3 for n in (k, k + 1))
        of = [r for r in records if low <= r.sent < high]
        cached = [samples[r.id] for r in of]
        at_p, at_md = sum(s.prefill for s in cached), sum(s.main for s in cached)
        ttfts = [(r.sent, (r.ttft or 0) / SECOND) for r in of]
        return Part(
            level=sum(ttft for _, ttft in ttfts) / len(ttfts),
            swing=_swing(ttfts),
            load=sum(_overlap(r, low, high) for r in records) / (high - low),
            behind=1 - at_md / at_p,
        )

    return part(0), part(1), part(2)


def _swing(ttfts: list[tuple[Ns, float]]) -> float:
    windows: dict[int, list[float]] = {}
    for sent, ttft in ttfts:
        windows.setdefault(sent // SECOND, []).append(ttft)
    means = [sum(w) / len(w) for _, w in sorted(windows.items())]
    return sum(abs(b - a) for a, b in pairwise(means)) / (len(means) - 1)


def _overlap(r: RequestRecord, low: Ns, high: Ns) -> Ns:
    """How long in [low, high) a request was on the relay, or on its way to it."""
    if r.relay is None or r.routed is None:
        return 0
    return max(0, min(high, r.freed[r.relay]) - max(low, r.routed))


def play(folder: Path, policy: str, seed: int) -> Run:
    run = Run(load(SCENARIO, [f"pipeline.policy={policy}"], seed=seed), out=folder / policy)
    run.prepare()
    run.execute().raise_for_status()
    return run


@pytest.mark.parametrize("seed", range(1, 11))
def test_relay_only_oscillates_upward_and_pdd_does_not(tmp_path: Path, seed: int) -> None:
    runs = {policy: play(tmp_path, policy, seed) for policy in ("relay-only", "pdd")}
    asked = [{r.id: r.prompt_ids for r in run.recorder.requests.values()} for run in runs.values()]
    assert asked[0] == asked[1], "the same requests"
    first, _, last = parts(runs["relay-only"])
    pdd_first, _, pdd_last = parts(runs["pdd"])
    for name, part in (("relay-only", first), ("", last), ("pdd", pdd_first), ("", pdd_last)):
        print(f"{name:10} {part}")
    assert last.behind > max(0.5, 1.25 * first.behind)
    assert last.level > 3 * first.level
    assert last.swing > 3 * first.swing
    assert last.load > 1.2 * first.load
    assert max(pdd_first.behind, pdd_last.behind) < 0.02
    assert pdd_last.level < 2 * pdd_first.level
    assert pdd_last.swing < 2 * pdd_first.swing
    assert pdd_last.load < last.load / 2
    assert pdd_last.level < last.level / 3
