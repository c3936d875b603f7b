"""Requests that come alone: the rules of lines, streams, and several prompts."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from batchkv_producer.intake.checks import RowFault
from batchkv_producer.intake.formats import Row, read_rows
from batchkv_producer.intake.single import SingleRequest, param_of, read_single
from batchkv_producer.wire.job import Endpoint

MESSAGES = [{"role": "user", "content": "hi"}]


def read(body: Any, endpoint: Endpoint = "chat") -> SingleRequest:
    return read_single(json.dumps(body).encode(), endpoint)


def test_a_row_is_that_of_a_line() -> None:
    """The same body in a batch's line is the same request."""
    body = {"model": "m", "messages": MESSAGES, "temperature": 0, "stop": "x", "n": 3}
    line = {"custom_id": "request", "url": "/v1/chat/completions", "body": body}
    (row,) = read_rows(io.BytesIO(json.dumps(line).encode()))
    assert isinstance(row, Row)
    assert read(body) == SingleRequest((row.request,), "m")


def test_a_stream_may_end_with_its_counts() -> None:
    """Only ``stream`` and ``stream_options`` are for requests that come alone."""
    chat = {"messages": MESSAGES}
    assert not read({**chat, "stream": False}).is_stream
    assert read({**chat, "stream": True, "stream_options": None}).is_stream
    asked = read({**chat, "stream": True, "stream_options": {"include_usage": True}})
    assert (asked.is_stream, asked.has_usage, asked.model) == (True, True, None)


def test_several_prompts_are_several_rows() -> None:
    """Texts or lists of token ids; one list of token ids is one prompt."""
    found = read({"prompt": ["a", [1, 2]]}, "completion")
    assert [(row.prompt, row.prompt_tokens) for row in found.rows] == [("a", None), (None, [1, 2])]
    assert [row.prompt_tokens for row in read({"prompt": [1, 2]}, "completion").rows] == [[1, 2]]
    assert [row.prompt for row in read({"prompt": ["a"]}, "completion").rows] == ["a"]


WRONG: list[tuple[Any, str | None]] = [
    ([], None),
    ({}, "messages"),
    ({"messages": MESSAGES, "stream": 1}, "stream"),
    ({"messages": MESSAGES, "stream_options": {}}, "stream_options"),
    ({"messages": MESSAGES, "stream": True, "stream_options": 1}, "stream_options"),
    ({"messages": MESSAGES, "stream": True, "stream_options": {"x": True}}, "stream_options"),
    (
        {
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        },
        "stream_options",
    ),
    ({"messages": MESSAGES, "tempreature": 1}, "tempreature"),
    ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_is_wrong_names_its_field(body: Any, param: str | None) -> None:
    """The message begins with the field, which is the error's ``param``."""
    with pytest.raises(RowFault) as caught:
        read(body)
    assert param_of(caught.value.code, str(caught.value)) == param


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"messages": NaN}', b"[" * 100_000])
def test_messages_speak_of_a_body(raw: bytes) -> None:
    """There is no line of which they could speak."""
    with pytest.raises(RowFault, match=r"^the body is not"):
        read_single(raw, "chat")


@pytest.mark.parametrize("prompt", [["a"] * 129, ["a", [["b"]]], ["a", 1], [], [[]]])
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    """Too many, nested, of another kind, or none."""
    with pytest.raises(RowFault, match=r"^prompt"):
        read({"prompt": prompt}, "completion")
