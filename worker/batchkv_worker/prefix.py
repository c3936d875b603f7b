"""Prefixes that this worker has computed, kept packed in memory, block by block.

A block is 256 tokens of all layers, exactly as prefill packed them. Blocks are found by the key
chain of ``batchkv_cache_store.keys``, so that a key names a block and all that came before it; a
row takes the longest chain that is here and computes the rest. What is taken is copied bit for bit:
a hit computes what a miss would have. Least recently used blocks go first when the bytes are up.

A layer with a state can only go on where a state was kept: at the ends of some blocks. A row then
takes the longest chain that ends with one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import mlx.core as mx

from batchkv_cache_store.keys import BLOCK_TOKENS, chain, root_key
from batchkv_worker.kv.bundle import Bundle
from batchkv_worker.kv.layer import LayerKind, Pieces
from batchkv_worker.kv.layouts import Costs
from batchkv_worker.kv.rows import PrefillRows
from batchkv_worker.sequence import Sequence

# One process, one model, one scheme: the chain needs no namespace here.
_ROOT = root_key(b"")
_EMPTY_BYTES = 1024  # what a block counts that holds no arrays (every layer has a state)


@dataclass(slots=True)
class _Block:
    """``tokens``: pieces of the layers that keep tokens; ``state``: states after its last token."""

    tokens: Bundle
    state: Bundle | None

    @property
    def num_bytes(self) -> int:
        state = self.state.nbytes if self.state else 0
        return self.tokens.nbytes + state or _EMPTY_BYTES


def block_keys(tokens: list[int]) -> list[bytes]:
    """Keys of the full blocks of a prompt that prefill computes (all but its last token)."""
    return chain(_ROOT, tokens[:-1])


class PrefixCache:
    """Blocks by key, least recently used first.

    ``max_blocks`` is the longest chain that there is room for, with its state at the end; no room
    for one keeps nothing.
    """

    def __init__(self, max_bytes: int, costs: Costs, kinds: Items[LayerKind]) -> None:
        block_bytes = max(costs.per_new_token * BLOCK_TOKENS, _EMPTY_BYTES)
        self.max_blocks = max(0, max_bytes - costs.per_row) // block_bytes
        self.max_bytes = self.max_blocks * block_bytes + (costs.per_row if self.max_blocks else 0)
        self.num_bytes = 0
        self._kinds = kinds
        self._has_state = any(kind.has_state for kind in kinds)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        self.num_bytes = 0

    def num_cached(self, row: Sequence) -> int:
        """Tokens of the row's longest prefix that is here and can be gone on from."""
        found = 0
        for number, key in enumerate(row.block_keys, start=1):
            block = self._blocks.get(key)
            if block is None:
                break
            if block.state is not None or not self._has_state:
                found = number
        return found * BLOCK_TOKENS

    def fill(self, rows: Items[Sequence], prefill: PrefillRows) -> None:
        """Give new prefill rows their common number of cached tokens."""
        count = rows[0].num_cached // BLOCK_TOKENS
        if not count:
            return
        blocks = [self._chain(row.block_keys[:count]) for row in rows]
        end = count * BLOCK_TOKENS
        for index, (layer, kind) in enumerate(zip(prefill.layers, self._kinds, strict=True)):
            if kind.has_state:
                lines = [_state(chained[-1], index) for chained in blocks]
                layer.restore(_assemble(lines, 0), end, end)
                continue
            # A window needs only the blocks that its next token still sees.
            seen = 0 if kind.window is None else max(0, end - kind.window + 1)
            first = min(seen // BLOCK_TOKENS, count - 1)
            lines = [_assemble([_tokens(b, index) for b in row[first:]], -2) for row in blocks]
            layer.restore(_assemble(lines, 0), first * BLOCK_TOKENS, end)

    def _chain(self, keys: list[bytes]) -> list[_Block]:
        """Blocks of a chain, now the latest used: its head last, for a tail is nothing alone."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return [self._blocks[key] for key in keys]

    def publish(self, rows: Items[Sequence], prefill: PrefillRows, start: int, end: int) -> None:
        """Keep the blocks that the chunk [start, end) completed and that are not here yet.

        Tails go in before heads, so that they also go first when room is short.
        """
        for index, row in enumerate(rows):
            keys = row.block_keys[: min(self.max_blocks, end // BLOCK_TOKENS)]
            for number in reversed(range(start // BLOCK_TOKENS, len(keys))):
                low = number * BLOCK_TOKENS
                state = self._wanted_state(row, prefill, index, low + BLOCK_TOKENS, end)
                known = self._blocks.get(keys[number])
                if known is None:
                    tokens = Bundle(prefill.block(index, low, low + BLOCK_TOKENS))
                    self._insert(keys[number], _Block(tokens, state))
                elif known.state is None and state is not None:
                    self._insert(keys[number], _Block(known.tokens, state))
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def _wanted_state(
        self, row: Sequence, prefill: PrefillRows, index: int, at: int, end: int
    ) -> Bundle | None:
        """The row's states after ``at`` tokens: they exist where a chunk ended and it had more."""
        if not self._has_state or at != end or at not in row.state_stops:
            return None
        return Bundle(prefill.states(index))

    def _insert(self, key: bytes, block: _Block) -> None:
        if block.num_bytes > self.max_bytes:
            return
        old = self._blocks.pop(key, None)
        if old is not None:
            self.num_bytes -= old.num_bytes
        while self._blocks and self.num_bytes + block.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        # Evaluated now: an unevaluated slice would keep the whole group's buffers alive.
        mx.async_eval(block.tokens.arrays, block.state.arrays if block.state else [])
        self._blocks[key] = block
        self.num_bytes += block.num_bytes


def _tokens(block: _Block, layer: int) -> Pieces:
    pieces = block.tokens.layer(layer)
    assert pieces is not None
    return pieces


def _state(block: _Block, layer: int) -> Pieces:
    pieces = block.state.layer(layer) if block.state else None
    assert pieces is not None
    return pieces


def _assemble(lines: list[Pieces], axis: int) -> Pieces:
    """Pieces side by side: blocks along the tokens (-2), or rows along the batch (0)."""
    if len(lines) == 1:
        return lines[0]
    return tuple(mx.concatenate(parts, axis=axis) for parts in zip(*lines, strict=True))
