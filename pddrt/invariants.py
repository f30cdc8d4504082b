"""What must hold at every moment of a run, checked from its trace while it runs.

`Monitor` listens to the trace and shares no code with what it checks: it keeps its own books of
pages, positions and links (`ledger`), and its own account of each request. What it knows is what
events say, so that a recorded run can be judged again. The first violation is reported, with the
events that led to it; after that the books mean nothing any more and it listens no longer.

Client    a stream is contiguous and once, and within its budget; every id was made, at its
          position, by the role that its source says; one final state, nothing after it; an answer
          that ends by length has it; the legs of TTFT add up.
Attempts  a further one begins behind what the client has, within the budget; ids of all of them are
          the client's. Each is judged by itself, those that were given up, too.
Decoding  no step on KV that is not there; none before the manifest is complete.
Handoff   pieces join, and hold ids that were made. A relayed main decoder computes nothing before
          it has ids, and draws nothing before the last of them or, where both decode, before it was
          told of some; it goes on from what it knows. No relay goes on after the last ids, or after
          it was passed. In place of a relay that is lost a main decoder may go on, behind ids that
          were made. Where the main decoder's own ids are not the answer's, KV from there on is
          not there any more, and those positions may be made again; never otherwise.
Transfers only what a finished step has written, only the suffix that the decoder lacks, every
          position once; bytes in are bytes out when the KV is whole.
Steps     where work is ready, and memory for it, somebody steps (`stalls` looks).
Pages, links  what `ledger` says of them.
Time      never runs backwards.

Left out: whether ids are right (that is `verify`), and control frames, of which the trace says
nothing but their sum per link.

Memory is bounded by what is under way. The account of a request is closed some time after its end,
when no instance has pages of it any more; session and turn tell that an id is not used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible, Sequence
from itertools import islice
from typing import Any

from pddrt import trace as ev
from pddrt.errors import RunFailed
from pddrt.ledger import Account, Broken, Line, Pages, Path, Turns, must
from pddrt.trace import Event, to_line
from pddrt.types import LETTER, MS, SECOND, Ns

EARLY: Ns = MS
"""How early data may arrive on the wall clock: nets send up to half of that ahead, at both ends of
the delay."""
SETTLE_TIME: Ns = 60 * SECOND
"""After its end a request's account stays open, for what comes late..."""
LAST_TIME: Ns = 3_600 * SECOND
"""... but not longer than this for an instance that does not give its pages back."""
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


Legs = Callable[[str], Mapping[str, Ns] | None]


class Monitor:
    """Listens to one run's trace. `checked` counts the events judged."""

    def __init__(
        self,
        on_violation: Callable[[Violation], None],
        past: Reversible[Event] = (),
        legs: Legs | None = None,
    ) -> None:
        """`on_violation` is called once; what it raises goes to whoever emitted the event. `past`:
        the trace's latest events, as it goes on, where those that led to a violation are found.
        `legs` says what a request's TTFT is made of, as it will be reported.
        """
        self._tell = on_violation
        self._past = past
        self._legs = legs
        self.violations: list[Violation] = []
        self.checked = 0
        self._now: Ns = 0
        self._early: Ns = 0
        self._pages: dict[str, Pages] = {}
        self._requests: dict[str, Account] = {}
        self._links: dict[tuple[str, str], Line] = {}
        self._turns = Turns()
        self._settling: deque[tuple[Ns, Ns, str]] = deque()
        """When to close an account, when the request ended, which."""
        self._books: dict[type[Event], Callable[[Pages, Any], None]] = {
            ev.PagesTaken: Pages.taken,
            ev.PageTable: Pages.tabled,
            ev.PagesKept: Pages.kept,
            ev.PagesFreed: Pages.freed,
            ev.PagesEvicted: Pages.evicted,
            ev.Freed: Pages.over,
            ev.PoolChecked: Pages.audited,
        }
        self._checks: dict[type[Event], Callable[[Any], None]] = {
            ev.RunStarted: self._run_started,
            ev.InstanceStarted: self._instance_started,
            ev.InstanceCrashed: self._instance_crashed,
            ev.LinkRate: self._link_rate,
            ev.RequestSent: self._request_sent,
            ev.Routed: self._routed,
            ev.Rerouted: self._rerouted,
            ev.TakenOver: self._taken_over,
            ev.TokensReceived: self._tokens_received,
            ev.Finished: self._finished,
            ev.TokensMade: self._tokens_made,
            ev.HandoffSent: self._handoff_sent,
            ev.HandoffTaken: self._handoff_taken,
            ev.HandoffEnded: self._handoff_ended,
            ev.StepBegan: self._step_began,
            ev.Step: self._step,
            ev.StepFailed: self._step_failed,
            ev.Stalled: self._stalled,
            ev.Admitted: self._admitted,
            ev.TransferCancelled: self._transfer_cancelled,
            ev.KVSent: self._kv_sent,
            ev.KVReceived: self._kv_received,
            ev.KVWhole: self._kv_whole,
            ev.LinkTotal: self._link_total,
        }

    def __call__(self, event: Event) -> None:
        if self.violations:
            return
        self.checked += 1
        try:
            if event.t < self._now:
                raise Broken("time runs backwards", f"{event.t} ns after {self._now} ns")
            self._now = event.t
            if check := self._checks.get(type(event)):
                check(event)
            elif (book := self._books.get(type(event))) and (pages := self._at(event)):
                book(pages, event)
            if self._settling and event.t >= self._settling[0][0]:
                self._settle()
        except Broken as broken:
            name, detail = broken.args
            self._report(Violation(name, detail, self._led_to(event)))

    def _at(self, event: Any) -> Pages | None:
        return self._pages.get(event.instance)

    def _settle(self) -> None:
        """Closes the accounts that are due, of requests that hold nothing any more."""
        while self._settling and self._now >= self._settling[0][0]:
            _, ended, name = self._settling.popleft()
            attempts = len(self._requests[name].attempts)
            names = [ev.attempt_name(name, number) for number in range(attempts)]
            held = any(n in pages.held for pages in self._pages.values() for n in names)
            if held and self._now < ended + LAST_TIME:
                self._settling.append((self._now + SETTLE_TIME, ended, name))
                continue
            for n in names:
                self._requests.pop(n, None)

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

    @property
    def open_accounts(self) -> int:
        """Of attempts at requests that are under way, or have just ended."""
        return len(self._requests)

    def pools(self) -> Iterable[Pages]:
        """The books of each instance's pages."""
        return self._pages.values()

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
        for event in islice(reversed(self._past), SEARCHED):
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
        for pages in self._pages.values():
            for owner, what in pages.open():
                yield "pages never came back", what, owner

    # -- the deployment ----------------------------------------------------------------------------

    def _run_started(self, e: ev.RunStarted) -> None:
        self._early = 0 if e.clock == "virtual" else EARLY

    def _instance_started(self, e: ev.InstanceStarted) -> None:
        self._pages[e.instance] = Pages(e.instance, e.role, e.site, e.pages, e.page_tokens)

    def _instance_crashed(self, e: ev.InstanceCrashed) -> None:
        """What was not kept is gone, and nobody tells of it: who held what, and what was cached."""
        if (pages := self._pages.get(e.instance)) is None:
            return
        if not e.kept:
            self._pages[e.instance] = pages.anew()
        for request in self._requests.values():
            if path := request.paths.get(e.instance):
                path.cancelled, path.whole = True, False

    def _link_rate(self, e: ev.LinkRate) -> None:
        ways = (e.between,) if e.one_way else (e.between, e.between[::-1])
        for path in dict.fromkeys(ways):
            if link := self._links.get(path):
                link.change(e.rate, e.t)
            else:
                self._links[path] = Line(e.rate, e.t)

    # -- the client --------------------------------------------------------------------------------

    def _request_sent(self, e: ev.RequestSent) -> None:
        new = self._turns.sent(e.session, e.turn) and e.request not in self._requests
        must(new, "a request sent twice", e.request)
        self._requests[e.request] = Account(e.t)

    def _routed(self, e: ev.Routed) -> None:
        root = self._requests.get(ev.request_of(e.request))
        if root is None:
            return
        if (request := self._requests.get(e.request)) is None:
            self._goes_on_behind(root, e)
            request = self._requests[e.request] = Account(root.sent, attempts=root.attempts)
            root.attempts.append(request)
        must(request.route is None, "a request routed twice", e.request)
        request.route = e

    def _goes_on_behind(self, root: Account, e: ev.Routed) -> None:
        """`e` is a further attempt. A client may have given up by itself."""
        if root.route is None or root.end not in (None, "aborted"):
            raise Broken("a further attempt at what is not under way", e.request)
        length, budget = root.route.prompt_tokens, root.route.max_tokens
        made = e.prompt_tokens - length
        whole = made + e.max_tokens == budget
        if not (whole and root.next <= made < budget):
            what = f"{e.request}: behind {made} of {budget}, {e.max_tokens} more, {root.next} sent"
            raise Broken("a further attempt that does not join", what)

    def _rerouted(self, e: ev.Rerouted) -> None:
        if request := self._requests.get(e.request):
            request.reroute(e)

    def _tokens_received(self, e: ev.TokensReceived) -> None:
        request = self._under_way(e.request)
        if request.end is not None:
            raise Broken("tokens after the end", f"{e.request}: {request.end}")
        if e.start != request.next or e.end - e.start != len(e.ids):
            what = f"{e.request}: [{e.start}, {e.end}) where {request.next} is next"
            raise Broken("the stream is not contiguous and once", what)
        route = request.route
        assert route is not None
        if e.end > route.max_tokens:
            what = f"{e.request}: {e.end} of {route.max_tokens}"
            raise Broken("more tokens than the budget", what)
        for position, token in enumerate(e.ids, route.prompt_tokens + e.start):
            if not any(a.has_made(e.source, position, token) for a in reversed(request.attempts)):
                what = f"{e.request}: {token} at {position}, said to be of {e.source}"
                raise Broken("a token that nobody made", what)
        request.next = e.end
        if request.first is None:
            request.first = e.t

    def _under_way(self, name: str) -> Account:
        if (request := self._requests.get(name)) is None:
            raise Broken("told of a request that is long over, or was never sent", name)
        return request

    def _finished(self, e: ev.Finished) -> None:
        request = self._under_way(e.request)
        must(request.end is None, "ended twice", f"{e.request}: {request.end}, then {e.reason}")
        request.end = e.reason
        must(
            e.output_tokens == request.next,
            "tokens miscounted at the end",
            f"{e.request}: {e.output_tokens}, {request.next} were received",
        )
        if e.reason == "length" and request.route:
            must(
                request.next == request.route.max_tokens,
                "an answer ended by length before its length",
                f"{e.request}: {request.next} of {request.route.max_tokens} tokens",
            )
        if self._legs and request.first is not None and (legs := self._legs(e.request)):
            must(
                sum(legs.values()) == request.first - request.sent and min(legs.values()) >= 0,
                "the legs of TTFT do not add up",
                f"{e.request}: {dict(legs)} to {request.first - request.sent} ns",
            )
        for attempt in request.attempts:
            attempt.end = e.reason
            attempt.made.clear()
        self._settling.append((e.t + SETTLE_TIME, e.t, e.request))

    # -- making tokens -----------------------------------------------------------------------------

    def _tokens_made(self, e: ev.TokensMade) -> None:
        request, pages = self._requests.get(e.request), self._pages.get(e.instance)
        if request is None or request.route is None or pages is None:
            return
        if e.instance in request.former:
            return  # it is not asked any more
        route, source = request.route, e.source
        maker = {"P": route.prefill, "R": route.relay, "M": route.main}[source]
        alone = _alone(route)
        begin = route.prompt_tokens + (source != "P" and not alone)
        end = route.prompt_tokens + (route.max_tokens if source != "P" or alone else 1)
        made = request.made.setdefault(source, {})
        wrong = ""
        if e.end - e.start != len(e.ids):
            wrong = "ids and positions differ"
        elif maker != e.instance or LETTER[pages.role] != source:
            wrong = "tokens of one who has no part in it"
        elif not begin <= e.start < e.end <= end:
            wrong = "more tokens than the budget"
        elif source == "M" and route.relay and not request.end:
            wrong = request.wrong_for_main(e.start)
        if not wrong and any(position in made for position in range(e.start, e.end)):
            wrong = "a position made twice by one role"
        if wrong:
            raise Broken(wrong, f"{e.request}: [{e.start}, {e.end}) by {e.instance}")
        if source != "P":
            self._may_decode(e.request, request, e.instance)
        made.update(zip(range(e.start, e.end), e.ids, strict=True))

    def _may_decode(self, name: str, request: Account, instance: str) -> None:
        assert request.route is not None
        if _alone(request.route) or instance in request.former:
            return  # it computes the prompt by itself; that every step has its KV is checked there
        path = request.paths.get(instance)
        if path is None or not path.whole:
            raise Broken("decode before the KV is whole", f"{name} on {instance}")
        if instance == request.route.relay:
            must(not request.relay_done, "the relay goes on after the handoff", name)
        elif request.route.relay:
            must(request.known, "decode before the last ids", f"{name} on {instance}")

    # -- the handoff -------------------------------------------------------------------------------

    def _handoff_sent(self, e: ev.HandoffSent) -> None:
        """By the relay, or by the gateway, which may tell of what the relay made before its end."""
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        relayed = not e.follows
        if e.main in request.former or (relayed and request.taken):
            return  # to one that is not asked any more, or will not listen
        begin = (request.handed if relayed else request.told) or request.route.prompt_tokens
        must(
            e.start == begin and not (relayed and (request.relay_done or request.told)),
            "the handoff does not join",
            f"{e.request}: ids of [{e.start}, {e.end}) where {begin} is next",
        )
        must(
            request.end is not None
            or all(request.by_relay(p) is not None for p in range(e.start, e.end)),
            "ids handed over that nobody made",
            f"{e.request}: some of [{e.start}, {e.end})",
        )
        if relayed:
            request.handed, request.relay_done = e.end, e.last
        else:
            request.told = e.end

    def _handoff_ended(self, e: ev.HandoffEnded) -> None:
        if request := self._requests.get(e.request):
            request.relay_done = True

    def _taken_over(self, e: ev.TakenOver) -> None:
        """By a main decoder whose relay is lost."""
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        what = f"{e.request} on {e.main}"
        must(request.taken, "taken over what nobody gave", what)
        begin = request.route.prompt_tokens
        made = all(request.by_relay(p) is not None for p in range(begin, e.end))
        must(request.end is not None or made, "taken over behind ids that nobody made", what)
        request.known = request.told = e.end

    def _handoff_taken(self, e: ev.HandoffTaken) -> None:
        """What it knows now is true: KV that it computed for anything else is not there."""
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        if e.main in request.former:
            return
        what = f"{e.request} on {e.main}"
        over = request.relay_done or request.told or not e.decodes
        must(over, "decode before the last ids", what)
        sent = max(request.handed, request.told)
        must(request.known <= e.end <= sent, "ids taken that nobody handed over", what)
        must(request.told or not e.back, "given up what nobody doubts", what)
        made = request.made.get("M", {})
        doubtful = range(request.known or request.route.prompt_tokens, e.end)
        request.known = e.end
        if request.end is not None:
            if e.back:  # which of them, the relay's ids would say; they are forgotten by now
                made.clear()
            return
        for position in doubtful:
            if position in made and made[position] != request.by_relay(position):
                for later in [p for p in made if p >= position]:
                    del made[later]
                if held := self._pages[e.main].held.get(e.request):
                    held.kv.cut(position)
                return

    # -- steps -------------------------------------------------------------------------------------

    def _step_began(self, e: ev.StepBegan) -> None:
        if (pages := self._pages.get(e.instance)) is None:
            return
        for owner, _, _ in e.spans:
            request = self._requests.get(owner)
            if pages.role != "prefill" and request and request.route and owner in pages.held:
                self._may_decode(owner, request, e.instance)
        pages.step_began(e)

    def _step(self, e: ev.Step) -> None:
        if pages := self._pages.get(e.instance):
            pages.step_ended()

    def _step_failed(self, e: ev.StepFailed) -> None:
        if pages := self._pages.get(e.instance):
            pages.step_ended(failed=True)

    def _stalled(self, e: ev.Stalled) -> None:
        idle = (e.t - e.since_ns) / SECOND
        what = f"{e.instance} could have given {e.request} {e.waits_for} for {idle:.3f} s"
        raise Broken("work is ready and nothing steps", what)

    # -- KV on its way -----------------------------------------------------------------------------

    def _admitted(self, e: ev.Admitted) -> None:
        if (request := self._requests.get(e.request)) is not None:
            path = request.paths.setdefault(e.instance, Path())
            if path.cancelled:  # and resumed, from what is left there
                path = request.paths[e.instance] = Path()
            path.lacks = e.hit if path.lacks is None else path.lacks

    def _transfer_cancelled(self, e: ev.TransferCancelled) -> None:
        request = self._requests.get(e.request)
        if request is not None and e.dst in request.paths:
            request.paths[e.dst].cancelled = True

    def _kv_sent(self, e: ev.KVSent) -> None:
        source, target = self._pages.get(e.src), self._pages.get(e.dst)
        if source is None or target is None:
            return
        what = f"{e.request}: [{e.start}, {e.end}) from {e.src} to {e.dst}"
        held = source.held.get(e.request)
        there = held is not None and held.kv.covers(e.start, e.end)
        must(there, "KV sent before it was computed", what)
        if request := self._requests.get(e.request):
            path = request.paths.get(e.dst)
            if path is None or path.lacks is None:
                raise Broken("KV sent to one who has not admitted it", what)
            must(e.start >= path.lacks, "KV sent that the decoder has", what)
            must(not path.sent.meets(e.start, e.end), "KV sent twice", what)
            path.sent.add(e.start, e.end)
            path.out += e.bytes
        if line := self._links.get((source.site, target.site)):
            line.advance(e.t)
            line.handed += e.bytes

    def _kv_received(self, e: ev.KVReceived) -> None:
        if (pages := self._pages.get(e.instance)) is None:
            return
        what = f"{e.request}: [{e.start}, {e.end}) on {e.instance}"
        held = pages.held.get(e.request)
        if held is None:
            raise Broken("KV received without pages", what)
        must(not held.kv.meets(e.start, e.end), "KV received twice", what)
        pages.writes(e.request, e.start, e.end)
        held.kv.add(e.start, e.end)
        request = self._requests.get(e.request)
        if request is None or request.route is None:
            return
        path = request.paths[e.instance]
        must(path.sent.covers(e.start, e.end), "KV received that nobody sent", what)
        path.arrived += e.bytes
        assert request.route.prefill is not None
        source = self._pages[request.route.prefill]
        if line := self._links.get((source.site, pages.site)):
            line.received(e, self._early)

    def _kv_whole(self, e: ev.KVWhole) -> None:
        if (pages := self._pages.get(e.instance)) is None:
            return
        held, what = pages.held.get(e.request), f"{e.request} on {e.instance}"
        if held is None or not held.kv.covers(0, e.prompt_tokens):
            gap = held.kv.missing(e.prompt_tokens) if held else "everything"
            raise Broken("decode before the KV is whole", f"{what}: {gap} is missing")
        if (request := self._requests.get(e.request)) is None or request.route is None:
            return
        path, route = request.paths[e.instance], request.route
        must(
            path.out == path.arrived,
            "bytes in are not bytes out",
            f"{what}: {path.out} out, {path.arrived} in",
        )
        if not (e.instance == route.main and route.relay) and request.end is None:
            must("P" in request.made, "decode before the first id", what)
        path.whole = True

    def _link_total(self, e: ev.LinkTotal) -> None:
        if line := self._links.get((e.src_site, e.dst_site)):
            line.totalled(e, self._early)


def _alone(route: ev.Routed) -> bool:
    """Whether one instance prefills and decodes."""
    return sum(name is not None for name in (route.prefill, route.relay, route.main)) == 1
