"""The ends of prompts that are stored as partial blocks, without an engine; and what is noted."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.prefix.memory import OnNew, PrefixCache
from batchkv_worker.sequence import Generation, Sequence
from worker.kv.reference import attention_kind, bits, prefilled
from worker.prefix.engines_on_store import behind, random_prompt

KINDS = [attention_kind("float")]


def memory_of(kinds: Items[LayerKind] = KINDS, on_new: OnNew | None = None) -> PrefixCache:
    """A memory for four blocks."""
    costs = costs_of(kinds)
    return PrefixCache(4 * 256 * costs.per_new_token, costs, kinds, on_new=on_new)


def named(memory: PrefixCache, prompts: Items[list[int]]) -> list[Sequence]:
    rows = [Sequence(str(index), one, Generation(1)) for index, one in enumerate(prompts)]
    for row in rows:
        memory.name(row)
    return rows


def publish(memory: PrefixCache, rows: Items[Sequence]) -> PrefillRows:
    """Compute the rows in one chunk, and store what is new."""
    computed = prefilled(KINDS, [row.prompt[:-1] for row in rows], [])
    memory.publish(rows, computed, 0, max(row.num_prefill for row in rows))
    return computed


def test_an_end_is_stored_once_with_all_its_beginnings() -> None:
    """Two rows of a group have it; who waits takes it, and whoever begins with less takes less.

    It leaves the worker by no way: its key is in no store.
    """
    told: list[Any] = []
    memory = memory_of(on_new=lambda *new: told.append(new))
    common, short = behind(150, 20, 21, 22), behind(100, 20, 21, seed=0)[1]
    *rows, waiting, shorter = named(memory, [*common, short])
    memory.eviction.add(waiting.partial_keys)
    publish(memory, rows)
    assert len(memory) == 1 and memory.version == 1 and not told
    assert memory.num_cached(waiting) == 144 and memory.num_cached(shorter) == 96


def test_a_parked_row_needs_what_it_shares() -> None:
    """Up to within a block; without it, its own tokens are of no use."""
    memory = memory_of()
    row, waiting = named(memory, behind(400, 20, 21))
    memory.eviction.add(waiting.partial_keys)
    publish(memory, [row])
    memory.eviction.add(waiting.block_keys)
    memory.eviction.remove(waiting.partial_keys)
    memory.park(b"row", 1000, lambda: [(mx.zeros((1, 250)),)])
    row.park(b"row", 384)
    assert memory.num_cached(row) == row.num_prefill
    memory._make_way(memory.max_bytes - memory.block_bytes - 2000)  # nobody waits for the end
    assert memory.num_held(row) == 256 and memory.parked(b"row") is not None
    assert memory.num_cached(row) == 256 and not row.parked
    assert memory.parked(b"row") is None


def test_a_prefix_ends_within_a_block_that_lacks_its_window() -> None:
    """Of the first blocks the store gives the layers alone that keep all tokens."""
    kinds = [attention_kind("float"), attention_kind("float", 100)]
    costs = costs_of(kinds)
    one, other = (PrefixCache(8 * 256 * costs.per_new_token, costs, kinds) for _ in range(2))
    (row,) = named(one, [random_prompt(1, 800)])
    one.publish([row], prefilled(kinds, [row.prompt[:-1]], []), 0, row.num_prefill)
    parts = {(n, Kind.KV): one._blocks[key].parts[Kind.KV] for n, key in enumerate(row.block_keys)}
    other.adopt(row.block_keys, parts, partial=row.partial_keys)
    assert other.num_cached(row) == 0 and other.num_held(row) == 768
    for start, end in ((0, 576), (512, 576), (512, 768), (16, 704)):
        found, wanted = (memory.prefix_pieces(row, start, end) for memory in (other, one))
        assert found is not None and wanted is not None and bits(found[0]) == bits(wanted[0])
    assert other.prefix_pieces(row, 0, 799) is None


def test_rows_with_the_same_end_cut_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others find it there."""
    memory, real, cut = memory_of(), PrefillRows.block, list[tuple[int, ...]]()

    def noted(rows: PrefillRows, index: int, start: int, end: int, count: int = 1) -> Any:
        cut.append((index, start, end, count))
        return real(rows, index, start, end, count)

    monkeypatch.setattr(PrefillRows, "block", noted)
    *rows, waiting = named(memory, behind(150, 20, 21, 22))
    memory.eviction.add(waiting.partial_keys)
    publish(memory, rows)
    assert cut == [(0, 0, 144, 1)]


def test_each_row_stores_its_own_end() -> None:
    """Not that of the first row of its group."""
    memory = memory_of()
    one, other = behind(150, 20, 21), behind(150, 20, 21, seed=100)
    *rows, first, second = named(memory, [one[0], other[0], one[1], other[1]])
    for row in (first, second):
        memory.eviction.add(row.partial_keys)
    computed = publish(memory, rows)
    for index, row in enumerate((first, second)):
        (stored,) = memory._blocks[row.partial_keys[8]].parts.values()
        right = computed.block(index, 0, 144)[0]
        assert bits(stored.layer(0)) == bits(right)
    assert memory.num_cached(first) == memory.num_cached(second) == 144


def test_an_end_keeps_nothing_of_its_group_in_memory() -> None:
    """It is copied when it is stored, so the group is freed before anybody reads it."""
    memory = memory_of()
    row, waiting, *others = named(memory, [*behind(150, 20, 21), *behind(170, *[5] * 7, seed=100)])
    memory.eviction.add(waiting.partial_keys)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    publish(memory, [row, *others])
    gc.collect()
    mx.synchronize()
    assert len(memory) == 1  # of 144 tokens; the group has eight times 174
    assert mx.get_active_memory() - before < 2 * memory.num_bytes


@pytest.mark.parametrize("end", [144, 149])
def test_an_end_is_stored_by_the_chunk_that_completes_it(end: int) -> None:
    """Also at that chunk's very end. A later chunk does not store it: windows have gone by then."""
    memory = memory_of()
    row, waiting = named(memory, behind(150, 60, 21))
    memory.eviction.add(waiting.partial_keys)
    computed = prefilled(KINDS, [row.prompt[:-1]], [])
    memory.publish([row], computed, 0, end)
    assert memory.num_cached(waiting) == 144
    memory.clear()
    assert memory.num_cached(waiting) == 0 and memory._partial.source(row.partial_keys[0]) is None
    memory.publish([row], computed, end, 200)
    assert len(memory) == 0


def test_the_end_of_a_row_on_converted_blocks_is_converted() -> None:
    """So rows that go on from it publish nothing, either."""
    memory = memory_of()
    row, waiting = named(memory, behind(150, 20, 21))
    memory.eviction.add(waiting.partial_keys)
    row.is_converted = True
    publish(memory, [row])
    assert [block.is_converted for block in memory._blocks.values()] == [True]


def test_a_block_that_has_grown_too_large_has_no_beginning() -> None:
    """It is not stored again, so nothing may name it."""
    memory = memory_of()
    (row,) = named(memory, [random_prompt(1, 300)])
    small, large = (Bundle([(mx.zeros((1, 1, 256, size)),)]) for size in (1, 2**12))
    memory.adopt(row.block_keys, {(0, Kind.KV): small}, partial=row.partial_keys)
    assert len(memory) == 1 and len(memory._partial) == 15
    memory.adopt(row.block_keys, {(0, Kind.KV): large}, partial=row.partial_keys)
    assert len(memory) == 0 and len(memory._partial) == 0


def test_a_block_without_its_window_has_no_beginning() -> None:
    """Of a fetched prefix only the last blocks have windows: a row in the first ones needs them."""
    kinds = [attention_kind("float"), attention_kind("float", 24)]
    memory = memory_of(kinds)
    first, second = behind(200, 400, 20)
    row, later = named(memory, [first, second])
    one = Bundle([(mx.zeros((1, 1, 256, 1)),)])
    pieces = {(0, Kind.KV): one, (1, Kind.KV): one, (1, Kind.WINDOW): one}
    memory.adopt(row.block_keys, pieces, partial=row.partial_keys)
    assert memory.num_cached(row) == 512 and memory.num_cached(later) == 0
    memory.adopt(row.block_keys, {(0, Kind.WINDOW): one}, partial=row.partial_keys)
    assert memory.num_cached(later) == 192
