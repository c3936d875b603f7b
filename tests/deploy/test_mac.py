"""The launchd agents and their installers, with a launchctl that only takes notes."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAC = ROOT / "deploy" / "mac"
PASSWORD = "a-password-nobody-may-see"
MODEL = "mlx-community/Model & <Friends>-4bit"
CAFFEINATE = '/usr/bin/caffeinate -i -w $$ & exec "$@"'

# Says "loaded" between a bootstrap and a bootout, as the real one does, and records each call.
LAUNCHCTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$HOME/launchctl.log"
case "$1" in
    print) test -e "$HOME/loaded-${2##*/}" ;;
    bootstrap) name=${3##*/}; touch "$HOME/loaded-${name%.plist}" ;;
    bootout) rm -f "$HOME/loaded-${2##*/}" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Mac:
    """A home directory with a fake installation in it, and a PATH that pretends to be macOS."""

    home: Path

    @property
    def venv(self) -> Path:
        """The fake installation."""
        return self.home / "venv"

    @property
    def url_file(self) -> Path:
        """The file with the queue's URL."""
        return self.home / "queue.url"

    @property
    def agents(self) -> Path:
        """Where launchd finds its agents."""
        return self.home / "Library" / "LaunchAgents"

    @property
    def launchctl_calls(self) -> list[str]:
        """The verbs that launchctl was called with, ``print`` aside."""
        log = self.home / "launchctl.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[0] for line in lines if not line.startswith("print ")]

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts with this home."""
        return subprocess.run(
            ["bash", str(MAC / script), *arguments],
            env={"HOME": str(self.home), "PATH": f"{self.home}/fake:/usr/bin:/bin"},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run install-worker.sh with a complete set of options, and more."""
        return self.run(
            "install-worker.sh",
            *("--model", MODEL, "--url-file", str(self.url_file), "--venv", str(self.venv)),
            *arguments,
        )


def write_program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    """A Mac on which batchkv is installed and the URL's file is in place."""
    made = Mac(tmp_path / "a home")
    write_program(made.home / "fake" / "launchctl", LAUNCHCTL)
    write_program(made.home / "fake" / "uname", "#!/bin/sh\necho Darwin\n")
    write_program(made.venv / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    write_program(made.venv / "bin" / "batchkv", '#!/bin/sh\necho "$$ $*"\n')
    made.url_file.write_text(f"redis://:{PASSWORD}@studio.local:6379/0\n")
    made.url_file.chmod(0o600)
    return made


def agent_of(mac: Mac, label: str = "dev.batchkv.worker") -> dict[str, Any]:
    """The installed agent, parsed."""
    return plistlib.loads((mac.agents / f"{label}.plist").read_bytes())


def test_a_dry_run_prints_the_agent_and_changes_nothing(mac: Mac) -> None:
    """Standard output of a dry run is the property list; nothing is written, nothing is called."""
    before = sorted(mac.home.rglob("*"))
    result = mac.install("--dry-run")
    assert result.returncode == 0, result.stderr
    agent = plistlib.loads(result.stdout.encode())
    program = agent["ProgramArguments"]
    assert program[:3] == ["/bin/sh", "-c", CAFFEINATE]
    assert program[4:] == [str(mac.venv / "bin" / "batchkv"), "worker", "--model", MODEL]
    assert os.access(program[0], os.X_OK)
    assert os.access(program[4], os.X_OK)
    assert agent["KeepAlive"] is True
    assert agent["ThrottleInterval"] == 30
    assert agent["EnvironmentVariables"]["BATCHKV_REDIS_URL_FILE"] == str(mac.url_file)
    assert sorted(mac.home.rglob("*")) == before
    assert mac.launchctl_calls == []


def test_a_dry_run_works_elsewhere_and_an_installation_does_not(mac: Mac) -> None:
    """On a machine that is no Mac only the dry run is allowed."""
    write_program(mac.home / "fake" / "uname", "#!/bin/sh\necho Linux\n")
    assert mac.install("--dry-run").returncode == 0
    refused = mac.install()
    assert refused.returncode == 2
    assert "needs macOS" in refused.stderr


def test_the_agent_becomes_the_worker_and_keeps_the_mac_awake(mac: Mac) -> None:
    """The program runs under the process id that launchd knows, and caffeinate watches that id."""
    agent = plistlib.loads(mac.install("--dry-run").stdout.encode())
    caffeinate = mac.home / "fake" / "caffeinate"
    write_program(caffeinate, '#!/bin/sh\necho "$*" >"$HOME/caffeinate.log"\n')
    program = agent["ProgramArguments"]
    program[2] = program[2].replace("/usr/bin/caffeinate", f'"{caffeinate}"')
    process = subprocess.Popen(
        program, env={"HOME": str(mac.home), "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE
    )
    output = process.communicate(timeout=10)[0].decode()
    assert output == f"{process.pid} worker --model {MODEL}\n"
    log = mac.home / "caffeinate.log"
    deadline = time.monotonic() + 10
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert log.read_text() == f"-i -w {process.pid}\n"


def test_install_twice_and_uninstall_twice(mac: Mac) -> None:
    """A second installation restarts the agent with the new values; uninstalling twice is fine."""
    assert mac.install().returncode == 0
    assert mac.launchctl_calls == ["enable", "bootstrap"]
    assert mac.install("--model", "demo").returncode == 0
    assert mac.launchctl_calls[2:] == ["bootout", "enable", "bootstrap"]
    assert agent_of(mac)["ProgramArguments"][-1] == "demo"
    for _ in range(2):
        result = mac.run("install-worker.sh", "--uninstall")
        assert result.returncode == 0, result.stderr
    assert mac.launchctl_calls[5:] == ["bootout"]
    assert list(mac.agents.iterdir()) == []
    assert mac.url_file.exists()


def test_the_cache_is_named_by_a_closed_file(mac: Mac) -> None:
    """With --cache-file the agent names it; without, it names none; open or missing is refused."""
    tiers = mac.home / "cache.tiers"
    tiers.write_text("disk:/tmp/blocks?max=1GB")
    tiers.chmod(0o600)
    assert mac.install().returncode == 0
    assert agent_of(mac)["EnvironmentVariables"]["BATCHKV_CACHE_FILE"] == ""
    assert mac.install("--cache-file", "cache.tiers").returncode == 0
    assert agent_of(mac)["EnvironmentVariables"]["BATCHKV_CACHE_FILE"] == str(tiers)
    tiers.chmod(0o644)
    assert mac.install("--cache-file", str(tiers)).returncode == 2
    assert mac.install("--cache-file", "missing").returncode == 2


def test_two_models_on_one_mac(mac: Mac) -> None:
    """With its own label a second worker stands beside the first."""
    assert mac.install().returncode == 0
    assert mac.install("--label", "dev.batchkv.second", "--model", "demo").returncode == 0
    assert agent_of(mac)["Label"] == "dev.batchkv.worker"
    assert agent_of(mac, "dev.batchkv.second")["Label"] == "dev.batchkv.second"
    logs = {agent_of(mac)["StandardErrorPath"]}
    logs.add(agent_of(mac, "dev.batchkv.second")["StandardErrorPath"])
    assert len(logs) == 2


def test_the_password_stays_in_its_file(mac: Mac) -> None:
    """Neither the output, nor the agent, nor a command line holds the password."""
    result = mac.install()
    assert result.returncode == 0
    shown = result.stdout + result.stderr + (mac.home / "launchctl.log").read_text()
    shown += (mac.agents / "dev.batchkv.worker.plist").read_text()
    assert PASSWORD not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", ""), "--model needs a value"),
        (("--model", "--dry-run"), "--model needs a value"),
        (("--model", "two\nlines"), "control characters"),
        (("--label", "../x"), "is not a label"),
        (("--url-file", "missing.url"), "is not a file"),
        (("--venv", "missing"), "batchkv is missing"),
        (("--frobnicate",), "unknown option"),
    ],
)
def test_a_bad_option_is_named(mac: Mac, arguments: tuple[str, ...], message: str) -> None:
    """A wrong value ends in a message that names it, before anything is written."""
    result = mac.install(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not mac.agents.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_url_file_that_others_read_is_refused(mac: Mac, mode: int) -> None:
    """A URL that others can read is no secret: the script says which mode it wants."""
    mac.url_file.chmod(mode)
    result = mac.install()
    assert result.returncode == 2
    assert "chmod 600" in result.stderr


@pytest.mark.parametrize("content", ["", "studio.local:6379\n", "http://studio.local/\n"])
def test_a_url_file_without_a_url_is_refused(mac: Mac, content: str) -> None:
    """What is not a Redis URL is refused at once, and not by a worker that restarts for ever."""
    mac.url_file.write_text(content)
    result = mac.install()
    assert result.returncode == 2
    assert "does not hold a URL" in result.stderr


def test_the_hub_on_a_mac(mac: Mac) -> None:
    """install-hub.sh runs the packaged server in the hub's directory, and takes it away again."""
    hub = mac.home / "hub"
    subprocess.run(
        ["bash", str(ROOT / "deploy" / "hub" / "setup.sh"), str(hub), "studio.local"],
        check=True,
        capture_output=True,
    )
    arguments = ("--hub", str(hub), "--venv", str(mac.venv), "--cache")
    result = mac.run("install-hub.sh", *arguments)
    assert result.returncode == 0, result.stderr
    for name in ("queue", "cache"):
        agent = agent_of(mac, f"dev.batchkv.{name}")
        shell, _, awake, _, server, config = agent["ProgramArguments"]
        assert (shell, awake) == ("/bin/sh", CAFFEINATE)
        assert os.access(server, os.X_OK)
        assert config == str(hub / f"{name}.conf")
        assert agent["WorkingDirectory"] == str(hub)
    assert mac.run("install-hub.sh", "--uninstall").returncode == 0
    assert list(mac.agents.iterdir()) == []
    assert (hub / "secrets" / "worker.url").exists()


def test_the_hub_needs_its_directory(mac: Mac) -> None:
    """A directory that setup.sh did not make is refused with the script's name."""
    result = mac.run("install-hub.sh", "--hub", str(mac.home), "--venv", str(mac.venv))
    assert result.returncode == 2
    assert "setup.sh makes it" in result.stderr
