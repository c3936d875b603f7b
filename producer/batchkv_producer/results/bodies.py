"""The bodies of answers, as OpenAI's API has them: in lines of a file, and over HTTP.

A completion over HTTP may have several prompts. Each is a row of its own, and the body has the
choices of all, in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.job import Endpoint, Result, Usage
from batchkv_producer.wire.maker import Maker

LOWEST_LOGPROB = -9999.0  # as in OpenAI's files, because JSON has no infinity
_ID_PREFIXES: dict[Endpoint, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}


def body_id(row_id: str, endpoint: Endpoint) -> str:
    """The id of the body of a row."""
    return f"{_ID_PREFIXES[endpoint]}{row_id}"


def body_of(row_id: str, results: Sequence[Result]) -> dict[str, Any]:
    """The body of an answer. Several results: those of the prompts of one completion."""
    first = results[0]
    is_chat = first.endpoint == "chat"
    choices: list[dict[str, Any]] = []
    for result in results:
        for choice in result.choices:
            make = _chat_choice if is_chat else _text_choice
            choices.append(make(len(choices), choice))
            if result.prompt_token_ids is not None and not is_chat:  # as vLLM has them
                choices[-1]["prompt_token_ids"] = result.prompt_token_ids
    body = {
        "id": body_id(row_id, first.endpoint),
        "object": "chat.completion" if is_chat else "text_completion",
        **made_by(first),
        "choices": choices,
        "usage": usage_of(results),
    }
    if first.prompt_token_ids is not None and is_chat:
        body["prompt_token_ids"] = first.prompt_token_ids
    return body


def made_by(result: Result) -> dict[str, Any]:
    """The fields of a body that say when and by which model it was made."""
    mark = Maker(result.fingerprint, result.scheme).mark()
    facts: dict[str, Any] = {"created": result.created, "model": result.model}
    return {**facts, "system_fingerprint": mark} if mark else facts


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    """The token counts of results, summed."""
    usages = [result.usage for result in results]
    usage = Usage(
        prompt=sum(one.prompt for one in usages),
        completion=sum(one.completion for one in usages),
        cached=sum(one.cached for one in usages),
        reasoning=sum(one.reasoning for one in usages),
    )
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def call_of(call: ToolCall) -> dict[str, Any]:
    """A tool call of a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def logprobs_of(
    endpoint: Endpoint, tokens: tuple[TokenLogprob, ...] | None
) -> dict[str, Any] | None:
    """The log-probabilities of a choice; None if the row did not ask for them."""
    if tokens is None:
        return None
    return _chat_logprobs(tokens) if endpoint == "chat" else _text_logprobs(tokens)


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
        message["tool_calls"] = [call_of(call) for call in choice.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_of("chat", choice.logprobs),
        "finish_reason": choice.finish_reason,
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
    }


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs_of("completion", choice.logprobs),
        "finish_reason": choice.finish_reason,
        **({"reasoning_content": choice.reasoning} if choice.reasoning else {}),
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
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


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape for completions: one list for each property. Offsets are in characters."""
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
