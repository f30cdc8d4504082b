"""One TCP connection, seen from the end that sends: how many segments may be in flight. Sans-IO.

    next(now)              the packet to put on the wire now, or None
    on_ack(now, answer)    an acknowledgement has come back
    on_timer(now)          `wake` has come: pacing, reordering, tail-loss probe, time-out
    offer(now, segments)   the application has more to send
    connect(now)           the handshake; without it the connection is open from the start

After each of the last four the driver calls `next` until it gives None, and sees to it that
`on_timer` is called at `wake`. Acknowledgements come in the order of sending, because a path is
FIFO; what was sent before the packet acknowledged and is not acknowledged yet is a hole. The
sender learns of losses in no other way.

What is here is what Linux does for every congestion control: initial window (RFC 6928), SACK
scoreboard, loss detection by order of sending (RACK, RFC 8985), proportional rate reduction once a
round trip (RFC 6937), tail-loss probe, time-out with a floor of 200 ms, undo of a time-out that was
none, restart after idling (RFC 2861), limits by the buffers of both sides. How the window grows and
shrinks is in `tcp_control` and `tcp_bbr`; the other end is in `segments`.

**On a live link.** One sender a flow and direction, beside the flow's queue in `link`: a stream
hands over as many bytes as `next` gives segments, the link says when they are through and due, the
receiver's answer comes back after the delay of the way back. Segments that the path loses (see
`bottleneck`) stay with the stream until the sender gives them again: a stream never loses bytes.

Left out: reordering, ECN, lost acknowledgements.
"""

from __future__ import annotations

from typing import Literal, Protocol

from pddrt.netem.segments import Answer, Packet
from pddrt.netem.tcp_scoreboard import Scoreboard
from pddrt.types import MS, SECOND, Ns

INITIAL_WINDOW = 10
UNLIMITED = 1 << 62
"""A slow-start threshold that is not known yet, a buffer without end."""
SEND_BUFFER = 4 << 20
"""Most that Linux as shipped gives a sender (tcp_wmem)."""
_SEND_BYTES = 1474
"""What a full segment takes of the send buffer, with its share of the bookkeeping (measured)."""
_REORDERING = 3
_RTO_MIN: Ns = 200 * MS
_RTO_MAX: Ns = 120 * SECOND
_RTO_SYN: Ns = SECOND
_PROBE_MARGIN: Ns = 8 * MS
"""Two ticks of the kernel's clock (250 Hz), which its probe waits beyond two round trips."""

State = Literal["connecting", "open", "recovery", "loss"]


def send_limit(send_buffer: int) -> int:
    """Most segments that the sender's socket holds."""
    return max(2, send_buffer // _SEND_BYTES)


class Control(Protocol):
    """How a window grows and shrinks. `paces`: it also sets `Sender.pacing` and, in recovery too,
    the window; otherwise the sender reduces the window to `threshold` by itself."""

    paces: bool

    def threshold(self, sender: Sender) -> int:
        """The slow-start threshold after a loss. Called once at the start of each recovery."""

    def on_ack(
        self, now: Ns, sender: Sender, packet: Packet, acked: int, lost: int, rtt: Ns
    ) -> None:
        """`acked` segments newly delivered, `lost` newly found missing, by the ack of `packet`."""

    def on_timeout(self, sender: Sender) -> None: ...

    def on_restart(self, now: Ns, sender: Sender, idle: Ns) -> None:
        """There is more to send after nothing was in flight for `idle`."""

    def on_warm(self, now: Ns, sender: Sender, rate: float, rtt: Ns) -> None:
        """The connection has carried traffic; see `Sender.warm`."""


class Sender(Scoreboard):
    """See the module. `window`, `threshold` and `pacing` belong to the control, too.

    `limit`: most segments outstanding, by the receiver's buffer. `buffer`: most that the sender's
    holds; the application is woken when a third of it is free and then fills it, which a small
    queue feels. `largest`: most segments a packet holds; a window is at least 32 packets all the
    same, so that it stays a clock.
    """

    __slots__ = (  # noqa: RUF023 - what others may see comes first
        "app_limited", "control", "limit", "min_rtt", "offered", "packets", "pacing", "resent",
        "srtt", "state", "threshold", "wake", "window",
        "_backoff", "_buffer", "_delivered_at", "_first_sent", "_idle_since", "_largest",
        "_limited", "_limited_until", "_max_out", "_pace_at", "_point", "_prior_threshold",
        "_prior_window", "_probe", "_probed", "_progress", "_reduce_acked", "_reduce_sent",
        "_reo_at", "_syns", "_variation", "_written",
    )  # fmt: skip

    def __init__(
        self,
        control: Control,
        *,
        limit: int = UNLIMITED,
        buffer: int = UNLIMITED,
        largest: int = 1,
    ) -> None:
        assert min(limit, buffer) >= 1
        assert largest >= 1
        super().__init__()
        self.control = control
        self.limit = limit
        self._buffer = buffer
        self._written = 0
        self.state: State = "open"
        self.window = INITIAL_WINDOW
        self.threshold = UNLIMITED
        self.pacing: float | None = None
        """Segments/s; None sends whatever the window allows at once."""
        self.wake: Ns | None = None
        self.offered = 0
        self.resent = 0
        self.srtt: Ns = 0
        self.min_rtt: Ns = 0
        self._variation: Ns = 0
        self._largest = largest
        self.packets = 0
        self._point = 0
        self._prior_window = 0
        self._prior_threshold = 0
        self._reduce_acked = 0
        self._reduce_sent = 0
        self._limited = False
        self._limited_until = 0
        self._max_out = 0
        self._pace_at: Ns = 0
        self._progress: Ns = 0
        self._idle_since: Ns | None = None
        self._backoff = 0
        self._syns = 0
        self._probe = False
        self._probed = False
        self._reo_at: Ns | None = None
        self._delivered_at: Ns = 0
        self._first_sent: Ns = 0
        self.app_limited = 0

    # -- the application --------------------------------------------------------------------------

    def connect(self, now: Ns) -> None:
        """A SYN goes first; data follow its acknowledgement, a round trip later."""
        self.state = "connecting"
        self._progress = now

    def warm(self, now: Ns, rate: float, rtt: Ns) -> None:
        """Open, and used before on a path of `rate` segments/s: the window is what that holds."""
        self._idle_since = None
        self.srtt = self.min_rtt = rtt
        self._variation = rtt // 2
        self.window = min(self.limit, max(INITIAL_WINDOW, int(rate * rtt) // SECOND))
        self.threshold = self.window
        self.control.on_warm(now, self, rate, rtt)

    def rested(self, now: Ns) -> bool:
        """Whether its window says nothing of the path: never filled yet, or idle for a
        time-out."""
        if self.state != "open":
            return False
        idle = self._idle_since is not None and now - self._idle_since > self.rto
        return idle or self.high <= INITIAL_WINDOW

    def offer(self, now: Ns, segments: int) -> None:
        """`segments` more to send. After an idle time the window starts anew."""
        if self._idle_since is not None and segments:
            idle = now - self._idle_since
            self._idle_since = None
            rto = self.rto
            if idle > rto and not self.control.paces:
                self.threshold = max(self.threshold, self.window * 3 // 4)
                halvings = min(idle // rto, 60)
                floor = min(self.window, INITIAL_WINDOW)
                self.window = max(self.window >> halvings, floor)
            self.control.on_restart(now, self, idle)
        self.offered += segments

    def withdraw(self) -> int:
        """The application takes back what was not sent yet; returns how many segments that are."""
        back = self.offered - self.high
        self.offered = self.high
        self._written = min(self._written, self.high)
        return back

    @property
    def slow_start(self) -> bool:
        return self.window < self.threshold

    @property
    def rto(self) -> Ns:
        return (self.srtt + max(4 * self._variation, _RTO_MIN)) if self.srtt else _RTO_SYN

    @property
    def window_limited(self) -> bool:
        """Whether it was the window that held the sender back: else it must not grow."""
        return self._limited or (self.slow_start and self.window < 2 * self._max_out)

    # -- sending ----------------------------------------------------------------------------------

    @property
    def burst(self) -> int:
        """Segments of the next packet, if there are as many and room for them."""
        return min(max(self.window >> 5, 1), self._largest)

    @property
    def wants(self) -> bool:
        """Whether it might send more now than it was offered."""
        if self.state == "connecting" or self.pipe >= self.window:
            return False
        return self.offered - self.high < self.burst

    def next(self, now: Ns) -> Packet | None:
        """The packet to send now. None: window full, paced (see `wake`), or nothing to send."""
        if self.state == "connecting":
            return self._syn(now)
        room = self.window - self.pipe
        if self._probe:
            return self._send_probe(now)
        if room <= 0:
            return None
        if self._pace_at > now:
            if self.wake is None or self.wake > self._pace_at:
                self.wake = self._pace_at
            return None
        burst = self.burst
        if self._lost_ranges and (found := self._again(min(burst, room))) is not None:
            seq, n = found
            self.resent += n
        else:
            seq = self.high
            n = min(burst, self._written - seq, self.una + self.limit - seq)
            if n <= 0 and self._refill():
                n = min(burst, self._written - seq, self.una + self.limit - seq)
            if n <= 0:
                self.app_limited = (self.delivered + self.pipe) or 1
                return None
            if n > room:
                if self.pipe:
                    return None
                n = room
            self.high = seq + n
        return self._sent(now, seq, n, room - n < burst)

    def _refill(self) -> bool:
        """The application writes more, if it has any and is awake."""
        if self._written == self.offered or 3 * (self._written - self.una) > 2 * self._buffer:
            return False
        self._written = min(self.offered, self.una + self._buffer)
        return True

    def _sent(self, now: Ns, seq: int, n: int, full: bool) -> Packet:
        """The packet, and what sending it changes. `full`: the window has no room for another."""
        if not self._flight:
            self._first_sent = self._delivered_at = now
            self._progress = now
            self._probed = False
        packet = Packet(
            self.packets, seq, n, now,
            self.delivered, self._delivered_at, self._first_sent, self.app_limited > 0,
        )  # fmt: skip
        self.packets += 1
        self._flight.append(packet)
        self.pipe += n
        self._reduce_sent += n
        out = self.high - self.una
        if full or self.una >= self._limited_until or (not self._limited and out > self._max_out):
            self._limited = full
            self._max_out = out
            self._limited_until = self.high
        if self.pacing is not None and self.packets >= INITIAL_WINDOW:
            # what was sent late may be caught up by half: the kernel's way to keep the rate
            gap = int(n * SECOND / self.pacing)
            self._pace_at = now + gap - min(gap // 2, max(0, now - self._pace_at))
        if self.wake is None:
            self.wake = now + self._timeout()
        return packet

    def _syn(self, now: Ns) -> Packet | None:
        if self._syns > self._backoff:
            return None
        self._syns += 1
        self.wake = now + self._timeout()
        return Packet(-self._syns, 0, 0, now, 0, now, now, False)

    def _send_probe(self, now: Ns) -> Packet:
        """One segment beyond the window: a new one if there is any, else the last again."""
        self._probe = False
        seq = self.high - 1
        if min(self._written, self.una + self.limit) > self.high:
            self.high += 1
            seq += 1
        else:
            self.resent += 1
        return self._sent(now, seq, 1, True)

    # -- acknowledgements -------------------------------------------------------------------------

    def on_ack(self, now: Ns, answer: Answer) -> None:
        packet = answer.packet
        if packet.n == 0:
            self._on_syn_ack(now, packet)
            return
        before, una = self.delivered, self.una
        if answer.before is not None:
            self._take(*answer.before)
        self._take(packet, answer.kept)
        acked = self.delivered - before
        rtt = now - packet.sent
        self._on_rtt(rtt)
        self._delivered_at = now
        self._first_sent = packet.sent
        if self.app_limited and self.delivered > self.app_limited:
            self.app_limited = 0
        if acked:
            self._progress = now
            self._backoff = 0
            self._probed = False
        lost = self._find_lost(now) if self._holes else 0
        if self.state == "open":
            if lost:
                self._recover()
        elif self.una >= self._point:
            self._leave()
        if self.control.paces:
            self.control.on_ack(now, self, packet, acked, lost, rtt)
        elif self.state == "recovery":
            self._reduce(acked, lost)
        else:  # beyond a hole, what arrives does not open the window
            self.control.on_ack(now, self, packet, acked if self.una > una else 0, lost, rtt)
        if self.wake is None or self.wake > now + 2 * self.srtt + _PROBE_MARGIN:
            due = now + self._timeout()
            self.wake = due if self.wake is None else min(self.wake, due)
        if self.una == self.offered and not self.pipe:
            self._idle_since = now

    def _take(self, packet: Packet, kept: int) -> None:
        """Notes an arrival. Was it one given up by a time-out that is not over, then that was none,
        and all is as before it, but for what was sent again."""
        if packet.number < self._first_number:
            if self.state != "loss" or not self._take_back(packet):
                self.delivered += self._cover(packet.seq, packet.seq + kept)
                return
            self.state = "open"
            self._backoff = 0
            self.window = max(self.window, self._prior_window)
            self.threshold = self._prior_threshold
        self._arrived(packet, kept)

    def _on_syn_ack(self, now: Ns, packet: Packet) -> None:
        if self.state == "connecting":
            self._on_rtt(now - packet.sent)
            self.state = "open"
            self._backoff = 0
            self.wake = None
            self.control.on_ack(now, self, packet, 0, 0, now - packet.sent)

    def _on_rtt(self, rtt: Ns) -> None:
        """RFC 6298, for every acknowledgement, as timestamps allow."""
        if self.srtt:
            error = rtt - self.srtt
            self.srtt += error >> 3
            self._variation += (abs(error) - self._variation) >> 2
            if rtt < self.min_rtt:
                self.min_rtt = rtt
        else:
            self.srtt = self.min_rtt = rtt
            self._variation = rtt // 2

    # -- losses -----------------------------------------------------------------------------------

    def _find_lost(self, now: Ns) -> int:
        """Holes that are too old to be anything else; the others get a quarter round trip."""
        lost = self._give_up_holes(_REORDERING if self.state == "open" else 1)
        if not self._holes:
            self._reo_at = None
        elif self._reo_at is None:
            self._reo_at = now + self.min_rtt // 4
            if self.wake is None or self.wake > self._reo_at:
                self.wake = self._reo_at
        return lost

    def _recover(self) -> None:
        """Once a round trip: until all that is out now has arrived there is no other reduction."""
        self.state = "recovery"
        self._point = self.high
        self._prior_window = self.window
        self._prior_threshold = self.threshold
        self.threshold = self.control.threshold(self)
        self._reduce_acked = self._reduce_sent = 0

    def _leave(self) -> None:
        if self.state == "recovery" and not self.control.paces:
            self.window = self.threshold
        self.state = "open"
        self._given_up.clear()
        if self._lost_ranges:
            self._recover()

    def _reduce(self, acked: int, lost: int) -> None:
        """Proportional rate reduction: what is sent is to what arrives as the new window to the
        old; below the new window, as much as arrives and one more."""
        if not acked:
            return
        self._reduce_acked += acked
        missing = self.threshold - self.pipe
        if missing < 0:
            allowed = -(-self.threshold * self._reduce_acked // self._prior_window)
            send = allowed - self._reduce_sent
        else:
            send = max(self._reduce_acked - self._reduce_sent, acked)
            send = min(missing, send + (not lost))
        self.window = self.pipe + max(send, 0 if self._reduce_sent else 1)

    # -- time -------------------------------------------------------------------------------------

    def _timeout(self) -> Ns:
        """From the last progress to the next measure: a probe, then a time-out."""
        if self.state == "connecting":
            return min(_RTO_SYN << self._backoff, _RTO_MAX)
        rto = min(self.rto << self._backoff, _RTO_MAX)
        if self.state == "open" and not self._probed and self.srtt:
            margin = _RTO_MIN if self.high - self.una == 1 else _PROBE_MARGIN
            return min(2 * self.srtt + margin, rto)
        return rto

    def on_timer(self, now: Ns) -> None:
        """At `wake`, or whenever: does what is due, and says in `wake` when to come back."""
        if self._reo_at is not None and now >= self._reo_at:
            self._reo_at = None
            lost = self._give_up_holes(0)
            if lost and self.state == "open":
                self._recover()
                if self.control.paces:  # it hears of losses with acknowledgements only
                    self.window = max(self.window - lost, self.pipe + 1)
                else:
                    self._reduce(1, lost)
        waiting = self.state == "connecting" or self.pipe > 0
        if waiting and now >= self._progress + self._timeout():
            if self.state == "connecting":
                self._backoff += 1
                self._progress = now
            elif self.state == "open" and not self._probed:
                self._probe = self._probed = True
                self._progress = now
            else:
                self._on_timeout(now)
            waiting = True
        self.wake = self._progress + self._timeout() if waiting else None
        if self._reo_at is not None:
            self.wake = self._reo_at if self.wake is None else min(self.wake, self._reo_at)

    def _on_timeout(self, now: Ns) -> None:
        """All that is out counts as lost, and the window is one segment."""
        first = self.state != "loss"
        if first:
            self._prior_window = self.window
            self._prior_threshold = self.threshold
            self.threshold = self.control.threshold(self)
        self._give_up_all(self.packets, first)
        assert not self.pipe
        self.state = "loss"
        self._point = self.high
        self.window = 1
        self._backoff += 1
        self._progress = self._pace_at = now
        self._reo_at = None
        self.control.on_timeout(self)
