"""Where a run ends: before another prefix, on a real server, if workers share the queue."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path

from redis import Redis

from batchkv_producer import Client
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transitions import Transitions

BATCH, QUEUE = "0123456789abcdef", redis_keys.queue_name("m")
LEASE_SECONDS = 60


def queued(connection: Redis, *groups: int, shared: int = 600) -> Transitions:
    """A queue of so many jobs behind each prefix."""
    transitions = Transitions(connection)
    total = sum(groups)
    fields = {"digest": "d" * 64, "model": "m", "queue": QUEUE, "total": total, "num_chunks": 1}
    transitions.create(BATCH, fields)
    firsts = {1 + sum(groups[:number]) for number in range(len(groups))}
    jobs = [(line, b"{}", shared) for line in range(1, total + 1)]
    transitions.submit(BATCH, QUEUE, 0, jobs, [], 3600, starts=firsts)
    return transitions


def pull(transitions: Transitions, count: int, fewest: int | None = None) -> list[int]:
    """The lines of a run."""
    run = transitions.pull_run(QUEUE, "w", count, LEASE_SECONDS, fewest=fewest)
    return [int(job.lease.job_id.split("-")[1]) for job in run.jobs]


def test_a_run_ends_before_another_prefix(redis_connection: Redis) -> None:
    """16 jobs are asked for, and 12 are enough. The last of the places counts, and all that was
    asked for is as good as any."""
    transitions = queued(redis_connection, 7, 5, 2, 13, 16, 9, 7)
    assert pull(transitions, 16, 12) == [*range(1, 15)]
    assert pull(transitions, 16, 12) == [*range(15, 28)]
    assert pull(transitions, 16, 12) == [*range(28, 44)]
    assert pull(transitions, 16, 12) == [*range(44, 60)]


def test_a_run_is_never_shorter_than_what_is_enough(redis_connection: Redis) -> None:
    """A prefix that begins earlier is divided: a worker has to fill its slots."""
    transitions = queued(redis_connection, 11, 30, 30)
    assert pull(transitions, 16, 12) == [*range(1, 17)]
    assert pull(transitions, 2, 1) == [17, 18]
    assert pull(transitions, 1, 1) == [19]
    assert pull(transitions, 0, 0) == []


def test_a_run_is_as_long_as_asked_where_nothing_less_is_enough(redis_connection: Redis) -> None:
    """Near the end of a queue, and with one worker."""
    transitions = queued(redis_connection, 14, 14, 14)
    assert pull(transitions, 16) == [*range(1, 17)]
    assert pull(transitions, 16, 16) == [*range(17, 33)]


def test_jobs_that_share_nothing_are_taken_as_many_as_asked(redis_connection: Redis) -> None:
    """So are those of producers that did not say what jobs share, or said nonsense, and jobs
    whose keys or ids are not what they should be."""
    transitions = queued(redis_connection, 60, shared=0)
    assert pull(transitions, 16, 12) == [*range(1, 17)]
    redis_connection.hdel(redis_keys.job(f"{BATCH}-33"), "bkv_shared")
    redis_connection.hset(redis_keys.job(f"{BATCH}-32"), "bkv_shared", "all of it")
    redis_connection.delete(redis_keys.job(f"{BATCH}-31"))
    redis_connection.set(redis_keys.job(f"{BATCH}-31"), "a text")
    list_key = redis_keys.queue(QUEUE)
    redis_connection.lset(list_key, 13, "no id: " + "x" * 300)  # line 30's
    redis_connection.hdel(redis_keys.job(f"{BATCH}-29"), "bkv_shared")
    assert pull(transitions, 16, 12) == [*range(17, 30), 32, 33, 34]
    assert pull(transitions, 40, 12) == [*range(35, 61)]


def test_the_end_of_a_queue_is_taken_whole(redis_connection: Redis) -> None:
    """Nothing comes after it, so that nothing is divided."""
    transitions = queued(redis_connection, 14, 2)
    assert pull(transitions, 16, 12) == [*range(1, 17)]


def test_urgent_jobs_for_others_do_not_shorten_a_run(redis_connection: Redis) -> None:
    """A job of high priority waits for a worker with other weights. The run is of the next list,
    and as long as that allows."""
    transitions = queued(redis_connection, 14, 40)
    other = "fedcba9876543210"
    fields = {"digest": "e" * 64, "model": "m", "queue": QUEUE, "total": 1, "num_chunks": 1}
    transitions.create(other, {**fields, "priority": "high"}, {"fingerprint": "theirs"})
    transitions.submit(other, QUEUE, 0, [(1, b"{}", 0)], [], 3600)
    for fewest, lines in ((12, range(1, 15)), (16, range(15, 31))):
        run = transitions.pull_run(
            QUEUE,
            "w",
            16,
            LEASE_SECONDS,
            2,
            fewest=fewest,
            maker=Maker("ours", "affine8", "float32"),
        )
        assert [int(job.lease.job_id.split("-")[1]) for job in run.jobs] == [*lines]


def test_two_workers_divide_no_group_of_a_file(tmp_path: Path, redis_connection: Redis) -> None:
    """Rows behind examples of their own, in any order in the file, submitted as a user does: no
    prefix is in two runs. Workers still read how much of each row others begin with."""
    words, rows = random.Random(7), list[str]()
    for group in range(20):
        examples = " ".join(str(words.randrange(10**6)) for _ in range(400))
        rows += [
            json.dumps({"custom_id": f"{group}-{row}", "prompt": f"{examples} {row} ?"})
            for row in range(17)
        ]
    words.shuffle(rows)
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(rows), "utf-8")
    queue = Client(redis_connection).submit(file, model="m").queue
    groups: list[list[str]] = []
    transitions, names = (
        Transitions(redis_connection),
        [json.loads(row)["custom_id"] for row in rows],
    )
    while jobs := transitions.pull_run(queue, "w", 128, LEASE_SECONDS, fewest=96).jobs:
        assert all(job.shared_bytes and job.shared_bytes > 2000 for job in jobs)
        lines = [int(job.lease.job_id.split("-")[1]) for job in jobs]
        of_jobs = [names[line - 1].split("-")[0] for line in lines]
        groups.append([group for group, _ in groupby(of_jobs)])
    assert [len(run) for run in groups] == [7, 7, 6]
    assert len({group for run in groups for group in run}) == 20
