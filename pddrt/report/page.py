"""`report.html`: what a recorded run was, on one page that needs nothing but itself.

The page says first what is missing, then which part made the slowest requests slow, then everything
else. Charts are SVG (`figures`), tables plain HTML; only the Gantt chart needs JavaScript, and gets
its data from `gantt`. Nothing on the page may come from elsewhere, and nothing in a run may become
part of the page's code: texts are escaped, and the policy in the head names the digest of the one
script that may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pddrt import recording
from pddrt.errors import CannotRun
from pddrt.inspection.hindsight import Hindsight
from pddrt.inspection.regret import setting_in, verdict
from pddrt.metrics import Recorder
from pddrt.report import facts as report_facts
from pddrt.report import figures, gantt, markup
from pddrt.report import trouble as report_trouble
from pddrt.report.export import Exporter
from pddrt.report.facts import Run
from pddrt.report.figures import LETTERS, duration, figure, percent
from pddrt.report.markup import fidelity, inert, legend, link, table, text, time
from pddrt.report.slowness import ALL_PARTS, FIRST_PARTS, TITLES, Judge, Row, Slow
from pddrt.report.timeline import Timeline
from pddrt.report.words import glossary
from pddrt.units import many

SLOWEST = 10
LEAST = 0.005
"""A smaller share of a request's time is next to nothing."""
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
            known, chances = {None, *recorder.role_of}, Hindsight(setting_in(rec))
            for event in rec.events():
                if getattr(event, "instance", None) in known:
                    recorder(event)
                timeline(event)
                chances(event)
                exporter(event)
            exporter.close()
        rec.complete(recorder)
        timeline.home = rec.home
        rows: list[Row] = list(rec.rows.values())
        judge = Judge(rows, recorder.requests, timeline)
        run = Run(rec, recorder, timeline, judge, rows, exporter.left_out, verdict(chances))
        made[1].write_text(page(run), encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotRun(f"cannot make a report of {folder}: {error.strerror}") from None
    return Made(*made, rec.missing, exporter.left_out)


# -- the page --------------------------------------------------------------------------------------


def page(run: Run) -> str:
    script = (files("pddrt") / "assets" / "report.js").read_text(encoding="utf-8")
    title = f"{text(run.recording.name)} - pddrt report"
    return markup.page(title, _sections(run), script)


def _sections(run: Run) -> Iterator[str]:
    yield _head(run)
    yield _notices(run)
    yield report_trouble.box(run)
    yield _cards(run)
    yield glossary({part for of in run.judge.parts.values() for part in of if of[part]})
    yield _slow(run)
    yield _gantt(run)
    yield from report_facts.sections(run)
    yield report_trouble.faults(run)
    yield report_facts.provenance(run)


def _head(run: Run) -> str:
    s = run.summary
    clock = str(s.get("clock") or run.recording.scenario.get("clock") or "unknown")
    facts = [
        f"seed {text(s.get('seed', run.recording.scenario.get('seed', '?')))}",
        f"{text(clock)} clock",
        f"{many(len(run.rows), 'request')} in {duration(run.timeline.end)}",
        _pipeline_words(run),
    ]
    links = {
        "words": "letters and words", "slow": "what was slow", "timeline": "timeline",
        "legs": "TTFT", "numbers": "numbers", "cdfs": "distributions", "links": "links",
        "instances": "instances",
        "drift": "cache drift", "requests": "requests", "chances": "other pipelines",
        "checks": "checks", "faults": "faults", "provenance": "provenance",
    }  # fmt: skip
    if not report_facts.drawn_drift(run):
        del links["drift"]
    if not run.timeline.faults:
        del links["faults"]
    if run.chances is None or not run.chances.judged:
        del links["chances"]
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
            f'<div class="notice broken"><b>{many(len(broken), "invariant")} violated.</b>'
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
        cards.append((f"{s['goodput_rps']:.3g}/s", _goodput(run)))
    shown = "".join(f'<div class="card"><b>{v}</b><span>{text(k)}</span></div>' for v, k in cards)
    return f'<div class="cards">{shown}</div>'


def _goodput(run: Run) -> str:
    """What goodput counts, and over which time."""
    asked = {key.upper(): slo for key in ("ttft", "tpot") if (slo := run.recording.slo(key))}
    share = run.summary.get("slo_attainment")
    if asked:
        limits = ", ".join(f"{key} at most {duration(slo)}" for key, slo in asked.items())
        told = "" if share is None else f", {percent(share)} of all requests"
        counts = f"goodput: finished with {limits}{told}"
    else:
        counts = "goodput: finished requests (no SLO is asked for)"
    records = run.recorder.requests.values()
    ended = [r.finished for r in records if r.finished is not None]
    if not ended:
        return counts
    lasted = max(ended) - min(r.sent for r in records)
    return f"{counts}; over {duration(lasted)}, first arrival to last finish"


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
        + "<h3>Longest to the first token, leg by leg</h3>"
        + _slow_table(first, FIRST_PARTS, "TTFT")
        + "<h3>Longest in all, part by part</h3>"
        + _common(run, whole)
        + _slow_table(whole, ALL_PARTS, "E2E")
    )


def _verdict(s: Slow, what: str) -> str:
    usual = f"the median request spends {duration(s.usual)} there"
    why = f" Because: {text(s.why.because)}." if s.why.because else ""
    if s.why.also:
        why += f' <span class="dim">Also at that time, elsewhere: {text(s.why.also)}.</span>'
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


def _common(run: Run, whole: Sequence[Slow]) -> str:
    """What several of the slowest have in common: a link they waited for, an attempt they lost."""
    waited: dict[str, int] = {}
    for s in whole:
        for name in run.judge.waited(s.row):
            waited[name] = waited.get(name, 0) + 1
    told = [
        f"<b>{count} of these {len(whole)} waited for {text(name)}</b> while it was down (O)"
        for name, count in waited.items()
    ]
    lost = sum(bool(s.parts["lost"]) for s in whole)
    if lost:
        told.append(f"{lost} lost an attempt (L)")
    return f"<p>{'; '.join(told)}.</p>" if told else ""


def _slow_table(slow: Sequence[Slow], names: Sequence[str], total: str) -> str:
    """Part by part; of those that are next to nothing in all of them there is no column."""
    if not slow:
        return ""
    names = [part for part in names if any(s.parts[part] > LEAST * s.total for s in slow)]
    head = ["request", "pipeline", total, "why its largest part was so long"]
    body = [
        [
            link(s.row["id"]),
            text(s.row["pipeline"]),
            duration(s.total),
            f"<b>{TITLES[s.part]} {percent(s.share)}</b>: {text(s.why.because)}",
            *(_blame(s, part) for part in names),
        ]
        for s in slow
    ]
    return table(
        [*head, *(f"{LETTERS[part]} {TITLES[part]}" for part in names)],
        body, left=(0, 1), wrap=(3,), first=True,
    )  # fmt: skip


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
    used = {part for of in run.judge.parts.values() for part in of if of[part]}
    kinds = [(part, LETTERS[part], TITLES[part]) for part in ALL_PARTS if part in used]
    faults = " Above the rows: what was done to the deployment." if value["faults"] else ""
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
        "request for its story, double-click to fill the view with it. Ticks in H: ids were sent. "
        f"Arrows: its bar lies outside of the view.{faults}</p>"
        '<div class="bar"><button id="g-slow">slowest to first token</button>'
        '<button id="g-all">all</button><button id="g-in" aria-label="zoom in">+</button>'
        '<button id="g-out" aria-label="zoom out">&minus;</button>'
        '<label>time <select id="align"><option value="run">of the run</option>'
        '<option value="own">since each was sent</option></select></label>'
        f'<label>sort <select id="sort">{sorts}</select></label>'
        '<label>find <input id="find" placeholder="id, instance, slow leg"></label>'
        '<label><input type="checkbox" id="only"> only those in view</label>'
        '<span id="count" class="dim"></span></div>'
        '<div id="view" tabindex="0" role="application" aria-label="Timeline of requests; the '
        'table of requests has the same numbers"><canvas></canvas><div></div></div>'
        '<div id="detail" aria-live="polite"></div></div>'
        f'<script type="application/json" id="data">{inert(value)}</script>'
    )
