"""The worker between a real server and a fake engine: what it takes, ends, gives back, refuses.

Tests that run ``worker.work()`` in this process let a second thread act meanwhile; those of kills
and signals (``test_worker_faults``) start real processes.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend
from rq.worker import BaseWorker

import batchkv_worker
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, encode_job
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.errors import EXIT_ENGINE_DIED
from batchkv_worker.events import Work
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.queue.session import Session
from batchkv_worker.queue.startup import default_name
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan, prompt_of, rows_of
from support.redis_server import RedisServer
from support.worker_harness import (
    MODEL,
    QUEUE,
    assert_reconciled,
    counts_of,
    num_ended,
    results_of,
    submit,
    wait_until,
)

PACKAGE = Path(batchkv_worker.__file__).parent


def make_worker(
    connection: Redis, plan: FakePlan | None = None, name: str | None = None, **settings: Any
) -> BatchWorker:
    """A worker on a fake engine."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return FakeEngine(*rows_of(settings), plan or FakePlan())

    chosen = WorkerSettings(model=MODEL, **settings)
    return Worker([QUEUE], name, connection=connection, settings=chosen)


def work(worker: BatchWorker, action: Callable[[], None] | None = None, **limits: Any) -> bool:
    """``worker.work()`` here, ``action`` in a thread; when that ends, the worker is stopped."""
    failures: list[BaseException] = []

    def act() -> None:
        try:
            assert action is not None
            action()
        except BaseException as failure:  # noqa: BLE001 - it is raised in the test's thread
            failures.append(failure)
        finally:
            wait_until(lambda: worker._stop is not None)
            worker.request_stop(15, None)

    thread = threading.Thread(target=act) if action else None
    if thread:
        thread.start()
    worked = worker.work(burst=action is None, logging_level="INFO", **limits)
    if thread:
        thread.join()
    if failures:
        raise failures[0]
    return worked


def rq_job(connection: Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


# -- the normal course ----------------------------------------------------------------------------


def test_a_batch_ends_and_reconciles(redis_connection: Redis) -> None:
    """Every row ends once, with its own answer, and RQ's record says finished."""
    batch = submit(redis_connection, [f"p{i}" for i in range(150)])
    assert work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    results = results_of(redis_connection, batch)
    assert all(results[line].text == f"echo p{line - 1}" for line in results)
    assert rq_job(redis_connection, f"{batch}-7").get_status() == "finished"


def test_an_empty_queue_ends_a_burst(redis_connection: Redis) -> None:
    """Burst with nothing to do says that nothing was done."""
    assert not work(make_worker(redis_connection))


def test_the_rows_of_one_group_do_not_wait_for_each_other(redis_connection: Redis) -> None:
    """A short row's result is there while the long ones of its group still decode."""
    prompts = ["slow:100000"] + [f"p{i}" for i in range(10)]
    batch = submit(redis_connection, prompts)
    worker = make_worker(redis_connection, FakePlan(step_seconds=0.002), drain_seconds=0)
    work(worker, lambda: wait_until(lambda: num_ended(redis_connection, batch) == 10))
    assert counts_of(redis_connection, batch)["running"] == 0


def test_a_job_for_an_idle_worker_is_done_at_once(redis_connection: Redis) -> None:
    """From queue to result takes well under the second that an idle worker waits."""
    times = []

    def act() -> None:
        time.sleep(0.3)
        for round_number in range(5):
            batch = submit(redis_connection, ["p"], name=f"round {round_number}")
            begun = time.monotonic()
            wait_until(lambda batch=batch: num_ended(redis_connection, batch) == 1)
            times.append(time.monotonic() - begun)

    work(make_worker(redis_connection), act)
    assert sorted(times)[2] < 0.1


def test_an_idle_worker_does_not_spin(redis_connection: Redis) -> None:
    """Waiting costs next to no processor time, with an empty queue as with a suspended one."""

    def act() -> None:
        time.sleep(0.5)
        begun = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begun < 0.25
        submit(redis_connection, ["p"])
        suspend(redis_connection)
        time.sleep(1.2)
        begun = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begun < 0.25

    work(make_worker(redis_connection), act)


def test_max_jobs_counts_jobs(redis_connection: Redis) -> None:
    """Not sessions, not groups: exactly so many jobs are taken, the rest stay queued."""
    batch = submit(redis_connection, [f"p{i}" for i in range(100)])
    worker = make_worker(redis_connection)
    worker.work(max_jobs=45, logging_level="INFO")
    assert counts_of(redis_connection, batch)["ok"] == 45
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 55


def test_max_idle_time_ends_an_idle_worker(redis_connection: Redis) -> None:
    """A worker that found nothing for so many seconds ends by itself."""
    submit(redis_connection, ["p"])
    begun = time.monotonic()
    assert make_worker(redis_connection).work(max_idle_time=1, logging_level="INFO")
    assert 1 <= time.monotonic() - begun < 30


# -- rows that fail -------------------------------------------------------------------------------


def test_what_the_engine_rejects_is_a_failed_row(redis_connection: Redis) -> None:
    """One bad row never stops the others."""
    batch = submit(redis_connection, ["a", "reject:context_length_exceeded", "b"])
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    assert results_of(redis_connection, batch)[2].error == (
        "context_length_exceeded",
        "rejected as asked",
    )


def test_a_row_past_its_timeout_fails_and_frees_its_slot(redis_connection: Redis) -> None:
    """The job's own timeout ends it with the code timeout; the row behind it gets the slot."""
    batch = submit(redis_connection, ["slow:100000", "quick"], timeout_seconds=2)
    plan = FakePlan(step_seconds=0.002)
    work(make_worker(redis_connection, plan, slots=1, prefetch=0))
    assert_reconciled(redis_connection, batch)
    results = results_of(redis_connection, batch)
    assert results[1].error == ("timeout", "not done in 2 s")
    assert results[2].outcome == "ok"


def test_nothing_that_a_job_names_is_called(redis_connection: Redis, tmp_path: Path) -> None:
    """A foreign function, a pickle, garbage: each is a failed row, and nothing runs."""
    mark = tmp_path / "mark"
    payloads = {
        "call": zlib.compress(json.dumps(["os.mkdir", None, [str(mark)], {}]).encode()),
        "pickle": zlib.compress(b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR."),
        "garbage": b"\x00\x01",
        "empty": b"",
        "good": encode_job(Request(custom_id="c5", endpoint="completion", prompt="good")),
    }
    batch = submit(redis_connection, list(payloads), data=payloads.__getitem__)
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    results = results_of(redis_connection, batch)
    assert [row.outcome for _, row in sorted(results.items())] == ["failed"] * 4 + ["ok"]
    assert {results[line].error[0] for line in range(1, 5)} == {"invalid_request"}  # type: ignore[index]
    assert not mark.exists()


def test_a_stock_rq_job_in_our_queue_is_failed_unexecuted(
    redis_connection: Redis, tmp_path: Path
) -> None:
    """Whatever RQ's default serializer wrote is neither read nor run, and blocks nobody."""
    mark = tmp_path / "mark"
    stock = Queue(QUEUE, connection=redis_connection).enqueue("os.mkdir", str(mark))
    batch = submit(redis_connection, ["p"])
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    assert redis_connection.hget(f"rq:job:{stock.id}", "status") == b"failed"
    assert not mark.exists()


# -- commands -------------------------------------------------------------------------------------


def test_stop_job_cancels_any_job_in_flight(redis_connection: Redis) -> None:
    """RQ's stop-job ends that row as canceled, at once, and no other."""
    batch = submit(redis_connection, ["slow:100000", "slow:100000"])

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 2)
        begun = time.monotonic()
        send_stop_job_command(redis_connection, f"{batch}-2", serializer=JSONSerializer)
        wait_until(lambda: num_ended(redis_connection, batch) == 1)
        assert time.monotonic() - begun < 10

    work(make_worker(redis_connection, FakePlan(step_seconds=0.002), drain_seconds=0), act)
    assert results_of(redis_connection, batch)[2].outcome == "canceled"
    assert counts_of(redis_connection, batch) == {
        **{"total": 2, "ok": 0, "failed": 0, "canceled": 1, "running": 0}
    }


def test_a_cancel_without_a_command_is_noticed(redis_connection: Redis) -> None:
    """A row settled by the client loses its slot within the poll of a second or so."""
    batch = submit(redis_connection, ["slow:100000", "quick"])

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 2)
        row = results_blob()
        Transitions(redis_connection).settle(QUEUE, "canceled", [(f"{batch}-1", row)])
        wait_until(lambda: num_ended(redis_connection, batch) == 2)

    worker = make_worker(redis_connection, FakePlan(step_seconds=0.002), slots=1, prefetch=0)
    work(worker, act)
    assert_reconciled(redis_connection, batch)


def results_blob() -> bytes:
    """A canceled result as the client writes it."""
    from batchkv_producer.wire.job import Result, encode_result

    return encode_result(Result(custom_id="c1", endpoint="completion", outcome="canceled"))


def test_rqs_shutdown_command_is_a_warm_stop(redis_connection: Redis) -> None:
    """What decodes is finished, then the worker ends."""
    batch = submit(redis_connection, ["slow:200"])
    worker = make_worker(redis_connection, FakePlan(step_seconds=0.002))

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 1)
        send_shutdown_command(redis_connection, worker.name)
        wait_until(lambda: num_ended(redis_connection, batch) == 1)

    work(worker, act)
    assert_reconciled(redis_connection, batch)


@pytest.mark.parametrize("payload", [b"nonsense", b"[1]", b"{}", b'{"command": "kill-horse"}'])
def test_a_strange_command_does_nothing(redis_connection: Redis, payload: bytes) -> None:
    """Whatever is published on the worker's channel, it goes on."""
    worker = make_worker(redis_connection)
    worker.handle_payload({"data": payload})
    batch = submit(redis_connection, ["p"])
    work(worker)
    assert_reconciled(redis_connection, batch)


def test_a_suspended_worker_takes_nothing(redis_connection: Redis) -> None:
    """Between ``rq suspend`` and ``rq resume`` nothing new is taken; RQ's tools see the state."""
    suspend(redis_connection)
    batch = submit(redis_connection, ["p"])
    worker = make_worker(redis_connection)

    def act() -> None:
        wait_until(lambda: redis_connection.hget(worker.key, "state") == b"suspended")
        time.sleep(0.3)
        assert redis_connection.llen(redis_keys.queue(QUEUE)) == 1
        resume(redis_connection)
        wait_until(lambda: num_ended(redis_connection, batch) == 1)

    work(worker, act)


# -- what RQ's tools see --------------------------------------------------------------------------


def test_rqs_tools_see_the_truth(redis_connection: Redis) -> None:
    """State, count of executing jobs, worker of a job; never a current job, which would be read
    with pickle."""
    batch = submit(redis_connection, ["slow:100000"] * 5)
    worker = make_worker(redis_connection, FakePlan(step_seconds=0.002), drain_seconds=0)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 5)
        wait_until(lambda: redis_connection.hget(worker.key, "state") == b"busy")
        queue = Queue(QUEUE, connection=redis_connection, serializer=JSONSerializer)
        [seen] = BatchWorker.all(queue=queue)
        assert (seen.name, seen.get_state()) == (worker.name, "busy")
        assert queue.started_job_registry.count == 5
        assert rq_job(redis_connection, f"{batch}-1").worker_name == worker.name
        assert not redis_connection.hexists(worker.key, "current_job")

    work(worker, act)
    assert redis_connection.hexists(worker.key, "death")
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 5


def test_jobs_are_counted_for_rq(redis_connection: Redis) -> None:
    """RQ's counters of the worker are the rows that ended well and badly."""
    submit(redis_connection, ["a", "b", "reject:invalid_request"])
    worker = make_worker(redis_connection)
    work(worker)
    counts = redis_connection.hmget(worker.key, "successful_job_count", "failed_job_count")
    assert counts == [b"2", b"1"]


def test_a_lost_record_is_written_again(redis_connection: Redis) -> None:
    """A worker that the server forgot registers again with its next heartbeat."""
    worker = make_worker(redis_connection, lease_seconds=2, heartbeat_seconds=0.2)

    def act() -> None:
        wait_until(lambda: redis_connection.hget(worker.key, "state") == b"idle")
        redis_connection.delete(worker.key, "rq:workers", f"rq:workers:{QUEUE}")
        wait_until(lambda: redis_connection.hget(worker.key, "state") == b"idle")
        assert redis_connection.sismember("rq:workers", worker.key)
        assert redis_connection.ttl(worker.key) > 0

    work(worker, act)


def test_rqs_tools_may_load_the_class_without_settings(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With RQ_WORKER_CLASS set, ``rq info`` makes workers only to look at them: no model needed."""
    monkeypatch.delenv("BATCHKV_MODEL", raising=False)
    worker = make_worker(redis_connection, name="seen")
    worker.register_birth()
    found = BatchWorker.find_by_key(worker.key, connection=redis_connection)
    assert found is not None
    assert found.name == "seen"
    assert found.queue_names() == [QUEUE]


def test_names_differ_after_a_restart() -> None:
    """The default name has the host and a random suffix that RQ's keys can hold."""
    first, second = default_name(), default_name()
    assert first != second
    assert re.fullmatch(r"[A-Za-z0-9_.-]+-[0-9a-f]{8}", first)


# -- an unwell server -----------------------------------------------------------------------------


def test_a_read_only_server_is_waited_for(
    redis_server: RedisServer, redis_connection: Redis
) -> None:
    """A server that takes no writes for a while costs no row and no result."""
    batch = submit(redis_connection, ["slow:100"] * 20)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 20)
        redis_connection.replicaof("127.0.0.1", "1")
        time.sleep(0.8)
        redis_connection.replicaof("NO", "ONE")
        wait_until(lambda: num_ended(redis_connection, batch) == 20)

    try:
        work(make_worker(redis_connection, FakePlan(step_seconds=0.002)), act)
    finally:
        redis_connection.replicaof("NO", "ONE")
    assert_reconciled(redis_connection, batch)


def test_a_full_server_finishes_what_it_holds(redis_connection: Redis) -> None:
    """At its memory limit nothing is lost: scripts begin with a write that frees."""
    batch = submit(redis_connection, ["slow:100"] * 20)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 20)
        redis_connection.config_set("maxmemory", "1mb")
        time.sleep(0.5)
        redis_connection.config_set("maxmemory", "0")
        wait_until(lambda: num_ended(redis_connection, batch) == 20)

    try:
        work(make_worker(redis_connection, FakePlan(step_seconds=0.002)), act)
    finally:
        redis_connection.config_set("maxmemory", "0")
    assert_reconciled(redis_connection, batch)


# -- the package ----------------------------------------------------------------------------------


def test_the_worker_knows_no_pickle() -> None:
    """No module of the installed worker names pickle, marshal, eval or job.perform."""
    forbidden = re.compile(
        r"\b(import|from) (pickle|marshal|shelve|dill)\b|(?<![.\w])(eval|exec)\(|\.perform\("
    )
    for path in PACKAGE.rglob("*.py"):
        assert not forbidden.search(path.read_text("utf-8")), path


def test_importing_the_package_is_cheap() -> None:
    """Neither MLX nor RQ is imported by the package; the class brings RQ but still no MLX."""
    code = (
        "import sys, batchkv_worker; a = set(sys.modules); batchkv_worker.BatchWorker;"
        "b = set(sys.modules); print('rq' in a, 'mlx' in b, 'mlx_lm' in b, 'pickle' in a)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["False", "False", "False", "False"]


def test_what_we_use_of_rq_is_there() -> None:
    """The names of RQ 2.12 that BatchWorker overrides or calls, with their parameters: RQ calls
    some of them private, so its version is pinned and this test reads it."""
    overridden = {
        "_set_connection": ["connection"],
        "_pubsub_exception_handler": ["exc", "pubsub", "pubsub_thread"],
        "_start_scheduler": ["burst", "logging_level", "date_format", "log_format"],
        "request_stop": ["signum", "frame"],
        "request_force_stop": ["signum", "frame"],
        "handle_payload": ["message"],
        "unsubscribe": [],
        "teardown": [],
        "_install_signal_handlers": [],
        "bootstrap": ["logging_level", "date_format", "log_format"],
        "set_state": ["state", "pipeline"],
        "serialize": [],
        "register_birth": [],
    }
    for name, parameters in overridden.items():
        found = list(inspect.signature(getattr(BaseWorker, name)).parameters)[1:]
        assert found == parameters, name
    ours = inspect.signature(BatchWorker.work).parameters
    assert set(inspect.signature(BaseWorker.work).parameters) <= set(ours)
    source = inspect.getsource(BaseWorker)
    for attribute in ("pubsub_thread", "pubsub", "worker_ttl", "last_heartbeat", "connection"):
        assert f"self.{attribute}" in source


class Busy(FakeEngine):
    """Prepares rows ahead; a prompt "long" takes until ``gate`` is set, and sets ``begun``."""

    prepares_ahead = True
    gate, begun = threading.Event(), threading.Event()

    def prepare(self, work: Work) -> Callable[[], None]:
        if prompt_of(work) == "long":
            self.begun.set()
            assert self.gate.wait(20)
        return lambda: self.add(work)


@pytest.fixture
def busy_worker(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[BatchWorker, list[int]]]:
    """A worker whose engine is ``Busy``, and the codes with which it would have ended at once."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return Busy(*rows_of(settings), FakePlan())

    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    Busy.gate.clear()
    Busy.begun.clear()
    settings = WorkerSettings(model=MODEL)
    yield Worker([QUEUE], None, connection=redis_connection, settings=settings), codes
    Busy.gate.set()


def test_an_engine_that_died_beside_a_long_prompt_keeps_its_exit_code(
    redis_connection: Redis, busy_worker: tuple[BatchWorker, list[int]]
) -> None:
    """The process ends at once, because native code must not run at the interpreter's end. Whoever
    started it learns why all the same."""
    worker, codes = busy_worker
    submit(redis_connection, ["crash", "long"])
    with pytest.raises(SystemExit) as ended:
        work(worker)
    assert codes == [ended.value.code] == [EXIT_ENGINE_DIED]


def test_an_error_beside_a_long_prompt_is_no_success(
    redis_connection: Redis,
    busy_worker: tuple[BatchWorker, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process ends at once with code 1, as the interpreter would, and says which error it was.

    It ended with 0, and without a word.
    """

    def check_engine(session: Session) -> None:
        if Busy.begun.is_set():
            raise LookupError("of the main thread")

    monkeypatch.setattr(Session, "_check_engine", check_engine)
    worker, codes = busy_worker
    submit(redis_connection, ["long"])
    with pytest.raises(LookupError):
        work(worker)
    assert codes == [1]
    assert "LookupError: of the main thread" in capsys.readouterr().err
