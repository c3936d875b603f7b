"""Helpers of ``run`` and ``ask``: outages of the server, and the home folder of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchkv_producer.client import Client
from batchkv_producer.errors import ServerError
from batchkv_producer.local.local_workers import remove_old_logs
from batchkv_producer.local.presence import reclaim_dead
from batchkv_producer.retry import read_with_retry
from batchkv_producer.server.home import Home, home_from_environment, make_folders

STOPPING = (
    "stopping the workers: rows that have begun have up to 30 s to end; Ctrl-C again ends them by "
    "force"
)


class Outage:
    """An outage of the server: prints a note when it begins and ends, and restarts the server.

    ``revive`` starts the server again. It is None for a server that batchkv did not start.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        revive: Callable[[], object] | None,
        name: str = "the server",
    ) -> None:
        self.is_on = False
        self._name = name
        self._note = note
        self._revive = revive

    def begin(self) -> None:
        """The server does not answer. Raises ServerError if it cannot be started again."""
        if self.is_on:
            return
        self.is_on = True
        doing = "starting it again" if self._revive else "waiting for it; Ctrl-C ends the run"
        self._note(f"{self._name} is away: {doing}")
        if self._revive:
            self._revive()

    def end(self) -> None:
        """The server has answered."""
        if self.is_on:
            self.is_on = False
            self._note(f"{self._name} is back")


def reclaim(client: Client, queues: Sequence[str], worker_name: str, is_death: bool) -> int:
    """Put the jobs of a worker of this run back into their queues. Returns their number."""
    return sum(
        read_with_retry(partial(client.reclaim, queue, worker_name, is_death=is_death))
        for queue in queues
    )


def tidied_home(connection: Redis) -> Home:
    """The home folder, after jobs of dead workers were reclaimed and old logs deleted."""
    home = home_from_environment()
    make_folders(home)
    reclaim_dead(connection, home)
    remove_old_logs(home.logs)
    return home


def give_up() -> NoReturn:
    """A callback for an outage that is not worth a wait. Raises ServerError."""
    raise ServerError("the server is away")


@contextmanager
def one_try(connection: Redis) -> Iterator[None]:
    """Inside, a command to Redis is not retried by its client, so the caller sees an outage at once
    and decides how long to wait."""
    before = connection.get_retry()
    connection.set_retry(Retry(NoBackoff(), 1))
    try:
        yield
    finally:
        if before is not None:
            connection.set_retry(before)
