"""Thoughts, calls and forms of the included model, through the engine: no answer is made up."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from batchkv_producer.wire.choice import ToolCall
from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed, Work
from batchkv_worker.model.loader import load

LEDGER = "Ledger of codes:\n- amber falcon: 4821\n- quiet harbor: 0937\n- old lantern: 2650\n\n"
ASKED = f"{LEDGER}What is the code of quiet harbor?"
THOUGHT = "I look for quiet harbor. Its code is 0937."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_code",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}},
                "required": ["key"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{4}$"}},
    "required": ["code"],
    "additionalProperties": False,
}
ODD = {
    "type": "object",
    "properties": {"odd": {"type": "boolean"}},
    "required": ["odd"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(max_tokens=64, temperature=0.0)


def row(name: str, content: str = ASKED, **more: Any) -> Work:
    asked = Request(
        name, "chat", messages=[{"role": "user", "content": content}], **{"params": PARAMS, **more}
    )
    return Work(name, asked)


def rows() -> list[Work]:
    """Rows of each kind, which run beside each other."""
    call = "What is the code of the amber falcon?"
    both = "Find the code of the amber falcon and of the old lantern."
    cut = SamplingParams(max_tokens=64, temperature=0.0, thinking_budget=4)
    form = Constraint("json_schema", SCHEMA)
    return [
        row("plain"),
        row("asked", f"{ASKED} Think first."),
        row("effort", reasoning_effort="low"),
        row("no effort", reasoning_effort="none"),
        row("closed", chat_template_kwargs={"enable_thinking": False}),
        row("budget", params=cut),
        row("json", f"{ASKED} Answer in JSON."),
        row("form", f"{ASKED} Answer in JSON.", constraint=form),
        row("thought and form", f"{ASKED} Answer in JSON.", constraint=form, params=cut),
        row("form alone", "Is 9 odd?", constraint=Constraint("json_schema", ODD)),
        row("call", call, tools=TOOLS),
        row("forced", call, tools=TOOLS, tool_choice="required"),
        row("two calls", both, tools=TOOLS),
        row("no tools", ASKED, tools=TOOLS, tool_choice="none"),
    ]


@cache
def answers() -> dict[str, Completed]:
    config = EngineConfig(
        **{"scheme": "float", "slots": 8, "chunk_tokens": 256, "memory_bytes": 2**28},
        **{"path": "fused", "group_cost": 0, "prefix_cells": 0},
    )
    running = Engine(load("demo", "float32"), config)
    for work in rows():
        running.add(work)
    found = dict[str, Completed]()
    while not running.is_idle:
        for event in running.step():
            assert isinstance(event, Completed), event
            found[event.job_id] = event
    return found


@pytest.mark.parametrize(
    ("name", "reasoning", "text"),
    [
        ("plain", "", "0937"),
        ("asked", THOUGHT, "0937"),
        ("effort", THOUGHT, "0937"),
        ("no effort", "", "0937"),
        ("closed", "", "0937"),
        ("budget", "I look for quiet", "0937"),
        ("json", "", '{"code":"0937"}'),
        ("form", "", '{"code":"0937"}'),
        ("no tools", "", "0937"),
    ],
)
def test_the_included_model_thinks_and_answers(name: str, reasoning: str, text: str) -> None:
    """Its thought and its answer are those of the ledger, also after a thought that is cut."""
    found = answers()[name]
    assert (found.reasoning, found.text, found.finish_reason) == (reasoning, text, "stop")


def test_a_form_begins_after_a_thought() -> None:
    """A row with a budget and a schema thinks, and then answers in the schema's form."""
    found = answers()["thought and form"]
    assert found.reasoning.startswith("I look for ") and len(found.reasoning.split()) <= 4
    assert json.loads(found.text)["code"].isdecimal() and found.finish_reason == "stop"


def test_a_form_is_no_reason_to_think() -> None:
    """Where the model would answer "No." at once, and the form forbids that, it does not think."""
    found = answers()["form alone"]
    assert found.reasoning == "" and isinstance(json.loads(found.text)["odd"], bool)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("call", ["the amber falcon"]),
        ("forced", ["the amber falcon"]),
        ("two calls", ["the amber falcon", "the old lantern"]),
    ],
)
def test_the_included_model_calls_tools(name: str, keys: list[str]) -> None:
    """It calls the one tool with what the question names, by itself and where it must."""
    found = answers()[name]
    assert found.finish_reason == "tool_calls" and found.text == ""
    calls = [
        ToolCall(call.id, "find_code", json.dumps({"key": key}))
        for call, key in zip(found.tool_calls, keys, strict=True)
    ]
    assert list(found.tool_calls) == calls
