"""Gives the rows of a group what is cached of their prompts."""

from __future__ import annotations

from collections.abc import Sequence as Items

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.prefix.bundle import Joined, assemble, block_pieces, parts_after
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence


def fill(
    prefill: PrefillRows,
    rows: Items[Sequence],
    prefixes: PrefixCache,
    shared: SharedPrefix | None = None,
    *,
    apart: bool = False,
) -> None:
    """Give new prefill rows their common number of cached tokens, the first ones ``shared``.

    ``apart``: they are given as a prefix of each row, which its slot shares with other rows.
    """
    end = rows[0].num_cached
    if not end:
        return
    blocks = prefixes.blocks_up_to(end, rows)
    # Without it the fused kernel serves, which a long rest of a prompt needs more.
    if shared is not None and 2 * shared.num_tokens < prefill.capacity:
        shared = None
    if apart:
        joined = Joined(parts_after(0, blocks))
        for index, layer in enumerate(prefill.layers):
            layer.share_each(joined.layer(index), end)
        return
    low = shared.num_tokens if shared is not None else 0
    is_left = low < end and prefixes.block_layout.has_kv
    room = prefill.capacity - end if prefill.joins_with_room else 0
    own = Joined(parts_after(low, blocks), num_following=room) if is_left else None
    for index, (layer, kind) in enumerate(zip(prefill.layers, prefill.kinds, strict=True)):
        if kind.has_state:
            lines = [block_pieces(chained[-1], Kind.STATE, index) for chained in blocks]
            layer.restore(assemble(lines, 0), end, end)
        elif kind.window is None:
            if shared is not None:
                layer.share([one.packed[index] for one in shared.chain], low)
            if own is not None:
                layer.restore(own.layer(index), low, end)
        else:  # it needs only the blocks that its next token still sees
            seen = max(0, end - kind.window + 1)
            first = min(seen // BLOCK_TOKENS, len(blocks[0]) - 1)
            lines = [
                assemble([block_pieces(one, Kind.WINDOW, index) for one in chained[first:]], -2)
                for chained in blocks
            ]
            layer.restore(assemble(lines, 0), first * BLOCK_TOKENS, end)
