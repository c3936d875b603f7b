"""What the launching thread computes before there are rows, so that the first ones need not wait.

MLX plans attention on CUDA for each shape, and each thread has plans of its own. The first product
and the first attention of a thread load libraries, too. To read a model's weights takes longer than
all of this. So where a thread launches, it exists before they are read, and meanwhile it attends to
zeros in the shapes that chunks of prompts usually have.

MLX finds a plan by the device, the dtype, the shapes and strides of queries, keys and values, and
the kind of mask (``build_sdpa_cache_key`` in its ``cuda/scaled_dot_product_attention.cpp``), but
not by the stream or the scale. Chunks mostly have all three in one piece: pads, rotated heads,
unpacked numbers, and prefixes joined with what follows are arrays of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Backend, Early
from batchkv_worker.kv.backends.generic import largest_power
from batchkv_worker.kv.backends.launching import Beside, Launches, choose

log = logging.getLogger("batchkv.engine")

FREE_SLOTS = (64, 32, 16, 8)  # for which groups of prompts are formed
# Rows of a group behind a prefix at most, and how often: chunks are mostly full.
BEHIND = {64: 8, 32: 4, 16: 2, 8: 1, 4: 1, 2: 1}
PROMPTS = range(32, 8193, 16)  # tokens of the longest prompt of a group
PREFIXES = range(128, 2049, 32)  # tokens of a shared prefix
OWN = range(16, 257, 8)  # tokens of the longest prompt of a group after it
MOST_BEHIND = 192  # shapes of chunks behind prefixes: MLX takes 10 s or more to plan so many
PRODUCT = 256  # rows and columns of a small product


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention, and the numbers in each."""

    of_queries: int
    of_keys: int
    size: int


def heads_of(model: Any) -> Heads | None:
    """By the model's arguments; None where they do not say."""
    args = getattr(model, "args", None)
    heads, kv_heads = (_count(args, f"num_{name}_heads") for name in ("attention", "key_value"))
    if not heads or not kv_heads:
        return None
    size = _count(args, "head_dim") or _count(args, "hidden_size") // heads
    return Heads(heads, kv_heads, size) if size else None


def _count(args: Any, name: str) -> int:
    value = getattr(args, name, None)
    return value if isinstance(value, int) and value > 0 else 0


def chunk_shapes(backend: Backend, numbers: int) -> list[tuple[int, int]]:
    """Rows and tokens of attention in the first chunks of prompts, the most usual shapes first.

    ``numbers``: of a token's keys. Prompts of 100 to 200 tokens count as those of 1,000 to 2,000.
    """
    found: dict[tuple[int, int], float] = {}
    for chunk in (backend.usual_chunk, backend.largest_chunk):
        for free in FREE_SLOTS:
            for tokens in PROMPTS:
                rows = max(1, min(free, chunk // tokens))
                width = min(chunk, backend.padded_width(tokens))
                padded, more = backend.padded_chunk(rows, width, width, numbers)
                shape = padded, width + more
                found[shape] = found.get(shape, 0.0) + 1 / tokens
    return sorted(found, key=lambda shape: -found[shape])


def shapes_behind(backend: Backend, numbers: int) -> list[tuple[int, int, int]]:
    """Rows, queries and columns of attention in chunks behind a shared prefix, in the same way.

    At most MOST_BEHIND. A prefix of twice as many tokens counts half, and so does a prompt that has
    twice as many tokens after its prefix. Chunks that are too large are computed in parts.
    """
    found: dict[tuple[int, int, int], float] = {}
    for most, often in BEHIND.items():
        for own in OWN:
            rows = max(1, min(most, backend.usual_chunk // own))
            width = backend.padded_width(own)
            for prefix in PREFIXES:
                columns = prefix + width
                part = largest_power(backend.most_joined // (2 * numbers * columns))
                shape = backend.attended_shape(min(rows, part), width, columns, numbers)
                found[shape] = found.get(shape, 0.0) + often / (own * prefix)
    return sorted(found, key=lambda shape: -found[shape])[:MOST_BEHIND]


def works_for(backend: Backend, model: Any, dtype: mx.Dtype) -> list[Callable[[], None]]:
    """What a thread that launches computes beforehand for a model of ``dtype``.

    Nothing where its attention is none that MLX plans.
    """
    heads = heads_of(model)
    if heads is None or not backend.plans_attention(dtype, heads.size):
        return []
    numbers = heads.of_keys * heads.size
    shapes = [(rows, tokens, tokens) for rows, tokens in chunk_shapes(backend, numbers)]
    shapes += shapes_behind(backend, numbers)
    return [partial(_multiply, dtype), *(partial(_attend, heads, dtype, *one) for one in shapes)]


def _multiply(dtype: mx.Dtype) -> None:
    one = mx.zeros((PRODUCT, PRODUCT), dtype)
    mx.eval(one @ one.T)


def _attend(heads: Heads, dtype: mx.Dtype, rows: int, tokens: int, columns: int) -> None:
    queries = mx.zeros((rows, heads.of_queries, tokens, heads.size), dtype)
    keys, values = (mx.zeros((rows, heads.of_keys, columns, heads.size), dtype) for _ in range(2))
    scale = heads.size**-0.5
    attention = mx.fast.scaled_dot_product_attention
    mx.eval(attention(queries, keys, values, scale=scale, mask="causal"))


class EarlyLaunches:
    """What launches for a worker's first engine, before that is built.

    It is there only where the ``backend`` wants a thread for it and the model's attention is known.
    All calls come from the engine's thread, whose default stream the other one gets. What the
    backend compiles early begins and ends with it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._launches: Beside | None = None
        self._compiled: Early | None = None

    def begin(self, model: Any, dtype: mx.Dtype) -> None:
        """Start the thread. The weights of ``dtype`` are read next. This raises nothing."""
        try:
            self._compiled = self._backend.compile_early(model, dtype)
        except Exception as fault:  # noqa: BLE001 - rows can wait for it
            log.warning("MLX compiles no products with packed weights before rows come: %s", fault)
        if not self._backend.launches_beside:
            return
        try:
            if works := works_for(self._backend, model, dtype):
                launches = choose(is_beside=True)
                if isinstance(launches, Beside):
                    launches.warm_up(works)
                    self._launches = launches
        except Exception as fault:  # noqa: BLE001 - a start does without it
            log.debug("nothing is launched before the weights are read: %s", fault)

    def end_warm_up(self, report: Callable[[str], object]) -> None:
        """The weights are there, and choices are measured next: nothing else may compute.

        ``report`` gets what takes long here.
        """
        if self._launches is not None:
            self._launches.end_warm_up()
        if self._compiled is not None:
            self._compiled.wait(report)

    def take(self, *, is_wanted: bool) -> Launches | None:
        """The launches, if they are there, for an engine that closes them. Else they close."""
        if not is_wanted:
            self.close()
        launches, self._launches = self._launches, None
        return launches

    def close(self) -> None:
        """Leave the thread to others if no engine has taken it, and end what is compiled."""
        if self._compiled is not None:
            self._compiled.close()
        launches, self._launches = self._launches, None
        if launches is not None:
            launches.close()
