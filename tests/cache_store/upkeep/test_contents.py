"""The heads of blocks, and the lists, chains, samples and batches made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_cache_store.blocks.block import Kind, Limits
from batchkv_cache_store.blocks.header import FIELDS, align, parse_header
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.blocks.peek import HEAD_BYTES, LINKS_BYTES, peek, peek_links
from batchkv_cache_store.blocks.seal import SEAL_BYTES
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.tiers.base import Entry
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_cache_store.upkeep.check import check_all, parse_sample, sample
from batchkv_cache_store.upkeep.contents import batches, chain_names, find_names, iter_items
from cache_store.blocks import PLAIN, chain_of, encoded, make_block
from cache_store.places import MIB, name

BLOCK = make_block(num_bytes=4000, index=3)
DATA = encoded(BLOCK)


@pytest.mark.parametrize("num_tokens", [0, 1, 256, Limits().max_tokens])
def test_a_head_says_what_its_header_says(num_tokens: int) -> None:
    """The first bytes hold all fields before the tensors, even of the longest header."""
    block = make_block(tokens=range(num_tokens), index=7, kind=Kind.STATE)
    block = dataclasses.replace(block, writer="\u20ac" * 80)
    data = encoded(block)
    head = peek(data[:HEAD_BYTES])
    assert (head.links.namespace, head.links.key, head.links.parent) == (
        block.namespace, block.key, block.parent,
    )  # fmt: skip
    assert (head.index, head.kind, head.tokens) == (7, Kind.STATE, block.tokens)
    assert (head.writer, head.time_ms) == (block.writer, block.time_ms)
    assert (head.num_tokens, head.num_tensors) == (num_tokens, 2)
    assert (head.num_bytes, head.is_signed) == (len(data), False)
    assert peek_links(data[:LINKS_BYTES]) == head.links


@given(place=st.integers(0, 399), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_head_is_rejected_or_read(place: int, byte: int, cut: int) -> None:
    """Any first bytes give a head or BlockRejected."""
    data = bytearray(DATA[:400])
    data[place] = byte
    for read in (peek, peek_links):
        for part in (data, data[:cut]):
            try:
                read(part)
            except BlockRejected as fault:
                assert isinstance(fault.reason, Reason)


@given(st.recursive(st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.binary(max_size=40)
                    | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=3), inner, max_size=3)),
       st.sampled_from(FIELDS))  # fmt: skip
def test_a_strange_header_is_peeked_at_as_it_is_read(value: object, field: str) -> None:
    """``peek`` refuses a field exactly when ``decode`` does."""
    end = 32 + int.from_bytes(DATA[12:16], "little")
    header = msgpack.packb(msgpack.unpackb(DATA[32:end]) | {field: value})
    data = DATA[:12] + len(header).to_bytes(4, "little") + DATA[16:32] + header
    payload = memoryview(DATA)[align(end) : -SEAL_BYTES]
    is_peeked = _accepts(lambda: peek(data))
    is_read = _accepts(lambda: parse_header(memoryview(header), payload, Limits()))
    assert is_peeked == is_read or field == "tensors"


def _accepts(read: Callable[[], object]) -> bool:
    try:
        read()
    except BlockRejected:
        return False
    return True


def test_items_know_their_namespace_or_why_not() -> None:
    """A block of another size or key has a reason; a manifest's namespace is in its name."""
    tier = MemoryTier(MIB)
    right = block_name(BLOCK.key, BLOCK.kind)
    for each, data in {
        right: DATA, name(1): DATA, name(2): DATA[:-1], name(3): DATA + b"x", name(4): b"",
        name(5, "manifest"): b"{}",
    }.items():  # fmt: skip
        tier.put(each, [data])
    found = {item.entry.name: (item.namespace, item.reason) for item in iter_items(tier)}
    assert found == {
        right: (BLOCK.namespace, None),
        name(1): (None, Reason.KEY),
        name(2): (None, Reason.TRUNCATED),
        name(3): (None, Reason.TRAILING),
        name(4): (None, Reason.TRUNCATED),
        name(5, "manifest"): (bytes.fromhex(name(5)[:64]), None),
    }


def test_a_chain_is_followed_to_its_root_or_to_its_gap() -> None:
    """A chain has the blocks and windows before a block; a state needs none."""
    tier = MemoryTier(MIB)
    blocks = chain_of(range(24))
    window = dataclasses.replace(blocks[2], kind=Kind.WINDOW)
    state = dataclasses.replace(make_block((9, 9, 9, 9), index=5), kind=Kind.STATE)
    for block in (*blocks, window, state):
        tier.put(block_name(block.key, block.kind), [encoded(block)])
    names, is_whole = chain_names(tier, blocks[3].key)
    assert is_whole and sorted(names) == sorted(
        block_name(b.key, b.kind) for b in (*blocks[:3], window)
    )
    assert chain_names(tier, blocks[0].key) == ([], True) == chain_names(tier, state.key)
    tier.delete(block_name(blocks[1].key, Kind.KV))
    names, is_whole = chain_names(tier, blocks[5].key)
    assert not is_whole and len(names) == 4


def test_a_chain_that_runs_in_a_circle_ends() -> None:
    """A header may be wrong: a parent that does not come before ends the chain."""
    tier = MemoryTier(MIB)
    first, second = chain_of(range(8))
    first = dataclasses.replace(first, parent=second.key, index=2)
    for block in (first, second):
        tier.put(block_name(block.key, Kind.KV), [encoded(block)])
    assert chain_names(tier, second.key) == ([], False)


def test_names_are_found_by_their_first_digits() -> None:
    """Names that begin with the digits, with their tiers; a whole key needs no listing."""
    first, second = MemoryTier(MIB), MemoryTier(MIB)
    first.put(name(1), [b"x"])
    for each in (name(1), name(1, "state"), name(2)):
        second.put(each, [b"x"])
    wanted = {name(1): [first, second], name(1, "state"): [second]}
    assert find_names([first, second], name(1)[:2]) == wanted
    assert find_names([first, second], name(1)[:64]) == wanted
    assert find_names([first, second], "abcdef") == {}


def test_batches_are_bounded() -> None:
    """At most 64 names, and no more bytes than allowed, if each were as large as the largest."""
    entries = [Entry(name(number), size) for number, size in enumerate([5, 5, 50, 1, 9, 1])]
    assert [[e.num_bytes for e in b] for b in batches(entries, 10)] == [[5, 5], [50], [1], [9], [1]]
    assert [len(batch) for batch in batches([entries[0]] * 130)] == [64, 64, 2]
    assert list(batches([])) == []


def test_samples_are_drawn_at_random() -> None:
    """So many entries, all equally likely, or a share; fewer if there are fewer."""
    entries = [Entry(name(number), 1) for number in range(200)]
    drawn = [entry for _ in range(60) for entry in sample(entries, 10)]
    assert len(drawn) == 600 and len(set(drawn)) > 150
    assert list(sample(entries[:3], 10)) == entries[:3]
    assert list(sample(entries, 1.0)) == entries
    assert 20 < len(list(sample(entries, 0.5))) < 180
    assert [parse_sample(text) for text in ("500", "5%", "0.25", " 100% ")] == [500, 0.05, 0.25, 1]
    for wrong in ("", "0", "0.0", "150%", "2.5", "-3", "5 %", "five", "1e3"):
        with pytest.raises(ValueError, match=r"sample|share"):
            parse_sample(wrong)


def test_checking_reads_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of many blocks never reads more bytes at once than its limit."""
    tier = MemoryTier(MIB)
    blocks = chain_of(range(40), num_bytes=4000)
    for block in blocks:
        tier.put(block_name(block.key, block.kind), [encoded(block)])
    asked: list[int] = []
    get_heads = tier.get_heads
    monkeypatch.setattr("batchkv_cache_store.upkeep.check.MAX_BATCH_BYTES", 10_000)
    monkeypatch.setattr(
        tier, "get_heads", lambda names, size: asked.append(len(names)) or get_heads(names, size)
    )
    entries = [*tier.iter_names(), Entry(name(9), 9000)]  # the last is gone by now
    verdicts = list(check_all(tier, entries, PLAIN))
    assert [verdict.reason for verdict in verdicts] == [None] * 10 and max(asked) == 2
