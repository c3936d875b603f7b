"""Block format 1: one packed piece of a prompt's cache, as every tier stores it.

All numbers are little-endian. ``H`` is the header's length, ``P`` the payload's::

    offset       bytes   content
    0            8       magic: 89 42 4B 56 42 4C 4B 0A ("\\x89BKVBLK\\n")
    8            2       version: 1
    10           2       flags: bit 0 is set when the seal is a MAC; all others are 0
    12           4       H
    16           8       P
    24           8       zeros
    32           H       header (msgpack, ``header``)
    32+H         0..63   zeros, up to a multiple of 64: the payload starts at S = ceil64(32+H)
    S            P       payload: raw tensors, each at a multiple of 64 from S, zeros between them
    S+P          16      seal of all bytes before it (``seal``): xxh3-128, or a keyed MAC

Only the header is msgpack, because packing the tensors too would copy them twice. A block ends at
the length that its sizes give, and nothing may follow. There is one object for each (key, kind),
which never changes.

Decoding trusts nothing. First it compares the sizes with the limits and with the bytes that are
there. Then it checks the seal. Then it reads the header and compares it with the expected block.
Only then it returns tensors. A writer without the secret can still write blocks with a right
checksum, so the steps after the seal are as careful as those before it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchkv_cache_store.blocks.header import (
    ALIGNMENT,
    Block,
    Kind,
    Limits,
    Tensor,
    align,
    header_bytes,
    parse_header,
)
from batchkv_cache_store.blocks.seal import SEAL_BYTES, Buffer, Sealer
from batchkv_cache_store.errors import BlockRejected, Reason

__all__ = ["Block", "Buffer", "Expected", "Kind", "Limits", "Tensor", "decode", "encode"]

MAGIC = b"\x89BKVBLK\n"
VERSION = 1
FLAG_MAC = 1

_PREFIX = struct.Struct("<8sHHIQQ")
PREFIX_BYTES = _PREFIX.size
_ZEROS = bytes(ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Expected:
    """The block that the caller expects. ``tokens``: its token ids as little-endian u32."""

    namespace: bytes
    key: bytes
    kind: Kind
    tokens: bytes


def encode(block: Block, sealer: Sealer, limits: Limits | None = None) -> list[Buffer]:
    """The block as buffers to write one after the other. Tensors are not copied.

    Raises ValueError for a block that ``decode`` would refuse under the same limits.
    """
    limits = limits or Limits()
    header, payload_bytes = header_bytes(block, limits)
    _total(header, payload_bytes, limits)
    flags = FLAG_MAC if sealer.is_keyed else 0
    prefix = _PREFIX.pack(MAGIC, VERSION, flags, len(header), payload_bytes, 0)
    start = len(prefix) + len(header)
    parts: list[Buffer] = [prefix + header + _ZEROS[: align(start) - start]]
    end = 0
    for tensor in block.tensors:
        if end % ALIGNMENT:
            parts.append(_ZEROS[: align(end) - end])
        if num_bytes := tensor.num_bytes:  # an empty view cannot be cast
            parts.append(memoryview(tensor.data).cast("B"))
        end = align(end) + num_bytes
    parts.append(sealer.seal(parts))
    return parts


def encoded_size(block: Block, limits: Limits | None = None) -> int:
    """The size of the encoded block in bytes; ValueError if ``encode`` would refuse the block."""
    limits = limits or Limits()
    return _total(*header_bytes(block, limits), limits)


def _total(header: bytes, payload_bytes: int, limits: Limits) -> int:
    total = align(PREFIX_BYTES + len(header)) + payload_bytes + SEAL_BYTES
    if total > limits.max_block_bytes:
        raise ValueError(f"a block of {total:,} bytes; at most {limits.max_block_bytes:,}")
    return total


def decode(
    buffer: Buffer, sealer: Sealer, expected: Expected, limits: Limits | None = None
) -> Block:
    """The block in ``buffer``; its tensors and tokens are read-only views into the buffer.

    Raises BlockRejected, and nothing else, if these bytes are not exactly the expected block.
    """
    block = decode_any(buffer, sealer, limits)
    _compare(block, expected)
    return block


def decode_any(buffer: Buffer, sealer: Sealer, limits: Limits | None = None) -> Block:
    """The block in ``buffer``, whichever it is; for commands that inspect a store.

    Raises BlockRejected, and nothing else, for bytes that are no block.
    """
    limits = limits or Limits()
    view = memoryview(buffer).cast("B").toreadonly()
    sections = read_sections(view, limits, PREFIX_BYTES + SEAL_BYTES)
    if view.nbytes != sections.num_bytes:
        reason = Reason.TRUNCATED if view.nbytes < sections.num_bytes else Reason.TRAILING
        raise BlockRejected(reason, f"{view.nbytes} bytes, not {sections.num_bytes}")
    _check_seal(view, sections.end, sections.is_signed, sealer)
    payload = view[sections.start : sections.end]
    return parse_header(view[PREFIX_BYTES : sections.header_end], payload, limits)


class Sections(NamedTuple):
    """Offsets of a block's parts, in bytes from its start; the seal follows ``end``."""

    header_end: int
    start: int
    end: int
    is_signed: bool

    @property
    def num_bytes(self) -> int:
        """The size of the whole block."""
        return self.end + SEAL_BYTES


def read_sections(view: memoryview, limits: Limits, min_bytes: int = PREFIX_BYTES) -> Sections:
    """The sections that the first 32 bytes describe; raises BlockRejected beyond the limits."""
    if view.nbytes >= len(MAGIC) and view[: len(MAGIC)] != MAGIC:
        raise BlockRejected(Reason.BAD_MAGIC, f"it starts with {view[:8].hex()}")
    if view.nbytes < min_bytes:
        raise BlockRejected(Reason.TRUNCATED, f"only {view.nbytes} bytes")
    _, version, flags, header_size, payload_size, zeros = _PREFIX.unpack_from(view)
    if version != VERSION:
        raise BlockRejected(Reason.VERSION, f"format {version}, not {VERSION}")
    if flags & ~FLAG_MAC or zeros:
        raise BlockRejected(Reason.HEADER, "unknown bits are set")
    start = align(PREFIX_BYTES + header_size)
    end = start + payload_size
    if header_size > limits.max_header_bytes or end + SEAL_BYTES > limits.max_block_bytes:
        raise BlockRejected(Reason.LIMITS, f"header {header_size}, payload {payload_size} bytes")
    return Sections(PREFIX_BYTES + header_size, start, end, bool(flags & FLAG_MAC))


def _check_seal(view: memoryview, end: int, is_mac: bool, sealer: Sealer) -> None:
    if is_mac and not sealer.is_keyed:
        raise BlockRejected(Reason.NO_SECRET, "it is signed, and no secret is set here")
    if sealer.is_keyed and not is_mac:
        raise BlockRejected(Reason.MAC, "it is not signed")
    if not sealer.is_valid(view[:end], view[end:]):
        raise BlockRejected(Reason.MAC if is_mac else Reason.CHECKSUM, "the seal is wrong")


def _compare(block: Block, expected: Expected) -> None:
    # The namespace is compared first: in another one every key differs, too.
    if block.namespace != expected.namespace:
        raise BlockRejected(Reason.NAMESPACE, f"of {block.namespace.hex()[:16]}")
    if block.key != expected.key:
        raise BlockRejected(Reason.KEY, f"it is {block.key.hex()[:16]}")
    if block.kind is not expected.kind:
        raise BlockRejected(Reason.KIND, f"it is {block.kind}")
    if block.tokens != expected.tokens:
        raise BlockRejected(Reason.TOKENS, "of other tokens")


def join(parts: Sequence[Buffer]) -> bytes:
    """The buffers as one; this is the only copy of a block's bytes."""
    return b"".join(parts)
