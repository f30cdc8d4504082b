"""The story of one request of a recorded run, and what is broken in one.

What the request was, where its time went (`anatomy`), then its events in order, each with its
number, the time since it was sent and since the line before (`telling` has the words). It reads the
run folder and nothing else, so that it works on any machine and without the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from pddrt.inspection import anatomy, listing
from pddrt.inspection.anatomy import Scene
from pddrt.inspection.recorded import Recorded
from pddrt.inspection.regret import cost_json
from pddrt.inspection.telling import chapters, numbered, tell, tell_chapter
from pddrt.recording import typed
from pddrt.report.slowness import ns
from pddrt.show import STYLE, bar, clean, duration, size
from pddrt.trace import Event, request_of, to_line
from pddrt.types import SECOND

Json = dict[str, Any]
Shown = Text | Table


def _time(value: float | None) -> str:
    return duration(None if value is None else ns(value))


# -- the story of one request ----------------------------------------------------------------------


def scene_of(run: Recorded, request: str) -> Scene:
    """Raises BadInput for an unknown id."""
    return Scene(run, run.row(request), run.events_of(request))


def story(scene: Scene, width: int, colour: bool) -> Iterator[Shown]:
    """One request from being sent to its end."""
    yield from _facts(scene.row, width, colour)
    if doubted := listing.doubt(scene.run).strip():
        yield Text(clean(doubted), "bold")
    if not scene.events:
        yield Text("no events of it were recorded")
        return
    parts: tuple[Iterator[Shown], ...] = (
        anatomy.waterfall(scene, width, anatomy.medians(scene.run)),
        anatomy.rounds(scene),
        _both(anatomy.wires(scene), anatomy.memory(scene)),
        anatomy.chances(scene),
        _told_all(_broken(scene)),
    )
    for part in parts:
        lines = list(part)
        yield from lines
        if lines:
            yield Text()
    if not scene.window.whole and scene.row.get("ttft_s") is not None:
        yield Text(
            f"who was beside it is known from events {scene.window.start:,} to "
            f"{scene.window.end - 1:,}", "dim",
        )  # fmt: skip
    yield _events(scene)


def _both(*parts: Iterator[Text]) -> Iterator[Shown]:
    for part in parts:
        yield from part


def _broken(scene: Scene) -> list[Broken]:
    """Violations that one of its events led to."""
    return [
        one
        for one in violations(scene.run)
        if any(request_of(getattr(e, "request", "")) == scene.id for _, e in one.events)
    ]


def _told_all(broken: Sequence[Broken]) -> Iterator[Shown]:
    for one in broken:
        yield from told(one)


def _events(scene: Scene) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("event", justify="right", no_wrap=True)
    shown.add_column("at", justify="right", no_wrap=True)
    shown.add_column("after", justify="right", no_wrap=True)
    shown.add_column("where", no_wrap=True)
    shown.add_column("what")
    before = scene.sent
    events = [numbered(number, event) for number, event in scene.events]
    for chapter in sorted(chapters(events), key=lambda told: told[0]["number"]):
        first = chapter[0]
        where, what = tell_chapter(chapter)
        style = STYLE.get(first.get("source", ""), "")
        shown.add_row(
            f"{first['number']}",
            f"{(first['t'] - scene.sent) / SECOND:.6f}",
            f"+{(first['t'] - before) / SECOND:.6f}",
            clean(where),
            Text(clean(what), style),
        )
        before = first["t"]
    return shown


def _facts(r: Json, width: int, colour: bool) -> Iterator[Shown]:
    names = [n for n in r["instances"].values() if n]
    yield Text(f"{r['id']}  {r['pipeline'] or 'not routed'}  {' > '.join(names)}", "bold")
    cached = r["cached_tokens"]
    lines = [
        f"prompt {r['prompt_tokens']:,} tokens (hits: P {cached['prefill']:,}, "
        f"R {cached['relay']:,}, M {cached['main']:,}), answer {r['output_tokens']:,}, "
        f"ended by {r['finish_reason']}" + (f": {r['detail']}" if r.get("detail") else ""),
        f"TTFT {_time(r['ttft_s'])}, second token {_time(r['ttst_s'])} later, "
        f"TPOT {_time(r['tpot_s'])}, largest gap {_time(r['itl_max_s'])}, all {_time(r['e2e_s'])}",
    ]
    if h := r["handoff"]:
        lines += _handoff(h)
    lines.append(
        f"KV over the WAN {size(r['wan_bytes']['kv'])}, ids {size(r['wan_bytes']['ids'])}, "
        f"skipped {size(r['kv_bytes_skipped'])}"
    )
    if parity := r.get("parity"):
        verdict = {"near_tie": "a near tie"}.get(parity["verdict"], parity["verdict"])
        where = parity["first_divergence"]
        since = "" if where is None else f", first at answer token {where}"
        lines.append(
            f"against a plain pass of the model: {verdict}{since}; "
            f"margin {parity['margin']:.2g} of what counts as a near tie"
        )
    yield from (Text(clean(line)) for line in lines)
    yield bar(r["token_source"], width, colour)
    yield Text()


def _handoff(h: Json) -> Iterator[str]:
    mode = h["mode"] + (f" (by policy {h['policy']})" if h["policy"] != h["mode"] else "")
    why = f"; the relay stopped: {h['ended']}" if h["ended"] else "; the answer ended before"
    yield f"handoff {mode}: {h['ids']} ids in {h['rounds']} round(s){why}"
    if h["mode"] == "catch-up":
        expected = h["lacking_expected"]
        lacking = ", ".join(map(str, h["lacking"]))
        limit = "nobody knew how far it would get" if expected is None else f"expected {expected}"
        yield f"main lacked {lacking} ids ({limit})"
    others = h["others_itl_max_s"]
    yield (
        f"extend over {h['extend_tokens']}"
        + (f", {h['went_back']} given up" if h["went_back"] else "")
        + f"; gap {_time(h['gap_s'])} (largest near it {_time(h['gap_near_s'])})"
        + (f", largest of others beside it {_time(others)}" if others is not None else "")
        + f"; relay busy {_time(h['relay_busy_s'])}, {h['wasted_tokens']} tokens wasted"
    )


# -- what is broken --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant that was violated, and the events that led to it, as far as they are known."""

    what: str
    events: tuple[tuple[int | None, Event], ...] = ()


def violations(run: Recorded) -> list[Broken]:
    """As the run's monitor found them. Only of the first are the events kept."""
    found = run.summary.get("invariants") or {}
    whats = [str(what) for what in found.get("violations") or []]
    led_to = [
        (_number_of(run, raw), event)
        for line in found.get("led_to") or []
        if (raw := _parsed(line)) is not None and isinstance(event := typed(raw), Event)
    ]
    return [Broken(what, () if i else tuple(led_to)) for i, what in enumerate(whats)]


def _parsed(line: object) -> Json | None:
    try:
        value = json.loads(str(line))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _number_of(run: Recorded, raw: Json) -> int | None:
    """Which line of events.jsonl it is."""
    last = run.number_at(ns(raw["t_s"]))
    for number in range(last, max(0, last - 10_000), -1):
        event = run.event(number)
        if event == raw:
            return number
        if event is not None and event.get("t_s") != raw["t_s"]:
            break
    return None


def told(broken: Broken) -> Iterator[Shown]:
    """A violation and its events, in words."""
    yield Text(f"violated: {clean(broken.what)}", "bold red")
    if not broken.events:
        return
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 2))
    for name in ("event", "at"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("where", no_wrap=True)
    shown.add_column("what")
    for number, event in broken.events:
        where, what = tell(event)
        about = getattr(event, "request", "")
        shown.add_row(
            "-" if number is None else str(number),
            f"{event.t / SECOND:.6f}",
            clean(where),
            clean(f"{about}: {what}" if about else what),
        )
    yield shown
    last = broken.events[-1][0]
    if last is not None:
        yield Text(f"  --until {last} shows what both sides had then, --step --until "
                   f"{broken.events[0][0] or last} walks there")  # fmt: skip


# -- for programs ----------------------------------------------------------------------------------


def as_json(scene: Scene) -> Json:
    """A request's line, what it would have cost otherwise, what of its KV was on the wire, and its
    events with their numbers.
    """
    events = [{"number": number, **json.loads(to_line(event))} for number, event in scene.events]
    found: Json = {"request": scene.row, "pipelines": [], "kv": [], "violations": []}
    if events:
        found["pipelines"] = [cost_json(cost) for cost in scene.costs]
        found["kv"] = list(anatomy.wires_json(scene))
    found["violations"] = [broken_json(one) for one in _broken(scene)]
    return {**found, "events": events}


def broken_json(broken: Broken) -> Json:
    events = [{"number": n, **json.loads(to_line(event))} for n, event in broken.events]
    return {"violated": broken.what, "events": events}
