"""The books that the monitor keeps by itself: pages of an instance, bytes of a link, requests.

All of it is fed with events and with nothing else. Whatever does not add up raises Broken with the
name of what must hold; `invariants` makes it a violation.

Pages     each is free, a request's or the cache's. None is given to two, freed twice or by another,
          freed, kept or handed out under a step that may write it, evicted while a request has it
          locked. A step writes its own pages only. What was taken comes back.
Links     KV that arrived since any moment s is what was handed over before and had not arrived
          then, plus what the rate allows since s: with S(s) handed over and R(s) allowed up to s,
          arrived(t) <= R(t) + min over s of (S(s) - R(s)). Slack: what crosses in one delay, since
          arrival is later than departure by that, and on the wall clock `early` more; KV of a
          transfer that was cancelled counts as not arrived for ever.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pddrt import trace as ev
from pddrt.types import SECOND, Ns

CACHE = "the cache"


class Broken(Exception):
    """Raised by a check: name, detail."""


def must(holds: object, name: str, detail: str) -> None:
    if not holds:
        raise Broken(name, detail)


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

    def cut(self, end: int) -> None:
        """Nothing from `end` on is in the set any more."""
        at = bisect_left(self._starts, end)
        del self._starts[at:], self._ends[at:]
        if self._ends:
            self._ends[-1] = min(self._ends[-1], end)

    def missing(self, length: int) -> str:
        """The first gap in [0, length), for people."""
        start = self._ends[0] if self._starts and self._starts[0] == 0 else 0
        end = next((s for s in self._starts if s > start), length)
        return f"[{start}, {end})"


# -- pages -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Holding:
    """What an owner has on an instance: its page table, and the positions whose KV is there."""

    table: list[int] = field(default_factory=list)
    kv: Positions = field(default_factory=Positions)


@dataclass(slots=True)
class Pages:
    """The pages of one instance. `readers`: who has locked a cached page."""

    instance: str
    role: str
    site: str
    num_pages: int
    page_tokens: int
    owner: dict[int, str] = field(default_factory=dict)
    readers: dict[int, set[str]] = field(default_factory=dict)
    held: dict[str, Holding] = field(default_factory=dict)
    cached: int = 0
    step: ev.StepBegan | None = None
    writers: frozenset[str] = frozenset()

    def step_began(self, e: ev.StepBegan) -> None:
        must(self.step is None, "two steps at once", e.instance)
        for owner, start, end in e.spans:
            held = self.held.get(owner)
            if held is None:
                raise Broken("a step without pages", f"{owner} on {e.instance}")
            if not held.kv.covers(0, start):
                what = f"{owner} on {e.instance}: [{start}, {end})"
                raise Broken("a step on KV that is not there", what)
            self.writes(owner, start, end)
        self.step = e
        self.writers = frozenset(owner for owner, _, _ in e.spans)

    def anew(self) -> Pages:
        """The same instance with an empty memory."""
        return Pages(self.instance, self.role, self.site, self.num_pages, self.page_tokens)

    def step_ended(self, failed: bool = False) -> None:
        for owner, start, end in self.step.spans if self.step and not failed else ():
            self.held[owner].kv.add(start, end)
        self.step, self.writers = None, frozenset()

    def writes(self, owner: str, start: int, end: int) -> None:
        """`owner` is about to write the KV of [start, end)."""
        table = self.held[owner].table
        for at in range(start // self.page_tokens, -(-end // self.page_tokens)):
            if at >= len(table):
                raise Broken("written outside its pages", f"{owner}: [{start}, {end})")
            if self.owner.get(table[at]) != owner:
                what = f"{owner}: [{start}, {end}), page {table[at]}"
                raise Broken("written into a page that is not its own", what)

    def taken(self, e: ev.PagesTaken) -> None:
        pages = list(_each(e.pages))
        for page in pages:
            what = f"{e.instance}: page {page} to {e.owner}"
            must(0 <= page < self.num_pages, "a page that does not exist", what)
            owner = self.owner.get(page)
            must(owner is None, "a page handed to two", f"{what}; {owner} has it")
            self.owner[page] = e.owner
        self.held.setdefault(e.owner, Holding()).table += pages

    def tabled(self, e: ev.PageTable) -> None:
        held = self.held.setdefault(e.owner, Holding())
        held.table = list(_each(e.pages))
        held.kv.add(0, e.hit)
        for page in held.table:
            owner = self.owner.get(page)
            if owner != e.owner:
                what = f"{e.instance}: page {page} of {e.owner} is {owner or 'free'}'s"
                must(owner == CACHE, "a page shared that is not cached", what)
                self.readers.setdefault(page, set()).add(e.owner)

    def kept(self, e: ev.PagesKept) -> None:
        what = f"{e.instance}: {e.owner}"
        must(e.owner not in self.writers, "pages kept under a writer", what)
        for page in _each(e.pages):
            mine = self.owner.get(page) == e.owner
            must(mine, "a page kept that is not its own", f"{what}, page {page}")
            self.owner[page] = CACHE
            self.readers.setdefault(page, set()).add(e.owner)
            self.cached += 1

    def freed(self, e: ev.PagesFreed) -> None:
        for page in _each(e.pages):
            owner, what = self.owner.get(page), f"{e.instance}: page {page} by {e.owner}"
            must(owner is not None, "a page freed twice", what)
            must(owner == e.owner, "a page freed by another", f"{what}; it is of {owner}")
            del self.owner[page]
        what = f"{e.instance}: {e.owner}"
        must(e.owner not in self.writers, "pages freed under a writer", what)
        if not e.over:
            return
        held = self.held.pop(e.owner, None)
        for page in held.table if held else ():
            leaked = self.owner.get(page) == e.owner
            must(not leaked, "freed is not what was allocated", f"{what} keeps page {page}")
            if readers := self.readers.get(page):
                readers.discard(e.owner)
                if not readers:
                    del self.readers[page]

    def evicted(self, e: ev.PagesEvicted) -> None:
        for page in _each(e.pages):
            owner, what = self.owner.get(page), f"{e.instance}: page {page}"
            must(owner is not None, "a page freed twice", f"{what}, evicted")
            must(owner == CACHE, "a page evicted that is not cached", f"{what} of {owner}")
            readers = self.readers.get(page)
            must(not readers, "a page evicted while locked", f"{what}, by {_names(readers)}")
            del self.owner[page]
            self.cached -= 1

    def over(self, e: ev.Freed) -> None:
        held = self.held.get(e.request)
        what = f"{e.request} on {e.instance}: {len(held.table) if held else 0} pages"
        must(held is None, "freed is not what was allocated", what)

    def audited(self, e: ev.PoolChecked) -> None:
        free = self.num_pages - len(self.owner)
        must(
            (e.pages, e.pages_free, e.pages_cached) == (self.num_pages, free, self.cached),
            "pool and events disagree",
            f"{e.instance}: {free} free and {self.cached} cached of {self.num_pages} by events,"
            f" {e.pages_free} and {e.pages_cached} of {e.pages} by the pool",
        )
        if not self.held:
            lost = f"{e.instance}: {e.pages_locked} pages are locked by nobody"
            must(e.pages_locked == 0, "a lock was lost", lost)

    def balance(self) -> tuple[int, int, int, int]:
        """How many pages there are, and how many are free, cached, and owned by requests."""
        owned = sum(owner != CACHE for owner in self.owner.values())
        return self.num_pages, self.num_pages - len(self.owner), self.cached, owned

    def open(self) -> Iterator[tuple[str, str]]:
        """Who still holds anything, and what, for people."""
        for owner in self.held:
            own = sum(holder == owner for holder in self.owner.values())
            yield owner, f"{self.instance}: {own} pages of {owner}"


def _each(pages: ev.PageRanges) -> Iterator[int]:
    for first, count in pages:
        yield from range(first, first + count)


def _names(owners: set[str] | None) -> str:
    return ", ".join(sorted(owners or ()))


# -- links -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """One direction of a link. `allowed`: rate x time so far, SECOND to the byte, as is `least`:
    the minimum of handed over - allowed. `limited`: it always had a rate.
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

    def received(self, e: ev.KVReceived, early: Ns) -> None:
        self.advance(e.t)
        self.arrived += e.bytes
        if self.rate is not None:
            most = self.allowed + self.least + self.rate * early
            over = self.arrived - most // SECOND
            must(over <= 1, "more than the link's rate", f"{over} bytes of KV at {e.instance}")

    def totalled(self, e: ev.LinkTotal, early: Ns) -> None:
        what = f"{e.link}, {e.src_site} to {e.dst_site}"
        self.advance(e.t)
        must(e.busy_ns <= e.t, "a link busier than time allows", what)
        must(e.kv_bytes >= self.arrived, "more KV received than a link carried", what)
        if self.limited:
            most = (self.allowed + (self.rate or 0) * early) // SECOND
            must(e.bytes <= most + 1, "more than the link's rate", f"{what}: {e.bytes} of {most}")


# -- requests --------------------------------------------------------------------------------------


class Turns:
    """Which turn of each session was sent last: 4 bytes a session."""

    MOST = 1 << 22
    """Sessions with higher numbers are not known."""

    def __init__(self) -> None:
        self._last = array("i")

    def sent(self, session: int, turn: int) -> bool:
        """Whether that turn is later than all that were sent of its session."""
        if not 0 <= session < self.MOST:
            return True
        if session >= len(self._last):
            self._last.extend([-1] * (session + 1 - len(self._last)))
        later = turn > self._last[session]
        self._last[session] = max(turn, self._last[session])
        return later


@dataclass(slots=True)
class Path:
    """KV of one request on its way to one decoder, which `lacks` it from that position on."""

    lacks: int | None = None
    sent: Positions = field(default_factory=Positions)
    out: int = 0
    arrived: int = 0
    whole: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class Account:
    """One request: its route, who made which ids, what was handed over."""

    sent: Ns
    route: ev.Routed | None = None
    made: dict[str, dict[int, int]] = field(default_factory=dict)
    """By letter: the id at each position."""
    paths: dict[str, Path] = field(default_factory=dict)
    next: int = 0
    first: Ns | None = None
    handed: int = 0
    """The end of the ids that the relay has sent."""
    told: int = 0
    """The end of the ids that the gateway has sent, where both decode."""
    known: int = 0
    """The end of the ids that the main decoder has taken."""
    relay_done: bool = False
    end: str | None = None
    taken: bool = False
    """A main decoder goes on in place of the relay."""
    former: set[str] = field(default_factory=set)
    """Instances that are not asked for anything any more, and may not know it yet."""
    attempts: list[Account] = field(default_factory=list)
    """All at the same request, this among them."""

    def __post_init__(self) -> None:
        if not self.attempts:
            self.attempts.append(self)

    def has_made(self, source: str, position: int, token: int) -> bool:
        return self.made.get(source, {}).get(position) == token

    def reroute(self, e: ev.Rerouted) -> None:
        """It goes on without one."""
        assert self.route is not None
        if e.then == "takeover":
            self.taken = True
        else:
            self.former.add(e.lost)
        if e.then in ("alone", "another main"):
            self.handed = self.told = self.known = 0
            self.route = replace(self.route, main=e.main)

    def by_relay(self, position: int) -> int | None:
        """The id that the relay has there: its own, or P's first."""
        found = self.made.get("R", {}).get(position)
        return self.made.get("P", {}).get(position) if found is None else found

    def wrong_for_main(self, position: int) -> str:
        """Why a relayed main decoder must not have made the id there, if so."""
        if not self.told and not self.relay_done:
            return "decode before the last ids"
        joins = position == self.known or position - 1 in self.made.get("M", {})
        if not joins and not (self.told and position < self.known):
            return "the handoff does not join"
        return ""
