"""The state machine of a job, on a real server, with RQ's own tools in between."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from batchkv_producer.monitor.status import read_batch
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, decode_result, encode_job, encode_result
from batchkv_producer.wire.transitions import (
    MAX_DEATHS,
    BatchRecord,
    JobLease,
    JobResult,
    Pulled,
    Transitions,
)

BATCH = "0123456789abcdef"
MODEL = "some/model"
QUEUE = redis_keys.queue_name(MODEL)
LEASE_SECONDS = 60


LAPSE = """
local time = redis.call('TIME')
return redis.call('ZADD', KEYS[1], 'XX', tonumber(time[1]) + tonumber(time[2]) / 1e6, ARGV[1])
"""


def result_bytes(line: int, outcome: str) -> bytes:
    """A result of that outcome."""
    error = None if outcome == "ok" else ("engine_error", "it broke")
    return encode_result(Result(f"line-{line}", "chat", outcome, error=error))  # type: ignore[arg-type]


def job_bytes(line: int) -> bytes:
    """The data of a small job."""
    messages = [{"role": "user", "content": f"question {line}"}]
    return encode_job(Request(f"line-{line}", "chat", messages=messages))


class House:
    """One batch on the server, and shorthands for the moves and for what can be seen of it."""

    def __init__(self, connection: Redis, total: int, num_chunks: int = 1) -> None:
        self.connection = connection
        self.transitions = Transitions(connection)
        self.total = total
        self.transitions.create(
            BATCH,
            {
                "digest": "d" * 64,
                "model": MODEL,
                "queue": QUEUE,
                "total": total,
                "num_chunks": num_chunks,
            },
        )

    def submit(self, chunk: int, lines: range, bad: range = range(0)) -> int:
        jobs = [(line, job_bytes(line), 7 * line) for line in lines]
        bad_rows = [(line, result_bytes(line, "failed")) for line in bad]
        return self.transitions.submit(BATCH, QUEUE, chunk, jobs, bad_rows, 3600)

    def pull(
        self, count: int = 10, worker: str = "w", num_begin: int | None = None
    ) -> list[Pulled]:
        return self.transitions.pull(QUEUE, worker, count, LEASE_SECONDS, num_begin)

    def finish(self, pulled: list[Pulled], outcome: str = "ok", worker: str = "w") -> list[str]:
        endings = [
            JobResult(p.lease, outcome, result_bytes(line_of(p.lease), outcome), 10, 5, 3, 7)
            for p in pulled
        ]
        return self.transitions.finish(QUEUE, worker, endings)

    def cancel(self, lines: list[int]) -> list[str]:
        rows = [(job_id(line), result_bytes(line, "canceled")) for line in lines]
        return self.transitions.settle(QUEUE, "canceled", rows)

    def heal(self) -> list[str]:
        """What maintenance does for jobs that RQ's tools ended without a result."""
        failed = [
            raw.decode()
            for kind in ("failed", "canceled")
            for raw in self.connection.zrange(redis_keys.registry(kind, QUEUE), 0, -1)
        ]
        rows = [(job, result_bytes(int(job.split("-")[1]), "failed")) for job in failed]
        return self.transitions.settle(QUEUE, "failed", rows) if rows else []

    def lapse(self, held: JobLease) -> None:
        """Make a lease end now, by the server's clock.

        Not in the past: a lease cannot end before it began, and RQ's clean-up forgets every lease
        that ended before the clean-up started, also one that it has not looked at.
        """
        wip = redis_keys.registry("wip", QUEUE)
        self.connection.eval(LAPSE, 1, wip, f"{held.job_id}:{held.execution}")

    def clean_up(self) -> None:
        """What ``rq info`` and every dashboard do, with a clock of more than whole seconds."""
        queue = Queue(QUEUE, connection=self.connection, serializer=JSONSerializer)
        StartedJobRegistry(queue=queue).cleanup(timestamp=time.time())

    def status(self, line: int) -> str:
        return (self.connection.hget(redis_keys.job(job_id(line)), "status") or b"none").decode()

    def count(self, name: str) -> int:
        return int(self.connection.hget(redis_keys.batch(BATCH), name) or 0)

    def waiting(self) -> list[int]:
        raw = self.connection.lrange(redis_keys.queue(QUEUE), 0, -1)
        return [int(entry.split(b"-")[1]) for entry in raw]

    def outcomes(self) -> dict[int, str]:
        raw = self.connection.hgetall(redis_keys.results(BATCH))
        return {int(line): decode_result(data).outcome for line, data in raw.items()}

    def ended(self) -> list[int]:
        return [int(line) for line in self.connection.lrange(redis_keys.done(BATCH), 0, -1)]


def test_a_worker_hears_what_the_producer_said(house: House) -> None:
    """How much of a row's text others begin with; None for jobs that say nothing, or nonsense."""
    house.connection.hdel(redis_keys.job(job_id(2)), "bkv_shared")
    house.connection.hset(redis_keys.job(job_id(3)), "bkv_shared", "-1 or so")
    assert [job.shared_bytes for job in house.pull(4)] == [7, None, None, 28]


def job_id(line: int) -> str:
    """The id of the batch's job for a line."""
    return redis_keys.job_id(BATCH, line)


def line_of(held: JobLease) -> int:
    """The line of a held job."""
    return int(held.job_id.split("-")[1])


@pytest.fixture
def house(redis_connection: Redis) -> House:
    """A batch of five jobs in the queue."""
    house = House(redis_connection, 5)
    house.submit(0, range(1, 6))
    return house


# ---- what RQ sees ----


def test_a_chunk_may_be_large(redis_connection: Redis) -> None:
    """A chunk of more rows than Lua unpacks at once is queued whole and in order."""
    house = House(redis_connection, 9000)
    house.submit(0, range(9000))
    queued = redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1)
    assert queued == [job_id(line).encode() for line in range(9000)]


def test_rq_reads_a_submitted_job(house: House) -> None:
    """A hash that the script writes is a job to RQ, with the fields that RQ would have written."""
    job = Job.fetch(job_id(2), connection=house.connection, serializer=JSONSerializer)
    assert (job.func_name, job.instance, job.kwargs) == ("batchkv.generate", None, {})
    assert job.args[0]["messages"][0]["content"] == "question 2"
    assert (job.origin, job.get_status().value, job.timeout) == (QUEUE, "queued", 3600)
    assert (job.retries_left, job.meta, job.is_queued) == (3, {}, True)
    assert job.created_at == job.enqueued_at


def test_rq_counts_what_is_there(house: House) -> None:
    """The numbers of ``rq info`` are right: queued, started, finished and failed."""
    queue = Queue(QUEUE, connection=house.connection, serializer=JSONSerializer)
    assert queue in Queue.all(connection=house.connection, serializer=JSONSerializer)
    pulled = house.pull(3)
    house.finish(pulled[:1])
    house.finish(pulled[1:2], "failed")
    assert queue.count == 2
    assert StartedJobRegistry(queue=queue).count == 1
    assert FinishedJobRegistry(queue=queue).count == 1
    assert FailedJobRegistry(queue=queue).count == 1
    job = Job.fetch(pulled[2].lease.job_id, connection=house.connection, serializer=JSONSerializer)
    assert (job.get_status().value, job.worker_name) == ("started", "w")
    assert [execution.id for execution in job.get_executions()] == [pulled[2].lease.execution]


def test_the_list_of_finished_jobs_goes_with_its_jobs(house: House) -> None:
    """Without a worker to clean up, a dashboard shows no ids of jobs that are long gone."""
    pulled = house.pull(3)
    registry = redis_keys.registry("finished", QUEUE)
    house.finish(pulled[:1], "failed")
    assert not house.connection.exists(registry)
    house.finish(pulled[1:])
    key = redis_keys.job(pulled[1].lease.job_id)
    assert house.connection.zcard(registry) == 2
    assert abs(house.connection.expiretime(registry) - house.connection.expiretime(key)) <= 1


# ---- submit ----


def test_a_chunk_is_enqueued_once(redis_connection: Redis) -> None:
    """A chunk sent twice, or before its turn, changes nothing and tells where the batch stands."""
    house = House(redis_connection, 4, num_chunks=2)
    assert house.submit(1, range(3, 5)) == 0
    assert house.waiting() == []
    assert house.submit(0, range(1, 3)) == 1
    assert house.submit(0, range(1, 3)) == 1
    assert house.submit(1, range(3, 5)) == 2
    assert house.waiting() == [1, 2, 3, 4]


def test_a_chunk_of_a_lost_batch(transitions: Transitions) -> None:
    """A chunk of a batch that the server does not know is answered with -1."""
    assert transitions.submit(BATCH, QUEUE, 0, [(1, job_bytes(1), 0)], [], 60) == -1


def test_bad_rows_end_at_once(redis_connection: Redis) -> None:
    """A row that was refused has its result as soon as its chunk is in."""
    house = House(redis_connection, 3)
    house.submit(0, range(1, 3), bad=range(3, 4))
    assert (house.outcomes(), house.ended(), house.count("failed")) == ({3: "failed"}, [3], 1)


def test_joining_changes_nothing(house: House) -> None:
    """Creating a batch that is there tells how it stands and leaves it alone."""
    answer = house.transitions.create(BATCH, {"digest": "other", "num_chunks": 9})
    assert answer == BatchRecord("d" * 64, 1, 1, order=1)
    assert house.count("num_chunks") == 1


# ---- pull, finish, give back ----


def test_pull_takes_the_head_in_order(house: House) -> None:
    """A run of jobs is taken from the head, each with its data, timeout and a lease."""
    pulled = house.pull(3)
    assert [line_of(p.lease) for p in pulled] == [1, 2, 3]
    assert pulled[0].data == job_bytes(1)
    assert (pulled[0].num_deaths, pulled[0].timeout_seconds) == (0, 3600)
    assert (house.waiting(), house.count("running")) == ([4, 5], 3)


def test_finish_writes_everything_in_one_step(house: House) -> None:
    """Result, finish order and counters are there at once; RQ's record loses the prompt."""
    pulled = house.pull(2)
    assert house.finish(pulled) == ["ok", "ok"]
    assert (house.outcomes(), house.ended()) == ({1: "ok", 2: "ok"}, [1, 2])
    names = ("ok", "running", "prompt_tokens", "completion_tokens", "cached_tokens", "busy_ms")
    assert [house.count(name) for name in names] == [2, 0, 20, 10, 6, 14]
    assert house.status(1) == "finished"
    assert house.connection.hget(redis_keys.job(job_id(1)), "data") == b""


def test_a_lease_that_is_over_ends_nothing(house: House) -> None:
    """Who lost a job to another worker writes nothing; the other one's result counts."""
    first = house.pull(1)
    house.lapse(first[0].lease)
    assert house.transitions.reap(QUEUE) == (1, 0)
    second = house.pull(1, worker="v")
    assert line_of(second[0].lease) == 1
    assert house.finish(first) == ["lost"]
    assert house.finish(second, worker="v") == ["ok"]
    assert house.finish(second, worker="v") == ["lost"]
    assert house.ended() == [1]


def test_give_back_keeps_the_order(house: House) -> None:
    """Jobs handed back stand at the head again, in the order in which they were taken."""
    pulled = house.pull(3)
    assert house.transitions.give_back(QUEUE, [p.lease for p in pulled]) == 3
    assert (house.waiting(), house.count("running")) == ([1, 2, 3, 4, 5], 0)


def test_a_job_that_kills_its_holders_fails(house: House) -> None:
    """After MAX_DEATHS deaths alone a job fails; maintenance gives it its error row."""
    for _ in range(MAX_DEATHS):
        house.pull(1)
        assert house.transitions.reap(QUEUE, "w") == (1, 0)
    house.pull(1)
    assert house.transitions.reap(QUEUE, "w") == (0, 1)
    assert house.heal() == ["done"]
    assert house.outcomes() == {1: "failed"}


def test_a_pull_whose_answer_is_lost_is_no_death(house: House) -> None:
    """A worker that renews all it knows of, but not this job, lives: the job was not its death."""
    house.connection.hset(redis_keys.worker("w"), "last_heartbeat", "2000-01-01T00:00:00.000000Z")
    (known,) = house.pull(1)
    (unknown,) = house.pull(1)
    for _ in range(MAX_DEATHS + 1):
        house.transitions.renew(QUEUE, "w", [known.lease], LEASE_SECONDS, 90)
        house.lapse(unknown.lease)
        assert house.transitions.reap(QUEUE) == (1, 0)
        (unknown,) = house.pull(1)
    assert unknown.num_deaths == 0
    house.lapse(unknown.lease)  # pulled after the last heartbeat: that may have been the end
    house.lapse(known.lease)
    assert house.transitions.reap(QUEUE) == (2, 0)
    assert halves(house)[:2] == [1, 1]


def test_a_name_that_a_later_worker_has_is_no_sign_of_life(house: House) -> None:
    """Who holds a row and was born after the row was last spoken of is another process of the same
    name: the lapse counts, or a row that kills a worker of a fixed name would kill it forever."""
    (row,) = house.pull(1, worker="mini")
    house.connection.hset(
        redis_keys.worker("mini"),
        mapping={"birth": "9000-01-01T00:00:00.000000Z", "last_heartbeat": "9000-01-02"},
    )
    house.lapse(row.lease)
    assert house.transitions.reap(QUEUE) == (1, 0)
    assert house.connection.hget(redis_keys.job(row.lease.job_id), "bkv_halves") == b"1"


def test_a_script_cut_short_leaves_nobody_running(house: House) -> None:
    """Rows run while somebody holds them, although a step broke off before it counted."""
    pulled = house.pull(2)
    assert read_batch(house.connection, BATCH).running == 2
    house.connection.execute_command("ACL", "SETUSER", "default", "-hincrby")
    try:
        for one in pulled:
            with pytest.raises(ResponseError, match="hincrby"):
                house.transitions.give_back(QUEUE, [one.lease])
    finally:
        house.connection.execute_command("ACL", "SETUSER", "default", "+hincrby")
    assert house.transitions.mend(QUEUE, [job_id(1), job_id(2)]) == 2
    house.finish(house.pull(5))
    found = read_batch(house.connection, BATCH)
    assert (found.ok, found.queued, found.running, found.is_done) == (5, 0, 0, True)


def test_a_heartbeat_tells_the_servers_time(house: House) -> None:
    """A worker's own clock may be wrong; who wants to know how long it is silent needs one."""
    key = redis_keys.worker("w")
    house.transitions.renew(QUEUE, "w", [], LEASE_SECONDS, 90)
    assert not house.connection.exists(key)
    house.connection.hset(key, "birth", "x")
    house.transitions.renew(QUEUE, "w", [], LEASE_SECONDS, 90)
    assert abs(int(house.connection.hget(key, "bkv_seen")) - house.connection.time()[0]) <= 1


# ---- begun, and suspects ----


def begun(house: House) -> list[int]:
    """The lines that Redis takes for begun."""
    lines = range(1, house.total + 1)
    field = "bkv_begun"
    return [n for n in lines if house.connection.hget(redis_keys.job(job_id(n)), field) == b"1"]


def deaths(house: House) -> list[int]:
    """Line by line, how many holders died with it."""
    keys = [redis_keys.job(job_id(line)) for line in range(1, house.total + 1)]
    return [int(house.connection.hget(key, "bkv_deaths") or 0) for key in keys]


def halves(house: House) -> list[int]:
    """Line by line, half deaths that made no suspect of it yet."""
    keys = [redis_keys.job(job_id(line)) for line in range(1, house.total + 1)]
    return [int(house.connection.hget(key, "bkv_halves") or 0) for key in keys]


def test_only_what_had_begun_counts_a_death(house: House) -> None:
    """Of five jobs of a dead worker two began at once, one later; the others saw no engine."""
    pulled = house.pull(5, num_begin=2)
    assert [job.has_begun for job in pulled] == [True, True, False, False, False]
    assert house.transitions.finish(QUEUE, "w", [], [pulled[3].lease]) == []
    assert begun(house) == [1, 2, 4]
    house.lapse(pulled[0].lease)
    house.lapse(pulled[4].lease)
    assert house.transitions.reap(QUEUE) == (2, 0)
    assert house.transitions.reap(QUEUE, "w") == (3, 0)
    assert (deaths(house), halves(house)) == ([0, 1, 0, 1, 0], [1, 0, 0, 0, 0])
    assert begun(house) == []


def test_what_begins_is_said_as_others_end(house: House) -> None:
    """In one call, again if its answer was lost; nobody else's job is marked, nor what ended."""
    one, two, three = house.pull(3, num_begin=1)
    ending = JobResult(one.lease, "ok", result_bytes(1, "ok"))
    stale = JobLease(three.lease.job_id, "another-1")
    for verdict in ("ok", "lost"):
        told = [one.lease, two.lease, stale]
        assert house.transitions.finish(QUEUE, "w", [ending], told) == [verdict]
        assert begun(house) == [2]
    assert (house.ended(), house.count("running")) == ([1], 2)


@pytest.mark.parametrize("how", ["finish", "give back", "died", "reap", "cancel", "lost", "mend"])
def test_the_mark_goes_with_the_lease(house: House, how: str) -> None:
    """However a job is left, nothing says any more that it has begun."""
    (pulled,) = house.pull(1)
    assert begun(house) == [1]
    if how == "finish":
        house.finish([pulled])
    elif how in ("give back", "died"):
        house.transitions.give_back(QUEUE, [pulled.lease], died=how == "died")
    elif how == "reap":
        house.transitions.reap(QUEUE, "w")
    elif how == "cancel":
        house.cancel([1])
    elif how == "lost":  # a stock tool failed it
        house.connection.hset(redis_keys.job(job_id(1)), "status", "failed")
        house.lapse(pulled.lease)
        house.transitions.settle(QUEUE, "failed", [(job_id(1), result_bytes(1, "failed"))])
    else:
        house.connection.zrem(redis_keys.registry("wip", QUEUE), *_members(house))
        assert house.transitions.mend(QUEUE, [job_id(1)]) == 1
    assert not house.connection.hexists(redis_keys.job(job_id(1)), "bkv_begun")


def _members(house: House) -> list[bytes]:
    return list(house.connection.zrange(redis_keys.registry("wip", QUEUE), 0, -1))


def test_a_tool_that_queues_a_job_again_leaves_no_mark(house: House) -> None:
    """Whom RQ's clean-up took it from had begun it; who has it in its backlog now has not."""
    (pulled, *_) = house.pull(5)
    house.lapse(pulled.lease)
    house.clean_up()
    assert begun(house) == [1, 2, 3, 4, 5]
    assert [line_of(p.lease) for p in house.pull(5, worker="v", num_begin=0)] == [1]
    assert begun(house) == [2, 3, 4, 5]
    assert house.transitions.reap(QUEUE, "v") == (1, 0)
    assert (deaths(house)[0], halves(house)[0]) == (0, 0)


@pytest.mark.parametrize("count", ["x", "1e3", "", "9" * 30, "-5"])
def test_a_count_of_deaths_that_is_none_begins_anew(house: House, count: str) -> None:
    """What somebody wrote there keeps no lease from being taken back."""
    key = redis_keys.job(job_id(1))
    house.connection.hset(key, "bkv_deaths", count)
    (pulled, other) = house.pull(2)
    assert pulled.num_deaths == 0
    house.transitions.give_back(QUEUE, [pulled.lease], died=True)
    assert house.connection.hget(key, "bkv_deaths") in (b"1", b"-4")
    house.lapse(other.lease)
    assert house.transitions.reap(QUEUE) == (1, 0)
    house.connection.hset(key, "bkv_deaths", count)
    house.pull(1)
    assert house.transitions.reap(QUEUE, "w") == (1, 0)


def test_suspects_are_passed_by_and_keep_their_place(house: House) -> None:
    """Who holds rows is given the others; with no others, nothing, and the queue is as it was."""
    for line in (1, 3, 4):
        house.connection.hset(redis_keys.job(job_id(line)), "bkv_deaths", 1)
    run = house.transitions.pull_run(QUEUE, "w", 5, LEASE_SECONDS, num_begin=1, knows_suspects=True)
    assert [line_of(job.lease) for job in run.jobs] == [2, 5]
    assert (run.num_passed, run.lengths, house.waiting()) == (3, (0, 3, 0), [1, 3, 4])
    assert begun(house) == [2]
    run = house.transitions.pull_run(QUEUE, "w", 5, LEASE_SECONDS, knows_suspects=True)
    assert (run.jobs, run.num_passed, house.waiting()) == ([], 3, [1, 3, 4])
    assert house.count("running") == 2


def test_suspects_at_the_head_are_taken_apart(house: House) -> None:
    """By who holds nothing, as many as begin; those that stand behind others are not."""
    house.transitions.give_back(QUEUE, [job.lease for job in house.pull(3)], died=True)

    def pull(count: int) -> tuple[list[int], bool, int]:
        run = house.transitions.pull_run(
            *(QUEUE, "w", count, LEASE_SECONDS),
            num_begin=2,
            knows_suspects=True,
            may_be_apart=True,
        )
        return [line_of(job.lease) for job in run.jobs], run.is_apart, run.num_passed

    assert pull(1) == ([1, 2], True, 0)
    assert begun(house) == [1, 2]
    house.connection.rpush(redis_keys.queue(QUEUE), house.connection.lpop(redis_keys.queue(QUEUE)))
    assert house.waiting() == [4, 5, 3]
    assert pull(5) == ([4, 5], False, 1)
    assert pull(5) == ([3], True, 0)


def test_no_lower_priority_is_taken_for_a_suspect(house: House) -> None:
    """A worker that would fill its backlog with what is less urgent would give it back at once."""
    house.transitions.give_back(QUEUE, [job.lease for job in house.pull(1)], died=True)
    house.connection.lmove(*[redis_keys.waiting(QUEUE, name) for name in ("normal", "high")])
    run = house.transitions.pull_run(QUEUE, "w", 5, LEASE_SECONDS, knows_suspects=True)
    assert (run.jobs, run.num_passed, run.lengths) == ([], 1, (1, 4, 0))


def test_reap_of_a_dead_worker_takes_only_its_jobs(house: House) -> None:
    """Leases of a worker known to be dead are taken back although they still run."""
    house.pull(2, worker="dead")
    house.pull(1, worker="alive")
    assert house.transitions.reap(QUEUE, "dead") == (2, 0)
    assert (house.waiting(), house.count("running")) == ([1, 2, 4, 5], 1)


def test_renew_names_what_was_lost(house: House) -> None:
    """A lease is prolonged while it is ours; a job that was canceled or deleted is named."""
    pulled = house.pull(3)
    house.cancel([1])
    house.connection.delete(redis_keys.job(job_id(2)))
    held = [p.lease for p in pulled]
    lost = house.transitions.renew(QUEUE, "w", held, LEASE_SECONDS, 90)
    assert lost == {job_id(1): "canceled", job_id(2): "deleted"}


# ---- settle, retry, sweep ----


def test_cancel_names_the_worker_that_was_running_it(house: House) -> None:
    """A queued row, a running row and an ended row give three different answers."""
    house.finish(house.pull(1))
    house.pull(1, worker="busy")
    assert house.cancel([1, 2, 3]) == ["", "busy", "done"]
    assert house.outcomes() == {1: "ok", 2: "canceled", 3: "canceled"}
    assert house.pull(5)[0].lease.job_id == job_id(4)


def test_retry_runs_failed_rows_again(house: House) -> None:
    """A failed row loses its result and is queued; an ok row and a bad row are left alone."""
    pulled = house.pull(2)
    house.finish(pulled[:1], "failed")
    house.finish(pulled[1:])
    assert house.transitions.retry(BATCH, QUEUE, [1, 2, 3]) == 1
    assert (house.outcomes(), house.count("failed")) == ({2: "ok"}, 0)
    assert house.waiting() == [3, 4, 5, 1]
    house.finish(house.pull(5))
    assert house.ended() == [1, 2, 3, 4, 5, 1]


@pytest.mark.parametrize("status", ["queued", "stopped", "finished", "scheduled"])
def test_retry_runs_a_failed_row_that_a_tool_marked_otherwise(house: House, status: str) -> None:
    """What the row's result says counts, not the status that a stock tool wrote; it ends once."""
    house.finish(house.pull(1), "failed")
    house.connection.hset(redis_keys.job(job_id(1)), "status", status)
    if status == "queued":
        house.connection.rpush(redis_keys.queue(QUEUE), job_id(1))
    assert house.transitions.retry(BATCH, QUEUE, [1]) == 1
    assert (house.outcomes(), house.count("failed")) == ({}, 0)
    house.finish(house.pull(9))
    assert house.ended().count(1) == 2 and house.outcomes()[1] == "ok"
    assert house.count("ok") == len(house.outcomes())
    assert house.transitions.retry(BATCH, QUEUE, [1]) == 0


def test_sweep_leaves_what_waits(house: House) -> None:
    """A sweep removes ended jobs of one batch from the list and nothing else."""
    house.connection.rpush(redis_keys.queue(QUEUE), "f" * 16 + "-1")
    house.cancel([2, 4])
    house.transitions.sweep(QUEUE, BATCH)
    assert house.waiting() == [1, 3, 5, 1]


def test_a_long_list_is_swept_in_pages(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the sweep cover the whole list."""
    monkeypatch.setattr("batchkv_producer.wire.transitions.SWEEP_ENTRIES", 2)
    house.cancel([1, 3, 5])
    house.transitions.sweep(QUEUE, BATCH)
    assert house.waiting() == [2, 4]


# ---- stock tools ----


def test_two_clean_ups_at_once_make_no_second_result(house: House) -> None:
    """Two ``rq info`` queue an abandoned job twice; it still ends once."""
    pulled = house.pull(5)
    for item in pulled:
        house.lapse(item.lease)
    threads = [threading.Thread(target=house.clean_up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = house.pull(10, worker="v")
    assert sorted(line_of(p.lease) for p in again) == [1, 2, 3, 4, 5]
    assert house.finish(again, worker="v") == ["ok"] * 5
    assert house.finish(pulled) == ["lost"] * 5
    assert (sorted(house.ended()), house.count("running")) == ([1, 2, 3, 4, 5], 0)


def test_a_job_that_a_tool_queued_again_after_its_end_is_not_run(house: House) -> None:
    """A clean-up that races with a finish can revive a finished job; nobody is given it."""
    pulled = house.pull(1)
    house.finish(pulled)
    # What the clean-up's pipeline writes when it had read the job before the finish.
    house.connection.hset(redis_keys.job(job_id(1)), "status", "queued")
    house.connection.rpush(redis_keys.queue(QUEUE), job_id(1))
    assert [line_of(p.lease) for p in house.pull(10)] == [2, 3, 4, 5]
    assert house.count("running") == 4


def test_a_stale_id_does_not_cost_a_lease(house: House) -> None:
    """An id that is in the list although its job runs is dropped; the lapsed lease is kept.

    It is all that tells ``reap`` that the job's holder has died.
    """
    (pulled, *_) = house.pull(1)
    house.connection.lpush(redis_keys.queue(QUEUE), job_id(1))
    house.lapse(pulled.lease)
    assert [line_of(p.lease) for p in house.pull(1)] == [2]
    assert house.transitions.reap(QUEUE) == (1, 0)
    assert house.waiting()[0] == 1


# ---- the model test ----

SNAPSHOT = """
local batch, total = KEYS[1], tonumber(ARGV[1])
local held, unended_unheld = 0, 0
for line = 1, total do
  local execution = redis.call('HGET', 'rq:job:' .. ARGV[2] .. '-' .. line, 'bkv_exec')
  local is_held = execution and execution ~= ''
  if is_held then held = held + 1
  elseif redis.call('HEXISTS', 'batchkv:res:' .. ARGV[2], line) == 0 then
    unended_unheld = unended_unheld + 1
  end
end
local c = redis.call('HMGET', batch, 'ok', 'failed', 'canceled', 'running')
return {tonumber(c[1]), tonumber(c[2]), tonumber(c[3]), tonumber(c[4]), held, unended_unheld,
        redis.call('HLEN', 'batchkv:res:' .. ARGV[2])}
"""


class Actors:
    """Three workers, a client and the stock tools, doing random things to one house."""

    workers = ("a", "b", "c")

    def __init__(self, house: House, seed: int, num_chunks: int, chunk_rows: int) -> None:
        self.house, self.random = house, random.Random(seed)
        self.num_chunks, self.chunk_rows = num_chunks, chunk_rows
        self.held: dict[str, list[Pulled]] = {worker: [] for worker in self.workers}
        self.ended: Counter[int] = Counter()
        self.snapshot = house.connection.register_script(SNAPSHOT)
        self.moves: list[Callable[[], None]] = [
            *(self.submit,) * 2,
            *(self.pull,) * 4,
            *(self.finish,) * 4,
            *(self.lapse,) * 2,
            self.renew,
            self.give_back,
            self.reap,
            self.reap_dead,
            self.clean_up,
            self.heal,
            self.cancel,
            self.retry,
            self.cancel_with_rq,
            self.requeue_with_rq,
        ]

    def step(self) -> None:
        self.random.choice(self.moves)()

    def worker(self) -> str:
        return self.random.choice(self.workers)

    def some(self, worker: str) -> list[Pulled]:
        held = self.held[worker]
        return self.random.sample(held, self.random.randint(0, len(held)))

    def submit(self) -> None:
        chunk = self.random.randrange(self.num_chunks)
        first = chunk * self.chunk_rows + 1
        self.house.submit(chunk, range(first + 1, first + self.chunk_rows), range(first, first + 1))

    def pull(self) -> None:
        worker = self.worker()
        num_begin = self.random.choice((None, 0, 2))
        self.held[worker] += self.house.pull(self.random.randint(1, 6), worker, num_begin)

    def finish(self) -> None:
        worker = self.worker()
        chosen = self.some(worker)
        outcome = self.random.choice(("ok", "ok", "failed"))
        self.house.finish(chosen, outcome, worker)
        self.drop(worker, chosen)

    def renew(self) -> None:
        worker = self.worker()
        leases = [p.lease for p in self.held[worker]]
        self.house.transitions.renew(QUEUE, worker, leases, LEASE_SECONDS, 90)

    def give_back(self) -> None:
        worker = self.worker()
        chosen = self.some(worker)
        leases = [p.lease for p in chosen]
        self.house.transitions.give_back(QUEUE, leases, died=self.random.random() < 0.3)
        self.drop(worker, chosen)

    def lapse(self) -> None:
        """A worker sleeps: its leases end, but it does not know."""
        for pulled in self.some(self.worker()):
            self.house.lapse(pulled.lease)

    def reap(self) -> None:
        self.house.transitions.reap(QUEUE, limit=self.random.choice((1, 1000)))

    def reap_dead(self) -> None:
        """A worker dies, and its parent knows."""
        worker = self.worker()
        self.held[worker] = []
        self.house.transitions.reap(QUEUE, worker)

    def clean_up(self) -> None:
        self.house.clean_up()

    def heal(self) -> None:
        self.house.heal()

    def cancel(self) -> None:
        if self.random.random() < 0.3:
            self.house.cancel([self.random.randint(1, self.house.total)])

    def cancel_with_rq(self) -> None:
        """Somebody presses "cancel" in a dashboard."""
        line = self.random.randint(1, self.house.total)
        if self.random.random() < 0.3 and self.house.status(line) in ("queued", "started"):
            connection = self.house.connection
            with suppress(InvalidJobOperation):  # a clean-up was quicker
                Job.fetch(job_id(line), connection=connection, serializer=JSONSerializer).cancel()

    def requeue_with_rq(self) -> None:
        """Somebody types ``rq requeue --all``, without knowing of ``batchkv retry``."""
        if self.random.random() < 0.1:
            queue = Queue(QUEUE, connection=self.house.connection, serializer=JSONSerializer)
            registry = FailedJobRegistry(queue=queue)
            for failed in registry.get_job_ids(cleanup=False):
                registry.requeue(failed)

    def retry(self) -> None:
        outcome = self.random.choice(("failed", "failed", "canceled"))
        ended = [line for line, end in self.house.outcomes().items() if end == outcome]
        lines = self.random.sample(ended, self.random.randint(0, len(ended)))
        self.house.transitions.retry(BATCH, QUEUE, lines, outcome=outcome)

    def drop(self, worker: str, chosen: list[Pulled]) -> None:
        self.held[worker] = [p for p in self.held[worker] if p not in chosen]

    def check(self) -> None:
        """The books balance, whatever has happened."""
        args = [self.house.total, BATCH]
        ok, failed, canceled, running, held, open_rows, num_results = self.snapshot(
            keys=[redis_keys.batch(BATCH)], args=args
        )
        queued = self.house.total - ok - failed - canceled - running
        assert ok + failed + canceled == num_results
        assert running == held
        assert queued == open_rows

    def check_outcomes(self) -> None:
        """The counters are the counts of the results; who has a result stands in the order."""
        outcomes = self.house.outcomes()
        counted = Counter(outcomes.values())
        for name in ("ok", "failed", "canceled"):
            assert self.house.count(name) == counted[name]
        assert set(outcomes) <= set(self.house.ended())

    def drain(self) -> None:
        """Everybody dies, one good worker comes: the batch must end."""
        for chunk in range(self.num_chunks):
            first = chunk * self.chunk_rows + 1
            lines = range(first + 1, first + self.chunk_rows)
            self.house.submit(chunk, lines, range(first, first + 1))
        wip = redis_keys.registry("wip", QUEUE)
        for member in self.house.connection.zrange(wip, 0, -1):
            self.house.lapse(JobLease(*member.decode().rsplit(":", 1)))
        self.house.transitions.reap(QUEUE)
        self.house.heal()
        while pulled := self.house.pull(10, "last"):
            self.house.finish(pulled, "ok", "last")
            self.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_moves_keep_the_books(redis_connection: Redis, seed: int) -> None:
    """Whatever order things happen in: one result a row, counters that add up, nothing left."""
    num_chunks, chunk_rows = 5, 8
    house = House(redis_connection, num_chunks * chunk_rows, num_chunks)
    actors = Actors(house, seed, num_chunks, chunk_rows)
    for _ in range(150):
        actors.step()
        actors.check()
    actors.check_outcomes()
    finish_and_check(house, actors)


@pytest.mark.parametrize("seed", range(3))
def test_random_moves_with_concurrent_clean_ups(redis_connection: Redis, seed: int) -> None:
    """The same while two threads clean the registries without end, as dashboards do."""
    num_chunks, chunk_rows = 5, 8
    house = House(redis_connection, num_chunks * chunk_rows, num_chunks)
    actors = Actors(house, 1000 + seed, num_chunks, chunk_rows)
    is_over = threading.Event()

    def clean_without_end() -> None:
        while not is_over.wait(0.001):
            house.clean_up()

    threads = [threading.Thread(target=clean_without_end) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            actors.step()
            actors.check()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    finish_and_check(house, actors)


def finish_and_check(house: House, actors: Actors) -> None:
    """Run the batch to its end: every row has a result, and no key of a job in flight is left."""
    actors.drain()
    actors.check()
    actors.check_outcomes()
    assert sorted(house.outcomes()) == list(range(1, house.total + 1))
    assert house.count("running") == 0
    assert house.waiting() == []
    assert house.connection.zcard(redis_keys.registry("wip", QUEUE)) == 0
    assert list(house.connection.scan_iter("rq:execution*")) == []
    assert begun(house) == []


def test_a_lease_of_one_second_lapses_by_itself(house: House) -> None:
    """A lease that nobody renews ends by the server's clock."""
    house.transitions.pull(QUEUE, "w", 2, 1)
    assert house.transitions.reap(QUEUE) == (0, 0)
    time.sleep(1.1)
    assert house.transitions.reap(QUEUE) == (2, 0)
    assert house.waiting() == [1, 2, 3, 4, 5]
