"""What went wrong in a run, and what became of it: the box on top of a report, and its faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pddrt.errors import BadInput
from pddrt.report.facts import Run
from pddrt.report.figures import duration
from pddrt.report.markup import link, table, text
from pddrt.report.reasons import when
from pddrt.report.slowness import Row
from pddrt.report.suffering import HOW, Hit, Suffering
from pddrt.types import Ns
from pddrt.units import many, parse_duration

BY_USER = "cancelled by the client"
"""What the detail of a request says that its user ended."""
NAMED = 6
"""So many requests of a kind are named; of more there is the number."""
WORDS = {
    "cancelled": "cancelled by the user",
    "tried again": "tried again elsewhere",
    "went on without": "went on without what was lost",
    "waited": "waited until it was over",
    "slowed": "computed there meanwhile",
    "hit": "went on as if nothing had been",
}


def box(run: Run) -> str:
    """Nothing where nothing went wrong."""
    told = list(_told(run))
    if not told:
        return ""
    items = "".join(f"<li>{one}</li>" for one in told)
    return (
        '<div class="notice" id="trouble"><b>What went wrong, and what became of it</b>'
        f"<ul>{items}</ul></div>"
    )


def _told(run: Run) -> Iterator[str]:
    kinds = Counter(f.do for f in run.timeline.faults.values() if not f.missed)
    if kinds:
        shown = ", ".join(f"{n} {text(kind)}" for kind, n in kinds.most_common())
        yield f'{many(kinds.total(), "fault")} took effect (<a href="#faults">{shown}</a>).'
    suffering = Suffering(run.recorder.requests, run.judge.laid, run.timeline)
    records = [(row, run.recorder.requests.get(row["id"])) for row in run.rows]
    groups: dict[str, list[Row]] = {
        "answered by another attempt elsewhere": [
            row for row, r in records if r and suffering.again(r) and _answered(row)
        ],
        "answered without an instance that was lost on the way": [
            row
            for row, r in records
            if r and suffering.moved(r) and not suffering.again(r) and _answered(row)
        ],
        "cancelled by the user": [
            row for row, _ in records if not _answered(row) and row.get("detail") == BY_USER
        ],
        "rejected": [row for row, _ in records if row["finish_reason"] == "rejected"],
        "<b>failed</b>": [
            row
            for row, _ in records
            if not _answered(row)
            and row["finish_reason"] != "rejected"
            and row.get("detail") != BY_USER
        ],
    }
    waited: dict[str, list[Row]] = {}
    for row in run.rows:
        for name in run.judge.waited(row):
            waited.setdefault(f"waited for {text(name)} while it was down", []).append(row)
    found = [f"{len(of):,} {words}: {_links(of)}" for words, of in (groups | waited).items() if of]
    if kinds and not groups["<b>failed</b>"]:
        found.append("No request failed")
    yield from (f"{one}." for one in found)


def _answered(row: Row) -> bool:
    return row["finish_reason"] in ("stop", "length")


def _links(rows: Sequence[Row]) -> str:
    rest = len(rows) - NAMED
    named = ", ".join(link(row["id"]) for row in rows[:NAMED])
    return named + (f" and {rest:,} more" if rest > 0 else "")


# -- the table of faults ---------------------------------------------------------------------------


def began(run: Run) -> Ns | None:
    """When the workload began, from which a fault's `at` counts: what a fault of that kind tells,
    as no event does. None where there was none.
    """
    plan = run.recording.scenario.get("faults")
    for (number, _), fault in run.timeline.faults.items():
        try:
            at = plan[number]["at"] if isinstance(plan, list) else None
            if at is not None:
                return max(0, fault.began - parse_duration(at))
        except (KeyError, IndexError, TypeError, ValueError, BadInput):
            continue
    return None


def faults(run: Run) -> str:
    rows: dict[str, Row] = {row["id"]: row for row in run.rows}
    suffering = Suffering(run.recorder.requests, run.judge.laid, run.timeline)
    body = [
        [
            when(f.began),
            "-" if f.ended is None else duration(f.ended - f.began),
            text(f.do),
            ("missed: " if f.missed else "") + text(f.what),
            _became(suffering.of(f), rows) or ("" if f.missed else "nobody"),
        ]
        for f in sorted(run.timeline.faults.values(), key=lambda f: f.began)
    ]
    if not body:
        return ""
    zero = began(run)
    clock = "Times are of the run's clock, as everywhere on this page."
    if zero is not None:
        clock += (
            f" The workload began at {when(zero)}, and a fault's <code>at</code> counts from then:"
            f" <code>at: 2 s</code> is {when(zero + 2_000_000_000)} here."
        )
    head = ["began", "lasted", "kind", "what", "whom it hit, and what became of them"]
    return (
        f'<h2 id="faults">Faults</h2><p>{clock} Whom a fault hit is read from what the gateway '
        "gave as its reasons, and from who waited for what was down.</p>"
        + table(head, body, left=(2,), wrap=(3, 4))
    )


def _became(hits: Sequence[Hit], rows: dict[str, Row]) -> str:
    found = []
    for how in HOW:
        of = [rows[h.request] for h in hits if h.how == how and h.request in rows]
        if not of:
            continue
        ends = Counter("answered" if _answered(row) else _end(row) for row in of)
        became = "" if how == "cancelled" else f" ({_counts(ends.items())})"
        found.append(f"{len(of):,} {WORDS[how]}{became}: {_links(of)}")
    return "; ".join(found)


def _counts(ends: Iterable[tuple[str, int]]) -> str:
    of = list(ends)
    return of[0][0] if len(of) == 1 else ", ".join(f"{n} {end}" for end, n in of)


def _end(row: Row) -> str:
    detail = row.get("detail") or ""
    return "cancelled" if detail == BY_USER else text(row["finish_reason"] or "not seen")
