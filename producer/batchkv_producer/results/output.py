"""Results as OpenAI Batch output lines, or as plain text.

A row has one of three shapes, as OpenAI's files have them::

    an answer           response {status_code: 200, body: the choices}, error null
    a refused request   response {status_code: 400, body: {error: {message, type, param, code}}},
                        error null
    no answer at all    response null, error {code, message}

Answers go to OUT, the other two to OUT.errors.jsonl (``outfile``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.job import ErrorCode, Result
from batchkv_producer.wire.maker import Maker

LOWEST_LOGPROB = -9999.0  # as in OpenAI's files, because JSON has no infinity

OK, REFUSED = 200, 400  # status codes of HTTP
REFUSED_TYPE = "invalid_request_error"
# The codes of requests that a server would refuse with a response.
REFUSED_CODES = frozenset(
    {
        ErrorCode.INVALID_JSON,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.DUPLICATE_CUSTOM_ID,
        ErrorCode.UNSUPPORTED_PARAMETER,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    }
)
# Codes that OpenAI names differently. Redis stores batchkv's names.
OPENAI_CODES = {ErrorCode.EXPIRED: "batch_expired", ErrorCode.CANCELED: "batch_cancelled"}

# A quote inside a JSON string has a backslash before it, so that no text can look like this.
_ANSWER = re.compile(
    rb'\{"id": ?"[^"\\]*+", ?"custom_id": ?"[^"\\]*+(?:\\.[^"\\]*+)*+", ?'
    rb'"response": ?\{"status_code": ?200,'
)
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Characters that JSON allows in strings, but that some readers treat as the end of a line.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x7f\x85\u2028\u2029"}
_TEXT_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def output_line(job_id: str, result: Result) -> str:
    """One line of an OpenAI Batch output file or error file, without its newline."""
    line: dict[str, Any] = {"id": job_id, "custom_id": result.custom_id}
    if result.outcome == "ok":
        body = (
            _chat_body(job_id, result) if result.endpoint == "chat" else _text_body(job_id, result)
        )
        line |= _answered(job_id, OK, body)
    else:
        code, message = _error_of(result)
        if code in REFUSED_CODES:
            fault = {"message": message, "type": REFUSED_TYPE, "param": None, "code": code}
            line |= _answered(job_id, REFUSED, {"error": fault})
        else:
            error = {"code": OPENAI_CODES.get(code, code), "message": message}
            line |= {"response": None, "error": error}
    text = _JSON.encode(line)
    if text.isascii():
        return text.translate(_LINE_ENDS)
    # UTF-8 cannot encode half a surrogate pair.
    return text.encode("utf-8", "replace").decode("utf-8").translate(_LINE_ENDS)


def is_failed_line(row: bytes) -> bool:
    """Whether an output line, of this or an older version, is of a row without an answer.

    Older versions wrote every failed row with ``response`` null and batchkv's own code.
    """
    if _ANSWER.match(row):
        return False
    value = json.loads(row)
    response = value.get("response")
    status_code = response.get("status_code") if isinstance(response, dict) else None
    return bool(value.get("error")) or (isinstance(status_code, int) and status_code >= REFUSED)


def _answered(job_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": job_id, "body": body}
    return {"response": response, "error": None}


def _error_of(result: Result) -> tuple[str, str]:
    return result.error or (result.outcome, "")


def text_line(result: Result) -> str:
    """The text of the first choice on one line: line breaks as ``\\n``, a backslash doubled."""
    return _on_one_line(result.text)


def failed_text_line(result: Result) -> str:
    """A row without an answer on one line: ``q3: [timeout] the row took longer than 60 s``."""
    code, message = _error_of(result)
    return _on_one_line(f"{result.custom_id}: [{code}] {message}")


def _on_one_line(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8").translate(_TEXT_ESCAPES)


def _chat_body(job_id: str, result: Result) -> dict[str, Any]:
    choices = [_chat_choice(index, choice) for index, choice in enumerate(result.choices)]
    body = _body(f"chatcmpl-{job_id}", "chat.completion", result, choices)
    if result.prompt_token_ids is not None:
        body["prompt_token_ids"] = result.prompt_token_ids
    return body


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    has_text = bool(choice.text) or not choice.tool_calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if has_text else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_call(call) for call in choice.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text_body(job_id: str, result: Result) -> dict[str, Any]:
    choices = [_text_choice(index, choice) for index, choice in enumerate(result.choices)]
    if result.prompt_token_ids is not None:  # vLLM has them in each choice of a completion
        for each in choices:
            each["prompt_token_ids"] = result.prompt_token_ids
    return _body(f"cmpl-{job_id}", "text_completion", result, choices)


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": _text_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        **({"reasoning_content": choice.reasoning} if choice.reasoning else {}),
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
    }


def _body(body_id: str, kind: str, result: Result, choices: list[dict[str, Any]]) -> dict[str, Any]:
    usage, mark = result.usage, Maker(result.fingerprint, result.scheme).mark()
    details = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning}}
    return {
        "id": body_id,
        "object": kind,
        "created": result.created,
        "model": result.model,
        **({"system_fingerprint": mark} if mark else {}),
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            **(details if usage.reasoning else {}),
        },
    }


def _chat_logprobs(tokens: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = [
        {
            **_chat_token(item.token, item.logprob),
            "top_logprobs": [_chat_token(token, logprob) for token, logprob in item.top],
        }
        for item in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    raw = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": _finite(logprob), "bytes": raw}


def _text_logprobs(tokens: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
    """The shape for completions: one list for each property. Offsets are in characters."""
    if tokens is None:
        return None
    offsets, position = [], 0
    for item in tokens:
        offsets.append(position)
        position += len(item.token)
    return {
        "tokens": [item.token for item in tokens],
        "token_logprobs": [_finite(item.logprob) for item in tokens],
        "top_logprobs": [
            {token: _finite(logprob) for token, logprob in item.top} for item in tokens
        ],
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    """The value between ``LOWEST_LOGPROB`` and 0. Rounding may exceed 0; NaN becomes the lowest."""
    return min(logprob, 0.0) if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB
