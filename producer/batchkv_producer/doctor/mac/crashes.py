"""What macOS wrote in the last three days about panics of the GPU's driver and ended processes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, ok, warn, worst
from batchkv_producer.doctor.machine import Machine, read_text

RECENT_SECONDS = 72 * 3600
MAX_READ = 200  # reports
_MAC = ("darwin",)
_GPU = re.compile(r"IOGPU|AGX|GPURestart")
_LARGEST = re.compile(r'"largestProcess"\s*:\s*"([^"]*)"')
_OURS = re.compile(r"(?i)^python")


@dataclass(frozen=True, slots=True)
class CrashFacts:
    """Counts of reports. ``largest``: processes of which memory reports say that they were it."""

    gpu_panics: int = 0
    other_panics: int = 0
    memory_events: int = 0
    largest: tuple[str, ...] = ()
    python_crashes: int = 0


def crash_facts(machine: Machine) -> CrashFacts:
    """From the folders of reports of the user and of the system."""
    gpu = other = events = crashes = 0
    largest: list[str] = []
    for path in _reports(machine):
        text = read_text(path) or ""
        if path.suffix == ".panic" or path.name.startswith("panic-full"):
            gpu, other = (gpu + 1, other) if _GPU.search(text) else (gpu, other + 1)
        elif path.name.startswith("JetsamEvent"):
            events += 1
            found = _LARGEST.search(text)
            largest += [found[1]] if found else []
        elif _OURS.match(path.name) and "mlx" in text:
            crashes += 1
    return CrashFacts(gpu, other, events, tuple(dict.fromkeys(largest)), crashes)


def _reports(machine: Machine) -> Iterator[Path]:
    """The newest reports, over all folders."""
    library = "Library/Logs/DiagnosticReports"
    since = time.time() - RECENT_SECONDS
    found = []
    for folder in (machine.user_home / library, machine.root / library):
        try:
            items = [path for path in folder.iterdir() if path.is_file()]
            found += [(path.stat().st_mtime, path) for path in items]
        except OSError:  # it is not there, or closed to us
            continue
    recent = sorted((item for item in found if item[0] >= since), reverse=True)
    yield from (path for _, path in recent[:MAX_READ])


def judge_crashes(facts: CrashFacts) -> Verdict:
    """Panics of the GPU's driver under MLX are known; they are Apple's, and load brings them."""
    verdicts = []
    if facts.gpu_panics:
        verdicts.append(
            warn(
                f"kernel panics of the GPU's driver in three days: {facts.gpu_panics}",
                "update macOS; keep --wired-limit off; use fewer --slots",
            )
        )
    if facts.other_panics:
        verdicts.append(
            warn(
                f"other kernel panics in three days: {facts.other_panics}",
                "look at them in the app Console",
            )
        )
    if any(_OURS.match(name) for name in facts.largest):
        verdicts.append(
            warn(
                "Python was the largest process when memory ran out (reports of three days: "
                f"{facts.memory_events})",
                "give workers --memory, or use a smaller model or fewer --slots",
            )
        )
    if facts.python_crashes:
        verdicts.append(
            warn(
                f"crashes of Python in MLX in three days: {facts.python_crashes}",
                "update with `make venv`; report it with the crash report",
            )
        )
    return worst(verdicts, ok("no panic, and no process ended for want of memory, in three days"))


CHECKS = (Check("crash reports", crash_facts, judge_crashes, _MAC),)
