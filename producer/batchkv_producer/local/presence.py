"""Finds workers of this machine that died. Each worker has a record file in the home folder.

Only a process's own machine knows whether the process lives. So each worker writes a file with its
process id, and removes it when it ends normally. Other workers read the files when they start and
every few seconds; so does ``batchkv run``. A host name would not do: it changes with the network,
and two Macs may have the same one.

If the file was written since the last boot and in the same PID namespace (a container has its own),
the process id shows whether the process lives. Otherwise the machine was restarted, or another
machine shares the folder. Then a worker counts as dead after two missed heartbeats.
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
from collections.abc import Callable, Iterator, Sequence
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

RECLAIMED = "took back %d jobs of workers of this machine that died"
MAX_FILES_READ = 1000
MAX_FILE_BYTES = 16_384
FILE_TTL_SECONDS = 7 * 86400  # of records of dead workers of other servers
MAX_RECLAIMED = 1_000_000
PROC = "/proc"  # where Linux tells of processes
COMMAND_SECONDS = 5.0  # limit for sysctl and ps


@dataclass(frozen=True, slots=True)
class Record:
    """A worker's record: its queues and its process. ``more_queues`` are those of adapters.

    ``boot`` and ``space`` name the boot and the PID namespace in which ``pid`` is valid.
    ``started`` is the start of the process, because another process may get the same id later.
    """

    name: str
    queue: str
    server: str
    heartbeat_seconds: float
    boot: str
    space: str
    pid: int
    started: str
    more_queues: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record in a file. None if the file cannot be read."""
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
                more_queues=tuple(map(str, values.get("more_queues", ()))),
            )
        except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
            return None

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues that it serves."""
        return (self.queue, *self.more_queues)

    @property
    def has_visible_process(self) -> bool:
        """Whether this process would see the record's process, if it lives."""
        return bool(self.boot) and (self.boot, self.space) == (boot_id(), pid_namespace())

    def is_dead(self, connection: Redis, *, is_visible: bool) -> bool:
        """Whether its process is gone, or was silent for two heartbeats. Raises RedisError.

        ``is_visible``: ``has_visible_process``, which takes two commands on macOS.
        """
        if is_visible:
            try:
                return process_start(self.pid) != self.started
            except OSError:
                return False
        silent = seconds_silent(connection, self.name)
        return silent > MISSED_HEARTBEATS * max(0.0, self.heartbeat_seconds) + 1


class Presence:
    """The record file of this process, a worker. Without a home folder there is no file."""

    def __init__(
        self,
        connection: Redis,
        name: str,
        queue: str,
        heartbeat_seconds: float,
        more_queues: Sequence[str] = (),
    ) -> None:
        self._connection = connection
        self._path: Path | None = None
        self._silent: set[Path] | None = None  # None until the first call of reclaim_dead
        self._place = ("", "")  # the boot and the PID namespace of this process
        try:
            self._home: Home | None = home_from_environment()
            started = process_start(os.getpid())
            if started is None:
                raise OSError("this process has no start")
            place = (boot_id(), pid_namespace(), os.getpid(), started)
            server, more = server_of(connection), tuple(more_queues)
            record = Record(name, queue, server, heartbeat_seconds, *place, more_queues=more)
            self._place = (record.boot, record.space)
            self._path = _write(self._home, record)
        except (OSError, BatchkvError) as fault:
            self._home = None
            log.debug("this worker has no record file: %s", fault)

    def reclaim_dead(self) -> None:
        """Reclaim the jobs of dead workers of this machine. Raises RedisError.

        The first call comes before this worker takes jobs.
        """
        if self._home is None:
            return
        # At the first call this worker has no jobs. Jobs under its name are of an earlier process.
        own = self._path if self._silent is None else None
        if num := reclaim_dead(self._connection, self._home, self._silent, own):
            log.warning(RECLAIMED, num)
        self._silent = set() if self._silent is None else self._silent

    def reclaim_ended(self) -> None:
        """The same for workers whose process ids no process has any more. Raises RedisError.

        It starts no command, so it may be called often. A process id that was used again, a
        process that nobody has waited for and a silent machine are left to ``reclaim_dead``, before
        whose first call it does nothing.
        """
        if self._home is None or self._silent is None:
            return
        if num := reclaim_dead(self._connection, self._home, has_ended=self._has_ended):
            log.warning(RECLAIMED, num)

    def _has_ended(self, record: Record) -> bool:
        is_here = bool(record.boot) and (record.boot, record.space) == self._place
        return is_here and is_free(record.pid)

    def is_drained(self) -> bool:
        """Whether somebody on this machine wants the worker to take no more rows."""
        return self._path is not None and drain_file(self._path).exists()

    def remove(self) -> None:
        """Remove the file, because the worker ends normally."""
        if self._path is not None:
            _delete(self._path)


def drain_file(record: Path) -> Path:
    """The file that drains the worker of a record file, while it exists."""
    return record.with_suffix(".drain")


def own_record_files(connection: Redis, name: str) -> list[Path]:
    """The record files of the living workers of this machine that have this name.

    Raises OSError or UsageError if the home folder cannot be used.
    """
    found = _records(home_from_environment(), server_of(connection))
    return [path for path, one in found if one.name == name and one.has_visible_process]


def reclaim_dead(
    connection: Redis,
    home: Home,
    silent: set[Path] | None = None,
    own: Path | None = None,
    *,
    has_ended: Callable[[Record], bool] | None = None,
) -> int:
    """Reclaim the jobs that dead workers of this machine hold on this server. Returns their number.

    ``silent``: the records whose workers were silent at the last call. A worker without a visible
    process must be silent twice, because a server that is just back from an outage has no new
    heartbeats yet. None: once is enough. ``own``: the file of the calling worker, if it holds no
    jobs yet. ``has_ended`` decides alone, if it is given.
    """
    here = server_of(connection)
    dead, num = list[tuple[Path, Record]](), 0
    seen = set[Path]()
    living, holding = set[str](), set[str]()  # names
    for path, record in _records(home, here):
        if has_ended is not None:
            is_dead = is_certain = has_ended(record)
        else:
            is_visible = record.has_visible_process
            is_dead = record.is_dead(connection, is_visible=is_visible)
            is_certain = is_visible or silent is None or path in silent
        seen.add(path)
        if is_dead and is_certain:
            dead.append((path, record))
        else:
            living.add(record.name)
            holding |= {record.name} if path != own else set()
        if silent is not None and is_dead:
            silent.add(path)
        elif silent is not None:
            silent.discard(path)
    for path, record in dead:
        # Meanwhile a worker may have started again under the same name, and taken jobs.
        new = {one.name for each, one in _records(home, here) if each not in seen}
        living |= new
        holding |= new
        if record.name not in holding:  # else a living process of that name holds the jobs
            moves = Transitions(connection)
            for queue in record.queues:
                num += sum(moves.reap(queue, record.name, MAX_RECLAIMED))
        if record.name not in living:
            _unregister(connection, record)
        _delete(path)
    return num


def reclaim_dead_of_home(connection: Redis, silent: set[Path] | None = None) -> None:
    """Reclaim the jobs and the names of dead workers of this machine. Raises RedisError.

    For a process without a ``Presence``. Without a home folder it does nothing. ``silent``: as of
    ``reclaim_dead``, for who looks again and again.
    """
    try:
        home = home_from_environment()
    except (OSError, BatchkvError):
        return
    if num := reclaim_dead(connection, home, silent):
        log.warning(RECLAIMED, num)


def _unregister(connection: Redis, record: Record) -> None:
    """Remove a dead worker from RQ's lists, so that it no longer counts as serving its queue."""
    key = redis_keys.worker(record.name)
    with suppress(NoPermissionError), connection.pipeline(transaction=False) as pipeline:
        pipeline.srem(redis_keys.workers(), key)
        for queue in record.queues:
            pipeline.srem(redis_keys.workers(queue), key)
        pipeline.delete(key)
        pipeline.execute()


def remove_record(home: Home, pid: int) -> None:
    """Remove the file of a process that the caller has killed, so that it is not found dead."""
    for path in _folder(home).glob(f"{pid}-*.json"):
        record = Record.read(path)
        if record is None or record.has_visible_process:  # else the id is of another machine
            _delete(path)


def server_of(connection: Redis) -> str:
    """The address and database number of a server, as this machine addresses it."""
    options = connection.connection_pool.connection_kwargs
    place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{place}/{options.get('db') or 0}"


def boot_id() -> str:
    """An id of the machine's last boot. Empty if the system has none."""
    try:
        if sys.platform == "darwin":
            return _output_of("sysctl", "-n", "kern.bootsessionuuid")
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """The namespace of process ids: a container has its own. Empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_free(pid: int) -> bool:
    """Whether no process has this id, not even one that has ended and was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return pid > 0  # else it means a group of processes
    except (OSError, OverflowError):
        pass
    return False


def process_start(pid: int) -> str | None:
    """The start of a process, in the system's own format. None if the process is gone.

    Raises OSError if the system does not say.
    """
    try:
        state, *fields = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else fields[18]
    except (FileNotFoundError, ProcessLookupError):
        if Path(PROC, "self", "stat").exists():
            return None
    except (ValueError, IndexError) as fault:
        raise OSError(f"process {pid} cannot be read") from fault
    state, _, start = _output_of("ps", "-o", "state=,lstart=", "-p", str(pid)).partition(" ")
    if not state and not is_free(pid):
        raise OSError(f"ps says nothing of process {pid}")
    return None if not state or state.startswith("Z") else " ".join(start.split())


def _output_of(*command: str) -> str:
    """The output of a system command. Raises OSError."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired as fault:
        raise OSError(f"{command[0]} does not answer") from fault
    return done.stdout.strip()


def _folder(home: Home) -> Path:
    return home.path / "workers"


def _write(home: Home, record: Record) -> Path:
    """Write the record file. Raises OSError, or UsageError if others may open the folder."""
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
    """The records of a server's workers. Unreadable ones and those of dead workers of other servers
    are deleted after a week."""
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
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a record file, and the file that drains its worker."""
    for each in (path, drain_file(path)):
        with suppress(OSError):
            each.unlink(missing_ok=True)


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
