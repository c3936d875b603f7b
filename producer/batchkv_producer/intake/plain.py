"""The fast way to read a line: one schema for ordinary rows.

msgspec parses a line and checks types and ranges in one pass, about ten times as fast as parsing it
and checking each field. The schema is narrower than the rules. A line that does not match it (a
tool, a stop string, any fault) is read again by ``formats``, field by field. A line that matches
gives exactly the request that ``formats`` would give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from batchkv_producer.intake.body import ENDPOINTS, params_of
from batchkv_producer.intake.checks import MAX_CUSTOM_ID_CHARS, NumberRule, RowFault, is_model_name
from batchkv_producer.intake.fields import number_rule
from batchkv_producer.intake.messages import ROLES
from batchkv_producer.wire.job import Endpoint, Request, SamplingParams, Style

MAX_INT64 = 2**63 - 1  # msgspec supports no larger bounds

# The parameters that ordinary rows have.
NUMBERS: dict[str, NumberRule] = {
    name: number_rule(name)
    for name in (
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "seed"),
    )
}

_PLAIN_ROLES = frozenset(role for role, own in ROLES.items() if role == own)


def _number(rule: NumberRule) -> Any:
    """The type with the rule's bounds. An integer stays an integer."""
    high = min(rule.high, MAX_INT64)
    if rule.is_low_excluded:
        bounds = msgspec.Meta(gt=rule.low, le=high)
    else:
        bounds = msgspec.Meta(ge=rule.low, le=high)
    whole = Annotated[int, bounds] | None
    return whole if rule.is_whole else whole | Annotated[float, bounds]


_CUSTOM_ID = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)] | None
_MESSAGES = Annotated[list[dict[Literal["role", "content"], str]], msgspec.Meta(min_length=1)]
_BODY: list[tuple[str, Any, Any]] = [
    ("model", str | None, None),
    ("messages", _MESSAGES | None, None),
    ("prompt", Annotated[str, msgspec.Meta(min_length=1)] | None, None),
    ("user", str | None, None),
    ("metadata", dict[str, str] | None, None),
    *((name, _number(rule), None) for name, rule in NUMBERS.items()),
]


def _decoder(fields: list[tuple[str, Any, Any]]) -> Callable[[bytes], Any]:
    """A reader of objects that have no fields but these: (name, type, default)."""
    return msgspec.json.Decoder[Any](_schema(fields)).decode


def _schema(fields: list[tuple[str, Any, Any]]) -> Any:
    return msgspec.defstruct("Plain", fields, forbid_unknown_fields=True, gc=False)


_lazy_line = _decoder([("custom_id", _CUSTOM_ID, None), *_BODY])
_batch_line = _decoder(
    [
        ("body", _schema(_BODY), msgspec.NODEFAULT),
        ("custom_id", _CUSTOM_ID, None),
        ("url", str | None, None),
        ("method", Literal["POST"] | None, None),
    ]
)
_numbers_of = attrgetter(*NUMBERS)
_AUTO: Style = "auto"
_RAW: Style = "raw"


def read_plain(raw: bytes, default_custom_id: str) -> tuple[Request, str | None] | None:
    """A line's request and the model that it names. None if the line is not a plain one."""
    try:
        # A guess: a line with this text as a value is left to the full reader.
        if b'"body"' in raw:
            line = _batch_line(raw)
            body, url, style = line.body, line.url, _RAW
        else:
            line = body = _lazy_line(raw)
            url, style = None, _AUTO if body.messages is None else _RAW
        params = _params(*_numbers_of(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RowFault):
        return None
    messages, prompt, model = body.messages, body.prompt, body.model
    if (messages is None) == (prompt is None) or (model is not None and not is_model_name(model)):
        return None
    kind: Endpoint = "completion" if messages is None else "chat"
    if (url is not None and ENDPOINTS.get(url) != kind) or not _are_plain(messages or ()):
        return None
    custom_id = line.custom_id or default_custom_id
    return Request(custom_id, kind, messages, prompt, params=params, style=style), model


def _are_plain(messages: Any) -> bool:
    # The line has both keys, because it may have no others.
    return all(len(item) == 2 and item["role"] in _PLAIN_ROLES for item in messages)


@lru_cache(maxsize=256, typed=True)  # most rows have equal ones; 1 and 1.0 differ
def _params(*numbers: Any) -> SamplingParams:
    return params_of(dict(zip(NUMBERS, numbers, strict=True)), "chat")
