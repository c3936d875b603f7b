"""The page's parts that need no gateway: opening it, the figures and the history of workers."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_gateway import worker_history
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.page.opening import open_page
from batchkv_gateway.page.worker_facts import figures_of
from batchkv_gateway.worker_history import WorkerHistory
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.wire.figures.worker import WorkerFigures

URL = "http://127.0.0.1:1/"


def opened(connection: Redis, folder: Path) -> str:
    """The address that the browser gets."""
    found: list[str] = []
    is_open = threading.Event()

    def browse(url: str) -> bool:
        found.append(url)
        is_open.set()
        return True

    keys = KeyStore(connection)
    open_page(URL, keys, Sessions(connection, keys), folder, browse)
    assert is_open.wait(20)
    return found[0]


def test_the_browser_gets_a_closed_file_with_a_good_ticket(
    redis_connection: Redis, tmp_path: Path
) -> None:
    """Its command line has no ticket; without keys it gets the address itself."""
    assert opened(redis_connection, tmp_path) == URL
    keys = KeyStore(redis_connection)
    keys.add("laptop")
    left = tmp_path / "open-of-a-killed-gateway.html"
    left.touch()
    address = opened(redis_connection, tmp_path)
    assert address.startswith("file://") and "ticket" not in address
    (file,) = tmp_path.iterdir()
    assert address.endswith(file.name) and not left.exists()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ticket = re.search(rf"{URL}#ticket=([\w-]+)", file.read_text())
    assert ticket and Sessions(redis_connection, keys).use_ticket(ticket[1])


def test_figures_of_workers_become_shares() -> None:
    """Hits are shares of the blocks that were asked for; an older worker has no figures.

    A speed is compared if it is of five seconds of work.
    """
    counts = {"tokens.prompt": 200.0, "tokens.cached": 50.0, "cache_blocks_wanted": 10.0}
    counts |= {"cache_hits.disk": 4.0, "cache_hits.redis": 1.0}
    levels = {"pressure": 2.0, "kv_memory": 5.0, "kv_memory_budget": 9.0, "rows.decode": 3.0}
    found = figures_of(WorkerFigures(0.0, counts, levels))
    assert found["cached_share"] == 0.25
    assert found["hit_rates"] == {"disk": 0.4, "redis": 0.1}
    assert (found["pressure"], found["slots_used"]) == ("critical", 3.0)
    assert not found["is_comparable"]
    for seconds, is_comparable in ((4.9, False), (5.0, True)):
        busy = WorkerFigures(0.0, {}, {"busy_seconds": seconds})
        assert figures_of(busy)["is_comparable"] is is_comparable
    assert figures_of(None) == {}
    assert figures_of(WorkerFigures(0.0))["hit_rates"] == {}


def test_history_has_a_day_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point a look, at most those of a day; a worker that is gone for a day leaves.

    One without rows is at 0, also while it reports the speed of its last ones.
    """
    there: list[Any] = []
    monkeypatch.setattr(worker_history, "read_workers", lambda _: there)
    monkeypatch.setattr(worker_history, "MAX_POINTS", 3)
    history = WorkerHistory(Redis())
    there[:] = [
        worker("a", 10),
        worker("b", 20, is_away=True),
        worker("c", None),
        worker("d", 30, 0),
    ]
    for now in (0, 60, 120, 180):
        history.look(now)
    assert history.points() == {
        "a": [(60, 10), (120, 10), (180, 10)],
        "b": [(60, 0), (120, 0), (180, 0)],
        "d": [(60, 0), (120, 0), (180, 0)],
    }
    there[:] = [worker("a", 11)]
    history.look(400)
    assert history.points() == {"a": [(120, 10), (180, 10), (400, 11)]}


def worker(
    name: str, rate: int | None, num_running: int = 1, *, is_away: bool = False
) -> WorkerInfo:
    return WorkerInfo(name, "host", 1, (), "busy", 0.0, num_running, 0, 0,
                      tokens_per_second=rate, is_away=is_away)  # fmt: skip
