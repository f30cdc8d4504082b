"""Looking into a recorded run: the table of its requests, or the story of one of them.

Reads the run folder and nothing else (`requests.jsonl`, `events.jsonl`), so that it works on any
machine and without the model. The story of a request is its events in order, each with the time
since it was sent and since the line before; what comes in series (pieces of KV, tokens of one
maker) is told as one line with its count and pace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pddrt.errors import BadInput
from pddrt.show import STYLE, bar, clean, duration, size
from pddrt.trace import request_of
from pddrt.types import SECOND

Json = dict[str, Any]


@dataclass(slots=True)
class Recorded:
    """A run folder's lines, by request."""

    folder: Path
    summary: Json
    requests: dict[str, Json] = field(default_factory=dict)
    events: dict[str, list[Json]] = field(default_factory=dict)


def read(folder: Path) -> Recorded:
    """Raises BadInput where the folder is no run, or names the line that is broken."""
    if not (folder / "requests.jsonl").is_file():
        raise BadInput(f"{folder}: not a run folder (no requests.jsonl)")
    summaries = list(_lines(folder / "summary.json")) if (folder / "summary.json").is_file() else []
    recorded = Recorded(folder, summaries[0] if summaries else {})
    for record in _lines(folder / "requests.jsonl"):
        recorded.requests[record["id"]] = record
    if (folder / "events.jsonl").is_file():
        for event in _lines(folder / "events.jsonl"):
            if "request" in event:
                recorded.events.setdefault(request_of(event["request"]), []).append(event)
    return recorded


def _lines(path: Path) -> Iterator[Json]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise BadInput(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise BadInput(f"{path}:{number}: found {type(value).__name__}, expected an object")
            yield value


# -- the table of requests -------------------------------------------------------------------------


def table(console: Console, run: Recorded) -> None:
    """All requests of a run, a line each."""
    s = run.summary
    console.print(
        f"{s.get('name', run.folder.name)}  seed {s.get('seed', '?')}  "
        f"clock {s.get('clock', '?')}  {len(run.requests)} requests",
        soft_wrap=True,
    )
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("request", no_wrap=True)
    shown.add_column("pipeline", no_wrap=True)
    for name in ("prompt", "hit P/M", "P+R+M", "TTFT", "TPOT", "gap", "ids"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("end", no_wrap=True)
    for r in run.requests.values():
        handoff, cached = r["handoff"] or {}, r["cached_tokens"]
        shown.add_row(
            r["id"],
            r["pipeline"] or "-",
            f"{r['prompt_tokens']:,}",
            f"{cached['prefill']:,}/{cached['main']:,}",
            "+".join(str(r["token_source"].count(letter)) for letter in "PRM"),
            _time(r["ttft_s"]),
            _time(r["tpot_s"]),
            _time(handoff.get("gap_s")),
            str(handoff.get("ids", "-")),
            r["finish_reason"] or "-",
        )
    console.print(shown)


def _time(value: float | None) -> str:
    return duration(None if value is None else round(value * SECOND))


# -- the story of one request ----------------------------------------------------------------------


def story(console: Console, run: Recorded, request: str) -> None:
    """One request from being sent to its end. Raises BadInput for an unknown id."""
    record = run.requests.get(request)
    if record is None:
        known = ", ".join(list(run.requests)[:8]) + (", ..." if len(run.requests) > 8 else "")
        raise BadInput(f"{run.folder}: no request {request!r}; there are {known or 'none'}")
    _facts(console, record)
    events = run.events.get(request, [])
    if not events:
        console.print("no events of it were recorded")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("at", justify="right", no_wrap=True)
    shown.add_column("after", justify="right", no_wrap=True)
    shown.add_column("where", no_wrap=True)
    shown.add_column("what")
    sent, before = events[0]["t_s"], events[0]["t_s"]
    for chapter in sorted(_chapters(events), key=lambda told: told[0]["t_s"]):
        first = chapter[0]
        where, what = _tell(chapter)
        style = STYLE.get(first.get("source", ""), "")
        shown.add_row(
            f"{first['t_s'] - sent:.6f}",
            f"+{first['t_s'] - before:.6f}",
            where,
            Text(clean(what), style),
        )
        before = first["t_s"]
    console.print(shown)


def _facts(console: Console, r: Json) -> None:
    names = [n for n in r["instances"].values() if n]
    console.print(
        Text(f"{r['id']}  {r['pipeline'] or 'not routed'}  {' > '.join(names)}", "bold"),
        soft_wrap=True,
    )
    cached = r["cached_tokens"]
    lines = [
        f"prompt {r['prompt_tokens']:,} tokens (hits: P {cached['prefill']:,}, "
        f"R {cached['relay']:,}, M {cached['main']:,}), answer {r['output_tokens']:,}, "
        f"ended by {r['finish_reason']}" + (f": {r['detail']}" if r.get("detail") else ""),
        f"TTFT {_time(r['ttft_s'])}, second token {_time(r['ttst_s'])} later, "
        f"TPOT {_time(r['tpot_s'])}, largest gap {_time(r['itl_max_s'])}, all {_time(r['e2e_s'])}",
    ]
    if r["ttft_legs"]:
        legs = ", ".join(f"{k.replace('_', ' ')} {_time(v)}" for k, v in r["ttft_legs"].items())
        lines.append(f"TTFT = {legs}")
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
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(bar(r["token_source"], console.width, console.color_system is not None))
    console.print()


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


SERIES: dict[str, tuple[str, ...]] = {
    "KVSent": ("src", "dst"),
    "KVReceived": ("instance",),
    "TokensMade": ("instance",),
    "TokensReceived": ("source",),
    "HandoffSent": ("follows", "last"),
    "HandoffTaken": ("decodes",),
}
"""Events that come in series, and what must be equal for two of them to be of one."""


def _joins(before: Json, event: Json) -> bool:
    """Whether an event goes on with the series that `before` is the latest of. Pieces of a handoff
    do not: each is a round.
    """
    if event["event"] == "HandoffTaken":
        return bool(event["decodes"] and not event["back"])
    return bool(before["end"] == event["start"] and event.get("follows", True))


def _chapters(events: Sequence[Json]) -> list[list[Json]]:
    """Events in order of their beginning, each series in one chapter.

    A series goes on while nothing of its own kind interrupts it: pieces of KV on two paths are told
    as two chapters, each where it begins.
    """
    chapters: list[list[Json]] = []
    latest: dict[str, list[Json]] = {}
    for event in events:
        kind = event["event"]
        if kind in SERIES:
            key = kind + event["request"] + "".join(str(event[name]) for name in SERIES[kind])
            if key in latest and _joins(latest[key][-1], event):
                latest[key].append(event)
                continue
            latest[key] = chapter = [event]
            chapters.append(chapter)
        else:
            chapters.append([event])
    return chapters


Teller = Callable[[Mapping[str, Any]], tuple[str, str]]

TELL: dict[str, Teller] = {
    "RequestSent": lambda e: ("client", f"sent, turn {e['turn']} of session {e['session']}"),
    "Accepted": lambda e: ("client", f"accepted: the prompt is {len(e['prompt_ids']):,} ids"),
    "Routed": lambda e: (
        "gateway",
        f"routed {e['pipeline']}: {e['reason']}"
        + ("" if e["wan_estimate_s"] is None else f" ({_time(e['wan_estimate_s'])} expected)"),
    ),
    "Retried": lambda e: (
        "gateway",
        f"goes on elsewhere after {e['after']} tokens, attempt {e['attempt']}: {e['why']}",
    ),
    "Rerouted": lambda e: (
        "gateway",
        f"goes on without {e['lost']} ({e['then']}"
        + (f", {e['main']}" if e["then"] == "another main" else "")
        + f"): {e['why']}",
    ),
    "TakenOver": lambda e: (
        e["main"],
        f"takes over, extends over {e['extend_tokens']} ids to {e['end']}",
    ),
    "Admitted": lambda e: (
        e["instance"],
        f"has {e['pages']} pages for it"
        + (f", and {e['hit']:,} tokens of it are cached" if e["hit"] else ""),
    ),
    "Preempted": lambda e: (
        e["instance"],
        f"takes its memory back for others, {e['tokens']:,} tokens of KV; it waits for its turn",
    ),
    "Kept": lambda e: (
        e["instance"],
        f"keeps the KV of {e['tokens']:,} tokens: {e['pages']} more pages in the cache",
    ),
    "Learnt": lambda e: (e["instance"], f"has computed the KV of the answer, to {e['tokens']:,}"),
    "Freed": lambda e: (
        e["instance"],
        f"is done with it, {e['pages']} pages are free" if e["pages"] else "is done with it",
    ),
    "PrefillStarted": lambda e: (e["instance"], "starts the prompt"),
    "PrefillEnded": lambda e: (e["instance"], "has sampled the first token"),
    "KVWhole": lambda e: (e["instance"], f"holds the KV of all {e['prompt_tokens']:,} tokens"),
    "TransferCancelled": lambda e: (e["src"], f"stops sending KV to {e['dst']}"),
    "MainReady": lambda e: (e["relay"], f"learns that {e['main']} is ready"),
    "HandoffBegan": lambda e: (
        e["relay"],
        f"asks policy {e['policy']}, {e['main']} lacks {e['lacking']} ids: {e['decision']}"
        + ("" if e["expected"] is None else f" (catch-up would get to {e['expected']})"),
    ),
    "HandoffCaughtUp": lambda e: (
        e["relay"],
        f"learns that main has caught up to {e['end']}; it lacks {e['made'] - e['end']} by now",
    ),
    "HandoffEnded": lambda e: (e["relay"], f"is done with it: {e['reason']}"),
    "Released": lambda e: ("gateway", "lets the first token go to the client"),
    "Finished": lambda e: (
        "client",
        f"end: {e['reason']}" + (f", {e['detail']}" if e["detail"] else ""),
    ),
}


def _tell(chapter: Sequence[Json]) -> tuple[str, str]:
    """Who, and what, in words."""
    first, last = chapter[0], chapter[-1]
    kind, span = first["event"], f"[{first['start']}, {last['end']})" if "start" in first else ""
    lasted = last["t_s"] - first["t_s"]
    if kind in ("KVSent", "KVReceived"):
        total = sum(e["bytes"] for e in chapter)
        verb = f"hands KV {span} to {first['dst']}" if kind == "KVSent" else f"gets KV {span}"
        pieces = f"{size(total)} in {len(chapter)} piece{'s' * (len(chapter) > 1)}"
        return str(first.get("src") or first["instance"]), f"{verb}: {pieces}, {_time(lasted)}"
    if kind == "HandoffSent":
        ids = f"{last['end'] - first['start']} ids {span} to {first['main']}"
        if first["follows"]:
            return str(first["src"]), f"lets main follow: {ids} in {len(chapter)} frame(s)"
        done = f" and is done with it: {first['reason']}" if first["last"] else ""
        return str(first["src"]), f"sends {ids}{done}"
    if kind == "HandoffTaken":
        extends = f"extends over {sum(e['extend_tokens'] for e in chapter)} ids"
        times = f" in {len(chapter)} steps, {_time(lasted)}" if len(chapter) > 1 else ""
        back = f"gives up {first['back']} of its own, " if first["back"] else ""
        goes = "and goes on" if first["decodes"] else "of a piece"
        return str(first["main"]), f"{back}{extends} {goes}{times}"
    if kind in ("TokensMade", "TokensReceived"):
        count = last["end"] - first["start"]
        pace = f", {_time(lasted / (count - 1))} apart" if count > 1 else ""
        if kind == "TokensMade":
            return str(first["instance"]), f"makes {count} token{'s' * (count > 1)} {span}{pace}"
        return "client", f"gets {count} of {first['source']} {span}{pace}"
    tell = TELL.get(kind)
    if tell is not None:
        where, what = tell(first)
        return str(where), str(what)
    rest = {k: v for k, v in first.items() if k not in ("event", "t_s", "request")}
    return str(rest.pop("instance", "-")), f"{kind} {json.dumps(rest)}"
