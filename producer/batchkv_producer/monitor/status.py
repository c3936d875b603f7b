"""The status of batches. Read only."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from batchkv_producer.errors import ExpiredError, NotFoundError, WireError
from batchkv_producer.monitor.workers import live_workers, text_map
from batchkv_producer.server.memory_use import at_once
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import moment_text
from batchkv_producer.wire.maker import Maker

log = logging.getLogger(__name__)

MIN_PREFIX_CHARS = 6
MAX_COUNT = 2**53  # of any count: far more than a batch has, and still exact as a float

_PREFIX = re.compile(f"[0-9a-f]{{{MIN_PREFIX_CHARS},16}}")
_OPENAI = re.compile(r"batch_[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """One batch at one moment, read in one transaction.

    ``created`` is in seconds since 1970. ``busy_ms`` is summed over rows. ``saved_ms`` is the time
    to compute the cached tokens, as workers measured it. ``last_line`` is the number of the file's
    last row; it is more than ``total`` if the file has blank lines. ``is_submitted``: all rows are
    on the server. ``running`` rows are held by workers, which may not have begun all of them.

    ``expires`` is the deadline, ``kept_until`` the time at which the results are deleted,
    ``read_at`` the time of this status: seconds since 1970 by the server's clock, 0 for none.
    ``num_results`` counts the stored results, one for each row that has ended. ``copied`` rows got
    the answer of another row with the same request. ``reused`` rows got a remembered answer of an
    earlier batch.
    """

    batch_id: str
    name: str
    model: str
    queue: str
    total: int
    created: int
    ok: int
    failed: int
    canceled: int
    running: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    busy_ms: int
    is_submitted: bool
    num_workers: int
    last_line: int
    job_timeout_seconds: int = 0  # 0: not known
    saved_ms: int = 0
    priority: str = "normal"
    expires: int = 0
    keep_seconds: int = 0
    kept_until: int = 0
    is_deduped: bool = False
    has_aligned_jobs: bool = False  # RQ's jobs are deleted together with the results
    copied: int = 0
    kept: int = 0  # ok rows with the answer of a row of an earlier batch
    is_reusing: bool = False  # rows may end with remembered answers
    reused: int = 0
    chunks: int = 0  # chunks of the submit that are in the queue
    cut: int = 0  # ok rows whose answer ends at max_tokens; older workers do not count them
    num_results: int = 0
    fingerprint: str = ""  # of the batch's model; like scheme and dtype "" until it is known
    scheme: str = ""
    dtype: str = ""
    needs: str = ""  # abilities that a worker needs and older versions lack, separated by blanks
    is_mixed: bool = False  # several schemes and dtypes may compute it
    generation: int = 1
    base: str = ""  # the id of the first generation, for a later one
    is_forgotten: bool = False  # `batchkv forget` is deleting it
    adapter: str = ""  # the adapter in the model's name, if it has one
    read_at: float = field(default=0.0, compare=False)

    @property
    def maker(self) -> Maker:
        """The weights, scheme and dtype of all answers of the batch, as far as they are known."""
        if self.is_mixed:
            return Maker(self.fingerprint)
        return Maker(self.fingerprint, self.scheme, self.dtype)

    @property
    def worker_command(self) -> str:
        """The command that starts a worker for this batch."""
        if not self.adapter:
            return f"batchkv worker -m {self.model}"
        model = self.model.removesuffix(f"@{self.adapter}")
        return f"batchkv worker -m {model} --adapter {self.adapter}=FOLDER"

    @property
    def num_ended(self) -> int:
        """Rows that have a result."""
        return self.ok + self.failed + self.canceled

    @property
    def queued(self) -> int:
        """Rows that no worker holds yet."""
        return self.total - self.num_ended - self.running

    @property
    def is_done(self) -> bool:
        """True if every row has a result."""
        return self.is_submitted and self.num_ended == self.total

    @property
    def is_overdue(self) -> bool:
        """True if rows have not started and the batch's deadline is past."""
        return 0 < self.expires <= self.read_at and self.queued > 0

    @property
    def is_untouched(self) -> bool:
        """True if rows wait, no worker serves them, and none has ever taken one of them."""
        has_run = self.running or self.ok or self.busy_ms or self.prompt_tokens
        return not (self.is_done or self.num_workers or has_run)

    def whole_sum(self) -> str:
        """All rows as one sum: ``5 = 1 ok + 1 failed + 0 canceled + 2 queued + 1 held``."""
        return (
            f"{self.total:,} = {self._ok()} + {self.failed:,} failed + {self.canceled:,} canceled"
            f" + {self.queued:,} queued + {self.running:,} held"
        )

    def _ok(self) -> str:
        counts = {"kept": self.kept, "reused": self.reused, "cut at max_tokens": self.cut}
        some = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        return f"{self.ok:,} ok" + (f" ({some})" if some else "")

    def reconciliation(self) -> str:
        """The ended rows as a sum: ``20,000 = 19,959 ok + 41 failed + 0 canceled``."""
        open_rows = self.total - self.num_ended
        tail = f" + {open_rows:,} open" if open_rows else ""
        return (
            f"{self.total:,} = {self._ok()} + {self.failed:,} failed "
            f"+ {self.canceled:,} canceled{tail}"
        )


def find_batch(connection: Redis, wanted: str, *, or_forgotten: bool = False) -> str:
    """The full id of a batch from its id or a prefix of it. Raises NotFoundError.

    ``or_forgotten``: also for a batch that is being forgotten.
    """
    batch_id = match_batch(connection, wanted)
    if not connection.exists(redis_keys.batch(batch_id)):
        raise gone(connection, batch_id)
    if not or_forgotten and connection.hexists(redis_keys.batch(batch_id), "forgotten"):
        raise being_forgotten(batch_id)
    return batch_id


def check_id(wanted: str) -> None:
    """Raise NotFoundError for a text that cannot be the beginning of a batch's id."""
    if _OPENAI.fullmatch(wanted):
        raise NotFoundError(
            f"{wanted} is an id of OpenAI's API, which gateways know: add --url http://GATEWAY"
        )
    if not _PREFIX.fullmatch(wanted):
        raise NotFoundError(
            f"{wanted!r} is no batch id: give its 16 hex digits, or at least the first "
            f"{MIN_PREFIX_CHARS}"
        )


def match_batch(connection: Redis, wanted: str) -> str:
    """The full id of a batch, even if it has expired. Raises NotFoundError."""
    check_id(wanted)
    if len(wanted) == 16 and connection.exists(redis_keys.batch(wanted)):
        return wanted
    raw_ids: Any = connection.zrange(redis_keys.BATCHES, 0, -1)
    ids: list[str] = [raw.decode("utf-8", "replace") for raw in raw_ids]
    matches = [batch_id for batch_id in ids if batch_id.startswith(wanted)]
    if not matches:
        raise gone(connection, wanted)
    if len(matches) > 1:
        raise NotFoundError(f"{wanted} could be any of {', '.join(sorted(matches)[:5])}")
    return matches[0]


def read_batch(connection: Redis, batch_id: str) -> BatchStatus:
    """The status of one batch by its full id. Raises NotFoundError."""
    found = read_batches(connection, [batch_id])
    if not found:
        raise gone(connection, batch_id)
    return found[0]


def check_there(connection: Redis, batch_id: str) -> None:
    """Raise NotFoundError if the batch of this full id is gone or being forgotten."""
    digest, forgotten = connection.hmget(redis_keys.batch(batch_id), "digest", "forgotten")
    if forgotten is not None:
        raise being_forgotten(batch_id)
    if digest is None:
        raise gone(connection, batch_id)


def being_forgotten(batch_id: str) -> NotFoundError:
    """The error for a batch that is being forgotten."""
    return NotFoundError(f"batch {batch_id} is being forgotten (`batchkv forget`)")


def gone(connection: Redis, batch_id: str) -> NotFoundError:
    """The error for a missing batch: it has expired, or the server never had it."""
    created: Any = connection.zscore(redis_keys.BATCHES, batch_id)
    if created is None:
        return NotFoundError(f"no batch {batch_id} on this server")
    return ExpiredError(
        f"batch {batch_id} (of {moment_text(created)}) is no longer kept: its results have expired,"
        " because the time of its --keep is over; submit the file again to run it anew"
    )


def read_batches(
    connection: Redis, batch_ids: Sequence[str], *, workers: dict[str, int] | None = None
) -> list[BatchStatus]:
    """The status of several batches, read in one transaction. Batches that are gone are left out.

    One that cannot be read is left out with a warning, if there are others. ``workers`` caches the
    number of workers of each queue between calls.
    """

    def ask(pipeline: Any) -> None:
        pipeline.time()
        for batch_id in batch_ids:
            pipeline.hgetall(redis_keys.batch(batch_id))
            pipeline.hlen(redis_keys.results(batch_id))
            pipeline.hlen(redis_keys.held(batch_id))

    (seconds, micros), *replies = at_once(connection, ask)
    read_at = seconds + micros / 1e6
    parts = zip(batch_ids, replies[::3], replies[1::3], replies[2::3], strict=True)
    known = {
        # An interrupted script may have left the counter wrong. The hash of held rows is right.
        batch: {
            **text_map(raw),
            "read_at": str(read_at),
            "num_results": str(num),
            "running": str(num_held),
        }
        for batch, raw, num, num_held in parts
        if b"digest" in raw
    }
    queues = {values["queue"] for values in known.values() if "queue" in values}
    num_workers = {} if workers is None else workers
    for queue in queues - num_workers.keys():
        num_workers[queue] = len(live_workers(connection, queue))
    found = []
    for batch_id, values in known.items():
        num = num_workers.get(values.get("queue", ""), 0)
        try:
            found.append(_batch_status(batch_id, values, num))
        except WireError as fault:
            if len(batch_ids) == 1:
                raise
            log.warning("%s", fault)
    return found


def _batch_status(batch_id: str, values: dict[str, str], num_workers: int) -> BatchStatus:
    def count(name: str) -> int:
        value = int(values.get(name, 0))
        if abs(value) > MAX_COUNT:
            raise ValueError(f"{name} is out of range")
        return value

    try:
        return BatchStatus(
            batch_id=batch_id,
            name=values.get("name", ""),
            model=values["model"],
            queue=values["queue"],
            total=count("total"),
            created=count("created"),
            ok=count("ok"),
            failed=count("failed"),
            canceled=count("canceled"),
            running=count("running"),
            prompt_tokens=count("prompt_tokens"),
            completion_tokens=count("completion_tokens"),
            cached_tokens=count("cached_tokens"),
            busy_ms=count("busy_ms"),
            is_submitted="num_chunks" in values and count("chunks") == count("num_chunks"),
            num_workers=num_workers,
            last_line=count("last_line" if "last_line" in values else "total"),
            job_timeout_seconds=count("job_timeout"),
            saved_ms=count("saved_ms"),
            priority=values.get("priority", "normal"),
            expires=count("expires"),
            keep_seconds=count("keep"),
            kept_until=count("kept_until"),
            has_aligned_jobs="kept_jobs" in values,
            is_deduped="dedupe" in values,
            chunks=count("chunks"),
            copied=count("copied"),
            cut=count("cut"),
            kept=count("kept"),
            is_reusing="reuse" in values,
            reused=count("reused"),
            num_results=count("num_results"),
            fingerprint=values.get("fingerprint", ""),
            scheme=values.get("scheme", ""),
            dtype=values.get("dtype", ""),
            needs=values.get("needs", ""),
            is_mixed="mixed" in values,
            generation=count("generation") or 1,
            base=values.get("base", ""),
            is_forgotten="forgotten" in values,
            adapter=values.get("adapter", ""),
            read_at=float(values["read_at"]),
        )
    except (KeyError, ValueError) as fault:
        raise WireError(f"batch {batch_id} on the server cannot be read: {fault!r}") from fault
