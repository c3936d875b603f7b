"""Remembered answers with real workers: who computes a row, and who never does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer import BatchOptions, Client
from batchkv_producer.order.duplicates import can_have_duplicates, request_digest
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, decode_job
from batchkv_producer.wire.transition_types import NOTHING_REMEMBERED, ReuseLimits
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.figures.rows import RowCounts
from batchkv_worker.queue.remembering import limits_of
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import worker_here
from support.tiny_worker import TinyWorker
from support.worker_harness import (
    MODEL,
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    num_ended,
    results_of,
    wait_until,
    workers,
)
from worker.queue.test_rq_worker import work

Row = dict[str, Any]
REUSE = BatchOptions(reuse=True, priority="high")
WEIGHTS = "a" * 32


def submit(connection: Redis, rows: Sequence[Row], options: BatchOptions = REUSE) -> str:
    return Client(connection).submit(rows, model=MODEL, options=options).batch_id


def tiny(connection: Redis, scheme: str = "affine8") -> BatchWorker:
    """A worker of this process whose engine is the real one, on a tiny model."""
    settings = WorkerSettings(model=MODEL, kv_scheme=scheme, slots=8, prefetch=8)
    return TinyWorker([QUEUE], f"tiny-{scheme}", connection=connection, settings=settings)


def computed(connection: Redis) -> int:
    """How many rows the results of all batches say were computed for them."""
    batches = connection.zrange(redis_keys.BATCHES, 0, -1)
    found = (results_of(connection, batch.decode()).values() for batch in batches)
    return sum(not result.reused for results in found for result in results)


def told(result: Result) -> dict[str, Any]:
    """A result without what differs from row to row."""
    return asdict(result) | {"custom_id": "", "reused": False}


def test_the_real_engine_computes_only_edited_rows_and_those_of_other_schemes(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 20 rows are edited. All others get the same answers, with tokens and choices."""
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"fingerprint": WEIGHTS}))
    sampled = {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": 2}
    asked: list[Row] = [{"temperature": 0}, sampled, {"temperature": 0, "return_token_ids": True}]
    rows = [{"prompt": f"{n} 1 2 3", "max_tokens": 4, **asked[n % 3]} for n in range(20)]
    first = submit(redis_connection, rows)
    assert work(tiny(redis_connection))
    assert_reconciled(redis_connection, first)
    edited = [{**row, "custom_id": f"n{n}"} for n, row in enumerate(rows)]
    edited[3] |= {"prompt": "99 1 2 3"}
    edited[8] |= {"max_tokens": 5}
    second = submit(redis_connection, edited, BatchOptions(reuse=True, priority="low"))
    worker = tiny(redis_connection)
    assert work(worker)
    assert_reconciled(redis_connection, second)
    status = Client(redis_connection).status(second)
    assert (status.ok, status.reused, status.maker.scheme) == (20, 18, "affine8")
    assert computed(redis_connection) == 22
    before, after = (results_of(redis_connection, batch) for batch in (first, second))
    for line in range(1, 21):
        same = line not in (4, 9)
        assert (told(before[line]) == told(after[line])) == same == after[line].reused
        assert after[line].custom_id == f"n{line - 1}"
    edited[0] |= {"prompt": "98 1 2 3"}
    third = submit(redis_connection, edited)
    assert work(tiny(redis_connection, "float"))
    status = Client(redis_connection).status(third)
    assert (status.ok, status.reused, status.maker.scheme) == (20, 0, "float")


def test_a_killed_worker_leaves_answers_that_count_once(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Rows that it had not stored are computed by the next worker; the others are remembered."""
    rows: list[Row] = [{"prompt": f"slow:{1 + 400 * (n > 2)} {n}", "seed": 1} for n in range(8)]
    plan: dict[str, object] = {"fingerprint": WEIGHTS, "step_seconds": 0.005}
    first = submit(redis_connection, rows)
    dying = WorkerProcess(redis_url, tmp_path / "1.log", plan=plan)
    with workers(dying):
        wait_until(lambda: num_ended(redis_connection, first) >= 3, 60)
        dying.process.kill()
        dying.wait()
        assert 3 <= len(redis_connection.keys("batchkv:reuse:a:*")) < 8
        plan |= {"step_seconds": 0.0}
        with workers(WorkerProcess(redis_url, tmp_path / "2.log", "--burst", plan=plan)) as next_:
            assert next_[0].wait(60) == 0, next_[0].said
    second = submit(redis_connection, [*rows[:6], {"prompt": "new", "seed": 1}])
    assert work(worker_here(redis_connection, MODEL, fingerprint=WEIGHTS))
    for batch in (first, second):
        assert_reconciled(redis_connection, batch)
    assert (computed(redis_connection), Client(redis_connection).status(second).reused) == (9, 6)
    assert len(redis_connection.keys("batchkv:reuse:a:*")) == 9


def test_the_digest_is_that_of_the_request_that_was_computed(redis_connection: Redis) -> None:
    """A producer names another row's digest: the answer is remembered for what it is an answer to.

    So it may get a wrong answer itself, but can give none to others.
    """
    rows: list[Row] = [{"prompt": "mine", "temperature": 0}]
    forged = submit(redis_connection, rows)
    theirs = Client(redis_connection).submit(
        [{"prompt": "theirs", "temperature": 0}], model="another", options=REUSE
    )
    key = redis_keys.job(redis_keys.job_id(theirs.batch_id, 1))
    digest = redis_connection.hget(key, "bkv_reuse")
    assert digest is not None
    redis_connection.hset(redis_keys.job(f"{forged}-1"), "bkv_reuse", digest)
    assert work(worker_here(redis_connection, MODEL, fingerprint=WEIGHTS))
    again = submit(redis_connection, [{"prompt": "theirs", "temperature": 0}])
    assert work(worker_here(redis_connection, MODEL, fingerprint=WEIGHTS))
    assert [row.text for row in results_of(redis_connection, again).values()] == ["echo theirs"]
    assert Client(redis_connection).status(again).reused == 0


REQUESTS: list[Row] = [
    {"prompt": "a", "temperature": 0},
    {"prompt": "é\u2028\U0001f600", "temperature": 0.0, "top_p": 1, "min_p": 0.25},
    {"prompt": [5, 6, 7], "seed": 2**60, "max_tokens": 3},
    {"prompt": "a", "seed": 1, "stop": ["x", "y"], "n": 3, "logprobs": 2, "logit_bias": {"5": 1}},
    {"prompt": "a", "seed": 1, "bad_words": ["no"], "stop_token_ids": [3], "ignore_eos": True},
    {"prompt": "a", "seed": 1, "presence_penalty": 1, "frequency_penalty": 0.5, "min_tokens": 1},
    {"prompt": "a", "seed": 1, "repetition_penalty": 1, "skip_special_tokens": False},
    {"prompt": "a", "seed": 1, "include_stop_str_in_output": True, "return_token_ids": True},
    {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "reasoning_effort": "low"},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 1.0]}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "thinking_budget": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"b": {}}}},
        },
    },
    {"prompt": "a", "seed": 1, "guided_regex": "[a-c]+"},
]


def test_worker_and_producer_make_the_same_digest(redis_connection: Redis) -> None:
    """A request that travels as a job has the digest that its producer gave it, whatever it has."""
    batch = submit(redis_connection, REQUESTS)
    status = Client(redis_connection).status(batch)
    assert status.failed == 0, [row.error for row in results_of(redis_connection, batch).values()]
    jobs = Transitions(redis_connection).pull(status.queue, "w", 100, 60)
    assert len(jobs) == len(REQUESTS)
    for job in jobs:
        request = decode_job(job.data)
        given = redis_connection.hget(redis_keys.job(job.lease.job_id), "bkv_reuse")
        assert job.is_reusing and can_have_duplicates(request)
        assert given == (request_digest(request) or b"") + request.custom_id.encode()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", ""])
def test_answers_that_depend_on_more_than_the_request_are_not_remembered(
    redis_connection: Redis, tmp_path: Path, name: str
) -> None:
    """A chat template may write the date into each prompt. Then no answer is good for another day.

    The same holds for a worker that takes blocks of another scheme.
    """
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "none"}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    if name:
        (model / name).write_text("{{ strftime_now('%d %b %Y') }}")
    rows: list[Row] = [{"prompt": "a", "temperature": 0}]
    batch = Client(redis_connection).submit(rows, model=str(model), options=REUSE)
    assert work(worker_here(redis_connection, str(model), fingerprint=WEIGHTS))
    assert num_ended(redis_connection, batch.batch_id) == 1
    assert len(redis_connection.keys("batchkv:reuse:a:*")) == (0 if name else 1)
    settings = WorkerSettings(model=str(model), reuse_answers=5)
    assert limits_of(settings) == (NOTHING_REMEMBERED if name else ReuseLimits(max_answers=5))
    assert limits_of(replace(settings, kv_adopt_float=True)) == NOTHING_REMEMBERED


def test_reused_rows_are_counted_apart(redis_connection: Redis) -> None:
    """They are neither done nor failed work of the worker."""
    counts = RowCounts()
    counts.add("ok")
    counts.add("reused", count=5)
    assert counts.by_code == {"ok": 1, "reused": 5}
    assert (counts.work.rows_done, counts.work.rows_failed) == (1, 0)
