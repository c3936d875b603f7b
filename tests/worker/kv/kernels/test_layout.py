"""Records hold packed keys and values to the bit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.decode import DecodeKernels
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerShape, fit_model
from batchkv_worker.kv.schemes.spec import SCHEMES, SchemeSpec
from worker.kv.kernels.cases import DTYPES, SIZES


def layout_of(name: str, size: int, dtype: mx.Dtype) -> RecordLayout:
    return RecordLayout.of(fit_model(SchemeSpec.parse(name), [LayerShape(2, size, size)])[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SCHEMES, "affine8+turbo3", "affine2/32", "affine6/128", "k8v4"])
def test_records_give_back_the_parts_that_they_were_made_of(name: str, dtype: mx.Dtype) -> None:
    """For every scheme and size; a record has as many words as its layout says."""
    for size in SIZES:
        layout = layout_of(name, size, dtype)
        dense = mx.random.normal((3, 2, 5, size)).astype(dtype)
        keys, values = layout.scheme.keys.pack(dense), layout.scheme.values.pack(dense)
        records = layout.join(keys, values)
        assert (records.shape, records.dtype) == ((3, 2, 5, layout.words), mx.uint32)
        found = layout.split(records[:, :, 1:4])
        for part, other in zip((*keys, *values), (*found[0], *found[1]), strict=True):
            assert part.dtype == other.dtype
            assert mx.array_equal(part[:, :, 1:4], other)


def test_a_token_takes_no_more_than_its_parts() -> None:
    """Only the last word of scales is filled up."""
    words = {"affine8": 68, "affine4": 36, "turbo4": 34, "turbo3": 26, "mxfp8": 66, "nvfp4": 36}
    for name, count in words.items():
        assert layout_of(name, 128, mx.bfloat16).words == count


def test_scales_and_biases_take_turns() -> None:
    """One word has both, in half precision, so that a kernel reads both at once."""
    layout = layout_of("affine8", 64, mx.float16)
    codes, scales, biases = layout.scheme.keys.pack(mx.random.normal((1, 64)).astype(mx.float16))
    record = layout.join((codes, scales, biases), (codes, scales, biases))
    assert mx.array_equal(record[:, 32:33].view(mx.float16), mx.concatenate([scales, biases], 1))


@pytest.mark.parametrize(
    ("name", "size", "lines", "why"),
    [
        ("float", 36, 4, "no kernel for heads of 36 and 36 numbers"),
        ("affine8", 128, 32, "no kernel for 32 query heads of 128 and 128"),
    ],
)
def test_layers_without_a_kernel(name: str, size: int, lines: int, why: str) -> None:
    """They are refused in words."""
    with pytest.raises(ValueError, match=why):
        DecodeKernels.of(layout_of(name, size, mx.float16), lines, pytest.fail)


def test_schemes_of_slots_have_no_records() -> None:
    """Records hold the parts of pieces; those of slots have other forms of 3-bit codes."""
    scheme = fit_model(SchemeSpec.parse("turbo3"), [LayerShape(2, 64, 64)])[0]
    with pytest.raises(ValueError, match="records hold that of pieces"):
        RecordLayout.of(scheme.in_slots(spread=False), mx.float16)
