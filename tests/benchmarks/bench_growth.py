"""How time grows: of a decode step with rows and with context, of a prompt with its length.

    python tests/benchmarks/bench_growth.py [--quick] [--model bench-600m] [--out DIR] [--json FILE]

The engine and mlx-lm's BatchGenerator, same process, model and sizes, in turn; random prompts that
share nothing. On CUDA both launch as batchkv does, without CUDA graphs.

For each curve the growth exponent is fitted (time ~ size^exponent; 1 is linear), of all sizes and
of the largest two. ``answer`` follows one long answer step by step, in groups of 32
steps: what growing and shifting the slots' buffers costs would stand out in the slowest steps. Each
curve becomes an SVG in --out (default bench-results). Works on any device of MLX; sizes by option.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

BLAS = blas.load()

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from bench_engine import NoText  # noqa: E402
from charts.svg import write_chart  # noqa: E402
from workloads import MODELS, VOCABULARY, build_model  # noqa: E402

from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from batchkv_worker.sequence import Generation  # noqa: E402
from batchkv_worker.sequence import Sequence as Row  # noqa: E402

ROOT = Path(__file__).parents[2]
CONTEXT = 1 << 20  # no limit of the benchmark's
WARM_STEPS = 4
GROUP_STEPS = 32
Curve = dict[int, float]  # milliseconds by size


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


class Sides:
    """Both engines over one model.

    A side yields once when it is ready to begin, then after each step from the one on at which all
    rows decode.
    """

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self._model, self._args = model, args
        dtype, caches = model.lm_head.weight.dtype, discover("bench", model)
        self._loaded = LoadedModel("bench", model, NoText(), dtype, caches, CONTEXT, 0, {})
        self.by_name = {"engine": self.engine, "baseline": self.baseline}

    def engine(self, prompts: Sequence[list[int]], count: int) -> Generator[None, None, None]:
        """Ours."""
        args = self._args
        config = EngineConfig(
            scheme=args.scheme,
            slots=len(prompts),
            memory_bytes=args.memory_gib * 2**30,
            chunk_tokens=args.chunk_tokens,
        )
        engine = Engine(self._loaded, config)
        rows = [
            Row(str(index), prompt, Generation(count, temperature=0.0))
            for index, prompt in enumerate(prompts)
        ]
        yield
        for row in rows:
            engine.submit_row(row)
        try:
            while not engine.is_idle:
                engine.step()
                if all(row.generated for row in rows):
                    yield
        finally:
            engine.close()

    def baseline(self, prompts: Sequence[list[int]], count: int) -> Generator[None, None, None]:
        """mlx-lm's, all rows in one batch."""
        generator = BatchGenerator(self._model, completion_batch_size=len(prompts))
        yield
        generator.insert(list(prompts), [count] * len(prompts))
        decoding: set[int] = set()
        left = len(prompts)
        try:
            while left:
                for response in generator.next_generated():
                    decoding.add(response.uid)
                    left -= response.finish_reason is not None
                if len(decoding) == len(prompts):
                    yield
        finally:
            generator.close()


Side = Callable[[Sequence[list[int]], int], Generator[None, None, None]]


def step_times(side: Side, prompts: Sequence[list[int]], num_steps: int) -> list[float]:
    """Milliseconds of each decode step of all rows, the first few left out."""
    # Rows that were admitted first are ahead of the others: enough tokens for all.
    moments = side(prompts, num_steps + WARM_STEPS + 8 * len(prompts))
    times: list[float] = []
    for _ in range(1 + WARM_STEPS):
        next(moments)
    for _ in range(num_steps):
        begin = time.perf_counter()
        next(moments)
        times.append((time.perf_counter() - begin) * 1e3)
    moments.close()
    mx.clear_cache()
    return times


def quartile(times: Sequence[float]) -> float:
    """A quarter of the steps were quicker: others may use the machine."""
    return statistics.quantiles(times, n=4)[0]


def first_token_time(side: Side, length: int, seed: int) -> float:
    """Milliseconds from one prompt to its first token."""
    moments = side(random_prompts(1, length, seed), 2)
    next(moments)
    begin = time.perf_counter()
    next(moments)
    milliseconds = (time.perf_counter() - begin) * 1e3
    moments.close()
    mx.clear_cache()
    return milliseconds


def curves(
    sides: Sides, sizes: Sequence[int], repeats: int, measure: Callable[[Side, int], float]
) -> dict[str, Curve]:
    """Of each side the best at each size, for others may use the machine; both in turn."""
    found: dict[str, Curve] = {name: {} for name in sides.by_name}
    for size in sizes:
        samples: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(repeats):
            for name, side in sides.by_name.items():
                samples[name].append(measure(side, size))
        for name, values in samples.items():
            found[name][size] = round(min(values), 3)
        told = "  ".join(f"{name} {curve[size]:>10.2f} ms" for name, curve in found.items())
        print(f"{size:>8,}  {told}", flush=True)
    return found


def exponent(curve: Curve) -> float:
    """Of time ~ size^exponent, by least squares in logarithms."""
    points = [(math.log(size), math.log(value)) for size, value in curve.items()]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def told_growth(found: dict[str, Curve]) -> dict[str, dict[str, float]]:
    """Exponents of all sizes, and of the largest two."""
    return {
        name: {
            "exponent": round(exponent(curve), 2),
            "at_the_end": round(exponent(dict(list(curve.items())[-2:])), 2),
        }
        for name, curve in found.items()
    }


def long_answer(sides: Sides, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one long answer in groups: median and slowest of each."""
    prompts = random_prompts(args.fixed_rows, 256, 5)
    found: dict[str, Any] = {}
    for name, side in sides.by_name.items():
        times = step_times(side, prompts, args.answer_steps)
        groups = [times[n : n + GROUP_STEPS] for n in range(0, len(times), GROUP_STEPS)]
        found[name] = {
            "median_ms": [round(statistics.median(group), 3) for group in groups],
            "slowest_ms": [round(max(group), 3) for group in groups],
            "slowest_over_median": round(max(times) / statistics.median(times), 2),
        }
        print(
            f"{name:<10} median {statistics.median(times):8.2f} ms, last group "
            f"{found[name]['median_ms'][-1]:8.2f} ms, slowest step {max(times):8.2f} ms",
            flush=True,
        )
    return found


def measure_all(sides: Sides, args: argparse.Namespace) -> dict[str, Any]:
    """Three curves, and one long answer."""

    def by_rows(side: Side, rows: int) -> float:
        prompts = random_prompts(rows, args.fixed_context, rows)
        return quartile(step_times(side, prompts, args.steps))

    def by_context(side: Side, context: int) -> float:
        prompts = random_prompts(args.fixed_rows, context, context)
        return quartile(step_times(side, prompts, args.steps))

    def by_length(side: Side, length: int) -> float:
        return first_token_time(side, length, length)

    plans: dict[str, tuple[str, Sequence[int], Callable[[Side, int], float]]] = {
        "rows": (f"decode step, {args.fixed_context} tokens of context, by rows",
                 args.rows, by_rows),
        "context": (f"decode step, {args.fixed_rows} rows, by tokens of context",
                    args.contexts, by_context),
        "prefill": ("one prompt to its first token, by tokens", args.prompts, by_length),
    }  # fmt: skip
    results: dict[str, Any] = {}
    for name, (title, sizes, measure) in plans.items():
        print(title, flush=True)
        measure(sides.engine, sizes[0])  # kernels are compiled before the clock runs
        measure(sides.baseline, sizes[0])
        found = curves(sides, sizes, args.repeats, measure)
        growth = told_growth(found)
        results[name] = {"curves": found, "growth": growth}
        for side, told in growth.items():
            print(f"{side:<10} grows as size^{told['exponent']:.2f}, at the end "
                  f"^{told['at_the_end']:.2f}", flush=True)  # fmt: skip
        lines = {side: list(curve.items()) for side, curve in found.items()}
        path = args.out / f"growth-{name}.svg"
        write_chart(path, title, name, "milliseconds", lines, logs=True)
    print(f"a long answer, {args.fixed_rows} rows", flush=True)
    results["answer"] = answer = long_answer(sides, args)
    lines = {
        f"{side}, {kind}": [(n * GROUP_STEPS, value) for n, value in enumerate(found[f"{kind}_ms"])]
        for side, found in answer.items()
        for kind in ("median", "slowest")
    }
    title = f"steps of a long answer, {args.fixed_rows} rows"
    path = args.out / "growth-answer.svg"
    write_chart(path, title, "tokens generated", "milliseconds", lines, logs=False)
    return results


def powers(low: int, high: int) -> list[int]:
    return [2**n for n in range(low.bit_length() - 1, high.bit_length())]


def sizes(text: str) -> list[int]:
    return sorted(int(item) for item in text.split(","))


def arguments(is_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    most = 16_384 if is_gpu else 4_096
    parser.add_argument("--model", choices=MODELS, default="bench-600m" if is_gpu else "bench-3m")
    parser.add_argument("--scheme", default="float")
    parser.add_argument("--rows", type=sizes, default=powers(1, 128 if is_gpu else 64))
    parser.add_argument("--contexts", type=sizes, default=powers(256, most))
    parser.add_argument("--prompts", type=sizes, default=powers(256, most))
    parser.add_argument("--fixed-rows", type=int, default=8, help="where context is varied")
    parser.add_argument("--fixed-context", type=int, default=512, help="where rows are")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a sample")
    parser.add_argument("--answer-steps", type=int, default=1_024)
    parser.add_argument("--chunk-tokens", type=int, default=2_048 if is_gpu else 512)
    parser.add_argument("--memory-gib", type=int, default=64 if is_gpu else 8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, once")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.contexts, args.prompts = [1, 4, 16], [256, 1_024], [256, 1_024]
        args.steps, args.answer_steps, args.repeats = 8, 128, 1
    return args


def main() -> None:
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    args = arguments(is_gpu)
    args.out.mkdir(parents=True, exist_ok=True)
    header = {
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "device": str(mx.default_device()),
        "blas": BLAS,
        "model": args.model,
        "scheme": args.scheme,
        "chunk_tokens": args.chunk_tokens,
        "repeats": args.repeats,
    }
    print(json.dumps(header))
    model = build_model(args.model, mx.bfloat16 if is_gpu else mx.float32)
    results = measure_all(Sides(model, args), args)
    if args.json:
        args.json.write_text(json.dumps({**header, **results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
