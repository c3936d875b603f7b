"""The contract's suite can fail: each fault that is planted in the layers is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.layers import attention_slots, state
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.step_view import ColumnSpan
from worker.kv.checked_slots import CheckedSlots
from worker.kv.layers.test_contract import live
from worker.kv.reference import attention_kind, state_kind

Plant = Callable[[pytest.MonkeyPatch], None]


def rows_without_tokens_find_a_state(patch: pytest.MonkeyPatch) -> None:
    admit = state.StateSlots.admit

    def lazy(self: Any, slot: int, write: int, pieces: Any) -> None:
        if pieces is not None or slot >= self._rows:
            admit(self, slot, write, pieces)

    patch.setattr(state.StateSlots, "admit", lazy)


def shifts_miss_by_one(patch: pytest.MonkeyPatch) -> None:
    rebuilt = attention_slots._rebuilt

    def wrong(part: mx.array, change: Any) -> mx.array:
        low = change.low + (1 if change.shift and change.high > change.low else 0)
        return rebuilt(part, replace(change, low=low))

    patch.setattr(attention_slots, "_rebuilt", wrong)


def packed_anew_when_moved(patch: pytest.MonkeyPatch) -> None:
    snapshot = attention_slots.AttentionSlots.snapshot

    def again(self: Any, slot: int, start: int, write: int) -> Any:
        pieces = snapshot(self, slot, start, write)
        codec = self._scheme.keys
        if not codec.is_packed or start == write:
            return pieces
        return (*codec.pack(codec.unpack(pieces[:3], mx.float32) * 1.001), *pieces[3:])

    patch.setattr(attention_slots.AttentionSlots, "snapshot", again)


def windows_are_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    def wide(self: SlotLayout) -> int:
        return 0 if self.window is None else max(0, self.write - self.window)

    patch.setattr(SlotLayout, "_horizon", property(wide))


def masks_show_a_column_more(patch: pytest.MonkeyPatch) -> None:
    masked = ColumnSpan._masked

    def wrong(self: ColumnSpan, first: int, last: int, low: int, window: int | None) -> Any:
        self._starts = [max(self.low, start - 1) for start in self._starts]
        return masked(self, first, last, low, window)

    patch.setattr(ColumnSpan, "_masked", wrong)


def run() -> None:
    kinds = [attention_kind("affine8", 40), state_kind(), attention_kind("affine8")]
    checked = CheckedSlots(kinds, 4)
    checked.join(5, 7, 2, 1)
    checked.leave(1)
    checked.join(0)  # while its neighbours go on
    checked.check()
    live(checked, random.Random(1), 20)


def test_without_a_fault_nothing_is_seen() -> None:
    """The history that the faults are planted in passes without one."""
    run()


@pytest.mark.parametrize(
    "plant",
    [
        rows_without_tokens_find_a_state,
        shifts_miss_by_one,
        packed_anew_when_moved,
        windows_are_one_too_wide,
        masks_show_a_column_more,
    ],
)
def test_faults_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong states, shifts, bits, windows and masks all end in an AssertionError."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()
