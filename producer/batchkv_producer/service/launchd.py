"""Services under launchd: an agent of one user's desktop login, or a daemon of the machine.

An agent starts at login. macOS 15 and newer keep it off the local network until the user allows
it. A daemon starts with the machine, runs as ``UserName``, and is exempt from that.
"""

from __future__ import annotations

import plistlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchkv_producer.errors import UsageError
from batchkv_producer.service.machine import ServiceError
from batchkv_producer.service.manager import Acting, State, installed, sudo_command
from batchkv_producer.service.spec import Service

SUPERVISOR = Path(__file__).with_name("supervise.sh")
OWN_UMASK = 0o77
# bootout returns before the process has ended: so much longer than its ExitTimeOut is waited.
_LONGER_SECONDS = 15
_POLL_SECONDS = 0.2


class Launchd:
    """``Manager`` of macOS."""

    def __init__(self, acting: Acting, sleep: Callable[[float], None] = time.sleep) -> None:
        self._acting = acting
        self._machine = acting.machine
        self._sleep = sleep

    def path(self, label: str, *, is_daemon: bool) -> Path:
        library = self._machine.root if is_daemon else self._machine.home
        return (
            library
            / "Library"
            / ("LaunchDaemons" if is_daemon else "LaunchAgents")
            / (f"{label}.plist")
        )

    def text(self, service: Service, *, is_daemon: bool) -> str:
        values = self.values(service, is_daemon=is_daemon)
        return plistlib.dumps(values, sort_keys=False).decode("utf-8").rstrip() + "\n"

    def values(self, service: Service, *, is_daemon: bool) -> dict[str, Any]:
        """The property list of a service."""
        log = str(self.log(service.label))
        codes = " ".join(map(str, service.pause_codes))
        awake = "yes" if service.is_server else "no"
        supervised = (log, codes, str(service.pause_seconds), awake, *service.command)
        environment = dict(service.environment)
        owner: dict[str, Any] = {}
        if is_daemon:
            machine = self._machine
            owner = {"UserName": machine.user, "GroupName": machine.group}
            environment |= {"HOME": str(machine.home), "USER": machine.user}
            environment |= {"LOGNAME": machine.user}
        return {
            "Label": service.label,
            **owner,
            "ProgramArguments": ["/bin/sh", str(SUPERVISOR), *supervised],
            "EnvironmentVariables": environment,
            "WorkingDirectory": str(service.folder),
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": service.restart_seconds,
            "ExitTimeOut": service.stop_seconds,
            "ProcessType": "Interactive",  # macOS may slow others down
            "SoftResourceLimits": {"NumberOfFiles": service.open_files},  # launchd's own is 256
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "Umask": OWN_UMASK,
        }

    def log(self, label: str) -> Path:
        """Where a service writes."""
        return self._machine.home / "Library" / "Logs" / "batchkv" / f"{label}.log"

    def install(self, service: Service, *, is_daemon: bool) -> None:
        label, path = service.label, self.path(service.label, is_daemon=is_daemon)
        if is_daemon:
            self._acting.need_root("--daemon")
            if self.path(label, is_daemon=False).exists():
                self._acting.note(f"the agent {label} is removed: a daemon takes its place")
                self.uninstall(label, is_daemon=False)
        else:
            self._refuse_daemon(label)
            self._need_desktop()
        self._acting.make_log(self.log(label))
        self._acting.write(path, self.text(service, is_daemon=is_daemon))
        self._unload(label, service.stop_seconds, is_daemon=is_daemon)
        target = self._target(label, is_daemon=is_daemon)
        self._acting.run("launchctl", "enable", target)
        self._acting.run(
            *("launchctl", "bootstrap", self._domain(is_daemon=is_daemon), str(path)),
            advice=""
            if is_daemon
            else ". If nobody is logged in at this Mac's desktop, use --daemon",
        )

    def uninstall(self, label: str, *, is_daemon: bool) -> bool:
        path = self.path(label, is_daemon=is_daemon)
        if not path.exists() and not self._acting.is_dry:
            return False
        if is_daemon:
            self._acting.need_root(f"the daemon {label}")
        self._unload(label, _stop_seconds(path), is_daemon=is_daemon)
        self._acting.remove(path)
        return True

    def states(self) -> list[State]:
        found = []
        for is_daemon in (False, True):
            folder = self.path("", is_daemon=is_daemon).parent
            for path in installed(folder, ".plist"):
                label, kind = path.stem, "daemon" if is_daemon else "agent"
                asked = self._machine.run(
                    "launchctl", "print", self._target(label, is_daemon=is_daemon)
                )
                printed = asked.output if asked.code == 0 else ""
                is_running, pid, last_exit = read_print(printed)
                log = str(self.log(label))
                found.append(State(label, kind, str(path), is_running, pid, last_exit, log))
        return found

    def advice(self, label: str, *, is_daemon: bool) -> list[str]:
        lines = [f"its log: {self.log(label)}"]
        if not is_daemon:
            lines.append(
                "it starts at login. macOS 15 and newer keep it off the local network until you "
                "allow it (System Settings > Privacy & Security > Local Network). With --daemon it "
                "starts with the machine and needs no such permission"
            )
        return lines

    def _domain(self, *, is_daemon: bool) -> str:
        return "system" if is_daemon else f"gui/{self._machine.uid}"

    def _target(self, label: str, *, is_daemon: bool) -> str:
        return f"{self._domain(is_daemon=is_daemon)}/{label}"

    def _refuse_daemon(self, label: str) -> None:
        if self.path(label, is_daemon=True).exists() and not self._acting.is_dry:
            again = sudo_command(["service", "uninstall", "--label", label])
            raise UsageError(
                f"a daemon {label} is installed, and both would run: remove it with `{again}`, or "
                "install again with --daemon"
            )

    def _need_desktop(self) -> None:
        """launchd has a domain for agents only while their user is logged in at the desktop."""
        if self._acting.is_dry:
            return
        asked = self._machine.run("launchctl", "print", self._domain(is_daemon=False))
        if asked.code != 0:
            raise UsageError(
                f"{self._machine.user} is not logged in at this Mac's desktop, and an agent needs "
                "that (ssh is no such login). Log in there, or install a daemon: "
                f"`{sudo_command()}`"
            )

    def _unload(self, label: str, stop_seconds: int, *, is_daemon: bool) -> None:
        """Stop a service and wait until launchd has forgotten it: else bootstrap fails."""
        target = self._target(label, is_daemon=is_daemon)
        if self._acting.is_dry:
            self._acting.run("launchctl", "bootout", target)
            return
        seconds = 0.0
        while self._machine.run("launchctl", "print", target).code == 0:
            if seconds == 0:
                self._machine.run("launchctl", "bootout", target)
            elif seconds >= stop_seconds + _LONGER_SECONDS:
                raise ServiceError(f"{label} does not stop: see {self.log(label)}")
            self._sleep(_POLL_SECONDS)
            seconds += _POLL_SECONDS


def _stop_seconds(path: Path) -> int:
    """How long launchd gives a service to stop; the longest of ours when its file says nothing."""
    try:
        return int(plistlib.loads(path.read_bytes()).get("ExitTimeOut", 120))
    except (OSError, ValueError, TypeError, AttributeError, plistlib.InvalidFileException):
        return 120


def read_print(text: str) -> tuple[bool, int | None, int | None]:
    """(is running, process id, last exit code) of what `launchctl print` says of a service."""

    def number(name: str) -> int | None:
        found = re.search(rf"^\s*{name} = (-?\d+)", text, re.MULTILINE)
        return int(found[1]) if found else None

    is_running = re.search(r"^\s*state = running\s*$", text, re.MULTILINE) is not None
    return is_running, number("pid") if is_running else None, number("last exit code")
