"""batchkv from Python: rows as dicts, a client from nothing, the README's lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

import batchkv_producer
from batchkv_producer import Client, Terms, UsageError, connect, server
from batchkv_producer.given_rows import as_source
from batchkv_producer.server_home import Home

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE_WORKER = REPOSITORY / "tests" / "support" / "fake_worker.py"
ROWS = [
    {"custom_id": "a", "prompt": "one", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "ü"}]},
]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home of its own, whose server is stopped at the end."""
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    found = Home(Path("/tmp") / f"bkv-py-{os.getpid()}")
    monkeypatch.setenv("BATCHKV_HOME", str(found.path))
    try:
        yield found
    finally:
        server.stop(found)
        shutil.rmtree(found.path)


def test_dicts_are_rows(client: Client, tmp_path: Path) -> None:
    """A list of dicts is queued as lines of a file would be, in any order of their keys."""
    submitted = client.submit(ROWS, model="m")
    assert (submitted.total, submitted.num_bad, submitted.joined) == (2, 0, False)
    turned = [dict(reversed(row.items())) for row in ROWS]
    again = client.submit(iter(turned), model="m")
    assert (again.batch_id, again.joined) == (submitted.batch_id, True)
    assert client.status(submitted.batch_id).name == "rows"
    assert client.submit(ROWS[:1], model="m").batch_id != submitted.batch_id
    assert client.check(ROWS, model="m").batch_id == submitted.batch_id
    assert client.submit(ROWS, model="m", terms=Terms(dedupe=True)).joined


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a"}, "b"], "row 2 is a str"),
        ([{"prompt": {1, 2}}], "row 1 cannot be written as JSON"),
        ([{"prompt": "a", "temperature": float("nan")}], "row 1 cannot be written as JSON"),
        ({"prompt": "a"}, r"put the one row into \[...\]"),
        ([], "rows has no rows"),
    ],
)
def test_what_is_no_row_is_refused(client: Client, rows: object, words: str) -> None:
    """Before anything is queued, one sentence names the row and what is wrong with it."""
    with pytest.raises(UsageError, match=words):
        client.submit(rows, model="m")  # type: ignore[arg-type]
    assert client.list_batches() == []


def test_a_wrong_row_is_told_of_as_in_a_file(client: Client) -> None:
    """A dict that is no request fails alone, by its number."""
    submitted = client.submit([*ROWS, {"prompt": 5}], model="m")
    assert (submitted.total, submitted.num_bad) == (3, 1)
    assert submitted.errors[0].line == 3


def test_files_and_streams_pass_as_they_are(tmp_path: Path) -> None:
    """What was a source before is the same source."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    with path.open("rb") as stream:
        for source in (str(path), path, stream):
            assert as_source(source) is source


def test_connect_obeys_the_variable(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, redis_connection: Redis
) -> None:
    """BATCHKV_REDIS_URL, or the URL that is given, says which server it is."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    batch = connect().submit(ROWS, model="m").batch_id
    assert Client(redis_connection).status(batch).total == 2
    with pytest.raises(batchkv_producer.ServerError, match="cannot be reached"):
        connect("redis://127.0.0.1:1/0")


def test_the_readmes_python_runs_as_it_stands(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines, on an embedded server that they start, print one answer for each row."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text("utf-8"), re.S
    )
    assert len(code.strip().splitlines()) <= 10
    connect()  # so that the worker has a server
    environ = {**os.environ, "BATCHKV_REDIS_URL": home.url}
    command = [sys.executable, str(FAKE_WORKER), "--model", "demo", "--name", "w"]
    worker = subprocess.Popen(command, env=environ)
    try:
        exec(compile(code, "README.md", "exec"), {})
    finally:
        worker.terminate()
        worker.wait(30)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and lines[3] == "q3 ok answer to 3 plus 3 is"
