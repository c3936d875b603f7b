"""The comparison can fail: each fault that is planted in the caches changes tokens.

Assumed of the engine, here and nowhere else in this folder: ``Engine._slots`` has ``layers`` (each
with ``arrays``, ``admit`` and, when it keeps tokens, ``offset``) and ``layouts.all`` by window, of
which each has ``write`` and ``window``; ``Engine.plan.kinds`` goes with the layers; arrays with a
time axis have it at -2, and rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.engine import Engine
from parity.harness import Cell, Ledger, Row, cell, drain, ragged_rows, step, submit
from parity.matrix import RUNS_ALL

Plant = Callable[[Engine], None]
KEYS: tuple[str, ...] = ("llama", "gemma3_text", "deepseek_v3")
STATES: tuple[str, ...] = ("qwen3_next", "falcon_h1", "mamba2")
if RUNS_ALL:
    KEYS += ("gpt_oss", "falcon_h1", "gemma4_text")
    STATES += ("rwkv7", "lfm2")


def _token_layers(running: Engine) -> Iterator[tuple[Any, Any]]:
    """Layers that keep tokens, with their layouts."""
    slots = running._slots
    for layer, kind in zip(slots.layers, running.plan.kinds, strict=True):
        if not kind.has_state:
            yield layer, slots.layouts.all[kind.window]


def nothing(running: Engine) -> None:
    """No fault: what the faults are measured against."""


def drop_a_column(running: Engine) -> None:
    """The token three before the last is lost in every layer that keeps tokens."""
    for layer, layout in _token_layers(running):
        for array in layer.arrays:
            array[..., layout.write - 3, :] = mx.zeros((), array.dtype)


def drop_a_column_of_one_layer(running: Engine) -> None:
    """The same in the last such layer alone."""
    layer, layout = list(_token_layers(running))[-1]
    for array in layer.arrays:
        array[..., layout.write - 3, :] = mx.zeros((), array.dtype)


def _shifted(kind: Any) -> Any:
    class Shifted(kind):  # type: ignore[misc]
        @property
        def offset(self) -> mx.array:
            return super().offset + 1

    return Shifted


def shift_offsets(running: Engine) -> None:
    """From now on every token stands one position too far."""
    for layer, _ in _token_layers(running):
        layer.__class__ = _shifted(type(layer))


def write_a_neighbours_row(running: Engine) -> None:
    """Slot 1 gets what slot 0 holds, in every layer."""
    for layer in running._slots.layers:
        for array in layer.arrays:
            array[1:2] = array[0:1]


def widen_windows(running: Engine) -> None:
    """Every window is one token wider than the model's."""
    for window, layout in running._slots.layouts.all.items():
        if window is not None:
            layout.window = window + 1


def _verdict(given: Cell, plant: Plant) -> None:
    """Three rows, the fault after five steps, and the suite's own comparison."""
    rows = {job_id: ragged_rows()[int(job_id)] for job_id in "247"}
    running = given.new_engine(3)
    ended: dict[str, Any] = {}
    for job_id, row in rows.items():
        submit(running, job_id, row)
    step(running, ended, count=5)
    plant(running)
    drain(running, ended)
    _compare(given, rows, ended)


def _compare(given: Cell, rows: dict[str, Row], ended: dict[str, Any]) -> None:
    """On a ledger of its own, so that a fault is not counted among the rows."""
    ledger = Ledger()
    for job_id, row in rows.items():
        given.compare_row(ledger, job_id, row, ended[job_id])


@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_without_a_fault_rows_are_equal(family: str) -> None:
    """The harness of these tests passes when nothing is planted."""
    _verdict(cell(family, "float"), nothing)


@pytest.mark.parametrize(
    "plant", [drop_a_column, drop_a_column_of_one_layer, shift_offsets, write_a_neighbours_row]
)
@pytest.mark.parametrize("family", KEYS)
def test_faults_in_layers_with_tokens_are_seen(family: str, plant: Plant) -> None:
    """A lost column, a wrong position and a neighbour's row all change tokens."""
    with pytest.raises(AssertionError, match="differs at"):
        _verdict(cell(family, "float"), plant)


@pytest.mark.parametrize("scheme", ["affine4", "turbo3"])
@pytest.mark.parametrize("plant", [drop_a_column, shift_offsets, write_a_neighbours_row])
def test_faults_in_packed_layers_are_seen(scheme: str, plant: Plant) -> None:
    """The wider bound of packed rows does not hide them either."""
    with pytest.raises(AssertionError, match="differs at"):
        _verdict(cell("qwen3", scheme), plant)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_wider_window_is_seen(family: str) -> None:
    """A window that is one token too wide changes tokens."""
    with pytest.raises(AssertionError, match="differs at"):
        _verdict(cell(family, "float"), widen_windows)


@pytest.mark.parametrize("family", STATES)
def test_a_neighbours_state_is_seen(family: str) -> None:
    """A state that another row wrote changes tokens."""
    with pytest.raises(AssertionError, match="differs at"):
        _verdict(cell(family, "float"), write_a_neighbours_row)


def _keep_what_the_slot_held(running: Engine) -> None:
    """A row without any token yet finds the state of the slot's last row."""
    for layer in running._slots.layers:
        admit = layer.admit

        def lazy(slot: int, write: int, pieces: Any, admit: Callable[..., None] = admit) -> None:
            if pieces is not None:
                admit(slot, write, pieces)

        layer.admit = lazy  # type: ignore[method-assign]


@pytest.mark.parametrize("family", STATES)
def test_a_state_that_is_not_zeroed_is_seen(family: str) -> None:
    """A prompt of one token after another row in the same slot; first without the fault."""
    given = cell(family, "float")
    first, single = ragged_rows()[2], ragged_rows()[0]
    for plant in (nothing, _keep_what_the_slot_held):
        running = given.new_engine(2)
        plant(running)
        # The third row waits for the slot of the first and takes it while a neighbour decodes.
        ended: dict[str, Any] = {}
        submit(running, "neighbour", Row(ragged_rows()[4].prompt, 28))
        submit(running, "first", Row(first.prompt, 6))
        step(running, ended, count=3)
        submit(running, "single", single)
        drain(running, ended)
        if plant is nothing:
            _compare(given, {"single": single}, ended)
            continue
        with pytest.raises(AssertionError, match="differs at"):
            _compare(given, {"single": single}, ended)
