"""One request taken apart for people: its waterfall, its handoff, its KV, its memory, its chances.

Functions from what a window of a run's events says to lines that fit a width. Bars have letters, so
that nothing is said by colour alone: a part of TTFT by its letter; KV on the wire `-` where it is
hidden behind other work and `=` where TTFT waits for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table
from rich.text import Text

from pddrt import trace as ev
from pddrt.inspection.counterfactual import Cost, costs
from pddrt.inspection.hindsight import Hindsight
from pddrt.inspection.recorded import Recorded, Window
from pddrt.inspection.regret import setting_in
from pddrt.metrics import LEGS, Recorder, RequestRecord
from pddrt.report.figures import LETTERS
from pddrt.report.slowness import TITLES, Judge, most_at_once, ns, rate_at, stages, wire_times
from pddrt.report.timeline import Direction, Span, Timeline, Wire
from pddrt.show import STYLE, clean, duration, many, size
from pddrt.trace import Event, Seconds
from pddrt.types import SECOND, Ns
from pddrt.units import format_rate

Json = dict[str, Any]

PART_STYLE = {
    "prefill": STYLE["P"],
    "relay_decode": STYLE["R"],
    "main_decode": STYLE["M"],
    "transfer": "color(133)",
}


@dataclass
class Scene:
    """A request among its neighbours: what several readers make of one window of events."""

    run: Recorded
    row: Json
    events: list[tuple[int, Event]]
    """Of the request itself."""

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @cached_property
    def window(self) -> Window:
        return self.run.window(self.id)

    @cached_property
    def timeline(self) -> Timeline:
        return self._read[1]

    @cached_property
    def records(self) -> Mapping[str, RequestRecord]:
        return self._read[0].requests

    @cached_property
    def record(self) -> RequestRecord | None:
        return self.records.get(self.id)

    @cached_property
    def known(self) -> Hindsight:
        return self._read[2]

    @cached_property
    def _read(self) -> tuple[Recorder, Timeline, Hindsight]:
        recorder, timeline = self.run.recorder(), Timeline()
        known = Hindsight(setting_in(self.run.recording))
        for event in self.window:
            instance = getattr(event, "instance", None)
            if isinstance(event, ev.InstanceStarted):
                recorder.role_of.setdefault(event.instance, event.role)
                recorder.instances.setdefault(
                    event.instance, {"steps": 0, "busy": 0, "pages": 0, "pages_peak": 0}
                )
            if instance is None or instance in recorder.role_of:
                recorder(event)
            timeline(event)
            known(event)
        return recorder, timeline, known

    @cached_property
    def sent(self) -> Ns:
        return self.events[0][1].t if self.events else 0

    @cached_property
    def costs(self) -> list[Cost]:
        seen = self.known.requests.get(self.id)
        return [] if seen is None else costs(self.known, seen)

    def latest_step(self, instance: str, number: int) -> ev.Step | None:
        """That ended there last before an event of the window."""
        events = self.window.events
        for at in range(bisect_left(events, number, key=lambda e: e[0]) - 1, -1, -1):
            event = events[at][1]
            if isinstance(event, ev.Step) and event.instance == instance:
                return event
        return None


# -- the first token -------------------------------------------------------------------------------


def waterfall(scene: Scene, width: int, usual: Mapping[str, Ns | None]) -> Iterator[Text]:
    """TTFT leg by leg on one axis, and what of its KV was on the wire meanwhile. `usual`: medians
    of the legs over the run.
    """
    record = scene.record
    spans = {} if record is None else stages(record)
    if record is None or record.ttft is None or not spans:
        return
    cells = max(10, width - 51)
    yield Text.assemble(
        (f"TTFT {duration(record.ttft)}".ljust(22), "bold"),
        f"{'takes':>9} {'share':>6} {'median':>9}",
    )
    axis = Axis(record.sent, record.sent + record.ttft, cells)
    for leg, span in spans.items():
        length = span[1] - span[0]
        share = f"{100 * length / record.ttft:.0f} %"
        yield Text.assemble(
            f"  {LETTERS[leg]} {TITLES[leg]:<18}",
            f"{duration(length):>9} {share:>6} {duration(usual.get(leg)):>9} ",
            "|", (axis.bar([span], LETTERS[leg]), PART_STYLE.get(leg, "")), "|",
        )  # fmt: skip
    for wire in wire_times(record, scene.timeline):
        marks = axis.bar(wire.hidden_spans, "-"), axis.bar(wire.exposed_spans, "=")
        bar = "".join(b if b != " " else a for a, b in zip(*marks, strict=True))
        lasts = duration(wire.hidden + wire.exposed)
        if wire.dst == record.first_decoder:
            told = f"{lasts}, exposed {duration(wire.exposed)}"
        else:
            told = f"{lasts}, none exposed"
        over = ">" if wire.hidden_spans and wire.hidden_spans[-1][1] > axis.end else "|"
        yield Text(f"  KV to {wire.dst}".ljust(20)[:20] + f" {told:>27} |{bar}{over}")
    if why := _reason(scene):
        yield Text(why)


@dataclass(frozen=True, slots=True)
class Axis:
    start: Ns
    end: Ns
    cells: int

    def bar(self, spans: Sequence[Span], letter: str) -> str:
        """A cell for each part that one of the spans has at least half of; the least a mark."""
        total, drawn = max(1, self.end - self.start), [" "] * self.cells
        for start, end in spans:
            if end <= self.start or start >= self.end:
                continue
            first = (max(start, self.start) - self.start) * self.cells / total
            last = (min(end, self.end) - self.start) * self.cells / total
            cells = range(round(first), round(last))
            for cell in cells:
                drawn[cell] = letter
            if not cells and end > start:
                at = min(self.cells - 1, int(first))
                drawn[at] = "." if drawn[at] == " " else drawn[at]
        return "".join(drawn)


def _reason(scene: Scene) -> str:
    """What is known of the largest leg."""
    found = Judge([scene.row], scene.records, scene.timeline).first_token(1)
    if not found or not found[0].why.because:
        return ""
    slow = found[0]
    return f"{TITLES[slow.part]} is the largest: {clean(slow.why.because)}"


# -- the handoff -----------------------------------------------------------------------------------


def rounds(scene: Scene) -> Iterator[Text | Table]:
    """What each side knew at each turn of the handoff. Positions count from the first token of the
    answer.
    """
    record = scene.record
    turns = list(_turns(scene))
    if record is None or not turns:
        return
    yield Text("Handoff, turn by turn: ids that RLD has made, that MD knows of, that RLD knows "
               "MD has, that are on their way; positions in the answer")  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("at", "made", "known", "acked", "flying"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what")
    for turn in turns:
        table.add_row(*turn)
    yield table


def _turns(scene: Scene) -> Iterator[tuple[str, str, str, str, str, str]]:
    record = scene.record
    first = record.prompt_tokens if record is not None else 0
    made, known, acked, sent = 0, 0, 0, 0
    follows = 0
    for number, event in scene.events:
        what = ""
        match event:
            case ev.TokensMade() if event.source in ("P", "R"):
                made = event.end - first
            case ev.MainReady():
                what = f"{event.relay} learns that {event.main} is ready"
            case ev.HandoffBegan():
                what = (
                    f"asks {event.policy}: {event.decision}, {event.lacking} lacking"
                    + _pressure(scene, number, event.relay)
                )
            case ev.HandoffSent():
                sent = event.end - first
                ids = many(event.end - event.start, "id")
                follows += event.follows
                if not event.follows or follows == 1:
                    last = f", the last: {event.reason}" if event.last else ""
                    what = f"{ids} in {size(event.bytes)}{last}"
                    what += ", and follows what the client gets" if event.follows else ""
            case ev.HandoffTaken():
                known = event.end - first
                back = f"gives up {event.back}, " if event.back else ""
                if follows <= 1 or event.back:
                    goes = "goes on" if event.decodes else "computes the piece"
                    what = f"{event.main} {back}extends over {event.extend_tokens}, {goes}"
            case ev.HandoffCaughtUp():
                acked = event.end - first
                what = f"{event.relay} learns it; {event.made - event.end} lacking"
                what += _pressure(scene, number, event.relay)
            case ev.HandoffEnded():
                what = f"{event.relay} stops: {event.reason}"
        if what:
            at = f"+{(event.t - scene.sent) / SECOND:.4f}"
            flying = max(0, sent - known)
            yield at, str(made), str(known), str(acked), str(flying), clean(what)


def _pressure(scene: Scene, number: int, relay: str) -> str:
    """How full the relay was by its last step, and what that made of the threshold."""
    step, instance = scene.latest_step(relay, number), scene.timeline.instances.get(relay)
    if step is None or instance is None or not instance.pages:
        return ""
    about = scene.run.recording.scenario
    memory = step.pages_used / instance.pages
    told = f"; {relay} {100 * memory:.0f} % full, {step.sequences} in its batch"
    try:
        handoff, most = about["handoff"], int(about["instances"][relay]["max_batch"])
        if handoff["mode"] != "adaptive":
            return told
        pressure = max(memory, min(1.0, step.sequences / most))
        threshold = int(handoff["threshold"])
    except (KeyError, TypeError, ValueError):
        return told
    moved = "any" if pressure >= 1 else f"{threshold / (1 - pressure):.0f}"
    return f"{told}: threshold {threshold} becomes {moved}"


# -- links and memory ------------------------------------------------------------------------------


def wires(scene: Scene) -> Iterator[Text]:
    """Each transfer of its KV: how much, how fast, among whom."""
    record, timeline = scene.record, scene.timeline
    if record is None:
        return
    took = {e.dst: e for _, e in scene.events if isinstance(e, ev.TransferTook)}
    for wire in timeline.wires_of(record.id, record.relay, record.main):
        direction = timeline.direction(wire.src, wire.dst)
        yield Text(_wire(scene, wire, direction, took.get(wire.dst)))


def _wire(
    scene: Scene, wire: Wire, direction: Direction | None, took: ev.TransferTook | None
) -> str:
    way = "" if direction is None else f" over {direction.name}"
    text = (
        f"KV {wire.src} to {wire.dst}{way}: {size(wire.bytes)} in {many(len(wire.pieces), 'piece')}"
    )
    text += f", from +{duration(wire.began - scene.sent)}"
    ended = wire.whole or wire.ended
    text += f" to +{duration(ended - scene.sent)}"
    if wire.cancelled and wire.whole is None:
        text += ", cut"
    lasted = sum(end - start for start, end, _ in wire.pieces)
    if lasted > 0 and wire.bytes:
        text += f"; {format_rate(wire.bytes * SECOND // lasted, 3)}"
    if direction is not None:
        rate = rate_at(direction.caps, wire.began)
        text += " of no limit" if rate is None else f" of {format_rate(rate, 3)}" if rate else ""
        others = [o for o in direction.wires if o is not wire]
        beside = most_at_once(others, wire.began, ended)
        text += f", beside {many(beside, 'other')} at most" if beside else ", alone there"
    if took is not None and took.expected_ns is not None:
        text += f"; the router expected {duration(took.expected_ns)}, it took"
        text += f" {duration(took.took_ns)}"
    return clean(text)


def wires_json(scene: Scene) -> Iterator[Json]:
    """For programs: KV to each decoder, hidden and exposed wire time."""
    record = scene.record
    for wire in [] if record is None else wire_times(record, scene.timeline):
        yield {
            "to": wire.dst,
            "bytes": wire.bytes,
            "hidden_s": Seconds(wire.hidden),
            "exposed_s": Seconds(wire.exposed),
        }


def memory(scene: Scene) -> Iterator[Text]:
    """Pages, instance by instance."""
    told: dict[str, list[str]] = {}
    before: Ns | None = None
    for _, event in scene.events:
        match event:
            case ev.Routed():
                before = event.t
            case ev.Admitted():
                hit = f", {event.hit:,} tokens cached there" if event.hit else ""
                waited = "" if before is None else f" (asked {duration(event.t - before)} before)"
                told.setdefault(event.instance, []).append(
                    f"{event.pages} pages at +{duration(event.t - scene.sent)}{waited}{hit}"
                )
                before = event.t
            case ev.Preempted():
                told.setdefault(event.instance, []).append(
                    f"lost them at +{duration(event.t - scene.sent)}, with {event.tokens:,} tokens"
                )
            case ev.Kept():
                told.setdefault(event.instance, []).append(
                    f"cache keeps {event.pages} ({event.tokens:,} tokens)"
                )
            case ev.Freed():
                told.setdefault(event.instance, []).append(
                    f"free at +{duration(event.t - scene.sent)}"
                )
    for instance, facts in told.items():
        yield Text(clean(f"memory on {instance}: {'; '.join(facts)}"))


# -- by way of other pipelines ---------------------------------------------------------------------


def chances(scene: Scene) -> Iterator[Text | Table]:
    """What it would have cost otherwise."""
    table = scene.costs
    if not table:
        seen = scene.known.requests.get(scene.id)
        if seen is not None and seen.trouble:
            yield Text(f"By way of other pipelines: nothing can be said, {clean(seen.trouble)}")
        return
    best = {of: _nearly(getattr(c, of) for c in table) for of in ("ttft", "e2e")}
    yield Text("By way of other pipelines, had all others done the same (* best):")
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    shown.add_column("pipeline", no_wrap=True)
    for name in ("TTFT", "all", "on RLD", "KV over WAN"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("rests on")
    for cost in table:
        times = [
            duration(value) + ("*" if value is not None and value <= best[of] else " ")
            for of, value in (("ttft", cost.ttft), ("e2e", cost.e2e))
        ]
        shown.add_row(
            cost.pipeline,
            *times,
            duration(cost.relay) if cost.relay != 0 else "-",
            "-" if cost.wan_bytes is None else size(cost.wan_bytes),
            clean(cost.how),
            style="bold" if cost.ran else "",
        )
    yield shown


def _nearly(values: Iterable[Ns | None]) -> Ns:
    """What is as good as the best of them: nothing that people would tell apart."""
    return 1005 * min((v for v in values if v is not None), default=0) // 1000


def medians(run: Recorded) -> dict[str, Ns | None]:
    """Of the legs of TTFT over all requests that have one."""
    import numpy as np

    found: dict[str, Ns | None] = {}
    for leg in LEGS:
        values = run.index.columns.get(f"ttft_legs.{leg}")
        if values is None or values.dtype.kind not in "if":
            found[leg] = None
            continue
        there = values[~np.isnan(values.astype(float))]
        found[leg] = ns(float(np.median(there))) if len(there) else None
    return found
