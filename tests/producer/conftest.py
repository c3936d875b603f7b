"""Fixtures of the producer's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.wire.transitions import Transitions


@pytest.fixture
def client(redis_connection: Redis) -> Client:
    """A client of an empty server."""
    return Client(redis_connection)


@pytest.fixture
def transitions(redis_connection: Redis) -> Transitions:
    """The moves, on an empty server."""
    return Transitions(redis_connection)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write objects (as JSON), strings or bytes as the lines of a file."""

    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        raw = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write
