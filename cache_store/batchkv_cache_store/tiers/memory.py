"""The first tier: blocks in this process's memory. It evicts the least recently used first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from batchkv_cache_store.blocks.names import checked, is_block_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.tiers.base import Entry, Put, Tier, TierStats, bound, size_of


class MemoryTier(Tier):
    """At most ``max_bytes`` of blocks. A block larger than that is never stored."""

    is_instant = True

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self.name = "memory"
        self.max_bytes: int = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._num_evicted = 0

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        with self._lock:
            return {
                name: len(self._blocks[name]) for name in names if checked(name) in self._blocks
            }

    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        with self._lock:
            found = [name for name in names if checked(name) in self._blocks]
            for name in reversed(found):
                self._blocks.move_to_end(name)
            return {name: self._blocks[name][: bound(sizes, name)] for name in found}

    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        with self._lock:
            found = {name: self._blocks[name] for name in names if checked(name) in self._blocks}
        return {name: block[:num_bytes] for name, block in found.items()}

    def iter_names(self) -> Iterator[Entry]:
        with self._lock:
            entries = [Entry(name, len(block)) for name, block in self._blocks.items()]
        yield from entries

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        num_bytes = size_of(buffers)
        with self._lock:
            if checked(name) in self._blocks:
                self._blocks.move_to_end(name)
                return Put.PRESENT
            if num_bytes > self.max_bytes:
                return Put.FULL
            while self._num_bytes + num_bytes > self.max_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self._num_bytes -= len(oldest)
                self._num_evicted += 1
            # A single buffer of type bytes cannot change, so it is not copied.
            only = buffers[0] if len(buffers) == 1 else b""
            self._blocks[name] = only if isinstance(only, bytes) and only else b"".join(buffers)
            self._num_bytes += num_bytes
            return Put.STORED

    def delete(self, name: str) -> None:
        with self._lock:
            gone = self._blocks.pop(checked(name), b"")
            self._num_bytes -= len(gone)

    def stats(self) -> TierStats:
        with self._lock:
            num_blocks = sum(map(is_block_name, self._blocks))
            return TierStats(num_blocks, self._num_bytes, self.max_bytes, self._num_evicted)
