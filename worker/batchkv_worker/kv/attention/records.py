"""Attention of decode steps over records: one word after another, a token's packed keys and values.

A backend's kernels read each row from its own first column to its own last one (``bounds``), so
there are no masks, and rows of unequal length need no groups. Results over shared prefixes enter as
``Partials``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.attention.shared_prefix import PartialAttention, attend_partial
from batchkv_worker.kv.backends.contract import RecordKernels
from batchkv_worker.kv.kernels.decode import Partials
from batchkv_worker.kv.kernels.launch import LEAST_NUMBERS
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from batchkv_worker.kv.types import PackedKV, Parts

_LEAST_ROWS = LEAST_NUMBERS  # of small arrays with a number or more for each row


@dataclass(frozen=True, slots=True)
class Level:
    """The parts at one depth of the chains of shared prefixes of all rows.

    ``bounds`` (int32, ``[rows, 2]``, perhaps of more rows): of each row the first column of its
    part in the pool and the one after its last. No row has more than ``longest``.
    """

    bounds: mx.array
    longest: int


def kernels_of(layer: LayerAttention) -> RecordKernels:
    """The kernels of a layer whose path is ``kernel``."""
    assert layer.records is not None, layer.path
    return layer.records


def attend(
    layer: LayerAttention,
    queries: mx.array,
    records: mx.array,
    bounds: mx.array,
    longest: int,
    scale: float,
    sinks: mx.array | None = None,
    partials: Partials | None = None,
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, 1, size]``; see ``RecordKernels.attend``.

    Queries and result are in the model's basis, and have the dtype of the queries.
    """
    scheme = layer.scheme
    rotated = scheme.keys.rotate(queries).astype(layer.dtype)
    what = rotated, records, bounds, longest, scale, sinks, partials
    return scheme.values.unrotate(kernels_of(layer).attend(*what).astype(queries.dtype))


def pack(layer: LayerAttention, keys: mx.array, values: mx.array) -> mx.array:
    """Records ``[rows, kv heads, 1, words]`` of one token a row, in the model's basis."""
    scheme, kernels = layer.scheme, kernels_of(layer)
    if keys.dtype == values.dtype == layer.dtype:
        where = VALUE_PARTS.of(keys, values)
        rotated = scheme.values.rotate(values)
        return kernels.pack(scheme.keys.rotate(keys), where if rotated is values else rotated)
    return join(layer, scheme.keys.pack(keys), scheme.values.pack(values))


def join(layer: LayerAttention, keys: Parts, values: Parts) -> mx.array:
    """Records of packed parts, as buffers of the layer's dtype have them.

    Models may give keys of another dtype than their own, and scales have that of the keys.
    """
    return kernels_of(layer).layout.join(_fitted(layer, keys), _fitted(layer, values))


def place_rows(
    layer: LayerAttention,
    places: tuple[tuple[int, ...], ...],
    keys: Parts,
    values: Parts,
    columns: int,
) -> mx.array:
    """Records of whole slots for rows that come in; see ``RecordKernels.place_rows``."""
    parts = _fitted(layer, keys), _fitted(layer, values)
    return kernels_of(layer).place_rows(_array_of(places), *parts, len(places), columns)


def of_prefix(layer: LayerAttention, keys: Parts, values: Parts) -> mx.array:
    """Records ``[1, kv heads, tokens, words]`` of a shared prefix: one kernel, where there is one.

    Put together part by part they are the same, and take ten kernels.
    """
    if min(part.size for part in (*keys, *values)) < LEAST_NUMBERS:
        return join(layer, keys, values)
    tokens = keys[0].shape[-2]
    return place_rows(layer, ((0, 0, tokens, 0),), keys, values, tokens)


@lru_cache(maxsize=8)
def _array_of(places: tuple[tuple[int, ...], ...]) -> mx.array:
    """The same array for all layers, with rows that are not read if there are few."""
    return mx.array([*places, *[(0, 0, 0, 0)] * (_LEAST_ROWS - len(places))], mx.int32)


def _fitted(layer: LayerAttention, parts: Parts) -> Parts:
    return tuple(
        part.astype(layer.dtype) if mx.issubdtype(part.dtype, mx.floating) else part
        for part in parts
    )


def bounds_of(starts: Sequence[int], ends: Sequence[int]) -> mx.array:
    """``bounds`` (int32, ``[rows, 2]``) of rows; rows without columns follow, if there are few."""
    pairs = [list(pair) for pair in zip(starts, ends, strict=True)]
    return mx.array(pairs + [[0, 0]] * (_LEAST_ROWS - len(pairs)), mx.int32)


def chain_of(segments: Sequence[tuple[int, int]], rows: int) -> mx.array:
    """For each row the places of its partial results, of which segment after segment has some.

    A segment has one result for each of the rows [first, last). Int32 ``[rows, depth]``; -1 is
    none.
    """
    places: list[list[int]] = [[] for _ in range(rows)]
    count = 0
    for first, last in segments:
        for row in range(first, last):
            places[row].append(count + row - first)
        count += last - first
    return places_of(places)


def places_of(places: Sequence[Sequence[int]]) -> mx.array:
    """``chain`` of ``Partials``, for rows with partial results at these places."""
    lines = [*places, *([[]] * (_LEAST_ROWS - len(places)))]
    depth = max(1, max(map(len, lines)))
    return mx.array([[*row, *([-1] * (depth - len(row)))] for row in lines], mx.int32)


def partials_of(
    layer: LayerAttention,
    queries: mx.array,
    shared: Sequence[tuple[PackedKV, int, int]],
    chain: mx.array,
    scale: float,
) -> Partials | None:
    """Attention over shared prefixes, each of the rows [first, last); None without any."""
    if not shared:
        return None
    found = [attend_partial(layer, queries[low:high], one, scale) for one, low, high in shared]
    return joined(layer, found, chain, queries.dtype)


def partials_for_all(
    layer: LayerAttention, queries: mx.array, prefixes: Sequence[PackedKV], scale: float
) -> Partials | None:
    """``partials_of`` for a chain that all rows have."""
    rows = queries.shape[0]
    chain = chain_of([(0, rows)] * len(prefixes), rows)
    return partials_of(layer, queries, [(one, 0, rows) for one in prefixes], chain, scale)


def pooled_for_all(
    layer: LayerAttention, queries: mx.array, prefixes: Sequence[PackedKV], scale: float
) -> Partials:
    """``pooled`` for a chain that all rows have, with the parts side by side."""
    rows, high, levels = queries.shape[0], 0, []
    for keys, _ in prefixes:
        low, high = high, high + keys[0].shape[-2]
        levels.append(Level(bounds_of([low] * rows, [high] * rows), high - low))
    pool = mx.concatenate([join(layer, *one) for one in prefixes], axis=-2)
    chain = chain_of([(0, rows)] * len(prefixes), rows)
    return pooled(layer, queries, pool, levels, chain, scale)


def pooled(
    layer: LayerAttention,
    queries: mx.array,
    pool: mx.array,
    levels: Sequence[Level],
    chain: mx.array,
    scale: float,
) -> Partials:
    """Attention of each row over its own prefixes in ``pool`` ``[1, kv heads, columns, words]``.

    ``chain``: which of the results, level after level with one for each row, each row has.
    """
    rotated = layer.scheme.keys.rotate(queries).astype(layer.dtype)
    kernels = kernels_of(layer)
    found = [
        kernels.attend_alone(rotated, pool, level.bounds, level.longest, scale) for level in levels
    ]
    if len(found) == 1:
        return Partials(*found[0], chain)
    scores, values = (mx.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return Partials(scores, values, chain)


def joined(
    layer: LayerAttention, found: Sequence[PartialAttention], chain: mx.array, dtype: mx.Dtype
) -> Partials:
    """Partial results one after the other, their scores as natural logarithms."""
    scores, values = ([getattr(one, name) for one in found] for name in ("score", "value"))
    score = scores[0] if len(found) == 1 else mx.concatenate(scores, axis=1)
    value = values[0] if len(found) == 1 else mx.concatenate(values, axis=1)
    unit = layer.backend.softmax(dtype).unit
    return Partials(score if unit == 1.0 else score / unit, value.astype(layer.dtype), chain)
