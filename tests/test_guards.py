"""Each row of test_failures' table has a guard that can be taken out, and its tests notice.
`python -m tests.guards` does that for all rows; here, for two that are quick.
"""

from __future__ import annotations

import json

import pytest

from .guards import REMOVALS, main, rows, try_one


def test_every_row_has_a_guard_that_can_be_taken_out() -> None:
    assert set(REMOVALS) == set(rows())
    assert all(REMOVALS.values())


@pytest.mark.parametrize("row", REMOVALS)
def test_a_removal_changes_what_it_says_and_is_taken_back(row: str) -> None:
    for removal in REMOVALS[row].values():
        assert removal.patches
        before = [getattr(owner, name) for owner, name, _ in removal.patches]
        with removal.planted():
            planted = [getattr(owner, name) for owner, name, _ in removal.patches]
        after = [getattr(owner, name) for owner, name, _ in removal.patches]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert all(a is not b for a, b in zip(before, planted, strict=True))


def test_a_guard_that_is_gone_is_noticed_by_a_test_of_its_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["F26", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["missed"] == []
    assert told["rows"]["F26"]["locked-unseen"] == {
        "noticed": True,
        "by": "test_radix.py::test_f26_a_hit_that_was_not_locked_in_time_is_refused",
    }


def test_where_the_tests_stay_green_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one above says little: a removal that removes nothing."""
    from . import guards

    command = [
        "import sys; from tests import guards; from tests.mutants import Mutant",
        "guards.REMOVALS['F26'] = {'nothing': Mutant('nothing', ())}",
        "sys.exit(guards.main(['--planted', 'F26', 'nothing']))",
    ]
    monkeypatch.setattr(guards, "COMMAND", ("-c", "\n".join(command)))
    assert try_one("F26", "nothing") == (False, "")


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["F2"]) == 2
    assert "found F2; allowed: F1, F3" in capsys.readouterr().err
