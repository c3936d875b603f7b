"""Services under systemd: a unit of one user, or of the machine (``--daemon``)."""

from __future__ import annotations

import re
from pathlib import Path

from batchkv_producer.errors import UsageError
from batchkv_producer.service.manager import Acting, State, installed, sudo_command
from batchkv_producer.service.spec import Service

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")
UNIT = """\
[Unit]
Description={about}
{network}{limit}
[Service]
Type=exec
ExecStart={command}
{environment}WorkingDirectory={folder}
{user}Restart=always
RestartSec={restart_seconds}
{prevent}# A stop is for the program alone, which ends or gives back what it holds.
KillMode=mixed
TimeoutStopSec={stop_seconds}
LimitNOFILE={open_files}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy={target}
"""
ENDLESS = """\
# A worker waits for its hub for ever: only RestartSec slows it down.
StartLimitIntervalSec=0
"""
LIMITED = """\
# Give up when it ends ten times in five minutes.
StartLimitIntervalSec=300
StartLimitBurst=10
"""
PREVENT = """\
# A wrong configuration: starting it again would not help.
RestartPreventExitStatus=2
"""
NETWORK = "Wants=network-online.target\nAfter=network-online.target\n"


class Systemd:
    """``Manager`` of Linux."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._machine = acting.machine

    def path(self, label: str, *, is_daemon: bool) -> Path:
        if is_daemon:
            return self._machine.root / "etc" / "systemd" / "system" / f"{label}.service"
        return self._machine.home / ".config" / "systemd" / "user" / f"{label}.service"

    def text(self, service: Service, *, is_daemon: bool) -> str:
        lines = [
            f"Environment={quoted(f'{name}={value}')}\n"
            for name, value in service.environment.items()
        ]
        machine = self._machine
        return UNIT.format(
            about=escaped(service.about),
            network=NETWORK if is_daemon else "",
            command=" ".join(quoted(word.replace("$", "$$")) for word in service.command),
            environment="".join(lines),
            folder=escaped(str(service.folder)),
            user=f"User={machine.user}\nGroup={machine.group}\n" if is_daemon else "",
            restart_seconds=service.restart_seconds,
            limit=LIMITED if service.is_server else ENDLESS,
            prevent="" if service.is_server else PREVENT,
            stop_seconds=service.stop_seconds,
            open_files=service.open_files,
            target="multi-user.target" if is_daemon else "default.target",
        )

    def install(self, service: Service, *, is_daemon: bool) -> None:
        label = service.label
        if is_daemon:
            self._acting.need_root("--daemon")
            if self.path(label, is_daemon=False).exists():
                raise UsageError(
                    f"{self._machine.user} has a unit {label}, and both would run: remove it with "
                    f"`batchkv service uninstall --label {label}` (as {self._machine.user})"
                )
        else:
            self._refuse_daemon(label)
        self._need_systemd(is_daemon=is_daemon)
        self._acting.write(
            self.path(label, is_daemon=is_daemon), self.text(service, is_daemon=is_daemon)
        )
        for verb in (("daemon-reload",), ("enable", label), ("restart", label)):
            self._acting.run(*_systemctl(is_daemon), *verb)

    def uninstall(self, label: str, *, is_daemon: bool) -> bool:
        path = self.path(label, is_daemon=is_daemon)
        if not path.exists() and not self._acting.is_dry:
            return False
        if is_daemon:
            self._acting.need_root(f"the system's unit {label}")
        self._acting.run(*_systemctl(is_daemon), "disable", "--now", label)
        self._acting.remove(path)
        self._acting.run(*_systemctl(is_daemon), "daemon-reload")
        return True

    def states(self) -> list[State]:
        found = []
        for is_daemon in (False, True):
            folder = self.path("", is_daemon=is_daemon).parent
            for path in installed(folder, ".service"):
                label, kind = path.stem, "system unit" if is_daemon else "user unit"
                asked = self._machine.run(
                    *_systemctl(is_daemon), "show", label,
                    "--property=ActiveState,MainPID,ExecMainStatus,ExecMainExitTimestamp",
                )  # fmt: skip
                is_running, pid, last_exit = read_show(asked.output if asked.code == 0 else "")
                log = _log_command(label, is_daemon)
                found.append(State(label, kind, str(path), is_running, pid, last_exit, log))
        return found

    def advice(self, label: str, *, is_daemon: bool) -> list[str]:
        lines = [f"its log: {_log_command(label, is_daemon)}"]
        if not is_daemon:
            lines.append(
                "it runs while you are logged in. `loginctl enable-linger` lets it run from the "
                "machine's start on"
            )
        return lines

    def _refuse_daemon(self, label: str) -> None:
        if self.path(label, is_daemon=True).exists() and not self._acting.is_dry:
            again = sudo_command(["service", "uninstall", "--label", label])
            raise UsageError(
                f"the system has a unit {label}, and both would run: remove it with `{again}`, or "
                "install again with --daemon"
            )

    def _need_systemd(self, *, is_daemon: bool) -> None:
        if self._acting.is_dry:
            return
        asked = self._machine.run(*_systemctl(is_daemon), "show", "--property=Version")
        if asked.code == 0:
            return
        words = " ".join(asked.output.split())
        way_out = (
            "Start `batchkv worker` with what starts services here"
            if is_daemon or asked.code == 127
            else f"Log in by ssh or at the machine, or use `{sudo_command()}`"
        )
        raise UsageError(f"systemd cannot be reached ({words}). {way_out}")


def _systemctl(is_daemon: bool) -> tuple[str, ...]:
    return ("systemctl",) if is_daemon else ("systemctl", "--user")


def _log_command(label: str, is_daemon: bool) -> str:
    return f"journalctl -u {label}" if is_daemon else f"journalctl --user -u {label}"


def escaped(text: str) -> str:
    """A value in which ``%`` means itself."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """A word of a unit's command or environment."""
    text = escaped(text)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_show(text: str) -> tuple[bool, int | None, int | None]:
    """(is running, process id, last exit code) of what `systemctl show` says of a unit."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    is_running = values.get("ActiveState") in ("active", "reloading", "deactivating")
    has_ended = bool(values.get("ExecMainExitTimestamp"))
    pid, status = values.get("MainPID", "0"), values.get("ExecMainStatus", "")
    return (
        is_running,
        int(pid) if is_running and pid.isdigit() and pid != "0" else None,
        int(status) if has_ended and status.isdigit() else None,
    )
