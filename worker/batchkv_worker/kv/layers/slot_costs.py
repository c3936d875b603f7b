"""What decode slots take, and which of them have a pool of shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.slots.growth import STEP
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.kv.slots.prefix_pool import SPARE


def costs_of(kinds: Sequence[LayerKind]) -> Costs:
    """Bytes of all layers together."""
    windows: dict[int, int] = {}
    per_token = extra_per_shared = 0
    for kind in kinds:
        if kind.window is None:
            per_token += kind.bytes_per_token
            extra_per_shared += (
                0 if kind.has_state else _bytes_in_prefix(kind) - kind.bytes_per_token
            )
        else:
            windows[kind.window] = windows.get(kind.window, 0) + kind.bytes_per_token
    per_row = sum(kind.bytes_per_row for kind in kinds)
    largest = max((kind.bytes_per_token for kind in kinds if kind.window is None), default=0)
    return Costs(per_token, windows, per_row, extra_per_shared, largest)


def _bytes_in_prefix(kind: LayerKind) -> int:
    """Bytes of one token in a shared prefix, and in the pool; nothing is computed."""
    packed, slots = kind.slots().as_prefix(kind.template(STEP))
    arrays = {id(array): array for parts in (*packed, *slots) for array in parts}
    in_pool = SPARE * kind.bytes_per_token if _has_pool(kind) else 0
    return sum(int(array.nbytes) for array in arrays.values()) // STEP + in_pool


def _has_pool(kind: LayerKind) -> bool:
    """Whether its slots can read shared prefixes from a pool."""
    return isinstance(kind, AttentionKind) and kind.records is not None


def have_pools(kinds: Sequence[LayerKind]) -> bool:
    """Whether that holds for all layers that keep keys and values."""
    found = [_has_pool(kind) for kind in kinds if isinstance(kind, AttentionKind)]
    return bool(found) and all(found)
