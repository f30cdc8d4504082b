"""The dashboard on a terminal: drawing, keys, signals, sizes, and what is left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pddrt import cli
from pddrt import trace as ev
from pddrt.dashboard import display as dashboard
from pddrt.dashboard.display import Dashboard
from pddrt.dashboard.pacing import Pacer
from pddrt.dashboard.screen import Screen as Drawn
from pddrt.dashboard.screen import keys_of
from pddrt.dashboard.text import Line, line
from pddrt.run import Run
from pddrt.scenario import parse

from .terminal import Screen, Session, Tty

SCENARIO = """\
name: drawn
clock: virtual
model: tiny
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 2 Mbit/s, delay: 10 ms}
instances:
  p0:   {role: prefill, site: a, engine: model, kv_memory: 4 MiB, step_time: &t {prefill_tokens_per_s: 4000, decode_step: 10 ms}}
  rld0: {role: relay,   site: a, engine: model, kv_memory: 4 MiB, step_time: *t}
  md0:  {role: main,    site: b, engine: model, kv_memory: 4 MiB, step_time: *t}
pipeline: {policy: pdd, relay_above: 60 ms}
workload: {kind: closed, requests: 6, concurrency: 3, output_tokens: 60, prompts: random, prompt_tokens: 300}
"""  # noqa: E501


def console(file: Tty, width: int = 100, height: int = 30, **options: Any) -> Console:
    return Console(
        file=file, width=width, height=height, markup=False, emoji=False, highlight=False,
        force_terminal=True, color_system="256", **options,
    )  # fmt: skip


def executed(
    folder: Path, file: Tty | None, pacer: Pacer | None = None, **options: Any
) -> tuple[dict[str, Any], Screen]:
    """The summary of the run, and the terminal after it."""
    run = Run(parse(SCENARIO, "drawn.yaml"), out=folder)
    run.prepare()
    if file is None:
        return run.execute().summary, Screen(100, 30)
    on = console(file, **options)
    if pacer is not None:
        run.listen(pacer)
    with Dashboard(on, run.recorder, requests=run.expected_requests, pacer=pacer) as board:
        run.listen(board)
        summary = run.execute(board.progress).summary
    screen = Screen(on.width, on.height)
    screen.feed(file.getvalue())
    return summary, screen


# -- a run is the same -----------------------------------------------------------------------------


def test_a_virtual_run_is_the_same_to_the_byte_with_and_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "FASTEST_S", 0.001)  # draws as often as it can
    monkeypatch.setattr(dashboard, "BUDGET", 1.0)
    monkeypatch.setattr(dashboard, "BACKLOG", 50)  # the run itself takes part, too
    alone, _ = executed(tmp_path / "alone", None)
    drawn, screen = executed(tmp_path / "drawn", Tty())
    paced, _ = executed(tmp_path / "paced", Tty(), Pacer(20.0))
    assert alone["digest"] == drawn["digest"] == paced["digest"]
    assert screen.frames > 1
    files = [(tmp_path / way / "events.jsonl").read_bytes() for way in ("alone", "drawn", "paced")]
    assert files[0] == files[1] == files[2]


def test_the_terminal_is_given_back_and_the_last_state_stays(tmp_path: Path) -> None:
    summary, screen = executed(tmp_path / "run", Tty())
    assert not screen.alternate
    assert screen.cursor
    plain = _unstyled(screen.plain)
    assert plain.lstrip("\r\n").startswith("drawn  ")
    assert f"{summary['requests']['total']}/6 done, 0 under way" in plain
    for name in ("s0.0", "s5.0", "H handoff"):
        assert name in plain
    assert "quit" not in plain
    assert "tokens/s" not in plain


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_ends_it_the_terminal_is_given_back(error: type[BaseException]) -> None:
    file = Tty()
    handler = signal.getsignal(signal.SIGTSTP)
    threads = threading.active_count()
    with pytest.raises(error), Dashboard(console(file), _recorder(), requests=1):
        raise error
    screen = Screen(100, 30)
    screen.feed(file.getvalue())
    assert not screen.alternate
    assert screen.cursor
    assert signal.getsignal(signal.SIGTSTP) == handler
    assert threading.active_count() == threads


def test_a_fault_of_its_own_gives_the_terminal_back_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> list[Line]:
        raise ZeroDivisionError

    monkeypatch.setattr(dashboard, "frame", broken)
    file = Tty()
    with (
        pytest.raises(ZeroDivisionError),
        Dashboard(console(file), _recorder(), requests=1) as board,
    ):
        board._thread.join()
    screen = Screen(100, 30)
    screen.feed(file.getvalue())
    assert not screen.alternate
    assert screen.cursor


def test_a_terminal_without_boxes_is_drawn_on_in_ascii(tmp_path: Path) -> None:
    file = Tty("ascii")
    executed(tmp_path / "run", file)
    file.getvalue().encode("ascii")
    assert "H handoff  M MD  - KV>RLD  = KV>MD" in _unstyled(file.getvalue())
    drawn = Drawn(console(file := Tty("ascii"), 20, 3))
    drawn.draw([line("\N{BOX DRAWINGS HEAVY HORIZONTAL} é")], (20, 3))
    assert "= ?" in file.getvalue()


def _recorder() -> Any:
    return Run(parse(SCENARIO, "drawn.yaml")).recorder


def _unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


# -- drawing ---------------------------------------------------------------------------------------


def test_only_lines_that_have_changed_are_drawn() -> None:
    file, screen = Tty(), Screen(20, 3)
    drawn = Drawn(console(file, 20, 3))
    drawn.enter()

    def draw(*lines: Line) -> str:
        before = len(file.getvalue())
        drawn.draw(lines, (20, 3))
        new = file.getvalue()[before:]
        screen.feed(file.getvalue()[before:] if before > 20 else file.getvalue())
        return new

    draw(line("one"), line(("two", "bold")), line("漢" * 10))
    assert screen.lines == ["one", "two", "漢" * 10]
    new = draw(line("one"), line("2"), line("漢" * 10))
    assert screen.lines == ["one", "2", "漢" * 10]
    assert "one" not in new
    assert "漢" not in new
    assert draw(line("one"), line("2"), line("漢" * 10)) == ""
    drawn.forget()
    assert "one" in draw(line("one"), line("2"), line("漢" * 10))


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b", ["esc"]),
        (b"\x1b\x1b[A", ["esc", "up"]),
        (b"\r\n", ["enter", "enter"]),
        (b"\x1b[5~s\x1b[6~", ["page up", "s", "page down"]),
        (b"\x1b[1;5C\x1b[15~f", ["f"]),
        (b"\x1b[", []),
        (b"\xc3\xa9\x00\x7f?", ["?"]),
        (b"", []),
    ],
)
def test_keys(typed: bytes, keys: list[str]) -> None:
    assert keys_of(typed) == keys


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"width": 79}, "79 x 30 is too small a window; it takes 80 x 16"),
        ({"height": 15}, "100 x 15 is too small a window; it takes 80 x 16"),
        ({"no_color": True}, "NO_COLOR is set"),
    ],
)
def test_why_there_may_be_no_dashboard(options: dict[str, Any], reason: str) -> None:
    assert dashboard.refusal(console(Tty(), **options)) == reason


def test_colours_alone_do_not_make_a_terminal() -> None:
    pipe = Console(file=io.StringIO(), force_terminal=True, color_system="256", width=100)
    assert dashboard.refusal(pipe) == "stdout is not a terminal"


def test_a_dumb_terminal_is_not_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    on = Console(file=Tty(), width=100, height=30)
    assert dashboard.refusal(on) == "this terminal cannot be drawn on"


# -- pace ------------------------------------------------------------------------------------------


def test_a_pace_goes_up_and_down_by_steps() -> None:
    pacer = Pacer(1.0)
    for expected in (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, None, None):
        pacer.faster()
        assert pacer.pace == expected
    for expected in (100.0, 50.0):
        pacer.slower()
        assert pacer.pace == expected
    slowest = Pacer(Pacer.PACES[0])
    slowest.slower()
    assert slowest.pace == Pacer.PACES[0]


def test_a_paused_run_waits_until_it_is_let_go_or_interrupted() -> None:
    interrupted = threading.Event()
    pacer = Pacer(None, interrupted.is_set)
    passed: list[int] = []

    def run() -> None:
        for t in (1, 2):
            pacer(ev.PoolChecked(t, "p0", 0, 0, 0))
            passed.append(t)

    pacer.pause(True)
    thread = threading.Thread(target=run)
    thread.start()
    assert passed == []
    pacer.pause(False)
    thread.join()
    assert passed == [1, 2]
    pacer.pause(True)
    interrupted.set()
    run()
    assert passed == [1, 2, 1, 2]


# -- a session -------------------------------------------------------------------------------------

RUN = [sys.executable, "-m", "pddrt.cli", "run", "drawn.yaml", "--out", "run"]
SLOWLY = ["--pace", "0.05", "--set", "workload.output_tokens=900"]
"""Takes some minutes, unless it is ended."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "drawn.yaml").write_text(SCENARIO)
    return tmp_path


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.close()


def started(
    sessions: list[Session], folder: Path, *options: str, columns: int = 100,
    env: dict[str, str] | None = None, command: Sequence[str] = RUN,
) -> Session:  # fmt: skip
    root = str(Path(__file__).parent.parent)
    ours = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    ours |= {"PYTHONPATH": root, "TERM": "xterm-256color"}
    session = Session([*command, *options], folder, ours | (env or {}), columns)
    sessions.append(session)
    return session


def _given_back(session: Session) -> None:
    """The terminal, as it was."""
    assert not session.screen.alternate
    assert session.screen.cursor
    assert session.attributes() == session.modes


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())  # type: ignore[no-any-return]


def test_keys_do_what_they_say_and_q_ends_the_run(sessions: list[Session], folder: Path) -> None:
    session = started(sessions, folder, *SLOWLY)
    screen = session.until(lambda s: "P prefill" in s.text and "3 under way" in s.text)
    assert not screen.cursor
    assert session.attributes()[3] != session.modes[3], "no echo, no waiting for a line"
    assert int(session.attributes()[3]) & termios.ISIG, "Ctrl-C is a signal"  # type: ignore[call-overload]
    session.press("p")
    session.until(lambda s: "PAUSED" in s.lines[0])
    session.press("?")
    session.until(lambda s: "ends the run, as Ctrl-C does" in s.text)
    session.press("?s")
    session.until(lambda s: "s sort: TTFT" in s.lines[-1])
    session.press("f")
    session.until(lambda s: "f show ended" in s.lines[-1])
    session.press("fss")
    session.until(lambda s: "s sort: arrival  f hide ended" in s.lines[-1])
    followed = [row[1:5] for row in screen.lines if row.startswith(">")]
    session.press("\x1b[B" if followed == ["s0.0"] else "\x1b[A")
    session.until(
        lambda s: [row[1:5] for row in s.lines if row.startswith(">")] not in ([], followed)
    )
    session.press("\r")
    session.until(lambda s: any(row.startswith("queue  ") for row in s.lines))
    session.press("\x1b")
    session.until(lambda s: any(row.startswith("request") for row in s.lines))
    session.press("p+")
    session.until(lambda s: "pace 0.1" in s.lines[0])
    session.press("q")
    assert session.end() == 130
    _given_back(session)
    assert "interrupted; what was measured is saved in run" in screen.plain
    assert saved(folder)["interrupted"] is True


def test_a_window_may_change_its_size(sessions: list[Session], folder: Path) -> None:
    session = started(sessions, folder, *SLOWLY)
    session.until(lambda s: "3 under way" in s.text)
    for columns, rows in ((80, 24), (200, 50), (60, 8), (20, 3), (130, 30)):
        session.resize(columns, rows)
        session.until(lambda s, n=rows: s.lines[n - 1].startswith("q quit") or n == 3)  # type: ignore[misc]
        frames = session.screen.frames
        session.until(lambda s, n=frames: s.frames > n + 1)  # type: ignore[misc]
    side = next(row for row in session.screen.lines if "instance" in row)
    assert side.index("instance") > 80
    session.press("q")
    assert session.end() == 130


@pytest.mark.parametrize("when", ["mid-draw", "paused"])
def test_ctrl_c_ends_it_gently(when: str, sessions: list[Session], folder: Path) -> None:
    session = started(sessions, folder, *SLOWLY)
    session.until(lambda s: "3 under way" in s.text)
    if when == "paused":
        session.press("p")
        session.until(lambda s: "PAUSED" in s.lines[0])
    session.press("\x03")
    assert session.end() == 130
    _given_back(session)
    assert "KeyboardInterrupt" not in session.written
    assert saved(folder)["requests"]["total"] >= 3


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(
    sessions: list[Session], folder: Path
) -> None:
    shell = started(sessions, folder, command=["bash", "--norc", "--noprofile", "-i"])
    shell.press(" ".join([*RUN, *SLOWLY]) + "\n")
    shell.until(lambda s: "3 under way" in s.text)
    shell.press("\x1a")
    shell.until(lambda s: "Stopped" in s.plain)
    assert not shell.screen.alternate
    assert shell.screen.cursor
    shell.press("echo it is $((6 * 7))\n")
    shell.until(lambda s: "it is 42" in s.plain)
    shell.press("fg\n")
    shell.until(lambda s: s.alternate and "3 under way" in s.text)
    shell.press("q")
    shell.until(lambda s: "interrupted; what was measured is saved" in s.plain)
    shell.press("exit $?\n")
    assert shell.end() == 130
    assert saved(folder)["interrupted"] is True


def test_a_run_that_ends_leaves_its_state_and_its_numbers(
    sessions: list[Session], folder: Path
) -> None:
    session = started(sessions, folder, "--prompt", "[red]Why?")
    assert session.end() == 0
    plain = _unstyled(session.screen.plain)
    assert "1/1 done, 0 under way" in plain
    assert re.search(r"> \[red\]Why\?\r\n P .*(\r\n)+.*P 1 \+ \w \d+ tokens", plain, re.S), (
        "its answer"
    )
    assert "gap at the switch" in plain
    assert "saved in run" in plain
    _given_back(session)


def test_a_recorded_run_can_be_watched_again(sessions: list[Session], folder: Path) -> None:
    summary, _ = executed(folder / "run", None)
    command = [sys.executable, "-m", "pddrt.cli", "watch", "run"]
    session = started(sessions, folder, "--from", "1 s", "--pace", "0.05", command=command)
    screen = session.until(lambda s: s.lines[0].startswith("drawn  1.0"))
    session.press("++++++++++++")
    session.until(lambda s: "the end; q leaves" in s.lines[0])
    session.press("q")
    assert session.end() == 0
    _given_back(session)
    assert f"{summary['requests']['finished']}/6 done, 0 under way" in _unstyled(screen.plain)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "watch: stdout is not a terminal; see `pddrt inspect` and `pddrt report`"),
        (["--pace", "-1"], "--pace: found -1; allowed: a number above 0"),
        (["--from", "3"], "--from: found '3', a number without a unit"),
        (["--from", "1e9 s"], "--from: found 1e9 s; allowed: up to 2.5 s, the last event"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text(
        ev.to_line(ev.InstanceReturned(2_500_000_000, "md0")) + '\n{"event":"Ins'
    )
    monkeypatch.setattr(sys, "argv", ["pddrt", "watch", str(tmp_path), *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "env", "columns", "said"),
    [
        (["--dashboard", "off"], {}, 100, ""),
        ([], {"NO_COLOR": "1"}, 100, ""),
        (["--dashboard", "on"], {}, 79, "--dashboard on: 79 x 30 is too small a window"),
    ],
    ids=["off", "NO_COLOR", "narrow"],
)
def test_no_dashboard_where_it_is_not_wanted(
    options: Sequence[str], env: dict[str, str], columns: int, said: str,
    sessions: list[Session], folder: Path,
) -> None:  # fmt: skip
    session = started(sessions, folder, *options, columns=columns, env=env)
    assert session.end() == 0
    assert session.screen.frames == 0
    assert "\x1b[?1049h" not in session.written
    if env:
        assert "\x1b" not in _unstyled(session.written), "plain lines"
    assert "> " in session.written
    assert said in session.written
