"""The gateway with the rights that a hub gives to a producer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from httpx2 import Client as HttpClient
from httpx2 import get

from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.secret import VARIABLE
from batchkv_producer.wire.job import Result
from gateway.live.live_worker import LiveWorker
from support.gateway import chat_file, running_gateway
from support.hub import HUB_SOURCE, running_hub


def test_a_producers_rights_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, files, a cancelled batch and a completion need no more than ``queue.acl`` allows.

    A key with limits, a webhook whose target is away, metrics and the page need no more, either.
    """
    monkeypatch.setenv(VARIABLE, "whsec_" + "QUJD" * 8)
    webhook = ("--webhook", "http://127.0.0.1:9/none")
    with running_hub(HUB_SOURCE) as hub:
        with hub.connect("producer") as connection:
            key = KeyStore(connection).add("a", max_rows=9, max_bytes=10**6, is_private=True)
            reader = KeyStore(connection).add("reader", reads_metrics=True)
        with (
            running_gateway(hub.url("producer"), tmp_path / "home", *webhook) as gateway,
            gateway.client(key, max_retries=0) as client,
        ):
            file = client.files.create(file=("in", chat_file("a", "b")), purpose="batch")
            batch = client.batches.create(
                completion_window="1h", endpoint="/v1/chat/completions", input_file_id=file.id
            )
            deadline = time.monotonic() + 30
            while (found := client.batches.retrieve(batch.id)).status != "cancelled":
                assert time.monotonic() < deadline, (found, gateway.log.read_text())
                if found.status == "in_progress":
                    client.batches.cancel(batch.id)
                time.sleep(0.1)
            assert found.request_counts and found.request_counts.failed == 2
            assert len(client.files.content(str(found.error_file_id)).text.splitlines()) == 2
            assert client.files.delete(file.id).deleted
            assert [each.id for each in client.batches.list()] == [batch.id]
            assert client.models.list().data == []
            own = {"Authorization": f"Bearer {key}"}
            native = gateway.url.removesuffix("/v1") + "/batchkv/v1"
            for path in ("batches?count=1", "workers", "left", "server", f"batches/{batch.id}"):
                assert get(f"{native}/{path}", headers=own).status_code == 200, path
            while get(f"{native}/batches/{batch.id}", headers=own).json()["in_queue"]:
                assert time.monotonic() < deadline, gateway.log.read_text()
                time.sleep(0.1)
            report = get(f"{native}/batches/{batch.id}?facts=1", headers=own).json()["report"]
            assert report["status"]["canceled"] == 2
            with HttpClient(base_url=f"http://127.0.0.1:{gateway.port}") as viewer:
                header = {"x-batchkv-request": "1"}
                begun = viewer.post("/page/login", json={"key": key}, headers=header)
                assert begun.status_code == 200
                with viewer.stream("GET", "/page/events") as events:
                    lines = iter(events.iter_lines())
                    while not (line := next(lines)).startswith('data: {"order"'):
                        assert "trouble" not in line
                    assert batch.id in line and '"trouble": ""' in line
                ended = viewer.post("/page/logout", json={}, headers=header)
                assert ended.status_code == 200
                assert not viewer.get("/page/session").json()["is_signed_in"]
            to_read = {"Authorization": f"Bearer {reader}"}
            metrics = get(f"http://127.0.0.1:{gateway.port}/metrics", headers=to_read)
            assert "\nbatchkv_redis_memory_bytes " in metrics.text
            while "tried again" not in gateway.log.read_text():
                assert time.monotonic() < deadline, gateway.log.read_text()
                time.sleep(0.05)
            with hub.connect("worker") as connection, ThreadPoolExecutor(1) as pool:
                worker = LiveWorker(connection, "m")
                text = pool.submit(client.completions.create, model="m", prompt="hi")
                row, _ = worker.take()
                worker.end(row, Result("c", "completion", "ok", "m", "hello", "stop"))
                assert text.result(20).choices[0].text == "hello"
        with hub.connect("producer") as connection:
            KeyStore(connection).remove("a")
        assert "NOPERM" not in gateway.log.read_text()
