"""What befalls a net, on both nets alike: links that are worse, streams that break, frames that are
not what was sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.errors import BadFrame, ConnectionLost
from pddrt.frames import Frame
from pddrt.netem.faults import Impairment, NetFaults, Snare
from pddrt.netem.net import Connection
from pddrt.types import MS, SECOND
from tests.netlab import MB, Lab, both, lab, on, payload, world


def snare(harm: Any, kind: str | None = "kv", **about: Any) -> Snare:
    return Snare(harm, random.Random(5), kind, **about)


async def passes(near: Connection, far: Connection) -> None:
    """A frame goes each way."""
    for one, other in ((near, far), (far, near)):
        await one.send(Frame("kv", {"n": 1}, payload(3000)))
        assert bytes((await other.recv()).payload) == payload(3000)


async def ends(conn: Connection, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        await conn.recv()


async def stands_still(here: Lab, *waiting: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """The tasks, which nothing ends for as long as we look."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    await here.env.sleep(200 * MS)
    assert not any(task.done() for task in tasks)
    return tasks


# -- frames ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [0, 1, 5_000, 600_000])
def test_a_corrupt_frame_is_refused_and_ends_its_stream_alone(kind: str, size: int) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            other = await here.pair("q", "n")
            faults = NetFaults(here.net)
            faults.lay(snare("corrupt"))
            near.post(Frame("small"))
            near.post(Frame("kv", {"k": 1}, payload(size)))
            assert (await far.recv()).kind == "small"
            await ends(far, BadFrame, "checksum mismatch")
            await ends(near, ConnectionLost, "ended the connection|was lost")
            await passes(*other)
            await passes(*await here.pair())

    on(kind, main)


@both
@pytest.mark.parametrize("seed", range(6))
def test_what_follows_a_truncated_frame_is_not_taken_for_its_end(kind: str, seed: int) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            faults = NetFaults(here.net)
            faults.lay(Snare("truncate", random.Random(seed), "kv"))
            near.post(Frame("kv", {"k": 1}, payload(20_000)))
            for _ in range(5):
                near.post(Frame("kv", {"k": 2}, payload(20_000)))
            with pytest.raises(BadFrame):
                await far.recv()
            await passes(*await here.pair())

    on(kind, main)


@both
@pytest.mark.parametrize("how", ["send", "post"])
def test_a_duplicated_frame_comes_twice_in_its_place(kind: str, how: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            faults = NetFaults(here.net)
            faults.lay(snare("duplicate", frames=2))
            mine = bytearray(payload(50_000))
            for k in range(4):
                frame = Frame("kv", {"k": k}, memoryview(mine))
                await near.send(frame) if how == "send" else near.post(frame)
            got = [await far.recv() for _ in range(6)]
            assert [frame["k"] for frame in got] == [0, 0, 1, 1, 2, 3]
            assert all(bytes(frame.payload) == payload(50_000) for frame in got)
            await near.drain()

    on(kind, main)


@both
def test_a_delayed_frame_holds_up_what_is_behind_it_and_nothing_else(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            other = await here.pair("q", "n")
            faults = NetFaults(here.net)
            faults.lay(snare("delay", src="p", by=SECOND))
            begin = here.env.now()
            for k, name in enumerate(("before", "kv", "behind")):
                near.post(Frame(name, {"k": k}))
            assert (await far.recv()).kind == "before"
            await passes(*other)
            assert here.env.now() < begin + SECOND
            assert [(await far.recv())["k"] for _ in range(2)] == [1, 2]
            assert here.env.now() >= begin + SECOND

    on(kind, main)


@both
def test_a_snare_takes_only_what_it_lies_in_wait_for(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            faults = NetFaults(here.net)
            laid = [snare("corrupt", "offer"), snare("corrupt", src="m"), snare("corrupt", dst="n")]
            for one in laid:
                faults.lay(one)
            for k in range(3):
                await near.send(Frame("kv", {"k": k}))
            near.post(Frame("control"))
            assert [(await far.recv()).kind for _ in range(4)] == ["kv", "kv", "kv", "control"]
            for one in laid:
                faults.lift(one)
            near.post(Frame("offer"))
            assert (await far.recv()).kind == "offer"
            assert here.net.tamper is None, "nothing looks at frames any more"

    on(kind, main)


@both
def test_what_is_held_back_goes_with_its_stream(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            faults = NetFaults(here.net)
            faults.lay(snare("delay", by=3600 * SECOND))
            sending = asyncio.ensure_future(near.send(Frame("kv", {}, payload(9_000))))
            [reading] = await stands_still(here, far.recv())
            near.abort()
            for waiting in (sending, reading):
                with pytest.raises(ConnectionLost):
                    await waiting
            faults.close()
            assert here.net.direction("p", "m").backlog == 0
            await passes(*await here.pair())

    on(kind, main)


# -- streams ---------------------------------------------------------------------------------------


@both
def test_a_reset_ends_both_ends_and_others_can_be_opened(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            await passes(near, far)
            NetFaults(here.net).reset(near)
            await ends(near, ConnectionLost, "to m was reset on the way")
            await ends(far, ConnectionLost, "ended the connection|was lost")
            for end in (near, far):
                with pytest.raises(ConnectionLost):
                    await end.send(Frame("kv"))
            await passes(*await here.pair())

    on(kind, main)


@both
def test_who_does_not_listen_any_more_cannot_be_reached_until_it_does(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=200 * MB, delay=MS)) as here:
            near, far = await here.pair()
            here.net.unlisten("m")
            for _ in range(2):
                with pytest.raises(ConnectionLost, match="m "):
                    await here.net.connect("p", "m")
            await passes(near, far)
            await here.net.listen("m", here.accepted["m"].put)
            await passes(*await here.pair())

    on(kind, main)


# -- links -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_one_way_of_a_link_goes_down_alone(kind: str, way: tuple[str, str]) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=100 * MB, delay=MS)) as here:
            ends_of = dict(zip("ab", await here.pair(), strict=True))
            src, dst = ends_of[way[0]], ends_of[way[1]]
            faults, down = NetFaults(here.net), Impairment("wan", way, rate=0)
            faults.impair(down)
            src.post(Frame("stuck"))
            [stuck] = await stands_still(here, dst.recv())
            dst.post(Frame("free"))
            assert (await src.recv()).kind == "free"
            faults.relieve(down)
            assert (await stuck).kind == "stuck"

    on(kind, main)


@both
def test_of_several_impairments_the_worst_holds_and_in_the_end_none(kind: str) -> None:
    async def main() -> None:
        async with lab(kind, world(rate=100 * MB, delay=2 * MS)) as here:
            faults, begin = NetFaults(here.net), len(here.env.trace.events)
            there, back = here.net.direction("p", "m").link, here.net.direction("m", "p").link

            def state(link: Any) -> tuple[int, int, int]:
                return link.rate // MB, link.delay.mean // MS, link.delay.jitter // MS

            slow, both_ways = (
                Impairment("wan", ("a", "b"), rate=10 * MB),
                Impairment("wan", None, 40 * MB, 30 * MS, 1 * MS),
            )
            faults.impair(both_ways)
            assert state(there) == state(back) == (40, 30, 1)
            faults.impair(slow)
            faults.impair(better := Impairment("wan", None, 500 * MB, MS))
            assert (state(there), state(back)) == ((10, 30, 1), (40, 30, 1))
            faults.relieve(both_ways)
            assert (state(there), state(back)) == ((10, 2, 0), (100, 2, 0))
            faults.relieve(better)
            faults.close()
            assert state(there) == state(back) == (100, 2, 0)
            rates = [e for e in here.env.trace.events[begin:] if isinstance(e, ev.LinkRate)]
            told = [(e.between, (e.rate or 0) // MB, e.one_way) for e in rates]
            assert told == [
                (("a", "b"), 40, False),
                (("a", "b"), 10, True),
                (("b", "a"), 100, True),
                (("a", "b"), 100, True),
            ]
            with pytest.raises(LookupError, match="moon"):
                faults.impair(Impairment("moon", rate=0))
            with pytest.raises(LookupError, match="lead"):
                faults.impair(Impairment("wan", ("a", "c"), rate=0))

    on(kind, main)
