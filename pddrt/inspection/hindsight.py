"""What a run's events tell of each request's chances: the ground that `counterfactual` stands on.

Listens to a trace and keeps, for each request, its stamps on every instance, the chunks that P
computed and when, and how much of its prompt was cached where; for each instance its steps and how
full its memory was; for each direction of a link the pieces of KV that crossed it. Times that other
requests needed for the same thing (a notice to the gateway, the gap at a switch) are kept as they
were, and their medians used.

What no event tells comes as a `Setting`: delays, which step takes how long.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from pddrt import trace as ev
from pddrt.inspection.crossing import Piece, Road
from pddrt.trace import Event, request_of
from pddrt.types import Ns, Run, Span, StepCost

GAPS = 2_000
"""So many of the latest switches and notices are remembered, of each kind."""
FEWEST_GAPS, MOST_GAPS = 7, 24
"""Between tokens, that a pace is the median of."""
QUEUED = 500
"""So many prompts are looked at that may have been before another."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Of a scenario. `delays`: one way, by (site, site). `costs`: by instance, what a step takes,
    where that is known without a stopwatch. `early`: the first token goes out when P has it.
    """

    gateway_site: str = ""
    delays: Mapping[tuple[str, str], Ns] = field(default_factory=dict)
    costs: Mapping[str, StepCost] = field(default_factory=dict)
    chunk_tokens: Mapping[str, int] = field(default_factory=dict)
    pipelines: tuple[str, ...] = ()
    """Those that the policy of the run could choose."""
    early: bool = False
    while_computing: bool = True


@dataclass(slots=True)
class Seen:
    """One request as it ran. Times are absolute; by instance where a dict."""

    id: str
    sent: Ns
    pipeline: str = ""
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    prompt_tokens: int = 0
    routed: Ns | None = None
    offered: dict[str, Ns] = field(default_factory=dict)
    admitted: dict[str, Ns] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    """By role, the best of its instances, when the prompt was known."""
    started: Ns | None = None
    ended: Ns | None = None
    """Of the prefill, wherever it was."""
    chunks: list[tuple[Ns, int, int]] = field(default_factory=list)
    """(when it was computed, start, end) of each part of the prompt."""
    first_sent: dict[str, Ns] = field(default_factory=dict)
    whole: dict[str, Ns] = field(default_factory=dict)
    freed: dict[str, Ns] = field(default_factory=dict)
    wan_bytes: int = 0
    """Of KV that left the site of P."""
    released: Ns | None = None
    first: Ns | None = None
    last: Ns | None = None
    switch: tuple[Ns, Ns] | None = None
    """The client's last token before the main decoder's first behind a relay, and that one."""
    made: dict[str, int] = field(default_factory=dict)
    made_at: dict[str, Ns] = field(default_factory=dict)
    gaps: dict[str, array[int]] = field(default_factory=dict)
    """By letter: when the latest was made, and the first of the times between two."""
    source: str = ""
    finish: str | None = None
    finished: Ns | None = None
    trouble: str = ""
    """Why nothing can be said of it."""

    @property
    def output_tokens(self) -> int:
        return sum(self.made.values())

    @property
    def ttft(self) -> Ns | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> Ns | None:
        return None if self.finished is None else self.finished - self.sent

    def stay(self, instance: str) -> Stay | None:
        """As far as it is known: from its reservation on, with the pages of that."""
        if instance not in self.admitted:
            return None
        until = self.freed.get(instance, 1 << 62)
        return Stay(self.admitted[instance], until, self.pages[instance])

    @property
    def first_decoder(self) -> str | None:
        return self.relay or self.main

    def pace(self, letter: str) -> Ns | None:
        """Between two tokens of that maker: the median, so that a stall does not count; None where
        there were too few to tell.
        """
        gaps = sorted(self.gaps.get(letter, ()))
        return gaps[len(gaps) // 2] if len(gaps) >= FEWEST_GAPS else None


@dataclass(frozen=True, slots=True)
class Stay:
    """Pages that a request had on an instance, from when to when."""

    start: Ns
    end: Ns
    pages: int


@dataclass(slots=True)
class Machine:
    """One instance over time. `steps`: (length, sequences, new tokens) of each, by its end;
    `used`: pages that could not be had, from when on, by `owned` and by what each step says.
    """

    role: str
    site: str
    pages: int
    page_tokens: int
    ends: list[Ns] = field(default_factory=list)
    steps: list[tuple[Ns, int, int]] = field(default_factory=list)
    at: list[Ns] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    owned: dict[str, int] = field(default_factory=dict)

    def own(self, t: Ns, owner: str, change: int) -> None:
        """`owner` has taken or given back pages; what the cache got of it, it still reads."""
        self.owned[owner] = self.owned.get(owner, 0) + change
        self.level(t, (self.used[-1] if self.used else 0) + change)

    def level(self, t: Ns, level: int) -> None:
        if self.used and self.used[-1] == level:
            return
        if self.at and self.at[-1] == t:
            self.used[-1] = level
        else:
            self.at.append(t)
            self.used.append(level)

    def room_from(self, t: Ns, tokens: int, own: Stay | None = None) -> Ns | None:
        """From `t` on, when there first was room for so many tokens; None: never. What the request
        in question had there itself (`own`) is not in its way.
        """
        need = -(-tokens // self.page_tokens)
        if need > self.pages:
            return None

        def fits(now: Ns, used: int) -> bool:
            mine = own.pages if own is not None and own.start <= now < own.end else 0
            return used - mine + need <= self.pages

        if fits(t, self.used_at(t)):
            return t
        later = range(bisect_right(self.at, t), len(self.at))
        return next((self.at[i] for i in later if fits(self.at[i], self.used[i])), None)

    def decoding(self, since: Ns, tokens: int, alone: Ns) -> Ns:
        """How long so many tokens of one more sequence would have taken from `since` on: one in
        each step that there was, which it makes as long as `alone` at least, and `alone` each
        while there was none.
        """
        now, i = since, bisect_right(self.ends, since)
        if i < len(self.ends) and self.ends[i] - self.steps[i][0] < now:
            now, i = self.ends[i], i + 1  # it joins at the end of the running step
        while tokens > 0:
            idle = tokens * alone
            if i < len(self.ends):
                idle = max(0, self.ends[i] - self.steps[i][0] - now)
            alone_made = min(tokens, idle // alone) if alone else tokens
            now, tokens = now + alone_made * alone, tokens - alone_made
            if tokens and i < len(self.ends):
                now = max(self.ends[i], now + alone)
                tokens, i = tokens - 1, i + 1
        return now - since

    def used_at(self, t: Ns) -> int:
        """Pages that requests owned then."""
        i = bisect_right(self.at, t) - 1
        return self.used[i] if i >= 0 else 0

    def sequences_at(self, t: Ns) -> int:
        """Of the step that runs at `t` or begins there; 0 where it idles."""
        i = bisect_right(self.ends, t)
        if i < len(self.ends) and self.ends[i] - self.steps[i][0] <= t:
            return self.steps[i][1]
        return 0

    def running_at(self, t: Ns) -> Ns:
        """What is left of the step that runs at `t`; 0 where none does."""
        i = bisect_right(self.ends, t)
        if i < len(self.ends) and self.ends[i] - self.steps[i][0] < t:
            return self.ends[i] - t
        return 0

    def decode_step(self) -> Ns | None:
        """The median of its steps that only decode; None where there was none."""
        plain = sorted(length for length, _, new in self.steps[-GAPS:] if not new)
        return plain[len(plain) // 2] if plain else None

    def tokens_per_s(self) -> float | None:
        """Of prompt or extend, in the steps that were mostly that."""
        found = [(length, new) for length, n, new in self.steps[-GAPS:] if new > 16 * n]
        total = sum(length for length, _ in found)
        return sum(new for _, new in found) * 1e9 / total if total else None


class Hindsight:
    """Listens to a trace."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.requests: dict[str, Seen] = {}
        self.machines: dict[str, Machine] = {}
        self.roads: dict[tuple[str, str], Road] = {}
        self.token_bytes: dict[tuple[str, str], float] = {}
        """Of KV on its way, by sites."""
        self.notices: dict[tuple[str, str], deque[Ns]] = {}
        """By role and pipeline: from holding the KV to the first token's release."""
        self.handoffs: deque[tuple[Ns, Ns]] = deque(maxlen=GAPS)
        """(from the main decoder's having the KV to the relay's end, gap at the switch)."""
        self.tails: deque[Ns] = deque(maxlen=GAPS)
        """From the end of a prefill to the relay's holding its KV."""
        self.prompts: dict[str, list[tuple[Ns, Ns]]] = {}
        """By instance: (end of its prefill, when it was routed) of each, in order."""
        self._steps: dict[str, ev.StepBegan] = {}
        self._way: dict[tuple[str, str], deque[tuple[int, Ns]]] = {}
        self._left: dict[tuple[str, str], Ns] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case ev.TokensReceived():
                self._tokens(event)
            case ev.TokensMade():
                self._token(event)
            case ev.StepBegan():
                self._steps[event.instance] = event
            case ev.Step():
                self._step(event)
            case ev.PagesTaken() | ev.PagesFreed():
                self._pages(event)
            case ev.KVSent():
                self._kv_sent(event)
            case ev.KVReceived():
                self._kv_received(event)
            case ev.InstanceStarted():
                about = (event.role, event.site, event.pages, event.page_tokens)
                self.machines.setdefault(event.instance, Machine(*about))
            case ev.InstanceCrashed():
                self._crashed(event)
            case ev.LinkRate():
                self._rate(event)
            case ev.RequestSent():
                self.requests[event.request] = Seen(event.request, event.t)
            case ev.Retried() | ev.Rerouted() | ev.Preempted():
                if seen := self.requests.get(request_of(event.request)):
                    seen.trouble = _TROUBLE[type(event)]
            case _:
                seen = self.requests.get(getattr(event, "request", ""))
                if seen is not None:
                    self._stamp(seen, event)

    def _stamp(self, seen: Seen, event: Event) -> None:
        match event:
            case ev.Routed():
                seen.pipeline, seen.routed = event.pipeline, event.t
                seen.prefill, seen.relay, seen.main = event.prefill, event.relay, event.main
                seen.prompt_tokens = event.prompt_tokens
            case ev.CacheSampled():
                seen.cached = {
                    "prefill": event.prefill, "relay": event.relay, "main": event.main,
                }  # fmt: skip
            case ev.Admitted():
                seen.admitted[event.instance] = event.t
                seen.hits[event.instance] = event.hit
                seen.pages[event.instance] = event.pages
            case ev.PrefillStarted():
                seen.started = event.t
            case ev.PrefillEnded():
                seen.ended = event.t
                self.prompts.setdefault(event.instance, []).append((event.t, seen.routed or 0))
            case ev.KVWhole():
                seen.whole[event.instance] = event.t
                if event.instance == seen.relay and seen.ended is not None:
                    self.tails.append(event.t - seen.ended)
            case ev.Freed():
                seen.freed[event.instance] = event.t
            case ev.Released():
                seen.released = event.t
                self._notice(seen, event.t)
            case ev.Finished():
                seen.finish, seen.finished = event.reason, event.t
                self._over(seen)

    def _notice(self, seen: Seen, released: Ns) -> None:
        decoder = seen.first_decoder
        if decoder in seen.whole:
            role = "relay" if seen.relay else "main"
            held = self.notices.setdefault((role, self._site(decoder)), deque(maxlen=GAPS))
            held.append(released - seen.whole[decoder])

    def _over(self, seen: Seen) -> None:
        if seen.finish not in ("stop", "length"):
            seen.trouble = seen.trouble or f"it ended by {seen.finish}"
        if seen.relay in seen.freed and seen.main in seen.whole and seen.switch is not None:
            took = seen.freed[seen.relay] - seen.whole[seen.main]
            self.handoffs.append((max(0, took), seen.switch[1] - seen.switch[0]))

    def _tokens(self, e: ev.TokensReceived) -> None:
        seen = self.requests.get(request_of(e.request))
        if seen is None:
            return
        if seen.first is None:
            seen.first = e.t
        elif e.source == "M" and seen.source != "M" and seen.relay and seen.last is not None:
            seen.switch = (seen.last, e.t)
        seen.last, seen.source = e.t, e.source
        seen.made[e.source] = seen.made.get(e.source, 0) + e.end - e.start

    def behind(self, instance: str, t: Ns) -> Ns:
        """When the prompts are computed that were before one that comes there at `t`."""
        ends = self.prompts.get(instance, [])
        first = bisect_right(ends, (t, 1 << 62))
        before = (end for end, routed in ends[first : first + QUEUED] if routed <= t)
        return max(before, default=t)

    def _token(self, e: ev.TokensMade) -> None:
        """Where it is made: what lies between is the instance's pace, and nothing else."""
        seen = self.requests.get(e.request)
        if seen is None:
            return
        before, seen.made_at[e.source] = seen.made_at.get(e.source), e.t
        gaps = seen.gaps.setdefault(e.source, array("q"))
        if before is not None and len(gaps) < MOST_GAPS:
            gaps.append((e.t - before) // (e.end - e.start))

    # -- instances ---------------------------------------------------------------------------------

    def _site(self, instance: str | None) -> str:
        machine = self.machines.get(instance or "")
        return machine.site if machine else ""

    def _step(self, e: ev.Step) -> None:
        machine, began = self.machines.get(e.instance), self._steps.pop(e.instance, None)
        if machine is None or (began and all(owner.endswith(")") for owner, _, _ in began.spans)):
            return  # a step of lessons only, which wait for everybody
        machine.level(e.t, e.pages_used)
        machine.ends.append(e.t)
        new = e.prefill_tokens + e.extend_tokens
        machine.steps.append((e.t - e.start_ns, e.sequences, new))
        for owner, start, end in began.spans if began and e.prefill_tokens else ():
            seen = self.requests.get(owner)
            if seen is not None and start < seen.prompt_tokens:
                seen.chunks.append((e.t, start, end))

    def _pages(self, e: ev.PagesTaken | ev.PagesFreed) -> None:
        """Those of lessons do not count: whoever lacks room takes it from them."""
        machine = self.machines.get(e.instance)
        if machine is None or e.owner.endswith(")"):
            return
        count = sum(count for _, count in e.pages)
        if isinstance(e, ev.PagesTaken):
            machine.own(e.t, e.owner, count)
        else:
            machine.own(e.t, e.owner, -(machine.owned.get(e.owner, 0) if e.over else count))
            if e.over:
                del machine.owned[e.owner]

    def _crashed(self, e: ev.InstanceCrashed) -> None:
        self._steps.pop(e.instance, None)
        if machine := self.machines.get(e.instance):
            machine.owned.clear()
            machine.level(e.t, 0)

    # -- links -------------------------------------------------------------------------------------

    def _rate(self, e: ev.LinkRate) -> None:
        a, b = e.between
        for ends in dict.fromkeys([(a, b)] if e.one_way else [(a, b), (b, a)]):
            road = self.roads.get(ends)
            if road is None:
                road = self.roads[ends] = Road(self.setting.delays.get(ends, 0))
            road.caps.append((e.t, e.rate))

    def _kv_sent(self, e: ev.KVSent) -> None:
        seen = self.requests.get(e.request)
        if seen is not None:
            seen.first_sent.setdefault(e.dst, e.t)
        key, way = (e.request, e.dst), self._way.setdefault((e.request, e.dst), deque())
        if way and e.start < way[-1][0]:
            way.clear()
            self._left.pop(key, None)
        way.append((e.end, e.t))

    def _kv_received(self, e: ev.KVReceived) -> None:
        seen = self.requests.get(request_of(e.request))
        if seen is None:
            return
        src, dst = self._site(seen.prefill), self._site(e.instance)
        if src != dst and e.instance == seen.main:
            seen.wan_bytes += e.bytes
        if e.end > e.start:
            self.token_bytes[src, dst] = e.bytes / (e.end - e.start)
        road, key = self.roads.get((src, dst)), (e.request, e.instance)
        way = self._way.get(key)
        if road is None or not way:
            return
        ready = way[0][1]
        while way and way[0][0] <= e.end:
            ready = way.popleft()[1]
        left = max(ready, e.t - road.delay)
        start = min(max(ready, self._left.get(key, ready)), left)
        road.note(Piece(f"{e.request}>{e.instance}", ready, start, left, e.bytes))
        self._left[key] = left
        if not way:
            del self._way[key]


_TROUBLE: Mapping[type[Event], str] = {
    ev.Retried: "it was tried again after a loss",
    ev.Rerouted: "it went on without an instance that was lost",
    ev.Preempted: "it lost its memory on the way",
}


def spans_of(lengths: list[tuple[int, int]]) -> list[Span]:
    """(new tokens, position of the first) of each sequence, as what a step is charged for."""
    return [Span("", (0,) * n, start, (Run(0, start + n),), None) for n, start in lengths]
