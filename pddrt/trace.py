"""The event trace: one typed, append-only record that feeds everything else.

Summary, live text, reports and checkers read events; nothing else is measured twice. An event is a
small frozen dataclass. `t` is when it happened (ns); fields that end in `_ns` are times or
durations too, and show in files as seconds with nine decimals under the name ending in `_s`.

No float that came out of a model may enter an event's line: the file's digest must not depend on
rounding. Such numbers are in fields `beside` the line: listeners have them, files and digest not.
"""

from __future__ import annotations

import hashlib
import json
import json.encoder
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, fields
from functools import cache
from typing import Any, TextIO, get_args, get_type_hints

from pddrt.types import SECOND, Logprobs, Ns, Sampling

BESIDE = {"beside": True}


def beside(default: Any) -> Any:
    """A field of an event that is not in its line."""
    return field(default=default, metadata=BESIDE)


PageRanges = tuple[tuple[int, int], ...]

AGAIN = "~"
"""Between a request's name and the number of a further attempt at it."""


def attempt_name(request: str, number: int) -> str:
    """What instances know this attempt at a request by; the first, 0, has the request's name."""
    return f"{request}{AGAIN}{number}" if number else request


def request_of(attempt: str) -> str:
    """The request that this is an attempt at."""
    return attempt.partition(AGAIN)[0]


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
class InstanceCrashed(Event):
    """An instance stopped, without a word to anybody: its requests are gone, and unless it has
    `kept` it, so is all that was in its memory. What it does is not told any more until it starts
    again.
    """

    instance: str
    kept: bool


@dataclass(frozen=True, slots=True)
class InstanceReturned(Event):
    """An instance that had crashed answers again, with the prefix cache it had."""

    instance: str


@dataclass(frozen=True, slots=True)
class InstanceLeft(Event):
    """An instance has left in peace: nothing ran there any more, and its memory is gone."""

    instance: str


@dataclass(frozen=True, slots=True)
class LinkRate(Event):
    """From now on both directions of a link carry `rate` bytes/s (None: unlimited); with `one_way`
    only that from the first site to the second.
    """

    link: str
    between: tuple[str, str]
    rate: int | None
    one_way: bool = False


# What a scenario's faults did. `fault`: its place in the list, from 0; `firing`: 1 the first time.


@dataclass(frozen=True, slots=True)
class FaultInjected(Event):
    """A fault takes effect now: `what` it does to whom."""

    fault: int
    firing: int
    do: str
    what: str


@dataclass(frozen=True, slots=True)
class FaultEnded(Event):
    """What it did is undone."""

    fault: int
    firing: int
    do: str
    what: str


@dataclass(frozen=True, slots=True)
class FaultMissed(Event):
    """Its moment came, and there was nothing for it to act on."""

    fault: int
    firing: int
    do: str
    why: str


@dataclass(frozen=True, slots=True)
class RequestSent(Event):
    """The client's stamp: TTFT counts from here. `sampling`: see `types.Sampling`, in its order."""

    request: str
    session: int
    turn: int
    prompt: str
    sampling: tuple[Any, ...] = astuple(Sampling())


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
    prefill: str | None
    relay: str | None
    main: str | None
    prompt_tokens: int
    max_tokens: int
    wan_estimate_ns: Ns | None
    reason: str


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """The gateway goes on with a request elsewhere: attempt `attempt`, 1 the first time, as its
    own Routed says. `why` is what ended the one before, `after` so many tokens of the answer.
    """

    request: str
    attempt: int
    why: str
    after: int


@dataclass(frozen=True, slots=True)
class Rerouted(Event):
    """The gateway goes on with the same attempt, without `lost`. `then`: takeover (the main decoder
    takes over), another main (it is `main`), alone (the relay ends it), on (it was not needed any
    more).
    """

    request: str
    lost: str
    then: str
    main: str | None
    why: str


@dataclass(frozen=True, slots=True)
class TakenOver(Event):
    """A main decoder goes on in place of a lost relay: the gateway has told it the ids before
    `end`, of which it will extend over `extend_tokens`.
    """

    request: str
    main: str
    extend_tokens: int
    end: int


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
class StepFailed(Event):
    """A forward pass did not return: nothing that it was to write is there."""

    instance: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stalled(Event):
    """An instance could have done something for this request since then, and did nothing (see
    `stalls`). `waits_for`: a step, or memory.
    """

    request: str
    waits_for: str
    instance: str
    since_ns: Ns


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
class CacheSampled(Event):
    """When the prompt of a request was known: how many of its tokens each role held, the best of
    its instances, from the first on.
    """

    request: str
    prompt_tokens: int
    prefill: int
    relay: int
    main: int


@dataclass(frozen=True, slots=True)
class Spared(Event):
    """The gateway expects the relay to end this request: its main decoder, which lacks `lacking`
    tokens of the prompt, is not sent them (`how`: held), or not the rest of them (cut). `bytes`:
    what need not cross; `expected`: tokens of the answer.
    """

    request: str
    how: str
    expected: int
    lacking: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """It was not to be spared: the answer has `made` tokens and goes on, or it had crossed."""

    request: str
    made: int
    reason: str


@dataclass(frozen=True, slots=True)
class TransferTook(Event):
    """The gateway learned that KV has crossed to a main decoder: `bytes`, and how long the path was
    what it waited for, with its delay. `expected_ns`: what was thought when the request was routed
    (None: that nothing moves); `rate`: what the path is now thought to carry, in bytes/s.
    """

    request: str
    src: str
    dst: str
    bytes: int
    took_ns: Ns
    expected_ns: Ns | None
    rate: int | None


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
class HandoffBegan(Event):
    """The relay's handoff policy was first asked, with `lacking` ids that the main decoder has not.

    `decision`: finish, piece or follow. `expected`: the ids that catch-up is expected not to get
    below (see `policy.handoff.equilibrium`); None where nobody knows, or it would not converge.
    """

    request: str
    relay: str
    main: str
    policy: str
    lacking: int
    decision: str
    expected: int | None


@dataclass(frozen=True, slots=True)
class HandoffSent(Event):
    """Ids of [start, end) went to the main decoder, in a frame of `bytes`. With `last` the relay
    stops decoding and frees the request, for that `reason`. With `follows` both decode, and `src`
    is the gateway, else the relay.
    """

    request: str
    src: str
    main: str
    start: int
    end: int
    last: bool
    bytes: int
    reason: str = ""
    follows: bool = False


@dataclass(frozen=True, slots=True)
class HandoffCaughtUp(Event):
    """The relay learnt that the main decoder has the KV of a piece, up to `end`; it has made ids up
    to `made` (one that a running step will yield among them).
    """

    request: str
    relay: str
    end: int
    made: int


@dataclass(frozen=True, slots=True)
class HandoffEnded(Event):
    """The relay stopped decoding where both did, after [.., end): `reason` is the bound, or that
    the main decoder is first.
    """

    request: str
    relay: str
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class HandoffTaken(Event):
    """The main decoder knows the ids before `end` and will extend over `extend_tokens` of them;
    with `decodes` it goes on by itself from there. It gave up `back` ids of its own, where both
    decode and these were not what the gateway passed on.
    """

    request: str
    main: str
    extend_tokens: int
    end: int
    decodes: bool
    back: int = 0


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The gateway let the first token go to the client."""

    request: str
    notice_ns: Ns


@dataclass(frozen=True, slots=True)
class TokensReceived(Event):
    """The client got positions [start, end), counted from the first output token, made by
    `source`. `text` is what can be shown with them, `logprobs` what was asked to be told of each.
    """

    request: str
    start: int
    end: int
    source: str
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs | None, ...] = beside(())


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The client's stream ended. `detail` says why a request was rejected or aborted;
    `retry_ns`, after how long one that was rejected might be taken.
    """

    request: str
    reason: str
    output_tokens: int
    detail: str
    retry_ns: Ns | None = None


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


@dataclass(frozen=True, slots=True)
class LinkQuality(Event):
    """How one direction of a link was met: the delay with which things came, order kept, and under
    TCP the segments sent again, dropped by the queue, lost on the way. Told after the run of links
    with a TCP, a trace, or a jitter that is more than a deviation.
    """

    link: str
    src_site: str
    dst_site: str
    delay_mean_ns: Ns
    delay_deviation_ns: Ns
    resent: int
    dropped: int
    lost: int


class Seconds:
    """A time for a file: shown in seconds, exactly, with nine decimals."""

    __slots__ = ("ns",)

    def __init__(self, ns: Ns) -> None:
        self.ns = ns

    def __str__(self) -> str:
        return _seconds(self.ns)


def _seconds(ns: Ns) -> str:
    if ns < 0:
        return "-" + _seconds(-ns)
    return f"{ns // SECOND}.{ns % SECOND:09d}"


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_text = json.encoder.encode_basestring


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


Line = Callable[[Any], str]


def _whole(ids: Iterable[int]) -> str:
    return "[" + ",".join(map(str, ids)) + "]"


def _pairs(ranges: PageRanges) -> str:
    return "[" + ",".join([f"[{first},{count}]" for first, count in ranges]) + "]"


def _spans(spans: Iterable[tuple[str, int, int]]) -> str:
    return "[" + ",".join([f"[{_text(name)},{a},{b}]" for name, a, b in spans]) + "]"


_PLAIN = {
    int: "{e.%s}",
    bool: "{'true' if e.%s else 'false'}",
    str: "{_text(e.%s)}",
    str | None: "{'null' if e.%s is None else _text(e.%s)}",
    int | None: "{'null' if e.%s is None else e.%s}",
    tuple[int, ...]: "{_whole(e.%s)}",
    PageRanges: "{_pairs(e.%s)}",
    tuple[tuple[str, int, int], ...]: "{_spans(e.%s)}",
}
"""How a field of a type is written, within an f-string; all others by `dumps`."""


@cache
def _line_of(kind: Any) -> Line:
    """The function that writes events of a class. It is made from their fields, as dataclasses make
    their own methods: half of a modelled run's events are small, and a loop over the fields of each
    takes four times as long.
    """
    parts = [f'{{{{"event":"{kind.__name__}","t_s":{{_seconds(e.t)}}']
    hints = get_type_hints(kind)
    for f in fields(kind):
        if f.name == "t" or f.metadata == BESIDE:
            continue
        key = f.name
        if not key.endswith("_ns"):
            form = _PLAIN.get(hints[f.name], "{dumps(e.%s)}")
        else:
            key = key.removesuffix("_ns") + "_s"
            form = "{_seconds(e.%s)}"
            if type(None) in get_args(hints[f.name]):
                form = "{'null' if e.%s is None else _seconds(e.%s)}"
        parts.append(f'"{key}":{form.replace("%s", f.name)}')
    source = ",".join(parts) + "}}"
    made: Line = eval(f'lambda e: f"""{source}"""', globals())
    return made


def to_line(event: Event) -> str:
    """One line of events.jsonl, without the newline."""
    kind: Any = type(event)
    return _line_of(kind)(event)


WINDOW = 20_000
"""So many of the latest events a trace remembers."""
CHUNK = 1 << 16
"""Bytes of lines that are written at once..."""
FLUSH_TIME: Ns = SECOND
"""... or those of so much time: a run that is killed has lost no more."""


class Trace:
    """The run's events, in order: counted, written, told to listeners, each once, as it happens.

    They go to the file and are forgotten, but for the `recent` ones: memory does not grow with a
    run. Who needs more of them listens, or reads the file.
    """

    def __init__(self, file: TextIO | None = None, *, log: bool = True) -> None:
        """`log` off: there are no lines, hence no digest; listeners hear the events all the
        same.
        """
        self.count = 0
        self.recent: deque[Event] = deque(maxlen=WINDOW)
        self._listeners: list[Callable[[Event], None]] = []
        self._file = file
        self._log = log
        self._lines: list[str] = []
        self._size = 0
        self._due: Ns = 0
        self.error: OSError | None = None
        """Why the file lacks events: from the first that could not be written none is."""
        self._digest = hashlib.blake2b(digest_size=16)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """`listener(event)` is called for every later event. It must not block; what it raises ends
        whoever emitted the event.
        """
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        self.count += 1
        self.recent.append(event)
        if self._log:
            line = to_line(event)
            self._lines.append(line)
            self._size += len(line)
            if self._size >= CHUNK or event.t >= self._due:
                self._due = event.t + FLUSH_TIME
                self.flush()
        for listener in self._listeners:
            listener(event)

    def flush(self) -> None:
        """Writes what has not been written, for others to read."""
        if not self._lines:
            return
        self._lines.append("")
        text = "\n".join(self._lines)
        self._lines.clear()
        self._size = 0
        self._digest.update(text.encode())
        if self._file is not None and self.error is None:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self.error = error

    @property
    def digest(self) -> str:
        """blake2b-128 over the lines of events.jsonl so far."""
        self.flush()
        return self._digest.hexdigest()
