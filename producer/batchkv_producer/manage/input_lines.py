"""Turns failed rows into input lines again, for ``batchkv failed``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from redis import Redis

from batchkv_producer.intake.answer_format import format_of
from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.intake.fields import LINE_NAMES
from batchkv_producer.manage.cancel_retry import PAGE_ROWS, could_run
from batchkv_producer.manage.reconcile import jobs_in
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.stored_rows import in_input_order, none_missing
from batchkv_producer.wire.job import FUNCTION, Endpoint, Request, SamplingParams

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
    # A line can have the text of --system only as a message, and --no-thinking only beside one.
    is_message = request.system is not None or bool(request.chat_template_kwargs)
    endpoint: Endpoint = "chat" if is_message else request.endpoint
    body = {
        "model": model,
        **_prompt(request, is_message=is_message),
        **_options(request),
        **_params(request.params, endpoint),
    }
    line: dict[str, Any] = {"custom_id": request.custom_id}
    if request.style == "auto" and not is_message:
        line |= body  # without a url the prompt is sent through the chat template, as before
    else:
        line |= {"method": "POST", "url": _URLS[endpoint], "body": body}
    return json.dumps(line, ensure_ascii=False)


def _prompt(request: Request, *, is_message: bool) -> dict[str, Any]:
    if request.messages is not None:
        return {"messages": request.messages}
    if request.prompt_tokens is not None:
        return {"prompt": request.prompt_tokens}
    if not is_message:
        return {"prompt": request.prompt}
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    return {"messages": [*system, {"role": "user", "content": request.prompt}]}


def _options(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tools": request.tools,
        "chat_template_kwargs": request.chat_template_kwargs or None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning_effort,
        "tool_choice": request.tool_choice,
    }
    if request.tool_choice is not None and request.tool_choice.startswith(FUNCTION):
        function = {"name": request.tool_choice.removeprefix(FUNCTION)}
        found["tool_choice"] = {"type": "function", "function": function}
    if request.constraint is not None:
        found |= format_of(request.constraint)
    return {name: value for name, value in found.items() if value is not None}


def _params(params: SamplingParams, endpoint: Endpoint) -> dict[str, Any]:
    found = {k: v for k, v in asdict(params).items() if v is not None and v != ()}
    num_alternatives = found.pop("logprobs", None)
    if num_alternatives is not None and endpoint == "chat":
        found |= {"logprobs": True, "top_logprobs": num_alternatives}
    elif num_alternatives is not None:
        found["logprobs"] = num_alternatives
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return {LINE_NAMES.get(name, name): value for name, value in found.items()}
