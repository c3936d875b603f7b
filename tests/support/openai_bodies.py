"""Strict checks of output lines, with the types of OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, TypeAdapter

# Keys that are not OpenAI's: these are ours, or vLLM's.
OWN_KEYS = {"reasoning_content", "token_ids", "prompt_token_ids"}


def extra_keys(body: dict[str, Any]) -> set[str]:
    """The keys of an answer's body that OpenAI's types lack. Raises pydantic's ValidationError."""
    return extra_keys_of(ChatCompletion if "chat" in body["object"] else Completion, body)


def extra_keys_of(kind: type[BaseModel], value: object) -> set[str]:
    """The keys of a JSON value that one of OpenAI's types lacks. Raises ValidationError.

    Every other key has a value of its type, and none is lost or changed when it is read.
    """
    model = TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    assert json.loads(model.model_dump_json(exclude_unset=True)) == value
    found = set[str]()
    _collect(model, found)
    return found


def _collect(value: object, found: set[str]) -> None:
    if isinstance(value, BaseModel):
        found |= set(value.model_extra or {})
        for name in type(value).model_fields:
            _collect(getattr(value, name), found)
    elif isinstance(value, list):
        for item in value:
            _collect(item, found)
