"""One contract for both nets: memory under the virtual clock, sockets under the wall clock.

Nothing here asserts a time: see test_simnet.py for the law, exactly, and test_tcpnet.py for
sockets.
"""

from __future__ import annotations

import asyncio

import pytest

from pddrt.errors import BadFrame, ConnectionLost, PeerError
from pddrt.frames import PREFIX, Frame
from pddrt.netem.flow import SEND_BUFFER
from pddrt.netem.net import Connection, Topology
from pddrt.netem.stream import POST_BUFFER, RECV_BUFFER
from pddrt.types import MS, SECOND
from tests.netlab import MB, both, lab, on, payload, wire_size, world

# -- delivery ------------------------------------------------------------------------------------

SIZES = [0, 1, 3, 4_000, 4_096, 65_511, 65_536, 300_000, SEND_BUFFER, 0, 5_000_000, 7]


@both
def test_frames_of_all_sizes_arrive_once_in_order_unharmed_both_ways_at_once(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=500 * MB, delay=MS, jitter=MS // 5)) as here:
            near, far = await here.pair()
            assert (near.peer, far.peer) == ("m", "p")

            async def talk(me: Connection, seed: int) -> None:
                for k, size in enumerate(SIZES):
                    await me.send(Frame("kv", {"k": k, "by": seed}, payload(size, seed + k)))

            async def listen(me: Connection, seed: int) -> None:
                for k, size in enumerate(SIZES):
                    frame = await me.recv()
                    assert (frame.kind, dict(frame.fields)) == ("kv", {"k": k, "by": seed})
                    assert bytes(frame.payload) == payload(size, seed + k)

            async with asyncio.TaskGroup() as group:
                for me, its, mine in ((near, 100, 200), (far, 200, 100)):
                    group.create_task(talk(me, mine))
                    group.create_task(listen(me, its))

    on(kind, main)


@both
def test_a_header_larger_than_any_buffer_arrives(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()
            ids = list(range(70_000))
            await near.send(Frame("prompt", {"ids": ids}, b"tail"))
            near.post(Frame("small"))
            frame = await far.recv()
            assert frame["ids"] == ids
            assert bytes(frame.payload) == b"tail"
            assert (await far.recv()).kind == "small"

    on(kind, main)


@both
def test_many_frames_keep_their_order_across_send_and_post(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()

            async def talk() -> None:
                for k in range(600):
                    if k % 3:
                        near.post(Frame("control", {"k": k}))
                    else:
                        await near.send(Frame("kv", {"k": k}, bytes(k * 40)))

            async with asyncio.TaskGroup() as group:
                group.create_task(talk())
                got = [(await far.recv())["k"] for _ in range(600)]
            assert got == list(range(600))

    on(kind, main)


@both
def test_a_post_does_not_cut_into_a_frame_that_is_being_sent(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=400 * MB, delay=MS)) as here:
            near, far = await here.pair()
            big = payload(6_000_000)
            sending = asyncio.create_task(near.send(Frame("kv", {}, big)))
            await asyncio.sleep(0)
            assert not sending.done()
            near.post(Frame("control"))
            frame = await far.recv()
            assert bytes(frame.payload) == big
            assert (await far.recv()).kind == "control"
            await sending

    on(kind, main)


@both
@pytest.mark.parametrize("how", ["send", "post"])
def test_the_sender_may_reuse_its_payload(kind: str, how: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=100 * MB, delay=2 * MS)) as here:
            near, far = await here.pair()
            mine = bytearray(payload(500_000))
            for k in range(2):
                frame = Frame("kv", {}, memoryview(mine))
                await near.send(frame) if how == "send" else near.post(frame)
                mine[:] = bytes([k]) * len(mine)
                if k == 0:
                    assert bytes((await far.recv()).payload) == payload(500_000)
            assert bytes((await far.recv()).payload) == bytes(500_000)

    on(kind, main)


@both
def test_the_payload_of_a_post_that_must_wait_may_be_reused(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=100 * MB)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            await near.send(Frame("kv", {}, bytes(SEND_BUFFER - 1000)))
            mine = bytearray(b"a" * 5000)
            near.post(Frame("x", {}, mine))
            mine[:] = b"b" * 5000
            here.net.set_rate("wan", None)
            await far.recv()
            assert bytes((await far.recv()).payload) == b"a" * 5000

    on(kind, main)


@both
def test_what_arrives_shares_nothing_with_what_was_sent(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()
            fields = {"list": [1, 2], "map": {"a": 1}}
            await near.send(Frame("x", fields, bytearray(b"abc")))
            frame = await far.recv()
            fields["list"] = []
            assert frame.fields == {"list": [1, 2], "map": {"a": 1}}
            assert frame.fields["map"] is not fields["map"]

    on(kind, main)


@both
def test_typed_views_and_empty_views_are_sent_as_bytes(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()
            data = payload(64)
            for view in (
                memoryview(data).cast("Q"),
                memoryview(data).cast("H", (4, 8)),
                memoryview(b""),
            ):
                await near.send(Frame("kv", {}, view))
                assert bytes((await far.recv()).payload) == view.tobytes()

    on(kind, main)


# -- counting ------------------------------------------------------------------------------------


@both
def test_bytes_by_account_are_equal_at_both_ends(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=MS)) as here:
            near, far = await here.pair()
            counted = {"kv": 0, "ids": 0, "control": 0}
            for k in range(30):
                frame = Frame(("kv", "ids", "hello")[k % 3], {"k": k}, bytes(k * 1000))
                await near.send(frame)
                got = await far.recv()
                counted[got.account] += wire_size(got)
            there, back = (s for s in here.net.stats() if s.link == "wan")
            assert (there.src_site, there.dst_site, there.by_kind) == ("a", "b", counted)
            assert there.bytes == sum(counted.values())
            assert (back.src_site, back.dst_site, back.bytes, back.by_kind) == ("b", "a", 0, {})
            assert there.busy == pytest.approx(there.bytes * SECOND / (50 * MB), rel=1e-6)
            assert there.peak_flows == 1

    on(kind, main)


@both
def test_paths_are_what_the_topology_says(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=0, delay=3 * MS)) as here:
            net = here.net
            assert net.path_rate("p", "m") == (0, 3 * MS)
            assert net.path_rate("p", "q") == (None, 0)
            assert net.path_rate("m", "n") == (None, 0)  # no link declared inside b
            assert [(s.link, s.src_site, s.dst_site) for s in net.stats()] == [
                ("wan", "a", "b"),
                ("wan", "b", "a"),
                ("rdma", "a", "a"),
            ]
            for src, dst in (("p", "q"), ("m", "n"), ("p", "p")):
                near, far = await here.pair(src, dst)
                await near.send(Frame("x", {}, b"1"))
                assert (await far.recv()).payload == b"1"
            with pytest.raises(KeyError):
                net.path_rate("p", "nobody")

    on(kind, main)


@both
def test_backlog_is_what_was_handed_over_and_has_not_left(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            frame = Frame("kv", {}, bytes(200_000))
            await near.send(frame)
            near.post(Frame("x"))
            sending = asyncio.create_task(near.send(Frame("kv", {}, bytes(SEND_BUFFER))))
            await asyncio.sleep(0)
            total = (
                wire_size(frame)
                + wire_size(Frame("x"))
                + wire_size(Frame("kv", {}, bytes(SEND_BUFFER)))
            )
            assert here.net.path_backlog("p", "m") == total
            assert here.net.path_backlog("q", "n") == total  # the same bottleneck
            assert here.net.path_backlog("m", "p") == 0
            here.net.set_rate("wan", 50 * MB)
            for _ in range(3):
                await far.recv()
            await sending
            assert here.net.path_backlog("p", "m") == 0

    on(kind, main)


# -- back-pressure -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [100_000, 3_000_000])
def test_a_reader_that_lags_stops_the_sender(kind: str, size: int) -> None:
    """Bound: send buffer + receive buffer + what is in propagation (none here) + kernel and
    transport for sockets."""

    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()
            sent = 0
            blocked = asyncio.Event()

            async def talk() -> None:
                nonlocal sent
                while True:
                    sending = asyncio.ensure_future(
                        near.send(Frame("kv", {"k": sent}, bytes(size)))
                    )
                    await asyncio.wait([sending], timeout=0.25)
                    if not sending.done():
                        blocked.set()
                    await sending
                    sent += 1

            talking = asyncio.create_task(talk())
            await blocked.wait()
            kernel = 0 if kind == "sim" else (16 << 20) + (2 << 20)
            assert sent * size <= RECV_BUFFER + SEND_BUFFER + 2 * size + kernel
            # reading sets it going again, and nothing was lost
            for k in range(sent + 20):
                assert (await far.recv())["k"] == k
            talking.cancel()
            await asyncio.wait([talking])

    on(kind, main)


@both
def test_posts_are_bounded_by_name(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            frame = Frame("x", {}, bytes(1000))
            posted = 0
            with pytest.raises(PeerError, match="m does not take its control frames"):  # noqa: PT012
                while True:
                    near.post(frame)
                    posted += 1
            assert posted == POST_BUFFER // wire_size(frame)
            here.net.set_rate("wan", None)
            for _ in range(posted):
                await far.recv()
            near.post(frame)  # room again
            await far.recv()

    on(kind, main)


@both
def test_drain_returns_when_everything_has_left(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=20 * MB, delay=MS)) as here:
            near, _far = await here.pair()
            await near.drain()
            await near.send(Frame("kv", {}, bytes(1_000_000)))
            near.post(Frame("x"))
            assert here.net.path_backlog("p", "m") > 0
            await near.drain()
            assert here.net.path_backlog("p", "m") == 0

    on(kind, main)


@both
def test_a_cancelled_send_leaves_the_stream_whole(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            mine = bytearray(payload(3_000_000))
            begun = asyncio.create_task(near.send(Frame("kv", {"k": 1}, mine)))
            never = asyncio.create_task(near.send(Frame("kv", {"k": 2}, mine)))
            await asyncio.sleep(0)
            near.post(Frame("x"))
            for task in (begun, never):
                task.cancel()
            await asyncio.wait([begun, never])
            mine[:] = bytes(len(mine))
            here.net.set_rate("wan", None)
            frame = await far.recv()
            assert frame["k"] == 1
            assert bytes(frame.payload) == payload(3_000_000)
            assert (await far.recv()).kind == "x"
            assert here.net.path_backlog("p", "m") == 0

    on(kind, main)


# -- ends ----------------------------------------------------------------------------------------


@both
def test_close_delivers_everything_first(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=5 * MS)) as here:
            near, far = await here.pair()
            far.post(Frame("never read"))
            for k in range(5):
                await near.send(Frame("kv", {"k": k}, bytes(150_000)))
            near.post(Frame("x", {"k": 5}))
            await near.close()
            await near.close()  # again: nothing happens
            assert [(await far.recv())["k"] for _ in range(6)] == [0, 1, 2, 3, 4, 5]
            for _ in range(2):
                with pytest.raises(ConnectionLost, match=r"p ended the connection$"):
                    await far.recv()
            with pytest.raises(ConnectionLost):
                await far.send(Frame("x"))
            far.post(Frame("x"))  # dropped
            for end in (near.recv(), near.send(Frame("x")), near.drain()):
                with pytest.raises(ConnectionLost, match="on this side"):
                    await end

    on(kind, main)


@both
def test_close_delivers_everything_though_the_peer_still_floods(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:
            near, far = await here.pair()

            async def talk(me: Connection, frames: int) -> None:
                for k in range(frames):
                    await me.send(Frame("kv", {"k": k}, bytes(300_000)))

            async def talk_and_close() -> None:
                await talk(near, 100)
                await near.close()

            closing = asyncio.create_task(talk_and_close())
            flooding = asyncio.create_task(talk(far, 10_000))
            await here.env.sleep(20 * MS)
            for k in range(100):
                assert (await far.recv())["k"] == k
            await closing
            with pytest.raises(ConnectionLost):
                await far.recv()
            with pytest.raises(ConnectionLost):
                await flooding

    on(kind, main)


@both
def test_abort_drops_the_queue_and_the_peer_learns_of_it(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=20 * MB, delay=5 * MS)) as here:
            near, far = await here.pair()
            await near.send(Frame("kv", {"k": 0}, bytes(1000)))
            assert (await far.recv())["k"] == 0
            here.net.set_rate("wan", 0)
            await near.send(Frame("kv", {"k": 1}, bytes(500_000)))
            waiting = [
                asyncio.create_task(near.send(Frame("kv", {}, bytes(SEND_BUFFER)))),
                asyncio.create_task(near.drain()),
                asyncio.create_task(near.recv()),
            ]
            await asyncio.sleep(0)
            near.abort()
            near.abort()
            assert here.net.path_backlog("p", "m") == 0
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, ConnectionLost)
            here.net.set_rate("wan", 20 * MB)
            with pytest.raises(ConnectionLost, match="p ended the connection"):
                await far.recv()
            with pytest.raises(ConnectionLost):
                await far.send(Frame("x"))
            await near.close()  # nothing to wait for
            carried = sum(s.bytes for s in here.net.stats())
            assert carried == wire_size(Frame("kv", {"k": 0}, bytes(1000)))

    on(kind, main)


@both
def test_abort_in_the_middle_of_a_frame_ends_the_peer_inside_it(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=MS)) as here:
            near, far = await here.pair()
            sending = asyncio.create_task(near.send(Frame("kv", {}, bytes(60_000_000))))
            await here.env.sleep(30 * MS)  # 1.5 MB have left, of 1.2 s
            near.abort()
            with pytest.raises(ConnectionLost, match="inside a frame"):
                await far.recv()
            with pytest.raises(ConnectionLost):
                await sending

    on(kind, main)


@both
def test_abort_frees_the_link_for_others(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=MS)) as here:
            hog, _ = await here.pair()
            near, far = await here.pair("q", "n")
            here.net.set_rate("wan", 0)
            await hog.send(Frame("kv", {}, bytes(1_000_000)))
            hog.abort()
            await near.send(Frame("kv", {}, bytes(500)))
            assert here.net.path_backlog("p", "m") == wire_size(Frame("kv", {}, bytes(500)))
            here.net.set_rate("wan", 50 * MB)
            await far.recv()

    on(kind, main)


@both
def test_both_ends_may_end_it_at_once(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=2 * MS)) as here:
            for ends in (("close", "close"), ("abort", "close"), ("abort", "abort")):
                pair = await here.pair()
                for end, how in zip(pair, ends, strict=True):
                    await end.send(Frame("kv", {}, bytes(50_000)))
                    if how == "abort":
                        end.abort()
                await asyncio.gather(*(end.close() for end in pair))
                for end in pair:
                    with pytest.raises(ConnectionLost):
                        await end.recv()

    on(kind, main)


@both
def test_a_reader_woken_by_a_timeout_loses_no_frame(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=3 * MS)) as here:
            near, far = await here.pair()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await far.recv()
            await near.send(Frame("x", {"k": 1}))
            assert (await far.recv())["k"] == 1

    on(kind, main)


@both
def test_closing_the_net_ends_everything(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=20 * MS)) as here:
            near, far = await here.pair()
            here.net.set_rate("wan", 0)
            waiting = [
                asyncio.create_task(coro)
                for coro in (
                    near.recv(),
                    far.recv(),
                    near.send(Frame("kv", {}, bytes(5_000_000))),
                    here.net.connect("q", "n"),
                )
            ]
            await here.env.sleep(5 * MS)
            await here.net.close()
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, ConnectionLost)
            with pytest.raises(ConnectionLost, match="the net was closed"):
                await here.net.connect("p", "m")
            for end in (near, far):
                end.post(Frame("x"))
                end.abort()
                await end.close()

    on(kind, main)


@both
def test_closing_the_net_cancels_what_still_serves(kind: str) -> None:
    async def main() -> None:
        seen = []
        serving = asyncio.Event()

        async def serve(connection: Connection) -> None:
            seen.append(connection.peer)
            serving.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append("ended")

        async with lab(kind, world()) as here:
            await here.net.listen("gw", serve)
            await here.net.connect("m", "gw")
            await serving.wait()
        assert seen == ["m", "ended"]

    on(kind, main)


# -- opening -------------------------------------------------------------------------------------


@both
def test_connecting_to_nobody_fails_by_name(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(delay=MS)) as here:
            with pytest.raises(LookupError, match="nobody"):
                await here.net.connect("p", "nobody")
            with pytest.raises(ConnectionLost, match="gw does not listen"):
                await here.net.connect("m", "gw")
            await here.pair()  # others are not harmed

    on(kind, main)


@both
def test_sites_without_a_link_have_no_path(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, Topology({"p": "a", "m": "b"}, [])) as here:
            with pytest.raises(LookupError, match="no link between site a"):
                await here.net.connect("p", "m")

    on(kind, main)


@both
def test_a_failure_of_the_peer_ends_its_connection_not_the_listener(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world()) as here:

            async def serve(connection: Connection) -> None:
                while True:
                    frame = await connection.recv()
                    connection.post(Frame("echo", {"n": frame["n"]}))  # BadFrame without n

            await here.net.listen("gw", serve)
            bad = await here.net.connect("m", "gw")
            await bad.send(Frame("x"))
            with pytest.raises(ConnectionLost):
                await bad.recv()
            good = await here.net.connect("n", "gw")
            await good.send(Frame("x", {"n": 5}))
            assert (await good.recv())["n"] == 5
            assert not here.env.failure.done()

    on(kind, main)


@both
def test_a_cancelled_connect_leaves_nothing_behind(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=MB, delay=4 * MS)) as here:
            for wait in (1, 6):  # on the way there, and on the way back
                connecting = asyncio.create_task(here.net.connect("p", "m"))
                await here.env.sleep(wait * MS)
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
            near, far = await here.pair("q", "m")
            orphans = []
            while far.peer != "q":
                orphans.append(far)
                far = await here.accepted["m"].get()
            for orphan in orphans:  # they learn that the caller is gone
                with pytest.raises(ConnectionLost):
                    await orphan.recv()
            assert len(orphans) == 2 or kind == "tcp"  # there the caller may not have got so far
            await near.send(Frame("x"))
            await far.recv()

    on(kind, main)


# -- garbage -------------------------------------------------------------------------------------


class Damaged(Frame):
    """A frame with one bit of its wire form flipped."""

    def head(self) -> bytes:
        head = bytearray(Frame.head(self))
        head[self.fields["at"]] ^= 1
        return bytes(head)


@both
@pytest.mark.parametrize("at", [0, 2, 16, PREFIX.size, PREFIX.size + 3])
def test_garbage_ends_its_connection_and_no_other(kind: str, at: int) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=50 * MB, delay=MS)) as here:
            near, far = await here.pair()
            other, other_far = await here.pair("q", "n")
            await near.send(Frame("ok"))
            await near.send(Damaged("kv", {"at": at}, bytes(100)))
            await near.send(Frame("unreadable now"))
            assert (await far.recv()).kind == "ok"
            for _ in range(2):
                with pytest.raises(BadFrame):
                    await far.recv()
            with pytest.raises(ConnectionLost):
                await far.send(Frame("x"))
            with pytest.raises(ConnectionLost):
                await near.recv()
            await other.send(Frame("fine"))
            assert (await other_far.recv()).kind == "fine"

    on(kind, main)
