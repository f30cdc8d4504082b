"""What the report's Gantt chart draws: the data that its JavaScript gets, as small as it goes.

A request is a list, not an object, and its times are microseconds since it was sent: 1,000 requests
are to stay far under a megabyte. `FIELDS` names the places; assets/report.js reads them by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pddrt.metrics import RequestRecord
from pddrt.show import clean
from pddrt.slowness import Row, Slow
from pddrt.timeline import Timeline, runs
from pddrt.types import Ns

MOST = 5_000
"""So many requests at most are in the chart, the first ones: a page has to stay loadable."""

FIELDS = (
    "id", "pipeline", "prefill", "relay", "main", "sent", "end", "ttft", "prompt_tokens",
    "cached", "answer_tokens", "finish", "slow", "segments", "rounds", "prompt", "answer",
    "sources",
)  # fmt: skip
KINDS = ("queue", "prefill", "wait", "kv_relay", "kv_main", "relay", "handoff", "main", "on_p")
PROMPT, ANSWER = 90, 160
"""Characters of the texts."""

Segment = tuple[str, Ns, Ns]


def data(
    rows: Mapping[str, Row],
    records: Sequence[RequestRecord],
    timeline: Timeline,
    slow: Mapping[str, Slow],
) -> dict[str, Any]:
    """`slow`: the part that is to blame for each request's TTFT."""
    pipelines = sorted({r.pipeline or "not routed" for r in records})
    names = list(timeline.instances)
    index = {name: i for i, name in enumerate(names)}
    return {
        "fields": FIELDS,
        "kinds": KINDS,
        "pipelines": list(map(clean, pipelines)),
        "instances": [[clean(i.name), clean(i.site)] for i in timeline.instances.values()],
        "end": timeline.end // 1000,
        "faults": [
            [f.began // 1000, None if f.ended is None else f.ended // 1000, clean(f.what)]
            for f in timeline.faults.values()
            if not f.missed
        ],
        "rows": [
            _row(r, rows.get(r.id), timeline, slow.get(r.id), pipelines, index)
            for r in records[:MOST]
        ],
    }


def _row(
    r: RequestRecord,
    row: Row | None,
    timeline: Timeline,
    slow: Slow | None,
    pipelines: Sequence[str],
    index: Mapping[str, int],
) -> list[Any]:
    found = list(segments(r, timeline))
    end = max([r.sent, r.finished or r.sent, *(end for _, _, end in found)])
    rounds = timeline.handoffs.get(r.id)
    flat = [n for kind, a, b in found for n in (KINDS.index(kind), _us(r, a), _us(r, b))]
    return [
        clean(r.id),
        pipelines.index(r.pipeline or "not routed"),
        *(index.get(name or "") for name in (r.prefill, r.relay, r.main)),
        r.sent // 1000,
        _us(r, end),
        None if r.ttft is None else r.ttft // 1000,
        r.prompt_tokens,
        [r.cached["prefill"], r.cached["main"]],
        len(r.ids),
        clean((r.finish_reason or "not seen") + (f": {r.detail}" if r.detail else "")),
        None if slow is None else slow.part,
        flat,
        []
        if rounds is None
        else [[_us(r, t), ids, int(last)] for t, ids, last in rounds.sent[:64]],
        clean(r.prompt[:PROMPT]),
        clean(r.text[:ANSWER]),
        [r.sources.count(letter) for letter in "PRM"],
    ]


def _us(r: RequestRecord, t: Ns) -> int:
    return max(0, t - r.sent) // 1000


def segments(r: RequestRecord, timeline: Timeline) -> Iterator[Segment]:
    """In the order in which they are drawn. What had not ended by the record's end lasts to it."""
    last = r.finished if r.finished is not None else timeline.end
    started = r.prefill_started if r.prefill_started is not None else last
    yield "queue", r.sent, min(started, last)
    if r.prefill_started is not None:
        ended = r.prefill_ended if r.prefill_ended is not None else last
        yield "prefill", started, ended
        if r.prefill_ended is not None:
            yield "wait", ended, max(ended, r.times[0] if r.times else last)
    for decoder, kind in ((r.relay, "kv_relay"), (r.main, "kv_main")):
        for wire in timeline.wires_of(r.id, decoder):
            for start, end in runs([(a, b) for a, b, _ in wire.pieces]):
                yield kind, start, end
    yield from _decoding(r)


def _decoding(r: RequestRecord) -> Iterator[Segment]:
    """The stretches of tokens, as the client got them; the switch is a stretch of its own."""
    if not r.times:
        return
    kind = {"R": "relay", "M": "main", "P": "on_p"}
    at, times = 0, r.times
    for i in range(1, len(times)):
        if i == r.switch:
            if times[i - 1] > times[at]:
                yield kind["R"], times[at], times[i - 1]
            yield "handoff", times[i - 1], times[i]
            at = i
        elif i > at + 1 and r.sources[i] != r.sources[i - 1]:
            yield kind[r.sources[i - 1]], times[at], times[i - 1]
            at = i - 1
    if times[-1] > times[at]:
        yield kind[r.sources[-1]], times[at], times[-1]
