"""Pages of batches, the newest first: the queue's, and those of OpenAI's API.

Two sorted lists are merged: ids of the queue by the time of their submit, and ids of OpenAI's API,
which begin with their time. Only the entries of a page are read. A batch of OpenAI's API is in the
second list alone. Its facts are those of its rows, while these are in the queue, and then those of
its record.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches.record import OPEN, BatchRecord, read_record
from batchkv_gateway.errors import invalid
from batchkv_gateway.ids import BATCH, is_id, seconds_of
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.native.owners import Owners, may_see, split_owner
from batchkv_producer.batch_facts import Left, batch_fields
from batchkv_producer.manage.reconcile import Reconciler
from batchkv_producer.monitor.listing import count_batches
from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.wire import redis_keys as queue_keys

PAGE = 500
Entry = tuple[int, str]  # seconds since 1970, id


@dataclass(frozen=True, slots=True)
class Page:
    """Facts of batches. ``next_entry``: the ``after`` of the next page, "" if there is none."""

    items: list[dict[str, Any]]
    next_entry: str


class Listing:
    """Lists the batches that a caller may see."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._reconciler = Reconciler(connection)
        self._owners = Owners(connection)

    def page(self, caller: Caller, after: str, limit: int, left: Left) -> Page:
        """The batches after an entry. Raises ApiError for an entry that is none."""
        start = self._start(caller, after)
        entries = list(islice(self._entries(caller, start), limit + 1))
        shown = entries[:limit]
        items = self._facts(shown, left)
        last = f"{shown[-1][0]}-{shown[-1][1]}" if len(entries) > limit else ""
        return Page(items, last)

    def count(self, caller: Caller) -> int:
        """The number of the caller's batches. One that has just ended may count twice."""
        if caller.sees_all:
            return count_batches(self._connection) + int(self._connection.zcard(redis_keys.ENDED))
        keys = (redis_keys.native(caller.owner), redis_keys.batches(caller.owner))
        return sum(int(self._connection.zcard(key)) for key in keys)

    def visible(self, caller: Caller, left: Left) -> dict[str, float]:
        """The entries of the batches that the caller may see."""
        owners = self._owned(list(left))
        return {name: left[name] for name, owner in owners.items() if may_see(caller, owner)}

    def _start(self, caller: Caller, after: str) -> Entry | None:
        if not after:
            return None
        seconds, sign, name = after.partition("-")
        if sign and seconds.isdecimal() and len(seconds) < 14:
            return int(seconds), name
        if is_id(after, BATCH):
            return seconds_of(after), after
        score: Any = self._connection.zscore(_native_key(caller), after)
        if score is None:
            raise invalid("after must be `next` of a page, or the id of its last batch", "after")
        return int(score), after

    def _entries(self, caller: Caller, start: Entry | None) -> Iterator[Entry]:
        """All entries after one, the newest first."""
        lists = [self._native(caller, start), self._openai(caller, start)]
        return heapq.merge(*lists, reverse=True)

    def _native(self, caller: Caller, start: Entry | None) -> Iterator[Entry]:
        most = "+inf" if start is None else str(start[0])
        for offset in count(0, PAGE):
            page = self._scored(_native_key(caller), most, offset)
            ids = [name for _, name in page]
            raw: Any = self._connection.hmget(redis_keys.OWNERS, ids) if ids else []
            for entry, owner in zip(page, raw, strict=True):
                is_native = owner is None or not split_owner(owner)[1]
                if is_native and (start is None or entry < start):
                    yield entry
            if len(page) < PAGE:
                return

    def _scored(self, key: str, most: Any, offset: int) -> list[Entry]:
        found: Any = self._connection.zrange(
            key, most, "-inf", desc=True, byscore=True, offset=offset, num=PAGE, withscores=True
        )
        return [(int(score), raw.decode("utf-8", "replace")) for raw, score in found]

    def _openai(self, caller: Caller, start: Entry | None) -> Iterator[Entry]:
        if caller.sees_all:
            found: Any = [
                *self._connection.zrange(redis_keys.OPEN, 0, -1),
                *self._connection.zrange(redis_keys.ENDED, 0, -1),
            ]
        else:
            found = self._connection.zrange(redis_keys.batches(caller.owner), 0, -1)
        ids = {raw.decode("utf-8", "replace") for raw in found}
        entries = sorted((seconds_of(name), name) for name in ids if is_id(name, BATCH))
        for entry in reversed(entries):
            if start is None or entry < start:
                yield entry

    def _facts(self, entries: list[Entry], left: Left) -> list[dict[str, Any]]:
        """The facts of these batches. Those that are gone are left out."""
        records = self._records([name for _, name in entries if is_id(name, BATCH)])
        names = [records[n].queued_id if n in records else n for _, n in entries]
        batches = read_batches(self._connection, [n for n in names if n and not is_id(n, BATCH)])
        there = {each.batch_id: each for each in self._reconciler.reconcile_all(batches)}
        owners = self._owned(names)
        found = []
        for (_, name), queued_id in zip(entries, names, strict=True):
            record, batch = records.get(name), there.get(queued_id)
            if record is None and batch is None:
                self._tidy(name)
                continue
            owner = record.owner if record else owners[queued_id]
            found.append(facts_of(batch, record, owner, left))
        return found

    def _records(self, ids: list[str]) -> dict[str, BatchRecord]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for name in ids:
                pipeline.hgetall(redis_keys.batch(name))
            stored: list[Any] = pipeline.execute()
        read = map(read_record, ids, stored)
        return {record.batch_id: record for record in read if record is not None}

    def _owned(self, ids: list[str]) -> dict[str, str]:
        raw: Any = self._connection.hmget(redis_keys.OWNERS, ids) if ids else []
        return {name: split_owner(each or b"")[0] for name, each in zip(ids, raw, strict=True)}

    def _tidy(self, name: str) -> None:
        """Forget the owner of a batch that has expired or was deleted by the CLI."""
        if not (is_id(name, BATCH) or self._connection.exists(queue_keys.batch(name))):
            self._owners.remove(name)


def facts_of(
    batch: BatchStatus | None, record: BatchRecord | None, owner: str, left: Left
) -> dict[str, Any]:
    """The facts of a batch: those of ``batchkv list --json``, and of OpenAI's API.

    ``in_queue``: its rows are in the queue. ``owner`` is "" for a batch that the CLI made.
    """
    if batch is not None:
        fields = batch_fields(batch, left)
    else:
        assert record is not None
        fields = batch_fields(status_of(record))
    return {**fields, **more_fields(record, owner, in_queue=batch is not None)}


def more_fields(record: BatchRecord | None, owner: str, *, in_queue: bool) -> dict[str, Any]:
    """The facts of a batch that the queue does not have."""
    return {
        "openai_id": record.batch_id if record else None,
        "openai_status": record.status if record else None,
        "output_file_id": (record.output_file_id or None) if record else None,
        "error_file_id": (record.error_file_id or None) if record else None,
        "in_queue": in_queue,
        "owner": owner,
    }


def status_of(record: BatchRecord) -> BatchStatus:
    """The status of a batch of OpenAI's API whose rows are not in the queue.

    They are not there yet, or the batch has ended.
    """
    usage = json.loads(record.usage) if record.usage else {}
    details = usage.get("input_tokens_details", {})
    return BatchStatus(
        batch_id=record.queued_id or record.batch_id,
        name=record.filename,
        model=record.model,
        queue=queue_keys.queue_name(record.model) if record.model else "",
        total=record.completed + record.failed,
        created=record.created,
        ok=record.completed,
        failed=record.failed - record.canceled,
        canceled=record.canceled,
        cut=record.cut,
        running=0,
        prompt_tokens=usage.get("input_tokens", 0),
        completion_tokens=usage.get("output_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
        busy_ms=0,
        is_submitted=record.status not in OPEN,
        num_workers=0,
        last_line=record.total,
        expires=record.expires,
        num_results=record.completed + record.failed,
    )


def _native_key(caller: Caller) -> str:
    return queue_keys.BATCHES if caller.sees_all else redis_keys.native(caller.owner)
