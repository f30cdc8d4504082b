"""Policies of the user's own: found where they are, and every mistake laid at their door."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pddrt.errors import BadInput, RunFailed
from pddrt.plugins import guarded, load, make

GOOD = """\
from dataclasses import dataclass


@dataclass
class Mine:
    limit: int = 3

    def route(self, facts):
        return min(facts, self.limit)
"""
KIND, METHODS = "pipeline policy", ["route(facts)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scenario's folder; the current one is another. sys.path is left as it was."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "scenario").mkdir()
    monkeypatch.chdir(here)
    path = list(sys.path)
    yield tmp_path / "scenario"
    assert sys.path == path


def refusal(folder: Path, text: str, name: str = "mine:Mine", methods: Any = METHODS) -> str:
    """What is said of a module of this text, the folder's path taken out."""
    (folder / "mine.py").write_text(text)
    with pytest.raises(BadInput) as refused:
        load(name, KIND, methods, folder)
    assert "pddrt/" not in str(refused.value)
    return str(refused.value).replace(f"{folder}/", "")


# -- finding ---------------------------------------------------------------------------------------


def test_a_class_beside_the_scenario(folder: Path) -> None:
    (folder / "mine.py").write_text(GOOD)
    assert make(load("mine:Mine", KIND, METHODS, folder), limit=5).route(9) == 5


def test_a_class_where_we_stand_and_in_a_package_with_siblings(folder: Path) -> None:
    package = Path.cwd() / "ours" / "deep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(GOOD + "from ours.deep.more import LIMIT\n")
    (package / "more.py").write_text("LIMIT = 2\n")
    cls = load("ours.deep.mine:Mine", KIND, METHODS, folder)
    assert cls.__module__ == "ours.deep.mine"
    assert load("ours.deep.mine:Mine", KIND, METHODS, folder) is cls, "imported once"


def test_an_installed_class(folder: Path) -> None:
    assert load("fractions:Fraction", KIND, ["limit_denominator(most)", "denominator"]).__name__


def test_the_scenarios_folder_comes_first(folder: Path) -> None:
    (folder / "mine.py").write_text(GOOD)
    Path("mine.py").write_text("raise RuntimeError('not me')")
    assert load("mine:Mine", KIND, METHODS, folder)


def test_namesakes_of_other_folders_are_not_taken_for_each_other(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    for place, limit in ((folder, 1), (other, 2)):
        (place / "mine.py").write_text(GOOD + "from limit import LIMIT\nMine.most = LIMIT\n")
        (place / "limit.py").write_text(f"LIMIT = {limit}\n")
    most = [load("mine:Mine", KIND, METHODS, place).most for place in (folder, other, folder)]  # type: ignore[attr-defined]
    assert most == [1, 2, 1]


def test_nothing_installed_is_forgotten_with_them(folder: Path) -> None:
    """Also where it lies below the folder, as a virtual environment often does."""
    site = folder / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "theirs.py").write_text("")
    sys.path.append(str(site))
    try:
        (folder / "mine.py").write_text(GOOD + "import theirs\n")
        load("mine:Mine", KIND, METHODS, folder)
        theirs = sys.modules["theirs"]
        Path("mine.py").write_text(GOOD)
        load("mine:Mine", KIND, METHODS)
        assert sys.modules["theirs"] is theirs
    finally:
        sys.path.remove(str(site))
        del sys.modules["theirs"]


# -- refusals --------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str]] = {
    "another class": (
        GOOD.replace("Mine", "Mein"), "mine.py: found 'Mine', did you mean 'Mein'?; allowed: Mein",
    ),
    "no class": ("x = 1\n", "mine.py: there is no class Mine, nor any other; needed: a pipeline"),
    "a function": (
        "\ndef Mine(facts): ...\n",
        "mine.py:2: Mine is a function; allowed: the name of a class, a pipeline policy",
    ),
    "a value": ("Mine = 3\n", "mine.py: Mine is 3 (int); allowed: the name of a class"),
    "no method": (
        "\nclass Mine: ...\n", "mine.py:2: Mine has no route; needed: def route(self, facts)",
    ),
    "not a method": (
        "class Mine:\n    route = 3\n",
        "mine.py:1: Mine.route is 3 (int); allowed: def route(self, facts) (it is to be a pip",
    ),
    "too few arguments": (
        "class Mine:\n\n    def route(self): ...\n",
        "mine.py:3: found Mine.route(self); allowed: def route(self, facts)",
    ),
    "too many arguments": (
        "class Mine:\n    def route(self, facts, more): ...\n",
        "mine.py:2: found Mine.route(self, facts, more); allowed: def route(self, facts)",
    ),
    "async": (
        "class Mine:\n    async def route(self, facts): ...\n",
        "mine.py:2: Mine.route is async, but decisions take no time; allowed: def route(",
    ),
    "raises": (
        "import math\n\nLIMIT = math.sqrt(-1)\n",
        "mine.py:3: importing mine raised ValueError: math domain error",
    ),
    "ends Python": ("import sys\nsys.exit(7)\n", "mine.py:2: importing mine raised SystemExit: 7"),
    "not Python": ("class Mine:\n    def\n", "mine.py:2: importing mine raised SyntaxError: "),
    "lacks a library": (
        "\nimport nowhere_to_be_had\n",
        "mine.py:2: importing mine raised ModuleNotFoundError: No module named 'nowhere_to_be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_of_the_users_file_and_line(folder: Path, what: str) -> None:
    text, message = WRONG[what]
    assert refusal(folder, text).startswith(message)


def test_everything_that_is_missing_is_said_at_once(folder: Path) -> None:
    said = refusal(folder, "class Mine: ...\n", methods=["route(facts)", "pipelines"])
    kind = " (it is to be a pipeline policy)"
    assert said.splitlines() == [
        f"mine.py:1: Mine has no route; needed: def route(self, facts){kind}",
        f"mine.py:1: Mine has no pipelines; needed: pipelines{kind}",
    ]


@pytest.mark.parametrize("name", ["mine", ":Mine", "mine:", "a b:Mine", "mine.:Mine", "../m:Mine"])
def test_names_have_a_form(folder: Path, name: str) -> None:
    said = refusal(folder, GOOD, name)
    assert said == f"found '{name}'; allowed: package.module:Class"


def test_no_such_module(folder: Path) -> None:
    said = refusal(folder, GOOD, "yours:Mine")
    assert (
        said == f"no module yours in {folder} and the current folder, nor among what is installed"
    )
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    said = refusal(folder, GOOD, "pack.yours:Mine")
    assert said.endswith("nor among what is installed (pack is there)")


def test_a_mistake_in_a_sibling_is_the_siblings(folder: Path) -> None:
    (folder / "more.py").write_text("\n\n1 / 0\n")
    said = refusal(folder, GOOD + "import more\n")
    assert said == "more.py:3: importing mine raised ZeroDivisionError: division by zero"
    (folder / "more.py").write_text("")
    assert load("mine:Mine", KIND, METHODS, folder), "once it is mended"


def test_a_name_that_python_has(folder: Path) -> None:
    (folder / "fractions.py").write_text(GOOD)
    said = refusal(folder, GOOD, "fractions:Mine")
    assert said.startswith("fractions.py: the name fractions is taken by ")
    assert said.endswith("fractions.py; allowed: a name that no other module has")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine:\n    def __init__(self, top): ...\n",
         "mine.py:1: Mine(top) cannot be made of the options (limit): missing a required"),
        ("class Mine:\n    def __init__(self, limit):\n        self.x = limit['a']\n",
         "mine.py:3: Mine(): TypeError: 'int' object is not subscriptable"),
    ],
)  # fmt: skip
def test_options_that_a_class_does_not_take(folder: Path, text: str, message: str) -> None:
    (folder / "mine.py").write_text(text)
    cls = load("mine:Mine", KIND, [], folder)
    with pytest.raises(BadInput) as refused:
        make(cls, limit=3)
    assert str(refused.value).replace(f"{folder}/", "").startswith(message)


# -- during a run ----------------------------------------------------------------------------------

RUNS = """\
class Oops(Exception): ...

class Mine:
    def route(self, facts):
        return self.deeper(facts)

    def deeper(self, facts):
        match facts:
            case 0: return 1 / facts
            case 1: raise Oops("two\\nlines \\x1b[31m")
            case 2: raise SystemExit(3)
            case 3: return "three"
            case 4: return None
            case 5: return sorted(facts)
            case 6: return -6
            case 7: raise LookupError("for the caller")
            case 8: raise KeyboardInterrupt
            case _: return facts

    async def late(self, facts):
        return facts
"""


@pytest.fixture
def route(folder: Path) -> Callable[[object], int]:
    (folder / "mine.py").write_text(RUNS)
    mine = make(load("mine:Mine", KIND, METHODS, folder))
    return guarded(
        mine.route, int, lambda n: f"found {n}; allowed: 0 and more" if n < 0 else "",
        passes=(LookupError,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (0, "mine.py:9: Mine.route raised ZeroDivisionError: division by zero"),
        (1, "mine.py:10: Mine.route raised Oops: two lines \\x1b[31m"),
        (2, "mine.py:11: Mine.route raised SystemExit: 3"),
        (3, "mine.py:4: what Mine.route returned is wrong: found 'three' (str); allowed: int"),
        (4, "mine.py:4: what Mine.route returned is wrong: found None; allowed: int"),
        (5, "mine.py:14: Mine.route raised TypeError: 'int' object is not iterable"),
        (6, "mine.py:4: what Mine.route returned is wrong: found -6; allowed: 0 and more"),
    ],
)
def test_a_mistake_during_a_run_is_the_users(
    folder: Path, route: Callable[[object], int], facts: int, message: str
) -> None:
    with pytest.raises(RunFailed) as failed:
        route(facts)
    assert str(failed.value).replace(f"{folder}/", "") == message


def test_what_is_right_passes(route: Callable[[object], int]) -> None:
    assert route(9) == 9
    with pytest.raises(LookupError, match="for the caller"):
        route(7)
    with pytest.raises(KeyboardInterrupt):
        route(8)


def test_an_error_out_of_what_is_ours_is_told_at_the_users_line(folder: Path) -> None:
    text = "from pddrt.units import parse_duration\n\nclass Mine:\n    def route(self, facts):\n"
    (folder / "mine.py").write_text(text + "        return parse_duration(facts)\n")
    mine = make(load("mine:Mine", KIND, METHODS, folder))
    with pytest.raises(RunFailed, match=r"mine\.py:5: Mine\.route raised ValueError: found 3, a"):
        guarded(mine.route, int)(3)


def test_an_answer_that_has_to_be_awaited_is_none(folder: Path) -> None:
    (folder / "mine.py").write_text(RUNS)
    mine = make(load("mine:Mine", KIND, METHODS, folder))
    with pytest.raises(RunFailed, match=r"mine\.py:20: .*found a coroutine; allowed: int or None"):
        guarded(mine.late, (int, type(None)))(1)
