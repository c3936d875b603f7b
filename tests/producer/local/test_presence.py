"""Dead workers of this machine are found by their record files, their processes and the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.local import presence
from batchkv_producer.local.presence import Presence, process_start, reclaim_dead, server_of
from batchkv_producer.monitor.workers import read_workers
from batchkv_producer.server.home import Home
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions
from producer.wire.test_transitions import QUEUE, House, job_id

Leave = Callable[..., Path]
FREE_PID = 2**22 + 1  # more than Linux gives
ENDLESS = (
    '{"name": "", "queue": "", "server": "", "heartbeat_seconds": 1, "boot": "", "space": "", '
    '"started": "", "pid": Infinity}'
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home folder of the test's own, which does not exist yet."""
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


@pytest.fixture
def house(redis_connection: Redis) -> House:
    """Six rows in the queue, of which worker "victim" has begun four."""
    made = House(redis_connection, 6)
    made.submit(0, range(1, 7))
    made.pull(4, worker="victim")
    return made


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test ends it."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def leave(home: Home, house: House) -> Leave:
    """Writes the record file of this process, with some fields changed."""

    def make(**said: object) -> Path:
        worker = Presence(house.connection, "victim", QUEUE, 15.0)
        assert worker._path is not None
        values = json.loads(worker._path.read_bytes()) | said
        worker._path.write_text(json.dumps(values))
        return worker._path

    return make


def set_heartbeat(house: House, seconds_ago: int) -> None:
    """Sets the worker's last heartbeat on the server to so many seconds ago."""
    seen = house.connection.time()[0] - seconds_ago
    house.connection.hset(redis_keys.worker("victim"), "bkv_seen", seen)


def is_suspect(house: House, line: int) -> bool:
    return bool(house.connection.hexists(redis_keys.job(job_id(line)), "bkv_suspect"))


def test_a_worker_says_that_it_lives(house: House, home: Home) -> None:
    """A worker has one file for its owner alone. It is removed when the worker ends normally."""
    worker = Presence(house.connection, "victim", QUEUE, 15.0)
    (path,) = (home.path / "workers").iterdir()
    assert (home.path / "workers").stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_bytes())["pid"] == os.getpid()
    assert reclaim_dead(house.connection, home) == 0
    worker.remove()
    assert list((home.path / "workers").iterdir()) == []
    worker.remove()


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_process_that_is_gone_is_a_death(
    house: House, home: Home, leave: Leave, child: subprocess.Popen[bytes], is_reaped: bool
) -> None:
    """The jobs of a process that is gone are reclaimed at once, as one group of suspects, even
    after a recent heartbeat. A zombie counts as gone."""
    path = leave(pid=child.pid, started=process_start(child.pid))
    set_heartbeat(house, 0)
    assert reclaim_dead(house.connection, home) == 0
    child.send_signal(signal.SIGSTOP)
    assert reclaim_dead(house.connection, home) == 0
    child.kill()
    if is_reaped:
        child.wait()
    deadline = time.monotonic() + 10
    while process_start(child.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reclaim_dead(house.connection, home) == 4
    assert [is_suspect(house, line) for line in range(1, 7)] == [True] * 4 + [False] * 2
    assert not path.exists()


def test_a_dead_worker_is_counted_no_more(house: House, home: Home, leave: Leave) -> None:
    """It is removed from RQ's lists, and its name may be used again."""
    key = redis_keys.worker("victim")
    house.connection.hset(key, mapping={"birth": "x", "queues": QUEUE})
    for workers in ("rq:workers", f"rq:workers:{QUEUE}"):
        house.connection.sadd(workers, key)
    assert [info.name for info in read_workers(house.connection)] == ["victim"]
    leave(started="1")
    reclaim_dead(house.connection, home)
    assert read_workers(house.connection) == []
    assert not house.connection.exists(key, "rq:workers", f"rq:workers:{QUEUE}")


def test_a_number_that_another_process_has_now(house: House, home: Home, leave: Leave) -> None:
    """A process id that was used again is recognized by the process's start."""
    leave(started="1")
    assert reclaim_dead(house.connection, home) == 4


@pytest.mark.parametrize("place", [{"boot": "another"}, {"space": "pid:[1]"}, {"boot": ""}])
def test_a_process_that_cannot_be_seen(
    house: House, home: Home, leave: Leave, place: dict[str, str]
) -> None:
    """A record of another boot, container or machine is dead after two missed heartbeats, not
    before."""
    leave(**place, pid=2**22 + 1)
    for seconds_ago, num in ((0, 0), (29, 0), (40, 4)):
        set_heartbeat(house, seconds_ago)
        assert reclaim_dead(house.connection, home) == num
    assert is_suspect(house, 1)


def test_a_silence_is_looked_at_twice(house: House, home: Home, leave: Leave) -> None:
    """Right after an outage all workers seem silent, so a worker must be silent at two calls. At a
    worker's first call once is enough."""
    worker = Presence(house.connection, "w", QUEUE, 15.0)
    worker.reclaim_dead()
    leave(boot="another")
    set_heartbeat(house, 40)
    worker.reclaim_dead()
    set_heartbeat(house, 1)
    worker.reclaim_dead()
    set_heartbeat(house, 40)
    worker.reclaim_dead()
    assert house.count("running") == 4
    worker.reclaim_dead()
    assert house.count("running") == 0


def test_only_a_certain_end_counts_between_rounds(house: House, home: Home, leave: Leave) -> None:
    """``reclaim_ended`` takes no silence for an end, and no process id that was used again. Before
    the first look it holds back."""
    worker = Presence(house.connection, "w", QUEUE, 15.0)
    path = leave(pid=FREE_PID)
    worker.reclaim_ended()
    assert house.count("running") == 4
    path.unlink()
    worker.reclaim_dead()
    for place in ({"boot": "another", "pid": FREE_PID}, {"started": "1"}, {"pid": -FREE_PID}):
        path = leave(**place)
        set_heartbeat(house, 4000)
        for _ in range(3):
            worker.reclaim_ended()
        assert house.count("running") == 4 and path.exists()
        path.unlink()
    leave(pid=FREE_PID)
    worker.reclaim_ended()
    assert house.count("running") == 0


def test_a_worker_that_starts_again_meanwhile_keeps_its_jobs(
    house: House, home: Home, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the taking, a worker of the same name has begun, and holds jobs."""
    old = leave(pid=FREE_PID)
    real = presence._records
    looks: list[int] = []

    def records(home: Home, server: str) -> Any:
        looks.append(1)
        if len(looks) == 2:
            Presence(house.connection, "victim", QUEUE, 15.0)
        return real(home, server)

    monkeypatch.setattr(presence, "_records", records)
    assert reclaim_dead(house.connection, home) == 0
    assert house.count("running") == 4 and not old.exists()


@pytest.mark.parametrize("ends", ["kill -9 $$", "exit 1"])
def test_a_failing_ps_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Where ``ps`` tells of processes, as on macOS: one that says nothing proves nothing."""
    (tmp_path / "ps").write_text(f"#!/bin/sh\n{ends}\n")
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(presence, "PROC", str(tmp_path / "none"))
    with pytest.raises(OSError, match="ps "):
        process_start(os.getpid())
    if ends == "exit 1":
        assert process_start(FREE_PID) is None


def test_a_machine_that_was_started_anew(house: House, home: Home, leave: Leave) -> None:
    """After a reboot the jobs of a worker without a record on the server are reclaimed, although
    the lease still runs."""
    leave(boot="before")
    assert reclaim_dead(house.connection, home) == 4


def test_a_name_that_a_living_process_has(house: House, home: Home, leave: Leave) -> None:
    """Jobs under a name belong to the living process of that name."""
    dead, alive = leave(started="1"), leave()
    assert reclaim_dead(house.connection, home) == 0
    assert not dead.exists() and alive.exists()


def test_a_name_that_is_used_again(house: House, home: Home, leave: Leave) -> None:
    """A worker with the name of a dead one reclaims that one's jobs as suspects, before it takes
    jobs. Later the jobs under the name are its own."""
    key = redis_keys.worker("victim")
    house.connection.hset(key, mapping={"birth": "x", "last_heartbeat": "9999"})
    leave(started="1")
    again = Presence(house.connection, "victim", QUEUE, 15.0)
    again.reclaim_dead()
    assert [is_suspect(house, line) for line in (1, 4, 5)] == [True, True, False]
    assert house.connection.exists(key)
    house.pull(2, worker="victim")
    leave(started="1")
    again.reclaim_dead()
    assert house.count("running") == 2


def test_workers_of_another_server_are_left_alone(house: House, home: Home, leave: Leave) -> None:
    """Records of another server are left to its workers. That of a dead worker is deleted after a
    week."""
    path = leave(server="elsewhere:6379/0", started="1")
    alive = leave(server="elsewhere:6379/0")
    assert reclaim_dead(house.connection, home) == 0
    assert path.exists()
    for each in (path, alive):
        os.utime(each, (1, 1))
    reclaim_dead(house.connection, home)
    assert alive.exists() and not path.exists()


def test_a_killed_worker_leaves_no_record(house: House, home: Home, leave: Leave) -> None:
    """``run`` removes the file of a worker that it kills, but not one of another machine."""
    ours, other = leave(), leave()
    kept = other.rename(other.with_name(f"{os.getpid()}1-x.json"))
    presence.remove_record(home, os.getpid())
    assert kept.exists() and not ours.exists()
    elsewhere = leave(boot="another")
    presence.remove_record(home, os.getpid())
    assert elsewhere.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"name": 1}', "[" * 5000, '{"pid": "x"}', ENDLESS, "\x00\xff"]
)
def test_a_file_that_says_nothing(house: House, home: Home, leave: Leave, text: str) -> None:
    """A file that cannot be read does not hinder the others."""
    leave(started="1")
    (home.path / "workers" / "0-bad.json").write_text(text)
    assert reclaim_dead(house.connection, home) == 4


def test_a_folder_that_others_may_write_is_not_believed(
    house: House, home: Home, leave: Leave
) -> None:
    """In a folder that others may write, no file is read or written."""
    leave(started="1")
    folder = home.path / "workers"
    folder.chmod(0o777)
    assert reclaim_dead(house.connection, home) == 0
    worker = Presence(house.connection, "w", QUEUE, 15.0)
    assert len(list(folder.iterdir())) == 1
    worker.reclaim_dead()
    worker.remove()


def test_no_home_folder_is_no_fault(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker works without a home folder. Then only its lease shows that it died."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "file"))
    worker = Presence(house.connection, "w", QUEUE, 15.0)
    worker.reclaim_dead()
    worker.remove()
    assert reclaim_dead(house.connection, Home(tmp_path / "none")) == 0


def test_a_server_is_told_by_its_address() -> None:
    """The record names the server by its address, without user and password."""
    for url, expected in (
        ("unix:///tmp/s.sock?db=2", "/tmp/s.sock/2"),
        ("redis://me:secret@studio.local:6380/1", "studio.local:6380/1"),
        ("redis://studio.local", "studio.local:6379/0"),
    ):
        assert server_of(Redis.from_url(url)) == expected


def test_processes_have_a_start() -> None:
    """A living process has a start that does not change. Process 0 and impossible ids have none."""
    assert process_start(os.getpid()) == process_start(os.getpid()) != ""
    assert process_start(2**22 + 1) is None


def test_ps_tells_the_same_where_there_is_no_proc(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /proc, as on macOS, ``ps`` gives a process's start, and shows whether it is gone."""
    read_text = Path.read_text

    def no_proc(path: Path, *rest: str, **named: str) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(str(path))
        return read_text(path, *rest, **named)

    monkeypatch.setattr(Path, "read_text", no_proc)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    start = process_start(child.pid)
    assert start and start == process_start(child.pid)
    child.kill()
    assert process_start(2**22 + 1) is None
    child.wait()
    assert process_start(child.pid) is None
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(OSError, match="ps"):
        process_start(os.getpid())


def test_the_moves_are_those_of_a_death(house: House, home: Home, leave: Leave) -> None:
    """A second call finds nothing more, and takes no jobs from the workers that have them now."""
    leave(started="1")
    assert reclaim_dead(house.connection, home) == 4
    moves = Transitions(house.connection)
    run = moves.pull_run(*(QUEUE, "w", 6, 60), num_begin=6, knows_suspects=True, may_be_apart=True)
    assert (len(run.jobs), run.is_apart) == (4, True)
    assert reclaim_dead(house.connection, home) == 0
    assert house.count("running") == 4
