"""Numbers that the host gives to kernels."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends.host_numbers import host_numbers

SMALL_BYTES = 8  # that MLX has in memory of the host, on CUDA


@pytest.mark.parametrize("numbers", [[7], [7, -1], [1, 2, 3], [4, 3, 2, 1], list(range(70))])
def test_they_are_given_as_they_are(numbers: list[int]) -> None:
    found = host_numbers(numbers)
    assert found.dtype == mx.int32 and found.tolist() == numbers


@pytest.mark.parametrize("count", [1, 2, 3, 4, 70])
def test_few_are_the_first_of_a_larger_array(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that is not larger would be read across the bus, by each thread that reads it."""
    made: list[int] = []
    array = mx.array

    def seen(*given: object) -> mx.array:
        found = array(*given)
        made.append(found.nbytes)
        return found

    monkeypatch.setattr(mx, "array", seen)
    host_numbers([1] * count)
    (num_bytes,) = made
    assert num_bytes > SMALL_BYTES and num_bytes >= 4 * count
