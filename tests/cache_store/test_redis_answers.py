"""A server at the cache's address that is no Redis, or a faulty one, is a TierError at worst."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, StreamRequestHandler, ThreadingTCPServer

import pytest

from batchkv_cache_store.errors import TierError
from batchkv_cache_store.lease import RedisLeases
from batchkv_cache_store.tiers.redis import RedisTier
from batchkv_worker.prefix.shared.access import open_access
from batchkv_worker.settings import WorkerSettings
from cache_store.places import MIB, name


@contextmanager
def _server(answer: bytes) -> Iterator[str]:
    """The URL of a server that gives this answer to every command."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            while (line := self.rfile.readline()).startswith(b"*"):
                for _ in range(int(line[1:])):
                    self.rfile.read(int(self.rfile.readline()[1:]) + 2)
                self.wfile.write(answer)

    class Server(ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # clients hang up in the midst
            pass

    handler: type[BaseRequestHandler] = Handler
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()


@pytest.mark.parametrize(
    "answer",
    [b":5\r\n", b"+OK\r\n", b"*0\r\n", b"$3\r\nabc\r\n", b"*1\r\n" * 2000 + b":1\r\n"],
    ids=["number", "ok", "list", "text", "deep"],
)
def test_answers_of_another_kind_are_trouble_of_the_tier(
    answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer ends a worker at its start or raises in a lookup; leases hold in the process."""
    with _server(answer) as url:
        tier = RedisTier(url, MIB)
        calls: list[Callable[[], object]] = [
            tier.check,
            tier.stats,
            lambda: tier.contains_many([name(1)]),
            lambda: tier.put(name(1), [b"x"]),
        ]
        for call in calls:
            with pytest.raises(TierError):
                call()
        tier.close()
        leases = RedisLeases(url)
        lease = leases.acquire(b"k" * 32)
        if lease is not None:
            leases.release(lease)
        leases.close()
        access = open_access(WorkerSettings(model="m", cache=f"{url}?max=2MB"))
        assert access is not None and "cache tier redis is away" in caplog.text
        access.leases.close()
        access.store.close(1)
