"""A full disk under the home folder: named in one sentence, exit code 4, and nothing is lost.

A limit of file sizes, which the embedded server inherits, stands for a disk that takes no more.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_producer import disk
from batchkv_producer.cli import cli
from batchkv_producer.client import Client
from batchkv_producer.errors import FullHomeError, ServerError
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.server import connection
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import Home

SUPPORT = Path(__file__).parent.parent / "support"
FAKE_BATCHKV = [sys.executable, str(SUPPORT / "batchkv_with_fake_worker.py")]
DEADLINE_SECONDS = 60.0
NUM_ROWS = 600
ROOM = 200_000  # bytes: less than the rows take, more than a file of the server's at start


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home of our own, with a path that is short enough for its socket."""
    found = Home(Path("/tmp") / f"bkv-disk-{os.getpid()}")
    monkeypatch.setenv("BATCHKV_HOME", str(found.path))
    for name in ("BATCHKV_REDIS_URL", "BATCHKV_REDIS_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield found
    server.stop(found)
    shutil.rmtree(found.path, ignore_errors=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    words = (os.urandom(400).hex() for _ in range(NUM_ROWS))  # nothing that can be compressed
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in words), "utf-8")
    return path


def limited(room: int) -> Callable[[], None]:
    """A limit on the size of files for a new process and its children."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def batchkv(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, without a limit of its own: in this process."""
    words = [*map(str, arguments)]
    found = CliRunner().invoke(cli, words)
    return subprocess.CompletedProcess(words, found.exit_code, found.stdout, found.stderr)


def batchkv_without_room(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, on a disk that takes nothing."""
    command = [sys.executable, "-P", "-m", "batchkv_producer", *map(str, arguments)]
    limit = limited(0)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)


# A server that a signal ends (SIGXFSZ) is none that meets a full disk: it must ignore that.
START = """
import subprocess
from functools import partial
from batchkv_producer.server import embedded as server, home as server_home
subprocess.run = partial(subprocess.run, restore_signals=False)
server.ensure_running(server_home.home_from_environment())
"""


def start_server(room: int) -> None:
    """Start the home folder's server, whose files may grow no larger than ``room`` bytes."""
    subprocess.run([sys.executable, "-c", START], check=True, preexec_fn=limited(room))


def assert_names(found: subprocess.CompletedProcess[str], home: Home) -> None:
    """One line with the folder and what to do, exit code 4."""
    assert found.returncode == 4, found.stderr
    last = found.stderr.splitlines()[-1]
    assert re.match(rf"batchkv: the disk of {home.path} is full \([\w ]+\): make room there", last)


def test_a_server_that_finds_no_room_to_start(home: Home, source: Path) -> None:
    """Without room for a server's start, submit and run name the folder."""
    for command in ("submit", "run"):
        assert_names(batchkv_without_room(command, source, "-m", "m"), home)
    assert not list(home.path.glob(".room*"))


def test_a_server_that_has_no_room_for_more(home: Home, source: Path) -> None:
    """A submit for which there is no room ends so at once, and again; reading goes on. When there
    is room, the same command goes on from there."""
    start_server(ROOM)
    for _ in range(2):
        assert_names(batchkv("submit", source, "-m", "m"), home)
    listed = batchkv("list")
    assert listed.returncode == 0 and "in.jsonl" in listed.stdout
    server.stop(home)  # the next has no limit
    found = batchkv("submit", source, "-m", "m")
    assert found.returncode == 0, found.stderr
    with Redis.from_url(home.url) as redis:
        assert Client(redis).status(found.stdout.strip()).queued == NUM_ROWS


def test_a_disk_that_fills_while_rows_wait(home: Home, source: Path) -> None:
    """wait ends and names the disk if workers cannot store their results."""
    start_server(ROOM)
    one = source.with_name("one.txt")
    one.write_text("hello\n", "utf-8")
    batch_id = batchkv("submit", one, "-m", "m").stdout.strip()
    assert_names(batchkv("submit", source, "-m", "m"), home)
    assert_names(batchkv("wait", batch_id, "--timeout", "30"), home)


def test_a_run_ends_when_its_workers_cannot_store_results(home: Home, source: Path) -> None:
    """run does not go on in silence while its workers keep results that nobody takes: it ends,
    names the disk, and its worker ends with it."""
    start_server(ROOM)
    few = source.with_name("few.txt")
    few.write_text("one\ntwo\n", "utf-8")
    running = subprocess.Popen(
        [*FAKE_BATCHKV, "run", str(few), "-m", "m"],
        env={**os.environ, "FAKE_DELAY": "30"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Redis.from_url(home.url) as redis:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(batch.running for batch in Client(redis).list_batches()):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
    assert_names(batchkv("submit", source, "-m", "m"), home)
    said = running.communicate(timeout=DEADLINE_SECONDS)[1]
    ended = subprocess.CompletedProcess(running.args, running.returncode, "", said)
    assert_names(ended, home)
    assert "stopping the workers" not in said  # who have nobody to give their rows to


def test_a_hub_that_is_full_is_a_reason_to_wait(home: Home, source: Path) -> None:
    """A full disk of another machine is shown in the progress and in a note, and waited for."""
    start_server(ROOM)
    one = source.with_name("one.txt")
    one.write_text("hello\n", "utf-8")
    batch_id = batchkv("submit", one, "-m", "m").stdout.strip()
    assert batchkv("submit", source, "-m", "m").returncode == 4
    url = f"unix://{home.socket}?db=0"  # not as the home folder names its own
    notes: list[str] = []
    with Redis.from_url(url) as redis:
        status = Client(redis).status(batch_id)
        refused = connection.refused_writes(redis, url)
        delays = Delays(lambda _: [], notes.append, refused_writes=lambda: refused, clock=Steps())
        delays.look(status)
        assert delays.look(status) == "the server's disk is full"
        full = pytest.raises(ServerError, match="cannot write to its disk")
        with full, connection.server_errors(url):
            Client(redis).cancel(batch_id)
        with pytest.raises(FullHomeError):
            connection.refused_writes(redis, home.url)


class Steps:
    """A clock that goes on by a minute with each call."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 60.0
        return self.now


def test_other_faults_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    """A folder that can be written, or that is not there, is not full."""
    disk.refuse_full(tmp_path)
    disk.refuse_full(tmp_path / "none")
    assert not list(tmp_path.iterdir())
    assert "is full" in str(disk.full_home(tmp_path, "AOF file: No space left on device"))
    assert "cannot be written (MISCONF" in str(disk.full_home(tmp_path, "MISCONF x"))
