"""Requests drawn as pictures of their own: who did what for one, and when, on one time axis.

A lane each for P, the fast link, RLD, the WAN, MD and what the user sees. Several requests below
each other (the same one under other policies, say) share the axis, so that lengths compare. The
file stands alone: it brings the report's colours with it, light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from pddrt import recording
from pddrt.errors import BadInput
from pddrt.metrics import Recorder, RequestRecord
from pddrt.report import svg
from pddrt.report.figures import duration
from pddrt.report.gantt import segments
from pddrt.report.slowness import LETTERS
from pddrt.report.svg import Scale, box, label
from pddrt.report.timeline import Timeline
from pddrt.show import clean
from pddrt.types import Ns

WIDTH, LEFT, RIGHT = 860, 118, 20
LANE, BAR = 20, 14
TITLE, FOOT = 30, 22


class Case(NamedTuple):
    title: str
    record: RequestRecord
    timeline: Timeline


_LANES = (
    ("prefill", {part: LETTERS[part] for part in ("prefill_queue", "prefill", "prefill_decode")}),
    ("kv_relay", {"kv_relay": "KV"}),
    ("relay", {"relay_decode": "R"}),
    ("kv_main", {"kv_main": "KV"}),
    ("main", {"handoff_gap": "H", "main_decode": "M"}),
    ("waiting", {"lost": LETTERS["lost"], "outage": LETTERS["outage"]}),
)
_MAKERS = {"P": "prefill", "R": "relay_decode", "M": "main_decode"}


def picture(cases: Sequence[Case], title: str, until: Ns | None = None) -> str:
    """An SVG file. `until`: what comes later after a request was sent is not drawn."""
    shown = until or max((end for case in cases for _, _, end in _spans(case)), default=0)
    x = Scale(0, max(shown, 1), LEFT, WIDTH - RIGHT)
    drawn: list[str] = []
    y = 6.0
    says = []
    for case in cases:
        drawn.append(label(4, y + 14, clean(case.title), "start", "strong"))
        y += TITLE - 4
        lanes = list(_lanes(case))
        for name, spans in lanes:
            drawn.append(label(LEFT - 8, y + 11, name, "end"))
            drawn.append(f'<path class="grid" d="M{LEFT} {y + BAR:.1f}H{WIDTH - RIGHT}"/>')
            for kind, letter, start, end in spans:
                if start < shown:
                    right = min(end, shown)
                    tip = f"{letter}: {duration(end - start)}"
                    wide = x(right) - x(start)
                    drawn.append(box(x(start), y, wide, BAR, f"c-{kind}", letter, tip))
            y += LANE
        if ids := list(_rounds(case, x, y, shown)):
            drawn += ids
            y += LANE
        drawn += _user(case, x, y, shown)
        y += LANE + 20
        says.append(_told(case))
    drawn = [*_grid(x, y - 12), *drawn]
    return _alone(svg.svg(title, " ".join(says), y + FOOT - 10, drawn, WIDTH))


def _spans(case: Case) -> Iterator[tuple[str, Ns, Ns]]:
    sent = case.record.sent
    for kind, start, end, _ in segments(case.record, case.timeline):
        yield kind, start - sent, end - sent


def _lanes(case: Case) -> Iterator[tuple[str, list[tuple[str, str, Ns, Ns]]]]:
    """Those that the request has, with their spans."""
    record = case.record
    spans = list(_spans(case))
    names = {
        "prefill": clean(record.prefill or record.main or ""),
        "kv_relay": f"KV to {clean(record.relay or '')}",
        "relay": clean(record.relay or ""),
        "kv_main": f"KV to {clean(record.main or '')}",
        "main": clean(record.main or ""),
        "waiting": "waiting",
    }
    for lane, kinds in _LANES:
        found = [(kind, kinds[kind], start, end) for kind, start, end in spans if kind in kinds]
        if found:
            yield names[lane], found


def _rounds(case: Case, x: Scale, y: float, shown: Ns) -> Iterator[str]:
    """The handoff's rounds: when ids left the relay, and how many."""
    rounds = case.timeline.handoffs.get(case.record.id)
    found = [(t - case.record.sent, n) for t, n, _ in rounds.sent] if rounds else []
    found = [(t, n) for t, n in found if t <= shown]
    if not found:
        return
    yield label(LEFT - 8, y + 11, "ids", "end")
    for t, n in found:
        yield box(x(t) - 1, y, 2, BAR, "c-handoff_gap", "", f"{n} ids")
    told = ", ".join(str(n) for _, n in found[:6]) + (", ..." if len(found) > 6 else "")
    yield label(x(found[-1][0]) + 5, y + 11, told)


def _user(case: Case, x: Scale, y: float, shown: Ns) -> Iterator[str]:
    """A mark for each token, and what is quoted of a request: its TTFT, the gap at the switch."""
    r = case.record
    yield label(LEFT - 8, y + 11, "the user sees", "end", "strong")
    for t, maker in zip(r.times, r.sources, strict=True):
        if t - r.sent <= shown:
            yield (
                f'<rect class="box c-{_MAKERS[maker]}" x="{x(t - r.sent) - 0.6:.1f}" y="{y:.1f}" '
                f'width="1.2" height="{BAR}"/>'
            )
    if r.ttft is not None:
        at = x(r.ttft)
        yield f'<path class="axis" d="M{LEFT} {y + 19:.1f}H{at:.1f}M{at:.1f} {y + 15:.1f}v8"/>'
        yield label(at + 4, y + 25, f"TTFT {duration(r.ttft)}")
    if r.switch is not None and (before := r.times[r.switch - 1] - r.sent) < shown:
        gap = r.times[r.switch] - r.times[r.switch - 1]
        yield label(max(x(before), x(r.ttft or 0) + 110), y + 25, f"gap {duration(gap)}")


def _told(case: Case) -> str:
    r = case.record
    parts = [f"{clean(case.title)}: {len(r.ids)} tokens"]
    if r.ttft is not None:
        parts.append(f"the first after {duration(r.ttft)}")
    made = [f"{r.sources.count(letter)} by {letter}" for letter in "PRM" if letter in r.sources]
    return ", ".join(parts) + (f" ({', '.join(made)})." if made else ".")


def _grid(x: Scale, floor: float) -> Iterator[str]:
    for tick in x.ticks(8):
        yield f'<path class="grid" d="M{x(tick):.1f} 0V{floor:.1f}"/>'
        yield label(x(tick), floor + 14, duration(round(tick)), "middle")


def _alone(drawn: str) -> str:
    """The drawing with the parts of the report's style that it uses, as a file."""
    css = (files("pddrt") / "assets/report.css").read_text(encoding="utf-8")
    roots = re.findall(r"^:root \{.*?\}$|^@media \(prefers-color-scheme: dark\).*?\} \}$",
                       css, re.MULTILINE | re.DOTALL)  # fmt: skip
    rules = re.findall(r"^(?:svg |\.c-).*$", css, re.MULTILINE)
    size = re.search(r'viewBox="0 0 (\S+) (\S+)"', drawn)
    assert size is not None
    style = "\n".join([*roots, *rules, "svg { background: var(--bg); }"])
    return drawn.replace(
        "<svg ",
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[1]}" height="{size[2]}" ', 1,
    ).replace("<title>", f"<style>{style}</style><title>", 1) + "\n"  # fmt: skip


def read(folder: Path, request: str, title: str) -> Case:
    """A request of a recorded run. Raises BadInput where it is no run, or has no such request."""
    rec = recording.opened(folder)
    recorder, timeline = Recorder(rec.roles()), Timeline()
    for event in rec.events():
        recorder(event)
        timeline(event)
    if request not in recorder.requests:
        raise BadInput(f"{folder} has no request {request}")
    return Case(title, recorder.requests[request], timeline)
