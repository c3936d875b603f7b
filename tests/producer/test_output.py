"""Output lines: OpenAI's shapes, and JSON that every reader takes for one line."""

from __future__ import annotations

import json

import pytest

from batchkv_producer.job import Result, TokenLogprob, Usage
from batchkv_producer.output import output_line, text_line

JOB_ID = "0123456789abcdef-7"
TOKENS = (
    TokenLogprob("Pa", -0.5, (("Pa", 1e-9), ("Lo", -1.25))),
    TokenLogprob("ris", float("-inf"), (("ris", float("nan")),)),
)


def test_a_chat_answer() -> None:
    """A chat row is a chat.completion with usage, cached tokens included."""
    result = Result("a", "chat", "ok", "m", "Paris", "stop", Usage(10, 3, 8), created=1_700_000_000)
    line = json.loads(output_line(JOB_ID, result))
    assert (line["id"], line["custom_id"], line["error"]) == (JOB_ID, "a", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, JOB_ID)
    assert line["response"]["body"] == {
        "id": f"chatcmpl-{JOB_ID}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


def test_a_completion() -> None:
    """A completion row is a text_completion."""
    result = Result("a", "completion", "ok", "m", "Paris", "length", Usage(1, 1))
    body = json.loads(output_line(JOB_ID, result))["response"]["body"]
    assert (body["object"], body["id"]) == ("text_completion", f"cmpl-{JOB_ID}")
    choice = {"index": 0, "text": "Paris", "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]


@pytest.mark.parametrize("outcome", ["failed", "canceled"])
def test_an_error(outcome: str) -> None:
    """A row without an answer has a code and a message, and no response."""
    result = Result("a", "chat", outcome, error=("timeout", "too slow"))  # type: ignore[arg-type]
    line = json.loads(output_line(JOB_ID, result))
    assert (line["response"], line["error"]) == (None, {"code": "timeout", "message": "too slow"})


def test_chat_logprobs() -> None:
    """Chat: one object a token, with bytes and alternatives; every number is finite and <= 0."""
    result = Result("a", "chat", "ok", text="Paris", logprobs=TOKENS)
    body = json.loads(output_line(JOB_ID, result))["response"]["body"]
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "Pa",
        "logprob": -0.5,
        "bytes": [80, 97],
        "top_logprobs": [
            {"token": "Pa", "logprob": 0.0, "bytes": [80, 97]},
            {"token": "Lo", "logprob": -1.25, "bytes": [76, 111]},
        ],
    }
    assert (second["logprob"], second["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_completion_logprobs() -> None:
    """Completions: four lists side by side, offsets in characters."""
    result = Result("a", "completion", "ok", text="Paris", logprobs=TOKENS)
    body = json.loads(output_line(JOB_ID, result))["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Pa", "ris"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"Pa": 0.0, "Lo": -1.25}, {"ris": -9999.0}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize(
    "text", ["a\nb\r\nc", "a\u2028b\u2029c\x85d\x7fe\x0bf\x1ch", "\U0001f600é"]
)
def test_one_line_to_every_reader(text: str) -> None:
    """Whatever the answer holds, its line is one line, also to readers that know Unicode's ends."""
    line = output_line(JOB_ID, Result(text, "chat", "ok", text=text))
    assert line.splitlines() == [line]
    parsed = json.loads(line)
    assert parsed["custom_id"] == text
    assert parsed["response"]["body"]["choices"][0]["message"]["content"] == text


def test_half_a_character_can_be_written() -> None:
    """A lone surrogate in an answer does not make the line impossible to encode."""
    result = Result("a", "chat", "ok", text="x\ud800y\u2028")
    assert (
        "x?y"
        in json.loads(output_line(JOB_ID, result).encode("utf-8"))["response"]["body"]["choices"][
            0
        ]["message"]["content"]
    )
    assert text_line(result).encode("utf-8").startswith(b"x?y")


def test_text_lines() -> None:
    """As text a row is one line: breaks and backslashes are escaped, errors stand in brackets."""
    assert text_line(Result("a", "chat", "ok", text="a\nb\\n\r")) == "a\\nb\\\\n\\r"
    failed = Result("a", "chat", "failed", error=("timeout", "too\nslow"))
    assert text_line(failed) == "[timeout] too\\nslow"
