"""The command line: what it prints where, how it refuses, and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pddrt import cli, live
from pddrt import trace as ev
from pddrt.trace import Event

from .commands import Call, Done, called

run_module = importlib.import_module("pddrt.run")  # pddrt.run itself is a function

SCENARIO = """\
name: small
clock: virtual
model: tiny
dtype: float64
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 16 Mbit/s, delay: 10 ms}
instances:
  p0:   {role: prefill, site: a, kv_memory: 4 MiB, threads: 1, step_time: &t {prefill_tokens_per_s: 4000, decode_step: 10 ms}}
  rld0: {role: relay,   site: a, kv_memory: 4 MiB, threads: 1, step_time: *t}
  md0:  {role: main,    site: b, kv_memory: 4 MiB, threads: 1, step_time: *t}
pipeline: {policy: pdd, relay_above: 60 ms}
workload: {kind: closed, requests: 2, concurrency: 2, output_tokens: 30, prompts: random, prompt_tokens: 150}
"""  # noqa: E501
ENDLESS = ["--set", "workload.output_tokens=3000", "--set", "workload.requests=4"]
"""A run that has to be ended."""


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Calls `pddrt` with arguments, in a folder with small.yaml; what it left behind fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "small.yaml").write_text(SCENARIO)

    def call(*args: str) -> Done:
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        threads = threading.active_count()
        done = called(monkeypatch, capsys, *args)
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
        assert threading.active_count() == threads
        return done

    return call


def saved(folder: Path | str) -> dict[str, object]:
    files = {path.name for path in Path(folder).iterdir()}
    assert files >= {"scenario.yaml", "events.jsonl", "requests.jsonl", "summary.json"}
    return json.loads((Path(folder) / "summary.json").read_text())  # type: ignore[no-any-return]


# -- what is printed, and where --------------------------------------------------------------------


def test_a_run_shows_its_texts_and_numbers_and_where_it_is_saved(call: Call) -> None:
    done = call("run", "small.yaml")
    assert done.code == 0
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == "small: 2 requests to tiny in float64, policy pdd, virtual clock"
    assert sum(line.startswith("[P]") and "[R]" in line for line in lines) >= 2
    assert re.search(r"^P 1 \+ R \d+ \+ M \d+ tokens, TTFT .* ms, TPOT .* ms$", done.out, re.M)
    (folder,) = re.findall(r"^saved in (runs/small-\d{8}-\d{6})$", done.out, re.M)
    assert lines[-1] == f"saved in {folder}"
    assert saved(folder)["requests"] == {"total": 2, "finished": 2, "rejected": 0, "aborted": 0}
    assert "\x1b" not in done.out


def test_json_is_the_summary_and_nothing_else(call: Call) -> None:
    done = call("run", "small.yaml", "--json", "--out", "here", "--seed", "5")
    assert done.code == 0
    assert done.err == ""
    assert json.loads(done.out) == saved("here")
    assert saved("here")["seed"] == 5


def test_what_a_policy_prints_is_not_in_the_json(call: Call) -> None:
    Path("mine.py").write_text(
        "class Mine:\n    pipelines = ('P-MD',)\n    def route(self, facts):\n"
        "        print('routing')\n        prefill, main = facts.pick_pair()\n"
        "        return facts.route('', prefill=prefill, main=main)\n"
    )
    done = call(
        "run", "small.yaml", "--json", "--out", "here", "--set", "pipeline.policy=mine:Mine"
    )
    assert json.loads(done.out) == saved("here")
    assert "routing" in done.err


def test_a_prompt_of_ones_own(call: Call) -> None:
    done = call("run", "small.yaml", "--prompt", "[red]Why[/red] \x1b[31m:smile:?", "--verify")
    assert done.code == 0
    assert "\n> [red]Why[/red] ␛[31m:smile:?\n" in done.out
    assert "small: 1 request to tiny" in done.out
    assert re.search(r"^verified +1: 1 equal *$", done.out, re.M)


def test_an_older_run_is_replaced_as_a_whole(call: Call, tmp_path: Path) -> None:
    first = call("run", "small.yaml", "--out", "here", "--json").out
    again = call("run", "small.yaml", "--out", "here", "--json", "--seed", "2").out
    assert json.loads(first)["digest"] != json.loads(again)["digest"]
    assert saved("here") == json.loads(again)


def test_the_help_names_every_command(call: Call) -> None:
    done = call("--help")
    assert done.code == 0
    assert re.findall(r"^  (\w+)  +\S", done.out.partition("Commands:")[2], re.M) == [
        "run",
        "calibrate",
        "compare",
        "sweep",
        "inspect",
        "report",
        "watch",
        "model",
        "bench",
        "netem",
    ]
    assert "..." not in done.out.partition("Commands:")[2], "short enough to be read"
    assert call("--version").out.startswith("pddrt ")


# -- models ----------------------------------------------------------------------------------------


def test_models_are_listed_a_line_each(call: Call, home: Path) -> None:
    done = call("model", "list")
    assert done.code == 0
    rows = [re.split("  +", line.strip()) for line in done.out.splitlines()]
    assert rows[0] == ["model", "size", "state", "where"]
    assert ["tiny", "-", "here", "made on the spot"] in rows
    (default,) = [row for row in rows if row[0] == "smollm2-135m"]
    assert default[1:3] == ["92.9 MB", "to be fetched"]
    folder = home / "models" / "smollm2-135m"
    assert str(folder) not in done.out


def test_a_model_made_on_the_spot_need_not_be_pulled(call: Call) -> None:
    done = call("model", "pull", "tiny")
    assert (done.code, done.out) == (0, "")
    assert done.err == "pddrt: tiny is made on the spot: there is nothing to fetch\n"


def test_pulling_a_folder_prints_where_it_is(call: Call, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / file).write_text("{}")
    assert call("model", "pull", "mine") == Done(0, "mine\n", "")


def test_pulling_shows_how_far_it_is(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from pddrt.engine import models

    def pull(name: str, progress: Callable[[str, float | None], None]) -> Path:
        for done in (0.0, 0.4, 1.0):
            progress(f"fetching {name}", done)
        return Path("somewhere")

    monkeypatch.setattr(models, "pull", pull)
    assert call("model", "pull", "it") == Done(0, "somewhere\n", "fetching it\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/to-be-had", "no known name, no folder, not in the hub's cache"),
        ("./nowhere", "no such folder"),
        ("empty", "there is no config.json"),
        ("not a name", "neither a name we know, nor a folder, nor a hub id"),
        ("evil\x1b[31m", "'evil"),
    ],
)
@pytest.mark.parametrize("how", ["pull", "run"])
def test_a_model_that_cannot_be_had(
    call: Call, tmp_path: Path, name: str, why: str, how: str
) -> None:
    (tmp_path / "empty").mkdir()
    scenario = json.dumps(name).join(SCENARIO.split("tiny", 1))
    (tmp_path / "other.yaml").write_text(scenario)
    done = call("model", "pull", name) if how == "pull" else call("run", "other.yaml")
    assert done.code == 3
    assert done.out == ""
    message = done.err.removeprefix(f"fetching {name} from the hub\n")
    assert re.fullmatch(r"pddrt: model .*\n", message)
    assert why in message
    assert "\x1b" not in done.err


# -- refusals --------------------------------------------------------------------------------------

BAD = {
    "unknown key": (["--set", "links.wan.rat=1"], "links.wan.rat: found an unknown field, did you"),
    "no unit": (["--set", "links.wan.rate=300"], "found 300, a number without a unit; allowed: a"),
    "unknown unit": (["--set", "links.wan.delay='3 lightyears'"], "unit 'lightyears' is unknown"),
    "wrong type": (["--set", "links=3"], "--set links: links: found 3; allowed: a mapping"),
    "no such way": (["--set", "links.wan.rate.x=3"], "is '16 Mbit/s', with nothing inside it"),
    "no value": (["--set", "links"], "write it as a.b=value"),
    "not yet": (
        ["--set", "workload={kind: trace, path: x, format: azure}"],
        "not available yet in this version",
    ),
    "missing role": (["--set", "instances.rld0.role=main"], "no instance of role relay; policy"),
    "unreachable": (["--set", "links.wan.between=[b, b]"], "no link between sites a and b, which"),
    "unknown site": (["--set", "instances.md0.site=z"], "found 'z'; allowed: a, b"),
    "clock": (["--clock", "sundial"], "--clock: clock: found 'sundial'; allowed: wall | virtual"),
    "seed": (["--seed", "-1"], "--seed: seed: found -1; allowed: a whole number from 0"),
    "empty prompt": (["--prompt", ""], "--prompt: found an empty prompt"),
    "long prompt": (["--prompt", "x" * 5000], "--prompt: found a request of 5000 prompt + 30"),
    "prompt of bytes": (["--prompt", "a\udcff"], "--prompt: is not text in UTF-8"),
    "long prompts": (["--set", "workload.prompt_tokens=9000"], "small.yaml:13: workload: found a"),
    "KV memory": (["--set", "instances.md0.kv_memory=64 KiB"], "found room for 64 tokens of KV,"),
    "out is a file": (["--out", "small.yaml"], "--out small.yaml: found a file, small.yaml;"),
    "out in a file": (["--out", "small.yaml/x"], "--out small.yaml/x: found a file, small.yaml;"),
    "out is full": (["--out", "."], "--out .: found something that is not a run; allowed: a new"),
    "out is too long": (["--out", "x" * 300], "File name too long"),
    "no device of that name": (["--set", "instances.p0.device=tpu"], "found 'tpu'; allowed: cpu |"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_in_a_message(call: Call, what: str) -> None:
    args, message = BAD[what]
    done = call("run", "small.yaml", *args)
    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert all(line.startswith("pddrt: ") for line in done.err.splitlines())
    assert not Path("runs").exists()


FILES: dict[str, tuple[bytes | None, str]] = {
    "none": (None, "cannot be read: No such file or directory"),
    "empty": (b"", "is empty; allowed: a YAML mapping"),
    "a sentence": (b"I am no scenario", "bad.yaml:1: found 'I am no scenario'; allowed: a YAML"),
    "broken": (b"name: x\nlinks: [1, 2\n", "bad.yaml:3: is not YAML: "),
    "a megabyte of garbage": (bytes(range(256)) * 4096 + b"!", "larger than the 1 MiB allowed"),
    "less garbage": (bytes(range(256)) * 4000, "is not text in UTF-8"),
    "commands": (b"name: \x1b[31mx\n", "is not YAML: "),
    "two mistakes": (SCENARIO.replace("16 Mbit/s", "8").encode() + b"wurkload: 1\n",
                     "bad.yaml:7: links.wan.rate: found 8, a number without a unit"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_bad_file_is_refused_in_a_message(call: Call, tmp_path: Path, what: str) -> None:
    content, message = FILES[what]
    if content is not None:
        (tmp_path / "bad.yaml").write_bytes(content)
    done = call("run", "bad.yaml")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == (2 if what == "two mistakes" else 1)
    assert "\x1b" not in done.err


def test_a_folder_is_no_scenario(call: Call) -> None:
    assert call("run", ".") == Done(2, "", "pddrt: .: cannot be read: Is a directory\n")


@pytest.mark.parametrize(
    "args",
    [["frob"], ["run"], ["run", "a", "b"], ["run", "small.yaml", "--frob"], ["model", "pull"],
     ["run", "small.yaml", "--seed", "x"], []],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_explained(call: Call, args: list[str]) -> None:
    done = call(*args)
    assert done.code == 2
    assert "Usage: pddrt" in done.out + done.err
    assert (done.out == "") or not args


def test_a_device_that_is_not_here(call: Call) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("it is here")
    done = call("run", "small.yaml", "--set", "instances.p0.device=cuda:0")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("pddrt: device cuda:0: torch cannot use it: ")


def test_a_run_folder_that_cannot_be_made(call: Call, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = call("run", "small.yaml", "--json")
    assert (done.code, done.out) == (3, "")
    assert re.fullmatch(r"pddrt: cannot write the run folder runs/small-\S+: .*\n", done.err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "scenario.yaml").write_text("of an older run")
    (tmp_path / "here" / "events.jsonl").symlink_to("/dev/full")
    done = call("run", "small.yaml", "--out", "here", "--json", *ENDLESS)
    assert (done.code, done.out) == (3, "")
    assert done.err == "pddrt: cannot write the run folder here: No space left on device\n"


# -- the reader goes away --------------------------------------------------------------------------


def test_a_run_outlives_its_reader(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        done = call("run", "small.yaml", "--out", "here")
    assert done.code == 0
    assert (
        done.err == "pddrt: stdout: Broken pipe; nothing more is shown, but the command goes on\n"
    )
    assert saved("here")["requests"] == {"total": 2, "finished": 2, "rejected": 0, "aborted": 0}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error_in_the_end(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        done = call("run", "small.yaml", "--out", "here", "--json")
    assert done.code == 3
    assert "stdout cannot be written: No space left on device" in done.err
    assert saved("here")


def test_no_stdout_at_all(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert call("run", "small.yaml", "--out", "here").code == 0
    assert saved("here")


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Sends signals to ourselves, one whenever an event of a run satisfies its condition."""
    hear = live.LiveText.__call__

    def press(*when: Callable[[Event], bool], by: int = signal.SIGINT) -> list[int]:
        waiting, sent = list(when), []

        def listen(self: live.LiveText, event: Event) -> None:
            hear(self, event)
            if waiting and waiting[0](event):
                waiting.pop(0)
                sent.append(by)
                signal.raise_signal(by)

        monkeypatch.setattr(live.LiveText, "__call__", listen)
        return sent

    return press


def is_a(kind: type[Event]) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind)


def is_from_relay(event: Event) -> bool:
    return isinstance(event, ev.TokensReceived) and event.source == "R"


def anything(event: Event) -> bool:
    return True


MOMENTS: dict[str, Sequence[Callable[[Event], bool]]] = {
    "before the first request": [is_a(ev.RunStarted)],
    "in an answer": [is_from_relay],
    "twice": [is_from_relay, anything],
    "three times": [is_from_relay, anything, anything],
}


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize(
    ("when", "by"),
    [*((when, signal.SIGINT) for when in MOMENTS), ("in an answer", signal.SIGTERM)],
)
def test_a_run_that_is_interrupted_is_saved(
    call: Call, press: Callable[..., list[int]], when: str, clock: str, by: int
) -> None:
    sent = press(*MOMENTS[when], by=by)
    done = call("run", "small.yaml", "--out", "here", "--clock", clock, *ENDLESS)
    assert done.code == 130
    assert sent == [by] * len(MOMENTS[when])
    assert done.err == "pddrt: interrupted; what was measured is saved in here\n"
    assert "saved in here\n" in done.out
    summary = saved("here")
    assert summary["interrupted"] is True
    lines = Path("here/requests.jsonl").read_text().splitlines()
    if when == "before the first request":
        assert lines == []
    else:
        assert len(lines) == 2, "nothing more is sent"
        assert {json.loads(line)["finish_reason"] for line in lines} == {"aborted"}
        assert any("R" in json.loads(line)["token_source"] for line in lines)
    if len(sent) < 2:
        assert summary["invariants"]["violations"] == []  # type: ignore[index]


def test_an_interrupt_at_the_very_end_loses_nothing(
    call: Call, press: Callable[..., list[int]]
) -> None:
    sent = press(is_a(ev.LinkTotal))
    done = call("run", "small.yaml", "--out", "here", "--json")
    assert sent
    assert done.code == 130
    assert json.loads(done.out) == saved("here")
    assert saved("here")["requests"] == {"total": 2, "finished": 2, "rejected": 0, "aborted": 0}


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("swallowed", [False, True])
def test_an_interrupt_while_the_model_is_loaded(
    call: Call, monkeypatch: pytest.MonkeyPatch, by: int, swallowed: bool
) -> None:
    """Also where a library keeps it from getting through."""
    load = run_module.load

    def slow_load(*args: object, **options: object) -> object:
        try:
            signal.raise_signal(by)
        except KeyboardInterrupt:
            if not swallowed:
                raise
        return load(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "load", slow_load)
    assert call("run", "small.yaml") == Done(130, "", "pddrt: interrupted\n")
    assert not Path("runs").exists()


def test_ctrl_c_from_outside_ends_the_whole_process_group(tmp_path: Path) -> None:
    """The same with a process of its own, as a shell would have it."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    command = [sys.executable, "-m", "pddrt.cli", "run", "small.yaml", "--clock", "wall"]
    root = Path(cli.__file__).parent.parent
    process = subprocess.Popen(
        [*command, "--out", "here", *ENDLESS], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith("s0.0"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err == "pddrt: interrupted; what was measured is saved in here\n"
    assert out.endswith("saved in here\n")
    assert saved(tmp_path / "here")["interrupted"] is True
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
