"""Ledgers: the same everywhere, and with one answer to each question."""

from __future__ import annotations

import random

import pytest

from demo_model.batches import ANSWER_TOKENS, Level, draw_chat
from demo_model.ledger import (
    HEADING,
    QUESTION_FORMS,
    make_filler,
    make_ledger,
    prompt_messages,
    question,
)


def test_a_seed_names_one_ledger() -> None:
    """A seed gives the same ledger on every machine; these are its first lines."""
    ledger = make_ledger(1, 64)
    assert ledger == make_ledger(1, 64)
    assert ledger != make_ledger(2, 64)
    assert ledger.text.splitlines()[:3] == [
        HEADING,
        "- golden maple: 8474",
        "- scarlet lake: 4942",
    ]


@pytest.mark.parametrize("num_facts", [1, 4, 96, 500])
def test_every_question_has_one_answer(num_facts: int) -> None:
    """No key and no code occurs twice, and every code has four digits."""
    facts = make_ledger(7, num_facts).facts
    assert len({fact.key for fact in facts}) == len({fact.code for fact in facts}) == num_facts
    assert all(len(fact.code) == 4 and fact.code.isdecimal() for fact in facts)


def test_prompts_about_a_ledger_share_all_but_the_question() -> None:
    """The ledger comes first, so that questions about it have a common prefix."""
    ledger = make_ledger(3, 5)
    prompts = [prompt_messages(ledger, fact.key)[0]["content"] for fact in ledger.facts]
    assert all(prompt.startswith(ledger.text) for prompt in prompts)
    assert prompts[0].endswith(question(ledger.facts[0].key))


def test_filler_stands_before_the_ledger() -> None:
    """Filler moves the ledger away from the start, and is the same for the same seed."""
    ledger = make_ledger(3, 5)
    filler = make_filler(0, 6)
    assert filler == make_filler(0, 6) != make_filler(1, 6)
    content = prompt_messages(ledger, ledger.facts[0].key, filler=filler)[0]["content"]
    assert content.startswith(f"{filler}\n\n{HEADING}\n")


@pytest.mark.parametrize("form", range(len(QUESTION_FORMS)))
def test_a_question_names_its_key(form: int) -> None:
    """Every form of the question holds the key as the ledger spells it."""
    assert " amber falcon" in question("amber falcon", form)


def test_a_training_chat_answers_from_its_ledger() -> None:
    """Each answer in a training chat is the code that the ledger lists for the key asked."""
    level = Level(max_facts=12, num_tokens=512, batch_size=1, max_questions=8)
    chat = draw_chat(random.Random(0), level)
    answers = chat.split("<|assistant|>")[1:]
    asked = chat.split("<|assistant|>")[:-1]
    assert 1 <= len(answers) <= 8
    for before, answer in zip(asked, answers, strict=True):
        key = " ".join(before.removesuffix("<|end|>")[:-1].split()[-2:])
        assert f"- {key}: {answer[: ANSWER_TOKENS - 1]}" in chat
