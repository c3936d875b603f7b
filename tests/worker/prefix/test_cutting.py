"""Blocks of a group are cut together, and are the same as if each were cut alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.prefix import cuts
from batchkv_worker.prefix.block_layout import BlockLayout
from batchkv_worker.prefix.cuts import GroupCuts, Run, runs_of
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from worker.kv.reference import BACKEND, VOCABULARY, append_chunk, attention_kind, state_kind

LENGTH = 1500  # five full blocks
LAYERS: dict[str, list[LayerKind]] = {
    "full": [attention_kind("affine8"), attention_kind("float"), attention_kind("affine8")],
    "one": [attention_kind("float")],
    "windows": [attention_kind("affine8"), attention_kind("affine8", 300)],
    "states": [attention_kind("affine4"), state_kind()],
}


def memory(kinds: Sequence[LayerKind], num_blocks: int) -> PrefixCache:
    """Has room for so many blocks, to the byte if every layer keeps all tokens."""
    per_token = sum(kind.bytes_per_token for kind in kinds)
    per_row = sum(kind.bytes_per_row for kind in kinds)
    num_bytes = num_blocks * per_token * BLOCK_TOKENS + per_row
    return PrefixCache(num_bytes, Costs(per_token, {}, per_row), kinds)


def publish(cache: PrefixCache, prompts: list[list[int]], widths: Sequence[int]) -> None:
    """Compute these prompts in chunks of such widths; store their blocks."""
    rows = [Row(str(number), prompt, Generation(1)) for number, prompt in enumerate(prompts)]
    for row in rows:
        cache.name(row)
        row.state_stops = frozenset({512, 1024})
    prefill = PrefillRows(BACKEND, cache.kinds, max(map(len, prompts)), max(widths))
    start = 0
    for width in widths:
        append_chunk(prefill, prompts, start, width)
        cache.publish(rows, prefill, start, start + width)
        start += width


def content(cache: PrefixCache) -> list[tuple[bytes, list[tuple[str, list[mx.array]]]]]:
    """All blocks in the order in which they would be evicted, with their arrays."""
    found = []
    while len(cache.eviction._unwanted) + len(cache.eviction._wanted):
        key = cache.eviction.pop()
        parts = cache._blocks[key].parts
        found.append((key, [(str(kind), part.arrays) for kind, part in parts.items()]))
    assert len(found) == len(cache)
    return found


def assert_equal(one: PrefixCache, other: PrefixCache) -> None:
    assert one.num_bytes == other.num_bytes and len(one)
    for (key, parts), (key_2, parts_2) in zip(content(one), content(other), strict=True):
        assert key == key_2 and [kind for kind, _ in parts] == [kind for kind, _ in parts_2]
        for (_, arrays), (_, arrays_2) in zip(parts, parts_2, strict=True):
            for array, array_2 in zip(arrays, arrays_2, strict=True):
                assert array.shape == array_2.shape and array.dtype == array_2.dtype
                assert mx.array_equal(array, array_2)


def drawn(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(length)]


def noted_turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The tokens that are cut from now on, and of how many rows, turn by turn."""
    turns = list[tuple[int, int, int]]()
    block = PrefillRows.block

    def noted(rows: PrefillRows, index: int, start: int, end: int, count: int = 1) -> object:
        turns.append((start, end, count))
        return block(rows, index, start, end, count)

    monkeypatch.setattr(PrefillRows, "block", noted)
    return turns


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_cut_together_are_those_cut_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in chunks that end within blocks too, and evicted in the same order."""
    rng = random.Random(5)
    prompts = [drawn(rng, length) for length in (LENGTH, LENGTH - 400, LENGTH, 700, 690)]
    for widths in ([LENGTH], [512, LENGTH - 512], [700, 324, LENGTH - 1024]):
        caches = []
        for together in (8, 1):
            monkeypatch.setattr(cuts, "blocks_together", lambda _, most=together: most)
            caches.append(memory(LAYERS[name], 30))
            publish(caches[-1], prompts, widths)
            monkeypatch.undo()
        assert_equal(*caches)


def test_blocks_that_are_evicted_meanwhile_are_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full memory has the same blocks as if each were cut when its turn comes."""
    for seed in range(6):
        caches = []
        for together in (8, 1):
            monkeypatch.setattr(cuts, "blocks_together", lambda _, most=together: most)
            rng = random.Random(seed)
            cache = memory(LAYERS["full"], 6)
            common = drawn(rng, 1100)
            for _ in range(5):
                prompt = common[: rng.randrange(1100)] + drawn(rng, 1100)
                publish(cache, [prompt[: rng.choice([600, 1100, LENGTH])]], [600])
                publish(cache, [prompt[:1100]], [1100])
            caches.append(cache)
            monkeypatch.undo()
        assert_equal(*caches)


def test_few_arrays_are_cut_for_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of one row, and of rows that give the same tokens; one that is here in no turn."""
    monkeypatch.setattr(cuts, "blocks_together", lambda _: 4)
    turns = noted_turns(monkeypatch)
    rng = random.Random(1)
    prompt, *others = [drawn(rng, length) for length in (LENGTH, 520, 530, 540, 300)]
    cache = memory(LAYERS["full"], 20)
    publish(cache, [prompt], [LENGTH])
    assert turns == [(256, 1280, 1), (0, 256, 1)]
    publish(cache, [prompt], [LENGTH])
    assert len(turns) == 2
    cache.forget(cache.keys(prompt, None)[2])
    publish(cache, [prompt], [LENGTH])
    assert turns[2:] == [(512, 768, 1)]
    publish(cache, others, [600])
    assert turns[3:] == [(0, 512, 2), (0, 512, 1), (0, 256, 1)]


def test_runs_are_of_blocks_that_lack_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each block once, with what comes after the last one if it lacks as much."""
    monkeypatch.setattr(cuts, "blocks_together", lambda _: 2)
    both, kv = (Kind.KV, Kind.WINDOW), (Kind.KV,)
    windows, full = BlockLayout(LAYERS["windows"]), BlockLayout(LAYERS["full"])
    assert runs_of(windows, 3, []) == []
    assert runs_of(windows, 1, [both, both, both, (), kv], 64) == [
        Run((512, 768, 1024), both),
        Run((256, 512), both),
        Run((1280, 1536), kv),
        Run((1536, 1600), both),
    ]
    assert runs_of(full, 0, [kv, kv], 192) == [Run((256, 512, 704), kv), Run((0, 256), kv)]


def test_what_was_not_planned_is_cut_too() -> None:
    """A block that was evicted between the plan and its turn."""
    kinds = LAYERS["full"]
    prompt = drawn(random.Random(6), 600)
    prefill = PrefillRows(BACKEND, kinds, 600, 600)
    append_chunk(prefill, [prompt, prompt[::-1]], 0, 600)
    layout = BlockLayout(kinds)
    planned = GroupCuts(layout, prefill, [[Run((0, 256, 512), layout.token_kinds)], []])
    for index, bounds in ((1, (256, 512)), (0, (256, 512)), (0, (256, 320)), (0, (0, 256))):
        (found,) = planned.tokens(index, *bounds, layout.token_kinds).values()
        pieces = prefill.block(index, *bounds)
        for one, other in zip(found.arrays, layout.part(Kind.KV, pieces).arrays, strict=True):
            assert mx.array_equal(one, other)


def test_a_block_keeps_no_other_in_memory() -> None:
    """What was cut together is freed one by one."""
    kinds = LAYERS["full"]
    prompt = drawn(random.Random(2), LENGTH)
    prefill = PrefillRows(BACKEND, kinds, LENGTH, LENGTH)
    append_chunk(prefill, [prompt, prompt], 0, LENGTH)
    layout = BlockLayout(kinds)
    before = mx.get_active_memory()
    run = Run((0, 256, 512), layout.token_kinds)
    group = GroupCuts(layout, prefill, [[run], [run]])
    parts = [
        part
        for row in range(2)
        for low in (256, 0)
        for part in group.tokens(row, low, low + 256, run.kinds).values()
    ]
    mx.eval([part.arrays for part in parts])
    del parts[1:]
    assert mx.get_active_memory() - before < 1.5 * parts[0].nbytes


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_keep_nothing_of_their_group_in_memory(name: str) -> None:
    """They are copied when they are stored, so the group is freed before anybody reads them."""
    rng = random.Random(3)
    prompts = [drawn(rng, 600), *(drawn(rng, 200) for _ in range(7))]
    cache = memory(LAYERS[name], 20)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    publish(cache, prompts, [600])
    gc.collect()
    mx.synchronize()
    assert len(cache) == 2  # of a group with the tokens of more than eighteen
    assert mx.get_active_memory() - before < 2 * cache.num_bytes


@pytest.mark.parametrize("name", ["full", "windows"])
def test_no_block_below_the_first_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that earlier chunks completed, a layer with a window has dropped the tokens."""
    prompt = drawn(random.Random(4), LENGTH)
    turns = noted_turns(monkeypatch)
    cache = memory(LAYERS[name], 20)
    row = Row("0", prompt, Generation(1))
    cache.name(row)
    prefill = PrefillRows(BACKEND, LAYERS[name], LENGTH, 1000)
    append_chunk(prefill, [prompt], 0, 1000)
    cache.publish([row], prefill, 0, 1000)
    cache.forget(row.block_keys[2])  # it was evicted meanwhile, and would be a neighbour
    append_chunk(prefill, [prompt], 1000, LENGTH - 1000)
    cache.publish([row], prefill, 1000, LENGTH)
    assert turns == [(0, 768, 1), (768, 1280, 1)]
    if name == "windows":
        with pytest.raises(ValueError, match="are not in"):
            prefill.block(0, 256, 512)
