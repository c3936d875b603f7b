"""The second stage of training: its chats are those that a client's requests become."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="needs the worker's packages")

from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from batchkv_worker.demo import MODEL_PATH
from demo_model.finetune import SHAPES, Scores, Shape, draw_lesson
from demo_model.skill_cases import SKILLS, draw_skill_cases, tool_spec
from demo_model.skills import Part, Tool, draw_skills, ledger_chat, reading_chat, tool_chat
from demo_model.tokenizer import END, MARKERS

QUESTION = [{"role": "user", "content": "Hi"}]
OPENED = "<|user|>Hi<|end|><|assistant|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped tokenizer as mlx-lm loads it."""
    return load_tokenizer(MODEL_PATH)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """A prompt as text."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return str(text)


def test_markers_are_single_tokens_that_stay_in_the_text(tokenizer: Any) -> None:
    """Markers of thoughts and calls are tokens of their own, and no special tokens."""
    text = "".join(MARKERS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(MARKERS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_mlx_lm_finds_the_markers(tokenizer: Any) -> None:
    """mlx-lm reads off the template and the tokens how the model thinks and calls."""
    assert (tokenizer.think_start, tokenizer.think_end) == ("<think>", "</think>")
    assert (tokenizer.tool_call_start, tokenizer.tool_call_end) == ("<tool_call>", "</tool_call>")
    call = Tool("find_code", "code", "key").call("amber falcon")
    body = call.removeprefix("<tool_call>").removesuffix("</tool_call>")
    found = tokenizer.tool_parser(body, [])
    assert found == {"name": "find_code", "arguments": {"key": "the amber falcon"}}


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({}, ""),
        ({"enable_thinking": True}, ""),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "low"}, "<think>\n"),
        ({"thinking_budget": 20}, "<think>\n"),
        ({"thinking_budget": 0}, "<think>\n\n</think>\n\n"),
    ],
)
def test_a_prompt_opens_or_closes_a_thought(
    tokenizer: Any, options: dict[str, Any], tail: str
) -> None:
    """Without an option the model decides; an effort or a budget opens a thought."""
    assert rendered(tokenizer, QUESTION, **options) == OPENED + tail


@pytest.mark.parametrize("is_text", [False, True])
def test_calls_of_earlier_turns_are_rendered_as_the_model_writes_them(
    tokenizer: Any, is_text: bool
) -> None:
    """Arguments may be an object or OpenAI's text; two calls follow the turn's text."""
    tool, arguments = Tool("find_code", "code", "key"), {"key": "the amber falcon"}
    function = {"name": tool.name, "arguments": json.dumps(arguments) if is_text else arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call, call]}
    written = tool.call("amber falcon")
    expected = f"{OPENED}I look.\n{written}\n{written}<|end|><|assistant|>"
    assert rendered(tokenizer, [*QUESTION, turn]) == expected


def test_a_lesson_about_tools_is_what_the_template_writes(tokenizer: Any) -> None:
    """Tools, a call and a result have the same text in training and in a request."""
    (case,) = draw_skill_cases("an answer from a tool's result", 1)
    text = rendered(tokenizer, case.messages, **case.options)
    tool = Tool("find_code", "code", "key")
    assert text.startswith(f"<|system|>Tools:\n{json.dumps(tool_spec(tool))}<|end|><|user|>What")
    calls = [part for part in tool_chat(random.Random(1), 12) if part.skill == "call"]
    assert calls and all(part.text.startswith('<tool_call>\n{"name": "') for part in calls)


@pytest.mark.parametrize("draw", [ledger_chat, reading_chat, tool_chat])
def test_parts_are_cut_between_tokens(draw: Any) -> None:
    """A chat has the same tokens as a whole and part by part, and each learned part ends a turn."""
    encoder = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    for seed in range(20):
        parts: list[Part] = draw(random.Random(seed), 12)
        ids = [encoder.encode(part.text, add_special_tokens=False).ids for part in parts]
        whole = "".join(part.text for part in parts)
        together = encoder.encode(whole, add_special_tokens=False).ids
        assert [token for piece in ids for token in piece] == together
        assert all(part.text.endswith(END) for part in parts if part.skill)


def test_a_lesson_marks_what_is_learned_and_nothing_else() -> None:
    """Behind each marked place is a token of a learned part; the places of an answer spell it."""
    encoder = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    shape = Shape(num_tokens=400, batch_size=1, max_facts=6, share=1.0)
    lesson = draw_lesson(encoder, shape, "seed")
    parts = draw_skills(random.Random("seed"), shape.max_facts)
    learned = [part for part in parts if part.skill][: len(lesson.skills)]
    for number, (part, skill) in enumerate(zip(learned, lesson.skills, strict=True)):
        targets = lesson.tokens.reshape(-1)[lesson.places[lesson.answers == number] + 1]
        assert encoder.decode(targets.tolist(), skip_special_tokens=False) == part.text
        assert part.skill == skill
    again = draw_lesson(encoder, shape, "seed")
    assert np.array_equal(again.tokens, lesson.tokens)
    assert sum(each.share for each in SHAPES) == pytest.approx(1.0)


def test_a_score_counts_whole_answers() -> None:
    """One wrong token makes its answer wrong, and no other one."""
    encoder = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    lesson = draw_lesson(encoder, Shape(400, 1, 6, 1.0), "seed")
    right = np.ones(len(lesson.places), dtype=bool)
    right[0] = False
    scores, all_right = Scores(), Scores()
    scores.record(lesson, right)
    all_right.record(lesson, np.ones_like(right))
    wrong = {skill for skill in lesson.skills if scores.report()[skill] < all_right.report()[skill]}
    assert wrong == {lesson.skills[0]}


def test_every_skill_has_cases_with_one_answer() -> None:
    """The same seed draws the same questions; the answer is never part of the question alone."""
    for skill in SKILLS:
        first, again = (list(draw_skill_cases(skill, 3)) for _ in range(2))
        assert first == again and all(case.answer for case in first)
