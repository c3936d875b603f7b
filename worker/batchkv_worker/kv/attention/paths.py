"""Attention for decode: the paths there are, the hook that lets a cache answer, the probe.

mlx-lm's models call one function, ``models.base.scaled_dot_product_attention``, by the name that
each model's module imported. ``install_hook`` rebinds that name in the modules of one loaded model
to a function which asks the cache first and otherwise does what the original does. A path:

``fused``   dequantize, then MLX's fused kernel
``folded``  dequantize, then two plain matmuls in which the query heads that share a KV head are the
            rows of one product, so that keys and values are read once for all of them
``packed``  the same two products as quantized matmuls on the packed parts
``spread-`` before any of them: slots keep 3-bit codes so that they are soon made into 4-bit ones,
            and read as such (``TurboSlots``); only for schemes that have such codes

Which is fastest, or exists at all, differs by backend and scheme, so ``probe`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx_lm.models import base

from batchkv_worker.kv.backends.cpu import causal_tiles as triangles
from batchkv_worker.kv.backends.cpu import softmax
from batchkv_worker.kv.backends.cpu.exp2 import powers_are_faster
from batchkv_worker.kv.backends.rebind import rebind
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import Parts

Path = Literal["fused", "folded", "packed", "spread-fused", "spread-folded", "spread-packed"]

# queries, scale, mask, sinks
Attend = Callable[[mx.array, float, Any, "mx.array | None"], mx.array]

_NAME = "scaled_dot_product_attention"
_original = base.scaled_dot_product_attention


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands where mlx-lm's function stood: same arguments, same result.

    A cache with an ``attend`` method answers itself, if keys, values and mask are the very ones
    that it handed out. Latent attention, for one, passes other values and a mask with scores in it.
    """
    attend = getattr(cache, "attend", None)
    if attend is not None and cache.handed_out(keys, values, mask):
        return attend(queries, scale, mask, sinks)
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install_hook(model: Any) -> bool:
    """Rebind the function in the modules that define ``model``; False when none uses it."""
    return rebind(model, _NAME, _original, attention)


def paths_of(scheme: LayerScheme) -> tuple[Path, ...]:
    """The paths that differ under ``scheme``."""
    return tuple(
        path
        for path in get_args(Path)
        if (scheme.can_spread or not _spreads(path))
        and (scheme.is_packed or not path.endswith("packed"))
    )


def in_slots(scheme: LayerScheme, path: Path | None) -> LayerScheme:
    """The scheme of what decode slots keep so that ``path`` can read it."""
    return scheme.in_slots(spread=path is not None and _spreads(path))


def without_mask(path: Path) -> Path:
    """The path of the same slots for rows that need no mask, where ``path`` won with one.

    Only where shapes are rounded, that is on CUDA: its fused kernel has no equal then.
    """
    return "spread-fused" if _spreads(path) else "fused"


def _spreads(path: Path) -> bool:
    return path.startswith("spread-")


def attend(
    path: Path,
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    keys: Parts,
    values: Parts,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, tokens, size]`` over packed keys and values.

    It is computed in the basis in which they are stored: the queries are rotated into that of the
    keys, the result out of that of the values. ``scheme`` is of the parts as they are given: in
    decode that of ``in_slots``. ``dtype`` is what dense copies have. ``folded`` and ``packed`` take
    one token a row.
    """
    if path.endswith("fused"):
        out = _fused(
            scheme.keys.rotate(queries),
            scheme.keys.unpack_stored(keys, dtype),
            scheme.values.unpack_stored(values, dtype),
            scale,
            mask,
            sinks,
        )
    else:
        out = _two_products(
            path.endswith("packed"), scheme, dtype, queries, keys, values, scale, mask, sinks
        )
    return scheme.values.unrotate(out)


def _fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """MLX's own attention; of a triangle only little more than is seen, where MLX computes all."""
    if isinstance(mask, str) and triangles.are_cut():
        return triangles.attend(queries, keys, values, scale, sinks)
    attention = mx.fast.scaled_dot_product_attention
    return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _two_products(
    packed: bool,
    scheme: LayerScheme,
    dtype: mx.Dtype,
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
    kv_heads = scheme.shape.num_heads
    powers = powers_are_faster(queries.dtype)
    turned = scheme.keys.rotate(queries, scale * softmax.unit(powers=powers))
    folded = turned.reshape(rows, kv_heads, heads // kv_heads, size)
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, heads // kv_heads, 1)
    scores = scores_of(packed, scheme, dtype, folded, keys)
    if mask is not None:
        scores = softmax.hide(scores, mask)
    (weights,), total = softmax.weigh([scores], sinks, powers=powers)
    out = weighted(packed, scheme, dtype, weights, values)
    if total is not None:
        out = out / total
    return out.reshape(rows, heads, 1, scheme.shape.value_size)


def scores_of(
    packed: bool, scheme: LayerScheme, dtype: mx.Dtype, queries: mx.array, keys: Parts
) -> mx.array:
    """Products ``[..., lines, columns]`` of rotated queries with keys, read packed or dense."""
    if packed:
        return scheme.keys.times(queries, keys, transpose=True)
    return queries @ scheme.keys.unpack_stored(keys, dtype).swapaxes(-1, -2)


def weighted(
    packed: bool, scheme: LayerScheme, dtype: mx.Dtype, weights: mx.array, values: Parts
) -> mx.array:
    """Sums ``[..., lines, size]`` of values, read packed or dense, in the basis of storage."""
    if packed:
        return scheme.values.times(weights, values, transpose=False)
    return weights @ scheme.values.unpack_stored(values, dtype)


def num_query_heads(model: Any, default: int) -> int:
    """Query heads of the model's attention; ``default`` when its arguments do not say."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)  # of a model that also sees
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else getattr(text, "__dict__", {})
    value: Any = getattr(args, "num_attention_heads", None) or inner.get("num_attention_heads")
    if isinstance(value, Sequence):
        value = value[0]
    return int(value) if isinstance(value, int) and value % default == 0 else default
