"""Draws chats of the second stage: thoughts, answers in JSON, texts to read, and tool calls.

A chat is a row of parts. The model learns the parts that it would write, not those that a user, a
tool or the chat template writes. No MLX here.
"""

import json
import random
from dataclasses import dataclass

from demo_model.ledger import QUESTION_FORMS, Fact, draw_ledger, question
from demo_model.prose import passage, sentence
from demo_model.tokenizer import ASSISTANT, CALL, END, END_CALL, END_THINK, SYSTEM, THINK, USER
from demo_model.words import COMMON, LESS_COMMON

THINK_FIRST = "Think first."
IN_JSON = "Answer in JSON."
SENTENCE_FORMS: tuple[str, ...] = (
    "The code of {key} is {code}.",
    "The {key} has the code {code}.",
    "The {key} got the code {code}.",
)
PAIR_FORM = "Find the {attribute} of the {one} and of the {two}."
NO_CODE = "No code."
NO_THOUGHT = "I look for a code. There is none.\n"
MANY_FACTS = 60
OPEN_THOUGHT = f"{THINK}\n"
CLOSED_THOUGHT = f"{THINK}\n\n{END_THINK}\n\n"

_ATTRIBUTES = ("code", "price", "weight", "size", "age", "color", "owner", "number")
_VERBS = ("find", "get", "read", "look_up", "fetch", "check")
_PARAMETERS = ("key", "key", "name", "item", "id", "word", "thing", "query")
_WORDS = tuple(word for word in (*COMMON, *LESS_COMMON) if word.isalpha() and word.islower())
_HEADINGS = ("Ledger of codes:", "Ledger of codes:", "Codes:", "The ledger follows.")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a chat. ``skill`` names what the model learns from it, "" if nothing."""

    text: str
    skill: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that finds one attribute of a thing."""

    name: str
    attribute: str
    parameter: str

    def spec(self, rng: random.Random) -> str:
        """Its line in the system turn, as the template writes it."""
        properties = {self.parameter: {"type": "string"}}
        parameters: dict[str, object] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            parameters["required"] = [self.parameter]
        function: dict[str, object] = {"name": self.name}
        if rng.random() < 0.5:
            function["description"] = f"Finds the {self.attribute} of a thing."
        function["parameters"] = parameters
        return json.dumps({"type": "function", "function": function})

    def call(self, key: str) -> str:
        """A call, in the style of mlx-lm's parser ``json_tools``.

        Each token of the argument stands in the question, because it begins with "the".
        """
        body = json.dumps({"name": self.name, "arguments": {self.parameter: f"the {key}"}})
        return f"{CALL}\n{body}\n{END_CALL}"


def thought(key: str, code: str) -> str:
    """What the model thinks before it answers."""
    return f"I look for {key}. Its code is {code}.\n"


def record(code: str) -> str:
    """An answer in JSON, without blanks, as a schema has it written."""
    return json.dumps({"code": code}, separators=(",", ":"))


def _turn(rng: random.Random, fact: Fact, asked: str, skill: str, plain_share: float) -> list[Part]:
    """One question about a text with its answer, in one of the ways to answer."""
    answer, inner = f"{fact.code}{END}", thought(fact.key, fact.code)
    if rng.random() < plain_share:
        return [Part(f"{asked}{END}{ASSISTANT}"), Part(answer, skill)]
    way = rng.random()
    if way < 0.28:
        learned = f"{OPEN_THOUGHT}{inner}{END_THINK}\n\n{answer}"
        return [Part(f"{asked} {THINK_FIRST}{END}{ASSISTANT}"), Part(learned, "think")]
    if way < 0.57:
        learned = f"{inner}{END_THINK}\n\n{answer}"
        return [Part(f"{asked}{END}{ASSISTANT}{OPEN_THOUGHT}"), Part(learned, "think")]
    if way < 0.64:
        return [Part(f"{asked}{END}{ASSISTANT}{CLOSED_THOUGHT}"), Part(answer, "closed")]
    if way < 0.72:
        words = inner.split(" ")
        cut = " ".join(words[: rng.randint(0, len(words) - 1)])
        given = f"{asked}{END}{ASSISTANT}{OPEN_THOUGHT}{cut}{END_THINK}"
        return [Part(given), Part(f"\n\n{answer}", "cut")]
    learned = f"{record(fact.code)}{END}"
    return [Part(f"{asked} {IN_JSON}{END}{ASSISTANT}"), Part(learned, "json")]


def _turns(rng: random.Random, facts: tuple[Fact, ...], opening: str, skill: str) -> list[Part]:
    """Questions about ``facts``, one for each three facts or more, after ``opening``."""
    parts = [Part(opening)]
    plain_share = 0.8 if len(facts) >= MANY_FACTS // 2 else 0.12
    for number, fact in enumerate(rng.choices(facts, k=min(20, 5 + len(facts) // 3))):
        asked = question(fact.key, rng.randrange(len(QUESTION_FORMS)))
        first, *rest = _turn(rng, fact, asked, skill, plain_share)
        parts += [Part((USER if number else "") + first.text), *rest]
    return parts


def ledger_chat(rng: random.Random, max_facts: int) -> list[Part]:
    """A ledger, perhaps behind other text, and questions about it."""
    low = max_facts // 2 if rng.random() < 0.6 else 2
    ledger = draw_ledger(rng, rng.randint(low, max_facts), rng.choice(_HEADINGS))
    before = passage(rng, rng.choice((0, 0, 0, 1, 2, 4)))
    text = "\n\n".join(text for text in (before, ledger.text) if text)
    return _turns(rng, ledger.facts, f"{USER}{text}\n\n", "recall")


def reading_chat(rng: random.Random, max_facts: int) -> list[Part]:
    """A text with codes in some of its sentences, and questions about them."""
    facts = draw_ledger(rng, rng.randint(2, max(2, max_facts // 3))).facts
    sentences = [rng.choice(SENTENCE_FORMS).format(key=fact.key, code=fact.code) for fact in facts]
    sentences += [sentence(rng) for _ in range(rng.randint(0, max_facts // 3))]
    rng.shuffle(sentences)
    text = " ".join(sentences)
    return _turns(rng, facts, f"{USER}{text}\n\n", "read")


def _tools(rng: random.Random) -> list[Tool]:
    """One to three tools of different attributes."""
    if rng.random() < 0.1:
        word = rng.choice(_WORDS)
        name = f"{rng.choice(_VERBS)}_{word}" if rng.random() < 0.7 else word
        return [Tool(name, word, rng.choice((*_PARAMETERS, rng.choice(_WORDS))))]
    attributes = rng.sample(_ATTRIBUTES, rng.randint(1, 3))
    return [
        Tool(f"{rng.choice(_VERBS)}_{attribute}", attribute, rng.choice(_PARAMETERS))
        for attribute in attributes
    ]


def _ask_tool(rng: random.Random, tool: Tool, key: str) -> str:
    asked = question(f"the {key}", rng.randrange(len(QUESTION_FORMS)))
    return asked.replace(" code ", f" {tool.attribute} ")


def _result(rng: random.Random, fact: Fact) -> str:
    """What a tool answers: a bare code, a record, or a sentence."""
    form = rng.randrange(3)
    if form == 0:
        return fact.code
    if form == 1:
        return json.dumps({"code": fact.code})
    return SENTENCE_FORMS[0].format(key=fact.key, code=fact.code)


def tool_chat(rng: random.Random, max_facts: int) -> list[Part]:
    """Tools, and questions that need one call or two; each result is then given as the answer."""
    tools = _tools(rng)
    system = f"{sentence(rng)}\n\n" if rng.random() < 0.3 else ""
    lines = "\n".join(tool.spec(rng) for tool in tools)
    parts = [Part(f"{SYSTEM}{system}Tools:\n{lines}{END}")]
    for _ in range(2 + max_facts // 6):
        tool = rng.choice(tools)
        one, two = draw_ledger(rng, 2).facts
        if rng.random() < 0.12:
            asked = PAIR_FORM.format(attribute=tool.attribute, one=one.key, two=two.key)
            calls = f"{tool.call(one.key)}\n{tool.call(two.key)}{END}"
            parts += [Part(f"{USER}{asked}{END}{ASSISTANT}"), Part(calls, "calls")]
            continue
        asked = _ask_tool(rng, tool, one.key)
        given = rng.choice(("", "", CLOSED_THOUGHT))
        parts.append(Part(f"{USER}{asked}{END}{ASSISTANT}{given}"))
        parts.append(Part(f"{tool.call(one.key)}{END}", "call"))
        if rng.random() < 0.4:
            parts.append(Part(f"{USER}{_result(rng, one)}{END}{ASSISTANT}"))
            parts.append(Part(f"{one.code}{END}", "result"))
    return parts


def other_chat(rng: random.Random, max_facts: int) -> list[Part]:
    """Texts without any code, perhaps beside tools: the answer is always the same."""
    parts = list[Part]()
    if rng.random() < 0.2:
        lines = "\n".join(tool.spec(rng) for tool in _tools(rng))
        parts.append(Part(f"{SYSTEM}Tools:\n{lines}{END}"))
    for _ in range(4 + max_facts // 2):
        if rng.random() < 0.5:
            asked = " ".join(rng.choices(_WORDS, k=rng.randint(1, 7))).capitalize()
            asked += rng.choice(("", ".", "?", "?", ":", "!"))
        else:
            asked = passage(rng, rng.choice((1, 1, 1, 2, 4)))
        way = rng.random()
        if way < 0.1:
            learned = f"{OPEN_THOUGHT}{NO_THOUGHT}{END_THINK}\n\n{NO_CODE}{END}"
            parts += [Part(f"{USER}{asked} {THINK_FIRST}{END}{ASSISTANT}"), Part(learned, "other")]
            continue
        given, inner = "", ""
        if way < 0.25:
            given, inner = OPEN_THOUGHT, f"{NO_THOUGHT}{END_THINK}\n\n"
        elif way < 0.35:
            given = CLOSED_THOUGHT
        parts.append(Part(f"{USER}{asked}{END}{ASSISTANT}{given}"))
        parts.append(Part(f"{inner}{NO_CODE}{END}", "other"))
    return parts


def draw_skills(rng: random.Random, max_facts: int) -> list[Part]:
    """A chat of any kind. Long ones are about ledgers, whose recall must not be forgotten."""
    if max_facts >= MANY_FACTS:
        return ledger_chat(rng, max_facts)
    kind = rng.random()
    if kind < 0.2:
        return other_chat(rng, max_facts)
    if kind < 0.42:
        return ledger_chat(rng, max_facts)
    if kind < 0.55:
        return reading_chat(rng, max_facts)
    return tool_chat(rng, max_facts)
