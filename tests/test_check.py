"""`netem check`, `netem proxy` and the throughput bench: that they measure what they say, judge it,
and leave nothing behind. Whether this machine passes is theirs to say, on a quiet day."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from typer.testing import CliRunner

from pddrt.cli import app
from pddrt.commands import check as check_cli
from pddrt.errors import CannotRun, RunFailed
from pddrt.netem import check, kernel
from pddrt.netem import measure as measuring
from pddrt.netem.check import Check, Effort
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.throughput import WAYS, measure, peak
from pddrt.types import MS, SECOND
from tests.netlab import MB

ROOT = Path(__file__).parent.parent


def run(work: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(60):
            return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


# -- what is predicted -----------------------------------------------------------------------------


def test_completion_times_are_predicted_by_fair_sharing() -> None:
    """Two transfers over 10 MB/s, 5 ms: alone for 50 ms, then in halves, then alone."""
    size = 1 << 20
    plan = ((0, size), (50 * MS, size))
    first, second = measuring.predicted(measuring.link(10 * MB, 5 * MS), plan)
    halves = 2 * (size - 500_000) * SECOND / (10 * MB)
    assert first == pytest.approx(50 * MS + halves + 5 * MS, rel=0.002)
    assert second == pytest.approx(halves + 50 * MS + 5 * MS, rel=0.002)


def test_tcp_takes_longer_than_the_link_and_both_clocks_run_the_same_program() -> None:
    fluid, cubic = (
        measuring.predicted(measuring.link(12_500_000, 10 * MS, tcp=tcp), check.PLAN)
        for tcp in (None, Tcp("cubic"))
    )
    assert all(slow > quick for slow, quick in zip(cubic, fluid, strict=True))


# -- what is measured, briefly: bounds that cannot fail --------------------------------------------


def test_nothing_arrives_early() -> None:
    took = run(measuring.latencies(measuring.link(None, 5 * MS), 20, MS))
    assert len(took) == 20
    assert min(t for _, t in took) >= 5 * MS - 100_000
    late = run(measuring.proxy_latency(3 * MS, 5))
    assert len(late) == 4
    assert min(late) >= -100_000


def test_handshakes_take_their_delays() -> None:
    nets, proxied = run(measuring.handshakes(3 * MS, 2))
    assert min(nets) >= 2 * (3 * MS - 100_000)
    assert min(proxied) >= 3 * MS - 100_000


def test_a_rate_is_measured_of_frames_and_of_the_proxy() -> None:
    assert run(measuring.rate(measuring.link(50 * MB), 0.05)) > 0
    assert run(measuring.proxy_rate(50 * MB, 0.05)) > 0


def test_shares_are_of_the_time_in_which_all_send() -> None:
    got = run(measuring.shares(3, measuring.link(20 * MB), 0.1))
    assert len(got) == 3
    assert min(got) > 0


def test_compute_threads_end() -> None:
    import threading

    before = threading.active_count()
    with measuring.busy(2):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_what_a_machine_moves_is_measured() -> None:
    assert run(peak(4 << 20)) > 1_000_000


def test_every_way_of_moving_bytes_moves_them_all() -> None:
    found = measure(1, WAYS, round_bytes=4 << 20, frame_bytes=64 << 10)
    assert set(found) == set(WAYS)
    assert all(len(rates) == 1 and rates[0] > 0 for rates in found.values())


def test_the_benches_print_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import kv, netem

    short = partial(measure, round_bytes=4 << 20)
    monkeypatch.setattr(kv, "measure", lambda rounds, ways, frame_bytes: short(rounds, ways))
    monkeypatch.setattr(sys, "argv", ["kv", "--rounds", "1", "--json"])
    kv.main()
    found = json.loads(capsys.readouterr().out)
    assert set(found["ratio"]) == set(WAYS) - {"plain"}
    assert found["measured"]["link"] == found["reference"]["streams"]
    monkeypatch.setattr(netem, "RATES", (20,))
    monkeypatch.setattr(netem, "DELAYS", (1,))
    monkeypatch.setattr(sys, "argv", ["netem", "--rounds", "1", "--seconds", "0.05", "--json"])
    netem.main()
    found = json.loads(capsys.readouterr().out)
    assert set(found["ratio"]) == {"rate 20 MB/s", "proxy 20 MB/s", "delay 1 ms", "completion"}
    assert all(ratio > 0 for ratio in found["ratio"].values())


# -- how it is judged ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "limit", "verdict"),
    [(0.1, 0.1, "ok"), (0.11, 0.1, "off"), (5.0, None, "ok"), (None, None, "skipped")],
)
def test_verdicts(error: float | None, limit: float | None, verdict: str) -> None:
    assert Check("x", "1", "2", error, limit, "ms").verdict == verdict


def test_a_rate_beyond_this_machine_is_skipped_by_name() -> None:
    async def rates() -> list[Check]:
        effort = Effort(0.05, 10)
        return [one async for one in check._rates(effort, 1_000_000, lambda _text: None)]

    found = run(rates())
    assert {one.verdict for one in found} == {"skipped"}
    assert all("more than 60% of the 1 MB/s" in one.note for one in found)


@pytest.mark.parametrize(("verdict", "said"), [("ok", "off"), ("degraded", "skipped")])
def test_a_busy_machine_that_says_so_is_not_off(
    verdict: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(_env: Any, spec: Any, _seconds: float) -> tuple[float, str]:
        return spec.rate * 0.9, verdict

    monkeypatch.setattr(check.measure, "rate_and_verdict", slow)

    async def busy() -> list[Check]:
        return [one async for one in check._while_busy(check.QUICK, lambda _text: None)]

    assert [one.verdict for one in run(busy())] == [said, said]


# -- the command -----------------------------------------------------------------------------------

GOOD = Check("rate", "1 MB/s", "1.0001 MB/s", 0.01, 0.1, "%", "a note")
BAD = Check("delay", "5 ms", "9 ms", 4.0, 0.25, "ms")
NOT = Check("tbf", "", "", None, None, "", "tc not found")


def with_checks(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    async def checks(_effort: Any, progress: Callable[[str], None]) -> AsyncIterator[Check]:
        progress("something")
        for one in found:
            yield one

    monkeypatch.setattr(check, "checks", checks)
    monkeypatch.setattr(kernel, "checks", lambda _quick, _progress: [NOT])


def test_check_lists_what_was_found_and_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, GOOD)
    done = CliRunner().invoke(app, ["netem", "check"], obj=_terminal())
    assert done.exception is None
    assert "ok       rate: 1.0001 MB/s (predicted 1 MB/s; error 0.01 of at most 0.1 %; a note)" in (
        done.stdout
    )
    assert "skipped  tbf: tc not found" in done.stdout
    assert "1 ok, 1 skipped" in done.stdout


def test_a_broken_limit_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, GOOD, BAD)
    done = CliRunner().invoke(app, ["netem", "check", "--json", "--no-kernel"], obj=_terminal())
    assert isinstance(done.exception, RunFailed)
    assert done.exception.exit_code == 1
    assert "delay" in str(done.exception)
    said = json.loads(done.stdout)
    assert said["verdict"] == "off"
    assert [one["verdict"] for one in said["checks"]] == ["ok", "off"]
    assert said["checks"][0]["error"] == 0.01


def test_the_table_has_a_line_a_check() -> None:
    table = check_cli._table([GOOD, BAD, NOT])
    assert table.row_count == 3


def _terminal() -> Any:
    from pddrt.cli import _terminal as settings

    return settings["obj"]


# -- the kernel's own TCP --------------------------------------------------------------------------

needs_root = pytest.mark.skipif(bool(kernel._missing()), reason=kernel._missing() or "-")


def test_what_is_missing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_missing", lambda *programs: f"{len(programs)} not found")
    found = kernel.checks(True, lambda _text: None)
    assert [(one.verdict, one.note) for one in found] == [
        ("skipped", "0 not found"),
        ("skipped", "3 not found"),
    ]


def test_what_cannot_be_measured_is_skipped_with_its_reason() -> None:
    def refused() -> Check:
        raise CannotRun("unshare: Operation not permitted")

    assert kernel._tried("x", "", refused).note == "unshare: Operation not permitted"


@needs_root
def test_the_kernels_tcp_crosses_our_packet_link_and_nothing_is_left() -> None:
    before = sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else []
    try:
        took = run(kernel._over_tun(500_000, 300_000, "cubic"))
    except (CannotRun, OSError) as error:
        pytest.skip(f"not allowed here: {error}")
    rate, delay = kernel.RATE, kernel.DELAY
    assert took >= 300_000 * SECOND // rate + 3 * delay, "a round trip, then the bytes, one way"
    if before:
        assert sorted(os.listdir("/sys/class/net")) == before


# -- the proxy's command ---------------------------------------------------------------------------


def pddrt(*words: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pddrt.cli", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **more)


def test_the_command_relays_counts_and_ends_on_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        upstream = f"127.0.0.1:{server.getsockname()[1]}"
        where = ["--listen", "127.0.0.1:0", "--upstream", upstream, "--delay", "2 ms"]
        with pddrt("netem", "proxy", *where, "--api", "127.0.0.1:0", "--json") as proxy:
            assert proxy.stderr is not None
            assert proxy.stdout is not None
            said = [proxy.stderr.readline(), proxy.stderr.readline()]
            port = int(said[0].split(" listens on 127.0.0.1:")[1].split(",")[0])
            assert said[1].startswith("control by HTTP on 127.0.0.1:")
            with socket.create_connection(("127.0.0.1", port), 10) as client:
                client.sendall(b"hello")
                there, _ = server.accept()
                with there:
                    assert there.recv(5, socket.MSG_WAITALL) == b"hello"
                    proxy.send_signal(signal.SIGTERM)
                    out, err = proxy.communicate(timeout=20)
        last = json.loads(out.splitlines()[-1])
        assert proxy.returncode == 130
        assert "interrupted" in err
        assert (last["proxy"], last["accepted"], last["up_bytes"]) == ("proxy", 1, 5)
        assert last["fidelity"]["links"]["proxy"]["directions"]["up"]["late_histogram"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "--listen and --upstream, or --file, or --api"),
        (["--listen", "127.0.0.1:0"], 2, "--upstream"),
        (["--file", "nothing.yaml"], 2, "nothing.yaml: cannot be read"),
        (["--file", "x.yaml", "--rate", "1 MB/s"], 2, "--file and --rate"),
        (["--listen", ":0", "--upstream", "a:1", "--profile", "moon"], 2, "moon"),
        (["--listen", ":0", "--upstream", "a:1", "--for", "5"], 2, "--for"),
        (["--listen", "127.0.0.1:{taken}", "--upstream", "a:1"], 3, "cannot listen on"),
        (["--api", "127.0.0.1:{taken}"], 3, "control interface cannot listen"),
    ],
)
def test_what_is_wrong_ends_it_with_one_message(words: list[str], code: int, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = [word.replace("{taken}", port) for word in words]
        done = CliRunner().invoke(app, ["netem", "proxy", *asked], obj=_terminal())
    assert getattr(done.exception, "exit_code", None) == code
    assert said in str(done.exception)


def test_lines_and_totals_are_for_people(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "proxies:\n  one: {listen: '127.0.0.1:0', upstream: 'h:1'}\n"
        "  two: {listen: '127.0.0.1:0', upstream: 'h:2', enabled: false}\n"
    )
    done = CliRunner().invoke(
        app, ["netem", "proxy", "--file", str(file), "--for", "1100 ms"], obj=_terminal()
    )
    assert done.exception is None
    assert "one: 0 open of 0, 0 refused; up 0 B/s, down 0 B/s" in done.stdout
    assert "two: 0 connections, 0 B up, 0 B down; times ok" in done.stdout
