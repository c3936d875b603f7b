"""Outputs as models of each kind write them: thought, tool calls and text, whatever goes wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from batchkv_worker.engine.answers.answer_format import AnswerFormat, answer_format
from batchkv_worker.engine.answers.reader import AnswerReader
from batchkv_worker.engine.answers.split import split
from batchkv_worker.engine.answers.tool_calls import MAX_CALL_CHARS, MAX_LATE, TimeLimit
from batchkv_worker.engine.tokens.outputs import Answer
from batchkv_worker.engine.tokens.text_stream import TextStream
from support import tiny_tokenizers
from support.tool_texts import CALLS, JSON_CALL, WEATHER


def reader(kind: str, state: str = "normal", **changes: Any) -> AnswerReader:
    tokenizer = tiny_tokenizers.tokenizer(kind)
    form = changes.pop("form", None) or answer_format(tokenizer)
    values = {"tools": [WEATHER], "limit": TimeLimit(60.0), **changes}
    return AnswerReader(form, state, tokenizer, **values)


def read(kind: str, text: str, state: str = "normal", **changes: Any) -> Answer:
    tokens = tiny_tokenizers.tokenizer(kind).encode(text, add_special_tokens=False)
    return reader(kind, state, **changes).read("b-1", text, tokens)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_of_each_kind_is_parsed(kind: str) -> None:
    """Its name and its arguments as JSON; no text is left. The id follows from the job."""
    answer = read(kind, CALLS[kind])
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln", "days": 2})
    assert (answer.text, answer.reasoning, answer.num_reasoning) == ("", "", 0)
    assert call == read(kind, CALLS[kind]).tool_calls[0]
    if kind != "kimi_k2":  # that one writes the id itself
        assert call.id != reader(kind).read("b-2", CALLS[kind], []).tool_calls[0].id


def test_ids_have_the_form_that_models_want_back() -> None:
    """Mistral's templates refuse other lengths, and Kimi's want their own."""
    assert read("qwen3", CALLS["qwen3"]).tool_calls[0].id.startswith("call_")
    assert len(read("mistral", CALLS["mistral"]).tool_calls[0].id) == 9
    assert read("kimi_k2", CALLS["kimi_k2"]).tool_calls[0].id == "functions.get_weather:0"


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt_oss"])
def test_several_calls_have_ids_of_their_own(kind: str) -> None:
    """Each call of an answer is there, in order; a row with one call at most has the first."""
    second = CALLS[kind].replace("Köln", "Rome")
    between = "<|call|><|start|>assistant" if kind == "gpt_oss" else "\n"
    answer = read(kind, CALLS[kind] + between + second)
    cities = [json.loads(call.arguments)["city"] for call in answer.tool_calls]
    assert cities == ["Köln", "Rome"] and len({call.id for call in answer.tool_calls}) == 2
    single = read(kind, CALLS[kind] + between + second, is_single=True)
    assert single.tool_calls == answer.tool_calls[:1]


# Kind -> a thought with its markers, and the part of it whose tokens count.
THOUGHTS = {
    "qwen3": ("<think>\nIt may rain.\n</think>\n\n", "\nIt may rain.\n"),
    "magistral": ("[THINK]It may rain.[/THINK]", "It may rain."),
    "gemma4": ("<|channel>thought\nIt may rain.<channel|>", "\nIt may rain."),
    "kimi_k3": ("<|open|>think<|sep|>It may rain.<|close|>think<|sep|>", "It may rain."),
    "gpt_oss": (
        "<|channel|>analysis<|message|>It may rain.<|end|><|start|>assistant",
        "It may rain.",
    ),
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_a_thought_is_apart_from_the_answer(kind: str) -> None:
    """The text has neither the thought nor white space beside its markers; its tokens count."""
    text, inside = THOUGHTS[kind]
    answers = {
        "gpt_oss": "<|channel|>final<|message|>Take a hat.",
        "kimi_k3": "<|open|>response<|sep|>Take a hat.<|close|>response<|sep|>",
    }
    answer = read(kind, text + answers.get(kind, "Take a hat."))
    assert (answer.text, answer.reasoning) == ("Take a hat.", "It may rain.")
    assert answer.num_reasoning == len(inside)  # a token is a byte
    assert answer.tool_calls == ()


@pytest.mark.parametrize("kind", sorted(THOUGHTS.keys() & CALLS.keys()))
def test_a_call_after_a_thought(kind: str) -> None:
    """Both are found."""
    answer = read(kind, THOUGHTS[kind][0] + CALLS[kind])
    assert (answer.text, answer.reasoning) == ("", "It may rain.")
    assert [call.name for call in answer.tool_calls] == ["get_weather"]


def test_words_beside_a_call_are_the_text() -> None:
    """A model may say something before and after its call."""
    answer = read("qwen3", f"I look it up.\n{CALLS['qwen3']}\nOne moment.")
    assert answer.text == "I look it up.\n\nOne moment." and len(answer.tool_calls) == 1
    said = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    answer = read("gpt_oss", said + CALLS["gpt_oss"])
    assert answer.text == "I look it up." and len(answer.tool_calls) == 1


def test_white_space_of_a_form_is_kept() -> None:
    """An answer that had to match something still matches: only blank lines before it go.

    A marker in it is a text like any other.
    """
    odd = '  {"a": "<think>x</think><tool_call>"} \n'
    for start, state in (("<think>Hm.</think>\n\n", "normal"), ("Hm.</think>", "reasoning")):
        answer = read("qwen3", start + odd, state, is_exact=True)
        assert (answer.text, answer.reasoning, answer.num_reasoning) == (odd, "Hm.", 3)
    assert read("qwen3", odd, is_exact=True) == Answer(odd)
    assert read("qwen3", "Hm", "reasoning", is_exact=True) == Answer("", "Hm", (), 2)
    thought = "<|channel|>analysis<|message|> Hm. <|end|><|start|>assistant"
    final = f"{thought}<|channel|>final<|message|> yes \n"
    answer = read("gpt_oss", final, is_exact=True)
    assert (answer.text, answer.reasoning) == (" yes \n", "Hm.")
    assert read("gpt_oss", final).text == "yes"


def test_a_thought_that_the_prompt_opened() -> None:
    """The output begins within it, and has no opening marker."""
    answer = read("qwen3", "Hm.\n</think>\n\nYes.", state="reasoning")
    assert answer == Answer("Yes.", "Hm.", (), 4)
    assert read("qwen3", "Hm", state="reasoning") == Answer("", "Hm", (), 2)  # it was cut off


def test_a_thought_that_ends_in_a_call() -> None:
    """The call ends the thought, as in mlx-lm's server; its tokens are none of the thought."""
    answer = read("qwen3", f"<think>Hm.{CALLS['qwen3']}")
    assert (answer.text, answer.reasoning, answer.num_reasoning) == ("", "Hm.", 3)
    assert len(answer.tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    ["", "  Hello \n", "1 < 2", "a <thin line", " </think> alone", "<tool_cal", "<|im_start|>x"],
)
def test_a_text_without_parts_stays_as_it_is(text: str) -> None:
    """Also white space at its ends, and markers that mark nothing there."""
    assert read("qwen3", text) == Answer(text)


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>',  # no JSON
        '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>',  # not one of the row's
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "no json"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"days": NaN}}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        f"<tool_call>{'[' * 3000}</tool_call>",
        "<tool_call></tool_call>",
        f"{CALLS['qwen3']}<tool_call>nonsense</tool_call>",  # one of two
        '<tool_call>{"name": "get_weather"',  # cut off
    ],
)
def test_what_is_no_call_stays_text(call: str) -> None:
    """Exactly as the model wrote it; the thought before it is still apart."""
    answer = read("qwen3", f"<think>Hm.</think>\nHere: {call}")
    assert answer == Answer(f"Here: {call}", "Hm.", (), 3)


def test_arguments_may_have_other_names() -> None:
    """Some models write ``parameters``, arguments as a text, or none at all."""
    for written, expected in (
        ('"parameters": {"city": "Rome"}', {"city": "Rome"}),
        ('"arguments": "{\\"city\\": \\"Rome\\"}"', {"city": "Rome"}),
        ('"arguments": null', {}),
    ):
        text = f'<tool_call>{{"name": "get_weather", {written}}}</tool_call>'
        (call,) = read("qwen3", text).tool_calls
        assert json.loads(call.arguments) == expected


class Panic(BaseException):
    """As native code raises it."""


def faulty(fault: BaseException) -> AnswerFormat:
    def parse(text: str, tools: Any) -> Any:
        raise fault

    return replace(answer_format(tiny_tokenizers.tokenizer("qwen3")), parser=parse)


@pytest.mark.parametrize("fault", [ValueError("x"), KeyError("x"), Panic("x"), MemoryError("x")])
def test_any_fault_of_a_parser_leaves_text(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is no ``Exception``. The log names it, without its message."""
    fault.args = ("secret",)
    caplog.set_level("DEBUG", "batchkv.engine")
    assert read("qwen3", CALLS["qwen3"], form=faulty(fault)) == Answer(CALLS["qwen3"])
    (record,) = caplog.records
    assert "b-1" in record.getMessage() and type(fault).__name__ in record.getMessage()
    assert "secret" not in record.getMessage()


def test_a_parser_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The row waits a moment and keeps its text. Rows beside it are parsed, until too many hang."""
    release, form = Event(), answer_format(tiny_tokenizers.tokenizer("qwen3"))
    assert form.parser is not None
    parse, asked = form.parser, []

    def slow(text: str, tools: Any) -> Any:
        if "Rome" in text:
            asked.append(text)
            release.wait(60)
        return parse(text, tools)

    limit = TimeLimit()
    rows, good = reader("qwen3", form=replace(form, parser=slow), limit=limit), CALLS["qwen3"]
    bad = good.replace("Köln", "Rome")
    try:
        for number in range(MAX_LATE):
            limit._seconds = 60.0  # however slow this machine is
            assert len(rows.read("b-1", good, []).tool_calls) == 1
            limit._seconds = 0.02
            assert rows.read(f"b-{number}", bad, []) == Answer(bad)
        assert rows.read("b-8", good, []) == Answer(good) and rows.read("b-9", bad, []).text == bad
        assert len(asked) == len(caplog.records) == MAX_LATE
    finally:
        release.set()
    for thread in limit._late:
        thread.join(60)
    limit._seconds = 60.0
    assert len(rows.read("b-9", good, []).tool_calls) == 1


def test_large_calls_stay_text() -> None:
    """More than 64 KiB of calls are not parsed, as one call or as many."""
    text = CALLS["qwen3"].replace("Köln", "x" * MAX_CALL_CHARS)
    assert read("qwen3", text) == Answer(text)
    many = CALLS["qwen3"] * (MAX_CALL_CHARS // len(JSON_CALL) + 1)
    assert read("qwen3", many) == Answer(many)
    within = CALLS["qwen3"].replace("Köln", "x" * (MAX_CALL_CHARS - 100))
    assert len(read("qwen3", within).tool_calls) == 1


def test_a_thought_of_a_megabyte_is_divided() -> None:
    """The markers are searched, and nothing else is done with each character."""
    thought = "It may < rain. " * 70_000
    parts = split(f"<think>{thought}</think>Yes.", reader("qwen3").form, "normal")
    assert (parts.text, parts.reasoning) == ("Yes.", thought.strip())
    many = split("<think>a</think>" * 1_000, reader("qwen3").form, "normal")
    assert many.reasoning.count("a") == 1_000 and many.text == ""


def test_a_row_that_may_not_call_keeps_the_markers() -> None:
    """Without tools nothing is a call, in no kind of model."""
    for kind, text in CALLS.items():
        form = answer_format(tiny_tokenizers.tokenizer(kind)).without_calls()
        answer = read(kind, text, form=form)
        assert answer.tool_calls == () and "Köln" in answer.text, kind


def test_nested_arguments_and_odd_texts() -> None:
    """Braces, quotes, markers of other kinds and deep objects come through."""
    value = {"a": {"b": [{"c": '}"</x> \\ \n é 😀'}]}}
    text = json.dumps({"name": "get_weather", "arguments": value})
    (call,) = read("qwen3", f"<tool_call>{text}</tool_call>").tool_calls
    assert json.loads(call.arguments) == value
    (call,) = read("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(value)}").tool_calls
    assert json.loads(call.arguments) == value


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        ("Just a text.", "Just a text.", ""),
        ("<|channel|>final<|message|>Yes.", "Yes.", ""),
        ("<|channel|>analysis<|message|>Hm", "", "Hm"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", "", "Hm."),
        ("<|channel|>analysis to=python <|constrain|>code<|message|>1+1<|call|>", "", "1+1"),
        (
            "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>B.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            *("Yes.", "A.\n\nB."),
        ),
        (" to=functions.get_weather<|channel|>commentary json<|message|>{", "{", ""),
    ],
)
def test_messages_of_gpt_oss(text: str, answer: str, reasoning: str) -> None:
    """Each channel goes where it belongs; a header that is cut off is no text."""
    found = read("gpt_oss", text)
    assert (found.text, found.reasoning, found.tool_calls) == (answer, reasoning, ())


def test_headers_of_muse_spark_are_no_text() -> None:
    """Its response format has states of its own, which mlx-lm's machine knows."""
    edges = {
        "header": [("to=self<|message|>", "reasoning"), ("to=user<|message|>", "normal")],
        "reasoning": [("<|eom|>", "header")],
        "normal": [("<|eom|>", "header"), ("<|eot|>", "normal")],
    }
    edges["header"].append(("<atem:function_calls>", "tool"))
    form = answer_format(tiny_tokenizers.tokenizer("muse_spark"))
    form = replace(form, response_transitions=edges, initial_state="header")
    text = " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>"
    for one in (form, form.without_calls()):
        answer = read("muse_spark", text, state="header", form=one)
        assert (answer.text, answer.reasoning, answer.num_reasoning) == ("Yes.", "Hm.", 3)
    call = f" to=get_weather<|message|>{CALLS['muse_spark']}"
    assert len(read("muse_spark", call, state="header", form=form).tool_calls) == 1


@pytest.mark.parametrize("has_call", [False, True])
@pytest.mark.parametrize("kind", THOUGHTS)
def test_pieces_are_how_thought_and_text_begin(kind: str, has_call: bool) -> None:
    """Of an output that grows the thought comes first, then the text, without markers and calls."""
    final = "<|channel|>final<|message|>" if kind == "gpt_oss" else ""
    text = THOUGHTS[kind][0] + final + "Take coats, or <b>stay</b>."
    if has_call:
        text += ("<|end|><|start|>assistant" if kind == "gpt_oss" else "") + CALLS.get(kind, "")
    parts = [*re.findall(r"<\|[a-z]+\|>|.", text, re.DOTALL)]  # a marker of gpt-oss is one token
    reading = reader(kind)
    stream = TextStream(reading.ends, reading.certain, has_thought=True)
    sent: list[tuple[str, bool]] = []
    for number in range(1, len(parts) + 1):
        so_far = SimpleNamespace(text="".join(parts[:number]))
        sent += stream.next(SimpleNamespace(detokenizer=so_far))  # type: ignore[arg-type]
    answer = read(kind, text)
    thought = "".join(piece for piece, is_thought in sent if is_thought)
    said = "".join(piece for piece, is_thought in sent if not is_thought)
    assert thought == answer.reasoning == "It may rain."
    assert len(said) > 20 and answer.text.startswith(said)
    assert [is_thought for _, is_thought in sent] == sorted(
        (is_thought for _, is_thought in sent), reverse=True
    )
    assert bool(answer.tool_calls) == (has_call and kind in CALLS)
