"""Reads one request body and checks each field, by the table of ``fields``.

A field is used, or has a value that changes nothing, or makes its row fail. No field that would
change the answer is ignored silently. ``null`` means "not set" everywhere.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.answer_format import constraint_of
from batchkv_producer.intake.chat_options import (
    effort_of,
    parallel_of,
    tool_choice_of,
    variables_of,
)
from batchkv_producer.intake.checks import (
    MAX_SHOWN,
    NumberRule,
    invalid,
    model_name,
    shown,
    unsupported,
)
from batchkv_producer.intake.fields import (
    BY_NAME,
    FIELDS,
    MAX_LOGPROBS,
    NAMES,
    Field,
    Use,
)
from batchkv_producer.intake.messages import check_messages, check_tools
from batchkv_producer.wire.job import (
    MAX_PROMPT_TOKENS,
    MAX_TOKEN_ID,
    Endpoint,
    Request,
    SamplingParams,
)

MAX_NAME_CHARS = 80
MAX_TYPOS = 2  # letters by which a mistyped name may be longer or shorter than a field

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}

_ALTERNATIVES = NumberRule(0, MAX_LOGPROBS, is_whole=True)
_RULES = {field.param: field for field in reversed(FIELDS) if field.param}

NO_PARAMS = SamplingParams()


def read_body(body: dict[str, Any], endpoint: Endpoint, custom_id: str) -> Request:
    """The request in a body. Raises RowFault for the first field that is wrong."""
    params = params_of(body, endpoint)
    constraint = constraint_of(body)
    if endpoint == "completion":
        prompt, tokens = _prompt(body.get("prompt"))
        return Request(
            custom_id,
            "completion",
            prompt=prompt,
            params=params,
            prompt_tokens=tokens,
            constraint=constraint,
        )
    tools = check_tools(body["tools"]) if body.get("tools") is not None else None
    tool_choice = tool_choice_of(body.get("tool_choice"), tools)
    if tool_choice not in (None, "none") and constraint is not None:
        raise invalid("a tool call that has to be made excludes a format of the answer")
    parallel = parallel_of(body.get("parallel_tool_calls"))
    return Request(
        custom_id,
        "chat",
        messages=check_messages(body.get("messages")),
        tools=tools,
        chat_template_kwargs=variables_of(body),
        params=params,
        constraint=constraint,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel if tools else None,
        reasoning_effort=effort_of(body.get("reasoning_effort")),
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


def checked_defaults(params: SamplingParams) -> SamplingParams:
    """Generation defaults, checked by the rules for rows and stored alike. Raises UsageError."""
    given = {item.name: getattr(params, item.name) for item in fields(SamplingParams)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value == ():
            continue
        field = _RULES.get(name)
        if field is not None and field.use is Use.REFUSED:
            raise UsageError(f"{field.name} is not supported")
        try:
            values[name] = _stored(name, value, field)
        except ValueError as fault:
            raise UsageError(str(fault)) from fault
    return replace(NO_PARAMS, **{n: v for n, v in values.items() if v is not None})


def _stored(name: str, value: Any, field: Field | None) -> Any:
    if field is None:
        return _ALTERNATIVES.check(name, value)  # of log-probabilities
    assert field.rule is not None
    as_json = dict(value) if name == "logit_bias" else value
    as_json = list(value) if isinstance(value, tuple) and name != "logit_bias" else as_json
    if isinstance(as_json, dict):
        as_json = {str(token): bias for token, bias in as_json.items()}
    return field.rule.check(name, as_json)


def params_of(body: dict[str, Any], endpoint: Endpoint) -> SamplingParams:
    """The sampling parameters of a body. Raises RowFault for a wrong or unknown field."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}  # parameter -> the field that gave it
    for name, value in body.items():
        if value is None:
            continue
        field = BY_NAME.get((endpoint, name))
        if field is None:
            if not _is_neutral_elsewhere(name, value):
                raise _unknown(name, endpoint)
            continue
        if field.use is Use.REFUSED:
            if not (_is_neutral(field, value) or _is_all_of_n(name, value, body)):
                raise _refusal(field, value)
        elif field.use is Use.TAKEN and field.rule is not None:
            stored = field.rule.check(name, value)
            if said.setdefault(field.param, name) != name and values.get(field.param) != stored:
                raise invalid(f"{said[field.param]} and {name} differ")
            values[field.param] = stored
    _add_logprobs(body, endpoint, values)
    best_of, num_choices = body.get("best_of"), values.get("n") or 1
    if best_of is not None and best_of != num_choices:
        raise invalid(f"best_of {best_of} is less than n {num_choices}: leave best_of out")
    return _params(values)


def _params(values: dict[str, Any]) -> SamplingParams:
    given = {name: value for name, value in values.items() if value is not None}
    least, most = given.get("min_tokens", 0), given.get("max_tokens")
    if most is not None and least > most:
        raise invalid(f"min_tokens {least} is more than max_tokens {most}")
    return SamplingParams(**given) if given else NO_PARAMS


def _is_neutral(field: Field, value: Any) -> bool:
    # In Python True equals 1; here it must not.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in field.neutral
    )


def _is_all_of_n(name: str, value: Any, body: dict[str, Any]) -> bool:
    """Whether the field wants the best n of n answers, which are all of them."""
    return name == "best_of" and type(value) is int and value == body.get("n")


def _is_neutral_elsewhere(name: str, value: Any) -> bool:
    """Whether a field of the other endpoint has a value that would change nothing there."""
    others = [field for field in FIELDS if field.name == name]
    return any(field.use is Use.IGNORED or _is_neutral(field, value) for field in others)


def _refusal(field: Field, value: Any) -> ValueError:
    hint = field.about if field.use is Use.REFUSED else ""
    said = f"{field.name} {_quoted(value)}" if field.neutral else field.name
    neutral = " or ".join(_quoted(item) for item in field.neutral)
    only = f" (only {neutral})" if neutral else ""
    return unsupported(f"{said} is not supported{only}{': ' if hint else ''}{_in_plain(hint)}")


def _in_plain(hint: str) -> str:
    """A sentence of the table at the end of an error: without marks, and without its full stop."""
    text = hint.replace("`", "").removesuffix(".")
    return text[:1].lower() + text[1:]


def _unknown(name: str, endpoint: Endpoint) -> ValueError:
    short = name[:MAX_NAME_CHARS]
    if name in NAMES:
        return unsupported(f"{short} is not supported for {endpoint} requests")
    if hint := _hint(short, endpoint):
        return unsupported(f"{short} is not a field of {endpoint} requests: {hint}")
    return unsupported(f"{short} is not supported: no API that batchkv knows has this field")


@lru_cache(maxsize=256)  # all rows of a file often have the same mistake
def _hint(name: str, endpoint: Endpoint) -> str:
    """What a field that no API has was probably meant to be; "" if that is not known."""
    if name == "extra_body":  # an argument of OpenAI's Python client
        return "put the fields that are in it directly into the body"
    known = (
        field
        for at, field in BY_NAME
        if at == endpoint and abs(len(field) - len(name)) <= MAX_TYPOS
    )
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else ""


def _quoted(value: Any) -> str:
    """Like ``shown``, but with the content of a small flat object or list."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(parts, list) or any(isinstance(part, dict | list) for part in parts):
        return shown(value)
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else shown(value)


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


def _prompt(value: Any) -> tuple[str | None, list[int] | None]:
    """A prompt as a text or as token ids. A list of one prompt is that prompt."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise unsupported(
                f"prompt is a list of {len(value)} prompts: write a line for each of them"
            )
        value = value[0]
    if isinstance(value, list):
        return None, _tokens(value)
    if not isinstance(value, str):
        raise invalid(f"prompt must be a text or a list of token ids, got {shown(value)}")
    if not value:
        raise invalid("prompt is empty")
    return value, None


def _tokens(value: list[Any]) -> list[int]:
    if not 0 < len(value) <= MAX_PROMPT_TOKENS:
        raise invalid(f"prompt has {len(value)} token ids; 1 to {MAX_PROMPT_TOKENS} are accepted")
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise invalid(
                f"a token id of prompt must be a whole number of 0 to {MAX_TOKEN_ID}, "
                f"got {shown(token)}"
            )
    return value
