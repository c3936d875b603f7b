"""Limits of rows and bytes of a key, and private keys."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.errors import ApiError
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.quotas import Quotas
from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.intake.source import Inputs
from batchkv_producer.manage.cancel_retry import cancel_batch
from batchkv_producer.monitor.status import read_batch
from batchkv_producer.submit import submission
from support.gateway import Gateway, chat_file, working
from support.redis_server import RedisServer
from support.tiny_worker import COMMAND_CLASS
from support.worker_harness import WorkerProcess, workers

URL = "/v1/chat/completions"


def create(client: OpenAI, content: bytes, number: int = 0, endpoint: str = URL) -> Batch:
    file = client.files.create(file=("rows", content), purpose="batch")
    return client.batches.create(
        completion_window="24h",
        endpoint=endpoint,  # type: ignore[arg-type]
        input_file_id=file.id,
        metadata={"number": str(number)},
    )


def wait(client: OpenAI, batch_id: str, status: str) -> Batch:
    deadline = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch_id)).status != status:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def rows(count: int) -> bytes:
    return chat_file(*map(str, range(count)))


def test_a_key_has_at_most_its_rows_open(
    gateway: Gateway, redis_server: RedisServer, redis_connection: Redis
) -> None:
    """Of many batches at once as many are made as fit. Ended and cancelled ones make room."""
    key = KeyStore(redis_connection).add("a", max_rows=10)
    with gateway.client(key, max_retries=0) as client:
        file = client.files.create(file=("rows", rows(3)), purpose="batch")

        def one(number: int) -> Batch | str:
            try:
                return client.batches.create(
                    completion_window="24h",
                    endpoint=URL,
                    input_file_id=file.id,
                    metadata={"number": str(number)},
                )
            except openai.RateLimitError as fault:
                assert fault.code == "too_many_open_rows" and "10 rows" in fault.message
                return "full"

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(one, range(8)))
        made = [each for each in found if isinstance(each, Batch)]
        assert len(made) == 3 and found.count("full") == 5
        again = int((made[0].metadata or {})["number"])
        same = one(again)
        assert isinstance(same, Batch) and same.id == made[0].id
        with pytest.raises(openai.APIStatusError) as caught:
            create(client, rows(11))
        assert caught.value.status_code == 413 and "split" in caught.value.message
        client.batches.cancel(made[0].id)
        wait(client, made[0].id, "cancelled")
        assert isinstance(one(20), Batch) and one(21) == "full"
        with working(redis_server.url):
            wait(client, made[1].id, "completed")
            wait(client, made[2].id, "completed")
        assert isinstance(one(22), Batch)
    assert len(redis_connection.hgetall(redis_keys.open_rows(key[4:12]))) == 1  # type: ignore[arg-type]


def test_reservations_that_nobody_ended_are_found(redis_connection: Redis, tmp_path: Path) -> None:
    """Rows that have ended, batches that are over and submits that never came are not counted."""
    quotas, caller = Quotas(redis_connection), Caller("o", max_rows=10)
    key = redis_keys.open_rows("o")
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows(6))

    def reserve(name: str, count: int) -> bool:
        try:
            quotas.reserve_rows(caller, name, count)
        except ApiError:
            return False
        return True

    def identified(queued_id: str, *_: object) -> None:
        quotas.reserve_rows(caller, queued_id, 6)

    made = submission.submit(redis_connection, Inputs.of(path), on_identified=identified)
    assert not reserve("b", 5) and reserve("b", 4)
    assert reserve("b", 3) and not reserve("c", 2)  # the second replaces the first
    quotas.release_rows(caller, "b")
    cancel_batch(redis_connection, read_batch(redis_connection, made.batch_id))
    assert reserve("c", 10) and redis_connection.hkeys(key) == [b"c"]
    redis_connection.hset(key, "c", "10 1700000000")  # its submit was killed an hour ago
    assert reserve("d", 10) and redis_connection.hkeys(key) == [b"d"]
    redis_connection.delete(key)
    redis_connection.hset(key, f"batch_{'0' * 32}", 10)  # a record that is gone
    assert reserve("e", 10) and redis_connection.hkeys(key) == [b"e"]
    quotas.reserve_rows(Caller("another"), "f", 10**9)
    assert quotas.ended(Caller("another")) == {}
    assert not redis_connection.exists(redis_keys.open_rows("another"))


def test_a_key_keeps_at_most_its_bytes(
    gateway: Gateway, home: Path, redis_connection: Redis
) -> None:
    """Of many uploads at once as many are kept as fit; a refused one leaves nothing behind."""
    key = KeyStore(redis_connection).add("a", max_bytes=50_000)
    before = len(list((home / "gateway").iterdir()))
    with gateway.client(key, max_retries=0) as client:

        def one(size: int) -> str:
            try:
                return client.files.create(file=("rows", b"x" * size), purpose="batch").id
            except openai.APIStatusError as fault:
                assert fault.status_code == 413 and "50,000 bytes" in fault.message
                return ""

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(one, [15_000] * 8))
        kept = [file_id for file_id in found if file_id]
        assert len(kept) == 3 and len(client.files.list().data) == 3
        assert len(list((home / "gateway").iterdir())) == before + 3
        assert one(150_000) == "" and one(5_000)
        client.files.delete(kept[0])
        assert one(15_000) and one(1) == ""
    assert redis_connection.zcard(redis_keys.PENDING) == 0


def test_no_private_key_learns_what_another_sent(
    gateway: Gateway, redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """A real worker: a private key has hits in its own prompts alone, and others none in them."""
    rng = random.Random(1)
    prompt = " ".join(str(rng.randrange(64)) for _ in range(600))
    body = {"model": "fake", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    content = json.dumps(line).encode()
    keys = KeyStore(redis_connection)
    made = {name: keys.add(name, is_private=name != "public") for name in ("one", "two", "public")}
    found: list[Any] = []
    worker = WorkerProcess(redis_server.url, tmp_path / "log", worker_class=COMMAND_CLASS)
    with workers(worker):
        order = ("one", "two", "public", "one")
        for number, name in enumerate(order):
            with gateway.client(made[name], max_retries=0) as client:
                batch_id = create(client, content, number, "/v1/completions").id
                batch = wait(client, batch_id, "completed")
            assert batch.usage is not None and batch.request_counts is not None
            assert batch.request_counts.completed == 1, worker.said
            found.append(batch.usage.input_tokens_details.cached_tokens)
    assert found == [0, 0, 0, 512]
