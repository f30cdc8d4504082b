"""The proxy over real sockets: what is relayed, how ends travel, what is held, what is refused.

Of times only what cannot fail is claimed here: nothing comes earlier than its delay. How much later
it comes is what `netem check` measures, on a quiet machine. What goes wrong in other proxies, and
which test says that it does not here, is a table in `test_emulator_pitfalls`.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pddrt import cli
from pddrt.commands.proxy import _shows as shows
from pddrt.errors import BadInput, CannotRun
from pddrt.netem import proxy as proxy_module
from pddrt.netem import proxy_file
from pddrt.netem.proxy import LOOK_AHEAD, ProxySpec, Shape, parse_address
from pddrt.netem.relay import IN_FLIGHT_UNLIMITED, SINK_BOUND, in_flight_bound
from pddrt.types import MS, SECOND
from tests.netlab import MB, payload
from tests.proxylab import proxy_lab, run, toxic

SHAPES = {
    "nothing in between": Shape(),
    "delay": Shape(delay=3 * MS),
    "rate": Shape(rate=200 * MB),
    "both, and jitter": Shape(rate=300 * MB, delay=2 * MS, jitter=MS),
}
shaped = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


# -- what is relayed -------------------------------------------------------------------------------


@shaped
def test_bytes_arrive_once_in_order_unharmed_both_ways_at_once(shape: Shape) -> None:
    async def main() -> None:
        async with proxy_lab(shape, shape) as lab:
            client, server = await lab.pair()
            there, back = payload(3_000_000, 1), payload(2_000_000, 2)

            async def send(end: object, data: bytes) -> None:
                await end.send(data)  # type: ignore[attr-defined]
                end.half_close()  # type: ignore[attr-defined]

            sending = asyncio.gather(send(client, there), send(server, back))
            assert await asyncio.gather(server.all(), client.all()) == [there, back]
            await sending
            await lab.over()
            assert lab.proxy.transferred == (len(there), len(back))

    run(main)


def test_many_small_writes_are_not_delayed_one_by_one() -> None:
    """The delay is paid once per byte: a hundred writes spread no further than their sender did."""

    async def main() -> None:
        delay = 20 * MS
        async with proxy_lab(Shape(delay=delay), Shape(delay=delay)) as lab:
            client, server = await lab.pair()
            begun = lab.env.now()
            for k in range(100):
                await client.send(bytes([k]))
            assert await server.exactly(100) == bytes(range(100))
            flow = next(iter(lab.proxy.connections.values())).up._flow
            assert flow.due - begun < 100 * delay / 4
            assert lab.env.now() - begun >= delay - LOOK_AHEAD

    run(main)


@shaped
def test_a_half_close_leaves_the_other_way_open(shape: Shape) -> None:
    async def main() -> None:
        async with proxy_lab(shape, shape) as lab:
            client, server = await lab.pair()
            await client.send(b"question")
            client.half_close()
            assert await server.all() == b"question"
            await server.send(payload(100_000))
            server.half_close()
            assert await client.all() == payload(100_000)
            await lab.over()

    run(main)


def test_an_upstream_may_speak_first_and_close_first() -> None:
    async def main() -> None:
        async with proxy_lab(Shape(delay=2 * MS), Shape(delay=2 * MS)) as lab:
            client, server = await lab.pair()
            await server.send(b"220 ready")
            server.half_close()
            assert await client.all() == b"220 ready"
            await client.send(b"late, and still heard")
            client.half_close()
            assert await server.all() == b"late, and still heard"
            await lab.over()

    run(main)


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_reset_reaches_the_other_side_behind_the_data_and_not_before_its_delay(who: str) -> None:
    async def main() -> None:
        delay = 10 * MS
        async with proxy_lab(Shape(delay=delay), Shape(delay=delay)) as lab:
            client, server = await lab.pair()
            await client.send(b"a")
            await server.exactly(1)
            await server.send(b"b")
            await client.exactly(1)
            one, other = (client, server) if who == "client" else (server, client)
            await one.send(b"last words")
            while lab.proxy.transferred != ((11, 1) if who == "client" else (1, 11)):
                await lab.env.sleep(MS // 10)
            begun = lab.env.now()
            one.reset()
            assert await other.exactly(10) == b"last words"
            with pytest.raises(ConnectionResetError):
                await other.recv()
            assert lab.env.now() - begun >= delay - LOOK_AHEAD
            await lab.over()

    run(main)


def test_a_side_that_closed_and_is_written_to_resets_the_writer() -> None:
    async def main() -> None:
        async with proxy_lab(Shape(delay=MS), Shape(delay=MS)) as lab:
            client, server = await lab.pair()
            server.close()  # both ways: what still comes in is answered by a reset
            assert await client.recv() == b""

            async def flood() -> None:
                while True:
                    await client.send(bytes(1000))
                    await lab.env.sleep(MS)

            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                await flood()
            await lab.over()

    run(main)


# -- the handshake ---------------------------------------------------------------------------------


def test_the_handshake_is_delayed_too() -> None:
    """The request takes one delay, the answer another; only then does the client's first byte
    leave."""

    async def main() -> None:
        delay = 15 * MS
        async with proxy_lab(Shape(delay=delay), Shape(delay=delay)) as lab:
            begun = lab.env.now()
            client = await lab.dial()
            await client.send(b"x")
            server = await lab.accept()
            assert lab.env.now() - begun >= delay - LOOK_AHEAD
            await server.exactly(1)
            assert lab.env.now() - begun >= 3 * (delay - LOOK_AHEAD)

    run(main)


def test_an_upstream_that_refuses_resets_the_client_and_is_said_once() -> None:
    async def main() -> None:
        delay = 5 * MS
        async with proxy_lab(Shape(delay=delay), Shape(delay=delay), refusing=True) as lab:
            for _ in range(3):
                begun = lab.env.now()
                client = await lab.dial()
                with pytest.raises(ConnectionResetError):
                    await client.recv()
                assert lab.env.now() - begun >= 2 * (delay - LOOK_AHEAD)
            assert lab.proxy.refused == 3
            assert len(lab.said) == 1
            assert "connection refused" in lab.said[0]
            await lab.over()

    run(main)


def test_a_client_that_leaves_during_the_handshake_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with proxy_lab(Shape(delay=5 * MS), Shape(delay=5 * MS)) as lab:
            for leave in ("close", "reset"):
                getattr(await lab.dial(), leave)()
                server = await lab.accept()
                with pytest.raises(ConnectionResetError) if leave == "reset" else _no_error():
                    assert await server.recv() == b""
                server.close()
            await lab.over()

    run(main)


# -- the link is the proxy's -----------------------------------------------------------------------


def test_the_rate_is_the_links_and_not_a_connections() -> None:
    async def main() -> None:
        rate, size = 40 * MB, 400_000
        async with proxy_lab(Shape(rate=rate)) as lab:
            pairs = [await lab.pair() for _ in range(4)]
            begun = lab.env.now()
            await asyncio.gather(*(client.send(bytes(size)) for client, _ in pairs))
            await asyncio.gather(*(server.exactly(size) for _, server in pairs))
            assert lab.env.now() - begun >= 4 * size * SECOND // rate - LOOK_AHEAD
            stats = lab.proxy.up.stats()
            assert stats.bytes == 4 * size
            assert abs(stats.busy - 4 * size * SECOND // rate) < MS

    run(main)


def test_changing_the_link_under_traffic_holds_at_once_and_loses_nothing() -> None:
    async def main() -> None:
        async with proxy_lab(Shape(delay=MS)) as lab:
            client, server = await lab.pair()
            lab.proxy.reshape("up", Shape(rate=0, delay=MS))
            data = payload(6_000_000)
            sending = asyncio.create_task(client.send(data))
            while lab.proxy.up.link.backlog(lab.env.now()) < 100_000:
                await lab.env.sleep(MS)
            assert lab.proxy.up.stats().bytes == 0, "a rate of 0 is an outage, and no error"
            lab.proxy.reshape("up", Shape(rate=50 * MB, delay=5 * MS))
            first = await server.exactly(1_000_000)
            lab.proxy.reshape("up", Shape())  # nothing is left of the link; data is still on it
            rest = await server.exactly(len(data) - len(first))
            await sending
            assert first + rest == data
            pipe = next(iter(lab.proxy.connections.values())).up
            assert pipe._plain, "neutral settings do nothing any more"

    run(main)


def test_an_unlimited_link_without_delay_keeps_no_copy() -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            client, server = await lab.pair()
            sending = asyncio.create_task(client.send(payload(20_000_000)))
            assert await server.exactly(20_000_000) == payload(20_000_000)
            await sending
            assert lab.proxies.hold.peak <= SINK_BOUND
            assert lab.proxy.up.stats().bytes == 0, "it never went over the link"

    run(main)


# -- what is held is bounded -----------------------------------------------------------------------


@shaped
def test_a_sink_that_does_not_read_stops_its_source(shape: Shape) -> None:
    """And the other way goes on meanwhile; nothing is lost when it reads again."""

    async def main() -> None:
        async with proxy_lab(shape, shape) as lab:
            client, server = await lab.pair(receive_buffer=4096)
            data = payload(40_000_000)
            sending = asyncio.create_task(server.send(data))
            before = -1
            while lab.proxy.transferred[1] != before or not before:
                before = lab.proxy.transferred[1]
                await lab.env.sleep(30 * MS)
            assert before < 30_000_000
            assert lab.proxy.held <= SINK_BOUND + 20 * MB
            await client.send(b"still here")
            assert await server.exactly(10) == b"still here"
            assert await client.exactly(len(data)) == data
            await sending

    run(main)


def test_an_end_waits_for_what_the_kernel_would_not_take_yet() -> None:
    async def main() -> None:
        async with proxy_lab(down=Shape(delay=MS)) as lab:
            client, server = await lab.pair(receive_buffer=4096)
            data = payload(14_000_000)

            async def send() -> None:
                await server.send(data)
                server.half_close()

            sending = asyncio.create_task(send())
            pipe = next(iter(lab.proxy.connections.values())).down
            found = b""
            while not pipe._ended:
                found += await client.recv(100_000)
            await sending
            while pipe._on_link:  # the end is at the sink
                await lab.env.sleep(MS)
            assert pipe._sink is not None
            assert pipe._sink.pending > 0
            found += await client.all()
            assert found == data

    run(main)


def test_all_connections_together_hold_no_more_than_they_may() -> None:
    async def main() -> None:
        limit = 3_000_000
        async with proxy_lab(Shape(delay=MS), hold=limit) as lab:
            pairs = [await lab.pair() for _ in range(8)]
            lab.proxy.reshape("up", Shape(rate=0, delay=MS))
            sending = [asyncio.create_task(client.send(payload(1_500_000))) for client, _ in pairs]
            before = 0
            while not before or lab.proxies.hold.held > before:
                before = lab.proxies.hold.held
                await lab.env.sleep(30 * MS)
            assert limit <= lab.proxies.hold.peak <= limit + (1 << 20)
            lab.proxy.reshape("up", Shape())
            for _, server in pairs:
                assert await server.exactly(1_500_000) == payload(1_500_000)
            await asyncio.gather(*sending)

    run(main)


def test_delay_does_not_throttle_the_rate() -> None:
    """What may be in flight is at least twice what fits into the link: 500 ms of it, here."""

    async def main() -> None:
        for rate in (MB, 100 * MB, 1000 * MB):
            async with proxy_lab(Shape(rate=rate, delay=500 * MS)) as lab:
                assert in_flight_bound(lab.proxy.up) >= rate  # a second of it
        async with proxy_lab(Shape(delay=500 * MS)) as lab:
            assert in_flight_bound(lab.proxy.up) == IN_FLIGHT_UNLIMITED

    run(main)


# -- toxics over sockets ---------------------------------------------------------------------------


def test_toxics_come_and_go_under_traffic_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with proxy_lab(Shape(delay=MS)) as lab:
            client, server = await lab.pair()
            data = payload(8_000_000)
            sending = asyncio.create_task(client.send(data))
            found = await server.exactly(500_000)
            for one in (
                toxic("latency", "upstream", latency=20, jitter=5),
                toxic("bandwidth", "upstream", rate=30_000),
                toxic("slicer", "upstream", average_size=5000, size_variation=3000, delay=10),
                toxic("timeout", "upstream"),
                toxic("slow_close", "upstream", delay=1),
            ):
                lab.proxy.add_toxic(one)
                if one.type != "timeout":
                    found += await server.exactly(300_000)
                if len(lab.proxy.toxics) > 2:
                    lab.proxy.remove_toxic(next(iter(lab.proxy.toxics)))
            for name in list(lab.proxy.toxics):
                lab.proxy.remove_toxic(name)
            found += await server.exactly(len(data) - len(found))
            await sending
            assert found == data

    run(main)


def test_a_stall_holds_data_back_and_its_sender_too_and_ends_with_the_toxic() -> None:
    async def main() -> None:
        async with proxy_lab(toxics=(toxic("timeout", "upstream"),)) as lab:
            client, server = await lab.pair()
            data = payload(30_000_000)
            sending = asyncio.create_task(client.send(data))
            before = -1
            while lab.proxy.held != before or not before:
                before = lab.proxy.held
                await lab.env.sleep(20 * MS)
            assert before <= 2 << 20
            assert lab.proxy.transferred == (0, 0)  # read, and not passed on
            lab.proxy.remove_toxic("timeout_upstream")
            assert await server.exactly(len(data)) == data
            await sending

    run(main)


def test_timeout_and_reset_peer_end_both_sides() -> None:
    async def main() -> None:
        async with proxy_lab(toxics=(toxic("timeout", timeout=10),)) as lab:
            client, server = await lab.pair()
            assert await client.recv() == b""
            assert await server.recv() == b""
            lab.proxy.remove_toxic("timeout_downstream")
            lab.proxy.add_toxic(toxic("reset_peer", timeout=10))
            client, server = await lab.pair()
            for end in (client, server):
                with pytest.raises(ConnectionResetError):
                    await end.recv()
            await lab.over()

    run(main)


def test_limit_data_passes_just_so_much_and_then_ends() -> None:
    async def main() -> None:
        async with proxy_lab(
            down=Shape(delay=MS), toxics=(toxic("limit_data", bytes=1000),)
        ) as lab:
            client, server = await lab.pair()
            await server.send(payload(400))
            assert await client.exactly(400) == payload(400)
            await server.send(payload(5000))
            assert await client.all() == payload(5000)[:600]
            await lab.over()

    run(main)


@pytest.mark.parametrize(("toxicity", "least", "most"), [(0.0, 0, 0), (0.5, 3, 17), (1.0, 20, 20)])
def test_toxicity_is_a_share_of_connections_and_the_same_for_a_seed(
    toxicity: float, least: int, most: int
) -> None:
    async def main() -> None:
        seen = []
        for _ in range(2):
            one = toxic("limit_data", toxicity=toxicity, bytes=0)
            async with proxy_lab(toxics=(one,)) as lab:
                for _ in range(20):
                    await lab.pair()
                relayed = lab.proxy.connections.values()
                seen.append([bool(r.down.stages) for r in relayed])
        assert seen[0] == seen[1]
        assert least <= sum(seen[0]) <= most

    run(main)


# -- what is refused, and what is left behind ------------------------------------------------------


def test_a_port_in_use_is_refused_by_name_and_the_others_go_on() -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            with pytest.raises(CannotRun, match=r"proxy two cannot listen on 127\.0\.0\.1:\d+: .+"):
                await lab.proxies.add(ProxySpec("two", lab.proxy.listen, "127.0.0.1:1"))
            assert list(lab.proxies.by_name) == ["db"]
            client, server = await lab.pair()
            await client.send(b"x")
            assert await server.exactly(1) == b"x"

    run(main)


def test_more_connections_than_there_may_be_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with proxy_lab() as lab:
            pairs = [await lab.pair() for _ in range(2)]
            third = await lab.dial()
            assert await third.recv() == b""
            assert lab.proxy.refused == 1
            pairs[0][0].close()
            while len(lab.proxy.connections) == 2:
                assert await pairs[0][1].recv() == b""
                pairs[0][1].close()
                await lab.env.sleep(MS)
            client, server = await lab.pair()
            await client.send(b"x")
            assert await server.exactly(1) == b"x"

    run(main)


def test_when_no_file_is_left_it_rests_and_goes_on_afterwards() -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            (server,) = lab.proxy._servers

            class Exhausted:
                def accept(self) -> None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

                def fileno(self) -> int:
                    return server.fileno()

            spent = Exhausted()
            lab.proxy._servers.append(spent)  # type: ignore[arg-type]
            for _ in range(3):
                lab.proxy._accept(spent)  # type: ignore[arg-type]
            lab.proxy._servers.remove(spent)  # type: ignore[arg-type]
            assert lab.said == ["proxy db cannot accept: Too many open files"]
            lab.proxy._rest(server)
            client, end = await lab.pair()
            await client.send(b"x")
            assert await end.exactly(1) == b"x"

    run(main)


def test_the_first_bytes_of_a_slow_link_do_not_wait_for_a_lump() -> None:
    """At 1 MB/s a load is 4 KiB, not 32: 4 ms."""

    async def main() -> None:
        async with proxy_lab(Shape(rate=MB)) as lab:
            client, server = await lab.pair()
            sending = asyncio.create_task(client.send(bytes(60_000)))
            while not lab.proxy.up.stats().bytes:
                await lab.env.sleep(MS // 10)
            assert lab.proxy.up.load_bytes == 4096
            sizes = [len(await server.recv())]
            while sum(sizes) < 60_000:
                sizes.append(len(await server.recv()))
            assert sizes[0] % 4096 == 0
            await sending

    run(main)


def test_stopping_closes_everything_and_leaves_no_file_open() -> None:
    async def main() -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        async with proxy_lab(Shape(delay=50 * MS), Shape(delay=50 * MS)) as lab:
            for _ in range(5):
                client, _ = await lab.pair()
                await client.send(bytes(10_000))
            lab.proxy.reshape("up", Shape(rate=0))
            await lab.proxies.reset()
            assert len(lab.proxy.connections) == 5, "a reset is of toxics and switches"
            await lab.proxy.stop()
            assert not lab.proxy.connections
            with pytest.raises(ConnectionRefusedError):
                await lab.dial()
            port = lab.proxy.listen
            await lab.proxy.start()
            assert lab.proxy.listen == port
            await lab.dial()
            del lab.env
        lab.proxies.by_name.clear()
        alarms = 1  # the clock's own file, until the loop ends
        assert len(os.listdir("/proc/self/fd")) <= len(before) + alarms

    if Path("/proc/self/fd").is_dir():
        run(main)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), (":0", "", 0), ("[::1]:8474", "::1", 8474)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:-1", "host:65536", "::1:80", "h:8²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse_address(text)


def test_ipv6_is_relayed_where_there_is_any() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on loopback here")

    async def main() -> None:
        async with proxy_lab() as lab:
            made = await lab.proxies.add(ProxySpec("six", "[::1]:0", lab.proxy.upstream))
            assert made.listen.startswith("[::1]:")
            reader, writer = await asyncio.open_connection(*parse_address(made.listen))
            server = await lab.accept()
            writer.write(b"x")
            assert await server.exactly(1) == b"x"
            writer.close()
            assert reader is not None

    run(main)


# -- the file --------------------------------------------------------------------------------------


def test_a_file_names_its_proxies_links_and_toxics(tmp_path: Path) -> None:
    file = tmp_path / "proxies.yaml"
    file.write_text(
        "api: 127.0.0.1:0\nseed: 3\nproxies:\n  db:\n    listen: 127.0.0.1:0\n"
        "    upstream: 127.0.0.1:6379\n    delay: 20 ms\n    tcp: cubic\n    loss: 1%\n"
        "    rate: {client>upstream: 100 Mbit/s, upstream>client: 1 MB/s}\n    toxics:\n"
        "      - {type: slicer, stream: upstream, attributes: {average_size: 64}}\n"
    )
    plan = proxy_file.read(file)
    assert (plan.api, plan.seed) == ("127.0.0.1:0", 3)
    (db,) = plan.proxies
    up, down = db.link.toward("client", "upstream"), db.link.toward("upstream", "client")
    assert (up.rate, down.rate, up.delay, down.delay) == (12_500_000, MB, 20 * MS, 20 * MS)
    assert up.tcp is not None
    assert (up.tcp.control, up.loss) == ("cubic", 0.01)
    assert [t.as_json() for t in db.toxics] == [
        {
            "name": "slicer_upstream", "type": "slicer", "stream": "upstream", "toxicity": 1.0,
            "attributes": {"average_size": 64, "size_variation": 0, "delay": 0},
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "proxies:\n  db:\n    listen: nowhere\n    upstream: 127.0.0.1:1\n    rate: -5 MB/s\n"
            "    toxics:\n      - {type: slow}\n  q: {listen: '127.0.0.1:0'}\nseeed: 1\n",
            {3: "HOST:PORT", 5: "negative", 7: "latency | bandwidth", 8: "upstream", 9: "seed"},
        ),
        (
            "proxies:\n  db:\n    listen: :0\n    upstream: a:1\n    jitter: 3 ms\n    toxics:\n"
            "      - {type: latency, attributes: {latencyy: 1}}\n"
            "      - {type: latency, attributes: {latency: -1}}\n"
            "      - {type: slicer}\n      - {type: slicer}\n",
            {5: "jitter", 7: "latency, jitter", 8: "from 0", 10: "second toxic"},
        ),
    ],
    ids=["fields", "what goes together"],
)
def test_everything_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, text: str, wrong: dict[int, str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        proxy_file.read(file)
    said = str(caught.value).splitlines()
    print(*said, sep="\n")
    assert len(said) == len(wrong)
    for line, what in wrong.items():
        assert any(f"bad.yaml:{line}:" in text and what in text for text in said), (line, what)


def test_a_link_of_a_proxy_is_between_its_own_ends(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "proxies:\n  db:\n    listen: :0\n    upstream: a:1\n    rate: {a>b: 1 MB/s}\n"
        "    between: [a, b]\n"
    )
    with pytest.raises(BadInput) as caught:
        proxy_file.read(file)
    rate, between = caught.value.problems
    assert rate.endswith("one for each way: {client>upstream: ..., upstream>client: ...}")
    assert "between: found an unknown field" in between
    file.write_text('proxies:\n  "a\\0b": {listen: ":0", upstream: "a:1"}\n')
    with pytest.raises(BadInput, match="a printable name"):
        proxy_file.read(file)


@pytest.mark.parametrize(
    ("width", "term", "live"), [(120, "xterm", True), (79, "xterm", False), (120, "dumb", False)]
)
def test_a_narrow_or_dumb_terminal_gets_plain_lines(width: int, term: str, live: bool) -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            out = io.StringIO()
            env = {"TERM": term}
            console = Console(
                file=out, force_terminal=True, width=width, color_system=None, _environ=env
            )
            show = shows(console)
            show(lab.proxies, SECOND, False)
            show(lab.proxies, 2 * SECOND, True)
            assert ("1.0 s  db: 0 open of 0" in out.getvalue()) is not live
            assert ("late p99" in out.getvalue().split("\n")[0]) or not live

    run(main)


def test_a_file_without_proxies_needs_a_control_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "none.yaml"
    file.write_text("proxies: {}\n")
    monkeypatch.setattr(sys, "argv", ["pddrt", "netem", "proxy", "--file", str(file)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "found no proxies and no api" in capsys.readouterr().err


def test_options_are_checked_as_a_file_is() -> None:
    given = {"listen": ":0", "upstream": "h:1", "rate": "1 MB/s", "rate_down": "2 MB/s"}
    (spec,) = proxy_file.of_options(given).proxies
    up, down = spec.link.toward("client", "upstream"), spec.link.toward("upstream", "client")
    assert (up.rate, down.rate) == (MB, 2 * MB)
    wrong: list[tuple[dict[str, str], list[str]]] = [
        ({"listen": "x", "rate": "5"}, ["--listen", "--rate", "--upstream"]),
        (
            {"listen": ":0", "upstream": "h:1", "jitter": "1 ms", "loss": "5%"},
            ["--jitter", "--loss"],
        ),
        ({"listen": ":0", "upstream": "h:1", "profile": "moon"}, ["--profile"]),
    ]
    for asked, options in wrong:
        with pytest.raises(BadInput) as caught:
            proxy_file.of_options(asked)
        assert sorted(text.split(":")[0] for text in caught.value.problems) == options
        assert "proxies" not in str(caught.value)


def test_a_delay_of_nothing_is_no_room_for_a_profiles_jitter() -> None:
    given = {"listen": ":0", "upstream": "h:1", "profile": "mobile"}
    with pytest.raises(BadInput, match=r"^--delay: found 0 beside the profile's jitter of 4 ms"):
        proxy_file.of_options(given | {"delay": "0 ms"})
    (spec,) = proxy_file.of_options(given | {"delay_down": "9 ms"}).proxies
    up, down = spec.link.toward("client", "upstream"), spec.link.toward("upstream", "client")
    assert (up.delay, down.delay) == (30 * MS, 9 * MS)


def test_where_no_host_is_given_only_this_machine_is_let_in() -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            made = await lab.proxies.add(ProxySpec("any", ":0", lab.proxy.upstream))
            assert made.listen.startswith("127.0.0.1:")

    run(main)


def test_tcp_and_loss_are_part_of_the_link_and_no_byte_is_lost() -> None:
    async def main() -> None:
        given = {"listen": "127.0.0.1:0", "rate": "200 Mbit/s", "delay": "2 ms", "tcp": "cubic",
                 "loss": "1%"}  # fmt: skip
        async with proxy_lab() as lab:
            (spec,) = proxy_file.of_options({**given, "upstream": lab.proxy.upstream}).proxies
            made = await lab.proxies.add(spec)
            lab.proxy = made
            client, server = await lab.pair()
            there, back = payload(700_000, 1), payload(300_000, 2)
            await client.send(there)
            await server.send(back)
            assert await server.exactly(len(there)) == there
            assert await client.exactly(len(back)) == back
            assert made.up.stats().lost > 0
            client.half_close()
            assert await server.all() == b""
            server.half_close()
            assert await client.all() == b""
            await lab.over()

    run(main)


def test_a_list_as_toxiproxy_reads_it_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "toxiproxy.json"
    file.write_text('[{"name": "a", "listen": "127.0.0.1:0", "upstream": "h:1", "enabled": false}]')
    (spec,) = proxy_file.read(file).proxies
    assert spec == ProxySpec("a", "127.0.0.1:0", "h:1", enabled=False)
    file.write_text('[{"name": "a", "listen": "127.0.0.1:0"}, 5]')
    with pytest.raises(BadInput, match=r"proxy 1: upstream(.|\n)*proxy 2: found no object"):
        proxy_file.read(file)
    file.write_text("[")
    with pytest.raises(BadInput, match="JSON"):
        proxy_file.read(file)


def _no_error() -> object:
    import contextlib

    return contextlib.nullcontext()
