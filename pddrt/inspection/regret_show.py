"""What the router's regret looks like: its sum, the worst of it, what the estimates are worth."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pddrt.inspection.regret import KINDS, Verdict
from pddrt.show import clean, duration, many, size
from pddrt.types import Ns

TITLES = {"ttft": "TTFT", "e2e": "the end of the answer"}
SCOPES = {"policy": "the pipelines of its policy", "all": "all that its instances can serve"}


def lines(found: Verdict) -> Iterator[Text | Table]:
    yield Text(
        f"{many(len(found.tables), 'request')} judged, each had all others done what they did"
        + (f"; nothing can be said of {sum(found.silent.values()):,}:" if found.silent else "")
    )
    for why, count in found.silent.items():
        yield Text(clean(f"  {count:,}: {why}"))
    if not found.judged:
        yield Text("there was no choice: no other pipeline could have served them")
        return
    for scope, words in SCOPES.items():
        if any((kind, scope) in found.judged for kind in KINDS):
            yield Text()
            yield Text(f"regret among {words}", "bold")
            yield from _scope(found, scope)
    if found.errors:
        yield Text()
        errors = sorted(map(abs, found.errors))
        yield Text(
            "what estimates are worth: TTFT of what really ran, estimated without its own "
            f"crossing, is off by {duration(_rank(errors, 50))} at p50, "
            f"{duration(_rank(errors, 90))} at p90 ({many(len(errors), 'request')})"
        )


def _scope(found: Verdict, scope: str) -> Iterator[Text | Table]:
    for kind in KINDS:
        judged = found.judged.get((kind, scope), 0)
        if not judged:
            continue
        lost = found.lost.get((kind, scope), [])
        total = found.total(kind, scope)
        yield Text(
            f"  {TITLES[kind]}: {len(lost):,} of {judged:,} would have been sooner otherwise, "
            f"by {duration(total)} in sum, {duration(total // judged)} a request"
            + (f"; for {price(found, kind, scope)}" if lost else "")
        )
    worst = found.worst("ttft", scope)
    if not worst:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 2))
    for name in ("request", "ran", "best"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT", "instead of", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rests on")
    for one in worst:
        table.add_row(
            clean(one.request), one.ran.pipeline, one.best.pipeline, duration(one.best.ttft),
            duration(one.ran.ttft), duration(one.lost), clean(one.best.how),
        )  # fmt: skip
    yield table


def price(found: Verdict, kind: str, scope: str) -> str:
    """What the best would have taken, beside what ran."""
    relay, wan = found.price(kind, scope)
    more = ["more" if value >= 0 else "less" for value in (relay, wan)]
    return f"{duration(abs(relay))} {more[0]} on RLD, {size(abs(wan))} {more[1]} over the WAN"


def _rank(ordered: list[Ns], percent: int) -> Ns:
    return ordered[-(-len(ordered) * percent // 100) - 1]
