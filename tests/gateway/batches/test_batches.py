"""Batches, by OpenAI's own client, with a worker that echoes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_producer import Client
from clients.openai_session import many_batches, thoughtful_batch
from support.gateway import Gateway, chat_file, chat_line, working
from support.redis_server import RedisServer

URL = "/v1/chat/completions"
OVER = ("failed", "completed", "expired", "cancelled")


@pytest.fixture
def worker(redis_server: RedisServer, client: OpenAI) -> Iterator[None]:
    """A fake worker of the model ``fake``."""
    with working(redis_server.url):
        yield


def upload(client: OpenAI, content: bytes | str) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return client.files.create(file=("rows", raw), purpose="batch").id


def create(client: OpenAI, content: bytes | str, window: str = "24h", **more: Any) -> Batch:
    return client.batches.create(
        completion_window=window,  # type: ignore[arg-type]
        endpoint=URL,
        input_file_id=upload(client, content),
        **more,
    )


def wait(
    client: OpenAI, batch_id: str, until: Callable[[Batch], bool] = lambda b: b.status in OVER
) -> Batch:
    deadline = time.monotonic() + 30
    while not until(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    Batch.model_validate(batch.model_dump(warnings="error"), strict=True)
    return batch


def lines(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed


def checked_files(client: OpenAI, batch: Batch) -> list[list[str]]:
    """The custom_ids of the output and the error file; counts equal their lines."""
    files = [lines(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    assert counts(batch) == (sum(map(len, files)), *map(len, files))
    ids = [[line["custom_id"] for line in file] for file in files]
    assert len(set(ids[0] + ids[1])) == counts(batch)[0]
    return ids


def test_a_batch_is_computed(client: OpenAI, worker: None, redis_connection: Redis) -> None:
    """Blank lines, BOM and CRLF are no rows; times, counts, usage, metadata and files are right."""
    rows = f"\ufeff{chat_line('a', 'one')}\r\n\r\n{chat_line('b', 'two')}\r\n  \n"
    made = create(client, rows, metadata={"job": "x"})
    assert (made.status, made.object, made.metadata) == ("validating", "batch", {"job": "x"})
    assert made.expires_at == made.created_at + 86_400
    done = wait(client, made.id)
    assert done.status == "completed" and done.model == "fake" and done.error_file_id is None
    assert checked_files(client, done) == [["a", "b"], []]
    (first, _) = lines(client, done.output_file_id)
    assert first["response"]["status_code"] == 200 and first["error"] is None
    answer = first["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == "answer to one"
    usage = done.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (10, 6)
    assert (usage.total_tokens, usage.input_tokens_details.cached_tokens) == (16, 2)
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert list(times) == sorted(filter(None, times))
    output = client.files.retrieve(str(done.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{done.id}_output.jsonl")
    deadline = time.monotonic() + 10
    while redis_connection.hlen(redis_keys.SPENT):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert Client(redis_connection).list_batches() == []
    assert client.files.delete(made.input_file_id).deleted


def test_a_wrong_line_fails_the_batch_with_its_number(client: OpenAI) -> None:
    """All or nothing, as OpenAI has it: each wrong line is in ``errors``, and nothing is queued."""
    other = json.dumps({**json.loads(chat_line("o")), "url": "/v1/completions"})
    wrong = [
        chat_line("a"), "{", chat_line("a"), other, chat_line("s", stream=True),
        chat_line("m", model="else"), chat_line("n", no_such_field=1),
        json.dumps({"prompt": "no url"}), "",
    ]  # fmt: skip
    done = wait(client, create(client, "\n".join(wrong)).id)
    assert done.status == "failed" and done.failed_at and done.errors
    found = {(error.line, error.code) for error in done.errors.data or []}
    assert found == {
        (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "mismatched_endpoint"),
        (5, "unsupported_parameter"), (6, "mismatched_model"), (7, "unsupported_parameter"),
        (8, "missing_required_parameter"),
    }  # fmt: skip
    lacking = next(error.message for error in done.errors.data or [] if error.line == 8)
    assert lacking == "the line has no custom_id, no method, no url, no body.model"
    params = {error.line: error.param for error in done.errors.data or []}
    assert params == {
        **{2: None, 3: "custom_id", 4: "url", 5: "body.stream"},
        **{6: "body.model", 7: "body.no_such_field", 8: "custom_id"},
    }
    assert (done.output_file_id, done.error_file_id) == (None, None)


def test_the_wrong_field_of_a_line_is_named(client: OpenAI) -> None:
    """With its path: fields of the line itself, and those of its body."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"custom_id": 5}, "custom_id"),
        ({"custom_id": "x" * 2000}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"body": "no"}, "body"),
        ({"zzz": 1}, "zzz"),
        ({"body": {"model": "fake", "messages": [], "seed": 1}}, "body.messages"),
        ({"body": {**json.loads(chat_line("a"))["body"], "top_p": 2}}, "body.top_p"),
    ]
    rows = [
        json.dumps({**json.loads(chat_line(f"r{n}")), **more}) for n, (more, _) in enumerate(wrong)
    ]
    done = wait(client, create(client, "\n".join(rows)).id)
    assert done.errors and done.errors.data
    assert [error.param for error in done.errors.data] == [param for _, param in wrong]


def test_files_without_rows_or_with_too_many_fail(client: OpenAI) -> None:
    """No row, more rows than the limit, and bytes that are no text fail with a code."""
    for content, code in ((b"\n \n", "empty_file"), (b"{}\n" * 51, "too_many_tasks")):
        done = wait(client, create(client, content).id)
        assert done.errors and (done.errors.data or [])[0].code == code
    done = wait(client, create(client, b"\x1f\x8b\x00\x01\n").id)
    assert done.status == "failed"


def test_wrong_rows_fail_alone_if_asked(client: OpenAI, worker: None) -> None:
    """With ``x-batchkv-validation: per-row`` the error file has them, with the status 400."""
    other = json.dumps(
        {"custom_id": "o", "url": "/v1/completions", "body": {"model": "fake", "prompt": "x"}}
    )
    rows = "\n".join([chat_line("a"), "{", chat_line("a"), other, chat_line("b")])
    header = {"x-batchkv-validation": "per-row"}
    done = wait(client, create(client, rows, extra_headers=header).id)
    assert (done.status, counts(done)) == ("completed", (5, 2, 3))
    refused = lines(client, done.error_file_id)
    assert {line["response"]["status_code"] for line in refused} == {400}
    assert "/v1/chat/completions" in refused[-1]["response"]["body"]["error"]["message"]
    with pytest.raises(openai.BadRequestError):
        create(client, rows, extra_headers={"x-batchkv-validation": "none"})


@pytest.mark.parametrize(
    ("lines_", "code", "line", "words"),
    [
        (("a", "b m2"), "mismatched_model", 2, "different models, .*: split the file$"),
        (("a", "b -"), "missing_required_parameter", None, ": name it in each line$"),
        (("a -", "b -"), "missing_required_parameter", None, "^no line names a model$"),
    ],
)
def test_rows_that_are_checked_alone_have_one_model(
    client: OpenAI, lines_: tuple[str, ...], code: str, line: int | None, words: str
) -> None:
    """A batch has one. The error names no option of a command that the client does not have."""
    rows = []
    for name, _, model in (one.partition(" ") for one in lines_):
        row = json.loads(chat_line(name))
        row["body"]["model"] = model or "fake"
        if model == "-":
            del row["body"]["model"]
        rows.append(json.dumps(row))
    header = {"x-batchkv-validation": "per-row"}
    done = wait(client, create(client, "\n".join(rows), extra_headers=header).id)
    assert done.errors and done.errors.data
    (found,) = done.errors.data
    assert (found.code, found.line, found.param) == (code, line, "body.model")
    assert re.search(words, found.message or "") and "-m" not in (found.message or "")


def test_a_batch_whose_rows_all_fail_has_only_an_error_file(
    client: OpenAI, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is completed; ``output_file_id`` is null."""
    monkeypatch.setenv("FAKE_FAIL", "a")
    done = wait(client, create(client, chat_file("a")).id)
    assert (done.status, done.output_file_id) == ("completed", None)
    (line,) = lines(client, done.error_file_id)
    assert line["response"] is None and line["error"]["code"] == "engine_error"


def test_the_same_request_again_is_the_same_batch(
    client: OpenAI, worker: None, redis_connection: Redis
) -> None:
    """A retried create finds its batch; other metadata make another, computed on its own."""
    first = create(client, chat_file("a"))
    again = create(client, chat_file("a"))
    other = create(client, chat_file("a"), metadata={"n": "2"})
    assert first.id == again.id != other.id
    done = [wait(client, each.id) for each in (first, other)]
    assert done[0].output_file_id != done[1].output_file_id
    assert [each.status for each in done] == ["completed", "completed"]
    keys = [redis_keys.batch(each.id) for each in done]
    assert len({redis_connection.hget(key, "queued_id") for key in keys}) == 2
    assert create(client, chat_file("a")).id == first.id
    client.files.delete(str(done[0].output_file_id))
    assert create(client, chat_file("a")).id not in (first.id, other.id)


def test_cancel_leaves_every_line_in_one_file(
    client: OpenAI, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have not ended are dropped; a repeated cancel is no error; a file in use is 409."""
    monkeypatch.setenv("FAKE_DELAY", "0.1")
    names = [f"r{number}" for number in range(40)]
    batch = create(client, chat_file(*names))
    with working(redis_server.url):
        wait(client, batch.id, lambda b: counts(b)[1] > 0)
        with pytest.raises(openai.ConflictError) as caught:
            client.files.delete(batch.input_file_id)
        assert caught.value.code == "file_in_use"
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = wait(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at and done.cancelling_at
    answered, dropped = checked_files(client, done)
    assert answered and sorted(answered + dropped) == sorted(names)
    assert {line["error"]["code"] for line in lines(client, done.error_file_id)} == {
        "batch_cancelled"
    }
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted
    assert create(client, chat_file(*names)).id != batch.id


def test_cancel_of_a_waiting_and_of_an_ended_batch(client: OpenAI, worker: None) -> None:
    """A batch can be cancelled at once; a completed one cannot, and the client does not retry."""
    batch = create(client, chat_file("x").replace(b'"fake"', b'"nobody"'))
    client.batches.cancel(batch.id)
    assert wait(client, batch.id).status == "cancelled"
    done = wait(client, create(client, chat_file("a")).id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.cancel(done.id)
    assert caught.value.code == "batch_not_cancellable"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_an_expired_batch_keeps_its_answers(
    client: OpenAI,
    redis_connection: Redis,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that have not started by the deadline are ``batch_expired``; answers stay."""
    monkeypatch.setenv("FAKE_DELAY", "0.2")
    names = [f"r{number}" for number in range(12)]
    batch = create(client, chat_file(*names), "1h")
    assert batch.expires_at == batch.created_at + 3600
    with working(redis_server.url):
        wait(client, batch.id, lambda b: counts(b)[1] > 0)
    queued = redis_connection.hget(redis_keys.batch(batch.id), "queued_id")
    assert isinstance(queued, bytes)
    redis_connection.hset(f"batchkv:batch:{queued.decode()}", "expires", int(time.time()) - 1)
    done = wait(client, batch.id)
    assert done.status == "expired" and done.expired_at and done.finalizing_at
    answered, dropped = checked_files(client, done)
    assert answered and dropped and sorted(answered + dropped) == sorted(names)
    late = lines(client, done.error_file_id)
    assert all(line["response"] is None for line in late)
    assert {line["error"]["code"] for line in late} == {"batch_expired"}


def test_wrong_requests_are_refused(client: OpenAI) -> None:
    """Each wrong field is 400 and named; unknown files and batches are 404."""
    file_id = upload(client, chat_file("a"))
    right: dict[str, Any] = {"completion_window": "24h", "endpoint": URL, "input_file_id": file_id}
    for name, value in (
        ("completion_window", "59m"), ("completion_window", "8d"), ("completion_window", "soon"),
        ("endpoint", "/v1/embeddings"), ("metadata", {"a": "x" * 513}), ("metadata", {"a": 1}),
        ("metadata", {str(n): "" for n in range(17)}), ("output_expires_after", {"seconds": 3600}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**right, name: value})
        assert (caught.value.param or "").startswith(name)
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.batches.create(**right, extra_body={"unknown": 1})
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(**{**right, "input_file_id": "file-" + "0" * 32})
    assert missing.value.param == "input_file_id"
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_" + "0" * 32)
    with pytest.raises(openai.NotFoundError, match=r"There are .* and /v1/models"):
        client.get("/nowhere", cast_to=object)
    with pytest.raises(openai.NotFoundError, match="no /v1/responses here: use /v1/chat"):
        client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.NotFoundError, match="no /v1/embeddings here: models answer"):
        client.embeddings.create(model="m", input="Hi")
    assert client.batches.list().data == []


def test_pages_of_batches_are_exact(client: OpenAI) -> None:
    """The newest first; ``has_more`` is false on the last page; the client pages through all."""
    made = [create(client, chat_file("x"), metadata={"n": str(n)}).id for n in range(5)][::-1]
    page = client.batches.list(limit=5)
    assert ([each.id for each in page.data], page.has_more) == (made, False)
    page = client.batches.list(limit=2, after=made[0])
    assert ([each.id for each in page.data], page.has_more) == (made[1:3], True)
    assert [each.id for each in client.batches.list(limit=2)] == made


def test_output_files_expire_as_asked(
    client: OpenAI, worker: None, redis_connection: Redis
) -> None:
    """``output_expires_after`` is for both files; after that their contents are 404."""
    after = {"anchor": "created_at", "seconds": 3600}
    done = wait(client, create(client, chat_file("a"), output_expires_after=after).id)
    file = client.files.retrieve(str(done.output_file_id))
    assert file.expires_at == file.created_at + 3600
    redis_connection.hset(redis_keys.file(file.id), "expires", int(time.time()) - 1)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert wait(client, done.id).output_file_id == file.id


def test_a_batch_that_the_queue_lost_fails(client: OpenAI, redis_connection: Redis) -> None:
    """`batchkv forget` of an open batch, or a deleted content, ends it with a reason."""
    batch = create(client, chat_file("a"))
    wait(client, batch.id, lambda b: b.status == "in_progress")
    queued = redis_connection.hget(redis_keys.batch(batch.id), "queued_id")
    assert isinstance(queued, bytes)
    Client(redis_connection).forget(queued.decode())
    done = wait(client, batch.id)
    assert done.status == "failed" and done.errors
    assert (done.errors.data or [])[0].code == "batch_lost"


def test_ended_batches_are_listed_until_their_time_is_over(
    client: OpenAI, redis_connection: Redis
) -> None:
    """Then the record, its place in the list and what finds it again are deleted."""
    failed = [wait(client, create(client, b"{", metadata={"n": n}).id).id for n in "ab"]
    assert [each.id for each in client.batches.list()] == failed[::-1]
    redis_connection.zadd(redis_keys.ENDED, {failed[0]: int(time.time()) - 1})
    assert [each.id for each in client.batches.list()] == failed[1:]
    assert redis_connection.hlen(redis_keys.SAME) == 1
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(failed[0])


def test_metadata_may_be_any_text(client: OpenAI) -> None:
    """Markup, all of Unicode and half of a surrogate pair come back as they were."""
    body = {"a": "<script>\u0000\U0001f600", "b": "\ud800"}
    text = json.dumps(
        {
            "completion_window": "1h",
            "endpoint": URL,
            "input_file_id": upload(client, chat_file("x")),
            "metadata": body,
        }
    )
    made = client.post(
        "/batches",
        cast_to=object,
        content=text.encode("ascii"),
        options={"headers": {"content-type": "application/json"}},
    )
    assert isinstance(made, dict) and made["metadata"] == body


def test_usage_counts_reasoning_tokens(
    gateway: Gateway, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the rows. `make clients` does it with the included model, which thinks."""
    monkeypatch.setenv("FAKE_THOUGHT", "Hm.")
    thoughtful_batch(gateway.url, "fake")


def test_many_small_batches_end(gateway: Gateway, worker: None) -> None:
    """As inspect_ai makes them: each ends with its own answers. `make clients` has 100 of 100."""
    many_batches(gateway.url, 12, 3)


def test_models_are_those_of_workers(client: OpenAI, redis_connection: Redis) -> None:
    """``/v1/models`` lists what live workers serve, with adapters; others are 404."""
    assert client.models.list().data == []
    facts = {"birth": "2026-01-01T00:00:00Z", "queues": "batchkv:x", "bkv_model": "owner/name"}
    seen = redis_connection.time()[0]  # type: ignore[index]
    facts |= {"bkv_adapters": "tuned:00", "bkv_seen": str(seen)}
    redis_connection.hset("rq:worker:w", mapping=facts)  # type: ignore[arg-type]
    redis_connection.sadd("rq:workers", "rq:worker:w")
    assert [model.id for model in client.models.list()] == ["owner/name", "owner/name@tuned"]
    assert client.models.retrieve("owner/name@tuned").owned_by == "batchkv"
    redis_connection.hset("rq:worker:w", "death", "2026-01-01T00:00:01Z")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("owner/none")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
