"""What goes wrong in network emulators, each as a test that fails where it goes wrong here.

item -> test (in this file, or FILE::test)

delay added per chunk accumulates -> test_a_delay_is_paid_once_however_many_chunks
latency throttles throughput, the delay line being bounded -> test_half_a_second_of_delay_costs_no_throughput
two stages do not add up -> test_two_stages_add_up
one-way taken for round trip -> test_a_delay_is_one_way
jitter on a stream has a biased mean -> test_jitter_has_the_mean_that_was_set
bandwidth per connection instead of per link -> test_two_connections_share_one_rate
rate 0 hangs, a negative rate panics -> test_rate_0_is_an_outage_that_ends_and_less_is_refused
lumps delay the first byte -> test_the_first_byte_does_not_wait_for_a_lump
rate error grows with the rate -> test_the_rate_is_exact_at_any_rate
the seed is ignored -> test_a_seed_decides_everything
the handshake is not delayed -> test_the_handshake_and_the_first_connection_are_delayed
hang when an impairment changes or goes under traffic -> test_every_setting_may_change_under_traffic
first connections undelayed -> test_the_handshake_and_the_first_connection_are_delayed
neutral settings still act -> test_neutral_settings_do_nothing
half-close kills the other direction -> test_net.py::test_close_delivers_everything_though_the_peer_still_floods
a stall drops data -> test_a_stall_drops_nothing
loss played by latency tricks -> test_loss_is_of_segments_and_needs_a_tcp
millisecond or wall clocks -> test_times_are_whole_nanoseconds
trace files misread: units, wrap-around, empty lines -> test_traces_are_read_strictly_and_begin_again
logs that leave out propagation -> test_what_is_in_propagation_is_no_backlog_and_no_arrival
queue limit below one BDP -> test_the_queue_holds_a_bdp_by_default
reordered streams -> test_no_stream_is_reordered
realised jitter below the configured one -> test_jitter_has_the_deviation_that_was_set
burst loss with wrong means -> test_bursts_have_the_share_and_the_length_that_were_set
small messages through for free after idling -> test_idling_saves_up_no_credit
integer unit bugs at high rates -> test_the_rate_is_exact_at_any_rate
unbounded backlog -> test_backlog_is_bounded
set 100 Mbit/s, got 750 -> test_the_rate_is_exact_at_any_rate
impairments left behind after the run -> test_faults_leave_links_as_they_were
missing capability noticed only as no effect -> test_what_would_have_no_effect_is_refused
silent saturation -> test_fidelity.py::test_verdicts

and of proxies, on real sockets:

delay added per chunk accumulates -> test_proxy.py::test_many_small_writes_are_not_delayed_one_by_one
latency throttles throughput -> test_proxy.py::test_delay_does_not_throttle_the_rate
two stages do not add up -> test_toxics.py::test_toxics_in_a_row_add_up
jitter on a stream has a biased mean -> test_toxics.py::test_jitter_keeps_its_mean_however_a_program_writes_and_never_reorders
bandwidth per connection instead of per link -> test_proxy.py::test_the_rate_is_the_links_and_not_a_connections
rate 0 hangs -> test_proxy.py::test_changing_the_link_under_traffic_holds_at_once_and_loses_nothing
a negative rate panics -> test_proxy_api.py::test_what_is_wrong_is_refused_as_there_and_changes_nothing
lumps delay the first byte -> test_proxy.py::test_the_first_bytes_of_a_slow_link_do_not_wait_for_a_lump
the seed is ignored -> test_proxy.py::test_toxicity_is_a_share_of_connections_and_the_same_for_a_seed
the handshake is not delayed, nor the first connection -> test_proxy.py::test_the_handshake_is_delayed_too
hang when an impairment changes or goes under traffic -> test_proxy_storm.py::test_what_is_sent_arrives_whatever_changes
neutral settings still act -> test_proxy.py::test_an_unlimited_link_without_delay_keeps_no_copy
half-close kills the other direction -> test_proxy.py::test_a_half_close_leaves_the_other_way_open
a stall drops data -> test_proxy.py::test_a_stall_holds_data_back_and_its_sender_too_and_ends_with_the_toxic
small messages through for free after idling -> test_toxics.py::test_a_small_message_after_a_pause_is_not_for_free_and_not_for_later
reordered streams -> test_proxy.py::test_bytes_arrive_once_in_order_unharmed_both_ways_at_once
unbounded backlog -> test_proxy.py::test_all_connections_together_hold_no_more_than_they_may
millisecond clocks -> test_alarm.py::test_alarms_ring_in_the_order_of_their_deadlines_and_never_early
impairments left behind after the run -> test_proxy.py::test_stopping_closes_everything_and_leaves_no_file_open
and by the kernel's comparison -> test_check.py::test_the_kernels_tcp_crosses_our_packet_link_and_nothing_is_left
missing capability noticed only as no effect -> test_check.py::test_what_is_missing_is_said_by_name
"""  # noqa: E501

from __future__ import annotations

import asyncio
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pddrt.errors import BadInput
from pddrt.frames import Frame
from pddrt.netem.faults import Impairment, NetFaults
from pddrt.netem.flow import SEND_BUFFER_MAX
from pddrt.netem.link import Flow, Link, Through
from pddrt.netem.losses import BurstLoss
from pddrt.netem.net import LinkSpec, Topology
from pddrt.netem.tcp_link import Tcp, TcpLink
from pddrt.netem.trace_files import parse_csv, parse_mahimahi
from pddrt.scenario import parse
from pddrt.types import MS, SECOND, US, Ns
from tests.netlab import MB, Main, lab, on, payload, world
from tests.test_link_fields import BASE


def drain(link: Link | TcpLink) -> list[Through]:
    out: list[Through] = []
    while (when := link.next_event()) is not None:
        out += link.advance(when)
    return out


def in_virtual_time(topology: Topology, play: Main) -> Any:
    """What `play(lab)` returns, on SimNet."""
    found: list[Any] = []

    async def main() -> None:
        async with lab("sim", topology) as here:
            found.append(await play(here))

    on("sim", main)
    return found[0]


def test_the_table_names_tests_that_exist() -> None:
    here, rows = Path(__file__), re.findall(r"^(.+) -> (\S+)$", str(__doc__), re.M)
    assert len(rows) >= 29
    for item, name in rows:
        file, _, test = name.rpartition("::")
        text = (here.parent / file if file else here).read_text()
        assert re.search(rf"^def {test}\(", text, re.M), item


# -- delays ----------------------------------------------------------------------------------------


def test_a_delay_is_paid_once_however_many_chunks() -> None:
    ends = set()
    for chunks in (1, 10, 1000):
        link, flow = Link(10 * MB, 50 * MS), Flow()
        for _ in range(chunks):
            link.push(0, flow, 1_000_000 // chunks)
        ends.add(drain(link)[-1].due)
    assert ends == {150 * MS}


@pytest.mark.parametrize("tcp", [None, Tcp("cubic", receive_buffer=1 << 30, send_buffer=1 << 30)])
def test_half_a_second_of_delay_costs_no_throughput(tcp: Tcp | None) -> None:
    """100 MB/s over 500 ms: without TCP in the time of the bytes and the delay; with TCP, once its
    window is open, at the rate, though 100 MB are on the way."""
    spec = LinkSpec("wan", ("a", "b"), 100 * MB, 500 * MS, tcp=tcp and replace(tcp, warm=True))

    async def play(here: Any) -> Ns:
        near, far = await here.pair()
        start, pieces = here.env.now(), 40

        async def send() -> None:
            for _ in range(pieces):
                await near.send(Frame("kv", {}, bytes(1_000_000)))

        sending = asyncio.create_task(send())
        for _ in range(pieces):
            await far.recv()
        await sending
        return here.env.now() - start

    took = in_virtual_time(Topology(world().sites, [spec]), play)
    assert took == pytest.approx(400 * MS + 500 * MS, rel=0.001 if tcp is None else 0.02)


def test_two_stages_add_up() -> None:
    sites = {"p": "a", "m": "b", "x": "x"}
    links = [LinkSpec("one", ("a", "x"), None, 10 * MS), LinkSpec("two", ("x", "b"), None, 25 * MS)]

    async def play(here: Any) -> tuple[Ns, Ns]:
        near, far = await here.pair()
        opened = here.env.now()
        near.post(Frame("ids", {}))
        await far.recv()
        return opened, here.env.now() - opened

    assert in_virtual_time(Topology(sites, links), play) == (70 * MS, 35 * MS)


@pytest.mark.parametrize("tcp", [None, Tcp("cubic"), Tcp("bbr", 4)])
def test_a_delay_is_one_way(tcp: Tcp | None) -> None:
    spec = LinkSpec("wan", ("a", "b"), None, 20 * MS, tcp=tcp)

    async def play(here: Any) -> list[Ns]:
        near, far = await here.pair()
        times = [here.env.now()]
        near.post(Frame("ids", {}))
        await far.recv()
        times.append(here.env.now())
        far.post(Frame("ids", {}))
        await near.recv()
        return [*times, here.env.now()]

    found = in_virtual_time(Topology(world().sites, [spec]), play)
    assert found == [40 * MS, 60 * MS, 80 * MS]


@pytest.mark.parametrize("tcp", [None, Tcp("cubic")])
def test_the_handshake_and_the_first_connection_are_delayed(tcp: Tcp | None) -> None:
    """The first connection as much as the tenth."""
    spec = LinkSpec("wan", ("a", "b"), None, 20 * MS, tcp=tcp)

    async def play(here: Any) -> list[Ns]:
        times = [here.env.now()]
        for _ in range(10):
            await here.pair()
            times.append(here.env.now())
        return times

    times = in_virtual_time(Topology(world().sites, [spec]), play)
    assert [b - a for a, b in pairwise(times)] == [40 * MS] * 10


# -- jitter ----------------------------------------------------------------------------------------


def jittered(tcp: bool = False) -> tuple[Any, list[Through]]:
    """50 +- 40 ms, the setting that is known for what it does elsewhere: over half an hour, or with
    a packet a millisecond."""
    link: Any = Link(12_500_000, 50 * MS, 40 * MS, "s")
    if tcp:
        link = TcpLink(link, Tcp("cubic", queue=1 << 40))
    flow, out, every = Flow(), [], MS if tcp else 50 * MS
    for k in range(20_000 if tcp else 50_000):
        link.push(k * every, flow, 1000, tag=k)
        out += link.advance(k * every)
    return link, out + drain(link)


def test_jitter_has_the_mean_that_was_set() -> None:
    _, items = jittered()
    assert statistics.fmean(i.due - i.finish for i in items) == pytest.approx(50 * MS, rel=0.05)


def test_jitter_has_the_deviation_that_was_set() -> None:
    link, items = jittered()
    real = [i.due - i.finish for i in items]
    assert statistics.pstdev(real) == pytest.approx(40 * MS, rel=0.08)
    mean, deviation = link.measured_delay()  # and what is reported is what was
    assert mean == pytest.approx(statistics.fmean(real), abs=2)
    assert deviation == pytest.approx(statistics.pstdev(real), rel=1e-6)


@pytest.mark.parametrize("tcp", [False, True])
def test_no_stream_is_reordered(tcp: bool) -> None:
    _, items = jittered(tcp)
    assert [i.tag for i in items] == list(range(len(items)))
    assert [i.due for i in items] == sorted(i.due for i in items)


# -- rates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate", [1000, 12_500_000, 125_000_000, 1_000_000_000, 12_500_000_000, 10**12]
)
@pytest.mark.parametrize("nbytes", [100, 1448, 65_536])
def test_the_rate_is_exact_at_any_rate(rate: int, nbytes: int) -> None:
    """Small writes or large ones, 1 kB/s or 1 TB/s: to the nanosecond."""
    link, flow = Link(rate, 0), Flow()
    for _ in range(3000):
        link.push(0, flow, nbytes)
    assert drain(link)[-1].finish == -(-3000 * nbytes * SECOND // rate)


def test_two_connections_share_one_rate() -> None:
    for qdisc in ("fair", "fifo"):
        link = Link(10 * MB, 0, qdisc=qdisc)  # type: ignore[arg-type]
        for flow in (Flow(), Flow(), Flow()):
            link.push(0, flow, 1_000_000)
        assert drain(link)[-1].finish == 300 * MS
    tcp = TcpLink(Link(10 * MB, MS, qdisc="fifo"), Tcp())
    for _ in range(3):
        tcp.push(0, Flow(), 1_000_000)
    assert max(item.due for item in drain(tcp)) > 300 * MS


def test_rate_0_is_an_outage_that_ends_and_less_is_refused() -> None:
    link = Link(0, 0)
    link.push(0, Flow(), 1000)
    assert link.next_event() is None  # it waits for nothing, and nobody turns in circles
    assert link.advance(SECOND) == []
    link.set_rate(SECOND, MB)
    assert drain(link)[0].finish == SECOND + MS
    with pytest.raises(ValueError, match="impossible rate"):
        link.set_rate(SECOND, -1)
    with pytest.raises(BadInput, match="negative"):
        parse(BASE % "rate: -1 Mbit/s", "s.yaml")


def test_the_first_byte_does_not_wait_for_a_lump() -> None:
    """A frame of 200 bytes before 10 MB arrives in its own time; a small one beside 10 MB, too."""
    topology = world(rate=MB, delay=0)

    async def play(here: Any) -> list[Ns]:
        near, far = await here.pair()
        beside, beside_end = await here.pair("q", "n")
        start = here.env.now()
        small = Frame("ids", {}, bytes(200))
        near.post(small)
        sending = asyncio.create_task(near.send(Frame("kv", {}, bytes(3_000_000))))
        await asyncio.sleep(0)
        beside.post(small)
        await far.recv()
        first = here.env.now() - start
        await beside_end.recv()
        second = here.env.now() - start
        await far.recv()
        await sending
        return [first, second]

    size = len(Frame("ids", {}, bytes(200)).head()) + 200
    assert all(at <= 2 * size * US for at in in_virtual_time(topology, play))


def test_idling_saves_up_no_credit() -> None:
    link, flow = Link(MB, 0), Flow()
    link.push(0, flow, 1)
    drain(link)
    for k in range(50):  # an hour later: not one message is early
        link.push(3600 * SECOND, flow, 100, tag=k)
    assert [i.finish for i in drain(link)] == [
        3600 * SECOND + (k + 1) * 100 * US for k in range(50)
    ]


def test_times_are_whole_nanoseconds() -> None:
    """Three bytes a nanosecond, items of a byte: each is through in its own nanosecond or the next
    one, and a day later just as exactly."""
    for start in (0, 86_400 * SECOND):
        link, flow = Link(3 * SECOND, 0), Flow()
        for _ in range(30):
            link.push(start, flow, 1)
        assert [i.finish - start for i in drain(link)] == [-(-(k + 1) // 3) for k in range(30)]


# -- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tcp", [None, Tcp("cubic"), Tcp("bbr", 2), Tcp("reno", codel=True)])
def test_every_setting_may_change_under_traffic(tcp: Tcp | None) -> None:
    """And go again: everything arrives, once and in order."""
    spec = LinkSpec("wan", ("a", "b"), 2 * MB, 10 * MS, tcp=tcp)
    frames = [payload(20_000, k) for k in range(60)]

    async def play(here: Any) -> list[bytes]:
        near, far = await here.pair()

        async def send() -> None:
            for frame in frames:
                await near.send(Frame("kv", {}, frame))

        async def meddle() -> None:
            for rate, delay, jitter in [(0, 10, 0), (100_000, 40, 5), (None, 0, 0), (MB, 10, 2)]:
                await here.env.sleep(70 * MS)
                here.net.set_rate("wan", rate)
                here.net.set_delay("wan", delay * MS, jitter * MS)

        tasks = [asyncio.create_task(send()), asyncio.create_task(meddle())]
        got = [bytes((await far.recv()).payload) for _ in frames]
        for task in tasks:
            await task
        return got

    assert in_virtual_time(Topology(world().sites, [spec]), play) == frames


@pytest.mark.parametrize("tcp", [None, Tcp("cubic")])
def test_a_stall_drops_nothing(tcp: Tcp | None) -> None:
    """A reader that stops for ten seconds, then an outage of ten: every byte is there."""
    spec = LinkSpec("wan", ("a", "b"), 10 * MB, 5 * MS, tcp=tcp)
    frames = [payload(1 << 20, k) for k in range(14)]

    async def play(here: Any) -> list[bytes]:
        near, far = await here.pair()

        async def send() -> None:
            for frame in frames:
                await near.send(Frame("kv", {}, frame))

        sending = asyncio.create_task(send())
        await here.env.sleep(10 * SECOND)
        here.net.set_rate("wan", 0)
        got = [bytes((await far.recv()).payload)]
        await here.env.sleep(10 * SECOND)
        here.net.set_rate("wan", 10 * MB)
        got += [bytes((await far.recv()).payload) for _ in frames[1:]]
        await sending
        return got

    assert in_virtual_time(Topology(world().sites, [spec]), play) == frames


def test_faults_leave_links_as_they_were() -> None:
    spec = LinkSpec("wan", ("a", "b"), 10 * MB, 5 * MS, MS)
    back = replace(spec, between=("b", "a"), rate=MB, delay=9 * MS)
    spec = replace(spec, back=back)

    async def play(here: Any) -> list[tuple[int | None, Ns, Ns]]:
        faults = NetFaults(here.net)

        def figures() -> list[tuple[int | None, Ns, Ns]]:
            found = [here.net.direction(*way).link for way in (("p", "m"), ("m", "p"))]
            return [(link.rate, link.delay.mean, link.delay.jitter) for link in found]

        before = figures()
        faults.impair(Impairment("wan", None, 500_000, 50 * MS, 3 * MS))
        assert figures() == [(500_000, 50 * MS, 3 * MS)] * 2
        faults.close()
        assert figures() == before
        return before

    found = in_virtual_time(Topology(world().sites, [spec]), play)
    assert found == [(10 * MB, 5 * MS, MS), (MB, 9 * MS, MS)]


def test_neutral_settings_do_nothing() -> None:
    """No rate, no delay, no jitter, no loss, no weights: everything is there at once; and with a
    rate, settings that say nothing change no time."""
    plain, neutral = Link(None, 0), Link(None, 0, 0, weights={"kv": 1}, ranks={"kv": 0}, overhead=0)
    for link in (plain, neutral):
        link.push(5, Flow(), 10**9)
        assert [(i.finish, i.due) for i in link.advance(5)] == [(5, 5)]
    tcp = TcpLink(Link(None, 0, qdisc="fifo"), Tcp())
    tcp.push(5, Flow(), 1_000_000)
    assert drain(tcp)[0].due < 30  # a nanosecond for each round trip of slow start


# -- loss, queues, traces --------------------------------------------------------------------------


def test_loss_is_of_segments_and_needs_a_tcp() -> None:
    """Lost segments are sent again, which takes a round trip and window. Where there are none, loss
    is refused."""
    from pddrt.netem.losses import losses_of

    link = TcpLink(Link(10 * MB, 20 * MS, qdisc="fifo"), Tcp(), "s", losses_of(0.01, None, "s"))
    flow = Flow()
    for k in range(100):
        link.push(0, flow, 14_480, tag=k)
    items = drain(link)
    assert [i.tag for i in items] == list(range(100))
    assert link.resent >= link.lost > 3
    with pytest.raises(BadInput, match="found loss with tcp: none"):
        parse(BASE % "rate: 1 Mbit/s, loss: 1 %", "s.yaml")


def test_bursts_have_the_share_and_the_length_that_were_set() -> None:
    n, p, burst = 300_000, 0.02, 4.0
    loss = BurstLoss(p, burst, "s")
    fates = [loss.lost(1) for _ in range(n)]
    rows = sum(b and not a for a, b in pairwise([0, *fates]))
    assert sum(fates) / n == pytest.approx(p, rel=0.08)
    assert sum(fates) / rows == pytest.approx(burst, rel=0.08)


def test_the_queue_holds_a_bdp_by_default() -> None:
    """50 MB at 100 Mbit/s and 40 ms: a queue of one bandwidth-delay product, or slow start would
    lose half of its window and the link idle."""
    link = TcpLink(Link(12_500_000, 20 * MS, qdisc="fifo"), Tcp("reno", overhead=52))
    link.push(0, Flow(), 50_000_000)
    assert drain(link)[-1].due < 1.1 * 50_000_000 * 1500 / 1448 * SECOND / 12_500_000
    small = TcpLink(Link(12_500, MS, qdisc="fifo"), Tcp("reno", overhead=52))
    small.push(0, Flow(), 60_000)  # 64 KiB at least: a first window and what follows fit in
    drain(small)
    assert small.overflowed == 0


def test_traces_are_read_strictly_and_begin_again() -> None:
    trace = parse_mahimahi("1\n3\n")  # 1,504 bytes each, in ms, and again after 3
    link, flow = Link(None, 0, trace=trace), Flow()
    for k in range(8):
        link.push(0, flow, 1504, tag=k)
    assert [i.finish for i in drain(link)] == [k * MS for k in (1, 3, 4, 6, 7, 9, 10, 12)]
    for text in ("1\n\n3\n", "1 s\n", "0.5\n"):
        with pytest.raises(ValueError, match="line"):
            parse_mahimahi(text)
    with pytest.raises(ValueError, match="without a unit"):
        parse_csv("time,rate\n0 s,100\n")


def test_what_is_in_propagation_is_no_backlog_and_no_arrival() -> None:
    link = Link(MB, SECOND)
    link.push(0, Flow(), 1000, "kv", "x")
    (item,) = link.advance(MS)
    assert (item.finish, item.due) == (MS, SECOND + MS)
    assert link.backlog(MS) == 0


@pytest.mark.parametrize("tcp", [None, Tcp("cubic")])
def test_backlog_is_bounded(tcp: Tcp | None) -> None:
    """A sender that never waits for anything but `send`, and a link that is down: what is held is
    the send buffer and one frame."""
    spec = LinkSpec("wan", ("a", "b"), 0, MS, tcp=tcp)

    async def play(here: Any) -> int:
        here.net.set_rate("wan", None)
        near, _ = await here.pair()
        here.net.set_rate("wan", 0)
        sending = asyncio.create_task(near.send(Frame("kv", {}, bytes(1 << 20))))
        for _ in range(200):
            await asyncio.sleep(0)
            if sending.done():
                sending = asyncio.create_task(near.send(Frame("kv", {}, bytes(1 << 20))))
        held = here.net.path_backlog("p", "m")
        sending.cancel()
        await asyncio.wait([sending])
        return int(held)

    held = in_virtual_time(Topology(world().sites, [spec]), play)
    assert (1 << 20) <= held <= SEND_BUFFER_MAX + (2 << 20)


# -- seeds and settings ----------------------------------------------------------------------------


def test_a_seed_decides_everything() -> None:
    def dues(seed: str) -> list[Ns]:
        link, flow = Link(MB, 20 * MS, 5 * MS, seed), Flow()
        for _ in range(50):
            link.push(0, flow, 10_000)
        return [i.due for i in drain(link)]

    assert dues("a") == dues("a") != dues("b")


@pytest.mark.parametrize(
    "wan",
    ["loss: 1 %", "queue: 1 MiB", "aqm: codel", "streams: 2", "tcp: cubic, weights: {kv: 2}",
     "send_buffer: 1 MiB", "connections: warm", "jitter: 1 ms"],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(wan: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(BASE % wan, "s.yaml")
    assert len(error.value.problems) == 1
