"""PagePool: every page has exactly one owner or is free, on every path."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from pddrt.kv.pages import PagePool, PoolCorrupt, runs_of
from pddrt.types import Run


def test_pages_come_as_one_run_while_a_hole_is_large_enough() -> None:
    pool = PagePool(8, 16)
    assert pool.allocate("a", 3)
    assert pool.runs("a", 0, 48) == (Run(0, 48),)
    assert pool.allocate("b", 5)
    assert pool.runs("b", 0, 80) == (Run(48, 80),)


def test_a_split_pool_still_serves_in_as_few_runs_as_it_has_holes() -> None:
    pool = PagePool(6, 4)
    for name in "abcdef":
        assert pool.allocate(name, 1)
    for name in "ace":
        pool.release(name)
    assert pool.allocate("x", 3)
    assert pool.runs("x", 2, 10) == (Run(2, 2), Run(8, 4), Run(16, 2))
    pool.check()


def test_ranges_start_and_end_in_the_middle_of_pages() -> None:
    pool = PagePool(4, 8)
    pool.allocate("a", 4)
    assert pool.runs("a", 5, 21) == (Run(5, 16),)
    assert pool.runs("a", 7, 7) == ()


def test_what_does_not_fit_changes_nothing() -> None:
    pool = PagePool(4, 8)
    assert pool.allocate("a", 3)
    assert not pool.allocate("b", 2)
    assert (pool.free, pool.owners) == (1, ("a",))
    pool.check()


def test_a_pinned_owner_is_freed_by_its_last_writer() -> None:
    pool = PagePool(4, 8)
    pool.allocate("a", 2)
    pool.pin("a")
    pool.pin("a")
    assert pool.release("a") == 0
    assert pool.unpin("a") == 0
    assert pool.free == 2
    assert not pool.allocate("b", 3), "pages under a writer are not free"
    assert pool.unpin("a") == 2
    assert pool.allocate("b", 4)


def test_growth_goes_on_in_the_run_where_it_can() -> None:
    pool = PagePool(10, 4)
    for name in ("a", "x", "b"):
        pool.allocate(name, 2)
    pool.release("x")
    assert pool.grow("b", 2, near=5) == (6, 7), "though pages 2 and 3 are the smaller hole"
    assert pool.runs("b", 0, 16) == (Run(16, 16),)
    assert pool.grow("a", 3, near=1) == (2, 3, 8)
    assert pool.grow("a", 2, near=8) is None
    assert pool.grow("a", 1, near=2) == (9,), "page 3 is taken"
    assert pool.pages_of("a") == (0, 1, 2, 3, 8, 9)
    assert (pool.free, pool.peak_used) == (0, 10)
    pool.check()


def test_pages_move_to_another_owner_and_are_freed_there() -> None:
    pool = PagePool(8, 4)
    pool.allocate("a", 5)
    pool.move("a", "cache", (0, 1, 3))
    assert (pool.pages_of("a"), pool.pages_of("cache")) == ((2, 4), (0, 1, 3))
    assert pool.owns_page("cache", 3)
    assert not pool.owns_page("a", 3)
    assert pool.free == 3
    assert pool.release("a") == 2
    pool.release_pages("cache", (3, 0))
    assert (pool.pages_of("cache"), pool.free) == ((1,), 7)
    pool.check()


def test_a_table_of_shared_and_own_pages_is_read_in_as_few_runs_as_it_has() -> None:
    table = (4, 5, 6, 2, 3, 0)
    for start in range(25):
        for end in range(start, 25):
            slots = [table[n // 4] * 4 + n % 4 for n in range(start, end)]
            runs = runs_of(table, 4, start, end)
            assert [r.slot + n for r in runs for n in range(r.length)] == slots
            breaks = sum(b != a + 1 for a, b in pairwise(slots))
            assert len(runs) == breaks + (start < end)


def test_a_pool_of_single_holes_gives_them_all_away() -> None:
    pool = PagePool(20_000, 1)
    pool.allocate("a", 20_000)
    pool.release_pages("a", range(0, 20_000, 2))
    assert pool.allocate("b", 9_999)
    assert pool.pages_of("b") == tuple(range(0, 19_998, 2))
    pool.check()


MISTAKES: dict[str, Callable[[PagePool], object]] = {
    "freed twice": lambda pool: (pool.release("a"), pool.release("a")),
    "freed by nobody": lambda pool: pool.release("b"),
    "a writer that is none": lambda pool: pool.unpin("a"),
    "allocated twice": lambda pool: pool.allocate("a", 1),
    "written by nobody": lambda pool: pool.pin("b"),
    "beyond its pages": lambda pool: pool.runs("a", 0, 17),
    "grown before it was": lambda pool: pool.grow("b", 1),
    "grown after its end": lambda pool: (pool.pin("a"), pool.release("a"), pool.grow("a", 1)),
    "given away by another": lambda pool: pool.move("b", "a", (0,)),
    "given away, but not owned": lambda pool: pool.move("a", "b", (0, 2)),
    "given away twice at once": lambda pool: pool.move("a", "b", (0, 0)),
    "given away under a writer": lambda pool: (pool.pin("a"), pool.move("a", "b", (0,))),
    "given away after its end": lambda pool: (
        pool.pin("a"),
        pool.release("a"),
        pool.move("a", "b", (0,)),
    ),
    "given to one that is ending": lambda pool: (
        pool.allocate("b", 1),
        pool.pin("b"),
        pool.release("b"),
        pool.move("a", "b", (0,)),
    ),
    "freed alone under a writer": lambda pool: (pool.pin("a"), pool.release_pages("a", (0,))),
    "freed alone, but not owned": lambda pool: pool.release_pages("a", (2,)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_accounting_are_caught_where_they_happen(mistake: str) -> None:
    pool = PagePool(4, 8)
    pool.allocate("a", 2)
    with pytest.raises(PoolCorrupt):
        MISTAKES[mistake](pool)


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(4, 8)
    pool.allocate("a", 2)
    del pool._owned["a"]
    with pytest.raises(PoolCorrupt, match="lost"):
        pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(rng.randint(1, 40), rng.choice([1, 16, 64]))
    pages: dict[str, int] = {}
    pins: dict[str, int] = {}
    doomed: set[str] = set()
    for step in range(400):
        live = [o for o in pages if o not in doomed]
        what = rng.random()
        if what < 0.4:
            owner, want = f"o{step}", rng.randint(0, 8)
            if pool.allocate(owner, want):
                pages[owner] = want
            else:
                assert want > pool.free
        elif what < 0.45 and live:
            owner, want = rng.choice(live), rng.randint(0, 4)
            if grown := pool.grow(owner, want, near=rng.randrange(pool.num_pages)):
                assert len(grown) == want
                pages[owner] += want
        elif what < 0.5 and live:
            owner, other = rng.choice(live), rng.choice(live)
            some = rng.sample(pool.pages_of(owner), rng.randint(0, pages[owner]))
            if pins.get(owner):
                with pytest.raises(PoolCorrupt):
                    pool.move(owner, other, some)
            elif rng.random() < 0.5:
                pool.release_pages(owner, some)
                pages[owner] -= len(some)
            else:
                pool.move(owner, other, some)
                pages[owner] -= len(some)
                pages[other] += len(some)
        elif what < 0.6 and live:
            owner = rng.choice(live)
            pool.pin(owner)
            pins[owner] = pins.get(owner, 0) + 1
        elif what < 0.8 and live:
            owner = rng.choice(live)
            if pins.get(owner):
                assert pool.release(owner) == 0
                doomed.add(owner)
            else:
                assert pool.release(owner) == pages.pop(owner)
        elif pins:
            owner = rng.choice(sorted(pins))
            pins[owner] -= 1
            freed = pool.unpin(owner)
            if not pins[owner]:
                del pins[owner]
                if owner in doomed:
                    doomed.discard(owner)
                    assert freed == pages.pop(owner)
                else:
                    assert freed == 0
        pool.check()
        assert pool.used == sum(pages.values())
