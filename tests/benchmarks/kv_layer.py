"""One layer's decode attention under KV schemes, by every path that the backend takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention, attend, in_slots, paths_of
from batchkv_worker.kv.attention.paths import Path as AttentionPath
from batchkv_worker.kv.schemes.names import TensorNames
from batchkv_worker.kv.schemes.packing import LayerShape, fit_layer
from batchkv_worker.kv.start.backend import choose_backend

SCHEMES = ("float", "affine8", "mxfp8", "k8v4", "affine4", "affine4r", "affine3", "nvfp4",
           "turbo4", "turbo3.5", "turbo3")  # fmt: skip
TURBO_TO_AFFINE4 = 1.3  # times of attention, at most
_QUERY_HEADS = 8
_SHAPE = LayerShape(2, 128, 128)
_SPARE = 64  # columns of the buffers that are not read
_SAMPLE_SECONDS = 0.03


class Layer:
    """Keys and values of one layer as slots keep them for a path, and a query for each row.

    Slots read columns of a longer buffer, which some paths have to copy.
    """

    def __init__(
        self, scheme: str, path: AttentionPath, rows: int, tokens: int, dtype: mx.Dtype
    ) -> None:
        backend = choose_backend()
        kept = in_slots(fit_layer(TensorNames.parse(scheme), _SHAPE), path)
        self._layer = LayerAttention(backend, kept, dtype, path)
        mx.random.seed(0)
        keys, values = (
            mx.random.normal((rows, _SHAPE.num_heads, tokens + _SPARE, 128)).astype(dtype)
            for _ in range(2)
        )
        self._queries = mx.random.normal((rows, _QUERY_HEADS, 1, 128)).astype(dtype)
        self._packed = kept.keys.pack(keys), kept.values.pack(values)
        # Rows of unequal length, as they mostly are.
        self._mask = mx.arange(tokens) >= mx.arange(rows).reshape(-1, 1, 1, 1)
        mx.eval(self._queries, self._packed, self._mask)

    def run(self) -> None:
        mx.eval(
            attend(
                self._layer,
                self._queries,
                *(tuple(part[..., _SPARE:, :] for part in side) for side in self._packed),
                128**-0.5,
                self._mask,
            )
        )


def accepts(layer: Layer) -> str | None:
    """None when the backend takes the path, else what it says. It compiles kernels too."""
    try:
        layer.run()
    except (ValueError, RuntimeError) as fault:
        return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:100]
    return None


def in_turns(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each side, one sample of each after the other."""
    counts = {}
    for name, side in sides.items():
        counts[name] = max(1, min(200, round(_SAMPLE_SECONDS / max(_seconds(side, 1), 1e-6))))
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            spent[name].append(1e3 * _seconds(side, counts[name]) / counts[name])
    return {name: statistics.median(times) for name, times in spent.items()}


def _seconds(side: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        side()
    return time.perf_counter() - begin


def decode_cost(rows: int, tokens: int, dtype: mx.Dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by scheme and path; the best path of each against float's and affine4's best."""
    sides: dict[str, Callable[[], None]] = {}
    refused: dict[str, str] = {}
    for name in SCHEMES:
        for path in paths_of(fit_layer(TensorNames.parse(name), _SHAPE)):
            layer = Layer(name, path, rows, tokens, dtype)
            # Slots grow by fewer columns than some kernels take at once.
            said = accepts(layer) or accepts(Layer(name, path, rows, tokens + _SPARE, dtype))
            if said is None:
                sides[f"{name} {path}"] = layer.run
            else:
                refused[f"{name} {path}"] = said
    times = in_turns(sides, repeats)
    best = {
        name: min(found)
        for name in SCHEMES
        if (found := [spent for side, spent in times.items() if side.split()[0] == name])
    }
    missed = [
        f"{name} {best[name] / best['affine4']:.2f}x of affine4 at {rows} x {tokens}"
        for name in best
        if name.startswith("turbo") and best[name] > TURBO_TO_AFFINE4 * best["affine4"]
    ]
    mx.clear_cache()
    return {
        "rows": rows,
        "tokens": tokens,
        "milliseconds": {side: round(spent, 4) for side, spent in times.items()},
        "refused": refused,
        "to_float": {name: round(spent / best["float"], 3) for name, spent in best.items()},
        "to_affine4": {name: round(spent / best["affine4"], 3) for name, spent in best.items()},
        "missed": missed,
    }


def show_decode(result: dict[str, Any]) -> None:
    paths = get_args(AttentionPath)
    print(f"\n{result['rows']} rows of {result['tokens']:,} tokens, milliseconds of one layer")
    print(f"{'scheme':10}" + "".join(f"{path:>14}" for path in paths) + f"{'to float':>10}"
          f"{'to affine4':>12}")  # fmt: skip
    for name in SCHEMES:
        cells = []
        for path in paths:
            spent = result["milliseconds"].get(f"{name} {path}")
            none = "refused" if f"{name} {path}" in result["refused"] else "-"
            cells.append(f"{none if spent is None else f'{spent:.3f}':>14}")
        ratios = (result[key].get(name) for key in ("to_float", "to_affine4"))
        shown = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        print(f"{name:10}{''.join(cells)}{shown[0]:>10}{shown[1]:>12}", flush=True)
