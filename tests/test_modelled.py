"""Runs on modelled engines: a real model's sizes, no weights, no torch; and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from pddrt.chips import ModelShape
from pddrt.engine.model import ModelEngine, oracle
from pddrt.engine.models import load, load_tokenizer
from pddrt.engine.outline import outline, outline_tokenizer
from pddrt.engine.tokens import ByteTokenizer, Tokenizer
from pddrt.errors import BadInput, CannotRun, RunFailed
from pddrt.run import Result, Run
from pddrt.scenario import load as load_scenario
from pddrt.scenario import parse
from pddrt.types import Run as Slots
from pddrt.types import Sampling

from .cluster import VOCAB
from .cluster import oracle as stepped_oracle
from .test_models import SHAPE, save, with_template

ROOT = Path(__file__).parent.parent
SCENARIO = """
name: modelled
seed: 3
clock: virtual
model: {model}
dtype: bfloat16
links:
  rdma: {{between: [a, a], rate: 10 Gbit/s, delay: 5 us}}
  wan:  {{between: [a, b], rate: 8 Mbit/s, delay: 10 ms, jitter: 1 ms}}
instances:
  p0:   {{role: prefill, site: a, engine: model, chunk_tokens: 64, kv_memory: 4 MiB, chip: &c {{flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}}}
  rld0: {{role: relay,   site: a, engine: model, kv_memory: 4 MiB, chip: *c}}
  md0:  {{role: main,    site: b, engine: model, kv_memory: 4 MiB, step_time: {{prefill_tokens_per_s: 5000, decode_step: 4 ms}}}}
pipeline: {{policy: pdd, relay_above: 30 ms}}
workload: {{kind: sessions, sessions: 5, turns: 2, rate: 10/s, think: 50 ms, output_tokens: 20,
           prompts: random, prompt_tokens: {{min: 100, max: 200}}}}
"""  # noqa: E501
LLAMA = {**SHAPE, "model_type": "llama", "num_hidden_layers": 3, "eos_token_id": [5, 257]}


def prepared(tmp_path: Path, *overrides: str, model: str = "tiny", name: str = "run") -> Run:
    text = SCENARIO.format(model=model)
    the_run = Run(parse(text, "m.yaml", overrides), out=tmp_path / name, verify=True)
    the_run.prepare()
    return the_run


def lines(result: Result, file: str = "requests.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / file).read_text().splitlines()]


def model_folder(folder: Path, **changes: Any) -> Path:
    """A config and nothing else."""
    folder.mkdir()
    fields = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


# -- runs ------------------------------------------------------------------------------------------


def test_the_shipped_scenario_never_loads_torch(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'safetensors'}"
    program = f"import atexit, sys; atexit.register(lambda: print(*{heavy} & set(sys.modules)))\n"
    program += "from pddrt.cli import main; main()"
    command = [sys.executable, "-c", program, "run", "scenarios/modelled.yaml", "--verify"]
    command += ["--json", "--out", str(tmp_path / "run"), "--set", "workload.sessions=40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, heavy_ones = done.stdout.splitlines()
    assert heavy_ones == ""
    summary = json.loads(text)
    assert summary["requests"]["finished"] == 160
    assert summary["parity"] == {"checked": 160, "equal": 160, "near_ties": 0, "different": 0}
    assert summary["handoffs"]["count"] > 20


def test_the_shipped_scenario_plans_2000_requests(tmp_path: Path) -> None:
    the_run = Run(load_scenario(ROOT / "scenarios" / "modelled.yaml"), out=tmp_path / "run")
    the_run.prepare()
    assert the_run.expected_requests == 2000


def test_kv_has_the_models_size_though_there_are_no_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    result = prepared(tmp_path, "workload.turns=1", model=str(folder)).execute()
    result.raise_for_status()
    token = 3 * 2 * 2 * 16 * 2  # layers, K and V, heads, head dim, bytes
    sent = result.summary["tokens"]["prompt"] - result.summary["tokens"]["cached_main"]
    carried = sum(e["bytes"] for e in lines(result, "events.jsonl") if e["event"] == "KVReceived"
                  and e["instance"] == "md0")  # fmt: skip
    assert carried == sent * token
    ids = {i for r in lines(result) for i in r["output_ids"]}
    assert not ids & {5, 257}, "ends of sequences are never drawn"
    assert max(ids) < 259, "ids that bytes can show"


def test_both_clocks_give_the_same_ids_and_steps_take_their_charge(tmp_path: Path) -> None:
    virtual = prepared(tmp_path).execute()
    wall = prepared(tmp_path, "clock=wall", name="wall").execute()
    for result in (virtual, wall):
        result.raise_for_status()
        assert result.summary["parity"]["equal"] == 10
        spans = [
            (round(1e9 * e["t_s"]) - round(1e9 * e["start_s"]), e["prefill_tokens"])
            for e in lines(result, "events.jsonl")
            if e["event"] == "Step" and e["instance"] == "md0"
        ]
        assert min(took for took, _ in spans) >= 4_000_000
    assert {r["id"]: r["output_ids"] for r in lines(virtual)} == {
        r["id"]: r["output_ids"] for r in lines(wall)
    }


def test_sampled_answers_depend_on_the_seed_and_are_verified_with_it(tmp_path: Path) -> None:
    hot = "sampling.temperature=1.0"
    runs = [
        prepared(tmp_path, hot, name="hot").execute(),
        prepared(tmp_path, hot, "pipeline.policy=naive", name="naive").execute(),
        prepared(tmp_path, name="greedy").execute(),
    ]
    for result in runs:
        result.raise_for_status()
        assert result.summary["parity"]["equal"] == 10
    ids = [{r["id"]: r["output_ids"] for r in lines(result)} for result in runs]
    assert ids[0] == ids[1] != ids[2]


def test_wrong_kv_reads_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelEngine.write_kv

    def swapped(engine: ModelEngine, runs: list[Slots], payload: bytes) -> None:
        token = engine.layout.bytes_per_token
        rest = bytes(payload)[2 * token :]
        real(engine, runs, bytes(payload)[token : 2 * token] + bytes(payload)[:token] + rest)
        real(engine, [Slots(runs[0].slot, 1)], bytes(token))

    monkeypatch.setattr(ModelEngine, "write_kv", swapped)
    result = prepared(tmp_path, "workload.turns=1").execute()
    with pytest.raises(RunFailed, match="5 of 5 requests differ from the reference"):
        result.raise_for_status()
    assert result.summary["parity"]["different"] == 5
    assert all(r["parity"]["differences"] >= 10 for r in lines(result))


def test_the_oracle_is_what_an_engine_steps_to() -> None:
    prompt = list(b"what is all this?")
    answer = stepped_oracle(prompt, 30)
    assert oracle(prompt, answer, Sampling(), vocab=VOCAB) == answer
    bent = [*answer[:10], answer[10] ^ 1, *answer[11:]]
    said = oracle(prompt, bent, Sampling(), vocab=VOCAB)
    assert said[:11] == answer[:11]
    assert said[11:] != answer[11:], "each position is judged by what really came before it"


@pytest.mark.parametrize("override", ["instances.p0.chip=", "instances.md0.step_time=real"])
def test_on_the_wall_clock_too_a_modelled_step_needs_a_time(override: str) -> None:
    text = SCENARIO.format(model="tiny").replace("clock: virtual", "clock: wall")
    text = text.replace(", chip: *c", "") if "chip" in override else text
    with pytest.raises(BadInput, match="with engine: model"):
        parse(text, "m.yaml", [] if "chip" in override else [override])


# -- outlines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SHAPE),
        transformers.Qwen2Config(**SHAPE),
        transformers.Qwen3Config(**SHAPE, head_dim=24),
        transformers.MistralConfig(**SHAPE, sliding_window=None),
        None,
    ],
    ids=["llama", "qwen2", "qwen3", "mistral", "tiny-qwen2"],
)
def test_an_outline_says_what_loading_would(
    tmp_path: Path, config: transformers.PretrainedConfig | None
) -> None:
    name = str(save(tmp_path / "model", config)) if config else "tiny-qwen2"
    loaded, said = load(name, "float32"), outline(name, "float32")
    theirs, ours = loaded.layout, said.layout
    assert (ours.layers, ours.kv_heads, ours.head_dim, ours.dtype) == (
        theirs.layers, theirs.kv_heads, theirs.head_dim, theirs.dtype,
    )  # fmt: skip
    assert ours.bytes_per_token == theirs.bytes_per_token == said.shape.kv_bytes_per_token
    assert (said.max_context, said.eos_ids) == (loaded.max_context, loaded.eos_ids)
    assert said.shape == ModelShape.from_config(loaded.module.config.to_dict(), "float32")
    assert said.vocab_size == loaded.module.config.vocab_size
    assert said.fingerprint != loaded.fingerprint, "modelled KV is no model's"
    assert outline(name, "bfloat16").fingerprint == said.fingerprint


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": None}, "llama models.*no num_hidden_layers"),
        ({"hidden_size": "64"}, "no hidden_size"),
        ({"num_local_experts": 8}, "they have experts"),
        ({"kv_lora_rank": 512}, "KV is compressed"),
        ({"sliding_window": 4096}, "not every layer keeps all KV"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "not every layer"),
        ({"model_type": "qwen3"}, "qwen3 models.*no head_dim"),
    ],
)
def test_what_a_config_does_not_tell_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    folder = model_folder(tmp_path / "model", **changes)
    with pytest.raises(CannotRun, match=why):
        outline(str(folder), "bfloat16")


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    window = {"sliding_window": 4096, "use_sliding_window": False}
    folder = model_folder(tmp_path / "model", **window)
    assert outline(str(folder), "bfloat16").layout.layers == 3


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_one_message(tmp_path: Path, text: str) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text(text)
    with pytest.raises(CannotRun, match=r"config\.json is broken: .") as refused:
        outline(str(folder), "bfloat16")
    assert "\n" not in str(refused.value)


def test_a_wheels_model_that_is_not_here_is_not_fetched(home: Path) -> None:
    with pytest.raises(CannotRun, match="pddrt model pull smollm2-135m"):
        outline("smollm2-135m", "bfloat16")
    assert not home.exists()


# -- tokenizers ------------------------------------------------------------------------------------


def assert_alike(ours: Tokenizer, theirs: Tokenizer) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.special_ids == theirs.special_ids
    assert ours.eos_ids == theirs.eos_ids
    for text in ("Hello, world\n\n  x", "é你好🙂", "", "a<user>b$"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_within(text) == theirs.encode_within(text)
        assert ours.chat(text) == theirs.chat(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        for after_eos in (True, False):
            assert ours.follow_up(text, after_eos=after_eos) == theirs.follow_up(
                text, after_eos=after_eos
            )


@pytest.mark.parametrize("template", [True, False])
def test_the_tokenizer_is_transformers_own(tmp_path: Path, template: bool) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer: Any = with_template()._tokenizer
    tokenizer.add_special_tokens({"eos_token": "$", "bos_token": "<s>"})
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    ours, theirs = outline_tokenizer(str(folder)), load_tokenizer(str(folder))
    assert_alike(ours, theirs)
    if template:
        with pytest.raises(BadInput, match="no system"):
            ours.chat([{"role": "system", "content": "be good"}])


def test_a_template_may_stand_in_the_settings(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer: Any = with_template()._tokenizer
    tokenizer.save_pretrained(folder)
    (template,) = folder.glob("*.jinja")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = [{"name": "default", "template": template.read_text()}]
    settings["bos_token"] = {"content": "a", "lstrip": False}
    template.unlink()
    file.write_text(json.dumps(settings))
    ours = outline_tokenizer(str(folder))
    assert ours.decode(ours.chat("hi")) == "<user>hi$<assistant>"
    assert ours.special_ids == tuple(sorted({*ours.encode("a"), 5, 257}))


def test_without_a_tokenizer_text_is_bytes_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert isinstance(outline_tokenizer(str(folder)), ByteTokenizer)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CannotRun, match="its tokenizer cannot be loaded"):
        outline_tokenizer(str(folder))
