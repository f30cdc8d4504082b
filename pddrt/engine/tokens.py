"""Tokens: text to ids, and ids back to text as they come.

Two tokenizers, one for the tiny models (bytes), one around a tokenizer of transformers, which the
caller has loaded (`models.load_tokenizer`); and the detokenizer that turns a stream of ids into a
stream of text.

Owns nothing. Imports neither torch nor transformers, so that whoever only counts and shows tokens
needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pddrt.errors import BadInput

Chat = str | Sequence[Mapping[str, str]]
"""One user message, or a conversation of {"role": ..., "content": ...}."""


class Tokenizer(Protocol):
    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: tuple[int, ...]
    """Ids that are no text, those of the end of sequence among them."""

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, as the model wants a prompt to begin."""
        ...

    def chat(self, messages: Chat) -> list[int]:
        """Ids of a conversation up to where the answer begins; its plain text without a template.

        Raises BadInput where the template does not allow such a conversation.
        """
        ...

    def follow_up(self, text: str, *, after_eos: bool) -> list[int]:
        """Ids of the next user message, to follow those of a conversation and its last answer.

        So the next turn's prompt begins with the very ids of this one. `after_eos`: the answer
        ended with one of `eos_ids`, which is then not repeated. Raises BadInput as `chat`.
        """
        ...

    def encode_within(self, text: str) -> list[int]:
        """Ids of a text in the middle of a conversation: nothing is put before or behind them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens have none."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8, then come three special tokens."""

    BOS, EOS, PAD = 256, 257, 258
    vocab_size = 259
    eos_ids: tuple[int, ...] = (EOS,)
    special_ids: tuple[int, ...] = (BOS, EOS, PAD)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    encode_within = encode

    def chat(self, messages: Chat) -> list[int]:
        return self.encode(_plain(messages))

    def follow_up(self, text: str, *, after_eos: bool) -> list[int]:
        return self.encode("\n" + text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.BOS).decode("utf-8", errors="replace")


class ModelTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocab_size: int = len(tokenizer)
        self.special_ids = tuple(sorted({*tokenizer.all_special_ids, *eos_ids}))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def chat(self, messages: Chat) -> list[int]:
        if not self._tokenizer.chat_template:
            return self.encode(_plain(messages))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode_within(self._rendered(messages))

    def follow_up(self, text: str, *, after_eos: bool) -> list[int]:
        if not self._tokenizer.chat_template:
            return self.encode_within("\n" + text)
        # What the template puts after an answer does not depend on the answer: take a marked one.
        roles, answer = ("user", "assistant", "user"), "<<answer>>"
        contents = ("?", answer, text)
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        _, found, rest = self._rendered(messages).partition(answer)
        if not found:
            raise BadInput("the model's chat template does not repeat answers: no second turn")
        ids = self.encode_within(rest)
        return ids[1:] if after_eos and ids[0] in self.eos_ids else ids

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise BadInput(
                f"the model's chat template refuses this conversation: {error}"
            ) from error
        return text

    def encode_within(self, text: str) -> list[int]:
        """Without what a tokenizer may put at the beginning of a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Detokenizer:
    """Ids one by one to text, in pieces that never have to be taken back.

    What a tokenizer makes of an id depends on those before it (spaces, bytes of one character), so
    each piece is the difference of two decodings that begin at the same earlier id. What may still
    change, an unfinished character at the end, is held back. All pieces joined are `decode` of all
    ids.
    """

    # Replacement characters at the end that may still become something else: decoders with byte
    # fallback give one for each byte of an unfinished character (3) and of the one before it (4).
    _HELD_MAX = 7

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._from = 0  # the present decoding begins at this id
        self._next = 0  # and the one after the next piece at this
        self._shown = 0  # characters of the present decoding that are out

    def push(self, token_id: int) -> str:
        """The text that `token_id` settles; often the empty string."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._from :])
        held = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        settled = len(text) - min(held, self._HELD_MAX)
        if settled <= self._shown:
            return ""
        piece = text[self._shown : settled]
        self._shown = settled
        if not held:
            self._from, self._next = self._next, len(self._ids)
            self._shown = len(self._decode(self._ids[self._from :]))
        return piece

    def finish(self) -> str:
        """What was held back; an unfinished character is U+FFFD."""
        text = self._decode(self._ids[self._from :])
        piece, self._shown = text[self._shown :], len(text)
        return piece


def _plain(messages: Chat) -> str:
    return messages if isinstance(messages, str) else "\n".join(m["content"] for m in messages)
