"""Prefix order: which row of a file comes after which.

A row's *key* is short for a long text, and keys of rows with a long common prefix begin alike::

    text (UTF-8)   |  0 .. 256  | 256 .. 512 |  ...  | .. 16 Ki | 16 Ki .. 20 Ki | ... | 512 Ki ..
    key            |  the bytes |  4-byte checksum of each       | checksum of each     | one only

Equal pieces give equal checksums, so a sort by key puts common prefixes together. Pieces that
differ may be in any order. Sorted rows are the leaves of a tree of prefixes: the longest common
prefix of two neighbours is a node. A walk of that tree, depth first, computes every prefix once,
whatever the order of a node's children. ``arrange`` chooses this order:

1. the *leader*, the shortest row right under the node: it computes the prefix, and all other rows
   wait for it;
2. the groups below the node, most work first;
3. the node's other rows, longest first. They share nothing but the node's prefix, so that at the
   end of a queue, where workers take single rows, giving them to different workers loses nothing,
   and the last one taken is short.

Rows with less than ``STEP_BYTES`` of text in common count as rows without a common prefix, because
that text is less than a block of the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple

from batchkv_producer.agreed import DEFAULT_MAX_TOKENS

ORDER_VERSION = 2  # stored with a batch: a submit can be resumed only in the same order
FINE_BYTES, FINE_END = 256, 16 * 2**10
COARSE_BYTES, COARSE_END = 4 * 2**10, 512 * 2**10
STEP_BYTES = 512  # depths of the tree are multiples of it
WINDOW_ROWS = 4096  # arranged at once, so that memory does not grow with the file

# A row's cost is counted in prompt tokens. One generated token takes about as long as this many
# prompt tokens.
TOKENS_PER_GENERATED = 16
BYTES_PER_TOKEN = 4  # of English text; there is no tokenizer here
MAX_TOKENS = 2**31 - 1

_FINE_KEY = FINE_BYTES + 4 * ((FINE_END - FINE_BYTES) // FINE_BYTES)
_COARSE_KEY = _FINE_KEY + 4 * ((COARSE_END - FINE_END) // COARSE_BYTES)
_STEP_KEY = FINE_BYTES + 4 * ((STEP_BYTES - FINE_BYTES) // FINE_BYTES)


class Entry(NamedTuple):
    """A row with the values that decide its place in the order.

    ``size``: bytes of its text in UTF-8. ``work``: its possible cost in prompt tokens. ``shared``:
    the bytes of its text with which another row begins (``with_shared``).
    """

    line: int
    key: bytes
    size: int
    work: int
    shared: int = 0


def text_key(raw: bytes) -> bytes:
    """The key of a text in UTF-8; at most 1,008 bytes."""
    if len(raw) <= FINE_BYTES:
        return raw
    key = [raw[:FINE_BYTES]]
    for start in range(FINE_BYTES, min(len(raw), FINE_END), FINE_BYTES):
        key.append(zlib.crc32(raw[start : start + FINE_BYTES]).to_bytes(4, "big"))
    for start in range(FINE_END, min(len(raw), COARSE_END), COARSE_BYTES):
        key.append(zlib.crc32(raw[start : start + COARSE_BYTES]).to_bytes(4, "big"))
    if len(raw) > COARSE_END:
        key.append(zlib.crc32(raw[COARSE_END:]).to_bytes(4, "big"))
    return b"".join(key)


def work_of(size: int, max_tokens: int | None, num_choices: int = 1) -> int:
    """An estimate of a row's highest cost, in prompt tokens. All choices have one prompt."""
    num_generated = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    num_generated = min(max(num_generated, 0), MAX_TOKENS)  # the worker refuses invalid values
    return size // BYTES_PER_TOKEN + TOKENS_PER_GENERATED * num_generated * num_choices


def shared_bytes(left: Entry, right: Entry) -> int:
    """How many bytes of text two rows have in common at their beginning, by their keys.

    The result is never too large, unless checksums are equal by chance (one in four billion). It
    may be too small by less than a piece. Below ``STEP_BYTES`` it is 0.
    """
    first, second = left.key, right.key
    num_common = min(len(first), len(second))
    differing = int.from_bytes(first[:num_common]) ^ int.from_bytes(second[:num_common])
    at = num_common - (differing.bit_length() + 7) // 8
    if at < _FINE_KEY:
        end = FINE_BYTES * (1 + (at - FINE_BYTES) // 4) if at > FINE_BYTES else at
    elif at <= _COARSE_KEY:
        end = FINE_END + COARSE_BYTES * ((at - _FINE_KEY) // 4)
    else:
        end = left.size  # also the checksum of all the rest is equal
    end = min(end, left.size, right.size)
    return end if end >= STEP_BYTES else 0


def with_shared(rows: Iterable[Entry]) -> Iterator[Entry]:
    """Sorted rows, each with the bytes that it shares with one of its two neighbours.

    The keys locate the end of the shared part within one piece. In the small pieces at the start of
    a text the result includes that piece, so that nothing shared is missed. The large pieces after
    them are not included, because they may hold the rest of a prompt.
    """
    before = 0
    row: Entry | None = None
    for after in rows:
        if row is not None:
            shared = _most_shared(row, after) if row.key[:_STEP_KEY] == after.key[:_STEP_KEY] else 0
            most = max(before, shared)
            yield row._replace(shared=min(most, row.size)) if most else row
            before = shared
        row = after
    if row is not None:
        yield row._replace(shared=min(before, row.size))


def starts_prefix(before: Entry | None, row: Entry) -> bool:
    """Whether a row is the first of its prefix in the queue, behind the row ``before``.

    That one has less than half of what the row shares with others. A run that ends between the two
    leaves no prefix to be computed by two workers.
    """
    if not row.shared:
        return False
    if before is None or before.key[:_STEP_KEY] != row.key[:_STEP_KEY]:
        return True
    return 2 * shared_bytes(before, row) < row.shared


def _most_shared(left: Entry, right: Entry) -> int:
    shared = shared_bytes(left, right)
    return shared + FINE_BYTES if 0 < shared < FINE_END else shared


@dataclass(slots=True)
class _Node:
    """A prefix that rows share: ``depth`` in steps, its own rows, and the groups below it."""

    depth: int
    rows: list[Entry] = field(default_factory=list)
    groups: list[tuple[int, list[Entry]]] = field(default_factory=list)  # (work, in order)

    def walk(self) -> tuple[int, list[Entry]]:
        """(work of all, rows in their order). The sort is stable: equal rows keep their order."""
        rows, ordered = self.rows, list[Entry]()
        if self.depth and rows:
            leader = min(rows, key=attrgetter("size"))
            rows = [row for row in rows if row is not leader]
            ordered.append(leader)
        self.groups.sort(key=itemgetter(0), reverse=True)
        for _, group in self.groups:
            ordered += group
        ordered += sorted(rows, key=attrgetter("work"), reverse=True)
        total = sum(work for work, _ in self.groups) + sum(row.work for row in self.rows)
        return total, ordered


def arrange(rows: Sequence[Entry]) -> list[Entry]:
    """Rows sorted by key -> the same rows in the order of the queue. Pure."""
    root = _Node(0)
    path = [root]
    for row, after in zip_longest(rows, islice(rows, 1, None)):
        # Most rows of most files share nothing. The first comparison finds that quickly.
        if after is None or row.key[:_STEP_KEY] != after.key[:_STEP_KEY]:
            depth = 0
        else:
            depth = shared_bytes(row, after) // STEP_BYTES
        if depth > path[-1].depth:
            path.append(_Node(depth))
        path[-1].rows.append(row)
        while path[-1].depth > depth:
            done = path.pop().walk()
            if path[-1].depth < depth:
                path.append(_Node(depth))
            path[-1].groups.append(done)
    return root.walk()[1]


def in_windows(rows: Iterable[Entry]) -> Iterator[Entry]:
    """``arrange`` for any number of sorted rows, ``WINDOW_ROWS`` of them in memory."""
    window: list[Entry] = []
    for row in rows:
        window.append(row)
        if len(window) == WINDOW_ROWS:
            yield from arrange(window)
            window.clear()
    yield from arrange(window)
