"""What a moment of a run looks like: both sites' machines, links, and what each client has.

From a `moment.Moment` to lines that fit a width. Positions count from the first token of the
prompt; `[0, 512) of 600` is KV that is there of what the prompt needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pddrt.inspection.moment import Direction, Instance, Moment, Part, Request
from pddrt.show import STYLE, clean, duration, many, size
from pddrt.types import LETTER, SECOND, Ns
from pddrt.units import format_rate

Shown = Text | Table
MOST = 40
"""Requests that are shown of an instance, or of the run."""


def moment(at: Moment) -> Iterator[Shown]:
    """All of it: instances by site, links, requests."""
    under_way = sum(r.finish is None for r in at.requests.values())
    over = "" if at.partial else f"{many(at.ended, 'request')} over, "
    yield Text(f"{over}{under_way} under way, at {at.now / SECOND:.9f} s")
    yield from (Text(f"in effect: {clean(fault)}", "bold") for fault in at.faults.values())
    for site in dict.fromkeys(i.site for i in at.instances.values()):
        yield Text()
        yield Text(f"site {clean(site)}", "bold")
        for instance in (i for i in at.instances.values() if i.site == site):
            yield from machine(at, instance)
    yield Text()
    yield Text("links", "bold")
    for direction in at.links.values():
        yield from link(at, direction)
    if at.requests:
        yield Text()
        yield Text("requests", "bold")
    for request in list(at.requests.values())[:MOST]:
        yield from one(at, request)
    if len(at.requests) > MOST:
        yield Text(f"  and {len(at.requests) - MOST:,} more")


# -- an instance -----------------------------------------------------------------------------------


def machine(at: Moment, i: Instance) -> Iterator[Shown]:
    """Its memory and its running step, then who is there."""
    pages = f"pages: {i.used:,} of requests"
    if not at.partial:
        pages += f", {i.cached:,} cached, {i.free:,} free"
    step = "idle"
    if i.step is not None:
        tokens = sum(end - start for _, start, end in i.spans)
        step = f"in a step since {duration(at.now - i.step)}: {many(tokens, 'token')}"
        step += f" of {many(len(i.spans), 'sequence')}"
    if i.down:
        step = "down"
    style = STYLE.get(LETTER.get(i.role, ""), "")
    yield Text.assemble(
        (f"  {clean(i.name)}", style), f"  {i.role}; {pages} of {i.pages:,}; {step}"
    )
    parts = at.parts_on(i.name)
    if not parts:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for part in parts[:MOST]:
        facts = ", ".join(part_facts(part))
        since = f"{part.phase}, {duration(at.now - part.since)}"
        table.add_row(f"    {clean(part.request)}", since, clean(facts))
    yield table
    if len(parts) > MOST:
        yield Text(f"    and {len(parts) - MOST:,} more")


def part_facts(part: Part) -> Iterator[str]:
    """Positions and pages, as far as there are any."""
    length = part.prompt_tokens
    if part.hit:
        yield f"{part.hit:,} cached"
    if part.arrived and part.lacking:
        ranges = " ".join(f"[{a:,}, {b:,})" for a, b in part.arrived[:4])
        yield f"arrived {ranges} of {length:,}"
    if part.computed:
        yield f"KV [0, {part.computed:,})" + (f" of {length:,}" if part.computed < length else "")
    if part.step is not None:
        yield f"step on [{part.step[0]:,}, {part.step[1]:,})"
    if part.tokens:
        yield f"made {many(part.tokens, 'token')}, to {part.made:,}"
    if part.pages:
        yield many(part.pages, "page")


# -- a link ----------------------------------------------------------------------------------------


def link(at: Moment, d: Direction) -> Iterator[Text]:
    rate = "no limit" if d.rate is None else "down" if d.rate == 0 else format_rate(d.rate, 3)
    flows = at.on_the_way(d)
    total = sum(flow.bytes for flow in flows)
    way = f"{many(len(flows), 'flow')} with {size(total)} of KV on the way" if flows else "no KV"
    yield Text(f"  {clean(d.name)}  {rate}; {way}")
    for flow in flows[:MOST]:
        ranges = f"[{flow.way[0][0]:,}, {flow.way[-1][1]:,})"
        oldest: Ns = at.now - flow.way[0][3]
        yield Text(clean(
            f"    {flow.request} {flow.src} to {flow.dst}: {ranges} {size(flow.bytes)}, the oldest "
            f"since {duration(oldest)}; {size(flow.arrived)} arrived"
        ))  # fmt: skip


# -- a request -------------------------------------------------------------------------------------


def one(at: Moment, r: Request) -> Iterator[Text]:
    """What its client has, and its handoff as each side knows it."""
    path = " > ".join(name for name in (r.prefill, r.relay, r.main) if name)
    made = " + ".join(f"{letter} {count:,}" for letter, count in r.client.items())
    has = f"the client has {many(r.received, 'token')} ({made})" if made else "the client has none"
    last = "" if r.last is None else f", the latest {duration(at.now - r.last)} ago"
    again = f", attempt {r.attempt}" if r.attempt else ""
    yield Text(clean(
        f"  {r.id}  {r.pipeline or 'not routed'} {path}{again}; sent {duration(at.now - r.sent)} "
        f"ago; {r.stage}; {has}{last}"
    ))  # fmt: skip
    if (h := r.handoff) is None:
        return
    facts = [h.phase]
    if h.lacking:
        facts.append(f"{h.policy}: lacking {', '.join(map(str, h.lacking))}")
    if h.relay_last is not None:
        first = r.prompt_tokens
        there = [
            f"{words} {position - first}"
            for words, position in (
                ("RLD has made", h.relay_last), ("sent", h.sent),
                ("MD knows", h.taken), ("RLD knows MD has", h.caught),
            )
            if position is not None
        ]  # fmt: skip
        facts.append(", ".join(there) + " ids")
    if h.in_flight:
        facts.append(f"{many(h.in_flight, 'id')} on the way")
    yield Text(clean(f"    handoff: {'; '.join(facts)}"))


def about(at: Moment, name: str) -> list[Shown] | None:
    """Of one request, instance or link; None where there is none of that name."""
    if name in at.instances:
        return list(machine(at, at.instances[name]))
    if name in at.requests:
        parts = at.parts_of(name)
        lines: list[Shown] = list(one(at, at.requests[name]))
        for part in parts:
            facts = ", ".join(part_facts(part))
            since = duration(at.now - part.since)
            lines.append(Text(clean(f"    {part.instance}: {part.phase}, {since}; {facts}")))
        return lines
    found = [d for d in at.links.values() if name in (d.link, d.name)]
    return [line for d in found for line in link(at, d)] or None
