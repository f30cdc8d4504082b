"""Steps for tests of engines: one sequence's share, its slots given as runs that may be longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pddrt.types import Drawn, Run, Sampling, Span

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


def tokens(made: Sequence[Drawn | None]) -> list[int]:
    """The ids of a step that yields one for each of its spans."""
    drawn = [one.token for one in made if one is not None]
    assert len(drawn) == len(made), "a span without an id"
    return drawn
