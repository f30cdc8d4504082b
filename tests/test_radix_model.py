"""RadixCache against a naive reference: every cached page under all the tokens up to its end.

The reference looks at everything for every answer. After every operation both hold the same pages,
can evict the same number and match the same; and every hit is KV of its tokens (`Lab`).
"""

from __future__ import annotations

import random

import pytest

from pddrt.kv.radix import CACHE, Reservation
from pddrt.kv.trie import Node
from tests.kvlab import Ids, Lab, Request


class Reference:
    """The same cache, naively: every cached page under all the tokens up to its end.

    Looks at everything for every answer, and marks a whole path as used, page by page.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[Ids, int] = {}
        self.locks: list[Ids] = []
        self.now = 0

    def parent(self, entry: Ids) -> Ids:
        return entry[: (len(entry) - 1) // self.size * self.size]

    def peek(self, ids: Ids) -> int:
        return max((_common(entry, ids) for entry in self.used), default=0)

    def path(self, entry: Ids) -> list[Ids]:
        return [*self.path(self.parent(entry)), entry] if entry else []

    def use(self, entry: Ids) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(self.path(entry), self.now))

    def locked(self, entry: Ids) -> bool:
        return any(entry in self.path(lock) for lock in self.locks)

    def insert(self, ids: Ids) -> None:
        fresh = [
            ids[: min(len(ids), at + self.size)]
            for at in range(0, len(ids), self.size)
            if self.peek(ids[: at + self.size]) < min(len(ids), at + self.size)
        ]
        for entry in fresh[:1]:
            for old in list(self.used):
                partial = len(self.parent(entry)) < len(old) < len(entry)
                if partial and entry[: len(old)] == old and not self.locked(old):
                    del self.used[old]
        for entry in fresh:
            self.used[entry] = 0
        if ids:  # used is the page that ends them, or else one that goes on where they end
            self.use(
                min(
                    entry
                    for entry in self.used
                    if entry[: len(ids)] == ids and self.parent(entry) == self.parent(ids)
                )
            )

    def evict(self, pages: int) -> None:
        for _ in range(pages):
            parents = {self.parent(entry) for entry in self.used}
            leaves = [e for e in self.used if e not in parents and not self.locked(e)]
            if leaves:
                del self.used[min(leaves, key=lambda e: self.used[e])]

    def evictable(self) -> int:
        return sum(not self.locked(entry) for entry in self.used)


def _common(a: Ids, b: Ids) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def entry_of(node: Node) -> Ids:
    """All tokens up to the end of a cached page."""
    packed = b"".join(reversed([step.key for step in node.up()]))
    return tuple(memoryview(packed).cast("I"))


class Pair:
    """The cache in its lab and the reference, given the same to do."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice([1, 2, 3, 4, 5])
        self.lab = Lab(self.rng.randint(8, 24), self.size)
        self.reference = Reference(self.size)
        self.running: list[Request] = []
        self.uncopied: list[tuple[str, Ids, Reservation]] = []
        self.locked: dict[str, Ids] = {}
        self.seen: list[Ids] = [()]
        self.reserved = self.refused = self.hits = self.tails_given_up = 0

    def ids(self) -> Ids:
        start = self.rng.choice(self.seen)
        start = start[: self.rng.randint(0, len(start))]
        fresh = self.rng.choices(range(3), k=self.rng.randint(1, 2 * self.size + 1))
        return (*start, *fresh)[: 5 * self.size]

    def fits(self, own: int, locks: list[Ids]) -> bool:
        self.reference.locks += locks
        fits = own <= self.lab.pool.free + self.reference.evictable()
        del self.reference.locks[len(self.reference.locks) - len(locks) :]
        return fits

    def begin(self, name: str) -> None:
        ids, room = self.ids(), self.rng.randint(0, 3)
        limit = self.rng.choice([None, len(ids) - 1])
        hit = self.lab.cache.match(ids, limit)
        assert hit.tokens == min(self.reference.peek(ids), len(ids) if limit is None else limit)
        shared = hit.tokens // self.size * self.size
        locks, own = [ids[:shared]], self.lab.pool.pages_for(len(ids) + room) - len(hit.pages)
        tail = [entry_of(hit.tail_node)] if hit.tail_node else []
        with_tail, without = self.fits(own, locks + tail), self.fits(own, locks)
        got = self.lab.cache.reserve(name, ids, len(ids) + room, limit)
        assert (got is not None) == without
        if got is None:
            self.refused += 1
            return
        tail = tail if with_tail else []
        assert got.hit.tokens == (hit.tokens if with_tail else shared)
        for entry in locks + tail:
            self.reference.use(entry)
        self.reference.locks += locks + tail
        held = sum(len(self.lab.pool.pages_of(r)) for r in self.lab.pool.owners if r != CACHE)
        free = self.lab.pool.num_pages - held - len(self.reference.used)
        self.reference.evict(-free)
        self.locked[name] = locks[0]
        self.uncopied.append((name, ids, got))
        self.reserved += 1
        self.hits += got.hit.tokens > 0
        self.tails_given_up += with_tail < without

    def copy(self) -> None:
        name, ids, got = self.uncopied.pop(self.rng.randrange(len(self.uncopied)))
        if got.hit.tail_node:
            self.reference.locks.remove(entry_of(got.hit.tail_node))
        self.running.append(self.lab.admitted(name, ids, got))

    def step(self, request: Request) -> None:
        known = self.rng.randint(request.computed, len(request.ids))
        self.lab.compute(request, known)
        if known < len(request.ids):
            return
        request.ids += (self.rng.randrange(3),)
        if len(request.ids) > len(request.table) * self.size:
            missing = 1 - self.lab.pool.free
            if not self.lab.cache.make_room(1):
                self.end(request, keep=True)
                return
            self.reference.evict(missing)
            grown = self.lab.pool.grow(request.name, 1, near=request.table[-1])
            assert grown
            request.table += grown

    def share(self, request: Request) -> None:
        self.lab.share(request)
        whole = request.ids[: request.computed // self.size * self.size]
        self.reference.insert(whole)
        self.reference.locks.remove(self.locked[request.name])
        self.reference.locks.append(whole)
        self.locked[request.name] = whole

    def end(self, request: Request, keep: bool) -> None:
        self.lab.end(request, keep)
        if keep:
            self.reference.insert(request.ids[: request.computed])
            self.seen = [*self.seen[-20:], request.ids]
        self.reference.locks.remove(self.locked.pop(request.name))
        self.running.remove(request)

    def operate(self, number: int) -> None:
        kind = self.rng.random()
        if kind < 0.25 and len(self.running) + len(self.uncopied) < 4:
            self.begin(f"r{number}")
        elif kind < 0.45 and self.uncopied:
            self.copy()
        elif kind < 0.7 and self.running:
            self.step(self.rng.choice(self.running))
        elif kind < 0.8 and self.running:
            self.share(self.rng.choice(self.running))
        elif kind < 0.97 and self.running:
            self.end(self.rng.choice(self.running), keep=self.rng.random() < 0.8)
        elif self.rng.random() < 0.3:
            pages = self.rng.randint(0, 3)
            able = self.reference.evictable()
            assert self.lab.cache.evict(pages) == min(pages, able)
            self.reference.evict(pages)

    def must_agree(self) -> None:
        self.lab.check()
        nodes = self.lab.cache._root.all()[1:]
        cached = {entry_of(node): node for node in nodes}
        assert cached.keys() == self.reference.used.keys()
        assert self.lab.cache.evictable == self.reference.evictable()
        for entry, node in cached.items():
            self.lab.must_hold([step.page for step in node.up()][::-1], entry)
        probe = self.ids()
        assert self.lab.cache.peek(probe) == self.reference.peek(probe)


@pytest.mark.parametrize("seed", range(20))
def test_cache_and_reference_agree_after_every_operation(seed: int) -> None:
    pair = Pair(seed)
    for number in range(400):
        pair.operate(number)
        pair.must_agree()
    while pair.uncopied:
        pair.copy()
    while pair.running:
        pair.end(pair.running[0], keep=False)
    assert pair.lab.cache.evict(99) == len(pair.reference.used)
    assert pair.lab.pool.free == pair.lab.pool.num_pages
    pair.lab.check()
    assert pair.hits > 9, "too little was shared to prove anything"
