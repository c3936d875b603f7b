"""Prefixes that this worker has computed, kept packed in memory, block by block.

A block is 256 tokens of all layers, exactly as prefill packed them. Blocks are found by the key
chain of ``batchkv_cache_store.keys``, so that a key names a block and all that came before it; a
row takes the longest chain that is here and computes the rest. What is taken is copied bit for bit:
a hit computes what a miss would have. Least recently used blocks go first when the bytes are up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_cache_store.keys import BLOCK_TOKENS, chain, root_key
from batchkv_worker.kv.prefill import PrefillCache
from batchkv_worker.kv.schemes import Parts
from batchkv_worker.sequence import Sequence

# One process, one model, one scheme: the chain needs no namespace here.
_ROOT = root_key(b"")

Layers = Any  # an array [layers, 1, heads, tokens, size], or a list of one array a layer


@dataclass(frozen=True, slots=True)
class _Block:
    keys: tuple[Layers, ...]
    values: tuple[Layers, ...]
    num_bytes: int


def block_keys(tokens: list[int]) -> list[bytes]:
    """Keys of the full blocks of a prompt that prefill computes (all but its last token)."""
    return chain(_ROOT, tokens[:-1])


class PrefixCache:
    """Blocks by key, least recently used first.

    ``block_bytes`` is the size of a block; less room than that keeps nothing.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        self.max_blocks = max_bytes // block_bytes
        self.max_bytes = self.max_blocks * block_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_cached(self, row: Sequence) -> int:
        """Tokens of the row's longest prefix that is here."""
        found = 0
        for key in row.block_keys:
            if key not in self._blocks:
                break
            found += 1
        return found * BLOCK_TOKENS

    def fill(self, rows: Items[Sequence], caches: Items[PrefillCache]) -> None:
        """Give new prefill caches the rows' common number of cached tokens."""
        count = rows[0].num_cached // BLOCK_TOKENS
        if not count:
            return
        blocks = [self._chain(row.block_keys[:count]) for row in rows]
        for layer, cache in enumerate(caches):
            cache.restore(
                _assemble([[_layer(b.keys, layer) for b in row] for row in blocks]),
                _assemble([[_layer(b.values, layer) for b in row] for row in blocks]),
                count * BLOCK_TOKENS,
            )

    def _chain(self, keys: list[bytes]) -> list[_Block]:
        """Blocks of a chain, now the latest used: its head last, for a tail is nothing alone."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return [self._blocks[key] for key in keys]

    def publish(self, rows: Items[Sequence], caches: Items[PrefillCache]) -> None:
        """Keep the full blocks of computed rows that are not here yet, as far as there is room.

        Tails go in before heads, so that they also go first.
        """
        for index, row in enumerate(rows):
            keys = row.block_keys[: self.max_blocks]
            for number in reversed(range(len(keys))):
                if keys[number] in self._blocks:
                    self._blocks.move_to_end(keys[number])
                else:
                    self._insert(keys[number], _cut(caches, index, number * BLOCK_TOKENS))

    def _insert(self, key: bytes, block: _Block) -> None:
        while self._blocks and self.num_bytes + block.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        # Evaluated now: an unevaluated slice would keep the whole group's buffers alive.
        mx.async_eval([block.keys, block.values])
        self._blocks[key] = block
        self.num_bytes += block.num_bytes


def _cut(caches: Items[PrefillCache], index: int, start: int) -> _Block:
    """One row's block of all layers, copied out; few large arrays rather than many small ones."""
    sides = zip(*(cache.block(index, start, start + BLOCK_TOKENS) for cache in caches), strict=True)
    keys, values = (tuple(map(_stack, zip(*side, strict=True))) for side in sides)
    num_bytes = sum(_num_bytes(part) for part in (*keys, *values))
    return _Block(keys, values, num_bytes)


def _stack(layers: tuple[mx.array, ...]) -> Layers:
    if len({(array.shape, array.dtype) for array in layers}) == 1:
        return mx.stack(layers)
    return [mx.contiguous(array) for array in layers]


def _num_bytes(part: Layers) -> int:
    return sum(int(array.nbytes) for array in (part if isinstance(part, list) else [part]))


def _layer(parts: tuple[Layers, ...], layer: int) -> Parts:
    return tuple(part[layer] for part in parts)


def _assemble(rows: list[list[Parts]]) -> Parts:
    """Blocks of several rows as parts ``[rows, heads, tokens, size]``."""
    lines = [
        tuple(mx.concatenate(parts, axis=2) for parts in zip(*blocks, strict=True))
        for blocks in rows
    ]
    return tuple(mx.concatenate(parts, axis=0) for parts in zip(*lines, strict=True))
