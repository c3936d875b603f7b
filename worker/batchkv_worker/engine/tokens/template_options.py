"""What a row hands to its model's chat template, and what that template cannot do for it."""

from __future__ import annotations

from typing import Any

from batchkv_producer.wire.job import NO_EFFORT, ErrorCode, Request
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.model.chat_template import chat_template_of


def template_options(request: Request, tokenizer: Any) -> dict[str, Any]:
    """The arguments of ``apply_chat_template`` for a row; raises RowRefused.

    Tools are not shown to a model that may not call them. A thinking budget is counted by the
    engine, so a template that does not read it loses nothing. So is a ``reasoning_effort`` of
    "none", which is told to templates in the way that they know.
    """
    template = chat_template_of(tokenizer)
    options: dict[str, Any] = {"add_generation_prompt": True, **request.chat_template_kwargs}
    if shows_tools(request):
        if not template.shows_tools:
            raise _refusal("tools: this model's chat template does not show tools to the model")
        options["tools"] = request.tools
    budget = request.params.thinking_budget
    if wants_no_thought(request) and not template.knows_no_effort:
        budget = 0
        if "enable_thinking" in template.variables:
            options.setdefault("enable_thinking", False)
    elif request.reasoning_effort is not None:
        if "reasoning_effort" not in template.variables:
            raise _refusal("reasoning_effort: this model's chat template does not read it")
        options["reasoning_effort"] = request.reasoning_effort
    if budget is not None and "thinking_budget" in template.variables:
        options.setdefault("thinking_budget", budget)
    return options


def wants_no_thought(request: Request) -> bool:
    """Whether the row's effort is no reasoning at all."""
    return request.reasoning_effort == NO_EFFORT


def shows_tools(request: Request) -> bool:
    """Whether the model sees the row's tools, and may call them."""
    return bool(request.tools) and request.tool_choice != "none"


def _refusal(message: str) -> RowRefused:
    return RowRefused(ErrorCode.UNSUPPORTED_PARAMETER, message)
