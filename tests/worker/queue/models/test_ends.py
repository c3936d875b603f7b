"""How hosts end when their processes cannot start, die again and again, or have to be hurried."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_worker.errors import EXIT_ENGINE_DIED
from batchkv_worker.queue.models import host as host_module
from batchkv_worker.queue.models import setbacks
from batchkv_worker.queue.models.groups import Group
from batchkv_worker.queue.models.holding import Command
from batchkv_worker.queue.models.host import Host, HostPlan
from batchkv_worker.queue.models.setbacks import FAILING_DEATHS, Setbacks
from support.worker_harness import wait_until

# A process that heeds signals as a worker does whose rows take for ever.
BUSY = """
import signal, sys, time
from batchkv_worker.queue.stop import StopRequest
stop = StopRequest(lambda: None)
signal.signal(signal.SIGTERM, stop.on_signal)
open(sys.argv[1], "w").close()
while not stop.is_cold:
    time.sleep(0.01)
"""


ALONE = Group(("a",))


def host_of(connection: Redis, *words: str, is_burst: bool = False, group: Group = ALONE) -> Host:
    """A host of one model, whose processes run this command."""
    command = Command(words, ("--weights", "auto"), "redis://nowhere", drain_seconds=60.0)
    return Host(connection, HostPlan("host", [group], {"a": 1.0}, 0.0, command, is_burst))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(setbacks, "DEATH_SECONDS", 0.01)


@pytest.mark.parametrize(
    "words", [(sys.executable, "-S", "-c", "raise SystemExit(70)"), ("/no/such/command",)]
)
def test_a_burst_ends_when_its_model_cannot_be_served(
    redis_connection: Redis, words: tuple[str, ...]
) -> None:
    """Its process dies, or cannot be started, five times. Then it leaves the rows, and says so."""
    Client(redis_connection).submit([{"prompt": "x"}], model="a")
    host, codes = host_of(redis_connection, *words, is_burst=True), list[int]()
    runner = threading.Thread(target=lambda: codes.append(host.run()), daemon=True)
    runner.start()
    runner.join(20)
    host.stop.on_parent_gone()  # so that a host that goes on ends with the test
    assert codes == [EXIT_ENGINE_DIED]
    assert host.num_loads == FAILING_DEATHS


def test_a_row_ends_the_count_of_deaths() -> None:
    """A model that dies now and then is served."""
    found = Setbacks()
    for _ in range(FAILING_DEATHS - 1):
        found.note_end("a", -9, 0.0)
    assert found.failure("a") == 0
    found.note_end("a", -9, 0.0)
    assert found.failure("a") == EXIT_ENGINE_DIED
    found.note_work("a")
    assert found.failure("a") == 0
    found.note_end("a", 2, 0.0)
    assert found.failure("a") == 2


def test_two_signals_at_once_reach_the_processes_as_two(
    redis_connection: Redis, tmp_path: Path
) -> None:
    """A host that hung in a call has both to pass on. A worker takes two close signals as one."""
    busy = tmp_path / "busy"
    host = host_of(redis_connection, sys.executable, "-c", BUSY, str(busy))
    runner = threading.Thread(target=host.run, daemon=True)
    runner.start()
    wait_until(busy.exists)
    host.stop.is_cold = True
    host.stop.warm_since = time.monotonic()
    runner.join(20)
    is_over = not runner.is_alive()
    host.stop.on_parent_gone()
    assert is_over


def test_a_process_gets_the_flags_of_its_group(redis_connection: Redis, tmp_path: Path) -> None:
    """Behind those of all, so that they count."""
    told = tmp_path / "told"
    script = f"import sys; open({str(told)!r}, 'w').write(' '.join(sys.argv)); sys.exit(70)"
    Client(redis_connection).submit([{"prompt": "x"}], model="a")
    group = Group(("a",), 5, "packed")
    host = host_of(redis_connection, sys.executable, "-c", script, is_burst=True, group=group)
    runner = threading.Thread(target=host.run, daemon=True)
    runner.start()
    wait_until(lambda: told.exists() and told.read_text())
    host.stop.on_parent_gone()
    runner.join(20)
    assert told.read_text().endswith("--weights auto --memory 5 --weights packed")
