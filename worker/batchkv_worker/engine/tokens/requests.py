"""From a request to a sequence: checks it, and tokenizes its prompt.

A fault in a row is found here and ends that row alone, with a code of ``job.ErrorCode``. The
producer has made the same checks. Data that comes over Redis is checked again.
"""

from __future__ import annotations

from dataclasses import replace

from batchkv_producer.intake.checks import RowFault, check_stop
from batchkv_producer.intake.messages import check_messages, check_template_variables, check_tools
from batchkv_producer.wire.job import ErrorCode, Request
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.tokens.generation import check_ids, check_params, generation_of
from batchkv_worker.engine.tokens.prompts import num_common, num_elsewhere, prompt_tokens
from batchkv_worker.engine.tokens.text_limits import SLICE_CHARS, RowRefused, check_values
from batchkv_worker.events import Work
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence


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
    prompt = prompt_tokens(request, loaded, is_long=num_chars > SLICE_CHARS)
    if not prompt:
        raise RowRefused(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if asked.prompt_tokens is not None:
        check_ids("the prompt", prompt, loaded.vocabulary)
    if max(prompt) >= loaded.vocabulary or min(prompt) < 0:
        message = f"the tokenizer gave a token that the model's {loaded.vocabulary} rows lack"
        raise RowRefused(ErrorCode.INVALID_REQUEST, message)
    generation = generation_of(work, len(prompt), loaded)
    detokenizer = loaded.tokenizer.detokenizer if generation.stop else None
    num_shared = num_common(work, len(prompt), loaded.tokenizer) if counts_shared else None
    return Sequence(
        *(work.job_id, prompt, generation),
        num_common=num_shared,
        num_elsewhere=num_elsewhere(work, num_shared),
        slowdown=work.slowdown,
        detokenizer=detokenizer,
        cache_salt=request.cache_salt,
    )


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
