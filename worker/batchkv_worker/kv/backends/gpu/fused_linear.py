"""Linear layers that read the same input, multiplied at once for the few rows of a decode step.

Models ask for queries, keys and values one after another, and for a gate beside what it gates: for
each a product of the same few rows. Such a product costs a GPU's host more to launch than it costs
the device to multiply: CUDA's host spends most of a decode step on launches. Here the first of the
layers multiplies with the weights of all of them, and the others take their parts of that. On a CPU
a launch costs next to nothing.

Layers that read the same input are found by running one token through the model, not by their
names. Weights are stored once: what the single layers hold, with which prompts are still
multiplied, becomes views of the whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.gpu import joint_product
from batchkv_worker.kv.backends.gpu.joint_product import LayerSignature, Product
from batchkv_worker.kv.backends.rebind import swap_class, undo_all

log = logging.getLogger("batchkv.engine")

_TOKENS = (1, 3, 2)


class FusedGroup:
    """Layers of one input: ``product`` gives what each of ``count`` answers, in their order.

    For inputs of up to ``rows`` rows. It keeps no arrays once the last layer was asked.
    """

    def __init__(self, product: Product, count: int, rows: int) -> None:
        self._product, self._count, self._rows = product, count, rows
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []

    def take(self, place: int, x: mx.array) -> mx.array | None:
        """The answer of one layer to ``x`` ``[..., inputs]``; None when it is to multiply itself.

        That is when there are more rows, or when the first layer was not asked the same.
        """
        if place == 0:
            self._input = None
            if x.size <= self._rows * x.shape[-1]:
                self._input, self._parts = x, self._product(x)
        if x is not self._input:
            return None
        part = self._parts[place]
        if place == self._count - 1:
            self._input, self._parts = None, []
        return part


class _Fused:
    """A linear layer with a ``_group``, and its ``_place`` there."""

    _group: FusedGroup
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self._group.take(self._place, x)
        if part is None:
            part = super().__call__(x)  # type: ignore[misc]
        return part


class FusedLinear(_Fused, nn.Linear):  # type: ignore[misc]  # MLX does not say what it is
    """An ``nn.Linear`` of a group."""


class FusedQuantizedLinear(_Fused, nn.QuantizedLinear):  # type: ignore[misc]
    """An ``nn.QuantizedLinear`` of a group."""


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FusedLinear,
    nn.QuantizedLinear: FusedQuantizedLinear,
}


@dataclass(frozen=True)
class FuseLinears:
    """Groups of layers, by their names, are multiplied at once for up to ``rows`` rows.

    A device that refuses something, or has no memory left for it, multiplies as before; so does one
    that then gives other answers.
    """

    groups: tuple[tuple[str, ...], ...]
    rows: int

    def install(self, model: Any) -> Undo:
        layers = dict(model.named_modules())
        done: list[Undo] = []
        undo = undo_all(done)
        is_right = False
        try:
            before = _logits(model)
            for names in self.groups:
                _fuse([layers[name] for name in names], self.rows, done)
            is_right = are_close(before, _logits(model))
            if not is_right:
                log.warning("fused linear layers give other answers than single ones: not used")
        except (ValueError, RuntimeError) as fault:
            log.warning("linear layers are not fused: %s", fault)
        mx.clear_cache()  # what layers held before: as much as the model
        if not is_right:
            undo()
            return undo_all([])
        log.info("%d groups of linear layers with one input are fused", len(self.groups))
        return undo


def choose(model: Any, rows: int) -> FuseLinears | None:
    """The groups to fuse for up to ``rows`` rows: where one product is faster than several."""
    groups: list[tuple[str, ...]] = []
    try:
        names = {id(layer): name for name, layer in model.named_modules()}
        for like, group in _of_one_input(model):
            if joint_product.is_faster(like, tuple(map(joint_product.outputs_of, group)), rows):
                groups.append(tuple(names[id(layer)] for layer in group))
    except (ValueError, RuntimeError) as fault:
        log.warning("linear layers are not fused: %s", fault)
        groups = []
    mx.clear_cache()  # what was measured
    return FuseLinears(tuple(groups), rows) if groups else None


def _logits(model: Any) -> mx.array:
    """What the model answers to a few tokens, one by one: as a decode step does."""
    cache = make_prompt_cache(model)
    logits = [model(mx.array([[token]]), cache=cache) for token in _TOKENS]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


def _of_one_input(model: Any) -> list[tuple[LayerSignature, list[Any]]]:
    """Layers that are given the very same array and are alike, in the order of their calls."""
    calls: list[tuple[mx.array, Any]] = []
    with _watched(model, calls):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    times = Counter(id(layer) for _, layer in calls)
    found: dict[tuple[int, LayerSignature], list[Any]] = {}
    for x, layer in calls:  # which holds the arrays: no two of them have one id
        if times[id(layer)] == 1 and _multiplies_as_given(layer, x):
            like = joint_product.signature_of(layer, x)
            found.setdefault((id(x), like), []).append(layer)
    calls.clear()  # the arrays hold on to all weights, and the classes that noted them live on
    return [(like, group) for (_, like), group in found.items() if len(group) > 1]


def _multiplies_as_given(layer: Any, x: mx.array) -> bool:
    """Whether neither input nor weights are converted first."""
    return isinstance(layer, nn.QuantizedLinear) or layer.weight.dtype == x.dtype


@contextmanager
def _watched(model: Any, calls: list[tuple[mx.array, Any]]) -> Iterator[None]:
    """Note what linear layers are given, until the end."""

    def watched(kind: type[nn.Module]) -> type[nn.Module]:
        def call(self: Any, x: mx.array) -> Any:
            calls.append((x, self))
            return kind.__call__(self, x)

        return type(kind.__name__, (kind,), {"__call__": call})

    kinds = {kind: watched(kind) for kind in _FUSED}
    layers = {id(layer): layer for layer in model.modules() if type(layer) in kinds}
    with ExitStack() as stack:
        for layer in layers.values():
            stack.callback(swap_class(layer, kinds[type(layer)]))
        yield


def _fuse(group: Sequence[Any], rows: int, done: list[Undo]) -> None:
    """Make one product of a group; what each layer holds becomes a view of what all hold."""
    whole = joint_product.whole_of(group)
    product = joint_product.product_of(group, whole)
    edges = [0, *accumulate(map(joint_product.outputs_of, group))]
    together = FusedGroup(product, len(group), rows)
    for place, (layer, (low, high)) in enumerate(zip(group, pairwise(edges), strict=True)):
        for name, array in whole.items():
            layer[name] = array[low:high]
        mx.eval(layer.parameters())
        kind = _FUSED[type(layer)]
        done.append(swap_class(layer, kind, _group=together, _place=place))
    mx.clear_cache()  # what the layers held before is as large as the model in the end
