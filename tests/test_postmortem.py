"""The story of one request: what it says, in which order, and that it fits; what is broken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pddrt.errors import BadInput
from pddrt.inspection import anatomy, postmortem, recorded, telling
from pddrt.inspection.anatomy import Axis
from pddrt.inspection.recorded import Recorded
from pddrt.metrics import LEGS
from pddrt.policy.handoff import Adaptive, CatchUp, Overlap
from pddrt.summary import request_json
from pddrt.trace import Event, Trace, dumps, to_line
from pddrt.types import SECOND

from .cluster import Cluster, Played, one
from .recordings import copied, lines
from .recordings import paced as paced_run
from .test_handoff import Wavering, paced


def played(cluster: Cluster, prompt: int = 200, answer: int = 120) -> tuple[Played, list[Event]]:
    """What a cluster did with one request, and its events."""
    trace, events = Trace(), list[Event]()
    trace.listen(events.append)
    return cluster.play([one("p" * prompt, answer)], trace=trace), events


def record(folder: Path, of: tuple[Played, list[Event]], **more: object) -> Path:
    """Writes what a run writes, of a run in memory."""
    run, events = of
    folder.mkdir()
    rows = [dumps(request_json(r, None, None)) for r in run.records]
    (folder / "requests.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "events.jsonl").write_text("".join(to_line(e) + "\n" for e in events))
    about = {"schema": 1, "name": "case", "seed": 1, "clock": "virtual", **more}
    (folder / "summary.json").write_text(dumps(about))
    return folder


def shown(folder: Path, request: str = "s0.0", width: int = 140) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    scene = postmortem.scene_of(recorded.opened(folder), request)
    for part in postmortem.story(scene, width, False):
        console.print(part)
    return out.getvalue()


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paced_run(tmp_path_factory.mktemp("runs") / "rounds")


def test_the_story_tells_the_handoff_in_order(tmp_path: Path) -> None:
    text = shown(record(tmp_path / "run", played(Cluster())))
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
    text = shown(record(tmp_path / "c", played(paced(CatchUp(6, 8, 9)), answer=160)))
    assert "handoff catch-up: 68 ids in 9 round(s); the relay stopped: within the threshold" in text
    assert "main lacked 38, 34, 30, 26, 21, 17, 13, 8, 5 ids (nobody knew how far" in text
    assert text.count("sends 8 ids [2") == 7
    assert text.count("md0      extends over 8 ids of a piece") == 7
    assert text.count("learns that main has caught up to") == 8
    both = played(paced(Overlap(6, 8, 9), main_engine=Wavering), answer=160)
    text = shown(record(tmp_path / "o", both))
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
    text = shown(record(tmp_path / "run", played(Cluster())), width=300)
    table = text[text.index("after  where") :].splitlines()[1:]
    times = [float(line.split()[1]) for line in table if line.split()]
    assert times == sorted(times)
    assert sum("gets" in line and "of R" in line for line in table) == 1
    assert len(table) < 40, "120 tokens and many pieces of KV are a few lines"


@pytest.mark.parametrize("width", [60, 80, 160, 200])
def test_it_fits_the_terminal(tmp_path: Path, width: int, rounds: Path) -> None:
    for text in (
        shown(record(tmp_path / "run", played(Cluster())), width=width),
        shown(rounds, "s1.0", width),
    ):
        assert all(len(line) <= width for line in text.splitlines())


def test_every_kind_of_event_is_told_in_words(rounds: Path) -> None:
    text = shown(rounds, "s1.0")
    table = text[text.index("after  where") :]
    assert "{" not in table
    assert "of the 3,387 tokens are cached, at best: P 0, RLD 0, MD 0" in table
    assert "learns that 867 kB of KV took" in table
    for number, event in recorded.opened(rounds).walk():
        where, what = telling.tell(event)
        assert where, number
        assert "{" not in what, (number, what)


# -- taken apart -----------------------------------------------------------------------------------


def test_the_waterfall_has_every_leg_and_its_bars_lie_where_they_should(rounds: Path) -> None:
    run = recorded.opened(rounds)
    scene = postmortem.scene_of(run, "s0.0")  # P-MD: its KV is waited for
    drawn = [str(line) for line in anatomy.waterfall(scene, 100, anatomy.medians(run))]
    bars = {line[4:22].strip(): line.split("|")[1] for line in drawn[1 : 1 + len(LEGS)]}
    assert list(bars) == [anatomy.TITLES[leg] for leg in LEGS]
    assert {len(bar) for bar in bars.values()} == {49}
    legs = scene.row["ttft_legs"]
    for leg in ("prefill", "transfer"):
        share = bars[anatomy.TITLES[leg]].count(anatomy.LETTERS[leg]) / 49
        assert share == pytest.approx(legs[leg] / scene.row["ttft_s"], abs=1.5 / 49)
    assert bars["prefill"].rstrip().rindex("P") < bars["transfer"].index("T")
    (wire,) = [line for line in drawn if "KV to md0" in line]
    exposed = wire.split("|")[1]
    assert set(exposed.strip()) <= {"=", "-"}
    assert exposed.index("=") >= bars["transfer"].index("T")


def test_the_medians_are_those_of_all_requests(rounds: Path) -> None:
    found = anatomy.medians(recorded.opened(rounds))
    rows = [r["ttft_legs"]["prefill"] for r in lines(rounds)]
    assert found["prefill"] == round(sorted(rows)[2] * SECOND + sorted(rows)[3] * SECOND) // 2


def test_the_least_of_a_bar_is_a_mark_and_nothing_leaves_the_axis() -> None:
    axis = Axis(0, 1000, 10)
    assert axis.bar([(0, 1)], "P") == ".         "
    assert axis.bar([(250, 600)], "P") == "  PPPP    "
    assert axis.bar([(900, 5000), (-50, 90)], "-") == "-        -"
    assert axis.bar([(1000, 2000)], "P") == " " * 10


def test_rounds_say_what_each_side_knew(rounds: Path) -> None:
    """Against the events, read again by hand."""
    run = recorded.opened(rounds)
    turns = list(anatomy._turns(postmortem.scene_of(run, "s1.0")))
    sent = [e for e in lines(rounds, "events.jsonl")
            if e["event"] == "HandoffSent" and e["request"] == "s1.0"]  # fmt: skip
    flying = [int(t[4]) for t in turns if "ids in" in t[5] or "id in" in t[5]]
    assert flying == [e["end"] - e["start"] for e in sent]
    made, known, acked = (int(turns[-1][i]) for i in (1, 2, 3))
    assert made == known == sum(flying)
    assert acked == known - flying[-1], "the relay hears nothing of the last ids"
    assert "rld0 10 % full, 2 in its batch" in turns[1][5]


def test_a_full_relay_moves_the_threshold(tmp_path: Path) -> None:
    of = played(paced(Adaptive(20, 8, 9)), answer=160)
    folder = record(tmp_path / "run", of)
    run = recorded.opened(folder)
    run.recording.scenario = {
        "handoff": {"mode": "adaptive", "threshold": 20},
        "instances": {"rld0": {"max_batch": 4}},
    }
    (began,) = [t[5] for t in anatomy._turns(postmortem.scene_of(run, "s0.0")) if "asks" in t[5]]
    steps = [e for e in lines(folder, "events.jsonl")
             if e["event"] == "Step" and e["instance"] == "rld0"]  # fmt: skip
    full = next(s["pages_used"] for s in steps if s["sequences"] == 1) / 64
    assert f"threshold 20 becomes {20 / (1 - max(full, 0.25)):.0f}" in began


def test_other_pipelines_stand_beside_the_one_that_ran(rounds: Path) -> None:
    scene = postmortem.scene_of(recorded.opened(rounds), "s1.0")
    text = shown(rounds, "s1.0")
    assert [c.pipeline for c in scene.costs] == ["P-RLD-MD", "P-MD", "P-RLD", "P", "MD"]
    table = text[text.index("By way of other pipelines") :].splitlines()
    assert [line.split()[0] for line in table[2:7]] == [c.pipeline for c in scene.costs]
    assert "as it ran" in table[2]


def test_of_a_long_run_a_window_is_read(rounds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: postmortem.scene_of(recorded.opened(rounds), name) for name in ("s1.0", "s5.0")}
    legs = {name: scene.record for name, scene in whole.items()}
    monkeypatch.setattr(recorded, "WINDOW", 600)
    monkeypatch.setattr(recorded, "BEFORE", 150)
    for name, before in whole.items():
        scene = postmortem.scene_of(recorded.opened(rounds), name)
        window = scene.window
        assert not window.whole
        assert window.end - window.start <= 600
        assert len(window.events) <= 600 + len(scene.events)
        record, known = scene.record, legs[name]
        assert record is not None
        assert known is not None
        assert (record.legs, record.wan_kv_bytes) == (known.legs, known.wan_kv_bytes)
        assert {c.pipeline: c.ttft for c in scene.costs}["P"] == pytest.approx(
            {c.pipeline: c.ttft for c in before.costs}["P"], rel=0.01
        )
        told = shown(rounds, name)
        assert f"is known from events {window.start:,} to {window.end - 1:,}" in told
        assert "beside it" in told


# -- what is broken, and what is missing -----------------------------------------------------------


def test_a_violation_shows_the_events_that_led_to_it(tmp_path: Path) -> None:
    of = played(Cluster(), 50, 10)
    at = next(i for i, e in enumerate(of[1]) if type(e).__name__ == "PrefillEnded")
    led_to = [to_line(e) for e in of[1][at - 2 : at + 1]]
    found = {"checked": 9, "violations": ["a thing: s0.0", "another"], "led_to": led_to}
    folder = record(tmp_path / "run", of, invariants=found)
    first, second = postmortem.violations(recorded.opened(folder))
    assert [number for number, _ in first.events] == [at - 1, at, at + 1]
    assert not second.events
    text = shown(folder)
    assert "violated: a thing: s0.0" in text
    assert f"--until {at + 1} shows" in text
    assert "another" not in text, "it is not known whose"


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        recorded.opened(tmp_path)
    folder = record(tmp_path / "run", played(Cluster(), 50, 10))
    with pytest.raises(BadInput, match=r"no request 'x'; there are s0\.0"):
        shown(folder, "x")


@pytest.mark.parametrize("kept", [0, 1, 22, 60])
def test_a_folder_that_was_cut_off_anywhere_still_tells_its_story(
    tmp_path: Path, rounds: Path, kept: int
) -> None:
    events = (rounds / "events.jsonl").read_bytes()
    half = events[: len(events) * kept // 100]
    folder = copied(rounds, tmp_path / "cut", events=half, requests=None, summary=None)
    run: Recorded = recorded.opened(folder)
    assert any("requests.jsonl is not there" in what for what in run.missing)
    for name in list(run.unfinished)[-2:]:
        assert shown(folder, name).startswith(f"{name}  ")
        assert json.loads(dumps(postmortem.as_json(postmortem.scene_of(run, name))))["events"]
    assert len(run.unfinished) == len({json.loads(line)["request"] for line in half.splitlines(True)
        if line.endswith(b"\n") and b'"RequestSent"' in line})  # fmt: skip
