"""Code that was updated in place, with the metadata of an earlier installation."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from batchkv_cache_store.cli import group as cache_group
from batchkv_producer.cli import group
from batchkv_producer.errors import OLD_INSTALLATION, UsageError

MOVED = "batchkv_worker.no_such_room:command"


def test_a_run_says_what_to_do_about_an_older_installation(tmp_path: Path) -> None:
    """A check that has moved is reported in one line, and nothing is queued."""
    written = tmp_path / "earlier-1.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: earlier\nVersion: 1\n")
    (written / "entry_points.txt").write_text(f"[batchkv.checks]\nkv-scheme = {MOVED}\n")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "hi"}\n')
    environment = {
        "PYTHONPATH": str(tmp_path),
        "BATCHKV_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
    }

    def batchkv(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchkv_producer", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    ended = batchkv("run", str(lines), "-m", "demo")
    assert batchkv("server", "stop").returncode == 0
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == f"batchkv: {OLD_INSTALLATION}\n"
    assert not (tmp_path / "lines.out.jsonl").exists()


def test_a_command_that_has_moved_is_not_taken_for_an_extra_that_is_missing() -> None:
    """`pip install 'batchkv[worker]'` would not help: the metadata must be written again."""
    with pytest.raises(UsageError, match="newer than its installation"):
        group._load("worker", EntryPoint("worker", MOVED, "batchkv.commands"))


def test_a_cache_command_that_has_moved_says_so() -> None:
    """The same for commands of `batchkv cache`."""
    found = cache_group._load("why", EntryPoint("why", MOVED, "batchkv.cache_commands"))
    assert found.callback is not None
    with pytest.raises(click.ClickException, match="newer than its installation"):
        found.callback()
