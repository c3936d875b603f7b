"""The default number of slots: constants by device, until they are measured.

A step's products cost an Apple GPU the same from 10 to 32 rows, and twice that at 33. M1 to M4 are
at their limit with 32 rows: more rows only wait. An M5 has neural accelerators, whose tiles have 64
rows, and an Ultra has twice the cores. On Macs with 8 GB the dense copies and logits of
32 rows take memory that macOS needs. 16 GB have room for 32 rows, but not for 64.

On CUDA the host limits steps of short rows: on an H100 a bare pass through a model of 4B takes 10
to 14 ms, for 8 rows as for 64. Small devices have no room for 64.
"""

from __future__ import annotations

import re

import mlx.core as mx

from batchkv_worker.kv.backends import device

USUAL = 32
ON_WIDE_CHIPS = 64
ON_SMALL_MACS = 16
SMALL_BYTES = 8 * 2**30  # memory of the largest Mac that counts as small
WIDE_BYTES = 16 * 2**30  # more memory than this is needed for 64 rows
_WIDE_GENERATION = 5


def default_slots(kind: str, chip: str = "", memory_bytes: int = 0) -> int:
    """Rows that decode at once on a device of a ``device.kind()``.

    ``chip`` is the name that MLX reports, such as ``Apple M4 Max``. ``memory_bytes`` is all of the
    machine's memory, on CUDA the device's own. Macs whose chip has no known name, and devices with
    memory of unknown size, get the usual number.
    """
    if kind == "cuda":
        return ON_WIDE_CHIPS if memory_bytes > WIDE_BYTES else USUAL
    if kind != "metal":
        return USUAL
    if 0 < memory_bytes <= SMALL_BYTES:
        return ON_SMALL_MACS
    generation = re.search(r"\bM([0-9]+)\b", chip)
    if 0 < memory_bytes <= WIDE_BYTES:
        return USUAL
    is_wide = "Ultra" in chip or (generation and int(generation[1]) >= _WIDE_GENERATION)
    return ON_WIDE_CHIPS if is_wide else USUAL


def slots_of_this_machine() -> int:
    """``default_slots`` for the device that MLX computes on by default."""
    kind = device.kind()
    if kind == "cpu":
        return default_slots(kind)
    info = mx.device_info()
    memory = info.get("memory_size" if kind == "metal" else "total_memory", 0)
    return default_slots(
        kind, str(info.get("device_name", "")), memory if isinstance(memory, int) else 0
    )
