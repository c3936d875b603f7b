"""The state machine of a job: every move, who makes it, and the one script that makes it.

::

            submit            pull               finish
    (none) --------> queued ---------> started ----------> finished | failed
       |               ^  ^              |  |
       | submit        |  '--------------'  | settle(canceled): the client, also from queued
       v               |     give_back      v
    failed             |     reap        canceled
    (bad row)          |
                       |--- retry --- failed <-- settle(failed): heals what stock tools failed
                       '--- retry --- canceled

=============  ==========================  =======================================================
move           made by                     guard
=============  ==========================  =======================================================
submit         the producer                the chunk is the batch's next: enqueued exactly once
pull           a worker                    status is queued, the line has no result, and no living
                                           lease holds the job
finish         the worker that holds it    the job's ``bkv_exec`` is the worker's execution, and the
                                           line has no result yet
give_back      the worker that holds it    as above; a death too many ends in failed
reap           any worker's maintenance,   the lease has lapsed (or its worker is known to be dead);
               ``batchkv run``             more than ``MAX_DEATHS`` deaths end in failed
settle         the client (cancel), any    no result yet; to heal a failed job nobody may hold it
               worker's maintenance
retry          the client                  status is failed (canceled, if that is asked for) and the
                                           job's data is still there
=============  ==========================  =======================================================

Each move is one Lua script, which Redis runs as one step: result, counters, finish order and RQ's
bookkeeping change together or not at all, and no crash can fall between. A lease is the pair of
``bkv_exec`` in the job's hash (who holds it) and its score in ``rq:wip`` (until when); times are
the server's, so that clocks of Macs may differ. What RQ's own tools do behind our back (``rq info``
requeues or fails an abandoned job, twice if two run at once) cannot make a second result: they
never touch ``bkv_exec``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from batchkv_producer import redis_keys
from batchkv_producer.job import MAX_JOB_BYTES

if TYPE_CHECKING:
    from redis import Redis
    from redis.commands.core import Script

MAX_DEATHS = 3
RESULT_TTL_SECONDS = 600  # how long RQ's own record of a finished job stays
FAILURE_TTL_SECONDS = 7 * 86400  # as long as a failed row can be retried
ENOUGH_BYTES = 16 * 2**20  # of job data in one pull: a worker holds it, and the server sends it
SWEEP_ENTRIES = 5000  # of a queue's list, looked at in one step
SWEPT = "batchkv:swept"  # stands in a queue's list for an entry that is about to be removed


@dataclass(frozen=True, slots=True)
class Standing:
    """A batch on the server: chunks enqueued so far and in all, the version of their order."""

    digest: str
    num_enqueued: int
    num_chunks: int
    order: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease: this execution holds this job."""

    job_id: str
    execution: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job just taken: its lease, its raw data (empty when too large), its earlier deaths.

    ``timeout_seconds`` is RQ's timeout of the job; 0 or less means none.
    """

    lease: Held
    data: bytes
    num_deaths: int = 0
    timeout_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours just taken from the queue's head, and how many entries it still has."""

    jobs: list[Pulled]
    num_queued: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a held job ended, ready to be stored."""

    lease: Held
    outcome: str  # "ok" or "failed"
    result: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    busy_ms: int = 0
    saved_ms: int = 0


def iso_now() -> str:
    """The present as RQ writes it in job hashes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Transitions:
    """The moves, bound to one connection (which must return bytes, as RQ's do)."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._scripts: dict[str, Script] = {}

    def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        script = self._scripts.get(name)
        if script is None:
            source = files("batchkv_producer").joinpath(f"lua/{name}.lua").read_text("utf-8")
            script = self._scripts[name] = self._connection.register_script(source)
        return script(keys=keys, args=args)

    def create(self, batch_id: str, batch_fields: dict[str, str | int]) -> Standing:
        """Create the batch or join it; how it stands."""
        flat = [item for pair in batch_fields.items() for item in pair]
        keys = [redis_keys.batch(batch_id), redis_keys.BATCHES]
        digest, chunks, num_chunks, order = self._run("create", keys, [batch_id, *flat])
        name = digest.decode("utf-8", "replace")
        return Standing(name, int(chunks), int(num_chunks), int(order or 1))

    def submit(
        self,
        batch_id: str,
        queue: str,
        chunk: int,
        jobs: Sequence[tuple[int, bytes]],
        bad_rows: Sequence[tuple[int, bytes]],
        timeout_seconds: int,
    ) -> int:
        """Enqueue chunk number ``chunk``: (line, data) of jobs, (line, result) of bad rows.

        Returns the number of chunks enqueued so far: chunk + 1, or more when another submit of the
        same file was ahead. Raises nothing when it was; -1 means that the batch is gone.
        """
        args: list[Any] = [queue, chunk, iso_now(), timeout_seconds, RESULT_TTL_SECONDS]
        args += [FAILURE_TTL_SECONDS, f"batchkv {batch_id}", len(jobs)]
        for line, data in jobs:
            args += (f"{batch_id}-{line}", data)
        for line, result in bad_rows:
            args += (line, result)
        keys = [redis_keys.batch(batch_id), redis_keys.queue(queue)]
        keys += [redis_keys.results(batch_id), redis_keys.done(batch_id), redis_keys.RQ_QUEUES]
        return int(self._run("submit", keys, args))

    def pull(self, queue: str, worker: str, count: int, lease_seconds: int) -> list[Pulled]:
        """``pull_run`` without the length of the queue."""
        return self.pull_run(queue, worker, count, lease_seconds).jobs

    def pull_run(self, queue: str, worker: str, count: int, lease_seconds: int) -> Run:
        """Take up to ``count`` jobs from the head of the queue and hold them.

        Fewer when the queue has no more, or when those taken have ``ENOUGH_BYTES`` of data.
        """
        args: list[Any] = [worker, lease_seconds, count, iso_now(), MAX_JOB_BYTES]
        args += [secrets.token_hex(8), ENOUGH_BYTES]
        keys = [redis_keys.queue(queue), redis_keys.registry("wip", queue)]
        num_queued, taken = self._run("pull", keys, args)
        jobs = [
            Pulled(Held(job.decode(), execution.decode()), data, int(deaths), int(timeout))
            for job, execution, data, deaths, timeout in taken
        ]
        return Run(jobs, int(num_queued))

    def renew(
        self, queue: str, worker: str, held: Iterable[Held], lease_seconds: int, worker_ttl: int
    ) -> dict[str, str]:
        """Prolong leases; job id -> status ("deleted" when gone) of those that were lost."""
        keys = [redis_keys.registry("wip", queue), redis_keys.worker(worker)]
        args: list[Any] = [lease_seconds, worker_ttl, iso_now(), *_flat(held)]
        return {job.decode(): status.decode() for job, status in self._run("renew", keys, args)}

    def finish(self, queue: str, worker: str, endings: Sequence[Ending]) -> list[str]:
        """End held jobs; for each "ok", "lost" or "duplicate" (nothing was written)."""
        args: list[Any] = [iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS]
        for end in endings:
            args += (end.lease.job_id, end.lease.execution, end.outcome, end.result)
            args += (end.prompt_tokens, end.completion_tokens, end.cached_tokens)
            args += (end.busy_ms, end.saved_ms)
        keys = [redis_keys.registry(kind, queue) for kind in ("wip", "finished", "failed")]
        return [v.decode() for v in self._run("finish", [*keys, redis_keys.worker(worker)], args)]

    def give_back(self, queue: str, held: Iterable[Held], *, died: bool = False) -> int:
        """Put held jobs back at the head of the queue; how many went.

        ``died`` counts a death for each; one that has cost too many holders is failed instead.
        """
        keys = [redis_keys.queue(queue)]
        keys += [redis_keys.registry("wip", queue), redis_keys.registry("failed", queue)]
        args = [int(died), MAX_DEATHS, FAILURE_TTL_SECONDS, *_flat(held)]
        return int(self._run("give_back", keys, args))

    def reap(self, queue: str, dead_worker: str = "", limit: int = 1000) -> tuple[int, int]:
        """Take back lapsed leases, or all of a dead worker's; (requeued, failed)."""
        keys = [redis_keys.queue(queue)]
        keys += [redis_keys.registry("wip", queue), redis_keys.registry("failed", queue)]
        args = [limit, MAX_DEATHS, FAILURE_TTL_SECONDS, dead_worker]
        requeued, failed = self._run("reap", keys, args)
        return int(requeued), int(failed)

    def settle(self, queue: str, target: str, rows: Sequence[tuple[str, bytes]]) -> list[str]:
        """Write (job id, result) rows as "canceled" or "failed" without holding them.

        For each: "" when there was nothing to do, "done", or the worker that was running it.
        """
        keys = [redis_keys.registry(target, queue), redis_keys.registry("wip", queue)]
        flat = [item for row in rows for item in row]
        args: list[Any] = [target, iso_now(), FAILURE_TTL_SECONDS, *flat]
        return [v.decode("utf-8", "replace") for v in self._run("settle", keys, args)]

    def retry(
        self,
        batch_id: str,
        queue: str,
        lines: Sequence[int],
        *,
        outcome: str = "failed",
        timeout_seconds: int = 0,
    ) -> int:
        """Queue failed (or canceled) lines again; how many could be. Timeout 0 is the old one."""
        args: list[Any] = [outcome, iso_now(), timeout_seconds]
        for line in lines:
            args += (redis_keys.job_id(batch_id, line), line)
        keys = [redis_keys.batch(batch_id), redis_keys.results(batch_id)]
        keys += [redis_keys.queue(queue), redis_keys.registry(outcome, queue)]
        return int(self._run("retry", keys, args))

    def sweep(self, queue: str, batch_id: str) -> None:
        """Remove a batch's ended jobs from the queue's list; one that is left does no harm."""
        key, first, num_seen = redis_keys.queue(queue), 0, SWEEP_ENTRIES
        while num_seen == SWEEP_ENTRIES:
            num_seen = int(self._run("sweep", [key], [batch_id, first, SWEEP_ENTRIES, SWEPT]))
            first += num_seen
        self._connection.lrem(key, 0, SWEPT)


def _flat(held: Iterable[Held]) -> list[str]:
    return [item for lease in held for item in (lease.job_id, lease.execution)]
