"""Same scenario, same seed: the same bytes, in any process. Another seed: others.

Each process has its own order of sets and dicts of strings (PYTHONHASHSEED) and its own addresses;
what depends on either would show in events.jsonl sooner or later. So would what depends on the
order of callbacks that are due at one instant, which the loop can shuffle: times may then differ,
tokens may not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pddrt.run import Run
from pddrt.scenario import parse

SCENARIO = """
name: repeated
clock: virtual
model: tiny
dtype: float64
links:
  rdma: {between: [a, a], rate: 1 Gbit/s, delay: 5 us, jitter: 2 us}
  wan:  {between: [a, b], rate: 20 Mbit/s, delay: 10 ms, jitter: 2 ms}
instances:
  p:   {role: prefill, site: a, count: 2, chunk_tokens: 64, kv_memory: 2 MiB, chip: &c {flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}
  rld: {role: relay,   site: a, count: 2, kv_memory: 1 MiB, chip: *c}
  md:  {role: main,    site: b, count: 3, kv_memory: 1 MiB, chip: *c}
pipeline: {policy: pdd, relay_above: 40 ms}
anomaly: {input_above: 50, output_below: 12, share: 30 %, guess: session}
scale: [{at: 200 ms, instances: md, count: 2}, {at: 450 ms, instances: md, count: 3}, {at: 300 ms, instances: p, count: 1}]
sampling: {temperature: 0.8, top_p: 0.95}
workload: {kind: sessions, sessions: 6, turns: {min: 1, max: 3}, rate: 20/s, think: 100 ms, output_tokens: 16,
           prompts: random, prompt_tokens: {min: 20, max: 200}, system: {tokens: 60}}
"""  # noqa: E501
ENGINE = {"torch": [], "model": [f"instances.{name}.engine=model" for name in ("p", "rld", "md")]}
ROOT = Path(__file__).parent.parent

PROGRAM = """
import json, sys
from pathlib import Path
from tests.test_determinism import run
engine, out, *seeds = sys.argv[1:]
for seed in seeds:
    run(Path(out) / seed, engine, int(seed))
"""


def run(out: Path, engine: str, seed: int, shuffle: int | None = None) -> Path:
    """Runs the scenario; the folder that it leaves."""
    scenario = parse(SCENARIO, "repeated.yaml", ENGINE[engine], seed=seed)
    the_run = Run(scenario, out=out, shuffle=shuffle)
    the_run.prepare()
    the_run.execute().raise_for_status()
    return out


def runs_elsewhere(out: Path, engine: str, seeds: Sequence[int], hashes: Sequence[str]) -> None:
    """The same in a process for each of `hashes`, all at once; folders out/HASH/SEED."""
    processes = []
    for hash_seed in hashes:
        command = [sys.executable, "-c", PROGRAM, engine, str(out / hash_seed), *map(str, seeds)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE))
    for process in processes:
        _, complaint = process.communicate()
        assert process.returncode == 0, complaint.decode()


def events(folder: Path) -> bytes:
    return (folder / "events.jsonl").read_bytes()


def tokens(folder: Path) -> dict[str, list[int]]:
    """The answer to each request."""
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return {r["id"]: r["output_ids"] for r in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("engine", "seeds", "hashes"),
    [("model", range(30), ("0", "4711")), ("torch", range(2), ("4711",))],
    ids=["model", "torch"],
)
def test_the_same_bytes_in_every_process(
    tmp_path: Path, engine: str, seeds: range, hashes: tuple[str, ...]
) -> None:
    """F18."""
    runs_elsewhere(tmp_path, engine, seeds, hashes)
    seen = set()
    for seed in seeds:
        mine = events(run(tmp_path / "here" / str(seed), engine, seed))
        for other in hashes:
            theirs = events(tmp_path / other / str(seed))
            assert theirs == mine, f"seed {seed}: {first_difference(mine, theirs)}"
        seen.add(hashlib.sha256(mine.split(b"\n", 1)[1]).digest())  # the first line says the seed
    assert len(seen) == len(seeds), "another seed is another run"


def first_difference(mine: bytes, theirs: bytes) -> str:
    pairs = zip(mine.splitlines(), theirs.splitlines(), strict=False)
    return next(
        (f"{a!r} is {b!r}" for a, b in pairs if a != b), "one is the beginning of the other"
    )


@pytest.mark.parametrize(("engine", "shuffles"), [("model", 8), ("torch", 2)])
def test_the_order_of_what_happens_at_once_changes_no_token(
    tmp_path: Path, engine: str, shuffles: int
) -> None:
    plain = run(tmp_path / "plain", engine, 3)
    wanted, ordered = tokens(plain), events(plain)
    shuffled = [run(tmp_path / str(n), engine, 3, shuffle=n) for n in range(shuffles)]
    for folder in shuffled:
        assert tokens(folder) == wanted
    assert any(events(folder) != ordered for folder in shuffled), "it did shuffle something"


def test_a_shuffled_run_repeats_too(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, "model", 5, shuffle=9) for name in ("first", "second"))
    assert events(first) == events(second)


def test_the_runs_hold_what_could_be_out_of_order(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "model", 0)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["handoffs"]["count"] >= 2
    assert summary["tokens"]["cached_main"] > 0
    assert all(instance["steps"] for instance in summary["instances"].values())
