"""A host's record on the server, which ``batchkv workers`` shows."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.local.presence import reclaim_dead_of_home
from batchkv_producer.monitor.hosts import HostMoves, encode_held, encode_models
from batchkv_producer.monitor.workers import listed_workers
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import iso_now
from batchkv_worker.errors import SettingsError
from batchkv_worker.queue.worker_record import constant_fields

BEAT_SECONDS = 2.0  # a heartbeat comes every second, and a look may take as long
TTL_SECONDS = 60  # RQ's tools list it for so long after its death


class HostRecord:
    """The record of one host. Raises RedisError."""

    def __init__(self, connection: Redis, name: str, models: Sequence[str]) -> None:
        self._connection = connection
        self._moves = HostMoves(connection)
        self._name = name
        self.refused: Sequence[str] = ()  # models that could not be loaded; the host sets it
        self._constant = {
            "birth": iso_now(),
            "queues": ",".join(map(redis_keys.queue_name, models)),
            "hostname": socket.gethostname(),
            "pid": str(os.getpid()),
            "bkv_models": encode_models(tuple(models)),
            "bkv_beat_ms": f"{1000 * BEAT_SECONDS:.0f}",
            **constant_fields(),
        }

    def register(self) -> None:
        """Write the record. SettingsError if a worker of this name lives.

        The name of one that died on this machine is free at once, because its death is certain.
        """
        if self._is_taken:
            reclaim_dead_of_home(self._connection)
        if self._is_taken:
            raise SettingsError(
                f"--name {self._name}: a worker of that name is running, or died a minute ago"
            )
        self.beat({}, "loading")

    @property
    def _is_taken(self) -> bool:
        found = listed_workers(self._connection)
        return any(one.name == self._name and not one.is_away for one in found)

    def beat(self, held: Mapping[str, str], words: str) -> str:
        """A heartbeat; returns the version that the next claim expects."""
        return self._moves.beat(self._name, self._fields(held, words), TTL_SECONDS).version

    def claim(self, version: str, held: Mapping[str, str], words: str) -> bool:
        """Claim what is held from now on. False if another host claimed something first."""
        fields = self._fields(held, words)
        return self._moves.claim(self._name, version, fields, TTL_SECONDS).is_written

    def remove(self) -> None:
        """Remove the record. A server that is away does not delay the end."""
        with suppress(RedisError):
            self._moves.remove(self._name)

    def _fields(self, held: Mapping[str, str], words: str) -> dict[str, Any]:
        state = "busy" if held else "idle"
        changing = {"state": state, "last_heartbeat": iso_now(), "bkv_state": words}
        refused = encode_models(tuple(self.refused))
        held_now = encode_held(held)
        return {**self._constant, **changing, "bkv_held": held_now, "bkv_refused": refused}
