"""TCP on a live link: the same times as predicted, every byte once and in order whatever happens,
and what queues, outages, cancels and jitter do to it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt.frames import Frame
from pddrt.netem.link import Flow, Link, Qdisc, Through
from pddrt.netem.losses import losses_of
from pddrt.netem.net import LinkSpec, Topology
from pddrt.netem.predict import Path, Transfer, predict
from pddrt.netem.tcp_link import Tcp, TcpLink, default_queue
from pddrt.netem.tcp_stream import Prefix
from pddrt.netem.traces import Segment, Trace
from pddrt.types import MS, SECOND, Ns
from tests.netlab import MB, both, lab, on, payload, world

RATE, DELAY = 100 * MB // 8, 20 * MS
CONTROLS: list[Any] = ["reno", "cubic", "bbr"]


def live(
    tcp: Tcp | None = None, *, rate: int | None = RATE, delay: Ns = DELAY, loss: float = 0.0,
    seed: str = "s", qdisc: Qdisc = "fifo", **link: Any,
) -> TcpLink:  # fmt: skip
    law = Link(rate, delay, link.pop("jitter", 0), seed, qdisc=qdisc, **link)
    return TcpLink(law, tcp or Tcp(), seed, losses_of(loss, None, f"{seed}/loss"))


def drain(link: TcpLink, until: Ns = 3600 * SECOND) -> list[Through]:
    out: list[Through] = []
    while (at := link.next_event()) is not None and at <= until:
        out += link.advance(at)
    return out


def dues(link: TcpLink, until: Ns = 3600 * SECOND) -> dict[Any, Ns]:
    return {item.tag: item.due for item in drain(link, until)}


# -- as predicted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("flows", [1, 3])
def test_a_live_link_takes_as_long_as_is_predicted(control: Any, flows: int) -> None:
    """Another loop, another queue: the same segments at the same times."""
    transfers = [Transfer(8_000_000, i * 7 * MS, control) for i in range(flows)]
    told = predict(Path(RATE, DELAY), transfers)
    link = live(Tcp(control, overhead=52), seed="0/netem/predict")
    for i, transfer in enumerate(transfers):
        link.push(transfer.start, Flow(), transfer.nbytes, tag=i)
    found = dues(link)
    for i, end in enumerate(told.ends):
        # BBR's first phase is drawn, from a stream of its own
        assert found[i] == pytest.approx(end, rel=0.02 if control == "bbr" else 1e-6)
    if control != "bbr":
        assert (link.resent, link.overflowed) == (told.retransmits, told.dropped)


def over_simnet(spec: LinkSpec, nbytes: int, piece: int = 1 << 20, idle: Ns = 0) -> tuple[Ns, Any]:
    """A KV stream from p to m: from the call to the arrival of the last frame; what the link says
    of itself. `idle`: it exchanged a word, idled so long, and the time is from then on; another
    stream says a word as it begins."""
    topology = world()
    topology = Topology(topology.sites, [spec, topology.links[1]])
    took = stats = None

    async def main() -> None:
        nonlocal took, stats
        async with lab("sim", topology) as here:
            near, far = await here.pair()
            begun = 0
            if idle:
                near.post(Frame("ids", {}))
                await far.recv()
                other, _ = await here.pair()
                await here.env.sleep(idle)
                other.post(Frame("ids", {}))
                begun = here.env.now()

            async def send() -> None:
                for at in range(0, nbytes, piece):
                    await near.send(Frame("kv", {}, bytes(min(piece, nbytes - at))))

            sending, got = asyncio.create_task(send()), 0
            while got < nbytes:
                got += len((await far.recv()).payload)
            took, stats = here.env.now() - begun, here.net.stats()[0]
            await sending

    on("sim", main)
    assert took is not None
    return took, stats


@pytest.mark.parametrize(
    ("control", "streams", "rate"),
    [("cubic", 1, RATE), ("reno", 1, RATE), ("bbr", 1, RATE), ("cubic", 4, RATE),
     ("cubic", 1, 10 * RATE)],
)  # fmt: skip
def test_a_kv_stream_takes_as_long_as_is_predicted(control: Any, streams: int, rate: int) -> None:
    spec = LinkSpec("wan", ("a", "b"), rate, DELAY, overhead=52, tcp=Tcp(control, streams))
    took, stats = over_simnet(spec, 10_000_000)
    (end,) = predict(Path(rate, DELAY), [Transfer(10_000_000, 0, control, streams)]).ends
    assert took == pytest.approx(end, rel=0.015)
    assert stats.by_kind["kv"] == stats.bytes >= 10_000_000


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(("rate", "delay"), [(MB, 100 * MS), (10 * MB, 20 * MS)])
def test_a_warm_stream_takes_as_long_as_is_predicted(
    control: Any, streams: int, rate: int, delay: Ns
) -> None:
    """Whether it opens for the transfer or idled before; streams without data take no share."""
    tcp = Tcp(control, streams, warm=True)
    spec = LinkSpec("wan", ("a", "b"), rate, delay, overhead=52, tcp=tcp)
    path = Path(rate, delay)
    (end,) = predict(path, [Transfer(1_000_000, 0, control, streams, warm=True)]).ends
    for idle in (0, 5 * SECOND):
        took, _ = over_simnet(spec, 1_000_000, idle=idle)
        assert took == pytest.approx(end, rel=0.01), idle


def test_a_warm_connection_of_a_link_without_a_rate_has_the_buffers_window() -> None:
    link = live(Tcp(warm=True), rate=None)
    link.push(0, Flow(), 2_000_000, tag="x")
    assert dues(link)["x"] == DELAY


def test_streams_are_dealt_what_they_may_send_and_end_together() -> None:
    """No connection keeps a store of its own while another has nothing left."""
    link, flow = live(Tcp("cubic", 4)), Flow()
    link.push(0, flow, 2_000_000, tag="x")
    kept: list[int] = []
    while (at := link.next_event()) is not None:
        link.advance(at)
        senders = [c.sender for c in flow.transport.connections]
        kept.append(max(s.offered - s.high for s in senders))
    assert max(kept) <= 16


@both
def test_frames_arrive_once_and_in_order_over_a_link_that_loses(kind: str) -> None:
    """In memory and over sockets: neither net knows of TCP."""
    tcp = Tcp("cubic", 3, queue=30_000)
    spec = LinkSpec("wan", ("a", "b"), 20 * MB, MS, MS // 4, tcp=tcp, loss=0.02)
    topology = Topology(world().sites, [spec])
    frames = [payload(size, size) for size in (0, 1, 1448, 200_000, 5, 700_000, 33)]

    async def main() -> None:
        async with lab(kind, topology) as here:
            near, far = await here.pair()

            async def send() -> None:
                for frame in frames:
                    await near.send(Frame("kv", {}, frame))
                    far.post(Frame("ids", {"n": len(frame)}))

            sending = asyncio.create_task(send())
            assert [bytes((await far.recv()).payload) for _ in frames] == frames
            assert [(await near.recv())["n"] for _ in frames] == [len(f) for f in frames]
            await sending
            there = here.net.stats()[0]
            assert there.lost > 5
            assert there.resent >= there.lost

    on(kind, main)


def test_packets_of_eight_segments_take_as_long_as_those_of_one() -> None:
    ends = {}
    for segments in (1, 8):
        link = live(Tcp("cubic", segments=segments))
        link.push(0, Flow(), 20_000_000, tag="x")
        ends[segments] = dues(link)["x"]
    assert ends[8] == pytest.approx(ends[1], rel=0.01)


def test_a_seed_repeats_to_the_ns_and_another_one_differs() -> None:
    def program(seed: str) -> list[Through]:
        link = live(Tcp("bbr", 2), loss=0.01, seed=seed, jitter=2 * MS)
        rng = random.Random(1)
        flows = [Flow() for _ in range(3)]
        for k in range(30):
            link.push(k * 11 * MS, flows[k % 3], rng.randrange(200_000), tag=k)
        return drain(link)

    assert program("a") == program("a") != program("b")


# -- connections -----------------------------------------------------------------------------------


def test_the_handshake_is_the_marks_that_a_net_exchanges() -> None:
    spec = LinkSpec("wan", ("a", "b"), None, DELAY, tcp=Tcp())
    topology = Topology(world().sites, [spec])

    async def main() -> None:
        async with lab("sim", topology) as here:
            near, far = await here.pair()
            assert here.env.now() == 2 * DELAY
            near.post(Frame("ids", {}))
            await far.recv()
            assert here.env.now() == 3 * DELAY
            far.post(Frame("ids", {}))  # what comes back has been acknowledged by then
            await near.recv()
            assert here.env.now() == 4 * DELAY

    on("sim", main)


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_syn_costs_a_second_and_the_next_two(seed: int) -> None:
    link = live(loss=0.5, seed=str(seed), rate=None)
    link.push(0, Flow(), 0, tag="mark")
    # what comes first is the mark, with a SYN: it was sent after 0, 1, 3, 7, ... seconds
    first = next(iter(dues(link).values()))
    assert (first - DELAY) // SECOND in {2**k - 1 for k in range(12)}
    assert (first - DELAY) % SECOND == 0


def test_warm_connections_need_no_handshake_and_no_slow_start() -> None:
    cold, warm = live(Tcp()), live(Tcp(warm=True))
    for link in (cold, warm):
        link.push(0, Flow(), 400_000, tag="x")
    transmission = 400_000 * SECOND // RATE
    assert dues(warm)["x"] == pytest.approx(transmission + DELAY, rel=0.05)
    assert dues(cold)["x"] > transmission + 9 * DELAY


def test_a_window_that_idled_opens_anew() -> None:
    """The second burst, after two idle seconds, takes as long as one in slow start; right behind
    the first it is carried by an open window."""
    took = {}
    for pause in (0, 2 * SECOND):
        link, flow = live(Tcp(queue=1 << 40)), Flow()
        link.push(0, flow, 3_000_000, tag="first")
        start = 600 * MS + pause  # all of the first has been acknowledged
        assert [item.tag for item in link.advance(start)] == ["first"]
        link.push(start, flow, 400_000, tag="second")
        took[pause] = dues(link)["second"] - start
    assert took[0] < 60 * MS
    assert took[2 * SECOND] > took[0] + 2 * DELAY


def test_buffers_bound_the_window() -> None:
    link = live(Tcp("cubic", receive_buffer=1 << 20), rate=10 * RATE)
    link.push(0, Flow(), 50_000_000, tag="x")
    window = (1 << 20) * 172 // 256
    slow_start = 6 * 2 * DELAY
    expected = 50_000_000 * 2 * DELAY / window + slow_start
    assert dues(link)["x"] == pytest.approx(expected, rel=0.03)


def test_streams_share_one_supply_and_deliver_in_order() -> None:
    link, flow = live(Tcp("cubic", 4), loss=0.02), Flow()
    for k in range(200):
        link.push(0, flow, 50_000, tag=k)
    items = drain(link)
    assert [item.tag for item in items] == list(range(200))
    assert link.lost > 50
    one, single = live(Tcp("cubic", 1), loss=0.02), Flow()
    for k in range(200):
        one.push(0, single, 50_000, tag=k)
    assert items[-1].due < 0.7 * drain(one)[-1].due


# -- every byte once, in order ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_lose_nothing_and_keep_order(seed: int) -> None:
    rng = random.Random(seed)
    tcp = Tcp(
        rng.choice(CONTROLS),
        rng.choice([1, 1, 3]),
        rng.random() < 0.3,
        queue=rng.choice([None, 20_000, 1 << 40]),
        codel=rng.random() < 0.3,
        overhead=rng.choice([0, 52]),
        segments=rng.choice([None, 1, 8]),
    )
    link = live(
        tcp, loss=rng.choice([0.0, 0.01, 0.1]), seed=str(seed), qdisc=rng.choice(["fifo", "fair"]),
        jitter=rng.choice([0, MS, 8 * MS]), correlation=rng.choice([None, MS]),
    )  # fmt: skip
    flows = [Flow() for _ in range(4)]
    pushed: dict[int, tuple[int, Ns]] = {}
    gone: set[int] = set()
    total = dropped = now = 0
    out: list[Through] = []
    left: list[int] = []
    for number in range(60):
        now += rng.choice([0, 1, rng.randrange(80 * MS)])
        out += link.advance(now)
        left += link.left()
        which, what = rng.randrange(4), rng.random()
        if what < 0.85:
            nbytes = rng.choice([0, 1, rng.randrange(3000), rng.randrange(300_000)])
            link.push(now, flows[which], nbytes, "kv", number)
            pushed[number] = which, now
            total += nbytes
        elif what < 0.9:
            left += link.left()
            waiting = {n for n, (flow, _) in pushed.items() if flow == which} - set(left) - gone
            dropped += link.cancel(now, flows[which])
            gone |= waiting
        elif what < 0.95:
            link.set_rate(now, rng.choice([0, RATE // 10, RATE]))
        else:
            link.set_delay(now, rng.choice([1, 20, 50]) * MS, 0)
    link.set_rate(now, RATE)
    out += drain(link)
    left += link.left()
    tags = [item.tag for item in out]
    assert len(tags) == len(set(tags))
    assert set(tags) == pushed.keys() - gone
    assert set(left) == set(tags)  # what arrives had left, and nothing else did
    for which in range(4):
        mine = [item for item in out if pushed[item.tag][0] == which]
        assert [item.tag for item in mine] == sorted(item.tag for item in mine)
        assert [item.due for item in mine] == sorted(item.due for item in mine)
    assert all(item.due >= pushed[item.tag][1] for item in out)
    assert link.carried.get("kv", 0) + dropped == total
    assert link.backlog(now + 3600 * SECOND) == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=40))
def test_a_prefix_is_what_has_arrived_without_a_gap(ranges: list[tuple[int, int]]) -> None:
    prefix, there = Prefix(), set()
    for start, length in ranges:
        before = prefix.next
        there |= set(range(start, start + length))
        grown = prefix.add(start, start + length)
        assert prefix.next == next(i for i in range(200) if i not in there)
        assert grown == (prefix.next > before)


def test_no_window_carries_more_than_the_rate() -> None:
    link, flow = live(Tcp("cubic", segments=1)), Flow()
    for k in range(2000):
        link.push(0, flow, 1448, tag=k)
    at = [item.due for item in drain(link)]
    for i in range(0, 1900, 50):
        for j in range(i + 50, 1950, 70):
            # what waited for a lost segment comes at once, but no earlier than it could
            assert (j - i) * 1448 <= RATE * (at[j] - at[i]) / SECOND + 1448 * 400


@pytest.mark.parametrize("control", CONTROLS)
def test_answers_keep_their_order_when_the_way_back_jitters(control: Any) -> None:
    """An answer that waited for a second segment, and the next one, over a delay that falls faster
    than time passes: the scoreboard would not know the first any more."""
    for seed in range(6):
        link, flow = live(Tcp(control), seed=str(seed), jitter=15 * MS, correlation=MS), Flow()
        for k in range(150):
            link.push(k * 3 * MS, flow, 1000 if k % 2 else 30_000, tag=k)
        assert [item.tag for item in drain(link)] == list(range(150))


# -- changes under traffic -------------------------------------------------------------------------


def test_a_new_rate_holds_for_what_is_queued() -> None:
    link, flow = live(Tcp("cubic", queue=1 << 40)), Flow()
    for k in range(100):
        link.push(0, flow, 144_800, tag=k)
    found = dues(link, SECOND)
    link.set_rate(SECOND, RATE // 4)
    found |= dues(link)
    late = {k: at for k, at in found.items() if at > SECOND + 10 * DELAY}
    first, last = min(late), max(late)
    speed = (last - first) * 144_800 * SECOND / (late[last] - late[first])
    assert speed == pytest.approx(RATE / 4, rel=0.02)


@pytest.mark.parametrize("control", CONTROLS)
def test_an_outage_stops_everything_and_loses_nothing(control: Any) -> None:
    trace = Trace(
        [Segment(0, RATE), Segment(SECOND, 0), Segment(3 * SECOND, RATE)], 4 * SECOND, False
    )
    link, flow = live(Tcp(control), rate=None, trace=trace), Flow()
    for k in range(200):
        link.push(0, flow, 100_000, tag=k)
    found = dues(link)
    assert len(found) == 200
    assert not [at for at in found.values() if SECOND + DELAY < at <= 3 * SECOND + DELAY]
    assert max(found.values()) < 10 * SECOND


def test_answers_wait_out_an_outage_of_their_way() -> None:
    """One way is down: what is sent arrives, but a window's worth of it, and no more."""
    link = live(Tcp("cubic", queue=1 << 40))
    back = Link(RATE, DELAY)
    link.back = back
    link.push(0, Flow(), 0, tag="mark")
    flow = Flow()
    for k in range(300):
        link.push(0, flow, 14_480, tag=k)
    found = dues(link, 300 * MS)
    back.set_rate(300 * MS, 0)
    found |= dues(link, 3 * SECOND)
    stuck = len(found)
    assert stuck < 200
    assert max(found.values()) < SECOND
    back.set_rate(3 * SECOND, RATE)
    link.way_back_opens(3 * SECOND)
    found |= dues(link)
    assert len(found) == 301
    assert max(found.values()) > 3 * SECOND


def test_a_cancel_drops_what_was_not_sent_and_what_was_sent_arrives_before_the_end() -> None:
    link, flow, other = live(), Flow(), Flow()
    for k in range(100):
        link.push(0, flow, 100_000, tag=k)
    link.push(0, other, 1_000_000, tag="other")
    found = dues(link, SECOND)
    sent = set(link.left())
    dropped = link.cancel(SECOND, flow)
    link.push(SECOND, flow, 0, tag="end")
    found |= dues(link)
    assert set(found) == sent | {"end", "other"}
    assert found["end"] == max(at for tag, at in found.items() if tag in sent | {"end"})
    assert dropped == link.dropped == 10_000_000 - link.carried["control"] + 1_000_000
    assert 0 < dropped < 9_000_000


# -- queues ----------------------------------------------------------------------------------------


SLOW, SHORT = RATE // 4, 500_000
"""A rate, and a queue that holds 160 ms of it."""


def mouse_among_elephants(link: TcpLink) -> Ns:
    """How long 1,000 bytes take beside three flows that have filled the queue."""
    for _ in range(3):
        link.push(0, Flow(), 20_000_000, tag="elephant")
    mouse = Flow()
    link.push(0, mouse, 1, tag="opens")
    link.advance(3 * SECOND)
    link.push(3 * SECOND, mouse, 1000, tag="mouse")
    return dues(link, 6 * SECOND)["mouse"] - 3 * SECOND


def test_first_in_first_out_holds_up_a_mouse_and_fair_queueing_does_not() -> None:
    fifo = mouse_among_elephants(live(Tcp(queue=SHORT), rate=SLOW))
    fair = mouse_among_elephants(live(Tcp(queue=SHORT), rate=SLOW, qdisc="fair"))
    assert fifo - DELAY > 60 * MS  # of 160 ms that the queue holds
    assert fair - DELAY < 5 * MS


def test_control_before_kv_passes_a_full_queue() -> None:
    link = live(Tcp(queue=SHORT), rate=SLOW, ranks={"kv": 1})
    for _ in range(3):
        link.push(0, Flow(), 20_000_000, "kv", tag="elephant")
    mouse = Flow()
    link.push(0, mouse, 1, "control", tag="opens")
    link.advance(3 * SECOND)
    link.push(3 * SECOND, mouse, 1000, "control", tag="mouse")
    assert dues(link, 6 * SECOND)["mouse"] - 3 * SECOND < DELAY + MS


def test_codel_keeps_the_queue_short_where_drop_tail_fills_it() -> None:
    tail = mouse_among_elephants(live(Tcp("reno", queue=SHORT), rate=SLOW))
    link = live(Tcp("reno", queue=SHORT, codel=True), rate=SLOW)
    assert mouse_among_elephants(link) - DELAY < 0.4 * (tail - DELAY)
    assert link.delayed_drops > 10


def test_a_full_queue_drops_and_one_without_end_does_not() -> None:
    for queue, drops in ((None, True), (1 << 40, False)):
        link = live(Tcp(queue=queue), rate=SLOW)
        link.push(0, Flow(), 5_000_000, tag="x")
        drain(link)
        assert (link.overflowed > 0) == drops
    assert default_queue(RATE, 2 * DELAY) == 500_000


def test_loss_by_a_trace_acts_in_its_time_only() -> None:
    parts = [
        Segment(0, None, None, 0.0),
        Segment(SECOND, None, None, 0.05),
        Segment(2 * SECOND, None, None, 0.0),
    ]
    link = live(Tcp(queue=1 << 40), trace=Trace(parts, 3 * SECOND, False))
    link.push(0, Flow(), 40_000_000, tag="x")
    link.advance(SECOND)
    assert link.lost == 0
    link.advance(2 * SECOND)
    lost = link.lost
    assert lost > 5
    drain(link)
    assert link.lost == lost


# -- what it costs ---------------------------------------------------------------------------------


def test_a_fast_link_takes_packets_of_many_segments() -> None:
    """10 Gbit/s: a second of it is some thousands of steps."""
    link = live(Tcp("cubic", send_buffer=1 << 30, receive_buffer=1 << 30), rate=1250 * MB)
    link.push(0, Flow(), 500_000_000, tag="x")
    assert dues(link)["x"] < 2 * SECOND
    assert link.packets < 9_000


def test_spec_and_predicted_agree_with_jitter_too() -> None:
    spec = LinkSpec("wan", ("a", "b"), RATE, DELAY, MS, overhead=52, tcp=Tcp())
    took, stats = over_simnet(spec, 10_000_000)
    path = Path(RATE, DELAY, jitter=MS)
    told = predict(path, [Transfer(10_000_000)])
    assert took == pytest.approx(told.ends[0], rel=0.1)  # other draws
    assert stats.delay_mean == pytest.approx(DELAY, rel=0.05)
    assert stats.delay_deviation == pytest.approx(MS, rel=0.5)
    assert replace(path, jitter=0).plain
