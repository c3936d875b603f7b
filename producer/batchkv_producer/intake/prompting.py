"""How plain prompts reach the model: through its chat template, or as they are.

A *plain prompt* is a line of a text file, or a JSON line that has a ``prompt`` and neither ``url``
nor ``body``. Its reader marks it with the style ``auto``. The worker, which has the model, makes
one user message of it if there is a chat template. Lines with a ``url`` or a ``body`` name their
kind themselves, and are sent unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from batchkv_producer.errors import UsageError
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, decode_job, encode_job

MAX_SYSTEM_CHARS = 2**20


@dataclass(frozen=True, slots=True)
class Prompting:
    """``raw``: plain prompts are sent unchanged. ``system``: a message before each of them."""

    raw: bool = False
    system: str | None = None

    def check(self) -> None:
        """Raise UsageError for options that exclude each other or are invalid."""
        if self.system is None:
            return
        if self.raw:
            raise UsageError("--raw sends prompts without any message: it excludes --system")
        if not self.system.strip() or len(self.system) > MAX_SYSTEM_CHARS:
            raise UsageError(f"--system needs a text of 1 to {MAX_SYSTEM_CHARS} characters")
        try:
            self.system.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("the text of --system is not UTF-8") from None

    def apply(self, request: Request) -> Request:
        """The request with this style."""
        if request.style == "raw" or self == AUTO:
            return request
        return replace(request, style="raw" if self.raw else "auto", system=self.system)

    def identity(self) -> tuple[bytes, ...]:
        """The parts of a batch's identity for the options that were given."""
        if self.raw:
            return (b"raw",)
        return () if self.system is None else (b"system", self.system.encode())

    def as_fields(self) -> dict[str, str]:
        """The fields of a new batch's hash."""
        fields = {"style": "raw" if self.raw else "auto"}
        return fields if self.system is None else {**fields, "system": self.system}

    def sentence(self) -> str:
        """The note for a batch that has plain prompts."""
        if self.raw:
            return "plain prompts are sent as they are (--raw)"
        through = "plain prompts are sent through the model's chat template, where it has one"
        return f"{through}; --raw sends them as they are" if self.system is None else through


AUTO = Prompting()
RAW = Prompting(raw=True)
_STAYS_RAW = (
    "plain prompts are sent as they are, as when it was begun; --fresh computes all rows again, "
    "through the model's chat template"
)


def kept(connection: Redis, batch_id: str) -> tuple[Prompting, tuple[bytes, ...]]:
    """How an existing batch sends plain prompts, and the part of that in its digest.

    Batches of versions without styles store nothing. They are raw.
    """
    there: Any = connection.hmget(redis_keys.batch(batch_id), "style", "system")
    style, system = (None if raw is None else raw.decode("utf-8", "replace") for raw in there)
    if not style:
        return RAW, ()
    found = Prompting(style == "raw", system)
    return found, found.identity()


def style_note(connection: Redis, batch_id: str, *, is_new: bool) -> str:
    """The note for a batch that has plain prompts. "" for one that existed, and got it then.

    A batch of a version without styles gets its note each time, because it got none then.
    """
    found, identity = kept(connection, batch_id)
    if found.raw and not identity:
        return _STAYS_RAW
    return found.sentence() if is_new else ""


def as_raw(data: bytes) -> bytes:
    """A job's data with its plain prompt unchanged."""
    request = decode_job(data)
    if request.style == "raw":
        return data
    return encode_job(replace(request, style="raw", system=None))
