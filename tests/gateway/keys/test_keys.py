"""API keys, and where a gateway may listen."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest
from click.testing import CliRunner
from httpx2 import Client as HttpClient
from openai import OpenAI
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.errors import ApiError
from batchkv_gateway.http.auth import Authenticated
from batchkv_gateway.keys.caller import Defaults
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import ApiKey, KeyStore
from batchkv_gateway.settings import GatewaySettings
from batchkv_producer.cli import cli
from batchkv_producer.errors import UsageError
from support.gateway import Gateway, chat_file, running_gateway, self_signed
from support.redis_server import RedisServer


@pytest.fixture
def command(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    """Runs commands in this process, on an empty server."""
    monkeypatch.setenv("BATCHKV_REDIS_URL", redis_url)
    yield CliRunner()


def run(command: CliRunner, *words: str) -> Any:
    return command.invoke(cli, words, prog_name="batchkv")


def test_keys_are_made_listed_and_removed(command: CliRunner, redis_connection: Redis) -> None:
    """A key is shown once and only its digest is stored; wrong names are refused."""
    made = run(command, "keys", "add", "laptop")
    key = made.stdout.strip()
    assert made.stderr.startswith(
        "batchkv: it is shown once: keep it. From now on each request needs a key, and files "
    )
    assert run(command, "keys", "add", "second").stderr == "batchkv: it is shown once: keep it\n"
    assert run(command, "keys", "remove", "second").exit_code == 0
    assert re.fullmatch(r"bkv-[0-9a-f]{8}-[0-9a-f]{32}", key)
    stored = redis_connection.hgetall(redis_keys.KEYS)
    assert isinstance(stored, dict)
    assert key.rpartition("-")[2].encode() not in b"".join([*stored, *stored.values()])
    title, line = run(command, "keys", "list").output.splitlines()
    assert title.split() == ["NAME", "ID", "MADE", "TERMS"] and line.startswith("laptop  ")
    assert key[4:12] in run(command, "keys", "list", "--json").output
    for name, word in (("laptop", "already"), ("a b", "letters"), ("", "letters")):
        found = run(command, "keys", "add", "--", name)
        assert found.exit_code == 2 and word in found.output
    assert run(command, "keys", "remove", "laptop").exit_code == 0
    assert run(command, "keys", "remove", "laptop").exit_code == 2
    assert run(command, "keys", "list").output.startswith("no API keys: ")


def test_only_the_whole_key_opens(redis_connection: Redis) -> None:
    """A changed secret, another id and damaged facts are nobody's."""
    keys = KeyStore(redis_connection)
    key = keys.add("a")
    owner = key[4:12]
    assert keys.find(key) == ApiKey(owner, "a", keys.all()[0].created) == keys.by_id(owner)
    last = "0" if key[-1] != "0" else "1"
    for wrong in (key[:-1] + last, key[:-1], f"{key}0", key.replace(owner, "0" * 8), "", "bkv-"):
        assert keys.find(wrong) is None
    facts = json.loads(redis_connection.hget(redis_keys.KEYS, owner))  # type: ignore[arg-type]
    old = {name: facts[name] for name in ("name", "digest", "created")}  # of an earlier version
    redis_connection.hset(redis_keys.KEYS, owner, json.dumps(old))
    assert keys.find(key) == ApiKey(owner, "a", old["created"])
    for damaged in ("{", "[]", '{"name": "a", "digest": 1, "created": 1}'):
        redis_connection.hset(redis_keys.KEYS, owner, damaged)
        assert keys.find(key) is None and keys.all() == [] and keys.has_any()


def test_a_key_has_the_rights_that_it_was_made_with(
    command: CliRunner, redis_connection: Redis
) -> None:
    """Each right is a flag of its own; the list names it. Only ``true`` is a right."""
    keys = KeyStore(redis_connection)
    made = {
        name: run(command, "keys", "add", name, *flags).stdout.strip()
        for name, flags in (("all", ("--admin",)), ("none", ()), ("some", ("--metrics",)))
    }
    terms = ("--private", "--max-rows", "1000", "--max-bytes", "2KiB")
    limited = keys.find(run(command, "keys", "add", "zero", *terms).stdout.strip())
    assert limited is not None
    assert (limited.is_private, limited.max_rows, limited.max_bytes) == (True, 1000, 2048)
    rights = {}
    for name, key in made.items():
        found = keys.find(key)
        assert found is not None
        rights[name] = (found.is_admin, found.reads_metrics)
    assert rights == {"all": (True, False), "none": (False, False), "some": (False, True)}
    lines = run(command, "keys", "list").output.splitlines()[1:]
    assert [line.partition("Z")[2] for line in lines] == [
        "  admin", "", "  metrics", "  private, 1,000 rows, 2,048 bytes"
    ]  # fmt: skip
    for flags in (("--admin", "--metrics"), ("--max-rows", "0"), ("--max-bytes", "many"),
                  ("--max-bytes", "0")):  # fmt: skip
        assert run(command, "keys", "add", "wrong", *flags).exit_code == 2
    owner = made["none"][4:12]
    stored: Any = redis_connection.hget(redis_keys.KEYS, owner)
    redis_connection.hset(redis_keys.KEYS, owner, stored.replace(b"false", b'"yes"'))
    found = keys.find(made["none"])
    assert found is not None and not found.is_admin and not found.reads_metrics
    facts = {**json.loads(stored), "private": "yes", "rows": -1, "bytes": "x"}
    redis_connection.hset(redis_keys.KEYS, owner, json.dumps(facts))
    found = keys.find(made["none"])  # what cannot be read is the strictest
    assert found is not None
    assert (found.is_private, found.max_rows, found.max_bytes) == (True, 1, 1)


def test_requests_get_the_rights_of_their_key(redis_connection: Redis) -> None:
    """Without any key this machine's requests see all. Then only an admin's key does."""
    keys = KeyStore(redis_connection)
    states: list[dict[str, Any]] = []

    async def app(scope: Any, _: Any, __: Any) -> None:
        states.append(scope["state"])

    sessions = Sessions(redis_connection, keys)

    def state_of(key: str, path: str = "/metrics", **defaults: Any) -> dict[str, Any]:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "headers": headers, "path": path}
        auth = Authenticated(app, keys, sessions, is_open=True, defaults=Defaults(**defaults))
        asyncio.run(auth(scope, None, None))  # type: ignore[arg-type]
        return states.pop()

    def call(key: str) -> tuple[Any, ...]:
        state = state_of(key)
        return state["owner"], state["sees_all"], state["reads_metrics"], state["key"]

    assert call("any") == ("local", True, True, None)
    admin, plain, metrics = (
        keys.add("a", is_admin=True),
        keys.add("b"),
        keys.add("c", reads_metrics=True),
    )
    assert call(admin) == (admin[4:12], True, True, keys.find(admin))
    assert call(plain) == (plain[4:12], False, False, keys.find(plain))
    assert call(metrics)[1:3] == (False, True)
    with pytest.raises(ApiError):
        call("any")
    with pytest.raises(ApiError, match="only /metrics"):
        state_of(metrics, "/v1/files")
    one, two = keys.add("d", is_private=True, max_rows=5), keys.add("e", is_private=True)
    salts = {state_of(key)["cache_salt"] for key in (plain, one, two)}
    assert len(salts) == 3 and None in salts and state_of(one)["cache_salt"] in salts
    given = {"max_rows": 9, "max_bytes": 7, "is_private": True}
    assert state_of(plain, **given)["cache_salt"] not in (None, *salts)
    limits = [
        (caller.max_rows, caller.max_bytes)
        for caller in (state_of(key, **given)["caller"] for key in (plain, one, admin))
    ]
    assert limits == [(9, 7), (5, 7), (0, 0)]


def test_no_key_sees_what_another_made(gateway: Gateway, redis_connection: Redis) -> None:
    """The same file by two keys is two files and two batches; ids of the other key are 404."""
    keys = KeyStore(redis_connection)
    made: list[tuple[OpenAI, str, str]] = []
    for name in ("one", "two"):
        client = gateway.client(keys.add(name), max_retries=0)
        file = client.files.create(file=("in", chat_file("a")), purpose="batch")
        batch = client.batches.create(
            completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
        )
        made.append((client, file.id, batch.id))
    (one, file, batch), (two, other_file, other_batch) = made
    assert len({file, batch, other_file, other_batch}) == 4
    assert [each.id for each in one.files.list()] == [file]
    assert [each.id for each in two.batches.list()] == [other_batch]
    calls = [one.files.retrieve, one.files.content, one.files.delete]
    for call, name in [(c, other_file) for c in calls] + [
        (one.batches.retrieve, other_batch), (one.batches.cancel, other_batch)
    ]:  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.NotFoundError):
        one.batches.create(
            completion_window="24h", endpoint="/v1/chat/completions", input_file_id=other_file
        )
    assert (
        len({redis_connection.hget(redis_keys.batch(b), "digest") for b in (batch, other_batch)})
        == 2
    )
    keys.remove("one")
    with pytest.raises(openai.AuthenticationError) as caught:
        one.files.list()
    assert caught.value.code == "invalid_api_key"
    assert "does not know this API key" in caught.value.message
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{one.base_url}models")
    assert b"needs an API key that was made for it" in refused.value.read()
    stranger = gateway.client("none", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    for client, _, _ in made:
        client.close()


def test_beyond_loopback_it_starts_only_with_a_key_and_tls(
    command: CliRunner, redis_connection: Redis, tmp_path: Path
) -> None:
    """Without a key, without TLS or --plain, and with an open or bad key file it does not start."""
    serve = ("serve", "--host", "0.0.0.0", "--port", "0")
    found = run(command, *serve, "--plain")
    assert found.exit_code == 2 and "batchkv keys add" in found.output
    KeyStore(redis_connection).add("a")
    found = run(command, *serve)
    assert found.exit_code == 2 and "--tls-cert" in found.output
    key = tmp_path / "key.pem"
    tls = ("--tls-cert", str(key), "--tls-key", str(key))
    assert "No such file" in run(command, *serve, *tls).output
    key.write_text("no key")
    key.chmod(0o644)
    assert "chmod 600" in run(command, *serve, *tls).output
    key.chmod(0o600)
    found = run(command, *serve, *tls)
    assert found.exit_code == 2 and "cannot be used" in found.output
    assert "belong together" in run(command, *serve, "--tls-cert", "x").output
    assert "cannot listen" in run(command, "serve", "--host", "192.0.2.1", "--plain").output


def test_over_tls_and_beyond_loopback_a_key_is_needed(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """A client that knows the certificate is served; one without a key is not, on any address."""
    cert, key = self_signed(tmp_path)
    api_key = KeyStore(redis_connection).add("a")
    flags = ("--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key))
    with running_gateway(redis_server.url, tmp_path / "home", *flags) as gateway:
        assert gateway.url.startswith("https://")
        gateway.url = gateway.url.replace("0.0.0.0", "127.0.0.1")
        http = HttpClient(verify=ssl.create_default_context(cafile=str(cert)))
        with gateway.client(api_key, max_retries=0, http_client=http) as client:
            assert client.models.list().data == []
        KeyStore(redis_connection).remove("a")
        http = HttpClient(verify=ssl.create_default_context(cafile=str(cert)))
        removed = gateway.client(api_key, max_retries=0, http_client=http)
        with removed, pytest.raises(openai.AuthenticationError):
            removed.models.list()


def test_settings_are_read_once_and_named_when_wrong() -> None:
    """A flag overrides its variable; errors name the one that was given."""
    environ = {"BATCHKV_GATEWAY_PORT": "81", "BATCHKV_GATEWAY_MAX_FILE": "2MiB"}
    found = GatewaySettings.read({"port": "82", "keep_files_seconds": "2h"}, environ)
    assert (found.port, found.max_file_bytes, found.keep_files_seconds) == (82, 2 * 2**20, 7200)
    assert GatewaySettings.read({"allow_hosts": "a, b"}, {}).allow_hosts == ("a", "b")
    assert GatewaySettings.read({}, {}) == GatewaySettings()
    for flags, variables, name in (
        ({"port": "x"}, {}, "--port"), ({"port": "65536"}, {}, "--port"),
        ({}, {"BATCHKV_GATEWAY_PORT": "-1"}, "BATCHKV_GATEWAY_PORT"),
        ({"max_file_bytes": "0"}, {}, "--max-file"), ({"max_rows": "0"}, {}, "--max-rows"),
        ({"keep_files_seconds": "59m"}, {}, "--keep-files"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            GatewaySettings.read(flags, variables)
