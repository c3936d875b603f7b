"""Who may see a batch of the queue. Another's batch is answered like one that does not exist."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches.record import BatchRecord, read_record
from batchkv_gateway.ids import BATCH, is_id
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.store import LOCAL
from batchkv_producer.errors import NotFoundError
from batchkv_producer.monitor.status import MIN_PREFIX_CHARS, match_batch

_WHOLE_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Found:
    """A batch that the caller may see. ``batch_id`` is its id in the queue.

    ``openai``: the batch of OpenAI's API to which it belongs. ``owner``: "" is nobody's.
    """

    batch_id: str
    owner: str = ""
    openai: BatchRecord | None = None


class Owners:
    """The owners of the queue's batches. A batch of the CLI has none."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def add(self, caller: Caller, batch_id: str) -> None:
        """Store who made a batch. It is called before the batch is made."""
        if caller.owner == LOCAL:
            return
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.hset(redis_keys.OWNERS, batch_id, caller.owner)
            pipeline.zadd(redis_keys.native(caller.owner), {batch_id: int(time.time())}, nx=True)
            pipeline.execute()

    def remove(self, batch_id: str) -> None:
        """Forget who made a batch that is gone."""
        raw: Any = self._connection.hget(redis_keys.OWNERS, batch_id)
        if raw is None:
            return
        owner, _ = split_owner(raw)
        # Not as one: a full Redis refuses transactions. The entry that is read above goes last.
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.zrem(redis_keys.native(owner), batch_id)
            pipeline.hdel(redis_keys.OWNERS, batch_id)
            pipeline.execute()

    def owner_of(self, batch_id: str) -> str:
        """The owner of a batch of the queue; "" for a batch of the CLI."""
        raw: Any = self._connection.hget(redis_keys.OWNERS, batch_id)
        return split_owner(raw or b"")[0]

    def find(self, caller: Caller, wanted: str) -> Found:
        """The batch of an id, of the beginning of one, or of an id of OpenAI's API.

        Raises NotFoundError, also if the caller may not see it.
        """
        if is_id(wanted, BATCH):
            record = self.record(wanted)
            if record is None or not may_see(caller, record.owner):
                raise _nothing(wanted)
            return Found(record.queued_id or wanted, record.owner, record)
        batch_id = wanted if _WHOLE_ID.fullmatch(wanted) else self._match(caller, wanted)
        raw: Any = self._connection.hget(redis_keys.OWNERS, batch_id)
        owner, openai_id = split_owner(raw or b"")
        if not may_see(caller, owner):
            raise _nothing(wanted)
        return Found(batch_id, owner, self.record(openai_id) if openai_id else None)

    def _match(self, caller: Caller, wanted: str) -> str:
        """The whole id of a beginning, among the batches that the caller may see."""
        if caller.sees_all or len(wanted) < MIN_PREFIX_CHARS:
            return match_batch(self._connection, wanted)
        raw_ids: Any = self._connection.zrange(redis_keys.native(caller.owner), 0, -1)
        ids: list[str] = [raw.decode("utf-8", "replace") for raw in raw_ids]
        matches = [batch_id for batch_id in ids if batch_id.startswith(wanted)]
        if len(matches) > 1:
            raise NotFoundError(f"{wanted} could be any of {', '.join(sorted(matches)[:5])}")
        if not matches:
            raise _nothing(wanted)
        return matches[0]

    def record(self, openai_id: str) -> BatchRecord | None:
        """The batch of OpenAI's API as it is now."""
        stored: Any = self._connection.hgetall(redis_keys.batch(openai_id))
        return read_record(openai_id, stored)


def identity_of(owner: str) -> tuple[bytes, ...]:
    """The owner's part of the identity of its batches.

    Without a key there is none. So the same file is the same batch by HTTP and by Redis.
    """
    return () if owner in ("", LOCAL) else (b"owner", owner.encode())


def may_see(caller: Caller, owner: str) -> bool:
    """Whether a caller may see what belongs to this owner."""
    return caller.sees_all or owner == caller.owner


def split_owner(raw: bytes) -> tuple[str, str]:
    """An entry of ``OWNERS``: the owner, and the id of OpenAI's API or ""."""
    owner, _, openai_id = raw.decode("utf-8", "replace").partition(" ")
    return owner, openai_id


def _nothing(wanted: str) -> NotFoundError:
    return NotFoundError(f"no batch {wanted[:80]} on this server")
