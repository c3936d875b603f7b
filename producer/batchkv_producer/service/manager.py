"""What launchd and systemd have in common: where a service's file is, and how it changes."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from batchkv_producer.errors import UsageError
from batchkv_producer.service.machine import Machine, Note, ServiceError
from batchkv_producer.service.spec import Service


@dataclass(frozen=True, slots=True)
class State:
    """An installed service. ``kind`` is agent, daemon, user unit or system unit.

    ``last_exit`` is None while it has never ended, or when nobody knows. ``log`` is a file or a
    command that shows it.
    """

    label: str
    kind: str
    path: str
    is_running: bool
    pid: int | None
    last_exit: int | None
    log: str

    @property
    def words(self) -> str:
        """Its state, for people."""
        if self.is_running:
            return f"running, process {self.pid}" if self.pid else "running"
        ended = "" if self.last_exit is None else f", last exit code {self.last_exit}"
        return f"not running{ended}"


class Manager(Protocol):
    """launchd or systemd. ``is_daemon``: for the machine, and not for one user's login."""

    def text(self, service: Service, *, is_daemon: bool) -> str:
        """The file of a service."""
        ...

    def path(self, label: str, *, is_daemon: bool) -> Path:
        """Where the file is."""
        ...

    def install(self, service: Service, *, is_daemon: bool) -> None:
        """Write the file, and start the service, again if it runs. Raises UsageError, ServiceError.

        A label has one kind: a daemon replaces the user's own service, which does not replace a
        daemon.
        """
        ...

    def uninstall(self, label: str, *, is_daemon: bool) -> bool:
        """Stop the service and remove its file; whether it was installed. Raises as ``install``."""
        ...

    def states(self) -> list[State]:
        """The services of batchkv that are installed here."""
        ...

    def advice(self, label: str, *, is_daemon: bool) -> list[str]:
        """What to know after an installation: where the log is, when the service starts."""
        ...


@dataclass(frozen=True, slots=True)
class Acting:
    """Changes the machine, or only says what it would change (``is_dry``)."""

    machine: Machine
    note: Note
    is_dry: bool = False

    def write(self, path: Path, text: str) -> None:
        """Write a file in one step; folders above it are made, and are the user's in their home."""
        if self.is_dry:
            self.note(f"would write: {path}")
            return
        self.make_folder(path.parent)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
                file.write(text)
            self._give(part)
            part.replace(path)
        except OSError as fault:
            part.unlink(missing_ok=True)
            raise ServiceError(f"cannot write {path}: {fault.strerror}") from fault

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it."""
        if self.is_dry:
            return
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            for each in reversed(missing):
                each.mkdir(mode=0o755, exist_ok=True)
                self._give(each)
        except OSError as fault:
            raise ServiceError(f"cannot make {folder}: {fault.strerror}") from fault

    def make_log(self, path: Path) -> None:
        """Make an empty log that is the user's alone: launchd might make it as root."""
        if self.is_dry or path.exists():
            return
        self.make_folder(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        self._give(path)

    def _give(self, path: Path) -> None:
        if path.is_relative_to(self.machine.home):
            self.machine.own(path)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        if self.is_dry:
            self.note(f"would remove: {path}")
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as fault:
            raise ServiceError(f"cannot remove {path}: {fault.strerror}") from fault

    def run(self, *command: str, advice: str = "") -> None:
        """Run a command of the system. Raises ServiceError with its words and ``advice``."""
        if self.is_dry:
            self.note(f"would run: {shlex.join(command)}")
            return
        ended = self.machine.run(*command)
        if ended.code != 0:
            words = " ".join(ended.output.split()) or f"exit code {ended.code}"
            raise ServiceError(f"`{shlex.join(command)}` failed ({words}){advice}")

    def need_root(self, what: str) -> None:
        """Refuse what only root may do; the message has the command with sudo."""
        if not (self.machine.is_root or self.is_dry):
            raise UsageError(f"{what} needs root: run `{sudo_command()}`")


def sudo_command(arguments: Sequence[str] | None = None) -> str:
    """The same command for a daemon, with sudo, which does not know this PATH."""
    program = Path(sys.prefix) / "bin" / "batchkv"
    words = list(sys.argv[1:] if arguments is None else arguments)
    words += [] if "--daemon" in words else ["--daemon"]
    return shlex.join(["sudo", str(program), *words])


def installed(folder: Path, suffix: str) -> list[Path]:
    """Files of services of batchkv in a folder, by their content."""
    found = []
    for path in sorted(folder.glob(f"*{suffix}")):
        try:
            if b"batchkv" in path.read_bytes():
                found.append(path)
        except OSError:  # another user's
            continue
    return found
