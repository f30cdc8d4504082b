"""KVMemory: the KV of one instance - who waits for it, who holds it, what is kept for later.

Joins the page pool and the prefix cache and keeps, for each request, its **holding**: the page
table (shared pages first, then its own), how many tokens of its prompt were there already, and the
lock on what it shares.

    reserve   match, lock, evict and allocate in one, or nothing at all
    grow      a request that goes on needs more
    copied    the tail of the hit is in the request's own page now
    keep      KV that is done goes to the cache, and stays the request's to read
    pin       a step may write into the request's pages, or read those it shares
    release   the request is over: its pages and its lock go, or will when the last pin is gone

Pages belong to requests or to the cache, never to both; a request reads shared pages under its
lock. With `caching` off nothing matches and nothing is kept: the same code, every prefix empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pddrt.kv.pages import Journal, PagePool, PoolCorrupt, runs_of
from pddrt.kv.radix import CACHE, Lock, RadixCache, Tail
from pddrt.types import Run


@dataclass(slots=True)
class Holding:
    """What a request holds. `hit` tokens of its prompt need not be computed or sent.

    `tail` is what must be copied before the request's KV is used: the first tokens of a cached
    page.
    """

    table: list[int]
    hit: int
    own: int
    lock: Lock
    tail: Tail | None


class KVMemory:
    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        fingerprint: str,
        *,
        caching: bool = True,
        journal: Journal | None = None,
        roomier: Callable[[], None] | None = None,
    ) -> None:
        """`journal` is told where every page goes; see there. `roomier` is called whenever `used`
        has become less, when that is done: by whatever call, so that no caller has to know what may
        be had again. It must not use the memory at once: its caller has not gone on yet.
        """
        self.pool = PagePool(num_pages, page_tokens, journal)
        self._journal = journal
        self.cache = RadixCache(self.pool, fingerprint)
        self.caching = caching
        self._roomier = roomier
        self._holdings: dict[str, Holding] = {}

    # -- what there is -----------------------------------------------------------------------------

    @property
    def page_tokens(self) -> int:
        return self.pool.page_tokens

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def cached(self) -> int:
        """Pages in the cache, shared ones among them."""
        return len(self.cache)

    @property
    def used(self) -> int:
        """Pages that could not be had for a new request now."""
        return self.pool.used - self.cache.evictable

    @property
    def holders(self) -> tuple[str, ...]:
        """Requests that hold pages or a lock, those included that end with their last pin."""
        return tuple(self._holdings)

    def holds(self, request: str) -> bool:
        return request in self._holdings

    def holding(self, request: str) -> Holding:
        return self._holdings[request]

    def peek(self, ids: Sequence[int]) -> int:
        """How many tokens of `ids` are cached from the first on, now."""
        return self.cache.peek(ids) if self.caching else 0

    def runs(self, request: str, start: int, end: int) -> tuple[Run, ...]:
        """The slots of token positions [start, end) of `request`."""
        return runs_of(self._holdings[request].table, self.page_tokens, start, end)

    # -- a request's life --------------------------------------------------------------------------

    def reserve(
        self, request: str, ids: Sequence[int], tokens: int, limit: int | None = None
    ) -> bool:
        """Gives `request` room for `tokens` positions, beginning with the cached prefix of `ids`.

        `limit`: the hit may not be longer. False, and nothing has changed, where there is no room.
        """
        limit = limit if self.caching else 0
        reserved = self.cache.reserve(request, ids, tokens, limit)
        if reserved is None:
            return False
        hit = reserved.hit
        own = len(reserved.table) - len(hit.pages)
        self._holdings[request] = Holding(
            list(reserved.table), hit.tokens, own, reserved.lock, hit.tail
        )
        self._book_table(request)
        return True

    def _book_table(self, request: str) -> None:
        if self._journal is not None:
            self._journal("table", request, self._holdings[request].table)

    def tail(self, request: str) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
        """What must be copied, from where to where; None where the hit ends with a page."""
        holding = self._holdings[request]
        if holding.tail is None:
            return None
        source = runs_of((holding.tail.page,), self.page_tokens, 0, holding.tail.tokens)
        return source, self.runs(request, holding.hit - holding.tail.tokens, holding.hit)

    def copied(self, request: str) -> None:
        """The tail has been copied; its page may be evicted."""
        holding, used = self._holdings[request], self.used
        self.cache.unlock_tail(holding.lock)
        holding.tail = None
        self._tell_roomier(used)

    def grow(self, request: str, tokens: int) -> bool:
        """Makes room for `tokens` positions of a request that has begun; False where there is none.

        New pages continue the last run if they can. What nobody locks is evicted for them.
        """
        holding = self._holdings[request]
        missing = self.pool.pages_for(tokens) - len(holding.table)
        if missing <= 0:
            return True
        if not self.cache.make_room(missing):
            return False
        pages = self.pool.grow(request, missing, near=holding.table[-1])
        assert pages is not None
        holding.table.extend(pages)
        holding.own += missing
        return True

    def keep(self, request: str, ids: Sequence[int]) -> int:
        """Gives the cache what `request` has KV of: `ids`, from position 0. Pages that it took.

        A last page that is not full must not be written again by the request. Nothing is kept while
        a step may write (the request is pinned).
        """
        holding = self._holdings[request]
        if not self.caching or not ids or self.pool.pinned(request):
            return 0
        used = self.used
        inserted = self.cache.insert(ids, holding.table, request, holding.lock)
        assert inserted.lock is not None
        holding.lock = inserted.lock
        holding.own -= len(inserted.taken)
        if inserted.duplicates:
            self._share(request, holding, ids)
        self._tell_roomier(used)
        return len(inserted.taken)

    def _share(self, request: str, holding: Holding, ids: Sequence[int]) -> None:
        """Another request kept the same KV first: reads that, under the lock, and gives its own
        whole copies back. A request must not hold twice what it needs once.
        """
        for at, page in enumerate(self.cache.match(ids).pages):
            copy = holding.table[at]
            if copy != page:
                holding.table[at] = page
                holding.own -= 1
                self.pool.release_pages(request, [copy])
        self._book_table(request)

    def whole(self, tokens: int) -> int:
        """The part of `tokens` positions that lies in full pages."""
        return tokens - tokens % self.page_tokens

    def pin(self, request: str) -> None:
        self.pool.pin(request)

    def unpin(self, request: str) -> int | None:
        """One writer is done. Pages given back if `request` ended with that, else None."""
        used = self.used
        self.pool.unpin(request)
        return None if self.pool.owns(request) else self._forget(request, used)

    def release(self, request: str) -> int | None:
        """The request is over. Pages given back now, or None if a writer still holds them."""
        used = self.used
        self.pool.release(request)
        return None if self.pool.owns(request) else self._forget(request, used)

    def _forget(self, request: str, used: int) -> int:
        holding = self._holdings.pop(request)
        self.cache.unlock(holding.lock)
        self._tell_roomier(used)
        return holding.own

    def _tell_roomier(self, used: int) -> None:
        """`used`: as many as there were before."""
        if self.used < used and self._roomier is not None:
            self._roomier()

    # -- integrity ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PoolCorrupt or CacheCorrupt unless pool, cache and holdings agree."""
        self.pool.check()
        self.cache.check()
        owners = {o for o in self.pool.owners if o != CACHE}
        if owners != set(self._holdings):
            raise PoolCorrupt(f"owners {sorted(owners)}, holders {sorted(self._holdings)}")
        for request, holding in self._holdings.items():
            own = [p for p in holding.table if self.pool.owns_page(request, p)]
            if len(own) != holding.own:
                raise PoolCorrupt(f"{request} owns {len(own)} pages, {holding.own} are booked")
