"""PagePool: who owns which KV pages of one instance.

A page is `page_tokens` consecutive slots. Each page has exactly one owner (a name, mostly a request
id) or is free. Pages of one owner are handed out as one contiguous run where a hole is large
enough, so that attention can read a sequence as a view; otherwise as few runs as possible.

Whoever may still write into an owner's pages (a step in flight, a socket read) **pins** the owner
first. Releasing a pinned owner only marks it: the pages become free when the last pin is gone.
Nothing else can free them.

Invariants, checked by `check()`: free holes are disjoint, sorted, never adjacent; free + owned =
all; no page twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from pddrt.types import Run


class PoolCorrupt(AssertionError):
    """The accounting contradicts itself: a bug of ours, never the world's."""


class PagePool:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        assert num_pages >= 0
        assert page_tokens > 0
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.peak_used = 0
        self._holes: list[tuple[int, int]] = [(0, num_pages)] if num_pages else []  # (first, count)
        self._free = num_pages
        self._owned: dict[str, tuple[int, ...]] = {}
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

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` token slots need."""
        return -(-tokens // self.page_tokens)

    def pages_of(self, owner: str) -> tuple[int, ...]:
        return self._owned[owner]

    def runs(self, owner: str, start: int, end: int) -> tuple[Run, ...]:
        """The slots of token positions [start, end) of `owner`, as few runs as their pages
        allow.
        """
        pages, size = self._owned[owner], self.page_tokens
        if not 0 <= start <= end <= len(pages) * size:
            raise PoolCorrupt(
                f"{owner} owns {len(pages)} pages of {size}; asked for [{start}, {end})"
            )
        runs: list[Run] = []
        position = start
        while position < end:
            page = position // size
            slot = pages[page] * size + position % size
            length = min(end, (page + 1) * size) - position
            if runs and runs[-1].slot + runs[-1].length == slot:
                runs[-1] = Run(runs[-1].slot, runs[-1].length + length)
            else:
                runs.append(Run(slot, length))
            position += length
        return tuple(runs)

    # -- taking and giving back --------------------------------------------------------------------

    def allocate(self, owner: str, pages: int) -> bool:
        """Gives `owner` that many pages, or nothing and False. An owner allocates once."""
        if owner in self._owned:
            raise PoolCorrupt(f"{owner} already owns pages")
        if pages > self._free:
            return False
        taken: list[int] = []
        while len(taken) < pages:
            first, count = self._take_hole(pages - len(taken))
            taken.extend(range(first, first + count))
        self._owned[owner] = tuple(taken)
        self._free -= pages
        self.peak_used = max(self.peak_used, self.used)
        return True

    def _take_hole(self, wanted: int) -> tuple[int, int]:
        """Cuts `wanted` pages from the smallest hole that has them, else takes the largest hole
        whole.
        """
        fitting = [h for h in self._holes if h[1] >= wanted]
        first, count = (
            min(fitting, key=lambda h: (h[1], h[0]))
            if fitting
            else max(self._holes, key=lambda h: (h[1], -h[0]))
        )
        at = self._holes.index((first, count))
        taken = min(count, wanted)
        self._holes[at : at + 1] = [(first + taken, count - taken)] if count > taken else []
        return first, taken

    def release(self, owner: str) -> int:
        """Gives back all pages of `owner`: at once, or when its last pin is gone. Pages freed
        now.
        """
        if owner not in self._owned or owner in self._doomed:
            raise PoolCorrupt(f"{owner} owns no pages, or gave them back before")
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
        for first, count in _ranges(pages):
            self._add_hole(first, count)
        self._free += len(pages)
        return len(pages)

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


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal consecutive ranges of `pages`, as (first, count), in the order given."""
    ranges: list[tuple[int, int]] = []
    for page in pages:
        if ranges and sum(ranges[-1]) == page:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((page, 1))
    return ranges
