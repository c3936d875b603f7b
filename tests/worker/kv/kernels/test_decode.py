"""The kernels' bodies, compiled for a CPU, compute what float32 does.

The suite tries a few cases and faults, ``make parity`` a covering set and random ones.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels import decode
from batchkv_worker.kv.kernels.decode import Partials
from worker.kv.kernels.cases import (
    LENGTHS,
    SCALE,
    Case,
    Sample,
    compare,
    covering,
    drawn,
    has_matrices,
)
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
IS_LONG = os.environ.get("BATCHKV_PARITY") == "all"

CASES = [
    Case("affine8", "affine8", mx.bfloat16, 128, 128, 4, 0, False, 5, 1),
    Case("turbo3", "affine4", mx.float16, 128, 64, 7, 2, True, 3, 2),
    Case("float", "float", mx.float16, 80, 80, 3, 0, True, 2, 3),
    Case("nvfp4", "mxfp8", mx.float32, 96, 96, 2, 1, False, 4, 4),
    Case("affine5/32", "turbo4", mx.bfloat16, 64, 256, 16, 0, False, 2, 5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled, each once."""
    return tmp_path_factory.mktemp("kernels")


MATRICES = [
    Case("affine8", "affine8", mx.bfloat16, 128, 128, 4, 0, False, 5, 1),
    Case("turbo3", "affine4", mx.float16, 128, 64, 7, 2, True, 3, 2),
    Case("float", "affine5/32", mx.bfloat16, 80, 96, 12, 1, False, 2, 3),
    Case("affine4", "float", mx.bfloat16, 64, 80, 12, 0, False, 2, 11),
    Case("turbo4", "turbo4", mx.float16, 256, 256, 3, 0, False, 2, 12),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [*CASES, *(covering() if IS_LONG else ())], ids=str)
def test_attention_is_that_of_float32(case: Case, folder: Path) -> None:
    """With rows of any length in slices of buffers, shared prefixes and sinks."""
    Sample.of(case).check(CppLaunch(folder))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case", [*MATRICES, *(filter(has_matrices, covering(1)) if IS_LONG else ())], ids=str
)
def test_products_of_matrices_give_the_same(case: Case, folder: Path) -> None:
    """The form for CUDA, whose threads share matrices."""
    Sample.of(case).check(CppLaunch(folder), matrices=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("length", [40, 1100])
def test_each_scale_of_scores_has_kernels_of_its_own(
    length: int, matrices: bool, folder: Path
) -> None:
    """The scale is a constant of a kernel, and one layer may be asked with two."""
    sample = Sample.of(replace(CASES[0], rows=1), (length,))
    kernels = sample.case.kernels(CppLaunch(folder), matrices=matrices)
    given = sample.records, sample.bounds, sample.longest
    for scale in (SCALE, 2 * SCALE, SCALE):
        found = kernels.attend(sample.queries, *given, scale, sample.sinks, sample.partials)
        score, alone = kernels.attend_alone(sample.queries, *given, scale)
        half = replace(sample, queries=sample.queries * (scale / SCALE))
        compare(found, half.wanted(), (scale, length))
        wanted = kernels.attend_alone(half.queries, *given, SCALE)
        compare(score, wanted[0], "log-sum-exps", 1e-5)
        compare(alone, wanted[1].astype(mx.float32), "alone")


def test_layers_without_products_of_matrices(folder: Path) -> None:
    """They are refused in words: small floats, and float32."""
    for case in (replace(CASES[0], dtype=mx.float32), replace(CASES[0], keys="mxfp8")):
        with pytest.raises(ValueError, match="no products of matrices for"):
            case.kernels(CppLaunch(folder), matrices=True)


@pytest.mark.parametrize("matrices", [False, True])
def test_every_length_around_a_border(matrices: bool, folder: Path) -> None:
    """Each of the lengths at which a loop ends one column earlier or later."""
    case, launch = CASES[0], CppLaunch(folder)
    for length in (*LENGTHS, *((1023, 1024, 1025, 1300) if matrices else ())):
        sample = Sample.of(replace(case, rows=1, seed=length), (length,))
        sample.check(launch, matrices=matrices)


def test_scores_may_grow_by_more_than_halves_hold(folder: Path) -> None:
    """The zero of the exponents moves, and with it all that was added up before."""
    case = replace(CASES[0], rows=2)
    sample = Sample.of(case, (1100, 333))
    replace(sample, queries=sample.queries * 6).check(CppLaunch(folder), matrices=True)


def test_values_may_be_tiny_and_their_first_one_zero(folder: Path) -> None:
    """Weights in half precision are scaled by powers of two, which depend on all columns."""
    case = replace(CASES[0], dtype=mx.float16, rows=1)
    scheme, kernels = case.scheme, case.kernels(CppLaunch(folder), matrices=True)
    keys = mx.random.normal((1, 2, 40, 128)).astype(mx.float16)
    values = 1e-3 * keys[..., ::-1] * (mx.arange(40) > 0)[:, None]
    packed = scheme.keys.pack(keys), scheme.values.pack(values.astype(mx.float16))
    queries, bounds = mx.ones((1, 8, 1, 128), mx.float16), mx.array([[0, 40]] * 4, mx.int32)
    found = kernels.attend(queries, case.layout.join(*packed), bounds, 40, SCALE)
    sample = Sample(case, queries, queries, packed, bounds, None, None)
    compare(1e3 * found.astype(mx.float32), 1e3 * sample.wanted(), case, 2e-3)


def given(case: Case, keys: mx.array, values: mx.array, queries: mx.array) -> Sample:
    """One row with these keys and values ``[1, 2, columns, size]``."""
    packed = case.scheme.keys.pack(keys), case.scheme.values.pack(values)
    bounds = mx.array([[0, keys.shape[2]]] * 4, mx.int32)
    records = case.layout.join(*packed)
    return Sample(case, queries, records, packed, bounds, None, None)


@pytest.mark.parametrize("num_real", [0, 64])
@pytest.mark.parametrize("high", [86, 87, 88])
def test_zero_values_may_have_any_weight(num_real: int, high: float, folder: Path) -> None:
    """Turbo's scale of zeros is zero, so their weights do not show in what they weigh.

    Their scores are ``high``: a weight, or the sum of some, is more than a float32 holds. The last
    value is not zero, and its score is higher; nor are the first, whose scores are 0.
    """
    case = Case("float", "turbo4", mx.float16, 64, 64, 4, 0, False, 1, 13)
    mx.random.seed(13)
    columns = mx.arange(300)[:, None]
    scores = mx.where(columns < 64, 0, mx.where(columns < 299, high, high + 2))
    first = mx.arange(64) == 0
    keys = mx.broadcast_to(scores * first, (1, 2, 300, 64)).astype(case.dtype)
    is_real = (columns < num_real) | (columns == 299)
    values = (mx.random.normal((1, 2, 300, 64)) * is_real).astype(case.dtype)
    queries = mx.broadcast_to(first / SCALE, (1, 8, 1, 64)).astype(case.dtype)
    given(case, keys, values, queries).check(CppLaunch(folder), matrices=True)


def test_scores_may_be_very_low(folder: Path) -> None:
    """The highest score of a row is the lowest that there is."""
    case = Case("float", "affine8", mx.bfloat16, 64, 64, 4, 0, False, 1, 14)
    mx.random.seed(14)
    keys, values = (mx.random.normal((1, 2, 300, 64)).astype(case.dtype) for _ in range(2))
    queries = mx.full((1, 8, 1, 64), 20.0).astype(case.dtype)
    sample = given(case, -mx.abs(keys), values, queries)
    sample.check(CppLaunch(folder), matrices=True)


@pytest.mark.skipif(not IS_LONG, reason="make parity tries them")
@pytest.mark.parametrize("seed", range(40))
def test_random_layers(seed: int, folder: Path) -> None:
    """Up to 64 rows."""
    for sample, matrices in drawn(seed):
        sample.check(CppLaunch(folder), matrices=matrices)


def test_free_rows_cost_nothing_and_give_zeros(folder: Path) -> None:
    """A row whose first column is its end reads no record, not even those of its slot."""
    sample = Sample.of(CASES[0], (0,))
    kernels = CASES[0].kernels(CppLaunch(folder))
    found = kernels.attend(sample.queries, sample.records, sample.bounds, 700, SCALE)
    assert not found.astype(mx.float32).any()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_every_small_float_is_read(name: str, folder: Path) -> None:
    """A row of one column has its value as the result. The values have every code of 8 bits."""
    case = Case(name, name, mx.float32, 128, 128, 1, 0, False, 4, 1)
    kernels, layout, scheme = case.kernels(CppLaunch(folder)), case.layout, case.scheme
    codes = mx.arange(256, dtype=mx.uint8)
    codes = mx.where(codes % 128 == 127, codes - 1, codes).view(mx.uint32)  # 127 is no number
    words = mx.broadcast_to(codes.reshape(1, 2, 1, 32), (4, 2, 1, 32))
    words = words[..., : layout.values.num_code_words]
    scales = mx.arange(4 * 2 * layout.values.num_groups, dtype=mx.uint8) % 30 + 97
    packed = words, scales.reshape(4, 2, 1, -1)
    records = layout.join(packed, packed)
    queries, bounds = mx.ones((4, 2, 1, 128)), mx.array([[0, 1]] * 4, mx.int32)
    found = kernels.attend(queries, records, bounds, 1, SCALE)
    wanted = scheme.values.unpack(packed, mx.float32)
    assert mx.allclose(found, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("matrices", [False, True])
def test_where_a_row_begins_does_not_matter(matrices: bool, folder: Path) -> None:
    """Splits begin at a row's first column: the same tokens at other columns give the same bits."""
    case = CASES[0]
    sample = Sample.of(case, (513,))
    kernels = case.kernels(CppLaunch(folder), matrices=matrices)
    first = int(sample.bounds[0, 0].item())
    queries, rest = sample.queries[:1], (513, SCALE)
    own = sample.records[:1, :, first : first + 513]
    moved = mx.pad(own, [(0, 0), (0, 0), (77, 3), (0, 0)])
    bounds = mx.array([[0, 513]] * 4, mx.int32)
    one = kernels.attend(queries, own, bounds, *rest)
    other = kernels.attend(queries, moved, bounds + 77, *rest)
    assert mx.array_equal(one, other)
    assert mx.array_equal(one, kernels.attend(queries, own, bounds, 2000, SCALE))


@pytest.mark.parametrize("matrices", [False, True])
def test_rows_of_one_split_need_one_kernel(matrices: bool, folder: Path) -> None:
    """It gives the same bits as two kernels do, also for free rows, with prefixes and sinks."""
    sample, launch = Sample.of(replace(CASES[1], rows=6), (0, 0, 1, 100, 256)), CppLaunch(folder)
    kernels = sample.case.kernels(launch, matrices=matrices)
    given, rest = (sample.queries, sample.records, sample.bounds), (sample.sinks, sample.partials)
    one = kernels.attend(*given, 256, SCALE, *rest)
    assert launch.counts == {f"batchkv_{'matrix_' * matrices}splits_jps": 1}
    assert mx.array_equal(one, kernels.attend(*given, kernels.split + 1, SCALE, *rest))
    compare(one, sample.wanted(), sample.case)


@pytest.mark.few(2)
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_the_last_threadgroup_joins_splits_as_a_kernel_does(
    case: Case, is_backward: bool, folder: Path
) -> None:
    """The same bits, whichever it is: rows of none to many splits, prefixes and sinks.

    The launch sees that the counters are as they were.
    """
    matrices = has_matrices(case)
    launch = CppLaunch(folder, is_backward=is_backward)
    split = case.kernels(launch, matrices=matrices).split
    lengths = 0, 1, split, split + 1, 3 * split - 1, 0
    sample = Sample.of(replace(case, rows=len(lengths)), lengths)
    given = sample.queries, sample.records, sample.bounds, 3 * split, SCALE
    rest = sample.sinks, sample.partials
    kernels = case.kernels(launch, matrices=matrices, counts=True)
    found = kernels.attend(*given, *rest)
    letters = "l" + "p" * (case.depth > 0) + "s" * case.has_sinks
    assert launch.counts == {f"batchkv_{'matrix_' * matrices}splits_{letters}": 1}
    assert mx.array_equal(found, case.kernels(launch, matrices=matrices).attend(*given, *rest))
    compare(found, sample.wanted(), case)
    assert kernels.counters is not None and not kernels.counters.any().item()


def test_more_rows_than_are_counted_need_a_kernel_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, launch = CASES[0], CppLaunch(folder)
    monkeypatch.setattr(decode, "_MOST_COUNTED", case.rows * case.scheme.shape.num_heads - 1)
    sample = Sample.of(case, (40,))
    kernels = case.kernels(launch, counts=True)
    given = sample.queries, sample.records, sample.bounds, kernels.split + 1, SCALE
    found = kernels.attend(*given)
    assert set(launch.counts) == {"batchkv_splits", "batchkv_merge"}
    monkeypatch.undo()
    assert mx.array_equal(found, case.kernels(launch, counts=True).attend(*given))
    assert "batchkv_splits_l" in launch.counts


def test_attention_alone_is_joined_with_more(folder: Path) -> None:
    """Rows with prefixes of one pool, and a row without: joined, it is attention over both."""
    case = CASES[0]
    sample, kernels = Sample.of(case, (557,)), case.kernels(CppLaunch(folder))
    first = int(sample.bounds[0, 0].item())
    whole = sample.records[:1, :, first : first + 557]
    spans = [(0, 300), (300, 400), (0, 0), (0, 300), (300, 400)]
    pool = mx.broadcast_to(whole, (case.rows, *whole.shape[1:]))
    bounds = mx.array(spans, mx.int32)
    score, value = kernels.attend_alone(sample.queries, whole, bounds, 512, SCALE)
    assert score[:, 2].max().item() < -1e37 and not value[:, 2].any().item()
    chain = mx.array([[row] for row in range(case.rows)] + [[-1]] * 8, mx.int32)
    partials = Partials(score, value, chain)
    own = mx.array([[400, 557]] * case.rows, mx.int32)
    found = kernels.attend(sample.queries, pool, own, 157, SCALE, None, partials)
    for row, (low, high) in enumerate(spans):
        both = mx.concatenate([whole[:, :, low:high], whole[:, :, 400:]], axis=2)
        both = mx.broadcast_to(both, (case.rows, *both.shape[1:]))
        ends = mx.array([[0, both.shape[2]]] * case.rows, mx.int32)
        wanted = kernels.attend(sample.queries, both, ends, 600, SCALE).astype(mx.float32)
        compare(found[row : row + 1], wanted[row : row + 1], case)
