"""KV schemes against float: cost of decode attention, bytes, and peak memory of a long prompt.

    python tests/benchmarks/bench_kv.py [--quick] [--only decode|bytes|prefill] [--json FILE]

``decode``   one layer's attention (8 query heads, 2 KV heads of 128) by every path that the backend
             takes, each in turns with float's fastest one; the best path's ratio to affine4's
``bytes``    live bytes of the decode slots after prompts went through the engine, float16
``prefill``  peak memory beyond the weights of one long prompt: in prefill, and in the whole run

float32 on a CPU, bfloat16 elsewhere (``bytes`` is always float16). A path that a backend refuses is
shown as refused. The last line of each part names the targets that were missed, if any.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from batchkv_worker.kv.backends import blas

BLAS = blas.load()

import mlx.core as mx  # noqa: E402
from mlx_lm.models import llama  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from bench_engine import NoText  # noqa: E402

from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.kv.attention.paths import (  # noqa: E402
    LayerAttention,
    attend,
    in_slots,
    paths_of,
)
from batchkv_worker.kv.attention.paths import Path as AttentionPath  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.kv.schemes.names import TensorNames  # noqa: E402
from batchkv_worker.kv.schemes.packing import LayerShape, fit_layer  # noqa: E402
from batchkv_worker.kv.start.backend import choose_backend  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from batchkv_worker.sequence import Generation, Sequence  # noqa: E402

SCHEMES = ("float", "affine8", "mxfp8", "k8v4", "affine4", "affine4r", "affine3", "nvfp4",
           "turbo4", "turbo3.5", "turbo3")  # fmt: skip
TURBO_TO_AFFINE4 = 1.3  # times of attention, at most
_QUERY_HEADS = 8
_SHAPE = LayerShape(2, 128, 128)
_SPARE = 64  # columns of the buffers that are not read
_SAMPLE_SECONDS = 0.03
BYTES_TO_FLOAT = {"affine8": 0.54, "mxfp8": 0.54, "k8v4": 0.415, "affine4": 0.29, "nvfp4": 0.29,
                  "turbo4": 0.29, "turbo3.5": 0.26, "turbo3": 0.22}  # fmt: skip
CHUNK_TOKENS = 256
PEAK_TO_FLOAT = dict.fromkeys(("affine8", "mxfp8", "affine4", "turbo4", "turbo3"), 1.1)

# -- one layer's decode attention, by every path that the backend takes


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


# -- through the engine


def small_model(dtype: mx.Dtype, *, layers: int, context: int) -> LoadedModel:
    """A llama whose weights are small beside its keys and values; random, always the same."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=layers,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        vocab_size=256,
        tie_word_embeddings=False,
        max_position_embeddings=context,
    )
    mx.random.seed(0)
    model = llama.Model(args)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    tree = discover("bench", model)
    return LoadedModel("bench", model, NoText(), dtype, tree, context, 0, {})


def submit(engine: Engine, prompts: list[int], max_tokens: int) -> None:
    """Rows of random tokens with prompts of these lengths."""
    rng = random.Random(3)
    for index, length in enumerate(prompts):
        prompt = [rng.randrange(256) for _ in range(length)]
        engine.submit_row(Sequence(str(index), prompt, Generation(max_tokens, temperature=0.0)))


def live_bytes(loaded: LoadedModel, scheme: str, prompts: list[int]) -> int:
    """Bytes of the decode slots' buffers once all prompts decode."""
    # Any path will do, and a given one need not be found by measurement.
    config = EngineConfig(scheme=scheme, slots=len(prompts), prefix_bytes=0, path="folded")
    engine = Engine(loaded, config)
    submit(engine, prompts, max_tokens=8)
    found = 0
    while not engine.is_idle:
        engine.step()
        found = max(found, engine.kv_bytes)
    engine.close()
    return found


def prefill_peaks(loaded: LoadedModel, scheme: str, tokens: int) -> tuple[int, int]:
    """Most bytes in use beyond what was there before: in prefill alone, and in the whole run.

    Once its prompt is computed a row is copied into its slot, and is there twice for a moment.
    """
    config = EngineConfig(
        scheme=scheme, slots=1, chunk_tokens=CHUNK_TOKENS, prefix_bytes=0, path="folded"
    )
    engine = Engine(loaded, config)
    submit(engine, [tokens + 2], max_tokens=2)  # the first step ends before the last chunk
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prefill = 0
    while not engine.is_idle:
        engine.step()
        mx.synchronize()
        if not engine.kv_bytes:
            prefill = mx.get_peak_memory() - before
    whole = mx.get_peak_memory() - before
    engine.close()
    return prefill, whole


def against_float(found: dict[str, int], limits: dict[str, float]) -> dict[str, Any]:
    """Bytes by scheme, their ratio to float's, and the limits that they miss."""
    ratios = {name: round(value / found["float"], 4) for name, value in found.items()}
    missed = [
        f"{name} {ratios[name]:.3f}x of float, over {limit}x"
        for name, limit in limits.items()
        if ratios[name] > limit
    ]
    return {"bytes": found, "to_float": ratios, "missed": missed}


def show_bytes(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}\n{'scheme':10}{'MB':>10}{'to float':>10}")
    for name, value in result["bytes"].items():
        print(f"{name:10}{value / 1e6:>10.2f}{result['to_float'][name]:>9.3f}x", flush=True)


# -- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "bytes", "prefill"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the prefill part")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, a shorter prompt")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.prompt_tokens = 3, 2048
    return args


def main() -> None:
    args = arguments()
    dtype = mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32
    document: dict[str, Any] = {
        "mlx": mx.__version__,
        "device": str(mx.default_device()),
        "platform": platform.platform(),
        "blas": BLAS,
        "dtype": str(dtype),
        "repeats": args.repeats,
    }
    print(json.dumps(document))
    missed: list[str] = []
    if args.only in (None, "decode"):
        sizes = [(1, 512), (8, 512)] if args.quick else [
            (rows, tokens) for tokens in (512, 4096) for rows in (1, 8, 32)
        ]  # fmt: skip
        document["decode"] = []
        for rows, tokens in sizes:
            document["decode"].append(decode_cost(rows, tokens, dtype, args.repeats))
            show_decode(document["decode"][-1])
            missed += document["decode"][-1]["missed"]
    if args.only in (None, "bytes"):
        half = small_model(mx.float16, layers=4, context=1024)
        prompts = [40, 100, 170, 200] if args.quick else [200, 350, 500, 700] * 2
        found = {name: live_bytes(half, name, prompts) for name in ("float", *BYTES_TO_FLOAT)}
        document["bytes"] = result = against_float(found, BYTES_TO_FLOAT)
        show_bytes(f"live bytes of the slots, {len(prompts)} rows, float16", result)
        missed += result["missed"]
    if args.only in (None, "prefill"):
        count = args.prompt_tokens
        long = small_model(dtype, layers=16, context=count + 64)
        peaks = {name: prefill_peaks(long, name, count) for name in ("float", *PEAK_TO_FLOAT)}
        for index, part in enumerate(("prefill", "run")):
            found = {name: peak[index] for name, peak in peaks.items()}
            document[part] = result = against_float(found, PEAK_TO_FLOAT)
            show_bytes(f"peak memory, {count:,} tokens through 16 layers: {part}", result)
            missed += [f"{part}: {text}" for text in result["missed"]]
    print("\ntargets missed: " + ("; ".join(missed) or "none"))
    if args.json:
        args.json.write_text(json.dumps({**document, "missed": missed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
