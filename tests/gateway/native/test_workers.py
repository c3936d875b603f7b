"""The routes that manage workers, and what a row shows of messages."""

from __future__ import annotations

from httpx2 import Client as HttpClient
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.client import Client
from batchkv_producer.manage import drain
from batchkv_producer.wire import redis_keys
from support.gateway import Gateway

API = "/batchkv/v1"


def test_an_admin_drains_and_resumes_workers(gateway: Gateway, redis_connection: Redis) -> None:
    """The order reaches the worker's record. Other keys are refused, and unknown names are 404."""
    redis_connection.hset(redis_keys.worker("mac"), mapping={"birth": "now", "queues": "q"})
    keys = KeyStore(redis_connection)
    admin, other = keys.add("admin", is_admin=True), keys.add("other")
    base = gateway.url.removesuffix("/v1")
    with HttpClient(base_url=f"{base}{API}/workers", timeout=20) as http:

        def post(path: str, key: str) -> int:
            return http.post(path, headers={"authorization": f"Bearer {key}"}).status_code

        assert post("/mac/drain", other) == 403
        assert not drain.is_ordered(redis_connection, "mac")
        assert post("/mac/drain", admin) == 200
        assert drain.is_ordered(redis_connection, "mac")
        assert post("/mac/resume", admin) == 200
        assert not drain.is_ordered(redis_connection, "mac")
        assert post("/nobody/drain", admin) == 404


def test_a_list_of_rows_shows_the_last_message(gateway: Gateway, redis_connection: Redis) -> None:
    """The first one often is the same in all rows. One row in full has all messages."""
    messages = [{"role": "system", "content": "same"}, {"role": "user", "content": "own"}]
    rows = [{"messages": messages}]
    batch_id = Client(redis_connection).submit(rows, model="fake").batch_id
    base = gateway.url.removesuffix("/v1")
    with HttpClient(base_url=f"{base}{API}/batches/{batch_id}", timeout=20) as http:
        (short,) = http.get("/rows").json()["data"]
        (full,) = http.get("/rows?full=1").json()["data"]
    assert (short["prompt"], short["messages"]) == ("own", [])
    assert (full["prompt"], full["messages"]) == ("system: same\nuser: own", messages)
    assert full["tool_calls"] == []
