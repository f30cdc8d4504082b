"""P: computes prompts in chunks and streams their KV out while it still computes.

A request here: queued for pages > computing > first token sampled > transfers finishing > gone. To
each decoder of its route runs one **transfer**: offered as soon as P has admitted the request (the
decoder's reservation and the opening of a KV stream hide behind the prefill), fed chunk by chunk as
steps complete, over when the decoder says `whole`. P holds the pages until every transfer is over:
KV that is still crossing the WAN occupies P's memory.

Reservation goes P > RLD > MD: MD is offered what RLD has admitted. So nothing on MD waits for pages
of RLD, and MD cannot be ready before RLD has heard of the request.

Nothing is sent before the step that wrote it has returned. A decoder may say at any time that it
wants no more (`close` by way of the gateway): the transfer's stream is aborted, which leaves at
most what is in flight. A stream therefore carries one request at a time: it is idle, and may be
used again, once the decoder has said `whole`.

To the first decoder of the route the first token's id travels behind the KV, on the same stream:
"KV for [0, m), next id x at m". Where the answer ends with that token, P tells the gateway itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, ConnectionLost, PeerError
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
    sent_first: bool = False
    admitted: bool = False
    over: bool = False
    conn: Connection | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Something above has changed, or a step has ended."""


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
    hit: int = 0
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
        if refusal := self._refusal(request, ids):
            self.post(conn.peer, "failed", request=request, detail=f"{self.name}: {refusal}")
            return
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
        self.wait_for_memory(request, ids, len(ids), limit=len(ids) - 1)

    def _refusal(self, request: str, ids: list[int]) -> str | None:
        if request in self._entries or self.memory.holds(request):
            return "a request of that id is here already"
        if not ids:
            return "the prompt is empty"
        if len(ids) > self.spec.kv_tokens:
            return f"{len(ids)} tokens of KV can never fit into {self.spec.kv_tokens}"
        return None

    def admitted(self, request: str, hit: int) -> None:
        entry = self._entries[request]
        entry.seq = SequenceState(request, list(entry.ids), hit, len(entry.ids), entry.sampling)
        entry.hit = hit
        self.sched.add(entry.seq)
        self._begin_transfer(entry, entry.relay or entry.main)
        self.wake()

    def step_began(self, batch: object) -> None:
        for entry in self._entries.values():
            if entry.seq is not None and entry.seq.in_step and entry.seq.computed == entry.hit:
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
        self.keep(entry.request, entry.ids)
        self.keep(entry.request, entry.ids)
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
        """From the gateway: the request is over, whatever is left of it here.

        Where it has its answer (`answered`), the transfer to the main decoder goes on: its cache
        must not fall behind P's, or the next turn would have to send all that this one did not.
        """
        entry = self._entries.get(frame["request"])
        if entry is None or conn.peer != entry.gateway:
            return
        to_main = next((t for t in entry.transfers if t.dst == entry.main and not t.over), None)
        if not frame["answered"] or to_main is None or not self.spec.main_caching:
            self._end(entry)
            return
        for transfer in entry.transfers:
            if transfer is not to_main and not transfer.over:
                self._cancel(entry, transfer)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for entry in list(self._entries.values()):
            if conn.peer in (entry.gateway, entry.relay, entry.main):
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

    def _end(self, entry: Prefilling) -> None:
        del self._entries[entry.request]
        entry.lease.cancel()
        for transfer in entry.transfers:
            if not transfer.over:
                self._cancel(entry, transfer)
        self.give_back(entry.request)

    # -- transfers ---------------------------------------------------------------------------------

    def _begin_transfer(self, entry: Prefilling, dst: str) -> None:
        self._epochs += 1
        transfer = Transfer(dst, self._epochs, carries_first=not entry.transfers)
        entry.transfers.append(transfer)
        sending = self._transfer(entry, transfer)
        self.env.spawn(sending, f"{self.name} sends {entry.request} to {dst}")

    def _offer(self, entry: Prefilling, transfer: Transfer) -> Frame:
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
        return Frame("offer", manifest.fields(), pack_ids(entry.ids))

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
            entry, transfer = found
            if transfer.admitted or frame["have"] > entry.limits.prompt_len:
                raise BadFrame(f"{conn.peer} admits from {frame['have']} on, or twice")
            transfer.admitted, transfer.sent = True, frame["have"]
            transfer.wake.set()
            if transfer.dst == entry.relay:
                self._begin_transfer(entry, entry.main)

    def on_refuse(self, conn: Connection, frame: Frame) -> None:
        if found := self._find(conn, frame):
            self.fail(found[0].request, f"{conn.peer} refuses: {frame['reason']}")

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV; P may forget it when all of them do."""
        if found := self._find(conn, frame):
            entry, transfer = found
            if transfer.sent < entry.limits.prompt_len:
                raise BadFrame(f"{conn.peer} says whole before it can be")
            transfer.over = True
            transfer.wake.set()
            if all(t.over for t in entry.transfers):
                self._end(entry)

    async def _transfer(self, entry: Prefilling, transfer: Transfer) -> None:
        """Feeds one decoder until it has everything. One task; one KV stream, for as long."""
        try:
            await self._feed(entry, transfer)
        except ConnectionLost as error:
            if not transfer.over:
                self.fail(entry.request, f"{self.name} lost {transfer.dst}: {error}")
        if transfer.conn in self._connections:  # it has not ended meanwhile
            self._idle_streams.setdefault(transfer.dst, []).append(transfer.conn)

    async def _feed(self, entry: Prefilling, transfer: Transfer) -> None:
        """Returns when the transfer is over. Raises ConnectionLost."""
        control = self.peers.get(transfer.dst)
        if control is None:
            raise ConnectionLost("there is no control stream")
        if transfer.over:
            return
        await control.send(self._offer(entry, transfer))
        conn = transfer.conn = await self._kv_stream(transfer.dst)
        while not transfer.over:
            if not await self._send_next(entry, transfer, conn):
                await transfer.wake.wait()
                transfer.wake.clear()

    async def _kv_stream(self, dst: str) -> Connection:
        """An idle stream to `dst`, or a new one. It is read only to learn of its end."""
        if idle := self._idle_streams.get(dst):
            return idle.pop()
        conn = await self.open(dst, "kv")
        self.env.spawn(self._read(conn), f"{self.name} watches a stream to {dst}")
        return conn

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """Nobody shall be given a stream that has ended, and whoever has it must know."""
        for idle in self._idle_streams.values():
            if conn in idle:
                idle.remove(conn)
        for entry in list(self._entries.values()):
            if any(t.conn is conn and not t.over for t in entry.transfers):
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

    async def _send_next(self, entry: Prefilling, transfer: Transfer, conn: Connection) -> bool:
        """Sends the next piece; False when there is nothing to send now."""
        prompt_len = entry.limits.prompt_len
        if transfer.admitted and transfer.sent < self._sendable(entry):
            start = transfer.sent
            piece = max(1, PIECE_BYTES // self.engine.layout.bytes_per_token)
            end = min(self._sendable(entry), start + piece)
            payload = self.engine.read_kv(self.memory.runs(entry.request, start, end))
            transfer.sent = end
            about = {"request": entry.request, "epoch": transfer.epoch, "start": start, "end": end}
            sent = KVSent(
                self.env.now(), entry.request, self.name, transfer.dst, start, end, len(payload)
            )
            self.env.trace.emit(sent)
            await conn.send(Frame("kv", about, payload))
            return True
        if entry.first is None or transfer.sent < prompt_len:
            return False
        if transfer.sent_first or not transfer.carries_first:
            return False
        transfer.sent_first = True
        about = {"request": entry.request, "epoch": transfer.epoch, "position": prompt_len}
        await conn.send(Frame("first", {**about, "id": entry.first}))
        return True

    def _sendable(self, entry: Prefilling) -> int:
        """Positions whose KV a finished step has written."""
        assert entry.seq is not None
        if self.stream_while_computing or entry.first is not None:
            return entry.seq.computed
        return 0

    def _cancel(self, entry: Prefilling, transfer: Transfer) -> None:
        """Stops a transfer. The decoder is told on the stream that carried the offer, so that it
        cannot be left with an offer that overtook the gateway's close."""
        self.env.trace.emit(
            TransferCancelled(self.env.now(), entry.request, self.name, transfer.dst)
        )
        self.post(transfer.dst, "withdraw", request=entry.request, epoch=transfer.epoch)
        transfer.over = True
        transfer.wake.set()
        if transfer.conn is not None:
            self.drop(transfer.conn)
            transfer.conn = None

    def end_all(self) -> None:
        for entry in list(self._entries.values()):
            self._end(entry)
        super().end_all()
