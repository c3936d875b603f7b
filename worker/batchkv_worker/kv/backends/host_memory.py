"""The other users of a Mac's memory: read once at start, from the system and launchd's files.

A number that cannot be read counts as 0: the budget is then as large as without it. No MLX.
"""

from __future__ import annotations

import plistlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

from batchkv_producer.server.memory_limit import limit_in
from batchkv_worker.kv.backends.sysctl import Read, read_sysctl, swap_used

_VM_STAT = "/usr/bin/vm_stat"
_SECONDS = 5.0  # for one command
_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_WIRED = re.compile(r"^Pages wired down:\s+(\d+)\.", re.MULTILINE)
HUB_LABELS = ("dev.batchkv.queue", "dev.batchkv.cache")


def wired_bytes(platform: str = sys.platform) -> int:
    """Bytes of this Mac's memory that cannot be swapped; 0 elsewhere."""
    if platform != "darwin":
        return 0
    try:
        done = subprocess.run(
            [_VM_STAT], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return wired_in(done.stdout)


def wired_in(vm_stat: str) -> int:
    """Wired bytes in the output of ``vm_stat``; 0 if it has none."""
    size, pages = _PAGE_SIZE.search(vm_stat), _WIRED.search(vm_stat)
    return int(size[1]) * int(pages[1]) if size and pages else 0


def swap_bytes(read: Read = read_sysctl) -> int:
    """Bytes of this Mac's memory that are swapped out; 0 elsewhere."""
    try:
        return swap_used(read)
    except (OSError, ValueError):
        return 0


def job_folders() -> tuple[Path, ...]:
    """Where launchd finds jobs of this user and of the machine."""
    return Path.home() / "Library/LaunchAgents", Path("/Library/LaunchDaemons")


def hub_bytes(folders: Sequence[Path]) -> int:
    """The memory limits of the hub's servers that launchd runs on this Mac, in bytes.

    ``folders`` have launchd's jobs. A server is one of HUB_LABELS; its limit is in its
    configuration. A server without a limit counts as nothing.
    """
    total = 0
    for label in HUB_LABELS:
        files = (folder / f"{label}.plist" for folder in folders)
        total += next((limit for file in files if (limit := _limit_of_job(file))), 0)
    return total


def _limit_of_job(file: Path) -> int:
    """The limit of the server that a job of launchd starts; 0 when there is no such job."""
    try:
        with file.open("rb") as opened:
            job = plistlib.load(opened)
        arguments = [str(each) for each in job.get("ProgramArguments", ())]
        folder = Path(str(job.get("WorkingDirectory", "/")))
        configurations = [folder / each for each in arguments if each.endswith(".conf")]
        return max((limit_in(each.read_text("utf-8")) for each in configurations), default=0)
    except (OSError, ValueError, AttributeError, TypeError, ExpatError):
        return 0
