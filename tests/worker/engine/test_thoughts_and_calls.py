"""Thoughts and tool calls through a whole engine: alone, among other rows, and after preemption.

The weights are random. Guides make a row write what the test needs, as a trained model would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Any

import pytest

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS
from batchkv_worker.engine.tokens.guide import AllOf, Mask, allow_only
from batchkv_worker.events import Completed, Event, Piece, Work
from batchkv_worker.guide import Guide
from batchkv_worker.model.loader import LoadedModel
from support import tiny_models, tiny_tokenizers
from support.tool_texts import CALLS
from worker.kv.crowd import model_of

PARAMETERS: dict[str, Any] = {
    **{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    "additionalProperties": False,
}
COUNTER = {"type": "function", "function": {"name": "count", "parameters": PARAMETERS}}
SCHEMA = {"enum": ["yes", "no"]}


class Script:
    """A guide that writes one text, and then ends the row."""

    is_over = False

    def __init__(self, tokens: Tokens[int]) -> None:
        self._tokens, self._at = tuple(tokens), 0

    def fill(self, allowed: Mask) -> None:
        allow_only(allowed, self._tokens[self._at : self._at + 1])

    def take(self, token: int) -> None:
        assert token == self._tokens[self._at]
        self._at += 1

    def restart(self, tokens: Tokens[int]) -> None:
        self._at = len(tokens)

    def fresh(self) -> Guide:
        return Script(self._tokens)

    def and_then(self, grammar: Guide) -> Guide:
        return AllOf([self, grammar])


def loaded(kind: str) -> LoadedModel:
    return tiny_models.loaded_chat(model_of("llama"), kind)


def engine(kind: str, **changes: Any) -> Engine:
    values: dict[str, Any] = {"slots": 6, "chunk_tokens": 256, "memory_bytes": 2**28} | changes
    values["backend"] = tiny_models.measured(model_of("llama"), "float", values["slots"])
    return Engine(loaded(kind), EngineConfig(scheme="float", **values))


def work(job_id: str, content: str = "How many?", **asked: Any) -> Work:
    names = {"tools", "tool_choice", "constraint", "parallel_tool_calls", "chat_template_kwargs"}
    fields = {name: asked.pop(name) for name in [*asked] if name in names}
    params = SamplingParams(**{"max_tokens": 150, "temperature": 1.0, "seed": 3, **asked})
    messages = [{"role": "user", "content": content}]
    request = Request(job_id, "chat", messages=messages, params=params, **fields)
    return Work(job_id, request)


def run(running: Engine, *wanted: Work) -> dict[str, Completed]:
    """All rows to their end, each with a step between it and the next."""
    ended = dict[str, Completed]()

    def step() -> None:
        events: list[Event] = running.step()
        for event in events:
            assert isinstance(event, Completed), event
            ended[event.job_id] = event
        running.check_integrity()

    for one in wanted:
        running.add(one)
        step()
    while not running.is_idle:
        step()
    running.close()
    return ended


def scripted(kind: str, *rows: tuple[str, dict[str, Any]]) -> list[Completed]:
    """Rows whose model writes these texts, all in one engine."""
    running, tokenizer = engine(kind, slots=len(rows)), tiny_tokenizers.tokenizer(kind)
    for index, (text, asked) in enumerate(rows):
        running.add(work(str(index), **asked))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        running._scheduler.waiting[-1].guide = Script([*tokens, tokenizer.eos_token_id])
    ended = run(running)
    return [ended[str(index)] for index in range(len(rows))]


WEATHER = {"tools": [{"type": "function", "function": {"name": "get_weather"}}]}


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4"])
def test_a_call_is_an_event_of_its_own_kind(kind: str) -> None:
    """The event has the call and no text, and its reason; without tools the same text is text."""
    event, plain = scripted(kind, (CALLS[kind], WEATHER), (CALLS[kind], {}))
    assert (event.text, event.finish_reason) == ("", "tool_calls")
    (call,) = event.tool_calls
    assert json.loads(call.arguments) == {"city": "Köln", "days": 2}
    assert plain.finish_reason == "stop" and not plain.tool_calls and "Köln" in plain.text


def test_parts_are_reported_and_counted() -> None:
    """Tokens of a thought are part of those of the answer; a row with one call ends after it."""
    thought, call = "<think>\nHm.\n</think>\n\nYes.", CALLS["qwen3"]
    whole, cut, single, both = scripted(
        "qwen3",
        (thought, {}),
        (thought, {"max_tokens": 4}),
        (f"{call}\n{call}", {**WEATHER, "parallel_tool_calls": False}),
        (f"{call}\n{call}", WEATHER),
    )
    assert (whole.text, whole.reasoning, whole.finish_reason) == ("Yes.", "Hm.", "stop")
    assert (whole.usage.reasoning, whole.usage.completion) == (5, 14)
    assert (cut.text, cut.reasoning, cut.finish_reason) == ("", "Hm", "length")
    assert len(single.tool_calls) == 1 and single.finish_reason == "tool_calls"
    assert single.usage.completion == len(tiny_tokenizers.tokenizer("qwen3").encode(call))
    assert len(both.tool_calls) == 2 and both.usage.completion > 2 * single.usage.completion


def works() -> list[Work]:
    """Rows of each kind: budgets, calls that must be made, a schema after a thought; plain ones."""
    no_thought = {"chat_template_kwargs": {"enable_thinking": False}}
    call = {"tools": [COUNTER], "tool_choice": "required", "parallel_tool_calls": False}
    return [
        work("plain", max_tokens=30),
        work("budget", thinking_budget=9, max_tokens=40),
        work("none", thinking_budget=0, max_tokens=40),
        work("call", thinking_budget=6, **call),
        work("named", **call | {"tool_choice": "function:count"} | no_thought),
        work("schema", thinking_budget=12, constraint=Constraint("json_schema", SCHEMA)),
        work("calls", n=3, thinking_budget=4, **call),
    ]


@pytest.mark.parametrize("kind", ["deepseek_r1", "gpt_oss"])
def test_thoughts_end_and_calls_are_made(kind: str) -> None:
    """A budget holds to the token; required calls and schemas are valid after a thought."""
    wanted = [one for one in works() if kind != "deepseek_r1" or not one.request.tools]
    ended = run(engine(kind), *wanted)
    assert ended["budget"].usage.reasoning <= 9 and ended["none"].usage.reasoning == 0
    if kind == "deepseek_r1":  # its prompt opens the thought, and random weights never end it
        assert ended["budget"].usage.reasoning == 9 and ended["budget"].text
        assert ended["plain"].usage.reasoning == 30
    event = ended["schema"]
    assert (json.loads(event.text), event.finish_reason) in (("yes", "stop"), ("no", "stop"))
    assert event.usage.reasoning <= 12
    for event in (ended[name] for name in ("call", "named") if name in ended):
        assert (event.text, event.finish_reason) == ("", "tool_calls")
        (call,) = event.tool_calls
        assert call.name == "count" and {*json.loads(call.arguments)} == {"a"}
    if "calls" in ended:
        choices = ended["calls"].more
        ids = {one.tool_calls[0].id for one in choices} | {ended["calls"].tool_calls[0].id}
        assert len(ids) == 3 and ended["calls"].usage.reasoning <= 12


def test_rows_are_the_same_alone_and_together() -> None:
    """Tokens and parts, whatever rows are beside them."""
    wanted = [one for one in works() if one.job_id in ("budget", "call", "schema", "calls")]
    together = run(engine("qwen3"), *wanted)
    for one in wanted[1:3]:
        (alone,) = run(engine("qwen3", slots=1), one).values()
        other = together[one.job_id]
        assert (alone.token_ids, alone.text) == (other.token_ids, other.text), one.job_id
        assert alone.reasoning == other.reasoning and alone.tool_calls == other.tool_calls


def test_rows_that_leave_their_slots_come_back() -> None:
    """Thoughts and grammars go on where they were, also in the middle of either."""
    content, pattern = "How many? " * 20, Constraint("regex", "[a-z]{50}")
    wanted = [
        work(f"row {index}", content, seed=index, thinking_budget=budget, constraint=pattern)
        for index, budget in enumerate((0, 10, 40, 30, 50, 60))
    ]
    roomy = run(engine("qwen3"), *wanted)
    costs = engine("qwen3").plan.costs
    memory_bytes = 2000 * (costs.per_token + costs.largest) + 6 * costs.per_row
    tight = engine("qwen3", memory_bytes=memory_bytes, prefix_bytes=0)
    for _ in range(FEWEST_OUTPUTS):  # so that it expects short answers
        tight._scheduler.output_lengths.add(8)
    preempted = run(tight, *wanted)
    assert tight._decode_rows.num_preempted >= 2
    for name, event in roomy.items():
        assert preempted[name].token_ids == event.token_ids, name
        assert re.fullmatch(str(pattern.value), event.text) and event.finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("<think>\nhm <b>\n</think>\n\nTwo  words.\n\nMore \u00fc\U0001f600", {}),
        ("No thought, a < b", {}),
        ("\n starts with white space", {}),
        (f"Let me see. {CALLS['qwen3']}", WEATHER),
    ],
)
def test_pieces_of_a_live_row_are_its_answer_alone(text: str, asked: dict[str, Any]) -> None:
    """Neither a thought nor a call is in the pieces. They are how the answer's text begins."""
    running, tokenizer = engine("qwen3", slots=1), tiny_tokenizers.tokenizer("qwen3")
    running.add(replace(work("0", **asked), is_live=True))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    running._scheduler.waiting[-1].guide = Script([*tokens, tokenizer.eos_token_id])
    events: list[Event] = []
    while not running.is_idle:
        events += running.step()
    running.close()
    *found, end = events
    assert isinstance(end, Completed)
    sent = "".join(one.text for one in found if isinstance(one, Piece))
    assert end.text.startswith(sent)
    assert bool(sent) == (not text.startswith("\n"))
    assert "think" not in sent and "get_weather" not in sent
