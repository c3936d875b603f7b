"""The graph of a decode step, primitive by primitive, and what Metal's pool makes of its sizes.

Nothing is computed: MLX exports the primitives of a function with the shapes of their inputs and
outputs. The pool follows MLX's ``backend/common/buffer_cache.h`` and ``backend/metal/allocator``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.decode import DecodeSlots

Shape = tuple[int, ...]
PAGE_BYTES = 16_384
LAYERS_IN_FLIGHT = 3  # whose buffers the device still holds when the next layer allocates its own
# Primitives that give another view of their input, or write into it.
_VIEWS = {"Slice", "Reshape", "Broadcast", "Transpose", "ExpandDims", "Squeeze", "Flatten"}
_VIEWS |= {"Unflatten", "SliceUpdate"}
_CONSTANTS = {"Full", "Arange"}  # small, or made once


@dataclass(frozen=True, slots=True)
class Array:
    """An array of a traced graph."""

    name: str
    shape: Shape
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """A primitive of a traced graph."""

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]

    @property
    def shapes(self) -> tuple[str, tuple[Shape, ...], tuple[Shape, ...]]:
        """Its name, and the shapes of what goes in and comes out."""
        inputs, outputs = (tuple(a.shape for a in side) for side in (self.inputs, self.outputs))
        return self.name, inputs, outputs


def trace(build: Callable[[], Sequence[mx.array]]) -> list[Node]:
    """The primitives of the arrays that ``build`` returns."""
    found: list[Node] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            inputs, outputs = (
                tuple(Array(name, shape, dtype.size) for name, shape, dtype in event[side])
                for side in ("inputs", "outputs")
            )
            found.append(Node(event["name"], inputs, outputs))

    mx.disable_compile()  # MLX does not export what it has compiled
    try:
        mx.export_function(note, lambda _: tuple(build()), mx.array(0))
    finally:
        mx.enable_compile()
    return found


def trace_step(slots: DecodeSlots, run: Callable[[int], Sequence[mx.array]]) -> list[Node]:
    """One decode step, for which ``run`` builds the model's part of so many rows.

    The layouts move on by a step. The buffers keep their arrays, so what they hold is wrong then.
    """
    slots.make_room(None)
    mx.eval(slots.arrays)
    layers = [layer for layer in slots.layers if isinstance(layer, AttentionSlots)]
    assert len(layers) == len(slots.layers)
    kept = [(list(layer._keys), list(layer._values)) for layer in layers]

    def build() -> list[mx.array]:
        view = slots.begin_step()
        out = run(view.num_rows)
        slots.end_step()
        return [*out, *slots.arrays]

    nodes = trace(build)
    for layer, (keys, values) in zip(layers, kept, strict=True):
        layer._keys, layer._values = keys, values
    return nodes


def allocations(nodes: Iterable[Node]) -> list[int]:
    """Bytes of each buffer that Metal needs for a graph, the slots' own left out.

    A quantized product stands for ``mx.dequantize`` (``one_kernel``): a kernel that copies what
    does not lie in one piece.
    """
    scattered: set[str] = set()
    found = []
    for node in nodes:
        if node.name in _CONSTANTS:
            continue
        if node.name == "QuantizedMatmul":
            found += [part.nbytes for part in node.inputs[1:] if part.name in scattered]
        is_scattered = node.name in _VIEWS and not _is_in_one_piece(node, scattered)
        if node.name == "Reshape" and is_scattered:
            found += [out.nbytes for out in node.outputs]
        elif is_scattered:
            scattered.update(out.name for out in node.outputs)
        if node.name not in _VIEWS:
            found += [out.nbytes for out in node.outputs]
    return found


def _is_in_one_piece(node: Node, scattered: set[str]) -> bool:
    """Whether a view has its numbers one after the other, as its input does."""
    before, after = node.inputs[0], node.outputs[0]
    if before.name in scattered:
        return False
    if node.name != "Slice":
        return node.name not in ("Transpose", "Broadcast")
    step = expected = 1
    for old, new in zip(reversed(before.shape), reversed(after.shape), strict=True):
        if new != 1 and step != expected:
            return False
        step, expected = step * old, expected * new
    return True


def one_kernel(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
    dtype: mx.Dtype | None = None,
) -> mx.array:
    """Stands for ``mx.dequantize``, which is many primitives on a CPU and one on Metal."""
    eye = mx.zeros((*w.shape[:-1], w.shape[-2]), dtype or scales.dtype)
    options: Any = {"transpose": False, "group_size": group_size, "bits": bits, "mode": mode}
    return mx.quantized_matmul(eye, w, scales, biases, **options)


class Pool:
    """Freed buffers, each used again for a request of nearly its size."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.new_bytes = 0  # that no freed buffer served

    def take(self, num_bytes: int) -> int:
        """The size of the buffer that serves a request."""
        if num_bytes > PAGE_BYTES:
            num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        place = bisect_left(self._free, num_bytes)
        most = min(2 * num_bytes, num_bytes + 2 * PAGE_BYTES)
        if place < len(self._free) and self._free[place] < most:
            return self._free.pop(place)
        self.new_bytes += num_bytes
        return num_bytes

    def give(self, sizes: Iterable[int]) -> None:
        """Buffers are freed."""
        for size in sizes:
            insort(self._free, size)


def new_bytes_by_step(steps: Iterable[list[int]], num_layers: int) -> list[int]:
    """Bytes that each step newly allocates, of ``num_layers`` layers that allocate alike."""
    pool, held, found = Pool(), deque[list[int]](), []
    for sizes in steps:
        before = pool.new_bytes
        for _ in range(num_layers):
            if len(held) == LAYERS_IN_FLIGHT:
                pool.give(held.popleft())
            held.append([pool.take(size) for size in sizes])
        found.append(pool.new_bytes - before)
    return found
