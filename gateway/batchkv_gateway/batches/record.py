"""A batch as Redis stores it, and as OpenAI's clients see it.

The fields of its hash are those of ``BatchRecord``. Times are seconds since 1970, 0 for none yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchkv_producer.monitor.counts import Counts

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
OPEN = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
TIMES = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch.

    ``content`` is the name of its input in the folder and ``filename`` the name for people.
    ``queued_id`` is the id of its batch in the queue, "" before the submit. ``output_id`` and
    ``error_id`` are chosen before the files are written; ``output_file_id`` and ``error_file_id``
    are there once the files are. ``errors``, ``metadata`` and ``usage`` are JSON. ``total``,
    ``completed`` and ``failed`` count the lines of the files; ``canceled`` are some of ``failed``,
    and ``cut``, which ended at max_tokens, of ``completed``. ``digest`` is what was asked for.
    ``cache_salt`` is that of a private owner, else "".
    """

    batch_id: str
    owner: str
    digest: str
    endpoint: str
    input_file_id: str
    content: str
    filename: str
    completion_window: str
    created: int
    expires: int
    metadata: str
    validation: str
    output_seconds: int
    cache_salt: str = ""
    status: str = VALIDATING
    queued_id: str = ""
    model: str = ""
    errors: str = ""
    output_id: str = ""
    error_id: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    canceled: int = 0
    cut: int = 0
    usage: str = ""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0

    @property
    def is_strict(self) -> bool:
        """Whether one wrong line fails the batch."""
        return self.validation == "strict"

    def as_fields(self) -> dict[str, str | int]:
        """The fields of its hash."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "batch_id"}

    def as_object(self, queued: Counts | None = None) -> dict[str, Any]:
        """OpenAI's batch object. ``queued``: the counts in the queue now, while it is open."""
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        usage = json.loads(self.usage) if self.usage else None
        if queued is not None and self.status in OPEN:
            failed = queued.failed + queued.canceled
            counts = {"total": queued.total, "completed": queued.ok, "failed": failed}
            usage = usage_of(queued.prompt_tokens, queued.cached_tokens, queued.completion_tokens)
        errors = json.loads(self.errors) if self.errors else None
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id or None,
            "error_file_id": self.error_file_id or None,
            "created_at": self.created,
            "expires_at": self.expires,
            **{f"{name}_at": getattr(self, f"{name}_at") or None for name in TIMES},
            "request_counts": counts,
            "usage": usage,
            "metadata": json.loads(self.metadata) or None,
        }


def read_record(batch_id: str, stored: Mapping[bytes, bytes]) -> BatchRecord | None:
    """The batch of a hash; None if there is none, or if it cannot be read."""
    texts = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in stored.items()}
    values: dict[str, Any] = {}
    try:
        for field in fields(BatchRecord):
            if field.name in texts:
                text = texts[field.name]
                values[field.name] = int(text) if field.type == "int" else text
        for name in ("metadata", "errors", "usage"):
            if values.get(name):
                json.loads(values[name])
        return BatchRecord(batch_id=batch_id, **values)
    except (ValueError, TypeError, RecursionError):
        return None


def usage_of(
    num_input: int, num_cached: int, num_output: int, num_reasoning: int = 0
) -> dict[str, Any]:
    """OpenAI's usage of a batch, in tokens."""
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_input + num_output,
    }
