"""`report.html`: what a recorded run was, on one page that needs nothing but itself.

The page says first what is missing, then which part made the slowest requests slow, then everything
else. Charts are SVG (`figures`), tables plain HTML; only the Gantt chart needs JavaScript, and gets
its data from `gantt`. Nothing on the page may come from elsewhere, and nothing in a run may become
part of the page's code: texts are escaped, and the policy in the head names the digest of the one
script that may run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pddrt import figures, gantt, recording, report_facts
from pddrt.errors import CannotRun
from pddrt.export import Exporter
from pddrt.figures import LETTERS, duration, figure, percent
from pddrt.markup import fidelity, inert, legend, link, table, text, time
from pddrt.metrics import LEGS, Recorder
from pddrt.report_facts import Run
from pddrt.slowness import TITLES, Judge, Row, Slow
from pddrt.timeline import Timeline

SLOWEST = 10
WIRES = (
    ("c-kv_relay", "r: KV to RLD on the wire"),
    ("c-kv_main", "m: KV to MD on the wire"),
    ("hidden c-kv_main", "pale: hidden behind other work"),
)


@dataclass(frozen=True, slots=True)
class Made:
    """What was written, and what it lacks."""

    trace: Path
    html: Path
    missing: Sequence[str]
    left_out: Mapping[str, int]


def make(folder: Path) -> Made:
    """Reads a run folder and writes trace.json and report.html into it. Raises BadInput where it is
    no run, CannotRun where it cannot be written.
    """
    rec = recording.opened(folder)
    recorder, timeline = Recorder(rec.roles()), Timeline()
    made = folder / "trace.json", folder / "report.html"
    try:
        # Half a surrogate pair is no text in UTF-8, but JSON has an escape for it.
        with made[0].open("w", encoding="utf-8", errors="backslashreplace") as file:
            exporter = Exporter(file.write, recorder, timeline)
            known = {None, *recorder.role_of}
            for event in rec.events():
                if getattr(event, "instance", None) in known:
                    recorder(event)
                timeline(event)
                exporter(event)
            exporter.close()
        rec.complete(recorder)
        rows: list[Row] = list(rec.rows.values())
        judge = Judge(rows, recorder.requests, timeline)
        run = Run(rec, recorder, timeline, judge, rows, exporter.left_out)
        made[1].write_text(page(run), encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotRun(f"cannot make a report of {folder}: {error.strerror}") from None
    return Made(*made, rec.missing, exporter.left_out)


# -- the page --------------------------------------------------------------------------------------


def page(run: Run) -> str:
    assets = files("pddrt") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = f"{text(run.recording.name)} - pddrt report"
    body = "\n".join(section for section in _sections(run) if section)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body><main>\n{body}\n</main>"
        f'<div id="tip" role="status"></div>\n<script>{script}</script></body></html>\n'
    )


def _sections(run: Run) -> Iterator[str]:
    yield _head(run)
    yield _notices(run)
    yield _cards(run)
    yield _slow(run)
    yield _gantt(run)
    yield from report_facts.sections(run)


def _head(run: Run) -> str:
    s = run.summary
    clock = str(s.get("clock") or run.recording.scenario.get("clock") or "unknown")
    facts = [
        f"seed {text(s.get('seed', run.recording.scenario.get('seed', '?')))}",
        f"{text(clock)} clock",
        f"{len(run.rows):,} requests in {duration(run.timeline.end)}",
        _pipeline_words(run),
    ]
    links = {
        "slow": "what was slow", "timeline": "timeline", "legs": "TTFT", "numbers": "numbers",
        "cdfs": "distributions", "links": "links", "instances": "instances",
        "requests": "requests", "checks": "checks", "provenance": "provenance",
    }  # fmt: skip
    nav = "".join(f'<a href="#{key}">{words}</a>' for key, words in links.items())
    return (
        f"<header><h1>{text(run.recording.name)}{fidelity(run.summary)}</h1>"
        f'<p class="dim">{" &middot; ".join(f for f in facts if f)}</p>'
        f'<div class="nav">{nav}</div></header>'
    )


def _pipeline_words(run: Run) -> str:
    scenario = run.recording.scenario
    policy, mode = (scenario.get(key) for key in ("pipeline", "handoff"))
    told = [f"policy {text(policy.get('policy'))}"] if isinstance(policy, dict) else []
    told += [f"handoff {text(mode.get('mode'))}"] if isinstance(mode, dict) else []
    return ", ".join(told)


def _notices(run: Run) -> str:
    found = ""
    if run.recording.missing:
        items = "".join(f"<li>{text(what)}</li>" for what in run.recording.missing)
        found += f'<div class="notice"><b>This run is not complete.</b><ul>{items}</ul></div>'
    broken = (run.summary.get("invariants") or {}).get("violations") or []
    if broken:
        items = "".join(f"<li>{text(what)}</li>" for what in broken[:5])
        found += (
            f'<div class="notice broken"><b>{len(broken)} invariant(s) were violated.</b>'
            f'<ul>{items}</ul><a href="#checks">What led to it</a></div>'
        )
    if run.summary.get("interrupted"):
        found += '<div class="notice"><b>The run was interrupted;</b> this is what there was.</div>'
    return found


def _cards(run: Run) -> str:
    s = run.summary
    requests, handoffs = s.get("requests") or {}, s.get("handoffs") or {}
    ended = f"{requests.get('finished', 0):,} / {requests.get('total', 0):,}"
    cards = [
        (ended, "finished / all requests"),
        (time((s.get("ttft_s") or {}).get("p50")), "TTFT p50"),
        (time((s.get("ttft_s") or {}).get("p90")), "TTFT p90"),
        (time((s.get("itl_s") or {}).get("p50")), "ITL p50"),
        (time((s.get("handoff_gap_s") or {}).get("p50")), "handoff gap p50"),
        (f"{handoffs.get('count', 0):,}", f"handoffs, {handoffs.get('ids', 0):,} ids"),
    ]
    if s.get("goodput_rps") is not None:
        share = s.get("slo_attainment")
        inside = "" if share is None else f", {percent(share)} inside"
        cards.append((f"{s['goodput_rps']:.3g}/s", f"goodput{inside}"))
    shown = "".join(f'<div class="card"><b>{v}</b><span>{text(k)}</span></div>' for v, k in cards)
    return f'<div class="cards">{shown}</div>'


# -- what was slow ---------------------------------------------------------------------------------


def _slow(run: Run) -> str:
    first, whole = run.judge.first_token(SLOWEST), run.judge.whole(SLOWEST)
    if not first and not whole:
        return '<h2 id="slow">What made requests slow</h2><p>No request is known.</p>'
    told = [
        "".join(f'<div class="verdict">{_verdict(s, what)}</div>' for s, what in worst)
        for worst in (
            [(s, "to its first token") for s in first[:1]],
            [(s, "in all") for s in whole[:1]],
        )
    ]
    records = run.recorder.requests
    charts = [
        figure(title, figures.waterfall(slow, records, run.timeline, title), fidelity(run.summary))
        for title, slow in (
            ("Longest to the first token", first),
            ("Longest in all", whole),
        )
        if slow
    ]
    used = {part for slow in (*first, *whole) for part, length in slow.parts.items() if length}
    return (
        '<h2 id="slow">What made the slowest requests slow</h2>'
        + "".join(told)
        + legend([(part, LETTERS[part], TITLES[part]) for part in TITLES if part in used], WIRES)
        + f'<div class="grid2">{"".join(charts)}</div>'
        + _slow_table(first)
    )


def _verdict(s: Slow, what: str) -> str:
    usual = f"the median request spends {duration(s.usual)} there"
    why = f" What is known of it: {text(s.why)}." if s.why else ""
    if s.above != s.part:
        why += (
            f" It differs most from the median request in <b>{TITLES[s.above]} "
            f"({LETTERS[s.above]})</b>: {duration(s.parts[s.above])} against "
            f"{duration(s.above_usual)}."
        )
    return (
        f"The slowest {what} was <b>{link(s.row['id'])}</b>: {duration(s.total)}. Its largest part "
        f"was <b>{TITLES[s.part]} ({LETTERS[s.part]})</b>: {duration(s.length)}, "
        f"{percent(s.share)} of the whole; {usual}.{why}"
    )


def _slow_table(slow: Sequence[Slow]) -> str:
    if not slow:
        return ""
    head = ["request", "pipeline", "TTFT", "what is known of its largest leg"]
    body = [
        [
            link(s.row["id"]),
            text(s.row["pipeline"]),
            duration(s.total),
            f"<b>{TITLES[s.part]} {percent(s.share)}</b>: {text(s.why)}",
            *(_blame(s, leg) for leg in LEGS),
        ]
        for s in slow
    ]
    return "<h3>Longest to the first token, leg by leg</h3>" + table(
        [*head, *(f"{LETTERS[leg]} {TITLES[leg]}" for leg in LEGS)], body, left=(0, 1), wrap=(3,)
    )


def _blame(s: Slow, leg: str) -> str:
    shown = duration(s.parts[leg])
    return (
        f'<b><span class="k c-{leg}">{LETTERS[leg]}</span>{shown}</b>' if leg == s.part else shown
    )


# -- timelines -------------------------------------------------------------------------------------


def _gantt(run: Run) -> str:
    records = list(run.recorder.requests.values())
    if not records:
        return (
            '<h2 id="timeline">Timeline</h2><p>When requests ran is only in events.jsonl, '
            "which is not there.</p>"
        )
    slow = {row["id"]: s for row in run.rows if (s := run.judge.of(row)) is not None}
    value = gantt.data(run.recording.rows, records, run.timeline, slow)
    rest = len(records) - len(value["rows"])
    note = f"<p>The chart has the first {len(value['rows']):,} requests.</p>" if rest else ""
    kinds = [
        ("prefill_queue", "Q", "queue"), ("prefill", "P", "prefill"),
        ("transfer", "T", "waits for its KV and decoder"), ("relay_decode", "R", "relay decode"),
        ("handoff_gap", "H", "handoff gap (ticks: ids were sent)"),
        ("main_decode", "M", "main decode"),
    ]  # fmt: skip
    faults = " Reddish stretches: a fault was in effect." if value["faults"] else ""
    options = [("sent", "when sent"), ("ttft", "longest TTFT"), ("e2e", "longest"),
               ("gap", "largest gap")]  # fmt: skip
    sorts = "".join(f'<option value="{key}">{words}</option>' for key, words in options)
    return (
        '<h2 id="timeline">Timeline of requests</h2>'
        '<p class="nojs">This chart needs JavaScript; all numbers are in the tables below.</p>'
        + note
        + '<div id="gantt">'
        + legend(kinds, WIRES[:2])
        + '<p class="dim">Drag to move, Ctrl + wheel or + and - to zoom, click a '
        f"request for its story, double-click to fill the view with it.{faults}</p>"
        '<div class="bar"><button id="g-slow">slowest to first token</button>'
        '<button id="g-all">all</button><button id="g-in" aria-label="zoom in">+</button>'
        '<button id="g-out" aria-label="zoom out">&minus;</button>'
        '<label>time <select id="align"><option value="run">of the run</option>'
        '<option value="own">since each was sent</option></select></label>'
        f'<label>sort <select id="sort">{sorts}</select></label>'
        '<label>find <input id="find" placeholder="id, instance, slow leg"></label>'
        '<span id="count" class="dim"></span></div>'
        '<div id="view" tabindex="0" role="application" aria-label="Timeline of requests; the '
        'table of requests has the same numbers"><canvas></canvas><div></div></div>'
        '<div id="detail" aria-live="polite"></div></div>'
        f'<script type="application/json" id="data">{inert(value)}</script>'
    )
