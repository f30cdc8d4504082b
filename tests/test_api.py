"""pddrt from Python: what is returned, what is raised, and where it can be called from."""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pddrt
from pddrt.errors import BadInput, CannotRun, Interrupted, RunFailed
from pddrt.scenario import parse
from pddrt.trace import TokensReceived
from tests.test_sweep import SCENARIO

ROOT = Path(__file__).parent.parent
Json = dict[str, Any]


# -- importing -------------------------------------------------------------------------------------

HEAVY = {"torch", "transformers", "pydantic", "numpy", "rich", "typer", "yaml", "asyncio"}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_it_loads_nothing() -> None:
    assert python(f"import sys, pddrt; print(sorted(set(sys.modules) & {HEAVY}))") == "[]"


def test_functions_are_functions_whatever_was_imported_before() -> None:
    """A module of the package has the name of one of its functions."""
    found = python(
        "import pddrt.run; from pddrt.run import Run; import pddrt\n"
        "print(*(type(f).__name__ for f in (pddrt.run, pddrt.compare, pddrt.sweep, pddrt.open)), "
        "Run.__module__, pddrt.Run.__module__, 'run' in dir(pddrt))"
    )
    assert found == "function function function function pddrt.run pddrt.results True"


def test_a_modelled_run_never_imports_torch(tmp_path: Path) -> None:
    code = f"import sys, pddrt; pddrt.run({SCENARIO!r}); print('torch' in sys.modules)"
    assert python(code) == "False"


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        pddrt.runs  # type: ignore[attr-defined]  # noqa: B018


# -- a run -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> pddrt.Run:
    return pddrt.run(
        SCENARIO, workload__turns=2, workload__prompt_tokens=150, workload__output_tokens=24
    )


def test_the_summary_is_that_of_the_file_by_key_and_by_attribute(run: pddrt.Run) -> None:
    saved = json.loads((run.folder / "summary.json").read_text())
    assert run.summary == saved
    assert run.summary.ttft_s.p90 == saved["ttft_s"]["p90"]
    assert run.summary.links.wan.directions["a>b"].bytes > 0
    with pytest.raises(AttributeError, match="found 'tft_s', did you mean 'ttft_s'"):
        run.summary.tft_s  # noqa: B018
    assert "ttft_s" in dir(run.summary)
    assert repr(run) == f"<pddrt.Run small: seed 3, 4 of 4 requests finished, {run.folder}>"


def test_requests_and_events_are_those_of_the_files(run: pddrt.Run) -> None:
    requests = [json.loads(line) for line in (run.folder / "requests.jsonl").open()]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").open()]
    assert run.requests_table("rows") == requests
    assert run.events_table(backend="rows") == events
    kinds = {event["event"] for event in events}
    for kind in kinds:
        assert run.events_table(kind, "rows") == [e for e in events if e["event"] == kind]
    assert run.request("s1.1") == requests[3]
    assert run.request("s0.0").ttft_legs.transfer == requests[0]["ttft_legs"]["transfer"]
    with pytest.raises(BadInput, match="no request 's9'"):
        run.request("s9")


def test_what_is_installed_is_what_a_table_is(run: pddrt.Run) -> None:
    installed = [name for name in ("pandas", "polars") if importlib.util.find_spec(name)]
    for name in ("pandas", "polars"):
        if name in installed:
            frame = run.requests_table(name)  # type: ignore[arg-type]
            assert list(frame["id"]) == [r["id"] for r in run.requests_table("rows")]
            assert {"ttft_legs.transfer", "handoff.ids"} <= set(frame.columns)
            assert "handoff" not in frame.columns
            assert len(run.events_table("KVSent", name)) == len(run.events_table("KVSent", "rows"))  # type: ignore[arg-type]
        else:
            with pytest.raises(CannotRun, match=f"{name} is not installed"):
                run.requests_table(name)  # type: ignore[arg-type]
    assert type(run.requests).__module__.split(".")[0] == (installed or ["builtins"])[0]
    with pytest.raises(BadInput, match="found 'panda', did you mean 'pandas'"):
        run.requests_table("panda")  # type: ignore[arg-type]


def test_a_run_is_opened_again_also_what_is_left_of_one(run: pddrt.Run, tmp_path: Path) -> None:
    saved = run.save(tmp_path / "kept")
    again = pddrt.open(saved)
    assert (again.summary, again.missing) == (run.summary, [])
    assert again.requests_table("rows") == run.requests_table("rows")
    with pytest.raises(BadInput, match="is there already"):
        run.save(saved)
    lines = (saved / "requests.jsonl").read_bytes()
    (saved / "requests.jsonl").write_bytes(lines[:-20])
    (saved / "events.jsonl").write_bytes((saved / "events.jsonl").read_bytes()[:5000])
    cut = pddrt.open(saved)
    assert len(cut.requests_table("rows")) == 3
    assert any("requests.jsonl is cut off" in text for text in cut.missing)
    assert 10 < len(cut.events_table(backend="rows")) < len(run.events_table(backend="rows"))
    with pytest.raises(BadInput):
        pddrt.open(tmp_path / "nowhere")


def test_a_report_is_written_beside_it(run: pddrt.Run) -> None:
    page = run.report()
    assert page == run.folder / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_temporary_folder_goes_with_its_result() -> None:
    made = pddrt.run(SCENARIO)
    folder = made.folder
    assert (folder / "summary.json").exists()
    del made
    gc.collect()
    assert not folder.exists()


def test_listeners_hear_every_event_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[Any] = []
    made = pddrt.run(SCENARIO, listen=heard.append, out=tmp_path / "here")
    assert made.folder == tmp_path / "here"
    assert len(heard) == len(made.events_table(backend="rows"))
    assert capfd.readouterr() == ("", "")
    pddrt.run(SCENARIO, quiet=False)
    out, err = capfd.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "running small")


# -- scenarios and fields --------------------------------------------------------------------------


def test_a_scenario_is_a_file_a_text_data_or_itself(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    given = (path, str(path), SCENARIO, yaml.safe_load(SCENARIO), parse(SCENARIO, "small.yaml"))
    assert len({pddrt.run(scenario).summary.digest for scenario in given}) == 1


def test_fields_may_be_written_in_many_ways() -> None:
    ways: list[tuple[Any, Json]] = [
        ({"links.wan.rate": "8 Mbit/s"}, {}),
        ({"wan.rate": "8 Mbit/s"}, {}),
        (None, {"links__wan__rate": "8 Mbit/s"}),
        (None, {"wan__rate": "8 Mbit/s"}),
        (None, {"links__wan": {"between": ["a", "b"], "rate": "8 Mbit/s", "delay": "10 ms"}}),
    ]
    made = [pddrt.run(SCENARIO, over, **fields) for over, fields in ways]
    scenarios = {(run.folder / "scenario.yaml").read_text() for run in made}
    assert len(scenarios) == 1
    assert "rate: 8 Mbit/s" in scenarios.pop()


def test_numbers_of_numpy_and_paths_are_taken(tmp_path: Path) -> None:
    import numpy as np

    made = pddrt.run(
        SCENARIO, workload__sessions=np.int64(1), sampling__temperature=np.float64(0.5)
    )
    assert made.scenario.workload.sessions == 1
    assert made.scenario.sampling.temperature == 0.5


BAD: list[tuple[Any, Json, str]] = [
    (SCENARIO, {"wan__rat": "1"}, "wan__rat: links.wan.rat: found an unknown field, did you mean"),
    (SCENARIO, {"seed_": 1}, "seed_: seed_: found an unknown field, did you mean 'seed'"),
    (SCENARIO, {"wan__rate": 5}, "links.wan.rate: found 5, a number without a unit"),
    (SCENARIO, {"wan__rate": object()}, "wan__rate: found object; allowed: what YAML can hold"),
    (SCENARIO.replace("md0:", "wan:"), {"wan__delay": "1 ms"}, "wan is a link and an instance"),
    ({"name": "x"}, {}, "scenario:1: instances: missing"),
    ({"name": 5, "instances": {}}, {}, "scenario: name: found 5"),
    ("nowhere.yaml", {}, "nowhere.yaml: cannot be read"),
    ("a: [1\n", {}, "scenario:"),
]


@pytest.mark.parametrize(("scenario", "fields", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_raised(scenario: Any, fields: Json, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        pddrt.run(scenario, **fields)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pddrt.run(None), "scenario: found None; allowed: a path, YAML as text"),
        (lambda: pddrt.run(0), "scenario: found 0 (int); allowed: a path"),
        (lambda: pddrt.run(SCENARIO, 5), "overrides: found 5 (int); allowed: a mapping"),
        (lambda: pddrt.run(SCENARIO, {5: 1}), "overrides: found a dict; allowed: a mapping whose"),
        (lambda: pddrt.run(SCENARIO, prompt=5), "prompt: found 5 (int); allowed: a text"),
        (lambda: pddrt.run(SCENARIO, listen=3), "listen: found 3 (int); allowed: a function"),
        (lambda: pddrt.run(SCENARIO, seed="3"), "seed: found '3' (str); allowed: a whole number"),
        (lambda: pddrt.run(SCENARIO, out=3), "out: found 3 (int); allowed: a path"),
        (lambda: pddrt.open(7), "folder: found 7 (int); allowed: a path"),
        (lambda: pddrt.compare(SCENARIO, policies="pdd,naive", repeat=0), "repeat: found 0; allow"),
        (lambda: pddrt.compare(SCENARIO, vary={"wan.rate": "1..2"}), "vary '1..2': found a range"),
        (lambda: pddrt.compare(SCENARIO), "nothing to compare it with; allowed: at least two"),
        (lambda: pddrt.compare(SCENARIO, policies=5), "policies: found 5 (int); allowed: a text"),
        (lambda: pddrt.sweep(SCENARIO, vary={"seed": "1,2"}, jobs=0), "jobs: found 0; allowed"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(BadInput) as raised:
        call()
    assert message in str(raised.value)
    assert "--" not in str(raised.value)


def test_kinds_of_events_that_are_none_are_refused(run: pddrt.Run) -> None:
    with pytest.raises(BadInput, match="kind: found 'KVSend', did you mean 'KVSent'"):
        run.events_table("KVSend", "rows")
    with pytest.raises(BadInput, match=r"kind: found 5 \(int\)"):
        run.events_table(5, "rows")  # type: ignore[arg-type]
    assert run.events_table("InstanceCrashed", "rows") == []


def test_the_given_data_is_left_as_it_was() -> None:
    import yaml

    data = yaml.safe_load(SCENARIO)
    before = json.dumps(data)
    pddrt.run(data, wan__rate="8 Mbit/s", workload__sessions=1)
    assert json.dumps(data) == before


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_run_that_failed_is_raised_with_its_result() -> None:
    with pytest.raises(RunFailed, match="2 of 2 requests did not finish") as raised:
        pddrt.run(SCENARIO, deadline="30 ms")
    assert raised.value.run.summary.requests.aborted == 2  # type: ignore[attr-defined]
    made = pddrt.run(SCENARIO, deadline="30 ms", check=False)
    assert made.failure == "2 of 2 requests did not finish"
    assert made.request("s0.0").finish_reason == "aborted"


class Press:
    """Ctrl-C at the first token; a second one would not be gentle."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, event: object) -> None:
        if isinstance(event, TokensReceived) and not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_it_gently() -> None:
    with pytest.raises(Interrupted) as raised:
        pddrt.run(SCENARIO, listen=Press())
    assert raised.value.run.summary.interrupted is True  # type: ignore[attr-defined]


# -- where it can be called from -------------------------------------------------------------------


async def test_it_runs_where_a_loop_is_running() -> None:
    """As in a notebook: the loop of the caller waits, and is none the worse for it."""
    digest = pddrt.run(SCENARIO).summary.digest
    assert asyncio.get_running_loop().is_running()
    other = await asyncio.to_thread(pddrt.run, SCENARIO)
    assert other.summary.digest == digest
    compared = pddrt.compare(SCENARIO, policies="pdd,naive")
    assert compared["pdd"].ttft_s == other.summary.ttft_s
    with pytest.raises(BadInput):
        pddrt.run(SCENARIO, wan__rate="x")


async def test_ctrl_c_ends_it_gently_there_too() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted) as raised:
            pddrt.run(SCENARIO, workload__sessions=100, listen=Press())
        assert raised.value.run.summary.requests.total < 100  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGINT, before)


# -- comparing and sweeping ------------------------------------------------------------------------


def test_columns_go_by_name_and_label() -> None:
    compared = pddrt.compare(
        SCENARIO, vary={"wan.delay": ["1 ms", "40 ms"]}, repeat=2, workload__output_tokens=24
    )
    assert compared.names == ("delay=1 ms", "delay=40 ms")
    assert compared["delay=40 ms"] is compared["delay_40_ms"]
    assert compared["delay_40_ms"].ratios.e2e_s.mean > 1
    assert compared.holds("c2.e2e_s.mean > c1.e2e_s.mean")
    assert not compared.holds("delay_40_ms.e2e_s.mean < 1 ms")
    rows = compared.deltas_table("rows")
    assert [(row["seed"], row["request"]) for row in rows] == [
        (3, "s0.0"), (3, "s1.0"), (4, "s0.0"), (4, "s1.0"),
    ]  # fmt: skip
    total = sum(row["ttft_change_s"] for row in rows) / 4
    told = compared["delay_40_ms"].pairs.ttft
    assert told.change_s == pytest.approx(total, abs=1e-9)
    assert compared.report().name == "compare.html"
    with pytest.raises(BadInput, match="found 'delay', did you mean"):
        compared["delay"]
    with pytest.raises(BadInput, match="condition 'x < 1': 'x' is of no column"):
        compared.holds("x < 1")


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    def sweep(**options: Any) -> Any:
        given = {"workload.output_tokens": [2, 3]}
        return pddrt.sweep(
            SCENARIO, vary=given, metrics=["tokens.output"], out=tmp_path / "s", **options
        )

    assert [c["state"] for c in sweep(max_runs=1).cells_table("rows")] == ["finished", "waiting"]
    swept = sweep()
    assert swept.cells_table("rows") == [
        {"workload.output_tokens": "2", "seed": 3, "state": "kept", "tokens.output": 4},
        {"workload.output_tokens": "3", "seed": 3, "state": "finished", "tokens.output": 6},
    ]
    points = swept.points_table("rows")
    assert [p["tokens.output"]["mean"] for p in points] == [4, 6]
    assert swept.report().exists()


# -- the documents ---------------------------------------------------------------------------------


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_notebook_of_the_documents_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/api.md, block by block, in one namespace, as its cells would run."""
    monkeypatch.chdir(ROOT)
    cells, names = blocks("api.md", "python"), dict[str, Any]()
    assert len(cells) == 6
    for cell in cells:
        exec(compile(ast.parse(cell), "docs/api.md", "exec"), names)
    said = capsys.readouterr().out
    assert "did you mean 'rate'" in said
    assert "requests did not finish" in said
    assert re.search(r"^\d+ handoffs$", said, re.MULTILINE)
    assert names["compared"]["naive"].ratios.ttft_s.p90 > 1
