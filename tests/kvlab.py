"""A prefix cache in use: requests that share, copy, compute, give and free pages of one pool.

For every slot the lab keeps which token sequence the KV in it is of, so that a hit can be judged by
what it would serve.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pddrt.kv.pages import PagePool, runs_of
from pddrt.kv.radix import Hit, Lock, RadixCache, Reservation

Ids = tuple[int, ...]


@dataclass
class Request:
    name: str
    ids: Ids
    table: tuple[int, ...]
    lock: Lock
    computed: int
    """KV of [0, computed) is in its table."""


class Lab:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.pool = PagePool(num_pages, page_tokens)
        self.cache = RadixCache(self.pool, "model")
        self.kv: dict[int, Ids] = {}  # slot -> the tokens up to and including its own

    def slots(self, pages: Sequence[int], end: int) -> list[int]:
        runs = runs_of(pages, self.pool.page_tokens, 0, end)
        return [slot for run in runs for slot in range(run.slot, run.slot + run.length)]

    def must_hold(self, pages: Sequence[int], ids: Ids) -> None:
        """KV of `ids` is in `pages`, position by position."""
        held = [self.kv[slot] for slot in self.slots(pages, len(ids))]
        assert held == [ids[: n + 1] for n in range(len(ids))]

    def must_serve(self, hit: Hit, ids: Ids) -> None:
        pages = hit.pages if hit.tail is None else (*hit.pages, hit.tail.page)
        self.must_hold(pages, ids[: hit.tokens])
        assert hit.tokens == len(hit.pages) * self.pool.page_tokens + (
            hit.tail.tokens if hit.tail else 0
        )

    def begin(self, name: str, ids: Ids, room: int = 0, limit: int | None = None) -> Request | None:
        got = self.cache.reserve(name, ids, len(ids) + room, limit)
        return self.admitted(name, ids, got) if got else None

    def admitted(self, name: str, ids: Ids, got: Reservation) -> Request:
        """Copies the tail, as whoever reserves must."""
        hit = got.hit
        self.must_serve(hit, ids)
        if hit.tail:
            size, target = self.pool.page_tokens, got.table[len(hit.pages)]
            for n in range(hit.tail.tokens):
                self.kv[target * size + n] = self.kv[hit.tail.page * size + n]
            self.cache.unlock_tail(got.lock)
        return Request(name, ids, got.table, got.lock, hit.tokens)

    def compute(self, request: Request, end: int) -> None:
        slots = self.slots(request.table, end)
        for n in range(request.computed, end):
            assert self.pool.owns_page(request.name, slots[n] // self.pool.page_tokens)
            self.kv[slots[n]] = request.ids[: n + 1]
        request.computed = end
        self.must_hold(request.table, request.ids[:end])

    def share(self, request: Request) -> None:
        """Gives the whole pages to the cache and goes on."""
        whole = request.computed // self.pool.page_tokens * self.pool.page_tokens
        done = self.cache.insert(request.ids[:whole], request.table, request.name, request.lock)
        assert done.lock is not None
        request.lock = done.lock

    def end(self, request: Request, keep: bool = True) -> None:
        if keep:
            self.must_hold(request.table, request.ids[: request.computed])
            self.cache.insert(request.ids[: request.computed], request.table, request.name)
        self.cache.unlock(request.lock)
        self.pool.release(request.name)

    def serve(self, name: str, ids: Ids) -> None:
        """A request from beginning to end."""
        request = self.begin(name, ids)
        assert request is not None
        self.compute(request, len(ids))
        self.end(request)

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def sequence(length: int, seed: int = 1) -> Ids:
    return tuple(random.Random(seed).choices(range(1000), k=length))
