"""PagePool: every page has exactly one owner or is free, on every path."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pddrt.kv.pages import PagePool, PoolCorrupt
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


MISTAKES: dict[str, Callable[[PagePool], object]] = {
    "freed twice": lambda pool: (pool.release("a"), pool.release("a")),
    "freed by nobody": lambda pool: pool.release("b"),
    "a writer that is none": lambda pool: pool.unpin("a"),
    "allocated twice": lambda pool: pool.allocate("a", 1),
    "written by nobody": lambda pool: pool.pin("b"),
    "beyond its pages": lambda pool: pool.runs("a", 0, 17),
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
