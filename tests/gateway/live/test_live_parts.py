"""What a worker sends, and what a client gets: thoughts, tool calls, failures, a gateway's end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from httpx2 import stream
from openai import OpenAI
from redis import Redis

from batchkv_gateway.keys.caller import salt_of
from batchkv_gateway.keys.store import LOCAL, KeyStore
from batchkv_gateway.live.calls import LAST_SECONDS, Calls
from batchkv_gateway.live.chunks import Chunks
from batchkv_gateway.stopping import Stopping
from batchkv_producer.live import Piece
from batchkv_producer.monitor.hosts import HostMoves
from batchkv_producer.results.bodies import made_by
from batchkv_producer.wire.choice import TokenLogprob, ToolCall
from batchkv_producer.wire.job import Result, Usage
from batchkv_worker.queue.models.view import Watcher
from gateway.live.live_worker import LiveWorker
from support.gateway import Gateway, running_gateway
from support.redis_server import RedisServer
from support.worker_harness import wait_until

CALL = ToolCall("call_1", "weather", '{"city": "Rome"}')
RESULT = Result("c", "chat", "ok", "m", "It rains.", "stop", Usage(9, 7, 2, 3), reasoning="Hm.")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway whose rows are private, and whose streams do not wait long for a piece."""
    home = tmp_path_factory.mktemp("parts") / "home"
    patch = {"FIRST_SECONDS": 0.2, "KEEP_ALIVE_SECONDS": 0.2}
    with running_gateway(redis_server.url, home, "--private", **patch) as found:
        yield found


@pytest.fixture
def worker(redis_connection: Redis) -> LiveWorker:
    return LiveWorker(redis_connection, "m")


@contextmanager
def asking(gateway: Gateway, **fields: Any) -> Iterator[Future[Any]]:
    """A request under way. Its result is a body, or the list of a stream's chunks."""

    def ask(client: OpenAI) -> Any:
        messages: Any = [{"role": "user", "content": "hi"}]
        found = client.chat.completions.create(model="m", messages=messages, **fields)
        return list(found) if fields.get("stream") else found

    with ThreadPoolExecutor(1) as pool, gateway.client(max_retries=0, timeout=20) as client:
        yield pool.submit(ask, client)


def test_a_thought_and_a_call_come_apart(gateway: Gateway, worker: LiveWorker) -> None:
    """The thought comes first, in pieces. The call comes whole, and no piece has its text."""
    with asking(gateway, stream=True, tools=TOOLS) as asked:
        row, request = worker.take()
        assert row.pieces == "all" and request.cache_salt == salt_of(LOCAL)
        worker.send(row, "t", "H")
        worker.send(row, "t", "m")
        worker.send(row, "d", "It ")
        worker.end(row, replace(RESULT, tool_calls=(CALL,), finish_reason="tool_calls"))
        chunks = asked.result(10)
    for chunk in chunks:
        type(chunk).model_validate(chunk.to_dict(), strict=True)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    function = {"name": "weather", "arguments": CALL.arguments}
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": piece} for piece in ("H", "m")),
        {"content": "It "},
        {"reasoning_content": "."},
        {"content": "rains."},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
        {},
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_is_whole_whatever_pieces_came(gateway: Gateway, worker: LiveWorker) -> None:
    """A request without a stream wants no pieces. A worker of an older version sends them."""
    with asking(gateway) as asked:
        row, _ = worker.take()
        assert row.pieces == "none"
        worker.send(row, "d", "It ")
        worker.end(row, RESULT)
        message = asked.result(10).choices[0].message
    assert (message.content, message.reasoning_content) == ("It rains.", "Hm.")


def test_log_probabilities_come_with_their_text(gateway: Gateway, worker: LiveWorker) -> None:
    """A stream with log-probabilities has one chunk with the text and those of all its tokens."""
    tokens = (TokenLogprob("It", -0.5, (("It", -0.5), ("So", -1.0))), TokenLogprob(" rains.", -2.0))
    with asking(gateway, stream=True, logprobs=True, top_logprobs=2) as asked:
        row, _ = worker.take()
        assert row.pieces == "none"
        worker.end(row, replace(RESULT, logprobs=tokens, reasoning=""))
        chunks = asked.result(10)
    (found,) = [chunk.choices[0] for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert found.delta.content == "It rains."
    assert [one.logprob for one in found.logprobs.content] == [-0.5, -2.0]
    assert [one.token for one in found.logprobs.content[0].top_logprobs] == ["It", "So"]


def test_the_last_model_is_known_for_a_while() -> None:
    """A call without a model is for it, as long as a worker that ended counts as away."""
    calls = Calls(Mock(), Stopping())
    assert calls.last_model == ""
    calls._last = "m", time.monotonic()
    assert calls.last_model == "m"
    calls._last = "m", time.monotonic() - LAST_SECONDS
    assert calls.last_model == ""


@pytest.mark.parametrize("has_usage", [False, True])
def test_the_end_of_a_stream_says_what_made_it(has_usage: bool) -> None:
    """Each chunk that has a reason of the end, and the counts of tokens. Times stay the same."""
    result = Result("r", "chat", "ok", "m", "a", "stop", Usage(1, 1), created=7, scheme="affine8")
    result = replace(result, fingerprint="f" * 64)
    chunks = Chunks("r", "chat", "m", has_usage=has_usage)
    written = [*chunks.pieces(0, [Piece("a")]), *chunks.end(0, result), *chunks.last([result])]
    found = [json.loads(one.removeprefix(b"data: ")) for one in written[:-1]]
    mark = made_by(result)["system_fingerprint"]
    has_ended = [not one["choices"] or one["choices"][0]["finish_reason"] for one in found]
    assert [one.get("system_fingerprint") for one in found] == [
        mark if is_end else None for is_end in has_ended
    ]
    assert any(has_ended) and len({one["created"] for one in found}) == 1


def test_a_stream_says_that_it_goes_on(gateway: Gateway, worker: LiveWorker) -> None:
    """While no piece comes, comments do. So no proxy gives up, and the headers are not late."""
    body = {"model": "m", "prompt": "hi", "stream": True}
    with stream("POST", f"{gateway.url}/completions", json=body, timeout=10) as response:
        row, _ = worker.take()
        lines = response.iter_lines()
        assert next(lines) == ": the answer is under way"
        worker.end(row, replace(RESULT, endpoint="completion", reasoning=""))
        events = [line for line in lines if line.startswith("data: ")]
    assert '"text":"It rains."' in events[0] and events[-1] == "data: [DONE]"
    assert response.headers["content-type"].startswith("text/event-stream")


def test_workers_that_lack_an_ability_are_named(gateway: Gateway, worker: LiveWorker) -> None:
    """The model is served, so the error says what its workers lack, and not that it is unknown."""
    record = f"rq:worker:{worker.name}"
    worker.connection.hset(record, mapping={"bkv_abilities": "salt", "bkv_slots": 4})
    with asking(gateway, tools=TOOLS) as asked, pytest.raises(openai.BadRequestError) as caught:
        asked.result(10)
    assert caught.value.code == "unsupported_parameter"
    assert "the workers of m do not have what this request needs (tools" in caught.value.message


def test_a_worker_that_begins_is_not_blamed(gateway: Gateway, worker: LiveWorker) -> None:
    """RQ's record is there before the worker has written what it can do: the client tries again."""
    worker.connection.hdel(f"rq:worker:{worker.name}", "bkv_live", "bkv_slots")
    with asking(gateway) as asked, pytest.raises(openai.InternalServerError) as caught:
        asked.result(10)
    assert caught.value.code == "model_loading"


def test_a_worker_that_has_just_begun_is_not_blamed(gateway: Gateway, worker: LiveWorker) -> None:
    """It can do what the request needs by the time the refusal is explained: to be tried again."""
    record = f"rq:worker:{worker.name}"
    worker.connection.hset(record, mapping={"bkv_abilities": "fields salt", "bkv_slots": 4})
    worker.connection.hdel(record, "bkv_live")
    with asking(gateway) as asked, pytest.raises(openai.InternalServerError) as caught:
        asked.result(10)
    assert caught.value.code == "model_loading"


def test_a_key_has_so_many_calls_open(
    gateway: Gateway, worker: LiveWorker, redis_connection: Redis
) -> None:
    """Beyond its rows a call is 429, and one with more rows 413. An end makes room, as does a
    client that leaves."""
    key = KeyStore(redis_connection).add("a", max_rows=2)
    with gateway.client(key, max_retries=0, timeout=20) as client, ThreadPoolExecutor(1) as pool:
        ask = partial(client.completions.create, model="m")

        def is_free() -> bool:
            try:
                ask(prompt="x", stream=True).close()
            except openai.RateLimitError as fault:
                assert fault.code == "too_many_open_rows" and "waits for 2" in fault.message
                return False
            return True

        waiting = pool.submit(ask, prompt="one")
        row, _ = worker.take()
        stream = ask(prompt="two", stream=True)
        assert not is_free()
        with pytest.raises(openai.APIStatusError, match="has 3 rows"):
            ask(prompt=["a", "b", "c"])
        worker.end(row, replace(RESULT, endpoint="completion", reasoning=""))
        assert waiting.result(20).choices
        wait_until(is_free)
        stream.close()
        wait_until(lambda: is_free() and is_free())


def test_a_model_that_a_host_may_load_is_wished_for(gateway: Gateway, worker: LiveWorker) -> None:
    """Nobody holds it: the client is to try again, and the host learns that somebody waits."""
    fields = {"birth": "now", "queues": "batchkv:other", "bkv_models": '["other"]'}
    HostMoves(worker.connection).beat("host", fields, 60)
    with gateway.client(max_retries=0, timeout=20) as client:
        assert "other" in [one.id for one in client.models.list()]
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_loading"
    assert "retry-after" in caught.value.response.headers
    view = Watcher(worker.connection, "host", ["other"]).look(set())
    assert view.queues["other"].num_live == 1


def test_a_model_that_a_host_failed_to_load_is_not_promised(
    gateway: Gateway, worker: LiveWorker
) -> None:
    """The client learns where the reason stands, and the list of models leaves it out."""
    fields = {"birth": "now", "queues": "batchkv:other", "bkv_models": '["other"]'}
    HostMoves(worker.connection).beat("host", {**fields, "bkv_refused": '["other"]'}, 60)
    with gateway.client(max_retries=0, timeout=20) as client:
        assert "other" not in [one.id for one in client.models.list()]
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_unavailable"
    assert "host failed to load other: the log there says why" in str(caught.value)
    view = Watcher(worker.connection, "host", ["other"]).look(set())
    assert view.queues["other"].num_live == 1, "the host is to try again"


def test_a_failure_in_the_middle_is_the_last_event(gateway: Gateway, worker: LiveWorker) -> None:
    """OpenAI's client raises it. A row whose worker has gone ends so, too, within seconds."""
    failed = replace(RESULT, outcome="failed", error=("engine_error", "so it is"))
    for is_lost in (False, True):
        with asking(gateway, stream=True) as asked:
            row, _ = worker.take()
            worker.send(row, "d", "It ")
            if is_lost:
                worker.connection.hset(f"batchkv:live:row:{row.pulled.lease.job_id}", "until", 1)
            else:
                worker.end(row, failed)
            with pytest.raises(openai.APIError, match="ask again" if is_lost else "so it is"):
                asked.result(20)


def test_a_gateway_that_stops_ends_its_answers(
    redis_server: RedisServer, worker: LiveWorker, tmp_path: Path
) -> None:
    """After SIGTERM an answer has time to end. Then a stream gets an error, a request 503."""
    with running_gateway(redis_server.url, tmp_path / "home", GRACE_SECONDS=2) as stopping:
        with (
            asking(stopping, stream=True) as ending,
            asking(stopping, stream=True) as stream,
            asking(stopping) as whole,
        ):
            rows = [worker.take() for _ in range(3)]
            for row, _ in rows:
                worker.send(row, "d", "It ")
            quick = next(row for row, _ in rows if row.pieces == "all")
            stopping.process.terminate()
            worker.end(quick, RESULT)
            ended = [future.exception(15) for future in (ending, stream)]
            assert sorted(map(str, ended)) == ["None", "the gateway stops: ask again"]
            fault = whole.exception(15)
            assert isinstance(fault, openai.InternalServerError) and fault.status_code == 503
            assert fault.response.headers["x-should-retry"] == "true"
        stopping.process.wait(15)
    assert not list(worker.connection.scan_iter("batchkv:live:row:*"))
    assert "Traceback" not in stopping.log.read_text()
