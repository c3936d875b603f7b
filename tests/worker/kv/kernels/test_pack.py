"""The kernels that pack a step, and that place rows of a group, give the bits of the schemes.

On a CPU, whose rounding differs from other devices' at ties.
"""

from __future__ import annotations

import math
import os
from itertools import cycle, product
from pathlib import Path

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.slots.changes import Arrival, Arrivals
from worker.kv.kernels.cases import DTYPES, NAMES, SIZES, Case
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
IS_LONG = os.environ.get("BATCHKV_PARITY") == "all"


def pairs() -> list[tuple[str, str, mx.Dtype, int]]:
    """Each scheme with each dtype and size in the long form; each scheme once in the short one."""
    if IS_LONG:
        return [(name, name, *rest) for name, *rest in product(NAMES, DTYPES, SIZES)]
    sizes = cycle((128, 64, 96))
    keys, values = NAMES[::2], NAMES[1::2]
    return [*zip(keys, values, cycle(DTYPES), sizes, strict=False)]


def hard_numbers(dtype: mx.Dtype, size: int) -> mx.array:
    """Rows that quantization rounds in all of its ways: ties, zeros, one sign, large and small."""
    mx.random.seed(size)
    plain = mx.random.normal((6, 2, 1, size))
    steps = mx.round(8 * plain[:2]) / 4  # many ties and zeros
    spread = mx.exp(5 * mx.random.uniform(-1, 1, (2, 2, 1, 1)))
    rows = [plain, steps, mx.abs(plain[:2]) + 1, -mx.abs(plain[:2]) - 1, plain[:2] * spread]
    rows += [mx.zeros((1, 2, 1, size)), mx.full((1, 2, 1, size), -2.5)]
    return mx.concatenate(rows).astype(dtype)


@pytest.mark.few(3)
@pytest.mark.parametrize(("keys", "values", "dtype", "size"), pairs(), ids=str)
def test_packing_gives_the_bits_of_the_scheme(
    keys: str, values: str, dtype: mx.Dtype, size: int, tmp_path: Path
) -> None:
    """Records of a step are those of the parts that the schemes pack."""
    case = Case(keys, values, dtype, size, size, 1, 0, False, 1, 1)
    kernels, scheme = case.kernels(CppLaunch(tmp_path)), case.scheme
    dense = hard_numbers(dtype, size)
    both = dense, (0.5 * dense[::-1]).astype(dtype)
    packed = scheme.keys.pack(both[0]), scheme.values.pack(both[1])
    stored = scheme.keys.rotate(both[0]), scheme.values.rotate(both[1])
    records = kernels.pack(*stored)
    assert mx.array_equal(records, case.layout.join(*packed))


@pytest.mark.few(3)
@pytest.mark.parametrize(("keys", "values", "dtype", "size"), pairs(), ids=str)
def test_rows_of_a_group_are_placed_with_the_bits_of_the_scheme(
    keys: str, values: str, dtype: mx.Dtype, size: int, tmp_path: Path
) -> None:
    """Rows of unequal length, out of order, one empty; and all other columns are 0."""
    case = Case(keys, values, dtype, size, size, 1, 0, False, 1, 1)
    kernels, scheme = case.kernels(CppLaunch(tmp_path)), case.scheme
    mx.random.seed(size)
    both = [mx.random.normal((4, 2, 14, size)).astype(dtype) for _ in range(2)]
    packed = scheme.keys.pack(both[0]), scheme.values.pack(both[1])
    rows = [Arrival(0, 2, 13, 6), Arrival(1, 0, 7, 3), Arrival(5, 3, 3, 3), Arrival(6, 1, 8, 2)]
    for window, first in ((None, 2), (5, 0)):
        parts = [tuple(part[:, :, first:] for part in one) for one in packed]  # with gaps
        places = Arrivals(rows).places(write=10, window=window, first=first)
        given = mx.array([*places, (0, 0, 0, 0)], mx.int32)
        found = kernels.place_rows(given, *parts, 4, 12)
        assert mx.array_equal(found, PlainKernels(case.layout).place_rows(given, *parts, 4, 12))
        whole = case.layout.join(*packed)
        for line, row in zip(found, rows, strict=True):
            kept = row.length - row.shared if window is None else min(row.length, 4)
            own = whole[row.place, :, row.length - kept : row.length]
            assert mx.array_equal(line[:, 10 - kept : 10], own)
            assert not line[:, : 10 - kept].any() and not line[:, 10:].any()


def e2m1_on_gpu(number: float) -> int:
    """The nearest of the floats of 4 bits, of two as near the one with an even code."""
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    apart = [(abs(abs(number) - level), code % 2, code) for code, level in enumerate(levels)]
    return min(apart)[2] + 8 * (math.copysign(1.0, number) < 0)


def affine_on_gpu(numbers: list[float], bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and bias as MLX's sources for Metal say, in double precision."""
    low, high, bins = min(numbers), max(0.0, *numbers), 2**bits - 1
    scale = max((high - low) / bins, 1e-7)
    scale, edge = (scale, low) if abs(low) > abs(high) else (-scale, high)
    steps = math.floor(abs(edge / scale) + 0.5) * math.copysign(1.0, edge / scale)
    if not steps:
        return [0] * len(numbers), scale, 0.0
    scale = edge / steps
    found = [math.floor((number - edge) / scale + 0.5) for number in numbers]
    return [min(max(code, 0), bins) for code in found], scale, edge


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_packing_follows_the_rules_of_gpus_there(sign: float, tmp_path: Path) -> None:
    """Ties of floats go to even codes, zero keeps its sign, and groups of one sign begin at 0."""
    case = Case("mxfp4", "affine4/32", mx.float32, 64, 64, 1, 0, False, 1, 1)
    kernels = case.kernels(CppLaunch(tmp_path, as_on_gpu=True))
    floats = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.1, -0.0, 4.9, 0.0] + [0.3] * 20
    plain = [3.0 + 0.37 * number for number in range(32)]
    keys = [sign * number for number in floats] + [1.01 * number for number in floats]
    values = [sign * number for number in plain] + [0.0] * 32
    given = [mx.array(one).reshape(1, 1, 1, 64) for one in (keys, values)]
    both = [mx.concatenate([one, one], axis=1) for one in given]  # two KV heads
    (codes, scales), (words, steps, biases) = case.layout.split(kernels.pack(*both))
    assert scales[0, 0, 0].tolist() == [127, 128]  # 1.01 needs the next power of two
    found = [(word >> 4 * i) & 15 for word in codes[0, 0, 0].tolist() for i in range(8)]
    assert found == [e2m1_on_gpu(one) for one in keys[:32]] + [
        e2m1_on_gpu(one / 2) for one in keys[32:]
    ]
    found = [(word >> 4 * i) & 15 for word in words[0, 0, 0].tolist() for i in range(8)]
    wanted, step, bias = affine_on_gpu(values[:32], 4)
    assert found == wanted + [0] * 32
    assert steps[0, 0, 0].tolist() == pytest.approx([step, -1e-7])
    assert biases[0, 0, 0].tolist() == pytest.approx([bias, 0.0])
