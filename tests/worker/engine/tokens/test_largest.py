"""The largest few of many numbers are those of a stable sort of all."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import pytest

from batchkv_worker.engine.tokens.largest import BLOCK, MAX_COUNT, largest

# Fewer and more blocks than numbers are wanted, whole blocks, and one number beyond.
TOTALS = (1, 5, BLOCK, 3 * BLOCK + 1, 20 * BLOCK, 70 * BLOCK - 1, 100 * BLOCK)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("levels", [2, 9, 10**6])
def test_the_largest_are_those_of_a_stable_sort(total: int, levels: int) -> None:
    """Also where most numbers are equal: of these, the first come first."""
    drawn = random.Random(total * levels)
    lines = [[drawn.randrange(levels) / 8 for _ in range(total)] for _ in range(3)]
    for count in {1, min(7, total), min(MAX_COUNT, total)}:
        indices, values = largest(mx.array(lines), count)
        assert indices.shape == values.shape == (3, count)
        for line, found, numbers in zip(lines, indices.tolist(), values.tolist(), strict=True):
            wanted = sorted(range(total), key=lambda i, line=line: (-line[i], i))[:count]
            assert found == wanted
            assert numbers == [line[i] for i in wanted]


@pytest.mark.parametrize("count", [1, 17, MAX_COUNT])
def test_equal_numbers_of_unequal_blocks_come_in_order(count: int) -> None:
    """A number that ends the choice is equal to ones in blocks whose largest are larger."""
    drawn = random.Random(count)
    numbers = [float(int(-math.log2(1 - drawn.random()))) for _ in range(300 * BLOCK + 5)]
    indices, _ = largest(mx.array([numbers]), count)
    wanted = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:count]
    assert indices.tolist() == [wanted]


def test_numbers_that_are_no_choice_stay_behind_all_others() -> None:
    """Minus infinity fills the last block; it never comes before a real number."""
    lowest = -float("inf")
    numbers = [lowest] * (5 * BLOCK + 3)
    numbers[-1] = -1e30
    indices, values = largest(mx.array([numbers]), 4)
    assert indices.tolist() == [[len(numbers) - 1, 0, 1, 2]]
    assert values.tolist() == [[pytest.approx(-1e30), lowest, lowest, lowest]]
