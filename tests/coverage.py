"""What the swarm's faults hit: kind of fault x role x phase of the request, over all seeds; and
what was asked and answered. Read from traces, so that a fault that found nothing to act on counts
for nothing.

A fault of an instance hits every request that has a part there and is not over; one of a link, of
the gateway or of the client, every request under way that has to do with it; one that names
requests, those. Frames are hit when they are caught, at both ends. A skew is there from before the
first request on, and counts as that alone.

Phases, of a request as a whole:

    queued          sent, and P (or who serves it alone) has not begun
    prefill         its prompt is computed
    KV crossing     the first id is made, and the first decoder lacks KV
    relay decoding  until the relay's handoff policy is asked first
    handoff round   from then on, until the main decoder decodes from the last ids
    overlap         both decode
    main decoding   to the end (P-MD: from the KV on)
    alone           decoding in pipelines P and MD
    after           the client has its end, and something of it is held somewhere
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pddrt import trace as ev
from pddrt.faults import KINDS
from pddrt.trace import Event, request_of

from .misfortunes import FRAMES, NOBODY, PHASES, PLACES, ROLES
from .swarm import Case

HANDOFF = ("handoff round", "overlap")


def role_of(name: str) -> str:
    stem = re.match(r"(p|rld|md)\d+$", name)
    return ROLES[stem[1]] if stem else name


@dataclass(slots=True)
class _Seen:
    """A request as far as the trace has told."""

    phase: str = "queued"
    members: tuple[str, ...] = ()
    first: str | None = None
    over: bool = False
    held_at: set[str] = field(default_factory=set)

    @property
    def here(self) -> str | None:
        """Its phase, while there is anything of it."""
        return self.phase if not self.over else "after" if self.held_at else None


@dataclass
class Coverage:
    seeds: int = 0
    virtual_ns: int = 0
    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(kind, place, phase): requests hit."""
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    pipelines: Counter[str] = field(default_factory=Counter)
    handoffs: Counter[str] = field(default_factory=Counter)
    """By mode, those that came to the main decoder's decoding."""
    handoffs_hit: Counter[str] = field(default_factory=Counter)
    """Relayed requests hit in each phase, each once a phase."""
    recovery: Counter[str] = field(default_factory=Counter)
    """How requests went on without an instance: again, or as `Rerouted` says."""

    def add(self, case: Case, events: Iterable[Event]) -> None:
        reader = _Reader(self, case)
        for event in events:
            reader.read(event)
            self_t = event.t
        self.seeds += 1
        self.virtual_ns += self_t
        for seen in reader.requests.values():
            self.pipelines["-".join(map(role_of, seen.members)) or "refused"] += 1

    def merge(self, other: Coverage) -> None:
        self.seeds += other.seeds
        self.virtual_ns += other.virtual_ns
        for name in ("hits", "faults", "ends", "pipelines", "handoffs", "handoffs_hit", "recovery"):
            getattr(self, name).update(getattr(other, name))

    # -- what it comes to --------------------------------------------------------------------------

    def blind(self) -> list[tuple[str, str, str]]:
        """(kind, place, phase) that no seed has reached."""
        return [
            (do, place, phase)
            for do in KINDS
            for place in PLACES.get(do, ())
            for phase in PHASES
            if not self.hits[do, place, phase] and (place, phase) not in NOBODY
        ]

    def table(self) -> str:
        head = ["fault", "where", *PHASES]
        rows = [
            [do, place, *(str(self.hits[do, place, phase] or "-") for phase in PHASES)]
            for do in KINDS
            for place in PLACES.get(do, ())
        ]
        sums = (sum(n for (_, _, p), n in self.hits.items() if p == phase) for phase in PHASES)
        rows.append(["all", "", *map(str, sums)])
        hit = (self.handoffs_hit[phase] for phase in PHASES)
        rows.append(["handoffs hit", "", *map(str, hit)])
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(_line(row, widths) for row in [head, *rows])

    def to_json(self) -> dict[str, Any]:
        by_kind: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        for (do, place, phase), n in sorted(self.hits.items()):
            by_kind[do][place][phase] = n
        return {
            "seeds": self.seeds,
            "virtual_s": self.virtual_ns // 10**9,
            "requests": sum(self.ends.values()),
            "ends": dict(sorted(self.ends.items())),
            "pipelines": dict(sorted(self.pipelines.items())),
            "handoffs": dict(sorted(self.handoffs.items())),
            "handoffs_hit": {phase: self.handoffs_hit[phase] for phase in PHASES},
            "recovery": dict(sorted(self.recovery.items())),
            "faults": {do: self.faults[do] for do in KINDS},
            "hits": by_kind,
            "blind": [list(spot) for spot in self.blind()],
        }


def _line(row: list[str], widths: list[int]) -> str:
    cells = [
        f"{c:<{w}}" if i < 2 else f"{c:>{w}}"
        for i, (c, w) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


class _Reader:
    """Reads one trace."""

    def __init__(self, coverage: Coverage, case: Case) -> None:
        self.coverage = coverage
        self.case = case
        self.requests: dict[str, _Seen] = {}
        self._hit: set[tuple[str, str]] = set()

    def read(self, event: Event) -> None:
        if isinstance(event, ev.FaultInjected):
            self.coverage.faults[event.do] += 1
            if event.do not in FRAMES:
                self._struck(event)
        elif isinstance(event, ev.FaultEnded):
            if event.do in FRAMES and ": " in event.what:
                self._struck(event)
        elif isinstance(event, ev.RequestSent):
            self.requests[event.request] = _Seen()
        elif isinstance(event, ev.InstanceCrashed):
            for seen in self.requests.values():
                seen.held_at.discard(event.instance)
        elif isinstance(event, ev.PagesTaken | ev.PagesFreed):
            self._lesson(event)
        elif seen := self.requests.get(request_of(getattr(event, "request", ""))):
            self._update(seen, event)

    def _lesson(self, event: ev.PagesTaken | ev.PagesFreed) -> None:
        name, _, lesson = event.owner.partition(" (answer)")
        seen = self.requests.get(request_of(name))
        if seen is None or not event.owner.endswith("(answer)"):
            return
        held = f"{event.instance}{lesson} (answer)"
        if isinstance(event, ev.PagesTaken):
            seen.held_at.add(held)
        elif event.over:
            seen.held_at.discard(held)

    def _update(self, seen: _Seen, event: Event) -> None:
        match event:
            case ev.Routed():
                parts = (event.prefill, event.relay, event.main)
                seen.members = tuple(name for name in parts if name)
                seen.first, seen.phase = event.relay or event.main, "queued"
            case ev.Admitted():
                seen.held_at.add(event.instance)
            case ev.Freed():
                seen.held_at.discard(event.instance)
            case ev.PrefillStarted():
                seen.phase = "prefill"
            case ev.PrefillEnded():
                seen.phase = "alone" if len(seen.members) == 1 else "KV crossing"
            case ev.KVWhole() if event.instance == seen.first:
                relayed = role_of(event.instance) == "relay"
                seen.phase = "relay decoding" if relayed else "main decoding"
            case ev.HandoffBegan():
                seen.phase = "handoff round"
            case ev.HandoffSent() if event.follows:
                seen.phase = "overlap"
            case ev.HandoffEnded():
                self._handed(seen)
            case ev.HandoffTaken() if event.decodes and seen.phase == "handoff round":
                self._handed(seen)
            case ev.Retried():
                seen.phase = "queued"
                self.coverage.recovery["again"] += 1
            case ev.Rerouted():
                self.coverage.recovery[event.then] += 1
            case ev.TakenOver():
                seen.phase = "main decoding"
            case ev.Finished():
                seen.over = True
                self.coverage.ends[event.reason] += 1

    def _handed(self, seen: _Seen) -> None:
        seen.phase = "main decoding"
        self.coverage.handoffs[self.case.handoff] += 1

    # -- faults ------------------------------------------------------------------------------------

    def _struck(self, event: ev.FaultInjected | ev.FaultEnded) -> None:
        fault = self.case.faults[event.fault]
        named = re.findall(r"\bs\d+\.\d+\b", event.what)
        for place in self._places(event.do, fault, event.what):
            for name, seen in self.requests.items():
                if seen.here and (name in named or (not named and _concerns(place, seen))):
                    self._count(event.do, role_of(place), name, seen)

    def _places(self, do: str, fault: dict[str, Any], what: str) -> list[str]:
        if do in FRAMES:
            found = re.search(r" from (\S+) to (\S+)$", what)
            return list(found.groups()) if found else []
        if do == "reset":
            if between := re.search(r"between (\S+) and (\S+) are", what):
                return list(between.groups())
            to = re.search(r"\(to (.+)\)", what)
            return to[1].split(", ") if to else []
        if do in ("cancel", "disconnect", "slow-reader"):
            return ["client"]
        if do in ("stale-signals", "wrong-signals"):
            return ["gateway"]
        place = fault.get("instance") or fault.get("link")
        return [place] if place else []

    def _count(self, do: str, place: str, name: str, seen: _Seen) -> None:
        phase = seen.here
        assert phase is not None
        self.coverage.hits[do, place, phase] += 1
        relayed = any(role_of(m) == "relay" for m in seen.members) and len(seen.members) == 3
        if relayed and (name, phase) not in self._hit:
            self._hit.add((name, phase))
            self.coverage.handoffs_hit[phase] += 1


def _concerns(place: str, seen: _Seen) -> bool:
    """Whether a request has to do with a place; what is over, only with who holds some of it."""
    if seen.over:
        held = {at.partition(" ")[0] for at in seen.held_at}
        return place in held or place in ("wan", "rdma", "gateway")
    return place in seen.members or place in ("wan", "rdma", "gateway", "client")
