"""Priorities, deadlines and duplicates on a worker, and what stock tools did behind its back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from batchkv_producer import Client
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions, Deadline
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.events import Event
from batchkv_worker.queue.maintenance import Maintenance
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.queue.runs.dispatch import must_yield, queued_first
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan, rows_of
from support.worker_harness import (
    MODEL,
    QUEUE,
    assert_reconciled,
    counts_of,
    num_ended,
    results_of,
    wait_until,
)
from worker.queue.test_rq_worker import make_worker, work

SLOW = FakePlan(step_seconds=0.002)
Submit = Callable[..., str]


@pytest.fixture
def submit(redis_connection: Redis, tmp_path: Path) -> Submit:
    """Queue prompts as the client does; the batch's id."""

    def queue(prompts: list[str], name: str = "b", temperature: float = 1, **options: Any) -> str:
        rows = [{"prompt": prompt, "temperature": temperature} for prompt in prompts]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
        return (
            Client(redis_connection)
            .submit(path, model=MODEL, options=BatchOptions(**options))
            .batch_id
        )

    return queue


def clean(connection: Redis, keeper: Maintenance | None = None) -> None:
    """One round of maintenance, whoever cleaned last."""
    connection.delete(redis_keys.maintenance_lock(QUEUE))
    assert (keeper or Maintenance(connection, QUEUE, "w")).run(30)


def rq_job(connection: Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


# -- priority -------------------------------------------------------------------------------------


def test_a_backlog_yields_to_what_is_more_urgent_only() -> None:
    """Ranks as lists: 0 is high. A backlog of high rows yields to nobody."""
    assert must_yield(1, (1, 0, 0)) and must_yield(2, (0, 1, 0)) and must_yield(2, (1, 0, 0))
    assert not must_yield(1, (0, 9, 9)) and not must_yield(0, (9, 9, 9))
    assert not must_yield(2, (0, 0, 9))
    assert [queued_first(x) for x in ((0, 2, 3), (1, 2, 3), (0, 0, 0))] == [2, 1, 0]


class Gated(FakeEngine):
    """Takes rows in, but ends none until its gate is open."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(*rows_of(settings), FakePlan(steps=2))
        self.gate = threading.Event()

    def step(self) -> list[Event]:
        if not self.gate.is_set():
            self.fill_slots()
            time.sleep(0.002)
            return []
        return super().step()


def gated_worker(connection: Redis, engines: list[Gated], **settings: Any) -> BatchWorker:
    """A worker whose engine is the first of ``engines`` once it works."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            engines.append(Gated(settings))
            return engines[0]

    return Worker([QUEUE], connection=connection, settings=WorkerSettings(model=MODEL, **settings))


def test_a_high_batch_does_not_wait_behind_a_backlog(
    redis_connection: Redis, submit: Submit
) -> None:
    """What has not started goes back to its place; the high rows run next; then the others, all
    in their order."""
    low = submit(["a", "b"], "l", priority="low")
    normal = submit([f"p{n:02}" for n in range(40)], "n")
    batches, engines = {"l": low, "n": normal}, list[Gated]()

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, normal)["running"] == 40)
        batches["h"] = submit([f"p{n}" for n in range(6)], "h", priority="high")
        wait_until(lambda: counts_of(redis_connection, normal)["running"] == 2)
        engines[0].gate.set()
        wait_until(lambda: num_ended(redis_connection, low) == 2)

    work(gated_worker(redis_connection, engines, slots=2, prefetch=0), act)
    for batch in batches.values():
        assert_reconciled(redis_connection, batch)
    names = {batch: name for name, batch in batches.items()}
    seen = [f"{names[job.split('-')[0]]}{job.split('-')[1]}" for job in engines[0].seen]
    expected = ["n1", "n2", *(f"h{n}" for n in range(1, 7))]
    assert seen == [*expected, *(f"n{n}" for n in range(3, 41)), "l1", "l2"]


def test_an_idle_worker_sees_every_priority(redis_connection: Redis, submit: Submit) -> None:
    """It waits at the normal list, and looks at the others when the wait is over."""

    def act() -> None:
        wait_until(lambda: redis_connection.hget(redis_keys.worker("w"), "state") == b"idle")
        for priority in ("low", "high"):
            batch = submit(["a"], priority, priority=priority)
            wait_until(lambda batch=batch: num_ended(redis_connection, batch) == 1)  # type: ignore[misc]

    work(make_worker(redis_connection, name="w"), act)


def test_a_stopping_worker_gives_high_rows_back(redis_connection: Redis, submit: Submit) -> None:
    """To the head of their own list, in their order."""
    batch = submit(["slow:100000"] * 6, priority="high")

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 6)

    work(make_worker(redis_connection, SLOW, slots=2, prefetch=0, drain_seconds=0), act)
    ids = [f"{batch}-{n}".encode() for n in range(1, 7)]
    assert redis_connection.lrange(redis_keys.waiting(QUEUE, "high"), 0, -1) == ids
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 0


# -- deadline -------------------------------------------------------------------------------------


def test_a_backlog_expires_and_what_decodes_is_finished(
    redis_connection: Redis, submit: Submit
) -> None:
    """The worker ends what it has not started by the deadline, without being told."""
    engines: list[Gated] = []
    worker = gated_worker(redis_connection, engines, slots=1, prefetch=0)
    batches: list[str] = []

    def act() -> None:
        wait_until(lambda: redis_connection.hget(worker.key, "state") == b"idle")
        batches.append(submit(["p"] * 6, expires=Deadline(in_seconds=3)))
        wait_until(lambda: num_ended(redis_connection, batches[0]) == 5)
        engines[0].gate.set()

    work(worker, act)
    [batch] = batches
    assert_reconciled(redis_connection, batch)
    rows = results_of(redis_connection, batch)
    errors = {line: row.error and row.error[0] for line, row in rows.items()}
    assert errors == {1: None, **dict.fromkeys(range(2, 7), "expired")}
    assert rows[2].custom_id == "line-2"


def test_maintenance_of_any_worker_ends_overdue_rows(
    redis_connection: Redis, submit: Submit
) -> None:
    """Also of batches that no client looks at; the entries leave the queue."""
    batch = submit(["a", "b"], expires=Deadline(in_seconds=60), priority="low")
    other = submit(["c"], "other", expires=Deadline(in_seconds=60))
    redis_connection.hset(redis_keys.batch(batch), "expires", 1)
    clean(redis_connection)
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["failed"] == 2
    assert counts_of(redis_connection, other)["failed"] == 0
    assert redis_connection.exists(redis_keys.waiting(QUEUE, "low")) == 0


# -- dedupe ---------------------------------------------------------------------------------------


def test_duplicates_on_a_worker(redis_connection: Redis, submit: Submit) -> None:
    """The engine sees one of them; each line has its answer."""
    engines: list[FakeEngine] = []

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            engines.append(FakeEngine(*rows_of(settings), FakePlan()))
            return engines[0]

    batch = submit(["same"] * 20 + ["other"], temperature=0, dedupe=True)
    work(Worker([QUEUE], connection=redis_connection, settings=WorkerSettings(model=MODEL)))
    assert_reconciled(redis_connection, batch)
    assert sorted(engines[0].seen) == [f"{batch}-1", f"{batch}-21"]
    rows = results_of(redis_connection, batch)
    assert {row.text for line, row in rows.items() if line < 21} == {"echo same"}
    assert {row.custom_id for row in rows.values()} == {f"line-{n}" for n in range(1, 22)}


def test_another_duplicate_runs_when_rq_stops_the_first(
    redis_connection: Redis, submit: Submit
) -> None:
    """``stop-job`` ends that row alone: the answer of the others comes from the next."""
    batch = submit(["slow:400"] * 3, temperature=0, dedupe=True)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 1)
        send_stop_job_command(redis_connection, f"{batch}-1", serializer=JSONSerializer)
        wait_until(lambda: num_ended(redis_connection, batch) == 3)

    work(make_worker(redis_connection, SLOW), act)
    assert_reconciled(redis_connection, batch)
    outcomes = {n: row.outcome for n, row in results_of(redis_connection, batch).items()}
    assert outcomes == {1: "canceled", 2: "ok", 3: "ok"}


# -- behind our back ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["maintenance", "client"])
def test_jobs_that_rq_deleted_get_their_row(
    redis_connection: Redis, submit: Submit, how: str
) -> None:
    """Waiting or running: an error row each, the sum right, and nobody waits for ever."""
    batch = submit(["a", "b", "c"])
    Transitions(redis_connection).pull(QUEUE, "w", 1, 60)
    for line in (1, 2):
        rq_job(redis_connection, f"{batch}-{line}").delete()
    client = Client(redis_connection)
    if how == "maintenance":
        clean(redis_connection)
    else:
        rest = Transitions(redis_connection).pull(QUEUE, "v", 5, 60)
        assert [row.lease.job_id for row in rest] == [f"{batch}-3"]
        client.cancel(f"{batch}-3")
        redis_connection.delete(redis_keys.registry("wip", QUEUE))  # the leases have run out
    status = client.status(batch)
    assert (status.failed, status.running) == (2, 0)
    assert status.num_results == status.num_ended
    rows = results_of(redis_connection, batch)
    assert [rows[n].error and rows[n].error[0] for n in (1, 2)] == ["lost", "lost"]
    assert "line 2" in str(rows[2].error)


def test_a_running_job_that_rq_deletes_is_dropped(redis_connection: Redis, submit: Submit) -> None:
    """The worker goes on with the others; the deleted row ends as lost."""
    batch = submit(["slow:100000", "slow:300"])

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 2)
        rq_job(redis_connection, f"{batch}-1").delete()
        wait_until(lambda: num_ended(redis_connection, batch) == 2)

    work(make_worker(redis_connection, SLOW, maintenance_seconds=1), act)
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 1


def test_a_queue_that_rq_emptied(redis_connection: Redis, submit: Submit) -> None:
    """``rq empty`` deletes the jobs: each row says so, in a file with blank lines too."""
    batch = submit(["a", "b"])
    Queue(QUEUE, connection=redis_connection, serializer=JSONSerializer).empty()
    assert Client(redis_connection).wait(batch, timeout_seconds=10).failed == 2
    assert_reconciled(redis_connection, batch)


def test_an_id_that_fell_out_of_its_list_waits_again(
    redis_connection: Redis, submit: Submit
) -> None:
    """The job is there, the entry is not: it is queued again and runs."""
    batch = submit(["a"], priority="high")
    redis_connection.delete(redis_keys.waiting(QUEUE, "high"))
    clean(redis_connection)
    assert redis_connection.llen(redis_keys.waiting(QUEUE, "high")) == 1
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 1


def test_fail_and_requeue_of_a_dashboard(redis_connection: Redis, submit: Submit) -> None:
    """A job that a stock tool failed and queued again is run once, and has one result."""
    batch = submit(["a", "b"])
    moves = Transitions(redis_connection)
    pulled = moves.pull(QUEUE, "dead", 2, 60)
    moves.give_back(QUEUE, [row.lease for row in pulled])
    queue = Queue(QUEUE, connection=redis_connection, serializer=JSONSerializer)
    job = rq_job(redis_connection, f"{batch}-1")
    job.set_status("failed")  # type: ignore[arg-type]
    queue.remove(job)
    FailedJobRegistry(queue=queue).add(job, ttl=600)
    FailedJobRegistry(queue=queue).requeue(job)
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 2


def test_lines_are_looked_at_while_others_keep_the_queue_full(
    redis_connection: Redis, submit: Submit
) -> None:
    """A deleted job is found although the queue never runs empty, batch after batch."""
    batches = [submit(["a", "b"], f"b{n}") for n in range(3)]
    for batch in batches:
        redis_connection.delete(redis_keys.job(f"{batch}-2"))
    keeper = Maintenance(redis_connection, QUEUE, "w")
    for _ in range(4):
        clean(redis_connection, keeper)
    assert [counts_of(redis_connection, batch)["failed"] for batch in batches] == [1, 1, 1]


def test_a_batch_that_somebody_wrote_into_stops_nobody(
    redis_connection: Redis, submit: Submit
) -> None:
    """Maintenance leaves an unreadable batch alone and looks after the others."""
    redis_connection.hset(redis_keys.batch("0" * 16), "total", "many")
    redis_connection.zadd(redis_keys.BATCHES, {"0" * 16: 9e9})
    batch = submit(["a"], expires=Deadline(in_seconds=60))
    redis_connection.hset(redis_keys.batch(batch), "expires", 1)
    clean(redis_connection)
    assert counts_of(redis_connection, batch)["failed"] == 1


def test_the_sum_is_right_at_any_moment(redis_connection: Redis, submit: Submit) -> None:
    """While a worker pulls and ends rows and a client cancels some: as many results as ends."""
    batch = submit([f"p{n}" for n in range(120)] * 3, temperature=0, dedupe=True)
    client = Client(redis_connection)
    seen = set[tuple[int, int]]()

    def act() -> None:
        for line in range(1, 361, 7):
            client.cancel(f"{batch}-{line}")
            status = client.status(batch)
            parts = (status.ok, status.failed, status.canceled, status.queued, status.running)
            assert min(parts) >= 0 and sum(parts) == status.total == 360
            assert status.num_results == status.num_ended
            seen.add((status.num_ended, status.running))
        wait_until(lambda: num_ended(redis_connection, batch) == 360)

    work(make_worker(redis_connection, FakePlan(step_seconds=0.01), slots=4, prefetch=2), act)
    assert len(seen) > 5
    assert_reconciled(redis_connection, batch)


# -- cancel ---------------------------------------------------------------------------------------


def test_cancel_frees_a_slot_before_the_next_step(redis_connection: Redis, submit: Submit) -> None:
    """``batchkv cancel`` of a running row: in the step after the order, the next has its slot."""
    log: list[str] = []

    class Engine(FakeEngine):
        def cancel(self, job_id: str) -> None:
            super().cancel(job_id)
            log.append("cancel")

        def step(self) -> list[Event]:
            events = super().step()
            log.append(",".join(row.work.job_id[-1] for row in self._decoding))
            return events

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return Engine(*rows_of(settings), SLOW)

    batch = submit(["slow:100000", "slow:50"])

    def act() -> None:
        wait_until(lambda: "1" in log)
        assert Client(redis_connection).cancel(f"{batch}-1") == 1
        wait_until(lambda: num_ended(redis_connection, batch) == 2)

    settings = WorkerSettings(model=MODEL, slots=1, prefetch=1)
    work(Worker([QUEUE], connection=redis_connection, settings=settings), act)
    assert_reconciled(redis_connection, batch)
    at = log.index("cancel")
    assert (log[at - 1], log[at + 1]) == ("1", "2")
