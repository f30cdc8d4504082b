"""What the documents say is so: their commands run, their links lead somewhere.

Every line in a fenced block of README.md and docs/, and in the comments that scenarios begin with,
that calls `pddrt` or one of `scripts/` is run as it stands, on less work: `shorter` says what is
taken off it. Commands that serve until they are stopped, or that are themselves a test of minutes,
are parsed to the last option instead, and are run by the test that `ELSEWHERE` names.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from pddrt import cli, document

from .recordings import handed_over

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))

ELSEWHERE: dict[str, str] = {
    "scripts/demo": "a set-up and scenarios/quickstart.yaml, whose commands are below",
    "scripts/test": "this",
    "scripts/check": "ruff, mypy and tests/test_tree.py",
    "scripts/setup": "scripts/test calls it",
    "scripts/swarm": "tests/test_swarm.py",
    "scripts/mutants": "tests/test_swarm.py",
    "scripts/pictures": "tests/test_story.py",
    "scripts/reference": "tests/test_reference.py",
    "scripts/bench": "tests/test_benchmarks.py",
    "pddrt netem proxy": "tests/test_proxy.py",
    "pddrt netem check": "tests/test_check.py",
    "pddrt watch": "tests/test_dashboard_terminal.py",
    "pddrt bench handoff": "tests/test_bench.py",
    "pddrt calibrate": "tests/test_profiles.py",
    "pddrt model pull": "tests/test_models.py",
}
"""Commands that are not run here, and what runs them."""


class Command(NamedTuple):
    where: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[Command]:
    for page in PAGES:
        for _, block in blocks(page.read_text(encoding="utf-8")):
            yield from lines_of(page.relative_to(ROOT), block)
    for file in SCENARIOS:
        head = re.match(r"(?:#.*\n|\n)*", file.read_text(encoding="utf-8"))
        assert head is not None
        yield from lines_of(
            file.relative_to(ROOT), re.sub(r"^# ?", "", head[0], flags=re.MULTILINE)
        )


def lines_of(where: Path, block: str) -> Iterator[Command]:
    variables: dict[str, str] = {}
    for line in block.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if set_here := re.fullmatch(r"(\w+)=(\S+)", line):
            variables[set_here[1]] = set_here[2]
        if not re.match(r"(?:\.venv/bin/)?pddrt |scripts/\w+", line):
            continue
        line = re.sub(r"\$\(cat ([\w./]+)\)", "the file's text", line)
        line = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), line)
        words = shlex.split(line, comments=True)
        words = list(takewhile(lambda word: word not in ("|", "&") and word[0] != ">", words))
        words[0] = words[0].removeprefix(".venv/bin/")
        yield Command(str(where), tuple(words))


def elsewhere(command: Command) -> str | None:
    for n in (3, 2, 1):
        if found := ELSEWHERE.get(" ".join(command.words[:n])):
            return found
    return None


ALL = list(dict.fromkeys(commands()))
HERE = list({c.words: c for c in ALL if not elsewhere(c) and "[" not in c.text}.values())


# -- each is one that there is ---------------------------------------------------------------------


@pytest.mark.parametrize("command", ALL, ids=lambda c: f"{c.where}: {c.text}"[:120])
def test_a_command_is_one_that_there_is(command: Command) -> None:
    if command.words[0].startswith("scripts/"):
        assert (ROOT / command.words[0]).is_file()
        return
    parsed = typer.main.get_command(cli.app)
    context = parsed.make_context("pddrt", [], resilient_parsing=True)
    words = list(command.words[1:])
    while hasattr(parsed, "get_command"):
        name = words.pop(0)
        inner = parsed.get_command(context, name)
        assert inner is not None, f"there is no command {name}"
        parsed, context = (
            inner,
            inner.make_context(name, [], parent=context, resilient_parsing=True),
        )
    known = {option for p in parsed.params for option in (*p.opts, *p.secondary_opts)}
    given = {word.split("=")[0].strip("[]") for word in words if word.strip("[").startswith("-")}
    assert given - {"-"} <= known | {"--help"}


@pytest.mark.parametrize("where", [c for c in ELSEWHERE.values() if c.startswith("tests/")])
def test_what_is_run_elsewhere_is(where: str) -> None:
    assert (ROOT / where).is_file()


# -- and runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, for the commands that open one."""
    return handed_over(tmp_path_factory.mktemp("recorded") / "run")


STEPS = "{prefill_tokens_per_s: 5000, decode_step: 5 ms}"


def shorter(words: list[str]) -> list[str]:
    """The same command with less to do: fewer requests that come faster, shorter answers, and for a
    model that has to be fetched the tiny one."""
    if words[1] not in ("run", "compare", "sweep"):
        return words
    scenario = document.read(ROOT / words[2]).data
    workload: dict[str, Any] = scenario["workload"]
    given = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--set", "--vary")]
    less: dict[str, object] = {"workload.output_tokens": min(workload["output_tokens"], 40)}
    if workload["kind"] == "sessions":
        less |= {"workload.sessions": 3, "workload.rate": "20/s"}
        turns = workload.get("turns", 1)
        if (turns if isinstance(turns, int) else turns["max"]) > 2:
            less["workload.turns"] = 2
    else:
        less["workload.requests"] = 6
    if scenario.get("model", "smollm2-135m") == "smollm2-135m":
        less |= {"model": "tiny", "workload.prompts": "random"}
        less |= {"workload.prompt_tokens": 60, "workload.short.prompt_tokens": 20}
        for name, instance in scenario["instances"].items():
            if str(instance.get("step_time")).startswith("measured:"):  # of another model
                less[f"instances.{name}.step_time"] = STEPS
    if words[1] == "sweep":
        words = [*words, "--out", "swept"]
    for path, value in less.items():
        if not any(spec.partition("=")[0] == path for spec in given):
            words = [*words, "--set", f"{path}={value}"]
    return words


@pytest.mark.parametrize("command", HERE, ids=lambda c: f"{c.where}: {c.text}"[:120])
def test_a_command_runs(
    command: Command, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    profile = (ROOT / "scenarios/profiles/smollm2-135m-bf16-1.json").read_text()
    (tmp_path / "scenarios/mine.json").write_text(profile.replace("smollm2-135m", "tiny"))
    shutil.copytree(recorded, tmp_path / "runs/FOLDER")
    shutil.copytree(recorded, tmp_path / "runs/tour")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    words = shorter(list(command.words))
    monkeypatch.setattr(sys, "argv", words)
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    assert code in (0, None)


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"https?:", target):
            assert (page.parent / target).exists(), f"{page.name} speaks of {target}"
    for name in re.findall(r"`((?:docs|scenarios|scripts|tests)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} speaks of {name}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\((?:docs/)?([\w-]+\.md)", "".join(p.read_text() for p in PAGES)))
    assert {page.name for page in PAGES if page.name != "README.md"} <= linked
