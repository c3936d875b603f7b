"""Results as lines of a batch's files have them: the inverse of ``results.output``.

A line says neither which worker answered, nor how long it took, nor what the shared cache gave.
The fingerprint of the model's files is as long as the line has it.
"""

from __future__ import annotations

from typing import Any

from batchkv_producer.results.output import OPENAI_CODES
from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.job import Endpoint, ErrorCode, Outcome, Result, Usage

REFUSED = 400
_CANCELED = OPENAI_CODES[ErrorCode.CANCELED]
_OWN_CODES = {name: code for code, name in OPENAI_CODES.items()}


def result_of(value: dict[str, Any]) -> Result:
    """The result in a line of a file."""
    custom_id, body = str(value.get("custom_id", "")), _body_of(value)
    if value.get("error") or is_refused(value):
        outcome: Outcome = "canceled" if is_canceled(value) else "failed"
        return Result(custom_id, "chat", outcome, error=error_of(value))
    endpoint: Endpoint = "chat" if body.get("object") == "chat.completion" else "completion"
    values = body.get("choices") or [{}]
    first, *more = (_choice_of(endpoint, one) for one in values)
    fingerprint, scheme = _maker_of(str(body.get("system_fingerprint") or ""))
    holder = body if endpoint == "chat" else values[0]
    return Result(
        custom_id,
        endpoint,
        "ok",
        model=str(body.get("model", "")),
        text=first.text,
        finish_reason=first.finish_reason,
        usage=_usage_of(body.get("usage") or {}),
        logprobs=first.logprobs,
        created=body.get("created") or 0,
        fingerprint=fingerprint,
        scheme=scheme,
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        token_ids=first.token_ids,
        prompt_token_ids=_ids_of(holder.get("prompt_token_ids")),
        more=tuple(more),
        reused=value.get("reused") is True,
    )


def is_refused(value: dict[str, Any]) -> bool:
    """Whether a row was wrong in the input."""
    response = value.get("response") or {}
    return bool(response.get("status_code", 0) >= REFUSED)


def is_canceled(value: dict[str, Any]) -> bool:
    """Whether a row was canceled."""
    return (value.get("error") or {}).get("code") == _CANCELED


def error_of(value: dict[str, Any]) -> tuple[str, str]:
    """The code, as batchkv names it, and the message."""
    error = value.get("error") or _body_of(value).get("error") or {}
    code = str(error.get("code", ""))
    return _OWN_CODES.get(code, code), str(error.get("message", ""))


def _body_of(value: dict[str, Any]) -> dict[str, Any]:
    return (value.get("response") or {}).get("body") or {}


def _choice_of(endpoint: Endpoint, choice: dict[str, Any]) -> Choice:
    said = choice.get("message") or choice
    logprobs = choice.get("logprobs")
    read = _chat_logprobs if endpoint == "chat" else _text_logprobs
    return Choice(
        text=said.get("content") or said.get("text") or "",
        finish_reason=choice.get("finish_reason") or "",
        logprobs=None if logprobs is None else read(logprobs),
        reasoning=said.get("reasoning_content") or "",
        tool_calls=tuple(
            ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in said.get("tool_calls") or ()
        ),
        token_ids=_ids_of(choice.get("token_ids")),
    )


def _chat_logprobs(logprobs: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            one["token"],
            one["logprob"],
            tuple((other["token"], other["logprob"]) for other in one["top_logprobs"]),
        )
        for one in logprobs["content"]
    )


def _text_logprobs(logprobs: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    lists = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    return tuple(
        TokenLogprob(token, logprob, tuple(top.items()))
        for token, logprob, top in zip(*lists, strict=True)
    )


def _ids_of(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _usage_of(usage: dict[str, Any]) -> Usage:
    return Usage(
        prompt=usage.get("prompt_tokens", 0),
        completion=usage.get("completion_tokens", 0),
        cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        reasoning=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )


def _maker_of(mark: str) -> tuple[str, str]:
    """Fingerprint and scheme of a ``system_fingerprint``; "" where there is none."""
    parts = mark.split("_", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "fp" else ("", "")
