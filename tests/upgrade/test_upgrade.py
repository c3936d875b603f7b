"""What users have stored with an earlier version goes on with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.client import Client, SamplingParams
from batchkv_producer.wire.redis_keys import queue_name
from support.homes import new_home
from support.redis_server import RedisServer
from upgrade.stored import VERSIONS, batch_ids, copy_files, put_back

CLI = [sys.executable, "-P", "-m", "batchkv_producer"]
TIMEOUT_SECONDS = 150
NUM_TOKENS_A_BLOCK = 256


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(version: str, redis_connection: Redis) -> Client:
    """A client of a server that holds what the version stored."""
    put_back(version, redis_connection)
    return Client(redis_connection)


@pytest.fixture
def folder(version: str, tmp_path: Path) -> Iterator[Path]:
    yield copy_files(version, tmp_path)


def batchkv(server: RedisServer, folder: Path, *arguments: object, **variables: str) -> str:
    """Standard output of a command, which must not be refused."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHKV_")}
    home = new_home(folder / "home")
    found = subprocess.run(
        [*CLI, *map(str, arguments)],
        cwd=folder,
        env={**kept, "BATCHKV_HOME": str(home), "BATCHKV_REDIS_URL": server.url, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


def test_the_same_file_has_the_same_id(version: str, folder: Path) -> None:
    """Ids of recorded batches are those that this version gives to the same files."""
    client = Client(Redis())  # never asked: checking a file needs no server
    defaults = {
        "done.txt": SamplingParams(max_tokens=8, temperature=0.0),
        "same.jsonl": SamplingParams(max_tokens=4),
    }
    for name, batch_id in batch_ids(version).items():
        said = defaults.get(name, SamplingParams())
        assert client.check(folder / name, model="demo", defaults=said).batch_id == batch_id


def test_an_interrupted_run_goes_on(
    version: str, client: Client, folder: Path, redis_server: RedisServer
) -> None:
    """The same `run` ends the batch whose workers were killed. Answers in OUT stay as they are; its
    failed rows move to the errors file, in today's shape.

    Its worker takes rows of higher priority first. Those that wait for one that asks for the same
    get its answer.
    """
    out, errors = folder / "out.jsonl", folder / "out.jsonl.errors.jsonl"
    before = [row for row in out.read_bytes().splitlines() if b'"error":null' in row]
    assert before
    batch_id = batch_ids(version)["interrupted.jsonl"]
    client.cancel(batch_ids(version)["half.jsonl"])  # its rows are not this test's
    duplicates = batch_ids(version)["same.jsonl"]
    assert client.status(duplicates).priority == "high"
    batchkv(redis_server, folder, "run", "interrupted.jsonl", "-m", "demo", "-o", out.name)
    status = client.status(batch_id)
    assert (status.is_done, status.ok, status.failed) == (True, 24, 4)
    status = client.status(duplicates)
    assert (status.is_done, status.ok, status.copied) == (True, 6, 4)
    answers, failed = (
        [json.loads(row) for row in path.read_text("utf-8").splitlines()] for path in (out, errors)
    )
    assert set(before) <= set(out.read_bytes().splitlines())
    ids = [row["id"] for row in (*answers, *failed)]
    assert sorted(ids) == sorted(f"{batch_id}-{line}" for line in range(1, 29))
    assert {row["response"]["status_code"] for row in answers} == {200}
    assert {row["response"]["status_code"] for row in failed} == {400}


def test_results_that_were_stored_are_read(version: str, client: Client, folder: Path) -> None:
    """A batch that is done has its results, and submitting its file again computes nothing."""
    batch_id = batch_ids(version)["done.txt"]
    rows = list(client.results(batch_id, order="input"))
    assert [row.line for row in rows] == [1, 2, 4]
    assert all(row.result.text and row.result.outcome == "ok" for row in rows)
    again = client.submit(
        folder / "done.txt",
        model="demo",
        defaults=SamplingParams(max_tokens=8, temperature=0.0),
    )
    assert (again.batch_id, again.joined) == (batch_id, True)
    assert client.status(batch_id).is_done


def test_a_submit_that_was_cut_off_goes_on(
    version: str, client: Client, folder: Path, redis_connection: Redis
) -> None:
    """The same file again adds the rows that are missing, each once."""
    batch_id = batch_ids(version)["half.jsonl"]
    assert not client.status(batch_id).is_submitted
    client.submit(folder / "half.jsonl", model="demo")
    status = client.status(batch_id)
    assert status.is_submitted and status.queued == status.total == 520
    waiting = redis_connection.lrange(f"rq:queue:{queue_name('demo')}", 0, -1)
    ours = [job for job in waiting if job.decode().startswith(batch_id)]
    assert len(ours) == len(set(ours)) == 520


def test_blocks_that_were_stored_are_hits(
    version: str, folder: Path, redis_server: RedisServer, redis_connection: Redis
) -> None:
    """A worker of the same weights takes the first block of a known prompt from the recorded tier.

    The weights are those of the demo model of that version, which is another one today.
    """
    with (folder / "interrupted.jsonl").open(encoding="utf-8") as lines:
        row = json.loads(next(lines))
    row["body"]["max_tokens"] = 3
    (folder / "one.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    batchkv(
        redis_server, folder, "run", "one.jsonl", "-m", folder / "model", "-o", "one.out",
        BATCHKV_CACHE=f"disk:{folder / 'blocks'}",
    )  # fmt: skip
    usage = json.loads((folder / "one.out").read_text("utf-8"))["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= NUM_TOKENS_A_BLOCK
