"""What callers from Python give: arguments of the wrong kind are refused by name, as options are.

`checked` guards a function of `pddrt.api`: an argument of another kind than its parameter is
BadInput before anything is done, and what is said of an option (`--repeat: found 0`) is said of the
parameter that stands for it (`repeat: found 0`).
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from pddrt.errors import BadInput
from pddrt.sections import unknown_name
from pddrt.units import shown

P = ParamSpec("P")
R = TypeVar("R")

PARAMETERS = {
    "--policies": "policies", "--vary": "vary", "--baseline": "baseline", "--repeat": "repeat",
    "--jobs": "jobs", "--max-runs": "max_runs", "--metric": "metrics", "--keep": "keep",
    "--prompt": "prompt", "--seed": "seed", "--clock": "clock", "--out": "out",
    "--set": "overrides", "--verify": "verify", "--fresh": "fresh",
}  # fmt: skip
"""Options of commands, and what the same is called here."""

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def _whole(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:  # numpy's are whole numbers, too
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _texts(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    )


def _named(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


Kind = tuple[Callable[[object], bool], str]
_WHOLE: Kind = (_whole, "a whole number")
_TEXT: Kind = (lambda value: isinstance(value, str), "a text")
_YES_OR_NO: Kind = (lambda value: isinstance(value, bool), "True or False")
_TEXTS: Kind = (_texts, "a text or a list of texts")
_PATH: Kind = (_path, "a path")
_NAMED: Kind = (_named, "a mapping whose keys are texts")
KINDS: Mapping[str, Kind] = {
    "overrides": _NAMED, "vary": _NAMED, "policies": _TEXTS, "metrics": _TEXTS, "seed": _WHOLE,
    "repeat": _WHOLE, "jobs": _WHOLE, "max_runs": _WHOLE, "clock": _TEXT, "prompt": _TEXT,
    "baseline": _TEXT, "keep": _TEXT, "out": _PATH, "folder": _PATH, "verify": _YES_OR_NO,
    "quiet": _YES_OR_NO, "check": _YES_OR_NO, "fresh": _YES_OR_NO,
    "listen": (callable, "a function"), "kind": _TEXT, "id": _TEXT, "name": _TEXT,
    "condition": _TEXT,
}  # fmt: skip
"""By parameter: whether a value is one, and what is one. None is for where it is the default."""


def refuse(name: str, value: object, allowed: str) -> None:
    """Raises BadInput."""
    known = isinstance(value, (str, int, float)) or value is None
    kind = "" if value is None else f" ({type(value).__name__})"
    found = f"{shown(value)}{kind}" if known else f"a {type(value).__name__}"
    raise BadInput(f"{name}: found {'None' if value is None else found}; allowed: {allowed}")


def check(name: str, value: object) -> None:
    """Raises BadInput where a value is not of its parameter's kind."""
    if name in KINDS and not KINDS[name][0](value):
        refuse(name, value, KINDS[name][1])


def known(what: str, value: str, names: list[str]) -> None:
    """Raises BadInput where a name is none."""
    if value not in names:
        raise BadInput(f"{what}: {unknown_name(value, names)}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with its arguments looked at, and with its messages in their words."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if value is not None or signature.parameters[name].default is not None:
                check(name, value)
        try:
            return function(*args, **kwargs)
        except BadInput as error:
            texts = [_OPTION.sub(lambda o: PARAMETERS.get(o[0], o[0]), t) for t in error.problems]
            if texts == list(error.problems):
                raise
            raise BadInput(texts) from error

    return call
