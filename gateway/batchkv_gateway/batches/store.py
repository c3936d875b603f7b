"""Batches for their owners: create, read, list, cancel. Each call is one change at most."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches import record as states
from batchkv_gateway.batches.check import num_rows_of
from batchkv_gateway.batches.record import BatchRecord, read_record
from batchkv_gateway.errors import BAD_REQUEST, CONFLICT, ApiError, unknown
from batchkv_gateway.files.records import INPUT, Files
from batchkv_gateway.ids import BATCH, is_id, new_id
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.quotas import Quotas, too_many_rows
from batchkv_gateway.pages import Asked, read_page
from batchkv_gateway.scripts import Command, Reservation, create, guarded
from batchkv_producer.monitor.counts import read_counts

PAGE = 500


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """What a client asks for. ``metadata`` is JSON with sorted keys."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_seconds: int
    metadata: str
    validation: str
    output_seconds: int


class Batches:
    """The batches of all owners."""

    def __init__(self, connection: Redis, files: Files, quotas: Quotas) -> None:
        self._connection, self._files, self._quotas = connection, files, quotas

    def create(self, caller: Caller, asked: AskedBatch) -> BatchRecord:
        """Make a batch, or find the one that was made by the same request before.

        A batch that failed, was cancelled or has expired is made anew, and so is a completed one
        whose files are gone. Raises ApiError if it would have more rows than the caller's limit.
        """
        owner = caller.owner
        file = self._files.find(owner, asked.input_file_id, "input_file_id")
        if file.purpose != INPUT:
            raise ApiError(
                BAD_REQUEST, "the input file must have the purpose batch", param="input_file_id"
            )
        now = int(time.time())
        parts = (owner, file.sha256, asked.endpoint, asked.completion_window, asked.metadata)
        text = json.dumps([*parts, asked.validation, asked.output_seconds])
        record = BatchRecord(
            batch_id=new_id(BATCH),
            owner=owner,
            digest=hashlib.sha256(text.encode()).hexdigest(),
            endpoint=asked.endpoint,
            input_file_id=file.file_id,
            content=file.content_name,
            filename=file.filename,
            completion_window=asked.completion_window,
            created=now,
            expires=now + asked.window_seconds,
            metadata=asked.metadata,
            validation=asked.validation,
            output_seconds=asked.output_seconds,
            cache_salt=caller.cache_salt or "",
        )
        made = self._make(record, caller)
        return record if made == record.batch_id else self.find(owner, made)

    def _make(self, record: BatchRecord, caller: Caller) -> str:
        """Store a new batch. Returns its id, or that of the same batch of an earlier request."""
        words = [word for pair in record.as_fields().items() for word in pair]
        commands: list[Command] = [
            ("hset", redis_keys.batch(record.batch_id), *words),
            ("zadd", redis_keys.batches(record.owner), 0, record.batch_id),
            ("zadd", redis_keys.OPEN, record.created, record.batch_id),
            ("hset", redis_keys.uses(record.input_file_id), record.batch_id, 1),
        ]
        prefixes = (redis_keys.batch(""), redis_keys.file(""))
        keys = (redis_keys.SAME, redis_keys.file(record.input_file_id))
        rows = self._rows(record, caller)
        made = create(self._connection, keys, record.digest, rows, prefixes, commands)
        if made == "full":  # rows may have ended meanwhile
            rows = replace(rows, ended=self._quotas.ended(caller))
            made = create(self._connection, keys, record.digest, rows, prefixes, commands)
        if made == "full":
            raise too_many_rows(caller, rows.num_rows)
        if made == "gone":
            raise unknown("file", record.input_file_id)
        return made

    def _rows(self, record: BatchRecord, caller: Caller) -> Reservation:
        """The rows to reserve. They are counted only where there is a limit."""
        path = self._files.folder.content(record.content)
        is_counted = caller.max_rows and path.is_file()
        num_rows = num_rows_of(path) if is_counted else 0
        key = redis_keys.open_rows(record.owner)
        return Reservation(key, record.batch_id, num_rows, caller.max_rows)

    def find(self, owner: str, batch_id: str) -> BatchRecord:
        """An owner's batch. Raises ApiError (404) if there is none."""
        record = self.find_all([(owner, batch_id)])[0]
        if record is None:
            raise unknown("batch", batch_id)
        return record

    def find_all(self, asked: Sequence[tuple[str, str]]) -> list[BatchRecord | None]:
        """The batches of these owners and ids. None for one that the owner does not have."""
        ids = list({batch_id for _, batch_id in asked if is_id(batch_id, BATCH)})
        with self._connection.pipeline(transaction=False) as pipeline:
            for batch_id in ids:
                pipeline.hgetall(redis_keys.batch(batch_id))
            found = dict(zip(ids, map(read_record, ids, pipeline.execute()), strict=True))
        records = [(owner, found.get(batch_id)) for owner, batch_id in asked]
        return [record if record and record.owner == owner else None for owner, record in records]

    def page(self, owner: str, asked: Asked) -> tuple[list[BatchRecord], bool]:
        """A page of an owner's batches, and whether there are more."""
        self.delete_ended()
        ids = redis_keys.batches(owner)
        return read_page(self._connection, ids, asked, redis_keys.batch, read_record)

    def objects(self, records: list[BatchRecord]) -> list[dict[str, Any]]:
        """OpenAI's objects of batches, with the present counts of those that are open."""
        ids = {r.queued_id for r in records if r.status in states.OPEN and r.queued_id}
        queued = read_counts(self._connection, [*ids])
        return [record.as_object(queued.get(record.queued_id)) for record in records]

    def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch. One that is being cancelled, or was, stays as it is."""
        record = self.find(owner, batch_id)
        key, now = redis_keys.batch(batch_id), int(time.time())
        change: Command = ("hset", key, "status", states.CANCELLING, "cancelling_at", now)
        expected = (states.VALIDATING, states.IN_PROGRESS)
        state = guarded(self._connection, key, "status", expected, [change])
        if state in ("", states.CANCELLING, states.CANCELLED):
            return self.find(owner, batch_id)
        raise ApiError(
            BAD_REQUEST,
            f"a batch whose status is {state or record.status} cannot be cancelled",
            code="batch_not_cancellable",
        )

    def delete(self, record: BatchRecord) -> None:
        """Delete an ended batch, and the files that it made. Raises ApiError for an open one."""
        if record.status in states.OPEN:
            message = f"batch {record.batch_id} is not over: cancel it, and wait for its end"
            raise ApiError(CONFLICT, message, code="batch_not_over")
        for file_id in filter(None, (record.output_file_id, record.error_file_id)):
            with suppress(ApiError):  # it was deleted before, or has expired
                self._files.delete(record.owner, file_id)
        self._delete(record.batch_id, record)

    def delete_ended(self) -> None:
        """Delete the records of batches that ended long ago."""
        now = int(time.time())
        due: Any = self._connection.zrange(
            redis_keys.ENDED, 0, now, byscore=True, offset=0, num=PAGE
        )
        for raw in due:
            batch_id = raw.decode("utf-8", "replace")
            stored: Any = self._connection.hgetall(redis_keys.batch(batch_id))
            self._delete(batch_id, read_record(batch_id, stored))

    def _delete(self, batch_id: str, record: BatchRecord | None) -> None:
        # Not as one: a full Redis refuses transactions. The entry that leads here goes last.
        with self._connection.pipeline(transaction=False) as pipeline:
            if record is not None:
                pipeline.zrem(redis_keys.batches(record.owner), batch_id)
                same: Any = self._connection.hget(redis_keys.SAME, record.digest)
                if same == batch_id.encode():
                    pipeline.hdel(redis_keys.SAME, record.digest)
                if record.queued_id:
                    pipeline.hdel(redis_keys.OWNERS, record.queued_id)
            pipeline.delete(redis_keys.batch(batch_id), redis_keys.facts(batch_id))
            pipeline.zrem(redis_keys.ENDED, batch_id)
            pipeline.execute()
