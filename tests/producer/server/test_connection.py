"""Every error of Redis becomes one sentence, quickly, and without a password."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server import connection
from support.redis_server import RedisServer, running_server


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHKV_REDIS_URL", raising=False)
    monkeypatch.delenv("BATCHKV_REDIS_URL_FILE", raising=False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def complaint(url: str) -> str:
    """The error of connecting, without the four seconds of redis-py's retries."""
    waited = AssertionError("it waits to try again")
    with patch("redis.retry.sleep", side_effect=waited), pytest.raises(ServerError) as caught:
        connection.connect(url)
    return str(caught.value)


@contextmanager
def refused(reason: str, url: str) -> Iterator[Redis]:
    """Inside, a connection whose use must fail for this reason."""
    with (
        pytest.raises(ServerError, match=reason),
        connection.server_errors(url),
        connection.connect(url) as redis,
    ):
        yield redis


def test_connects_with_bytes(redis_url: str) -> None:
    """The connection answers in bytes, as RQ's do."""
    with connection.connect(redis_url) as redis:
        redis.set("k", "v")
        assert redis.get("k") == b"v"


def test_flag_wins_over_variable_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--url, else BATCHKV_REDIS_URL, else the file; two variables at once are refused."""
    path = tmp_path / "url"
    path.write_text("redis://:secret@file:1/0\n", "utf-8")
    path.chmod(0o600)
    assert connection.resolve_url(None) is None
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(path))
    assert connection.resolve_url(None) == "redis://:secret@file:1/0"
    assert connection.resolve_url("redis://flag") == "redis://flag"
    monkeypatch.setenv("BATCHKV_REDIS_URL", "redis://variable")
    with pytest.raises(UsageError, match="both set"):
        connection.resolve_url(None)
    monkeypatch.delenv("BATCHKV_REDIS_URL_FILE")
    assert connection.resolve_url(None) == "redis://variable"


def test_url_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is missing, empty or binary is reported with the variable's name."""
    for content, reason in ((None, "No such file"), (b" \n", "is empty"), (b"\xff", "not text")):
        path = tmp_path / "url"
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(path))
        with pytest.raises(UsageError, match=f"BATCHKV_REDIS_URL_FILE .*{reason}"):
            connection.resolve_url(None)


def test_url_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is the home folder, also without a shell. An unknown user's home is reported."""
    (tmp_path / "url").write_text("redis://hub\n", "utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", "~/url")
    assert connection.resolve_url(None) == "redis://hub"
    (tmp_path / "url").unlink()
    with pytest.raises(UsageError, match=f"names {tmp_path}/url: No such file"):
        connection.resolve_url(None)
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", "~nobody-at-all/url")
    with pytest.raises(UsageError, match="no such user"):
        connection.resolve_url(None)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://me:sec:r@t/@host/0", "rediss://me:***@host/0"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***&db=1"),
        ("unix://me:secret@/tmp/s?db=0", "unix://me:***@/tmp/s?db=0"),
        ("me:secret@host", "host"),
        ("redis://secret@host:1/0", "redis://***@host:1/0"),
        ("rediss://sec/ret@host/0", "rediss://***@host/0"),
        ("unix://secret@/tmp/s?db=0", "unix://***@/tmp/s?db=0"),
        ("unix:///tmp/a@b/s", "unix:///tmp/a@b/s"),
    ],
)
def test_password_is_never_shown(url: str, shown: str) -> None:
    """The password is masked in URLs of every form."""
    assert connection.masked(url) == shown


@pytest.mark.parametrize(
    "url", ["http://:secret@x", "localhost:6379", "redis://:secret@host:port/0", ":secret@x"]
)
def test_bad_urls_are_wrong_use(url: str) -> None:
    """An impossible URL is a UsageError without the password."""
    with pytest.raises(UsageError, match="Redis URL") as caught:
        connection.connect(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None or "secret" not in str(caught.value.__context__)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "redis://:secret@h/0?timeout=5",
            "unknown parameter 'timeout'; known are client_name, ",
        ),
        ("redis://:secret@h/0?decode_responses=True", "unknown parameter 'decode_responses'"),
        ("redis://:secret@h/0?ssl_cert_reqs=none", "'ssl_cert_reqs'. TLS needs rediss://"),
        ("unix:///tmp/s?parser_class=x", "unknown parameter 'parser_class'"),
        ("redis://:secret@h/0?protocol=9", "protocol is 2 or 3, not '9'"),
        ("rediss://:secret@h/0?ssl_foo=1", "unknown parameter 'ssl_foo'"),
        ("unix:///tmp/s?socket_keepalive=1", "unknown parameter 'socket_keepalive'"),
        ("redis://:pa?secretpart@h:1/0", "cannot be read: in a password, ? is written %3F"),
        ("redis://:pa?secret=part@h:1/0", "cannot be read: in a password, ? is written %3F"),
        ("redis://[::1:6379/0", "cannot be read: it must be SCHEME://HOST:PORT/DB"),
        ("redis://:secret@h/abc", "a database that is no number"),
        ("rediss://:secret@h/1x", "a database that is no number"),
    ],
)
def test_unknown_parts_of_a_url_are_named(url: str, words: str) -> None:
    """They would fail with a trace when the client first connects, or silently mean another
    database."""
    with pytest.raises(UsageError) as caught:
        connection.connect(url)
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_known_parameters_of_a_url_are_used(redis_url: str) -> None:
    """Also those of TLS, with its scheme."""
    joined = f"{redis_url}{'&' if '?' in redis_url else '?'}protocol=3&socket_timeout=5"
    with connection.connect(f"{joined}&client_name=one") as found:
        assert found.client_getname() in (b"one", "one")
    for url in ("redis://127.0.0.1:{}/%30?encoding=utf-8", "redis://127.0.0.1:{}/"):
        with pytest.raises(ServerError, match="cannot be reached"):
            connection.connect(url.format(free_port()))
    with pytest.raises(ServerError, match="cannot be reached"):
        connection.connect(f"rediss://127.0.0.1:{free_port()}/0?ssl_cert_reqs=none")


def test_a_url_without_a_scheme_is_told_both_kinds() -> None:
    """HOST:PORT may be meant as a Redis or as a gateway."""
    with pytest.raises(UsageError, match=r"redis://.*that of a gateway begins with http:// or"):
        connection.connect("studio.local:8080")


def test_nobody_there() -> None:
    """A refused port and a missing socket are reported in under a second, with the remedy."""
    assert "cannot be reached: is it running" in complaint(f"redis://127.0.0.1:{free_port()}/0")
    assert "cannot be reached" in complaint("unix:///tmp/there-is-no-such-socket")


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts the connection and never answers is reported after a timeout."""
    monkeypatch.setattr(connection, "PROBE_REPLY_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "does not answer" in complaint(f"redis://127.0.0.1:{port}/0")


def test_something_else_listens() -> None:
    """A port whose program closes the connection is reported as such."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        message = complaint(f"redis://127.0.0.1:{other.getsockname()[1]}/0")
        thread.join()
    assert "closed the connection" in message


# The words of redis-py for macOS: EHOSTUNREACH of connect(), EAI_NONAME of getaddrinfo().
NO_ROUTE = "Error 65 connecting to studio.local:6379. No route to host."
NO_NAME = "Error 8 connecting to {}:6379. nodename nor servname provided, or not known."


@pytest.mark.parametrize(
    ("text", "platform", "is_explained"),
    [
        (NO_ROUTE, "darwin", True),
        (NO_ROUTE, "linux", False),
        (NO_NAME.format("studio.local"), "darwin", True),
        (NO_NAME.format("studio.example.org"), "darwin", False),
        ("Error 61 connecting to studio.local:6379. Connection refused.", "darwin", False),
    ],
)
def test_the_local_network_of_macs_is_explained(
    text: str, platform: str, is_explained: bool
) -> None:
    """A Mac that may not reach its network says where to allow it, and that a daemon may."""
    fault = RedisConnectionError(text)
    message = connection.explain(fault, "redis://:secret@studio.local:6379/0", platform)
    assert ("Privacy & Security > Local Network" in message) == is_explained
    assert ("service install worker --daemon" in message) == is_explained
    assert "secret" not in message


@pytest.fixture(scope="module")
def locked() -> Iterator[RedisServer]:
    """A server with a password, and a user who may read only."""
    port = free_port()
    with running_server("--port", str(port)) as server:
        with server.connect() as redis:
            rights = ("~*", "&*", "+@read", "+@connection", "+info", "+ping")
            redis.execute_command("ACL", "SETUSER", "reader", "on", ">r", *rights)
            redis.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        server.url = f"127.0.0.1:{port}/0"
        yield server


def test_passwords(locked: RedisServer) -> None:
    """No password, a wrong one, an unknown user: each has its sentence, without the password."""
    assert "wants a password" in complaint(f"redis://{locked.url}")
    for login in (":wrong", "nobody:wrong"):
        message = complaint(f"redis://{login}@{locked.url}")
        assert "refuses the password or user" in message and "wrong" not in message
    with connection.connect(f"redis://:secret@{locked.url}") as redis:
        assert redis.ping()


def test_a_user_without_rights(locked: RedisServer) -> None:
    """The error of a user who may not write names the rights that are needed."""
    url = f"redis://reader:r@{locked.url}"
    with refused("does not let this user .*NOPERM.*URL of the right role", url) as redis:
        redis.set("k", "v")


def test_a_replica_has_its_sentence(redis_server: RedisServer) -> None:
    """Writing to a read-only replica, by a command or by a script, names the remedy."""
    with running_server("--replicaof", "127.0.0.1", "1") as replica:
        for write in (_set, _script):
            with refused(
                "is a read-only replica: use the URL of its primary", replica.url
            ) as redis:
                write(redis)


def test_a_full_server_has_its_sentence() -> None:
    """At maxmemory, commands and scripts say so, and that queued rows are not lost."""
    with running_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as full:
        for write in (_set, _script):
            with refused(r"is full \(maxmemory\).*queued are not lost", full.url) as redis:
                write(redis)


def _set(redis: Redis) -> None:
    for number in range(100):
        redis.set(f"k{number}", "x" * 100_000)


def _script(redis: Redis) -> None:
    for number in range(100):
        redis.eval("redis.call('SET', KEYS[1], ARGV[1])", 1, f"s{number}", "x" * 100_000)


def test_a_server_that_evicts_is_warned_of() -> None:
    """Eviction would delete jobs, so connecting warns of it."""
    said: list[str] = []
    with running_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as cache:
        connection.connect(cache.url, said.append).close()
    assert len(said) == 1 and "maxmemory-policy allkeys-lru" in said[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("MISCONF Redis is configured to save RDB snapshots", "cannot write to its disk"),
        ("NOREPLICAS Not enough good replicas to write.", "too few replicas"),
        ("MOVED 866 127.0.0.1:7001", "is a cluster"),
        ("unknown command 'LMOVE', with args", "use Redis 6.2 or newer"),
        ("ERR max number of clients reached", "accepts no more connections"),
        ("something new", "answers with an error: something new"),
    ],
)
def test_other_answers_have_their_sentence(text: str, sentence: str) -> None:
    """Errors that no test can cause are recognized by their words."""
    assert sentence in connection.explain(ResponseError(text), "redis://h")


def test_old_servers_are_refused() -> None:
    """Redis before 6.2 lacks what the queue needs."""
    with pytest.raises(ServerError, match=r"version 6\.0\.16; batchkv needs 6.2"):
        connection._refuse_old("redis://h", "6.0.16")
    connection._refuse_old("redis://h", "6.2.0")
    connection._refuse_old("redis://h", "10.0")


def test_loading_has_its_sentence(tmp_path: Path) -> None:
    """A server that still loads its data is reported at once."""
    with running_server("--enable-debug-command", "yes", "--key-load-delay", "2000",
                        "--save", "60 1", "--loading-process-events-interval-bytes", "1024",
                        "--rdbcompression", "no") as slow:  # fmt: skip
        with slow.connect() as redis:
            for number in range(2000):
                redis.set(f"k{number}", "x" * 100)
            redis.save()
        slow.stop()
        slow._answers = lambda: slow.socket.exists()  # type: ignore[method-assign]
        slow.start()
        assert "still loading its data" in complaint(slow.url)


def test_every_fault_is_one_line() -> None:
    """For every error of Redis the sentence has no line break and names the server."""
    message = connection.explain(RedisError("a\nb"), "redis://:pw@h:1/0")
    assert "\n" not in message and "redis://:***@h:1/0" in message
