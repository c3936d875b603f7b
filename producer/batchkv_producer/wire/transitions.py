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
    (gone) -------------- restore -----------> queued     failed or canceled, from the file
    started | queued ---- mend --------------> queued     in no list, and nobody holds it

=============  ==========================  =======================================================
move           made by                     guard
=============  ==========================  =======================================================
submit         the producer                the chunk is the batch's next: enqueued exactly once
follow         the producer                the same, for duplicates (``--dedupe``)
pull           a worker                    status is queued, the line has no result, no living
                                           lease holds the job, and the worker has the weights, KV
                                           scheme, dtype and abilities that batch and job name. A
                                           row whose answer is remembered is finished instead
                                           (``lua/reuse.lua``)
finish         the worker that holds it    the job's ``bkv_exec`` is the worker's execution, and the
                                           line has no result yet; queued again if the worker does
                                           not fit the batch
copy           any worker's maintenance,   the row is deferred, its leader has a result, the line
               the client                  has none yet (as within finish)
give_back      the worker that holds it    as for finish; failed if it died too often alone
reap           any worker's maintenance,   the lease has lapsed, or its worker is known to be dead.
               ``batchkv run``, the        For a begun row the former counts as half a death, the
               machine's next worker       latter as one. After ``MAX_DEATHS`` alone, the row fails
                                           (``lua/suspects.lua``)
settle         the client, any worker's    no result yet, and for canceled: has not ended; failed:
               maintenance                 ended, nobody holds it; expired: has not started, the
                                           deadline is past by the server's clock; lost: no job, and
                                           the batch is submitted
mend           the client, any worker's    no result and no lease; called for rows in no list
               maintenance
retry          the client                  status is failed (canceled, if that is asked for) and the
                                           job's data is still there; deferred if its leader is open
recount        the client, any worker's    every row has a result, and their number is not that of
               maintenance                 the counts; nothing ended since they were read
restore        the client that has the     the line has a result and its job no data
               input
=============  ==========================  =======================================================

`batchkv forget` (``manage.forget``) ends a row in any state: once the batch is marked, no move
writes anything for it. A move that meets such a row drops it with its lease.

Each move is one Lua script, which Redis runs as one step: result, counters, finish order and RQ's
bookkeeping change together or not at all, and a crash cannot separate them. A lease is the pair of
``bkv_exec`` in the job's hash (who holds it) and its score in ``rq:wip`` (until when); times are
the server's, so that clocks of Macs may differ. RQ's own tools may also change a job: ``rq info``
requeues or fails an abandoned job, twice if two run at once. That cannot make a second result,
because these tools never change ``bkv_exec``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchkv_producer.agreed import FAILURE_TTL_SECONDS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.arrivals import RESULT_TTL_SECONDS as RESULT_TTL_SECONDS
from batchkv_producer.wire.arrivals import Arrivals
from batchkv_producer.wire.job import MAX_JOB_BYTES
from batchkv_producer.wire.maker import ABILITIES, ANYBODY, Maker
from batchkv_producer.wire.transition_types import NOTHING_REMEMBERED as NOTHING_REMEMBERED
from batchkv_producer.wire.transition_types import BatchRecord as BatchRecord
from batchkv_producer.wire.transition_types import JobLease as JobLease
from batchkv_producer.wire.transition_types import JobResult as JobResult
from batchkv_producer.wire.transition_types import Pulled as Pulled
from batchkv_producer.wire.transition_types import ReuseLimits as ReuseLimits
from batchkv_producer.wire.transition_types import Run as Run
from batchkv_producer.wire.transition_types import iso_now as iso_now

if TYPE_CHECKING:
    from redis import Redis

MAX_DEATHS = 2  # of a row that ran alone; then it is failed
ENOUGH_BYTES = 16 * 2**20  # of job data in one pull, of results in one ``finish``
SWEEP_ENTRIES = 5000  # of a queue's list, looked at in one step
COPIES = 1000  # of a result to duplicates, made in one step


class Transitions(Arrivals):
    """The transitions over one connection, which must return bytes, as RQ's does."""

    def __init__(self, connection: Redis) -> None:
        super().__init__(connection)
        self.pull_prefix = ""  # the last pull's executions are called <prefix>-<number>

    def server_seconds(self) -> int:
        """The server's clock, in seconds since 1970."""
        now: Any = self.connection.time()
        return int(now[0])

    def pull(
        self, queue: str, worker: str, count: int, lease_seconds: int, num_begin: int | None = None
    ) -> list[Pulled]:
        """The jobs of ``pull_run``, suspects and jobs of any maker included."""
        return self.pull_run(queue, worker, count, lease_seconds, num_begin=num_begin).jobs

    def pull_run(
        self,
        queue: str,
        worker: str,
        count: int,
        lease_seconds: int,
        num_workers: int = 1,
        *,
        fewest: int | None = None,
        num_begin: int | None = None,
        knows_suspects: bool = False,
        may_be_apart: bool = False,
        maker: Maker = ANYBODY,
        abilities: Sequence[str] = ABILITIES,
    ) -> Run:
        """Take up to ``count`` jobs of one priority from the head of the queue and hold them.

        It takes fewer if there are no more, or if those taken have ``ENOUGH_BYTES`` of data. From
        ``fewest`` on (None: ``count``) it ends where the next job begins another prefix. Of a
        high priority it takes at most the equal share of one of ``num_workers``. The first
        ``num_begin`` (None: all) begin at once. ``knows_suspects`` skips suspects. If
        ``may_be_apart`` and a suspect comes first, only its group is taken: as many as begin at
        once, whatever ``count``. Jobs of batches with another ``maker``, or that need other
        ``abilities``, are skipped. Rows whose answers are remembered end at once.
        """
        self.pull_prefix = secrets.token_hex(8)
        args: list[Any] = [worker, lease_seconds, count, iso_now(), MAX_JOB_BYTES]
        num_begin = count if num_begin is None else num_begin
        args += [self.pull_prefix, ENOUGH_BYTES, num_workers, num_begin]
        args += [int(knows_suspects), int(may_be_apart), *maker.values(), " ".join(abilities)]
        args += [FAILURE_TTL_SECONDS, queue, RESULT_TTL_SECONDS]
        args.append(count if fewest is None else fewest)
        keys = [*redis_keys.waiting_lists(queue), redis_keys.registry("wip", queue)]
        return Run.of(self._run("pull", keys, args), num_begin)

    def renew(
        self,
        queue: str,
        worker: str,
        held: Iterable[JobLease],
        lease_seconds: int,
        worker_ttl: int,
        now: str = "",
    ) -> dict[str, str]:
        """Prolong leases at ``now``. Returns job id -> status ("deleted" if gone) of lost ones."""
        keys = [redis_keys.registry("wip", queue), redis_keys.worker(worker)]
        args: list[Any] = [lease_seconds, worker_ttl, now or iso_now(), *_flat(held)]
        return {job.decode(): status.decode() for job, status in self._run("renew", keys, args)}

    def finish(
        self,
        queue: str,
        worker: str,
        endings: Sequence[JobResult],
        begun: Sequence[JobLease] = (),
        maker: Maker = ANYBODY,
        limits: ReuseLimits = NOTHING_REMEMBERED,
    ) -> list[str]:
        """End held jobs; for each "ok", or "lost", "duplicate", "unfit" (nothing was written).

        ``begun`` are other held jobs that have begun since the pull. A job whose batch has another
        ``maker`` is queued again. Answers with a digest are remembered within ``limits``, if their
        batch has ``reuse``.
        """
        args: list[Any] = [iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, queue, COPIES]
        args += (*maker.values(), limits.keep_seconds, limits.max_answers, limits.max_bytes)
        args += (len(begun), *_flat(begun))
        for end in endings:
            args += (end.lease.job_id, end.lease.execution, end.kind, end.result)
            args += (end.prompt_tokens, end.completion_tokens, end.cached_tokens)
            args += (end.busy_ms, end.saved_ms, end.digest if limits.max_bytes else b"")
        keys = [redis_keys.registry(kind, queue) for kind in ("wip", "finished", "failed")]
        keys += [redis_keys.worker(worker), redis_keys.queue(queue)]
        return [v.decode() for v in self._run("finish", keys, args)]

    def give_back(self, queue: str, held: Iterable[JobLease], *, died: bool = False) -> int:
        """Put held jobs back at the head of the queue. Returns how many.

        ``died`` counts a death for each. A job that has died alone too often is failed instead.
        """
        keys = [redis_keys.queue(queue)]
        keys += [redis_keys.registry("wip", queue), redis_keys.registry("failed", queue)]
        args = [int(died), MAX_DEATHS, FAILURE_TTL_SECONDS, *_flat(held)]
        return int(self._run("give_back", keys, args))

    def reap(
        self,
        queue: str,
        dead_worker: str = "",
        limit: int = 1000,
        *,
        is_death: bool = True,
        as_of: float | None = None,
        lease_seconds: float = 60.0,
    ) -> tuple[int, int]:
        """Take back lapsed leases, or all of a dead worker. Returns (requeued, failed).

        The worker's end counts no death if none of its rows caused it. ``as_of``: leases that end
        after this time of the server have not lapsed, even if its clock is later now. If the clock
        was set back, leases that run longer than ``lease_seconds`` are shortened.
        """
        keys = [redis_keys.queue(queue)]
        keys += [redis_keys.registry("wip", queue), redis_keys.registry("failed", queue)]
        args = [limit, MAX_DEATHS, FAILURE_TTL_SECONDS, dead_worker]
        args += [(2 if is_death else 0) if dead_worker else 1]
        args += ["" if as_of is None else repr(as_of), repr(lease_seconds)]
        requeued, failed = self._run("reap", keys, args)
        return int(requeued), int(failed)

    def settle(self, queue: str, target: str, rows: Sequence[tuple[str, bytes]]) -> list[str]:
        """End (job id, result) rows without holding them; ``target`` as in the script.

        Returns for each "" (nothing to do), "done", or the name of the worker that was running it.
        """
        kinds = ("canceled" if target == "canceled" else "failed", "wip")
        keys = [*(redis_keys.registry(kind, queue) for kind in kinds), redis_keys.queue(queue)]
        args: list[Any] = [target, iso_now(), FAILURE_TTL_SECONDS, queue, RESULT_TTL_SECONDS]
        args += [COPIES, *(item for row in rows for item in row)]
        return [v.decode("utf-8", "replace") for v in self._run("settle", keys, args)]

    def copy(self, queue: str) -> None:
        """End the duplicates of ended rows that a step of ``finish`` left open."""
        for _ in self.copies(queue):
            pass

    def copies(self, queue: str) -> Iterator[int]:
        """The same in steps. Each step returns how many rows still have duplicates."""
        args = [queue, iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, COPIES]
        num_left = 1
        while num_left:
            num_left = int(self._run("copy", [redis_keys.due(queue)], args))
            yield num_left

    def align(self, batch_id: str, job_ids: Sequence[str]) -> bool:
        """Let jobs expire with their batch. Returns whether it has ended. No ids: the last call."""
        return bool(self._run("align", [redis_keys.batch(batch_id)], job_ids))

    def recount(
        self,
        batch_id: str,
        queue: str,
        there: tuple[int, int],
        without_end: Sequence[int] = (),
        open_jobs: Sequence[tuple[int, str]] = (),
        counts: Mapping[str, int] | None = None,
    ) -> bool:
        """Correct a batch's counts and RQ's jobs by the stored results. Returns whether it did.

        ``there``: the numbers of results and of entries in the finish order when they were read.
        ``without_end``: lines with a result that the finish order lacks. ``open_jobs``: (line,
        outcome) of jobs that are still open in RQ.
        """
        names = ("ok", "failed", "canceled", "cut")
        args: list[Any] = [*there, *("" if counts is None else counts[name] for name in names)]
        args += [iso_now(), RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, len(without_end), *without_end]
        args += [item for job in open_jobs for item in job]
        keys = [redis_keys.batch(batch_id), redis_keys.results(batch_id), redis_keys.done(batch_id)]
        keys += [redis_keys.registry(kind, queue) for kind in ("finished", "failed", "canceled")]
        return bool(self._run("recount", keys, args))

    def mend(self, queue: str, job_ids: Sequence[str]) -> int:
        """Queue rows that have no result and no lease and are in no list. Returns how many."""
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
        """Queue failed (or canceled) lines again. Returns how many. Timeout 0 keeps the old one.

        ``expires`` is a new deadline in seconds since 1970; 0 is none, None keeps the old one.
        """
        deadline: str | int = "" if expires is None else expires
        args: list[Any] = [outcome, iso_now(), timeout_seconds, deadline, queue]
        for line in lines:
            args += (redis_keys.job_id(batch_id, line), line)
        keys = [redis_keys.batch(batch_id), redis_keys.results(batch_id)]
        keys += [redis_keys.queue(queue), redis_keys.registry(outcome, queue)]
        return int(self._run("retry", keys, args))

    def sweep(self, queue: str, batch_id: str) -> None:
        """Remove a batch's ended jobs from the queue's lists. A job that is left does no harm."""
        for _ in self.sweep_steps(queue, batch_id):
            pass

    def sweep_steps(self, queue: str, batch_id: str) -> Iterator[int]:
        """The same in steps. Each step returns how many entries it read."""
        for key in redis_keys.waiting_lists(queue):
            first, num_seen = 0, SWEEP_ENTRIES
            while num_seen == SWEEP_ENTRIES:
                num_seen = int(
                    self._run("sweep", [key], [batch_id, first, SWEEP_ENTRIES, redis_keys.SWEPT])
                )
                first += num_seen
                yield num_seen
            if first:
                self.connection.lrem(key, 0, redis_keys.SWEPT)


def _flat(held: Iterable[JobLease]) -> list[str]:
    return [item for lease in held for item in (lease.job_id, lease.execution)]
