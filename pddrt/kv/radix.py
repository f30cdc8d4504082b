"""RadixCache: which prefixes one instance still has KV of, page by page.

The unit is the page; `trie` says which tokens each holds. Matching is exact to the token: a hit is
some whole pages, which the request **shares** and only ever reads, and perhaps the first tokens of
one page more, whose KV it **copies** into the first slots of a page of its own. So a hit may end
anywhere in a page, and no page has two writers.

Who owns what:
- A cached page belongs to the owner `CACHE` in the pool. `insert` moves pages there from a request
  that has KV in them and will not write into them again; what is cached already stays with the
  request, which then simply holds a second copy.
- A **lock** is a handle, used once. It keeps the path down to its node from eviction for as long as
  the request lives, and the page of the copied tail until that is copied (`unlock_tail`). A lock
  names its request, which must own its pages (none, perhaps) as long: that is how a lost one is
  found.
- What nobody locks is `evictable`: leaves go first, the least recently used of them first. Use is a
  lock or an insert; `match` and `peek` leave no trace, so that asking again from a queue, or by a
  router, keeps nothing alive.

Costs: match O(pages of the hit); lock and unlock O(pages not locked by others as well); insert
O(pages); eviction O(log nodes) a page; `evictable` O(1).

Left out: the tensors (the caller copies the tail) and waiting. Nothing here may be interleaved
with an await: a hit is a fact about now, and locking one that has been evicted since is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from pddrt.frames import pack_ids
from pddrt.kv.pages import PagePool
from pddrt.kv.trie import ID_BYTES, CacheCorrupt, Node, must, prefix_digest

__all__ = [
    "CACHE",
    "CacheCorrupt",
    "CacheStats",
    "Hit",
    "Inserted",
    "Lock",
    "RadixCache",
    "Reservation",
    "Tail",
    "prefix_digest",
]

CACHE = "(cache)"
"""The owner of cached pages. No request id looks like that."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The first `tokens` slots of `page`, to be copied into the requester's next page."""

    page: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """KV of positions [0, tokens) is cached: `pages` to share, in order, then `tail` to copy."""

    tokens: int
    pages: tuple[int, ...]
    tail: Tail | None
    node: Node = field(repr=False)
    tail_node: Node | None = field(repr=False)

    def without_tail(self) -> Hit:
        if self.tail is None:
            return self
        return replace(self, tokens=self.tokens - self.tail.tokens, tail=None, tail_node=None)


@dataclass(slots=True, eq=False)
class Lock:
    """A handle on a path that may not be evicted. Given back once, by `unlock` or to `insert`."""

    owner: str
    number: int
    node: Node = field(repr=False)
    tail: Node | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request begins with: its page table, of which `hit.pages` are shared, and the lock."""

    table: tuple[int, ...]
    hit: Hit
    lock: Lock


@dataclass(frozen=True, slots=True)
class Inserted:
    """`taken`: pages that the cache owns from now on, the last ones of those given. `duplicates`:
    pages that the request keeps, since the cache had their content before. `lock`: what replaces
    the one given, over everything inserted; None where none was.
    """

    taken: tuple[int, ...]
    duplicates: tuple[int, ...]
    lock: Lock | None


@dataclass(slots=True)
class CacheStats:
    """Counted since the start. `superseded`: partial pages that longer ones made superfluous.

    inserted = still cached + evicted + superseded, in pages.
    """

    hits: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    duplicate_pages: int = 0
    superseded_pages: int = 0
    evicted_pages: int = 0


class RadixCache:
    def __init__(self, pool: PagePool, fingerprint: str) -> None:
        """`fingerprint` names the weights: KV of other weights has other digests."""
        self.pool = pool
        self.fingerprint = fingerprint
        self.stats = CacheStats()
        self._root = Node.root(fingerprint)
        self._nodes = 0
        self._evictable = 0
        self._now = 0
        self._serial = 0
        self._page_bytes = pool.page_tokens * ID_BYTES
        self._locks: dict[int, Lock] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        """Heap of (used at, serial, node): every leaf that can go, with a time that is true or too
        early, and some entries that are out of date."""
        assert pool.allocate(CACHE, 0)

    # -- what there is -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Cached pages."""
        return self._nodes

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self._evictable

    @property
    def locked_by(self) -> tuple[str, ...]:
        """The requests that hold a lock, once for each."""
        return tuple(lock.owner for lock in self._locks.values())

    def match(self, ids: Sequence[int], limit: int | None = None) -> Hit:
        """The longest cached prefix of `ids`, of `limit` tokens at most.

        Who needs the logits behind the last id must compute at least that one, and asks with
        `limit` = len(ids) - 1.
        """
        assert limit is None or limit >= 0
        packed, size = pack_ids(ids), self._page_bytes
        end = len(packed) if limit is None else min(len(packed), limit * ID_BYTES)
        node, pages = self._root.walk(packed, end, size)
        at = len(pages) * size
        tail, tokens = node.longest(packed[at : min(at + size, end)])
        return Hit(
            tokens=at // ID_BYTES + tokens,
            pages=tuple(pages),
            tail=Tail(tail.page, tokens) if tail else None,
            node=node,
            tail_node=tail,
        )

    def peek(self, ids: Sequence[int], limit: int | None = None) -> int:
        """Length of the longest cached prefix of `ids`, in tokens: a hint for routers."""
        return self.match(ids, limit).tokens

    def digest_at(self, ids: Sequence[int], end: int) -> str:
        """The name of the prefix ids[:end], whether cached or not; see `prefix_digest`."""
        assert 0 <= end <= len(ids)
        return prefix_digest(self.fingerprint, self.pool.page_tokens, ids[:end])

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, hit: Hit, owner: str) -> Lock:
        """Keeps the pages of a hit (an empty one, perhaps) for request `owner`, and counts as use.

        Raises CacheCorrupt if they were evicted since `match`.
        """
        tail = hit.tail_node
        if not (hit.node.in_tree and (tail is None or tail.in_tree)):
            raise CacheCorrupt(f"the hit of {owner} was evicted before it was locked")
        self.stats.hits += hit.tokens > 0
        self.stats.hit_tokens += hit.tokens
        return self._new_lock(owner, hit.node, tail)

    def _new_lock(self, owner: str, node: Node, tail: Node | None) -> Lock:
        self._serial += 1
        lock = Lock(owner, self._serial, node, tail)
        self._locks[lock.number] = lock
        for held in (node, tail):
            if held is not None:
                self._use(held)
                self._hold(held)
        return lock

    def unlock_tail(self, lock: Lock) -> None:
        """The tail is copied: its page may go."""
        self._live(lock)
        if lock.tail is None:
            raise CacheCorrupt(f"{lock.owner} has no tail locked, or not any more")
        tail, lock.tail = lock.tail, None
        self._drop(tail)

    def unlock(self, lock: Lock) -> None:
        """The request reads no shared page any more, and no step in flight does so for it."""
        self._live(lock)
        del self._locks[lock.number]
        self._drop(lock.node)
        if lock.tail is not None:
            self._drop(lock.tail)

    def _live(self, lock: Lock) -> None:
        if self._locks.get(lock.number) is not lock:
            raise CacheCorrupt(f"a lock of {lock.owner} is used a second time")

    def _hold(self, node: Node) -> None:
        node.locks += 1
        step: Node | None = node
        while step is not None:
            step.busy += 1
            if step.busy > 1:
                return
            self._evictable -= not step.is_root
            step = step.parent

    def _drop(self, node: Node) -> None:
        node.locks -= 1
        step: Node | None = node
        while step is not None:
            step.busy -= 1
            if step.busy:
                return
            self._evictable += not step.is_root
            self._queue(step)
            step = step.parent

    # -- taking pages in ---------------------------------------------------------------------------

    def insert(
        self, ids: Sequence[int], pages: Sequence[int], owner: str, lock: Lock | None = None
    ) -> Inserted:
        """`owner` has KV of exactly `ids` in its table `pages` (longer than needed, perhaps).

        The table begins with the pages it shares. Every page given must be done: whole, or, if it
        is the last and partial, never written again by `owner`. Who goes on decoding therefore
        gives whole pages only, and its lock, whose tail must be unlocked by then.

        Raises PoolCorrupt, with nothing changed, for a page that is not the owner's, or while the
        owner has a writer (a pin) and there is anything to take.
        """
        packed, size = pack_ids(ids), self._page_bytes
        needed = self.pool.pages_for(len(ids))
        if needed > len(pages):
            raise CacheCorrupt(f"{len(pages)} pages of {owner} do not hold {len(ids)} tokens")
        if lock is not None:
            self._live(lock)
            if lock.owner != owner or lock.tail is not None:
                raise CacheCorrupt(f"{owner} inserts with a lock of {lock.owner} or of a tail")
        node, cached = self._root.walk(packed, len(packed), size)
        duplicates = self._duplicates(cached, pages, owner)
        at, behind = len(cached) * size, tuple(pages[len(cached) : needed])
        rest, used = packed[at : at + size], node
        if cover := _cover(node, rest):
            second_copy = self._duplicates([cover.page], behind, owner)
            duplicates += second_copy
            used, behind = cover, ()
            node = node if second_copy else cover
        if lock and not lock.node.is_root and lock.node not in node.up():
            raise CacheCorrupt(f"{owner} inserts ids that its lock is not for")
        if behind:
            self.pool.move(owner, CACHE, behind)
            self._supersede(node, rest)
        for page in behind:
            node = used = self._add(node, packed[at : at + size], page)
            at += size
        self._use(used)
        self._queue(used)
        self.stats.inserted_pages += len(behind)
        self.stats.duplicate_pages += len(duplicates)
        replaced = self._new_lock(owner, node, None) if lock else None
        if lock:
            self.unlock(lock)
        return Inserted(behind, tuple(duplicates), replaced)

    def _duplicates(self, cached: Sequence[int], pages: Sequence[int], owner: str) -> list[int]:
        """Those of `pages` that hold what `cached` holds, page by page, and are the owner's."""
        mine = [page for page, kept in zip(pages, cached, strict=False) if page != kept]
        for page in mine:
            if not self.pool.owns_page(owner, page):
                raise CacheCorrupt(f"page {page} in the table of {owner} is not what it shares")
        return mine

    def _supersede(self, parent: Node, key: bytes) -> None:
        """Frees the partial pages that hold nothing but a beginning of `key`."""
        for size in range(ID_BYTES, len(key), ID_BYTES):
            child = parent.children.get(key[:size])
            if child is not None and not child.busy:
                self._remove(child)
                self.pool.release_pages(CACHE, [child.page])
                self.stats.superseded_pages += 1

    def _add(self, parent: Node, key: bytes, page: int) -> Node:
        self._serial += 1
        self._nodes += 1
        self._evictable += 1
        return parent.add(key, page, self._serial)

    def _remove(self, node: Node) -> None:
        assert not node.busy
        parent = node.take_out()
        parent.used_at = max(parent.used_at, node.used_at)
        self._nodes -= 1
        self._evictable -= 1
        self._queue(parent)

    # -- letting pages go --------------------------------------------------------------------------

    def evict(self, pages: int) -> int:
        """Frees that many pages, or all that nobody locks; says how many."""
        gone: list[int] = []
        while len(gone) < pages and self._evictable:
            node = self._oldest()
            gone.append(node.page)
            self._remove(node)
        self.pool.release_pages(CACHE, gone)
        self.stats.evicted_pages += len(gone)
        return len(gone)

    def make_room(self, pages: int) -> bool:
        """Evicts as few pages as needed for `pages` to be free; nothing, and False, in vain."""
        missing = pages - self.pool.free
        if missing > self._evictable:
            return False
        self.evict(missing)
        return True

    def reserve(
        self, owner: str, ids: Sequence[int], tokens: int, limit: int | None = None
    ) -> Reservation | None:
        """Everything a request needs to begin: what is cached of `ids` locked, and pages of its own
        for the rest of `tokens` slots. None, and nothing changed, where that does not fit.

        A tail that alone stands in the way is given up: else a request that needs the whole pool
        would wait for ever for a page that its own hit keeps.
        """
        hit = self.match(ids, limit)
        assert tokens >= hit.tokens
        own = self.pool.pages_for(tokens) - len(hit.pages)
        if not self._fits(own, hit):
            hit = hit.without_tail()
            if not self._fits(own, hit):
                return None
        self.pool.allocate(owner, 0)
        lock = self.lock(hit, owner)
        self.make_room(own)
        pages = self.pool.grow(owner, own, near=hit.pages[-1] if hit.pages else None)
        assert pages is not None
        return Reservation(hit.pages + pages, hit, lock)

    def _fits(self, own: int, hit: Hit) -> bool:
        """Whether `own` pages can be free once the hit is locked."""
        held = int(hit.tail_node is not None and not hit.tail_node.busy)
        for node in hit.node.up():
            if node.busy:
                break
            held += 1
        return own <= self.pool.free + self._evictable - held

    def _use(self, node: Node) -> None:
        self._now += 1
        node.used_at = self._now

    def _queue(self, node: Node) -> None:
        """Whoever has become a leaf that can go is in the heap, once."""
        if node.is_root or node.queued or node.children or node.busy:
            return
        if len(self._leaves) > 2 * self._nodes + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].in_tree]
            heapify(self._leaves)
        node.queued = True
        heappush(self._leaves, (node.used_at, node.serial, node))

    def _oldest(self) -> Node:
        """Takes the leaf out of the heap that is to go next; there is one."""
        while True:
            used_at, _, node = heappop(self._leaves)
            node.queued = False
            if not node.in_tree or node.children or node.busy:
                continue
            if node.used_at == used_at:
                return node
            self._queue(node)

    # -- integrity ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises CacheCorrupt unless trie, locks, heap and pool agree, page by page.

        A lock whose request owns nothing in the pool any more is lost: nobody will give it back.
        """
        nodes = self._root.all()
        for node in nodes:
            node.check(self._page_bytes)
        cached, pages = set(nodes), sorted(node.page for node in nodes[1:])
        must(pages == sorted(self.pool.pages_of(CACHE)), "cached pages are not the pool's")
        for lock in self._locks.values():
            must(self.pool.owns(lock.owner), f"the lock of {lock.owner} is lost")
            must(lock.node in cached, f"the path locked by {lock.owner} was evicted")
            must(lock.tail is None or lock.tail in cached, f"{lock.owner}'s tail was evicted")
        held = Counter(lock.node for lock in self._locks.values())
        held.update(lock.tail for lock in self._locks.values() if lock.tail is not None)
        must(all(node.locks == held[node] for node in nodes), "locks and live handles differ")
        idle = [node for node in nodes[1:] if not node.busy]
        must(len(nodes) - 1 == self._nodes, f"{self._nodes} pages counted, {len(nodes) - 1} here")
        must(len(idle) == self._evictable, f"{len(idle)} can go, {self._evictable} counted")
        queued = {node: used_at for used_at, _, node in self._leaves}
        for node in idle:
            early = node.children or queued.get(node, self._now + 1) <= node.used_at
            must(bool(early), f"page {node.page} would never be evicted")
        stats = self.stats
        gone = stats.evicted_pages + stats.superseded_pages
        must(stats.inserted_pages == self._nodes + gone, "inserted pages are unaccounted for")


def _cover(parent: Node, key: bytes) -> Node | None:
    """The child whose page begins with all of `key`, which is not empty."""
    child, tokens = parent.longest(key)
    return child if child and tokens * ID_BYTES == len(key) else None
