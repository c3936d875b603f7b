"""Checks before a service is installed, so that no service starts again and again in vain.

Each raises UsageError, with a sentence that names what is wrong and what to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from pathlib import Path

from batchkv_producer.errors import UsageError
from batchkv_producer.service.machine import MACOS, Machine

MAX_URL_BYTES = 4096
_LABEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_URL = re.compile(rb"(redis|rediss|unix)://\S+")
# macOS asks the user before a program reads these, and a service has nobody to ask.
_GUARDED_FOLDERS = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")


def need_label(label: str) -> str:
    """A name for launchd or systemd, which is a file's name too."""
    if not _LABEL.fullmatch(label):
        raise UsageError(f"--label {label!r}: a label has letters, digits, dots and dashes")
    return label


def need_plain(flag: str, value: str) -> str:
    """No control character may reach a service's file or the terminal."""
    if not value or not value.isprintable():
        raise UsageError(f"{flag}: the value is empty, or has a character that cannot be printed")
    return value


def need_private_file(path: Path, uid: int, source: str = "") -> None:
    """A file that holds a password: the user's own, readable, and closed to everybody else.

    ``source`` is the file of the hub's folder from which a user makes this one.
    """
    need_plain(f"the path {path}", str(path))
    try:
        found = path.stat()
        with path.open("rb"):
            pass
    except FileNotFoundError as fault:
        todo = f". Copy the hub's {source} to it, and run `chmod 600 {path}`" if source else ""
        raise UsageError(f"{path} cannot be read: {fault.strerror}{todo}") from fault
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}") from fault
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is not a file")
    if found.st_uid != uid:
        raise UsageError(f"{path} belongs to another user than the service will run as")
    if found.st_mode & 0o077:
        raise UsageError(f"{path} can be opened by other users: run `chmod 600 {path}`")


def need_url(path: Path) -> None:
    """The file holds a URL. It is not shown, because it has a password."""
    with path.open("rb") as file:
        text = file.read(MAX_URL_BYTES).strip()
    if not _URL.fullmatch(text):
        raise UsageError(f"{path} does not hold a URL such as redis://:PASSWORD@HOST:6379/0")


def need_program(kind: str) -> Path:
    """The `batchkv` of this installation, with what a worker needs."""
    program = Path(sys.prefix) / "bin" / "batchkv"
    if not os.access(program, os.X_OK):
        raise UsageError(f"{program} is missing: run `make venv SET=worker`")
    if kind == "worker" and importlib.util.find_spec("mlx") is None:
        raise UsageError(
            f"{sys.prefix} has no MLX, which a worker needs: run `make venv SET=worker`"
        )
    return program


def need_hub(hub: Path, name: str, uid: int) -> None:
    """A hub's folder, as deploy/hub/setup.sh makes it."""
    need_plain("--hub", str(hub))
    if not (hub / f"{name}.conf").is_file():
        raise UsageError(f"{hub / f'{name}.conf'} is missing: deploy/hub/setup.sh makes it")
    need_private_file(hub / "secrets" / f"{name}-users.acl", uid)


def guarded_places(machine: Machine, *paths: Path) -> list[Path]:
    """Those of the paths that macOS keeps from services."""
    if machine.system != MACOS:
        return []
    folders = [machine.home / name for name in _GUARDED_FOLDERS] + [Path("/Volumes")]
    return [path for path in paths if any(path.is_relative_to(folder) for folder in folders)]
