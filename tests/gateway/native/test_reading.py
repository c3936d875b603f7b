"""The API of batchkv itself: the routes that read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from httpx2 import Client as HttpClient
from openai import OpenAI
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.native.listing import Listing
from batchkv_gateway.native.owners import Owners
from batchkv_gateway.native.rows import page_of_rows
from batchkv_producer.cli import cli
from batchkv_producer.client import Client
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.monitor.status import BatchStatus, read_batch
from batchkv_producer.wire import redis_keys as queue_keys
from support.gateway import Gateway, chat_file, working

MANY = 1_000_000


@pytest.fixture
def http(gateway: Gateway, redis_connection: Redis) -> Iterator[HttpClient]:
    """A client of the native API, on an empty server."""
    root = gateway.url.removesuffix("/v1") + "/batchkv/v1"
    with HttpClient(base_url=root, timeout=20) as found:
        yield found


def submitted(connection: Redis, *texts: str) -> str:
    """A batch of the CLI's submit."""
    rows = [{"custom_id": f"row {text}", "prompt": text} for text in texts]
    return Client(connection).submit(rows, model="fake").batch_id


def cli_json(url: str, *words: str) -> Any:
    """What a command prints with ``--json``."""
    done = CliRunner().invoke(cli, [*words, "--json", "--url", url], prog_name="batchkv")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def done(client: Client, batch_id: str) -> None:
    """Let a fake worker end a batch."""
    assert client.wait(batch_id, timeout_seconds=20).is_done


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


MORE = ("openai_id", "openai_status", "output_file_id", "error_file_id", "in_queue", "owner")


def test_facts_are_those_of_the_commands(
    http: HttpClient, redis_url: str, redis_connection: Redis
) -> None:
    """A batch, the list and the workers have the fields that --json prints."""
    batch = submitted(redis_connection, "a", "b")
    with working(redis_url):
        done(Client(redis_connection), batch)
        found = http.get(f"/batches/{batch}").json()
        same = cli_json(redis_url, "status", batch)
        assert without(found, *MORE, "read_at") == without(same, "read_at")
        [listed] = http.get("/batches").json()["data"]
        [same] = cli_json(redis_url, "list")
        assert without(listed, *MORE, "read_at") == without(same, "read_at")
        [worker] = http.get("/workers").json()["data"]
        assert worker["name"] == cli_json(redis_url, "workers")[0]["name"]
    report = http.get(f"/batches/{batch}?facts=1").json()["report"]
    assert report["num_read"] == 2 and report["workers"][0]["name"].startswith("fake")
    assert http.get(f"/batches/{batch[:6]}").json()["batch_id"] == batch
    assert http.get("/server").json()["memory"]["used_bytes"] > 0
    assert http.get("/samples?queue=rq:queue:none").json()["data"] == []


def test_following_over_a_gateway_says_that_nobody_serves(
    http: HttpClient, redis_url: str, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``results --follow`` says it before the rows come, each of which is printed once."""
    batch = submitted(redis_connection, "a", "b")
    real = Delays.look

    def look(delays: Delays, status: BatchStatus) -> str:
        words = real(delays, status)
        with working(redis_url):
            done(Client(redis_connection), batch)
        return words

    monkeypatch.setattr(Delays, "look", look)
    url = str(http.base_url).partition("/batchkv")[0]
    told = CliRunner().invoke(cli, ["results", batch, "--follow", "--url", url])
    assert told.exit_code == 0 and told.stdout.count("\n") == 2
    assert told.stderr.count("nobody serves the queue") == 1


def test_results_go_on_after_a_position(
    http: HttpClient, redis_url: str, redis_connection: Redis
) -> None:
    """Lines are those of OUT; a client goes on after the rows that it has; rows can be chosen."""
    batch = submitted(redis_connection, "a", "b", "c", "d")
    client = Client(redis_connection)
    with working(redis_url), http.stream("GET", f"/batches/{batch}/results?follow=1") as stream:
        lines = [line for line in stream.iter_lines() if line]
    rows = [json.loads(line) for line in lines]
    assert sorted(row["line"] for row in rows) == [1, 2, 3, 4]
    assert [row["position"] for row in rows] == [0, 1, 2, 3]
    printed = CliRunner().invoke(cli, ["results", batch, "--url", redis_url]).stdout.splitlines()
    assert [json.loads(line) for line in printed] == [
        without(row, "line", "position", "outcome") for row in rows
    ]
    assert lines[0].endswith(printed[0][1:])
    later = http.get(f"/batches/{batch}/results?after=3").text.splitlines()
    assert later == lines[3:]
    ordered = http.get(f"/batches/{batch}/results?order=input&after=1&limit=2").text.splitlines()
    assert [json.loads(line)["line"] for line in ordered] == [2, 3]
    chosen = http.get(f"/batches/{batch}/results?lines=4,1,9").text.splitlines()
    assert [json.loads(line)["line"] for line in chosen] == [4, 1]
    assert http.get(f"/batches/{batch}/results?outcome=failed").text == ""
    for query in ("after=-1", "follow=2", "follow=1&order=input", "lines=x", "form=a", "other=1"):
        assert http.get(f"/batches/{batch}/results?{query}").status_code == 400, query
    page = http.get(f"/batches/{batch}/rows?limit=3").json()
    assert [row["line"] for row in page["data"]] == [1, 2, 3] and page["next"] == 3
    assert page["data"][0]["answer"] == "answer to a"
    assert page["data"][0]["outcome"] == "ok" and page["data"][0]["worker"].startswith("fake")
    assert client.forget(batch) == batch
    assert http.get(f"/batches/{batch}/results").status_code == 404


def test_rows_that_wait_or_failed_are_shown(http: HttpClient, redis_connection: Redis) -> None:
    """Rows without a result wait; wrong ones have their error; a long prompt is shortened."""
    rows: list[dict[str, Any]] = [{"prompt": "x" * 1000}, {"prompt": 5}]
    batch = Client(redis_connection).submit(rows, model="fake").batch_id
    first, second = http.get(f"/batches/{batch}/rows").json()["data"]
    assert first["outcome"] == "queued" and len(first["prompt"]) < 400
    assert second["outcome"] == "failed" and second["error"]["code"] == "invalid_request"
    [full] = http.get(f"/batches/{batch}/rows?full=1&limit=1").json()["data"]
    assert full["prompt"] == "x" * 1000
    [only] = http.get(f"/batches/{batch}/rows?outcome=failed").json()["data"]
    assert only["line"] == 2
    [failure] = http.get(f"/batches/{batch}/failures").json()["data"]
    assert failure["lines"] == [2]
    assert http.get(f"/batches/{batch}/unanswered").json()["wrong"] == 1
    assert http.get(f"/batches/{batch}/jobs").text.split() == [f"{batch}-1", f"{batch}-2"]
    assert http.get(f"/batches/{batch}/jobs/1").json()["status"] == "queued"
    assert http.get(f"/batches/{batch}/jobs/7").status_code == 404


def test_the_first_page_of_a_large_batch_reads_little(redis_connection: Redis) -> None:
    """The first page of a million rows needs few calls, also while rows are searched."""
    batch = submitted(redis_connection, "a")
    status = replace(read_batch(redis_connection, batch), total=MANY, last_line=MANY)
    redis_connection.config_resetstat()
    page = page_of_rows(redis_connection, status, 0, 100, "ok", full=False)
    plain = page_of_rows(redis_connection, status, 0, 100, "", full=False)
    stats: Any = redis_connection.info("commandstats")
    assert page.rows == [] and page.next_line == 10_000
    assert len(plain.rows) == 1 and plain.next_line == 100
    assert stats["cmdstat_evalsha"]["calls"] < 60


def test_batches_are_listed_in_pages(
    gateway: Gateway,
    http: HttpClient,
    client: OpenAI,
    redis_url: str,
    redis_connection: Redis,
) -> None:
    """Pages merge the CLI's batches with OpenAI's. One whose rows are gone is listed from its
    record."""
    with working(redis_url):
        file = client.files.create(file=chat_file("a", "b"), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        url = f"/batches/{made.id}"
        for _ in range(200):
            found = http.get(url).json()
            assert "openai_status" in found, (found, gateway.log.read_text())
            if found["openai_status"] == "completed" and not found["in_queue"]:
                break
            time.sleep(0.05)
    assert found["total"] == found["ok"] == 2 and found["is_done"]
    own = [submitted(redis_connection, text) for text in "cde"]
    for place, batch in enumerate(own):  # all in other seconds
        redis_connection.zadd(queue_keys.BATCHES, {batch: 2_000_000_000 + place})
    seen, after = [], ""
    while True:
        page = http.get(f"/batches?limit=2&count=1&after={after}").json()
        seen += page["data"]
        if not page["has_more"]:
            break
        after = page["next"]
    assert [item["batch_id"] for item in seen] == [*reversed(own), found["batch_id"]]
    assert seen[-1]["openai_id"] == made.id and not seen[-1]["in_queue"]
    assert page["total"] == 4
    in_file = http.get(f"/batches/{made.id}/results").text.splitlines()
    assert [json.loads(line)["line"] for line in in_file] == [1, 2]
    assert http.get(f"/batches?after={own[0]}").json()["data"][0]["openai_id"] == made.id
    assert http.get("/batches?after=zz").status_code == 400


def test_keys_see_their_own_batches(
    gateway: Gateway, http: HttpClient, redis_connection: Redis
) -> None:
    """Another's batch is like one that does not exist. An admin's key sees all."""
    keys = KeyStore(redis_connection)
    mine, others, admin = (keys.add(name, is_admin=name == "admin") for name in ("a", "b", "admin"))
    batch, hidden = submitted(redis_connection, "a"), submitted(redis_connection, "b")
    caller = Caller(mine[4:12])
    Owners(redis_connection).add(caller, batch)

    def get(key: str, path: str) -> Any:
        return http.get(path, headers={"Authorization": f"Bearer {key}"})

    assert [item["batch_id"] for item in get(mine, "/batches").json()["data"]] == [batch]
    assert get(mine, f"/batches/{batch[:7]}").json()["owner"] == mine[4:12]
    for path in (f"/batches/{hidden}", f"/batches/{hidden[:6]}", f"/batches/{hidden}/rows"):
        answer = get(mine, path)
        assert answer.status_code == 404 and "no batch" in answer.json()["error"]["message"]
    absent = get(mine, "/batches/0123456789abcdef").text
    assert get(others, f"/batches/{batch}").text.replace(batch, "0123456789abcdef") == absent
    assert get(others, "/batches").json()["data"] == []
    assert len(get(admin, "/batches").json()["data"]) == 2
    assert get(mine, "/server").json()["memory"] is None
    assert http.get("/batches").status_code == 401
    Client(redis_connection).forget(batch)
    assert Listing(redis_connection).page(caller, "", 10, {}).items == []
    assert not redis_connection.exists(redis_keys.OWNERS)
