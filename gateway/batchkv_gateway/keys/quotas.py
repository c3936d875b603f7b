"""Limits of a key: the rows that are open at once, and the bytes of its files.

No counter is stored, so none can be wrong. The bytes are those of the files that
the owner has. The open rows are a hash, which has an entry for each batch. The scripts that make
and end a batch also make and delete its entry. Each check is part of the script that makes what is
counted. So two requests at once cannot both take the last of it.

When a limit seems to be reached, the batches are read: rows that have ended meanwhile do not count,
and entries of batches that are gone are deleted.
"""

from __future__ import annotations

import time
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.errors import TOO_LARGE, TOO_MANY, ApiError
from batchkv_gateway.ids import BATCH, is_id
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.scripts import Reservation, forget_reservations, reserve
from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.server.memory_use import at_once

BEGIN_SECONDS = 3600  # in which a reservation gets its batch; else its submit was interrupted


class Quotas:
    """The limits of all keys."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def reserve_rows(self, caller: Caller, queued_id: str, num_rows: int) -> None:
        """Count the rows of a batch of the queue as open until they have ended.

        A second call for the same batch replaces the first. Raises ApiError for too many. Nothing
        is counted for a caller without a limit.
        """
        if not caller.max_rows:
            return
        key = redis_keys.open_rows(caller.owner)
        asked = Reservation(key, queued_id, num_rows, caller.max_rows)
        if reserve(self._connection, asked):
            return
        asked = Reservation(key, queued_id, num_rows, caller.max_rows, self.ended(caller))
        if not reserve(self._connection, asked):
            raise too_many_rows(caller, num_rows)

    def release_rows(self, caller: Caller, queued_id: str) -> None:
        """Take back a reservation whose batch was not made."""
        self._connection.hdel(redis_keys.open_rows(caller.owner), queued_id)

    def ended(self, caller: Caller) -> dict[str, int]:
        """How many rows of each of the caller's entries have ended. Void entries are deleted."""
        key = redis_keys.open_rows(caller.owner)
        stored: Any = self._connection.hgetall(key)
        values = {name.decode("utf-8", "replace"): value for name, value in stored.items()}
        queued_ids = self._queued_ids(list(values))
        wanted = [queued_id for queued_id in queued_ids.values() if queued_id]
        statuses = {each.batch_id: each for each in read_batches(self._connection, wanted)}
        ended, void = dict[str, int](), dict[str, bytes]()
        for name, value in values.items():
            queued_id = queued_ids[name]
            status = statuses.get(queued_id or "")
            if status is not None:
                ended[name] = status.num_ended
            is_own = queued_id != name  # the scripts of the batch keep its entry
            if queued_id is None or (not is_own and _is_void(status, value)):
                void[name] = value
        if void:
            forget_reservations(self._connection, key, void)
        return ended

    def _queued_ids(self, names: list[str]) -> dict[str, str | None]:
        """Entry -> its batch in the queue: "" if it has none yet, None for a batch that is over."""
        own = [name for name in names if is_id(name, BATCH)]

        def ask(pipeline: Any) -> None:
            for name in own:
                pipeline.zscore(redis_keys.OPEN, name)
                pipeline.hget(redis_keys.batch(name), "queued_id")

        replies = at_once(self._connection, ask)
        found: dict[str, str | None] = dict(zip(names, names, strict=True))
        for name, is_open, queued_id in zip(own, replies[::2], replies[1::2], strict=True):
            text = (queued_id or b"").decode("utf-8", "replace")
            found[name] = None if is_open is None else text
        return found


def _is_void(status: BatchStatus | None, value: bytes) -> bool:
    """Whether a batch of the queue has no open rows any more."""
    return _is_old(value) if status is None else status.is_submitted and status.is_done


def too_many_rows(caller: Caller, num_rows: int) -> ApiError:
    """The error for a batch of so many rows, added to those that are open."""
    if num_rows > caller.max_rows:
        return ApiError(
            TOO_LARGE,
            f"the batch has {num_rows:,} rows, and this key may have {caller.max_rows:,} open at "
            "once: split the file, or ask the operator for a key with a larger --max-rows",
            code="too_many_rows",
        )
    return ApiError(
        TOO_MANY,
        f"this key may have {caller.max_rows:,} rows open at once. The batch's {num_rows:,} and "
        "those of its other batches are more: try again when some have ended, or cancel a batch",
        code="too_many_open_rows",
    )


def too_many_bytes(caller: Caller) -> ApiError:
    """The error for a file that is too large, added to those that are kept."""
    return ApiError(
        TOO_LARGE,
        f"this key may keep {caller.max_bytes:,} bytes of files, and this file would be too much: "
        "delete files, or ask the operator for a key with a larger --max-bytes",
        code="too_many_bytes",
        param="file",
    )


def _is_old(value: bytes) -> bool:
    """Whether an entry was made long ago. One that cannot be read is old."""
    _, _, since = value.partition(b" ")
    return not since.isdigit() or int(since[:12]) < time.time() - BEGIN_SECONDS
