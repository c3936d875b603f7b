"""Chat and completions over HTTP: OpenAI's client, a real worker on the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from batchkv_producer.wire import redis_keys
from support.gateway import Gateway, running_gateway
from support.redis_server import RedisServer
from support.worker_harness import MODEL, WorkerProcess, wait_until, workers


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway and a worker whose steps take 5 ms, on an empty server."""
    folder = tmp_path_factory.mktemp("live")
    with redis_server.connect() as connection:
        connection.flushall()
    plan: dict[str, object] = {"step_seconds": 0.005}
    with (
        running_gateway(redis_server.url, folder / "home") as found,
        workers(WorkerProcess(redis_server.url, folder / "log", plan=plan)),
        found.client(max_retries=0) as client,
    ):
        wait_until(lambda: [model.id for model in client.models.list()] == [MODEL])
        wait_until(lambda: answers(client))
        yield found


def answers(client: OpenAI) -> bool:
    """Whether the worker answers live rows by now."""
    try:
        chat(client, "first")
    except (openai.NotFoundError, openai.InternalServerError):
        return False
    return True


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with gateway.client(max_retries=0) as found:
        yield found


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Redis]:
    with redis_server.connect() as connection:
        yield connection


def chat(client: OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, **fields})


def rows_of(redis: Redis) -> list[bytes]:
    """The live rows that Redis has."""
    return list(redis.scan_iter("batchkv:live:row:*"))


def test_an_answer_has_the_body_of_an_output_line(client: OpenAI) -> None:
    """A chat and a completion have ids, choices and usage, and validate with OpenAI's types."""
    found = chat(client, "hello", n=2)
    type(found).model_validate(found.to_dict(), strict=True)
    assert [choice.message.content for choice in found.choices] == ["echo hello", "echo hello #1"]
    assert found.usage.total_tokens == 9 and found.usage.prompt_tokens_details.cached_tokens == 1
    assert found.id == f"chatcmpl-{found._request_id}"
    several = client.completions.create(model=MODEL, prompt=["a", "bc"], n=2)
    assert [(one.index, one.text) for one in several.choices] == [
        *((0, "echo a"), (1, "echo a #1"), (2, "echo bc"), (3, "echo bc #1"))
    ]
    assert several.usage is not None and several.usage.prompt_tokens == 3


def test_the_only_model_needs_no_name(client: OpenAI) -> None:
    """A request without a model is for the one that is served."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/chat/completions", body=body, cast_to=object)["model"] == MODEL  # type: ignore[index]


def test_a_body_may_begin_with_a_byte_order_mark(gateway: Gateway) -> None:
    """As files may."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    found = httpx2.post(
        f"{gateway.url}/chat/completions",
        content="\ufeff".encode() + body.encode(),
        headers={"content-type": "application/json"},
    )
    assert found.status_code == 200, found.text


def test_a_stream_has_the_pieces_in_order(client: OpenAI) -> None:
    """First the role, then pieces, then the reason of the end, then the counts of tokens."""
    chunks = list(
        chat(client, "slow:9 \u00fcx", stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        type(chunk).model_validate(chunk.to_dict(), strict=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and not deltas[0].content
    assert "".join(delta.content or "" for delta in deltas) == "echo slow:9 \u00fcx"
    assert len(deltas) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1


def test_a_stream_of_several_answers(client: OpenAI) -> None:
    """Each choice of each prompt comes under its index."""
    texts: dict[int, str] = {}
    ended: dict[int, str] = {}
    stream = client.completions.create(model=MODEL, prompt=["a", "slow:4 b"], n=2, stream=True)
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason is not None:
            ended[choice.index] = choice.finish_reason
    assert texts == {0: "echo a", 1: "echo a #1", 2: "echo slow:4 b", 3: "echo slow:4 b #1"}
    assert ended == dict.fromkeys(range(4), "stop")


WRONG: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"temperature": -1}, 400, "invalid_request", "temperature"),
    ({"extra_body": {"foo": 1}}, 400, "unsupported_parameter", "foo"),
    ({"extra_body": {"echo": True}}, 400, "unsupported_parameter", "echo"),
    ({"messages": []}, 400, "invalid_request", "messages"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_request", "stream_options"),
    ({"stop": ""}, 400, "invalid_request", "stop"),
    ({"logit_bias": {"hello": 1}}, 400, "invalid_request", "logit_bias"),
    ({"text": "reject:context_length_exceeded"}, 400, "context_length_exceeded", "messages"),
    ({"text": "reject:engine_error"}, 500, "engine_error", None),
    ({"text": "reject:timeout"}, 504, "timeout", None),
]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_wrong_is_refused_in_openai_s_shape(client: OpenAI, is_stream: bool) -> None:
    """Wrong fields, unknown models and failed rows are errors of HTTP, also of streams."""
    for given, status, code, param in WRONG:
        more = dict(given)
        if is_stream and "stream_options" not in more:
            more["stream"] = True
        with pytest.raises(openai.APIStatusError) as caught:
            chat(client, more.pop("text", "x"), **more)
        fault = caught.value
        assert (fault.status_code, fault.code, fault.param) == (status, code, param), given
        assert fault.message and fault.request_id, given
        assert fault.message.endswith(f". Served now: {MODEL}") == (code == "model_not_found"), (
            fault
        )


def test_a_client_that_leaves_frees_its_slot(gateway: Gateway, redis: Redis) -> None:
    """The rows of a stream and of a request that are given up are canceled at once."""
    with gateway.client(max_retries=0) as client:
        stream = chat(client, "slow:99999 stream", stream=True)
        next(iter(stream))
        assert len(rows_of(redis)) == 1
        stream.close()
        wait_until(lambda: not rows_of(redis))
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.3), "slow:99999 given up")
        wait_until(lambda: not rows_of(redis))


def test_two_hundred_at_once(gateway: Gateway) -> None:
    """OpenAI's asynchronous client has 200 answers at once, half of them streams, each its own."""

    async def all_of_them() -> list[str]:
        url = gateway.url
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"slow:5 {number}"}]
                if number % 2:
                    found = await client.chat.completions.create(model=MODEL, messages=messages)
                    return found.choices[0].message.content or ""
                stream = await client.chat.completions.create(
                    model=MODEL, messages=messages, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(200)))

    assert asyncio.run(all_of_them()) == [f"echo slow:5 {number}" for number in range(200)]


def test_who_cannot_answer_now_says_when(client: OpenAI, redis: Redis) -> None:
    """A full queue is 429; a worker that loads or pauses is 503. Clients may try again."""
    for model, fields, status in (
        ("loading", {"bkv_live": 1, "bkv_state": "loading"}, 503),
        ("paused", {"bkv_live": 1, "bkv_state": "paused"}, 503),
        ("full", {"bkv_live": 1}, 429),
    ):
        queue = redis_keys.queue_name(model)
        redis.hset(f"rq:worker:{model}", mapping={"birth": "x", "queues": queue, **fields})
        redis.sadd(f"rq:workers:{queue}", f"rq:worker:{model}")
        if model == "full":
            redis.rpush(f"batchkv:live:{queue}", *range(1000))
        with pytest.raises(openai.APIStatusError) as caught:
            chat(client, "x", model=model)
        assert caught.value.status_code == status
        headers = caught.value.response.headers
        assert headers["retry-after"] and headers["x-should-retry"] == "true"


def test_a_model_that_loads_is_not_listed(client: OpenAI, redis: Redis) -> None:
    """Tools that wait until a model is listed can call it then."""
    queue, record = redis_keys.queue_name("slow-to-load"), "rq:worker:slow-to-load"
    fields = {"birth": "2026-01-01T00:00:00Z", "queues": queue, "bkv_model": "slow-to-load"}
    redis.sadd(f"rq:workers:{queue}", record)
    redis.sadd("rq:workers", record)
    for state, is_listed in (("loading 1 of 2 GB", False), ("", True)):
        redis.hset(record, mapping={**fields, "bkv_state": state})
        names = {model.id for model in client.models.list()}
        assert ("slow-to-load" in names) is is_listed


def test_json_of_any_text(gateway: Gateway, client: OpenAI) -> None:
    """Every character of a text comes back, in chunks and in bodies."""
    text = 'slow:40 \u2028\x00\U0001f600"\\ \u0644'
    assert chat(client, text).choices[0].message.content == f"echo {text}"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, text, stream=True)]
    assert "".join(pieces) == f"echo {text}"
