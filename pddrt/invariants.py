"""What must hold at every moment of a run, checked from its trace while it runs.

`Monitor` listens to the trace and shares no code with what it checks: it keeps its own ledger of
pages, its own sets of positions and its own account of each link. What it knows is what events say,
so that a recorded run can be judged again. The first violation is reported, with the events that
led to it; after that the ledgers mean nothing any more and it listens no longer.

Client    a stream is contiguous and once, and within its budget; every id was made, at its
          position, by the role that its source says; one final state, nothing after it; an answer
          that ends by length has it; the legs of TTFT add up.
Decoding  no step on KV that is not there; none before the manifest is complete and, on a relayed
          main decoder, before the last ids; no relay goes on after them.
Transfers only what a finished step has written, only the suffix that the decoder lacks, every
          position once; bytes in are bytes out when the KV is whole.
Pages     each is free, a request's or the cache's. None is given to two, freed twice or by another,
          freed, kept or handed out under a step that may write it, evicted while a request has it
          locked. A step writes its own pages only. What was taken comes back.
Links     KV that arrived since any moment s is what was handed over before and had not arrived
          then, plus what the rate allows since s: with S(s) handed over and R(s) allowed up to s,
          arrived(t) <= R(t) + min over s of (S(s) - R(s)). Slack: what crosses in one delay, since
          arrival is later than departure by that, and on the wall clock EARLY more; KV of a
          transfer that was cancelled counts as not arrived for ever.
Time      never runs backwards.

Left out: whether ids are right (that is `verify`), and control frames, of which the trace says
nothing but their sum per link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pddrt import trace as ev
from pddrt.errors import RunFailed
from pddrt.trace import Event, to_line
from pddrt.types import LETTER, MS, SECOND, Ns

CACHE = "the cache"
EARLY: Ns = MS
"""How early data may arrive on the wall clock: nets send up to half of that ahead, at both ends of
the delay."""
SHOWN = 12
"""Events told with a violation."""
SEARCHED = 20_000
"""How far back events are looked for."""


class Violation(RunFailed):
    """Something that must hold does not. `events` led to it, the last one shows it."""

    def __init__(self, name: str, detail: str, events: Sequence[Event]) -> None:
        self.name = name
        self.detail = detail
        self.events = tuple(events)
        super().__init__("\n    ".join([f"{name}: {detail}", *map(to_line, self.events)]))


class _Broken(Exception):
    """Raised by a check: name, detail."""


def _must(holds: object, name: str, detail: str) -> None:
    if not holds:
        raise _Broken(name, detail)


class Positions:
    """A set of positions, as disjoint ranges in order that never touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def covers(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)

    def meets(self, start: int, end: int) -> bool:
        """Whether any of [start, end) is in the set."""
        at = bisect_left(self._starts, end) - 1
        return start < end and at >= 0 and self._ends[at] > start

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]

    def missing(self, length: int) -> str:
        """The first gap in [0, length), for people."""
        start = self._ends[0] if self._starts and self._starts[0] == 0 else 0
        end = next((s for s in self._starts if s > start), length)
        return f"[{start}, {end})"


@dataclass(slots=True)
class _Holding:
    """What an owner has on an instance: its page table, and the positions whose KV is there."""

    table: list[int] = field(default_factory=list)
    kv: Positions = field(default_factory=Positions)


@dataclass(slots=True)
class _Ledger:
    """The pages of one instance. `readers`: who has locked a cached page."""

    role: str
    site: str
    num_pages: int
    page_tokens: int
    owner: dict[int, str] = field(default_factory=dict)
    readers: dict[int, set[str]] = field(default_factory=dict)
    held: dict[str, _Holding] = field(default_factory=dict)
    cached: int = 0
    step: ev.StepBegan | None = None
    writers: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Path:
    """KV of one request on its way to one decoder, which `lacks` it from that position on."""

    lacks: int | None = None
    sent: Positions = field(default_factory=Positions)
    out: int = 0
    arrived: int = 0
    whole: bool = False


@dataclass(slots=True)
class _Request:
    sent: Ns
    route: ev.Routed | None = None
    made: dict[str, dict[int, int]] = field(default_factory=dict)
    """By letter: the id at each position."""
    paths: dict[str, _Path] = field(default_factory=dict)
    next: int = 0
    first: Ns | None = None
    handed: int | None = None
    """The end of the ids that the relay has sent."""
    relay_done: bool = False
    taken: bool = False
    end: str | None = None


@dataclass(slots=True)
class _Link:
    """One direction. `allowed`: rate x time so far, SECOND to the byte, as is `least`: the minimum
    of handed over - allowed. `limited`: it always had a rate.
    """

    rate: int | None
    since: Ns
    handed: int = 0
    arrived: int = 0
    allowed: int = 0
    least: int = 0
    limited: bool = True

    def advance(self, now: Ns) -> None:
        self.limited &= self.rate is not None
        self.allowed += (self.rate or 0) * (now - self.since)
        self.since = now
        self.least = min(self.least, self.handed * SECOND - self.allowed)

    def change(self, rate: int | None, now: Ns) -> None:
        self.advance(now)
        if self.rate is None:  # what was handed over may have arrived, however much it is
            self.least = self.handed * SECOND - self.allowed
        self.rate = rate


Legs = Callable[[str], Mapping[str, Ns] | None]


class Monitor:
    """Listens to one run's trace. `checked` counts the events judged."""

    def __init__(
        self,
        on_violation: Callable[[Violation], None],
        past: Sequence[Event] = (),
        legs: Legs | None = None,
    ) -> None:
        """`on_violation` is called once; what it raises goes to whoever emitted the event. `past`:
        the trace's events as they grow, where those that led to a violation are found. `legs` says
        what a request's TTFT is made of, as it will be reported.
        """
        self._tell = on_violation
        self._past = past
        self._legs = legs
        self.violations: list[Violation] = []
        self.checked = 0
        self._now: Ns = 0
        self._early: Ns = 0
        self._ledgers: dict[str, _Ledger] = {}
        self._requests: dict[str, _Request] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._checks: dict[type[Event], Callable[[Any], None]] = {
            ev.RunStarted: self._run_started,
            ev.InstanceStarted: self._instance_started,
            ev.LinkRate: self._link_rate,
            ev.RequestSent: self._request_sent,
            ev.Routed: self._routed,
            ev.TokensReceived: self._tokens_received,
            ev.Finished: self._finished,
            ev.TokensMade: self._tokens_made,
            ev.HandoffSent: self._handoff_sent,
            ev.HandoffTaken: self._handoff_taken,
            ev.StepBegan: self._step_began,
            ev.Step: self._step,
            ev.Admitted: self._admitted,
            ev.KVSent: self._kv_sent,
            ev.KVReceived: self._kv_received,
            ev.KVWhole: self._kv_whole,
            ev.LinkTotal: self._link_total,
            ev.PagesTaken: self._pages_taken,
            ev.PageTable: self._page_table,
            ev.PagesKept: self._pages_kept,
            ev.PagesFreed: self._pages_freed,
            ev.PagesEvicted: self._pages_evicted,
            ev.Freed: self._freed,
            ev.PoolChecked: self._pool_checked,
        }

    def __call__(self, event: Event) -> None:
        if self.violations:
            return
        self.checked += 1
        try:
            if event.t < self._now:
                raise _Broken("time runs backwards", f"{event.t} ns after {self._now} ns")
            self._now = event.t
            if check := self._checks.get(type(event)):
                check(event)
        except _Broken as broken:
            name, detail = broken.args
            self._report(Violation(name, detail, self._led_to(event)))

    def finish(self) -> None:
        """After the run: nothing may be open. Reports all that is, the first one as above."""
        if self.violations:
            return
        found = [Violation(name, detail, self._of(key)) for name, detail, key in self._open()]
        self.violations += found[1:]
        if found:
            self._report(found[0])

    def report(self) -> dict[str, Any]:
        """For summary.json; `led_to` are lines of events.jsonl."""
        return {
            "checked": self.checked,
            "violations": [f"{v.name}: {v.detail}" for v in self.violations],
            "led_to": [to_line(event) for v in self.violations[:1] for event in v.events],
        }

    def _report(self, violation: Violation) -> None:
        self.violations.insert(0, violation)
        self._tell(violation)

    # -- what led to it ----------------------------------------------------------------------------

    def _led_to(self, event: Event) -> list[Event]:
        """The last events of the same request or lesson, or else of the same instance, and this."""
        names = (getattr(event, key, "") for key in ("request", "owner", "instance"))
        events = self._of(next(filter(None, names), ""))
        return events if events and events[-1] is event else [*events[1 - SHOWN :], event]

    def _of(self, key: str) -> list[Event]:
        found: list[Event] = []
        for at in range(len(self._past) - 1, max(-1, len(self._past) - SEARCHED), -1):
            event = self._past[at]
            about = (getattr(event, field, None) for field in ("request", "owner", "instance"))
            spans = event.spans if isinstance(event, ev.StepBegan) else ()
            if key in about or any(owner == key for owner, _, _ in spans):
                found.append(event)
                if len(found) == SHOWN:
                    break
        return found[::-1]

    def _open(self) -> Iterator[tuple[str, str, str]]:
        for name, request in self._requests.items():
            if request.end is None:
                yield "a request never ended", name, name
        for instance, ledger in self._ledgers.items():
            for owner in ledger.held:
                own = sum(holder == owner for holder in ledger.owner.values())
                yield "pages never came back", f"{instance}: {own} pages of {owner}", owner

    # -- the deployment ----------------------------------------------------------------------------

    def _run_started(self, e: ev.RunStarted) -> None:
        self._early = 0 if e.clock == "virtual" else EARLY

    def _instance_started(self, e: ev.InstanceStarted) -> None:
        self._ledgers[e.instance] = _Ledger(e.role, e.site, e.pages, e.page_tokens)

    def _link_rate(self, e: ev.LinkRate) -> None:
        for path in dict.fromkeys((e.between, e.between[::-1])):
            if link := self._links.get(path):
                link.change(e.rate, e.t)
            else:
                self._links[path] = _Link(e.rate, e.t)

    # -- the client --------------------------------------------------------------------------------

    def _request_sent(self, e: ev.RequestSent) -> None:
        _must(e.request not in self._requests, "a request sent twice", e.request)
        self._requests[e.request] = _Request(e.t)

    def _routed(self, e: ev.Routed) -> None:
        if request := self._requests.get(e.request):
            _must(request.route is None, "a request routed twice", e.request)
            request.route = e

    def _tokens_received(self, e: ev.TokensReceived) -> None:
        request = self._requests[e.request]
        if request.end is not None:
            raise _Broken("tokens after the end", f"{e.request}: {request.end}")
        if e.start != request.next or e.end - e.start != len(e.ids):
            what = f"{e.request}: [{e.start}, {e.end}) where {request.next} is next"
            raise _Broken("the stream is not contiguous and once", what)
        route = request.route
        assert route is not None
        if e.end > route.max_tokens:
            what = f"{e.request}: {e.end} of {route.max_tokens}"
            raise _Broken("more tokens than the budget", what)
        made = request.made.get(e.source, {})
        for position, token in enumerate(e.ids, route.prompt_tokens + e.start):
            if made.get(position) != token:
                what = f"{e.request}: {token} at {position}, said to be of {e.source}"
                raise _Broken("a token that nobody made", what)
        request.next = e.end
        if request.first is None:
            request.first = e.t

    def _finished(self, e: ev.Finished) -> None:
        request = self._requests[e.request]
        _must(request.end is None, "ended twice", f"{e.request}: {request.end}, then {e.reason}")
        request.end = e.reason
        _must(
            e.output_tokens == request.next,
            "tokens miscounted at the end",
            f"{e.request}: {e.output_tokens}, {request.next} were received",
        )
        if e.reason == "length" and request.route:
            _must(
                request.next == request.route.max_tokens,
                "an answer ended by length before its length",
                f"{e.request}: {request.next} of {request.route.max_tokens} tokens",
            )
        if self._legs and request.first is not None and (legs := self._legs(e.request)):
            _must(
                sum(legs.values()) == request.first - request.sent and min(legs.values()) >= 0,
                "the legs of TTFT do not add up",
                f"{e.request}: {dict(legs)} to {request.first - request.sent} ns",
            )
        request.made.clear()

    # -- making tokens -----------------------------------------------------------------------------

    def _tokens_made(self, e: ev.TokensMade) -> None:
        request, ledger = self._requests.get(e.request), self._ledgers.get(e.instance)
        if request is None or request.route is None or ledger is None:
            return
        route, source = request.route, e.source
        maker = {"P": route.prefill, "R": route.relay, "M": route.main}[source]
        begin = route.prompt_tokens + (source != "P")
        end = route.prompt_tokens + (route.max_tokens if source != "P" else 1)
        made = request.made.setdefault(source, {})
        wrong = ""
        if e.end - e.start != len(e.ids):
            wrong = "ids and positions differ"
        elif maker != e.instance or LETTER[ledger.role] != source:
            wrong = "tokens of one who has no part in it"
        elif not begin <= e.start < e.end <= end:
            wrong = "more tokens than the budget"
        elif source == "M" and route.relay and not (made or request.end):
            wrong = "" if e.start == request.handed else "the handoff does not join"
        if not wrong and any(position in made for position in range(e.start, e.end)):
            wrong = "a position made twice by one role"
        if wrong:
            raise _Broken(wrong, f"{e.request}: [{e.start}, {e.end}) by {e.instance}")
        if source != "P":
            self._may_decode(e.request, request, e.instance)
        made.update(zip(range(e.start, e.end), e.ids, strict=True))

    def _may_decode(self, name: str, request: _Request, instance: str) -> None:
        assert request.route is not None
        path = request.paths.get(instance)
        if path is None or not path.whole:
            raise _Broken("decode before the KV is whole", f"{name} on {instance}")
        if instance == request.route.relay:
            _must(not request.relay_done, "the relay goes on after the handoff", name)
        elif request.route.relay and not request.taken:
            raise _Broken("decode before the last ids", f"{name} on {instance}")

    def _handoff_sent(self, e: ev.HandoffSent) -> None:
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        begin = request.route.prompt_tokens if request.handed is None else request.handed
        _must(
            e.start == begin and not request.relay_done,
            "the handoff does not join",
            f"{e.request}: ids of [{e.start}, {e.end}) where {begin} is next",
        )
        made = {**request.made.get("P", {}), **request.made.get("R", {})}
        _must(
            request.end is not None or all(p in made for p in range(e.start, e.end)),
            "ids handed over that nobody made",
            f"{e.request}: some of [{e.start}, {e.end})",
        )
        request.handed, request.relay_done = e.end, e.last

    def _handoff_taken(self, e: ev.HandoffTaken) -> None:
        if request := self._requests.get(e.request):
            _must(request.relay_done, "decode before the last ids", f"{e.request} on {e.main}")
            request.taken = True

    # -- steps -------------------------------------------------------------------------------------

    def _step_began(self, e: ev.StepBegan) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        _must(ledger.step is None, "two steps at once", e.instance)
        for owner, start, end in e.spans:
            held = ledger.held.get(owner)
            if held is None:
                raise _Broken("a step without pages", f"{owner} on {e.instance}")
            request = self._requests.get(owner)
            if ledger.role != "prefill" and request and request.route:
                self._may_decode(owner, request, e.instance)
            if not held.kv.covers(0, start):
                what = f"{owner} on {e.instance}: [{start}, {end})"
                raise _Broken("a step on KV that is not there", what)
            self._writes(ledger, owner, held, start, end)
        ledger.step = e
        ledger.writers = frozenset(owner for owner, _, _ in e.spans)

    def _writes(self, ledger: _Ledger, owner: str, held: _Holding, start: int, end: int) -> None:
        """`owner` is about to write the KV of [start, end)."""
        size = ledger.page_tokens
        for at in range(start // size, -(-end // size)):
            if at >= len(held.table):
                raise _Broken("written outside its pages", f"{owner}: [{start}, {end})")
            if ledger.owner.get(held.table[at]) != owner:
                what = f"{owner}: [{start}, {end}), page {held.table[at]}"
                raise _Broken("written into a page that is not its own", what)

    def _step(self, e: ev.Step) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None or ledger.step is None:
            return
        for owner, start, end in ledger.step.spans:
            ledger.held[owner].kv.add(start, end)
        ledger.step, ledger.writers = None, frozenset()

    # -- KV on its way -----------------------------------------------------------------------------

    def _admitted(self, e: ev.Admitted) -> None:
        if (request := self._requests.get(e.request)) is not None:
            path = request.paths.setdefault(e.instance, _Path())
            path.lacks = e.hit if path.lacks is None else path.lacks

    def _kv_sent(self, e: ev.KVSent) -> None:
        source, target = self._ledgers.get(e.src), self._ledgers.get(e.dst)
        if source is None or target is None:
            return
        what = f"{e.request}: [{e.start}, {e.end}) from {e.src} to {e.dst}"
        held = source.held.get(e.request)
        there = held is not None and held.kv.covers(e.start, e.end)
        _must(there, "KV sent before it was computed", what)
        if request := self._requests.get(e.request):
            path = request.paths.get(e.dst)
            if path is None or path.lacks is None:
                raise _Broken("KV sent to one who has not admitted it", what)
            _must(e.start >= path.lacks, "KV sent that the decoder has", what)
            _must(not path.sent.meets(e.start, e.end), "KV sent twice", what)
            path.sent.add(e.start, e.end)
            path.out += e.bytes
        if link := self._links.get((source.site, target.site)):
            link.advance(e.t)
            link.handed += e.bytes

    def _kv_received(self, e: ev.KVReceived) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        what = f"{e.request}: [{e.start}, {e.end}) on {e.instance}"
        held = ledger.held.get(e.request)
        if held is None:
            raise _Broken("KV received without pages", what)
        _must(not held.kv.meets(e.start, e.end), "KV received twice", what)
        self._writes(ledger, e.request, held, e.start, e.end)
        held.kv.add(e.start, e.end)
        request = self._requests.get(e.request)
        if request is None or request.route is None:
            return
        path = request.paths[e.instance]
        _must(path.sent.covers(e.start, e.end), "KV received that nobody sent", what)
        path.arrived += e.bytes
        source = self._ledgers[request.route.prefill]
        if link := self._links.get((source.site, ledger.site)):
            self._arrived(link, e)

    def _arrived(self, link: _Link, e: ev.KVReceived) -> None:
        link.advance(e.t)
        link.arrived += e.bytes
        if link.rate is not None:
            most = link.allowed + link.least + link.rate * self._early
            over = link.arrived - most // SECOND
            _must(over <= 1, "more than the link's rate", f"{over} bytes of KV at {e.instance}")

    def _kv_whole(self, e: ev.KVWhole) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        held, what = ledger.held.get(e.request), f"{e.request} on {e.instance}"
        if held is None or not held.kv.covers(0, e.prompt_tokens):
            gap = held.kv.missing(e.prompt_tokens) if held else "everything"
            raise _Broken("decode before the KV is whole", f"{what}: {gap} is missing")
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        path, route = request.paths[e.instance], request.route
        _must(
            path.out == path.arrived,
            "bytes in are not bytes out",
            f"{what}: {path.out} out, {path.arrived} in",
        )
        if not (e.instance == route.main and route.relay) and request.end is None:
            _must("P" in request.made, "decode before the first id", what)
        path.whole = True

    def _link_total(self, e: ev.LinkTotal) -> None:
        link = self._links.get((e.src_site, e.dst_site))
        if link is None:
            return
        what = f"{e.link}, {e.src_site} to {e.dst_site}"
        link.advance(e.t)
        _must(e.busy_ns <= e.t, "a link busier than time allows", what)
        _must(e.kv_bytes >= link.arrived, "more KV received than a link carried", what)
        if link.limited:
            most = (link.allowed + (link.rate or 0) * self._early) // SECOND
            _must(e.bytes <= most + 1, "more than the link's rate", f"{what}: {e.bytes} of {most}")

    # -- pages -------------------------------------------------------------------------------------

    def _pages_taken(self, e: ev.PagesTaken) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        pages = list(_each(e.pages))
        for page in pages:
            what = f"{e.instance}: page {page} to {e.owner}"
            _must(0 <= page < ledger.num_pages, "a page that does not exist", what)
            owner = ledger.owner.get(page)
            _must(owner is None, "a page handed to two", f"{what}; {owner} has it")
            ledger.owner[page] = e.owner
        ledger.held.setdefault(e.owner, _Holding()).table += pages

    def _page_table(self, e: ev.PageTable) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        held = ledger.held.setdefault(e.owner, _Holding())
        held.table = list(_each(e.pages))
        held.kv.add(0, e.hit)
        for page in held.table:
            owner = ledger.owner.get(page)
            if owner != e.owner:
                what = f"{e.instance}: page {page} of {e.owner} is {owner or 'free'}'s"
                _must(owner == CACHE, "a page shared that is not cached", what)
                ledger.readers.setdefault(page, set()).add(e.owner)

    def _pages_kept(self, e: ev.PagesKept) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        what = f"{e.instance}: {e.owner}"
        _must(e.owner not in ledger.writers, "pages kept under a writer", what)
        for page in _each(e.pages):
            mine = ledger.owner.get(page) == e.owner
            _must(mine, "a page kept that is not its own", f"{what}, page {page}")
            ledger.owner[page] = CACHE
            ledger.readers.setdefault(page, set()).add(e.owner)
            ledger.cached += 1

    def _pages_freed(self, e: ev.PagesFreed) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        for page in _each(e.pages):
            owner, what = ledger.owner.get(page), f"{e.instance}: page {page} by {e.owner}"
            _must(owner is not None, "a page freed twice", what)
            _must(owner == e.owner, "a page freed by another", f"{what}; it is of {owner}")
            del ledger.owner[page]
        what = f"{e.instance}: {e.owner}"
        _must(e.owner not in ledger.writers, "pages freed under a writer", what)
        if not e.over:
            return
        held = ledger.held.pop(e.owner, None)
        for page in held.table if held else ():
            leaked = ledger.owner.get(page) == e.owner
            _must(not leaked, "freed is not what was allocated", f"{what} keeps page {page}")
            if readers := ledger.readers.get(page):
                readers.discard(e.owner)
                if not readers:
                    del ledger.readers[page]

    def _pages_evicted(self, e: ev.PagesEvicted) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        for page in _each(e.pages):
            owner, what = ledger.owner.get(page), f"{e.instance}: page {page}"
            _must(owner is not None, "a page freed twice", f"{what}, evicted")
            _must(owner == CACHE, "a page evicted that is not cached", f"{what} of {owner}")
            readers = ledger.readers.get(page)
            _must(not readers, "a page evicted while locked", f"{what}, by {_names(readers)}")
            del ledger.owner[page]
            ledger.cached -= 1

    def _freed(self, e: ev.Freed) -> None:
        if ledger := self._ledgers.get(e.instance):
            held = ledger.held.get(e.request)
            what = f"{e.request} on {e.instance}: {len(held.table) if held else 0} pages"
            _must(held is None, "freed is not what was allocated", what)

    def _pool_checked(self, e: ev.PoolChecked) -> None:
        if (ledger := self._ledgers.get(e.instance)) is None:
            return
        free = ledger.num_pages - len(ledger.owner)
        _must(
            (e.pages, e.pages_free, e.pages_cached) == (ledger.num_pages, free, ledger.cached),
            "pool and events disagree",
            f"{e.instance}: {free} free and {ledger.cached} cached of {ledger.num_pages} by events,"
            f" {e.pages_free} and {e.pages_cached} of {e.pages} by the pool",
        )
        if not ledger.held:
            lost = f"{e.instance}: {e.pages_locked} pages are locked by nobody"
            _must(e.pages_locked == 0, "a lock was lost", lost)


def _each(pages: ev.PageRanges) -> Iterator[int]:
    for first, count in pages:
        yield from range(first, first + count)


def _names(owners: set[str] | None) -> str:
    return ", ".join(sorted(owners or ()))
