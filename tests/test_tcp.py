"""One TCP connection, by hand: what may be sent when, and what follows from what arrives.

`Wire` is a path without a rate: every packet is answered a round trip after it was sent, but for
those that a test loses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddrt.netem.segments import DELAYED_ACK, MSS, Answer, Held, Packet, Receiver, window_limit
from pddrt.netem.tcp import Control, Sender, send_limit
from pddrt.netem.tcp_bbr import Bbr
from pddrt.netem.tcp_control import Cubic, Reno
from pddrt.netem.tcp_scoreboard import Scoreboard
from pddrt.types import MS, SECOND, US, Ns

RTT: Ns = 40 * MS
CONTROLS: dict[str, Callable[[], Control]] = {"reno": Reno, "cubic": Cubic, "bbr": Bbr}


class Wire:
    """`lose` says how many of a packet's segments get through; `sent` is what went out, when."""

    def __init__(self, sender: Sender, lose: Callable[[Packet], int] | None = None) -> None:
        self.sender = sender
        self.lose = lose or (lambda packet: packet.n)
        self.now: Ns = 0
        self.sent: list[Packet] = []
        self.reductions: list[tuple[Ns, int]] = []
        self._back: list[tuple[Ns, Answer]] = []

    def pump(self) -> None:
        while (packet := self.sender.next(self.now)) is not None:
            self.sent.append(packet)
            if (kept := self.lose(packet)) or not packet.n:
                self._back.append((self.now + RTT, Answer(packet, kept)))

    def until(self, end: Ns, window: list[tuple[Ns, int]] | None = None) -> None:
        """Lets everything happen up to `end`."""
        self.pump()
        while True:
            ack = self._back[0][0] if self._back else end + 1
            wake = self.sender.wake if self.sender.wake is not None else end + 1
            if min(ack, wake) > end:
                break
            self.now = min(ack, wake)
            before = self.sender.threshold
            if ack <= wake:
                self.sender.on_ack(self.now, self._back.pop(0)[1])
            else:
                self.sender.on_timer(self.now)
            if self.sender.threshold < before:
                self.reductions.append((self.now, self.sender.threshold))
            self.pump()
            if window is not None:
                window.append((self.now, self.sender.window))
        self.now = end


def opened(control: Control, segments: int = 1 << 40, **limits: int) -> Sender:
    sender = Sender(control, **limits)
    sender.offer(0, segments)
    return sender


def losing(*numbers: int) -> Callable[[Packet], int]:
    """Loses packets by their number in the order of sending."""
    return lambda packet: 0 if packet.number in numbers else packet.n


# -- the window ------------------------------------------------------------------------------------


def test_the_window_is_ten_and_doubles_every_round_trip() -> None:
    wire = Wire(opened(Reno()))
    for rounds, sent in enumerate((10, 30, 70, 150, 310)):
        wire.until(rounds * RTT)
        assert len(wire.sent) == sent


def test_a_window_that_is_not_used_does_not_grow() -> None:
    sender = opened(Reno(), segments=10)
    wire = Wire(sender)
    wire.until(RTT - 1)
    for _ in range(20):  # ten segments a round trip
        sender.offer(wire.now, 10)
        wire.until(wire.now + RTT)
    assert sender.una >= 190
    assert sender.window <= 40, "twice what was ever out"


@pytest.mark.parametrize(("make", "left"), [(Reno, 0.5), (Cubic, 0.7)], ids=["reno", "cubic"])
def test_losses_of_one_round_trip_are_one_reduction(
    make: Callable[[], Control], left: float
) -> None:
    sender = opened(make())
    wire = Wire(sender, losing(72, 75, 90))
    wire.until(20 * RTT)
    assert len(wire.reductions) == 1
    at, threshold = wire.reductions[0]
    assert at == 4 * RTT
    assert threshold == int(left * 82)  # 80, and two that came before the hole
    assert sender.resent == sender.lost == 3
    assert sender.window >= threshold


def test_a_loss_a_round_trip_later_is_another_reduction() -> None:
    wire = Wire(opened(Reno()), losing(72, 400))
    wire.until(30 * RTT)
    assert len(wire.reductions) == 2
    assert wire.reductions[1][1] < wire.reductions[0][1]


def test_reno_grows_by_one_a_round_trip_after_a_loss() -> None:
    sender = opened(Reno())
    wire = Wire(sender, losing(72))
    wire.until(8 * RTT)
    before = sender.window
    wire.until(18 * RTT)
    assert sender.window == before + 10


def test_cubic_is_back_at_its_last_window_when_its_curve_says_so() -> None:
    """K = cbrt(0.3 W / C) after the loss: flat there, and steeper on either side."""
    sender = opened(Cubic())
    wire = Wire(sender, losing(600))
    seen: list[tuple[Ns, int]] = []
    wire.until(15 * SECOND, seen)
    at, threshold = wire.reductions[-1]
    most = threshold / 0.7
    k = ((most - threshold) / 0.4) ** (1 / 3)
    back = next(t for t, w in seen if t > at + RTT and w >= most) / SECOND
    assert k - (1 / 0.4) ** (1 / 3) <= back - at / SECOND <= k  # the curve in whole segments
    later = [next(w for t, w in seen if t >= at + f * k * SECOND) for f in (0.3, 0.9, 1.1, 1.7)]
    assert later[1] - later[0] > 4 * (later[2] - later[1])
    assert later[3] - later[2] > 4 * (later[2] - later[1])


def test_cubic_does_not_fall_behind_reno_on_a_short_path() -> None:
    """At small windows the cubic curve is slow: then it grows as Reno's fair share would, by 0.53
    a round trip."""
    sender = opened(Cubic())
    wire = Wire(sender, losing(100))
    wire.until(10 * RTT)
    before = sender.window
    assert before < 100
    wire.until(40 * RTT)
    assert sender.window - before == pytest.approx(0.53 * 30, abs=3)


def test_before_any_loss_cubic_grows_by_five_percent_a_round_trip() -> None:
    sender = opened(Cubic())
    sender.threshold = sender.window = 400
    wire = Wire(sender)
    wire.until(RTT)
    before = sender.window
    wire.until(6 * RTT)
    assert sender.window / before == pytest.approx(1.05**5, rel=0.03)


def test_a_round_trip_that_grows_ends_slow_start_of_cubic_alone() -> None:
    """By an eighth, as a queue that fills makes it; Reno goes on."""
    for make, ends in ((Cubic, True), (Reno, False)):
        sender = opened(make())
        now, delay = 0, RTT
        for _ in range(6):
            flight = []
            while (packet := sender.next(now)) is not None:
                flight.append(packet)
            for i, packet in enumerate(flight):
                sender.on_ack(packet.sent + delay + i * US, Answer(packet, packet.n))
            now += delay
            delay += RTT // 4
        assert (sender.threshold < 1000) == ends


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROLS)
def test_a_lost_end_is_probed_for_after_two_round_trips(name: str) -> None:
    sender = opened(CONTROLS[name](), segments=10)
    wire = Wire(sender, losing(8, 9))
    wire.until(2 * SECOND)
    assert sender.una == 10
    probe = next(p for p in wire.sent if p.number == 10)
    assert probe.seq == 9
    assert 3 * RTT <= probe.sent <= 3 * RTT + 10 * MS  # the last answer came after one
    assert sender.window > 1, "that was no time-out"


def test_a_time_out_takes_no_less_than_200_ms_and_twice_as_long_each_time() -> None:
    sender = opened(Reno(), segments=1000)
    gone = SECOND  # from then on nothing arrives
    wire = Wire(sender, lambda p: p.n if p.sent < gone else 0)
    wire.until(gone - 1)
    wire.sender.offer(gone, 1000)
    wire.now = gone
    wire.until(20 * SECOND)
    assert sender.state == "loss"
    assert sender.window == 1
    again = [p.sent for p in wire.sent if p.sent > gone + 2 * RTT + 20 * MS]
    gaps = [b - a for a, b in pairwise(again)]
    assert gaps[0] >= 200 * MS
    assert all(b == pytest.approx(2 * a, rel=0.01) for a, b in pairwise(gaps))


def test_after_a_time_out_everything_arrives_in_the_end() -> None:
    sender = opened(Cubic(), segments=2000)
    wire = Wire(sender, lambda p: 0 if 8 * RTT < p.sent < 16 * RTT else p.n)
    wire.until(60 * SECOND)
    assert sender.una == 2000
    assert sender.pipe == 0


def test_a_time_out_that_was_none_is_undone() -> None:
    """All answers of one window are late by a second, and then come after all."""
    sender = opened(Reno(), segments=70)
    wire = Wire(sender)
    wire.until(2 * RTT)
    assert sender.window == 40
    wire._back = [(at + SECOND, answer) for at, answer in wire._back]
    wire.until(4 * SECOND)
    assert sender.una == 70
    assert sender.window >= 40
    assert sender.resent <= 5


@pytest.mark.parametrize("name", CONTROLS)
def test_a_lost_syn_costs_a_second_and_the_next_two(name: str) -> None:
    sender = Sender(CONTROLS[name]())
    sender.offer(0, 5)
    sender.connect(0)
    tries: list[Ns] = []
    answers: list[tuple[Ns, Packet]] = []
    now: Ns = 0
    while sender.state == "connecting" and len(tries) < 3:
        while (packet := sender.next(now)) is not None:
            assert packet.n == 0
            tries.append(now)
            answers.append((now + RTT, packet))
        assert sender.wake is not None
        now = sender.wake
        sender.on_timer(now)
    assert tries == [0, SECOND, 3 * SECOND]
    sender.on_ack(answers[-1][0], Answer(answers[-1][1], 1))
    assert sender.state == "open"
    packet = sender.next(answers[-1][0])
    assert packet is not None
    assert packet.seq == 0
    assert packet.n == 1


def test_after_an_idle_time_the_window_starts_anew() -> None:
    sender = opened(Cubic(), segments=1000)
    wire = Wire(sender)
    wire.until(7 * RTT)
    assert sender.una == 1000
    grown = sender.window
    wire.until(9 * RTT)
    sender.offer(wire.now, 1)  # too short a time
    assert sender.window == grown
    wire.until(10 * SECOND)
    assert sender.una == 1001
    sender.offer(wire.now, 1)
    assert sender.window == 10
    assert sender.threshold >= grown * 3 // 4


# -- limits ----------------------------------------------------------------------------------------


def test_the_receive_window_is_never_passed() -> None:
    sender = opened(Reno(), limit=37)
    wire = Wire(sender, losing(100))
    for i in range(400):
        wire.until(i * RTT // 10)
        assert sender.high - sender.una <= 37
    assert sender.high > 1000


def test_buffers_hold_what_the_kernels_do() -> None:
    """Measured: 4 MiB at the receiver are 2.82 MB of window, at the sender some 2,850 segments."""
    assert window_limit(4 << 20) * MSS == pytest.approx(2.818e6, rel=0.001)
    assert send_limit(4 << 20) == pytest.approx(2850, rel=0.01)


def test_a_full_send_buffer_is_filled_again_by_the_third() -> None:
    sender = opened(Reno(), buffer=90)
    sender.threshold = sender.window = 200
    packets = [sender.next(0) for _ in range(91)]
    assert packets[-1] is None
    assert None not in packets[:-1]
    for i, packet in enumerate(packets[:-1]):
        assert packet is not None
        sender.on_ack(RTT + i, Answer(packet, 1))
        more = sender.next(RTT + i)
        assert (more is not None) == (i >= 29)
        if more is not None:
            assert sum(sender.next(RTT + i) is not None for _ in range(40)) == 29
            break


# -- both ends' books ------------------------------------------------------------------------------


def packet(number: int, seq: int, n: int) -> Packet:
    return Packet(number, seq, n, 0, 0, 0, 0, False)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=60))
def test_the_scoreboard_knows_what_arrived(arrivals: list[tuple[int, int]]) -> None:
    """Against a set of segments: whatever arrives, however often, in whatever order."""
    board, have = Scoreboard(), set[int]()
    for start, n in arrivals:
        new = board._cover(start, start + n)
        assert new == len(set(range(start, start + n)) - have)
        have |= set(range(start, start + n))
        assert board.una == next(i for i in range(100) if i not in have)
        assert all(b < c for (_, b), (c, _) in pairwise(board._covered))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(CONTROLS)), st.sampled_from([1, 4, 16]))
def test_whatever_is_lost_everything_arrives_once(seed: int, name: str, largest: int) -> None:
    chance = random.Random(f"{seed}")
    sender = opened(CONTROLS[name](), segments=300, largest=largest)
    wire = Wire(sender, lambda p: max(0, p.n - chance.choice([0, 0, 0, 0, 1, p.n])))
    wire.until(3000 * SECOND)
    assert sender.una == sender.delivered == 300
    assert sender.pipe == 0


def test_two_segments_get_one_answer_once_the_window_is_open() -> None:
    receiver = Receiver(limit=45 + 2 * 3)  # open after three segments
    first = [receiver.on_packet(0, packet(i, i, 1), 1) for i in range(3)]
    assert all(isinstance(a, Answer) and a.before is None for a in first)
    held = receiver.on_packet(MS, packet(3, 3, 1), 1)
    assert isinstance(held, Held)
    assert held.until == MS + DELAYED_ACK
    both = receiver.on_packet(2 * MS, packet(4, 4, 1), 1)
    assert isinstance(both, Answer)
    assert both.before == (packet(3, 3, 1), 1)
    assert not held.waiting


def test_while_a_segment_is_missing_every_packet_is_answered() -> None:
    receiver = Receiver(limit=45)
    assert isinstance(receiver.on_packet(0, packet(0, 0, 1), 1), Held)
    assert receiver.on_packet(0, packet(1, 1, 1), 0) is None
    for i in (2, 3, 4):
        assert isinstance(receiver.on_packet(0, packet(i, i, 1), 1), Answer)
    assert isinstance(receiver.on_packet(0, packet(5, 1, 1), 1), Answer)  # the missing one
    assert isinstance(receiver.on_packet(0, packet(6, 5, 1), 1), Held)


def test_a_lost_syn_has_no_answer() -> None:
    receiver = Receiver(limit=45)
    assert receiver.on_packet(0, packet(-1, 0, 0), 0) is None
    assert receiver.on_packet(0, packet(-1, 0, 0), 1) == Answer(packet(-1, 0, 0), 0)
