"""Calling `pddrt` in this process, as the tests of its commands do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pddrt import cli


@dataclass
class Done:
    code: int
    out: str
    err: str


Call = Callable[..., Done]


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> Done:
    """`pddrt` with these arguments, to its end: the exit code, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["pddrt", *map(str, args)])
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return Done(code, *capsys.readouterr())
