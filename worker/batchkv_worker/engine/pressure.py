"""Whether the whole machine is short of memory: watched on a thread of its own, off the engine's.

A Mac does not refuse memory. It compresses and swaps, and each step takes seconds. So the engine
must stop before that: macOS says how short it is, and how much is swapped out. On Linux this is
watched where keys and values are in the machine's memory, since the kernel ends the process there.
CUDA has memory of its own, and raises.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from batchkv_worker.kv.backends import sysctl
from batchkv_worker.kv.backends.memory_budget import Kind

log = logging.getLogger("batchkv.engine")

READ_SECONDS = 1.0  # between two readings
CALM_SECONDS = 5.0  # of a lower level before it counts, so that the level does not flicker
SWAP_SECONDS = 10.0  # over which growth of swap is measured
SWAP_WARNING = 2**29  # bytes swapped out in that time mean a warning, whatever the system reports
SWAP_CRITICAL = 2**31
_MEMINFO = Path("/proc/meminfo")
_LINUX_WARNING = 0.03  # of the machine's memory that is still available
_LINUX_CRITICAL = 0.015


class Level(IntEnum):
    """How short memory is, in macOS's numbers."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """The system's report at one moment; ``swap_bytes`` are swapped out."""

    level: Level
    swap_bytes: int = 0


Read = Callable[[], Reading]  # raises OSError or ValueError if the system gives no answer


class Pressure(Protocol):
    """The engine's interface. ``level`` may be read at any time, and never waits."""

    @property
    def level(self) -> Level: ...

    def close(self) -> None:
        """End it: the level is not read any more."""


class NoPressure:
    """For machines whose memory is not watched."""

    level = Level.NORMAL

    def close(self) -> None:
        """Nothing runs."""


class Judge:
    """The level by all readings so far. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._swap: deque[tuple[float, int]] = deque()
        self._level = Level.NORMAL
        self._higher_at = 0.0  # the time of the last reading of this level

    def add(self, now: float, reading: Reading) -> Level:
        """The level after one more reading. It rises at once, and falls after CALM_SECONDS."""
        wanted = max(reading.level, self._level_of_swap(now, reading.swap_bytes))
        if wanted >= self._level or now - self._higher_at >= CALM_SECONDS:
            self._level, self._higher_at = wanted, now
        return self._level

    def _level_of_swap(self, now: float, swap_bytes: int) -> Level:
        """The level by the growth of swap from its least: it may fall before it grows again."""
        self._swap.append((now, swap_bytes))
        while now - self._swap[0][0] > SWAP_SECONDS:
            self._swap.popleft()
        grown = swap_bytes - min(before for _, before in self._swap)
        if grown >= SWAP_CRITICAL:
            return Level.CRITICAL
        return Level.WARNING if grown >= SWAP_WARNING else Level.NORMAL


class Watcher:
    """Reads once a second. ``level`` is the latest; a source that fails counts as normal."""

    def __init__(self, read: Read, seconds: float = READ_SECONDS) -> None:
        self.level = Level.NORMAL
        self._read = read
        self._seconds = seconds
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="batchkv-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._is_closed.set()
        self._thread.join(2 * READ_SECONDS)

    def _watch(self) -> None:
        judge = Judge()
        try:
            while not self._is_closed.is_set():
                self.level = judge.add(time.monotonic(), self._read())
                self._is_closed.wait(self._seconds)
        except (OSError, ValueError) as fault:
            log.warning("the memory pressure cannot be read any more: %s", fault)
        finally:
            self.level = Level.NORMAL


def watch(kind: Kind, platform: str = sys.platform) -> Pressure:
    """The watch over this machine's memory, for a device of that kind; it may do nothing."""
    read: Read
    if platform == "darwin":
        read = read_macos
    elif platform == "linux" and kind == "cpu":
        read = read_linux
    else:
        return NoPressure()
    try:
        read()
    except (OSError, ValueError) as fault:
        log.info("the memory pressure cannot be read: %s", fault)
        return NoPressure()
    return Watcher(read)


def read_macos(read: sysctl.Read = sysctl.read_sysctl) -> Reading:
    """The kernel's own level. Levels that are not known count as the next lower one."""
    number = sysctl.pressure_level(read)
    level = max((level for level in Level if level <= number), default=Level.NORMAL)
    return Reading(level, sysctl.swap_used(read))


def read_linux(file: Path = _MEMINFO) -> Reading:
    """The level by the available share of memory in ``/proc/meminfo``."""
    return reading_of(file.read_text("ascii"))


def reading_of(meminfo: str) -> Reading:
    """The reading in the text of ``/proc/meminfo``; ValueError when it lacks a number."""
    sizes: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if (number := rest.split()[:1]) and number[0].isdigit():
            sizes[name] = 1024 * int(number[0])
    try:
        available, total = sizes["MemAvailable"], sizes["MemTotal"]
        swapped = sizes["SwapTotal"] - sizes["SwapFree"]
    except KeyError as fault:
        raise ValueError(f"/proc/meminfo has no {fault}") from fault
    if available < total * _LINUX_CRITICAL:
        return Reading(Level.CRITICAL, swapped)
    return Reading(Level.WARNING if available < total * _LINUX_WARNING else Level.NORMAL, swapped)
