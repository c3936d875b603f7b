"""The custom_id before the copied result of a duplicate: ``=<bytes of it>:<custom_id><result>``.

Redis makes these copies itself (``lua/duplicates.lua``) and cannot rewrite compressed data. With
``+`` in place of ``=`` the result is a remembered answer (``lua/reuse.lua``). No result begins with
either: zlib's first byte is ``x``.
"""

from __future__ import annotations

from batchkv_producer.errors import WireError

MAX_DIGITS = 8
_REUSED = b"+"


def is_reused(data: bytes) -> bool:
    """Whether a stored result is an answer of an earlier batch that was remembered."""
    return data[:1] == _REUSED


def unstamped(data: bytes) -> tuple[str | None, bytes]:
    """(custom_id, result) for a copy; (None, data) for any other result. Raises WireError."""
    if data[:1] not in (b"=", _REUSED):
        return None, data
    size, colon, rest = data[1:].partition(b":")
    if not colon or not size.isdigit() or len(size) > MAX_DIGITS or int(size) > len(rest):
        raise WireError("stored result cannot be read: the copy's custom_id is cut short")
    end = int(size)
    try:
        return rest[:end].decode("utf-8", "surrogatepass"), rest[end:]
    except UnicodeDecodeError as fault:
        raise WireError(f"stored result cannot be read: {fault}") from fault
