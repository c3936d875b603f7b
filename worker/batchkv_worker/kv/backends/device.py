"""The device that MLX runs on: its memory, and the switches that batchkv sets."""

from __future__ import annotations

import logging
import os

import mlx.core as mx

log = logging.getLogger("batchkv.device")

_CPU_SHARE = 0.5  # of the machine's memory, when keys and values live in it
_RESERVE = 0.1  # of a GPU's working set, for activations


def prepare_device(*, wired_limit: bool) -> None:
    """Say which device serves; wire memory only when asked.

    Wiring is off by default: kernel panics under continuous batching were reported with it and
    none without.
    """
    log.info("device: %s", mx.default_device())
    if wired_limit and mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def is_cuda() -> bool:
    """Whether MLX computes on a GPU that is not Metal's."""
    return bool(mx.default_device() == mx.Device(mx.gpu) and not mx.metal.is_available())


def shape_step() -> int:
    """What to round shapes up to: CUDA prepares kernels for each new shape, the others do not."""
    return 64 if is_cuda() else 1


def usual_chunk() -> int:
    """Tokens of a prompt to compute at once where nothing was measured."""
    if mx.default_device() == mx.Device(mx.cpu):
        return 512
    return 2048 if is_cuda() else 1024


def is_float32_on_cpu(dtype: mx.Dtype) -> bool:
    """Whether MLX's CPU kernels serve, in the type that they are fast in."""
    return bool(dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu))


def kv_memory_bytes(weight_bytes: int) -> int:
    """Bytes for keys and values: what the device recommends to use, less weights and a reserve."""
    total = _recommended_bytes()
    return max(64 * 2**20, int(total * (1 - _RESERVE)) - weight_bytes)


def _recommended_bytes() -> int:
    if mx.default_device() == mx.Device(mx.gpu):
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(info.get(key), int) and info[key] > 0:
                return int(info[key])
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * size * _CPU_SHARE)
