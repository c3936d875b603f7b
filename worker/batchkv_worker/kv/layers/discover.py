"""Finds the kinds and shapes of a model's caches: by their classes, and by computing one token.

An unknown class of cache is refused by its name. Facts that a known class does not have (the number
of heads, sizes, the arrays of a state) are read from its arrays after one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from batchkv_worker.errors import ModelError
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.layers.state import StateShape
from batchkv_worker.kv.schemes.packing import LayerShape
from batchkv_worker.kv.types import Window

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer with keys and values: their shape, and how many last tokens it sees (None: all).

    ``is_index``: its keys and values are one array, which selects tokens instead of weighing them.
    Rounding would select others.
    """

    shape: LayerShape
    window: Window = None
    is_index: bool = False


Leaf = AttentionShape | StateShape


@dataclass(frozen=True, slots=True)
class CacheTree:
    """A model's caches: the leaves in order, and their nesting in the model.

    ``nesting`` has one entry for each cache of the model: a leaf's number, or several for a cache
    that is a list of caches.
    """

    leaves: tuple[Leaf, ...]
    nesting: tuple[int | tuple[int, ...], ...]

    def nested(self, items: Sequence[Item]) -> list[Item | tuple[Item, ...]]:
        """One item for each leaf, nested as in the model."""
        return [
            items[entry] if isinstance(entry, int) else tuple(items[i] for i in entry)
            for entry in self.nesting
        ]

    @property
    def shapes(self) -> list[LayerShape]:
        """The shapes of the layers with keys and values."""
        return [leaf.shape for leaf in self.leaves if isinstance(leaf, AttentionShape)]

    def __str__(self) -> str:
        """For the log: how many layers of which kind."""
        names = [
            "state"
            if isinstance(leaf, StateShape)
            else ("full attention" if leaf.window is None else f"window of {leaf.window}")
            for leaf in self.leaves
        ]
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def discover(name: str, model: Any) -> CacheTree:
    """The caches of ``model``; raises ModelError naming what cannot be served."""
    caches = make_prompt_cache(model)
    leaves: list[Any] = []
    nesting: list[int | tuple[int, ...]] = []
    for cache in caches:
        if type(cache) is CacheList:
            nesting.append(tuple(range(len(leaves), len(leaves) + len(cache.caches))))
            leaves += cache.caches
        else:
            nesting.append(len(leaves))
            leaves.append(cache)
    _refuse_unknown(name, model, leaves)
    probes = [_probe(leaf) for leaf in leaves]
    tree = CacheTree((), tuple(nesting))
    try:
        mx.eval(model(mx.array([[0]]), cache=_with_lists(tree.nested(probes))))
    except Exception as fault:  # model code may raise anything
        if is_device_fault(fault):
            raise
        reason = next(iter(str(fault).strip().splitlines()), type(fault).__name__)[:300]
        raise ModelError(f"model {name!r} cannot be run: {reason}") from fault
    return CacheTree(tuple(_leaf(name, probe) for probe in probes), tuple(nesting))


def _with_lists(nested: list[Any]) -> list[Any]:
    return [CacheList(*entry) if isinstance(entry, tuple) else entry for entry in nested]


def _refuse_unknown(name: str, model: Any, leaves: Sequence[Any]) -> None:
    known = (KVCache, RotatingKVCache, ArraysCache)
    unknown = sorted({type(leaf).__name__ for leaf in leaves if type(leaf) not in known})
    kind = getattr(model, "model_type", "unknown type")
    if "ChunkedKVCache" in unknown:
        raise ModelError(
            f"model {name!r} ({kind}) attends in chunks (ChunkedKVCache) and wants one position "
            "for all rows; it cannot be batched"
        )
    if unknown:
        raise ModelError(
            f"model {name!r} ({kind}) has layers that keep {', '.join(unknown)}; batchkv serves "
            "layers that keep KVCache, RotatingKVCache, ArraysCache, or lists of these"
        )
    if any(isinstance(leaf, RotatingKVCache) and leaf.keep for leaf in leaves):
        raise ModelError(
            f"model {name!r} ({kind}) keeps its first tokens beside a sliding window "
            "(RotatingKVCache with keep); batchkv serves windows of the last tokens only"
        )


class _KeysProbe(KVCache):  # type: ignore[misc]
    """A cache that remembers the shapes which the model hands it."""

    window: Window = None
    shape: LayerShape | None = None
    is_index = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.shape = LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1])
        self.is_index = keys is values
        return super().update_and_fetch(keys, values)

    def make_mask(self, num_tokens: int, **_: Any) -> Any:
        return super().make_mask(num_tokens, return_array=False, window_size=None)


def _probe(leaf: Any) -> Any:
    if isinstance(leaf, ArraysCache):
        return leaf
    probe = _KeysProbe()
    if isinstance(leaf, RotatingKVCache):
        probe.window = int(leaf.max_size)
    return probe


def _leaf(name: str, probe: Any) -> Leaf:
    if isinstance(probe, ArraysCache):
        arrays = probe.cache
        return StateShape(
            tuple(None if array is None else tuple(array.shape[1:]) for array in arrays),
            tuple(None if array is None else array.dtype for array in arrays),
        )
    if probe.shape is None:
        raise ModelError(f"model {name!r} has layers that never use their cache; not served")
    if not (probe.shape.key_size and probe.shape.value_size):
        raise ModelError(
            f"model {name!r} keeps keys without values, an index over blocks of its cache; rows "
            "side by side would choose each other's blocks; not served"
        )
    return AttentionShape(probe.shape, probe.window, probe.is_index)
