"""Scripts that the server ended early, because rights were removed for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from batchkv_producer import Client
from batchkv_producer.manage.recount import needs_recount
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result, decode_job, encode_result
from batchkv_producer.wire.transitions import JobResult, Pulled, Transitions
from support.redis_server import RedisServer
from support.worker_harness import MODEL, QUEUE, assert_reconciled

Write = Callable[..., Path]


@pytest.fixture
def worker(redis_server: RedisServer, redis_connection: Redis) -> Iterator[Redis]:
    """A connection of a user who may do everything."""
    redis_connection.execute_command("ACL", "SETUSER", "w", "on", ">w", "~*", "&*", "+@all")
    try:
        with redis_server.connect() as connection:
            connection.auth("w", "w")
            yield connection
    finally:
        redis_connection.acl_deluser("w")


@contextmanager
def denied(admin: Redis, command: str) -> Iterator[None]:
    """Inside, the user ``w`` may not run this command."""
    admin.execute_command("ACL", "SETUSER", "w", f"-{command}")
    try:
        yield
    finally:
        admin.execute_command("ACL", "SETUSER", "w", f"+{command}")


def ending(row: Pulled, outcome: Any = "ok") -> JobResult:
    request = decode_job(row.data)
    error = None if outcome == "ok" else ("engine_error", "it broke")
    reason = "length" if outcome == "ok" else None
    result = Result(
        request.custom_id,
        request.endpoint,
        outcome,
        text="t",
        finish_reason=reason,
        error=error,
    )
    return JobResult(row.lease, outcome, encode_result(result), is_cut=outcome == "ok")


@pytest.mark.parametrize("command", ["rpush", "hincrby", "expire", "zadd"])
def test_a_batch_ends_although_a_script_was_cut_short(
    redis_connection: Redis, worker: Redis, write_lines: Write, command: str
) -> None:
    """Whichever command of `finish` was refused: counts, finish order and jobs are corrected, and
    `wait` ends."""
    client = Client(redis_connection)
    file = write_lines(*({"prompt": f"p{n}"} for n in range(6)))
    batch = client.submit(file, model=MODEL, options=BatchOptions(keep_seconds=3600)).batch_id
    moves = Transitions(worker)
    rows = moves.pull(QUEUE, "w", 10, 60)
    moves.finish(QUEUE, "w", [ending(rows[0])])
    with denied(redis_connection, command):
        for row in rows[1:4]:
            outcome = "failed" if row is rows[1] else "ok"
            with suppress(ResponseError):
                moves.finish(QUEUE, "w", [ending(row, outcome)])
    moves.finish(QUEUE, "w", [ending(row) for row in rows[4:]])
    for _ in range(3):  # rows that were let go without a result are queued again
        client.status(batch)
        moves.finish(QUEUE, "w", [ending(row) for row in moves.pull(QUEUE, "w", 10, 60)])
    final = client.wait(batch, timeout_seconds=10)
    assert final.is_done and final.num_results == final.num_ended == 6
    assert final.kept_until and final.running == 0
    redis_connection.hset(redis_keys.batch(batch), "running", 0)  # only older versions read it
    assert final.cut == final.ok
    assert_reconciled(redis_connection, batch)
    for line in range(1, 7):
        assert redis_connection.ttl(redis_keys.job(f"{batch}-{line}")) != -1


def test_a_healthy_batch_is_not_counted_anew(redis_connection: Redis, write_lines: Write) -> None:
    """Reading a batch, open or ended, reads only its own numbers."""
    client = Client(redis_connection)
    batch = client.submit(write_lines({"prompt": "a"}, {"prompt": "b"}), model=MODEL).batch_id
    moves = Transitions(redis_connection)
    assert not needs_recount(client.status(batch))
    for row in moves.pull(QUEUE, "w", 10, 60):
        moves.finish(QUEUE, "w", [ending(row)])
        assert not needs_recount(client.status(batch))


def test_no_list_of_duplicates_outlives_its_rows(
    redis_connection: Redis, worker: Redis, write_lines: Write
) -> None:
    """Duplicates of a row whose end was cut short are run themselves."""
    client = Client(redis_connection)
    options = BatchOptions(dedupe=True)
    rows = [{"prompt": "same", "temperature": 0}] * 3
    batch = client.submit(write_lines(*rows), model=MODEL, options=options).batch_id
    moves = Transitions(worker)
    [leader] = moves.pull(QUEUE, "w", 10, 60)
    with denied(redis_connection, "rpush"), suppress(ResponseError):
        moves.finish(QUEUE, "w", [ending(leader)])
    client.status(batch)
    moves.finish(QUEUE, "w", [ending(row) for row in moves.pull(QUEUE, "w", 10, 60)])
    assert client.wait(batch, timeout_seconds=10).is_done
    assert redis_connection.keys("batchkv:twins:*") == []


def test_what_is_left_of_duplicates_expires_with_the_batch(
    redis_connection: Redis, write_lines: Write
) -> None:
    """A leftover list of duplicates expires together with the batch's other keys."""
    client, moves = Client(redis_connection), Transitions(redis_connection)
    options = BatchOptions(dedupe=True, keep_seconds=3600)
    batch = client.submit(write_lines({"prompt": "a"}), model=MODEL, options=options).batch_id
    moves.finish(QUEUE, "w", [ending(row) for row in moves.pull(QUEUE, "w", 10, 60)])
    redis_connection.rpush(f"batchkv:twins:{batch}:1", "7")
    client.status(batch)
    assert 0 < redis_connection.ttl(f"batchkv:twins:{batch}:1") <= 3600
