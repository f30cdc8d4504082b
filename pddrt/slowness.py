"""Which part made a request slow, and what else went on meanwhile. Pure.

The time of a request falls into parts that add up: the legs of TTFT (see `metrics`), then the
stretch decoded by the relay, the gap at the switch, the stretch decoded by the main decoder. The
part to blame is the largest. Beside it stands the median of that part over all answered requests,
and what the record tells of the reason: who else was in the queue, how much had to be computed,
with how many other transfers the link was shared, which fault was in effect. Where the part that is
furthest above its median is another, it is named as well: long answers are decoded for long.

Wire time of TTFT is that of the KV to the first decoder. **Exposed** is what of it lies in the leg
`transfer`, which nothing hid; **hidden** is the rest, behind prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pddrt.metrics import LEGS, RequestRecord
from pddrt.timeline import Span, Timeline, Wire, covered, runs, within
from pddrt.types import SECOND, Ns
from pddrt.units import format_duration, format_size

AFTER = ("relay_decode", "handoff_gap", "main_decode", "prefill_decode", "ending", "no_token")
PARTS = (*LEGS, *AFTER)

TITLES = {
    "gateway": "gateway",
    "prefill_queue": "prefill queue",
    "prefill": "prefill",
    "decoder_queue": "decoder queue",
    "transfer": "transfer",
    "delivery": "delivery",
    "relay_decode": "relay decode",
    "handoff_gap": "handoff gap",
    "main_decode": "main decode",
    "prefill_decode": "decode on P",
    "ending": "ending",
    "no_token": "no token came",
}
BY = {"P": "prefill_decode", "R": "relay_decode", "M": "main_decode"}
"""The part that a token's gap is of, by who made it."""

Row = Mapping[str, Any]
"""A line of requests.jsonl."""


@dataclass(frozen=True, slots=True)
class WireTime:
    """KV of one request to one decoder: how much, and when what of it was hidden and exposed."""

    dst: str
    bytes: int
    hidden_spans: tuple[Span, ...]
    exposed_spans: tuple[Span, ...]

    @property
    def hidden(self) -> Ns:
        return covered(self.hidden_spans)

    @property
    def exposed(self) -> Ns:
        return covered(self.exposed_spans)


@dataclass(frozen=True, slots=True)
class Slow:
    """`part`: the largest of `parts`, which are what is judged and come to `total`; `usual`: its
    median over all requests; `why`: what else is known, in words.
    """

    row: Row
    parts: Mapping[str, Ns]
    total: Ns
    part: str
    usual: Ns
    why: str
    above: str
    """The part that is furthest above its median."""
    above_usual: Ns

    @property
    def length(self) -> Ns:
        return self.parts[self.part]

    @property
    def share(self) -> float:
        return self.length / self.total if self.total else 0.0


def parts(row: Row) -> dict[str, Ns]:
    """Of E2E; they add up to it. All of it is `no_token` where none came; empty where nobody knows
    how long it was.
    """
    legs, times, sources = row["ttft_legs"], row["token_times_s"], row["token_source"]
    lengths = dict.fromkeys(PARTS, 0)
    if not legs or not times:
        if row["e2e_s"] is None:
            return {}
        return {**lengths, "no_token": ns(row["e2e_s"])}
    lengths |= {leg: ns(length) for leg, length in legs.items()}
    handed = row["handoff"] is not None and row["instances"]["relay"] is not None
    stamps, switch = [ns(t) for t in times], sources.find("M") if handed else -1
    for i, (before, t) in enumerate(pairwise(stamps), 1):
        lengths["handoff_gap" if i == switch else BY[sources[i]]] += t - before
    if row["e2e_s"] is not None:
        lengths["ending"] = max(0, ns(row["e2e_s"]) - stamps[-1])
    return lengths


def ns(seconds: float) -> Ns:
    """Exact for what a file shows with nine decimals."""
    return round(seconds * SECOND)


def stages(record: RequestRecord) -> dict[str, Span]:
    """When each leg of TTFT was; empty before the first token."""
    found, at = {}, record.sent
    for leg, length in (record.legs or {}).items():
        found[leg] = (at, at + length)
        at += length
    return found


def wire_times(record: RequestRecord, timeline: Timeline) -> list[WireTime]:
    """To the relay, then to the main decoder, as far as KV went there."""
    transfer = stages(record).get("transfer")
    found = []
    for wire in timeline.wires_of(record.id, record.relay, record.main):
        spans = runs([(start, end) for start, end, _ in wire.pieces])
        # Nothing of a transfer that TTFT does not wait for is exposed.
        felt = transfer if wire.dst == record.first_decoder else None
        start, end = felt or (record.sent, record.sent)
        hidden = within(spans, 0, start) + within(spans, end, max(end, wire.ended))
        exposed = within(spans, start, end)
        found.append(WireTime(wire.dst, wire.bytes, tuple(hidden), tuple(exposed)))
    return found


class Judge:
    """Explains requests of one run: `rows` as their lines say, for reasons also `records`."""

    def __init__(
        self, rows: Sequence[Row], records: Mapping[str, RequestRecord], timeline: Timeline
    ) -> None:
        self._rows = rows
        self._known = records
        self._records = list(records.values())
        self._timeline = timeline
        self.parts = {row["id"]: parts(row) for row in rows}
        answered = [p for p in self.parts.values() if p and not p["no_token"]]
        self.usual = {part: _median(p[part] for p in answered) for part in PARTS}

    def first_token(self, limit: int) -> list[Slow]:
        """The requests with the longest TTFT, the longest first."""
        of = {row["id"]: {leg: self.parts[row["id"]].get(leg, 0) for leg in LEGS}
              for row in self._rows if row["ttft_legs"] and row["token_times_s"]}  # fmt: skip
        return self._slowest(of, limit)

    def whole(self, limit: int) -> list[Slow]:
        """Those that took longest in all."""
        return self._slowest({name: of for name, of in self.parts.items() if of}, limit)

    def of(self, row: Row) -> Slow | None:
        """Why its first token took what it took; None before it."""
        legs = {leg: self.parts[row["id"]].get(leg, 0) for leg in LEGS}
        return self._judge(row, legs) if row["ttft_legs"] else None

    def _slowest(self, of: Mapping[str, Mapping[str, Ns]], limit: int) -> list[Slow]:
        rows = [row for row in self._rows if row["id"] in of]
        rows.sort(key=lambda row: -sum(of[row["id"]].values()))
        return [self._judge(row, of[row["id"]], True) for row in rows[:limit]]

    def _judge(self, row: Row, of: Mapping[str, Ns], reason: bool = False) -> Slow:
        part = max(of, key=lambda name: of[name])
        above = max(of, key=lambda name: of[name] - self.usual[name])
        record = self._known.get(row["id"])
        why = ""
        if reason and record is not None:
            told = (self._why(record, row, part), self._faults(record, row, part))
            why = "; ".join(words for words in told if words)
        usual = self.usual
        return Slow(row, of, sum(of.values()), part, usual[part], why, above, usual[above])

    def _faults(self, r: RequestRecord, row: Row, part: str) -> str:
        """What was done to the deployment while that part lasted."""
        start, end = self._span(r, row, part)
        hit = [
            fault.what
            for fault in self._timeline.faults.values()
            if not fault.missed
            and fault.began < end
            and start < (fault.began + 1 if fault.ended is None else fault.ended)
        ]
        return f"a fault was in effect: {', '.join(hit)}" if hit else ""

    def _span(self, r: RequestRecord, row: Row, part: str) -> Span:
        """When a part was; of tokens, from the first of its gaps to the last."""
        if part in LEGS:
            return stages(r).get(part, (r.sent, r.sent))
        if part == "no_token" or not r.times:
            return r.sent, r.sent + ns(row["e2e_s"] or 0)
        spans = [
            (a, b)
            for i, (a, b) in enumerate(pairwise(r.times), 1)
            if part == ("handoff_gap" if i == r.switch else BY[r.sources[i]])
        ]
        return (spans[0][0], spans[-1][1]) if spans else (r.times[-1], r.finished or r.times[-1])

    # -- reasons -----------------------------------------------------------------------------------

    def _why(self, r: RequestRecord, row: Row, part: str) -> str:
        start, end = stages(r).get(part, (r.sent, r.sent))
        match part:
            case "prefill_queue":
                return self._queue(r, start, end)
            case "prefill":
                return self._prefill(r, start, end)
            case "decoder_queue":
                return self._memory(r, start)
            case "transfer":
                return self._transfer(r, start, end)
            case "relay_decode":
                return self._pace(r, "R")
            case "main_decode":
                return self._pace(r, "M")
            case "prefill_decode":
                return self._pace(r, "P")
            case "handoff_gap":
                ids = f"{r.handoff_ids} ids in {r.seam.rounds} round(s)"
                return f"{ids} went to {r.main}, which extended over {r.extend_tokens}"
            case "no_token":
                return str(row.get("detail") or "")
            case _:
                return ""

    def _queue(self, r: RequestRecord, start: Ns, end: Ns) -> str:
        others = [
            o.id
            for o in self._records
            if o is not r and o.prefill == r.prefill and _overlap(_prefill(o), (start, end))
        ]
        if not others:
            return f"{r.prefill} computed no other prompt meanwhile"
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        return f"{r.prefill} computed the prompt(s) of {named} meanwhile"

    def _prefill(self, r: RequestRecord, start: Ns, end: Ns) -> str:
        cached = r.cached["prefill"]
        computed = max(0, r.prompt_tokens - cached)
        text = (
            f"{computed:,} of {r.prompt_tokens:,} prompt tokens were to be computed on {r.prefill}"
        )
        beside = sum(
            o is not r and o.prefill == r.prefill and _overlap(_prefill(o), (start, end))
            for o in self._records
        )
        if end > start:
            text += f", at {computed * 1_000_000_000 // (end - start):,} tokens/s"
        return text + (f", beside {beside} other prompt(s)" if beside else "")

    def _memory(self, r: RequestRecord, at: Ns) -> str:
        decoder = r.first_decoder
        held = sum(
            o is not r
            and decoder in o.admitted
            and o.admitted[decoder] <= at < o.freed.get(decoder, at + 1)
            for o in self._records
        )
        return f"{decoder} had no memory for it: {held} other request(s) were there"

    def _transfer(self, r: RequestRecord, start: Ns, end: Ns) -> str:
        wires = self._timeline.wires_of(r.id, r.first_decoder)
        if not wires:
            return "no KV had to cross: it is the notice's own way"
        wire = wires[0]
        direction = self._timeline.direction(wire.src, wire.dst)
        over = "" if direction is None else f" over {direction.name}"
        text = f"{format_size(wire.bytes, 3)} of KV from {wire.src} to {wire.dst}{over}"
        if direction is None:
            return text
        beside = _most_at_once(
            [o for o in direction.wires if o is not wire], max(start, wire.began), end
        )
        text += f", which {beside} other transfer(s) shared at most" if beside else ", alone there"
        rate = _rate_at(direction.caps, start)
        if rate == 0:
            text += "; the link was down"
        elif rate is not None:
            alone = wire.bytes * 1_000_000_000 // rate
            text += f"; alone it takes {format_duration(alone, 3)} at the link's rate"
        return text

    def _pace(self, r: RequestRecord, letter: str) -> str:
        tokens = r.sources.count(letter)
        part = {"R": "relay_decode", "M": "main_decode", "P": "prefill_decode"}[letter]
        length = self.parts[r.id][part]
        where = {"R": r.relay, "M": r.main, "P": r.prefill}[letter]
        each = format_duration(length // tokens, 3) if tokens else "-"
        lost = len(self._timeline.preempted.get(r.id, []))
        again = f"; it lost its memory {lost} time(s) on the way" if lost else ""
        return f"{tokens:,} tokens on {where}, one in {each}{again}"


def _prefill(record: RequestRecord) -> Span | None:
    if record.prefill_started is None or record.prefill_ended is None:
        return None
    return record.prefill_started, record.prefill_ended


def _overlap(a: Span | None, b: Span) -> bool:
    return a is not None and a[0] < b[1] and b[0] < a[1]


def _most_at_once(wires: Sequence[Wire], start: Ns, end: Ns) -> int:
    edges = []
    for since, until in within([(w.began, w.ended) for w in wires], start, end):
        edges += [(since, 1), (until, -1)]
    now = most = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


def _rate_at(caps: Sequence[tuple[Ns, int | None]], t: Ns) -> int | None:
    rate = None
    for since, cap in caps:
        if since <= t:
            rate = cap
    return rate


def _median(values: Iterable[Ns]) -> Ns:
    known = sorted(values)
    return known[(len(known) - 1) // 2] if known else 0
