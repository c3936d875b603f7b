"""Linear layers that read the same input, multiplied at once for the few rows of a decode step.

Models ask for queries, keys and values one after another, and for a gate beside what it gates: for
each a product of the same few rows. What such a product costs is not so much multiplying as being
started: CUDA's host is at it for most of a decode step. Here the first of the layers multiplies
with the weights of all of them, and the others take their parts of that. On a CPU a start costs
next to nothing.

Which layers read the same input is seen, not told by their names: one token runs through the model.
Weights stand once in memory: what the single layers hold, with which prompts are still multiplied,
becomes views of the whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.kv.backends.gpu import joint_product as joint

log = logging.getLogger("batchkv.engine")

_TOKENS = (1, 3, 2)


class Family:
    """Layers of one input: ``product`` gives what each of ``count`` answers, in their order.

    For inputs of up to ``rows`` rows. It holds on to nothing once the last layer was asked.
    """

    def __init__(self, product: joint.Product, count: int, rows: int) -> None:
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


class _Sibling:
    """A linear layer with a ``_family``, and its ``_place`` there."""

    _family: Family
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self._family.take(self._place, x)
        if part is None:
            part = super().__call__(x)  # type: ignore[misc]
        return part


class SiblingLinear(_Sibling, nn.Linear):  # type: ignore[misc]  # MLX does not say what it is
    """An ``nn.Linear`` of a family."""


class SiblingQuantizedLinear(_Sibling, nn.QuantizedLinear):  # type: ignore[misc]
    """An ``nn.QuantizedLinear`` of a family."""


_SIBLINGS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SiblingLinear,
    nn.QuantizedLinear: SiblingQuantizedLinear,
}
_ALONE: dict[type[nn.Module], type[nn.Module]] = {
    SiblingLinear: nn.Linear,
    SiblingQuantizedLinear: nn.QuantizedLinear,
}


def forget(model: Any) -> None:
    """Let every layer of the model multiply for itself."""
    for module in model.modules():
        if type(module) in _ALONE:
            module.__class__ = _ALONE[type(module)]
            del module._family, module._place


def install(model: Any, rows: int) -> int:
    """Let layers of the same input be multiplied at once for up to ``rows`` rows, where faster.

    Returns how many such families there are. What was decided for the model before is forgotten. A
    device that refuses something, or has no memory left for it, multiplies as before.
    """
    forget(model)
    if not joint.is_start_dear():
        return 0
    found = 0
    try:
        found = _install(model, rows)
    except (ValueError, RuntimeError) as fault:
        log.warning("layers of one input are multiplied one by one: %s", fault)
        forget(model)
    mx.clear_cache()  # what was measured, and what layers held before: as much as the model
    return found


def _install(model: Any, rows: int) -> int:
    families = [
        family
        for like, family in _of_one_input(model)
        if joint.is_faster(like, tuple(map(joint.outputs_of, family)), rows)
    ]
    if not families:
        return 0
    before = _logits(model)
    for family in families:
        _join(family, rows)
    if not joint.are_close(before, _logits(model)):
        log.warning("layers of one input answer otherwise at once than apart: they stay apart")
        forget(model)
        return 0
    log.info("%d families of layers of one input are multiplied at once", len(families))
    return len(families)


def _logits(model: Any) -> mx.array:
    """What the model answers to a few tokens, one by one: the last look back at the others."""
    cache = make_prompt_cache(model)
    logits = [model(mx.array([[token]]), cache=cache) for token in _TOKENS]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


def _of_one_input(model: Any) -> list[tuple[joint.Likeness, list[Any]]]:
    """Layers that are given the very same array and are alike, in the order of their calls."""
    calls: list[tuple[mx.array, Any]] = []
    with _watched(model, calls):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    times = Counter(id(module) for _, module in calls)
    found: dict[tuple[int, joint.Likeness], list[Any]] = {}
    for x, module in calls:  # which holds the arrays: no two of them have one id
        if times[id(module)] == 1 and _multiplies_as_given(module, x):
            found.setdefault((id(x), joint.likeness_of(module, x)), []).append(module)
    calls.clear()  # the arrays hold on to all weights, and the classes that noted them live on
    return [(like, family) for (_, like), family in found.items() if len(family) > 1]


def _multiplies_as_given(module: Any, x: mx.array) -> bool:
    """Whether neither input nor weights are converted first."""
    return isinstance(module, nn.QuantizedLinear) or module.weight.dtype == x.dtype


@contextmanager
def _watched(model: Any, calls: list[tuple[mx.array, Any]]) -> Iterator[None]:
    """Note what linear layers are given, until the end."""

    def watched(kind: type[nn.Module]) -> type[nn.Module]:
        def call(self: Any, x: mx.array) -> Any:
            calls.append((x, self))
            return kind.__call__(self, x)

        return type(kind.__name__, (kind,), {"__call__": call})

    kinds = {kind: watched(kind) for kind in _SIBLINGS}
    changed = [(module, type(module)) for module in model.modules() if type(module) in kinds]
    try:
        for module, kind in changed:
            module.__class__ = kinds[kind]
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _join(family: Sequence[Any], rows: int) -> None:
    """Make one product of a family; what each layer holds becomes a view of what all hold."""
    whole = joint.whole_of(family)
    product = joint.product_of(family, whole)
    edges = [0, *accumulate(map(joint.outputs_of, family))]
    together = Family(product, len(family), rows)
    for place, (module, (low, high)) in enumerate(zip(family, pairwise(edges), strict=True)):
        for name, array in whole.items():
            module[name] = array[low:high]
        mx.eval(module.parameters())
        module.__class__ = _SIBLINGS[type(module)]
        module._family, module._place = together, place
    mx.clear_cache()  # what the layers held before is as large as the model in the end
