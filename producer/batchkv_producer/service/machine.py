"""The machine on which services are installed: its system, and the user that they run as."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.errors import BatchkvError, UsageError

MACOS, LINUX = "macos", "linux"
_ASK_SECONDS = 30.0

Note = Callable[[str], None]


class ServiceError(BatchkvError):
    """launchd or systemd refused something; the message has its words and a way out."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command of the system ended."""

    code: int
    output: str


@dataclass(frozen=True, slots=True)
class Machine:
    """``system`` is MACOS or LINUX. ``root`` is the folder that holds /Library and /etc.

    ``user`` is who the services run as: under sudo, who called it.
    """

    system: str
    user: str
    group: str
    uid: int
    gid: int
    home: Path
    is_root: bool = False
    is_sudo: bool = False
    root: Path = Path("/")

    def run(self, *command: str) -> Ran:
        """Run a command. Code 127 is a program that is missing, 124 one that hangs."""
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_ASK_SECONDS,
            )
        except FileNotFoundError:
            return Ran(127, f"{command[0]} is not installed")
        except subprocess.TimeoutExpired:
            return Ran(124, f"{command[0]} does not answer")
        return Ran(ended.returncode, ended.stdout.decode("utf-8", "replace").strip())

    def own(self, path: Path) -> None:
        """Give a file that root made in the user's home to the user."""
        if self.is_root:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def this_machine(user: str | None = None) -> Machine:
    """The machine here. ``user`` is who services run as. Raises UsageError for an unknown one."""
    system = {"darwin": MACOS, "linux": LINUX}.get(sys.platform, sys.platform)
    is_root = os.geteuid() == 0
    sudo_uid = os.environ.get("SUDO_UID", "") if is_root else ""
    if user is not None:
        try:
            found = pwd.getpwnam(user)
        except KeyError:
            raise UsageError(f"--user {user}: there is no such user here") from None
    else:
        uid = int(sudo_uid) if sudo_uid.isdigit() else os.geteuid()
        try:
            found = pwd.getpwuid(uid)
        except KeyError:
            raise UsageError(f"the user {uid} has no account here: give --user NAME") from None
    is_caller = found.pw_uid == os.geteuid()
    return Machine(
        system=system,
        user=found.pw_name,
        group=_group(found.pw_gid),
        uid=found.pw_uid,
        gid=found.pw_gid,
        home=Path(os.environ.get("HOME") or found.pw_dir) if is_caller else Path(found.pw_dir),
        is_root=is_root,
        is_sudo=bool(sudo_uid),
    )


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
