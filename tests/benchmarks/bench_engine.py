"""The engine against mlx-lm's BatchGenerator: same model, prompts, slots; alternating.

    python tests/benchmarks/bench_engine.py [--quick] [--workload mixed] [--json FILE]

Prints, for each workload, the median wall time of both sides, their ratio (above 1 the engine is
faster) and how many rows have equal greedy tokens; ``--baseline-best`` adds the baseline sorted by
length with its best ``prefill_batch_size``. Each side has a process of its own, which waits while
another runs. On CUDA the engine has its device prepared as a worker does: without CUDA graphs, and
with a thread that launches. mlx-lm launches as MLX does by default. Each run is told on standard
error when it has ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

BLAS = blas.load()
GRAPHS = "MLX_USE_CUDA_GRAPHS"
OURS, THEIRS = os.environ[GRAPHS], "1"  # after the import of batchkv; of MLX

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.models.cache import KVCache, make_prompt_cache  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from workloads import MODELS, WORKLOADS, Workload, build_model  # noqa: E402

from batchkv_worker.bench.batches import NoText  # noqa: E402
from batchkv_worker.engine.engine import Engine, EngineConfig  # noqa: E402
from batchkv_worker.events import Completed  # noqa: E402
from batchkv_worker.kv.backends.device import prepare_device  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from batchkv_worker.sequence import Generation, Sequence  # noqa: E402

Tokens = list[list[int]]
Run = tuple[float, Tokens, int]  # seconds, tokens of each row, peak bytes
Side = Callable[[Any, Workload], Run]
ENGINE = "engine"  # batchkv's side


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def run_engine(
    model: Any,
    workload: Workload,
    slots: int,
    scheme: str,
    chunk_tokens: int,
) -> Run:
    """(seconds, tokens of each row, peak bytes) of our engine."""
    loaded = LoadedModel(
        "bench",
        model,
        NoText(),
        model.lm_head.weight.dtype,
        discover("bench", model),
        8192,
        0,
        {},
    )
    config = EngineConfig(
        scheme=scheme,
        slots=slots,
        memory_bytes=16 * 2**30,
        chunk_tokens=chunk_tokens,
    )
    engine = Engine(loaded, config)
    mx.reset_peak_memory()
    begin = time.perf_counter()
    for index, (prompt, count) in enumerate(
        zip(workload.prompts, workload.max_tokens, strict=True)
    ):
        engine.submit_row(Sequence(str(index), prompt, Generation(count, temperature=0.0)))
    tokens: Tokens = [[] for _ in workload.prompts]
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Completed)
            tokens[int(event.job_id)] = list(event.token_ids)
    spent = time.perf_counter() - begin
    peak = mx.get_peak_memory()
    engine.close()
    return spent, tokens, peak


def run_baseline(
    model: Any,
    workload: Workload,
    slots: int,
    prefill_batch_size: int = 8,
    *,
    by_length: bool = False,
) -> Run:
    """The same of mlx-lm's BatchGenerator, in arrival order or sorted by prompt length."""
    order = list(range(len(workload.prompts)))
    if by_length:
        order.sort(key=lambda index: len(workload.prompts[index]))
    generator = BatchGenerator(
        model, completion_batch_size=slots, prefill_batch_size=prefill_batch_size
    )
    mx.reset_peak_memory()
    begin = time.perf_counter()
    ids = generator.insert(
        [workload.prompts[i] for i in order], [workload.max_tokens[i] for i in order]
    )
    place = dict(zip(ids, order, strict=True))
    tokens: Tokens = [[] for _ in workload.prompts]
    left = len(ids)
    while left:
        for response in generator.next_generated():
            tokens[place[response.uid]].append(response.token)
            left -= response.finish_reason is not None
    spent = time.perf_counter() - begin
    peak = mx.get_peak_memory()
    generator.close()
    return spent, tokens, peak


def run_floor(model: Any, workload: Workload, slots: int, chunk_tokens: int) -> Run:
    """The same of bare forward passes, for rows of equal lengths: what no engine can do without.

    Prompts without their last token in chunks, then steps of ``slots`` rows on mlx-lm's own caches,
    each started as soon as the one before it is built. Nothing joins, leaves, ends or is sampled
    but the likeliest token.
    """
    if len({*map(len, workload.prompts)}) > 1 or len({*workload.max_tokens}) > 1:
        raise SystemExit("the floor is of rows of equal lengths")
    length, count = len(workload.prompts[0]), workload.max_tokens[0]
    together = max(1, chunk_tokens // length)
    mx.reset_peak_memory()
    begin = time.perf_counter()
    tokens: Tokens = []
    for begun in range(0, len(workload.prompts), slots):
        wave = workload.prompts[begun : begun + slots]
        caches = []
        for low in range(0, len(wave), together):
            part = [prompt[:-1] for prompt in wave[low : low + together]]
            caches.append(make_prompt_cache(model))
            model(mx.array(part), cache=caches[-1])
            mx.async_eval([cache.state for cache in caches[-1]])
        cache = [_side_by_side(layers) for layers in zip(*caches, strict=True)]
        tokens_in = mx.array([prompt[-1] for prompt in wave])
        steps = []
        for _ in range(count):
            tokens_in = mx.argmax(model(tokens_in[:, None], cache=cache)[:, -1], axis=-1)
            mx.async_eval(tokens_in)
            steps.append(tokens_in)
        tokens += mx.stack(steps, axis=1).tolist()
    return time.perf_counter() - begin, tokens, mx.get_peak_memory()


def _side_by_side(caches: Sequence_[Any]) -> Any:
    """One cache of all the rows of some."""
    cache, used = KVCache(), caches[0].offset
    cache.keys = mx.concatenate([other.keys[..., :used, :] for other in caches], axis=0)
    cache.values = mx.concatenate([other.values[..., :used, :] for other in caches], axis=0)
    cache.offset = used
    return cache


def sides_of(args: argparse.Namespace) -> dict[str, Side]:
    """What is compared, by name: each runs a workload on a model."""
    slots = args.slots
    sides: dict[str, Side] = {
        ENGINE: lambda model, workload: run_engine(
            model, workload, slots, args.scheme, args.chunk_tokens
        ),
        "baseline": lambda model, workload: run_baseline(model, workload, slots),
    }
    if args.floor:
        sides["floor"] = lambda model, workload: run_floor(
            model, workload, slots, args.chunk_tokens
        )
    if args.baseline_best:
        for size in (8, 32):
            sides[f"baseline sorted, prefill {size}"] = lambda model, workload, size=size: (
                run_baseline(model, workload, slots, size, by_length=True)
            )
    return sides


def serve(name: str, args: argparse.Namespace, connection: Connection) -> None:
    """A process of one side: runs the workload that it is told, until it is told none."""
    if name == ENGINE:
        prepare_device(wired_limit=False)
    model = build_model(args.model, mx.bfloat16 if on_gpu() else mx.float32)
    run = sides_of(args)[name]
    while (workload := connection.recv()) is not None:
        end = time.perf_counter() + args.settle
        while time.perf_counter() < end:
            pass
        result = run(model, WORKLOADS[workload](args.jobs, random.Random(7)))
        mx.clear_cache()
        mx.synchronize()  # the device is free before the other side begins
        connection.send(result)


class Sides:
    """A process for each side, so that none meets what another left in heap, caches and device."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: dict[str, Connection] = {}
        for name in sides_of(args):
            ours, theirs = context.Pipe()
            # The engine launches as batchkv does, and the others as MLX does by default.
            os.environ[GRAPHS] = OURS if name == ENGINE else THEIRS
            context.Process(target=serve, args=(name, args, theirs), daemon=True).start()
            theirs.close()  # a process that dies is then read as an end of file
            self._ends[name] = ours
        os.environ[GRAPHS] = OURS

    def run(self, name: str, workload: str) -> Run:
        """One run of one side, the others waiting."""
        self._ends[name].send(workload)
        result: Run = self._ends[name].recv()
        return result

    def close(self) -> None:
        """End the processes."""
        for end in self._ends.values():
            end.send(None)


def compare(sides: Sides, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every side ``repeats`` times, alternating; medians and equality of the tokens."""
    workload = WORKLOADS[name](args.jobs, random.Random(7))
    times: dict[str, list[float]] = {side: [] for side in sides_of(args)}
    last: dict[str, Run] = {}
    for turn in range(args.repeats + args.warm_up):
        for side, spent in times.items():
            last[side] = sides.run(side, name)
            note = "" if turn >= args.warm_up else " (not counted)"
            print(f"  {name} {side}{last[side][0]:>9.2f} s{note}", file=sys.stderr, flush=True)
            if turn >= args.warm_up:
                spent.append(last[side][0])
    medians = {side: statistics.median(spent) for side, spent in times.items()}
    equal = sum(a == b for a, b in zip(last[ENGINE][1], last["baseline"][1], strict=True))
    return {
        "workload": name,
        "jobs": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "generated_tokens": workload.num_generated,
        "seconds": {side: round(value, 3) for side, value in medians.items()},
        "all_seconds": {side: [round(s, 3) for s in spent] for side, spent in times.items()},
        "ratio": {n: round(v / medians[ENGINE], 2) for n, v in medians.items() if n != ENGINE},
        "peak_mb": {side: round(run[2] / 1e6, 1) for side, run in last.items()},
        "rows_equal": equal,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--model", choices=list(MODELS), default="bench-3m")
    parser.add_argument("--jobs", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--scheme", default="float")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--warm-up", action="store_true", help="once without the clock: kernels compile then"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=0,
        metavar="SECONDS",
        help="keep a core busy before each run of either side: a host that waited for the device "
        "may be slow for seconds, which a worker at work never meets",
    )
    parser.add_argument(
        "--floor", action="store_true", help="bare forward passes too, for rows of equal lengths"
    )
    parser.add_argument("--baseline-best", action="store_true")
    parser.add_argument("--quick", action="store_true", help="48 jobs, once")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.jobs, args.repeats = 48, 1
    return args


def main() -> None:
    args = arguments()
    names = [args.workload]
    if args.workload == "all":  # the long one would take a CPU an hour
        names = [name for name in WORKLOADS if on_gpu() or name != "shared-long"]
    header = {
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "device": str(mx.default_device()),
        "platform": platform.platform(),
        "blas": BLAS,
        "model": args.model,
        "scheme": args.scheme,
        "slots": args.slots,
        "chunk_tokens": args.chunk_tokens,
        "repeats": args.repeats,
        "settle": args.settle,
        "baseline": "mlx_lm.generate.BatchGenerator, arrival order, prefill_batch_size 8",
    }
    print(json.dumps(header))
    rows, sides = [], Sides(args)
    for name in names:
        row = compare(sides, name, args)
        rows.append(row)
        print(
            f"{name:8} engine {row['seconds']['engine']:8.2f} s  baseline "
            f"{row['seconds']['baseline']:8.2f} s  ratio {row['ratio']['baseline']:5.2f}x  peak MB "
            f"{row['peak_mb']['engine']:.0f} / {row['peak_mb']['baseline']:.0f}  equal rows "
            f"{row['rows_equal']}/{row['jobs']}  {row['ratio'] if len(row['ratio']) > 1 else ''}",
            flush=True,
        )
    sides.close()
    if args.json:
        args.json.write_text(json.dumps({**header, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
