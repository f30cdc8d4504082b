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
always fits, and an extend is never cut, since a one-shot handoff is by definition one pass (what it
costs the others in the batch is the point of comparing it with smaller pieces).

`Admission` decides who gets pages, first come first served: a request that does not fit may be
overtaken by smaller ones behind it, but only `MAX_OVERTAKEN` times, so that it is never starved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pddrt.types import Run, Sampling, Span

MAX_OVERTAKEN = 16


@dataclass(slots=True)
class SequenceState:
    """One request on one instance: `ids` known so far, prompt and answer; KV there for [0,
    computed).

    Not `active`: holds its pages, but is not stepped. `background`: nobody waits for it, it is
    stepped when nothing else is. `in_step`: a step that is running now computes for it. `sampling`
    None: no id is ever drawn.
    """

    request: str
    ids: list[int]
    computed: int
    prompt_len: int
    sampling: Sampling | None
    active: bool = True
    background: bool = False
    in_step: bool = False

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
    """What a step did for one sequence: KV of [start, end) is there, and perhaps the id at
    `end`.
    """

    request: str
    start: int
    end: int
    next_id: int | None


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
        step.
        """
        ready = [s for s in self.sequences.values() if s.active and s.pending > 0]
        ready = [s for s in ready if not s.background] or ready
        ready.sort(key=_urgency)  # stable: arrival order within a kind
        room, spans, counts = self.chunk_tokens, [], [0, 0, 0]
        for sequence in ready[: self.max_batch]:
            take = min(sequence.pending, room) if _urgency(sequence) == 2 else sequence.pending
            if take <= 0:
                break
            if self.sequences.get(sequence.request) is not sequence:
                continue  # it had to make room for one before it
            if not self._room(sequence.request, sequence.computed + take):
                continue
            room -= take
            counts[_urgency(sequence)] += take
            spans.append(self._span(sequence, take))
            sequence.in_step = True
        return Batch(tuple(spans), counts[2], counts[1], counts[0]) if spans else None

    def _span(self, sequence: SequenceState, take: int) -> Span:
        start, end = sequence.computed, sequence.computed + take
        return Span(
            request=sequence.request,
            tokens=tuple(sequence.ids[start:end]),
            start=start,
            runs=self._runs(sequence.request, end),
            sampling=sequence.sampling if end == len(sequence.ids) else None,
        )

    def apply(self, batch: Batch, next_ids: Sequence[int | None]) -> list[Outcome]:
        """Books a finished step. One outcome for each span whose sequence is still here."""
        outcomes = []
        for span, next_id in zip(batch.spans, next_ids, strict=True):
            sequence = self.sequences.get(span.request)
            if sequence is None or not sequence.in_step:
                continue
            sequence.in_step = False
            sequence.computed = span.end
            if next_id is not None:
                sequence.ids.append(next_id)
            outcomes.append(Outcome(span.request, span.start, span.end, next_id))
        return outcomes


def _urgency(sequence: SequenceState) -> int:
    """0 decode, 1 extend (pending ids are answer), 2 prefill chunk."""
    if sequence.pending == 1 and sequence.computed >= sequence.prompt_len:
        return 0
    return 1 if sequence.computed >= sequence.prompt_len else 2


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
