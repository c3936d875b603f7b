"""Units of systemd: what they say, and whether systemd understands it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchkv_producer.cli import cli
from batchkv_producer.service import command
from batchkv_producer.service.machine import LINUX
from batchkv_producer.service.systemd import quoted, read_show
from support.fake_services import FakeServices

Batchkv = Callable[..., Result]
LABEL = "dev.batchkv.worker"
# What `systemctl show UNIT --property=...` prints (systemctl(1), "show").
RUNNING = "MainPID=4711\nExecMainExitTimestamp=\nExecMainStatus=0\nActiveState=active\n"
ENDED = (
    "MainPID=0\nExecMainExitTimestamp=Sun 2026-11-22 10:12:13 UTC\nExecMainStatus=2\n"
    "ActiveState=failed\n"
)


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    """A Linux machine with a systemctl that takes notes."""
    made = FakeServices(tmp_path / "a home", LINUX).install()
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("PATH", f"{made.home}/fake:{os.environ['PATH']}")
    return made


@pytest.fixture
def batchkv(linux: FakeServices, monkeypatch: pytest.MonkeyPatch) -> Batchkv:
    """Run a command there."""

    def run(*arguments: object, is_sudo: bool = False) -> Result:
        monkeypatch.setattr(command, "this_machine", lambda _=None: linux.machine(is_sudo=is_sudo))
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["batchkv", *words])
        return CliRunner().invoke(cli, words)

    return run


def unit_of(linux: FakeServices, *, is_daemon: bool = False) -> Path:
    folder = "root/etc/systemd/system" if is_daemon else ".config/systemd/user"
    return linux.home / folder / f"{LABEL}.service"


def worker_words(linux: FakeServices, *more: object) -> tuple[object, ...]:
    return ("service", "install", "worker", "-m", "50% $HOME", "--url-file", linux.url_file, *more)


def test_a_user_unit_is_installed_and_removed(linux: FakeServices, batchkv: Batchkv) -> None:
    """systemd reads it, enables it and starts it, again when it runs; removing it undoes that."""
    done = batchkv(*worker_words(linux))
    assert done.exit_code == 0, done.output
    assert linux.calls == [
        "--user daemon-reload",
        f"--user enable {LABEL}",
        f"--user restart {LABEL}",
    ]
    text = unit_of(linux).read_text()
    for line in ("Restart=always", "RestartPreventExitStatus=2", "UMask=0077", "KillMode=mixed"):
        assert f"\n{line}\n" in text
    assert "loginctl enable-linger" in done.stderr and "journalctl --user -u" in done.stderr
    assert batchkv("service", "uninstall", "worker").exit_code == 0
    assert not unit_of(linux).exists()
    assert linux.calls[3:] == [f"--user disable --now {LABEL}", "--user daemon-reload"]


def test_a_service_may_serve_several_models(linux: FakeServices, batchkv: Batchkv) -> None:
    """Each -m is a flag of the worker's command."""
    done = batchkv(*worker_words(linux), "-m", "owner/other")
    assert done.exit_code == 0, done.output
    assert unit_of(linux).read_text().count("--model") == 2


def test_a_system_unit_runs_as_its_user(linux: FakeServices, batchkv: Batchkv) -> None:
    """It has a user and waits for the network; the user's own unit beside it is refused."""
    assert batchkv(*worker_words(linux, "--daemon"), is_sudo=True).exit_code == 0
    text = unit_of(linux, is_daemon=True).read_text()
    assert "\nUser=ada\nGroup=staff\n" in text and "network-online.target" in text
    assert linux.calls == ["daemon-reload", f"enable {LABEL}", f"restart {LABEL}"]
    refused = batchkv(*worker_words(linux))
    assert refused.exit_code == 2 and "the system has a unit" in refused.stderr


def test_a_machine_without_systemd_is_told_so(linux: FakeServices, batchkv: Batchkv) -> None:
    """Neither a container without it, nor a shell without a bus, gets half an installation."""
    (linux.home / "no-bus").touch()
    refused = batchkv(*worker_words(linux))
    assert refused.exit_code == 2 and "No medium found" in refused.stderr
    assert "--daemon" in refused.stderr and not unit_of(linux).exists()
    (linux.home / "fake" / "systemctl").unlink()
    if shutil.which("systemctl") is None:
        refused = batchkv(*worker_words(linux))
        assert refused.exit_code == 2 and "is not installed" in refused.stderr


@pytest.mark.parametrize("is_daemon", [False, True])
def test_systemd_understands_the_units(
    linux: FakeServices, batchkv: Batchkv, tmp_path: Path, is_daemon: bool
) -> None:
    """`systemd-analyze verify` finds nothing in a worker's unit, nor in those of the servers."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    hub = tmp_path / "hub"
    (hub / "secrets").mkdir(parents=True)
    for name in ("queue", "cache"):
        (hub / f"{name}.conf").touch()
        (hub / "secrets" / f"{name}-users.acl").touch(mode=0o600)
    flags = ("--daemon",) if is_daemon else ()
    assert batchkv(*worker_words(linux, *flags), is_sudo=is_daemon).exit_code == 0
    words = ("service", "install", "hub", "--hub", hub, "--cache", *flags)
    assert batchkv(*words, is_sudo=is_daemon).exit_code == 0
    units = sorted(unit_of(linux, is_daemon=is_daemon).parent.iterdir())
    assert len(units) == 3
    checked = subprocess.run(
        [analyze, "verify", *(() if is_daemon else ("--user",)), "--man=no", *map(str, units)],
        env={"PATH": os.environ["PATH"], "HOME": str(linux.home), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in checked.stderr.splitlines() if "dev.batchkv." in line]
    assert complaints == []


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain-1.0", "plain-1.0"),
        ("two words", '"two words"'),
        ("50%", "50%%"),
        ('say "no"\\', '"say \\"no\\"\\\\"'),
        ("", '""'),
    ],
)
def test_words_survive_the_unit(word: str, written: str) -> None:
    """What systemd would read otherwise is quoted or doubled."""
    assert quoted(word) == written


@pytest.mark.parametrize(
    ("text", "expected"),
    [(RUNNING, (True, 4711, None)), (ENDED, (False, None, 2)), ("", (False, None, None))],
)
def test_systemctl_show_is_read(text: str, expected: tuple[bool, int | None, int | None]) -> None:
    """State, process and last exit code; a service that never ended has none."""
    assert read_show(text) == expected


def test_status_shows_units(linux: FakeServices, batchkv: Batchkv) -> None:
    """A failed unit is named with its exit code, and makes the exit code 1."""
    (linux.home / "printed").write_text(ENDED)
    assert batchkv(*worker_words(linux)).exit_code == 0
    shown = batchkv("service", "status", "--json")
    assert shown.exit_code == 1 and '"last_exit": 2' in shown.stdout
    assert '"kind": "user unit"' in shown.stdout
