"""Reads a block's header from its first bytes: enough for a list, without the tensors.

The seal is not checked, so the result must not be used in attention; ``block.decode`` checks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from batchkv_cache_store.blocks.block import PREFIX_BYTES, read_sections
from batchkv_cache_store.blocks.header import FIELDS, MAX_TEXT_BYTES, Kind, Limits, check_fields
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.keys import KEY_BYTES

LINKS_BYTES = 192  # the bytes that ``peek_links`` needs
HEAD_BYTES = 20 * 1024  # for ``peek``: all fields before the tensors, with 4,096 tokens
_LINKS = FIELDS[:3]


@dataclass(frozen=True, slots=True)
class Links:
    """Three digests of 32 bytes. ``parent`` is the key of the block before, or the chain's root."""

    namespace: bytes
    key: bytes
    parent: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The header without its table of tensors. ``num_bytes``: of the block, by its sizes."""

    links: Links
    index: int
    kind: Kind
    tokens: bytes
    writer: str
    time_ms: int
    num_tensors: int
    num_bytes: int
    is_signed: bool

    @property
    def num_tokens(self) -> int:
        """The number of this block's own tokens."""
        return len(self.tokens) // 4


def peek_links(data: Buffer, limits: Limits | None = None) -> Links:
    """Links of the block that starts with ``data``; raises BlockRejected."""
    limits = limits or Limits()
    view = memoryview(data).cast("B")
    header_end = read_sections(view, limits).header_end
    fields = _read(view[PREFIX_BYTES:header_end], _LINKS, limits)
    if any(type(value) is not bytes or len(value) != KEY_BYTES for value in fields.values()):
        raise BlockRejected(Reason.HEADER, f"a digest is not {KEY_BYTES} bytes")
    return Links(**fields)


def peek(data: Buffer, limits: Limits | None = None) -> Head:
    """Head of the block that starts with ``data``; raises BlockRejected."""
    limits = limits or Limits()
    view = memoryview(data).cast("B")
    sections = read_sections(view, limits)
    fields = _read(view[PREFIX_BYTES : sections.header_end], FIELDS, limits)
    num_tensors = fields["tensors"]
    check_fields({**fields, "tensors": []}, limits)
    return Head(
        Links(*(fields[name] for name in _LINKS)),
        fields["index"],
        Kind(fields["kind"]),
        fields["tokens"],
        fields["writer"],
        fields["time"],
        num_tensors,
        sections.num_bytes,
        sections.is_signed,
    )


def _read(header: memoryview, names: Iterable[str], limits: Limits) -> dict[str, Any]:
    """Fields by name, in the header's order; for ``tensors`` only their number."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=limits.max_header_bytes,
        max_array_len=limits.max_tensors,
        max_map_len=len(FIELDS),
        max_str_len=MAX_TEXT_BYTES,
        max_bin_len=max(4 * limits.max_tokens, KEY_BYTES),
        max_ext_len=0,
    )
    fields: dict[str, Any] = {}
    try:
        unpacker.feed(header)
        if unpacker.read_map_header() != len(FIELDS):
            raise BlockRejected(Reason.HEADER, "it has other fields")
        for name in names:
            if unpacker.unpack() != name:
                raise BlockRejected(Reason.HEADER, "it has other fields")
            is_table = name == "tensors"
            fields[name] = unpacker.read_array_header() if is_table else unpacker.unpack()
    except msgpack.OutOfData as fault:
        raise BlockRejected(Reason.TRUNCATED, "the header goes on") from fault
    except (ValueError, msgpack.UnpackException) as fault:
        raise BlockRejected(Reason.HEADER, f"not msgpack within limits: {fault}") from fault
    return fields
