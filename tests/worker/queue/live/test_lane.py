"""Live rows with real workers on the fake engine: pieces, cancels, deaths, outages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.live import Answer, Lane, LaneRefusedError, LostAnswerError, Question
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request
from batchkv_producer.wire.live import LiveMoves
from support.adapter_files import write_files
from support.worker_harness import (
    MODEL,
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    num_ended,
    submit,
    wait_until,
    workers,
)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def lane(redis: Redis) -> Iterator[Lane]:
    lane = Lane(redis)
    yield lane
    lane.close()


def request(prompt: str, **fields: object) -> Request:
    return Request("c1", "completion", prompt=prompt, **fields)  # type: ignore[arg-type]


def asked(lane: Lane, prompt: str) -> Answer:
    """The answer, once a worker is there that answers."""
    found: list[Answer] = []

    def try_once() -> bool:
        try:
            found.append(lane.ask(request(prompt), MODEL))
        except LaneRefusedError as refusal:
            assert refusal.why in ("nobody", "loading")
            return False
        return True

    wait_until(try_once)
    return found[0]


def live_keys(redis: Redis) -> list[str]:
    keys = [key.decode() for key in redis.scan_iter("batchkv:live:*")]
    return [key for key in keys if not key.startswith("batchkv:live:seen:")]


def test_pieces_come_before_the_end_and_nothing_is_kept(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """Pieces come while the row decodes, they join to the text, and only the stream is left."""
    plan: dict[str, object] = {"step_seconds": 0.02}
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=plan)):
        answer = asked(lane, "slow:12 \u00fc\U0001f600 words")
        first = answer.next(10)
        assert first and answer.result is None
        rest = list(answer)
        assert (
            answer.result is not None
            and answer.result.text == "echo slow:12 \u00fc\U0001f600 words"
        )
        assert first + "".join(rest) == answer.result.text
        assert len(rest) > 3
        assert not redis.exists(redis_keys.BATCHES)
        assert [key for key in live_keys(redis) if ":to:" not in key] == []
        assert all(redis.ttl(key) > 0 for key in live_keys(redis))


def test_a_hundred_askers_beside_a_batch(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """A hundred threads get their own answers by one lane, and each row of the batch ends once."""
    settings = {"SLOTS": 8, "PREFETCH": 2}
    with workers(WorkerProcess(redis_url, tmp_path / "log", settings=settings)):
        asked(lane, "first").next(10)
        batch = submit(redis, ["slow:3 row"] * 60)
        texts: dict[int, str] = {}

        def ask(number: int) -> None:
            texts[number] = "".join(lane.ask(request(f"slow:5 q{number}"), MODEL))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert texts == {number: f"echo slow:5 q{number}" for number in range(100)}
        assert sum(thread.name == "batchkv-lane" for thread in threading.enumerate()) <= 1
        wait_until(lambda: num_ended(redis, batch) == 60)
        assert_reconciled(redis, batch)


def test_a_canceled_row_frees_its_slot_at_once(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """With one slot, the next question is answered although the first had a year of steps left."""
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=plan, settings={"SLOTS": 1})):
        first = asked(lane, "slow:9999999 forever")
        assert first.next(10)
        second = lane.ask(request("second"), MODEL)
        assert second.next(0.05) == ""
        first.cancel()
        assert "".join(second) == "echo second"
        with pytest.raises(LostAnswerError, match="canceled"):
            list(first)


def test_a_dead_asker_is_noticed(redis_url: str, redis: Redis, lane: Lane, tmp_path: Path) -> None:
    """An asker killed with kill -9 says nothing more: once its lease is over, its slot is free."""
    program = (
        "import sys; from redis import Redis; from batchkv_producer.live import Lane;"
        "from batchkv_producer.wire.job import Request\n"
        "lane = Lane(Redis.from_url(sys.argv[1]))\n"
        f"answer = lane.ask(Request('c', 'completion', prompt='slow:9999999 x'), {MODEL!r})\n"
        "print(answer.next(), flush=True); list(answer)"
    )
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=plan, settings={"SLOTS": 1})):
        list(asked(lane, "first"))
        command = [sys.executable, "-c", program, redis_url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as asker:
            assert asker.stdout and asker.stdout.readline()
            os.kill(asker.pid, signal.SIGKILL)
        (key,) = [key for key in live_keys(redis) if ":row:" in key]
        assert 0 < redis.ttl(key) <= 30
        redis.pexpire(key, 1)  # the lease is over
        assert "".join(lane.ask(request("second"), MODEL)) == "echo second"


def test_a_worker_that_is_killed(redis_url: str, redis: Redis, lane: Lane, tmp_path: Path) -> None:
    """A row without a piece is answered by another worker. A row with pieces ends with an error."""
    plan: dict[str, object] = {"step_seconds": 0.02}
    settings = {"SLOTS": 1}
    first = WorkerProcess(redis_url, tmp_path / "one", plan=plan, settings=settings)
    with workers(first):
        begun, waiting = asked(lane, "slow:9999999 begun"), None
        assert begun.next(10)
        os.kill(first.process.pid, signal.SIGKILL)
        waiting = lane.ask(request("waiting"), MODEL)  # it is still listed
        with workers(WorkerProcess(redis_url, tmp_path / "two", settings=settings)):
            moves = LiveMoves(redis)
            for key in [key for key in live_keys(redis) if ":row:" in key]:
                if redis.hexists(key, "until"):
                    redis.hset(key, "until", 1)  # its worker's lease is over
            assert "".join(waiting) == "echo waiting"
            with pytest.raises(LostAnswerError, match="ask again"):
                list(begun)
            assert moves.cancel([begun.row_id]) == 0


def test_who_can_not_answer_says_so(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """No worker, one of an older version, one that left, and a full list: refused at once."""
    with pytest.raises(LaneRefusedError, match="no worker answers fake"):
        lane.ask(request("x"), MODEL)
    old = redis_keys.worker("old")
    redis.hset(old, mapping={"birth": "x", "queues": QUEUE})
    redis.sadd(redis_keys.workers(QUEUE), old)
    with pytest.raises(LaneRefusedError, match="no worker"):
        lane.ask(request("x"), MODEL)
    redis.set(redis_keys.live_seen(QUEUE), "w", ex=60)
    with pytest.raises(LaneRefusedError, match="asleep"):
        lane.ask(request("x"), MODEL)
    redis.hset(old, mapping={"bkv_live": 1, "bkv_state": "loading 1 of 2 GB"})
    with pytest.raises(LaneRefusedError, match="loading"):
        lane.ask(request("x"), MODEL)
    redis.hset(old, "bkv_state", "")
    small = Lane(redis, max_waiting=1)
    small.ask(request("x"), MODEL)
    with pytest.raises(LaneRefusedError, match="too many"):
        small.ask(request("x"), MODEL)
    small.close()
    small, question = Lane(redis, max_waiting=1), Question(request("x"), MODEL)
    first, *others = small.ask_all([question, question, Question(request("x"), "other")])
    assert isinstance(first, Answer)
    assert [one.why for one in others if isinstance(one, LaneRefusedError)] == ["full", "nobody"]
    small.close()
    redis.delete(redis_keys.live_seen(QUEUE))
    with pytest.raises(LaneRefusedError, match="no worker"):  # it lacks the ability
        lane.ask(request("x", tools=[{}]), MODEL)
    assert redis.llen(redis_keys.live(QUEUE)) == 0


def test_a_worker_that_stops_ends_what_it_began(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """A warm stop lets live rows end; the exit code is 0."""
    plan: dict[str, object] = {"step_seconds": 0.02}
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=plan)) as (worker,):
        answer = asked(lane, "slow:30 x")
        assert answer.next(10)
        worker.process.send_signal(signal.SIGTERM)
        assert "".join(answer).endswith("30 x")
        assert worker.wait() == 0


def test_an_outage_loses_no_piece(redis_url: str, redis: Redis, tmp_path: Path) -> None:
    """All connections are cut several times in the middle of an answer: it comes whole."""
    lane, plan = Lane(redis), {"step_seconds": 0.02}
    text = "slow:60 " + "abcdefghij" * 5
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=dict(plan))):
        answer = asked(lane, text)
        pieces = [answer.next(10)]
        for _ in range(4):
            for kind in ("normal", "pubsub"):
                redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            time.sleep(0.05)
        pieces += list(answer)
        assert "".join(filter(None, pieces)) == f"echo {text}"
    lane.close()


def test_a_row_for_an_adapter_has_its_turn(
    redis_url: str, redis: Redis, lane: Lane, tmp_path: Path
) -> None:
    """A live row of another queue goes before the jobs of this one: the adapter is exchanged."""
    write_files(tmp_path / "a")
    settings = {"ADAPTERS": f"a={tmp_path / 'a'}", "SLOTS": 2, "PREFETCH": 2}
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(WorkerProcess(redis_url, tmp_path / "log", plan=plan, settings=settings)):
        list(asked(lane, "first"))
        batch = submit(redis, ["slow:20 row"] * 30)
        wait_until(lambda: num_ended(redis, batch) > 0)
        answer = lane.ask(request("second"), f"{MODEL}@a")
        list(answer)
        assert answer.result is not None
        assert answer.result.text == "echo of a second" and answer.result.model == f"{MODEL}@a"
        assert num_ended(redis, batch) < 30
        wait_until(lambda: num_ended(redis, batch) == 30)
        assert_reconciled(redis, batch)
