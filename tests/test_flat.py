"""Nothing grows with what is over: memory is that of what is under way.

Sizes are counted in objects of this program and in bytes that Python gave out, never in the
process's memory. `python -m tests.hour` looks at that, for an hour of virtual traffic.
"""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pddrt import distribution, foresight
from pddrt import trace as ev
from pddrt.invariants import Monitor, Violation
from pddrt.metrics import Recorder, RequestRecord
from pddrt.records import RequestLog
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.summary import Tally, summary
from pddrt.trace import Event, Trace
from pddrt.types import SECOND, Ns

from .cluster import Cluster, one
from .recordings import ROOT, STORMY, lines

ROLES = {"p0": "prefill", "rld0": "relay", "md0": "main"}


# -- a long story told to those who listen ---------------------------------------------------------


def story() -> tuple[list[Event], list[Event]]:
    """What a deployment tells before any request, and what it tells of one, without caches."""
    told = Cluster(caching=False).play([one("x" * 200, 20)]).trace.events
    begin = next(i for i, e in enumerate(told) if isinstance(e, ev.RequestSent))
    rest = [e for e in told[begin:] if not isinstance(e, ev.LinkTotal | ev.PoolChecked)]
    return told[:begin], rest


def again(event: Event, number: int, every: Ns) -> Event:
    """The same of another request, later."""
    name, changes = f"s{number}.0", dict[str, Any]()
    for f in fields(event):
        value = getattr(event, f.name)
        if value == "s0.0":
            changes[f.name] = name
        elif f.name == "spans":
            changes[f.name] = tuple((name, a, b) for _, a, b in value)
        elif f.name == "session":
            changes[f.name] = number
        elif f.name in ("t", "start_ns", "notice_ns"):
            changes[f.name] = value + number * every
    return replace(event, **changes)


def long_story(requests: int) -> Iterator[Event]:
    before, of_one = story()
    yield from before
    for number in range(requests):
        for event in of_one:
            yield again(event, number, 10 * SECOND)


def test_event_log_monitor_and_records_need_no_more_for_a_longer_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25,000 events; the last third adds a few bytes a request, for the order of lines."""
    for module in (distribution, foresight):
        monkeypatch.setattr(module, "EXACT", 50)
    monkeypatch.setattr(foresight, "FINE", 1)
    requests, sizes = 240, list[int]()
    found: list[Violation] = []
    with (tmp_path / "events.jsonl").open("w") as file:
        log, tally = RequestLog(tmp_path / "requests.jsonl", None, None), Tally(None, None)

        def done(record: RequestRecord) -> None:
            log.add(record)
            tally.add(record)

        trace, recorder = Trace(file), Recorder(ROLES, done, keep=5)
        trace.recent = type(trace.recent)(maxlen=500)  # full from the first third on
        monitor = Monitor(found.append, trace.recent, recorder.legs)
        trace.listen(recorder)
        trace.listen(monitor)
        per_request = len(story()[1])
        gc.collect()
        tracemalloc.start()
        try:
            for event in long_story(requests):
                trace.emit(event)
                if trace.count % (requests // 3 * per_request) == 0:
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        recorder.close()
        log.close()
    assert not found
    assert monitor.checked == trace.count > 20_000
    assert len(recorder.requests) == 5
    assert len(lines(tmp_path)) == requests
    assert summary(recorder, None, None, {}, tally)["requests"]["finished"] == requests
    grown = (sizes[-1] - sizes[-2]) / (requests // 3)
    assert grown < 50, f"{grown} bytes a request: {sizes}"


# -- a deployment ----------------------------------------------------------------------------------

SCENARIO = """
name: flat
clock: virtual
model: tiny
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan: {between: [a, b], rate: 20 Mbit/s, delay: 15 ms}
instances:
  p0: {role: prefill, site: a, engine: model, kv_memory: 160 KiB,
       step_time: &t {prefill_tokens_per_s: 4000, decode_step: 9 ms}}
  rld0: {role: relay, site: a, engine: model, kv_memory: 160 KiB, step_time: *t}
  md0: {role: main, site: b, engine: model, kv_memory: 160 KiB, step_time: *t}
pipeline: {policy: pdd, relay_above: 20 ms}
deadline: 20 s
workload: {kind: sessions, sessions: SESSIONS, turns: 2, rate: 1/s, think: 100 ms,
           output_tokens: 8, prompts: random, prompt_tokens: {min: 60, max: 120}}
"""
PLANNED = {"Session", "Turn", "Expected"}
"""What is to be sent is known before, and stays."""


def living(sessions: int, folder: Path) -> Counter[str]:
    """Objects of this program by class, when the last request of a run has ended."""
    run = Run(parse(SCENARIO.replace("SESSIONS", str(sessions)), "flat"), out=folder, keep=5)
    run.prepare()
    found: Counter[str] = Counter()
    ended = 0

    def look(event: Event) -> None:
        nonlocal ended
        ended += isinstance(event, ev.Finished)
        if ended == run.expected_requests and not found:
            run.trace.recent.clear()
            gc.collect()
            found.update(
                f"{type(o).__module__}.{type(o).__qualname__}"
                for o in gc.get_objects()
                if str(type(o).__module__).startswith("pddrt.") and type(o).__name__ not in PLANNED
            )

    run.listen(look)
    run.execute().raise_for_status()
    return found


def test_a_deployment_keeps_nothing_of_requests_that_are_over(tmp_path: Path) -> None:
    """Three times the traffic, for three times as long: as many objects, class by class."""
    short, long = living(70, tmp_path / "short"), living(210, tmp_path / "long")
    assert short.total() > 500, "somebody looked"
    grown = {name: (short[name], n) for name, n in long.items() if n > 1.5 * short[name] + 10}
    assert not grown


# -- what is written is the same -------------------------------------------------------------------


def stormy(folder: Path, keep: int | None) -> Run:
    changes = ("workload.sessions=10", "workload.turns=2", STORMY)
    text = (ROOT / "scenarios" / "faults.yaml").read_text(encoding="utf-8")
    run = Run(parse(text, "faults.yaml", changes), out=folder, keep=keep)
    run.prepare()
    run.execute()
    return run


def test_a_run_that_keeps_no_records_writes_the_same_files(tmp_path: Path) -> None:
    all_kept, none_kept = stormy(tmp_path / "all", None), stormy(tmp_path / "none", 0)
    for name in ("events.jsonl", "requests.jsonl"):
        assert (all_kept.folder / name).read_bytes() == (none_kept.folder / name).read_bytes()
    one, two = (json.loads((r.folder / "summary.json").read_text()) for r in (all_kept, none_kept))
    assert one | {"wall_s": 0} == two | {"wall_s": 0}
    assert one["requests"]["aborted"] > 0
    assert len(all_kept.recorder.requests) == one["requests"]["total"] > 10
    assert not none_kept.recorder.requests


def test_a_summary_of_kept_records_is_that_of_records_added_one_by_one(tmp_path: Path) -> None:
    run = stormy(tmp_path / "all", None)
    slo = run.scenario.slo
    at_once = summary(run.recorder, slo.ttft, slo.tpot, {})
    tally = Tally(slo.ttft, slo.tpot)
    for record in reversed(run.recorder.requests.values()):
        tally.add(record)
    dumped = (ev.dumps(at_once), ev.dumps(summary(run.recorder, slo.ttft, slo.tpot, {}, tally)))
    assert dumped[0] == dumped[1]


def records(*numbers: int) -> list[RequestRecord]:
    return [RequestRecord(f"s{n}.0", n, 0, n * SECOND, number=n) for n in numbers]


def test_requests_are_written_as_they_end_and_stand_in_the_order_of_sending(
    tmp_path: Path,
) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, None, None)
    for record in records(2, 0, 3, 1):
        log.add(record)
    log.flush()
    assert [r["id"] for r in lines(tmp_path)] == ["s2.0", "s0.0", "s3.0", "s1.0"]
    log.close()
    assert [r["id"] for r in lines(tmp_path)] == ["s0.0", "s1.0", "s2.0", "s3.0"]
    assert [p.name for p in tmp_path.iterdir()] == ["requests.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").symlink_to("/dev/full")
    log = RequestLog(tmp_path / "requests.jsonl", None, None)
    for record in records(*range(400)):
        log.add(record)
    assert log.error is not None
    with pytest.raises(OSError, match="No space"):
        log.close()


# -- what is known of those that are gone ----------------------------------------------------------


def told(*more: Callable[[int], Event]) -> list[str]:
    """What the monitor says of a long story, and of these events about its first request."""
    found: list[Violation] = []
    monitor = Monitor(found.append)
    for event in long_story(30):
        monitor(event)
    now = event.t
    for make in more:
        monitor(make(now))
    return [violation.name for violation in found]


def test_a_request_that_is_long_over_is_not_forgotten_altogether() -> None:
    assert told() == []
    gone = "told of a request that is long over, or was never sent"
    ids = (1, 2)
    assert told(lambda t: ev.TokensReceived(t, "s0.0", 20, 22, "M", ids, "")) == [gone]
    assert told(lambda t: ev.Finished(t, "s0.0", "length", 20, "")) == [gone]
    assert told(lambda t: ev.RequestSent(t, "s0.0", 0, 0, "x")) == ["a request sent twice"]
    assert told(lambda t: ev.TokensMade(t, "s0.0", "md0", "M", 220, 221, (1,))) == []
