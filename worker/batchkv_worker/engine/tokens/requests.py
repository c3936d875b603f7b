"""From a request to a sequence: renders the chat template, tokenizes, fills in defaults.

A fault in a row is found here and ends that row alone, with a code of ``job.ErrorCode``. The
producer has made the same checks. Data that comes over Redis is checked again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.agreed import DEFAULT_MAX_TOKENS
from batchkv_producer.intake.checks import RowFault, check_stop
from batchkv_producer.intake.messages import check_messages, check_template_variables, check_tools
from batchkv_producer.order.canonical import canonical_text, num_shared_tokens
from batchkv_producer.wire.job import ErrorCode, Request, SamplingParams
from batchkv_worker.engine.schedule.memory import Memory
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
from batchkv_worker.sequence import Generation, Sequence

SHARED_SLACK = 16  # tokens by which a text's count may differ alone and after its prefix

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, 20),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "min_tokens": (0, 2**31 - 1),
    "thinking_budget": (0, 2**31 - 1),
    "n": (2, 128),
}


def prepare(work: Work, loaded: LoadedModel, *, counts_shared: bool = False) -> Sequence:
    """The row as the engine runs it; raises RowRefused.

    ``counts_shared``: whether to count how many of its tokens another row of its batch begins with.
    """
    _check_ranges(work.request.params)
    asked = work.request
    num_chars = check_values(
        [asked.prompt, asked.system, asked.messages, asked.tools], loaded.context
    )
    request = _checked(asked)
    prompt = _tokens(request, loaded, is_long=num_chars > SLICE_CHARS)
    if not prompt:
        raise RowRefused(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if max(prompt) >= loaded.vocabulary or min(prompt) < 0:
        source = "the tokenizer gave" if request.prompt_tokens is None else "the prompt has"
        message = f"{source} a token that the model's {loaded.vocabulary} rows lack"
        raise RowRefused(ErrorCode.INVALID_REQUEST, message)
    generation = _generation(work, len(prompt), loaded)
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


def _check_ranges(asked: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and not low <= value <= high:  # also true for nan
            message = f"{name} must be between {low:g} and {high:g}"
            raise RowRefused(ErrorCode.INVALID_REQUEST, message)


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


def _generation(work: Work, num_prompt: int, loaded: LoadedModel) -> Generation:
    asked = work.request.params
    defaults = {
        name: value
        for name, value in loaded.defaults.items()
        if _RANGES[name][0] <= value <= _RANGES[name][1]
    }
    return Generation(
        max_tokens=_max_tokens(asked, num_prompt, loaded.context, defaults.get("max_tokens")),
        temperature=_first(asked.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(asked.top_p, defaults.get("top_p"), 1.0),
        top_k=int(_first(asked.top_k, defaults.get("top_k"), 0)),
        min_p=_first(asked.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(
            asked.repetition_penalty, defaults.get("repetition_penalty"), 1.0
        ),
        seed=_first(asked.seed, None, _seed(work.job_id)),
        stop=asked.stop,
        logprobs=asked.logprobs,
    )


def _max_tokens(asked: SamplingParams, num_prompt: int, context: int, default: float | None) -> int:
    """A requested number must fit the context; a default is cut to what is left of it."""
    room = context - num_prompt
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens and max_tokens {asked.max_tokens} are more than the "
            f"model's context of {context}",
        )
    if room < 1:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens leave no room in the model's context of {context}",
        )
    return min(room, int(_first(asked.max_tokens, default, DEFAULT_MAX_TOKENS)))


def _first(asked: Any, default: Any, last: Any) -> Any:
    """The first that is not None."""
    return asked if asked is not None else default if default is not None else last


def _seed(job_id: str) -> int:
    """A seed for a row that named none: stable for the job, different for each."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "little")
