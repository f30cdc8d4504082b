"""TCP on one direction of a link: the law of `link`, with packets for items. Sans-IO.

The same calls as `link.Link`: what is pushed on a flow comes out of `advance` with the time at
which its last byte arrives in order. Between the two a sender for each of the flow's connections
(see `tcp`) decides what is on the way; the packets stand in the link's queue, which drops what it
cannot hold, and the answers come back over the delay of the other direction.

    push -> segments -> Sender.next -> loss, full queue -> link -> Receiver -> prefix -> due
                             ^------------ on_ack <- delay of the way back ------'

**A flow** opens with the first thing that is pushed on it: a SYN goes, and if that thing has no
bytes it is due with the SYN. So a net that opens connections by a mark each way has TCP's handshake
and pays for it once. Data follow a round trip later. A warm flow was open before: such a thing is
due at once. Several connections (`streams`) take from one
supply, in parts of 16 segments, whenever they may send, and what arrives is put in order again.

**Time** is the link's: answers, timers and sends happen at their own moments, however late the
caller looks. A load has *left* when its last segment was sent for the first time; what was lost is
sent again by itself, so a stream never loses bytes.

**Queue.** In bytes, for the whole link; with fair queueing each flow that has something there has
an even share of it. CoDel drops a segment at the head. Random loss takes segments on their way in,
a lost SYN among them. Answers are not lost and cost no rate, but wait out an outage of their way.

Leaves out what `tcp` does, and windows kept from one connection for the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pddrt.netem.jitter import Delay
from pddrt.netem.link import Flow, Item, Link, Through
from pddrt.netem.losses import Loss, VaryingLoss
from pddrt.netem.queues import CoDel
from pddrt.netem.segments import (
    MSS,
    RECEIVE_BUFFER,
    SYN_BYTES,
    Answer,
    Held,
    Packet,
    Receiver,
    window_limit,
)
from pddrt.netem.tcp import SEND_BUFFER, Sender, send_limit
from pddrt.netem.tcp_bbr import Bbr
from pddrt.netem.tcp_control import Cubic, Reno
from pddrt.netem.tcp_stream import NEVER, Connection, Flight, Handed, Stream
from pddrt.types import SECOND, US, Ns

DEFAULT_QUEUE = 64 << 10
PACKET: Ns = 64 * US
"""A super-segment's length in time on the link: short against any round trip that a WAN has."""
PACKETS_A_ROUND = 256
"""A longer round trip takes longer ones: so many fill it."""
UNLIMITED_PACKET = 64
"""Segments of one where the rate has no limit."""
PART = 16
"""Segments that a connection takes from the supply it shares with others, when it may send some: so
that none is left with more than the others at the end."""


def default_queue(rate: int, round_trip: Ns) -> int:
    """Bytes: one bandwidth-delay product (`rate` in bytes/s), but 64 KiB at least."""
    return max(rate * round_trip // SECOND, DEFAULT_QUEUE)


@dataclass(frozen=True, slots=True)
class Tcp:
    """How the flows of a link behave. `queue` in bytes, None: `default_queue`. `overhead`: headers
    of a full segment. `warm`: connections were used before, and their windows are open. `segments`:
    most of a packet, None: what is quick."""

    control: Literal["reno", "cubic", "bbr"] = "cubic"
    streams: int = 1
    warm: bool = False
    send_buffer: int = SEND_BUFFER
    receive_buffer: int = RECEIVE_BUFFER
    queue: int | None = None
    codel: bool = False
    overhead: int = 0
    segments: int | None = None

    def sender(self, seed: str, largest: int) -> Sender:
        """One connection's sender, of packets of so many segments at most. `seed` is of BBR's
        phases."""
        control = {"reno": Reno, "cubic": Cubic}.get(self.control)
        return Sender(
            control() if control else Bbr(seed),
            limit=window_limit(self.receive_buffer),
            buffer=send_limit(self.send_buffer),
            largest=largest,
        )


class TcpLink:
    """See the module; `link` must be this one's alone. `seed` is of BBR's phases; `losses` is asked
    of each segment. `back` is the other direction, None: one of the same delay."""

    def __init__(
        self, link: Link, tcp: Tcp, seed: str = "", losses: Loss | None = None,
        back: Link | None = None,
    ) -> None:  # fmt: skip
        self.link = link
        self.tcp = tcp
        self.back = back
        self.dropped = 0
        """Bytes cancelled before they were sent."""
        self.overflowed = 0
        """Segments that found the queue full, those that CoDel dropped, those that the path lost,
        those that were sent again; and packets in all."""
        self.delayed_drops = 0
        self.lost = 0
        self.resent = 0
        self.packets = 0
        self.carried: dict[str, int] = {}
        self.arrivals: Callable[[Flow, Ns, int], None] | None = None
        """Called with a flow, a time and how many segments have arrived in order by then."""
        self._seed = seed
        self._losses = losses
        self._by_trace = VaryingLoss(f"{seed}/trace")
        self._wire = MSS + tcp.overhead
        self._events: list[tuple[Ns, int, Connection, Answer | Held | None]] = []
        self._number = 0
        self._opened = 0
        self._waiting: set[Stream] = set()
        """Those that have something unsent."""
        self._stuck: list[tuple[Connection, Answer]] = []
        self._now: Ns = 0
        self._inside = 0
        self._out: list[Through] = []
        self._left: list[Any] = []
        self._queue: int | None = None
        self._codel = CoDel() if tcp.codel and link.is_fifo else None
        if tcp.codel:
            link.at_head = self._at_head

    # -- as Link ----------------------------------------------------------------------------------

    @property
    def rate(self) -> int | None:
        return self.link.rate

    @property
    def delay(self) -> Delay:
        return self.link.delay

    @property
    def peak_flows(self) -> int:
        return self.link.peak_flows

    @property
    def peak_rate(self) -> int | None:
        return self.link.peak_rate

    def measured_delay(self) -> tuple[Ns, Ns]:
        return self.link.measured_delay()

    def push(
        self, now: Ns, flow: Flow, nbytes: int, account: str = "control", tag: Any = None
    ) -> None:
        self._run(now)
        now = max(now, self._now)
        stream: Stream | None = flow.transport
        fresh = stream is None
        if stream is None:
            stream = flow.transport = self._open(now, flow)
        self._inside += nbytes
        if self.tcp.warm and nbytes:
            self._warm(now, stream)
        if fresh and not nbytes:
            if self.tcp.warm:  # it was open before
                self._out.append(Through(tag, 0, now, now))
            else:
                stream.mark = Handed(0, account, tag, 0, 0)
            self._left.append(tag)
        else:
            segments = max(1, -(-nbytes // MSS))
            handed = Handed(nbytes, account, tag, stream.segments, stream.segments + segments)
            stream.segments = handed.end
            stream.unsent.append(handed)
            stream.undue.append(handed)
            stream.supply.append([segments, segments * MSS - nbytes])
            self._waiting.add(stream)
        for connection in stream.connections:
            self._pump(now, connection)

    def cancel(self, now: Ns, flow: Flow) -> int:
        """Drops what was not sent, and returns how many bytes that are; what was sent arrives."""
        self._run(now)
        stream: Stream | None = flow.transport
        if stream is None:
            return 0
        dropped = 0
        for handed in stream.unsent:
            sent = max(0, stream.sent - handed.start)
            bytes_sent = min(sent * MSS, handed.nbytes)
            self._count(handed.account, bytes_sent)
            dropped += handed.nbytes - bytes_sent
            self._inside -= handed.nbytes
            stream.undue.pop()  # what is unsent is the end of what is not due
        stream.unsent.clear()
        self._waiting.discard(stream)
        stream.supply.clear()
        for connection in stream.connections:
            connection.withdraw()
        stream.arrived.add(stream.given, stream.segments)
        stream.given = stream.sent = stream.segments
        self._come(stream, max(now, self._now))
        self.dropped += dropped
        return dropped

    def set_rate(self, now: Ns, rate: int | None) -> None:
        self._run(now)
        self.link.set_rate(max(now, self._now), rate)
        self._run(now)

    def set_delay(self, now: Ns, delay: Ns, jitter: Ns = 0) -> None:
        self._run(now)
        self.link.set_delay(max(now, self._now), delay, jitter)

    def way_back_opens(self, now: Ns) -> None:
        """An outage of the other direction may be over: answers that it held come now."""
        self._run(now)
        stuck, self._stuck = self._stuck, []
        for connection, answer in stuck:
            self._answer(max(now, self._now), connection, answer)

    def advance(self, now: Ns) -> list[Through]:
        """What is known by now to arrive, with when; `due` may be later than `now`."""
        self._run(now)
        out, self._out = self._out, []
        return out

    def left(self) -> list[Any]:
        """Tags of what was sent for the first time, all of it, since this was last asked."""
        left, self._left = self._left, []
        return left

    def next_event(self) -> Ns | None:
        at = self.link.next_event()
        if self._events and (at is None or self._events[0][0] < at):
            at = self._events[0][0]
        return at

    def backlog(self, now: Ns) -> int:
        """Bytes of which it is not known yet when they arrive: unsent, queued, or lost."""
        self._run(now)
        return self._inside

    def busy(self, now: Ns) -> Ns:
        return self.link.busy(max(now, self._now))

    @property
    def send_ahead(self) -> int:
        """Bytes that a flow should have pushed and not sent, so that no connection of it ever waits
        for its application: a socket's buffer is filled a third at a time."""
        return min(self.tcp.send_buffer * self.tcp.streams, 32 << 20)

    # -- flows ------------------------------------------------------------------------------------

    def _open(self, now: Ns, flow: Flow) -> Stream:
        stream = Stream(flow)
        tcp = self.tcp
        peak = self.link.peak_rate
        largest = tcp.segments
        if largest is None:
            length = max(PACKET, self.round_trip() // PACKETS_A_ROUND)
            quick = UNLIMITED_PACKET if peak is None else peak * length // SECOND // self._wire
            largest = max(1, quick)
        for k in range(tcp.streams):
            sender = tcp.sender(f"{self._seed}/bbr/{self._opened}/{k}", largest)
            codel = CoDel() if tcp.codel and not self.link.is_fifo else None
            connection = Connection(stream, sender, Receiver(sender.limit), codel)
            stream.connections.append(connection)
            if not tcp.warm:
                sender.connect(now)
        self._opened += 1
        return stream

    def _warm(self, now: Ns, stream: Stream) -> None:
        """As if it had had its share of the link before, among the streams that have something to
        send now. Where a cold connection would open its window anew after idling, this holds
        again."""
        rested = [c.sender for c in stream.connections if c.sender.rested(now)]
        if not rested:
            return
        round_trip = max(self.round_trip(), 1)
        peak = self.link.peak_rate
        if peak is None:
            share = rested[0].limit * SECOND / round_trip
        else:
            streams = len(self._waiting | {stream})
            share = peak / self._wire / (streams * self.tcp.streams)
        for sender in rested:
            sender.warm(now, share, round_trip)

    def round_trip(self) -> Ns:
        """Of the idle path: the means of both delays."""
        back = self.back or self.link
        return self.link.delay.mean + back.delay.mean

    def _queue_bytes(self) -> int:
        """Bytes that the queue holds, as the link was when it was first used."""
        if self.tcp.queue is not None:
            return self.tcp.queue
        peak = self.link.peak_rate
        return NEVER if peak is None else default_queue(peak, self.round_trip())

    # -- time -------------------------------------------------------------------------------------

    def _run(self, limit: Ns) -> None:
        """Everything that happens up to `limit`, in order."""
        link, events = self.link, self._events
        while True:
            at = link.next_event()
            if at is not None and at <= limit and (not events or at <= events[0][0]):
                if at > self._now:
                    self._now = at
                for through in link.advance(at):
                    self._arrive(through)
            elif events and events[0][0] <= limit:
                now, _, connection, what = heapq.heappop(events)
                self._now = now
                self._happen(now, connection, what)
            else:
                return

    def _happen(self, now: Ns, connection: Connection, what: Answer | Held | None) -> None:
        if what is None:
            if now != connection.armed:
                return
            connection.armed = NEVER
            connection.sender.on_timer(now)
        elif isinstance(what, Held):
            self._give_answer(connection, what)
            return
        else:
            connection.sender.on_ack(now, what)
            connection.forget(connection.sender.una)
        self._pump(now, connection)

    def _push_event(self, at: Ns, connection: Connection, what: Answer | Held | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, connection, what))

    # -- sending ----------------------------------------------------------------------------------

    def _pump(self, now: Ns, connection: Connection) -> None:
        """Sends what may be sent, and arms the timer."""
        sender, stream = connection.sender, connection.stream
        single = len(stream.connections) == 1
        while True:
            while stream.supply and (single or sender.wants):
                connection.give(now, NEVER if single else max(PART, sender.burst))
            packet = sender.next(now)
            if packet is None:
                break
            self._send(now, connection, packet)
        if sender.wake is not None and sender.wake < connection.armed:
            connection.armed = sender.wake
            self._push_event(sender.wake, connection, None)

    def _send(self, now: Ns, connection: Connection, packet: Packet) -> None:
        n = packet.n
        self.packets += 1
        if n:
            nbytes = connection.wire(packet.seq, n, self._wire)
            new = packet.seq + n - connection.sent
            if new < n:
                self.resent += n if new < 0 else n - new
            if new > 0:
                connection.sent += new
                self._sent(connection.stream, new)
        else:
            n, nbytes = 1, SYN_BYTES
        kept = n
        if self._losses is not None or self.link.trace is not None:
            kept -= self._lose(now, n)
        if kept:
            kept -= self._overflow(now, connection, kept, max(1, -(-nbytes // n)))
        if kept:
            if kept < n:
                nbytes = nbytes * kept // n
            connection.queued += nbytes
            flight = Flight(connection, packet, kept, nbytes)
            account = connection.stream.undue[0].account if connection.stream.undue else "control"
            self.link.push(now, connection.path, nbytes, account, flight)

    def _sent(self, stream: Stream, segments: int) -> None:
        stream.sent += segments
        unsent = stream.unsent
        while unsent and unsent[0].end <= stream.sent:
            self._left.append(unsent.popleft().tag)
        if not unsent:
            self._waiting.discard(stream)

    def _lose(self, now: Ns, segments: int) -> int:
        """How many of the next so many segments the path loses: by the trace, where it says."""
        trace = self.link.trace
        if trace is not None and trace.losses and (share := trace.at(now)[0].loss) is not None:
            lost = self._by_trace.lost(segments, share)
        else:
            lost = self._losses.lost(segments) if self._losses is not None else 0
        self.lost += lost
        return lost

    def _overflow(self, now: Ns, connection: Connection, segments: int, size: int) -> int:
        """How many of so many segments of `size` bytes find the queue full: the last ones."""
        queue = self._queue
        if queue is None:
            queue = self._queue = self._queue_bytes()
        if self.link.is_fifo:
            backlog = self.link.queued_at(now)
        else:
            backlog = connection.queued
            queue //= max(1, self.link.active_flows + (not backlog))
        over = backlog + segments * size - queue
        if over <= 0 or not backlog:
            return 0
        dropped = min(segments, -(-over // size))
        self.overflowed += dropped
        return dropped

    def _at_head(self, now: Ns, flow: Flow, item: Item) -> Item:
        """CoDel's hand on what comes to the head: one segment of it, or none."""
        flight: Flight = item.tag
        connection = flight.connection
        codel = self._codel or connection.codel
        assert codel is not None
        backlog = self.link.queued_at(now) if self._codel else connection.queued
        if not codel.drops(now, now - item.since, backlog, self._wire):
            return item
        self.delayed_drops += 1
        nbytes = flight.nbytes * (flight.kept - 1) // flight.kept
        connection.queued -= flight.nbytes - nbytes
        work = item.work * (flight.kept - 1) // flight.kept
        flight.kept -= 1
        flight.nbytes = nbytes
        return item._replace(nbytes=nbytes, work=work)

    # -- arriving ---------------------------------------------------------------------------------

    def _arrive(self, through: Through) -> None:
        """A packet is through the bottleneck, and has its due time at the far end."""
        flight: Flight = through.tag
        connection, packet, due = flight.connection, flight.packet, through.due
        connection.queued -= flight.nbytes
        stream = connection.stream
        if not flight.kept:
            return
        if not packet.n:
            if stream.mark is not None and connection is stream.connections[0]:
                self._due(stream, stream.mark, due)
                stream.mark = None
        elif connection.arrive(packet.seq, packet.seq + flight.kept):
            self._come(stream, due)
        if connection.held is not None and due > connection.held.until:
            self._give_answer(connection, connection.held)  # it was given before this came
        answer = connection.receiver.on_packet(due, packet, flight.kept)
        if isinstance(answer, Answer):
            self._answer(due, connection, answer)
        elif answer is not None:
            connection.held = answer
            self._push_event(answer.until, connection, answer)

    def _give_answer(self, connection: Connection, held: Held) -> None:
        """The receiver waits for a second segment no longer."""
        if held.waiting:
            held.waiting = False
            connection.held = None
            self._answer(held.until, connection, held.answer)

    def _come(self, stream: Stream, due: Ns) -> None:
        """What is whole at the far end is due."""
        stream.due = due = max(stream.due, due)
        if self.arrivals is not None:
            self.arrivals(stream.flow, due, stream.arrived.next)
        undue = stream.undue
        while undue and undue[0].end <= stream.arrived.next:
            self._due(stream, undue.popleft(), due)

    def _due(self, stream: Stream, handed: Handed, due: Ns) -> None:
        self._inside -= handed.nbytes
        self._count(handed.account, handed.nbytes)
        self._out.append(Through(handed.tag, handed.nbytes, due, due))

    def _answer(self, at: Ns, connection: Connection, answer: Answer) -> None:
        """The receiver answers at `at`: the way back, which may have an outage."""
        back = self.back
        if back is None:
            back = self.link
        elif (opens := back.opens_at(at)) is None:
            self._stuck.append((connection, answer))
            return
        else:
            at = opens
        # a round trip takes some time, or nothing could be measured by it
        connection.answered = at = max(connection.answered, at + max(1, back.delay_at(at)))
        self._push_event(at, connection, answer)

    def _count(self, account: str, nbytes: int) -> None:
        if nbytes:
            self.carried[account] = self.carried.get(account, 0) + nbytes
