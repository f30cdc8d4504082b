"""Virtual transfers over one link: when each is done, and how far it was at any time. Sans-IO.

Everything goes one way, over one bottleneck; acknowledgements come back over the same delay and
cost nothing. What a figure means is what the kernel's measured runs mean by it:

- `rate` is that of the link, for packets: each full segment takes 1,448 bytes of payload and
  `overhead` (52) more. An overhead of 0 makes it the rate of the payload.
- `delay` is one-way. A round trip on the idle link is twice that.
- Bytes are payload, counted at the receiver, in order.
- `fct` runs from the first SYN (a warm connection's: from the first byte handed over) to the
  arrival of the last byte.
- A lost SYN is among what `loss` does; acknowledgements are not lost.

With `tcp` "none" there are no packets: the flows share the rate by the law of the live link (see
`link`), nothing is lost, no queue is full, and there is no handshake.

A constant link with a first-in-first-out queue is a loop of its own here, in which a packet's fate
is known as it is sent: one step a packet. Anything else - jitter, a trace, fair queueing, CoDel -
is played on the live link itself (`tcp_link`), at some three times the price. Both say the same of
what both can do, which a test holds them to.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pddrt.netem.bottleneck import Bottleneck
from pddrt.netem.jitter import LOG_NORMAL, Shape
from pddrt.netem.link import Flow, Link, Qdisc
from pddrt.netem.losses import Loss, losses_of
from pddrt.netem.segments import (
    DELAYED_ACK,
    HEADER,
    MSS,
    RECEIVE_BUFFER,
    SYN_BYTES,
    Answer,
    Held,
    Receiver,
    window_limit,
)
from pddrt.netem.tcp import SEND_BUFFER, Sender, send_limit
from pddrt.netem.tcp_link import PACKET, PART, TcpLink, default_queue
from pddrt.netem.tcp_link import Tcp as Live
from pddrt.netem.traces import Trace
from pddrt.types import MS, SECOND, Ns

Tcp = Literal["none", "reno", "cubic", "bbr"]

STEP: Ns = 10 * MS
"""Distance of the curve's points."""
LONGEST: Ns = 3600 * SECOND
"""No prediction goes further than this in link time, nor takes more than so many steps: a few
minutes of work."""
_MOST_STEPS = 50_000_000
_PACKETS = 400_000
"""A longer transfer gets larger super-segments, for speed."""
_ITEMS = 50_000
"""So does what the link's own law moves; its curve is then rougher than STEP."""
_NEVER: Ns = 1 << 62
_CLOSED = "the link stays closed, and not all has arrived"
_TOO_LONG = f"not done after {LONGEST // SECOND:,} s on the link, where a prediction ends"


class TooLong(Exception):
    """The transfers are not done within what is allowed; says what that is."""


class WindowCap(NamedTuple):
    """`rate` in bytes/s: a `window` of so many bytes, which `buffer` allows, a round trip."""

    buffer: Literal["send_buffer", "receive_buffer"]
    window: int
    round_trip: Ns
    rate: int


@dataclass(frozen=True, slots=True)
class Path:
    """One direction of a link. `rate` may be None with a `trace` that gives one throughout. `queue`
    None is one bandwidth-delay product, 64 KiB at least; `loss` a share of segments, `burst` the
    mean length of a row of lost ones (None: each by itself). `qdisc` None: fair without TCP, fifo
    with it."""

    rate: int | None
    delay: Ns
    queue: int | None = None
    loss: float = 0.0
    burst: float | None = None
    overhead: int = HEADER
    jitter: Ns = 0
    shape: Shape = LOG_NORMAL
    correlation: Ns | None = None
    qdisc: Qdisc | None = None
    codel: bool = False
    trace: Trace | None = None

    def losses(self, seed: int) -> Loss | None:
        return losses_of(self.loss, self.burst, f"{seed}/netem/predict/loss")

    @property
    def plain(self) -> bool:
        """Whether it never changes and keeps one queue, in which nothing is dropped but at its
        end."""
        return not (self.jitter or self.trace or self.codel or self.qdisc == "fair")

    @property
    def peak(self) -> int:
        """The highest rate."""
        peak = self.trace.peak if self.trace is not None else None
        rates = [rate for rate in (self.rate, peak) if rate is not None]
        assert rates, "no rate is known"
        return min(rates)

    def window_cap(self, transfers: Sequence[Transfer]) -> WindowCap | None:
        """What the buffers leave the first of `transfers` (all are alike), if that is less than its
        share of the link."""
        one = transfers[0]
        span = self.trace.span("delay") if self.trace is not None else None
        round_trip = 2 * max(self.delay, round(span.least) if span else 0)
        if one.tcp == "none" or not round_trip:
            return None
        segments: dict[Literal["send_buffer", "receive_buffer"], int] = {
            "receive_buffer": window_limit(one.receive_buffer),
            "send_buffer": send_limit(one.send_buffer),
        }
        buffer = min(segments, key=segments.__getitem__)
        window = segments[buffer] * MSS * one.streams
        cap = WindowCap(buffer, window, round_trip, window * SECOND // round_trip)
        share = self.peak * MSS // (MSS + self.overhead) // len(transfers)
        return cap if 0 < cap.rate < share else None

    def link(self, seed: int, tcp: Tcp) -> Link:
        return Link(
            self.rate,
            self.delay,
            self.jitter,
            f"{seed}/netem/predict",
            shape=self.shape,
            correlation=self.correlation,
            qdisc=self.qdisc or ("fair" if tcp == "none" else "fifo"),
            trace=self.trace,
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """`nbytes` of payload from `start` on over `streams` connections, which draw from one supply.

    A warm connection is established, and its window is its share of what the path holds; a cold one
    opens first.
    """

    nbytes: int
    start: Ns = 0
    tcp: Tcp = "cubic"
    streams: int = 1
    warm: bool = False
    send_buffer: int = SEND_BUFFER
    receive_buffer: int = RECEIVE_BUFFER


@dataclass(slots=True)
class Predicted:
    """`ends`: when each transfer's last byte arrives. `curve`: bytes that each has received by 0,
    STEP, 2 STEP and so on, to the end of the last. `dropped`: segments that found the queue full;
    `lost`: those that the path lost; `packets`: super-segments sent, the measure of the work."""

    ends: list[Ns]
    curve: list[list[int]]
    retransmits: int = 0
    dropped: int = 0
    lost: int = 0
    packets: int = 0
    delay: tuple[Ns, Ns] | None = None
    """Where the delay varies: mean and standard deviation of what was carried, order kept."""


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 for equal values, 1/n where one has everything."""
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def predict(
    path: Path, transfers: Sequence[Transfer], *, seed: int = 0, segments: int | None = None
) -> Predicted:
    """All of `transfers` over `path`, either all of them under a TCP or none.

    `segments`: most segments of a packet; None picks what is quick. Raises TooLong.
    """
    assert transfers
    longest = max(max(t.start for t in transfers), path.delay)
    if longest > LONGEST or sum(t.nbytes for t in transfers) * SECOND > LONGEST * path.peak:
        raise TooLong(_TOO_LONG)
    if any(t.tcp == "none" for t in transfers):
        assert all(t.tcp == "none" for t in transfers)
        return _fluid(path, transfers, seed)
    if path.plain:
        return _Run(path, transfers, seed, segments).run()
    return _live(path, transfers, seed, segments)


class _Curve:
    """Bytes by time, as points every STEP."""

    def __init__(self) -> None:
        self.points: list[int] = [0]

    def add(self, at: Ns, nbytes: int) -> None:
        """So many more arrived `at`, which may be earlier than what was added before."""
        i = -(-at // STEP)
        points = self.points
        if i >= len(points):
            points.extend([points[-1]] * (i - len(points) + 1))
        for later in range(i, len(points)):
            points[later] += nbytes


def _table(curves: Sequence[_Curve]) -> list[list[int]]:
    rows = max(len(c.points) for c in curves)
    return [[c.points[min(i, len(c.points) - 1)] for c in curves] for i in range(rows)]


# -- without TCP -----------------------------------------------------------------------------------


def _fluid(path: Path, transfers: Sequence[Transfer], seed: int) -> Predicted:
    """The live link's own law. Items end at the curve's points or more often."""
    link = path.link(seed, "none")
    curves = [_Curve() for _ in transfers]
    ends: list[Ns] = [0] * len(transfers)
    item = max(1, path.peak * STEP // SECOND // 4, sum(t.nbytes for t in transfers) // _ITEMS)
    for i in sorted(range(len(transfers)), key=lambda i: transfers[i].start):
        transfer, flow = transfers[i], Flow()
        start, left = transfer.start, transfer.nbytes
        while True:
            link.push(start, flow, min(item, left), tag=i)
            left -= min(item, left)
            if not left:
                break
    while (at := link.next_event()) is not None:
        if at > LONGEST:
            raise TooLong(_TOO_LONG)
        for i, nbytes, _, due in link.advance(at):
            ends[i] = due
            curves[i].add(due, nbytes)
    if any(c.points[-1] < t.nbytes for c, t in zip(curves, transfers, strict=True)):
        raise TooLong(_CLOSED)
    return Predicted(ends, _table(curves), delay=_varying(path, link))


def _varying(path: Path, link: Link) -> tuple[Ns, Ns] | None:
    varies = path.jitter or (path.trace is not None and path.trace.delays)
    return link.measured_delay() if varies else None


# -- on the live link ------------------------------------------------------------------------------


def _tcp(path: Path, one: Transfer, segments: int) -> Live:
    """How a transfer behaves, in the live link's words."""
    assert one.tcp != "none"
    return Live(
        one.tcp,
        one.streams,
        one.warm,
        one.send_buffer,
        one.receive_buffer,
        path.queue,
        path.codel,
        path.overhead,
        segments,
    )


def _live(path: Path, transfers: Sequence[Transfer], seed: int, segments: int | None) -> Predicted:
    """All transfers are alike but for when they start and what they carry."""
    one = transfers[0]
    tcp = _tcp(path, one, segments or _segments(path, transfers))
    link = path.link(seed, one.tcp)
    live = TcpLink(link, tcp, f"{seed}/netem/predict", path.losses(seed))
    curves = [_Curve() for _ in transfers]
    flows = [Flow() for _ in transfers]
    numbers = {flow: i for i, flow in enumerate(flows)}
    ends: list[Ns] = [0] * len(transfers)

    def arrived(flow: Flow, at: Ns, count: int) -> None:
        i = numbers[flow]
        nbytes = min(count * MSS, transfers[i].nbytes)
        curves[i].add(at, nbytes - curves[i].points[-1])
        ends[i] = at if nbytes == transfers[i].nbytes else 0

    live.arrivals = arrived
    for i in sorted(range(len(transfers)), key=lambda i: transfers[i].start):
        live.push(transfers[i].start, flows[i], transfers[i].nbytes)
    while not all(ends):
        at = live.next_event()
        if at is None:
            raise TooLong(_CLOSED)
        if at > LONGEST:
            raise TooLong(_TOO_LONG)
        if live.packets > _MOST_STEPS:
            raise TooLong(f"more than {_MOST_STEPS:,} packets; less to send is less")
        live.advance(at + STEP)
    return Predicted(
        ends,
        _table(curves),
        live.resent,
        live.overflowed + live.delayed_drops,
        live.lost,
        live.packets,
        _varying(path, link),
    )


def _segments(path: Path, transfers: Sequence[Transfer]) -> int:
    """Of a packet: what is quick."""
    quick = path.peak * PACKET // SECOND // (MSS + path.overhead)
    return max(1, quick, sum(t.nbytes for t in transfers) // MSS // _PACKETS)


# -- with TCP --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Supply:
    """What a transfer has left to hand to its connections, in segments; bytes that have arrived."""

    number: int
    transfer: Transfer
    left: int
    curve: _Curve
    arrived: int = 0
    end: Ns = 0
    connections: list[_Connection] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Connection:
    sender: Sender
    supply: _Supply
    receiver: Receiver
    una: int = 0
    armed: Ns = _NEVER
    """The earliest timer entry for this connection that stands in the heap."""


class _Run:
    """The transfers at work: acknowledgements on their way, and timers."""

    def __init__(
        self, path: Path, transfers: Sequence[Transfer], seed: int, segments: int | None
    ) -> None:
        self._path = path
        self._round_trip = 2 * path.delay
        self._rate = path.peak
        queue = default_queue(self._rate, self._round_trip) if path.queue is None else path.queue
        self._bottleneck = Bottleneck(self._rate, queue, path.losses(seed))
        self._wire = MSS + path.overhead
        if segments is None:
            segments = _segments(path, transfers)
        self._acks: deque[tuple[Ns, _Connection, Answer]] = deque()
        self._timers: list[tuple[Ns, int, _Connection, Held | None]] = []
        self._numbers = 0
        self._supplies: list[_Supply] = []
        for i, transfer in enumerate(transfers):
            total = -(-transfer.nbytes // MSS)
            supply = _Supply(i, transfer, total, _Curve())
            self._supplies.append(supply)
            tcp = _tcp(path, transfer, segments)
            for k in range(transfer.streams):
                sender = tcp.sender(f"{seed}/netem/predict/bbr/{i}/{k}", segments)
                connection = _Connection(sender, supply, Receiver(sender.limit))
                supply.connections.append(connection)
                self._arm(connection, transfer.start)

    def run(self) -> Predicted:
        acks, timers = self._acks, self._timers
        back = self._path.delay
        unfinished = len(self._supplies)
        for _ in range(_MOST_STEPS):
            if not unfinished:
                break
            if acks and (not timers or acks[0][0] <= timers[0][0]):
                now, connection, answer = acks.popleft()
                unfinished -= self._on_ack(now, now - back, connection, answer)
            else:
                now, _, connection, held = heapq.heappop(timers)
                if now > LONGEST:
                    raise TooLong(_TOO_LONG)
                if held is not None:
                    if not held.waiting:
                        continue
                    held.waiting = False
                    at = now - back - DELAYED_ACK
                    unfinished -= self._on_ack(now, at, connection, held.answer)
                elif now != connection.armed:
                    continue
                else:
                    connection.armed = _NEVER
                    self._on_timer(now, connection)
            self._pump(now, connection)
        else:
            raise TooLong(f"more than {_MOST_STEPS:,} steps; a faster link or less to send is less")
        senders = [c.sender for supply in self._supplies for c in supply.connections]
        return Predicted(
            [supply.end for supply in self._supplies],
            _table([supply.curve for supply in self._supplies]),
            sum(sender.resent for sender in senders),
            self._bottleneck.dropped,
            self._bottleneck.lost,
            sum(sender.packets for sender in senders),
        )

    def _on_ack(self, now: Ns, at: Ns, connection: _Connection, answer: Answer) -> bool:
        """The answer to what arrived `at`; whether this was what the transfer's end waited for."""
        sender, supply = connection.sender, connection.supply
        sender.on_ack(now, answer)
        new = sender.una - connection.una
        if not new:
            return False
        connection.una = sender.una
        nbytes = min(new * MSS, supply.transfer.nbytes - supply.arrived)
        supply.arrived += nbytes
        supply.curve.add(at, nbytes)
        supply.end = max(supply.end, at)
        return supply.arrived == supply.transfer.nbytes

    def _on_timer(self, now: Ns, connection: _Connection) -> None:
        sender, transfer = connection.sender, connection.supply.transfer
        if sender.offered or sender.state != "open":
            sender.on_timer(now)
        elif transfer.warm:
            connections = sum(len(supply.connections) for supply in self._supplies)
            share = self._rate / self._wire / connections
            sender.warm(now, share, max(2 * self._path.delay, 1))
        else:
            sender.connect(now)

    def _pump(self, now: Ns, connection: _Connection) -> None:
        """Sends what may be sent, and arms the timer."""
        sender, supply = connection.sender, connection.supply
        one = len(supply.connections) == 1
        acks, back = self._acks, self._path.delay
        while True:
            if supply.left and (one or sender.wants):
                part = supply.left if one else min(supply.left, max(PART, sender.burst))
                supply.left -= part
                sender.offer(now, part)
            packet = sender.next(now)
            if packet is None:
                break
            n = packet.n
            if n:
                nbytes = n * self._wire
                if packet.seq + n == sender.offered and not supply.left and one:
                    nbytes -= sender.offered * MSS - supply.transfer.nbytes
                kept, finish = self._bottleneck.send(now, n, nbytes)
            else:
                kept, finish = self._bottleneck.send(now, 1, SYN_BYTES)
            answer = connection.receiver.on_packet(finish + back, packet, kept)
            if isinstance(answer, Answer):
                acks.append((finish + 2 * back, connection, answer))
            elif answer is not None:
                self._push(answer.until + back, connection, answer)
        if sender.wake is not None and sender.wake < connection.armed:
            self._arm(connection, sender.wake)

    def _arm(self, connection: _Connection, at: Ns) -> None:
        connection.armed = at
        self._push(at, connection, None)

    def _push(self, at: Ns, connection: _Connection, held: Held | None) -> None:
        self._numbers += 1
        heapq.heappush(self._timers, (at, self._numbers, connection, held))
