"""Rows whose jobs are gone: they keep their names, and the file they came from brings them back."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.errors import UsageError
from batchkv_producer.wire import redis_keys, row_facts
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Request, SamplingParams, decode_job, encode_job, encode_result
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.transitions import JobResult, Transitions
from support.redis_server import RedisServer

MODEL = "demo"
QUEUE = redis_keys.queue_name(MODEL)
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


class Desk:
    """One file, its batch, and a worker that does what it is told."""

    def __init__(self, connection: Redis, url: str, write: Write) -> None:
        self.connection, self.url, self.write = connection, url, write
        self.client, self.moves = Client(connection), Transitions(connection)
        rows: list[Any] = [{"custom_id": f"q{n}", "prompt": f"p{n}"} for n in range(1, 6)]
        self.source = write(*rows, "", "{broken", {"custom_id": "q8", "prompt": "p8"})

    def submit(self, **options: Any) -> str:
        return self.client.submit(self.source, model=MODEL, **options).batch_id

    def work(self, outcome: str = "ok", count: int = 100) -> list[str]:
        """End rows of the queue; what they asked."""
        pulled = self.moves.pull(QUEUE, "w", count, 60)
        endings, prompts = [], []
        for row in pulled:
            request = decode_job(row.data)
            prompts.append(request.prompt or "")
            error = None if outcome == "ok" else ("engine_error", "it broke")
            result = RowResult(request.custom_id, "completion", outcome, error=error)  # type: ignore[arg-type]
            endings.append(JobResult(row.lease, outcome, encode_result(result)))
        self.moves.finish(QUEUE, "w", endings)
        return prompts

    def delete_jobs(self, batch: str) -> None:
        """What a tool does, or RQ when failures are old."""
        self.connection.delete(*[f"rq:job:{batch}-{line}" for line in range(1, 9)])

    def rows(self, batch: str) -> dict[int, tuple[str, str]]:
        found = self.client.results(batch)
        return {r.line: (r.result.custom_id, (r.result.error or ("ok",))[0]) for r in found}

    def run(self, *arguments: object) -> Result:
        runner = CliRunner(env={"BATCHKV_REDIS_URL": self.url})
        return runner.invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def desk(redis_connection: Redis, redis_server: RedisServer, write_lines: Write) -> Desk:
    return Desk(redis_connection, redis_server.url, write_lines)


def test_a_lost_row_keeps_the_users_name(desk: Desk) -> None:
    """The error row of a row whose job was deleted carries the custom_id of its line."""
    batch = desk.submit()
    desk.connection.delete(*(f"rq:job:{batch}-{line}" for line in (2, 8)))
    desk.connection.lrem(redis_keys.queue(QUEUE), 0, f"{batch}-2")
    desk.connection.lrem(redis_keys.queue(QUEUE), 0, f"{batch}-8")
    desk.work()
    assert desk.client.status(batch).is_done
    rows = desk.rows(batch)
    assert (rows[2], rows[8]) == (("q2", "lost"), ("q8", "lost"))
    assert rows[7] == ("line-7", "invalid_json")


def test_names_and_digests_are_found_by_line_in_batches_of_many_chunks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the queue, each line's facts are its own; some bytes a row."""
    monkeypatch.setattr("batchkv_producer.order.planner.CHUNK_ROWS", 7)
    rows = [{"custom_id": f"name-{n:03}", "prompt": f"{n * 7919 % 100:03}"} for n in range(100)]
    batch = desk.client.submit(desk.write(*rows, name="many.jsonl"), model=MODEL).batch_id
    names = row_facts.custom_ids(desk.connection, batch, range(1, 103))
    assert names == {n + 1: f"name-{n:03}" for n in range(100)}
    found = dict((line, digest) for digest, line in row_facts.digests(desk.connection, batch))
    assert sorted(found) == list(range(1, 101)) and len(set(found.values())) == 100
    again = desk.write(*reversed(rows), name="again.jsonl")
    other = desk.client.submit(again, model=MODEL).batch_id
    back = dict(row_facts.digests(desk.connection, other))
    assert all(back[digest] == 101 - line for line, digest in found.items())


def test_retry_from_the_file_brings_back_rows_whose_jobs_are_gone(desk: Desk) -> None:
    """A plain retry names the command that helps, and that one queues them; all answers come."""
    batch = desk.submit(defaults=SamplingParams(max_tokens=9))
    desk.work("failed", 3)
    desk.work()
    desk.delete_jobs(batch)
    plain = desk.run("retry", batch)
    assert plain.exit_code == 0
    command = f"`batchkv retry {batch} --from FILE` queues them. FILE is the submitted file"
    gone = f"3 rows have no job in Redis any more: {command} (prompts.jsonl)"
    wrong = "1 row is wrong in the input: correct the file"
    assert f"no row was queued again. {gone}. {wrong}" in plain.stderr
    joined = desk.run("submit", desk.source, "-m", MODEL, "--max-tokens", 9)
    command = f"`batchkv retry {batch} --from {desk.source}` queues them again"
    assert f"3 rows of this batch failed before: {command}" in joined.stderr
    found = desk.run("retry", batch, "--from", desk.source)
    assert found.exit_code == 0
    assert found.stderr.startswith(f"batchkv: 3 rows were queued again. {wrong}\n")
    status = desk.client.status(batch)
    assert (status.queued, status.failed, status.ok) == (3, 1, 3)
    (row,) = desk.moves.pull(QUEUE, "w", 1, 60)
    assert decode_job(row.data).params.max_tokens == 9
    desk.moves.give_back(QUEUE, [row.lease])
    assert len(desk.work()) == 3
    names = {line: (f"q{line}", "ok") for line in (1, 2, 3, 4, 5, 8)}
    assert desk.rows(batch) == {**names, 7: ("line-7", "invalid_json")}
    assert desk.client.status(batch).is_done
    assert "no row has failed" not in desk.run("retry", batch, "--from", desk.source).stderr


def test_retry_never_says_that_no_row_has_failed_when_one_has(desk: Desk) -> None:
    """Rows whose jobs another tool canceled after they failed are told of, with what helps."""
    batch = desk.client.submit([{"prompt": "a"}], model=MODEL).batch_id
    desk.work("failed")
    desk.connection.hset(redis_keys.job(f"{batch}-1"), "status", "canceled")
    said = desk.run("retry", batch).stderr
    assert "1 row failed, but another tool changed" in said and f"`batchkv failed {batch}`" in said
    assert "no row has failed" not in said


def test_rows_that_a_program_gave_as_dicts_come_back_from_dicts(desk: Desk) -> None:
    """A batch of dicts has no file: `Client.retry` takes the same dicts again."""
    rows = [{"custom_id": f"r{number}", "prompt": f"p{number}"} for number in range(3)]
    batch = desk.client.submit(rows, model=MODEL).batch_id
    desk.work("failed")
    desk.delete_jobs(batch)
    assert desk.client.retry(batch) == 0
    assert desk.client.retry(batch, source=rows) == 3
    desk.work()
    assert desk.client.status(batch).ok == 3


def test_retry_from_the_file_queues_failed_rows_that_are_there_as_well(desk: Desk) -> None:
    """One command for all failed rows; each is queued once, canceled ones if that is asked for."""
    batch = desk.submit()
    desk.work("failed", 4)
    desk.client.cancel(batch)
    desk.connection.delete(*(f"rq:job:{batch}-{line}" for line in (1, 5)))
    there = [(2, b"other", 0)]  # a job that is there stays what it is
    assert desk.moves.restore(batch, QUEUE, "failed", there, {}, 60) == 0
    assert desk.client.retry(batch, source=desk.source) == 4
    assert desk.client.retry(batch, True, source=desk.source) == 2
    assert desk.client.retry(batch, True, source=desk.source) == 0
    assert sorted(desk.work()) == ["p1", "p2", "p3", "p4", "p5", "p8"]


def test_an_answer_is_not_taken_back_by_who_read_the_failures_before(desk: Desk) -> None:
    """Of two that bring the same row back, the slower one finds it answered, and lets it be."""
    batch = desk.submit()
    desk.work("failed")
    desk.delete_jobs(batch)
    job = (1, encode_job(Request("q1", "completion", prompt="p1")), 0)
    restore = partial(desk.moves.restore, batch, QUEUE, "failed", [job], {}, 60)
    assert restore() == 1
    desk.work()
    assert restore() == 0
    status = desk.client.status(batch)
    assert (status.ok, status.failed, status.queued) == (1, 6, 0)


@pytest.mark.parametrize("change", ["file", "flags"])
def test_another_file_or_other_flags_change_nothing(desk: Desk, change: str) -> None:
    """What is not the batch's own input is refused in a sentence."""
    batch = desk.submit(defaults=SamplingParams(max_tokens=9))
    desk.work("failed")
    desk.delete_jobs(batch)
    source = desk.write({"prompt": "p"}, name="o.jsonl") if change == "file" else desk.source
    defaults = SamplingParams(max_tokens=8) if change == "flags" else None
    with pytest.raises(UsageError, match=f"does not make batch {batch}:"):
        desk.client.retry(batch, source=source, defaults=defaults)
    assert desk.client.status(batch).failed == 7


def test_a_batch_of_a_version_that_kept_no_defaults_takes_them_as_flags(desk: Desk) -> None:
    """Without the flags of the submit the file is refused, with them its rows come back."""
    batch = desk.submit(defaults=SamplingParams(max_tokens=9))
    desk.work("failed")
    desk.delete_jobs(batch)
    desk.connection.hdel(redis_keys.batch(batch), "defaults")
    desk.connection.delete(redis_keys.rows(batch))
    assert desk.run("retry", batch, "--from", desk.source).exit_code == 2
    found = desk.run("retry", batch, "--from", desk.source, "--max-tokens", 9)
    assert found.exit_code == 0
    assert found.stderr.startswith("batchkv: 6 rows were queued again. 1 row is wrong")
    assert desk.run("retry", batch, "--max-tokens", 9).exit_code == 2


def test_duplicates_come_back_as_rows_of_their_own(desk: Desk) -> None:
    """In a batch with --dedupe a row that waited for another is run when both jobs are gone."""
    rows = [{"custom_id": name, "prompt": "same", "temperature": 0} for name in "abc"]
    source = desk.write(*rows, name="duplicates.jsonl")
    batch = desk.client.submit(source, model=MODEL, options=BatchOptions(dedupe=True)).batch_id
    desk.work("failed")
    desk.delete_jobs(batch)
    assert desk.client.retry(batch, source=source) == 3
    desk.work()
    assert desk.rows(batch) == {n: (name, "ok") for n, name in enumerate("abc", 1)}


def test_a_batch_that_is_about_to_expire_stays_when_rows_are_made_anew(desk: Desk) -> None:
    """--keep counts from the new end; the facts of the rows expire with the results."""
    batch = desk.submit(options=BatchOptions(keep_seconds=1000))
    desk.work("failed")
    assert desk.connection.ttl(redis_keys.rows(batch)) > 0
    desk.delete_jobs(batch)
    assert desk.client.retry(batch, source=desk.source) == 6
    keys = (redis_keys.rows(batch), redis_keys.batch(batch), redis_keys.results(batch))
    assert [desk.connection.ttl(key) for key in keys] == [-1, -1, -1]
