"""Files, by OpenAI's own client."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types import FileObject
from redis import Redis

from batchkv_gateway import redis_keys
from support.gateway import chat_file, running_gateway
from support.redis_server import RedisServer


def upload(client: OpenAI, content: bytes = b"{}\n", name: str = "in.jsonl") -> FileObject:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


def test_a_file_keeps_its_bytes_and_facts(client: OpenAI, home: Path) -> None:
    """Upload, facts, content and delete; the object validates strictly; the folder is closed."""
    content = chat_file("a", "b") + b"\x00\xff\r\n--boundary\r\n"
    made = upload(client, content)
    FileObject.model_validate(made.model_dump(warnings="error"), strict=True)
    assert (made.bytes, made.filename, made.purpose) == (len(content), "in.jsonl", "batch")
    assert made.expires_at == made.created_at + 30 * 86_400
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    (stored,) = (home / "gateway").iterdir()
    assert stored.name == f"{made.id}.{hashlib.sha256(content).hexdigest()}"
    assert stat.S_IMODE((home / "gateway").stat().st_mode) == 0o700
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    gone = client.files.delete(made.id)
    assert (gone.id, gone.deleted) == (made.id, True)
    assert list((home / "gateway").iterdir()) == []
    for call in (client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_parts_of_a_file(client: OpenAI) -> None:
    """A range after the end is refused as errors are; what is no range is answered as a whole."""
    made = upload(client, b"0123456789")

    def asked(given: str, **more: str) -> httpx2.Response:
        headers = {"range": given, **more}
        return httpx2.get(f"{client.base_url}files/{made.id}/content", headers=headers)

    for given, content in (("bytes=2-4", "234"), ("bytes=-3", "789"), ("Bytes=8-", "89")):
        found = asked(given)
        assert (found.status_code, found.text) == (206, content)
    for given in ("bytes=10-", "bytes=11-12, 99-", "bytes=-0"):
        found = asked(given)
        assert found.status_code == 416 and found.headers["content-range"] == "bytes */10"
        assert found.json()["error"]["code"] == "invalid_range"
    for given in ("bytes=abc", "bytes=4-2", "lines=1-2", "bytes=1-2, 10-", f"bytes={'9' * 99}-"):
        found = asked(given)
        assert (found.status_code, found.text) == (200, "0123456789"), given
    tag = asked("bytes=1-").headers["etag"]
    for given in ("bytes=10-", "bytes=abc", "bytes=4-2"):
        for mark in ('"other"', tag):
            found = asked(given, **{"if-range": mark})
            assert (found.status_code, found.text) == (200, "0123456789"), (given, mark)
    assert asked("bytes=2-4", **{"if-range": tag}).text == "234"


def test_a_delete_may_be_repeated_for_ten_minutes(client: OpenAI, redis_connection: Redis) -> None:
    """A client whose answer was lost sends it again; later, the file is unknown."""
    made = upload(client, b"x")
    assert client.files.delete(made.id) == client.files.delete(made.id)
    assert 500 < redis_connection.ttl(redis_keys.deleted(made.id)) <= 600  # type: ignore[operator]
    redis_connection.delete(redis_keys.deleted(made.id))
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_an_upload_without_a_name_or_with_a_path_has_a_plain_one(client: OpenAI) -> None:
    """BytesIO is called ``upload``; folders and control characters of a name are dropped."""
    assert client.files.create(file=io.BytesIO(b"{}"), purpose="batch").filename == "upload"
    assert upload(client, name="../../etc/passwd").filename == "passwd"
    assert upload(client, name="C:\\x\\<b>a.jsonl").filename == "<b>a.jsonl"


def test_a_file_over_the_limit_is_413(client: OpenAI, home: Path) -> None:
    """It leaves nothing in the folder; a file of exactly the limit is stored."""
    upload(client, b"x" * 200_000)
    num_before = len(list((home / "gateway").iterdir()))
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 200_001)
    assert caught.value.status_code == 413 and "--max-file" in caught.value.message
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 2_000_000)
    assert caught.value.status_code == 413
    assert len(list((home / "gateway").iterdir())) == num_before


def test_pages_are_exact_after_a_deleted_id(client: OpenAI) -> None:
    """Every file is on one page, in both orders, also if the last id of a page was deleted."""
    ids = [upload(client).id for _ in range(5)]
    page = client.files.list(limit=2, order="asc")
    assert ([each.id for each in page.data], page.has_more) == (ids[:2], True)
    client.files.delete(ids[1])
    page = client.files.list(limit=3, order="asc", after=ids[1])
    assert ([each.id for each in page.data], page.has_more) == (ids[2:], False)
    left = [ids[0], *ids[2:]]
    assert [each.id for each in client.files.list(limit=1)] == left[::-1]
    assert [each.id for each in client.files.list(purpose="batch", limit=3)] == left[::-1]
    assert client.files.list(purpose="batch_output").data == []


def test_expiry_is_checked_and_kept(client: OpenAI, redis_connection: Redis, home: Path) -> None:
    """``expires_after`` needs its anchor and 1 h to 30 d; an expired file is 404 and deleted."""

    def make(**expires: object) -> FileObject:
        return client.files.create(
            file=("a", b"{}"),
            purpose="batch",
            expires_after=expires,  # type: ignore[arg-type]
        )

    made = make(anchor="created_at", seconds=3600)
    assert made.expires_at == made.created_at + 3600
    for wrong in ({"seconds": 3600}, {"anchor": "created_at", "seconds": 3599}, {"anchor": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            make(**wrong)
        assert (caught.value.param or "").startswith("expires_after")
    redis_connection.hset(redis_keys.file(made.id), "expires", int(time.time()) - 1)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert not list((home / "gateway").glob(f"{made.id}*"))
    other = make(anchor="created_at", seconds=3600)
    redis_connection.zadd(redis_keys.EXPIRING, {other.id: int(time.time()) - 1})
    assert client.files.list().data == []


def test_only_batch_files_are_stored(client: OpenAI, redis_connection: Redis) -> None:
    """Another purpose is 400, and so are wrong queries; nothing is stored."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a", b"{}"), purpose="vision")
    assert caught.value.param == "purpose"
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"after": "file-1"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)  # type: ignore[arg-type]
    assert not redis_connection.keys(f"{redis_keys.PREFIX}file*")


def test_contents_without_a_file_are_deleted(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """A kill between folder and Redis leaves a content that a later start deletes, and no file."""
    home = tmp_path / "home"
    died = "after batchkv_gateway.files.folder:Incoming.keep"
    with running_gateway(redis_server.url, home, die_at=died) as dying:
        with dying.client(max_retries=0) as client, pytest.raises(openai.APIConnectionError):
            upload(client)
        dying.wait_killed()
    (left,) = (home / "gateway").iterdir()
    (interrupted := home / "gateway" / "x.part").write_bytes(b"{")
    redis_connection.zadd(redis_keys.PENDING, {left.name: int(time.time()) - 3601})
    os.utime(interrupted, (1, 1))
    with running_gateway(redis_server.url, home) as again, again.client() as client:
        assert client.files.list().data == []
        assert upload(client).bytes == 3
    assert len(list((home / "gateway").iterdir())) == 1
