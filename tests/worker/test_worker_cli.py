"""The two command lines: stock ``rq worker`` and ``batchkv worker``; faults are one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_worker.cli import worker_command
from batchkv_worker.settings import SETTINGS
from support.worker_harness import (
    MODEL,
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    submit,
    wait_until,
    workers,
)

OWN = (sys.executable, "-m", "support.fake_engine")


def last_line(worker: WorkerProcess) -> str:
    assert "Traceback" not in worker.said
    return worker.said.splitlines()[-1]


def test_the_stock_command_serves_the_models_queue(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """``rq worker -w ... -c batchkv_worker.rq_config QUEUE`` works a batch off, and ``rq info``
    shows what it is doing."""
    batch = submit(redis_connection, ["slow:1000000"] * 3 + ["p"] * 50)
    options = {"plan": {"step_seconds": 0.01}, "settings": {"DRAIN_SECONDS": 0}}
    started = WorkerProcess(redis_url, tmp_path / "log", QUEUE, **options)  # type: ignore[arg-type]
    with workers(started) as (worker,):
        wait_until(lambda: counts_of(redis_connection, batch)["ok"] == 50)
        info = subprocess.run(
            [
                sys.executable,
                "-m",
                "rq.cli",
                "info",
                "--url",
                redis_url,
                "-w",
                "batchkv_worker.BatchWorker",
            ],
            capture_output=True,
            text=True,
            check=True,
            env={k: v for k, v in os.environ.items() if "BATCHKV" not in k},
        )
        assert "3 executing" in info.stdout
        assert "50 finished" in info.stdout
        assert "1 workers, 1 queues" in info.stdout
        worker.process.terminate()
        assert worker.wait() == 0
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 3


def test_another_models_queue_is_refused(redis_url: str, tmp_path: Path) -> None:
    """The error names the model, its queue and the queue asked for."""
    with workers(WorkerProcess(redis_url, tmp_path / "log", "default")) as (worker,):
        assert worker.wait() == 2
    line = last_line(worker)
    assert all(word in line for word in (repr(MODEL), repr(QUEUE), "'default'"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--with-scheduler"], "--with-scheduler"),
        (["--exception-handler", "builtins.print"], "--exception-handler"),
        (["--results-ttl", "5"], "--results-ttl"),
    ],
)
def test_rqs_flags_that_mean_nothing_here_are_refused(
    redis_url: str, tmp_path: Path, flags: list[str], says: str
) -> None:
    """A flag does what it says or is refused."""
    with workers(WorkerProcess(redis_url, tmp_path / "log", *flags)) as (worker,):
        assert worker.wait() == 2
    assert last_line(worker).startswith(f"batchkv: {says}")


def test_a_bad_variable_stops_the_stock_command(redis_url: str, tmp_path: Path) -> None:
    """One line that names the variable, not RQ's traceback."""
    started = WorkerProcess(redis_url, tmp_path / "log", settings={"SLOTS": "lots"})
    with workers(started) as (worker,):
        assert worker.wait() == 2
    allowed = "auto, or a whole number, 1 to 4096"
    assert last_line(worker) == f"batchkv: BATCHKV_SLOTS=lots: expected {allowed}"


def test_batchkv_worker_takes_flags(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """The same worker by our own command: name, slots and burst as flags."""
    batch = submit(redis_connection, ["p"] * 50)
    flags = ["-m", MODEL, "--url", redis_url, "--name", "mine", "--slots", "4", "--burst"]
    started = WorkerProcess("redis://nowhere:1", tmp_path / "log", *flags, command=OWN)
    with workers(started) as (worker,):
        assert worker.wait() == 0
    assert_reconciled(redis_connection, batch)
    assert "up to 12 rows at once" in worker.said
    assert redis_connection.exists("rq:worker:mine")


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--kv-scheme", "int3"], 2, "batchkv: --kv-scheme int3: unknown KV scheme 'int3'"),
        (["--memory", "big"], 2, "batchkv: --memory big: expected a size"),
        (["--url", "http://x"], 2, "batchkv: this needs the Redis URL"),
        (
            ["--url", "unix:///nowhere/s"],
            3,
            "batchkv: Redis at unix:///nowhere/s cannot be reached",
        ),
    ],
)
def test_faults_of_our_command(
    redis_url: str, tmp_path: Path, flags: list[str], code: int, says: str
) -> None:
    """Configuration is exit code 2, a server that is not there 3; one line each."""
    with workers(WorkerProcess(redis_url, tmp_path / "log", *flags, command=OWN)) as (worker,):
        assert worker.wait() == code
    assert last_line(worker).startswith(says)


def test_a_missing_model_folder_is_refused_before_the_worker_registers(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """No record of the worker is left in Redis, by our command or by RQ's."""
    flags, settings = ["-m", "/nonexistent"], {"MODEL": "/nonexistent"}
    ours = WorkerProcess(redis_url, tmp_path / "ours", *flags, command=OWN)
    stock = WorkerProcess(redis_url, tmp_path / "stock", settings=settings)
    with workers(ours, stock) as started:
        for worker in started:
            assert worker.wait() == 2
            assert last_line(worker) == "batchkv: there is no model folder /nonexistent"
    assert list(redis_connection.scan_iter("rq:worker*")) == []


def test_an_unknown_variable_is_warned_of(redis_url: str, tmp_path: Path) -> None:
    """A misspelled setting does not pass in silence."""
    started = WorkerProcess(redis_url, tmp_path / "log", "--burst", settings={"SLOT": 4})
    with workers(started) as (worker,):
        assert worker.wait() == 0
    assert "did you mean BATCHKV_SLOTS?" in worker.said


def test_a_second_worker_of_the_same_name_is_refused(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Two workers of one name would share one record and one channel."""
    redis_connection.hset("rq:worker:mine", "birth", "now")
    flags = ["--name", "mine", "--burst"]
    with workers(WorkerProcess(redis_url, tmp_path / "log", *flags, command=OWN)) as (worker,):
        assert worker.wait() == 2
    assert last_line(worker).startswith("batchkv: --name mine: a worker of that name is running")


def test_every_setting_has_its_flag() -> None:
    """The flags of ``batchkv worker`` are those of the settings' table."""
    flags = {option for parameter in worker_command.params for option in parameter.opts}
    missing = {setting.flag for setting in SETTINGS} - flags
    assert missing == set()
