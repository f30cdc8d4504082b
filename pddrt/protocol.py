"""The handoff protocol: what each side of a request may do, and when. No I/O, no clock.

Positions are absolute: the prompt is [0, m), the first answer token x0 is at m. KV for [0, p)
together with the id at p is all that is needed to go on from p; that pair is what every message
means.

    Relay side (RLD)
    state      event                   next
    RECEIVING  KV whole and x0 known   DECODING   Decode
    RECEIVING  ... and MD was ready    HANDED     SendIds
    RECEIVING  ... and x0 ends it      FINISHED
    DECODING   an id is made           DECODING
    DECODING   an id ends the answer   FINISHED
    DECODING   MD ready, no step runs  HANDED     SendIds
    DECODING   MD ready, in a step     FREEZING
    FREEZING   an id is made           HANDED     SendIds
    FREEZING   an id ends the answer   FINISHED

    Main side (MD)
    state      event                   next
    RECEIVING  KV whole, relayed       READY      Ready
    RECEIVING  KV whole and x0 known   DECODING   Decode
    RECEIVING  ... and x0 ends it      FINISHED
    READY      the last ids            DECODING   Decode
    DECODING   an id is made           DECODING
    DECODING   an id ends the answer   FINISHED

Any state may be left for CLOSED from outside (cancel, deadline, the gateway's close); no event
leads out of HANDED, FINISHED or CLOSED. One-shot handoff: MD's first step extends over all ids the
relay made, x0 included, and yields the next.

Mistakes of the peer (a field of the wrong type, a range twice, ids that do not join) raise
BadFrame; the shell fails that request. Mistakes of our own are asserts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum, auto
from typing import Any

import xxhash

from pddrt.errors import BadFrame
from pddrt.frames import Frame
from pddrt.types import DTYPE_BYTES, FinishReason, KVLayout, Sampling

# -- messages --------------------------------------------------------------------------------------


def _text(value: Any) -> bool:
    return type(value) is str


def _name_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _flag(value: Any) -> bool:
    return type(value) is bool


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _letter(value: Any) -> bool:
    return value in ("P", "R", "M")


def _reason(value: Any) -> bool:
    return value in ("stop", "length", "rejected", "aborted")


def _sampling(value: Any) -> bool:
    if type(value) is not list or len(value) != 4:
        return False
    temperature, top_k, top_p, seed = value
    numbers = all(type(v) in (int, float) and math.isfinite(v) for v in (temperature, top_p))
    return numbers and temperature >= 0 and 0 < top_p <= 1 and _count(top_k) and _count(seed)


def _layout(value: Any) -> bool:
    return type(value) is list and [type(v) for v in value] == [str, int, int, int, str]


MESSAGES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    # between any two
    "open": {"purpose": _text},
    "hello": {
        "role": _text,
        "kv_tokens": _count,
        "page_tokens": _positive,
        "caching": _flag,
        "max_context": _count,
        "bytes_per_token": _positive,
    },
    # client and gateway
    "submit": {
        "request": _text,
        "text": _text,
        "system": _text,
        "answer": _name_or_none,
        "raw": _flag,
        "max_tokens": _positive,
        "sampling": _sampling,
    },
    "cancel": {"request": _text},
    "accepted": {"request": _text},
    "answer": {"request": _text, "start": _count, "source": _letter, "text": _text},
    "end": {"request": _text, "reason": _reason, "detail": _text},
    # gateway and instances
    "prefill": {
        "request": _text,
        "relay": _name_or_none,
        "main": _text,
        "max_tokens": _positive,
        "sampling": _sampling,
        "lease_ns": _count,
    },
    "close": {"request": _text, "answered": _flag},
    "learn": {"request": _text, "prompt_tokens": _count},
    "failed": {"request": _text, "detail": _text},
    "tokens": {"request": _text, "start": _count, "source": _letter},
    # prefill and decoders; `whole` goes to the gateway too, without an epoch
    "offer": {
        "request": _text,
        "epoch": _count,
        "layout": _layout,
        "digest": _text,
        "max_tokens": _positive,
        "sampling": _sampling,
        "gateway": _text,
        "relay": _name_or_none,
        "main": _text,
    },
    "admit": {"request": _text, "epoch": _count, "have": _count},
    "refuse": {"request": _text, "epoch": _count, "reason": _text},
    "kv": {"request": _text, "epoch": _count, "start": _count, "end": _count},
    "first": {"request": _text, "epoch": _count, "position": _count, "id": _token},
    "withdraw": {"request": _text, "epoch": _count},
    "whole": {"request": _text},
    # relay and main
    "ready": {"request": _text},
    "ids": {"request": _text, "start": _count, "last": _flag},
}
"""Every kind of frame, and what its fields must be. Ids and KV travel as payload."""


def check_fields(frame: Frame) -> None:
    """Raises BadFrame where a field is missing or is not what MESSAGES says; the frame is one of
    them.
    """
    for name, valid in MESSAGES[frame.kind].items():
        if not valid(frame[name]):
            raise BadFrame(f"frame {frame.kind!r} has {name} {frame[name]!r:.80}")


# -- what a request is, and where it ends ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends: an end-of-sequence id, or `max_tokens` answer tokens."""

    prompt_len: int
    max_tokens: int
    eos_ids: frozenset[int]

    @property
    def kv_tokens(self) -> int:
        """KV slots that the longest answer needs: the last token's KV is never computed."""
        return self.prompt_len + self.max_tokens - 1


def finish(limits: Limits, position: int, token: int) -> FinishReason | None:
    """Why the answer ends with `token` at absolute `position`, or None if it goes on.

    The one place where this is decided; every role that makes a token calls it, P for the first one
    too.
    """
    if token in limits.eos_ids:
        return "stop"
    if position + 1 - limits.prompt_len >= limits.max_tokens:
        return "length"
    return None


def prompt_digest(fingerprint: str, ids: Sequence[int]) -> str:
    """xxh3-128 over the model's fingerprint and the ids: the same in every process."""
    digest = xxhash.xxh3_128(fingerprint.encode())
    digest.update(array("I", ids).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What P tells a decoder before any KV: whose it is, what it is, who else is in it.

    `epoch` numbers P's transfers; KV and answers that name another epoch are of another transfer.
    """

    request: str
    epoch: int
    layout: KVLayout
    prompt: tuple[int, ...]
    digest: str
    max_tokens: int
    sampling: Sampling
    gateway: str
    relay: str | None
    main: str

    def fields(self) -> dict[str, Any]:
        """Header fields of an `offer` frame; the prompt's ids are its payload."""
        return {
            "request": self.request,
            "epoch": self.epoch,
            "layout": astuple(self.layout),
            "digest": self.digest,
            "max_tokens": self.max_tokens,
            "sampling": astuple(self.sampling),
            "gateway": self.gateway,
            "relay": self.relay,
            "main": self.main,
        }

    @classmethod
    def parse(cls, fields: Mapping[str, Any], prompt: Sequence[int]) -> Manifest:
        """Inverse of `fields`. Raises BadFrame if something is missing."""
        try:
            values = dict(fields)
            values["layout"] = KVLayout(*values["layout"])
            values["sampling"] = Sampling(*values["sampling"])
            return cls(prompt=tuple(prompt), **values)
        except (KeyError, TypeError) as error:
            raise BadFrame(f"not a manifest: {error}") from None

    def objection(self, mine: KVLayout) -> str | None:
        """Why a decoder with layout `mine` must not take this KV, by name; None if it may.

        KV of another dtype is converted when it arrives; of another page size it needs nothing,
        since it travels by positions.
        """
        if self.layout.dtype not in DTYPE_BYTES:
            return f"dtype {self.layout.dtype} of the KV is none of {', '.join(DTYPE_BYTES)}"
        for what in ("fingerprint", "layers", "kv_heads", "head_dim"):
            theirs, own = getattr(self.layout, what), getattr(mine, what)
            if theirs != own:
                return f"{what} {theirs} of the KV does not match {own}"
        if self.digest != prompt_digest(mine.fingerprint, self.prompt):
            return "the digest does not match the prompt"
        return None


class KVAssembly:
    """Which positions of [0, length) have arrived. Takes any partition, each position exactly
    once.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._missing: list[tuple[int, int]] = [(0, length)] if length else []

    @property
    def whole(self) -> bool:
        return not self._missing

    def claim(self, start: int, end: int) -> None:
        """Books [start, end) as arrived. Raises BadFrame if any of it lies outside or came
        before.
        """
        for at, (low, high) in enumerate(self._missing):
            if low <= start < end <= high:
                rest = [(low, start), (end, high)]
                self._missing[at : at + 1] = [r for r in rest if r[0] < r[1]]
                return
        if not 0 <= start == end <= self.length:
            raise BadFrame(f"KV of [{start}, {end}) is outside [0, {self.length}) or came twice")


@dataclass(frozen=True, slots=True)
class Decode:
    """Step from here on: `ids` continue the prompt; the last one has no KV yet."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell the relay that the main decoder holds the whole KV."""


@dataclass(frozen=True, slots=True)
class SendIds:
    """Send ids of [start, start + len(ids)) to the main decoder; `last`: and nothing after them."""

    start: int
    ids: tuple[int, ...]
    last: bool


Action = Decode | Ready | SendIds


class State(Enum):
    RECEIVING = auto()
    READY = auto()
    DECODING = auto()
    FREEZING = auto()
    HANDED = auto()
    FINISHED = auto()
    CLOSED = auto()


FINAL = frozenset({State.HANDED, State.FINISHED, State.CLOSED})


@dataclass(slots=True)
class _Side:
    """What both decoders share: KV that arrives, ids that are known, an end."""

    limits: Limits
    state: State = State.RECEIVING
    ids: list[int] = field(default_factory=list)
    """Answer ids known here, from x0 on."""
    kv: KVAssembly = field(init=False)

    def __post_init__(self) -> None:
        self.kv = KVAssembly(self.limits.prompt_len)

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def close(self) -> None:
        """The request is over for this side, whatever it was doing."""
        if not self.final:
            self.state = State.CLOSED

    def _decode(self) -> list[Action]:
        """The KV is whole and x0 known: on from there, unless x0 is all there is."""
        if finish(self.limits, self.limits.prompt_len, self.ids[0]):
            self.state = State.FINISHED
            return []
        self.state = State.DECODING
        return [Decode(tuple(self.ids))]

    def _book(self, token: int) -> FinishReason | None:
        self.ids.append(token)
        reason = finish(self.limits, self.limits.prompt_len + len(self.ids) - 1, token)
        if reason:
            self.state = State.FINISHED
        return reason


@dataclass(slots=True)
class RelaySide(_Side):
    """The relay decoder's half. `in_step` is given with events that need to know of a running
    step.
    """

    main_is_ready: bool = False

    def on_kv(self, start: int, end: int) -> list[Action]:
        if self.state is not State.RECEIVING:
            raise BadFrame(f"KV of [{start}, {end}) for a request that is {self.state.name}")
        self.kv.claim(start, end)
        return self._start()

    def on_first(self, token: int) -> list[Action]:
        if self.state is not State.RECEIVING or self.ids:
            raise BadFrame("a second first token")
        self.ids.append(token)
        return self._start()

    def _start(self) -> list[Action]:
        if not self.kv.whole or not self.ids:
            return []
        actions = self._decode()
        return self._hand_over() if self.main_is_ready and actions else actions

    def on_main_ready(self, in_step: bool) -> list[Action]:
        if self.main_is_ready:
            raise BadFrame("the main decoder is ready twice")
        self.main_is_ready = True
        if self.state is not State.DECODING:
            return []  # RECEIVING: remembered; final: too late to matter
        if in_step:
            self.state = State.FREEZING
            return []
        return self._hand_over()

    def on_token(self, token: int) -> tuple[list[Action], FinishReason | None]:
        assert self.state in (State.DECODING, State.FREEZING), self.state
        freezing = self.state is State.FREEZING
        reason = self._book(token)
        return (self._hand_over() if freezing and not reason else []), reason

    def _hand_over(self) -> list[Action]:
        self.state = State.HANDED
        return [SendIds(self.limits.prompt_len, tuple(self.ids), last=True)]


@dataclass(slots=True)
class MainSide(_Side):
    """The main decoder's half. Not `relayed` (pipeline P-MD): it starts from P's first token."""

    relayed: bool = True

    def on_kv(self, start: int, end: int) -> list[Action]:
        if self.state is not State.RECEIVING:
            raise BadFrame(f"KV of [{start}, {end}) for a request that is {self.state.name}")
        self.kv.claim(start, end)
        return self._start()

    def on_first(self, token: int) -> list[Action]:
        if self.relayed or self.ids or self.state is not State.RECEIVING:
            raise BadFrame("a first token that nobody waits for")
        self.ids.append(token)
        return self._start()

    def _start(self) -> list[Action]:
        if not self.kv.whole:
            return []
        if self.relayed:
            self.state = State.READY
            return [Ready()]
        return self._decode() if self.ids else []

    def on_ids(self, start: int, ids: Sequence[int], last: bool) -> list[Action]:
        """Ids from the relay; nothing is decoded before the KV is whole."""
        if self.state is not State.READY:
            raise BadFrame(f"ids for a request that is {self.state.name}")
        if start != self.limits.prompt_len + len(self.ids) or not ids:
            raise BadFrame(
                f"{len(ids)} ids from {start}; expected some from "
                f"{self.limits.prompt_len + len(self.ids)}"
            )
        if any(finish(self.limits, position, token) for position, token in enumerate(ids, start)):
            raise BadFrame(f"{len(ids)} ids from {start} go past the end of the answer")
        self.ids.extend(ids)
        return self._decode() if last else []

    def on_token(self, token: int) -> FinishReason | None:
        assert self.state is State.DECODING, self.state
        return self._book(token)
