"""Rows that go to other slots together: their contents, and what that costs."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.slots.changes import Demand, Move
from batchkv_worker.kv.slots.layouts import SlotLayouts
from worker.kv.checked_slots import CheckedSlots
from worker.kv.reference import attention_kind, bits, state_kind, x86

GROUPS: dict[str, tuple[str | None, ...]] = {
    "float": ("float", "float window"),
    "affine8": ("affine8", "affine8 window"),
    "turbo4": ("turbo4", "turbo4 window"),
    "mxfp8": ("mxfp8",),  # scales of one byte
    "records": ("float record", "turbo3.5 record", "affine8 record window"),
    "states": ("affine4", None, "float window", None),
}
both_ways = pytest.mark.parametrize("at_once", [False, True], ids=["row by row", "at once"])


def kind_of(words: str | None, at_once: bool) -> LayerKind:
    """``words``: a scheme, then whether slots keep records and a window; None: a state."""
    if words is None:
        return state_kind()
    name, *rest = words.split()
    kind = attention_kind(name, 24 if "window" in rest else None)
    backend = x86(writes_rows_at_once=at_once, starts_each_layer=not at_once)
    kind = replace(kind, backend=backend)
    if "record" not in rest:
        return kind
    records = PlainKernels(RecordLayout.of(kind.scheme, kind.dtype))
    return replace(kind, path="kernel", records=records)


def crowded(name: str, at_once: bool, seed: int, slots: int = 12) -> CheckedSlots:
    """Rows of many lengths, of which some have left again."""
    crowd, rng = CheckedSlots([kind_of(one, at_once) for one in GROUPS[name]], slots), None
    rng = crowd.rng = random.Random(seed)
    lengths = [rng.choice([1, 5, 23, 40, 90]) for _ in range(slots)]
    crowd.join(*lengths, widths=(30,))
    crowd.steps(rng.randrange(3))
    for slot in rng.sample(range(slots), rng.randrange(4, slots - 2)):
        crowd.leave(slot)
    return crowd


def moved_by_chance(crowd: CheckedSlots, rng: random.Random) -> list[Move]:
    """The layouts after some moves to any free slots, also to those that are being left."""
    layouts, moved, moves = crowd.slots.layouts, set(), []
    for _ in range(rng.randrange(2, 6)):
        left = sorted(layouts.main.slots - moved)
        free = sorted(set(range(layouts.main.rows)) - layouts.main.slots)
        if left:
            move = Move(rng.choice(left), rng.choice(free))
            layouts._move(move)
            moved.add(move.target)
            moves.append(move)
    return moves


@pytest.mark.few(4)
@both_ways
@pytest.mark.parametrize("name", GROUPS)
def test_moves_made_together_are_those_made_one_by_one(name: str, at_once: bool) -> None:
    """Any rows to any free slots: every bit of every row, and the steps after, are the same."""
    num_chains = 0
    for seed in range(4):
        together, single = (crowded(name, at_once, seed) for _ in range(2))
        moves = moved_by_chance(together, random.Random(seed))
        together.slots._move(moves)
        for move in moves:
            single.slots.layouts._move(move)
            single.slots._move([move])
            together._follow(move)
            single._follow(move)
        sources = {move.source for move in moves}
        num_chains += any(move.target in sources for move in moves)
        for crowd in (together, single):
            crowd.check()
            crowd.steps(2)
            crowd.check()
        for slot in together.rows:
            found = [
                [bits(part) for part in one.slots.snapshot(slot)] for one in (together, single)
            ]
            assert found[0] == found[1]
    assert num_chains  # rows entered slots that others left with them


@pytest.mark.few(4)
@both_ways
@pytest.mark.parametrize("name", GROUPS)
def test_closing_gaps_moves_the_fewest_rows(name: str, at_once: bool) -> None:
    """Only rows above the wanted slots move; those below stay where they are."""
    for seed in range(4):
        crowd = crowded(name, at_once, seed)
        before, most = set(crowd.rows), len(crowd.rows) + seed % 3
        moves = crowd.close_gaps(most)
        assert {move.source for move in moves} == {slot for slot in before if slot >= most}
        assert max(crowd.rows) < most
        crowd.check()
        crowd.close_gaps()
        assert set(crowd.rows) == set(range(len(crowd.rows)))
        assert crowd.close_gaps() == []
        crowd.check()
        crowd.steps(2)
        for move in crowd.slots.shrink(is_tight=True):
            crowd._follow(move)
        crowd.check()


def test_a_row_moves_once_and_enters_a_free_slot() -> None:
    """In the order of the moves each new slot is free."""
    layouts = SlotLayouts(64)
    rng = random.Random(5)
    for slot in range(64):
        layouts.admit(Demand(rng.randrange(1, 300), 10), slot)
    for slot in rng.sample(range(64), 40):
        layouts.release(slot)
    held = set(layouts.main.slots)
    moves = layouts.close_gaps(30)
    assert len({move.source for move in moves}) == len({move.target for move in moves})
    for move in moves:
        assert move.target < move.source and move.target not in held
        held.remove(move.source)
        held.add(move.target)
    assert held == layouts.main.slots and max(held) < 30


# -- what it costs

_LABEL = re.compile(r'\[label ="([^"]*)"')
LAYERS = 12


def closing(monkeypatch: pytest.MonkeyPatch, words: str, at_once: bool) -> tuple[Counter[str], int]:
    """Primitives and waits when the 8 highest of 16 rows in 32 slots move. Nothing is computed."""
    crowd = CheckedSlots([kind_of(words, at_once)] * LAYERS, 32)
    crowd.join(*[30] * 32)
    for slot in range(0, 32, 2):
        crowd.leave(slot)
    crowd.steps(1)
    waits: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *_: waits.append(1))
        assert len(crowd.close_gaps()) == 8
    text = io.StringIO()
    mx.export_to_dot(text, *crowd.slots.arrays)
    return Counter(_LABEL.findall(text.getvalue())), len(waits)


@pytest.mark.parametrize(
    ("words", "buffers"), [("float", 2), ("affine8", 6), ("turbo4", 6), ("affine8 record", 1)]
)
def test_a_closing_launches_two_operations_a_buffer(
    words: str, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows move: one copies their lines, and one writes them."""
    kinds, waits = closing(monkeypatch, words, at_once=True)
    views = {name for name in kinds if name.split(" ")[0] in ("View", "Reshape", "Squeeze")}
    launches = {name: count for name, count in kinds.items() if name not in views}
    assert launches == {"Gather": buffers * LAYERS, "Scatter": buffers * LAYERS}
    # A quarter of each of 12 layers is copied, so those of four layers take as much as one.
    assert waits == 2 * 3 - 1


def test_row_by_row_lines_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an operation costs little, each row is written by itself, in one piece."""
    kinds, waits = closing(monkeypatch, "float", at_once=False)
    assert kinds["Gather"] == 2 * LAYERS and kinds["SliceUpdate"] == 8 * 2 * LAYERS
    assert waits == 2 * 3 - 1


@pytest.mark.few(4)
@both_ways
@pytest.mark.parametrize("words", ["float", "affine8", "affine8 record"])
@pytest.mark.parametrize("num_moves", [1, 8])
def test_copies_take_no_more_than_a_layer_or_a_row(
    words: str, num_moves: int, at_once: bool
) -> None:
    """Buffers are written in place, and copies of few layers exist at once."""
    crowd = CheckedSlots([kind_of(words, at_once)] * LAYERS, 16)
    crowd.join(*[200] * 16)
    for slot in range(num_moves):
        crowd.leave(slot)
    slots = crowd.slots
    mx.eval(slots.arrays)
    layer = max(one.nbytes for one in slots.layers)
    allowed = max(layer, slots.nbytes // 16)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert len(crowd.close_gaps()) == num_moves
    mx.eval(slots.arrays)
    mx.synchronize()
    least = num_moves / 16 * layer
    assert least <= mx.get_peak_memory() - before <= 1.1 * allowed
    crowd.check()


def test_a_layer_that_waits_for_its_part_of_a_step_is_written_in_place() -> None:
    """Where each layer starts its step by itself, what it started is waited for first."""
    kind = kind_of("float", at_once=False)
    assert isinstance(kind, AttentionKind) and kind.backend.starts_each_layer
    crowd = CheckedSlots([kind] * LAYERS, 16)
    crowd.join(*[200] * 16)
    for slot in range(8):
        crowd.leave(slot)
    layers: Any = crowd.slots.layers
    assert all(layer._started for layer in layers)
    crowd.close_gaps()
    assert not any(layer._started for layer in layers)
    crowd.check()
