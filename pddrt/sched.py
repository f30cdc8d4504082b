"""The scheduler of one instance: continuous batching with chunked prefill, decode first.

A step is three beats. `plan()` picks the spans, the engine runs them, `apply()` books what came
out. Between plan and apply a sequence may be dropped; its result is then ignored (its pages stay
pinned, see kv.pages).

A sequence is its ids and how many of them have KV. Whatever is known but not computed is work: one
id is a decode, several on top of existing KV an extend, several of the prompt a prefill chunk.
There is no other difference between the roles' steps, which is why one scheduler serves them all.

Order within a step: single decodes (never delayed by prompts), then extends (somebody waits at a
handoff), then prompts in order of arrival; up to `max_batch` sequences a step; what runs in the
background only when nothing else can. `chunk_tokens` bounds what prompts add to a step: a decode
always fits, and an extend is cut only where its sequence says so (`piece`): a one-shot handoff is
by definition one pass, and what it costs the others in the batch is the point of comparing it with
smaller pieces.

`Admission` decides who gets pages, first come first served: a request that does not fit may be
overtaken by smaller ones behind it, but only `MAX_OVERTAKEN` times, so that it is never starved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pddrt.messages import Limits, banned
from pddrt.types import Drawn, Ns, Run, Sampling, Span

MAX_OVERTAKEN = 16


@dataclass(slots=True)
class SequenceState:
    """One request on one instance: `ids` known so far, prompt and answer; KV there for [0,
    computed).

    Not `active`: holds its pages, but is not stepped. `background`: nobody waits for it, it is
    stepped when nothing else is. `in_step`: a step that is running now computes for it. `sampling`
    None: no id is drawn. `piece`: an extend takes at most so many ids a step. `limits` say what may
    not be drawn yet. `coming`: the running step will yield its next id.
    """

    request: str
    ids: list[int]
    computed: int
    prompt_len: int
    sampling: Sampling | None
    active: bool = True
    background: bool = False
    in_step: bool = False
    coming: bool = False
    piece: int | None = None
    limits: Limits | None = None

    @property
    def pending(self) -> int:
        """Known ids without KV."""
        return len(self.ids) - self.computed


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step will run, and how its tokens count: prefill, extend, decode."""

    spans: tuple[Span, ...]
    prefill_tokens: int
    extend_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence: KV of [start, end) is there, and perhaps the id at `end`
    was `drawn`.
    """

    request: str
    start: int
    end: int
    drawn: Drawn | None


class Scheduler:
    """The sequences of one instance that can be stepped, in order of arrival."""

    def __init__(
        self,
        chunk_tokens: int,
        max_batch: int,
        runs: Callable[[str, int], tuple[Run, ...]],
        room: Callable[[str, int], bool] = lambda _request, _end: True,
    ) -> None:
        """`runs(request, end)`: the slots of positions [0, end) of that request. `room(request,
        end)` makes sure that there are any; it may drop other sequences for that, or this one.
        """
        assert chunk_tokens > 0
        assert max_batch > 0
        self.chunk_tokens = chunk_tokens
        self.max_batch = max_batch
        self._runs = runs
        self._room = room
        self.sequences: dict[str, SequenceState] = {}

    def add(self, sequence: SequenceState) -> None:
        assert sequence.request not in self.sequences
        self.sequences[sequence.request] = sequence

    def drop(self, request: str) -> None:
        """Forgets a sequence, if it is there; a step in flight for it is ignored when it ends."""
        self.sequences.pop(request, None)

    def plan(self) -> Batch | None:
        """The next step, or None when there is nothing to compute. Marks its sequences as in the
        step. Who finds no room gives its turn to the next: where anybody has work, somebody steps.
        """
        ready = [s for s in self.sequences.values() if s.active and s.pending > 0]
        ready = [s for s in ready if not s.background] or ready
        ready.sort(key=_urgency)  # stable: arrival order within a kind
        room, counts = self.chunk_tokens, [0, 0, 0]
        spans: list[Span] = []
        for sequence in ready:
            if len(spans) == self.max_batch:
                break
            kind = _urgency(sequence)
            most = room if kind == PREFILL else sequence.piece or sequence.pending
            take = min(sequence.pending, most)
            if take <= 0:
                break
            if self.sequences.get(sequence.request) is not sequence:
                continue  # it had to make room for one before it
            if not self._room(sequence.request, sequence.computed + take):
                continue
            room -= take
            counts[kind] += take
            spans.append(span := self._span(sequence, take))
            sequence.in_step, sequence.coming = True, span.sampling is not None
        if not spans:
            return None
        return Batch(tuple(spans), counts[PREFILL], counts[EXTEND], counts[DECODE])

    def _span(self, sequence: SequenceState, take: int) -> Span:
        start, end = sequence.computed, sequence.computed + take
        sampling = sequence.sampling if end == len(sequence.ids) else None
        limits = sequence.limits
        return Span(
            request=sequence.request,
            tokens=tuple(sequence.ids[start:end]),
            start=start,
            runs=self._runs(sequence.request, end),
            sampling=sampling,
            banned=banned(limits, end) if sampling and limits else frozenset(),
        )

    def apply(self, batch: Batch, made: Sequence[Drawn | None]) -> list[Outcome]:
        """Books a finished step, which `made` an id for each span that asked for one. One outcome
        for each span whose sequence is still here.
        """
        outcomes = []
        for span, drawn in zip(batch.spans, made, strict=True):
            sequence = self.sequences.get(span.request)
            if sequence is None or not sequence.in_step:
                continue
            sequence.in_step = sequence.coming = False
            sequence.computed = span.end
            if drawn is not None:
                sequence.ids.append(drawn.token)
            outcomes.append(Outcome(span.request, span.start, span.end, drawn))
        return outcomes

    def abandon(self, batch: Batch) -> list[str]:
        """Books a step that failed: nothing was computed. Those of it that are still here."""
        lost = []
        for span in batch.spans:
            sequence = self.sequences.get(span.request)
            if sequence is not None and sequence.in_step:
                sequence.in_step = sequence.coming = False
                lost.append(span.request)
        return lost


DECODE, EXTEND, PREFILL = range(3)


def _urgency(sequence: SequenceState) -> int:
    """What its next span is; an extend: the pending ids are answer."""
    if sequence.computed < sequence.prompt_len:
        return PREFILL
    return DECODE if sequence.pending == 1 else EXTEND


class Pace:
    """How long steps take here, learnt from those that were: what a peer may be told.

    `step`: a step of decodes only; `token`: what each further token adds; `prompt`: a token of a
    prompt, with whatever shares its steps. All in ns, 0 while unknown; exponentially weighted
    means, a quarter of each new value.
    """

    def __init__(self) -> None:
        self.step: Ns = 0
        self.token: Ns = 0
        self.prompt: Ns = 0

    def note(self, batch: Batch, duration: Ns) -> None:
        """A step with this batch took so long."""
        more = batch.prefill_tokens + batch.extend_tokens
        if not more:
            self.step = _weighted(self.step, duration)
        elif self.step:
            self.token = _weighted(self.token, max(0, duration - self.step) // more)
        if batch.prefill_tokens:
            self.prompt = _weighted(self.prompt, duration // batch.prefill_tokens)


def _weighted(mean: Ns, value: Ns) -> Ns:
    return (3 * mean + value) // 4 if mean else value


@dataclass(slots=True)
class _Waiting:
    request: str
    overtaken: int = 0


class Admission:
    """Who waits for memory. `reserve(request) -> bool` takes it, or nothing."""

    def __init__(self, reserve: Callable[[str], bool]) -> None:
        self._reserve = reserve
        self._queue: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> str | None:
        """Whose turn is next."""
        return self._queue[0].request if self._queue else None

    def add(self, request: str, *, first: bool = False) -> None:
        """`first`: ahead of all who wait; for those that had begun."""
        self._queue.insert(0 if first else len(self._queue), _Waiting(request))

    def drop(self, request: str) -> bool:
        """Takes a waiting request out; False if it was not waiting."""
        before = len(self._queue)
        self._queue = [w for w in self._queue if w.request != request]
        return len(self._queue) < before

    def admit(self) -> list[str]:
        """Those that got their pages now, in order."""
        admitted: list[str] = []
        blocked: list[_Waiting] = []
        most = 0  # that one of those blocked was overtaken
        for position, waiting in enumerate(self._queue):
            if self._reserve(waiting.request):
                admitted.append(waiting.request)
                for earlier in blocked:
                    earlier.overtaken += 1
                most += bool(blocked)
            else:
                blocked.append(waiting)
                most = max(most, waiting.overtaken)
            if most >= MAX_OVERTAKEN:
                blocked.extend(self._queue[position + 1 :])
                break
        self._queue = blocked
        return admitted
