"""From a request to its prompt's tokens: renders the chat template, tokenizes, within limits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.order.canonical import canonical_text, num_shared_tokens
from batchkv_producer.wire.job import ErrorCode, Request
from batchkv_worker.engine.tokens.template_options import template_options
from batchkv_worker.engine.tokens.text_limits import (
    RowRefused,
    check_text,
    check_values,
    is_within,
)
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel

SHARED_SLACK = 16  # tokens by which a text's count may differ alone and after its prefix


def prompt_tokens(request: Request, loaded: LoadedModel, *, is_long: bool) -> list[int]:
    """The tokens of a request's prompt; raises RowRefused.

    ``is_long``: it may be too long to be tokenized at once.
    """
    tokenizer = loaded.tokenizer
    if request.prompt_tokens is not None:
        return request.prompt_tokens
    if request.prompt is not None and request.style == "auto":
        request = _styled(request, has_template=bool(tokenizer.has_chat_template))
    if request.prompt is not None:
        check_text(request.prompt, tokenizer, loaded.context)
        return list(tokenizer.encode(request.prompt))
    if not tokenizer.has_chat_template:
        raise RowRefused(
            ErrorCode.INVALID_REQUEST,
            "this model has no chat template: send a prompt instead",
        )
    options = template_options(request, tokenizer)
    messages = [_with_parsed_arguments(message) for message in request.messages or ()]
    try:
        if is_long:  # looked at as text first: tokens take much more memory
            check_values(messages, loaded.context)  # calls' arguments have become JSON
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            check_text(text, tokenizer, loaded.context)
        return list(tokenizer.apply_chat_template(messages, tokenize=True, **options))
    except RowRefused:
        raise
    except Exception as fault:  # a template may raise anything
        message = f"the model's chat template refused the messages: {str(fault)[:300]}"
        raise RowRefused(ErrorCode.INVALID_REQUEST, message) from fault


def _styled(request: Request, *, has_template: bool) -> Request:
    """A plain prompt as a user message, where the model has a chat template for it."""
    if has_template:
        messages: list[dict[str, Any]] = [{"role": "user", "content": request.prompt}]
        if request.system is not None:
            messages.insert(0, {"role": "system", "content": request.system})
        return replace(request, messages=messages, prompt=None)
    if request.system is not None:
        message = "this model has no chat template: a system message cannot be sent, use --raw"
        raise RowRefused(ErrorCode.INVALID_REQUEST, message)
    return request


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Tool calls with their arguments as objects, which templates want, not as OpenAI's text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def num_common(work: Work, num_prompt: int, tokenizer: Any) -> int | None:
    """Tokens of the prompt that another row of the batch begins with; None if unknown.

    The rest of the text is tokenized and subtracted. Text that a template adds is mostly at the
    beginning and equal in all rows, so it counts as shared.
    """
    if work.shared_bytes is None or num_prompt <= BLOCK_TOKENS:
        return work.shared_bytes and num_prompt
    if work.request.prompt_tokens is not None:
        return min(num_prompt, num_shared_tokens(work.shared_bytes))
    raw = canonical_text(work.request).encode("utf-8", "surrogatepass")
    rest = raw[work.shared_bytes :].decode("utf-8", "ignore")
    if not is_within(rest, tokenizer, num_prompt):
        return 0
    num_rest = len(tokenizer.encode(rest)) if rest else 0
    return max(0, min(num_prompt, num_prompt - num_rest + SHARED_SLACK))


def num_elsewhere(work: Work, num_shared: int | None) -> int | None:
    """Tokens of the prompt that rows of other workers may begin with; None if unknown.

    An estimate: the same share of ``num_shared`` tokens as it is of the bytes.
    """
    if num_shared is None or work.elsewhere_bytes is None or not work.shared_bytes:
        return None if num_shared is None or work.elsewhere_bytes is None else 0
    return num_shared * min(work.elsewhere_bytes, work.shared_bytes) // work.shared_bytes
