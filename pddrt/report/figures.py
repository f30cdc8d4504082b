"""The charts of a report: what of a run is drawn, and how. Returns SVG text; see `svg`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from pddrt.metrics import RequestRecord
from pddrt.report import svg
from pddrt.report.slowness import FIRST_PARTS, TITLES, Row, Slow, WireTime, ns, wire_times
from pddrt.report.slowness import LETTERS as LETTERS
from pddrt.report.svg import RIGHT, WIDTH, Chart, Scale, Series, box, label
from pddrt.report.timeline import Direction, Instance, Timeline, within
from pddrt.show import clean
from pddrt.types import SECOND, Ns
from pddrt.units import format_duration, format_rate

Json = Mapping[str, Any]

MEASURES = {
    "ttft": "TTFT: time to first token",
    "ttst": "TTST: first to second token",
    "tpot": "TPOT: mean time per later token",
    "itl": "ITL: each gap between tokens",
    "e2e": "E2E: sent to finished",
    "gap": "Handoff gap: last token of R to first of M",
}
DRIFT_OF = ("prompt", "prefill", "relay", "main", "behind")
DRIFT = (
    ("cap", 4, "prompt"), ("prefill", 0, "held by P"), ("relay_decode", 1, "held by RLD"),
    ("main_decode", 2, "held by MD"), ("transfer", 3, "largest that MD was behind P"),
)  # fmt: skip
"""Colour, dash and words of the lines of cache drift, as `DRIFT_OF`."""
INSIDE = 4
"""So many lines have their legend inside the chart."""
INSTANCES = 16
"""So many instances have a chart of their own; a table has all."""


def duration(t: float) -> str:
    """Of nanoseconds, for an axis or a sentence."""
    return format_duration(round(t), 3).replace(" us", " \u00b5s") if round(t) else "0"


def percent(share: float) -> str:
    """Neither nothing nor all where it is only nearly so."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


# -- where the time of one request went ------------------------------------------------------------


def waterfall(
    slow: Sequence[Slow], records: Mapping[str, RequestRecord], timeline: Timeline, title: str
) -> str:
    """A bar for each request, its parts as they came, from its sending; under it its KV on the wire
    to the bar's end, what is hidden behind something else pale.
    """
    if not slow:
        return ""
    left, right, row = 92, 96, 30
    longest = max(s.total for s in slow)
    x = Scale(0, longest or 1, left, WIDTH - right)
    drawn = [*time_grid(x, len(slow) * row + 8)]
    for i, s in enumerate(slow):
        y = 8 + i * row
        drawn.append(label(left - 6, y + 13, clean(s.row["id"]), "end", "strong"))
        for part, start, end in s.laid:
            tip = f"{TITLES[part]}: {duration(end - start)}, from {duration(start)} on"
            wide = x(end) - x(start)
            drawn.append(box(x(start), y, wide, 16, f"c-{part}", LETTERS[part], tip))
        share = f"{LETTERS[s.part]} {percent(s.share)}"
        drawn.append(label(x(s.total) + 5, y + 13, f"{duration(s.total)}, {share}"))
        if record := records.get(s.row["id"]):
            for wire in wire_times(record, timeline):
                drawn += _wire(x, y + 18, record, wire, record.sent + s.total)
    says = "; ".join(
        f"{clean(s.row['id'])} took {duration(s.total)}, {percent(s.share)} of it {TITLES[s.part]}"
        for s in slow
    )
    return svg.svg(title, says, len(slow) * row + 34, drawn)


def _wire(x: Scale, y: float, record: RequestRecord, wire: WireTime, last: Ns) -> Iterator[str]:
    to = "c-kv_relay" if wire.relay else "c-kv_main"
    tip = (
        f"KV to {clean(wire.dst)}: {wire.bytes:,} bytes, on the wire {duration(wire.hidden)} "
        f"hidden, {duration(wire.exposed)} exposed"
    )
    for spans, pale in ((wire.hidden_spans, "hidden "), (wire.exposed_spans, "")):
        for since, until in within(spans, record.sent, last):
            start, end = x(since - record.sent), x(until - record.sent)
            if end > start:
                top = y + (0 if wire.relay else 4)
                yield box(start, top, end - start, 3, f"{pale}{to}", "", tip)


def time_grid(x: Scale, floor: float) -> Iterator[str]:
    last = -1e9
    for tick in x.ticks(5):
        if x(tick) - last > 55:
            last = x(tick)
            yield f'<path class="grid" d="M{last:.1f} 0V{floor}"/>'
            yield label(last, floor + 15, duration(tick), "middle")


def legs(
    rows: Sequence[Row],
    parts: Mapping[str, Mapping[str, Ns]],
    records: Mapping[str, RequestRecord],
    timeline: Timeline,
) -> str:
    """The mean TTFT of each pipeline as a staircase, and under the leg `transfer` the wire time of
    KV to the first decoder: hidden and exposed. `parts`: of each request's TTFT.
    """
    all_of = grouped(rows)
    groups = grouped([r for r in rows if r["id"] in parts])
    if not groups:
        return ""
    left, right, high = 130, 208, 17
    means = {name: _mean_parts(of, parts) for name, of in groups.items()}
    x = Scale(0, max(sum(m.values()) for m in means.values()) or 1, left, WIDTH - right)
    drawn, y, says = [], 4.0, []
    for name, mean in means.items():
        total, known = sum(mean.values()), len(groups[name])
        drawn.append(label(4, y + 13, f"{name}: mean TTFT {duration(total)}", "start", "strong"))
        lacking = len(all_of[name]) - known
        told = f"{known:,} requests" + (f"; {lacking:,} more got no token" if lacking else "")
        drawn.append(label(WIDTH - 4, y + 13, told, "end"))
        y, at = y + high + 4, 0.0
        top = y
        for part, length in mean.items():
            drawn.append(label(left - 6, y + 12, f"{LETTERS[part]}  {TITLES[part]}", "end"))
            if length > 0:
                tip = f"{TITLES[part]}: {duration(length)}"
                drawn.append(box(x(at), y, x(at + length) - x(at), 14, f"c-{part}", "", tip))
            share = f" ({percent(length / total)})" if total and length else ""
            drawn.append(label(x(at + length) + 5, y + 12, f"{duration(length)}{share}"))
            at, y = at + length, y + high
            if part == "transfer":
                drawn += _mean_wire(x, y, at, groups[name], records, timeline)
                y += high
        drawn[:0] = [f'<path class="grid" d="M{x(t):.1f} {top}V{y:.1f}"/>' for t in x.ticks(5)]
        y += 8
        worst = max(mean, key=lambda part: mean[part])
        says.append(f"{name}: {duration(total)}, most of it {TITLES[worst]}")
    drawn += [g for g in time_grid(x, y - 8) if "text" in g]
    drawn.append(label(left - 14, y + 7, "since it was sent", "end"))
    return svg.svg("Mean time to first token, leg by leg", "; ".join(says), y + 12, drawn)


def _mean_wire(
    x: Scale,
    y: float,
    at: float,
    rows: Sequence[Row],
    records: Mapping[str, RequestRecord],
    timeline: Timeline,
) -> Iterator[str]:
    known = [r for r in (records.get(row["id"]) for row in rows) if r is not None]
    if not known:
        return
    first = [w for r in known for w in wire_times(r, timeline) if w.first]
    hidden = sum(w.hidden for w in first) // len(known)
    exposed = sum(w.exposed for w in first) // len(known)
    yield label(x.start - 6, y + 12, "KV on the wire", "end", "faint")
    start = max(0.0, at - exposed - hidden)
    if hidden:
        yield box(x(start), y + 3, x(at - exposed) - x(start), 8, "hidden c-transfer")
    if exposed:
        yield box(x(at - exposed), y + 3, x(at) - x(at - exposed), 8, "c-transfer")
    text = f"{duration(hidden)} hidden, {duration(exposed)} exposed"
    yield label(x(at) + 5, y + 12, text, "start", "faint")


def _mean_parts(rows: Sequence[Row], parts: Mapping[str, Mapping[str, Ns]]) -> dict[str, float]:
    """`lost` only where there is any."""
    mean = {part: sum(parts[r["id"]][part] for r in rows) / len(rows) for part in FIRST_PARTS}
    return {part: length for part, length in mean.items() if length or part != "lost"}


def grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By pipeline, in the order of their names."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(clean(row["pipeline"] or "not routed"), []).append(row)
    return dict(sorted(groups.items()))


# -- distributions ---------------------------------------------------------------------------------


def measured(rows: Iterable[Row], measure: str) -> list[float]:
    """Values of one of `MEASURES`, in ns and in order."""
    found: list[float] = []
    for row in rows:
        if measure == "itl":
            stamps = [ns(t) for t in row["token_times_s"]]
            found += [b - a for a, b in pairwise(stamps)]
            continue
        done = measure != "e2e" or row["finish_reason"] in ("stop", "length")
        of, key = (row["handoff"] or {}, "gap_s") if measure == "gap" else (row, f"{measure}_s")
        value = of.get(key)
        if value is not None and done:
            found.append(ns(value))
    return sorted(found)


def cdfs(rows: Sequence[Row]) -> Iterator[str]:
    """One chart a measure, a line a pipeline."""
    groups = grouped(rows)
    for measure, title in MEASURES.items():
        values = {name: measured(of, measure) for name, of in groups.items()}
        if drawn := distributions(title, values):
            yield figure(title, drawn)


def distributions(title: str, values: Mapping[str, Sequence[float]]) -> str:
    """A line for each name that has values (ns, in order); its colour is that of its place, so that
    it is the same in every chart of the same names. "" where there is nothing.
    """
    known = {name: v for name, v in values.items() if v}
    if not known:
        return ""
    low = max(1.0, min(v[0] for v in known.values()))
    high = max(v[-1] for v in known.values())
    log = high > 30 * low
    says = "; ".join(f"{n}: half at most {duration(_at(v, 0.5))}, nine in ten at most "
                     f"{duration(_at(v, 0.9))}" for n, v in known.items())  # fmt: skip
    start = low if log else max(0.0, low - 0.1 * (high - low))
    below = 0 if len(known) <= INSIDE else 15 * len(known) + 8
    chart = Chart(
        title, says, (start, high * 1.02), (0, 1), duration, percent,
        height=190 + below, x_log=log, x_label="logarithmic axis" if log else "", y_ticks=4,
        below=below,
    )  # fmt: skip
    middle = max(chart.across(_at(of, 0.4)) for of in known.values())
    for i, (name, of) in enumerate(known.items()):
        colour, dash = line_of(list(values).index(name))
        points = [(start, 0.0), *svg.cdf(of), (high * 1.02, 1.0)]
        chart.add(Series(name, colour, points, dash))
        text = (
            f"{name}: p50 {duration(_at(of, 0.5))}, p90 {duration(_at(of, 0.9))} (of {len(of):,})"
        )
        # Where the curve is not: under the axis, or above its rise, or below its end.
        if below:
            x, at = svg.LEFT + 8.0, chart.height - below + 15 * (i + 1)
        elif middle > (chart.across.start + chart.across.end) / 2:
            x, at = svg.LEFT + 8.0, svg.TOP + 16 + 15 * i
        else:
            at = chart.floor - 8 - 15 * (len(known) - 1 - i)
            x = WIDTH - RIGHT - 40 - 6.4 * max(len(n) + 37 for n in known)
        chart.marks.append(svg.swatch(x, at, colour, dash))
        chart.marks.append(label(x + 32, at, text, "start", "halo"))
    return chart.text()


def line_of(place: int) -> tuple[str, int]:
    """Colour and dash of a line among many: five of each, and no two the same below 25."""
    return f"s{place % 5}", (place + place // 5) % 5


def _at(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return values[math.ceil(len(values) * share) - 1]


def figure(caption: str, drawn: str, mark: str = "") -> str:
    return f"<figure><figcaption>{escape(caption)}{mark}</figcaption>{drawn}</figure>"


# -- over time -------------------------------------------------------------------------------------


def links(timeline: Timeline, delays: Mapping[str, Ns], mark: str) -> Iterator[str]:
    """For each direction that KV went: what was delivered against the cap, and how many at once; of
    one that carries only tokens, when it was down. `delays`: one way, by link.
    """
    for direction in timeline.directions.values():
        rates, name = list(direction.kv.rates(timeline.end)), clean(direction.name)
        about = f"{name} ({_about(direction, delays)})"
        if any(rate for _, _, rate in rates):
            yield figure(f"{about}: KV on the wire", _rate(direction, rates, timeline), mark)
            if any(flows > 0.1 for *_, flows in direction.flows.rates(timeline.end)):
                yield figure(f"{name}: transfers at once", _flows(direction, timeline))
        elif direction.down(timeline.end):
            yield figure(f"{about}: no KV goes this way", _outages(direction, timeline), mark)


def _about(direction: Direction, delays: Mapping[str, Ns]) -> str:
    rate = direction.caps[0][1] if direction.caps else None
    delay = delays.get(direction.link, 0)
    return ", ".join(
        ["no limit of rate" if rate is None else format_rate(rate)]
        + ([f"delay {duration(delay)} one way"] if delay else [])
    )


def _outages(direction: Direction, timeline: Timeline) -> str:
    """When tokens, ids and notices could not pass."""
    down = direction.down(timeline.end)
    told = ", ".join(f"{duration(a)} to {duration(b)}" for a, b in down)
    chart = Chart(
        clean(direction.name), f"down from {told}", (0, timeline.end), (0, 1), duration,
        lambda _: "", height=64, y_ticks=1,
    )  # fmt: skip
    for since, until in down:
        chart.band(since, until, "c-outage", f"down from {duration(since)} to {duration(until)}")
        chart.words(until, 0.4, " down", "halo")
    return chart.text()


def _rate(direction: Direction, rates: Sequence[tuple[Ns, Ns, float]], timeline: Timeline) -> str:
    megabits = [(a, b, rate * SECOND * 8 / 1e6) for a, b, rate in rates]
    caps = [(t, cap) for t, cap in direction.caps]
    limits = [cap * 8 / 1e6 for _, cap in caps if cap]
    most = max(v for _, _, v in megabits)
    # A cap far above what is used would press the curve to the floor: then it is only told.
    near = bool(limits) and max(limits) < 20 * most
    top = max([most, *(limits if near else [])]) * 1.08
    mean = sum((b - a) * v for a, b, v in megabits) / timeline.end
    says = f"on average {mean:,.3g} Mbit/s, at most {most:,.3g} Mbit/s in one part of the run"
    chart = Chart(clean(direction.name), says, (0, timeline.end), (0, top), duration, _megabits)
    chart.add(Series("KV", "c-kv_main" if direction.src != direction.dst else "c-kv_relay",
                     svg.steps(megabits), area=True))  # fmt: skip
    for (since, cap), (until, _) in pairwise([*caps, (timeline.end, None)]):
        if cap == 0:
            chart.band(since, until, "c-outage", "the link is down")
            chart.words(until, top * 0.5, " down", "halo")
        elif cap is not None and near:
            level = cap * 8 / 1e6
            chart.add(Series("cap", "c-cap", [(since, level), (until, level)], 1))
    if limits:
        text = f"cap {_megabits(max(limits))}" + ("" if near else " (far above)")
        chart.words(0, max(limits) if near else top, f" {text}", "halo below")
    return chart.text()


def _megabits(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:,.3g} Gb/s"
    return f"{value:,.3g} Mb/s" if value >= 1 or not value else f"{value * 1000:,.3g} kb/s"


def _flows(direction: Direction, timeline: Timeline) -> str:
    parts = list(direction.flows.rates(timeline.end))
    most = max(value for _, _, value in parts)
    chart = Chart(
        clean(f"{direction.name}: transfers at once"),
        f"at most {most:.1f} on average of one part of the run",
        (0, timeline.end), (0, max(1.0, most * 1.08)), duration, lambda v: f"{v:g}", height=120,
        y_ticks=3,
    )  # fmt: skip
    chart.add(Series("transfers", "c-prefill_queue", svg.steps(parts), area=True))
    return chart.text()


def instances(timeline: Timeline) -> Iterator[str]:
    """For each instance: the share of time in steps, by kind, and KV memory in use."""
    for instance in list(timeline.instances.values())[:INSTANCES]:
        drawn, says = _instance(instance, timeline)
        yield figure(
            clean(f"{instance.name} ({instance.role}, site {instance.site}): {says}"), drawn
        )


def _instance(instance: Instance, timeline: Timeline) -> tuple[str, str]:
    busy = {kind: dict(_shares(instance, kind, timeline.end)) for kind in instance.busy}
    spans = sorted({span for of in busy.values() for span in of})
    layers: dict[str, list[tuple[float, float, float]]] = {}
    below = dict.fromkeys(spans, 0.0)
    for kind in ("decode", "extend", "prefill"):
        for span in spans:
            below[span] = min(1.0, below[span] + busy[kind].get(span, 0.0))
        layers[kind] = [(a, b, below[a, b]) for a, b in spans]
    mean = sum((b - a) * below[a, b] for a, b in spans) / max(1, timeline.end)
    kv = [(a, b, v / max(1, instance.pages)) for a, b, v in instance.kv.levels(timeline.end)]
    most = max((v for _, _, v in kv), default=0)
    says = f"busy {percent(mean)}, KV at most {percent(most)}"
    chart = Chart(
        clean(instance.name),
        says,
        (0, timeline.end),
        (0, 1),
        duration,
        percent,
        height=120,
        y_ticks=2,
    )
    for kind, colour in (("prefill", "prefill"), ("extend", "extend"), ("decode", "decode")):
        name = f"{instance.role}_decode" if colour == "decode" else colour
        if any(value for value in busy[kind].values()):
            chart.add(Series(kind, f"c-{name}", svg.steps(layers[kind]), area=True))
    chart.add(Series("KV", "c-memory", svg.steps(kv), 1))
    for start, end in instance.down:
        chart.band(start, timeline.end if end is None else end, "c-fault", "down")
    return chart.text(), says


def _shares(instance: Instance, kind: str, end: Ns) -> Iterator[tuple[tuple[Ns, Ns], float]]:
    """All kinds on the widest parts that any of them has: they are stacked."""
    sums = instance.busy[kind]
    width = max(s.width for s in instance.busy.values())
    parts = width // sums.width
    for i in range(0, len(sums.values), parts):
        start = i * sums.width
        if start >= end:
            return
        until = min(start + width, end)
        yield (start, until), sum(sums.values[i : i + parts]) / (until - start)


def drift(summary: Json, end: Ns) -> str:
    """What P, RLD and MD held of each prompt when it was known: means of parts of the run."""
    series = (summary.get("cache_drift") or {}).get("series") or []
    if len(series) < 2:
        return ""
    high = max(max(p["prompt_tokens"], p["behind_max_tokens"]) for p in series)
    last = series[-1]
    behind = f"main is {last['behind_tokens']:,.0f} tokens behind P at the end, on average"
    chart = Chart(
        "Cache drift", behind, (0, max(end, ns(last["t_s"]))), (0, high * 1.08), duration,
        lambda v: f"{v:,.0f} tok", height=210,
    )  # fmt: skip
    at = [ns(p["t_s"]) for p in series]

    values = {
        "prompt": [p["prompt_tokens"] for p in series],
        "behind": [p["behind_max_tokens"] for p in series],
        **{role: [p["held_tokens"][role] for p in series] for role in ("prefill", "relay", "main")},
    }
    for (colour, dash, words), of in zip(DRIFT, map(values.get, DRIFT_OF), strict=True):
        chart.add(Series(words, f"c-{colour}", list(zip(at, of or [], strict=True)), dash))
    return chart.text()
