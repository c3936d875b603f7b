"""``/metrics``: all workers and queues of a Redis, and the gateway itself."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.metrics import table
from batchkv_gateway.metrics.collect import MAX_LABEL_CHARS, label
from batchkv_gateway.metrics.table import Kind
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.samples import SampleMoves, WorkCounts
from batchkv_producer.wire.figures.worker import Times, WorkerFigures, encode_figures
from gateway.metrics.promtool import promtool
from support.gateway import Gateway, chat_file
from support.worker_harness import QUEUE, submit

Labels = dict[str, str]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def server(gateway: Gateway, redis_connection: Redis) -> Redis:
    """An empty server, of which a gateway reads."""
    assert gateway.port
    return redis_connection


def fetch(gateway: Gateway, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """(status, content type, body) of an answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway.port}{path}",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as found:
            return found.status, found.headers["content-type"], found.read().decode()
    except urllib.error.HTTPError as fault:
        return fault.code, fault.headers["content-type"], fault.read().decode()


def samples_of(gateway: Gateway) -> Samples:
    """All samples of a scrape."""
    status, kind, text = fetch(gateway)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8"), text
    found: Samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def values(samples: Samples, name: str, **labels: str) -> list[float]:
    """The values of one name with at least these labels."""
    wanted = labels.items()
    return [value for (one, its), value in samples.items() if one == name and wanted <= its]


def add_worker(
    connection: Redis, name: str, figures: WorkerFigures | None = None, **more: str
) -> None:
    """The record of a live worker."""
    seconds, _ = connection.time()  # type: ignore[misc]
    now = datetime.now(UTC).isoformat()
    fields: dict[str, str] = {"birth": now, "queues": QUEUE, "state": "busy", "hostname": "mini"}
    fields |= {"bkv_model": "m", "bkv_scheme": "affine8", "bkv_dtype": "half", "bkv_version": "9"}
    fields |= {"bkv_state": "", "bkv_beat_ms": "15000", "bkv_seen": str(seconds)}
    if figures is not None:
        fields["bkv_figures"] = encode_figures(figures)
    key = redis_keys.worker(name)
    connection.hset(key, mapping={**fields, **more})
    connection.sadd(redis_keys.workers(), key)
    connection.sadd(redis_keys.workers(QUEUE), key)


def all_figures() -> WorkerFigures:
    """Figures with a value for each metric of the table."""
    counts: dict[str, float] = {"cache_blocks_wanted": 10, "cache_blocks_found": 4}
    levels: dict[str, float] = {}
    times: dict[str, Times] = {}
    keyed = [metric for metric in table.WORKERS if metric.key]
    for number, metric in enumerate(keyed, 1):
        key = ".".join((metric.key, *(f"a{name}" for name in metric.labels)))
        if metric.kind is Kind.HISTOGRAM:
            times[key] = Times((0.1, 2.5), (1, number, 3), 7.5)
        else:
            into = counts if metric.kind is Kind.COUNTER else levels
            into.setdefault(key, number)
    return WorkerFigures(1_700_000_000, counts, levels, times)


def fill(connection: Redis) -> None:
    """A server on which each metric has a value."""
    add_worker(connection, "w", all_figures())
    moves = SampleMoves(connection)
    moves.count("w", [QUEUE], "1", WorkCounts())
    moves.count("w", [QUEUE], "1", WorkCounts(100, 40, 20, 2, 1))
    submit(connection, ["a", "b", "c"])


def test_each_metric_is_there_once(gateway: Gateway, server: Redis) -> None:
    """All that the table, and so the page, names is in an answer, with its help and its type, and
    nothing else."""
    fill(server)
    fetch(gateway)  # so that a request has ended
    _, _, text = fetch(gateway)
    families = {family.name: family for family in parse_text(text)}
    metrics = {metric.name: metric for _, part in table.PARTS.values() for metric in part}
    assert families.keys() == metrics.keys()
    for name, metric in metrics.items():
        family = families[name]
        assert (family.type, family.documentation) == (metric.kind, metric.about)
        assert family.samples, name
    found = samples_of(gateway)
    keyed = [metric for metric in table.WORKERS if metric.key]
    labels = {"worker": "w", "model": "m", "scheme": "affine8"}
    for number, metric in enumerate(keyed, 1):
        more = {one: f"a{one}" for one in metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            bucket = f"{metric.name}_bucket"
            assert values(found, bucket, le="2.5", **labels, **more) == [1 + number]
            assert values(found, bucket, le="+Inf", **labels, **more) == [4 + number]
            assert values(found, f"{metric.name}_sum", **labels, **more) == [7.5]
        elif "cache_blocks" not in metric.key:
            assert values(found, metric.shown, **labels, **more) == [number]
    assert values(found, "batchkv_worker_cache_missed_blocks_total", worker="w") == [6]


def test_promtool_finds_no_fault(gateway: Gateway, server: Redis) -> None:
    """Names, types, helps and units follow Prometheus's conventions."""
    fill(server)
    fetch(gateway)
    promtool("check", "metrics", text=fetch(gateway)[2])


def test_queues_are_counted(gateway: Gateway, server: Redis) -> None:
    """What waits and runs in each queue, how old it is, and what was done there."""
    fill(server)
    submit(server, ["d"], name="urgent", priority="high")
    batches = [str(each, "ascii") for each in server.zrange(redis_keys.BATCHES, 0, -1)]  # type: ignore[union-attr]
    seconds, _ = server.time()  # type: ignore[misc]
    for batch_id in batches:
        server.hset(redis_keys.batch(batch_id), "created", str(seconds - 500))
    server.zadd(redis_keys.registry("wip", QUEUE), {"x:1": 1, "y:1": 2})
    server.rpush(redis_keys.live(QUEUE), "l1")
    server.sadd(redis_keys.RQ_QUEUES, *map(redis_keys.queue, ("batchkv:idle", "of-others")))
    found = samples_of(gateway)
    assert {dict(labels).get("queue") for _, labels in found} == {QUEUE, None}

    def of(name: str, **labels: str) -> list[float]:
        return values(found, f"batchkv_queue_{name}", queue=QUEUE, **labels)

    waiting = {one: of("waiting_rows", priority=one) for one in ("high", "normal", "low")}
    assert waiting == {"high": [1], "normal": [3], "low": [0]}
    assert of("live_waiting_rows") == [1]
    assert (of("running_rows"), of("workers"), of("open_batches")) == ([2], [1], [2])
    assert 500 <= of("oldest_waiting_seconds")[0] < 600
    assert (of("rows_total", outcome="ok"), of("rows_total", outcome="failed")) == ([2], [1])
    assert (of("prompt_tokens_total"), of("cached_tokens_total")) == ([100], [40])
    assert values(found, "batchkv_redis_memory_bytes")[0] > 0


def test_only_live_workers_are_there(gateway: Gateway, server: Redis) -> None:
    """A worker that missed two heartbeats, or has signed off, is left out. One of an older version
    has the facts of its record."""
    seconds, _ = server.time()  # type: ignore[misc]
    add_worker(server, "away", all_figures(), bkv_seen=str(seconds - 60))
    add_worker(server, "dead", all_figures(), death="2026-01-01T00:00:00Z")
    add_worker(server, "old")
    add_worker(server, "loads", bkv_state="loading 1 of 2 GB")
    found = samples_of(gateway)
    names = {dict(labels).get("worker") for _, labels in found} - {None}
    assert names == {"old", "loads"}
    assert values(found, "batchkv_worker_loading", worker="old") == [0]
    assert values(found, "batchkv_worker_loading", worker="loads") == [1]
    info = values(found, "batchkv_worker_info", worker="old", hostname="mini", version="9")
    assert info == [1]
    assert values(found, "batchkv_worker_rows_total") == []


def test_texts_are_bounded_and_escaped(gateway: Gateway, server: Redis) -> None:
    """Whatever a record has in it, the answer stays readable, and its labels short and distinct."""
    odd = 'a"} 1\nbatchkv_evil 1\\'
    names = [odd, "w" * 500 + "1", "w" * 500 + "2", "\u202e\x00é", "plain"]
    for name in names:
        add_worker(server, name, all_figures(), bkv_model=odd, bkv_version="\x1b[31m")
    add_worker(server, "wrong", bkv_figures="{" * 1000, bkv_model=b"\xff\xfe" * 9)  # type: ignore[arg-type]
    found = samples_of(gateway)
    assert not [name for name, _ in found if not name.startswith("batchkv_")]
    assert not values(found, "batchkv_evil")
    workers = {dict(labels)["worker"] for name, labels in found if name == "batchkv_worker_info"}
    assert len(workers) == len(names) + 1 and "plain" in workers and "é" in str(workers)
    assert max(len(value) for _, labels in found for _, value in labels) <= MAX_LABEL_CHARS
    assert all(value.isprintable() for _, labels in found for _, value in labels)
    assert label("é" * MAX_LABEL_CHARS) == "é" * MAX_LABEL_CHARS


def test_the_format_is_what_was_asked_for(gateway: Gateway, server: Redis) -> None:
    """Prometheus asks for OpenMetrics and gets it; without a word the answer is version 0.0.4."""
    fill(server)
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    status, kind, text = fetch(gateway, accept=wanted)
    assert status == 200 and kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert {family.name for family in parse_open_metrics(text)} == {
        family.name for family in parse_text(fetch(gateway)[2])
    }


def test_who_may_read(gateway: Gateway, server: Redis) -> None:
    """Without any key everybody on this machine. Then a key for metrics or an admin's."""
    assert fetch(gateway)[0] == 200
    keys = KeyStore(server)
    plain, reader = keys.add("plain"), keys.add("reader", reads_metrics=True)
    admin = keys.add("admin", is_admin=True)
    assert fetch(gateway)[0] == 401
    status, _, text = fetch(gateway, authorization=f"Bearer {plain}")
    assert status == 403 and "batchkv keys add NAME --metrics" in text
    for key in (reader, admin):
        assert fetch(gateway, authorization=f"Bearer {key}")[0] == 200


def test_own_requests_are_counted(gateway: Gateway, server: Redis) -> None:
    """By method, route and status: ids are no labels. ``only=gateway`` reads no Redis."""

    def own(name: str, **labels: str) -> float:
        return sum(values(samples_of(gateway), f"batchkv_gateway_{name}", **labels))

    def numbers() -> Mapping[str, float]:
        one = "/v1/files/{file_id}"
        return {
            "found": own("requests_total", route=one, status="404", method="GET"),
            "no path": own("requests_total", route="none", status="404"),
            "refused": own("requests_total", route="none", status="403"),
            "files": own("requests_total", route="/v1/files", status="200", method="POST"),
            "timed": own("request_seconds_count", route=one),
        }

    before, received = numbers(), own("received_bytes_total", route="/v1/files")
    for name in ("file-1", "file-2"):
        assert fetch(gateway, f"/v1/files/{name}")[0] == 404
    assert fetch(gateway, "/no/such/path")[0] == 404
    assert fetch(gateway, "/v1/files", Host="evil.example")[0] == 403
    with gateway.client(max_retries=0) as client:
        client.files.create(file=("in", chat_file("a")), purpose="batch")
    after = numbers()
    assert {name: after[name] - before[name] for name in after} == {
        "found": 2,
        "no path": 1,
        "refused": 1,
        "files": 1,
        "timed": 2,
    }
    assert own("received_bytes_total", route="/v1/files") - received > len(chat_file("a"))
    assert own("open_requests") == 1  # the one that reads it
    add_worker(server, "w")
    status, _, text = fetch(gateway, "/metrics?only=gateway")
    assert status == 200
    assert {family.name for family in parse_text(text)} == {one.name for one in table.GATEWAY}
    assert fetch(gateway, "/metrics?only=workers")[0] == 400
