"""Facts about each row that outlive its job: the digest of its request, and its custom_id.

A job may be gone (another tool deleted it, or its failure is older than RQ keeps) when its row is
reported, run again, or compared with a row of another file. So each chunk of a submit also stores
the facts of one stretch of lines, in two fields of ``batchkv:batch:<id>:rows``. ``d<n>`` has 16
bytes for each line, zeros where there is no row that could be run. ``n<n>`` has the compressed
custom_ids; it is left out when all rows are named by their line. Chunks hold rows in prefix order,
stretches hold consecutive lines, so that a line's stretch is known without a search.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isal import isal_zlib
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import default_custom_id

DIGEST_BYTES = 16
MAX_NAMES_BYTES = 64 * 2**20
NO_DIGEST = bytes(DIGEST_BYTES)
UNLIKE_ALL = b"\xff" * DIGEST_BYTES  # the digest of a row that cannot be compared

_STRETCH = """
SELECT line, custom_id, digest FROM rows WHERE line BETWEEN ? AND ? AND code IS NULL ORDER BY line
"""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The two fields of one stretch as stored. Empty ones are left out."""

    digests: bytes = b""
    names: bytes = b""


NO_FACTS = RowFacts()


def stretch_lines(last_line: int, num_chunks: int) -> int:
    """The number of lines in a stretch. There are as many stretches as chunks."""
    return -(-last_line // num_chunks) if num_chunks else 1


def pack(database: sqlite3.Connection, number: int, num_lines: int) -> RowFacts:
    """Stretch ``number`` (from 0) of a plan."""
    first = number * num_lines + 1
    digests = bytearray(num_lines * DIGEST_BYTES)
    names: list[str | None] = [None] * num_lines
    for line, custom_id, digest in database.execute(_STRETCH, (first, first + num_lines - 1)):
        index = line - first
        digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest or UNLIKE_ALL
        names[index] = None if custom_id == default_custom_id(line) else custom_id
    is_named = any(name is not None for name in names)
    packed = isal_zlib.compress(json.dumps(names).encode(), 3) if is_named else b""
    return RowFacts(bytes(digests), packed)


def custom_ids(connection: Redis, batch_id: str, lines: Sequence[int]) -> Mapping[int, str]:
    """Line -> custom_id, for the lines whose custom_id is stored."""
    found: dict[int, str] = {}
    for first, num_lines, wanted in _stretches(connection, batch_id, lines):
        raw: Any = connection.hget(redis_keys.rows(batch_id), f"n{(first - 1) // num_lines}")
        names = _names(raw or b"")
        for line in wanted:
            name = names[line - first] if line - first < len(names) else None
            if isinstance(name, str):
                found[line] = name
    return found


def rows_among(connection: Redis, batch_id: str, lines: Sequence[int]) -> list[int] | None:
    """The lines among these whose rows were valid. None if the batch does not store that."""
    rows: list[int] = []
    for first, num_lines, wanted in _stretches(connection, batch_id, lines):
        blob: Any = connection.hget(redis_keys.rows(batch_id), f"d{(first - 1) // num_lines}")
        if blob is None:
            return None
        for line in wanted:
            start = (line - first) * DIGEST_BYTES
            if blob[start : start + DIGEST_BYTES] != NO_DIGEST:
                rows.append(line)
    return rows


def digests(connection: Redis, batch_id: str) -> Iterator[tuple[bytes, int]]:
    """(digest, line) of every valid row of a batch that stores digests."""
    raw: Any = connection.hmget(redis_keys.batch(batch_id), "last_line", "num_chunks")
    last_line, num_chunks = (_whole(value) for value in raw)
    num_lines = stretch_lines(last_line, num_chunks)
    for number in range(num_chunks):
        blob: Any = connection.hget(redis_keys.rows(batch_id), f"d{number}")
        for index in range(len(blob or b"") // DIGEST_BYTES):
            digest = blob[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if digest not in (NO_DIGEST, UNLIKE_ALL):
                yield digest, number * num_lines + index + 1


def _stretches(
    connection: Redis, batch_id: str, lines: Iterable[int]
) -> Iterator[tuple[int, int, list[int]]]:
    """(first line, number of lines, its part of ``lines``) of each stretch with one of them."""
    raw: Any = connection.hmget(redis_keys.batch(batch_id), "last_line", "num_chunks")
    last_line, num_chunks = (_whole(value) for value in raw)
    num_lines = max(1, stretch_lines(last_line, num_chunks))  # older batches have no last_line
    by_stretch: dict[int, list[int]] = {}
    for line in lines:
        by_stretch.setdefault((line - 1) // num_lines, []).append(line)
    for number, wanted in by_stretch.items():
        yield number * num_lines + 1, num_lines, wanted


def _names(raw: bytes) -> list[Any]:
    """Read names that anybody may have written. Returns none if the format is wrong."""
    if not raw:
        return []
    inflater = zlib.decompressobj()
    try:
        names = json.loads(inflater.decompress(raw, MAX_NAMES_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and not inflater.unconsumed_tail else []


def _whole(raw: bytes | None) -> int:
    return int(raw) if raw and raw.isdigit() and len(raw) < 16 else 0
