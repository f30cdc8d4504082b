"""What a deployment is at one moment: words, questions, and all of it as an object. Pure.

`rebuild` makes it of events; `inspect --until` shows it. It holds what events say and nothing else:
what none tells (which frames of control are on their way, what the gateway believes) is not in it.

    request     where it goes, what the client has, its handoff as each side knows it
    part        one attempt at a request on one instance: its phase, KV by positions, pages
    instance    pages, the running step, who is there
    link        one direction: its rate, KV that was handed over and has not arrived

Phases of a part, by role:

    P     waits for memory > waits for a step > computes the prompt > sends its KV
    RLD   waits for memory > receives KV > decodes
    MD    waits for memory > receives KV > decodes, or behind a relay: has the KV, waits for ids >
          extends over a piece (and again) > extends, then decodes > decodes
    any   lost its memory, waits; learns the answer (for the next turn)

Positions count from the first token of the prompt, ranges are half open. A part goes when its
instance frees it; a request stays until the client has its end and the last part has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pddrt.trace import Seconds, attempt_name, request_of
from pddrt.types import Ns

WAITS = "waits for memory"
READY = "waits for a step"
PREFILLS = "computes the prompt"
SENDS = "sends its KV"
RECEIVES = "receives KV"
HAS_KV = "has the KV, waits for ids"
EXTENDS = "extends over a piece"
GOES_ON = "extends, then decodes"
DECODES = "decodes"
LOST = "lost its memory, waits"
LEARNS = "learns the answer"
STOPPED = "was told to stop"


@dataclass(slots=True)
class Part:
    """One attempt at a request on one instance. `pages`: its own, without those it shares.

    `computed`: KV is there for [0, computed). `arrived`: ranges of KV that came over a link.
    `step`: positions that the running step computes. `made`: the end of the ids made here.
    """

    request: str
    instance: str
    role: str
    phase: str
    since: Ns
    prompt_tokens: int
    hit: int = 0
    pages: int = 0
    computed: int = 0
    arrived: list[tuple[int, int]] = field(default_factory=list)
    step: tuple[int, int] | None = None
    made: int | None = None
    tokens: int = 0

    def enter(self, phase: str, now: Ns) -> None:
        if phase != self.phase:
            self.phase, self.since = phase, now

    def receive(self, start: int, end: int) -> None:
        """Ranges that touch become one."""
        if self.arrived and self.arrived[-1][1] == start:
            start = self.arrived.pop()[0]
        self.arrived.append((start, end))

    @property
    def lacking(self) -> int:
        """Tokens of the prompt whose KV is not here."""
        there = self.hit + sum(end - start for start, end in self.arrived)
        return max(0, self.prompt_tokens - max(there, self.computed))


@dataclass(slots=True)
class Handoff:
    """What each side knows. `relay_last`: the end of the ids that the relay has made; `sent`: of
    those that are on their way to the main decoder, or there; `taken`: of those it knows;
    `caught`: what the relay knows of that.

    `lacking`: ids that the main decoder had not, at each decision; `occupancy`: of the relay's
    memory when its policy was first asked, 0 to 1, as far as events say it.
    """

    phase: str = "main has not the KV yet"
    policy: str = ""
    decision: str = ""
    expected: int | None = None
    main_ready: Ns | None = None
    relay_last: int | None = None
    sent: int | None = None
    taken: int | None = None
    caught: int | None = None
    rounds: int = 0
    lacking: list[int] = field(default_factory=list)
    occupancy: float | None = None
    batch: int | None = None
    """Sequences of the relay then, this one among them."""
    ended: str = ""

    @property
    def in_flight(self) -> int:
        """Ids that were sent and that the main decoder has not taken."""
        return 0 if self.sent is None or self.taken is None else max(0, self.sent - self.taken)


@dataclass(slots=True)
class Request:
    """One request, at its current attempt. `client`: tokens that the client has, by maker."""

    id: str
    sent: Ns
    session: int
    turn: int
    attempt: int = 0
    pipeline: str | None = None
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    reason: str = ""
    expected: Ns | None = None
    held: bool = False
    """Its main decoder is to be sent nothing."""
    handoff: Handoff | None = None
    released: bool = False
    first: Ns | None = None
    last: Ns | None = None
    client: dict[str, int] = field(default_factory=dict)
    text: str = ""
    finish: str | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        """Of the attempt that is under way."""
        return attempt_name(self.id, self.attempt)

    @property
    def received(self) -> int:
        return sum(self.client.values())

    @property
    def stage(self) -> str:
        """Where it is, in a few words."""
        if self.finish is not None:
            return f"ended: {self.finish}"
        if self.pipeline is None:
            return "waits for the gateway"
        if self.first is None:
            return "waits for its first token"
        return "gets its answer"


@dataclass(slots=True)
class Instance:
    """`owned`: pages by owner; `cached`: pages of the prefix cache. `step`: since when one runs."""

    name: str
    role: str
    site: str
    pages: int
    page_tokens: int
    owned: dict[str, int] = field(default_factory=dict)
    cached: int = 0
    step: Ns | None = None
    spans: tuple[tuple[str, int, int], ...] = ()
    down: bool = False
    steps: int = 0

    @property
    def used(self) -> int:
        """Pages that requests own."""
        return sum(self.owned.values())

    @property
    def free(self) -> int:
        return self.pages - self.used - self.cached


@dataclass(slots=True)
class Transfer:
    """KV of one request on its way. `way`: (start, end, bytes, since) of each piece."""

    request: str
    src: str
    dst: str
    way: deque[tuple[int, int, int, Ns]] = field(default_factory=deque)
    arrived: int = 0

    @property
    def bytes(self) -> int:
        """Handed over, and not arrived."""
        return sum(size for _, _, size, _ in self.way)


@dataclass(slots=True)
class Direction:
    """One direction of a link. `rate` in bytes/s; None: no limit."""

    link: str
    src: str
    dst: str
    rate: int | None
    arrived: int = 0

    @property
    def name(self) -> str:
        return self.link if self.src == self.dst else f"{self.link} {self.src}>{self.dst}"


class Moment:
    """What is, after all events so far. `number` counts them, `now` is when the last was."""

    def __init__(self) -> None:
        self.number = 0
        self.now: Ns = 0
        self.instances: dict[str, Instance] = {}
        self.links: dict[tuple[str, str], Direction] = {}
        self.requests: dict[str, Request] = {}
        self.parts: dict[tuple[str, str], Part] = {}
        """By attempt and instance."""
        self.transfers: dict[tuple[str, str], Transfer] = {}
        """By attempt and decoder."""
        self.faults: dict[tuple[int, int], str] = {}
        """In effect."""
        self.ended = 0
        """Requests that are over and forgotten."""
        self.partial = False
        """It was not rebuilt from the very first event: caches and what is over are not known."""

    # -- what to ask for ---------------------------------------------------------------------------

    def parts_of(self, request: str) -> list[Part]:
        """Of all attempts at it."""
        return [p for p in self.parts.values() if request_of(p.request) == request]

    def parts_on(self, instance: str) -> list[Part]:
        return [p for p in self.parts.values() if p.instance == instance]

    def on_the_way(self, direction: Direction) -> list[Transfer]:
        """Transfers with KV that has been handed over and has not arrived."""
        ends = (direction.src, direction.dst)
        return [t for t in self.transfers.values() if t.way and self.ends(t) == ends]

    def ends(self, transfer: Transfer) -> tuple[str, str] | None:
        src, dst = (self.instances.get(name) for name in (transfer.src, transfer.dst))
        return None if src is None or dst is None else (src.site, dst.site)


# -- as an object ----------------------------------------------------------------------------------


def as_json(moment: Moment) -> dict[str, Any]:
    """All of it, for a program; times are seconds."""
    return {
        "event": moment.number,
        "t_s": Seconds(moment.now),
        "partial": moment.partial,
        "requests_over": moment.ended,
        "faults": list(moment.faults.values()),
        "instances": {i.name: _instance_json(moment, i) for i in moment.instances.values()},
        "links": {d.name: _link_json(moment, d) for d in moment.links.values()},
        "requests": {r.id: _request_json(r) for r in moment.requests.values()},
    }


def _instance_json(moment: Moment, i: Instance) -> dict[str, Any]:
    return {
        "role": i.role,
        "site": i.site,
        "down": i.down,
        "pages": {"all": i.pages, "requests": i.used, "cached": i.cached, "free": i.free},
        "step": None
        if i.step is None
        else {"since_s": Seconds(i.step), "spans": [list(span) for span in i.spans]},
        "requests": [
            {
                "request": p.request,
                "phase": p.phase,
                "since_s": Seconds(p.since),
                "prompt_tokens": p.prompt_tokens,
                "hit": p.hit,
                "pages": p.pages,
                "computed": p.computed,
                "arrived": [list(span) for span in p.arrived],
                "lacking": p.lacking,
                "step": None if p.step is None else list(p.step),
                "made_to": p.made,
                "tokens": p.tokens,
            }
            for p in moment.parts_on(i.name)
        ],
    }


def _link_json(moment: Moment, d: Direction) -> dict[str, Any]:
    return {
        "rate_bytes_per_s": d.rate,
        "kv_bytes_arrived": d.arrived,
        "flows": [
            {
                "request": t.request,
                "src": t.src,
                "dst": t.dst,
                "bytes_on_the_way": t.bytes,
                "bytes_arrived": t.arrived,
                "ranges": [[start, end] for start, end, _, _ in t.way],
            }
            for t in moment.on_the_way(d)
        ],
    }


def _request_json(r: Request) -> dict[str, Any]:
    return {
        "stage": r.stage,
        "sent_s": Seconds(r.sent),
        "attempt": r.attempt,
        "pipeline": r.pipeline,
        "instances": {"prefill": r.prefill, "relay": r.relay, "main": r.main},
        "client": {"tokens": r.received, "by_maker": r.client, "text": r.text},
        "handoff": None if r.handoff is None else dict(_handoff_fields(r.handoff)),
        "finish_reason": r.finish,
    }


def _handoff_fields(h: Handoff) -> Iterator[tuple[str, Any]]:
    yield "phase", h.phase
    yield "policy", h.policy or None
    yield "decision", h.decision or None
    yield "relay_made_to", h.relay_last
    yield "sent_to", h.sent
    yield "main_knows_to", h.taken
    yield "relay_knows_main_has", h.caught
    yield "ids_in_flight", h.in_flight
    yield "rounds", h.rounds
    yield "lacking", h.lacking
    yield "relay_occupancy", None if h.occupancy is None else round(h.occupancy, 6)
    yield "relay_batch", h.batch
