"""The device that MLX runs on: its memory, and the switches that batchkv sets."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

import mlx.core as mx

from batchkv_producer.errors import BatchkvError
from batchkv_producer.server.home import home_from_environment
from batchkv_worker.kv.backends import host_memory, mlx_kernels, packed_products
from batchkv_worker.kv.backends.launching import share_stream
from batchkv_worker.kv.backends.memory_budget import (
    Kind,
    MemoryFacts,
    cuda_pool_limit,
    pool_limit,
)

log = logging.getLogger("batchkv.device")

_CPU_SHARE = 0.5  # of the machine's memory, when keys and values live in it
_ALONE_SHARE = 0.95  # of a GPU's memory: where more is free, no other program counts
_FREE_SHARE = 0.95  # of what others leave, that MLX may use
_DRAIN_ATTEMPTS = 16
_CLEAN_ROUNDS = 2  # without an error, after which the device has nothing left to report


def prepare_device(*, wired_limit: bool) -> None:
    """Log the device, and limit the memory that MLX takes on a GPU.

    By default MLX keeps most of the memory that was used once. So the memory that it keeps after it
    was freed gets a limit. And when more is in use than the device recommends, MLX on Metal waits
    for running work before it starts more. On CUDA the limit of all that MLX uses stays its own
    where no other program uses the device.

    On CUDA the calling thread gets another default stream, which other threads may use, too. MLX
    keeps its kernels in the home folder, and multiplies all rows with packed weights at once. So
    this comes before anything is computed.

    Wiring is off by default: kernel panics under continuous batching were reported with it and
    none without.
    """
    log.info("device: %s", name())
    if kind() == "cuda":
        _keep_kernels()
        packed_products.join_rows()
        _leave_memory()
        share_stream()
    recommended = _metal_bytes("max_recommended_working_set_size")
    if not recommended:
        return
    pool = pool_limit(_ram_bytes())
    mx.set_cache_limit(pool)
    mx.set_memory_limit(recommended)
    log.info(
        "MLX may use %.1f GB, and keeps up to %.1f GB of freed memory",
        *(recommended / 2**30, pool / 2**30),
    )
    if wired_limit:
        mx.set_wired_limit(recommended)


def compile_kernels(dtype: mx.Dtype) -> None:
    """Have MLX compile now what rows of a model of ``dtype`` would wait for: on CUDA, once."""
    if kind() == "cuda":
        mlx_kernels.compile_now(dtype)


def code_folder() -> Path | None:
    """Where MLX keeps code on CUDA, if ``prepare_device`` chose it."""
    return mlx_kernels.folder()


def _keep_kernels() -> None:
    try:
        home = home_from_environment().path
    except BatchkvError as fault:
        log.debug("MLX keeps its kernels where it would: %s", fault)
        return
    mlx_kernels.keep_in(home, str(mx.device_info().get("architecture", "")))


def _leave_memory() -> None:
    """Leave other programs what they use of the device's memory. MLX's own limit counts none.

    And keep little of what is freed, for programs that come later.
    """
    free, total = free_bytes(), _recommended_bytes()
    pool = cuda_pool_limit(free)
    mx.set_cache_limit(pool)
    log.info("MLX keeps up to %.1f GB of freed memory", pool / 2**30)
    if free < total:
        mx.set_memory_limit(int(free * _FREE_SHARE))
        log.info(
            "%.1f GB of the device's memory are in use already: MLX may use %.1f GB",
            *((total - free) / 2**30, free * _FREE_SHARE / 2**30),
        )


def kind() -> Kind:
    """The kind of device that MLX computes on by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def num_cpus() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name() -> str:
    """The device as MLX calls it, for reports."""
    return str(mx.default_device())


def usual_dtype() -> mx.Dtype | None:
    """The default dtype to compute in; None: that of the model's weights."""
    return mx.float32 if kind() == "cpu" else None


def memory_facts(tier_bytes: int = 0) -> MemoryFacts:
    """The facts of this machine.

    ``tier_bytes`` is the limit of the worker's cache tier in memory.
    """
    which, ram = kind(), _ram_bytes()
    if which != "metal":
        return MemoryFacts(which, ram, free_bytes())
    return MemoryFacts(
        which,
        ram,
        _recommended_bytes(),
        wired=host_memory.wired_bytes(),
        hub=host_memory.hub_bytes(host_memory.job_folders()),
        tier=tier_bytes,
        swap=host_memory.swap_bytes(),
    )


def drain() -> bool:
    """Wait until the device has no work and reports no error. False: it still reports errors.

    Work that was given to a device before it failed may fail later, and the next call raises for
    it. So a small computation is made, too.
    """
    num_clean = 0
    for _ in range(_DRAIN_ATTEMPTS):
        try:
            mx.synchronize()
            mx.eval(mx.zeros(1) + 1)
        except (RuntimeError, MemoryError) as fault:
            num_clean = 0
            log.debug("the device still reports: %s", fault)
            continue
        num_clean += 1
        if num_clean == _CLEAN_ROUNDS:
            return True
    return False


def _ram_bytes() -> int:
    if size := _metal_bytes("memory_size"):
        return size
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def _metal_bytes(key: str) -> int:
    """A size that Metal reports, even if MLX computes on the CPU by default; 0 without Metal."""
    return int(mx.device_info(mx.gpu).get(key, 0)) if mx.metal.is_available() else 0


def free_bytes() -> int:
    """Bytes of the device's memory that other programs leave; all, if they use next to nothing.

    Small programs come and go, and the budget should not.
    """
    free, total = _free_at_first(), _recommended_bytes()
    return free if 0 < free < _ALONE_SHARE * total else total


@cache
def _free_at_first() -> int:
    """What is free when this process first asks: later, its own models have taken some.

    0 where the device does not say.
    """
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else 0


def _recommended_bytes() -> int:
    if kind() != "cpu":
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(info.get(key), int) and info[key] > 0:
                return int(info[key])
    return int(_ram_bytes() * _CPU_SHARE)
