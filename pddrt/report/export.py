"""A run as a Chrome trace, for Perfetto (ui.perfetto.dev opens the file; so does chrome://tracing).

    process     threads and tracks
    requests    a thread for each request: what its client waited for, leg by leg, then who decoded
    a site      a thread for each instance, with its steps, and one for each direction of a link
                that begins there (more where transfers overlap), with each transfer and the pieces
                of KV in it; counters of KV pages, and of transfers and rate of links
    faults      what was done to the deployment, and for how long

Arrows go from where a relay decoder sent ids to where the main decoder took them.

Requests are threads, and no asynchronous tracks, because only threads can be told their order: that
of their names, s2.0 before s10.0. So are sites, in the order of theirs.

Written while events are read, in flat memory. On a thread any two slices are disjoint or one lies
in the other, and where two begin together the longer is written first; events of a track are in
order. Perfetto sorts by time and keeps the order of equals, so that this is what it needs. Times
are in microseconds with three decimals: nanoseconds, exact. A run that is too large for a browser
loses the later ones of what there is most of; `left_out` says what.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count, pairwise
from typing import Any

from pddrt import trace as ev
from pddrt.metrics import Recorder, RequestRecord
from pddrt.report.timeline import Direction, Timeline
from pddrt.trace import Event, dumps
from pddrt.types import Ns

Json = Mapping[str, Any]

MOST = {"steps": 300_000, "transfers": 50_000, "requests": 20_000, "handoff rounds": 100_000}
"""At most so many of each: some 150 MB in all, which a browser can just open."""

REQUESTS, FAULTS, FIRST_SITE = 1, 2, 3
ROLES = ("prefill", "relay", "main")


class Lanes:
    """The threads of one direction of a link: as many as transfers were under way at once."""

    def __init__(self) -> None:
        self.taken: list[bool] = []

    def take(self) -> int:
        lane = self.taken.index(False) if False in self.taken else len(self.taken)
        self.taken[lane:] = [True, *self.taken[lane + 1 :]]
        return lane


class Exporter:
    """Listens to a trace after `recorder` and `timeline`, which it reads. `write` takes text; call
    `close` at the end.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        recorder: Recorder,
        timeline: Timeline,
        most: Mapping[str, int] = MOST,
    ) -> None:
        self._write = write
        self._recorder = recorder
        self._timeline = timeline
        self._most = most
        self._told: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self._processes: dict[str, int] = {}
        self._threads: dict[str, tuple[int, int]] = {}
        """(process, thread) by instance, and by direction and lane of a link."""
        self._tids, self._ids, self._arrows = count(100), count(1), count(1)
        self._steps: dict[str, ev.StepBegan] = {}
        self._pages: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}
        self._crossing: dict[tuple[str, str], tuple[Direction, int, Ns]] = {}
        self._open: dict[str, None] = {}
        self._requests: dict[str, int] = {}
        """Threads of those that are told."""
        self._sent: dict[str, list[tuple[int, int]]] = {}
        """By request: (arrow, end of its ids) of what the main decoder has not taken yet."""
        self._faults: dict[tuple[int, int], str] = {}
        self._first = True
        write('{"displayTimeUnit":"ms","traceEvents":[')
        self._process(REQUESTS, "requests", 0)

    def __call__(self, event: Event) -> None:
        match event:
            case ev.InstanceStarted() | ev.InstanceCrashed() | ev.InstanceReturned():
                self._instance(event)
            case ev.StepBegan():
                self._steps[event.instance] = event
            case ev.Step():
                self._step(event)
            case ev.StepFailed():
                self._lost_step(event.t, event.instance, "step failed", event.detail)
            case ev.LinkRate():
                self._rate(event)
            case ev.KVSent():
                self._begin_transfer(event)
            case ev.KVWhole():
                self._end_transfer(event.t, event.request, event.instance)
            case ev.TransferCancelled():
                self._end_transfer(event.t, event.request, event.dst, cancelled=True)
            case ev.HandoffSent() | ev.HandoffTaken():
                self._handoff(event)
            case ev.Preempted():
                self._instant(event.t, event.instance, f"preempts {event.request}")
            case ev.FaultInjected() | ev.FaultEnded():
                self._fault(event)
            case ev.RequestSent():
                self._open[event.request] = None
            case ev.Finished():
                self._finish(event.t, event.request)

    def close(self) -> None:
        """What is not over by now, and the end of the file."""
        end = self._timeline.end
        for request, dst in list(self._crossing):
            self._end_transfer(end, request, dst, cut=True)
        for request in list(self._open):
            self._finish(end, request, cut=True)
        for instance in self._timeline.instances.values():
            if instance.down and instance.down[-1][1] is None:
                self._down(instance.name, instance.down[-1][0], end)
        for key in list(self._faults):
            self._end_fault(end, key)
        for order, (_, pid) in enumerate(sorted(self._processes.items(), key=_by_name), FIRST_SITE):
            self._meta("process_sort_index", pid, 0, {"sort_index": order})
        for order, (_, tid) in enumerate(sorted(self._requests.items(), key=_by_name), 1):
            self._meta("thread_sort_index", REQUESTS, tid, {"sort_index": order})
        left_out = {name: number for name, number in self.left_out.items() if number}
        self._write(f'\n],"otherData":{dumps({"left_out": left_out})}}}\n')

    # -- instances ---------------------------------------------------------------------------------

    def _instance(self, e: ev.InstanceStarted | ev.InstanceCrashed | ev.InstanceReturned) -> None:
        if isinstance(e, ev.InstanceCrashed):
            self._lost_step(e.t, e.instance, "step lost", "the instance crashed")
            return
        instance = self._timeline.instances.get(e.instance)
        if instance is None:
            return
        if e.instance not in self._threads:
            order = 1 + ROLES.index(instance.role) if instance.role in ROLES else 9
            self._thread(e.instance, instance.site, f"{e.instance} {instance.role}", order)
        if instance.down:
            self._down(e.instance, instance.down[-1][0], e.t)

    def _down(self, instance: str, start: Ns, end: Ns) -> None:
        if instance in self._threads:
            self._slice(self._threads[instance], start, end, "down", {})

    def _step(self, e: ev.Step) -> None:
        began = self._steps.pop(e.instance, None)
        if e.instance not in self._threads or not self._room("steps"):
            return
        tokens = {
            "prefill": e.prefill_tokens, "extend": e.extend_tokens, "decode": e.decode_tokens,
        }  # fmt: skip
        args: dict[str, Any] = {"sequences": e.sequences}
        args |= {f"{kind}_tokens": n for kind, n in tokens.items() if n}
        spans = began.spans if began is not None else ()
        if longer := [f"{owner} [{i}, {j})" for owner, i, j in spans if j - i > 1]:
            args["of"] = longer
        name = " + ".join(kind for kind, n in tokens.items() if n) or "step"
        self._slice(self._threads[e.instance], min(e.start_ns, e.t), e.t, name, args)
        if self._pages.get(e.instance) != e.pages_used:
            self._pages[e.instance] = e.pages_used
            pid = self._threads[e.instance][0]
            self._counter(pid, e.t, e.instance, "KV pages", e.pages_used)

    def _lost_step(self, t: Ns, instance: str, name: str, why: str) -> None:
        began = self._steps.pop(instance, None)
        if began is not None and instance in self._threads:
            self._slice(self._threads[instance], began.t, t, name, {"why": why})

    # -- links -------------------------------------------------------------------------------------

    def _rate(self, e: ev.LinkRate) -> None:
        for d in self._timeline.directions.values():
            if d.link == e.link and d.caps[-1][0] == e.t and e.rate is not None:
                megabits = e.rate * 8 / 1e6
                self._counter(self._site(d.src), e.t, d.name, "rate, Mbit/s", megabits)

    def _begin_transfer(self, e: ev.KVSent) -> None:
        if (e.request, e.dst) in self._crossing:
            return
        direction = self._timeline.direction(e.src, e.dst)
        if direction is None or not self._room("transfers"):
            return
        lane = self._lanes.setdefault(direction.name, Lanes()).take()
        self._crossing[e.request, e.dst] = (direction, lane, e.t)
        key = f"{direction.name} {lane}"
        if key not in self._threads:
            name = direction.name + (f" ({lane + 1})" if lane else "")
            self._thread(key, direction.src, name, 10 + lane)
        self._count_flows(e.t, direction)

    def _count_flows(self, t: Ns, direction: Direction) -> None:
        flows = sum(self._lanes[direction.name].taken)
        self._counter(self._site(direction.src), t, direction.name, "transfers", flows)

    def _end_transfer(
        self, t: Ns, request: str, dst: str, cancelled: bool = False, cut: bool = False
    ) -> None:
        if (request, dst) not in self._crossing:
            return
        direction, lane, began = self._crossing.pop((request, dst))
        self._lanes[direction.name].taken[lane] = False
        self._count_flows(t, direction)
        wire = self._timeline.wires[request, dst]
        pieces = [p for p in wire.pieces if p[0] >= began]
        args: dict[str, Any] = {"to": dst, "bytes": sum(size for _, _, size in pieces)}
        args |= {"ended": "cancelled"} if cancelled else {"ended": "not seen"} if cut else {}
        thread = self._threads[f"{direction.name} {lane}"]
        self._slice(thread, began, t, f"KV of {request} to {dst}", args)
        for start, end, size in pieces if not self.left_out["steps"] else ():
            self._slice(thread, start, min(end, t), "piece", {"bytes": size})

    # -- handoffs ----------------------------------------------------------------------------------

    def _handoff(self, e: ev.HandoffSent | ev.HandoffTaken) -> None:
        waiting = self._sent.setdefault(e.request, [])
        if isinstance(e, ev.HandoffSent):
            record = self._recorder.requests.get(e.request)
            src = e.src if e.src in self._threads else record.relay if record else None
            if src not in self._threads or not self._room("handoff rounds"):
                return
            args = {"ids": e.end - e.start, "last": e.last, "why": e.reason}
            self._slice(self._threads[src], e.t, e.t, f"hand over {e.request}", args)
            waiting.append((next(self._arrows), e.end))
            self._arrow("s", e.t, src, waiting[-1][0])
        elif e.main in self._threads:
            arrived = [arrow for arrow, end in waiting if end <= e.end]
            if arrived:
                args = {"extend_tokens": e.extend_tokens, "goes_on": e.decodes}
                self._slice(self._threads[e.main], e.t, e.t, f"take over {e.request}", args)
            for arrow in arrived:
                self._arrow("f", e.t, e.main, arrow)
            self._sent[e.request] = [(a, end) for a, end in waiting if end > e.end]

    # -- requests ----------------------------------------------------------------------------------

    def _finish(self, t: Ns, request: str, cut: bool = False) -> None:
        record = self._recorder.requests.get(request)
        self._open.pop(request, None)
        self._sent.pop(request, None)
        # What was under way and was not told to have ended has ended with it.
        for key in [key for key in self._crossing if key[0] == request]:
            self._end_transfer(t, *key, cancelled=True)
        if record is None or not self._room("requests"):
            return
        args = {
            "pipeline": record.pipeline,
            "prompt_tokens": record.prompt_tokens,
            "answer_tokens": len(record.ids),
            "end": "not seen" if cut else record.finish_reason,
            "detail": record.detail,
        }
        tid = self._requests[request] = next(self._tids)
        self._meta("thread_name", REQUESTS, tid, {"name": request})
        thread = REQUESTS, tid
        self._slice(thread, record.sent, max(t, record.sent), request, args)
        for name, start, end, inner in phases(record):
            self._slice(thread, start, end, name, {})
            for leg, since, until in inner:
                self._slice(thread, since, until, leg, {})

    # -- faults ------------------------------------------------------------------------------------

    def _fault(self, e: ev.FaultInjected | ev.FaultEnded) -> None:
        key = (e.fault, e.firing)
        if isinstance(e, ev.FaultInjected):
            if not self._faults:
                self._process(FAULTS, "faults", 1)
            self._faults[key] = e.what
        self._end_fault(e.t, key) if isinstance(e, ev.FaultEnded) else None

    def _end_fault(self, t: Ns, key: tuple[int, int]) -> None:
        if key in self._faults:
            fault, args = self._timeline.faults[key], {"what": self._faults.pop(key)}
            self._async(f"0x{next(self._ids):x}", fault.do, fault.began, t, args)

    # -- lines of the file -------------------------------------------------------------------------

    def _room(self, what: str) -> bool:
        """Whether one more may be told; counts it as told, or as left out."""
        room = self._told[what] < self._most[what]
        (self._told if room else self.left_out)[what] += 1
        return room

    def _line(self, text: str) -> None:
        self._write("\n" if self._first else ",\n")
        self._first = False
        self._write("{" + text + "}")

    def _meta(self, kind: str, pid: int, tid: int, args: Json) -> None:
        self._line(f'"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"args":{dumps(args)}')

    def _process(self, pid: int, name: str, order: int) -> None:
        self._meta("process_name", pid, 0, {"name": name})
        self._meta("process_sort_index", pid, 0, {"sort_index": order})

    def _site(self, site: str) -> int:
        pid = self._processes.get(site)
        if pid is None:
            pid = self._processes[site] = FIRST_SITE + len(self._processes)
            self._meta("process_name", pid, 0, {"name": f"site {site}"})
        return pid

    def _thread(self, key: str, site: str, name: str, order: int) -> None:
        pid, tid = self._threads[key] = (self._site(site), next(self._tids))
        self._meta("thread_name", pid, tid, {"name": name})
        self._meta("thread_sort_index", pid, tid, {"sort_index": order})

    def _slice(self, thread: tuple[int, int], start: Ns, end: Ns, name: str, args: Json) -> None:
        self._line(
            f'"ph":"X","name":{dumps(name)},"pid":{thread[0]},"tid":{thread[1]},"ts":{us(start)},'
            f'"dur":{us(end - start)},"args":{dumps(args)}'
        )

    def _instant(self, t: Ns, instance: str, name: str) -> None:
        if instance in self._threads:
            pid, tid = self._threads[instance]
            self._line(
                f'"ph":"i","s":"t","name":{dumps(name)},"pid":{pid},"tid":{tid},"ts":{us(t)}'
            )

    def _counter(self, pid: int, t: Ns, name: str, of: str, value: float) -> None:
        args = dumps({of: value})
        self._line(f'"ph":"C","name":{dumps(name)},"pid":{pid},"ts":{us(t)},"args":{args}')

    def _arrow(self, phase: str, t: Ns, instance: str, arrow: int) -> None:
        pid, tid = self._threads[instance]
        binds = ',"bp":"e"' if phase == "f" else ""
        self._line(
            f'"ph":"{phase}","name":"handoff","cat":"handoff","id":{arrow},"pid":{pid},"tid":{tid},'
            f'"ts":{us(t)}{binds}'
        )

    def _async(self, track: str, name: str, start: Ns, end: Ns, args: Json) -> None:
        """A fault, on a track of its own: they may overlap in any way."""
        about = (
            f'"cat":"fault","name":{dumps(name)},"id2":{{"local":"{track}"}},"pid":{FAULTS},'
            f'"tid":{FAULTS}'
        )
        self._line(f'"ph":"b",{about},"ts":{us(start)},"args":{dumps(args)}')
        self._line(f'"ph":"e",{about},"ts":{us(end)}')


def _by_name(item: tuple[str, int]) -> list[tuple[bool, int, str]]:
    """As a reader counts: numbers in a name by their value."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", item[0])
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in pieces]


Phase = tuple[str, Ns, Ns, list[tuple[str, Ns, Ns]]]


def phases(record: RequestRecord) -> list[Phase]:
    """(name, start, end, the same inside it) of what the client of a request waited for, in order
    and without a gap: the legs of TTFT, then stretches of tokens by who made them.
    """
    legs = record.legs
    if legs is None:
        return []
    first, at, inner = record.times[0], record.sent, []
    for name, length in legs.items():
        if length:
            inner.append((name.replace("_", " "), at, at + length))
        at += length
    found: list[Phase] = [("time to first token", record.sent, first, inner)]
    at = 0
    for i, (before, letter) in enumerate(pairwise(record.sources), 1):
        if letter == before or before == "P":
            continue
        found += _decoded(record, at, i - 1)
        since, until = record.times[i - 1], record.times[i]
        found.append((f"gap at the switch to {letter}", since, until, []))
        at = i
    return found + _decoded(record, at, len(record.times) - 1)


def _decoded(record: RequestRecord, first: int, last: int) -> list[Phase]:
    """The stretch from the token at `first` to that at `last`, if it has a length."""
    since, until = record.times[first], record.times[last]
    name = f"decode by {record.sources[last]}"
    return [(name, since, until, [])] if until > since else []


def us(t: Ns) -> str:
    """Microseconds, exactly."""
    return f"{t // 1000}.{t % 1000:03d}"
