"""From a request to a sequence: template, tokens, defaults, limits.

Everything that can be wrong with one row once the model is known is found here and ends that row
alone, with a code of ``job.ErrorCode``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jinja2

from batchkv_producer.job import ErrorCode, Request, SamplingParams
from batchkv_worker.events import Work
from batchkv_worker.model import LoadedModel
from batchkv_worker.sequence import Generation, Sequence

DEFAULT_MAX_TOKENS = 512


class RowRefused(Exception):
    """This row cannot be generated; ``code`` is one of ``job.ErrorCode``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def prepare(work: Work, loaded: LoadedModel) -> Sequence:
    """The row as the engine runs it; raises RowRefused."""
    prompt = _tokens(work.request, loaded.tokenizer)
    if not prompt:
        raise RowRefused(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    vocabulary = len(loaded.tokenizer)
    if max(prompt) >= vocabulary or min(prompt) < 0:
        raise RowRefused(ErrorCode.INVALID_REQUEST, "the tokenizer gave tokens outside its range")
    generation = _generation(work, len(prompt), loaded)
    detokenizer = loaded.tokenizer.detokenizer if generation.stop else None
    return Sequence(work.job_id, prompt, generation, detokenizer=detokenizer)


def _tokens(request: Request, tokenizer: Any) -> list[int]:
    if request.prompt is not None:
        return list(tokenizer.encode(request.prompt))
    if not tokenizer.has_chat_template:
        raise RowRefused(
            ErrorCode.INVALID_REQUEST,
            "this model has no chat template: send a prompt, not messages",
        )
    options: dict[str, Any] = {"add_generation_prompt": True, **request.chat_template_kwargs}
    if request.tools:
        options["tools"] = request.tools
    try:
        return list(tokenizer.apply_chat_template(request.messages, tokenize=True, **options))
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as fault:
        raise RowRefused(
            ErrorCode.INVALID_REQUEST,
            f"the model's chat template refused the messages: {str(fault)[:300]}",
        ) from fault


def _generation(work: Work, num_prompt: int, loaded: LoadedModel) -> Generation:
    asked, defaults = work.request.params, loaded.defaults
    return Generation(
        max_tokens=_max_tokens(asked, num_prompt, loaded),
        temperature=_first(asked.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(asked.top_p, defaults.get("top_p"), 1.0),
        top_k=max(0, _first(asked.top_k, defaults.get("top_k"), 0)),
        min_p=_first(asked.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(
            asked.repetition_penalty, defaults.get("repetition_penalty"), 1.0
        ),
        seed=_first(asked.seed, None, _seed(work.job_id)),
        stop=asked.stop,
        logprobs=asked.logprobs,
    )


def _max_tokens(asked: SamplingParams, num_prompt: int, loaded: LoadedModel) -> int:
    """What was asked must fit the context; what nobody asked for is cut to what is left."""
    room: int = loaded.context - num_prompt
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens and max_tokens {asked.max_tokens} are more than the "
            f"model's context of {loaded.context}",
        )
    if room < 1:
        raise RowRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens leave no room in the model's context of {loaded.context}",
        )
    default = _first(asked.max_tokens, loaded.defaults.get("max_tokens"), DEFAULT_MAX_TOKENS)
    return min(room, int(default))


def _first(asked: Any, default: Any, last: Any) -> Any:
    """The first that is not None."""
    return asked if asked is not None else default if default is not None else last


def _seed(job_id: str) -> int:
    """A seed for a row that named none: stable for the job, different for each."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "little")
