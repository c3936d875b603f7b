"""Helpers of ``batchkv run``: outages of the server, and leftovers of workers that died."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchkv_producer.client import Client
from batchkv_producer.disk import full_home, is_full
from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.local.local_workers import remove_old_logs
from batchkv_producer.local.presence import reclaim_dead
from batchkv_producer.retry import read_with_retry
from batchkv_producer.server.home import HOME_VARIABLE, Home, home_from_environment, make_folders


class Outage:
    """The server is away: said once, mended if that is ours to do, and told when it is over."""

    def __init__(self, note: Callable[[str], None], revive: Callable[[], object] | None) -> None:
        self.is_on = False
        self._note = note
        self._revive = revive

    def look(self) -> None:
        """The server does not answer. Raises ServerError when it cannot be started again."""
        if self.is_on:
            return
        self.is_on = True
        doing = "starting it again" if self._revive else "waiting for it; Ctrl-C ends the run"
        self._note(f"the server is away: {doing}")
        if self._revive:
            self._revive()

    def end(self) -> None:
        """The server has answered."""
        if self.is_on:
            self.is_on = False
            self._note("the server is back")


def reclaim(client: Client, queue: str, worker_name: str, is_death: bool) -> int:
    """Take back what a worker of ours held."""
    return read_with_retry(lambda: client.reclaim(queue, worker_name, is_death=is_death))


def tidied_home(connection: Redis) -> Home:
    """The home folder, after what earlier runs left in it was seen to."""
    home = home_from_environment()
    make_folders(home)
    reclaim_dead(connection, home)
    remove_old_logs(home.logs)
    return home


def check_logs(home: Home) -> None:
    """Refuse, before anything is queued, a home folder in which no worker could write its log.

    Raises UsageError, or FullHomeError when the disk is full.
    """
    make_folders(home)
    try:
        with tempfile.TemporaryFile(dir=home.logs):
            pass
    except OSError as fault:
        if is_full(fault):
            raise full_home(home.path, str(fault.strerror)) from fault
        raise UsageError(
            f"workers cannot write their logs in {home.logs}: {fault.strerror}. "
            f"Set {HOME_VARIABLE} to a folder that you can write"
        ) from fault


def give_up() -> NoReturn:
    """For who watches an outage that is not worth waiting for."""
    raise ServerError("the server is away")


@contextmanager
def one_try(connection: Redis) -> Iterator[None]:
    """Inside, a server that is away is seen at once: whether to wait is decided by who asks."""
    before = connection.get_retry()
    connection.set_retry(Retry(NoBackoff(), 1))
    try:
        yield
    finally:
        if before is not None:
            connection.set_retry(before)
