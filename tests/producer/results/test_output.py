"""Output lines have OpenAI's shapes, and every reader sees one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from batchkv_producer.results.output import (
    REFUSED_CODES,
    failed_text_line,
    is_failed_line,
    output_line,
    text_line,
)
from batchkv_producer.wire.choice import Choice, ToolCall
from batchkv_producer.wire.job import Endpoint, ErrorCode, Outcome, Result, TokenLogprob, Usage
from support.openai_bodies import OWN_KEYS, extra_keys

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
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_completion() -> None:
    """A completion row is a text_completion."""
    result = Result("a", "completion", "ok", "m", "Paris", "length", Usage(1, 1))
    body = json.loads(output_line(JOB_ID, result))["response"]["body"]
    assert (body["object"], body["id"]) == ("text_completion", f"cmpl-{JOB_ID}")
    choice = {"index": 0, "text": "Paris", "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]


CALLS = (ToolCall("call_1", "f", '{"x":1}'), ToolCall("call_2", "g", "{"))
REACHED = Result(
    *("a", "chat", "ok", "m", "", "tool_calls", Usage(10, 9, 8, 4)),
    reasoning="Hm.",
    tool_calls=CALLS,
    token_ids=(5, 6),
    prompt_token_ids=(1, 2, 3),
    more=(Choice("Paris", "stop", TOKENS), Choice("", "length", token_ids=())),
    fingerprint="ab" * 16,
    scheme="affine8",
)


def test_a_chat_answer_with_several_choices() -> None:
    """Each choice has its calls, reasoning and token ids. Content is null only beside a call."""
    body = json.loads(output_line(JOB_ID, REACHED))["response"]["body"]
    first, second, third = body["choices"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert first["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{"}},
        ],
    }
    assert (first["finish_reason"], first["token_ids"]) == ("tool_calls", [5, 6])
    assert second["message"] == {"role": "assistant", "content": "Paris", "refusal": None}
    assert len(second["logprobs"]["content"]) == 2 and "token_ids" not in second
    assert (third["message"]["content"], third["token_ids"]) == ("", [])
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_completion_with_several_choices() -> None:
    """Token ids, those of the prompt too, are in each choice, as vLLM has them."""
    result = replace(REACHED, endpoint="completion", finish_reason="stop", tool_calls=())
    body = json.loads(output_line(JOB_ID, result))["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["", "Paris", ""]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2, 3]] * 3
    assert body["choices"][0]["token_ids"] == [5, 6] and "prompt_token_ids" not in body


PLAIN_RESULTS = (
    Result("a", "chat", "ok", "m", "Paris", "stop", Usage(10, 3, 8), created=1_700_000_000),
    Result("a", "chat", "ok", "m", "Paris", "length", Usage(1, 1), logprobs=TOKENS),
)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize("result", [*PLAIN_RESULTS, REACHED])
def test_bodies_are_what_openai_says(result: Result, endpoint: Endpoint) -> None:
    """The types of OpenAI's own client accept every value, and have every key but a few of ours."""
    if endpoint == "completion" and result.tool_calls:
        result = replace(result, tool_calls=(), finish_reason="stop")
    line = json.loads(output_line(JOB_ID, replace(result, endpoint=endpoint)))
    extra = extra_keys(line["response"]["body"])
    assert extra == (OWN_KEYS if result.prompt_token_ids else set())


def test_the_check_of_bodies_sees_faults() -> None:
    """A wrong finish_reason, a number as a text, and an unknown key are found."""
    body = json.loads(output_line(JOB_ID, REACHED))["response"]["body"]
    for change in ({"finish_reason": "done"}, {"index": "0"}, {"message": {"content": "x"}}):
        wrong = {**body, "choices": [{**body["choices"][0], **change}]}
        with pytest.raises(ValidationError):
            extra_keys(wrong)
    assert extra_keys({**body, "usage": {**body["usage"], "joules": 5}}) == OWN_KEYS | {"joules"}


REFUSED = [
    "invalid_json",
    "invalid_request",
    "duplicate_custom_id",
    "unsupported_parameter",
    "context_length_exceeded",
]


@pytest.mark.parametrize("code", REFUSED)
def test_a_refused_request(code: str) -> None:
    """A wrong request has the response that a server would have sent: 400 and the reason."""
    line = json.loads(output_line(JOB_ID, Result("a", "chat", "failed", error=(code, "so it is"))))
    assert line == {
        "id": JOB_ID,
        "custom_id": "a",
        "response": {
            "status_code": 400,
            "request_id": JOB_ID,
            "body": {
                "error": {
                    "message": "so it is",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": code,
                }
            },
        },
        "error": None,
    }


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [
        ("failed", "expired", "batch_expired"),
        ("canceled", "canceled", "batch_cancelled"),
        ("failed", "timeout", "timeout"),
        ("failed", "lost", "lost"),
        ("failed", "out_of_memory", "out_of_memory"),
        ("failed", "engine_error", "engine_error"),
    ],
)
def test_no_answer_at_all(outcome: Outcome, code: str, shown: str) -> None:
    """A row that failed on the way has no response, but an error with OpenAI's code, if it has
    one."""
    line = json.loads(output_line(JOB_ID, Result("a", "chat", outcome, error=(code, "too slow"))))
    assert (line["response"], line["error"]) == (None, {"code": shown, "message": "too slow"})
    text = failed_text_line(Result("a", "chat", outcome, error=(code, "too slow")))
    assert text == f"a: [{code}] too slow"


def test_every_code_has_its_shape() -> None:
    """Each error code is listed as a refusal or as a missing answer."""
    codes = {code for name, code in vars(ErrorCode).items() if name.isupper()}
    others = {"timeout", "canceled", "expired", "lost", "out_of_memory", "engine_error"}
    assert codes == REFUSED_CODES | others and set(REFUSED) == REFUSED_CODES


TRICKY = (
    '","response":{"status_code":200,"x":"',
    'a","error":null}',
    "\\",
    '\\","response":{"status_code":200,',
)


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("code", ["timeout", "invalid_json"])
def test_answers_and_failures_are_told_apart(text: str, code: str) -> None:
    """A line shows whether the row has an answer, whatever its id and text are."""
    ok = output_line(JOB_ID, Result(text, "chat", "ok", text=text)).encode()
    failed = output_line(JOB_ID, Result(text, "chat", "failed", error=(code, text))).encode()
    assert not is_failed_line(ok + b"\n") and is_failed_line(failed + b"\n")
    for spaced, is_failed in ((ok, False), (failed, True)):  # as another tool writes it
        value = json.loads(spaced)
        assert is_failed_line(json.dumps(value).encode()) == is_failed
        assert is_failed_line(json.dumps(value, sort_keys=True, indent=1).encode()) == is_failed


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
    """Completions have four parallel lists, with offsets in characters."""
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
    """Whatever the answer has, its line is one line, also for readers that know Unicode's line
    ends."""
    line = output_line(JOB_ID, Result(text, "chat", "ok", text=text))
    assert line.splitlines() == [line]
    parsed = json.loads(line)
    assert parsed["custom_id"] == text
    assert parsed["response"]["body"]["choices"][0]["message"]["content"] == text


def test_half_a_character_can_be_written() -> None:
    """A lone surrogate in an answer can be encoded."""
    result = Result("a", "chat", "ok", text="x\ud800y\u2028")
    assert (
        "x?y"
        in json.loads(output_line(JOB_ID, result).encode("utf-8"))["response"]["body"]["choices"][
            0
        ]["message"]["content"]
    )
    assert text_line(result).encode("utf-8").startswith(b"x?y")


def test_text_lines() -> None:
    """As text a row is one line, with breaks and backslashes escaped. A failed row has its id."""
    assert text_line(Result("a", "chat", "ok", text="a\nb\\n\r")) == "a\\nb\\\\n\\r"
    failed = Result("a\n", "chat", "failed", error=("timeout", "too\nslow"))
    assert failed_text_line(failed) == "a\\n: [timeout] too\\nslow"
