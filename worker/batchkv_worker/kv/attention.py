"""Attention for decode: the paths there are, the hook that lets a cache answer, the probe.

mlx-lm's models call one function, ``models.base.scaled_dot_product_attention``, by the name that
each model's module imported. ``install_hook`` rebinds that name in the modules of one loaded model
to a function which asks the cache first and otherwise does what the original does. A path:

``fused``   dequantize, then MLX's fused kernel (the original function; needs no hook)
``folded``  dequantize, then two plain matmuls in which the query heads that share a KV head are the
            rows of one product, so that keys and values are read once for all of them
``packed``  the same two products as quantized matmuls on the packed parts

Which is fastest, or exists at all, differs by backend and scheme, so ``choose_path`` measures.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import base

from batchkv_worker.kv.schemes import LayerScheme, Parts

Path = Literal["fused", "folded", "packed"]

log = logging.getLogger("batchkv.engine")

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
    that it handed out and the model asks for nothing that it does not know (attention sinks).
    Latent attention, for one, passes other values and a mask with scores in it.
    """
    attend = getattr(cache, "attend", None)
    if attend is not None and sinks is None and cache.handed_out(keys, values, mask):
        return attend(queries, scale, mask)
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install_hook(model: Any) -> bool:
    """Rebind the function in the modules that define ``model``; False when none uses it."""
    found = False
    for module_name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, _NAME, None) in (_original, attention):
            setattr(module, _NAME, attention)
            found = True
    return found


def folded(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Attention of one query token a row, ``[rows, heads, 1, size]``, over dense keys, values."""
    rows, heads, _, size = queries.shape
    kv_heads = keys.shape[1]
    folded_queries = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, size)
    weights = _softmax(folded_queries @ keys.swapaxes(-1, -2), mask)
    return (weights @ values).reshape(rows, heads, 1, values.shape[-1])


def packed(
    queries: mx.array,
    keys: Parts,
    values: Parts,
    scheme: LayerScheme,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """``folded`` on packed parts: the products dequantize as they read."""
    rows, heads, _, size = queries.shape
    kv_heads = scheme.shape.num_heads
    folded_queries = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, size)
    scores = _times(folded_queries, keys, scheme.keys, transpose=True)
    out = _times(_softmax(scores, mask), values, scheme.values, transpose=False)
    return out.reshape(rows, heads, 1, scheme.shape.value_size)


def _times(left: mx.array, parts: Parts, scheme: Any, *, transpose: bool) -> mx.array:
    if not scheme.is_packed:
        right = parts[0]
        return left @ (right.swapaxes(-1, -2) if transpose else right)
    return mx.quantized_matmul(
        left, *parts, transpose=transpose, group_size=scheme.group, bits=scheme.bits
    )


def _softmax(scores: mx.array, mask: mx.array | None) -> mx.array:
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.softmax(scores, axis=-1, precise=True)


def decide(
    model: Any, scheme: LayerScheme, dtype: mx.Dtype, num_rows: int, wanted: Path | None = None
) -> Path:
    """Hook ``model`` and say which path its slots take: ``wanted``, else the fastest measured.

    A model that cannot be hooked decodes on dense keys and values, and the log says so.
    """
    if not install_hook(model):
        log.warning("this model's attention cannot be hooked; decoding on dense keys and values")
        return "fused"
    if wanted is not None:
        return wanted
    heads = num_query_heads(model, scheme.shape.num_heads)
    path, times = choose_path(scheme, heads, dtype, num_rows=num_rows, num_tokens=512)
    measured = ", ".join(f"{name} {spent:.2f} ms" for name, spent in times.items())
    log.info("decode attention: %s for %s keys (%s)", path, scheme.keys, measured)
    return path


def choose_path(
    scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, *, num_rows: int, num_tokens: int
) -> tuple[Path, dict[str, float]]:
    """The fastest path on this device for such a layer, and the time of each in milliseconds.

    A path that this backend refuses is left out.
    """
    shape = scheme.shape
    keys, values = (
        mx.random.normal((num_rows, shape.num_heads, num_tokens, size)).astype(dtype)
        for size in (shape.key_size, shape.value_size)
    )
    queries = mx.random.normal((num_rows, num_query_heads, 1, shape.key_size)).astype(dtype)
    mask = mx.arange(num_tokens) >= mx.arange(num_rows).reshape(-1, 1, 1, 1)
    key_parts, value_parts = scheme.keys.pack(keys), scheme.values.pack(values)
    mx.eval(queries, mask, key_parts, value_parts)

    def dense() -> tuple[mx.array, mx.array]:
        return scheme.keys.unpack(key_parts), scheme.values.unpack(value_parts)

    candidates: dict[Path, Callable[[], mx.array]] = {
        "fused": lambda: mx.fast.scaled_dot_product_attention(
            queries, *dense(), scale=1.0, mask=mask
        ),
        "folded": lambda: folded(queries, *dense(), 1.0, mask),
    }
    if scheme.is_packed:
        candidates["packed"] = lambda: packed(queries, key_parts, value_parts, scheme, 1.0, mask)
    times = {name: spent for name, run in candidates.items() if (spent := _time(run)) is not None}
    fastest = min(times, key=lambda name: times[name])
    return fastest, {str(name): spent for name, spent in times.items()}


def _time(run: Callable[[], mx.array], repeats: int = 5) -> float | None:
    try:
        mx.eval(run())
        spent: list[float] = []
        for _ in range(repeats):
            begin = time.perf_counter()
            mx.eval(run())
            spent.append(time.perf_counter() - begin)
    except (ValueError, RuntimeError):  # what MLX raises for a kernel that a backend lacks
        return None
    return sorted(spent)[repeats // 2] * 1e3


def num_query_heads(model: Any, default: int) -> int:
    """Query heads of the model's attention; ``default`` when its arguments do not say."""
    args = getattr(model, "args", None)
    value: Any = getattr(args, "num_attention_heads", default)
    return int(value[0] if isinstance(value, Sequence) else value)
