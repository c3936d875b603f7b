"""``batchkv forget``: deletes a batch from the server, in any state.

First the batch's hash is marked: from then on no script writes anything for the batch
(``lua/common.lua``). Then the answers that are remembered of it are deleted, unless another batch
had stored the same before. Then its rows are deleted page by page, with RQ's records of them. The
results, the entry in the list of batches and the hash are deleted last. If the process is killed in
between, the mark stays, and the next ``forget``, ``status``, ``list`` or maintenance goes on.
Workers notice within a second that their rows are gone. All of this works on a full server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from batchkv_producer.errors import ExpiredError, UsageError
from batchkv_producer.monitor.status import BatchStatus, find_batch, match_batch, read_batches
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.scripts import Scripts
from batchkv_producer.wire.transitions import Transitions

PAGE_LINES = 500
_GONE = -1


class _Steps(Scripts):
    def take(self, batch_id: str, queue: str, *args: str | int) -> int:
        keys = [redis_keys.batch(batch_id)]
        kinds = ("wip", "finished", "failed", "canceled")
        keys += [redis_keys.registry(kind, queue) for kind in kinds]
        return int(self._run("forget", [*keys, redis_keys.due(queue)], args))


def forget_batch(connection: Redis, wanted: str) -> str:
    """Delete a batch, or the rest of one. Returns its full id. Raises NotFoundError."""
    try:
        batch_id = find_batch(connection, wanted, or_forgotten=True)
    except ExpiredError:  # its keys have expired, but the list of batches still has its id
        batch_id = match_batch(connection, wanted)
        _forget_answers(connection, batch_id, math.inf)
        _step(connection, batch_id, "", "end")
        return batch_id
    queue: Any = connection.hget(redis_keys.batch(batch_id), "queue")
    _step(connection, batch_id, "", "mark")
    finish_forget(connection, batch_id, (queue or b"").decode("utf-8", "replace"))
    return batch_id


def finish_forget(connection: Redis, batch_id: str, queue: str, until: float = math.inf) -> bool:
    """Delete the rest of a marked batch. Returns False if it was not finished at ``until``.

    ``until`` is in monotonic seconds. Raises ResponseError if this user may not do it.
    """
    if not _forget_answers(connection, batch_id, until):
        return False
    num_gone = 0
    while True:
        before = num_gone
        num_gone = _step(connection, batch_id, queue, "page", PAGE_LINES)
        if num_gone in (_GONE, before):
            break
        if time.monotonic() > until:
            return False
    if num_gone != _GONE:
        with suppress(ResponseError):  # remaining entries do no harm, because `pull` drops them
            Transitions(connection).sweep(queue, batch_id)
        _step(connection, batch_id, queue, "end")
    return True


def _forget_answers(connection: Redis, batch_id: str, until: float) -> bool:
    """Delete the batch's remembered answers. Returns False if some are left at ``until``."""
    while _step(connection, batch_id, "", "reuse", PAGE_LINES) > 0:
        if time.monotonic() > until:
            return False
    return True


def find_named(connection: Redis, names: Iterable[str]) -> dict[str, BatchStatus | None]:
    """The batches with these ids, or unique prefixes of ids. None: only its name is left.

    Raises NotFoundError if there is no such batch.
    """
    full = dict.fromkeys(match_batch(connection, name) for name in names)
    there = {found.batch_id: found for found in read_batches(connection, [*full])}
    return {batch_id: there.get(batch_id) for batch_id in full}


def choose(
    batches: Iterable[BatchStatus],
    *,
    older_than_seconds: float = 0.0,
    model: str | None = None,
    all_done: bool = False,
) -> list[BatchStatus]:
    """The batches that fit all conditions. Raises UsageError if there is no condition."""
    if not (older_than_seconds or model or all_done):
        raise UsageError("name the batches to delete, or give --all-done, --older-than or --model")
    return [
        batch
        for batch in batches
        if (not all_done or batch.is_done)
        and (model is None or batch.model == model)
        and batch.read_at - batch.created >= older_than_seconds
    ]


def _step(connection: Redis, batch_id: str, queue: str, *args: str | int) -> int:
    return _Steps(connection).take(batch_id, queue, *args)
