"""The checks that only Linux has: processor, memory with a container's limit, NVIDIA's driver."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import distributions

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn
from batchkv_producer.doctor.installation import numbers
from batchkv_producer.doctor.machine import Machine

GIB = 2**30
FEW_BYTES = 2 * GIB
# MLX's page on installation: the drivers that its builds for CUDA 12 and 13 need at least.
MIN_DRIVER = {"12": (550, 54), "13": (580, 0)}
_LINUX = ("linux",)
_KIB_LINE = r"^{name}:\s+(\d+) kB"
_UNLIMITED = 1 << 60  # what the first version of control groups says for "no limit"


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """``num_usable``: processors that this process may use. ``flags`` of an x86 processor."""

    name: str
    arch: str
    num_usable: int
    flags: frozenset[str]


def cpu_facts(machine: Machine) -> CpuFacts:
    """From ``/proc/cpuinfo``."""
    text = machine.read("/proc/cpuinfo") or ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return CpuFacts(
        name[1].strip() if name else "",
        platform.machine(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        frozenset(flags[1].split()) if flags else frozenset(),
    )


def judge_cpu(facts: CpuFacts) -> Verdict:
    """MLX's CPU build on x86 uses AVX2 and FMA."""
    shown = f"{facts.name or facts.arch}, {facts.num_usable} processors"
    lacking = sorted({"avx2", "fma"} - facts.flags) if facts.flags else []
    if facts.arch in ("x86_64", "AMD64") and lacking:
        return warn(
            f"{shown}, without {' and '.join(lacking)}: models compute slowly on it",
            "use it to submit, or let the virtual machine pass the processor's features on",
        )
    return ok(shown)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes; ``limit_bytes`` is that of the container or service, None without one."""

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int = 0
    limit_bytes: int | None = None


def memory_facts(machine: Machine) -> MemoryFacts:
    """From ``/proc/meminfo`` and the control group."""
    text = machine.read("/proc/meminfo") or ""
    swap = _kib(text, "SwapTotal") - _kib(text, "SwapFree")
    return MemoryFacts(
        _kib(text, "MemTotal"), _kib(text, "MemAvailable"), swap, _group_limit(machine)
    )


def judge_memory(facts: MemoryFacts) -> Verdict | None:
    """Room for a model; a container's limit that the worker's own reckoning does not see."""
    if not facts.total_bytes:
        return None
    shown = f"{facts.available_bytes / GIB:,.1f} of {facts.total_bytes / GIB:,.1f} GiB available"
    if facts.limit_bytes is not None and facts.limit_bytes < facts.total_bytes * 0.9:
        return warn(
            f"a container or service may use {facts.limit_bytes / GIB:,.1f} GiB of "
            f"{facts.total_bytes / GIB:,.1f}",
            "give the worker --memory, so that weights, keys and values fit into the limit",
        )
    if facts.available_bytes < FEW_BYTES:
        return warn(shown, "end other programs, or use a smaller model")
    return ok(shown)


def _kib(text: str, name: str) -> int:
    found = re.search(_KIB_LINE.format(name=name), text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _group_limit(machine: Machine) -> int | None:
    """The smallest memory limit of the control groups above this process."""
    limits = []
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            parts = [part for part in path.split("/") if part and part != ".."]
            folders = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
            files = [f"/sys/fs/cgroup/{folder}/memory.max" for folder in folders]
        elif "memory" in kinds.split(","):
            files = [
                f"/sys/fs/cgroup/memory{path.rstrip('/')}/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ]
        else:
            continue
        limits += [text.strip() for file in files if (text := machine.read(file))]
    found = [int(text) for text in limits if text.isdigit() and int(text) < _UNLIMITED]
    return min(found, default=None)


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """NVIDIA's devices. ``has_device``: the kernel has its driver. ``cuda_build``: 12 or 13.

    ``mlx``: its version, or "".
    """

    has_device: bool
    answers: bool = False
    driver: str = ""
    devices: tuple[str, ...] = ()
    free_mib: int = 0
    total_mib: int = 0
    cuda_build: str = ""
    mlx: str = ""


def nvidia_facts(machine: Machine) -> NvidiaFacts:
    """Ask ``nvidia-smi``, where the kernel has NVIDIA's driver."""
    if machine.read("/proc/driver/nvidia/version") is None:
        return NvidiaFacts(False)
    fields = "name,driver_version,memory.free,memory.total"
    asked = machine.run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in asked.text.splitlines()]
    rows = [row for row in rows if len(row) == 4] if asked.is_good else []
    known = {(each.metadata["Name"] or "").lower(): each.version for each in distributions()}
    build = next((name[9:11] for name in sorted(known) if name.startswith("mlx-cuda-")), "")
    mlx = known.get("mlx", "")
    if not rows:
        return NvidiaFacts(True, cuda_build=build, mlx=mlx)
    return NvidiaFacts(
        True,
        True,
        rows[0][1],
        tuple(row[0] for row in rows),
        _whole(rows[0][2]),
        _whole(rows[0][3]),
        build,
        mlx,
    )


def judge_nvidia(facts: NvidiaFacts) -> Verdict | None:
    """A device that MLX cannot use, or a driver that is too old for MLX's build."""
    if not facts.has_device:
        return None
    if not facts.answers:
        return fail(
            "NVIDIA's driver is loaded, and nvidia-smi does not answer",
            "restart the machine, or install the driver again",
        )
    shown = f"{facts.devices[0]}, driver {facts.driver}"
    if len(facts.devices) > 1:
        shown = f"{len(facts.devices)} devices; a worker uses the first: {shown}"
    if facts.mlx and not facts.cuda_build:
        build = "13" if numbers(facts.driver)[:2] >= MIN_DRIVER["13"] else "12"
        return warn(
            f"{shown}, and MLX is the build for CPUs",
            f"install the one for it: `pip install 'mlx[cuda{build}]=={facts.mlx}'`",
        )
    needed = MIN_DRIVER.get(facts.cuda_build)
    if needed and numbers(facts.driver)[:2] < needed:
        least = ".".join(map(str, needed))
        return fail(
            f"{shown} is too old for MLX's build for CUDA {facts.cuda_build}",
            f"install driver {least} or newer",
        )
    if facts.total_mib and facts.free_mib < facts.total_mib / 2:
        return warn(
            f"{shown}: {facts.free_mib / 1024:,.1f} of {facts.total_mib / 1024:,.1f} GiB are free",
            "another program uses the device: end it, or give the worker --memory",
        )
    return ok(f"{shown}, {facts.total_mib / 1024:,.0f} GiB")


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


CHECKS = (
    Check("processor", cpu_facts, judge_cpu, _LINUX),
    Check("memory", memory_facts, judge_memory, _LINUX),
    Check("NVIDIA", nvidia_facts, judge_nvidia, _LINUX),
)
