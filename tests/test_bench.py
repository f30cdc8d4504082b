"""`pddrt bench handoff`: KV over the link against ids and an extend, under the virtual clock.

The model is the default one in its sizes, from a config alone: 23,040 B of KV a token.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pddrt import bench, cli
from pddrt.bench import Bench, Setting
from pddrt.commands import bench as bench_cli
from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import BadInput, Interrupted, RunFailed
from pddrt.frames import Frame
from pddrt.roles.bench import Held, MainEnd, RelayEnd
from pddrt.trace import Seconds, dumps
from pddrt.trials import WAYS, Repetition, Way, compared
from pddrt.types import MS, SECOND, Ns, Run

ROOT = Path(__file__).parent.parent
KV_BYTES = 23_040
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
PROFILE = ROOT / "scenarios" / "profiles" / "smollm2-135m-bf16-1.json"
STEP = "{prefill_tokens_per_s: 1000, decode_step: 10 ms}"
EXTEND: Ns = 100 * MS
"""Of 100 tokens, by STEP."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def measured(model: str, **options: object) -> tuple[list[Repetition], dict[str, Any]]:
    """The repetitions of a bench with these options, and its table."""
    defaults = {"model": model, "clock": "virtual", "step_time": STEP, "repeat": 3}
    done = Bench(Setting.of({**defaults, **options}))
    done.prepare()
    found = done.execute().table
    assert found is not None
    return done.repetitions, found


def table(model: str, **options: object) -> dict[str, Any]:
    return measured(model, **options)[1]


CALM: dict[str, object] = {"jitter": "0 s", "cross_traffic": 0.0}

# -- what is measured is what the settings say -----------------------------------------------------


def test_times_follow_exactly_from_rate_delay_copies_and_step(model: str) -> None:
    done, _ = measured(model, **CALM, rate="200 Mbit/s", delay="15 ms", copy_rate="1 GB/s")
    copy = 100 * KV_BYTES  # ns, at 1 GB/s
    for r in done:
        assert r.wire == r.bytes * 40 + 15 * MS  # ns a byte at 25 MB/s
        if r.way == "kv":
            assert (r.copy_out, r.copy_in, r.extend) == (copy, copy, 0)
        else:
            assert (r.copy_out, r.copy_in, r.extend) == (0, 0, EXTEND)
        assert r.total == r.wire + (2 * copy if r.way == "kv" else EXTEND)


def test_bytes_are_those_of_the_frames_on_the_link(model: str) -> None:
    done, found = measured(model, **CALM, repeat=5)
    kv, ids = ({r.bytes for r in done if r.way == way} for way in WAYS)
    assert len(kv) == len(ids) == 1, "every repetition sends the same"
    assert 100 * KV_BYTES < kv.pop() < 100 * KV_BYTES + 300
    assert 400 < (each := ids.pop()) < 1500, "row 6: a handoff of 100 ids costs at most 1.5 KB"
    assert found["link"]["ids_bytes"] == (5 + 1) * each, "with the warm-up"


def test_both_ways_end_with_the_same_kv_and_the_same_id(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of the main decoder, context and all, at the moment when it says it is able."""
    engines: dict[str, Engine] = {}
    seen: list[bool] = []
    make, report = Bench._engine, MainEnd._report

    def keep(self: Bench, env: Env, name: str) -> Engine:
        engines[name] = make(self, env, name)
        return engines[name]

    def look(self: MainEnd, request: str, end: int) -> None:
        relay, main = (engines[name].read_kv((Run(0, end),)) for name in ("relay", "main"))
        seen.append(end == 512 + 100 and relay == main)
        report(self, request, end)

    monkeypatch.setattr(Bench, "_engine", keep)
    monkeypatch.setattr(MainEnd, "_report", look)
    assert all(r.same for r in measured(model)[0])
    assert seen == [True] * (len(WAYS) * (3 + 1))


@pytest.mark.parametrize("context", [0, 1, 513])
def test_any_context_will_do(model: str, context: int) -> None:
    assert all(r.same for r in measured(model, **CALM, context=context, tokens=7)[0])


def test_kv_that_is_not_written_is_found_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def store(self: MainEnd, frame: Frame) -> None:
        self._report(frame["request"], frame["end"])

    monkeypatch.setattr(MainEnd, "_store", store)
    done, found = measured(model, **CALM)
    assert [r.same for r in done] == [False, True] * 3
    with pytest.raises(RunFailed, match="3 times kv"):
        bench.Result(found, False).raise_for_status()
    assert "KV over the link: 3 times not what the relay has" in shown(found)


def test_ids_that_are_wrong_are_found_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = RelayEnd._ids

    def wrong(self: RelayEnd, request: str) -> Frame:
        frame = ids(self, request)
        return Frame(frame.kind, frame.fields, bytes(4) + bytes(frame.payload[4:]))

    monkeypatch.setattr(RelayEnd, "_ids", wrong)
    assert [r.same for r in measured(model, **CALM)[0]] == [True, False] * 3


def test_what_breaks_off_ends_the_bench(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RelayEnd, "_ids", lambda self, request: Frame("ids", {"request": request}))
    with pytest.raises(RunFailed, match="main: frame 'ids' lacks the field 'start'"):
        measured(model)


def test_repetitions_take_turns_and_never_overlap(model: str) -> None:
    done, _ = measured(model, repeat=20)
    assert [r.way for r in done] == list(WAYS) * 20
    for before, after in pairwise(done):
        assert before.start + before.total < after.start


# -- the link that is shared -----------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_cross_traffic_has_the_share_that_was_asked_for(model: str, share: float) -> None:
    """What is measured beside it is next to nothing: a token, once in a while."""
    found = table(
        model, cross_traffic=share, cross_flow="100 KB", tokens=1, repeat=40, pause="500 ms"
    )
    assert found["link"]["busy_fraction"] == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_transfer_takes_what_processor_sharing_says(model: str, share: float) -> None:
    """x / (rate * (1 - share)) on average. 200 repetitions: the mean is good to some 4 %."""
    found = table(
        model, cross_traffic=share, jitter="0 s", cross_flow="200 KB", repeat=200, pause="300 ms"
    )
    wire = found["ways"]["kv"]["parts_s"]["wire"]["mean"].ns - 15 * MS
    assert wire == pytest.approx(100 * KV_BYTES * SECOND / 25_000_000 / (1 - share), rel=0.12)


@pytest.mark.parametrize("seed", range(1, 6))
def test_on_a_jittery_shared_link_ids_are_the_steadier_way(model: str, seed: int) -> None:
    found = table(model, jitter="3 ms", cross_traffic=0.5, repeat=40, seed=seed)
    kv, ids = (found["ways"][way]["total_s"] for way in WAYS)
    assert ids["sigma"].ns * 10 < kv["sigma"].ns
    assert ids["max"].ns < kv["max"].ns
    assert found["smaller"]["sigma"] == found["smaller"]["max"] == "ids"
    assert found["kv_over_ids"]["bytes"] >= 1000


def test_where_the_link_is_fast_kv_is_the_quicker_way(model: str) -> None:
    found = table(model, rate="10 Gbit/s", copy_rate="20 GB/s")
    assert found["smaller"]["mean"] == found["smaller"]["max"] == "kv"


# -- the same again --------------------------------------------------------------------------------


def run_cli(*args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pddrt import cli; sys.argv[0] = 'pddrt'; cli.main(); "
        "assert 'torch' not in sys.modules"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "bench", "handoff", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_virtual_clock_repeats_to_the_byte_and_needs_no_torch(model: str) -> None:
    options = ("--model", model, "--clock", "virtual", "--step-time", STEP, "--repeat", "5")
    first, again = (run_cli(*options, "--json", hash_seed=h) for h in ("1", "2"))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stdout == dumps(table(model, repeat=5)) + "\n"
    other = table(model, repeat=5, seed=2)
    assert dumps(other["ways"]["kv"]) != dumps(json.loads(first.stdout)["ways"]["kv"])


def test_every_repetition_is_in_the_json(model: str) -> None:
    found = json.loads(dumps(table(model, repeat=4)))
    assert [r["way"] for r in found["repetitions"]] == list(WAYS) * 4
    for way in WAYS:
        totals = sorted(r["total_s"] for r in found["repetitions"] if r["way"] == way)
        told = found["ways"][way]["total_s"]
        assert told["max"] == totals[-1]
        assert told["p50"] == totals[1]
        assert told["mean"] == pytest.approx(sum(totals) / 4, abs=1e-8)
    for r in found["repetitions"]:
        parts = [r[k] for k in r if k.endswith("_s") and k not in ("start_s", "total_s")]
        assert sum(parts) == pytest.approx(r["total_s"], abs=1e-12)
    assert found["measured"]["total_s"] == found["ways"]["ids"]["total_s"]["p50"]
    assert found["reference"]["bytes"] == found["ways"]["kv"]["bytes"]
    assert found["ratio"]["total_s"] == pytest.approx(
        found["measured"]["total_s"] / found["reference"]["total_s"]
    )
    assert found["provenance"]["fidelity"]["verdict"] == "exact"


# -- statistics ------------------------------------------------------------------------------------


def repetition(way: Way, total: Ns, nbytes: int = 1) -> Repetition:
    return Repetition(way, 0, 0, total, 0, 0, nbytes, True)


def test_both_means_stand_as_they_are() -> None:
    found = compared(
        [repetition("kv", t, 4000) for t in (1, 1, 10)]
        + [repetition("ids", t, 2) for t in (6, 6, 6)]
    )
    kv, ids = (found["ways"][way]["total_s"] for way in WAYS)
    assert [kv[k].ns for k in ("mean", "p50", "max", "sigma")] == [4, 1, 10, 5]  # sqrt(54 / 2)
    assert [ids[k].ns for k in ("mean", "p50", "max", "sigma")] == [6, 6, 6, 0]
    assert {k: found["smaller"][k] for k in ("mean", "p50", "max", "sigma")} == {
        "mean": "kv",
        "p50": "kv",
        "max": "ids",
        "sigma": "ids",
    }
    assert found["kv_over_ids"]["bytes"] == 2000
    assert found["kv_over_ids"]["sigma"] is None, "over nothing"
    assert found["ratio"] == {"total_s": 6.0, "bytes": 0.0005}


def test_neither_is_smaller_where_both_are_equal() -> None:
    found = compared([repetition(way, 5) for way in WAYS for _ in range(2)])
    assert set(found["smaller"].values()) == {None}


# -- on the screen ---------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pddrt", "bench", "handoff", *args])
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def shown(found: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=100, markup=False, highlight=False)
    with console.capture() as capture:
        for line in bench_cli.results(found):
            console.print(line)
    return capture.get()


def test_both_ways_stand_side_by_side(model: str) -> None:
    text = shown(table(model, **CALM, rate="200 Mbit/s", repeat=2))
    assert "100 tokens after 512: " in text
    assert "link: 200 Mbit/s; 15 ms one way, jitter 0 s; all of it" in text
    assert re.search(r"^mean +107 ms +115 ms +0\.932 *$", text, re.M)
    assert re.search(r"^sigma +0 +0 +- *$", text, re.M)
    assert re.search(r"^bytes +2\.3 MB +465 B +4,95\d *$", text, re.M)
    assert re.search(r"^  wire, mean +107 ms +15 ms *$", text, re.M)
    assert re.search(r"^  extend, mean +100 ms *$", text, re.M)
    assert "smaller is - mean: KV over the link, max: KV over the link, sigma: equal" in text
    assert "times are exact" in text


@pytest.mark.parametrize(
    ("verdict", "load", "said", "sound"),
    [
        ("ok", 0.9, "ok: data left 8 ms late (p99; worst 30 ms; allowed 5 ms)", True),
        ("degraded", None, "allowed 5 ms): trust the times less", False),
        ("ok", 4.4, "4.4 processes wanted the 2 cores already, which slows steps: trust", False),
    ],
)
def test_a_machine_that_was_busy_is_said_to_be(
    model: str, verdict: str, load: float | None, said: str, sound: bool
) -> None:
    found = table(model, repeat=2)
    found["provenance"]["fidelity"] |= {"verdict": verdict}
    found["provenance"]["machine"] = {"cores": 2, "load_before": load}
    found["link"] |= {"late_p99_s": Seconds(8 * MS), "late_max_s": Seconds(30 * MS)}
    text = " ".join(shown(found).split())
    assert said in text
    assert text.endswith("trust the times less") != sound


def test_the_help_tells_the_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--help") == 0
    lines = re.sub(r"\n {20,}", " ", capsys.readouterr().out)
    told = dict(re.findall(r"^  --([\w-]+) .*Default: (.+)\.$", lines, re.M))
    known = {k.replace("_", "-"): str(v) for k, v in Setting().echo().items()}
    assert told == known


def test_an_interrupted_bench_shows_what_it_has(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repeat = MainEnd.forget

    def interrupt(self: MainEnd, held: Held) -> None:
        if self.env.now() > 5 * SECOND:
            signal.raise_signal(signal.SIGINT)
        repeat(self, held)

    monkeypatch.setattr(MainEnd, "forget", interrupt)
    options = ("--model", model, "--clock", "virtual", "--step-time", STEP, "--repeat", "1000")
    assert call(monkeypatch, *options, "--json") == 130
    done = capsys.readouterr()
    found = json.loads(done.out)
    count = found["ways"]["ids"]["count"]
    assert 2 <= count < 1000
    assert len(found["repetitions"]) == 2 * count
    assert f"interrupted after {count} repetitions of each way" in done.err


def test_interrupted_at_once_there_is_nothing_to_show(model: str) -> None:
    stopped = Bench(Setting.of({"model": model, "clock": "virtual", "step_time": STEP}))
    stopped.prepare()
    stopped._interrupt()
    result = stopped.execute()
    assert result.table is None
    with pytest.raises(Interrupted, match="after 0 repetitions"):
        result.raise_for_status()


# -- bad input -------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, object], str]] = [
    ({"tokens": 0}, "--tokens: found 0; allowed: a whole number from 1"),
    ({"context": -1}, "--context: found -1"),
    ({"rate": "200"}, "--rate: found '200', a number without a unit"),
    ({"rate": "0 bit/s"}, "--rate: found '0 bit/s'; allowed: a rate .*, above zero"),
    ({"delay": "-1 ms"}, "--delay: found '-1 ms', which is negative"),
    ({"delay": "0 s"}, "--jitter: found one without a delay"),
    ({"cross_traffic": 1.0}, "--cross-traffic: found 1.0; allowed: a share"),
    ({"cross_traffic": float("nan")}, "--cross-traffic: found nan"),
    ({"cross_flow": "0 B"}, "--cross-flow: found '0 B'"),
    ({"repeat": 1}, "--repeat: found 1; allowed: a whole number from 2"),
    ({"clock": "sun"}, "--clock: found 'sun'; allowed: wall | virtual"),
    ({"dtype": "bf16"}, "--dtype: found 'bf16'"),
    ({"step_time": None}, "--clock: under the virtual clock .* needed: --chip"),
    ({"step_time": "chip"}, "--step-time: found chip, and no --chip"),
    ({"step_time": "real", "chip": "h20"}, "--chip: found one beside --step-time real"),
    ({"step_time": None, "chip": "h2"}, "--chip: found 'h2', did you mean"),
    (
        {"step_time": "{prefill_tokens_per_s: 9, decode_step: 1}"},
        "--step-time: decode_step: found 1, a ",
    ),
    ({"step_time": "measured:gone.json"}, "--step-time: gone.json: cannot be read"),
    (
        {"step_time": f"measured:{PROFILE}"},
        "--step-time: .*json is of smollm2-135m in bfloat16; needed: /",
    ),
    ({"threads": 2}, "--threads: is for real steps"),
    ({"clock": "wall", "step_time": None, "copy_rate": "1 GB/s"}, "--copy-rate: is for modelled"),
    ({"tokens": 8000}, "--tokens: found 8000 tokens after --context 512; allowed: 8191 together"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_wrong_options_are_refused_by_name(
    model: str, options: dict[str, object], message: str
) -> None:
    given = {"model": model, "clock": "virtual", "step_time": STEP, **options}
    with pytest.raises(BadInput) as refused:
        Bench(Setting.of(given)).prepare()
    (problem,) = refused.value.problems
    assert re.match(message.replace("|", r"\|"), problem), problem


def test_all_that_is_wrong_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--rate", "fast", "--jitter", "some", "--repeat", "0") == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert [line.split(":")[1] for line in done.err.splitlines()] == [
        " --rate",
        " --jitter",
        " --repeat",
    ]


def test_the_script_knows_its_benchmarks() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "bench", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    names = "handoff, overhead, sim, engine, start, kv, netem"
    assert done.stderr == f"bench: found 'nothing'; allowed: {names}\n"
