"""A worker counts its rows, tokens and times, and says so with each heartbeat."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.monitor.samples import read_samples, read_totals
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.figures.samples import WorkCounts
from batchkv_producer.wire.figures.worker import (
    MAX_CHARS,
    Times,
    WorkerFigures,
    decode_figures,
    encode_figures,
)
from batchkv_producer.wire.job import Request, Usage, encode_job
from batchkv_producer.wire.transitions import JobLease, Pulled
from batchkv_worker.events import Completed, Rejected
from batchkv_worker.figures.engine import EngineFigures
from batchkv_worker.figures.histogram import Histogram
from batchkv_worker.figures.report import Figures
from batchkv_worker.figures.rows import RowCounts
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan
from support.hub import user_of_hub
from support.worker_harness import MODEL, QUEUE, submit

FIGURES = WorkerFigures(
    12.5, {"rows.batch.ok": 3}, {"slots": 4}, {"step": Times((0.1, 1.0), (1, 2, 3), 4.5)}
)


class Fake(FakeEngine):
    """An engine with figures."""

    def figures(self) -> EngineFigures:
        cache = {"hit.disk": 2, "read_bytes.disk": 64, "hit.redis": 1, "dropped": 3, "gated": 9}
        return EngineFigures({"preemptions": 5}, {"pressure": 1}, {}, cache)


class Worker(BatchWorker):
    """A worker on the fake engine. The last record that it wrote is kept."""

    last: dict[str, str] = {}  # noqa: RUF012

    @staticmethod
    def engine_factory(settings: WorkerSettings) -> FakeEngine:
        return Fake(4, 8, FakePlan())

    def register_death(self) -> None:
        record: Any = self.connection.hgetall(self.key)
        type(self).last = {key.decode(): value.decode() for key, value in record.items()}
        super().register_death()


def work(connection: Redis, **settings: Any) -> WorkerFigures:
    """Let a worker empty the queue; the figures in its record at the end."""
    chosen = WorkerSettings(model=MODEL, **settings)
    Worker([QUEUE], connection=connection, settings=chosen).work(burst=True)
    found = decode_figures(Worker.last["bkv_figures"])
    assert found is not None
    return found


def test_a_worker_counts_its_work(redis_connection: Redis) -> None:
    """Its record has rows, tokens and steps; the totals of the queue have all its work once, also
    that of a worker that ends before its next heartbeat."""
    submit(redis_connection, ["a b c", "reject:timeout", "d", "e"])
    work(redis_connection)
    totals = read_totals(redis_connection, [QUEUE]).get(QUEUE)
    assert totals is not None
    assert (totals.rows_done, totals.rows_failed) == (3, 1)
    assert totals.prompt_tokens > 0 and totals.completion_tokens > 0
    hash_key = redis_keys.totals(QUEUE)
    redis_connection.hincrby(hash_key, "minute", -60)
    submit(redis_connection, ["f"], name="later")
    work(redis_connection)
    (sample,) = read_samples(redis_connection, QUEUE)
    assert (sample.rows_done, sample.rows_failed) == (3, 1)
    assert sample.prompt_tokens == totals.prompt_tokens
    assert read_totals(redis_connection, [QUEUE]).get(QUEUE) != totals


def test_the_record_has_the_figures(redis_connection: Redis) -> None:
    """With the heartbeat come the counts of the engine and of the store, and what is held."""
    submit(redis_connection, [*"abcdefgh", "slow:30 x"])
    found = work(redis_connection, heartbeat_seconds=0.001, lease_seconds=5)
    assert found.counts["rows.batch.ok"] == 9
    assert found.counts["preemptions"] == 5
    assert found.counts["tokens.completion"] > 0
    assert (found.levels["slots"], found.levels["pressure"]) == (4, 1)
    assert (found.counts["cache_hits.disk"], found.counts["cache_hits.redis"]) == (2, 1)
    assert (found.counts["cache_read_bytes.disk"], found.counts["cache_blocks_dropped"]) == (64, 3)
    assert sum(found.times["step"].counts) >= 30
    assert found.since > 1e9


def test_an_older_hub_refuses_only_the_totals(
    redis_connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """With the rights of version 0.1.0 a worker works, says once why it counts nothing, and its
    record has its figures. With the present rights it counts, and a producer may read."""
    caplog.set_level("INFO")
    submit(redis_connection, [*"abc"])
    with user_of_hub(redis_connection, "worker", without="batchkv:samples") as old:
        found = work(old, heartbeat_seconds=0.001, lease_seconds=5)
    assert found.counts["rows.batch.ok"] == 3
    assert caplog.text.count("no work is counted: the hub is of an older version") == 1
    with user_of_hub(redis_connection, "producer", without="batchkv:samples") as old:
        assert read_totals(old, [QUEUE]) == {} and read_samples(old, QUEUE) == []
    submit(redis_connection, [*"de"], name="later")
    with user_of_hub(redis_connection, "worker") as new:
        work(new)
    with user_of_hub(redis_connection, "producer") as producer:
        totals = read_totals(producer, [QUEUE]).get(QUEUE)
        assert totals is not None and totals.rows_done == 2
        assert read_samples(producer, QUEUE) == []


def test_every_end_of_a_row_is_counted() -> None:
    """Rows by how they ended, tokens of those that ended well. A canceled row has not failed."""
    rows = InFlight("m", "w")
    data = encode_job(Request("c", "completion", prompt="p"))
    for job_id in "abcd":
        rows.admit(Pulled(JobLease(job_id, "e"), data))
    rows.admit(Pulled(JobLease("e", "e"), b"no job"))
    rows.end(Completed("a", "x", "stop", Usage(7, 3, 2)))
    rows.end(Rejected("b", ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))
    rows.end(Rejected("unknown", ErrorCode.ENGINE_ERROR, "not held"))
    rows.cancel(["c"])
    rows.expire(math.inf)
    assert rows.counts.by_code == {
        "ok": 1,
        "canceled": 1,
        "context_length_exceeded": 1,
        "invalid_request": 1,
        "timeout": 1,
    }
    assert rows.counts.work == WorkCounts(7, 2, 3, 1, 3)


def test_both_lanes_are_work() -> None:
    """Live rows are counted apart, and belong to the work of the queue."""
    batch, live = RowCounts(), RowCounts()
    batch.add("ok", Usage(10, 5, 1))
    live.add("ok", Usage(1, 1, 0))
    live.add("timeout")

    class NoEngine:
        steps = Histogram((1.0,))

        def figures(self) -> None:
            return None

    figures = Figures(NoEngine(), dict, batch, live)
    assert figures.work == WorkCounts(11, 1, 6, 2, 1)
    found = decode_figures(figures.fields()["bkv_figures"])
    assert found is not None
    rows = {key: n for key, n in found.counts.items() if key.startswith("rows.")}
    assert rows == {"rows.batch.ok": 1, "rows.live.ok": 1, "rows.live.timeout": 1}


def test_figures_go_on_with_the_next_engine() -> None:
    """After an adapter was exchanged, counts and times go on, what is held is the new engine's."""
    first, second = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        first.add(seconds)
    second.add(2.0)
    before = EngineFigures({"preemptions": 2}, {"pressure": 2}, {"row.batch": first.times})
    after = EngineFigures({"preemptions": 1}, {"pressure": 0}, {"row.batch": second.times})
    found = after.after(before)
    assert (found.counts, found.levels) == ({"preemptions": 3}, {"pressure": 0})
    assert found.times == {"row.batch": Times((1.0, 2.0), (2, 2, 1), 14.0)}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "{}", '{"v":2,"since":1}', '{"v":1}', '{"v":1,"since":NaN}'),
        *("[" * 60_000, " " * (MAX_CHARS + 1), '{"v":1,"since":1' + "0" * 400 + "}"),
    ],
)
def test_other_texts_are_no_figures(text: str) -> None:
    """A record of another version, or whatever somebody wrote there, is no figures and no fault."""
    assert decode_figures(text) is None


def test_wrong_entries_are_left_out() -> None:
    """Each entry is looked at by itself: names, numbers, and the order of bounds."""
    assert decode_figures(encode_figures(FIGURES)) == FIGURES
    found = json.loads(encode_figures(FIGURES))
    found["counts"] |= {"x": -1, "y": "1", "z": True, 'bad"} 1\n': 1, "inf": math.inf, "big": 2**70}
    step = found["times"]["step"]
    wrong: list[Any] = [None, {}, {**step, "le": [1, 0.1]}, {**step, "n": [1]}, {**step, "sum": ""}]
    found["times"] |= {f"t{chr(97 + index)}": one for index, one in enumerate(wrong)}
    found["levels"] = [1]
    assert decode_figures(json.dumps(found)) == replace(FIGURES, levels={})
