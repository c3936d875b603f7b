"""The client: status, results, waiting, cancelling, retrying, on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ConnectionError
from rq import Queue, Worker
from rq.serializers import JSONSerializer

import batchkv_producer
from batchkv_producer import BatchStatus, Client, Submitted, retry
from batchkv_producer.errors import NotFoundError, UsageError, WireError
from batchkv_producer.manage.cancel_retry import Unanswered
from batchkv_producer.results import stored_rows as stored
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.job import Result, decode_job, encode_result
from batchkv_producer.wire.transitions import JobResult, Pulled, Transitions
from support.redis_server import running_server

Write = Callable[..., Path]


class Desk:
    """A batch in the queue, and a worker that ends rows when it is told to."""

    def __init__(self, connection: Redis, path: Path, model: str = "demo") -> None:
        self.connection = connection
        self.client = Client(connection)
        self.moves = Transitions(connection)
        self.submitted: Submitted = self.client.submit(path, model=model)
        self.batch, self.queue = self.submitted.batch_id, self.submitted.queue

    def pull(self, count: int = 1000, worker: str = "w") -> list[Pulled]:
        return self.moves.pull(self.queue, worker, count, 60)

    def end(self, pulled: list[Pulled], outcome: str = "ok") -> None:
        endings = [
            JobResult(p.lease, outcome, self.result(p, outcome), 10, 5, 3, 7) for p in pulled
        ]
        self.moves.finish(self.queue, "w", endings)

    def result(self, pulled: Pulled, outcome: str) -> bytes:
        custom_id = decode_job(pulled.data).custom_id
        error = None if outcome == "ok" else ("engine_error", "it broke")
        return encode_result(
            Result(custom_id, "chat", outcome, text=f"to {custom_id}", error=error)  # type: ignore[arg-type]
        )

    def run(self, count: int = 1000, outcome: str = "ok") -> None:
        self.end(self.pull(count), outcome)

    def lines(self, **options: Any) -> list[int]:
        return [row.line for row in self.client.results(self.batch, **options)]

    def job_id(self, line: int) -> str:
        return redis_keys.job_id(self.batch, line)


@pytest.fixture
def desk(redis_connection: Redis, write_lines: Write) -> Desk:
    """Four prompts, queued in the order 2, 1, 4, 3, and a bad row on line 5."""
    prompts = [{"prompt": text, "custom_id": text} for text in ("b", "a", "d", "c")]
    return Desk(redis_connection, write_lines(*prompts, "{"))


@pytest.fixture
def gappy(redis_connection: Redis, write_lines: Write) -> Desk:
    """Two prompts and a bad row with blank lines between them: lines 2, 4 and 6."""
    return Desk(redis_connection, write_lines("", {"prompt": "a"}, "", {"prompt": "b"}, "", "{"))


def test_every_public_name_is_there() -> None:
    """The package imports each public name at its first use, and has no others."""
    assert all(getattr(batchkv_producer, name) for name in batchkv_producer.__all__)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        assert batchkv_producer.nothing_like_this


# ---- status ----


def test_status_adds_up(desk: Desk) -> None:
    """Every row is queued, running or ended; tokens and time are summed."""
    desk.run(1)
    desk.pull(1)
    status = desk.client.status(desk.batch)
    assert (status.total, status.queued, status.running) == (5, 2, 1)
    assert (status.ok, status.failed, status.canceled, status.num_ended) == (1, 1, 0, 2)
    tokens = (status.prompt_tokens, status.completion_tokens, status.cached_tokens)
    assert (tokens, status.busy_ms) == ((10, 5, 3), 7)
    assert (status.queue, status.model, status.is_done) == (desk.queue, "demo", False)
    assert abs(status.created - time.time()) < 60


def test_reconciliation(desk: Desk) -> None:
    """The line that sums up a batch, done and not done."""
    status = desk.client.status(desk.batch)
    assert status.reconciliation() == "5 = 0 ok + 1 failed + 0 canceled + 4 open"
    desk.run()
    assert desk.client.status(desk.batch).reconciliation() == "5 = 4 ok + 1 failed + 0 canceled"


def test_an_id_may_be_shortened(desk: Desk, write_lines: Write) -> None:
    """Six digits of an id are enough while they are unique."""
    assert desk.client.status(desk.batch[:6]).batch_id == desk.batch
    other = desk.batch[:6] + "0" * 10
    desk.connection.zadd(redis_keys.BATCHES, {other: 1})
    with pytest.raises(NotFoundError, match="could be any of"):
        desk.client.status(desk.batch[:6])
    assert desk.client.status(desk.batch).batch_id == desk.batch


@pytest.mark.parametrize("batch", ["0" * 16, "abcdef", "abc", "", "../../etc", "A" * 16, "-"])
def test_an_unknown_batch(client: Client, batch: str) -> None:
    """An id that is unknown, too short or no id at all is "not found"."""
    with pytest.raises(NotFoundError):
        client.status(batch)


def test_batches_are_listed_newest_first(desk: Desk, write_lines: Write) -> None:
    """All batches of the server; one whose hash is gone is left out."""
    newer = desk.client.submit(write_lines({"prompt": "z"}), model="other")
    desk.connection.zadd(redis_keys.BATCHES, {newer.batch_id: time.time() + 9, "f" * 16: 5})
    listed = [status.batch_id for status in desk.client.list_batches()]
    assert listed == [newer.batch_id, desk.batch]


def test_a_batch_that_is_not_ours(client: Client, redis_connection: Redis) -> None:
    """A hash that is no batch raises an error of its own."""
    redis_connection.hset(redis_keys.batch("a" * 16), mapping={"digest": "d", "total": "many"})
    with pytest.raises(WireError):
        client.status("a" * 16)


# ---- workers ----


def test_workers_that_live(desk: Desk) -> None:
    """A registered worker is listed with what it holds, until it dies or its record expires."""
    queue = Queue(desk.queue, connection=desk.connection, serializer=JSONSerializer)
    worker = Worker([queue], connection=desk.connection, name="mac-1", serializer=JSONSerializer)
    worker.register_birth()
    worker.set_state("busy")
    desk.pull(2, worker="mac-1")
    (info,) = desk.client.workers()
    assert (info.name, info.queues, info.state) == ("mac-1", (desk.queue,), "busy")
    assert (info.num_running, info.num_successful, info.num_failed) == (2, 0, 0)
    assert (info.pid, info.hostname) == (worker.pid, worker.hostname)
    assert abs(info.last_heartbeat - time.time()) < 60
    assert desk.client.status(desk.batch).num_workers == 1
    worker.register_death()
    assert desk.client.workers() == []
    assert desk.client.status(desk.batch).num_workers == 0


@pytest.mark.parametrize(
    ("record", "is_away"),
    [
        ({"bkv_seen": 20}, False),
        ({"bkv_seen": 33}, True),
        ({"bkv_seen": 33, "bkv_beat_ms": "60000"}, False),
        ({"bkv_seen": 4, "bkv_beat_ms": "500"}, True),
        ({"bkv_seen": -9}, False),
        ({"last_heartbeat": "2026-01-01T00:00:00.000000Z"}, True),
        ({"last_heartbeat": "yesterday"}, False),
        ({"last_heartbeat": "2026-01-01T00:00:00.000000Z", "bkv_seen": 1}, False),
    ],
)
def test_a_worker_that_missed_two_heartbeats(
    desk: Desk, record: dict[str, Any], is_away: bool
) -> None:
    """It is shown as asleep or away. The server's clock decides, because its own may be wrong."""
    key = redis_keys.worker("mac-1")
    fields = {"birth": "x", "queues": desk.queue, "state": "busy", **record}
    if "bkv_seen" in record:
        fields["bkv_seen"] = desk.connection.time()[0] - record["bkv_seen"]
    desk.connection.hset(key, mapping=fields)
    desk.connection.sadd("rq:workers", key)
    (info,) = desk.client.workers()
    assert info.is_away == is_away
    assert info.shown_state == ("asleep or away" if is_away else "busy")


def test_workers_that_were_killed(desk: Desk) -> None:
    """A worker whose record has expired is not counted, although RQ's sets still name it."""
    desk.connection.sadd(f"rq:workers:{desk.queue}", redis_keys.worker("ghost"))
    desk.connection.sadd("rq:workers", redis_keys.worker("ghost"))
    assert desk.client.workers() == []
    assert desk.client.status(desk.batch).num_workers == 0


def test_workers_of_other_queues(desk: Desk) -> None:
    """RQ's workers of other queues are not listed."""
    queue = Queue("default", connection=desk.connection, serializer=JSONSerializer)
    Worker([queue], connection=desk.connection, serializer=JSONSerializer).register_birth()
    assert desk.client.workers() == []


# ---- one job ----


def test_a_job_through_its_life(desk: Desk) -> None:
    """A job is queued, running, ok, and has the custom_id of its line."""
    job_id = desk.job_id(2)
    assert desk.client.job(job_id).status == "queued"
    pulled = desk.pull(1)
    running = desk.client.job(job_id)
    assert (running.status, running.worker, running.custom_id) == ("running", "w", "a")
    assert desk.client.result(job_id) is None
    desk.end(pulled)
    done = desk.client.job(job_id)
    assert (done.status, done.batch_id, done.line, done.custom_id) == ("ok", desk.batch, 2, "a")
    result = desk.client.result(job_id)
    assert result is not None and result.text == "to a"


def test_a_bad_row_is_a_job_too(desk: Desk) -> None:
    """A row that never was queued has a result like any other."""
    assert desk.client.job(desk.job_id(5)).status == "failed"
    result = desk.client.result(desk.job_id(5))
    assert result is not None and result.error is not None


@pytest.mark.parametrize("job_id", ["x", "0" * 16, "0" * 16 + "-0", "0" * 16 + "-1", "a-1\n"])
def test_an_unknown_job(desk: Desk, job_id: str) -> None:
    """A text that is no job id, or names no job, is "not found"."""
    for ask in (desk.client.job, desk.client.result, desk.client.cancel):
        with pytest.raises(NotFoundError):
            ask(job_id)


def test_waiting_for_a_result(desk: Desk) -> None:
    """``result`` waits for the given time, and returns as soon as the result is there."""
    assert desk.client.result(desk.job_id(2), wait_seconds=0.1) is None
    with later(desk.run):
        assert desk.client.result(desk.job_id(2), wait_seconds=30) is not None


class later:
    """Do something in a thread while the block runs."""

    def __init__(self, action: Callable[[], object], seconds: float = 0.15) -> None:
        self._timer = threading.Timer(seconds, action)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.join()


# ---- results ----


def test_results_in_finish_order(desk: Desk) -> None:
    """Rows come in the order in which they ended, with their place in it."""
    desk.run(2)
    rows = list(desk.client.results(desk.batch))
    assert [(row.line, row.position) for row in rows] == [(5, 0), (2, 1), (1, 2)]
    assert [row.job_id for row in rows] == [desk.job_id(line) for line in (5, 2, 1)]
    assert rows[1].result.custom_id == "a"
    assert desk.lines(after=2) == [1]
    assert desk.lines(after=3) == []


def test_results_in_input_order(desk: Desk) -> None:
    """Rows come by line. Rows that have not ended are left out."""
    desk.run(3)
    assert desk.lines(order="input") == [1, 2, 4, 5]
    assert {row.position for row in desk.client.results(desk.batch, order="input")} == {-1}


@pytest.mark.parametrize("page_rows", [1, 2, 3, 5, 200])
@pytest.mark.parametrize("order", ["finish", "input"])
def test_pages_are_seamless(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, page_rows: int, order: str
) -> None:
    """Each row comes once with any page size."""
    monkeypatch.setattr(stored, "PAGE_ROWS", page_rows)
    desk.run()
    for follow in (False, True):
        lines = desk.lines(order=order, follow=follow)
        assert lines == ([5, 2, 1, 4, 3] if order == "finish" else [1, 2, 3, 4, 5])


def test_a_retried_row_comes_once(desk: Desk) -> None:
    """A row that failed, was retried and ended again is in the order twice and comes once."""
    desk.run(1, "failed")
    desk.run(1)
    assert desk.client.retry(desk.batch) == 1
    assert desk.lines() == [5, 1]
    desk.run()
    rows = list(desk.client.results(desk.batch))
    assert sorted(row.line for row in rows) == [1, 2, 3, 4, 5]
    assert [row.result.outcome for row in rows if row.line == 2] == ["ok"]


@pytest.mark.parametrize("order", ["finish", "input"])
@pytest.mark.parametrize("has_expired", [False, True])
def test_a_batch_that_is_deleted_meanwhile_is_an_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, order: str, has_expired: bool
) -> None:
    """Results that are deleted, or expire, while they are read end with an error."""
    monkeypatch.setattr(stored, "PAGE_ROWS", 2)
    desk.run()
    results = desk.client.results(desk.batch, order=order)  # type: ignore[arg-type]
    next(results)
    if has_expired:
        names = (redis_keys.batch, redis_keys.results, redis_keys.done)
        desk.connection.delete(*(name(desk.batch) for name in names))
    else:
        desk.client.forget(desk.batch)
    with pytest.raises(NotFoundError, match="no longer kept" if has_expired else "no batch"):
        list(results)


def test_following_to_the_end(desk: Desk) -> None:
    """``follow`` gives rows as they end and stops with the batch."""
    results = desk.client.results(desk.batch, follow=True)
    assert next(results).line == 5
    desk.run(1)
    assert next(results).line == 2
    with later(desk.run):
        assert [row.line for row in results] == [1, 4, 3]


def test_following_in_input_order(desk: Desk) -> None:
    """In input order each line is waited for, although later ones have ended."""
    results = desk.client.results(desk.batch, order="input", follow=True)
    desk.end(desk.pull(4)[1:])  # line 1, 4 and 3; line 2 stays open
    assert next(results).line == 1
    with later(lambda: Client(desk.connection).cancel(desk.job_id(2))):
        rows = list(results)
    assert [row.line for row in rows] == [2, 3, 4, 5]
    assert rows[0].result.outcome == "canceled"


def test_blank_lines_are_no_rows(gappy: Desk) -> None:
    """Blank lines are never waited for, and have no ids."""
    assert list(gappy.client.job_ids(gappy.batch)) == [gappy.job_id(line) for line in (2, 4, 6)]
    with later(gappy.run):
        assert gappy.lines(order="input", follow=True) == [2, 4, 6]
    assert gappy.lines(follow=True) == [6, 2, 4]
    assert gappy.client.status(gappy.batch).is_done


def test_job_ids_in_input_order(desk: Desk) -> None:
    """The ids of all rows, by line."""
    assert list(desk.client.job_ids(desk.batch)) == [desk.job_id(line) for line in range(1, 6)]


def test_results_of_an_unknown_batch(client: Client) -> None:
    """Asking for results of nothing fails at once, not at the first row."""
    with pytest.raises(NotFoundError):
        client.results("0" * 16)


# ---- wait ----


def test_wait_until_done(desk: Desk) -> None:
    """Waiting reports each status and ends with the batch."""
    seen: list[BatchStatus] = []
    with later(desk.run):
        status = desk.client.wait(desk.batch, on_progress=seen.append)
    assert status.is_done and status.ok == 4
    assert not seen[0].is_done and seen[-1].is_done


def test_wait_no_longer_than_asked(desk: Desk) -> None:
    """When the time is over the last status is returned, done or not."""
    assert not desk.client.wait(desk.batch, timeout_seconds=0.3).is_done
    assert not desk.client.wait(desk.batch, timeout_seconds=0).is_done


def test_wait_and_follow_survive_a_restart(write_lines: Write) -> None:
    """A restart of the server with its data interrupts neither wait nor follow."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        desk = Desk(server.connect(), write_lines({"prompt": "a"}, {"prompt": "b"}))

        def restart_and_finish() -> None:
            server.stop()
            time.sleep(0.5)
            server.start()
            desk.run()

        with later(restart_and_finish):
            assert desk.client.wait(desk.batch).is_done
        results = desk.client.results(desk.batch, follow=True)
        server.stop()
        with later(server.start, seconds=0.3):
            assert [row.line for row in results] == [1, 2]


def test_retries_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are retried for a limited time during an outage, and never after a refused password."""
    monkeypatch.setattr(retry, "MAX_OUTAGE_SECONDS", 0.5)
    calls = []

    def fails() -> None:
        calls.append(1)
        raise ConnectionError("gone")

    def refused() -> None:
        calls.append(1)
        raise AuthenticationError("no")

    with pytest.raises(ConnectionError, match="gone"):
        retry.read_with_retry(fails)
    assert len(calls) > 1
    calls.clear()
    with pytest.raises(AuthenticationError):
        retry.read_with_retry(refused)
    assert len(calls) == 1


# ---- cancel ----


def test_cancel_a_batch(desk: Desk) -> None:
    """Ended rows stay, the others are canceled under their custom_ids, and the queue is empty."""
    desk.run(1)
    held = desk.pull(1)
    assert desk.client.cancel(desk.batch) == 3
    status = desk.client.status(desk.batch)
    assert (status.ok, status.failed, status.canceled, status.running) == (1, 1, 3, 0)
    assert status.is_done
    rows = {row.line: row.result for row in desk.client.results(desk.batch)}
    assert rows[3] == Result(
        "d",
        "completion",
        "canceled",
        model="demo",
        error=("canceled", "canceled before it was finished"),
        created=rows[3].created,
    )
    assert desk.connection.llen(redis_keys.queue(desk.queue)) == 0
    desk.end(held)
    assert desk.client.status(desk.batch) == status
    assert desk.client.cancel(desk.batch) == 0


def test_cancel_spares_other_batches(desk: Desk, write_lines: Write) -> None:
    """Jobs of another batch in the same queue stay where they are."""
    other = desk.client.submit(write_lines({"prompt": "z"}, {"prompt": "y"}), model="demo")
    assert desk.client.cancel(desk.batch[:8]) == 4
    assert len(desk.pull()) == other.num_jobs


def test_cancel_tells_the_worker(desk: Desk) -> None:
    """The worker that runs a canceled row gets RQ's stop command."""
    pubsub = desk.connection.pubsub()
    pubsub.subscribe("rq:pubsub:w")
    assert pubsub.get_message(timeout=5) is not None
    desk.pull(1)
    desk.client.cancel(desk.batch)
    message = pubsub.get_message(timeout=5)
    pubsub.close()
    assert message is not None
    expected = f'{{"command": "stop-job", "job_id": "{desk.job_id(2)}"}}'
    assert message["data"].decode() == expected


def test_cancel_one_job(desk: Desk) -> None:
    """One row is canceled, once; the others go on."""
    assert desk.client.cancel(desk.job_id(4)) == 1
    assert desk.client.cancel(desk.job_id(4)) == 0
    assert [decode_job(p.data).custom_id for p in desk.pull()] == ["a", "b", "d"]
    assert desk.client.job(desk.job_id(4)).status == "canceled"


def test_cancel_a_job_that_cannot_be_read(desk: Desk) -> None:
    """A job with unreadable data is canceled under the name of its line."""
    desk.connection.hset(redis_keys.job(desk.job_id(4)), "data", b"\x80pickle?")
    assert desk.client.cancel(desk.batch) == 4
    result = desk.client.result(desk.job_id(4))
    assert result is not None and result.custom_id == "line-4"


# ---- retry, reclaim ----


def test_retry_failed_rows_only(desk: Desk) -> None:
    """Failed rows run again; rows that are ok, and bad rows, do not."""
    desk.run(2, "failed")
    desk.run(1)
    desk.client.cancel(desk.job_id(3))
    assert desk.client.status(desk.batch).is_done
    assert desk.client.retry(desk.batch) == 2
    status = desk.client.status(desk.batch)
    assert (status.queued, status.failed, status.is_done) == (2, 1, False)
    desk.run()
    assert desk.client.status(desk.batch).reconciliation() == "5 = 3 ok + 1 failed + 1 canceled"
    assert desk.client.retry(desk.batch) == 0


def test_retry_of_canceled_rows(desk: Desk) -> None:
    """With the flag canceled rows run again, once, and the sum is right at every point."""
    desk.run(1, "failed")
    desk.pull(1)
    assert desk.client.cancel(desk.batch) == 3
    assert desk.client.unanswered(desk.batch) == Unanswered(failed=1, canceled=3, wrong=1)
    assert desk.client.retry(desk.batch, canceled=True) == 4
    assert desk.client.retry(desk.batch, canceled=True) == 0
    status = desk.client.status(desk.batch)
    assert (status.queued, status.failed, status.canceled) == (4, 1, 0)
    assert desk.connection.zcard(redis_keys.registry("canceled", desk.queue)) == 0
    desk.run()
    assert desk.client.status(desk.batch).reconciliation() == "5 = 4 ok + 1 failed + 0 canceled"


def test_retry_with_a_new_timeout(desk: Desk) -> None:
    """Rows keep their timeout when they are queued again, unless a new one is given."""
    desk.run(1, "failed")
    desk.client.retry(desk.batch)
    assert {p.timeout_seconds for p in desk.pull()} == {3600}
    desk.client.cancel(desk.batch)
    with pytest.raises(UsageError, match="at least 1 second"):
        desk.client.retry(desk.batch, job_timeout_seconds=0)
    assert desk.client.retry(desk.batch, canceled=True, job_timeout_seconds=77) == 4
    assert {p.timeout_seconds for p in desk.pull()} == {77}
    assert desk.client.status(desk.batch).job_timeout_seconds == 77


def test_rows_whose_job_is_gone_are_counted(desk: Desk) -> None:
    """A failed row whose job has expired cannot run again. It is counted apart from wrong rows."""
    desk.run(outcome="failed")
    desk.connection.delete(redis_keys.job(desk.job_id(3)))
    assert desk.client.unanswered(desk.batch) == Unanswered(failed=3, wrong=1, expired=1)
    assert desk.client.retry(desk.batch) == 3


def test_rows_that_would_fail_again_are_counted(desk: Desk) -> None:
    """A worker refused their lines, so another line helps. A retry queues them all the same."""
    error = (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
    result = encode_result(Result("r", "chat", "failed", error=error))
    moves = Transitions(desk.connection)
    moves.finish(desk.queue, "w", [JobResult(row.lease, "failed", result) for row in desk.pull(2)])
    desk.run(1, "failed")
    assert desk.client.unanswered(desk.batch) == Unanswered(failed=3, wrong=1, refused=2)
    assert desk.client.retry(desk.batch) == 3


def test_retry_of_many_rows(redis_connection: Redis, write_lines: Write) -> None:
    """More rows than a page go back in the order in which they failed."""
    desk = Desk(redis_connection, write_lines(*({"prompt": f"{n:04}"} for n in range(1, 1201))))
    desk.run(2000, "failed")
    assert desk.client.retry(desk.batch) == 1200
    lines = [int(p.lease.job_id.split("-")[1]) for p in desk.pull(2000)]
    assert lines == list(range(1, 1201))


def test_cancel_of_many_rows(redis_connection: Redis, write_lines: Write) -> None:
    """More rows than a page are canceled, and nothing is left in the queue."""
    desk = Desk(redis_connection, write_lines(*({"prompt": f"{n}"} for n in range(1200))))
    assert desk.client.cancel(desk.batch) == 1200
    assert desk.connection.llen(redis_keys.queue(desk.queue)) == 0
    assert desk.lines(order="input", follow=True) == list(range(1, 1201))


def test_reclaim_takes_back_a_dead_workers_jobs(desk: Desk) -> None:
    """A dead worker's jobs are queued again at once; those of a live one stay."""
    desk.pull(2, worker="dead")
    desk.pull(1, worker="alive")
    assert desk.client.reclaim(desk.queue, "dead") == 2
    assert desk.client.status(desk.batch).running == 1
    assert {decode_job(p.data).custom_id for p in desk.pull()} == {"a", "b", "d"}
    with pytest.raises(UsageError):
        desk.client.reclaim(desk.queue, "")


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poll often, so that the tests are quick."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.05)
    yield
