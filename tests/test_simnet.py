"""The law of a link as a role feels it, to the nanosecond and the byte, under the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from pddrt.errors import ConnectionLost
from pddrt.frames import Frame
from pddrt.netem.flow import SEND_BUFFER
from pddrt.netem.net import Connection
from pddrt.netem.stream import RECV_BUFFER
from pddrt.types import MS, SECOND
from tests.netlab import MB, lab, on, wire_size, world


def test_connect_takes_a_round_trip_and_the_acceptor_starts_after_half() -> None:
    async def main() -> None:
        started = []
        async with lab("sim", world(rate=MB, delay=15 * MS)) as here:

            async def serve(_: Connection) -> None:
                started.append(here.env.now())

            await here.net.listen("gw", serve)
            await here.net.connect("m", "gw")
            assert started == [15 * MS]
            assert here.env.now() == 30 * MS
            await here.net.connect("p", "q")
            assert here.env.now() == 30 * MS  # no delay inside a

    on("sim", main)


def test_a_refusal_takes_a_round_trip_too() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=15 * MS)) as here:
            with pytest.raises(ConnectionLost):
                await here.net.connect("m", "gw")
            assert here.env.now() == 30 * MS

    on("sim", main)


@pytest.mark.parametrize("nbytes", [0, 1000, 5_000_000])
def test_a_frame_arrives_at_bytes_over_rate_plus_delay(nbytes: int) -> None:
    async def main() -> None:
        rate, delay = 6_250_000, 15 * MS
        async with lab("sim", world(rate, delay)) as here:
            near, far = await here.pair()
            frame = Frame("kv", {"request": "r1"}, bytes(nbytes))
            start = here.env.now()
            receiving = asyncio.create_task(far.recv())
            await near.send(frame)
            await receiving
            assert here.env.now() - start == -(-wire_size(frame) * SECOND // rate) + delay

    on("sim", main)


def test_flows_share_the_bottleneck_equally_whatever_their_frames() -> None:
    async def main() -> None:
        rate = 10 * MB
        async with lab("sim", world(rate, 10 * MS)) as here:
            pairs = [await here.pair("p" if k % 2 else "q", "m") for k in range(8)]
            got = [0] * 8
            start = here.env.now()

            async def talk(k: int) -> None:
                frame = Frame("kv", {}, bytes(1_000 * (1 + 3 * k)))
                while True:
                    await pairs[k][0].send(frame)

            async def listen(k: int) -> None:
                while True:
                    got[k] += wire_size(await pairs[k][1].recv())

            tasks = [asyncio.create_task(job(k)) for k in range(8) for job in (talk, listen)]
            await here.env.sleep_until(start + 10 * MS + SECOND)
            share = rate / 8
            for k in range(8):
                assert share - 1_100 * (1 + 3 * k) <= got[k] <= share
            stats = here.net.stats()[0]
            assert stats.peak_flows == 8
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    on("sim", main)


def test_a_control_stream_does_not_queue_behind_kv() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=10 * MS)) as here:
            kv, _ = await here.pair()
            control, far = await here.pair()
            await kv.send(Frame("kv", {}, bytes(SEND_BUFFER - 100)))
            start = here.env.now()
            frame = Frame("ids", {}, bytes(1000 - wire_size(Frame("ids"))))
            control.post(frame)
            await far.recv()
            assert here.env.now() - start == 10 * MS + 2 * MS  # 1000 bytes at half the rate

    on("sim", main)


def test_the_peer_learns_of_an_abort_one_delay_later_after_what_had_left() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=20 * MS)) as here:
            near, far = await here.pair()
            overhead = wire_size(Frame("kv", {"k": 1}))
            for k in (1, 2):
                await near.send(Frame("kv", {"k": k}, bytes(10_000 - overhead)))
            start = here.env.now()
            await here.env.sleep(15 * MS)
            near.abort()
            assert (await far.recv())["k"] == 1
            assert here.env.now() - start == 30 * MS
            with pytest.raises(ConnectionLost):
                await far.recv()
            assert here.env.now() - start == 35 * MS
            assert here.net.stats()[0].by_kind == {"kv": 15_000}  # half of the second was under way

    on("sim", main)


def test_a_rate_change_and_an_outage_act_at_once() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=5 * MS)) as here:
            near, far = await here.pair()
            overhead = wire_size(Frame("kv", {}))
            start = here.env.now()
            await near.send(Frame("kv", {}, bytes(100_000 - overhead)))
            await here.env.sleep(50 * MS)
            here.net.set_rate("wan", 0)
            await here.env.sleep(SECOND)
            here.net.set_rate("wan", 5 * MB)
            await far.recv()
            assert here.env.now() - start == 50 * MS + SECOND + 10 * MS + 5 * MS
            with pytest.raises(LookupError, match="no link is called 'moon'"):
                here.net.set_rate("moon", 1)

    on("sim", main)


def test_jitter_keeps_order_and_shows_in_the_arrivals() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=6 * MB, delay=15 * MS, jitter=3 * MS)) as here:
            near, far = await here.pair()
            delays = []
            for k in range(400):
                start = here.env.now()
                near.post(Frame("x", {"k": k}))
                assert (await far.recv())["k"] == k
                delays.append(here.env.now() - start)
                await here.env.sleep(20 * MS)
            mean = sum(delays) / len(delays)
            assert abs(mean - 15 * MS) < MS
            assert min(delays) > 0
            assert len(set(delays)) > 350

    on("sim", main)


def arrivals(seed: int) -> list[int]:
    times: list[int] = []

    async def main() -> None:
        async with lab("sim", world(rate=5 * MB, delay=9 * MS, jitter=2 * MS), seed) as here:
            pairs = [await here.pair() for _ in range(5)]

            async def talk(k: int) -> None:
                for size in (10, 50_000, 700, 2_000_000, 0):
                    await pairs[k][0].send(Frame("kv", {}, bytes(size + k)))

            async def listen(k: int) -> None:
                for _ in range(5):
                    await pairs[k][1].recv()
                    times.append(here.env.now())

            async with asyncio.TaskGroup() as group:
                for k in range(5):
                    group.create_task(talk(k))
                    group.create_task(listen(k))

    on("sim", main)
    return times


def test_the_same_seed_gives_the_same_times() -> None:
    assert arrivals(3) == arrivals(3)
    assert arrivals(3) != arrivals(4)


def test_the_send_buffer_is_bounded_to_the_byte() -> None:
    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=MS)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            frame = Frame("kv", {}, bytes(10_000))
            sent = 0

            async def talk() -> None:
                nonlocal sent
                while True:
                    await near.send(frame)
                    sent += 1

            talking = asyncio.create_task(talk())
            await here.env.sleep(SECOND)
            assert sent == SEND_BUFFER // wire_size(frame)
            start = here.env.now()
            here.net.set_rate("wan", MB)
            await here.env.sleep(100 * MS)  # 100 KB: nine frames and a part
            assert sent == SEND_BUFFER // wire_size(frame) + 100_000 // wire_size(frame)
            for _ in range(9):
                await far.recv()
            assert here.env.now() == start + 100 * MS  # they had arrived
            talking.cancel()
            await asyncio.wait([talking])

    on("sim", main)


def test_an_unread_stream_stops_at_send_buffer_propagation_and_receive_buffer() -> None:
    async def main() -> None:
        rate, delay = 10 * MB, 50 * MS
        async with lab("sim", world(rate, delay)) as here:
            near, _far = await here.pair()
            size, sent = 50_000, 0

            async def talk() -> None:
                nonlocal sent
                while True:
                    await near.send(Frame("kv", {}, bytes(size)))
                    sent += size

            talking = asyncio.create_task(talk())
            await here.env.sleep(10 * SECOND)
            window = SEND_BUFFER + rate * delay // SECOND + RECV_BUFFER
            assert window - 2 * size <= sent <= window + 2 * size
            talking.cancel()
            await asyncio.wait([talking])

    on("sim", main)


def test_an_end_that_overtakes_the_answer_fails_the_connect() -> None:
    """Who is called answers over a link that is down, and ends the connection before it is up."""

    async def main() -> None:
        async with lab("sim", world(rate=MB, delay=MS)) as here:

            async def serve(connection: Connection) -> None:
                await here.env.sleep(5 * MS)
                connection.abort()

            await here.net.listen("gw", serve)
            way = ("a", "b") if here.net.topology.sites["gw"] == "a" else ("b", "a")
            here.net.set_rate("wan", 0, way)
            connecting = asyncio.create_task(here.net.connect("m", "gw"))
            await here.env.sleep(10 * MS)
            assert not connecting.done()
            here.net.set_rate("wan", MB)
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(connecting, 1)

    on("sim", main)
