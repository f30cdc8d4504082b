"""PagePool: who owns which KV pages of one instance.

A page is `page_tokens` consecutive slots. Each page has exactly one owner (a name, mostly a request
id) or is free. Pages of one owner are handed out as one contiguous run where a hole is large
enough, so that attention can read a sequence as a view; otherwise as few runs as possible.

Whoever may still write into an owner's pages (a step in flight, a socket read) **pins** the owner
first. Releasing a pinned owner only marks it: the pages become free when the last pin is gone.
Nothing else can free them, and none of them can go to another owner.

An owner's pages are listed in the order in which it got them. That is the order of its tokens only
while it keeps all of them and reads no others: a request that shares pages of a prefix cache, or
gives some of its own to it (`move`), keeps its page table itself and asks `runs_of` for slots.

Invariants, checked by `check()`: free holes are disjoint, sorted, never adjacent; free + owned =
all; no page twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from pddrt.types import Run

Change = Literal["taken", "kept", "freed", "over", "table"]
Journal = Callable[[Change, str, Collection[int]], None]
"""Told of (change, owner, pages) as it happens: free pages are the owner's (`taken`), the owner's
are another's (`kept`: the cache's), are free (`freed`), or are free and the owner is no more
(`over`). `table` is KVMemory's own: the pages that a request's positions lie in now."""


class PoolCorrupt(AssertionError):
    """The accounting contradicts itself: a bug of ours, never the world's."""


def runs_of(pages: Sequence[int], page_tokens: int, start: int, end: int) -> tuple[Run, ...]:
    """The slots of token positions [start, end) of a page table, as few runs as its pages allow.

    `pages` may belong to several owners: shared ones first, own ones behind. Raises PoolCorrupt
    for positions outside the table.
    """
    if not 0 <= start <= end <= len(pages) * page_tokens:
        raise PoolCorrupt(f"{len(pages)} pages of {page_tokens} do not hold [{start}, {end})")
    if start == end:
        return ()
    first, last = start // page_tokens, (end - 1) // page_tokens
    pieces = ranges(pages[first : last + 1])
    runs = [Run(page * page_tokens, count * page_tokens) for page, count in pieces]
    skipped, unused = start - first * page_tokens, (last + 1) * page_tokens - end
    runs[0] = Run(runs[0].slot + skipped, runs[0].length - skipped)
    runs[-1] = Run(runs[-1].slot, runs[-1].length - unused)
    return tuple(runs)


class PagePool:
    def __init__(self, num_pages: int, page_tokens: int, journal: Journal | None = None) -> None:
        assert num_pages >= 0
        assert page_tokens > 0
        self._journal = journal
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.peak_used = 0
        self._holes: list[tuple[int, int]] = [(0, num_pages)] if num_pages else []  # (first, count)
        self._free = num_pages
        self._owned: dict[str, dict[int, None]] = {}  # pages in the order they came, as keys
        self._pins: dict[str, int] = {}
        self._doomed: set[str] = set()

    # -- what there is -----------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.num_pages - self._free

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._owned)

    def owns(self, owner: str) -> bool:
        """Also true while pages given back wait for their last writer."""
        return owner in self._owned

    def pinned(self, owner: str) -> bool:
        """Whether somebody may still write into the pages of `owner`."""
        return owner in self._pins

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` token slots need."""
        return -(-tokens // self.page_tokens)

    def pages_of(self, owner: str) -> tuple[int, ...]:
        return tuple(self._owned[owner])

    def owns_page(self, owner: str, page: int) -> bool:
        return page in self._owned.get(owner, ())

    def runs(self, owner: str, start: int, end: int) -> tuple[Run, ...]:
        """The slots of token positions [start, end) of `owner`, which has kept all its pages."""
        return runs_of(self.pages_of(owner), self.page_tokens, start, end)

    # -- taking and giving back --------------------------------------------------------------------

    def allocate(self, owner: str, pages: int) -> bool:
        """Gives `owner` that many pages, or nothing and False. An owner allocates once."""
        if owner in self._owned:
            raise PoolCorrupt(f"{owner} already owns pages")
        if pages > self._free:
            return False
        self._owned[owner] = {}
        self._give(owner, self._take(pages))
        return True

    def grow(self, owner: str, pages: int, near: int | None = None) -> tuple[int, ...] | None:
        """Gives `owner` that many more pages and says which, or nothing and None.

        `near`: the last page of its table. What is free right behind it is taken first, so that
        the sequence goes on in the same run.
        """
        self._settled(owner)
        if pages > self._free:
            return None
        taken = self._take(pages, near)
        self._give(owner, taken)
        return tuple(taken)

    def _book(self, change: Change, owner: str, pages: Collection[int]) -> None:
        if self._journal is not None and (pages or change == "over"):
            self._journal(change, owner, pages)

    def _give(self, owner: str, pages: list[int]) -> None:
        self._book("taken", owner, pages)
        self._owned[owner].update(dict.fromkeys(pages))
        self._free -= len(pages)
        self.peak_used = max(self.peak_used, self.used)

    def _take(self, wanted: int, near: int | None = None) -> list[int]:
        """Cuts `wanted` pages out of the holes: from the one behind `near`, then whole holes,
        largest first, until the smallest hole that has the rest can serve it.
        """
        taken: list[int] = []
        if near is not None:
            at = bisect_left(self._holes, (near + 1, 0))
            if at < len(self._holes) and self._holes[at][0] == near + 1:
                taken += self._cut(at, wanted)
        while wanted > len(taken):
            rest = wanted - len(taken)
            fitting = [h for h in self._holes if h[1] >= rest]
            if fitting:
                hole = min(fitting, key=lambda h: (h[1], h[0]))
                taken += self._cut(self._holes.index(hole), rest)
            else:
                taken += self._take_largest(rest)
        return taken

    def _cut(self, at: int, wanted: int) -> range:
        first, count = self._holes[at]
        taken = min(count, wanted)
        self._holes[at : at + 1] = [(first + taken, count - taken)] if count > taken else []
        return range(first, first + taken)

    def _take_largest(self, wanted: int) -> list[int]:
        """Whole holes, largest first, while the next one is smaller than what is still wanted.

        In one pass: a pool that a cache has split into single pages has thousands of holes.
        """
        taken: list[int] = []
        gone: set[int] = set()
        for first, count in sorted(self._holes, key=lambda h: (-h[1], h[0])):
            if count >= wanted - len(taken):
                break
            taken.extend(range(first, first + count))
            gone.add(first)
        self._holes = [h for h in self._holes if h[0] not in gone]
        return taken

    def move(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Makes `target`, which may be new, the owner of these pages of `source`.

        Raises PoolCorrupt, with nothing changed, where `source` does not own them or somebody may
        still write into its pages.
        """
        owned = self._settled(target) if target in self._owned else {}
        self._disown(source, pages)
        self._book("kept", source, pages)
        self._owned[target] = owned
        owned.update(dict.fromkeys(pages))

    def release_pages(self, owner: str, pages: Sequence[int]) -> None:
        """Frees these pages of `owner`, who goes on. Raises PoolCorrupt as `move` does."""
        self._disown(owner, pages)
        self._book("freed", owner, pages)
        self._free_all(pages)

    def _disown(self, owner: str, pages: Sequence[int]) -> None:
        owned = self._settled(owner)
        if owner in self._pins:
            raise PoolCorrupt(f"somebody may still write into the pages of {owner}")
        if len(set(pages)) != len(pages):
            raise PoolCorrupt(f"{owner} is to lose a page twice")
        if not owned.keys() >= set(pages):
            raise PoolCorrupt(f"{owner} does not own {sorted(set(pages) - owned.keys())}")
        for page in pages:
            del owned[page]

    def _settled(self, owner: str) -> dict[int, None]:
        """The pages of an owner that exists and is not about to go."""
        if owner not in self._owned or owner in self._doomed:
            raise PoolCorrupt(f"{owner} owns no pages, or gave them back before")
        return self._owned[owner]

    def release(self, owner: str) -> int:
        """Gives back all pages of `owner`: at once, or when its last pin is gone. Pages freed
        now.
        """
        self._settled(owner)
        if owner in self._pins:
            self._doomed.add(owner)
            return 0
        return self._give_back(owner)

    def pin(self, owner: str) -> None:
        """Somebody may write into the pages of `owner` until `unpin`."""
        if owner not in self._owned:
            raise PoolCorrupt(f"{owner} owns no pages to write into")
        self._pins[owner] = self._pins.get(owner, 0) + 1

    def unpin(self, owner: str) -> int:
        """One writer is done. Pages freed by that: those of an owner that was released
        meanwhile.
        """
        left = self._pins.get(owner, 0) - 1
        if left < 0:
            raise PoolCorrupt(f"{owner} has no writer to take away")
        if left:
            self._pins[owner] = left
            return 0
        del self._pins[owner]
        if owner not in self._doomed:
            return 0
        self._doomed.discard(owner)
        return self._give_back(owner)

    def _give_back(self, owner: str) -> int:
        pages = self._owned.pop(owner)
        self._book("over", owner, pages)
        self._free_all(pages)
        return len(pages)

    def _free_all(self, pages: Collection[int]) -> None:
        for first, count in ranges(sorted(pages)):
            self._add_hole(first, count)
        self._free += len(pages)

    def _add_hole(self, first: int, count: int) -> None:
        at = bisect_left(self._holes, (first, 0))
        if at and sum(self._holes[at - 1]) > first:
            raise PoolCorrupt(f"page {first} is freed twice")
        if at < len(self._holes) and first + count > self._holes[at][0]:
            raise PoolCorrupt(f"page {self._holes[at][0]} is freed twice")
        low, high = at, at
        if at and sum(self._holes[at - 1]) == first:
            low, first, count = at - 1, self._holes[at - 1][0], count + self._holes[at - 1][1]
        if at < len(self._holes) and first + count == self._holes[at][0]:
            high, count = at + 1, count + self._holes[at][1]
        self._holes[low:high] = [(first, count)]

    # -- integrity ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PoolCorrupt unless every page is free or owned, once."""
        seen = [page for first, count in self._holes for page in range(first, first + count)]
        if len(seen) != self._free:
            raise PoolCorrupt(f"{len(seen)} pages in holes, {self._free} counted free")
        if seen != sorted(set(seen)) or any(
            sum(a) >= b[0] for a, b in zip(self._holes, self._holes[1:], strict=False)
        ):
            raise PoolCorrupt(f"free holes overlap or touch: {self._holes}")
        for pages in self._owned.values():
            seen.extend(pages)
        if sorted(seen) != list(range(self.num_pages)):
            raise PoolCorrupt("a page is lost, or has two owners")
        if not self._doomed <= set(self._pins) <= set(self._owned):
            raise PoolCorrupt("pins and owners disagree")


def ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal consecutive ranges of `pages`, as (first, count), in the order given."""
    found: list[tuple[int, int]] = []
    first = count = 0
    for page in pages:
        if count and page == first + count:
            count += 1
            continue
        if count:
            found.append((first, count))
        first, count = page, 1
    return [*found, (first, count)] if count else found
