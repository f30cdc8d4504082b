"""Sweeps: a grid that goes on where it was, whatever stopped it; one scenario with many seeds."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pddrt
from pddrt.comparing.assertions import paths_in
from pddrt.comparing.repeats import Repeats
from pddrt.errors import BadInput, Interrupted, RunFailed
from pddrt.sweeping import page as sweep_page
from pddrt.sweeping import show as sweep_show
from pddrt.sweeping.cells import code, keys
from pddrt.sweeping.table import (
    BY_NAMES,
    BY_RUNS,
    OPEN,
    Sweep,
    Swept,
    _no_metric,
    settings,
)

from .commands import Call, Done, called
from .recordings import SMALL

SCENARIO = (
    SMALL
    + """\
pipeline: {policy: pdd, relay_above: 20 ms}
workload: {kind: sessions, sessions: 2, turns: 1, rate: 4/s, output_tokens: 6, prompts: random,
           prompt_tokens: 100}
"""
)
Json = dict[str, Any]
RATES = "links.wan.rate=(8,32) Mbit/s"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SCENARIO)
    return "small.yaml"


def made(small: str, *vary: str, policies: str | None = None, **options: Any) -> Sweep:
    overrides = options.pop("overrides", [])
    axes, sound, _ = settings(small, overrides, policies=policies, vary=vary)
    return Sweep(axes, sound, out=Path("here"), **options)


def swept(small: str, *vary: str, **options: Any) -> Json:
    return made(small, *vary, **options).execute().table


def states(table: Json) -> list[str]:
    return [cell["state"] for cell in table["cells"]]


# -- the grid --------------------------------------------------------------------------------------


def test_every_value_runs_with_every_other(small: str) -> None:
    table = swept(small, RATES, policies="pdd,naive", metrics=["ttft_s.p90", "links.wan.kv_bytes"])
    assert [(c["changes"]["pipeline.policy"], c["changes"]["links.wan.rate"], c["seed"])
            for c in table["cells"]] == [
        ("pdd", "8 Mbit/s", 3), ("pdd", "32 Mbit/s", 3), ("naive", "8 Mbit/s", 3),
        ("naive", "32 Mbit/s", 3),
    ]  # fmt: skip
    assert states(table) == ["finished"] * 4
    for cell in table["cells"]:
        folder = Path("here", cell["folder"])
        summary = json.loads((folder / "summary.json").read_text())
        assert cell["metrics"] == {
            "ttft_s.p90": summary["ttft_s"]["p90"],
            "links.wan.kv_bytes": summary["links"]["wan"]["kv_bytes"],
        }
        assert {path.name for path in folder.iterdir()} == {
            "scenario.yaml", "summary.json", "cell.json",
        }  # fmt: skip
    slow, fast = table["cells"][2]["metrics"], table["cells"][3]["metrics"]
    assert slow["ttft_s.p90"] > fast["ttft_s.p90"], "naive waits for the whole transfer"
    with Path("here", "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["links.wan.rate"] for row in rows] == ["8 Mbit/s", "32 Mbit/s"] * 2
    assert [float(row["ttft_s.p90"]) for row in rows] == [
        cell["metrics"]["ttft_s.p90"] for cell in table["cells"]
    ]
    assert json.loads(Path("here", "sweep.json").read_text()) == table


def test_points_are_means_over_seeds(small: str) -> None:
    table = swept(small, "links.wan.delay=1 ms", repeat=3, metrics=["e2e_s.mean"])
    assert [cell["seed"] for cell in table["cells"]] == [3, 4, 5]
    (point,) = table["points"]
    found, of = point["metrics"]["e2e_s.mean"], [c["metrics"]["e2e_s.mean"] for c in table["cells"]]
    assert found["n"] == 3
    assert found["mean"] == pytest.approx(sum(of) / 3)
    assert found["low"] < found["min"] == min(of) < found["max"] == max(of) < found["high"]


# -- it goes on ------------------------------------------------------------------------------------


def test_the_same_again_keeps_all(small: str) -> None:
    first = swept(small, RATES)
    again = swept(small, RATES)
    assert states(again) == ["kept", "kept"]
    for before, after in zip(first["cells"], again["cells"], strict=True):
        assert before["metrics"] == after["metrics"] != {}
    other = swept(small, "links.wan.rate=32 Mbit/s,80 Mbit/s")
    assert states(other) == ["kept", "finished"], "another grid keeps what both have"
    assert states(swept(small, RATES, fresh=True)) == ["finished", "finished"]


def test_so_many_new_cells_and_no_more(small: str) -> None:
    table = swept(small, "links.wan.delay=(1,2,3) ms", max_runs=1)
    assert states(table) == ["finished", "waiting", "waiting"]
    assert table["points"][1]["metrics"]["ttft_s.p50"]["mean"] is None
    assert states(swept(small, "links.wan.delay=(1,2,3) ms", max_runs=1)) == [
        "kept", "finished", "waiting",
    ]  # fmt: skip


def test_a_cell_that_was_cut_off_runs_again(small: str) -> None:
    table = swept(small, RATES)
    first, second = (Path("here", cell["folder"]) for cell in table["cells"])
    first.rename(first.with_name(f"{first.name}.part"))
    (second / "cell.json").write_text('{"state": "fin')
    assert states(swept(small, RATES)) == ["finished", "finished"]
    assert not list(Path("here", "cells").glob("*.part"))


def test_more_is_kept_where_it_is_asked_for(small: str) -> None:
    swept(small, RATES)
    table = swept(small, RATES, keep="all")
    assert states(table) == ["finished", "finished"], "their events had not been kept"
    assert Path("here", table["cells"][0]["folder"], "events.jsonl").exists()
    assert states(swept(small, RATES, keep="requests")) == ["kept", "kept"]


POLICY = """\
class Mine:
    pipelines = ("P-RLD-MD", "P-MD")
    def route(self, facts):
        return "{pipeline}"
"""


def test_a_cell_is_all_that_its_numbers_follow_from(small: str) -> None:
    def key(*overrides: str) -> str:
        _, (setting,), _ = settings("small.yaml", overrides, vary=["dtype=float64"])
        return keys(setting, [3])[0]

    first = key()
    assert key() == first
    assert key("links.wan.delay=11 ms") != first
    _, (setting,), _ = settings("small.yaml", vary=["dtype=float64"])
    assert len(set(keys(setting, range(3, 9)))) == 6
    assert keys(setting, [3]) == [first]
    Path("mine.py").write_text(POLICY.format(pipeline="P-MD"))
    mine = key("pipeline={policy: 'mine:Mine'}")
    Path("mine.py").write_text(POLICY.format(pipeline="P-RLD-MD"))
    assert key("pipeline={policy: 'mine:Mine'}") != mine, "the user's own code counts"
    Path("some.jsonl").write_text("1")
    traced = "workload={kind: trace, format: mooncake, path: some.jsonl}"
    before = key(traced)
    Path("some.jsonl").write_text("2")
    assert key(traced) != before, "so does a trace's content"


def test_what_only_shows_results_is_no_part_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = Path.read_bytes, []

    def reading(self: Path) -> bytes:
        seen.append(self.name)
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", reading)
    code.cache_clear()
    assert code()
    assert {"run.py", "simloop.py", "protocol.py", "link.py", "torch.py"} <= set(seen)
    assert not {"cli.py", "show.py", "report.py", "sweep_page.py"} & set(seen)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_cell_that_fails_does_not_stop_the_others(small: str) -> None:
    vary = ["deadline=60 ms,10 s", "workload.prompt_tokens=100,20000"]
    result = made(small, *vary, overrides=["links.wan.rate=1 Mbit/s"], policies="naive").execute()
    cells = result.table["cells"]
    assert [cell["state"] for cell in cells] == ["failed", "failed", "finished", "failed"]
    assert "requests did not finish" in cells[0]["failure"]
    assert "the model's context of 4096 at most" in cells[3]["failure"]
    with pytest.raises(RunFailed) as raised:
        result.raise_for_status()
    assert str(raised.value).count("\n") == 2, "a line each"
    assert str(raised.value).startswith("naive deadline=60 ms prompt_tokens=100 seed=3: ")
    again = made(small, *vary, overrides=["links.wan.rate=1 Mbit/s"], policies="naive")
    assert [c.state for c in again.cells] == ["waiting"] * 4
    assert states(again.execute().table) == ["failed", "failed", "kept", "failed"]


def test_a_cell_whose_worker_dies_fails_alone(small: str) -> None:
    Path("mine.py").write_text(POLICY.format(pipeline="P-MD").replace(
        "        return", "        import os; os.abort()\n        return"))  # fmt: skip
    table = swept(small, policies="'mine:Mine',naive", jobs=1)
    assert states(table) == ["failed", "finished"]
    assert table["cells"][0]["failure"].startswith("its worker died (signal SIGABRT)")


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_saves_what_has_ended(small: str, jobs: int) -> None:
    vary = "links.wan.delay=(1,2,3,4,5,6) ms"
    sweep, told = made(small, vary, jobs=jobs), list[str]()

    def press(stage: str, share: float | None) -> None:
        told.append(stage)
        if stage.startswith("2/6") and not any(t.startswith("2/6") for t in told[:-1]):
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = sweep.execute(press)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(Interrupted, match="goes on from there"):
        result.raise_for_status()
    ended = states(result.table).count("finished")
    assert 2 <= ended <= 2 + jobs
    assert result.table["interrupted"] is True
    assert not list(Path("here", "cells").glob("*.part"))
    assert states(swept(small, vary)).count("kept") == ended


def test_jobs_do_not_change_a_number(small: str) -> None:
    one = swept(small, RATES, repeat=2)
    two = swept(small, RATES, repeat=2, jobs=2, fresh=True)
    assert [c["metrics"] for c in one["cells"]] == [c["metrics"] for c in two["cells"]]


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def call(small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: str) -> Done:
        return called(monkeypatch, capsys, *args)

    return call


def test_the_command_shows_a_row_for_each_setting(call: Call) -> None:
    done = call("sweep", "small.yaml", "--policies", "pdd,naive", "--vary", RATES)
    assert done.code == 0
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines[0] == "small: 4 cells: 4 run"
    head = re.split("  +", lines[2])
    assert head[:4] == ["policy", "rate", "ttft_s.p50", "ttft_s.p90"]
    assert [re.split("  +", line)[:2] for line in lines[3:7]] == [
        ["pdd", "8 Mbit/s"], ["pdd", "32 Mbit/s"], ["naive", "8 Mbit/s"], ["naive", "32 Mbit/s"],
    ]  # fmt: skip
    assert lines[-1] == "saved in runs/sweep-small; to look at: runs/sweep-small/sweep.html"
    told = done.err.splitlines()
    assert told[0] == "0/4 cells"
    assert re.fullmatch(r"1/4 cells, \d+ s left: pdd rate=8 Mbit/s seed=3", told[1])
    assert told[-1] == "4/4 cells: naive rate=32 Mbit/s seed=3"
    again = call("sweep", "small.yaml", "--policies", "pdd,naive", "--vary", RATES, "--json")
    assert json.loads(again.out) == json.loads(Path("runs/sweep-small/sweep.json").read_text())
    assert again.err == "0/0 cells, 4 were here\n"


BAD: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "found nothing to sweep; allowed: at least one --vary PATH=V1,V2"),
    "no such field": (["--vary", "links.wan.rat=1,2"], "found an unknown field, did you mean 'rat"),
    "in some": (
        ["--vary", "links.wan.rate=8 Mbit/s,x"], "links.wan.rate: found 'x'; allowed: a rate such"
    ),
    "jobs": (["--vary", RATES, "--jobs", "0"], "--jobs: found 0; allowed: 1 to 256"),
    "jobs of the wall": (
        ["--vary", "workload.output_tokens=1,2", "--set", "clock=wall", "--jobs", "2"],
        "--jobs: found more than 1 under the wall clock",
    ),
    "repeat": (["--vary", RATES, "--repeat", "0"], "--repeat: found 0; allowed: 1 to 1,000"),
    "too many": (
        ["--vary", "seed=1..200:1", "--vary", "workload.output_tokens=1..60:1"],
        "found 12,000 settings in all; allowed: 10,000 at most",
    ),
    "not our folder": (["--vary", RATES, "--out", "."], "found something that is not a sweep"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_runs(call: Call, what: str) -> None:
    args, message = BAD[what]
    done = call("sweep", "small.yaml", *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert {path.name for path in Path.cwd().iterdir()} == {"small.yaml"}


def test_settings_that_are_none_can_be_left_out(call: Call) -> None:
    args = ("--vary", "links.wan.rate=8 Mbit/s,x", "--skip-invalid", "--out", "here")
    done = call("sweep", "small.yaml", *args)
    assert done.code == 0
    assert "left out: rate=x: " in done.out
    assert len(json.loads(Path("here", "sweep.json").read_text())["cells"]) == 1


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("tft_s.p90", "--metric tft_s.p90: no summary has it; nearest: ttft_s.p90"),
        ("ttft_s.p95", "--metric ttft_s.p95: no summary has it; nearest: ttft_s.p9"),
        ("ttft_s", "--metric ttft_s: is no single number; allowed: ttft_s.mean, ttft_s.p50"),
        ("goodput_rps.p90", "--metric goodput_rps.p90: no summary has it; nearest: goodput_rps"),
        ("links.wam.bytes", "--metric links.wam.bytes: no summary has it; known: links.rdma, "),
    ],
)
def test_a_number_that_no_summary_can_have_is_refused_before_anything_runs(
    call: Call, metric: str, message: str
) -> None:
    done = call("sweep", "small.yaml", "--vary", RATES, "--metric", metric, "--out", "here")
    assert done.code == 2
    assert message in done.err
    assert not Path("here").exists()


def test_all_that_a_summary_has_can_be_asked_for(small: str) -> None:
    done = pddrt.run(small)
    _, sound, _ = settings(small, vary=[RATES])
    assert [p for p in paths_in(done.summary) if _no_metric(p, sound)] == []
    tops = {*BY_RUNS, *BY_NAMES, *OPEN, *(p.split(".")[0] for p in paths_in(done.summary))}
    assert set(done.summary) <= tops


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("links.wan.byts", "--metric links.wan.byts: no summary has it; nearest: links.wan.bytes"),
        ("router.transfer", "--metric router.transfer: no summary has it; nearest: "),
    ],
)
def test_a_number_that_no_summary_has(call: Call, metric: str, message: str) -> None:
    done = call("sweep", "small.yaml", "--vary", RATES, "--metric", metric, "--out", "here")
    assert done.code == 2
    assert message in done.err
    assert "kept" in states(swept("small.yaml", RATES)), "what was run is not lost"


def test_a_cell_names_its_seed_once(small: str) -> None:
    assert [cell.name for cell in made(small, "seed=4,5").cells] == ["seed=4", "seed=5"]
    both = [cell.name for cell in made(small, "seed=4,9", repeat=2).cells]
    assert both == ["seed=4", "seed=4 seed=5", "seed=9", "seed=9 seed=10"]


# -- what it looks like ----------------------------------------------------------------------------


def drawn(small: str, *vary: str, **options: Any) -> str:
    result = made(small, *vary, **options).execute()
    return sweep_page.write(result).read_text(encoding="utf-8")


def test_the_page_has_lines_maps_and_a_table(small: str) -> None:
    page = drawn(small, RATES, "links.wan.delay=(1,9) ms", policies="pdd,naive",
                 metrics=["ttft_s.p90", "goodput_rps"])  # fmt: skip
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(?!#)", page) == []
    for metric in ("ttft_s.p90", "goodput_rps"):
        section = page.split(f">{metric}</h2>", 1)[1].split("<h2", 1)[0]
        captions = re.findall("<figcaption>([^<]+)", section)
        assert captions == [
            "wan.delay=1 ms", "wan.delay=9 ms", f"pdd: {metric}", f"naive: {metric}",
        ]  # fmt: skip
        assert section.count("<circle") == 8, "a point a setting"
        assert section.count('<rect class="box c-relay_decode"') == 8
    assert page.count("<tr>") == 9


def table_of(values: Sequence[str], metric: str = "m_s", **cell: Any) -> Json:
    """A table of a sweep over one field, on paper: the numbers are 1, 2, ..."""
    told = [{"n": 1, "mean": n, "low": None, "high": None, "min": n, "max": n}
            for n in range(1, len(values) + 1)]  # fmt: skip
    points = [{"name": f"x={v}", "changes": {"x": v}, "seeds": 1, "failed": int(bool(cell)),
               "metrics": {metric: t}} for v, t in zip(values, told, strict=True)]  # fmt: skip
    cells = [{"name": f"x={v} <b>", "changes": {"x": v}, "seed": 1, "state": "finished",
              "failure": "", "folder": "", "metrics": {metric: 1}, **cell}
             for v in values]  # fmt: skip
    return {"name": "n", "axes": [{"path": "x", "values": list(values)}], "metrics": [metric],
            "interrupted": False, "left_out": {}, "points": points, "cells": cells}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (["8 Mbit/s", "16 Mbit/s", "24 Mbit/s"], "even"),
        (["8 Mbit/s", "80 Mbit/s", "800 Mbit/s"], "even, logarithmic"),
        (["one-shot", "catch-up", "overlap"], "even"),
        (["1 ms", "2 ms", "11 ms"], "uneven"),
    ],
)
def test_axes_are_drawn_by_what_they_are(tmp_path: Path, values: list[str], places: str) -> None:
    page = sweep_page.write(Swept(tmp_path, table_of(values))).read_text(encoding="utf-8")
    at = [float(x) for x in re.findall(r'<circle class="box s0" cx="([\d.]+)"', page)]
    assert at == sorted(at)
    even = at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2)
    assert even is places.startswith("even")
    assert ("logarithmic" in page) is ("logarithmic" in places)
    heights = [
        float(y) for y in re.findall(r'<circle class="box s0" cx="[\d.]+" cy="([\d.]+)', page)
    ]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert f">{values[0]}</text>" in page


def test_a_failed_cell_is_told_on_the_page_and_hollow(tmp_path: Path) -> None:
    table = table_of(["1"], state="failed", failure="<script>")
    page = sweep_page.write(Swept(tmp_path, table)).read_text(encoding="utf-8")
    assert "<script" not in page
    assert '<circle class="line s0"' in page
    assert "x=1 &lt;b&gt;: &lt;script&gt;" in page


@pytest.mark.parametrize(("width", "blocks"), [(200, 1), (40, 2), (20, 3)])
def test_the_table_fits(width: int, blocks: int) -> None:
    table = table_of(["8 Mbit/s", "16 Mbit/s"])
    for name in ("links.wan.kv_bytes", "goodput_rps"):
        table["metrics"].append(name)
        for point in table["points"]:
            point["metrics"][name] = point["metrics"]["m_s"]
    console = Console(width=width, no_color=True)
    with console.capture() as shown:
        for part in sweep_show.results(table, width):
            console.print(part)
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("x ") for line in lines) == blocks
    assert "…" not in shown.get()


@pytest.mark.parametrize(
    ("metric", "number", "shown"),
    [
        ("ttft_s.p90", 0.0125, "12.5 ms"), ("x_s", -0.001, "-1 ms"), ("goodput_rps", 2.5, "2.5/s"),
        ("slo_attainment", 0.5, "50.0 %"), ("links.wan.kv_bytes", 12_345_678, "1.235e+07"),
        ("handoffs.ids", 1234, "1,234"),
    ],
)  # fmt: skip
def test_numbers_are_shown_by_what_they_are(metric: str, number: float, shown: str) -> None:
    assert sweep_show.value(metric, number) == shown


# -- one scenario, many seeds ----------------------------------------------------------------------


def test_run_repeat_tells_every_number_over_its_seeds(call: Call) -> None:
    done = call("run", "small.yaml", "--repeat", "3", "--seed", "5", "--out", "here")
    assert done.code == 0
    table = json.loads(Path("here", "repeat.json").read_text())
    assert table["seeds"] == [5, 6, 7]
    summaries = [
        json.loads(Path("here", f"seed-{n}", "summary.json").read_text()) for n in (5, 6, 7)
    ]
    assert [run["digest"] for run in table["runs"]] == [s["digest"] for s in summaries]
    for path in (("ttft_s", "p90"), ("tokens", "prompt"), ("links", "wan", "directions", "a>b",
                                                           "kv_bytes")):  # fmt: skip
        values, found = summaries, table["numbers"]
        for key in path:
            values, found = [v[key] for v in values], found[key]
        assert found["n"] == 3
        assert found["mean"] == pytest.approx(sum(values) / 3)
        assert (found["min"], found["max"]) == (min(values), max(values))
        assert found["low"] <= found["mean"] <= found["high"]
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines[0] == "small: 3 seeds, 5 to 7, virtual clock"
    assert re.split("  +", lines[2].strip()) == ["mean", "95 % from", "to", "smallest", "largest"]
    assert any(re.fullmatch(r"TTFT p90( +\S+ m?s){5}", line) for line in lines)
    assert done.err == "1/3 seed 5\n2/3 seed 6\n3/3 seed 7\n"


def test_run_repeat_as_json(call: Call) -> None:
    done = call("run", "small.yaml", "--repeat", "2", "--out", "here", "--json")
    assert done.out == Path("here", "repeat.json").read_text()


def test_a_seed_that_fails_does_not_stop_the_others(call: Call) -> None:
    done = call("run", "small.yaml", "--repeat", "2", "--out", "here", "--set", "deadline=20 ms")
    assert done.code == 1
    failures = [line for line in done.err.splitlines() if "did not finish" in line]
    assert [line.split(":")[1].strip() for line in failures] == ["seed 3", "seed 4"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--repeat", "0"], "--repeat: found 0; allowed: 1 to 1,000 seeds"),
        (["--repeat", "2", "--set", "seed=x"], "seed: found 'x'"),
        (["--repeat", "2", "--out", "."], "found something that is not a set of repeated runs"),
    ],
)
def test_run_repeat_refuses_bad_input(call: Call, args: list[str], message: str) -> None:
    done = call("run", "small.yaml", *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_repeats_stop_gently(small: str) -> None:
    repeats = Repeats(small, repeat=3, out=Path("here"))
    repeats.prepare()

    def press(stage: str, share: float | None) -> None:
        if stage.startswith("2/3"):
            repeats.interrupt()

    result = repeats.execute(press)
    with pytest.raises(Interrupted):
        result.raise_for_status()
    assert [run["failure"] for run in result.table["runs"]] == ["", "interrupted"]
    assert result.table["interrupted"] is True


def test_a_grid_must_be_sound(small: str) -> None:
    with pytest.raises(BadInput, match="found nothing to sweep"):
        settings(small)
