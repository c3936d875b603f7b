"""Every metric of ``/metrics``, once. ``docs/metrics.md`` is written from this table.

The figures of a worker (``batchkv_producer.wire.figures``) have a key each. The rest of a key,
after a dot, is the value of the metric's last labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WORKER_LABELS = ("worker", "model", "scheme")
QUEUE_LABELS = ("queue",)
REQUEST_LABELS = ("method", "route")


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` has no ``_total``, which a counter gets. ``labels`` come after those of its part.

    ``key``: of a worker's figures; empty if the value is from elsewhere.
    """

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    key: str = ""

    @property
    def shown(self) -> str:
        """The name as it is in queries; of a histogram without ``_bucket``."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def _counter(name: str, key: str, about: str, *labels: str) -> Metric:
    return Metric(f"batchkv_worker_{name}", Kind.COUNTER, about, labels, key)


def _gauge(name: str, key: str, about: str, *labels: str) -> Metric:
    return Metric(f"batchkv_worker_{name}", Kind.GAUGE, about, labels, key)


def _histogram(name: str, key: str, about: str, *labels: str) -> Metric:
    return Metric(f"batchkv_worker_{name}", Kind.HISTOGRAM, about, labels, key)


WORKER_INFO = _gauge(
    "info", "", "1 for each live worker; its labels describe it.", "hostname", "version", "dtype"
)
WORKER_HEARTBEAT = _gauge("heartbeat_age_seconds", "", "Time since its last heartbeat.")
WORKER_LOADING = _gauge("loading", "", "1 while it loads its model, else 0.")
WORKER_START = _gauge("start_time_seconds", "", "When it began to count, in seconds since 1970.")
WORKER_MISSED = _counter(
    "cache_missed_blocks", "", "Blocks of prompts that the shared cache did not have."
)

WORKERS: tuple[Metric, ...] = (
    WORKER_INFO,
    WORKER_HEARTBEAT,
    WORKER_LOADING,
    WORKER_START,
    _counter(
        "rows",
        "rows",
        "Rows that ended, by lane (batch, live) and outcome: ok, reused, canceled or an error "
        "code.",
        *("lane", "outcome"),
    ),
    _counter("prompt_tokens", "tokens.prompt", "Prompt tokens of rows that ended well."),
    _counter("cached_tokens", "tokens.cached", "Those of them that were not computed."),
    _counter("completion_tokens", "tokens.completion", "Tokens that were generated for them."),
    _histogram("step_seconds", "step", "Time of a step of the engine: prompt chunks and a decode."),
    _histogram(
        "first_token_seconds",
        "first_token",
        "Time from a row's arrival in the engine to its first token.",
        "lane",
    ),
    _histogram("row_seconds", "row", "Time from a row's arrival in the engine to its end.", "lane"),
    _counter("preemptions", "preemptions", "Rows that left their slot for want of memory."),
    _counter(
        "recoveries",
        "recoveries",
        "Times the engine went on after memory ran out (memory), the device failed (device), or "
        "it gave memory back (pressure).",
        "reason",
    ),
    _counter("leases_lost", "leases_lost", "Rows that were canceled or taken over elsewhere."),
    _gauge("slots", "slots", "Rows that it can decode at once."),
    _gauge("slots_used", "rows.decode", "Rows that it decodes now."),
    _gauge("prefill_rows", "rows.prefill", "Rows whose prompts it computes now."),
    _gauge("engine_waiting_rows", "rows.waiting", "Rows that wait in the engine."),
    _gauge("held_rows", "rows.held", "Rows of batches that it has leases of."),
    _gauge("live_rows", "rows.live", "Live rows, that somebody waits for."),
    _gauge("unstored_results", "rows.results", "Results that Redis does not have yet."),
    _gauge("memory_bytes", "memory.active", "Memory that MLX has allocated."),
    _gauge("memory_cached_bytes", "memory.cached", "Freed memory that MLX keeps to use again."),
    _gauge("memory_peak_bytes", "memory.peak", "The most memory that MLX had allocated."),
    _gauge("kv_memory_bytes", "kv_memory", "Memory of keys and values in use."),
    _gauge("kv_memory_limit_bytes", "kv_memory_budget", "Memory that they may use now."),
    _gauge(
        "memory_pressure",
        "pressure",
        "How short of memory the machine is: 0 not, 1 short, 2 critical.",
    ),
    _counter("cache_lookups", "cache_lookups", "Lookups in the shared cache."),
    _counter("cache_empty_lookups", "cache_lookups_empty", "Those of them that found nothing."),
    _counter("cache_wanted_blocks", "cache_blocks_wanted", "Blocks of the prompts looked up."),
    _counter("cache_found_blocks", "cache_blocks_found", "Those of them that were found."),
    WORKER_MISSED,
    _counter("cache_hits", "cache_hits", "Pieces of blocks that a tier had.", "tier"),
    _counter("cache_read_bytes", "cache_read_bytes", "Bytes read from a tier.", "tier"),
    _counter("cache_written_bytes", "cache_written_bytes", "Bytes written to a tier.", "tier"),
    _counter("cache_written_blocks", "cache_blocks_written", "Pieces written to a tier.", "tier"),
    _counter("cache_errors", "cache_errors", "Calls of a tier that failed.", "tier"),
    _counter("cache_skipped", "cache_skipped", "Calls left out while a tier is failing.", "tier"),
    _counter(
        "cache_dropped_blocks",
        "cache_blocks_dropped",
        "Pieces not written, because too many waited.",
    ),
    _counter(
        "cache_unneeded_blocks",
        "cache_blocks_not_needed",
        "Pieces not written, because no other worker would gain by loading them.",
    ),
    _counter(
        "cache_waits_ended",
        "cache_waits_ended",
        "Rows that waited no longer for a lookup (slow) or for another worker's block (held).",
        "reason",
    ),
)


def _queue(name: str, kind: Kind, about: str, *labels: str) -> Metric:
    return Metric(f"batchkv_queue_{name}", kind, about, labels)


QUEUE_WAITING = _queue("waiting_rows", Kind.GAUGE, "Rows that wait, by priority.", "priority")
QUEUE_LIVE = _queue("live_waiting_rows", Kind.GAUGE, "Live rows that wait for a worker.")
QUEUE_RUNNING = _queue("running_rows", Kind.GAUGE, "Rows that a worker holds.")
QUEUE_OLDEST = _queue(
    "oldest_waiting_seconds",
    Kind.GAUGE,
    "Age of the oldest batch with a row at the head of the queue; 0 if no row waits.",
)
QUEUE_WORKERS = _queue("workers", Kind.GAUGE, "Live workers.")
QUEUE_BATCHES = _queue(
    "open_batches", Kind.GAUGE, "Batches that are not done, of the newest 1,000 of the server."
)
QUEUE_ROWS = _queue(
    "rows", Kind.COUNTER, "Rows that ended, of all workers that were there: ok, failed.", "outcome"
)
QUEUE_PROMPT = _queue("prompt_tokens", Kind.COUNTER, "Their prompt tokens.")
QUEUE_CACHED = _queue("cached_tokens", Kind.COUNTER, "Those of them that were not computed.")
QUEUE_COMPLETION = _queue("completion_tokens", Kind.COUNTER, "Tokens generated for them.")
QUEUES: tuple[Metric, ...] = (
    *(QUEUE_WAITING, QUEUE_LIVE, QUEUE_RUNNING, QUEUE_OLDEST, QUEUE_WORKERS, QUEUE_BATCHES),
    *(QUEUE_ROWS, QUEUE_PROMPT, QUEUE_CACHED, QUEUE_COMPLETION),
)

REDIS_MEMORY = Metric("batchkv_redis_memory_bytes", Kind.GAUGE, "Memory that Redis uses.")
REDIS_LIMIT = Metric(
    "batchkv_redis_memory_limit_bytes", Kind.GAUGE, "Memory that it may use; 0: no limit."
)
SERVER: tuple[Metric, ...] = (REDIS_MEMORY, REDIS_LIMIT)


def _own(name: str, kind: Kind, about: str, *labels: str) -> Metric:
    return Metric(f"batchkv_gateway_{name}", kind, about, labels)


OWN_START = _own("start_time_seconds", Kind.GAUGE, "When it started, in seconds since 1970.")
OWN_REQUESTS = _own(
    "requests", Kind.COUNTER, "Requests that ended, by status code.", *REQUEST_LABELS, "status"
)
OWN_SECONDS = _own("request_seconds", Kind.HISTOGRAM, "Time of a request.", *REQUEST_LABELS)
OWN_OPEN = _own("open_requests", Kind.GAUGE, "Requests that are being answered.")
OWN_STREAMS = _own("open_streams", Kind.GAUGE, "Answers that are sent as they are made.")
OWN_RECEIVED = _own("received_bytes", Kind.COUNTER, "Bytes of requests' bodies.", *REQUEST_LABELS)
OWN_SENT = _own("sent_bytes", Kind.COUNTER, "Bytes of answers' bodies.", *REQUEST_LABELS)
GATEWAY: tuple[Metric, ...] = (
    *(OWN_START, OWN_REQUESTS, OWN_SECONDS, OWN_OPEN, OWN_STREAMS, OWN_RECEIVED, OWN_SENT),
)

# Part of the page -> its labels and metrics.
PARTS: dict[str, tuple[tuple[str, ...], tuple[Metric, ...]]] = {
    "Workers": (WORKER_LABELS, WORKERS),
    "Queues": (QUEUE_LABELS, QUEUES),
    "Redis": ((), SERVER),
    "The gateway": ((), GATEWAY),
}
