"""What the first gateway has stored goes on with this one."""

from __future__ import annotations

import json
import time
from pathlib import Path

from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from support.gateway import chat_file, running_gateway, working
from support.redis_server import RedisServer
from upgrade.stored import FIRST_GATEWAY, batch_ids, gateway_home, put_back

STATES = ("completed", "failed", "cancelled")


def wait(client: OpenAI, batch_id: str) -> Batch:
    """The batch when it is completed."""
    deadline = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("in_progress", "finalizing"), batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def custom_ids(client: OpenAI, file_id: str | None) -> list[str]:
    """Those of the lines of a file."""
    return [
        json.loads(line)["custom_id"] for line in client.files.content(str(file_id)).iter_lines()
    ]


ADDED = b',"completion_tokens_details":{"reasoning_tokens":0}'


def test_batches_of_the_first_gateway_go_on(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """Its key, files and batches are there. A batch that waited is computed; one whose files were
    being written has the same files. The same request finds the same batch."""
    known, home = batch_ids(FIRST_GATEWAY), gateway_home(tmp_path)
    put_back(FIRST_GATEWAY, redis_connection)
    before = {path.name: path.read_bytes() for path in (home / "gateway").iterdir()}
    with (
        running_gateway(redis_server.url, home) as gateway,
        gateway.client(known["key"], max_retries=0) as client,
    ):
        found = {batch.id: batch for batch in client.batches.list()}
        assert set(found) == {name for name in known.values() if name.startswith("batch_")}
        for state in STATES:
            assert found[known[state]].status == state
        failed = found[known["failed"]].errors
        assert failed and failed.data and failed.data[0].line == 1
        assert client.files.content(known["file"]).content == chat_file("unread")
        done = wait(client, known["completed"])
        assert custom_ids(client, done.output_file_id) == ["completed-1", "completed-2"]
        error_file = found[known["cancelled"]].error_file_id
        assert custom_ids(client, error_file) == ["cancelled-1", "cancelled-2"]
        again = client.batches.create(
            completion_window="24h",
            endpoint="/v1/chat/completions",
            input_file_id=done.input_file_id,
            metadata={"name": "completed"},
        )
        assert again.id == done.id
        written = wait(client, known["writing"])
        assert custom_ids(client, written.output_file_id) == ["writing-1", "writing-2"]
        with working(redis_server.url):
            waited = wait(client, known["waiting"])
        assert custom_ids(client, waited.output_file_id) == ["waiting-1", "waiting-2"]
        after = {path.name: path.read_bytes() for path in (home / "gateway").iterdir()}
        # The file that was being written is written anew: this version adds a field to its lines.
        (begun,) = before.keys() - after.keys()
        (ended,) = (name for name in after.keys() - before.keys() if b"writing-1" in after[name])
        assert before.items() - after.items() == {(begun, before[begun])}
        assert after[ended].replace(ADDED, b"") == before[begun]
        assert client.files.delete(known["file"]).deleted
        assert client.files.delete(waited.input_file_id).deleted
    assert redis_connection.zcard(redis_keys.OPEN) == 0
