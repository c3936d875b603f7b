"""The state that session and job puller share: rows until stored; whether more may start."""

from __future__ import annotations

import time

from batchkv_producer.wire.job import Request, Usage, decode_result, encode_job
from batchkv_producer.wire.transitions import JobLease, Pulled
from batchkv_worker.events import Completed, Work
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest

REQUEST = Request(custom_id="c1", endpoint="completion", prompt="hi")


def make(*job_ids: str, data: bytes | None = None) -> WorkerState:
    """A state whose backlog has these jobs."""
    state = WorkerState(InFlight("m", "w"), StopRequest(lambda: None))
    blob = encode_job(REQUEST) if data is None else data
    state.in_flight.hold([Pulled(JobLease(job_id, "e"), blob) for job_id in job_ids])
    return state


def test_nothing_starts_before_engine_and_queue_are_known() -> None:
    """Jobs are taken once the engine is ready and RQ is not suspended, until one thing is wrong."""
    state = make()
    assert not state.may_start
    state.is_ready = True
    assert not state.may_start
    state.is_suspended = False
    assert state.may_start
    for name, value in (("engine_fault", "it hung"), ("is_outdated", True), ("is_ready", False)):
        before = getattr(state, name)
        setattr(state, name, value)
        assert not state.may_start
        setattr(state, name, before)
    state.stop.on_signal()
    assert not state.may_start


def test_a_row_is_held_until_its_result_is_stored() -> None:
    """Redis counts a job as ours after its end; what ends meanwhile is not taken for stored."""
    state = make("a", "b")
    assert state.start(2) == [Work("a", REQUEST), Work("b", REQUEST)]
    state.end(Completed("a", "text", "stop", Usage(1, 1, 0)))
    group = state.results[:]
    state.end(Completed("b", "text", "stop", Usage(1, 1, 0)))
    state.end(Completed("b", "again", "stop", Usage(1, 1, 0)))
    state.note_stored(len(group))
    assert [result.lease.job_id for result in state.results] == ["b"]
    assert not state.in_flight and state.holds_jobs and not state.is_empty
    state.note_stored(1)
    assert not state.holds_jobs and state.is_empty


def test_a_row_that_cannot_start_becomes_a_result() -> None:
    """Data that cannot be read is a failed row, and no work for the engine."""
    state = make("a", data=b"garbage")
    assert state.start(1) == []
    assert [result.outcome for result in state.results] == ["failed"]


def test_canceled_rows_wait_until_redis_has_them() -> None:
    """Only rows that are held are canceled; a worker with canceled rows has not finished."""
    state = make("a")
    assert state.cancel(["other", "a"]) == ["a"]
    [(job_id, result)] = state.canceled
    assert (job_id, decode_result(result).outcome) == ("a", "canceled")
    assert not state.holds_jobs and not state.is_empty
    state.note_canceled(1)
    assert state.is_empty


def test_late_rows_end_with_a_result() -> None:
    """The engine is told to drop rows that are past their timeout; their error is stored."""
    state = make()
    state.in_flight.hold([Pulled(JobLease("a", "e"), encode_job(REQUEST), timeout_seconds=10)])
    state.start(1)
    assert state.expire(time.monotonic() + 9) == []
    assert state.expire(time.monotonic() + 11) == ["a"]
    assert [result.outcome for result in state.results] == ["failed"]
