"""Forged blocks with a right checksum, as an attacker who knows the format makes them."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from batchkv_cache_store.blocks import block as block_module
from batchkv_cache_store.blocks.block import Expected, Kind, Limits, decode, decode_any
from batchkv_cache_store.blocks.manifests import decode_manifest
from batchkv_cache_store.blocks.names import block_name, checked, is_name
from batchkv_cache_store.blocks.peek import peek, peek_links
from batchkv_cache_store.blocks.seal import SEAL_BYTES, Buffer, Sealer
from batchkv_cache_store.errors import BlockRejected
from batchkv_cache_store.keys import chain, root_key
from batchkv_cache_store.lookup import Wanted
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.memory import MemoryTier
from cache_store.blocks import NAMESPACE, PLAIN, TOKENS, chain_of, encoded, expected, make_block

BLOCK = make_block()
DATA = encoded(BLOCK)
(HEADER_SIZE,) = struct.unpack_from("<I", DATA, 12)
FIELDS: dict[str, Any] = msgpack.unpackb(DATA[32 : 32 + HEADER_SIZE])
PAYLOAD = DATA[-(-(32 + HEADER_SIZE) // 64) * 64 : -SEAL_BYTES]


def sealed(content: bytes, sealer: Sealer = PLAIN) -> bytes:
    return content + sealer.seal((content,))


def lying(header: bytes, payload: bytes = PAYLOAD, sealer: Sealer = PLAIN) -> bytes:
    """A block with this header and payload, sizes and seal to match."""
    prefix = DATA[:10] + struct.pack("<HIQQ", int(sealer.is_keyed), len(header), len(payload), 0)
    start = len(prefix) + len(header)
    return sealed(prefix + header + bytes(-start % 64) + payload, sealer)


def fields(**changes: Any) -> bytes:
    """A block with another value in its header."""
    return lying(msgpack.packb({**FIELDS, **changes}))


def row(**changes: Any) -> bytes:
    """A block with another value in the row of its first tensor."""
    names = ("layer", "name", "dtype", "shape", "offset", "num_bytes")
    first = dict(zip(names, FIELDS["tensors"][0], strict=True)) | changes
    return fields(tensors=[[*first.values()], *FIELDS["tensors"][1:]])


def sizes(header: int, payload: int, flags: int = 0, zeros: int = 0) -> bytes:
    """A block with other values in its first 32 bytes."""
    prefix = DATA[:10] + struct.pack("<HIQQ", flags, header, payload, zeros)
    return sealed(prefix + DATA[32:-SEAL_BYTES])


HEADER = DATA[32 : 32 + HEADER_SIZE]
HOSTILE: dict[str, bytes] = {
    "header of 4 GB": sizes(2**32 - 1, len(PAYLOAD)),
    "payload of 2**64": sizes(HEADER_SIZE, 2**64 - 1),
    "payload of 2**63": sizes(HEADER_SIZE, 2**63),
    "payload that ends before it starts": sizes(HEADER_SIZE, 2**64 - 64),
    "header longer than all": sizes(len(DATA) * 2, 0),
    "header of nothing": sizes(0, len(DATA) - 64 - SEAL_BYTES),
    "a flag nobody knows": sizes(HEADER_SIZE, len(PAYLOAD), flags=2),
    "a MAC that is none": sizes(HEADER_SIZE, len(PAYLOAD), flags=1),
    "zeros that are not": sizes(HEADER_SIZE, len(PAYLOAD), zeros=1),
    "10,000 deep": lying(b"\x91" * 10_000 + b"\xc0"),
    "a map of 2**32": lying(b"\xdf\xff\xff\xff\xff"),
    "an array of 2**32 tensors": lying(HEADER[: HEADER.index(b"tensors") + 7] + b"\xdd\xff" * 4),
    "a text of 4 GB": lying(b"\x89\xa9namespace\xdb\xff\xff\xff\xff"),
    "an extension": lying(msgpack.packb({**FIELDS, "writer": msgpack.ExtType(1, b"x")})),
    "a field too many": fields(__class__="os.mkdir"),
    "a field twice": lying(HEADER.replace(b"\xa6parent", b"\xa6writer", 1)),
    "a field less": lying(msgpack.packb({k: v for k, v in FIELDS.items() if k != "time"})),
    "more behind the header": lying(HEADER + b"\xc0"),
    "tokens of 16 MB": fields(tokens=bytes(2**24)),
    "tokens of three bytes": fields(tokens=b"abc"),
    "a token too many": fields(tokens=FIELDS["tokens"] + b"\x01\x00\x00\x00"),
    "other tokens under the same key": fields(tokens=bytes(len(FIELDS["tokens"]))),
    "another namespace": fields(namespace=bytes(32)),
    "a namespace of 31": fields(namespace=bytes(31)),
    "a writer of 10 kB": fields(writer="w" * 10_000),
    "an index that is true": fields(index=True),
    "an index of 2**64": fields(index=2**64 - 1),
    "a time below zero": fields(time=-1),
    "a kind that is a path": fields(kind="../../kv"),
    "tensors that are a map": fields(tensors={}),
    "5,000 tensors": fields(tensors=[FIELDS["tensors"][0]] * 5000),
    "a dtype that is code": row(dtype="O"),
    "a dtype that is an object": row(dtype="object"),
    "a dtype that is a list": row(dtype=["uint32"]),
    "a shape below zero": row(shape=[-1, -6]),
    "a shape of 2**63": row(shape=[2**62, 6]),
    "a shape whose product is far": row(shape=[2**28] * 8),
    "a shape of nine": row(shape=[1] * 8 + [6]),
    "a shape of fractions": row(shape=[1.0, 6.0]),
    "a shape of truths": row(shape=[True, 6]),
    "a shape of lists": row(shape=[[1], [6]]),
    "an offset below zero": row(offset=-64),
    "an offset of 2**63": row(offset=2**63),
    "an offset beyond the end": row(offset=64),
    "an offset that is no multiple": row(offset=1),
    "bytes that reach into the next": row(num_bytes=68, shape=[1, 17]),
    "bytes beyond the payload": row(num_bytes=2**32, shape=[1, 2**30]),
    "bytes fewer than the shape's": row(num_bytes=20),
    "tensors that lie on one another": fields(
        tensors=[FIELDS["tensors"][0], [*FIELDS["tensors"][1][:4], 0, 3]]
    ),
    "tensors in another order": fields(tensors=FIELDS["tensors"][::-1]),
    "a payload that goes on": lying(HEADER, PAYLOAD + bytes(64)),
    "a layer of -2": row(layer=-2),
    "a name of nothing": row(name=""),
    "a name of 10 kB": row(name="n" * 10_000),
    "nothing": b"",
    "a pickle": b"cos\nmkdir\n(S'made-by-a-payload'\ntR.",
    "cut": DATA[:-1],
    "more": DATA + b"\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_block_that_lies_is_a_miss(name: str) -> None:
    """A forged block is refused with a reason, takes no memory, and is a miss for the store."""
    tracemalloc.start()
    try:
        with pytest.raises(BlockRejected):
            decode(HOSTILE[name], PLAIN, expected(BLOCK))
        for look in (peek, peek_links, decode_any):
            try:
                look(HOSTILE[name], *([PLAIN] if look is decode_any else []))
            except BlockRejected:
                continue
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_store_goes_on_without_it(name: str) -> None:
    """A foreign object under a block's name is a miss; the next tier is searched."""
    tier = MemoryTier(2**26)
    tier.put(f"{BLOCK.key.hex()}.kv", [HOSTILE[name] or b"\0"])
    store = Store([tier])
    keys = [BLOCK.key]
    found = store.lookup(Wanted(NAMESPACE, keys, [BLOCK.tokens]))
    assert found.depth == 0
    store.close(1)


def test_tenants_with_other_salts_never_meet() -> None:
    """The same tokens under two salts share no key; blocks of one are misses for the other."""
    tokens = list(range(TOKENS * 64 * 4))
    ours = chain(root_key(NAMESPACE, b"ours"), tokens)
    theirs = chain(root_key(NAMESPACE, b"theirs"), tokens)
    assert ours and not set(ours) & set(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        wanted = Expected(NAMESPACE, mine, Kind.KV, BLOCK.tokens)
        foreign = lying(msgpack.packb({**FIELDS, "key": other}))
        with pytest.raises(BlockRejected):
            decode(foreign, PLAIN, wanted)


@pytest.mark.parametrize("sealer", [PLAIN, Sealer(b"another secret of bytes")])
def test_with_a_secret_only_its_holders_write(sealer: Sealer) -> None:
    """A forged block, with a checksum or with another secret's MAC, is refused."""
    secret = Sealer(b"sixteen bytes or more")
    forged = lying(HEADER, bytes(len(PAYLOAD)), sealer)
    with pytest.raises(BlockRejected):
        decode(forged, secret, expected(BLOCK))
    own = lying(HEADER, PAYLOAD, secret)
    assert decode(own, secret, expected(BLOCK)).key == BLOCK.key
    # A tag that was right for other bytes of the same length is not right for these.
    with pytest.raises(BlockRejected):
        decode(forged[:-SEAL_BYTES] + own[-SEAL_BYTES:], secret, expected(BLOCK))


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "a" * 64, "a" * 64 + ".kv/..", "A" * 64 + ".kv", "a" * 63 + "/.kv"),
        *("a" * 64 + ".kv\n", "a" * 64 + ".KV", "\0" * 64 + ".kv", "a" * 64 + ".py", ".kv", ""),
        *("a" * 64 + "..kv", "*" * 64 + ".kv", "٣" * 64 + ".kv"),
    ],
)
def test_a_name_is_digits_and_a_kind(name: str, tmp_path: Path) -> None:
    """No name with a path, a pattern or another alphabet reaches a tier's folder or server."""
    from batchkv_cache_store.tiers.disk import DiskTier

    assert not is_name(name)
    with pytest.raises(ValueError, match="not the name"):
        checked(name)
    tier = DiskTier(tmp_path / "blocks", 2**22)
    for use in (tier.delete, tier.set_aside, lambda n: tier.put(n, [b"x"])):
        with pytest.raises(ValueError, match="not the name"):
            use(name)
    for use in (tier.get_many, tier.contains_many, tier.pin, tier.unpin):
        with pytest.raises(ValueError, match="not the name"):
            use([name])


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 30_000, b'{"a":' * 10_000, b'{"a": 1e400}', b"x" * 70_000, b"\xff", b""),
        *(b'{"a": ' + b"9" * 5000 + b"}", b'{"a": {"b": 1}}', b'{"a": NaN}', b'["a"]'),
    ],
)
def test_a_manifest_that_is_none_is_not_read(text: bytes) -> None:
    """Nesting, giant numbers, other shapes, too many bytes: no manifest, no error."""
    import hashlib

    assert decode_manifest(text, hashlib.sha256(text).digest()) is None


def test_a_chain_that_goes_in_circles_ends() -> None:
    """Blocks that name each other as parents are walked through once."""
    from batchkv_cache_store.blocks.names import block_name
    from batchkv_cache_store.upkeep.contents import chain_names

    first, second = chain_of(list(range(8)))
    tier = MemoryTier(2**22)
    circle = {**FIELDS, "key": second.key, "parent": first.key, "index": 5}
    tier.put(block_name(second.key, Kind.KV), [lying(msgpack.packb(circle))])
    back = {**FIELDS, "key": first.key, "parent": second.key, "index": 5}
    tier.put(block_name(first.key, Kind.KV), [lying(msgpack.packb(back))])
    assert chain_names(tier, first.key)[1] is False


def test_a_block_that_grows_after_the_question_takes_no_memory(tmp_path: Path) -> None:
    """Files that a writer swaps between the call for sizes and the read are misses."""
    from batchkv_cache_store.tiers.disk import DiskTier

    blocks = chain_of(list(range(16)))

    class Swapped(DiskTier):
        """After the call for its size, every block is replaced by a sparse file of 128 MiB."""

        def get_many(self, names: Sequence[str], sizes: Any = None) -> dict[str, Buffer]:
            for each in (tmp_path / "blocks-1").rglob("*.kv"):
                os.truncate(each, 128 * 2**20)
            return super().get_many(names, sizes)

    tier = Swapped(tmp_path, 2**26)
    for block in blocks:
        tier.put(block_name(block.key, Kind.KV), [encoded(block)])
    wanted = Wanted(NAMESPACE, [b.key for b in blocks], [b.tokens for b in blocks])
    store = Store([tier])
    tracemalloc.start()
    try:
        assert store.lookup(wanted).depth == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        store.close(5.0)
    assert peak < 2**24


def test_the_limits_come_before_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block above a limit is refused by its first bytes; no other bytes are read."""
    monkeypatch.setattr(block_module, "_check_seal", lambda *_: pytest.fail("looked at"))
    big = random.Random(3).randbytes(100)
    for data in (sizes(2**20, 100), sizes(HEADER_SIZE, 2**40) + big):
        with pytest.raises(BlockRejected, match=r"header|payload"):
            decode(data, PLAIN, expected(BLOCK), Limits())
