"""What P does with a request but for computing it: feed its decoders, and let it go.

To each decoder of its route runs one **transfer**: offered as soon as P has admitted the request
(the decoder's reservation and the opening of a KV stream hide behind the prefill), fed chunk by
chunk as steps complete, over when the decoder says `whole`. P holds the pages until every transfer
is over: KV that is still crossing the WAN occupies P's memory. How many go at a time: see
`transfer`.

When all has left, KV and first id, the decoder is told so on the control stream (`sent`): a
stream may have lost its last bytes and still be open, and nobody else would notice (see `receive`).

A decoder answers an offer at once, with pages or with a note that the request waits for some: who
says nothing within the handshake's time is given up, by name, and how long somebody queues is no
sign of life or death.

Reservation goes P > RLD > MD: MD is offered what RLD has admitted. So nothing on MD waits for pages
of RLD, and MD cannot be ready before RLD has heard of the request. Where the gateway has the
transfer to MD **held** or cut, MD is offered nothing until it says `resume`; P keeps the pages
until the answer has ended.

A decoder that is lost (its stream, its word, its answer) ends its own transfer and nothing more: P
tells the gateway, keeps the pages, and hears what becomes of it: another main decoder (`rejoin`),
none, the main decoder in place of the relay (`unrelay`), or `close`.

Nothing is sent before the step that wrote it has returned. A decoder may say at any time that it
wants no more (`close` by way of the gateway): the transfer's stream is aborted, which leaves at
most what is in flight. A stream therefore carries one request at a time: it is idle, and may be
used again, once the decoder has said `whole`.

To the first decoder of the route the first token's id travels behind the KV, on the same stream:
"KV for [0, m), next id x at m". `prefill` has what makes KV and id.
"""

from __future__ import annotations

from collections.abc import Mapping

from pddrt.engine.base import Engine
from pddrt.env import Env
from pddrt.errors import BadFrame, ConnectionLost, EngineFailed, PeerError
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Manifest, prompt_digest
from pddrt.netem.net import Connection, Net
from pddrt.roles.feed import Feeder, Prefilling
from pddrt.roles.instance import InstanceSpec
from pddrt.roles.transfer import Transfer
from pddrt.trace import TransferCancelled, request_of
from pddrt.types import SECOND, Drawn, Ns


class Sender(Feeder):
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
        `handshake`: how long a decoder may take to answer an offer at all. The rest: see `feed`.
        """
        super().__init__(
            env,
            net,
            engine,
            spec,
            eos_ids=eos_ids,
            stream_while_computing=stream_while_computing,
            compressed=compressed,
            paths=paths,
            max_transfers=max_transfers,
        )
        self.early_first_token = early_first_token
        self._entries: dict[str, Prefilling] = {}
        self._epochs = spec.life << 32  # none that an earlier life has used
        self._handshake = handshake

    # -- ends --------------------------------------------------------------------------------------

    def heeds(self, peer: str, request: str) -> bool:
        if entry := self._entries.get(request):
            return peer in (entry.gateway, *(t.dst for t in entry.transfers))
        return super().heeds(peer, request)

    def fail(self, request: str, detail: str) -> None:
        entry = self._entries.get(request)
        if entry is not None:
            self.tell_failed(entry.gateway, request, detail)
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
        crossing = any(t.dst == entry.main and not t.over for t in entry.transfers)
        if not frame["answered"] or not crossing or not self.spec.main_caching:
            self._end(entry)
            return
        entry.answered = True
        self._cancel_to(entry, *(t.dst for t in entry.transfers if t.dst != entry.main))

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        super().peer_lost(conn, error)
        why = f"{self.name} lost {conn.peer}: {error}"
        for entry in list(self._entries.values()):
            if conn.peer == entry.gateway:
                self.fail(entry.request, why)
            elif conn.peer in (entry.relay, entry.main):
                self._decoder_lost(entry, conn.peer, why)

    # -- decoders that are lost --------------------------------------------------------------------

    def _decoder_lost(self, entry: Prefilling, dst: str, why: str) -> None:
        """This request cannot go to `dst`. Who has everything does not need us any more."""
        if any(t.dst == dst and t.whole for t in entry.transfers):
            return
        self._cancel_to(entry, dst)
        if entry.answered:
            self._end(entry)
        elif dst == entry.main or (dst == entry.relay and not entry.unrelayed):
            entry.held = True
            about = {"request": entry.request, "whom": dst, "detail": why}
            self.post(entry.gateway, "lost", b"", **about)

    def on_unrelay(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: the relay is lost, and the main decoder will go on from what the
        gateway has. That is the first id at least, which nobody else may be able to tell it.
        """
        entry = self._sought(conn, frame)
        if entry is None or entry.unrelayed or entry.main is None:
            return
        entry.unrelayed, entry.held = True, False
        self._cancel_to(entry, entry.relay)
        if entry.first is not None:
            self.tell_first(entry, entry.first)
        if entry.seq is not None and entry.going_to(entry.main) is None:
            self._begin_transfer(entry, entry.main)
        self._end_if_done(entry)

    def on_rejoin(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: another main decoder, or none any more."""
        entry = self._sought(conn, frame)
        if entry is None:
            return
        self._cancel_to(entry, entry.main)
        entry.main, entry.held = frame["main"], False
        if entry.main is not None and any(t.admitted for t in entry.transfers):
            self._begin_transfer(entry, entry.main)
        self._end_if_done(entry)

    def _sought(self, conn: Connection, frame: Frame) -> Prefilling | None:
        """The request that the gateway counts on; it is told where there is none."""
        entry = self._entries.get(frame["request"])
        if entry is None:
            self.tell_failed(conn.peer, frame["request"], f"{self.name} has let it go")
        elif conn.peer != entry.gateway:
            raise BadFrame(f"{conn.peer} is not its gateway")
        return entry

    def tell_first(self, entry: Prefilling, first: Drawn) -> None:
        """The first id goes to the gateway directly."""
        about = (entry.gateway, entry.request, entry.limits.prompt_len)
        self.tell_token(*about, first, self.letter, after=0)

    def _end_if_done(self, entry: Prefilling) -> None:
        """Everybody has everything, and nobody will ask for more."""
        over = entry.transfers and all(t.over for t in entry.transfers) and not entry.held
        if over and (entry.first is not None or not entry.unrelayed):
            self._end(entry)

    def _end(self, entry: Prefilling) -> None:
        del self._entries[entry.request]
        entry.lease.cancel()
        self._cancel_to(entry, *(t.dst for t in entry.transfers))
        self.give_back(entry.request)

    # -- transfers ---------------------------------------------------------------------------------

    def _begin_transfer(self, entry: Prefilling, dst: str) -> None:
        self._epochs += 1
        first = dst == (entry.relay or entry.main)
        transfer = Transfer(dst, self._epochs, carries_first=first)
        entry.transfers.append(transfer)
        sending = self._transfer(entry, transfer)
        self.env.spawn(sending, f"{self.name} sends {entry.request} to {dst}")

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
            to_main = entry.main is not None and entry.going_to(entry.main) is None
            if transfer.dst == entry.relay and to_main and not entry.held:
                assert entry.main is not None
                self._begin_transfer(entry, entry.main)

    def on_noted(self, conn: Connection, frame: Frame) -> None:
        """A decoder has the offer; the request waits for pages there."""
        if found := self._find(conn, frame):
            found[1].answered()

    def on_refuse(self, conn: Connection, frame: Frame) -> None:
        if (found := self._find(conn, frame)) and not found[1].over:
            self._decoder_lost(found[0], conn.peer, f"{conn.peer} refuses: {frame['reason']}")

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV; P may forget it when all of them do."""
        if found := self._find(conn, frame):
            entry, transfer = found
            if transfer.sent < entry.limits.prompt_len:
                raise BadFrame(f"{conn.peer} says whole before it can be")
            transfer.whole = True
            if transfer.over:  # the cut came too late: it has everything
                entry.held = False
            else:
                self._leave(entry, transfer)
                self._report(entry, transfer, whole=True)
                transfer.end()
            self._end_if_done(entry)

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
                why = f"{self.name} lost {transfer.dst}: {error}"
                self._decoder_lost(entry, transfer.dst, why)
        except EngineFailed as error:  # its KV cannot be read
            if not transfer.over:
                self.fail(entry.request, f"{self.name}: {error}")
        if transfer.conn in self._connections:  # it has not ended meanwhile
            self._idle_streams.setdefault(transfer.dst, []).append(transfer.conn)

    async def _feed(self, entry: Prefilling, transfer: Transfer) -> None:
        """Returns when the transfer is over. Raises ConnectionLost, EngineFailed."""
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
                continue
            elif not transfer.told_sent and self._all_handed(entry, transfer) and transfer.drained:
                self._tell_sent(entry, transfer)
            elif not transfer.drained and not transfer.draining and self._awaits(entry, transfer):
                draining = f"{self.name} drains {entry.request} to {transfer.dst}"
                self.env.spawn(self._drain(transfer, conn), draining)
            await transfer.wake.wait()
            transfer.wake.clear()

    def _awaits(self, entry: Prefilling, transfer: Transfer) -> bool:
        """Whether it matters when what was handed over has left."""
        return transfer.since is not None or self._all_handed(entry, transfer)

    def _expect_answer(self, entry: Prefilling, transfer: Transfer) -> None:
        if transfer.admitted or transfer.over:
            return
        due = self.env.now() + self._handshake
        silent = f"{transfer.dst} has not answered an offer in {self._handshake / SECOND:g} s"
        transfer.unanswered = self.env.call_at(due, self._decoder_lost, entry, transfer.dst, silent)

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """Nobody shall be given a stream that has ended, and whoever has it must know."""
        for idle in self._idle_streams.values():
            if conn in idle:
                idle.remove(conn)
        for entry in list(self._entries.values()):
            if any(t.conn is conn and not t.over for t in entry.transfers):
                why = f"{self.name} lost {conn.peer}: {error}"
                self._decoder_lost(entry, conn.peer, why)

    def _cancel_to(self, entry: Prefilling, *decoders: str | None) -> None:
        """Stops the transfers to these that are not over."""
        for transfer in entry.transfers:
            if transfer.dst in decoders and not transfer.over:
                self._cancel(entry, transfer)

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
        """The streams on which KV of `request` goes out, whichever attempt at it."""
        entries = [e for e in self._entries.values() if request_of(e.request) == request]
        return [t.conn for e in entries for t in e.transfers if t.conn and not t.over]

    def involves(self, peer: str) -> bool:
        return any(peer in (entry.relay, entry.main) for entry in self._entries.values())

    def end_all(self) -> None:
        for entry in list(self._entries.values()):
            self._end(entry)
        self._idle_streams.clear()
        super().end_all()
