"""Computes failed rows of an ended batch of OpenAI's API again.

Such a batch ends once, and its files never change. So the rows become a new batch of OpenAI's API,
with the same terms and a file of their input lines. Its metadata names the batch as ``retry_of``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from batchkv_gateway.batches.record import OPEN, BatchRecord
from batchkv_gateway.batches.store import AskedBatch
from batchkv_gateway.errors import CONFLICT, NOT_FOUND, ApiError
from batchkv_gateway.files.records import MAX_NAME_CHARS
from batchkv_gateway.http.batch_routes import MAX_PAIRS
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.native.file_rows import FileRows
from batchkv_gateway.parts import Parts
from batchkv_producer.remote.terms import Terms
from batchkv_producer.wire.batch_options import seconds_of
from batchkv_producer.wire.job import NO_PARAMS

RETRY_OF = "retry_of"


def retry_openai(parts: Parts, caller: Caller, record: BatchRecord, terms: Terms) -> dict[str, Any]:
    """Make the new batch. The same retry again finds it.

    ``queued`` counts its rows, 0 if none can be computed again. Raises ApiError if the batch is not
    over, or if its input is gone, or for terms other than ``canceled``.
    """
    given = (terms.files, terms.filename, terms.job_timeout_seconds, terms.options.expires)
    if any(given) or terms.defaults != NO_PARAMS:
        message = "a retry of a batch of OpenAI's API has the batch's own input and terms"
        raise ApiError(CONFLICT, f"{message}: leave the options out", code="openai_batch")
    if record.status in OPEN:
        message = f"batch {record.batch_id} is not over: wait for its end, or cancel it"
        raise ApiError(CONFLICT, message, code="batch_not_over")
    rows = FileRows(parts.files, record)
    lines = rows.lines_to_retry(canceled=terms.canceled)
    if not rows.has_input and record.failed:
        message = f"the input of batch {record.batch_id} is gone: upload it again"
        raise ApiError(NOT_FOUND, message, code="content_lost")
    if not lines:
        return {"queued": 0, "openai_id": None}
    owner = _as_owner(caller, record)
    with parts.files.folder.begin(parts.settings.max_file_bytes) as incoming:
        for _, raw in rows.input_lines(lines):
            incoming.write(raw)
        name = f"retry of {record.filename}"[:MAX_NAME_CHARS]
        seconds = parts.settings.keep_files_seconds
        file = parts.files.store(incoming, owner, name, seconds)
    made = parts.batches.create(owner, _asked(record, file.file_id))
    parts.driver.nudge()
    return {"queued": len(lines), "openai_id": made.batch_id}


def _as_owner(caller: Caller, record: BatchRecord) -> Caller:
    """The caller, or the owner of a batch that somebody retries who manages all of them."""
    if caller.owner == record.owner:
        return caller
    return replace(caller, owner=record.owner, cache_salt=record.cache_salt or None)


def _asked(record: BatchRecord, file_id: str) -> AskedBatch:
    metadata: dict[str, str] = json.loads(record.metadata)
    if len(metadata) < MAX_PAIRS or RETRY_OF in metadata:
        metadata[RETRY_OF] = record.batch_id
    return AskedBatch(
        endpoint=record.endpoint,
        input_file_id=file_id,
        completion_window=record.completion_window,
        window_seconds=seconds_of(record.completion_window),
        metadata=json.dumps(metadata, sort_keys=True),
        validation=record.validation,
        output_seconds=record.output_seconds,
    )
