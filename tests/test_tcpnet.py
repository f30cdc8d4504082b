"""What only sockets can do: strangers, dead ports, several processes; and what their law
computed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from pddrt.env import WallEnv
from pddrt.errors import ConnectionLost
from pddrt.frames import PREFIX, Frame
from pddrt.netem import tcpnet
from pddrt.netem.net import Connection
from pddrt.netem.tcpnet import TcpNet
from pddrt.trace import Trace
from pddrt.types import MS, SECOND, US
from tests.netlab import MB, lab, on, wire_size, world

HUGE = PREFIX.pack(b"pd", 1, 0, 10, 1 << 31, 0)
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "silence, then end": b"",
    "half a prefix": b"pd\x01",
    "asks for 2 GiB": HUGE,
    "wrong frame": Frame("kv", {}, b"123").head() + b"123",
    "wrong name": Frame("hello", {"src": "p", "dst": "n"}).head(),
    "unknown caller": Frame("hello", {"src": "eve", "dst": "m"}).head(),
    "caller is a list": Frame("hello", {"src": [], "dst": "m"}).head(),
    "no caller": Frame("hello", {"dst": "m"}).head(),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_dropped_and_counted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpnet, "HELLO_DEADLINE", 3600 * SECOND)  # not by the clock, but at once

    async def main() -> None:
        async with lab("tcp", world()) as here:
            near, far = await here.pair()
            reader, writer = await asyncio.open_connection(*here.net.addresses["m"])
            writer.write(STRANGERS[what])
            if what in ("silence, then end", "half a prefix"):
                writer.write_eof()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert here.net.strangers == 1
            await near.send(Frame("x"))
            await far.recv()
            assert here.accepted["m"].empty()

    on("tcp", main)


def test_a_stranger_that_says_nothing_is_dropped_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcpnet, "HELLO_DEADLINE", 10 * MS)

    async def main() -> None:
        async with lab("tcp", world()) as here:
            reader, writer = await asyncio.open_connection(*here.net.addresses["m"])
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert here.net.strangers == 1

    on("tcp", main)


def test_the_hello_deadline_does_not_end_a_connection_that_said_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcpnet, "HELLO_DEADLINE", 300 * MS)

    async def main() -> None:
        async with lab("tcp", world()) as here:
            near, far = await here.pair()
            await here.env.sleep(310 * MS)
            await near.send(Frame("x"))
            await far.recv()

    on("tcp", main)


def test_a_port_that_answers_with_something_else_is_a_lost_connection() -> None:
    async def main() -> None:
        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP ready, and some more text\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(other, "127.0.0.1", 0)
        env = WallEnv(1, Trace())
        dead = socket.create_server(("127.0.0.1", 0))
        addresses = {
            "m": server.sockets[0].getsockname()[:2],
            "n": dead.getsockname()[:2],
        }
        dead.close()
        net = TcpNet(env, world(), addresses)
        with pytest.raises(ConnectionLost):
            await net.connect("p", "m")
        with pytest.raises(ConnectionLost, match="n cannot be reached at 127"):
            await net.connect("p", "n")
        await net.close()
        server.close()
        await server.wait_closed()

    on("tcp", main)


def test_nets_of_two_processes_meet_by_a_shared_address_book() -> None:
    async def main() -> None:
        addresses: dict[str, tuple[str, int]] = {}
        env = WallEnv(1, Trace())
        one, two = TcpNet(env, world(), addresses), TcpNet(env, world(), addresses)
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        await two.listen("m", accepted.put)
        near = await one.connect("p", "m")
        far = await accepted.get()
        await near.send(Frame("x", {"k": 1}))
        assert (await far.recv())["k"] == 1
        await one.close()
        with pytest.raises(ConnectionLost):
            await far.recv()
        await two.close()
        assert addresses == {}

    on("tcp", main)


def test_sockets_obey_the_same_law_in_what_they_compute() -> None:
    """Bytes, busy time and the carried sum of a real transfer are what the rate says, however late
    the loop was."""

    async def main() -> None:
        rate = 40 * MB
        async with lab("tcp", world(rate, delay=2 * MS)) as here:
            near, far = await here.pair()
            size = 0
            for k in range(8):
                frame = Frame("kv", {"k": k}, bytes(250_000))
                size += wire_size(frame)
                await near.send(frame)
            for _ in range(8):
                await far.recv()
            stats = here.net.stats()[0]
            assert stats.bytes == size
            assert abs(stats.busy - size * SECOND // rate) <= 1000 * US
            assert stats.late_p99 <= stats.late_max

    on("tcp", main)
