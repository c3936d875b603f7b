"""How a model's keys and values will be kept: everything that is decided once, at start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.errors import ModelError, SettingsError
from batchkv_worker.kv.attention import paths as attention
from batchkv_worker.kv.backends.cpu import blocked_linear as narrow
from batchkv_worker.kv.backends.cpu import rope_cache as angles
from batchkv_worker.kv.backends.cpu import swiglu as gate
from batchkv_worker.kv.backends.cpu.exp2 import powers_are_faster
from batchkv_worker.kv.backends.gpu import fused_linear as siblings
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.decode import costs_of
from batchkv_worker.kv.layers.discover import AttentionShape, CacheTree, Leaf
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.state import StateKind
from batchkv_worker.kv.schemes.packing import LayerScheme, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start import prefix_cost as stem_cost
from batchkv_worker.kv.start import probe
from batchkv_worker.kv.start.selfcheck import Traits, find_traits
from batchkv_worker.kv.start.sharecheck import can_share

log = logging.getLogger("batchkv.engine")

_PROBE_ROWS = 16  # at most, of the slots, when paths are timed


@dataclass(frozen=True, slots=True)
class KvPlan:
    """One kind for each leaf of the model's caches, and how the model is served with them."""

    tree: CacheTree
    kinds: tuple[LayerKind, ...]
    traits: Traits
    shapes: Shapes
    costs: Costs
    shares: bool = False  # whether rows may hold a common prefix once, as a stem
    stem_cost: int = stem_cost.UNMEASURED  # cells that a stem must save, see there

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps a state, which exists only where a chunk ended."""
        return any(kind.has_state for kind in self.kinds)

    @property
    def schemes(self) -> tuple[LayerScheme, ...]:
        """Of the layers that keep keys and values, in order."""
        return tuple(kind.scheme for kind in self.kinds if isinstance(kind, AttentionKind))

    @property
    def paths(self) -> dict[LayerScheme, attention.Path | None]:
        """The attention path of each scheme in use."""
        kinds = (kind for kind in self.kinds if isinstance(kind, AttentionKind))
        return {kind.scheme: kind.path for kind in kinds}


def make_plan(
    name: str,
    model: Any,
    tree: CacheTree,
    scheme: str,
    dtype: mx.Dtype,
    *,
    slots: int,
    path: attention.Path | None = None,
    group_cost: int | None = None,
    stem_cells: int | None = None,
    shape_step: int = 1,
) -> KvPlan:
    """Decide for ``model`` and steps of up to ``slots`` rows.

    ``path`` None takes the fastest; ``group_cost`` None what starting a group of rows was measured
    to cost, in cells (``frame.Shapes``; without a measurement, its default); ``stem_cells`` None
    what a stem was measured to need.
    Raises ModelError for a model that cannot be served, SettingsError for a scheme that does not
    fit it.
    """
    try:
        fitted = fit_model(SchemeSpec.parse(scheme), tree.shapes)
    except ValueError as fault:
        raise SettingsError(f"KV scheme {scheme!r} does not fit model {name!r}: {fault}") from fault
    exact = fit_model(SchemeSpec.parse("float"), tree.shapes)
    indexes = [leaf.is_index for leaf in tree.leaves if isinstance(leaf, AttentionShape)]
    fitted = tuple(b if c else a for a, b, c in zip(fitted, exact, indexes, strict=True))
    is_hooked = attention.install_hook(model)
    _install_faster_parts(model, dtype, slots)
    num_rows = min(_PROBE_ROWS, slots)
    if tree.shapes and not is_hooked:
        log.warning("model %s computes attention itself: it decodes on dense keys and values", name)
    paths: dict[LayerScheme, attention.Path | None] = dict.fromkeys(fitted)
    costs: list[int] = []
    if is_hooked:
        for layer in paths:
            paths[layer] = path
            if path is None:
                choice = _choose(name, layer, _query_heads(model, tree, layer), dtype, num_rows)
                paths[layer] = choice.path
                costs.append(choice.group_cost)
    kinds = _kinds(tree.leaves, fitted, dtype, paths)
    plain = _kinds(tree.leaves, exact, dtype, {})
    traits = find_traits(name, model, tree, plain, kinds, dtype)
    shapes = Shapes(
        step=shape_step,
        rows=8 if shape_step > 1 else 1,
        group_cost=min(costs, default=Shapes().group_cost) if group_cost is None else group_cost,
        mask_rank=traits.mask_rank,
        adds_masks=powers_are_faster(dtype),
    )
    _choose_kernel(model, tree, kinds, dtype, num_rows)
    shares = can_share(model, tree, kinds, traits)
    least = stem_cost.UNMEASURED if stem_cells is None else stem_cells
    if shares and stem_cells is None and path is None:
        least = _stem_cost(model, tree, kinds, dtype, num_rows)
    return KvPlan(tree, kinds, traits, shapes, costs_of(kinds), shares, least)


def _install_faster_parts(model: Any, dtype: mx.Dtype, slots: int) -> None:
    """Replace what this device computes faster otherwise."""
    gate.install(model, dtype)
    angles.install(model, dtype)
    narrow.install(model, dtype, slots)
    siblings.install(model, slots)


def _stem_cost(
    model: Any, tree: CacheTree, kinds: Iterable[LayerKind], dtype: mx.Dtype, num_rows: int
) -> int:
    """What a stem must save, by a layer that would keep one."""
    kind = next(_attended(kinds))
    assert kind.path is not None  # else its rows could not share
    heads = _query_heads(model, tree, kind.scheme)
    return stem_cost.measure(kind.scheme, heads, dtype, kind.path, num_rows=num_rows)


def _choose_kernel(
    model: Any, tree: CacheTree, kinds: Iterable[LayerKind], dtype: mx.Dtype, num_rows: int
) -> None:
    """Decide how layers that may keep a stem weigh what it holds."""
    for scheme, path in {kind.scheme: kind.path for kind in _attended(kinds)}.items():
        if path is not None:
            heads = _query_heads(model, tree, scheme)
            stem_cost.choose_kernel(scheme, heads, dtype, path, num_rows=num_rows)


def _attended(kinds: Iterable[LayerKind]) -> Iterator[AttentionKind]:
    """Those that keep keys and values of every token."""
    return (kind for kind in kinds if isinstance(kind, AttentionKind) and kind.window is None)


def _query_heads(model: Any, tree: CacheTree, layer: LayerScheme) -> int:
    """Query heads of a layer: the model's, if they are a multiple of the layer's own."""
    heads = attention.num_query_heads(model, tree.shapes[0].num_heads)
    return heads if heads % layer.shape.num_heads == 0 else layer.shape.num_heads


def _choose(
    name: str, layer: LayerScheme, num_query_heads: int, dtype: mx.Dtype, num_rows: int
) -> probe.Choice:
    try:
        return probe.choose(layer, num_query_heads, dtype, num_rows=num_rows)
    except (ValueError, RuntimeError) as fault:  # what MLX raises for a kernel that it lacks
        raise ModelError(
            f"model {name!r}: this device cannot keep {layer}: {fault}; choose another KV scheme"
        ) from fault


def _kinds(
    leaves: Iterable[Leaf],
    schemes: Iterable[LayerScheme],
    dtype: mx.Dtype,
    paths: dict[LayerScheme, attention.Path | None],
) -> tuple[LayerKind, ...]:
    left = iter(schemes)
    kinds: list[LayerKind] = []
    for leaf in leaves:
        if isinstance(leaf, AttentionShape):
            scheme = next(left)
            kinds.append(AttentionKind(scheme, dtype, leaf.window, paths.get(scheme)))
        else:
            kinds.append(StateKind(leaf))
    return tuple(kinds)
