"""What roles say to one another: every kind of frame, the KV manifest, and where an answer ends.

Positions are absolute: the prompt is [0, m), the first answer token x0 is at m. KV for [0, p)
together with the id at p is all that is needed to go on from p; that pair is what every message
means.

Whoever makes an id says what it follows: `chain` digests all answer ids before it. The gateway
passes on only what follows the ids that it has passed on, so that no stream can be woven from two
answers.

Mistakes of a peer raise BadFrame; the role fails the request that the frame speaks of.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import xxhash

from pddrt.errors import BadFrame
from pddrt.frames import Frame
from pddrt.types import DTYPE_BYTES, EIGHT_BIT, FinishReason, KVLayout, Logprobs, Sampling

MAX_STOP_IDS, MAX_STOPS, MAX_STOP_LENGTH = 64, 16, 1024
"""How many stop ids and stop strings a request may have, and how many characters one of these. Ids
that may not be drawn are so few that something is always left of a vocabulary."""
MAX_LOGPROBS = 20
"""Of so many ids may a request ask to be told the log-probability, as with OpenAI and vLLM."""

# -- messages --------------------------------------------------------------------------------------


def _text(value: Any) -> bool:
    return type(value) is str


def _name_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _flag(value: Any) -> bool:
    return type(value) is bool


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _letter(value: Any) -> bool:
    return value in ("P", "R", "M")


def _reason(value: Any) -> bool:
    return value in ("stop", "length", "rejected", "aborted")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list(value: Any, most: int, valid: Callable[[Any], bool]) -> bool:
    return type(value) is list and len(value) <= most and all(map(valid, value))


def _stop(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= MAX_STOP_LENGTH


def _sampling(value: Any) -> bool:
    """`astuple(Sampling(...))`, as it comes out of msgpack."""
    if type(value) is not list or len(value) != len(fields(Sampling)):
        return False
    s = Sampling(*value)
    drawing = _number(s.temperature) and s.temperature >= 0 and _count(s.top_k) and _count(s.seed)
    drawing = drawing and _number(s.top_p) and 0 < s.top_p <= 1
    ending = _count(s.min_tokens) and _flag(s.ignore_eos)
    ending = ending and _list(s.stop_ids, MAX_STOP_IDS, _token) and _list(s.stop, MAX_STOPS, _stop)
    telling = s.logprobs is None or (_count(s.logprobs) and s.logprobs <= MAX_LOGPROBS)
    return drawing and ending and telling


def _likely(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _token(value[0]) and _number(value[1])


def _logprob(value: Any) -> bool:
    pair = type(value) is list and len(value) == 2
    return pair and _number(value[0]) and _list(value[1], MAX_LOGPROBS, _likely)


def _logprobs(value: Any) -> bool:
    """`pack_logprobs`, as it comes out of msgpack."""
    return value is None or (type(value) is list and all(map(_logprob, value)))


def _names(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


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
        "max_batch": _positive,
        "life": _count,
    },
    "bye": {},
    # client and gateway; turns of one session have its name in common
    "submit": {
        "request": _text,
        "session": _name_or_none,
        "text": _text,
        "system": _text,
        "answer": _name_or_none,
        "raw": _flag,
        "max_tokens": _positive,
        "sampling": _sampling,
    },
    "cancel": {"request": _text},
    "accepted": {"request": _text},
    "answer": {
        "request": _text,
        "start": _count,
        "source": _letter,
        "text": _text,
        "logprobs": _logprobs,
    },
    # `retry_ns`: after how long a request that was rejected might be taken
    "end": {"request": _text, "reason": _reason, "detail": _text, "retry_ns": _count_or_none},
    # gateway and instances
    "prefill": {
        "request": _text,
        "relay": _name_or_none,
        "main": _name_or_none,
        "max_tokens": _positive,
        "sampling": _sampling,
        "lease_ns": _count,
        "begin_ns": _count_or_none,
        "held": _flag,
    },
    "generate": {
        "request": _text,
        "max_tokens": _positive,
        "sampling": _sampling,
        "lease_ns": _count,
        "begin_ns": _count_or_none,
    },
    # an instance has not begun a request within `begin_ns`, or could not be in time any more
    "late": {"request": _text, "waited_ns": _count},
    "close": {"request": _text, "answered": _flag},
    "learn": {"request": _text, "prompt_tokens": _count},
    # an instance has ended a request, and `by` whose fault; or goes on with it without `whom`
    "failed": {"request": _text, "detail": _text, "by": _text},
    "lost": {"request": _text, "whom": _text, "detail": _text},
    # the gateway's answer: to P, to feed the main decoder only, since the relay is lost; to P and
    # the relay, who is the main decoder now; to the main decoder, to go on from these ids
    "unrelay": {"request": _text},
    "rejoin": {"request": _text, "main": _name_or_none},
    "takeover": {"request": _text, "start": _count},
    # what the gateway may know of an instance: see `roles.load`
    "watch": {"age_ns": _count},
    "load": {
        **dict.fromkeys(("tokens", "pages", "waiting", "holding", "step_ns"), _count),
        "arrived": _names,
    },
    # transfers to main decoders: see `roles.outlook`; and `policy.anomaly`
    "streaming": {"request": _text, "to": _text, "busy": _flag, "bytes": _count},
    "crossed": {
        "request": _text,
        "to": _text,
        "bytes": _count,
        "busy_ns": _count,
        "whole": _flag,
    },
    "cut": {"request": _text},
    "resume": {"request": _text},
    "tokens": {
        "request": _text,
        "start": _count,
        "source": _letter,
        "after": _count,
        "logprobs": _logprobs,
    },
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
        "main": _name_or_none,
    },
    "noted": {"request": _text, "epoch": _count},
    "admit": {"request": _text, "epoch": _count, "have": _count},
    "refuse": {"request": _text, "epoch": _count, "reason": _text},
    "kv": {"request": _text, "epoch": _count, "start": _count, "end": _count},
    "first": {
        "request": _text,
        "epoch": _count,
        "position": _count,
        "id": _token,
        "logprobs": _logprobs,
    },
    # all of it has left P, which waits for `whole` now
    "sent": {"request": _text, "epoch": _count, "end": _count},
    "withdraw": {"request": _text, "epoch": _count},
    "curtail": {"request": _text, "epoch": _count},
    "whole": {"request": _text},
    # relay and main; `step_ns` and `token_ns`: see `sched.Pace`
    "ready": {"request": _text, "step_ns": _count, "token_ns": _count},
    "ids": {"request": _text, "start": _count, "last": _flag},
    "caught": {"request": _text, "end": _count, "step_ns": _count, "token_ns": _count},
    # overlap: the relay asks the gateway to let the main decoder follow the answer
    "overlap": {"request": _text, "main": _text},
    "follow": {"request": _text, "start": _count},
    "switched": {"request": _text, "position": _count},
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
    """Where an answer ends, as far as its ids say: by one of the model's `eos_ids` (not with
    `ignore_eos`), by one of the request's `stop_ids`, or after `max_tokens` answer tokens.

    Before `min_tokens` are made, none of these ids ends it, and none may be drawn (`banned`); so
    not one of the `eos_ids` with `ignore_eos` either, as with vLLM. `max_tokens` comes first.
    """

    prompt_len: int
    max_tokens: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False

    @classmethod
    def of(
        cls, prompt_len: int, max_tokens: int, eos_ids: frozenset[int], sampling: Sampling
    ) -> Limits:
        stop_ids = frozenset(sampling.stop_ids)
        about = (stop_ids, sampling.min_tokens, sampling.ignore_eos)
        return cls(prompt_len, max_tokens, eos_ids, *about)

    @property
    def kv_tokens(self) -> int:
        """KV slots that the longest answer needs: the last token's KV is never computed."""
        return self.prompt_len + self.max_tokens - 1


def finish(limits: Limits, position: int, token: int) -> FinishReason | None:
    """Why the answer ends with `token` at absolute `position`, or None if it goes on.

    The one place where this is decided; every role that makes a token calls it, P for the first one
    too. (A stop string ends an answer at the gateway, which alone has its text.)
    """
    made = position + 1 - limits.prompt_len
    ends = token in limits.stop_ids or (token in limits.eos_ids and not limits.ignore_eos)
    if ends and made > limits.min_tokens:
        return "stop"
    return "length" if made >= limits.max_tokens else None


NOTHING: frozenset[int] = frozenset()


def banned(limits: Limits, position: int) -> frozenset[int]:
    """The ids that may not be drawn at absolute `position`: what could end the answer too early.

    Of the limits and the position alone: the same for whoever draws there.
    """
    if position - limits.prompt_len >= limits.min_tokens:
        return NOTHING
    return limits.eos_ids | limits.stop_ids


def pack_logprobs(told: Sequence[Logprobs | None]) -> list[Any] | None:
    """What is told of some ids, for a frame's header: [log-probability, [[id, its], ...]] of each;
    None where nothing was asked.
    """
    if None in told:
        return None
    return [astuple(one) for one in told if one is not None]


def unpack_logprobs(value: list[Any] | None, count: int) -> list[Logprobs | None]:
    """Inverse of `pack_logprobs`, for `count` ids; BadFrame where there are more or fewer."""
    if value is None:
        return [None] * count
    if len(value) != count:
        raise BadFrame(f"log-probabilities of {len(value)} ids for {count}")
    return [Logprobs(drawn, tuple((i, p) for i, p in best)) for drawn, best in value]


def prompt_digest(fingerprint: str, ids: Sequence[int]) -> str:
    """xxh3-128 over the model's fingerprint and the ids: the same in every process."""
    digest = xxhash.xxh3_128(fingerprint.encode())
    digest.update(array("I", ids).tobytes())
    return digest.hexdigest()


_PAIR = struct.Struct("<QQ")


def chain(ids: Iterable[int], before: int = 0) -> int:
    """Digest of answer ids, one after the other: xxh3-64 of (digest so far, id), 63 bits of it.

    `before`: the digest of those that come before `ids`.
    """
    for token in ids:
        before = xxhash.xxh3_64_intdigest(_PAIR.pack(before, token)) >> 1
    return before


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
    main: str | None

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
            values["sampling"] = Sampling.of(values["sampling"])
            return cls(prompt=tuple(prompt), **values)
        except (KeyError, TypeError) as error:
            raise BadFrame(f"not a manifest: {error}") from None

    def objection(self, mine: KVLayout) -> str | None:
        """Why a decoder with layout `mine` must not take this KV, by name; None if it may.

        KV of another dtype is converted when it arrives; of another page size it needs nothing,
        since it travels by positions.
        """
        known = (*DTYPE_BYTES, EIGHT_BIT)
        if self.layout.dtype not in known:
            return f"dtype {self.layout.dtype} of the KV is none of {', '.join(known)}"
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

    @property
    def prefix(self) -> int:
        """How many positions there are before the first that is missing."""
        return self._missing[0][0] if self._missing else self.length

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
