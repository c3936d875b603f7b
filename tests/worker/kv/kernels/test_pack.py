"""The kernel that packs a step gives the bits of the schemes; the one that unpacks gives them back.

On a CPU, whose rounding differs from other devices' at ties.
"""

from __future__ import annotations

import os
from itertools import cycle, product
from pathlib import Path

import mlx.core as mx
import pytest

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


@pytest.mark.parametrize(("keys", "values", "dtype", "size"), pairs(), ids=str)
def test_packing_gives_the_bits_of_the_scheme(
    keys: str, values: str, dtype: mx.Dtype, size: int, tmp_path: Path
) -> None:
    """Records of a step are those of the parts that the schemes pack; and back again."""
    case = Case(keys, values, dtype, size, size, 1, 0, False, 1, 1)
    kernels, scheme = case.kernels(CppLaunch(tmp_path)), case.scheme
    dense = hard_numbers(dtype, size)
    both = dense, (0.5 * dense[::-1]).astype(dtype)
    packed = scheme.keys.pack(both[0]), scheme.values.pack(both[1])
    stored = scheme.keys.rotate(both[0]), scheme.values.rotate(both[1])
    records = kernels.pack(*stored)
    assert mx.array_equal(records, case.layout.join(*packed))
    found = kernels.unpack(mx.concatenate([records] * 3, axis=2)[:-1, :, 1:])
    for part, other in zip((*packed[0], *packed[1]), (*found[0], *found[1]), strict=True):
        assert part.dtype == other.dtype
        assert mx.array_equal(mx.concatenate([part[:-1]] * 2, axis=2), other)
