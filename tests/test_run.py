"""Whole runs of a real (tiny) model, on both clocks: files, ids, what is left behind."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pddrt.engine.models import load, load_tokenizer
from pddrt.errors import BadInput, RunFailed
from pddrt.run import Result, Run
from pddrt.scenario import parse

SCENARIO = """
name: pair
seed: 3
clock: virtual
model: {model}
dtype: float64
links:
  rdma: {{between: [a, a], rate: 10 Gbit/s, delay: 5 us}}
  wan:  {{between: [a, b], rate: 8 Mbit/s, delay: 10 ms, jitter: 1 ms}}
instances:
  p0:   {{role: prefill, site: a, chunk_tokens: 64, kv_memory: 4 MiB, threads: 1, chip: &c {{flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}, step_time: chip}}
  rld0: {{role: relay,   site: a, kv_memory: 4 MiB, threads: 1, chip: *c, step_time: chip}}
  md0:  {{role: main,    site: b, kv_memory: 4 MiB, threads: 1, chip: *c, step_time: chip}}
pipeline: {{policy: pdd, relay_above: 60 ms}}
workload: {{kind: poisson, requests: 8, rate: 10/s, output_tokens: 60, prompts: random,
           prompt_tokens: {{min: 150, max: 300}}, short: {{fraction: 0.25, prompt_tokens: 20}}}}
slo: {{ttft: 1 s, tpot: 100 ms}}
"""  # noqa: E501


def run(tmp_path: Path, *overrides: str, model: str = "tiny", name: str = "run") -> Result:
    scenario = parse(SCENARIO.format(model=model), "pair.yaml", overrides)
    the_run = Run(scenario, out=tmp_path / name)
    the_run.prepare()
    return the_run.execute()


def requests(result: Result) -> list[dict[str, Any]]:
    lines = (result.folder / "requests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def greedy(model: str, prompt: list[int], count: int) -> list[int]:
    """What transformers' own forward says, one whole pass a token, no cache, no pages."""
    loaded = load(model, "float64")
    module: Any = copy.deepcopy(loaded.module)
    module.set_attn_implementation("sdpa")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(module(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in loaded.eos_ids:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen2"])
def test_answers_are_those_of_the_plain_model(tmp_path: Path, model: str) -> None:
    result = run(tmp_path, model=model)
    result.raise_for_status()
    events = [
        json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()
    ]
    prompts = {e["request"]: e["prompt"] for e in events if e["event"] == "RequestSent"}
    tokenizer = load_tokenizer(model)
    relayed = 0
    for r in requests(result):
        assert r["output_ids"] == greedy(model, tokenizer.chat(prompts[r["id"]]), 60)
        relayed += "R" in r["token_source"] and "M" in r["token_source"]
    assert relayed >= 4, "the comparison must cross the handoff"


def test_both_clocks_give_the_same_ids(tmp_path: Path) -> None:
    virtual = run(tmp_path, name="virtual")
    wall = run(tmp_path, "clock=wall", "workload.rate=40/s", name="wall")
    for result in (virtual, wall):
        result.raise_for_status()
        for r in requests(result):
            assert sum(round(1e9 * v) for v in r["ttft_legs"].values()) == round(1e9 * r["ttft_s"])
    assert [r["output_ids"] for r in requests(virtual)] == [r["output_ids"] for r in requests(wall)]
    for result in (virtual, wall):
        assert any("R" in r["token_source"] and "M" in r["token_source"] for r in requests(result))


def test_sampled_ids_do_not_depend_on_policy_or_clock(tmp_path: Path) -> None:
    hot = "sampling.temperature=0.8"
    runs = [
        run(tmp_path, hot, name="pdd"),
        run(tmp_path, hot, "pipeline.policy=naive", name="naive"),
        run(tmp_path, hot, "clock=wall", name="wall"),
    ]
    ids = [[r["output_ids"] for r in requests(result)] for result in runs]
    assert ids[0] == ids[1] == ids[2]
    assert ids[0] != [r["output_ids"] for r in requests(run(tmp_path, name="greedy"))]


def test_a_wall_clock_run_leaves_no_thread_and_no_socket(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        gc.collect()
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {f for f in found if "socket:" in f or "eventpoll" in f}

    run(tmp_path, "clock=wall", "workload.requests=1", name="first")
    threads, files = threading.active_count(), open_files()
    run(tmp_path, "clock=wall", "workload.requests=4", name="second").raise_for_status()
    assert threading.active_count() == threads
    assert open_files() <= files


def test_the_run_folder_is_what_the_contract_says(tmp_path: Path) -> None:
    result = run(tmp_path)
    folder = result.folder
    summary = json.loads((folder / "summary.json").read_text())
    events = (folder / "events.jsonl").read_bytes()
    assert summary["digest"] == hashlib.blake2b(events, digest_size=16).hexdigest()
    assert summary["requests"] == {"total": 8, "finished": 8, "rejected": 0, "aborted": 0}
    assert summary["invariants"]["violations"] == []
    assert summary["provenance"]["fidelity"]["verdict"] == "exact"
    assert set(summary["links"]) == {"rdma", "wan"}
    kv = summary["tokens"]["prompt"] * 1024  # bytes a token; frames add their heads
    assert kv < summary["links"]["wan"]["kv_bytes"] < 1.01 * kv
    assert sum(summary["tokens"]["by_role"].values()) == summary["tokens"]["output"]
    again = parse((folder / "scenario.yaml").read_text(), "scenario.yaml")
    other = Run(again, out=tmp_path / "again")
    other.prepare()
    assert other.execute().summary["digest"] == summary["digest"], "scenario.yaml repeats the run"


def test_the_trace_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    scenario = tmp_path / "pair.yaml"
    scenario.write_text(SCENARIO.format(model="tiny"))
    digests = set()
    for seed in ("0", "1", "4711"):
        command = [sys.executable, "-m", "pddrt.cli", "run", str(scenario), "--json"]
        command += ["--out", str(tmp_path / seed)]
        done = subprocess.run(
            command, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        digests.add(json.loads(done.stdout)["digest"])
    assert len(digests) == 1


def test_a_request_that_is_lost_fails_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, "deadline=30 ms")
    with pytest.raises(RunFailed, match="did not finish"):
        result.raise_for_status()
    assert result.summary["requests"]["aborted"] > 0


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("workload.prompt_tokens=4090", "pair.yaml:", "the model's context of 4096"),
        ("instances.md0.kv_memory=128 KiB", "--set instances.md0.kv_memory", "allowed: 1 MiB"),
    ],
)
def test_what_can_never_fit_is_refused_before_the_start(
    tmp_path: Path, override: str, where: str, what: str
) -> None:
    scenario = parse(SCENARIO.format(model="tiny"), "pair.yaml", [override])
    the_run = Run(scenario, out=tmp_path / "run")
    with pytest.raises(BadInput) as refused:
        the_run.prepare()
    assert where in str(refused.value)
    assert what in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="not a run"):
        Run(parse(SCENARIO.format(model="tiny"), "pair.yaml"), out=tmp_path)
