"""The table of fields: it is complete, and each field does what the table says."""

from __future__ import annotations

import io
import json
from dataclasses import fields as fields_of
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from batchkv_producer.intake.body import read_body
from batchkv_producer.intake.checks import RowFault
from batchkv_producer.intake.fields import BY_NAME, FIELDS, Field, Use
from batchkv_producer.intake.formats import Row, read_rows
from batchkv_producer.manage.input_lines import input_line
from batchkv_producer.order.duplicates import request_digest
from batchkv_producer.wire.job import Endpoint, Request, SamplingParams, decode_job, encode_job
from batchkv_producer.wire.maker import needs_of

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": USER},
    "completion": {"prompt": "hi"},
}
# Fields that vLLM adds to OpenAI's, for both endpoints and for one, and those of older versions.
VLLM = (
    *("thinking_token_budget", "use_beam_search", "top_k", "min_p", "repetition_penalty"),
    *("watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids"),
    *("allowed_token_ids", "bad_words", "echo", "add_special_tokens", "response_format"),
    *("structured_outputs", "priority", "request_id", "session_id", "return_token_ids"),
    *("return_tokens_as_token_ids", "routed_experts_prompt_start", "return_token_offsets"),
    *("return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("repetition_detection", "stream_interval", "best_of", "logits_processors"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    *("guided_whitespace_pattern",),
)
VLLM_OF: dict[Endpoint, tuple[str, ...]] = {
    "chat": (
        *("include_reasoning", "add_generation_prompt", "continue_final_message", "documents"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
        *("return_prompt_text",),
    ),
    "completion": ("prompt_embeds",),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# A good value of each field that is taken, and what it changes in the request.
GOOD: dict[str, Any] = {
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "stop": ["END"],
    "stop_token_ids": [7, 5, 7],
    "include_stop_str_in_output": True,
    "min_tokens": 3,
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"50256": -100, "5": 0.5, "6": 0},
    "bad_words": ["no", "never", "no"],
    "n": 128,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "thinking_budget": 0,
    "thinking_token_budget": 100,
    "logprobs": {"chat": True, "completion": 3},
    "top_logprobs": 3,
    "messages": [{"role": "user", "content": "else"}],
    "prompt": [1, 2],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "structured_outputs": {"regex": "a+", "disable_any_whitespace": True, "json_object": None},
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"',
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "high",
    "enable_thinking": False,
    "chat_template_kwargs": {"enable_thinking": False},
}
STORED = {
    "stop_token_ids": (5, 7),
    "logit_bias": ((5, 0.5), (50256, -100.0)),
    "bad_words": ("never", "no"),
    "stop": ("END",),
}
# Values of another type, and values out of range.
BAD: dict[str, list[Any]] = {
    "stop": [5, [5], "", ["a"] * 17, ["a" * 1025]],
    "stop_token_ids": [5, ["5"], [True], [-1], [2**24], [1] * 1025],
    "logit_bias": [
        *([], {"a": 1}, {"05": 1}, {"-1": 1}, {"5": "x"}, {"5": 101}, {"5": -101}, {"5": True}),
        *({str(2**24): 1}, {str(n): 1 for n in range(1025)}),
    ],
    "bad_words": ["no", [5], [""], [" "], ["a" * 1025], ["a"] * 257],
    "logprobs": {"chat": [1, "true"], "completion": [True, -1, 21, "3"]},
    "top_logprobs": [True, -1, 21, "3"],
    "messages": [5, [], [5], [{"role": "x", "content": "a"}]],
    "prompt": [5, "", [], [-1], ["a", "b"]],
    "response_format": [
        *(5, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "structural_tag"}),
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}},
        {"type": "json_schema", "json_schema": {"schema": [SCHEMA]}},
        {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 65536}}},
    ],
    "structured_outputs": [
        *(5, {}, {"json": 5}, {"json": "{"}, {"regex": "a", "choice": ["a"]}, {"json_object": 1}),
        *({"structural_tag": "x"}, {"regex": "a", "whitespace_pattern": " "}, {"regex": None}),
        {"regex": "a", "disable_additional_properties": True},
    ],
    "guided_json": [5, "not json", [SCHEMA], "[" * 70_000],
    "guided_regex": [5, "", "a" * 65537],
    "guided_choice": [5, [], [5], [""], ["a", "a"]],
    "guided_grammar": [5, ""],
    "tools": [5, [5], [{"type": "x"}], [{"function": {}}], TOOLS * 129],
    "tool_choice": [
        *(5, "some", {}, {"type": "custom", "custom": {"name": "f"}}, {"function": {}}),
        *({"function": {"name": "g"}}, {"type": "allowed_tools", "allowed_tools": {}}),
    ],
    "parallel_tool_calls": [1, "no"],
    "reasoning_effort": [5, "much", ["high"]],
    "enable_thinking": [1, "no"],
    "chat_template_kwargs": [5, {"chat_template": "x"}, {"thinking": {}}],
}
READ_ELSEWHERE = {"model"}  # tested with the lines that name models


def body_of(field: Field, endpoint: Endpoint, value: Any) -> dict[str, Any]:
    """A body with this value; what the field needs beside it is there, too."""
    body = {**BODIES[endpoint], field.name: value}
    if field.name == "top_logprobs":
        body["logprobs"] = True
    if field.name in ("tool_choice", "parallel_tool_calls"):
        body["tools"] = TOOLS
    return body


def request_with(field: Field, endpoint: Endpoint, value: Any) -> Request:
    """The request of such a body, which survives the wire, and as a line of failed rows."""
    request = read_body(body_of(field, endpoint, value), endpoint, "a")
    assert decode_job(encode_job(request)) == request
    (row,) = read_rows(io.BytesIO(input_line(request, "m").encode()))
    assert isinstance(row, Row) and row.request == request, row
    return request


def request_without(field: Field, endpoint: Endpoint) -> Request:
    """The request of such a body without the field."""
    body = body_of(field, endpoint, None)
    if field.name in BODIES[endpoint]:
        body = BODIES[endpoint]
    return read_body(body, endpoint, "a")


def values_of(values: Any, endpoint: Endpoint) -> Any:
    """Values that may differ from endpoint to endpoint."""
    return values[endpoint] if isinstance(values, dict) and endpoint in values else values


EACH = [
    pytest.param(field, endpoint, id=f"{endpoint}-{field.name}")
    for field in FIELDS
    for endpoint in field.endpoints
    if field.name not in READ_ELSEWHERE
]


@pytest.mark.parametrize(("field", "endpoint"), EACH)
def test_a_field_does_what_the_table_says(field: Field, endpoint: Endpoint) -> None:
    """Null and neutral values change nothing. Others are stored, ignored or refused by name."""
    plain = request_without(field, endpoint)
    if field.name not in BODIES[endpoint]:
        assert request_with(field, endpoint, None) == plain
    for value in field.neutral:
        if field.name != "tool_choice":
            assert request_with(field, endpoint, value) == plain
    if field.use is Use.IGNORED:
        for value in (5, "x", {"a": [1]}, [None], True):
            assert request_with(field, endpoint, value) == plain
    elif field.use is Use.REFUSED:
        for value in (5, {"a": 1}, "x"):
            with pytest.raises(RowFault, match=f"^{field.name} .*is not supported") as caught:
                request_with(field, endpoint, value)
            assert caught.value.code == "unsupported_parameter"
    else:
        check_taken(field, endpoint, plain)


def check_taken(field: Field, endpoint: Endpoint, plain: Request) -> None:
    """A good value changes the request and its digest; bad ones fail the row and name the field."""
    good = values_of(GOOD[field.name], endpoint)
    request = request_with(field, endpoint, good)
    assert request != plain and request_digest(request) != request_digest(plain)
    if field.param:
        stored = getattr(request.params, field.param)
        assert stored == STORED.get(field.name, good), stored
    for value in values_of(bad_values(field), endpoint):
        with pytest.raises(RowFault) as caught:
            read_body(body_of(field, endpoint, value), endpoint, "a")
        words = str(caught.value)
        assert field.name.removeprefix("guided_") in words or field.name == "stop", words
        assert len(words) < 300
        assert caught.value.code in ("invalid_request", "unsupported_parameter")


def bad_values(field: Field) -> Any:
    """Values of the wrong type and, where there is a range, on both sides of it."""
    if field.name in BAD:
        return BAD[field.name]
    rule: Any = getattr(field.rule, "rule", field.rule)
    if not hasattr(rule, "high"):  # true or false
        return [0, 1, "true", []]
    wrong: list[Any] = ["5", [5], {}, True, rule.high + 1, rule.low - 1]
    wrong += [1.5] if rule.is_whole else []
    return wrong + ([rule.low] if rule.is_low_excluded else [])


def test_every_field_of_openai_is_in_the_table() -> None:
    """All fields of both endpoints, by OpenAI's own types."""
    for endpoint, module, kind in (
        ("chat", chats, chats.CompletionCreateParamsNonStreaming),
        ("completion", completions, completions.CompletionCreateParamsNonStreaming),
    ):
        assert module is not None
        missing = [name for name in kind.__annotations__ if (endpoint, name) not in BY_NAME]
        assert not missing and "model" in kind.__annotations__


def test_every_field_of_vllm_is_in_the_table() -> None:
    """All fields that vLLM adds, those of older versions too."""
    for endpoint, more in VLLM_OF.items():
        assert not [name for name in (*VLLM, *more) if (endpoint, name) not in BY_NAME]


def test_the_table_is_consistent() -> None:
    """Each name is there once for an endpoint, has a sentence, and a parameter that exists."""
    params = {item.name for item in fields_of(SamplingParams)}
    assert len(BY_NAME) == sum(len(field.endpoints) for field in FIELDS)
    for field in FIELDS:
        assert field.about.endswith(".") and (field.rule is None) == (field.param == "")
        assert field.param in params or field.rule is None
    assert {field.param for field in FIELDS} - {""} | {"logprobs"} == params
    taken = {field.name for field in FIELDS if field.use is Use.TAKEN}
    assert taken - READ_ELSEWHERE == GOOD.keys()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "differ"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "differ"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens 6 is more than max_tokens 5"),
        ({"n": 3, "best_of": 4}, "best_of 4 is not supported"),
        ({"n": 3, "best_of": 1}, "best_of 1 is less than n 3: leave best_of out"),
        ({"guided_json": {}, "guided_regex": "a"}, "exclude each other"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "exclude each other"),
        ({"tool_choice": "required"}, "tool_choice required needs tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "excludes a format",
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking and chat_template_kwargs.enable_thinking differ",
        ),
    ],
)
def test_fields_that_exclude_each_other(fields: dict[str, Any], words: str) -> None:
    """A row that says two things at once is refused, and the error names both."""
    with pytest.raises(RowFault, match=words):
        read_body({"messages": USER, **fields}, "chat", "a")


def test_the_best_n_of_n_are_all() -> None:
    """best_of with the value of n changes nothing, so that files that say both run."""
    for count in (1, 3):
        asked = {"messages": USER, "n": count}
        assert read_body({**asked, "best_of": count}, "chat", "a") == read_body(asked, "chat", "a")


def test_rows_need_the_abilities_of_their_fields() -> None:
    """A field that older workers do not read is left to newer ones; neutral values need nothing."""
    neutral = {
        field.name: field.neutral[0]
        for field in FIELDS
        if field.neutral and "chat" in field.endpoints
    }
    assert needs_of(read_body({"messages": USER, **neutral}, "chat", "a")) == ()
    asked = {"n": 2, "thinking_budget": 5, "tools": TOOLS, "guided_regex": "a"}
    request = read_body({"messages": USER, **asked}, "chat", "a")
    assert needs_of(request) == ("fields", "grammar", "tools", "thinking")


def test_parallel_calls_are_checked_without_tools_too() -> None:
    """A wrong value fails the row; a right one changes nothing without tools."""
    body = {"messages": USER}
    plain = read_body(body, "chat", "a")
    with pytest.raises(RowFault, match="parallel_tool_calls"):
        read_body({**body, "parallel_tool_calls": "no"}, "chat", "a")
    assert read_body({**body, "parallel_tool_calls": True}, "chat", "a") == plain


def test_a_schema_may_be_a_text() -> None:
    """vLLM takes a schema as a text, too."""
    from batchkv_producer.intake.answer_format import constraint_of

    found = [constraint_of({"guided_json": value}) for value in (SCHEMA, json.dumps(SCHEMA))]
    assert found[0] == found[1] is not None
