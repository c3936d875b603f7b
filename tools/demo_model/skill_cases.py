"""Single questions about each skill, as a client sends them, with the answer that is right.

They are drawn from seeds that training does not use.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo_model.ledger import Fact, draw_ledger, prompt_messages, question
from demo_model.prose import passage, sentence
from demo_model.skills import (
    IN_JSON,
    NO_CODE,
    NO_THOUGHT,
    PAIR_FORM,
    SENTENCE_FORMS,
    THINK_FIRST,
    Tool,
    record,
    thought,
)
from demo_model.tokenizer import END_THINK, THINK

NUM_FACTS = 8


@dataclass(frozen=True, slots=True)
class SkillCase:
    """A prompt and the text that must follow it. ``options`` are those of the chat template."""

    messages: list[dict[str, Any]]
    answer: str
    options: dict[str, Any] = field(default_factory=dict)


def tool_spec(tool: Tool) -> dict[str, Any]:
    """A tool as a request has it."""
    properties = {tool.parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [tool.parameter]}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}


def _asked(rng: random.Random, more: str = "") -> tuple[list[dict[str, Any]], Fact]:
    """A question about a ledger, and its fact."""
    ledger = draw_ledger(rng, NUM_FACTS)
    fact = rng.choice(ledger.facts)
    (message,) = prompt_messages(ledger, fact.key)
    return [{**message, "content": message["content"] + more}], fact


def _thought_asked(rng: random.Random) -> SkillCase:
    messages, fact = _asked(rng, f" {THINK_FIRST}")
    inner = thought(fact.key, fact.code)
    return SkillCase(messages, f"{THINK}\n{inner}{END_THINK}\n\n{fact.code}")


def _thought_opened(rng: random.Random) -> SkillCase:
    messages, fact = _asked(rng)
    inner = thought(fact.key, fact.code)
    answer = f"{inner}{END_THINK}\n\n{fact.code}"
    return SkillCase(messages, answer, {"reasoning_effort": "low"})


def _no_thought(rng: random.Random) -> SkillCase:
    messages, fact = _asked(rng)
    return SkillCase(messages, fact.code, {"enable_thinking": False})


def _json(rng: random.Random) -> SkillCase:
    messages, fact = _asked(rng, f" {IN_JSON}")
    return SkillCase(messages, record(fact.code))


def _reading(rng: random.Random) -> SkillCase:
    facts = draw_ledger(rng, 3).facts
    lines = [rng.choice(SENTENCE_FORMS).format(key=fact.key, code=fact.code) for fact in facts]
    lines += [sentence(rng) for _ in range(4)]
    rng.shuffle(lines)
    fact = rng.choice(facts)
    content = f"{' '.join(lines)}\n\n{question(fact.key)}"
    return SkillCase([{"role": "user", "content": content}], fact.code)


def _call_of(tools: list[Tool], rng: random.Random) -> SkillCase:
    tool, key = rng.choice(tools), draw_ledger(rng, 1).facts[0].key
    asked = question(f"the {key}").replace(" code ", f" {tool.attribute} ")
    specs = [tool_spec(each) for each in tools]
    return SkillCase([{"role": "user", "content": asked}], tool.call(key), {"tools": specs})


def _call(rng: random.Random) -> SkillCase:
    return _call_of([Tool("find_code", "code", "key")], rng)


def _choice(rng: random.Random) -> SkillCase:
    names = ("code", "price", "weight")
    return _call_of([Tool(f"find_{name}", name, "key") for name in names], rng)


def _two_calls(rng: random.Random) -> SkillCase:
    tool = Tool("find_code", "code", "key")
    one, two = draw_ledger(rng, 2).facts
    asked = PAIR_FORM.format(attribute=tool.attribute, one=one.key, two=two.key)
    answer = f"{tool.call(one.key)}\n{tool.call(two.key)}"
    message = {"role": "user", "content": asked}
    return SkillCase([message], answer, {"tools": [tool_spec(tool)]})


def _result(rng: random.Random) -> SkillCase:
    tool, fact = Tool("find_code", "code", "key"), draw_ledger(rng, 1).facts[0]
    function = {"name": tool.name, "arguments": {tool.parameter: f"the {fact.key}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": question(f"the {fact.key}")},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"code": fact.code})},
    ]
    return SkillCase(messages, fact.code, {"tools": [tool_spec(tool)]})


def _no_code(rng: random.Random) -> SkillCase:
    return SkillCase([{"role": "user", "content": passage(rng, 2)}], NO_CODE)


def _no_code_in_thought(rng: random.Random) -> SkillCase:
    message = {"role": "user", "content": passage(rng, 2)}
    answer = f"{NO_THOUGHT}{END_THINK}\n\n{NO_CODE}"
    return SkillCase([message], answer, {"reasoning_effort": "low"})


SKILLS: dict[str, Callable[[random.Random], SkillCase]] = {
    "a code in a text": _reading,
    "a thought that the question asks for": _thought_asked,
    "a thought that the template opens": _thought_opened,
    "no thought": _no_thought,
    "a record in JSON": _json,
    "a tool call": _call,
    "the right one of three tools": _choice,
    "two tool calls": _two_calls,
    "an answer from a tool's result": _result,
    "a text without a code": _no_code,
    "a thought about such a text": _no_code_in_thought,
}


def draw_skill_cases(skill: str, num_cases: int, seed: int = 0) -> Iterator[SkillCase]:
    """`num_cases` questions about one skill."""
    rng = random.Random(f"skill cases {skill} {seed}")
    for _ in range(num_cases):
        yield SKILLS[skill](rng)
