"""Blocks of a lookup come to the engine one by one, and no more than it takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.lease import LocalLeases
from batchkv_cache_store.lookup import Wanted
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.prefix.shared import fetch
from batchkv_worker.prefix.shared.fetch import Fetcher, Lookup, LookupResult
from cache_store.blocks import NAMESPACE, chain_of, encoded
from worker.prefix.engines_on_store import eventually

BLOCKS = chain_of(range(100, 112))


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetcher]:
    """A fetcher over a tier with three blocks; one at most waits for the engine."""
    monkeypatch.setattr(fetch, "MAX_FETCH_BYTES", 1)
    tier = MemoryTier(2**20)
    for block in BLOCKS:
        tier.put(block_name(block.key, Kind.KV), [encoded(block)])
    store = Store([tier])
    made = Fetcher(store, LocalLeases(), is_shared=False)
    yield made
    made.close(10)
    assert store.close(10)


def ask(fetcher: Fetcher) -> None:
    keys, tokens = [block.key for block in BLOCKS], [block.tokens for block in BLOCKS]
    fetcher.ask(Lookup(7, Wanted(NAMESPACE, keys, tokens), num_worth=0))


def numbers(answers: list[LookupResult]) -> list[int]:
    return [number for answer in answers for number, _ in answer.pieces]


def test_the_next_block_comes_when_one_was_taken(fetcher: Fetcher) -> None:
    """Three blocks, one after the other, and then the result, which has the depth alone."""
    ask(fetcher)
    found: list[LookupResult] = []
    for number in range(len(BLOCKS)):
        eventually(lambda least=number: found.extend(fetcher.answers()) or found[least:])
        assert numbers(found) == list(range(number + 1))
        assert fetcher._num_handed == found[number].num_bytes > 0
        fetcher.note_taken(found[number])
    eventually(lambda: found.extend(fetcher.answers()) or found[-1].is_last)
    assert found[-1].depth == len(BLOCKS) and not found[-1].pieces
    assert len(found[-1].handed) == len(BLOCKS)


def test_a_row_that_is_gone_holds_up_nobody(fetcher: Fetcher) -> None:
    """Its blocks are not handed over any more, and its lookup ends."""
    ask(fetcher)
    found: list[LookupResult] = []
    eventually(lambda: found.extend(fetcher.answers()) or found)
    fetcher.abandon(7)
    eventually(lambda: found.extend(fetcher.answers()) or found[-1].is_last)
    assert numbers(found) == [0]
