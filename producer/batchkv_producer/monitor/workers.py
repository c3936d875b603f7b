"""The live workers and the number of their jobs, from RQ's own records."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from redis import Redis

from batchkv_producer.monitor.hosts import decode_held, decode_models
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import MAX_ADAPTERS, is_adapter_name, served_name
from batchkv_producer.wire.figures.worker import WorkerFigures, decode_figures

MAX_DIGITS = 19  # of a count: Redis has 64-bit integers
LOADING = ("loading", "downloading", "measuring")  # ``doing`` begins so before the first row
PAUSED = "paused"  # ``doing`` of a polite worker on battery begins so
DRAINED = ("draining", "drained")  # ``doing`` of a drained worker begins so
HEARTBEAT_SECONDS = 15.0  # of a worker whose record has no other interval
MISSED_HEARTBEATS = 2
COMPARED_SECONDS = 5.0  # of work, before a worker's speed is compared with that of others
MAX_TEXT_CHARS = 1024
MAX_ADAPTERS_CHARS = 128 * MAX_ADAPTERS
MAX_HELD_READ = 10_000  # leases read to count the jobs of a worker
ASK_NAME_PREFIX = "run-ask"  # names of workers of `batchkv ask` begin so


def local_name_prefix(batch_id: str) -> str:
    """The beginning of the names of a run's own workers."""
    return f"run-{batch_id[:8]}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One live worker. ``last_heartbeat`` is in seconds since 1970. It holds ``num_running`` jobs.

    The worker itself reports ``doing`` and the fields after it. For older workers they are empty.
    ``doing`` is more precise than RQ's state: ``loading 2.1 of 7.3 GB``, ``finishing 12 rows``.
    ``tokens_per_second`` is the rate of the last minute in which it had rows.

    ``adapters``: the names of the adapters that it serves besides the model. If the worker was read
    for the queue of one of them, ``model`` and ``fingerprint`` are those with this adapter.

    ``silent_seconds``: the time since its last heartbeat, by the server's clock. A heartbeat is due
    every ``heartbeat_seconds``. ``is_away``: it has missed two.

    ``models``: of a host, the models that it may serve. It has no ``model`` and no queue itself.
    ``held``: (model, worker) of those that it holds, each in a worker of its own.
    ``refused``: those of ``models`` that it could not load. Its log says why, and it tries again.
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
    fingerprint: str = ""  # of its model's files; "" until they are loaded
    scheme: str = ""
    dtype: str = ""
    abilities: tuple[str, ...] | None = None  # that older versions lack; None: an older version
    tokens_per_second: int | None = None
    memory_bytes: int | None = None
    num_slots: int | None = None  # rows that it decodes at once; 0 until its model is loaded
    silent_seconds: float = 0.0
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    is_away: bool = False
    adapters: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def is_host(self) -> bool:
        """Whether it has workers of its own, one for each model that it holds."""
        return bool(self.models)

    @property
    def shown_state(self) -> str:
        """The state, for people."""
        return "asleep or away" if self.is_away else self.doing or self.state

    @property
    def is_loading(self) -> bool:
        """Whether it has not begun to take rows."""
        return self.doing.startswith(LOADING)

    @property
    def is_paused(self) -> bool:
        """Whether it takes no rows until its machine runs on mains again."""
        return self.doing.startswith(PAUSED)

    @property
    def is_drained(self) -> bool:
        """Whether it takes no rows until somebody resumes it. It may still end some."""
        return self.doing.startswith(DRAINED)

    @property
    def is_resting(self) -> bool:
        """Whether it takes no rows for now: it is paused or drained."""
        return self.is_paused or self.is_drained


def text_map(raw: dict[bytes, bytes]) -> dict[str, str]:
    """A hash of Redis as text. Bytes that are not UTF-8 are replaced."""
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in raw.items()}


def live_workers(connection: Redis, queue: str) -> list[str]:
    """The names of the live workers of a queue, or of all queues for "".

    RQ's sets keep the keys of killed workers, but their hashes expire. So only keys count whose
    hash has a birth and no death.
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
    """The live workers of one queue. ``num_running`` is 0 except for workers that are away, because
    it takes long to count."""
    now, pairs = _records(connection, queue)
    found = [_worker_info(name, values, 0, now, queue) for name, values in pairs]
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


def listed_workers(connection: Redis) -> list[WorkerInfo]:
    """As ``read_workers``, without the number of their jobs, which takes long to count."""
    now, pairs = _records(connection, "")
    return [_worker_info(name, values, 0, now) for name, values in pairs]


def hosts_of(found: Iterable[WorkerInfo], model: str) -> list[str]:
    """The names of the hosts among these that may load a model, whether they hold it or not."""
    live = (one for one in found if model in one.models and not one.is_away)
    return [one.name for one in live if model not in one.refused]


def refusing_hosts(found: Iterable[WorkerInfo], model: str) -> list[str]:
    """The names of the hosts among these that were to serve a model, and could not load it."""
    return [one.name for one in found if model in one.refused and not one.is_away]


def served_models(connection: Redis, *, with_loading: bool = False) -> list[str]:
    """The models that workers serve now, those with an adapter as ``MODEL@NAME``.

    A worker that is loading serves none yet. ``with_loading``: these count as well. So do, always,
    models that a host may load.
    """
    found = [worker for worker in read_workers(connection) if not worker.is_away]
    live = [worker for worker in found if with_loading or not worker.is_loading]
    names = {worker.model for worker in live if worker.model}
    names |= {served_name(w.model, each) for w in live if w.model for each in w.adapters}
    names |= {m for worker in found for m in worker.models if m not in worker.refused}
    return sorted(names)


def workers_with_figures(connection: Redis) -> list[tuple[WorkerInfo, WorkerFigures | None]]:
    """All live workers that serve a batchkv queue, without the number of their jobs. None: a worker
    of an older version, which has no figures."""
    now, pairs = _records(connection, "")
    return [
        (_worker_info(name, values, 0, now), decode_figures(values.get("bkv_figures", "")))
        for name, values in pairs
    ]


def _records(connection: Redis, queue: str) -> tuple[int, list[tuple[str, dict[str, str]]]]:
    """The server's time, and (name, record) of a queue's live workers; "": of all our queues."""
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


def _worker_info(
    name: str, values: dict[str, str], num_running: int, now: int, queue: str = ""
) -> WorkerInfo:
    """The worker of a record, as one of its queues sees it. ``now`` is the server's time."""
    model, fingerprint = _text_of(values, "bkv_model"), values.get("bkv_fingerprint", "")
    adapters = dict(_adapters_of(values))
    models = decode_models(values.get("bkv_models", ""))
    # RQ's tools list a host with the queues of its models, but it takes no row itself.
    queues = () if models else tuple(values.get("queues", "").split(","))
    for adapter, its_fingerprint in adapters.items():
        served = served_name(model, adapter)
        if queue and redis_keys.queue_name(served) == queue:
            model, fingerprint = served, its_fingerprint
            break
    silent = _silent_seconds(values, now)
    beat = _number(values, "bkv_beat_ms") / 1000 or HEARTBEAT_SECONDS
    return WorkerInfo(
        name=name,
        hostname=values.get("hostname", ""),
        pid=_number(values, "pid"),
        queues=queues,
        state=values.get("state", ""),
        last_heartbeat=_seconds(values.get("last_heartbeat", "")),
        num_running=num_running,
        num_successful=_number(values, "successful_job_count"),
        num_failed=_number(values, "failed_job_count"),
        doing=_text_of(values, "bkv_state"),
        version=_text_of(values, "bkv_version"),
        model=model,
        fingerprint=fingerprint,
        scheme=_text_of(values, "bkv_scheme"),
        dtype=values.get("bkv_dtype", ""),
        abilities=tuple(values["bkv_abilities"].split()) if "bkv_abilities" in values else None,
        tokens_per_second=_number_or_none(values, "bkv_tokens_per_second"),
        memory_bytes=_number_or_none(values, "bkv_memory"),
        num_slots=_number_or_none(values, "bkv_slots"),
        silent_seconds=silent,
        heartbeat_seconds=beat,
        is_away=silent > MISSED_HEARTBEATS * beat + 1,  # the server's time is in whole seconds
        adapters=tuple(adapters),
        models=models,
        held=tuple(decode_held(values.get("bkv_held", "")).items()),
        refused=decode_models(values.get("bkv_refused", "")),
    )


def _adapters_of(values: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, fingerprint) of the adapters in a record. Anything else in it is left out."""
    for word in values.get("bkv_adapters", "")[:MAX_ADAPTERS_CHARS].split():
        name, _, fingerprint = word.partition(":")
        if is_adapter_name(name):
            yield name, fingerprint


def seconds_silent(connection: Redis, name: str) -> float:
    """Seconds since a worker's last heartbeat. Infinity if the server has no record of it."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.time()
        pipeline.hgetall(redis_keys.worker(name))
        (now, _), found = pipeline.execute()
    return _silent_seconds(text_map(found), now) if found else math.inf


def _silent_seconds(values: dict[str, str], now: int) -> float:
    if "bkv_seen" in values:
        return max(0.0, float(now - _number(values, "bkv_seen")))
    # The record of an older or very new worker only has a time by the worker's own clock.
    last = _seconds(values.get("last_heartbeat", ""))
    return max(0.0, time.time() - last) if last else 0.0


def _number(values: dict[str, str], name: str) -> int:
    """A number in a record. 0 if the text is no number, because anybody may have written it."""
    text = values.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else 0


def _text_of(values: dict[str, str], name: str) -> str:
    """A text in a record, cut to one line's length, because anybody may have written it."""
    return values.get(name, "")[:MAX_TEXT_CHARS]


def _number_or_none(values: dict[str, str], name: str) -> int | None:
    return _number(values, name) if name in values else None


def _seconds(iso: str) -> float:
    try:
        moment = datetime.fromisoformat(iso)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _count_held(connection: Redis, queues: Iterable[str]) -> dict[str, int]:
    """Worker name -> number of jobs that it holds in these queues."""
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
