"""From how many saved cells on a prefix is held once: measured at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.kv.attention.paths import LayerAttention, Path, in_slots
from batchkv_worker.kv.backends.timing import Way, least_times
from batchkv_worker.kv.start import pathcheck, prefix_cost
from batchkv_worker.kv.start.prefix_cost import LEAST, LONG, MOST, SHORT, UNMEASURED, crossover
from support import tiny_models
from worker.kv.reference import BACKEND, HEADS, attention_kind


def layer_of(name: str, path: Path) -> LayerAttention:
    """As slots have it."""
    scheme = in_slots(attention_kind(name).scheme, path)
    return LayerAttention(BACKEND, scheme, mx.float32, path)


@pytest.mark.parametrize(
    ("short", "long", "cost"),
    [
        (-1.0, 1.0, 4000),  # half way between 1,000 and 7,000
        (-0.1, 1.1, 1500),
        (0.5, 6.5, 500),  # even the few pay
        (2.0, 4.0, LEAST),
        (-5.0, -4.0, MOST),  # never within what a clock shows: memory is saved all the same
        (-1.0, -1.0, MOST),
        (1.0, 0.5, MOST),  # noise
    ],
)
def test_the_gain_grows_in_a_line(short: float, long: float, cost: int) -> None:
    assert crossover(1000, short, 7000, long) == cost


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("float", "fused"),
        ("float", "folded"),
        ("affine8", "packed"),
        ("mxfp8", "folded"),
        ("turbo3.5", "spread-folded"),
    ],
)
def test_a_measurement_is_within_its_bounds(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of codec, as slots keep it, for few rows and for many; nothing is refused."""
    spent: list[float | None] = []

    def timed(runs: Sequence[Way]) -> list[float | None]:
        mx.eval([run() for run in runs])  # which raises what is taken for a refusal else
        found = least_times(runs)
        spent.extend(found)
        return found

    monkeypatch.setattr(prefix_cost, "least_times", timed)
    layer = layer_of(name, path)
    for rows in (1, 16):
        cost = prefix_cost.measure(layer, 3 * HEADS, num_rows=rows)
        assert LEAST <= cost <= MOST
    assert len(spent) == 8 and None not in spent


def test_what_a_prefix_saves_is_what_lines_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that are timed: a short and a long prefix in each line, and as a shared prefix."""
    asked: list[Any] = []
    attend = prefix_cost.shared_prefix.attend
    monkeypatch.setattr(
        prefix_cost.shared_prefix, "attend", lambda *how: (asked.append(how), attend(*how))[1]
    )

    def timed(runs: Sequence[Way]) -> list[float | None]:
        found, tokens = [], []
        for run in runs:
            asked.clear()
            mx.eval(run())
            found.append(bool(asked))
            tokens += [how[2][0][0][0].shape[-2] for how in asked]
        assert (found, tokens) == ([False, True, False, True], [SHORT, LONG])
        return [1.0, 2.0, 12.0, 9.0]  # the short one costs 1 ms, the long one saves 3

    monkeypatch.setattr(prefix_cost, "least_times", timed)
    found = prefix_cost.measure(layer_of("float", "folded"), HEADS, num_rows=5)
    assert found == 4 * (SHORT + (LONG - SHORT) // 4)


def test_what_is_measured_is_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine asks its own layers once, unless it is told; a path that is given measures none."""
    asked: list[int] = []
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))

    def measure(*_: object, num_rows: int) -> int:
        asked.append(num_rows)
        return 5000

    monkeypatch.setattr(prefix_cost, "measure", measure)
    loaded = tiny_models.loaded(tiny_models.build("llama"))
    found = [
        Engine(loaded, EngineConfig(scheme="affine8", slots=4, memory_bytes=2**28, **changes))
        for changes in ({}, {"prefix_cells": 900}, {"path": "fused"}, {"prefix_cells": 0})
    ]
    assert [engine._scheduler._prefix_costs.first for engine in found] == [5000, 900, UNMEASURED, 0]
    assert asked == [4]


def test_a_backend_that_refuses_leaves_the_old_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that four rows have."""
    monkeypatch.setattr(prefix_cost, "least_times", lambda runs: [1.0, None])
    layer = layer_of("affine8", "fused")
    assert prefix_cost.measure(layer, HEADS, num_rows=8) == UNMEASURED
