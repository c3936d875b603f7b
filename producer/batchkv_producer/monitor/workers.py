"""The live workers and what they hold, from RQ's own records."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from redis import Redis

from batchkv_producer.wire import redis_keys

MAX_DIGITS = 19  # of a count: Redis's own are of 64 bits
# How what a worker does begins before it takes its first row.
LOADING = ("loading", "downloading", "measuring")
HEARTBEAT_SECONDS = 15.0  # of a worker that does not say otherwise
MISSED_HEARTBEATS = 2
MAX_TOLD_CHARS = 1024
MAX_HELD_READ = 10_000  # leases looked at to count what a worker holds
ASK_NAME_PREFIX = "run-ask"  # of the names of ask's own workers


def local_name_prefix(batch_id: str) -> str:
    """What the names of a run's own workers begin with."""
    return f"run-{batch_id[:8]}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One live worker. ``last_heartbeat`` is seconds since 1970; ``num_running`` jobs it holds.

    From ``doing`` on it is what the worker tells of itself; older workers do not, and it is empty.
    ``doing`` is more than RQ's state says: ``loading 2.1 of 7.3 GB``, ``finishing 12 rows``.
    ``tokens_per_second`` are those generated in the last minute, while there were rows.

    ``silent_seconds`` have passed, by the server's clock, since it was heard of, which should be
    every ``heartbeat_seconds``; ``is_away``: it has missed two.
    """

    name: str
    hostname: str
    pid: int
    queues: tuple[str, ...]
    state: str
    last_heartbeat: float
    num_running: int
    num_successful: int
    num_failed: int
    doing: str = ""
    version: str = ""
    model: str = ""
    fingerprint: str = ""  # of its model's files, once they are loaded
    scheme: str = ""
    dtype: str = ""
    abilities: tuple[str, ...] | None = None  # beyond what every version can; None: an older one
    tokens_per_second: int | None = None
    memory_bytes: int | None = None
    silent_seconds: float = 0.0
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    is_away: bool = False

    @property
    def shown_state(self) -> str:
        """The state, for people."""
        return "asleep or away" if self.is_away else self.doing or self.state

    @property
    def is_loading(self) -> bool:
        """Whether it takes no rows yet."""
        return self.doing.startswith(LOADING)


def text_map(raw: dict[bytes, bytes]) -> dict[str, str]:
    """A hash as text; bytes that are no UTF-8 are replaced."""
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in raw.items()}


def live_workers(connection: Redis, queue: str) -> list[str]:
    """Names of the workers that serve a queue (all of them for ""): born, and not yet dead.

    RQ's sets keep the keys of workers that were killed; their hashes expire.
    """
    members: Any = connection.smembers(redis_keys.workers(queue))
    keys = sorted(key.decode("utf-8", "replace") for key in members)
    with connection.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hmget(key, "birth", "death")
        states = pipeline.execute()
    prefix = redis_keys.worker("")
    return [
        key.removeprefix(prefix)
        for key, (birth, death) in zip(keys, states, strict=True)
        if birth and not death
    ]


def serving_workers(connection: Redis, queue: str) -> list[WorkerInfo]:
    """The live workers of one queue. ``num_running``, which takes long to count, is 0 but of those
    that are away."""
    now, pairs = _records(connection, queue)
    found = [_worker_info(name, values, 0, now) for name, values in pairs]
    num_held = _count_held(connection, [queue]) if any(w.is_away for w in found) else {}
    return [
        replace(worker, num_running=num_held.get(worker.name, 0)) if worker.is_away else worker
        for worker in found
    ]


def read_workers(connection: Redis) -> list[WorkerInfo]:
    """All live workers that serve a batchkv queue."""
    now, pairs = _records(connection, "")
    queues = {queue for _, values in pairs for queue in values["queues"].split(",")}
    num_held = _count_held(connection, queues)
    return [_worker_info(name, values, num_held.get(name, 0), now) for name, values in pairs]


def _records(connection: Redis, queue: str) -> tuple[int, list[tuple[str, dict[str, str]]]]:
    """The server's time, and (name, record) of a queue's live workers; for "" of all of ours."""
    names = live_workers(connection, queue)
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.time()
        for name in names:
            pipeline.hgetall(redis_keys.worker(name))
        (now, _), *found = pipeline.execute()
    hashes = [text_map(raw) for raw in found]
    pairs = [
        (name, values)
        for name, values in zip(names, hashes, strict=True)
        if redis_keys.QUEUE_PREFIX in values.get("queues", "")
    ]
    return now, pairs


def _worker_info(name: str, values: dict[str, str], num_running: int, now: int) -> WorkerInfo:
    """``now`` is the server's time."""
    silent = _silent(values, now)
    beat = _whole(values, "bkv_beat_ms") / 1000 or HEARTBEAT_SECONDS
    return WorkerInfo(
        name=name,
        hostname=values.get("hostname", ""),
        pid=_whole(values, "pid"),
        queues=tuple(values.get("queues", "").split(",")),
        state=values.get("state", ""),
        last_heartbeat=_seconds(values.get("last_heartbeat", "")),
        num_running=num_running,
        num_successful=_whole(values, "successful_job_count"),
        num_failed=_whole(values, "failed_job_count"),
        doing=_text_of(values, "bkv_state"),
        version=_text_of(values, "bkv_version"),
        model=_text_of(values, "bkv_model"),
        fingerprint=values.get("bkv_fingerprint", ""),
        scheme=_text_of(values, "bkv_scheme"),
        dtype=values.get("bkv_dtype", ""),
        abilities=tuple(values["bkv_abilities"].split()) if "bkv_abilities" in values else None,
        tokens_per_second=_whole_if_said(values, "bkv_tokens_per_second"),
        memory_bytes=_whole_if_said(values, "bkv_memory"),
        silent_seconds=silent,
        heartbeat_seconds=beat,
        is_away=silent > MISSED_HEARTBEATS * beat + 1,  # the server's time is in whole seconds
    )


def seconds_silent(connection: Redis, name: str) -> float:
    """How long nothing was heard of a worker; infinity when the server has no record of it."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.time()
        pipeline.hgetall(redis_keys.worker(name))
        (now, _), found = pipeline.execute()
    return _silent(text_map(found), now) if found else math.inf


def _silent(values: dict[str, str], now: int) -> float:
    if "bkv_seen" in values:
        return max(0.0, float(now - _whole(values, "bkv_seen")))
    # An older worker, or one that has just begun: by its own clock.
    last = _seconds(values.get("last_heartbeat", ""))
    return max(0.0, time.time() - last) if last else 0.0


def _whole(values: dict[str, str], name: str) -> int:
    """A number of a record that anybody may have written: 0 when it is none."""
    text = values.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else 0


def _text_of(values: dict[str, str], name: str) -> str:
    """What a worker, or whoever writes its record, tells of itself: no more than a line of it."""
    return values.get(name, "")[:MAX_TOLD_CHARS]


def _whole_if_said(values: dict[str, str], name: str) -> int | None:
    return _whole(values, name) if name in values else None


def _seconds(iso: str) -> float:
    try:
        moment = datetime.fromisoformat(iso)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _count_held(connection: Redis, queues: Iterable[str]) -> dict[str, int]:
    """Worker name -> jobs that it holds in these queues."""
    counts: dict[str, int] = {}
    for queue in queues:
        leases: Any = connection.zrange(redis_keys.registry("wip", queue), 0, MAX_HELD_READ - 1)
        with connection.pipeline(transaction=False) as pipeline:
            for lease in leases:
                job_id = lease.decode("utf-8", "replace").rpartition(":")[0]
                pipeline.hget(redis_keys.job(job_id), "worker_name")
            for holder in pipeline.execute():
                name = (holder or b"").decode("utf-8", "replace")
                counts[name] = counts.get(name, 0) + 1
    return counts
