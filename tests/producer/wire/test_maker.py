"""Rows go to workers that compute with what their batch says, and can do what a row needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, encode_job, encode_result
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transitions import JobResult, Pulled, Run, Transitions

QUEUE = redis_keys.queue_name("some/model")
OURS = Maker("a" * 32, "affine8", "half")
A, B, C = "a" * 16, "b" * 16, "c" * 16


class Desk:
    """Batches in one queue, and shorthands."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection
        self.moves = Transitions(connection)

    def add(
        self,
        batch: str,
        count: int,
        maker: Maker | None = None,
        *,
        mixed: bool = False,
        needs: str = "",
        priority: str = "",
    ) -> None:
        fields: dict[str, str | int] = {"digest": batch * 4, "model": "some/model"}
        fields |= {"queue": QUEUE, "total": count, "num_chunks": 1}
        fields |= {"priority": priority} if priority else {}
        names = ("fingerprint", "scheme", "dtype")
        made = dict(zip(names, maker.values(), strict=True)) if maker else {}
        made = {name: value for name, value in made.items() if value}
        assert self.moves.create(batch, fields, made, is_mixed=mixed).fits
        jobs = [(line, row(line), 0) for line in range(1, count + 1)]
        wanted = dict.fromkeys(range(1, count + 1), needs) if needs else {}
        self.moves.submit(batch, QUEUE, 0, jobs, [], 60, wanted)

    def pull(self, count: int = 100, maker: Maker = OURS, abilities: tuple[str, ...] = ()) -> Run:
        return self.moves.pull_run(QUEUE, "w", count, 60, maker=maker, abilities=abilities)

    def finish(self, jobs: list[Pulled], maker: Maker = OURS) -> list[str]:
        result = encode_result(Result("x", "completion", "ok", text="t"))
        return self.moves.finish(
            QUEUE, "w", [JobResult(j.lease, "ok", result) for j in jobs], maker=maker
        )

    def said(self, batch: str) -> list[bytes | None]:
        found: list[bytes | None] = self.connection.hmget(
            redis_keys.batch(batch), "fingerprint", "scheme", "dtype"
        )
        return found

    def waiting(self, priority: str = "normal") -> list[str]:
        raw = self.connection.lrange(redis_keys.waiting(QUEUE, priority), 0, -1)
        return [entry.decode() for entry in raw]


@pytest.fixture
def desk(redis_connection: Redis) -> Desk:
    return Desk(redis_connection)


def row(line: int) -> bytes:
    return encode_job(Request(f"c{line}", "completion", prompt="p"))


def ids(run: Run) -> list[str]:
    return [job.lease.job_id for job in run.jobs]


def test_the_first_pull_writes_what_a_batch_is_computed_with(desk: Desk) -> None:
    """What the submit did not know is the first worker's, and the next one's rows are its own."""
    desk.add(A, 2)
    assert desk.said(A) == [None, None, None]
    assert len(ids(desk.pull(1))) == 1
    assert desk.said(A) == [value.encode() for value in OURS.values()]
    assert not ids(desk.pull(maker=replace(OURS, scheme="float")))
    assert len(ids(desk.pull())) == 1


def test_what_the_submit_said_is_not_overwritten(desk: Desk) -> None:
    """A worker that fits adds only what was not known."""
    desk.add(A, 1, Maker(OURS.fingerprint))
    desk.pull()
    assert desk.said(A) == [value.encode() for value in OURS.values()]


@pytest.mark.parametrize("name", ["fingerprint", "scheme", "dtype"])
def test_a_row_of_another_making_is_passed_by(desk: Desk, name: str) -> None:
    """Whatever differs, the row waits for another worker, where it stood; nothing is written."""
    desk.add(A, 3, replace(OURS, **{name: "another"}))
    run = desk.pull()
    assert (run.jobs, run.unfit, run.has_more) == ([], (0, 3, 0), False)
    assert desk.waiting() == [f"{A}-{line}" for line in (1, 2, 3)]


def test_who_does_not_know_its_weights_takes_no_rows_of_known_ones(desk: Desk) -> None:
    """An answer that cannot be told from another model's is none."""
    desk.add(A, 1, OURS)
    assert not ids(desk.pull(maker=Maker("", "affine8", "half")))


def test_many_unfit_rows_in_front_keep_nobody_from_the_fit_ones(desk: Desk) -> None:
    """Behind 25,000 rows for others a fit one comes after three looks, and all keep their order."""
    desk.add(A, 25_000, replace(OURS, fingerprint="b" * 32))
    desk.add(B, 3)
    looks = [desk.pull() for _ in range(3)]
    assert [ids(run) for run in looks] == [[], [], [f"{B}-{line}" for line in (1, 2, 3)]]
    assert [run.has_more for run in looks[:2]] == [True, True]
    assert desk.waiting() == [f"{A}-{line}" for line in range(1, 25_001)]


def test_many_unfit_urgent_rows_keep_nobody_from_what_stands_behind_lower_ones(desk: Desk) -> None:
    """Each list has looks of its own, so that one that is long does not use up the others'."""
    others = replace(OURS, fingerprint="b" * 32)
    desk.add(A, 12_000, others, priority="high")
    desk.add(B, 3)
    desk.add(C, 1, others)
    key = redis_keys.queue(QUEUE)
    desk.connection.lmove(key, key, "RIGHT", "LEFT")
    run = desk.pull()
    assert ids(run) == [f"{B}-{line}" for line in (1, 2, 3)]
    assert (run.unfit, run.has_more) == ((10_000, 1, 0), True)


def test_many_urgent_rows_that_need_more_keep_nobody_from_others(desk: Desk) -> None:
    """They are looked at part by part, and the lists behind them all the same."""
    desk.add(A, 2500, needs="dance", priority="high")
    desk.add(C, 1500, needs="dance")
    looks = [desk.pull(abilities=("sing",)) for _ in range(3)]
    assert [run.unfit for run in looks] == [(1000, 1000, 0)] * 3
    assert [run.has_more for run in looks] == [True] * 3
    desk.add(B, 1, priority="low")
    assert ids(desk.pull(abilities=("sing",))) == [f"{B}-1"]


def test_fit_and_unfit_rows_in_turns_are_told_apart(desk: Desk) -> None:
    """The fit rows come out in their order, the others stay in theirs."""
    desk.add(A, 6, replace(OURS, scheme="float"))
    desk.add(B, 6)
    key = redis_keys.queue(QUEUE)
    desk.connection.delete(key)
    mixed = [f"{batch}-{line}" for line in range(1, 7) for batch in (A, B)]
    desk.connection.rpush(key, *mixed)
    assert ids(desk.pull(4)) == [f"{B}-{line}" for line in (1, 2, 3, 4)]
    assert ids(desk.pull(4)) == [f"{B}-{line}" for line in (5, 6)]
    assert sorted(desk.waiting()) == [f"{A}-{line}" for line in range(1, 7)]


def test_unfit_rows_of_a_high_priority_do_not_hold_up_lower_ones(desk: Desk) -> None:
    """Who cannot compute the urgent rows goes on with the others."""
    desk.add(A, 2, replace(OURS, scheme="float"), priority="high")
    desk.add(B, 2, priority="low")
    run = desk.pull()
    assert ids(run) == [f"{B}-1", f"{B}-2"]
    assert (run.unfit, {job.rank for job in run.jobs}) == ((2, 0, 0), {2})
    assert desk.waiting("high") == [f"{A}-1", f"{A}-2"]


def test_a_mixed_batch_takes_any_scheme_but_one_model(desk: Desk) -> None:
    """Several schemes and dtypes knowingly; other weights never."""
    desk.add(A, 3, Maker(OURS.fingerprint), mixed=True)
    assert len(ids(desk.pull(1, Maker(OURS.fingerprint, "float", "float32")))) == 1
    assert len(ids(desk.pull(1))) == 1
    assert desk.said(A) == [OURS.fingerprint.encode(), None, None]
    assert not ids(desk.pull(1, replace(OURS, fingerprint="b" * 32)))


def test_finish_looks_again(desk: Desk) -> None:
    """A result of another making is not stored: the row waits again, and no death is counted."""
    desk.add(A, 2)
    first, second = desk.pull().jobs
    desk.connection.hset(redis_keys.batch(A), "scheme", "float")
    assert desk.finish([first]) == ["unfit"]
    assert desk.finish([second], replace(OURS, scheme="float")) == ["ok"]
    assert desk.waiting() == [f"{A}-1"]
    job = desk.connection.hgetall(redis_keys.job(f"{A}-1"))
    assert job[b"status"] == b"queued" and b"bkv_deaths" not in job and b"bkv_exec" not in job
    assert desk.connection.hmget(redis_keys.batch(A), "ok", "running") == [b"1", b"0"]
    again = desk.pull(maker=replace(OURS, scheme="float")).jobs
    assert desk.finish(again, replace(OURS, scheme="float")) == ["ok"]


def test_of_jobs_without_a_batch_only_foreign_ones_are_taken(desk: Desk) -> None:
    """A foreign id in the queue says nothing of weights; a row whose batch is gone is dropped."""
    desk.connection.hset(redis_keys.job("foreign"), mapping={"status": "queued", "data": b"x"})
    desk.connection.hset(redis_keys.job(f"{B}-1"), mapping={"status": "queued", "data": b"x"})
    desk.connection.rpush(redis_keys.queue(QUEUE), "foreign", f"{B}-1")
    assert ids(desk.pull()) == ["foreign"]
    assert not desk.connection.exists(redis_keys.job(f"{B}-1"))
    assert desk.said(B) == [None, None, None]


def test_rows_that_need_more_wait_for_workers_that_can(desk: Desk) -> None:
    """A worker that lacks one of the abilities passes the row by, and takes what stands behind."""
    desk.add(A, 2, needs="sing dance")
    desk.add(B, 1)
    run = desk.pull(abilities=("sing",))
    assert (ids(run), run.unfit) == ([f"{B}-1"], (0, 2, 0))
    assert not ids(desk.pull(abilities=("sing", "dancer")))
    assert ids(desk.pull(abilities=("dance", "sing"))) == [f"{A}-1", f"{A}-2"]


def test_a_batch_is_joined_only_by_what_it_is_computed_with(desk: Desk) -> None:
    """What differs does not fit, and changes nothing; what is new is added."""
    desk.add(A, 1, Maker("", "affine8"))
    for made, mixed, fits in (
        ({"scheme": "float"}, False, False),
        ({"fingerprint": "f" * 32}, False, True),
        ({"fingerprint": "e" * 32}, False, False),
        ({}, False, True),
        ({"scheme": "float"}, True, True),
        ({"fingerprint": "e" * 32}, True, False),
        ({"scheme": "affine8"}, False, False),
    ):
        assert desk.moves.create(A, {"total": 9}, made, is_mixed=mixed).fits is fits, (made, mixed)
    assert desk.said(A) == [b"f" * 32, b"affine8", None]
    assert desk.connection.hget(redis_keys.batch(A), "total") == b"1"
