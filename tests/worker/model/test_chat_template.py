"""What a chat template reads: its variables, and whether it shows tools."""

from __future__ import annotations

from typing import Any

import pytest

from batchkv_worker.model.chat_template import ChatTemplate, chat_template_of, names_in
from support import tiny_tokenizers


class Tokenizer:
    """Has a Jinja template, or one in Python as mlx-lm's wrapper keeps it."""

    def __init__(self, source: Any = None, render: Any = None) -> None:
        self.chat_template = source
        self._chat_template = render

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        if self._chat_template is None:
            raise ValueError("this template must not be tried")
        return str(self._chat_template(messages, **options))


def test_templates_of_real_kinds() -> None:
    """Tools and variables are found, also inside a macro that gives a default."""
    found = {
        name: chat_template_of(tiny_tokenizers.tokenizer(name)) for name in ("qwen3", "gpt_oss")
    }
    assert found["qwen3"] == ChatTemplate(True, frozenset({"enable_thinking"}))
    assert found["gpt_oss"] == ChatTemplate(True, frozenset({"reasoning_effort"}))
    assert chat_template_of(tiny_tokenizers.tokenizer("no_tools")) == ChatTemplate()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ thinking_budget }}", {"thinking_budget"}),
        ("{% generation %}{{ reasoning_effort }}{%- endgeneration -%}", {"reasoning_effort"}),
        ("{% for a in b %}{% break %}{% endfor %}{{ enable_thinking }}", {"enable_thinking"}),
        ("{# reasoning_effort #}{{ 'thinking_budget' }}", set()),
        ("{% set enable_thinking = true %}{{ enable_thinking }}", set()),
    ],
)
def test_only_variables_from_outside_count(source: str, expected: set[str]) -> None:
    """Not a comment, a text, or what the template sets; the tags of transformers are known."""
    assert chat_template_of(Tokenizer(source)).variables == expected


def test_several_templates_of_one_model() -> None:
    """A dict of named templates: what any of them reads."""
    found = chat_template_of(
        Tokenizer({"default": "{{ thinking_budget }}", "tool_use": "{{ tools }}"})
    )
    assert found == ChatTemplate(True, frozenset({"thinking_budget"}))


def test_a_template_in_python_is_tried() -> None:
    """What changes its text is read; what it ignores, and what it refuses, is not."""

    def render(messages: Any, tools: Any = None, **options: Any) -> str:
        if "thinking_budget" in options:
            raise ValueError("no such option")
        return f"{messages}{tools}{options.get('reasoning_effort')}"

    found = chat_template_of(Tokenizer("{{ enable_thinking }}", render))
    assert found == ChatTemplate(True, frozenset({"reasoning_effort"}))
    assert chat_template_of(Tokenizer(render=lambda messages, **_: "x")) == ChatTemplate()


def test_a_template_that_is_no_jinja_is_tried() -> None:
    """It is not known to read anything, and nothing is raised."""
    assert names_in("{% if %}") is None
    assert chat_template_of(Tokenizer("{% if %}")) == ChatTemplate()
    assert chat_template_of(Tokenizer("{{ " + "(" * 5000)) == ChatTemplate()


def test_a_template_is_examined_once() -> None:
    """Until it changes."""
    tokenizer = Tokenizer("{{ tools }}")
    first = chat_template_of(tokenizer)
    assert chat_template_of(tokenizer) is first and first.shows_tools
    tokenizer.chat_template = "{{ messages }}"
    assert not chat_template_of(tokenizer).shows_tools
