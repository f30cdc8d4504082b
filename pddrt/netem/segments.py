"""Segments, the packets they travel in, and the end that receives them. Sans-IO.

A packet holds several segments that share one fate in time (a *super-segment*), so that a fast link
does not cost an event for every 1,448 bytes. What is counted is segments, everywhere.

The receiver answers as Linux does: two segments get one acknowledgement, and a single one waits for
the next, but not while its window still opens, nor while a segment is missing, nor longer than
DELAYED_ACK. That decides when a flow that meets others leaves slow start, and later sends its
packets in pairs, which a small queue feels.

Left out: the window itself while it opens (by two segments for each that comes, so that slow start
never meets it). The receiving application is never late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pddrt.types import MS, Ns

MSS = 1448
"""Payload of a full segment on Ethernet: 1,500 less IPv4, TCP and its timestamps."""
HEADER = 52
"""Bytes of a segment that are no payload."""
SYN_BYTES = 60
RECEIVE_BUFFER = 4 << 20
"""What the measured runs gave a receiver. Linux as shipped lets it grow to 6 MiB, newer ones to 32
MiB (tcp_rmem)."""
_WINDOW_SHARE = 172 / 256
"""Of a receive buffer, what is window: 1,448 of the 2,154 bytes that a received segment takes."""
DELAYED_ACK: Ns = 40 * MS
"""How long Linux waits for a second segment."""
_FIRST_WINDOW = 45
"""Segments that a receiver allows before it has seen any: 64 KiB."""


def window_limit(receive_buffer: int) -> int:
    """Most segments that the receiver lets be outstanding."""
    return max(2, int(receive_buffer * _WINDOW_SHARE) // MSS)


class Packet(NamedTuple):
    """`n` segments from number `seq` on, sent as one; n = 0 is the SYN."""

    number: int
    """In the order of sending; a segment that is sent again gets a new one."""
    seq: int
    n: int
    sent: Ns
    delivered: int
    """Segments delivered when this was sent, and when the last of them was (see `tcp_bbr`)."""
    delivered_at: Ns
    first_sent: Ns
    starved: bool
    """The sender had less to send than it might have."""


class Answer(NamedTuple):
    """An acknowledgement: `kept` of the packet's segments arrived, the first ones. `before`: the
    packet before it, and how much of that, if this answers both."""

    packet: Packet
    kept: int
    before: tuple[Packet, int] | None = None


@dataclass(slots=True, eq=False)
class Held:
    """An answer that waits for the next packet until `until`; then it is no longer `waiting`."""

    answer: Answer
    until: Ns
    waiting: bool = True


class Receiver:
    """The end of one connection that receives; `limit` is its window in segments. Packets come in
    the order of sending."""

    __slots__ = ("_held", "_high", "_missing", "_opened")

    def __init__(self, limit: int) -> None:
        self._high = 0
        self._missing = 0
        self._opened = (limit - _FIRST_WINDOW) // 2
        """Segments after which the window is open."""
        self._held: Held | None = None

    def on_packet(self, now: Ns, packet: Packet, kept: int) -> Answer | Held | None:
        """`kept` of the packet's segments arrive at `now`: the answer, or one that is held. None
        arrive: no answer, but the receiver will miss them; it may be told of it, or find out by the
        next that arrives. A SYN counts as one.

        A held answer that is still `waiting` at its time is to be sent then.
        """
        n = packet.n
        if not n:
            return Answer(packet, 0) if kept else None
        gap = self._missing > 0
        if packet.seq >= self._high:  # beyond, where whole packets before it were lost
            self._missing += packet.seq - self._high + n - kept
            self._high = packet.seq + n
        else:
            self._missing = max(0, self._missing - kept)
        if not kept:
            return None
        held = self._held
        if held is not None and not (held.waiting and now <= held.until):
            held = None
        if n == 1 and held is None and not gap and self._high > self._opened:
            self._held = held = Held(Answer(packet, kept), now + DELAYED_ACK)
            return held
        self._held = None
        if held is None:
            return Answer(packet, kept)
        held.waiting = False
        return Answer(packet, kept, held.answer[:2])
