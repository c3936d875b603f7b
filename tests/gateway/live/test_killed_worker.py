"""The only worker is killed: the gateway of its machine notices that without its heartbeats."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from batchkv_producer.wire import redis_keys
from support.gateway import running_gateway
from support.redis_server import RedisServer
from support.worker_harness import MODEL, WorkerProcess, wait_until, workers


def test_calls_do_not_wait_for_a_worker_that_was_killed(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Later ones are refused at once, and its model is not listed any more.

    The one that it was answering waits for a minute, in which the worker may be started again. If
    something of the answer was written, that ends when the worker's lease does.
    """
    with redis_server.connect() as connection:
        connection.flushall()
    plan: dict[str, object] = {"step_seconds": 0.005}
    messages: Any = [{"role": "user", "content": "slow:4000 a"}]
    faults: list[openai.APIStatusError] = []
    with (
        running_gateway(redis_server.url, tmp_path / "home", DEATH_SECONDS=0.2) as gateway,
        workers(WorkerProcess(redis_server.url, tmp_path / "log", plan=plan)) as (worker,),
        gateway.client(max_retries=0, timeout=60) as client,
    ):
        wait_until(lambda: [model.id for model in client.models.list()] == [MODEL])

        def ask() -> None:
            try:
                client.chat.completions.create(model=MODEL, messages=messages)
            except openai.APIStatusError as fault:
                faults.append(fault)

        asking = threading.Thread(target=ask)
        asking.start()
        with redis_server.connect() as connection:
            wait_until(lambda: list(connection.scan_iter("batchkv:live:row:*")))
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        wait_until(lambda: list(client.models.list()) == [], 10)
        with pytest.raises(openai.InternalServerError, match="asleep, paused, drained or away"):
            client.chat.completions.create(model=MODEL, messages=messages)
        with pytest.raises(openai.InternalServerError, match="asleep, paused, drained or away"):
            client.post("/chat/completions", body={"messages": messages}, cast_to=object)
        with redis_server.connect() as connection:
            connection.delete(redis_keys.live_seen(redis_keys.queue_name(MODEL)))  # a minute later
            for row in connection.scan_iter("batchkv:live:row:*"):  # its lease is over
                connection.hset(row, "until", "1")
        asking.join(40)
        assert [fault.status_code for fault in faults] == [503]
        left = "no worker of the model is left: start one, and ask again"
        begun = "its worker ended in the middle of the answer: ask again"
        assert any(words in str(faults[0]) for words in (left, begun)), faults
        with pytest.raises(openai.NotFoundError, match="no worker answers fake: start one"):
            client.chat.completions.create(model=MODEL, messages=messages)
