"""Fixtures of the gateway's tests: one gateway for a module, and an empty server for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from redis import Redis

from support.gateway import Gateway, running_gateway
from support.redis_server import RedisServer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder of the module's gateway."""
    return tmp_path_factory.mktemp("gateway") / "home"


@pytest.fixture(scope="module")
def gateway(redis_server: RedisServer, home: Path) -> Iterator[Gateway]:
    """A gateway whose limits are small."""
    flags = ("--max-file", "200KB", "--max-rows", "50")
    with running_gateway(redis_server.url, home, *flags) as found:
        yield found


@pytest.fixture
def client(gateway: Gateway, redis_connection: Redis) -> Iterator[OpenAI]:
    """OpenAI's client of the gateway, on an empty server. It does not try again."""
    with gateway.client(max_retries=0) as found:
        yield found
