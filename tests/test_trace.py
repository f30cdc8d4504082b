"""The event log: every event is one line of JSON, written soon, counted, and forgotten."""

from __future__ import annotations

import contextlib
import io
import json
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from pddrt import trace as ev
from pddrt.trace import BESIDE, CHUNK, FLUSH_TIME, WINDOW, Event, Seconds, Trace, dumps, to_line
from pddrt.types import SECOND

KINDS = [
    kind
    for kind in vars(ev).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]
STRINGS = ("", "s0.0", 'é"\n\\ \x01 </x> \u2028')
NUMBERS = (0, 5, -3, 123_456_789_012)


def values(hint: Any) -> tuple[Any, ...]:
    """Some for a field of that type: the first two are the extremes of what may be."""
    inner = get_args(hint)
    if hint is str:
        return STRINGS
    if hint is int:
        return NUMBERS
    if hint is bool:
        return (True, False)
    if get_origin(hint) is types.UnionType:
        return (None, *values(inner[0]))
    if get_origin(hint) is tuple and inner[-1] is Ellipsis:
        of = values(inner[0])
        return ((), (of[-1],), of)
    if get_origin(hint) is tuple:
        return tuple(zip(*(values(part)[:2] for part in inner), strict=True))
    return (0, 0.5, True, "x", (1, ("y",)), None)


def samples(kind: type[Event]) -> Iterator[Event]:
    """Events in which each value of each field occurs."""
    hints = get_type_hints(kind)
    named = [f.name for f in fields(kind) if f.metadata != BESIDE]
    of = {name: values(hints[name]) for name in named}
    for at in range(max(map(len, of.values()))):
        yield kind(**{name: of[name][at % len(of[name])] for name in named})


def plainly(event: Event) -> str:
    """The line, field by field, by the general encoder."""
    shown: dict[str, Any] = {"event": type(event).__name__, "t_s": Seconds(event.t)}
    for f in fields(event):
        value = getattr(event, f.name)
        if f.name == "t" or f.metadata == BESIDE:
            continue
        timed = f.name.endswith("_ns")
        shown[f.name[:-3] + "_s" if timed else f.name] = (
            Seconds(value) if timed and value is not None else value
        )
    return dumps(shown)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_line_is_the_event_field_by_field(kind: type[Event]) -> None:
    for event in samples(kind):
        line = to_line(event)
        assert line == plainly(event)
        assert "\n" not in line
        json.loads(line)


def freed(t: int) -> Event:
    return ev.Freed(t, "s0.0", "p0", 1)


def test_what_is_written_is_on_the_disk_within_a_second_of_the_run(tmp_path: Path) -> None:
    """For when it is killed: nothing is flushed here, and nothing closed."""
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        trace = Trace(file)
        for t in range(0, 10 * SECOND, SECOND // 4):
            trace.emit(freed(t))
            lines = path.read_text().splitlines()
            assert json.loads(lines[-1])["t_s"] * SECOND > t - FLUSH_TIME
        for _ in range(2 * CHUNK // len(to_line(freed(t)))):
            trace.emit(freed(t))
        assert trace.count - path.read_text().count("\n") < CHUNK // len(to_line(freed(t))) + 1
        trace.flush()
        assert path.read_text().count("\n") == trace.count


def test_the_digest_and_the_file_do_not_depend_on_when_it_was_flushed() -> None:
    often, seldom = io.StringIO(), io.StringIO()
    one, two = Trace(often), Trace(seldom)
    for t in range(0, SECOND, SECOND // 100):
        one.emit(freed(t))
        two.emit(freed(t))
        one.flush()
        assert one.digest
    assert one.digest == two.digest
    assert often.getvalue() == seldom.getvalue() != ""


def test_only_the_latest_events_are_remembered() -> None:
    trace = Trace(log=False)
    for t in range(WINDOW + 10):
        trace.emit(freed(t))
    assert trace.count == WINDOW + 10
    assert len(trace.recent) == WINDOW
    assert [e.t for e in (trace.recent[0], trace.recent[-1])] == [10, WINDOW + 9]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_listeners_hear_an_event_that_cannot_be_written() -> None:
    heard = list[Event]()
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
        trace = Trace(full)
        trace.listen(heard.append)
        trace.emit(freed(0))
        assert trace.error is not None
        trace.emit(freed(2 * SECOND))
    assert heard == [freed(0), freed(2 * SECOND)]
