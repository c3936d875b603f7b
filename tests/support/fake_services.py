"""A pretended Mac or Linux machine for `batchkv service`: launchctl and systemctl that take notes.

As a program (``python -m support.fake_services``) it is the `batchkv` of such a Mac, whose home is
HOME.
"""

from __future__ import annotations

import os
import plistlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchkv_producer.service import command
from batchkv_producer.service.machine import MACOS, Machine

PASSWORD = "a-password-nobody-may-see"
TESTS = Path(__file__).parent.parent
# Loaded between a bootstrap and a bootout, as with the real one; each call is recorded. The file
# "no-desktop" means that nobody is logged in there, "refused" that a bootstrap fails. The messages
# are those quoted in the issues nix-community/home-manager#4413 and psimaker/vaultsync#89.
LAUNCHCTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$HOME/calls"
state=$HOME/loaded/$(printf '%s' "$2" | tr / _)
mkdir -p "$HOME/loaded"
case "$1 $2" in
    print\\ gui/*/*|print\\ system/*) exec cat "$state" ;;
    print\\ gui/*) test ! -e "$HOME/no-desktop" ;;
    bootstrap*)
        if [ -e "$HOME/refused" ]; then echo 'Bootstrap failed: 5: Input/output error'; exit 5; fi
        name=${3##*/}
        cp "$HOME/printed" "$state"_"${name%.plist}" 2>/dev/null || : >"$state"_"${name%.plist}" ;;
    bootout*) rm -f "$state" ;;
esac
"""
SYSTEMCTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$HOME/calls"
case "$*" in
    *--property=Version)
        [ ! -e "$HOME/no-bus" ] || { echo 'Failed to connect to bus: No medium found'; exit 1; } ;;
    *--property=*) cat "$HOME/printed" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class FakeServices:
    """A home, and a PATH on which the system's programs are fakes."""

    home: Path
    system: str = MACOS

    def install(self) -> FakeServices:
        """Write the programs and the file with the queue's URL."""
        for name, text in (("launchctl", LAUNCHCTL), ("systemctl", SYSTEMCTL)):
            write_program(self.home / "fake" / name, text)
        self.url_file.write_text(f"redis://worker:{PASSWORD}@studio.local:6379/0\n")
        self.url_file.chmod(0o600)
        return self

    @property
    def url_file(self) -> Path:
        """The file with the queue's URL."""
        return self.home / "queue.url"

    @property
    def agents(self) -> Path:
        """Where agents are."""
        return self.home / "Library" / "LaunchAgents"

    @property
    def daemons(self) -> Path:
        """Where daemons are."""
        return self.home / "root" / "Library" / "LaunchDaemons"

    @property
    def calls(self) -> list[str]:
        """What was called, without looks."""
        log = self.home / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [
            line for line in lines if not line.startswith("print ") and "--property" not in line
        ]

    def agent(self, label: str = "dev.batchkv.worker") -> dict[str, Any]:
        """An installed agent, parsed."""
        return plistlib.loads((self.agents / f"{label}.plist").read_bytes())

    def daemon(self, label: str = "dev.batchkv.worker") -> dict[str, Any]:
        """An installed daemon, parsed."""
        return plistlib.loads((self.daemons / f"{label}.plist").read_bytes())

    def machine(self, *, is_sudo: bool = False) -> Machine:
        """The machine, as user ada or as root on her behalf."""
        return Machine(
            system=self.system,
            user="ada",
            group="staff",
            uid=os.getuid(),
            gid=os.getgid(),
            home=self.home,
            is_root=is_sudo,
            is_sudo=is_sudo,
            root=self.home / "root",
        )


def write_program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def main() -> None:
    """`batchkv` on a Mac whose home is HOME."""
    from batchkv_producer.cli import cli

    machine = FakeServices(Path(os.environ["HOME"])).machine()
    command.this_machine = lambda user=None: machine  # type: ignore[assignment]
    sys.argv[0] = "batchkv"
    cli(prog_name="batchkv")


if __name__ == "__main__":
    main()
