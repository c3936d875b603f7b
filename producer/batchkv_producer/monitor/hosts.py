"""The record of a host: a worker that may serve several models, and holds some of them.

A host is a process without a model. Each model that it holds has a process of its own, which is a
worker like any other, with a record and a name of its own. The host's record is RQ's record of a
worker that is in no queue's set, so it is listed and can be drained, and nobody counts it as a
worker that serves a queue.

A host that wants to load a model **claims** it: its record says so, and one script writes that
only if no other host has claimed anything since this one last looked. So two hosts never load a
model for the same rows without knowing of each other. A claim ends with its host's heartbeats.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.scripts import Scripts

WISH_SECONDS = 120
MAX_MODELS = 64  # of one host
MAX_TEXT_CHARS = 2**16


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a heartbeat or a claim. ``is_written``: False if another claim came first."""

    is_written: bool
    version: str


class HostMoves(Scripts):
    """Writes the record of one host. Raises RedisError."""

    def beat(self, name: str, fields: Mapping[str, str], ttl_seconds: int) -> Beat:
        """Write the record. The version is what the next ``claim`` expects."""
        return self._write(name, "", fields, ttl_seconds)

    def claim(self, name: str, version: str, fields: Mapping[str, str], ttl_seconds: int) -> Beat:
        """Write the record, unless a host has claimed something since this version."""
        return self._write(name, version, fields, ttl_seconds)

    def remove(self, name: str) -> None:
        """Remove the record, because the host ends."""
        key = redis_keys.worker(name)
        with self.connection.pipeline(transaction=False) as pipeline:
            pipeline.srem(redis_keys.workers(), key)
            pipeline.delete(key)
            pipeline.execute()

    def _write(self, name: str, version: str, fields: Mapping[str, str], ttl_seconds: int) -> Beat:
        keys = [redis_keys.worker(name), redis_keys.workers(), redis_keys.MODEL_CLAIMS]
        flat = [word for pair in fields.items() for word in pair]
        is_written, now = self._run("host", keys, [version, ttl_seconds, *flat])
        return Beat(bool(is_written), now.decode() if isinstance(now, bytes) else str(now))


def wish_for(connection: Redis, model: str) -> None:
    """Let a host that may serve a model load it, as if a row of it waited. Raises RedisError.

    The wish ends after two minutes, unless somebody asks again.
    """
    key = redis_keys.live_wish(redis_keys.queue_name(model))
    with connection.pipeline(transaction=True) as pipeline:
        pipeline.hset(key, "at", str(int(time.time())))
        pipeline.expire(key, WISH_SECONDS)
        pipeline.execute()


def encode_models(models: tuple[str, ...]) -> str:
    """``bkv_models``: the models that a host may serve."""
    return json.dumps(models)


def encode_held(held: Mapping[str, str]) -> str:
    """``bkv_held``: model -> name of the worker that holds it, or is about to."""
    return json.dumps(held)


def decode_models(text: str) -> tuple[str, ...]:
    """The models of a record. Anything else is empty, because anybody may have written it."""
    found = _decode(text)
    names = found if isinstance(found, list) else []
    return tuple(name for name in names if isinstance(name, str))[:MAX_MODELS]


def decode_held(text: str) -> dict[str, str]:
    """What a host holds, by model. Anything else is empty."""
    found = _decode(text)
    pairs = list(found.items()) if isinstance(found, dict) else []
    return {key: value for key, value in pairs[:MAX_MODELS] if isinstance(value, str)}


def _decode(text: str) -> object:
    try:
        return json.loads(text) if 0 < len(text) <= MAX_TEXT_CHARS else None
    except (ValueError, RecursionError):
        return None
