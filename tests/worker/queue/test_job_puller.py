"""Which jobs the puller asks for while suspects wait. Turns follow each other without a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, SamplingParams, Usage, encode_job
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Completed
from batchkv_worker.queue import giving_back, job_puller, pacing
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.job_puller import JobPuller, Limits
from batchkv_worker.queue.redis_side import RedisSide
from batchkv_worker.queue.runs import returns
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan
from support.worker_harness import MODEL, QUEUE, submit, wait_until, waiting_lines


class Desk:
    """A job puller between a real queue and an engine that never starts."""

    def __init__(self, connection: Redis, limits: Limits = Limits(burst=True)) -> None:  # noqa: B008
        self.in_flight = InFlight(MODEL, "w")
        self.state = WorkerState(self.in_flight, StopRequest(lambda: None))
        self.state.is_ready, self.state.is_suspended = True, False
        engine = EngineThread(lambda: FakeEngine(8, 0, FakePlan()))
        engine.num_slots = engine.max_in_flight = 8
        settings = WorkerSettings(model=MODEL)
        self.side = RedisSide(
            *(connection, QUEUE, "w", settings), register=lambda: None, set_state=lambda state: None
        )
        self.puller = JobPuller(
            *(self.side, engine, self.state, limits, lambda call: call()),
            [QUEUE],
        )

    def look(self) -> bool:
        """What a turn does once a second; whether jobs are wanted then."""
        self.puller.note_poll(self.side.poll(self.in_flight.leases, "1000.0 0 0 0 0 0"))
        return self.puller.wants_jobs()

    def refill(self) -> list[int]:
        """Ask for jobs; the lines that are held then."""
        self.puller.refill()
        return [int(lease.job_id.split("-")[1]) for lease in self.in_flight.leases]

    def end(self, *lines: int) -> None:
        """Rows end in the engine; Redis does not know it yet."""
        for lease in self.in_flight.started:
            if int(lease.job_id.split("-")[1]) in lines:
                self.state.end(Completed(lease.job_id, "x", "stop", Usage(1, 1, 0)))

    def store(self) -> None:
        """Redis is told what has ended."""
        self.side.finish(self.state.results, self.in_flight.unreported)
        self.state.note_stored(len(self.state.results))


@pytest.fixture
def desk(redis_connection: Redis) -> Desk:
    return Desk(redis_connection)


@pytest.fixture
def queue(redis_connection: Redis) -> Callable[..., str]:
    """Queues so many rows, some of which saw a death."""

    def make(total: int, suspects: list[int], name: str = "batch") -> str:
        batch = submit(redis_connection, ["p"] * total, name=name)
        for line in suspects:
            redis_connection.hset(f"rq:job:{batch}-{line}", "bkv_deaths", 1)
        make.batch = batch  # type: ignore[attr-defined]
        return batch

    return make


def test_nothing_runs_beside_suspects(desk: Desk, queue: Any, redis_connection: Redis) -> None:
    """Not even when no others wait any more; what comes after them waits until Redis knows how they
    ended, lest that counts for the next one's death."""
    queue(6, [1, 2, 4])
    redis_connection.hset(f"rq:job:{queue.batch}-4", "bkv_suspect", "another")
    assert desk.look() and desk.refill() == [1, 2]
    assert not desk.look()
    desk.end(1)
    desk.store()
    assert not desk.look()
    desk.end(2)
    assert not desk.look()
    desk.store()
    assert waiting_lines(redis_connection) == [3, 4, 5, 6]
    assert desk.look() and desk.refill() == [3, 5, 6]
    desk.end(3, 5, 6)
    desk.store()
    assert desk.look() and desk.refill() == [4]
    assert not desk.look()


def test_who_holds_rows_lets_suspects_wait(desk: Desk, queue: Any, redis_connection: Redis) -> None:
    """It holds some as long as Redis thinks so, and takes what stands behind the suspects; a burst
    does not end with suspects in the queue."""
    queue(1, [], name="first")
    assert desk.refill() == [1]
    queue(3, [1, 2])
    assert desk.look() and desk.refill() == [1, 3]
    assert waiting_lines(redis_connection) == [1, 2]
    assert not desk.puller.is_exhausted and not desk.puller.is_spent()
    queue(1, [], name="more")
    assert desk.look() and desk.refill() == [1, 3, 1]
    desk.end(1, 3)
    assert desk.look() and desk.refill() == []
    desk.store()
    assert desk.look() and desk.refill() == [1, 2]


def test_what_has_ended_is_stored_before_suspects_run(desk: Desk, queue: Any) -> None:
    """Else it would count for their death."""
    queue(1, [], name="first")
    assert desk.refill() == [1]
    queue(2, [1])
    desk.end(1)
    assert desk.look() and desk.refill() == [2]
    desk.end(2)
    assert desk.look() and desk.refill() == []
    desk.store()
    assert desk.look() and desk.refill() == [1]


def test_who_finds_only_suspects_asks_once_a_second(desk: Desk, queue: Any) -> None:
    """A worker with room and nothing to take beside them does not ask again and again."""
    queue(1, [], name="first")
    assert desk.refill() == [1]
    queue(2, [1, 2])
    before = time.monotonic()
    assert desk.look() and desk.refill() == [1]
    assert desk.puller.pull_at() >= before + job_puller.PASSED_SECONDS


def test_one_worker_empties_itself_for_suspects_that_wait_too_long(
    queue: Any, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute one of those that passed them by takes nothing more until it holds nothing;
    the others go on."""
    one, two = Desk(redis_connection), Desk(redis_connection)
    for desk in (one, two):
        queue(1, [], name=f"first {id(desk)}")
        assert desk.refill() == [1]
    queue(3, [1, 2])
    assert one.look() and one.refill() == [1, 3]
    assert two.look() and two.refill() == [1]
    queue(2, [], name="more")
    assert one.look() and two.look()
    monkeypatch.setattr(job_puller, "APART_WAIT_SECONDS", 0.0)
    assert not one.look() and two.look()
    assert len(two.refill()) == 3
    one.end(1, 3)
    one.store()
    assert one.look() and one.refill() == [1, 2]
    assert not redis_connection.exists(redis_keys.apart_lock(QUEUE))


def test_a_worker_goes_on_when_others_took_the_suspects(
    desk: Desk, queue: Any, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once a second by one that empties itself; another may do so for the next ones."""
    monkeypatch.setattr(job_puller, "APART_WAIT_SECONDS", 0.0)
    queue(1, [], name="first")
    assert desk.refill() == [1]
    queue(4, [1, 2])
    assert desk.look() and desk.refill() == [1, 3, 4]
    queue(2, [], name="more")
    assert not desk.look()
    for _ in range(2):
        redis_connection.lpop(redis_keys.queue(QUEUE))
    assert desk.look() and len(desk.refill()) == 5
    assert not redis_connection.exists(redis_keys.apart_lock(QUEUE))


def test_a_group_has_no_backlog(desk: Desk, queue: Any, redis_connection: Redis) -> None:
    """Of suspects as many are taken as the engine begins at once, whatever a share would be; the
    rest is the next group's turn."""
    queue(12, list(range(1, 11)))
    assert desk.refill() == list(range(1, 9))
    assert desk.in_flight.num_waiting == 0
    assert waiting_lines(redis_connection) == [9, 10, 11, 12]


@pytest.mark.parametrize("head", ["planted", "x" * 500, "\u202e"])
def test_a_head_that_is_no_job_is_no_suspect(
    desk: Desk, queue: Any, redis_connection: Redis, head: str
) -> None:
    """What stands at the head of the queue, and under its name, may be anything."""
    queue(2, [2])
    assert desk.refill() == [1]
    redis_connection.set(f"rq:job:{head}", "text")
    redis_connection.lpush(redis_keys.queue(QUEUE), head)
    assert not desk.side.is_next_suspect()
    assert desk.look() and desk.refill() == [1]
    assert waiting_lines(redis_connection) == [2]
    assert desk.side.is_next_suspect()


def test_who_has_died_here_is_looked_at_before_the_first_pull(redis_connection: Redis) -> None:
    """Also when an outage put the maintenance off: later, what is held under our name is ours."""
    submit(redis_connection, ["a", "b"])
    lengths: list[int] = []
    side = RedisSide(
        *(redis_connection, QUEUE, "w", WorkerSettings(model=MODEL)),
        register=lambda: None,
        set_state=lambda state: None,
        look_around=lambda: lengths.append(len(waiting_lines(redis_connection))),
    )
    side.pull(1, 1, fewest=1, num_begin=1, may_be_apart=True)
    side.pull(1, 1, fewest=1, num_begin=1, may_be_apart=True)
    assert lengths == [2]


def test_jobs_with_choices_are_taken_by_their_choices(desk: Desk, redis_connection: Redis) -> None:
    """Until a row has started its choices are not known. What does not start after the first pull
    goes back, since a death would count for it. Later pulls count choices."""

    def four_choices(prompt: str) -> bytes:
        params = SamplingParams(n=4)
        return encode_job(Request("c", "completion", prompt=prompt, params=params))

    batch = submit(redis_connection, ["p"] * 100, data=four_choices)
    assert desk.look() and desk.refill() == [1, 2]
    assert (desk.in_flight.num_started, desk.in_flight.num_waiting) == (8, 0)
    assert waiting_lines(redis_connection) == [*range(3, 101)]
    begun = [redis_connection.hexists(f"rq:job:{batch}-{n}", "bkv_begun") for n in range(1, 101)]
    assert begun == [True] * 2 + [False] * 98
    desk.end(1)
    desk.store()
    assert desk.look() and desk.refill() == [2, *range(3, 35)]  # a run of 128 rows is 32 jobs
    assert (desk.in_flight.num_started, desk.in_flight.num_waiting) == (8, 31)


def tell(connection: Redis, name: str, pace: str) -> None:
    """Another worker serves the queue and tells its pace."""
    connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker(name))
    connection.hset(redis_keys.paces(QUEUE), name, pace)


def test_workers_tell_each_other_their_pace(redis_connection: Redis, desk: Desk) -> None:
    """From the second look on, if there are others; what a gone worker told is deleted."""
    redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    assert not desk.side.poll([], "1.0 2 0 3").paces  # alone, as far as it knows
    tell(redis_connection, "other", "5.0 6 0 7")
    redis_connection.hset(redis_keys.paces(QUEUE), "gone", "1.0 1 0 1")
    desk.side.poll([], "1.0 2 0 3")
    poll = desk.side.poll([], "1.0 2 0 3")
    assert poll.workers == {"w", "other"}
    assert poll.paces["other"] == "5.0 6 0 7"
    desk.side.poll([], "1.0 2 0 3")
    found = redis_connection.hgetall(redis_keys.paces(QUEUE))
    assert found == {b"w": b"1.0 2 0 3", b"other": b"5.0 6 0 7"}
    assert redis_connection.ttl(redis_keys.paces(QUEUE)) > 0


def test_a_server_that_refuses_paces_does_no_harm(redis_connection: Redis, desk: Desk) -> None:
    """An older hub does not allow the key. The poll has everything else."""
    tell(redis_connection, "other", "5.0 6 0 7")
    desk.side.poll([], "1.0 2 0 3")
    redis_connection.delete(redis_keys.paces(QUEUE))
    redis_connection.set(redis_keys.paces(QUEUE), "refuses every command of hashes")
    poll = desk.side.poll([], "1.0 2 0 3")
    assert poll.paces == {}
    assert poll.workers == {"other"}


def test_jobs_are_asked_for_before_the_rows_ahead_run_out(desk: Desk, queue: Any) -> None:
    """Rows of all slots may end at once: those that wait must last until the next are prepared."""
    desk.puller._engine.max_in_flight = 8 + 16
    queue(24, [], name="first")
    assert desk.look() and len(desk.refill()) == desk.in_flight.num_started == 24
    queue(8, [], name="more")
    desk.end(1, 2, 3)
    assert not desk.look(), "a round trip brings several"
    desk.end(4)
    assert desk.look() and len(desk.refill()) == 28


def test_waits_on_the_server_are_short_at_first(
    redis_connection: Redis, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a run is over its worker has just become idle, and is asked to end. Also after the next
    jobs."""
    waits: list[float] = []
    real = desk.side.wait_for_job

    def wait(seconds: float) -> tuple[int, ...]:
        waits.append(seconds)
        return real(min(seconds, 0.01))

    monkeypatch.setattr(desk.side, "wait_for_job", wait)
    desk.puller._limits = Limits()
    first, later = job_puller.FIRST_WAIT_SECONDS, job_puller.IDLE_WAIT_SECONDS
    assert desk.refill() == desk.refill() == desk.refill() == []
    assert waits == [first] * 2, "the first time, the queue was not known to be empty"
    assert desk.puller._idle_since is not None
    desk.puller._idle_since -= job_puller.FIRST_SECONDS
    desk.refill()
    assert waits == [first] * 2 + [later]
    submit(redis_connection, ["p"])
    assert desk.refill() == [1]
    desk.end(1)
    desk.store()
    desk.refill()
    desk.refill()
    assert waits[3:] == [later, first], "it has worked meanwhile"


def test_a_slow_worker_leaves_the_last_row_for_a_while(
    redis_connection: Redis, desk: Desk, queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faster worker should take it. If none does, the slow one takes it in the end."""
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 0.2)
    queue(1, {})
    redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    tell(redis_connection, "fast", "90000.0 0 0 8 0 0")
    meter = desk.puller.pacing.meter
    meter.add_computed(10_000, 0, 10.0, 8)
    assert meter.row_seconds > 0
    desk.look()
    assert not desk.look()
    assert desk.refill() == []
    wait_until(desk.look)
    assert desk.refill() == [1]


def test_the_last_rows_are_handed_over_once(
    redis_connection: Redis, desk: Desk, queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A much faster worker with free slots gets rows that have begun here; each goes once."""
    monkeypatch.setattr(giving_back, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(returns, "COOL_SECONDS", 0.0)
    queue(2, {})
    redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker("w"))
    desk.puller.pacing.meter.add_computed(10_000, 0, 10.0, 0)
    desk.look()
    assert desk.refill() == [1, 2]
    tell(redis_connection, "fast", "90000.0 0 0 1 0 0")
    desk.look()
    assert not desk.look()
    assert waiting_lines(redis_connection) == [2]
    assert [lease.job_id.split("-")[1] for lease in desk.in_flight.leases] == ["1"]
    redis_connection.hset(redis_keys.paces(QUEUE), "fast", "90000.0 0 1 0 0 0")  # away now
    wait_until(desk.look)
    assert desk.refill() == [1, 2]
    redis_connection.hset(redis_keys.paces(QUEUE), "fast", "90000.0 0 0 1 0 0")
    desk.look()
    assert waiting_lines(redis_connection) == [1]
    desk.look()
    assert desk.refill() == [2]
