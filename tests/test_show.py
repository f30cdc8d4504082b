"""What a run looks like, from synthetic events: texts, bar, tables, on paper and on a terminal."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from pddrt import live, show
from pddrt import trace as ev
from pddrt.live import Bars, Flight, LiveText
from pddrt.metrics import Recorder
from pddrt.scenario import parse
from pddrt.summary import summary
from pddrt.trace import Event
from pddrt.types import MS, SECOND, Ns

ROLES = {"p0": "prefill", "rld0": "relay", "md0": "main"}
SCENARIO = """
name: shown
links:
  rdma: {between: [a, a], rate: 100 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 50 Mbit/s, delay: 15 ms, jitter: 1 ms}
instances:
  p0:   {role: prefill, site: a, count: 5}
  rld0: {role: relay,   site: a}
  md0:  {role: main,    site: b}
workload: {kind: closed, requests: 2, concurrency: 1, output_tokens: 4}
"""


class Tty(io.StringIO):
    """A terminal that draws: what is on it after all cursor movements."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        rows: list[list[str]] = [[]]
        x = y = 0
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", self.getvalue()):
            if part == "\n":
                x, y = 0, y + 1
            elif part == "\r":
                x = 0
            elif part.endswith("A") and part[0] == "\x1b":
                y -= int(part[2:-1])
            elif part == "\x1b[2K":
                rows[y] = []
            elif part[0] == "\x1b":
                assert re.fullmatch(r"\x1b\[([\d;]*m|\?25[lh])", part), f"{part!r} on a terminal"
            else:
                rows[y] += [" "] * (x - len(rows[y]))
                rows[y][x : x + cell_len(part)] = [part, *[""] * (cell_len(part) - 1)]
                x += cell_len(part)
            assert y >= 0
            while y >= len(rows):
                rows.append([])
        lines = ["".join(row).rstrip() for row in rows]
        return lines[: max((n for n, line in enumerate(lines, 1) if line), default=0)]

    @property
    def cursor_is_shown(self) -> bool:
        return self.getvalue().rfind("\x1b[?25h") >= self.getvalue().rfind("\x1b[?25l")


def console(width: int = 80, *, terminal: bool = False, **options: Any) -> Console:
    return Console(
        file=Tty() if terminal else io.StringIO(), width=width, height=30, markup=False,
        emoji=False, highlight=False, force_terminal=terminal, color_system="256" if terminal
        else None, **options,
    )  # fmt: skip


def written(on: Console) -> str:
    return on.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def request(
    name: str = "s0.0",
    *pieces: tuple[str, str],
    start: Ns = 0,
    relay: str | None = "rld0",
    prompt: str = "Why is the sky blue?",
    reason: str | None = "length",
    detail: str = "",
) -> list[Event]:
    """The events of one request whose answer comes in `pieces`: (maker, text) a token."""
    t = start
    events: list[Event] = [
        ev.RequestSent(t, name, int(name[1]), 0, prompt, (0.0, 0, 1.0, 0)),
        ev.Routed(t + 1 * MS, name, "P-RLD-MD" if relay else "P-MD", "p0", relay, "md0", 100,
                  max(1, len(pieces)), 470 * MS, ""),
        ev.PrefillStarted(t + 2 * MS, name, "p0"),
        ev.PrefillEnded(t + 50 * MS, name, "p0"),
        ev.KVReceived(t + 60 * MS, name, "md0", 0, 40, 40 * 23_040),
    ]  # fmt: skip
    for n, (source, text) in enumerate(pieces):
        now = t + (100 + 10 * n) * MS
        if source == "M" and "M" not in [s for s, _ in pieces[:n]]:
            events.append(ev.KVReceived(now, name, "md0", 40, 100, 60 * 23_040))
            events.append(ev.KVWhole(now, name, "md0", 100))
            if relay:
                events.append(ev.HandoffSent(now, name, relay, "md0", 100, 100 + n, True, 80))
        events.append(ev.TokensReceived(now, name, n, n + 1, source, (n,), text))
    if reason:
        end = t + (100 + 10 * len(pieces)) * MS
        events.append(ev.Finished(end, name, reason, len(pieces), detail))
    return events


LINKS: list[Event] = [
    ev.LinkTotal(9 * SECOND, "wan", "a", "b", 5_000_000, 4_000_000, 12, 2 * SECOND, 2, 9 * MS,
                 90 * MS),
    ev.LinkTotal(9 * SECOND, "wan", "b", "a", 1_000, 0, 0, MS, 1, 0, 0),
    ev.PoolChecked(9 * SECOND, "md0", 16, 16, 0),
]  # fmt: skip
ANSWER = (("P", "It"), ("R", " is"), ("R", " the"), ("R", " air"), ("M", "."), ("M", " Yes"))


def play(on: Console, events: Iterable[Event], requests: int = 1, **options: Any) -> Recorder:
    recorder = Recorder(ROLES)
    with LiveText(on, recorder, requests=requests, virtual=True, **options) as view:
        for event in events:
            recorder(event)
            view(event)
    return recorder


def shown(on: Console, renderables: Iterable[Any]) -> list[str]:
    for renderable in renderables:
        on.print(renderable)
    return written(on).splitlines()


def facts(
    recorder: Recorder, verdict: str = "ok", parity: Any = None, broken: Sequence[str] = ()
) -> dict[str, Any]:
    fidelity = {"verdict": verdict, "late_p99_s": ev.Seconds(9 * MS), "limit_s": ev.Seconds(5 * MS)}
    return {
        **summary(recorder, None, None, {"violations": broken}),
        "parity": parity,
        "provenance": {"fidelity": fidelity},
    }


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("plain, \ttabbed\nand lined", "plain, \ttabbed\nand lined"),
        ("\x1b[31mred\x1b]0;title\x07", "␛[31mred␛]0;title␇"),
        ("back\x08 return\r nul\x00 del\x7f", "back␈ return␍ nul␀ del␡"),
        ("dos\r\nlines", "dos\nlines"),
        ("\x9b31m c1", "\\x9b31m c1"),
        ("\u202eevil \u2066x", "\\u202eevil \\u2066x"),
        ("half \ud800 pair", "half \\ud800 pair"),
        ("漢字 👩\u200d🚀 é", "漢字 👩\u200d🚀 é"),
    ],
)
def test_text_that_would_command_a_terminal_is_shown_instead(raw: str, safe: str) -> None:
    assert show.clean(raw) == safe
    safe.encode()


@pytest.mark.parametrize("text", ["x" * 500, "漢字" * 200, "a\nb\n" * 90, "\x1b[2J" * 90])
def test_a_prompt_takes_one_line(text: str) -> None:
    line = show.one_line(text, 40).plain
    assert cell_len(line) <= 40
    assert line.endswith("…")
    assert not set(line) & set("\n\x1b")


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "-"), (0, "0"), (5_067, "5.07 us"), (48_249_999, "48.2 ms"), (1_256 * MS, "1.26 s")],
)
def test_times_have_three_digits(ns: Ns | None, text: str) -> None:
    assert show.duration(ns) == text


# -- the bar ---------------------------------------------------------------------------------------


def test_a_short_answer_has_a_cell_for_each_token() -> None:
    assert show.bar("PRRMMM", 60, colour=False).plain == "PRRMMM"


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("sources", ["P" + "R" * 105 + "M" * 22, "P" + "M" * 4000, "P", "", "RMRM"])
@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_bar_fits_and_shows_every_maker_in_order(sources: str, width: int, colour: bool) -> None:
    bar = show.bar(sources, width, colour)
    assert cell_len(bar.plain) == min(len(sources), width, show.MAX_BAR)
    letters = "".join(c for c in bar.plain if c.isalpha())
    runs = "".join(b for a, b in pairwise(f" {letters}") if a != b)
    assert runs == "".join(b for a, b in pairwise(f" {sources}") if a != b)


def test_a_coloured_bar_says_how_many() -> None:
    bar = show.bar("P" + "R" * 105 + "M" * 22, 80, colour=True)
    assert bar.plain.split() == ["P", "R", "105", "M", "22"]


# -- the answers on paper --------------------------------------------------------------------------


def test_an_answer_is_marked_where_its_maker_changes() -> None:
    on = console()
    play(on, request("s0.0", *ANSWER))
    assert written(on).splitlines() == [
        "s0.0  P-RLD-MD  p0 > rld0 > md0  100 prompt tokens",
        "its KV should take 470 ms to reach md0, so rld0 answers first",
        "> Why is the sky blue?",
        "[P]It[R] is the air[M]. Yes",
        "PRRRMM",
        "P 1 + R 3 + M 2 tokens, TTFT 100 ms, TPOT 10 ms",
        "2.3 MB of KV were at md0 after 140 ms; 4 ids handed over, gap 10 ms",
        "",
    ]


def test_markup_and_commands_in_an_answer_are_only_text() -> None:
    on = console()
    text = "[bold]x[/bold] [link=http://x]y :smile: \x1b[31mred {z} \\n"
    play(on, request("s0.0", ("P", text), prompt="[red]p[/red] \x1b]0;t\x07"))
    assert "[P][bold]x[/bold] [link=http://x]y :smile: ␛[31mred {z} \\n\n" in written(on)
    assert "> [red]p[/red] ␛]0;t␇\n" in written(on)
    assert "\x1b" not in written(on)


def test_one_text_at_a_time_in_the_order_of_sending() -> None:
    on = console()
    first = request("s0.0", *[("M", f" a{n}") for n in range(20)], relay=None)
    second = request("s1.0", *[("M", f" b{n}") for n in range(5)], relay=None, start=20 * MS)
    third = request("s2.0", *[("M", f" c{n}") for n in range(50)], relay=None, start=30 * MS)
    play(on, sorted(first + second + third, key=lambda e: e.t), requests=3)
    text = written(on)
    assert re.findall(r"^s\d\.0", text, re.M) == ["s0.0", "s1.0", "s2.0"]
    for letter, count in (("a", 20), ("b", 5), ("c", 50)):
        assert "".join(f" {letter}{n}" for n in range(count)) + "\n" in text


def test_of_many_requests_the_first_texts_are_shown() -> None:
    on = console()
    many = [request(f"s{n}.0", ("P", f"<{n}>"), start=n * SECOND) for n in range(9)]
    many += [request(f"s{n}.1", ("P", "<x>"), start=(9 + n) * SECOND) for n in range(9)]
    play(on, [e for events in many for e in events], requests=18)
    assert re.findall(r"<.>", written(on)) == ["<0>", "<1>", "<2>"]
    assert "(15 more requests; their texts are in requests.jsonl)" in written(on)


def test_what_went_wrong_is_said() -> None:
    on = console()
    events = request("s0.0", reason="rejected", detail="too \x1b[1mlong")
    events = [e for e in events if not isinstance(e, ev.Routed)]
    events += request("s1.0", *ANSWER[:2], reason="aborted", detail="deadline exceeded")
    events += request("s2.0", *ANSWER[:3], reason=None)
    play(on, events, requests=3)
    text = written(on)
    assert "s0.0  not routed\n> Why is the sky blue?\nrejected: too ␛[1mlong\n" in text
    assert "[P]It[R] is\naborted: deadline exceeded\nPR\n" in text
    assert "[P]It[R] is the\nnot ended\nPRR\n" in text


# -- the answers on a terminal ---------------------------------------------------------------------


def test_colours_do_not_make_it_a_terminal() -> None:
    pipe = Console(file=io.StringIO(), force_terminal=True, color_system="256", width=80)
    assert not live.can_move(pipe)


@pytest.mark.parametrize(
    ("options", "moves"),
    [({}, True), ({"width": 49}, False), ({"no_color": True}, False)],
)
def test_cursor_games_need_a_good_terminal(options: dict[str, Any], moves: bool) -> None:
    on = console(**options, terminal=True)
    assert live.can_move(on) is moves
    play(on, request("s0.0", *ANSWER))
    assert ("\x1b[2K" in written(on)) is moves


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    on = Console(file=Tty(), width=80)
    play(on, request("s0.0", *ANSWER))
    assert "[P]It[R] is the air[M]. Yes\n" in written(on)
    assert "\x1b" not in written(on)


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_a_terminal_ends_up_with_the_same_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn over on the way."""
    monkeypatch.setattr(live, "TICK_S", 3600)  # draws when we say so
    words = "\tdef f(x):\n    return x\n\n漢字 in the middle of a long line that must be wrapped, "
    pieces = [("R", w) for w in re.findall(r"\S+|\s", words * 4)]
    events = request("s0.0", ("P", "It"), *pieces, ("M", " ends"))
    on, recorder = console(width, terminal=True), Recorder(ROLES)
    with LiveText(on, recorder, requests=1, virtual=True) as view:
        for event in events:
            recorder(event)
            view(event)
            view._catch_up()
    file = on.file
    assert isinstance(file, Tty)
    assert file.cursor_is_shown
    assert all(cell_len(line) <= width for line in file.screen)
    start = next(n for n, line in enumerate(file.screen) if line.startswith(" P It"))
    end = next(n for n, line in enumerate(file.screen) if line.startswith("P"))
    got = " ".join(file.screen[start:end]).split()
    assert got == ["P", "It", "R", *(words * 4).split(), "M", "ends"]
    assert " ".join(file.screen[end:]).endswith(
        "2.3 MB of KV were at md0 after 1.63 s; 153 ids handed over, gap 10 ms"
    )
    assert not any("done" in line for line in file.screen), "the lines below go away"


def test_the_lines_below_tell_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 3600)
    on, recorder = console(terminal=True), Recorder(ROLES)
    events = request("s0.0", *ANSWER[:3]) + request("s1.0")[:3]
    with LiveText(on, recorder, requests=5, virtual=True) as view:
        for event in [e for e in events if not isinstance(e, ev.Finished)]:
            recorder(event)
            view(event)
        view._catch_up()
        file = on.file
        assert isinstance(file, Tty)
        assert file.screen[-3] == " P It R  is the"
        bar = "━" * 9 + "─" * 15
        assert file.screen[-2] == f"s0.0 R answers 3/3  KV at md0 {bar} 40 %"
        assert file.screen[-1] == "0.0 s virtual  0/5 done  ·  s1.0 P computes the prompt"


def test_the_lines_below_tell_what_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 3600)
    on, recorder = console(terminal=True), Recorder(ROLES)
    with LiveText(on, recorder, requests=1, virtual=True) as view:
        file = on.file
        assert isinstance(file, Tty)
        view._catch_up()
        assert file.screen == ["starting the instances", "0.0 s virtual  0/1 done"]
        for event in request("s0.0", *ANSWER):
            recorder(event)
            view(event)
        view._catch_up()
        assert file.screen[-2:] == ["giving everything back", "0.1 s virtual  1/1 done"]
        view.progress("verifying", 0.5)
        view._catch_up()
        assert file.screen[-2:] == ["verifying 50 %", "0.1 s virtual  1/1 done"]


@pytest.mark.parametrize(
    ("until", "doing"),
    [
        (ev.RequestSent, "at the gateway"),
        (ev.Routed, "P computes the prompt"),
        (ev.PrefillEnded, "its KV is on its way to rld0"),
        (ev.HandoffSent, "R hands over to M 4/6"),
        (ev.Finished, "M answers 6/6"),
    ],
)
def test_a_request_under_way_is_told_in_some_words(until: type[Event], doing: str) -> None:
    flight = Flight("s0.0")
    for event in request("s0.0", *ANSWER):
        flight.take(event)
        if isinstance(event, until):
            break
    assert flight.doing.plain == f"s0.0 {doing}"


def test_it_is_told_when_both_decode() -> None:
    flight = Flight("s0.0")
    for event in request("s0.0", *ANSWER):
        if isinstance(event, ev.HandoffSent):
            break
        flight.take(event)
    flight.take(ev.HandoffSent(0, "s0.0", "gateway", "md0", 100, 104, False, 80, follows=True))
    assert flight.doing.plain == "s0.0 R answers, M follows 4/6"
    flight.take(ev.HandoffEnded(0, "s0.0", "rld0", 104, "the main decoder is first"))
    assert flight.doing.plain == "s0.0 R hands over to M 4/6"


def test_no_text_and_no_terminal_means_silence() -> None:
    on = console()
    play(on, request("s0.0", *ANSWER), limit=0)
    assert written(on) == ""


def test_the_display_leaves_no_thread_and_its_failure_is_not_lost() -> None:
    before = threading.active_count()

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("our own mistake")

    on = Console(file=Broken(), width=80)
    with pytest.raises(RuntimeError, match="our own mistake"):
        play(on, request("s0.0", *ANSWER))
    assert threading.active_count() == before


# -- before and after ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_beginning_says_who_is_who(width: int) -> None:
    scenario = parse(SCENARIO, "shown.yaml")
    on = console(width)
    lines = shown(on, show.intro(scenario, scenario.resolved(), 2, colour=False))
    assert all(cell_len(line) <= width for line in lines)
    text = " ".join(written(on).split())
    assert text.startswith("shown: 2 requests to smollm2-135m in bfloat16, policy pdd, wall clock")
    for part in (
        "[P] prefill p0-0 ... p0-4 site a",
        "[R] relay rld0 site a",
        "[M] main md0 site b",
        "link wan a-b 50 Mbit/s, 15 ms, jitter 1 ms",
    ):
        assert part in text or width == 60


def test_a_policy_without_relay_names_none() -> None:
    scenario = parse(SCENARIO, "shown.yaml", ["pipeline.policy=naive"])
    lines = shown(console(), show.intro(scenario, scenario.resolved(), 1, colour=False))
    assert not any("[R]" in line for line in lines)
    assert lines[0].startswith("shown: 1 request to ")


def ran(*requests: Sequence[Event]) -> Recorder:
    recorder = Recorder(ROLES)
    for event in [e for events in requests for e in events] + LINKS:
        recorder(event)
    return recorder


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_numbers_fit(width: int) -> None:
    recorder = ran(request("s0.0", *ANSWER), request("s1.0", *ANSWER[3:], relay=None))
    lines = shown(console(width), show.results(facts(recorder), recorder, width))
    assert all(cell_len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)
    head = lines[0].split()
    for column in ("request", "pipeline", "P", "R", "M", "TTFT", "gap"):
        assert column in head, "what matters stays at any width"
    assert ("end" in head) is (width > 60)


def test_the_numbers_are_those_of_the_summary() -> None:
    recorder = ran(request("s0.0", *ANSWER), request("s1.0", *ANSWER[4:], relay=None))
    parity = {"checked": 2, "equal": 1, "near_ties": 1, "different": 0}
    text = "\n".join(
        re.sub("  +", "  ", line.strip())
        for line in shown(console(), show.results(facts(recorder, parity=parity), recorder, 80))
    )
    for line in (
        "s0.0  P-RLD-MD  100  1 + 3 + 2  100 ms  10 ms  4  10 ms",
        "s1.0  P-MD  100  0 + 0 + 2  100 ms  10 ms  -  -",
        "mean  all (2)  P-MD (1)  P-RLD-MD (1)",
        "TTFT  100 ms  100 ms  100 ms",
        "gap at the switch  10 ms  -  10 ms",
        "requests  2: 2 finished; 200 prompt tokens",
        "tokens  8: P 1 (12.5 %), R 3 (37.5 %), M 4 (50.0 %)",
        "link wan  5 MB: KV 4 MB, ids 12 B; busy 22 %, at most 2 flows",
        "verified  2: 1 equal, 1 near ties",
    ):
        assert line in text
    for leg in ("gateway", "prefill queue", "prefill", "decoder queue", "transfer", "delivery"):
        assert re.search(rf"^{leg}  ", text, re.M)


def test_a_machine_that_was_late_is_named() -> None:
    recorder = ran(request("s0.0", *ANSWER))
    line = show.late(facts(recorder, "degraded"))
    assert line.startswith("degraded: ")
    assert "link wan, a to b, data left 9 ms late (p99; worst 90 ms; allowed 5 ms)" in line
    assert show.late(facts(recorder, "ok")) == show.late(facts(recorder, "exact")) == ""


def test_lost_requests_and_violations_are_named() -> None:
    lost = request("s1.0", ("P", "x"), reason="aborted", detail="lost \x1b[1mmd0")
    recorder = ran(lost, request("s2.0", reason=None))
    numbers = facts(recorder, broken=["a request never ended: s2.0"])
    text = "\n".join(shown(console(), show.results(numbers, recorder, 80)))
    assert "aborted: s1.0: lost ␛[1mmd0" in text
    assert "violated: a request never ended: s2.0" in text
    assert "more that" not in text
    recorder = ran(*(request(f"s{n}.0", reason="rejected", detail="full") for n in range(9)))
    numbers = facts(recorder, broken=[f"v{n}" for n in range(7)])
    numbers["faults"] = {"planned": 3, "injected": 2, "missed": 1}
    text = "\n".join(shown(console(), show.results(numbers, recorder, 80)))
    assert text.count("rejected: s") == 5
    assert "and 4 more that did not finish" in text
    assert "and 2 more violations" in text
    assert re.search("faults +3 planned; 2 strikes took effect, 1 missed", text)


def test_a_run_that_never_began_has_numbers_too() -> None:
    recorder = ran()
    lines = shown(console(), show.results(facts(recorder), recorder, 80))
    assert lines[0].split() == ["requests", "0:", "none", "ended;", "0", "prompt", "tokens"]


# -- progress --------------------------------------------------------------------------------------


def test_progress_is_a_line_a_stage_on_paper() -> None:
    on = console()
    with Bars(on) as bars:
        for done in (0.0, 0.5, 1.0):
            bars("fetching [it]", done)
        bars("converting", None)
    assert written(on) == "fetching [it]\nconverting\n"


def test_progress_is_a_bar_on_a_terminal_and_goes_away() -> None:
    on = console(terminal=True)
    with Bars(on) as bars:
        bars("fetching [it]", 0.25)
        bars("converting", None)
    file = on.file
    assert isinstance(file, Tty)
    assert file.screen == []
    assert file.cursor_is_shown
