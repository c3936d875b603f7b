"""Decode slots that keep records: what comes, stays and leaves is what other slots have."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.attention import records
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.record_slots import RecordSlots
from batchkv_worker.kv.slots.pool_view import view_of
from batchkv_worker.kv.slots.prefix_pool import PrefixPool
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.types import Window
from worker.kv.checked_slots import CheckedSlots
from worker.kv.crowd import random_prompt
from worker.kv.reference import attention_kind, keys_of, values_of

SCHEMES = ("float", "affine8", "k8v4", "affine3+nvfp4", "mxfp8+float", "turbo3.5", "affine4r")


def record_kind(name: str, window: Window = None, dtype: mx.Dtype = mx.float32) -> AttentionKind:
    kind = attention_kind(name, window, dtype)
    records = PlainKernels(RecordLayout.of(kind.scheme, dtype))
    return replace(kind, path="kernel", records=records)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_come_decode_move_and_leave_bit_for_bit(name: str) -> None:
    """Every token keeps its bits through growth, moves and shrinking; sizes are as reckoned."""
    crowd = CheckedSlots([record_kind(name), record_kind(name, window=24)], slots=4)
    assert all(isinstance(layer, RecordSlots) for layer in crowd.slots.layers)
    crowd.join(250, 30, widths=(200, 50))
    crowd.steps(8)
    crowd.check()
    crowd.join(3, 5)
    crowd.steps(2)
    crowd.leave(1)
    crowd.close_gaps()
    crowd.check()
    crowd.steps(1)
    crowd.slots.shrink(is_tight=True)
    crowd.check()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_its_bits(dtype: mx.Dtype) -> None:
    """Two numbers share a word of a record."""
    crowd = CheckedSlots([record_kind("affine8", dtype=dtype)], slots=2)
    crowd.join(20, 7)
    crowd.steps(3)
    crowd.check()


def test_a_step_writes_one_array() -> None:
    """One buffer, one pack and one update, whatever the parts of the scheme are."""
    crowd = CheckedSlots([record_kind("affine8+nvfp4")])
    crowd.join(4, 6)
    (layer,) = crowd.slots.layers
    assert [array.dtype for array in layer.arrays] == [mx.uint32]
    crowd.slots.begin_step()
    before = layer.arrays[0] + 0
    mx.eval(before)
    layer.update_and_fetch(keys_of([[1], [2]]), values_of([[1], [2]]))  # type: ignore[attr-defined]
    changed = mx.any(layer.arrays[0] != before, axis=(1, 3))
    write = crowd.slots.layouts.main.write
    assert mx.argmax(changed, axis=1).tolist() == [write, write]
    assert changed.sum().item() == 2


def test_bounds_follow_rows_and_free_slots_have_none() -> None:
    """A row reads its own columns and the one that the step writes, a window's its last ones."""
    crowd = CheckedSlots([record_kind("float"), record_kind("float", window=8)], slots=4)
    crowd.join(20, 3, 11)
    crowd.leave(1)
    view = crowd.slots.begin_step()
    write = crowd.slots.layouts.main.write
    found = view.spans[None].bounds[:3].tolist()
    assert [end - start for start, end in found] == [21, 0, 12]
    assert [end for _, end in found[::2]] == [write + 1] * 2
    assert [end - start for start, end in view.spans[8].bounds[:3].tolist()] == [8, 0, 8]
    assert view.spans[None].longest == 256


def test_rows_of_equal_length_need_no_exact_columns() -> None:
    """Shapes of a step stay the same for many steps, however the backend rounds columns."""
    shapes = Shapes(step=64, group_cost=1)
    crowd = CheckedSlots([record_kind("affine8")], shapes=shapes)
    crowd.join(70, 70)
    crowd.steps(3)
    crowd.check()


def pooled(*lengths: int) -> tuple[RecordSlots, list[SharedPrefix]]:
    """A layer, and shared prefixes of so many tokens."""
    kind = record_kind("affine8")
    slots = CheckedSlots([kind], slots=2).slots
    (layer,) = slots.layers
    assert isinstance(layer, RecordSlots)
    made = []
    for number, tokens in enumerate(lengths):
        numbers = [random_prompt(number, tokens)]
        keys, values = kind.scheme.keys.pack(keys_of(numbers)), kind.scheme.values
        pieces = *keys, *values.pack(values_of(numbers))
        made.append(slots.make_prefix(bytes([number]), tokens, {0: pieces}))
    return layer, made


def check_pool(layer: RecordSlots, pool: PrefixPool, rows: list[SharedPrefix]) -> None:
    """Fill the layer's pool for these rows: each prefix is where the view says."""
    view = view_of(pool, rows)
    layer._fill(view)
    assert layer._pool is not None and layer._pool.shape[2] == view.capacity
    for one in rows:
        low, high = view.places[one.rank]
        wanted = records.join(layer._layer, *one.slots[0])
        assert mx.array_equal(layer._pool[..., low:high, :], wanted)


def test_the_pool_has_each_prefix_where_the_view_says() -> None:
    """It grows, shrinks, is taken up again; a layer may have missed what came between two views."""
    rng, pool = random.Random(2), PrefixPool()
    layer, made = pooled(*(64 * rng.randint(1, 9) for _ in range(40)))
    for turn in range(60):
        rows = [rng.choice(made[turn % 35 : turn % 35 + 5]) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3:  # of a step that was given up
            view_of(pool, rows)
            continue
        if rng.random() < 0.1:
            layer.drop_pool()
        check_pool(layer, pool, rows)


def test_a_prefix_that_moved_in_views_that_a_layer_missed_is_found() -> None:
    layer, (a, b, c, d, e) = pooled(*[64] * 5)
    pool = PrefixPool()
    check_pool(layer, pool, [a, b, c, d])
    version = pool.version
    view_of(pool, [b, c, d, e])
    check_pool(layer, pool, [a, c, d, e])
    assert pool.version == version


def test_what_stays_in_the_pool_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the buffer grows, closes gaps, or gets small again."""
    layer, made = pooled(64, 128, 192, 64, 128, 256)
    real, count = records.of_prefix, [0]

    def counted(*given: Any) -> mx.array:
        count[0] += 1
        return real(*given)

    monkeypatch.setattr(records, "of_prefix", counted)
    pool = PrefixPool()
    for rows in (made[:2], made[:3], made[:5], made[1:5], made[1:], [made[1], made[5]], made[1:2]):
        check_pool(layer, pool, rows)
    assert count[0] == len(made)
