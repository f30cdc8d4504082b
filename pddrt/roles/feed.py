"""What P sends of a request to one decoder, when, and over which stream.

The lower half of `send`: KV by ranges that a finished step has written, in pieces, in the form that
the decoder's site gets; the first id behind it; a place in the path's lane while there is anything
to send; idle streams that are used again. `send` has what becomes of a transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import ConnectionLost
from pddrt.frames import Frame
from pddrt.messages import Limits, pack_logprobs
from pddrt.netem.net import Connection, Net
from pddrt.roles.instance import InstanceSpec
from pddrt.roles.solo import Solo
from pddrt.roles.transfer import Lane, Transfer
from pddrt.sched import SequenceState
from pddrt.trace import KVSent
from pddrt.types import EIGHT_BIT, Drawn, KVLayout, Sampling

PIECE_BYTES = 256 * 1024
"""Bound on one KV frame: 40 ms of a 50 Mbit/s link, so that a cancel or a rate change is soon felt,
yet large enough that the cost of a frame (some 0.1 ms) does not count on a fast one."""


@dataclass(slots=True)
class Prefilling:
    """A request on P."""

    request: str
    gateway: str
    ids: list[int]
    limits: Limits
    sampling: Sampling
    relay: str | None
    main: str | None
    held: bool
    """The main decoder is to be offered nothing, or the gateway is asked who that is."""
    lease: Timer
    unrelayed: bool = False
    """The relay is lost: nothing goes there, and the first id goes to the gateway."""
    answered: bool = False
    """The client has the whole answer; what still goes out is for a cache."""
    seq: SequenceState | None = None
    hit: int = 0
    first: Drawn | None = None
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def first_decoder(self) -> str:
        decoder = self.main if self.relay is None or self.unrelayed else self.relay
        assert decoder is not None
        return decoder

    def going_to(self, dst: str | None) -> Transfer | None:
        """The transfer to `dst` that is under way or has been whole."""
        return next((t for t in self.transfers if t.dst == dst and (t.whole or not t.over)), None)


class Feeder(Solo):
    def __init__(
        self,
        env: Env,
        net: Net,
        engine: Engine,
        spec: InstanceSpec,
        *,
        eos_ids: frozenset[int],
        stream_while_computing: bool,
        compressed: frozenset[str],
        paths: Mapping[str, str],
        max_transfers: int,
    ) -> None:
        """`compressed`: decoders to which KV goes in 8 bits. `paths`: by decoder, the path that
        leads to it; `max_transfers` go over one at a time.
        """
        super().__init__(env, net, engine, spec, eos_ids=eos_ids)
        self.stream_while_computing = stream_while_computing
        self.compressed = compressed
        self._idle_streams: dict[str, list[Connection]] = {}
        self._paths = paths
        self._lanes = {path: Lane(max_transfers) for path in paths.values()}

    def _wire(self, dst: str) -> KVLayout:
        """The form in which KV goes to `dst`."""
        layout = self.engine.layout
        return replace(layout, dtype=EIGHT_BIT) if dst in self.compressed else layout

    @property
    def wire_bytes_per_token(self) -> int:
        return min(self._wire(dst).bytes_per_token for dst in (*self.compressed, ""))

    # -- places on a path --------------------------------------------------------------------------

    def _enter(self, entry: Prefilling, transfer: Transfer) -> bool:
        """Whether this transfer may send now."""
        if transfer.since is None:
            if not self._lanes[self._paths[transfer.dst]].enter(transfer):
                return False
            transfer.begin(self.env.now())
            rest = entry.limits.prompt_len - transfer.sent
            self._tell_busy(entry, transfer, busy=True, tokens=rest)
        transfer.drained = False
        return True

    def _leave(self, entry: Prefilling, transfer: Transfer) -> None:
        """It has nothing to send now, or never again."""
        self._lanes[self._paths[transfer.dst]].leave(transfer)
        if transfer.since is not None:
            moved = transfer.rest(self.env.now())
            self._tell_busy(entry, transfer, busy=False, tokens=moved)

    def _tell_busy(self, entry: Prefilling, transfer: Transfer, *, busy: bool, tokens: int) -> None:
        if transfer.dst == entry.main:
            size = tokens * self._wire(transfer.dst).bytes_per_token
            about = {"request": entry.request, "to": transfer.dst}
            self.post(entry.gateway, "streaming", b"", **about, busy=busy, bytes=size)

    def _report(self, entry: Prefilling, transfer: Transfer, *, whole: bool) -> None:
        """How a transfer to a main decoder went, now that it has ended."""
        if transfer.dst == entry.main:
            size = transfer.moved * self._wire(transfer.dst).bytes_per_token
            about = {"request": entry.request, "to": transfer.dst, "whole": whole}
            self.post(entry.gateway, "crossed", b"", **about, bytes=size, busy_ns=transfer.busy)

    # -- streams -----------------------------------------------------------------------------------

    async def _kv_stream(self, dst: str) -> Connection:
        """An idle stream to `dst`, or a new one. It is read only to learn of its end."""
        if idle := self._idle_streams.get(dst):
            return idle.pop()
        conn = await self.open(dst, "kv")
        self.env.spawn(self._read(conn), f"{self.name} watches a stream to {dst}")
        return conn

    async def _drain(self, transfer: Transfer, conn: Connection) -> None:
        with contextlib.suppress(ConnectionLost):  # its reader sees to that
            await transfer.drain(conn)

    def _has_more(self, entry: Prefilling, transfer: Transfer) -> bool:
        """Whether there is KV that could be sent now."""
        return transfer.admitted and transfer.sent < self._sendable(entry)

    async def _send_next(self, entry: Prefilling, transfer: Transfer, conn: Connection) -> None:
        """Sends the next piece, which there is."""
        start = transfer.sent
        piece = max(1, PIECE_BYTES // self._wire(transfer.dst).bytes_per_token)
        end = min(self._sendable(entry), start + piece)
        payload = self.engine.read_kv(self.memory.runs(entry.request, start, end))
        if transfer.dst in self.compressed:
            payload = self.engine.pack_kv(payload)
        transfer.sent = end
        about = {"request": entry.request, "epoch": transfer.epoch, "start": start, "end": end}
        sent = KVSent(
            self.env.now(), entry.request, self.name, transfer.dst, start, end, len(payload)
        )
        self.env.trace.emit(sent)
        await conn.send(Frame("kv", about, payload))

    def _owes_first(self, entry: Prefilling, transfer: Transfer) -> bool:
        """Whether the first id may go, behind the KV."""
        known = entry.first is not None and transfer.carries_first
        return known and not transfer.sent_first and transfer.sent >= entry.limits.prompt_len

    async def _send_first(self, entry: Prefilling, transfer: Transfer, conn: Connection) -> None:
        assert entry.first is not None
        transfer.sent_first, transfer.drained = True, False
        first = {"id": entry.first.token, "logprobs": pack_logprobs([entry.first.logprobs])}
        position = entry.limits.prompt_len
        about = {"request": entry.request, "epoch": transfer.epoch, "position": position}
        await conn.send(Frame("first", {**about, **first}))

    def _all_handed(self, entry: Prefilling, transfer: Transfer) -> bool:
        """Whether there is nothing more to come, KV or first id."""
        owes = transfer.carries_first and not transfer.sent_first
        return transfer.admitted and transfer.sent >= entry.limits.prompt_len and not owes

    def _tell_sent(self, entry: Prefilling, transfer: Transfer) -> None:
        """The decoder hears by another way that all has left: what does not come now never will."""
        transfer.told_sent = True
        about = {"request": entry.request, "epoch": transfer.epoch}
        self.post(transfer.dst, "sent", b"", **about, end=transfer.sent)

    def _sendable(self, entry: Prefilling) -> int:
        """Positions whose KV a finished step has written."""
        assert entry.seq is not None
        if self.stream_while_computing or entry.first is not None:
            return entry.seq.computed
        return 0
