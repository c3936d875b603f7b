"""Grammars of answers that have to be tool calls: they accept what each kind of model writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import pytest

from batchkv_producer.wire.job import FUNCTION
from batchkv_worker.engine.answers.answer_format import answer_format
from batchkv_worker.engine.answers.forced_calls import forced_call
from batchkv_worker.engine.answers.reader import AnswerReader
from batchkv_worker.engine.answers.tool_calls import TimeLimit
from batchkv_worker.engine.tokens.text_limits import RowRefused
from support import tiny_tokenizers
from support.tool_texts import CALLS, WEATHER

KINDS = [kind for kind in CALLS if kind != "muse_spark"]
TIME = {"type": "function", "function": {"name": "get_time"}}


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def grammar(
    kind: str, *tools: dict[str, Any], choice: str = "required", is_single: bool = False
) -> str:
    form = answer_format(tiny_tokenizers.tokenizer(kind))
    found = forced_call(list(tools), choice, form, is_single=is_single)
    assert found.kind == "grammar" and not found.fault()
    return str(found.value)


@cache
def inner_tokenizer(kind: str) -> Any:
    tokenizer = tiny_tokenizers.tokenizer(kind)
    return llguidance.LLTokenizer(
        tokenizer._tokenizer.backend_tokenizer.to_str(),
        n_vocab=len(tokenizer),
        eos_token=tokenizer.eos_token_id,
    )


def accepts(kind: str, lark: str, text: str) -> bool:
    """Whether the grammar allows each token of the text, and then the end."""
    tokenizer = tiny_tokenizers.tokenizer(kind)
    matcher = llguidance.LLMatcher(inner_tokenizer(kind), lark, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        mask = llguidance.numpy.allocate_token_bitmask(1, len(tokenizer))
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        if not mask.view(np.uint32)[0, token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        matcher.consume_token(token)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_way_is_accepted(kind: str) -> None:
    """The right call passes; another function, a wrong value and a plain text do not."""
    lark, text = grammar(kind, WEATHER, TIME), CALLS[kind]
    assert accepts(kind, lark, text)
    assert not accepts(kind, lark, text.replace("get_weather", "get_weathers"))
    assert not accepts(kind, lark, text.replace("2", "two"))
    assert not accepts(kind, lark, text.replace("city", "town"))
    assert not accepts(kind, lark, "It is sunny.")
    assert not accepts(kind, lark, text[: len(text) // 2])


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_or_several(kind: str) -> None:
    """A named function is called once; several calls may follow where the model's way has them."""
    named = grammar(kind, WEATHER, TIME, choice=f"{FUNCTION}get_weather")
    text = CALLS[kind]
    begin, finish = {
        "mistral_list": ("[TOOL_CALLS][", "]"),
        "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "kimi_k3": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        "pythonic": ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    }.get(kind, ("", ""))
    between = {"mistral_list": ", ", "pythonic": ", "}.get(kind, "\n")
    if kind in ("mistral", "kimi_k2", "kimi_k3", "minimax_m2", "function_gemma", "gemma4"):
        between = ""
    call = text.removeprefix(begin).removesuffix(finish)
    twice = begin + call + between + call + finish
    assert accepts(kind, named, text) and not accepts(kind, named, twice)
    assert accepts(kind, grammar(kind, WEATHER), twice) == (kind != "gpt_oss")
    assert not accepts(kind, grammar(kind, WEATHER, is_single=True), twice)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_accepted_is_parsed(kind: str) -> None:
    """Optional arguments may be left out, and a function without parameters has no arguments."""
    form, tokenizer = answer_format(tiny_tokenizers.tokenizer(kind)), None
    rows = AnswerReader(form, "normal", tokenizer, TimeLimit(60.0), [WEATHER, TIME])
    shorter = {
        '{"city": "Köln", "days": 2}': '{"city": "Köln"}',
        '(city="Köln", days=2)': '(city="Köln")',
        ",days:2}": "}",
        "<parameter=days>\n2\n</parameter>\n": "",
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n": "",
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n": "",
        '<parameter name="days">2</parameter>\n': "",
        '<param name="days">2</param>': "",
    }
    text = CALLS[kind]
    for long, short in shorter.items():
        text = text.replace(long, short)
    assert text != CALLS[kind] and accepts(kind, grammar(kind, WEATHER), text)
    (call,) = rows.read("b-1", text, []).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})


def test_values_of_every_type() -> None:
    """Each way of writing has texts as they are, and everything else as JSON."""
    schema = {
        "properties": {
            "text": {"type": "string"},
            "size": {"type": "string", "enum": ["s", "m<l"]},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "is_new": {"type": "boolean"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
            "place": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
        "$defs": {"tag": {"type": "string", "maxLength": 3}},
    }
    values = {"text": 'a <b> "c"\n}', "size": "m<l", "count": -3, "share": 0.5, "is_new": True}
    values |= {"tags": ["x", "abc"], "place": {"x": 1}}
    lark = grammar("qwen3_coder", tool(**schema))

    def written(**changes: Any) -> str:
        inside = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in (values | changes).items()
        )
        return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"

    assert accepts("qwen3_coder", lark, written())
    for wrong in ({"size": "xl"}, {"count": 0.5}, {"is_new": 1}, {"tags": ["abcd"]}):
        assert not accepts("qwen3_coder", lark, written(**wrong)), wrong
    form = answer_format(tiny_tokenizers.tokenizer("qwen3_coder"))
    rows = AnswerReader(form, "normal", None, TimeLimit(60.0), [tool(**schema)])
    (call,) = rows.read("b-1", written(), []).tool_calls
    assert json.loads(call.arguments) == values


def test_arguments_that_may_all_be_left_out() -> None:
    """Commas are only between those that are there."""
    lark = grammar("pythonic", tool(properties={key: {"type": "integer"} for key in "abc"}))
    call = "<|tool_call_start|>[f({})]<|tool_call_end|>"
    for arguments in ("", "a=1", "b=1", "c=1", "a=1, b=2", "a=1, c=3", "b=2, c=3", "a=1, b=2, c=3"):
        assert accepts("pythonic", lark, call.format(arguments)), arguments
    for arguments in (",", "a=1,", "b=1, a=2", "a=1 b=2", ", c=1"):
        assert not accepts("pythonic", lark, call.format(arguments)), arguments


def test_names_that_look_like_places() -> None:
    """A function or an argument may be called as what stands for names in the tables."""
    for name in ("INDEX", "NAME", "KEY", "a.b-c_D9"):
        lark = grammar("kimi_k2", tool(name, properties={name: {"type": "integer"}}))
        text = CALLS["kimi_k2"].replace("get_weather", name)
        head, _, tail = text.partition("{")
        assert accepts("kimi_k2", lark, f'{head}{{"{name}": 1}}{tail.partition("}")[2]}')


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("kind", "tools", "choice", "words"),
    [
        ("no_parser", [WEATHER], "required", "way to write tool calls cannot be forced"),
        ("muse_spark", [WEATHER], "required", "way to write tool calls cannot be forced"),
        ("qwen3", [WEATHER], f"{FUNCTION}get_time", "'get_time', which is not one of"),
        ("qwen3", [tool('f"\n</tool_call>')], "required", "because of its name"),
        ("qwen3", [tool("f" * 65)], "required", "because of its name"),
        ("pythonic", [tool("get-weather")], "required", "because of its name"),
        ("pythonic", [tool(properties={"a b": TEXT})], "required", "f.a b cannot be forced"),
        ("glm47", [tool(properties={"a</arg_key>": TEXT})], "required", "a plain name"),
        ("glm47", [tool(properties={"a": {"anyOf": []}})], "required", "one type"),
        ("glm47", [tool(properties={"a": True})], "required", "one type"),
        ("glm47", [tool(properties=["a"])], "required", "not those of an object"),
        ("glm47", [tool(properties={}, required=["a"])], "required", "not those of an object"),
        ("glm47", [tool(properties={}, required=[["a"]])], "required", "not those of an object"),
        ("glm47", [tool(properties={"a": {**TEXT, "pattern": "x"}})], "required", "pattern does"),
        ("glm47", [tool(properties={"a": {**TEXT, "enum": 3}})], "required", "the enum of f.a"),
        ("gemma4", [tool(properties={"a": {"type": "array"}})], "required", "type array"),
        ("qwen3", [{"function": {"name": "f", "parameters": 3}}], "required", "an object"),
        ("qwen3", [tool(description="x" * 70_000)], "required", "too large"),
    ],
)
def test_what_cannot_be_forced_is_refused(
    kind: str, tools: list[dict[str, Any]], choice: str, words: str
) -> None:
    """With a sentence that names the function and the argument."""
    with pytest.raises(RowRefused, match="tool_choice") as caught:
        grammar(kind, *tools, choice=choice)
    assert words in str(caught.value) and caught.value.code == "unsupported_parameter"
