"""A recorded run read again: the table, the story of a request, and folders that are no run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pddrt import postmortem
from pddrt.errors import BadInput
from pddrt.policy.handoff import CatchUp, Overlap
from pddrt.summary import request_json
from pddrt.trace import dumps, to_line

from .cluster import Cluster, Played, many, one
from .test_handoff import Wavering, paced


def record(folder: Path, played: Played) -> Path:
    """Writes what a run writes, of a run in memory."""
    folder.mkdir()
    requests = [dumps(request_json(r, None, None)) for r in played.records]
    (folder / "requests.jsonl").write_text("\n".join(requests) + "\n")
    (folder / "events.jsonl").write_text("".join(to_line(e) + "\n" for e in played.trace.events))
    (folder / "summary.json").write_text('{"name":"case","seed":1,"clock":"virtual"}')
    return folder


def shown(folder: Path, request: str | None = None, width: int = 140) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    run = postmortem.read(folder)
    if request is None:
        postmortem.table(console, run)
    else:
        postmortem.story(console, run, request)
    return out.getvalue()


def test_the_table_has_a_line_for_each_request(tmp_path: Path) -> None:
    text = shown(record(tmp_path / "run", Cluster().play(many(3, 150, 80, every=20_000_000))))
    lines = text.splitlines()
    assert lines[0] == "case  seed 1  clock virtual  3 requests"
    assert [line.split()[0] for line in lines[2:]] == ["s0.0", "s1.0", "s2.0"]


def test_the_story_tells_the_handoff_in_order(tmp_path: Path) -> None:
    text = shown(record(tmp_path / "run", Cluster().play([one("p" * 200, 120)])), "s0.0")
    told = [
        "routed P-RLD-MD",
        "p0       starts the prompt",
        "p0       hands KV [0, 200) to rld0",
        "rld0     holds the KV of all 200 tokens",
        "lets the first token go",
        "rld0     makes",
        "md0      holds the KV of all 200 tokens",
        "rld0     learns that md0 is ready",
        "asks policy one-shot, md0 lacks",
        "to md0 and is done with it: one-shot",
        "md0      extends over",
        "md0      makes",
        "client   end: length",
    ]
    at = [text.find(part) for part in told]
    assert -1 not in at, told[at.index(-1)]
    assert at == sorted(at)


def test_the_story_tells_catch_up_round_by_round_and_overlap_as_one(tmp_path: Path) -> None:
    text = shown(
        record(tmp_path / "c", paced(CatchUp(6, 8, 9)).play([one("p" * 200, 160)])), "s0.0"
    )
    assert "handoff catch-up: 68 ids in 9 round(s); the relay stopped: within the threshold" in text
    assert "main lacked 38, 34, 30, 26, 21, 17, 13, 8, 5 ids (nobody knew how far" in text
    assert text.count("sends 8 ids [2") == 7
    assert text.count("md0      extends over 8 ids of a piece") == 7
    assert text.count("learns that main has caught up to") == 8
    both = paced(Overlap(6, 8, 9), main_engine=Wavering).play([one("p" * 200, 160)])
    text = shown(record(tmp_path / "o", both), "s0.0")
    for part in (
        "handoff overlap: ",
        "asks policy overlap, md0 lacks 38 ids: follow",
        "gateway  lets main follow: ",
        "of its own, extends over ",
        "rld0     is done with it: the main decoder is first",
    ):
        assert part in text, part
    assert text.count("lets main follow") == 1


def test_series_are_told_once_and_times_never_run_backwards(tmp_path: Path) -> None:
    text = shown(record(tmp_path / "run", Cluster().play([one("p" * 200, 120)])), "s0.0")
    table = text[text.index("after") :].splitlines()[1:]
    times = [float(line.split()[0]) for line in table if line.split() and "." in line.split()[0]]
    assert times == sorted(times)
    assert sum("gets" in line and "of R" in line for line in table) == 1
    assert len(table) < 40, "120 tokens and many pieces of KV are a few lines"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_terminal(tmp_path: Path, width: int) -> None:
    text = shown(record(tmp_path / "run", Cluster().play([one("p" * 200, 120)])), "s0.0", width)
    table = text[text.index("after") :].splitlines()
    assert all(len(line) <= width for line in table)


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        postmortem.read(tmp_path)
    folder = record(tmp_path / "run", Cluster().play([one("p" * 50, 10)]))
    with pytest.raises(BadInput, match=r"no request 'x'; there are s0\.0"):
        shown(folder, "x")
    with open(folder / "events.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(BadInput, match=r"events\.jsonl:\d+: not JSON"):
        postmortem.read(folder)
