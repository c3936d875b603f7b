"""One contract for every kind of layer: rows hold what plain Python says, bit for bit."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.types import Pieces
from parity.few import RUNS_ALL
from worker.kv.checked_slots import CheckedSlots
from worker.kv.reference import (
    HEADS,
    Reference,
    append_chunk,
    attention_kind,
    bits,
    check_content,
    check_dense,
    keys_of,
    prefilled,
    state_kind,
    values_of,
)

STORAGES = ("float", "affine8", "affine4", "k8v4", "nvfp4", "turbo4", "turbo3.5")
KINDS: dict[str, LayerKind] = {
    **{name: attention_kind(name) for name in STORAGES},
    **{f"{name} in a window": attention_kind(name, 40) for name in STORAGES},
    "affine8 and turbo3, spread": attention_kind("affine8+turbo3", path="spread-packed"),
    "turbo3.5 in a window, spread": attention_kind("turbo3.5", 40, path="spread-folded"),
    "turbo3.5 in bfloat16, spread": attention_kind(
        "turbo3.5", 40, mx.bfloat16, path="spread-fused"
    ),
    "window of 1": attention_kind("affine8", 1),
    "window of 2": attention_kind("float", 2),
    "window of 300": attention_kind("affine4", 300),
    "bfloat16": attention_kind("affine8", 40, mx.bfloat16),
    "state": state_kind(),
}
GROUPS: dict[str, list[LayerKind]] = {
    **{name: [kind] for name, kind in KINDS.items()},
    "all together": [
        attention_kind("float", 40),
        state_kind(),
        attention_kind("turbo3.5"),
        attention_kind("affine8", 300),
        state_kind(),
        attention_kind("float"),
    ],
}
every_group = pytest.mark.parametrize("kinds", GROUPS.values(), ids=list(GROUPS))
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
ATTENDING = {name: kind for name, kind in KINDS.items() if isinstance(kind, AttentionKind)}
# A window of one sees nothing of the tokens before.
RESTORED = {name: kind for name, kind in ATTENDING.items() if kind.window != 1}


def live(checked: CheckedSlots, rng: random.Random, turns: int) -> None:
    """Joins of every length, leaves, moves, growth, shifts to both sides, rows that come back."""
    for _ in range(turns):
        choice = rng.random()
        free = checked.slots.layouts.num_free
        if free and choice < 0.3:
            lengths = [rng.choice([0, 1, 3, 39, 40, 41, 90, 300])]
            if free > 1 and rng.random() < 0.5:
                lengths.append(rng.choice([1, 2, 45]))
            checked.join(*lengths, widths=rng.choice([(), (1,), (40, 1), (16, 64)]))
        elif checked.rows and choice < 0.5:
            checked.leave(rng.choice(list(checked.rows)))
        elif checked.rows and choice < 0.65:
            slot = rng.choice(list(checked.rows))
            row, pieces = checked.rows[slot], checked.slots.snapshot(slot)
            mx.eval(pieces)
            checked.leave(slot)
            checked.admit(row, pieces if row.tokens else None)
        elif choice < 0.75:
            checked.close_gaps()
        elif checked.rows:
            checked.steps(rng.choice([1, 2, 20]))
        checked.check()


@pytest.mark.few(8)
@every_group
def test_random_histories(kinds: list[LayerKind]) -> None:
    """Whatever comes, goes and moves: contents, bits, sizes, bytes and masks are as they should."""
    checked = CheckedSlots(kinds)
    live(checked, random.Random(len(kinds)), 16)


@pytest.mark.parametrize("step", [1, 64])
def test_random_histories_of_all_kinds(step: int) -> None:
    """The same for longer, all kinds at once, with shapes as they are and rounded up."""
    shapes = Shapes(step=step, rows=8 if step > 1 else 1, group_cost=1, mask_rank=5)
    checked = CheckedSlots(GROUPS["all together"], 6, shapes)
    checked.join(5, 7, 2, 1, 3, 9)  # every layout gets all its rows at the start
    seed, turns = (step, 25) if RUNS_ALL else (16, 12)  # its few turns have all that may happen
    live(checked, random.Random(seed), turns)


@pytest.mark.few(8)
@every_group
def test_buffers_grow_and_shift(kinds: list[LayerKind]) -> None:
    """A longer row shifts the others right, growth and a shift to the left change no content."""
    checked = CheckedSlots(kinds, 3)
    (short,) = checked.join(10, remaining=900)
    long = checked.join(750, remaining=900)[0]  # a few columns are left of buffers that grew
    checked.check()
    checked.steps(3)
    writes = [layout.write for layout in checked.slots.layouts.all.values()]
    checked.leave(long)
    for layout in checked.slots.layouts.all.values():
        while layout.window is None and layout.write < layout.capacity:
            checked.step()
    checked.steps(2)
    checked.check()
    assert writes != [layout.write for layout in checked.slots.layouts.all.values()]
    assert len(checked.rows[short].tokens) == checked.slots.size(short)


@pytest.mark.few(10)
@every_group
def test_snapshots_are_copies(kinds: list[LayerKind]) -> None:
    """A snapshot does not change when its row goes on, and comes back bit for bit."""
    checked = CheckedSlots(kinds, 2)
    slot, other = checked.join(45, 7)
    checked.steps(2)
    row, pieces = checked.rows[slot], checked.slots.snapshot(slot)
    before = [bits(piece) for piece in pieces]
    checked.steps(3)
    checked.leave(slot)
    checked.leave(other)
    checked.join(60)
    checked.steps(2)
    assert [bits(piece) for piece in pieces] == before
    again = checked.admit(row, pieces)
    assert [bits(piece) for piece in checked.slots.snapshot(again)] == before
    checked.steps(2)
    checked.check()


@every_group
def test_rows_without_a_token(kinds: list[LayerKind]) -> None:
    """A row of no token yet takes the slot of a long one: it finds nothing of it."""
    checked = CheckedSlots(kinds, 2)
    neighbour, slot = checked.join(5, 90, remaining=60)
    checked.steps(3)
    checked.leave(slot)
    assert checked.join(0) == [slot]
    assert checked.slots.size(slot) == 0
    checked.check()
    checked.steps(3)
    checked.check()
    assert set(checked.rows) == {neighbour, slot}


@every_group
def test_the_last_row_may_leave(kinds: list[LayerKind]) -> None:
    """Empty slots have their buffers, no rows, nothing to move, and take new rows."""
    checked = CheckedSlots(kinds, 2)
    assert checked.slots.nbytes == 0
    checked.close_gaps()
    for slot in checked.join(3, 30):
        checked.leave(slot)
    checked.close_gaps()
    checked.check()
    checked.join(4)
    checked.steps(2)
    checked.check()


@pytest.mark.few(30)
@every_kind
@pytest.mark.parametrize("widths", [(), (1,), (64, 64, 1), (45,)], ids=str)
def test_ragged_prompts(kind: LayerKind, widths: tuple[int, ...]) -> None:
    """Rows of unequal length in any chunks, some without a token in a chunk, hold their tokens."""
    rng = random.Random(2)
    lengths = (129, 90, 130, 1, 64)
    prompts = [tuple(rng.randrange(1, 4096) for _ in range(length)) for length in lengths]
    rows = prefilled([kind], prompts, widths)
    alone = [prefilled([kind], [prompt], ()) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        (pieces,) = rows.row(index, len(prompt))
        check_content(kind, pieces, Reference(prompt))
        assert all(piece.shape[0] == 1 for piece in pieces)
        if not isinstance(kind, AttentionKind) or not kind.scheme.is_rotated:
            assert bits(pieces) == bits(alone[index].row(0, len(prompt))[0])


@pytest.mark.parametrize("kind", ATTENDING.values(), ids=list(ATTENDING))
def test_prefill_hands_out_what_a_chunk_may_see(kind: AttentionKind) -> None:
    """Masks and columns of each chunk leave a token itself and those before, in its window."""
    rng = random.Random(3)
    prompt = [rng.randrange(1, 4096) for _ in range(700)]
    layer, position = kind.prefill(700, 330), 0
    for width in (1, 20, 330, 330, 1, 18):
        chunk = prompt[position : position + width]
        layer.begin(Chunk(position, width))
        mask = layer.make_mask(width)
        explicit = layer.make_mask(width, return_array=True)
        keys, values = layer.update_and_fetch(keys_of([chunk]), values_of([chunk]))
        columns = keys.shape[-2]
        assert keys is layer.keys_and_values()[0]
        if explicit is None:  # one token that sees every column
            assert width == 1 and mask is None
            explicit = mx.ones((1, columns), mx.bool_)
        elif isinstance(mask, mx.array):
            assert mx.array_equal(mask, explicit)
        else:
            assert mask == "causal"
        assert explicit.shape == (width, columns)
        first = position + width - columns
        for row in {0, width // 2, width - 1}:
            seen = first + np.flatnonzero(np.array(explicit)[row])
            low = 0 if kind.window is None else max(0, position + row - kind.window + 1)
            assert seen.tolist() == list(range(low, position + row + 1))
        tokens = prompt[first : position + width]
        check_dense(kind, keys, keys_of([tokens]))
        check_dense(kind, values, values_of([tokens]))
        position += width
        assert layer.offset == position


@pytest.mark.parametrize("kind", RESTORED.values(), ids=list(RESTORED))
def test_blocks_are_restored_as_they_were(kind: AttentionKind) -> None:
    """Blocks cut out while prompts are computed give, restored, the rows of an uncached prefill."""
    rng = random.Random(4)
    prompt = [rng.randrange(1, 4096) for _ in range(560)]
    whole = kind.prefill(560, 128)
    blocks: list[Pieces] = []
    for position in range(0, 560, 70):
        chunk = prompt[position : position + 70]
        whole.begin(Chunk(position, 70))
        whole.update_and_fetch(keys_of([chunk]), values_of([chunk]))
        while (len(blocks) + 1) * 256 <= whole.offset:
            blocks.append(whole.block(0, len(blocks) * 256, len(blocks) * 256 + 256))
    first = 0 if kind.window is None else (512 - kind.window + 1) // 256
    again = kind.prefill(560, 128)
    pieces = tuple(mx.concatenate(parts, axis=-2) for parts in zip(*blocks[first:], strict=True))
    before = bits(pieces)
    again.restore(pieces, first * 256, 512)
    assert again.offset == 512
    assert bits(again.row(0, 512)) == bits(again.block(0, *_kept(kind, 512)))
    again.begin(Chunk(512, 48))
    again.update_and_fetch(keys_of([prompt[512:]]), values_of([prompt[512:]]))
    check_content(kind, again.row(0, 560), Reference(tuple(prompt)))
    if not kind.scheme.is_rotated:  # a rotation may round otherwise in another shape
        assert bits(again.row(0, 560)) == bits(whole.row(0, 560))
    assert bits(pieces) == before


def _kept(kind: AttentionKind, length: int) -> tuple[int, int]:
    return (0 if kind.window is None else length - kind.window + 1), length


def test_states_are_restored_as_they_were() -> None:
    """A state taken at a chunk's end goes on as if nothing had been between."""
    kind, rng = state_kind(), random.Random(5)
    prompts = [[rng.randrange(1, 4096) for _ in range(20)] for _ in range(2)]
    cut = prefilled([kind], [prompt[:12] for prompt in prompts], ())
    kept = cut.states(1)[0]
    assert kept is not None
    rows = prefilled([kind], [[1]], ())
    rows.layers[0].restore(kept, 12, 12)
    append_chunk(rows, [prompts[1]], 12, 8)
    check_content(kind, rows.row(0, 20)[0], Reference(tuple(prompts[1])))
    check_content(kind, kept, Reference(tuple(prompts[1][:12])))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", STORAGES)
def test_prefill_without_a_head_axis(name: str, window: int | None) -> None:
    """Keys and values ``[rows, tokens, size]`` are cut along their tokens as those with heads."""
    kind = attention_kind(name, window, heads=1)
    rng = random.Random(6)
    prompt = [rng.randrange(1, 4096) for _ in range(90)]
    flat, deep = kind.prefill(90, 45), kind.prefill(90, 45)
    for position in (0, 45):
        chunk = [prompt[position : position + 45]]
        keys, values = keys_of(chunk)[:, :1], values_of(chunk)[:, :1]
        for layer, squeezed in ((deep, False), (flat, True)):
            layer.begin(Chunk(position, 45))
            layer.update_and_fetch(*(x[:, 0] if squeezed else x for x in (keys, values)))
    for length in (90, 50):
        pieces = flat.row(0, length)
        assert {piece.ndim for piece in pieces} == {3} and HEADS > 1
        assert [content for _, content in bits(pieces)] == [
            content for _, content in bits(deep.row(0, length))
        ]


@every_kind
def test_broken_books_are_seen(kind: LayerKind) -> None:
    """``check`` raises when a buffer is not as its layout says."""
    checked = CheckedSlots([kind], 2)
    checked.join(3, 4)
    checked.slots.check()
    layer = checked.slots.layers[0]
    if isinstance(kind, AttentionKind):
        layer.begin(checked.slots.begin_step())
        layer._keys = [part[:, :, 1:] for part in layer._keys]  # type: ignore[attr-defined]
    else:
        layer[0] = mx.zeros((9, 2, 3))  # type: ignore[index]
    with pytest.raises(AssertionError):
        checked.slots.check()
