"""The kernel of residual sums and norms gives what MLX's operations give."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.residual import ResidualKernel
from worker.kv.kernels.cases import DTYPES
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

# The norms differ by the order of additions alone: by two units in the last place at most.
TOLERANCES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 8e-3}
EPSILON = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("residual")


def given(dtype: mx.Dtype, size: int, rows: int = 2, tokens: int = 3) -> list[mx.array]:
    mx.random.seed(size)
    arrays = [3 * mx.random.normal((rows, tokens, size)) for _ in range(2)]
    arrays[0][0, 0] = 0
    arrays[1][0, 0] = 0  # a sum of zeros, for which epsilon tells
    return [*(one.astype(dtype) for one in arrays), mx.random.normal((size,)).astype(dtype)]


def is_right(kernel: ResidualKernel, x: mx.array, added: mx.array, weights: mx.array) -> bool:
    sums, normed = kernel(x, added, weights, EPSILON)
    wanted = mx.fast.rms_norm(x + added, weights, EPSILON)
    apart = mx.abs(normed.astype(mx.float32) - wanted.astype(mx.float32))
    share = (apart / mx.maximum(mx.abs(wanted.astype(mx.float32)), 1)).max().item()
    same = sums.dtype == normed.dtype == x.dtype and bool(mx.array_equal(sums, x + added))
    return same and share <= TOLERANCES[x.dtype]


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 64, 255, 256, 257, 2560])
def test_sums_are_equal_and_norms_nearly(size: int, dtype: mx.Dtype, folder: Path) -> None:
    """Sizes around those of a threadgroup; one token is all zeros."""
    assert is_right(ResidualKernel(CppLaunch(folder)), *given(dtype, size))


def test_inputs_may_have_gaps(folder: Path) -> None:
    """They are read with their strides."""
    x, added, weights = given(mx.float32, 128, 3, 4)
    both = mx.concatenate([x, added], axis=-1)
    wide = mx.concatenate([added, x], axis=1)[:, ::2]
    kernel = ResidualKernel(CppLaunch(folder))
    assert is_right(kernel, both[..., :64], both[..., 64:128], weights[:64])
    assert is_right(kernel, both[..., 1:65], both[..., 66:130], weights[3:67])  # within words
    assert is_right(kernel, x, wide, weights)


@pytest.mark.parametrize("size", [2560, 16_384])
def test_one_by_one_they_are_the_same(size: int, folder: Path) -> None:
    """Where a dialect does not read words of several numbers."""
    arrays = given(mx.float16, size)
    faults = (("READS_WIDE", "0"),)
    narrow = ResidualKernel(CppLaunch(folder, faults, 0))
    assert is_right(narrow, *arrays) and is_right(ResidualKernel(CppLaunch(folder)), *arrays)


FAULTS = (
    ("one.at[j] + other.at[j]", "(FAULT(0) ? 0.0f : one.at[j]) + other.at[j]"),
    ("token * int64_t(added_strides[1])", "token * int64_t(added_strides[1]) * !FAULT(1)"),
    ("row * int64_t(x_strides[0])", "row * int64_t(x_strides[0]) * !FAULT(2)"),
    ("all += squares[i]", "all += squares[FAULT(3) ? 0 : i]"),
    ("lane > 0", "lane > FAULT(4)"),
    ("all / SIZE", "all / (SIZE + 8 * FAULT(5))"),
    ("read_eight<T>(weights + place, 1)", "read_eight<T>(weights + place * !FAULT(6), 1)"),
    ("AS_FLOAT(EPSILON)", "(FAULT(7) ? 0.0f : AS_FLOAT(EPSILON))"),
    ("numbers[i * 8 + j] = sum.at[j]", "numbers[i * 8 + j] = FAULT(8) ? 0.5f : sum.at[j]"),
    ("float(x[x_at", "FAULT(9) ? 0.0f : float(x[x_at"),
    ("float(weights[place])", "float(weights[FAULT(10) ? 0 : place])"),
    ("numbers[i] = float(sum)", "numbers[i] = FAULT(11) ? 0.5f : float(sum)"),
    ("step == 1 && IS_ALIGNED(from, 16)", "(step == 1 || FAULT(12)) && IS_ALIGNED(from, 16)"),
)


@pytest.mark.parametrize("fault", [None, *range(len(FAULTS))])
def test_a_planted_fault_is_seen(fault: int | None, folder: Path) -> None:
    """And without one, the same text is right."""
    kernel = ResidualKernel(CppLaunch(folder, faults=FAULTS, fault=fault))
    x, added, weights = given(mx.float32, 320)
    wide = mx.concatenate([added, added], axis=-1).reshape(2, 3, 320, 2)[..., 0]
    ways = [(x, added, weights), given(mx.float32, 301), (x, wide, weights)]
    assert all(is_right(kernel, *way) for way in ways) is (fault is None)
