"""The scenario's reference and its JSON schema: made from the models, complete, and true."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pddrt import document
from pddrt.errors import BadInput
from pddrt.reference import entries, examples, json_schema, markdown, tables
from pddrt.scenario import load, parse

ROOT = Path(__file__).parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))


def documents() -> list[Any]:
    files = sorted(SCENARIOS, key=lambda file: (file.stem != "quickstart", file))
    return [document.read(file).data for file in files]


def test_every_field_says_what_it_means() -> None:
    silent = {
        path for table in tables() for path, entry in table.rows if len(entry.meaning.split()) < 1
    }
    assert silent == set()


def test_the_files_are_what_the_code_says() -> None:
    """`scripts/reference` writes them."""
    written = (ROOT / "docs/scenario.md").read_text(encoding="utf-8")
    assert written == markdown(examples(documents()))
    schema = json.loads((ROOT / "docs/scenario.schema.json").read_text(encoding="utf-8"))
    assert schema == json_schema()


def test_examples_come_from_scenarios() -> None:
    shown = examples(documents())
    assert shown["links.NAME.rate", ""] == "10 Gbit/s"
    assert shown["workload.sessions", "kind: sessions"] == "6"
    assert ("faults[].at", "") in shown


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_the_schema_takes_what_ships_and_what_is_resolved(file: Path) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document.read(file).data, schema)
    jsonschema.validate(document.parse(load(file).dump(2), "resolved").data, schema)


BASE: dict[str, Any] = {
    "name": "x",
    "links": {"wan": {"between": ["a", "b"], "rate": "50 Mbit/s", "delay": "15 ms"}},
    "instances": {
        "p": {"role": "prefill", "site": "a", "kv_memory": "1 MiB"},
        "m": {"role": "main", "site": "b", "kv_memory": "1 MiB"},
    },
    "pipeline": {"policy": "naive"},
    "model": "tiny",
    "workload": {"kind": "poisson", "requests": 2, "rate": "1/s", "output_tokens": 4,
                 "prompt_tokens": 20},
}  # fmt: skip


@cache
def schema() -> dict[str, Any]:
    return json_schema()


def put(path: str, value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    inner = whole
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pipeline.policy", "pdd-ish"), ("pipeline.polcy", "pdd"), ("links.wan.rate", 5),
        ("links.wan.between", ["a"]), ("handoff.threshold", -1), ("handoff.mode", "one_shot"),
        ("instances.p.count", "two"), ("instances.p.role", "main-decode"),
        ("workload.kind", "poison"),
        ("workload.sessions", 3), ("sampling.top_p", 0), ("sampling.n", 2), ("clock", "sim"),
        ("faults", [{"do": "crash", "instance": "p", "for": 3}]), ("faults", [{"do": "explode"}]),
        ("instances.p.step_time", "fast"), ("page_tokens", 0), ("seed", -1),
    ],
)  # fmt: skip
def test_what_the_schema_refuses_the_scenario_refuses(path: str, value: Any) -> None:
    whole = put(path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(whole, schema())
    with pytest.raises(BadInput):
        parse(yaml.safe_dump(whole), "x.yaml", [])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pipeline.policy", "pddrt.policy.route:Naive"), ("links.wan.rate", 0),
        ("pipeline.relay_above", 0.9), ("pipeline.relay_above", "90 %"),
        ("workload.prompt_tokens", {"min": 5, "max": 9}),
        ("sampling.stop", "end"), ("sampling.stop", ["end", "\n"]), ("sampling.logprobs", 2),
        ("instances.p.chip", "h100-sxm"), ("slo.ttft", "3 s"), ("links.wan.jitter", "1 ms"),
        ("instances.p.step_time", {"prefill_tokens_per_s": 1000.0, "decode_step": "5 ms"}),
        ("faults", [{"do": "crash", "instance": "p", "for": "3 s",
                     "on": {"event": "Routed", "request": "s0.0"}}]),
    ],
)  # fmt: skip
def test_what_the_scenario_takes_the_schema_takes(path: str, value: Any) -> None:
    whole = put(path, value)
    parse(yaml.safe_dump(whole), "x.yaml", [])
    jsonschema.validate(whole, schema())


def test_a_field_that_must_be_there_is_needed() -> None:
    needed = {path for table in tables() for path, entry in table.rows if entry.needed}
    assert {"name", "instances", "workload", "links.NAME.between", "workload.kind"} <= needed
    assert not needed & {"seed", "links", "pipeline.policy"}


def test_inherited_fields_keep_their_meaning() -> None:
    from pddrt.faults import LinkSlow

    told = {entry.name: entry.meaning for entry in entries(LinkSlow)}
    assert told["link"] == "Which link."
    assert told["for"].startswith("How long")
