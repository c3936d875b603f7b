"""Values are read as a part of a product only where they are one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.launch import View
from batchkv_worker.kv.kernels.value_parts import ValueParts


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_view_has_the_values(tokens: int) -> None:
    """Of one token a row and of several, once."""
    parts, whole = ValueParts(), mx.random.normal((2, tokens, 96 + 32))
    keys = mx.zeros((2, 2, tokens, 16))
    values = whole[..., 96:].reshape(2, tokens, 2, 16).swapaxes(1, 2)
    parts.note(keys, whole, 96)
    found = parts.of(keys, values)
    assert isinstance(found, View)
    there = mx.as_strided(found.whole, found.shape, found.strides, found.start)
    assert mx.array_equal(there, values)
    assert parts.of(keys, values) is values


@pytest.mark.parametrize("what", ["keys", "tokens", "rows", "outputs", "dtype"])
def test_other_values_are_given_as_they_are(what: str) -> None:
    """They came with other keys, or are no part of the product that was noted."""
    parts, keys, values = ValueParts(), mx.zeros((2, 2, 4, 16)), mx.zeros((2, 2, 4, 16))
    shape = {"tokens": (2, 3, 128), "rows": (1, 4, 128), "outputs": (2, 4, 160)}
    whole = mx.zeros(shape.get(what, (2, 4, 128)), mx.float16 if what == "dtype" else mx.float32)
    parts.note(keys, whole, 96)
    assert parts.of(mx.zeros(keys.shape) if what == "keys" else keys, values) is values
