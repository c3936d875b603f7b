"""Linear layers that read the same input, multiplied at once for the few rows of a decode step.

Models compute queries, keys and values one after another, and a gate and its input: each is a
product of the same few rows. A GPU's host takes longer to launch such a product than the device
takes to multiply. CUDA's host spends most of a decode step on launches. Here the first of the
layers multiplies with the weights of all of them, and the others take their parts of the result. On
a CPU a launch costs almost nothing.

Layers that read the same input are found by running one token through the model, not by their
names. Weights are stored once: the weights of the single layers, which prompts still use, become
views of the whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.gpu import joint_product
from batchkv_worker.kv.backends.gpu.joint_product import LayerSignature, Product
from batchkv_worker.kv.backends.measurements import (
    FUSED_AGREE,
    FUSED_LINEARS,
    YES_OR_NO,
    Codec,
    Measurements,
)
from batchkv_worker.kv.backends.rebind import kept_if_right, swap_class, undo_all, watched

log = logging.getLogger("batchkv.engine")

_TOKENS = (1, 3, 2)

Groups = tuple[tuple[str, ...], ...]  # layers by their names


class FusedGroup:
    """Layers with one input: ``product`` gives the outputs of all ``count`` layers, in order.

    For inputs of up to ``rows`` rows; of any number, with ``takes_chunks``. After the last layer's
    call it keeps no arrays but ``whole``, the outputs of all layers, until ``take_whole``.
    """

    def __init__(self, product: Product, count: int, rows: int) -> None:
        self._product, self._count, self._rows = product, count, rows
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []
        self._whole: mx.array | None = None
        self.keeps_whole = self.takes_chunks = False  # for one who calls ``take_whole``

    def take(self, place: int, x: mx.array) -> mx.array | None:
        """The output of one layer for ``x`` ``[..., inputs]``; None: it must multiply itself.

        That is so with more rows, or if the first layer had another input.
        """
        if place == 0:
            self._input = self._whole = None
            if self.takes_chunks or x.size <= self._rows * x.shape[-1]:
                whole = self._product.multiply(x)
                self._input, self._parts = x, self._product.parts(whole)
                self._whole = whole if self.keeps_whole else None
        if x is not self._input:
            self._whole = None
            return None
        part = self._parts[place]
        if place == self._count - 1:
            self._input, self._parts = None, []
        return part

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the outputs of each layer but the last end."""
        return self._product.ends

    def take_whole(self) -> mx.array | None:
        """The outputs ``[..., all]`` of which the layers gave parts last, once."""
        whole, self._whole = self._whole, None
        return whole


class _Fused:
    """A linear layer with a ``_group``, and its ``_place`` there."""

    _group: FusedGroup
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self._group.take(self._place, x)
        if part is None:
            part = super().__call__(x)  # type: ignore[misc]
        return part


class FusedLinear(_Fused, nn.Linear):  # type: ignore[misc]  # MLX has no types
    """An ``nn.Linear`` of a group."""


class FusedQuantizedLinear(_Fused, nn.QuantizedLinear):  # type: ignore[misc]
    """An ``nn.QuantizedLinear`` of a group."""


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FusedLinear,
    nn.QuantizedLinear: FusedQuantizedLinear,
}


def folder_of(name: str) -> str:
    """The name of the module that has the module of that full name."""
    return name.rpartition(".")[0]


def group_in(modules: Mapping[str, Any], folder: str) -> tuple[FusedGroup, int] | None:
    """The group whose first layers are modules of ``folder``, and how many are, two at least.

    Modules go by their full names. A layer inside an adapter's is not in the folder.
    """
    layers = [
        module
        for name, module in modules.items()
        if folder_of(name) == folder and isinstance(module, _Fused)
    ]
    for layer in layers:
        group: FusedGroup = layer._group
        places = {other._place for other in layers if other._group is group}
        if {0, 1} <= places:
            return group, 3 if 2 in places else 2
    return None


@dataclass(frozen=True)
class FuseLinears:
    """Groups of layers, by their names, are multiplied at once for up to ``rows`` rows.

    If the device refuses this, has no memory for it, or then gives other answers, the layers
    multiply as before. Answers are compared once; ``measurements`` keep the outcome.
    """

    groups: Groups
    rows: int
    measurements: Measurements = field(default_factory=Measurements, repr=False)

    def install(self, model: Any) -> Undo:
        layers = dict(model.named_modules())
        done: list[Undo] = []

        def fuse() -> None:
            for names in self.groups:
                _fuse([layers[name] for name in names], self.rows, done)

        def agrees() -> bool:
            before = _logits(model)
            fuse()
            return are_close(before, _logits(model))

        def attempt() -> bool:
            is_right = self.measurements.of(FUSED_AGREE, agrees, YES_OR_NO)
            if is_right and not done:  # by a stored result
                fuse()
            if not is_right:
                log.warning("fused linear layers give other answers than single ones: not used")
            return is_right

        said = "linear layers are not fused: %s"
        undo = kept_if_right(attempt, done, (ValueError, RuntimeError), partial(log.warning, said))
        mx.clear_cache()  # the former weights take as much as the model
        if undo is None:
            return undo_all([])
        log.info("%d groups of linear layers with one input are fused", len(self.groups))
        return undo


def choose(model: Any, rows: int, measurements: Measurements) -> FuseLinears | None:
    """The groups to fuse for up to ``rows`` rows: where one product is faster than several."""
    try:
        groups = measurements.of(
            FUSED_LINEARS, lambda: _faster_groups(model, rows), _groups_codec(model)
        )
    except (ValueError, RuntimeError) as fault:
        if is_device_fault(fault):
            raise
        log.warning("linear layers are not fused: %s", fault)
        groups = ()
    mx.clear_cache()  # what was measured
    groups = _refitted(groups, model)
    return FuseLinears(groups, rows, measurements) if groups else None


def _faster_groups(model: Any, rows: int) -> Groups:
    names = {id(layer): name for name, layer in model.named_modules()}
    return tuple(
        tuple(names[id(layer)] for layer in group)
        for like, group in _of_one_input(model)
        if joint_product.is_faster(like, tuple(map(joint_product.outputs_of, group)), rows)
    )


def _refitted(groups: Groups, model: Any) -> Groups:
    """The groups of a model that has an adapter since they were measured.

    A LoRA layer calls the layer inside it with its own input, so that one is fused. A DoRA layer
    only reads the weights of the layer inside it, so its group is left out.
    """
    layers = dict(model.named_modules())

    def inner(name: str) -> str:
        is_adapted = "lora_a" in layers[name] and "m" not in layers[name]
        return f"{name}.linear" if is_adapted else name

    found = (tuple(map(inner, names)) for names in groups)
    return tuple(
        names for names in found if all(type(layers.get(name)) in _FUSED for name in names)
    )


def _groups_codec(model: Any) -> Codec[Groups]:
    """Groups as lists of names, each of a linear layer that the model has."""

    def read(value: Any) -> Groups:
        layers = dict(model.named_modules())
        groups = tuple(tuple(map(str, names)) for names in value)
        if any(type(layers[name]) not in _FUSED for names in groups for name in names):
            raise ValueError("it names a layer that is not linear")
        return groups

    return Codec(lambda groups: [list(names) for names in groups], read)


def _logits(model: Any) -> mx.array:
    """The model's outputs for a few tokens, one by one, as in decode steps."""
    cache = make_prompt_cache(model)
    logits = [model(mx.array([[token]]), cache=cache) for token in _TOKENS]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


def _of_one_input(model: Any) -> list[tuple[LayerSignature, list[Any]]]:
    """Similar layers that receive the same array, in the order of their calls."""
    calls: list[tuple[mx.array, Any]] = []
    with watched(model, [*_FUSED], lambda layer, x: calls.append((x, layer))):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    times = Counter(id(layer) for _, layer in calls)
    found: dict[tuple[int, LayerSignature], list[Any]] = {}
    for x, layer in calls:  # which holds the arrays: no two of them have one id
        if times[id(layer)] == 1 and _multiplies_as_given(layer, x):
            like = joint_product.signature_of(layer, x)
            found.setdefault((id(x), like), []).append(layer)
    calls.clear()  # the classes that noted them live on
    return [(like, group) for (_, like), group in found.items() if len(group) > 1]


def _multiplies_as_given(layer: Any, x: mx.array) -> bool:
    """Whether neither input nor weights are converted first."""
    return isinstance(layer, nn.QuantizedLinear) or layer.weight.dtype == x.dtype


def _fuse(group: Sequence[Any], rows: int, done: list[Undo]) -> None:
    """Make one product of a group. The weights of each layer become views of the whole."""
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
    mx.clear_cache()  # the former weights together are as large as the model
