"""Turns failed rows into input lines again, for ``batchkv failed``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from redis import Redis

from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.manage.cancel_retry import PAGE_ROWS, could_run
from batchkv_producer.manage.reconcile import jobs_in
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.stored_rows import in_input_order, none_missing
from batchkv_producer.wire.job import Request

_URLS = {endpoint: url for url, endpoint in ENDPOINTS.items()}
_STATES = (b"failed", b"canceled", b"stopped", b"finished")


@dataclass(slots=True)
class MissingLines:
    """Counts rows for which there is no line."""

    num_wrong: int = 0  # wrong in the input
    num_gone: int = 0  # their job is no longer in Redis


def failed_lines(
    connection: Redis, status: BatchStatus, missing: MissingLines, *, canceled: bool = False
) -> Iterator[str]:
    """An input line for each failed (or canceled) row, in the order of the input.

    Rows without a line are counted in ``missing``.
    """
    wanted = ("failed", "canceled") if canceled else ("failed",)
    rows = none_missing(connection, status.batch_id, in_input_order(connection, status.batch_id))
    failed = (row for row in rows if row.result.outcome in wanted)
    while page := list(islice(failed, PAGE_ROWS)):
        by_line = {row.line: row.result for row in page}
        for _, line, request in jobs_in(connection, status.batch_id, [*by_line], _STATES):
            if request is not None:
                # Also if a worker refused it: an older worker may refuse what a newer one can do.
                del by_line[line]
                yield input_line(request, status.model)
        num_gone = sum(map(could_run, by_line.values()))
        missing.num_gone += num_gone
        missing.num_wrong += len(by_line) - num_gone


def input_line(request: Request, model: str) -> str:
    """An OpenAI Batch line with the same request. The batch's defaults are written out.

    For a plain prompt it is a line without a url, as in the input.
    """
    body: dict[str, Any] = {"model": model}
    is_plain = request.style == "auto" and request.system is None
    endpoint = request.endpoint
    if request.prompt is None:
        body["messages"] = request.messages
    elif request.system is not None:  # a line can have the text of --system only as a message
        messages = (("system", request.system), ("user", request.prompt))
        body["messages"] = [{"role": role, "content": text} for role, text in messages]
        endpoint = "chat"
    else:
        body["prompt"] = request.prompt
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name):
            body[name] = getattr(request, name)
    params = {k: v for k, v in asdict(request.params).items() if v not in (None, ())}
    num_alternatives = params.pop("logprobs", None)
    if num_alternatives is not None and endpoint == "chat":
        params |= {"logprobs": True, "top_logprobs": num_alternatives}
    elif num_alternatives is not None:
        params["logprobs"] = num_alternatives
    line: dict[str, Any] = {"custom_id": request.custom_id}
    if is_plain:  # without a url the prompt is sent through the chat template, as before
        line |= {**body, **params}
    else:
        line |= {"method": "POST", "url": _URLS[endpoint], "body": {**body, **params}}
    return json.dumps(line, ensure_ascii=False)
