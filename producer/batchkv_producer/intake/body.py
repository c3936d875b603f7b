"""Reads one request body and checks each field.

A field is used, or has a value that changes nothing, or makes its row fail. No field that would
change the answer is ignored silently. ``null`` means "not set" everywhere.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.checks import (
    MAX_SHOWN,
    NumberRule,
    check_stop,
    invalid,
    model_name,
    shown,
    unsupported,
)
from batchkv_producer.intake.messages import check_messages, check_template_variables, check_tools
from batchkv_producer.wire.job import Endpoint, Request, SamplingParams

MAX_LOGPROBS = 20
MAX_NAME_CHARS = 80

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}

_MAX_TOKENS = NumberRule(1, 2**31 - 1, is_whole=True)
_ALTERNATIVES = NumberRule(0, MAX_LOGPROBS, is_whole=True)

NUMBERS = {
    "max_tokens": _MAX_TOKENS,
    "max_completion_tokens": _MAX_TOKENS,
    "temperature": NumberRule(0, 100),
    "top_p": NumberRule(0, 1, is_low_excluded=True),
    "top_k": NumberRule(-1, 2**31 - 1, is_whole=True),
    "min_p": NumberRule(0, 1),
    "repetition_penalty": NumberRule(0, 100, is_low_excluded=True),
    "seed": NumberRule(-(2**63), 2**64 - 1, is_whole=True),
}

_IGNORED = frozenset({"user", "metadata", "store"})

# Values that change nothing. ``tool_choice: none`` is one of them only without tools.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default", "flex"),
    "functions": ([],),
}

_COMMON = frozenset({"model", "stop", "logprobs"})
_HANDLED: dict[Endpoint, frozenset[str]] = {
    "chat": _COMMON | {"messages", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"},
    "completion": _COMMON | {"prompt"},
}

NO_PARAMS = SamplingParams()


def read_body(body: dict[str, Any], endpoint: Endpoint, custom_id: str) -> Request:
    """The request in a body. Raises RowFault for the first field that is wrong."""
    params = params_of(body, endpoint)
    if endpoint == "completion":
        return Request(custom_id, "completion", prompt=_prompt(body.get("prompt")), params=params)
    tools = check_tools(body["tools"]) if body.get("tools") is not None else None
    _check_tool_choice(body.get("tool_choice"), has_tools=tools is not None)
    variables = body.get("chat_template_kwargs")
    return Request(
        custom_id,
        "chat",
        messages=check_messages(body.get("messages")),
        tools=tools,
        chat_template_kwargs={} if variables is None else check_template_variables(variables),
        params=params,
    )


def model_of(body: dict[str, Any]) -> str | None:
    """The model that a body names, if any. Raises RowFault if it is not a name."""
    model = body.get("model")
    if model is None:
        return None
    if not isinstance(model, str) or not model.strip():
        raise invalid(f"model must be a name, got {shown(model)}")
    try:
        return model_name(model)
    except ValueError as fault:
        raise invalid(f"the model's name {fault}: {shown(model)}") from None


def check_defaults(params: SamplingParams) -> None:
    """Check generation defaults by the rules for rows. Raises UsageError."""
    for item in fields(SamplingParams):
        value = getattr(params, item.name)
        rule = _ALTERNATIVES if item.name == "logprobs" else NUMBERS.get(item.name)
        if rule is not None and value is not None and not rule.admits(value):
            raise UsageError(rule.complaint(item.name, value))
    try:
        check_stop(list(params.stop))
    except ValueError as fault:
        raise UsageError(str(fault)) from fault


def params_of(body: dict[str, Any], endpoint: Endpoint) -> SamplingParams:
    """The sampling parameters of a body. Raises RowFault for a wrong or unknown field."""
    handled = _HANDLED[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in handled or name in _IGNORED:
            continue
        rule = NUMBERS.get(name)
        if rule is not None:
            values[name] = rule.check(name, value)
        elif not _is_neutral(name, value):
            raise _refusal(name, value, endpoint)
    if body.get("stop") is not None:
        values["stop"] = check_stop(body["stop"])
    _join_max_tokens(values)
    _add_logprobs(body, endpoint, values)
    if values.get("top_k") == -1:  # other engines write -1 for "all tokens"; batchkv writes 0
        values["top_k"] = 0
    return SamplingParams(**values) if values else NO_PARAMS


def _is_neutral(name: str, value: Any) -> bool:
    # In Python True equals 1; here it must not.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


def _refusal(name: str, value: Any, endpoint: Endpoint) -> ValueError:
    short = name[:MAX_NAME_CHARS]
    if name in _NEUTRAL:
        neutral = " or ".join(_quoted(item) for item in _NEUTRAL[name])
        return unsupported(f"{short} {_quoted(value)} is not supported (only {neutral})")
    if any(name in names for names in _HANDLED.values()):
        return unsupported(f"{short} is not supported for {endpoint} requests")
    return unsupported(f"{short} is not supported")


def _quoted(value: Any) -> str:
    """Like ``shown``, but with the content of a small flat object or list."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(parts, list) or any(isinstance(part, dict | list) for part in parts):
        return shown(value)
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else shown(value)


def _join_max_tokens(values: dict[str, Any]) -> None:
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        raise invalid("max_tokens and max_completion_tokens differ")


def _add_logprobs(body: dict[str, Any], endpoint: Endpoint, values: dict[str, Any]) -> None:
    """The number of alternatives. Chat has true and top_logprobs, completions have a number."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if endpoint == "completion":
        if wanted is not None:
            values["logprobs"] = _ALTERNATIVES.check("logprobs", wanted)
        return
    if not isinstance(wanted, (bool, type(None))):
        raise invalid(f"logprobs must be true or false, got {shown(wanted)}")
    num_top = 0 if top is None else _ALTERNATIVES.check("top_logprobs", top)
    if wanted:
        values["logprobs"] = num_top
    elif num_top:
        raise invalid("top_logprobs needs logprobs to be true")


def _prompt(value: Any) -> str:
    prompt = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(prompt, list):
        raise unsupported("prompt must be one string; lists of prompts or tokens are not supported")
    if not isinstance(prompt, str):
        raise invalid(f"prompt must be a string, got {shown(prompt)}")
    if not prompt:
        raise invalid("prompt is empty")
    return prompt


def _check_tool_choice(value: Any, *, has_tools: bool) -> None:
    if value is None or value == "auto" or (value == "none" and not has_tools):
        return
    raise unsupported(f"tool_choice {shown(value)} is not supported (only auto)")
