"""What is known of why a part of a request took so long, in words. Pure.

**Because**: what the record tells of that part: who else was in the queue, how much had to be
computed, with how many other transfers the link was shared, which attempt was lost and why; and
faults that touched it. A fault touches a part where it acted on an instance that the part was spent
on, on a link that it had to cross, or on the request by name. Everything else that was done to the
deployment meanwhile is only **also** at that time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pddrt.metrics import RequestRecord
from pddrt.report.attempts import Attempt
from pddrt.report.stretches import Stretch, Way, attempt_of, ways
from pddrt.report.timeline import Fault, Span, Timeline, Wire, covered, within
from pddrt.types import Ns
from pddrt.units import format_duration, format_size, many

NAMED = 3
"""So many requests are named; of more there is the number."""
IDLE = frozenset({"skew", "cancel", "disconnect", "stale-signals", "wrong-signals"})
"""Faults that slow nobody but whom they name: clocks that run apart, a user who goes away."""
ONE_FRAME = frozenset({"corrupt", "truncate", "duplicate", "delay"})
"""Faults that meet single frames: who lost none was not touched."""


@dataclass(frozen=True, slots=True)
class Why:
    """`because`: what made it so; `also`: faults at that time that had nothing to do with it."""

    because: str = ""
    also: str = ""


class Reasons:
    def __init__(self, records: Mapping[str, RequestRecord], timeline: Timeline) -> None:
        self._records = list(records.values())
        self._timeline = timeline

    def of(self, r: RequestRecord, part: str, stretches: Sequence[Stretch]) -> Why:
        """`stretches`: those of the request in which the part is looked for."""
        spans = [(start, end) for name, start, end in stretches if name == part]
        if not spans:
            return Why()
        longest = max(spans, key=lambda span: span[1] - span[0])
        told = self._why(r, part, longest, sum(b - a for a, b in spans))
        mine: list[str] = []
        others: list[str] = []
        for fault in self._timeline.faults.values():
            if any(_during(fault, span) for span in spans):
                (mine if self._touches(fault, r, part, longest) else others).append(fault.what)
        faults = f"fault: {', '.join(dict.fromkeys(mine))}" if mine else ""
        return Why(
            "; ".join(words for words in (told, faults) if words),
            ", ".join(dict.fromkeys(others)),
        )

    def outages(self, r: RequestRecord, stretches: Sequence[Stretch]) -> list[str]:
        """Names of the links that were down while the request's tokens waited for them."""
        found: dict[str, None] = {}
        for part, start, end in stretches:
            attempt = attempt_of(r, self._timeline, start)
            for way in ways(r, self._timeline, part, attempt) if part == "outage" else ():
                if within(self._timeline.down(way), start, end):
                    found[self._timeline.directions[way].name] = None
        return list(found)

    # -- faults ------------------------------------------------------------------------------------

    def _touches(self, fault: Fault, r: RequestRecord, part: str, span: Span) -> bool:
        named = names_in(fault.what)
        if r.id in named:
            return True
        attempt = attempt_of(r, self._timeline, span[0])
        if fault.do in IDLE or attempt is None:
            return False
        if fault.do in ONE_FRAME and attempt.cut is None:
            return False
        spent_on = _spent_on(part, attempt)
        instances = named & set(self._timeline.instances)
        if instances:
            return instances <= spent_on
        crossed = ways(r, self._timeline, part, attempt)
        return bool(crossed & ways_of(fault, self._timeline))

    # -- parts -------------------------------------------------------------------------------------

    def _why(self, r: RequestRecord, part: str, span: Span, total: Ns) -> str:
        start, end = span
        a = attempt_of(r, self._timeline, start)
        match part:
            case "lost":
                return "; ".join(self._lost(r, span))
            case "prefill_queue" if a:
                return self._queue(r, a, span)
            case "prefill" if a:
                return self._prefill(r, a, span)
            case "decoder_queue":
                return self._memory(r, start)
            case "transfer" if a:
                return self._transfer(a, start, end)
            case "relay_decode" | "main_decode" | "prefill_decode":
                return self._pace(r, part, total)
            case "outage" if a:
                return "; ".join(self._outage(r, a, span))
            case "handoff_gap" if a:
                return self._handoff(r, a)
            case "no_token":
                return r.detail
            case _:
                return ""

    def _lost(self, r: RequestRecord, span: Span) -> Iterator[str]:
        of = self._timeline.attempts(r.id)
        for number, attempt in enumerate(of, 1):
            for reroute in attempt.reroutes:
                if reroute.taken is not None and span[0] < reroute.taken <= span[1]:
                    yield (
                        f"{reroute.lost} was lost at {when(reroute.t)} ({reroute.why}); "
                        f"{reroute.main} took over at {when(reroute.taken)}"
                    )
            if attempt.ended is None or not span[0] < attempt.ended <= span[1]:
                continue
            yield from _cut(number, attempt)
            yield from self._down(ways(r, self._timeline, "lost", attempt), span)
            if number < len(of):
                yield _again(number + 1, of[number])

    def _down(self, crossed: set[Way], span: Span) -> Iterator[str]:
        """Of how much of a span a link could not be used: both its directions in one where these
        were down alike.
        """
        found: dict[tuple[str, Ns], list[str]] = {}
        for way in sorted(crossed):
            if down := covered(within(self._timeline.down(way), *span)):
                direction = self._timeline.directions[way]
                found.setdefault((direction.link, down), []).append(direction.name)
        for (link, down), names in found.items():
            name = names[0] if len(names) == 1 else link
            yield f"{name} was down for {format_duration(down, 3)} of that"

    def _outage(self, r: RequestRecord, a: Attempt, span: Span) -> Iterator[str]:
        for way in sorted(ways(r, self._timeline, "outage", a)):
            for since, until in self._timeline.down(way):
                if since < span[1] and span[0] < until:
                    name = self._timeline.directions[way].name
                    yield (
                        f"tokens waited for {name}, which was down from {when(since)} to "
                        f"{when(until)}"
                    )

    def _queue(self, r: RequestRecord, a: Attempt, span: Span) -> str:
        others = self._prompts_beside(r, a, span)
        if not others:
            return f"{a.prefill} computed no other prompt meanwhile"
        rest = len(others) - NAMED
        named = ", ".join(others[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
        return f"{a.prefill} computed the prompt{'s' * (len(others) > 1)} of {named} meanwhile"

    def _prefill(self, r: RequestRecord, a: Attempt, span: Span) -> str:
        cached = a.hits.get(a.prefill or "", 0)
        computed = max(0, a.prompt_tokens - cached)
        length = span[1] - span[0]
        text = f"{computed:,} of {a.prompt_tokens:,} prompt tokens were computed on {a.prefill}"
        text += f", at {computed * 1_000_000_000 // length:,} tokens/s" if length else ""
        beside = len(self._prompts_beside(r, a, span))
        return text + (f", beside {many(beside, 'other prompt')}" if beside else "")

    def _prompts_beside(self, r: RequestRecord, a: Attempt, span: Span) -> list[str]:
        """Other requests whose prompts the same instance computed then."""
        return [
            o.id
            for o in self._records
            if o is not r
            and any(
                b.prefill == a.prefill
                and b.prefill_started is not None
                and b.prefill_ended is not None
                and b.prefill_started < span[1]
                and span[0] < b.prefill_ended
                for b in self._timeline.attempts(o.id)
            )
        ]

    def _memory(self, r: RequestRecord, at: Ns) -> str:
        decoder = r.first_decoder
        held = sum(
            o is not r
            and decoder in o.admitted
            and o.admitted[decoder] <= at < o.freed.get(decoder, at + 1)
            for o in self._records
        )
        return f"{decoder} had no memory for it: {many(held, 'other request')} held it"

    def _transfer(self, a: Attempt, start: Ns, end: Ns) -> str:
        wires = self._timeline.wires_of(a.name, a.relay or a.main)
        if not wires:
            return "no KV had to cross: it is the notice's own way"
        wire = wires[0]
        direction = self._timeline.direction(wire.src, wire.dst)
        over = "" if direction is None else f" over {direction.name}"
        text = f"{format_size(wire.bytes, 3)} of KV from {wire.src} to {wire.dst}{over}"
        if direction is None:
            return text
        beside = most_at_once(
            [o for o in direction.wires if o is not wire], max(start, wire.began), end
        )
        shared = many(beside, "other transfer")
        text += f", which {shared} shared at most" if beside else ", alone there"
        rate = rate_at(direction.caps, start)
        if rate == 0:
            text += "; the link was down"
        elif rate is not None:
            alone = wire.bytes * 1_000_000_000 // rate
            text += f"; alone it takes {format_duration(alone, 3)} at the link's rate"
        return text

    def _handoff(self, r: RequestRecord, a: Attempt) -> str:
        rounds = self._timeline.handoffs.get(a.name)
        if rounds is None:
            return ""
        ids = sum(ids for _, ids, _ in rounds.sent)
        extended = sum(tokens for _, tokens, _ in rounds.taken)
        text = f"{many(ids, 'id')} in {many(len(rounds.sent), 'round')} went to {a.main}"
        return text + f", which extended over {extended:,}"

    def _pace(self, r: RequestRecord, part: str, total: Ns) -> str:
        letter, where = {
            "relay_decode": ("R", r.relay),
            "main_decode": ("M", r.main),
            "prefill_decode": ("P", r.prefill),
        }[part]
        tokens = r.sources.count(letter)
        each = format_duration(total // tokens, 3) if tokens else "-"
        lost = len(self._timeline.preempted.get(r.id, []))
        again = f"; it lost its memory {many(lost, 'time')} on the way" if lost else ""
        return f"{many(tokens, 'token')} on {where}, one in {each}{again}"


def when(t: Ns) -> str:
    """A time of the run, for a sentence: to the millisecond, as faults and frames are apart."""
    return f"{t / 1e9:.3f} s"


def _cut(number: int, attempt: Attempt) -> Iterator[str]:
    cut = attempt.cut
    if cut is not None:
        yield f"attempt {number}, by way of {attempt.way}, was cut at {when(cut[0])} ({cut[1]})"


def _again(number: int, attempt: Attempt) -> str:
    made = f" and the {many(attempt.after, 'token')} that there were" if attempt.after else ""
    return (
        f"attempt {number}, by way of {attempt.way}, began at {when(attempt.began)}: the prompt"
        f"{made} went through prefill again"
    )


def story(attempts: Sequence[Attempt]) -> str:
    """What became of a request's attempts, in a sentence; "" where the first one did it all."""
    told: list[str] = []
    for number, attempt in enumerate(attempts, 1):
        if attempt.ended is not None and number < len(attempts):
            told += [*_cut(number, attempt), _again(number + 1, attempts[number])]
            continue
        told += [
            f"it lost {r.lost} at {when(r.t)} ({r.why}) and went on "
            + {"takeover": f"on {r.main}", "another main": f"with {r.main}",
               "alone": "on its relay alone"}.get(r.then, "without it")
            for r in attempt.reroutes
            if r.then != "on"
        ]  # fmt: skip
    return "; ".join(told)


# -- whom a fault touches --------------------------------------------------------------------------


def names_in(what: str) -> set[str]:
    """Every word of a fault's description that may be a name."""
    return set(re.findall(r"[\w.\-~>]+", what))


def ways_of(fault: Fault, timeline: Timeline) -> set[Way]:
    """The directions of links that a fault acted on, as its words say."""
    named = names_in(fault.what)
    found = [(way, d) for way, d in timeline.directions.items() if d.link in named]
    exact = {way for way, d in found if f"{d.src}>{d.dst}" in named}
    return exact or {way for way, _ in found}


def _spent_on(part: str, a: Attempt) -> set[str]:
    """Instances that a part of a request's time was spent on."""
    first = a.relay or a.main
    found = {
        "prefill_queue": (a.prefill,),
        "prefill": (a.prefill,),
        "decoder_queue": (first,),
        "transfer": (a.prefill, first),
        "relay_decode": (a.relay,),
        "handoff_gap": (a.relay, a.main),
        "main_decode": (a.main,),
        "prefill_decode": (a.prefill,),
        "lost": tuple(a.instances),
        "no_token": tuple(a.instances),
    }.get(part, ())
    return {name for name in found if name}


def _during(fault: Fault, span: Span) -> bool:
    if fault.missed:
        return False
    ended = fault.began + 1 if fault.ended is None else fault.ended
    return fault.began < span[1] and span[0] < ended


def most_at_once(wires: Sequence[Wire], start: Ns, end: Ns) -> int:
    edges = []
    for since, until in within([(w.began, w.ended) for w in wires], start, end):
        edges += [(since, 1), (until, -1)]
    now = most = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


def rate_at(caps: Sequence[tuple[Ns, int | None]], t: Ns) -> int | None:
    rate = None
    for since, cap in caps:
        if since <= t:
            rate = cap
    return rate
