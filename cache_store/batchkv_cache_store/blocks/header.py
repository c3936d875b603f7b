"""The header of block format 1: writes it, and checks every field when it reads it.

The header is a msgpack map with exactly these fields, in this order:

=============  =======  ======================================================================
``namespace``  bin 32   digest of the manifest (``keys.namespace``)
``key``        bin 32   the block's own key
``parent``     bin 32   key of the block before it, or the chain's root
``index``      uint     number of blocks before it
``kind``       str      ``kv``, ``window`` or ``state``
``tokens``     bin      token ids, each four bytes, little-endian
``writer``     str      who wrote it, for people
``time``       uint     when, milliseconds since 1970, for people
``tensors``    array    one row for each: layer, name, dtype, shape (array), offset, bytes
=============  =======  ======================================================================

Offsets count from the payload's start. The table is canonical: tensors follow in the table's order,
each at the next multiple of 64, and the payload ends with the last one. So no two can overlap, and
none can reach outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.keys import KEY_BYTES

ALIGNMENT = 64
MAX_DIMENSIONS = 8
MAX_TEXT_BYTES = 256

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}

FIELDS = ("namespace", "key", "parent", "index", "kind", "tokens", "writer", "time", "tensors")
_MAX_INDEX = 2**32 - 1
_MAX_TIME_MS = 2**53


class Kind(StrEnum):
    """``kv``: of layers that keep all tokens; ``window``: the last tokens; ``state``: recurrent."""

    KV = "kv"
    WINDOW = "window"
    STATE = "state"


_KINDS = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of a block. They are checked before memory is allocated.

    ``max_block_bytes`` counts the whole object, ``max_tokens`` the token ids of one block.
    """

    max_block_bytes: int = 256 * 1024 * 1024
    max_header_bytes: int = 256 * 1024
    max_tensors: int = 2048
    max_tokens: int = 4096


@dataclass(slots=True)
class Tensor:
    """One array. ``layer`` is -1 for stacked layers; ``data`` is C-contiguous.

    The data are little-endian items, ``prod(shape) * item size`` bytes. A tensor never changes. It
    is not frozen, because a block has hundreds, and making a frozen one takes three times as long.
    """

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True)
class Block:
    """A block with its tensors. ``tokens``: ids as little-endian u32; ``time_ms``: since 1970."""

    namespace: bytes
    key: bytes
    parent: bytes
    index: int
    kind: Kind
    tokens: bytes
    tensors: tuple[Tensor, ...]
    writer: str = ""
    time_ms: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def align(offset: int) -> int:
    """The smallest multiple of 64 that is not below ``offset``."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def header_bytes(block: Block, limits: Limits) -> tuple[bytes, int]:
    """(header, payload's length); ValueError for a block that ``parse_header`` would refuse."""
    rows: list[list[Any]] = []
    end = 0
    for tensor in block.tensors:
        offset, size = align(end), tensor.num_bytes
        if not memoryview(tensor.data).c_contiguous:
            raise ValueError(f"the data of {tensor.name} is not contiguous")
        rows.append([tensor.layer, tensor.name, tensor.dtype, list(tensor.shape), offset, size])
        end = offset + size
    fields = dict(
        zip(
            FIELDS,
            (
                *(block.namespace, block.key, block.parent, block.index, str(block.kind)),
                *(block.tokens, block.writer, block.time_ms, rows),
            ),
            strict=True,
        )
    )
    try:
        check_fields(fields, limits)
        _read_table(rows, memoryview(b""), end, limits)
    except BlockRejected as fault:
        raise ValueError(f"not a block that can be stored: {fault}") from fault
    header: bytes = msgpack.packb(fields)
    if len(header) > limits.max_header_bytes:
        raise ValueError(f"a header of {len(header):,} bytes; at most {limits.max_header_bytes:,}")
    return header, end


def parse_header(header: memoryview, payload: memoryview, limits: Limits) -> Block:
    """The block that the header describes, its tensors views into ``payload``.

    Raises BlockRejected for a header that ``header_bytes`` does not write.
    """
    try:
        fields = msgpack.unpackb(
            header,
            max_array_len=max(limits.max_tensors, MAX_DIMENSIONS),
            max_map_len=len(FIELDS),
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=max(4 * limits.max_tokens, KEY_BYTES),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as fault:
        raise BlockRejected(Reason.HEADER, f"not msgpack within limits: {fault}") from fault
    if type(fields) is not dict or tuple(fields) != FIELDS:
        raise BlockRejected(Reason.HEADER, "it has other fields")
    check_fields(fields, limits)
    tensors = _read_table(fields["tensors"], payload, payload.nbytes, limits)
    return Block(
        **{name: fields[name] for name in ("namespace", "key", "parent", "index", "tokens")},
        kind=_KINDS[fields["kind"]],
        tensors=tensors,
        writer=fields["writer"],
        time_ms=fields["time"],
    )


def check_fields(fields: dict[str, Any], limits: Limits) -> None:
    """Refuse fields that ``header_bytes`` does not write; raises BlockRejected."""
    for name in ("namespace", "key", "parent"):
        if type(fields[name]) is not bytes or len(fields[name]) != KEY_BYTES:
            raise BlockRejected(Reason.HEADER, f"{name} is not {KEY_BYTES} bytes")
    tokens, writer = fields["tokens"], fields["writer"]
    if type(tokens) is not bytes or len(tokens) % 4 or len(tokens) > 4 * limits.max_tokens:
        raise BlockRejected(Reason.HEADER, "tokens are not four bytes each, or too many")
    if type(writer) is not str or len(writer.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise BlockRejected(Reason.HEADER, "writer is not a short text")
    if not _is_count(fields["index"], _MAX_INDEX) or not _is_count(fields["time"], _MAX_TIME_MS):
        raise BlockRejected(Reason.HEADER, "index or time is not a number in range")
    if type(fields["kind"]) is not str or fields["kind"] not in _KINDS:
        raise BlockRejected(Reason.HEADER, "kind is unknown")
    if type(fields["tensors"]) is not list or len(fields["tensors"]) > limits.max_tensors:
        raise BlockRejected(Reason.TENSORS, "tensors are not a list, or too many")


def _is_count(value: object, maximum: int) -> bool:
    # A bool is an instance of int, but msgpack has a type of its own for it.
    return type(value) is int and 0 <= value <= maximum


def _read_table(
    rows: list[Any], payload: memoryview, size: int, limits: Limits
) -> tuple[Tensor, ...]:
    """The tensors of a table whose payload has ``size`` bytes, as views into ``payload``."""
    tensors = []
    # Layers are alike, so the size of each dtype and shape is computed once.
    sizes: dict[tuple[object, ...], tuple[int, tuple[int, ...]]] = {}
    end = 0
    for row in rows:
        # One condition without calls: blocks have hundreds of rows, and calls add up.
        if type(row) is not list or len(row) != 6:
            raise BlockRejected(Reason.TENSORS, "a row does not have six fields")
        layer, name, dtype, shape, offset, num_bytes = row
        if not (
            (type(layer) is type(offset) is type(num_bytes) is int and -1 <= layer <= _MAX_INDEX)
            and (type(name) is str and 0 < len(name) <= MAX_TEXT_BYTES and type(shape) is list)
        ):
            raise BlockRejected(Reason.TENSORS, "a field of a row is of the wrong type or range")
        try:
            known = sizes.get((dtype, *shape))
        except TypeError as fault:
            raise BlockRejected(Reason.TENSORS, f"{name} has a strange shape") from fault
        if known is None:
            known = sizes[(dtype, *shape)] = _size_of(dtype, shape, limits)
        if offset != (end + ALIGNMENT - 1) & -ALIGNMENT or num_bytes != known[0]:
            raise BlockRejected(Reason.TENSORS, f"{name} has another offset or size")
        end = offset + num_bytes
        if end > size:
            raise BlockRejected(Reason.TENSORS, f"{name} ends after the payload")
        tensors.append(Tensor(layer, name, dtype, known[1], payload[offset:end]))
    if end != size:
        raise BlockRejected(Reason.TENSORS, "the payload goes on after the last tensor")
    return tuple(tensors)


def _size_of(dtype: object, shape: list[Any], limits: Limits) -> tuple[int, tuple[int, ...]]:
    """(bytes, shape); BlockRejected unless dtype is known and shape is a short list of ints."""
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise BlockRejected(Reason.TENSORS, "a dtype is unknown")
    if len(shape) > MAX_DIMENSIONS:
        raise BlockRejected(Reason.TENSORS, f"a shape has more than {MAX_DIMENSIONS} dimensions")
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= limits.max_block_bytes:
            raise BlockRejected(Reason.TENSORS, "a dimension is not a number in range")
    return ITEM_BYTES[dtype] * math.prod(shape), tuple(shape)
