"""All calls of Redis that a session makes, for one queue at a time and one worker's name."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.samples import SampleMoves, WorkCounts
from batchkv_producer.wire.live import is_refused
from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_producer.wire.suspects import is_suspect
from batchkv_producer.wire.transitions import (
    NOTHING_REMEMBERED,
    JobLease,
    JobResult,
    ReuseLimits,
    Run,
    Transitions,
    iso_now,
)
from batchkv_worker.queue.abilities import own_abilities
from batchkv_worker.queue.maintenance import Maintenance, MaintenanceRounds
from batchkv_worker.queue.remembering import limits_of
from batchkv_worker.queue.runs.queue_turns import Head
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.trace import IDLE, MAIN, REDIS

log = logging.getLogger("batchkv.worker")

FINISH_GROUP = 200  # results in one script call: a few milliseconds of the server's time
APART_SECONDS = 300  # within which a worker should have emptied itself; then another tries
RENEW_GROUP = 500  # leases in one script call, for the same reason
DEATH_SECONDS = 5.0  # between two looks for workers of this machine that have ended
REFUSED_SECONDS = 600.0  # after the server refused to count work
PACE_TTL_SECONDS = 86_400
LIVE_RANK = -1  # before the rank of the highest priority
_LEASE = re.compile(rb"([\w-]{1,200}):([0-9a-f]{1,64})-([0-9]{1,12})")
# Errors of a server that will be well again: full, a replica for now, its disk full, loading.
_PASSING = ("OOM", "READONLY", "MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY", "TRYAGAIN")


def is_outage(fault: RedisError) -> bool:
    """Whether to wait for the server rather than to give up."""
    if isinstance(fault, RedisConnectionError | RedisTimeoutError | NoScriptError):
        return True
    name = type(fault).__name__
    return name in ("ReadOnlyError", "OutOfMemoryError") or str(fault).startswith(_PASSING)


@dataclass(frozen=True, slots=True)
class Poll:
    """The answer to a poll: whether RQ is suspended, and which jobs the worker has lost.

    ``lengths`` are those of the queue's lists by priority. ``workers`` are the names of the workers
    that serve it. ``paces`` has what they tell of their pace, by name. ``is_drained``: somebody
    wants this worker to take no more rows.
    """

    is_suspended: bool
    lost: list[str]
    lengths: tuple[int, ...]
    workers: frozenset[str] = frozenset()
    paces: Mapping[str, str] = field(default_factory=dict)
    is_drained: bool = False

    @property
    def num_workers(self) -> int:
        return len(self.workers)


class RedisSide:
    """The worker's calls of Redis. Every method may raise RedisError."""

    def __init__(
        self,
        connection: Redis,
        queue: str,
        worker: str,
        settings: WorkerSettings,
        register: Callable[[], None],
        set_state: Callable[[str], None],
        look_around: Callable[[], None] = lambda: None,
        look_for_ended: Callable[[], None] = lambda: None,
        is_drained_here: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._worker = worker
        self._settings = settings
        self._register = register
        self._set_state = set_state
        self._look_around = look_around
        self._look_for_ended = look_for_ended
        self._look_at = -math.inf  # for them, not before
        self._is_drained_here = is_drained_here
        self._drain = b""  # the field of the record, as last read
        self._has_looked = (
            False  # as `Presence.reclaim_dead` needs a first call before jobs are held
        )
        self._state = ""
        self.maker: Maker = NOBODY  # the engine's, once it is there
        self._has_company = False  # other workers serve the queue
        self._gone: AbstractSet[bytes] = frozenset()  # workers that serve it no more
        self._left: set[str] = set()  # queues that still have this worker's pace
        self._is_unanswered = False  # the answer to the last pull was lost; Redis may have made it
        self._limits: ReuseLimits | None = None  # of remembered answers, once they are needed
        self._moves = Transitions(connection)
        self._samples = SampleMoves(connection)
        self._count_at = -math.inf  # not before
        self._maintenance = MaintenanceRounds(
            [
                Maintenance(connection, each, worker, settings.lease_seconds)
                for each in dict.fromkeys((queue, *settings.queues))
            ],
            settings.maintenance_seconds,
        )
        # One late heartbeat must not hide the worker, and a dead one must not be listed for
        # minutes.
        self._worker_ttl = settings.lease_seconds + int(settings.heartbeat_seconds) + 15

    def wait_for_job(self, timeout_seconds: float) -> tuple[int, ...]:
        """Wait until the queue has a job; the lengths of its lists by priority. Nothing is taken.

        To move the head of a list to its own head changes nothing, but blocks while the list is
        empty. It is the list of normal priority. Other jobs are seen when the wait is over.
        """
        key = redis_keys.queue(self._queue)
        pipeline = self._connection.pipeline(transaction=False)
        # The server takes fractions of a second, which redis-py's types leave out.
        pipeline.blmove(key, key, timeout_seconds, "LEFT", "LEFT")  # type: ignore[arg-type]
        for each in redis_keys.waiting_lists(self._queue):
            pipeline.llen(each)
        MAIN.enter(IDLE)
        _, *lengths = pipeline.execute()
        MAIN.enter(REDIS)
        return tuple(lengths)

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self._worker

    def serve(self, queue: str) -> None:
        """All calls are about this queue from now on. Nothing of the former one may be held."""
        assert not self._is_unanswered
        self._left = (self._left | {self._queue}) - {queue}
        self._has_company, self._gone = False, frozenset()
        self._queue = queue

    def heads(self, queues: Sequence[str]) -> dict[str, Head]:
        """The first waiting job of each queue that has any; read only.

        A live row goes before all jobs.
        """
        pipeline = self._connection.pipeline(transaction=False)
        for queue in queues:
            for key in redis_keys.waiting_lists(queue):
                pipeline.lrange(key, 0, 0)
        replies, num_lists = pipeline.execute(), len(redis_keys.PRIORITIES)
        first: dict[str, tuple[int, bytes]] = {}
        for place, found in enumerate(replies):
            if found:
                first.setdefault(queues[place // num_lists], (place % num_lists, found[0]))
        for _, job_id in first.values():
            batch_id, _ = redis_keys.parse_job_id(job_id.decode("utf-8", "replace")) or ("", 0)
            pipeline.hget(redis_keys.batch(batch_id), "created")
        times = pipeline.execute(raise_on_error=False)  # the key may be of another type
        heads = {
            queue: Head(rank, float(time) if isinstance(time, bytes) and time.isdigit() else 0.0)
            for (queue, (rank, _)), time in zip(first.items(), times, strict=True)
        }
        for queue in queues:
            pipeline.llen(redis_keys.live(queue))
        counts = pipeline.execute(raise_on_error=False)  # the hub may be of an older version
        live = [
            queue for queue, count in zip(queues, counts, strict=True) if count in range(1, 2**31)
        ]
        return heads | dict.fromkeys(live, Head(LIVE_RANK, 0.0))

    def pull(
        self, count: int, num_workers: int, *, fewest: int, num_begin: int, may_be_apart: bool
    ) -> Run:
        """See Transitions.pull_run."""
        if not self._has_looked:
            self._look()
        self._is_unanswered = True
        run = self._moves.pull_run(
            self._queue,
            self._worker,
            count,
            self._settings.lease_seconds,
            num_workers,
            fewest=fewest,
            num_begin=num_begin,
            knows_suspects=True,
            may_be_apart=may_be_apart,
            maker=self.maker,
            abilities=own_abilities(),
        )
        self._is_unanswered = False
        return run

    def return_unanswered(self) -> None:
        """Give back the jobs of the last pull, if its answer never came."""
        if self._is_unanswered:
            wip = redis_keys.registry("wip", self._queue)
            members: Any = self._connection.zrange(wip, 0, -1)
            found = [match for match in map(_LEASE.fullmatch, members) if match is not None]
            lost = [match for match in found if match[2].decode() == self._moves.pull_prefix]
            lost.sort(key=lambda match: int(match[3]))
            leases = [JobLease(m[1].decode(), f"{m[2].decode()}-{m[3].decode()}") for m in lost]
            self._moves.give_back(self._queue, leases)
            self._is_unanswered = False

    def claim_suspects(self) -> bool:
        """Claim the suspects, to take no other job before them. False if another worker did."""
        key = redis_keys.apart_lock(self._queue)
        return bool(self._connection.set(key, self._worker, nx=True, ex=APART_SECONDS))

    def release_suspects(self) -> None:
        """Give up the claim: the suspects were taken, by this worker or by another one."""
        self._connection.delete(redis_keys.apart_lock(self._queue))

    def is_next_suspect(self) -> bool:
        """Whether the job at the head of the queue is a suspect."""
        pipeline = self._connection.pipeline(transaction=False)
        for key in redis_keys.waiting_lists(self._queue):
            pipeline.lrange(key, 0, 0)
        head = next((ids[0] for ids in pipeline.execute() if ids), b"")
        pipeline.hmget(redis_keys.raw_job(head), "bkv_suspect", "bkv_deaths")
        (found,) = pipeline.execute(raise_on_error=False)  # the key may be of another type
        return isinstance(found, list) and is_suspect(*found)

    def finish(self, results: Sequence[JobResult], begun: Sequence[JobLease]) -> list[str]:
        """See Transitions.finish."""
        limits = NOTHING_REMEMBERED
        if any(result.digest for result in results):
            limits = self._limits = self._limits or limits_of(self._settings)
        return self._moves.finish(self._queue, self._worker, results, begun, self.maker, limits)

    def give_back(self, held: Sequence[JobLease], *, died: bool) -> int:
        """See Transitions.give_back."""
        return self._moves.give_back(self._queue, held, died=died)

    def cancel(self, rows: Sequence[tuple[str, bytes]]) -> None:
        """Write (job id, canceled result) rows that have no result yet."""
        self._moves.settle(self._queue, "canceled", rows)

    def poll(self, held: Sequence[JobLease], pace: str = "") -> Poll:
        """Check in one round trip whether the worker still has its leases.

        Before that, every few seconds, it looks for workers of this machine that have ended.
        It tells the others its pace, if there are others, and reads theirs. A server of an older
        version refuses that, which does no harm.
        """
        if self._has_looked and time.monotonic() >= self._look_at:
            self._look_for_ended()
            self._look_at = time.monotonic() + DEATH_SECONDS
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.exists(redis_keys.SUSPENDED)
        for key in redis_keys.waiting_lists(self._queue):
            pipeline.llen(key)
        pipeline.smembers(redis_keys.workers(self._queue))
        pipeline.hmget(redis_keys.worker(self._worker), "birth", redis_keys.DRAIN)
        for lease in held:
            pipeline.hget(redis_keys.job(lease.job_id), "bkv_exec")
        tells = bool(pace) and self._has_company
        num_checked = len(pipeline)
        for queue in (left := tuple(self._left)):  # there it is silent from now on
            pipeline.hdel(redis_keys.paces(queue), self._worker)
        if tells:
            self._tell(pipeline, pace)
        replies = pipeline.execute(raise_on_error=False)
        checked, told = replies[:num_checked], replies[num_checked:]
        if fault := next((each for each in checked if isinstance(each, RedisError)), None):
            raise fault
        found = told[-1] if tells and isinstance(told[-1], dict) else {}
        self._left.difference_update(left)
        paces = {_text(name): _text(value) for name, value in found.items()}
        suspended, high, normal, low, names, (birth, drain), *holders = checked
        if birth:  # else the record is lost, and the next heartbeat writes it again
            self._drain = drain or b""
        workers = frozenset(text.removeprefix(redis_keys.worker("")) for text in map(_text, names))
        self._has_company = len(workers) > 1
        self._gone = {name for name in found if _text(name) not in workers}
        lost = [
            lease.job_id
            for lease, holder in zip(held, holders, strict=True)
            if holder != lease.execution.encode()
        ]
        is_drained = bool(self._drain) or self._is_drained_here()
        lengths = high, normal, low
        return Poll(bool(suspended), lost, lengths, workers, paces, is_drained)

    def _tell(self, pipeline: Pipeline, pace: str) -> None:
        """Commands at the end of a pipeline. The reply to the last one has all paces."""
        key = redis_keys.paces(self._queue)
        pipeline.hset(key, self._worker, pace)
        pipeline.expire(key, PACE_TTL_SECONDS)
        if self._gone:
            pipeline.hdel(key, *self._gone)
        pipeline.hgetall(key)

    def publish(self, fields: Mapping[Any, Any]) -> None:
        """Write fields of the worker's own record; see ``redis_keys``."""
        self._connection.hset(redis_keys.worker(self._worker), mapping=fields)

    def beat(
        self, held: Sequence[JobLease], busy_seconds: float, fields: Mapping[Any, Any] | None = None
    ) -> list[str]:
        """Renew the leases and the worker's own record; the ids of jobs that are lost.

        ``fields`` of that record are written in the same round trip as its working time.
        """
        if not self._connection.hexists(redis_keys.worker(self._worker), "birth"):
            self._register()
            self._state = ""
            if self._drain:  # the lost record had it
                fields = {**(fields or {}), redis_keys.DRAIN: self._drain}
        pipeline, key = (
            self._connection.pipeline(transaction=False),
            redis_keys.worker(self._worker),
        )
        if fields:
            pipeline.hset(key, mapping=fields)
        if busy_seconds > 0:
            pipeline.hincrbyfloat(key, "total_working_time", round(busy_seconds, 3))
        pipeline.execute()
        lost: list[str] = []
        now = iso_now()  # one for all: `reap` compares it with the worker's
        for start in range(0, max(1, len(held)), RENEW_GROUP):  # one call even without leases
            group = held[start : start + RENEW_GROUP]
            lease_seconds = self._settings.lease_seconds
            lost += self._moves.renew(
                self._queue, self._worker, group, lease_seconds, self._worker_ttl, now
            )
        return lost

    def count_work(self, process: str, work: WorkCounts) -> None:
        """Add the work of this process to the totals of the queue. Optional, so it never raises."""
        if time.monotonic() < self._count_at:
            return
        queues = dict.fromkeys((self._queue, *self._settings.queues))
        try:
            self._samples.count(self._worker, list(queues), process, work)
        except RedisError as fault:
            if is_refused(fault):
                if self._count_at < 0:
                    log.info("no work is counted: the hub is of an older version (%s)", fault)
                self._count_at = time.monotonic() + REFUSED_SECONDS
            else:
                log.debug("the next heartbeat counts this work: %s", fault)

    def set_state(self, state: str) -> None:
        """Write RQ's state of the worker (busy, idle, suspended) if it has changed."""
        if state != self._state:
            self._set_state(state)
            self._state = state

    def maintain(self, seconds: float) -> bool:
        """Do maintenance of all queues for so long; whether the round is over.

        A round begins with a look for dead workers of this machine. The rest is left out if another
        worker did it in this interval.
        """
        if not self._maintenance.is_on:
            self._look()
        return self._maintenance.go_on(seconds)

    def _look(self) -> None:
        self._look_around()
        self._has_looked = True


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
