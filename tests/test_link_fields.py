"""Links in a scenario: what each field becomes, what does not fit together and is said by name, and
profiles: named, from files, and back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pddrt import links
from pddrt.errors import BadInput
from pddrt.netem.jitter import Shape
from pddrt.netem.net import LinkSpec, Topology, route
from pddrt.netem.profiles import NAMED, Profile, dump, load
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.trace_files import (
    OPPORTUNITY,
    format_csv,
    format_mahimahi,
    parse_csv,
    parse_iperf3,
    parse_mahimahi,
    parse_ping,
)
from pddrt.netem.traces import Segment, Trace
from pddrt.run import Run
from pddrt.scenario import Scenario, parse
from pddrt.types import MS, SECOND, US
from tests.netlab import MB, lab, on

BASE = """
name: s
clock: virtual
model: tiny
links:
  rdma: {between: [a, a], rate: 1 Gbit/s, delay: 5 us}
  wan: {between: [a, b], %s}
instances:
  p:   {role: prefill, site: a, engine: model, kv_memory: 4 MiB, chip: &c {flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}
  rld: {role: relay,   site: a, engine: model, kv_memory: 4 MiB, chip: *c}
  md:  {role: main,    site: b, engine: model, kv_memory: 4 MiB, chip: *c}
workload: {kind: closed, requests: 3, concurrency: 1, output_tokens: 8, prompts: random, prompt_tokens: 60}
"""  # noqa: E501


def scenario(wan: str, file: str = "s.yaml") -> Scenario:
    return parse(BASE % wan, file)


def spec(wan: str) -> LinkSpec:
    (found,) = [s for s in scenario(wan).topology().links if s.name == "wan"]
    return found


def problems(wan: str) -> list[str]:
    with pytest.raises(BadInput) as error:
        scenario(wan)
    return [text.partition(": ")[2] for text in error.value.problems]


# -- what a field becomes --------------------------------------------------------------------------


def test_a_plain_link_is_as_it_always_was() -> None:
    assert spec("rate: 50 Mbit/s, delay: 15 ms, jitter: 1 ms, tcp: none") == LinkSpec(
        "wan", ("a", "b"), 6_250_000, 15 * MS, MS
    )


def test_every_field_finds_its_place() -> None:
    found = spec(
        "rate: 80 Mbit/s, delay: 20 ms, tcp: bbr, streams: 4, connections: warm, aqm: codel, "
        "jitter: {deviation: 2 ms, shape: pareto, correlation: 30 ms}, "
        "loss: {share: 0.1 %, burst: 3}, queue: 0.5 BDP, qdisc: fair, priority: control, "
        "weights: {ids: 4}, overhead: 52 B, send_buffer: 1 MiB, receive_buffer: 2 MiB"
    )
    assert found.tcp == Tcp("bbr", 4, True, 1 << 20, 2 << 20, 200_000, True)
    assert (found.jitter, found.shape, found.correlation) == (2 * MS, Shape("pareto"), 30 * MS)
    assert (found.loss, found.burst, found.qdisc, found.overhead) == (0.001, 3.0, "fair", 52)
    assert (found.ranks, found.weights) == ({"kv": 1}, {"ids": 4})


def test_directions_may_differ() -> None:
    found = spec("rate: {a>b: 80 Mbit/s, b>a: 8 Mbit/s}, delay: {b>a: 30 ms, a>b: 20 ms}")
    assert (found.rate, found.delay) == (10 * MB, 20 * MS)
    assert found.back is not None
    assert (found.back.between, found.back.rate, found.back.delay) == (("b", "a"), MB, 30 * MS)
    topology = Topology({"p": "a", "m": "b"}, [found])
    assert topology.link_between("m", "p") is found.back

    async def main() -> None:
        async with lab("sim", topology) as here:
            await here.pair("p", "m")
            assert here.env.now() == 50 * MS

    on("sim", main)


def test_changes_and_outages_become_a_trace() -> None:
    found = spec(
        "rate: 8 Mbit/s, delay: 10 ms, changes: [{at: 2 s, rate: 16 Mbit/s}, "
        "{at: 3 s, delay: 40 ms}], outages: [{at: 1 s, for: 500 ms}]"
    )
    assert found.rate == 2 * MB  # the most that it will be
    assert found.trace is not None
    assert [(s.start, s.rate, s.delay) for s in found.trace.segments] == [
        (0, MB, None),
        (SECOND, 0, None),
        (1500 * MS, MB, None),
        (2 * SECOND, 2 * MB, None),
        (3 * SECOND, 2 * MB, 40 * MS),
    ]
    assert found.trace.at(100 * SECOND)[0].rate == 2 * MB


FULL = (
    "rate: {a>b: 80 Mbit/s, b>a: 8 Mbit/s}, delay: 20 ms, tcp: cubic, streams: 2, loss: 1 %, "
    "jitter: {deviation: 2 ms, shape: normal}, queue: 2 BDP, priority: control, overhead: 52 B, "
    "changes: [{at: 2 s, rate: 16 Mbit/s}], outages: [{at: 1 s, for: 500 ms}]"
)


@pytest.mark.parametrize("wan", [FULL, "profile: mobile, tcp: bbr", "rate: 0 bit/s, delay: 1 ms"])
def test_what_is_dumped_loads_again_to_the_same_link(wan: str) -> None:
    first = scenario(wan)
    again = parse(first.dump(), "again.yaml")
    assert again.links == first.links
    assert again.topology().links == first.topology().links


# -- what does not fit -----------------------------------------------------------------------------

WRONG = [
    ("loss: 1 %", "links.wan.loss: found loss with tcp: none; needed: tcp: reno | cubic | bbr"),
    ("queue: 1 BDP", "links.wan.queue: found a queue that drops with tcp: none"),
    ("aqm: codel", "links.wan.aqm: found a queue that drops with tcp: none"),
    ("streams: 4", "links.wan.streams: found several connections with tcp: none"),
    ("connections: warm", "links.wan.connections: found a window that is open with tcp: none"),
    ("profile: lossy", "links.wan.profile: found one that loses segments with tcp: none"),
    ("changes: [{at: 1 s, loss: 1 %}]", "links.wan.changes.0.loss: found loss with tcp: none"),
    ("tcp: vegas", "links.wan.tcp: found 'vegas'; allowed: none | reno | cubic | bbr"),
    ("tcp: cubic, loss: 95 %", "links.wan.loss: found '95 %'; allowed: a share below 90 %"),
    ("tcp: cubic, loss: {share: 5 %}, streams: 0", "links.wan.streams: found 0; allowed"),
    ("tcp: cubic, loss: {share: 80 %, burst: 2}", "links.wan.loss.burst: found 2; allowed: so"),
    ("tcp: cubic, queue: 0 B", "links.wan.queue: found '0 B'; allowed: a size"),
    ("tcp: cubic, queue: -1 BDP", "links.wan.queue: found '-1 BDP'"),
    ("tcp: cubic, weights: {kv: 2}", "links.wan.weights: found weights with qdisc: fifo; needed"),
    ("weights: {kv: 0}", "links.wan.weights.kv: found 0; allowed: a whole number from 1"),
    ("rate: -5 Mbit/s", "links.wan.rate: found '-5 Mbit/s', which is negative"),
    ("rate: {a>b: 1 Mbit/s}", "links.wan.rate: found 'a>b'; allowed: a rate such as"),
    ("rate: {a>b: 1 Mbit/s, b-a: 1 Mbit/s}", "links.wan.rate: found 'a>b', 'b-a'; allowed"),
    ("rate: {a>b: 1 Mbit/s, b>c: 1 Mbit/s}", "links.wan.rate: found a>b, b>c; allowed: a>b"),
    ("jitter: 1 ms", "links.wan.jitter: found 1 ms with a delay of 0, which has no room for it"),
    ("profile: mobile, delay: 0 ms", "links.wan.delay: found 0 beside the profile's jitter of 4"),
    ("delay: {a>b: 0 s, b>a: 9 ms}, jitter: 1 ms", "links.wan.jitter: found 1 ms with a delay"),
    ("delay: 9 ms, jitter: {deviation: 1 ms, shape: gamma}", "links.wan.jitter.shape: found"),
    ("delay: 9 ms, jitter: {shape: normal}", "links.wan.jitter.deviation: missing; needed: a time"),
    ("profile: moon", "links.wan.profile: found 'moon'; allowed: metro, cross-country"),
    ("profile: mobile, outages: [{at: 1 s, for: 1 s}]", "links.wan.outages: found beside a"),
    ("changes: [{at: 1 s}, {at: 1 s}]", "links.wan.changes: found two at 1 s; allowed: one"),
    ("outages: [{at: 1 s}]", "links.wan.outages.0.for: missing; needed: a time"),
]  # fmt: skip


@pytest.mark.parametrize(("wan", "text"), WRONG, ids=[wan for wan, _ in WRONG])
def test_what_does_not_fit_is_said_by_name(wan: str, text: str) -> None:
    found = problems(wan)
    assert [p for p in found if p.startswith(text)], found
    assert len(found) == 1


# -- several in a row ------------------------------------------------------------------------------

ROW = """{between: [a, x], rate: 800 Mbit/s, delay: 10 ms}
  far: {between: [x, b], rate: 80 Mbit/s, delay: 20 ms%s}"""


def in_a_row(more: str = "") -> str:
    return (BASE % "").replace("wan: {between: [a, b], }", "wan: " + ROW % more)


def test_links_in_a_row_add_their_delays_and_the_narrowest_rules() -> None:
    topology = parse(in_a_row(), "s.yaml").topology()
    assert [hop.name for hop in route(topology.links, "a", "b")] == ["wan", "far"]
    found = topology.link_between("p", "md")
    assert found is not None
    assert (found.name, found.rate, found.delay) == ("wan+far", 10 * MB, 30 * MS)
    assert topology.link_between("p", "md") is found


def test_a_whole_run_crosses_two_links(tmp_path: Path) -> None:
    run = Run(parse(in_a_row(), "s.yaml"), out=tmp_path)
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    totals = json.loads((tmp_path / "summary.json").read_text())["links"]
    assert totals["wan"]["bytes"] == totals["far"]["bytes"] > 0


def test_what_shares_a_hop_shares_its_rate() -> None:
    """p to m by x, q to x: the first hop carries both."""
    sites = {"p": "a", "q": "a", "x": "x", "m": "b"}
    first, second = LinkSpec("one", ("a", "x"), 10 * MB, 0), LinkSpec("two", ("x", "b"), 80 * MB, 0)

    async def main() -> None:
        from pddrt.frames import Frame

        async with lab("sim", Topology(sites, [first, second])) as here:
            far, far_end = await here.pair("p", "m")
            near, near_end = await here.pair("q", "x")
            start = here.env.now()
            far.post(Frame("kv", {}, bytes(500_000)))
            near.post(Frame("kv", {}, bytes(500_000)))
            await far_end.recv()
            await near_end.recv()
            assert here.env.now() - start == pytest.approx(100 * MS, rel=0.01)

    on("sim", main)


def test_tcp_over_several_links_is_refused_by_name() -> None:
    with pytest.raises(BadInput) as error:
        parse(in_a_row(", tcp: cubic"), "s.yaml")
    (text,) = error.value.problems
    assert "links.far.tcp: found 'cubic' on one of several links in a row (wan, far" in text


# -- profiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_a_named_wan_works_in_a_scenario_and_says_what_it_is(name: str) -> None:
    found = spec(f"profile: {name}, tcp: cubic")
    profile = NAMED[name]
    assert found.delay >= profile.delay > 0
    assert found.rate == (profile.rate or profile.trace.peak)  # type: ignore[union-attr]
    facts = dict(profile.facts())
    assert {"rate", "delay"} <= facts.keys()
    if profile.trace is not None:
        assert facts["rate"].startswith("min 0, mean ")
        assert facts["duration"] == "60 s, then from the beginning"


def test_the_published_internet_is_that_of_the_report() -> None:
    profile = load("public-internet")
    assert (profile.rate, 2 * profile.delay) == (1_837_500_000, 29_750 * US)


def test_what_is_written_beside_a_profile_comes_first() -> None:
    found = spec("profile: cross-country, rate: 1 Gbit/s, delay: 5 ms, jitter: 0 s")
    assert (found.rate, found.delay, found.jitter) == (125 * MB, 5 * MS, 0)


@pytest.mark.parametrize("name", NAMED)
def test_a_profile_that_is_written_loads_to_the_same(name: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(dump(NAMED[name]))
    assert load(str(file)) == NAMED[name]


def test_a_run_folder_has_the_files_that_its_links_name(tmp_path: Path) -> None:
    (tmp_path / "up.trace").write_text("1\n2\n2\n4\n")
    (tmp_path / "wave.dist").write_text("-8192 0 8192\n")
    wan = "profile: up.trace, delay: 9 ms, jitter: {deviation: 1 ms, shape: wave.dist}"
    first = scenario(wan, str(tmp_path / "s.yaml"))
    run = Run(first, out=tmp_path / "out")
    run.prepare()
    run.execute().raise_for_status()
    from pddrt.scenario import load as load_scenario

    again = load_scenario(tmp_path / "out" / "scenario.yaml")
    before, after = first.topology().links[1], again.topology().links[1]
    assert after.trace == before.trace
    assert after.shape.table == before.shape.table == (-1.0, 0.0, 1.0)


MALFORMED: list[tuple[str, str, str]] = [
    ("t", "", "line 1: the file is empty"),
    ("t", "1\n\n2\n", "line 2: found ''; allowed: a time in whole ms, one a line"),
    ("t", "1\n5\n3\n", "line 3: found '3'; allowed: a time that is not before the line above, 5"),
    ("t", "1\n2.5\n", "line 2: found '2.5'"),
    ("t", "1\n-2\n", "line 2: found '-2'"),
    ("t", "0\n0\n", "line 2: the trace ends at 0 ms; needed: a later time"),
    ("t", "1\n99999999999999999999\n", "line 2: found '99999999999999999999'"),
    ("t", "1\n9999999999999\n", "line 2: the trace is too long"),
    ("t.csv", "", "line 1: the file is empty"),
    ("t.csv", "time,speed\n", "line 1: found 'speed'; allowed: columns time, rate, delay, loss"),
    ("t.csv", "rate,delay\n", "line 1: found 'rate,delay'; allowed: time and at least one of"),
    ("t.csv", "time,time\n", "line 1: found 'time'; allowed: each column once"),
    ("t.csv", "time,rate\n", "line 1: there are no rows below the header"),
    ("t.csv", "time,rate\n0 s,5\n", "line 2: rate: found '5', a number without"),
    ("t.csv", "time (s),rate (Mbit/s)\n0,5\n1,fast\n", "line 3: found 'fast'; allowed: a number"),
    ("t.csv", "time (s),rate (Mbit/s)\n0,5\n1\n", "line 3: found '1'; allowed: 2 cells"),
    ("t.csv", "time (s),rate (Mbit/s)\n0,5\n2,5\n1,5\n", "line 4: found '1'; allowed: 0 in the"),
    ("t.csv", "time (s),rate (Mbit/s)\n1,5\n", "line 2: found '1'; allowed: 0 in the first"),
    ("t.csv", "time (s),loss\n0,95 %\n", "line 2: loss: found '95 %'; allowed: a share below 90 %"),
    ("t.csv", "time (s),rate (Mbit/s)\n0,0\n1,0\n", "the rate is 0 all the time"),
    ("t.yaml", "rate: 5\n", "1: rate: found 5, a number without a unit"),
    ("t.yaml", "rate: 1 Mbit/s\nspeed: 2\n", "2: speed: found an unknown field"),
    ("t.yaml", "segments:\n  - {rate: 1 Mbit/s}\n", "2: segments.0.for: missing; needed: a time"),
    ("t.yaml", "segments: [{for: 1 s, rate: 0}]\n", "1: segments: the rate is 0 all the time"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "complaint"), MALFORMED)
def test_a_malformed_file_is_refused_with_its_line(
    name: str, text: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(BadInput) as error:
        load(str(file))
    (message,) = error.value.problems
    assert message.partition(f"{name}:")[2].strip().startswith(complaint), message


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    for name, complaint in ((str(tmp_path / "none"), "No such file"),
                            (str(tmp_path / "b"), "UTF-8"),
                            (str(tmp_path), "directory"), ("\0", "no such file")):  # fmt: skip
        with pytest.raises(BadInput, match=complaint):
            load(name)


# -- formats ---------------------------------------------------------------------------------------


def test_a_mahimahi_trace_is_read_as_mahimahi_plays_it() -> None:
    """Four opportunities in 4 ms, two of them at 2; the one at 4 is a round's end."""
    trace = parse_mahimahi("1\n2\n2\n4\n")
    rate = OPPORTUNITY * 1000
    assert [(s.start, s.rate) for s in trace.segments] == [
        (0, rate), (MS, 2 * rate), (2 * MS, 0), (3 * MS, rate)
    ]  # fmt: skip
    assert (trace.end, trace.repeats) == (4 * MS, True)
    assert trace.carries(0, 4 * MS) == 4 * OPPORTUNITY
    assert trace.carries(40 * MS, 42 * MS) == 3 * OPPORTUNITY
    assert parse_mahimahi("0\n2\n").carries(0, 2 * MS) == 2 * OPPORTUNITY


@pytest.mark.parametrize("seed", range(5))
def test_a_mahimahi_trace_survives_the_round(seed: int) -> None:
    rng = random.Random(seed)
    times = sorted(rng.randrange(1, 400) for _ in range(300))
    text = "\n".join(map(str, times)) + "\n"
    assert format_mahimahi(parse_mahimahi(text)) == text


def test_any_trace_is_written_to_within_a_packet() -> None:
    trace = Trace(
        [Segment(0, 3 * MB), Segment(50 * MS, 0), Segment(70 * MS, 11 * MB)], SECOND, True
    )
    again = parse_mahimahi(format_mahimahi(trace))
    for at in range(0, 1001, 50):
        assert again.carries(0, at * MS) == pytest.approx(
            trace.carries(0, at * MS), abs=2 * OPPORTUNITY
        )
    with pytest.raises(ValueError, match="open"):
        format_mahimahi(Trace([Segment(0, None, MS)], SECOND, True))
    with pytest.raises(ValueError, match="less than one packet"):
        format_mahimahi(Trace([Segment(0, 100)], SECOND, True))


def test_csv_holds_what_it_says_until_the_next_row() -> None:
    trace = parse_csv("time (s), rate (Mbit/s), delay, loss\n0, 80, 10 ms, 0.001\n2.5, 8,, 2 %\n")
    assert trace.segments == (
        Segment(0, 10 * MB, 10 * MS, 0.001), Segment(2500 * MS, MB, None, 0.02)
    )  # fmt: skip
    assert (trace.end, trace.repeats) == (5 * SECOND, True)
    assert parse_csv(format_csv(trace)) == trace
    span = trace.span("rate")
    assert span == (MB, 5.5 * MB, 10 * MB)


def test_iperf3_and_ping_make_a_profile() -> None:
    intervals = [
        {"sum": {"seconds": 1.0, "bytes": 5_000_000, "omitted": True}},
        {"sum": {"seconds": 1.0, "bytes": 10_000_000, "omitted": False}},
        {"sum": {"seconds": 0.5, "bytes": 2_500_000, "omitted": False}},
    ]
    trace = parse_iperf3(json.dumps({"intervals": intervals}))
    assert [(s.start, s.rate) for s in trace.segments] == [(0, 10 * MB), (SECOND, 5 * MB)]
    assert trace.end == 1500 * MS
    log = "64 bytes from h: icmp_seq=1 ttl=64 time=40.0 ms\nnoise\n64 bytes: time=44.0 ms\n"
    assert parse_ping(log) == (21 * MS, round(2 * MS / 2**0.5))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x", "this is no JSON"),
        ("[]", "there are no intervals"),
        ('{"error": "unable to connect"}', "iperf3 reports: 'unable to connect'"),
        ('{"intervals": [{}]}', r"intervals\[0\] has no sum"),
        ('{"intervals": [{"sum": {"seconds": 0, "bytes": 1}}]}', r"intervals\[0\]: 1 bytes in 0"),
        ('{"intervals": [{"sum": {"seconds": 1, "bytes": 1, "omitted": true}}]}', "omitted"),
    ],
)
def test_what_iperf3_did_not_say_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_iperf3(text)
    with pytest.raises(ValueError, match="no line has"):
        parse_ping(text)


def test_a_trace_repeats_or_holds() -> None:
    parts = [Segment(0, 1), Segment(10, 2)]
    again, once = Trace(parts, 15, True), Trace(parts, 15, False)
    assert [(again.at(t)[0].rate, again.at(t)[1]) for t in (0, 9, 10, 14, 15, 26, 30)] == [
        (1, 10), (1, 10), (2, 15), (2, 15), (1, 25), (2, 30), (1, 40),
    ]  # fmt: skip
    assert (once.at(9)[1], once.at(10)[1], once.at(99)[0].rate) == (10, None, 2)
    shut = Trace([Segment(0, 0), Segment(10, 2)], 15, True)
    assert (shut.opens_at(0), shut.opens_at(12), shut.opens_at(16)) == (10, 12, 25)
    assert Trace([Segment(0, 2), Segment(10, 0)], 15, False).opens_at(11) is None


def test_facts_of_a_link_are_a_line() -> None:
    wan: Any = scenario(FULL).links["wan"]
    assert ", ".join(links.facts(wan)) == (
        "a>b 80 Mbit/s, b>a 8 Mbit/s, 20 ms, jitter 2 ms, loss 1 %, cubic, 2 streams"
    )
    assert links.facts(scenario("profile: metro").links["wan"]) == ["metro"]
    assert Profile("").facts() == []


# -- whole runs ------------------------------------------------------------------------------------


def test_a_run_over_tcp_repeats_and_says_how_its_links_were_met(tmp_path: Path) -> None:
    """Answers, order and accounts are held by the invariants that every run checks."""
    wan = (
        "rate: 20 Mbit/s, delay: 10 ms, jitter: {deviation: 1 ms, shape: uniform}, tcp: cubic, "
        "streams: 2, loss: 2 %, priority: control, outages: [{at: 300 ms, for: 200 ms}]"
    )
    events = []
    for out in (tmp_path / "one", tmp_path / "two"):
        run = Run(scenario(wan), out=out)
        run.prepare()
        run.execute().raise_for_status()
        events.append((out / "events.jsonl").read_bytes())
    assert events[0] == events[1]
    found = json.loads((tmp_path / "one" / "summary.json").read_text())["links"]
    there = found["wan"]["directions"]["a>b"]
    assert there["segments"]["lost"] > 0
    assert there["segments"]["resent"] >= there["segments"]["lost"]
    assert there["delay_s"]["mean"] == pytest.approx(0.01, rel=0.1)
    assert there["delay_s"]["deviation"] == pytest.approx(0.001, rel=0.6)
    assert "segments" not in found["rdma"]["directions"]["a>a"]  # nothing but what was set
