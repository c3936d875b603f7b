# ruff: noqa: T201  (a helper that talks to a terminal)
"""Decode attention of one layer, chained: MLX's ways, and the kernels over records.

    python tests/worker/kv/kernels/bench_gpu.py [--quick] [--build] [--rows N] [--layers N]
    MLX_ENABLE_TF32=0 python tests/worker/kv/kernels/bench_gpu.py --check 40 [--processes N]

The shape is that of Qwen3-4B: 8 KV heads of 128 numbers, 4 query heads each, bfloat16. Each layer
has keys and values of its own, and its output is the next layer's query. All rows have the same
number of columns. ``float`` is MLX's attention over dense keys and values; ``mlx`` unpacks whole
buffers before it; ``kernel`` and ``matrices`` are the two forms of ``kv/kernels``, with as many
launches as decode has. Each chain is compiled, as steps are that the engine replays; ``--build``
builds it anew each time. Several chains are started one after the other, so that the host works
while the device does. Figures are medians of runs in turns, in microseconds a layer, with the rate
at which packed bytes are read, and the share of ``float``'s time.

``--check N`` measures nothing: attention of a covering set of layers and of N random ones, with
rows of many lengths, prefixes and sinks, is compared with that of float32, as in the suite.
On CUDA it needs ``MLX_ENABLE_TF32=0``, or the other side rounds. Most of its time goes to compiling
on the host, so ``--processes`` divides the layers among that many, each with compiled kernels of
its own.

It needs a GPU. ``--emulate`` runs the kernels as C++ on a CPU instead, to try the program itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[3]))

from batchkv_worker.kv.backends import device, mlx_kernels
from batchkv_worker.kv.kernels.compiled_launch import launch_for
from batchkv_worker.kv.kernels.decode import DecodeKernels
from batchkv_worker.kv.kernels.launch import Launch, metal_launch
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerShape, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from worker.kv.kernels.cases import Sample, covering, drawn, has_matrices
from worker.kv.kernels.cpp_launch import CppLaunch

SHAPE = LayerShape(8, 128, 128)
LINES = 4
SCALE = 128**-0.5
DTYPE = mx.bfloat16
SCHEMES = ("float", "affine8", "affine4", "turbo4", "turbo3")
COLUMNS = (512, 4096)
REPEATS = 9
CHAINS = 12
Attend = Callable[[mx.array, int], mx.array]  # queries and the layer's number


@dataclass(frozen=True, slots=True)
class Figure:
    """One way for one scheme. ``apart`` is its largest difference from MLX's way."""

    columns: int
    scheme: str
    way: str
    microseconds: float
    share_of_float: float
    gigabytes_per_second: float
    apart: float

    def __str__(self) -> str:
        return (
            f"{self.columns:6,} {self.scheme:8} {self.way:9} {self.microseconds:9.1f} us "
            f"{self.share_of_float:5.2f}x {self.gigabytes_per_second:7,.0f} GB/s "
            f"{self.apart:.1e} apart"
        )


def ways_of(name: str, rows: int, columns: int, layers: int, launch: Launch) -> dict[str, Attend]:
    """The ways to attend in layers of a scheme, each over copies of the same records."""
    scheme = fit_model(SchemeSpec.parse(name), [SHAPE])[0]
    layout = RecordLayout.of(scheme, DTYPE)
    dense = [mx.random.normal((rows, 8, columns, 128)).astype(DTYPE) for _ in range(2)]
    one = layout.pack(*dense)
    records = [one + mx.zeros((1,), mx.uint32) for _ in range(layers)]
    split = [layout.split(layer) for layer in records]
    parts = [
        tuple(tuple(map(mx.contiguous, tensor)) for tensor in (keys, values))
        for keys, values in split
    ]
    bounds = mx.array([[0, columns]] * max(rows, 8), mx.int32)
    mx.eval(records, parts, bounds)

    def by_mlx(queries: mx.array, layer: int) -> mx.array:
        keys, values = (
            tensor.unpack_stored(stored, DTYPE)
            for tensor, stored in zip((scheme.keys, scheme.values), parts[layer], strict=True)
        )
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)

    counts = device.kind() != "metal"  # as the engine has it
    found: dict[str, Attend] = {"float" if name == "float" else "mlx": by_mlx}
    for way, matrices in (("kernel", False), ("matrices", True)):
        try:
            kernels = DecodeKernels.of(layout, LINES, launch, matrices=matrices, counts=counts)
            found[way] = lambda queries, layer, kernels=kernels: kernels.attend(
                queries, records[layer], bounds, columns, SCALE
            )
            mx.eval(found[way](mx.zeros((rows, 32, 1, 128), DTYPE), 0))
        except (ValueError, RuntimeError) as fault:
            print(f"{name} {way}: {fault}", flush=True)
            found.pop(way, None)
    return found


def chain_of(attend: Attend, layers: int, *, replays: bool) -> Callable[[mx.array], mx.array]:
    """One layer after the other, as a graph that is traced once, or built at each call."""

    def chain(queries: mx.array) -> mx.array:
        for layer in range(layers):
            queries = attend(queries, layer)
        return queries

    return mx.compile(chain) if replays else chain


def measure(
    name: str, rows: int, columns: int, layers: int, launch: Launch, floats: float, replays: bool
) -> list[Figure]:
    """All ways of a scheme; ``floats`` are the microseconds of MLX's dense attention."""
    ways = ways_of(name, rows, columns, layers, launch)
    chains = {way: chain_of(attend, layers, replays=replays) for way, attend in ways.items()}
    queries = mx.random.normal((rows, 32, 1, 128)).astype(DTYPE)
    mx.eval(queries)
    spent: dict[str, list[float]] = {way: [] for way in ways}
    first = {way: attend(queries, 0).astype(mx.float32) for way, attend in ways.items()}
    wanted = next(iter(first.values()))
    for turn in range(REPEATS + 1):
        for way, chain in chains.items():
            begin, out = time.perf_counter(), queries
            for _ in range(CHAINS):
                out = chain(out)
                mx.async_eval(out)
            mx.eval(out)
            if turn:  # the first one compiles
                spent[way].append((time.perf_counter() - begin) / CHAINS / layers * 1e6)
    scheme = fit_model(SchemeSpec.parse(name), [SHAPE])[0]
    num_bytes = RecordLayout.of(scheme, DTYPE).words * 4 * rows * 8 * columns
    found = []
    for way, times in spent.items():
        middle = statistics.median(times)
        floats = floats or middle
        apart = mx.abs(first[way] - wanted).max().item()
        figure = columns, name, way, middle, middle / floats, num_bytes / middle / 1e3, apart
        found.append(Figure(*figure))
        print(found[-1], flush=True)
    return found


def samples(count: int) -> Iterator[tuple[Sample, bool]]:
    """Covering and random layers, each for the kernels, and for products of matrices if any are."""
    for case in covering():
        sample = Sample.of(case)
        yield sample, False
        if has_matrices(case):
            yield sample, True
    for seed in range(count):
        yield from drawn(seed)


def check(part: int, parts: int, count: int, *, emulates: bool) -> tuple[int, int]:
    """Compare every ``parts``-th layer from ``part`` on; prints what is wrong.

    On CUDA and on a CPU also by products of matrices, and in every second layer with counted
    threadgroups. Returns the numbers of layers that were compared and that were wrong.
    """
    has_both = device.kind() != "metal"
    compared = faults = 0
    with tempfile.TemporaryDirectory() as folder:
        if parts > 1:
            os.environ[mlx_kernels.VARIABLE] = folder  # processes must not write the same files
        launch = CppLaunch(Path(folder)) if emulates else launch_of(device.kind())
        found = (one for one in samples(count) if has_both or not one[1])
        for index, (sample, matrices) in enumerate(found):
            if index % parts != part:
                continue
            compared += 1
            try:
                sample.check(launch, matrices=matrices, counts=has_both and index % 2 == 1)
            except (AssertionError, ValueError, RuntimeError) as fault:
                faults += 1
                print(f"{'matrices' if matrices else 'kernel'} {sample.case}: {fault}", flush=True)
            if compared % 20 == 0:
                print(f"process {part}: {compared} compared so far", flush=True)
    return compared, faults


def check_all(count: int, processes: int, *, emulates: bool) -> int:
    """Compare all layers in ``processes`` processes; returns how many were wrong."""
    if processes == 1:
        compared, faults = check(0, 1, count, emulates=emulates)
    else:
        part = partial(check, parts=processes, count=count, emulates=emulates)
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        with pool:
            compared, faults = map(sum, zip(*pool.map(part, range(processes)), strict=True))
    print(f"{compared} compared, {faults} wrong", flush=True)
    return faults


def launch_of(kind: str) -> Launch:
    """As the engine has it."""
    return metal_launch if kind == "metal" else launch_for(None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Decode attention of one layer, chained.")
    parser.add_argument("--quick", action="store_true", help="512 columns and 4 layers")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--build", action="store_true", help="build the chain anew each time")
    parser.add_argument("--emulate", action="store_true", help="on a CPU, to try the program")
    parser.add_argument("--check", type=int, metavar="N", help="compare N random layers instead")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="for --check")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    kind = device.kind()
    if kind == "cpu" and not given.emulate:
        print("the kernels need a GPU: --emulate tries the program on a CPU")
        return 0
    if given.check is not None:
        return int(check_all(given.check, given.processes, emulates=given.emulate) > 0)
    rows, layers, lengths = given.rows, given.layers, COLUMNS
    if given.quick or given.emulate:
        rows, layers, lengths = min(rows, 2 if given.emulate else 32), min(layers, 4), COLUMNS[:1]
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        launch = CppLaunch(Path(folder)) if given.emulate else launch_of(kind)
        for columns in lengths:
            floats = 0.0
            for name in SCHEMES:
                replays = not (given.build or given.emulate)
                found += measure(name, rows, columns, layers, launch, floats, replays)
                floats = next(one for one in found if one.columns == columns).microseconds
                mx.clear_cache()
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
