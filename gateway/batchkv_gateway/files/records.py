"""The facts of files in Redis, and what may be done with a file.

A content that has no file yet, or no file any more, is in ``pending``. After an hour it is deleted.
So a gateway that is killed between folder and Redis leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.errors import CONFLICT, ApiError, unknown
from batchkv_gateway.files.folder import Folder, Incoming
from batchkv_gateway.ids import FILE, is_id, new_id
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.quotas import too_many_bytes
from batchkv_gateway.pages import Asked, read_page
from batchkv_gateway.scripts import Command, store, unless_used

PENDING_SECONDS = 3600
REPEAT_SECONDS = 600  # in which a delete whose answer was lost may be sent again
MAX_NAME_CHARS = 255
PAGE = 500
INPUT, OUTPUT = "batch", "batch_output"
PURPOSES = (INPUT, OUTPUT)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Times are seconds since 1970; ``expires`` is 0 for a file that does not expire."""

    file_id: str
    owner: str
    sha256: str
    num_bytes: int
    created: int
    filename: str
    purpose: str
    expires: int

    @property
    def content_name(self) -> str:
        """The name of its content in the folder."""
        return f"{self.file_id}.{self.sha256}"

    def as_object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "expires_at": self.expires or None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    def commands(self) -> list[Command]:
        """The commands that store it."""
        facts: dict[str, str | int] = {
            "owner": self.owner,
            "sha256": self.sha256,
            "bytes": self.num_bytes,
            "created": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "expires": self.expires,
        }
        words = [word for pair in facts.items() for word in pair]
        found: list[Command] = [("hset", redis_keys.file(self.file_id), *words)]
        for key in (redis_keys.files(self.owner), redis_keys.files(self.owner, self.purpose)):
            found.append(("zadd", key, 0, self.file_id))
        if self.expires:
            found.append(("zadd", redis_keys.EXPIRING, self.expires, self.file_id))
        found.append(("zrem", redis_keys.PENDING, self.content_name))
        return found


def clean_name(text: str) -> str:
    """A file's name for people: without folders and control characters. It is never a path."""
    name = text.replace("\\", "/").rpartition("/")[2]
    name = "".join(char for char in name if char.isprintable())
    return name.encode("utf-8", "replace").decode("utf-8")[:MAX_NAME_CHARS] or "upload"


class Files:
    """The files of all owners."""

    def __init__(self, connection: Redis, folder: Folder) -> None:
        self._connection = connection
        self.folder = folder

    def store(
        self, incoming: Incoming, caller: Caller, filename: str, expires_after_seconds: int
    ) -> FileRecord:
        """Keep an upload. When this returns, its content is on the disk and its facts in Redis.

        Raises ApiError if the caller would have more bytes of files than its limit.
        """
        record = self.publish(
            incoming, new_id(FILE), caller.owner, filename, INPUT, expires_after_seconds
        )
        if not self._fits(caller, record.num_bytes, record.commands()):
            self.folder.delete(record.content_name)
            self._connection.zrem(redis_keys.PENDING, record.content_name)
            raise too_many_bytes(caller)
        return record

    def check_room(self, caller: Caller, num_bytes: int) -> None:
        """Raise ApiError if so many bytes more are above the caller's limit already."""
        if caller.max_bytes and not self._fits(caller, num_bytes, []):
            raise too_many_bytes(caller)

    def _fits(self, caller: Caller, num_bytes: int, commands: list[Command]) -> bool:
        """Run the commands if so many bytes more are allowed."""
        files, prefix = redis_keys.files(caller.owner), redis_keys.file("")
        return store(self._connection, files, prefix, num_bytes, caller.max_bytes, commands)

    def publish(
        self,
        incoming: Incoming,
        file_id: str,
        owner: str,
        filename: str,
        purpose: str,
        expires_after_seconds: int,
    ) -> FileRecord:
        """Give a content its place. It has no facts in Redis yet: ``commands`` stores them."""
        now = int(time.time())
        record = FileRecord(
            file_id=file_id,
            owner=owner,
            sha256=incoming.sha256(),
            num_bytes=incoming.num_bytes,
            created=now,
            filename=clean_name(filename),
            purpose=purpose,
            expires=now + expires_after_seconds,
        )
        self._connection.zadd(redis_keys.PENDING, {record.content_name: now})
        incoming.keep(record.content_name)
        return record

    def find(self, owner: str, file_id: str, param: str = "id") -> FileRecord:
        """An owner's file. Raises ApiError (404) if there is none, or if it has expired.

        ``param``: the field of the request that names it.
        """
        record = self.read(file_id) if is_id(file_id, FILE) else None
        if record is None or record.owner != owner:
            raise unknown("file", file_id, param)
        if 0 < record.expires <= time.time() and self._remove(record) != "used":
            raise unknown("file", file_id, param)
        return record

    def read(self, file_id: str) -> FileRecord | None:
        """A file of any owner, or None."""
        stored: Any = self._connection.hgetall(redis_keys.file(file_id))
        return _record(file_id, stored)

    def page(self, owner: str, purpose: str, asked: Asked) -> tuple[list[FileRecord], bool]:
        """A page of an owner's files, and whether there are more. "" is any purpose."""
        self.delete_expired()
        ids = redis_keys.files(owner, purpose)
        return read_page(self._connection, ids, asked, redis_keys.file, _record)

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises ApiError (409) while a batch reads it.

        Clients send a request again whose answer was lost. So the same call again is no error.
        """
        if is_id(file_id, FILE) and self._was_deleted(owner, file_id):
            return
        record = self.find(owner, file_id)
        trace = redis_keys.deleted(file_id)
        outcome = self._remove(
            record, ("hset", trace, "owner", owner), ("expire", trace, REPEAT_SECONDS)
        )
        if outcome == "used":
            raise ApiError(
                CONFLICT,
                f"a batch that is not over reads file {file_id}: cancel the batch, or wait for it",
                code="file_in_use",
            )
        if outcome and not self._was_deleted(owner, file_id):
            raise unknown("file", file_id)

    def _was_deleted(self, owner: str, file_id: str) -> bool:
        who: Any = self._connection.hget(redis_keys.deleted(file_id), "owner")
        return who is not None and who.decode("utf-8", "replace") == owner

    def delete_expired(self) -> None:
        """Delete the files whose time is over, except those that a batch reads."""
        while True:
            due: Any = self._connection.zrange(
                redis_keys.EXPIRING, 0, int(time.time()), byscore=True, offset=0, num=PAGE
            )
            outcomes = [self._expire(file_id.decode("utf-8", "replace")) for file_id in due]
            if len(due) < PAGE or "" not in outcomes:
                return

    def delete_pending(self) -> None:
        """Delete contents that have been without a file for an hour, and interrupted uploads."""
        oldest = int(time.time()) - PENDING_SECONDS
        due: Any = self._connection.zrange(redis_keys.PENDING, 0, oldest, byscore=True)
        for raw in due:
            name = raw.decode("utf-8", "replace")
            file_id, _, digest = name.partition(".")
            if is_id(file_id, FILE) and len(digest) == 64 and digest.isalnum():
                record = self.read(file_id)
                if record is None or record.content_name != name:
                    self.folder.delete(name)
            self._connection.zrem(redis_keys.PENDING, raw)
        self.folder.delete_interrupted()

    def _expire(self, file_id: str) -> str:
        record = self.read(file_id)
        if record is not None:
            return self._remove(record)
        self._connection.zrem(redis_keys.EXPIRING, file_id)
        return ""

    def _remove(self, record: FileRecord, *more: Command) -> str:
        key, file_id, owner = redis_keys.file(record.file_id), record.file_id, record.owner
        outcome = unless_used(
            self._connection,
            key,
            redis_keys.uses(file_id),
            [
                ("del", key),
                ("zrem", redis_keys.files(owner), file_id),
                ("zrem", redis_keys.files(owner, record.purpose), file_id),
                ("zrem", redis_keys.EXPIRING, file_id),
                ("zadd", redis_keys.PENDING, int(time.time()), record.content_name),
                *more,
            ],
        )
        if not outcome:
            self.folder.delete(record.content_name)
            self._connection.zrem(redis_keys.PENDING, record.content_name)
        return outcome


def _record(file_id: str, stored: Mapping[bytes, bytes]) -> FileRecord | None:
    """The file of a hash; None if it cannot be read."""
    values = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in stored.items()}
    try:
        return FileRecord(
            file_id=file_id,
            owner=values["owner"],
            sha256=values["sha256"],
            num_bytes=int(values["bytes"]),
            created=int(values["created"]),
            filename=values["filename"],
            purpose=values["purpose"],
            expires=int(values["expires"]),
        )
    except (KeyError, ValueError):
        return None
