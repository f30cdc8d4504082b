"""Connections of all kinds through a proxy whose link and toxics change all the time, by seed:
every byte arrives once, in order, on every connection that was not to be cut; nothing is left
behind.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from pddrt.netem.proxy import Shape
from pddrt.types import MS
from tests.netlab import MB
from tests.proxylab import End, ProxyLab, proxy_lab, run, toxic

CONNECTIONS = 6
HARMLESS = {
    "latency": {"latency": 3, "jitter": 2},
    "bandwidth": {"rate": 40_000},
    "slicer": {"average_size": 900, "size_variation": 500, "delay": 20},
    "slow_close": {"delay": 2},
    "timeout": {},
}
"""Toxics that lose nothing."""


def shape(rng: random.Random) -> Shape:
    rate = rng.choice([None, None, 20 * MB, 100 * MB, 0])
    delay = rng.choice([0, MS // 2, 3 * MS])
    return Shape(rate, delay, rng.choice([0, MS // 5]) if delay else 0)


async def talk(end: End, data: bytes, rng: random.Random, reset: bool) -> None:
    """Sends in pieces of all sizes; then half-closes, or is cut off in the middle."""
    at, stop = 0, len(data) // 2 if reset else len(data)
    while at < stop:
        size = rng.choice([1, 7, 1000, 20_000, 100_000])
        await end.send(data[at : min(at + size, stop)])
        at += size
        if rng.random() < 0.2:
            await asyncio.sleep(0)
    if reset:
        end.reset()
    else:
        end.half_close()


async def listen(end: End, rng: random.Random) -> bytes:
    found = bytearray()
    while data := await end.recv(rng.choice([1, 500, 65536, 1 << 20])):
        found += data
    return bytes(found)


async def change(lab: ProxyLab, rng: random.Random) -> None:
    """Until it is cancelled, something every millisecond or so; then all is as it was."""
    try:
        while True:
            await lab.env.sleep(rng.randrange(MS // 2, 2 * MS))
            what = rng.random()
            if what < 0.4:
                lab.proxy.reshape(rng.choice(["up", "down"]), shape(rng))
            elif what < 0.7 and len(lab.proxy.toxics) < 5:
                kind = rng.choice(list(HARMLESS))
                one = toxic(kind, rng.choice(["upstream", "downstream"]), **HARMLESS[kind])
                if one.name not in lab.proxy.toxics:
                    lab.proxy.add_toxic(one)
            elif lab.proxy.toxics:
                lab.proxy.remove_toxic(rng.choice(sorted(lab.proxy.toxics)))
    finally:
        for name in list(lab.proxy.toxics):
            lab.proxy.remove_toxic(name)
        for way in ("up", "down"):
            lab.proxy.reshape(way, Shape())


@pytest.mark.parametrize("seed", range(8))
def test_what_is_sent_arrives_whatever_changes(seed: int) -> None:
    print(f"seed {seed}")

    async def main() -> None:
        rng = random.Random(seed)
        async with proxy_lab(seed=seed, hold=rng.choice([200_000, 1 << 30])) as lab:
            texts = [
                (rng.randbytes(rng.randrange(2_000_000)), rng.randbytes(rng.randrange(900_000)))
                for _ in range(CONNECTIONS)
            ]
            cut = {k for k in range(CONNECTIONS) if rng.random() < 0.2}
            pairs = [await lab.pair() for _ in range(CONNECTIONS)]
            changing = asyncio.create_task(change(lab, rng))

            async def one(k: int) -> None:
                (client, server), (there, back) = pairs[k], texts[k]
                mine = [random.Random(f"{seed}/{k}/{i}") for i in range(4)]
                sending = asyncio.gather(
                    talk(client, there, mine[0], k in cut), talk(server, back, mine[1], False),
                    return_exceptions=True,
                )  # fmt: skip
                hearing = asyncio.gather(
                    listen(server, mine[2]), listen(client, mine[3]), return_exceptions=True
                )
                errors, (heard, answered) = await sending, await hearing
                if k in cut:
                    if isinstance(heard, bytes):
                        assert there.startswith(heard)
                    return
                assert [e for e in errors if e] == [], f"connection {k}"
                assert heard == there
                assert answered == back

            talking = asyncio.gather(*(one(k) for k in range(CONNECTIONS)))
            await asyncio.wait([talking], timeout=0.4)
            changing.cancel()  # the link may be down, or stalled: from here on it is not
            with suppress(asyncio.CancelledError):
                await changing
            await talking
            for end in lab.ends:
                end.close()
            await lab.over()

    run(main)
