"""Steps for tests of engines: one sequence's share, its slots given as runs that may be longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pddrt.types import Run, Sampling, Span

GREEDY = Sampling()


def head(runs: Iterable[Run], tokens: int) -> tuple[Run, ...]:
    """The slots of the first `tokens` positions."""
    kept, left = [], tokens
    for run in runs:
        if left > 0:
            kept.append(Run(run.slot, min(run.length, left)))
        left -= run.length
    return tuple(kept)


def span(
    ids: Sequence[int],
    start: int,
    end: int,
    runs: Sequence[Run],
    sampling: Sampling | None = GREEDY,
) -> Span:
    """The step that computes ids[start:end]; `runs` may reach further."""
    return Span("r", tuple(ids[start:end]), start, head(runs, end), sampling)
