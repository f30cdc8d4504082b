"""Which part made a request slow, and what else went on meanwhile. Pure.

The time of a request falls into parts that add up: the legs of TTFT (see `metrics`), then the
stretch decoded by the relay, the gap at the switch, the stretch decoded by the main decoder; apart
from these, what was lost with an attempt that came to nothing, and the waiting for tokens while a
link was down (see `stretches`). The part to blame is the largest. Beside it stands the median of
that part over all answered requests, and what is known of the reason (`reasons`). Where the part
that is furthest above its median is another, it is named as well: long answers are decoded for
long.

Lines of requests.jsonl tell of neither attempts nor outages: there, what was lost before the first
token is in the prefill queue. Without the events that is all that can be said.

Wire time of TTFT is that of the KV to the first decoder. **Exposed** is what of it lies in the leg
`transfer`, which nothing hid; **hidden** is the rest, behind prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pddrt.metrics import LEGS, RequestRecord
from pddrt.report.reasons import Reasons, Why
from pddrt.report.reasons import most_at_once as most_at_once
from pddrt.report.reasons import rate_at as rate_at
from pddrt.report.stretches import BY, Stretch, counted, stretches
from pddrt.report.timeline import Span, Timeline, covered, runs, within
from pddrt.types import SECOND, Ns

AFTER = ("relay_decode", "handoff_gap", "main_decode", "prefill_decode", "ending", "no_token")
PARTS = (*LEGS, *AFTER)
"""Of a line of requests.jsonl."""
FIRST_PARTS = ("gateway", "lost", *LEGS[1:])
"""Of TTFT, where the events are known too."""
ALL_PARTS = (*FIRST_PARTS, *AFTER[:-2], "outage", *AFTER[-2:])

TITLES = {
    "gateway": "gateway",
    "lost": "lost attempt",
    "prefill_queue": "prefill queue",
    "prefill": "prefill",
    "decoder_queue": "decoder queue",
    "transfer": "transfer",
    "delivery": "delivery",
    "relay_decode": "relay decode",
    "handoff_gap": "handoff gap",
    "main_decode": "main decode",
    "prefill_decode": "decode on P",
    "outage": "outage",
    "ending": "ending",
    "no_token": "no token came",
}
LETTERS = {
    "gateway": "G",
    "lost": "L",
    "prefill_queue": "Q",
    "prefill": "P",
    "decoder_queue": "D",
    "transfer": "T",
    "delivery": "V",
    "relay_decode": "R",
    "handoff_gap": "H",
    "main_decode": "M",
    "prefill_decode": "C",
    "outage": "O",
    "ending": "E",
    "no_token": "?",
}
"""Of each part, everywhere."""

Row = Mapping[str, Any]
"""A line of requests.jsonl."""


@dataclass(frozen=True, slots=True)
class WireTime:
    """KV of one attempt at a request to one decoder: how much, and when what of it was hidden and
    exposed. `relay`: whether that decoder is a relay; `first`: whether TTFT waits for it.
    """

    attempt: str
    dst: str
    relay: bool
    first: bool
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
    median over all requests; `why`: what else is known, in words. `laid`: the parts as they came
    one after the other, in ns since the request was sent.
    """

    row: Row
    parts: Mapping[str, Ns]
    total: Ns
    part: str
    usual: Ns
    why: Why
    above: str
    """The part that is furthest above its median."""
    above_usual: Ns
    laid: Sequence[Stretch]

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
    """Attempt by attempt: to the relay, then to main decoders, as far as KV went there."""
    transfer, found = stages(record).get("transfer"), []
    mine, first = counted(record, timeline), record.first_decoder
    ways = [(a.name, a.relay, a.instances) for a in timeline.attempts(record.id)]
    names = [name for name in (record.relay, record.main) if name]
    for name, relay, instances in ways or [(record.id, record.relay, names)]:
        counts = mine is None or mine.name == name
        if mine is not None and counts:
            first = mine.relay or mine.main
        for wire in timeline.wires_of(name, *instances):
            spans = runs([(start, end) for start, end, _ in wire.pieces])
            # Nothing of a transfer that TTFT does not wait for is exposed.
            felt = counts and wire.dst == first
            start, end = (transfer if felt else None) or (record.sent, record.sent)
            hidden = within(spans, 0, start) + within(spans, end, max(end, wire.ended))
            exposed = within(spans, start, end)
            of = (wire.dst == relay, felt, wire.bytes)
            found.append(WireTime(name, wire.dst, *of, tuple(hidden), tuple(exposed)))
    return found


class Judge:
    """Explains requests of one run: `rows` as their lines say, for reasons also `records`."""

    def __init__(
        self, rows: Sequence[Row], records: Mapping[str, RequestRecord], timeline: Timeline
    ) -> None:
        self._rows = rows
        self._known = records
        self._timeline = timeline
        self._reasons = Reasons(records, timeline)
        self.laid = {row["id"]: self._laid(row) for row in rows}
        """Each request's parts as they came, in ns since it was sent."""
        self.parts = {name: _summed(laid, ALL_PARTS) for name, laid in self.laid.items()}
        answered = [p for name, p in self.parts.items() if self.laid[name] and not p["no_token"]]
        self.usual = {part: _median(p[part] for p in answered) for part in ALL_PARTS}
        firsts = [_summed(laid, FIRST_PARTS) for row in rows if (laid := self._first(row))]
        self.usual_first = {part: _median(p[part] for p in firsts) for part in FIRST_PARTS}

    def first_token(self, limit: int) -> list[Slow]:
        """The requests with the longest TTFT, the longest first."""
        of = {row["id"]: laid for row in self._rows if (laid := self._first(row))}
        return self._slowest(of, FIRST_PARTS, self.usual_first, limit)

    def whole(self, limit: int) -> list[Slow]:
        """Those that took longest in all."""
        of = {name: laid for name, laid in self.laid.items() if laid}
        return self._slowest(of, ALL_PARTS, self.usual, limit)

    def of(self, row: Row) -> Slow | None:
        """Why its first token took what it took; None before it."""
        laid = self._first(row)
        return self._judge(row, laid, FIRST_PARTS, self.usual_first) if laid else None

    def first_parts(self) -> dict[str, dict[str, Ns]]:
        """Of TTFT, of every request that got a token."""
        return {row["id"]: _summed(laid, FIRST_PARTS)
                for row in self._rows if (laid := self._first(row))}  # fmt: skip

    def waited(self, row: Row) -> list[str]:
        """Names of the links for which its tokens waited while these were down."""
        record = self._known.get(row["id"])
        if record is None or not self.parts[row["id"]]["outage"]:
            return []
        return self._reasons.outages(record, self._absolute(record, self.laid[row["id"]]))

    def _laid(self, row: Row) -> list[Stretch]:
        """From the events, where these tell of the same request as its line does."""
        told, record = parts(row), self._known.get(row["id"])
        if record is not None and record.legs is not None and _agree(record, row):
            of = stretches(record, self._timeline)
            return [(part, a - record.sent, b - record.sent) for part, a, b in of]
        laid, at = [], 0
        for part, length in told.items():
            if length:
                laid.append((part, at, at + length))
            at += length
        return laid

    def _first(self, row: Row) -> list[Stretch]:
        """What of it was before the first token; empty where none came."""
        if not row["ttft_legs"] or not row["token_times_s"]:
            return []
        first = ns(row["token_times_s"][0])
        return [stretch for stretch in self.laid[row["id"]] if stretch[1] < first]

    def _slowest(
        self,
        of: Mapping[str, Sequence[Stretch]],
        names: Sequence[str],
        usual: Mapping[str, Ns],
        limit: int,
    ) -> list[Slow]:
        rows = [row for row in self._rows if row["id"] in of]
        rows.sort(key=lambda row: -of[row["id"]][-1][2])
        return [self._judge(row, of[row["id"]], names, usual, True) for row in rows[:limit]]

    def _judge(
        self,
        row: Row,
        laid: Sequence[Stretch],
        names: Sequence[str],
        usual: Mapping[str, Ns],
        reason: bool = False,
    ) -> Slow:
        of = _summed(laid, names)
        part = max(of, key=lambda name: of[name])
        above = max(of, key=lambda name: of[name] - usual[name])
        record, why = self._known.get(row["id"]), Why()
        if reason and record is not None:
            why = self._reasons.of(record, part, self._absolute(record, laid))
        total = sum(of.values())
        return Slow(row, of, total, part, usual[part], why, above, usual[above], laid)

    def _absolute(self, record: RequestRecord, laid: Sequence[Stretch]) -> list[Stretch]:
        return [(part, a + record.sent, b + record.sent) for part, a, b in laid]


def _agree(record: RequestRecord, row: Row) -> bool:
    """Whether the events, of which some may be lost, have all that the line has."""
    e2e = None if row["e2e_s"] is None else ns(row["e2e_s"])
    times = [t - record.sent for t in record.times]
    return record.e2e == e2e and times == [ns(t) for t in row["token_times_s"]]


def _summed(laid: Iterable[Stretch], names: Sequence[str]) -> dict[str, Ns]:
    lengths = dict.fromkeys(names, 0)
    for part, start, end in laid:
        lengths[part] += end - start
    return lengths


def _median(values: Iterable[Ns]) -> Ns:
    known = sorted(values)
    return known[(len(known) - 1) // 2] if known else 0
