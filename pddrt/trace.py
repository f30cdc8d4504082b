"""The event trace: one typed, append-only record that feeds everything else.

Summary, live text, reports and checkers read events; nothing else is measured twice. An event is a
small frozen dataclass. `t` is when it happened (ns); fields that end in `_ns` are times or
durations too, and show in files as seconds with nine decimals under the name ending in `_s`.

No float that came out of a model may enter an event: the file's digest must not depend on rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TextIO

from pddrt.types import SECOND, Ns

PageRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Event:
    t: Ns


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    name: str
    seed: int
    clock: str


@dataclass(frozen=True, slots=True)
class InstanceStarted(Event):
    """An instance with `pages` pages of `page_tokens` tokens; its site says which links it uses."""

    instance: str
    role: str
    site: str
    pages: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class LinkRate(Event):
    """From now on both directions of a link carry `rate` bytes/s (None: unlimited)."""

    link: str
    between: tuple[str, str]
    rate: int | None


@dataclass(frozen=True, slots=True)
class RequestSent(Event):
    """The client's stamp: TTFT counts from here. `sampling`: temperature, top-k, top-p, seed."""

    request: str
    session: int
    turn: int
    prompt: str
    sampling: tuple[float, int, float, int] = (0.0, 0, 1.0, 0)


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """The client learned the ids of its whole prompt, history included."""

    request: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """The gateway's decision, and what it knew: uncached tokens, estimated WAN time of their KV."""

    request: str
    pipeline: str
    prefill: str
    relay: str | None
    main: str | None
    prompt_tokens: int
    max_tokens: int
    wan_estimate_ns: Ns | None
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """An instance reserved `pages` of its own for a request, and locked `hit` cached tokens of it.

    `hit_bytes` is the size of the KV that need not be computed or sent.
    """

    request: str
    instance: str
    pages: int
    hit: int
    hit_bytes: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A request lost its memory to one that came before it, with KV of `tokens`; it will be
    back.
    """

    request: str
    instance: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Kept(Event):
    """The prefix cache took over `pages` of the request's, with the KV of its first `tokens`."""

    request: str
    instance: str
    pages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Learnt(Event):
    """P has computed the KV of an answer, so that the next turn hits on both sides."""

    request: str
    instance: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Freed(Event):
    request: str
    instance: str
    pages: int


# Where every page is, page by page: `pages` are ranges (first, count). An owner is a request or the
# lesson of one. The prefix cache is none: its pages are kept, and then evicted.


@dataclass(frozen=True, slots=True)
class PagesTaken(Event):
    """Free pages are `owner`'s now, behind those that it has."""

    instance: str
    owner: str
    pages: PageRanges


@dataclass(frozen=True, slots=True)
class PageTable(Event):
    """The pages of `owner`'s positions, in order: its own, and cached ones that it has locked. KV
    of its first `hit` positions was there when it began.
    """

    instance: str
    owner: str
    pages: PageRanges
    hit: int


@dataclass(frozen=True, slots=True)
class PagesKept(Event):
    """Pages of `owner`'s went to the cache; it has locked them, and reads them on."""

    instance: str
    owner: str
    pages: PageRanges


@dataclass(frozen=True, slots=True)
class PagesFreed(Event):
    """Pages of `owner`'s are free; with `over` it has neither pages nor locks any more."""

    instance: str
    owner: str
    pages: PageRanges
    over: bool


@dataclass(frozen=True, slots=True)
class PagesEvicted(Event):
    """Cached pages are free."""

    instance: str
    pages: PageRanges


@dataclass(frozen=True, slots=True)
class PrefillStarted(Event):
    request: str
    instance: str


@dataclass(frozen=True, slots=True)
class PrefillEnded(Event):
    request: str
    instance: str


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """A forward pass begins, and may write until its Step: (owner, start, end) of each sequence."""

    instance: str
    spans: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Step(Event):
    """One forward pass, recorded when it ends. Token counts by kind; `sequences` in the batch."""

    instance: str
    start_ns: Ns
    sequences: int
    prefill_tokens: int
    extend_tokens: int
    decode_tokens: int
    pages_used: int


@dataclass(frozen=True, slots=True)
class KVSent(Event):
    """`src` read the KV of [start, end) and hands it to a stream to `dst`."""

    request: str
    src: str
    dst: str
    start: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KVReceived(Event):
    request: str
    instance: str
    start: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KVWhole(Event):
    """A decoder holds the KV of the whole prompt and, but for a main decoder behind a relay, the
    first id: it may decode from here.
    """

    request: str
    instance: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TransferCancelled(Event):
    request: str
    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class TokensMade(Event):
    """An instance made the ids of positions [start, end)."""

    request: str
    instance: str
    source: str
    start: int
    end: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MainReady(Event):
    """The relay learned that the main decoder holds the whole KV."""

    request: str
    relay: str
    main: str


@dataclass(frozen=True, slots=True)
class HandoffSent(Event):
    """The relay sent ids of [start, end); with `last` it stops decoding and frees the request."""

    request: str
    relay: str
    main: str
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class HandoffTaken(Event):
    """The main decoder has all ids and will extend over `extend_tokens` of them."""

    request: str
    main: str
    extend_tokens: int


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The gateway let the first token go to the client."""

    request: str
    notice_ns: Ns


@dataclass(frozen=True, slots=True)
class TokensReceived(Event):
    """The client got positions [start, end), counted from the first output token, made by
    `source`.
    """

    request: str
    start: int
    end: int
    source: str
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The client's stream ended. `detail` says why a request was rejected or aborted."""

    request: str
    reason: str
    output_tokens: int
    detail: str


@dataclass(frozen=True, slots=True)
class PoolChecked(Event):
    """An instance's pages after the run: free or cached, or the run has failed. Locked are those of
    the cached that could not be evicted.
    """

    instance: str
    pages: int
    pages_free: int
    pages_cached: int
    pages_locked: int = 0


@dataclass(frozen=True, slots=True)
class LinkTotal(Event):
    """What one direction of a link carried over the whole run."""

    link: str
    src_site: str
    dst_site: str
    bytes: int
    kv_bytes: int
    ids_bytes: int
    busy_ns: Ns
    peak_flows: int
    late_p99_ns: Ns
    late_max_ns: Ns


class Seconds:
    """A time for a file: shown in seconds, exactly, with nine decimals."""

    __slots__ = ("ns",)

    def __init__(self, ns: Ns) -> None:
        self.ns = ns

    def __str__(self) -> str:
        sign, ns = ("-", -self.ns) if self.ns < 0 else ("", self.ns)
        return f"{sign}{ns // SECOND}.{ns % SECOND:09d}"


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def dumps(value: Any) -> str:
    """Compact JSON, keys in the order given, `Seconds` as exact decimals."""
    if type(value) is int or isinstance(value, Seconds):
        return str(value)
    if isinstance(value, dict):
        inner = ",".join(f"{_encode(str(k))}:{dumps(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(dumps, value)) + "]"
    return _encode(value)


@cache
def _form(kind: Any) -> tuple[str, tuple[tuple[str, str, bool], ...]]:
    """How events of a class begin; for each field its name, its key, and whether it is a time."""
    names = [f.name for f in fields(kind) if f.name != "t"]
    timed = [name.endswith("_ns") for name in names]
    keys = [name[:-3] + "_s" if time else name for name, time in zip(names, timed, strict=True)]
    texts = [f',"{key}":' for key in keys]
    return f'{{"event":"{kind.__name__}","t_s":', tuple(zip(names, texts, timed, strict=True))


def to_line(event: Event) -> str:
    """One line of events.jsonl, without the newline."""
    kind: Any = type(event)
    head, form = _form(kind)
    parts = [head, str(Seconds(event.t))]
    for name, key, timed in form:
        value = getattr(event, name)
        if timed and value is not None:
            value = Seconds(value)
        parts += (key, dumps(value))
    return "".join(parts) + "}"


class Trace:
    """The run's events, in order. Appends only; listeners see each event once, as it happens."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.events: list[Event] = []
        self._listeners: list[Callable[[Event], None]] = []
        self._file = file
        self.error: OSError | None = None
        """Why the file lacks events: from the first that could not be written none is."""
        self._digest = hashlib.blake2b(digest_size=16)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """`listener(event)` is called for every later event. It must not block; what it raises ends
        whoever emitted the event.
        """
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        self.events.append(event)
        line = to_line(event) + "\n"
        self._digest.update(line.encode())
        if self._file is not None and self.error is None:
            try:
                self._file.write(line)
            except OSError as error:
                self.error = error
        for listener in self._listeners:
            listener(event)

    @property
    def digest(self) -> str:
        """blake2b-128 over the lines of events.jsonl so far."""
        return self._digest.hexdigest()
