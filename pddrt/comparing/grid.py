"""The settings that a comparison or a sweep runs: one scenario for each choice of values.

`grid` lays every choice of `axes` over a scenario and validates it. **The same requests**: answers
are scripted, so that no prompt holds what a setting has made; a trace brings whole prompts anyway.
What is wrong with any setting is found before anything runs, and said of the settings it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pddrt import document
from pddrt.comparing.axes import Axis, folders, labels, names
from pddrt.document import Document
from pddrt.errors import BadInput
from pddrt.scenario import Scenario, validated

ANSWERS = "workload.answers"

Problems = Mapping[str, Sequence[str]]
"""What is wrong with each setting, by its name."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice of values. `label`: its name as one word; `folder`: the name of its run's folder;
    `changes`: the fields that make it, as they were given; `written`: all that its scenario says.
    """

    name: str
    label: str
    folder: str
    changes: Mapping[str, str]
    scenario: Scenario
    written: Document
    was_live: bool
    """Whether the scenario puts live answers into its prompts; here they are scripted."""

    @property
    def asks(self) -> tuple[Any, ...]:
        """What its requests follow from."""
        return (self.scenario.workload, self.scenario.seed, self.scenario.model)

    def seeded(self, seed: int) -> Scenario:
        """Its scenario with another seed."""
        if seed == self.scenario.seed:
            return self.scenario
        return validated(deepcopy(self.written), (), seed, None)


def grid(
    base: str | Path | Document, axes: Sequence[Axis], overrides: Sequence[str] = (), *,
    seed: int | None = None, clock: str | None = None, scripted: bool = True,
) -> tuple[list[Setting], dict[str, list[str]]]:  # fmt: skip
    """All settings that are sound, and what is wrong with the others. `seed` and `clock` hold where
    no axis is about them. Raises BadInput where `base` is no scenario at all.
    """
    written = base if isinstance(base, Document) else document.read(base)
    choices = list(product(*(axis.values for axis in axes)))
    called = names(axes, choices)
    found: list[Setting] = []
    problems: dict[str, list[str]] = {}
    for name, label, folder, values in zip(
        called, labels(called), folders(called), choices, strict=True
    ):
        changes = {axis.path: value for axis, value in zip(axes, values, strict=True)}
        mine = deepcopy(written)
        wrong = list(_laid_over(mine, overrides, "--set"))
        for axis, value in zip(axes, values, strict=True):
            wrong += _laid_over(mine, [f"{axis.path}={value}"], axis.option)
        was_live = _script_answers(mine) if scripted and ANSWERS not in changes else False
        try:
            scenario = validated(
                mine, (), None if "seed" in changes else seed, None if "clock" in changes else clock
            )
        except BadInput as error:
            wrong += error.problems
        if wrong:
            problems[name] = wrong
        else:
            found.append(Setting(name, label, folder, changes, scenario, mine, was_live))
    return found, problems


def refuse(problems: Problems, of: int) -> None:
    """Raises BadInput where a setting has problems; those that not all `of` have say who does."""
    who: dict[str, list[str]] = {}
    for name, texts in problems.items():
        for text in dict.fromkeys(texts):
            who.setdefault(text, []).append(name)
    if who:
        raise BadInput([_said(text, names, of) for text, names in who.items()])


def _said(text: str, names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return text
    more = [f"{len(names) - 3} more"] if len(names) > 4 else names[3:]
    return f"{text} (for {', '.join([*names[:3], *more])})"


def _laid_over(written: Document, specs: Iterable[str], flag: str) -> Iterator[str]:
    """Overrides a document; gives what cannot be."""
    for spec in specs:
        try:
            written.override(spec, flag)
        except BadInput as error:
            yield from error.problems


def _script_answers(written: Document) -> bool:
    """Whether live answers would have come into prompts. What is wrong there is left as it is."""
    workload = written.data.get("workload")
    if not isinstance(workload, dict) or workload.get("answers", "live") != "live":
        return False
    if workload.get("kind") in ("sessions", "poisson", "closed"):
        written.put(("workload", "answers"), "scripted", "compare")
    return workload.get("kind") == "sessions" and workload.get("turns", 1) != 1
