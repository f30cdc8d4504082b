"""The Perfetto trace: what is in it, that it nests, and that its times are exact."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pddrt import recording
from pddrt import trace as ev
from pddrt.metrics import Recorder
from pddrt.report.export import MOST, REQUESTS, Exporter, _by_name
from pddrt.report.timeline import Timeline
from pddrt.trace import Event

from .recordings import lines

Traced = list[dict[str, Any]]


def exported(
    folder: Path, most: Mapping[str, int] = MOST, until: int | None = None
) -> tuple[dict[str, Any], Exporter]:
    """The trace of a run, numbers as they stand in the file; of its first `until` events."""
    read = recording.opened(folder)
    recorder, timeline, out = Recorder(read.roles()), Timeline(), io.StringIO()
    exporter = Exporter(out.write, recorder, timeline, most)
    for number, event in enumerate(read.events()):
        if number == until:
            break
        for listener in (recorder, timeline, exporter):
            listener(event)
    exporter.close()
    return json.loads(out.getvalue(), parse_float=Decimal), exporter


def events(folder: Path, kind: type[Event]) -> list[Any]:
    return [e for e in recording.opened(folder).events() if isinstance(e, kind)]


@pytest.fixture(params=["storm", "rounds"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def of(trace: dict[str, Any], *phases: str) -> Traced:
    return [e for e in trace["traceEvents"] if e["ph"] in phases]


def named(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of(trace, "M") if e["name"] == kind}


def ended(e: dict[str, Any]) -> Decimal:
    total: Decimal = e["ts"] + e["dur"]
    return total


def assert_nested(slices: Traced) -> None:
    """In Perfetto's order: by time, equals in the order of the file."""
    stack: Traced = []
    for e in sorted(slices, key=lambda e: e["ts"]):
        while stack and ended(stack[-1]) <= e["ts"]:
            stack.pop()
        assert not stack or ended(e) <= ended(stack[-1]), f"{e} does not lie in {stack[-1]}"
        stack.append(e)


def test_slices_of_a_thread_nest(folder: Path) -> None:
    threads: dict[tuple[int, int], Traced] = defaultdict(list)
    for e in of(exported(folder)[0], "X"):
        assert e["dur"] >= 0
        threads[e["pid"], e["tid"]].append(e)
    assert len(threads) >= 5
    for slices in threads.values():
        assert_nested(slices)


@pytest.mark.parametrize("until", [0, 40, 333, 600])
def test_a_trace_that_stops_anywhere_nests_and_says_what_it_did_not_see(
    storm: Path, until: int
) -> None:
    trace, _ = exported(storm, until=until)
    threads: dict[tuple[int, int], Traced] = defaultdict(list)
    for e in of(trace, "X"):
        threads[e["pid"], e["tid"]].append(e)
    for slices in threads.values():
        assert_nested(slices)
    roots = [e for e in of(trace, "X") if "pipeline" in e["args"]]
    sent = [e for e in list(recording.opened(storm).events())[:until]
            if isinstance(e, ev.RequestSent)]  # fmt: skip
    assert sorted(e["name"] for e in roots) == sorted(e.request for e in sent)
    if until == 333:
        assert any(e["args"]["end"] == "not seen" for e in roots)


def test_each_request_is_a_thread_and_lies_in_its_own_slice(folder: Path) -> None:
    trace, _ = exported(folder)
    threads = {key: name for key, name in named(trace, "thread_name").items() if key[0] == REQUESTS}
    assert sorted(threads.values()) == sorted(row["id"] for row in lines(folder))
    slices: dict[tuple[int, int], Traced] = defaultdict(list)
    for e in of(trace, "X"):
        if e["pid"] == REQUESTS:
            slices[e["pid"], e["tid"]].append(e)
    for key, name in threads.items():
        whole, *parts = slices[key]
        assert whole["name"] == name
        assert all(whole["ts"] <= e["ts"] and ended(e) <= ended(whole) for e in parts)


def test_requests_and_sites_stand_in_the_order_of_their_names(storm: Path) -> None:
    trace, _ = exported(storm)
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"]
        for e in of(trace, "M")
        if e["name"] == "thread_sort_index" and e["pid"] == REQUESTS
    }
    names = [named(trace, "thread_name")[key] for key in sorted(order, key=lambda k: order[k])]
    assert names == sorted(names, key=lambda name: [int(n) for n in name[1:].split(".")])
    of_pid = {e["pid"]: e["args"]["sort_index"]
              for e in of(trace, "M") if e["name"] == "process_sort_index"}  # fmt: skip
    processes = {name: of_pid[pid] for (pid, _), name in named(trace, "process_name").items()}
    assert sorted(processes, key=lambda name: processes[name]) == [
        "requests", "faults", "site a", "site b",
    ]  # fmt: skip
    assert sorted([("s10.0", 1), ("s2.0", 2), ("md", 3)], key=_by_name)[1:] == [
        ("s2.0", 2),
        ("s10.0", 1),
    ]


def test_legs_are_as_long_as_the_records_say_to_the_nanosecond(folder: Path) -> None:
    trace, _ = exported(folder)
    names, lengths = named(trace, "thread_name"), defaultdict(dict)  # type: ignore[var-annotated]
    for e in of(trace, "X"):
        if e["pid"] == REQUESTS:
            lengths[names[e["pid"], e["tid"]]][e["name"]] = e["dur"]
    compared = 0
    for row in json.loads(
        "[" + ",".join((folder / "requests.jsonl").read_text().splitlines()) + "]",
        parse_float=Decimal,
    ):
        if row["ttft_legs"] is None:
            continue
        told = lengths[row["id"]]
        assert told["time to first token"] == row["ttft_s"] * 1_000_000
        for leg, length in row["ttft_legs"].items():
            assert told.get(leg.replace("_", " "), 0) == length * 1_000_000
        compared += 1
    assert compared > 4


def test_sites_are_processes_and_instances_and_links_are_their_threads(storm: Path) -> None:
    trace, _ = exported(storm)
    processes = {pid: name for (pid, _), name in named(trace, "process_name").items()}
    assert sorted(processes.values()) == ["faults", "requests", "site a", "site b"]
    threads = defaultdict(set)
    for (pid, _), name in named(trace, "thread_name").items():
        threads[processes[pid]].add(name)
    assert {"p-0 prefill", "p-1 prefill", "rld-0 relay", "rld-1 relay"} <= threads["site a"]
    assert {"rdma", "wan a>b"} <= threads["site a"]
    assert threads["site b"] == {"md-0 main", "md-1 main"}
    sorted_by = {e["tid"] for e in of(trace, "M") if e["name"] == "thread_sort_index"}
    assert sorted_by == {tid for _, tid in named(trace, "thread_name")}


def test_each_step_is_a_slice_with_what_was_in_it(rounds: Path) -> None:
    trace, _ = exported(rounds)
    thread = {name: key for key, name in named(trace, "thread_name").items()}["md0 main"]
    shown = [
        e for e in of(trace, "X") if (e["pid"], e["tid"]) == thread and "sequences" in e["args"]
    ]
    steps = [e for e in events(rounds, ev.Step) if e.instance == "md0"]
    assert [(e["ts"], e["dur"]) for e in shown] == [
        (Decimal(s.start_ns) / 1000, Decimal(s.t - s.start_ns) / 1000) for s in steps
    ]
    extends = [e for e in shown if "extend" in e["name"]]
    assert extends
    assert all("[" in e["args"]["of"][0] for e in extends), "whose ids, and which"


def test_an_arrow_for_each_round_of_a_handoff(rounds: Path) -> None:
    trace, _ = exported(rounds)
    names = named(trace, "thread_name")
    starts, ends = ({e["id"]: e for e in of(trace, phase)} for phase in "sf")
    sent = events(rounds, ev.HandoffSent)
    assert len(sent) > 3
    assert len(starts) == len(sent)
    for arrow, e in ends.items():
        assert starts[arrow]["ts"] < e["ts"]
        assert names[starts[arrow]["pid"], starts[arrow]["tid"]] == "rld0 relay"
        assert names[e["pid"], e["tid"]] == "md0 main"
    assert set(ends) <= set(starts)
    assert [e["ts"] for e in starts.values()] == [Decimal(e.t) / 1000 for e in sent]


def test_every_arrow_is_bound_to_a_slice_at_its_own_time(folder: Path) -> None:
    trace, _ = exported(folder)
    heads = {(e["pid"], e["tid"], e["ts"]) for e in of(trace, "X") if e["dur"] == 0}
    for e in of(trace, "s", "f"):
        assert (e["pid"], e["tid"], e["ts"]) in heads


def test_faults_and_what_they_cut_short_are_shown(storm: Path) -> None:
    trace, _ = exported(storm)
    (crash,) = events(storm, ev.InstanceCrashed)
    down = [e for e in of(trace, "X") if e["name"] == "down"]
    assert [e["ts"] for e in down] == [Decimal(crash.t) / 1000]
    faults = [e for e in of(trace, "b") if e["cat"] == "fault"]
    assert sorted(e["name"] for e in faults) == sorted(
        e.do for e in events(storm, ev.FaultInjected)
    )


def test_a_large_run_is_bounded_and_says_what_it_left_out(storm: Path) -> None:
    few = {"steps": 20, "transfers": 3, "requests": 5, "handoff rounds": 2}
    trace, exporter = exported(storm, few)
    steps, rows = len(events(storm, ev.Step)), lines(storm)
    assert exporter.left_out["steps"] == steps - 20
    assert exporter.left_out["requests"] == len(rows) - 5
    assert trace["otherData"]["left_out"] == dict(exporter.left_out)
    assert len([e for e in of(trace, "X") if "sequences" in e["args"]]) == 20
    assert len(of(trace, "s")) == 2
    full, exporter = exported(storm)
    assert full["otherData"]["left_out"] == {} == dict(exporter.left_out)
