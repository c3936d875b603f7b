"""What a model's chat template reads: whether it shows tools, and which variables a row may set.

A template that ignores a variable would drop what a row asked for without a word. So rows that set
such a variable are refused. Templates in Jinja name their variables. Those that are Python code are
tried with and without a value.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_GENERATION = re.compile(r"\{%-?\+?\s*(?:end)?generation\s*-?\+?%\}")  # a tag of transformers alone
_TRIED = [{"role": "user", "content": "How are you?"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
# Variables that rows set by a field of their own, and two values that give different prompts.
_VALUES: dict[str, tuple[Any, Any]] = {
    "thinking_budget": (512, 1024),
    "reasoning_effort": ("low", "high"),
    "enable_thinking": (False, True),
}


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What a template reads. ``variables``: those of ``_VALUES`` that change its prompts.

    ``knows_no_effort``: it compares ``reasoning_effort`` with the word "none". Others would take it
    for one more word that asks for a thought.
    """

    shows_tools: bool = False
    variables: frozenset[str] = frozenset()
    knows_no_effort: bool = False


_known: WeakKeyDictionary[Any, tuple[Any, ChatTemplate]] = WeakKeyDictionary()


def chat_template_of(tokenizer: Any) -> ChatTemplate:
    """What the tokenizer's template reads. It is examined once."""
    source = getattr(tokenizer, "chat_template", None)
    found = _known.get(tokenizer)
    if found is None or found[0] != source:
        found = _known[tokenizer] = (source, _examined(tokenizer, source))
    return found[1]


def _examined(tokenizer: Any, source: Any) -> ChatTemplate:
    if callable(getattr(tokenizer, "_chat_template", None)):  # mlx-lm's, which is used instead
        return _tried(tokenizer)
    sources = list(source.values()) if isinstance(source, dict) else [source]
    texts = [text for text in sources if isinstance(text, str)]
    names = [names_in(text) for text in texts]
    if not texts or None in names:
        return _tried(tokenizer)
    read = frozenset(name for found in names if found for name in found)
    return ChatTemplate("tools" in read, read & _VALUES.keys(), any(map(_knows_none, texts)))


@lru_cache(maxsize=8)
def names_in(source: str) -> frozenset[str] | None:
    """The variables that a Jinja template reads from outside; None if it cannot be parsed."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_parsed(source)))
    except (jinja2.TemplateError, RecursionError):
        return None


def _parsed(source: str) -> jinja2.nodes.Template:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION.sub("", source))


def _knows_none(source: str) -> bool:
    """Whether a template compares ``reasoning_effort`` with "none"."""
    for compared in _parsed(source).find_all(jinja2.nodes.Compare):
        names = (one.name for one in compared.find_all(jinja2.nodes.Name))
        words = (one.value for one in compared.find_all(jinja2.nodes.Const))
        if "reasoning_effort" in names and "none" in words:
            return True
    return False


def _tried(tokenizer: Any) -> ChatTemplate:
    """Find out by rendering: what changes nothing is not read."""
    plain = _rendered(tokenizer)
    shown = _rendered(tokenizer, tools=[_TOOL])
    read = (
        name
        for name, values in _VALUES.items()
        if len({_rendered(tokenizer, **{name: value}) for value in values}) > 1
    )
    return ChatTemplate(shown not in ("", plain), frozenset(read))


def _rendered(tokenizer: Any, **options: Any) -> str:
    """A short prompt as text; "" if the template refuses it."""
    options = {"tokenize": False, "add_generation_prompt": True, **options}
    with suppress(Exception):  # a template may raise anything
        return str(tokenizer.apply_chat_template(_TRIED, **options))
    return ""
