"""The API of batchkv itself: submit, cancel, retry, delete."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Client as HttpClient
from httpx2 import Response
from openai import OpenAI
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.client import Client
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.intake.source import Inputs
from batchkv_producer.wire import redis_keys as queue_keys
from batchkv_producer.wire.job import SamplingParams
from support.fake_engine import worker_here
from support.gateway import Gateway, chat_file, working

TWO = b'{"prompt": "a"}\n{"prompt": "b", "max_tokens": -1}\n'


@pytest.fixture
def http(gateway: Gateway, redis_connection: Redis) -> Iterator[HttpClient]:
    """A client of the native API, on an empty server."""
    root = gateway.url.removesuffix("/v1") + "/batchkv/v1"
    with HttpClient(base_url=root, timeout=20) as found:
        yield found


def submit(http: HttpClient, body: bytes = TWO, query: str = "", **terms: str) -> Response:
    headers = {f"x-batchkv-{name.replace('_', '-')}": value for name, value in terms.items()}
    return http.post(f"/batches{query}", content=body, headers={"x-batchkv-model": "m", **headers})


def test_a_submit_is_that_of_the_command(
    http: HttpClient, redis_connection: Redis, tmp_path: Any
) -> None:
    """The same files and options make the same batch by HTTP and by Redis, also several files."""
    file, other = tmp_path / "in.jsonl", tmp_path / "other.txt"
    file.write_bytes(TWO)
    other.write_bytes(b"c\nd\n")
    answer = submit(http, name="in.jsonl", temperature="0", system="%C3%BC b", priority="high")
    made = answer.json()["submitted"]
    assert (made["total"], made["num_bad"], made["joined"]) == (2, 1, False)
    assert made["errors"][0]["place"] == "line 2"
    again = submit(http, name="in.jsonl", temperature="0", system="%C3%BC b").json()["submitted"]
    assert again["joined"] and again["batch_id"] == made["batch_id"]
    client = Client(redis_connection)
    same = client.submit(
        file,
        model="m",
        defaults=SamplingParams(temperature=0.0),
        prompting=Prompting(system="ü b"),
    )
    assert same.joined and same.batch_id == made["batch_id"]
    assert client.status(same.batch_id).priority == "high"
    parts = [{"name": "in.jsonl", "bytes": len(TWO)}, {"name": "other.txt", "bytes": 4}]
    parts[1]["suffix"] = ".txt"
    both = submit(http, TWO + b"c\nd\n", files=json.dumps(parts)).json()["submitted"]
    assert client.submit(Inputs.of(file, other), model="m").batch_id == both["batch_id"]
    assert both["total"] == 4


def test_a_dry_run_queues_nothing(http: HttpClient, redis_connection: Redis) -> None:
    """A dry run counts rows, wrong lines and groups."""
    prefix = "p" * 3000
    body = "".join(json.dumps({"prompt": prefix + each}) + "\n" for each in "ab").encode()
    found = submit(http, body + b"{}\n", query="?dry_run=1").json()
    assert found["checked"]["total"] == 3 and found["checked"]["errors"][0]["line"] == 3
    assert found["estimate"]["num_groups"] == 1 and found["estimate"]["hit_rate_one"] > 0.3
    assert not redis_connection.keys("batchkv:batch:*")


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        ({"temperature": "hot"}, "x-batchkv-temperature must be a number"),
        ({"top_p": "9"}, "top_p"),
        ({"seed": "1.5"}, "whole number"),
        ({"wibble": "1"}, "x-batchkv-wibble is not known"),
        ({"dedupe": "yes"}, "must be 1 or 0"),
        ({"priority": "highest"}, "must be one of"),
        ({"stop": "END"}, "list in JSON"),
        ({"expires": "soon"}, "neither a duration"),
        ({"adapter": "a=/etc"}, "names the adapter alone"),
        ({"format": "xml"}, "jsonl or text"),
        ({"name": "%ff"}, "percent-encoding"),
        ({"files": '[{"name": "a", "bytes": 9000}]'}, "shorter than"),
        ({"files": '[{"name": "a", "bytes": 1}]'}, "longer than"),
        ({"files": '[{"name": "a", "bytes": 900000}]'}, "larger than 200,000 bytes"),
        ({"files": "[3]"}, "objects with name"),
        ({"from": "0123456789abcdef"}, "no batch"),
    ],
)
def test_wrong_options_are_refused(
    http: HttpClient, redis_connection: Redis, terms: dict[str, str], word: str
) -> None:
    """Each wrong option is named, and nothing is queued."""
    answer = submit(http, **terms)
    assert 400 <= answer.status_code < 500 and word in answer.json()["error"]["message"]
    assert not redis_connection.keys("batchkv:batch:*")


def test_bodies_have_limits(http: HttpClient, home: Any, redis_connection: Redis) -> None:
    """A body without rows, with too many rows or bytes is refused; no file of it stays."""
    assert "has no rows" in submit(http, b"").json()["error"]["message"]
    many = submit(http, b'{"prompt": "a"}\n' * 51)
    assert many.status_code == 413 and "51 rows" in many.json()["error"]["message"]
    large = submit(http, b'{"prompt": "' + b"a" * 200_001 + b'"}')
    assert large.status_code == 413, large.text
    assert not list((home / "gateway").glob("*.part*"))
    assert not redis_connection.keys("batchkv:batch:*")


def test_rows_are_canceled_retried_and_deleted(
    http: HttpClient, redis_url: str, redis_connection: Redis
) -> None:
    """One row, then the batch is canceled; a retry queues the rows again; it is deleted."""
    body = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    batch = submit(http, body, model="fake").json()["submitted"]["batch_id"]
    url = f"/batches/{batch}"
    assert http.post(f"{url}/cancel?line=2").json() == {"canceled": 1}
    assert http.post(f"{url}/cancel").json() == {"canceled": 1}
    assert http.post(f"{url}/cancel").json() == {"canceled": 0}
    assert http.post(f"{url}/retry").json() == {"queued": 0}
    redis_connection.delete(queue_keys.job(f"{batch}-1"))
    again = {"x-batchkv-canceled": "1"}
    assert http.post(f"{url}/retry", headers=again).json() == {"queued": 1}
    files = json.dumps([{"name": "input", "bytes": len(body)}])
    again |= {"x-batchkv-files": files}
    assert http.post(f"{url}/retry", headers=again, content=body).json() == {"queued": 1}
    other = http.post(f"{url}/retry", headers=again, content=body.replace(b"b", b"c"))
    assert "does not make batch" in other.json()["error"]["message"]
    with working(redis_url):
        assert Client(redis_connection).wait(batch, timeout_seconds=20).ok == 2
    assert http.delete(url).json() == {"batch_id": batch, "deleted": True}
    assert http.get(url).status_code == 404 and http.delete(url).status_code == 404


def test_batches_of_openais_api_are_cancelled_alone(
    http: HttpClient, client: OpenAI, redis_connection: Redis
) -> None:
    """A batch of OpenAI's API can be cancelled here; while it is open it can be neither retried nor
    deleted."""
    file = client.files.create(file=chat_file("a"), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 20
    while not (found := http.get(f"/batches/{made.id}").json())["in_queue"]:
        assert time.monotonic() < deadline
    url = f"/batches/{found['batch_id']}"
    assert http.delete(url).status_code == 409
    assert http.post(f"{url}/retry").status_code == 409
    assert http.post(f"{url}/cancel").json() == {"canceled": 1, "openai_status": "cancelling"}


def test_a_key_is_part_of_a_batch(http: HttpClient, redis_connection: Redis) -> None:
    """Two keys with the same file have two batches, and neither may change the other's. A client
    that has results of another batch is refused."""
    keys = KeyStore(redis_connection)
    one, two, admin = keys.add("one"), keys.add("two"), keys.add("admin", is_admin=True)
    ids = {}
    for key in (one, two):
        http.headers["Authorization"] = f"Bearer {key}"
        ids[key] = submit(http).json()["submitted"]["batch_id"]
        assert submit(http).json()["submitted"]["joined"]
        assert not submit(http, query="?dry_run=1").json()["checked"]["batch_id"]
    assert ids[one] != ids[two]
    url = f"/batches/{ids[one]}"
    for answer in (http.post(f"{url}/cancel"), http.post(f"{url}/retry"), http.delete(url)):
        assert answer.status_code == 404
    assert submit(http, **{"from": ids[one]}).status_code == 404
    refused = submit(http, TWO + b'{"prompt": "c"}\n', out_batch=ids[two])
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "other_batch"
    assert submit(http, out_batch=ids[two]).status_code == 200
    http.headers["Authorization"] = f"Bearer {admin}"
    assert http.post(f"{url}/cancel").json() == {"canceled": 1}
    files = {"x-batchkv-files": json.dumps([{"name": "input", "bytes": len(TWO)}])}
    redis_connection.delete(queue_keys.job(f"{ids[one]}-1"))
    again = http.post(f"{url}/retry", headers={**files, "x-batchkv-canceled": "1"}, content=TWO)
    assert again.json() == {"queued": 1}
    assert http.delete(url).status_code == 200


def test_rows_of_a_key_are_limited(http: HttpClient, redis_connection: Redis) -> None:
    """Rows that are open count against the key's limit; canceled ones no longer do."""
    key = KeyStore(redis_connection).add("small", max_rows=3)
    http.headers["Authorization"] = f"Bearer {key}"
    batch = submit(http).json()["submitted"]["batch_id"]
    other = b'{"prompt": "c"}\n{"prompt": "d"}\n{"prompt": "e"}\n'
    assert submit(http, other).status_code == 429
    assert submit(http, other + b'{"prompt": "f"}\n').status_code == 413
    assert http.get("/batches").json()["data"][0]["batch_id"] == batch
    assert http.post(f"/batches/{batch}/cancel").json() == {"canceled": 1}
    assert submit(http, other).status_code == 200
    again = http.post(f"/batches/{batch}/retry", headers={"x-batchkv-canceled": "1"})
    assert again.status_code == 429


def test_remembered_answers_are_a_keys_own(http: HttpClient, redis_connection: Redis) -> None:
    """`--reuse` by HTTP: a key gets the answers that it got before, and none of another key's."""
    keys = KeyStore(redis_connection)
    one, two = keys.add("one"), keys.add("two")
    rows = b'{"prompt": "a", "temperature": 0}\n{"prompt": "b", "seed": 1}\n'

    def reused(key: str, *more: bytes, **terms: str) -> list[bool]:
        """Which rows of a new batch were reused, after a worker has ended all of them."""
        http.headers["Authorization"] = f"Bearer {key}"
        made = submit(http, rows + b"".join(more), reuse="1", **terms).json()["submitted"]
        assert worker_here(redis_connection, "m", fingerprint="a" * 32).work(burst=True)
        url = f"/batches/{made['batch_id']}"
        found = [row["reused"] for row in http.get(f"{url}/rows").json()["data"]]
        status = http.get(url).json()
        assert (status["ok"], status["reused"]) == (len(found), sum(found))
        return found

    assert reused(one) == [False, False]
    assert reused(two) == [False, False]
    assert reused(two, b'{"prompt": "c"}\n', name="other", priority="low") == [True, True, False]
    assert submit(http, reuse="1", fresh="1").status_code == 400
    assert "1 row is computed in spite" in submit(http, reuse="1").json()["submitted"]["reuse_note"]
