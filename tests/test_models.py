"""Models: what a name leads to, what is refused, and ids that become text never taken back."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pddrt.engine import models, store
from pddrt.engine.models import Detokenizer, Tokenizer, load, load_tokenizer
from pddrt.engine.tokens import ByteTokenizer, ModelTokenizer
from pddrt.errors import BadInput, CannotRun
from pddrt.types import DTYPE_BYTES

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def greedy(model: models.LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` ids, by plain transformers."""
    made = model.module.generate(
        torch.tensor([list(prompt)]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    ids: list[int] = made[0, len(prompt) :].tolist()
    return ids


def logits(model: models.LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    return model.module(input_ids=torch.tensor([list(ids)])).logits[0]


def save(folder: Path, config: transformers.PretrainedConfig, seed: int = 0) -> Path:
    """A model folder with random weights."""
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# -- tiny ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.TINY)
def test_a_tiny_model_speaks_and_does_not_repeat_itself(name: str) -> None:
    model = load(name, "float32")
    assert model.module.config._attn_implementation == "eager"
    for prompt in ("Hello, world", "a", "def f(x): return x"):
        ids = greedy(model, prompt.encode(), 128)
        assert len(set(ids)) >= 20, f"{prompt!r}: only {sorted(set(ids))}"
        assert max(ids) < ByteTokenizer.BOS, "a special token was chosen"


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("tiny", "104345b0e37bb93f"),
        ("tiny-qwen2", "fc4ab95e97c8fb62"),
    ],
)
def test_tiny_weights_are_the_same_bits_on_every_machine(name: str, digest: str) -> None:
    state = load(name, "float32").module.state_dict()
    found = xxhash.xxh3_64()
    for key in sorted(state):
        found.update(key.encode() + state[key].numpy().tobytes())
    assert found.hexdigest() == digest


def test_tiny_qwen2_has_what_tiny_has_not() -> None:
    llama, qwen = load("tiny", "float32").module, load("tiny-qwen2", "float32").module
    assert not any(key.endswith("bias") for key in llama.state_dict())
    biases = [value for key, value in qwen.state_dict().items() if key.endswith("bias")]
    assert len(biases) == 2 * 3
    assert all(bias.abs().max() > 0.1 for bias in biases)
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    assert qwen.lm_head.weight is qwen.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_loads_and_sets_the_layout(dtype: str) -> None:
    model = load("tiny", dtype)
    assert {str(p.dtype) for p in model.module.parameters()} == {f"torch.{dtype}"}
    layout = model.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (2, 2, 16, dtype)
    assert layout.bytes_per_token == 2 * 2 * 2 * 16 * DTYPE_BYTES[dtype]
    assert layout.fingerprint == model.fingerprint == load("tiny", "float64").fingerprint
    assert model.max_context == 4096
    assert model.eos_ids == (ByteTokenizer.EOS,)
    assert not any(p.requires_grad for p in model.module.parameters())


def test_what_does_not_exist_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"int8.*bfloat16"):
        load("tiny", "int8")
    with pytest.raises(BadInput, match="gpu0"):
        load("tiny", device="gpu0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(CannotRun, match="device cuda"):
        load("tiny", device="cuda")


# -- folders ---------------------------------------------------------------------------------------


def test_a_folder_loads_as_it_was_saved(tmp_path: Path) -> None:
    folder = save(tmp_path / "qwen", transformers.Qwen2Config(**SHAPE))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    model = load(str(folder), "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = list(b"the same")
    assert torch.equal(logits(model, ids), plain(input_ids=torch.tensor([ids])).logits[0])
    assert model.eos_ids == (257, 259)
    assert model.max_context == 512
    assert model.parameters == sum(p.numel() for p in plain.parameters())


def test_head_dim_is_asked_of_the_model_and_not_computed(tmp_path: Path) -> None:
    folder = save(tmp_path / "qwen3", transformers.Qwen3Config(**SHAPE, head_dim=24))
    layout = load(str(folder)).layout
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (2, 2, 24)


def test_a_model_in_several_files_loads(tmp_path: Path) -> None:
    folder = save(tmp_path / "one", transformers.LlamaConfig(**SHAPE))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    files = store.weight_files(tmp_path / "many")
    assert len(files) > 1
    many = load(str(tmp_path / "many"), "float32")
    assert torch.equal(logits(many, b"abc"), logits(load(str(folder), "float32"), b"abc"))
    files[-1].unlink()
    with pytest.raises(CannotRun, match="not all of them"):
        load(str(tmp_path / "many"))


def test_the_fingerprint_is_that_of_the_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SHAPE)
    one = load(str(save(tmp_path / "one", config)), "float32")
    again = load(str(save(tmp_path / "again", config)), "bfloat16")
    other = load(str(save(tmp_path / "other", config, seed=1)), "float32")
    assert one.fingerprint == again.fingerprint != other.fingerprint

    weights = tmp_path / "again" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load(str(tmp_path / "again")).fingerprint != one.fingerprint, "one bit has changed"

    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    config.save_pretrained(tmp_path / "one")
    assert load(str(tmp_path / "one")).fingerprint != one.fingerprint, (
        "positions are read otherwise"
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.MistralConfig(**SHAPE, sliding_window=32), "mistral.*sliding_window"),
        (transformers.Gemma2Config(**SHAPE, head_dim=16), "gemma2.*sliding_window, softcap"),
        (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=260), "bloom"),
        (
            transformers.DeepseekV3Config(
                **{**SHAPE, "num_key_value_heads": 4},
                moe_intermediate_size=32,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=2,
                kv_lora_rank=16,
                q_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
            ),
            "deepseek_v3.*K and V of one shape",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_attention_that_the_engine_cannot_serve_is_refused(
    tmp_path: Path, config: transformers.PretrainedConfig, why: str
) -> None:
    folder = save(tmp_path / "model", config)
    with pytest.raises(CannotRun, match=why):
        load(str(folder))


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def one_weight_less(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))


def unknown_type(folder: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = {"model_type": "homemade", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('code of a model was run')")


@pytest.mark.parametrize(
    "damage",
    [
        broken_json,
        no_config,
        no_weights,
        empty_weights,
        cut_weights,
        one_weight_less,
        other_shape,
        unknown_type,
    ],
)
def test_a_damaged_folder_is_one_message(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = save(tmp_path / "model", transformers.LlamaConfig(**SHAPE))
    damage(folder)
    with pytest.raises(CannotRun, match=str(folder)) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/dev/null", "~/no/such/folder"])
def test_a_path_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(CannotRun, match="no such folder"):
        load(name)


@pytest.mark.parametrize("name", ["org/model", "modle", "a--b", "two words", ""])
def test_what_cannot_be_had_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for attempt in (load, load_tokenizer, models.pull):
        with pytest.raises(CannotRun, match=f"^model '?{name}") as caught:
            attempt(name)
        assert "\n" not in str(caught.value)


def test_the_hubs_cache_is_used_without_asking_the_hub(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repo = cache / "models--org--model"
    snapshot = save(repo / "snapshots" / ("0" * 40), transformers.LlamaConfig(**SHAPE))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    assert load("org/model").fingerprint == load(str(snapshot)).fingerprint
    listed = {model.name: model for model in models.known_models()}
    assert listed["org/model"].cached
    assert listed["tiny"].cached
    assert not listed["smollm2-135m"].cached
    # Half a model in the cache is none.
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(CannotRun, match="org/model"):
        load("org/model")


# -- wheels ----------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """The characters that stand for bytes 0 to 255 in byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[byte] for byte in range(256)]


def write_gguf(path: Path, model: transformers.LlamaForCausalLM) -> None:
    """`model` in float32 as GGUF, with a byte-level tokenizer that also knows "th" and "the"."""
    import gguf

    config, tokens = model.config, [*byte_alphabet(), "<s>", "</s>", "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    for key, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if "q_proj" in key or "k_proj" in key:
            # GGUF keeps the two halves that rotary embedding pairs next to each other.
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            half = array.shape[0] // heads // 2
            array = array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        writer.add_tensor(key, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, *files: tuple[str, Path]) -> Path:
    """`toy-model` 1.0 as a wheel that holds `files` (name inside, path)."""
    path = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, file in files:
            archive.write(file, name)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def toy_index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, store.Wheel, Path]:
    """A folder that serves a toy model's wheel, its entry for the store, the model as it was."""
    folder = tmp_path_factory.mktemp("index")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, "pad_token_id": None})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "original")
    write_gguf(folder / "toy.gguf", model)
    wheel = write_wheel(folder, ("toy_model/toy.gguf", folder / "toy.gguf"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    entry = store.Wheel("toy-model", "1.0", wheel.stat().st_size, digest, "toy_model/toy.gguf", 1)
    return folder, entry, folder / "original"


@pytest.fixture
def toy(
    toy_index: tuple[Path, store.Wheel, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> store.Wheel:
    """The store knows `toy`, and pip finds its wheel in a folder and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(toy_index[0]))
    monkeypatch.setitem(store.WHEELS, "toy", toy_index[1])
    return toy_index[1]


def entries(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def test_a_wheel_becomes_a_model_once(
    toy: store.Wheel, toy_index: tuple[Path, store.Wheel, Path], home: Path
) -> None:
    seen: list[tuple[str, float | None]] = []
    folder = models.pull("toy", lambda stage, done: seen.append((stage, done)))
    assert entries(home) == [".lock", "toy"], "the wheel and the GGUF file are gone"
    assert seen[-1] == ("converting (this happens once)", 1.0)
    fetched = [done for stage, done in seen if stage == "fetching toy" and done is not None]
    assert fetched == sorted(fetched)
    assert fetched[-1] == 1.0

    seen.clear()
    model = load("toy", "float32", progress=lambda stage, done: seen.append((stage, done)))
    assert seen == [], "nothing was left to do"
    original = load(str(toy_index[2]), "float32")
    assert torch.equal(logits(model, b"hello"), logits(original, b"hello"))
    assert model.eos_ids == (257,)
    tokenizer = load_tokenizer("toy")
    assert tokenizer.encode("the hat") == [259, *b" hat"]
    assert tokenizer.decode([259, *b" hat", 257]) == "the hat"
    assert {m.name: m.where for m in models.known_models()}["toy"] == str(folder)


def test_a_newer_conversion_replaces_the_old(
    toy: store.Wheel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.pull("toy")
    assert folder is not None
    (folder / "config.json").write_text("as the old way left it")
    monkeypatch.setitem(store.WHEELS, "toy", replace(toy, conversion=2))
    assert load("toy").layout.layers == 2
    assert entries(home) == [".lock", "toy"]


@pytest.mark.parametrize("at", [0.0, 0.25, 0.9, 1.0])
def test_an_interrupted_conversion_leaves_nothing(toy: store.Wheel, home: Path, at: float) -> None:
    def interrupt(stage: str, done: float | None) -> None:
        if stage.startswith("converting") and done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("toy", interrupt)
    assert entries(home) == [".lock"]


def test_what_a_killed_process_left_is_no_hindrance(toy: store.Wheel, home: Path) -> None:
    left = home / "models" / ".partial-toy" / "made"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    (left.parent / "wheel").mkdir()
    (left.parent / "wheel" / "half").write_text("")
    assert load("toy").layout.layers == 2
    assert entries(home) == [".lock", "toy"]


def test_two_processes_at_once_make_one_model(toy: store.Wheel, home: Path) -> None:
    code = f"from pddrt.engine import models, store; store.WHEELS['toy'] = store.{toy!r}; "
    code += "print(models.load('toy').fingerprint)"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    prints = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert prints[0] == prints[1] == load("toy").fingerprint + "\n"
    assert entries(home) == [".lock", "toy"]


def test_a_foreign_wheel_is_refused(
    toy: store.Wheel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.WHEELS, "toy", replace(toy, sha256="0" * 64))
    with pytest.raises(CannotRun, match=f"{toy.sha256}, not {'0' * 64}"):
        load("toy")
    assert entries(home) == [".lock"]


def test_a_wheel_that_is_not_to_be_had_is_named(
    toy: store.Wheel, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CannotRun, match=r"toy-model==1\.0: ERROR: No matching distribution"):
        load_tokenizer("toy")
    assert entries(home) == [".lock"]


def test_a_python_without_pip_is_named(
    toy: store.Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CannotRun, match="No module named pip"):
        load("toy")


def test_a_home_that_cannot_be_written_is_named(
    toy: store.Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDDRT_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CannotRun, match="cannot be made in"):
        load("toy")


def test_home_is_pddrt_home_or_the_xdg_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDDRT_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert store.home() == tmp_path / "a"
    monkeypatch.delenv("PDDRT_HOME")
    assert store.home() == tmp_path / "b" / "pddrt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert store.home() == tmp_path / "c" / ".cache" / "pddrt"


def test_the_default_model_answers() -> None:
    if not {m.name: m.cached for m in models.known_models()}[models.DEFAULT]:
        pytest.skip(f"{models.DEFAULT} is not here: `pddrt model pull {models.DEFAULT}` gets it")
    model, tokenizer = load(models.DEFAULT, "float32"), load_tokenizer(models.DEFAULT)
    assert model.layout.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert (model.max_context, model.eos_ids, tokenizer.eos_ids) == (8192, (2,), (2,))
    ids = greedy(model, tokenizer.chat("What is the capital of France?"), 8)
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert ids[-1] in model.eos_ids


# -- text ------------------------------------------------------------------------------------------


def byte_level() -> Tokenizer:
    """As GPT-2's: every id is some bytes, spaces belong to what follows."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    tokens = [*byte_alphabet(), "Ġt", "Ġth", "Ã©", "ðŁ"]
    fast = Fast(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("Ġ", "t"), ("Ġt", "h"), ("Ã", "©"), ("ð", "Ł")],
        )
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return ModelTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=fast), ())


def byte_fallback() -> Tokenizer:
    """As Llama 2's: characters, bytes for others, and a space in front that decoding drops."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers

    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghij", "é", "▁a"]
    fast = Fast(models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "a")], byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return ModelTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=fast), ())


TOKENIZERS = {
    "byte": ByteTokenizer(),
    "byte-level": byte_level(),
    "byte-fallback": byte_fallback(),
}
TEXTS = st.text(st.sampled_from("abeht é你好🙂🇫\n\u200d "), max_size=24)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(text=TEXTS)
def test_pieces_join_to_the_text_and_never_break_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    got = pieces(tokenizer, ids)
    assert "".join(got) == tokenizer.decode(ids) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in got)
    assert got[-1] == "", "a whole text leaves nothing held back"


@pytest.mark.parametrize("kind", ["byte", "byte-level"])
@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 255), max_size=24))
def test_pieces_of_any_ids_join_to_what_decode_gives(kind: str, ids: list[int]) -> None:
    assert "".join(pieces(TOKENIZERS[kind], ids)) == TOKENIZERS[kind].decode(ids)


def test_text_comes_as_soon_as_it_is_settled() -> None:
    assert pieces(ByteTokenizer(), "hé🙂".encode()) == ["h", "", "é", "", "", "", "🙂", ""]
    assert pieces(ByteTokenizer(), "é".encode()[:1]) == ["", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(ByteTokenizer(), [*b"ab", ByteTokenizer.EOS]) == ["a", "b", "", ""]


def test_garbage_is_not_held_back_for_ever() -> None:
    got = pieces(ByteTokenizer(), [0xFF] * 20)
    assert sum(map(len, got[:-1])) == 20 - 7


def with_template() -> ModelTokenizer:
    """Byte-level, with a template that writes <role> before messages and $ (its eos) after them."""
    fast = byte_level()._tokenizer  # type: ignore[attr-defined]
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}${% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return ModelTokenizer(fast, tuple(b"$"))


def test_chat_uses_the_models_template_and_begins_the_answer() -> None:
    tokenizer = with_template()
    assert tokenizer.decode(tokenizer.chat("hi")) == "<user>hi$<assistant>"
    with pytest.raises(BadInput, match="no system"):
        tokenizer.chat([{"role": "system", "content": "be good"}])


def test_without_a_template_a_chat_is_its_plain_text() -> None:
    plain = TOKENIZERS["byte-level"]
    assert plain.chat("hi") == plain.encode("hi")
    assert ByteTokenizer().chat([{"role": "user", "content": "hi"}]) == list(b"hi")
    for tokenizer in (plain, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.follow_up("more", after_eos=True)) == "\nmore"


@pytest.mark.parametrize("after_eos", [True, False])
def test_a_follow_up_continues_the_ids_of_the_conversation(after_eos: bool) -> None:
    tokenizer = with_template()
    history = tokenizer.chat("hi") + list(b"you" + b"$" * after_eos)
    whole = [("user", "hi"), ("assistant", "you"), ("user", "<<answer>> it")]
    assert history + tokenizer.follow_up("<<answer>> it", after_eos=after_eos) == tokenizer.chat(
        [{"role": role, "content": content} for role, content in whole]
    )


def test_a_template_without_answers_has_no_second_turn() -> None:
    tokenizer = with_template()
    tokenizer._tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(BadInput, match="no second turn"):
        tokenizer.follow_up("more", after_eos=True)


def test_a_name_that_nobody_knows_is_said_so_in_a_fresh_process(tmp_path: Path) -> None:
    """Nothing else has imported what the hub's library loads late."""
    command = [sys.executable, "-m", "pddrt.cli", "model", "pull", "nobody/knows-this"]
    env = {
        **os.environ,
        "PDDRT_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 3
    assert "pddrt: model nobody/knows-this: no known name, no folder" in done.stderr
    assert "Traceback" not in done.stderr
