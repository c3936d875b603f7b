"""What a row gets for its answer: a reader, a guide, the grammar of a call; or nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.answers.reader import AnswerReader
from batchkv_worker.engine.answers.rows import Answers
from batchkv_worker.engine.answers.thinking import ThinkingGuide
from batchkv_worker.engine.answers.thoughts import State
from batchkv_worker.engine.tokens.guide import AllOf
from batchkv_worker.engine.tokens.outputs import text_of
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence
from support import tiny_models, tiny_tokenizers
from support.tool_texts import CALLS, WEATHER

SCHEMA = Constraint("json_object")


@cache
def loaded(kind: str) -> LoadedModel:
    return tiny_models.loaded_chat(tiny_models.build("llama"), kind)


def attached(
    kind: str, content: str = "x", params: SamplingParams | None = None, **changes: Any
) -> tuple[Sequence, Request]:
    """A chat row as the engine queues it, and its request after that."""
    messages = [{"role": "user", "content": content}]
    values = {"messages": messages, "params": params or SamplingParams(), **changes}
    request = Request("c", values.pop("endpoint", "chat"), **values)
    row = prepare(Work("b-1", request), loaded(kind))
    return row, Answers(loaded(kind)).attach(row, request)


def thought_state(kind: str, content: str = "x", **variables: Any) -> State:
    row, _ = attached(kind, content, constraint=SCHEMA, chat_template_kwargs=variables)
    assert isinstance(row.guide, ThinkingGuide)
    return row.guide._state


def test_rows_without_parts_get_nothing() -> None:
    """A model without markers, and a prompt that no template made."""
    row, request = attached("no_tools", constraint=SCHEMA)
    assert row.reader is None and row.guide is None and request.constraint is SCHEMA
    budget = SamplingParams(thinking_budget=5)
    raw, _ = attached("qwen3", params=budget, endpoint="completion", messages=None, prompt="x")
    assert raw.reader is None and raw.guide is None
    styled, _ = attached(
        "qwen3", params=budget, endpoint="completion", messages=None, prompt="x", style="auto"
    )
    assert styled.reader is not None and styled.guide is not None


def test_a_reader_knows_the_tools_that_it_was_shown() -> None:
    """Without tools, or with tools that must not be called, a call is text."""
    row, _ = attached("qwen3", tools=[WEATHER])
    assert isinstance(row.reader, AnswerReader) and row.reader.form.has_tool_calling
    for changes in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        row, _ = attached("qwen3", **changes)
        assert isinstance(row.reader, AnswerReader) and not row.reader.form.has_tool_calling
    row, _ = attached("mistral")
    assert row.reader is None  # nothing but text may be there


def test_markers_stay_in_the_text_that_is_divided() -> None:
    """Other special tokens have no text, and in rows without tools those of calls have none."""
    tokenizer = tiny_tokenizers.tokenizer("gemma4")

    def hidden(**changes: Any) -> set[str]:
        row, _ = attached("gemma4", **changes)
        return {tokenizer.decode([token]) for token in row.generation.hidden_tokens}

    assert hidden() == {"<|im_end|>", "<|im_start|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    assert hidden(tools=[WEATHER]) == {"<|im_end|>", "<|im_start|>"}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_read_from_visible_tokens(kind: str) -> None:
    """The text of a row's tokens, without those that are hidden, still has the whole call."""
    row, _ = attached(kind, tools=[WEATHER])
    tokenizer = tiny_tokenizers.tokenizer(kind)
    tokens = tokenizer.encode(CALLS[kind], add_special_tokens=False)
    text = text_of(tokens, tokenizer, row.generation.hidden_tokens)
    assert len(row.reader.read("b-1", text, tokens).tool_calls) == 1


def test_the_prompt_may_open_or_close_the_thought() -> None:
    """By its last marker, with white space after it; a user's text does not count."""
    assert thought_state("qwen3") is State.START
    assert thought_state("qwen3", enable_thinking=False) is State.ANSWER
    assert thought_state("deepseek_r1") is State.THOUGHT
    assert thought_state("qwen3", "What is <think>") is State.START
    assert thought_state("qwen3", "What is </think>") is State.START
    for kind, state in (("deepseek_r1", "reasoning"), ("qwen3", "normal")):
        row, _ = attached(kind, "<think>")
        assert isinstance(row.reader, AnswerReader) and row.reader.state == state


def test_only_rows_with_limits_have_a_guide() -> None:
    """A budget or a constraint, on a model that thinks."""
    assert attached("qwen3")[0].guide is None
    budget = SamplingParams(thinking_budget=5)
    assert isinstance(attached("qwen3", params=budget)[0].guide, ThinkingGuide)
    assert attached("mistral", params=budget)[0].guide is None


@pytest.mark.parametrize(("kind", "budget"), [("deepseek_r1", 0), ("gpt_oss", 0), ("qwen3", None)])
def test_no_thinking_where_the_template_cannot_see_to_it(kind: str, budget: int | None) -> None:
    """A template that ignores the variable would think on: the budget is 0 then."""
    row, _ = attached(kind, chat_template_kwargs={"enable_thinking": False})
    assert (row.guide is None) == (budget is None)
    assert row.guide is None or (isinstance(row.guide, ThinkingGuide) and row.guide._budget == 0)
    assert attached(kind, chat_template_kwargs={"enable_thinking": True})[0].guide is None


@pytest.mark.parametrize("kind", ["deepseek_r1", "gpt_oss", "qwen3"])
def test_no_effort_is_no_thought(kind: str) -> None:
    """For each template: also one that was told may let the model think."""
    guide = attached(kind, reasoning_effort="none")[0].guide
    assert isinstance(guide, ThinkingGuide) and guide._budget == 0


def test_another_guide_of_the_row_stays() -> None:
    """The thought's guide comes first, because it decides where a grammar begins."""
    request = Request(
        *("c", "chat", [{"role": "user", "content": "x"}]),
        params=SamplingParams(thinking_budget=3),
    )
    row = prepare(Work("b-1", request), loaded("qwen3"))
    other = row.guide = AllOf([])
    Answers(loaded("qwen3")).attach(row, request)
    assert isinstance(row.guide, AllOf) and isinstance(row.guide.guides[0], ThinkingGuide)
    assert row.guide.guides[1] is other


def test_a_call_that_has_to_be_made_is_a_constraint() -> None:
    """In the model's own way; where that cannot be forced the row is refused."""
    for choice in ("required", "function:get_weather"):
        row, request = attached("qwen3", tools=[WEATHER], tool_choice=choice)
        assert request.constraint is not None and request.constraint.kind == "grammar"
        assert "get_weather" in request.constraint.value and row.guide is not None
    _, request = attached("qwen3", tools=[WEATHER], tool_choice="none")
    assert request.constraint is None
    with pytest.raises(RowRefused, match="cannot be forced"):
        attached("no_parser", tools=[WEATHER], tool_choice="required")


def test_a_call_of_gpt_oss_needs_no_final_channel() -> None:
    """Its grammar has the header of the call; any other grammar is for the final channel."""
    call, _ = attached("gpt_oss", tools=[WEATHER], tool_choice="required")
    text, _ = attached("gpt_oss", constraint=SCHEMA)
    for row, is_led in ((call, False), (text, True)):
        assert isinstance(row.guide, ThinkingGuide)
        assert bool(row.guide._thoughts.answer) == is_led


def test_a_row_with_one_call_ends_after_it() -> None:
    """The end of the call is a stop string, beside those of the row."""
    params = SamplingParams(stop=("STOP",))
    row, _ = attached("qwen3", params=params, tools=[WEATHER], parallel_tool_calls=False)
    assert row.generation.stop == ("STOP", "</tool_call>") and row.detokenizer is not None
    assert isinstance(row.reader, AnswerReader) and row.reader.is_single
    row, _ = attached("mistral", tools=[WEATHER], parallel_tool_calls=False)
    assert row.generation.stop == ()  # such a call has no end
    row, _ = attached("qwen3", tools=[WEATHER])
    assert row.generation.stop == () and row.detokenizer is None


def test_a_model_that_is_not_wrapped_has_no_parts() -> None:
    """A tokenizer of another program: all is text."""
    plain = tiny_models.loaded(tiny_models.build("llama"))
    request = Request("c", "completion", prompt="1 2 3", constraint=SCHEMA)
    row = prepare(Work("b-1", replace(request, constraint=None)), plain)
    assert Answers(plain).attach(row, request) is request
    assert row.reader is None and row.guide is None
