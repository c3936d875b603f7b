"""Turbo in decode slots: other forms of the same codes, bit for bit, and paths that read them."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.kv.attention.paths import LayerAttention, Path, attend, in_slots, paths_of
from batchkv_worker.kv.schemes import codes
from batchkv_worker.kv.schemes.names import TensorNames
from batchkv_worker.kv.schemes.packing import LayerScheme, LayerShape, fit_layer
from batchkv_worker.kv.schemes.rotation import rotate
from batchkv_worker.kv.schemes.turbo import Turbo, TurboSlots
from worker.kv.reference import BACKEND

SIZES = (32, 64, 96, 128, 192)
FORMS = [TurboSlots(Turbo(4, 32), False), *(TurboSlots(Turbo(3, 32), form) for form in (0, 1))]


def numbers(*shape: int, seed: int = 5) -> mx.array:
    return mx.array(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def layer(name: str, size: int = 64) -> LayerScheme:
    return fit_layer(TensorNames.parse(name), LayerShape(2, size, size))


@pytest.mark.parametrize("size", SIZES)
def test_forms_of_codes_hold_the_same_codes(size: int) -> None:
    """Stream, nibbles and planes are made of each other without loss, in as many bytes."""
    drawn = mx.array(np.random.RandomState(1).randint(0, 8, (2, 7, size)).astype(np.uint32))
    words, packed = codes.nibbles(drawn), codes.stream(drawn)
    planes = codes.planes_of(words)
    assert planes.shape == packed.shape == (2, 7, 3 * size // 32)
    assert mx.array_equal(codes.stream_of(words), packed)
    assert mx.array_equal(codes.nibbles_of(packed), words)
    assert mx.array_equal(codes.nibbles_of_planes(planes), words)
    one, none = mx.ones((2, 7, size // 32)), mx.zeros((2, 7, size // 32))
    for parts, bits in ((packed, 3), (words, 4)):
        read = mx.dequantize(parts, one, none, group_size=32, bits=bits)
        assert mx.array_equal(read, drawn.astype(mx.float32))


def test_packed_bits_never_change() -> None:
    """Packed blocks outlive the process: the codes and scales of given numbers are pinned."""
    found = {}
    for bits in (3, 4):
        parts = Turbo(bits, 64).pack(numbers(3, 5, 128))
        digest = hashlib.sha256(b"".join(bytes(memoryview(part)) for part in parts))
        found[bits] = digest.hexdigest()[:16]
    assert found == {3: "e30f502334dd0c57", 4: "95a8c0e718f0ca88"}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("slots", FORMS, ids=["4", "3", "3 spread"])
def test_slots_give_back_what_they_took(slots: TurboSlots, size: int, dtype: mx.Dtype) -> None:
    """Bit for bit; a token that slots pack is the same as one that comes packed."""
    dense = numbers(2, 3, 9, size).astype(dtype)
    stored = slots.stored.pack(dense)
    taken = slots.take(stored)
    for pair in (zip(slots.give(taken), stored), zip(slots.pack(dense), taken)):  # noqa: B905
        assert all(mx.array_equal(one, other) for one, other in pair)
    assert len(taken) == slots.num_parts and len(stored) == slots.stored.num_parts
    assert all(part.shape[:3] == (2, 3, 9) for part in taken)
    wanted = 2 * 3 * 9 * slots.bytes_per_token(size, dtype.size)
    assert sum(part.nbytes for part in taken) == wanted
    assert mx.array_equal(slots.unpack(taken, dtype), slots.stored.unpack(stored, dtype))


@pytest.mark.parametrize("slots", FORMS, ids=["4", "3", "3 spread"])
def test_slots_give_back_nothing(slots: TurboSlots) -> None:
    """A row without any token yet is empty in every form."""
    empty = tuple(part[..., :0, :] for part in slots.stored.pack(numbers(1, 2, 3, 64)))
    back = slots.give(slots.take(empty))
    assert [part.shape for part in back] == [part.shape for part in empty]
    assert [part.dtype for part in back] == [part.dtype for part in empty]


@pytest.mark.parametrize("slots", FORMS, ids=["4", "3", "3 spread"])
def test_products_are_the_same_in_every_form(slots: TurboSlots) -> None:
    """What is multiplied are the same levels: the products differ by rounding at most."""
    stored = slots.stored.pack(numbers(2, 2, 37, 96))
    for left, transpose in ((numbers(2, 2, 3, 96), True), (numbers(2, 2, 3, 37), False)):
        found = slots.times(left, slots.take(stored), transpose)
        assert mx.allclose(found, slots.stored.times(left, stored, transpose), atol=1e-4)


def test_slots_take_columns_of_a_buffer() -> None:
    """A slice by tokens of what slots keep is what they keep of the slice."""
    scheme = in_slots(layer("turbo3"), "spread-packed").keys
    parts = scheme.pack(numbers(2, 2, 40, 64))
    cut = tuple(part[:1, ..., 3:9, :] for part in parts)
    whole = scheme.unpack_stored(parts, mx.float32)
    assert mx.array_equal(scheme.unpack_stored(cut, mx.float32), whole[:1, :, 3:9])


def test_floats_have_no_packed_path() -> None:
    """It would be the folded one by another name."""
    assert paths_of(layer("float")) == ("fused", "folded")


@pytest.mark.parametrize(("name", "spreads"), [("affine3r", 0), ("turbo4", 0), ("turbo3.5", 1)])
def test_only_codes_of_three_bits_spread(name: str, spreads: int) -> None:
    """Other schemes have three paths, and slots keep them alike for each."""
    scheme = layer(name)
    paths = paths_of(scheme)
    assert [path.startswith("spread-") for path in paths] == [False] * 3 + [True] * 3 * spreads
    assert len({in_slots(scheme, path) for path in (*paths, None)}) == 1 + spreads
    assert (in_slots(scheme, None) == scheme) is not name.startswith("turbo")
    assert str(in_slots(scheme, paths[-1])) == str(scheme)


@pytest.mark.parametrize("name", ["turbo4", "turbo3.5", "turbo3"])
def test_every_path_attends_alike(name: str) -> None:
    """Whatever form slots keep, all paths give the attention of the values that were packed."""
    scheme = layer(name)
    keys, values = numbers(3, 2, 21, 64), numbers(3, 2, 21, 64, seed=6)
    packed = scheme.keys.pack(keys), scheme.values.pack(values)
    queries, mask = numbers(3, 4, 1, 64), mx.arange(21) >= mx.array([0, 3, 9]).reshape(3, 1, 1, 1)

    def found(path: Path) -> mx.array:
        own = in_slots(scheme, path)
        parts = own.keys.take(packed[0]), own.values.take(packed[1])
        layer = LayerAttention(BACKEND, own, mx.float32, path)
        return attend(layer, queries, *parts, 0.3, mask)

    wanted = found("fused")
    for path in paths_of(scheme):
        assert mx.allclose(found(path), wanted, atol=1e-4), path


@pytest.mark.parametrize("size", [64, 96])
def test_the_scale_comes_with_the_rotation(size: int) -> None:
    """Scaled and rotated at once is what it is one after the other."""
    x = numbers(3, 5, size)
    assert mx.allclose(rotate(x, 0.3), 0.3 * rotate(x), atol=1e-6)
    assert rotate(x.astype(mx.bfloat16), 0.3).dtype == mx.bfloat16
