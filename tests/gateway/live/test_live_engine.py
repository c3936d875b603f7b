"""A real engine on a tiny model that thinks and calls tools, asked over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from openai import OpenAI

from support.gateway import running_gateway
from support.redis_server import RedisServer
from support.tiny_worker import CHAT_CLASS
from support.worker_harness import MODEL, WorkerProcess, wait_until, workers

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": ["e", "a"]},
    {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200},
]


def streamed(client: OpenAI, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    choices: list[dict[str, Any]] = []
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices:
            type(chunk).model_validate(chunk.to_dict(), strict=True)
            while len(choices) <= part.index:
                choices.append({"content": "", "thought": "", "calls": [], "logprobs": 0})
            found, delta = choices[part.index], part.delta
            found["content"] += delta.content or ""
            found["thought"] += getattr(delta, "reasoning_content", None) or ""
            found["calls"] += [call.function.name for call in delta.tool_calls or ()]
            found["logprobs"] += len(part.logprobs.content) if part.logprobs else 0
            found |= {"reason": part.finish_reason, "made_by": chunk.system_fingerprint}
    return choices


def whole(client: OpenAI, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a body, in the same form."""
    found = client.chat.completions.create(**fields)
    type(found).model_validate(found.to_dict(), strict=True)
    assert found.usage is not None and found.usage.prompt_tokens > 0
    return [
        {
            "content": choice.message.content or "",
            "thought": getattr(choice.message, "reasoning_content", None) or "",
            "calls": [call.function.name for call in choice.message.tool_calls or ()],
            "logprobs": len(choice.logprobs.content) if choice.logprobs else 0,
            "reason": choice.finish_reason,
            "made_by": found.system_fingerprint,
        }
        for choice in found.choices
    ]


def test_a_stream_has_what_a_body_has(redis_server: RedisServer, tmp_path: Path) -> None:
    """Of text, thought, calls, choices and log-probabilities, whatever the row asks for."""
    with redis_server.connect() as connection:
        connection.flushall()
    worker = WorkerProcess(
        redis_server.url,
        tmp_path / "log",
        settings={"SLOTS": 4, "PREFETCH": 4},
        worker_class=CHAT_CLASS,
    )
    with (
        workers(worker),
        running_gateway(redis_server.url, tmp_path / "home") as gateway,
        gateway.client(max_retries=5) as client,
    ):
        base = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "seed": 7}
        base["max_tokens"] = 40

        def answers() -> bool:
            try:
                whole(client, base)
            except (openai.NotFoundError, openai.InternalServerError):
                return False
            return True

        wait_until(answers, 60)
        for more in ASKED:
            fields = {**base, **more}
            expected = whole(client, fields)
            assert streamed(client, fields) == expected, more
            assert len(expected) == more.get("n", 1)
            assert all(choice["content"] or choice["calls"] for choice in expected), more
            assert bool(expected[0]["logprobs"]) == ("logprobs" in more)
            assert bool(expected[0]["calls"]) == ("tools" in more)
