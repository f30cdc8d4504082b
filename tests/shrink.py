"""Makes a failing case small: greedily, as long as it still fails in the same way.

Sessions and faults go first, many at a time and then one by one; then turns, then whatever is not
as by default (the default topology is one P, one RLD, one MD), then the length of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .swarm import Case, failure, manner

KEPT = frozenset({"seed", "sessions", "faults", "changes"})


def shrink(
    case: Case, failed: str, runs: int = 200, fails: Callable[[Case], str] = failure
) -> tuple[Case, str]:
    """The smallest case found in so many runs, and how it fails."""
    wanted = manner(failed)
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if not runs:
                return case, failed
            runs -= 1
            found = fails(smaller)
            if found and manner(found) == wanted:
                case, failed, progress = smaller, found, True
                break
    return case, failed


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little smaller, the boldest first."""
    for name in ("sessions", "faults", "changes"):
        parts = getattr(case, name)
        for left in _fewer(parts):
            if left or name != "sessions":
                yield replace(case, **{name: left})
    if case.ghosts:
        yield replace(case, ghosts=case.ghosts // 2)
    for at, (start, turns) in enumerate(case.sessions):
        if len(turns) > 1:
            shorter = (start, turns[:-1])
            yield replace(case, sessions=(*case.sessions[:at], shorter, *case.sessions[at + 1 :]))
    plain = Case()
    for field in fields(Case):
        default = getattr(plain, field.name)
        if field.name not in KEPT and getattr(case, field.name) != default:
            yield replace(case, **{field.name: default})
    for part, least in ((0, 8), (1, 4)):
        halved = tuple(
            (start, tuple(_halved(turn, part, least) for turn in turns))
            for start, turns in case.sessions
        )
        if halved != case.sessions:
            yield replace(case, sessions=halved)


def _fewer(parts: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    if len(parts) > 3:
        yield parts[: len(parts) // 2]
        yield parts[len(parts) // 2 :]
    for at in range(len(parts)):
        yield (*parts[:at], *parts[at + 1 :])


def _halved(turn: tuple[str, int, int], part: int, least: int) -> tuple[str, int, int]:
    text, tokens, think = turn
    if part == 0:
        return text[: max(min(least, len(text)), len(text) // 2)], tokens, think
    return text, max(min(least, tokens), tokens // 2), think
