"""Rows that ask for more: what they store, which workers they need, and that others are unchanged.

The recorded bytes and digests are those of the version before rows could ask for more.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest

from batchkv_producer.errors import WireError
from batchkv_producer.order.duplicates import request_digest
from batchkv_producer.wire import job
from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.constraint import MAX_CONSTRAINT_BYTES, Constraint
from batchkv_producer.wire.job import (
    FUNCTION_NAME,
    Request,
    Result,
    SamplingParams,
    Usage,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from batchkv_producer.wire.maker import ABILITIES, needs_of

TOOLS = [{"type": "function", "function": {"name": "f"}}]
OLD_REQUESTS = [
    (
        Request("a", "completion", prompt="Once é"),
        '{"custom_id":"a","endpoint":"completion","prompt":"Once é","params":{}}',
        "d6664b4caa456a8d5b8b89d0af717227",
    ),
    (
        Request(
            *("b", "completion"),
            prompt="x",
            style="auto",
            system="Be brief.",
            params=SamplingParams(7, 0.5, 0.9, 40, 0.05, None, 3, ("\n", "END"), 2),
        ),
        '{"custom_id":"b","endpoint":"completion","prompt":"x","style":"auto","system":"Be brief.",'
        '"params":{"max_tokens":7,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.05,"seed":3,'
        '"stop":["\\n","END"],"logprobs":2}}',
        "e3937a361d57f00376e7b8a970340390",
    ),
    (
        Request(
            *("c", "chat"),
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,
            chat_template_kwargs={"enable_thinking": False},
            params=SamplingParams(temperature=0),
        ),
        '{"custom_id":"c","endpoint":"chat","messages":[{"role":"user","content":"Hi"}],'
        '"tools":[{"type":"function","function":{"name":"f"}}],'
        '"chat_template_kwargs":{"enable_thinking":false},"params":{"temperature":0}}',
        "7ba13c8cf4fb048d0ec5599bda67cdf8",
    ),
]
OLD_RESULTS = [
    (
        Result(
            *("a", "chat", "ok", "m", "Hello", "stop", Usage(5, 2, 4), None),
            (TokenLogprob("Hello", -0.5, (("Hi", -1.5),)),),
            *("w", 1_700_000_000, 12, None, "ab" * 16, "affine8"),
        ),
        "8da16fa26f6ba163a161a165a463686174a16da16da174a548656c6c6fa166a473746f70a17593050204a177a1"
        "77a161ce6553f100a1620ca170d9206162616261626162616261626162616261626162616261626162616261"
        "626162a173a7616666696e6538a16c9193a548656c6c6fcbbfe00000000000009192a24869cbbff8000000000000",
    ),
    (
        Result("b", "completion", "failed", error=("timeout", "too long"), worker="w"),
        "85a16fa66661696c6564a163a162a165aa636f6d706c6574696f6ea17892a774696d656f7574a8746f6f206c6f"
        "6e67a177a177",
    ),
]
# Each field that a row may ask for, with the ability that it needs.
ASKED_PARAMS: list[tuple[str, Any, str]] = [
    ("repetition_penalty", 1.1, "fields"),
    ("presence_penalty", -2.0, "fields"),
    ("frequency_penalty", 0.5, "fields"),
    ("min_tokens", 3, "fields"),
    ("ignore_eos", True, "fields"),
    ("stop_token_ids", (5, 7), "fields"),
    ("include_stop", True, "fields"),
    ("skip_special_tokens", False, "fields"),
    ("return_token_ids", True, "fields"),
    ("logit_bias", ((5, -100.0), (7, 0.5)), "fields"),
    ("bad_words", ("no", "never ever"), "fields"),
    ("thinking_budget", 0, "thinking"),
    ("n", 128, "fields"),
]
PROMPT = Request("a", "completion", prompt="x")
CHAT = Request("a", "chat", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
ASKED: list[tuple[Request, tuple[str, ...]]] = [
    *(
        (replace(PROMPT, params=SamplingParams(**{name: value})), (need,))
        for name, value, need in ASKED_PARAMS
    ),
    (Request("a", "completion", prompt_tokens=[0, 5, 2**24 - 1]), ("fields",)),
    (replace(PROMPT, constraint=Constraint("json_object")), ("grammar",)),
    (replace(PROMPT, constraint=Constraint("json_schema", {"type": "object"})), ("grammar",)),
    (replace(PROMPT, constraint=Constraint("json_schema", True)), ("grammar",)),
    (replace(PROMPT, constraint=Constraint("regex", "[ab]+")), ("grammar",)),
    (replace(PROMPT, constraint=Constraint("choice", ["yes", "no"])), ("grammar",)),
    (replace(PROMPT, constraint=Constraint("grammar", 'start: "a"')), ("grammar",)),
    (replace(CHAT, tool_choice="none"), ("tools",)),
    (replace(CHAT, tool_choice="required"), ("grammar", "tools")),
    (replace(CHAT, tool_choice="function:f"), ("grammar", "tools")),
    (replace(CHAT, parallel_tool_calls=False), ("tools",)),
    (replace(PROMPT, reasoning_effort="high"), ("thinking",)),
    (replace(PROMPT, reasoning_effort="none"), ("thinking", "no-effort")),
    (replace(PROMPT, cache_salt="ab"), ("salt",)),
]


@pytest.mark.parametrize(("request_", "payload", "digest"), OLD_REQUESTS)
def test_a_row_that_asks_for_nothing_new_is_stored_as_before(
    request_: Request, payload: str, digest: str
) -> None:
    """Its job has the same bytes and its request the same digest as in earlier versions."""
    raw = zlib.decompress(encode_job(request_)).decode()
    assert raw == f'["{FUNCTION_NAME}",null,[{payload}],{{}}]'
    found = request_digest(request_)
    assert found is not None and found.hex() == digest


@pytest.mark.parametrize(("result", "stored"), OLD_RESULTS)
def test_a_result_without_new_facts_is_stored_as_before(result: Result, stored: str) -> None:
    """It has the same bytes as in earlier versions, and those of earlier versions decode."""
    assert zlib.decompress(encode_result(result)).hex() == stored
    old = decode_result(zlib.compress(bytes.fromhex(stored)))
    assert old == result
    assert old.choices == (Choice(old.text, old.finish_reason, old.logprobs),)


@pytest.mark.parametrize(("request_", "needs"), ASKED)
def test_what_a_row_asks_for_survives_and_needs_an_ability(
    request_: Request, needs: tuple[str, ...]
) -> None:
    """Each field is read back, is part of the digest, and is left to workers that know it."""
    assert decode_job(encode_job(request_)) == request_
    assert needs_of(request_) == needs and set(needs) <= set(ABILITIES)
    plain = CHAT if request_.messages else PROMPT
    assert request_digest(request_) != request_digest(plain)


def test_every_new_parameter_is_tried() -> None:
    """The parameters above are all that came after the first version, but for repetition's."""
    old = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs"}
    assert {item.name for item in fields(SamplingParams)} - old == {
        name for name, _, _ in ASKED_PARAMS
    }


NEW_FACTS = Result(
    *("a", "chat", "ok", "m", "", "tool_calls", Usage(5, 9, 4, 3)),
    reasoning="Hm.",
    tool_calls=(ToolCall("call_1", "f", '{"x":1}'),),
    token_ids=(),
    prompt_token_ids=(1, 2),
    more=(
        Choice("Hello", "stop", (TokenLogprob("Hello", -0.5),), token_ids=(7,)),
        Choice("", "length", None, "Well", (ToolCall("call_2", "g", "not json"),)),
    ),
)


def test_new_facts_of_a_result_survive() -> None:
    """Reasoning, calls, token ids and further choices are read back; an empty list is no None."""
    assert decode_result(encode_result(NEW_FACTS)) == NEW_FACTS
    first = NEW_FACTS.choices[0]
    assert (first.reasoning, first.tool_calls) == (NEW_FACTS.reasoning, NEW_FACTS.tool_calls)
    assert NEW_FACTS.choices[1:] == NEW_FACTS.more


def test_old_readers_find_the_first_choice_under_the_old_keys() -> None:
    """New facts have keys of their own, and the usage has three counts as ever."""
    packed = msgpack.unpackb(zlib.decompress(encode_result(NEW_FACTS)))
    assert packed["u"] == [5, 9, 4] and packed["f"] == "tool_calls" and "t" not in packed
    assert packed.keys() - set("ocemtfuxwabnpsl") == set("rkijdh")


@pytest.mark.parametrize(
    "constraint",
    [
        {"kind": "shell", "value": "x"},
        {"kind": "regex"},
        {"kind": "regex", "value": ""},
        {"kind": "regex", "value": "a", "flags": "i"},
        {"kind": "json_object", "value": {}},
        {"kind": "json_schema", "value": False},
        {"kind": "json_schema", "value": {"title": "x" * MAX_CONSTRAINT_BYTES}},
        {"kind": "choice", "value": []},
        {"kind": "choice", "value": ["a", ""]},
        {"kind": "choice", "value": ["a", "a"]},
        {"kind": ["regex"], "value": "x"},
        {},
    ],
)
def test_a_constraint_that_is_never_written_is_refused(constraint: dict[str, Any]) -> None:
    """An unknown kind, a value of another kind, and one that is too large are a WireError."""
    with pytest.raises(WireError, match="constraint"):
        decode_job(_job(constraint=constraint))


def test_blanks_between_values_do_not_count_as_bytes_of_a_schema() -> None:
    """A schema of 64 KiB, as it is in a line without blanks, is accepted; one byte more is not."""
    schema: dict[str, list[Any]] = {"enum": [0] * 32_761 + ["x"]}  # {"enum":[0,0, ... ,"x"]}
    assert len(json.dumps(schema, separators=(",", ":"))) == MAX_CONSTRAINT_BYTES
    assert not Constraint("json_schema", schema).fault()
    schema["enum"][-1] = "xx"
    assert "65537 bytes" in Constraint("json_schema", schema).fault()


@pytest.mark.parametrize(
    "payload",
    [
        {"prompt_tokens": [1]},  # and a prompt
        {"prompt": None, "prompt_tokens": []},
        {"prompt": None, "prompt_tokens": [-1]},
        {"prompt": None, "prompt_tokens": [True]},
        {"prompt": None, "prompt_tokens": [2**24]},
        {"tool_choice": "auto"},
        {"tool_choice": "function:"},
        {"tool_choice": "function:" + "x" * 300},
        {"parallel_tool_calls": True},
        {"reasoning_effort": "x" * 65},
        {"cache_salt": ""},
        {"cache_salt": "x" * 65},
        {"cache_salt": 1},
        {"params": {"ignore_eos": False}},
        {"params": {"ignore_eos": 1}},
        {"params": {"skip_special_tokens": True}},
        {"params": {"n": True}},
        {"params": {"stop_token_ids": ["a"]}},
        {"params": {"logit_bias": [[1]]}},
        {"params": {"logit_bias": [[1, "x"]]}},
        {"params": {"logit_bias": {"1": 1}}},
        {"params": {"bad_words": "no"}},
    ],
)
def test_values_that_are_never_written_are_refused(payload: dict[str, Any]) -> None:
    """A payload with a wrong new field is a WireError, never a row."""
    with pytest.raises(WireError):
        decode_job(_job(**payload))


def test_the_number_of_prompt_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More token ids than the limit are refused."""
    monkeypatch.setattr(job, "MAX_PROMPT_TOKENS", 3)
    decode_job(_job(prompt=None, prompt_tokens=[1, 2, 3]))
    with pytest.raises(WireError, match="1 to 3 token ids"):
        decode_job(_job(prompt=None, prompt_tokens=[1, 2, 3, 4]))


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed.update(k=[["id", "name"]]),
        lambda packed: packed.update(i=[-1]),
        lambda packed: packed.update(i="abc"),
        lambda packed: packed.update(j=[0.5]),
        lambda packed: packed.update(d=["text"]),
        lambda packed: packed.update(h="many"),
        lambda packed: packed.update(u=[1, 2, 3, 4]),
    ],
)
def test_a_stored_result_with_wrong_new_facts_is_a_wire_error(
    change: Callable[[dict[str, Any]], None],
) -> None:
    """A wrong shape under a new key is found when the result is read."""
    packed = msgpack.unpackb(zlib.decompress(encode_result(NEW_FACTS)))
    change(packed)
    with pytest.raises(WireError):
        decode_result(zlib.compress(msgpack.packb(packed)))


def _job(**changes: Any) -> bytes:
    payload = {"custom_id": "a", "endpoint": "completion", "prompt": "x", **changes}
    payload = {name: value for name, value in payload.items() if value is not None}
    return zlib.compress(json.dumps([FUNCTION_NAME, None, [payload], {}]).encode())
