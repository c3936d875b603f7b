"""States are stored where a row's stops are, and cut only if they are not known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from worker.kv.reference import BACKEND, append_chunk, attention_kind, state_kind
from worker.prefix.engines_on_store import random_prompt

KINDS = [attention_kind("affine8"), state_kind()]
END = 512  # of the chunk, and of two blocks


def memory() -> PrefixCache:
    """A memory for ten blocks."""
    costs = costs_of(KINDS)
    return PrefixCache(10 * 256 * costs.per_new_token + costs.per_row, costs, KINDS)


def named(cache: PrefixCache, seed: int, stop: int) -> Row:
    """A row whose states are kept after ``stop`` tokens."""
    row = Row(str(seed), random_prompt(seed, 900), Generation(1), state_stops=frozenset({stop}))
    cache.name(row)
    return row


def publish(cache: PrefixCache, rows: Sequence[Row]) -> None:
    """Compute the first chunk of these rows together, and store what is new."""
    prefill = PrefillRows(BACKEND, KINDS, 900, END)
    append_chunk(prefill, [row.prompt for row in rows], 0, END)
    cache.publish(rows, prefill, 0, END)


def with_states(cache: PrefixCache, row: Row) -> set[int]:
    """Numbers of the row's blocks that are here with a state."""
    return {number for number, kind in cache.pieces(row.block_keys) if kind is Kind.STATE}


def test_a_row_stores_no_state_where_another_rows_chunk_had_to_end() -> None:
    """The chunk ends for one row of the group, and the other stores its blocks alone."""
    cache = memory()
    stopped, other = named(cache, 1, END), named(cache, 2, 768)
    publish(cache, [stopped, other])
    assert len(cache) == 4
    assert with_states(cache, stopped) == {1} and not with_states(cache, other)
    assert (cache.num_cached(stopped), cache.num_cached(other)) == (END, 0)


def test_a_known_state_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal rows in one group or in two, the first alone copies its states."""
    cut, states = list[int](), PrefillRows.states

    def noted(rows: PrefillRows, index: int) -> object:
        cut.append(index)
        return states(rows, index)

    monkeypatch.setattr(PrefillRows, "states", noted)
    cache = memory()
    first, second = named(cache, 1, END), named(cache, 1, END)
    publish(cache, [first, second])
    publish(cache, [second])
    assert cut == [0] and with_states(cache, second) == {1}
    cache.clear()
    publish(cache, [second])
    assert cut == [0, 0] and with_states(cache, second) == {1}
