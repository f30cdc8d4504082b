"""The scenario's handoff section: which policy that is, and what is wrong with it.

A policy of the user's own, package.module:Class, needs `decide(facts)` (see `policy.handoff`). Of
`threshold`, `max_ids_per_round` and `max_rounds` its constructor is given those that it names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pddrt import plugins
from pddrt.document import Problem
from pddrt.errors import BadInput
from pddrt.policy.handoff import MODES, Custom, Finish, Follow, OneShot, Piece, Policy, objection

if TYPE_CHECKING:
    from pddrt.scenario import Scenario


def policy_of(scenario: Scenario) -> Policy:
    """The scenario's handoff policy. Raises BadInput where it is a class that cannot be had."""
    handoff = scenario.handoff
    bounds = {
        "threshold": handoff.threshold,
        "max_ids_per_round": handoff.max_ids_per_round,
        "max_rounds": handoff.max_rounds,
    }
    if handoff.mode in MODES:
        kind = MODES[handoff.mode]
        return kind() if issubclass(kind, OneShot) else kind(**bounds)
    user = _made(handoff.mode, bounds, scenario)
    return Custom(
        handoff.mode, plugins.guarded(user.decide, (Finish, Piece, Follow), check=objection)
    )


def policy_problems(scenario: Scenario) -> Iterator[Problem]:
    """A policy that cannot be had."""
    try:
        policy_of(scenario)
    except BadInput as error:
        for line in error.problems:
            yield Problem(("handoff", "mode"), line)


def _made(name: str, bounds: dict[str, int], scenario: Scenario) -> Any:
    cls: Any = plugins.load(name, "handoff policy", ["decide(facts)"], scenario.folder)
    try:
        named = inspect.signature(cls).parameters
    except ValueError:  # nobody knows its signature
        named = {}  # type: ignore[assignment]
    return plugins.make(cls, **{k: v for k, v in bounds.items() if k in named})
