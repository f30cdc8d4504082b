"""The trie under the radix cache: pages by the tokens they hold.

Every node is one page of KV: the packed ids it holds (a whole page, or fewer in a **partial** page,
which ends a sequence and is always a leaf) and a digest chained over everything before it. Children
are found by the packed ids themselves, not by their digest: a collision cannot hand out foreign KV.
Digests name prefixes towards others; they are the same in every process, as `hash()` is not.

This file knows what is where. Who may use it, for how long and whose pages they are is `radix`'s;
the counts that it keeps for that on a node are described there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from pddrt.frames import pack_ids
from pddrt.kv.pages import PoolCorrupt

ID_BYTES = 4
ROOT_PAGE = 1 << 62
"""No index into any pool: the root holds no page."""


class CacheCorrupt(PoolCorrupt):
    """The cache contradicts itself, its pool or its caller: a bug of ours, never the world's."""


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CacheCorrupt(otherwise)


def prefix_digest(fingerprint: str, page_tokens: int, ids: Sequence[int]) -> str:
    """Names a prefix: xxh3-128, chained page by page from the model's fingerprint on.

    The same in every process. Comparable between instances of the same page size only.
    """
    digest, packed, size = _digest(fingerprint.encode()), pack_ids(ids), page_tokens * ID_BYTES
    for at in range(0, len(packed), size):
        digest = _digest(digest + packed[at : at + size])
    return digest.hex()


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


@dataclass(slots=True, eq=False)
class Node:
    """One cached page; the root, which is none, has no parent, as has a node that was taken out."""

    parent: Node | None
    key: bytes
    page: int
    digest: bytes
    serial: int
    """Order of creation: breaks ties, never by address."""
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    """The children's keys, sorted."""
    locks: int = 0
    busy: int = 0
    used_at: int = 0
    queued: bool = False

    @classmethod
    def root(cls, fingerprint: str) -> Node:
        return cls(None, b"", ROOT_PAGE, _digest(fingerprint.encode()), 0)

    @property
    def is_root(self) -> bool:
        return self.page == ROOT_PAGE

    @property
    def in_tree(self) -> bool:
        return self.parent is not None or self.is_root

    def add(self, key: bytes, page: int, serial: int) -> Node:
        child = Node(self, key, page, _digest(self.digest + key), serial)
        self.children[key] = child
        insort(self.order, key)
        return child

    def take_out(self) -> Node:
        """Unlinks this leaf; its parent."""
        parent = self.parent
        assert parent is not None
        assert not self.children
        del parent.children[self.key]
        del parent.order[bisect_left(parent.order, self.key)]
        self.parent = None
        return parent

    def walk(self, packed: bytes, end: int, page_bytes: int) -> tuple[Node, list[int]]:
        """From the root down the whole pages of packed[:end]: the last node, and all pages."""
        node, pages, at = self, [], 0
        while at + page_bytes <= end:
            child = node.children.get(packed[at : at + page_bytes])
            if child is None:
                break
            node = child
            pages.append(child.page)
            at += page_bytes
        return node, pages

    def longest(self, rest: bytes) -> tuple[Node | None, int]:
        """The child that shares most tokens with `rest`, and how many; None where that is none.

        Among sorted keys the longest common prefix is with a neighbour of where `rest` would be.
        """
        at = bisect_left(self.order, rest)
        best, tokens = None, 0
        for key in self.order[max(0, at - 1) : at + 1]:
            if (common := _common_tokens(key, rest)) > tokens:
                best, tokens = self.children[key], common
        return best, tokens

    def up(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def all(self) -> list[Node]:
        """This node and everything below it, parents first."""
        nodes = [self]
        for node in nodes:  # grows as it goes
            nodes.extend(node.children.values())
        return nodes

    def check(self, page_bytes: int) -> None:
        """Raises CacheCorrupt unless this node fits to its children."""
        where = f"page {self.page}"
        must(self.order == sorted(self.children), f"{where}: its children are not in order")
        partial = not self.is_root and len(self.key) < page_bytes
        must(not (partial and self.children), f"{where} is partial, but no leaf")
        busy = self.locks + sum(child.busy > 0 for child in self.children.values())
        must(self.busy == busy, f"{where}: {self.busy} counted busy, {busy} are")
        for key, child in self.children.items():
            must(child.parent is self and child.key == key, f"{where} has a foreign child")
            must(0 < len(key) <= page_bytes, f"page {child.page} holds {len(key)} bytes of ids")
            digest = _digest(self.digest + key)
            must(child.digest == digest, f"page {child.page} has the digest of other tokens")


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences begin with together."""
    size = min(len(a), len(b))
    differs = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differs.bit_length() + 7) // 8) // ID_BYTES
