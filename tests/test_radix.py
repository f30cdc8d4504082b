"""RadixCache: a hit is KV of exactly those tokens, and stays so for as long as its lock lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from pddrt.kv.pages import PoolCorrupt
from pddrt.kv.radix import CACHE, CacheCorrupt, prefix_digest
from tests.kvlab import Ids, Lab, Request, sequence

SIZES = [1, 16, 64]


# -- hits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_hit_ends_at_every_offset_in_a_page(size: int) -> None:
    lab, ids = Lab(8, size), sequence(2 * size + size // 2 + 1)
    lab.serve("first", ids)
    for n in range(len(ids) + 1):
        other = (*ids[:n], 5000, *ids[n + 1 :])
        hit = lab.cache.match(other)
        assert hit.tokens == lab.cache.peek(other) == n
        assert len(hit.pages) == n // size
        lab.must_serve(hit, other)


@pytest.mark.parametrize("size", SIZES)
def test_no_hit_is_longer_than_its_limit(size: int) -> None:
    lab, ids = Lab(8, size), sequence(3 * size)
    lab.serve("first", ids)
    for limit in range(len(ids) + 1):
        hit = lab.cache.match(ids, limit)
        assert hit.tokens == limit
        lab.must_serve(hit, ids)


@pytest.mark.parametrize("size", [16, 64])
def test_of_pages_that_part_in_their_middle_the_longest_match_is_taken(size: int) -> None:
    lab, ids = Lab(2 * size, size), sequence(2 * size)
    for n in range(size):
        lab.serve(f"r{n}", (*ids[: size + n], 5000 + n, *ids[size + n + 1 :]))
    lab.check()
    for n in range(size):
        mine = (*ids[: size + n], 5000 + n, 9999)
        hit = lab.cache.match(mine)
        assert hit.tokens == size + n + 1
        lab.must_serve(hit, mine)
    assert len(lab.cache) == 1 + size


@pytest.mark.parametrize("size", SIZES)
def test_f28_two_sequences_append_behind_a_shared_partial_page_at_every_offset(size: int) -> None:
    for n in range(1, 2 * size + 1):
        lab, ids = Lab(16, size), sequence(n)
        lab.serve("root", ids)
        a, b = (*ids, *sequence(size + 1, 2)), (*ids, *sequence(size + 1, 3))
        left, right = lab.begin("left", a), lab.begin("right", b)
        assert left is not None
        assert right is not None
        assert left.computed == right.computed == n
        for step in range(n, n + size + 1):
            lab.compute(left, step + 1)
            lab.compute(right, step + 1)
        lab.end(left)
        lab.end(right)
        lab.check()
        for done in (a, b):
            hit = lab.cache.match(done)
            assert hit.tokens == len(done)
            lab.must_serve(hit, done)


def test_f25_digests_are_the_same_in_every_process() -> None:
    program = (
        "from pddrt.kv.radix import prefix_digest as d;"
        "print([d('model', size, range(40)) for size in (1, 16, 64)], d('other', 16, []))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    here = [prefix_digest("model", size, range(40)) for size in SIZES]
    assert said == {f"{here} {prefix_digest('other', 16, [])}\n"}


def test_f25_equal_pages_behind_different_prefixes_have_different_digests_and_kv() -> None:
    lab = Lab(8, 4)
    same = (7, 7, 7, 7)
    prefixes: list[Ids] = [(), (1, 2, 3, 4), (7, 7, 7, 7), (1, 2, 3, 4, 5, 6, 7, 8)]
    for n, prefix in enumerate(prefixes):
        lab.serve(f"r{n}", prefix + same)
    names = {lab.cache.digest_at(prefix + same, len(prefix) + 4) for prefix in prefixes}
    assert len(names) == len(prefixes)
    assert prefix_digest("model", 4, same) != prefix_digest("other", 4, same)
    for prefix in prefixes:
        hit = lab.cache.match(prefix + same)
        assert hit.tokens == len(prefix) + 4
        lab.must_serve(hit, prefix + same)
    assert lab.cache.peek((9, 9, 9, 9, *same)) == 0


# -- locks and eviction ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_f26_a_matched_prefix_cannot_be_evicted_before_it_is_used(size: int) -> None:
    lab, ids = Lab(8, size), sequence(2 * size + size // 2 + 1)
    lab.serve("first", ids)
    lab.serve("other", sequence(size, 2))
    got = lab.cache.reserve("second", ids, len(ids) + 1)
    assert got is not None
    assert lab.cache.evict(99) == 1, "only what nobody holds"
    lab.admitted("second", ids, got)
    lab.check()


def test_f26_a_hit_that_was_not_locked_in_time_is_refused() -> None:
    lab, ids = Lab(4, 4), sequence(8)
    lab.serve("first", ids)
    for wanted in (ids, ids[:7]):
        hit = lab.cache.match(wanted)
        assert hit.tokens
        lab.cache.evict(1)
        lab.pool.allocate("second", 0)
        with pytest.raises(CacheCorrupt, match="evicted before it was locked"):
            lab.cache.lock(hit, "second")
        lab.pool.release("second")
        lab.cache.evict(99)
        lab.serve("again", ids)
    lab.check()


def test_the_tail_is_locked_until_it_is_copied() -> None:
    lab, ids = Lab(4, 4), sequence(6)
    lab.serve("first", ids)
    lab.pool.allocate("second", 0)
    lock = lab.cache.lock(lab.cache.match((*ids[:5], 5000)), "second")
    assert (lab.cache.evictable, lab.cache.evict(2)) == (0, 0)
    lab.cache.unlock_tail(lock)
    assert (lab.cache.evictable, lab.cache.evict(2)) == (1, 1)
    lab.cache.unlock(lock)
    assert (lab.cache.evictable, lab.cache.evict(2)) == (1, 1)


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    lab, shared = Lab(16, 2), (1, 2)
    for name, last in (("a", 10), ("b", 20), ("c", 30)):
        lab.serve(name, (*shared, last, last))
    lab.serve("a again", (*shared, 10, 10, 11))
    assert lab.cache.peek((*shared, 20, 20)) == 4, "asking is no use of it"
    lab.cache.match((*shared, 20, 20))
    left = []
    while lab.cache.evict(1):
        lab.check()
        left.append([lab.cache.peek((*shared, n, n, n + 1)) for n in (10, 20, 30)])
    assert left == [[5, 2, 4], [5, 2, 2], [4, 2, 2], [2, 2, 2], [0, 0, 0]]


def test_a_parent_is_as_old_as_the_youngest_page_that_was_below_it() -> None:
    lab = Lab(16, 2)
    lab.serve("a", (1, 1))
    lab.serve("b", (2, 2))
    lab.serve("a longer", (1, 1, 3))
    assert lab.cache.evict(2) == 2
    assert (lab.cache.peek((1, 1, 3)), lab.cache.peek((2, 2))) == (2, 0)


def test_pages_that_are_gone_do_not_pile_up_in_the_order_of_eviction() -> None:
    lab, ids = Lab(4, 512), sequence(500)
    lab.serve("other", sequence(1, 2))
    for n in range(1, 500):
        lab.serve(f"r{n}", ids[:n])
    assert (len(lab.cache), lab.cache.stats.superseded_pages) == (2, 498)
    assert len(lab.cache._leaves) < 100
    lab.check()
    lab.cache.evict(1)
    assert (lab.cache.peek(sequence(1, 2)), lab.cache.peek(ids)) == (0, 499)


def test_pages_given_while_decoding_goes_on_are_locked_with_the_rest() -> None:
    lab, ids = Lab(8, 4), sequence(14)
    request = lab.begin("r", ids)
    assert request is not None
    for end in (6, 9, 14):
        lab.compute(request, end)
        lab.share(request)
        assert lab.cache.evict(99) == 0
        assert lab.cache.peek(ids) == end // 4 * 4
        lab.must_hold(request.table, ids[:end])
        lab.check()
    assert len(lab.pool.pages_of("r")) == 1
    lab.end(request)
    assert lab.cache.evict(99) == 4
    lab.check()


# -- capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_one_page_short_changes_nothing_and_one_more_fits(size: int) -> None:
    lab, ids = Lab(6, size), sequence(2 * size)
    lab.serve("old", sequence(2 * size, 2))
    lab.serve("first", ids)
    assert lab.begin("running", sequence(size, 3)) is not None
    before = (lab.pool.free, lab.pool.owners, lab.cache.evictable, lab.cache.stats.evicted_pages)
    assert before[0::2] == (1, 4)
    assert lab.cache.reserve("second", ids, 5 * size + 1) is None
    after = (lab.pool.free, lab.pool.owners, lab.cache.evictable, lab.cache.stats.evicted_pages)
    assert before == after
    got = lab.cache.reserve("second", ids, 5 * size)
    assert got is not None
    assert (got.hit.tokens, len(got.table), lab.pool.free, lab.cache.evictable) == (
        2 * size,
        5,
        0,
        0,
    )
    lab.check()


def test_no_more_is_evicted_than_is_missing() -> None:
    lab = Lab(6, 4)
    for n in range(5):
        lab.serve(f"r{n}", (n,))
    assert lab.cache.make_room(3)
    assert (lab.pool.free, len(lab.cache)) == (3, 3)
    assert not lab.cache.make_room(7)
    assert (lab.pool.free, len(lab.cache)) == (3, 3)


def test_a_request_that_needs_the_whole_pool_is_not_kept_out_by_its_own_tail() -> None:
    lab, ids = Lab(4, 4), sequence(14)
    lab.serve("first", ids[:6])
    got = lab.cache.reserve("second", ids, 16)
    assert got is not None
    assert (got.hit.tokens, got.hit.tail) == (4, None)
    lab.check()


def test_own_pages_go_on_in_the_run_of_the_shared_ones() -> None:
    lab, ids = Lab(16, 4), sequence(8)
    lab.pool.allocate("before", 3)
    lab.serve("first", ids)
    lab.pool.release("before")
    got = lab.cache.reserve("second", ids, 20)
    assert got is not None
    assert got.table == (3, 4, 5, 6, 7), "though pages 0 to 2 are the smaller hole"


# -- taking pages in -------------------------------------------------------------------------------


def test_f7_a_prefix_that_was_there_already_leaks_no_page() -> None:
    lab, ids = Lab(12, 4), sequence(10)
    lab.serve("first", ids)
    for n in range(40):
        mine = (*ids[: n % 11], *sequence(n % 7 + 1, n))
        request = lab.begin(f"r{n}", mine, room=n % 5)
        assert request is not None
        lab.compute(request, request.computed + (len(mine) - request.computed) * (n % 3) // 2)
        if n % 2:
            lab.share(request)
        lab.end(request, keep=n % 4 != 0)
        lab.check()
        assert lab.pool.owners == (CACHE,)
        assert lab.pool.free + lab.cache.evictable == lab.pool.num_pages
    lab.cache.evict(lab.cache.evictable)
    assert lab.pool.free == lab.pool.num_pages
    lab.check()


def test_what_another_request_inserted_meanwhile_stays_with_the_second() -> None:
    lab, ids = Lab(12, 4), sequence(11)
    one, two = lab.begin("one", ids), lab.begin("two", ids)
    assert one is not None
    assert two is not None
    lab.compute(one, 10)
    lab.compute(two, 11)
    first = lab.cache.insert(ids[:10], one.table, "one", one.lock)
    assert (first.taken, first.duplicates) == (one.table, ())
    second = lab.cache.insert(ids[:9], two.table, "two", two.lock)
    assert (second.taken, second.duplicates) == ((), two.table)
    assert second.lock is not None
    third = lab.cache.insert(ids, two.table, "two", second.lock)
    assert (third.taken, third.duplicates) == (two.table[2:], two.table[:2])
    lab.check()


def test_a_longer_partial_page_replaces_a_shorter_one_unless_that_is_locked() -> None:
    lab, ids = Lab(12, 8), sequence(8)
    lab.serve("a", ids[:3])
    lab.serve("b", ids[:5])
    assert (len(lab.cache), lab.cache.stats.superseded_pages) == (1, 1)
    lab.pool.allocate("reader", 0)
    lock = lab.cache.lock(lab.cache.match(ids[:4]), "reader")
    lab.serve("c", ids[:7])
    assert (len(lab.cache), lab.cache.peek(ids)) == (2, 7)
    lab.check()
    lab.cache.unlock(lock)
    lab.serve("d", ids)
    assert (len(lab.cache), lab.cache.peek(ids)) == (1, 8), "the whole page replaces both"
    lab.check()


def test_inserting_the_same_again_keeps_the_lock_on_the_page_that_is_read() -> None:
    lab, ids = Lab(4, 4), sequence(6)
    request = lab.begin("r", ids)
    assert request is not None
    lab.compute(request, 6)
    for _ in range(2):
        done = lab.cache.insert(ids, request.table, "r", request.lock)
        assert done.lock is not None
        request.lock = done.lock
        assert lab.cache.evict(9) == 0
    lab.must_hold(request.table, ids)
    lab.check()


# -- mistakes --------------------------------------------------------------------------------------


def _cached(lab: Lab) -> tuple[Ids, Request]:
    """A request whose first two pages are cached and locked, and which goes on in a third."""
    ids = sequence(10)
    request = lab.begin("r", ids)
    assert request is not None
    lab.compute(request, 10)
    lab.share(request)
    return ids, request


def _lock_used_twice(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.unlock(r.lock)
    lab.cache.unlock(r.lock)


def _lock_used_after_it_was_replaced(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert(ids, r.table, "r", r.lock)
    lab.cache.unlock(r.lock)


def _tail_unlocked_that_was_none(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.unlock_tail(r.lock)


def _lock_of_other_tokens(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert((5000,), r.table[2:], "r", r.lock)


def _lock_of_another_request(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.allocate("s", 1)
    lab.cache.insert((5000,), lab.pool.pages_of("s"), "s", r.lock)


def _lock_lost_with_its_request(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.release("r")


def _lock_counted_but_held_by_nobody(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache._locks.clear()


def _page_of_another_request(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.allocate("s", 1)
    lab.cache.insert((5000,), r.table[2:], "s")


def _page_given_twice(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert((5000,), r.table, "r")


def _page_given_under_a_writer(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.pin("r")
    lab.cache.insert(ids, r.table, "r")


def _page_written_on_after_it_was_given(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert(ids, r.table, "r")
    lab.cache.insert((*ids, 1), r.table, "r")


def _table_that_shares_the_wrong_page(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert(ids, (r.table[1], r.table[1], r.table[2]), "r")


def _table_too_short(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.insert(ids, r.table[:2], "r")


def _page_evicted_under_a_lock(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache._drop(r.lock.node)
    lab.cache.evict(1)


def _cached_page_freed_behind_the_back_of_the_cache(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.release_pages(CACHE, r.table[:1])


def _cached_page_taken_by_a_request(lab: Lab, ids: Ids, r: Request) -> None:
    lab.pool.move(CACHE, "r", r.table[:1])


def _page_named_by_other_tokens(lab: Lab, ids: Ids, r: Request) -> None:
    r.lock.node.digest = b"0" * 16


def _page_that_eviction_forgot(lab: Lab, ids: Ids, r: Request) -> None:
    lab.cache.unlock(r.lock)
    lab.cache._leaves.clear()


MISTAKES: list[tuple[Callable[[Lab, Ids, Request], None], str]] = [
    (_lock_used_twice, "second time"),
    (_lock_used_after_it_was_replaced, "second time"),
    (_tail_unlocked_that_was_none, "no tail"),
    (_lock_of_other_tokens, "lock is not for"),
    (_lock_of_another_request, "with a lock of r"),
    (_lock_lost_with_its_request, "lock of r is lost"),
    (_lock_counted_but_held_by_nobody, "live handles differ"),
    (_page_of_another_request, "does not own"),
    (_page_given_twice, "does not own"),
    (_page_given_under_a_writer, "may still write"),
    (_page_written_on_after_it_was_given, "does not own"),
    (_table_that_shares_the_wrong_page, "not what it shares"),
    (_table_too_short, "do not hold"),
    (_page_evicted_under_a_lock, "was evicted"),
    (_cached_page_freed_behind_the_back_of_the_cache, "not the pool's"),
    (_cached_page_taken_by_a_request, "not the pool's"),
    (_page_named_by_other_tokens, "digest of other tokens"),
    (_page_that_eviction_forgot, "never be evicted"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes_are_caught_where_they_happen_or_by_check(
    mistake: Callable[[Lab, Ids, Request], None], message: str
) -> None:
    lab = Lab(8, 4)
    ids, request = _cached(lab)
    lab.check()

    def make_it() -> None:
        mistake(lab, ids, request)
        lab.check()

    with pytest.raises(PoolCorrupt, match=message):
        make_it()
