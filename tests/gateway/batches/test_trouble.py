"""Batches in trouble: no Redis, no folder, no disk, no key, other tools, and other gateways."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import openai
import pytest
from httpx2 import Client as HttpClient
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches.record import BatchRecord, read_record
from batchkv_gateway.batches.steps import Steps
from batchkv_gateway.batches.store import AskedBatch, Batches
from batchkv_gateway.errors import ApiError
from batchkv_gateway.files import folder as folders
from batchkv_gateway.files.folder import Folder
from batchkv_gateway.files.records import Files
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.keys.quotas import Quotas
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.settings import GatewaySettings
from batchkv_producer import Client
from support.gateway import Gateway, chat_file, running_gateway, working
from support.redis_server import BINARIES, RedisServer, running_server

URL = "/v1/chat/completions"
OVER = ("failed", "completed", "expired", "cancelled")
PATCH = {"ELSEWHERE_SECONDS": 1.0, "LOOK_SECONDS": 0.3, "STOP_SECONDS": 1, "REST_SECONDS": 0.2}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server of this module that keeps its data over a restart."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as found:
        yield found


@pytest.fixture(scope="module")
def gateway(server: RedisServer, home: Path) -> Iterator[Gateway]:
    """A gateway that soon looks again."""
    with running_gateway(server.url, home, **PATCH) as found:
        yield found


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Redis]:
    """A connection to the server, which is emptied first."""
    with server.connect() as found:
        found.flushall()
        yield found


@pytest.fixture
def client(gateway: Gateway, redis: Redis) -> Iterator[OpenAI]:
    """OpenAI's client, which does not try again."""
    with gateway.client(max_retries=0) as found:
        yield found


def upload(client: OpenAI, *custom_ids: str) -> str:
    return client.files.create(file=("in", chat_file(*custom_ids)), purpose="batch").id


def create(client: OpenAI, file_id: str, **metadata: str) -> Batch:
    return client.batches.create(
        completion_window="24h", endpoint=URL, input_file_id=file_id, metadata=metadata
    )


def wait(client: OpenAI, batch_id: str, *statuses: str) -> Batch:
    deadline = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch_id)).status not in (statuses or OVER):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def codes(client: OpenAI, file_id: str | None) -> dict[str, str]:
    """The codes of an error file, by custom_id."""
    text = client.files.content(str(file_id)).text
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["custom_id"]: row["error"]["code"] for row in rows}


def queued_id(redis: Redis, batch_id: str) -> str:
    found = redis.hget(redis_keys.batch(batch_id), "queued_id")
    assert isinstance(found, bytes)
    return found.decode()


def test_a_file_is_in_use_until_its_last_batch_ends(client: OpenAI, redis: Redis) -> None:
    """Two batches read one file. The end of one of them does not release it."""
    file_id = upload(client, "a")
    made = [create(client, file_id, n=n).id for n in "12"]
    for batch_id in made:
        with pytest.raises(openai.ConflictError):
            client.files.delete(file_id)
        client.batches.cancel(batch_id)
        assert wait(client, batch_id).status == "cancelled"
    assert client.files.delete(file_id).deleted


def test_rows_that_the_command_cancels_are_in_the_error_file(client: OpenAI, redis: Redis) -> None:
    """`batchkv cancel` ends the rows. The batch is then completed, with every line in a file."""
    batch = create(client, upload(client, "a", "b"))
    wait(client, batch.id, "in_progress")
    Client(redis).cancel(queued_id(redis, batch.id))
    done = wait(client, batch.id)
    assert (done.status, done.output_file_id) == ("completed", None)
    assert codes(client, done.error_file_id) == dict.fromkeys("ab", "batch_cancelled")


def test_a_batch_of_a_removed_key_ends(gateway: Gateway, server: RedisServer, redis: Redis) -> None:
    """Its rows are computed. An admin's key lists it, and reads its rows while they are
    in Redis; another key does not."""
    keys = KeyStore(redis)
    owner, admin, other = keys.add("owner"), keys.add("admin", is_admin=True), keys.add("other")
    with gateway.client(owner, max_retries=0) as client:
        batch = create(client, upload(client, "a"))
        wait(client, batch.id, "in_progress")
        keys.remove("owner")
        with pytest.raises(openai.AuthenticationError):
            client.batches.retrieve(batch.id)
    root = gateway.url.removesuffix("/v1") + "/batchkv/v1/batches"
    name = queued_id(redis, batch.id)
    with HttpClient(headers={"authorization": f"Bearer {other}"}) as http:
        assert http.get(f"{root}/{name}").status_code == 404
    with HttpClient(headers={"authorization": f"Bearer {admin}"}) as http:
        rows = http.get(f"{root}/{name}/rows").json()
        assert [row["line"] for row in rows["data"]] == [1], rows
    with working(server.url), HttpClient(headers={"authorization": f"Bearer {admin}"}) as http:
        deadline = time.monotonic() + 30
        while redis.hget(redis_keys.batch(batch.id), "status") != b"completed":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = http.get(root).json()
        assert [each["openai_id"] for each in found["data"]] == [batch.id]
        assert found["data"][0]["openai_status"] == "completed"


def test_a_server_that_restarts_costs_nothing(
    gateway: Gateway, server: RedisServer, client: OpenAI, redis: Redis
) -> None:
    """An upload goes on over a restart. Without the server a request is 503, and may be sent
    again. An open batch goes on after the restart."""
    body = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += b'--b\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
    body += chat_file("a") + b"\r\n--b--\r\n"
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        "expect: 100-continue\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), 20) as sender:
        sender.sendall(head.encode())
        assert b" 100 " in sender.recv(65536)  # the key was looked up, and the body is read now
        sender.sendall(body[:150])
        server.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.list()
        assert (caught.value.status_code, caught.value.code) == (503, "queue_unavailable")
        assert caught.value.response.headers["x-should-retry"] == "true"
        server.start()
        sender.sendall(body[150:])
        answer = b"".join(iter(lambda: sender.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200"), answer
    batch = create(client, json.loads(answer.partition(b"\r\n\r\n")[2])["id"])
    wait(client, batch.id, "in_progress")
    server.stop()
    server.start()
    with working(server.url):
        assert wait(client, batch.id).status == "completed"


def test_a_deleted_folder_is_named_and_made_again(client: OpenAI, redis: Redis, home: Path) -> None:
    """A batch without its input fails with what to do. The next upload is stored."""
    lost = upload(client, "lost")
    shutil.rmtree(home / "gateway")
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.content(lost)
    assert caught.value.code == "content_lost"
    done = wait(client, create(client, lost).id)
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "file_lost"
    assert "upload it again" in str(done.errors.data[0].message)
    root = str(client.base_url).removesuffix("/v1/") + "/batchkv/v1/batches"
    with HttpClient() as http:
        found = http.post(f"{root}?dry_run=1", content=chat_file("a"))
    assert found.json()["checked"]["total"] == 1, found.text
    shutil.rmtree(home / "gateway")
    kept = upload(client, "kept")
    assert client.files.content(kept).content == chat_file("kept")


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A content that cannot be synced is 507 and leaves nothing; another error names itself."""
    folder = Folder(tmp_path / "home")
    for number, status, code in ((errno.ENOSPC, 507, "disk_full"), (errno.EROFS, 503, None)):
        monkeypatch.setattr(folders, "sync", Mock(side_effect=OSError(number, "no")))
        with folder.begin(9) as incoming, pytest.raises(ApiError) as caught:
            incoming.write(b"x")
            incoming.keep("name")
        assert caught.value.status == status
        assert caught.value.code == (code or "folder_unusable")
    assert list(folder.path.iterdir()) == []


def test_a_full_disk_delays_the_files_of_a_batch(
    server: RedisServer, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch stays in ``finalizing`` and leaves nothing behind. With room it is completed."""
    files = Files(redis, Folder(tmp_path / "home"))
    steps = Steps(redis, files, GatewaySettings())
    caller = Caller("o")
    with files.folder.begin(9999) as incoming:
        incoming.write(chat_file("a"))
        file_id = files.store(incoming, caller, "in", 3600).file_id
    batches = Batches(redis, files, Quotas(redis))
    asked = AskedBatch(URL, file_id, "24h", 86_400, "{}", "strict", 0)
    batch_id = batches.create(caller, asked).batch_id
    deadline = time.monotonic() + 30
    with working(server.url):
        while batches.find("o", batch_id).status != "finalizing":
            assert time.monotonic() < deadline
            if not steps.advance(batch_id):
                time.sleep(0.02)
    with monkeypatch.context() as full:
        full.setattr(folders, "sync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(ApiError, match="disk is full"):
            steps.advance(batch_id)
    assert batches.find("o", batch_id).status == "finalizing"
    assert len(list(files.folder.path.iterdir())) == 1
    steps.advance(batch_id)
    done = batches.find("o", batch_id)
    assert (done.status, done.completed) == ("completed", 1)
    assert files.folder.content(files.find("o", done.output_file_id).content_name).is_file()


@pytest.mark.parametrize("binary", BINARIES)
def test_a_full_server_is_named(binary: str | None, tmp_path: Path) -> None:
    """What needs room is 507 and says what to do. Batches are shown and forgotten."""
    with (
        running_server("--maxmemory-policy", "noeviction", binary=binary) as server,
        running_gateway(server.url, tmp_path / "home") as gateway,
        gateway.client(max_retries=0) as client,
        server.connect() as connection,
    ):
        base = gateway.url.removesuffix("/v1")
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "x"}\n' * 9)
        command = (sys.executable, "-m", "batchkv_producer")

        def batchkv(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *words, "--url", base], capture_output=True, text=True, check=False
            )

        made = batchkv("submit", str(rows), "-m", "m")
        assert made.returncode == 0, made.stderr
        batch_id = made.stdout.strip()
        used = int(connection.info("memory")["used_memory"])
        connection.config_set("maxmemory", used // 2)
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("rows", b"{}\n"), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "queue_full")
        assert caught.value.response.headers["x-should-retry"] == "false"
        rows.write_text('{"prompt": "y"}\n' * 9)
        refused = batchkv("submit", str(rows), "-m", "m")
        assert refused.returncode == 3
        assert "has no room: the queue's server is full (maxmemory): make room" in refused.stderr
        assert "Trying again" not in refused.stderr
        assert list(client.batches.list()) == []
        for words in (("list",), ("status", batch_id), ("forget", batch_id, "--yes")):
            found = batchkv(*words)
            assert found.returncode == 0 and batch_id in found.stdout + found.stderr, found
        log = gateway.log.read_text()
        assert "Redis is full (maxmemory)" in log and "batchkv server start" not in log


def test_a_gateway_with_another_folder_leaves_the_work(
    client: OpenAI, server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    """It fails no batch whose input it has not, and says so of contents. Its end in the middle of
    an upload leaves nothing in its folder."""
    elsewhere = tmp_path / "home"
    patch = {**PATCH, "ELSEWHERE_SECONDS": 60.0, "LEASE_SECONDS": 0.5}
    with running_gateway(server.url, elsewhere, **patch) as other, other.client() as stranger:
        with working(server.url):
            file_id = upload(client, "a")
            for number in range(4):
                done = wait(stranger, create(stranger, file_id, n=str(number)).id)
                assert done.status == "completed", done.errors
                assert client.files.content(str(done.output_file_id)).text
        with pytest.raises(openai.NotFoundError, match="a folder of its own"):
            stranger.files.content(file_id)
        head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n"
        head += b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        head += b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n{}'
        with socket.create_connection(("127.0.0.1", other.port), 20) as sender:
            sender.sendall(head)
            time.sleep(0.1)
            other.process.terminate()
            other.process.wait(20)
            with suppress(ConnectionError):
                sender.recv(4096)
    assert list((elsewhere / "gateway").iterdir()) == []


def test_a_record_of_the_first_version_is_read() -> None:
    """It has no field that came later; what it lacks has a default."""
    record = BatchRecord(
        *("batch_1", "local", "d", URL, "file-1", "file-1.0", "in", "24h"),
        *(1, 2, "{}", "strict", 0),
    )
    stored = {name: str(value) for name, value in record.as_fields().items()}
    del stored["cache_salt"]
    raw = {name.encode(): value.encode() for name, value in stored.items()}
    assert read_record("batch_1", raw) == record
