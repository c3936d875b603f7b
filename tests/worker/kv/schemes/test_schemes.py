"""KV schemes: what packing costs in error and bytes, products on packed parts, names as text."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from batchkv_worker.kv.schemes.names import SCHEMES, TensorName, TensorNames
from batchkv_worker.kv.schemes.packing import (
    LayerScheme,
    LayerShape,
    TensorScheme,
    fit_layer,
    fit_model,
    fit_tensor,
)
from batchkv_worker.kv.schemes.rotation import rotate, unrotate
from batchkv_worker.kv.schemes.spec import SchemeSpec

ROTATED = ("affine8r", "affine6r", "affine5r", "affine4r", "affine3r", "affine2r", "nvfp4r")
TENSORS = tuple(name for name in SCHEMES if name != "turbo3.5")  # which names a pair
NAMES = (*TENSORS, *ROTATED, "affine4/32", "affine4/128", "turbo4/32", "turbo3/128")
SIZES = (64, 128, 96, 80, 32, 48, 192, 576)

# Error of a round trip on Gaussian data, head size 128, in percent of the data's length.
GAUSSIAN_ERROR = {
    "float": 0, "affine8": 0.54, "affine6": 2.17, "affine5": 4.41, "affine4": 9.09,
    "affine4/32": 8.10, "affine3": 19.05, "affine2": 39.4, "mxfp8": 2.65, "mxfp4": 11.54,
    "nvfp4": 9.51, "affine4r": 9.09, "affine3r": 19.05, "nvfp4r": 9.51, "turbo4": 9.62,
    "turbo4/32": 8.85, "turbo4/128": 10.19,
    "turbo3": 18.7, "turbo3/128": 19.26, "turbo3/32": 17.74,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    mx.random.seed(7)


def scheme_of(name: str, size: int = 64) -> TensorScheme:
    return fit_tensor(TensorName.parse(name), size)


def gaussian(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def with_outlier_channels(*shape: int) -> mx.array:
    """Every 16th channel is ten times larger, as in the keys of trained models."""
    return gaussian(*shape) * mx.where(mx.arange(shape[-1]) % 16 == 5, 10.0, 1.0)


def error_percent(found: mx.array, wanted: mx.array) -> float:
    return float(100 * mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted))


def round_trip_error(name: str, dense: mx.array) -> float:
    scheme = scheme_of(name, dense.shape[-1])
    return error_percent(scheme.unpack(scheme.pack(dense), mx.float32), dense)


@pytest.mark.parametrize("name", GAUSSIAN_ERROR)
def test_error_on_gaussian_data_is_the_known_one(name: str) -> None:
    """A round trip costs what its bits and groups should cost, within 3 %."""
    found = round_trip_error(name, gaussian(2, 2, 1000, 128))
    assert found == pytest.approx(GAUSSIAN_ERROR[name], rel=0.03)


@pytest.mark.parametrize(
    ("rotated", "plain"),
    [(f"affine{bits}r", f"affine{bits}") for bits in (8, 6, 5, 4, 3)]
    + [("turbo4", "affine4"), ("turbo3", "affine3")],
)
@pytest.mark.parametrize("size", [64, 96, 128])
def test_rotation_helps_where_channels_are_outliers(rotated: str, plain: str, size: int) -> None:
    """With a few large channels a rotated scheme errs clearly less at equal bits."""
    dense = with_outlier_channels(2, 2, 500, size)
    assert round_trip_error(rotated, dense) < 0.9 * round_trip_error(plain, dense)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_orthonormal(size: int) -> None:
    """Unrotating undoes it, lengths and dot products stay, and one channel reaches all."""
    x, y = gaussian(3, 5, size), gaussian(3, 5, size)
    assert mx.allclose(unrotate(rotate(x)), x, atol=1e-5)
    assert mx.allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1), atol=1e-3)
    matrix = rotate(mx.eye(size))
    assert mx.allclose(matrix @ matrix.T, mx.eye(size), atol=1e-5)
    assert float(mx.abs(matrix).max()) < 0.8
    assert rotate(x.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_rotation_never_changes() -> None:
    """Packed blocks outlive the process: the rotation of a size is pinned."""
    # A Hadamard matrix begins with a column of ones, so the first column of R is the signs.
    signs = mx.sign(rotate(mx.eye(8))[:, 0]).tolist()
    assert signs == [-1, -1, 1, 1, 1, -1, -1, 1]
    drawn = rotate(mx.eye(12))[0, :3].tolist()
    assert drawn == pytest.approx([-0.696469, 0.095460, 0.297846], abs=1e-5)


@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("name", ["affine8r", "affine4r", "turbo4", "turbo3"])
def test_scores_are_unchanged_by_rotation(name: str, size: int) -> None:
    """Rotated queries on stored keys score as queries on keys; outputs come back rotated."""
    scheme = scheme_of(name, size)
    queries, dense = gaussian(2, 2, 4, size), gaussian(2, 2, 9, size)
    parts = scheme.pack(dense)
    seen = scheme.unpack(parts, mx.float32)
    scores = scheme.times(scheme.rotate(queries), parts, transpose=True)
    assert mx.allclose(scores, queries @ seen.swapaxes(-1, -2), atol=1e-4)
    weights = mx.softmax(scores, axis=-1)
    out = scheme.unrotate(scheme.times(weights, parts, transpose=False))
    assert mx.allclose(out, weights @ seen, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [64, 128, 96, 32])
@pytest.mark.parametrize("name", NAMES)
def test_times_is_the_product_with_what_is_stored(name: str, size: int, rows: int) -> None:
    """Products on packed parts equal products on unpacked ones, both ways round."""
    scheme = scheme_of(name, size)
    parts = scheme.pack(gaussian(rows, 2, 37, size))
    stored = scheme.unpack_stored(parts, mx.float32)
    left = gaussian(rows, 2, 3, size)
    scores = scheme.times(left, parts, transpose=True)
    assert scores.shape == (rows, 2, 3, 37)
    assert mx.allclose(scores, left @ stored.swapaxes(-1, -2), atol=1e-4, rtol=1e-4)
    weights = mx.softmax(gaussian(rows, 2, 3, 37), axis=-1)
    out = scheme.times(weights, parts, transpose=False)
    assert out.shape == (rows, 2, 3, size)
    assert mx.allclose(out, weights @ stored, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_per_token_are_the_parts_bytes(name: str, size: int, dtype: mx.Dtype) -> None:
    """What admission reckons with is what the parts take, and every part has its time at -2."""
    scheme = scheme_of(name, size)
    parts = scheme.pack(mx.zeros((1, 2, 5, size), dtype))
    assert all(part.shape[:3] == (1, 2, 5) for part in parts)
    wanted = scheme.bytes_per_token(size, dtype.size)
    assert sum(part.nbytes for part in parts) == 10 * wanted
    assert scheme.unpack(parts, dtype).dtype == dtype


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("size", [64, 128, 96])
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_sliced_by_tokens(name: str, size: int, lead: tuple[int, ...]) -> None:
    """Tokens are packed apart: a slice of the parts unpacks to the slice, packing joins nothing."""
    scheme = scheme_of(name, size)
    dense = gaussian(*lead, 11, size)
    parts = scheme.pack(dense)
    whole = scheme.unpack(parts, mx.float32)
    assert whole.shape == dense.shape
    some = tuple(part[..., 3:8, :] for part in parts)
    stored = scheme.unpack_stored(parts, mx.float32)
    assert mx.array_equal(scheme.unpack_stored(some, mx.float32), stored[..., 3:8, :])
    assert mx.allclose(scheme.unpack(some, mx.float32), whole[..., 3:8, :], atol=1e-5)
    # The rotation itself may round differently for one vector than for many; the codec may not.
    rotated = scheme.rotate(dense)
    alone = scheme.codec.pack(rotated[..., 4:5, :])
    for part, joint in zip(alone, scheme.codec.pack(rotated), strict=True):
        assert mx.array_equal(part, joint[..., 4:5, :])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["affine4r", "nvfp4", "mxfp8", "turbo4", "turbo3"])
def test_half_precision_errs_little_more(name: str, dtype: mx.Dtype) -> None:
    """float16 and bfloat16 numbers, scales and products cost next to nothing beside the codes."""
    dense = gaussian(2, 2, 300, 128)
    scheme = scheme_of(name, 128)
    parts = scheme.pack(dense.astype(dtype))
    half = error_percent(scheme.unpack(parts, dtype).astype(mx.float32), dense)
    assert half < 1.05 * round_trip_error(name, dense)
    left = gaussian(2, 2, 3, 128).astype(dtype)
    scores = scheme.times(left, parts, transpose=True)
    wanted = left.astype(mx.float32) @ scheme.unpack_stored(parts, mx.float32).swapaxes(-1, -2)
    assert scores.dtype == dtype
    assert error_percent(scores.astype(mx.float32), wanted) < 2


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_spikes_stay_finite(name: str) -> None:
    """Padding and a single large number come back without a NaN, in every dtype."""
    scheme = scheme_of(name)
    spike = mx.where(mx.arange(64) == 3, 3e4, 0.0)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        dense = mx.stack([mx.zeros(64), spike]).astype(dtype)
        found = scheme.unpack(scheme.pack(dense), mx.float32)
        assert not mx.isnan(found).any() and not mx.isinf(found).any()
        assert float(mx.abs(found[0]).max()) < 1e-6


@pytest.mark.parametrize(
    ("name", "size", "fitted"),
    [
        ("affine4", 64, "affine4/g64"),
        ("affine4", 96, "affine4/g32"),
        ("affine4", 80, "float"),
        ("affine4", 48, "float"),
        ("affine4/128", 128, "affine4/g128"),
        ("affine4/128", 192, "affine4/g64"),
        ("affine4/32", 128, "affine4/g32"),
        ("affine3r", 96, "affine3r/g32"),
        ("affine3r", 80, "float"),
        ("nvfp4", 96, "nvfp4/g16"),
        ("nvfp4", 80, "float"),
        ("mxfp8", 96, "mxfp8/g32"),
        ("turbo4", 128, "turbo4/g64"),
        ("turbo3/128", 128, "turbo3/g128"),
        ("turbo3", 96, "turbo3/g32"),
        ("turbo3", 96, "turbo3/g32"),
        ("float", 64, "float"),
    ],
)
def test_groups_fall_to_what_divides_the_head(name: str, size: int, fitted: str) -> None:
    """The largest allowed group that divides the size, else the tensor stays float, unrotated."""
    scheme = scheme_of(name, size)
    assert str(scheme) == fitted
    assert scheme.is_packed == (fitted != "float")
    assert not (scheme.is_rotated and fitted == "float")


def test_keys_and_values_fit_their_own_size() -> None:
    """Latent attention has one head with keys and values of different size."""
    scheme = fit_layer(TensorNames.parse("k8v4"), LayerShape(1, 576, 80))
    assert (str(scheme.keys), str(scheme.values)) == ("affine8/g64", "float")
    assert scheme.is_packed and not scheme.is_rotated
    assert scheme.bytes_per_token(2) == 576 + 9 * 4 + 80 * 2
    shape = LayerShape(2, 64, 64)
    turbo = fit_layer(TensorNames.parse("turbo3"), shape)
    assert turbo.bytes_per_token(2) == 2 * 2 * (24 + 2)
    mixed = fit_layer(TensorNames.parse("affine8+turbo4"), shape)
    assert str(mixed) == "affine8/g64+turbo4/g64"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("affine4", "affine4"),
        (" Affine4 / 64 ", "affine4"),
        ("nvfp4/16", "nvfp4"),
        ("affine4r/32", "affine4r/32"),
        ("k8v4", "affine8+affine4"),
        ("K4V4", "affine4"),
        ("k8v3/32", "affine8/32+affine3/32"),
        ("affine8+nvfp4", "affine8+nvfp4"),
        ("turbo3.5/128", "turbo4/128+turbo3/128"),
        ("turbo3, first+last = affine8", "turbo3,first+last=affine8"),
        ("affine4,0-3=k8v4,7=float", "affine4,0-3=affine8+affine4,7=float"),
        ("affine4,0+2-2+last=float", "affine4,first+2+last=float"),
    ],
)
def test_spec_has_one_canonical_text(text: str, canonical: str) -> None:
    """Texts that mean the same give the same spec and text, which reads back as itself."""
    spec = SchemeSpec.parse(text)
    assert str(spec) == canonical
    assert SchemeSpec.parse(canonical) == spec and hash(SchemeSpec.parse(canonical)) == hash(spec)


def test_spec_fits_layers_by_number() -> None:
    """Overrides count attention layers from 0, and the last override of a layer holds."""
    shapes = [LayerShape(2, 64, 64)] * 5
    fitted = fit_model(SchemeSpec.parse("affine4,first+last=affine8,1-2=k8v2/32,2=float"), shapes)
    assert [str(layer) for layer in fitted] == [
        "affine8/g64", "affine8/g32+affine2/g32", "float", "affine4/g64", "affine8/g64",
    ]  # fmt: skip
    assert all(isinstance(layer, LayerScheme) for layer in fitted)
    (only,) = fit_model(SchemeSpec.parse("float,first+last=turbo4"), shapes[:1])
    assert only.is_rotated
    assert fit_model(SchemeSpec.parse("float"), []) == ()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "names no scheme; known: float, affine8"),
        ("afine4", "unknown KV scheme 'afine4'; known: float"),
        ("affine7", "unknown KV scheme 'affine7'"),
        ("k9v4", "unknown KV scheme 'affine9'"),
        ("floatr", "unknown KV scheme 'floatr'"),
        ("turbo4r", "unknown KV scheme 'turbo4r'"),
        ("affine4rr", "unknown KV scheme 'affine4rr'"),
        ("affine4+", "unknown KV scheme ''"),
        ("affine4+affine4+affine4", "names 3 tensors"),
        ("affine4/48", "'affine4' has no groups of '48'; it has 128 or 64 or 32"),
        ("affine4/", "has no groups of ''"),
        ("affine4/064", "has no groups of '064'"),
        ("nvfp4/32", "'nvfp4' has no groups of '32'; it has 16"),
        ("turbo3.5/16", "has no groups of '16'; it has 128 or 64 or 32"),
        ("float+turbo3.5", "unknown KV scheme 'turbo3.5'"),
        ("float/64", "'float' has no groups of '64'; it has none"),
        ("last=float", "a scheme for all layers comes first"),
        ("affine4,", "override '' is not LAYERS=SCHEME"),
        ("affine4,last", "override 'last' is not LAYERS=SCHEME"),
        ("affine4,last=", "unknown KV scheme ''"),
        ("affine4,last=float=float", "unknown KV scheme 'float=float'"),
        ("affine4,middle=float", "unknown layers 'middle'; known: first, last, a number"),
        ("affine4,-1=float", "unknown layers '-1'"),
        ("affine4,0+=float", "unknown layers '0+'"),
        ("affine4,5-2=float", "'5-2' end before they begin"),
    ],
)
def test_malformed_specs_are_refused_by_name(text: str, wrong: str) -> None:
    """Each fault is one sentence that names what was wrong."""
    with pytest.raises(ValueError) as caught:
        SchemeSpec.parse(text)
    assert wrong in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", ["4", "2-4", "first+9"])
def test_a_layer_that_the_model_has_not_is_refused(layers: str) -> None:
    """An override is never dropped in silence."""
    spec = SchemeSpec.parse(f"affine4,{layers}=float")
    with pytest.raises(ValueError, match="this model's are 0 to 3"):
        fit_model(spec, [LayerShape(2, 64, 64)] * 4)


@pytest.mark.parametrize("make", [gaussian, with_outlier_channels])
def test_turbo_packs_to_the_nearest_level(make: Callable[..., mx.array]) -> None:
    """No number is more than half a step from its level, but for those beyond the span."""
    dense = make(4, 50, 64)
    for name, bits in (("turbo4", 4), ("turbo3", 3)):
        scheme = scheme_of(name)
        codes, scales = scheme.pack(dense)
        rotated = scheme.rotate(dense)
        off = mx.abs(scheme.unpack_stored((codes, scales), mx.float32) - rotated)
        within = mx.abs(rotated) <= scales * 2 ** (bits - 1)
        assert mx.where(within, off <= scales * 0.5001, True).all()
