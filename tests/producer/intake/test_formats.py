"""Reading rows: what is accepted, what fails its row, and that nothing stops the rows after it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkv_producer.intake import body, formats, plain
from batchkv_producer.intake.formats import Row, RowError, read_rows
from batchkv_producer.wire.job import Request, SamplingParams, decode_job, encode_job

USER = [{"role": "user", "content": "hi"}]


def rows_of(*lines: Any, is_text: bool = False) -> list[Row | RowError]:
    """Rows of a file with these lines: bytes as they are, strings encoded, other values as JSON."""
    raw = [
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    return list(read_rows(io.BytesIO(b"\n".join(raw)), is_text=is_text))


def request_of(line: Any) -> Request:
    """The request of a file of one good line."""
    (row,) = rows_of(line)
    assert isinstance(row, Row), row
    return row.request


def error_of(line: Any) -> tuple[str, str]:
    """Code and message of a file of one bad line."""
    (row,) = rows_of(line)
    assert isinstance(row, RowError), row
    assert row.line == 1
    return row.code, row.message


def params_of(**fields: Any) -> SamplingParams:
    """The parameters of a lazy chat line with these fields."""
    return request_of({"messages": USER, **fields}).params


def chat_error(**fields: Any) -> tuple[str, str]:
    """Code and message of a lazy chat line with these fields."""
    return error_of({"messages": USER, **fields})


# ---- shapes of a line ----


def test_an_openai_batch_line() -> None:
    """A line of OpenAI's Batch API is read unchanged."""
    line = {
        "custom_id": "request-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "some/model",
            "messages": [{"role": "system", "content": "s"}, *USER],
            "max_tokens": 7,
        },
    }
    (row,) = rows_of(line)
    assert isinstance(row, Row)
    assert (row.line, row.model, row.request.custom_id) == (1, "some/model", "request-1")
    assert row.request.endpoint == "chat"
    assert row.request.messages == [{"role": "system", "content": "s"}, *USER]
    assert row.request.params == SamplingParams(max_tokens=7)


def test_a_batch_line_for_completions() -> None:
    """The completions endpoint takes a prompt, which is not templated."""
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Once"}}
    request = request_of(line)
    assert (request.endpoint, request.prompt, request.messages) == ("completion", "Once", None)


def test_lazy_lines() -> None:
    """A prompt or messages alone make a row; its name is its line; fields stand at the top."""
    first, second = rows_of({"prompt": "hi", "max_tokens": 5}, {"messages": USER, "top_k": 3})
    assert isinstance(first, Row) and isinstance(second, Row)
    assert (first.request.custom_id, first.request.prompt) == ("line-1", "hi")
    assert first.request.params == SamplingParams(max_tokens=5)
    assert (second.request.custom_id, second.request.messages) == ("line-2", USER)
    assert second.request.params == SamplingParams(top_k=3)


def test_a_text_file() -> None:
    """One prompt a line, as it stands, without its line's end; blank lines are counted only."""
    rows = rows_of("  first \r", "", '{"prompt": 1}', " \t", "last", is_text=True)
    assert [(row.line, row.request.prompt) for row in rows if isinstance(row, Row)] == [
        (1, "  first "),
        (3, '{"prompt": 1}'),
        (5, "last"),
    ]
    assert {row.request.endpoint for row in rows if isinstance(row, Row)} == {"completion"}


def test_blank_lines_crlf_and_bom() -> None:
    """A byte order mark, CRLF and blank lines are no fault; lines keep their numbers."""
    rows = rows_of(b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \r", b'{"prompt": "b"}')
    assert [(row.line, row.request.prompt) for row in rows if isinstance(row, Row)] == [
        (1, "a"),
        (4, "b"),
    ]


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        (b'{"prompt": "cut sh', "invalid_json", "a quote is not closed (character 12)"),
        (b'{"prompt": "cut sh\n', "invalid_json", "a quote is not closed (character 12)"),
        (b'{"prompt": "a\tb"}', "invalid_json", "control character, which JSON writes as"),
        (
            b"plain text\n",
            "invalid_json",
            "a value is missing here, or is not one that JSON has (character 1)",
        ),
        (b'{"prompt": "a" "b"}', "invalid_json", "a comma or a closing bracket is missing here"),
        (b"{'prompt': 'a'}", "invalid_json", "a name in double quotes must stand here"),
        (b'{"prompt": "a",}', "invalid_json", "comma after the last value"),
        (b'{"prompt" "a"}', "invalid_json", "a colon is missing after a name (character 11)"),
        (b'{"promt": "a"}', "invalid_request", "nor a prompt: promt should probably be prompt"),
        (b'{"prompt": "\xff"}', "invalid_json", "not UTF-8 (byte 13)"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN is not a JSON number"),
        (b'{"prompt": "a", "seed": -Infinity}', "invalid_json", "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json", "out of range"),
        (
            b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
            "invalid_json",
            "a number has thousands of digits",
        ),
        (b"[" * 100_000, "invalid_json", "nests too deeply"),
        (b'{"a":' * 100_000, "invalid_json", "nests too deeply"),
        (b'"text"', "invalid_request", "not a JSON object"),
        (b"5", "invalid_request", "not a JSON object, but 5"),
        (b"null", "invalid_request", "not a JSON object"),
        (b"{}", "invalid_request", "neither messages nor a prompt"),
        (b'{"prompt": "\\ud800"}', "invalid_request", "surrogate"),
        (b'{"prompt": "a", "\\udfff": 1}', "invalid_request", "surrogate"),
        ({"prompt": "a", "messages": USER}, "invalid_request", "both messages and a prompt"),
        ({"custom_id": 5, "prompt": "a"}, "invalid_request", "custom_id must be a string, got 5"),
        ({"custom_id": "", "prompt": "a"}, "invalid_request", "custom_id must have 1 to"),
        ({"custom_id": "a", "url": "/v1/completions"}, "invalid_request", "body is missing"),
        ({"custom_id": "a", "body": None}, "invalid_request", "body must be an object, got null"),
        ({"body": "text"}, "invalid_request", 'body must be an object, got "text"'),
        ({"url": "/v1/embeddings", "body": {}}, "unsupported_parameter", "/v1/embeddings"),
        ({"method": "GET", "body": {}}, "unsupported_parameter", "method must be POST"),
        ({"body": {"prompt": "a"}, "extra": 1}, "unsupported_parameter", "extra"),
        ({"prompt": "a", "model": 5}, "invalid_request", "model must be a name, got 5"),
    ],
)
def test_a_line_that_is_wrong(line: Any, code: str, part: str) -> None:
    """A line that cannot be read has a code and a sentence that names the fault."""
    found, message = error_of(line)
    assert found == code
    assert part in message


def test_a_bad_row_stops_nothing() -> None:
    """Rows before and after a bad one are read; it keeps its own name where it has one."""
    rows = rows_of({"prompt": "a"}, "{", {"custom_id": "mine", "prompt": 1}, {"prompt": "b"})
    assert [type(row) for row in rows] == [Row, RowError, RowError, Row]
    assert [row.custom_id for row in rows if isinstance(row, RowError)] == ["line-2", "mine"]


def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlong line fails without being read whole, and the next line is read."""
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(formats, "SKIP_BYTES", 64)
    largest = json.dumps({"prompt": "x" * 86}).encode()
    assert len(largest) == 100
    rows = rows_of(b"a" * 1000, {"prompt": "b"}, largest, b"c" * 101)
    assert [(row.line, type(row)) for row in rows] == [
        (1, RowError),
        (2, Row),
        (3, Row),
        (4, RowError),
    ]
    assert isinstance(rows[0], RowError)
    assert (rows[0].code, rows[0].custom_id) == ("invalid_request", "line-1")
    assert "longer than 100 bytes" in rows[0].message


def test_reading_is_bounded() -> None:
    """No read of the stream asks for more than the longest line that is accepted."""

    class Counting(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None and 0 < size <= formats.MAX_LINE_BYTES + 1
            return super().readline(size)

    stream = Counting(b"x" * (formats.MAX_LINE_BYTES + 5) + b'\n{"prompt": "a"}')
    assert [type(row) for row in read_rows(stream)] == [RowError, Row]


# ---- messages ----


def test_text_parts_are_joined_and_nulls_dropped() -> None:
    """Content in parts becomes one string; a developer is a system; null is not said."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d", "name": None},
        {"role": "user", "content": parts, "name": "ann"},
    ]
    assert request_of({"messages": messages}).messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab", "name": "ann"},
    ]


def test_tool_calls_reach_the_template() -> None:
    """Calls and answers of tools, and the tools, are handed on as they are."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    request = request_of({"messages": messages, "tools": tools, "tool_choice": "auto"})
    assert request.messages is not None
    assert request.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert request.messages[2] == messages[2]
    assert request.tools == tools


def test_an_answer_can_be_a_message_of_the_next_row() -> None:
    """The message of an output line, of ours, OpenAI's or vLLM's, is accepted as it is."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    openai = {"annotations": [], "audio": None, "function_call": None}
    wanted = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."}
    for more in ({"reasoning_content": "Hm."}, {**openai, "reasoning": "Hm."}):
        request = request_of({"messages": [*USER, {**answer, **more}]})
        assert request.messages == [*USER, wanted]
    code, message = error_of({"messages": [{**answer, "annotations": [{}]}]})
    assert (code, "messages[0].annotations" in message) == ("unsupported_parameter", True)


def nested(depth: int) -> Any:
    """A list in a list in a list ..."""
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("messages", "code", "part"),
    [
        ([], "invalid_request", "messages is empty"),
        ("hi", "invalid_request", 'messages must be a list, got "hi"'),
        (["hi"], "invalid_request", "messages[0] must be an object"),
        ([{"content": "a"}], "invalid_request", "messages[0].role must be one of"),
        ([{"role": ["user"], "content": "a"}], "invalid_request", "got a list"),
        ([{"role": "robot", "content": "a"}], "invalid_request", 'got "robot"'),
        ([{"role": "user"}], "invalid_request", "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "invalid_request", "got 5"),
        ([{"role": "assistant", "content": None}], "invalid_request", "got null"),
        ([{"role": "user", "content": ["a"]}], "invalid_request", "content[0] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "unsupported_parameter",
            'only text parts are supported, got "image_url"',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "invalid_request",
            "content[0].text must be a string",
        ),
        ([{**USER[0], "audio": {}}], "unsupported_parameter", "messages[0].audio"),
        ([{**USER[0], "name": 1}], "invalid_request", "messages[0].name must be a string"),
        ([{"role": "user", "content": 1}], "invalid_request", "[0].content must be a string"),
        ([{**USER[0], "tool_calls": {}}], "invalid_request", "tool_calls must be a list"),
        ([{**USER[0], "tool_calls": [{}]}], "invalid_request", "tool_calls[0].function"),
    ],
)
def test_messages_that_are_wrong(messages: Any, code: str, part: str) -> None:
    """Every fault of a message names the message and the field."""
    found, message = error_of({"messages": messages})
    assert found == code
    assert part in message


@pytest.mark.parametrize(
    ("tools", "code", "part"),
    [
        ({}, "invalid_request", "tools must be a list"),
        ([5], "invalid_request", "tools[0] must be an object"),
        ([{"type": "web_search"}], "unsupported_parameter", "only functions"),
        ([{"type": "function", "function": {}}], "invalid_request", "with a name"),
        ([{"function": {"name": "f"}}] * 129, "invalid_request", "at most 128"),
        (
            [{"function": {"name": "f", "parameters": nested(60)}}],
            "invalid_request",
            "nests deeper than 32 levels",
        ),
    ],
)
def test_tools_that_are_wrong(tools: Any, code: str, part: str) -> None:
    """Tools have a type, a function and a name, and do not nest without end."""
    found, message = chat_error(tools=tools)
    assert found == code
    assert part in message


def test_template_variables() -> None:
    """Listed variables reach the template; the template itself and unknown ones do not."""
    request = request_of(
        {
            "messages": USER,
            "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
        }
    )
    assert request.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    for name in ("chat_template", "add_generation_prompt", "tools", "tokenize"):
        code, message = chat_error(chat_template_kwargs={name: "x"})
        assert code == "unsupported_parameter"
        assert name in message
    assert chat_error(chat_template_kwargs={"thinking": {}})[0] == "invalid_request"
    assert chat_error(chat_template_kwargs=[])[0] == "invalid_request"


# ---- parameters ----


def test_a_top_p_of_0_is_taken() -> None:
    """As OpenAI's API has it, and clients send it."""
    assert params_of(top_p=0).top_p == 0 and params_of(top_p=0.0).top_p == 0


def test_every_parameter_is_honoured() -> None:
    """All fields that batchkv knows arrive as they were said."""
    params = params_of(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=-7,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=3,
    )
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=-7,
        stop=("a", "b"),
        logprobs=3,
    )


def test_parameters_with_two_spellings() -> None:
    """One stop string, the newer name of max_tokens, "all" as -1, logprobs of completions."""
    assert params_of(stop="x").stop == ("x",)
    assert params_of(max_completion_tokens=9).max_tokens == 9
    assert params_of(max_completion_tokens=9, max_tokens=9).max_tokens == 9
    assert params_of(top_k=-1).top_k == 0
    assert params_of(logprobs=True).logprobs == 0
    assert params_of(logprobs=False).logprobs is None
    assert request_of({"prompt": "a", "logprobs": 5}).params.logprobs == 5
    assert request_of({"prompt": ["a"]}).prompt == "a"
    assert params_of(thinking_budget=None, stop=[]).stop == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1, got 0"),
        ({"max_tokens": -3}, "max_tokens must be a whole number >= 1, got -3"),
        ({"max_tokens": 2**31}, "must be a whole number >= 1 and <= 2147483647, got 2147483648"),
        ({"max_tokens": 5.0}, "max_tokens must be a whole number >= 1, got 5.0"),
        ({"max_tokens": True}, "max_tokens must be a whole number >= 1, got true"),
        ({"max_tokens": "5"}, 'max_tokens must be a whole number >= 1, got "5"'),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "differ"),
        ({"temperature": -0.1}, "temperature must be a number >= 0 and <= 100, got -0.1"),
        ({"temperature": "hot"}, 'got "hot"'),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"min_p": 2}, "min_p must be a number >= 0 and <= 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number > 0"),
        ({"seed": 2**64}, "seed must be a whole number"),
        ({"seed": 10**400}, "seed must be a whole number"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop": ""}, "stop: each string must have 1 to 1024 bytes"),
        ({"stop": ["é" * 513]}, "stop: each string must have 1 to 1024 bytes"),
        ({"stop": ["a"] * 17}, "stop has 17 strings; at most 16"),
        ({"logprobs": 5}, "logprobs must be true or false, got 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be a whole number >= 0"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
    ],
)
def test_values_that_are_wrong(fields: dict[str, Any], message: str) -> None:
    """A value of the wrong type or range fails the row with a sentence that shows it."""
    code, found = chat_error(**fields)
    assert code == "invalid_request"
    assert message in found


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}, "response_format": {"type": "text"}, "service_tier": "auto"},
        {"best_of": 1, "echo": False, "suffix": "", "tool_choice": "none"},
        {"user": "me", "metadata": {"a": [1]}, "store": True},
        {"n": None, "stream_options": None, "anything": None, "max_tokens": None, "stop": None},
        {"parallel_tool_calls": True, "tools": [], "min_tokens": 0},
    ],
)
def test_fields_that_change_nothing(fields: dict[str, Any]) -> None:
    """Neutral values, nulls and fields about bookkeeping are accepted and leave no trace."""
    assert request_of({"messages": USER, **fields}) == Request("line-1", "chat", messages=USER)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"best_of": 2},
            "best_of 2 is not supported (only 1): use n, and choose among the answers. The value",
        ),
        ({"best_of": True}, "best_of true"),
        ({"stream": True}, "stream true is not supported (only false): results are written when"),
        ({"modalities": ["text", "audio"]}, '["text", "audio"] is not supported (only ["text"])'),
        ({"vllm_xargs": {"a": 1}}, 'vllm_xargs {"a": 1} is not supported (only {})'),
        ({"functions": [{"name": "f"}]}, "functions a list is not supported (only [])"),
        ({"function_call": "f"}, 'function_call "f" is not supported (only "auto" or "none")'),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not supported: use structured_outputs"),
        ({"prompt": None, "cache_salt": "x"}, "cache_salt"),
        ({"x" * 500: 1}, "x" * 80 + " is not supported"),
    ],
)
def test_fields_that_are_not_supported(fields: dict[str, Any], name: str) -> None:
    """A field that would change the answer is never dropped in silence: its row fails."""
    code, message = chat_error(**fields)
    assert code == "unsupported_parameter"
    assert name in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "is not a field of chat requests: did you mean temperature?"),
        ("top_logprob", "did you mean top_logprobs?"),
        ("extra_body", "put the fields that are in it directly into the body"),
        ("xyz", "is not supported: no API that batchkv knows has this field"),
    ],
)
def test_a_mistyped_field_is_named_with_the_likely_one(name: str, hint: str) -> None:
    """Only fields of the same endpoint are suggested."""
    code, message = chat_error(**{name: 1})
    assert code == "unsupported_parameter" and message.endswith(hint)
    assert "did you mean" not in error_of({"prompt": "a", "tool_choices": 1})[1]


def test_fields_of_the_other_endpoint() -> None:
    """Messages, tools and template variables belong to chat; a prompt does not."""
    for name in ("tools", "chat_template_kwargs", "top_logprobs"):
        code, message = error_of({"prompt": "a", name: {}})
        assert (code, name in message) == ("unsupported_parameter", True)
    body = {"messages": USER, "prompt": "a"}
    code, message = error_of({"url": "/v1/chat/completions", "body": body})
    assert (code, "prompt" in message) == ("unsupported_parameter", True)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_request"),
        (5, "invalid_request"),
        (["a", "b"], "unsupported_parameter"),
        ([[1, 2], [3]], "unsupported_parameter"),
        ([], "invalid_request"),
        ([[]], "invalid_request"),
        ([1, "a"], "invalid_request"),
        ([1, True], "invalid_request"),
        ([-1], "invalid_request"),
        ([2**24], "invalid_request"),
        ([1.0], "invalid_request"),
    ],
)
def test_prompts_that_are_wrong(prompt: Any, code: str) -> None:
    """A prompt is one text that is not empty, or one list of token ids."""
    assert error_of({"prompt": prompt})[0] == code


# ---- whatever comes ----


def num_filled(data: bytes) -> int:
    """How many lines are not blank, as the reader's documentation counts them."""
    return sum(bool(line.strip()) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))


@settings(max_examples=200)
@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([b"", b"\r", b"{}", b"\xef\xbb\xbf"])),
    st.booleans(),
)
def test_any_bytes_give_one_item_a_line(lines: list[bytes], is_text: bool) -> None:
    """Nothing raises, each line that is not blank is one item, and numbers grow."""
    data = b"\n".join(lines)
    rows = list(read_rows(io.BytesIO(data), is_text=is_text))
    assert len(rows) == num_filled(data)
    numbers = [row.line for row in rows]
    assert numbers == sorted(set(numbers))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(
    [
        *("custom_id", "model", "messages", "prompt", "body", "url", "method", "tools", "stop"),
        *("max_tokens", "temperature", "seed", "logprobs", "top_logprobs", "n", "logit_bias"),
        *("chat_template_kwargs", "tool_choice", "response_format", "user"),
    ]
)
messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name"]),
        json_values | st.sampled_from(["user", "assistant"]),
    ),
    max_size=3,
)


@settings(max_examples=80)
@given(st.dictionaries(names, json_values | messages))
def test_any_object_gives_a_row_that_can_be_sent(value: dict[str, Any]) -> None:
    """Whatever an object holds, it is one item, and a good one survives the wire."""
    (row,) = rows_of(json.dumps(value))
    if isinstance(row, Row):
        assert decode_job(encode_job(row.request)) == row.request
    else:
        (row.custom_id + row.message).encode("utf-8")


# ---- the quick way ----


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a"},
        {"messages": USER, "custom_id": "x", "model": "m", "user": "u", "seed": 2**63 - 1},
        {"url": "/v1/completions", "body": {"prompt": "a", "temperature": 0, "top_k": -1}},
        {
            "custom_id": "x",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [*USER, {"content": "b", "role": "assistant"}], "max_tokens": 5},
        },
    ],
)
def test_plain_lines_are_read_the_quick_way(line: dict[str, Any]) -> None:
    """The lines that most files consist of fit the schema: they are not read twice."""
    assert plain.read_plain(json.dumps(line).encode(), "line-1") is not None


# Values on both sides of every rule, and of every limit of the schema.
numbers = st.sampled_from(
    [None, True, 0, -0.0, 1, 1.0, -1, 0.5, 100, 100.5, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64]
)
texts = st.sampled_from(["", " ", "a", "é\x00", "body", "\\", "x" * 1024, "😀" * 1025])
chats = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool", "developer", "x"]), "content": texts},
        optional={"name": texts | st.none()},
    ),
    max_size=2,
)
changes = st.one_of(
    st.tuples(st.sampled_from([*plain.NUMBERS]), numbers),
    st.tuples(st.sampled_from(["n", "logprobs", "presence_penalty", "user"]), numbers | texts),
    st.tuples(st.just("metadata"), st.dictionaries(texts, texts | numbers, max_size=1)),
    st.tuples(st.sampled_from(["model", "prompt", "stop"]), texts | st.none() | st.just(["a"])),
    st.tuples(st.just("messages"), chats | st.none()),
)
outer_changes = st.one_of(
    st.tuples(st.just("custom_id"), texts | numbers),
    st.tuples(st.just("url"), st.sampled_from([*body.ENDPOINTS, "/v1/x", None, 1])),
    st.tuples(st.just("method"), st.sampled_from(["POST", "GET", None])),
    st.tuples(st.just("other"), texts | st.none()),
)


@settings(max_examples=200)
@given(
    st.sampled_from([{"prompt": "a"}, {"messages": USER}]),
    st.lists(changes, max_size=2),
    st.lists(outer_changes, max_size=2),
    st.booleans(),
)
def test_both_ways_of_reading_agree(
    base: dict[str, Any], inner: list[Any], outer: list[Any], is_lazy: bool
) -> None:
    """What the schema takes is what the careful way makes of it, down to the kind of numbers."""
    fields = {**base, **dict(inner)}
    line = {**fields, **dict(outer)} if is_lazy else {"body": fields, **dict(outer)}
    raw = json.dumps(line, ensure_ascii=False).encode()
    quick = plain.read_plain(raw, "line-1")
    if quick is not None:
        careful = formats._careful_row(1, "line-1", raw)
        assert careful == Row(1, *quick)
        assert repr(careful.request.params) == repr(quick[0].params)


def test_a_number_keeps_its_kind() -> None:
    """What one row says is remembered for the next, but 1 and 1.0 are not the same."""
    lines = [{"prompt": "a", "temperature": value} for value in (1, 1.0, 1)]
    kinds = [type(row.request.params.temperature) for row in rows_of(*lines) if type(row) is Row]
    assert kinds == [int, float, int]


def test_a_zero_has_no_sign() -> None:
    """What one row says is remembered for the next, and -0.0 equals 0.0: both are 0.0."""
    for raw in (b'{"prompt": "a", "temperature": -0.0}', b'{"prompt": "a", "temperature": 0.0}'):
        quick = plain.read_plain(raw, "line-1")
        careful = formats._careful_row(1, "line-1", raw)
        assert quick is not None and isinstance(careful, Row)
        for params in (quick[0].params, careful.request.params):
            assert repr(params.temperature) == "0.0"


def test_a_role_that_is_renamed_is_not_plain() -> None:
    """The template gets another word for it, which the schema does not know."""
    line = {"messages": [{"role": "developer", "content": "a"}]}
    assert plain.read_plain(json.dumps(line).encode(), "line-1") is None
    assert request_of(line).messages == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00x"}',
        b'{"prompt": "a", "metadata": {"\\udfff": ""}}',
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\tb"}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": 1.0}',
        b'{"prompt": "a"} {}',
        b'{"prompt": "a",}',
        b'\xef\xbb\xbf{"prompt": "a"}',
    ],
)
def test_the_schema_takes_nothing_that_is_wrong(raw: bytes) -> None:
    """Bytes that the careful way refuses are refused by the schema, too."""
    assert isinstance(formats._careful_row(1, "line-1", raw), RowError)
    assert plain.read_plain(raw, "line-1") is None
