"""Events in words: who did what. Also of series, which are told as one.

What comes in series (pieces of KV on one path, tokens of one maker) makes one **chapter**, told
with its count and pace. Events are taken as their lines have them, with their numbers: what is
recorded is told, and a kind that is not known here is told by its fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pddrt.report.slowness import ns
from pddrt.show import duration, many, size
from pddrt.trace import Event, to_line

Json = dict[str, Any]


def _time(value: float | None) -> str:
    return duration(None if value is None else ns(value))


def numbered(number: int, event: Event) -> Json:
    """As its line has it, with its number, and the time in ns."""
    raw: Json = json.loads(to_line(event))
    return {**raw, "number": number, "t": event.t}


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


def chapters(events: Sequence[Json]) -> list[list[Json]]:
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
    "CacheSampled": lambda e: (
        "gateway",
        f"of the {e['prompt_tokens']:,} tokens are cached, at best: P {e['prefill']:,}, "
        f"RLD {e['relay']:,}, MD {e['main']:,}",
    ),
    "Spared": lambda e: (
        "gateway",
        f"expects RLD to end it after {e['expected']} tokens: MD is not sent "
        f"{many(e['lacking'], 'token')} of KV, {size(e['bytes'])} ({e['how']})",
    ),
    "Resumed": lambda e: (
        "gateway",
        f"lets its KV go to MD after all, {many(e['made'], 'token')} are made: {e['reason']}",
    ),
    "TransferTook": lambda e: (
        "gateway",
        f"learns that {size(e['bytes'])} of KV took {_time(e['took_s'])} from {e['src']} to "
        f"{e['dst']}"
        + ("" if e["expected_s"] is None else f", {_time(e['expected_s'])} were expected")
        + ("" if e["rate"] is None else f"; thinks that the path carries {size(e['rate'])}/s"),
    ),
    "Stalled": lambda e: (
        e["instance"] or "-",
        f"has let it wait for {e['waits_for']} since {e['since_s']:.6f} s, for no reason",
    ),
    "StepBegan": lambda e: (
        e["instance"],
        "begins a step: "
        + ", ".join(f"{who} [{a}, {b})" for who, a, b in e["spans"][:4])
        + (f" and {len(e['spans']) - 4} more" if e["spans"][4:] else ""),
    ),
    "Step": lambda e: (
        e["instance"],
        f"ends a step of {_time(e['t_s'] - e['start_s'])}: {many(e['sequences'], 'sequence')}, "
        f"{e['prefill_tokens']} prefill + {e['extend_tokens']} extend + {e['decode_tokens']} "
        f"decode tokens; {many(e['pages_used'], 'page')} in use",
    ),
    "StepFailed": lambda e: (e["instance"], f"fails in a step: {e['detail']}"),
    "PagesTaken": lambda e: (e["instance"], f"gives {_pages(e)} to {e['owner']}"),
    "PageTable": lambda e: (e["instance"], f"page table of {e['owner']}: {_pages(e)}"),
    "PagesKept": lambda e: (e["instance"], f"cache gets {_pages(e)} of {e['owner']}"),
    "PagesFreed": lambda e: (
        e["instance"],
        f"{e['owner']} gives back {_pages(e)}" + (", and is done" if e["over"] else ""),
    ),
    "PagesEvicted": lambda e: (e["instance"], f"cache lets {_pages(e)} go"),
    "InstanceCrashed": lambda e: (
        e["instance"],
        "crashes" + (", but keeps its memory" if e["kept"] else ""),
    ),
    "InstanceReturned": lambda e: (e["instance"], "answers again"),
    "InstanceLeft": lambda e: (e["instance"], "has left"),
    "InstanceStarted": lambda e: (
        e["instance"],
        f"starts: {e['role']} at {e['site']}, {e['pages']:,} pages",
    ),
    "LinkRate": lambda e: (
        e["link"],
        f"{'>'.join(e['between'])} carries "
        + ("any rate" if e["rate"] is None else f"{size(e['rate'])}/s"),
    ),
    "FaultInjected": lambda e: ("fault", f"{e['do']}: {e['what']}"),
    "FaultEnded": lambda e: ("fault", f"{e['do']} is over: {e['what']}"),
    "FaultMissed": lambda e: ("fault", f"{e['do']} had nothing to act on: {e['why']}"),
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


def tell_chapter(chapter: Sequence[Json]) -> tuple[str, str]:
    """Who, and what, in words."""
    first, last = chapter[0], chapter[-1]
    kind, span = first["event"], f"[{first['start']}, {last['end']})" if "start" in first else ""
    lasted = last["t_s"] - first["t_s"]
    if kind in ("KVSent", "KVReceived"):
        total = sum(e["bytes"] for e in chapter)
        verb = f"hands KV {span} to {first['dst']}" if kind == "KVSent" else f"gets KV {span}"
        told = f"{verb}: {size(total)}"
        if len(chapter) > 1:
            told += f" in {len(chapter)} pieces, {_time(lasted)}"
        return str(first.get("src") or first["instance"]), told
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
    rest = {k: v for k, v in first.items() if k not in ("event", "t_s", "t", "number", "request")}
    where = str(rest.pop("instance", "-"))
    return where, f"{kind}: " + ", ".join(f"{k} {json.dumps(v)}" for k, v in rest.items())


def _pages(e: Mapping[str, Any]) -> str:
    return many(sum(count for _, count in e["pages"]), "page")


def tell(event: Event) -> tuple[str, str]:
    """Who, and what, of one event by itself."""
    return tell_chapter([numbered(0, event)])
