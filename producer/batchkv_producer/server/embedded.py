"""The embedded server: one Redis-compatible process for each home folder, started when needed.

It is a daemon: it goes on when the command that started it ends. It listens on a unix socket only
and stores its data in an append-only file. Layout of the home folder (``BATCHKV_HOME``, default
``~/.batchkv``)::

    redis.sock       the socket (elsewhere if this path is too long for a socket)
    data/            the append-only file
    logs/server.log  the server's log
    server.pid       its process id
    start.lock       held by a process while it starts or stops the server
    running.lock     held by the server while it runs

``running.lock`` is locked here, and the server inherits the lock. The kernel releases it when the
last process that has it ends. So the lock shows whether a server runs, which a process id does not
show reliably, and two servers can never write to one data folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from batchkv_producer.disk import full_home, is_full, ping, refuse_full
from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server.append_only import cut_zeros
from batchkv_producer.server.binary import Binary, Candidates, candidates, find_binary
from batchkv_producer.server.home import Home, make_folders, refuse_foreign

START_TIMEOUT_SECONDS = 10.0  # without any answer; a server that loads its data may take longer
LOAD_TIMEOUT_SECONDS = 900.0
STOP_TIMEOUT_SECONDS = 20.0
PROBE_TIMEOUT_SECONDS = 2.0
NUM_LOG_LINES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The fields of ``batchkv server status``. If it does not run, the last five are None."""

    is_running: bool
    url: str
    socket: str
    data_dir: str
    log: str
    pid: int | None = None
    name: str | None = None
    version: str | None = None
    memory_bytes: int | None = None
    uptime_seconds: int | None = None


def ensure_running(home: Home, from_candidates: Candidates = candidates) -> str:
    """The URL of the home folder's server, which is started if it does not run.

    Many processes may call this at once: only one server is started. Raises ServerError with the
    end of the server's log if it does not start, and FullHomeError if the disk is full.
    """
    if os.path.exists(home.socket):  # False, too, in a folder that this user may not open
        refuse_foreign(home.socket.parent)
        if _answers(home):
            return home.url
    make_folders(home)
    with _start_lock(home):
        if _is_alive(home):
            _await_answer(home)
        else:
            _start(home, find_binary(from_candidates))
            _await_answer(home)
    return home.url


def stop(home: Home) -> bool:
    """Stop the server and wait for its end. Returns False if none ran. Its data stays on disk."""
    if not home.path.is_dir():
        return False
    refuse_foreign(home.path)  # because its files name the process to end
    with _start_lock(home):
        if not _is_alive(home):
            return False
        pid = _pid(home)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        elif not _shut_down(home):
            raise ServerError(
                f"a server uses {home.data} but its process is unknown: it does not answer, and "
                f"{home.pid_file} names no process that listens at {home.socket}. Find it with "
                "`ps` and end it"
            )
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while _is_alive(home):
            if time.monotonic() > deadline:
                named = "" if pid is None else f" (process {pid})"
                raise ServerError(f"the server{named} does not stop: see {home.log}")
            time.sleep(0.02)
    return True


def status(home: Home) -> ServerStatus:
    """The status of the home folder's server. Starts nothing."""
    places: dict[str, Any] = {
        "url": home.url,
        "socket": str(home.socket),
        "data_dir": str(home.data),
        "log": str(home.log),
    }
    try:
        with client_of(home) as connection:
            info: dict[str, Any] = connection.info()
    except RedisError:
        return ServerStatus(is_running=False, **places)
    return ServerStatus(
        is_running=True,
        pid=int(info["process_id"]),
        name=str(info.get("server_name", "redis")),
        version=str(info.get("valkey_version") or info["redis_version"]),
        memory_bytes=int(info["used_memory"]),
        uptime_seconds=int(info["uptime_in_seconds"]),
        **places,
    )


def holds_data(home: Home) -> bool:
    """Whether some server, or a child that writes its data, holds the lock of the data."""
    return _is_alive(home)


def tail(log: Path, num_lines: int = NUM_LOG_LINES_SHOWN, num_bytes: int = 16384) -> list[str]:
    """The last lines of a log without empty ones. No lines if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


def arguments(home: Home, binary: Binary) -> list[str]:
    """The server's command line. The last two settings halve the memory of jobs and results."""
    # Redis 6.2 knows the first of these two only by its older name.
    is_old = binary.name == "redis" and binary.version < (7,)
    listpack = "hash-max-ziplist-value" if is_old else "hash-max-listpack-value"
    settings = {
        "daemonize": "yes",
        "port": "0",
        "unixsocket": str(home.socket),
        "unixsocketperm": "700",
        "dir": str(home.data),
        "logfile": str(home.log),
        "pidfile": str(home.pid_file),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        listpack: "8192",
        "stream-node-max-bytes": "256",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return [str(binary.path), *flags]


def _start(home: Home, binary: Binary) -> None:
    """Run the program, which makes itself a daemon. The caller must hold ``start.lock``."""
    descriptor = _inheritable(home.path / "running.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        cut_zeros(home)
        ran = subprocess.run(
            arguments(home, binary),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=(descriptor,),
            umask=0o077,
            timeout=START_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        refuse_full(home.path)
        raise ServerError(f"{binary.path} cannot be started: {fault}") from fault
    finally:
        os.close(descriptor)
    if ran.returncode != 0:
        text = (ran.stdout + ran.stderr).decode("utf-8", "replace").splitlines()
        raise _start_failure(home, [line for line in text if line.strip()][-NUM_LOG_LINES_SHOWN:])


def _inheritable(path: Path) -> int:
    """Open a file under a descriptor of at least 3, which is no standard stream.

    If a standard stream is closed, the next file would get its number. But a new process gets
    standard streams of its own, so it would not inherit that file.
    """
    low = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(low)


def _await_answer(home: Home) -> None:
    started = time.monotonic()
    while True:
        try:
            with client_of(home) as connection:
                ping(connection)
                return
        except BusyLoadingError:
            limit = LOAD_TIMEOUT_SECONDS  # a large append-only file is being read
        except RedisError:
            limit = START_TIMEOUT_SECONDS
        if not _is_alive(home):
            raise _start_failure(home, [])
        if time.monotonic() - started > limit:
            raise ServerError(
                f"the server of {home.path} runs but does not answer at {home.socket}: see "
                f"{home.log}. `batchkv server stop` ends it"
            )
        time.sleep(0.01)


def _start_failure(home: Home, output: list[str]) -> ServerError:
    refuse_full(home.path)
    lines = " | ".join(line.strip() for line in [*output, *tail(home.log)])
    return ServerError(f"the embedded server did not start; the end of {home.log}: {lines}")


def client_of(home: Home) -> Redis:
    """A client of the home folder's server, with short timeouts and no retries."""
    return Redis(
        unix_socket_path=str(home.socket),
        socket_timeout=PROBE_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def _answers(home: Home) -> bool:
    try:
        with client_of(home) as connection:
            ping(connection)
            return True
    except RedisError:
        return False


def _open_lock(path: Path) -> IO[bytes]:
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


@contextmanager
def _start_lock(home: Home) -> Iterator[None]:
    try:
        file = _open_lock(home.path / "start.lock")
    except OSError as fault:
        if is_full(fault):
            raise full_home(home.path, str(fault.strerror)) from fault
        raise UsageError(f"cannot write in {home.path}: {fault.strerror}") from fault
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_alive(home: Home) -> bool:
    """Whether a server, or its child that writes data, holds ``running.lock``."""
    try:
        file = _open_lock(home.path / "running.lock")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _pid(home: Home) -> int | None:
    """The server's process id: from the server itself, else from the pid file.

    None if that process is not this home's server: ids are reused, and differ in containers.
    """
    pid: int | None = None
    with suppress(RedisError), client_of(home) as connection:
        pid = int(connection.info("server")["process_id"])
    if pid is None:
        with suppress(OSError, ValueError):
            pid = int(home.pid_file.read_text("ascii"))
    return pid if pid is not None and pid > 0 and _is_server_of(home, pid) else None


def _is_server_of(home: Home, pid: int) -> bool:
    """Whether this process is a server whose arguments name this home's socket."""
    asked = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True)
    # ``ps`` writes characters beyond ASCII differently on each system.
    plain = re.split(rb"[^!-~]+", os.fsencode(home.socket))
    wanted = rb"-server.*unixsocket[: ]" + rb".+?".join(map(re.escape, plain)) + rb"(\s|$)"
    return re.search(wanted, asked.stdout, re.DOTALL) is not None


def _shut_down(home: Home) -> bool:
    """Ask the server at the socket to end. Returns False if none answered."""
    try:
        with client_of(home) as connection:
            connection.shutdown()
    except RedisError:
        return False
    return True
