"""The monitor: sound runs are silent, and every planted fault is caught by its own name.

Faults are planted in the real classes of a running cluster, so that what is tested is the whole way
from the mistake to its name: the pool's journal, the events, the ledgers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.errors import RunFailed
from pddrt.invariants import Monitor, Violation
from pddrt.kv.memory import KVMemory
from pddrt.kv.pages import PagePool
from pddrt.kv.radix import RadixCache
from pddrt.ledger import Positions
from pddrt.messages import KVAssembly
from pddrt.netem.link import Link
from pddrt.policy.handoff import CatchUp, Overlap
from pddrt.policy.route import Naive
from pddrt.protocol import MainSide, RelaySide, SendIds, State
from pddrt.roles.client import Client
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import Gateway
from pddrt.roles.prefill import Prefill
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.trace import Event
from pddrt.types import MS, SECOND, Drawn
from pddrt.workload import Session, Turn

from .cluster import Cluster, many, one
from .test_handoff import Wavering, paced

TEXT = "p" * 200
Patch = pytest.MonkeyPatch


# -- planted faults --------------------------------------------------------------------------------


def wrapped(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """`owner.name(...)` becomes `around(the original, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def free_twice(patch: Patch) -> None:
    def release(original: Any, pool: PagePool, owner: str) -> int:
        pages = pool.pages_of(owner)
        freed = int(original(pool, owner))
        if pool._journal is None:  # what the gateway guesses
            return freed
        pool._owned[owner] = dict.fromkeys(pages)
        return freed + int(original(pool, owner))

    wrapped(patch, PagePool, "release", release)


def free_under_a_writer(patch: Patch) -> None:
    """Pins are forgotten: whoever ends while it is stepped takes its pages away at once."""
    patch.setattr(PagePool, "pin", lambda pool, owner: None)
    patch.setattr(PagePool, "unpin", lambda pool, owner: 0)


def leak_on_abort(patch: Patch) -> None:
    def end(original: Any, decoder: Decoder, entry: Any) -> None:
        if entry.side.ids:
            original(decoder, entry)
        else:
            del decoder._entries[entry.request]
            entry.lease.cancel()

    wrapped(patch, Decoder, "_end", end)


def leak_a_page(patch: Patch) -> None:
    def give_back(original: Any, pool: PagePool, owner: str) -> Any:
        if len(pool._owned[owner]) > 1:
            pool._owned[owner].popitem()
        return original(pool, owner)

    wrapped(patch, PagePool, "_give_back", give_back)


def lose_a_lock(patch: Patch) -> None:
    """The request's lock is let go at once, while it reads on: the cache may evict its prefix."""

    def unlocked(original: Any, memory: KVMemory, request: str, *args: Any) -> Any:
        done = original(memory, request, *args)
        if memory.holds(request) and memory.tail(request) is None:
            holding, cache = memory.holding(request), memory.cache
            cache.unlock(holding.lock)
            holding.lock = cache.lock(cache.match([]), request)
        return done

    wrapped(patch, KVMemory, "reserve", unlocked)
    wrapped(patch, KVMemory, "keep", unlocked)


def forget_to_unlock(patch: Patch) -> None:
    def forget(original: Any, memory: KVMemory, request: str, used: int) -> int:
        return memory._holdings.pop(request).own

    wrapped(patch, KVMemory, "_forget", forget)


def hand_a_page_to_two(patch: Patch) -> None:
    def take(original: Any, pool: PagePool, wanted: int, near: int | None = None) -> list[int]:
        taken: list[int] = original(pool, wanted, near)
        others = [p for owner, pages in pool._owned.items() if owner[0] == "s" for p in pages]
        return [*others[:1], *taken[1:]] if taken and others else taken

    wrapped(patch, PagePool, "_take", take)


def evict_what_is_locked(patch: Patch) -> None:
    """As if no lock held anything: pages that somebody reads go first."""

    def evict(original: Any, cache: RadixCache, pages: int) -> int:
        busy = [n for n in cache._root.all()[1:] if n.busy and not n.children]
        for node in busy[:1] if pages > 0 else ():
            cache.pool.release_pages("(cache)", [node.page])
        return int(original(cache, pages))

    wrapped(patch, RadixCache, "evict", evict)


def write_into_the_cache(patch: Patch) -> None:
    """The last page is given away although the answer goes on in it."""
    patch.setattr(KVMemory, "whole", lambda memory, tokens: tokens)


def send_before_it_is_computed(patch: Patch) -> None:
    patch.setattr(Prefill, "_sendable", lambda _p, entry: entry.limits.prompt_len)


def send_twice(patch: Patch) -> None:
    async def again(original: Any, p: Prefill, entry: Any, transfer: Any, conn: Any) -> None:
        before = transfer.sent
        await original(p, entry, transfer, conn)
        if before == 0:
            transfer.sent = before
            await original(p, entry, transfer, conn)

    wrapped(patch, Prefill, "_send_next", again)


def take_twice(patch: Patch) -> None:
    patch.setattr(KVAssembly, "claim", _claim_anything)

    def on_kv(original: Any, decoder: Decoder, conn: Any, frame: Any) -> None:
        original(decoder, conn, frame)
        original(decoder, conn, frame)

    wrapped(patch, Decoder, "on_kv", on_kv)


def _claim_anything(kv: KVAssembly, start: int, end: int) -> None:
    if end == kv.length:
        kv._missing = []


def send_what_is_there(patch: Patch) -> None:
    """P sends all, whatever the decoder says it has."""

    def on_admit(original: Any, p: Prefill, conn: Any, frame: Any) -> None:
        original(p, conn, frame)
        if found := p._find(conn, frame):
            found[1].sent = 0

    wrapped(patch, Prefill, "on_admit", on_admit)


def decode_before_it_is_whole(patch: Patch) -> None:
    patch.setattr(KVAssembly, "whole", property(lambda kv: kv._missing != [(0, kv.length)]))


def decode_before_the_last_ids(patch: Patch) -> None:
    def start(original: Any, side: MainSide) -> Any:
        if side.kv.whole and side.relayed:
            side.ids = [1]
            return side._decode()
        return original(side)

    wrapped(patch, MainSide, "_start", start)


def relay_goes_on(patch: Patch) -> None:
    def hand_over(original: Any, side: RelaySide) -> Any:
        actions, state = original(side), side.state
        side.state = state.DECODING
        return actions

    wrapped(patch, RelaySide, "_hand_over", hand_over)


def lose_an_id_between_pieces(patch: Patch) -> None:
    def send(original: Any, d: Decoder, entry: Any, action: SendIds) -> None:
        original(d, entry, action if action.last else replace(action, start=action.start + 1))

    wrapped(patch, Decoder, "_send_ids", send)


def send_an_id_that_nobody_made(patch: Patch) -> None:
    def send(original: Any, d: Decoder, entry: Any, action: SendIds) -> None:
        original(d, entry, replace(action, ids=(*action.ids, 7)) if action.last else action)

    wrapped(patch, Decoder, "_send_ids", send)


def draw_over_a_piece(patch: Patch) -> None:
    def go_on(original: Any, d: Decoder, entry: Any, *rest: Any, **about: Any) -> None:
        original(d, entry, *rest, **about)
        entry.seq.sampling = entry.manifest.sampling

    wrapped(patch, Decoder, "_go_on", go_on)


def relay_goes_on_although_it_was_passed(patch: Patch) -> None:
    def end(original: Any, decoder: Decoder, entry: Any) -> None:
        if isinstance(entry.side, RelaySide) and entry.side.bound and entry.side.next < 300:
            entry.side.state, entry.side.bound = State.FOLLOWED, 1000
        else:
            original(decoder, entry)

    wrapped(patch, Decoder, "_end", end)


def keep_kv_of_ids_given_up(patch: Patch) -> None:
    def catch_up(original: Any, side: MainSide) -> Any:
        return [replace(action, kept=len(side.ids)) for action in original(side)]

    wrapped(patch, MainSide, "_catch_up", catch_up)


def give_up_the_pieces(patch: Patch) -> None:
    def decode(original: Any, side: MainSide) -> Any:
        return [replace(action, kept=0) for action in original(side)]

    wrapped(patch, MainSide, "_decode", decode)


def take_more_than_was_sent(patch: Patch) -> None:
    def on_ids(original: Any, side: MainSide, start: int, ids: list[int], last: bool) -> Any:
        return original(side, start, [*ids, 5], last)

    wrapped(patch, MainSide, "on_ids", on_ids)


def forget_what_it_was_told(patch: Patch) -> None:
    """It goes on behind ids that it does not have."""

    def go_on(original: Any, d: Decoder, entry: Any, ids: Any, *rest: Any, **about: Any) -> None:
        more = [5] if isinstance(entry.side, MainSide) else []
        original(d, entry, [*ids, *more], *rest, **about)
        entry.side.ids += more

    emit = ev.Trace.emit

    def less(trace: ev.Trace, event: Event) -> None:
        if isinstance(event, ev.HandoffTaken):
            event = replace(event, end=event.end - 1)
        emit(trace, event)

    patch.setattr(ev.Trace, "emit", less)
    wrapped(patch, Decoder, "_go_on", go_on)


def token_of_another(patch: Patch) -> None:
    def deliver(
        original: Any, d: Decoder, entry: Any, position: int, token: int, source: str, after: int
    ) -> None:
        original(d, entry, position, token, "M" if source == "R" else source, after)

    wrapped(patch, Decoder, "_deliver", deliver)


def token_that_nobody_made(patch: Patch) -> None:
    def deliver(
        original: Any, d: Decoder, entry: Any, position: int, drawn: Drawn, source: str, after: int
    ) -> None:
        original(d, entry, position, Drawn((drawn.token + 1) % 256), source, after)

    wrapped(patch, Decoder, "_deliver", deliver)


def exceed_the_budget(patch: Patch) -> None:
    patch.setattr("pddrt.protocol.finish", lambda limits, position, token: None)


def lose_bytes(patch: Patch) -> None:
    """A quarter of each piece is booked as if it had been all."""
    emit = ev.Trace.emit

    def less(trace: ev.Trace, event: Event) -> None:
        if isinstance(event, ev.KVReceived):
            event = ev.KVReceived(event.t, event.request, event.instance, event.start, event.end,
                                  event.bytes * 3 // 4)  # fmt: skip
        emit(trace, event)

    patch.setattr(ev.Trace, "emit", less)


def end_twice(patch: Patch) -> None:
    def end(original: Any, client: Client, request: str, *about: Any) -> None:
        original(client, request, *about)
        client._calls[request].reason = ""
        original(client, request, *about)

    wrapped(patch, Client, "_end", end)


def end_by_length_too_soon(patch: Patch) -> None:
    def pass_on(original: Any, g: Gateway, stream: Any, passed: Any) -> None:
        original(g, stream, passed)
        if stream.request in g._streams and passed.position >= stream.limits.prompt_len + 3:
            g._close(stream, "length", "")

    wrapped(patch, Gateway, "_pass_on", pass_on)


def carry_more_than_the_rate(patch: Patch) -> None:
    """A link that counts every byte as half a byte."""
    push = Link.push

    def half(link: Link, now: int, flow: Any, nbytes: int, *rest: Any) -> Any:
        return push(link, now, flow, nbytes // 2, *rest)

    patch.setattr(Link, "push", half)


def stamp_with_an_old_time(patch: Patch) -> None:
    def on_answer(original: Any, client: Client, conn: Any, frame: Any) -> None:
        now, client.env.now = client.env.now, lambda: 1  # type: ignore[method-assign]
        try:
            original(client, conn, frame)
        finally:
            client.env.now = now  # type: ignore[method-assign]

    wrapped(patch, Client, "on_answer", on_answer)


def ttft_stamped_again(patch: Patch) -> None:
    """On every token, as by a resume that overwrites."""
    from pddrt.metrics import RequestRecord

    patch.setattr(RequestRecord, "ttft", property(lambda r: r.times[-1] - r.sent))

    def legs(original: Any, record: Any) -> Any:
        found = original.__get__(record)
        return found and {
            **found,
            "delivery": found["delivery"] + record.times[-1] - record.times[0],
        }

    wrapped_legs = RequestRecord.legs
    patch.setattr(RequestRecord, "legs", property(lambda r: legs(wrapped_legs, r)))


def cancel_all(after: int) -> Callable[[Deployment], Awaitable[None]]:
    async def cancel(deployment: Deployment) -> None:
        await deployment.env.sleep(after * MS)
        deployment.client.stop()

    return cancel


def relayed() -> None:
    Cluster().play([one(TEXT, 120)])


def in_pieces() -> None:
    paced(CatchUp(6, 8, 9)).play([one(TEXT, 160)])


def overlapped() -> None:
    paced(Overlap(6, 8, 9)).play([one(TEXT, 160)])


def wavering() -> None:
    paced(Overlap(6, 8, 9), main_engine=Wavering).play(many(3, 200, 160, every=20 * MS))


def cancelled(after: int) -> Callable[[], None]:
    def run() -> None:
        Cluster(rate=400_000, pages=80).play(many(4, 150, 60, every=15 * MS), cancel_all(after))

    return run


def turns() -> None:
    """Three conversations whose caches do not fit together."""
    sessions = [
        Session(i, i * 7 * MS, tuple(Turn(f"{i}{n}" * 40, 12, 40 * MS) for n in range(5)))
        for i in range(3)
    ]
    Cluster(pages=24, page_tokens=16, policy=Naive()).play(sessions)


def uncached() -> None:
    Cluster(caching=False).play([one(TEXT, 120)])


def cancelled_uncached() -> None:
    cluster = Cluster(rate=400_000, pages=80, caching=False)
    cluster.play(many(4, 150, 60, every=15 * MS), cancel_all(60))


def crowd() -> None:
    """A long answer over a cached prompt, while others need the room that its prefix takes."""
    early, later = (Session(i, i * SECOND, (Turn("x" * 160, n),)) for i, n in ((0, 10), (1, 400)))
    others = [Session(i, 1200 * MS + i * 60 * MS, (Turn(f"{i}" * 100, 5),)) for i in range(2, 10)]
    Cluster(pages=48, policy=Naive()).play([early, later, *others])


def again() -> None:
    """The same prompt twice: all of it is cached the second time."""
    Cluster().play([Session(i, i * SECOND, (Turn(TEXT, 10),)) for i in range(2)])


Fault = tuple[Callable[[Patch], None], Callable[[], None], str]
FAULTS: dict[str, Fault] = {
    "free twice": (free_twice, uncached, "a page freed twice"),
    "free under a writer": (free_under_a_writer, cancelled_uncached, "pages freed under a writer"),
    "leak on abort": (leak_on_abort, cancelled(60), "pages never came back"),
    "leak a page": (leak_a_page, uncached, "freed is not what was allocated"),
    "lock lost": (lose_a_lock, crowd, "a page evicted while locked"),
    "lock never undone": (forget_to_unlock, turns, "a lock was lost"),
    "page handed to two": (hand_a_page_to_two, turns, "a page handed to two"),
    "evicted while locked": (evict_what_is_locked, turns, "a page evicted while locked"),
    "kept under a writer": (free_under_a_writer, cancelled(60), "pages kept under a writer"),
    "send before computed": (send_before_it_is_computed, relayed, "KV sent before it was computed"),
    "sent twice": (send_twice, relayed, "KV sent twice"),
    "range doubled": (take_twice, relayed, "KV received twice"),
    "prefix sent too": (send_what_is_there, again, "KV sent that the decoder has"),
    "decode before whole": (decode_before_it_is_whole, relayed, "decode before the KV is whole"),
    "decode before ids": (decode_before_the_last_ids, relayed, "decode before the last ids"),
    "relay goes on": (relay_goes_on, relayed, "the relay goes on after the handoff"),
    "ids before told": (decode_before_the_last_ids, overlapped, "decode before the last ids"),
    "id lost between": (lose_an_id_between_pieces, in_pieces, "the handoff does not join"),
    "id of nobody": (send_an_id_that_nobody_made, in_pieces, "ids handed over that nobody made"),
    "draw over a piece": (draw_over_a_piece, in_pieces, "decode before the last ids"),
    "relay goes on passed": (
        relay_goes_on_although_it_was_passed,
        overlapped,
        "the relay goes on after the handoff",
    ),
    "KV given up is kept": (keep_kv_of_ids_given_up, wavering, "a step on KV that is not there"),
    "pieces given up": (give_up_the_pieces, in_pieces, "given up what nobody doubts"),
    "more than was sent": (take_more_than_was_sent, relayed, "ids taken that nobody handed over"),
    "ids skipped": (forget_what_it_was_told, relayed, "the handoff does not join"),
    "token of another": (token_of_another, relayed, "a token that nobody made"),
    "token of nobody": (token_that_nobody_made, relayed, "a token that nobody made"),
    "budget exceeded": (exceed_the_budget, relayed, "more tokens than the budget"),
    "bytes lost": (lose_bytes, relayed, "bytes in are not bytes out"),
    "two ends": (end_twice, relayed, "ended twice"),
    "too short": (end_by_length_too_soon, relayed, "an answer ended by length before its length"),
    "link too fast": (carry_more_than_the_rate, relayed, "more than the link's rate"),
    "time runs backwards": (stamp_with_an_old_time, relayed, "time runs backwards"),
    "TTFT stamped again": (ttft_stamped_again, relayed, "the legs of TTFT do not add up"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_its_name(fault: str, monkeypatch: Patch) -> None:
    plant, play, name = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        play()
    assert caught.value.name == name
    assert 1 <= len(caught.value.events) <= 12


@pytest.mark.parametrize("play", dict.fromkeys(run for _, run, _ in FAULTS.values()))
def test_without_the_fault_the_same_run_is_silent(play: Callable[[], None]) -> None:
    play()


# -- whole runs ------------------------------------------------------------------------------------

SCENARIO = """
name: broken
clock: {clock}
model: tiny
links:
  wan: {{between: [a, b], rate: 8 Mbit/s, delay: 5 ms}}
instances:
  p0:  {{role: prefill, site: a, kv_memory: 4 MiB, threads: 1, step_time: chip, chip: &c {{flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}}}}
  md0: {{role: main, site: b, kv_memory: 4 MiB, threads: 1, step_time: chip, chip: *c}}
pipeline: {{policy: naive}}
workload: {{kind: poisson, requests: 3, rate: 20/s, output_tokens: 20, prompts: random,
           prompt_tokens: 40}}
"""  # noqa: E501


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_violation_ends_the_run_by_name(clock: str, tmp_path: Path, monkeypatch: Patch) -> None:
    token_that_nobody_made(monkeypatch)
    run = Run(parse(SCENARIO.format(clock=clock), "x.yaml", ()), out=tmp_path / "run")
    run.prepare()
    result = run.execute()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["invariants"]
    (violation,) = found["violations"]
    assert violation.startswith("a token that nobody made: s")
    assert found["checked"] > 10
    assert json.loads(found["led_to"][-1])["event"] == "TokensReceived"
    assert summary["requests"]["finished"] == 0, "it ended at once"
    with pytest.raises(RunFailed, match="violated: a token that nobody made"):
        result.raise_for_status()


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_sound_run_says_how_much_was_checked(clock: str, tmp_path: Path) -> None:
    run = Run(parse(SCENARIO.format(clock=clock), "x.yaml", ()), out=tmp_path / "run")
    run.prepare()
    result = run.execute()
    result.raise_for_status()
    found = result.summary["invariants"]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert (found["violations"], found["led_to"]) == ([], [])
    assert found["checked"] == len(lines)


# -- the monitor by itself -------------------------------------------------------------------------


def judged(events: Iterable[Event]) -> list[str]:
    """The name of what is wrong with a story, if anything."""
    found: list[Violation] = []
    monitor = Monitor(found.append)
    for event in events:
        monitor(event)
    monitor.finish()
    assert found == monitor.violations[: len(found)]
    return [v.name for v in found]


def test_positions_are_a_set() -> None:
    rng = random.Random(5)
    for _ in range(200):
        mine, theirs = Positions(), set[int]()
        for _ in range(12):
            start, end = sorted(rng.choices(range(30), k=2))
            assert mine.covers(start, end) == (set(range(start, end)) <= theirs)
            assert mine.meets(start, end) == bool(set(range(start, end)) & theirs)
            mine.add(start, end)
            theirs.update(range(start, end))
            if rng.random() < 0.2:
                end = rng.randrange(30)
                mine.cut(end)
                theirs = {p for p in theirs if p < end}
        gap = next((p for p in range(30) if p not in theirs), 30)
        assert mine.missing(30).startswith(f"[{gap}, ")


def transfer(*pieces: tuple[int, int], rate: int | None = 1000) -> list[Event]:
    """Two instances joined by a link of 1,000 B/s; pieces of 100 B, (sent, received) in ms."""
    events: list[Event] = [
        ev.RunStarted(0, "x", 1, "virtual"),
        ev.InstanceStarted(0, "p0", "prefill", "a", 64, 16),
        ev.InstanceStarted(0, "md0", "main", "b", 64, 16),
        ev.LinkRate(0, "wan", ("a", "b"), rate),
        ev.RequestSent(0, "r", 0, 0, "x"),
        ev.Routed(0, "r", "P-MD", "p0", None, "md0", 100, 5, None, ""),
        ev.PagesTaken(0, "p0", "r", ((0, 7),)),
        ev.PageTable(0, "p0", "r", ((0, 7),), 100),
        ev.PagesTaken(0, "md0", "r", ((0, 7),)),
        ev.PageTable(0, "md0", "r", ((0, 7),), 0),
        ev.Admitted(0, "r", "md0", 7, 0, 0),
    ]
    moved: list[Event] = []
    for at, (sent, received) in enumerate(pieces):
        moved.append(ev.KVSent(sent * MS, "r", "p0", "md0", at, at + 1, 100))
        moved.append(ev.KVReceived(received * MS, "r", "md0", at, at + 1, 100))
    end: list[Event] = [
        ev.Finished(SECOND, "r", "aborted", 0, ""),
        ev.PagesFreed(SECOND, "p0", "r", ((0, 7),), True),
        ev.PagesFreed(SECOND, "md0", "r", ((0, 7),), True),
    ]
    return [*events, *sorted(moved, key=lambda e: e.t), *end]


FASTER = ["more than the link's rate"]


def test_a_link_at_its_very_rate_is_silent_and_two_milliseconds_less_is_not() -> None:
    assert judged(transfer((0, 100), (0, 200), (0, 300))) == []
    assert judged(transfer((0, 100), (0, 200), (0, 298))) == FASTER


def test_an_idle_link_saves_up_nothing() -> None:
    assert judged(transfer((0, 100), (500, 600), (500, 700))) == []
    assert judged(transfer((0, 100), (500, 600), (500, 690))) == FASTER


def test_an_unlimited_link_may_do_anything() -> None:
    assert judged(transfer((0, 0), (0, 1), (1, 1), rate=None)) == []


def test_a_rate_that_falls_holds_from_then_on() -> None:
    story = transfer((0, 100), (0, 200), (0, 300))
    at = next(i for i, e in enumerate(story) if e.t >= 150 * MS)
    slower = ev.LinkRate(150 * MS, "wan", ("a", "b"), 500)
    assert judged([*story[:at], slower, *story[at:]]) == FASTER
    late = transfer((0, 100), (0, 250), (0, 450))
    assert judged([*late[:at], slower, *late[at:]]) == []


def test_what_was_under_way_when_a_link_was_limited_may_still_arrive() -> None:
    story = transfer((0, 100), (0, 101), (120, 170), rate=None)
    at = next(i for i, e in enumerate(story) if e.t >= 100 * MS)
    limit = ev.LinkRate(100 * MS, "wan", ("a", "b"), 1000)
    assert judged([*story[:at], limit, *story[at:]]) == FASTER
    late = transfer((0, 100), (0, 101), (120, 220), rate=None)
    assert judged([*late[:at], limit, *late[at:]]) == []


def test_a_total_above_what_the_rate_allows_is_told() -> None:
    def total(bytes_: int) -> list[Event]:
        link = ev.LinkTotal(SECOND, "wan", "a", "b", bytes_, bytes_, 0, SECOND, 1, 0, 0)
        return [*transfer((0, 100)), link]

    assert judged(total(1001)) == []
    assert judged(total(1002)) == FASTER


def test_what_is_open_at_the_end_is_told_all_together() -> None:
    found: list[Violation] = []
    monitor = Monitor(found.append)
    for event in transfer((0, 100))[:-3]:
        monitor(event)
    monitor.finish()
    assert [str(v) for v in monitor.violations] == [
        "a request never ended: r",
        "pages never came back: p0: 7 pages of r",
        "pages never came back: md0: 7 pages of r",
    ]
    assert found == monitor.violations[:1]


def test_a_violation_tells_the_last_events_of_its_request_and_is_the_only_one() -> None:
    story = transfer(*[(0, 100 * n) for n in range(1, 9)])
    story[-3:] = [ev.Finished(SECOND, "r", "length", 0, "")] * 2
    found: list[Violation] = []
    past: list[Event] = []
    monitor = Monitor(found.append, past)
    for event in story:
        past.append(event)
        monitor(event)
    (violation,) = found
    assert violation.name == "an answer ended by length before its length"
    assert len(violation.events) == 12
    assert violation.events[-1] is story[-2]
    assert monitor.report()["led_to"][-1] == ev.to_line(story[-2])
