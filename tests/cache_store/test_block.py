"""Block format 1: its recorded bytes, and the refusal of everything but an exact block."""

from __future__ import annotations

import dataclasses
import os
import random
import struct
import tracemalloc
from collections import Counter
from typing import Any

import msgpack
import pytest

from batchkv_cache_store.blocks import block as block_module
from batchkv_cache_store.blocks.block import Block, Kind, Limits, Tensor, decode, encode, join
from batchkv_cache_store.blocks.seal import SEAL_BYTES, Sealer
from batchkv_cache_store.errors import BlockRejected, Reason
from cache_store.blocks import PLAIN, encoded, expected, make_block

SECRET = b"sixteen bytes or more"
SIGNED = Sealer(SECRET)
NUM_MUTATIONS = 4_000

GOLDEN = (
    "89424b56424c4b0a01000000f70000004300000000000000000000000000000089a96e616d657370"
    "616365c420a981bb4881102781541ab70f5c16b9275a6867be5efee56e0265b72ccf6df07ba36b65"
    "79c4204f71da53899aa6b1e6700bbfaf56a8f66aa996a464cdfd86acc9bef4970e061ba670617265"
    "6e74c4200015be8909392ad047c0cb9898068e21b76883fdff1986a937d7eabd25fd75fba5696e64"
    "657800a46b696e64a26b76a6746f6b656e73c41001000000020000000300000070110100a6777269"
    "746572a96d61632e6c6f63616ca474696d65cf0000018bcfe56800a774656e736f7273929600aa6b"
    "6579732e636f646573a675696e743332920106001896ffa5737461636ba575696e74389103400300"
    "00000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000102030405060708090a0b0c0d0e0f101112131415161700000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000ff007f"
)
GOLDEN_SEAL = "f13a28b119e57c918ae730bb54883328"
GOLDEN_MAC = "f56c9400643c8baf339be9c9ea0e0a50"


def rejection(data: bytes, block: Block, sealer: Sealer = PLAIN, **changes: Any) -> Reason | None:
    """Why ``data`` is not ``block`` (expected with ``changes``); None if it is."""
    try:
        decode(data, sealer, dataclasses.replace(expected(block), **changes))
    except BlockRejected as fault:
        return fault.reason
    return None


def resealed(content: bytes) -> bytes:
    """Content with a right checksum, as an attacker who knows the format would make it."""
    return content + PLAIN.seal((content,))


def with_header(block: Block, header: bytes) -> bytes:
    """The block with another header, sizes and checksum to match."""
    data = encoded(block)
    (old_size,) = struct.unpack_from("<I", data, 12)
    payload = data[-(-(32 + old_size) // 64) * 64 : -SEAL_BYTES]
    start = 32 + len(header)
    prefix = data[:12] + struct.pack("<IQQ", len(header), len(payload), 0)
    return resealed(prefix + header + bytes(-start % 64) + payload)


def header_fields(block: Block) -> dict[str, Any]:
    """The block's header, unpacked."""
    data = encoded(block)
    (size,) = struct.unpack_from("<I", data, 12)
    fields: dict[str, Any] = msgpack.unpackb(data[32 : 32 + size])
    return fields


def test_golden_bytes() -> None:
    """The bytes of a known block are those recorded here; they may never change in format 1."""
    data = encoded(make_block())
    assert data[:-SEAL_BYTES].hex() == GOLDEN
    assert data[-SEAL_BYTES:].hex() == GOLDEN_SEAL
    assert encoded(make_block(), SIGNED)[-SEAL_BYTES:].hex() == GOLDEN_MAC


@pytest.mark.parametrize("sealer", [PLAIN, SIGNED], ids=["checksum", "mac"])
def test_a_block_comes_back_as_it_was(sealer: Sealer) -> None:
    """Decoding gives every field and every tensor back, from any kind of buffer."""
    block = make_block(num_bytes=4000)
    for buffer in (encoded(block, sealer), bytearray(encoded(block, sealer))):
        assert decode(buffer, sealer, expected(block)) == block


def test_decoding_copies_nothing() -> None:
    """Tensors are read-only views into the buffer, each at a multiple of 64."""
    block = make_block(num_bytes=1 << 20)
    data = encoded(block)
    tracemalloc.start()
    try:
        found = decode(data, PLAIN, expected(block))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
    for tensor in found.tensors:
        view = memoryview(tensor.data)
        assert view.obj is data and view.readonly
        assert data.index(bytes(view)) % 64 == 0


def test_encoding_copies_no_tensor() -> None:
    """The buffers of an encoded block are the tensors themselves, not copies."""
    block = make_block(num_bytes=1 << 20)
    parts = encode(block, PLAIN)
    assert any(memoryview(part).obj is block.tensors[0].data for part in parts)


def test_a_block_without_tensors_or_tokens() -> None:
    """Empty tables, empty tokens and tensors without bytes are blocks, too."""
    empty = Tensor(3, "none", "float16", (2, 0, 5), b"")
    for tensors in ((), (empty,), (empty, *make_block().tensors, empty)):
        block = dataclasses.replace(make_block(), tensors=tensors, tokens=b"")
        assert decode(encoded(block), PLAIN, expected(block)) == block


@pytest.mark.parametrize("sealer", [PLAIN, SIGNED], ids=["checksum", "mac"])
def test_every_flipped_byte_is_a_miss(sealer: Sealer) -> None:
    """A change of any bit of any byte makes the block refused, with a reason."""
    block = make_block()
    data = bytearray(encoded(block, sealer))
    seen: Counter[Reason | None] = Counter()
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            data[place] ^= flip
            seen[rejection(bytes(data), block, sealer)] += 1
            data[place] ^= flip
    assert seen[None] == 0 and seen.total() == 3 * len(data)
    assert {Reason.BAD_MAGIC, Reason.VERSION, Reason.LIMITS, Reason.TRUNCATED} <= set(seen)


@pytest.mark.parametrize("sealer", [PLAIN, SIGNED], ids=["checksum", "mac"])
def test_every_truncation_is_a_miss(sealer: Sealer) -> None:
    """A block cut at any place is truncated; one with extra bytes is refused, too."""
    block = make_block()
    data = encoded(block, sealer)
    assert {rejection(data[:n], block, sealer) for n in range(len(data))} == {Reason.TRUNCATED}
    assert rejection(data + b"\0", block, sealer) is Reason.TRAILING


def test_foreign_files_are_told_apart() -> None:
    """Other formats, and other versions of this one, have reasons of their own."""
    block = make_block()
    data = encoded(block)
    for foreign in (b"\x93NUMPY\x01\x00" + bytes(200), b"PK\x03\x04" * 50, bytes(500)):
        assert rejection(foreign, block) is Reason.BAD_MAGIC
    later = resealed(data[:8] + struct.pack("<H", 2) + data[10:-SEAL_BYTES])
    assert rejection(later, block) is Reason.VERSION


def test_another_block_than_asked_for_is_a_miss() -> None:
    """A whole block is refused if namespace, key, kind or tokens differ from the expected ones."""
    block = make_block()
    data = encoded(block)
    assert rejection(data, block, namespace=b"o" * 32) is Reason.NAMESPACE
    assert rejection(data, block, key=b"o" * 32) is Reason.KEY
    assert rejection(data, block, kind=Kind.STATE) is Reason.KIND
    assert rejection(data, block, tokens=block.tokens[:-1] + b"\x01") is Reason.TOKENS


def test_a_secret_refuses_what_is_not_signed_with_it() -> None:
    """With a secret, blocks without a MAC or with another secret's are misses; and without one,
    signed blocks cannot be checked, so they are misses and yet no damage."""
    block = make_block()
    signed = encoded(block, SIGNED)
    assert rejection(encoded(block), block, SIGNED) is Reason.MAC
    assert rejection(signed, block, Sealer(b"another secret of ours")) is Reason.MAC
    assert rejection(signed, block) is Reason.NO_SECRET and not Reason.NO_SECRET.is_damage
    unsigned_flag = signed[:10] + b"\0\0" + signed[12:-SEAL_BYTES]
    assert rejection(resealed(unsigned_flag), block, SIGNED) is Reason.MAC
    with pytest.raises(ValueError, match="16 bytes"):
        Sealer(b"short")


def test_lying_sizes_take_no_memory() -> None:
    """A few bytes that claim gigabytes are refused before anything of that size is made."""
    block = make_block()
    data = encoded(block)
    liars = [data[:12] + struct.pack("<IQ", 2**32 - 1, 24) + data[24:]]
    liars += [
        resealed(data[:16] + struct.pack("<Q", claim) + data[24:-SEAL_BYTES])
        for claim in (10 * 2**30, 2**63, 2**64 - 1, 200 * 2**20)
    ]
    for change in (
        {"tensors": [[0, "t", "uint8", [10 * 2**30], 0, 10 * 2**30]]},
        {"tensors": [[0, "t", "uint8", [2**27, 2**27, 2**27], 0, 2**81 % 2**64]]},
        {"tensors": [[0, "t", "uint8", [0], 64, 0]] * 2049},
        {"tokens": bytes(4 * 4097)},
    ):
        liars.append(with_header(block, msgpack.packb({**header_fields(block), **change})))
    # msgpack arrays that claim a million items each, one inside the other.
    liars.append(with_header(block, b"\xdd\x00\x0f\xff\xff" * 400))
    liars.append(with_header(block, b"\xdc\x07\xff" * 80_000))
    tracemalloc.start()
    try:
        reasons = [rejection(liar, block) for liar in liars]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20
    assert None not in reasons and {Reason.LIMITS, Reason.TENSORS, Reason.HEADER} <= set(reasons)


BAD_TABLES: dict[str, object] = {
    # The payload has 67 bytes: all of these but the second end with it.
    "overlap": [[0, "a", "uint8", [24], 0, 24], [0, "b", "uint8", [47], 20, 47]],
    "outside": [[0, "a", "uint8", [3], 2**40, 3]],
    "negative offset": [[0, "a", "uint8", [3], -64, 3], [0, "b", "uint8", [3], 64, 3]],
    "unaligned": [[0, "a", "uint8", [24], 0, 24], [0, "b", "uint8", [43], 24, 43]],
    "shape is not bytes": [[0, "a", "uint32", [24], 0, 24], [0, "b", "uint8", [3], 64, 3]],
    "unknown dtype": [[0, "a", "object", [3], 0, 24], [0, "b", "uint8", [3], 64, 3]],
    "dtype is no text": [[0, "a", [], [24], 0, 24]],
    "true is no size": [[0, "a", "uint8", [True], 0, True]],
    "negative dimensions": [[0, "a", "uint8", [-4, -6], 0, 24], [0, "b", "uint8", [3], 64, 3]],
    "nested shape": [[0, "a", "uint8", [[24]], 0, 24]],
    "shape is no list": [[0, "a", "uint8", 24, 0, 24]],
    "many dimensions": [[0, "a", "uint8", [1] * 9, 0, 1]],
    "short row": [[0, "a", "uint8", [24], 0]],
    "row is no list": [7],
    "no name": [[0, "", "uint8", [24], 0, 24]],
    "layer is no number": [["0", "a", "uint8", [24], 0, 24]],
    "place is no number": [[0, "a", "uint8", [24], 0.0, 24]],
    "hidden payload": [[0, "a", "uint8", [24], 0, 24]],
    "no list": {},
}


@pytest.mark.parametrize("table", BAD_TABLES.values(), ids=BAD_TABLES)
def test_wrong_tables_are_refused(table: object) -> None:
    """A table with a right checksum that is not what encode writes is a miss."""
    block = make_block()
    data = with_header(block, msgpack.packb({**header_fields(block), "tensors": table}))
    assert rejection(data, block) is Reason.TENSORS


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"namespace": "n" * 32},
        {"parent": None},
        {"index": -1},
        {"index": True},
        {"time": 1.5},
        {"kind": "other"},
        {"kind": ["kv"]},
        {"tokens": b"abc"},
        {"writer": b"mac"},
        {"writer": "w" * 300},
        {"more": 1},
    ],
    ids=str,
)
def test_wrong_fields_are_refused(change: dict[str, object]) -> None:
    """A header with a right checksum and a wrong field is a miss."""
    block = make_block()
    data = with_header(block, msgpack.packb({**header_fields(block), **change}))
    assert rejection(data, block) is Reason.HEADER


def test_random_mutations_are_misses() -> None:
    """4,000 mutations, half with a right checksum, give a miss with a reason, or the block."""
    rng = random.Random(7)
    block = make_block()
    data = encoded(block)
    (header_size,) = struct.unpack_from("<I", data, 12)
    seen: Counter[Reason | None] = Counter()
    tracemalloc.start()
    try:
        for number in range(NUM_MUTATIONS):
            changed = mutated(data, rng, header_size)
            if number % 2:
                changed = resealed(changed[:-SEAL_BYTES])
            reason = rejection(changed, block)
            assert reason is not None or same_contents(changed, block), changed.hex()
            seen[reason] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20
    assert len(seen) > 8 and seen.total() == NUM_MUTATIONS, seen


def mutated(data: bytes, rng: random.Random, header_size: int) -> bytes:
    """Overwrite, remove, insert or move bytes, mostly in the prefix and the header."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = rng.choice((32, 32 + header_size, 32 + header_size, len(changed)))
        place = rng.randrange(min(end, len(changed)))
        match rng.randrange(5):
            case 0 | 1:
                changed[place] = rng.randrange(256)
            case 2:
                length = rng.randrange(1, 9)
                changed[place : place + length] = rng.randbytes(length)
            case 3:
                del changed[place : place + rng.randrange(1, 5)]
            case _:
                changed[place:place] = changed[place : place + rng.randrange(1, 9)]
        if len(changed) < 64:
            return bytes(changed)
    return bytes(changed)


def same_contents(data: bytes, block: Block) -> bool:
    """A mutation of padding, parent, writer, time, index or names is still the expected block."""
    found = decode(data, PLAIN, expected(block))
    return (found.key, found.tokens) == (block.key, block.tokens)


def test_blocks_that_cannot_be_read_cannot_be_written() -> None:
    """encode refuses with ValueError whatever decode would refuse."""
    block = make_block()
    tensor = block.tensors[0]
    wrong: list[dict[str, Any]] = [
        {"key": b"short"},
        {"index": -1},
        {"kind": "kvs"},
        {"tokens": b"123"},
        {"tensors": (dataclasses.replace(tensor, shape=(7,)),)},
        {"tensors": (dataclasses.replace(tensor, dtype="object"),)},
        {"tensors": (dataclasses.replace(tensor, name="\ud800"),)},
        {"writer": "\ud800"},
    ]
    for change in wrong:
        with pytest.raises(ValueError):
            encode(dataclasses.replace(block, **change), PLAIN)
    with pytest.raises(ValueError, match="at most 500"):
        encode(make_block(num_bytes=400), PLAIN, Limits(max_block_bytes=500))
    with pytest.raises(ValueError, match="header of"):
        encode(block, PLAIN, Limits(max_header_bytes=64))


def test_limits_are_the_readers() -> None:
    """A reader with lower limits refuses what a writer with higher ones wrote."""
    block = make_block(num_bytes=4000)
    data = encoded(block)
    for limits in (
        Limits(max_block_bytes=4000),
        Limits(max_header_bytes=16),
    ):
        with pytest.raises(BlockRejected) as caught:
            decode(data, PLAIN, expected(block), limits)
        assert caught.value.reason is Reason.LIMITS


def test_nothing_is_read_from_random_bytes() -> None:
    """Random bytes after a right magic are always refused."""
    rng = random.Random(1)
    block = make_block()
    for _ in range(500):
        data = block_module.MAGIC + rng.randbytes(rng.randrange(300))
        assert rejection(data, block) is not None
    assert rejection(os.urandom(100), block) is Reason.BAD_MAGIC
    assert join([b"a", memoryview(b"b")]) == b"ab"
