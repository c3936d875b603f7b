"""Decompresses up to a limit, because the writer of the data may be hostile."""

from __future__ import annotations

import zlib

from batchkv_producer.errors import WireError


def inflate(data: bytes, limit: int, what: str) -> bytes:
    """Decompress ``data``. Raises WireError if it is damaged, or longer than ``limit`` bytes.

    The limit applies to the compressed and to the decompressed data.
    """
    if len(data) > limit:
        raise WireError(f"{what} data is larger than {limit} bytes, compressed as it is")
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, limit)
    except zlib.error as fault:
        raise WireError(f"{what} data is not compressed as batchkv does: {fault}") from fault
    if inflater.unconsumed_tail:
        raise WireError(f"{what} data is larger than {limit} bytes")
    if not inflater.eof:
        raise WireError(f"{what} data is cut short")
    return raw
