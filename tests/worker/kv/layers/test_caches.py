"""Known failures of states, prefixes, windows and pieces (``REGRESSIONS.md``: S, H, W, Q)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.kv.layers.state import StateKind, StateShape
from batchkv_worker.kv.slots.changes import Relayout
from batchkv_worker.kv.slots.layouts import SlotLayouts
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import attention_kind, bits, prefilled, state_kind, x86

WITH_STATES = ("mamba2", "qwen3_next", "gear")  # they share whole blocks alone
EVERY_KIND = ("llama", "gemma3_text", "qwen3_next", "mamba2", "gear", "deepseek_v3")


@pytest.mark.parametrize("name", ["affine4", "turbo3.5"])
def test_pieces_of_another_scheme_are_refused(name: str) -> None:
    """S2: as many parts as the scheme has, or an error; nothing is read with wrong bits."""
    kind, other = attention_kind("float"), attention_kind(name)
    pieces = prefilled([kind], [[1, 2, 3]], ()).row(0, 3)
    with pytest.raises(ValueError, match="do not fit"):
        other.prefill(10, 10).restore(pieces[0], 0, 3)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_states_of_any_number_of_arrays(count: int) -> None:
    """S3, H8: one to four arrays, and a place that no row ever fills."""
    shapes = tuple((index + 1, 2) for index in range(count - 1))
    kind = StateKind(StateShape((*shapes, None), (*[mx.float32] * (count - 1), None)))
    layer = kind.prefill(8, 8)
    for place, shape in enumerate(shapes):
        layer[place] = mx.full((2, *shape), place + 1.0)
    slots = kind.slots()
    slots.admit(1, 0, layer.state(1))
    assert len(slots.snapshot(1, 0, 0)) == count - 1 and slots[count - 1] is None
    assert bits(slots.snapshot(1, 0, 0)) == bits(layer.state(1))
    slots.check(2, 0)


def test_states_of_several_rows_take_their_slots_and_no_others() -> None:
    """A copy of two rows between others: those keep what is theirs, and no row is added."""
    kind = StateKind(StateShape(((3,),), (mx.float32,)))
    layer = kind.prefill(8, 8)
    layer[0] = mx.arange(5.0)[:, None] * mx.ones((5, 3))
    slots = kind.slots()
    slots.admit(0, 0, layer.row(0, 1, count=5))
    slots.admit(1, 0, layer.row(3, 1, count=2))
    slots.check(5, 0)
    assert slots.arrays[0][:, 0].tolist() == [0.0, 3.0, 4.0, 3.0, 4.0]


@pytest.mark.parametrize("write", [7, 9, 20])
def test_a_row_clears_what_the_row_before_left_in_its_slot(write: int) -> None:
    """Also beside its own columns: a weight of 0 times NaN is NaN. Other slots stay."""
    kind = attention_kind("float")
    slots = kind.slots()
    slots.relayout(Relayout(0, 0, 0, 2, 20))
    slots.swap([mx.full(part.shape, mx.nan) for part in slots.arrays])
    pieces = prefilled([kind], [[1, 2, 3, 4, 5, 6, 7]], ()).row(0, 7)[0]
    slots.admit(1, write, pieces)
    assert bits(slots.snapshot(1, write - 7, write)) == bits(pieces)
    for part in slots.arrays:
        assert mx.isnan(part[0]).all() and not mx.isnan(part[1]).any()
        assert not part[1, :, : write - 7].any() and not part[1, :, write:].any()


def test_nothing_held_is_no_bytes() -> None:
    """S4: empty layers count nothing and can be asked."""
    for kind in (attention_kind("affine8"), attention_kind("float", 24), state_kind()):
        assert kind.slots().nbytes == 0
        assert kind.prefill(10, 10).arrays == []


@pytest.mark.parametrize("name", ["float", "affine4", "nvfp4"])
def test_bundles_keep_bits_and_dtypes(name: str) -> None:
    """S5, S8, S11: half precision comes out of a bundle as it went in, as tuples."""
    kinds = [attention_kind(name, None, mx.bfloat16), state_kind(), attention_kind(name)]
    rows = prefilled(kinds, [[1, 2, 3], [4, 5]], ())
    pieces = rows.row(1, 2)
    bundle = Bundle([*pieces, None])
    for index, given in enumerate(pieces):
        found = bundle.layer(index)
        assert isinstance(found, tuple)
        assert [piece.dtype for piece in found] == [piece.dtype for piece in given]
        assert bits(found) == bits(given)
    assert bundle.layer(len(pieces)) is None


def test_blocks_are_cut_to_their_tokens() -> None:
    """S9, O3: what is kept is as large as its tokens, whatever it was cut from."""
    kind = attention_kind("affine8")
    rows = prefilled([kind], [random_prompt(1, 600)], ())
    for length in (1, 5, 256):
        assert Bundle(rows.block(0, 0, length)).nbytes == length * kind.bytes_per_token


@pytest.mark.parametrize("layers", [1, 2])
def test_blocks_do_not_hold_what_they_were_cut_from(layers: int) -> None:
    """O3, G1: when a long prompt is gone, its blocks take their own bytes and no more."""
    kinds = [attention_kind("float") for _ in range(layers)]
    rows = prefilled(kinds, [random_prompt(1, 2000)], ())
    bundle = Bundle(rows.block(0, 0, 256))
    mx.eval(bundle.arrays)
    before = mx.get_active_memory()
    del rows
    assert before - mx.get_active_memory() >= layers * 1900 * kinds[0].bytes_per_token


def test_a_block_of_many_layers_is_few_arrays() -> None:
    """G2: the number of arrays of a block does not grow with the layers."""
    kinds = [attention_kind("affine8") for _ in range(20)]
    rows = prefilled(kinds, [random_prompt(1, 8)], ())
    assert len(Bundle(rows.block(0, 0, 8)).arrays) <= 6


@pytest.mark.few(2)
@pytest.mark.parametrize("family", EVERY_KIND)
def test_the_second_turn_hits(family: str) -> None:
    """H3, H6, H10, K4, O2, T3: prompts of two blocks and one token, of two blocks, and beyond.

    An exact hit computes one token. A prompt that ends with a block takes the block before, and all
    but its last 16 tokens.
    """
    crowd = Crowd(family, prefix_bytes=2**27, chunk_tokens=512)
    prompts = {length: random_prompt(3, length) for length in (513, 512, 560)}
    first = {n: list(crowd.run(f"cold{n}", prompt).token_ids) for n, prompt in prompts.items()}
    for turn in ("warm", "again"):
        for length, prompt in prompts.items():
            assert list(crowd.run(f"{turn}{length}", prompt).token_ids) == first[length]
    falls_back = 256 if family in WITH_STATES else 496
    assert crowd.cached("cold513", "warm513", "warm512", "warm560") == [0, 512, falls_back, 512]
    crowd.check_alone("cold513", "cold512", "cold560")


def test_exact_hits_and_misses_in_one_group() -> None:
    """H1, F4: rows behind one prefix, some with nothing left to compute, in one chunk."""
    for family in ("qwen3_next", "gear"):
        crowd = Crowd(family, slots=6, prefix_bytes=2**27)
        prefix = random_prompt(1, 512)
        crowd.run("first", [*prefix, 9])
        for index, length in enumerate((1, 30, 5, 1)):
            crowd.add(str(index), prefix + random_prompt(9 + index, length))
        crowd.drain().check_alone()
        assert crowd.cached("0", "1", "2", "3") == [512] * 4


def test_snapshots_outlive_the_rows_that_read_them() -> None:
    """H2, K7: blocks in memory are the same bytes before and after rows went on from them."""
    crowd = Crowd("gear", prefix_bytes=2**27)
    prompt = random_prompt(1, 520)
    crowd.run("first", prompt)

    def everything() -> list[object]:
        return [
            bits(tuple(bundle.arrays))
            for block in crowd.engine.prefixes._blocks.values()
            for bundle in block.parts.values()
        ]

    before = sorted(map(repr, everything()))
    for index in range(3):
        crowd.run(str(index), [*prompt[:515], *random_prompt(index, 30)], count=12)
    assert set(before) <= set(map(repr, everything()))


def test_a_block_that_is_known_gets_its_state() -> None:
    """H4: a row that ends where a longer one went through leaves its state there."""
    crowd = Crowd("qwen3_next", prefix_bytes=2**27)
    prompt = random_prompt(1, 800)
    crowd.run("long", prompt)
    crowd.run("short", prompt[:530])
    crowd.run("again", [*prompt[:512], *random_prompt(2, 20)])
    assert crowd.cached("long", "short", "again") == [0, 0, 512]
    crowd.check_alone()


def test_states_are_few() -> None:
    """H7: a prompt of five blocks leaves one state, not five, and all of it is counted."""
    crowd = Crowd("qwen3_next", prefix_bytes=2**27)
    crowd.run("long", random_prompt(1, 1300), count=1)
    prefixes = crowd.engine.prefixes
    assert len(prefixes) == 5
    assert sum(Kind.STATE in block.parts for block in prefixes._blocks.values()) == 1
    costs = crowd.engine.plan.costs
    assert prefixes.num_bytes == 5 * 256 * costs.per_new_token + costs.per_row


def test_a_chain_ends_at_its_last_state() -> None:
    """H1, H10: blocks beyond the last state are no hit."""
    kinds = [attention_kind("float"), state_kind()]
    cache = PrefixCache(2**24, costs_of(kinds), kinds)
    row = Sequence("a", random_prompt(1, 800), Generation(1))
    row.block_keys, row.state_stops = cache.keys(row.prompt, None), frozenset({512})
    rows = prefilled(kinds, [row.prompt[:512]], ())
    cache.publish([row], rows, 0, 512)
    assert cache.num_cached(row) == 512
    row.state_stops = frozenset()
    rows = prefilled(kinds, [row.prompt[:799]], ())
    cache.publish([row], rows, 0, 799)
    assert len(cache) == 3 and cache.num_cached(row) == 512


def test_a_hybrid_prefix_survives_in_a_small_memory() -> None:
    """H6: where a prompt's blocks and its state hardly fit, the second turn still hits."""
    costs = Crowd("qwen3_next").engine.plan.costs
    crowd = Crowd("qwen3_next", prefix_bytes=4 * 256 * costs.per_new_token)
    for turn in range(3):
        crowd.run(str(turn), [*random_prompt(1, 1024), turn], count=1)
    assert max(crowd.cached()) > 0


def test_a_window_of_one_token_behind_a_prefix() -> None:
    """W4: the smallest window there is sees nothing of the blocks before."""
    model = tiny_models.build("gemma3_text", sliding_window=1)
    crowd = Crowd(model, prefix_bytes=2**24)
    cold = crowd.run("cold", random_prompt(1, 300))
    assert list(crowd.run("warm", random_prompt(1, 300)).token_ids) == list(cold.token_ids)


@pytest.mark.parametrize("length", [256, 300, 512, 557])
def test_prefixes_shorter_and_longer_than_a_window(length: int) -> None:
    """W4, W6: a window of 300 over one, two and no whole blocks of prefix, in order."""
    model = tiny_models.build("gemma3_text", sliding_window=300)
    crowd = Crowd(model, prefix_bytes=2**26, chunk_tokens=256)
    prompt = [*random_prompt(1, length), *random_prompt(2, 20)]
    cold = crowd.run("cold", prompt, count=8)
    warm = crowd.run("warm", prompt, count=8)
    assert warm.usage.cached == length // 256 * 256
    assert warm.token_ids == cold.token_ids
    crowd.check_alone("cold")


@pytest.mark.parametrize("multiples", [(1, 1), (64, 8)])
def test_layouts_have_rows_alike(multiples: tuple[int, int]) -> None:
    """W1: windows and whole histories have a place for every slot, whatever was there before."""
    columns, rows = multiples
    backend = x86(columns_multiple=columns, rows_multiple=rows)
    crowd = Crowd("gemma3_text", slots=8, prefix_bytes=0, backend=backend)
    for index in range(4):
        crowd.add(f"many{index}", random_prompt(index, 700), count=3)
    crowd.drain()
    crowd.add("one", random_prompt(5, 210), count=50)
    crowd.step()
    crowd.add("long", random_prompt(6, 700), count=5)
    crowd.drain().check_alone()


def test_a_short_row_beside_one_that_outgrows_a_window() -> None:
    """W1, F4: chunks end where states are kept; windows must not forget rows that ended before."""
    crowd = Crowd("gear", chunk_tokens=2048, prefix_bytes=2**26)
    crowd.add("long", random_prompt(1, 900))
    crowd.add("short", random_prompt(2, 11))
    crowd.drain().check_alone()


def test_windows_and_states_are_counted_with_the_slots() -> None:
    """G3, W7: bytes of slots are those of every kind of layer, packed windows too."""
    crowd = Crowd("gear", scheme="affine8")
    crowd.add("a", random_prompt(1, 40), count=20)
    crowd.step(3)
    layers = crowd.engine._slots.layers
    assert all(layer.nbytes > 0 for layer in layers)
    assert crowd.engine.kv_bytes == sum(a.nbytes for layer in layers for a in layer.arrays)
    crowd.drain()


def test_warm_runs_are_equal_bit_for_bit() -> None:
    """Q3: a hit computes what a hit computed before, to the last bit of every log-probability."""
    crowd = Crowd("gemma3_text", scheme="affine4", prefix_bytes=2**26)
    prompt = random_prompt(1, 300)
    for name in ("cold", "warm", "again"):
        crowd.add(name, prompt, count=8, logprobs=2)
        crowd.drain()
    assert crowd.cached("warm", "again") == [256, 256]
    warm, again = crowd.ended["warm"], crowd.ended["again"]
    assert (warm.token_ids, warm.logprobs) == (again.token_ids, again.logprobs)
    assert crowd.ended["cold"].token_ids == warm.token_ids


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["affine8", "k8v4", "nvfp4", "turbo4", "affine4,last=float"])
def test_schemes_are_what_the_buffers_hold(scheme: str) -> None:
    """Q1, Q2: every layer's buffers have the bytes of the scheme that was asked for."""
    crowd = Crowd("gemma3_text", scheme=scheme)
    crowd.add("a", random_prompt(1, 60), count=5)
    crowd.step(2)
    plan, slots = crowd.engine.plan, crowd.engine._slots
    layouts: SlotLayouts = slots.layouts
    for layer, kind in zip(slots.layers, plan.kinds, strict=True):
        layout = layouts.all[kind.window]
        assert layer.nbytes == layout.rows * layout.capacity * kind.bytes_per_token
    floats = [layer.is_packed for layer in plan.schemes]
    assert floats == [True] * 3 + ["last" not in scheme]
    crowd.drain()
