"""Finds workers of this machine that died, by a file for each in the home folder.

Only a process's own machine can say that it is gone. So each worker writes a file with its process
id, and removes it when it ends normally. Other workers read the files when they start and now and
then; so does ``batchkv run``. A host name is not enough: it changes with the network, and two Macs
may have the same one.

If the file was written since the last boot and in the same PID namespace (a container has its own),
the process id tells for certain whether the process lives. Otherwise the machine was restarted, or
another machine shares the folder: then a worker is dead when it has missed two heartbeats.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from redis import Redis
from redis.exceptions import NoPermissionError

from batchkv_producer.errors import BatchkvError
from batchkv_producer.monitor.workers import MISSED_HEARTBEATS, seconds_silent
from batchkv_producer.server.home import Home, home_from_environment, refuse_foreign
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions

log = logging.getLogger("batchkv.worker")

MAX_FILES_READ = 1000
MAX_FILE_BYTES = 4096
FILE_TTL_SECONDS = 7 * 86400  # of the dead of a server that nobody here works for any more
MAX_RECLAIMED = 1_000_000
ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Record:
    """A worker: what it serves, and the process that it is. ``started`` tells apart processes that
    had one number after the other."""

    name: str
    queue: str
    server: str
    heartbeat_seconds: float
    boot: str
    space: str
    pid: int
    started: str

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """What a file says; None for one that says nothing."""
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(MAX_FILE_BYTES))
            return cls(
                name=str(values["name"]),
                queue=str(values["queue"]),
                server=str(values["server"]),
                heartbeat_seconds=float(values["heartbeat_seconds"]),
                boot=str(values["boot"]),
                space=str(values["space"]),
                pid=int(values["pid"]),
                started=str(values["started"]),
            )
        except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
            return None

    @property
    def is_seen(self) -> bool:
        """Whether this process can see that one, if it lives."""
        return bool(self.boot) and (self.boot, self.space) == (boot_id(), process_space())

    def is_dead(self, connection: Redis) -> bool:
        """Whether its process is gone, as far as can be known. Raises RedisError."""
        if self.is_seen:
            try:
                return process_start(self.pid) != self.started
            except OSError:
                return False
        silent = seconds_silent(connection, self.name)
        return silent > MISSED_HEARTBEATS * max(0.0, self.heartbeat_seconds) + 1


class Presence:
    """The file of one worker, this process. Where there is no home folder, there is none."""

    def __init__(self, connection: Redis, name: str, queue: str, heartbeat_seconds: float) -> None:
        self._connection = connection
        self._path: Path | None = None
        self._silent: set[Path] | None = None  # until the first look
        try:
            self._home: Home | None = home_from_environment()
            started = process_start(os.getpid())
            if started is None:
                raise OSError("this process has no start")
            place = (boot_id(), process_space(), os.getpid(), started)
            record = Record(name, queue, server_of(connection), heartbeat_seconds, *place)
            self._path = _write(self._home, record)
        except (OSError, BatchkvError) as fault:
            self._home = None
            log.debug("no file tells that this worker lives: %s", fault)

    def look(self) -> None:
        """Take back at once what dead workers of this machine held. Raises RedisError."""
        if self._home is None:
            return
        # Before our first look we hold nothing: whatever is held under our name is an earlier
        # process's.
        own = self._path if self._silent is None else None
        if num := reclaim_dead(self._connection, self._home, self._silent, own):
            log.warning("took back %d jobs of workers of this machine that died", num)
        self._silent = set() if self._silent is None else self._silent

    def leave(self) -> None:
        """The worker ends in order."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def reclaim_dead(
    connection: Redis, home: Home, silent: set[Path] | None = None, own: Path | None = None
) -> int:
    """Take back what dead workers of this machine held on this server; how many jobs.

    ``silent``: those that cannot be seen and were not heard of at the last look either. The server
    may just be back from an outage, and have heard of nobody yet. None: one look is enough.
    ``own`` is the file of the worker that looks, if it holds nothing yet.
    """
    here = server_of(connection)
    dead, num = list[tuple[Path, Record]](), 0
    living, holding = set[str](), set[str]()  # names
    for path, record in _records(home, here):
        is_dead = record.is_dead(connection)
        if is_dead and (silent is None or record.is_seen or path in silent):
            dead.append((path, record))
        else:
            living.add(record.name)
            holding |= {record.name} if path != own else set()
        if silent is not None and is_dead:
            silent.add(path)
        elif silent is not None:
            silent.discard(path)
    for path, record in dead:
        if record.name not in holding:  # else what is held under that name is another process's
            num += sum(Transitions(connection).reap(record.queue, record.name, MAX_RECLAIMED))
        if record.name not in living:
            _sign_off(connection, record)
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return num


def bury_dead(connection: Redis) -> None:
    """Take back what dead workers of this machine held, and their names with it. Raises RedisError.

    For who has no file yet; where there is no home folder, nothing is known of the dead.
    """
    try:
        home = home_from_environment()
    except (OSError, BatchkvError):
        return
    if num := reclaim_dead(connection, home):
        log.warning("took back %d jobs of workers of this machine that died", num)


def _sign_off(connection: Redis, record: Record) -> None:
    """Nobody is to count a dead worker among those that serve its queue."""
    key = redis_keys.worker(record.name)
    with suppress(NoPermissionError), connection.pipeline(transaction=False) as pipeline:
        pipeline.srem(redis_keys.workers(), key)
        pipeline.srem(redis_keys.workers(record.queue), key)
        pipeline.delete(key)
        pipeline.execute()


def withdraw(home: Home, pid: int) -> None:
    """We ended this process ourselves: nothing is to be read out of that."""
    for path in _folder(home).glob(f"{pid}-*.json"):
        record = Record.read(path)
        if record is None or record.is_seen:  # another machine has its own numbers
            path.unlink(missing_ok=True)


def server_of(connection: Redis) -> str:
    """Which server and database that is, as this machine calls it."""
    said = connection.connection_pool.connection_kwargs
    place = said.get("path") or f"{said.get('host', 'localhost')}:{said.get('port', 6379)}"
    return f"{place}/{said.get('db') or 0}"


def boot_id() -> str:
    """Changes with each start of the machine; empty where nobody tells."""
    try:
        if sys.platform == "darwin":
            return _said_by("sysctl", "-n", "kern.bootsessionuuid")
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_space() -> str:
    """Where process ids count: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """When a process was started, in the system's own way of saying it; None when it is gone.

    Raises OSError when nobody can tell.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else fields[18]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    except (ValueError, IndexError) as fault:
        raise OSError(f"process {pid} cannot be read") from fault
    state, _, start = _said_by("ps", "-o", "state=,lstart=", "-p", str(pid)).partition(" ")
    return None if not state or state.startswith("Z") else " ".join(start.split())


def _said_by(*command: str) -> str:
    """What a command of the system prints. Raises OSError."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired as fault:
        raise OSError(f"{command[0]} does not answer") from fault
    return asked.stdout.strip()


def _folder(home: Home) -> Path:
    return home.path / "workers"


def _write(home: Home, record: Record) -> Path:
    """Raises OSError, or UsageError when others may open the folder."""
    folder = _folder(home)
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    refuse_foreign(home.path)
    refuse_foreign(folder)
    path = folder / f"{record.pid}-{secrets.token_hex(4)}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(record)), "utf-8")
    part.replace(path)
    return path


def _records(home: Home, server: str) -> Iterator[tuple[Path, Record]]:
    """Those of workers of a server; what cannot be read, or is another's, goes after a week."""
    try:
        refuse_foreign(_folder(home))
        paths = sorted(_folder(home).glob("*.json"))[:MAX_FILES_READ]
    except (OSError, BatchkvError):
        return
    for path in paths:
        record = Record.read(path)
        if record is not None and record.server == server:
            yield path, record
        elif _age_seconds(path) > FILE_TTL_SECONDS and not _lives(record):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _lives(record: Record | None) -> bool:
    try:
        return record is not None and process_start(record.pid) == record.started
    except OSError:
        return True


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return -math.inf
