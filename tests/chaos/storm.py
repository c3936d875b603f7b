"""Worker processes and their server under random faults, and what must hold meanwhile and after.

Workers are started again when they end, as launchd would. Rows come in chunks as the faults go on,
so that there is work to the last of them. Two threads clean RQ's registries all the time, as
dashboards do, and the books are looked at again and again.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.serializers import JSONSerializer

from batchkv_producer.wire import redis_keys
from chaos.faults import Fault, write_log
from chaos.rows import Rows, Work
from support.redis_server import RedisServer, running_server
from support.worker_harness import (
    FAKE_CLASS,
    QUEUE,
    QUICK_LEASES,
    WorkerProcess,
    wait_until,
)

AOF = ("--appendonly", "yes", "--appendfsync", "everysec")
WORK_SECONDS = 8.0
READY = "the engine is ready"
LOST_SECONDS = 3.0  # a line that is nowhere for so long is lost, not between two steps of a tool


@dataclass(frozen=True, slots=True)
class Crew:
    """How workers are started: how many, with which class, settings and plan of the fake engine."""

    number: int = 4
    settings: dict[str, object] = field(default_factory=dict)
    plan: dict[str, object] = field(default_factory=dict)
    worker_class: str = FAKE_CLASS
    spares_starters: bool = False  # a worker is killed only once it works


@dataclass(slots=True)
class Report:
    """What a storm came to."""

    faults: dict[str, int] = field(default_factory=dict)
    num_started: int = 0
    num_audits: int = 0
    num_resubmitted: int = 0
    num_failed: int = 0
    deaths: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


class Storm:
    """One batch, its workers and its server, from the first fault to the last check."""

    def __init__(
        self, folder: Path, work: Work, faults: Sequence[Fault], crew: Crew, chunk_rows: int = 500
    ) -> None:
        self._folder = folder
        self._rows = Rows(work, str(folder), chunk_rows)
        self._faults = list(faults)
        self._crew = crew
        self._workers: list[WorkerProcess] = []
        self._num_ready: dict[int, int] = {}  # how often a worker's log had said so before
        self._frozen: dict[int, float] = {}  # worker number -> monotonic second of its waking
        self._down_until: float | None = None
        self._is_over = threading.Event()
        self._complaints: list[str] = []
        self._missing: dict[bytes, float] = {}
        self.happened: list[tuple[float, Fault]] = []
        self.report = Report()

    def run(self, deadline_seconds: float) -> Report:
        """The whole of it; AssertionError says what did not hold."""
        begun = time.monotonic()
        (self._folder / "temp").mkdir()
        with ExitStack() as stack:
            self._server = stack.enter_context(running_server(*AOF))
            stack.callback(self._end_workers)
            self._submit_to(1)
            self._workers = [self._start(number) for number in range(self._crew.number)]
            helpers = [self._clean, self._clean, self._look]
            threads = [threading.Thread(target=helper) for helper in helpers]
            stack.callback(lambda: [thread.join() for thread in threads])
            stack.callback(self._is_over.set)
            for thread in threads:
                thread.start()
            try:
                self._blow(begun)
                self._calm(begun + deadline_seconds)
            finally:
                write_log(self._folder / "faults.jsonl", self.happened)
            self._is_over.set()
            for thread in threads:
                thread.join()
            assert not self._complaints, "\n".join(self._complaints)
            self._stop_workers()
            ends = self._rows.check(self._server.connect())
            self.report.num_failed, self.report.deaths = ends.num_failed, dict(ends.deaths)
            self.report.num_resubmitted = self._rows.num_resubmitted
            # MLX keeps the kernels that it compiles for a CPU there.
            assert {path.name for path in (self._folder / "temp").iterdir()} <= {"mlx"}
        self.report.seconds = time.monotonic() - begun
        return self.report

    # -- faults -------------------------------------------------------------------------------

    def _blow(self, begun: float) -> None:
        for index, fault in enumerate(self._faults):
            self._tend(time.monotonic() + fault.after)
            self.happened.append((time.monotonic() - begun, fault))
            self.report.faults[fault.kind] = self.report.faults.get(fault.kind, 0) + 1
            getattr(self, f"_{fault.kind}")(fault)
            self._submit_to(1 + int((index + 1) / len(self._faults) * self._rows.num_chunks))
            assert not self._complaints, "\n".join(self._complaints)

    def _kill(self, fault: Fault) -> None:
        self._wait_for_work(fault.worker)
        self._workers[fault.worker].end()
        self._frozen.pop(fault.worker, None)

    def _wait_for_work(self, number: int) -> None:
        """A death is of interest when somebody holds something; seldom long, and never for ever."""
        deadline = time.monotonic() + WORK_SECONDS
        while time.monotonic() < deadline:
            is_ready = not self._crew.spares_starters or self._is_ready(number)
            with suppress(RedisError), self._server.connect() as connection:
                if is_ready and connection.zcard(redis_keys.registry("wip", QUEUE)):
                    return
                if not connection.exists(redis_keys.queue(QUEUE)):
                    self._submit_to(self._rows.num_due + 1)  # they are quicker than the faults
            self._tend(time.monotonic() + 0.05)

    def _is_ready(self, number: int) -> bool:
        return self._workers[number].said.count(READY) > self._num_ready[number]

    def _freeze(self, fault: Fault) -> None:
        self._wait_for_work(fault.worker)
        if fault.worker not in self._frozen:
            self._workers[fault.worker].process.send_signal(signal.SIGSTOP)
            self._frozen[fault.worker] = time.monotonic() + fault.seconds

    def _server_kill(self, fault: Fault, end: Callable[[RedisServer], None] | None = None) -> None:
        if self._down_until is None:
            (end or RedisServer.kill)(self._server)
            self._down_until = time.monotonic() + fault.seconds

    def _server_stop(self, fault: Fault) -> None:
        self._server_kill(fault, RedisServer.stop)

    def _info(self, fault: Fault) -> None:
        command = [sys.executable, "-m", "rq.cli", "info", "-u", self._server.url]
        subprocess.run(command, capture_output=True, timeout=30)  # the server may be away

    def _tend(self, until: float) -> None:
        """Until then: wake who has slept enough, start what has ended."""
        while True:
            now = time.monotonic()
            if self._down_until is not None and now >= self._down_until:
                self._server.start()
                self._down_until = None
            for number in [number for number, at in self._frozen.items() if now >= at]:
                self._workers[number].process.send_signal(signal.SIGCONT)
                del self._frozen[number]
            for number, worker in enumerate(self._workers):
                if worker.process.poll() is not None:
                    self._workers[number] = self._start(number)
            if now >= until:
                return
            time.sleep(0.01)

    def _calm(self, deadline: float) -> None:
        """No more faults: everything must come to its end now."""

        def is_done() -> bool:
            self._tend(time.monotonic() + 0.05)
            assert not self._complaints, "\n".join(self._complaints)
            if self._frozen or self._down_until is not None:
                return False
            self._submit_to(self._rows.num_chunks)
            return self._rows.is_done(self._server.connect())

        wait_until(is_done, max(1.0, deadline - time.monotonic()))

    def _submit_to(self, num_due: int) -> None:
        self._rows.submit_to(self._server.connect(), num_due)

    # -- workers ------------------------------------------------------------------------------

    def _start(self, number: int) -> WorkerProcess:
        self.report.num_started += 1
        log = self._folder / f"worker-{number}.log"
        self._num_ready[number] = log.read_text("utf-8").count(READY) if log.exists() else 0
        return WorkerProcess(
            self._server.url,
            log,
            settings=QUICK_LEASES | self._crew.settings,
            plan=self._crew.plan,
            worker_class=self._crew.worker_class,
            environ={"TMPDIR": str(self._folder / "temp")},
        )

    def _stop_workers(self) -> None:
        """Everybody is asked to stop, and ends well: nothing is held, and nothing hangs."""
        for number, worker in enumerate(self._workers):
            wait_until(lambda number=number: self._is_ready(number), 60)
            worker.process.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in self._workers]
        assert set(codes) == {0}, codes

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end()

    # -- meanwhile ----------------------------------------------------------------------------

    def _clean(self) -> None:
        """What ``rq info`` and dashboards do whenever somebody looks."""
        while not self._is_over.wait(0.02):
            with suppress(RedisError), self._server.connect() as connection:
                queue = Queue(QUEUE, connection=connection, serializer=JSONSerializer)
                queue.started_job_registry.cleanup()
                _ = queue.finished_job_registry.count, queue.failed_job_registry.count

    def _look(self) -> None:
        rng = random.Random()
        while not self._is_over.wait(rng.uniform(0.05, 0.8)):
            with suppress(RedisError), self._server.connect() as connection:
                self._audit(connection)

    def _audit(self, connection: Redis) -> None:
        if (books := self._rows.books(connection)) is None:
            return
        now = time.monotonic()
        self.report.num_audits += 1
        self._complaints += books.faults(self._rows.total)
        self._missing = {job_id: self._missing.get(job_id, now) for job_id in books.lost}
        gone = [job_id for job_id, since in self._missing.items() if now - since > LOST_SECONDS]
        if gone:
            self._complaints.append(f"nowhere for {LOST_SECONDS} s: {gone[:5]}: {books}")
