"""Streams and names as nobody expects them: closed output, other encodings, names of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, encode_result
from batchkv_worker.cli import worker_command
from batchkv_worker.settings import WorkerSettings
from hostile.traps import ESCAPES, FORBIDDEN, batchkv
from support.worker_harness import submit

TEXT = "Grüße … 😀"
COMMANDS = (("list",), ("list", "--json"), ("status", "B"), ("results", "B"), ("result", "B-1"))


def planted(connection: Redis) -> str:
    """A batch whose name, model and answer are not of Latin-1."""
    batch = submit(connection, ["0"])
    connection.hset(redis_keys.batch(batch), mapping={"name": TEXT, "model": TEXT, "ok": 1})
    row = Result(custom_id=TEXT, endpoint="chat", outcome="ok", model=TEXT, text=TEXT)
    connection.hset(redis_keys.results(batch), "1", encode_result(row))
    connection.rpush(redis_keys.done(batch), 1)
    return batch


def ran(command: str, url: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """The command, as a shell runs it."""
    variables = {**os.environ, "BATCHKV_REDIS_URL": url, **environ}
    return subprocess.run(["sh", "-c", command], capture_output=True, env=variables)


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_a_terminal_of_another_encoding(
    command: tuple[str, ...], redis_connection: Redis, redis_url: str
) -> None:
    """What its encoding lacks is spelled as in JSON, which so stays JSON."""
    batch = planted(redis_connection)
    words = " ".join(word.replace("B", batch) for word in command)
    script = f"{sys.executable} -m batchkv_producer {words}"
    found = ran(script, redis_url, PYTHONIOENCODING="latin-1", COLUMNS="200")
    assert found.returncode == 0 and not found.stderr
    if "--json" in command:
        (row,) = json.loads(found.stdout.decode("latin-1"))
        assert row["name"] == TEXT
    assert found.stdout


@pytest.mark.parametrize("command", COMMANDS[2:])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_output_is_no_fault(
    command: tuple[str, ...], closed: str, redis_connection: Redis, redis_url: str
) -> None:
    """With its output closed a command does what it does, and prints into no file of its own."""
    batch = planted(redis_connection)
    words = " ".join(word.replace("B", batch) for word in command)
    found = ran(f"{sys.executable} -m batchkv_producer {words} {closed}", redis_url)
    assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["x\0y", "/x\0y", "m\x1b[31m", "m\u202e", "\ud800", "x" * 1025])
def test_a_models_name_that_no_worker_serves_is_refused(
    name: str, tmp_path: Path, redis_connection: Redis, redis_url: str
) -> None:
    """NUL, control characters, halves of characters: a wrong row, or one line for the flag."""
    file = tmp_path / "in.jsonl"
    lines: list[Any] = [{"prompt": "a", "model": name}, {"prompt": "b", "model": "demo"}]
    lines += [{"messages": [{"role": "user", "content": "c"}], "model": name, "seed": 1}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = batchkv("submit", str(file), url=redis_url)
    batch = found.stdout.strip()
    values = redis_connection.hgetall(redis_keys.batch(batch))
    assert (values[b"model"], values[b"failed"]) == (b"demo", b"2")
    if "\0" not in name:
        (tmp_path / "b.txt").write_text("b\n")
        refused = batchkv("submit", str(tmp_path / "b.txt"), "-m", name, url=redis_url)
        assert refused.exit_code == 2 and "the model's name" in refused.stderr
        assert not set(FORBIDDEN) & set(refused.stderr)


def test_blanks_around_a_models_name_are_none_of_it(
    tmp_path: Path, redis_connection: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag, a variable and a line that say " demo " ask for the queue of demo's workers."""
    file = tmp_path / "in.jsonl"
    for number, line in enumerate(({"prompt": "a"}, {"prompt": "b", "model": " demo\n"})):
        file.write_text(json.dumps(line))
        flags = [] if number else ["-m", " demo "]
        batch = batchkv("submit", str(file), *flags, url=redis_url).stdout.strip()
        queue = redis_connection.hget(redis_keys.batch(batch), "queue")
        assert queue == redis_keys.queue_name("demo").encode()
    assert WorkerSettings.from_env({"BATCHKV_MODEL": " demo "}).model == "demo"


@pytest.mark.parametrize(
    "flags",
    [
        ["-m", f"m{ESCAPES}"],
        ["-m", "demo", "--name", f"w{ESCAPES}"],
        ["-m", "d", "--slots", ESCAPES],
    ],
)
def test_a_workers_own_flags_reach_no_terminal(flags: list[str], redis_url: str) -> None:
    """What a flag says is spelled out in the line that refuses it."""
    found = CliRunner().invoke(worker_command, [*flags, "--url", redis_url])
    assert found.exit_code == 2 and found.stderr.startswith("batchkv: ")
    assert not set(FORBIDDEN) & set(found.output)
