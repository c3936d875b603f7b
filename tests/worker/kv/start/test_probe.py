"""Which path decodes, and what a group of rows costs, from what a clock says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.attention import paths as attention
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.start import pathcheck, probe
from worker.kv.reference import BACKEND, HEADS, attention_kind, x86

SCHEME = attention_kind("affine8").scheme


def layer_of(backend: Backend) -> LayerAttention:
    return LayerAttention(backend, attention.in_slots(SCHEME, "folded"), mx.float32)


def choose() -> probe.Choice:
    return probe.choose(BACKEND, SCHEME, HEADS, mx.float32, num_rows=16)


def test_times_are_of_one_layer_and_a_groups_cost_is_in_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of 512 tokens more takes 8 ms: of the 2 ms of the short one, 1 is its start.

    What the host waits for a chain without layers is part of neither.
    """

    def least_times(runs: list[Any], repeats: int) -> list[float]:
        *layers, nothing = runs
        assert nothing().shape == (1,)
        columns = [run.func.__self__._columns for run in layers]
        lengths = [one.stop - one.start for one in columns]
        return [0.5 + 4 * (10.0 if length > 100 else 2.0) for length in lengths] + [0.5]

    monkeypatch.setattr(probe, "least_times", least_times)
    found = choose()
    assert found.long == dict.fromkeys(("fused", "folded", "packed"), 10.0)
    assert found.short == dict.fromkeys(("fused", "folded", "packed"), 2.0)
    assert found.group_cost == 16 * 512 // 8


def test_layers_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the one before: what a device does side by side is not what decode does."""
    asked: list[mx.array] = []
    attend = pathcheck.attend

    def noting(layer: Any, queries: mx.array, *rest: Any) -> mx.array:
        asked.append(queries)
        return attend(layer, queries, *rest)

    monkeypatch.setattr(pathcheck, "attend", noting)
    sample = probe._Sample(layer_of(BACKEND), HEADS, 2, 64)
    mx.eval(sample.run("folded"))
    assert len({id(queries) for queries in asked}) == 4
    assert all(mx.array_equal(queries, asked[0]).item() for queries in asked)


def test_masks_are_as_in_steps() -> None:
    """Rows are timed with bool masks, each from a first column of its own."""
    sample = probe._Sample(layer_of(x86()), HEADS, 4, 64)
    assert sample._mask.dtype == mx.bool_
    seen = sample._mask.sum(axis=-1).reshape(-1).tolist()
    assert seen == [64, 63, 62, 61]


def test_a_path_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without any there is no choice."""
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))
    attend, refused = pathcheck.attend, ["fused"]

    def picky(layer: LayerAttention, *rest: Any) -> mx.array:
        if layer.path in refused:
            raise ValueError("no kernel")
        return attend(layer, *rest)

    monkeypatch.setattr(pathcheck, "attend", picky)
    assert set(choose().long) == {"folded", "packed"}
    refused += ["folded", "packed"]
    with pytest.raises(RuntimeError, match="packed is refused"):
        choose()


@pytest.mark.parametrize(
    ("args", "heads"),
    [
        (SimpleNamespace(num_attention_heads=8), 8),
        (SimpleNamespace(num_attention_heads=[4, 8]), 4),
        (SimpleNamespace(text_config={"num_attention_heads": 6}), 6),
        (SimpleNamespace(text_config=SimpleNamespace(num_attention_heads=6)), 6),
        (SimpleNamespace(num_attention_heads=7), 2),  # no multiple of the layer's own
        (SimpleNamespace(text_config={}), 2),
        (None, 2),
    ],
)
def test_query_heads_stand_in_the_arguments_of_a_model_or_of_its_text_part(
    args: Any, heads: int
) -> None:
    assert attention.num_query_heads(SimpleNamespace(args=args), 2) == heads
