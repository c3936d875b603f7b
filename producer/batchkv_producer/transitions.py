"""The state machine of a job: every move, who makes it, and the one script that makes it.

::

            submit            pull               finish
    (none) --------> queued ---------> started ----------> finished | failed
      |  |            ^  ^              |  |
      |  | submit     |  '--------------'  | settle(canceled): the client, also from queued
      |  v            |     give_back      v                   and deferred
      | failed        |     reap        canceled
      | (bad row)     |
      |               |--- retry --- failed <-- settle(failed): heals what stock tools failed
      |               '--- retry --- canceled
      | follow
      '--------> deferred ----------> finished | failed   with its leader: in finish, or by copy
                   ^  '-------------> queued              it leads: settle(canceled | lost), mend
                   '--- retry --- failed | canceled       while its leader is open

    queued | deferred --- settle(expired) ---> failed     past the batch's deadline
    (gone) -------------- settle(lost) ------> failed     somebody deleted the job
    started | queued ---- mend --------------> queued     in no list, and nobody holds it

=============  ==========================  =======================================================
move           made by                     guard
=============  ==========================  =======================================================
submit         the producer                the chunk is the batch's next: enqueued exactly once
follow         the producer                the same, for rows that wait for a twin (``--dedupe``)
pull           a worker                    status is queued, the line has no result, and no living
                                           lease holds the job
finish         the worker that holds it    the job's ``bkv_exec`` is the worker's execution, and the
                                           line has no result yet
copy           any worker's maintenance,   the twin is deferred, its leader has a result, the line
               the client                  has none yet (as within finish)
give_back      the worker that holds it    as for finish; a death too many ends in failed
reap           any worker's maintenance,   the lease has lapsed (or its worker is known to be dead);
               ``batchkv run``             if begun, that is a death; above ``MAX_DEATHS`` it fails
settle         the client, any worker's    no result yet, and for canceled: has not ended; failed:
               maintenance                 ended, nobody holds it; expired: has not started, the
                                           deadline is past by the server's clock; lost: no job, and
                                           the batch is submitted
mend           the client, any worker's    no result and no lease; called for rows in no list
               maintenance
retry          the client                  status is failed (canceled, if that is asked for) and the
                                           job's data is still there; deferred if a twin is open
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
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from batchkv_producer import redis_keys
from batchkv_producer.job import MAX_JOB_BYTES
from batchkv_producer.moved import Ending as Ending
from batchkv_producer.moved import Held as Held
from batchkv_producer.moved import Pulled as Pulled
from batchkv_producer.moved import Run as Run
from batchkv_producer.moved import Standing as Standing
from batchkv_producer.moved import iso_now as iso_now

if TYPE_CHECKING:
    from redis import Redis
    from redis.commands.core import Script

MAX_DEATHS = 3
RESULT_TTL_SECONDS = 600  # how long RQ's own record of a finished job stays
FAILURE_TTL_SECONDS = 7 * 86400  # as long as a failed row can be retried
ENOUGH_BYTES = 16 * 2**20  # of job data in one pull: a worker holds it, and the server sends it
SWEEP_ENTRIES = 5000  # of a queue's list, looked at in one step
SWEPT = "batchkv:swept"  # stands in a queue's list for an entry that is about to be removed
COPIES = 1000  # of a result to twins, made in one step

_PRELUDES: dict[str, tuple[str, ...]]  # what stands before a script
_PRELUDES = dict.fromkeys(("submit", "give_back", "reap", "retry", "mend"), ("common",))
_PRELUDES |= dict.fromkeys(("finish", "settle", "copy", "follow"), ("common", "twins"))


class Transitions:
    """The moves, bound to one connection (which must return bytes, as RQ's do)."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._scripts: dict[str, Script] = {}
        self.pull_prefix = ""  # the last pull's executions are called <prefix>-<number>

    def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        script = self._scripts.get(name)
        if script is None:
            folder = files("batchkv_producer").joinpath("lua")
            parts = (*_PRELUDES.get(name, ()), name)
            source = "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in parts)
            script = self._scripts[name] = self._connection.register_script(source)
        return script(keys=keys, args=args)

    def server_seconds(self) -> int:
        """The server's clock, in seconds since 1970."""
        now: Any = self._connection.time()
        return int(now[0])

    def create(self, batch_id: str, batch_fields: dict[str, str | int]) -> Standing:
        """Create the batch or join it; how it stands."""
        flat = [item for pair in batch_fields.items() for item in pair]
        keys = [redis_keys.batch(batch_id), redis_keys.BATCHES]
        return Standing.of(self._run("create", keys, [batch_id, *flat]))

    def submit(
        self,
        batch_id: str,
        queue: str,
        chunk: int,
        jobs: Sequence[tuple[int, bytes, int]],
        bad_rows: Sequence[tuple[int, bytes]],
        timeout_seconds: int,
    ) -> int:
        """Enqueue a chunk: (line, data, shared bytes) of jobs, (line, result) of bad rows.

        Returns the number of chunks enqueued so far: chunk + 1, or more when another submit of the
        same file was ahead. Raises nothing when it was; -1 means that the batch is gone.
        """
        args: list[Any] = [queue, chunk, iso_now(), timeout_seconds, RESULT_TTL_SECONDS]
        args += [FAILURE_TTL_SECONDS, f"batchkv {batch_id}", len(jobs)]
        for line, data, shared_bytes in jobs:
            args += (f"{batch_id}-{line}", data, shared_bytes)
        for line, result in bad_rows:
            args += (line, result)
        keys = [redis_keys.batch(batch_id), redis_keys.queue(queue)]
        keys += [redis_keys.results(batch_id), redis_keys.done(batch_id), redis_keys.RQ_QUEUES]
        return int(self._run("submit", keys, args))

    def follow(
        self,
        batch_id: str,
        queue: str,
        chunk: int,
        rows: Sequence[tuple[int, bytes, str, int]],
        timeout_seconds: int,
    ) -> int:
        """Store chunk number ``chunk`` of rows that wait for a twin; returns what submit does.

        A row is (line, data, custom_id, line of the row that it waits for).
        """
        args: list[Any] = [queue, chunk, iso_now(), timeout_seconds, RESULT_TTL_SECONDS]
        args += [FAILURE_TTL_SECONDS, f"batchkv {batch_id}"]
        for line, data, custom_id, leader in rows:
            raw_id = custom_id.encode("utf-8", "surrogatepass")
            args += (f"{batch_id}-{line}", data, raw_id, leader)
        return int(self._run("follow", [redis_keys.batch(batch_id)], args))

    def pull(
        self, queue: str, worker: str, count: int, lease_seconds: int, num_begin: int | None = None
    ) -> list[Pulled]:
        """The jobs of ``pull_run``, whatever deaths they have seen."""
        return self.pull_run(queue, worker, count, lease_seconds, num_begin=num_begin).jobs

    def pull_run(
        self,
        queue: str,
        worker: str,
        count: int,
        lease_seconds: int,
        num_workers: int = 1,
        *,
        num_begin: int | None = None,
        suspect_deaths: int = 0,
        may_be_alone: bool = False,
    ) -> Run:
        """Take up to ``count`` jobs of one priority from the head of the queue and hold them.

        Fewer when there are no more, when those taken have ``ENOUGH_BYTES`` of data, or when of a
        high priority this is the share of one among ``num_workers``. The first ``num_begin`` (None:
        all) begin at once. Jobs with ``suspect_deaths`` (0: none) are passed by; the head of the
        queue, if it is one and ``may_be_alone``, is taken alone.
        """
        self.pull_prefix = secrets.token_hex(8)
        args: list[Any] = [worker, lease_seconds, count, iso_now(), MAX_JOB_BYTES]
        num_begin = count if num_begin is None else num_begin
        args += [self.pull_prefix, ENOUGH_BYTES, num_workers, num_begin]
        args += [suspect_deaths, int(may_be_alone)]
        keys = [*redis_keys.waiting_lists(queue), redis_keys.registry("wip", queue)]
        return Run.of(self._run("pull", keys, args), num_begin)

    def renew(
        self,
        queue: str,
        worker: str,
        held: Iterable[Held],
        lease_seconds: int,
        worker_ttl: int,
        now: str = "",
    ) -> dict[str, str]:
        """Prolong leases, at ``now``; job id -> status ("deleted" when gone) of those lost."""
        keys = [redis_keys.registry("wip", queue), redis_keys.worker(worker)]
        args: list[Any] = [lease_seconds, worker_ttl, now or iso_now(), *_flat(held)]
        return {job.decode(): status.decode() for job, status in self._run("renew", keys, args)}

    def finish(
        self, queue: str, worker: str, endings: Sequence[Ending], begun: Sequence[Held] = ()
    ) -> list[str]:
        """End held jobs; for each "ok", "lost" or "duplicate" (nothing was written).

        ``begun`` are other held jobs, which did not begin when they were pulled and now have.
        """
        args: list[Any] = [iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, queue, COPIES]
        args += (len(begun), *_flat(begun))
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
        """End (job id, result) rows without holding them; ``target`` as in the script.

        For each: "" when there was nothing to do, "done", or the worker that was running it.
        """
        kinds = ("canceled" if target == "canceled" else "failed", "wip")
        keys = [*(redis_keys.registry(kind, queue) for kind in kinds), redis_keys.queue(queue)]
        args: list[Any] = [target, iso_now(), FAILURE_TTL_SECONDS, queue, RESULT_TTL_SECONDS]
        args += [COPIES, *(item for row in rows for item in row)]
        return [v.decode("utf-8", "replace") for v in self._run("settle", keys, args)]

    def copy(self, queue: str) -> None:
        """End the twins of rows that ended: what a step of ``finish`` had no time for."""
        args = [queue, iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, COPIES]
        while int(self._run("copy", [redis_keys.due(queue)], args)):
            pass

    def align(self, batch_id: str, job_ids: Sequence[str]) -> bool:
        """Let jobs expire with their batch; whether it has ended. No ids: that was all of them."""
        return bool(self._run("align", [redis_keys.batch(batch_id)], job_ids))

    def mend(self, queue: str, job_ids: Sequence[str]) -> int:
        """Queue rows that have no result, no lease and stand in no list; how many."""
        keys = [redis_keys.queue(queue), redis_keys.registry("wip", queue)]
        return int(self._run("mend", keys, [iso_now(), *job_ids]))

    def retry(
        self,
        batch_id: str,
        queue: str,
        lines: Sequence[int],
        *,
        outcome: str = "failed",
        timeout_seconds: int = 0,
        expires: int | None = None,
    ) -> int:
        """Queue failed (or canceled) lines again; how many could be. Timeout 0 is the old one.

        ``expires`` is a new deadline in seconds since 1970; 0 is none, None the old one.
        """
        deadline: str | int = "" if expires is None else expires
        args: list[Any] = [outcome, iso_now(), timeout_seconds, deadline, queue]
        for line in lines:
            args += (redis_keys.job_id(batch_id, line), line)
        keys = [redis_keys.batch(batch_id), redis_keys.results(batch_id)]
        keys += [redis_keys.queue(queue), redis_keys.registry(outcome, queue)]
        return int(self._run("retry", keys, args))

    def sweep(self, queue: str, batch_id: str) -> None:
        """Remove a batch's ended jobs from the queue's lists; one that is left does no harm."""
        for key in redis_keys.waiting_lists(queue):
            first, num_seen = 0, SWEEP_ENTRIES
            while num_seen == SWEEP_ENTRIES:
                num_seen = int(self._run("sweep", [key], [batch_id, first, SWEEP_ENTRIES, SWEPT]))
                first += num_seen
            if first:
                self._connection.lrem(key, 0, SWEPT)


def _flat(held: Iterable[Held]) -> list[str]:
    return [item for lease in held for item in (lease.job_id, lease.execution)]
