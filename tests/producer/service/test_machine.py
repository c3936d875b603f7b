"""Who a service runs as, and how commands of the system end."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from batchkv_producer import entry
from batchkv_producer.errors import UsageError
from batchkv_producer.service import machine
from batchkv_producer.service.machine import this_machine

ADA = pwd.struct_passwd(("ada", "x", 501, 987_654, "", "/Users/ada", "/bin/zsh"))


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is root, and there is a user ada."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: ADA if uid == 501 else pwd.getpwnam("root"))
    monkeypatch.setenv("HOME", "/root-of-sudo")
    monkeypatch.delenv("SUDO_UID", raising=False)
    return monkeypatch


def test_a_service_is_its_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without sudo it is the user's own, with the home that HOME names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    found = this_machine()
    assert (found.uid, found.home, found.is_sudo) == (os.geteuid(), tmp_path, False)
    assert found.system == {"linux": machine.LINUX, "darwin": machine.MACOS}[sys.platform]


def test_under_sudo_it_is_that_of_who_called(as_root: pytest.MonkeyPatch) -> None:
    """The user, the group and the home are the caller's, although HOME may be root's."""
    as_root.setenv("SUDO_UID", "501")
    found = this_machine()
    assert (found.user, found.group, found.home) == ("ada", "987654", Path("/Users/ada"))
    assert found.is_root and found.is_sudo


def test_a_user_may_be_named(as_root: pytest.MonkeyPatch) -> None:
    """--user names one; a name that is unknown is refused."""
    as_root.setattr(pwd, "getpwnam", {"ada": ADA}.__getitem__)
    assert this_machine("ada").home == Path("/Users/ada")
    with pytest.raises(UsageError, match="--user nobody-here: there is no such user"):
        this_machine("nobody-here")


@pytest.mark.parametrize("is_sudo", [False, True])
def test_sudo_leaves_no_compiled_files(monkeypatch: pytest.MonkeyPatch, is_sudo: bool) -> None:
    """Under sudo nothing is compiled into the user's folders: root would own what it writes."""

    def end() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(entry, "prepare_streams", end)
    monkeypatch.delenv("SUDO_UID", raising=False)
    if is_sudo:
        monkeypatch.setenv("SUDO_UID", "501")
    with pytest.raises(SystemExit):
        entry.main()
    assert sys.dont_write_bytecode is is_sudo


def test_a_command_always_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is missing, fails or hangs is a code and a text."""
    here = this_machine()
    assert here.run("/nowhere/launchctl") == machine.Ran(127, "/nowhere/launchctl is not installed")
    assert here.run("sh", "-c", "echo no >&2; exit 5") == machine.Ran(5, "no")
    monkeypatch.setattr(machine, "_ASK_SECONDS", 0.05)
    assert here.run("sleep", "60").code == 124
