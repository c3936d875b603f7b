"""Prefixes in this worker's memory, packed, block by block.

A block is 256 tokens of all layers, exactly as prefill packed them. Its key names the block and all
blocks before it (``batchkv_cache_store.keys``). A row takes the longest chain of blocks that is
here and computes the rest. Blocks are copied bit for bit, so a hit gives what a miss would have
computed. ``cache_store.uses`` chooses the blocks to evict when the memory is full.

A block has up to three parts (``block_layout``): layers that keep all tokens, layers with a window,
and states. Blocks that were computed here have all parts, but states only where a chunk ended and
keeping them was worth it. Blocks from the shared store have only the parts that a row needed: the
first part in every block, the window in the last few, and a state at the end. So a row takes the
longest chain at whose end all parts are there.

After that chain a row takes the beginning of the next block from a block that begins with the same
tokens (``partial_blocks``). States exist at ends of blocks only, so models with states take none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from itertools import takewhile

import mlx.core as mx

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS, chain, own_root, root_key
from batchkv_cache_store.uses import EvictionOrder
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.block_layout import BlockLayout
from batchkv_worker.prefix.bundle import (
    ALL_PIECES,
    EMPTY_BYTES,
    Bundle,
    HeldBlock,
    Joined,
)
from batchkv_worker.prefix.cuts import GroupCuts, Kinds, Run, runs_of
from batchkv_worker.prefix.partial_blocks import (
    PARTIAL_TOKENS,
    PartialBlocks,
    partial_keys,
    within,
)
from batchkv_worker.sequence import Sequence

LOCAL_ROOT = root_key(b"")  # one process, one model, one scheme: the chain needs no namespace

# Called with a row, the number of one of its blocks, and a part of it that was computed just now.
OnNew = Callable[[Sequence, int, Kind, Bundle], None]


class PrefixCache:
    """Blocks by key. ``eviction`` has their order of eviction, and how many rows wait for each.

    It also has how many rows wait that begin with each partial block.

    ``max_blocks``: the longest chain that fits, with its state at the end; 0: nothing is kept.
    ``root``: the key before the first block. ``on_new``: called with new parts, to share them.
    ``on_used``: called with the parts of blocks that a row goes on from.
    """

    on_used: OnNew | None = None

    def __init__(
        self,
        max_bytes: int,
        costs: Costs,
        kinds: Items[LayerKind],
        root: bytes = LOCAL_ROOT,
        on_new: OnNew | None = None,
    ) -> None:
        self.block_bytes = max(costs.per_new_token * BLOCK_TOKENS, EMPTY_BYTES)
        self.max_blocks = max(0, max_bytes - costs.per_row) // self.block_bytes
        state_bytes = costs.per_row if self.max_blocks else 0
        self.max_bytes = self.max_blocks * self.block_bytes + state_bytes
        self.num_bytes = 0
        self.version = 0  # changes whenever a block comes or goes
        self.block_layout = BlockLayout(kinds)
        layout = self.block_layout
        self._shares_partial = layout.has_kv and not layout.has_state
        self._root = root
        self._on_new = on_new
        self.kinds = kinds
        self._blocks, self.eviction = dict[bytes, HeldBlock](), EvictionOrder[bytes]()
        self._partial = PartialBlocks()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop everything."""
        self.version += 1
        self._blocks.clear()
        self._partial.clear()
        self.eviction.clear()
        self.num_bytes = 0

    def keys(self, prompt: list[int], cache_salt: str | None) -> list[bytes]:
        """Keys of the blocks that prefill fills (with all but the last token), as room allows."""
        return chain(own_root(self._root, cache_salt), self._filled(prompt))

    def partial_keys(self, prompt: list[int], cache_salt: str | None) -> list[bytes]:
        """Keys of the partial blocks in the same tokens; none if they are not shared."""
        if not self._shares_partial:
            return []
        return partial_keys(own_root(self._root, cache_salt), self._filled(prompt))

    def _filled(self, prompt: list[int]) -> list[int]:
        return prompt[: self.max_blocks * BLOCK_TOKENS + 1][:-1]

    def name(self, row: Sequence) -> None:
        """Give a row the keys of its blocks and, if they are shared, of its partial blocks."""
        row.block_keys = self.keys(row.prompt, row.cache_salt)
        row.partial_keys = self.partial_keys(row.prompt, row.cache_salt)

    def depth(self, keys: Items[bytes]) -> int:
        """Blocks of the longest prefix of a chain that is here with all parts at its end."""
        block_layout, found, num_windows = self.block_layout, 0, 0
        for number, key in enumerate(keys, start=1):
            parts = self._parts(key)
            if parts is None or (block_layout.has_kv and Kind.KV not in parts):
                break
            num_windows = num_windows + 1 if Kind.WINDOW in parts else 0
            has_window = num_windows >= min(number, block_layout.num_window_blocks)
            if has_window and (Kind.STATE in parts or not block_layout.has_state):
                found = number
        return found

    def num_cached(self, row: Sequence) -> int:
        """Tokens of the row's longest prefix that is here with all parts at its end."""
        if row.parked:
            if row.parked in self._blocks and self.num_held(row) >= row.num_shared:
                return row.num_prefill
            self.forget(row.parked)
            row.unpark()
        depth = self.depth_of(row)
        if not row.partial_keys:
            return depth * BLOCK_TOKENS
        return depth * BLOCK_TOKENS + self._partial.longest(within(row.partial_keys, depth))

    def num_held(self, row: Sequence) -> int:
        """Tokens of the row's longest prefix that is here in the layers that keep every token."""
        is_here = (Kind.KV in (self._parts(key) or ()) for key in row.block_keys)
        depth = sum(1 for _ in takewhile(bool, is_here))
        return depth * BLOCK_TOKENS + self._partial.longest(within(row.partial_keys, depth))

    def depth_of(self, row: Sequence) -> int:
        """``depth`` of a row's chain, looked up again only after blocks came or went."""
        if row.depth_seen[0] != self.version:
            row.depth_seen = self.version, self.depth(row.block_keys)
        return row.depth_seen[1]

    def pieces(self, keys: Items[bytes]) -> set[tuple[int, Kind]]:
        """(block number, kind) of all parts of a chain in this memory, with gaps or without."""
        return {
            (number, kind) for number, key in enumerate(keys) for kind in self._parts(key) or ()
        }

    def _parts(self, key: bytes) -> dict[Kind, Bundle] | None:
        block = self._blocks.get(key)
        return None if block is None else block.parts

    def prefix_pieces(self, row: Sequence, start: int, end: int) -> dict[int, Pieces] | None:
        """A row's tokens [start, end), of each layer that keeps every token; None if some lack."""
        if self.num_held(row) < end:
            return None
        first, count = start // BLOCK_TOKENS, end // BLOCK_TOKENS
        blocks = [self._blocks[key] for key in row.block_keys[first:count]]
        if num_partial := end % BLOCK_TOKENS:
            (own,) = row.block_keys[count : count + 1] or [b""]
            # Its own block may lack a window, so that nobody goes on from its beginning.
            source = own if Kind.KV in (self._parts(own) or ()) else self._beginning(row, end)
            blocks.append(self._blocks[source].beginning(num_partial))
        parts = [block.parts[Kind.KV] for block in blocks]
        parts[0] = parts[0].after(start % BLOCK_TOKENS)
        if len(parts) == 1 and (start % BLOCK_TOKENS or end % BLOCK_TOKENS):
            parts = [parts[0].copied()]  # a view would keep the whole block
        # A shared prefix keeps all its layers, so they may be parts of a few large arrays.
        together = Joined([parts], ALL_PIECES)
        return {
            index: together.layer(index)
            for index, kind in enumerate(self.kinds)
            if kind.window is None and not kind.has_state
        }

    def _beginning(self, row: Sequence, end: int) -> bytes:
        """The key of a block that begins with what the row has after full blocks, up to ``end``.

        There is one if so many tokens count as cached.
        """
        count, num_partial = divmod(end, BLOCK_TOKENS)
        key = within(row.partial_keys, count)[num_partial // PARTIAL_TOKENS - 1]
        source = self._partial.source(key)
        assert source is not None
        return source

    def blocks_up_to(self, end: int, rows: Items[Sequence]) -> list[list[HeldBlock]]:
        """The chain of each row, with the partial block after it; equal ones are one object."""
        count, num_partial = divmod(end, BLOCK_TOKENS)
        cut: dict[bytes, HeldBlock] = {}
        found = []
        for row in rows:
            blocks = self._chain(row.block_keys[:count])
            if num_partial:
                source = self._beginning(row, end)
                if source not in cut:
                    self._touch([source])
                    cut[source] = self._blocks[source].beginning(num_partial)
                blocks.append(cut[source])
            row.is_converted = any(block.is_converted for block in blocks)
            self._tell_used(row, blocks[:count])
            found.append(blocks)
        return found

    def _tell_used(self, row: Sequence, blocks: Items[HeldBlock]) -> None:
        if self.on_used is None or row.is_converted or row.num_resumed:
            return
        for number, block in enumerate(blocks):
            for kind, part in block.parts.items():
                self.on_used(row, number, kind, part)

    def _chain(self, keys: Items[bytes]) -> list[HeldBlock]:
        """Blocks of a chain, marked as used; the head last, because a tail needs its head."""
        self.eviction.touch(keys)
        return [self._blocks[key] for key in keys]

    def publish(self, rows: Items[Sequence], prefill: PrefillRows, start: int, end: int) -> None:
        """Store the blocks that the chunk [start, end) completed and that are not here yet.

        Tails are stored before heads, so that they are also evicted first.
        """
        cuts = GroupCuts(self.block_layout, prefill, self._runs(rows, start, end))
        for index, row in enumerate(rows):
            keys = row.block_keys[: end // BLOCK_TOKENS]
            for number in reversed(range(start // BLOCK_TOKENS, len(keys))):
                low, high = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
                parts = cuts.tokens(index, low, high, self._lacking(keys[number]))
                # States exist where a chunk ended, if the row had tokens up to there.
                if high == end and end in row.state_stops:
                    parts |= self._state(prefill, index, keys[number])
                if parts or keys[number] not in self._blocks:
                    self._insert(keys[number], parts, row.is_converted)
                    self._note_partial(keys[number], within(row.partial_keys, number))
                if self._on_new is not None and not (row.is_converted or row.num_resumed):
                    for kind, part in parts.items():
                        self._on_new(row, number, kind, part)
            self._touch(keys)
            if not row.unqueued:  # else its other choices need them
                self.eviction.demote(keys[self._num_wanted(row) :])
            if partial := self._new_partial(row, start, end):
                low = len(row.block_keys) * BLOCK_TOKENS
                high = low + len(partial) * PARTIAL_TOKENS
                parts = cuts.tokens(index, low, high, self.block_layout.token_kinds)
                self._insert(partial[-1], parts, row.is_converted)
                self._note_partial(partial[-1], partial)

    def _runs(self, rows: Items[Sequence], start: int, end: int) -> list[list[Run]]:
        """What the chunk [start, end) completes of each row and is not here yet."""
        first, found, seen = start // BLOCK_TOKENS, [], set[bytes]()
        for row in rows:
            wanted = [self._lacking(key) for key in row.block_keys[first : end // BLOCK_TOKENS]]
            partial = self._new_partial(row, start, end)
            num_after = 0 if seen.issuperset(partial[-1:]) else len(partial) * PARTIAL_TOKENS
            seen.update(partial)
            found.append(runs_of(self.block_layout, first, wanted, num_after))
        return found

    def _num_wanted(self, row: Sequence) -> int:
        """Blocks that another row begins with, the one included of which it needs the beginning."""
        common = row.num_common_blocks
        return common + any(map(self.eviction.remaining, within(row.partial_keys, common)))

    def _new_partial(self, row: Sequence, start: int, end: int) -> Items[bytes]:
        """Partial keys of what is to be stored after a row's last full block; mostly none.

        Nobody else keeps those tokens. They are stored as far as waiting rows begin with them.
        """
        wanted = within(row.partial_keys, len(row.block_keys))
        while wanted and not (row.unqueued or self.eviction.remaining(wanted[-1])):
            wanted = wanted[:-1]  # other choices of the row need all of them
        high = len(row.block_keys) * BLOCK_TOKENS + len(wanted) * PARTIAL_TOKENS
        is_new = bool(wanted) and self._partial.source(wanted[-1]) is None
        return wanted if is_new and start < high <= end else ()

    def _note_partial(self, key: bytes, keys: Items[bytes]) -> None:
        """A block begins with these partial blocks, if it has every layer that keeps tokens."""
        if keys and not self._lacking(key):
            self._partial.add(key, keys)

    def adopt(
        self,
        keys: Items[bytes],
        pieces: Mapping[tuple[int, Kind], Bundle],
        is_converted: bool = False,
        partial: Items[bytes] = (),
    ) -> None:
        """Store parts of a chain that came from the shared store, up to the last of them.

        ``partial``: the partial keys of the chain's prompt.
        """
        depth = max((number for number, _ in pieces), default=-1) + 1
        for number in reversed(range(depth)):
            new = {kind: pieces[number, kind] for kind in Kind if (number, kind) in pieces}
            if new or not self.block_layout.has_kv:
                self._insert(keys[number], new, is_converted)
                self._note_partial(keys[number], within(partial, number))
        self._touch(keys[:depth])

    def can_park(self, num_bytes: int) -> bool:
        """Whether a row of that many bytes may be parked; while it is copied, it is held twice."""
        return 2 * num_bytes <= self.max_bytes

    def park(self, key: bytes, num_bytes: int, make: Callable[[], list[Pieces]]) -> None:
        """Store what ``make`` copies out of a slot, as a block that is in no chain."""
        self._make_way(2 * num_bytes)
        self.eviction.add([key])  # its row waits
        bundle = Bundle(make())
        mx.eval(bundle.arrays)
        self._insert(key, {Kind.KV: bundle}, False)

    def parked(self, key: bytes) -> list[Pieces] | None:
        """A parked row's pieces; None when they were evicted."""
        parts = self._parts(key)
        if parts is None:
            return None
        self._touch([key])
        pieces = map(parts[Kind.KV].layer, range(len(self.kinds)))
        return [found or () for found in pieces]

    def forget(self, key: bytes) -> None:
        """Drop a parked row, if it is here."""
        block = self._blocks.pop(key, None)
        self.num_bytes -= block.num_bytes if block is not None else 0
        self.eviction.forget(key)

    def _touch(self, keys: Items[bytes]) -> None:
        self.eviction.touch([key for key in keys if key in self._blocks])

    def _lacking(self, key: bytes) -> Kinds:
        """The kinds of layers that keep tokens, of which no part of the block is here."""
        known = self._parts(key) or ()
        return tuple(kind for kind in self.block_layout.token_kinds if kind not in known)

    def _state(self, prefill: PrefillRows, index: int, key: bytes) -> dict[Kind, Bundle]:
        """A row's states as they are now, unless those of this block are known."""
        if not self.block_layout.has_state or Kind.STATE in (self._parts(key) or ()):
            return {}
        part = self.block_layout.part(Kind.STATE, prefill.states(index))
        mx.async_eval(part.arrays)
        return {Kind.STATE: part}

    def _insert(self, key: bytes, parts: Mapping[Kind, Bundle], is_converted: bool) -> None:
        self.version += 1
        old = self._blocks.pop(key, None)
        self.eviction.discard(key)
        block = HeldBlock(dict(parts), is_converted)
        if old is not None:
            self.num_bytes -= old.num_bytes
            block = HeldBlock({**old.parts, **parts}, is_converted or old.is_converted)
        if block.num_bytes > self.max_bytes:
            self._partial.drop(key)
            return
        self._make_way(block.num_bytes)
        self._blocks[key] = block
        self.eviction.touch([key])
        self.num_bytes += block.num_bytes

    def _make_way(self, num_bytes: int) -> None:
        while self._blocks and self.num_bytes + num_bytes > self.max_bytes:
            key = self.eviction.pop()
            self.num_bytes -= self._blocks.pop(key).num_bytes
            self._partial.drop(key)
