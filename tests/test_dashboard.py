"""The dashboard without its terminal: what it makes of events, and what that looks like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import unescape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddrt import trace as ev
from pddrt.dashboard.bars import Axis, bar, strokes
from pddrt.dashboard.display import picture
from pddrt.dashboard.facts import ORDERS, Choice, RequestView, Snapshot
from pddrt.dashboard.parts import MAX_PIECES, PART, RECENT, Recent, Spread
from pddrt.dashboard.state import KEPT, Board
from pddrt.dashboard.text import Answer, Line, encodable, fit, line, width_of
from pddrt.dashboard.view import Look, frame, last, room, text_width
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.trace import Event
from pddrt.types import MS, SECOND, Ns

from .recordings import ROOT, STORMY

INSTANCES: list[Event] = [
    ev.RunStarted(0, "shown", 7, "virtual"),
    ev.LinkRate(0, "rdma", ("a", "a"), 1_000_000_000),
    ev.LinkRate(0, "wan", ("a", "b"), 1_000_000),
    ev.InstanceStarted(0, "p0", "prefill", "a", 100, 16),
    ev.InstanceStarted(0, "rld0", "relay", "a", 100, 16),
    ev.InstanceStarted(0, "md0", "main", "b", 100, 16),
]


def request(name: str = "s0.0", start: Ns = 0, *, until: type[Event] | None = None) -> list[Event]:
    """One request by way of a relay, of 100 prompt tokens, 20 cached at P; 1 MB of KV. Up to the
    first event of a kind, if any.
    """
    events: list[Event] = [
        ev.RequestSent(0, name, 0, 0, "Why?"),
        ev.Routed(1 * MS, name, "P-RLD-MD", "p0", "rld0", "md0", 100, 50, 900 * MS, "far"),
        ev.Admitted(2 * MS, name, "p0", 7, 20, 200_000),
        ev.PrefillStarted(100 * MS, name, "p0"),
        ev.StepBegan(100 * MS, "p0", ((name, 20, 100),)),
        ev.Admitted(110 * MS, name, "rld0", 7, 0, 0),
        ev.Admitted(120 * MS, name, "md0", 7, 0, 0),
        ev.Step(300 * MS, "p0", 100 * MS, 1, 80, 0, 0, 7),
        ev.PrefillEnded(300 * MS, name, "p0"),
        ev.KVSent(300 * MS, name, "p0", "rld0", 0, 100, 1_000_000),
        ev.KVSent(300 * MS, name, "p0", "md0", 0, 50, 500_000),
        ev.KVSent(300 * MS, name, "p0", "md0", 50, 100, 500_000),
        ev.KVReceived(302 * MS, name, "rld0", 0, 100, 1_000_000),
        ev.KVWhole(302 * MS, name, "rld0", 100),
        ev.TokensReceived(310 * MS, name, 0, 1, "P", (5,), "It"),
        ev.TokensReceived(350 * MS, name, 1, 2, "R", (6,), " is"),
        ev.KVReceived(800 * MS, name, "md0", 0, 50, 500_000),
        ev.TokensReceived(900 * MS, name, 2, 3, "R", (6,), " far"),
        ev.KVReceived(1300 * MS, name, "md0", 50, 100, 500_000),
        ev.KVWhole(1300 * MS, name, "md0", 100),
        ev.HandoffSent(1316 * MS, name, "rld0", "md0", 100, 103, True, 80, "one-shot"),
        ev.TokensReceived(1317 * MS, name, 3, 4, "R", (6,), " to"),
        ev.TokensReceived(1400 * MS, name, 4, 5, "M", (7,), " say"),
        ev.TokensReceived(2000 * MS, name, 5, 6, "M", (8,), "."),
        ev.Freed(2000 * MS, name, "p0", 0),
        ev.Freed(2000 * MS, name, "rld0", 0),
        ev.Finished(2000 * MS, name, "length", 6, ""),
        ev.Freed(2001 * MS, name, "md0", 0),
    ]  # fmt: skip
    if until is not None:
        kinds = [type(event) for event in events]
        events = events[: kinds.index(until)]
    return [_later(event, start) for event in events]


def _later(event: Event, by: Ns) -> Event:
    stamps = {name: getattr(event, name) + by for name in ("t", "start_ns") if hasattr(event, name)}
    return replace(event, **stamps)


def heard(*events: Event, slo: tuple[Ns | None, Ns | None] = (None, None)) -> Board:
    board = Board(slo)
    for event in [*INSTANCES, *events]:
        board(event)
    return board


def only(board: Board, now: Ns | None = None) -> RequestView:
    (row,) = board.snapshot(now).rows
    return row


def plain(lines: Sequence[Line]) -> list[str]:
    return ["".join(text for text, _ in one).rstrip() for one in lines]


# -- what it makes of events -----------------------------------------------------------------------


def test_phases_follow_one_another_as_the_client_feels_them() -> None:
    row = only(heard(*request()))
    assert row.spans == (
        ("queue", 0, 100 * MS),
        ("prefill", 100 * MS, 300 * MS),
        ("wait", 300 * MS, 310 * MS),
        ("relay", 310 * MS, 1316 * MS),
        ("handoff", 1316 * MS, 1400 * MS),
        ("main", 1400 * MS, 2000 * MS),
    )
    assert row.made == (("P", 1), ("R", 3), ("M", 2))
    assert (row.ttft, row.tpot, row.handed, row.sends) == (310 * MS, 338 * MS, 3, 1)
    assert dict(row.hits) == {"p0": 20, "rld0": 0, "md0": 0}


def test_a_first_token_that_comes_early_does_not_end_the_wait_for_the_kv() -> None:
    events = request(until=ev.KVWhole)
    events.append(ev.TokensReceived(301 * MS, "s0.0", 0, 1, "P", (5,), "It"))
    events.sort(key=lambda event: event.t)
    row = only(heard(*events))
    assert row.phase == "wait"
    assert row.ttft == 301 * MS


def test_kv_under_way_has_a_share_and_a_rate() -> None:
    board = heard(*[e for e in request() if e.t <= 900 * MS])
    relay, main = only(board).wires
    assert (relay.share, relay.ended, relay.in_flight) == (1.0, 302 * MS, 0)
    assert (main.share, main.ended, main.in_flight) == (0.5, None, 500_000)
    links = {(one.src, one.dst): one for one in board.snapshot(900 * MS).links}
    wan = links["a", "b"]
    assert (wan.cap, wan.flows, wan.in_flight, wan.carried) == (1_000_000, 1, 500_000, 500_000)
    assert wan.rate == pytest.approx(500_000 / 0.9)
    done = only(heard(*request())).wires[1]
    assert (done.share, done.ended, done.rate) == (1.0, 1300 * MS, 1_000_000)


def test_instances_say_what_waits_what_runs_and_what_was_cached() -> None:
    board = heard(*request(until=ev.PrefillStarted))
    assert board.snapshot().instances[0].waiting == 1, "admitted, but its prefill has not begun"
    assert [one.waiting for one in board.snapshot().instances[1:]] == [1, 1]
    p0, rld0, md0 = heard(*request(until=ev.PrefillEnded)).snapshot().instances
    assert (p0.waiting, p0.batch, p0.kv, p0.hit) == (0, 1, 0.07, 0.2)
    assert p0.busy == pytest.approx(200 / 300, rel=0.01)
    assert (rld0.waiting, rld0.holding, md0.holding, md0.hit) == (0, 1, 1, 0.0)
    for one in heard(*request()).snapshot(3 * SECOND).instances:
        assert (one.waiting, one.holding, one.batch, one.kv) == (0, 0, 0, 0.0)


def test_a_request_that_is_tried_again_starts_over() -> None:
    again = [
        ev.InstanceCrashed(1000 * MS, "rld0", False),
        ev.Retried(1010 * MS, "s0.0", 1, "rld0 was lost", 3),
        ev.Routed(1020 * MS, "s0.0~1", "P-MD", "p0", None, "md0", 103, 47, None, "near"),
        ev.PrefillStarted(1030 * MS, "s0.0~1", "p0"),
        ev.PrefillEnded(1031 * MS, "s0.0", "p0"),  # of the attempt that was given up
    ]
    board = heard(*[e for e in request() if e.t < 1000 * MS], *again)
    row = only(board)
    assert [phase for phase, _, _ in row.spans] == [
        "queue", "prefill", "wait", "relay", "queue", "prefill",
    ]  # fmt: skip
    assert (row.attempts, row.marks, row.wires, row.max_tokens) == (2, (1010 * MS,), (), 50)
    seen = board.snapshot()
    assert [link.in_flight for link in seen.links] == [0, 0, 0]
    assert seen.instances[1].down
    assert [notice.what for notice in seen.notices] == [
        "rld0 crashed",
        "s0.0 is tried again: rld0 was lost",
    ]


def test_goodput_counts_what_is_inside_every_slo() -> None:
    lost = [ev.RequestSent(0, "s9.0", 9, 0, "?"), ev.Finished(1, "s9.0", "rejected", 0, "full")]
    for slo, met in (((None, None), 0.5), ((310 * MS, 338 * MS), 0.5), ((309 * MS, None), 0.0)):
        totals = heard(*lost, *request(), slo=slo).snapshot().totals
        assert (totals.met, totals.goodput) == (met, met)  # two requests, two seconds
        assert (totals.sent, totals.finished, totals.lost, totals.under_way) == (2, 1, 1, 0)


def test_memory_does_not_grow_with_the_run() -> None:
    board = heard()
    for n in range(3 * KEPT):
        for event in request(f"s{n}.0", n * SECOND):
            board(event)
    assert len(board.order(Choice())) == KEPT
    board(ev.RequestSent(999 * SECOND, "long", 0, 0, "?"))
    for n in range(2 * MAX_PIECES):
        board(ev.Preempted(999 * SECOND, "long", "md0", 4))
        board(ev.TokensReceived(999 * SECOND + n, "long", n, n + 1, "M", (1,), f"{n} "))
    first, pieces = board.text("long")
    assert (first, len(pieces)) == (MAX_PIECES, MAX_PIECES)
    assert pieces[0] == ("M", f"{MAX_PIECES} ")
    assert board.text("long", 2 * MAX_PIECES - 2) == (2 * MAX_PIECES - 2, pieces[-2:])
    long = next(row for row in board.snapshot(rows=KEPT + 1).rows if row.id == "long")
    assert len(long.spans) <= 40
    assert len(long.marks) <= 8


def test_those_under_way_are_shown_before_those_that_have_ended() -> None:
    board = heard(*request("old", until=ev.Finished))
    for n in range(9):
        for event in request(f"s{n}.0", (n + 1) * SECOND):
            board(event)
    assert [row.id for row in board.snapshot(rows=3).rows] == ["old", "s7.0", "s8.0"]
    assert board.snapshot(rows=3).hidden == 7
    chosen = board.snapshot(choice=Choice(follow="s1.0"), rows=3)
    assert "s1.0" in [row.id for row in chosen.rows]
    assert chosen.followed is not None
    assert chosen.followed.id == "s1.0"
    assert board.order(Choice(ended=False)) == ["old"]


def test_the_followed_request_stays_until_it_has_ended() -> None:
    board = heard(*request("a", until=ev.Finished), *request("b", until=ev.PrefillStarted))
    assert board.snapshot().followed.id == "a"  # type: ignore[union-attr]
    for event in request("c", until=ev.Finished):
        board(event)
    assert board.snapshot().followed.id == "a"  # type: ignore[union-attr]
    board(ev.Finished(3 * SECOND, "a", "stop", 6, ""))
    assert board.snapshot().followed.id == "c", "b has no token yet"  # type: ignore[union-attr]


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 400)), min_size=1, max_size=20),
    st.integers(1, 100),
)
def test_percentiles_are_the_nearest_rank_within_four_in_a_thousand(
    values: list[tuple[int, int]], percent: int
) -> None:
    spread = Spread()
    for value, times in values:
        spread.add(value, times)
    every = sorted(value for value, times in values for _ in range(times))
    exact = every[-(-len(every) * percent // 100) - 1]
    got = spread.at(percent)
    assert got is not None
    assert abs(got - exact) <= exact * (0.004 if len(every) > Spread.EXACT else 0)


@given(
    st.lists(st.tuples(st.integers(0, 3 * RECENT), st.integers(0, RECENT)), max_size=30),
    st.integers(0, RECENT),
)
def test_a_recent_amount_is_that_of_the_last_parts(
    spans: list[tuple[int, int]], later: int
) -> None:
    recent = Recent()
    ends = sorted((start + length, start) for start, length in spans)
    for end, start in ends:
        recent.add(start, end, 10.0)
    now = max([end for end, _ in ends], default=0) + later
    since = max(0, (now // PART - RECENT // PART + 1) * PART)
    inside = 0.0
    for end, start in ends:
        if end > start:
            inside += 10.0 * max(0, end - max(start, since)) / (end - start)
        else:
            inside += 10.0 * (end >= since)
    seconds = max(now - since, PART) / SECOND
    assert recent.rate(now) == pytest.approx(inside / seconds, abs=1e-6)


# -- real runs -------------------------------------------------------------------------------------


@cache
def real(which: str) -> tuple[tuple[Event, ...], dict[str, object], tuple[Ns | None, Ns | None]]:
    """Events and summary of a run under faults, or with handoffs in rounds; and its SLO."""
    scenario, changes = {
        "stormy": ("faults.yaml", ("workload.sessions=8", "workload.turns=2", STORMY)),
        "paced": (
            "handoff.yaml",
            ("workload.requests=6", "workload.output_tokens=120", "workload.rate=2/s",
             "handoff.mode=catch-up"),
        ),
    }[which]  # fmt: skip
    events: list[Event] = []
    text = (ROOT / "scenarios" / scenario).read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        run = Run(parse(text, scenario, changes), out=Path(folder) / "run")
        run.listen(events.append)
        run.prepare()
        result = run.execute()
    slo = run.scenario.slo
    return tuple(events), result.summary, (slo.ttft, slo.tpot)


@pytest.mark.parametrize("which", ["stormy", "paced"])
def test_the_figures_at_the_end_are_those_of_the_summary(which: str) -> None:
    events, facts, slo = real(which)
    board = Board(slo)
    for event in events:
        board(event)
    totals = board.snapshot().totals
    numbers: dict[str, dict[str, int]] = facts  # type: ignore[assignment]
    requests = numbers["requests"]
    assert (totals.sent, totals.finished) == (requests["total"], requests["finished"])
    assert totals.lost == requests["rejected"] + requests["aborted"]
    assert totals.tokens == numbers["tokens"]["output"]
    assert totals.met == pytest.approx(facts["slo_attainment"])
    assert totals.goodput == pytest.approx(facts["goodput_rps"], rel=1e-4)
    for pair, key in ((totals.ttft, "ttft_s"), (totals.itl, "itl_s")):
        exact = [facts[key][p].ns for p in ("p50", "p90")]  # type: ignore[index]
        assert pair == pytest.approx(exact, rel=0.004)


@pytest.mark.parametrize("which", ["stormy", "paced"])
def test_at_the_end_nothing_is_under_way_any_more(which: str) -> None:
    events, _, slo = real(which)
    board = Board(slo)
    for event in events:
        board(event)
    seen = board.snapshot(board.now + 10 * SECOND)
    assert [(one.name, one.waiting, one.holding, one.batch) for one in seen.instances] == [
        (one.name, 0, 0, 0) for one in seen.instances
    ]
    assert {(link.flows, link.in_flight, link.rate) for link in seen.links} == {(0, 0, 0.0)}
    assert all(row.ended is not None for row in seen.rows)
    assert any(row.sends > 1 for row in seen.rows) or which == "stormy"


def test_events_that_it_does_not_ask_for_change_nothing() -> None:
    events, _, slo = real("stormy")
    all_of_them, asked = Board(slo), Board(slo)
    for event in events:
        all_of_them(event)
        if type(event) in asked.hears:
            asked(event)
    now = max(all_of_them.now, asked.now)
    assert all_of_them.snapshot(now) == asked.snapshot(now)


looks = st.builds(
    Look,
    choice=st.builds(Choice, order=st.sampled_from(ORDERS), ended=st.booleans()),
    expected=st.integers(0, 10**6),
    paused=st.booleans(),
    ending=st.booleans(),
    detail=st.booleans(),
    help=st.booleans(),
    keys=st.booleans(),
    pace=st.sampled_from([None, 0.5]),
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["stormy", "paced"]),
    st.floats(0, 1),
    st.integers(1, 220),
    st.integers(1, 70),
    looks,
    st.integers(0, 10 * SECOND),
)
def test_any_moment_of_a_run_fits_into_any_window(
    which: str, part: float, width: int, height: int, look: Look, later: Ns
) -> None:
    events, _, slo = real(which)
    board = Board(slo)
    for event in events[: round(part * len(events))]:
        board(event)
    seen, answer = _seen(board, look, width, height, board.now + later)
    drawn = frame(seen, look, answer, width, height)
    assert len(drawn) == height
    for one in [*drawn, *last(seen, look, width)]:
        assert width_of(one) <= width
        assert all(text.isprintable() for text, _ in one)
        ascii_ = encodable(one, "ascii")
        assert width_of(ascii_) == width_of(one)
        assert all(text.isascii() for text, _ in ascii_)


def _seen(
    board: Board, look: Look, width: int, height: int, now: Ns
) -> tuple[Snapshot, Answer | None]:
    rows = room(look, width, height, board.instances, board.directions)
    seen = board.snapshot(now, look.choice, rows)
    if seen.followed is None:
        return seen, None
    answer = Answer(text_width(width))
    for source, text in board.text(seen.followed.id)[1]:
        answer.feed(source, text)
    return seen, answer


# -- what it looks like ----------------------------------------------------------------------------


def screen(board: Board, look: Look, width: int, height: int, now: Ns) -> list[str]:
    seen, answer = _seen(board, look, width, height, now)
    return plain(frame(seen, look, answer, width, height))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_screen_tells_of_requests_instances_links_and_the_run(width: int) -> None:
    board = heard(*[e for e in request() if e.t <= 900 * MS], slo=(SECOND, SECOND))
    lines = screen(board, Look(expected=3), width, 24, 950 * MS)
    text = "\n".join(lines)
    assert lines[0] == "shown  0.95 s virtual  0/3 done, 1 under way"
    assert lines[1].startswith("TTFT p50 310 ms p90 310 ms  ")
    for pattern in (
        r"P p0 +0 +0 +7% +20% +21%",
        r"M md0 +0 +\d +0% +0%",
        r"wan a>b +\S+ [kM]bit/s +53% +1 +500 kB",
        r">s0\.0 +q+·*P",
        r"3/50 +310 ms",
        r" P-RLD-MD .*━.*KV>M 50 %",
        r"── s0.0  3/50 tokens: P 1 R 2 ── Why\? ─",
        r"^ P It R  is far",
        r"^q quit",
        r"q queue  P prefill  w waits for KV  R RLD  H handoff  M MD  ─ KV>RLD  ━ KV>MD",
    ):
        assert re.search(pattern, text, re.M), f"{pattern}\n{text}"


def test_what_overlaps_in_time_can_both_be_read() -> None:
    """RLD decodes while KV goes to MD: the same cells of the two lines."""
    row = only(heard(*request()))
    axis = Axis(0, 50 * MS, 50)
    (phases,) = plain([bar(row.spans, row, 2 * SECOND, axis)])
    (kv,) = plain([strokes(row.wires, 2 * SECOND, axis)])
    assert phases == "q·P   R 3" + " " * 17 + "H M 2"
    assert kv == " " * 6 + "═" + "━" * 19
    relay = range(phases.index("R"), phases.index("H"))
    assert {kv[cell] for cell in relay[1:-1]} <= {"━", " "}
    assert kv[relay[1]] == "━"


@pytest.mark.parametrize("step", [10 * MS, 50 * MS, 200 * MS, SECOND])
def test_a_handoff_is_seen_however_short(step: Ns) -> None:
    row = only(heard(*request()))
    (phases,) = plain([bar(row.spans, row, 2 * SECOND, Axis(0, step, 250))])
    letters = re.sub(r"[^A-Za-z]", "", phases)
    assert "H" in letters
    if step <= 50 * MS:
        assert letters in ("qPRHM", "qPwRHM")


def test_what_went_wrong_is_marked() -> None:
    board = heard(
        *request(until=ev.HandoffSent),
        ev.Preempted(1310 * MS, "s0.0", "md0", 4),
        ev.Finished(2000 * MS, "s0.0", "aborted", 4, "\x1b[2Jdeadline"),
    )
    lines = screen(board, Look(), 80, 24, 2 * SECOND)
    row = next(one for one in lines if "aborted" in one and "s0.0" in one)
    assert row.count("!") == 2
    assert "2.0 s  s0.0 was aborted: ␛[2Jdeadline" in lines


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(10, 200))
def test_an_axis_has_room_for_all_and_is_no_coarser_than_need_be(
    start: Ns, length: Ns, cells: int
) -> None:
    axis = Axis.over(start, start + length, cells)
    assert axis.start <= start
    assert axis.span(start, start + length)[1] <= cells
    used = axis.span(start, start + length)[1]
    assert used >= cells // 2 - 3 or axis.step == MS, "half of it at least"
    (labels,) = plain([axis.line()])
    times = [(m.start(), float(m[1])) for m in re.finditer(r"│([\d.]+) s", labels)]
    for (x, t), (x2, t2) in pairwise(times):
        assert (t2 - t) * SECOND == pytest.approx((x2 - x) * axis.step, rel=1e-6, abs=1e6)


def test_the_axis_is_for_those_under_way_and_what_was_beside_them() -> None:
    board = heard(*request("old"), *request("beside", 60 * SECOND))
    for event in request("now", 61 * SECOND, until=ev.HandoffSent):
        board(event)
    lines = screen(board, Look(), 100, 30, 62_400 * MS)
    bars = {
        name: next(one for one in lines if name in one[:8]) for name in ("old", "beside", "now")
    }
    assert re.search(r"old +< +6 +310 ms", bars["old"])
    assert "│60.0 s" in "\n".join(lines)
    assert [letter in bars["beside"] for letter in "PRHM"] == [True] * 4
    assert [letter in bars["now"] for letter in "PR<"] == [True, True, False]
    done = screen(
        heard(*request("old"), *request("new", 60 * SECOND)), Look(), 100, 30, 70 * SECOND
    )
    assert not any("<" in one for one in done), "where none is under way, all are on it"


def test_a_picture_is_of_the_moment() -> None:
    events, _, _ = real("paced")
    middle = events[len(events) // 2].t
    svg = picture(events, middle, Look(expected=6), 100, 30)
    assert svg.startswith("<svg")
    text = unescape("".join(re.findall(r">([^<>\n]*)</text>", svg))).replace("\xa0", " ")
    assert f"{middle // (10 * MS) / 100:.2f} s virtual" in text
    assert "KV>MD" in text
    assert "url(http" not in svg


def test_one_request_taken_apart() -> None:
    board = heard(*request())
    text = "\n".join(screen(board, Look(detail=True), 100, 30, 2 * SECOND))
    for pattern in (
        r"s0\.0  P-RLD-MD  p0 > rld0 > md0  length  TTFT 310 ms, TPOT 338 ms",
        r"queue +q·+ .* 100 ms",
        r"prefill +P .* 100 tokens, 20 hit",
        r"KV>rld0 +─ .* 100 % 1 MB",
        r"KV>md0 +━+ .* 100 % 1 MB",
        r"relay +R .* 3 tokens",
        r"handoff +H .* 1 round, 3 ids",
        r"main +M .* 2 tokens",
    ):
        assert re.search(pattern, text), f"{pattern}\n{text}"


def test_many_instances_become_one_a_role() -> None:
    many = [ev.InstanceStarted(0, f"p{n}", "prefill", "a", 100, 16) for n in range(1, 43)]
    board = heard(*many, ev.InstanceCrashed(1, "p7", False), *request())
    text = "\n".join(screen(board, Look(), 80, 24, SECOND))
    assert re.search(r"P 42 of 43 +0 ", text)
    assert "p11" not in text


def test_a_terminal_without_boxes_has_letters_and_ascii() -> None:
    lines = [encodable(line("━━──│ 漢 é…"), encoding) for encoding in ("ascii", "latin-1")]
    assert plain(lines) == ["==--| ?? ?.", "==--| ?? é."]


def test_a_line_is_cut_where_it_must_be() -> None:
    assert plain([fit(line("漢字漢字", ("abc", "bold")), 6)]) == ["漢字…"]
    assert plain([fit(line("ab", "cd"), 3)]) == ["ab…"]
    assert plain([fit(line("ab", "cd"), 4)]) == ["abcd"]
    assert width_of(fit(line("ab"), 6, pad=True)) == 6


words = st.text(st.sampled_from("ab 漢\n\té\xa0\x1b[\u202e👩"), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.sampled_from("PRM"), words), max_size=40), st.integers(20, 90))
def test_an_answer_is_wrapped_without_losing_a_letter(
    pieces: list[tuple[str, str]], width: int
) -> None:
    answer, whole = Answer(width, most=10**6), ""
    maker = ""
    for source, text in pieces:
        answer.feed(source, text)
        whole += (source if source != maker else "") + text
        maker = source
    lines = answer.lines(10**6)
    assert all(width_of(one) <= width for one in lines)
    got = "".join(plain(lines))
    shown = whole.replace("\x1b", "␛").replace("\u202e", "\\u202e")
    assert re.sub(r"\s", "", got) == re.sub(r"\s", "", shown)
    assert all(text.isprintable() for one in lines for text, _ in one)


def test_the_newest_lines_of_an_answer_stay() -> None:
    answer = Answer(20, most=3)
    for n in range(9):
        answer.feed("M", f"line {n}\n\n\n")
    assert plain(answer.lines(4)) == ["", "line 8", ""]
    assert plain(answer.lines(2)) == ["line 8", ""]


def test_words_stay_whole_where_they_fit() -> None:
    answer = Answer(20)
    for piece in ("It", " is", " what", "ever", " some", "body", " wants it to be"):
        answer.feed("R", piece)
    assert plain(answer.lines(9)) == [" R It is whatever", "somebody wants it to", "be"]
