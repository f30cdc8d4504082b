"""From a scenario's links to what the nets take: profiles read, changes laid over, checked.

`spec` makes a `LinkSpec` of a link's section; `problems` says beforehand what does not fit. A
profile is what the link is like where its section says nothing; beside a trace the lower rate and
the longer delay hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pddrt.document import Keys, Problem
from pddrt.errors import BadInput
from pddrt.link_fields import Bdp, Link, Ways, each, toward
from pddrt.netem import profiles
from pddrt.netem.jitter import SHAPES
from pddrt.netem.losses import BurstLoss
from pddrt.netem.net import LinkSpec
from pddrt.netem.profiles import NAMED, Profile
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.traces import Segment, Trace
from pddrt.types import Ns
from pddrt.units import format_duration, format_rate

QUEUE_WITHOUT_END = 1 << 62
RANKS = {"kv": 1}
"""With `priority: control`: everything else goes first."""


def ways_of(link: Link) -> list[tuple[str, str]]:
    a, b = link.between
    return list(dict.fromkeys(((a, b), (b, a))))


def spec(name: str, link: Link, folder: Path | None) -> LinkSpec:
    """Of a link without problems; its files are looked for in `folder` first."""
    ways = ways_of(link)
    there = _one_way(name, link, ways[0], folder)
    if len(ways) == 1 or not any(
        isinstance(f, Ways) for f in (link.rate, link.delay, link.profile)
    ):
        return there
    back = _one_way(name, link, ways[1], folder)
    return dataclasses.replace(there, back=back)


def _one_way(name: str, link: Link, way: tuple[str, str], folder: Path | None) -> LinkSpec:
    named = toward(link.profile, *way)
    profile = profiles.load(named, folder) if named is not None else Profile("")
    rate: int | None = toward(link.rate, *way)
    delay = _delay(link, way, profile)
    if rate is None:
        rate = profile.rate
    shape, correlation = profile.shape, profile.correlation
    jitter = _jitter(link, profile)
    if link.jitter is not None:
        correlation = link.jitter.correlation
        shape = profiles.load_shape(link.jitter.shape, folder)
    loss, burst = profile.loss, profile.burst
    if link.loss is not None:
        loss, burst = link.loss.share, link.loss.burst
    trace = _changes(link, rate) if link.changes or link.outages else profile.trace
    if link.changes and rate is not None:
        rate = max([rate, *(change.rate for change in link.changes if change.rate is not None)])
    if trace is not None:  # what a router may expect, before it has seen anything
        rate = trace.peak if rate is None else rate
        least = trace.span("delay")
        delay = delay or (round(least.least) if least else 0)
    tcp = None
    if link.tcp != "none":
        queue = link.queue if link.queue is not None else profile.queue
        tcp = Tcp(
            link.tcp,
            link.streams,
            link.connections == "warm",
            link.send_buffer,
            link.receive_buffer,
            _queue_bytes(queue, rate, trace, 2 * delay),
            link.aqm == "codel",
        )
    weights = {account: n for account, n in link.weights.model_dump().items() if n != 1}
    return LinkSpec(
        name,
        way,
        rate,
        delay,
        jitter,
        shape,
        correlation,
        link.qdisc,
        link.overhead,
        RANKS if link.priority == "control" else {},
        weights,
        trace,
        tcp,
        loss,
        burst,
    )


def _delay(link: Link, way: tuple[str, str], profile: Profile) -> Ns:
    """That of the section, even if that is 0, else the profile's."""
    written: Ns | None = toward(link.delay, *way)
    return profile.delay if written is None else written


def _jitter(link: Link, profile: Profile) -> Ns:
    return profile.jitter if link.jitter is None else link.jitter.deviation


def _queue_bytes(
    queue: int | Bdp | str | None, rate: int | None, trace: Trace | None, round_trip: Ns
) -> int | None:
    if isinstance(queue, str):
        return QUEUE_WITHOUT_END
    if not isinstance(queue, Bdp):
        return queue
    rates = [r for r in (rate, trace.peak if trace else None) if r is not None]
    return max(1, queue.nbytes(min(rates), round_trip)) if rates else QUEUE_WITHOUT_END


def _changes(link: Link, rate: int | None) -> Trace:
    """What `changes` and `outages` come to, one way. Where nothing is said of the rate it is that
    of the link, and 0 in an outage, whatever changes meanwhile."""
    times = {0, *(c.at for c in link.changes)}
    times |= {at for o in link.outages for at in (o.at, o.at + o.duration)}
    segments: list[Segment] = []
    holds = Segment(0, rate)
    changes = sorted(link.changes, key=lambda change: change.at)
    for at in sorted(times):
        while changes and changes[0].at <= at:
            change = changes.pop(0)
            holds = Segment(
                at,
                holds.rate if change.rate is None else change.rate,
                holds.delay if change.delay is None else change.delay,
                holds.loss if change.loss is None else change.loss,
            )
        out = any(o.at <= at < o.at + o.duration for o in link.outages)
        segments.append(holds._replace(start=at, rate=0 if out else holds.rate))
    return Trace(segments, segments[-1].start + 1, repeats=False)


def files(name: str, link: Link, folder: Path | None) -> Iterator[tuple[Path, str, str]]:
    """Files that the link names: where each is, what it is called in a copy, what it is called
    here."""
    names = [] if link.profile is None else each(link.profile)
    names = [n for n in names if n not in NAMED]
    if link.jitter is not None and link.jitter.shape not in SHAPES:
        names.append(link.jitter.shape)
    for number, written in enumerate(dict.fromkeys(names)):
        path = profiles.find(written, folder)
        yield path, f"{name}.link{number or ''}{path.suffix}", written


def with_copies(name: str, link: Link, folder: Path | None) -> Link:
    """The link, with its files called as in a copy."""
    called = {written: copy for _, copy, written in files(name, link, folder)}
    if not called:
        return link
    changed: dict[str, object] = {}
    if isinstance(link.profile, Ways):
        changed["profile"] = Ways(tuple((way, called.get(n, n)) for way, n in link.profile.of))
    elif link.profile is not None:
        changed["profile"] = called.get(link.profile, link.profile)
    if link.jitter is not None:
        shape = called.get(link.jitter.shape, link.jitter.shape)
        changed["jitter"] = link.jitter.model_copy(update={"shape": shape})
    return link.model_copy(update=changed)


def place(link: Link) -> tuple[tuple[str, str], int | None, Ns]:
    """Its sites, its highest rate as far as its section says it, and its least delay."""
    a, b = link.between
    rates = each(link.rate)
    return (a, b), None if None in rates else max(rates), min(each(link.delay or 0))


def facts(link: Link) -> list[str]:
    """The link in a few words, for a line of a table."""

    def of(value: object, form: object) -> str:
        assert callable(form)
        if isinstance(value, Ways):
            return ", ".join(f"{way} {form(one)}" for way, one in value.of)
        return str(form(value))

    found = [] if link.profile is None else [of(link.profile, str)]
    if link.rate is not None:
        found.append(of(link.rate, format_rate))
    elif link.profile is None:
        found.append("no limit of rate")
    if link.delay:
        found.append(of(link.delay, format_duration))
    if link.jitter is not None and link.jitter.deviation:
        found.append(f"jitter {format_duration(link.jitter.deviation)}")
    if link.loss is not None and link.loss.share:
        found.append(f"loss {link.loss.share * 100:.3g} %")
    if link.tcp != "none":
        found.append(link.tcp if link.streams == 1 else f"{link.tcp}, {link.streams} streams")
    return found


# -- what does not fit -----------------------------------------------------------------------------

NEEDS_TCP = {
    "streams": "several connections",
    "connections": "a window that is open",
    "send_buffer": "a window's bound",
    "receive_buffer": "a window's bound",
    "loss": "loss",
    "queue": "a queue that drops",
    "aqm": "a queue that drops",
}


def problems(links: Mapping[str, Link], folder: Path | None) -> Iterator[Problem]:
    for name, link in links.items():
        for keys, text in _of_link(link, folder):
            yield Problem(("links", name, *keys), text)


def _of_link(link: Link, folder: Path | None) -> Iterator[tuple[Keys, str]]:
    yield from _ways_problems(link)
    read, wrong = _read(link, folder)
    yield from wrong
    if link.tcp == "none":
        default = Link(between=("a", "b"))
        for field, what in NEEDS_TCP.items():
            if getattr(link, field) != getattr(default, field):
                yield (field,), f"found {what} with tcp: none; needed: tcp: reno | cubic | bbr"
        for index, change in enumerate(link.changes):
            if change.loss:
                yield (
                    ("changes", index, "loss"),
                    ("found loss with tcp: none; needed: tcp: reno | cubic | bbr"),
                )
        if any(p.loss or (p.trace is not None and p.trace.losses) for p in read):
            yield (
                ("profile",),
                ("found one that loses segments with tcp: none; needed: tcp: reno | cubic | bbr"),
            )
    if link.loss is not None and link.loss.burst is not None and link.loss.share:
        try:
            BurstLoss(link.loss.share, link.loss.burst, "")
        except ValueError:
            yield (
                ("loss", "burst"),
                (
                    f"found {link.loss.burst:g}; allowed: so short that losses remain "
                    f"{link.loss.share * 100:g} %"
                ),
            )
    weighted = any(n != 1 for n in link.weights.model_dump().values())
    qdisc = link.qdisc or ("fair" if link.tcp == "none" else "fifo")
    if weighted and qdisc == "fifo":
        yield ("weights",), "found weights with qdisc: fifo; needed: qdisc: fair"
    if not wrong:
        yield from _no_room(link, read)
    if (link.changes or link.outages) and any(p.trace is not None for p in read):
        field = "changes" if link.changes else "outages"
        yield (field,), "found beside a profile that changes by itself; allowed: one of the two"
    twice = [a for a, b in itertools.pairwise(sorted(c.at for c in link.changes)) if a == b]
    if twice:
        yield ("changes",), f"found two at {format_duration(twice[0])}; allowed: one at a time"


def _no_room(link: Link, read: list[Profile]) -> Iterator[tuple[Keys, str]]:
    """A delay of 0, some way, with a jitter that would have to shorten it."""
    profiles_by_name = dict(
        zip([] if link.profile is None else each(link.profile), read, strict=True)
    )
    for way in ways_of(link):
        profile = profiles_by_name.get(toward(link.profile, *way), Profile(""))
        jitter = _jitter(link, profile)
        if not jitter or _delay(link, way, profile):
            continue
        if toward(link.delay, *way) is None and profile.trace is not None and profile.trace.delays:
            continue
        found = format_duration(jitter)
        if link.jitter is None and link.delay is not None:
            yield (
                ("delay",),
                f"found 0 beside the profile's jitter of {found}, which has no room in it; "
                "allowed: above zero",
            )
        else:
            text = f"found {found} with a delay of 0, which has no room for it; allowed there: 0"
            yield ("jitter",), text
        return


def _ways_problems(link: Link) -> Iterator[tuple[Keys, str]]:
    wanted = sorted(">".join(way) for way in ways_of(link))
    for field in ("rate", "delay", "profile"):
        value = getattr(link, field)
        if isinstance(value, Ways) and (found := [key for key, _ in value.of]) != wanted:
            yield (field,), f"found {', '.join(found)}; allowed: {' and '.join(wanted)}"


def _read(link: Link, folder: Path | None) -> tuple[list[Profile], list[tuple[Keys, str]]]:
    """The profiles of the link, and what is wrong with its files."""
    found: list[Profile] = []
    wrong: list[tuple[Keys, str]] = []
    named: Iterable[str] = [] if link.profile is None else each(link.profile)
    for name in named:
        try:
            found.append(profiles.load(name, folder))
        except BadInput as error:
            wrong += [(("profile",), text) for text in error.problems]
    if link.jitter is not None:
        try:
            profiles.load_shape(link.jitter.shape, folder)
        except BadInput as error:
            wrong += [(("jitter", "shape"), text) for text in error.problems]
    return found, wrong
