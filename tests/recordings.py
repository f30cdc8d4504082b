"""Run folders for the tests of what reads them: small runs, and copies with parts cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pddrt.run import Run
from pddrt.scenario import parse

ROOT = Path(__file__).parent.parent
STORMY = (
    "faults=["
    "{do: link-down, link: wan, at: 200 ms, for: 300 ms}, "
    "{do: crash, instance: md-0, at: 300 ms, for: 200 ms}, "
    "{do: cancel, rate: 4/s}]"
)
"""For scenarios/faults.yaml with a few requests, which are over within a second or two."""

SMALL = """\
name: small
seed: 3
clock: virtual
model: tiny
dtype: float64
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 16 Mbit/s, delay: 10 ms}
instances:
  p0:   {role: prefill, site: a, engine: model, kv_memory: 4 MiB, step_time: &t {prefill_tokens_per_s: 4000, decode_step: 10 ms}}
  rld0: {role: relay,   site: a, engine: model, kv_memory: 4 MiB, step_time: *t}
  md0:  {role: main,    site: b, engine: model, kv_memory: 4 MiB, step_time: *t}
"""  # noqa: E501
"""The head of a scenario: one of each role, modelled, in virtual time."""


def recorded(folder: Path, scenario: str, *overrides: str) -> Path:
    """Runs a scenario of the repository, changed by `overrides`, into `folder`."""
    text = (ROOT / "scenarios" / scenario).read_text(encoding="utf-8")
    run = Run(parse(text, scenario, overrides), out=folder)
    run.prepare()
    return run.execute().folder


def stormy(folder: Path) -> Path:
    """A dozen requests, most by way of a relay, some of which suffer."""
    return recorded(folder, "faults.yaml", "workload.sessions=8", "workload.turns=2", STORMY)


def paced(folder: Path) -> Path:
    """Handoffs in rounds, and requests that go straight to the main decoder."""
    changes = ("workload.requests=6", "workload.output_tokens=120", "workload.rate=2/s")
    return recorded(folder, "handoff.yaml", *changes, "handoff.mode=catch-up")


def handed_over(folder: Path) -> Path:
    """Four requests with long answers, the first of which is handed over in rounds."""
    changes = ("workload.requests=4", "workload.output_tokens=150", "handoff.mode=catch-up")
    return recorded(folder, "handoff.yaml", *changes)


def lines(folder: Path, file: str = "requests.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text(encoding="utf-8").splitlines()]


def copied(source: Path, to: Path, **files: bytes | None) -> Path:
    """A copy of a run folder, with other contents for some files (`events`, `requests`, ...); None
    leaves one out.
    """
    names = {
        "events": "events.jsonl",
        "requests": "requests.jsonl",
        "summary": "summary.json",
        "scenario": "scenario.yaml",
    }
    to.mkdir()
    for key, name in names.items():
        content = files[key] if key in files else (source / name).read_bytes()
        if content is not None:
            (to / name).write_bytes(content)
    return to
