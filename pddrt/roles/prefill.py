"""P: computes prompts in chunks and streams their KV out while it still computes.

A request here: queued for pages > computing > first token sampled > transfers finishing > gone. To
each decoder of its route runs one **transfer**: offered as soon as P has admitted the request (the
decoder's reservation and the opening of a KV stream hide behind the prefill), fed chunk by chunk as
steps complete, over when the decoder says `whole`. P holds the pages until every transfer is over:
KV that is still crossing the WAN occupies P's memory.

Nothing is sent before the step that wrote it has returned. A decoder may say at any time that it
wants no more (`close` by way of the gateway): the transfer's stream is aborted, which leaves at
most what is in flight.

To the first decoder of the route the first token's id travels behind the KV, on the same stream:
"KV for [0, m), next id x at m". Where the answer ends with that token, P tells the gateway itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import ConnectionLost, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.netem.net import Connection, Net
from pddrt.protocol import Limits, Manifest, finish, prompt_digest
from pddrt.roles.node import Instance, InstanceSpec
from pddrt.sched import Outcome, SequenceState
from pddrt.trace import (
    KVSent,
    PrefillEnded,
    PrefillStarted,
    TokensMade,
    TransferCancelled,
)
from pddrt.types import Sampling

PIECE_BYTES = 256 * 1024
"""Bound on one KV frame: 40 ms of a 50 Mbit/s link, so that a cancel or a rate change is soon felt,
yet large enough that the cost of a frame (some 0.1 ms) does not count on a fast one."""


@dataclass(slots=True)
class Transfer:
    """KV of one request on its way to one decoder; `sent` is the position up to which it was handed
    over.
    """

    dst: str
    epoch: int
    carries_first: bool
    sent: int = 0
    admitted: bool = False
    over: bool = False
    conn: Connection | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Prefilling:
    """A request on P."""

    request: str
    gateway: str
    ids: list[int]
    limits: Limits
    sampling: Sampling
    relay: str | None
    main: str
    lease: Timer
    seq: SequenceState | None = None
    first: int | None = None
    transfers: list[Transfer] = field(default_factory=list)


class Prefill(Instance):
    def __init__(
        self,
        env: Env,
        net: Net,
        engine: Engine,
        spec: InstanceSpec,
        *,
        eos_ids: frozenset[int],
        stream_while_computing: bool,
        early_first_token: bool,
    ) -> None:
        super().__init__(env, net, engine, spec)
        self.eos_ids = eos_ids
        self.stream_while_computing = stream_while_computing
        self.early_first_token = early_first_token
        self._entries: dict[str, Prefilling] = {}
        self._idle_streams: dict[str, list[Connection]] = {}
        self._epochs = 0

    # -- requests ----------------------------------------------------------------------------------

    def on_prefill(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: compute this prompt and feed these decoders."""
        request, ids = frame["request"], unpack_ids(frame.payload)
        entry = Prefilling(
            request=request,
            gateway=conn.peer,
            ids=ids,
            limits=Limits(len(ids), frame["max_tokens"], self.eos_ids),
            sampling=Sampling(*frame["sampling"]),
            relay=frame["relay"],
            main=frame["main"],
            lease=self.env.call_at(
                self.env.now() + frame["lease_ns"], self.fail, request, "lease expired on P"
            ),
        )
        self._entries[request] = entry
        self.wait_for_pages(request, len(ids))

    def admitted(self, request: str) -> None:
        entry = self._entries[request]
        entry.seq = SequenceState(request, list(entry.ids), 0, len(entry.ids), entry.sampling)
        self.sched.add(entry.seq)
        decoders = [entry.relay, entry.main] if entry.relay else [entry.main]
        for number, dst in enumerate(decoders):
            self._epochs += 1
            transfer = Transfer(dst, self._epochs, carries_first=number == 0)
            entry.transfers.append(transfer)
            self._offer(entry, transfer)
            self.env.spawn(self._transfer(entry, transfer), f"{self.name} sends {request} to {dst}")
        self.wake()

    def step_began(self, batch: object) -> None:
        for entry in self._entries.values():
            if entry.seq is not None and entry.seq.in_step and entry.seq.computed == 0:
                self.env.trace.emit(PrefillStarted(self.env.now(), entry.request, self.name))

    def stepped(self, outcome: Outcome) -> None:
        entry = self._entries[outcome.request]
        if outcome.next_id is not None:
            self._first_token(entry, outcome.next_id)
        for transfer in entry.transfers:
            transfer.wake.set()

    def _first_token(self, entry: Prefilling, token: int) -> None:
        now, start = self.env.now(), entry.limits.prompt_len
        self.sched.drop(entry.request)
        entry.first = token
        self.env.trace.emit(PrefillEnded(now, entry.request, self.name))
        self.env.trace.emit(
            TokensMade(now, entry.request, self.name, self.letter, start, start + 1, (token,))
        )
        if self.early_first_token or finish(entry.limits, start, token):
            self.post(
                entry.gateway,
                "tokens",
                pack_ids([token]),
                request=entry.request,
                start=start,
                source=self.letter,
            )

    def fail(self, request: str, detail: str) -> None:
        entry = self._entries.get(request)
        if entry is not None:
            self.post(entry.gateway, "failed", request=request, detail=detail)
            self._end(entry)

    def on_close(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the request is over, whatever is left of it here."""
        entry = self._entries.get(frame["request"])
        if entry is not None:
            self._end(entry)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for entry in list(self._entries.values()):
            if conn.peer in (entry.gateway, entry.relay, entry.main):
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

    def _end(self, entry: Prefilling) -> None:
        del self._entries[entry.request]
        entry.lease.cancel()
        for transfer in entry.transfers:
            if not transfer.over:
                self.env.trace.emit(
                    TransferCancelled(self.env.now(), entry.request, self.name, transfer.dst)
                )
                self._withdraw(entry, transfer)
        self.give_back_pages(entry.request)

    # -- transfers ---------------------------------------------------------------------------------

    def _offer(self, entry: Prefilling, transfer: Transfer) -> None:
        """The manifest: everything the decoder must know, and agree to, before KV comes."""
        layout = self.engine.layout
        manifest = Manifest(
            request=entry.request,
            epoch=transfer.epoch,
            layout=layout,
            prompt=tuple(entry.ids),
            digest=prompt_digest(layout.fingerprint, entry.ids),
            max_tokens=entry.limits.max_tokens,
            sampling=entry.sampling,
            gateway=entry.gateway,
            relay=entry.relay,
            main=entry.main,
        )
        self.post(transfer.dst, "offer", pack_ids(entry.ids), **manifest.fields())

    def _find(self, conn: Connection, frame: Frame) -> tuple[Prefilling, Transfer] | None:
        """The transfer a decoder speaks of; None when it is gone or of another epoch."""
        entry = self._entries.get(frame["request"])
        for transfer in entry.transfers if entry else ():
            if transfer.dst == conn.peer and transfer.epoch == frame["epoch"] and entry:
                return entry, transfer
        return None

    def on_admit(self, conn: Connection, frame: Frame) -> None:
        """A decoder has pages for this request, and says from which position on it lacks KV."""
        if found := self._find(conn, frame):
            _, transfer = found
            transfer.admitted, transfer.sent = True, frame["have"]
            transfer.wake.set()

    def on_refuse(self, conn: Connection, frame: Frame) -> None:
        if found := self._find(conn, frame):
            self.fail(found[0].request, f"{conn.peer} refuses: {frame['reason']}")

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV; P may forget it when all of them do."""
        if found := self._find(conn, frame):
            entry, transfer = found
            transfer.over = True
            if all(t.over for t in entry.transfers):
                self._end(entry)

    async def _transfer(self, entry: Prefilling, transfer: Transfer) -> None:
        """Feeds one decoder until it has everything. One task, one KV stream."""
        try:
            idle = self._idle_streams.setdefault(transfer.dst, [])
            conn = idle.pop() if idle else await self.open(transfer.dst, "kv")
        except ConnectionLost as error:
            self.fail(entry.request, f"{self.name} cannot reach {transfer.dst}: {error}")
            return
        transfer.conn = conn
        try:
            while not transfer.over and not self._closing:
                if not await self._send_next(entry, transfer, conn):
                    break
        except ConnectionLost as error:
            self.drop(conn)
            if not transfer.over:
                self.fail(entry.request, f"{self.name} lost {transfer.dst}: {error}")
            return
        transfer.conn = None
        if transfer.over and transfer.sent < entry.limits.prompt_len:
            self.drop(conn)
        else:
            idle.append(conn)

    async def _send_next(self, entry: Prefilling, transfer: Transfer, conn: Connection) -> bool:
        """Sends the next piece, or waits for one; False when there is nothing more to send."""
        prompt_len = entry.limits.prompt_len
        if transfer.admitted and transfer.sent < self._sendable(entry):
            start = transfer.sent
            piece = max(1, PIECE_BYTES // self.engine.layout.bytes_per_token)
            end = min(self._sendable(entry), start + piece)
            payload = self.engine.read_kv(self.pool.runs(entry.request, start, end))
            transfer.sent = end
            await conn.send(
                Frame(
                    "kv",
                    {"request": entry.request, "epoch": transfer.epoch, "start": start, "end": end},
                    payload,
                )
            )
            self.env.trace.emit(
                KVSent(
                    self.env.now(), entry.request, self.name, transfer.dst, start, end, len(payload)
                )
            )
            return True
        if transfer.sent == prompt_len and entry.first is not None:
            if transfer.carries_first:
                await conn.send(
                    Frame(
                        "first",
                        {
                            "request": entry.request,
                            "epoch": transfer.epoch,
                            "position": prompt_len,
                            "id": entry.first,
                        },
                    )
                )
            return False
        await transfer.wake.wait()
        transfer.wake.clear()
        return True

    def _sendable(self, entry: Prefilling) -> int:
        """Positions whose KV a finished step has written."""
        assert entry.seq is not None
        if self.stream_while_computing or entry.first is not None:
            return entry.seq.computed
        return 0

    def _withdraw(self, entry: Prefilling, transfer: Transfer) -> None:
        """Stops a transfer. The decoder is told on the stream that carried the offer, so that it
        cannot be left with an offer that overtook the gateway's close."""
        self.post(transfer.dst, "withdraw", request=entry.request, epoch=transfer.epoch)
        transfer.over = True
        transfer.wake.set()
        if transfer.conn is not None:
            transfer.conn.abort()

    async def close(self) -> None:
        for entry in list(self._entries.values()):
            self._end(entry)
        await super().close()
