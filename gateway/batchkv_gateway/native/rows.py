"""The rows of a batch by their line in the input: prompt, outcome, tokens, worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.bounded import Reader, stored_results
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, decode_job, decode_result

PAGE_LINES = 200
MAX_LINES_READ = 10_000  # for one page, while rows with an outcome are searched
SHORT_CHARS = 300
_JOB_STATES = (b"queued", b"started", b"deferred", b"scheduled", b"finished", b"failed",
               b"stopped", b"canceled")  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows, and the line after which the next page begins; 0 if there are no more."""

    rows: list[dict[str, Any]]
    next_line: int


def page_of_rows(
    connection: Redis, batch: BatchStatus, after: int, limit: int, outcome: str, *, full: bool
) -> RowPage:
    """The rows after a line. ``outcome``: only rows with this one; at most ``MAX_LINES_READ`` lines
    are searched for them, so a page may have fewer rows than ``limit``."""
    last = min(batch.last_line, after + MAX_LINES_READ) if outcome else batch.last_line
    lines = range(after + 1, last + 1)
    found = list(islice(_rows(connection, batch.batch_id, lines, outcome), limit))
    rows = [facts_of_row(row, full=full) for row in _with_jobs(connection, found)]
    shown = found[-1].line if len(found) == limit else last
    return RowPage(rows, shown if shown < batch.last_line else 0)


@dataclass(frozen=True, slots=True)
class RowParts:
    """What is known of a row. ``state`` is that of its job, ``request`` None without a prompt."""

    job_id: str
    line: int
    result: Result | None
    state: str = ""
    request: Request | None = None


def _rows(connection: Redis, batch_id: str, lines: range, outcome: str) -> Iterator[RowParts]:
    """The rows of these lines. Without an outcome, lines without a result are among them."""
    for start in range(0, len(lines), PAGE_LINES):
        for line, value in stored_results(connection, batch_id, lines[start : start + PAGE_LINES]):
            result = None if value is None else _decoded(value)
            if not outcome or (result is not None and result.outcome == outcome):
                yield RowParts(redis_keys.job_id(batch_id, line), line, result)


def _with_jobs(connection: Redis, rows: Sequence[RowParts]) -> Iterator[RowParts]:
    """The rows with their requests, where Redis has them. Blank lines of the input are left out."""
    ids = [row.job_id for row in rows]
    jobs = Reader(connection).jobs(ids, _JOB_STATES)
    for row, (_, state, data) in zip(rows, jobs, strict=True):
        if row.result is None and state is None:
            continue
        request = _request(data) if data else None
        yield RowParts(row.job_id, row.line, row.result, (state or b"").decode("ascii"), request)


def facts_of_row(row: RowParts, *, full: bool) -> dict[str, Any]:
    """A row as JSON. ``full``: with whole texts."""
    result = row.result or Result(custom_id="", endpoint="chat", outcome="ok")
    prompt = (prompt_text if full else _short_prompt)(row.request) if row.request else None
    custom_id = row.request.custom_id if row.request else result.custom_id
    waiting = "running" if row.state == "started" else "queued"
    calls = result.tool_calls if full else ()
    messages = (row.request.messages or ()) if row.request and full else ()
    return {
        "line": row.line,
        "id": row.job_id,
        "custom_id": custom_id,
        "outcome": waiting if row.result is None else result.outcome,
        "prompt": prompt,
        "messages": [{"role": str(m.get("role")), "content": _content(m)} for m in messages],
        "answer": result.text if full else shortened(result.text),
        "reasoning": result.reasoning if full else shortened(result.reasoning),
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls],
        "finish_reason": result.finish_reason or None,
        "error": {"code": result.error[0], "message": result.error[1]} if result.error else None,
        "prompt_tokens": result.usage.prompt,
        "cached_tokens": result.usage.cached,
        "completion_tokens": result.usage.completion,
        "worker": result.worker or None,
        "reused": result.reused,
        "created": result.created or None,
        "busy_ms": result.busy_ms,
    }


def prompt_text(request: Request) -> str:
    """The text of a prompt. Messages are preceded by their roles."""
    if request.prompt is not None:
        return request.prompt
    if request.messages is None:
        return " ".join(map(str, request.prompt_tokens or ()))
    return "\n".join(f"{each.get('role')}: {_content(each)}" for each in request.messages)


def _short_prompt(request: Request) -> str:
    """The beginning of a prompt. Of messages, that of the last one: the first often is the same."""
    if request.messages:
        return shortened(_content(request.messages[-1]))
    return shortened(prompt_text(request))


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
    calls = message.get("tool_calls")
    return "\n".join(texts) + (json.dumps(calls) if calls else "")


def shortened(text: str) -> str:
    """The beginning of a text."""
    return text if len(text) <= SHORT_CHARS else f"{text[:SHORT_CHARS]} ..."


def _decoded(value: bytes) -> Result:
    try:
        return decode_result(value)
    except WireError as fault:
        return Result("", "chat", "failed", error=("unreadable", str(fault)))


def _request(data: bytes) -> Request | None:
    try:
        return decode_job(data)
    except WireError:
        return None
