"""KV streams over real sockets, and peers that make it hard: one byte at a time, half-closed,
reset, silent; what a stream counts; memory that is used again."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress

import pytest

from pddrt.errors import BadFrame, ConnectionLost
from pddrt.frames import PREFIX, Buffers, Frame, FrameReader
from pddrt.netem import tcpnet
from pddrt.netem.stream import RECV_BUFFER
from pddrt.netem.tcpnet import loopback_socket
from pddrt.types import MS
from tests.netlab import MB, both, lab, on, payload, wire_size, world
from tests.proxylab import End


async def stranger(here: object, to: str = "m") -> End:
    """A raw socket that has connected to an instance, and said nothing yet."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, here.net.addresses[to])  # type: ignore[attr-defined]
    return End(sock)


HELLO = Frame("hello", {"src": "p", "dst": "m"}).head()


async def introduced(here: object) -> End:
    """One that has said hello, and was welcomed."""
    raw = await stranger(here)
    await raw.send(HELLO)
    reader = FrameReader(lambda _frame, _size: None, 4096)
    reader.feed(await raw.recv())
    return raw


def test_a_peer_that_writes_one_byte_at_a_time_is_understood() -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await stranger(here)
            frames = [Frame("kv", {"k": k}, payload(k * 37)) for k in range(6)]
            wire = HELLO + b"".join(f.head() + bytes(f.payload) for f in frames)
            for at in range(len(wire)):
                await raw.send(wire[at : at + 1])
                if at % 7 == 0:
                    await asyncio.sleep(0)
            far = await here.accepted["m"].get()
            for frame in frames:
                found = await far.recv()
                assert (found["k"], bytes(found.payload)) == (frame["k"], frame.payload)
            raw.close()

    on("tcp", main)


def test_a_peer_that_reads_a_few_bytes_at_a_time_gets_everything() -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            frames = [Frame("kv", {"k": k}, payload(100_000, k)) for k in range(8)]

            async def send() -> None:
                for frame in frames:
                    await far.send(frame)

            sending = asyncio.create_task(send())
            found: list[Frame] = []
            reader = FrameReader(lambda frame, _size: found.append(frame), 4096)
            rng = random.Random(5)
            while len(found) < len(frames):
                reader.feed(await raw.recv(rng.randrange(1, 3000)))
            await sending
            assert [bytes(f.payload) for f in found] == [f.payload for f in frames]
            raw.close()

    on("tcp", main)


@pytest.mark.parametrize("cut", [1, PREFIX.size - 1, PREFIX.size + 3, 50_000])
def test_a_half_close_inside_a_frame_is_a_lost_connection_and_said_so(cut: int) -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            whole = Frame("kv", {"k": 1}, payload(100_000))
            await raw.send(whole.head() + whole.payload)
            await raw.send((whole.head() + whole.payload)[:cut])
            raw.half_close()
            assert (await far.recv())["k"] == 1
            with pytest.raises(ConnectionLost, match="inside a frame"):
                await far.recv()
            raw.close()

    on("tcp", main)


def test_a_half_close_between_frames_ends_the_stream_behind_them() -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            await raw.send(Frame("last").head())
            raw.half_close()
            assert (await far.recv()).kind == "last"
            with pytest.raises(ConnectionLost, match=r"ended the connection$"):
                await far.recv()
            raw.close()

    on("tcp", main)


def test_a_reset_in_the_middle_of_a_frame_ends_that_stream_alone() -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            near, other = await here.pair()
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            await raw.send(Frame("kv", {}, bytes(9)).head())
            raw.reset()
            with pytest.raises(ConnectionLost):
                await far.recv()
            with pytest.raises(ConnectionLost):
                await far.send(Frame("x"))
            await near.send(Frame("x"))
            assert (await other.recv()).kind == "x"

    on("tcp", main)


def test_garbage_after_a_hello_ends_the_stream_by_name() -> None:
    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            await raw.send(random.Random(1).randbytes(10_000))
            with pytest.raises(BadFrame, match="not a frame"):
                await far.recv()
            with suppress(ConnectionResetError):
                assert await raw.all() == b""
            raw.close()

    on("tcp", main)


def test_a_frame_that_claims_to_be_huge_costs_nothing_until_it_comes() -> None:
    """Its memory is taken when it is announced, up to the limit of a frame and no further."""

    async def main() -> None:
        async with lab("tcp", world()) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            await raw.send(struct.pack("<2sBBIQQ", b"pd", 1, 0, 1 << 20, (1 << 32) + 1, 0))
            with pytest.raises(BadFrame, match="over the limit"):
                await far.recv()
            raw.close()

    on("tcp", main)


def test_of_many_that_say_nothing_the_first_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpnet, "MAX_UNKNOWN", 4)

    async def main() -> None:
        async with lab("tcp", world()) as here:
            silent = [await stranger(here) for _ in range(10)]
            for raw in silent[:6]:
                with suppress(ConnectionResetError):
                    assert await raw.recv() == b""
            assert here.net.strangers == 6
            near, far = await here.pair()  # one more of them had to go for it
            await near.send(Frame("x"))
            assert (await far.recv()).kind == "x"
            assert len(here.net._unknown) == 3
            for raw in silent:
                raw.close()

    on("tcp", main)


def test_a_peer_that_never_reads_is_held_up_and_holds_up_nobody_else() -> None:
    async def main() -> None:
        async with lab("tcp", world(rate=2000 * MB, delay=MS)) as here:
            raw = await introduced(here)
            far = await here.accepted["m"].get()
            sent = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    await far.send(Frame("kv", {}, bytes(1_000_000)))
                    sent += 1

            flooding = asyncio.create_task(flood())
            before = -1
            while sent != before:
                before = sent
                await here.env.sleep(50 * MS)
            assert sent < 60, "the kernel's buffers, ours, and the link's"
            near, other = await here.pair()
            await near.send(Frame("x"))
            assert (await other.recv()).kind == "x"
            flooding.cancel()
            raw.close()
            with pytest.raises(ConnectionLost):
                await far.recv()
            assert far.stats.blocked > 0
            ways = {one.way: one.ledger for one in here.net.kept()}
            assert ways["b>a"].blocked == far.stats.blocked

    on("tcp", main)


# -- what a stream counts --------------------------------------------------------------------------


@both
def test_both_ends_count_the_same(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=100 * MB, delay=MS)) as here:
            near, far = await here.pair()
            frames = [Frame("kv", {"k": k}, payload(60_000 * k, k)) for k in range(5)]
            for frame in frames:
                await near.send(frame)
            for _ in frames:
                await far.recv()
            size = sum(map(wire_size, frames))
            assert (near.stats.sent_frames, near.stats.sent_bytes) == (5, size)
            assert (far.stats.received_frames, far.stats.received_bytes) == (5, size)
            assert far.stats.sent_bytes == near.stats.received_bytes == 0
            assert near.stats.dropped_bytes == 0

    on(kind, main)


@both
def test_a_cancel_loses_what_was_queued_and_nothing_that_had_left(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=10 * MB, delay=20 * MS)) as here:
            near, far = await here.pair()
            sending = [
                asyncio.create_task(near.send(Frame("kv", {"k": k}, payload(50_000, k))))
                for k in range(60)
            ]
            for _ in range(3):
                await far.recv()
            near.abort()
            done = await asyncio.gather(*sending, return_exceptions=True)
            handed = sum(error is None for error in done)
            found = 3
            with suppress(ConnectionLost):
                while True:
                    await far.recv()
                    found += 1
            stats, whole = near.stats, wire_size(Frame("kv", {"k": 1}, payload(50_000)))
            assert found <= handed < 60
            assert stats.sent_bytes + stats.dropped_bytes == 60 * whole
            assert found * whole <= stats.sent_bytes < (found + 6) * whole
            assert far.stats.received_frames == found

    on(kind, main)


def test_waiting_for_room_is_counted_to_the_nanosecond_in_virtual_time() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=1 * MB)) as here:
            near, far = await here.pair()
            begun = here.env.now()
            for k in range(4):
                await near.send(Frame("kv", {"k": k}, bytes(1_000_000)))
            assert near.stats.waited == here.env.now() - begun > 0
            for _ in range(4):
                await far.recv()
            assert near.stats.blocked == 0

    on("sim", main)


@both
def test_a_slow_reader_blocks_the_stream_and_the_link_hears_of_it(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()
            size, count = 1 << 20, 3 * (RECV_BUFFER >> 20) + 24

            async def send() -> None:
                for _ in range(count):
                    await near.send(Frame("kv", {}, bytes(size)))

            sending = asyncio.create_task(send())
            while near._paused_since is None:
                await here.env.sleep(MS)
            await here.env.sleep(5 * MS)
            for _ in range(count):
                await far.recv()
            await sending
            assert near.stats.blocked >= 5 * MS

    on(kind, main)


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    buffers = Buffers(1 << 20)
    one, two = buffers.take(1000), buffers.take(1000)
    assert one.obj is not two.obj
    held = one.obj
    first = id(one.obj)
    part = one[10:20]
    del one
    assert buffers.take(1000).obj is not held, "we refer to it"
    del held
    assert id(buffers.take(1000).obj) != first, "a part of it is referred to"
    del part
    again = [buffers.take(900) for _ in range(4)]
    assert first in [id(view.obj) for view in again]
    assert all(len(view) == 900 for view in again)


def test_memory_that_is_kept_is_bounded_and_fits() -> None:
    buffers = Buffers(100_000)
    views = [buffers.take(size) for size in (40_000, 40_000, 40_000, 200_000, 100)]
    assert [len(view) for view in views] == [40_000, 40_000, 40_000, 200_000, 100]
    assert sum(map(len, buffers._kept)) <= 100_000
    del views
    assert len(buffers.take(100).obj) < 40_000, "a small frame does not take a large buffer"


def test_frames_that_are_kept_do_not_change_when_others_come() -> None:
    """The receiver keeps some frames and drops others; none is ever written over."""

    async def main() -> None:
        async with lab("tcp", world()) as here:
            near, far = await here.pair()
            count = 200

            async def send() -> None:
                for k in range(count):
                    await near.send(Frame("kv", {"k": k}, payload(100_000 + k, k)))

            sending = asyncio.create_task(send())
            kept = []
            for k in range(count):
                frame = await far.recv()
                if k % 3 == 0:
                    kept.append((k, frame.payload[7:]))
            await sending
            for k, rest in kept:
                assert bytes(rest) == payload(100_000 + k, k)[7:]
            assert len(here.net.buffers._kept) < count

    on("tcp", main)


def test_sockets_are_not_paced_by_the_kernel() -> None:
    with loopback_socket() as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 4 << 20
        if hasattr(socket, "TCP_CONGESTION"):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") in (b"cubic", b"reno")
