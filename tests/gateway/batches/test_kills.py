"""A gateway that is killed at each step of a batch, and two gateways that share everything."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from openai import APIConnectionError
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_producer import Client
from support.gateway import Gateway, chat_file, running_gateway, working
from support.redis_server import RedisServer

STEPS = "batchkv_gateway.batches.steps:Steps"
SOON = {"LEASE_SECONDS": 0.8}  # until another gateway goes on
URL = "/v1/chat/completions"


def create(gateway: Gateway, file_id: str, job: str) -> Batch:
    with gateway.client() as client:
        return client.batches.create(
            completion_window="24h", endpoint=URL, input_file_id=file_id, metadata={"job": job}
        )


def wait(gateway: Gateway, batch_id: str) -> Batch:
    deadline = time.monotonic() + 30
    with gateway.client() as client:
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status not in ("failed", "cancelled", "expired"), batch
            assert time.monotonic() < deadline, (batch, gateway.log.read_text())
            time.sleep(0.1)
    return batch


def custom_ids(gateway: Gateway, file_id: str | None) -> list[str]:
    with gateway.client() as client:
        text = client.files.content(str(file_id)).text
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_a_batch_survives_a_kill_at_each_step(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """Killed between upload and create, before and in the submit, after it, between the files and
    Redis, and before the rows leave the queue: two gateways then end it, nothing twice or lost.
    A create that got no answer finds its batch when it is repeated."""
    url, home = redis_server.url, tmp_path / "home"
    names = [f"r{number}" for number in range(6)]
    with running_gateway(url, home, die_at=f"{STEPS}._validate", **SOON) as first:
        with first.client() as client:
            content = chat_file(*names)
            file_id = client.files.create(file=("in", content), purpose="batch").id
        with suppress(APIConnectionError):  # it may be killed before it answers
            create(first, file_id, "x")
        first.wait_killed()
    (batch_id,) = [raw.decode() for raw in redis_connection.zrange(redis_keys.OPEN, 0, -1)]
    for place in (
        "batchkv_producer.submit.enqueue:_send",  # the batch is there, its rows are not
        f"after {STEPS}._submit",
    ):
        with running_gateway(url, home, die_at=place, **SOON) as dying:
            dying.wait_killed()
    with working(url):
        with running_gateway(url, home, die_at=f"after {STEPS}._publish", **SOON) as dying:
            dying.wait_killed()
        outputs = sorted(path.name for path in (home / "gateway").glob("*.????*"))
        for place in ("read_facts", "forget_batch"):
            place = f"batchkv_gateway.batches.steps:{place}"
            with running_gateway(url, home, die_at=place, **SOON) as dying:
                dying.wait_killed()
        queued = Client(redis_connection).list_batches()
        assert [each.total for each in queued] == [len(names)]
        with running_gateway(url, home, **SOON) as one, running_gateway(url, home, **SOON) as two:
            assert create(two, file_id, "x").id == batch_id
            done = wait(one, batch_id)
            assert custom_ids(two, done.output_file_id) == names and done.error_file_id is None
            assert sorted(path.name for path in (home / "gateway").iterdir()) == outputs
            more = [create(g, file_id, f"{n}") for n in range(4) for g in (one, two)]
            assert len({each.id for each in more}) == 4
            for batch in more:
                assert custom_ids(one, wait(two, batch.id).output_file_id) == names
    assert redis_connection.zcard(redis_keys.OPEN) == 0
    assert redis_connection.hlen(redis_keys.uses(file_id)) == 0
