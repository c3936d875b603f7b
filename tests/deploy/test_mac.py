"""The scripts of deploy/mac: thin over `batchkv service`, with a launchctl that takes notes."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.fake_services import TESTS, FakeServices, write_program

ROOT = Path(__file__).resolve().parents[2]
MAC = ROOT / "deploy" / "mac"
MODEL = "mlx-community/Model & <Friends>-4bit"


@dataclass(frozen=True, slots=True)
class Mac:
    """A home directory with a fake installation in it."""

    services: FakeServices

    @property
    def home(self) -> Path:
        """The user's home."""
        return self.services.home

    @property
    def venv(self) -> Path:
        """The fake installation, whose `batchkv` takes this machine for a Mac."""
        return self.home / "venv"

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts with this home."""
        return subprocess.run(
            ["bash", str(MAC / script), "--venv", str(self.venv), *arguments],
            env={
                "HOME": str(self.home),
                "PATH": f"{self.home}/fake:/usr/bin:/bin",
                "PYTHONPATH": str(TESTS),
            },
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run install-worker.sh with a complete set of options, and more."""
        words = ("--model", MODEL, "--url-file", str(self.services.url_file))
        return self.run("install-worker.sh", *words, *arguments)


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    """A Mac on which batchkv is installed and the URL's file is in place."""
    made = Mac(FakeServices(tmp_path / "a home").install())
    text = f'#!/bin/sh\nexec "{sys.executable}" -P -m support.fake_services "$@"\n'
    write_program(made.venv / "bin" / "batchkv", text)
    return made


def test_a_dry_run_prints_the_agent_and_changes_nothing(mac: Mac) -> None:
    """Standard output of a dry run is the property list; nothing is written, nothing is called."""
    before = sorted(mac.home.rglob("*"))
    result = mac.install("--dry-run")
    assert result.returncode == 0, result.stderr
    agent = plistlib.loads(result.stdout.encode())
    program = agent["ProgramArguments"]
    assert program[-3:] == ["worker", "--model", MODEL]
    assert all(os.access(path, os.R_OK) for path in (program[0], program[1], program[6]))
    assert sorted(mac.home.rglob("*")) == before


def test_a_dry_run_works_elsewhere_and_an_installation_does_not(mac: Mac) -> None:
    """On a machine that is no Mac only the dry run is allowed."""
    write_program(
        mac.venv / "bin" / "batchkv",
        f'#!/bin/sh\nexec "{sys.executable}" -m batchkv_producer "$@"\n',
    )
    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    assert mac.install("--dry-run").returncode == 0
    refused = mac.install()
    assert refused.returncode == 2
    assert "--system macos: this is linux" in refused.stderr


def test_install_twice_and_uninstall(mac: Mac) -> None:
    """A second installation restarts the agent with the new values; flags of the worker go on."""
    assert mac.install().returncode == 0
    again = mac.install("--model", "demo", "--slots", "8", "--polite")
    assert again.returncode == 0, again.stderr
    verbs = [call.split()[0] for call in mac.services.calls]
    assert verbs == ["enable", "bootstrap", "bootout", "enable", "bootstrap"]
    program = mac.services.agent()["ProgramArguments"]
    assert program[-5:] == ["--model", "demo", "--slots", "8", "--polite"]
    result = mac.run("install-worker.sh", "--uninstall")
    assert result.returncode == 0, result.stderr
    assert list(mac.services.agents.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--venv", ""), "--venv needs a value"),
        (("--venv", "missing"), "batchkv is missing: make venv SET=worker"),
        (("--frobnicate",), "No such option"),
    ],
)
def test_a_bad_option_is_named(mac: Mac, arguments: tuple[str, ...], message: str) -> None:
    """A wrong value ends in a message that names it, before anything is written."""
    result = mac.install(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not mac.services.agents.exists()


@pytest.mark.parametrize("script", ["install-worker.sh", "install-hub.sh"])
def test_help_is_the_scripts_own(mac: Mac, script: str) -> None:
    """--help prints the comment at the script's head."""
    result = mac.run(script, "--help")
    assert result.returncode == 0 and f"usage: {script} " in result.stdout
    assert "set -euo" not in result.stdout


def test_the_hub_on_a_mac(mac: Mac) -> None:
    """install-hub.sh runs the packaged server in the hub's directory, and takes it away again."""
    hub = mac.home / "hub"
    subprocess.run(
        ["bash", str(ROOT / "deploy" / "hub" / "setup.sh"), str(hub), "studio.local"],
        check=True,
        capture_output=True,
    )
    result = mac.run("install-hub.sh", "--hub", str(hub), "--cache")
    assert result.returncode == 0, result.stderr
    for name in ("queue", "cache"):
        agent = mac.services.agent(f"dev.batchkv.{name}")
        *_, codes, seconds, awake, server, config = agent["ProgramArguments"]
        assert (codes, seconds, awake) == ("1 126 127", "60", "yes")
        assert os.access(server, os.X_OK)
        assert config == str(hub / f"{name}.conf")
        assert agent["WorkingDirectory"] == str(hub)
    assert mac.run("install-hub.sh", "--uninstall").returncode == 0
    assert list(mac.services.agents.iterdir()) == []
    assert (hub / "secrets" / "worker.url").exists()
