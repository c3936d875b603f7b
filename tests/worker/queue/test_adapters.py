"""A worker with adapters between a real server and a fake engine: it serves queues in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.agreed import RUN_ROWS
from batchkv_producer.monitor.mismatch import find_mismatch
from batchkv_producer.submit.fingerprint import of_adapter, of_model
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import SamplingParams
from batchkv_producer.wire.maker import Maker
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Event
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.job_puller import JobPuller, Limits
from batchkv_worker.queue.redis_side import RedisSide
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.queue.runs.queue_turns import Head
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.settings import WorkerSettings
from support.adapter_files import write_files
from support.fake_engine import FakeEngine, FakePlan, rows_of
from support.homes import new_home
from support.redis_server import RedisServer
from support.worker_harness import (
    MODEL,
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    num_ended,
    results_of,
    wait_until,
    workers,
)
from worker.queue.test_rq_worker import work

QUEUES = {name: redis_keys.queue_name(f"{MODEL}@{name}") for name in ("a", "b")} | {"": QUEUE}
NAMES = ("a", "b")
Submit = Callable[..., str]


@pytest.fixture
def submit(redis_connection: Redis, tmp_path: Path) -> Submit:
    """Queue a batch for an adapter, or for the model alone; ``age`` is how old it says it is."""

    def queue(name: str, adapter: str = "", count: int = 3, age: int = 0, **options: Any) -> str:
        path = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{name}{i}"} for i in range(count)]
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
        client = Client(redis_connection)
        chosen = Adapter(adapter) if adapter else None
        batch = client.submit(
            path, model=MODEL, options=BatchOptions(adapter=chosen, **options)
        ).batch_id
        redis_connection.hincrby(redis_keys.batch(batch), "created", -age)
        return batch

    return queue


class Engine(FakeEngine):
    """Lists what it has served, each adapter with the rows that it then took."""

    def __init__(self, settings: WorkerSettings, plan: FakePlan) -> None:
        super().__init__(*rows_of(settings), plan, NAMES)
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> list[Event]:
        if not self.gate.is_set():
            self.fill_slots()
            time.sleep(0.002)
            return []
        return super().step()


@pytest.fixture
def engines() -> list[Engine]:
    """The engines that workers have built."""
    return []


def make_worker(
    connection: Redis,
    folder: Path,
    engines: list[Engine],
    plan: FakePlan | None = None,
    *,
    is_gated: bool = False,
    **settings: Any,
) -> BatchWorker:
    """A worker of this process that serves the model, and the adapters a and b."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            engine = Engine(settings, plan or FakePlan())
            if is_gated:
                engine.gate.clear()
            engines.append(engine)
            return engine

    adapters = tuple(Adapter(name, str(write_files(folder / name))) for name in NAMES)
    chosen = WorkerSettings(model=MODEL, adapters=adapters, **settings)
    return Worker(list(chosen.queues), connection=connection, settings=chosen)


def texts_of(connection: Redis, batch: str) -> list[str]:
    return [result.text for _, result in sorted(results_of(connection, batch).items())]


def test_three_batches_are_computed_each_with_its_adapter(
    redis_connection: Redis, tmp_path: Path, submit: Submit, engines: list[Engine]
) -> None:
    """Batches of two adapters and of the model alone: the oldest first, with one exchange each."""
    third, first, second = submit("z"), submit("x", "a", age=20), submit("y", "b", age=10)
    assert work(make_worker(redis_connection, tmp_path, engines))
    assert engines[0].served == ["", "a", "b", ""]
    assert texts_of(redis_connection, first) == ["echo of a x0", "echo of a x1", "echo of a x2"]
    assert texts_of(redis_connection, second)[0] == "echo of b y0"
    assert texts_of(redis_connection, third)[0] == "echo z0"
    for batch, name in ((first, "a"), (second, "b"), (third, "")):
        assert_reconciled(redis_connection, batch, queue=QUEUES[name])
    models = [results_of(redis_connection, batch)[1].model for batch in (first, second, third)]
    assert models == [f"{MODEL}@a", f"{MODEL}@b", MODEL]


def test_later_batches_of_one_queue_wait_for_older_ones_of_another(
    redis_connection: Redis, tmp_path: Path, submit: Submit, engines: list[Engine]
) -> None:
    """Work that goes on arriving for one adapter starves no other: batches run by age.

    A worker takes runs of jobs, so it has some of a later batch before it turns to the next queue.
    """
    for number in range(2):
        submit(f"a{number}", "a", count=RUN_ROWS + 2, age=100 - 20 * number)
        submit(f"b{number}", "b", count=RUN_ROWS + 2, age=90 - 20 * number)
    work(make_worker(redis_connection, tmp_path, engines))
    assert engines[0].served == ["", "a", "b", "a", "b"]
    for name in NAMES:
        assert not any(redis_connection.llen(key) for key in redis_keys.waiting_lists(QUEUES[name]))


def test_an_urgent_row_of_another_adapter_does_not_wait_for_the_backlog(
    redis_connection: Redis, tmp_path: Path, submit: Submit, engines: list[Engine]
) -> None:
    """Rows that have begun come to their end. The others go back, and no row is lost."""
    many = submit("many", count=60)

    def act() -> None:
        running = lambda: redis_connection.hlen(redis_keys.held(many))  # noqa: E731
        wait_until(lambda: running() == 60)
        urgent = submit("urgent", "b", count=1, priority="high")
        wait_until(lambda: running() == 2)  # those in the slots
        assert num_ended(redis_connection, urgent) == 0
        engines[0].gate.set()
        wait_until(lambda: num_ended(redis_connection, urgent) == 1)
        assert num_ended(redis_connection, many) < 60
        wait_until(lambda: num_ended(redis_connection, many) == 60)

    work(make_worker(redis_connection, tmp_path, engines, slots=2, prefetch=4, is_gated=True), act)
    assert engines[0].served == ["", "b", ""]
    assert_reconciled(redis_connection, many)


def test_rows_for_another_worker_do_not_hold_up_the_other_queues(
    redis_connection: Redis, tmp_path: Path, submit: Submit, engines: list[Engine]
) -> None:
    """A batch that needs other files of the adapter waits, and later batches are computed."""
    others = submit("others", "a", age=50, maker=Maker(fingerprint="0" * 32))
    mine = submit("mine", "b")
    work(make_worker(redis_connection, tmp_path, engines, FakePlan(fingerprint="1" * 32)))
    assert num_ended(redis_connection, others) == 0
    assert results_of(redis_connection, mine)[1].fingerprint == "1" * 32 + "-b"
    assert engines[0].served[:3] == ["", "a", "b"]


def test_an_exchange_ends_no_worker(redis_connection: Redis) -> None:
    """The time that a worker was idle in one queue does not count in the next one."""
    settings = WorkerSettings(model=MODEL, adapters=(Adapter("a", "/a"),))
    state = WorkerState(InFlight(MODEL, "w"), StopRequest(lambda: None))
    side = RedisSide(
        *(redis_connection, QUEUE, "w", settings), register=lambda: None, set_state=lambda _: None
    )
    puller = JobPuller(
        *(side, EngineThread(lambda: FakeEngine(1, 0, FakePlan())), state),
        *(Limits(max_idle_seconds=0.0), lambda call: call(), list(settings.queues)),
    )
    puller._idle()
    assert puller.is_spent()
    state.next_queue = QUEUES["a"]
    assert not puller.is_spent()
    puller.switch()
    assert not state.next_queue and not puller.is_spent()


def test_its_record_says_what_it_serves(
    redis_connection: Redis, tmp_path: Path, submit: Submit, engines: list[Engine]
) -> None:
    """Each queue counts the worker and sees the weights of its own adapter, at all times."""
    plan = FakePlan(fingerprint="1" * 32)
    batch = submit("x", "a", maker=Maker(fingerprint="1" * 32 + "-a"))

    def act() -> None:
        wait_until(lambda: num_ended(redis_connection, batch) == 3)
        client = Client(redis_connection)
        wait_until(lambda: client.workers()[0].fingerprint)
        (found,) = client.workers()
        assert (found.model, found.adapters, found.fingerprint) == (MODEL, ("a", "b"), "1" * 32)
        for name in NAMES:
            (served,) = client.serving(QUEUES[name])
            assert served.model == f"{MODEL}@{name}"
            assert served.fingerprint == f"{'1' * 32}-{name}"
        status = client.status(submit("y", "b"))
        waiting = replace(status, fingerprint="1" * 32 + "-b", is_submitted=True)
        assert find_mismatch(waiting, client.serving(QUEUES["b"])) is None

    work(make_worker(redis_connection, tmp_path, engines, plan, heartbeat_seconds=0.1), act)


def test_a_worker_that_is_killed_gives_rows_of_every_queue_back(
    redis_connection: Redis, redis_server: RedisServer, tmp_path: Path, submit: Submit
) -> None:
    """The next worker of the machine takes the rows of the adapter's queue back at once."""
    flags = {"ADAPTERS": f"a={write_files(tmp_path / 'a')}"}
    batch = submit("x", "a")
    environment = {"BATCHKV_HOME": str(tmp_path / "home")}
    slow = WorkerProcess(
        *(redis_server.url, tmp_path / "1.log"),
        plan={"steps": 100_000, "step_seconds": 0.01},
        settings=flags,
        environ=environment,
    )
    quick = None
    with workers(slow):
        wait_until(lambda: redis_connection.hlen(redis_keys.held(batch)) == 3)
        slow.process.kill()
        slow.wait()
        quick = WorkerProcess(
            *(redis_server.url, tmp_path / "2.log", "--burst"),
            settings=flags,
            environ=environment,
        )
        with workers(quick):
            assert quick.wait() == 0, quick.said
    assert_reconciled(redis_connection, batch, queue=QUEUES["a"])


def test_faults_of_adapters_are_settings_errors(
    redis_connection: Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A faulty folder ends the worker with exit code 2 before it registers."""
    settings = WorkerSettings(model=MODEL, adapters=(Adapter("a", str(tmp_path)),))
    for queues, words in ((list(settings.queues), "--adapter a="), ([QUEUE], "--adapter a=")):
        with pytest.raises(SystemExit) as ended:
            BatchWorker(queues, connection=redis_connection, settings=settings)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    write_files(tmp_path)
    with pytest.raises(SystemExit):
        BatchWorker([QUEUE], connection=redis_connection, settings=settings)
    assert f"has the queues '{QUEUE}', '{QUEUES['a']}'" in capsys.readouterr().err
    assert not redis_connection.exists(redis_keys.workers())


def test_the_heads_of_queues_are_read_whatever_is_in_them(
    redis_connection: Redis, tmp_path: Path, submit: Submit
) -> None:
    """An entry that is no row of a batch counts as the oldest; an empty queue has no head."""
    batch = submit("x", "a", priority="low")
    created = int(redis_connection.hget(redis_keys.batch(batch), "created") or 0)
    redis_connection.rpush(redis_keys.queue(QUEUE), b"\xff garbage")
    settings = WorkerSettings(model=MODEL, adapters=(Adapter("a", "/a"), Adapter("b", "/b")))
    side = RedisSide(
        *(redis_connection, QUEUE, "w", settings), register=lambda: None, set_state=lambda _: None
    )
    assert side.heads(list(settings.queues)) == {QUEUE: Head(1, 0.0), QUEUES["a"]: Head(2, created)}


# -- a real process and the real engine

LAYER, WIDTH, RANK = "model.layers.1.self_attn.o_proj", 256, 2
SHAPES = {f"{LAYER}.lora_a": (WIDTH, RANK), f"{LAYER}.lora_b": (RANK, WIDTH)}
QUESTIONS = [f"Codes: blue=1{n} red=4{n}. What is the code of red?" for n in range(3)]


def test_one_worker_serves_three_batches(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """An adapter of zeros answers as the model does, another one not, each under its own name."""
    folders = {name: tmp_path / name for name in ("same", "other")}
    write_files(folders["same"], SHAPES)
    write_files(folders["other"], SHAPES, number=0.3)
    client, greedy = Client(redis_connection), SamplingParams(max_tokens=8, temperature=0.0)
    rows = [{"prompt": question} for question in QUESTIONS]
    made = {
        name: client.submit(rows, model="demo", adapter=name or None, defaults=greedy)
        for name in ("other", "", "same")
    }
    flags = [word for name, folder in folders.items() for word in ("--adapter", f"{name}={folder}")]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATCHKV_")}
    environment = {**kept, "BATCHKV_HOME": str(new_home(tmp_path / "home"))}
    command = [sys.executable, "-P", "-m", "batchkv_producer", "worker", "-m", "demo", "--burst"]
    ended = subprocess.run(
        [*command, *flags, "--slots", "4", "--url", redis_server.url],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    texts = {}
    for name, submitted in made.items():
        assert_reconciled(redis_connection, submitted.batch_id, queue=submitted.queue)
        results = [
            row for _, row in sorted(results_of(redis_connection, submitted.batch_id).items())
        ]
        weights = of_adapter(of_model("demo"), folders[name]) if name else of_model("demo")
        served = f"demo@{name}" if name else "demo"
        assert {(row.model, row.fingerprint) for row in results} == {(served, weights)}
        texts[name] = [row.text for row in results]
    assert texts["same"] == texts[""] != texts["other"]
