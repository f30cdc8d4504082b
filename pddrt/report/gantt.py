"""What the report's Gantt chart draws: the data that its JavaScript gets, as small as it goes.

A request is a list, not an object, and its times are microseconds since it was sent: 1,000 requests
are to stay far under a megabyte. `FIELDS` names the places; assets/report.js reads them by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from pddrt.metrics import RequestRecord
from pddrt.report.attempts import Attempt
from pddrt.report.reasons import story
from pddrt.report.slowness import ALL_PARTS, LETTERS, TITLES, Row, Slow
from pddrt.report.stretches import stretches
from pddrt.report.timeline import Timeline, runs
from pddrt.show import clean
from pddrt.types import Ns

MOST = 5_000
"""So many requests at most are in the chart, the first ones: a page has to stay loadable."""

FIELDS = (
    "id", "pipeline", "attempts", "sent", "end", "ttft", "prompt_tokens", "answer_tokens", "finish",
    "slow", "segments", "rounds", "prompt", "answer", "sources", "story",
)  # fmt: skip
WIRES = {"kv_relay": ("r", "KV to RLD"), "kv_main": ("m", "KV to MD")}
KINDS = (*ALL_PARTS, *WIRES)
PROMPT, ANSWER = 90, 160
"""Characters of the texts."""
ROUNDS = 64
"""So many rounds of a handoff are told."""

Segment = tuple[str, Ns, Ns, int]
"""Kind, start, end, and the place of the attempt that it is of, from 0."""


def data(
    rows: Mapping[str, Row],
    records: Sequence[RequestRecord],
    timeline: Timeline,
    slow: Mapping[str, Slow],
) -> dict[str, Any]:
    """`slow`: the part that is to blame for each request's TTFT."""
    pipelines = sorted({r.pipeline or "not routed" for r in records})
    return {
        "fields": FIELDS,
        "kinds": [[part, LETTERS[part], TITLES[part]] for part in ALL_PARTS]
        + [[kind, *words] for kind, words in WIRES.items()],
        "pipelines": list(map(clean, pipelines)),
        "end": timeline.end // 1000,
        "faults": [
            [f.began // 1000, None if f.ended is None else f.ended // 1000, clean(f.what)]
            for f in sorted(timeline.faults.values(), key=lambda f: f.began)
            if not f.missed
        ],
        "rows": [_row(r, rows.get(r.id), timeline, slow.get(r.id), pipelines)
                 for r in records[:MOST]],
    }  # fmt: skip


def _row(
    r: RequestRecord,
    row: Row | None,
    timeline: Timeline,
    slow: Slow | None,
    pipelines: Sequence[str],
) -> list[Any]:
    found, attempts = list(segments(r, timeline)), timeline.attempts(r.id)
    end = r.finished or max([r.sent, *(end for _, _, end, _ in found)])
    flat = [
        n
        for kind, a, b, attempt in found
        for n in (KINDS.index(kind), _us(r, a), _us(r, b), attempt)
    ]
    return [
        clean(r.id),
        pipelines.index(r.pipeline or "not routed"),
        [_attempt(r, a, b) for a, b in zip_longest(attempts, attempts[1:])],
        r.sent // 1000,
        _us(r, end),
        None if r.ttft is None else r.ttft // 1000,
        r.prompt_tokens,
        len(r.ids),
        clean((r.finish_reason or "not seen") + (f": {r.detail}" if r.detail else "")),
        None if slow is None else KINDS.index(slow.part),
        flat,
        [
            [_us(r, t), ids, int(last)]
            for a in attempts
            if (rounds := timeline.handoffs.get(a.name)) is not None
            for t, ids, last in rounds.sent[:ROUNDS]
        ],
        clean(r.prompt[:PROMPT]),
        clean(r.text[:ANSWER]),
        [r.sources.count(letter) for letter in "PRM"],
        clean(story(attempts)),
    ]


def _attempt(r: RequestRecord, a: Attempt, following: Attempt | None) -> list[Any]:
    """Its way, when it began, of how many tokens P and MD had the KV already; and when one of which
    no token came before the `following` one computed the prompt, as far as it got.
    """
    told = [clean(a.way), _us(r, a.began), a.hits.get(a.prefill or "", 0), a.hits.get(a.main or "")]
    if following is not None and following.after == a.after and a.prefill_started is not None:
        ended = a.ended if a.prefill_ended is None else a.prefill_ended
        told += [_us(r, a.prefill_started), _us(r, ended or a.prefill_started)]
    return told


def _us(r: RequestRecord, t: Ns) -> int:
    return max(0, t - r.sent) // 1000


def segments(r: RequestRecord, timeline: Timeline) -> Iterator[Segment]:
    """Where its time went, in order; then its KV on the wire, attempt by attempt."""
    attempts = timeline.attempts(r.id)
    for kind, start, end in stretches(r, timeline):
        began = [i for i, a in enumerate(attempts) if a.began <= start]
        yield kind, start, end, began[-1] if began else 0
    for i, attempt in enumerate(attempts):
        for name in attempt.instances:
            kind = "kv_relay" if name == attempt.relay else "kv_main"
            for wire in timeline.wires_of(attempt.name, name):
                for start, end in runs([(a, b) for a, b, _ in wire.pieces]):
                    yield kind, start, end, i
