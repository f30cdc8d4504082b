"""The second half of a report: every number, chart by chart and table by table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pddrt.inspection import regret_show
from pddrt.inspection.regret import Verdict
from pddrt.metrics import Recorder
from pddrt.recording import Recording
from pddrt.report import figures
from pddrt.report.figures import LETTERS, duration, percent
from pddrt.report.markup import Json, fidelity, legend, link, table, text, time, valued
from pddrt.report.slowness import TITLES, Judge, Row
from pddrt.report.timeline import Timeline
from pddrt.units import format_rate, format_size

TABLE_ROWS = 2_000
"""The table of requests has at most so many: the slowest to their first token."""
LOST_ROWS = 200
COUNTED = {"handoff_gap_s": "gap"}
"""What `figures.measured` calls it, where that is not the key without its unit."""
SPREAD = ("mean", "p50", "p90", "p99", "max")


@dataclass(slots=True)
class Run:
    """All that the page is about."""

    recording: Recording
    recorder: Recorder
    timeline: Timeline
    judge: Judge
    rows: list[Row] = field(default_factory=list)
    trace_left_out: Mapping[str, int] = field(default_factory=dict)
    chances: Verdict | None = None

    @property
    def summary(self) -> Json:
        return self.recording.summary


def sections(run: Run) -> Iterator[str]:
    yield _legs(run)
    yield _numbers(run)
    yield _cdfs(run)
    yield _links(run)
    yield _instances(run)
    yield _drift(run)
    yield _requests(run)
    yield _chances(run)
    yield _checks(run)


def _legs(run: Run) -> str:
    drawn = figures.legs(run.rows, run.judge.first_parts(), run.recorder.requests, run.timeline)
    if not drawn:
        return ""
    return (
        f'<h2 id="legs">Mean time to first token, leg by leg{fidelity(run.summary)}</h2>'
        "<p>Of the requests that got a token; the parts add up to TTFT. Wire time is that of KV to "
        "the first decoder: hidden behind prefill (pale), or exposed, which is then part of the "
        "transfer leg; the rest of that leg is waiting for notices and their delays.</p>"
        f"<figure>{drawn}</figure>"
    )


def _numbers(run: Run) -> str:
    s = run.summary
    groups = {"all": s, **(s.get("pipelines") or {})}
    if len(groups) == 2:
        del groups["all"]
    measures = {"ttft_s": "TTFT", "ttst_s": "TTST", "tpot_s": "TPOT", "itl_s": "ITL",
                "e2e_s": "E2E", "handoff_gap_s": "handoff gap"}  # fmt: skip
    rows = {"all": run.rows, **figures.grouped(run.rows)}
    body = [
        [title, text(name), *(time(of[key][column]) for column in SPREAD),
         f"{len(figures.measured(rows.get(name, []), COUNTED.get(key, key[:-2]))):,}"]
        for key, title in measures.items()
        for name, of in groups.items()
        if of.get(key) and of[key]["mean"] is not None
    ]  # fmt: skip
    return (
        f'<h2 id="numbers">Numbers{fidelity(run.summary)}</h2><p>Of {len(run.rows):,} requests: '
        "TTFT and ITL of those that got tokens, TTST and TPOT of those that got two, E2E of those "
        "that were answered, the handoff gap of those that RLD handed over. The last column says "
        "how many values these are.</p>" + table(["", "pipeline", *SPREAD, "of"], body, left=(0, 1))
    )


def _cdfs(run: Run) -> str:
    charts = "".join(figures.cdfs(run.rows))
    if not charts:
        return ""
    return (
        '<h2 id="cdfs">Distributions</h2><p>The share of values that are at most so large, by '
        f'pipeline.{fidelity(run.summary)}</p><div class="grid2">{charts}</div>'
    )


def _links(run: Run) -> str:
    delays = {d.link: run.recording.delay(d.link) for d in run.timeline.directions.values()}
    charts = "".join(figures.links(run.timeline, delays, fidelity(run.summary)))
    totals = run.summary.get("links") or {}
    body = [
        [
            text(name),
            text(way),
            format_size(d["bytes"], 3),
            format_size(d["kv_bytes"], 3),
            format_size(d["ids_bytes"], 3),
            percent(d["busy_fraction"]),
            str(d["peak_flows"]),
            time(d.get("late_p99_s")),
        ]
        for name, link in totals.items()
        for way, d in link["directions"].items()
    ]
    if not charts and not body:
        return ""
    head = ["link", "direction", "bytes", "KV", "ids", "busy", "flows at once", "late p99"]
    caps = [
        f"{text(d.name)}: {format_rate(cap) if (cap := d.caps[0][1]) is not None else 'no limit'}"
        for d in run.timeline.directions.values()
    ]
    return (
        f'<h2 id="links">Links{fidelity(run.summary)}</h2><p>KV by when it was on the wire, '
        f"against the rate of the link (dashed): {'; '.join(caps)}. The rate within one piece of "
        "KV is taken as even, so that a curve may pass the cap where transfers overlap. Flows at "
        "once: the most transfers and messages that shared the direction at one time. Late p99: of "
        "all frames, how much later than the link's own law they went, at p99; what is beyond that "
        "is the slowness of this machine.</p>"
        f'<div class="grid2">{charts}</div>' + table(head, body, left=(0, 1))
    )


def _instances(run: Run) -> str:
    charts = "".join(figures.instances(run.timeline))
    totals = run.summary.get("instances") or {}
    known = run.timeline.instances
    body = [
        [
            text(name),
            text(i["role"]),
            text(known[name].site) if name in known else "",
            f"{i['steps']:,}",
            percent(i["busy_fraction"]),
            percent(max((v for *_, v in known[name].kv.levels(run.timeline.end)), default=0)
                    / max(1, known[name].pages)) if name in known else "",
        ]
        for name, i in totals.items()
    ]  # fmt: skip
    if not charts and not body:
        return ""
    rest = len(known) - figures.INSTANCES
    note = f" {rest} more are only in the table." if rest > 0 else ""
    kinds = [
        ("prefill", "P", "steps with prefill"), ("extend", "X", "steps with an extend"),
        ("relay_decode", "R", "decode steps of RLD"), ("main_decode", "M", "decode steps of MD"),
    ]  # fmt: skip
    return (
        '<h2 id="instances">Instances</h2><p>The share of time in steps, stacked (decode below, '
        "extend above it, prefill on top), and of KV memory in use (cached pages that could be "
        "evicted are not counted). Prefill on MD: it computes the KV of answers that RLD had ended "
        f"without it, so that the next turn finds it there.{note}</p>"
        + legend(kinds, lines=[("memory", 1, "KV memory in use")])
        + f'<div class="grid2">{charts}</div>'
        + table(["instance", "role", "site", "steps", "busy", "KV at most"], body, left=(0, 1, 2))
    )


def drawn_drift(run: Run) -> str:
    return figures.drift(run.summary, run.timeline.end)


def _drift(run: Run) -> str:
    drawn = drawn_drift(run)
    if not drawn:
        return ""
    return (
        '<h2 id="drift">Cache drift</h2><p>Of each prompt, when it was known: how many of its '
        "tokens were cached, on average of a part of the run.</p>"
        + legend(lines=figures.DRIFT)
        + f"<figure>{drawn}</figure>"
    )


def _requests(run: Run) -> str:
    rows = sorted(run.rows, key=lambda r: -(r["ttft_s"] or 0))
    shown = rows[:TABLE_ROWS]
    head = ["request", "pipeline", "largest leg", "TTFT", "TTST", "TPOT", "gap", "E2E", "prompt",
            "hit P", "hit MD", "P+R+M", "ids", "KV over WAN", "end"]  # fmt: skip
    note = ""
    if len(rows) > len(shown):
        note = f"<p>The {len(shown):,} slowest to their first token of {len(rows):,}.</p>"
    body = table(head, map(_row_of(run.judge), shown), left=(0, 1, 2, 14), sort=True,
                 tall=True, first=True)  # fmt: skip
    return f'<h2 id="requests">Requests</h2>{note}{body}'


def _row_of(judge: Judge) -> Callable[[Row], list[str]]:
    def cells(r: Row) -> list[str]:
        slow, handoff, cached = judge.of(r), r["handoff"] or {}, r["cached_tokens"]
        made = [r["token_source"].count(letter) for letter in "PRM"]
        times = [r["ttft_s"], r["ttst_s"], r["tpot_s"], handoff.get("gap_s"), r["e2e_s"]]
        return [
            link(r["id"]),
            text(r["pipeline"] or "-"),
            "" if slow is None else f"{LETTERS[slow.part]} {TITLES[slow.part]}",
            *(valued(t, time(t)) for t in times),
            f"{r['prompt_tokens']}",
            f"{cached['prefill']}",
            f"{cached['main']}",
            "+".join(map(str, made)),
            f"{handoff.get('ids', '')}",
            valued(r["wan_bytes"]["kv"], format_size(r["wan_bytes"]["kv"], 3)),
            _end(r),
        ]

    return cells


def _end(r: Row) -> str:
    reason, tried = r["finish_reason"] or "not seen", r.get("attempts") or 1
    again = f", {tried} attempts" if tried > 1 else ""
    if reason in ("stop", "length"):
        return text(reason) + ("" if r["slo_met"] else ", SLO missed") + again
    return f'<span class="bad">{text(reason)}</span> {text(r.get("detail") or "")}{again}'


def _chances(run: Run) -> str:
    """What requests would have cost by way of other pipelines: the sum, and those who lost most."""
    found = run.chances
    if found is None or not found.judged:
        return ""
    sums, rows = list[list[str]](), list[list[str]]()
    for scope, words in regret_show.SCOPES.items():
        among = ", ".join(found.policy_pipelines) if scope == "policy" else _ran_in(found)
        for kind, of in regret_show.TITLES.items():
            if (kind, scope) in found.judged:
                lost = found.lost.get((kind, scope), ())
                sums.append(
                    [
                        f"{text(words)}: {text(among)}", text(of),
                        f"{len(lost):,} of {found.judged[kind, scope]:,}",
                        duration(found.total(kind, scope)),
                        text(regret_show.price(found, kind, scope)) if lost else "-",
                    ]
                )  # fmt: skip
    scope = "policy" if ("ttft", "policy") in found.judged else "all"
    for worst in found.worst("ttft", scope):
        for cost in found.tables[worst.request]:
            times = ("-" if t is None else duration(t) for t in (cost.ttft, cost.e2e, cost.relay))
            wan = "-" if cost.wan_bytes is None else format_size(cost.wan_bytes, 3)
            name = f"<b>{cost.pipeline}</b>" if cost.ran else cost.pipeline
            who = link(worst.request) if cost.ran else ""
            rows.append([who, name, *times, wan, text(cost.how)])
    head = ["request", "pipeline", "TTFT", "E2E", "on RLD", "KV over WAN", "rests on"]
    return (
        f'<h2 id="chances">By way of other pipelines{fidelity(run.summary)}</h2>'
        "<p>What each request would have cost otherwise, had all others done the same: the "
        f"router's regret, in hindsight.{_unjudged(found)}</p>"
        + table(
            ["among", "until", "sooner otherwise", "by, in sum", "and for"],
            sums,
            left=(1, 4),
            wrap=(0,),
        )
        + ("<h3>Those who lost most to their first token</h3>" if rows else "")
        + table(head, rows, left=(0, 1), wrap=(6,))
    )


def _ran_in(found: Verdict) -> str:
    return ", ".join(dict.fromkeys(c.pipeline for costs in found.tables.values() for c in costs))


def _unjudged(found: Verdict) -> str:
    silent = ", ".join(f"{n:,}: {text(why)}" for why, n in found.silent.items())
    return f" Of {sum(found.silent.values()):,} nothing can be said ({silent})." if silent else ""


def _checks(run: Run) -> str:
    found = run.summary.get("invariants") or {}
    checked, broken = found.get("checked"), found.get("violations") or []
    if checked is None:
        said = "<p>No verdict is recorded.</p>"
    else:
        kind = "bad" if broken else "good"
        said = f'<p><b class="{kind}">{len(broken)} violated</b> in {checked:,} events checked.</p>'
    if broken:
        lines = "\n".join(str(line) for line in found.get("led_to") or [])
        said += "".join(f"<p>{text(what)}</p>" for what in broken)
        said += f"<p>Events that led to the first:</p><pre>{text(lines)}</pre>"
    parity = run.summary.get("parity")
    if parity:
        said += (
            f"<p>Against a plain pass of the model: {parity['checked']:,} requests judged, "
            f"{parity['equal']:,} equal, {parity['near_ties']:,} near ties, "
            f"{parity['different']:,} different.</p>"
        )
    lost = [[link(r["id"]), text(r["pipeline"] or "-"), text(r["finish_reason"] or "not seen"),
             text(r.get("detail") or "")]
            for r in run.rows if r["finish_reason"] not in ("stop", "length")]  # fmt: skip
    if lost:
        said += "<h3>Requests without an answer to the end</h3>" + table(
            ["request", "pipeline", "end", "why"], lost[:LOST_ROWS], left=(0, 1, 2), wrap=(3,)
        )
        said += f"<p>{len(lost) - LOST_ROWS:,} more.</p>" if lost[LOST_ROWS:] else ""
    return f'<h2 id="checks">Checks</h2>{said}'


def provenance(run: Run) -> str:
    s, rec = run.summary, run.recording
    facts = s.get("provenance") or {}
    fidelity, machine, model = (facts.get(k) or {} for k in ("fidelity", "machine", "model"))
    body = [
        ["digest of events.jsonl", f"<code>{text(s.get('digest', 'unknown'))}</code>"],
        ["model", f"{text(model.get('name', '?'))}, {text(model.get('fingerprint', '?'))}"],
        ["machine", text(", ".join(str(v) for v in machine.values()) or "?")],
        ["versions", text(_pairs(facts.get("versions") or {}))],
        ["network times", text(_fidelity_words(fidelity))],
        ["wall time", time(s.get("wall_s"))],
        ["loop lag p99", time((s.get("loop_lag_s") or {}).get("p99"))],
    ]
    counted = rec.counts + rec.unknown
    kinds = [[text(kind), f"{n:,}", "skipped" if kind in rec.unknown else ""]
             for kind, n in counted.most_common()]  # fmt: skip
    left = ", ".join(f"{n:,} {what}" for what, n in run.trace_left_out.items() if n)
    trace = f"trace.json leaves out {text(left)}, to stay small enough to open. " if left else ""
    return (
        '<h2 id="provenance">Provenance</h2>'
        + table(["", ""], body, left=(0, 1))
        + f"<p>{trace}Open trace.json at ui.perfetto.dev for every step of every instance.</p>"
        + f"<details><summary>{sum(counted.values()):,} events, by kind</summary>"
        + table(["event", "count", ""], kinds, left=(0, 2))
        + "</details><details><summary>The scenario, as it was run</summary>"
        + f"<pre>{text(rec.scenario_text)}</pre></details>"
    )


def _pairs(values: Json) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _fidelity_words(fidelity: Json) -> str:
    meaning = {
        "exact": "exact: virtual time, every byte is when the link's law says",
        "ok": "ok: this machine kept the network's times",
        "degraded": "degraded: this machine was too busy to keep the network's times",
    }
    return meaning.get(str(fidelity.get("verdict")), "no verdict is recorded")
