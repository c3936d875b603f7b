"""What a row hands to the chat template, and the rows that a template cannot serve."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.tokens.template_options import template_options
from batchkv_worker.engine.tokens.text_limits import RowRefused
from support import tiny_tokenizers
from support.tool_texts import WEATHER


class Tokenizer:
    """Has a template that reads all that rows may set."""

    chat_template = "{{ tools }}{{ thinking_budget }}{{ reasoning_effort }}"


def options(tokenizer: Any, budget: int | None = None, **changes: Any) -> dict[str, Any]:
    params = SamplingParams(thinking_budget=budget)
    messages = [{"role": "user", "content": "x"}]
    return template_options(
        Request("c", "chat", messages=messages, params=params, **changes), tokenizer
    )


def test_a_template_gets_what_it_reads() -> None:
    """Tools, the budget and the effort; a variable that the row sets itself stays."""
    found = options(Tokenizer(), 7, tools=[WEATHER], reasoning_effort="low")
    assert found == {
        **{"add_generation_prompt": True, "tools": [WEATHER]},
        **{"thinking_budget": 7, "reasoning_effort": "low"},
    }
    own = {"thinking_budget": 9, "enable_thinking": False}
    assert options(Tokenizer(), 7, chat_template_kwargs=own) == {
        **{"add_generation_prompt": True, "thinking_budget": 9, "enable_thinking": False}
    }
    assert options(Tokenizer()) == {"add_generation_prompt": True}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ reasoning_effort }}", {}),
        ("{{ reasoning_effort if builtin is not none }}", {}),
        ("{% if reasoning_effort == 'none' %}0{% endif %}", {"reasoning_effort": "none"}),
        ("{{ reasoning_effort in ['none', 'low'] }}", {"reasoning_effort": "none"}),
        ("{{ tool_choice == 'none' }}{{ reasoning_effort == 'low' }}", {}),
        ("{# 'none' #}{{ reasoning_effort }}{{ enable_thinking }}", {"enable_thinking": False}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", {"enable_thinking": False}),
        ("{{ thinking_budget }}", {"thinking_budget": 0}),
        ("", {}),
    ],
)
def test_no_effort_is_told_in_the_way_that_a_template_knows(
    source: str, told: dict[str, Any]
) -> None:
    """A template that knows no such word would think because of it. None refuses the row."""
    tokenizer = Tokenizer()
    tokenizer.chat_template = source
    assert options(tokenizer, reasoning_effort="none") == {"add_generation_prompt": True, **told}


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    """A model cannot call what it does not see."""
    assert "tools" not in options(Tokenizer(), tools=[WEATHER], tool_choice="none")
    for choice in (None, "required", "function:get_weather"):
        assert "tools" in options(Tokenizer(), tools=[WEATHER], tool_choice=choice)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": [WEATHER]}, "tools: this model's chat template does not show tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort: this model's chat template does not read"),
    ],
)
def test_what_a_template_ignores_is_refused(changes: dict[str, Any], words: str) -> None:
    """The row would be served as if it had not asked. The engine counts a budget itself."""
    tokenizer = tiny_tokenizers.tokenizer("no_tools")
    with pytest.raises(RowRefused, match=words) as caught:
        options(tokenizer, **changes)
    assert caught.value.code == "unsupported_parameter"
    assert options(tokenizer, 7) == {"add_generation_prompt": True}
    assert options(tokenizer, tools=[WEATHER], tool_choice="none") == {
        "add_generation_prompt": True
    }
