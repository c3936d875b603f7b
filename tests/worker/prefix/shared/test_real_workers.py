"""Real commands, real workers, the demo model: two machines' worth of homes, one shared cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.homes import new_home
from support.redis_server import running_server

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "producer" / "examples" / "quickstart.jsonl"
CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
TIMEOUT_SECONDS = 150
NUM_ROWS = 6  # their common prefix has two blocks


class Machine:
    """A home with a queue of its own, and a disk; ``cache`` is the tiers behind the disk."""

    def __init__(self, cache: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="bkv-mac-", dir="/tmp"))
        secret = self.path / "secret"
        secret.write_text("a secret that both machines have")
        secret.chmod(0o600)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BATCHKV_")}
        self.environment = {
            **kept,
            "BATCHKV_HOME": str(new_home(self.path / "home")),
            "BATCHKV_CACHE": f"disk:{self.path}/blocks?max=1GB {cache}",
            "BATCHKV_CACHE_SECRET_FILE": str(secret),
            "BATCHKV_CACHE_WRITE": "shared",  # for the other machine, which has another queue
        }

    def cli(self, *arguments: object) -> str:
        done = subprocess.run(
            [*CLI, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self) -> list[dict[str, Any]]:
        """Result lines of the quickstart's prompts, in the input's order."""
        source, out = self.path / "in.jsonl", self.path / "out.jsonl"
        source.write_text("".join(QUICKSTART.read_text().splitlines(keepends=True)[:NUM_ROWS]))
        self.cli("run", source, "-m", "demo", "-o", out)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return sorted(rows, key=lambda row: row["custom_id"])

    def status(self) -> dict[str, Any]:
        """That of its only batch."""
        (batch,) = json.loads(self.cli("list", "--json"))
        found: dict[str, Any] = json.loads(self.cli("status", batch["batch_id"], "--json"))
        return found


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with running_server() as cache:
        made = Machine(f"{cache.url}&max=1GB"), Machine(f"{cache.url}&max=1GB")
        try:
            yield made
        finally:
            for machine in made:
                machine.cli("server", "stop")
                shutil.rmtree(machine.path, ignore_errors=True)


def answers(rows: list[dict[str, Any]]) -> list[str]:
    return [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows]


def cached(row: dict[str, Any]) -> int:
    return int(row["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])


def full_blocks(row: dict[str, Any]) -> int:
    return (int(row["response"]["body"]["usage"]["prompt_tokens"]) - 1) // 256 * 256


def test_what_one_machine_computes_is_a_hit_on_the_other(machines: tuple[Machine, Machine]) -> None:
    """Every full block of every prompt; the same answers; totals and tools tell of it."""
    first, second = machines
    rows, again = first.run(), second.run()
    status = second.status()
    assert answers(again) == answers(rows)
    # One row finds its blocks alone; the others begin with some more tokens of its last ones.
    assert [cached(row) // 256 * 256 for row in again] == [full_blocks(row) for row in again]
    assert status["cached_tokens"] == sum(map(cached, again)) > 0
    assert status["saved_ms"] > 0
    # What came from the shared tier was put on the second machine's disk; all of it is whole.
    tiers = json.loads(second.cli("cache", "stats", "--json"))["tiers"]
    assert [tier["counts"]["kv"] for tier in tiers] == [2, 2]
    assert [tier["counts"]["manifest"] for tier in tiers] == [1, 1]
    verdicts = json.loads(second.cli("cache", "verify", "--json"))["tiers"]
    assert [(tier["num_whole"], tier["num_damaged"]) for tier in verdicts] == [(3, 0), (3, 0)]
