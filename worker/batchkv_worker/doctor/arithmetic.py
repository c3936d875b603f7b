"""Whether the device computes what Python computes: products, quantization, sorting, sums.

A broken kernel raises no error: it is fast and wrong. So each operation that the engine uses is
compared with exact arithmetic on the host. Inputs are small whole numbers where that makes the
right answer exact in any order of additions, also where float32 products keep 10 bits (TF32).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import mlx.core as mx

Matrix = list[list[float]]

# (rows, inner, columns): one row, a few, both sides of the 32 at which Metal changes kernels, tails
# of 64 columns, and sums long enough to be split.
PRODUCTS = ((1, 64, 64), (4, 1100, 65), (17, 576, 33), (32, 256, 64), (33, 256, 63), (1, 4200, 40))
# (columns, rows) of products with packed numbers.
PACKED = ((64, (1, 33)), (100, (4, 33)), (1100, (1, 4)))
FEW_ROWS = 7  # for which MLX has such a product in its library on CUDA, with keys
LONG_SORT = 151_936  # as many as Qwen3's vocabulary has tokens
TOP = 64


@dataclass(frozen=True, slots=True)
class Compared:
    """One operation: its largest error, as a share of the largest number, and what is allowed."""

    name: str
    error: float
    tolerance: float
    fault: str = ""  # what the device raised

    @property
    def is_good(self) -> bool:
        """Whether it agrees. No number is never equal."""
        return not self.fault and self.error <= self.tolerance


def product(left: Matrix, right: Matrix) -> Matrix:
    """The exact product of two matrices of whole numbers."""
    columns = list(zip(*right, strict=True))
    return [[sum(map(mul, row, column)) for column in columns] for row in left]


def largest_error(found: Sequence[Sequence[float]], expected: Matrix) -> float:
    """The largest difference over the largest number; infinite for no number or another shape."""
    if [len(row) for row in found] != [len(row) for row in expected]:
        return math.inf
    scale = max((abs(value) for row in expected for value in row), default=0.0) or 1.0
    worst = 0.0
    for row, other in zip(found, expected, strict=True):
        for a, b in zip(row, other, strict=True):
            difference = abs(a - b)
            if difference != difference:
                return math.inf
            worst = max(worst, difference)
    return worst / scale


def whole_numbers(rng: random.Random, rows: int, columns: int, limit: int = 3) -> Matrix:
    """A matrix of small whole numbers, which every float format has."""
    return [[float(rng.randint(-limit, limit)) for _ in range(columns)] for _ in range(rows)]


def compare_products(dtype: mx.Dtype, seed: int = 7) -> list[Compared]:
    """Matrix products of all shapes in one dtype; float32 must be exact."""
    rng = random.Random(seed)
    tolerance = {mx.float32: 0.0, mx.float16: 2e-3}.get(dtype, 1.6e-2)
    found = []
    for rows, inner, columns in PRODUCTS:
        left, right = whole_numbers(rng, rows, inner), whole_numbers(rng, inner, columns)
        name = f"product of {rows} x {inner} x {columns} in {_short(dtype)}"
        out = mx.matmul(mx.array(left, dtype), mx.array(right, dtype)).astype(mx.float32)
        found.append(Compared(name, largest_error(out.tolist(), product(left, right)), tolerance))
    return found


def compare_quantized(bits: int, seed: int = 11, *, compiles: bool = False) -> list[Compared]:
    """Quantize and back, and products with packed numbers: with keys, and with values.

    ``compiles``: without the products that MLX compiles first on CUDA, for 23 s each and more.
    """
    rng = random.Random(seed)
    size, group = 128, 64
    steps = 2**bits - 1
    found = []
    for columns, counts in PACKED:
        # Numbers that quantization keeps exactly: each group has its smallest and its largest.
        stored = [_group_row(rng, size, group, steps) for _ in range(columns)]
        packed = mx.quantize(mx.array(stored), group_size=group, bits=bits)
        back = mx.dequantize(*packed, group_size=group, bits=bits).astype(mx.float32)
        name = f"{bits} bits, {columns} columns"
        error = largest_error(back.tolist(), stored)
        found.append(Compared(f"quantize and back, {name}", error, 1e-2))
        for rows in counts:
            if compiles and rows > FEW_ROWS:
                continue
            queries, weights = whole_numbers(rng, rows, size), whole_numbers(rng, rows, columns, 1)
            turned = [list(row) for row in zip(*stored, strict=True)]
            found.append(_packed(f"keys, {rows} rows, {name}", queries, packed, True, bits,
                                 product(queries, turned)))  # fmt: skip
            if not compiles:
                found.append(_packed(f"values, {rows} rows, {name}", weights, packed, False, bits,
                                     product(weights, stored)))  # fmt: skip
    return found


def _packed(
    name: str,
    left: Matrix,
    packed: Sequence[mx.array],
    is_transposed: bool,
    bits: int,
    expected: Matrix,
) -> Compared:
    """A product that reads packed numbers. A device that lacks the kernel says so: no fault."""
    try:
        out = mx.quantized_matmul(
            mx.array(left), *packed, transpose=is_transposed, group_size=64, bits=bits
        )
        values = out.astype(mx.float32).tolist()
    except (RuntimeError, ValueError):
        return Compared(name, 0.0, 0.0)
    return Compared(name, largest_error(values, expected), 1e-2)


def _group_row(rng: random.Random, size: int, group: int, steps: int) -> list[float]:
    """Whole numbers from 0 to ``steps``, both of which each group has."""
    row = [float(rng.randint(0, steps)) for _ in range(size)]
    for start in range(0, size, group):
        first, last = rng.sample(range(start, start + group), 2)
        row[first], row[last] = 0.0, float(steps)
    return row


def compare_sorting(seed: int = 13) -> list[Compared]:
    """The order of a vocabulary's logits: sort, the best few, the best one, running sums."""
    rng = random.Random(seed)
    # Eighths, so that many are equal and sums are exact.
    values = [rng.randint(-400, 400) / 8 for _ in range(LONG_SORT)]
    device = mx.array(values)
    order = mx.argsort(-device).tolist()
    best = mx.argpartition(-device, kth=TOP - 1)[:TOP].tolist()
    expected = sorted(values, reverse=True)
    counts = [float(rng.randint(0, 1)) for _ in range(LONG_SORT)]
    sums, total = [], 0.0
    for count in counts:
        total += count
        sums.append(total)
    running = mx.cumsum(mx.array(counts)).tolist()
    picked = sorted((values[place] for place in best), reverse=True)
    return [
        Compared("sort", _unequal([values[place] for place in order], expected), 0.0),
        Compared("each place once", float(len(set(order)) != LONG_SORT), 0.0),
        Compared(f"best {TOP}", _unequal(picked, expected[:TOP]), 0.0),
        Compared("best one", float(values[int(mx.argmax(device).item())] != expected[0]), 0.0),
        Compared("running sums", largest_error([running], [sums]), 1e-6),
    ]


def _unequal(found: Sequence[float], expected: Sequence[float]) -> float:
    """Share of places that differ."""
    pairs = zip(found, expected, strict=True)
    return sum(a != b for a, b in pairs) / max(1, len(expected))


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
