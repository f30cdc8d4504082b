"""Where the time of a request went, stretch by stretch, in the order in which it went. Pure.

What the client waited for, from sending to the end, without a gap and without an overlap. Before
the first token the stretches are the legs of TTFT (see `metrics`), then each gap between tokens is
of who made the token at its end. Two kinds of waiting are taken out of these, because they are
nobody's computing:

- **lost**: an attempt that came to nothing. Before the first token it reaches from the routing of
  the first attempt to that of the one which counted (in TTFT's legs this is part of the prefill
  queue); later, from the last token that came of it until the gateway went on elsewhere, or until a
  main decoder had taken over from a lost relay. The prompt that is then computed again is prefill.
- **outage**: tokens could not come, because a link on their way was down. It counts where the gap
  between two tokens lasts to the end of the outage: what comes during one was under way before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pddrt.metrics import RequestRecord
from pddrt.report.attempts import Attempt
from pddrt.report.timeline import Span, Timeline
from pddrt.types import Ns

BY = {"P": "prefill_decode", "R": "relay_decode", "M": "main_decode"}
"""The part that a token's gap is of, by who made it."""

Stretch = tuple[str, Ns, Ns]
Way = tuple[str, str]


class Row:
    """Stretches laid one behind the other, each to its end; neighbours of one part are one."""

    def __init__(self, start: Ns) -> None:
        self.at = start
        self.laid: list[Stretch] = []

    def to(self, part: str, end: Ns | None) -> None:
        """Nothing where that lies before what is laid, or is not known."""
        if end is None or end <= self.at:
            return
        if self.laid and self.laid[-1][0] == part:
            self.laid[-1] = (part, self.laid[-1][1], end)
        else:
            self.laid.append((part, self.at, end))
        self.at = end


def stretches(r: RequestRecord, timeline: Timeline) -> list[Stretch]:
    """(part, start, end) of a request's time; what had not ended by the record's end lasts to
    it.
    """
    row = Row(r.sent)
    if not r.times or r.legs is None:
        _without_a_token(row, r, timeline)
        return row.laid
    _to_first_token(row, r, timeline)
    for i, span in enumerate(pairwise(r.times), 1):
        _to_token(row, r, timeline, i, span)
    row.to("ending", r.finished)
    return row.laid


def counted(r: RequestRecord, timeline: Timeline) -> Attempt | None:
    """The attempt that the first token came of; the last one, where none came."""
    of = timeline.attempts(r.id)
    first = [a for a in of if not a.after] if r.times else of
    return first[-1] if first else None


def later(r: RequestRecord, timeline: Timeline) -> list[Attempt]:
    """Those that went on with an answer that had begun."""
    return [a for a in timeline.attempts(r.id) if a.after]


def attempt_of(r: RequestRecord, timeline: Timeline, t: Ns) -> Attempt | None:
    """The one that was under way at a time."""
    found = None
    for attempt in timeline.attempts(r.id):
        if found is None or attempt.began <= t:
            found = attempt
    return found


def _without_a_token(row: Row, r: RequestRecord, timeline: Timeline) -> None:
    last = r.finished if r.finished is not None else timeline.end
    of = timeline.attempts(r.id)
    if of:
        row.to("gateway", min(of[0].began, last))
        row.to("lost", min(of[-1].began, last))
        started, ended = of[-1].prefill_started, of[-1].prefill_ended
        row.to("prefill_queue", min(last if started is None else started, last))
        row.to("prefill", min(last if ended is None else ended, last))
    row.to("no_token", last)


def _to_first_token(row: Row, r: RequestRecord, timeline: Timeline) -> None:
    attempt, of = counted(r, timeline), timeline.attempts(r.id)
    at = r.sent
    for leg, length in (r.legs or {}).items():
        at += length
        if leg == "prefill_queue" and attempt is not None and attempt is not of[0]:
            row.to("lost", min(attempt.began, at))
        row.to(leg, at)


def _to_token(row: Row, r: RequestRecord, timeline: Timeline, i: int, span: Span) -> None:
    """The gap before token `i`."""
    start, end = span
    again = [a for a in timeline.attempts(r.id) if a.after == i]
    if again:
        row.to("lost", min(again[-1].began, end))
        for part, until in (
            ("prefill_queue", again[-1].prefill_started),
            ("prefill", again[-1].prefill_ended),
        ):
            row.to(part, None if until is None else min(until, end))
        row.to("transfer", end)
        return
    attempt = attempt_of(r, timeline, end)
    for reroute in attempt.reroutes if attempt else ():
        if reroute.taken is not None and start <= reroute.taken < end:
            row.to("lost", reroute.taken)
    part = BY[r.sources[i]]
    if is_switch(r, timeline, i, attempt):
        part = "handoff_gap"
    for since, until in _outages(r, timeline, part, attempt, span) if timeline.outages else ():
        row.to(part, since)
        row.to("outage", until)
    row.to(part, end)


def is_switch(r: RequestRecord, timeline: Timeline, i: int, attempt: Attempt | None) -> bool:
    """Whether token `i` is the first of the main decoder after the relay of its attempt had handed
    over. (Where both decode their tokens may alternate; the first time counts.)
    """
    if attempt is None or attempt.name == r.id:
        return i == r.switch
    rounds = timeline.handoffs.get(attempt.name)
    return (
        attempt.relay is not None
        and rounds is not None
        and bool(rounds.sent)
        and r.sources.find("M", attempt.after) == i
    )


def ways(r: RequestRecord, timeline: Timeline, part: str, a: Attempt | None) -> set[Way]:
    """(from site, to site) of what a part of the request's time waited for, on its way."""
    if a is None:
        return set()
    home = timeline.home or timeline.site(r.prefill) or timeline.site(r.main)
    prefill, relay, main = (timeline.site(n) for n in (a.prefill, a.relay, a.main))
    first = relay if a.relay else main
    found = {
        "transfer": [(prefill, first), (first, home)],
        "delivery": [(first, home)],
        "relay_decode": [(relay, home)],
        "handoff_gap": [(relay, main), (main, home)],
        "main_decode": [(main, home)],
        "prefill_decode": [(prefill, home)],
        "outage": [(relay, main), (main, home)],
        "lost": [(prefill, relay), (prefill, main), (relay, main), (main, home)],
        "no_token": [(prefill, first), (first, home)],
    }
    return {(x, y) for x, y in found.get(part, []) if x is not None and y is not None}


def _outages(
    r: RequestRecord, timeline: Timeline, part: str, attempt: Attempt | None, span: Span
) -> Iterator[Span]:
    """When a link was down that the token at the end of `span` had to cross, in order."""
    start, end = span
    found = []
    for way in ways(r, timeline, part, attempt):
        for since, until in timeline.down(way):
            if since < end and start < until <= end:
                found.append((max(since, start), until))
    yield from sorted(found)
