"""Chooses how to serve one model on one machine, by measurements. Nothing is changed here.

``decide`` checks and times samples of the model's layers, unless the backend's ``measurements``
have the results of an earlier start. ``Decision.install`` is the one step that changes the model,
and returns what undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend, Change, Undo
from batchkv_worker.kv.backends.rebind import install
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.discover import AttentionShape, CacheTree
from batchkv_worker.kv.layers.kinds import DecodeWay, kinds_of
from batchkv_worker.kv.schemes.packing import LayerScheme, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start import prefix_cost
from batchkv_worker.kv.start.layer_choice import (
    SchemeChoice,
    attention_of,
    can_attend_prefixes,
    check_prompts,
    choose_chunks,
    choose_path,
    measure_prefix_cells,
)

_PROBE_ROWS = 16  # at most, of the slots, when paths are timed


@dataclass(frozen=True, slots=True)
class Fixed:
    """Values that the caller sets; a field that is None is measured.

    ``group_cost``: cells that one more group of rows costs; ``prefix_cells``: cells that a shared
    prefix must save; ``chunks``: whether a kernel packs chunks, where there is one.
    """

    path: Path | None = None
    group_cost: int | None = None
    prefix_cells: int | None = None
    chunks: bool | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``schemes`` are of the attention layers, in order; ``choices`` say how each decodes.

    ``changes`` are made to the model. ``group_cost`` and ``prefix_cells`` are in cells.
    """

    backend: Backend
    dtype: mx.Dtype
    schemes: tuple[LayerScheme, ...]
    choices: Mapping[LayerScheme, SchemeChoice]
    changes: tuple[Change, ...]
    group_cost: int
    prefix_cells: int
    is_hooked: bool  # whether the model leaves attention to its caches

    def install(self, model: Any) -> Undo:
        """Change the model as decided; returns what undoes it.

        The hook stays: for caches that do not implement it, mlx-lm's own function is called.
        """
        paths.install_hook(model)
        return install(model, self.changes)

    def kinds(self, tree: CacheTree) -> tuple[LayerKind, ...]:
        """One for each leaf of the model's caches."""
        choices = [self.choices[scheme] for scheme in self.schemes]
        ways = [DecodeWay(one.path, one.has_fused, one.records, one.chunks) for one in choices]
        return kinds_of(self.backend, tree.leaves, self.dtype, self.schemes, ways)

    @property
    def shares(self) -> bool:
        """Whether attention over shared prefixes is right in every layer."""
        return all(choice.shares for choice in self.choices.values())

    def exact_kinds(self, tree: CacheTree) -> tuple[LayerKind, ...]:
        """The same with keys and values as they are, left to the model on dense arrays."""
        exact = fit_model(SchemeSpec.parse("float"), tree.shapes)
        return kinds_of(self.backend, tree.leaves, self.dtype, exact)


def decide(
    name: str,
    model: Any,
    tree: CacheTree,
    scheme: str,
    dtype: mx.Dtype,
    backend: Backend,
    *,
    slots: int,
    fixed: Fixed | None = None,
) -> Decision:
    """Choose for ``model`` and steps of up to ``slots`` rows.

    Raises SettingsError for a scheme that does not fit the model, ModelError for one that the
    device cannot keep.
    """
    fixed = fixed or Fixed()
    schemes = _fitted(name, tree, scheme)
    rows = min(_PROBE_ROWS, slots)
    is_hooked = paths.can_hook(model)
    changes = tuple(backend.changes(model, dtype, slots))
    full = _full_attention(tree, schemes)
    choices = {}
    for layer in dict.fromkeys(schemes):
        choice = SchemeChoice()
        if is_hooked:
            heads = _query_heads(model, tree, layer)
            choice = choose_path(name, backend, layer, heads, dtype, rows, fixed.path)
            if fixed.path is None:
                check_prompts(name, backend, layer, heads, dtype)
            if layer in full:
                attention = attention_of(backend, layer, dtype, choice)
                shares = fixed.path is not None or can_attend_prefixes(attention, heads)
                choice = replace(choice, shares=shares)
            choice = replace(choice, chunks=choose_chunks(backend, layer, dtype, fixed.chunks))
        choices[layer] = choice
    group_cost = fixed.group_cost
    if group_cost is None:
        costs = [one.group_cost for one in choices.values() if one.group_cost is not None]
        group_cost = min(costs, default=Shapes().group_cost)
    prefix_cells = fixed.prefix_cells
    if prefix_cells is None:
        prefix_cells = prefix_cost.UNMEASURED
        # From a pool, prefixes are read by the kernel that reads rows: there is no more to launch.
        is_timed = full and choices[full[0]].path not in (None, "kernel")
        if is_timed and is_hooked and fixed.path is None:
            attention = attention_of(backend, full[0], dtype, choices[full[0]])
            heads = _query_heads(model, tree, full[0])
            prefix_cells = measure_prefix_cells(attention, heads, rows)
    return Decision(backend, dtype, schemes, choices, changes, group_cost, prefix_cells, is_hooked)


def _fitted(name: str, tree: CacheTree, scheme: str) -> tuple[LayerScheme, ...]:
    """The scheme of each attention layer; an index over tokens is never packed."""
    try:
        fitted = fit_model(SchemeSpec.parse(scheme), tree.shapes)
    except ValueError as fault:
        raise SettingsError(f"KV scheme {scheme!r} does not fit model {name!r}: {fault}") from fault
    exact = fit_model(SchemeSpec.parse("float"), tree.shapes)
    indexes = [leaf.is_index for leaf in tree.leaves if isinstance(leaf, AttentionShape)]
    return tuple(b if c else a for a, b, c in zip(fitted, exact, indexes, strict=True))


def _full_attention(tree: CacheTree, schemes: Iterable[LayerScheme]) -> list[LayerScheme]:
    """The schemes of the layers that keep keys and values of every token, in order."""
    leaves = (leaf for leaf in tree.leaves if isinstance(leaf, AttentionShape))
    return [scheme for leaf, scheme in zip(leaves, schemes, strict=True) if leaf.window is None]


def _query_heads(model: Any, tree: CacheTree, layer: LayerScheme) -> int:
    """Query heads of a layer: the model's, if they are a multiple of the layer's own."""
    heads = paths.num_query_heads(model, tree.shapes[0].num_heads)
    return heads if heads % layer.shape.num_heads == 0 else layer.shape.num_heads
