"""Strict checks of every answer of a gateway, with the types of OpenAI's own client."""

from __future__ import annotations

import re
from typing import Any

from openai.types import Batch, Completion, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from support.openai_bodies import OWN_KEYS, extra_keys_of

LIST_KEYS = {"object", "data", "first_id", "last_id", "has_more"}
FILE_ID, BATCH_ID = "/v1/files/[^/]+", "/v1/batches/[^/]+"
KINDS: tuple[tuple[str, str, type[BaseModel], bool], ...] = (
    ("POST", "/v1/files", FileObject, False),
    ("GET", "/v1/files", FileObject, True),
    ("GET", FILE_ID, FileObject, False),
    ("DELETE", FILE_ID, FileDeleted, False),
    ("POST", "/v1/batches", Batch, False),
    ("GET", "/v1/batches", Batch, True),
    ("GET", BATCH_ID, Batch, False),
    ("POST", f"{BATCH_ID}/cancel", Batch, False),
    ("GET", "/v1/models", Model, True),
    ("GET", "/v1/models/.+", Model, False),
    ("POST", "/v1/chat/completions", ChatCompletion, False),
    ("POST", "/v1/completions", Completion, False),
)


def check_answer(method: str, path: str, status: int, body: Any) -> None:
    """Raise AssertionError or ValidationError for an answer that is not as OpenAI's."""
    if status >= 400:
        assert set(body) == {"error"}, body
        _check(ErrorObject, body["error"])
        return
    for of_method, pattern, kind, is_list in KINDS:
        if of_method == method and re.fullmatch(pattern, path):
            if is_list:
                assert body["object"] == "list" and set(body) <= LIST_KEYS, body
                assert kind is Model or set(body) == LIST_KEYS, body
            for one in body["data"] if is_list else [body]:
                _check(kind, one)
            return
    raise AssertionError(f"no type is known for {method} {path}")


def check_chunk(chunk: dict[str, Any]) -> None:
    """Raise for a piece of a stream that is not as OpenAI's."""
    if "chat" in chunk["object"]:
        _check(ChatCompletionChunk, chunk)
        return
    # OpenAI's type of a completion has no null here, but its streams have it before the end.
    choices = [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"}
        for choice in chunk["choices"]
    ]
    _check(Completion, {**chunk, "choices": choices})


def _check(kind: type[BaseModel], value: object) -> None:
    extra = extra_keys_of(kind, value)
    assert extra <= OWN_KEYS, (kind.__name__, extra)


def check_response(response: Any) -> None:
    """A hook of OpenAI's client for its responses: each answer in JSON is checked."""
    request = response.request
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "application/json" and request.url.path.startswith("/v1/"):
        response.read()
        if "\\ud800" in response.text:
            return  # half of a surrogate pair: metadata may have it, but pydantic does not read it
        check_answer(request.method, request.url.path, response.status_code, response.json())
