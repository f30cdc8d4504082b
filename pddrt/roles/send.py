"""What P does with a request but for computing it: feed its decoders, and let it go.

To each decoder of its route runs one **transfer**: offered as soon as P has admitted the request
(the decoder's reservation and the opening of a KV stream hide behind the prefill), fed chunk by
chunk as steps complete, over when the decoder says `whole`. P holds the pages until every transfer
is over: KV that is still crossing the WAN occupies P's memory. How many go at a time: see
`transfer`.

A decoder answers an offer at once, with pages or with a note that the request waits for some: who
says nothing within the handshake's time is given up, by name, and how long somebody queues is no
sign of life or death.

Reservation goes P > RLD > MD: MD is offered what RLD has admitted. So nothing on MD waits for pages
of RLD, and MD cannot be ready before RLD has heard of the request. Where the gateway has the
transfer to MD **held** or cut, MD is offered nothing until it says `resume`; P keeps the pages
until the answer has ended.

Nothing is sent before the step that wrote it has returned. A decoder may say at any time that it
wants no more (`close` by way of the gateway): the transfer's stream is aborted, which leaves at
most what is in flight. A stream therefore carries one request at a time: it is idle, and may be
used again, once the decoder has said `whole`.

To the first decoder of the route the first token's id travels behind the KV, on the same stream:
"KV for [0, m), next id x at m". `prefill` has what makes KV and id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pddrt.engine.base import Engine
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, ConnectionLost, PeerError
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Limits, Manifest, pack_logprobs, prompt_digest
from pddrt.netem.net import Connection, Net
from pddrt.roles.node import InstanceSpec
from pddrt.roles.solo import Solo
from pddrt.roles.transfer import Lane, Transfer
from pddrt.sched import SequenceState
from pddrt.trace import KVSent, TransferCancelled
from pddrt.types import EIGHT_BIT, SECOND, Drawn, KVLayout, Ns, Sampling

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
    """The main decoder is to be offered nothing."""
    lease: Timer
    seq: SequenceState | None = None
    hit: int = 0
    first: Drawn | None = None
    transfers: list[Transfer] = field(default_factory=list)


class Sender(Solo):
    """A prefill instance, but for what it computes."""

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
        compressed: frozenset[str] = frozenset(),
        paths: Mapping[str, str],
        max_transfers: int,
        handshake: Ns,
    ) -> None:
        """`early_first_token`: that goes to the gateway at once, and not by way of the decoder.
        `compressed`: decoders to which KV goes in 8 bits. `paths`: by decoder, the path that
        leads to it; `max_transfers` go over one at a time. `handshake`: how long a decoder may take
        to answer an offer at all.
        """
        super().__init__(env, net, engine, spec, eos_ids=eos_ids)
        self.stream_while_computing = stream_while_computing
        self.early_first_token = early_first_token
        self.compressed = compressed
        self._entries: dict[str, Prefilling] = {}
        self._idle_streams: dict[str, list[Connection]] = {}
        self._epochs = spec.life << 32  # none that an earlier life has used
        self._paths = paths
        self._lanes = {path: Lane(max_transfers) for path in paths.values()}
        self._handshake = handshake

    # -- ends --------------------------------------------------------------------------------------

    def fail(self, request: str, detail: str) -> None:
        entry = self._entries.get(request)
        if entry is not None:
            self.post(entry.gateway, "failed", request=request, detail=detail)
            self._end(entry)
        else:
            super().fail(request, detail)

    def on_close(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the request is over, whatever is left of it here.

        Where it has its answer (`answered`), the transfer to the main decoder goes on: its cache
        must not fall behind P's, or the next turn would have to send all that this one did not.
        """
        super().on_close(conn, frame)
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
        super().peer_lost(conn, error)
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

    def _wire(self, dst: str) -> KVLayout:
        """The form in which KV goes to `dst`."""
        layout = self.engine.layout
        return replace(layout, dtype=EIGHT_BIT) if dst in self.compressed else layout

    @property
    def wire_bytes_per_token(self) -> int:
        return min(self._wire(dst).bytes_per_token for dst in (*self.compressed, ""))

    def _offer(self, entry: Prefilling, transfer: Transfer) -> Frame:
        """The manifest: everything the decoder must know, and agree to, before KV comes."""
        layout = self._wire(transfer.dst)
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
            transfer.answered()
            transfer.wake.set()
            if transfer.dst == entry.relay and entry.main is not None and not entry.held:
                self._begin_transfer(entry, entry.main)

    def on_noted(self, conn: Connection, frame: Frame) -> None:
        """A decoder has the offer; the request waits for pages there."""
        if found := self._find(conn, frame):
            found[1].answered()

    def on_refuse(self, conn: Connection, frame: Frame) -> None:
        if found := self._find(conn, frame):
            self.fail(found[0].request, f"{conn.peer} refuses: {frame['reason']}")

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV; P may forget it when all of them do."""
        if found := self._find(conn, frame):
            entry, transfer = found
            if transfer.sent < entry.limits.prompt_len:
                raise BadFrame(f"{conn.peer} says whole before it can be")
            if transfer.over:  # the cut came too late: it has everything
                entry.held = False
            else:
                self._leave(entry, transfer)
                self._report(entry, transfer, whole=True)
                transfer.end()
            if all(t.over for t in entry.transfers) and not entry.held:
                self._end(entry)

    def on_cut(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the main decoder will hardly be needed; it may keep what it has got."""
        entry = self._entries.get(frame["request"])
        if entry is None or conn.peer != entry.gateway:
            return
        to_main = next((t for t in entry.transfers if t.dst == entry.main), None)
        if to_main is None or not to_main.over:
            entry.held = True
            if to_main is not None:
                self._cancel(entry, to_main, "curtail")

    def on_resume(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the main decoder is needed after all."""
        entry = self._entries.get(frame["request"])
        if entry is None or conn.peer != entry.gateway or not entry.held:
            return
        entry.held = False
        if entry.main is not None and any(t.admitted for t in entry.transfers):
            self._begin_transfer(entry, entry.main)

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
        self._expect_answer(entry, transfer)
        conn = transfer.conn = await self._kv_stream(transfer.dst)
        while not transfer.over:
            if self._has_more(entry, transfer):
                if self._enter(entry, transfer):
                    await self._send_next(entry, transfer, conn)
                    continue
            elif self._owes_first(entry, transfer):
                await self._send_first(entry, transfer, conn)
                continue
            elif transfer.since is not None and transfer.drained:
                self._leave(entry, transfer)
            elif transfer.since is not None and not transfer.draining:
                draining = f"{self.name} drains {entry.request} to {transfer.dst}"
                self.env.spawn(self._drain(transfer, conn), draining)
            await transfer.wake.wait()
            transfer.wake.clear()

    def _expect_answer(self, entry: Prefilling, transfer: Transfer) -> None:
        if transfer.admitted or transfer.over:
            return
        due = self.env.now() + self._handshake
        silent = f"{transfer.dst} has not answered an offer in {self._handshake / SECOND:g} s"
        transfer.unanswered = self.env.call_at(due, self.fail, entry.request, silent)

    async def _drain(self, transfer: Transfer, conn: Connection) -> None:
        with contextlib.suppress(ConnectionLost):  # its reader sees to that
            await transfer.drain(conn)

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

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """Nobody shall be given a stream that has ended, and whoever has it must know."""
        for idle in self._idle_streams.values():
            if conn in idle:
                idle.remove(conn)
        for entry in list(self._entries.values()):
            if any(t.conn is conn and not t.over for t in entry.transfers):
                self.fail(entry.request, f"{self.name} lost {conn.peer}: {error}")

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
        transfer.sent_first = True
        first = {"id": entry.first.token, "logprobs": pack_logprobs([entry.first.logprobs])}
        position = entry.limits.prompt_len
        about = {"request": entry.request, "epoch": transfer.epoch, "position": position}
        await conn.send(Frame("first", {**about, **first}))

    def _sendable(self, entry: Prefilling) -> int:
        """Positions whose KV a finished step has written."""
        assert entry.seq is not None
        if self.stream_while_computing or entry.first is not None:
            return entry.seq.computed
        return 0

    def _cancel(self, entry: Prefilling, transfer: Transfer, word: str = "withdraw") -> None:
        """Stops a transfer. The decoder is told on the stream that carried the offer, so that it
        cannot be left with an offer that overtook the gateway's close. `curtail` in place of
        `withdraw`: what it has got of it is worth keeping.
        """
        self.env.trace.emit(
            TransferCancelled(self.env.now(), entry.request, self.name, transfer.dst)
        )
        self.post(transfer.dst, word, request=entry.request, epoch=transfer.epoch)
        self._leave(entry, transfer)
        self._report(entry, transfer, whole=False)
        transfer.end()
        if transfer.conn is not None:
            self.drop(transfer.conn)
            transfer.conn = None

    def carrying(self, request: str) -> list[Connection]:
        """The streams on which KV of `request` goes out."""
        entry = self._entries.get(request)
        return [t.conn for t in entry.transfers if t.conn and not t.over] if entry else []

    def involves(self, peer: str) -> bool:
        return any(peer in (entry.relay, entry.main) for entry in self._entries.values())

    def end_all(self) -> None:
        for entry in list(self._entries.values()):
            self._end(entry)
        self._idle_streams.clear()
        super().end_all()
