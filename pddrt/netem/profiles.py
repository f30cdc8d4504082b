"""Profiles: what a wide-area link is like, by a name or from a file.

The named ones are of the usual size of such links and made up, but for `public-internet`, whose
rate and round trip were published for a cross-datacenter deployment. Light in fibre takes 4.9 us a
km, and cables are half as long again as the map says: that is where the delays come from.

`load` takes a name, or a file: a profile in YAML, a trace in CSV or as mahimahi has it. A file is
known by its ending (.yaml, .yml, .csv), any other one is mahimahi's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pddrt import document, sections
from pddrt.errors import BadInput
from pddrt.link_fields import Bdp, ProfileFields
from pddrt.netem.jitter import LOG_NORMAL, SHAPES, Shape, parse_table
from pddrt.netem.trace_files import parse_csv, parse_mahimahi
from pddrt.netem.traces import Segment, Span, Trace
from pddrt.types import MS, SECOND, US, Ns
from pddrt.units import format_duration, format_rate

MAX_FILE = 256 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """`rate` in bytes/s, None: no limit. `queue` in bytes, of the BDP, "unlimited", or None for one
    BDP."""

    about: str
    rate: int | None = None
    delay: Ns = 0
    jitter: Ns = 0
    shape: Shape = LOG_NORMAL
    correlation: Ns | None = None
    loss: float = 0.0
    burst: float | None = None
    queue: int | Bdp | str | None = None
    trace: Trace | None = None

    def facts(self) -> list[tuple[str, str]]:
        """What it is, in words: name of a figure, value."""
        found: list[tuple[str, str]] = []
        trace = self.trace
        span = trace.span("rate") if trace else None
        if span:
            found.append(("rate", _span(span, lambda v: format_rate(round(v), 4) if v else "0")))
        elif self.rate is not None:
            found.append(("rate", format_rate(self.rate)))
        span = trace.span("delay") if trace else None
        if span:
            found.append(("delay", _span(span, lambda v: format_duration(round(v), 4))))
        elif self.delay:
            found.append(("delay", f"{format_duration(self.delay)} one way"))
        if self.jitter:
            kind = f"{format_duration(self.jitter)}, {self.shape.name}"
            if self.correlation:
                kind += f", correlated over {format_duration(self.correlation)}"
            found.append(("jitter", kind))
        span = trace.span("loss") if trace else None
        if span:
            found.append(("loss", _span(span, lambda v: f"{v * 100:.4g} %")))
        elif self.loss:
            rows = f", in rows of {self.burst:g}" if self.burst else ""
            found.append(("loss", f"{self.loss * 100:.4g} %{rows}"))
        if trace is not None:
            then = "then from the beginning" if trace.repeats else "then as at its end"
            found.append(("duration", f"{format_duration(trace.end, 6)}, {then}"))
            found.append(("segments", f"{len(trace.segments):,}"))
        return found

    def figures(self) -> dict[str, object]:
        """What it is, in numbers with their units in the names. What varies is {min, mean, max};
        what it does not say is absent."""
        found: dict[str, object] = {"about": self.about}
        plain: dict[str, int | float | None] = {
            "rate": self.rate, "delay": self.delay or None, "loss": self.loss or None
        }  # fmt: skip
        for name, (key, unit) in _UNITS.items():
            span = self.trace.span(name) if self.trace else None
            value = plain[name]
            if span:
                found[key] = {
                    "min": span.least / unit, "mean": span.mean / unit, "max": span.most / unit
                }  # fmt: skip
            elif value is not None:
                found[key] = value / unit
        if self.jitter:
            found["jitter_s"] = self.jitter / SECOND
            found["jitter_shape"] = self.shape.name
            if self.correlation:
                found["jitter_correlation_s"] = self.correlation / SECOND
        if self.loss and self.burst:
            found["loss_burst_segments"] = self.burst
        if isinstance(self.queue, int):
            found["queue_bytes"] = self.queue
        elif isinstance(self.queue, Bdp):
            found["queue_bdp"] = self.queue.times
        if self.trace is not None:
            found["duration_s"] = self.trace.end / SECOND
            found["repeats"] = self.trace.repeats
            found["segments"] = len(self.trace.segments)
        return found

    def lost_in(self, suffix: str) -> list[str]:
        """What a file of this ending has no place for."""
        if suffix in (".yaml", ".yml"):
            return [f"the table of the jitter ({self.shape.name})"] if self.shape.table else []
        lost = []
        trace, csv = self.trace, suffix == ".csv"
        if self.delay and not (csv and trace is not None and trace.delays):
            lost.append(f"the delay ({format_duration(self.delay)})")
        elif not csv and trace is not None and trace.delays:
            lost.append("the delay")
        if self.jitter:
            lost.append(f"the jitter ({format_duration(self.jitter)})")
        if self.loss or (not csv and trace is not None and trace.losses):
            lost.append("the loss")
        if self.queue is not None:
            lost.append("the queue")
        return lost


_UNITS: dict[Literal["rate", "delay", "loss"], tuple[str, int]] = {
    "rate": ("rate_bytes_per_s", 1), "delay": ("delay_s", SECOND), "loss": ("loss_share", 1)
}  # fmt: skip


def _span(span: Span, form: object) -> str:
    assert callable(form)
    return f"min {form(span.least)}, mean {form(span.mean)}, max {form(span.most)}"


def _mobile() -> Trace:
    """A made-up minute on the move: Mbit/s and ms, every 2 s, with two short gaps."""
    rates = (38, 42, 35, 24, 12, 6, 3, 8, 18, 27, 31, 44, 52, 47, 33,
             20, 9, 2, 5, 14, 22, 29, 36, 41, 26, 15, 7, 11, 23, 34)  # fmt: skip
    delays = (32, 31, 33, 38, 47, 60, 80, 62, 45, 38, 35, 31, 30, 31, 34,
              41, 55, 90, 70, 48, 40, 36, 33, 32, 37, 44, 58, 50, 39, 34)  # fmt: skip
    segments: list[Segment] = []
    for i, (rate, delay) in enumerate(zip(rates, delays, strict=True)):
        start = 2 * i * SECOND
        if rate <= 3:  # a handover: nothing for 300 ms
            segments.append(Segment(start, 0, delay * MS))
            start += 300 * MS
        segments.append(Segment(start, rate * 125_000, delay * MS))
    return Trace(segments, 60 * SECOND, repeats=True)


GBIT = 125_000_000
NAMED: dict[str, Profile] = {
    "metro": Profile("two datacenters of one city", 10 * GBIT, 500 * US, 20 * US),
    "cross-country": Profile("coast to coast, 4,000 km", 10 * GBIT, 30 * MS, 200 * US),
    "cross-continent": Profile("between continents, 10,000 km", 5 * GBIT, 75 * MS, MS),
    "public-internet": Profile(
        "published: 14.7 Gbit/s at a round trip of 29.75 ms", 14_700_000_000 // 8, 14_875 * US
    ),
    "lossy": Profile(
        "a long path that loses rows of packets now and then", GBIT, 20 * MS, MS, loss=0.001,
        burst=3.0,
    ),
    "mobile": Profile("a minute on the move", delay=30 * MS, jitter=4 * MS, trace=_mobile()),
}  # fmt: skip


def load(name: str, beside: Path | None = None) -> Profile:
    """A named profile, or one from a file; relative files are looked for in `beside`, then here.
    Raises BadInput with file and line."""
    if name in NAMED:
        return NAMED[name]
    path = find(name, beside)
    text = _text(path, name)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _from_yaml(text, path)
    try:
        trace = parse_csv(text) if path.suffix.lower() == ".csv" else parse_mahimahi(text)
    except ValueError as error:
        raise BadInput(f"{document.shown_path(path)}: {error}") from None
    return Profile(path.name, trace=trace)


def find(name: str, beside: Path | None) -> Path:
    path = Path(name).expanduser()
    if beside is not None and (beside / path).is_file():
        return beside / path
    return path


def _text(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > MAX_FILE:
            raise BadInput(f"{document.shown_path(path)}: larger than {MAX_FILE >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{document.shown_path(path)}: this is no text in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no such file"
        raise BadInput(f"{sections.unknown_name(name, NAMED)}, or a file ({reason})") from None


def load_shape(name: str, beside: Path | None = None) -> Shape:
    """One of `jitter.SHAPES`, or a table of netem's from a file. Raises BadInput."""
    if name in SHAPES:
        return Shape(name)
    path = find(name, beside)
    if not path.is_file():
        raise BadInput(f"{sections.unknown_name(name, SHAPES)}, or a .dist file (no such file)")
    try:
        return parse_table(_text(path, name), path.name)
    except ValueError as error:
        raise BadInput(f"{document.shown_path(path)}: {error}") from None


def _from_yaml(text: str, path: Path) -> Profile:
    written = document.parse(text, document.shown_path(path))
    checked = sections.check(written, ProfileFields)
    problems = [*written.problems, *checked.problems]
    if problems or checked.model is None:
        raise BadInput(written.lines(problems))
    fields = checked.model
    profile = Profile(fields.about or path.name, fields.rate, fields.delay, queue=fields.queue)
    if fields.jitter is not None:
        shape = load_shape(fields.jitter.shape, path.parent)
        profile = dataclasses.replace(
            profile, jitter=fields.jitter.deviation, shape=shape,
            correlation=fields.jitter.correlation,
        )  # fmt: skip
    if fields.loss is not None:
        profile = dataclasses.replace(profile, loss=fields.loss.share, burst=fields.loss.burst)
    if fields.segments:
        segments: list[Segment] = []
        end: Ns = 0
        for part in fields.segments:
            rate = fields.rate if part.rate is None else part.rate
            segments.append(Segment(end, rate, part.delay, part.loss))
            end += part.duration
        try:
            trace = Trace(segments, end, fields.repeat)
        except ValueError as error:
            raise BadInput(f"{written.where(('segments',))}: segments: {error}") from None
        profile = dataclasses.replace(profile, trace=trace)
    return profile


def dump(profile: Profile) -> str:
    """A profile file that loads to an equal one, but for a jitter's table, which has its own."""
    import yaml

    data: dict[str, object] = {"about": profile.about}
    if profile.rate is not None:
        data["rate"] = format_rate(profile.rate)
    if profile.delay:
        data["delay"] = format_duration(profile.delay)
    if profile.jitter:
        jitter: dict[str, str] = {
            "deviation": format_duration(profile.jitter), "shape": profile.shape.name
        }  # fmt: skip
        if profile.correlation:
            jitter["correlation"] = format_duration(profile.correlation)
        data["jitter"] = jitter
    if profile.loss:
        data["loss"] = {"share": f"{profile.loss * 100:.12g} %"} | (
            {"burst": profile.burst} if profile.burst else {}
        )
    if (trace := profile.trace) is not None:
        data["repeat"] = trace.repeats
        ends = [*(s.start for s in trace.segments[1:]), trace.end]
        data["segments"] = [
            {"for": format_duration(end - s.start)}
            | ({} if s.rate is None else {"rate": format_rate(s.rate) if s.rate else "0"})
            | ({} if s.delay is None else {"delay": format_duration(s.delay)})
            | ({} if s.loss is None else {"loss": f"{s.loss * 100:.12g} %"})
            for s, end in zip(trace.segments, ends, strict=True)
        ]
    return str(yaml.safe_dump(data, sort_keys=False, width=100))
