"""From a request to a sequence: renders the chat template and tokenizes.

A fault in a row is found here and ends that row alone, with a code of ``job.ErrorCode``. The
producer has made the same checks. Data that comes over Redis is checked again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.intake.checks import RowFault, check_stop
from batchkv_producer.intake.messages import check_messages, check_template_variables, check_tools
from batchkv_producer.order.canonical import canonical_text, num_shared_tokens
from batchkv_producer.wire.job import ErrorCode, Request
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.tokens.generation import check_ids, check_params, generation_of
from batchkv_worker.engine.tokens.text_limits import (
    SLICE_CHARS,
    RowRefused,
    check_text,
    check_values,
    is_within,
)
from batchkv_worker.events import Work
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence

SHARED_SLACK = 16  # tokens by which a text's count may differ alone and after its prefix


def prepare(work: Work, loaded: LoadedModel, *, counts_shared: bool = False) -> Sequence:
    """The row as the engine runs it; raises RowRefused.

    ``counts_shared``: whether to count how many of its tokens another row of its batch begins with.
    """
    asked = work.request
    check_params(asked.params, loaded.vocabulary)
    num_chars = check_values(
        [asked.prompt, asked.system, asked.messages, asked.tools], loaded.context
    )
    request = _checked(asked)
    prompt = _tokens(request, loaded, is_long=num_chars > SLICE_CHARS)
    if not prompt:
        raise RowRefused(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if asked.prompt_tokens is not None:
        check_ids("the prompt", prompt, loaded.vocabulary)
    if max(prompt) >= loaded.vocabulary or min(prompt) < 0:
        message = f"the tokenizer gave a token that the model's {loaded.vocabulary} rows lack"
        raise RowRefused(ErrorCode.INVALID_REQUEST, message)
    generation = generation_of(work, len(prompt), loaded)
    detokenizer = loaded.tokenizer.detokenizer if generation.stop else None
    num_common = _num_common(work, len(prompt), loaded.tokenizer) if counts_shared else None
    return Sequence(work.job_id, prompt, generation, num_common=num_common, detokenizer=detokenizer)


def _num_common(work: Work, num_prompt: int, tokenizer: Any) -> int | None:
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


def check_memory(row: Sequence, memory: Memory) -> None:
    """Refuse a row that does not fit the memory even alone; raises RowRefused."""
    if not memory.fits_alone(Demand(row.num_prefill, row.num_remaining)):
        budget = memory.whole
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{len(row.prompt)} prompt tokens and up to {row.generation.max_tokens} more do "
            f"not fit the {budget.memory_bytes} bytes for keys and values, at "
            f"{budget.costs.per_new_token} bytes a token; lower max_tokens or raise the memory",
        )


def _checked(request: Request) -> Request:
    """The request after the producer's own checks: shapes, depths, names, stop strings."""
    try:
        check_stop(list(request.params.stop))
        return replace(
            request,
            messages=None if request.messages is None else check_messages(request.messages),
            tools=None if request.tools is None else check_tools(request.tools),
            chat_template_kwargs=check_template_variables(request.chat_template_kwargs),
        )
    except RowFault as fault:
        raise RowRefused(fault.code, str(fault)) from fault


def _tokens(request: Request, loaded: LoadedModel, *, is_long: bool) -> list[int]:
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
    options: dict[str, Any] = {"add_generation_prompt": True, **request.chat_template_kwargs}
    if request.tools:
        options["tools"] = request.tools
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
