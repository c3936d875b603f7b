"""A prefix that several rows share, held once and attended once for all of them.

The layers that keep every token hold a row's own tokens only; what stands before them is the stem.
Its keys are multiplied with the queries of all its rows in one product, so that they are read once
and not once a row. Layers with a window or a state keep what they need of it in each row.

Stems grow on stems: what only some of a stem's rows have in common, after it, is a stem of theirs
whose ``parent`` it is. Rows read the whole chain of them, and each is held once.

Rows are attended in groups, of one stem and of like length. What several groups have in common is
attended once for the rows of all of them (``sum_up``), and each group takes what came of it like
one more token of its rows: attention over many tokens is attention over one, whose score is the
logarithm of the sum of their exponentials and whose value is what attention over them alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.paths import Path, scores_of, weighted
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.backends.cpu import softmax
from batchkv_worker.kv.backends.cpu.exp2 import powers_are_faster
from batchkv_worker.kv.backends.cuda import prefix_kernel as stem_kernel
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import Both

MAX_SCORES = 2**24  # numbers that may stand at once: 64 MiB in float32


@dataclass(slots=True, eq=False)
class Stem(PrefixPart):
    """A part of a chain with its arrays, by leaf of the model's caches.

    ``packed`` are as prefill reads them, ``slots`` as decode does; both of what comes after the
    parent.
    """

    packed: dict[int, Both] = field(kw_only=True)
    slots: dict[int, Both] = field(kw_only=True)

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds itself."""
        found = [*self.packed.values(), *self.slots.values()]
        return [array for both in found for parts in both for array in parts]


@dataclass(frozen=True, slots=True)
class Summary:
    """What one token of each row found in a stem, as if it were one token there.

    ``score`` is ``[kv heads, rows, lines, 1]`` in float32, ``value`` ``[kv heads, rows, lines,
    size]`` as stored; ``lines`` are the query heads that share a KV head.
    """

    score: mx.array
    value: mx.array

    def of(self, rows: slice) -> Summary:
        """What some of the rows found."""
        return Summary(self.score[:, rows], self.value[:, rows])


def sum_up(
    scheme: LayerScheme, dtype: mx.Dtype, queries: mx.array, shared: Both, scale: float
) -> Summary:
    """What ``queries`` ``[rows, heads, 1, size]`` find in one stem."""
    rows, heads, _, size = queries.shape
    few = max(1, MAX_SCORES // (heads * shared[0][0].shape[-2]))
    if rows > few:
        parts = [
            sum_up(scheme, dtype, queries[low : low + few], shared, scale)
            for low in range(0, rows, few)
        ]
        scores, found = zip(*((part.score, part.value) for part in parts), strict=True)
        return Summary(mx.concatenate(scores, axis=1), mx.concatenate(found, axis=1))
    kv_heads = scheme.shape.num_heads
    powers = powers_are_faster(queries.dtype)
    turned = scheme.keys.rotate(queries, scale * softmax.unit(powers=powers))
    together = _by_head(turned.reshape(rows, kv_heads, heads // kv_heads, size))
    scores = scores_of(False, scheme, dtype, together, shared[0])
    weights, total, score = softmax.weigh_alone(scores, powers=powers)
    value = weighted(False, scheme, dtype, weights, shared[1])
    if total is not None:
        value = value / total
    shape = (kv_heads, rows, heads // kv_heads, -1)
    return Summary(score.reshape(shape), value.reshape(shape))


def attend(
    path: Path | None,
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    shared: Sequence[Both],
    own: Both,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    before: Sequence[Summary] = (),
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, tokens, size]`` over what rows share and their own.

    ``shared`` has a chain of stems; of others, attended ``before``, there is what was found, for
    one token a row. ``mask`` says which of their own columns tokens see, ``[rows or 1, 1, tokens or
    1, columns]``; of the stems they see all. ``path`` is how a row's own part is read. Returns what
    ``attention.attend`` does.
    """
    rows, heads, num_tokens, size = queries.shape
    columns = sum(keys[0].shape[-2] for keys, _ in (*shared, own))
    few = max(1, MAX_SCORES // (rows * heads * columns))
    if num_tokens > few:
        # Scores stand in memory as a whole here: of as many tokens at once as is bearable.
        parts = [
            attend(
                *(path, scheme, dtype, queries[:, :, low : low + few], shared, own, scale),
                mask if mask is None or mask.shape[-2] == 1 else mask[..., low : low + few, :],
                sinks,
            )
            for low in range(0, num_tokens, few)
        ]
        return mx.concatenate(parts, axis=2)
    kv_heads = scheme.shape.num_heads
    lines = heads // kv_heads * num_tokens
    powers = powers_are_faster(queries.dtype)
    turned = scheme.keys.rotate(queries, scale * softmax.unit(powers=powers))
    turned = turned.reshape(rows, kv_heads, lines, size)
    together = _by_head(turned)
    far = [scores_of(False, scheme, dtype, together, keys) for keys, _ in shared]
    packed = path is not None and path.endswith("packed")
    layer = stem_kernel.Layer(scheme, lines, queries.dtype)
    if num_tokens == 1 and not packed and stem_kernel.is_chosen(layer):
        return _by_kernel(scheme, dtype, turned, far, shared, own, mask, sinks, before)
    near = scores_of(packed, scheme, dtype, turned, own[0])
    if mask is not None:
        split = near.reshape(rows, heads, num_tokens, near.shape[-1])
        near = softmax.hide(split, mask).reshape(near.shape)
    weights, total = _weigh(far, before, near, sinks, num_tokens, powers=powers)
    found = [
        weighted(False, scheme, dtype, of_stem, values).reshape(kv_heads, rows, lines, -1)
        for of_stem, (_, values) in zip(weights, shared, strict=False)
    ]
    of_tokens = weights[len(shared) : -1]
    found += [weight * one.value for weight, one in zip(of_tokens, before, strict=True)]
    out = sum(found[1:], found[0]).swapaxes(0, 1)
    out = out + weighted(packed, scheme, dtype, weights[-1], own[1])
    if total is not None:
        out = out / total
    return scheme.values.unrotate(out.reshape(rows, heads, num_tokens, scheme.shape.value_size))


def _by_kernel(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    far: list[mx.array],
    shared: Sequence[Both],
    own: Both,
    mask: mx.array | None,
    sinks: mx.array | None,
    before: Sequence[Summary],
) -> mx.array:
    """The rest of ``attend`` where one kernel weighs; ``queries`` are by KV head, and scaled."""
    rows, kv_heads, lines, _ = queries.shape
    keys, values = (
        tensor.unpack_stored(parts, dtype)
        for tensor, parts in ((scheme.keys, own[0]), (scheme.values, own[1]))
    )
    summaries = [(one.score, one.value) for one in before]
    out, weights = stem_kernel.weigh(queries, far, summaries, keys, values, mask, sinks)
    for of_stem, (_, stored) in zip(weights, shared, strict=True):
        out = mx.addmm(out, of_stem, scheme.values.unpack_stored(stored, dtype))
    out = out.reshape(kv_heads, rows, lines, -1).swapaxes(0, 1)
    return scheme.values.unrotate(out.reshape(rows, kv_heads * lines, 1, -1))


def _weigh(
    far: list[mx.array],
    before: Sequence[Summary],
    near: mx.array,
    sinks: mx.array | None,
    num_tokens: int,
    *,
    powers: bool,
) -> tuple[list[mx.array], mx.array | None]:
    """Weights of the stems', the summaries' and the rows' own scores, each in its scores' shape.

    ``far`` are ``[1, kv heads, rows * lines, columns]``, ``near`` ``[rows, kv heads, lines,
    columns]``. Put together heads first, the large parts are copied once. With them what the
    weighted values are to be divided by, ``[rows, kv heads, lines, 1]``, or None.
    """
    rows, kv_heads, lines, _ = near.shape
    if sinks is not None:
        sinks = mx.repeat(sinks, num_tokens).reshape(kv_heads, 1, lines, 1)
    parts = [part.reshape(kv_heads, rows, lines, part.shape[-1]) for part in far]
    parts += [one.score for one in before]
    weights, total = softmax.weigh([*parts, near.swapaxes(0, 1)], sinks, powers=powers)
    if before:  # their scores are in float32, and so is what was weighed with them
        weights = [part.astype(near.dtype) for part in weights]
    weights[: len(far)] = [
        part.reshape(scores.shape) for part, scores in zip(weights, far, strict=False)
    ]
    weights[-1] = weights[-1].swapaxes(0, 1)
    return weights, None if total is None else total.swapaxes(0, 1)


def _by_head(x: mx.array) -> mx.array:
    """``[rows, kv heads, lines, size]`` as ``[1, kv heads, rows * lines, size]``."""
    rows, kv_heads, lines, size = x.shape
    return x.swapaxes(0, 1).reshape(1, kv_heads, rows * lines, size)
