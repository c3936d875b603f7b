"""``batchkv doctor`` as a user runs it."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchkv_producer.cli import cli
from batchkv_producer.doctor import examine, worker_part
from batchkv_producer.doctor.contract import Finding, Level, Verdict
from batchkv_producer.doctor.examine import Wanted

VARIABLES = ("BATCHKV_REDIS_URL", "BATCHKV_REDIS_URL_FILE", "BATCHKV_CACHE", "BATCHKV_CACHE_FILE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and an environment that names no server."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "kv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "kv"


def found(level: Level, name: str = "a check", text: str = "found") -> Finding:
    return Finding(name, Verdict(level, text, "do this"), 0.1)


def run(monkeypatch: pytest.MonkeyPatch, findings: Sequence[Finding], *flags: str) -> Result:
    """The command with these findings; ``wanted`` has what it was asked for."""

    def examined(asked: Wanted, _: Any) -> Iterator[Finding]:
        wanted.append(asked)
        yield from findings

    monkeypatch.setattr(examine, "examine_all", examined)
    return CliRunner().invoke(cli, ["doctor", *flags])


wanted: list[Wanted] = []


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([Level.OK], 0),
        ([Level.OK, Level.WARN], 0),
        ([Level.WARN, Level.FAIL], 1),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_only_a_failure_is_an_exit_code(
    levels: list[Level], code: int, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings leave it 0, printed as text and as JSON."""
    result = run(monkeypatch, [found(level) for level in levels], *flags)
    assert result.exit_code == code, result.output


def test_flags_and_environment_say_what_to_examine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flag wins; without one the variables of a worker count; without both nothing is asked."""
    run(monkeypatch, [])
    assert wanted[-1] == Wanted(is_stress_alone=True)
    (tmp_path / "tiers").write_text("memory:?max=1GB\n")
    monkeypatch.setenv("BATCHKV_REDIS_URL", "redis://hub:6379/0")
    monkeypatch.setenv("BATCHKV_CACHE_FILE", str(tmp_path / "tiers"))
    run(monkeypatch, [], "-m", "demo", "--kv-scheme", "affine4")
    assert wanted[-1] == Wanted(("demo",), "affine4", "redis://hub:6379/0", "memory:?max=1GB")
    run(monkeypatch, [], "--url", "redis://other:6379/0", "--cache", "off", "--stress")
    assert wanted[-1] == Wanted(("demo",), "", "redis://other:6379/0", "", 120.0, True)
    run(monkeypatch, [], "--stress", "--seconds", "60", "-m", "m/x")
    assert wanted[-1].stress_seconds == 60.0 and not wanted[-1].is_stress_alone


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", "60"], "add --stress"),
        (["--stress", "--seconds", "1"], "--seconds"),
        (["--kv-scheme", "affine4"], "add -m"),
        (["-m", "/no/such/folder"], "no model folder"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_flags_that_do_nothing_are_refused(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is examined."""
    num_before = len(wanted)
    result = run(monkeypatch, [], *flags)
    assert result.exit_code != 0
    assert words in f"{result.output} {result.exception}"
    assert len(wanted) == num_before


def test_what_the_environment_names_wrongly_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is missing, or that others may open, keeps no other check from being made."""
    (tmp_path / "url").write_text("redis://worker:secret@hub:6379/0")
    (tmp_path / "url").chmod(0o644)
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("BATCHKV_CACHE_FILE", str(tmp_path / "missing"))
    run(monkeypatch, [])
    monkeypatch.undo()
    asked = wanted[-1]
    monkeypatch.setattr(worker_part, "module_of", lambda _: None)
    said = {each.name: each.verdict for each in examine.examine_all(asked, examine.Machine())}
    assert said["queue server"].level is said["cache"].level is Level.FAIL
    assert "chmod 600" in said["queue server"].todo
    assert "No such file" in said["cache"].todo
    assert "secret" not in str(said)


def test_fix_says_each_change(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with --fix, and once: the second time there is nothing to do."""
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    assert "fixed" not in run(monkeypatch, []).output
    assert home.stat().st_mode & 0o777 == 0o755
    result = run(monkeypatch, [], "--fix")
    assert "fixed: close ~/kv to other users" in result.output
    assert home.stat().st_mode & 0o777 == 0o700
    again = json.loads(run(monkeypatch, [], "--fix", "--json").output)
    assert again["fixed"] == []


def test_this_machine_is_well_in_time(tmp_path: Path) -> None:
    """The real command, as JSON: no failure, nothing private. A busy machine may be late."""
    environment = {**os.environ, "BATCHKV_HOME": str(tmp_path / "kv"), "HOME": str(tmp_path)}
    ended = subprocess.run(
        [Path(sys.executable).parent / "batchkv", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    values = json.loads(ended.stdout)
    names = [each["name"] for each in values["checks"]]
    assert values["is_good"] and {"python", "home folder", "own files"} <= set(names)
    assert {"device", "start"} & set(names), "the process of the worker's checks said nothing"
    assert len(names) == len(set(names))
    assert str(tmp_path) not in ended.stdout
    hidden = {socket.gethostname(), getpass.getuser()} - {"root", "localhost"}
    words = set(ended.stdout.replace('"', " ").replace("/", " ").split())
    assert not hidden & words


def test_a_machine_without_the_worker_has_a_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no entry point leads to the worker's checks, those of the machine are made."""
    monkeypatch.setattr(worker_part, "module_of", lambda _: None)
    asked = Wanted(stress_seconds=5.0, models=("demo",))
    names = [each.name for each in examine.examine_all(asked, examine.Machine())]
    assert "python" in names and "device" not in names
