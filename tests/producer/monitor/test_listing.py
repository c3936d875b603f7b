"""Many batches are listed newest first, in pages, in bounded memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.cli import cli
from batchkv_producer.monitor import listing
from batchkv_producer.wire import redis_keys


@pytest.fixture
def at_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)


def batchkv(*arguments: object) -> Result:
    found = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert found.exit_code == 0, found.output
    return found


def make_batches(connection: Redis, count: int, **more: Any) -> list[str]:
    """Batches that are done, the newest last."""
    fields: dict[str, Any] = {"digest": "0" * 64, "name": "p.txt", "model": "m", "queue": "q"}
    fields |= {"total": 1, "num_chunks": 1, "chunks": 1, "ok": 1, "created": 1_700_000_000, **more}
    ids = [f"{number:016x}" for number in range(count)]
    for start in range(0, count, 1000):
        with connection.pipeline(transaction=False) as pipeline:
            for number, batch_id in enumerate(ids[start : start + 1000], start):
                pipeline.hset(redis_keys.batch(batch_id), mapping=fields)
                pipeline.hset(redis_keys.results(batch_id), "1", b"x")
                pipeline.zadd(redis_keys.BATCHES, {batch_id: 1_700_000_000 + number})
            pipeline.execute()
    return ids


@pytest.mark.usefixtures("at_server")
def test_list_shows_newest(redis_connection: Redis) -> None:
    """`list` and `status` show the newest 50 batches, and the number of the others."""
    ids = make_batches(redis_connection, 60)
    for command in ("list", "status"):
        text = batchkv(command).stdout
        assert ids[-1] in text and ids[10] in text and ids[9] not in text
        assert "10 older batches are not shown: --limit N shows the newest N" in text
        # The line of the server's memory names the largest batches, whichever they are.
        some = batchkv(command, "--limit", 3).stdout.partition("server's memory")[0]
        assert ids[57] in some and ids[56] not in some and "57 older" in some
        whole = batchkv(command, "--limit", 0).stdout
        assert ids[0] in whole and "older" not in whole


@pytest.mark.usefixtures("at_server")
def test_list_as_json_has_all(redis_connection: Redis) -> None:
    """``--json`` lists all batches, or as many as --limit says, as one valid document."""
    ids = make_batches(redis_connection, 120)
    listed = json.loads(batchkv("list", "--json").stdout)
    assert [each["batch_id"] for each in listed] == ids[::-1]
    overview = json.loads(batchkv("status", "--json").stdout)
    assert len(overview["batches"]) == 120 and overview["server"]["used_bytes"] > 0
    some = json.loads(batchkv("list", "--json", "--limit", "2").stdout)
    assert [each["batch_id"] for each in some] == ids[:-3:-1]


@pytest.mark.usefixtures("at_server")
def test_list_of_nothing_is_json(redis_connection: Redis) -> None:
    """The list of an empty server is empty, also as JSON."""
    assert json.loads(batchkv("list", "--json").stdout) == []
    assert json.loads(batchkv("status", "--json").stdout)["batches"] == []


@pytest.mark.usefixtures("at_server")
def test_limit_with_an_id_is_refused() -> None:
    """``status ID`` shows one batch and refuses --limit."""
    found = CliRunner().invoke(cli, ["status", "0123456789abcdef", "--limit", "3"])
    assert found.exit_code == 2 and "--limit is for the list" in found.output


def test_pages_miss_none(redis_connection: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """If batches come and go between two pages, every other batch is still listed exactly once."""
    monkeypatch.setattr(listing, "ID_PAGE", 40)
    monkeypatch.setattr(listing, "OVERLAP", 10)
    ids = make_batches(redis_connection, 100)
    seen: list[str] = []
    for page in listing.newest_first(redis_connection):
        seen += [batch.batch_id for batch in page]
        gone = [batch.batch_id for batch in page[:5]]
        redis_connection.zrem(redis_keys.BATCHES, *gone)
        redis_connection.zadd(redis_keys.BATCHES, {f"{len(seen):015x}f": time.time()})
    assert sorted(seen) == ids


def test_memory_of_list_is_bounded(redis_connection: Redis) -> None:
    """Listing many batches takes no more memory than listing some."""
    make_batches(redis_connection, 2000)
    client = Client(redis_connection)
    tracemalloc.start()
    try:
        assert sum(1 for _ in client.each_batch()) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_500_000  # more than twice as much, if all were read at once


def test_count_leaves_out_what_expired(redis_connection: Redis) -> None:
    """Batches whose results have expired are neither counted nor listed."""
    ids = make_batches(redis_connection, 9)
    redis_connection.delete(*map(redis_keys.batch, ids[:4]))
    client = Client(redis_connection)
    assert client.count_batches() == 5 and len(client.list_batches(limit=9)) == 5


@pytest.mark.usefixtures("at_server")
def test_time_left_counts_batches_not_shown(redis_connection: Redis) -> None:
    """The time left of a batch includes all batches before it in the queue, shown or not."""
    open_rows = {"total": 11, "completion_tokens": 100}
    ids = make_batches(redis_connection, 3, **open_rows)
    key = redis_keys.worker("w")
    worker = {"birth": "x", "queues": "batchkv:q", "bkv_tokens_per_second": "10"}
    for batch_id in ids:
        redis_connection.hset(redis_keys.batch(batch_id), "queue", "batchkv:q")
    redis_connection.hset(key, mapping=worker)  # type: ignore[arg-type]
    redis_connection.sadd("rq:workers", key)
    redis_connection.sadd("rq:workers:batchkv:q", key)
    redis_connection.rpush(redis_keys.queue("batchkv:q"), f"{ids[0]}-2")
    whole = json.loads(batchkv("list", "--json").stdout)
    newest = json.loads(batchkv("list", "--json", "--limit", "1").stdout)
    assert newest[0]["seconds_left"] == whole[0]["seconds_left"] > 0
