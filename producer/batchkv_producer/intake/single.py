"""Reads a request that comes alone, over HTTP. Its body has the rules of a body in a file.

Two fields are for it alone: ``stream`` and ``stream_options``. And a completion may have several
prompts: each is a request of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from batchkv_producer.intake.body import model_of, read_body
from batchkv_producer.intake.checks import RowFault, invalid, shown, unsupported
from batchkv_producer.intake.fields import NAMES
from batchkv_producer.intake.formats import BOM, check_surrogates, parse_json
from batchkv_producer.wire.job import Endpoint, ErrorCode, Request

MAX_PROMPTS = 128
_STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})
_FIRST_WORD = re.compile(r"[a-z_]+")


@dataclass(frozen=True, slots=True)
class SingleRequest:
    """A request: one row for each prompt. ``model`` is None if the body names none.

    ``has_usage``: the stream ends with the counts of tokens.
    """

    rows: tuple[Request, ...]
    model: str | None
    is_stream: bool = False
    has_usage: bool = False


def read_single(raw: bytes, endpoint: Endpoint) -> SingleRequest:
    """The request in a body. Raises RowFault for the first thing that is wrong."""
    try:
        body = parse_json(raw.removeprefix(BOM))
        if not isinstance(body, dict):
            raise invalid(f"the line must be an object, got {shown(body)}")
        if b"\\u" in raw:
            check_surrogates(body)
    except RowFault as fault:
        raise RowFault(fault.code, str(fault).replace("the line ", "the body ", 1)) from None
    is_stream, has_usage = _streaming(body)
    rows = tuple(read_body(one, endpoint, "request") for one in _bodies(body, endpoint))
    return SingleRequest(rows, model_of(body), is_stream, has_usage)


def param_of(code: str, message: str) -> str | None:
    """The field that the message of a refused row is about. Messages begin with its name."""
    found = _FIRST_WORD.match(message)
    if found is None:
        return None
    is_known = found[0] in NAMES or code == ErrorCode.UNSUPPORTED_PARAMETER
    return found[0] if is_known else None


def _streaming(body: dict[str, Any]) -> tuple[bool, bool]:
    """Takes the two fields out of the body: whether to stream, and with the counts of tokens."""
    stream, options = body.pop("stream", None), body.pop("stream_options", None)
    if not isinstance(stream, bool | None):
        raise invalid(f"stream must be true or false, got {shown(stream)}")
    if options is None:
        return bool(stream), False
    if not stream:
        raise invalid("stream_options needs stream to be true")
    if not isinstance(options, dict):
        raise invalid(f"stream_options must be an object, got {shown(options)}")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise unsupported(f"stream_options has an unknown field: {shown(name)}")
        if not isinstance(value, bool | None):
            raise invalid(f"stream_options.{name} must be true or false, got {shown(value)}")
    if options.get("continuous_usage_stats"):
        raise unsupported("stream_options.continuous_usage_stats is not supported: leave it out")
    return True, bool(options.get("include_usage"))


def _bodies(body: dict[str, Any], endpoint: Endpoint) -> list[dict[str, Any]]:
    """The body of each prompt of a completion."""
    prompts = body.get("prompt")
    if endpoint != "completion" or not isinstance(prompts, list):
        return [body]
    if len(prompts) < 2 or type(prompts[0]) is int:
        return [body]
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are accepted")
    for one in prompts:
        if isinstance(one, list) and len(one) > 0 and type(one[0]) is not int:
            raise invalid("prompt must be texts or lists of token ids")
    return [{**body, "prompt": one} for one in prompts]
