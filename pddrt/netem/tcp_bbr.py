"""BBR version 1, as Linux has it: a window and a pace from a model of the path, not from losses.

The model is the largest delivery rate of the last ten round trips and the least round trip of the
last ten seconds. Start-up paces at 2.89 times the rate found so far until it has not grown by a
quarter for three rounds; then the queue that this made is drained; then the rate is probed, a
quarter more for one round trip of eight, a quarter less for the next. Every ten seconds without a
new least round trip the window is four segments for 200 ms, to see the path empty. Two windows'
worth (rate times least round trip) are in flight at most.

Losses do not slow it, but for one round trip of packet conservation after each first one, and where
a policer seems to be at work: two intervals of the same rate with a fifth of the segments lost each
fix the pace at that rate for 48 rounds.

Sources: Cardwell et al., "BBR: congestion-based congestion control" (ACM Queue, 2016) and
draft-cardwell-iccrg-bbr-congestion-control-00; where they leave a choice, Linux's.
Left out: the allowance for aggregated acknowledgements, of which this path has none.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal

from pddrt.netem.segments import MSS, Packet
from pddrt.netem.tcp import INITIAL_WINDOW, UNLIMITED, Sender
from pddrt.types import MS, SECOND, Ns

_HIGH_GAIN = 2.885
_DRAIN_GAIN = 1 / _HIGH_GAIN
_CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
_WINDOW_GAIN = 2.0
_MARGIN = 0.99
"""Pacing stays 1 % below the model, so that the queue empties in the end."""
_RATE_ROUNDS = 10
_RTT_LIFE: Ns = 10 * SECOND
_PROBE_RTT: Ns = 200 * MS
_MIN_WINDOW = 4
_FULL_GROWTH = 1.25
_FULL_ROUNDS = 3
_POLICED_LOSS = 50 / 256
_POLICED_ROUNDS = 4
_POLICED_LIFE = 48
_POLICED_SAME = 1 / 8
_OFFLOAD_BYTES = 65535 - 320
"""Most that the kernel hands down at once; a three-fold allowance for it is added to windows."""

Mode = Literal["startup", "drain", "probe_rate", "probe_rtt"]


class Bbr:
    """Rates are segments/s. `seed` decides with which phase the probing begins."""

    paces = True

    def __init__(self, seed: str = "") -> None:
        self._random = random.Random(seed)
        self.mode: Mode = "startup"
        self.pacing_gain = self.window_gain = _HIGH_GAIN
        self._rates: deque[tuple[int, float]] = deque()  # (round, rate), falling
        self._round = 0
        self._round_ends = 0
        self._round_start = False
        self._least: Ns | None = None
        self._least_at: Ns = 0
        self._full_rate = 0.0
        self._full_count = 0
        self._full = False
        self._cycle = 0
        self._cycle_at: Ns = 0
        self._prior_window = 0
        self._conserve = False
        self._was: str = "open"
        self._probe_done: Ns | None = None
        self._probe_round = False
        self._restarting = False
        self._policed = False
        self._police_sampling = False
        self._police_rate = 0.0
        self._police_rounds = 0
        self._police_from: tuple[Ns, int, int] = (0, 0, 0)  # when, delivered, lost
        self._now: Ns = 0

    def threshold(self, sender: Sender) -> int:
        """No threshold slows BBR; the moment is there to remember the window."""
        self._save(sender)
        return sender.threshold

    def _save(self, sender: Sender) -> None:
        if self._was == "open" and self.mode != "probe_rtt":
            self._prior_window = sender.window
        else:
            self._prior_window = max(self._prior_window, sender.window)

    def on_timeout(self, sender: Sender) -> None:
        self._save(sender)
        self._was = "loss"
        self._full_rate = 0.0
        self._round_start = True
        self._police(self._now, sender, 1, False)

    def on_restart(self, now: Ns, sender: Sender, idle: Ns) -> None:
        if sender.app_limited:
            self._restarting = True
            if self.mode == "probe_rate":
                self._pace(sender, 1.0)

    def on_warm(self, now: Ns, sender: Sender, rate: float, rtt: Ns) -> None:
        self._least, self._least_at = rtt, now
        self._rates.clear()
        self._rates.append((self._round, rate))
        self._full = True
        self._probe_rate(now)
        self._gains()
        self._pace(sender, self.pacing_gain)
        sender.window = min(sender.limit, self._target(sender, self.window_gain, rate))
        sender.threshold = UNLIMITED

    @property
    def rate(self) -> float:
        if self._policed:
            return self._police_rate
        return self._rates[0][1] if self._rates else 0.0

    @property
    def _max_rate(self) -> float:
        return self._rates[0][1] if self._rates else 0.0

    # -- an acknowledgement -----------------------------------------------------------------------

    def on_ack(
        self, now: Ns, sender: Sender, packet: Packet, acked: int, lost: int, rtt: Ns
    ) -> None:
        self._now = now
        if packet.n == 0:
            self._least, self._least_at = rtt, now
            sender.pacing = _HIGH_GAIN * sender.window * SECOND / rtt
            return
        in_flight = sender.pipe + acked + lost
        self._model_rate(now, sender, packet, lost)
        self._model_cycle(now, sender, lost, in_flight)
        self._model_full(packet)
        self._model_drain(now, sender)
        self._model_rtt(now, sender, rtt)
        self._gains()
        self._pace(sender, self.pacing_gain)
        self._set_window(sender, acked, lost)

    def _model_rate(self, now: Ns, sender: Sender, packet: Packet, lost: int) -> None:
        self._round_start = False
        if packet.delivered >= self._round_ends:
            self._round_ends = sender.delivered
            self._round += 1
            self._round_start = True
            self._conserve = False
        self._police(now, sender, lost, packet.starved)
        interval = max(packet.sent - packet.first_sent, now - packet.delivered_at)
        delivered = sender.delivered - packet.delivered
        if interval < sender.min_rtt or not delivered or interval <= 0:
            return
        rate = delivered * SECOND / interval
        if packet.starved and rate < self._max_rate:
            return
        rates = self._rates
        while rates and rates[-1][1] <= rate:
            rates.pop()
        rates.append((self._round, rate))
        while rates[0][0] <= self._round - _RATE_ROUNDS:
            rates.popleft()

    def _model_cycle(self, now: Ns, sender: Sender, lost: int, in_flight: int) -> None:
        if self.mode != "probe_rate":
            return
        full = self._least is not None and now - self._cycle_at > self._least
        gain = self.pacing_gain
        if gain > 1:
            over = full and (lost > 0 or in_flight >= self._target(sender, gain, self._max_rate))
        elif gain < 1:
            over = full or in_flight <= self._target(sender, 1.0, self._max_rate)
        else:
            over = full
        if over:
            self._cycle = (self._cycle + 1) % len(_CYCLE)
            self._cycle_at = now

    def _model_full(self, packet: Packet) -> None:
        if self._full or not self._round_start or packet.starved:
            return
        if self._max_rate >= self._full_rate * _FULL_GROWTH:
            self._full_rate = self._max_rate
            self._full_count = 0
        else:
            self._full_count += 1
            self._full = self._full_count >= _FULL_ROUNDS

    def _model_drain(self, now: Ns, sender: Sender) -> None:
        target = self._target(sender, 1.0, self._max_rate)
        if self.mode == "startup" and self._full:
            self.mode = "drain"
            sender.threshold = target
        if self.mode == "drain" and sender.pipe <= target:
            self._probe_rate(now)

    def _probe_rate(self, now: Ns) -> None:
        """Any phase but the one that sends less may come first."""
        self.mode = "probe_rate"
        self._cycle = (len(_CYCLE) - self._random.randrange(len(_CYCLE) - 1)) % len(_CYCLE)
        self._cycle_at = now

    def _model_rtt(self, now: Ns, sender: Sender, rtt: Ns) -> None:
        expired = now > self._least_at + _RTT_LIFE
        if self._least is None or rtt < self._least or expired:
            self._least, self._least_at = rtt, now
        if expired and not self._restarting and self.mode != "probe_rtt":
            self.mode = "probe_rtt"
            self._save(sender)
            self._probe_done = None
        if self.mode == "probe_rtt":
            sender.app_limited = (sender.delivered + sender.pipe) or 1
            if self._probe_done is None:
                if sender.pipe <= _MIN_WINDOW:
                    self._probe_done = now + _PROBE_RTT
                    self._probe_round = False
                    self._round_ends = sender.delivered
            else:
                self._probe_round = self._probe_round or self._round_start
                if self._probe_round and now > self._probe_done:
                    self._least_at = now
                    sender.window = max(sender.window, self._prior_window)
                    if self._full:
                        self._probe_rate(now)
                    else:
                        self.mode = "startup"
        self._restarting = False

    def _police(self, now: Ns, sender: Sender, lost: int, starved: bool) -> None:
        """Is a policer at work? Intervals of 4 to 16 rounds, from loss to loss."""
        if self._policed:
            if self.mode == "probe_rate" and self._round_start:
                self._police_rounds += 1
                if self._police_rounds >= _POLICED_LIFE:
                    self._police_reset()
                    self._probe_rate(now)
            return
        if not self._police_sampling:
            if not lost:
                return
            self._police_start(now, sender)
            self._police_sampling = True
        if starved:
            self._police_reset()
            return
        self._police_rounds += self._round_start
        if self._police_rounds < _POLICED_ROUNDS:
            return
        if self._police_rounds > 4 * _POLICED_ROUNDS:
            self._police_reset()
            return
        since, delivered, missing = self._police_from
        delivered, missing = sender.delivered - delivered, sender.lost - missing
        if not lost or not delivered or missing < _POLICED_LOSS * delivered or now - since < MS:
            return
        rate = delivered * SECOND / (now - since)
        before = self._police_rate
        if before and abs(rate - before) <= max(_POLICED_SAME * before, 500 / MSS):
            self._police_rate = (rate + before) / 2
            self._policed = True
            self._police_rounds = 0
        else:
            self._police_rate = rate
            self._police_start(now, sender)

    def _police_start(self, now: Ns, sender: Sender) -> None:
        self._police_from = (now, sender.delivered, sender.lost)
        self._police_rounds = 0

    def _police_reset(self) -> None:
        self._police_rate = 0.0
        self._policed = self._police_sampling = False
        self._police_rounds = 0

    # -- what follows from the model --------------------------------------------------------------

    def _gains(self) -> None:
        if self.mode == "startup":
            self.pacing_gain = self.window_gain = _HIGH_GAIN
        elif self.mode == "drain":
            self.pacing_gain, self.window_gain = _DRAIN_GAIN, _HIGH_GAIN
        elif self.mode == "probe_rate":
            self.pacing_gain = 1.0 if self._policed else _CYCLE[self._cycle]
            self.window_gain = _WINDOW_GAIN
        else:
            self.pacing_gain = self.window_gain = 1.0

    def _pace(self, sender: Sender, gain: float) -> None:
        rate = self.rate
        if not rate:
            return
        pacing = gain * rate * _MARGIN
        if self._full or sender.pacing is None or pacing > sender.pacing:
            sender.pacing = pacing

    def _target(self, sender: Sender, gain: float, rate: float) -> int:
        """Segments in flight for `gain` times the path, and what hands them down in batches."""
        if self._least is None:
            return INITIAL_WINDOW
        path = -int(-gain * rate * self._least // SECOND)
        pacing = (sender.pacing or 0.0) * MSS
        batch = max(min(int(pacing) >> 10, _OFFLOAD_BYTES) // MSS, 1 if pacing < 150_000 else 2)
        target = path + 3 * batch
        target += target & 1
        if self.mode == "probe_rate" and self._cycle == 0:
            target += 2
        return target

    def _set_window(self, sender: Sender, acked: int, lost: int) -> None:
        if acked and not self._recovering(sender, acked, lost):
            window = sender.window
            target = self._target(sender, self.window_gain, self.rate)
            if self._full:
                window = min(window + acked, target)
            elif window < target or sender.delivered < INITIAL_WINDOW:
                window += acked
            sender.window = max(window, _MIN_WINDOW)
        if self.mode == "probe_rtt":
            sender.window = min(sender.window, _MIN_WINDOW)

    def _recovering(self, sender: Sender, acked: int, lost: int) -> bool:
        """The first round trip of a recovery sends as much as arrives; its end restores."""
        was, self._was = self._was, sender.state
        window = sender.window
        if lost:
            window = max(window - lost, 1)
        if sender.state == "recovery" and was != "recovery":
            self._conserve = True
            self._round_ends = sender.delivered
            window = sender.pipe + acked
        elif sender.state == "open" and was != "open":
            self._conserve = False
            window = max(window, self._prior_window)
        if self._conserve:
            sender.window = max(window, sender.pipe + acked)
            return True
        sender.window = window
        return False
