"""What computes here, and what is served, by names that are nobody's secret."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx_lm

from batchkv_worker.bench.bounds import Rates
from batchkv_worker.bench.results import Machine, Model
from batchkv_worker.kv.backends import device
from batchkv_worker.model.loader import LoadedModel

_CPUINFO = Path("/proc/cpuinfo")


def machine_of(rates: Rates) -> Machine:
    """This machine, which does so much at most."""
    chip, memory = chip_and_memory()
    return Machine(
        chip=chip,
        memory_gb=round(memory / 2**30, 1),
        system=f"{os.uname().sysname} {os.uname().release}",
        device=device.kind(),
        mlx=mx.__version__,
        mlx_lm=mlx_lm.__version__,
        batchkv=version("batchkv"),
        gigabytes_per_second=rates.bytes_per_second / 1e9,
        teraflops=rates.operations_per_second / 1e12,
    )


def model_of(loaded: LoadedModel) -> Model:
    """A model; of a folder on this machine only the last part of its path."""
    name = Path(loaded.name).name if Path(loaded.name).expanduser().is_dir() else loaded.name
    dtype = str(loaded.dtype).removeprefix("mlx.core.")
    return Model(name, str(loaded.caches), dtype, loaded.weight_bytes / 1e9)


def chip_and_memory() -> tuple[str, int]:
    """The device's name and its memory in bytes; on a CPU, the processor's and the host's."""
    if device.kind() != "cpu":
        info = mx.device_info()
        sizes = (info.get(name) for name in ("memory_size", "total_memory"))
        memory = next((size for size in sizes if isinstance(size, int)), 0)
        return str(info.get("device_name", "GPU")), memory
    return _processor(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    """With the number of cores that this process may use."""
    try:
        known = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text("utf-8"), re.MULTILINE)
    except OSError:
        known = None
    name = known[1].strip() if known else platform.processor() or platform.machine()
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return f"{name}, {cores} cores"
