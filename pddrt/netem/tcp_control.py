"""How a window grows and shrinks on losses: Reno, and CUBIC with HyStart as Linux has them.

Windows are whole segments, and growth between two whole ones is counted in acknowledged segments,
as the kernel does: at small windows the rounding is part of the result. Sources: RFC 5681 (Reno),
RFC 9438 (CUBIC), RFC 9406 and Ha and Rhee, "Taming the elephants" (HyStart), and Linux's choices
where they leave one.

Owns: the window outside recovery, the threshold after a loss. Leaves out: recovery itself, which is
the same for both (see `tcp`).
"""

from __future__ import annotations

import math

from pddrt.netem.segments import MSS, Packet
from pddrt.netem.tcp import Sender
from pddrt.types import MS, SECOND, Ns

C = 410 / 1024
"""CUBIC's scale, segments/s^3: 0.4 in the kernel's arithmetic."""
BETA = 717 / 1024
"""What is left of the window after a loss: 0.7."""
_TICK: Ns = 4 * MS
"""The kernel looks at the cubic curve once per tick of its clock (250 Hz) at most."""
_FRIENDLY = 15 / 8
"""Segments acknowledged per segment of window for Reno's fair share to grow by one: (1 + beta) / (3
(1 - beta)), in eighths."""
_BLIND: Ns = SECOND
"""Round trips this soon after a loss are no measure of the path."""

_TRAIN_GAP: Ns = 2 * MS
_DELAY_MIN, _DELAY_MAX = 4 * MS, 16 * MS
_SAMPLES = 8
_LOW_WINDOW = 16
_TRAIN_BYTES = 4 * 65536


def _slow_start(sender: Sender, acked: int) -> int:
    """Grows by what was acknowledged, up to the threshold; returns what is left over."""
    grown = min(sender.window + acked, sender.threshold)
    rest = acked - (grown - sender.window)
    sender.window = grown
    return rest


class Reno:
    """Half after a loss; one segment more a round trip."""

    paces = False

    def __init__(self) -> None:
        self._counted = 0

    def threshold(self, sender: Sender) -> int:
        return max(sender.window // 2, 2)

    def on_ack(
        self, now: Ns, sender: Sender, packet: Packet, acked: int, lost: int, rtt: Ns
    ) -> None:
        if not acked or not sender.window_limited:
            return
        if sender.window < sender.threshold:
            acked = _slow_start(sender, acked)
            if not acked:
                return
        self._grow(sender, sender.window, acked)

    def _grow(self, sender: Sender, per_segment: int, acked: int) -> None:
        """One more for every `per_segment` acknowledged."""
        if self._counted >= per_segment:
            self._counted = 0
            sender.window += 1
        self._counted += acked
        if self._counted >= per_segment:
            more = self._counted // per_segment
            self._counted -= more * per_segment
            sender.window += more

    def on_timeout(self, sender: Sender) -> None:
        self._counted = 0

    def on_restart(self, now: Ns, sender: Sender, idle: Ns) -> None:
        pass

    def on_warm(self, now: Ns, sender: Sender, rate: float, rtt: Ns) -> None:
        pass


class Cubic(Reno):
    """Seven tenths after a loss; then a cubic curve of the time since, whose middle is the window
    of that loss, or what Reno would have got, if that is more. Before the first loss: HyStart ends
    slow start when the acknowledgements of one round come for half the least round trip without a
    pause (a window's worth fills the path), or when the round trip has grown by an eighth."""

    def __init__(self) -> None:
        super().__init__()
        self._last_max = 0
        self._least: Ns = 0
        self._reset()
        self._found = False
        self._round_end = 0
        self._round_start: Ns = 0
        self._train: Ns = 0
        self._round_least: Ns = 0
        self._samples = 0.0

    def _reset(self) -> None:
        self._epoch: Ns | None = None
        self._k = 0.0
        self._origin = 0
        self._per_segment = 1
        self._looked: Ns = -SECOND
        self._looked_window = 0
        self._reno_window = 0
        self._reno_acked = 0.0

    def threshold(self, sender: Sender) -> int:
        window = sender.window
        self._epoch = None
        # whoever lost before coming back to its last maximum makes room for newcomers
        shrinking = window < self._last_max
        self._last_max = int(window * (1 + BETA) / 2) if shrinking else window
        return max(int(window * BETA), 2)

    def on_timeout(self, sender: Sender) -> None:
        super().on_timeout(sender)
        self._last_max = 0
        self._least = 0
        self._found = False
        self._round_end = 0
        self._reset()

    def on_restart(self, now: Ns, sender: Sender, idle: Ns) -> None:
        """Time without traffic is no time on the curve."""
        if self._epoch is not None:
            self._epoch += idle

    def on_warm(self, now: Ns, sender: Sender, rate: float, rtt: Ns) -> None:
        self._last_max = sender.window

    def on_ack(
        self, now: Ns, sender: Sender, packet: Packet, acked: int, lost: int, rtt: Ns
    ) -> None:
        if packet.n and (self._epoch is None or now - self._epoch >= _BLIND):
            if not self._least or rtt < self._least:
                self._least = rtt
            if not self._found and sender.window < sender.threshold:
                self._hystart(now, sender, packet, rtt)
        if not acked or not sender.window_limited:
            return
        if sender.window < sender.threshold:
            acked = _slow_start(sender, acked)
            if not acked:
                return
        self._look(now, sender.window, acked)
        self._grow(sender, self._per_segment, acked)

    def _look(self, now: Ns, window: int, acked: int) -> None:
        """How many acknowledged segments are worth one of window now."""
        self._reno_acked += acked
        if window == self._looked_window and now - self._looked <= SECOND // 32:
            return
        if self._epoch is None or now - self._looked >= _TICK:
            self._looked, self._looked_window = now, window
            if self._epoch is None:
                self._epoch = now
                self._reno_acked = acked
                self._reno_window = window
                self._origin = max(self._last_max, window)
                self._k = math.cbrt((self._origin - window) / C)
            t = (now - self._epoch + self._least) / SECOND - self._k
            target = self._origin + int(C * t**3)
            self._per_segment = window // (target - window) if target > window else 100 * window
            if not self._last_max and self._per_segment > 20:
                self._per_segment = 20  # 5 % a round trip while no loss has shown a limit
        step = int(window * _FRIENDLY)
        if self._reno_acked > step:
            more = math.ceil(self._reno_acked / step) - 1
            self._reno_acked -= more * step
            self._reno_window += more
        if self._reno_window > window:
            self._per_segment = min(self._per_segment, window // (self._reno_window - window))
        self._per_segment = max(self._per_segment, 2)

    def _hystart(self, now: Ns, sender: Sender, packet: Packet, rtt: Ns) -> None:
        if sender.una > self._round_end:
            self._round_end = sender.high
            self._round_start = self._train = now
            self._round_least = rtt
            self._samples = 0
        if sender.window < _LOW_WINDOW:
            return
        if now - self._train <= _TRAIN_GAP:
            self._train = now
            # the kernel's pacing, unused here, is twice the window a round trip in slow start
            pacing = 2 * sender.window * MSS / sender.srtt
            fills = (self._least + min(MS, int(_TRAIN_BYTES / pacing))) // 2
            if now - self._round_start > fills:
                self._found = True
        self._round_least = min(self._round_least, rtt)
        if self._samples < _SAMPLES:
            self._samples += max(1, packet.n / 2)  # a receiver answers every second segment
        else:
            more = min(max(self._least >> 3, _DELAY_MIN), _DELAY_MAX)
            if self._round_least > self._least + more:
                self._found = True
        if self._found:
            sender.threshold = sender.window
