"""Workers of a queue that leave rows to each other: nobody waits for one that takes none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.maker import Maker
from batchkv_worker.queue import job_puller, pacing
from batchkv_worker.queue.job_puller import Limits
from batchkv_worker.queue.runs import pace
from support.worker_harness import QUEUE, submit, wait_until, waiting_lines
from worker.queue.test_job_puller import Desk, tell

FAST = "90000.0 0 0 8 0 0"  # nothing held, eight free slots
NUM_STALE = 10_000


def slow_desk(connection: Redis, limits: Limits | None = None) -> Desk:
    """A worker that knows that it is slow, in a queue with a fast one that has nothing to do."""
    desk = Desk(connection, limits or Limits(burst=True))
    connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    tell(connection, "fast", FAST)
    desk.puller.pacing.meter.add_computed(10_000, 0, 10.0, 8)
    desk.look()
    desk.look()
    return desk


def test_a_slow_burst_ends_with_the_queue(redis_connection: Redis) -> None:
    """It leaves the last rows to a faster worker, and does not wait for more of them."""
    submit(redis_connection, ["p"])
    desk = slow_desk(redis_connection)
    assert not desk.look()
    assert not desk.puller.is_spent()
    redis_connection.delete(redis_keys.queue(QUEUE))  # the fast one has it
    desk.look()
    assert desk.puller.is_spent()


def test_a_slow_worker_ends_when_it_was_idle_for_long(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for rows of the empty queue as any other worker does, and counts that time."""
    monkeypatch.setattr(job_puller, "FIRST_WAIT_SECONDS", 0.02)
    desk = slow_desk(redis_connection, Limits(max_idle_seconds=0.0))
    assert desk.puller.pull_at() < math.inf
    assert not desk.puller.is_spent()
    assert desk.refill() == []
    assert desk.puller.is_spent()
    submit(redis_connection, ["p"])
    assert desk.refill() == []  # left to the fast one
    assert not desk.puller.is_spent(), "a row waits"


def test_who_takes_nothing_is_waited_for_once(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast worker is there and takes no row. The slow one fills all its slots after a while, and
    goes on without a further pause."""
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(pace, "MUTE_SECONDS", 60.0)
    submit(redis_connection, ["p"] * 12)
    for name in ("one", "two", "three"):
        tell(redis_connection, name, "1000.0 0 1 0 0 0")  # away
    desk = slow_desk(redis_connection)
    wait_until(desk.look)
    assert desk.refill() == [*range(1, 9)]
    desk.end(*range(1, 5))
    desk.store()
    assert desk.look(), "no second pause"
    assert desk.refill() == [*range(5, 13)]


def test_rows_wait_no_longer_since_the_slow_worker_has_some(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has free slots and one long row. After the same time it takes the others, too."""
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(pace, "MUTE_SECONDS", 60.0)
    desk = Desk(redis_connection)
    submit(redis_connection, ["p"], name="first")
    desk.look()
    assert desk.refill() == [1]
    submit(redis_connection, ["p"] * 3, name="second")
    redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    tell(redis_connection, "fast", FAST)
    desk.puller.pacing.meter.add_computed(10_000, 0, 10.0, 8)
    monkeypatch.setattr(desk.puller.giving, "hand_over", lambda view: None)
    desk.side.poll([], "1.0 0 0 0 0 0")
    assert not desk.look()
    wait_until(desk.look)
    assert len(desk.refill()) == 4


def test_nothing_is_left_to_a_worker_that_has_died(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still listed, but tells nothing new. One that tells something counts."""
    monkeypatch.setattr(pace, "MUTE_SECONDS", 0.1)
    submit(redis_connection, ["p"] * 3)
    desk = slow_desk(redis_connection)
    assert not desk.look()
    wait_until(desk.look)
    assert desk.puller.pacing.is_patient
    tell(redis_connection, "fast", "90000.0 0 0 8 7 0")
    assert not desk.look()


def test_who_takes_no_rows_says_so(redis_connection: Redis) -> None:
    """A worker is away when its limit is reached, when another queue has its turn, and when all
    rows that wait are for others; not when it just has enough."""
    desk = Desk(redis_connection, Limits(max_jobs=2))
    submit(redis_connection, ["p"] * 4)
    desk.look()
    assert not desk.puller.is_away
    assert desk.refill() == [1, 2]
    assert desk.puller.is_away
    other = Desk(redis_connection)
    assert not other.puller.is_away
    other.state.next_queue = "another"
    assert other.puller.is_away


def test_rows_for_others_are_not_given_back_for_this_worker(redis_connection: Redis) -> None:
    """It is away while only such rows wait, and for a while after they are gone. The first row of
    its own ends that."""
    batch = submit(redis_connection, ["p"] * 3)
    redis_connection.hset(redis_keys.batch(batch), mapping={"scheme": "turbo4", "dtype": "float16"})
    desk = Desk(redis_connection)
    desk.side.maker = Maker("", "affine8", "float32")
    desk.look()
    assert desk.refill() == []
    assert desk.puller.is_away
    redis_connection.delete(redis_keys.queue(QUEUE))
    desk.look()
    assert desk.puller.is_away, "they are with another worker"
    submit(redis_connection, ["p"], name="own")
    desk.puller.pull_now()
    desk.look()
    assert desk.refill() == [1]
    assert not desk.puller.is_away


def test_who_serves_another_queue_is_silent_in_the_former(redis_connection: Redis) -> None:
    """Its last pace is deleted there. The names of the former queue are not used in the next."""
    desk = slow_desk(redis_connection)
    key = redis_keys.paces(QUEUE)
    assert redis_connection.hexists(key, "w")
    desk.state.next_queue = "another"
    desk.puller.switch()
    assert desk.puller.pacing.crowd().others == ()
    desk.side.poll([], "1.0 0 0 0 0 0")
    assert redis_connection.hkeys(key) == [b"fast"]
    desk.state.next_queue = QUEUE
    desk.puller.switch()
    desk.look()
    desk.look()
    assert redis_connection.hexists(key, "w")


def test_a_hash_of_stale_names_is_cleared(redis_connection: Redis) -> None:
    """Also names that are no text. A server that was misused costs one call."""
    key = redis_keys.paces(QUEUE)
    stale: dict[str | bytes, str] = {f"gone{number}": FAST for number in range(NUM_STALE)}
    redis_connection.hset(key, mapping={**stale, b"\xff\xfe": "nan nan 7"})
    desk = slow_desk(redis_connection)
    assert len(desk.puller.pacing.crowd().others) == 1
    desk.look()
    assert sorted(redis_connection.hkeys(key)) == [b"fast", b"w"]


def test_suspects_are_never_handed_over(redis_connection: Redis) -> None:
    """A row that may have killed its worker stays with the one that took it apart."""
    batch = submit(redis_connection, ["p"])
    redis_connection.hset(f"rq:job:{batch}-1", "bkv_deaths", 1)
    redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    desk = Desk(redis_connection)
    desk.look()
    assert desk.refill() == [1]
    desk.puller.pacing.meter.add_computed(10_000, 0, 10.0, 8)
    tell(redis_connection, "fast", FAST)
    desk.look()
    desk.look()
    assert waiting_lines(redis_connection) == []
    assert len(desk.in_flight) == 1


def test_what_has_changed_is_told_soon(redis_connection: Redis) -> None:
    """Also when all are soon done. A worker that is alone has no hurry."""
    alone = Desk(redis_connection).puller.pacing
    alone.note_change()
    alone.note_seconds_left(1.0)
    assert alone.poll_seconds() == math.inf
    told = slow_desk(redis_connection).puller.pacing
    told.poll_seconds()
    told.note_change()
    assert told.poll_seconds() == pacing.NEWS_SECONDS
    told.note_seconds_left(1.0)
    assert told.poll_seconds() == pacing.QUICK_POLL_SECONDS
    told.note_seconds_left(pacing.END_SECONDS)
    assert told.poll_seconds() == math.inf


def test_full_workers_are_waited_for(redis_connection: Redis) -> None:
    """Patience ends only for workers that could begin rows at once and take none."""
    submit(redis_connection, ["p"])
    desk = slow_desk(redis_connection)
    for free, is_left in ((0, False), (8, True)):
        tell(redis_connection, "fast", f"90000.0 0 0 {free} {free} 0")
        desk.look()
        assert (desk.puller.pacing.num_left > 0) == is_left


def test_what_a_full_worker_has_computed_since_counts(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known when a worker told its pace, and at which speed it goes on."""
    now = [1000.0]
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    desk = slow_desk(redis_connection)
    tell(redis_connection, "fast", "1000.0 9000 0 0 1 0")
    desk.look()
    (fast,) = desk.puller.pacing.crowd().others
    assert fast.held == 9000
    now[0] += 2.0
    (fast,) = desk.puller.pacing.crowd().others
    assert fast.held == 7000
    desk.look()  # it has told nothing new
    (fast,) = desk.puller.pacing.crowd().others
    assert fast.held == 7000
    now[0] += 1.0
    (fast,) = desk.puller.pacing.crowd().others
    assert fast.held == 6000
