"""What a line of a file says of a result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchkv_gateway.native.file_results import result_of
from batchkv_producer.results.output import output_line
from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.job import Result, Usage

LOGPROBS = (TokenLogprob("a", -0.25, (("a", -0.25), ("b", -1.5))), TokenLogprob(" ü", -2.0))
CALL = ToolCall("call-1", "look", '{"at": "it"}')
WHOLE: dict[str, Any] = {
    "model": "m",
    "finish_reason": "stop",
    "usage": Usage(prompt=9, completion=4, cached=3, reasoning=2),
    "created": 1_700_000_000,
    "fingerprint": "0123456789ab",
    "scheme": "affine8,last=float",
}
RESULTS = {
    "plain": Result("a", "chat", "ok", text="x\u2028y", **WHOLE),
    "no maker": Result("a", "chat", "ok", text="", model="m", finish_reason="length"),
    "thought": Result("a", "chat", "ok", text="x", reasoning="because", **WHOLE),
    "calls": Result("a", "chat", "ok", tool_calls=(CALL, CALL), **WHOLE),
    "logprobs": Result("a", "chat", "ok", text="a ü", logprobs=LOGPROBS, **WHOLE),
    "text logprobs": Result("a", "completion", "ok", text="a ü", logprobs=LOGPROBS, **WHOLE),
    "ids": Result("a", "chat", "ok", text="x", token_ids=(1, 2), prompt_token_ids=(3,), **WHOLE),
    "text ids": Result("a", "completion", "ok", token_ids=(1,), prompt_token_ids=(3,), **WHOLE),
    "choices": Result(
        *("a", "chat", "ok"),
        text="x",
        more=(Choice("y", "length", LOGPROBS, "why", (CALL,), (5,)), Choice("", "stop")),
        **WHOLE,
    ),
    "text choices": Result("a", "completion", "ok", text="x", more=(Choice("y", "stop"),), **WHOLE),
    "reused": Result("a", "chat", "ok", text="x", reused=True, **WHOLE),
    "failed": Result("a", "chat", "failed", error=("engine_error", "it broke")),
    "refused": Result("a", "chat", "failed", error=("invalid_request", "it is wrong")),
    "canceled": Result("a", "chat", "canceled", error=("canceled", "it was canceled")),
    "expired": Result("a", "chat", "failed", error=("expired", "it came too late")),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_line_of_a_file_gives_its_result_back(name: str) -> None:
    """Nothing that the line has is lost: choices, log-probabilities, ids, calls, counts."""
    result = RESULTS[name]
    line = output_line("job-1", result)
    found = result_of(json.loads(line))
    assert found == result
    assert output_line("job-1", found) == line
