"""A server that refuses some things for a while: what a worker waits for, and goes on after."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoScriptError, ResponseError
from rq.worker import base

from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.queue.redis_side import is_outage
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.redis_server import RedisServer, running_server
from support.worker_harness import MODEL, QUEUE, submit, wait_until


@contextmanager
def full_disk(server: RedisServer, connection: Redis) -> Iterator[None]:
    """Inside, the server cannot save, and refuses writes and pings (MISCONF)."""
    in_the_way = server.directory / str(connection.config_get("dbfilename")["dbfilename"])
    in_the_way.mkdir()
    connection.config_set("save", "3600 1000000")
    connection.bgsave()
    wait_until(lambda: connection.info("persistence")["rdb_last_bgsave_status"] == "err")
    try:
        yield
    finally:
        connection.config_set("save", "")
        in_the_way.rmdir()


def test_a_full_disk_does_not_end_the_thread_of_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a time in which the server's disk was full, a worker obeys RQ's commands as before."""
    stopped: list[dict[str, Any]] = []

    class Worker(BatchWorker):
        def handle_payload(self, message: dict[Any, Any]) -> None:
            stopped.append(message)

    monkeypatch.setattr(base.time, "sleep", lambda _, sleep=time.sleep: sleep(0.02))
    with running_server() as server, server.connect() as connection:
        worker = Worker([QUEUE], "w", connection=connection, settings=WorkerSettings(model=MODEL))
        worker.subscribe()
        try:
            with full_disk(server, connection), caplog.at_level(logging.ERROR, "rq.worker"):
                with pytest.raises(ResponseError, match="MISCONF"):
                    connection.ping()
                worker.pubsub.connection.health_check_interval = 1e-6  # ping after each message

                def is_noticed() -> bool:
                    connection.publish("rq:pubsub:w", "wake up")
                    return "MISCONF" in caplog.text or not worker.pubsub_thread.is_alive()

                wait_until(is_noticed)
            num_before = len(stopped)
            connection.publish("rq:pubsub:w", "stop")
            wait_until(lambda: len(stopped) > num_before)
        finally:
            worker.unsubscribe()


def test_scripts_that_are_flushed_are_loaded_again(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SCRIPT FLUSH` between loading a script and running it costs no move."""
    submit(redis_connection, ["a"])
    moves, load = Transitions(redis_connection), redis_connection.script_load
    flushes = iter((True, True))

    def load_and_flush(source: str) -> Any:
        sha = load(source)
        if next(flushes, False):
            redis_connection.script_flush()
        return sha

    redis_connection.script_flush()
    monkeypatch.setattr(redis_connection, "script_load", load_and_flush)
    assert len(moves.pull(QUEUE, "w", 1, 60)) == 1


def test_a_flushed_script_is_waited_for() -> None:
    """A worker whose script was flushed once too often tries again, and does not end."""
    assert is_outage(NoScriptError("No matching script. Please use EVAL."))
