"""`compare.html`: a comparison on one page that needs nothing but itself, and no JavaScript.

First what it came to, column by column, in sentences; then how sure that is, what made the
difference, and who won and lost by it; then every number. A column has one colour and one dash
everywhere; whatever a colour tells, a word tells as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pddrt.comparing.columns import Compared
from pddrt.comparing.contrast import MEASURES, Round, at, plain, seeded
from pddrt.comparing.figures import (
    TITLED,
    briefs,
    mean_requests,
    paired_bars,
    part_changes,
    ratio_chart,
    signed,
    times,
)
from pddrt.comparing.intervals import WHATS
from pddrt.comparing.pairing import PAIRED, Outcome, largest, paired
from pddrt.comparing.show import interruption
from pddrt.hosting import writing
from pddrt.metrics import LEGS
from pddrt.report import svg
from pddrt.report.figures import LETTERS, distributions, duration, figure, line_of
from pddrt.report.markup import legend, page, table, text
from pddrt.report.slowness import PARTS, TITLES
from pddrt.trace import Seconds

Json = Mapping[str, Any]

FILE = "compare.html"
MAX_LINES = 10
"""So many columns are drawn in one chart of distributions."""
MAX_ROWS = 100
"""So many requests of a column are in its table: those that changed most."""
DISTRIBUTIONS = {
    "ttft_s": "TTFT: time to first token", "itl_s": "ITL: each gap between tokens",
    "e2e_s": "E2E: sent to finished", "handoff_gap_s": "Handoff gap: last token of R to first of M",
}  # fmt: skip
MEASURED = {"ttft": "to the first token", "e2e": "in all"}


def write(compared: Compared) -> Path:
    """Writes the page into the comparison's folder. Raises CannotRun where it cannot be written."""
    path = compared.folder / FILE
    with writing(compared.folder):
        title = f"{text(compared.table['name'])} - pddrt compare"
        path.write_text(page(title, sections(compared)), encoding="utf-8", errors="replace")
    return path


def sections(compared: Compared) -> Iterator[str]:
    columns = compared.table["columns"]
    yield _head(compared.table)
    yield _notices(compared.table)
    yield from _sentences(columns)
    yield _ratios(columns)
    yield _cdfs(columns, compared.rounds)
    yield _legs(columns, compared.rounds)
    yield from _differences(columns)
    yield from _timelines(columns, compared.rounds)
    yield _numbers(columns)
    yield from _requests(columns, compared.rounds)
    yield _settings(columns)


# -- what it came to -------------------------------------------------------------------------------


def _head(compared: Json) -> str:
    columns = compared["columns"]
    clocks = ", ".join(dict.fromkeys(f"{c['clock']} clock" for c in columns))
    seeds = dict.fromkeys(seed for c in columns for seed in c["seeds"])
    shown = ", ".join(map(str, list(seeds)[:6])) + (" ..." if len(seeds) > 6 else "")
    links = {"ratios": "how sure", "cdfs": "distributions", "parts": "what made the difference",
             "timelines": "winners and losers", "numbers": "numbers",
             "settings": "settings"}  # fmt: skip
    nav = "".join(f'<a href="#{key}">{words}</a>' for key, words in links.items())
    keys = "".join(
        f'<span><svg viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f"{svg.swatch(1, 10, *line_of(i))}</svg>{text(name)}</span>"
        for i, name in enumerate(_keys(columns))
    )
    return (
        f"<header><h1>{text(compared['name'])}: {len(columns)} settings compared</h1>"
        f'<p class="dim">{clocks} &middot; seeds {shown or "none"} &middot; the same requests in '
        f'all</p><div class="nav">{nav}</div></header><div class="legend">{keys}</div>'
    )


def _keys(columns: Sequence[Json]) -> Iterator[str]:
    """What each column is called, and what it is called in charts."""
    for i, (column, brief) in enumerate(zip(columns, briefs(columns), strict=True)):
        also = f" = {brief}" if brief != column["name"] else ""
        yield f"{column['name']}{also}{'' if i else ' (baseline)'}"


def _notices(compared: Json) -> str:
    found = ""
    if compared["interrupted"]:
        said = text(interruption(compared["columns"]).partition(": ")[2])
        found += f'<div class="notice broken"><b>It was interrupted:</b> {said}.</div>'
    wrong = [(c["name"], c["failures"] or [c["state"]]) for c in compared["columns"]
             if c["failures"] or c["state"] in ("not run", "interrupted")]  # fmt: skip
    if wrong:
        items = "".join(f"<li>{text(name)}: {text('; '.join(what))}</li>" for name, what in wrong)
        found += f'<div class="notice broken"><b>Not all ended well.</b><ul>{items}</ul></div>'
    for one in compared["assertions"]:
        kind, verdict = ("", "holds") if one["holds"] else (" broken", "does not hold")
        found += (
            f'<div class="notice{kind}"><code>{text(one["text"])}</code> <b>{verdict}</b>: '
            f"{text(one['values'])}</div>"
        )
    if compared["notes"]:
        items = "".join(f"<li>{text(note)}</li>" for note in compared["notes"])
        found += f'<div class="notice"><ul>{items}</ul></div>'
    return found


def _sentences(columns: Sequence[Json]) -> Iterator[str]:
    """What each column came to against the baseline."""
    base = columns[0]
    for column in columns[1:]:
        if not column["rounds"] or not base["rounds"]:
            continue
        told = [_told(column, key) for key in ("ttft_s", "e2e_s")]
        told += [_winners(column, measure) for measure in PAIRED] if column["pairs"] else []
        if column["not_paired"]:
            told.append(f"Not the same requests, so not paired: {text(column['not_paired'])}.")
        words = " ".join(t for t in told if t)
        name, other = text(column["name"]), text(base["name"])
        yield f'<div class="verdict"><b>{name}</b> against {other}: {words}</div>'


def _told(column: Json, key: str) -> str:
    what = "p90" if at(column, ("ratios", key, "p90")) is not None else "mean"
    ratio = at(column, ("ratios", key, what))
    if ratio is None:
        return ""
    name = f"{TITLED[key]} {what}"
    if ratio == 1:
        return f"{name} is the same."
    interval = at(column, ("intervals", "ratio", key, what))
    sure = ""
    if interval is not None:
        by = column["intervals"]
        low, high = interval["low"], interval["high"]
        sure = f" (95 %: {times(low)} to {times(high)}, over {by['of']} {by['by']})"
        if low <= 1 <= high:
            sure += ", which may be no difference"
    return f"{name} is <b>{times(ratio)}</b> as long{sure}."


def _winners(column: Json, measure: str) -> str:
    told = column["pairs"][measure]
    if not told["faster"] and not told["slower"]:
        return f"No request is 5 % faster or slower {MEASURED[measure]}."
    most = max(told["parts"], key=lambda part: told["parts"][part]["mostly"])
    return (
        f"{told['faster']:,} of {told['compared']:,} requests are faster {MEASURED[measure]} and "
        f"{told['slower']:,} slower, most of them by <b>{TITLES[most]} ({LETTERS[most]})</b>."
    )


# -- how sure --------------------------------------------------------------------------------------


def _ratios(columns: Sequence[Json]) -> str:
    charts = [
        figure(f"{column['name']} against {columns[0]['name']}", drawn)
        for column in columns[1:]
        if (drawn := ratio_chart(column, columns[0]["name"]))
    ]
    if not charts:
        return ""
    by = next((c["intervals"] for c in columns[1:] if c["intervals"]), None)
    if by is None:
        sure = "There is too little for intervals."
    elif by["by"] == "seeds":
        sure = (f"Bars are intervals of 95 %, from drawing the {by['of']} seeds again, the same "
                "for both columns.")  # fmt: skip
    else:
        sure = (f"Bars are intervals of 95 %, from drawing the {by['of']} sessions of these runs "
                "again, the same for both columns: they tell how much hangs on a few requests, not "
                "what other seeds would do.")  # fmt: skip
    return (
        f'<h2 id="ratios">Ratios to {text(columns[0]["name"])}, and how sure they are</h2>'
        f'<p>{sure}</p><div class="grid2">{"".join(charts)}</div>'
    )


# -- distributions ---------------------------------------------------------------------------------


def _cdfs(columns: Sequence[Json], rounds: Sequence[Sequence[Round]]) -> str:
    charts = ""
    for key, title in DISTRIBUTIONS.items():
        values = {
            brief: sorted(
                float(t) for r in of for o in r.outcomes.values() for t in MEASURES[key](o)
            )
            for brief, of in list(zip(briefs(columns), rounds, strict=True))[:MAX_LINES]
        }
        if drawn := distributions(title, values):
            charts += figure(title, drawn)
    if not charts:
        return ""
    rest = len(columns) - MAX_LINES
    note = f" {rest} more are only in the tables." if rest > 0 else ""
    return (
        '<h2 id="cdfs">Distributions</h2><p>The share of values that are at most so large, of all '
        f'seeds together.{note}</p><div class="grid2">{charts}</div>'
    )


# -- what made the difference ----------------------------------------------------------------------


def _legs(columns: Sequence[Json], rounds: Sequence[Sequence[Round]]) -> str:
    """The mean request of each column, part by part."""
    means = {
        brief: mean
        for brief, of in zip(briefs(columns), rounds, strict=True)
        if (mean := _mean_parts([o for r in of for o in r.outcomes.values()]))
    }
    if not means:
        return ""
    used = {part for mean in means.values() for part, length in mean.items() if length}
    return (
        '<h2 id="parts">What made the difference</h2><p>The mean finished request, part by part: '
        "the legs of TTFT, then the stretches after the first token.</p>"
        + legend([(part, LETTERS[part], TITLES[part]) for part in PARTS if part in used])
        + f"<figure>{mean_requests(means)}</figure>"
    )


def _mean_parts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    known = [o.parts for o in outcomes if o.parts and o.e2e is not None]
    return {part: sum(p[part] for p in known) / len(known) for part in PARTS} if known else {}


def _differences(columns: Sequence[Json]) -> Iterator[str]:
    """Mean change of each part, as bars to the left (faster) and right (slower) of nothing."""
    for column in columns[1:]:
        if column["pairs"] is None:
            continue
        charts = [
            figure(f"{column['name']} against {columns[0]['name']}, {MEASURED[measure]}: "
                   f"mean change {signed(told['change_s'])}", drawn)
            for measure in PAIRED
            if (told := column["pairs"][measure])["compared"]
            and (drawn := part_changes(told["parts"]))
        ]  # fmt: skip
        if charts:
            yield f'<div class="grid2">{"".join(charts)}</div>'


# -- who won and who lost --------------------------------------------------------------------------


def _timelines(columns: Sequence[Json], rounds: Sequence[Sequence[Round]]) -> Iterator[str]:
    found, used = "", set[str]()
    for column, of in list(zip(columns, rounds, strict=True))[1:]:
        if column["pairs"] is None:
            continue
        for measure in PAIRED:
            wins, losses = largest(paired(seeded(rounds[0]), seeded(of), measure))
            for pairs, words in ((wins, "won"), (losses, "lost")):
                pairs = [p for p in pairs if p.base.parts and p.here.parts]
                if pairs:
                    title = f"Who {words} most {MEASURED[measure]} with {column['name']}"
                    names = (columns[0]["name"], column["name"])
                    found += figure(title, paired_bars(pairs, names, measure, title))
                    used |= {p for one in pairs for o in (one.base, one.here)
                             for p, length in o.parts.items() if length}  # fmt: skip
    if found:
        yield (
            '<h2 id="timelines">The largest winners and losers</h2><p>Each request twice, from its '
            "sending: in the baseline, and below it here.</p>"
            + legend([(part, LETTERS[part], TITLES[part]) for part in PARTS if part in used])
            + f'<div class="grid2">{found}</div>'
        )


# -- every number ----------------------------------------------------------------------------------


def _numbers(columns: Sequence[Json]) -> str:
    body = [
        [f"{TITLED[key]} {what}", *(_cell(column, key, what, i > 0) for i, column in known)]
        for key in TITLED
        for what in WHATS
        if (known := list(enumerate(columns)))
        and any(at(column, (key, what)) is not None for column in columns)
    ]
    body += [
        [name, *(_plain_cell(column, path, form) for column in columns)]
        for name, path, form in OTHERS
        if any(at(column, path) is not None for column in columns)
    ]
    if not body:
        return ""
    return (
        '<h2 id="numbers">Numbers</h2><p>Means over the seeds of what each run says; beside each '
        "its ratio to the baseline, and in brackets the interval of 95 % of that ratio.</p>"
        + table(["", *(text(c["name"]) for c in columns)], body)
    )


def _cell(column: Json, key: str, what: str, ratio: bool) -> str:
    value = at(column, (key, what))
    if value is None:
        return "-"
    shown = duration(plain(value))
    x = at(column, ("ratios", key, what))
    if not ratio or x is None:
        return shown
    interval = at(column, ("intervals", "ratio", key, what))
    sure = f" [{interval['low']:.2f}, {interval['high']:.2f}]" if interval else ""
    return f"{shown} <b>{times(x)}</b>{sure}" if x != 1 else f"{shown} ="


def _plain_cell(column: Json, path: Sequence[str], form: Any) -> str:
    value = at(column, path)
    return "-" if value is None else text(form(value))


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _rate(value: float) -> str:
    return f"{value:.4g}/s"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.4g} MB"


OTHERS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("requests finished", ("requests", "finished"), _count),
    ("requests in all", ("requests", "total"), _count),
    ("goodput", ("goodput_rps",), _rate),
    ("SLO met", ("slo_attainment",), _percent),
    ("output tokens", ("output_tps",), _rate),
    ("KV over the WAN", ("wan_bytes", "kv"), _megabytes),
    ("all over the WAN", ("wan_bytes", "all"), _megabytes),
    ("handoffs", ("handoffs", "count"), _count),
    ("ids handed over", ("handoffs", "ids"), _count),
    ("instances used", ("instances", "used"), _count),
    ("cost per hour", ("cost", "per_hour"), _count),
    ("violations", ("violations",), _count),
)


def _requests(columns: Sequence[Json], rounds: Sequence[Sequence[Round]]) -> Iterator[str]:
    for column, of in list(zip(columns, rounds, strict=True))[1:]:
        if column["pairs"] is None:
            continue
        ordered = sorted(
            paired(seeded(rounds[0]), seeded(of), "ttft"), key=lambda p: (-abs(p.change), p.here.id)
        )
        body = [
            [
                text(p.here.id), str(p.seed), text(p.base.pipeline), text(p.here.pipeline),
                *(duration(t) for t in p.times), signed(Seconds(p.change)),
                TITLES.get(p.mostly or "", "-") if p.change else "-",
                *(signed(Seconds(p.changes[leg])) if p.changes else "-" for leg in LEGS),
            ]
            for p in ordered[:MAX_ROWS]
        ]  # fmt: skip
        if body:
            head = ["request", "seed", "pipeline there", "here", "TTFT there", "here", "change",
                    "mostly", *(f"{LETTERS[leg]} {TITLES[leg]}" for leg in LEGS)]  # fmt: skip
            name, count = text(column["name"]), min(len(ordered), MAX_ROWS)
            yield (
                f"<h3>{name}: the {count:,} requests whose TTFT changed most, of "
                f"{len(ordered):,}</h3>" + table(head, body, left=(0, 2, 3, 7), tall=True)
            )


def _settings(columns: Sequence[Json]) -> str:
    body = [
        [
            f"c{n}", text(column["name"]), f"<code>{text(column['label'])}</code>",
            text(", ".join(f"{path}={value}" for path, value in column["changes"].items())),
            text(", ".join(map(str, column["seeds"]))), text(column["state"]),
            text(", ".join(column["folders"])),
        ]
        for n, column in enumerate(columns, 1)
    ]  # fmt: skip
    return (
        '<h2 id="settings">Settings</h2><p>Each has a run folder of its own beside this page; all '
        "requests of all are in deltas.csv, all numbers in compare.json. A label is the name in "
        "<code>--assert</code>.</p>"
        + table(["", "name", "label", "changes", "seeds", "state", "folders"], body, left=range(7))
    )
