"""Layers that normalize queries and keys and then turn them, for which one kernel is faster."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.gpu.fused_linear import Groups, folder_of
from batchkv_worker.kv.backends.rebind import watched
from batchkv_worker.kv.backends.timing import gain
from batchkv_worker.kv.kernels.compiled_launch import CompiledLaunch
from batchkv_worker.kv.kernels.launch import Input, Launch, View
from batchkv_worker.kv.kernels.rotary import RotaryKernel, Turn

log = logging.getLogger("batchkv.engine")

OF_ATTENTION = 3  # linear layers that may be multiplied at once: queries, keys and values
_MARGIN = 1.1  # by which one kernel has to be faster
_TIMES = 8  # layers that are timed together
_MOST_TOKENS = 30_000  # before a token whose results are compared

Names = tuple[str, str, str]  # of the queries' norm, of the keys', and of the positions


def faster_layers(model: Any, rows: int, launch: Launch, groups: Groups) -> tuple[Names, ...]:
    """The layers for which one kernel is faster in steps of ``rows`` rows.

    ``groups`` are the linear layers that will be multiplied at once.
    """
    names = {id(module): name for name, module in model.named_modules()}
    joint = {folder_of(group[0]) for group in groups if len(group) == OF_ATTENTION}
    faster: dict[_Shape, bool] = {}
    layers = []
    for one in _found_in(model):
        query = names[id(one.norms[0])]
        shape = replace(one.shape, is_joint=folder_of(query) in joint)
        if shape not in faster:
            faster[shape] = _is_faster(shape, rows, launch)
        if faster[shape]:
            layers.append((query, names[id(one.norms[1])], names[id(one.rope)]))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a layer's time depends on. ``is_joint``: one product gives queries, keys and values."""

    heads: int
    kv_heads: int
    turn: Turn
    dtype: mx.Dtype
    is_joint: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    norms: tuple[Any, Any]
    rope: Any
    shape: _Shape


def _found_in(model: Any) -> Iterator[_Found]:
    """Layers that call two norms, and then one module for both of their results' positions."""
    calls: list[tuple[Any, _Input]] = []

    def note(layer: Any, x: mx.array) -> None:
        calls.append((layer, _Input(x.shape, x.dtype)))

    with watched(model, (nn.RMSNorm, nn.RoPE), note):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    times = Counter(id(module) for module, _ in calls)
    for place in range(len(calls) - 3):
        (query, q), (key, k), (rope, x), (again, y) = calls[place : place + 4]
        is_pattern = (
            [type(one) for one in (query, key, rope)] == [nn.RMSNorm, nn.RMSNorm, nn.RoPE]
            and again is rope
            and (times[id(query)], times[id(key)], times[id(rope)]) == (1, 1, 2)
        )
        if not is_pattern or {len(one.shape) for one in (q, k, x, y)} != {4}:
            continue
        if not q.dtype == k.dtype == query.weight.dtype == key.weight.dtype:
            continue
        try:
            turn = turn_of((query, key), rope)
        except ValueError as reason:
            log.debug("%s", reason)
            continue
        heads, size = q.shape[2:]
        if x.shape == (1, heads, 1, size) and y.shape == (1, k.shape[2], 1, size):
            yield _Found((query, key), rope, _Shape(heads, k.shape[2], turn, q.dtype))


def turn_of(norms: tuple[Any, Any], rope: Any) -> Turn:
    """ValueError where there is no kernel for it."""
    sizes = {int(norm.weight.size) for norm in norms}
    if len(sizes) != 1 or rope.dims % 2:
        raise ValueError("no kernel for heads of unequal size")
    return Turn(sizes.pop(), rope.dims // 2, bool(rope.traditional), (norms[0].eps, norms[1].eps))


def frequencies_of(rope: Any) -> mx.array:
    """Radians a position, of each pair, rounded as ``mx.fast.rope`` rounds them on GPUs."""
    count = rope.dims // 2
    powers = mx.arange(count, dtype=mx.float32) / count * math.log2(rope.base)
    return rope.scale * mx.power(2.0, -powers)


@dataclass(frozen=True, slots=True)
class _Input:
    """What is noted of an array."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


def _is_faster(shape: _Shape, rows: int, launch: Launch) -> bool:
    """Whether the kernel is faster for a step of so many rows, and gives the same results.

    Steps are replayed, so what they take to be built does not count. Where one product gives the
    values, too, and kernels copy such parts, only the kernel knows where the values are.
    """
    turn = shape.turn
    norms = tuple(nn.RMSNorm(turn.size, epsilon) for epsilon in turn.epsilons)
    for norm in norms:
        norm.set_dtype(shape.dtype)
    rope = nn.RoPE(2 * turn.turned, traditional=turn.neighbours)
    weights = norms[0].weight, norms[1].weight
    kernel, frequencies = RotaryKernel(launch), frequencies_of(rope)
    offsets = mx.arange(rows, dtype=mx.int32) * (_MOST_TOKENS // rows)
    counts = [shape.heads, shape.kv_heads, shape.kv_heads]
    ends = [count * turn.size for count in accumulate(counts)]
    whole = mx.random.normal((rows, 1, ends[-1])).astype(shape.dtype)
    parts = mx.split(whole, ends[:-1], axis=-1)
    if not shape.is_joint:
        parts = [mx.contiguous(one) for one in parts]
    given = [
        one.reshape(rows, 1, count, turn.size) for one, count in zip(parts, counts, strict=True)
    ]
    copies = shape.is_joint and isinstance(launch, CompiledLaunch)
    mx.eval(weights, frequencies, offsets, whole, given)

    def apart() -> Sequence[mx.array]:
        pairs = zip(norms, given, strict=False)
        turned = [rope(norm(x).transpose(0, 2, 1, 3), offset=offsets) for norm, x in pairs]
        return [*turned, mx.contiguous(given[-1])] if copies else turned

    def at_once() -> Sequence[mx.array]:
        inputs: list[Input] = [*given[:2]]
        if shape.is_joint:
            strides = ends[-1], ends[-1], turn.size, 1
            starts = zip(given, (0, ends[0]), strict=False)
            inputs = [View(one, whole, start, strides) for one, start in starts]
        return kernel(turn, inputs[0], inputs[1], weights, frequencies, offsets)

    won = gain(apart, at_once, times=_TIMES, is_built=True)
    log.debug("norms and positions are %.2f times as fast by one kernel", won)
    return won > _MARGIN and all(are_close(*both) for both in zip(apart(), at_once(), strict=False))
