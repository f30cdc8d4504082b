"""Whom each fault of a run hit, and what became of these. From what was recorded; pure.

No event ties a request to a fault, so this goes by what must have been so: the request is named; an
attempt of it was given up or went on without an instance, just after the fault, on account of an
instance or a link that the fault acted on; its tokens waited for a link while that was down; it was
computed on an instance while that was slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pddrt.metrics import RequestRecord
from pddrt.report.attempts import Attempt
from pddrt.report.reasons import names_in, ways_of
from pddrt.report.stretches import Stretch, attempt_of, ways
from pddrt.report.timeline import Fault, Span, Timeline, within
from pddrt.types import MS, SECOND, Ns

CANCELS = frozenset({"cancel", "disconnect"})
SLOWS = frozenset({"slow", "pause"})
NOTICED: Ns = SECOND
"""An instance's or a link's end is known to the gateway so long after it at the latest, where the
links' delays are of the usual kind; damage to a frame within `NOTICED_FRAME`."""
NOTICED_FRAME: Ns = 250 * MS

HOW = ("cancelled", "tried again", "went on without", "waited", "slowed", "hit")
"""What a fault may do to a request; where it did several things the first of these is told."""


Blames = Callable[[str], bool]
"""Whether what the gateway gave as its reason is about this fault."""


@dataclass(frozen=True, slots=True)
class Hit:
    request: str
    how: str


class Suffering:
    """`laid`: each request's stretches, in ns since it was sent (see `slowness.Judge`)."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        laid: Mapping[str, Sequence[Stretch]],
        timeline: Timeline,
    ) -> None:
        self._records = records
        self._laid = laid
        self._timeline = timeline

    def of(self, fault: Fault) -> list[Hit]:
        """In the order in which the requests were sent."""
        if fault.missed:
            return []
        found = ((r.id, self._how(r, fault)) for r in self._records.values())
        return [Hit(name, how) for name, how in found if how]

    def again(self, r: RequestRecord) -> int:
        """How many further attempts there were."""
        return max(0, len(self._timeline.attempts(r.id)) - 1)

    def moved(self, r: RequestRecord) -> bool:
        return any(a.moved for a in self._timeline.attempts(r.id))

    def _how(self, r: RequestRecord, fault: Fault) -> str:
        named = names_in(fault.what)
        attempts = self._timeline.attempts(r.id)
        if r.id in named:
            if fault.do in CANCELS:
                return "cancelled"
            return self._became(attempts, fault, lambda _: True) or "hit"
        if fault.do in CANCELS:
            return ""
        instances = named & set(self._timeline.instances)
        if fault.do in SLOWS:
            return "slowed" if self._computed_on(r, instances, fault) else ""
        if instances:
            return self._became(attempts, fault, lambda why: instances <= names_in(why))
        return self._across(r, fault) if ways_of(fault, self._timeline) else ""

    def _became(self, attempts: Sequence[Attempt], fault: Fault, blames: Blames) -> str:
        """What the gateway did on account of it."""
        last = (fault.began if fault.ended is None else fault.ended) + (
            NOTICED_FRAME if "from" in names_in(fault.what) else NOTICED
        )
        found = ""
        for attempt in attempts:
            for why, lost, t in _losses(attempt):
                if fault.began <= t <= last and blames(f"{why} {lost}"):
                    if attempt.ended is not None:
                        return "tried again"
                    found = "went on without" if attempt.moved else found
        return found

    def _across(self, r: RequestRecord, fault: Fault) -> str:
        """Whether it waited for a link that this fault had taken down."""
        crossed, found = ways_of(fault, self._timeline), ""
        span = (fault.began, self._timeline.end if fault.ended is None else fault.ended)
        for part, start, end in self._laid.get(r.id, ()):
            during = (r.sent + start, r.sent + end)
            if part not in ("outage", "lost", "transfer", "no_token"):
                continue
            attempt = attempt_of(r, self._timeline, during[0])
            mine = ways(r, self._timeline, part, attempt) & crossed
            since, until = _both(during, span)
            if since >= until or not any(
                within(self._timeline.down(way), since, until) for way in mine
            ):
                continue
            if part == "lost" and attempt is not None and attempt.ended is not None:
                return "tried again"
            found = "waited"
        return found

    def _computed_on(self, r: RequestRecord, instances: set[str], fault: Fault) -> bool:
        on = {"prefill": "prefill", "relay_decode": "relay", "main_decode": "main",
              "handoff_gap": "main"}  # fmt: skip
        span = (fault.began, self._timeline.end if fault.ended is None else fault.ended)
        for part, start, end in self._laid.get(r.id, ()):
            attempt = attempt_of(r, self._timeline, r.sent + start)
            if part in on and attempt and getattr(attempt, on[part]) in instances:
                since, until = _both((r.sent + start, r.sent + end), span)
                if since < until:
                    return True
        return False


def _losses(attempt: Attempt) -> Iterator[tuple[str, str, Ns]]:
    """(why, what was lost, when) of all that an attempt lost."""
    for reroute in attempt.reroutes:
        if reroute.then != "on":
            yield reroute.why, reroute.lost, reroute.t
    if attempt.ended is not None:
        yield attempt.why, "", attempt.ended


def _both(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])
