"""Frames: the only thing that crosses a connection.

    | magic 'pd' 2 | version 1 | reserved 1 | header length 4 | payload length 8 | checksum 8 |
    | header | payload |

All integers little endian. The header is a msgpack map, `{"kind": ..., **fields}`; the payload is
raw bytes (KV in wire order, or packed token ids). The checksum is xxh3-64 over header and payload:
a damaged frame is an error, never data.

Every frame is counted on its link under one of three accounts: `kv` (KV payloads), `ids` (the
relay's token ids on their way to the main decoder) and `control` (everything else).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import xxhash

from pddrt.errors import BadFrame

PREFIX = struct.Struct("<2sBBIQQ")
MAGIC = b"pd"
VERSION = 1
MAX_HEADER = 1 << 24
MAX_PAYLOAD = 1 << 32

_ACCOUNTS = {"kv": "kv", "ids": "ids", "follow": "ids"}


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: its kind, its small fields (msgpack types only), its bulk payload."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes | bytearray | memoryview = b""

    @property
    def account(self) -> str:
        return _ACCOUNTS.get(self.kind, "control")

    def head(self) -> bytes:
        """Prefix and header, to be followed by the payload."""
        assert "kind" not in self.fields, "the kind is no field"
        header: bytes = msgpack.packb({"kind": self.kind, **self.fields})
        digest = xxhash.xxh3_64(header)
        digest.update(self.payload)
        size = memoryview(self.payload).nbytes
        return PREFIX.pack(MAGIC, VERSION, 0, len(header), size, digest.intdigest()) + header

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        header = msgpack.packb({"kind": self.kind, **self.fields})
        return PREFIX.size + len(header) + memoryview(self.payload).nbytes

    def __getitem__(self, name: str) -> Any:
        """A field of the header. Raises BadFrame where the sender left it out."""
        try:
            return self.fields[name]
        except KeyError:
            raise BadFrame(f"frame {self.kind!r} lacks the field {name!r}") from None


def parse_prefix(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Header length, payload length and checksum from the first PREFIX.size bytes. Raises
    BadFrame.
    """
    magic, version, _, header_len, payload_len, checksum = PREFIX.unpack(data)
    if magic != MAGIC:
        raise BadFrame(f"not a frame: it begins with {magic!r}")
    if version != VERSION:
        raise BadFrame(f"frame version {version}; this side speaks {VERSION}")
    if header_len > MAX_HEADER or payload_len > MAX_PAYLOAD:
        raise BadFrame(f"frame of {header_len} + {payload_len} bytes is over the limit")
    return header_len, payload_len, checksum


def decode(
    header: bytes | memoryview, payload: bytes | bytearray | memoryview, checksum: int
) -> Frame:
    """The frame whose parts these are. Raises BadFrame when the checksum or the header is wrong."""
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    if digest.intdigest() != checksum:
        raise BadFrame("checksum mismatch: the frame was damaged on the way")
    try:
        fields = msgpack.unpackb(header)
        kind = fields.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadFrame(f"frame header is not a map with a kind: {error}") from None
    if not isinstance(kind, str):
        raise BadFrame(f"frame header is not a map with a kind: its kind is {kind!r}")
    return Frame(kind, fields, payload)


def _references_of_ours() -> int:
    """What is counted of a buffer that only `Buffers` knows, as it looks at it; how many that are
    is the interpreter's affair."""
    kept = deque([bytearray(1)])
    buffer = kept[0]
    return sys.getrefcount(buffer)


class Buffers:
    """Memory for payloads, used again once nobody refers to it any more: `limit` bytes of it at
    most are kept.

    Fresh memory is dear: the kernel clears each page when it is first touched, which takes several
    times as long as receiving into it. That nobody refers to a buffer is seen by its reference
    count, which a view of it, or of a part of it, raises as well.
    """

    STEP = 16 << 10
    TRIES = 32
    """Buffers looked at before a fresh one is made."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: deque[bytearray] = deque()
        self._size = 0
        self._ours = _references_of_ours()

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` of memory that is the caller's while it refers to it; its content is
        arbitrary."""
        size = -(-nbytes // self.STEP) * self.STEP  # a frame that is hardly longer shall fit, too
        for _ in range(min(self.TRIES, len(self._kept))):
            buffer = self._kept[0]
            self._kept.rotate(-1)
            fits = nbytes <= len(buffer) <= 2 * size
            if fits and sys.getrefcount(buffer) == self._ours:
                return memoryview(buffer)[:nbytes]
        buffer = bytearray(size)
        if size <= self._limit:
            self._kept.append(buffer)
            self._size += size
            while self._size > self._limit:
                self._size -= len(self._kept.popleft())
        return memoryview(buffer)[:nbytes]


class FrameReader:
    """Bytes in, frames out; sans-IO. The caller fills `get_buffer()` and says how much by
    `updated(n)`.

    Small frames are cut out of one scratch buffer, many from one read. A frame that does not fit
    there gets buffers of its own, which the rest of it is received into directly; nobody else holds
    its payload then, which is a bytearray, or a view of memory from `buffers`.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame, int], None],
        scratch_bytes: int,
        buffers: Buffers | None = None,
    ) -> None:
        """`on_frame(frame, wire_bytes)` is called for each frame, from within `updated`; it may be
        exchanged."""
        self.on_frame = on_frame
        self._buffers = buffers
        self.only_small = False
        """Take no frame that needs buffers of its own: a stranger cannot ask for gigabytes."""
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._filled = 0
        self._header = bytearray()
        self._payload: bytearray | memoryview = bytearray()
        self._checksum = 0
        self._parts: deque[memoryview] = (
            deque()
        )  # still to be filled, of a frame with buffers of its own

    @property
    def inside_frame(self) -> bool:
        return bool(self._parts) or self._filled > 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._parts[0] if self._parts else self._scratch[self._filled :]

    def updated(self, nbytes: int) -> None:
        """Takes note of `nbytes` more. Raises BadFrame on what is no frame; the reader is of no use
        then."""
        if self._parts:
            self._fill(nbytes)
        else:
            self._filled += nbytes
            self._cut()

    def feed(self, data: bytes | memoryview) -> None:
        """Copies `data` in."""
        rest = memoryview(data)
        while rest.nbytes:
            room = self.get_buffer()
            n = min(room.nbytes, rest.nbytes)
            room[:n] = rest[:n]
            rest = rest[n:]
            self.updated(n)

    def _cut(self) -> None:
        """Takes the whole frames out of the scratch buffer; moves the rest to its front, or to its
        own buffers."""
        at, scratch, filled = 0, self._scratch, self._filled
        while filled - at >= PREFIX.size:
            header_len, payload_len, checksum = parse_prefix(scratch[at : at + PREFIX.size])
            body = at + PREFIX.size
            size = PREFIX.size + header_len + payload_len
            if size > scratch.nbytes:
                if self.only_small:
                    raise BadFrame(f"a frame of {size} bytes before the connection is open")
                self._header, self._payload = bytearray(header_len), self._memory(payload_len)
                self._checksum = checksum
                both = (memoryview(self._header), memoryview(self._payload))
                self._parts.extend(part for part in both if part.nbytes)
                rest = bytes(scratch[body:filled])
                self._filled = 0
                self.feed(rest)
                return
            if filled - at < size:
                break
            header = bytes(scratch[body : body + header_len])
            payload = bytes(scratch[body + header_len : at + size])
            at += size
            self.on_frame(decode(header, payload, checksum), size)
        scratch[: filled - at] = scratch[at:filled]
        self._filled = filled - at

    def _memory(self, nbytes: int) -> bytearray | memoryview:
        return bytearray(nbytes) if self._buffers is None else self._buffers.take(nbytes)

    def _fill(self, nbytes: int) -> None:
        self._parts[0] = self._parts[0][nbytes:]
        if not self._parts[0].nbytes:
            self._parts.popleft()
        if not self._parts:
            size = PREFIX.size + len(self._header) + len(self._payload)
            frame = decode(bytes(self._header), self._payload, self._checksum)
            self._header, self._payload = bytearray(), bytearray()
            self.on_frame(frame, size)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32."""
    return array("I", ids).tobytes()


def unpack_ids(payload: bytes | bytearray | memoryview) -> list[int]:
    """Inverse of `pack_ids`. Raises BadFrame if the length is no multiple of 4."""
    if len(payload) % 4:
        raise BadFrame(f"{len(payload)} bytes are no packed token ids")
    return array("I", bytes(payload)).tolist()
