"""How a model is served: decided, installed and checked once, at start.

``decide`` measures and chooses; ``install`` changes the model; the checks run it on a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend, Undo
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.measurements import YES_OR_NO
from batchkv_worker.kv.backends.rebind import restore
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start import prefix_cost
from batchkv_worker.kv.start.backend import num_residual_blocks, rotary_in_use
from batchkv_worker.kv.start.decision import Decision, Fixed, decide
from batchkv_worker.kv.start.replaycheck import can_replay
from batchkv_worker.kv.start.selfcheck import TRAITS, Traits, find_traits, warn_of
from batchkv_worker.kv.start.sharecheck import can_share
from batchkv_worker.kv.start.unread import are_unread, unread_kinds

log = logging.getLogger("batchkv.engine")


@dataclass(frozen=True, slots=True)
class KvPlan:
    """One kind for each leaf of the model's caches, and how the model is served with them.

    ``undo`` puts the model back as it was loaded.
    """

    backend: Backend
    tree: CacheTree
    kinds: tuple[LayerKind, ...]
    traits: Traits
    shapes: Shapes
    costs: Costs
    shares: bool = False  # whether rows may store a common prefix once
    prefix_cells: int = prefix_cost.UNMEASURED  # cells that a shared prefix must save
    replays: bool = False  # whether the graph of a decode step may be used again
    undo: Undo = field(default=lambda: None, repr=False)

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps a state, which exists only where a chunk ended."""
        return any(kind.has_state for kind in self.kinds)

    @property
    def joined_tokens(self) -> int:
        """Tokens of rows behind different prefixes that one chunk may have; 0: it has none.

        Cached ones count. Layers with a window or a state take another way.
        """
        if not self.backend.joins_groups or not self.shares:
            return 0
        if any(not isinstance(kind, AttentionKind) or kind.window for kind in self.kinds):
            return 0
        shapes = [kind.scheme.shape for kind in self.kinds if isinstance(kind, AttentionKind)]
        numbers = max(one.num_heads * (one.key_size + one.value_size) for one in shapes)
        return self.backend.most_joined // numbers

    def slots(
        self, num_slots: int, before_computing: Callable[[], None] = lambda: None
    ) -> DecodeSlots:
        """Decode slots for so many rows, empty. ``before_computing``: see ``DecodeSlots``."""
        what = self.backend, self.kinds, self.tree, num_slots, self.shapes
        return DecodeSlots(*what, replays=self.replays, before_computing=before_computing)

    def prompts(self, launches: Launches) -> Callable[[int, int], PrefillRows]:
        """Makes groups of prompts of up to so many tokens, in chunks of up to so many."""
        return partial(PrefillRows, self.backend, self.kinds, launches=launches)

    @property
    def schemes(self) -> tuple[LayerScheme, ...]:
        """Of the layers that keep keys and values, in order."""
        return tuple(kind.scheme for kind in self.kinds if isinstance(kind, AttentionKind))

    @property
    def num_packed(self) -> int:
        """Layers in which one kernel packs the keys and values of chunks of prompts."""
        return _num_packed(self.kinds)

    @property
    def paths(self) -> dict[LayerScheme, Path | None]:
        """The attention path of each scheme in use."""
        kinds = (kind for kind in self.kinds if isinstance(kind, AttentionKind))
        return {kind.scheme: kind.path for kind in kinds}


def make_plan(
    name: str,
    model: Any,
    tree: CacheTree,
    scheme: str,
    dtype: mx.Dtype,
    backend: Backend,
    *,
    slots: int,
    fixed: Fixed | None = None,
) -> KvPlan:
    """Decide for ``model`` and steps of up to ``slots`` rows; change and check the model.

    Raises ModelError for a model that cannot be served, SettingsError for a scheme that does not
    fit it.
    """
    restore(model)  # undo the changes of an earlier engine
    decision = decide(name, model, tree, scheme, dtype, backend, slots=slots, fixed=fixed)
    if tree.shapes and not decision.is_hooked:
        log.warning("model %s computes attention itself: it decodes on dense keys and values", name)
    undo = decision.install(model)
    try:
        return _checked(name, model, tree, decision, undo)
    except BaseException:
        undo()
        raise


def _checked(name: str, model: Any, tree: CacheTree, decision: Decision, undo: Undo) -> KvPlan:
    """The plan, if the changed model gives the same logits in a batch as alone."""
    backend, kinds = decision.backend, decision.kinds(tree)
    exact = decision.exact_kinds(tree)
    kept, form = backend.measurements, _form_of(model, kinds)
    traits = kept.of(
        f"self-check{form}",
        lambda: find_traits(backend, name, model, tree, exact, kinds, decision.dtype),
        TRAITS,
    )
    warn_of(name, traits)
    shapes = Shapes(
        step=backend.columns_multiple,
        rows=backend.rows_multiple,
        padded_rows=backend.padded_rows,
        group_cost=decision.group_cost,
        mask_rank=traits.mask_rank,
    )
    if kept.of(
        f"dense arrays are unread in steps and chunks{form}",
        lambda: are_unread(backend, model, tree, kinds, traits),
        YES_OR_NO,
    ):
        kinds = unread_kinds(tree, kinds)
    shares = decision.shares and kept.of(
        f"prefix self-check{form}",
        lambda: can_share(backend, model, tree, kinds, traits),
        YES_OR_NO,
    )
    replays = backend.replays_steps and kept.of(
        f"steps are replayed{form}",
        lambda: can_replay(backend, model, tree, kinds, traits, decision.dtype),
        YES_OR_NO,
    )
    kept.end_tries()
    costs = costs_of(kinds)
    return KvPlan(
        *(backend, tree, kinds, traits, shapes, costs, shares, decision.prefix_cells, replays, undo)
    )


def _form_of(model: Any, kinds: Sequence[LayerKind]) -> str:
    """What our kernels compute of a model: a check of one form says nothing of another.

    A start may do without one that the next has, as after a fault of the device.
    """
    (layers, in_chunks), blocks = rotary_in_use(model), num_residual_blocks(model)
    packed = _num_packed(kinds)
    if not layers and not blocks and not packed:
        return ""
    chunks = " in chunks, too" if in_chunks else ""
    return f" with {layers} turned layers{chunks}, {blocks} blocks, {packed} packed layers"


def _num_packed(kinds: Sequence[LayerKind]) -> int:
    return sum(isinstance(kind, AttentionKind) and kind.chunks is not None for kind in kinds)
