"""`pddrt inspect` as a user meets it: the table, its filters, moments, walking, and refusals."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pddrt.errors import BadInput
from pddrt.inspection import recorded, stepping
from pddrt.inspection.listing import Requests, lines
from pddrt.trace import request_of

from .commands import Call, Done, called
from .recordings import copied
from .recordings import lines as lines_of
from .recordings import recorded as ran


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*args: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return called(monkeypatch, capsys, "inspect", *args)

    return call


def ids(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[2:]]


# -- the table -------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_request(call: Call, storm: Path) -> None:
    done = call(storm)
    rows = lines_of(storm)
    assert done.code == 0
    assert ids(done.out) == [r["id"] for r in rows]
    head = done.out.splitlines()[0]
    assert re.fullmatch(r"faults  seed \d+  clock virtual  \d+ requests  [\d,]+ events", head)


FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "pipeline = p-rld-md": lambda r: r["pipeline"] == "P-RLD-MD",
    "ttft_s > 100 ms and finish_reason != aborted": lambda r: (
        r["ttft_s"] is not None and r["ttft_s"] > 0.1 and r["finish_reason"] != "aborted"
    ),
    "handoff.ids >= 1": lambda r: (r["handoff"] or {}).get("ids", 0) >= 1,
    "handoff.gap_s = none": lambda r: (r["handoff"] or {}).get("gap_s") is None,
    "ttft_legs.transfer > ttft_legs.prefill": lambda r: (
        r["ttft_legs"] is not None and r["ttft_legs"]["transfer"] > r["ttft_legs"]["prefill"]
    ),
    "not slo_met or turn = 1": lambda r: not r["slo_met"] or r["turn"] == 1,
    "tokens.M > tokens.R": lambda r: r["token_source"].count("M") > r["token_source"].count("R"),
    "instances.main ~ '^md.?1$' and wan_bytes.kv > 10 kB": lambda r: (
        r["instances"]["main"] == "md-1" and r["wan_bytes"]["kv"] > 10_000
    ),
}


@pytest.mark.parametrize("where", FILTERS)
def test_a_filter_takes_what_reading_every_line_takes(
    storm: Path, rounds: Path, where: str
) -> None:
    told_apart = False
    for folder in (storm, rounds):
        rows = lines_of(folder)
        expected = [i for i, row in enumerate(rows) if FILTERS[where](row)]
        assert Requests(recorded.opened(folder)).where(where) == expected
        told_apart |= 0 < len(expected) < len(rows)
    assert told_apart, "or nothing was tried"


@pytest.mark.parametrize(
    "sort", ["ttft_s", "ttft_s:desc", "handoff.ids:desc", "pipeline", "id:asc"]
)
def test_sorting_puts_what_is_missing_last(storm: Path, sort: str) -> None:
    requests = Requests(recorded.opened(storm))
    name, _, way = sort.partition(":")
    values = [requests.values(name)[at] for at in requests.ordered(requests.where(None), sort)]
    there = [v for v in values if v is not None]
    assert values == there + [None] * (len(values) - len(there))
    assert there == sorted(there, reverse=way == "desc")


def test_columns_limit_and_json(call: Call, storm: Path) -> None:
    rows = lines_of(storm)
    done = call(storm, "--columns", "ttft_s,handoff.ids", "--limit", 2)
    assert done.out.splitlines()[1].split() == ["request", "ttft_s", "handoff.ids"]
    assert len(ids(done.out)) == 2
    assert f"2 of {len(rows)} requests; --limit 0 shows all" in done.err
    whole = call(storm, "--json", "--sort", "e2e_s:desc", "--limit", "3")
    there = [r for r in rows if r["e2e_s"] is not None]
    assert json.loads(whole.out) == sorted(there, key=lambda r: -r["e2e_s"])[:3]
    some = call(storm, "--json", "--columns", "turn", "--where", "turn = 1")
    assert json.loads(some.out) == [{"id": r["id"], "turn": 1} for r in rows if r["turn"] == 1]
    fields = call(storm, "--columns", "?").out.split()
    assert "ttft_legs.prefill" in fields
    assert json.loads(call(storm, "--json", "--columns", "?").out) == fields


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_narrow_table_spares_what_can_be_spared(storm: Path, width: int) -> None:
    requests = Requests(recorded.opened(storm))
    shown = list(lines(requests.usual(), requests.where(None), width))
    assert all(len(line) <= max(width, 58) for line in shown)
    for name in ("request", "TTFT", "end"):
        assert name in shown[0].split()
    assert ("hit P/M" in shown[0]) is (width >= 90)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--where", "ttft > 2"], "--where: 'ttft > 2', column 1: .* nearest: ttft_s"),
        (["--where", "ttft_s >"], "column 9: found the end"),
        (["--where", "ttft_s"], "allowed: a condition"),
        (["--sort", "ttft_s:down"], "found 'down' behind the colon; allowed: asc, desc"),
        (["--sort", "gap_s"], "--sort: found 'gap_s', which is no field; nearest: handoff.gap_s"),
        (["--columns", "nothing.at.all"], "--columns: found 'nothing.at.all'"),
        (["--columns", ","], "--columns: found nothing"),
        (["s99.0"], r"no request 's99.0'; there are s"),
        (["--where", "token_source ~ R"], "'token_source', which is no field; nearest: tokens"),
        (["--until", "0"], "--until: found event 0; allowed: 1 to"),
        (["--until", "99999999"], "allowed: 1 to"),
        (["--until", "s0.0:Handof"], "no kind of event; nearest: Handoff"),
        (["--until", "s0.0:Admitted#99"], "there is no Admitted of s0.0 #99"),
        (["--until", "5 bananas"], "a number, a time such as 1.5 s"),
        (["--until", "?"], "allowed: a number"),
        (["s0.0", "--until", "3"], "found a request with"),
        (["--until", "3", "--where", "turn = 1"], "allowed: with the table"),
        (["--replay"], "allowed: with --until or --step"),
        (["--regret", "--step"], "allowed: one"),
        (["--step", "--json"], "allowed: with --until"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(call: Call, storm: Path, args: list[str], message: str) -> None:
    done = call(storm, *args)
    assert (done.code, done.out) == (2, "")
    assert re.search(message, done.err), done.err
    assert done.err.startswith("pddrt: ")


def test_a_cut_folder_opens_and_says_what_is_missing(
    call: Call, storm: Path, tmp_path: Path
) -> None:
    events = (storm / "events.jsonl").read_bytes()
    rows = (storm / "requests.jsonl").read_bytes()
    cut = copied(storm, tmp_path / "cut", events=events[: len(events) // 2 + 7],
                 requests=rows[: len(rows) // 3], summary=None)  # fmt: skip
    done = call(cut)
    assert done.code == 0
    known = {request_of(e["request"]) for e in map(json.loads, events[: len(events) // 2 + 7]
             .rpartition(b"\n")[0].splitlines()) if e["event"] == "RequestSent"}  # fmt: skip
    assert set(ids(done.out)) >= known
    for what in ("summary.json is not there", "requests.jsonl is cut off", "events.jsonl is cut"):
        assert f"missing: {what}" in done.err
    for args in ([], ["--where", "ttft_s > 0"], ["--until", "40"], ["--regret"], ["--violations"],
                 [min(known)]):  # fmt: skip
        assert call(cut, *args).code == 0, args


def test_a_broken_line_is_passed_over_and_told(call: Call, rounds: Path, tmp_path: Path) -> None:
    lines = (rounds / "events.jsonl").read_bytes().splitlines(True)
    at = next(i for i, line in enumerate(lines) if b'"HandoffBegan"' in line)
    lines[at] = lines[at].replace(b'"event"', b'"eve\\', 1)
    broken = copied(rounds, tmp_path / "broken", events=b"".join(lines))
    for args in (["s1.0"], ["--until", str(at + 9)], ["--until", "3.5 s"]):
        done = call(broken, *args)
        assert done.code == 0, done.err
        assert f"line {at + 1:,} is no event of this format" in done.err, args
    assert call(broken, "--regret").code == 0
    walked = call(broken, "--step", "--until", str(at), stdin="n\nq\n")
    assert [n for n, _ in stops(walked.out)] == [at, at + 2]


# -- places ----------------------------------------------------------------------------------------


def test_places_are_numbers_times_and_what_happened(rounds: Path) -> None:
    run = recorded.opened(rounds)
    events = lines_of(rounds, "events.jsonl")
    assert stepping.place(run, "17") == 17
    at = events[499]["t_s"]
    last = max(i for i, e in enumerate(events, 1) if e["t_s"] == at)
    assert stepping.place(run, f"{at:.9f} s") == last
    ready = [i for i, e in enumerate(events, 1)
             if e["event"] == "MainReady" and e["request"] == "s1.0"]  # fmt: skip
    assert stepping.place(run, "s1.0:mainready") == ready[0]
    taken = [i for i, e in enumerate(events, 1) if e["event"] == "HandoffTaken"]
    assert stepping.place(run, "HandoffTaken#3") == taken[2]
    with pytest.raises(BadInput, match=r"no request 's9\.9'"):
        stepping.place(run, "s9.9:Routed")


def test_a_moment_in_words_and_as_json(call: Call, rounds: Path) -> None:
    told = call(rounds, "--until", "s1.0:MainReady")
    assert told.code == 0
    assert re.match(r"event [\d,]+ of [\d,]+  [\d.]+ s  MainReady  rld0  s1.0: learns", told.out)
    assert "handoff: main is ready, and the relay knows" in told.out
    found = json.loads(call(rounds, "--until", "s1.0:MainReady", "--json").out)
    assert found["requests"]["s1.0"]["handoff"]["phase"] == "main is ready, and the relay knows"
    assert found["event"] == stepping.place(recorded.opened(rounds), "s1.0:MainReady")


# -- walking ---------------------------------------------------------------------------------------


def stops(out: str) -> list[tuple[int, str]]:
    """Where a walk stopped: number and kind."""
    found = re.findall(r"^event ([\d,]+) of [\d,]+  [\d.]+ s  (\w+)", out, re.M)
    return [(int(number.replace(",", "")), kind) for number, kind in found]


def test_a_walk_goes_where_it_is_told(call: Call, rounds: Path) -> None:
    events = lines_of(rounds, "events.jsonl")
    commands = "n\nn 3\ns s1.0\np s1.0\np rld0\np wan\ne\nc s1.0:HandoffTaken\n\nq\n"
    done = call(rounds, "--step", "--until", "s1.0:MainReady", stdin=commands)
    assert done.code == 0
    went = stops(done.out)
    first = went[0][0]
    assert [events[n - 1]["event"] for n, _ in went] == [kind for _, kind in went]
    numbers = [n for n, _ in went]
    of_it = [i for i, e in enumerate(events, 1) if "s1.0" in (
        e.get("request"), e.get("owner"), *(who for who, _, _ in e.get("spans", ())))]  # fmt: skip
    taken = next(n for n in of_it if events[n - 1]["event"] == "HandoffTaken")
    follows = min(n for n in of_it if n > first + 4)
    assert numbers == [first, first + 1, first + 4, follows, taken, taken + 1]
    assert "  s1.0  P-RLD-MD p0 > rld0 > md0; " in done.out
    assert "  rld0  relay; pages: " in done.out
    assert json.dumps(events[follows - 1]["event"]) in done.out


def test_mistakes_in_a_walk_do_not_end_it(call: Call, rounds: Path) -> None:
    commands = "zz\nn x\np nobody\ns s99.0\nc 1\nc s0.0:Nothing\n'\nh\nq\n"
    done = call(rounds, "--step", "--until", "9", stdin=commands)
    assert done.code == 0
    assert len(stops(done.out)) == 1
    for told in ("found 'zz'; h tells", "n: found 'x'", "there is no 'nobody' now", "no request",
                 "event 1 is not ahead of 9", "no kind of event", "the next event"):  # fmt: skip
        assert told in done.out, told


def test_a_walk_ends_with_the_run_or_with_its_commands(call: Call, rounds: Path) -> None:
    total = len(lines_of(rounds, "events.jsonl"))
    done = call(rounds, "--step", "--until", str(total - 2), stdin="c\n")
    assert f"that was the last event, {total:,}" in done.out
    assert call(rounds, "--step", stdin="").code == 0
    assert stops(call(rounds, "--step", stdin="").out) == [(1, "RunStarted")]


@pytest.mark.parametrize("command", ["c", "n 99999999", "s s0.0"])
def test_who_goes_too_far_stops_at_the_last_event(call: Call, rounds: Path, command: str) -> None:
    total = len(lines_of(rounds, "events.jsonl"))
    commands = f"{command}\nn\nc\np rld\ne\n"
    done = call(rounds, "--step", "--until", str(total - 2), stdin=commands)
    assert [number for number, _ in stops(done.out)] == [total - 2, total]
    assert "n: this is the last event; q leaves" in done.out
    assert "c: this is the last event; q leaves" in done.out
    assert "p: there is no 'rld' now; nearest: rld0" in done.out
    assert lines_of(rounds, "events.jsonl")[-1]["event"] in done.out.partition("> e\n")[2]


def test_the_same_run_again_is_the_same_to_the_byte(call: Call, rounds: Path) -> None:
    total = len(lines_of(rounds, "events.jsonl"))
    done = call(rounds, "--step", "--replay", "--until", "s1.0:MainReady", stdin="p rld0\np\nc\n")
    assert done.code == 0, done.err
    assert f"replayed: {total:,} events, the same to the byte" in done.out
    assert re.search(r"^live rld0: 2 sequences, 0 waiting for memory; pool", done.out, re.M)
    assert re.search(r"^  s1.0: computed 3,4\d\d of 3,4\d\d known ids", done.out, re.M)
    assert "live gateway: of md0 it thinks that" in done.out
    short = call(rounds, "--replay", "--until", "300")
    assert "replayed: 300 events, the same to the byte" in short.out


def test_another_run_is_told_at_the_first_event_that_differs(
    call: Call, rounds: Path, tmp_path: Path
) -> None:
    lines = (rounds / "events.jsonl").read_bytes().splitlines(True)
    at = next(i for i, line in enumerate(lines) if b'"KVSent"' in line)
    lines[at] = lines[at].replace(b'"bytes":', b'"bytes":1')
    changed = copied(rounds, tmp_path / "changed", events=b"".join(lines))
    done = call(changed, "--step", "--replay", "--until", str(at + 500), stdin="q\n")
    assert done.code == 1
    assert stops(done.out) == [(at + 1, "KVSent")]
    assert f"event {at + 1:,} is not the recorded one" in done.err
    assert f"the {at:,} before it are the same to the byte" in done.err


def test_only_virtual_runs_repeat(call: Call, rounds: Path, tmp_path: Path) -> None:
    text = (rounds / "scenario.yaml").read_bytes().replace(b"clock: virtual", b"clock: wall")
    wall = copied(rounds, tmp_path / "wall", scenario=text)
    done = call(wall, "--replay", "--until", "5")
    assert done.code == 2
    assert "only a run under the virtual clock repeats" in done.err
    assert call(wall, "--until", "5").code == 0


# -- regret ----------------------------------------------------------------------------------------


def test_regret_is_a_sum_over_requests(call: Call, tmp_path: Path) -> None:
    """Under policy naive every long prompt pays for its transfer, which RLD would have hidden."""
    folder = ran(tmp_path / "run", "handoff.yaml", "workload.requests=6", "workload.rate=2/s",
                 "workload.output_tokens=60", "pipeline.policy=naive")  # fmt: skip
    found = json.loads(call(folder, "--regret", "--json").out)
    rows = {r["id"]: r for r in lines_of(folder)}
    scope = found["regret"]["all"]
    assert "policy" not in found["regret"], "it had no choice"
    long = {name for name, r in rows.items() if r["prompt_tokens"] > 1000}
    worst = {w["request"]: w for w in scope["ttft"]["worst"]}
    assert long <= set(worst)
    assert scope["ttft"]["sum_s"] == pytest.approx(sum(w["lost_s"] for w in worst.values()))
    for name in long:
        assert worst[name]["best"] in ("P-RLD-MD", "P-RLD", "P")
        assert worst[name]["lost_s"] > 0.9 * rows[name]["ttft_legs"]["transfer"]
    told = call(folder, "--regret").out
    assert "regret among all that its instances can serve" in told
    assert f"{len(worst)} of 6 would have been sooner otherwise" in told
