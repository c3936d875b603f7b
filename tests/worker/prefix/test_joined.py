"""Histories of rows are joined for a few layers at once, with the numbers of each layer's own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.bundle import PIECES_TOGETHER, Bundle, Joined

LAYERS = PIECES_TOGETHER + 3


def block(seed: int, *, small: int | None = None) -> Bundle:
    """Two parts of one shape and one of another for each layer; ``small``: one layer lacks keys."""
    mx.random.seed(seed)
    layers: list[Pieces | None] = []
    for layer in range(LAYERS):
        sizes = (8, 8, 2) if layer != small else (4, 8, 2)
        layers.append(tuple(mx.random.normal((1, 2, 16, size)) for size in sizes))
    return Bundle(layers)


def wanted(rows: list[list[Bundle]], layer: int) -> Pieces:
    """Layer by layer, row by row."""
    lines = []
    for blocks in rows:
        found = [one.layer(layer) for one in blocks]
        lines.append([mx.concatenate(parts, axis=-2) for parts in zip(*found, strict=True)])  # type: ignore[arg-type]
    return tuple(mx.concatenate(parts, axis=0) for parts in zip(*lines, strict=True))


@pytest.mark.parametrize("small", [None, 5])
def test_each_layer_gets_its_own_numbers(small: int | None) -> None:
    """Rows with blocks in common, with the same blocks, and with others; layers of two shapes."""
    a, b, c = (block(seed, small=small) for seed in range(3))
    for rows in ([[a, b], [a, c], [a, b]], [[a, b], [a, b]], [[c, b]], [[a], [b]]):
        joined = Joined(rows)
        for layer in range(LAYERS):
            found = joined.layer(layer)
            for one, other in zip(found, wanted(rows, layer), strict=True):
                assert mx.array_equal(one, other)
