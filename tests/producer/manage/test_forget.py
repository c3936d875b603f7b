"""``batchkv forget`` deletes all of a batch, even after a kill and on a full server."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis
from redis.exceptions import OutOfMemoryError

from batchkv_producer import Client, NotFoundError
from batchkv_producer.cli import cli
from batchkv_producer.manage import forget as forgetting
from batchkv_producer.server.memory_use import read_memory_use
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import decode_job, encode_result
from batchkv_producer.wire.transitions import JobResult, Pulled, Transitions
from support.redis_server import BINARIES, RedisServer, running_server
from support.worker_harness import WorkerProcess, wait_until, workers
from support.worker_harness import submit as submit_fake

MODEL = "demo"
QUEUE = redis_keys.queue_name(MODEL)
NUM_ROWS = 40
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


class Desk:
    """Batches in every state that rows can be in."""

    def __init__(self, connection: Redis, write: Write) -> None:
        self.connection, self.write = connection, write
        self.client, self.moves = Client(connection), Transitions(connection)

    def submit(self, name: str = "a.jsonl", **options: object) -> Submitted:
        rows = [{"prompt": f"{name} {n}", "temperature": 0} for n in range(NUM_ROWS - 4)]
        duplicates = [{"prompt": f"{name} duplicate", "temperature": 0}] * 3
        source = self.write(*rows, *duplicates, "{broken", name=name)
        return self.client.submit(source, model=MODEL, options=BatchOptions(**options))  # type: ignore[arg-type]

    def mixed(self, name: str = "a.jsonl") -> str:
        """A batch with rows in each state: ended in each way, running, waiting, duplicates."""
        batch = self.submit(name, dedupe=True).batch_id
        self.end(self.pull(3))
        self.end(self.pull(2), "failed")
        self.client.cancel(f"{batch}-20")
        self.pull(4)
        return batch

    def pull(self, count: int) -> list[Pulled]:
        return self.moves.pull(QUEUE, "w", count, 60)

    def end(self, pulled: list[Pulled], outcome: str = "ok") -> list[str]:
        endings = []
        for row in pulled:
            request = decode_job(row.data)
            error = None if outcome == "ok" else ("engine_error", "it broke")
            result = RowResult(request.custom_id, request.endpoint, outcome, error=error)  # type: ignore[arg-type]
            endings.append(JobResult(row.lease, outcome, encode_result(result), 10, 5))
        return self.moves.finish(QUEUE, "w", endings)

    def mark(self, batch: str) -> None:
        """The first step of a ``forget`` that is killed right after it."""
        forgetting._step(self.connection, batch, QUEUE, "mark")

    def traces(self, batch: str) -> list[str]:
        """Keys, and entries of keys, that contain the batch's id."""
        return traces_of(self.connection, batch)


def traces_of(connection: Redis, batch: str) -> list[str]:
    found = []
    read: dict[bytes, Callable[[bytes], object]] = {
        b"zset": lambda key: connection.zrange(key, 0, -1),
        b"list": lambda key: connection.lrange(key, 0, -1),
        b"set": connection.smembers,
        b"hash": connection.hkeys,
        b"string": connection.get,
    }
    for key in connection.scan_iter(count=1000):
        content = read[connection.type(key)](key)
        if batch in key.decode() or batch in repr(content):
            found.append(key.decode())
    return found


@pytest.fixture
def desk(redis_connection: Redis, write_lines: Write) -> Desk:
    return Desk(redis_connection, write_lines)


def batchkv(*arguments: object, url: str, stdin: str | None = None) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner(env={"BATCHKV_REDIS_URL": url}).invoke(cli, words, input=stdin)


# ---- what is left, and what is not touched ----


def test_nothing_of_a_forgotten_batch_is_left(desk: Desk) -> None:
    """With rows in all states, no key and no entry names the batch afterwards. Others stay."""
    other = desk.mixed("b.jsonl")
    batch = desk.mixed()
    before = desk.client.status(other)
    assert len(desk.traces(batch)) > NUM_ROWS
    assert desk.client.forget(batch[:8]) == batch
    assert desk.traces(batch) == []
    assert desk.client.status(other) == before
    with pytest.raises(NotFoundError, match=f"no batch {batch} on this server"):
        desk.client.status(batch)
    assert [found.batch_id for found in desk.client.list_batches()] == [other]


def test_the_same_file_is_a_new_batch_after_it(desk: Desk) -> None:
    """A submit after a forget queues all rows again, under the same id."""
    batch = desk.mixed()
    desk.client.forget(batch)
    submitted = desk.submit(dedupe=True)
    assert (submitted.batch_id, submitted.joined) == (batch, False)
    status = desk.client.status(batch)
    assert (status.queued, status.failed, status.is_submitted) == (NUM_ROWS - 1, 1, True)
    assert len(desk.pull(100)) == NUM_ROWS - 3


def test_a_batch_whose_results_expired_can_be_forgotten(desk: Desk) -> None:
    """After its keys have expired, only its id in the list is left. It is deleted, too."""
    batch = desk.submit(keep_seconds=1).batch_id
    desk.connection.delete(redis_keys.batch(batch), redis_keys.results(batch))
    assert desk.client.forget(batch) == batch
    assert desk.connection.zcard(redis_keys.BATCHES) == 0


# ---- the mark ----


def test_no_move_writes_for_a_marked_batch(desk: Desk) -> None:
    """After the mark, running rows store no result, and no row is queued, retried or canceled."""
    batch = desk.mixed()
    held = desk.pull(6)
    desk.mark(batch)
    hash_before = desk.connection.hgetall(redis_keys.batch(batch))
    results_before = desk.connection.hgetall(redis_keys.results(batch))
    assert desk.end(held[:2]) == ["lost", "lost"]
    assert desk.moves.give_back(QUEUE, [row.lease for row in held[2:4]]) == 0
    assert desk.moves.reap(QUEUE, "w") == (0, 0)
    lines = list(range(1, NUM_ROWS + 1))
    assert desk.moves.retry(batch, QUEUE, lines) == 0
    rows = [(redis_keys.job_id(batch, line), b"x") for line in lines]
    desk.connection.delete(redis_keys.job(f"{batch}-30"))
    for target in ("canceled", "failed", "lost", "expired"):
        assert set(desk.moves.settle(QUEUE, target, rows)) == {""}
    assert desk.moves.mend(QUEUE, [job_id for job_id, _ in rows]) == 0
    assert desk.moves.submit(batch, QUEUE, 2, [(99, b"x", 0)], [], 60) == -1
    assert desk.moves.follow(batch, QUEUE, 2, [(99, b"x", "c", 1)], 60) == -1
    assert desk.pull(100) == []
    after = desk.connection.hgetall(redis_keys.batch(batch))
    assert {**after, b"running": b""} == {**hash_before, b"running": b""}
    assert desk.connection.hgetall(redis_keys.results(batch)) == results_before
    with pytest.raises(NotFoundError, match="is being forgotten"):
        next(desk.client.results(batch))


def test_a_submit_of_a_marked_batch_finishes_its_deletion_first(desk: Desk) -> None:
    """All rows of a half deleted batch's file are queued again."""
    batch = desk.mixed()
    desk.mark(batch)
    assert not desk.submit(dedupe=True).joined
    status = desk.client.status(batch)
    assert (status.queued, status.num_ended, status.is_submitted) == (NUM_ROWS - 1, 1, True)


@pytest.mark.parametrize("who", ["list", "status", "forget", "maintenance"])
def test_the_next_read_finishes_an_interrupted_forget(
    desk: Desk, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forget that was interrupted between pages is finished when the server is read again."""
    from batchkv_worker.queue.maintenance import Maintenance

    batch = desk.mixed()
    desk.mark(batch)
    assert forgetting._step(desk.connection, batch, QUEUE, "page", 7) == 7
    monkeypatch.setattr(forgetting, "PAGE_LINES", 7)
    if who == "list":
        assert desk.client.list_batches() == []
    elif who == "status":
        with pytest.raises(NotFoundError, match="no batch"):
            desk.client.status(batch)
    elif who == "forget":
        desk.client.forget(batch)
    else:
        Maintenance(desk.connection, QUEUE, "w").run(1)
        desk.connection.delete(redis_keys.maintenance_lock(QUEUE))
    assert desk.traces(batch) == []


KILLED = """
import sys
from redis import Redis
from batchkv_producer.manage import forget as forgetting
forgetting.PAGE_LINES = 1
print("begins", flush=True)
forgetting.forget_batch(Redis.from_url(sys.argv[1]), sys.argv[2])
"""


def test_a_forget_that_was_killed_leaves_a_batch_that_can_be_forgotten(
    desk: Desk, redis_url_kept: str
) -> None:
    """After kill -9 between the pages of a forget, the next forget deletes the rest."""
    rows = [{"prompt": f"p{n}"} for n in range(4000)]
    source = desk.write(*rows, name="long.jsonl")
    batch = desk.client.submit(source, model=MODEL).batch_id
    arguments = [sys.executable, "-c", KILLED, redis_url_kept, batch]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        key = redis_keys.batch(batch)
        wait_until(lambda: int(desk.connection.hget(key, "forgotten_lines") or 0) > 10)
        process.send_signal(signal.SIGKILL)
    assert desk.connection.exists(key)
    assert 0 < len(desk.traces(batch)) < 4100
    found = batchkv("forget", batch, "--yes", url=redis_url_kept)
    assert found.exit_code == 0, found.output
    assert desk.traces(batch) == []


def test_a_worker_drops_forgotten_rows_and_takes_others(
    redis_connection: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Rows of a forgotten batch leave the engine at once; the slots go to another batch's rows."""
    batch = submit_fake(redis_connection, ["slow:1000000"] * 8, name="long")
    settings: dict[str, object] = {"SLOTS": 4, "HEARTBEAT_SECONDS": 0.2, "PREFETCH": 0}
    log = tmp_path / "log"
    plan: dict[str, object] = {"step_seconds": 0.001}
    worker = WorkerProcess(redis_server.url, log, settings=settings, plan=plan)
    with workers(worker):
        key = redis_keys.batch(batch)
        wait_until(lambda: int(redis_connection.hget(key, "running") or 0) >= 4)
        Client(redis_connection).forget(batch)
        other = submit_fake(redis_connection, ["hello"] * 6, name="short")
        wait_until(lambda: redis_connection.hget(redis_keys.batch(other), "ok") == b"6")
        assert traces_of(redis_connection, batch) == []


# ---- a server that is full ----


@pytest.fixture(params=BINARIES)
def full(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of its own, whose memory a test fills: Valkey, and Redis."""
    with running_server("--maxmemory-policy", "noeviction", binary=request.param) as server:
        yield server


def fill_up(connection: Redis) -> None:
    used = int(connection.info("memory")["used_memory"])
    connection.config_set("maxmemory", used // 2)
    with pytest.raises(OutOfMemoryError):
        connection.set("x", "y")


def test_cancel_and_forget_work_on_a_full_server(
    full: RedisServer, write_lines: Write, tmp_path: Path
) -> None:
    """At maxmemory a submit is refused and names the largest batches. Cancel and forget work."""
    with full.connect() as connection:
        desk = Desk(connection, write_lines)
        batch, other = desk.mixed(), desk.mixed("b.jsonl")
        source = desk.write(*[{"prompt": "x" * 500}] * 9, name="c.jsonl")
        fill_up(connection)
        refused = batchkv("submit", source, "-m", MODEL, url=full.url)
        assert refused.exit_code == 3
        assert "is full (maxmemory): make room with `batchkv forget BATCH`" in refused.stderr
        assert f"{batch} (" in refused.stderr and f"{other} (" in refused.stderr
        assert "Traceback" not in refused.stderr and len(refused.stderr.splitlines()) == 1
        for command in (
            *(("status",), ("status", other), ("list",), ("workers",), ("failed", other)),
            *(("wait", "--timeout", "0", other), ("report", other, "-o", tmp_path / "r.html")),
            ("results", other, "-o", tmp_path / "o.jsonl"),
        ):
            shown = batchkv(*command, url=full.url)
            assert "full" not in shown.stderr and "Traceback" not in shown.stderr, (command, shown)
        canceled = batchkv("cancel", batch, url=full.url)
        assert canceled.exit_code == 0, canceled.stderr
        status = desk.client.status(batch)
        assert (status.queued, status.running, status.num_ended) == (0, 0, NUM_ROWS)
        for each in (batch, other):
            found = batchkv("forget", each, "--yes", url=full.url)
            assert found.exit_code == 0, found.stderr
            assert desk.traces(each) == []
        assert connection.dbsize() <= 1  # the set of queues


def test_status_shows_what_holds_the_memory(desk: Desk, redis_url_kept: str) -> None:
    """The largest batches come first, each with its estimated memory."""
    small, large = desk.submit("s.jsonl").batch_id, "x" * 3000
    source = desk.write(*[{"prompt": f"{large}{n * 7919}"} for n in range(300)], name="l.jsonl")
    batch = desk.client.submit(source, model=MODEL).batch_id
    room = read_memory_use(desk.connection)
    assert room is not None and room.used_bytes > 0
    assert [held.batch_id for held in room.largest] == [batch, small]
    num_bytes = room.largest[0].num_bytes
    whole = sum(
        desk.connection.memory_usage(redis_keys.job(f"{batch}-{line}")) or 0
        for line in range(1, 301)
    )
    assert 0.8 * whole < num_bytes < 1.3 * whole
    text = batchkv("status", url=redis_url_kept).stdout
    assert f"most in {batch} (" in text


def test_status_says_that_no_worker_ever_served_a_batch(desk: Desk, redis_url_kept: str) -> None:
    """For a batch of a model that no worker has, status says so and names both commands."""
    batch = desk.submit().batch_id
    text = batchkv("status", batch, url=redis_url_kept).stdout
    text = " ".join(text.split())
    assert f"`batchkv worker -m {MODEL}` serves it, `batchkv forget {batch}` deletes" in text
    desk.pull(1)
    assert "none has ever taken a row" not in batchkv("status", batch, url=redis_url_kept).stdout


# ---- the command ----


@pytest.fixture
def redis_url_kept(redis_server: RedisServer) -> str:
    """The session's server as it is: ``redis_url`` would empty it."""
    return redis_server.url


def test_without_a_terminal_it_needs_yes(desk: Desk, redis_url_kept: str) -> None:
    """In a pipe nothing is deleted without --yes, whatever the pipe says; the help says so."""
    batch = desk.mixed()
    found = batchkv("forget", batch, url=redis_url_kept, stdin="y\n")
    assert found.exit_code == 2
    assert "add --yes. Nothing was deleted" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert desk.client.status(batch).total == NUM_ROWS
    found = batchkv("forget", batch, "--yes", url=redis_url_kept)
    assert (found.exit_code, found.stderr) == (0, f"batchkv: deleted batch {batch} with 40 rows\n")
    help_text = " ".join(batchkv("forget", "--help", url=redis_url_kept).stdout.split())
    assert "In a pipe or a script it deletes nothing without --yes" in help_text


@pytest.mark.parametrize("answer", ["y", "n"])
def test_on_a_terminal_it_asks(desk: Desk, redis_url_kept: str, answer: str) -> None:
    """At a terminal the batch is shown and the user is asked. Without a yes it stays."""
    batch = desk.mixed()
    main, side = pty.openpty()
    command = [sys.executable, "-m", "batchkv_producer", "forget", batch, "--url", redis_url_kept]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        said = b""
        deadline = time.monotonic() + 20
        while b"[y/N]" not in said and time.monotonic() < deadline:
            said += os.read(main, 4096)
        os.write(main, answer.encode() + b"\n")
        assert process.wait(20) == (0 if answer == "y" else 2)
    os.close(main)
    assert b"a.jsonl, 40 = 5 ok" in said
    assert bool(desk.traces(batch)) == (answer == "n")


def test_batches_can_be_chosen_by_age_model_and_state(desk: Desk, redis_url_kept: str) -> None:
    """--older-than, --model and --all-done must all fit. They cannot be combined with ids."""
    old, done, open_one = (desk.submit(f"{name}.jsonl").batch_id for name in "abc")
    desk.client.cancel(done)
    desk.client.cancel(old)
    desk.connection.hincrby(redis_keys.batch(old), "created", -8 * 86400)

    def forget(*arguments: str) -> Result:
        return batchkv("forget", *arguments, "--yes", url=redis_url_kept)

    def left() -> set[str]:
        return {found.batch_id for found in desk.client.list_batches()}

    assert "no batch on this server fits these flags" in forget("--model", "another").stderr
    assert forget(old, "--all-done").exit_code == 2
    assert forget().exit_code == 2
    assert left() == {old, done, open_one}
    assert forget("--older-than", "7d", "--all-done").exit_code == 0
    assert left() == {done, open_one}
    assert forget("--all-done", "--model", MODEL).exit_code == 0
    assert left() == {open_one}
    assert forget(open_one, "ffffffffffffffff").exit_code == 2  # nothing, when one is unknown
    assert left() == {open_one}
    assert forget("-m", MODEL).exit_code == 0
    assert left() == set()
