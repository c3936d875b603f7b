"""A Mac's memory: the limit of the GPU, pressure, swap, and servers that run beside a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchkv_producer.doctor.contract import Check, Verdict, ok, warn, worst
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.server.memory_limit import limit_in

GIB = 2**30
MANY_SWAPPED = 2 * GIB
HUB_LABELS = ("dev.batchkv.queue", "dev.batchkv.cache")
_MAC = ("darwin",)
_PRESSURE = {1: "normal", 2: "warning", 4: "critical"}  # kern.memorystatus_vm_pressure_level
_SCALE = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class MacMemoryFacts:
    """Bytes. ``wired_limit_mb`` 0 is macOS' own; ``pressure`` is 1, 2 or 4, 0 is not known."""

    total_bytes: int
    wired_limit_mb: int = 0
    pressure: int = 0
    swap_used_bytes: int = 0
    available_bytes: int = 0


def memory_facts(machine: Machine) -> MacMemoryFacts:
    """From ``sysctl`` and ``vm_stat``."""
    return MacMemoryFacts(
        _number(machine, "hw.memsize"),
        _number(machine, "iogpu.wired_limit_mb"),
        _number(machine, "kern.memorystatus_vm_pressure_level"),
        swap_used(machine.run("sysctl", "-n", "vm.swapusage").text),
        available(machine.run("vm_stat").text),
    )


def judge_memory(facts: MacMemoryFacts) -> Verdict | None:
    """Metal does not refuse memory: macOS swaps, and a step takes seconds."""
    if not facts.total_bytes:
        return None
    total, less = facts.total_bytes / GIB, []
    if facts.pressure >= 2:
        word = _PRESSURE.get(facts.pressure, str(facts.pressure))
        less.append(
            warn(
                f"memory pressure is {word}",
                "end other programs, or use a smaller model or fewer --slots",
            )
        )
    if facts.swap_used_bytes > min(MANY_SWAPPED, facts.total_bytes / 8):
        less.append(
            warn(
                f"{facts.swap_used_bytes / GIB:,.1f} GiB are swapped out",
                "end other programs, or restart the Mac",
            )
        )
    limit = facts.wired_limit_mb * 2**20
    if limit > facts.total_bytes - max(3 * GIB, facts.total_bytes // 8):
        less.append(
            warn(
                f"iogpu.wired_limit_mb gives {limit / GIB:,.1f} of {total:,.0f} GiB to the GPU, "
                "which leaves macOS too little",
                "`sudo sysctl iogpu.wired_limit_mb=0` brings macOS' own limit back",
            )
        )
    free = f", {facts.available_bytes / GIB:,.1f} GiB available" if facts.available_bytes else ""
    own = f", at most {limit / GIB:,.1f} GiB for the GPU (iogpu.wired_limit_mb)" if limit else ""
    return worst(less, ok(f"{total:,.0f} GiB of memory{free}{own}"))


def swap_used(text: str) -> int:
    """Bytes, from ``total = 2048.00M  used = 710.81M  free = 1337.19M  (encrypted)``."""
    found = re.search(r"used = ([\d.,]+)([KMGT])", text)
    return int(float(found[1].replace(",", ".")) * _SCALE[found[2]]) if found else 0


def available(text: str) -> int:
    """Bytes that macOS can give at once, from ``vm_stat``: free, inactive, speculative pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    names = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
    pages = [re.search(rf"^{name}:\s+(\d+)\.", text, re.MULTILINE) for name in names]
    return sum(int(each[1]) for each in pages if each) * int(size[1]) if size else 0


@dataclass(frozen=True, slots=True)
class HubFacts:
    """Bytes that the hub's servers on this Mac may take, by their labels."""

    total_bytes: int
    limits: tuple[tuple[str, int], ...] = ()


def hub_facts(machine: Machine) -> HubFacts:
    """``maxmemory`` of the configurations of servers that launchd runs."""
    found = []
    for label in HUB_LABELS:
        for domain in (f"gui/{machine.uid}", "system"):
            printed = machine.run("launchctl", "print", f"{domain}/{label}")
            config = re.search(r"^\s*(/.*\.conf)\s*$", printed.text, re.MULTILINE)
            text = machine.read(config[1]) if printed.is_good and config else None
            if text:
                found.append((label, limit_in(text)))
                break
    return HubFacts(_number(machine, "hw.memsize"), tuple(found))


def judge_hub(facts: HubFacts) -> Verdict | None:
    """The hub's servers must leave the worker its share."""
    if not facts.limits or not facts.total_bytes:
        return None
    held = sum(limit for _, limit in facts.limits)
    names = " and ".join(label for label, _ in facts.limits)
    shown = f"{names} may take {held / GIB:,.1f} of {facts.total_bytes / GIB:,.0f} GiB"
    if not all(limit for _, limit in facts.limits):
        return warn(f"{names}: a configuration has no maxmemory", "set maxmemory in it")
    if held > facts.total_bytes / 4:
        return warn(
            f"{shown}, which a worker here lacks",
            "lower maxmemory in queue.conf and cache.conf: an eighth of the memory for each",
        )
    return ok(shown)


def _number(machine: Machine, name: str) -> int:
    asked = machine.run("sysctl", "-n", name)
    text = asked.text.strip()
    return int(text) if asked.is_good and text.isdigit() else 0


CHECKS = (
    Check("memory", memory_facts, judge_memory, _MAC),
    Check("hub on this Mac", hub_facts, judge_hub, _MAC),
)
