"""The wire types: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rq.serializers import JSONSerializer

from batchkv_producer.errors import WireError
from batchkv_producer.wire import job
from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.choice import Choice, ToolCall
from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import (
    FUNCTION_NAME,
    Request,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, 2**40)
numbers = st.floats(0, 100, allow_nan=False)
ids = st.integers(0, 2**24 - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.none() | numbers,
    top_p=st.none() | numbers,
    top_k=st.none() | st.integers(0, 2**31 - 1),
    min_p=st.none() | numbers,
    repetition_penalty=st.none() | numbers,
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(text, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    presence_penalty=st.none() | numbers,
    frequency_penalty=st.none() | numbers,
    min_tokens=st.none() | st.integers(1, 2**31 - 1),
    ignore_eos=st.none() | st.just(True),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    include_stop=st.none() | st.just(True),
    skip_special_tokens=st.none() | st.just(False),
    return_token_ids=st.none() | st.just(True),
    logit_bias=st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
    bad_words=st.lists(text, max_size=3).map(tuple),
    thinking_budget=st.none() | st.integers(0, 2**31 - 1),
    n=st.none() | st.integers(2, 128),
)
constraints = st.one_of(
    st.none(),
    st.just(Constraint("json_object")),
    st.builds(Constraint, st.just("json_schema"), st.dictionaries(text, text, max_size=2)),
    st.builds(Constraint, st.sampled_from(["regex", "grammar"]), text.filter(bool)),
    st.builds(Constraint, st.just("choice"), st.lists(text.filter(bool), min_size=1, unique=True)),
)
messages = st.lists(st.fixed_dictionaries({"role": text, "content": text}), min_size=1, max_size=3)
requests = (
    st.builds(
        Request, text, st.just("completion"), prompt=text, params=params, constraint=constraints
    )
    | st.builds(
        Request,
        text,
        st.just("completion"),
        prompt_tokens=st.lists(ids, min_size=1, max_size=5),
        params=params,
    )
    | st.builds(
        Request,
        text,
        st.just("chat"),
        messages=messages,
        tools=st.none() | st.just([{"type": "function", "function": {"name": "f"}}]),
        chat_template_kwargs=st.dictionaries(text, st.booleans(), max_size=2),
        params=params,
        constraint=constraints,
        tool_choice=st.sampled_from([None, "none", "required", "function:f"]),
        parallel_tool_calls=st.sampled_from([None, False]),
        reasoning_effort=st.none() | text,
        cache_salt=st.none() | text.filter(bool),
    )
)
logprobs = st.floats(max_value=0, allow_nan=False)
tokens = st.builds(
    TokenLogprob, text, logprobs, st.lists(st.tuples(text, logprobs), max_size=2).map(tuple)
)
token_ids = st.none() | st.lists(ids, max_size=3).map(tuple)
calls = st.lists(st.builds(ToolCall, text, text, text), max_size=2).map(tuple)
choices = st.builds(
    Choice,
    text=text,
    finish_reason=text,
    logprobs=st.none() | st.lists(tokens, max_size=2).map(tuple),
    reasoning=text,
    tool_calls=calls,
    token_ids=token_ids,
)
results = st.builds(
    Result,
    custom_id=text,
    endpoint=st.sampled_from(["chat", "completion"]),
    outcome=st.sampled_from(["ok", "failed", "canceled"]),
    model=text,
    text=text,
    finish_reason=text,
    usage=st.builds(Usage, counts, counts, counts, counts),
    error=st.none() | st.tuples(text, text),
    logprobs=st.none() | st.lists(tokens, max_size=3).map(tuple),
    worker=text,
    created=counts,
    busy_ms=counts,
    reasoning=text,
    tool_calls=calls,
    token_ids=token_ids,
    prompt_token_ids=token_ids,
    more=st.lists(choices, max_size=2).map(tuple),
)


@given(requests)
def test_a_job_is_read_back_as_it_was_written(request: Request) -> None:
    """Every request survives the wire unchanged."""
    assert decode_job(encode_job(request)) == request


def test_half_of_a_surrogate_pair_survives_the_wire() -> None:
    """A stop string from a command line can hold a byte that is no text."""
    request = Request("a", "completion", prompt="é", params=SamplingParams(stop=("\udce9",)))
    assert decode_job(encode_job(request)) == request


@given(results)
def test_a_result_is_read_back_as_it_was_written(result: Result) -> None:
    """Every result survives the wire unchanged."""
    assert decode_result(encode_result(result)) == result


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_wire_error(data: bytes) -> None:
    """Bytes that batchkv did not write end in one kind of error, compressed or not."""
    for raw in (data, zlib.compress(data)):
        with pytest.raises(WireError):
            decode_job(raw)
        with pytest.raises(WireError):
            decode_result(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: (
        st.floats() | st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("custom_id", "endpoint", "messages", "prompt", "params", "tools"),
                *("prompt_tokens", "constraint", "tool_choice", "parallel_tool_calls"),
                "cache_salt",
            ]
        ),
        json_values,
    )
)
def test_a_payload_of_wrong_types_is_a_wire_error_or_a_request(payload: dict[str, Any]) -> None:
    """A payload that is JSON, but not ours, never raises anything else."""
    data = zlib.compress(json.dumps([FUNCTION_NAME, None, [payload], {}]).encode())
    with suppress(WireError):
        assert isinstance(decode_job(data), Request)


@given(st.dictionaries(st.sampled_from("oceemtfuxwablrkijdh"), json_values))
def test_a_stored_map_of_wrong_types_is_a_wire_error_or_a_result(packed: dict[str, Any]) -> None:
    """A stored map that is msgpack, but not ours, never raises anything else."""
    try:
        data = zlib.compress(msgpack.packb(packed))
    except OverflowError:  # an integer that msgpack cannot hold
        return
    with suppress(WireError):
        result = decode_result(data)
        assert result.outcome in ("ok", "failed", "canceled")
        assert result.endpoint in ("chat", "completion")


def test_rq_reads_the_job_as_a_call() -> None:
    """The bytes are what RQ's JSON serializer writes for a call, so that its tools can show it."""
    data = encode_job(Request("a", "completion", prompt="hi"))
    payload = {"custom_id": "a", "endpoint": "completion", "prompt": "hi", "params": {}}
    assert JSONSerializer.loads(zlib.decompress(data)) == [FUNCTION_NAME, None, [payload], {}]


@pytest.mark.parametrize(
    "call",
    [
        ["os.system", None, ["true"], {}],
        [FUNCTION_NAME, "instance", [{}], {}],
        [FUNCTION_NAME, None, [{}, {}], {}],
        [FUNCTION_NAME, None, [{}], {"key": 1}],
        [FUNCTION_NAME, None, [{"custom_id": "a", "endpoint": "chat", "evil": 1}], {}],
        [FUNCTION_NAME, None, [{"custom_id": "a", "endpoint": "shell", "prompt": "x"}], {}],
        [FUNCTION_NAME, None, [{"custom_id": "a", "endpoint": "chat"}], {}],
        {"not": "a call"},
    ],
)
def test_other_calls_are_refused(call: Any) -> None:
    """One function name, one argument, known fields: anything else is refused."""
    with pytest.raises(WireError):
        decode_job(zlib.compress(json.dumps(call).encode()))


def test_decompression_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small value that decompresses to a large one is refused, not unpacked."""
    monkeypatch.setattr(job, "MAX_JOB_BYTES", 1000)
    monkeypatch.setattr(job, "MAX_RESULT_BYTES", 1000)
    bomb = zlib.compress(b" " * 100_000)
    with pytest.raises(WireError, match="larger than 1000 bytes"):
        decode_job(bomb)
    with pytest.raises(WireError, match="larger than 1000 bytes"):
        decode_result(bomb)


def test_a_value_that_is_cut_short_is_refused() -> None:
    """A torn value is not taken for a shorter one."""
    with pytest.raises(WireError, match="cut short"):
        decode_job(encode_job(Request("a", "completion", prompt="hi" * 100))[:-10])


def test_a_result_of_ordinary_text_is_small() -> None:
    """A finished row with a thousand characters of text takes less than 750 bytes."""
    words = (
        "The committee met in the spring to discuss how the old bridge over the river should be "
        "repaired, and whether the money that had been set aside for it years ago would still be "
        "enough. Nobody had expected the engineer to bring photographs. They showed cracks along "
        "the northern arch, some of them wide enough to hold a coin, and a long stain where water "
        "had found its way through the joints. After an hour of questions the chairman proposed "
        "to close the road until July. Two members objected: the market depended on the carts "
        "that crossed each morning, and the detour through the valley took most of a day. In the "
        "end they agreed to let people pass on foot, to hire a mason from the next county, and "
        "to meet again when he had seen the foundations. The minutes do not say who paid for the "
        "photographs, though a later note mentions a gift from the school, whose pupils had "
        "drawn the bridge for an exhibition in the town hall that winter, before the floods came "
        "and took the northern arch and the mill away."
    )
    result = Result(
        "request-1",
        "chat",
        "ok",
        "some/model",
        words[:1000],
        "stop",
        Usage(500, 200, 256),
        worker="mac-1",
        created=1_700_000_000,
        busy_ms=5000,
    )
    assert len(words) >= 1000 and len(encode_result(result)) < 700


def test_a_result_names_the_tiers_of_its_blocks() -> None:
    """They come back as they were stored. Older readers, which know eight values of a note, read
    the rest. A tier costs few bytes, and a wrong count is a WireError."""
    note = CacheNote(b"n" * 16, 40, 2, 7, "", b"k" * 32, b"p" * 32, b"m" * 256)
    old = Result("a", "chat", "ok", text="words " * 99, note=note)
    new = replace(old, note=replace(note, tiers=(("disk", 5), ("redis", 2))))
    assert decode_result(encode_result(new)) == new
    assert len(encode_result(new)) - len(encode_result(old)) < 24
    stored = msgpack.unpackb(zlib.decompress(encode_result(new)))
    assert len(stored["n"]) == 8 and stored["g"] == {"disk": 5, "redis": 2}
    for wrong in ({"disk": -1}, {"disk": "x"}, [1], 7):
        with pytest.raises(WireError):
            decode_result(zlib.compress(msgpack.packb({**stored, "g": wrong})))
