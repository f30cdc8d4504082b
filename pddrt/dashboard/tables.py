"""Instances and links as tables, what letters, strokes and keys mean. Pure: views in, lines out."""

from __future__ import annotations

from collections.abc import Sequence

from pddrt import show
from pddrt.dashboard.bars import BAD, DIM, PHASES
from pddrt.dashboard.facts import InstanceView, LinkView, Phase, Snapshot
from pddrt.dashboard.text import Line, beside, cut, fit, line, right
from pddrt.types import LETTER
from pddrt.units import format_rate

ROLE_STYLE = {role: show.STYLE[letter] for role, letter in LETTER.items()}
BESIDE_FROM = 80
"""From this width on instances and links stand beside one another."""
NAME = 16
"""Cells that a name takes, at most."""
KEYS = (
    ("q", "quit", "ends the run, as Ctrl-C does; what was measured is saved"),
    ("p", "pause", "the display; under the virtual clock the run, too"),
    ("\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}", "follow", "another request; Esc: whichever decodes"),
    ("Enter", "detail", "the followed request, taken apart; again: all requests"),
    ("+-", "pace", "of virtual time: slower, faster, as fast as it can"),
    ("s", "sort", "by arrival; by TTFT or duration, the longest first"),
    ("f", "filter", "leaves out requests that have ended"),
    ("?", "help", "this page"),
)
EXPLAINED = (
    ("Requests", "a bar of what they are doing and, below, a thin one of KV on its way"),
    ("right", "tokens, TTFT; below, how much of the KV is there and how fast it comes,"),
    ("", "then its size, and how many ids were handed over (in how many rounds)"),
    ("!", "it lost an instance or memory, or ended badly; it may go on elsewhere"),
    ("Instances", "queue: wait for memory, at P for prefill; batch: sequences in a step"),
    ("", "KV: memory in use; hit: prompt tokens cached here; busy: the last 2 s"),
    ("Links", "rate: KV that came in the last 2 s; cap: its share of what can be;"),
    ("", "on way: sent, and not there yet"),
    ("Figures", "of the whole run; goodput: also the share of requests inside their SLO;"),
    ("", "tokens/s: of the last 2 s"),
)
"""What is on the screen; made for 80 columns."""


def surroundings(seen: Snapshot, rows: int, width: int) -> list[Line]:
    """Instances and links; beside one another where there is room."""
    if rows <= 0:
        return []
    if width >= BESIDE_FROM:
        of_instances = 42
        left = instance_table(seen.instances, rows, of_instances - 2)
        return beside(left, link_table(seen.links, rows, width - of_instances), of_instances)
    links = link_table(seen.links, max(2, rows // 3), width)
    left = instance_table(seen.instances, max(0, rows - len(links) - 1), width)
    return [*left, (), *links][:rows]


def instance_table(instances: Sequence[InstanceView], rows: int, width: int) -> list[Line]:
    """Where there are more than rows, roles."""
    if rows <= 1 or not instances:
        return []
    shown = instances if len(instances) < rows else _by_role(instances)
    name = min(max(6, width - 30), NAME)
    lines = [line(("instance".ljust(name) + " queue batch   KV  hit busy", DIM))]
    for one in shown[: rows - 1]:
        style = ROLE_STYLE.get(one.role, "")
        label = f"{LETTER.get(one.role, ' ')} {one.name}"
        if one.down:
            lines.append(line((cut(label, name).ljust(name), style), (" down", BAD)))
            continue
        lines.append(
            line(
                (cut(label, name).ljust(name), style),
                (right(str(one.waiting), 6), "bold" if one.waiting else DIM),
                (right(str(one.batch), 6), "" if one.batch else DIM),
                right(percent(one.kv), 5),
                right(percent(one.hit), 5),
                right(percent(one.busy), 5),
            )
        )
    return lines


def _by_role(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Each role as one: sums of what waits and runs, means of shares."""
    merged = []
    for role in dict.fromkeys(one.role for one in instances):
        up = [one for one in instances if one.role == role and not one.down]
        of = [one for one in instances if one.role == role]
        hits = [one.hit for one in of if one.hit is not None]
        merged.append(
            InstanceView(
                name=f"{len(up)} of {len(of)}" if len(up) < len(of) else f"all {len(of)}",
                role=role,
                site=of[0].site,
                down=not up,
                waiting=sum(one.waiting for one in of),
                holding=sum(one.holding for one in of),
                batch=sum(one.batch for one in up),
                busy=sum(one.busy for one in up) / max(1, len(up)),
                kv=sum(one.kv for one in up) / max(1, len(up)),
                hit=sum(hits) / len(hits) if hits else None,
            )
        )
    return merged


def link_table(links: Sequence[LinkView], rows: int, width: int) -> list[Line]:
    """Directions that nothing has used are left out where not all fit."""
    if rows <= 1 or not links:
        return []
    shown = [one for one in links if one.carried or one.in_flight] or list(links)
    if len(links) < rows:
        shown = list(links)
    name = min(max(6, width - 30), NAME)
    lines = [line(("link".ljust(name) + "       rate  cap flows  on way", DIM))]
    for one in shown[: rows - 1]:
        label = one.link if one.src == one.dst else f"{one.link} {one.src}>{one.dst}"
        if one.cap == 0:
            share = ("down", BAD)
        else:
            share = (percent(one.rate / one.cap) if one.cap else "-", "")
        lines.append(
            line(
                cut(label, name).ljust(name),
                (right(format_rate(round(one.rate), 2) if one.rate >= 1 else "-", 11), ""),
                (right(share[0], 5), share[1]),
                (right(str(one.flows), 6), "" if one.flows else DIM),
                (right(show.size(one.in_flight) if one.in_flight else "-", 8), ""),
            )
        )
    return lines


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def legend(width: int) -> Line:
    """What the letters and strokes mean."""
    words: tuple[tuple[Phase, str], ...] = (
        ("queue", "queue"), ("prefill", "prefill"), ("wait", "waits for KV"),
        ("relay", "RLD"), ("handoff", "handoff"), ("main", "MD"),
    )  # fmt: skip
    parts: list[tuple[str, str]] = []
    for phase, word in words:
        letter, style = PHASES[phase]
        parts += [(letter, style), (f" {word}  ", DIM)]
    parts += [
        ("\N{BOX DRAWINGS LIGHT HORIZONTAL}", show.STYLE["R"]), (" KV>RLD  ", DIM),
        ("\N{BOX DRAWINGS HEAVY HORIZONTAL}", show.STYLE["M"]), (" KV>MD", DIM),
    ]  # fmt: skip
    return fit(tuple(parts), width)


def help_page(width: int) -> list[Line]:
    """Keys, and what is to be seen."""
    lines = [line((f"{key:>9}  ", "bold"), f"{what:7} {how}") for key, what, how in KEYS]
    lines += [(), line(" ", *legend(width))]
    lines += [line((f"{name:>9}  ", "bold"), what) for name, what in EXPLAINED]
    return [fit(one, width) for one in lines]
