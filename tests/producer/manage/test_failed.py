"""``batchkv failed``: failed rows become an input file again."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.intake.formats import Row, read_rows
from batchkv_producer.manage.input_lines import input_line
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, SamplingParams, decode_job, encode_result
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.transitions import JobResult, Transitions
from support.redis_server import RedisServer

MODEL = "some/model"
QUEUE = redis_keys.queue_name(MODEL)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "Grüße 🙂"}]}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    "line",
    [
        {"custom_id": "z", "prompt": "through the template", "max_tokens": 3},
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Once"}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "p", "logprobs": 3}},
        {"custom_id": "c", "body": {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["x"]}},
        {"custom_id": "d", "body": {**CHAT, "logprobs": True, "tools": [TOOL], "seed": 7}},
        {**CHAT, "max_completion_tokens": 9, "top_k": -1, "temperature": 0, "min_p": 0.1},
        {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "repetition_penalty": 1.1},
    ],
)
def test_a_line_has_the_request_of_its_row(line: dict[str, Any]) -> None:
    """A request that is written as a line and read again is unchanged."""
    (first,) = read_rows(io.BytesIO(json.dumps(line).encode()))
    assert isinstance(first, Row)
    text = input_line(first.request, MODEL)
    (again,) = read_rows(io.BytesIO(text.encode()))
    assert isinstance(again, Row) and again.request == first.request
    assert again.model == MODEL


def test_a_system_message_of_a_flag_becomes_one_of_the_line() -> None:
    """A plain prompt with the text of --system becomes a line with messages."""
    request = Request("s", "completion", prompt="p", style="auto", system="be brief")
    body = json.loads(input_line(request, MODEL))["body"]
    assert [m["content"] for m in body["messages"]] == ["be brief", "p"]


def test_a_plain_prompt_that_must_not_think_becomes_a_message() -> None:
    """A line can have the variable of --no-thinking only beside messages."""
    off = {"enable_thinking": False}
    request = Request("a", "completion", prompt="p", style="auto", chat_template_kwargs=off)
    (again,) = read_rows(io.BytesIO(input_line(request, MODEL).encode()))
    assert isinstance(again, Row) and again.request == Request(
        "a", "chat", messages=[{"role": "user", "content": "p"}], chat_template_kwargs=off
    )


def test_failed_rows_are_printed_as_lines_that_can_be_submitted(
    redis_connection: Redis, redis_server: RedisServer, write_lines: Callable[..., Path]
) -> None:
    """They come in the order of the input, with the defaults. Rows without a line are counted."""
    client, moves = Client(redis_connection), Transitions(redis_connection)
    names = ["a", "b", "c", "d", "e"]
    source = write_lines(*({"custom_id": n, "prompt": f"to {n}"} for n in names), "{broken")
    defaults = SamplingParams(max_tokens=9)
    batch = client.submit(source, model=MODEL, defaults=defaults).batch_id
    for outcome, count in (("ok", 1), ("failed", 3)):
        endings = []
        for row in moves.pull(QUEUE, "w", count, 60):
            request = decode_job(row.data)
            error = ("engine_error", "it broke") if outcome == "failed" else None
            result = RowResult(request.custom_id, "completion", outcome, error=error)  # type: ignore[arg-type]
            endings.append(JobResult(row.lease, outcome, encode_result(result)))
        moves.finish(QUEUE, "w", endings)
    client.cancel(batch)

    def failed(*arguments: str) -> Result:
        runner = CliRunner(env={"BATCHKV_REDIS_URL": redis_server.url})
        return runner.invoke(cli, ["failed", batch, *arguments])

    found = failed()
    assert found.exit_code == 1
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["custom_id"] for line in lines] == ["b", "c", "d"]
    assert lines[0] == {"custom_id": "b", "model": MODEL, "prompt": "to b", "max_tokens": 9}
    assert "3 rows of batch" in found.stderr and "1 row is wrong in the input" in found.stderr
    canceled = failed("--canceled").stdout.splitlines()
    assert [json.loads(line)["custom_id"] for line in canceled] == ["b", "c", "d", "e"]
    again = client.submit(write_lines(*lines, name="bad.jsonl"))
    assert (again.model, again.num_jobs, again.num_bad) == (MODEL, 3, 0)
    # As a worker of an older version ends a row that it does not understand:
    refused = RowResult("c", "completion", "failed", error=("unsupported_parameter", "style"))
    redis_connection.hset(redis_keys.results(batch), "3", encode_result(refused))
    assert [json.loads(line)["custom_id"] for line in failed().stdout.splitlines()] == [*"bcd"]
    redis_connection.hset(redis_keys.results(batch), "3", encode_result(result))
    redis_connection.delete(f"rq:job:{batch}-3")
    found = failed()
    assert [json.loads(line)["custom_id"] for line in found.stdout.splitlines()] == ["b", "d"]
    assert f"1 row has no job in Redis any more: `batchkv retry {batch} --from" in found.stderr
