"""Frames: what is encoded comes back, and nothing else is ever taken for a frame."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgpack
import pytest
import xxhash

from pddrt.errors import BadFrame
from pddrt.frames import (
    MAGIC,
    MAX_HEADER,
    MAX_PAYLOAD,
    PREFIX,
    VERSION,
    Frame,
    FrameReader,
    decode,
    pack_ids,
    parse_prefix,
    unpack_ids,
)


def parse(wire: bytes) -> Frame:
    """The one frame that `wire` is, as a receiver reads it."""
    header_len, payload_len, checksum = parse_prefix(wire[: PREFIX.size])
    body = wire[PREFIX.size :]
    if len(body) != header_len + payload_len:
        raise BadFrame("other length")
    return decode(body[:header_len], body[header_len:], checksum)


def encode(header: bytes, payload: bytes = b"") -> bytes:
    """A frame around any header, with a checksum that is right."""
    digest = xxhash.xxh3_64(header + payload).intdigest()
    return PREFIX.pack(MAGIC, VERSION, 0, len(header), len(payload), digest) + header + payload


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(range(256)) * 50])
@pytest.mark.parametrize(
    "fields",
    [{}, {"a": None, "b": [1, -5, 2**63], "c": {"d": 1.5}, "e": "é", "f": b"\xff", "g": True}],
)
def test_a_frame_comes_back_as_it_was(fields: dict[str, Any], payload: bytes) -> None:
    frame = parse(Frame("kv", fields, payload).head() + payload)
    assert (frame.kind, frame.fields, bytes(frame.payload)) == ("kv", fields, payload)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_buffer_is_the_same_payload(wrap: Any) -> None:
    assert Frame("kv", {}, wrap(b"abc")).head() == Frame("kv", {}, b"abc").head()


def test_the_prefix_counts_bytes_not_items() -> None:
    view = memoryview(bytes(64)).cast("Q")
    assert parse_prefix(Frame("kv", {}, view).head()[: PREFIX.size])[1] == 64


def test_the_wire_form_is_fixed() -> None:
    """Two versions of this program must read each other's frames: this is the layout, byte by
    byte."""
    head = Frame("x", {"n": 1}, b"\x01\x02").head()
    header = b"\x82\xa4kind\xa1x\xa1n\x01"
    digest = xxhash.xxh3_64(header + b"\x01\x02").intdigest()
    assert head == b"pd\x01\x00" + struct.pack("<IQQ", len(header), 2, digest) + header


def test_every_damaged_byte_is_noticed() -> None:
    payload = random.Random(1).randbytes(40)
    wire = Frame("kv", {"request": "r1", "start": 0, "end": 10}, payload).head() + payload
    rng = random.Random(2)
    for at in range(len(wire)):
        if at == 3:  # the reserved byte means nothing yet
            continue
        damaged = bytearray(wire)
        damaged[at] ^= 1 << rng.randrange(8)
        with pytest.raises(BadFrame):
            parse(bytes(damaged))


@pytest.mark.parametrize("seed", range(200))
def test_noise_is_never_a_frame(seed: int) -> None:
    noise = random.Random(seed).randbytes(100)
    with pytest.raises(BadFrame, match="not a frame"):
        parse(noise)
    with pytest.raises(BadFrame):
        parse(MAGIC + bytes([VERSION]) + noise)


@pytest.mark.parametrize(
    ("magic", "version", "header_len", "payload_len", "match"),
    [
        (b"PD", VERSION, 1, 1, "it begins with b'PD'"),
        (MAGIC, VERSION + 1, 1, 1, "version 2; this side speaks 1"),
        (MAGIC, VERSION, MAX_HEADER + 1, 0, "over the limit"),
        (MAGIC, VERSION, 1, MAX_PAYLOAD + 1, "over the limit"),
    ],
)
def test_a_bad_prefix_is_refused_by_name(
    magic: bytes, version: int, header_len: int, payload_len: int, match: str
) -> None:
    with pytest.raises(BadFrame, match=match):
        parse_prefix(PREFIX.pack(magic, version, 0, header_len, payload_len, 0))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        msgpack.packb([]),
        msgpack.packb(["kind"]),
        msgpack.packb(7),
        msgpack.packb(None),
        msgpack.packb("kind"),
        msgpack.packb({}),
        msgpack.packb({"kind": 7}),
        msgpack.packb({"kind": ["kv"]}),
        msgpack.packb({1: 2}),
        msgpack.packb({"kind": "kv"})[:-1],
        msgpack.packb({"kind": "kv"}) + b"\x00",
        b"\xc1",
        b"\x81\xa4kind\xa2\xff\xfe",
        b"\x91" * 5000 + b"\x01",
    ],
)
def test_a_header_that_is_no_map_with_a_kind_is_refused(header: bytes) -> None:
    with pytest.raises(BadFrame, match="header is not a map with a kind"):
        parse(encode(header))


def test_a_missing_field_is_the_peers_mistake() -> None:
    frame = Frame("kv", {"a": 1})
    assert frame["a"] == 1
    with pytest.raises(BadFrame, match="frame 'kv' lacks the field 'b'"):
        frame["b"]


def test_a_field_cannot_replace_the_kind() -> None:
    with pytest.raises(AssertionError):
        Frame("kv", {"kind": "ids"}).head()


def test_accounts_are_kv_ids_and_control_for_all_else() -> None:
    kinds = ("kv", "ids", "hello", "token", "")
    assert [Frame(kind).account for kind in kinds] == ["kv", "ids", "control", "control", "control"]


def test_ids_are_little_endian_words() -> None:
    assert pack_ids([]) == b""
    assert pack_ids([1, 2**32 - 1, 0x01020304]) == bytes.fromhex("01000000 ffffffff 04030201")
    ids = [random.Random(3).randrange(2**32) for _ in range(1000)]
    for wrap in (bytes, bytearray, memoryview):
        assert unpack_ids(wrap(pack_ids(ids))) == ids
    with pytest.raises(OverflowError):
        pack_ids([-1])


def test_packed_ids_of_a_broken_length_are_refused() -> None:
    with pytest.raises(BadFrame, match="7 bytes are no packed token ids"):
        unpack_ids(bytes(7))


# -- the reader of frames ------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [PREFIX.size, 64, 4096])
@pytest.mark.parametrize("step", [1, 7, 1000, 10**9])
def test_the_reader_takes_any_partition_of_the_bytes(scratch: int, step: int) -> None:
    frames = [
        Frame("kv", {"k": k}, random.Random(k).randbytes(size))
        for k, size in enumerate([0, 5, 0, 3000, 1, 9000, 40])
    ]
    wire = b"".join(f.head() + f.payload for f in frames)
    got: list[tuple[Frame, int]] = []
    reader = FrameReader(lambda frame, size: got.append((frame, size)), scratch)
    for at in range(0, len(wire), step):
        reader.feed(wire[at : at + step])
    assert [(f.kind, dict(f.fields), bytes(f.payload)) for f, _ in got] == [
        (f.kind, dict(f.fields), f.payload) for f in frames
    ]
    assert [size for _, size in got] == [len(f.head()) + len(f.payload) for f in frames]
    assert not reader.inside_frame
    reader.feed(wire[:30])
    assert reader.inside_frame


def test_a_reader_told_so_makes_no_room_for_a_large_frame() -> None:
    reader = FrameReader(lambda frame, size: None, 4096)
    reader.only_small = True
    with pytest.raises(BadFrame, match="before the connection is open"):
        reader.feed(PREFIX.pack(MAGIC, VERSION, 0, 10, MAX_PAYLOAD, 0))
