"""The kernel that packs chunks gives the bits of the schemes, and the numbers that these give back.

On a CPU, whose rounding differs from other devices' at ties.
"""

from __future__ import annotations

import os
from itertools import cycle, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels import chunk
from batchkv_worker.kv.kernels.chunk import ChunkKernel
from batchkv_worker.kv.kernels.launch import View
from batchkv_worker.kv.types import PackedKV
from worker.kv.kernels.cases import DTYPES, Case
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler
from worker.kv.kernels.test_pack import hard_numbers

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

NAMES = ("affine8", "affine4", "affine3/32", "affine6", "affine5/32", "affine2/128", "affine4r/32")
SIZES = (128, 64, 256, 384)
IS_LONG = os.environ.get("BATCHKV_PARITY") == "all"


def pairs() -> list[tuple[str, str, mx.Dtype, int, int]]:
    """Each scheme with each dtype in the long form; each scheme once in the short one."""
    if IS_LONG:
        alike = [(name, name, *rest) for name, *rest in product(NAMES, DTYPES, (64, 128), (128,))]
        return [one for one in alike if one[0] != "affine2/128" or one[3] == 128]
    both = zip(NAMES, (NAMES[0], *NAMES[:0:-1]), cycle(DTYPES), strict=False)
    return [(*one, 128, size) for one, size in zip(both, cycle(SIZES[::2]), strict=False)]


def made(case: Case, folder: Path, **changes: Any) -> ChunkKernel:
    return ChunkKernel.of(case.layout, CppLaunch(folder, **changes))


def numbers(case: Case, rows: int, tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and other values; the first tokens are hard to round."""
    mx.random.seed(seed)
    found = []
    for size in (case.key_size, case.value_size):
        hard = hard_numbers(case.dtype, size)[: tokens * rows].reshape(rows, -1, 2, size)
        plain = mx.random.normal((rows, max(0, tokens - hard.shape[1]), 2, size))
        both = mx.concatenate([hard, plain.astype(case.dtype)], axis=1)[:, :tokens]
        found.append(mx.contiguous(both.swapaxes(1, 2)))
    return found[0], 0.5 * found[1][..., ::-1]


def same(found: PackedKV, wanted: PackedKV) -> bool:
    both = zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True)
    return all(one.dtype == other.dtype and mx.array_equal(one, other) for one, other in both)


def given_back(case: Case, packed: PackedKV) -> list[mx.array]:
    scheme = case.scheme
    both = zip((scheme.keys, scheme.values), packed, strict=True)
    return [tensor.unpack_stored(parts, case.dtype) for tensor, parts in both]


def stored(case: Case, both: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    return case.scheme.keys.rotate(both[0]), case.scheme.values.rotate(both[1])


@pytest.mark.few(3)
@pytest.mark.parametrize(("keys", "values", "dtype", "size", "value_size"), pairs(), ids=str)
def test_a_chunk_has_the_bits_of_the_scheme(
    keys: str, values: str, dtype: mx.Dtype, size: int, value_size: int, tmp_path: Path
) -> None:
    """Alone, and with the numbers that it gives back: behind a prefix, and with rows of zeros."""
    case = Case(keys, values, dtype, size, value_size, 1, 0, False, 1, 1)
    kernel, scheme = made(case, tmp_path), case.scheme
    both = numbers(case, 2, 9)
    wanted = scheme.keys.pack(both[0]), scheme.values.pack(both[1])
    assert same(kernel.pack(*stored(case, both)), wanted)
    dense = given_back(case, wanted)
    packed, found = kernel.pack_and_give(*stored(case, both), None, 4, 12)
    assert same(packed, wanted)
    for one, other in zip(found, dense, strict=True):
        assert one.dtype == dtype and one.shape == (4, 2, 12, other.shape[-1])
        assert mx.array_equal(one[:2, :, :9], other)
        assert not one[2:].any() and not one[:, :, 9:].any()
    before = numbers(case, 1, 7, seed=1)
    prefix = scheme.keys.pack(before[0]), scheme.values.pack(before[1])
    packed, found = kernel.pack_and_give(*stored(case, both), prefix, 3, 9)
    assert same(packed, wanted)
    for one, other, old in zip(found, dense, given_back(case, prefix), strict=True):
        assert mx.array_equal(one[:2, :, :7], mx.broadcast_to(old, (2, *old.shape[1:])))
        assert mx.array_equal(one[:2, :, 7:], other) and not one[2:].any()
    each = numbers(case, 2, 7, seed=2)
    prefix = scheme.keys.pack(each[0]), scheme.values.pack(each[1])
    packed, found = kernel.pack_and_give(*stored(case, both), prefix, 3, 9)
    assert same(packed, wanted)
    for one, other, old in zip(found, dense, given_back(case, prefix), strict=True):
        assert mx.array_equal(one[:2], mx.concatenate([old, other], axis=2)) and not one[2:].any()


def test_arrays_that_do_not_lie_in_one_piece(tmp_path: Path) -> None:
    """Values as a view of a product, keys with gaps, a prefix cut from a longer one."""
    case = Case("affine8", "affine4", mx.bfloat16, 64, 128, 1, 0, False, 1, 1)
    kernel, scheme = made(case, tmp_path), case.scheme
    mx.random.seed(3)
    product_of_all = mx.random.normal((2, 5, 64 + 2 * 128)).astype(mx.bfloat16)
    values = product_of_all[..., 64:].reshape(2, 5, 2, 128).swapaxes(1, 2)
    view = View(values, product_of_all, 64, (5 * 320, 128, 320, 1))
    keys = mx.random.normal((2, 2, 10, 64)).astype(mx.bfloat16)[:, :, ::2]
    wanted = scheme.keys.pack(keys), scheme.values.pack(values)
    assert same(kernel.pack(keys, view), wanted)
    assert same(kernel.pack(keys, values), wanted)
    before = numbers(case, 1, 12, seed=4)
    longer = case.layout.join(scheme.keys.pack(before[0]), scheme.values.pack(before[1]))
    prefix = case.layout.split(longer[:, :, 2:9])
    packed, found = kernel.pack_and_give(keys, view, prefix, 2, 5)
    assert same(packed, wanted)
    for one, other in zip(found, given_back(case, prefix), strict=True):
        assert mx.array_equal(one[1:, :, :7], other)


FAULTS = (
    ("token < tokens", "token < tokens - FAULT(0)"),
    ("token >= 0 &&", "token >= FAULT(1) &&"),
    ("row < keys_shape[0] && token >=", "row < keys_shape[0] + FAULT(2) && token >="),
    ("row * int64_t(values_strides[0])", "row * int64_t(values_strides[0]) * !FAULT(3)"),
    ("token * int64_t(values_strides[2])", "token * int64_t(values_strides[2 - FAULT(4)])"),
    ("const int64_t value_groups = vector", "const int64_t value_groups = (vector ^ FAULT(5))"),
    ("] = packed.bias", "] = FAULT(6) ? packed.scale : packed.bias"),
    ("biases[group * bias_step]", "biases[group * (FAULT(7) ? 1 : bias_step)]"),
    ("scales[group * scale_step]", "scales[FAULT(8) ? 0 : group * scale_step]"),
    ("8 * (first % 4)", "8 * ((first + FAULT(9)) % 4)"),
    ("GROUP_Z * int64_t(strides[2])", "GROUP_Z * int64_t(strides[2]) * !FAULT(10)"),
    ("head * int64_t(strides[1])", "head * int64_t(strides[1]) * !FAULT(11)"),
    ("+ head) * GROUPS_Z", "+ head) * (GROUPS_Z - FAULT(12))"),
    ("token < 0 && is_used && is_key", "token < -FAULT(13) && is_used && is_key"),
    ("GROUP_X * HEADS + THREAD_X / SPAN", "GROUP_X * HEADS * !FAULT(14) + THREAD_X / SPAN"),
    ("THREAD_X % SPAN - KEY_LANES", "THREAD_X % SPAN - KEY_LANES + FAULT(15)"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunk")


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_a_planted_fault_is_seen(fault: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails for each of these."""
    monkeypatch.setattr(chunk, "_MOST_THREADS", 32)  # one head in each threadgroup
    case = Case("affine3/32", "affine3/32", mx.bfloat16, 128, 128, 1, 0, False, 1, 1)
    kernel, scheme = made(case, folder, faults=FAULTS, fault=fault), case.scheme
    both, before = numbers(case, 2, 9), numbers(case, 1, 12, seed=1)
    wanted = scheme.keys.pack(both[0]), scheme.values.pack(both[1])
    longer = case.layout.join(scheme.keys.pack(before[0]), scheme.values.pack(before[1]))
    prefix = case.layout.split(longer[:, :, 2:9])
    dense = [
        mx.concatenate([mx.broadcast_to(old, (2, *old.shape[1:])), new], axis=2)
        for old, new in zip(given_back(case, prefix), given_back(case, wanted), strict=True)
    ]

    def is_right(kernel: ChunkKernel) -> bool:
        try:
            packed, found = kernel.pack_and_give(*both, prefix, 3, 9)
        except AssertionError:  # out of bounds
            return False
        numbers_match = all(
            mx.array_equal(one[:2], other) and not one[2:].any()
            for one, other in zip(found, dense, strict=True)
        )
        return same(packed, wanted) and numbers_match

    assert is_right(made(case, folder, faults=FAULTS))
    assert not is_right(kernel)


@pytest.mark.few(6)
@pytest.mark.parametrize("kv_heads", [1, 3, 4, 10])
@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("affine8", "affine8"), (64, 64)),
        (("affine8/32", "affine8/32"), (96, 96)),
        (("affine8/32", "affine8/32"), (192, 128)),
        (("affine8", "affine4"), (64, 128)),
    ],
)
def test_heads_share_threadgroups(
    names: tuple[str, str], sizes: tuple[int, int], kv_heads: int, folder: Path
) -> None:
    """Several heads in a simdgroup, one, and one in several; numbers read one by one, too."""
    case = Case(*names, mx.float16, *sizes, 1, 0, False, 1, 1)
    mx.random.seed(kv_heads)
    both = [mx.random.normal((2, kv_heads, 3, size)).astype(mx.float16) for size in sizes]
    packers = case.scheme.keys, case.scheme.values
    wanted = [packer.pack(one) for packer, one in zip(packers, both, strict=True)]
    for faults in ((), (("READS_WIDE", "0"),)):
        kernel = made(case, folder, faults=faults, fault=0 if faults else None)
        packed, found = kernel.pack_and_give(*both, None, 2, 4)
        assert same(packed, (wanted[0], wanted[1]))
        for one, other in zip(found, given_back(case, packed), strict=True):
            assert mx.array_equal(one[:, :, :3], other) and not one[:, :, 3:].any()


def test_one_kernel_serves_layers_with_other_heads(folder: Path) -> None:
    case = Case("affine8", "affine8", mx.float16, 64, 64, 1, 0, False, 1, 1)
    kernel = made(case, folder)
    for kv_heads in (3, 4):
        both = [mx.random.normal((1, kv_heads, 2, 64)).astype(mx.float16) for _ in range(2)]
        wanted = case.scheme.keys.pack(both[0]), case.scheme.values.pack(both[1])
        assert same(kernel.pack(*both), wanted)


def test_other_schemes_have_no_such_kernel(tmp_path: Path) -> None:
    """Floats, turbo and small floats are packed by MLX."""
    for name in ("float", "turbo4", "mxfp8", "nvfp4"):
        with pytest.raises(ValueError, match="no kernel packs chunks"):
            made(Case(name, "affine8", mx.float32, 64, 64, 1, 0, False, 1, 1), tmp_path)
