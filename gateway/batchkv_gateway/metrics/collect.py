"""Reads the figures of all workers and queues from Redis, at each request of ``/metrics``.

A worker whose heartbeat has lapsed is left out. Anybody with the URL of Redis may write a record,
so texts are bounded; the library escapes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from redis import Redis

from batchkv_gateway.metrics import table
from batchkv_gateway.metrics.table import Kind, Metric
from batchkv_producer.monitor.listing import count_open
from batchkv_producer.monitor.queue_state import QueueLoad, read_loads
from batchkv_producer.monitor.samples import read_totals
from batchkv_producer.monitor.workers import WorkerInfo, workers_with_figures
from batchkv_producer.server.memory_use import read_used_bytes
from batchkv_producer.wire.figures.samples import WorkCounts
from batchkv_producer.wire.figures.worker import Times, WorkerFigures

MAX_LABEL_CHARS = 128
MAX_BATCHES = 1000  # the newest, whose state is read

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Live = Sequence[tuple[WorkerInfo, WorkerFigures | None]]


def label(text: str) -> str:
    """A label's value: one line of bounded length. Different texts stay different."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    if shown == text and len(text) <= MAX_LABEL_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{shown[: MAX_LABEL_CHARS - 9]}~{digest}"


def read_families(connection: Redis) -> list[Family]:
    """All metrics of this Redis. May raise RedisError."""
    live = [each for each in workers_with_figures(connection) if not each[0].is_away]
    return [*_worker_families(live), *_queue_families(connection, live), *_server(connection)]


def _family(metric: Metric, labels: Iterable[str]) -> Family:
    names = [*labels, *metric.labels]
    if metric.kind is Kind.HISTOGRAM:
        return HistogramMetricFamily(metric.name, metric.about, labels=names)
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(metric.name, metric.about, labels=names)
    return GaugeMetricFamily(metric.name, metric.about, labels=names)


# -- workers


def _worker_families(live: Live) -> Iterator[Family]:
    for metric in table.WORKERS:
        family = _family(metric, table.WORKER_LABELS)
        for worker, figures in live:
            labels = [label(text) for text in (worker.name, worker.model, worker.scheme)]
            if metric.key:
                _add_figures(family, metric, labels, figures or WorkerFigures(0))
            else:
                _add_fact(family, metric, labels, worker, figures)
        yield family


def _add_figures(family: Family, metric: Metric, labels: list[str], figures: WorkerFigures) -> None:
    """Add all values whose keys are the metric's, with the rest of the key as labels."""
    found = {Kind.COUNTER: figures.counts, Kind.GAUGE: figures.levels}
    for key, value in found.get(metric.kind, figures.times).items():
        first, *rest = key.removeprefix(metric.key).split(".")
        if not key.startswith(metric.key) or first or len(rest) != len(metric.labels):
            continue
        if isinstance(value, Times):
            counts = accumulate(value.counts)
            bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
            buckets = [(bound, float(n)) for bound, n in zip(bounds, counts, strict=True)]
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric([*labels, *rest], buckets, value.total_seconds)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric([*labels, *rest], value)


def _add_fact(
    family: Family,
    metric: Metric,
    labels: list[str],
    worker: WorkerInfo,
    figures: WorkerFigures | None,
) -> None:
    """Add a value that is no figure by itself."""
    assert not isinstance(family, HistogramMetricFamily)
    if metric is table.WORKER_INFO:
        more = [label(text) for text in (worker.hostname, worker.version, worker.dtype)]
        family.add_metric([*labels, *more], 1)
    elif metric is table.WORKER_HEARTBEAT:
        family.add_metric(labels, worker.silent_seconds)
    elif metric is table.WORKER_LOADING:
        family.add_metric(labels, worker.is_loading)
    elif figures is not None and metric is table.WORKER_START:
        family.add_metric(labels, figures.since)
    elif figures is not None and metric is table.WORKER_MISSED:
        counts = figures.counts
        wanted, found = counts.get("cache_blocks_wanted"), counts.get("cache_blocks_found", 0)
        if wanted is not None:
            family.add_metric(labels, max(0, wanted - found))


# -- queues, and the server


def _queue_families(connection: Redis, live: Live) -> Iterator[Family]:
    served = [queue for worker, _ in live for queue in worker.queues]
    loads = read_loads(connection, served)
    totals = read_totals(connection, [load.name for load in loads])
    loads = [load for load in loads if load.has_rows or load.name in {*served, *totals}]
    num_open = count_open(connection, MAX_BATCHES)
    for metric in table.QUEUES:
        family = _family(metric, table.QUEUE_LABELS)
        assert not isinstance(family, HistogramMetricFamily)
        for load in loads:
            name = [label(load.name)]
            work = totals.get(load.name)
            num_workers = served.count(load.name)
            for more, value in _queue_values(metric, load, work, num_open, num_workers):
                family.add_metric([*name, *more], value)
        yield family


def _queue_values(
    metric: Metric,
    load: QueueLoad,
    work: WorkCounts | None,
    num_open: dict[str, int],
    num_workers: int,
) -> list[tuple[tuple[str, ...], float]]:
    """(further labels, value) of one metric of a queue."""
    if metric is table.QUEUE_WAITING:
        return [((priority,), count) for priority, count in load.waiting.items()]
    plain: dict[str, float] = {
        table.QUEUE_LIVE.name: load.num_live,
        table.QUEUE_RUNNING.name: load.num_running,
        table.QUEUE_OLDEST.name: load.oldest_seconds,
        table.QUEUE_WORKERS.name: num_workers,
        table.QUEUE_BATCHES.name: num_open.get(load.name, 0),
    }
    if metric.name in plain:
        return [((), plain[metric.name])]
    if work is None:
        return []
    if metric is table.QUEUE_ROWS:
        return [(("ok",), work.rows_done), (("failed",), work.rows_failed)]
    tokens = {
        table.QUEUE_PROMPT.name: work.prompt_tokens,
        table.QUEUE_CACHED.name: work.cached_tokens,
        table.QUEUE_COMPLETION.name: work.completion_tokens,
    }
    return [((), tokens[metric.name])]


def _server(connection: Redis) -> Iterator[Family]:
    found = read_used_bytes(connection)
    for metric, value in zip(table.SERVER, found or (), strict=False):
        family = _family(metric, ())
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric([], value)
        yield family
