"""A run folder read again, whatever is left of it.

A run may have been killed, a disk full, a copy cut off at any byte. What is whole is read, and what
is not is said in words (`Recording.missing`); nothing is guessed. A line is taken or left as a
whole. Events of kinds that this version does not know are skipped and counted: the folder may come
from a later one.

The events stream: they are never all in memory. Times are exact: a file shows nine decimals of
seconds, and a double keeps those of 26 days.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from pddrt import trace as ev
from pddrt.document import shown_path
from pddrt.errors import BadInput
from pddrt.metrics import Recorder
from pddrt.summary import SCHEMA, request_json, summary
from pddrt.trace import BESIDE, Event, dumps
from pddrt.types import SECOND, Ns
from pddrt.units import parse_duration

Json = dict[str, Any]

FILES = ("scenario.yaml", "events.jsonl", "requests.jsonl", "summary.json")
LEFT_OUT = frozenset(
    {"Accepted", "PagesTaken", "PageTable", "PagesKept", "PagesFreed", "PagesEvicted"}
)
"""Kinds that are counted only: most of a file's bytes, and nothing that a report shows."""

TAIL = 1 << 18
"""Bytes of events.jsonl in which a last event stands."""

ROW = frozenset(
    [
        "id",
        "pipeline",
        "instances",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "finish_reason",
        "ttft_s",
        "ttft_legs",
        "ttst_s",
        "tpot_s",
        "itl_max_s",
        "e2e_s",
        "token_source",
        "token_times_s",
        "handoff",
        "wan_bytes",
        "slo_met",
    ]
)
"""What a line of requests.jsonl must have to be one."""


@dataclass(slots=True)
class Recording:
    """`missing`: what the folder lacks, a sentence each. `counts`: events by kind; `unknown`: of
    kinds that are skipped.
    """

    folder: Path
    missing: list[str] = field(default_factory=list)
    scenario: Json = field(default_factory=dict)
    scenario_text: str = ""
    summary: Json = field(default_factory=dict)
    rows: dict[str, Json] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.scenario.get("name") or self.folder.name)

    def slo(self, which: str) -> Ns | None:
        """`ttft` or `tpot`, as the scenario asks; None where it does not, or nobody knows."""
        asked = self.scenario.get("slo")
        try:
            return parse_duration(asked[which]) if isinstance(asked, dict) else None
        except (KeyError, ValueError, BadInput):
            return None

    def delay(self, link: str) -> Ns:
        """One way, of a link; 0 where nobody knows."""
        links = self.scenario.get("links")
        try:
            return parse_duration(links[link]["delay"]) if isinstance(links, dict) else 0
        except (KeyError, TypeError, ValueError, BadInput):
            return 0

    @property
    def home(self) -> str | None:
        """The gateway's site; None where nobody knows."""
        gateway = self.scenario.get("gateway")
        site = gateway.get("site") if isinstance(gateway, dict) else None
        return site if isinstance(site, str) else None

    # -- events ------------------------------------------------------------------------------------

    def end(self) -> Ns | None:
        """When the last whole event happened, read from the end of the file; None where nobody
        knows.
        """
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return None
        found = (decoded(line) for line in reversed(lines))
        return next((event.t for event in found if isinstance(event, Event)), None)

    def roles(self) -> dict[str, str]:
        """Roles by instance, as the events name them."""
        found = {}
        for line in self._lines():
            if line.startswith(b'{"event":"InstanceStarted"'):
                event = decoded(line)
                if isinstance(event, ev.InstanceStarted):
                    found[event.instance] = event.role
        return found

    def events(self, left_out: Collection[str] = LEFT_OUT) -> Iterator[Event]:
        """Typed events in the file's order, but for `left_out`. Says what is missing at its end, so
        it is to be read once and to the end.
        """
        path = self.folder / "events.jsonl"
        if not path.is_file():
            self.missing.append(
                "events.jsonl is not there: no timelines, no links, no instances over time"
            )
            return
        digest, broken, first_broken, number, last = hashlib.blake2b(digest_size=16), 0, 0, 0, 0
        for number, line in enumerate(self._lines(), 1):
            digest.update(line)
            if not line.endswith(b"\n"):
                self.missing.append(
                    f"events.jsonl is cut off in line {number:,}, after {last / SECOND:,.3f} s"
                )
                break
            event = decoded(line, left_out)
            if isinstance(event, Event):
                self.counts[type(event).__name__] += 1
                last = max(last, event.t)
                yield event
            elif event is None:
                broken, first_broken = broken + 1, first_broken or number
            elif event in left_out:
                self.counts[event] += 1
            else:
                self.unknown[event] += 1
        self._judge_events(number, last, digest.hexdigest())
        if broken:
            self.missing.append(
                f"events.jsonl: {broken:,} line(s) are no events of this format, the first is line "
                f"{first_broken:,}"
            )
        if self.unknown:
            kinds = ", ".join(f"{kind} ({n:,})" for kind, n in self.unknown.most_common(8))
            self.missing.append(f"events of kinds that are not known here were skipped: {kinds}")

    def _lines(self) -> Iterator[bytes]:
        path = self.folder / "events.jsonl"
        if path.is_file():
            with path.open("rb") as file:
                yield from file

    def _judge_events(self, lines: int, last: Ns, digest: str) -> None:
        """Whether the file is what the run wrote, as far as that can be told."""
        told = any("cut off" in text and "events.jsonl" in text for text in self.missing)
        written = self.summary.get("digest")
        if told or digest == written:
            return
        if written is not None and self.counts["LinkTotal"]:
            self.missing.append("events.jsonl is not the file that the run wrote (its digest)")
        elif not self.counts["LinkTotal"]:
            self.missing.append(
                f"events.jsonl ends at {last / SECOND:,.3f} s, after {lines:,} lines, before the "
                "run had ended"
            )

    # -- what follows from them --------------------------------------------------------------------

    def complete(self, recorder: Recorder) -> None:
        """With all events in `recorder`: the rows and the summary that the folder lacks."""
        slos = (self.slo("ttft"), self.slo("tpot"))
        lacking = [r for name, r in recorder.requests.items() if name not in self.rows]
        total = self.summary.get("requests", {}).get("total")
        for record in lacking:
            self.rows[record.id] = json.loads(dumps(request_json(record, *slos)))
        if lacking:
            self.missing.append(
                f"requests.jsonl lacks {len(lacking):,} request(s): they are taken from the events"
            )
        if total is not None and len(self.rows) < total:
            self.missing.append(f"{total - len(self.rows):,} of {total:,} requests are lost")
        if not self.summary:
            self.summary = json.loads(dumps(summary(recorder, *slos, {})))
            if self.counts:
                seen = f"{len(recorder.requests):,} of {len(self.rows):,} requests"
                self.missing.append(f"the summary is computed from the events there are: {seen}")


def opened(folder: Path, *, rows: bool = True) -> Recording:
    """The small files; without `rows` not requests.jsonl, which may be large. Raises BadInput where
    the folder is no run.
    """
    there = [name for name in FILES if (folder / name).is_file()]
    if not {"events.jsonl", "requests.jsonl", "summary.json"} & set(there):
        raise BadInput(
            f"{shown_path(folder)}: not a run folder; expected {', '.join(FILES[1:])} in it"
        )
    recording = Recording(folder)
    _read_scenario(recording)
    _read_summary(recording)
    if rows:
        _read_rows(recording)
    return recording


def _read_scenario(recording: Recording) -> None:
    path = recording.folder / "scenario.yaml"
    if not path.is_file():
        recording.missing.append("scenario.yaml is not there")
        return
    recording.scenario_text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = yaml.safe_load(recording.scenario_text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        recording.scenario = {str(key): held for key, held in value.items()}
    # A run writes all fields, and faults last; a cut may leave good YAML.
    if recording.scenario.get("faults") is None or not recording.scenario_text.endswith("\n"):
        recording.missing.append("scenario.yaml is cut off")


def _read_summary(recording: Recording) -> None:
    path = recording.folder / "summary.json"
    if not path.is_file():
        recording.missing.append("summary.json is not there: the run did not end, or was copied so")
        return
    value = _object(path.read_bytes())
    if value is None:
        recording.missing.append("summary.json is cut off: verdicts and provenance are lost")
    elif value.get("schema") != SCHEMA:
        recording.missing.append(
            f"summary.json has schema {value.get('schema')!r}; this version reads {SCHEMA}"
        )
    else:
        recording.summary = value


def _read_rows(recording: Recording) -> None:
    path = recording.folder / "requests.jsonl"
    if not path.is_file():
        recording.missing.append("requests.jsonl is not there")
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _object(line)
            if row is None or not row.keys() >= ROW or not isinstance(row["id"], str):
                cut = "is cut off in" if not line.endswith(b"\n") else "is broken in"
                recording.missing.append(f"requests.jsonl {cut} line {number:,}")
            else:
                recording.rows[row["id"]] = row


def _object(text: bytes) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# -- from a line to an event -----------------------------------------------------------------------

Check = Callable[[Any], Any]
"""Returns the value as a field holds it; raises TypeError or ValueError for what does not fit."""

_NAME_AT = len(b'{"event":"')


def decoded(line: bytes, left_out: Collection[str] = LEFT_OUT) -> Event | str | None:
    """A typed event; the kind's name where it is not known or left out; None for what is none."""
    name = line[_NAME_AT : line.find(b'"', _NAME_AT)]
    if line.startswith(b'{"event":"') and name.decode(errors="replace") in left_out:
        return name.decode()
    value = _object(line)
    return None if value is None else typed(value)


def typed(value: Json) -> Event | str | None:
    """As `decoded`, of a line that was parsed; nothing is left out."""
    kind = value.get("event")
    if not isinstance(kind, str):
        return None
    form = _FORMS.get(kind)
    if form is None:
        return kind
    try:
        given = {name: check(value[key]) for name, key, check in form.fields if key in value}
        event: Event = form.kind(**given)
        return event
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class _Form:
    """How events of a kind are read: (field, key in the file, check) of each field."""

    kind: Any
    fields: tuple[tuple[str, str, Check], ...]


def _form(kind: Any) -> _Form:
    hints = get_type_hints(kind)
    rows = []
    for f in fields(kind):
        # The sampling of a request is not read: its form may grow, and no report shows it.
        if f.metadata == BESIDE or f.name == "sampling":
            continue
        timed = f.name == "t" or f.name.endswith("_ns")
        key = f.name.removesuffix("_ns") + "_s" if timed else f.name
        check = _ns(hints[f.name]) if timed else _check(hints[f.name])
        rows.append((f.name, key, check))
    return _Form(kind, tuple(rows))


def _ns(hint: Any) -> Check:
    nullable = type(None) in get_args(hint)

    def check(value: Any) -> Ns | None:
        if value is None and nullable:
            return None
        if type(value) is not float and type(value) is not int:
            raise TypeError
        return round(value * SECOND)

    return check


def _check(hint: Any) -> Check:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (types.UnionType, Union):
        one = _check(next(a for a in inner if a is not type(None)))
        return lambda value: None if value is None else one(value)
    if origin is tuple and inner[-1] is Ellipsis:
        each = _check(inner[0])
        return lambda value: tuple(each(v) for v in _list(value))
    if origin is tuple:
        checks = tuple(map(_check, inner))
        return lambda value: tuple(c(v) for c, v in zip(checks, _list(value), strict=True))

    def plain(value: Any) -> Any:
        if type(value) is not hint:
            raise TypeError
        return value

    return plain


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


_FORMS = {
    kind.__name__: _form(kind)
    for kind in vars(ev).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
