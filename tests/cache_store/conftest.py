"""Tiers to test: a Redis server for the cache, an S3 server, and each tier in turn."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_cache_store.tiers.redis import RedisTier
from cache_store.places import MIB, S3_SETTINGS, objects_tier
from support.redis_server import RedisServer, running_server

START_SECONDS = 60.0


@pytest.fixture(scope="session")
def evicting_server() -> Iterator[RedisServer]:
    """A server for the cache alone, with a memory limit."""
    with running_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def cache_server(evicting_server: RedisServer) -> RedisServer:
    """That server, emptied first."""
    with evicting_server.connect() as connection:
        connection.flushall()
    return evicting_server


@pytest.fixture(scope="session")
def bucket_url() -> Iterator[str]:
    """An S3 server in another process, with the bucket ``blocks``."""
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("moto.server")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            assert server.poll() is None and time.monotonic() < deadline, "moto does not start"
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        client = boto3.client("s3", endpoint_url=url, **S3_SETTINGS)
        client.create_bucket(Bucket="blocks")
        client.close()
        yield url
    finally:
        server.terminate()
        server.wait(10)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["memory", "disk", "redis", "objects"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Each tier in turn, empty."""
    made: Tier
    if request.param == "memory":
        made = MemoryTier(16 * MIB)
    elif request.param == "disk":
        made = DiskTier(tmp_path / "cache", 16 * MIB)
    elif request.param == "redis":
        made = RedisTier(request.getfixturevalue("cache_server").url)
    else:
        made = objects_tier(request.getfixturevalue("bucket_url"), f"{request.node.name}/")
    yield made
    made.close()
