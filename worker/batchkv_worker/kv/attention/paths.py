"""Attention over the keys and values of one layer: the ways to compute it, and the hook.

mlx-lm's models call one function, ``models.base.scaled_dot_product_attention``, by the name that
each model's module imported. ``install_hook`` rebinds that name in the modules of one loaded model
to a function that lets the cache compute attention if it can, and else calls the original. A path:

``fused``   dequantize, then the backend's attention over dense arrays
``folded``  dequantize, then two plain matmuls in which the query heads that share a KV head are the
            rows of one product, so that keys and values are read once for all of them
``packed``  the same two products as quantized matmuls on the packed parts
``kernel``  a kernel of ours that reads of each row its own columns; slots keep records instead of
            parts (``attention.records``)
``spread-`` before any of them: slots keep 3-bit codes so that they are soon made into 4-bit ones,
            and are read as such (``schemes.turbo.TurboSlots``); only for schemes with such codes

The available paths and the fastest one differ by backend and scheme, so ``start.probe`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx_lm.models import base

from batchkv_worker.kv.backends.contract import Backend, RecordKernels, Softmax
from batchkv_worker.kv.backends.rebind import binds, rebind
from batchkv_worker.kv.backends.softmax import hide
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import PackedKV, Parts

Path = Literal[
    "fused", "folded", "packed", "spread-fused", "spread-folded", "spread-packed", "kernel"
]

# queries, scale, mask, sinks
Attend = Callable[[mx.array, float, Any, "mx.array | None"], mx.array]

_NAME = "scaled_dot_product_attention"
_original = base.scaled_dot_product_attention
_SPREAD = "spread-"


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replaces mlx-lm's function, with the same arguments and result.

    A cache with an ``attend`` method computes attention itself, if keys, values and mask are the
    arrays that it returned. Latent attention, for example, passes other values and a mask with
    scores.
    """
    attend = getattr(cache, "attend", None)
    if attend is not None:
        if cache.handed_out(keys, values, mask):
            return attend(queries, scale, mask, sinks)
        keys, values = cache.dense(keys, values)
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def can_hook(model: Any) -> bool:
    """Whether any module that defines ``model`` calls the function by its name."""
    return binds(model, _NAME, [_original, attention])


def install_hook(model: Any) -> bool:
    """Rebind the function in the modules that define ``model``; False when none uses it.

    This is never undone: for other caches the function calls the original.
    """
    return rebind(model, _NAME, _original, attention)


def paths_of(
    scheme: LayerScheme, *, spreads: bool = True, kernel: bool = False
) -> tuple[Path, ...]:
    """The paths that differ under ``scheme``.

    Without ``spreads``, those that do not spread; ``kernel``: the kernel's, too.
    """
    return tuple(
        path
        for path in get_args(Path)
        if ((spreads and scheme.can_spread) or not _spreads(path))
        and (scheme.is_packed or not path.endswith("packed"))
        and (kernel or path != "kernel")
    )


def in_slots(scheme: LayerScheme, path: Path | None) -> LayerScheme:
    """The scheme of decode slots that ``path`` can read; records have that of pieces."""
    if path == "kernel":
        return scheme
    return scheme.in_slots(spread=path is not None and _spreads(path))


def _spreads(path: Path) -> bool:
    return path.startswith(_SPREAD)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends to packed keys and values.

    ``scheme``: of the given parts, in decode that of ``in_slots``. ``dtype``: of dense copies.
    ``has_fused``: whether the fused path is right on this device. ``records``: the kernels of the
    path ``kernel``.
    """

    backend: Backend
    scheme: LayerScheme
    dtype: mx.Dtype
    path: Path = "fused"
    has_fused: bool = True
    records: RecordKernels | None = None

    @property
    def is_packed(self) -> bool:
        """Whether it reads a row's own keys and values packed."""
        return self.path.endswith("packed")

    @property
    def is_fused(self) -> bool:
        """Whether it leaves attention to the backend, on dense copies."""
        return self.path.endswith("fused")

    def softmax(self, queries: mx.array) -> Softmax:
        """How scores of these queries are weighed."""
        return self.backend.softmax(queries.dtype)

    def reads_whole(self, visible: int, stored: int) -> bool:
        """Whether to ``dequantize`` whole buffers of ``stored`` cells, and slice the dense result.

        Else the ``visible`` cells are sliced, and read as the path does.
        """
        if self.is_packed or self.records is not None or not self.scheme.is_packed:
            return False
        return self.backend.reads_whole(visible, stored)

    def dequantize(self, packed: PackedKV) -> PackedKV:
        """Dense keys and values in the basis of storage, as ``dequantized`` reads them."""
        keys, values = packed
        dense_keys = self.scheme.keys.unpack_stored(keys, self.dtype)
        return (dense_keys,), (self.scheme.values.unpack_stored(values, self.dtype),)

    @property
    def dequantized(self) -> LayerAttention:
        """The same for keys and values that ``dequantize`` gave, or slices of them."""
        return replace(self, scheme=self.scheme.dequantized)

    def without_mask(self) -> LayerAttention:
        """For rows of the same slots that need no mask, where a path won with one.

        A fused kernel has no equal then, where it is right.
        """
        if not self.has_fused:
            return self
        return replace(self, path="spread-fused" if _spreads(self.path) else "fused")


def attend(
    layer: LayerAttention,
    queries: mx.array,
    keys: Parts,
    values: Parts,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, tokens, size]`` over packed keys and values.

    It is computed in the basis in which they are stored: the queries are rotated into that of the
    keys, the result out of that of the values. ``folded`` and ``packed`` take one token a row.
    """
    scheme = layer.scheme
    if layer.is_fused:
        out = layer.backend.attention(
            scheme.keys.rotate(queries),
            scheme.keys.unpack_stored(keys, layer.dtype),
            scheme.values.unpack_stored(values, layer.dtype),
            scale,
            mask,
            sinks,
        )
    else:
        out = _two_products(layer, queries, keys, values, scale, mask, sinks)
    return scheme.values.unrotate(out)


def _two_products(
    layer: LayerAttention,
    queries: mx.array,
    keys: Parts,
    values: Parts,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Query heads that share a KV head are the rows of one product, so that it is read once.

    The scale comes with the rotation of the queries, if there is one: a kernel less.
    """
    rows, heads, _, size = queries.shape
    scheme, softmax = layer.scheme, layer.softmax(queries)
    kv_heads = scheme.shape.num_heads
    rotated = scheme.keys.rotate(queries, scale * softmax.unit)
    folded = rotated.reshape(rows, kv_heads, heads // kv_heads, size)
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, heads // kv_heads, 1)
    scores = scores_of(layer, folded, keys, packed=layer.is_packed)
    if mask is not None:
        scores = hide(scores, mask)
    (weights,), total = softmax.weigh([scores], sinks)
    out = weighted_values(layer, weights, values, packed=layer.is_packed)
    if total is not None:
        out = out / total
    return out.reshape(rows, heads, 1, scheme.shape.value_size)


def scores_of(
    layer: LayerAttention, queries: mx.array, keys: Parts, *, packed: bool = False
) -> mx.array:
    """Products ``[..., lines, columns]`` of rotated queries with keys, read packed or dense."""
    if packed:
        return layer.scheme.keys.times(queries, keys, transpose=True)
    return queries @ layer.scheme.keys.unpack_stored(keys, layer.dtype).swapaxes(-1, -2)


def weighted_values(
    layer: LayerAttention, weights: mx.array, values: Parts, *, packed: bool = False
) -> mx.array:
    """Sums ``[..., lines, size]`` of values, read packed or dense, in the basis of storage."""
    if packed:
        return layer.scheme.values.times(weights, values, transpose=False)
    return weights @ layer.scheme.values.unpack_stored(values, layer.dtype)


def num_query_heads(model: Any, default: int) -> int:
    """Query heads of the model's attention; ``default`` when its arguments do not say."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)  # of a model that also sees
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else getattr(text, "__dict__", {})
    value: Any = getattr(args, "num_attention_heads", None) or inner.get("num_attention_heads")
    if isinstance(value, Sequence):
        value = value[0]
    return int(value) if isinstance(value, int) and value % default == 0 else default
