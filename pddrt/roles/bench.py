"""The nodes of `bench handoff`: a relay that hands over, a main decoder that takes, and others who
share the link.

They have the frames of the real roles and nothing of what those decide. Each notes on its own clock
what it saw; the experiment (`pddrt.bench`) reads that once a handover is over. Position p lies in
slot p of either pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import ConnectionLost, PeerError, RunFailed
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.netem.net import Connection, Net
from pddrt.roles.feed import PIECE_BYTES
from pddrt.roles.node import Node
from pddrt.trials import Way
from pddrt.types import SECOND, Ns, Run, Sampling, Span

RELAY, MAIN, CROSS, AWAY = "relay", "main", "cross-a", "cross-b"
"""Their names: the first and the third are in one site, the others in the other."""


class Party(Node):
    """A node of the experiment. Nothing here is allowed to fail: if something does, all ends."""

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        self.env.fail(RunFailed(f"{self.name} lost {conn.peer}: {error}"))

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        self.peer_lost(conn, error)

    def fail(self, request: str, detail: str) -> None:
        self.env.fail(RunFailed(detail))


@dataclass(frozen=True, slots=True)
class Held:
    """What there is to hand over: `ids` at [start, start + len(ids)), `following` the id there."""

    start: int
    ids: tuple[int, ...]
    following: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def slots(self) -> tuple[Run, ...]:
        """Where their KV lies, in either pool: position p in slot p."""
        return (Run(self.start, len(self.ids)),)


class RelayEnd(Party):
    """Hands over, one way or the other, and waits until it has been taken."""

    def __init__(self, env: Env, net: Net, engine: Engine, held: Held, copy_time: Ns) -> None:
        super().__init__(env, net, RELAY)
        self._engine = engine
        self._held = held
        self._copy_time = copy_time
        self._stream: Connection | None = None
        self._taken: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        await self.dial([MAIN])
        self._stream = await self.open(MAIN, "kv")
        self.env.spawn(self._read(self._stream), f"{self.name} watches its KV stream")

    def kv(self) -> bytes:
        return self._engine.read_kv(self._held.slots)

    def on_caught(self, conn: Connection, frame: Frame) -> None:
        assert self._taken is not None
        self._taken.set_result(None)

    async def hand_over(self, way: Way, request: str) -> tuple[Ns, Ns, int]:
        """When it began, when the wire's part began, and the bytes of its frames."""
        self._taken = asyncio.get_running_loop().create_future()
        start = self.env.now()
        if way == "ids":
            copied = start
            frames = [self._ids(request)]
            stream = self.peers[MAIN]
        else:
            await _pass(self.env, self._copy_time)
            payload = self.kv()
            copied = self.env.now()
            frames = [self._following(request), self._kv(request, payload)]
            assert self._stream is not None
            stream = self._stream
        for frame in frames:
            await stream.send(frame)
        await self._taken
        return start, copied, sum(frame.size for frame in frames)

    def _ids(self, request: str) -> Frame:
        about = {"request": request, "start": self._held.start, "last": True}
        return Frame("ids", about, pack_ids(self._held.ids))

    def _following(self, request: str) -> Frame:
        held = self._held
        about = {"request": request, "epoch": 0, "position": held.end, "id": held.following}
        return Frame("first", {**about, "logprobs": None})

    def _kv(self, request: str, payload: bytes) -> Frame:
        """One frame: pieces would let copies overlap with the wire, and parts no longer add up."""
        held = self._held
        about = {"request": request, "epoch": 0, "start": held.start, "end": held.end}
        return Frame("kv", about, payload)


class MainEnd(Party):
    """Takes KV, or ids, and says when it could go on from there."""

    def __init__(self, env: Env, net: Net, engine: Engine, copy_time: Ns) -> None:
        super().__init__(env, net, MAIN)
        self._engine = engine
        self._copy_time = copy_time
        self.following: int | None = None
        self.arrived: Ns = 0
        self.able: Ns = 0

    def forget(self, held: Held) -> None:
        """Overwrites the KV in question with zeros, which is nobody's."""
        size = len(held.ids) * self._engine.layout.bytes_per_token
        self._engine.write_kv(held.slots, bytes(size))
        self.following = None

    def kv(self, held: Held) -> bytes:
        return self._engine.read_kv(held.slots)

    def on_first(self, conn: Connection, frame: Frame) -> None:
        self.following = frame["id"]

    def on_kv(self, conn: Connection, frame: Frame) -> None:
        self.arrived = self.env.now()
        self.env.spawn(self._store(frame), f"{self.name} stores KV")

    def on_ids(self, conn: Connection, frame: Frame) -> None:
        self.arrived = self.env.now()
        self.env.spawn(self._extend(frame), f"{self.name} extends")

    async def _store(self, frame: Frame) -> None:
        await _pass(self.env, self._copy_time)
        start, end = frame["start"], frame["end"]
        self._engine.write_kv((Run(start, end - start),), memoryview(frame.payload))
        self._report(frame["request"], end)

    async def _extend(self, frame: Frame) -> None:
        ids, start = tuple(unpack_ids(frame.payload)), frame["start"]
        end = start + len(ids)
        self.following = await step(self._engine, ids, start, Sampling())
        self._report(frame["request"], end)

    def _report(self, request: str, end: int) -> None:
        self.able = self.env.now()
        self.post(RELAY, "caught", request=request, end=end, step_ns=0, token_ns=0)


class CrossEnd(Party):
    """One end of the cross traffic. The far end takes whatever comes."""

    def __init__(self, env: Env, net: Net, name: str) -> None:
        super().__init__(env, net, name)
        self._idle: list[Connection] = []

    def on_kv(self, conn: Connection, frame: Frame) -> None:
        """It has done its work by being here."""

    async def crowd(self, bytes_per_s: float, mean: int) -> None:
        """Sends flows of `mean` bytes on average, so many that they make up `bytes_per_s`."""
        rng = self.env.rng("bench/cross")
        at = self.env.now()
        while True:
            at += round(rng.expovariate(bytes_per_s / mean) * SECOND)
            nbytes = 1 + round(rng.expovariate(1 / mean))
            await self.env.sleep_until(at)
            self.env.spawn(self._flow(nbytes), f"{self.name} sends {nbytes} bytes")

    async def _flow(self, nbytes: int) -> None:
        """On a stream of its own. A new one opens where all are in use, and costs a round trip."""
        about = {"request": "cross", "epoch": 0, "start": 0, "end": 0}
        try:
            conn = self._idle.pop() if self._idle else await self.open(AWAY, "kv")
            for at in range(0, nbytes, PIECE_BYTES):
                await conn.send(Frame("kv", about, _NOTHING[: min(PIECE_BYTES, nbytes - at)]))
            await conn.drain()
        except ConnectionLost:
            if not self._closing:
                raise
        else:
            self._idle.append(conn)


_NOTHING = memoryview(bytes(PIECE_BYTES))


async def _pass(env: Env, duration: Ns) -> None:
    if duration:
        await env.sleep(duration)


async def step(
    engine: Engine, ids: Sequence[int], start: int, sampling: Sampling | None
) -> int | None:
    """One step of one sequence, whose position p lies in slot p."""
    runs = (Run(0, start + len(ids)),)
    (drawn,) = await engine.step([Span("bench", tuple(ids), start, runs, sampling)])
    return None if drawn is None else drawn.token
