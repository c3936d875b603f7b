"""Helpers of the hostile suite: a worker here, the commands here, and a trap that hears calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from redis import Redis

from batchkv_producer.cli import cli
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan, rows_of
from support.worker_harness import MODEL, QUEUE

# Everything that a terminal might obey: colours, a title (OSC), C1, a turned direction, a bell.
ESCAPES = "\x1b[31m\x1b]0;owned\x07\x9b31m\u202eevil\u2066\x85\x7f"
FORBIDDEN = "\x1b\x07\x9b\u202e\u2066\x85\x7f"

_PROCESS_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")


class Trap:
    """Hears what Python does while it is set. ``mark``: a path that no payload may make."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.heard: list[str] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event: of unpickling any is kept, of others those that name the mark."""
        if event == "pickle.find_class" or (
            event in (*_PROCESS_EVENTS, "os.mkdir", "open", "import")
            and self.mark.name in repr(args)
        ):
            self.heard.append(f"{event} {args!r}"[:200])

    def check(self) -> None:
        """Nothing was called."""
        assert not self.heard
        assert not self.mark.exists()


_traps: list[Trap] = []
_is_listening = threading.Event()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for trap in _traps:
        trap.hear(event, args)


@contextmanager
def trap(folder: Path) -> Iterator[Trap]:
    """A trap that is set for the length of a block, and checked at its end."""
    if not _is_listening.is_set():
        sys.addaudithook(_audit)  # for good: Python has no way to take one away
        _is_listening.set()
    here = Trap(folder / "made-by-a-payload")
    _traps.append(here)
    try:
        yield here
    finally:
        _traps.remove(here)
    here.check()


def burst(connection: Redis, plan: FakePlan | None = None, **settings: Any) -> BatchWorker:
    """A worker on a fake engine that works here until the queue is empty."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return FakeEngine(*rows_of(settings), plan or FakePlan())

    chosen = WorkerSettings(model=MODEL, **settings)
    worker = Worker([QUEUE], connection=connection, settings=chosen)
    worker.work(burst=True, logging_level="INFO")
    return worker


def batchkv(*arguments: object, url: str | None = None, **environ: str) -> Result:
    """The ``batchkv`` command in this process."""
    env = {**environ, **({"BATCHKV_REDIS_URL": url} if url else {})}
    return CliRunner(env=env).invoke(cli, [str(argument) for argument in arguments])
