"""The device that MLX runs on: its memory, and the switches that batchkv sets."""

from __future__ import annotations

import logging
import os
from typing import Literal

import mlx.core as mx

log = logging.getLogger("batchkv.device")

_CPU_SHARE = 0.5  # of the machine's memory, when keys and values live in it
_RESERVE = 0.1  # of a GPU's working set, for activations


def prepare_device(*, wired_limit: bool) -> None:
    """Say which device serves; wire memory only when asked.

    Wiring is off by default: kernel panics under continuous batching were reported with it and
    none without.
    """
    log.info("device: %s", name())
    if wired_limit and mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def kind() -> Literal["cpu", "metal", "cuda"]:
    """What MLX computes on by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def name() -> str:
    """The device as MLX calls it, for reports."""
    return str(mx.default_device())


def usual_dtype() -> mx.Dtype | None:
    """The dtype to compute in where nobody asks for one; None: that of the model's weights."""
    return mx.float32 if kind() == "cpu" else None


def kv_memory_bytes(weight_bytes: int) -> int:
    """Bytes for keys and values: what the device recommends to use, less weights and a reserve."""
    total = _recommended_bytes()
    return max(64 * 2**20, int(total * (1 - _RESERVE)) - weight_bytes)


def _recommended_bytes() -> int:
    if kind() != "cpu":
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(info.get(key), int) and info[key] > 0:
                return int(info[key])
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * size * _CPU_SHARE)
