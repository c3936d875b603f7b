"""The moves by which batches and rows come in (``transitions`` draws them all)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from batchkv_producer.agreed import FAILURE_TTL_SECONDS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.row_facts import NO_FACTS, RowFacts
from batchkv_producer.wire.scripts import Scripts
from batchkv_producer.wire.transition_types import BatchRecord, iso_now

RESULT_TTL_SECONDS = 600  # how long RQ's own record of a finished job stays
STARTS = "0"  # before the shared bytes of a job that is the first of its prefix in the queue


class Arrivals(Scripts):
    """The transitions of a submit."""

    def create(
        self,
        batch_id: str,
        batch_fields: Mapping[str, str | int],
        made_with: Mapping[str, str] | None = None,
        *,
        is_mixed: bool = False,
    ) -> BatchRecord:
        """Create the batch or join it. Returns its record.

        ``made_with`` is the known part of its maker (``generations``). An existing batch stores the
        parts that it lacked. If a part differs, the batch does not change, and the record does not
        fit.
        """
        made = [item for pair in (made_with or {}).items() for item in pair]
        fields = [item for pair in batch_fields.items() for item in pair]
        keys = [redis_keys.batch(batch_id), redis_keys.BATCHES]
        args = [batch_id, int(is_mixed), len(made) // 2, *made, *fields]
        return BatchRecord.of(self._run("create", keys, args))

    def submit(
        self,
        batch_id: str,
        queue: str,
        chunk: int,
        jobs: Sequence[tuple[int, bytes, int]],
        bad_rows: Sequence[tuple[int, bytes]],
        timeout_seconds: int,
        needs: Mapping[int, str] | None = None,
        facts: RowFacts = NO_FACTS,
        reuse: Mapping[int, bytes] | None = None,
        kept: Mapping[int, tuple[int, str]] | None = None,
        earlier: tuple[str, int] = ("", 0),
        cut: Collection[int] = (),
        starts: Collection[int] = (),
    ) -> int:
        """Enqueue a chunk: (line, data, shared bytes) of jobs, (line, result) of bad rows.

        ``needs``: line -> the abilities that a worker needs for it, separated by blanks.
        ``facts``: see ``row_facts``. ``kept``: see ``chunk``, for the batch ``earlier``: (its id,
        the number of ends of its rows when it was read). ``cut``: its lines that ended at
        max_tokens. ``reuse`` and ``starts``: see ``chunk``.

        Returns the number of chunks enqueued so far: chunk + 1, or more if another submit of the
        same file was faster, which is no error. -1 means that the batch is gone.
        """
        args: list[Any] = [queue, chunk, iso_now(), timeout_seconds, RESULT_TTL_SECONDS]
        args += [
            FAILURE_TTL_SECONDS,
            f"batchkv {batch_id}",
            facts.digests,
            facts.names,
            *earlier,
            len(jobs),
        ]
        for line, data, shared_bytes in jobs:
            shared = f"{STARTS}{shared_bytes}" if line in starts else shared_bytes
            args += (f"{batch_id}-{line}", data, shared, (needs or {}).get(line, ""))
            args += (_kept((kept or {}).get(line), cut), (reuse or {}).get(line, b""))
        for line, result in bad_rows:
            args += (line, result)
        keys = [redis_keys.batch(batch_id), redis_keys.queue(queue)]
        keys += [redis_keys.results(batch_id), redis_keys.done(batch_id), redis_keys.RQ_QUEUES]
        return int(self._run("submit", keys, args))

    def restore(
        self,
        batch_id: str,
        queue: str,
        outcome: str,
        jobs: Sequence[tuple[int, bytes, int]],
        needs: Mapping[int, str],
        timeout_seconds: int,
        expires: int | None = None,
    ) -> int:
        """Make the missing jobs of ended rows again and queue them. Returns how many.

        ``outcome`` of the rows: failed or canceled. ``expires``: see ``Transitions.retry``.
        """
        deadline: str | int = "" if expires is None else expires
        args: list[Any] = [outcome, iso_now(), timeout_seconds, deadline, queue]
        args += [RESULT_TTL_SECONDS, FAILURE_TTL_SECONDS, f"batchkv {batch_id}"]
        for line, data, shared_bytes in jobs:
            args += (f"{batch_id}-{line}", line, data, shared_bytes, needs.get(line, ""))
        keys = [redis_keys.batch(batch_id), redis_keys.results(batch_id), redis_keys.queue(queue)]
        return int(self._run("restore", [*keys, redis_keys.registry(outcome, queue)], args))

    def follow(
        self,
        batch_id: str,
        queue: str,
        chunk: int,
        rows: Sequence[tuple[int, bytes, str, int]],
        timeout_seconds: int,
        needs: Mapping[int, str] | None = None,
        facts: RowFacts = NO_FACTS,
        reuse: Mapping[int, bytes] | None = None,
    ) -> int:
        """Store chunk number ``chunk`` of duplicates. Returns the same as ``submit``.

        A row is (line, data, custom_id, line of the row that it waits for).
        """
        args: list[Any] = [queue, chunk, iso_now(), timeout_seconds, RESULT_TTL_SECONDS]
        args += [FAILURE_TTL_SECONDS, f"batchkv {batch_id}", facts.digests, facts.names]
        for line, data, custom_id, leader in rows:
            raw_id = custom_id.encode("utf-8", "surrogatepass")
            args += (f"{batch_id}-{line}", data, raw_id, leader, (needs or {}).get(line, ""))
            args.append((reuse or {}).get(line, b""))
        return int(self._run("follow", [redis_keys.batch(batch_id)], args))


def _kept(found: tuple[int, str] | None, cut: Collection[int]) -> bytes:
    if found is None:
        return b""
    line, custom_id = found
    mark = "c" if line in cut else ""
    return f"{line}{mark}:{custom_id}".encode("utf-8", "surrogatepass")
