"""``batchkv run`` as a filter: rows through a pipe in, results on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from support import fake_worker

BATCHKV = [sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))]
MODEL = f"fake-{os.getpid()}"
ROWS = "".join(json.dumps({"custom_id": f"q{n}", "prompt": f"p{n}"}) + "\n" for n in range(1, 13))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, and no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("BATCHKV_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def piped(url: str, *arguments: str, stdin: str = ROWS, **fake: str) -> Any:
    environment = {**os.environ, "BATCHKV_REDIS_URL": url}
    environment |= {f"FAKE_{name}": value for name, value in fake.items()}
    command = [*BATCHKV, "run", *arguments, "-m", MODEL]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=60
    )


def ids(text: str) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in text.splitlines())


ALL_IDS = sorted(f"q{n}" for n in range(1, 13))


def test_a_pipe_through_run(redis_url: str, tmp_path: Path) -> None:
    """Rows come in, and only result lines go out, also of failed rows. No file is left."""
    found = piped(redis_url, "-", FAIL="q3")
    assert found.returncode == 1
    assert ids(found.stdout) == ALL_IDS
    assert "results in standard output" in found.stderr
    assert "12 = 11 ok + 1 failed" in found.stderr
    assert "1 row failed: their lines say why" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["data", "logs"]


def test_the_same_bytes_again_join_and_are_printed_again(redis_url: str) -> None:
    """A second run of the same pipe computes nothing, and prints all rows with a note."""
    first = piped(redis_url, "-")
    again = piped(redis_url, "-")
    assert first.returncode == again.returncode == 0
    assert "12 rows ended before; they are printed again" not in first.stderr
    assert "12 rows ended before; they are printed again" in again.stderr
    assert sorted(first.stdout.splitlines()) == sorted(again.stdout.splitlines())
    with Redis.from_url(redis_url) as connection:
        (batch,) = Client(connection).list_batches()
    assert (batch.name, batch.total) == ("stdin", 12)


def test_a_pipe_into_a_file_goes_on(redis_url: str, tmp_path: Path) -> None:
    """With -o OUT, the same rows through a pipe go on from OUT, as a file does."""
    for _ in range(2):
        found = piped(redis_url, "-", "-o", "out.jsonl")
        assert found.returncode == 0, found.stderr
        assert ids((tmp_path / "out.jsonl").read_text()) == ALL_IDS
    assert "is finished" in found.stderr


def test_a_file_on_standard_input(redis_url: str, tmp_path: Path) -> None:
    """`run - < FILE` reads the file where the shell has it open."""
    (tmp_path / "in.jsonl").write_text("skipped\n" + ROWS)
    with (tmp_path / "in.jsonl").open("rb", buffering=0) as file:
        file.seek(len("skipped\n"))
        command = [*BATCHKV, "run", "-", "-m", MODEL]
        environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url}
        found = subprocess.run(
            command, stdin=file, capture_output=True, text=True, env=environment, timeout=60
        )
    assert ids(found.stdout) == ALL_IDS, found.stderr


def test_several_files_need_an_out(redis_url: str, tmp_path: Path) -> None:
    """Several files need -o, because no file name would be the default of OUT."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("p1\np2\n")
    found = piped(redis_url, "a.txt", "b.txt")
    assert (found.returncode, found.stdout) == (2, "")
    assert "several files need one file for results: -o OUT" in found.stderr
    found = piped(redis_url, "a.txt", "b.txt", "-o", "-")
    assert ids(found.stdout) == ["a.txt:1", "a.txt:2", "b.txt:1", "b.txt:2"]


def test_a_reader_that_has_enough_ends_the_run(redis_url: str) -> None:
    """`run ... | head -1` ends without an error, and its workers end too. No row is lost."""
    environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url, "FAKE_DELAY": "0.05"}
    command = [*BATCHKV, "run", "-", "-m", MODEL]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(ROWS.encode())
        process.stdin.close()
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait() == 128 + signal.SIGPIPE, said
    assert "Traceback" not in said and "Exception" not in said
    again = piped(redis_url, "-")
    assert ids(again.stdout) == ALL_IDS


def test_standard_input_that_is_a_terminal_is_told_of(redis_url: str) -> None:
    """On a terminal a note says how to end the input, because the command waits for it."""
    outer, inner = os.openpty()
    command = [*BATCHKV, "run", "-", "-m", MODEL]
    environment = {**os.environ, "BATCHKV_REDIS_URL": redis_url}
    with subprocess.Popen(
        command,
        stdin=inner,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        os.close(inner)
        assert process.stderr and process.stdout
        assert "reading rows from the terminal; Ctrl-D" in process.stderr.readline()
        os.write(outer, b'{"prompt": "p1"}\n\x04')
        printed = process.stdout.read()
        process.stderr.read()
        assert process.wait() == 0
    os.close(outer)
    assert ids(printed) == ["line-1"]
