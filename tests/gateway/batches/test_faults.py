"""OpenAI's own client behind a network and a server that fail, in its short form."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI, _base_client
from redis import Redis

from clients.openai_session import FAULTS, NUM_ROWS, faulted_session
from support.fake_worker import FakeWorker
from support.gateway import Gateway, working
from support.http_faults import HttpFaults
from support.redis_server import RedisServer


@pytest.fixture
def worker(redis_server: RedisServer, client: OpenAI) -> Iterator[FakeWorker]:
    """A fake worker of the model ``fake``, on an empty server."""
    with working(redis_server.url) as found:
        yield found


def test_faults_repeat_and_lose_nothing(
    gateway: Gateway, worker: FakeWorker, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a session meets each fault once, and the client's own retries are enough.

    A create that is sent again finds its batch, and a delete finds its file deleted. No row is
    computed twice, and none is lost.
    """
    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.02)

    def session(name: str) -> int:
        with HttpFaults(gateway.port) as proxy:
            faulted_session(gateway.url, proxy, name, "fake")
            return proxy.num_faults

    with ThreadPoolExecutor(len(FAULTS)) as pool:
        assert list(pool.map(session, FAULTS)) == [11] * len(FAULTS)
    assert worker.num_done == NUM_ROWS * len(FAULTS)
