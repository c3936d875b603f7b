"""A batch is followed into OUT, while rows are retried and the server forgets them."""

from __future__ import annotations

import json
from pathlib import Path

from redis import Redis

from batchkv_producer.client import Client
from batchkv_producer.local.follow import Follower, stale_rows
from batchkv_producer.results import outfile
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Outcome, Result, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions

QUEUE = redis_keys.queue_name("m")


def submit(connection: Redis, folder: Path, num_rows: int) -> str:
    source = folder / "in.txt"
    source.write_text("".join(f"prompt {n}\n" for n in range(num_rows)), "utf-8")
    return Client(connection).submit(source, model="m").batch_id


def end_all(connection: Redis, outcome: Outcome, why: str = "") -> None:
    """End every queued row as a worker would."""
    moves = Transitions(connection)
    for row in moves.pull(QUEUE, "w", 100, 60):
        error = ("engine_error", why) if outcome == "failed" else None
        result = Result("c", "completion", outcome, "m", text="fine", error=error)
        moves.finish(QUEUE, "w", [JobResult(row.lease, outcome, encode_result(result))])


def messages(path: Path) -> list[str]:
    return [json.loads(line)["error"]["message"] for line in path.read_text("utf-8").splitlines()]


def test_a_row_that_fails_anew_has_the_new_reason(redis_connection: Redis, tmp_path: Path) -> None:
    """A failed row that was retried and failed with another error has its last line, once."""
    batch_id, out = submit(redis_connection, tmp_path, 3), tmp_path / "out"
    errors, client = outfile.errors_path(out), Client(redis_connection)
    stale = stale_rows(Client(redis_connection), batch_id)
    with outfile.open_results(out, batch_id, stale) as target:
        follower = Follower(client, batch_id, target)
        for why in ("first", "second"):
            end_all(redis_connection, "failed", why)
            follower.collect()
            client.retry(batch_id) if why == "first" else None
        follower.refresh(stale)
    assert messages(errors) == ["second"] * 3


def test_a_queued_row_keeps_its_old_line(redis_connection: Redis, tmp_path: Path) -> None:
    """Between a retry and its end a row keeps its line in the errors file, and counts as not
    ended."""
    batch_id, out = submit(redis_connection, tmp_path, 2), tmp_path / "out"
    errors, client = outfile.errors_path(out), Client(redis_connection)
    stale = stale_rows(Client(redis_connection), batch_id)
    end_all(redis_connection, "failed", "first")
    for num_failed in (2, 0):
        with outfile.open_results(out, batch_id, stale) as target:
            Follower(client, batch_id, target).collect()
            assert target.num_rows == num_failed
        assert messages(errors) == ["first", "first"]
        client.retry(batch_id)
    end_all(redis_connection, "ok")
    with outfile.open_results(out, batch_id, stale) as target:
        Follower(client, batch_id, target).collect()
    assert out.read_bytes().count(b"\n") == 2 and not errors.exists()
